/* SPDX-License-Identifier: Apache-2.0 */
/*
 * runtime_test: what each call of the CUDA runtime asks of the driver, and that it is held to the limit.
 *
 * Needs a GPU that nobody else uses, and SIMGPU_RUNTIME_TRACE, a file that the runtime writes its calls of the driver
 * to. TEST_LIMIT is the memory limit that holds, in bytes, or unset. With TEST_CASE=insufficient the driver is missing
 * or too old. Prints what failed and exits 1.
 */
#define _GNU_SOURCE
#include "../libcudart/cudart_abi.h"
#include "check.h"

#include <fcntl.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

cudaError_t cudaGetDeviceCount(int *);
cudaError_t cudaRuntimeGetVersion(int *);
cudaError_t cudaDriverGetVersion(int *);
cudaError_t cudaSetDevice(int);
cudaError_t cudaGetDevice(int *);
cudaError_t cudaDeviceReset(void);
cudaError_t cudaDeviceSynchronize(void);
cudaError_t cudaDeviceGetAttribute(int *, enum cudaDeviceAttr, int);
cudaError_t cudaDeviceGetPCIBusId(char *, int, int);
cudaError_t cudaDeviceGetByPCIBusId(int *, const char *);
cudaError_t cudaDeviceCanAccessPeer(int *, int, int);
cudaError_t cudaGetLastError(void);
cudaError_t cudaPeekAtLastError(void);
const char *cudaGetErrorString(cudaError_t);
const char *cudaGetErrorName(cudaError_t);
cudaError_t cudaGetDriverEntryPointByVersion(const char *, void **, unsigned int, unsigned long long, enum cudaDriverEntryPointQueryResult *);
cudaError_t cudaMalloc(void **, size_t);
cudaError_t cudaMallocPitch(void **, size_t *, size_t, size_t);
cudaError_t cudaMallocManaged(void **, size_t, unsigned int);
cudaError_t cudaMallocAsync(void **, size_t, cudaStream_t);
cudaError_t cudaMallocAsync_ptsz(void **, size_t, cudaStream_t);
cudaError_t cudaFree(void *);
cudaError_t cudaFreeAsync(void *, cudaStream_t);
cudaError_t cudaFreeAsync_ptsz(void *, cudaStream_t);
cudaError_t cudaMemGetInfo(size_t *, size_t *);
cudaError_t cudaMallocHost(void **, size_t);
cudaError_t cudaHostAlloc(void **, size_t, unsigned int);
cudaError_t cudaFreeHost(void *);
cudaError_t cudaHostRegister(void *, size_t, unsigned int);
cudaError_t cudaHostUnregister(void *);
cudaError_t cudaHostGetDevicePointer(void **, void *, unsigned int);
cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *, const void *);
cudaError_t cudaMemcpy(void *, const void *, size_t, enum cudaMemcpyKind);
cudaError_t cudaMemcpy_ptds(void *, const void *, size_t, enum cudaMemcpyKind);
cudaError_t cudaMemcpyAsync(void *, const void *, size_t, enum cudaMemcpyKind, cudaStream_t);
cudaError_t cudaMemcpyAsync_ptsz(void *, const void *, size_t, enum cudaMemcpyKind, cudaStream_t);
cudaError_t cudaMemcpy2DAsync(void *, size_t, const void *, size_t, size_t, size_t, enum cudaMemcpyKind, cudaStream_t);
cudaError_t cudaMemcpyPeerAsync(void *, int, const void *, int, size_t, cudaStream_t);
cudaError_t cudaMemset(void *, int, size_t);
cudaError_t cudaMemset_ptds(void *, int, size_t);
cudaError_t cudaMemsetAsync(void *, int, size_t, cudaStream_t);
cudaError_t cudaMemsetAsync_ptsz(void *, int, size_t, cudaStream_t);
cudaError_t cudaStreamCreateWithFlags(cudaStream_t *, unsigned int);
cudaError_t cudaStreamDestroy(cudaStream_t);
cudaError_t cudaStreamSynchronize(cudaStream_t);
cudaError_t cudaStreamSynchronize_ptsz(cudaStream_t);
cudaError_t cudaStreamQuery(cudaStream_t);
cudaError_t cudaStreamQuery_ptsz(cudaStream_t);
cudaError_t cudaStreamWaitEvent(cudaStream_t, cudaEvent_t, unsigned int);
cudaError_t cudaStreamBeginCapture(cudaStream_t, enum cudaStreamCaptureMode);
cudaError_t cudaStreamEndCapture(cudaStream_t, cudaGraph_t *);
cudaError_t cudaStreamIsCapturing(cudaStream_t, enum cudaStreamCaptureStatus *);
cudaError_t cudaEventCreateWithFlags(cudaEvent_t *, unsigned int);
cudaError_t cudaEventDestroy(cudaEvent_t);
cudaError_t cudaEventRecord(cudaEvent_t, cudaStream_t);
cudaError_t cudaEventSynchronize(cudaEvent_t);
cudaError_t cudaEventElapsedTime(float *, cudaEvent_t, cudaEvent_t);
cudaError_t cudaGraphInstantiate(cudaGraphExec_t *, cudaGraph_t, unsigned long long);
cudaError_t cudaGraphExecUpdate(cudaGraphExec_t, cudaGraph_t, cudaGraphExecUpdateResultInfo *);
cudaError_t cudaGraphLaunch(cudaGraphExec_t, cudaStream_t);
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t);
cudaError_t cudaGraphDestroy(cudaGraph_t);
cudaError_t cudaLaunchKernel(const void *, dim3, dim3, void **, size_t, cudaStream_t);
cudaError_t cudaLaunchKernel_ptsz(const void *, dim3, dim3, void **, size_t, cudaStream_t);
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *, const void *, void **);
cudaError_t cudaLaunchCooperativeKernel(const void *, dim3, dim3, void **, size_t, cudaStream_t);
cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *, const void *);
cudaError_t cudaFuncSetAttribute(const void *, enum cudaFuncAttribute, int);
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *, const void *, int, size_t, unsigned int);
void **__cudaRegisterFatBinary(void *);
void __cudaRegisterFatBinaryEnd(void **);
void __cudaUnregisterFatBinary(void **);
void __cudaRegisterFunction(void **, const char *, char *, const char *, int, uint3 *, uint3 *, dim3 *, dim3 *, int *);
unsigned int __cudaPushCallConfiguration(dim3, dim3, size_t, struct CUstream_st *);
cudaError_t __cudaPopCallConfiguration(dim3 *, dim3 *, size_t *, void *);
#if CUDART_MAJOR >= 13
cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *, int);
cudaError_t __cudaGetKernel(cudaKernel_t *, const void *);
cudaError_t __cudaLaunchKernel(cudaKernel_t, dim3, dim3, void **, size_t, cudaStream_t);
#define PROPERTIES cudaGetDeviceProperties
#else
cudaError_t cudaGetDeviceProperties_v2(struct cudaDeviceProp *, int);
#define PROPERTIES cudaGetDeviceProperties_v2
#endif

