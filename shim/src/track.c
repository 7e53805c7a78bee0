/* SPDX-License-Identifier: Apache-2.0 */
#include "track.h"

#include <errno.h>
#include <stddef.h>
#include <string.h>

#include "pages.h"

#define SHARDS 64u
#define FIRST_ENTRIES 64u
#define SMALL_SHIFT 21 /* small allocations share blocks of 2 MiB */
#define LOCK_NS UINT64_C(1000000000)
#define BATCH 64u

/* An open-addressing table: linear probing, at most 3/4 full, holes closed by moving entries
 * back, so that it never needs cleaning. */
struct entry {
	uint64_t key; /* 0: empty */
	uint64_t bytes;
	uint64_t owner;
	int16_t gpu;
	uint8_t kind;
	uint8_t used;
};

struct table {
	struct entry *entries;
	uint32_t mask; /* entries - 1 */
	uint32_t count;
};

struct shard {
	uint64_t lock;
	struct table blocks;
	struct table small; /* 2 MiB blocks; bytes: how many live in it */
	uint64_t pad[3];
};

static struct pages_wiped memory;

static struct shard *shards(void) { return pages_wiped(&memory, SHARDS * sizeof(struct shard)); }

static uint64_t hash_of(uint64_t key)
{
	/* Device pointers are multiples of 256 or more: multiply first, then use the high bits. */
	key *= UINT64_C(0x9e3779b97f4a7c15);
	return key ^ key >> 32;
}

static uint32_t home(const struct table *t, uint64_t key) { return (uint32_t)(hash_of(key) >> 6) & t->mask; }

static struct shard *locked(struct shard *all, uint64_t key)
{
	struct shard *s = &all[hash_of(key) % SHARDS];
	return pages_lock(&s->lock, LOCK_NS) ? s : NULL;
}

static struct entry *find(const struct table *t, uint64_t key)
{
	if (t->entries == NULL)
		return NULL;
	for (uint32_t i = home(t, key);; i = (i + 1) & t->mask) {
		struct entry *e = &t->entries[i];
		if (!e->used)
			return NULL;
		if (e->key == key)
			return e;
	}
}

static void insert(struct table *t, const struct entry *fresh)
{
	uint32_t i = home(t, fresh->key);
	while (t->entries[i].used)
		i = (i + 1) & t->mask;
	t->entries[i] = *fresh;
	t->count++;
}

static bool grow(struct table *t)
{
	uint64_t n = t->entries == NULL ? FIRST_ENTRIES : 2 * ((uint64_t)t->mask + 1);
	if (n > UINT32_MAX / 2)
		return false;
	struct table bigger = { pages_private(n * sizeof(struct entry)), (uint32_t)(n - 1), 0 };
	if (bigger.entries == NULL)
		return false;
	if (t->entries != NULL) {
		for (uint32_t i = 0; i <= t->mask; i++)
			if (t->entries[i].used)
				insert(&bigger, &t->entries[i]);
		pages_unmap(t->entries, ((uint64_t)t->mask + 1) * sizeof(struct entry));
	}
	*t = bigger;
	return true;
}

static int add(struct table *t, const struct entry *fresh)
{
	struct entry *e = find(t, fresh->key);
	if (e != NULL) {
		/* The driver gave it out again, so it was freed on a way that we did not see. */
		*e = *fresh;
		return 0;
	}
	if (t->entries == NULL || t->count >= (t->mask + 1) / 4 * 3) {
		if (!grow(t))
			return -ENOMEM;
	}
	insert(t, fresh);
	return 0;
}

static void drop(struct table *t, struct entry *e)
{
	uint32_t hole = (uint32_t)(e - t->entries);
	for (uint32_t i = (hole + 1) & t->mask; t->entries[i].used; i = (i + 1) & t->mask) {
		/* May it move to the hole, which is not before its home? */
		if (((i - home(t, t->entries[i].key)) & t->mask) >= ((i - hole) & t->mask)) {
			t->entries[hole] = t->entries[i];
			hole = i;
		}
	}
	t->entries[hole].used = 0;
	t->count--;
}

static void unpack(const struct entry *e, struct track_block *block)
{
	block->pointer = e->key;
	block->bytes = e->bytes;
	block->owner = e->owner;
	block->gpu = e->gpu;
	block->kind = e->kind;
}

int track_put(const struct track_block *block)
{
	struct entry fresh = { block->pointer, block->bytes, block->owner, block->gpu, block->kind, 1 };
	struct shard *all = shards();
	struct shard *s = all != NULL ? locked(all, fresh.key) : NULL;
	if (s == NULL)
		return -ENOMEM;
	int r = add(&s->blocks, &fresh);
	pages_unlock(&s->lock);
	return r;
}

bool track_take(uint64_t pointer, struct track_block *block)
{
	struct shard *all = shards();
	struct shard *s = all != NULL ? locked(all, pointer) : NULL;
	if (s == NULL)
		return false;
	struct entry *e = find(&s->blocks, pointer);
	if (e != NULL) {
		unpack(e, block);
		drop(&s->blocks, e);
	}
	pages_unlock(&s->lock);
	return e != NULL;
}

/* Removes up to BATCH of an owner's blocks, from entry *at on. */
static unsigned take_batch(struct shard *s, uint64_t owner, uint32_t *at, struct track_block out[BATCH])
{
	struct table *t = &s->blocks;
	unsigned n = 0;
	if (!pages_lock(&s->lock, LOCK_NS)) {
		*at = UINT32_MAX;
		return 0;
	}
	uint32_t i = *at;
	while (t->entries != NULL && i <= t->mask && n < BATCH) {
		struct entry *e = &t->entries[i];
		if (e->used && e->owner == owner) {
			unpack(e, &out[n++]);
			drop(t, e); /* may have moved another one here */
		} else {
			i++;
		}
	}
	*at = t->entries == NULL || i > t->mask ? UINT32_MAX : i;
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
		bool again;
		do {
			/* Removals move entries towards lower places, also past where a batch ended: until a
			 * whole pass finds none. */
			again = false;
			for (uint32_t at = 0; at != UINT32_MAX;) {
				unsigned n = take_batch(&all[k], owner, &at, out);
				again = again || n > 0;
				for (unsigned i = 0; i < n; i++)
					fn(&out[i], arg);
			}
		} while (again);
	}
}

static uint64_t small_key(int gpu, uint64_t pointer)
{
	return (pointer >> SMALL_SHIFT) << 8 | (uint64_t)(uint8_t)(gpu + 1);
}

bool track_small_enter(int gpu, uint64_t pointer)
{
	struct entry fresh = { small_key(gpu, pointer), 1, 0, 0, 0, 1 };
	struct shard *all = shards();
	struct shard *s = all != NULL ? locked(all, fresh.key) : NULL;
	if (s == NULL)
		return true; /* over-counted, never under-counted */
	struct entry *e = find(&s->small, fresh.key);
	bool first = e == NULL;
	if (first)
		(void)add(&s->small, &fresh); /* without memory it stays charged */
	else
		e->bytes++;
	pages_unlock(&s->lock);
	return first;
}

bool track_small_leave(int gpu, uint64_t pointer)
{
	uint64_t key = small_key(gpu, pointer);
	struct shard *all = shards();
	struct shard *s = all != NULL ? locked(all, key) : NULL;
	if (s == NULL)
		return false;
	struct entry *e = find(&s->small, key);
	bool last = e != NULL && --e->bytes == 0;
	if (last)
		drop(&s->small, e);
	pages_unlock(&s->lock);
	return last;
}
