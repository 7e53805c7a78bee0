/* SPDX-License-Identifier: Apache-2.0 */
/*
 * account.c: this process's part in the protocol of abi.h.
 *
 * The process keeps a total of what it has charged, per GPU and counter, tagged with an epoch.
 * The epoch names a registration: which slot holds the charges. A reserve announces in the slot,
 * sums, and then commits to the total; a release takes from the total, then from the slot. When
 * the slot is lost (gpufenced or a peer gave it away) or changed, one thread moves every total
 * to the next epoch, which freezes it, charges the frozen totals in the new slot, and publishes
 * it. A thread that was in between finds that its commit fails, takes its announcement back, and
 * begins again. So whatever was committed is in exactly one slot that counts, at any time after
 * the publication, however many threads were on their way.
 *
 * All state lies in memory that a fork child finds zeroed: a child is not registered, and
 * inherits neither mapping nor descriptor nor lock.
 */
#include "account.h"

#include <errno.h>

#include "../abi.h"
#include "ledger.h"
#include "limits.h"
#include "pages.h"

#define MS UINT64_C(1000000)

/* How long the slow path's lock is tried for. */
#define SLOW_LOCK_NS (50 * MS)
/* How long a thread waits for another one of its own process that opens or registers. */
#define LOCAL_WAIT_NS (1000 * MS)
/* How often a process that could not use the ledger tries again. */
#define PRIVATE_RETRY_NS (100 * MS)
#define BACKOFFS 4
#define RESTARTS 64

#define COUNTERS 3

/* Where a thread can be overtaken. A test that includes this file stops it there. */
#ifndef ACCOUNT_STEP
#define ACCOUNT_STEP(step) ((void)0)
#endif

enum open_state {
	OPEN_NOT = 0,
	OPEN_DONE = 1,
	OPEN_NONE = 2, /* no pages, or foreign ones: nothing is charged */
};

/* A registration in one word: [slot:16 | generation:24 | epoch:24]. 0: not registered. */
#define SLOT_PRIVATE 0xffffu /* no ledger: the totals alone are held against the limits */
#define EPOCH_MASK GPUFENCE_GENERATION_MASK

struct process {
	uint64_t open; /* enum open_state */
	uint64_t opening; /* lock */
	uint64_t registration;
	uint64_t registering; /* lock: everything below up to the totals */
	uint64_t mapped;      /* ledger is valid */
	uint64_t retry_at_ns;
	void *hold;
	struct ledger ledger;
	uint64_t in_overflow; /* threads between announcing in the overflow slot and being done with it */
	uint64_t totals[GPUFENCE_GPUS][COUNTERS]; /* [epoch:24 | units:40] */
	uint64_t imports; /* as in the slot */
	struct limits limits;
	uint64_t throttled_ns[GPUFENCE_GPUS]; /* that is not a whole millisecond yet */
	char ledger_path[PAGES_PATH_MAX]; /* found once, when the limits page is opened */
};

static struct pages_wiped memory;
static const char *pages_dir;

struct pages_wiped account_calm_memory;

static struct process *process(void) { return pages_wiped(&memory, sizeof(struct process)); }

void account_set_dir(const char *dir) { __atomic_store_n(&pages_dir, dir, __ATOMIC_RELEASE); }

static struct account_calm *calm(void) { return pages_wiped(&account_calm_memory, sizeof(struct account_calm)); }

/* Launches look at the pages from here on. Before they are said to be open. */
static bool watch_limits(const struct process *p)
{
	struct account_calm *c = calm();
	if (c == NULL)
		return false;
	const uint64_t *latch = limits_latch(&p->limits);
	word_store(&c->seen_latch, word_load_acquire(latch) - 1); /* look once */
	__atomic_store_n(&c->pressed, &c->alone, __ATOMIC_RELEASE);
	__atomic_store_n(&c->latch, latch, __ATOMIC_RELEASE);
	return true;
}

/* The ledger's word, while it is used: one that was cut must not be touched. */
static void watch_ledger(const struct process *p, bool used)
{
	struct account_calm *c = calm();
	if (c == NULL)
		return;
	const uint64_t *word = used ? ledger_pressed(&p->ledger) : &c->alone;
	if (__atomic_exchange_n(&c->pressed, word, __ATOMIC_ACQ_REL) != word)
		word_store(&c->seen_latch, word_load_acquire(limits_latch(&p->limits)) - 1); /* it counts otherwise */
}

