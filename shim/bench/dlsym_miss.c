/* SPDX-License-Identifier: Apache-2.0 */
/* What the shim adds to a dlsym that is none of its business. Two processes in turns, without
 * and with the shim: there is only one dlsym in a process. */
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "bench.h"

#define LOOKUPS 20000
#define SAMPLES 25

/* Those that C libraries and CUDA's own neighbours are asked for most. */
static const char *const names[] = { "malloc", "cublasCreate_v2", "curl_easy_init" };

static void measured(const char *name)
{
	void *library = dlopen("libc.so.6", RTLD_NOW), *found = NULL;
	if (library == NULL)
		bench_fail("%s", dlerror());
	uint64_t begin = bench_now_ns();
	for (int i = 0; i < LOOKUPS; i++)
		found = dlsym(library, name);
	printf("%.3f\n", (double)(bench_now_ns() - begin) / LOOKUPS);
	if ((found != NULL) != (strcmp(name, "malloc") == 0))
		bench_fail("dlsym of %s is wrong", name);
}

int main(int argc, char **argv)
{
	struct bench_pod pod;
	if (argc == 3) {
		measured(argv[2]);
		return 0;
	}
	bench_pod_start(&pod, 1);
	for (unsigned n = 0; n < sizeof names / sizeof names[0]; n++) {
		struct bench_row row = { .name = "shim.dlsym_miss", .unit = "ns" };
		snprintf(row.params, sizeof row.params, "%s", names[n]);
		for (int i = 0; i < SAMPLES; i++) {
			double baseline = atof(bench_rerun(NULL, argv[0], names[n]));
			bench_add(&row, baseline, atof(bench_rerun(pod.shim, argv[0], names[n])));
		}
		bench_print(&row);
	}
	bench_pod_stop(&pod);
	return 0;
}
