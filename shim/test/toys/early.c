/* SPDX-License-Identifier: Apache-2.0 */
/* Looks symbols up before main, and before any library that was loaded in front of it is ready. */
#include <dlfcn.h>
#include <stddef.h>

int early_found;

__attribute__((constructor)) static void early(void)
{
	early_found = dlsym(RTLD_DEFAULT, "puts") != NULL && dlsym(RTLD_DEFAULT, "cuInit") == NULL ? 1 : -1;
	dlerror();
}
