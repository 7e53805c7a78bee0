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
#define CU_MEM_LOCATION_TYPE_HOST 2
#define CU_MEM_LOCATION_TYPE_HOST_NUMA 3
#define CU_MEM_LOCATION_TYPE_HOST_NUMA_CURRENT 4
#define CU_DEVICE_CPU ((CUdevice)-1)
#define CU_MEM_ADVISE_SET_READ_MOSTLY 1u
#define CU_MEM_ADVISE_SET_PREFERRED_LOCATION 3u
#define CU_MEM_ADVISE_UNSET_PREFERRED_LOCATION 4u
#define CU_MEM_ATTACH_GLOBAL 1u
#define CU_MEM_LOCATION_TYPE_DEVICE_LOCALITY_DOMAIN 6 /* id: of the device in the lowest byte, of its part above */
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

#define CU_LIMIT_STACK_SIZE 0
#define CU_LIMIT_PRINTF_FIFO_SIZE 1
#define CU_LIMIT_MALLOC_HEAP_SIZE 2
#define CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT 16
#define CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR 39

typedef CUresult fn_cuCtxAttach(CUcontext *, unsigned int flags);
typedef CUresult fn_cuCtxCreate(CUcontext *, unsigned int flags, CUdevice);
typedef CUresult fn_cuCtxCreate_v2(CUcontext *, unsigned int flags, CUdevice);
typedef CUresult fn_cuCtxCreate_v3(CUcontext *, CUexecAffinityParam *, int count, unsigned int flags, CUdevice);
typedef CUresult fn_cuCtxCreate_v4(CUcontext *, CUctxCreateParams *, unsigned int flags, CUdevice);
typedef CUresult fn_cuCtxDestroy(CUcontext);
typedef CUresult fn_cuCtxDestroy_v2(CUcontext);
typedef CUresult fn_cuCtxDetach(CUcontext);
typedef CUresult fn_cuCtxFromGreenCtx(CUcontext *, CUgreenCtx);
typedef CUresult fn_cuCtxGetCurrent(CUcontext *);
typedef CUresult fn_cuCtxGetDevice(CUdevice *);
typedef CUresult fn_cuCtxGetLimit(size_t *, int limit);
typedef CUresult fn_cuCtxSetLimit(int limit, size_t);
typedef CUresult fn_cuDeviceGetAttribute(int *, int attribute, CUdevice);
typedef CUresult fn_cuDeviceGetUuid(CUuuid *, CUdevice);
typedef CUresult fn_cuDeviceGetUuid_v2(CUuuid *, CUdevice);
typedef CUresult fn_cuDevicePrimaryCtxGetState(CUdevice, unsigned int *flags, int *active);
typedef CUresult fn_cuDevicePrimaryCtxRelease(CUdevice);
typedef CUresult fn_cuDevicePrimaryCtxRelease_v2(CUdevice);
typedef CUresult fn_cuDevicePrimaryCtxReset(CUdevice);
typedef CUresult fn_cuDevicePrimaryCtxReset_v2(CUdevice);
typedef CUresult fn_cuDevicePrimaryCtxRetain(CUcontext *, CUdevice);
typedef CUresult fn_cuDeviceTotalMem(unsigned int *, CUdevice);
typedef CUresult fn_cuDeviceTotalMem_v2(size_t *, CUdevice);
typedef CUresult fn_cuGetProcAddress(const char *, void **, int version, cuuint64_t flags);
typedef fn_cuGetProcAddress fn_cuGetProcAddress_ptsz;
typedef CUresult fn_cuGetProcAddress_v2_ptsz(const char *, void **, int version, cuuint64_t flags, int *status);
typedef CUresult fn_cuGetProcAddress_v2(const char *, void **, int version, cuuint64_t flags, int *status);
typedef CUresult fn_cuGLCtxCreate(CUcontext *, unsigned int flags, CUdevice);
typedef CUresult fn_cuGLCtxCreate_v2(CUcontext *, unsigned int flags, CUdevice);
typedef CUresult fn_cuGreenCtxCreate(CUgreenCtx *, CUdevResourceDesc, CUdevice, unsigned int flags);
typedef CUresult fn_cuGreenCtxDestroy(CUgreenCtx);
typedef CUresult fn_cuInit(unsigned int flags);
typedef CUresult fn_cuLibraryLoadData(CUlibrary *, const void *code, int *jit, void **jit_values, unsigned int jit_count,
				      int *options, void **values, unsigned int count);
