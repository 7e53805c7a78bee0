/* SPDX-License-Identifier: Apache-2.0 */
/* Start and end of a process that never touches CUDA, against an empty preload library. */
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>

#include "bench.h"

#define STARTS 200

static double start(char *preload)
{
	char program[] = "/bin/true", *argv[] = { program, NULL }, *environment[] = { preload, NULL };
	pid_t pid;
	int status;
	uint64_t begin = bench_now_ns();
	if (posix_spawn(&pid, program, NULL, NULL, argv, environment) != 0 || waitpid(pid, &status, 0) != pid || status != 0)
		bench_fail("cannot run %s", program);
	return (double)(bench_now_ns() - begin) / 1e3;
}

int main(void)
{
	struct bench_row row = { .name = "shim.start", .unit = "us" }, peer = { .name = "peer.start", .unit = "us" };
	struct bench_pod pod;
	char with[400], without[4200], others[4200];
	bench_pod_start(&pod, 1);
	snprintf(with, sizeof with, "LD_PRELOAD=%s", pod.shim);
	snprintf(without, sizeof without, "LD_PRELOAD=%s", bench_dist("bench/noop/empty.so"));
	if (bench_peer() != NULL)
		snprintf(others, sizeof others, "LD_PRELOAD=%s", bench_peer());
	for (int i = 0; i < 20; i++) {
		start(without);
		start(with);
	}
	for (int i = 0; i < STARTS; i++) {
		double baseline = start(without);
		bench_add(&row, baseline, start(with));
		if (bench_peer() != NULL)
			bench_add(&peer, baseline, start(others));
	}
	bench_print(&row);
	if (bench_peer() != NULL)
		bench_print(&peer);
	bench_pod_stop(&pod);
	return 0;
}
