/* SPDX-License-Identifier: Apache-2.0 */
/*
 * hold_test: every way to hold device memory in the simulated libcuda, from a client's side:
 * what it takes, when it is given back, and, where it can be shared, that it counts once and
 * lives until the last process lets go. Needs a simgpud with two T4s of 16 GiB that nobody else
 * uses, in $SIMGPU_DIR, whose pools grow by $TEST_POOL_STEP bytes. Prints what failed and exits 1.
 */
#define _GNU_SOURCE
#include "../libcuda/cuda_abi.h"
#include "check.h"

#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

CUresult cuArray3DCreate(CUarray *, const CUDA_ARRAY3D_DESCRIPTOR_v1 *);
CUresult cuArray3DCreate_v2(CUarray *, const CUDA_ARRAY3D_DESCRIPTOR *);
CUresult cuArray3DGetDescriptor(CUDA_ARRAY3D_DESCRIPTOR_v1 *, CUarray);
CUresult cuArray3DGetDescriptor_v2(CUDA_ARRAY3D_DESCRIPTOR *, CUarray);
CUresult cuArrayCreate(CUarray *, const CUDA_ARRAY_DESCRIPTOR_v1 *);
CUresult cuArrayCreate_v2(CUarray *, const CUDA_ARRAY_DESCRIPTOR *);
CUresult cuArrayDestroy(CUarray);
CUresult cuArrayGetDescriptor(CUDA_ARRAY_DESCRIPTOR_v1 *, CUarray);
CUresult cuArrayGetDescriptor_v2(CUDA_ARRAY_DESCRIPTOR *, CUarray);
CUresult cuArrayGetMemoryRequirements(CUDA_ARRAY_MEMORY_REQUIREMENTS *, CUarray, CUdevice);
CUresult cuArrayGetSparseProperties(CUDA_ARRAY_SPARSE_PROPERTIES *, CUarray);
CUresult cuCtxAttach(CUcontext *, unsigned int);
CUresult cuCtxCreate_v2(CUcontext *, unsigned int, CUdevice);
CUresult cuCtxDestroy_v2(CUcontext);
CUresult cuCtxDetach(CUcontext);
CUresult cuCtxFromGreenCtx(CUcontext *, CUgreenCtx);
CUresult cuCtxGetCurrent(CUcontext *);
CUresult cuCtxGetDevResource(CUcontext, CUdevResource*, CUdevResourceType);
CUresult cuCtxGetLimit(size_t *, CUlimit);
CUresult cuCtxPopCurrent_v2(CUcontext *);
CUresult cuCtxPushCurrent_v2(CUcontext);
CUresult cuCtxSetCurrent(CUcontext);
CUresult cuCtxSetLimit(CUlimit, size_t);
CUresult cuCtxSynchronize(void);
CUresult cuDestroyExternalMemory(CUexternalMemory);
CUresult cuDevResourceGenerateDesc(CUdevResourceDesc *, CUdevResource *, unsigned int);
CUresult cuDevSmResourceSplitByCount(CUdevResource*, unsigned int*, const CUdevResource*, CUdevResource*, unsigned int, unsigned int);
CUresult cuDeviceGetDefaultMemPool(CUmemoryPool *, CUdevice);
CUresult cuDeviceGetDevResource(CUdevice, CUdevResource*, CUdevResourceType);
CUresult cuDeviceGetGraphMemAttribute(CUdevice, CUgraphMem_attribute, void*);
CUresult cuDeviceGetMemPool(CUmemoryPool *, CUdevice);
CUresult cuDeviceGraphMemTrim(CUdevice);
CUresult cuDevicePrimaryCtxRetain(CUcontext *, CUdevice);
CUresult cuDeviceSetGraphMemAttribute(CUdevice, CUgraphMem_attribute, void*);
CUresult cuDeviceSetMemPool(CUdevice, CUmemoryPool);
CUresult cuEventCreate(CUevent *, unsigned int);
CUresult cuEventDestroy_v2(CUevent);
CUresult cuEventRecord(CUevent, CUstream);
CUresult cuExternalMemoryGetMappedBuffer(CUdeviceptr *, CUexternalMemory, const CUDA_EXTERNAL_MEMORY_BUFFER_DESC *);
CUresult cuExternalMemoryGetMappedMipmappedArray(CUmipmappedArray *, CUexternalMemory, const CUDA_EXTERNAL_MEMORY_MIPMAPPED_ARRAY_DESC *);
CUresult cuFuncGetModule(CUmodule *, CUfunction);
CUresult cuFuncGetName(const char **, CUfunction);
CUresult cuGetProcAddress_v2(const char *, void **, int, cuuint64_t, CUdriverProcAddressQueryResult *);
CUresult cuGraphAddChildGraphNode(CUgraphNode *, CUgraph, const CUgraphNode *, size_t, CUgraph);
CUresult cuGraphAddEmptyNode(CUgraphNode *, CUgraph, const CUgraphNode *, size_t);
CUresult cuGraphAddMemAllocNode(CUgraphNode *, CUgraph, const CUgraphNode *, size_t, CUDA_MEM_ALLOC_NODE_PARAMS *);
CUresult cuGraphAddMemFreeNode(CUgraphNode *, CUgraph, const CUgraphNode *, size_t, CUdeviceptr);
CUresult cuGraphAddNode(CUgraphNode *, CUgraph, const CUgraphNode *, size_t, CUgraphNodeParams *);
CUresult cuGraphAddNode_v2(CUgraphNode *, CUgraph, const CUgraphNode *, const CUgraphEdgeData *, size_t, CUgraphNodeParams *);
CUresult cuGraphClone(CUgraph *, CUgraph);
CUresult cuGraphCreate(CUgraph *, unsigned int);
CUresult cuGraphDestroy(CUgraph);
CUresult cuGraphExecDestroy(CUgraphExec);
CUresult cuGraphExecUpdate(CUgraphExec, CUgraph, CUgraphNode *, CUgraphExecUpdateResult *);
CUresult cuGraphExecUpdate_v2(CUgraphExec, CUgraph, CUgraphExecUpdateResultInfo *);
CUresult cuGraphGetNodes(CUgraph, CUgraphNode *, size_t *);
CUresult cuGraphInstantiate(CUgraphExec *, CUgraph, CUgraphNode *, char *, size_t);
CUresult cuGraphInstantiateWithFlags(CUgraphExec *, CUgraph, unsigned long long);
CUresult cuGraphInstantiateWithParams(CUgraphExec *, CUgraph, CUDA_GRAPH_INSTANTIATE_PARAMS *);
CUresult cuGraphInstantiate_v2(CUgraphExec *, CUgraph, CUgraphNode *, char *, size_t);
CUresult cuGraphLaunch(CUgraphExec, CUstream);
CUresult cuGraphLaunch_ptsz(CUgraphExec, CUstream);
CUresult cuGraphMemAllocNodeGetParams(CUgraphNode, CUDA_MEM_ALLOC_NODE_PARAMS *);
CUresult cuGraphMemFreeNodeGetParams(CUgraphNode, CUdeviceptr *);
CUresult cuGraphNodeGetType(CUgraphNode, CUgraphNodeType *);
CUresult cuGraphUpload(CUgraphExec, CUstream);
CUresult cuGraphUpload_ptsz(CUgraphExec, CUstream);
CUresult cuGreenCtxCreate(CUgreenCtx *, CUdevResourceDesc, CUdevice, unsigned int);
CUresult cuGreenCtxDestroy(CUgreenCtx);
CUresult cuGreenCtxGetDevResource(CUgreenCtx, CUdevResource*, CUdevResourceType);
CUresult cuGreenCtxStreamCreate(CUstream*, CUgreenCtx, unsigned int, int);
CUresult cuImportExternalMemory(CUexternalMemory *, const CUDA_EXTERNAL_MEMORY_HANDLE_DESC *);
CUresult cuInit(unsigned int);
CUresult cuIpcCloseMemHandle(CUdeviceptr);
CUresult cuIpcGetMemHandle(CUipcMemHandle *, CUdeviceptr);
CUresult cuIpcOpenMemHandle(CUdeviceptr *, CUipcMemHandle, unsigned int);
CUresult cuIpcOpenMemHandle_v2(CUdeviceptr *, CUipcMemHandle, unsigned int);
CUresult cuKernelGetFunction(CUfunction *, CUkernel);
CUresult cuLaunchKernel(CUfunction, unsigned int, unsigned int, unsigned int, unsigned int, unsigned int, unsigned int, unsigned int, CUstream, void **, void **);
CUresult cuLibraryGetGlobal(CUdeviceptr *, size_t *, CUlibrary, const char *);
CUresult cuLibraryGetKernel(CUkernel *, CUlibrary, const char *);
CUresult cuLibraryGetManaged(CUdeviceptr *, size_t *, CUlibrary, const char *);
CUresult cuLibraryLoadData(CUlibrary *, const void *, CUjit_option *, void **, unsigned int, CUlibraryOption *, void **, unsigned int);
CUresult cuLibraryLoadFromFile(CUlibrary *, const char *, CUjit_option *, void **, unsigned int, CUlibraryOption *, void **, unsigned int);
CUresult cuLibraryUnload(CUlibrary);
CUresult cuMemAddressFree(CUdeviceptr, size_t);
CUresult cuMemAddressReserve(CUdeviceptr *, size_t, size_t, CUdeviceptr, unsigned long long);
CUresult cuMemAdvise(CUdeviceptr, size_t, CUmem_advise, CUdevice);
CUresult cuMemAdvise_v2(CUdeviceptr, size_t, CUmem_advise, CUmemLocation);
CUresult cuMemAllocAsync(CUdeviceptr *, size_t, CUstream);
CUresult cuMemAllocAsync_ptsz(CUdeviceptr *, size_t, CUstream);
CUresult cuMemAllocFromPoolAsync(CUdeviceptr *, size_t, CUmemoryPool, CUstream);
CUresult cuMemAllocManaged(CUdeviceptr *, size_t, unsigned int);
CUresult cuMemAlloc_v2(CUdeviceptr *, size_t);
CUresult cuMemCreate(CUmemGenericAllocationHandle *, size_t, const CUmemAllocationProp *, unsigned long long);
CUresult cuMemDiscardAndPrefetchBatchAsync_ptsz(CUdeviceptr *, size_t *, size_t, CUmemLocation *, size_t *, size_t, unsigned long long, CUstream);
CUresult cuMemDiscardBatchAsync(CUdeviceptr *, size_t *, size_t, unsigned long long, CUstream);
CUresult cuMemExportToShareableHandle(void *, CUmemGenericAllocationHandle, CUmemAllocationHandleType, unsigned long long);
CUresult cuMemFreeAsync(CUdeviceptr, CUstream);
CUresult cuMemFreeAsync_ptsz(CUdeviceptr, CUstream);
CUresult cuMemFree_v2(CUdeviceptr);
CUresult cuMemGetAddressRange_v2(CUdeviceptr *, size_t *, CUdeviceptr);
CUresult cuMemGetAllocationPropertiesFromHandle(CUmemAllocationProp *, CUmemGenericAllocationHandle);
CUresult cuMemGetDefaultMemPool(CUmemoryPool *, CUmemLocation *, CUmemAllocationType);
CUresult cuMemGetInfo_v2(size_t *, size_t *);
CUresult cuMemGetMemPool(CUmemoryPool *, CUmemLocation *, CUmemAllocationType);
CUresult cuMemImportFromShareableHandle(CUmemGenericAllocationHandle *, void *, CUmemAllocationHandleType);
CUresult cuMemMap(CUdeviceptr, size_t, size_t, CUmemGenericAllocationHandle, unsigned long long);
CUresult cuMemMapArrayAsync(CUarrayMapInfo *, unsigned int, CUstream);
CUresult cuMemMapArrayAsync_ptsz(CUarrayMapInfo *, unsigned int, CUstream);
CUresult cuMemPoolCreate(CUmemoryPool *, const CUmemPoolProps *);
CUresult cuMemPoolDestroy(CUmemoryPool);
CUresult cuMemPoolExportPointer(CUmemPoolPtrExportData *, CUdeviceptr);
CUresult cuMemPoolExportToShareableHandle(void *, CUmemoryPool, CUmemAllocationHandleType, unsigned long long);
CUresult cuMemPoolGetAttribute(CUmemoryPool, CUmemPool_attribute, void *);
CUresult cuMemPoolImportFromShareableHandle(CUmemoryPool *, void *, CUmemAllocationHandleType, unsigned long long);
CUresult cuMemPoolImportPointer(CUdeviceptr *, CUmemoryPool, CUmemPoolPtrExportData *);
CUresult cuMemPrefetchAsync_ptsz(CUdeviceptr, size_t, CUdevice, CUstream);
CUresult cuMemPrefetchAsync_v2(CUdeviceptr, size_t, CUmemLocation, unsigned int, CUstream);
CUresult cuMemPrefetchBatchAsync(CUdeviceptr *, size_t *, size_t, CUmemLocation *, size_t *, size_t, unsigned long long, CUstream);
CUresult cuMemRangeGetAttribute(void *, size_t, CUmem_range_attribute, CUdeviceptr, size_t);
CUresult cuMemRangeGetAttributes(void **, size_t *, CUmem_range_attribute *, size_t, CUdeviceptr, size_t);
CUresult cuMemRelease(CUmemGenericAllocationHandle);
CUresult cuMemSetMemPool(CUmemLocation *, CUmemAllocationType, CUmemoryPool);
CUresult cuMemUnmap(CUdeviceptr, size_t);
CUresult cuMemsetD8Async(CUdeviceptr, unsigned char, size_t, CUstream);
CUresult cuMemsetD8_v2(CUdeviceptr, unsigned char, size_t);
CUresult cuMipmappedArrayCreate(CUmipmappedArray *, const CUDA_ARRAY3D_DESCRIPTOR *, unsigned int);
CUresult cuMipmappedArrayDestroy(CUmipmappedArray);
CUresult cuMipmappedArrayGetLevel(CUarray *, CUmipmappedArray, unsigned int);
CUresult cuMipmappedArrayGetMemoryRequirements(CUDA_ARRAY_MEMORY_REQUIREMENTS *, CUmipmappedArray, CUdevice);
CUresult cuMipmappedArrayGetSparseProperties(CUDA_ARRAY_SPARSE_PROPERTIES *, CUmipmappedArray);
CUresult cuModuleGetFunction(CUfunction *, CUmodule, const char *);
CUresult cuModuleGetGlobal_v2(CUdeviceptr *, size_t *, CUmodule, const char *);
CUresult cuModuleGetLoadingMode(CUmoduleLoadingMode *);
CUresult cuModuleLoad(CUmodule *, const char *);
CUresult cuModuleLoadData(CUmodule *, const void *);
CUresult cuModuleLoadDataEx(CUmodule *, const void *, unsigned int, CUjit_option *, void **);
CUresult cuModuleUnload(CUmodule);
CUresult cuLogicalEndpointAddDevice(CUlogicalEndpointId, CUdevice);
CUresult cuLogicalEndpointBindAddr(CUlogicalEndpointId, CUdevice, cuuint64_t, void *, cuuint64_t, unsigned long long);
CUresult cuLogicalEndpointBindMem(CUlogicalEndpointId, CUdevice, cuuint64_t, CUmemGenericAllocationHandle, cuuint64_t, cuuint64_t, unsigned long long);
CUresult cuLogicalEndpointCreate(CUlogicalEndpointId, const CUlogicalEndpointProp *);
CUresult cuLogicalEndpointDestroy(CUlogicalEndpointId);
CUresult cuLogicalEndpointGetLimits(cuuint64_t *, cuuint64_t *, const CUlogicalEndpointProp *);
CUresult cuLogicalEndpointIdRelease(CUlogicalEndpointId, uint32_t);
CUresult cuLogicalEndpointIdReserve(CUlogicalEndpointId *, uint32_t);
CUresult cuLogicalEndpointQuery(CUlogicalEndpointId, uint32_t, int *);
CUresult cuLogicalEndpointUnbind(CUlogicalEndpointId, CUdevice, cuuint64_t, cuuint64_t);
CUresult cuMulticastAddDevice(CUmemGenericAllocationHandle, CUdevice);
CUresult cuMulticastBindAddr(CUmemGenericAllocationHandle, size_t, CUdeviceptr, size_t, unsigned long long);
CUresult cuMulticastBindAddr_v2(CUmemGenericAllocationHandle, CUdevice, size_t, CUdeviceptr, size_t, unsigned long long);
CUresult cuMulticastBindMem(CUmemGenericAllocationHandle, size_t, CUmemGenericAllocationHandle, size_t, size_t, unsigned long long);
CUresult cuMulticastBindMem_v2(CUmemGenericAllocationHandle, CUdevice, size_t, CUmemGenericAllocationHandle, size_t, size_t, unsigned long long);
CUresult cuMulticastCreate(CUmemGenericAllocationHandle *, const CUmulticastObjectProp *);
CUresult cuMulticastGetGranularity(size_t *, const CUmulticastObjectProp *, CUmulticastGranularity_flags);
CUresult cuMulticastUnbind(CUmemGenericAllocationHandle, CUdevice, size_t, size_t);
CUresult cuStreamBeginCapture(CUstream);
CUresult cuStreamBeginCaptureToGraph(CUstream, CUgraph, const CUgraphNode *, const CUgraphEdgeData *, size_t, CUstreamCaptureMode);
CUresult cuStreamBeginCapture_v2(CUstream, CUstreamCaptureMode);
CUresult cuStreamBeginCapture_v2_ptsz(CUstream, CUstreamCaptureMode);
CUresult cuStreamCreate(CUstream *, unsigned int);
CUresult cuStreamDestroy_v2(CUstream);
CUresult cuStreamEndCapture(CUstream, CUgraph *);
CUresult cuStreamEndCapture_ptsz(CUstream, CUgraph *);
CUresult cuStreamGetCaptureInfo_v2(CUstream, CUstreamCaptureStatus *, cuuint64_t *, CUgraph *, const CUgraphNode **, size_t *);
CUresult cuStreamGetCtx_v2(CUstream, CUcontext *, CUgreenCtx *);
CUresult cuStreamIsCapturing(CUstream, CUstreamCaptureStatus *);
CUresult cuStreamSynchronize(CUstream);
CUresult cuStreamWaitEvent(CUstream, CUevent, unsigned int);
CUresult cuThreadExchangeStreamCaptureMode(CUstreamCaptureMode *);