typedef CUresult fn_cuLibraryLoadFromFile(CUlibrary *, const char *path, int *jit, void **jit_values, unsigned int jit_count,
					  int *options, void **values, unsigned int count);
typedef CUresult fn_cuLibraryUnload(CUlibrary);
typedef CUresult fn_cuMemAdvise(CUdeviceptr, size_t, unsigned int advice, CUdevice);
typedef CUresult fn_cuMemAdvise_v2(CUdeviceptr, size_t, unsigned int advice, CUmemLocation);
typedef CUresult fn_cuMemPrefetchAsync(CUdeviceptr, size_t, CUdevice, CUstream);
typedef CUresult fn_cuMemPrefetchAsync_ptsz(CUdeviceptr, size_t, CUdevice, CUstream);
typedef CUresult fn_cuMemPrefetchAsync_v2(CUdeviceptr, size_t, CUmemLocation, unsigned int flags, CUstream);
typedef CUresult fn_cuMemPrefetchAsync_v2_ptsz(CUdeviceptr, size_t, CUmemLocation, unsigned int flags, CUstream);
typedef CUresult fn_cuMemPrefetchBatchAsync(CUdeviceptr *, size_t *, size_t count, CUmemLocation *, size_t *first, size_t places,
					    unsigned long long flags, CUstream);
typedef fn_cuMemPrefetchBatchAsync fn_cuMemPrefetchBatchAsync_ptsz;
typedef fn_cuMemPrefetchBatchAsync fn_cuMemDiscardAndPrefetchBatchAsync;
typedef fn_cuMemPrefetchBatchAsync fn_cuMemDiscardAndPrefetchBatchAsync_ptsz;
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
typedef struct CUextMemory_st *CUexternalMemory;
typedef struct CUDA_EXTERNAL_MEMORY_HANDLE_DESC_st CUDA_EXTERNAL_MEMORY_HANDLE_DESC;
typedef struct CUipcMemHandle_st {
	char reserved[64];
} CUipcMemHandle;
typedef struct CUmemPoolPtrExportData_st CUmemPoolPtrExportData;
typedef CUresult fn_cuImportExternalMemory(CUexternalMemory *, const CUDA_EXTERNAL_MEMORY_HANDLE_DESC *);
typedef CUresult fn_cuIpcOpenMemHandle(CUdeviceptr *, CUipcMemHandle, unsigned int flags);
typedef CUresult fn_cuIpcOpenMemHandle_v2(CUdeviceptr *, CUipcMemHandle, unsigned int flags);
typedef CUresult fn_cuMemPoolImportPointer(CUdeviceptr *, CUmemoryPool, CUmemPoolPtrExportData *);
typedef CUresult fn_cuMemMap(CUdeviceptr, size_t, size_t offset, CUmemGenericAllocationHandle, unsigned long long flags);
typedef CUresult fn_cuMemMapArrayAsync(CUarrayMapInfo *, unsigned int count, CUstream);
typedef CUresult fn_cuMemMapArrayAsync_ptsz(CUarrayMapInfo *, unsigned int count, CUstream);
typedef CUresult fn_cuMemRelease(CUmemGenericAllocationHandle);
typedef CUresult fn_cuMemRetainAllocationHandle(CUmemGenericAllocationHandle *, void *);
typedef CUresult fn_cuMemUnmap(CUdeviceptr, size_t);
typedef CUresult fn_cuModuleLoad(CUmodule *, const char *path);
typedef CUresult fn_cuModuleLoadData(CUmodule *, const void *image);
typedef CUresult fn_cuModuleLoadDataEx(CUmodule *, const void *image, unsigned int count, int *options, void **values);
typedef CUresult fn_cuModuleLoadFatBinary(CUmodule *, const void *image);
typedef CUresult fn_cuModuleUnload(CUmodule);
typedef uint32_t CUlogicalEndpointId;
typedef CUresult fn_cuLogicalEndpointBindAddr(CUlogicalEndpointId, CUdevice, uint64_t at, void *, uint64_t, unsigned long long flags);
typedef CUresult fn_cuLogicalEndpointBindMem(CUlogicalEndpointId, CUdevice, uint64_t at, CUmemGenericAllocationHandle,
					     uint64_t offset, uint64_t, unsigned long long flags);