static int trace_fd;
static size_t limit; /* 0: none */

/* The calls of the driver since it was last asked, but for which context is current. */
static const char *called(void)
{
	static char text[65536], all[65536];
	ssize_t n = read(trace_fd, text, sizeof(text) - 1);
	char *line, *rest = text;

	text[n > 0 ? n : 0] = 0;
	all[0] = 0;
	while ((line = strsep(&rest, "\n"))) {
		if (*line == 0 || strcmp(line, "cuCtxGetCurrent") == 0)
			continue;
		if (all[0])
			strcat(all, " ");
		strcat(all, line);
	}
	return all;
}

static void want_calls(const char *file, int line, const char *expr, const char *want)
{
	const char *got = called();

	if (strcmp(got, want) != 0) {
		fprintf(stderr, "%s:%d: %s calls [%s], want [%s]\n", file, line, expr, got, want);
		failures++;
	}
}

/* A call, its result, and the driver's functions that it becomes. */
#define BECOMES(expr, want, calls)                              \
	do {                                                    \
		WANT(expr, want);                               \
		want_calls(__FILE__, __LINE__, #expr, calls);   \
	} while (0)

/* A call that asks for more than the limit: refused there, granted where there is none. */
#define BEYOND(expr, calls) BECOMES(expr, limit ? cudaErrorMemoryAllocation : cudaSuccess, calls)

#define FUNC16 "cuFuncGetAttribute cuFuncGetAttribute cuFuncGetAttribute cuFuncGetAttribute"
#define LOAD "cuLibraryLoadData cuCtxPushCurrent cuLibraryGetModule cuCtxPopCurrent cuModuleGetFunction"

static const dim3 one = {1, 1, 1};
static const char kernel = 'k', nap = 'n', unknown = 'u';
static struct {
	int magic, version;
	const void *data;
	void *file;
} wrapper = {0x466243b1, 1, "", NULL};

static void start(void)
{
	struct cudaDeviceProp p;
	int n = 0, version;
	char id[32];

	OK(cudaGetDeviceCount(&n));
	WANT(n >= 1, 1);
	WANT(strncmp(called(), "cuDriverGetVersion cuInit cuDeviceGetCount cuDeviceGet cuDeviceGetName cuDeviceTotalMem cuDeviceGetAttribute ", 104), 0);
	BECOMES(PROPERTIES(&p, 0), 0, ""); /* as they were at the start */
	WANT(strncmp(p.name, "NVIDIA ", 7), 0);
	WANT(p.warpSize, 32);
	WANT(p.maxThreadsDim[2], 64);
	WANT(p.unifiedAddressing, 1);
	WANT(p.memoryPoolsSupported, 1);
	if (limit)
		WANT(p.totalGlobalMem, limit);
	WANT(PROPERTIES(&p, n), cudaErrorInvalidDevice);
	OK(cudaRuntimeGetVersion(&version));
	WANT(version / 1000, CUDART_MAJOR);
	OK(cudaDriverGetVersion(&version));
	WANT(version / 1000 >= CUDART_MAJOR, 1);
	BECOMES(cudaDeviceGetAttribute(&version, (enum cudaDeviceAttr)10, 0), 0, "cuDeviceGetAttribute");
	WANT(version, 32);
	OK(cudaDeviceGetPCIBusId(id, sizeof(id), 0));
	OK(cudaDeviceGetByPCIBusId(&n, id));
	WANT(n, 0);
	called();
	WANT(cudaSetDevice(99), cudaErrorInvalidDevice);
	WANT(cudaPeekAtLastError(), cudaErrorInvalidDevice);
	WANT(cudaGetLastError(), cudaErrorInvalidDevice);
	WANT(cudaGetLastError(), cudaSuccess);
	BECOMES(cudaSetDevice(0), 0, "cuDevicePrimaryCtxRetain cuCtxSetCurrent");
	BECOMES(cudaGetDevice(&n), 0, "cuCtxGetDevice");
	BECOMES(cudaFree(NULL), 0, "cuMemFree");
}

static void *in_thread(void *arg)
{
	(void)arg;
	/* A thread without a context gets the primary one, once retained. */
	BECOMES(cudaFree(NULL), 0, "cuCtxSetCurrent cuMemFree");
	return NULL;
}

static void memory(void)
{
	size_t free_bytes, total, pitch, before, too_much = limit ? 2 * limit : 2048 * MIB;
	struct cudaPointerAttributes a;
	char host[64] = "contents", back[64] = "";
	void *p = NULL, *q;

	BECOMES(cudaMemGetInfo(&before, &total), 0, "cuMemGetInfo");
	if (limit)
		WANT(total, limit);
	BECOMES(cudaMalloc(&p, 8 * MIB), 0, "cuMemAlloc");
	OK(cudaMemGetInfo(&free_bytes, &total));
	WANT(before - free_bytes, 8 * MIB);
	called();
	BECOMES(cudaMemcpy(p, host, sizeof(host), cudaMemcpyHostToDevice), 0, "cuMemcpyHtoD");
	BECOMES(cudaMemcpy(back, p, sizeof(back), cudaMemcpyDeviceToHost), 0, "cuMemcpyDtoH");
	WANT(memcmp(host, back, sizeof(host)), 0);
	BECOMES(cudaMemcpy((char *)p + 64, p, 64, cudaMemcpyDeviceToDevice), 0, "cuMemcpyDtoD");
	BECOMES(cudaMemcpy(back, p, 64, cudaMemcpyDefault), 0, "cuMemcpy");
	BECOMES(cudaMemcpyAsync(p, host, 64, cudaMemcpyHostToDevice, NULL), 0, "cuMemcpyHtoDAsync");
	BECOMES(cudaMemcpyAsync(back, p, 64, cudaMemcpyDeviceToHost, NULL), 0, "cuMemcpyDtoHAsync");
	BECOMES(cudaMemcpyAsync(p, p, 64, cudaMemcpyDeviceToDevice, NULL), 0, "cuMemcpyDtoDAsync");
	BECOMES(cudaMemcpyAsync(p, host, 64, cudaMemcpyDefault, NULL), 0, "cuMemcpyAsync");
	BECOMES(cudaMemcpy2DAsync(p, 128, host, 8, 8, 4, cudaMemcpyHostToDevice, NULL), 0, "cuMemcpy2DAsync");
	BECOMES(cudaMemcpy2DAsync(back, 8, p, 128, 8, 4, cudaMemcpyDeviceToHost, NULL), 0, "cuMemcpy2DAsync");
	WANT(memcmp(host, back, 32), 0);
	BECOMES(cudaMemcpyPeerAsync((char *)p + 4096, 0, p, 0, 64, NULL), 0, "cuMemcpyPeerAsync");
	BECOMES(cudaMemset(p, 7, 64), 0, "cuMemsetD8");
	BECOMES(cudaMemsetAsync(p, 7, 64, NULL), 0, "cuMemsetD8Async");
	BECOMES(cudaMemcpy(p, host, 64, (enum cudaMemcpyKind)9), cudaErrorInvalidMemcpyDirection, "");
	WANT(cudaGetLastError(), cudaErrorInvalidMemcpyDirection);
	BECOMES(cudaPointerGetAttributes(&a, p), 0, "cuPointerGetAttributes");
	WANT(a.type, cudaMemoryTypeDevice);
	WANT(a.devicePointer == p, 1);
	BECOMES(cudaPointerGetAttributes(&a, host), 0, "cuPointerGetAttributes"); /* unknown, and no error */
	WANT(a.type, cudaMemoryTypeUnregistered);
	BECOMES(cudaFree(p), 0, "cuMemFree");
	BECOMES(cudaMalloc(&p, 0), 0, "");
	WANT(p == NULL, 1);

	BECOMES(cudaMallocPitch(&p, &pitch, 1000, 1000), 0, "cuMemAllocPitch");
	BECOMES(cudaFree(p), 0, "cuMemFree");
	BECOMES(cudaMallocManaged(&p, 8 * MIB, CU_MEM_ATTACH_GLOBAL), 0, "cuMemAllocManaged");
	BECOMES(cudaPointerGetAttributes(&a, p), 0, "cuPointerGetAttributes");
	WANT(a.type, cudaMemoryTypeManaged);
	BECOMES(cudaFree(p), 0, "cuMemFree");
	BECOMES(cudaMallocAsync(&p, 8 * MIB, NULL), 0, "cuMemAllocAsync");
	BECOMES(cudaFreeAsync(p, NULL), 0, "cuMemFreeAsync");
	BECOMES(cudaMallocHost(&p, 4096), 0, "cuMemHostAlloc");
	BECOMES(cudaHostGetDevicePointer(&q, p, 0), 0, "cuMemHostGetDevicePointer");
	BECOMES(cudaFreeHost(p), 0, "cuMemFreeHost");
	BECOMES(cudaHostAlloc(&p, 4096, 1), 0, "cuMemHostAlloc");
	BECOMES(cudaFreeHost(p), 0, "cuMemFreeHost");
	p = aligned_alloc(4096, 8192);
	BECOMES(cudaHostRegister(p, 8192, 0), 0, "cuMemHostRegister");
	BECOMES(cudaHostUnregister(p), 0, "cuMemHostUnregister");
	free(p);

	/* Beyond the limit the output stays as it was, and the program goes on. */
	p = host;
	BEYOND(cudaMalloc(&p, too_much), "cuMemAlloc");
	WANT(p == host, limit > 0);
	WANT(cudaGetLastError(), limit ? cudaErrorMemoryAllocation : cudaSuccess);
	OK(limit ? 0 : cudaFree(p));
	called();
	BEYOND(cudaMallocPitch(&p, &pitch, 1 * MIB, too_much / MIB), "cuMemAllocPitch");
	OK(limit ? 0 : cudaFree(p));
	called();
	BEYOND(cudaMallocManaged(&p, too_much, CU_MEM_ATTACH_GLOBAL), "cuMemAllocManaged");
	OK(limit ? 0 : cudaFree(p));
	called();
	BEYOND(cudaMallocAsync(&p, too_much, NULL), "cuMemAllocAsync");
	OK(limit ? 0 : cudaFreeAsync(p, NULL));
	called();
	BEYOND(cudaMallocAsync_ptsz(&p, too_much, NULL), "cuMemAllocAsync/2");
	OK(limit ? 0 : cudaFreeAsync_ptsz(p, NULL));
	OK(cudaDeviceSynchronize());
	OK(cudaMalloc(&p, 8 * MIB));
	OK(cudaFree(p));
	OK(cudaMemGetInfo(&free_bytes, &total));
	WANT(free_bytes, before);
	(void)cudaGetLastError(); /* of what was too much */
	called();
}

static void code(void)
{
	cudaLaunchConfig_t config = {.gridDim = one, .blockDim = one};
	struct cudaFuncAttributes a;
	dim3 grid, block;
	size_t shared;
	cudaStream_t stream;
	int blocks;

	BECOMES(cudaLaunchKernel(&kernel, one, one, NULL, 0, NULL), 0, LOAD " cuLaunchKernel");
	BECOMES(cudaLaunchKernel(&kernel, one, one, NULL, 0, NULL), 0, "cuLaunchKernel");
	BECOMES(cudaLaunchKernelExC(&config, &kernel, NULL), 0, "cuLaunchKernelEx");
	BECOMES(cudaLaunchCooperativeKernel(&kernel, one, one, NULL, 0, NULL), 0, "cuLaunchCooperativeKernel");
	BECOMES(cudaFuncGetAttributes(&a, &kernel), 0, FUNC16 " " FUNC16 " " FUNC16 " " FUNC16);
	WANT(a.maxThreadsPerBlock, 1024);
	BECOMES(cudaFuncSetAttribute(&kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, 65536), 0, "cuFuncSetAttribute");
	BECOMES(cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(&blocks, &kernel, 64, 65536, 0), 0,
		"cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags");
	WANT(blocks, 1);
	WANT(cudaLaunchKernel(&unknown, one, one, NULL, 0, NULL), cudaErrorInvalidDeviceFunction);
	WANT(cudaGetLastError(), cudaErrorInvalidDeviceFunction);
	WANT(__cudaPopCallConfiguration(&grid, &block, &shared, &stream), cudaErrorMissingConfiguration);
	WANT(__cudaPushCallConfiguration((dim3){2, 3, 4}, one, 5, CU_STREAM_PER_THREAD), 0);
	OK(__cudaPopCallConfiguration(&grid, &block, &shared, &stream));
	WANT(grid.z == 4 && shared == 5 && stream == CU_STREAM_PER_THREAD, 1);
	called();
#if CUDART_MAJOR >= 13
	cudaKernel_t k;
	BECOMES(__cudaGetKernel(&k, &kernel), 0, "cuLibraryGetKernel");
	BECOMES(__cudaGetKernel(&k, &kernel), 0, "");
	BECOMES(__cudaLaunchKernel(k, one, one, NULL, 0, NULL), 0, "cuLaunchKernel");
	WANT(__cudaGetKernel(&k, &unknown), cudaErrorInvalidDeviceFunction);
#endif
	(void)cudaGetLastError();
}

/* The null stream is one for all threads, or each thread's own, as the program was built. */
static void default_streams(void)
{
	void *p;
	char host[8] = "";

	BECOMES(cudaLaunchKernel(&nap, one, one, NULL, 0, NULL), 0, "cuCtxPushCurrent cuLibraryGetModule cuCtxPopCurrent cuModuleGetFunction cuLaunchKernel");
	BECOMES(cudaStreamQuery(NULL), cudaErrorNotReady, "cuStreamQuery");
	WANT(cudaPeekAtLastError(), cudaSuccess);
	BECOMES(cudaStreamQuery_ptsz(NULL), 0, "cuStreamQuery/2");
	BECOMES(cudaStreamQuery(CU_STREAM_PER_THREAD), 0, "cuStreamQuery");
	BECOMES(cudaStreamSynchronize(NULL), 0, "cuStreamSynchronize");
	BECOMES(cudaLaunchKernel_ptsz(&nap, one, one, NULL, 0, NULL), 0, "cuLaunchKernel/2");
	BECOMES(cudaStreamQuery_ptsz(NULL), cudaErrorNotReady, "cuStreamQuery/2");
	BECOMES(cudaStreamQuery(CU_STREAM_PER_THREAD), cudaErrorNotReady, "cuStreamQuery");
	BECOMES(cudaStreamQuery(NULL), 0, "cuStreamQuery");
	BECOMES(cudaStreamSynchronize_ptsz(NULL), 0, "cuStreamSynchronize/2");
	BECOMES(cudaMallocAsync_ptsz(&p, MIB, NULL), 0, "cuMemAllocAsync/2");
	BECOMES(cudaMemcpyAsync_ptsz(p, host, 8, cudaMemcpyHostToDevice, NULL), 0, "cuMemcpyHtoDAsync/2");
	BECOMES(cudaMemcpy_ptds(host, p, 8, cudaMemcpyDeviceToHost), 0, "cuMemcpyDtoH/2");
	BECOMES(cudaMemset_ptds(p, 0, 8), 0, "cuMemsetD8/2");
	BECOMES(cudaMemsetAsync_ptsz(p, 0, 8, NULL), 0, "cuMemsetD8Async/2");
	BECOMES(cudaFreeAsync_ptsz(p, NULL), 0, "cuMemFreeAsync/2");
	OK(cudaDeviceSynchronize());
	called();
}

static void streams(void)
{
	cudaGraphExecUpdateResultInfo info;
	enum cudaStreamCaptureStatus status;
	cudaStream_t stream;
	cudaEvent_t begin, end;
	cudaGraphExec_t exec;
	cudaGraph_t graph;
	float ms;
	void *p;

	BECOMES(cudaStreamCreateWithFlags(&stream, 1), 0, "cuStreamCreate");
	BECOMES(cudaEventCreateWithFlags(&begin, 0), 0, "cuEventCreate");
	OK(cudaEventCreateWithFlags(&end, 0));
	called();
	BECOMES(cudaEventRecord(begin, stream), 0, "cuEventRecord");
	BECOMES(cudaStreamWaitEvent(NULL, begin, 0), 0, "cuStreamWaitEvent");
	OK(cudaEventRecord(end, stream));
	called();
	BECOMES(cudaEventSynchronize(end), 0, "cuEventSynchronize");
	BECOMES(cudaEventElapsedTime(&ms, begin, end), 0, "cuEventElapsedTime");
	BECOMES(cudaDeviceSynchronize(), 0, "cuCtxSynchronize");

	BECOMES(cudaStreamBeginCapture(stream, cudaStreamCaptureModeRelaxed), 0, "cuStreamBeginCapture");
	BECOMES(cudaStreamIsCapturing(stream, &status), 0, "cuStreamIsCapturing");
	WANT(status, cudaStreamCaptureStatusActive);
	OK(cudaLaunchKernel(&kernel, one, one, NULL, 0, stream));
	OK(cudaMallocAsync(&p, 8 * MIB, stream)); /* a node of the graph */
	OK(cudaFreeAsync(p, stream));
	called();
	BECOMES(cudaStreamEndCapture(stream, &graph), 0, "cuStreamEndCapture");
	BECOMES(cudaGraphInstantiate(&exec, graph, 0), 0, "cuGraphInstantiateWithFlags");
	BECOMES(cudaGraphLaunch(exec, stream), 0, "cuGraphLaunch");
	BECOMES(cudaStreamSynchronize(stream), 0, "cuStreamSynchronize");
	/* Graphs that allocate cannot be updated. */
	WANT(cudaGraphExecUpdate(exec, graph, &info) != cudaSuccess, 1);
	OK(cudaGraphExecDestroy(exec));
	OK(cudaGraphDestroy(graph));
	(void)cudaGetLastError();

	/* One that would need more than the limit is refused when it is launched. */
	OK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeRelaxed));
	OK(cudaMallocAsync(&p, limit ? 2 * limit : 2048 * MIB, stream));
	OK(cudaFreeAsync(p, stream));
	OK(cudaStreamEndCapture(stream, &graph));
	OK(cudaGraphInstantiate(&exec, graph, 0));
	called();
	BEYOND(cudaGraphLaunch(exec, stream), "cuGraphLaunch");
	OK(cudaGraphExecDestroy(exec));
	OK(cudaGraphDestroy(graph));
	(void)cudaGetLastError();
	OK(cudaEventDestroy(begin));
	OK(cudaEventDestroy(end));
	OK(cudaStreamDestroy(stream));
	called();
}

