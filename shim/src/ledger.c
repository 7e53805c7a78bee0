/* SPDX-License-Identifier: Apache-2.0 */
#include "ledger.h"

#include <errno.h>

#include "pages.h"

#define SLOTS_MAX 65534u
#define SLOT_BYTES_MAX (1u << 20)

static struct gpufence_ledger *header(const struct ledger *l)
{
	return (struct gpufence_ledger *)(void *)l->page;
}

struct gpufence_slot *ledger_slot(const struct ledger *l, uint32_t slot)
{
	return (struct gpufence_slot *)(void *)(l->page + l->header_bytes + (size_t)slot * l->slot_bytes);
}

static uint64_t slot_offset(const struct ledger *l, uint32_t slot)
{
	return l->header_bytes + (uint64_t)slot * l->slot_bytes;
}

static uint64_t *counter_of(const struct ledger *l, uint32_t slot, unsigned gpu, enum ledger_counter c)
{
	struct gpufence_slot_gpu *g = &ledger_slot(l, slot)->gpu[gpu];
	return c == LEDGER_DEVICE ? &g->device : c == LEDGER_MANAGED ? &g->managed : &g->swap;
}

/* A writer of a later minor version may have appended: a longer header, longer slots. */
static int check(const struct gpufence_ledger *h, uint64_t file_bytes)
{
	if (h->magic != GPUFENCE_LEDGER_MAGIC || h->abi_major != GPUFENCE_ABI_MAJOR)
		return -EINVAL;
	if (h->header_bytes < GPUFENCE_LEDGER_HEADER_BYTES || h->header_bytes % 64 != 0 || h->header_bytes > SLOT_BYTES_MAX)
		return -EINVAL;
	if (h->slot_count < 1 || h->slot_count > SLOTS_MAX || h->gpu_count_max < GPUFENCE_GPUS)
		return -EINVAL;
	if (h->slot_bytes < offsetof(struct gpufence_slot, gpu) || h->slot_bytes % 64 != 0 || h->slot_bytes > SLOT_BYTES_MAX)
		return -EINVAL;
	if (h->gpu_count_max > (h->slot_bytes - offsetof(struct gpufence_slot, gpu)) / sizeof(struct gpufence_slot_gpu))
		return -EINVAL;
	uint64_t need = h->header_bytes + ((uint64_t)h->slot_count + 1) * h->slot_bytes;
	if (h->total_bytes < need || h->total_bytes > file_bytes)
		return -EINVAL;
	return 0;
}

int ledger_open(struct ledger *l, const char *path)
{
	struct gpufence_ledger h;
	int fd = pages_open(path, true);
	if (fd < 0)
		return fd;
	int64_t size = pages_size(fd);
	int r = size < 0 ? (int)size : pages_read(fd, &h, sizeof h);
	if (r == 0)
		r = check(&h, (uint64_t)size);
	else if (r == -ENODATA || r == -ENODEV)
		r = -EINVAL;
	if (r == 0) {
		l->header_bytes = h.header_bytes;
		l->slot_count = h.slot_count;
		l->slot_bytes = h.slot_bytes;
		l->size = h.header_bytes + ((size_t)h.slot_count + 1) * h.slot_bytes;
		l->page = pages_map(fd, l->size, true);
		if (l->page == NULL)
			r = -ENOMEM;
	}
	pages_close(fd);
	return r;
}

/* Raises the hint before the slot is owned: a sum that finds the slot's charge needed must not
 * stop below it. */
static void raise_high_slot(struct ledger *l, uint32_t slot)
{
	uint64_t high = word_load(&header(l)->high_slot);
	while (high <= slot && !word_swap(&header(l)->high_slot, &high, (uint64_t)slot + 1))
		;
}

/*
 * Makes a slot ours whose lock we hold. Nobody but its lock's holder writes to a slot that is
 * not live, so everything is in place before the one compare-and-swap that makes it count; a
 * former owner's late changes fail on the generation.
 */
