/* SPDX-License-Identifier: Apache-2.0 */
/*
 * libioctls.so: loaded before a program, writes which ioctls it makes of NVIDIA's device files between
 * two steps, and can refuse those that take memory, as a fence in the kernel would. It reads nothing that
 * the program's own ioctls do not carry.
 *
 *   IOCTLS_OUT=FILE      lines: STEP PATH NUMBER CLASS COUNT BYTES; CLASS and BYTES of what allocates, else 0
 *   IOCTLS_PATHS=PREFIX  /dev/nvidia by default
 *   IOCTLS_DENY=ERRNO    what takes memory in the step that IOCTLS_DENY_STEP names fails so; "status": the
 *                        driver's own word for it, in the request
 */
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/syscall.h>
#include <unistd.h>

/* Of the open driver's headers: escapes, and the class of memory on the device. */
enum { ESC_ALLOC_MEMORY = 0x27, ESC_RM_ALLOC = 0x2b, ESC_VID_HEAP = 0x4a, ESC_XFER = 0xd3, CLASS_LOCAL_USER = 0x40 };
enum { STATUS_NO_MEMORY = 0x51 };

struct seen {
	char step[32], path[64];
	unsigned int number, class;
	unsigned long count;
	uint64_t bytes;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct seen seen[2048];
static size_t seen_count;
static char step_now[32] = "before";

static void write_out(void)
{
	const char *path = getenv("IOCTLS_OUT");
	int fd = path ? open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644) : -1;
	if (fd < 0)
		return;
	for (size_t i = 0; i < seen_count; i++)
		dprintf(fd, "%s %s %#x %#x %lu %llu\n", seen[i].step, seen[i].path, seen[i].number, seen[i].class, seen[i].count, (unsigned long long)seen[i].bytes);
	close(fd);
}

/* Called by the program between two things that it does. */
void ioctls_step(const char *name);
void ioctls_step(const char *name)
{
	pthread_mutex_lock(&lock);
	/* Now, for the end may come without us. */
	write_out();
	snprintf(step_now, sizeof(step_now), "%s", name);
	pthread_mutex_unlock(&lock);
}

static void note(const char *path, unsigned int number, unsigned int class, uint64_t bytes)
{
	pthread_mutex_lock(&lock);
	size_t i = 0;
	while (i < seen_count && (strcmp(seen[i].step, step_now) != 0 || strcmp(seen[i].path, path) != 0 || seen[i].number != number || seen[i].class != class))
		i++;
	if (i < sizeof(seen) / sizeof(seen[0])) {
		if (i == seen_count) {
			seen_count++;
			snprintf(seen[i].step, sizeof(seen[i].step), "%s", step_now);
			snprintf(seen[i].path, sizeof(seen[i].path), "%s", path);
			seen[i].number = number;
			seen[i].class = class;
		}
		seen[i].count++;
		seen[i].bytes += bytes;
	}
	pthread_mutex_unlock(&lock);
}

static uint32_t word(const void *at, size_t offset)
{
	uint32_t v;
	memcpy(&v, (const char *)at + offset, sizeof(v));
	return v;
}

static uint64_t wide(const void *at, size_t offset)
{
	uint64_t v;
	memcpy(&v, (const char *)at + offset, sizeof(v));
	return v;
}

/* What a request allocates on the device, 0: nothing that we know. `status` is where the driver answers. */
static uint64_t takes(unsigned int number, size_t size, void *arg, unsigned int *class, size_t *status)
{
	*class = 0;
	*status = 0;
	if (!arg)
		return 0;
	if (number == ESC_RM_ALLOC && size >= 32) {
		*class = word(arg, 12);
		*status = size >= 48 ? 40 : 28;
		void *params = (void *)(uintptr_t)wide(arg, 16);
		/* On the device, unless its attributes say elsewhere or it is an address alone. */
		if (*class == CLASS_LOCAL_USER && params && (word(params, 24) >> 25 & 3) == 0 && !(word(params, 8) & 0x80000))
			return wide(params, 64);
	} else if (number == ESC_VID_HEAP && size >= 184) {
		*status = 20;
		uint32_t function = word(arg, 8);
		*class = function;
		if (function == 2 && !(word(arg, 52) & 0x80000))
			return wide(arg, 88);
	} else if (number == ESC_ALLOC_MEMORY && size >= 48) {
		*class = word(arg, 12);
		*status = 40;
		if (*class == CLASS_LOCAL_USER)
			return wide(arg, 32) + 1;
	}
	return 0;
}

int ioctl(int fd, unsigned long request, ...)
{
	va_list args;
	va_start(args, request);
	void *arg = va_arg(args, void *);
	va_end(args);
	char link[64], path[64];
	const char *prefix = getenv("IOCTLS_PATHS");
	if (!prefix)
		prefix = "/dev/nvidia";
	snprintf(link, sizeof(link), "/proc/self/fd/%d", fd);
	ssize_t n = readlink(link, path, sizeof(path) - 1);
	path[n > 0 ? n : 0] = 0;
	if (n <= 0 || strncmp(path, prefix, strlen(prefix)) != 0)
		return (int)syscall(SYS_ioctl, fd, request, arg);
	bool uvm = strstr(path, "uvm") != NULL;
	/* nvidia-uvm's numbers are whole, the others' are encoded. */
	unsigned int number = uvm ? (unsigned int)request : (unsigned int)_IOC_NR(request), class = 0;
	size_t size = _IOC_SIZE(request), status = 0;
	void *inner = arg;
	if (!uvm && number == ESC_XFER && arg) {
		number = word(arg, 0);
		size = word(arg, 4);
		inner = (void *)(uintptr_t)wide(arg, 8);
	}
	uint64_t bytes = uvm ? 0 : takes(number, size, inner, &class, &status);
	note(path, number, class, bytes);
	const char *deny = getenv("IOCTLS_DENY"), *when = getenv("IOCTLS_DENY_STEP");
	if (deny && bytes > 0 && when && strcmp(when, step_now) == 0) {
		if (strcmp(deny, "status") == 0) {
			uint32_t no = STATUS_NO_MEMORY;
			memcpy((char *)inner + status, &no, sizeof(no));
			return 0;
		}
		errno = atoi(deny);
		return -1;
	}
	return (int)syscall(SYS_ioctl, fd, request, arg);
}
