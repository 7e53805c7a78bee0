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
typedef unsigned long long CUmemGenericAllocationHandle;
typedef struct CUstream_st *CUstream;
typedef struct CUmemPoolHandle_st *CUmemoryPool;
typedef struct CUarray_st *CUarray;
typedef struct CUmipmappedArray_st *CUmipmappedArray;
typedef struct CUgraph_st *CUgraph;
typedef struct CUgraphNode_st *CUgraphNode;
typedef struct CUgraphExec_st *CUgraphExec;
typedef struct CUmod_st *CUmodule;
typedef struct CUlib_st *CUlibrary;
typedef struct CUgreenCtx_st *CUgreenCtx;
typedef struct CUdevResourceDesc_st *CUdevResourceDesc;
typedef struct CUuuid_st {
	char bytes[16];
} CUuuid;

#define CU_GET_PROC_ADDRESS_DEFAULT 0
#define CU_GET_PROC_ADDRESS_LEGACY_STREAM 1
#define CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM 2

#define CU_MEM_ALLOCATION_TYPE_MANAGED 2
#define CU_MEM_LOCATION_TYPE_DEVICE 1
typedef struct CUmemLocation_st {
	int type;
	int id;
} CUmemLocation;

typedef struct CUmemAllocationProp_st {
	int type;
	int requestedHandleTypes;
	CUmemLocation location;
	void *win32HandleMetaData;
	unsigned char allocFlags[8];
} CUmemAllocationProp;

typedef struct CUmulticastObjectProp_st CUmulticastObjectProp;

#define CU_MEM_OPERATION_TYPE_MAP 1
typedef struct CUarrayMapInfo_st {
	int resourceType;
	void *resource; /* array or mipmapped array */
	int subresourceType;
	union {
		unsigned int sparseLevel[8];
		struct {
			unsigned int layer;
			unsigned long long offset, size;
		} miptail;
	} subresource;
	int memOperationType;
	int memHandleType; /* 0: the only one there is */
	CUmemGenericAllocationHandle memHandle;
	unsigned long long offset;
	unsigned int deviceBitMask, flags, reserved[2];
} CUarrayMapInfo;
_Static_assert(sizeof(CUmemAllocationProp) == 32 && sizeof(CUarrayMapInfo) == 96, "memory");

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
typedef CUresult fn_cuMemCreate(CUmemGenericAllocationHandle *, size_t, const CUmemAllocationProp *, unsigned long long flags);
typedef CUresult fn_cuMemFree(CUdeviceptr_v1);
typedef CUresult fn_cuMemFree_v2(CUdeviceptr);
typedef CUresult fn_cuMemGetAllocationPropertiesFromHandle(CUmemAllocationProp *, CUmemGenericAllocationHandle);
typedef CUresult fn_cuMemGetInfo(unsigned int *free, unsigned int *total);
typedef CUresult fn_cuMemGetInfo_v2(size_t *free, size_t *total);
typedef CUresult fn_cuMemImportFromShareableHandle(CUmemGenericAllocationHandle *, void *, int type);
typedef CUresult fn_cuMemMap(CUdeviceptr, size_t, size_t offset, CUmemGenericAllocationHandle, unsigned long long flags);
typedef CUresult fn_cuMemMapArrayAsync(CUarrayMapInfo *, unsigned int count, CUstream);
typedef CUresult fn_cuMemMapArrayAsync_ptsz(CUarrayMapInfo *, unsigned int count, CUstream);
typedef CUresult fn_cuMemRelease(CUmemGenericAllocationHandle);
typedef CUresult fn_cuMemRetainAllocationHandle(CUmemGenericAllocationHandle *, void *);
typedef CUresult fn_cuMemUnmap(CUdeviceptr, size_t);
typedef CUresult fn_cuMulticastBindAddr(CUmemGenericAllocationHandle, size_t at, CUdeviceptr, size_t, unsigned long long flags);
typedef CUresult fn_cuMulticastBindAddr_v2(CUmemGenericAllocationHandle, CUdevice, size_t at, CUdeviceptr, size_t,
					   unsigned long long flags);
typedef CUresult fn_cuMulticastBindMem(CUmemGenericAllocationHandle, size_t at, CUmemGenericAllocationHandle, size_t offset,
				       size_t, unsigned long long flags);
typedef CUresult fn_cuMulticastBindMem_v2(CUmemGenericAllocationHandle, CUdevice, size_t at, CUmemGenericAllocationHandle,
					  size_t offset, size_t, unsigned long long flags);
typedef CUresult fn_cuMulticastCreate(CUmemGenericAllocationHandle *, const CUmulticastObjectProp *);
typedef CUresult fn_cuMulticastUnbind(CUmemGenericAllocationHandle, CUdevice, size_t at, size_t);

#define CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL 9
typedef CUresult fn_cuPointerGetAttribute(void *, int attribute, CUdeviceptr);

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
