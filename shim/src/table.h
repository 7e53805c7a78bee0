/* SPDX-License-Identifier: Apache-2.0 */
/*
 * table.h: THE table. One row for each exported variant of each entry point that the shim
 * hooks, in the order of the symbols. To hook another one: a row here, its function type in
 * driver_api.h, its hook, its line in libgpufence.map (a test compares the three).
 *
 *   ROW(library, symbol, name, version, stream)
 *     symbol   what the library exports and dlsym asks for
 *     name     what cuGetProcAddress is asked for
 *     version  of CUDA that brought this ABI: cuGetProcAddress gives the newest not above the
 *              one asked for
 *     stream   ANY, or PER_THREAD for the variant that cuGetProcAddress gives for flag 2, or
 *              BY_SYMBOL for one that it is not known to give
 */
#ifndef GPUFENCE_TABLE_H
#define GPUFENCE_TABLE_H

#include <stddef.h>
#include <stdint.h>

#include "driver_api.h"

#define TABLE_HOOKED(ROW)                                                                         \
	ROW(CUDA, cuArray3DCreate, cuArray3DCreate, 2000, ANY)                                   \
	ROW(CUDA, cuArray3DCreate_v2, cuArray3DCreate, 3020, ANY)                                \
	ROW(CUDA, cuArrayCreate, cuArrayCreate, 2000, ANY)                                       \
	ROW(CUDA, cuArrayCreate_v2, cuArrayCreate, 3020, ANY)                                    \
	ROW(CUDA, cuArrayDestroy, cuArrayDestroy, 2000, ANY)                                     \
	ROW(CUDA, cuCtxAttach, cuCtxAttach, 2000, ANY)                                           \
	ROW(CUDA, cuCtxCreate, cuCtxCreate, 2000, ANY)                                           \
	ROW(CUDA, cuCtxCreate_v2, cuCtxCreate, 3020, ANY)                                        \
	ROW(CUDA, cuCtxCreate_v3, cuCtxCreate, 11040, ANY)                                       \
	ROW(CUDA, cuCtxCreate_v4, cuCtxCreate, 12050, ANY)                                       \
	ROW(CUDA, cuCtxDestroy, cuCtxDestroy, 2000, ANY)                                         \
	ROW(CUDA, cuCtxDestroy_v2, cuCtxDestroy, 4000, ANY)                                      \
	ROW(CUDA, cuCtxDetach, cuCtxDetach, 2000, ANY)                                           \
	ROW(CUDA, cuCtxSetLimit, cuCtxSetLimit, 3010, ANY)                                       \
	ROW(CUDA, cuDeviceGraphMemTrim, cuDeviceGraphMemTrim, 11040, ANY)                        \
	ROW(CUDA, cuDevicePrimaryCtxRelease, cuDevicePrimaryCtxRelease, 7000, ANY)               \
	ROW(CUDA, cuDevicePrimaryCtxRelease_v2, cuDevicePrimaryCtxRelease, 11000, ANY)           \
	ROW(CUDA, cuDevicePrimaryCtxReset, cuDevicePrimaryCtxReset, 7000, ANY)                   \
	ROW(CUDA, cuDevicePrimaryCtxReset_v2, cuDevicePrimaryCtxReset, 11000, ANY)               \
	ROW(CUDA, cuDevicePrimaryCtxRetain, cuDevicePrimaryCtxRetain, 7000, ANY)                 \
	ROW(CUDA, cuDeviceTotalMem, cuDeviceTotalMem, 2000, ANY)                                 \
	ROW(CUDA, cuDeviceTotalMem_v2, cuDeviceTotalMem, 3020, ANY)                              \
	ROW(CUDA, cuGLCtxCreate, cuGLCtxCreate, 2000, ANY)                                       \
	ROW(CUDA, cuGLCtxCreate_v2, cuGLCtxCreate, 3020, ANY)                                    \
	ROW(CUDA, cuGetProcAddress, cuGetProcAddress, 11030, ANY)                                \
	ROW(CUDA, cuGetProcAddress_ptsz, cuGetProcAddress, 11030, BY_SYMBOL)                     \
	ROW(CUDA, cuGetProcAddress_v2, cuGetProcAddress, 12000, ANY)                             \
	ROW(CUDA, cuGetProcAddress_v2_ptsz, cuGetProcAddress, 12000, BY_SYMBOL)                  \
	ROW(CUDA, cuGraphExecDestroy, cuGraphExecDestroy, 10000, ANY)                            \
	ROW(CUDA, cuGraphInstantiate, cuGraphInstantiate, 10000, ANY)                            \
	ROW(CUDA, cuGraphInstantiateWithFlags, cuGraphInstantiateWithFlags, 11040, ANY)          \
	ROW(CUDA, cuGraphInstantiateWithParams, cuGraphInstantiateWithParams, 12000, ANY)        \
	ROW(CUDA, cuGraphInstantiateWithParams_ptsz, cuGraphInstantiateWithParams, 12000, PER_THREAD) \
	ROW(CUDA, cuGraphInstantiate_v2, cuGraphInstantiate, 11000, ANY)                         \
	ROW(CUDA, cuGraphLaunch, cuGraphLaunch, 10000, ANY)                                      \
	ROW(CUDA, cuGraphLaunch_ptsz, cuGraphLaunch, 10000, PER_THREAD)                          \
	ROW(CUDA, cuGraphUpload, cuGraphUpload, 11010, ANY)                                      \
	ROW(CUDA, cuGraphUpload_ptsz, cuGraphUpload, 11010, PER_THREAD)                          \
	ROW(CUDA, cuGreenCtxCreate, cuGreenCtxCreate, 12040, ANY)                                \
	ROW(CUDA, cuGreenCtxDestroy, cuGreenCtxDestroy, 12040, ANY)                              \
	ROW(CUDA, cuImportExternalMemory, cuImportExternalMemory, 10000, ANY)                    \
	ROW(CUDA, cuInit, cuInit, 2000, ANY)                                                     \
	ROW(CUDA, cuIpcOpenMemHandle, cuIpcOpenMemHandle, 4010, ANY)                             \
	ROW(CUDA, cuIpcOpenMemHandle_v2, cuIpcOpenMemHandle, 11000, ANY)                         \
	ROW(CUDA, cuLaunch, cuLaunch, 2000, ANY)                                                 \
	ROW(CUDA, cuLaunchCooperativeKernel, cuLaunchCooperativeKernel, 9000, ANY)               \
	ROW(CUDA, cuLaunchCooperativeKernelMultiDevice, cuLaunchCooperativeKernelMultiDevice, 9000, ANY) \
	ROW(CUDA, cuLaunchCooperativeKernel_ptsz, cuLaunchCooperativeKernel, 9000, PER_THREAD)   \
	ROW(CUDA, cuLaunchGrid, cuLaunchGrid, 2000, ANY)                                         \
	ROW(CUDA, cuLaunchGridAsync, cuLaunchGridAsync, 2000, ANY)                               \
	ROW(CUDA, cuLaunchKernel, cuLaunchKernel, 4000, ANY)                                     \
	ROW(CUDA, cuLaunchKernelEx, cuLaunchKernelEx, 11060, ANY)                                \
	ROW(CUDA, cuLaunchKernelEx_ptsz, cuLaunchKernelEx, 11060, PER_THREAD)                    \
	ROW(CUDA, cuLaunchKernel_ptsz, cuLaunchKernel, 7000, PER_THREAD)                         \
	ROW(CUDA, cuLibraryLoadData, cuLibraryLoadData, 12000, ANY)                              \
	ROW(CUDA, cuLibraryLoadFromFile, cuLibraryLoadFromFile, 12000, ANY)                      \
	ROW(CUDA, cuLibraryUnload, cuLibraryUnload, 12000, ANY)                                  \
	ROW(CUDA, cuLogicalEndpointBindAddr, cuLogicalEndpointBindAddr, 13030, ANY)              \
	ROW(CUDA, cuLogicalEndpointBindMem, cuLogicalEndpointBindMem, 13030, ANY)                \
	ROW(CUDA, cuLogicalEndpointDestroy, cuLogicalEndpointDestroy, 13030, ANY)                \
	ROW(CUDA, cuLogicalEndpointUnbind, cuLogicalEndpointUnbind, 13030, ANY)                  \
	ROW(CUDA, cuMemAdvise, cuMemAdvise, 8000, ANY)                                           \
	ROW(CUDA, cuMemAdvise_v2, cuMemAdvise, 12020, ANY)                                       \
	ROW(CUDA, cuMemAlloc, cuMemAlloc, 2000, ANY)                                             \
	ROW(CUDA, cuMemAllocAsync, cuMemAllocAsync, 11020, ANY)                                  \
	ROW(CUDA, cuMemAllocAsync_ptsz, cuMemAllocAsync, 11020, PER_THREAD)                      \
	ROW(CUDA, cuMemAllocFromPoolAsync, cuMemAllocFromPoolAsync, 11020, ANY)                  \
	ROW(CUDA, cuMemAllocFromPoolAsync_ptsz, cuMemAllocFromPoolAsync, 11020, PER_THREAD)      \
	ROW(CUDA, cuMemAllocManaged, cuMemAllocManaged, 6000, ANY)                               \
	ROW(CUDA, cuMemAllocPitch, cuMemAllocPitch, 2000, ANY)                                   \
	ROW(CUDA, cuMemAllocPitch_v2, cuMemAllocPitch, 3020, ANY)                                \
	ROW(CUDA, cuMemAlloc_v2, cuMemAlloc, 3020, ANY)                                          \
	ROW(CUDA, cuMemCreate, cuMemCreate, 10020, ANY)                                          \
	ROW(CUDA, cuMemDiscardAndPrefetchBatchAsync, cuMemDiscardAndPrefetchBatchAsync, 13000, ANY) \
	ROW(CUDA, cuMemDiscardAndPrefetchBatchAsync_ptsz, cuMemDiscardAndPrefetchBatchAsync, 13000, PER_THREAD) \
	ROW(CUDA, cuMemFree, cuMemFree, 2000, ANY)                                               \
	ROW(CUDA, cuMemFreeAsync, cuMemFreeAsync, 11020, ANY)                                    \
	ROW(CUDA, cuMemFreeAsync_ptsz, cuMemFreeAsync, 11020, PER_THREAD)                        \
	ROW(CUDA, cuMemFree_v2, cuMemFree, 3020, ANY)                                            \
	ROW(CUDA, cuMemGetInfo, cuMemGetInfo, 2000, ANY)                                         \
	ROW(CUDA, cuMemGetInfo_v2, cuMemGetInfo, 3020, ANY)                                      \
	ROW(CUDA, cuMemImportFromShareableHandle, cuMemImportFromShareableHandle, 10020, ANY)    \
	ROW(CUDA, cuMemMap, cuMemMap, 10020, ANY)                                                \
	ROW(CUDA, cuMemMapArrayAsync, cuMemMapArrayAsync, 11010, ANY)                            \
	ROW(CUDA, cuMemMapArrayAsync_ptsz, cuMemMapArrayAsync, 11010, PER_THREAD)                \
	ROW(CUDA, cuMemPoolCreate, cuMemPoolCreate, 11020, ANY)                                  \
	ROW(CUDA, cuMemPoolDestroy, cuMemPoolDestroy, 11020, ANY)                                \
	ROW(CUDA, cuMemPoolImportFromShareableHandle, cuMemPoolImportFromShareableHandle, 11020, ANY) \
	ROW(CUDA, cuMemPoolImportPointer, cuMemPoolImportPointer, 11020, ANY)                    \
	ROW(CUDA, cuMemPoolTrimTo, cuMemPoolTrimTo, 11020, ANY)                                  \
	ROW(CUDA, cuMemPrefetchAsync, cuMemPrefetchAsync, 8000, ANY)                             \
	ROW(CUDA, cuMemPrefetchAsync_ptsz, cuMemPrefetchAsync, 8000, PER_THREAD)                 \
	ROW(CUDA, cuMemPrefetchAsync_v2, cuMemPrefetchAsync, 12020, ANY)                         \
	ROW(CUDA, cuMemPrefetchAsync_v2_ptsz, cuMemPrefetchAsync, 12020, PER_THREAD)             \
	ROW(CUDA, cuMemPrefetchBatchAsync, cuMemPrefetchBatchAsync, 13000, ANY)                  \
	ROW(CUDA, cuMemPrefetchBatchAsync_ptsz, cuMemPrefetchBatchAsync, 13000, PER_THREAD)      \
	ROW(CUDA, cuMemRelease, cuMemRelease, 10020, ANY)                                        \
	ROW(CUDA, cuMemRetainAllocationHandle, cuMemRetainAllocationHandle, 11000, ANY)          \
	ROW(CUDA, cuMemUnmap, cuMemUnmap, 10020, ANY)                                            \
	ROW(CUDA, cuMipmappedArrayCreate, cuMipmappedArrayCreate, 5000, ANY)                     \
	ROW(CUDA, cuMipmappedArrayDestroy, cuMipmappedArrayDestroy, 5000, ANY)                   \
	ROW(CUDA, cuModuleLoad, cuModuleLoad, 2000, ANY)                                         \
	ROW(CUDA, cuModuleLoadData, cuModuleLoadData, 2000, ANY)                                 \
	ROW(CUDA, cuModuleLoadDataEx, cuModuleLoadDataEx, 2010, ANY)                             \
	ROW(CUDA, cuModuleLoadFatBinary, cuModuleLoadFatBinary, 2000, ANY)                       \
	ROW(CUDA, cuModuleUnload, cuModuleUnload, 2000, ANY)                                     \
	ROW(CUDA, cuMulticastBindAddr, cuMulticastBindAddr, 12010, ANY)                          \
	ROW(CUDA, cuMulticastBindAddr_v2, cuMulticastBindAddr, 13010, ANY)                       \
	ROW(CUDA, cuMulticastBindMem, cuMulticastBindMem, 12010, ANY)                            \
	ROW(CUDA, cuMulticastBindMem_v2, cuMulticastBindMem, 13010, ANY)                         \
	ROW(CUDA, cuMulticastCreate, cuMulticastCreate, 12010, ANY)                              \
	ROW(CUDA, cuMulticastUnbind, cuMulticastUnbind, 12010, ANY)                              \
	ROW(CUDA, cuVDPAUCtxCreate, cuVDPAUCtxCreate, 3010, ANY)                                 \
	ROW(CUDA, cuVDPAUCtxCreate_v2, cuVDPAUCtxCreate, 3020, ANY)                              \
	ROW(NVML, nvmlDeviceGetComputeRunningProcesses, nvmlDeviceGetComputeRunningProcesses, 0, ANY) \
	ROW(NVML, nvmlDeviceGetComputeRunningProcesses_v2, nvmlDeviceGetComputeRunningProcesses_v2, 0, ANY) \
	ROW(NVML, nvmlDeviceGetComputeRunningProcesses_v3, nvmlDeviceGetComputeRunningProcesses_v3, 0, ANY) \
	ROW(NVML, nvmlDeviceGetGraphicsRunningProcesses, nvmlDeviceGetGraphicsRunningProcesses, 0, ANY) \
	ROW(NVML, nvmlDeviceGetGraphicsRunningProcesses_v2, nvmlDeviceGetGraphicsRunningProcesses_v2, 0, ANY) \
	ROW(NVML, nvmlDeviceGetGraphicsRunningProcesses_v3, nvmlDeviceGetGraphicsRunningProcesses_v3, 0, ANY) \
	ROW(NVML, nvmlDeviceGetMPSComputeRunningProcesses, nvmlDeviceGetMPSComputeRunningProcesses, 0, ANY) \
	ROW(NVML, nvmlDeviceGetMPSComputeRunningProcesses_v2, nvmlDeviceGetMPSComputeRunningProcesses_v2, 0, ANY) \
	ROW(NVML, nvmlDeviceGetMPSComputeRunningProcesses_v3, nvmlDeviceGetMPSComputeRunningProcesses_v3, 0, ANY) \
	ROW(NVML, nvmlDeviceGetMemoryInfo, nvmlDeviceGetMemoryInfo, 0, ANY)                      \
	ROW(NVML, nvmlDeviceGetMemoryInfo_v2, nvmlDeviceGetMemoryInfo_v2, 0, ANY)        \
	ROW(NVML, nvmlDeviceGetProcessUtilization, nvmlDeviceGetProcessUtilization, 0, ANY) \
	ROW(NVML, nvmlDeviceGetProcessesUtilizationInfo, nvmlDeviceGetProcessesUtilizationInfo, 0, ANY) \
	ROW(NVML, nvmlDeviceGetRunningProcessDetailList, nvmlDeviceGetRunningProcessDetailList, 0, ANY)

