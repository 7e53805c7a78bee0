/* SPDX-License-Identifier: Apache-2.0 */
#include <errno.h>
#include <pthread.h>
#include <sys/resource.h>

#include "../src/pages.h"
#include "../src/track.h"
#include "unit.h"

static struct track_block block(uint64_t pointer, uint64_t owner)
{
	return (struct track_block){ .pointer = pointer, .bytes = pointer ^ 0x5555, .owner = owner,
				     .gpu = (int16_t)(pointer >> 8 & 15), .kind = (uint8_t)(pointer >> 12 & 1) };
}

static void check_block(const struct track_block *got, uint64_t pointer, uint64_t owner)
{
	CHECK_U64(got->pointer, pointer);
	CHECK_U64(got->bytes, pointer ^ 0x5555);
	CHECK_U64(got->owner, owner);
	CHECK_INT(got->gpu, (int)(pointer >> 8 & 15));
	CHECK_INT(got->kind, (int)(pointer >> 12 & 1));
}

static void put(uint64_t pointer, uint64_t owner)
{
	struct track_block b = block(pointer, owner);
	CHECK_INT(track_put(&b), 0);
}

static void put_and_take(void)
{
	struct track_block b;
	CHECK(!track_take(0x700000000000, &b));
	put(0x700000000000, 9);
	CHECK(!track_take(0x700000000100, &b));
	CHECK(track_take(0x700000000000, &b));
	check_block(&b, 0x700000000000, 9);
	CHECK(!track_take(0x700000000000, &b));
	/* 0 is a pointer like any other. */
	CHECK(!track_take(0, &b));
	put(0, 1);
	CHECK(track_take(0, &b));
	CHECK(!track_take(0, &b));
	put(UINT64_MAX, 1);
	CHECK(track_take(UINT64_MAX, &b));
}

static void the_last_put_wins(void)
{
	struct track_block b = block(0x1000, 1);
	CHECK_INT(track_put(&b), 0);
	b.bytes = 77;
	b.owner = 2;
	CHECK_INT(track_put(&b), 0);
	CHECK(track_take(0x1000, &b));
	CHECK_U64(b.bytes, 77);
	CHECK_U64(b.owner, 2);
	CHECK(!track_take(0x1000, &b));
}

static void what_was_there_is_told(void)
{
	struct track_block b = block(0x1000, 1), stale = { .pointer = 5 };
	CHECK_INT(track_replace(&b, &stale), 0);
	CHECK_U64(stale.pointer, 5);
	b = block(0x1000, 2);
	CHECK_INT(track_replace(&b, &stale), 1);
	check_block(&stale, 0x1000, 1);
	CHECK(track_take(0x1000, &b));
	check_block(&b, 0x1000, 2);
	CHECK_INT(track_replace(&b, &stale), 0);
}

static uint64_t next(uint64_t *state)
{
	*state = *state * UINT64_C(6364136223846793005) + 1442695040888963407;
	return *state >> 20;
}

/* Against a plain array as the model, with pointers that collide on purpose. */
static void agrees_with_a_model(void)
{
	enum { POINTERS = 5000 };
	static uint64_t owner[POINTERS];
	uint64_t state = 42;
	for (int i = 0; i < 400000; i++) {
		uint64_t n = next(&state) % POINTERS;
		uint64_t pointer = n % 3 == 0 ? n << 21 : n % 3 == 1 ? n << 9 : n << 40;
		struct track_block b;
		/* In waves, so that it grows, empties, and fills its holes. */
		if (next(&state) % 100 < (i / 50000 % 2 == 0 ? 70u : 30u)) {
			owner[n] = next(&state) % 5 + 1;
			put(pointer, owner[n]);
		} else if (track_take(pointer, &b)) {
			check_block(&b, pointer, owner[n]);
			owner[n] = 0;
		} else {
			CHECK_U64(owner[n], 0);
		}
	}
	for (uint64_t n = 0; n < POINTERS; n++) {
		struct track_block b;
		uint64_t pointer = n % 3 == 0 ? n << 21 : n % 3 == 1 ? n << 9 : n << 40;
		CHECK(track_take(pointer, &b) == (owner[n] != 0));
	}
}

static uint64_t taken, taken_sum;
static void collect(const struct track_block *b, void *arg)
{
	struct track_block other;
	check_block(b, b->pointer, *(uint64_t *)arg);
	taken++;
	taken_sum += b->pointer;
	/* Not under a lock of the table: this would not return. */
	CHECK(!track_take(b->pointer, &other));
}

static void owners_go_whole(void)
{
	uint64_t owner = 2, want = 0;
	struct track_block b;
	track_take_owner(owner, collect, &owner);
	CHECK_U64(taken, 0);
	for (uint64_t i = 0; i < 100000; i++) {
		put(i << 21, i % 3 + 1);
		want += i % 3 == 1 ? i << 21 : 0;
	}
	track_take_owner(owner, collect, &owner);
	CHECK_U64(taken, 33333);
	CHECK_U64(taken_sum, want);
	track_take_owner(owner, collect, &owner);
	CHECK_U64(taken, 33333);
	for (uint64_t i = 0; i < 100000; i++)
		CHECK(track_take(i << 21, &b) == (i % 3 != 1));
}

