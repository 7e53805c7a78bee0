/* SPDX-License-Identifier: Apache-2.0 */
/* A caller that was linked on another system: VERSION is the version of dlsym it asks for. */
#include <dlfcn.h>

extern void *dlsym_of(void *, const char *);
__asm__(".symver dlsym_of,dlsym@" VERSION);

void *look(void *handle, const char *name);
void *look(void *handle, const char *name)
{
	void *found = dlsym_of(handle, name);
	__asm__ volatile("" : "+r"(found)); /* no tail call: the caller is this library */
	return found;
}
