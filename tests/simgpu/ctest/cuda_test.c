/* SPDX-License-Identifier: Apache-2.0 */
/*
 * cuda_test: the simulated libcuda, from a client's side. Needs a simgpud with two T4s of
 * 16 GiB that nobody else uses, in $SIMGPU_DIR. Prints what failed and exits 1.
 *
 * Prototypes are written out here once more, on purpose: they are what a client was compiled
 * with.
 */
#define _GNU_SOURCE
#include "../libcuda/cuda_abi.h"
#include "../simgpu.h"
#include "check.h"

#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

CUresult cuInit(unsigned int);
CUresult cuDriverGetVersion(int *);
CUresult cuGetErrorName(CUresult, const char **);
CUresult cuGetErrorString(CUresult, const char **);
CUresult cuGetProcAddress(const char *, void **, int, cuuint64_t);
CUresult cuGetProcAddress_v2(const char *, void **, int, cuuint64_t, CUdriverProcAddressQueryResult *);
CUresult cuGetProcAddress_v2_ptsz(const char *, void **, int, cuuint64_t, CUdriverProcAddressQueryResult *);
CUresult cuGetExportTable(const void **, const CUuuid *);
CUresult cuDeviceGetCount(int *);
CUresult cuDeviceGet(CUdevice *, int);
CUresult cuDeviceGetName(char *, int, CUdevice);
CUresult cuDeviceGetUuid(CUuuid *, CUdevice);
CUresult cuDeviceGetUuid_v2(CUuuid *, CUdevice);
CUresult cuDeviceTotalMem(unsigned int *, CUdevice);
CUresult cuDeviceTotalMem_v2(size_t *, CUdevice);
CUresult cuDeviceGetAttribute(int *, CUdevice_attribute, CUdevice);
CUresult cuDeviceGetPCIBusId(char *, int, CUdevice);
CUresult cuDeviceGetByPCIBusId(CUdevice *, const char *);
CUresult cuDeviceComputeCapability(int *, int *, CUdevice);
CUresult cuDevicePrimaryCtxRetain(CUcontext *, CUdevice);
CUresult cuDevicePrimaryCtxRelease_v2(CUdevice);
CUresult cuDevicePrimaryCtxReset_v2(CUdevice);
CUresult cuDevicePrimaryCtxSetFlags(CUdevice, unsigned int);
CUresult cuDevicePrimaryCtxSetFlags_v2(CUdevice, unsigned int);
CUresult cuDevicePrimaryCtxGetState(CUdevice, unsigned int *, int *);
CUresult cuCtxCreate(CUcontext *, unsigned int, CUdevice);
CUresult cuCtxCreate_v2(CUcontext *, unsigned int, CUdevice);
CUresult cuCtxCreate_v3(CUcontext *, CUexecAffinityParam *, int, unsigned int, CUdevice);
CUresult cuCtxCreate_v4(CUcontext *, CUctxCreateParams *, unsigned int, CUdevice);
CUresult cuCtxDestroy_v2(CUcontext);
CUresult cuCtxPushCurrent_v2(CUcontext);
CUresult cuCtxPopCurrent_v2(CUcontext *);
CUresult cuCtxSetCurrent(CUcontext);
CUresult cuCtxGetCurrent(CUcontext *);
CUresult cuCtxGetDevice(CUdevice *);
CUresult cuCtxGetFlags(unsigned int *);
CUresult cuCtxGetApiVersion(CUcontext, unsigned int *);
CUresult cuCtxSynchronize(void);
CUresult cuMemGetInfo(unsigned int *, unsigned int *);
CUresult cuMemGetInfo_v2(size_t *, size_t *);
CUresult cuMemAlloc(CUdeviceptr_v1 *, unsigned int);
CUresult cuMemAlloc_v2(CUdeviceptr *, size_t);
CUresult cuMemAllocPitch(CUdeviceptr_v1 *, unsigned int *, unsigned int, unsigned int, unsigned int);
CUresult cuMemAllocPitch_v2(CUdeviceptr *, size_t *, size_t, size_t, unsigned int);
CUresult cuMemAllocManaged(CUdeviceptr *, size_t, unsigned int);
CUresult cuMemFree(CUdeviceptr_v1);
CUresult cuMemFree_v2(CUdeviceptr);
CUresult cuMemGetAddressRange_v2(CUdeviceptr *, size_t *, CUdeviceptr);
CUresult cuMemPrefetchAsync(CUdeviceptr, size_t, CUdevice, CUstream);
CUresult cuMemHostAlloc(void **, size_t, unsigned int);
CUresult cuMemAllocHost_v2(void **, size_t);
CUresult cuMemFreeHost(void *);
CUresult cuMemHostRegister_v2(void *, size_t, unsigned int);
CUresult cuMemHostUnregister(void *);
CUresult cuMemHostGetDevicePointer_v2(CUdeviceptr *, void *, unsigned int);
CUresult cuPointerGetAttribute(void *, CUpointer_attribute, CUdeviceptr);
CUresult cuPointerGetAttributes(unsigned int, CUpointer_attribute *, void **, CUdeviceptr);
CUresult cuMemAddressReserve(CUdeviceptr *, size_t, size_t, CUdeviceptr, unsigned long long);
CUresult cuMemAddressFree(CUdeviceptr, size_t);
CUresult cuMemCreate(CUmemGenericAllocationHandle *, size_t, const CUmemAllocationProp *, unsigned long long);
CUresult cuMemRelease(CUmemGenericAllocationHandle);
CUresult cuMemMap(CUdeviceptr, size_t, size_t, CUmemGenericAllocationHandle, unsigned long long);
CUresult cuMemUnmap(CUdeviceptr, size_t);
CUresult cuMemSetAccess(CUdeviceptr, size_t, const CUmemAccessDesc *, size_t);
CUresult cuMemGetAccess(unsigned long long *, const CUmemLocation *, CUdeviceptr);
CUresult cuMemGetAllocationGranularity(size_t *, const CUmemAllocationProp *, CUmemAllocationGranularity_flags);
CUresult cuMemRetainAllocationHandle(CUmemGenericAllocationHandle *, void *);
CUresult cuMemAllocAsync(CUdeviceptr *, size_t, CUstream);
CUresult cuMemAllocFromPoolAsync(CUdeviceptr *, size_t, CUmemoryPool, CUstream);
CUresult cuMemFreeAsync(CUdeviceptr, CUstream);
CUresult cuMemPoolCreate(CUmemoryPool *, const CUmemPoolProps *);
CUresult cuMemPoolDestroy(CUmemoryPool);
CUresult cuMemPoolTrimTo(CUmemoryPool, size_t);
CUresult cuMemPoolGetAttribute(CUmemoryPool, CUmemPool_attribute, void *);
CUresult cuMemPoolSetAttribute(CUmemoryPool, CUmemPool_attribute, void *);
CUresult cuDeviceGetDefaultMemPool(CUmemoryPool *, CUdevice);
CUresult cuDeviceGetMemPool(CUmemoryPool *, CUdevice);
CUresult cuDeviceSetMemPool(CUdevice, CUmemoryPool);
CUresult cuStreamCreate(CUstream *, unsigned int);
CUresult cuStreamDestroy_v2(CUstream);
CUresult cuStreamSynchronize(CUstream);
CUresult cuStreamQuery(CUstream);
CUresult cuStreamWaitEvent(CUstream, CUevent, unsigned int);
CUresult cuEventCreate(CUevent *, unsigned int);
CUresult cuEventDestroy_v2(CUevent);
CUresult cuEventRecord(CUevent, CUstream);
CUresult cuEventQuery(CUevent);
CUresult cuEventSynchronize(CUevent);
CUresult cuEventElapsedTime(float *, CUevent, CUevent);
CUresult cuMemcpy(CUdeviceptr, CUdeviceptr, size_t);
CUresult cuMemcpyHtoD_v2(CUdeviceptr, const void *, size_t);
CUresult cuMemcpyDtoH_v2(void *, CUdeviceptr, size_t);
CUresult cuMemcpyDtoD_v2(CUdeviceptr, CUdeviceptr, size_t);
CUresult cuMemcpyHtoDAsync_v2(CUdeviceptr, const void *, size_t, CUstream);
CUresult cuMemsetD8_v2(CUdeviceptr, unsigned char, size_t);
CUresult cuMemsetD32_v2(CUdeviceptr, unsigned int, size_t);
CUresult cuMemcpy2D_v2(const CUDA_MEMCPY2D *);
CUresult cuMemcpy2DUnaligned_v2(const CUDA_MEMCPY2D *);
CUresult cuMemcpy2DAsync_v2(const CUDA_MEMCPY2D *, CUstream);
CUresult cuMemcpyPeer(CUdeviceptr, CUcontext, CUdeviceptr, CUcontext, size_t);
CUresult cuMemcpyPeerAsync(CUdeviceptr, CUcontext, CUdeviceptr, CUcontext, size_t, CUstream);
CUresult cuFuncGetAttribute(int *, CUfunction_attribute, CUfunction);
CUresult cuKernelGetAttribute(int *, CUfunction_attribute, CUkernel, CUdevice);
CUresult cuFuncSetAttribute(CUfunction, CUfunction_attribute, int);
CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int *, CUfunction, int, size_t);
CUresult cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *, CUfunction, int, size_t, unsigned int);
CUresult cuLibraryLoadData(CUlibrary *, const void *, CUjit_option *, void **, unsigned int, CUlibraryOption *, void **, unsigned int);
CUresult cuLibraryUnload(CUlibrary);
CUresult cuLibraryGetKernel(CUkernel *, CUlibrary, const char *);
CUresult cuStreamBeginCapture_v2(CUstream, CUstreamCaptureMode);
CUresult cuStreamEndCapture(CUstream, CUgraph *);
CUresult cuGraphGetNodes(CUgraph, CUgraphNode *, size_t *);
CUresult cuGraphDestroy(CUgraph);
CUresult cuModuleLoadData(CUmodule *, const void *);
CUresult cuModuleUnload(CUmodule);
CUresult cuModuleGetFunction(CUfunction *, CUmodule, const char *);
CUresult cuLaunchKernel(CUfunction, unsigned int, unsigned int, unsigned int, unsigned int, unsigned int, unsigned int, unsigned int,
			CUstream, void **, void **);