static bool take(struct ledger *l, uint32_t slot, const struct ledger_self *self, bool take_over, uint32_t *generation)
{
	struct gpufence_slot *s = ledger_slot(l, slot);
	uint64_t owner = word_load(&s->owner);
	/* gpufenced changes owner words without the lock of an owner that it saw exit. */
	for (int tries = 0; tries < 4; tries++) {
		unsigned state = ledger_state(owner);
		if (state != GPUFENCE_SLOT_FREE && !take_over)
			return false;
		uint32_t next = (ledger_generation(owner) + 1) & GPUFENCE_GENERATION_MASK;
		word_store(&s->pidns_inode, self->pidns_inode);
		word_store(&s->start_ticks, self->start_ticks);
		half_store_relaxed(&s->container_index, self->container_index);
		half_store_relaxed(&s->shim_abi, (uint32_t)GPUFENCE_ABI_MAJOR << 16 | GPUFENCE_ABI_MINOR);
		word_store(&s->flags, 0);
		word_store(&s->allocs, 0);
		word_store(&s->frees, 0);
		word_store(&s->imports, 0);
		for (unsigned g = 0; g < GPUFENCE_GPUS; g++) {
			/* The events go on: gpufenced folds what it has not seen yet. */
			word_store(&s->gpu[g].device, (uint64_t)next << GPUFENCE_UNITS_BITS);
			word_store(&s->gpu[g].managed, (uint64_t)next << GPUFENCE_UNITS_BITS);
			word_store(&s->gpu[g].swap, (uint64_t)next << GPUFENCE_UNITS_BITS);
			word_store(&s->gpu[g].peak[0], 0);
			word_store(&s->gpu[g].peak[1], 0);
		}
		raise_high_slot(l, slot);
		if (word_swap(&s->owner, &owner, ledger_owner(next, GPUFENCE_SLOT_LIVE, self->pid))) {
			*generation = next;
			return true;
		}
	}
	return false;
}

static bool try_slot(struct ledger *l, int fd, uint32_t slot, const struct ledger_self *self, bool take_over, uint32_t *generation)
{
	if (pages_file_lock(fd, PAGES_LOCK_EXCLUSIVE, slot_offset(l, slot), l->slot_bytes) != 0)
		return false;
	if (take(l, slot, self, take_over, generation))
		return true;
	pages_file_lock(fd, PAGES_LOCK_NONE, slot_offset(l, slot), l->slot_bytes);
	return false;
}

int ledger_claim(struct ledger *l, int fd, const struct ledger_self *self, bool take_over, uint32_t *slot, uint32_t *generation)
{
	/* Where many begin together, each steps aside by a distance of its own after a collision;
	 * the second round leaves none out. */
	uint32_t step = 1 + (self->pid * UINT32_C(2654435761) >> 28);
	for (int round = 0; round < 2; round++) {
		for (uint32_t i = 0; i < l->slot_count;) {
			if (ledger_state(word_load(&ledger_slot(l, i)->owner)) != GPUFENCE_SLOT_FREE) {
				i++;
				continue;
			}
			if (try_slot(l, fd, i, self, false, generation)) {
				*slot = i;
				return 0;
			}
			i += round == 0 ? step : 1;
		}
	}
	for (uint32_t i = 0; take_over && i < l->slot_count; i++) {
		if (try_slot(l, fd, i, self, true, generation)) {
			*slot = i;
			return 0;
		}
	}
	return -EAGAIN;
}

/* With its lock exclusively: nobody uses it, and what it says was left by the killed. */
static void zero_overflow(struct ledger *l)
{
	struct gpufence_slot *s = ledger_slot(l, l->slot_count);
	uint64_t zero = (uint64_t)ledger_generation(word_load(&s->owner)) << GPUFENCE_UNITS_BITS;
	for (unsigned g = 0; g < GPUFENCE_GPUS; g++) {
		word_store(&s->gpu[g].device, zero);
		word_store(&s->gpu[g].managed, zero);
		word_store(&s->gpu[g].swap, zero);
		word_store(&s->gpu[g].peak[0], 0);
		word_store(&s->gpu[g].peak[1], 0);
	}
}

