/* SPDX-License-Identifier: Apache-2.0 */
/*
 * hooks_managed.c: where managed memory is to be. What was taken above memory.max may come to the
 * GPU when there is room within the limit; until then the wish is granted and nothing moves, as a
 * prefetch may.
 */
#include "real.h"
#include "swap.h"

static bool to_device(CUmemLocation to) { return to.type == CU_MEM_LOCATION_TYPE_DEVICE; }

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

/* Any other place than the host, or none, lets the GPU draw it in. */
static bool draws(unsigned int advice, bool device)
{
	return advice == CU_MEM_ADVISE_UNSET_PREFERRED_LOCATION || (advice == CU_MEM_ADVISE_SET_PREFERRED_LOCATION && device);
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
