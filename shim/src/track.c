/* SPDX-License-Identifier: Apache-2.0 */
#include "track.h"

#include <errno.h>
#include <stddef.h>
#include <string.h>

#include "pages.h"

#define SHARDS 8u
#define FIRST_PLACES 64u
#define FIRST_ENTRIES 32u
#define SEGMENTS 22u
#define SMALL_SHIFT 21 /* small allocations share blocks of 2 MiB */
#define LOCK_NS UINT64_C(1000000000)
#define BATCH 64u

/*
 * A table is two parts. The entries lie densely in segments that never move, and the one freed
 * last is used next: a program that allocates and frees stays on a few cache lines however many
 * blocks live. Beside them an open-addressing index of 8 bytes a place, [hash:32 | entry + 1:32],
 * linear probing, at most half full; it alone is touched at random, and is grown and kept free of
 * holes without looking at an entry.
 */
struct entry {
	uint64_t key;
	uint64_t bytes;
	uint64_t owner;
	int16_t gpu;
	uint8_t kind;
	uint8_t used;
	uint32_t next; /* free: the next free one + 1 */
};

struct table {
	uint64_t *index;
	uint32_t mask;    /* places - 1 */
	uint32_t count;   /* places in use */
	uint32_t first;   /* free entry + 1 */
	uint32_t entries; /* ever used */
	struct entry *segments[SEGMENTS]; /* number k has FIRST_ENTRIES << k entries */
};

struct shard {
	uint64_t lock;
	struct table blocks;
	struct table small; /* 2 MiB blocks; bytes: how many live in it */
};

static struct pages_wiped memory;

static struct shard *shards(void) { return pages_wiped(&memory, SHARDS * sizeof(struct shard)); }

static uint64_t hash_of(uint64_t key)
{
	/* Device pointers share their low and their high bits. */
	key *= UINT64_C(0x9e3779b97f4a7c15);
	key ^= key >> 32;
	key *= UINT64_C(0xd6e8feb86659fd93);
	return key ^ key >> 32;
}

/*
 * Where a block's key belongs. Blocks that begin at a multiple of 2 MiB are given out one beside the
 * other: those of 32 MiB of addresses have their homes in as many places side by side, so that a
 * program that allocates on and on stays on a cache line for a while. What lies within 2 MiB
 * would fill one home, and is scattered.
 */
#define NEIGHBOURS 16u

static uint64_t block_hash(uint64_t pointer)
{
	if ((pointer & ((UINT64_C(1) << SMALL_SHIFT) - 1)) != 0)
		return hash_of(pointer);
	uint64_t n = pointer >> SMALL_SHIFT, hash = hash_of(n / NEIGHBOURS);
	return (hash & ~((uint64_t)(NEIGHBOURS - 1) << 32)) | (n % NEIGHBOURS) << 32;
}

static uint32_t place_hash(uint64_t hash) { return (uint32_t)(hash >> 32); }

static struct shard *locked(struct shard *all, uint64_t hash)
{
	struct shard *s = &all[hash % SHARDS];
	return pages_lock(&s->lock, LOCK_NS) ? s : NULL;
}

static struct entry *entry_at(const struct table *t, uint32_t n)
{
	unsigned k = 31 - (unsigned)__builtin_clz(n / FIRST_ENTRIES + 1);
	return &t->segments[k][n - ((FIRST_ENTRIES << k) - FIRST_ENTRIES)];
}

/* The place in the index that holds key; false: none does. */
static bool find(const struct table *t, uint64_t key, uint64_t hash, uint32_t *place, struct entry **entry)
{
	if (t->index == NULL)
		return false;
	for (uint32_t i = place_hash(hash) & t->mask;; i = (i + 1) & t->mask) {
		uint64_t w = t->index[i];
		if (w == 0)
			return false;
		if (w >> 32 != place_hash(hash))
			continue;
		struct entry *e = entry_at(t, (uint32_t)w - 1);
		if (e->key == key) {
			*place = i;
			*entry = e;
			return true;
		}
	}
}

static void put_word(uint64_t *index, uint32_t mask, uint64_t w)
{
	uint32_t i = (uint32_t)(w >> 32) & mask;
	while (index[i] != 0)
		i = (i + 1) & mask;
	index[i] = w;
}

static bool grow_index(struct table *t)
{
	uint64_t n = t->index == NULL ? FIRST_PLACES : 2 * ((uint64_t)t->mask + 1);
	if (n > UINT32_MAX / 2)
		return false;
	uint64_t *bigger = pages_private(n * sizeof bigger[0]);
	if (bigger == NULL)
		return false;
	if (t->index != NULL) {
		for (uint32_t i = 0; i <= t->mask; i++)
			if (t->index[i] != 0)
				put_word(bigger, (uint32_t)(n - 1), t->index[i]);
		pages_unmap(t->index, ((uint64_t)t->mask + 1) * sizeof t->index[0]);
	}
	t->index = bigger;
	t->mask = (uint32_t)(n - 1);
	return true;
}

/* A free entry's number + 1, or 0: no memory. */
static uint32_t new_entry(struct table *t)
{
	uint32_t n = t->first;
	if (n != 0) {
		t->first = entry_at(t, n - 1)->next;
		return n;
	}
	n = t->entries;
	unsigned k = 31 - (unsigned)__builtin_clz(n / FIRST_ENTRIES + 1);
	if (k >= SEGMENTS)
		return 0;
	if (t->segments[k] == NULL) {
		t->segments[k] = pages_private((size_t)(FIRST_ENTRIES << k) * sizeof(struct entry));
		if (t->segments[k] == NULL)
			return 0;
	}
	t->entries = n + 1;
	return n + 1;
}

