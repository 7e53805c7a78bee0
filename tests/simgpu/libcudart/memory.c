/* SPDX-License-Identifier: Apache-2.0 */
/* memory.c: allocating, copying and filling. */
#include "internal.h"

#define DPTR(p) ((CUdeviceptr)(uintptr_t)(p))

/* Hands an address to the caller, if there is one. */
static cudaError_t give(cudaError_t e, void **out, CUdeviceptr p)
{
	if (e == cudaSuccess)
		*out = (void *)(uintptr_t)p;
	return finish(e);
}

EXPORT cudaError_t cudaMalloc(void **out, size_t size)
{
	CUdeviceptr p = 0;
	cudaError_t e = out ? enter() : cudaErrorInvalidValue;

	if (e == cudaSuccess && size > 0) /* nothing is a null pointer, and no error */
		e = CALL(LEGACY, cuMemAlloc, &p, size);
	return give(e, out, p);
}

EXPORT cudaError_t cudaMallocPitch(void **out, size_t *pitch, size_t width, size_t height)
{
	CUdeviceptr p = 0;
	cudaError_t e = out && pitch ? enter() : cudaErrorInvalidValue;

	if (e == cudaSuccess)
		e = CALL(LEGACY, cuMemAllocPitch, &p, pitch, width, height, 4);
	return give(e, out, p);
}

EXPORT cudaError_t cudaMallocManaged(void **out, size_t size, unsigned int flags)
{
	CUdeviceptr p = 0;
	cudaError_t e = out ? enter() : cudaErrorInvalidValue;

	if (e == cudaSuccess)
		e = CALL(LEGACY, cuMemAllocManaged, &p, size, flags);
	return give(e, out, p);
}

static cudaError_t allocate_in(enum variant v, void **out, size_t size, cudaStream_t stream)
{
	CUdeviceptr p = 0;
	cudaError_t e = out ? enter() : cudaErrorInvalidValue;

	if (e == cudaSuccess)
		e = CALL(v, cuMemAllocAsync, &p, size, stream);
	return give(e, out, p);
}

EXPORT cudaError_t cudaMallocAsync(void **out, size_t size, cudaStream_t stream)
{
	return allocate_in(LEGACY, out, size, stream);
}

EXPORT cudaError_t cudaMallocAsync_ptsz(void **out, size_t size, cudaStream_t stream)
{
	return allocate_in(PER_THREAD, out, size, stream);
}

EXPORT cudaError_t cudaFreeAsync(void *p, cudaStream_t stream)
{
	IN_CONTEXT(CALL(LEGACY, cuMemFreeAsync, DPTR(p), stream));
}

EXPORT cudaError_t cudaFreeAsync_ptsz(void *p, cudaStream_t stream)
{
	IN_CONTEXT(CALL(PER_THREAD, cuMemFreeAsync, DPTR(p), stream));
}

/* Of nothing too: that is how programs make the context. */
EXPORT cudaError_t cudaFree(void *p)
{
	IN_CONTEXT(CALL(LEGACY, cuMemFree, DPTR(p)));
}

EXPORT cudaError_t cudaMemGetInfo(size_t *free_bytes, size_t *total)
{
	IN_CONTEXT(CALL(LEGACY, cuMemGetInfo, free_bytes, total));
}

/* ---- the host's ------------------------------------------------------------------------ */

EXPORT cudaError_t cudaHostAlloc(void **out, size_t size, unsigned int flags)
{
	IN_CONTEXT(CALL(LEGACY, cuMemHostAlloc, out, size, flags));
}

EXPORT cudaError_t cudaMallocHost(void **out, size_t size)
{
	IN_CONTEXT(CALL(LEGACY, cuMemHostAlloc, out, size, 0));
}

EXPORT cudaError_t cudaFreeHost(void *p)
{
	IN_CONTEXT(p ? CALL(LEGACY, cuMemFreeHost, p) : cudaSuccess);
}

EXPORT cudaError_t cudaHostRegister(void *p, size_t size, unsigned int flags)
{
	IN_CONTEXT(CALL(LEGACY, cuMemHostRegister, p, size, flags));
}

EXPORT cudaError_t cudaHostUnregister(void *p)
{
	IN_CONTEXT(CALL(LEGACY, cuMemHostUnregister, p));
}