/* Opens the limits page, unless another thread has, or there is none. */
__attribute__((noinline)) static bool open_limits(struct process *p)
{
	char path[PAGES_PATH_MAX];
	if (word_load_acquire(&p->open) == OPEN_NONE || !pages_lock(&p->opening, LOCAL_WAIT_NS))
		return false;
	uint64_t state = word_load_acquire(&p->open);
	if (state == OPEN_NOT) {
		const char *dir = __atomic_load_n(&pages_dir, __ATOMIC_ACQUIRE);
		int r = pages_path(path, dir, GPUFENCE_LIMITS_NAME) && pages_path(p->ledger_path, dir, GPUFENCE_LEDGER_NAME) ?
				limits_open(&p->limits, path) :
				-ENOENT;
		if (r == 0 && !watch_limits(p))
			r = -ENOMEM;
		/* What may pass (no descriptor left, no memory) is tried again at the next call: it
		 * must not leave this process without limits for good. */
		if (r == 0)
			state = OPEN_DONE;
		else if (r == -ENOENT || r == -ENOTDIR || r == -EINVAL)
			state = OPEN_NONE;
		word_store(&p->open, state);
	}
	pages_unlock(&p->opening);
	return state == OPEN_DONE;
}

/* The process with its limits page open, or NULL. */
static struct process *opened(bool open)
{
	struct process *p = process();
	if (p == NULL)
		return NULL;
	if (__builtin_expect(word_load_acquire(&p->open) == OPEN_DONE, 1))
		return p;
	return open && open_limits(p) ? p : NULL;
}

static uint32_t slot_of(uint64_t registration) { return (uint32_t)(registration >> 48); }
static uint32_t generation_of(uint64_t registration) { return (uint32_t)(registration >> 24) & GPUFENCE_GENERATION_MASK; }
static uint64_t epoch_of(uint64_t registration) { return registration & EPOCH_MASK; }

static uint64_t registration_word(uint32_t slot, uint32_t generation, uint64_t epoch)
{
	return (uint64_t)slot << 48 | (uint64_t)generation << 24 | epoch;
}

/* The ledger, mapped; the caller holds registering. */
static bool map_ledger(struct process *p)
{
	if (word_load_relaxed(&p->mapped))
		return true;
	if (ledger_open(&p->ledger, p->ledger_path) != 0)
		return false;
	word_store(&p->mapped, 1);
	return true;
}

/* An open file of our own on the ledger, if the file still is as long as what we mapped. */
static int open_ledger(const struct process *p)
{
	int fd = pages_open(p->ledger_path, true);
	if (fd < 0)
		return fd;
	int64_t size = pages_size(fd);
	if (size < 0 || (uint64_t)size < p->ledger.size) {
		pages_close(fd);
		return -EINVAL;
	}
	return fd;
}

/* Finds a slot, the overflow slot as the last resort: 0, or -errno. */
static int claim(struct process *p, bool overflow, uint32_t *slot, uint32_t *generation, void **hold)
{
	if (!map_ledger(p))
		return -ENOENT;
	int fd = open_ledger(p);
	if (fd < 0)
		return fd;
	struct ledger_self self = {
		.pid = pages_pid(),
		.container_index = p->limits.container_index,
		.pidns_inode = pages_pidns_inode(),
		.start_ticks = pages_start_ticks(),
	};
	/* Before any lock is taken: without it, closing fd would drop the lock. */
	*hold = pages_hold(fd);
	int r = -ENOMEM;
	if (*hold != NULL) {
		r = ledger_claim(&p->ledger, fd, &self, limits_stale(&p->limits), slot, generation);
		uint64_t begin = 0;
		while (r == -EAGAIN && overflow) {
			r = ledger_claim_overflow(&p->ledger, fd, slot, generation);
			if (r == 0)
				break;
			uint64_t now = pages_now_ns();
			if (begin == 0)
				begin = now;
			else if (now - begin > SLOW_LOCK_NS)
				break;
			pages_sleep_ns(MS / 4);
		}
		if (r != 0)
			pages_let_go(*hold);
	}
	pages_close(fd);
	return r;
}

static bool is_overflow(const struct process *p, uint64_t registration)
{
	return slot_of(registration) == p->ledger.slot_count;
}

/* A slot of its own has one user; the overflow slot's lock must outlast every change that a
 * thread makes there, so those are counted. -ESTALE: the registration is another one by now. */
