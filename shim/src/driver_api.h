/* SPDX-License-Identifier: Apache-2.0 */
/*
 * driver_api.h: what the shim uses of the binary interfaces of libcuda.so.1 and
 * libnvidia-ml.so.1: types, numbers and one function type for each entry point that is hooked
 * or called. Names are the interfaces' own.
 */
#ifndef GPUFENCE_DRIVER_API_H
#define GPUFENCE_DRIVER_API_H

#include <stddef.h>
#include <stdint.h>

typedef int CUresult;
#define CUDA_SUCCESS 0
#define CUDA_ERROR_INVALID_VALUE 1
#define CUDA_ERROR_OUT_OF_MEMORY 2
#define CUDA_ERROR_NOT_SUPPORTED 801

typedef int CUdevice;
typedef unsigned long long CUdeviceptr;
typedef unsigned int CUdeviceptr_v1;
typedef uint64_t cuuint64_t;
typedef struct CUctx_st *CUcontext;
typedef struct CUexecAffinityParam_st CUexecAffinityParam;
typedef struct CUctxCreateParams_st CUctxCreateParams;
typedef struct CUuuid_st {
	char bytes[16];
} CUuuid;

#define CU_GET_PROC_ADDRESS_DEFAULT 0
#define CU_GET_PROC_ADDRESS_LEGACY_STREAM 1
#define CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM 2

typedef CUresult fn_cuCtxCreate(CUcontext *, unsigned int flags, CUdevice);
typedef CUresult fn_cuCtxCreate_v2(CUcontext *, unsigned int flags, CUdevice);
typedef CUresult fn_cuCtxCreate_v3(CUcontext *, CUexecAffinityParam *, int count, unsigned int flags, CUdevice);
typedef CUresult fn_cuCtxCreate_v4(CUcontext *, CUctxCreateParams *, unsigned int flags, CUdevice);
typedef CUresult fn_cuCtxDestroy(CUcontext);
typedef CUresult fn_cuCtxDestroy_v2(CUcontext);
typedef CUresult fn_cuCtxGetCurrent(CUcontext *);
typedef CUresult fn_cuCtxGetDevice(CUdevice *);
typedef CUresult fn_cuDeviceGetUuid(CUuuid *, CUdevice);
typedef CUresult fn_cuDeviceGetUuid_v2(CUuuid *, CUdevice);
typedef CUresult fn_cuDevicePrimaryCtxRelease(CUdevice);
typedef CUresult fn_cuDevicePrimaryCtxRelease_v2(CUdevice);
typedef CUresult fn_cuDevicePrimaryCtxReset(CUdevice);
typedef CUresult fn_cuDevicePrimaryCtxReset_v2(CUdevice);
typedef CUresult fn_cuDevicePrimaryCtxRetain(CUcontext *, CUdevice);
typedef CUresult fn_cuDeviceTotalMem(unsigned int *, CUdevice);
typedef CUresult fn_cuDeviceTotalMem_v2(size_t *, CUdevice);
typedef CUresult fn_cuGetProcAddress(const char *, void **, int version, cuuint64_t flags);
typedef CUresult fn_cuGetProcAddress_v2(const char *, void **, int version, cuuint64_t flags, int *status);
typedef CUresult fn_cuInit(unsigned int flags);
typedef CUresult fn_cuMemAlloc(CUdeviceptr_v1 *, unsigned int);
typedef CUresult fn_cuMemAlloc_v2(CUdeviceptr *, size_t);
typedef CUresult fn_cuMemAllocManaged(CUdeviceptr *, size_t, unsigned int flags);
typedef CUresult fn_cuMemAllocPitch(CUdeviceptr_v1 *, unsigned int *pitch, unsigned int width, unsigned int height,
				    unsigned int element);
typedef CUresult fn_cuMemAllocPitch_v2(CUdeviceptr *, size_t *pitch, size_t width, size_t height,
				       unsigned int element);
typedef CUresult fn_cuMemFree(CUdeviceptr_v1);
typedef CUresult fn_cuMemFree_v2(CUdeviceptr);
typedef CUresult fn_cuMemGetInfo(unsigned int *free, unsigned int *total);
typedef CUresult fn_cuMemGetInfo_v2(size_t *free, size_t *total);

typedef int nvmlReturn_t;
#define NVML_SUCCESS 0
#define NVML_ERROR_FUNCTION_NOT_FOUND 13
#define NVML_DEVICE_UUID_V2_BUFFER_SIZE 96

typedef struct nvmlDevice_st *nvmlDevice_t;
typedef struct nvmlMemory_st {
	unsigned long long total;
	unsigned long long free;
	unsigned long long used;
} nvmlMemory_t;
typedef struct nvmlMemory_v2_st {
	unsigned int version;
	unsigned long long total;
	unsigned long long reserved;
	unsigned long long free;
	unsigned long long used;
} nvmlMemory_v2_t;

typedef nvmlReturn_t fn_nvmlDeviceGetMemoryInfo(nvmlDevice_t, nvmlMemory_t *);
typedef nvmlReturn_t fn_nvmlDeviceGetMemoryInfo_v2(nvmlDevice_t, nvmlMemory_v2_t *);
typedef nvmlReturn_t fn_nvmlDeviceGetUUID(nvmlDevice_t, char *, unsigned int length);

#endif
