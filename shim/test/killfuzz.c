/* SPDX-License-Identifier: Apache-2.0 */
/*
 * killfuzz.c: 16 processes allocate and free on one ledger through account.h and are killed at
 * random. The parent plays gpufenced: it reaps, finds the slot's lock free, and frees the slot.
 * In a second phase it is away, and the processes take over from the dead themselves.
 *
 *	killfuzz [seconds [soak]]
 *
 * Always: afterwards the ledger sums to 0, every lock is free, nobody hung. With soak: no reserve
 * took longer than 100 ms, apart from waiting for a core.
 */
#include <errno.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <time.h>

#include "../src/account.h"
#include "../src/limits.h"
#include "../src/pages.h"
#include "apart.h"
#include "pages_builder.h"
#include "unit.h"

#define WORKERS 16
#define MIB (UINT64_C(1) << 20)
#define MAX (256 * MIB)
#define BUCKETS 128 /* two for each power of two of nanoseconds */
#define HANG_NS UINT64_C(20000000000)
#define LONGEST_NS UINT64_C(100000000)

static struct shared {
	uint64_t reserves, refusals;
	uint64_t longest_wall_ns, longest_apart_ns, longest_cpu_ns;
	uint64_t histogram[BUCKETS];
	uint64_t busy_since_ns[WORKERS]; /* 0: not in a call */
	uint64_t done[WORKERS];
} *shared;

static struct builder b;
static double seconds = 5;
static int soak;
static uint64_t kills;

static uint64_t clock_ns(clockid_t id) { return apart_clock(id); }

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
			struct apart_moment begin = apart_now();
			__atomic_store_n(&shared->busy_since_ns[n], begin.wall_ns, __ATOMIC_RELAXED);
			int r = account_reserve(0, c, bytes);
			__atomic_store_n(&shared->busy_since_ns[n], 0, __ATOMIC_RELAXED);
			struct apart took = apart_since(&begin);
			apart_raise(&shared->longest_wall_ns, took.wall_ns);
			apart_raise(&shared->longest_apart_ns, took.apart_ns);
			apart_raise(&shared->longest_cpu_ns, took.cpu_ns);
			__atomic_fetch_add(&shared->histogram[bucket(took.apart_ns)], 1, __ATOMIC_RELAXED);
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
	printf("# kills %llu, reserves %llu, refused %llu, reserve time apart from waiting for a core: median <= %.1f us, p99 <= %.1f us, "
	       "longest %.1f ms (%.1f ms with waiting, %.1f ms running)\n",
	       (unsigned long long)kills, (unsigned long long)shared->reserves, (unsigned long long)shared->refusals,
	       (double)p50 / 1e3, (double)p99 / 1e3, (double)shared->longest_apart_ns / 1e6, (double)shared->longest_wall_ns / 1e6,
	       (double)shared->longest_cpu_ns / 1e6);
	fflush(stdout);
	CHECK(kills > 0 && shared->reserves > 0 && shared->refusals > 0);
	if (shared->longest_apart_ns > LONGEST_NS * (soak ? 1 : 20))
		unit_fail("a reserve took %.1f ms", (double)shared->longest_apart_ns / 1e6);
}

static void run(uint32_t slots, double duration, bool away)
{
	shared = mmap(NULL, sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	CHECK(shared != MAP_FAILED);
	CHECK(apart_waited() != UINT64_MAX);
	alarm((unsigned)(seconds * 3) + UNIT_TIMEOUT_SECONDS);
	fuzz(slots, duration, away);
	report();
}

static void with_gpufenced(void) { run(64, seconds * 0.6, false); }
static void without_gpufenced(void) { run(64, seconds * 0.2, true); }
static void in_overflow(void) { run(6, seconds * 0.2, false); }

static int stop_spinning;
static void *spin(void *arg)
{
	(void)arg;
	while (!__atomic_load_n(&stop_spinning, __ATOMIC_RELAXED))
		;
	return NULL;
}

/* The measure: asleep counts, ready to run but not running does not. */
static void measure(void)
{
	cpu_set_t one;
	pthread_t other;
	struct apart_moment begin = apart_now();
	struct apart took;
	pages_sleep_ns(30000000);
	took = apart_since(&begin);
	CHECK(took.apart_ns >= 30000000 && took.wall_ns >= took.apart_ns && took.cpu_ns < took.apart_ns);
	/* Two on one core. */
	CPU_ZERO(&one);
	CPU_SET((size_t)sched_getcpu(), &one);
	CHECK(sched_setaffinity(0, sizeof one, &one) == 0);
	CHECK(pthread_create(&other, NULL, spin, NULL) == 0);
	begin = apart_now();
	do
		took = apart_since(&begin);
	while (took.wall_ns - took.apart_ns < 50000000 && took.wall_ns < HANG_NS);
	__atomic_store_n(&stop_spinning, 1, __ATOMIC_RELAXED);
	CHECK(pthread_join(other, NULL) == 0);
	CHECK(took.wall_ns - took.apart_ns >= 50000000);
}

int main(int argc, char **argv)
{
	static const struct unit_test tests[] = {
		{ "killfuzz: what is measured", measure },
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
