/* SPDX-License-Identifier: Apache-2.0 */
/* The library in front: its function asks for the next one of its own name. */
#include <dlfcn.h>
#include <stddef.h>

int toy(void);
int toy_by_version(void);

static int depth;

static int call(void *next)
{
	int result;
	if (next == NULL)
		return -2;
	if (++depth > 3)
		return -1; /* it found itself */
	result = ((int (*)(void))next)();
	depth--;
	return result;
}

int toy(void) { return call(dlsym(RTLD_NEXT, "toy")); }

int toy_by_version(void) { return call(dlvsym(RTLD_NEXT, "toy_by_version", "TOY_1")); }
