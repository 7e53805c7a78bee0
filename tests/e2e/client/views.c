/* SPDX-License-Identifier: Apache-2.0 */
/*
 * views: a CUDA program that tells what it is shown of its GPU, by every way that there is, and how
 * long its launches take. It reads lines, and answers each with one of JSON.
 *
 *   context              on the first GPU
 *   alloc M              M MiB
 *   free                 the newest block
 *   launch VARIANT N     N empty kernels by one variant of the calls, and how long that took
 *   views                memory, the process lists, the instance
 *   read FILE            its text
 *   exit CODE
 */
#include "../../clients/src/report.h"
#include "../../simgpu/libcuda/cuda_abi.h"
#include "../../simgpu/libnvml/nvml_abi.h"

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define MIB ((size_t)1 << 20)
#define ROWS 64

static void *cuda, *nvml;
static CUdevice device;
static CUcontext context;
static CUfunction kernel;
static CUgraphExec graph;
static CUdeviceptr blocks[64];
static size_t count;
static char why[256];

static void *find(void *library, const char *name)
{
	void *f = library ? dlsym(library, name) : NULL;

	if (!f) {
		snprintf(why, sizeof(why), "no %s", name);
		fprintf(stderr, "views: no %s\n", name);
		exit(4);
	}
	return f;
}

