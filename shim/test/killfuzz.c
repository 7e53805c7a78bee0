/* SPDX-License-Identifier: Apache-2.0 */
/*
 * killfuzz.c: 16 processes allocate and free on one ledger through account.h and are killed at
 * random. The parent plays gpufenced: it reaps, finds the slot's lock free, and frees the slot.
 * In a second phase it is away, and the processes take over from the dead themselves.
 *
 *	killfuzz [seconds [soak]]
 *
 * Always: afterwards the ledger sums to 0, every lock is free, nobody hung. With soak: no reserve
 * took longer than 100 ms of wall time.
 */
#include <errno.h>
#include <signal.h>
#include <time.h>

#include "../src/account.h"
#include "../src/limits.h"
#include "../src/pages.h"
#include "pages_builder.h"
#include "unit.h"

#define WORKERS 16
#define MIB (UINT64_C(1) << 20)
#define MAX (256 * MIB)
#define BUCKETS 128 /* two for each power of two of nanoseconds */
#define HANG_NS UINT64_C(20000000000)

static struct shared {
	uint64_t reserves, refusals;
	uint64_t longest_wall_ns, longest_cpu_ns;
	uint64_t histogram[BUCKETS];
	uint64_t busy_since_ns[WORKERS]; /* 0: not in a call */
	uint64_t done[WORKERS];
} *shared;

static struct builder b;
static double seconds = 5;
static int soak;
static uint64_t kills;

static uint64_t clock_ns(clockid_t id)
{
	struct timespec t;
	clock_gettime(id, &t);
	return (uint64_t)t.tv_sec * UINT64_C(1000000000) + (uint64_t)t.tv_nsec;
}

static void raise_to(uint64_t *to, uint64_t value)
{
	uint64_t now = __atomic_load_n(to, __ATOMIC_RELAXED);
	while (now < value && !__atomic_compare_exchange_n(to, &now, value, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED))
		;
}

static unsigned bucket(uint64_t ns)
{
	unsigned octave = 63 - (unsigned)__builtin_clzll(ns | 1);
	unsigned part = octave < 1 ? 0 : (unsigned)(ns >> (octave - 1)) & 1;
	return octave * 2 + part;
}

/* The upper end of a bucket. */
static uint64_t bucket_ns(unsigned n)
{
	uint64_t base = UINT64_C(1) << (n / 2);
	return n % 2 == 0 ? base + base / 2 : 2 * base;
}

static uint64_t next(uint64_t *state)
{
	*state = *state * UINT64_C(6364136223846793005) + 1442695040888963407;
	return *state >> 24;
}

static void work(unsigned n)
{
	struct { enum account_counter counter; uint64_t bytes; } held[12];
	unsigned count = 0;
	uint8_t uuid[16];
	uint64_t state = (uint64_t)getpid() * UINT64_C(2654435761) + kills;
	builder_uuid(0, uuid);
	account_set_dir(b.dir);
	if (account_gpu(uuid) != 0)
		_exit(3);
	for (;;) {
		if (count < 12 && next(&state) % 100 < 55) {
			enum account_counter c = next(&state) % 4 == 0 ? ACCOUNT_MANAGED : ACCOUNT_DEVICE;
			uint64_t bytes = next(&state) % (8 * MIB) + 1;
			uint64_t cpu = clock_ns(CLOCK_THREAD_CPUTIME_ID), wall = clock_ns(CLOCK_MONOTONIC);
			__atomic_store_n(&shared->busy_since_ns[n], wall, __ATOMIC_RELAXED);
			int r = account_reserve(0, c, bytes);
			__atomic_store_n(&shared->busy_since_ns[n], 0, __ATOMIC_RELAXED);
			wall = clock_ns(CLOCK_MONOTONIC) - wall;
			cpu = clock_ns(CLOCK_THREAD_CPUTIME_ID) - cpu;
			raise_to(&shared->longest_wall_ns, wall);
			raise_to(&shared->longest_cpu_ns, cpu);
			__atomic_fetch_add(&shared->histogram[bucket(wall)], 1, __ATOMIC_RELAXED);
			__atomic_fetch_add(r == 0 ? &shared->reserves : &shared->refusals, 1, __ATOMIC_RELAXED);
			if (r == 0) {
				held[count].counter = c;
				held[count++].bytes = bytes;
				account_count_alloc();
			} else {
				account_event(0, ACCOUNT_EVENT_MAX);
			}
		} else if (count > 0) {
			unsigned i = (unsigned)(next(&state) % count);
			account_release(0, held[i].counter, held[i].bytes);
			held[i] = held[--count];
			account_count_free();
		}
		__atomic_fetch_add(&shared->done[n], 1, __ATOMIC_RELAXED);
	}
}

static pid_t spawn(unsigned n)
{
	fflush(NULL);
	pid_t pid = fork();
	if (pid == 0)
		work(n);
	if (pid < 0)
		unit_fail("cannot fork: %s", strerror(errno));
	__atomic_store_n(&shared->busy_since_ns[n], 0, __ATOMIC_RELAXED);
	return pid;
}

