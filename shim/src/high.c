/* SPDX-License-Identifier: Apache-2.0 */
#include "high.h"

#include "device.h"
#include "kept.h"
#include "pages.h"
#include "stream.h"

#define MS UINT64_C(1000000)
#define MOST_NS (2000 * MS)
/* How often somebody who waits looks whether there still is a reason. */
#define LOOK_NS (50 * MS)
#define LAUNCH_MOST_NS MS
/* Shorter waits of launches are put together: a sleep takes that much longer than it is to. */
#define LAUNCH_LEAST_NS (MS / 10)

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
	account_press();
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

/* How long a launch on this stream is to wait, and on which GPU. */
static uint64_t launch_delay(CUstream stream, bool per_thread, uint32_t above, int *gpu)
{
	struct account_high high;
	if (stream_captures(stream, per_thread))
		return 0;
	*gpu = device_gpu(stream_device(stream));
	if (*gpu < 0 || (above >> *gpu & 1) == 0 || !account_above_high(*gpu, &high))
		return 0;
	uint64_t wait = high_delay_ns(&high);
	return wait < LAUNCH_MOST_NS ? wait : LAUNCH_MOST_NS;
}

static void launch_wait(int gpu, uint64_t wait)
{
	static uint64_t owed;
	if (wait < LAUNCH_LEAST_NS) {
		uint64_t sum = __atomic_add_fetch(&owed, wait, __ATOMIC_RELAXED);
		if (sum < LAUNCH_LEAST_NS)
			return;
		/* Whoever takes it waits for all. */
		wait = __atomic_exchange_n(&owed, 0, __ATOMIC_RELAXED);
		if (wait == 0)
			return;
		if (wait > LAUNCH_MOST_NS)
			wait = LAUNCH_MOST_NS;
	}
	account_event(gpu, ACCOUNT_EVENT_HIGH);
	uint64_t begin = pages_now_ns(), now = begin;
	for (; now - begin < wait; now = pages_now_ns())
		pages_sleep_ns(wait - (now - begin));
	account_throttled(gpu, now - begin);
}

__attribute__((noinline)) void high_launched(CUstream stream, bool per_thread)
{
	uint32_t above = account_look();
	int gpu;
	uint64_t wait = above != 0 ? launch_delay(stream, per_thread, above, &gpu) : 0;
	if (wait != 0)
		launch_wait(gpu, wait);
}

/* One launch on several GPUs: once, for the furthest above. */
__attribute__((noinline)) void high_launched_list(const CUDA_LAUNCH_PARAMS *list, unsigned int count)
{
	uint32_t above = account_look();
	uint64_t most = 0;
	int on = -1, gpu;
	for (unsigned int i = 0; above != 0 && i < count; i++) {
		uint64_t wait = launch_delay(list[i].hStream, false, above, &gpu);
		if (wait > most) {
			most = wait;
			on = gpu;
		}
	}
	if (most != 0)
		launch_wait(on, most);
}