/* What the shim itself calls, and does not hook. */
#define TABLE_CALLED(ROW)                                                                         \
	ROW(CUDA, cuCtxFromGreenCtx, cuCtxFromGreenCtx, 12040, ANY)                               \
	ROW(CUDA, cuCtxGetCurrent, cuCtxGetCurrent, 4000, ANY)                                    \
	ROW(CUDA, cuCtxGetDevice, cuCtxGetDevice, 2000, ANY)                                      \
	ROW(CUDA, cuCtxGetLimit, cuCtxGetLimit, 3010, ANY)                                        \
	ROW(CUDA, cuCtxPopCurrent_v2, cuCtxPopCurrent, 4000, ANY)                                 \
	ROW(CUDA, cuCtxPushCurrent_v2, cuCtxPushCurrent, 4000, ANY)                               \
	ROW(CUDA, cuDeviceGetAttribute, cuDeviceGetAttribute, 2000, ANY)                          \
	ROW(CUDA, cuDeviceGetDefaultMemPool, cuDeviceGetDefaultMemPool, 11020, ANY)               \
	ROW(CUDA, cuDeviceGetGraphMemAttribute, cuDeviceGetGraphMemAttribute, 11040, ANY)         \
	ROW(CUDA, cuDeviceGetMemPool, cuDeviceGetMemPool, 11020, ANY)                             \
	ROW(CUDA, cuDeviceGetUuid, cuDeviceGetUuid, 9020, ANY)                                    \
	ROW(CUDA, cuDeviceGetUuid_v2, cuDeviceGetUuid, 11040, ANY)                                \
	ROW(CUDA, cuDevicePrimaryCtxGetState, cuDevicePrimaryCtxGetState, 7000, ANY)              \
	ROW(CUDA, cuGraphChildGraphNodeGetGraph, cuGraphChildGraphNodeGetGraph, 10000, ANY)       \
	ROW(CUDA, cuGraphGetNodes, cuGraphGetNodes, 10000, ANY)                                   \
	ROW(CUDA, cuGraphMemAllocNodeGetParams, cuGraphMemAllocNodeGetParams, 11040, ANY)         \
	ROW(CUDA, cuGraphMemFreeNodeGetParams, cuGraphMemFreeNodeGetParams, 11040, ANY)           \
	ROW(CUDA, cuGraphNodeGetType, cuGraphNodeGetType, 10000, ANY)                             \
	ROW(CUDA, cuMemGetAllocationPropertiesFromHandle, cuMemGetAllocationPropertiesFromHandle, 10020, ANY) \
	ROW(CUDA, cuMemPoolGetAttribute, cuMemPoolGetAttribute, 11020, ANY)                       \
	ROW(CUDA, cuPointerGetAttribute, cuPointerGetAttribute, 4000, ANY)                        \
	ROW(CUDA, cuStreamGetCtx, cuStreamGetCtx, 9020, ANY)                                      \
	ROW(CUDA, cuStreamGetDevice, cuStreamGetDevice, 12080, ANY)                               \
	ROW(CUDA, cuStreamIsCapturing, cuStreamIsCapturing, 10000, ANY)                           \
	ROW(CUDA, cuStreamIsCapturing_ptsz, cuStreamIsCapturing, 10000, PER_THREAD)               \
	ROW(NVML, nvmlDeviceGetUUID, nvmlDeviceGetUUID, 0, ANY)

