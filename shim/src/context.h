/* SPDX-License-Identifier: Apache-2.0 */
/*
 * context.h: the contexts whose memory this process is charged for. A context's handle is used
 * again after it is gone, so blocks are tracked under an owner number that is not.
 */
#ifndef GPUFENCE_CONTEXT_H
#define GPUFENCE_CONTEXT_H

#include <stdbool.h>
#include <stdint.h>

#include "driver_api.h"

struct context {
	uintptr_t handle;
	uint64_t owner;
	uint64_t memory; /* what its blocks are tracked under: its own number, or of a green one the primary context's */
	uint64_t bytes; /* charged for the context itself */
	int64_t grown;  /* by its limits: stacks, heap, printing */
	int gpu;
	int primary;       /* green: the device whose primary context it keeps; else -1 */
	uint32_t attached; /* cuCtxAttach: so many cuCtxDetach before the one that destroys it */
};

/* What the blocks of a context are tracked under; 0: a context that we do not know. */
uint64_t context_owner(CUcontext handle);

/* Remembers a new context and returns its owner number. A known one of the same handle is gone
 * and is settled. */
uint64_t context_put(CUcontext handle, int gpu, uint64_t bytes);
/* The same for a green one, that keeps a device's primary context (owner number memory), to which
 * belongs what is allocated, loaded and set while it is current: a green one has multiprocessors, no memory. */
void context_put_green(CUcontext handle, int gpu, uint64_t bytes, CUdevice primary, uint64_t memory);

/* Says that a context's limits make it larger by so much, and returns by how much they had. What
 * is charged for that is context_grown_bytes of the sum. */
int64_t context_grow(CUcontext handle, int64_t bytes);
uint64_t context_grown_bytes(int64_t grown);

/* One cuCtxDetach more until it is destroyed. */
void context_attach(CUcontext handle);
/* One less; false: this one destroys it, or it is unknown. */
bool context_detach(CUcontext handle);

/* Takes the context out of the table; false if unknown. */
bool context_take(CUcontext handle, struct context *context);
bool context_take_owner(uint64_t owner, struct context *context);

/* Puts back what was taken, when the driver did not destroy it. */
void context_restore(const struct context *context);

/* Uncharges a context that is gone, and its blocks. */
void context_settle(const struct context *context);

#endif