static size_t used(void)
{
	size_t free_bytes = 0, total = 0;

	OK(cuMemGetInfo_v2(&free_bytes, &total));
	WANT(total, CAPACITY);
	return total - free_bytes;
}

static int64_t now(void)
{
	struct timespec ts;

	clock_gettime(CLOCK_MONOTONIC, &ts);
	return ts.tv_sec * INT64_C(1000000000) + ts.tv_nsec;
}

static void before_init(void)
{
	CUcontext ctx;
	CUdeviceptr p;
	int n;

	WANT(cuDeviceGetCount(&n), CUDA_ERROR_NOT_INITIALIZED);
	WANT(cuMemAlloc_v2(&p, 1), CUDA_ERROR_NOT_INITIALIZED);
	WANT(cuMemFree_v2(0), CUDA_ERROR_NOT_INITIALIZED);
	WANT(cuCtxGetCurrent(&ctx), CUDA_ERROR_NOT_INITIALIZED);
	OK(cuDriverGetVersion(&n));
	WANT(n, 12080);
	WANT(cuDriverGetVersion(NULL), CUDA_ERROR_INVALID_VALUE);
	WANT(cuInit(1), CUDA_ERROR_INVALID_VALUE);
	OK(cuInit(0));
	OK(cuInit(0));
}

static void devices(void)
{
	char name[64] = "", id[32] = "", small[4];
	unsigned int short_total = 0;
	CUuuid a, b, c;
	size_t total = 0;
	int n = 0, major = 0, minor = 0, i;
	CUdevice dev = -1;
	const char *text;

	OK(cuDeviceGetCount(&n));
	WANT(n, 2);
	OK(cuDeviceGet(&dev, 1));
	WANT(dev, 1);
	WANT(cuDeviceGet(&dev, 2), CUDA_ERROR_INVALID_DEVICE);
	WANT(cuDeviceGet(&dev, -1), CUDA_ERROR_INVALID_DEVICE);
	OK(cuDeviceGetName(name, sizeof(name), 0));
	WANT(strcmp(name, "NVIDIA T4 (simulated)"), 0);
	OK(cuDeviceGetName(small, sizeof(small), 0));
	WANT(strcmp(small, "NVI"), 0);
	OK(cuDeviceGetUuid_v2(&a, 0));
	OK(cuDeviceGetUuid(&b, 0));
	OK(cuDeviceGetUuid_v2(&c, 1));
	WANT(memcmp(&a, &b, 16), 0);
	WANT(memcmp(&a, &c, 16) != 0, 1);
	OK(cuDeviceTotalMem_v2(&total, 0));
	WANT(total, CAPACITY);
	OK(cuDeviceTotalMem(&short_total, 0));
	WANT(short_total, UINT32_MAX);
	OK(cuDeviceComputeCapability(&major, &minor, 0));
	WANT(major * 10 + minor, 75);
	OK(cuDeviceGetPCIBusId(id, sizeof(id), 1));
	WANT(strcmp(id, "0000:02:00.0"), 0);
	OK(cuDeviceGetByPCIBusId(&dev, id));
	WANT(dev, 1);
	WANT(cuDeviceGetByPCIBusId(&dev, "0000:99:00.0"), CUDA_ERROR_INVALID_DEVICE);
	OK(cuDeviceGetAttribute(&n, 16, 0));
	WANT(n, 40);
	OK(cuDeviceGetAttribute(&n, 18, 0)); /* integrated */
	WANT(n, 0);
	for (i = 1; i < SIM_ATTR_MAX; i++)
		OK(cuDeviceGetAttribute(&n, (CUdevice_attribute)i, 0));
	WANT(cuDeviceGetAttribute(&n, (CUdevice_attribute)0, 0), CUDA_ERROR_INVALID_VALUE);
	WANT(cuDeviceGetAttribute(&n, 75, 2), CUDA_ERROR_INVALID_DEVICE);
	WANT(cuDeviceGetAttribute(NULL, 75, 0), CUDA_ERROR_INVALID_VALUE);
	OK(cuGetErrorName(CUDA_ERROR_OUT_OF_MEMORY, &text));
	WANT(strcmp(text, "CUDA_ERROR_OUT_OF_MEMORY"), 0);
	OK(cuGetErrorString(CUDA_ERROR_OUT_OF_MEMORY, &text));
	WANT(strcmp(text, "out of memory"), 0);
	WANT(cuGetErrorName((CUresult)12345, &text), CUDA_ERROR_INVALID_VALUE);
	WANT(text == NULL, 1);
}

static void *other_thread(void *arg)
{
	CUcontext ctx = arg, got = arg;
	CUdeviceptr p;

	OK(cuCtxGetCurrent(&got)); /* stacks are a thread's own */
	WANT(got == NULL, 1);
	WANT(cuMemAlloc_v2(&p, 1), CUDA_ERROR_INVALID_CONTEXT);
	OK(cuCtxPushCurrent_v2(ctx));
	OK(cuMemAlloc_v2(&p, 3 * MIB));
	OK(cuMemFree_v2(p));
	return NULL; /* with the context still on its stack */
}