typedef CUresult fn_cuLogicalEndpointDestroy(CUlogicalEndpointId);
typedef CUresult fn_cuLogicalEndpointUnbind(CUlogicalEndpointId, CUdevice, uint64_t at, uint64_t);
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

#define CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT 5
#define CU_MEMPOOL_ATTR_ALLOCATION_TYPE 9 /* these since CUDA 13 */
#define CU_MEMPOOL_ATTR_LOCATION_ID 11
#define CU_MEMPOOL_ATTR_LOCATION_TYPE 12
#define CU_GRAPH_MEM_ATTR_RESERVED_MEM_CURRENT 2
#define CU_STREAM_CAPTURE_STATUS_NONE 0
#define CU_STREAM_LEGACY ((CUstream)1)
#define CU_STREAM_PER_THREAD ((CUstream)2)

typedef struct CUmemPoolProps_st {
	int allocType, handleTypes;
	CUmemLocation location;
	void *win32SecurityAttributes;
	size_t maxSize;
	unsigned short usage;
	unsigned char reserved[54];
} CUmemPoolProps;
_Static_assert(sizeof(CUmemPoolProps) == 88, "pools");

typedef CUresult fn_cuCtxPopCurrent_v2(CUcontext *);
typedef CUresult fn_cuCtxPushCurrent_v2(CUcontext);
typedef CUresult fn_cuDeviceGetDefaultMemPool(CUmemoryPool *, CUdevice);
typedef CUresult fn_cuDeviceGetGraphMemAttribute(CUdevice, int attribute, void *);
typedef CUresult fn_cuDeviceGetMemPool(CUmemoryPool *, CUdevice);
typedef CUresult fn_cuDeviceGraphMemTrim(CUdevice);
typedef CUresult fn_cuMemAllocAsync(CUdeviceptr *, size_t, CUstream);
typedef CUresult fn_cuMemAllocAsync_ptsz(CUdeviceptr *, size_t, CUstream);
typedef CUresult fn_cuMemAllocFromPoolAsync(CUdeviceptr *, size_t, CUmemoryPool, CUstream);
typedef CUresult fn_cuMemAllocFromPoolAsync_ptsz(CUdeviceptr *, size_t, CUmemoryPool, CUstream);
typedef CUresult fn_cuMemFreeAsync(CUdeviceptr, CUstream);
typedef CUresult fn_cuMemFreeAsync_ptsz(CUdeviceptr, CUstream);
typedef CUresult fn_cuMemPoolCreate(CUmemoryPool *, const CUmemPoolProps *);
typedef CUresult fn_cuMemPoolDestroy(CUmemoryPool);
typedef CUresult fn_cuMemPoolGetAttribute(CUmemoryPool, int attribute, void *);
typedef CUresult fn_cuMemPoolImportFromShareableHandle(CUmemoryPool *, void *, int type, unsigned long long flags);
typedef CUresult fn_cuMemPoolTrimTo(CUmemoryPool, size_t);
typedef CUresult fn_cuStreamGetCtx(CUstream, CUcontext *);
typedef CUresult fn_cuStreamGetDevice(CUstream, CUdevice *);
typedef CUresult fn_cuStreamIsCapturing(CUstream, int *status);
typedef CUresult fn_cuStreamIsCapturing_ptsz(CUstream, int *status);

