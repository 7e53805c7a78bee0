/* SPDX-License-Identifier: Apache-2.0 */
/*
 * noop.c: a libcuda.so.1 that does as good as nothing, so that what is measured is the shim. One
 * GPU, one context. Every allocation has an address of its own: the worst case for the shim.
 */
#include <string.h>

#include "../src/driver_api.h"
#include "noop.h"

#define API __attribute__((visibility("default")))

static uint64_t next_pointer = UINT64_C(0x100000000000);
static char context;

API CUresult cuInit(unsigned int flags)
{
	(void)flags;
	return CUDA_SUCCESS;
}

API CUresult cuDeviceGet(CUdevice *device, int ordinal)
{
	*device = ordinal;
	return CUDA_SUCCESS;
}

API CUresult cuDeviceGetUuid_v2(CUuuid *uuid, CUdevice device)
{
	for (int i = 0; i < 16; i++)
		uuid->bytes[i] = (char)(0xa0 + i);
	uuid->bytes[15] = (char)device;
	return CUDA_SUCCESS;
}

API CUresult cuCtxGetDevice(CUdevice *device)
{
	*device = 0;
	return CUDA_SUCCESS;
}

API CUresult cuCtxGetCurrent(CUcontext *current)
{
	*current = (CUcontext)(void *)&context;
	return CUDA_SUCCESS;
}

API CUresult cuDevicePrimaryCtxRetain(CUcontext *primary, CUdevice device)
{
	(void)device;
	return cuCtxGetCurrent(primary);
}

API CUresult cuMemAlloc_v2(CUdeviceptr *pointer, size_t bytes)
{
	(void)bytes;
	*pointer = __atomic_fetch_add(&next_pointer, UINT64_C(4) << 20, __ATOMIC_RELAXED);
	return CUDA_SUCCESS;
}

API CUresult cuMemFree_v2(CUdeviceptr pointer)
{
	return pointer == 0 ? CUDA_SUCCESS : CUDA_SUCCESS;
}

API CUresult cuLaunchKernel(void *f, unsigned int gx, unsigned int gy, unsigned int gz, unsigned int bx, unsigned int by,
			    unsigned int bz, unsigned int shared, void *stream, void **params, void **extra)
{
	(void)f, (void)gx, (void)gy, (void)gz, (void)bx, (void)by, (void)bz, (void)shared, (void)stream, (void)params;
	(void)extra;
	return CUDA_SUCCESS;
}

API CUresult cuGraphLaunch(CUgraphExec exec, CUstream stream)
{
	(void)exec, (void)stream;
	return CUDA_SUCCESS;
}

static const struct {
	const char *name;
	void (*function)(void);
} own[] = {
	{ "cuInit", (void (*)(void))cuInit },
	{ "cuMemAlloc", (void (*)(void))cuMemAlloc_v2 },
	{ "cuMemFree", (void (*)(void))cuMemFree_v2 },
	{ "cuDevicePrimaryCtxRetain", (void (*)(void))cuDevicePrimaryCtxRetain },
	{ "cuLaunchKernel", (void (*)(void))cuLaunchKernel },
	{ "cuGraphLaunch", (void (*)(void))cuGraphLaunch },
};

API CUresult cuGetProcAddress_v2(const char *name, void **function, int version, cuuint64_t flags, int *status)
{
	(void)version, (void)flags;
	*function = NULL;
	for (unsigned i = 0; i < sizeof own / sizeof own[0]; i++)
		if (strcmp(own[i].name, name) == 0)
			memcpy(function, &own[i].function, sizeof *function);
	if (status != NULL)
		*status = *function == NULL;
	return CUDA_SUCCESS;
}

/* The driver's own answer, whoever asks: no name that a shim knows. */
API void *noop_address(const char *name)
{
	void *function;
	cuGetProcAddress_v2(name, &function, 12000, 0, NULL);
	return function;
}