static void contexts(void)
{
	CUcontext a, b, got, primary, again;
	unsigned int version = 0, flags = 99;
	CUctxCreateParams none = {0};
	pthread_t thread;
	CUdeviceptr p;
	CUdevice dev;
	int active;

	WANT(cuCtxGetDevice(&dev), CUDA_ERROR_INVALID_CONTEXT);
	WANT(cuCtxPopCurrent_v2(&got), CUDA_ERROR_INVALID_CONTEXT);
	WANT(cuMemAlloc_v2(&p, 1), CUDA_ERROR_INVALID_CONTEXT);
	WANT(cuMemGetInfo_v2(NULL, NULL), CUDA_ERROR_INVALID_CONTEXT);
	OK(cuMemFree_v2(0));
	WANT(cuCtxCreate_v2(&a, 0, 7), CUDA_ERROR_INVALID_DEVICE);
	WANT(cuCtxCreate_v2(NULL, 0, 0), CUDA_ERROR_INVALID_VALUE);

	OK(cuCtxCreate_v2(&a, 4, 0));
	WANT(used(), CONTEXT);
	OK(cuCtxGetFlags(&flags));
	WANT(flags, 4);
	OK(cuCtxCreate_v4(&b, &none, 0, 1));
	OK(cuCtxGetDevice(&dev));
	WANT(dev, 1);
	OK(cuCtxGetApiVersion(NULL, &version));
	WANT(version, 3020);
	OK(cuCtxPopCurrent_v2(&got));
	WANT(got == b, 1);
	OK(cuCtxGetDevice(&dev));
	WANT(dev, 0);
	OK(cuCtxPushCurrent_v2(b));
	OK(cuCtxSetCurrent(a)); /* replaces b */
	OK(cuCtxPopCurrent_v2(NULL));
	OK(cuCtxGetCurrent(&got));
	WANT(got == a, 1);
	WANT(cuCtxPushCurrent_v2((CUcontext)&dev), CUDA_ERROR_INVALID_CONTEXT);
	WANT(cuCtxSetCurrent((CUcontext)&dev), CUDA_ERROR_INVALID_CONTEXT);

	pthread_create(&thread, NULL, other_thread, a);
	pthread_join(thread, NULL);

	/* A destroyed context is not current any more, and a stack that still has it says so. */
	OK(cuCtxPushCurrent_v2(b));
	OK(cuCtxPushCurrent_v2(a));
	OK(cuMemAlloc_v2(&p, 10 * MIB));
	OK(cuCtxDestroy_v2(a));
	OK(cuCtxGetCurrent(&got));
	WANT(got == b, 1);
	OK(cuCtxDestroy_v2(b));
	OK(cuCtxGetCurrent(&got));
	WANT(got == a, 1); /* lies there from before */
	WANT(cuMemAlloc_v2(&p, 1), CUDA_ERROR_CONTEXT_IS_DESTROYED);
	WANT(cuCtxDestroy_v2(a), CUDA_ERROR_CONTEXT_IS_DESTROYED);
	OK(cuCtxSetCurrent(NULL));
	OK(cuCtxGetCurrent(&got));
	WANT(got == NULL, 1);

	OK(cuCtxCreate(&a, 0, 0));
	OK(cuCtxGetApiVersion(a, &version));
	WANT(version, 3010);
	OK(cuCtxDestroy_v2(a));
	OK(cuCtxCreate_v3(&a, NULL, 0, 0, 0));
	OK(cuCtxDestroy_v2(a));

	/* Primary contexts are counted. */
	OK(cuDevicePrimaryCtxGetState(0, &flags, &active));
	WANT(active, 0);
	WANT(cuDevicePrimaryCtxRelease_v2(0), CUDA_ERROR_INVALID_CONTEXT);
	OK(cuDevicePrimaryCtxSetFlags_v2(0, 1));
	OK(cuDevicePrimaryCtxRetain(&primary, 0));
	OK(cuDevicePrimaryCtxRetain(&again, 0));
	WANT(primary == again, 1);
	OK(cuDevicePrimaryCtxGetState(0, &flags, &active));
	WANT(active * 10 + (int)flags, 11);
	WANT(cuDevicePrimaryCtxSetFlags(0, 2), CUDA_ERROR_PRIMARY_CONTEXT_ACTIVE);
	OK(cuDevicePrimaryCtxSetFlags_v2(0, 0));
	WANT(cuCtxDestroy_v2(primary), CUDA_ERROR_INVALID_CONTEXT);
	OK(cuCtxSetCurrent(primary));
	OK(cuMemAlloc_v2(&p, 5 * MIB));
	WANT(used(), CONTEXT + 6 * MIB);
	OK(cuDevicePrimaryCtxRelease_v2(0));
	WANT(used(), CONTEXT + 6 * MIB);
	OK(cuDevicePrimaryCtxRelease_v2(0));
	WANT(cuMemGetInfo_v2(NULL, NULL), CUDA_ERROR_CONTEXT_IS_DESTROYED);
	OK(cuCtxSetCurrent(primary)); /* may be current while it is not active */
	OK(cuDevicePrimaryCtxRetain(&again, 0));
	WANT(primary == again, 1);
	WANT(used(), CONTEXT);
	OK(cuDevicePrimaryCtxReset_v2(0));
	OK(cuDevicePrimaryCtxGetState(0, &flags, &active));
	WANT(active, 0);
	/* What was retained before the reset is still to be released. */
	OK(cuDevicePrimaryCtxRetain(&again, 0));
	OK(cuDevicePrimaryCtxRelease_v2(0));
	OK(cuDevicePrimaryCtxGetState(0, &flags, &active));
	WANT(active, 1);
}

