/* SPDX-License-Identifier: Apache-2.0 */
/*
 * bench.h: what the measuring programs share. Each is run without arguments, finds what was
 * built through $GPUFENCE_DIST, and prints one JSON object a line:
 *
 *	{"name":"shim.pair","unit":"ns","params":"10 blocks, 1 slot","baseline":[...],"with":[...]}
 *
 * Samples of both sides are taken in turns, so that what the machine does meanwhile hits both.
 */
#ifndef GPUFENCE_BENCH_H
#define GPUFENCE_BENCH_H

#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

#include "../test/pages_builder.h"

#define BENCH_SAMPLES 21

struct bench_row {
	const char *name, *unit;
	char params[80];
	double baseline[1024], with[1024];
	int samples;
};

uint64_t bench_now_ns(void);
void bench_add(struct bench_row *row, double baseline, double with);
void bench_print(const struct bench_row *row);
_Noreturn void bench_fail(const char *format, ...) __attribute__((format(printf, 1, 2)));

/* path below $GPUFENCE_DIST, absolute; it must exist. */
const char *bench_dist(const char *path);

/*
 * A pod: pages with a limit that is never reached, other processes that each hold a slot, and
 * the shim in a $LIB folder beside the pages, as in a container.
 */
struct bench_pod {
	struct builder pages;
	pid_t *holders;
	unsigned count;
	char shim[320];
};
void bench_pod_start(struct bench_pod *pod, unsigned slots);
void bench_pod_stop(struct bench_pod *pod);

/* Another preload library to measure in the same run, $PEER_SHIM; NULL: none. Its rows are named
 * peer.* instead of shim.*; whoever measures itself says which. */
const char *bench_peer(void);
const char *bench_rerun_peer(const char *argument, const char *argument2);
const char *bench_name(const char *ours);

/* Runs this program again, with these arguments, preload (NULL: none) and the measurement's
 * driver in the library path. Returns what it printed, in a buffer that the next call reuses. */
const char *bench_rerun(const char *preload, const char *argument, const char *argument2);

#endif