static size_t step = 32 * MIB; /* of pools: what the Go side started simgpud with */

static size_t used(void)
{
	size_t free_bytes = 0, total = 0;

	OK(cuMemGetInfo_v2(&free_bytes, &total));
	WANT(total, CAPACITY);
	return total - free_bytes;
}

static void waits_for(size_t bytes)
{
	int i;

	for (i = 0; i < 2000 && used() != bytes; i++)
		usleep(10000); /* the kernel closes the files of a dead process when it comes to it */
	WANT(used(), bytes);
}

static size_t in_steps(size_t n)
{
	return (n + step - 1) / step * step;
}

static CUmemAllocationProp on_device(int dev)
{
	CUmemAllocationProp prop = {.type = CU_MEM_ALLOCATION_TYPE_PINNED, .requestedHandleTypes = 1};

	prop.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
	prop.location.id = dev;
	return prop;
}

static CUmemPoolProps pool_props(CUmemAllocationType type, CUmemLocationType where, int id)
{
	CUmemPoolProps props = {.allocType = type};

	props.location.type = where;
	props.location.id = id;
	return props;
}

/* ---- another process ----------------------------------------------------------------------- */

/* What one process tells the other, with a descriptor or -1. */
struct message {
	char data[64];
	size_t number;
};

static void tell(int to, const void *data, size_t number, int fd)
{
	struct message m = {.number = number};
	union {
		struct cmsghdr align;
		char room[CMSG_SPACE(sizeof(int))];
	} control;
	struct iovec iov = {&m, sizeof(m)};
	struct msghdr msg = {.msg_iov = &iov, .msg_iovlen = 1};

	if (data)
		memcpy(m.data, data, sizeof(m.data));
	if (fd >= 0) {
		memset(&control, 0, sizeof(control));
		msg.msg_control = control.room;
		msg.msg_controllen = sizeof(control.room);
		CMSG_FIRSTHDR(&msg)->cmsg_level = SOL_SOCKET;
		CMSG_FIRSTHDR(&msg)->cmsg_type = SCM_RIGHTS;
		CMSG_FIRSTHDR(&msg)->cmsg_len = CMSG_LEN(sizeof(int));
		memcpy(CMSG_DATA(CMSG_FIRSTHDR(&msg)), &fd, sizeof(int));
	}
	if (sendmsg(to, &msg, MSG_NOSIGNAL) != sizeof(m))
		abort();
}

static size_t hear(int from, void *data, int *fd)
{
	union {
		struct cmsghdr align;
		char room[CMSG_SPACE(sizeof(int))];
	} control;
	struct message m;
	struct iovec iov = {&m, sizeof(m)};
	struct msghdr msg = {.msg_iov = &iov, .msg_iovlen = 1, .msg_control = control.room, .msg_controllen = sizeof(control.room)};

	if (recvmsg(from, &msg, MSG_CMSG_CLOEXEC) != sizeof(m)) {
		fprintf(stderr, "the other process has gone\n");
		exit(1);
	}
	if (fd) {
		*fd = -1;
		if (msg.msg_controllen > 0 && CMSG_FIRSTHDR(&msg))
			memcpy(fd, CMSG_DATA(CMSG_FIRSTHDR(&msg)), sizeof(int));
	}
	if (data)
		memcpy(data, m.data, sizeof(m.data));
	return m.number;
}

/* This program once more, as `role`: the other end of *fd is its standard input. */
static pid_t start(const char *role, int *fd)
{
	int pair[2];
	pid_t pid;

	if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair) < 0)
		abort();
	pid = fork();
	if (pid == 0) {
		dup2(pair[1], 0);
		execl("/proc/self/exe", "hold_test", role, (char *)NULL);
		abort();
	}
	close(pair[1]);
	*fd = pair[0];
	return pid;
}

static void want_end(pid_t pid)
{
	int status;

	WANT(waitpid(pid, &status, 0), pid);
	WANT(status, 0);
}

static void initialise(void)
{
	CUcontext ctx;

	OK(cuInit(0));
	OK(cuDevicePrimaryCtxRetain(&ctx, 0));
	OK(cuCtxSetCurrent(ctx));
}

/* Opens what it is sent, says so, and holds it until it is told to go on. */
static void role_ipc(void)
{
	CUdeviceptr p, again, q, base;
	CUipcMemHandle handle, second;
	size_t size;

	initialise();
	hear(0, &handle, NULL);
	hear(0, &second, NULL);
	OK(cuIpcOpenMemHandle_v2(&p, handle, 1));
	OK(cuIpcOpenMemHandle(&again, handle, 1)); /* the same memory, the same address */
	WANT(again, p);
	OK(cuMemGetAddressRange_v2(&base, &size, p + 5));
	WANT(base == p && size == 20 * MIB, 1);
	OK(cuMemsetD8_v2(p, 1, 20 * MIB));
	WANT(cuMemFree_v2(p), CUDA_ERROR_INVALID_VALUE);
	OK(cuIpcOpenMemHandle_v2(&q, second, 1)); /* a part of a shared page */
	OK(cuMemGetAddressRange_v2(&base, &size, q));
	WANT(base == q && size == 1000, 1);
	tell(0, NULL, used(), -1);
	hear(0, NULL, NULL);
	OK(cuIpcCloseMemHandle(p));
	tell(0, NULL, used(), -1); /* one of two */
	hear(0, NULL, NULL);
	OK(cuIpcCloseMemHandle(p));
	WANT(cuIpcCloseMemHandle(p), CUDA_ERROR_INVALID_VALUE);
	OK(cuIpcCloseMemHandle(q));
	tell(0, NULL, used(), -1);
	hear(0, NULL, NULL);
	WANT(cuIpcOpenMemHandle_v2(&p, handle, 1), CUDA_ERROR_INVALID_HANDLE); /* freed meanwhile */
	memset(&handle, 7, sizeof(handle));
	WANT(cuIpcOpenMemHandle_v2(&p, handle, 1), CUDA_ERROR_INVALID_VALUE);
}

/* Allocates, exports, and dies without a word. */
static void role_dies(void)
{
	CUmemAllocationProp prop = on_device(0);
	CUmemGenericAllocationHandle h;
	CUipcMemHandle handle;
	CUdeviceptr p;
	int fd;

	initialise();
	OK(cuMemAlloc_v2(&p, 30 * MIB));
	OK(cuIpcGetMemHandle(&handle, p));
	tell(0, &handle, 0, -1);
	OK(cuMemCreate(&h, 6 * MIB, &prop, 0));
	OK(cuMemExportToShareableHandle(&fd, h, 1, 0));
	tell(0, NULL, 0, fd);
	hear(0, NULL, NULL);
	kill(getpid(), SIGKILL);
}

