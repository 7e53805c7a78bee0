/* SPDX-License-Identifier: Apache-2.0 */
/* wrapper.c: a library of the usual kind for LD_PRELOAD: wraps functions, finds the true ones by dlsym. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

static unsigned int calls;

int puts(const char *s)
{
	static int (*next)(const char *);
	if (next == NULL)
		*(void **)&next = dlsym(RTLD_NEXT, "puts");
	calls++;
	return next(s);
}

unsigned int sleep(unsigned int seconds)
{
	unsigned int (*next)(unsigned int);
	*(void **)&next = dlvsym(RTLD_NEXT, "sleep", "GLIBC_2.2.5");
	return next == NULL ? 99 : next(seconds) + 7;
}

static __attribute__((destructor)) void stop(void) { fprintf(stderr, "puts was called %u times\n", calls); }