static void linear_memory(void)
{
	CUdeviceptr p, q, base;
	CUdeviceptr_v1 low, low_small;
	unsigned int short_free = 0, short_total = 0, short_pitch;
	size_t before = used(), pitch, size, i;
	unsigned char bytes[4096], back[4096];
	CUdeviceptr many[1000];

	WANT(cuMemAlloc_v2(&p, 0), CUDA_ERROR_INVALID_VALUE);
	WANT(cuMemAlloc_v2(NULL, 1), CUDA_ERROR_INVALID_VALUE);
	WANT(cuMemAlloc_v2(&p, SIZE_MAX), CUDA_ERROR_OUT_OF_MEMORY);
	OK(cuMemAlloc_v2(&p, MIB + 1));
	WANT(used() - before, 2 * MIB);
	WANT(p % (2 * MIB), 0);
	OK(cuMemGetAddressRange_v2(&base, &size, p + 77));
	WANT(base, p);
	WANT(size, MIB + 1);
	OK(cuMemGetAddressRange_v2(NULL, NULL, p));
	WANT(cuMemGetAddressRange_v2(&base, &size, 4096), CUDA_ERROR_NOT_FOUND);
	WANT(cuMemFree_v2(p + 512), CUDA_ERROR_INVALID_VALUE);
	OK(cuMemFree_v2(p));
	WANT(cuMemFree_v2(p), CUDA_ERROR_INVALID_VALUE);
	OK(cuMemFree_v2(0));
	OK(cuMemFree(0));
	WANT(used(), before);

	for (i = 0; i < 1000; i++) {
		OK(cuMemAlloc_v2(&many[i], 700));
		WANT(many[i] % 512, 0);
		OK(cuMemsetD8_v2(many[i], (unsigned char)i, 700));
	}
	WANT(used() - before, 2 * MIB);
	for (i = 0; i < 1000; i++) {
		memset(back, 0xee, sizeof(back));
		OK(cuMemcpyDtoH_v2(back, many[i], 700));
		WANT(back[0] == (unsigned char)i && back[699] == (unsigned char)i, 1);
		OK(cuMemFree_v2(many[i]));
	}
	WANT(used(), before);

	OK(cuMemAllocPitch_v2(&p, &pitch, 1000, 3000, 4));
	WANT(pitch, 1024);
	WANT(used() - before, 4 * MIB);
	OK(cuMemFree_v2(p));
	WANT(cuMemAllocPitch_v2(&p, &pitch, 1000, 10, 3), CUDA_ERROR_INVALID_VALUE);
	WANT(cuMemAllocPitch_v2(&p, &pitch, SIZE_MAX / 4, SIZE_MAX / 4, 4), CUDA_ERROR_OUT_OF_MEMORY);

	/* The first version's pointers have 32 bits. */
	OK(cuMemAlloc(&low, 64 << 20));
	OK(cuMemAlloc(&low_small, 100));
	WANT(used() - before, 66 * MIB);
	OK(cuMemcpyHtoD_v2(low, "low", 4));
	OK(cuMemcpyDtoH_v2(back, low, 4));
	WANT(strcmp((char *)back, "low"), 0);
	OK(cuMemFree(low));
	OK(cuMemFree(low_small));
	OK(cuMemAllocPitch(&low, &short_pitch, 100, 100, 8));
	WANT(short_pitch, 512);
	OK(cuMemFree(low));
	OK(cuMemGetInfo(&short_free, &short_total));
	WANT(short_total, UINT32_MAX);
	OK(cuMemGetInfo_v2(NULL, &size));
	OK(cuMemGetInfo_v2(&size, NULL));
	OK(cuMemGetInfo_v2(NULL, NULL));
	OK(cuMemGetInfo(NULL, NULL));

	/* Contents: across pages, copied, filled, and zero where nothing was written. */
	for (i = 0; i < sizeof(bytes); i++)
		bytes[i] = (unsigned char)(i * 7);
	OK(cuMemAlloc_v2(&p, 8 * MIB));
	OK(cuMemAlloc_v2(&q, 8 * MIB));
	OK(cuMemcpyHtoD_v2(p + 2 * MIB - 100, bytes, sizeof(bytes)));
	OK(cuMemcpyDtoD_v2(q + 4 * MIB - 2000, p + 2 * MIB - 100, sizeof(bytes)));
	OK(cuMemcpyDtoH_v2(back, q + 4 * MIB - 2000, sizeof(back)));
	WANT(memcmp(bytes, back, sizeof(back)), 0);
	OK(cuMemcpy((CUdeviceptr)(uintptr_t)back, q, 100));
	for (i = 0; i < 100; i++)
		WANT(back[i], 0);
	OK(cuMemsetD32_v2(q, 0x01020304, 1000));
	OK(cuMemcpyDtoH_v2(back, q, 4000));
	WANT(back[3996] == 4 && back[3999] == 1, 1);
	OK(cuMemsetD8_v2(q, 0, 4000));
	OK(cuMemcpyDtoH_v2(back, q, 4000));
	WANT(back[0] | back[3999], 0);
	WANT(cuMemsetD32_v2(q + 1, 1, 1), CUDA_ERROR_INVALID_VALUE);
	WANT(cuMemsetD8_v2(q, 1, 9 * MIB), CUDA_ERROR_INVALID_VALUE);
	WANT(cuMemcpyHtoD_v2(q + 8 * MIB - 1, bytes, 2), CUDA_ERROR_INVALID_VALUE);
	WANT(cuMemcpyDtoH_v2(back, 4096, 1), CUDA_ERROR_INVALID_VALUE);
	OK(cuMemFree_v2(p));
	OK(cuMemFree_v2(q));

	/* Much more than the host should give: sizes stay right, contents may be lost. */
	OK(cuMemAlloc_v2(&p, 4 * GIB));
	OK(cuMemsetD8_v2(p, 0xab, 4 * GIB));
	OK(cuMemcpyDtoH_v2(back, p, 10));
	WANT(back[9], 0xab);
	OK(cuMemFree_v2(p));
	OK(cuMemAlloc_v2(&p, 4 * MIB)); /* freed contents cost nothing any more */
	OK(cuMemcpyHtoD_v2(p, bytes, 10));
	OK(cuMemcpyDtoH_v2(back, p, 10));
	WANT(memcmp(back, bytes, 10), 0);
	OK(cuMemFree_v2(p));
	WANT(used(), before);
}

static void exhaustion(void)
{
	size_t before = used(), got;
	CUdeviceptr p[32], q;
	CUcontext ctx, current;
	int n, i;

	for (n = 0; n < 32; n++)
		if (cuMemAlloc_v2(&p[n], GIB) != CUDA_SUCCESS)
			break;
	WANT(n, 15);
	q = 42;
	WANT(cuMemAlloc_v2(&q, GIB), CUDA_ERROR_OUT_OF_MEMORY);
	WANT(q, 42); /* a failed call touches nothing */
	got = CAPACITY - used();
	OK(cuMemAlloc_v2(&q, got));
	WANT(used(), CAPACITY);
	WANT(cuMemAlloc_v2(&p[n], 1), CUDA_ERROR_OUT_OF_MEMORY);
	OK(cuCtxGetCurrent(&current));
	WANT(cuCtxCreate_v2(&ctx, 0, 0), CUDA_ERROR_OUT_OF_MEMORY);
	OK(cuCtxGetCurrent(&ctx));
	WANT(ctx == current, 1);
	OK(cuMemFree_v2(q));
	for (i = 0; i < n; i++)
		OK(cuMemFree_v2(p[i]));
	WANT(used(), before);
}

static void managed_memory(void)
{
	size_t before = used();
	CUdeviceptr p, q;

	WANT(cuMemAllocManaged(&p, MIB, 7), CUDA_ERROR_INVALID_VALUE);
	OK(cuMemAllocManaged(&p, 3 * MIB, CU_MEM_ATTACH_GLOBAL));
	WANT(used() - before, 4 * MIB);
	strcpy((char *)(uintptr_t)p, "both sides");
	OK(cuMemAlloc_v2(&q, 4096));
	OK(cuMemcpyDtoD_v2(q, p, 11));
	OK(cuMemcpyDtoD_v2(p + 100, q, 11));
	WANT(strcmp((char *)(uintptr_t)p + 100, "both sides"), 0);
	OK(cuMemFree_v2(q));
	OK(cuMemPrefetchAsync(p, 3 * MIB, -1, NULL));
	WANT(used(), before);
	OK(cuMemPrefetchAsync(p, 3 * MIB, 0, NULL));
	WANT(used() - before, 4 * MIB);
	OK(cuMemFree_v2(p));
	OK(cuMemAllocManaged(&p, 40 * GIB, CU_MEM_ATTACH_GLOBAL)); /* more than the GPU has */
	WANT(used(), CAPACITY);
	OK(cuMemsetD8_v2(p, 1, 40 * GIB));
	OK(cuMemFree_v2(p));
	WANT(used(), before);
}

