/* SPDX-License-Identifier: Apache-2.0 */
/*
 * unit_steps.c: threads of one process that overtake each other at the worst moments, one after
 * the other instead of by luck: the accounts are compiled in with their steps exposed, and at a
 * chosen one a thread stands still while others do whole calls.
 */
#include <pthread.h>
#include <stdbool.h>

enum step { NOWHERE, READ, ANNOUNCED, JUDGED, COMMITTED, TAKEN, STEPS };
static void at_step(enum step step);
#define ACCOUNT_STEP(step) at_step(step)

#include "../src/account.c"

#include "pages_builder.h"
#include "unit.h"

#define UNIT GPUFENCE_UNIT_BYTES

static struct builder b;
static enum step stop_at;
static bool stopped;
static void (*meanwhile)(void);
static pthread_t stopping;

static void *run(void *arg)
{
	void (*f)(void);
	memcpy(&f, arg, sizeof f);
	f();
	return NULL;
}

static void in_another_thread(void (*f)(void))
{
	pthread_t t;
	CHECK(pthread_create(&t, NULL, run, (void *)&f) == 0);
	CHECK(pthread_join(t, NULL) == 0);
}

static void at_step(enum step step)
{
	/* Once, and only the thread that was chosen. */
	if (step != stop_at || !pthread_equal(stopping, pthread_self()))
		return;
	stop_at = NOWHERE;
	stopped = true;
	in_another_thread(meanwhile);
}

static void start(uint32_t slots, uint64_t max_bytes)
{
	uint8_t uuid[16];
	builder_uuid(0, uuid);
	builder_init(&b, &(struct builder_options){ .slots = slots });
	builder_limit(&b, max_bytes, GPUFENCE_UNLIMITED);
	account_set_dir(b.dir);
	CHECK_INT(account_gpu(uuid), 0);
}

static void reserve(uint64_t units) { CHECK_INT(account_reserve(0, ACCOUNT_DEVICE, units * UNIT), 0); }
static void release(uint64_t units) { account_release(0, ACCOUNT_DEVICE, units * UNIT); }

static void stop(enum step step, void (*f)(void))
{
	meanwhile = f;
	stopping = pthread_self();
	stopped = false;
	stop_at = step;
}

static uint64_t charged(void) { return builder_charged(&b, 0) / UNIT; }

static void lose_and_reserve(void)
{
	CHECK(builder_reclaim_pid(&b, (uint32_t)getpid()) == 1);
	reserve(100);
}

static void lose_and_release(void)
{
	CHECK(builder_reclaim_pid(&b, (uint32_t)getpid()) == 1);
	release(200);
}

static void lose_twice(void)
{
	lose_and_reserve();
	lose_and_release();
}

static void slot_lost_in_a_reserve(void)
{
	static const struct { void (*f)(void); uint64_t more, less; } others[] = {
		{ lose_and_reserve, 100, 0 }, { lose_and_release, 0, 200 }, { lose_twice, 100, 200 },
	};
	for (enum step step = READ; step <= COMMITTED; step++) {
		for (unsigned i = 0; i < 3; i++) {
			start(8, GPUFENCE_UNLIMITED);
			reserve(1000);
			uint64_t before = charged();
			stop(step, others[i].f);
			reserve(7);
			CHECK(stopped);
			CHECK_U64(charged(), before + 7 + others[i].more - others[i].less);
			release(7);
			CHECK_U64(charged(), before + others[i].more - others[i].less);
			release(before + others[i].more - others[i].less);
			CHECK_U64(charged(), 0);
			builder_remove(&b);
			/* The next round is another process. */
			__atomic_store_n(&memory.memory, NULL, __ATOMIC_SEQ_CST);
		}
	}
}

static void slot_lost_in_a_release(void)
{
	static const enum step steps[] = { READ, TAKEN };
	static const struct { void (*f)(void); uint64_t more, less; } others[] = {
		{ lose_and_reserve, 100, 0 }, { lose_and_release, 0, 200 }, { lose_twice, 100, 200 },
	};
	for (unsigned s = 0; s < 2; s++) {
		for (unsigned i = 0; i < 3; i++) {
			start(8, GPUFENCE_UNLIMITED);
			reserve(1000);
			stop(steps[s], others[i].f);
			release(7);
			CHECK(stopped);
			CHECK_U64(charged(), 993 + others[i].more - others[i].less);
			release(993 + others[i].more - others[i].less);
			CHECK_U64(charged(), 0);
			builder_remove(&b);
			__atomic_store_n(&memory.memory, NULL, __ATOMIC_SEQ_CST);
		}
	}
}

/* From the overflow slot to the real one, which has become free. */
static bool overflow_lock_kept;

static void move_out(void)
{
	/* The lock on the former slot went with it. */
	leave_overflow(process());
	CHECK_U64(builder_live(&b), 1);
	overflow_lock_kept = !builder_lock_free(&b, 1);
}

