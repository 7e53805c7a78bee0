/* SPDX-License-Identifier: Apache-2.0 */
/* unit_high.c: memory.high: who waits, for how long, and that nobody is refused. */
#include <errno.h>
#include <signal.h>
#include <sys/time.h>

#include "../src/account.h"
#include "../src/charge.h"
#include "../src/high.h"
#include "../src/pages.h"
#include "pages_builder.h"
#include "unit.h"

#define MIB (UINT64_C(1) << 20)
#define MS UINT64_C(1000000)
#define NONE GPUFENCE_UNLIMITED

static struct builder b;

static void publish(uint64_t high, uint64_t pod_high, bool fenced)
{
	struct gpufence_limits_gpu g = builder_gpu(0);
	g.high_bytes = high;
	g.pod_high_bytes = pod_high;
	if (!fenced)
		g.flags &= ~GPUFENCE_GPU_FENCED;
	builder_publish(&b, &g, 1);
}

static void begin(uint64_t high, uint64_t pod_high)
{
	uint8_t uuid[16];
	builder_init(&b, NULL);
	publish(high, pod_high, true);
	builder_uuid(0, uuid);
	account_set_dir(b.dir);
	CHECK_INT(account_gpu(uuid), 0);
}

static void end(void) { builder_remove(&b); }

/* Charges, and says how long that took. */
static uint64_t charge(uint64_t bytes)
{
	uint64_t from = pages_now_ns();
	CHECK_INT(charge_reserve(0, ACCOUNT_DEVICE, bytes), 0);
	return pages_now_ns() - from;
}

static void delays(void)
{
	static const struct {
		struct account_high high;
		uint64_t want_ns;
	} cases[] = {
		{ { 100 * MIB, 0, NONE, 0 }, 0 },
		{ { 100 * MIB, MIB, NONE, 0 }, 100000 },             /* 1 % */
		{ { 100 * MIB, 10 * MIB, NONE, 0 }, 10 * MS },       /* 10 % */
		{ { NONE, 0, 100 * MIB, 10 * MIB }, 10 * MS },       /* of the pod */
		{ { 100 * MIB, MIB, 100 * MIB, 20 * MIB }, 40 * MS }, /* the longer of both */
		{ { 100 * MIB, 100 * MIB, NONE, 0 }, 1000 * MS },
		{ { 100 * MIB, 150 * MIB, NONE, 0 }, 2000 * MS },
		{ { 1, UINT64_MAX - 1, NONE, 0 }, 2000 * MS },
		{ { 0, 1, NONE, 0 }, 2000 * MS },
		{ { UINT64_MAX - 1, 1, NONE, 0 }, 0 },
	};
	for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
		uint64_t got = high_delay_ns(&cases[i].high), want = cases[i].want_ns;
		if (got > want + want / 1000 || got + want / 1000 < want)
			unit_fail("case %zu: %llu ns, not %llu", i, (unsigned long long)got, (unsigned long long)want);
	}
}

static const struct gpufence_slot *slot(void) { return builder_slot(&b, 0); }

static void waits_and_counts(void)
{
	begin(100 * MIB, NONE);
	charge(100 * MIB);
	CHECK_U64(slot()->gpu[0].events_high, 0);
	CHECK(charge(20 * MIB) >= 40 * MS);
	CHECK_U64(slot()->gpu[0].events_high, 1);
	CHECK(slot()->throttled_ms[0] >= 40);
	CHECK_U64(slot()->throttled_ms[1], 0);
	CHECK(charge(10 * MIB) >= 90 * MS);
	CHECK_U64(slot()->gpu[0].events_high, 2);
	CHECK(slot()->throttled_ms[0] >= 130);
	CHECK_U64(slot()->gpu[0].events_max, 0);
	CHECK_U64(builder_charged(&b, 0), 130 * MIB);
	/* Below it again, nobody waits. */
	account_release(0, ACCOUNT_DEVICE, 60 * MIB);
	charge(MIB);
	CHECK_U64(slot()->gpu[0].events_high, 2);
	end();
}

static void small_delays_add_up(void)
{
	begin(100 * MIB, NONE);
	charge(101 * MIB);
	for (int i = 0; i < 40; i++) { /* 100 us and more each */
		charge(4096);
		account_release(0, ACCOUNT_DEVICE, 4096);
	}
	CHECK(slot()->throttled_ms[0] >= 4);
	end();
}