static void role_vmm(void)
{
	CUmemAllocationProp prop;
	CUmemGenericAllocationHandle h;
	CUdeviceptr va;
	int fd;

	initialise();
	hear(0, NULL, &fd);
	OK(cuMemImportFromShareableHandle(&h, (void *)(intptr_t)fd, 1));
	close(fd);
	OK(cuMemGetAllocationPropertiesFromHandle(&prop, h));
	WANT(prop.location.id, 0);
	OK(cuMemAddressReserve(&va, 64 * MIB, 0, 0, 0));
	OK(cuMemMap(va, 64 * MIB, 0, h, 0));
	OK(cuMemRelease(h));
	tell(0, NULL, used(), -1);
	hear(0, NULL, NULL);
	OK(cuMemUnmap(va, 64 * MIB));
	OK(cuMemAddressFree(va, 64 * MIB));
	tell(0, NULL, used(), -1);
	hear(0, NULL, NULL);
}

static void role_pool(void)
{
	CUmemPoolPtrExportData data;
	CUdeviceptr p, q;
	CUmemoryPool pool;
	int fd;

	initialise();
	hear(0, NULL, &fd);
	OK(cuMemPoolImportFromShareableHandle(&pool, (void *)(intptr_t)fd, 1, 0));
	close(fd);
	WANT(cuMemAllocFromPoolAsync(&q, MIB, pool, NULL), CUDA_ERROR_INVALID_VALUE); /* it may not */
	WANT(cuDeviceSetMemPool(0, pool), CUDA_ERROR_INVALID_VALUE);
	hear(0, &data, NULL);
	OK(cuMemPoolImportPointer(&p, pool, &data));
	hear(0, &data, NULL);
	OK(cuMemPoolImportPointer(&q, pool, &data)); /* of the same chunk */
	WANT(cuMemPoolImportPointer(&q, pool, &data), CUDA_ERROR_INVALID_VALUE);
	OK(cuMemsetD8_v2(p, 1, 3 * MIB));
	tell(0, NULL, used(), -1);
	hear(0, NULL, NULL);
	OK(cuMemFreeAsync(p, NULL));
	OK(cuMemFree_v2(q));
	WANT(cuMemFree_v2(q), CUDA_ERROR_INVALID_VALUE);
	OK(cuMemPoolDestroy(pool));
	tell(0, NULL, used(), -1);
	hear(0, NULL, NULL);
}

/* ---- sharing ------------------------------------------------------------------------------- */

static void ipc(void)
{
	size_t before = used(), theirs;
	CUipcMemHandle handle, small;
	CUdeviceptr p, q, m;
	pid_t pid;
	int fd;

	OK(cuMemAlloc_v2(&p, 20 * MIB));
	OK(cuMemAlloc_v2(&q, 1000));
	OK(cuIpcGetMemHandle(&handle, p + 3)); /* stands for the allocation */
	OK(cuIpcGetMemHandle(&small, q));
	WANT(cuIpcGetMemHandle(&handle, 4096), CUDA_ERROR_INVALID_VALUE);
	WANT(cuIpcOpenMemHandle_v2(&m, handle, 1), CUDA_ERROR_INVALID_CONTEXT); /* its own */
	OK(cuMemAllocManaged(&m, MIB, 1));
	WANT(cuIpcGetMemHandle(&small, m), CUDA_ERROR_INVALID_VALUE);
	OK(cuMemFree_v2(m));
	OK(cuIpcGetMemHandle(&small, q));

	pid = start("ipc", &fd);
	tell(fd, &handle, 0, -1);
	tell(fd, &small, 0, -1);
	theirs = hear(fd, NULL, NULL) - before;
	WANT(theirs, 22 * MIB + CONTEXT); /* shared memory counts once */
	OK(cuMemFree_v2(p));
	OK(cuMemFree_v2(q));
	WANT(used() - before, 22 * MIB + CONTEXT); /* until the last one closes it */
	tell(fd, NULL, 0, -1);
	WANT(hear(fd, NULL, NULL) - before, 22 * MIB + CONTEXT);
	tell(fd, NULL, 0, -1);
	WANT(hear(fd, NULL, NULL) - before, CONTEXT);
	tell(fd, NULL, 0, -1);
	want_end(pid);
	close(fd);
	waits_for(before);
}

static void dead_exporter(void)
{
	CUmemGenericAllocationHandle h;
	size_t before = used();
	CUipcMemHandle handle;
	int fd, memory, status;
	CUdeviceptr p;
	pid_t pid;

	pid = start("dies", &fd);
	hear(fd, &handle, NULL);
	hear(fd, NULL, &memory);
	OK(cuIpcOpenMemHandle_v2(&p, handle, 1));
	WANT(used() - before, CONTEXT + 36 * MIB);
	tell(fd, NULL, 0, -1);
	WANT(waitpid(pid, &status, 0), pid);
	WANT(WTERMSIG(status), SIGKILL);
	close(fd);
	waits_for(before + 36 * MIB);
	OK(cuIpcCloseMemHandle(p));
	WANT(used() - before, 6 * MIB); /* what only a descriptor stands for */
	OK(cuMemImportFromShareableHandle(&h, (void *)(intptr_t)memory, 1));
	close(memory);
	WANT(used() - before, 6 * MIB);
	OK(cuMemRelease(h));
	waits_for(before);
}

static void vmm_sharing(void)
{
	CUmemAllocationProp prop = on_device(0);
	CUmemGenericAllocationHandle h, mine;
	size_t before = used();
	pid_t pid;
	int fd, memory, pipes[2];

	prop.requestedHandleTypes = 0;
	OK(cuMemCreate(&h, 2 * MIB, &prop, 0));
	WANT(cuMemExportToShareableHandle(&memory, h, 1, 0), CUDA_ERROR_INVALID_VALUE); /* was not asked for */
	OK(cuMemRelease(h));
	prop.requestedHandleTypes = 1;
	OK(cuMemCreate(&h, 64 * MIB, &prop, 0));
	OK(cuMemExportToShareableHandle(&memory, h, 1, 0));
	WANT(memory > 2, 1);
	WANT(fcntl(memory, F_GETFD) & FD_CLOEXEC, FD_CLOEXEC);
	OK(cuMemImportFromShareableHandle(&mine, (void *)(intptr_t)memory, 1)); /* in the same process too */
	WANT(used() - before, 64 * MIB);
	OK(cuMemRelease(mine));

	pid = start("vmm", &fd);
	tell(fd, NULL, 0, memory);
	close(memory);
	WANT(hear(fd, NULL, NULL) - before, 64 * MIB + CONTEXT);
	OK(cuMemRelease(h));
	WANT(used() - before, 64 * MIB + CONTEXT); /* it is mapped there */
	tell(fd, NULL, 0, -1);
	WANT(hear(fd, NULL, NULL) - before, CONTEXT);
	tell(fd, NULL, 0, -1);
	want_end(pid);
	close(fd);
	waits_for(before);

	/* Nobody but the descriptor holds it. */
	OK(cuMemCreate(&h, 10 * MIB, &prop, 0));
	OK(cuMemExportToShareableHandle(&memory, h, 1, 0));
	OK(cuMemRelease(h));
	WANT(used() - before, 10 * MIB);
	close(memory);
	waits_for(before);

	if (pipe(pipes) < 0)
		abort();
	WANT(cuMemImportFromShareableHandle(&h, (void *)(intptr_t)pipes[0], 1), CUDA_ERROR_INVALID_VALUE);
	WANT(cuMemImportFromShareableHandle(&h, (void *)(intptr_t)-1, 1), CUDA_ERROR_INVALID_VALUE);
	close(pipes[0]);
	close(pipes[1]);

	prop = on_device(1); /* another GPU's: told by its descriptor */
	OK(cuMemCreate(&h, 4 * MIB, &prop, 0));
	OK(cuMemExportToShareableHandle(&memory, h, 1, 0));
	OK(cuMemImportFromShareableHandle(&mine, (void *)(intptr_t)memory, 1));
	OK(cuMemGetAllocationPropertiesFromHandle(&prop, mine));
	WANT(prop.location.id, 1);
	OK(cuMemRelease(mine));
	OK(cuMemRelease(h));
	close(memory);
	prop = on_device(0);
	prop.location.type = CU_MEM_LOCATION_TYPE_HOST_NUMA; /* the host's costs the GPU nothing */
	OK(cuMemCreate(&h, 64 * MIB, &prop, 0));
	WANT(used(), before);
	OK(cuMemRelease(h));
}

static void external_memory(void)
{
	CUDA_EXTERNAL_MEMORY_HANDLE_DESC desc = {.type = CU_EXTERNAL_MEMORY_HANDLE_TYPE_OPAQUE_FD, .size = 8 * MIB};
	CUDA_EXTERNAL_MEMORY_BUFFER_DESC buffer = {.offset = 2 * MIB, .size = 4 * MIB};
	CUDA_EXTERNAL_MEMORY_MIPMAPPED_ARRAY_DESC image = {.numLevels = 1};
	CUmemAllocationProp prop = on_device(0);
	CUmemGenericAllocationHandle h;
	CUexternalMemory ext;
	CUmipmappedArray mipmap;
	size_t before = used();
	CUdeviceptr p;

	OK(cuMemCreate(&h, 8 * MIB, &prop, 0));
	OK(cuMemExportToShareableHandle(&desc.handle.fd, h, 1, 0));
	desc.type = 9;
	WANT(cuImportExternalMemory(&ext, &desc), CUDA_ERROR_NOT_SUPPORTED);
	desc.type = CU_EXTERNAL_MEMORY_HANDLE_TYPE_OPAQUE_FD;
	desc.size = 9 * MIB;
	WANT(cuImportExternalMemory(&ext, &desc), CUDA_ERROR_INVALID_VALUE);
	desc.size = 8 * MIB;
	OK(cuImportExternalMemory(&ext, &desc));
	WANT(fcntl(desc.handle.fd, F_GETFD), -1); /* taken over */
	OK(cuMemRelease(h));
	WANT(used() - before, 8 * MIB);
	OK(cuExternalMemoryGetMappedBuffer(&p, ext, &buffer));
	OK(cuMemsetD8_v2(p, 1, 4 * MIB));
	WANT(cuMemsetD8_v2(p, 1, 4 * MIB + 1), CUDA_ERROR_INVALID_VALUE);
	buffer.size = 7 * MIB;
	WANT(cuExternalMemoryGetMappedBuffer(&p, ext, &buffer), CUDA_ERROR_INVALID_VALUE);
	image.arrayDesc.Width = image.arrayDesc.Height = 256;
	image.arrayDesc.Format = 0x20;
	image.arrayDesc.NumChannels = 1;
	OK(cuExternalMemoryGetMappedMipmappedArray(&mipmap, ext, &image));
	OK(cuMipmappedArrayDestroy(mipmap));
	WANT(used() - before, 8 * MIB);
	OK(cuDestroyExternalMemory(ext));
	WANT(cuDestroyExternalMemory(ext), CUDA_ERROR_INVALID_HANDLE);
	WANT(used() - before, 8 * MIB); /* a buffer is mapped */
	OK(cuMemFree_v2(p));
	WANT(used(), before);
}

