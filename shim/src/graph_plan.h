/* SPDX-License-Identifier: Apache-2.0 */
/* graph_plan.h: what a graph's own allocations need when it runs. */
#ifndef GPUFENCE_GRAPH_PLAN_H
#define GPUFENCE_GRAPH_PLAN_H

#include <stdbool.h>
#include <stdint.h>

#include "driver_api.h"

#define PLAN_DEVICES 8

struct plan {
	unsigned devices; /* 0: it allocates nothing */
	struct {
		CUdevice device;
		uint64_t bytes; /* at most at once, in the order in which the nodes were added */
		bool leaves;    /* something allocated that it does not free itself */
	} on[PLAN_DEVICES];
};

/*
 * Reads the graph, nested ones included. What one node frees the next may use, as far as a block of
 * its own for each goes: what the driver keeps for a graph that runs alone is not more, and what
 * two branches need at the same time beyond that shows after the launch. Without memory to
 * read it all, it is the sum of what was read.
 */
void plan_read(CUgraph graph, struct plan *plan);

#endif
