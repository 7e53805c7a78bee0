/* SPDX-License-Identifier: Apache-2.0 */
/*
 * hooks_managed.c: where managed memory is to be. What was taken above memory.max may come to the
 * GPU when there is room within the limit; until then the wish is granted and nothing moves, as a
 * prefetch may.
 */
#include "device.h"
#include "real.h"
#include "swap.h"

static bool to_device(CUmemLocation to) { return device_of_location(to) >= 0; }

#define PREFETCH(symbol)                                                                            \
	CUresult hook_##symbol(CUdeviceptr pointer, size_t bytes, CUdevice to, CUstream stream)     \
	{                                                                                           \
		fn_##symbol *real = REAL(symbol);                                                   \
		if (real == NULL)                                                                   \
			return CUDA_ERROR_NOT_SUPPORTED;                                            \
		if (to >= 0 && !swap_to_device(pointer, bytes))                                     \
			return CUDA_SUCCESS;                                                        \
		return real(pointer, bytes, to, stream);                                            \
	}                                                                                           \
	EXPORT(symbol)

PREFETCH(cuMemPrefetchAsync);
PREFETCH(cuMemPrefetchAsync_ptsz);

#define PREFETCH_V2(symbol)                                                                                        \
	CUresult hook_##symbol(CUdeviceptr pointer, size_t bytes, CUmemLocation to, unsigned int flags, CUstream stream) \
	{                                                                                                          \
		fn_##symbol *real = REAL(symbol);                                                                  \
		if (real == NULL)                                                                                  \
			return CUDA_ERROR_NOT_SUPPORTED;                                                           \
		if (to_device(to) && !swap_to_device(pointer, bytes))                                              \
			return CUDA_SUCCESS;                                                                       \
		return real(pointer, bytes, to, flags, stream);                                                    \
	}                                                                                                          \
	EXPORT(symbol)

PREFETCH_V2(cuMemPrefetchAsync_v2);
PREFETCH_V2(cuMemPrefetchAsync_v2_ptsz);

/*
 * Several at once: place number k is for the ranges from first[k] on. What does not fit keeps all of
 * them where they are, since a part of a batch cannot be left out without memory for another list.
 */
static bool batch_fits(const CUdeviceptr *pointers, const size_t *sizes, size_t count, const CUmemLocation *places, const size_t *first,
		       size_t places_count)
{
	if (pointers == NULL || sizes == NULL || places == NULL || first == NULL)
		return true; /* the driver will say so */
	for (size_t i = 0, k = 0; i < count && places_count > 0; i++) {
		while (k + 1 < places_count && first[k + 1] <= i)
			k++;
		if (to_device(places[k]) && !swap_to_device(pointers[i], sizes[i]))
			return false;
	}
	return true;
}

#define PREFETCH_BATCH(symbol)                                                                                            \
	CUresult hook_##symbol(CUdeviceptr *pointers, size_t *sizes, size_t count, CUmemLocation *places, size_t *first,  \
			       size_t places_count, unsigned long long flags, CUstream stream)                            \
	{                                                                                                                 \
		fn_##symbol *real = REAL(symbol);                                                                         \
		if (real == NULL)                                                                                         \
			return CUDA_ERROR_NOT_SUPPORTED;                                                                  \
		if (!batch_fits(pointers, sizes, count, places, first, places_count))                                     \
			return CUDA_SUCCESS;                                                                              \
		return real(pointers, sizes, count, places, first, places_count, flags, stream);                          \
	}                                                                                                                 \
	EXPORT(symbol)

PREFETCH_BATCH(cuMemPrefetchBatchAsync);
PREFETCH_BATCH(cuMemPrefetchBatchAsync_ptsz);
PREFETCH_BATCH(cuMemDiscardAndPrefetchBatchAsync);
PREFETCH_BATCH(cuMemDiscardAndPrefetchBatchAsync_ptsz);

/* Any other place than the host, or none, lets the GPU draw it in. So do copies for reading, which
 * each processor that reads gets, whatever place is preferred. */
static bool draws(unsigned int advice, bool device)
{
	return advice == CU_MEM_ADVISE_SET_READ_MOSTLY || advice == CU_MEM_ADVISE_UNSET_PREFERRED_LOCATION ||
	       (advice == CU_MEM_ADVISE_SET_PREFERRED_LOCATION && device);
}

CUresult hook_cuMemAdvise(CUdeviceptr pointer, size_t bytes, unsigned int advice, CUdevice at)
{
	fn_cuMemAdvise *real = REAL(cuMemAdvise);
	if (real == NULL)
		return CUDA_ERROR_NOT_SUPPORTED;
	if (draws(advice, at >= 0) && !swap_to_device(pointer, bytes))
		return CUDA_SUCCESS;
	return real(pointer, bytes, advice, at);
}
EXPORT(cuMemAdvise);

CUresult hook_cuMemAdvise_v2(CUdeviceptr pointer, size_t bytes, unsigned int advice, CUmemLocation at)
{
	fn_cuMemAdvise_v2 *real = REAL(cuMemAdvise_v2);
	if (real == NULL)
		return CUDA_ERROR_NOT_SUPPORTED;
	if (draws(advice, to_device(at)) && !swap_to_device(pointer, bytes))
		return CUDA_SUCCESS;
	return real(pointer, bytes, advice, at);
}
EXPORT(cuMemAdvise_v2);