EXPORT cudaError_t cudaHostGetDevicePointer(void **out, void *p, unsigned int flags)
{
	CUdeviceptr at = 0;
	cudaError_t e = out ? enter() : cudaErrorInvalidValue;

	if (e == cudaSuccess)
		e = CALL(LEGACY, cuMemHostGetDevicePointer, &at, p, flags);
	return give(e, out, at);
}

EXPORT cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *attributes, const void *p)
{
	CUpointer_attribute which[] = {CU_POINTER_ATTRIBUTE_CONTEXT,      CU_POINTER_ATTRIBUTE_MEMORY_TYPE,
				       CU_POINTER_ATTRIBUTE_DEVICE_POINTER, CU_POINTER_ATTRIBUTE_HOST_POINTER,
				       CU_POINTER_ATTRIBUTE_IS_MANAGED,   CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL};
	CUcontext ctx = NULL;
	unsigned int type = 0, managed = 0;
	CUdeviceptr device = 0;
	void *host = NULL, *data[] = {&ctx, &type, &device, &host, &managed, NULL};
	cudaError_t e = attributes ? enter() : cudaErrorInvalidValue;
	int ordinal = -1;

	data[5] = &ordinal;
	if (e == cudaSuccess)
		e = CALL(LEGACY, cuPointerGetAttributes, 6, which, data, DPTR(p));
	if (e == cudaSuccess) {
		memset(attributes, 0, sizeof(*attributes));
		attributes->type = managed ? cudaMemoryTypeManaged
				   : type == CU_MEMORYTYPE_HOST ? cudaMemoryTypeHost
				   : type == CU_MEMORYTYPE_DEVICE ? cudaMemoryTypeDevice
								  : cudaMemoryTypeUnregistered;
		attributes->device = type ? ordinal : -2;
		attributes->devicePointer = (void *)(uintptr_t)device;
		attributes->hostPointer = type ? host : (void *)(uintptr_t)p;
	}
	return finish(e);
}

/* ---- copies ------------------------------------------------------------------------------ */

static cudaError_t copy(enum variant v, void *to, const void *from, size_t n, enum cudaMemcpyKind kind)
{
	switch (kind) {
	case cudaMemcpyHostToHost:
	case cudaMemcpyDefault:
		return CALL(v, cuMemcpy, DPTR(to), DPTR(from), n);
	case cudaMemcpyHostToDevice:
		return CALL(v, cuMemcpyHtoD, DPTR(to), from, n);
	case cudaMemcpyDeviceToHost:
		return CALL(v, cuMemcpyDtoH, to, DPTR(from), n);
	case cudaMemcpyDeviceToDevice:
		return CALL(v, cuMemcpyDtoD, DPTR(to), DPTR(from), n);
	}
	return cudaErrorInvalidMemcpyDirection;
}

EXPORT cudaError_t cudaMemcpy(void *to, const void *from, size_t n, enum cudaMemcpyKind kind)
{
	IN_CONTEXT(copy(LEGACY, to, from, n, kind));
}

EXPORT cudaError_t cudaMemcpy_ptds(void *to, const void *from, size_t n, enum cudaMemcpyKind kind)
{
	IN_CONTEXT(copy(PER_THREAD, to, from, n, kind));
}

static cudaError_t copy_in(enum variant v, void *to, const void *from, size_t n, enum cudaMemcpyKind kind, cudaStream_t stream)
{
	switch (kind) {
	case cudaMemcpyHostToHost:
	case cudaMemcpyDefault:
		return CALL(v, cuMemcpyAsync, DPTR(to), DPTR(from), n, stream);
	case cudaMemcpyHostToDevice:
		return CALL(v, cuMemcpyHtoDAsync, DPTR(to), from, n, stream);
	case cudaMemcpyDeviceToHost:
		return CALL(v, cuMemcpyDtoHAsync, to, DPTR(from), n, stream);
	case cudaMemcpyDeviceToDevice:
		return CALL(v, cuMemcpyDtoDAsync, DPTR(to), DPTR(from), n, stream);
	}
	return cudaErrorInvalidMemcpyDirection;
}

EXPORT cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t n, enum cudaMemcpyKind kind, cudaStream_t stream)
{
	IN_CONTEXT(copy_in(LEGACY, to, from, n, kind, stream));
}