/* The newest CUDA version whose entry points were compared with the table. */
#define TABLE_CUDA_VERSION 13050

enum table_library { TABLE_CUDA, TABLE_NVML, TABLE_LIBRARIES };
enum table_stream { TABLE_ANY, TABLE_PER_THREAD, TABLE_BY_SYMBOL };

#define TABLE_ID(library, symbol, name, version, stream) ID_##symbol,
enum table_id { TABLE_HOOKED(TABLE_ID) TABLE_HOOKS, TABLE_LAST_HOOK = TABLE_HOOKS - 1, TABLE_CALLED(TABLE_ID) TABLE_SIZE };
#undef TABLE_ID

#define TABLE_HOOK(library, symbol, name, version, stream) fn_##symbol hook_##symbol;
TABLE_HOOKED(TABLE_HOOK)
#undef TABLE_HOOK

typedef void table_function(void);

struct table_row {
	const char *symbol;
	const char *name;
	table_function *hook; /* NULL: called only */
	int version;
	uint8_t library; /* enum table_library */
	uint8_t stream;  /* enum table_stream */
};

extern const struct table_row table[TABLE_SIZE];

/* The row of a hooked symbol, by its exact name, or -1. A name that cannot be one of the
 * libraries' costs a few compares. */
int table_find(const char *symbol);

/* The row of the ABI that cuGetProcAddress means by these arguments, or -1. */
int table_choose(const char *name, int version, cuuint64_t flags);

/* Exports a hook under its own name. An alias, so that the table never points to another
 * library's function of that name. */
#define EXPORT(symbol) extern __typeof(hook_##symbol) symbol __attribute__((alias("hook_" #symbol), visibility("default")))

#endif
