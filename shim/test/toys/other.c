/* SPDX-License-Identifier: Apache-2.0 */
/* Somebody else's wrapper of dlsym, done properly. Built with optimisation: it needs its tail call. */
#include <dlfcn.h>
#include <stddef.h>

#ifdef __x86_64__
#define OLD "GLIBC_2.2.5"
#else
#define OLD "GLIBC_2.17"
#endif

int other_calls;

static void *(*next)(void *, const char *);

void *dlsym(void *handle, const char *name)
{
	if (next == NULL) {
		void *found = dlvsym(RTLD_NEXT, "dlsym", "GLIBC_2.34");
		if (found == NULL)
			found = dlvsym(RTLD_NEXT, "dlsym", OLD);
		next = (void *(*)(void *, const char *))found;
	}
	other_calls++;
	return next(handle, name);
}