static int enter_slot(struct process *p, uint64_t registration)
{
	if (!is_overflow(p, registration))
		return 0;
	__atomic_fetch_add(&p->in_overflow, 1, __ATOMIC_SEQ_CST);
	if (word_load(&p->registration) == registration)
		return 0;
	__atomic_fetch_sub(&p->in_overflow, 1, __ATOMIC_SEQ_CST);
	return -ESTALE;
}

static void leave_slot(struct process *p, uint64_t registration)
{
	if (is_overflow(p, registration))
		__atomic_fetch_sub(&p->in_overflow, 1, __ATOMIC_SEQ_CST);
}

/* Puts the number of imports into a slot of our own. The overflow slot is many processes', and tells
 * nothing of one. The greatest of several threads' stays. */
static void publish_imports(struct process *p, uint64_t registration)
{
	uint64_t imports = word_load(&p->imports);
	if (imports == 0 || registration == 0 || slot_of(registration) == SLOT_PRIVATE || is_overflow(p, registration) ||
	    !ledger_owned(&p->ledger, slot_of(registration), generation_of(registration)))
		return;
	uint64_t *to = &ledger_slot(&p->ledger, slot_of(registration))->imports, now = word_load_relaxed(to);
	while (now < imports && !word_swap(to, &now, imports))
		;
}

/* Puts the totals into a slot and publishes it. The caller holds registering. */
static void move_to(struct process *p, uint64_t old, uint32_t slot, uint32_t generation, void *hold)
{
	uint64_t moved[GPUFENCE_GPUS][COUNTERS];
	uint64_t epoch = (epoch_of(old) + 1) & EPOCH_MASK;
	uint64_t sample = limits_sample(&p->limits);
	if (epoch == 0)
		epoch = 1;
	for (unsigned g = 0; g < GPUFENCE_GPUS; g++) {
		for (unsigned c = 0; c < COUNTERS; c++) {
			uint64_t *total = &p->totals[g][c];
			uint64_t now = word_load(total), units;
			do
				units = now & GPUFENCE_UNITS_MASK;
			while (!word_swap(total, &now, epoch << GPUFENCE_UNITS_BITS | units));
			moved[g][c] = units;
			if (units == 0 || slot == SLOT_PRIVATE)
				continue;
			/* If this fails the slot is lost again, which the next reserve sees. */
			(void)ledger_add(&p->ledger, slot, generation, g, (enum ledger_counter)c, units);
			if (c == ACCOUNT_DEVICE)
				ledger_peak(&p->ledger, slot, generation, g, sample);
		}
	}
	__atomic_store_n(&p->registration, registration_word(slot, generation, epoch), __ATOMIC_SEQ_CST);
	/* After it: whoever counts meanwhile does so in the new slot, too. */
	publish_imports(p, registration_word(slot, generation, epoch));
	watch_ledger(p, slot != SLOT_PRIVATE);
	void *old_hold = p->hold;
	p->hold = hold;
	if (old != 0 && slot_of(old) != SLOT_PRIVATE && slot != SLOT_PRIVATE && is_overflow(p, old)) {
		/* Nobody takes our charges out of it but we. */
		for (unsigned g = 0; g < GPUFENCE_GPUS; g++)
			for (unsigned c = 0; c < COUNTERS; c++)
				if (moved[g][c] != 0)
					(void)ledger_sub(&p->ledger, slot_of(old), generation_of(old), g,
							 (enum ledger_counter)c, moved[g][c], NULL);
		uint64_t deadline = pages_now_ns() + SLOW_LOCK_NS;
		while (word_load(&p->in_overflow) != 0) {
			if (pages_now_ns() >= deadline) {
				old_hold = NULL; /* stays until the process ends: over-counted, never under */
				break;
			}
			pages_sleep_ns(50000);
		}
	}
	if (old_hold != NULL)
		pages_let_go(old_hold);
}

/* Registers this process anew, unless another thread has replaced the registration since. False:
 * another thread is at it for too long. */
__attribute__((noinline)) static bool register_again(struct process *p, uint64_t replaced)
{
	if (!pages_lock(&p->registering, LOCAL_WAIT_NS))
		return false;
	if (word_load_acquire(&p->registration) == replaced) {
		uint32_t slot, generation;
		void *hold;
		if (claim(p, true, &slot, &generation, &hold) == 0) {
			move_to(p, replaced, slot, generation, hold);
		} else {
			word_store(&p->retry_at_ns, pages_now_ns() + PRIVATE_RETRY_NS);
			if (replaced == 0 || slot_of(replaced) != SLOT_PRIVATE)
				move_to(p, replaced, SLOT_PRIVATE, 0, NULL);
		}
	}
	pages_unlock(&p->registering);
	return true;
}

