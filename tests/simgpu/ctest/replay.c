/* SPDX-License-Identifier: Apache-2.0 */
/*
 * replay LIST [first|asked]: asks libcuda.so.1 what a recorded CUDA runtime asks, and prints a line
 * for each request: name, version, flags, result, symbolStatus, the exported symbol that was
 * answered, and the library that it is in; "-" for what there is not. The library is found as programs
 * find it. The requests go to cuGetProcAddress_v2 as dlsym finds it; with "asked" to the one that it
 * answers to the question for itself; with "first" to the first variant, which has no symbolStatus.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

int main(int argc, char **argv)
{
	int (*ask)(const char *, void **, int, uint64_t, int *), (*first)(const char *, void **, int, uint64_t) = NULL;
	const char *way = argc == 3 ? argv[2] : "";
	char line[512], name[256];
	unsigned long long flags;
	void *cuda, *f;
	int version;
	FILE *list;

	cuda = dlopen("libcuda.so.1", RTLD_NOW);
	ask = cuda ? (__typeof__(ask))dlsym(cuda, "cuGetProcAddress_v2") : NULL;
	list = argc > 1 ? fopen(argv[1], "r") : NULL;
	if (!ask || !list) {
		fprintf(stderr, "replay: no libcuda.so.1 (%s) or no list\n", cuda ? "without cuGetProcAddress_v2" : dlerror());
		return 2;
	}
	if (strcmp(way, "first") == 0) {
		first = (__typeof__(first))dlsym(cuda, "cuGetProcAddress");
	} else if (strcmp(way, "asked") == 0) {
		f = NULL;
		if (ask("cuGetProcAddress", &f, 12000, 0, NULL) != 0)
			f = NULL;
		ask = (__typeof__(ask))f;
	}
	if (!ask || (!first && strcmp(way, "first") == 0)) {
		fprintf(stderr, "replay: no cuGetProcAddress (%s)\n", way);
		return 2;
	}
	while (fgets(line, sizeof(line), list)) {
		int result, status = -1;
		Dl_info info = {0};

		if (line[0] == '#' || line[0] == '\n')
			continue;
		if (sscanf(line, "%255s %d %llu", name, &version, &flags) != 3) {
			fprintf(stderr, "replay: cannot read: %s", line);
			return 2;
		}
		f = &list;
		result = first ? first(name, &f, version, flags) : ask(name, &f, version, flags, &status);
		if (!f || !dladdr(f, &info) || info.dli_saddr != f)
			info.dli_sname = NULL;
		printf("%s %d %llu %d %d %s %s\n", name, version, flags, result, status,
		       info.dli_sname ? info.dli_sname : "-", info.dli_fname ? info.dli_fname : "-");
	}
	return 0;
}
