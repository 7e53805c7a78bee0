/* SPDX-License-Identifier: Apache-2.0 */
/*
 * apart.h: how long a thread was at something, apart from waiting for a core: wall time without the
 * time that it was ready to run and did not (the second number of /proc/thread-self/schedstat).
 * Sleeping, waiting for a lock or for the disk count, as running does. With more threads than cores
 * the wall time tells of the scheduler; this tells of the code.
 */
#ifndef GPUFENCE_APART_H
#define GPUFENCE_APART_H

#include <stdint.h>
#include <time.h>

#include "../src/pages.h"

struct apart_moment {
	uint64_t wall_ns, waited_ns, cpu_ns;
};

struct apart {
	uint64_t wall_ns;  /* in all */
	uint64_t apart_ns; /* without waiting for a core */
	uint64_t cpu_ns;   /* running */
};

static inline uint64_t apart_clock(clockid_t id)
{
	struct timespec t;
	clock_gettime(id, &t);
	return (uint64_t)t.tv_sec * UINT64_C(1000000000) + (uint64_t)t.tv_nsec;
}

/* How long this thread was ready and did not run; UINT64_MAX: the kernel does not say. */
static inline uint64_t apart_waited(void)
{
	char text[64] = "";
	uint64_t ns = 0;
	const char *at = text;
	int fd = pages_open("/proc/thread-self/schedstat", false);
	if (fd < 0)
		return UINT64_MAX;
	(void)pages_read(fd, text, sizeof text - 1); /* it is shorter, and text ends in 0 */
	pages_close(fd);
	while (*at >= '0' && *at <= '9')
		at++;
	if (*at++ != ' ')
		return UINT64_MAX;
	while (*at >= '0' && *at <= '9')
		ns = ns * 10 + (uint64_t)(*at++ - '0');
	return ns;
}

/* Now. Both clocks at once: nothing was waited for in between. */
static inline struct apart_moment apart_now(void)
{
	struct apart_moment a;
	uint64_t before;
	do {
		before = apart_waited();
		a.wall_ns = apart_clock(CLOCK_MONOTONIC);
		a.cpu_ns = apart_clock(CLOCK_THREAD_CPUTIME_ID);
		a.waited_ns = apart_waited();
	} while (before != a.waited_ns);
	return a;
}

static inline struct apart apart_since(const struct apart_moment *then)
{
	struct apart_moment now = apart_now();
	uint64_t wall = now.wall_ns - then->wall_ns, waited = now.waited_ns - then->waited_ns;
	return (struct apart){ wall, waited < wall ? wall - waited : 0, now.cpu_ns - then->cpu_ns };
}

static inline void apart_raise(uint64_t *to, uint64_t value)
{
	uint64_t now = __atomic_load_n(to, __ATOMIC_RELAXED);
	while (now < value && !__atomic_compare_exchange_n(to, &now, value, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED))
		;
}

#endif
