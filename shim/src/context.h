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
	uint64_t bytes; /* charged for the context itself */
	int gpu;
};

/* What the blocks of a context are tracked under; 0: a context that we do not know. */
uint64_t context_owner(CUcontext handle);

/* Remembers a new context and returns its owner number. A known one of the same handle is gone
 * and is settled. */
uint64_t context_put(CUcontext handle, int gpu, uint64_t bytes);

/* Takes the context out of the table; false if unknown. */
bool context_take(CUcontext handle, struct context *context);
bool context_take_owner(uint64_t owner, struct context *context);

/* Puts back what was taken, when the driver did not destroy it. */
void context_restore(const struct context *context);

/* Uncharges a context that is gone, and its blocks. */
void context_settle(const struct context *context);

#endif
