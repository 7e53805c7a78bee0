/* SPDX-License-Identifier: Apache-2.0 */
/*
 * nvmlfault: preloaded into gpufenced, makes one of NVML's process lists fail while the file
 * $NVMLFAULT names it ("compute", "graphics" or "mps"). Everything else reaches the library behind it.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define NVML_ERROR_UNKNOWN 999
#define NVML_ERROR_FUNCTION_NOT_FOUND 13

typedef int list_fn(void *device, unsigned int *count, void *infos);

static int fails(const char *list)
{
	char text[32] = "";
	const char *path = getenv("NVMLFAULT");
	FILE *f = path ? fopen(path, "re") : NULL;

	if (!f)
		return 0;
	if (!fgets(text, sizeof(text), f))
		text[0] = '\0';
	fclose(f);
	return strcmp(text, list) == 0;
}

static int forward(const char *name, const char *list, void *device, unsigned int *count, void *infos)
{
	void *library = dlopen(getenv("NVMLFAULT_LIBRARY"), RTLD_LAZY | RTLD_NOLOAD);
	list_fn *real;

	if (!library)
		return NVML_ERROR_FUNCTION_NOT_FOUND;
	*(void **)&real = dlsym(library, name);
	dlclose(library);
	if (!real)
		return NVML_ERROR_FUNCTION_NOT_FOUND;
	return fails(list) ? NVML_ERROR_UNKNOWN : real(device, count, infos);
}

#define LIST(name, list) \
	int name(void *device, unsigned int *count, void *infos); \
	int name(void *device, unsigned int *count, void *infos) \
	{ \
		return forward(#name, list, device, count, infos); \
	}

LIST(nvmlDeviceGetComputeRunningProcesses_v3, "compute")
LIST(nvmlDeviceGetGraphicsRunningProcesses_v3, "graphics")
LIST(nvmlDeviceGetMPSComputeRunningProcesses_v3, "mps")