static void virtual_memory(void)
{
	CUmemAllocationProp prop = {.type = CU_MEM_ALLOCATION_TYPE_PINNED, .location = {CU_MEM_LOCATION_TYPE_DEVICE, 0}};
	CUmemAccessDesc access = {{CU_MEM_LOCATION_TYPE_DEVICE, 0}, CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
	CUmemGenericAllocationHandle h, g, again;
	unsigned long long flags = 0;
	size_t before = used(), granule = 0;
	CUdeviceptr va;
	char back[8];

	OK(cuMemGetAllocationGranularity(&granule, &prop, 0));
	WANT(granule, 2 * MIB);
	WANT(cuMemAddressReserve(&va, MIB, 0, 0, 0), CUDA_ERROR_INVALID_VALUE);
	OK(cuMemAddressReserve(&va, 32 * GIB, 0, 0, 0)); /* costs no memory */
	WANT(used(), before);
	WANT(cuMemCreate(&h, MIB, &prop, 0), CUDA_ERROR_INVALID_VALUE);
	prop.location.id = 5;
	WANT(cuMemCreate(&h, 2 * MIB, &prop, 0), CUDA_ERROR_INVALID_DEVICE);
	prop.location.id = 0;
	WANT(cuMemCreate(&h, 64 * GIB, &prop, 0), CUDA_ERROR_OUT_OF_MEMORY);
	OK(cuMemCreate(&h, 64 * MIB, &prop, 0));
	WANT(used() - before, 64 * MIB);
	WANT(cuMemMap(va + MIB, 64 * MIB, 0, h, 0), CUDA_ERROR_INVALID_VALUE);
	WANT(cuMemMap(va + 32 * GIB - 2 * MIB, 64 * MIB, 0, h, 0), CUDA_ERROR_INVALID_VALUE);
	OK(cuMemMap(va, 64 * MIB, 0, h, 0));
	WANT(cuMemMap(va + 32 * MIB, 64 * MIB, 0, h, 0), CUDA_ERROR_INVALID_VALUE);
	WANT(cuMemcpyHtoD_v2(va, "mapped", 7), CUDA_ERROR_INVALID_VALUE); /* no access yet */
	OK(cuMemSetAccess(va, 64 * MIB, &access, 1));
	OK(cuMemGetAccess(&flags, &access.location, va));
	WANT(flags, 3);
	OK(cuMemcpyHtoD_v2(va, "mapped", 7));
	OK(cuMemcpyDtoH_v2(back, va, 7));
	WANT(strcmp(back, "mapped"), 0);

	/* The memory stays until the last release and the last unmap, in either order. */
	OK(cuMemRelease(h));
	WANT(used() - before, 64 * MIB);
	WANT(cuMemRelease(h), CUDA_ERROR_INVALID_VALUE);
	OK(cuMemRetainAllocationHandle(&again, (void *)(uintptr_t)(va + MIB)));
	WANT(again, h);
	WANT(cuMemUnmap(va, 32 * MIB), CUDA_ERROR_INVALID_VALUE);
	WANT(cuMemAddressFree(va, 32 * GIB), CUDA_ERROR_INVALID_VALUE);
	OK(cuMemUnmap(va, 64 * MIB));
	WANT(used() - before, 64 * MIB);
	OK(cuMemRelease(again));
	WANT(used(), before);

	OK(cuMemCreate(&h, 2 * MIB, &prop, 0));
	OK(cuMemCreate(&g, 4 * MIB, &prop, 0));
	OK(cuMemMap(va, 2 * MIB, 0, h, 0));
	OK(cuMemMap(va + 2 * MIB, 4 * MIB, 0, g, 0));
	OK(cuMemSetAccess(va, 6 * MIB, &access, 1));
	OK(cuMemsetD8_v2(va, 1, 6 * MIB));
	OK(cuMemRelease(h));
	OK(cuMemUnmap(va, 6 * MIB)); /* both at once */
	WANT(used() - before, 4 * MIB);
	OK(cuMemRelease(g));
	WANT(used(), before);
	WANT(cuMemFree_v2(va), CUDA_ERROR_INVALID_VALUE);
	OK(cuMemAddressFree(va, 32 * GIB));
	WANT(cuMemAddressFree(va, 32 * GIB), CUDA_ERROR_INVALID_VALUE);
}

static cuuint64_t pool_value(CUmemoryPool pool, int attribute)
{
	cuuint64_t value = 0;

	OK(cuMemPoolGetAttribute(pool, (CUmemPool_attribute)attribute, &value));
	return value;
}

static void pools(void)
{
	CUmemPoolProps props = {.allocType = CU_MEM_ALLOCATION_TYPE_PINNED, .location = {CU_MEM_LOCATION_TYPE_DEVICE, 0}};
	cuuint64_t keep = UINT64_MAX, zero = 0;
	size_t before = used();
	CUmemoryPool pool, own, got;
	CUdeviceptr p, q, r;
	CUstream stream;
	char back[8];

	OK(cuStreamCreate(&stream, 0));
	OK(cuDeviceGetDefaultMemPool(&pool, 0));
	WANT(used(), before);
	WANT(cuMemAllocAsync(&p, 0, stream), CUDA_ERROR_INVALID_VALUE);
	OK(cuMemAllocAsync(&p, 1000, stream));
	WANT(used() - before, 32 * MIB); /* the pool's step */
	OK(cuMemAllocAsync(&q, 31 * MIB, stream));
	WANT(used() - before, 32 * MIB);
	OK(cuMemAllocAsync(&r, 40 * MIB, stream));
	WANT(used() - before, 96 * MIB);
	WANT(pool_value(pool, CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT), 96 * MIB);
	WANT(pool_value(pool, CU_MEMPOOL_ATTR_USED_MEM_CURRENT), 1024 + 71 * MIB);
	OK(cuMemcpyHtoD_v2(q, "pooled", 7));
	OK(cuMemcpyDtoH_v2(back, q, 7));
	WANT(strcmp(back, "pooled"), 0);
	OK(cuMemFreeAsync(r, stream));
	WANT(used() - before, 96 * MIB); /* until the host synchronises */
	OK(cuStreamSynchronize(stream));
	WANT(used() - before, 32 * MIB);
	OK(cuMemFree_v2(q)); /* works on a pool's memory too */
	OK(cuMemPoolSetAttribute(pool, CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, &keep));
	OK(cuMemFreeAsync(p, stream));
	WANT(cuMemFreeAsync(p, stream), CUDA_ERROR_INVALID_VALUE);
	OK(cuCtxSynchronize());
	WANT(used() - before, 32 * MIB); /* the threshold keeps it */
	OK(cuMemPoolTrimTo(pool, 32 * MIB));
	WANT(used() - before, 32 * MIB);
	OK(cuMemPoolTrimTo(pool, 0));
	WANT(used(), before);
	WANT(pool_value(pool, CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH), 96 * MIB);
	OK(cuMemPoolSetAttribute(pool, CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH, &zero));
	WANT(pool_value(pool, CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH), 0);
	WANT(cuMemPoolSetAttribute(pool, CU_MEMPOOL_ATTR_USED_MEM_HIGH, &keep), CUDA_ERROR_INVALID_VALUE);

	/* What is kept for later is given back when the device is full. */
	OK(cuMemAllocAsync(&p, 64 * MIB, stream));
	OK(cuMemFreeAsync(p, stream));
	OK(cuMemAlloc_v2(&q, CAPACITY - used()));
	OK(cuMemAllocAsync(&p, 40 * MIB, stream));
	OK(cuMemFreeAsync(p, stream));
	WANT(cuMemAllocAsync(&p, 128 * MIB, stream), CUDA_ERROR_OUT_OF_MEMORY);
	OK(cuMemFree_v2(q));
	OK(cuMemPoolSetAttribute(pool, CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, &zero));
	OK(cuCtxSynchronize());
	WANT(used(), before);

	WANT(cuMemPoolDestroy(pool), CUDA_ERROR_INVALID_VALUE);
	props.maxSize = 64 * MIB;
	OK(cuMemPoolCreate(&own, &props));
	OK(cuMemAllocFromPoolAsync(&p, 60 * MIB, own, stream));
	WANT(cuMemAllocFromPoolAsync(&q, 10 * MIB, own, stream), CUDA_ERROR_OUT_OF_MEMORY);
	OK(cuDeviceSetMemPool(0, own));
	OK(cuDeviceGetMemPool(&got, 0));
	WANT(got == own, 1);
	OK(cuMemPoolDestroy(own));
	WANT(cuMemPoolTrimTo(own, 0), CUDA_ERROR_INVALID_VALUE);
	WANT(used() - before, 64 * MIB); /* as long as a piece of it is in use */
	OK(cuDeviceGetMemPool(&got, 0));
	WANT(got == pool, 1);
	OK(cuMemFreeAsync(p, stream));
	WANT(used(), before);
	OK(cuStreamDestroy_v2(stream));
}

static void host_memory(void)
{
	CUpointer_attribute ids[6] = {1, 2, 3, 4, 8, 9};
	void *data[6], *host, *hp;
	CUcontext ctx, current;
	CUdeviceptr dp, dptr, p;
	unsigned int type, managed;
	char mine[8192];
	int ordinal;

	data[0] = &ctx;
	data[1] = &type;
	data[2] = &dptr;
	data[3] = &hp;
	data[4] = &managed;
	data[5] = &ordinal;
	OK(cuMemHostAlloc(&host, 10000, 0));
	memset(host, 1, 10000);
	OK(cuMemHostGetDevicePointer_v2(&dp, host, 0));
	WANT(dp, (uintptr_t)host);
	OK(cuPointerGetAttributes(6, ids, data, dp));
	WANT(type, CU_MEMORYTYPE_HOST);
	WANT(hp == host, 1);
	OK(cuMemFreeHost(host));
	WANT(cuMemFreeHost(host), CUDA_ERROR_INVALID_VALUE);
	OK(cuMemAllocHost_v2(&host, 10));
	OK(cuMemFreeHost(host));

	OK(cuMemHostRegister_v2(mine, sizeof(mine), 0));
	WANT(cuMemHostRegister_v2(mine + 10, 10, 0), CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED);
	OK(cuMemHostUnregister(mine));
	WANT(cuMemHostUnregister(mine), CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED);

	OK(cuMemAlloc_v2(&p, 3 * MIB));
	OK(cuCtxGetCurrent(&current));
	OK(cuPointerGetAttributes(6, ids, data, p + 5));
	WANT(ctx == current && type == CU_MEMORYTYPE_DEVICE && dptr == p + 5 && hp == NULL && managed == 0 && ordinal == 0, 1);
	OK(cuPointerGetAttribute(&type, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, p));
	OK(cuMemFree_v2(p));
	WANT(cuPointerGetAttribute(&type, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, p), CUDA_ERROR_INVALID_VALUE);
	type = 9;
	OK(cuPointerGetAttributes(6, ids, data, (uintptr_t)mine)); /* any pointer: zeros */
	WANT(type == 0 && ctx == NULL && dptr == 0, 1);
}

static void kernels(void)
{
	CUfunction nap, empty;
	CUevent begin, end;
	CUstream stream;
	CUmodule module;
	float ms = -1;
	int64_t t;

	OK(cuModuleLoadData(&module, "any image"));
	OK(cuModuleGetFunction(&nap, module, "sleep_50ms"));
	OK(cuModuleGetFunction(&empty, module, "empty"));
	OK(cuStreamCreate(&stream, 1));
	OK(cuEventCreate(&begin, 0));
	OK(cuEventCreate(&end, 0));
	WANT(cuEventElapsedTime(&ms, begin, end), CUDA_ERROR_INVALID_HANDLE);
	OK(cuEventRecord(begin, stream));
	t = now();
	OK(cuLaunchKernel(nap, 1, 1, 1, 32, 1, 1, 0, stream, NULL, NULL));
	WANT(cuStreamQuery(stream), CUDA_ERROR_NOT_READY);
	OK(cuStreamQuery(NULL));
	OK(cuEventRecord(end, stream));
	WANT(cuEventQuery(end), CUDA_ERROR_NOT_READY);
	OK(cuStreamWaitEvent(NULL, end, 0));
	WANT(cuStreamQuery(NULL), CUDA_ERROR_NOT_READY);
	OK(cuStreamSynchronize(NULL));
	WANT(now() - t >= 50000000, 1);
	OK(cuEventSynchronize(end));
	OK(cuEventElapsedTime(&ms, begin, end));
	WANT(ms >= 50, 1);
	OK(cuLaunchKernel(empty, 1, 1, 1, 1, 1, 1, 0, NULL, NULL, NULL));
	WANT(cuLaunchKernel(empty, 0, 1, 1, 1, 1, 1, 0, NULL, NULL, NULL), CUDA_ERROR_INVALID_VALUE);
	WANT(cuLaunchKernel(empty, 1, 1, 1, 1025, 1, 1, 0, NULL, NULL, NULL), CUDA_ERROR_INVALID_VALUE);
	WANT(cuLaunchKernel(empty, 1, 1, 1, 1, 1, 1, 0, (CUstream)&t, NULL, NULL), CUDA_ERROR_INVALID_HANDLE);
	OK(cuModuleUnload(module));
	WANT(cuLaunchKernel(empty, 1, 1, 1, 1, 1, 1, 0, NULL, NULL, NULL), CUDA_ERROR_INVALID_HANDLE);
	OK(cuEventDestroy_v2(begin));
	WANT(cuEventRecord(begin, stream), CUDA_ERROR_INVALID_HANDLE);
	OK(cuStreamDestroy_v2(stream));
	WANT(cuStreamSynchronize(stream), CUDA_ERROR_INVALID_HANDLE);
	OK(cuCtxSynchronize());
}

/* Rows of a matrix, and memory of another device. */
static void rows_and_peers(void)
{
	char host[16 * 8], back[4 * 3] = "";
	CUDA_MEMCPY2D c = {.srcMemoryType = CU_MEMORYTYPE_HOST, .srcHost = host, .srcPitch = 8, .srcXInBytes = 2, .srcY = 1,
			   .dstMemoryType = CU_MEMORYTYPE_DEVICE, .dstPitch = 16, .WidthInBytes = 4, .Height = 3};
	CUDA_MEMCPY2D wrong;
	CUcontext ctx, peer, before, none = NULL;
	CUdeviceptr p, q;
	CUstream stream;
	CUgraph graph;
	size_t nodes = 0;
	int i;

	for (i = 0; i < (int)sizeof(host); i++)
		host[i] = (char)i;
	OK(cuCtxGetCurrent(&before));
	OK(cuDevicePrimaryCtxRetain(&ctx, 0));
	OK(cuDevicePrimaryCtxRetain(&peer, 1));
	OK(cuCtxSetCurrent(peer));
	OK(cuMemAlloc_v2(&q, 4096));
	OK(cuCtxSetCurrent(ctx));
	OK(cuMemAlloc_v2(&p, 2 * MIB));
	OK(cuStreamCreate(&stream, 0));

	c.dstDevice = p;
	OK(cuMemcpy2D_v2(&c));
	c = (CUDA_MEMCPY2D){.srcMemoryType = CU_MEMORYTYPE_UNIFIED, .srcDevice = p, .srcPitch = 16, .dstMemoryType = CU_MEMORYTYPE_HOST,
			    .dstHost = back, .WidthInBytes = 4, .Height = 3};
	OK(cuMemcpy2DAsync_v2(&c, stream));
	for (i = 0; i < 3; i++)
		WANT(memcmp(back + 4 * i, host + 8 * (i + 1) + 2, 4), 0);
	memset(back, 0, sizeof(back));
	OK(cuMemcpy2DUnaligned_v2(&c));
	WANT(memcmp(back, host + 10, 4), 0);

	WANT(cuMemcpy2D_v2(NULL), CUDA_ERROR_INVALID_VALUE);
	wrong = c;
	wrong.srcPitch = 3; /* less than a row */
	WANT(cuMemcpy2D_v2(&wrong), CUDA_ERROR_INVALID_VALUE);
	wrong = c;
	wrong.dstMemoryType = 7;
	WANT(cuMemcpy2D_v2(&wrong), CUDA_ERROR_INVALID_VALUE);
	wrong.dstMemoryType = CU_MEMORYTYPE_ARRAY;
	WANT(cuMemcpy2D_v2(&wrong), CUDA_ERROR_NOT_SUPPORTED);
	wrong = c;
	wrong.srcMemoryType = CU_MEMORYTYPE_DEVICE;
	wrong.srcDevice = p + 2 * MIB - 16; /* its second row is nobody's */
	WANT(cuMemcpy2D_v2(&wrong), CUDA_ERROR_INVALID_VALUE);

	/* Captured it is one node, whatever the number of rows. */
	OK(cuStreamBeginCapture_v2(stream, CU_STREAM_CAPTURE_MODE_GLOBAL));
	OK(cuMemcpy2DAsync_v2(&c, stream));
	OK(cuMemcpyPeerAsync(q, peer, p, ctx, 16, stream));
	OK(cuStreamEndCapture(stream, &graph));
	OK(cuGraphGetNodes(graph, NULL, &nodes));
	WANT(nodes, 2);
	OK(cuGraphDestroy(graph));

	OK(cuMemcpyPeer(q, peer, p, ctx, 16));
	OK(cuMemcpyDtoH_v2(back, q, 4));
	WANT(memcmp(back, host + 10, 4), 0);
	OK(cuMemcpyPeerAsync(q, peer, p, ctx, 16, stream));
	WANT(cuMemcpyPeer(q, none, p, ctx, 16), CUDA_ERROR_INVALID_CONTEXT);
	WANT(cuMemcpyPeer(q, peer, p + 2 * MIB, ctx, 16), CUDA_ERROR_INVALID_VALUE);

	OK(cuStreamDestroy_v2(stream));
	OK(cuMemFree_v2(p));
	OK(cuMemFree_v2(q));
	OK(cuDevicePrimaryCtxRelease_v2(1));
	OK(cuDevicePrimaryCtxRelease_v2(0));
	OK(cuCtxSetCurrent(before));
}

/* What programs choose their launches by. */
static void function_attributes(void)
{
	CUlibrary library;
	CUcontext ctx, before;
	CUkernel kernel;
	CUmodule module;
	CUfunction f;
	int value, blocks;

	OK(cuCtxGetCurrent(&before));
	OK(cuDevicePrimaryCtxRetain(&ctx, 0));
	OK(cuCtxSetCurrent(ctx));
	OK(cuModuleLoadData(&module, ""));
	OK(cuModuleGetFunction(&f, module, "f"));
	for (int a = 0; a < 16; a++)
		OK(cuFuncGetAttribute(&value, (CUfunction_attribute)a, f));
	WANT(cuFuncGetAttribute(&value, 16, f), CUDA_ERROR_INVALID_VALUE);
	WANT(cuFuncGetAttribute(NULL, 0, f), CUDA_ERROR_INVALID_VALUE);
	OK(cuFuncGetAttribute(&value, CU_FUNC_ATTRIBUTE_BINARY_VERSION, f));
	WANT(value, 75);

	/* More dynamic shared memory than by default is there for those who ask. */
	OK(cuFuncGetAttribute(&value, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, f));
	WANT(value, 49152);
	OK(cuOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, f, 256, 49152 + 1));
	WANT(blocks, 0);
	OK(cuFuncSetAttribute(f, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, 65536));
	OK(cuFuncGetAttribute(&value, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, f));
	WANT(value, 65536);
	OK(cuOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, f, 256, 49152 + 1));
	WANT(blocks, 1);
	WANT(cuFuncSetAttribute(f, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, 65536 + 1), CUDA_ERROR_INVALID_VALUE);
	OK(cuFuncSetAttribute(f, CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT, 100));
	WANT(cuFuncSetAttribute(f, CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT, 101), CUDA_ERROR_INVALID_VALUE);
	OK(cuFuncGetAttribute(&value, CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT, f));
	WANT(value, 100);
	WANT(cuFuncSetAttribute(f, CU_FUNC_ATTRIBUTE_BINARY_VERSION, 80), CUDA_ERROR_INVALID_VALUE);
	WANT(cuFuncSetAttribute((CUfunction)&value, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, 1), CUDA_ERROR_INVALID_HANDLE);

	/* 1,024 threads of a multiprocessor, 16 blocks, 64 KiB. */
	OK(cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(&blocks, f, 256, 0, 1));
	WANT(blocks, 4);
	OK(cuOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, f, 32, 0));
	WANT(blocks, 16);
	OK(cuOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, f, 32, 32768));
	WANT(blocks, 2);
	OK(cuOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, f, 2048, 0));
	WANT(blocks, 0);
	WANT(cuOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, f, 0, 0), CUDA_ERROR_INVALID_VALUE);
	WANT(cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(&blocks, f, 32, 0, 2), CUDA_ERROR_INVALID_VALUE);
	OK(cuModuleUnload(module));

	/* A kernel stands for its function. */
	OK(cuLibraryLoadData(&library, "", NULL, NULL, 0, NULL, NULL, 0));
	OK(cuLibraryGetKernel(&kernel, library, "k"));
	for (int a = 0; a < 16; a++)
		OK(cuKernelGetAttribute(&value, (CUfunction_attribute)a, kernel, 0));
	OK(cuKernelGetAttribute(&value, CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK, kernel, 1));
	WANT(value, 1024);
	WANT(cuKernelGetAttribute(&value, 16, kernel, 0), CUDA_ERROR_INVALID_VALUE);
	WANT(cuKernelGetAttribute(NULL, 0, kernel, 0), CUDA_ERROR_INVALID_VALUE);
	WANT(cuKernelGetAttribute(&value, 0, (CUkernel)&value, 0), CUDA_ERROR_INVALID_HANDLE);
	WANT(cuKernelGetAttribute(&value, 0, kernel, 99), CUDA_ERROR_INVALID_DEVICE);
	OK(cuFuncSetAttribute((CUfunction)kernel, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, 65536));
	OK(cuFuncGetAttribute(&value, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, (CUfunction)kernel));
	WANT(value, 65536);
	OK(cuLibraryUnload(library));
	OK(cuDevicePrimaryCtxRelease_v2(0));
	OK(cuCtxSetCurrent(before));
}

