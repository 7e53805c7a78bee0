/* SPDX-License-Identifier: Apache-2.0 */
/*
 * swap.h: memory that was taken above memory.max and stays on the host, within memory.swap.max:
 * managed memory whose preferred location is the host, so that the GPU reaches it there instead of
 * drawing it in. Its blocks are known by their ranges, since prefetches and advice name parts.
 */
#ifndef GPUFENCE_SWAP_H
#define GPUFENCE_SWAP_H

#include <stdbool.h>
#include <stdint.h>

#include "driver_api.h"

/*
 * Takes managed memory that stays on the host, and remembers what is charged for it, without which
 * it could be drawn in unseen. CUDA_ERROR_OUT_OF_MEMORY if either is not possible.
 */
CUresult swap_take(CUdeviceptr *pointer, size_t bytes, unsigned int flags, int gpu, uint64_t charged);

/* The block is gone: whether it was still charged as on the host; otherwise as managed. */
bool swap_gone(uint64_t pointer);

/*
 * Before memory is drawn to a GPU: charges every block in the range as managed memory, which it is
 * from then on. False: one of them does not fit; it stays where it is.
 */
bool swap_to_device(uint64_t pointer, uint64_t bytes);

#endif
