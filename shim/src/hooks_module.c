/* SPDX-License-Identifier: Apache-2.0 */
/*
 * hooks_module.c: modules and libraries. What one takes is the driver's secret, and with lazy
 * loading it is taken later, function by function. So each is charged what gpufenced publishes, as
 * long as it is loaded. With 0 none is, and excess has what NVML sees of them.
 */
#include "charge.h"
#include "debug.h"
#include "device.h"
#include "real.h"

/* On the current device. A library is the process's, not the context's. */
static bool loading(struct charge *c, const char *call, bool library)
{
	struct account_view view;
	uint64_t owner;
	int gpu = device_current(&owner);
	uint64_t bytes = account_view(gpu, &view) ? view.module_bytes : 0;
	if (!charge_begin_on(c, call, gpu, ACCOUNT_DEVICE, bytes))
		return false;
	c->owner = library ? 0 : owner;
	return true;
}

#define LOAD(symbol, handle, library, ...)                                                        \
	do {                                                                                      \
		fn_##symbol *real = REAL(symbol);                                                 \
		struct charge c;                                                                  \
		if (real == NULL)                                                                 \
			return CUDA_ERROR_NOT_SUPPORTED;                                          \
		if ((handle) == NULL)                                                             \
			return real(__VA_ARGS__);                                                 \
		if (!loading(&c, #symbol, library))                                               \
			return CUDA_ERROR_OUT_OF_MEMORY;                                          \
		CUresult result = real(__VA_ARGS__);                                              \
		return charge_end(&c, result, result == CUDA_SUCCESS ? (uintptr_t) * (handle) : 0); \
	} while (0)

CUresult hook_cuModuleLoad(CUmodule *module, const char *path) { LOAD(cuModuleLoad, module, false, module, path); }
EXPORT(cuModuleLoad);

CUresult hook_cuModuleLoadData(CUmodule *module, const void *image)
{
	LOAD(cuModuleLoadData, module, false, module, image);
}
EXPORT(cuModuleLoadData);

CUresult hook_cuModuleLoadDataEx(CUmodule *module, const void *image, unsigned int count, int *options, void **values)
{
	LOAD(cuModuleLoadDataEx, module, false, module, image, count, options, values);
}
EXPORT(cuModuleLoadDataEx);

CUresult hook_cuModuleLoadFatBinary(CUmodule *module, const void *image)
{
	LOAD(cuModuleLoadFatBinary, module, false, module, image);
}
EXPORT(cuModuleLoadFatBinary);

CUresult hook_cuLibraryLoadData(CUlibrary *library, const void *code, int *jit, void **jit_values, unsigned int jit_count,
				int *options, void **values, unsigned int count)
{
	LOAD(cuLibraryLoadData, library, true, library, code, jit, jit_values, jit_count, options, values, count);
}
EXPORT(cuLibraryLoadData);

CUresult hook_cuLibraryLoadFromFile(CUlibrary *library, const char *path, int *jit, void **jit_values,
				    unsigned int jit_count, int *options, void **values, unsigned int count)
{
	LOAD(cuLibraryLoadFromFile, library, true, library, path, jit, jit_values, jit_count, options, values, count);
}
EXPORT(cuLibraryLoadFromFile);

/* A handle is an address of the program's, so it is no device pointer's. */
static void unloaded(bool known, const struct track_block *block, CUresult result)
{
	if (!known)
		return;
	if (result == CUDA_SUCCESS)
		charge_undo(block);
	else if (track_put(block) != 0)
		debug_line("module", "not tracked, out of host memory", block->bytes);
}

CUresult hook_cuModuleUnload(CUmodule module)
{
	fn_cuModuleUnload *real = REAL(cuModuleUnload);
	struct track_block block;
	if (real == NULL)
		return CUDA_ERROR_NOT_SUPPORTED;
	bool known = module != NULL && track_take((uintptr_t)module, &block);
	CUresult result = real(module);
	unloaded(known, &block, result);
	return result;
}
EXPORT(cuModuleUnload);

CUresult hook_cuLibraryUnload(CUlibrary library)
{
	fn_cuLibraryUnload *real = REAL(cuLibraryUnload);
	struct track_block block;
	if (real == NULL)
		return CUDA_ERROR_NOT_SUPPORTED;
	bool known = library != NULL && track_take((uintptr_t)library, &block);
	CUresult result = real(library);
	unloaded(known, &block, result);
	return result;
}
EXPORT(cuLibraryUnload);