static void entry_points(void)
{
	CUresult (*ask)(const char *, void **, int, cuuint64_t, CUdriverProcAddressQueryResult *);
	CUdriverProcAddressQueryResult status = 9;
	CUuuid id = {{0}};
	const void *table = &id;
	void *f = &id;

#define ASK(name, version, flags, symbol)                                        \
	do {                                                                     \
		OK(cuGetProcAddress_v2(name, &f, version, flags, &status));      \
		WANT(f == (void *)(symbol), 1);                                  \
		WANT(status, CU_GET_PROC_ADDRESS_SUCCESS);                       \
	} while (0)
	ASK("cuMemAlloc", 2000, 0, cuMemAlloc);
	ASK("cuMemAlloc", 3010, 0, cuMemAlloc);
	ASK("cuMemAlloc", 3020, 0, cuMemAlloc_v2);
	ASK("cuMemAlloc", 12080, 1, cuMemAlloc_v2);
	ASK("cuMemAlloc", 12080, 2, cuMemAlloc_v2);
	ASK("cuCtxCreate", 3010, 0, cuCtxCreate);
	ASK("cuCtxCreate", 11030, 0, cuCtxCreate_v2);
	ASK("cuCtxCreate", 11040, 0, cuCtxCreate_v3);
	ASK("cuCtxCreate", 12050, 0, cuCtxCreate_v4);
	ASK("cuCtxCreate", 13000, 0, cuCtxCreate_v4);
	ASK("cuGetProcAddress", 11030, 0, cuGetProcAddress);
	ASK("cuGetProcAddress", 12000, 0, cuGetProcAddress_v2);
	ask = (__typeof__(ask))f;
	OK(ask("cuInit", &f, 2000, 0, &status));
	OK(cuGetProcAddress("cuMemFree", &f, 3020, 0));
	WANT(f == (void *)cuMemFree_v2, 1);

	WANT(cuGetProcAddress_v2("cuMemAllocAsync", &f, 11010, 0, &status), CUDA_ERROR_NOT_FOUND);
	WANT(f == NULL && status == CU_GET_PROC_ADDRESS_VERSION_NOT_SUFFICIENT, 1);
	f = &id;
	WANT(cuGetProcAddress_v2("cuMemAlloc_v2", &f, 12000, 0, &status), CUDA_ERROR_NOT_FOUND);
	WANT(f == NULL && status == CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND, 1);
	WANT(cuGetProcAddress_v2("cuNoSuchThing", &f, 12000, 0, NULL), CUDA_ERROR_NOT_FOUND);
	WANT(cuGetProcAddress("cuNoSuchThing", &f, 12000, 0), CUDA_ERROR_NOT_FOUND);
	WANT(cuGetProcAddress_v2(NULL, &f, 12000, 0, &status), CUDA_ERROR_INVALID_VALUE);
	WANT(cuGetProcAddress_v2("cuInit", NULL, 12000, 0, &status), CUDA_ERROR_INVALID_VALUE);
	WANT(cuGetProcAddress_v2("cuInit", &f, 12000, 3, &status), CUDA_ERROR_INVALID_VALUE);

	/* Per-thread default streams, by flag and by the door that such programs use. */
	OK(cuGetProcAddress_v2("cuStreamSynchronize", &f, 7000, 2, &status));
	WANT(f != (void *)cuStreamSynchronize, 1);
	table = f;
	OK(cuGetProcAddress_v2_ptsz("cuStreamSynchronize", &f, 7000, 0, &status));
	WANT(f == table, 1);
	OK(cuGetProcAddress_v2_ptsz("cuStreamSynchronize", &f, 7000, 1, &status));
	WANT(f == (void *)cuStreamSynchronize, 1);
	WANT(cuGetExportTable(&table, &id), CUDA_ERROR_NOT_FOUND);
	WANT(table == NULL, 1);
}

