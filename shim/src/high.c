/* SPDX-License-Identifier: Apache-2.0 */
#include "high.h"

#include "kept.h"
#include "pages.h"

#define MS UINT64_C(1000000)
#define MOST_NS (2000 * MS)
/* How often somebody who waits looks whether there still is a reason. */
#define LOOK_NS (50 * MS)

static uint64_t delay(uint64_t over, uint64_t high)
{
	if (over == 0)
		return 0;
	/* 10 ms x (over/high x 100)^2 / 100 */
	double share = high == 0 ? 2 : (double)over / (double)high;
	return share >= 1.4143 ? MOST_NS : (uint64_t)(share * share * 1000 * (double)MS);
}

uint64_t high_delay_ns(const struct account_high *high)
{
	uint64_t own = delay(high->over_bytes, high->high_bytes), pod = delay(high->pod_over_bytes, high->pod_high_bytes);
	uint64_t most = own > pod ? own : pod;
	return most < MOST_NS ? most : MOST_NS;
}

__attribute__((noinline)) void high_slow(int gpu)
{
	struct account_high high;
	(void)kept_give_back(gpu);
	if (!account_above_high(gpu, &high))
		return;
	account_event(gpu, ACCOUNT_EVENT_HIGH);
	uint64_t begin = pages_now_ns(), wait = high_delay_ns(&high), now = begin;
	/* A signal may cut a sleep short; memory that others free, or a higher limit, ends it. */
	while (now - begin < wait && account_above_high(gpu, &high)) {
		uint64_t left = wait - (now - begin);
		pages_sleep_ns(left < LOOK_NS ? left : LOOK_NS);
		now = pages_now_ns();
	}
	account_throttled(gpu, now - begin);
}
