/* SPDX-License-Identifier: Apache-2.0 */
/* hooks_mem.c: linear memory. */
#include <string.h>

#include "charge.h"
#include "debug.h"
#include "kept.h"
#include "real.h"
#include "swap.h"

/* The driver's pitch is a multiple of this. A first guess only: its answer counts. */
#define PITCH_BYTES UINT64_C(512)

CUresult hook_cuMemAlloc(CUdeviceptr_v1 *pointer, unsigned int bytes)
{
	fn_cuMemAlloc *real = REAL(cuMemAlloc);
	struct charge c;
	if (real == NULL)
		return CUDA_ERROR_NOT_SUPPORTED;
	if (pointer == NULL)
		return real(pointer, bytes);
	if (!charge_begin(&c, "cuMemAlloc", ACCOUNT_DEVICE, bytes))
		return CUDA_ERROR_OUT_OF_MEMORY;
	CUresult result = real(pointer, bytes);
	return charge_end(&c, result, result == CUDA_SUCCESS ? *pointer : 0);
}
EXPORT(cuMemAlloc);

CUresult hook_cuMemAlloc_v2(CUdeviceptr *pointer, size_t bytes)
{
	fn_cuMemAlloc_v2 *real = REAL(cuMemAlloc_v2);
	struct charge c;
	if (real == NULL)
		return CUDA_ERROR_NOT_SUPPORTED;
	if (pointer == NULL)
		return real(pointer, bytes);
	if (!charge_begin_spill(&c, "cuMemAlloc", ACCOUNT_DEVICE, bytes))
		return CUDA_ERROR_OUT_OF_MEMORY;
	CUresult result = c.counter == ACCOUNT_SWAP ? swap_take(pointer, bytes, CU_MEM_ATTACH_GLOBAL, c.gpu, c.bytes) : real(pointer, bytes);
	return charge_end(&c, result, result == CUDA_SUCCESS ? *pointer : 0);
}
EXPORT(cuMemAlloc_v2);

CUresult hook_cuMemAllocManaged(CUdeviceptr *pointer, size_t bytes, unsigned int flags)
{
	fn_cuMemAllocManaged *real = REAL(cuMemAllocManaged);
	struct charge c;
	if (real == NULL)
		return CUDA_ERROR_NOT_SUPPORTED;
	if (pointer == NULL)
		return real(pointer, bytes, flags);
	if (!charge_begin_spill(&c, "cuMemAllocManaged", ACCOUNT_MANAGED, bytes))
		return CUDA_ERROR_OUT_OF_MEMORY;
	CUresult result = c.counter == ACCOUNT_SWAP ? swap_take(pointer, bytes, flags, c.gpu, c.bytes) : real(pointer, bytes, flags);
	return charge_end(&c, result, result == CUDA_SUCCESS ? *pointer : 0);
}
EXPORT(cuMemAllocManaged);

/* False: no such allocation can exist, and the driver will say so. */
static bool pitched_bytes(uint64_t width, uint64_t height, uint64_t *bytes)
{
	uint64_t pitch;
	return !__builtin_add_overflow(width, PITCH_BYTES - 1, &pitch) &&
	       !__builtin_mul_overflow(pitch / PITCH_BYTES * PITCH_BYTES, height, bytes);
}