static void pool_sharing(void)
{
	CUmemPoolProps props = pool_props(CU_MEM_ALLOCATION_TYPE_PINNED, CU_MEM_LOCATION_TYPE_DEVICE, 0);
	CUmemPoolPtrExportData data;
	size_t before = used();
	CUdeviceptr p, q;
	CUmemoryPool pool;
	int fd, shared;
	pid_t pid;

	OK(cuMemPoolCreate(&pool, &props));
	WANT(cuMemPoolExportToShareableHandle(&shared, pool, 1, 0), CUDA_ERROR_INVALID_VALUE); /* was not asked for */
	OK(cuMemPoolDestroy(pool));
	props.handleTypes = 1;
	OK(cuMemPoolCreate(&pool, &props));
	OK(cuMemAllocFromPoolAsync(&p, 3 * MIB, pool, NULL));
	WANT(cuMemPoolExportPointer(&data, p), CUDA_ERROR_INVALID_VALUE); /* the pool comes first */
	OK(cuMemPoolExportToShareableHandle(&shared, pool, 1, 0));
	OK(cuMemAllocFromPoolAsync(&q, MIB, pool, NULL));
	pid = start("pool", &fd);
	tell(fd, NULL, 0, shared);
	close(shared);
	OK(cuMemPoolExportPointer(&data, p));
	tell(fd, &data, 0, -1);
	OK(cuMemPoolExportPointer(&data, q));
	tell(fd, &data, 0, -1);
	WANT(hear(fd, NULL, NULL) - before, step + CONTEXT);
	OK(cuMemFreeAsync(p, NULL));
	OK(cuMemFreeAsync(q, NULL));
	OK(cuCtxSynchronize());
	WANT(used() - before, step + CONTEXT); /* the importer has it */
	tell(fd, NULL, 0, -1);
	WANT(hear(fd, NULL, NULL) - before, CONTEXT);
	tell(fd, NULL, 0, -1);
	want_end(pid);
	close(fd);
	OK(cuMemPoolDestroy(pool));
	waits_for(before);
}

/* ---- pools ---------------------------------------------------------------------------------- */

static void kinds_of_pools(void)
{
	CUmemLocation device = {.type = CU_MEM_LOCATION_TYPE_DEVICE}, host = {.type = CU_MEM_LOCATION_TYPE_HOST};
	CUmemPoolProps props = pool_props(CU_MEM_ALLOCATION_TYPE_PINNED, CU_MEM_LOCATION_TYPE_HOST, 0);
	CUmemoryPool pool, own, got;
	size_t before = used(), size = 5 * MIB;
	cuuint64_t reserved = 0;
	CUdeviceptr p;

	OK(cuMemPoolCreate(&pool, &props)); /* pinned host memory */
	OK(cuMemAllocFromPoolAsync(&p, size, pool, NULL));
	strcpy((char *)(uintptr_t)p, "host");
	WANT(used(), before);
	OK(cuMemFreeAsync(p, NULL));
	WANT(cuDeviceSetMemPool(0, pool), CUDA_ERROR_INVALID_VALUE);
	OK(cuMemPoolDestroy(pool));
	props.handleTypes = 1;
	WANT(cuMemPoolCreate(&pool, &props), CUDA_ERROR_INVALID_VALUE); /* cannot be shared */
	props = pool_props(CU_MEM_ALLOCATION_TYPE_PINNED, CU_MEM_LOCATION_TYPE_HOST_NUMA, 0);
	OK(cuMemPoolCreate(&pool, &props));
	OK(cuMemAllocFromPoolAsync(&p, size, pool, NULL));
	WANT(used(), before);
	OK(cuMemFreeAsync(p, NULL));
	OK(cuMemPoolDestroy(pool));
	props.location.type = CU_MEM_LOCATION_TYPE_HOST_NUMA_CURRENT;
	WANT(cuMemPoolCreate(&pool, &props), CUDA_ERROR_INVALID_VALUE); /* only where managed memory is to be */

	props = pool_props(CU_MEM_ALLOCATION_TYPE_MANAGED, CU_MEM_LOCATION_TYPE_DEVICE, 0);
	OK(cuMemPoolCreate(&pool, &props));
	OK(cuMemAllocFromPoolAsync(&p, size, pool, NULL));
	strcpy((char *)(uintptr_t)p, "both");
	WANT(used() - before, in_steps(size));
	OK(cuMemPoolGetAttribute(pool, CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT, &reserved));
	WANT(reserved, in_steps(size));
	OK(cuMemFreeAsync(p, NULL));
	OK(cuCtxSynchronize());
	WANT(used(), before); /* the threshold is 0 for these too */
	OK(cuMemPoolDestroy(pool));
	props.location.type = CU_MEM_LOCATION_TYPE_HOST;
	OK(cuMemPoolCreate(&pool, &props));
	OK(cuMemAllocFromPoolAsync(&p, size, pool, NULL));
	WANT(used(), before); /* managed, and prefers the host */
	OK(cuMemPoolDestroy(pool));
	OK(cuMemFreeAsync(p, NULL));

	OK(cuMemGetDefaultMemPool(&pool, &device, CU_MEM_ALLOCATION_TYPE_PINNED));
	OK(cuDeviceGetDefaultMemPool(&got, 0));
	WANT(got == pool, 1);
	OK(cuMemGetDefaultMemPool(&got, &device, CU_MEM_ALLOCATION_TYPE_MANAGED));
	WANT(got == pool, 0);
	WANT(cuMemPoolDestroy(got), CUDA_ERROR_INVALID_VALUE);
	OK(cuMemGetDefaultMemPool(&got, &host, CU_MEM_ALLOCATION_TYPE_PINNED));
	props = pool_props(CU_MEM_ALLOCATION_TYPE_PINNED, CU_MEM_LOCATION_TYPE_DEVICE, 0);
	OK(cuMemPoolCreate(&own, &props));
	WANT(cuMemSetMemPool(&device, CU_MEM_ALLOCATION_TYPE_MANAGED, own), CUDA_ERROR_INVALID_VALUE);
	OK(cuMemSetMemPool(&device, CU_MEM_ALLOCATION_TYPE_PINNED, own));
	OK(cuMemGetMemPool(&got, &device, CU_MEM_ALLOCATION_TYPE_PINNED));
	WANT(got == own, 1);
	OK(cuDeviceGetMemPool(&got, 0));
	WANT(got == own, 1);
	OK(cuMemAllocAsync_ptsz(&p, size, NULL));
	OK(cuMemPoolGetAttribute(own, CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT, &reserved));
	WANT(reserved, in_steps(size));
	OK(cuMemPoolDestroy(own)); /* goes with what is in use of it; the default one takes over */
	OK(cuMemGetMemPool(&got, &device, CU_MEM_ALLOCATION_TYPE_PINNED));
	WANT(got == pool, 1);
	OK(cuMemFreeAsync_ptsz(p, NULL));
	WANT(used(), before);
	device.id = 9;
	WANT(cuMemGetMemPool(&got, &device, CU_MEM_ALLOCATION_TYPE_PINNED), CUDA_ERROR_INVALID_DEVICE);
	WANT(cuMemGetMemPool(&got, NULL, CU_MEM_ALLOCATION_TYPE_PINNED), CUDA_ERROR_INVALID_VALUE);
}

/* ---- multicast ------------------------------------------------------------------------------ */

static void multicast(void)
{
	CUmulticastObjectProp prop = {.numDevices = 2, .size = 8 * MIB};
	CUmemAllocationProp mine = on_device(0);
	CUmemGenericAllocationHandle mc, h;
	size_t before = used(), granule = 0;
	CUdeviceptr va;

	OK(cuMulticastGetGranularity(&granule, &prop, 0));
	WANT(granule, 2 * MIB);
	OK(cuMulticastCreate(&mc, &prop));
	WANT(used(), before); /* it refers to memory, it has none */
	OK(cuMulticastAddDevice(mc, 0));
	WANT(cuMulticastAddDevice(mc, 0), CUDA_ERROR_INVALID_VALUE);
	OK(cuMemCreate(&h, 8 * MIB, &mine, 0));
	WANT(cuMulticastBindMem(mc, 0, h, 0, 4 * MIB, 0), CUDA_ERROR_ILLEGAL_STATE); /* not all devices yet */
	OK(cuMulticastAddDevice(mc, 1));
	OK(cuMulticastBindMem(mc, 0, h, 0, 4 * MIB, 0));
	WANT(cuMulticastBindMem_v2(mc, 0, 2 * MIB, h, 0, 4 * MIB, 0), CUDA_ERROR_ALREADY_MAPPED);
	WANT(cuMulticastBindMem_v2(mc, 1, 4 * MIB, h, 0, 4 * MIB, 0), CUDA_ERROR_INVALID_VALUE); /* is not that GPU's */
	OK(cuMemRelease(h));
	WANT(used() - before, 8 * MIB); /* bound */
	OK(cuMemAddressReserve(&va, 8 * MIB, 0, 0, 0));
	OK(cuMemMap(va, 8 * MIB, 0, mc, 0));
	OK(cuMulticastUnbind(mc, 0, 0, 4 * MIB));
	WANT(used(), before);
	WANT(cuMulticastUnbind(mc, 0, 0, 4 * MIB), CUDA_ERROR_INVALID_VALUE);
	OK(cuMemUnmap(va, 8 * MIB));

	OK(cuMemCreate(&h, 4 * MIB, &mine, 0));
	OK(cuMemMap(va, 4 * MIB, 0, h, 0));
	OK(cuMulticastBindAddr(mc, 0, va, 2 * MIB, 0));
	OK(cuMulticastBindAddr_v2(mc, 0, 2 * MIB, va + 2 * MIB, 2 * MIB, 0));
	OK(cuMemUnmap(va, 4 * MIB));
	OK(cuMemRelease(h));
	WANT(used() - before, 4 * MIB);
	OK(cuMemRelease(mc)); /* lets go of what is bound to it */
	WANT(used(), before);
	OK(cuMemAddressFree(va, 8 * MIB));
}

/* ---- logical endpoints ---------------------------------------------------------------------- */

static void endpoints(void)
{
	CUlogicalEndpointProp team = {.type = 2, .multicast.numDevices = 2, .size = 8 * MIB}, one = {.type = 1, .size = 4 * MIB}, wrong;
	CUmemAllocationProp mine = on_device(0);
	CUlogicalEndpointId first, id;
	CUmemGenericAllocationHandle h;
	cuuint64_t granule = 0, most = 0;
	size_t before = used();
	int complete = 7;
	CUdeviceptr va;

	OK(cuLogicalEndpointGetLimits(&granule, &most, &team));
	WANT(granule, 2 * MIB);
	WANT(most >= team.size, 1);
	WANT(cuLogicalEndpointIdReserve(&first, 0), CUDA_ERROR_INVALID_VALUE);
	WANT(cuLogicalEndpointIdReserve(&first, 1 << 20), CUDA_ERROR_OUT_OF_MEMORY);
	OK(cuLogicalEndpointIdReserve(&first, 2));
	id = first + 1;
	wrong = team, wrong.type = 0;
	WANT(cuLogicalEndpointCreate(id, &wrong), CUDA_ERROR_INVALID_VALUE);
	wrong = team, wrong.size = MIB;
	WANT(cuLogicalEndpointCreate(id, &wrong), CUDA_ERROR_INVALID_VALUE);
	wrong = team, wrong.ipcHandleTypes = 1;
	WANT(cuLogicalEndpointCreate(id, &wrong), CUDA_ERROR_NOT_SUPPORTED); /* no fabric here */
	WANT(cuLogicalEndpointCreate(first + 2, &team), CUDA_ERROR_INVALID_VALUE); /* not reserved */
	OK(cuLogicalEndpointCreate(id, &team));
	WANT(cuLogicalEndpointCreate(id, &team), CUDA_ERROR_INVALID_VALUE);
	WANT(used(), before); /* it refers to memory, it has none */

	OK(cuMemCreate(&h, 8 * MIB, &mine, 0));
	OK(cuLogicalEndpointAddDevice(id, 0));
	WANT(cuLogicalEndpointAddDevice(id, 0), CUDA_ERROR_INVALID_VALUE);
	OK(cuLogicalEndpointQuery(id, 1, &complete));
	WANT(complete, 0);
	OK(cuLogicalEndpointAddDevice(id, 1));
	WANT(cuLogicalEndpointBindMem(id, 0, 0, h, 0, 4 * MIB, 0), CUDA_ERROR_INVALID_VALUE); /* nobody has asked whether it is complete */
	OK(cuLogicalEndpointQuery(id, 1, &complete));
	WANT(complete, 1);
	OK(cuLogicalEndpointBindMem(id, 0, 0, h, 0, 4 * MIB, 0));
	WANT(cuLogicalEndpointBindMem(id, 0, 2 * MIB, h, 0, 4 * MIB, 0), CUDA_ERROR_ALREADY_MAPPED);
	WANT(cuLogicalEndpointBindMem(id, 1, 4 * MIB, h, 0, 4 * MIB, 0), CUDA_ERROR_INVALID_VALUE); /* is not that GPU's */
	OK(cuMemRelease(h));
	WANT(used() - before, 8 * MIB); /* bound */
	OK(cuLogicalEndpointUnbind(id, 0, 0, 4 * MIB));
	WANT(used(), before);
	WANT(cuLogicalEndpointUnbind(id, 0, 0, 4 * MIB), CUDA_ERROR_INVALID_VALUE);
	WANT(cuLogicalEndpointIdRelease(first, 2), CUDA_ERROR_INVALID_VALUE); /* one is in use */

	OK(cuLogicalEndpointCreate(first, &one)); /* of one GPU: complete at once */
	OK(cuLogicalEndpointQuery(first, 2, &complete));
	WANT(complete, 1);
	OK(cuMemCreate(&h, 4 * MIB, &mine, 0));
	OK(cuMemAddressReserve(&va, 4 * MIB, 0, 0, 0));
	OK(cuMemMap(va, 4 * MIB, 0, h, 0));
	OK(cuLogicalEndpointBindAddr(first, 0, 0, (void *)(uintptr_t)(va + 2 * MIB), 2 * MIB, 0));
	OK(cuMemUnmap(va, 4 * MIB));
	OK(cuMemAddressFree(va, 4 * MIB));
	OK(cuMemRelease(h));
	WANT(used() - before, 4 * MIB);
	OK(cuLogicalEndpointDestroy(first)); /* lets go of what is bound to it */
	WANT(used(), before);
	WANT(cuLogicalEndpointDestroy(first), CUDA_ERROR_INVALID_VALUE);
	OK(cuLogicalEndpointDestroy(id));
	OK(cuLogicalEndpointIdRelease(first, 2));
}