/* From the overflow slot into one that has become free meanwhile, if there is one. */
static void leave_overflow(struct process *p)
{
	uint64_t old = word_load_acquire(&p->registration);
	uint32_t slot, generation;
	void *hold;
	if (old == 0 || slot_of(old) == SLOT_PRIVATE || !is_overflow(p, old) || !pages_lock(&p->registering, LOCAL_WAIT_NS))
		return;
	if (word_load_acquire(&p->registration) == old && claim(p, false, &slot, &generation, &hold) == 0)
		move_to(p, old, slot, generation, hold);
	pages_unlock(&p->registering);
}

enum verdict { WITHIN, OVER, LOST };

static bool above(uint64_t units, uint64_t excess_bytes, uint64_t max_bytes)
{
	if (max_bytes == GPUFENCE_UNLIMITED)
		return false;
	/* In this order nothing overflows, whatever the pages say. */
	return excess_bytes > max_bytes || units > (max_bytes - excess_bytes) / GPUFENCE_UNIT_BYTES;
}

static struct ledger_sum private_sum(const struct process *p, unsigned gpu)
{
	uint64_t units = 0;
	for (unsigned c = 0; c < ACCOUNT_SWAP; c++)
		units += word_load(&p->totals[gpu][c]) & GPUFENCE_UNITS_MASK;
	return (struct ledger_sum){ units, units };
}

/* The same of what is spilled to the host. */
static struct ledger_sum private_swap(const struct process *p, unsigned gpu)
{
	uint64_t units = word_load(&p->totals[gpu][ACCOUNT_SWAP]) & GPUFENCE_UNITS_MASK;
	return (struct ledger_sum){ units, units };
}

static enum verdict judge_swap(struct process *p, bool private, unsigned gpu, const struct limits_gpu *limit)
{
	struct ledger_sum sum = private ? private_swap(p, gpu) : ledger_sum_swap(&p->ledger, gpu, p->limits.container_index);
	return above(sum.container_units, 0, limit->swap_max_bytes) || above(sum.pod_units, 0, limit->pod_swap_max_bytes) ? OVER : WITHIN;
}

/* Whether what is announced fits. */
static enum verdict judge(struct process *p, uint64_t registration, unsigned gpu, unsigned counter)
{
	struct limits_gpu limit;
	bool known = limits_read(&p->limits, gpu, &limit) && (limit.flags & GPUFENCE_GPU_FENCED);
	bool private = slot_of(registration) == SLOT_PRIVATE;
	if (!private && !ledger_owned(&p->ledger, slot_of(registration), generation_of(registration)))
		return LOST;
	if (__builtin_expect(counter == ACCOUNT_SWAP, 0))
		return known ? judge_swap(p, private, gpu, &limit) : WITHIN;
	if (!known || (limit.max_bytes == GPUFENCE_UNLIMITED && limit.pod_max_bytes == GPUFENCE_UNLIMITED))
		return WITHIN;
	struct ledger_sum sum = private ? private_sum(p, gpu) : ledger_sum(&p->ledger, gpu, p->limits.container_index);
	return above(sum.container_units, limit.excess_bytes, limit.max_bytes) ||
			       above(sum.pod_units, limit.pod_excess_bytes, limit.pod_max_bytes) ?
		       OVER :
		       WITHIN;
}

/* Adds to a total: -ESTALE: of another epoch, -EOVERFLOW. */
static int total_add(struct process *p, uint64_t registration, unsigned gpu, unsigned counter, uint64_t units)
{
	uint64_t *total = &p->totals[gpu][counter];
	uint64_t now = word_load(total);
	do {
		if (now >> GPUFENCE_UNITS_BITS != epoch_of(registration))
			return -ESTALE;
		if (units > GPUFENCE_UNITS_MASK - (now & GPUFENCE_UNITS_MASK))
			return -EOVERFLOW;
	} while (!word_swap(total, &now, now + units));
	return 0;
}

/* Takes from a total as much as is there, and says how much. */
static int total_sub(struct process *p, uint64_t registration, unsigned gpu, unsigned counter, uint64_t units, uint64_t *taken)
{
	uint64_t *total = &p->totals[gpu][counter];
	uint64_t now = word_load(total);
	do {
		if (now >> GPUFENCE_UNITS_BITS != epoch_of(registration))
			return -ESTALE;
		uint64_t there = now & GPUFENCE_UNITS_MASK;
		*taken = units < there ? units : there;
	} while (!word_swap(total, &now, now - *taken));
	return 0;
}

