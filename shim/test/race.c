/* SPDX-License-Identifier: Apache-2.0 */
/*
 * race.c: many at the limit at once. Each counts what it was granted in a counter of the test's
 * own, which must never be above the limit, whatever the ledger says; and somebody must get
 * something while there is room. The same test is run on a reserve that checks first and adds
 * then, and must catch it.
 *
 *	race [seconds [soak]]
 *
 * With soak somebody must get something in every 100 ms; otherwise 20 s without it are a hang.
 */
#include <errno.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>

#include "../src/account.h"
#include "../src/ledger.h"
#include "../src/pages.h"
#include "pages_builder.h"
#include "unit.h"

#define WORKERS 16
/* A sanitizer's process is too large for so many. */
#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
#define MANY 8
#else
#define MANY 64
#endif
#define THREADS 8
#define PROGRESS_NS UINT64_C(100000000)
#define HANG_NS UINT64_C(20000000000)
/* So many grants, and one refusal, say that there was a race. */
#define ENOUGH 100
#define MIB (UINT64_C(1) << 20)
#define CONTAINER_MAX (24 * MIB)
#define POD_MAX (32 * MIB)

enum { POD = 2 };

static struct shared {
	uint64_t granted[3]; /* of two containers and their pod */
	uint64_t most[3];
	uint64_t grants, refusals;
	uint64_t last_ns, longest_ns; /* of the last success, and the longest time without one before it */
	uint64_t over;
	int stop;
} *shared;

static struct builder builders[2];
static double seconds = 1;
static bool soak;
static int (*reserve)(uint64_t bytes);
static void (*release)(uint64_t bytes);

static int account_one(uint64_t bytes) { return account_reserve(0, ACCOUNT_DEVICE, bytes); }
static void release_one(uint64_t bytes) { account_release(0, ACCOUNT_DEVICE, bytes); }

/* What must be caught. */
static struct ledger broken_ledger;
static uint32_t broken_slot, broken_generation;

static int check_then_add(uint64_t bytes)
{
	struct ledger_sum sum = ledger_sum(&broken_ledger, 0, 0);
	if ((sum.pod_units + bytes / 4096) * 4096 > CONTAINER_MAX)
		return -ENOMEM;
	sched_yield();
	return ledger_add(&broken_ledger, broken_slot, broken_generation, 0, LEDGER_DEVICE, bytes / 4096);
}

static void release_broken(uint64_t bytes)
{
	ledger_sub(&broken_ledger, broken_slot, broken_generation, 0, LEDGER_DEVICE, bytes / 4096, NULL);
}

static void grant(unsigned level, uint64_t bytes, uint64_t max)
{
	uint64_t now = __atomic_add_fetch(&shared->granted[level], bytes, __ATOMIC_SEQ_CST);
	uint64_t most = __atomic_load_n(&shared->most[level], __ATOMIC_RELAXED);
	while (now > most && !__atomic_compare_exchange_n(&shared->most[level], &most, now, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED))
		;
	if (now > max)
		__atomic_fetch_add(&shared->over, 1, __ATOMIC_RELAXED);
}

/* Whoever succeeds says so himself: who looks on may be late. */
static void succeeded(void)
{
	uint64_t now = pages_now_ns(), last = __atomic_exchange_n(&shared->last_ns, now, __ATOMIC_RELAXED);
	uint64_t longest = __atomic_load_n(&shared->longest_ns, __ATOMIC_RELAXED);
	__atomic_fetch_add(&shared->grants, 1, __ATOMIC_RELAXED);
	while (last != 0 && now > last && now - last > longest &&
	       !__atomic_compare_exchange_n(&shared->longest_ns, &longest, now - last, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED))
		;
}

static void work(unsigned number, unsigned container)
{
	uint64_t state = number * UINT64_C(2654435761) + 12345;
	while (!__atomic_load_n(&shared->stop, __ATOMIC_RELAXED)) {
		state = state * UINT64_C(6364136223846793005) + 1442695040888963407;
		uint64_t bytes = (1 + (state >> 33) % 1024) * 4096 * 2;
		if (reserve(bytes) != 0) {
			__atomic_fetch_add(&shared->refusals, 1, __ATOMIC_RELAXED);
			continue;
		}
		succeeded();
		grant(container, bytes, CONTAINER_MAX);
		grant(POD, bytes, POD_MAX);
		if (state >> 60 == 0)
			sched_yield();
		__atomic_fetch_sub(&shared->granted[container], bytes, __ATOMIC_SEQ_CST);
		__atomic_fetch_sub(&shared->granted[POD], bytes, __ATOMIC_SEQ_CST);
		release(bytes);
	}
}

static void *work_in_thread(void *arg)
{
	work((unsigned)(uintptr_t)arg, 0);
	return NULL;
}

/* Beats like gpufenced, and watches that there is progress. */
static void watch(bool until_over)
{
	uint64_t begin = pages_now_ns(), longest = 0;
	/* However late the workers were to begin. */
	while ((double)(pages_now_ns() - begin) < seconds * 1e9 || __atomic_load_n(&shared->grants, __ATOMIC_RELAXED) <= ENOUGH ||
	       __atomic_load_n(&shared->refusals, __ATOMIC_RELAXED) == 0) {
		for (unsigned i = 0; i < 2; i++)
			if (builders[i].limits_page != NULL)
				__atomic_fetch_add(&builder_limits(&builders[i])->heartbeat, 1, __ATOMIC_SEQ_CST);
		if (until_over && __atomic_load_n(&shared->over, __ATOMIC_RELAXED) > 0)
			break;
		pages_sleep_ns(UINT64_C(5000000));
		uint64_t last = __atomic_load_n(&shared->last_ns, __ATOMIC_RELAXED), now = pages_now_ns();
		longest = __atomic_load_n(&shared->longest_ns, __ATOMIC_RELAXED);
		/* Or there is none at all any more. */
		if (last == 0)
			last = begin;
		if (now > last && now - last > longest && now - last > HANG_NS)
			longest = now - last;
		/* The reserve that is to be caught is looked at for hanging only. */
		if (longest > (soak && !until_over ? PROGRESS_NS : HANG_NS))
			unit_fail("no success for %.0f ms", (double)longest / 1e6);
	}
	printf("# longest time without a success: %.1f ms, of %llu successes\n", (double)longest / 1e6,
	       (unsigned long long)__atomic_load_n(&shared->grants, __ATOMIC_RELAXED));
	fflush(stdout);
	__atomic_store_n(&shared->stop, 1, __ATOMIC_RELAXED);
}