/* ---- arrays --------------------------------------------------------------------------------- */

static void arrays(void)
{
	CUDA_ARRAY3D_DESCRIPTOR d3 = {.Width = 1000, .Height = 1000, .Format = 0x20, .NumChannels = 4}, back3;
	CUDA_ARRAY3D_DESCRIPTOR_v1 old3 = {.Width = 64, .Height = 64, .Depth = 64, .Format = 1, .NumChannels = 1}, oldback3;
	CUDA_ARRAY_DESCRIPTOR d = {.Width = 1024, .Height = 1024, .Format = 0x20, .NumChannels = 1}, back;
	CUDA_ARRAY_DESCRIPTOR_v1 old = {.Width = 2048, .Height = 1024, .Format = 0x20, .NumChannels = 1}, oldback;
	size_t before = used();
	CUarray a, b, level;
	CUmipmappedArray m;

	OK(cuArrayCreate_v2(&a, &d));
	WANT(used() - before, 4 * MIB);
	OK(cuArrayGetDescriptor_v2(&back, a));
	WANT(back.Width == 1024 && back.Height == 1024 && back.Format == 0x20 && back.NumChannels == 1, 1);
	OK(cuArrayCreate(&b, &old));
	WANT(used() - before, 12 * MIB);
	OK(cuArrayGetDescriptor(&oldback, b));
	WANT(oldback.Width, 2048);
	OK(cuArrayDestroy(a));
	OK(cuArrayDestroy(b));
	WANT(cuArrayDestroy(b), CUDA_ERROR_INVALID_HANDLE);
	WANT(cuArrayGetDescriptor_v2(&back, b), CUDA_ERROR_INVALID_HANDLE);
	WANT(used(), before);

	OK(cuArray3DCreate_v2(&a, &d3)); /* 1000 x 1000 x 16 bytes: 15.26 MiB in whole pages */
	WANT(used() - before, 16 * MIB);
	OK(cuArray3DGetDescriptor_v2(&back3, a));
	WANT(back3.Width == 1000 && back3.Depth == 0, 1);
	OK(cuArray3DCreate(&b, &old3)); /* 256 KiB: shares a page with other small ones */
	WANT(used() - before, 18 * MIB);
	OK(cuArray3DGetDescriptor(&oldback3, b));
	WANT(oldback3.Depth, 64);
	OK(cuArrayDestroy(a));
	OK(cuArrayDestroy(b));
	WANT(used(), before);

	d3.NumChannels = 3;
	WANT(cuArray3DCreate_v2(&a, &d3), CUDA_ERROR_INVALID_VALUE);
	d3.NumChannels = 1;
	d3.Width = 0;
	WANT(cuArray3DCreate_v2(&a, &d3), CUDA_ERROR_INVALID_VALUE);
	d3.Width = d3.Height = 1u << 20;
	a = (CUarray)&d3;
	WANT(cuArray3DCreate_v2(&a, &d3), CUDA_ERROR_OUT_OF_MEMORY);
	WANT(a == (CUarray)&d3, 1);
	WANT(cuArray3DCreate_v2(&a, NULL), CUDA_ERROR_INVALID_VALUE);

	d3.Width = d3.Height = 1024;
	OK(cuMipmappedArrayCreate(&m, &d3, 99)); /* 11 levels: 4 + 1 + 1/4 + 1/16 MiB and seven of 64 KiB */
	WANT(used() - before, 6 * MIB);
	OK(cuMipmappedArrayGetLevel(&level, m, 3));
	OK(cuArray3DGetDescriptor_v2(&back3, level));
	WANT(back3.Width, 128);
	WANT(cuMipmappedArrayGetLevel(&level, m, 11), CUDA_ERROR_INVALID_VALUE);
	OK(cuMipmappedArrayGetLevel(&b, m, 3));
	WANT(b == level, 1);
	WANT(cuArrayDestroy(level), CUDA_ERROR_INVALID_HANDLE);
	OK(cuMipmappedArrayDestroy(m));
	WANT(cuMipmappedArrayDestroy(m), CUDA_ERROR_INVALID_HANDLE);
	WANT(cuArray3DGetDescriptor_v2(&back3, level), CUDA_ERROR_INVALID_HANDLE);
	WANT(used(), before);
}

static void sparse_arrays(void)
{
	CUDA_ARRAY3D_DESCRIPTOR d = {.Width = 2048, .Height = 2048, .Format = 0x20, .NumChannels = 1, .Flags = CUDA_ARRAY3D_SPARSE};
	CUarrayMapInfo map = {.resourceType = CU_RESOURCE_TYPE_ARRAY, .memOperationType = CU_MEM_OPERATION_TYPE_MAP, .deviceBitMask = 1};
	CUDA_ARRAY_MEMORY_REQUIREMENTS need;
	CUDA_ARRAY_SPARSE_PROPERTIES sparse;
	CUmemAllocationProp prop = on_device(0);
	CUmemGenericAllocationHandle h;
	size_t before = used();
	CUmipmappedArray m;
	CUarray a;

	OK(cuArray3DCreate_v2(&a, &d));
	WANT(used(), before); /* no memory until some is mapped */
	OK(cuArrayGetSparseProperties(&sparse, a));
	WANT(sparse.tileExtent.width * sparse.tileExtent.height * 4, 65536);
	WANT(cuArrayGetMemoryRequirements(&need, a, 0), CUDA_ERROR_INVALID_VALUE);
	OK(cuMemCreate(&h, 2 * MIB, &prop, 0));
	map.resource.array = a;
	map.memHandle.memHandle = h;
	map.subresource.sparseLevel.extentWidth = 64;
	OK(cuMemMapArrayAsync(&map, 1, NULL));
	map.subresource.sparseLevel.offsetX = 64;
	OK(cuMemMapArrayAsync_ptsz(&map, 1, NULL));
	OK(cuMemRelease(h));
	WANT(used() - before, 2 * MIB);
	map.memOperationType = CU_MEM_OPERATION_TYPE_UNMAP;
	OK(cuMemMapArrayAsync(&map, 1, NULL));
	WANT(cuMemMapArrayAsync(&map, 1, NULL), CUDA_ERROR_INVALID_VALUE);
	WANT(used() - before, 2 * MIB); /* the other part */
	OK(cuArrayDestroy(a));
	WANT(used(), before);

	d.Flags = CUDA_ARRAY3D_DEFERRED_MAPPING;
	OK(cuMipmappedArrayCreate(&m, &d, 1));
	WANT(used(), before);
	OK(cuMipmappedArrayGetMemoryRequirements(&need, m, 0));
	WANT(need.size, 16 * MIB);
	WANT(cuMipmappedArrayGetSparseProperties(&sparse, m), CUDA_ERROR_INVALID_VALUE);
	OK(cuMemCreate(&h, need.size, &prop, 0));
	memset(&map, 0, sizeof(map));
	map.resourceType = CU_RESOURCE_TYPE_MIPMAPPED_ARRAY;
	map.resource.mipmap = m;
	map.memOperationType = CU_MEM_OPERATION_TYPE_MAP;
	map.memHandle.memHandle = h;
	OK(cuMemMapArrayAsync(&map, 1, NULL));
	OK(cuMemRelease(h));
	WANT(used() - before, 16 * MIB);
	OK(cuMipmappedArrayDestroy(m));
	WANT(used(), before);
}

/* ---- graphs ---------------------------------------------------------------------------------- */

static cuuint64_t graph_memory(int attribute)
{
	cuuint64_t value = 0;

	OK(cuDeviceGetGraphMemAttribute(0, (CUgraphMem_attribute)attribute, &value));
	return value;
}

static CUDA_MEM_ALLOC_NODE_PARAMS node_of(size_t bytes)
{
	CUDA_MEM_ALLOC_NODE_PARAMS params = {.bytesize = bytes};

	params.poolProps = pool_props(CU_MEM_ALLOCATION_TYPE_PINNED, CU_MEM_LOCATION_TYPE_DEVICE, 0);
	return params;
}

