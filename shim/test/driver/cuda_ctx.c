/* SPDX-License-Identifier: Apache-2.0 */
/* cuda_ctx.c: what contexts grow by, share and stand on; modules. */
#include "driver.h"

#include <pthread.h>
#include <stdlib.h>

CUresult cuCtxAttach(CUcontext *context, unsigned int flags)
{
	ENTER();
	if (context == NULL || flags != 0)
		return CUDA_ERROR_INVALID_VALUE;
	if (current == NULL)
		return CUDA_ERROR_INVALID_CONTEXT;
	current->attached++;
	*context = current;
	return CUDA_SUCCESS;
}

CUresult cuCtxDetach(CUcontext context)
{
	ENTER();
	if (context == NULL || context != current)
		return CUDA_ERROR_INVALID_CONTEXT;
	if (context->attached == 0)
		return cuCtxDestroy_v2(context);
	context->attached--;
	return CUDA_SUCCESS;
}

CUresult cuGLCtxCreate(CUcontext *context, unsigned int flags, CUdevice device)
{
	ENTER();
	return cuCtxCreate(context, flags, device);
}

CUresult cuGLCtxCreate_v2(CUcontext *context, unsigned int flags, CUdevice device)
{
	ENTER();
	return cuCtxCreate_v2(context, flags, device);
}

CUresult cuVDPAUCtxCreate(CUcontext *context, unsigned int flags, CUdevice device, uint32_t vdp_device, void *get_proc_address)
{
	ENTER();
	return vdp_device != 5 || get_proc_address != NULL ? CUDA_ERROR_INVALID_VALUE : cuCtxCreate(context, flags, device);
}

CUresult cuVDPAUCtxCreate_v2(CUcontext *context, unsigned int flags, CUdevice device, uint32_t vdp_device, void *get_proc_address)
{
	ENTER();
	return vdp_device != 5 || get_proc_address != NULL ? CUDA_ERROR_INVALID_VALUE : cuCtxCreate_v2(context, flags, device);
}

static const int64_t first[3] = { FAKE_STACK, 1 << 20, 8 << 20 };

API CUresult cuCtxGetLimit(size_t *value, int limit)
{
	ENTER();
	if (current == NULL)
		return CUDA_ERROR_INVALID_CONTEXT;
	if (value == NULL || limit < 0 || limit > 2)
		return CUDA_ERROR_INVALID_VALUE;
	*value = (size_t)(first[limit] + keeper()->limits[limit]);
	return CUDA_SUCCESS;
}

/* Stacks are multiples of 16. What a context is larger than it was made is in whole blocks. */
CUresult cuCtxSetLimit(int limit, size_t value)
{
	ENTER();
	if (current == NULL)
		return CUDA_ERROR_INVALID_CONTEXT;
	if (limit < 0 || limit > 2 || value > (UINT64_C(1) << 40))
		return CUDA_ERROR_INVALID_VALUE;
	int64_t is = (int64_t)(limit == 0 ? (value + 15) / 16 * 16 : value) - first[limit];
	int64_t whole = 0;
	for (int i = 0; i < 3; i++)
		whole += (i == limit ? is : keeper()->limits[i]) * (i == 0 ? FAKE_PROCESSORS * FAKE_PROCESSOR_THREADS : 1);
	if (whole > 0)
		whole = (whole + (int64_t)BLOCK - 1) / (int64_t)BLOCK * (int64_t)BLOCK;
	int64_t bytes = whole - keeper()->grown;
	if (bytes > 0 && !take_bytes((uint64_t)bytes))
		return CUDA_ERROR_OUT_OF_MEMORY;
	if (bytes < 0)
		live -= (uint64_t)-bytes;
	keeper()->grown += bytes;
	keeper()->limits[limit] = is;
	return CUDA_SUCCESS;
}

API CUresult cuDeviceGetAttribute(int *value, int attribute, CUdevice device)
{
	ENTER();
	if (value == NULL || device < 0 || device >= DEVICES)
		return CUDA_ERROR_INVALID_VALUE;
	*value = attribute == CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT ? FAKE_PROCESSORS : FAKE_PROCESSOR_THREADS;
	return CUDA_SUCCESS;
}

/* ---- green contexts ---- */

struct CUgreenCtx_st {
	struct CUctx_st context;
};

CUresult cuGreenCtxCreate(CUgreenCtx *green, CUdevResourceDesc resources, CUdevice device, unsigned int flags)
{
	CUcontext primary;
	ENTER();
	(void)resources;
	if (green == NULL || flags != 1)
		return CUDA_ERROR_INVALID_VALUE;
	CUresult result = cuDevicePrimaryCtxRetain(&primary, device);
	if (result != CUDA_SUCCESS)
		return result;
	if (!take_bytes(FAKE_CONTEXT_BYTES)) {
		cuDevicePrimaryCtxRelease_v2(device);
		return CUDA_ERROR_OUT_OF_MEMORY;
	}
	*green = calloc(1, sizeof **green);
	if (*green == NULL)
		abort();
	(*green)->context.device = device;
	(*green)->context.primary = primary;
	return CUDA_SUCCESS;
}