static void counter_stops(void)
{
	begin(100 * MIB, NONE);
	charge(MIB);
	builder_slot(&b, 0)->throttled_ms[0] = UINT32_MAX - 1;
	account_throttled(0, 5 * MS);
	CHECK_U64(slot()->throttled_ms[0], UINT32_MAX);
	account_throttled(-1, 5 * MS);
	CHECK_U64(slot()->throttled_ms[1], 0);
	end();
}

static void of_the_pod(void)
{
	begin(NONE, 100 * MIB);
	charge(100 * MIB);
	CHECK(charge(20 * MIB) >= 40 * MS);
	CHECK_U64(slot()->gpu[0].events_high, 1);
	end();
}

static void observed_is_not_slowed(void)
{
	begin(100 * MIB, NONE);
	publish(100 * MIB, 100 * MIB, false);
	charge(400 * MIB);
	CHECK_U64(slot()->gpu[0].events_high, 0);
	CHECK_U64(slot()->throttled_ms[0], 0);
	end();
}

static void on_signal(int sig) { (void)sig; }

static void signals_do_not_cut_it_short(void)
{
	struct sigaction act = { .sa_handler = on_signal };
	struct itimerval every = { { 0, 3000 }, { 0, 3000 } };
	begin(100 * MIB, NONE);
	CHECK(sigaction(SIGALRM, &act, NULL) == 0);
	CHECK(setitimer(ITIMER_REAL, &every, NULL) == 0);
	errno = 1234;
	CHECK(charge(140 * MIB) >= 160 * MS);
	CHECK_INT(errno, 1234);
	end();
}

