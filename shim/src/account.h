/* SPDX-License-Identifier: Apache-2.0 */
/*
 * account.h: what the hooks know of the shared pages. Everything behind it opens the pages at
 * the first call, never before, and works from any thread, after fork, and with the pages
 * missing (then nothing is charged and nothing is refused; the node enforcer sees that).
 *
 * A GPU is named by its entry in the limits page: 0..GPUFENCE_GPUS-1, or -1 where nothing holds
 * for it (no pages, not this container's). Every function takes -1 and then does nothing. What is
 * present but not fenced (observe mode) is charged and never refused. The number holds for the
 * life of the pod, also in a fork child; -1 may become a number later.
 *
 * Locks: none is held when a function returns, none is waited for without a deadline: 50 ms for
 * those that other processes hold; 1 s for another thread of this process that is just opening
 * the pages or registering.
 */
#ifndef GPUFENCE_ACCOUNT_H
#define GPUFENCE_ACCOUNT_H

#include <stdbool.h>
#include <stdint.h>

#include "pages.h"

enum account_counter {
	ACCOUNT_DEVICE,  /* device memory, contexts included */
	ACCOUNT_MANAGED, /* managed memory, counted as on the device */
	ACCOUNT_SWAP,    /* that stays on the host, held against memory.swap.max alone */
};

enum account_event {
	ACCOUNT_EVENT_MAX,    /* refused: own limit */
	ACCOUNT_EVENT_DEVICE, /* refused: the driver had no more */
	ACCOUNT_EVENT_HIGH,   /* delayed */
};

/* The entry of the GPU with this UUID (as cuDeviceGetUuid gives it), or -1. */
int account_gpu(const uint8_t uuid[16]);

/* Charges bytes (rounded up to 4 KiB) before the driver allocates them: 0, or -ENOMEM if the
 * container's or the pod's memory.max (memory.swap.max) would be crossed. The caller counts the event. */
int account_reserve(int gpu, enum account_counter counter, uint64_t bytes);

/* Charges what the driver has taken already, whatever the limits say. */
void account_charge(int gpu, enum account_counter counter, uint64_t bytes);

/* Takes a charge back: after the driver freed, or when it did not allocate. */
void account_release(int gpu, enum account_counter counter, uint64_t bytes);

void account_event(int gpu, enum account_event event);
void account_count_alloc(void); /* statistics */
void account_count_free(void);

/* Says that this process has memory of another one, which NVML may show under both. */
void account_imported(void);

struct account_view {
	uint64_t max_bytes;     /* the lower of container and pod; GPUFENCE_UNLIMITED for none */
	uint64_t headroom_bytes; /* what may still be charged; 0 when above; UNLIMITED likewise */
	uint64_t charged_bytes; /* container: its slots + excess */
	uint64_t context_bytes; /* what to charge for a context */
	uint64_t module_bytes;  /* what to charge for a loaded module; 0: nothing */
};

/* How much is charged above memory.high, of the container's and of the pod's. */
struct account_high {
	uint64_t high_bytes, over_bytes;
	uint64_t pod_high_bytes, pod_over_bytes;
};

/* Whether anything is. */
bool account_above_high(int gpu, struct account_high *high);

/*
 * What a launch looks at. memory.high can only be crossed by a charge, and whoever makes it bumps a
 * word of the ledger (account_press), or by what gpufenced publishes. As long as both words are as
 * they were when nothing was above, nothing is, however many processes charge: a load and a branch.
 */
struct account_calm {
	const uint64_t *latch;   /* NULL: no pages */
	const uint64_t *pressed;
	uint64_t seen_latch, seen_pressed; /* when nothing was above */
	uint64_t alone;          /* what is bumped where there is no ledger */
};
extern struct pages_wiped account_calm_memory;
static inline bool account_calm(void)
{
	if (__atomic_load_n(&account_calm_memory.memory, __ATOMIC_ACQUIRE) == NULL)
		return true; /* the pages were not asked for yet */
	const struct account_calm *c = pages_wiped(&account_calm_memory, sizeof *c);
	if (c == NULL)
		return true;
	const uint64_t *latch = __atomic_load_n(&c->latch, __ATOMIC_ACQUIRE);
	return latch == NULL ||
	       (word_load_acquire(latch) == word_load_relaxed(&c->seen_latch) &&
		word_load_acquire(__atomic_load_n(&c->pressed, __ATOMIC_RELAXED)) == word_load_relaxed(&c->seen_pressed));
}

/* Looks again: the GPUs, one bit each, where something is above memory.high. */
uint32_t account_look(void);

/* Makes every launch of the pod look again: a charge went above memory.high. */
void account_press(void);

/* Whether a process of our pid namespace has a slot in the pod's ledger. */
bool account_has_process(uint32_t pid);

/* Counts time that somebody was slowed. */
void account_throttled(int gpu, uint64_t ns);

/* false for -1. */
bool account_view(int gpu, struct account_view *view);

/* Where the pages lie. NULL, the default, means: beside this library. Tests, which link the
 * sources statically, name a folder. */
void account_set_dir(const char *dir);

#endif