static void into_overflow(void)
{
	start(1, GPUFENCE_UNLIMITED);
	reserve(1000);
	CHECK(builder_reclaim(&b, 0, true));
	reserve(1); /* its own lock is still on the slot while it looks for another */
	CHECK_U64(builder_live(&b), 0);
	CHECK_U64(builder_slot(&b, 1)->gpu[0].device, 1001);
}

static void moved_in_a_reserve(void)
{
	for (enum step step = READ; step <= COMMITTED; step++) {
		into_overflow();
		stop(step, move_out);
		reserve(7);
		CHECK(stopped);
		/* While a thread is at the overflow slot, nobody may clear it. */
		CHECK(overflow_lock_kept == (step != READ));
		CHECK_U64(builder_slot(&b, 1)->gpu[0].device, 0);
		CHECK_U64(charged(), 1008);
		release(1008);
		CHECK_U64(charged(), 0);
		builder_remove(&b);
		__atomic_store_n(&memory.memory, NULL, __ATOMIC_SEQ_CST);
	}
}

static void moved_in_a_release(void)
{
	static const enum step steps[] = { READ, TAKEN };
	for (unsigned s = 0; s < 2; s++) {
		into_overflow();
		stop(steps[s], move_out);
		release(7);
		CHECK(stopped);
		CHECK(overflow_lock_kept == (steps[s] != READ));
		CHECK_U64(builder_slot(&b, 1)->gpu[0].device, 0);
		CHECK_U64(charged(), 994);
		release(994);
		CHECK_U64(charged(), 0);
		builder_remove(&b);
		__atomic_store_n(&memory.memory, NULL, __ATOMIC_SEQ_CST);
	}
}

/* Moved out before it even entered: nothing of it may ever be seen in the overflow slot. */
static void watch_overflow(void)
{
	CHECK_U64(builder_slot(&b, 1)->gpu[0].device, 0);
}

static void move_out_and_watch(void)
{
	move_out();
	meanwhile = watch_overflow;
	stop_at = ANNOUNCED;
}

static void never_enters_a_slot_that_was_left(void)
{
	into_overflow();
	stop(READ, move_out_and_watch);
	reserve(7);
	CHECK(stop_at == NOWHERE);
	CHECK_U64(charged(), 1008);
	builder_remove(&b);
}

/* Two that announce together at the limit: both withdraw, and then both find room in turn, or
 * one is refused; never do both get what only one may have. */
static int second;

static void reserve_too(void) { second = account_reserve(0, ACCOUNT_DEVICE, 6 * UNIT); }

static void two_at_the_limit(void)
{
	for (enum step step = READ; step <= COMMITTED; step++) {
		start(4, 10 * UNIT);
		stop(step, reserve_too);
		int first = account_reserve(0, ACCOUNT_DEVICE, 6 * UNIT);
		CHECK(stopped);
		CHECK(first == 0 || second == 0 || step == ANNOUNCED || step == JUDGED);
		CHECK(!(first == 0 && second == 0));
		CHECK_U64(charged(), first == 0 || second == 0 ? 6 : 0);
		builder_remove(&b);
		__atomic_store_n(&memory.memory, NULL, __ATOMIC_SEQ_CST);
	}
}

/* Without a ledger the totals are announced in, and go along when the ledger is there again. */
static void bring_the_ledger_back(void)
{
	char from[320], to[320];
	snprintf(from, sizeof from, "%s/away", b.dir);
	snprintf(to, sizeof to, "%s/ledger", b.dir);
	CHECK(rename(from, to) == 0);
	register_again(process(), process()->registration);
	CHECK_U64(builder_live(&b), 1);
}

static void moved_out_of_private(bool within)
{
	char from[320], to[320];
	start(4, 100 * UNIT);
	snprintf(to, sizeof to, "%s/away", b.dir);
	snprintf(from, sizeof from, "%s/ledger", b.dir);
	CHECK(rename(from, to) == 0);
	reserve(50);
	CHECK_U64(builder_live(&b), 0);
	stop(ANNOUNCED, bring_the_ledger_back);
	CHECK_INT(account_reserve(0, ACCOUNT_DEVICE, (within ? 7 : 70) * UNIT), within ? 0 : -ENOMEM);
	CHECK(stopped);
	CHECK_U64(charged(), within ? 57 : 50);
	builder_remove(&b);
	__atomic_store_n(&memory.memory, NULL, __ATOMIC_SEQ_CST);
}

static void ledger_comes_back_in_a_reserve(void)
{
	moved_out_of_private(true);
	moved_out_of_private(false);
}

int main(int argc, char **argv)
{
	static const struct unit_test tests[] = {
		{ "steps: the slot is lost in a reserve", slot_lost_in_a_reserve },
		{ "steps: the slot is lost in a release", slot_lost_in_a_release },
		{ "steps: moved out of overflow in a reserve", moved_in_a_reserve },
		{ "steps: moved out of overflow in a release", moved_in_a_release },
		{ "steps: never enters a slot that was left", never_enters_a_slot_that_was_left },
		{ "steps: two at the limit", two_at_the_limit },
		{ "steps: the ledger comes back in a reserve", ledger_comes_back_in_a_reserve },
		{ NULL, NULL },
	};
	return unit_main(tests, argc, argv);
}