static void a_higher_limit_ends_it(void)
{
	pid_t pid;
	uint64_t *raised = mmap(NULL, sizeof *raised, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	CHECK(raised != MAP_FAILED);
	begin(100 * MIB, NONE);
	CHILD(pid, {
		/* It counts before it waits. */
		while (__atomic_load_n(&slot()->gpu[0].events_high, __ATOMIC_SEQ_CST) == 0)
			pages_sleep_ns(MS);
		pages_sleep_ns(100 * MS);
		__atomic_store_n(raised, pages_now_ns(), __ATOMIC_SEQ_CST);
		publish(NONE, NONE, true);
	});
	uint64_t from = pages_now_ns(), took = charge(300 * MIB), when = __atomic_load_n(raised, __ATOMIC_SEQ_CST);
	/* Without it, 2 s; and so long too if this machine let the other process wait for a core. */
	CHECK(took < 1900 * MS || when - from > 900 * MS);
	CHECK(when != 0 && from + took >= when);
	unit_reap(pid, 0);
	end();
}

/* ---- what launches look at ---- */

/* Launches look once, and then only when something may have changed. */
static void launches_look_when_it_changed(void)
{
	pid_t pid;
	int go[2], ready[2];
	char c = 0;
	CHECK(pipe(go) == 0 && pipe(ready) == 0);
	CHECK(account_calm()); /* nothing is open */
	begin(100 * MIB, NONE);
	CHECK(!account_calm());
	CHECK_U64(account_look(), 0);
	CHECK(account_calm());
	charge(90 * MIB);
	CHECK_U64(account_look(), 0); /* it has a slot now, and looks there */
	CHECK(account_calm());
	charge(10 * MIB);
	CHECK(account_calm()); /* charges below it do not concern launches */
	/* Another process of the container crosses it, and goes back. */
	CHILD(pid, {
		uint8_t uuid[16];
		builder_uuid(0, uuid);
		CHECK_INT(account_gpu(uuid), 0);
		CHECK_INT(charge_reserve(0, ACCOUNT_DEVICE, 10 * MIB), 0);
		CHECK(write(ready[1], &c, 1) == 1 && read(go[0], &c, 1) == 1);
		account_release(0, ACCOUNT_DEVICE, 10 * MIB);
		CHECK(write(ready[1], &c, 1) == 1 && read(go[0], &c, 1) == 1);
	});
	CHECK(read(ready[0], &c, 1) == 1);
	CHECK(!account_calm());
	CHECK_U64(account_look(), 1);
	CHECK(!account_calm()); /* for as long as it lasts */
	CHECK(write(go[1], &c, 1) == 1 && read(ready[0], &c, 1) == 1);
	CHECK(!account_calm());
	CHECK_U64(account_look(), 0);
	CHECK(account_calm());
	/* The limit comes down to what is charged. */
	publish(50 * MIB, NONE, true);
	CHECK(!account_calm());
	CHECK_U64(account_look(), 1);
	/* Where limits are only observed, nobody waits. */
	publish(50 * MIB, NONE, false);
	CHECK_U64(account_look(), 0);
	CHECK(account_calm());
	/* Neither by a pod's. */
	publish(NONE, 50 * MIB, true);
	CHECK(!account_calm());
	CHECK_U64(account_look(), 1);
	CHECK(write(go[1], &c, 1) == 1);
	unit_reap(pid, 0);
	end();
}

/* A fork child has not opened the pages, and must not touch its parent's. */
static void launches_of_a_fork_child(void)
{
	pid_t pid;
	begin(100 * MIB, NONE);
	charge(110 * MIB);
	CHECK(!account_calm());
	CHECK_U64(account_look(), 1);
	CHILD(pid, {
		CHECK(account_calm());
		CHECK_U64(account_look(), 0);
		CHECK_INT(charge_reserve(0, ACCOUNT_DEVICE, 4096), 0);
		CHECK(!account_calm());
		CHECK_U64(account_look(), 1);
	});
	unit_reap(pid, 0);
	CHECK(!account_calm());
	end();
}

static void launches_without_wipe(void)
{
	pages_no_wipe = true;
	launches_of_a_fork_child();
}

static void launches_without_a_ledger(void)
{
	char path[320];
	builder_init(&b, NULL);
	publish(100 * MIB, NONE, true);
	snprintf(path, sizeof path, "%s/ledger", b.dir);
	CHECK(unlink(path) == 0);
	uint8_t uuid[16];
	builder_uuid(0, uuid);
	account_set_dir(b.dir);
	CHECK_INT(account_gpu(uuid), 0);
	charge(100 * MIB);
	CHECK_U64(account_look(), 0);
	CHECK(account_calm());
	charge(10 * MIB);
	CHECK(!account_calm());
	CHECK_U64(account_look(), 1);
	account_release(0, ACCOUNT_DEVICE, 10 * MIB);
	CHECK_U64(account_look(), 0);
	CHECK(account_calm());
	end();
}

/* Once it is known that the ledger was cut, no launch touches it. */
static void launches_with_a_cut_ledger(void)
{
	char path[320];
	begin(100 * MIB, NONE);
	struct gpufence_limits_gpu g = builder_gpu(0);
	g.max_bytes = g.high_bytes = 100 * MIB;
	builder_publish(&b, &g, 1);
	struct account_view v;
	CHECK(account_view(0, &v)); /* maps it */
	snprintf(path, sizeof path, "%s/ledger", b.dir);
	CHECK(truncate(path, 0) == 0);
	CHECK_INT(account_reserve(0, ACCOUNT_DEVICE, 101 * MIB), -ENOMEM);
	CHECK_INT(account_reserve(0, ACCOUNT_DEVICE, 100 * MIB), 0);
	CHECK_U64(account_look(), 0);
	CHECK(account_calm());
	g.max_bytes = NONE;
	builder_publish(&b, &g, 1);
	charge(10 * MIB);
	CHECK(!account_calm());
	CHECK_U64(account_look(), 1);
	end();
}

int main(int argc, char **argv)
{
	static const struct unit_test tests[] = {
		{ "high: how long", delays },
		{ "high: waits and counts", waits_and_counts },
		{ "high: small delays add up", small_delays_add_up },
		{ "high: the counter stops", counter_stops },
		{ "high: of the pod", of_the_pod },
		{ "high: observed is not slowed", observed_is_not_slowed },
		{ "high: signals do not cut it short", signals_do_not_cut_it_short },
		{ "high: a higher limit ends it", a_higher_limit_ends_it },
		{ "high: launches look when it changed", launches_look_when_it_changed },
		{ "high: launches of a fork child", launches_of_a_fork_child },
		{ "high: launches of a fork child without MADV_WIPEONFORK", launches_without_wipe },
		{ "high: launches without a ledger", launches_without_a_ledger },
		{ "high: launches with a cut ledger", launches_with_a_cut_ledger },
		{ NULL, NULL },
	};
	return unit_main(tests, argc, argv);
}