/* The driver writes to variables of ours, because its answer may still be refused. */
CUresult hook_cuMemAllocPitch(CUdeviceptr_v1 *pointer, unsigned int *pitch, unsigned int width, unsigned int height,
			      unsigned int element)
{
	fn_cuMemAllocPitch *real = REAL(cuMemAllocPitch);
	fn_cuMemFree *free_it = REAL(cuMemFree);
	struct charge c;
	uint64_t bytes;
	CUdeviceptr_v1 got = 0;
	unsigned int got_pitch = 0;
	if (real == NULL || free_it == NULL)
		return CUDA_ERROR_NOT_SUPPORTED;
	if (pointer == NULL || pitch == NULL || !pitched_bytes(width, height, &bytes))
		return real(pointer, pitch, width, height, element);
	if (!charge_begin(&c, "cuMemAllocPitch", ACCOUNT_DEVICE, bytes))
		return CUDA_ERROR_OUT_OF_MEMORY;
	CUresult result = real(&got, &got_pitch, width, height, element);
	if (result == CUDA_SUCCESS) {
		if (!charge_settle(&c, "cuMemAllocPitch", (uint64_t)got_pitch * height)) {
			free_it(got);
			return CUDA_ERROR_OUT_OF_MEMORY;
		}
		*pointer = got;
		*pitch = got_pitch;
	}
	return charge_end(&c, result, got);
}
EXPORT(cuMemAllocPitch);

CUresult hook_cuMemAllocPitch_v2(CUdeviceptr *pointer, size_t *pitch, size_t width, size_t height,
				 unsigned int element)
{
	fn_cuMemAllocPitch_v2 *real = REAL(cuMemAllocPitch_v2);
	fn_cuMemFree_v2 *free_it = REAL(cuMemFree_v2);
	struct charge c;
	uint64_t bytes;
	CUdeviceptr got = 0;
	size_t got_pitch = 0;
	if (real == NULL || free_it == NULL)
		return CUDA_ERROR_NOT_SUPPORTED;
	if (pointer == NULL || pitch == NULL || !pitched_bytes(width, height, &bytes))
		return real(pointer, pitch, width, height, element);
	if (!charge_begin(&c, "cuMemAllocPitch", ACCOUNT_DEVICE, bytes))
		return CUDA_ERROR_OUT_OF_MEMORY;
	CUresult result = real(&got, &got_pitch, width, height, element);
	if (result == CUDA_SUCCESS) {
		if (!charge_settle(&c, "cuMemAllocPitch", (uint64_t)got_pitch * height)) {
			free_it(got);
			return CUDA_ERROR_OUT_OF_MEMORY;
		}
		*pointer = got;
		*pitch = got_pitch;
	}
	return charge_end(&c, result, got);
}
EXPORT(cuMemAllocPitch_v2);

/*
 * The block leaves the table before the driver frees it: afterwards another thread may already
 * have got the same address. If the driver keeps it, it goes back, charged as before.
 */
struct leaving {
	bool known;
	struct track_block block;
	uint64_t moves; /* of its pool, if it is a piece */
};

static struct leaving leave(uint64_t pointer)
{
	struct leaving l = { 0 };
	l.known = pointer != 0 && track_take(pointer, &l.block);
	l.moves = l.known ? kept_moves(&l.block) : 0;
	return l;
}

static void left(const struct leaving *l, CUresult result)
{
	if (!l->known)
		return;
	if (result != CUDA_SUCCESS) {
		if (track_put(&l->block) != 0)
			debug_line("block", "not tracked, out of host memory", l->block.bytes);
	} else if (l->block.kind == TRACK_PIECE) {
		kept_freed(&l->block, l->moves, KEPT_ANY_STREAM);
		account_count_free();
	} else {
		charge_undo(&l->block);
	}
}

CUresult hook_cuMemFree(CUdeviceptr_v1 pointer)
{
	fn_cuMemFree *real = REAL(cuMemFree);
	if (real == NULL)
		return CUDA_ERROR_NOT_SUPPORTED;
	struct leaving l = leave(pointer);
	CUresult result = real(pointer);
	left(&l, result);
	return result;
}
EXPORT(cuMemFree);

CUresult hook_cuMemFree_v2(CUdeviceptr pointer)
{
	fn_cuMemFree_v2 *real = REAL(cuMemFree_v2);
	if (real == NULL)
		return CUDA_ERROR_NOT_SUPPORTED;
	struct leaving l = leave(pointer);
	CUresult result = real(pointer);
	left(&l, result);
	return result;
}
EXPORT(cuMemFree_v2);