/* In a forked child nothing works, and its end does not touch what the parent has. */
static void forks(void)
{
	size_t before;
	CUdeviceptr p;
	int status;
	pid_t pid;

	OK(cuMemAlloc_v2(&p, 10 * MIB));
	before = used();
	pid = fork();
	if (pid == 0) {
		size_t f;
		CUdeviceptr q;
		int n;

		failures = 0;
		WANT(cuInit(0), CUDA_ERROR_NOT_INITIALIZED);
		WANT(cuDeviceGetCount(&n), CUDA_ERROR_NOT_INITIALIZED);
		WANT(cuMemAlloc_v2(&q, 1), CUDA_ERROR_NOT_INITIALIZED);
		WANT(cuMemFree_v2(p), CUDA_ERROR_NOT_INITIALIZED);
		WANT(cuMemGetInfo_v2(&f, NULL), CUDA_ERROR_NOT_INITIALIZED);
		exit(failures != 0);
	}
	WANT(waitpid(pid, &status, 0), pid);
	WANT(status, 0);
	WANT(used(), before);
	OK(cuMemFree_v2(p));
}

static void *churn(void *arg)
{
	CUdeviceptr p[8];
	unsigned int seed = (unsigned int)(uintptr_t)arg;
	int i, round;

	OK(cuCtxSetCurrent(arg));
	for (round = 0; round < 200; round++) {
		for (i = 0; i < 8; i++) {
			if (i % 2)
				OK(cuMemAlloc_v2(&p[i], 1 + rand_r(&seed) % (3 * MIB)));
			else
				OK(cuMemAllocAsync(&p[i], 1 + rand_r(&seed) % (3 * MIB), NULL));
			OK(cuMemsetD8_v2(p[i], (unsigned char)i, 1));
		}
		for (i = 0; i < 8; i++)
			OK(cuMemFree_v2(p[i]));
	}
	return NULL;
}

