/* SPDX-License-Identifier: Apache-2.0 */
/*
 * limits.h: the limits page as the shim reads it. Whatever is returned is one whole copy that
 * gpufenced wrote: never torn, checksum verified the first time that its latch value is seen.
 * While the page cannot be read whole, the last good copy stays in force.
 *
 * All of it lies in memory that a fork child finds zeroed (pages_wiped), so it holds no pointer
 * to itself; zero is "not open".
 */
#ifndef GPUFENCE_LIMITS_H
#define GPUFENCE_LIMITS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "../abi.h"

#define LIMITS_COPY_WORDS (sizeof(struct gpufence_limits_copy) / 8)

struct limits {
	const unsigned char *page;
	size_t size;
	uint32_t header_bytes;
	uint32_t gpu_bytes;  /* the writer's */
	uint32_t copy_bytes; /* the writer's */
	uint32_t gpus;       /* entries of a copy that we read */
	uint32_t container_index;

	uint64_t verified; /* latch + 1 of the newest copy whose checksum was right */
	uint64_t broken;   /* latch + 1 of one whose checksum was wrong */

	/* The last good copy, in our own layout, behind a latch of its own. */
	uint64_t saving; /* lock: one thread saves, the others go on without */
	uint64_t saved;  /* latch; 0: none yet */
	uint64_t copies[2][LIMITS_COPY_WORDS];

	uint64_t beat;          /* heartbeat last seen, */
	uint64_t beat_since_ns; /* and since when */
};

/* Maps and checks the page: 0, or -errno; -EINVAL: not a limits page that we can read. */
int limits_open(struct limits *l, const char *path);

struct limits_gpu {
	uint64_t flags;
	uint64_t total_bytes;
	uint64_t context_bytes;
	uint64_t max_bytes;
	uint64_t high_bytes;
	uint64_t swap_max_bytes;
	uint64_t pod_max_bytes;
	uint64_t pod_high_bytes;
	uint64_t pod_swap_max_bytes;
	uint64_t excess_bytes;
	uint64_t pod_excess_bytes;
	uint64_t module_bytes;
};

/* False: no such entry. */
bool limits_read(struct limits *l, unsigned gpu, struct limits_gpu *to);

/* The entry that this container has with this UUID, or -1. */
int limits_find(struct limits *l, const uint8_t uuid[16]);

/* The word that changes whenever gpufenced publishes. */
const uint64_t *limits_latch(const struct limits *l);

/* The number of the newest NVML sample. */
uint64_t limits_sample(const struct limits *l);

/* Whether gpufenced is away. Looks at the heartbeat, so it needs calls over GPUFENCE_STALE_NS
 * before it can say so. */
bool limits_stale(struct limits *l);

extern uint64_t limits_stale_ns; /* GPUFENCE_STALE_NS; tests shorten it */

#endif
