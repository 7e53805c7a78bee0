/* SPDX-License-Identifier: Apache-2.0 */
#include "bench.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "../src/account.h"

#define MUST(x)                                                                                        \
	do {                                                                                           \
		if (!(x))                                                                              \
			bench_fail("%s:%d: %s: %s", __FILE__, __LINE__, #x, strerror(errno));          \
	} while (0)

uint64_t bench_now_ns(void)
{
	struct timespec t;
	clock_gettime(CLOCK_MONOTONIC, &t);
	return (uint64_t)t.tv_sec * UINT64_C(1000000000) + (uint64_t)t.tv_nsec;
}

_Noreturn void bench_fail(const char *format, ...)
{
	va_list args;
	va_start(args, format);
	vfprintf(stderr, format, args);
	va_end(args);
	fputc('\n', stderr);
	exit(1);
}

void bench_add(struct bench_row *row, double baseline, double with)
{
	if (row->samples == sizeof row->with / sizeof row->with[0])
		bench_fail("%s: too many samples", row->name);
	row->baseline[row->samples] = baseline;
	row->with[row->samples++] = with;
}

static void print_samples(const char *key, const double *samples, int n)
{
	printf("\"%s\":[", key);
	for (int i = 0; i < n; i++)
		printf("%s%.3f", i > 0 ? "," : "", samples[i]);
	putchar(']');
}

void bench_print(const struct bench_row *row)
{
	printf("{\"name\":\"%s\",\"unit\":\"%s\",\"params\":\"%s\",", row->name, row->unit, row->params);
	print_samples("baseline", row->baseline, row->samples);
	putchar(',');
	print_samples("with", row->with, row->samples);
	puts("}");
	fflush(stdout);
}

const char *bench_dist(const char *path)
{
	static char paths[4][4096];
	static unsigned turn;
	char joined[4096];
	const char *dist = getenv("GPUFENCE_DIST");
	if (dist == NULL)
		bench_fail("GPUFENCE_DIST is not set: run `make bench`");
	MUST(snprintf(joined, sizeof joined, "%s/%s", dist, path) < (int)sizeof joined);
	char *absolute = paths[turn++ % 4];
	if (realpath(joined, absolute) == NULL)
		bench_fail("%s: %s: run `make build` and `make bench`", joined, strerror(errno));
	return absolute;
}

static void hold_a_slot(const char *dir, int ready)
{
	uint8_t uuid[16];
	builder_uuid(0, uuid);
	prctl(PR_SET_PDEATHSIG, SIGKILL);
	account_set_dir(dir);
	if (account_gpu(uuid) != 0 || account_reserve(0, ACCOUNT_DEVICE, 4096) != 0 || write(ready, "x", 1) != 1)
		_exit(1);
	for (;;)
		pause();
}

static void copy_file(const char *from, const char *to)
{
	char buffer[65536];
	ssize_t n;
	int in = open(from, O_RDONLY | O_CLOEXEC), out = open(to, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0755);
	MUST(in >= 0 && out >= 0);
	while ((n = read(in, buffer, sizeof buffer)) > 0)
		MUST(write(out, buffer, (size_t)n) == n);
	MUST(n == 0 && close(in) == 0 && close(out) == 0);
}

void bench_pod_start(struct bench_pod *pod, unsigned slots)
{
	char folder[300];
	int ready[2];
	memset(pod, 0, sizeof *pod);
	builder_init(&pod->pages, NULL);
	/* A limit, so that the sum is taken, but one that is not reached. */
	builder_limit(&pod->pages, UINT64_C(1) << 50, UINT64_C(1) << 50);
	snprintf(folder, sizeof folder, "%s/lib64", pod->pages.dir);
	MUST(mkdir(folder, 0755) == 0);
	snprintf(pod->shim, sizeof pod->shim, "%s/libgpufence.so", folder);
	copy_file(bench_dist("lib/libgpufence.so"), pod->shim);
	pod->count = slots - 1;
	pod->holders = calloc(slots, sizeof pod->holders[0]);
	MUST(pod->holders != NULL && pipe2(ready, O_CLOEXEC) == 0);
	for (unsigned i = 0; i < pod->count; i++) {
		char c;
		pod->holders[i] = fork();
		MUST(pod->holders[i] >= 0);
		if (pod->holders[i] == 0)
			hold_a_slot(pod->pages.dir, ready[1]);
		MUST(read(ready[0], &c, 1) == 1);
	}
	MUST(close(ready[0]) == 0 && close(ready[1]) == 0);
	if (builder_live(&pod->pages) != pod->count)
		bench_fail("%u slots are live, not %u", builder_live(&pod->pages), pod->count);
}

void bench_pod_stop(struct bench_pod *pod)
{
	for (unsigned i = 0; i < pod->count; i++) {
		int status;
		MUST(kill(pod->holders[i], SIGKILL) == 0);
		MUST(waitpid(pod->holders[i], &status, 0) == pod->holders[i]);
	}
	free(pod->holders);
	MUST(unlink(pod->shim) == 0);
	*strrchr(pod->shim, '/') = '\0';
	MUST(rmdir(pod->shim) == 0);
	builder_remove(&pod->pages);
}

const char *bench_peer(void)
{
	static char path[4096];
	const char *peer = getenv("PEER_SHIM");
	if (peer == NULL || peer[0] == '\0')
		return NULL;
	if (realpath(peer, path) == NULL)
		bench_fail("PEER_SHIM=%s: %s", peer, strerror(errno));
	return path;
}

#define PEER_MARK "GPUFENCE_BENCH_PEER"

const char *bench_name(const char *ours)
{
	static char name[80];
	if (getenv(PEER_MARK) == NULL)
		return ours;
	snprintf(name, sizeof name, "peer%s", strchr(ours, '.'));
	return name;
}

const char *bench_rerun_peer(const char *argument, const char *argument2)
{
	MUST(setenv(PEER_MARK, "1", 1) == 0);
	const char *output = bench_rerun(bench_peer(), argument, argument2);
	MUST(unsetenv(PEER_MARK) == 0);
	return output;
}

const char *bench_rerun(const char *preload, const char *argument, const char *argument2)
{
	static char output[1 << 20];
	int out[2], status;
	size_t got = 0;
	ssize_t n;
	MUST(pipe2(out, O_CLOEXEC) == 0);
	fflush(NULL);
	pid_t pid = fork();
	MUST(pid >= 0);
	if (pid == 0) {
		dup2(out[1], 1);
		setenv("LD_LIBRARY_PATH", bench_dist("bench/noop"), 1);
		if (preload != NULL)
			setenv("LD_PRELOAD", preload, 1);
		execl("/proc/self/exe", "bench", argument, argument2, (char *)NULL);
		_exit(127);
	}
	MUST(close(out[1]) == 0);
	while ((n = read(out[0], output + got, sizeof output - 1 - got)) > 0)
		got += (size_t)n;
	output[got] = '\0';
	MUST(n == 0 && close(out[0]) == 0);
	MUST(waitpid(pid, &status, 0) == pid);
	if (!WIFEXITED(status) || WEXITSTATUS(status) != 0)
		bench_fail("%s: the measured process ended with status %#x", argument, (unsigned)status);
	return output;
}