/* One try: 0, -ENOMEM, -ESTALE: with another registration again, -EOVERFLOW. What is there already
 * is not judged. */
static int reserve_once(struct process *p, uint64_t registration, unsigned gpu, unsigned counter, uint64_t units, bool there)
{
	enum ledger_counter c = (enum ledger_counter)counter;
	uint32_t slot = slot_of(registration), generation = generation_of(registration);
	int r;
	if (slot == SLOT_PRIVATE) {
		r = total_add(p, registration, gpu, counter, units);
		ACCOUNT_STEP(ANNOUNCED);
		if (r == 0 && !there && judge(p, registration, gpu, counter) == OVER) {
			/* If it is of another epoch by now, the charge went along and is taken there. */
			uint64_t taken;
			while (total_sub(p, registration, gpu, counter, units, &taken) != 0) {
				if (!register_again(p, registration))
					return -EBUSY;
				registration = word_load_acquire(&p->registration);
			}
			if (slot_of(registration) != SLOT_PRIVATE)
				(void)ledger_sub(&p->ledger, slot_of(registration), generation_of(registration), gpu, c, taken, NULL);
			r = -ENOMEM;
		}
		return r;
	}
	r = enter_slot(p, registration);
	if (r != 0)
		return r;
	r = ledger_add(&p->ledger, slot, generation, gpu, c, units);
	if (r != 0) {
		leave_slot(p, registration);
		return r;
	}
	ACCOUNT_STEP(ANNOUNCED);
	switch (judge(p, registration, gpu, counter)) {
	case WITHIN:
		ACCOUNT_STEP(JUDGED);
		r = total_add(p, registration, gpu, counter, units);
		break;
	case OVER:
		r = there ? total_add(p, registration, gpu, counter, units) : -ENOMEM;
		break;
	case LOST:
		r = -ESTALE;
		break;
	}
	ACCOUNT_STEP(COMMITTED);
	if (r != 0)
		(void)ledger_sub(&p->ledger, slot, generation, gpu, c, units, NULL);
	else if (counter == ACCOUNT_DEVICE)
		ledger_peak(&p->ledger, slot, generation, gpu, limits_sample(&p->limits));
	leave_slot(p, registration);
	return r;
}

/* The registration to work with, 0 if there is none to be had in time. */
static uint64_t registered(struct process *p)
{
	uint64_t registration = word_load_acquire(&p->registration);
	if (registration == 0 ||
	    (slot_of(registration) == SLOT_PRIVATE && pages_now_ns() >= word_load_relaxed(&p->retry_at_ns))) {
		if (!register_again(p, registration))
			return 0;
		registration = word_load_acquire(&p->registration);
	}
	return registration;
}

/* As reserve_once, over changes of the registration. -EBUSY: not possible, and no more so later. */
static int reserve_here(struct process *p, unsigned gpu, unsigned counter, uint64_t units, bool there)
{
	for (int restarts = 0; restarts < RESTARTS; restarts++) {
		uint64_t registration = registered(p);
		if (registration == 0)
			return -EBUSY;
		ACCOUNT_STEP(READ);
		int r = reserve_once(p, registration, gpu, counter, units, there);
		if (r != -ESTALE)
			return r;
		if (!register_again(p, registration))
			return -EBUSY;
	}
	/* Somebody keeps taking our slots away: only a pod that scribbles on its ledger can. */
	return -EBUSY;
}

static uint64_t random_below(uint64_t n)
{
	/* Good enough to step out of each other's way. */
	uint64_t x = pages_now_ns() ^ pages_thread() ^ (uint64_t)(uintptr_t)&memory;
	x ^= x >> 33;
	x *= UINT64_C(0xff51afd7ed558ccd);
	x ^= x >> 33;
	return x % n;
}

/* Whether it does not fit beside what this process itself holds, whatever the others do. */
static bool hopeless(struct process *p, unsigned gpu, unsigned counter, uint64_t units)
{
	struct limits_gpu limit;
	if (!limits_read(&p->limits, gpu, &limit))
		return false;
	if (counter == ACCOUNT_SWAP) {
		units += private_swap(p, gpu).container_units;
		return above(units, 0, limit.swap_max_bytes) || above(units, 0, limit.pod_swap_max_bytes);
	}
	units += private_sum(p, gpu).container_units;
	return above(units, limit.excess_bytes, limit.max_bytes) || above(units, limit.pod_excess_bytes, limit.pod_max_bytes);
}