int ledger_claim_overflow(struct ledger *l, int fd, uint32_t *slot, uint32_t *generation)
{
	uint32_t n = l->slot_count;
	struct gpufence_slot *s = ledger_slot(l, n);
	if (pages_file_lock(fd, PAGES_LOCK_EXCLUSIVE, slot_offset(l, n), l->slot_bytes) == 0)
		zero_overflow(l);
	/* From exclusive this is one step, nobody comes in between. */
	if (pages_file_lock(fd, PAGES_LOCK_SHARED, slot_offset(l, n), l->slot_bytes) != 0)
		return -EAGAIN;
	*slot = n;
	*generation = ledger_generation(word_load(&s->owner));
	return 0;
}

int ledger_add(struct ledger *l, uint32_t slot, uint32_t generation, unsigned gpu, enum ledger_counter c, uint64_t units)
{
	uint64_t *counter = counter_of(l, slot, gpu, c);
	uint64_t now = word_load(counter);
	do {
		if (ledger_generation(now) != generation)
			return -ESTALE;
		if (units > GPUFENCE_UNITS_MASK - (now & GPUFENCE_UNITS_MASK))
			return -EOVERFLOW;
	} while (!word_swap(counter, &now, now + units));
	return 0;
}

static void keep_peak(struct gpufence_slot_gpu *g, uint64_t sample, uint64_t units)
{
	uint64_t *peak = &g->peak[sample & 1];
	uint64_t fresh = (sample & GPUFENCE_GENERATION_MASK) << GPUFENCE_UNITS_BITS | units;
	uint64_t now = word_load_relaxed(peak);
	while (now >> GPUFENCE_UNITS_BITS != fresh >> GPUFENCE_UNITS_BITS || now < fresh)
		if (word_swap(peak, &now, fresh))
			return;
}

int ledger_sub(struct ledger *l, uint32_t slot, uint32_t generation, unsigned gpu, enum ledger_counter c, uint64_t units, const uint64_t *sample)
{
	uint64_t *counter = counter_of(l, slot, gpu, c);
	uint64_t now = word_load(counter), held;
	do {
		if (ledger_generation(now) != generation)
			return -ESTALE;
		held = now & GPUFENCE_UNITS_MASK;
		/* First, so that no reader sees the smaller charge without the peak. */
		if (sample != NULL && c == LEDGER_DEVICE)
			keep_peak(&ledger_slot(l, slot)->gpu[gpu], *sample, held);
	} while (!word_swap(counter, &now, now - (units < held ? units : held)));
	return 0;
}

void ledger_peak(struct ledger *l, uint32_t slot, uint32_t generation, unsigned gpu, uint64_t sample)
{
	uint64_t now = word_load(counter_of(l, slot, gpu, LEDGER_DEVICE));
	if (ledger_generation(now) == generation)
		keep_peak(&ledger_slot(l, slot)->gpu[gpu], sample, now & GPUFENCE_UNITS_MASK);
}

bool ledger_owned(const struct ledger *l, uint32_t slot, uint32_t generation)
{
	if (slot >= l->slot_count)
		return true;
	uint64_t owner = word_load(&ledger_slot(l, slot)->owner);
	return ledger_state(owner) == GPUFENCE_SLOT_LIVE && ledger_generation(owner) == generation;
}

static uint64_t units_of(const struct gpufence_slot_gpu *g, uint32_t generation)
{
	uint64_t device = word_load(&g->device), managed = word_load(&g->managed), sum = 0;
	if (ledger_generation(device) == generation)
		sum += device & GPUFENCE_UNITS_MASK;
	if (ledger_generation(managed) == generation)
		sum += managed & GPUFENCE_UNITS_MASK;
	return sum;
}

typedef uint64_t units_function(const struct gpufence_slot_gpu *g, uint32_t generation);

