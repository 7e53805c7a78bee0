/* SPDX-License-Identifier: Apache-2.0 */
/*
 * cudart_abi.h: the part of the CUDA runtime's public binary interface that the runtime library for the
 * simulated GPU has, of the version that CUDART_MAJOR says. Names of types and values, numbers and layouts are
 * those of the interface. With SIMGPU_NVIDIA_HEADER NVIDIA's own headers stand in their place.
 */
#ifndef SIMGPU_CUDART_ABI_H
#define SIMGPU_CUDART_ABI_H

#include <stddef.h>
#include <stdint.h>

#ifdef SIMGPU_NVIDIA_HEADER

#define __CUDA_API_VERSION_INTERNAL 1 /* all variants by their own names */
#include <cuda.h>
#include <cuda_runtime_api.h>

_Static_assert(CUDART_VERSION / 1000 == CUDART_MAJOR, "header of another version");

#else

#include "../libcuda/cuda_abi.h"

typedef enum cudaError {
	cudaSuccess = 0,
	cudaErrorInvalidValue = 1,
	cudaErrorMemoryAllocation = 2,
	cudaErrorInitializationError = 3,
	cudaErrorInvalidDevicePointer = 17,
	cudaErrorInvalidMemcpyDirection = 21,
	cudaErrorInsufficientDriver = 35,
	cudaErrorCallRequiresNewerDriver = 36,
	cudaErrorMissingConfiguration = 52,
	cudaErrorInvalidDeviceFunction = 98,
	cudaErrorNoDevice = 100,
	cudaErrorInvalidDevice = 101,
	cudaErrorSymbolNotFound = 500,
	cudaErrorNotReady = 600,
	cudaErrorUnknown = 999,
} cudaError_t;

enum cudaMemcpyKind {
	cudaMemcpyHostToHost = 0,
	cudaMemcpyHostToDevice = 1,
	cudaMemcpyDeviceToHost = 2,
	cudaMemcpyDeviceToDevice = 3,
	cudaMemcpyDefault = 4,
};

enum cudaMemoryType { cudaMemoryTypeUnregistered = 0, cudaMemoryTypeHost = 1, cudaMemoryTypeDevice = 2, cudaMemoryTypeManaged = 3 };
enum cudaStreamCaptureMode { cudaStreamCaptureModeGlobal = 0, cudaStreamCaptureModeThreadLocal = 1, cudaStreamCaptureModeRelaxed = 2 };
enum cudaStreamCaptureStatus { cudaStreamCaptureStatusNone = 0, cudaStreamCaptureStatusActive = 1 };
enum cudaFuncAttribute { cudaFuncAttributeMaxDynamicSharedMemorySize = 8 };
enum cudaDriverEntryPointQueryResult {
	cudaDriverEntryPointSuccess = 0,
	cudaDriverEntryPointSymbolNotFound = 1,
	cudaDriverEntryPointVersionNotSufficent = 2,
};
/* Numbers as the driver's. */
enum cudaDeviceAttr { cudaDevAttrMaxThreadsPerBlock = 1 };

typedef struct CUstream_st *cudaStream_t;
typedef struct CUevent_st *cudaEvent_t;
typedef struct CUgraph_st *cudaGraph_t;
typedef struct CUgraphNode_st *cudaGraphNode_t;
typedef struct CUgraphExec_st *cudaGraphExec_t;
typedef struct CUkern_st *cudaKernel_t;
typedef struct CUuuid_st cudaUUID_t;

typedef struct dim3 {
	unsigned int x, y, z;
} dim3;

typedef struct uint3 {
	unsigned int x, y, z;
} uint3;

#if CUDART_MAJOR < 13
#define CUDART_12(x) x
#else
#define CUDART_12(x)
#endif

