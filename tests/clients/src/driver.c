/* SPDX-License-Identifier: Apache-2.0 */
#include "driver.h"

#include <dlfcn.h>
#include <stdio.h>
#include <string.h>

typedef cu_result (*get_proc_v1)(const char *name, void **fn, int version, uint64_t flags);
typedef cu_result (*get_proc_v2)(const char *name, void **fn, int version, uint64_t flags,
				 int *status);

/* What the CUDA 12.4 runtime asks for: bare name and version (flags 0), and the name that the
 * same ABI has in the library's symbol table. */
struct wanted {
	const char *name;
	int version;
	const char *symbol;
	size_t offset;
};

#define WANT(name, version, symbol, field) { name, version, symbol, offsetof(struct driver, field) }

static const struct wanted functions[] = {
	WANT("cuInit", 2000, "cuInit", init),
	WANT("cuDriverGetVersion", 2020, "cuDriverGetVersion", driver_version),
	WANT("cuDeviceGet", 2000, "cuDeviceGet", device_get),
	WANT("cuDeviceGetCount", 2000, "cuDeviceGetCount", device_count),
	WANT("cuDeviceGetName", 2000, "cuDeviceGetName", device_name),
	WANT("cuDeviceGetUuid", 9020, "cuDeviceGetUuid", device_uuid),
	WANT("cuDeviceTotalMem", 3020, "cuDeviceTotalMem_v2", device_total),
	WANT("cuDevicePrimaryCtxRetain", 7000, "cuDevicePrimaryCtxRetain", primary_retain),
	WANT("cuDevicePrimaryCtxRelease", 7000, "cuDevicePrimaryCtxRelease", primary_release),
	WANT("cuCtxSetCurrent", 4000, "cuCtxSetCurrent", ctx_set_current),
	WANT("cuCtxGetCurrent", 4000, "cuCtxGetCurrent", ctx_get_current),
	WANT("cuMemGetInfo", 3020, "cuMemGetInfo_v2", mem_info),
	WANT("cuMemAlloc", 3020, "cuMemAlloc_v2", mem_alloc),
	WANT("cuMemAllocPitch", 3020, "cuMemAllocPitch_v2", mem_alloc_pitch),
	WANT("cuMemAllocManaged", 6000, "cuMemAllocManaged", mem_alloc_managed),
	WANT("cuMemFree", 3020, "cuMemFree_v2", mem_free),
	WANT("cuGetErrorName", 6000, "cuGetErrorName", error_name),
};

#define COUNT(a) (sizeof(a) / sizeof((a)[0]))

/* Object and function pointers have one size on every platform with dlsym; memcpy says so
 * without a cast that ISO C does not have. */
static void store(struct driver *d, size_t offset, void *fn)
{
	memcpy((char *)d + offset, &fn, sizeof(fn));
}

static void *open_library(const char *soname, char *why, size_t why_bytes)
{
	void *lib = dlopen(soname, RTLD_NOW | RTLD_LOCAL);

	if (!lib)
		snprintf(why, why_bytes, "open %s: %s", soname, dlerror());
	return lib;
}

static bool resolve_by_proc(struct driver *d, void *lib, char *why, size_t why_bytes)
{
	get_proc_v2 v2 = NULL;
	get_proc_v1 v1 = NULL;
	void *fn = dlsym(lib, "cuGetProcAddress_v2");

	if (fn) {
		memcpy(&v2, &fn, sizeof(fn));
		d->entry = "cuGetProcAddress_v2";
	} else {
		fn = dlsym(lib, "cuGetProcAddress");
		if (!fn) {
			snprintf(why, why_bytes, "resolve cuGetProcAddress: %s", dlerror());
			return false;
		}
		memcpy(&v1, &fn, sizeof(fn));
		d->entry = "cuGetProcAddress";
	}
	/* The runtime asks the function for itself and goes on with the answer: whoever hands
	 * out a wrapper must do so here too. */
	if (v2) {
		int status = 0;

		fn = NULL;
		if (v2("cuGetProcAddress", &fn, 12000, 0, &status) == CU_SUCCESS && fn)
			memcpy(&v2, &fn, sizeof(fn));
	}
	for (size_t i = 0; i < COUNT(functions); i++) {
		const struct wanted *w = &functions[i];
		int status = 0;
		cu_result r;

		fn = NULL;
		if (v2)
			r = v2(w->name, &fn, w->version, 0, &status);
		else
			r = v1(w->name, &fn, w->version, 0);
		if (r != CU_SUCCESS || !fn) {
			snprintf(why, why_bytes, "resolve %s@%d: result %d, status %d", w->name,
				 w->version, r, status);
			return false;
		}
		store(d, w->offset, fn);
	}
	return true;
}

static bool resolve_by_dlsym(struct driver *d, void *lib, char *why, size_t why_bytes)
{
	d->entry = "dlsym";
	for (size_t i = 0; i < COUNT(functions); i++) {
		void *fn = dlsym(lib, functions[i].symbol);

		if (!fn) {
			snprintf(why, why_bytes, "resolve %s: %s", functions[i].symbol, dlerror());
			return false;
		}
		store(d, functions[i].offset, fn);
	}
	return true;
}

bool driver_open(struct driver *d, enum resolve how, char *why, size_t why_bytes)
{
	void *lib;

	memset(d, 0, sizeof(*d));
	lib = open_library("libcuda.so.1", why, why_bytes);
	if (!lib)
		return false;
	return how == RESOLVE_PROC ? resolve_by_proc(d, lib, why, why_bytes)
				   : resolve_by_dlsym(d, lib, why, why_bytes);
}

const char *driver_error(const struct driver *d, cu_result result)
{
	const char *name = NULL;

	if (d->error_name && d->error_name(result, &name) == CU_SUCCESS && name)
		return name;
	return "unknown";
}

bool nvml_open(struct nvml *n, char *why, size_t why_bytes)
{
	static const struct {
		const char *symbol;
		size_t offset;
	} wanted[] = {
		{ "nvmlInit_v2", offsetof(struct nvml, init) },
		{ "nvmlDeviceGetHandleByUUID", offsetof(struct nvml, handle_by_uuid) },
		{ "nvmlDeviceGetHandleByIndex_v2", offsetof(struct nvml, handle_by_index) },
		{ "nvmlDeviceGetMemoryInfo", offsetof(struct nvml, memory) },
		{ "nvmlDeviceGetMemoryInfo_v2", offsetof(struct nvml, memory_v2) },
	};
	void *lib;

	memset(n, 0, sizeof(*n));
	lib = open_library("libnvidia-ml.so.1", why, why_bytes);
	if (!lib)
		return false;
	for (size_t i = 0; i < COUNT(wanted); i++) {
		void *fn = dlsym(lib, wanted[i].symbol);

		if (!fn) {
			snprintf(why, why_bytes, "resolve %s: %s", wanted[i].symbol, dlerror());
			return false;
		}
		memcpy((char *)n + wanted[i].offset, &fn, sizeof(fn));
	}
	return true;
}