/* Near the limit. Two that announce together may both withdraw: step aside, then one by one. */
__attribute__((noinline)) static int reserve_slowly(struct process *p, unsigned gpu, unsigned counter, uint64_t units)
{
	if (hopeless(p, gpu, counter, units)) {
		if (slot_of(word_load_acquire(&p->registration)) != SLOT_PRIVATE)
			ledger_request_reclaim(&p->ledger);
		return -ENOMEM;
	}
	for (int i = 0; i < BACKOFFS; i++) {
		if (i == 0) {
			for (uint64_t n = random_below(64); n > 0; n--)
				cpu_relax();
		} else {
			pages_sleep_ns(random_below(UINT64_C(10000) << i));
		}
		int r = reserve_here(p, gpu, counter, units, false);
		if (r == 0)
			return 0;
	}
	if (slot_of(word_load_acquire(&p->registration)) == SLOT_PRIVATE || !word_load_acquire(&p->mapped))
		return -ENOMEM;
	leave_overflow(p);
	int fd = open_ledger(p);
	if (fd == -EINVAL) {
		/* It was cut, and touching it would be fatal: on with the totals alone. */
		register_again(p, word_load_acquire(&p->registration));
		return reserve_here(p, gpu, counter, units, false);
	}
	bool locked = false;
	if (fd >= 0) {
		/* What the dead left, as far as it is a peer's to clear away. Slots' locks come before
		 * the slow path's. */
		ledger_clear_overflow(&p->ledger, fd, gpu);
		if (limits_stale(&p->limits))
			ledger_free_lost(&p->ledger, fd, gpu);
		uint64_t deadline = pages_now_ns() + SLOW_LOCK_NS;
		while (!(locked = pages_file_lock(fd, PAGES_LOCK_EXCLUSIVE, GPUFENCE_LEDGER_LOCK_OFFSET + gpu, 1) == 0) &&
		       pages_now_ns() < deadline)
			pages_sleep_ns(50000 + random_below(200000));
	}
	/* Also without the lock: it brings progress, not safety. */
	int r = reserve_here(p, gpu, counter, units, false);
	if (fd >= 0) {
		/* Not left to close: a fork in another thread may have copied the descriptor. */
		if (locked)
			pages_file_lock(fd, PAGES_LOCK_NONE, GPUFENCE_LEDGER_LOCK_OFFSET + gpu, 1);
		pages_close(fd);
	}
	if (r != 0)
		ledger_request_reclaim(&p->ledger);
	return r;
}

static struct process *for_gpu(int gpu)
{
	/* Opens them in a fork child, which has the number from its parent. */
	return gpu < 0 || gpu >= (int)GPUFENCE_GPUS ? NULL : opened(true);
}

static uint64_t units_of(uint64_t bytes)
{
	return bytes / GPUFENCE_UNIT_BYTES + (bytes % GPUFENCE_UNIT_BYTES != 0);
}

int account_gpu(const uint8_t uuid[16])
{
	struct process *p = opened(true);
	return p != NULL ? limits_find(&p->limits, uuid) : -1;
}

int account_reserve(int gpu, enum account_counter counter, uint64_t bytes)
{
	struct process *p = for_gpu(gpu);
	uint64_t units = units_of(bytes);
	if (p == NULL || units == 0)
		return 0;
	if (units > GPUFENCE_UNITS_MASK)
		return -ENOMEM;
	int r = reserve_here(p, (unsigned)gpu, counter, units, false);
	if (r == -ENOMEM)
		r = reserve_slowly(p, (unsigned)gpu, counter, units);
	return r == 0 ? 0 : -ENOMEM;
}

void account_charge(int gpu, enum account_counter counter, uint64_t bytes)
{
	struct process *p = for_gpu(gpu);
	uint64_t units = units_of(bytes);
	/* If it is not possible, gpufenced sees it as unaccounted. */
	if (p != NULL && units != 0 && units <= GPUFENCE_UNITS_MASK)
		(void)reserve_here(p, (unsigned)gpu, counter, units, true);
}