struct cudaDeviceProp {
	char name[256];
	cudaUUID_t uuid;
	char luid[8];
	unsigned int luidDeviceNodeMask;
	size_t totalGlobalMem, sharedMemPerBlock;
	int regsPerBlock, warpSize;
	size_t memPitch;
	int maxThreadsPerBlock, maxThreadsDim[3], maxGridSize[3];
	CUDART_12(int clockRate;)
	size_t totalConstMem;
	int major, minor;
	size_t textureAlignment, texturePitchAlignment;
	CUDART_12(int deviceOverlap;)
	int multiProcessorCount;
	CUDART_12(int kernelExecTimeoutEnabled;)
	int integrated, canMapHostMemory;
	CUDART_12(int computeMode;)
	int maxTexture1D, maxTexture1DMipmap;
	CUDART_12(int maxTexture1DLinear;)
	int maxTexture2D[2], maxTexture2DMipmap[2], maxTexture2DLinear[3], maxTexture2DGather[2], maxTexture3D[3], maxTexture3DAlt[3],
		maxTextureCubemap, maxTexture1DLayered[2], maxTexture2DLayered[3], maxTextureCubemapLayered[2], maxSurface1D,
		maxSurface2D[2], maxSurface3D[3], maxSurface1DLayered[2], maxSurface2DLayered[3], maxSurfaceCubemap,
		maxSurfaceCubemapLayered[2];
	size_t surfaceAlignment;
	int concurrentKernels, ECCEnabled, pciBusID, pciDeviceID, pciDomainID, tccDriver, asyncEngineCount, unifiedAddressing;
	CUDART_12(int memoryClockRate;)
	int memoryBusWidth, l2CacheSize, persistingL2CacheMaxSize, maxThreadsPerMultiProcessor, streamPrioritiesSupported,
		globalL1CacheSupported, localL1CacheSupported;
	size_t sharedMemPerMultiprocessor;
	int regsPerMultiprocessor, managedMemory, isMultiGpuBoard, multiGpuBoardGroupID, hostNativeAtomicSupported;
	CUDART_12(int singleToDoublePrecisionPerfRatio;)
	int pageableMemoryAccess, concurrentManagedAccess, computePreemptionSupported, canUseHostPointerForRegisteredMem,
		cooperativeLaunch;
	CUDART_12(int cooperativeMultiDeviceLaunch;)
	size_t sharedMemPerBlockOptin;
	int pageableMemoryAccessUsesHostPageTables, directManagedMemAccessFromHost, maxBlocksPerMultiProcessor,
		accessPolicyMaxWindowSize;
	size_t reservedSharedMemPerBlock;
	int hostRegisterSupported, sparseCudaArraySupported, hostRegisterReadOnlySupported, timelineSemaphoreInteropSupported,
		memoryPoolsSupported, gpuDirectRDMASupported;
	unsigned int gpuDirectRDMAFlushWritesOptions;
	int gpuDirectRDMAWritesOrdering;
	unsigned int memoryPoolSupportedHandleTypes;
	int deferredMappingCudaArraySupported, ipcEventSupported, clusterLaunch, unifiedFunctionPointers, reserved[63];
};

struct cudaFuncAttributes {
	size_t sharedSizeBytes, constSizeBytes, localSizeBytes;
	int maxThreadsPerBlock, numRegs, ptxVersion, binaryVersion, cacheModeCA, maxDynamicSharedSizeBytes, preferredShmemCarveout,
		clusterDimMustBeSet, requiredClusterWidth, requiredClusterHeight, requiredClusterDepth,
		clusterSchedulingPolicyPreference, nonPortableClusterSizeAllowed, reserved[16];
};

struct cudaPointerAttributes {
	enum cudaMemoryType type;
	int device;
	void *devicePointer, *hostPointer;
#if CUDART_MAJOR >= 13
	long reserved[8];
#endif
};

typedef struct cudaLaunchConfig_st {
	dim3 gridDim, blockDim;
	size_t dynamicSmemBytes;
	cudaStream_t stream;
	void *attrs;
	unsigned int numAttrs;
} cudaLaunchConfig_t;

typedef struct cudaGraphExecUpdateResultInfo_st {
	int result;
	cudaGraphNode_t errorNode, errorFromNode;
} cudaGraphExecUpdateResultInfo;

#endif /* SIMGPU_NVIDIA_HEADER */

/* The interface's sizes, whichever header they come from. */
#if CUDART_MAJOR < 13
_Static_assert(sizeof(struct cudaDeviceProp) == 1032 && offsetof(struct cudaDeviceProp, unifiedFunctionPointers) == 776, "properties");
_Static_assert(sizeof(struct cudaPointerAttributes) == 24, "pointers");
#else
_Static_assert(sizeof(struct cudaDeviceProp) == 1008 && offsetof(struct cudaDeviceProp, unifiedFunctionPointers) == 752, "properties");
_Static_assert(sizeof(struct cudaPointerAttributes) == 88, "pointers");
#endif
_Static_assert(sizeof(struct cudaFuncAttributes) == 144 && sizeof(cudaLaunchConfig_t) == 56, "functions");
_Static_assert(sizeof(cudaGraphExecUpdateResultInfo) == sizeof(CUgraphExecUpdateResultInfo), "graphs");

#endif /* SIMGPU_CUDART_ABI_H */