static inline __attribute__((always_inline)) struct ledger_sum add_up(const struct ledger *l, unsigned gpu, uint32_t container_index, units_function *of)
{
	struct ledger_sum sum = { 0, 0 };
	/* After the announcement: a claim that this bound misses sees us. */
	uint64_t high = word_load(&header(l)->high_slot);
	if (high > l->slot_count)
		high = l->slot_count;
	const unsigned char *at = l->page + l->header_bytes;
	for (uint64_t i = 0; i < high; i++, at += l->slot_bytes) {
		const struct gpufence_slot *s = (const struct gpufence_slot *)(const void *)at;
		uint64_t owner = word_load(&s->owner);
		if (ledger_state(owner) != GPUFENCE_SLOT_LIVE)
			continue;
		uint64_t units = of(&s->gpu[gpu], ledger_generation(owner));
		sum.pod_units += units;
		if (half_load_relaxed(&s->container_index) == container_index)
			sum.container_units += units;
	}
	const struct gpufence_slot *overflow = ledger_slot(l, l->slot_count);
	uint64_t units = of(&overflow->gpu[gpu], ledger_generation(word_load(&overflow->owner)));
	sum.pod_units += units;
	sum.container_units += units;
	return sum;
}

struct ledger_sum ledger_sum(const struct ledger *l, unsigned gpu, uint32_t container_index)
{
	return add_up(l, gpu, container_index, units_of);
}

static uint64_t swap_units_of(const struct gpufence_slot_gpu *g, uint32_t generation)
{
	uint64_t swap = word_load(&g->swap);
	return ledger_generation(swap) == generation ? swap & GPUFENCE_UNITS_MASK : 0;
}

struct ledger_sum ledger_sum_swap(const struct ledger *l, unsigned gpu, uint32_t container_index)
{
	return add_up(l, gpu, container_index, swap_units_of);
}

bool ledger_has_process(const struct ledger *l, uint32_t pid, uint64_t pidns_inode)
{
	for (uint32_t i = 0; i < l->slot_count; i++) {
		const struct gpufence_slot *s = ledger_slot(l, i);
		uint64_t owner = word_load(&s->owner);
		if (ledger_state(owner) == GPUFENCE_SLOT_LIVE && (uint32_t)owner == pid && word_load_relaxed(&s->pidns_inode) == pidns_inode)
			return true;
	}
	return false;
}

bool ledger_clear_overflow(struct ledger *l, int fd, unsigned gpu)
{
	uint32_t n = l->slot_count;
	struct gpufence_slot *s = ledger_slot(l, n);
	if (units_of(&s->gpu[gpu], ledger_generation(word_load(&s->owner))) == 0)
		return false;
	if (pages_file_lock(fd, PAGES_LOCK_EXCLUSIVE, slot_offset(l, n), l->slot_bytes) != 0)
		return false;
	zero_overflow(l);
	pages_file_lock(fd, PAGES_LOCK_NONE, slot_offset(l, n), l->slot_bytes);
	return true;
}

unsigned ledger_free_lost(struct ledger *l, int fd, unsigned gpu)
{
	unsigned freed = 0;
	for (uint32_t i = 0; i < l->slot_count; i++) {
		struct gpufence_slot *s = ledger_slot(l, i);
		uint64_t owner = word_load(&s->owner);
		if (ledger_state(owner) != GPUFENCE_SLOT_LIVE || units_of(&s->gpu[gpu], ledger_generation(owner)) == 0)
			continue;
		if (pages_file_lock(fd, PAGES_LOCK_EXCLUSIVE, slot_offset(l, i), l->slot_bytes) != 0)
			continue;
		uint32_t next = (ledger_generation(owner) + 1) & GPUFENCE_GENERATION_MASK;
		/* Read before the lock: whoever claimed it in between has moved the generation. */
		if (word_swap(&s->owner, &owner, ledger_owner(next, GPUFENCE_SLOT_FREE, 0)))
			freed++;
		pages_file_lock(fd, PAGES_LOCK_NONE, slot_offset(l, i), l->slot_bytes);
	}
	return freed;
}

uint64_t *ledger_pressed(const struct ledger *l) { return &header(l)->pressed; }

void ledger_request_reclaim(struct ledger *l) { word_count(&header(l)->reclaim_request); }