static void small_blocks_count(void)
{
	CHECK(!track_small_leave(0, 0x200000));
	CHECK(track_small_enter(0, 0x200000));
	CHECK(!track_small_enter(0, 0x3ffe00));
	CHECK(track_small_enter(0, 0x400000));
	CHECK(track_small_enter(1, 0x200000)); /* another GPU's */
	CHECK(track_small_enter(-1, 0x200000));
	CHECK(!track_small_leave(0, 0x200100));
	CHECK(track_small_leave(0, 0x3ffe00));
	CHECK(!track_small_leave(0, 0x200000));
	CHECK(track_small_leave(1, 0x200000));
	CHECK(track_small_leave(0, 0x400000));
	CHECK(track_small_leave(-1, 0x200000));
	CHECK(track_small_enter(0, 0x200000));
}

static void fork_child_starts_empty(void)
{
	pid_t pid;
	struct track_block b;
	for (uint64_t i = 0; i < 10000; i++)
		put(i << 9, 1);
	CHECK(track_small_enter(0, 0x200000));
	CHILD(pid, {
		for (uint64_t i = 0; i < 10000; i++)
			CHECK(!track_take(i << 9, &b));
		CHECK(track_small_enter(0, 0x200000));
		put(1 << 9, 2);
		CHECK(track_take(1 << 9, &b));
	});
	unit_reap(pid, 0);
	for (uint64_t i = 0; i < 10000; i++)
		CHECK(track_take(i << 9, &b));
}

static void fork_child_without_wipe(void)
{
	pages_no_wipe = true;
	fork_child_starts_empty();
}

static int stop;

static void *churn(void *arg)
{
	uint64_t base = (uint64_t)(uintptr_t)arg << 40, state = (uint64_t)(uintptr_t)arg;
	struct track_block b;
	while (!__atomic_load_n(&stop, __ATOMIC_RELAXED)) {
		uint64_t n = next(&state) % 1000 + 1;
		for (uint64_t i = 0; i < n; i++)
			put(base + (i << 9), (uint64_t)(uintptr_t)arg);
		CHECK(track_small_enter((int)(uintptr_t)arg, base));
		for (uint64_t i = 0; i < n; i++)
			CHECK(track_take(base + (i << 9), &b));
		CHECK(track_small_leave((int)(uintptr_t)arg, base));
	}
	return NULL;
}

static void threads_and_forks(void)
{
	pthread_t t[4];
	for (uintptr_t i = 0; i < 4; i++)
		CHECK(pthread_create(&t[i], NULL, churn, (void *)(i + 1)) == 0);
	for (int i = 0; i < 60; i++) {
		pid_t pid;
		struct track_block b;
		/* Some lock is held by a thread that the child does not have. */
		CHILD(pid, for (uint64_t k = 0; k < 2000; k++) { put(k << 9, 3); CHECK(track_take(k << 9, &b)); });
		unit_reap(pid, 0);
		pages_sleep_ns(1000000);
	}
	__atomic_store_n(&stop, 1, __ATOMIC_RELAXED);
	for (int i = 0; i < 4; i++)
		CHECK(pthread_join(t[i], NULL) == 0);
}

/* All over the address space, so that some agree in the 32 bits of hash that the index keeps. */
static uint64_t scattered(uint64_t i)
{
	i *= UINT64_C(0xbf58476d1ce4e5b9);
	i ^= i >> 29;
	i *= UINT64_C(0x94d049bb133111eb);
	return i & ~UINT64_C(0x1ff);
}

static void a_million_blocks(void)
{
	struct track_block b;
	for (uint64_t i = 0; i < 1000000; i++)
		put(scattered(i), 1);
	for (uint64_t i = 0; i < 1000000; i++) {
		CHECK(track_take(scattered(i), &b));
		check_block(&b, scattered(i), 1);
	}
	CHECK(!track_take(scattered(0), &b));
}

static void without_memory_it_says_so(void)
{
	struct rlimit r = { 0, 0 };
	struct track_block b;
	uint64_t n;
	for (n = 0; n < 2000; n++)
		put(n << 21, 1);
	/* What it has, it has; more is refused, and what was there stays. */
	CHECK(setrlimit(RLIMIT_AS, &r) == 0);
	while (n < 100000 && (b = block(n << 21, 1), track_put(&b)) == 0)
		n++;
	CHECK(n < 100000);
	/* Counted as the first again and again: over-counted, never under-counted. */
	CHECK(track_small_enter(0, n << 30));
	CHECK(track_small_enter(0, n << 30));
	CHECK(!track_small_leave(0, n << 30));
	CHECK(!track_take(n << 21, &b));
	for (uint64_t i = 0; i < n; i++)
		CHECK(track_take(i << 21, &b));
}

int main(int argc, char **argv)
{
	static const struct unit_test tests[] = {
		{ "track: put and take", put_and_take },
		{ "track: the last put wins", the_last_put_wins },
		{ "track: says what an address had before", what_was_there_is_told },
		{ "track: agrees with a model", agrees_with_a_model },
		{ "track: an owner's blocks go whole", owners_go_whole },
		{ "track: small blocks count", small_blocks_count },
		{ "track: a fork child starts empty", fork_child_starts_empty },
		{ "track: a fork child without MADV_WIPEONFORK", fork_child_without_wipe },
		{ "track: threads and forks", threads_and_forks },
		{ "track: a million blocks", a_million_blocks },
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
		/* The sanitizers need memory of their own at any time. */
		{ "track: without memory it says so", without_memory_it_says_so },
#endif
		{ NULL, NULL },
	};
	return unit_main(tests, argc, argv);
}