/* Both forms of a node that allocates have this layout. */
typedef struct CUDA_MEM_ALLOC_NODE_PARAMS_st {
	CUmemPoolProps poolProps;
	const void *accessDescs;
	size_t accessDescCount, bytesize;
	CUdeviceptr dptr;
} CUDA_MEM_ALLOC_NODE_PARAMS;
typedef struct CUDA_GRAPH_INSTANTIATE_PARAMS_st {
	cuuint64_t flags;
	CUstream hUploadStream;
	CUgraphNode hErrNode_out;
	int result_out;
} CUDA_GRAPH_INSTANTIATE_PARAMS;
_Static_assert(sizeof(CUDA_MEM_ALLOC_NODE_PARAMS) == 120 && sizeof(CUDA_GRAPH_INSTANTIATE_PARAMS) == 32, "graphs");
#define CU_GRAPH_NODE_TYPE_GRAPH 4
#define CU_GRAPH_NODE_TYPE_MEM_ALLOC 10
#define CU_GRAPH_NODE_TYPE_MEM_FREE 11
#define CUDA_GRAPH_INSTANTIATE_FLAG_UPLOAD 2

typedef CUresult fn_cuGraphChildGraphNodeGetGraph(CUgraphNode, CUgraph *);
typedef CUresult fn_cuGraphExecDestroy(CUgraphExec);
typedef CUresult fn_cuGraphGetNodes(CUgraph, CUgraphNode *, size_t *count);
typedef CUresult fn_cuGraphInstantiate(CUgraphExec *, CUgraph, CUgraphNode *error, char *log, size_t);
typedef CUresult fn_cuGraphInstantiate_v2(CUgraphExec *, CUgraph, CUgraphNode *error, char *log, size_t);
typedef CUresult fn_cuGraphInstantiateWithFlags(CUgraphExec *, CUgraph, unsigned long long flags);
typedef CUresult fn_cuGraphInstantiateWithParams(CUgraphExec *, CUgraph, CUDA_GRAPH_INSTANTIATE_PARAMS *);
typedef CUresult fn_cuGraphInstantiateWithParams_ptsz(CUgraphExec *, CUgraph, CUDA_GRAPH_INSTANTIATE_PARAMS *);
typedef CUresult fn_cuGraphLaunch(CUgraphExec, CUstream);
typedef CUresult fn_cuGraphLaunch_ptsz(CUgraphExec, CUstream);
typedef CUresult fn_cuGraphMemAllocNodeGetParams(CUgraphNode, CUDA_MEM_ALLOC_NODE_PARAMS *);
typedef CUresult fn_cuGraphMemFreeNodeGetParams(CUgraphNode, CUdeviceptr *);
typedef CUresult fn_cuGraphNodeGetType(CUgraphNode, int *type);
typedef CUresult fn_cuGraphUpload(CUgraphExec, CUstream);
typedef CUresult fn_cuGraphUpload_ptsz(CUgraphExec, CUstream);

typedef struct CUfunc_st *CUfunction;
typedef struct CUlaunchConfig_st {
	unsigned int gridDim[3], blockDim[3], sharedMemBytes;
	CUstream hStream;
	void *attrs;
	unsigned int numAttrs;
} CUlaunchConfig;
typedef struct CUDA_LAUNCH_PARAMS_st {
	CUfunction function;
	unsigned int gridDim[3], blockDim[3], sharedMemBytes;
	CUstream hStream;
	void **kernelParams;
} CUDA_LAUNCH_PARAMS;
_Static_assert(offsetof(CUlaunchConfig, hStream) == 32 && sizeof(CUlaunchConfig) == 56, "launches");
_Static_assert(offsetof(CUDA_LAUNCH_PARAMS, hStream) == 40 && sizeof(CUDA_LAUNCH_PARAMS) == 56, "launches");

typedef CUresult fn_cuLaunch(CUfunction);
typedef CUresult fn_cuLaunchCooperativeKernel(CUfunction, unsigned int gx, unsigned int gy, unsigned int gz, unsigned int bx,
					      unsigned int by, unsigned int bz, unsigned int shared, CUstream, void **params);
typedef fn_cuLaunchCooperativeKernel fn_cuLaunchCooperativeKernel_ptsz;
typedef CUresult fn_cuLaunchCooperativeKernelMultiDevice(CUDA_LAUNCH_PARAMS *list, unsigned int count, unsigned int flags);
typedef CUresult fn_cuLaunchGrid(CUfunction, int width, int height);
typedef CUresult fn_cuLaunchGridAsync(CUfunction, int width, int height, CUstream);
typedef CUresult fn_cuLaunchKernel(CUfunction, unsigned int gx, unsigned int gy, unsigned int gz, unsigned int bx,
				   unsigned int by, unsigned int bz, unsigned int shared, CUstream, void **params, void **extra);
