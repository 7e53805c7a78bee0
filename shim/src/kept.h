/* SPDX-License-Identifier: Apache-2.0 */
/*
 * kept.h: memory that the driver takes in large steps and keeps for later: pools, and each
 * device's memory for graphs. What the driver keeps is charged, not what the program has of it.
 *
 * The driver is asked how much that is after each call that may have changed it. Before a call
 * that may make it grow, the growth is charged; afterwards the charge is set to the driver's
 * figure. With several calls under way at once, each has charged its own growth and the last to
 * end asks, so what is charged is never less than what is kept, and no lock is held over a call.
 *
 * What a pool keeps goes down when the host synchronises, which is not hooked: that shows at the
 * next call, and where a charge would be refused.
 */
#ifndef GPUFENCE_KEPT_H
#define GPUFENCE_KEPT_H

#include <stdbool.h>
#include <stdint.h>

#include "account.h"
#include "driver_api.h"
#include "track.h"

struct kept;

/* Where a piece was freed: on a stream, whose later work may use it at once, or for all. */
#define KEPT_ANY_STREAM UINTPTR_MAX

/* The pool of this handle; NULL: there is no place for another one, or it is on no GPU that is
 * known. device: what is assumed if the driver does not say where it is. */
struct kept *kept_pool(CUmemoryPool pool, CUdevice device);
/* The same, or NULL if it was not seen yet. */
struct kept *kept_known(CUmemoryPool pool);
/* A pool that was just made; -1: of no GPU's memory. */
void kept_pool_new(CUmemoryPool pool, CUdevice device, enum account_counter counter);
/* Reads the kind and location of memory: -1 where it is the host's; *device stays for managed memory
 * that is to be anywhere but on a device, since it may come there. */
void kept_place(int type, CUmemLocation where, CUdevice *device, enum account_counter *counter);
/* The memory that a device keeps for graphs. */
struct kept *kept_graph(CUdevice device);

/* What calls mean to each other. */
enum kept_use {
	KEPT_TRIMS = 1,  /* it makes the driver give back */
	KEPT_REUSES = 2, /* a graph: it counts on what it had before, and charges nothing */
	KEPT_LEAVES = 4, /* a graph: it may take that of others, and not give it back when it ends */
	KEPT_CLAIMS = 8, /* a piece: it counts on memory that is free, and charges nothing */
};

/* A call that may make it grow. */
struct kept_call {
	struct kept *kept; /* NULL: nothing is charged */
	int gpu;
	uint64_t growth;   /* charged */
	uint64_t seen;     /* changes by others up to the beginning */
	uint64_t start, end; /* of free memory that is counted on */
	uintptr_t stream;
	unsigned use;
};

/* Charges what a pool will take for bytes more. False: refused by a limit, and counted. */
bool kept_begin_piece(struct kept_call *c, struct kept *k, const char *call, uint64_t bytes, uintptr_t stream);

/* A call that makes the driver give back. */
void kept_begin_trim(struct kept_call *c, struct kept *k);

/*
 * Charges growth, for a graph. Those that reuse and that leave memory are kept apart, as far as a
 * millisecond of waiting does. False: refused, and not yet counted; or it cannot reuse now.
 */
bool kept_begin_graph(struct kept_call *c, struct kept *k, uint64_t growth, unsigned use);

/* The end of a call. False: it took more than was charged, and a limit stands against that: the
 * caller undoes it. What was taken is charged in any case. */
bool kept_end(struct kept_call *c);
/* The same, after the driver gave a piece: it is tracked. */
bool kept_end_piece(struct kept_call *c, uint64_t pointer, uint64_t bytes);

/*
 * How often a place in the pool of this piece was taken, or may have gone: to be asked before the driver
 * frees it. KEPT_NO_PLACE is no such number.
 */
uint64_t kept_moves(const struct track_block *block);
#define KEPT_NO_PLACE UINT64_MAX
/* The driver freed a piece, which is no longer tracked. Its place is free, if nothing has moved since. */
void kept_freed(const struct track_block *block, uint64_t moves, uintptr_t stream);

/* Before a pool is destroyed, and after: until the last piece is freed its memory stays. */
struct kept *kept_closing(CUmemoryPool pool);
void kept_closed(struct kept *k, CUresult result);

/* How often what is kept went down: what was there before may be gone. */
uint64_t kept_shrunk(struct kept *k);

/* Makes the driver give back what it keeps on a GPU and nobody uses: whether anything came. */
bool kept_give_back(int gpu);

/* A context on this GPU is gone, and perhaps what was kept with it. */
void kept_context_gone(int gpu);

#endif
