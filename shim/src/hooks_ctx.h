/* SPDX-License-Identifier: Apache-2.0 */
/* hooks_ctx.h: what other hooks need of how contexts are charged. */
#ifndef GPUFENCE_HOOKS_CTX_H
#define GPUFENCE_HOOKS_CTX_H

#include <stdbool.h>
#include <stdint.h>

#include "driver_api.h"

struct creation {
	int gpu;
	uint64_t bytes;
};

/* Charges what a context costs. False: refused by a limit, and counted. */
bool creation_begin(struct creation *creation, const char *call, CUdevice device);
/* Keeps it for the context that was made, or gives it back. Returns result. */
CUresult creation_end(const struct creation *creation, CUresult result, const CUcontext *context);

/* A call that keeps the primary context of a device. */
struct primary_hold {
	const char *call;
	CUdevice device;
	bool reserved;
	struct creation creation;
};

/* False: refused by a limit, and counted. */
bool primary_begin(struct primary_hold *hold, const char *call, CUdevice device);
CUresult primary_failed(const struct primary_hold *hold, CUresult result);
/* The call is not made. */
void primary_undo(const struct primary_hold *hold);
/* The driver keeps it. False: it is a new one, and refused; the caller lets it go at the driver. */
bool primary_end(struct primary_hold *hold, CUcontext context);

/* Which primary context it is, to be asked before the driver lets it go; and afterwards. */
uint64_t primary_owner(CUdevice device);
void primary_released(CUdevice device, uint64_t owner);

#endif