static void threads(void)
{
	size_t before = used();
	pthread_t t[4];
	CUcontext ctx;
	int i;

	OK(cuCtxGetCurrent(&ctx));
	for (i = 0; i < 4; i++)
		pthread_create(&t[i], NULL, churn, ctx);
	for (i = 0; i < 4; i++)
		pthread_join(t[i], NULL);
	OK(cuCtxSynchronize());
	WANT(used(), before);
}

/* What CUDA_VISIBLE_DEVICES makes of two GPUs: the PCI bus of each device, or the error. */
static void visible(const char *list, const char *want)
{
	char got[256] = "", id[32];
	int status, n = 0, i, fd[2];
	CUresult ret;
	ssize_t len;
	pid_t pid;

	if (pipe(fd) < 0)
		abort();
	pid = fork();
	if (pid == 0) {
		setenv("CUDA_VISIBLE_DEVICES", list, 1);
		ret = cuInit(0);
		if (ret != CUDA_SUCCESS)
			snprintf(got, sizeof(got), "%d", ret);
		else
			cuDeviceGetCount(&n);
		for (i = 0; i < n; i++) {
			cuDeviceGetPCIBusId(id, sizeof(id), i);
			memcpy(got + 2 * i, id + 5, 2);
			got[2 * i + 2] = 0;
		}
		if (write(fd[1], got, strlen(got)) < 0)
			abort();
		_exit(0);
	}
	close(fd[1]);
	len = read(fd[0], got, sizeof(got) - 1);
	got[len > 0 ? len : 0] = 0;
	close(fd[0]);
	waitpid(pid, &status, 0);
	if (strcmp(got, want) != 0) {
		fprintf(stderr, "CUDA_VISIBLE_DEVICES=%s: %s, want %s\n", list, got, want);
		failures++;
	}
}

static void visible_devices(void)
{
	const char *one = getenv("TEST_UUID1");
	char list[128];

	visible("0", "01");
	visible("1,0", "0201");
	visible(" 1 , 0 ", "0201");
	visible("", "100");
	visible("-1", "100");
	visible("0,-1,1", "01");
	visible("7", "100");
	visible("0,0", "100");
	visible("x", "100");
	visible("NoDevFiles", "100");
	visible("GPU-", "100");
	if (one) {
		visible(one, "02");
		snprintf(list, sizeof(list), "%.12s,0", one);
		visible(list, "0201");
	}
}

int main(void)
{
	visible_devices(); /* in children, before this process has initialised */
	before_init();
	devices();
	contexts();
	linear_memory();
	exhaustion();
	managed_memory();
	virtual_memory();
	pools();
	host_memory();
	kernels();
	rows_and_peers();
	function_attributes();
	entry_points();
	forks();
	threads();
	if (failures > 0)
		fprintf(stderr, "%d failed\n", failures);
	return failures != 0;
}
