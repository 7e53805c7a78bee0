/* SPDX-License-Identifier: Apache-2.0 */
/*
 * charge.h: one allocation from reserve to release, as every allocating hook does it:
 *
 *	struct charge c;
 *	if (!charge_begin(&c, "cuMemAlloc", ACCOUNT_DEVICE, bytes))
 *		return CUDA_ERROR_OUT_OF_MEMORY;
 *	return charge_end(&c, real(...), pointer);
 */
#ifndef GPUFENCE_CHARGE_H
#define GPUFENCE_CHARGE_H

#include <stdbool.h>
#include <stdint.h>

#include "account.h"
#include "driver_api.h"
#include "track.h"

/* What the driver takes from the GPU at a time, and the greatest size for which allocations
 * share it. */
#define CHARGE_BLOCK_BYTES (UINT64_C(2) << 20)
#define CHARGE_SMALL_BYTES (UINT64_C(1) << 20)

struct charge {
	int gpu;        /* -1: nothing is charged */
	enum account_counter counter;
	uint64_t bytes; /* reserved */
	uint64_t owner;
	bool small;
};

/* account_reserve; where a limit stands against it, once more after the driver gave back what it
 * keeps for later (kept.h). Above memory.high it waits (high.h). Every hook charges through this. */
int charge_reserve(int gpu, enum account_counter counter, uint64_t bytes);
/* The same without waiting, for what is corrected after the call: then the caller waits. */
int charge_hold(int gpu, enum account_counter counter, uint64_t bytes);

/* Reserves on the current device what the driver will take for bytes. False: refused by a limit,
 * and counted. */
bool charge_begin(struct charge *charge, const char *call, enum account_counter counter, uint64_t bytes);

/* The same on a GPU that the call itself names, in whole blocks. The caller keeps the charge. */
bool charge_begin_on(struct charge *charge, const char *call, int gpu, enum account_counter counter, uint64_t bytes);

/* charge_begin; where memory.max stands against it, memory.swap.max may not: then the counter is
 * ACCOUNT_SWAP, and the caller takes memory that stays on the host (swap.h). */
bool charge_begin_spill(struct charge *charge, const char *call, enum account_counter counter, uint64_t bytes);

/* Corrects the reservation to what the driver really took. False: refused. The caller frees. */
bool charge_settle(struct charge *charge, const char *call, uint64_t bytes);

/* Keeps the charge for the block at pointer, or gives it back if the driver refused. Returns
 * result. */
CUresult charge_end(const struct charge *charge, CUresult result, uint64_t pointer);

/* The same for memory that is no block: gives back what was reserved if the driver refused. */
CUresult charge_failed(int gpu, enum account_counter counter, uint64_t bytes, CUresult result);

/* Counts and tells of a refusal by a limit. */
void charge_refused(int gpu, const char *call, uint64_t bytes);

/*
 * Small arrays share the driver's blocks in a way that their handles do not show. They are charged
 * as if they were packed: all of a GPU together, rounded up to whole blocks.
 */
bool charge_array_small(int gpu, const char *call, uint64_t bytes);
void charge_array_small_gone(int gpu, uint64_t bytes);

/*
 * Tracks a block that the driver gave. What was known at its address was freed on a way that we did
 * not see, with a context that another thread destroys at the moment, say: its charge is taken back.
 */
void charge_track(const struct track_block *block, const char *what);

/* Takes back the charge of a block that is gone. */
void charge_undo(const struct track_block *block);

#endif