static void end(pid_t pid, bool reclaim)
{
	int status;
	CHECK(kill(pid, SIGKILL) == 0);
	CHECK(waitpid(pid, &status, 0) == pid);
	if (!WIFSIGNALED(status))
		unit_fail("a worker ended by itself, with status %#x", status);
	for (uint32_t i = 0; reclaim && i < b.options.slots; i++) {
		uint64_t owner = __atomic_load_n(&builder_slot(&b, i)->owner, __ATOMIC_SEQ_CST);
		if ((owner >> 32 & 0xff) != GPUFENCE_SLOT_FREE && (uint32_t)owner == (uint32_t)pid)
			CHECK(builder_reclaim(&b, i, false)); /* whose owner exited has a free lock */
	}
}

static void fuzz(uint32_t slots, double duration, bool away)
{
	pid_t pid[WORKERS];
	uint64_t state = (uint64_t)time(NULL), begin = clock_ns(CLOCK_MONOTONIC);
	limits_stale_ns = away ? UINT64_C(200000000) : GPUFENCE_STALE_NS;
	builder_init(&b, &(struct builder_options){ .slots = slots });
	builder_limit(&b, MAX, MAX);
	for (unsigned i = 0; i < WORKERS; i++)
		pid[i] = spawn(i);
	for (uint64_t now = begin; (double)(now - begin) < duration * 1e9; now = clock_ns(CLOCK_MONOTONIC)) {
		pages_sleep_ns(next(&state) % 4000000);
		if (!away)
			__atomic_fetch_add(&builder_limits(&b)->heartbeat, 1, __ATOMIC_SEQ_CST);
		for (unsigned i = 0; i < WORKERS; i++) {
			uint64_t since = __atomic_load_n(&shared->busy_since_ns[i], __ATOMIC_RELAXED);
			if (since != 0 && now > since && now - since > HANG_NS)
				unit_fail("worker %u is in a reserve for 20 s", i);
		}
		unsigned i = (unsigned)(next(&state) % WORKERS);
		end(pid[i], !away);
		kills++;
		pid[i] = spawn(i);
		if (!away && next(&state) % 8 == 0)
			builder_clear_overflow(&b);
	}
	if (away) {
		/* Long enough for those that live to see that nobody beats, and then nobody may starve
		 * behind the dead. */
		pages_sleep_ns(UINT64_C(1000000000));
		uint64_t before = __atomic_load_n(&shared->reserves, __ATOMIC_RELAXED), waited = 0;
		while (__atomic_load_n(&shared->reserves, __ATOMIC_RELAXED) < before + 100 && waited < HANG_NS) {
			pages_sleep_ns(UINT64_C(10000000));
			waited += UINT64_C(10000000);
		}
		CHECK(waited < HANG_NS);
	}
	for (unsigned i = 0; i < WORKERS; i++)
		end(pid[i], !away);
	for (uint32_t i = 0; i < slots; i++) {
		CHECK(builder_lock_free(&b, i));
		if (away)
			builder_reclaim(&b, i, false);
	}
	CHECK(builder_clear_overflow(&b));
	CHECK_U64(builder_charged(&b, 0), 0);
	CHECK_U64(builder_live(&b), 0);
	builder_remove(&b);
}

static void report(void)
{
	uint64_t total = 0, seen = 0, p50 = 0, p99 = 0;
	for (unsigned i = 0; i < BUCKETS; i++)
		total += shared->histogram[i];
	for (unsigned i = 0; i < BUCKETS; i++) {
		seen += shared->histogram[i];
		if (p50 == 0 && seen * 2 >= total)
			p50 = bucket_ns(i);
		if (p99 == 0 && seen * 100 >= total * 99)
			p99 = bucket_ns(i);
	}
	printf("# kills %llu, reserves %llu, refused %llu, reserve time: median <= %.1f us, p99 <= %.1f us, longest %.1f ms wall, %.1f ms cpu\n",
	       (unsigned long long)kills, (unsigned long long)shared->reserves, (unsigned long long)shared->refusals,
	       (double)p50 / 1e3, (double)p99 / 1e3, (double)shared->longest_wall_ns / 1e6,
	       (double)shared->longest_cpu_ns / 1e6);
	fflush(stdout);
	CHECK(kills > 0 && shared->reserves > 0 && shared->refusals > 0);
	if (soak && shared->longest_wall_ns > UINT64_C(100000000))
		unit_fail("a reserve took %.1f ms", (double)shared->longest_wall_ns / 1e6);
}

static void run(uint32_t slots, double duration, bool away)
{
	shared = mmap(NULL, sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	CHECK(shared != MAP_FAILED);
	alarm((unsigned)(seconds * 3) + UNIT_TIMEOUT_SECONDS);
	fuzz(slots, duration, away);
	report();
}

static void with_gpufenced(void) { run(64, seconds * 0.6, false); }
static void without_gpufenced(void) { run(64, seconds * 0.2, true); }
static void in_overflow(void) { run(6, seconds * 0.2, false); }

int main(int argc, char **argv)
{
	static const struct unit_test tests[] = {
		{ "killfuzz: gpufenced reclaims", with_gpufenced },
		{ "killfuzz: gpufenced is away", without_gpufenced },
		{ "killfuzz: fewer slots than processes", in_overflow },
		{ NULL, NULL },
	};
	if (argc > 1)
		seconds = atof(argv[1]);
	soak = argc > 2 && strcmp(argv[2], "soak") == 0;
	if (seconds <= 0) {
		fprintf(stderr, "usage: killfuzz [seconds [soak]]\n");
		return 2;
	}
	return unit_main(tests, 1, argv);
}