static void graphs(void)
{
	CUDA_MEM_ALLOC_NODE_PARAMS params = node_of(9 * MIB), back;
	CUDA_GRAPH_INSTANTIATE_PARAMS how = {.flags = CUDA_GRAPH_INSTANTIATE_FLAG_UPLOAD};
	CUgraphNodeParams any = {.type = CU_GRAPH_NODE_TYPE_MEM_ALLOC};
	CUgraphExecUpdateResultInfo info;
	CUgraphExecUpdateResult result;
	CUgraphNode alloc, release, other, nodes[8];
	size_t before = used(), count = 8;
	CUgraph graph, second, clone;
	CUgraphNodeType type;
	cuuint64_t zero = 0;
	CUgraphExec exec, exec2;
	CUdeviceptr freed;

	OK(cuGraphCreate(&graph, 0));
	params.bytesize = 0;
	WANT(cuGraphAddMemAllocNode(&alloc, graph, NULL, 0, &params), CUDA_ERROR_INVALID_VALUE);
	params.bytesize = 9 * MIB;
	OK(cuGraphAddMemAllocNode(&alloc, graph, NULL, 0, &params));
	WANT(params.dptr != 0, 1);
	WANT(used(), before); /* an address, no memory */
	WANT(cuMemsetD8_v2(params.dptr, 1, 1), CUDA_ERROR_INVALID_VALUE);
	WANT(cuGraphAddMemFreeNode(&release, graph, &alloc, 1, 4096), CUDA_ERROR_INVALID_VALUE);
	OK(cuGraphAddMemFreeNode(&release, graph, &alloc, 1, params.dptr));
	WANT(cuGraphAddMemFreeNode(&other, graph, &alloc, 1, params.dptr), CUDA_ERROR_INVALID_VALUE); /* twice */
	OK(cuGraphMemAllocNodeGetParams(alloc, &back));
	WANT(back.dptr == params.dptr && back.bytesize == 9 * MIB, 1);
	OK(cuGraphMemFreeNodeGetParams(release, &freed));
	WANT(freed, params.dptr);
	OK(cuGraphGetNodes(graph, NULL, &count));
	WANT(count, 2);
	OK(cuGraphGetNodes(graph, nodes, &count));
	WANT(nodes[0] == alloc && nodes[1] == release, 1);
	OK(cuGraphNodeGetType(release, &type));
	WANT(type, CU_GRAPH_NODE_TYPE_MEM_FREE);
	WANT(cuGraphClone(&clone, graph), CUDA_ERROR_INVALID_VALUE); /* it allocates */
	OK(cuGraphCreate(&second, 0));
	WANT(cuGraphAddChildGraphNode(&other, second, NULL, 0, graph), CUDA_ERROR_INVALID_VALUE);

	OK(cuGraphInstantiateWithFlags(&exec, graph, 0));
	WANT(cuGraphInstantiateWithFlags(&exec2, graph, 0), CUDA_ERROR_INVALID_VALUE); /* one at a time */
	WANT(used(), before);
	OK(cuGraphLaunch(exec, NULL));
	WANT(used() - before, 10 * MIB); /* kept for the next launch */
	WANT(graph_memory(CU_GRAPH_MEM_ATTR_USED_MEM_CURRENT), 0);
	WANT(graph_memory(CU_GRAPH_MEM_ATTR_USED_MEM_HIGH), 10 * MIB);
	WANT(graph_memory(CU_GRAPH_MEM_ATTR_RESERVED_MEM_CURRENT), 10 * MIB);
	OK(cuGraphLaunch_ptsz(exec, NULL));
	OK(cuCtxSynchronize());
	WANT(used() - before, 10 * MIB);
	OK(cuDeviceGraphMemTrim(0));
	WANT(used(), before);
	WANT(graph_memory(CU_GRAPH_MEM_ATTR_RESERVED_MEM_HIGH), 10 * MIB);
	OK(cuDeviceSetGraphMemAttribute(0, CU_GRAPH_MEM_ATTR_RESERVED_MEM_HIGH, &zero));
	OK(cuDeviceSetGraphMemAttribute(0, CU_GRAPH_MEM_ATTR_USED_MEM_HIGH, &zero));
	WANT(graph_memory(CU_GRAPH_MEM_ATTR_RESERVED_MEM_HIGH), 0);
	WANT(cuDeviceSetGraphMemAttribute(0, CU_GRAPH_MEM_ATTR_RESERVED_MEM_CURRENT, &zero), CUDA_ERROR_INVALID_VALUE);
	OK(cuGraphUpload(exec, NULL));
	WANT(used() - before, 10 * MIB);
	OK(cuGraphExecDestroy(exec));
	WANT(cuGraphExecDestroy(exec), CUDA_ERROR_INVALID_VALUE);
	WANT(used() - before, 10 * MIB); /* the device's, not the graph's */
	OK(cuDeviceGraphMemTrim(0));
	WANT(used(), before);
	OK(cuGraphInstantiateWithParams(&exec, graph, &how));
	WANT(used() - before, 10 * MIB);
	OK(cuGraphExecDestroy(exec));
	OK(cuDeviceGraphMemTrim(0));
	OK(cuGraphDestroy(graph));
	WANT(cuGraphDestroy(graph), CUDA_ERROR_INVALID_VALUE);

	/* What a graph does not free lives on, and stands in the way of the next launch. */
	any.alloc = (__typeof__(any.alloc))node_of(6 * MIB);
	OK(cuGraphAddNode_v2(&alloc, second, NULL, NULL, 0, &any));
	OK(cuGraphInstantiate_v2(&exec, second, NULL, NULL, 0));
	OK(cuGraphLaunch(exec, NULL));
	OK(cuMemsetD8_v2(any.alloc.dptr, 1, 6 * MIB));
	WANT(graph_memory(CU_GRAPH_MEM_ATTR_USED_MEM_CURRENT), 6 * MIB);
	OK(cuDeviceGraphMemTrim(0));
	WANT(used() - before, 6 * MIB); /* in use */
	WANT(cuGraphLaunch(exec, NULL), CUDA_ERROR_INVALID_VALUE);
	OK(cuMemFreeAsync(any.alloc.dptr, NULL));
	WANT(cuMemFree_v2(any.alloc.dptr), CUDA_ERROR_INVALID_VALUE);
	OK(cuGraphLaunch(exec, NULL));
	OK(cuGraphExecDestroy(exec));
	WANT(used() - before, 6 * MIB);
	OK(cuGraphInstantiateWithFlags(&exec, second, CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH));
	OK(cuGraphLaunch(exec, NULL)); /* frees what is left of the last one */
	OK(cuGraphLaunch(exec, NULL));
	WANT(used() - before, 6 * MIB);
	OK(cuGraphExecUpdate_v2(exec, second, &info) == CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE ? CUDA_SUCCESS : CUDA_ERROR_UNKNOWN);
	OK(cuGraphDestroy(second));
	OK(cuGraphExecDestroy(exec));
	OK(cuMemsetD8_v2(any.alloc.dptr, 1, 6 * MIB)); /* outlives both */

	/* Another graph frees it. */
	OK(cuGraphCreate(&graph, 0));
	any.type = CU_GRAPH_NODE_TYPE_MEM_FREE;
	any.free.dptr = any.alloc.dptr;
	OK(cuGraphAddNode(&release, graph, NULL, 0, &any));
	OK(cuGraphInstantiate(&exec, graph, NULL, NULL, 0));
	OK(cuGraphLaunch(exec, NULL));
	WANT(cuGraphLaunch(exec, NULL), CUDA_ERROR_INVALID_VALUE);
	OK(cuDeviceGraphMemTrim(0));
	WANT(used(), before);
	OK(cuGraphExecDestroy(exec));
	OK(cuGraphDestroy(graph));

	/* A launch that finds no memory leaves nothing. */
	OK(cuGraphCreate(&graph, 0));
	params = node_of(10 * GIB);
	OK(cuGraphAddMemAllocNode(&alloc, graph, NULL, 0, &params));
	OK(cuGraphAddMemAllocNode(&other, graph, NULL, 0, &params));
	OK(cuGraphInstantiateWithFlags(&exec, graph, 0));
	WANT(cuGraphLaunch(exec, NULL), CUDA_ERROR_OUT_OF_MEMORY);
	WANT(graph_memory(CU_GRAPH_MEM_ATTR_USED_MEM_CURRENT), 0);
	OK(cuDeviceGraphMemTrim(0));
	WANT(used(), before);
	OK(cuGraphExecDestroy(exec));
	OK(cuGraphDestroy(graph));

	/* What one node frees the next may have, in an upload as in a launch. */
	OK(cuGraphCreate(&graph, 0));
	params = node_of(6 * MIB);
	OK(cuGraphAddMemAllocNode(&alloc, graph, NULL, 0, &params));
	OK(cuGraphAddMemFreeNode(&release, graph, &alloc, 1, params.dptr));
	OK(cuGraphAddMemAllocNode(&alloc, graph, &release, 1, &params));
	OK(cuGraphAddMemFreeNode(&release, graph, &alloc, 1, params.dptr));
	OK(cuGraphInstantiateWithFlags(&exec, graph, 0));
	OK(cuGraphUpload_ptsz(exec, NULL));
	WANT(used() - before, 6 * MIB);
	OK(cuGraphLaunch(exec, NULL));
	WANT(used() - before, 6 * MIB);
	OK(cuDeviceGraphMemTrim(0));
	OK(cuGraphExecDestroy(exec));
	OK(cuGraphDestroy(graph));

	/* Graphs without memory: copies, children, updates. */
	OK(cuGraphCreate(&graph, 0));
	OK(cuGraphAddEmptyNode(&other, graph, NULL, 0));
	OK(cuGraphCreate(&second, 0));
	OK(cuGraphAddChildGraphNode(&other, second, NULL, 0, graph));
	OK(cuGraphClone(&clone, second));
	OK(cuGraphInstantiateWithFlags(&exec, second, 0));
	OK(cuGraphInstantiateWithFlags(&exec2, second, 0));
	OK(cuGraphExecUpdate(exec, clone, NULL, &result));
	OK(cuGraphAddEmptyNode(&other, clone, NULL, 0));
	WANT(cuGraphExecUpdate(exec, clone, NULL, &result), CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE);
	WANT(result, 2);
	OK(cuGraphLaunch(exec, NULL));
	OK(cuGraphExecDestroy(exec));
	OK(cuGraphExecDestroy(exec2));
	OK(cuGraphDestroy(clone));
	OK(cuGraphDestroy(second));
	OK(cuGraphDestroy(graph));
	WANT(used(), before);
}

