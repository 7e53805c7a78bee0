/* SPDX-License-Identifier: Apache-2.0 */
#include "charge.h"

#include "../abi.h"
#include "debug.h"
#include "device.h"
#include "high.h"
#include "kept.h"
#include "swap.h"

/* As the driver takes it: shared blocks for small allocations, whole blocks for others. */
static uint64_t taken(uint64_t bytes)
{
	uint64_t up = bytes + (CHARGE_BLOCK_BYTES - 1);
	return up < bytes ? UINT64_MAX : up / CHARGE_BLOCK_BYTES * CHARGE_BLOCK_BYTES;
}

int charge_hold(int gpu, enum account_counter counter, uint64_t bytes)
{
	int r = account_reserve(gpu, counter, bytes);
	return r != 0 && kept_give_back(gpu) ? account_reserve(gpu, counter, bytes) : r;
}

int charge_reserve(int gpu, enum account_counter counter, uint64_t bytes)
{
	int r = charge_hold(gpu, counter, bytes);
	if (r == 0)
		high_after_charge(gpu);
	return r;
}

void charge_refused(int gpu, const char *call, uint64_t bytes)
{
	account_event(gpu, ACCOUNT_EVENT_MAX);
	debug_line(call, "refused by memory.max", bytes);
}

/* Reserves; nothing where nothing is asked for, or known of the GPU. */
static bool begin(struct charge *c, int gpu, enum account_counter counter, uint64_t bytes)
{
	*c = (struct charge){ .gpu = bytes == 0 ? -1 : gpu, .counter = counter };
	if (c->gpu < 0)
		return true;
	c->bytes = taken(bytes);
	return charge_reserve(c->gpu, counter, c->bytes) == 0;
}

bool charge_begin_on(struct charge *c, const char *call, int gpu, enum account_counter counter, uint64_t bytes)
{
	/* Nothing is refused by the driver itself, with its own error. */
	if (begin(c, gpu, counter, bytes))
		return true;
	charge_refused(c->gpu, call, bytes);
	return false;
}

bool charge_begin(struct charge *c, const char *call, enum account_counter counter, uint64_t bytes)
{
	uint64_t owner = 0;
	if (!charge_begin_on(c, call, bytes == 0 ? -1 : device_current(&owner), counter, bytes))
		return false;
	c->owner = owner;
	c->small = counter == ACCOUNT_DEVICE && bytes <= CHARGE_SMALL_BYTES;
	return true;
}

bool charge_begin_spill(struct charge *c, const char *call, enum account_counter counter, uint64_t bytes)
{
	uint64_t owner = 0;
	if (!begin(c, bytes == 0 ? -1 : device_current(&owner), counter, bytes)) {
		if (account_reserve(c->gpu, ACCOUNT_SWAP, c->bytes) != 0) {
			charge_refused(c->gpu, call, bytes);
			return false;
		}
		c->counter = ACCOUNT_SWAP;
		debug_line(call, "stays on the host, within memory.swap.max", bytes);
	}
	c->owner = owner;
	c->small = c->counter == ACCOUNT_DEVICE && bytes <= CHARGE_SMALL_BYTES;
	return true;
}

bool charge_settle(struct charge *c, const char *call, uint64_t bytes)
{
	if (c->gpu < 0)
		return true;
	uint64_t now = taken(bytes);
	if (now < c->bytes) {
		account_release(c->gpu, c->counter, c->bytes - now);
	} else if (now > c->bytes && charge_reserve(c->gpu, c->counter, now - c->bytes) != 0) {
		account_release(c->gpu, c->counter, c->bytes);
		charge_refused(c->gpu, call, bytes);
		return false;
	}
	c->bytes = now;
	c->small = c->counter == ACCOUNT_DEVICE && bytes <= CHARGE_SMALL_BYTES;
	return true;
}

CUresult charge_failed(int gpu, enum account_counter counter, uint64_t bytes, CUresult result)
{
	account_release(gpu, counter, bytes);
	/* Where spilling was not possible, it is memory.max that stands against it. */
	if (result == CUDA_ERROR_OUT_OF_MEMORY)
		account_event(gpu, counter == ACCOUNT_SWAP ? ACCOUNT_EVENT_MAX : ACCOUNT_EVENT_DEVICE);
	return result;
}

