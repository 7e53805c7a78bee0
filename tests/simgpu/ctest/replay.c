/* SPDX-License-Identifier: Apache-2.0 */
/*
 * replay LIST: asks libcuda.so.1 what a recorded CUDA runtime asks, and prints a line for
 * each request: name, version, flags, result, symbolStatus, and the exported symbol that was
 * answered, or "-". The library is found as programs find it.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

int main(int argc, char **argv)
{
	int (*ask)(const char *, void **, int, uint64_t, int *);
	char line[512], name[256];
	unsigned long long flags;
	void *cuda, *f;
	int version;
	FILE *list;

	cuda = dlopen("libcuda.so.1", RTLD_NOW);
	ask = cuda ? (__typeof__(ask))dlsym(cuda, "cuGetProcAddress_v2") : NULL;
	list = argc == 2 ? fopen(argv[1], "r") : NULL;
	if (!ask || !list) {
		fprintf(stderr, "replay: no libcuda.so.1 (%s) or no list\n", cuda ? "without cuGetProcAddress_v2" : dlerror());
		return 2;
	}
	while (fgets(line, sizeof(line), list)) {
		int result, status = -1;
		Dl_info info;

		if (line[0] == '#' || line[0] == '\n')
			continue;
		if (sscanf(line, "%255s %d %llu", name, &version, &flags) != 3) {
			fprintf(stderr, "replay: cannot read: %s", line);
			return 2;
		}
		f = &list;
		result = ask(name, &f, version, flags, &status);
		printf("%s %d %llu %d %d %s\n", name, version, flags, result, status,
		       f && dladdr(f, &info) && info.dli_saddr == f ? info.dli_sname : "-");
	}
	return 0;
}