CUresult cuGreenCtxDestroy(CUgreenCtx green)
{
	ENTER();
	if (green == NULL)
		return CUDA_ERROR_INVALID_HANDLE;
	release_context(&green->context);
	if (current == &green->context)
		current = NULL;
	cuDevicePrimaryCtxRelease_v2(green->context.device);
	free(green);
	return CUDA_SUCCESS;
}

API CUresult cuCtxFromGreenCtx(CUcontext *context, CUgreenCtx green)
{
	ENTER();
	if (context == NULL || green == NULL)
		return CUDA_ERROR_INVALID_VALUE;
	*context = &green->context;
	return CUDA_SUCCESS;
}

/* ---- modules ---- */

#define MODULES 256

static struct module {
	const struct CUctx_st *context;
	int library, used;
} modules[MODULES];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static struct module *load(int library)
{
	struct module *m = NULL;
	if (current != NULL && !take_bytes(FAKE_MODULE_BYTES))
		return NULL;
	pthread_mutex_lock(&lock);
	for (unsigned int i = 0; m == NULL && i < MODULES; i++)
		if (!modules[i].used)
			m = &modules[i];
	if (m == NULL)
		abort();
	*m = (struct module){ keeper(), library, 1 };
	pthread_mutex_unlock(&lock);
	return m;
}

static CUresult unload(struct module *m, int library)
{
	CUresult result = CUDA_ERROR_INVALID_HANDLE;
	pthread_mutex_lock(&lock);
	if (m >= modules && m < modules + MODULES && m->used && m->library == library) {
		if (m->context != NULL)
			live -= FAKE_MODULE_BYTES;
		m->used = 0;
		result = CUDA_SUCCESS;
	}
	pthread_mutex_unlock(&lock);
	return result;
}

/* A library stays, with nothing in that context. */
void release_modules(const struct CUctx_st *context)
{
	pthread_mutex_lock(&lock);
	for (unsigned int i = 0; i < MODULES; i++) {
		if (!modules[i].used || modules[i].context != context)
			continue;
		live -= FAKE_MODULE_BYTES;
		modules[i].context = NULL;
		modules[i].used = modules[i].library;
	}
	pthread_mutex_unlock(&lock);
}

static CUresult load_module(CUmodule *module, const void *image)
{
	if (module == NULL || image == NULL)
		return CUDA_ERROR_INVALID_VALUE;
	if (current == NULL)
		return CUDA_ERROR_INVALID_CONTEXT;
	struct module *m = load(0);
	if (m == NULL)
		return CUDA_ERROR_OUT_OF_MEMORY;
	*module = (CUmodule)m;
	return CUDA_SUCCESS;
}

CUresult cuModuleLoad(CUmodule *module, const char *path)
{
	ENTER();
	return load_module(module, path);
}

CUresult cuModuleLoadData(CUmodule *module, const void *image)
{
	ENTER();
	return load_module(module, image);
}

CUresult cuModuleLoadDataEx(CUmodule *module, const void *image, unsigned int count, int *options, void **values)
{
	ENTER();
	return (count > 0) != (options != NULL) || (count > 0) != (values != NULL) ? CUDA_ERROR_INVALID_VALUE : load_module(module, image);
}

CUresult cuModuleLoadFatBinary(CUmodule *module, const void *image)
{
	ENTER();
	return load_module(module, image);
}

CUresult cuModuleUnload(CUmodule module)
{
	ENTER();
	return unload((struct module *)module, 0);
}

static CUresult load_library(CUlibrary *library, const void *image)
{
	if (library == NULL || image == NULL)
		return CUDA_ERROR_INVALID_VALUE;
	struct module *m = load(1);
	if (m == NULL)
		return CUDA_ERROR_OUT_OF_MEMORY;
	*library = (CUlibrary)m;
	return CUDA_SUCCESS;
}

CUresult cuLibraryLoadData(CUlibrary *library, const void *code, int *jit, void **jit_values, unsigned int jit_count, int *options,
			   void **values, unsigned int count)
{
	ENTER();
	return jit != NULL || jit_values != NULL || jit_count != 1 || options != NULL || values != NULL || count != 2 ?
		       CUDA_ERROR_INVALID_VALUE :
		       load_library(library, code);
}

CUresult cuLibraryLoadFromFile(CUlibrary *library, const char *path, int *jit, void **jit_values, unsigned int jit_count,
			       int *options, void **values, unsigned int count)
{
	ENTER();
	return jit != NULL || jit_values != NULL || jit_count != 1 || options != NULL || values != NULL || count != 2 ?
		       CUDA_ERROR_INVALID_VALUE :
		       load_library(library, path);
}

CUresult cuLibraryUnload(CUlibrary library)
{
	ENTER();
	return unload((struct module *)library, 1);
}
