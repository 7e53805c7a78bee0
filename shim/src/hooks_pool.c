/* SPDX-License-Identifier: Apache-2.0 */
/*
 * hooks_pool.c: stream-ordered allocation. Charged is what pools keep (kept.h); a pool's release
 * threshold stays as the program set it.
 */
#include "charge.h"
#include "debug.h"
#include "device.h"
#include "kept.h"
#include "real.h"
#include "stream.h"

/* The variant that was called: the same one is called on. */
struct variant {
	const char *call;
	fn_cuMemAllocAsync *alloc;
	fn_cuMemAllocFromPoolAsync *from_pool;
	fn_cuMemFreeAsync *free_it;
	bool per_thread;
};

static CUresult allocate_real(const struct variant *v, CUdeviceptr *pointer, size_t bytes, CUmemoryPool pool, CUstream stream)
{
	return v->from_pool != NULL ? v->from_pool(pointer, bytes, pool, stream) : v->alloc(pointer, bytes, stream);
}

/* The pool that memory comes from, NULL if there is none to be named. */
static CUmemoryPool pool_of(CUdevice device)
{
	fn_cuDeviceGetMemPool *get = REAL(cuDeviceGetMemPool);
	CUmemoryPool pool = NULL;
	return get != NULL && get(&pool, device) == CUDA_SUCCESS ? pool : NULL;
}

/* Without a pool to charge: each piece for itself, as linear memory. */
static CUresult allocate_alone(const struct variant *v, CUdeviceptr *pointer, size_t bytes, CUmemoryPool pool, CUstream stream,
			       CUdevice device)
{
	struct charge c;
	if (!charge_begin_on(&c, v->call, device_gpu(device), ACCOUNT_DEVICE, bytes))
		return CUDA_ERROR_OUT_OF_MEMORY;
	CUresult result = allocate_real(v, pointer, bytes, pool, stream);
	return charge_end(&c, result, result == CUDA_SUCCESS ? *pointer : 0);
}

static CUresult allocate(const struct variant *v, CUdeviceptr *pointer, size_t bytes, CUmemoryPool pool, CUstream stream)
{
	struct kept_call c;
	CUdeviceptr got = 0;
	if (pointer == NULL || bytes == 0 || (v->from_pool != NULL && pool == NULL) || stream_captures(stream, v->per_thread))
		return allocate_real(v, pointer, bytes, pool, stream);
	CUdevice device = stream_device(stream);
	CUmemoryPool source = v->from_pool != NULL ? pool : pool_of(device);
	if (source == NULL)
		return allocate_real(v, pointer, bytes, pool, stream);
	struct kept *kept = kept_pool(source, device);
	if (kept == NULL)
		return allocate_alone(v, pointer, bytes, pool, stream, device);
	if (!kept_begin_piece(&c, kept, v->call, bytes, stream_id(stream, v->per_thread)))
		return CUDA_ERROR_OUT_OF_MEMORY;
	CUresult result = allocate_real(v, &got, bytes, pool, stream);
	if (result != CUDA_SUCCESS) {
		(void)kept_end(&c);
		if (result == CUDA_ERROR_OUT_OF_MEMORY)
			account_event(c.gpu, ACCOUNT_EVENT_DEVICE);
		return result;
	}
	if (!kept_end_piece(&c, got, bytes)) {
		/* The pool grew by more than was foreseen, and over the limit. */
		struct track_block block;
		if (track_take(got, &block)) {
			uint64_t moves = kept_moves(&block);
			(void)v->free_it(got, stream); /* it was just given */
			kept_freed(&block, moves, stream_id(stream, v->per_thread));
		}
		(void)kept_give_back(c.gpu);
		charge_refused(c.gpu, v->call, bytes);
		return CUDA_ERROR_OUT_OF_MEMORY;
	}
	*pointer = got;
	return result;
}

CUresult hook_cuMemAllocAsync(CUdeviceptr *pointer, size_t bytes, CUstream stream)
{
	struct variant v = { "cuMemAllocAsync", REAL(cuMemAllocAsync), NULL, REAL(cuMemFreeAsync), false };
	if (v.alloc == NULL || v.free_it == NULL)
		return CUDA_ERROR_NOT_SUPPORTED;
	return allocate(&v, pointer, bytes, NULL, stream);
}
EXPORT(cuMemAllocAsync);

CUresult hook_cuMemAllocAsync_ptsz(CUdeviceptr *pointer, size_t bytes, CUstream stream)
{
	struct variant v = { "cuMemAllocAsync", REAL(cuMemAllocAsync_ptsz), NULL, REAL(cuMemFreeAsync_ptsz), true };
	if (v.alloc == NULL || v.free_it == NULL)
		return CUDA_ERROR_NOT_SUPPORTED;
	return allocate(&v, pointer, bytes, NULL, stream);
}
EXPORT(cuMemAllocAsync_ptsz);