static void entry_points(void)
{
	enum cudaDriverEntryPointQueryResult result;
	void *p = NULL;

	OK(cudaGetDriverEntryPointByVersion("cuMemAlloc", &p, 12000, 0, &result));
	WANT(p != NULL && result == cudaDriverEntryPointSuccess, 1);
	WANT(cudaGetDriverEntryPointByVersion("cuNothing", &p, 12000, 0, &result), cudaErrorSymbolNotFound);
	WANT(result, cudaDriverEntryPointSymbolNotFound);
	(void)cudaGetLastError();
	WANT(strcmp(cudaGetErrorString(cudaErrorMemoryAllocation), "out of memory"), 0);
	WANT(strcmp(cudaGetErrorName(cudaErrorMemoryAllocation), "cudaErrorMemoryAllocation"), 0);
	WANT(strcmp(cudaGetErrorString((cudaError_t)12345), "unrecognized error code"), 0);
}

/* Every call says what is missing. */
static void insufficient(void)
{
	int n = -1;
	void *p;

	WANT(cudaGetDeviceCount(&n), cudaErrorInsufficientDriver);
	WANT(n, 0);
	WANT(cudaMalloc(&p, 1), cudaErrorInsufficientDriver);
	WANT(cudaSetDevice(0), cudaErrorInsufficientDriver);
	WANT(cudaLaunchKernel(&kernel, one, one, NULL, 0, NULL), cudaErrorInsufficientDriver);
	WANT(cudaGetLastError(), cudaErrorInsufficientDriver);
	OK(cudaDriverGetVersion(&n));
	WANT(n / 1000 < CUDART_MAJOR, 1);
	WANT(strcmp(cudaGetErrorString(cudaErrorInsufficientDriver), "CUDA driver version is insufficient for CUDA runtime version"), 0);
}

