/* SPDX-License-Identifier: Apache-2.0 */
/* ioctl FILE KIND: one request of 64 MiB, as NVIDIA's driver is asked for them; prints the result, the
 * error, and the status that the request has then. */
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/ioctl.h>

static unsigned char params[128], request[184], outer[16];

static void put(unsigned char *at, uint64_t value, size_t bytes) { memcpy(at, &value, bytes); }

int main(int argc, char **argv)
{
	void (*step)(const char *) = (void (*)(const char *))(uintptr_t)dlsym(RTLD_DEFAULT, "ioctls_step");
	int fd = argc == 3 ? open(argv[1], O_RDWR) : -1;
	if (fd < 0 || !step)
		return 2;
	unsigned long size = 48, number = 0x2b, status = 40;
	void *arg = request;
	step("alloc");
	put(params + 64, 64 << 20, 8);
	put(request + 12, 0x40, 4);
	put(request + 16, (uintptr_t)params, 8);
	if (strcmp(argv[2], "elsewhere") == 0) {
		put(params + 24, 1u << 25, 4);
	} else if (strcmp(argv[2], "address") == 0) {
		put(params + 8, 0x80000, 4);
	} else if (strcmp(argv[2], "class") == 0) {
		put(request + 12, 0x3e, 4);
	} else if (strcmp(argv[2], "short") == 0) {
		size = 32;
		status = 28;
	} else if (strcmp(argv[2], "heap") == 0) {
		memset(request, 0, sizeof(request));
		size = 184;
		number = 0x4a;
		status = 20;
		put(request + 8, 2, 4);
		put(request + 88, 64 << 20, 8);
	} else if (strcmp(argv[2], "carried") == 0) {
		put(outer, number, 4);
		put(outer + 4, size, 4);
		put(outer + 8, (uintptr_t)request, 8);
		arg = outer;
		size = sizeof(outer);
		number = 0xd3;
	}
	int r = ioctl(fd, _IOC(_IOC_READ | _IOC_WRITE, 'F', number, size), arg);
	int error = r ? errno : 0;
	uint32_t word;
	memcpy(&word, request + status, sizeof(word));
	step("end");
	printf("%d %d %#x\n", r, error, word);
	return 0;
}