CUresult hook_cuMemAllocFromPoolAsync(CUdeviceptr *pointer, size_t bytes, CUmemoryPool pool, CUstream stream)
{
	struct variant v = { "cuMemAllocFromPoolAsync", NULL, REAL(cuMemAllocFromPoolAsync), REAL(cuMemFreeAsync), false };
	if (v.from_pool == NULL || v.free_it == NULL)
		return CUDA_ERROR_NOT_SUPPORTED;
	return allocate(&v, pointer, bytes, pool, stream);
}
EXPORT(cuMemAllocFromPoolAsync);

CUresult hook_cuMemAllocFromPoolAsync_ptsz(CUdeviceptr *pointer, size_t bytes, CUmemoryPool pool, CUstream stream)
{
	struct variant v = { "cuMemAllocFromPoolAsync", NULL, REAL(cuMemAllocFromPoolAsync_ptsz), REAL(cuMemFreeAsync_ptsz), true };
	if (v.from_pool == NULL || v.free_it == NULL)
		return CUDA_ERROR_NOT_SUPPORTED;
	return allocate(&v, pointer, bytes, pool, stream);
}
EXPORT(cuMemAllocFromPoolAsync_ptsz);

/* As cuMemFree, and of memory of any kind. */
static CUresult release(fn_cuMemFreeAsync *real, CUdeviceptr pointer, CUstream stream, bool per_thread)
{
	struct track_block block;
	if (real == NULL)
		return CUDA_ERROR_NOT_SUPPORTED;
	/* A node of a graph frees when the graph runs. */
	bool known = pointer != 0 && track_take(pointer, &block);
	uint64_t moves = known ? kept_moves(&block) : 0;
	CUresult result = real(pointer, stream);
	if (!known)
		return result;
	if (result != CUDA_SUCCESS) {
		if (track_put(&block) != 0)
			debug_line("block", "not tracked, out of host memory", block.bytes);
	} else if (block.kind == TRACK_PIECE) {
		kept_freed(&block, moves, stream_id(stream, per_thread));
		account_count_free();
	} else {
		charge_undo(&block);
	}
	return result;
}

CUresult hook_cuMemFreeAsync(CUdeviceptr pointer, CUstream stream) { return release(REAL(cuMemFreeAsync), pointer, stream, false); }
EXPORT(cuMemFreeAsync);

CUresult hook_cuMemFreeAsync_ptsz(CUdeviceptr pointer, CUstream stream)
{
	return release(REAL(cuMemFreeAsync_ptsz), pointer, stream, true);
}
EXPORT(cuMemFreeAsync_ptsz);

CUresult hook_cuMemPoolCreate(CUmemoryPool *pool, const CUmemPoolProps *props)
{
	fn_cuMemPoolCreate *real = REAL(cuMemPoolCreate);
	enum account_counter counter;
	CUdevice device = -1;
	if (real == NULL)
		return CUDA_ERROR_NOT_SUPPORTED;
	CUresult result = real(pool, props);
	if (result != CUDA_SUCCESS || pool == NULL || props == NULL)
		return result;
	/* Managed memory without a place is counted where it was made. */
	fn_cuCtxGetDevice *current = REAL(cuCtxGetDevice);
	if (device_of_location(props->location) < 0 && (current == NULL || current(&device) != CUDA_SUCCESS))
		device = 0;
	kept_place(props->allocType, props->location, &device, &counter);
	kept_pool_new(*pool, device, counter);
	return result;
}
EXPORT(cuMemPoolCreate);

CUresult hook_cuMemPoolDestroy(CUmemoryPool pool)
{
	fn_cuMemPoolDestroy *real = REAL(cuMemPoolDestroy);
	if (real == NULL)
		return CUDA_ERROR_NOT_SUPPORTED;
	struct kept *kept = kept_closing(pool);
	CUresult result = real(pool);
	kept_closed(kept, result);
	return result;
}
EXPORT(cuMemPoolDestroy);

CUresult hook_cuMemPoolTrimTo(CUmemoryPool pool, size_t bytes)
{
	fn_cuMemPoolTrimTo *real = REAL(cuMemPoolTrimTo);
	struct kept_call c;
	if (real == NULL)
		return CUDA_ERROR_NOT_SUPPORTED;
	kept_begin_trim(&c, kept_known(pool));
	CUresult result = real(pool, bytes);
	(void)kept_end(&c);
	return result;
}
EXPORT(cuMemPoolTrimTo);

/* Its memory is charged to the process that made it. */
CUresult hook_cuMemPoolImportFromShareableHandle(CUmemoryPool *pool, void *handle, int type, unsigned long long flags)
{
	fn_cuMemPoolImportFromShareableHandle *real = REAL(cuMemPoolImportFromShareableHandle);
	if (real == NULL)
		return CUDA_ERROR_NOT_SUPPORTED;
	CUresult result = real(pool, handle, type, flags);
	if (result == CUDA_SUCCESS && pool != NULL)
		kept_pool_new(*pool, -1, ACCOUNT_DEVICE);
	return result;
}
EXPORT(cuMemPoolImportFromShareableHandle);
