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

#endif