static void begin(void)
{
	shared = mmap(NULL, sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	CHECK(shared != MAP_FAILED);
	builder_init(&builders[0], NULL);
	builder_limit(&builders[0], CONTAINER_MAX, POD_MAX);
	reserve = account_one;
	release = release_one;
}

static void enter(unsigned container)
{
	uint8_t uuid[16];
	builder_uuid(0, uuid);
	account_set_dir(builders[container].dir);
	CHECK_INT(account_gpu(uuid), 0);
}

static void never_over(void)
{
	CHECK_U64(shared->over, 0);
	CHECK(shared->most[0] <= CONTAINER_MAX && shared->most[1] <= CONTAINER_MAX && shared->most[POD] <= POD_MAX);
	CHECK(shared->grants > ENOUGH);
	CHECK(shared->refusals > 0);
	CHECK_U64(builder_charged(&builders[0], 0), 0);
}

static void threads_at_the_limit(void)
{
	pthread_t t[WORKERS];
	begin();
	enter(0);
	for (uintptr_t i = 0; i < WORKERS; i++)
		CHECK(pthread_create(&t[i], NULL, work_in_thread, (void *)i) == 0);
	watch(false);
	for (int i = 0; i < WORKERS; i++)
		CHECK(pthread_join(t[i], NULL) == 0);
	never_over();
	builder_remove(&builders[0]);
}

static void run_processes(uint32_t slots)
{
	pid_t pid[WORKERS];
	begin();
	if (slots != 0) {
		builder_remove(&builders[0]);
		builder_init(&builders[0], &(struct builder_options){ .slots = slots });
		builder_limit(&builders[0], CONTAINER_MAX, POD_MAX);
	}
	builder_join(&builders[1], &builders[0], 1);
	builder_limit(&builders[1], CONTAINER_MAX, POD_MAX);
	for (unsigned i = 0; i < WORKERS; i++)
		CHILD(pid[i], enter(i % 2); work(i, i % 2));
	watch(false);
	for (int i = 0; i < WORKERS; i++)
		unit_reap(pid[i], 0);
	never_over();
	builder_remove(&builders[1]);
	builder_remove(&builders[0]);
}

static void processes_at_the_limit(void) { run_processes(0); }
static void processes_in_overflow(void) { run_processes(3); }

/* Each with several threads. */
static void *work_in_threads(void *arg)
{
	unsigned n = (unsigned)(uintptr_t)arg;
	work(n, n / THREADS % 2);
	return NULL;
}

static void processes_with_threads(void)
{
	pid_t pid[MANY];
	begin();
	builder_join(&builders[1], &builders[0], 1);
	builder_limit(&builders[1], CONTAINER_MAX, POD_MAX);
	for (unsigned i = 0; i < MANY; i++)
		CHILD(pid[i], {
			pthread_t t[THREADS];
			enter(i % 2);
			for (unsigned k = 0; k < THREADS; k++)
				CHECK(pthread_create(&t[k], NULL, work_in_threads, (void *)(uintptr_t)(i * THREADS + k)) == 0);
			for (unsigned k = 0; k < THREADS; k++)
				CHECK(pthread_join(t[k], NULL) == 0);
		});
	watch(false);
	for (int i = 0; i < MANY; i++)
		unit_reap(pid[i], 0);
	never_over();
	builder_remove(&builders[1]);
	builder_remove(&builders[0]);
}

static void check_then_add_is_caught(void)
{
	pid_t pid[WORKERS];
	char path[320];
	begin();
	reserve = check_then_add;
	release = release_broken;
	snprintf(path, sizeof path, "%s/ledger", builders[0].dir);
	for (unsigned i = 0; i < WORKERS; i++)
		CHILD(pid[i], {
			struct ledger_self self = { (uint32_t)getpid(), 0, 0, 0 };
			int fd = pages_open(path, true);
			CHECK_INT(ledger_open(&broken_ledger, path), 0);
			CHECK_INT(ledger_claim(&broken_ledger, fd, &self, false, &broken_slot, &broken_generation), 0);
			work(i, 0);
		});
	seconds = 60;
	watch(true);
	for (int i = 0; i < WORKERS; i++)
		unit_reap(pid[i], 0);
	CHECK(shared->over > 0);
	builder_remove(&builders[0]);
}

int main(int argc, char **argv)
{
	static const struct unit_test tests[] = {
		{ "race: 16 threads at the limit", threads_at_the_limit },
		{ "race: 16 processes at the limit", processes_at_the_limit },
		{ "race: 64 processes of 8 threads at the limit", processes_with_threads },
		{ "race: 16 processes, 3 slots", processes_in_overflow },
		{ "race: check-then-add is caught", check_then_add_is_caught },
		{ NULL, NULL },
	};
	if (argc > 1)
		seconds = atof(argv[1]);
	soak = argc > 2 && strcmp(argv[2], "soak") == 0;
	return unit_main(tests, 1, argv);
}