/* 1: the driver gave it out again, so it was freed on a way that we did not see; *stale is what it was. */
static int add(struct table *t, const struct entry *fresh, uint64_t hash, struct entry *stale)
{
	struct entry *e;
	uint32_t place;
	if (find(t, fresh->key, hash, &place, &e)) {
		*stale = *e;
		*e = *fresh;
		return 1;
	}
	if ((t->index == NULL || t->count >= (t->mask + 1) / 2) && !grow_index(t))
		return -ENOMEM;
	uint32_t n = new_entry(t);
	if (n == 0)
		return -ENOMEM;
	*entry_at(t, n - 1) = *fresh;
	put_word(t->index, t->mask, (uint64_t)place_hash(hash) << 32 | n);
	t->count++;
	return 0;
}

static void drop(struct table *t, uint32_t hole, struct entry *e)
{
	uint32_t n = (uint32_t)t->index[hole];
	for (uint32_t i = (hole + 1) & t->mask; t->index[i] != 0; i = (i + 1) & t->mask) {
		/* May it move to the hole, which is not before its home? */
		uint32_t home = (uint32_t)(t->index[i] >> 32) & t->mask;
		if (((i - home) & t->mask) >= ((i - hole) & t->mask)) {
			t->index[hole] = t->index[i];
			hole = i;
		}
	}
	t->index[hole] = 0;
	t->count--;
	e->used = 0;
	e->next = t->first;
	t->first = n;
}

static void unpack(const struct entry *e, struct track_block *block)
{
	block->pointer = e->key;
	block->bytes = e->bytes;
	block->owner = e->owner;
	block->gpu = e->gpu;
	block->kind = e->kind;
}

int track_replace(const struct track_block *block, struct track_block *stale)
{
	struct entry fresh = { block->pointer, block->bytes, block->owner, block->gpu, block->kind, 1, 0 }, was;
	uint64_t hash = block_hash(fresh.key);
	struct shard *all = shards();
	struct shard *s = all != NULL ? locked(all, hash) : NULL;
	if (s == NULL)
		return -ENOMEM;
	int r = add(&s->blocks, &fresh, hash, &was);
	if (r > 0)
		unpack(&was, stale);
	pages_unlock(&s->lock);
	return r;
}

int track_put(const struct track_block *block)
{
	struct track_block stale;
	int r = track_replace(block, &stale);
	return r < 0 ? r : 0;
}

bool track_take(uint64_t pointer, struct track_block *block)
{
	struct entry *e;
	uint32_t place;
	uint64_t hash = block_hash(pointer);
	struct shard *all = shards();
	struct shard *s = all != NULL ? locked(all, hash) : NULL;
	if (s == NULL)
		return false;
	bool found = find(&s->blocks, pointer, hash, &place, &e);
	if (found) {
		unpack(e, block);
		drop(&s->blocks, place, e);
	}
	pages_unlock(&s->lock);
	return found;
}

/* Removes up to BATCH of an owner's blocks, from entry *at on; *at is UINT32_MAX at the end. */
static unsigned take_batch(struct shard *s, uint64_t owner, uint32_t *at, struct track_block out[BATCH])
{
	struct table *t = &s->blocks;
	unsigned n = 0;
	uint32_t i = *at;
	*at = UINT32_MAX;
	if (!pages_lock(&s->lock, LOCK_NS))
		return 0;
	for (; i < t->entries && n < BATCH; i++) {
		struct entry *e = entry_at(t, i), *found;
		uint32_t place;
		if (!e->used || e->owner != owner)
			continue;
		unpack(e, &out[n++]);
		if (find(t, e->key, block_hash(e->key), &place, &found))
			drop(t, place, found);
	}
	if (i < t->entries)
		*at = i;
	pages_unlock(&s->lock);
	return n;
}

void track_take_owner(uint64_t owner, void (*fn)(const struct track_block *, void *), void *arg)
{
	struct track_block out[BATCH];
	struct shard *all = shards();
	if (all == NULL)
		return;
	for (unsigned k = 0; k < SHARDS; k++) {
		/* Entries do not move, so one pass finds all. */
		for (uint32_t at = 0; at != UINT32_MAX;) {
			unsigned n = take_batch(&all[k], owner, &at, out);
			for (unsigned i = 0; i < n; i++)
				fn(&out[i], arg);
		}
	}
}

static uint64_t small_key(int gpu, uint64_t pointer)
{
	return (pointer >> SMALL_SHIFT) << 8 | (uint64_t)(uint8_t)(gpu + 1);
}

bool track_small_enter(int gpu, uint64_t pointer)
{
	struct entry fresh = { small_key(gpu, pointer), 1, 0, 0, 0, 1, 0 }, was, *e;
	uint32_t place;
	uint64_t hash = hash_of(fresh.key);
	struct shard *all = shards();
	struct shard *s = all != NULL ? locked(all, hash) : NULL;
	if (s == NULL)
		return true; /* over-counted, never under-counted */
	bool first = !find(&s->small, fresh.key, hash, &place, &e);
	if (first)
		(void)add(&s->small, &fresh, hash, &was); /* without memory it stays charged */
	else
		e->bytes++;
	pages_unlock(&s->lock);
	return first;
}

bool track_small_leave(int gpu, uint64_t pointer)
{
	struct entry *e;
	uint32_t place;
	uint64_t key = small_key(gpu, pointer), hash = hash_of(key);
	struct shard *all = shards();
	struct shard *s = all != NULL ? locked(all, hash) : NULL;
	if (s == NULL)
		return false;
	bool last = find(&s->small, key, hash, &place, &e) && --e->bytes == 0;
	if (last)
		drop(&s->small, place, e);
	pages_unlock(&s->lock);
	return last;
}