EXPORT cudaError_t cudaMemcpyAsync_ptsz(void *to, const void *from, size_t n, enum cudaMemcpyKind kind, cudaStream_t stream)
{
	IN_CONTEXT(copy_in(PER_THREAD, to, from, n, kind, stream));
}

/* A side of a copy of rows. The driver tells by the address where it does not matter to us. */
static cudaError_t copy_rows(enum variant v, void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t width, size_t height,
			     enum cudaMemcpyKind kind, cudaStream_t stream)
{
	CUDA_MEMCPY2D c = {.srcPitch = from_pitch, .dstPitch = to_pitch, .WidthInBytes = width, .Height = height};
	bool to_device = kind == cudaMemcpyHostToDevice || kind == cudaMemcpyDeviceToDevice;
	bool from_device = kind == cudaMemcpyDeviceToHost || kind == cudaMemcpyDeviceToDevice;

	if ((unsigned int)kind > cudaMemcpyDefault)
		return cudaErrorInvalidMemcpyDirection;
	c.srcMemoryType = kind == cudaMemcpyDefault ? CU_MEMORYTYPE_UNIFIED : from_device ? CU_MEMORYTYPE_DEVICE : CU_MEMORYTYPE_HOST;
	c.dstMemoryType = kind == cudaMemcpyDefault ? CU_MEMORYTYPE_UNIFIED : to_device ? CU_MEMORYTYPE_DEVICE : CU_MEMORYTYPE_HOST;
	if (c.srcMemoryType == CU_MEMORYTYPE_HOST)
		c.srcHost = from;
	else
		c.srcDevice = DPTR(from);
	if (c.dstMemoryType == CU_MEMORYTYPE_HOST)
		c.dstHost = to;
	else
		c.dstDevice = DPTR(to);
	return CALL(v, cuMemcpy2DAsync, &c, stream);
}

EXPORT cudaError_t cudaMemcpy2DAsync(void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t width, size_t height,
				     enum cudaMemcpyKind kind, cudaStream_t stream)
{
	IN_CONTEXT(copy_rows(LEGACY, to, to_pitch, from, from_pitch, width, height, kind, stream));
}

EXPORT cudaError_t cudaMemcpy2DAsync_ptsz(void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t width, size_t height,
					  enum cudaMemcpyKind kind, cudaStream_t stream)
{
	IN_CONTEXT(copy_rows(PER_THREAD, to, to_pitch, from, from_pitch, width, height, kind, stream));
}

static cudaError_t copy_between(enum variant v, void *to, int to_device, const void *from, int from_device, size_t n, cudaStream_t stream)
{
	CUcontext to_ctx, from_ctx;
	cudaError_t e = cudaSuccess;

	if (to_device < 0 || to_device >= gpu_count || from_device < 0 || from_device >= gpu_count)
		e = cudaErrorInvalidDevice;
	if (e == cudaSuccess)
		e = primary_of(to_device, &to_ctx);
	if (e == cudaSuccess)
		e = primary_of(from_device, &from_ctx);
	return e == cudaSuccess ? CALL(v, cuMemcpyPeerAsync, DPTR(to), to_ctx, DPTR(from), from_ctx, n, stream) : e;
}

EXPORT cudaError_t cudaMemcpyPeerAsync(void *to, int to_device, const void *from, int from_device, size_t n, cudaStream_t stream)
{
	IN_CONTEXT(copy_between(LEGACY, to, to_device, from, from_device, n, stream));
}

EXPORT cudaError_t cudaMemset(void *to, int value, size_t n)
{
	IN_CONTEXT(CALL(LEGACY, cuMemsetD8, DPTR(to), (unsigned char)value, n));
}

EXPORT cudaError_t cudaMemset_ptds(void *to, int value, size_t n)
{
	IN_CONTEXT(CALL(PER_THREAD, cuMemsetD8, DPTR(to), (unsigned char)value, n));
}

EXPORT cudaError_t cudaMemsetAsync(void *to, int value, size_t n, cudaStream_t stream)
{
	IN_CONTEXT(CALL(LEGACY, cuMemsetD8Async, DPTR(to), (unsigned char)value, n, stream));
}

EXPORT cudaError_t cudaMemsetAsync_ptsz(void *to, int value, size_t n, cudaStream_t stream)
{
	IN_CONTEXT(CALL(PER_THREAD, cuMemsetD8Async, DPTR(to), (unsigned char)value, n, stream));
}