int main(void)
{
	const char *path = getenv("SIMGPU_RUNTIME_TRACE"), *text = getenv("TEST_LIMIT");
	void **image = __cudaRegisterFatBinary(&wrapper);
	pthread_t thread;
	void *p;

	limit = text ? strtoull(text, NULL, 10) : 0;
	trace_fd = path ? open(path, O_RDONLY | O_CREAT, 0600) : -1;
	if (trace_fd < 0) {
		fprintf(stderr, "open the trace: SIMGPU_RUNTIME_TRACE\n");
		return 1;
	}
	__cudaRegisterFunction(image, &kernel, NULL, "kernel", -1, NULL, NULL, NULL, NULL, NULL);
	__cudaRegisterFunction(image, &nap, NULL, "sleep_200ms", -1, NULL, NULL, NULL, NULL, NULL);
	__cudaRegisterFatBinaryEnd(image);
	if (getenv("TEST_CASE")) {
		insufficient();
		return failures != 0;
	}
	start();
	WANT(pthread_create(&thread, NULL, in_thread, NULL), 0);
	WANT(pthread_join(thread, NULL), 0);
	memory();
	code();
	default_streams();
	streams();
	entry_points();
	/* What follows a reset takes a new context, and loads its code again. */
	called();
	BECOMES(cudaDeviceReset(), 0, "cuCtxGetDevice cuDevicePrimaryCtxReset cuCtxSetCurrent");
	BECOMES(cudaMalloc(&p, MIB), 0, "cuDevicePrimaryCtxRetain cuCtxSetCurrent cuMemAlloc");
	BECOMES(cudaLaunchKernel(&kernel, one, one, NULL, 0, NULL), 0,
		"cuCtxPushCurrent cuLibraryGetModule cuCtxPopCurrent cuModuleGetFunction cuLaunchKernel");
	BECOMES(cudaFree(p), 0, "cuMemFree");
	__cudaUnregisterFatBinary(image);
	want_calls(__FILE__, __LINE__, "__cudaUnregisterFatBinary", "cuLibraryUnload");
	if (failures > 0)
		fprintf(stderr, "%d failed\n", failures);
	return failures != 0;
}
