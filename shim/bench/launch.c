/* SPDX-License-Identifier: Apache-2.0 */
/* What the shim adds to a kernel launch through the function that cuGetProcAddress gives. */
#include <dlfcn.h>
#include <stdio.h>

#include "../src/driver_api.h"
#include "bench.h"
#include "noop.h"

#define LAUNCHES 200000
#define SAMPLES 41

typedef CUresult launch_function(void *, unsigned int, unsigned int, unsigned int, unsigned int, unsigned int, unsigned int,
				 unsigned int, void *, void **, void **);

static double launches(launch_function *launch)
{
	uint64_t begin = bench_now_ns();
	for (int i = 0; i < LAUNCHES; i++)
		if (launch(NULL, 1, 1, 1, 1, 1, 1, 0, NULL, NULL, NULL) != CUDA_SUCCESS)
			bench_fail("launch failed");
	return (double)(bench_now_ns() - begin) / LAUNCHES;
}

static void measured(void)
{
	struct bench_row row = { .name = bench_name("shim.launch"), .unit = "ns" };
	fn_cuGetProcAddress_v2 *get;
	void *(*address)(const char *);
	launch_function *launch, *driver_launch;
	fn_cuMemAlloc_v2 *alloc;
	int status;
	CUdeviceptr p;
	void *library = dlopen("libcuda.so.1", RTLD_NOW);
	if (library == NULL)
		bench_fail("%s", dlerror());
	*(void **)&get = dlsym(library, "cuGetProcAddress_v2");
	*(void **)&address = dlsym(library, "noop_address");
	if (get == NULL || address == NULL)
		bench_fail("not the measurement's driver");
	*(void **)&driver_launch = address("cuLaunchKernel");
	if (get("cuLaunchKernel", (void **)&launch, 12000, 0, &status) != CUDA_SUCCESS || launch == NULL)
		bench_fail("no cuLaunchKernel");
	if (get("cuMemAlloc", (void **)&alloc, 12000, 0, &status) != CUDA_SUCCESS || alloc == NULL ||
	    alloc(&p, 4096) != CUDA_SUCCESS || (void *)(uintptr_t)alloc == address("cuMemAlloc"))
		bench_fail("the preload library is not in between");
	for (int i = 0; i < SAMPLES; i++) {
		double baseline = launches(driver_launch);
		bench_add(&row, baseline, launches(launch));
	}
	bench_print(&row);
}

int main(int argc, char **argv)
{
	struct bench_pod pod;
	if (argc > 1) {
		measured();
		return 0;
	}
	bench_pod_start(&pod, 1);
	fputs(bench_rerun(pod.shim, argv[0], NULL), stdout);
	bench_pod_stop(&pod);
	if (bench_peer() != NULL)
		fputs(bench_rerun_peer(argv[0], NULL), stdout);
	return 0;
}
