/* SPDX-License-Identifier: Apache-2.0 */
/* timed.h: what the timed build of the shim (timed.c) tells of its reserves. */
#ifndef GPUFENCE_TIMED_H
#define GPUFENCE_TIMED_H

#include <stdint.h>

struct timed {
	uint64_t reserves;
	uint64_t wall_ns;  /* the longest */
	uint64_t apart_ns; /* the longest, apart from waiting for a core (apart.h) */
	uint64_t cpu_ns;   /* the longest on a core */
};

/* Exported by that build: where it is to be told. NULL, as at first: nowhere. */
extern struct timed *gpufence_timed;

#endif