static void *other_thread(void *arg)
{
	CUcontext ctx = arg;
	CUdeviceptr p;

	OK(cuCtxSetCurrent(ctx));
	WANT(cuMemAlloc_v2(&p, MIB), CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
	return NULL;
}

static void capture(void)
{
	CUstreamCaptureStatus status = 9;
	CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_RELAXED;
	size_t before = used(), count = 0;
	const CUgraphNode *dependencies;
	CUgraph graph, into, seen;
	CUgraphExec exec;
	CUdeviceptr p, q;
	CUstream stream, second;
	cuuint64_t id = 0;
	pthread_t thread;
	CUcontext ctx;
	CUevent event;

	OK(cuStreamCreate(&stream, 1));
	OK(cuStreamCreate(&second, 1));
	OK(cuEventCreate(&event, 0));
	WANT(cuStreamBeginCapture_v2(NULL, mode), CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED); /* the legacy stream */
	WANT(cuStreamEndCapture(stream, &graph), CUDA_ERROR_ILLEGAL_STATE);
	OK(cuStreamBeginCapture_v2(stream, mode));
	WANT(cuStreamBeginCapture_v2(stream, mode), CUDA_ERROR_ILLEGAL_STATE);
	OK(cuStreamIsCapturing(stream, &status));
	WANT(status, CU_STREAM_CAPTURE_STATUS_ACTIVE);
	OK(cuMemAllocAsync(&p, 5 * MIB, stream)); /* a node */
	WANT(used(), before);
	OK(cuMemsetD8Async(p, 1, 5 * MIB, stream));
	OK(cuEventRecord(event, stream));
	OK(cuStreamWaitEvent(second, event, 0)); /* joins */
	OK(cuMemAllocAsync(&q, 2 * MIB, second));
	OK(cuMemFreeAsync(q, second));
	OK(cuEventRecord(event, second));
	OK(cuStreamWaitEvent(stream, event, 0));
	OK(cuMemFreeAsync(p, stream));
	OK(cuStreamGetCaptureInfo_v2(stream, &status, &id, &seen, &dependencies, &count));
	WANT(id > 0, 1);
	WANT(cuStreamEndCapture(second, &graph), CUDA_ERROR_STREAM_CAPTURE_UNMATCHED);
	OK(cuStreamEndCapture(stream, &graph));
	WANT(seen == graph, 1);
	OK(cuStreamIsCapturing(second, &status));
	WANT(status, CU_STREAM_CAPTURE_STATUS_NONE);
	OK(cuGraphGetNodes(graph, NULL, &count));
	WANT(count, 5);
	OK(cuGraphInstantiateWithFlags(&exec, graph, 0));
	OK(cuGraphLaunch(exec, stream));
	WANT(used() - before, 8 * MIB);
	OK(cuGraphExecDestroy(exec));
	OK(cuGraphDestroy(graph));
	OK(cuDeviceGraphMemTrim(0));
	WANT(used(), before);

	/* Calls that cannot be seen by a capture break it, in the modes that look for them. */
	OK(cuCtxGetCurrent(&ctx));
	OK(cuStreamBeginCapture(stream)); /* global */
	pthread_create(&thread, NULL, other_thread, ctx);
	pthread_join(thread, NULL);
	OK(cuStreamIsCapturing(stream, &status));
	WANT(status, CU_STREAM_CAPTURE_STATUS_INVALIDATED);
	WANT(cuStreamEndCapture(stream, &graph), CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
	WANT(graph == NULL, 1);
	OK(cuStreamBeginCapture_v2(stream, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL));
	OK(cuThreadExchangeStreamCaptureMode(&mode));
	WANT(mode, CU_STREAM_CAPTURE_MODE_GLOBAL);
	OK(cuMemAlloc_v2(&p, MIB)); /* relaxed for a moment */
	OK(cuThreadExchangeStreamCaptureMode(&mode));
	WANT(cuMemFree_v2(p), CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
	WANT(cuStreamEndCapture(stream, &graph), CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
	OK(cuMemFree_v2(p));
	OK(cuStreamBeginCapture_v2(stream, CU_STREAM_CAPTURE_MODE_RELAXED));
	OK(cuMemAlloc_v2(&p, MIB));
	OK(cuMemFree_v2(p));
	WANT(cuStreamSynchronize(stream), CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED); /* never */
	WANT(cuStreamEndCapture(stream, &graph), CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);

	/* Into a graph that there is; and on the thread's own default stream. */
	OK(cuGraphCreate(&into, 0));
	OK(cuStreamBeginCaptureToGraph(stream, into, NULL, NULL, 0, CU_STREAM_CAPTURE_MODE_RELAXED));
	OK(cuMemAllocAsync(&p, MIB, stream));
	OK(cuStreamEndCapture(stream, &graph));
	WANT(graph == into, 1);
	OK(cuGraphDestroy(into));
	OK(cuStreamBeginCapture_v2_ptsz(NULL, CU_STREAM_CAPTURE_MODE_RELAXED));
	OK(cuMemAllocAsync_ptsz(&p, MIB, NULL));
	WANT(used(), before);
	OK(cuStreamEndCapture_ptsz(NULL, &graph));
	OK(cuGraphDestroy(graph));
	OK(cuStreamBeginCapture_v2(stream, CU_STREAM_CAPTURE_MODE_RELAXED));
	OK(cuStreamDestroy_v2(stream)); /* takes its capture along */
	OK(cuStreamDestroy_v2(second));
	OK(cuEventDestroy_v2(event));
	WANT(used(), before);
}

/* ---- contexts, modules ------------------------------------------------------------------------ */

static void context_sizes(void)
{
	size_t before = used(), value = 0, second;
	CUcontext ctx, current;

	OK(cuCtxSetLimit(CU_LIMIT_STACK_SIZE, 65 * 1024)); /* 64 KiB more for each of 40 x 1024 threads */
	WANT(used() - before, 2560 * MIB);
	OK(cuCtxGetLimit(&value, CU_LIMIT_STACK_SIZE));
	WANT(value, 65 * 1024);
	OK(cuCtxSetLimit(CU_LIMIT_MALLOC_HEAP_SIZE, 108 * MIB));
	WANT(used() - before, 2660 * MIB);
	WANT(cuCtxSetLimit(CU_LIMIT_STACK_SIZE, MIB), CUDA_ERROR_OUT_OF_MEMORY);
	OK(cuCtxGetLimit(&value, CU_LIMIT_STACK_SIZE));
	WANT(value, 65 * 1024);
	OK(cuCtxSetLimit(CU_LIMIT_STACK_SIZE, 0)); /* the 40 MiB of the context's own go too */
	WANT(before - used(), 40 * MIB - 100 * MIB);
	OK(cuCtxSetLimit(CU_LIMIT_MALLOC_HEAP_SIZE, 8 * MIB));
	OK(cuCtxSetLimit(CU_LIMIT_STACK_SIZE, 1024));
	WANT(used(), before);

	OK(cuCtxCreate_v2(&ctx, 0, 0));
	second = used() - before;
	OK(cuCtxSetLimit(CU_LIMIT_STACK_SIZE, 2048));
	OK(cuCtxAttach(&current, 0));
	WANT(current == ctx, 1);
	OK(cuCtxDetach(ctx));
	WANT(used() - before, second + 40 * MIB);
	OK(cuCtxDetach(ctx));
	WANT(used(), before);
	WANT(cuCtxDetach(ctx), CUDA_ERROR_INVALID_CONTEXT);
}

static void green_contexts(void)
{
	CUdevResource all, part[4], rest;
	size_t before = used();
	unsigned int groups = 4;
	CUcontext ctx, current;
	CUdevResourceDesc desc;
	CUgreenCtx green, of;
	CUstream stream;
	CUdeviceptr p, stays;
	size_t heap;

	OK(cuDeviceGetDevResource(0, &all, CU_DEV_RESOURCE_TYPE_SM));
	WANT(all.sm.smCount, 40);
	WANT(cuDeviceGetDevResource(0, &all, 1000), CUDA_ERROR_INVALID_RESOURCE_TYPE);
	OK(cuDevSmResourceSplitByCount(part, &groups, &all, &rest, 0, 15));
	WANT(groups, 2);
	WANT(part[1].sm.smCount * 100 + rest.sm.smCount, 1608);
	WANT(cuDevSmResourceSplitByCount(part, &groups, &all, &rest, 0, 41), CUDA_ERROR_INVALID_RESOURCE_CONFIGURATION);
	OK(cuDevResourceGenerateDesc(&desc, part, 1));
	WANT(cuGreenCtxCreate(&green, desc, 0, 0), CUDA_ERROR_INVALID_VALUE);
	OK(cuGreenCtxCreate(&green, desc, 0, 1));
	WANT(used() - before, 16 * MIB);
	OK(cuCtxFromGreenCtx(&ctx, green));
	OK(cuGreenCtxGetDevResource(green, &rest, CU_DEV_RESOURCE_TYPE_SM));
	WANT(rest.sm.smCount, 16);
	OK(cuCtxGetCurrent(&current));
	OK(cuCtxPushCurrent_v2(ctx));
	OK(cuCtxGetDevResource(NULL, &rest, CU_DEV_RESOURCE_TYPE_SM));
	WANT(rest.sm.smCount, 16);
	OK(cuMemAlloc_v2(&stays, 10 * MIB));
	OK(cuCtxSetLimit(CU_LIMIT_MALLOC_HEAP_SIZE, 16 * MIB));
	WANT(cuCtxDestroy_v2(ctx), CUDA_ERROR_INVALID_CONTEXT);
	OK(cuCtxPopCurrent_v2(NULL));
	OK(cuGreenCtxStreamCreate(&stream, green, 1, 0));
	OK(cuStreamGetCtx_v2(stream, &ctx, &of));
	WANT(ctx == NULL && of == green, 1);
	OK(cuMemAllocAsync(&p, MIB, stream));
	OK(cuMemFreeAsync(p, stream));
	OK(cuGreenCtxDestroy(green));
	WANT(cuGreenCtxDestroy(green), CUDA_ERROR_INVALID_HANDLE);
	OK(cuCtxSynchronize());
	/* What was allocated and set in it is the primary context's. */
	WANT(used() - before, 18 * MIB);
	OK(cuMemFree_v2(stays));
	OK(cuCtxGetLimit(&heap, CU_LIMIT_MALLOC_HEAP_SIZE));
	WANT(heap, 16 * MIB);
	OK(cuCtxSetLimit(CU_LIMIT_MALLOC_HEAP_SIZE, 8 * MIB));
	WANT(used(), before);
	OK(cuCtxGetCurrent(&ctx));
	WANT(ctx == current, 1);
}

static void modules(void)
{
	static const char image[] = "// simgpu: bytes=3MiB lazy=5MiB global=table:64KiB global=one:4 managed=shared:1MiB\n.version 8.0\n";
	static const char plain[] = "// simgpu: bytes=4MiB lazy=2MiB global=table:4096";
	size_t before = used(), bytes = 0;
	CUdeviceptr p = 0;
	CUfunction f, again;
	CUkernel kernel;
	CUlibrary library;
	CUmodule module;
	char path[] = "/tmp/hold_test.XXXXXX";
	const char *name;
	int fd, loaded;

	OK(cuModuleLoadData(&module, plain));
	WANT(used() - before, 4 * MIB);
	OK(cuModuleGetGlobal_v2(&p, &bytes, module, "table"));
	WANT(bytes, 4096);
	OK(cuMemsetD8_v2(p, 1, 4096));
	WANT(cuMemFree_v2(p), CUDA_ERROR_INVALID_VALUE);
	OK(cuModuleGetGlobal_v2(&p, NULL, module, "table"));
	WANT(cuModuleGetGlobal_v2(&p, &bytes, module, "chair"), CUDA_ERROR_NOT_FOUND);
	OK(cuModuleGetFunction(&f, module, "work"));
	WANT(used() - before, 6 * MIB); /* the rest came with the first function */
	OK(cuModuleGetFunction(&again, module, "more"));
	WANT(used() - before, 6 * MIB);
	OK(cuFuncGetName(&name, again));
	WANT(strcmp(name, "more"), 0);
	OK(cuModuleUnload(module));
	WANT(used(), before);
	WANT(cuModuleUnload(module), CUDA_ERROR_INVALID_HANDLE);
	WANT(cuMemsetD8_v2(p, 1, 1), CUDA_ERROR_INVALID_VALUE);
	WANT(cuModuleLoadData(&module, "// simgpu: bites=1\n"), CUDA_ERROR_INVALID_IMAGE);
	WANT(cuModuleLoadData(&module, "// simgpu: bytes=64GiB\n"), CUDA_ERROR_OUT_OF_MEMORY);
	WANT(cuModuleLoad(&module, "/no/such/file"), CUDA_ERROR_FILE_NOT_FOUND);
	WANT(used(), before);

	/* Managed variables: loaded at once, all of it. */
	OK(cuModuleLoadDataEx(&module, image, 0, NULL, NULL));
	WANT(used() - before, 4 * MIB + 6 * MIB + 2 * MIB);
	OK(cuModuleGetGlobal_v2(&p, &bytes, module, "shared"));
	WANT(bytes, MIB);
	*(char *)(uintptr_t)p = 1;
	OK(cuModuleUnload(module));
	WANT(used(), before);

	/* Libraries: of no context, until one uses them. */
	fd = mkstemp(path);
	if (fd < 0 || write(fd, plain, sizeof(plain)) != sizeof(plain))
		abort();
	close(fd);
	OK(cuModuleLoad(&module, path));
	WANT(used() - before, 4 * MIB);
	OK(cuModuleUnload(module));
	OK(cuLibraryLoadFromFile(&library, path, NULL, NULL, 0, NULL, NULL, 0));
	unlink(path);
	OK(cuLibraryGetKernel(&kernel, library, "sleep_1us"));
	WANT(used(), before);
	OK(cuLaunchKernel((CUfunction)kernel, 1, 1, 1, 1, 1, 1, 0, NULL, NULL, NULL)); /* a kernel will do */
	WANT(used() - before, 6 * MIB);
	OK(cuKernelGetFunction(&f, kernel));
	OK(cuFuncGetModule(&module, f));
	WANT(cuModuleUnload(module), CUDA_ERROR_INVALID_VALUE);
	OK(cuLibraryGetGlobal(&p, &bytes, library, "table"));
	WANT(cuLibraryGetManaged(&p, &bytes, library, "table"), CUDA_ERROR_NOT_FOUND);
	OK(cuLibraryUnload(library));
	WANT(cuLibraryUnload(library), CUDA_ERROR_INVALID_HANDLE);
	WANT(cuLaunchKernel(f, 1, 1, 1, 1, 1, 1, 0, NULL, NULL, NULL), CUDA_ERROR_INVALID_HANDLE);
	WANT(used(), before);

	setenv("CUDA_MODULE_LOADING", "EAGER", 1);
	OK(cuLibraryLoadData(&library, plain, NULL, NULL, 0, NULL, NULL, 0));
	WANT(used() - before, 6 * MIB);
	OK(cuLibraryUnload(library));
	WANT(used(), before);
	OK(cuModuleGetLoadingMode((CUmoduleLoadingMode *)&loaded));
	WANT(loaded, CU_MODULE_EAGER_LOADING);
	unsetenv("CUDA_MODULE_LOADING");
}

/* Everything that belongs to a context goes with it. */
static void context_takes_all(void)
{
	CUDA_ARRAY_DESCRIPTOR d = {.Width = 1024, .Height = 1024, .Format = 0x20, .NumChannels = 1}, back;
	size_t before = used(), bytes;
	CUcontext ctx;
	CUmodule module;
	CUdeviceptr p;
	CUarray a;

	OK(cuCtxCreate_v2(&ctx, 0, 0));
	OK(cuMemAlloc_v2(&p, 4 * MIB));
	OK(cuArrayCreate_v2(&a, &d));
	OK(cuModuleLoadData(&module, "// simgpu: bytes=4MiB global=x:4 managed=y:4"));
	OK(cuCtxDestroy_v2(ctx));
	WANT(used(), before);
	WANT(cuArrayGetDescriptor_v2(&back, a), CUDA_ERROR_INVALID_HANDLE);
	WANT(cuModuleGetGlobal_v2(&p, &bytes, module, "x"), CUDA_ERROR_INVALID_HANDLE);
}

/* With the last context on a device goes what pools and graphs keep of it. */
static void last_context(void)
{
	CUDA_MEM_ALLOC_NODE_PARAMS params = node_of(6 * MIB);
	CUgraphExec exec;
	CUgraphNode node;
	CUgraph graph;
	CUcontext ctx;
	CUdeviceptr p;

	OK(cuCtxCreate_v2(&ctx, 0, 1));
	OK(cuMemAllocAsync(&p, MIB, NULL));
	OK(cuGraphCreate(&graph, 0));
	params.poolProps.location.id = 1;
	OK(cuGraphAddMemAllocNode(&node, graph, NULL, 0, &params));
	OK(cuGraphInstantiateWithFlags(&exec, graph, 0));
	OK(cuGraphLaunch(exec, NULL));
	OK(cuGraphExecDestroy(exec));
	OK(cuGraphDestroy(graph));
	WANT(used(), CONTEXT + step + 6 * MIB);
	OK(cuCtxDestroy_v2(ctx));
	OK(cuCtxCreate_v2(&ctx, 0, 1));
	WANT(used(), CONTEXT);
	OK(cuCtxDestroy_v2(ctx));
}

/* ---- managed memory --------------------------------------------------------------------------- */

static void managed(void)
{
	CUmemLocation device = {.type = CU_MEM_LOCATION_TYPE_DEVICE}, host = {.type = CU_MEM_LOCATION_TYPE_HOST};
	CUmemLocation places[2] = {{.type = CU_MEM_LOCATION_TYPE_HOST}, {.type = CU_MEM_LOCATION_TYPE_DEVICE}};
	CUmem_range_attribute ids[2] = {CU_MEM_RANGE_ATTRIBUTE_READ_MOSTLY, CU_MEM_RANGE_ATTRIBUTE_PREFERRED_LOCATION};
	size_t before = used(), sizes[2] = {4 * MIB, 4 * MIB}, index[2] = {0, 1}, lengths[2] = {4, 4};
	CUdeviceptr p, q, both[2];
	int where = 9, ints[4], first, second;
	void *out[2] = {&first, &second};

	OK(cuMemAllocManaged(&p, 4 * MIB, 1));
	OK(cuMemRangeGetAttribute(&where, 4, CU_MEM_RANGE_ATTRIBUTE_PREFERRED_LOCATION, p, 4 * MIB));
	WANT(where, -2);
	OK(cuMemAdvise(p, 4 * MIB, CU_MEM_ADVISE_SET_PREFERRED_LOCATION, -1));
	WANT(used(), before); /* not on the device */
	OK(cuMemRangeGetAttribute(&where, 4, CU_MEM_RANGE_ATTRIBUTE_PREFERRED_LOCATION, p, 4 * MIB));
	WANT(where, -1);
	OK(cuMemsetD8_v2(p, 1, 4 * MIB));
	WANT(used(), before); /* is worked on from afar */
	OK(cuMemAdvise_v2(p, 4 * MIB, CU_MEM_ADVISE_SET_PREFERRED_LOCATION, device));
	OK(cuMemsetD8_v2(p, 1, 4 * MIB));
	WANT(used() - before, 4 * MIB);
	OK(cuMemPrefetchAsync_v2(p, 4 * MIB, host, 0, NULL));
	WANT(used(), before);
	OK(cuMemRangeGetAttribute(&where, 4, CU_MEM_RANGE_ATTRIBUTE_LAST_PREFETCH_LOCATION, p, 1));
	WANT(where, -1);
	OK(cuMemPrefetchAsync_ptsz(p, 4 * MIB, 0, NULL));
	WANT(used() - before, 4 * MIB);
	OK(cuMemAdvise(p, 4 * MIB, CU_MEM_ADVISE_SET_ACCESSED_BY, 1));
	OK(cuMemRangeGetAttribute(ints, sizeof(ints), CU_MEM_RANGE_ATTRIBUTE_ACCESSED_BY, p, 1));
	WANT(ints[0] == 1 && ints[1] == -2 && ints[3] == -2, 1);
	OK(cuMemAdvise(p, 4 * MIB, CU_MEM_ADVISE_SET_READ_MOSTLY, 0));
	OK(cuMemRangeGetAttributes(out, lengths, ids, 2, p, 4 * MIB));
	WANT(first == 1 && second == 0, 1);
	WANT(cuMemAdvise(p, 5 * MIB, CU_MEM_ADVISE_SET_READ_MOSTLY, 0), CUDA_ERROR_INVALID_VALUE);
	WANT(cuMemAdvise(p, 4 * MIB, CU_MEM_ADVISE_SET_ACCESSED_BY, 7), CUDA_ERROR_INVALID_DEVICE);

	OK(cuMemAllocManaged(&q, 4 * MIB, 1));
	both[0] = p;
	both[1] = q;
	OK(cuMemPrefetchBatchAsync(both, sizes, 2, places, index, 2, 0, NULL)); /* p to the host, q to the device */
	WANT(used() - before, 4 * MIB);
	OK(cuMemDiscardBatchAsync(both, sizes, 2, 0, NULL));
	WANT(used(), before);
	OK(cuMemDiscardAndPrefetchBatchAsync_ptsz(both, sizes, 2, &device, index, 1, 0, NULL));
	WANT(used() - before, 8 * MIB);
	WANT(cuMemPrefetchBatchAsync(both, sizes, 2, places, index, 0, 0, NULL), CUDA_ERROR_INVALID_VALUE);
	OK(cuMemFree_v2(p));
	OK(cuMemFree_v2(q));
	WANT(used(), before);
}

/* ---- graphics ------------------------------------------------------------------------------------- */

CUresult cuGraphicsMapResources(unsigned int, CUgraphicsResource *, CUstream);
CUresult cuGraphicsUnmapResources(unsigned int, CUgraphicsResource *, CUstream);
CUresult cuGraphicsUnmapResources_ptsz(unsigned int, CUgraphicsResource *, CUstream);
CUresult cuGraphicsResourceGetMappedPointer(CUdeviceptr_v1 *, unsigned int *, CUgraphicsResource);
CUresult cuGraphicsResourceGetMappedPointer_v2(CUdeviceptr *, size_t *, CUgraphicsResource);
CUresult cuGraphicsResourceGetMappedMipmappedArray(CUmipmappedArray *, CUgraphicsResource);
CUresult cuGraphicsSubResourceGetMappedArray(CUarray *, CUgraphicsResource, unsigned int, unsigned int);
CUresult cuGraphicsResourceSetMapFlags(CUgraphicsResource, unsigned int);
CUresult cuGraphicsResourceSetMapFlags_v2(CUgraphicsResource, unsigned int);
CUresult cuGraphicsUnregisterResource(CUgraphicsResource);
/* Of the headers for OpenGL, VDPAU and EGL. */
CUresult cuGLCtxCreate(CUcontext *, unsigned int, CUdevice);
CUresult cuGLCtxCreate_v2(CUcontext *, unsigned int, CUdevice);
CUresult cuVDPAUCtxCreate(CUcontext *, unsigned int, CUdevice, uint32_t, void *);
CUresult cuVDPAUCtxCreate_v2(CUcontext *, unsigned int, CUdevice, uint32_t, void *);
CUresult cuGraphicsGLRegisterBuffer(CUgraphicsResource *, unsigned int, unsigned int);
CUresult cuGraphicsGLRegisterImage(CUgraphicsResource *, unsigned int, unsigned int, unsigned int);
CUresult cuGLRegisterBufferObject(unsigned int);
CUresult cuGLMapBufferObject(CUdeviceptr_v1 *, unsigned int *, unsigned int);
CUresult cuGLMapBufferObjectAsync_v2(CUdeviceptr *, size_t *, unsigned int, CUstream);
CUresult cuGLUnmapBufferObject(unsigned int);
CUresult cuGLUnregisterBufferObject(unsigned int);

/* What the graphics interface made is its own; a context for it is a context. */
static void graphics(void)
{
	CUgraphicsResource buffer = NULL, image, both[2];
	size_t before = used(), size = 0, context;
	CUmipmappedArray mipmap;
	unsigned int small = 0;
	CUdeviceptr_v1 low = 0;
	CUdeviceptr p = 0;
	CUcontext ctx;
	CUarray array;
	int way;

	OK(cuCtxCreate_v2(&ctx, 0, 0));
	context = used() - before;
	OK(cuCtxDestroy_v2(ctx));
	for (way = 0; way < 4; way++) {
		OK(way == 0 ? cuGLCtxCreate(&ctx, 0, 0) : way == 1 ? cuGLCtxCreate_v2(&ctx, 0, 0) :
		   way == 2 ? cuVDPAUCtxCreate(&ctx, 0, 0, 1, NULL) : cuVDPAUCtxCreate_v2(&ctx, 0, 0, 1, NULL));
		WANT(used() - before, context);
		OK(cuCtxDestroy_v2(ctx));
		WANT(used(), before);
	}
	WANT(cuGraphicsGLRegisterBuffer(&buffer, 0, 0), CUDA_ERROR_INVALID_HANDLE);
	WANT(cuGraphicsGLRegisterBuffer(NULL, 1, 0), CUDA_ERROR_INVALID_VALUE);
	OK(cuGraphicsGLRegisterBuffer(&buffer, 1, 0));
	OK(cuGraphicsGLRegisterImage(&image, 1, 0x0DE1, 0));
	WANT(cuGraphicsResourceGetMappedPointer_v2(&p, &size, buffer), CUDA_ERROR_NOT_MAPPED);
	WANT(cuGraphicsUnmapResources(1, &buffer, NULL), CUDA_ERROR_NOT_MAPPED);
	both[0] = buffer, both[1] = image;
	OK(cuGraphicsResourceSetMapFlags_v2(buffer, 1));
	OK(cuGraphicsMapResources(2, both, NULL));
	WANT(cuGraphicsMapResources(1, &image, NULL), CUDA_ERROR_ALREADY_MAPPED);
	WANT(cuGraphicsResourceSetMapFlags(buffer, 1), CUDA_ERROR_ALREADY_MAPPED);
	OK(cuGraphicsResourceGetMappedPointer_v2(&p, &size, buffer));
	OK(cuGraphicsResourceGetMappedPointer(&low, &small, buffer));
	WANT(p == low && size == small && size > 0, 1);
	WANT(cuGraphicsResourceGetMappedPointer_v2(&p, &size, image), CUDA_ERROR_NOT_MAPPED_AS_POINTER);
	WANT(cuGraphicsSubResourceGetMappedArray(&array, buffer, 0, 0), CUDA_ERROR_NOT_MAPPED_AS_ARRAY);
	OK(cuGraphicsSubResourceGetMappedArray(&array, image, 0, 0));
	OK(cuGraphicsResourceGetMappedMipmappedArray(&mipmap, image));
	WANT(used(), before); /* none of it is CUDA's */
	OK(cuGraphicsUnmapResources_ptsz(2, both, NULL));
	OK(cuGraphicsUnregisterResource(buffer));
	OK(cuGraphicsUnregisterResource(image));
	WANT(cuGraphicsUnregisterResource(image), CUDA_ERROR_INVALID_HANDLE);

	OK(cuGLRegisterBufferObject(7));
	WANT(cuGLRegisterBufferObject(7), CUDA_ERROR_INVALID_HANDLE);
	OK(cuGLMapBufferObject(&low, &small, 7));
	WANT(cuGLMapBufferObjectAsync_v2(&p, &size, 7, NULL), CUDA_ERROR_ALREADY_MAPPED);
	OK(cuGLUnmapBufferObject(7));
	OK(cuGLMapBufferObjectAsync_v2(&p, &size, 7, NULL));
	WANT(p == low && size == small, 1);
	OK(cuGLUnregisterBufferObject(7));
	WANT(cuGLUnmapBufferObject(7), CUDA_ERROR_INVALID_HANDLE);
	WANT(used(), before);
}

/* Looked up by every program, called by few. */
static void unsupported(void)
{
	CUresult (*sync)(void *, CUevent *, unsigned int) = NULL;
	CUdriverProcAddressQueryResult status = 9;
	CUevent event = (CUevent)8;

	OK(cuGetProcAddress_v2("cuEventCreateFromEGLSync", (void **)&sync, 12000, 0, &status));
	WANT(sync(NULL, &event, 0), CUDA_ERROR_NOT_SUPPORTED);
	WANT(event == (CUevent)8, 1);
}

int main(int argc, char **argv)
{
	static const struct {
		const char *name;
		void (*run)(void);
	} roles[] = {{"ipc", role_ipc}, {"dies", role_dies}, {"vmm", role_vmm}, {"pool", role_pool}};
	const char *text = getenv("TEST_POOL_STEP");
	size_t i;

	if (text)
		step = strtoul(text, NULL, 10);
	for (i = 0; argc == 2 && i < sizeof(roles) / sizeof(roles[0]); i++) {
		if (strcmp(argv[1], roles[i].name) == 0) {
			roles[i].run();
			return failures != 0;
		}
	}
	initialise();
	ipc();
	dead_exporter();
	vmm_sharing();
	external_memory();
	pool_sharing();
	kinds_of_pools();
	multicast();
	endpoints();
	arrays();
	sparse_arrays();
	graphs();
	capture();
	context_sizes();
	green_contexts();
	modules();
	context_takes_all();
	last_context();
	managed();
	graphics();
	unsupported();
	if (failures > 0)
		fprintf(stderr, "%d failed\n", failures);
	return failures != 0;
}