/* Calls a function by its type, and notes why it failed. */
#define CALL(library, symbol, types, ...) \
	check(#symbol, ((int(*) types)(uintptr_t)find(library, #symbol))(__VA_ARGS__))

static bool check(const char *name, int result)
{
	if (result != 0 && !why[0])
		snprintf(why, sizeof(why), "%s gives %d", name, result);
	return result == 0;
}

static void answer(struct report *r)
{
	if (why[0])
		report_string(r, "why", why);
	report_end(r);
}

static void simple(const char *op)
{
	struct report r;

	report_begin(&r, op, !why[0]);
	answer(&r);
}

static void do_context(void)
{
	CUmodule module;
	CUgraph empty;

	CALL(cuda, cuInit, (unsigned int), 0);
	CALL(cuda, cuDeviceGet, (CUdevice *, int), &device, 0);
	CALL(cuda, cuCtxCreate_v2, (CUcontext *, unsigned int, CUdevice), &context, 0, device);
	if (!why[0])
		CALL(cuda, cuModuleLoadData, (CUmodule *, const void *), &module, "// simgpu: bytes=4KiB\n");
	if (!why[0])
		CALL(cuda, cuModuleGetFunction, (CUfunction *, CUmodule, const char *), &kernel, module, "nothing");
	if (!why[0] && CALL(cuda, cuGraphCreate, (CUgraph *, unsigned int), &empty, 0))
		CALL(cuda, cuGraphInstantiateWithFlags, (CUgraphExec *, CUgraph, unsigned long long), &graph, empty, 0);
	simple("context");
}

typedef CUresult launch_function(CUfunction, unsigned int, unsigned int, unsigned int, unsigned int, unsigned int, unsigned int,
				 unsigned int, CUstream, void **, void **);
typedef CUresult cooperative_function(CUfunction, unsigned int, unsigned int, unsigned int, unsigned int, unsigned int, unsigned int,
				      unsigned int, CUstream, void **);
typedef CUresult config_function(const CUlaunchConfig *, CUfunction, void **, void **);
typedef CUresult graph_function(CUgraphExec, CUstream);

static void do_launch(const char *variant, unsigned int n)
{
	CUlaunchConfig config = { .gridDimX = 1, .gridDimY = 1, .gridDimZ = 1, .blockDimX = 1, .blockDimY = 1, .blockDimZ = 1 };
	void *f = find(cuda, variant);
	struct report r;
	uint64_t begin = report_now_ns();

	for (unsigned int i = 0; i < n && !why[0]; i++) {
		CUresult ret;

		if (strncmp(variant, "cuLaunchKernelEx", 16) == 0)
			ret = ((config_function *)(uintptr_t)f)(&config, kernel, NULL, NULL);
		else if (strncmp(variant, "cuLaunchKernel", 14) == 0)
			ret = ((launch_function *)(uintptr_t)f)(kernel, 1, 1, 1, 1, 1, 1, 0, NULL, NULL, NULL);
		else if (strncmp(variant, "cuLaunchCooperativeKernel", 25) == 0)
			ret = ((cooperative_function *)(uintptr_t)f)(kernel, 1, 1, 1, 1, 1, 1, 0, NULL, NULL);
		else
			ret = ((graph_function *)(uintptr_t)f)(graph, NULL);
		check(variant, ret);
	}
	report_begin(&r, "launch", !why[0]);
	report_u64(&r, "took_ns", report_now_ns() - begin);
	answer(&r);
}

/* The same of the list by mode: "Compute_detail". */
static void detail_list(struct report *r, const char *kind, unsigned int mode, nvml_device of)
{
	struct nvml_process_detail rows[ROWS];
	struct nvml_process_detail_list list = { NVML_PROCESS_DETAIL_LIST_V1, mode, ROWS, rows };
	char name[32], text[256] = "";
	size_t used = 0;

	int ret = ((int (*)(nvml_device, struct nvml_process_detail_list *))(uintptr_t)find(nvml, "nvmlDeviceGetRunningProcessDetailList"))(of, &list);
	if (ret != NVML_OK)
		snprintf(text, sizeof(text), "error %d", ret);
	for (unsigned int i = 0; ret == NVML_OK && i < list.count; i++)
		used += (size_t)snprintf(text + used, sizeof(text) - used, "%s%u", i ? " " : "", rows[i].pid);
	snprintf(name, sizeof(name), "%s_detail", kind);
	report_string(r, name, text);
}

/* Pids of one list, "error" and its number: "Compute_v2". */
static void list(struct report *r, const char *kind, const char *version, nvml_device of)
{
	union {
		struct nvml_process_v1 v1[ROWS];
		struct nvml_process_v2 v2[ROWS];
	} rows;
	char symbol[80], name[32], text[256] = "";
	unsigned int n = ROWS;
	size_t used = 0;

	snprintf(symbol, sizeof(symbol), "nvmlDeviceGet%sRunningProcesses%s", kind, version);
	int ret = ((int (*)(nvml_device, unsigned int *, void *))(uintptr_t)find(nvml, symbol))(of, &n, &rows);
	if (ret != NVML_OK)
		snprintf(text, sizeof(text), "error %d", ret);
	for (unsigned int i = 0; ret == NVML_OK && i < n; i++)
		used += (size_t)snprintf(text + used, sizeof(text) - used, "%s%u", i ? " " : "", *version ? rows.v2[i].pid : rows.v1[i].pid);
	snprintf(name, sizeof(name), "%s%s", kind, version);
	report_string(r, name, text);
}

static void memory(struct report *r, const char *of, nvml_device d)
{
	struct nvml_memory m;
	struct nvml_memory_v2 m2 = { .version = NVML_MEMORY_V2 };
	char name[32];
#define SAY(field, value)                                         \
	do {                                                      \
		snprintf(name, sizeof(name), "%s_%s", of, field); \
		report_u64(r, name, value);                       \
	} while (0)

	if (CALL(nvml, nvmlDeviceGetMemoryInfo, (nvml_device, struct nvml_memory *), d, &m)) {
		SAY("total", m.total);
		SAY("free", m.free);
		SAY("used", m.used);
	}
	if (CALL(nvml, nvmlDeviceGetMemoryInfo_v2, (nvml_device, struct nvml_memory_v2 *), d, &m2)) {
		SAY("total_v2", m2.total);
		SAY("free_v2", m2.free);
		SAY("used_v2", m2.used);
		SAY("reserved_v2", m2.reserved);
	}
}

static void do_views(void)
{
	static const char *const kinds[] = { "Compute", "Graphics", "MPSCompute" }, *const versions[] = { "", "_v2", "_v3" };
	size_t free_bytes = 0, total_bytes = 0, device_bytes = 0;
	CUuuid uuid;
	char text[48];
	nvml_device d = NULL, at;
	unsigned int instances = 0;
	bool mig = false;
	struct report r;

	CALL(cuda, cuMemGetInfo_v2, (size_t *, size_t *), &free_bytes, &total_bytes);
	CALL(cuda, cuDeviceTotalMem_v2, (size_t *, CUdevice), &device_bytes, device);
	CALL(cuda, cuDeviceGetUuid_v2, (CUuuid *, CUdevice), &uuid, device);
	CALL(nvml, nvmlInit_v2, (void));
	size_t n = 4;
	for (int i = 0; i < 16; i++)
		n += (size_t)snprintf(text + n, sizeof(text) - n, "%s%02x", i == 4 || i == 6 || i == 8 || i == 10 ? "-" : "", (unsigned char)uuid.bytes[i]);
	/* A GPU, or an instance of one. */
	memcpy(text, "GPU-", 4);
	if (((int (*)(const char *, nvml_device *))(uintptr_t)find(nvml, "nvmlDeviceGetHandleByUUID"))(text, &d) != NVML_OK) {
		mig = true;
		memcpy(text, "MIG-", 4);
		CALL(nvml, nvmlDeviceGetHandleByUUID, (const char *, nvml_device *), text, &d);
	}
	report_begin(&r, "views", !why[0]);
	report_string(&r, "uuid", text);
	report_u64(&r, "pid", (uint64_t)getpid());
	report_u64(&r, "total_bytes", total_bytes);
	report_u64(&r, "free_bytes", free_bytes);
	report_u64(&r, "device_bytes", device_bytes);
	if (d)
		memory(&r, "nvml", d);
	if (mig) {
		/* The same by the other way to an instance, from the GPU. */
		nvml_device whole = NULL;
		char found[96];

		CALL(nvml, nvmlDeviceGetDeviceHandleFromMigDeviceHandle, (nvml_device, nvml_device *), d, &whole);
		CALL(nvml, nvmlDeviceGetMaxMigDeviceCount, (nvml_device, unsigned int *), whole, &instances);
		for (unsigned int i = 0; i < instances; i++)
			if (((int (*)(nvml_device, unsigned int, nvml_device *))(uintptr_t)find(nvml, "nvmlDeviceGetMigDeviceHandleByIndex"))(whole, i, &at) == NVML_OK &&
			    CALL(nvml, nvmlDeviceGetUUID, (nvml_device, char *, unsigned int), at, found, sizeof(found)) && strcmp(found, text) == 0)
				memory(&r, "by_index", at);
	}
	for (size_t k = 0; d && k < 3; k++)
		for (size_t v = 0; v < 3; v++)
			list(&r, kinds[k], versions[v], d);
	for (unsigned int mode = 0; d && mode <= NVML_PROCESS_MODE_ALL; mode++)
		detail_list(&r, mode < 3 ? kinds[mode] : "All", mode, d);
	answer(&r);
}

static void do_read(const char *path)
{
	char text[512] = "";
	struct report r;
	FILE *f = fopen(path, "re");

	if (!f || fread(text, 1, sizeof(text) - 1, f) == 0)
		snprintf(why, sizeof(why), "cannot read %s", path);
	if (f)
		fclose(f);
	report_begin(&r, "read", !why[0]);
	report_string(&r, "text", text);
	answer(&r);
}

int main(void)
{
	char line[256], word[64], more[64];
	unsigned int n;

	cuda = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
	nvml = dlopen("libnvidia-ml.so.1", RTLD_NOW | RTLD_LOCAL);
	while (fgets(line, sizeof(line), stdin)) {
		why[0] = more[0] = 0;
		n = 0;
		if (sscanf(line, "%63s", word) != 1)
			continue;
		if (strcmp(word, "context") == 0) {
			do_context();
		} else if (strcmp(word, "alloc") == 0 && sscanf(line, "%*s %u", &n) == 1 && count < 64) {
			if (CALL(cuda, cuMemAlloc_v2, (CUdeviceptr *, size_t), &blocks[count], n * MIB))
				count++;
			simple(word);
		} else if (strcmp(word, "free") == 0 && count > 0) {
			CALL(cuda, cuMemFree_v2, (CUdeviceptr), blocks[--count]);
			simple(word);
		} else if (strcmp(word, "launch") == 0 && sscanf(line, "%*s %63s %u", more, &n) == 2) {
			do_launch(more, n);
		} else if (strcmp(word, "views") == 0) {
			do_views();
		} else if (strcmp(word, "read") == 0 && sscanf(line, "%*s %63s", more) == 1) {
			do_read(more);
		} else if (strcmp(word, "exit") == 0) {
			return sscanf(line, "%*s %u", &n) == 1 ? (int)n : 0;
		} else {
			snprintf(why, sizeof(why), "not understood: %.40s", word);
			simple(word);
		}
	}
	return 0;
}
