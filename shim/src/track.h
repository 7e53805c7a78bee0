/* SPDX-License-Identifier: Apache-2.0 */
/*
 * track.h: which device pointers this process holds, so that a free knows what to uncharge. A
 * sharded hash table in its own mmap'd memory (never malloc: a hook may run inside an
 * allocator's own hooks), amortised O(1) up to millions of blocks. A shard's lock is held for
 * the table operation only, never over a driver call. After fork the child starts empty: its
 * parent's pointers mean nothing to it.
 */
#ifndef GPUFENCE_TRACK_H
#define GPUFENCE_TRACK_H

#include <stdbool.h>
#include <stdint.h>

enum track_kind {
	TRACK_DEVICE,  /* charged by itself: bytes */
	TRACK_SMALL,   /* lies in a shared 2 MiB block: the block is charged, not it */
	TRACK_MANAGED,
	TRACK_PIECE,   /* of what a pool keeps (owner: the pool), which is charged */
	TRACK_SWAP,    /* managed memory that stays on the host, if it has not come (swap.h) */
	TRACK_ARRAY,   /* a small array: charged with all others of the GPU */
};

struct track_block {
	uint64_t pointer;
	uint64_t bytes;  /* charged */
	uint64_t owner;  /* the context that it dies with */
	int16_t gpu;     /* entry in the limits page */
	uint8_t kind;    /* enum track_kind */
};

/* 0, or -ENOMEM: no memory for the table; the caller keeps the charge and forgets the block
 * (over-counted until the process ends, never under-counted). */
int track_put(const struct track_block *block);
/* The same; 1 if *stale was known at that address, whose charge is the caller's to take back. */
int track_replace(const struct track_block *block, struct track_block *stale);

/* Removes and returns it; false if unknown. */
bool track_take(uint64_t pointer, struct track_block *block);

/* Removes every block of a context that is being destroyed, calling fn outside of locks. */
void track_take_owner(uint64_t owner, void (*fn)(const struct track_block *, void *), void *arg);

/* Small allocations share 2 MiB blocks. Says that one more (one less) lives in the block that
 * holds pointer: true if it is the block's first (was its last), so that the block's 2 MiB are
 * to be charged (uncharged). */
bool track_small_enter(int gpu, uint64_t pointer);
bool track_small_leave(int gpu, uint64_t pointer);

#endif
