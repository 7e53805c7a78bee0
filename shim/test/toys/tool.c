/* SPDX-License-Identifier: Apache-2.0 */
/* A profiler that is preloaded too: it wraps a driver function and calls the next one. */
#include <dlfcn.h>
#include <stddef.h>

int tool_calls;
int cuMemAlloc_v2(unsigned long long *, size_t);
int cuMemAlloc_v2(unsigned long long *pointer, size_t bytes)
{
	int (*next)(unsigned long long *, size_t) = (int (*)(unsigned long long *, size_t))dlsym(RTLD_NEXT, "cuMemAlloc_v2");
	tool_calls++;
	return next == NULL ? -1 : next(pointer, bytes);
}