typedef fn_cuLaunchKernel fn_cuLaunchKernel_ptsz;
typedef CUresult fn_cuLaunchKernelEx(const CUlaunchConfig *, CUfunction, void **params, void **extra);
typedef fn_cuLaunchKernelEx fn_cuLaunchKernelEx_ptsz;

typedef struct CUDA_ARRAY_DESCRIPTOR_st {
	size_t Width, Height;
	int Format;
	unsigned int NumChannels;
} CUDA_ARRAY_DESCRIPTOR;
typedef struct CUDA_ARRAY_DESCRIPTOR_v1_st {
	unsigned int Width, Height;
	int Format;
	unsigned int NumChannels;
} CUDA_ARRAY_DESCRIPTOR_v1;
typedef struct CUDA_ARRAY3D_DESCRIPTOR_st {
	size_t Width, Height, Depth;
	int Format;
	unsigned int NumChannels, Flags;
} CUDA_ARRAY3D_DESCRIPTOR;
typedef struct CUDA_ARRAY3D_DESCRIPTOR_v1_st {
	unsigned int Width, Height, Depth;
	int Format;
	unsigned int NumChannels, Flags;
} CUDA_ARRAY3D_DESCRIPTOR_v1;
_Static_assert(sizeof(CUDA_ARRAY3D_DESCRIPTOR) == 40 && sizeof(CUDA_ARRAY3D_DESCRIPTOR_v1) == 24, "arrays");
#define CUDA_ARRAY3D_LAYERED 0x01u
#define CUDA_ARRAY3D_CUBEMAP 0x04u
#define CUDA_ARRAY3D_SPARSE 0x40u
#define CUDA_ARRAY3D_DEFERRED_MAPPING 0x80u

typedef CUresult fn_cuArray3DCreate(CUarray *, const CUDA_ARRAY3D_DESCRIPTOR_v1 *);
typedef CUresult fn_cuArray3DCreate_v2(CUarray *, const CUDA_ARRAY3D_DESCRIPTOR *);
typedef CUresult fn_cuArrayCreate(CUarray *, const CUDA_ARRAY_DESCRIPTOR_v1 *);
typedef CUresult fn_cuArrayCreate_v2(CUarray *, const CUDA_ARRAY_DESCRIPTOR *);
typedef CUresult fn_cuArrayDestroy(CUarray);
typedef CUresult fn_cuMipmappedArrayCreate(CUmipmappedArray *, const CUDA_ARRAY3D_DESCRIPTOR *, unsigned int levels);
typedef CUresult fn_cuMipmappedArrayDestroy(CUmipmappedArray);

typedef CUresult fn_cuVDPAUCtxCreate(CUcontext *, unsigned int flags, CUdevice, uint32_t vdp_device, void *get_proc_address);
typedef CUresult fn_cuVDPAUCtxCreate_v2(CUcontext *, unsigned int flags, CUdevice, uint32_t vdp_device, void *get_proc_address);

typedef int nvmlReturn_t;
#define NVML_SUCCESS 0
#define NVML_ERROR_NOT_FOUND 6
#define NVML_ERROR_FUNCTION_NOT_FOUND 13
#define NVML_ERROR_ARGUMENT_VERSION_MISMATCH 25
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

/* Rows of the process lists: of the first version, and of the second and third. */
typedef struct nvmlProcessInfo_v1_st {
	unsigned int pid;
	unsigned long long usedGpuMemory;
} nvmlProcessInfo_v1_t;
typedef struct nvmlProcessInfo_st {
	unsigned int pid;
	unsigned long long usedGpuMemory;
	unsigned int gpuInstanceId;
	unsigned int computeInstanceId;
} nvmlProcessInfo_t;

