/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What the shim adds to a cuMemAlloc and the cuMemFree of the same block, resolved as a program
 * does, by how many blocks and how many processes of the pod live. The baseline is the driver's own
 * functions in the same process.
 */
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../src/driver_api.h"
#include "bench.h"
#include "noop.h"

#define PAIRS 5000
#define SAMPLES 61

static void *symbol(void *library, const char *name)
{
	void *s = dlsym(library, name);
	if (s == NULL)
		bench_fail("no %s", name);
	return s;
}

static double pairs(fn_cuMemAlloc_v2 *alloc, fn_cuMemFree_v2 *free_it, size_t bytes)
{
	uint64_t begin = bench_now_ns();
	for (int i = 0; i < PAIRS; i++) {
		CUdeviceptr p;
		if (alloc(&p, bytes) != CUDA_SUCCESS || free_it(p) != CUDA_SUCCESS)
			bench_fail("refused");
	}
	return (double)(bench_now_ns() - begin) / PAIRS;
}

struct calls {
	fn_cuMemAlloc_v2 *alloc, *driver_alloc;
	fn_cuMemFree_v2 *free_it, *driver_free;
};

static void measure(const struct calls *c, const char *name, size_t bytes, const char *blocks, const char *slots)
{
	struct bench_row row = { .name = bench_name(name), .unit = "ns" };
	snprintf(row.params, sizeof row.params, "%s blocks, %s slot%s", blocks, slots, strcmp(slots, "1") == 0 ? "" : "s");
	for (int i = 0; i < SAMPLES; i++) {
		double baseline = pairs(c->driver_alloc, c->driver_free, bytes);
		bench_add(&row, baseline, pairs(c->alloc, c->free_it, bytes));
	}
	bench_print(&row);
}

static void measured(const char *slots)
{
	static const struct { const char *label; int blocks; } steps[] = {
		{ "10", 10 }, { "1k", 1000 }, { "100k", 100000 }, { "1M", 1000000 },
	};
	struct calls c;
	void *(*address)(const char *);
	int live = 0;
	CUcontext context;
	void *library = dlopen("libcuda.so.1", RTLD_NOW);
	if (library == NULL)
		bench_fail("%s", dlerror());
	*(void **)&address = symbol(library, "noop_address");
	*(void **)&c.alloc = symbol(library, "cuMemAlloc_v2");
	*(void **)&c.free_it = symbol(library, "cuMemFree_v2");
	*(void **)&c.driver_alloc = address("cuMemAlloc");
	*(void **)&c.driver_free = address("cuMemFree");
	if (c.alloc == c.driver_alloc || c.free_it == c.driver_free)
		bench_fail("the preload library is not in between");
	fn_cuDevicePrimaryCtxRetain *retain;
	*(void **)&retain = symbol(library, "cuDevicePrimaryCtxRetain");
	if (retain(&context, 0) != CUDA_SUCCESS)
		bench_fail("no context");
	for (unsigned i = 0; i < sizeof steps / sizeof steps[0]; i++) {
		for (; live < steps[i].blocks; live++) {
			CUdeviceptr p;
			if (c.alloc(&p, (size_t)4 << 20) != CUDA_SUCCESS)
				bench_fail("refused");
		}
		measure(&c, "shim.pair", (size_t)4 << 20, steps[i].label, slots);
		if (i == 0)
			measure(&c, "shim.small_pair", 512, steps[i].label, slots);
	}
}

int main(int argc, char **argv)
{
	static const unsigned slots[] = { 1, 16, 64 };
	if (argc == 3) {
		measured(argv[2]);
		return 0;
	}
	for (unsigned i = 0; i < sizeof slots / sizeof slots[0]; i++) {
		struct bench_pod pod;
		char text[16];
		bench_pod_start(&pod, slots[i]);
		snprintf(text, sizeof text, "%u", slots[i]);
		fputs(bench_rerun(pod.shim, argv[0], text), stdout);
		fflush(stdout);
		/* Measured on a slot, not on a shim that found no pages. */
		if (builder_ledger(&pod.pages)->high_slot != slots[i] || builder_slot(&pod.pages, slots[i] - 1)->allocs < 1000000)
			bench_fail("nothing was charged");
		bench_pod_stop(&pod);
	}
	if (bench_peer() != NULL)
		fputs(bench_rerun_peer(argv[0], "1"), stdout);
	return 0;
}