void account_release(int gpu, enum account_counter counter, uint64_t bytes)
{
	struct process *p = for_gpu(gpu);
	uint64_t units = units_of(bytes);
	if (p == NULL || units == 0)
		return;
	for (int restarts = 0; restarts < RESTARTS; restarts++) {
		uint64_t registration = word_load_acquire(&p->registration);
		if (registration == 0)
			return; /* a fork child: it has charged nothing */
		ACCOUNT_STEP(READ);
		bool private = slot_of(registration) == SLOT_PRIVATE;
		if (!private && enter_slot(p, registration) != 0)
			continue;
		uint64_t taken;
		if (total_sub(p, registration, (unsigned)gpu, counter, units, &taken) != 0) {
			/* A registration is under way: its charge has ours in it. */
			if (!private)
				leave_slot(p, registration);
			if (!register_again(p, registration))
				return;
			continue;
		}
		ACCOUNT_STEP(TAKEN);
		if (!private) {
			uint64_t sample = limits_sample(&p->limits);
			uint32_t slot = slot_of(registration), generation = generation_of(registration);
			int r = ledger_sub(&p->ledger, slot, generation, (unsigned)gpu, (enum ledger_counter)counter, taken, &sample);
			leave_slot(p, registration);
			/* The slot is lost, and with it what is left: into a new one. */
			if (__builtin_expect(r == -ESTALE || !ledger_owned(&p->ledger, slot, generation), 0))
				register_again(p, registration);
		}
		return;
	}
}

/* The slot to count in; NULL: none. */
static struct gpufence_slot *own_slot(struct process *p)
{
	uint64_t registration = word_load_acquire(&p->registration);
	if (registration == 0 || slot_of(registration) == SLOT_PRIVATE)
		return NULL;
	return ledger_slot(&p->ledger, slot_of(registration));
}

void account_event(int gpu, enum account_event event)
{
	struct process *p = for_gpu(gpu);
	struct gpufence_slot *s = p != NULL ? own_slot(p) : NULL;
	if (s == NULL)
		return;
	struct gpufence_slot_gpu *g = &s->gpu[gpu];
	switch (event) {
	case ACCOUNT_EVENT_MAX:
		word_count(&g->events_max);
		break;
	case ACCOUNT_EVENT_DEVICE:
		word_count(&g->events_device);
		break;
	case ACCOUNT_EVENT_HIGH:
		word_count(&g->events_high);
		break;
	}
}

void account_count_alloc(void)
{
	struct process *p = opened(false);
	struct gpufence_slot *s = p != NULL ? own_slot(p) : NULL;
	if (s != NULL)
		word_count(&s->allocs);
}

void account_count_free(void)
{
	struct process *p = opened(false);
	struct gpufence_slot *s = p != NULL ? own_slot(p) : NULL;
	if (s != NULL)
		word_count(&s->frees);
}

void account_imported(void)
{
	struct process *p = opened(true);
	if (p == NULL)
		return;
	__atomic_fetch_add(&p->imports, 1, __ATOMIC_SEQ_CST);
	publish_imports(p, word_load(&p->registration));
}

static uint64_t bytes_of(uint64_t units, uint64_t excess)
{
	uint64_t bytes = units > UINT64_MAX / GPUFENCE_UNIT_BYTES ? UINT64_MAX : units * GPUFENCE_UNIT_BYTES;
	return excess > UINT64_MAX - bytes ? UINT64_MAX : bytes + excess;
}

static uint64_t room(uint64_t max, uint64_t charged)
{
	if (max == GPUFENCE_UNLIMITED)
		return GPUFENCE_UNLIMITED;
	return charged < max ? max - charged : 0;
}

/* Maps the ledger if that is possible: others' charges show before this process has its own slot. */
static bool ledger_ready(struct process *p)
{
	if (!word_load_acquire(&p->mapped) && pages_now_ns() >= word_load_relaxed(&p->retry_at_ns) &&
	    pages_lock(&p->registering, LOCAL_WAIT_NS)) {
		if (!map_ledger(p))
			word_store(&p->retry_at_ns, pages_now_ns() + PRIVATE_RETRY_NS);
		pages_unlock(&p->registering);
	}
	return word_load_acquire(&p->mapped) != 0;
}

static uint64_t excess_over(uint64_t high, uint64_t charged)
{
	return high == GPUFENCE_UNLIMITED || charged <= high ? 0 : charged - high;
}

/* Of all that is charged now. */
static struct ledger_sum sum_now(const struct process *p, unsigned gpu)
{
	uint64_t registration = word_load_acquire(&p->registration);
	bool private = registration != 0 && slot_of(registration) == SLOT_PRIVATE;
	return private || !word_load_acquire(&p->mapped) ? private_sum(p, gpu) :
							   ledger_sum(&p->ledger, gpu, p->limits.container_index);
}

