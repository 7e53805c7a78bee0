/* SPDX-License-Identifier: Apache-2.0 */
/*
 * cublas.c: as much of libcublas.so as programs need that multiply matrices where kernels do nothing.
 *
 * Every operation is the launch of one kernel of an image of its own, in the handle's stream, so that it is captured
 * and takes its time as any other. A handle holds a workspace on the device, as NVIDIA's does, until the program
 * sets one of its own; that it is 4 MiB is NVIDIA's documented size for all architectures before Hopper.
 */
#include "../libcudart/cudart_abi.h"

#include <stdlib.h>

#define EXPORT __attribute__((visibility("default")))
#define WORKSPACE ((size_t)4 << 20)

typedef enum {
	CUBLAS_STATUS_SUCCESS = 0,
	CUBLAS_STATUS_NOT_INITIALIZED = 1,
	CUBLAS_STATUS_ALLOC_FAILED = 3,
	CUBLAS_STATUS_INVALID_VALUE = 7,
	CUBLAS_STATUS_EXECUTION_FAILED = 13,
	CUBLAS_STATUS_INTERNAL_ERROR = 14,
} cublasStatus_t;

typedef struct cublasContext {
	cudaStream_t stream;
	void *workspace; /* our own, or NULL */
} *cublasHandle_t;

/* The runtime's. */
cudaError_t cudaMalloc(void **, size_t);
cudaError_t cudaFree(void *);
cudaError_t cudaLaunchKernel(const void *, dim3, dim3, void **, size_t, cudaStream_t);
void **__cudaRegisterFatBinary(void *);
void __cudaRegisterFatBinaryEnd(void **);
void __cudaUnregisterFatBinary(void **);
void __cudaRegisterFunction(void **, const char *, char *, const char *, int, uint3 *, uint3 *, dim3 *, dim3 *, int *);

/* What compilers put before an image. The image itself has no code. */
static struct {
	int magic, version;
	const void *data;
	void *file;
} wrapper = {0x466243b1, 1, "", NULL};

static void **image;
static const char multiply; /* its address stands for the kernel */

__attribute__((constructor)) static void register_image(void)
{
	image = __cudaRegisterFatBinary(&wrapper);
	__cudaRegisterFunction(image, &multiply, NULL, "multiply", -1, NULL, NULL, NULL, NULL, NULL);
	__cudaRegisterFatBinaryEnd(image);
}

__attribute__((destructor)) static void unregister_image(void)
{
	__cudaUnregisterFatBinary(image);
}

EXPORT cublasStatus_t cublasCreate_v2(cublasHandle_t *out)
{
	cublasHandle_t h = out ? calloc(1, sizeof(*h)) : NULL;

	if (!h)
		return out ? CUBLAS_STATUS_ALLOC_FAILED : CUBLAS_STATUS_INVALID_VALUE;
	if (cudaFree(NULL) != cudaSuccess) { /* makes the context */
		free(h);
		return CUBLAS_STATUS_NOT_INITIALIZED;
	}
	if (cudaMalloc(&h->workspace, WORKSPACE) != cudaSuccess) {
		free(h);
		return CUBLAS_STATUS_ALLOC_FAILED;
	}
	*out = h;
	return CUBLAS_STATUS_SUCCESS;
}

static cublasStatus_t drop_workspace(cublasHandle_t h)
{
	cudaError_t e = h->workspace ? cudaFree(h->workspace) : cudaSuccess;

	h->workspace = NULL;
	return e == cudaSuccess ? CUBLAS_STATUS_SUCCESS : CUBLAS_STATUS_INTERNAL_ERROR;
}

EXPORT cublasStatus_t cublasDestroy_v2(cublasHandle_t h)
{
	cublasStatus_t ret = h ? drop_workspace(h) : CUBLAS_STATUS_NOT_INITIALIZED;

	free(h);
	return ret;
}

EXPORT cublasStatus_t cublasSetStream_v2(cublasHandle_t h, cudaStream_t stream)
{
	if (!h)
		return CUBLAS_STATUS_NOT_INITIALIZED;
	h->stream = stream;
	return CUBLAS_STATUS_SUCCESS;
}

EXPORT cublasStatus_t cublasSetWorkspace_v2(cublasHandle_t h, void *workspace, size_t size)
{
	if (!h)
		return CUBLAS_STATUS_NOT_INITIALIZED;
	return workspace || size == 0 ? drop_workspace(h) : CUBLAS_STATUS_INVALID_VALUE;
}

EXPORT cublasStatus_t cublasSetMathMode(cublasHandle_t h, int mode)
{
	(void)mode;
	return h ? CUBLAS_STATUS_SUCCESS : CUBLAS_STATUS_NOT_INITIALIZED;
}

