/* SPDX-License-Identifier: Apache-2.0 */
/* What the shim adds to a launch, of a kernel and of a graph, through the functions that
 * cuGetProcAddress gives: without memory.high, and below it. */
#include <dlfcn.h>
#include <stdio.h>

#include "../src/driver_api.h"
#include "bench.h"
#include "noop.h"

#define LAUNCHES 200000
#define SAMPLES 41

typedef CUresult launch_function(void *, unsigned int, unsigned int, unsigned int, unsigned int, unsigned int, unsigned int,
				 unsigned int, void *, void **, void **);

typedef CUresult graph_function(CUgraphExec, CUstream);

static double launches(launch_function *launch)
{
	uint64_t begin = bench_now_ns();
	for (int i = 0; i < LAUNCHES; i++)
		if (launch(NULL, 1, 1, 1, 1, 1, 1, 0, NULL, NULL, NULL) != CUDA_SUCCESS)
			bench_fail("launch failed");
	return (double)(bench_now_ns() - begin) / LAUNCHES;
}

static double graphs(graph_function *launch)
{
	uint64_t begin = bench_now_ns();
	for (int i = 0; i < LAUNCHES; i++)
		if (launch(NULL, NULL) != CUDA_SUCCESS)
			bench_fail("launch failed");
	return (double)(bench_now_ns() - begin) / LAUNCHES;
}

static void *found(fn_cuGetProcAddress_v2 *get, const char *name)
{
	void *function;
	int status;
	if (get(name, &function, 12000, 0, &status) != CUDA_SUCCESS || function == NULL)
		bench_fail("no %s", name);
	return function;
}

static void measured(const char *limits)
{
	static struct bench_row kernel, graph;
	kernel.name = graph.name = bench_name("shim.launch");
	kernel.unit = graph.unit = "ns";
	snprintf(kernel.params, sizeof kernel.params, "kernel, %s", limits);
	snprintf(graph.params, sizeof graph.params, "graph, %s", limits);
	fn_cuGetProcAddress_v2 *get;
	void *(*address)(const char *);
	launch_function *launch, *driver_launch;
	graph_function *run, *driver_run;
	fn_cuMemAlloc_v2 *alloc;
	CUdeviceptr p;
	void *library = dlopen("libcuda.so.1", RTLD_NOW);
	if (library == NULL)
		bench_fail("%s", dlerror());
	*(void **)&get = dlsym(library, "cuGetProcAddress_v2");
	*(void **)&address = dlsym(library, "noop_address");
	if (get == NULL || address == NULL)
		bench_fail("not the measurement's driver");
	*(void **)&driver_launch = address("cuLaunchKernel");
	*(void **)&driver_run = address("cuGraphLaunch");
	*(void **)&launch = found(get, "cuLaunchKernel");
	*(void **)&run = found(get, "cuGraphLaunch");
	*(void **)&alloc = found(get, "cuMemAlloc");
	if (alloc(&p, 4096) != CUDA_SUCCESS || (void *)(uintptr_t)alloc == address("cuMemAlloc"))
		bench_fail("the preload library is not in between");
	for (int i = 0; i < SAMPLES; i++) {
		double baseline = launches(driver_launch);
		bench_add(&kernel, baseline, launches(launch));
		baseline = graphs(driver_run);
		bench_add(&graph, baseline, graphs(run));
	}
	bench_print(&kernel);
	bench_print(&graph);
}

int main(int argc, char **argv)
{
	struct bench_pod pod;
	if (argc > 1) {
		measured(argv[1]);
		return 0;
	}
	bench_pod_start(&pod, 1);
	fputs(bench_rerun(pod.shim, "no memory.high", NULL), stdout);
	struct gpufence_limits_gpu g = builder_gpu(0);
	g.high_bytes = UINT64_C(1) << 30;
	builder_publish(&pod.pages, &g, 1);
	fputs(bench_rerun(pod.shim, "below memory.high", NULL), stdout);
	bench_pod_stop(&pod);
	if (bench_peer() != NULL)
		fputs(bench_rerun_peer("no memory.high", NULL), stdout);
	return 0;
}