/* Rows in an array that the argument points to. Its version has the argument's size, not the rows'. */
typedef struct nvmlProcessDetail_v1_st {
	unsigned int pid;
	unsigned long long usedGpuMemory;
	unsigned int gpuInstanceId;
	unsigned int computeInstanceId;
	unsigned long long usedGpuCcProtectedMemory;
} nvmlProcessDetail_v1_t;
typedef struct nvmlProcessDetailList_st {
	unsigned int version;
	unsigned int mode;
	unsigned int numProcArrayEntries;
	nvmlProcessDetail_v1_t *procArray;
} nvmlProcessDetailList_t;
#define NVML_PROCESS_DETAIL_LIST_V1 ((unsigned int)sizeof(nvmlProcessDetailList_t) | 1u << 24)

typedef struct nvmlProcessUtilizationSample_st {
	unsigned int pid;
	unsigned long long timeStamp;
	unsigned int smUtil;
	unsigned int memUtil;
	unsigned int encUtil;
	unsigned int decUtil;
} nvmlProcessUtilizationSample_t;
typedef struct nvmlProcessUtilizationInfo_v1_st {
	unsigned long long timeStamp;
	unsigned int pid;
	unsigned int smUtil;
	unsigned int memUtil;
	unsigned int encUtil;
	unsigned int decUtil;
	unsigned int jpgUtil;
	unsigned int ofaUtil;
} nvmlProcessUtilizationInfo_v1_t;
typedef struct nvmlProcessesUtilizationInfo_st {
	unsigned int version;
	unsigned int processSamplesCount;
	unsigned long long lastSeenTimeStamp;
	nvmlProcessUtilizationInfo_v1_t *procUtilArray;
} nvmlProcessesUtilizationInfo_t;
#define NVML_PROCESSES_UTILIZATION_V1 ((unsigned int)sizeof(nvmlProcessesUtilizationInfo_t) | 1u << 24)

typedef nvmlReturn_t fn_nvmlDeviceGetComputeRunningProcesses(nvmlDevice_t, unsigned int *count, nvmlProcessInfo_v1_t *);
typedef nvmlReturn_t fn_nvmlDeviceGetComputeRunningProcesses_v2(nvmlDevice_t, unsigned int *count, nvmlProcessInfo_t *);
typedef nvmlReturn_t fn_nvmlDeviceGetComputeRunningProcesses_v3(nvmlDevice_t, unsigned int *count, nvmlProcessInfo_t *);
typedef nvmlReturn_t fn_nvmlDeviceGetGraphicsRunningProcesses(nvmlDevice_t, unsigned int *count, nvmlProcessInfo_v1_t *);
typedef nvmlReturn_t fn_nvmlDeviceGetGraphicsRunningProcesses_v2(nvmlDevice_t, unsigned int *count, nvmlProcessInfo_t *);
typedef nvmlReturn_t fn_nvmlDeviceGetGraphicsRunningProcesses_v3(nvmlDevice_t, unsigned int *count, nvmlProcessInfo_t *);
typedef nvmlReturn_t fn_nvmlDeviceGetMPSComputeRunningProcesses(nvmlDevice_t, unsigned int *count, nvmlProcessInfo_v1_t *);
typedef nvmlReturn_t fn_nvmlDeviceGetMPSComputeRunningProcesses_v2(nvmlDevice_t, unsigned int *count, nvmlProcessInfo_t *);
typedef nvmlReturn_t fn_nvmlDeviceGetMPSComputeRunningProcesses_v3(nvmlDevice_t, unsigned int *count, nvmlProcessInfo_t *);
typedef nvmlReturn_t fn_nvmlDeviceGetMemoryInfo(nvmlDevice_t, nvmlMemory_t *);
typedef nvmlReturn_t fn_nvmlDeviceGetMemoryInfo_v2(nvmlDevice_t, nvmlMemory_v2_t *);
typedef nvmlReturn_t fn_nvmlDeviceGetProcessUtilization(nvmlDevice_t, nvmlProcessUtilizationSample_t *, unsigned int *count,
							unsigned long long last_seen);
typedef nvmlReturn_t fn_nvmlDeviceGetProcessesUtilizationInfo(nvmlDevice_t, nvmlProcessesUtilizationInfo_t *);
typedef nvmlReturn_t fn_nvmlDeviceGetRunningProcessDetailList(nvmlDevice_t, nvmlProcessDetailList_t *);
typedef nvmlReturn_t fn_nvmlDeviceGetUUID(nvmlDevice_t, char *, unsigned int length);

#endif