bool account_above_high(int gpu, struct account_high *high)
{
	struct process *p = for_gpu(gpu);
	struct limits_gpu limit;
	if (p == NULL || !limits_read(&p->limits, (unsigned)gpu, &limit) || !(limit.flags & GPUFENCE_GPU_FENCED) ||
	    (limit.high_bytes == GPUFENCE_UNLIMITED && limit.pod_high_bytes == GPUFENCE_UNLIMITED))
		return false;
	struct ledger_sum sum = sum_now(p, (unsigned)gpu);
	high->high_bytes = limit.high_bytes;
	high->pod_high_bytes = limit.pod_high_bytes;
	high->over_bytes = excess_over(limit.high_bytes, bytes_of(sum.container_units, limit.excess_bytes));
	high->pod_over_bytes = excess_over(limit.pod_high_bytes, bytes_of(sum.pod_units, limit.pod_excess_bytes));
	return high->over_bytes != 0 || high->pod_over_bytes != 0;
}

void account_press(void)
{
	struct process *p = opened(false);
	struct account_calm *c = p != NULL ? calm() : NULL;
	if (c == NULL)
		return;
	uint64_t *word = __atomic_load_n(&c->pressed, __ATOMIC_ACQUIRE) == &c->alone ? &c->alone : ledger_pressed(&p->ledger);
	__atomic_fetch_add(word, 1, __ATOMIC_SEQ_CST);
}

uint32_t account_look(void)
{
	struct process *p = opened(false);
	struct account_calm *c = p != NULL ? calm() : NULL;
	struct account_high high;
	uint32_t above = 0;
	if (c == NULL)
		return 0;
	/* First the words, then what they stand for. */
	uint64_t latch = word_load_acquire(limits_latch(&p->limits));
	const uint64_t *word = __atomic_load_n(&c->pressed, __ATOMIC_ACQUIRE);
	uint64_t pressed = word_load(word);
	for (unsigned g = 0; g < p->limits.gpus; g++)
		if (account_above_high((int)g, &high))
			above |= UINT32_C(1) << g;
	if (above == 0) {
		word_store(&c->seen_latch, latch);
		word_store(&c->seen_pressed, pressed);
		if (__atomic_load_n(&c->pressed, __ATOMIC_ACQUIRE) != word)
			word_store(&c->seen_latch, latch - 1);
	}
	return above;
}

void account_throttled(int gpu, uint64_t ns)
{
	struct process *p = for_gpu(gpu);
	struct gpufence_slot *s = p != NULL ? own_slot(p) : NULL;
	if (s == NULL)
		return;
	uint64_t sum = __atomic_add_fetch(&p->throttled_ns[gpu], ns, __ATOMIC_RELAXED), whole = sum / MS;
	/* Whoever is overtaken here leaves it to the one that was faster. */
	if (whole == 0 || !word_swap(&p->throttled_ns[gpu], &sum, sum - whole * MS))
		return;
	uint32_t *to = &s->throttled_ms[gpu], now = half_load_relaxed(to), next;
	do
		next = whole > UINT32_MAX - now ? UINT32_MAX : now + (uint32_t)whole;
	while (!__atomic_compare_exchange_n(to, &now, next, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED));
}

bool account_has_process(uint32_t pid)
{
	struct process *p = opened(true);
	return p != NULL && pid != 0 && ledger_ready(p) && ledger_has_process(&p->ledger, pid, pages_pidns_inode());
}

static uint64_t least(uint64_t a, uint64_t b) { return a < b ? a : b; }

bool account_view(int gpu, struct account_view *view)
{
	struct process *p = for_gpu(gpu);
	struct limits_gpu limit;
	if (p == NULL || !limits_read(&p->limits, (unsigned)gpu, &limit))
		return false;
	(void)ledger_ready(p);
	struct ledger_sum sum = sum_now(p, (unsigned)gpu);
	uint64_t max = GPUFENCE_UNLIMITED, pod_max = GPUFENCE_UNLIMITED;
	if (limit.flags & GPUFENCE_GPU_FENCED) {
		max = limit.max_bytes;
		pod_max = limit.pod_max_bytes;
	}
	view->charged_bytes = bytes_of(sum.container_units, limit.excess_bytes);
	view->max_bytes = least(max, pod_max);
	view->headroom_bytes = least(room(max, view->charged_bytes),
				     room(pod_max, bytes_of(sum.pod_units, limit.pod_excess_bytes)));
	view->context_bytes = limit.context_bytes;
	view->module_bytes = limit.module_bytes;
	return true;
}
