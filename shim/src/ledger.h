/* SPDX-License-Identifier: Apache-2.0 */
/*
 * ledger.h: the words of a pod's ledger. Every function is one step of the protocol in abi.h on
 * a mapped ledger; when to take which step is account.c's. Nothing read here is believed beyond
 * what it costs this pod itself: bounds come from the private copy of the header.
 */
#ifndef GPUFENCE_LEDGER_H
#define GPUFENCE_LEDGER_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "../abi.h"

struct ledger {
	unsigned char *page;
	size_t size;
	uint32_t header_bytes;
	uint32_t slot_count; /* the overflow slot is slot number slot_count */
	uint32_t slot_bytes;
};

enum ledger_counter { LEDGER_DEVICE, LEDGER_MANAGED, LEDGER_SWAP, LEDGER_COUNTERS };

/* Maps and checks it: 0, or -errno; -EINVAL: not a ledger that we can use. */
int ledger_open(struct ledger *l, const char *path);

/* Who claims a slot. */
struct ledger_self {
	uint32_t pid;
	uint32_t container_index;
	uint64_t pidns_inode;
	uint64_t start_ticks;
};

/*
 * Claims a slot through fd, an open file of its own, whose lock on the slot then stays with that
 * open file. The lowest free slot, so that high_slot, and with it every sum, stays small; with
 * take_over also one whose owner has lost its lock. 0, or -EAGAIN: there is none.
 */
int ledger_claim(struct ledger *l, int fd, const struct ledger_self *self, bool take_over, uint32_t *slot, uint32_t *generation);

/* Becomes a user of the overflow slot: 0, or -EAGAIN: somebody is clearing it. */
int ledger_claim_overflow(struct ledger *l, int fd, uint32_t *slot, uint32_t *generation);

/*
 * Changes a counter of a slot. -ESTALE: the slot is not of this generation any more, nothing was
 * changed. ledger_add: -EOVERFLOW if it would not fit in 40 bits. ledger_sub stops at 0.
 * With sample, what the slot held before is kept as that sample's peak.
 */
int ledger_add(struct ledger *l, uint32_t slot, uint32_t generation, unsigned gpu, enum ledger_counter c, uint64_t units);
int ledger_sub(struct ledger *l, uint32_t slot, uint32_t generation, unsigned gpu, enum ledger_counter c, uint64_t units, const uint64_t *sample);

/* Keeps the present device charge as the peak of a sample, if it is one. */
void ledger_peak(struct ledger *l, uint32_t slot, uint32_t generation, unsigned gpu, uint64_t sample);

/* Whether a slot still is its owner's. The overflow slot is everybody's. */
bool ledger_owned(const struct ledger *l, uint32_t slot, uint32_t generation);

/* Whether a live slot is of this process. */
bool ledger_has_process(const struct ledger *l, uint32_t pid, uint64_t pidns_inode);

/* Device and managed units: of a container's live slots, and of all. The overflow slot counts
 * for every container. */
struct ledger_sum {
	uint64_t container_units;
	uint64_t pod_units;
};
struct ledger_sum ledger_sum(const struct ledger *l, unsigned gpu, uint32_t container_index);
/* The same of what is spilled to the host. */
struct ledger_sum ledger_sum_swap(const struct ledger *l, unsigned gpu, uint32_t container_index);

/* Sets the overflow slot to 0 if it charges the GPU and nobody uses it: whether it did. fd as for
 * ledger_free_lost. */
bool ledger_clear_overflow(struct ledger *l, int fd, unsigned gpu);

/*
 * For when gpufenced is away: frees slots that charge the GPU and whose owners have lost their
 * lock. How many. fd as for ledger_claim; it must hold no lock that is to stay.
 */
unsigned ledger_free_lost(struct ledger *l, int fd, unsigned gpu);

struct gpufence_slot *ledger_slot(const struct ledger *l, uint32_t slot);
void ledger_request_reclaim(struct ledger *l);
uint64_t *ledger_pressed(const struct ledger *l);

static inline uint32_t ledger_generation(uint64_t word) { return (uint32_t)(word >> GPUFENCE_UNITS_BITS); }
static inline unsigned ledger_state(uint64_t owner) { return (unsigned)(owner >> 32) & 0xff; }
static inline uint64_t ledger_owner(uint32_t generation, unsigned state, uint32_t pid)
{
	return ((uint64_t)generation & GPUFENCE_GENERATION_MASK) << GPUFENCE_UNITS_BITS | (uint64_t)state << 32 | pid;
}

#endif