static uint8_t kind_of(const struct charge *c)
{
	if (c->small)
		return TRACK_SMALL;
	return c->counter == ACCOUNT_DEVICE ? TRACK_DEVICE : c->counter == ACCOUNT_MANAGED ? TRACK_MANAGED : TRACK_SWAP;
}

CUresult charge_end(const struct charge *c, CUresult result, uint64_t pointer)
{
	if (c->gpu < 0)
		return result;
	if (result != CUDA_SUCCESS)
		return charge_failed(c->gpu, c->counter, c->bytes, result);
	struct track_block b = {
		.pointer = pointer,
		.bytes = c->small ? 0 : c->bytes,
		.owner = c->owner,
		.gpu = (int16_t)c->gpu,
		.kind = kind_of(c),
	};
	if (c->small && !track_small_enter(c->gpu, pointer))
		account_release(c->gpu, c->counter, c->bytes);
	charge_track(&b, "block");
	account_count_alloc();
	return result;
}

static uint64_t small_arrays[GPUFENCE_GPUS]; /* bytes */

static uint64_t blocks_of(uint64_t bytes) { return (bytes + CHARGE_BLOCK_BYTES - 1) / CHARGE_BLOCK_BYTES; }

bool charge_array_small(int gpu, const char *call, uint64_t bytes)
{
	if (gpu < 0)
		return true;
	/* Whoever adds to the sum pays for the blocks that this opens. */
	uint64_t before = __atomic_fetch_add(&small_arrays[gpu], bytes, __ATOMIC_ACQ_REL);
	uint64_t opens = blocks_of(before + bytes) - blocks_of(before);
	if (opens == 0 || charge_reserve(gpu, ACCOUNT_DEVICE, opens * CHARGE_BLOCK_BYTES) == 0)
		return true;
	before = __atomic_fetch_sub(&small_arrays[gpu], bytes, __ATOMIC_ACQ_REL);
	uint64_t closes = blocks_of(before) - blocks_of(before - bytes);
	/* Others may have counted on the block in between: then it is theirs. */
	if (closes < opens)
		account_charge(gpu, ACCOUNT_DEVICE, (opens - closes) * CHARGE_BLOCK_BYTES);
	else
		account_release(gpu, ACCOUNT_DEVICE, (closes - opens) * CHARGE_BLOCK_BYTES);
	charge_refused(gpu, call, bytes);
	return false;
}

void charge_array_small_gone(int gpu, uint64_t bytes)
{
	if (gpu < 0)
		return;
	uint64_t before = __atomic_fetch_sub(&small_arrays[gpu], bytes, __ATOMIC_ACQ_REL);
	account_release(gpu, ACCOUNT_DEVICE, (blocks_of(before) - blocks_of(before - bytes)) * CHARGE_BLOCK_BYTES);
}

void charge_track(const struct track_block *b, const char *what)
{
	struct track_block stale;
	int r = track_replace(b, &stale);
	/* If there is no memory for the table, the block stays charged until the process ends. */
	if (r < 0)
		debug_line(what, "not tracked, out of host memory", b->bytes);
	/* Of spilled memory the entry at that address is the new one's by now: it stays charged. */
	if (r <= 0 || stale.kind == TRACK_SWAP)
		return;
	charge_undo(&stale);
}

void charge_undo(const struct track_block *b)
{
	switch ((enum track_kind)b->kind) {
	case TRACK_SMALL:
		if (track_small_leave(b->gpu, b->pointer))
			account_release(b->gpu, ACCOUNT_DEVICE, CHARGE_BLOCK_BYTES);
		break;
	case TRACK_MANAGED:
		account_release(b->gpu, ACCOUNT_MANAGED, b->bytes);
		break;
	case TRACK_SWAP:
		account_release(b->gpu, swap_gone(b->pointer) ? ACCOUNT_SWAP : ACCOUNT_MANAGED, b->bytes);
		break;
	case TRACK_PIECE:
		/* Whoever saw it freed says so itself. */
		kept_freed(b, KEPT_NO_PLACE, KEPT_ANY_STREAM);
		break;
	case TRACK_ARRAY:
		charge_array_small_gone(b->gpu, b->bytes);
		break;
	case TRACK_DEVICE:
		account_release(b->gpu, ACCOUNT_DEVICE, b->bytes);
		break;
	}
	account_count_free();
}
