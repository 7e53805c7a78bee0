/* SPDX-License-Identifier: Apache-2.0 */
/*
 * high.h: memory.high. Whoever charges above it is slowed, the more the further above: by
 * 1 s x (overage / high)^2, at most 2 s. It never makes a call fail, and no lock is held.
 */
#ifndef GPUFENCE_HIGH_H
#define GPUFENCE_HIGH_H

#include <stdbool.h>
#include <stdint.h>

#include "account.h"
#include "driver_api.h"

/* What the limits ask for; 0: nothing is above. */
uint64_t high_delay_ns(const struct account_high *high);

/* After a charge: gives back what the driver keeps for later, and waits if it is still above. */
void high_slow(int gpu);
static inline void high_after_charge(int gpu)
{
	struct account_high high;
	if (__builtin_expect(account_above_high(gpu, &high), 0))
		high_slow(gpu);
}

/*
 * After a launch that the driver took, unless account_calm() said before it that nothing is above:
 * waits as an allocation would, but 1 ms at most. Not while the stream captures, when nothing runs.
 * After the launch, not before: one that fails (in a callback of the driver's, say) is not slowed,
 * and what is asked of the driver here is asked where it may be.
 */
void high_launched(CUstream stream, bool per_thread);
void high_launched_list(const CUDA_LAUNCH_PARAMS *list, unsigned int count);

#endif
