/* SPDX-License-Identifier: Apache-2.0 */
/* The accounts alone: one reserve + put + take + release, and the first use by many at once. */
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "../src/account.h"
#include "../src/track.h"
#include "bench.h"

#define BYTES (UINT64_C(4) << 20)
#define PAIRS 20000

static uint64_t pointer_of(uint64_t n) { return UINT64_C(0x7f0000000000) + (n << 22); }

/* The compiler may not see through it. */
__attribute__((noinline)) static uint64_t nothing(uint64_t n)
{
	__asm__ volatile("" : "+r"(n));
	return n;
}

static void pair(uint64_t n)
{
	struct track_block b = { .pointer = pointer_of(n), .bytes = BYTES, .owner = 1, .gpu = 0, .kind = TRACK_DEVICE };
	if (account_reserve(0, ACCOUNT_DEVICE, BYTES) != 0 || track_put(&b) != 0)
		bench_fail("refused");
	account_count_alloc();
	if (!track_take(b.pointer, &b))
		bench_fail("not tracked");
	account_release(b.gpu, ACCOUNT_DEVICE, b.bytes);
	account_count_free();
}

static void measure(unsigned slots, uint64_t from, uint64_t blocks, const char *label)
{
	struct bench_row row = { .name = "shim.account", .unit = "ns" };
	snprintf(row.params, sizeof row.params, "%s blocks, %u slot%s", label, slots, slots == 1 ? "" : "s");
	for (uint64_t n = from; n < blocks; n++) {
		struct track_block b = { .pointer = pointer_of(n), .bytes = BYTES, .owner = 1, .gpu = 0, .kind = TRACK_DEVICE };
		if (account_reserve(0, ACCOUNT_DEVICE, BYTES) != 0 || track_put(&b) != 0)
			bench_fail("refused");
	}
	uint64_t n = blocks;
	for (int i = 0; i < BENCH_SAMPLES; i++) {
		uint64_t t0 = bench_now_ns();
		for (int k = 0; k < PAIRS; k++)
			nothing((uint64_t)k);
		uint64_t t1 = bench_now_ns();
		for (int k = 0; k < PAIRS; k++)
			pair(n++);
		uint64_t t2 = bench_now_ns();
		bench_add(&row, (double)(t1 - t0) / PAIRS, (double)(t2 - t1) / PAIRS);
	}
	bench_print(&row);
}

static void pairs(unsigned slots)
{
	struct bench_pod pod;
	uint8_t uuid[16];
	bench_pod_start(&pod, slots);
	builder_uuid(0, uuid);
	fflush(NULL);
	pid_t pid = fork();
	if (pid == 0) {
		account_set_dir(pod.pages.dir);
		if (account_gpu(uuid) != 0)
			bench_fail("no pages");
		measure(slots, 0, 10, "10");
		measure(slots, 10, 1000, "1k");
		measure(slots, 1000, 100000, "100k");
		measure(slots, 100000, 1000000, "1M");
		exit(0);
	}
	int status;
	if (waitpid(pid, &status, 0) != pid || status != 0)
		bench_fail("account: status %#x", (unsigned)status);
	bench_pod_stop(&pod);
}

/* CPU time that the first charge costs a process when this many begin together. */
#define TOGETHER 300

static void first_use(void)
{
	struct bench_row row = { .name = "shim.first_use", .unit = "us" };
	struct bench_pod pod;
	uint8_t uuid[16];
	pid_t pids[TOGETHER];
	struct { uint32_t ready, go; double us[TOGETHER]; } *shared =
		mmap(NULL, sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	if (shared == MAP_FAILED)
		bench_fail("no memory");
	snprintf(row.params, sizeof row.params, "cpu time, %d processes together", TOGETHER);
	bench_pod_start(&pod, 1);
	builder_uuid(0, uuid);
	for (int i = 0; i < TOGETHER; i++) {
		pids[i] = fork();
		if (pids[i] < 0)
			bench_fail("cannot fork");
		if (pids[i] == 0) {
			struct timespec a, b;
			__atomic_fetch_add(&shared->ready, 1, __ATOMIC_SEQ_CST);
			while (!__atomic_load_n(&shared->go, __ATOMIC_SEQ_CST))
				usleep(2000);
			clock_gettime(CLOCK_THREAD_CPUTIME_ID, &a);
			account_set_dir(pod.pages.dir);
			int r = account_gpu(uuid) == 0 ? account_reserve(0, ACCOUNT_DEVICE, BYTES) : -1;
			clock_gettime(CLOCK_THREAD_CPUTIME_ID, &b);
			shared->us[i] = (double)(b.tv_sec - a.tv_sec) * 1e6 + (double)(b.tv_nsec - a.tv_nsec) / 1e3;
			/* Held until all have theirs. */
			__atomic_fetch_add(&shared->ready, 1, __ATOMIC_SEQ_CST);
			while (__atomic_load_n(&shared->ready, __ATOMIC_SEQ_CST) < 2 * TOGETHER)
				usleep(2000);
			_exit(r == 0 ? 0 : 1);
		}
	}
	while (__atomic_load_n(&shared->ready, __ATOMIC_SEQ_CST) < TOGETHER)
		usleep(1000);
	__atomic_store_n(&shared->go, 1, __ATOMIC_SEQ_CST);
	for (int i = 0; i < TOGETHER; i++) {
		int status;
		if (waitpid(pids[i], &status, 0) != pids[i] || status != 0)
			bench_fail("first use: status %#x", (unsigned)status);
		bench_add(&row, 0, shared->us[i]);
	}
	bench_print(&row);
	bench_pod_stop(&pod);
}

int main(void)
{
	first_use();
	pairs(1);
	pairs(16);
	pairs(64);
	return 0;
}