EXPORT const char *cublasGetStatusString(cublasStatus_t status)
{
	switch (status) {
	case CUBLAS_STATUS_SUCCESS:
		return "success";
	case CUBLAS_STATUS_NOT_INITIALIZED:
		return "the library was not initialized";
	case CUBLAS_STATUS_ALLOC_FAILED:
		return "the resource allocation failed";
	case CUBLAS_STATUS_INVALID_VALUE:
		return "an unsupported value or parameter was passed to the function";
	case CUBLAS_STATUS_EXECUTION_FAILED:
		return "the function failed to launch on the GPU";
	case CUBLAS_STATUS_INTERNAL_ERROR:
		return "an internal operation failed";
	}
	return "unknown status";
}

static cublasStatus_t run(cublasHandle_t h, int m, int n, int k, int batch)
{
	const dim3 one = {1, 1, 1};

	if (!h)
		return CUBLAS_STATUS_NOT_INITIALIZED;
	if (m < 0 || n < 0 || k < 0 || batch < 0)
		return CUBLAS_STATUS_INVALID_VALUE;
	if (m == 0 || n == 0 || batch == 0)
		return CUBLAS_STATUS_SUCCESS;
	return cudaLaunchKernel(&multiply, one, one, NULL, 0, h->stream) == cudaSuccess ? CUBLAS_STATUS_SUCCESS
											 : CUBLAS_STATUS_EXECUTION_FAILED;
}

/* Parameters of which only the sizes matter are named after where they stand. */
EXPORT cublasStatus_t cublasSgemm_v2(cublasHandle_t h, int ta, int tb, int m, int n, int k, const float *alpha, const float *a, int lda,
				     const float *b, int ldb, const float *beta, float *c, int ldc)
{
	(void)ta, (void)tb, (void)alpha, (void)a, (void)lda, (void)b, (void)ldb, (void)beta, (void)c, (void)ldc;
	return run(h, m, n, k, 1);
}

EXPORT cublasStatus_t cublasGemmEx(cublasHandle_t h, int ta, int tb, int m, int n, int k, const void *alpha, const void *a, int type_a,
				   int lda, const void *b, int type_b, int ldb, const void *beta, void *c, int type_c, int ldc, int compute,
				   int algorithm)
{
	(void)ta, (void)tb, (void)alpha, (void)a, (void)type_a, (void)lda, (void)b, (void)type_b, (void)ldb, (void)beta, (void)c, (void)type_c;
	(void)ldc, (void)compute, (void)algorithm;
	return run(h, m, n, k, 1);
}

EXPORT cublasStatus_t cublasSgemmBatched(cublasHandle_t h, int ta, int tb, int m, int n, int k, const float *alpha, const float *const a[],
					 int lda, const float *const b[], int ldb, const float *beta, float *const c[], int ldc, int batch)
{
	(void)ta, (void)tb, (void)alpha, (void)a, (void)lda, (void)b, (void)ldb, (void)beta, (void)c, (void)ldc;
	return run(h, m, n, k, batch);
}

EXPORT cublasStatus_t cublasGemmBatchedEx(cublasHandle_t h, int ta, int tb, int m, int n, int k, const void *alpha, const void *const a[],
					  int type_a, int lda, const void *const b[], int type_b, int ldb, const void *beta,
					  void *const c[], int type_c, int ldc, int batch, int compute, int algorithm)
{
	(void)ta, (void)tb, (void)alpha, (void)a, (void)type_a, (void)lda, (void)b, (void)type_b, (void)ldb, (void)beta, (void)c, (void)type_c;
	(void)ldc, (void)compute, (void)algorithm;
	return run(h, m, n, k, batch);
}

EXPORT cublasStatus_t cublasSgemmStridedBatched(cublasHandle_t h, int ta, int tb, int m, int n, int k, const float *alpha, const float *a,
						int lda, long long stride_a, const float *b, int ldb, long long stride_b, const float *beta,
						float *c, int ldc, long long stride_c, int batch)
{
	(void)ta, (void)tb, (void)alpha, (void)a, (void)lda, (void)stride_a, (void)b, (void)ldb, (void)stride_b, (void)beta, (void)c, (void)ldc;
	(void)stride_c;
	return run(h, m, n, k, batch);
}

EXPORT cublasStatus_t cublasGemmStridedBatchedEx(cublasHandle_t h, int ta, int tb, int m, int n, int k, const void *alpha, const void *a,
						 int type_a, int lda, long long stride_a, const void *b, int type_b, int ldb,
						 long long stride_b, const void *beta, void *c, int type_c, int ldc, long long stride_c,
						 int batch, int compute, int algorithm)
{
	(void)ta, (void)tb, (void)alpha, (void)a, (void)type_a, (void)lda, (void)stride_a, (void)b, (void)type_b, (void)ldb, (void)stride_b;
	(void)beta, (void)c, (void)type_c, (void)ldc, (void)stride_c, (void)compute, (void)algorithm;
	return run(h, m, n, k, batch);
}

EXPORT cublasStatus_t cublasStrsmBatched(cublasHandle_t h, int side, int uplo, int trans, int diag, int m, int n, const float *alpha,
					 const float *const a[], int lda, float *const b[], int ldb, int batch)
{
	(void)side, (void)uplo, (void)trans, (void)diag, (void)alpha, (void)a, (void)lda, (void)b, (void)ldb;
	return run(h, m, n, 0, batch);
}
