/* SPDX-License-Identifier: Apache-2.0 */
/*
 * pages_builder.h: plays gpufenced for the C tests. Creates the pages of a pod as gpufenced
 * does, publishes limits behind the latch, beats, samples, and takes slots back from the dead by
 * the same rules. Everything is checked with abort(): a test that cannot set up must not pass.
 */
#ifndef GPUFENCE_PAGES_BUILDER_H
#define GPUFENCE_PAGES_BUILDER_H

#include <stdbool.h>
#include <stdint.h>

#include "../abi.h"

struct builder_options {
	uint32_t slots;           /* 0: GPUFENCE_SLOTS */
	uint32_t container_index;
	/* What a writer of a later minor version may have appended, in bytes. */
	uint32_t more_header, more_gpu, more_copy, more_slot;
};

struct builder {
	char dir[256];
	struct builder_options options;
	unsigned char *limits_page;
	uint64_t limits_bytes;
	unsigned char *ledger_page;
	uint64_t ledger_bytes;
	int ledger_fd; /* an open file of its own, for locks */
};

/* Makes a folder of its own under $TMPDIR or /tmp. */
void builder_init(struct builder *b, const struct builder_options *options);
/* A second container of the same pod: its own folder and limits page, the same ledger file. */
void builder_join(struct builder *b, const struct builder *pod, uint32_t container_index);
void builder_remove(struct builder *b);

/* UUID number n. */
void builder_uuid(unsigned n, uint8_t uuid[16]);
/* An entry with no limits: present, fenced, unlimited. */
struct gpufence_limits_gpu builder_gpu(unsigned n);
void builder_publish(struct builder *b, const struct gpufence_limits_gpu *gpu, unsigned count);
/* One GPU, UUID 0, with this memory.max of the container and the pod. */
void builder_limit(struct builder *b, uint64_t max_bytes, uint64_t pod_max_bytes);

struct gpufence_limits *builder_limits(const struct builder *b);
struct gpufence_limits_copy *builder_copy(const struct builder *b, unsigned which);
struct gpufence_ledger *builder_ledger(const struct builder *b);
struct gpufence_slot *builder_slot(const struct builder *b, uint32_t slot);

/* Whether a slot's lock is free (exclusively; tried, then given back). */
bool builder_lock_free(const struct builder *b, uint32_t slot);
/* As gpufenced: frees a slot in any state with the next generation. exited: also if its lock is
 * still held, by a child that inherited it. */
bool builder_reclaim(struct builder *b, uint32_t slot, bool exited);
/* Frees every slot whose pid is this one. How many. */
unsigned builder_reclaim_pid(struct builder *b, uint32_t pid);
/* Sets the overflow slot to 0 if nobody uses it. */
bool builder_clear_overflow(struct builder *b);

/* Bytes of all live slots and the overflow slot. */
uint64_t builder_charged(const struct builder *b, unsigned gpu);
unsigned builder_live(const struct builder *b);

uint32_t builder_crc(const struct gpufence_limits_copy *copy, uint32_t copy_bytes);

#endif
