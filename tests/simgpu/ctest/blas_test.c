/* SPDX-License-Identifier: Apache-2.0 */
/*
 * blas_test: cuBLAS and NCCL for the simulated GPU, with the runtime. Needs a GPU that nobody else uses. Prints what failed and
 * exits 1.
 */
#define _GNU_SOURCE
#include "../libcudart/cudart_abi.h"
#include "check.h"

#include <string.h>

typedef struct cublasContext *blas;
typedef struct ncclComm *comm;

cudaError_t cudaMalloc(void **, size_t);
cudaError_t cudaFree(void *);
cudaError_t cudaMemGetInfo(size_t *, size_t *);
cudaError_t cudaStreamCreateWithFlags(cudaStream_t *, unsigned int);
cudaError_t cudaStreamDestroy(cudaStream_t);
cudaError_t cudaStreamBeginCapture(cudaStream_t, enum cudaStreamCaptureMode);
cudaError_t cudaStreamEndCapture(cudaStream_t, cudaGraph_t *);
cudaError_t cudaGraphDestroy(cudaGraph_t);
int cublasCreate_v2(blas *);
int cublasDestroy_v2(blas);
int cublasSetStream_v2(blas, cudaStream_t);
int cublasSetWorkspace_v2(blas, void *, size_t);
int cublasSetMathMode(blas, int);
const char *cublasGetStatusString(int);
int cublasSgemm_v2(blas, int, int, int, int, int, const float *, const float *, int, const float *, int, const float *, float *, int);
int cublasStrsmBatched(blas, int, int, int, int, int, int, const float *, const float *const *, int, float *const *, int, int);
int ncclCommInitAll(comm *, int, const int *);
int ncclCommDestroy(comm);
int ncclAllReduce(const void *, void *, size_t, int, int, comm, void *);
int ncclGroupStart(void);
int ncclGroupEnd(void);
const char *ncclGetErrorString(int);

enum { SUCCESS, NOT_INITIALIZED, ALLOC_FAILED = 3, INVALID_VALUE = 7 };

static size_t free_memory(void)
{
	size_t free_bytes = 0, total;

	OK(cudaMemGetInfo(&free_bytes, &total));
	return free_bytes;
}

static int multiply(blas h, int m)
{
	return cublasSgemm_v2(h, 0, 0, m, 1, 1, NULL, NULL, 1, NULL, 1, NULL, NULL, 1);
}

static void products(void)
{
	size_t before = free_memory();
	cudaStream_t stream;
	cudaGraph_t graph;
	blas h = NULL;
	void *rest;

	WANT(cublasCreate_v2(NULL), INVALID_VALUE);
	OK(cublasCreate_v2(&h));
	WANT(before - free_memory(), 4 * MIB);
	OK(cublasSetMathMode(h, 0));
	OK(multiply(h, 4));
	OK(multiply(h, 0));
	WANT(multiply(h, -1), INVALID_VALUE);
	WANT(multiply(NULL, 4), NOT_INITIALIZED);
	WANT(cublasStrsmBatched(h, 0, 0, 0, 0, 4, 4, NULL, NULL, 4, NULL, 4, -1), INVALID_VALUE);
	OK(cublasStrsmBatched(h, 0, 0, 0, 0, 4, 4, NULL, NULL, 4, NULL, 4, 2));

	/* It is captured as any launch. */
	OK(cudaStreamCreateWithFlags(&stream, 1));
	OK(cublasSetStream_v2(h, stream));
	OK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
	OK(multiply(h, 4));
	OK(cudaStreamEndCapture(stream, &graph));
	OK(cudaGraphDestroy(graph));
	OK(cudaStreamDestroy(stream));
	WANT(multiply(h, 4), 13); /* its stream has gone */
	OK(cublasSetStream_v2(h, NULL));

	WANT(cublasSetWorkspace_v2(h, NULL, 1), INVALID_VALUE);
	OK(cublasSetWorkspace_v2(h, &before, sizeof(before)));
	WANT(free_memory(), before);
	OK(cublasDestroy_v2(h));
	OK(cudaMalloc(&rest, before - 2 * MIB));
	WANT(cublasCreate_v2(&h), ALLOC_FAILED);
	OK(cudaFree(rest));
	WANT(free_memory(), before);
	for (int i = -1; i < 16; i++)
		WANT(cublasGetStatusString(i)[0] != 0, 1);
	WANT(strcmp(cublasGetStatusString(ALLOC_FAILED), "the resource allocation failed"), 0);
	WANT(cublasDestroy_v2(NULL), NOT_INITIALIZED);
	WANT(cublasSetStream_v2(NULL, NULL), NOT_INITIALIZED);
	WANT(cublasSetWorkspace_v2(NULL, NULL, 0), NOT_INITIALIZED);
	WANT(cublasSetMathMode(NULL, 0), NOT_INITIALIZED);
}

static void communicators(void)
{
	comm c[2] = {(comm)c, (comm)c};

	WANT(ncclCommInitAll(c, 2, NULL), 2);
	WANT(c[0] == NULL && c[1] == NULL, 1);
	OK(ncclGroupStart());
	WANT(ncclAllReduce(NULL, NULL, 0, 0, 0, c[0], NULL), 5);
	OK(ncclGroupEnd());
	OK(ncclCommDestroy(NULL));
	WANT(ncclCommDestroy((comm)c), 5);
	WANT(strcmp(ncclGetErrorString(2), "unhandled system error"), 0);
	WANT(ncclGetErrorString(0)[0] && ncclGetErrorString(5)[0] && ncclGetErrorString(99)[0], 1);
}

int main(void)
{
	products();
	communicators();
	if (failures > 0)
		fprintf(stderr, "%d failed\n", failures);
	return failures != 0;
}
