/* SPDX-License-Identifier: Apache-2.0 */
/*
 * launch.c: the code that programs register, loaded when it is first launched, and its launches.
 *
 * A program's start hands over one image for each of its compilation units, and for each kernel the address of a
 * function of its own that stands for it. An image becomes a library of the driver at the first use of one of its
 * kernels; the kernel's function is then asked for in each context.
 */
#include "internal.h"

struct image {
	struct image *next;
	const void *data;
	CUlibrary library; /* NULL: not loaded */
};

/* A kernel's function in a context. */
struct loaded {
	struct loaded *next;
	CUcontext ctx;
	CUfunction function;
};

struct kernel {
	struct kernel *next;
	const void *host; /* the program's function */
	struct image *image;
	const char *name; /* the program's too */
	CUkernel kernel;  /* NULL: not asked for */
	struct loaded *loaded;
};

static struct image *images;
static struct kernel *kernels[1 << 14];

static struct kernel **bucket(const void *host)
{
	uintptr_t h = (uintptr_t)host;

	return &kernels[((h >> 4) ^ (h >> 18)) % (sizeof(kernels) / sizeof(kernels[0]))];
}

static struct kernel *find_kernel(const void *host)
{
	struct kernel *k = *bucket(host);

	while (k && k->host != host)
		k = k->next;
	return k;
}

static void forget_loaded(struct kernel *k, CUcontext ctx)
{
	struct loaded **at = &k->loaded, *l;

	while ((l = *at)) {
		if (!ctx || l->ctx == ctx) {
			*at = l->next;
			free(l);
		} else {
			at = &l->next;
		}
	}
}

void code_forget(CUcontext ctx)
{
	struct kernel *k;
	size_t i;

	for (i = 0; i < sizeof(kernels) / sizeof(kernels[0]); i++)
		for (k = kernels[i]; k; k = k->next)
			forget_loaded(k, ctx);
}

/* ---- what compilers emit calls of ------------------------------------------------------- */

EXPORT void **__cudaRegisterFatBinary(void *data)
{
	struct image *im = calloc(1, sizeof(*im));

	if (!im)
		abort(); /* the program has not even started */
	im->data = data;
	pthread_mutex_lock(&lock);
	im->next = images;
	images = im;
	pthread_mutex_unlock(&lock);
	return (void **)im;
}

EXPORT void __cudaRegisterFatBinaryEnd(void **handle)
{
	(void)handle;
}

EXPORT void __cudaRegisterFunction(void **handle, const char *host, char *device, const char *name, int limit, uint3 *thread, uint3 *block,
				   dim3 *block_dim, dim3 *grid_dim, int *warp)
{
	struct kernel *k = calloc(1, sizeof(*k));

	(void)device;
	(void)limit;
	(void)thread;
	(void)block;
	(void)block_dim;
	(void)grid_dim;
	(void)warp;
	if (!k)
		abort();
	k->host = host;
	k->image = (struct image *)handle;
	k->name = name;
	pthread_mutex_lock(&lock);
	k->next = *bucket(host);
	*bucket(host) = k;
	pthread_mutex_unlock(&lock);
}

/* Variables are the module's: nothing here names one to the driver. */
EXPORT void __cudaRegisterVar(void **handle, char *host, char *device, const char *name, int external, size_t size, int constant, int global)
{
	(void)handle;
	(void)host;
	(void)device;
	(void)name;
	(void)external;
	(void)size;
	(void)constant;
	(void)global;
}

EXPORT void __cudaUnregisterFatBinary(void **handle)
{
	struct image *im = (struct image *)handle, **at;
	struct kernel **k, *gone;
	size_t i;

	pthread_mutex_lock(&lock);
	for (i = 0; i < sizeof(kernels) / sizeof(kernels[0]); i++) {
		for (k = &kernels[i]; *k;) {
			gone = *k;
			if (gone->image == im) {
				*k = gone->next;
				forget_loaded(gone, NULL);
				free(gone);
			} else {
				k = &gone->next;
			}
		}
	}
	for (at = &images; *at && *at != im; at = &(*at)->next)
		;
	if (*at)
		*at = im->next;
	pthread_mutex_unlock(&lock);
	if (im->library) /* what it says at the end of the process is of no use to anybody */
		(void)CALL(LEGACY, cuLibraryUnload, im->library);
	free(im);
}

struct configuration {
	dim3 grid, block;
	size_t shared;
	void *stream;
};

static _Thread_local struct configuration configurations[8];
static _Thread_local unsigned int configured;

EXPORT unsigned int __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, struct CUstream_st *stream)
{
	if (configured == sizeof(configurations) / sizeof(configurations[0]))
		return 1;
	configurations[configured++] = (struct configuration){grid, block, shared, stream};
	return 0;
}

EXPORT cudaError_t __cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *shared, void *stream)
{
	const struct configuration *c;

	if (configured == 0)
		return finish(cudaErrorMissingConfiguration);
	c = &configurations[--configured];
	*grid = c->grid;
	*block = c->block;
	*shared = c->shared;
	memcpy(stream, &c->stream, sizeof(c->stream));
	return cudaSuccess;
}

/* ---- loading ------------------------------------------------------------------------------ */

#define BINARY_IS_PRESERVED 1 /* of CUlibraryOption: the image stays where it is */

/* Called with the lock. */
static cudaError_t load(struct image *im)
{
	CUlibraryOption option = (CUlibraryOption)BINARY_IS_PRESERVED;
	void *value = (void *)(uintptr_t)1;

	if (im->library)
		return cudaSuccess;
	return CALL(LEGACY, cuLibraryLoadData, &im->library, im->data, NULL, NULL, 0, &option, &value, 1);
}

static cudaError_t function_in(struct kernel *k, CUcontext ctx, CUfunction *out)
{
	CUcontext popped;
	struct loaded *l;
	CUmodule module = NULL;
	cudaError_t e;

	for (l = k->loaded; l; l = l->next) {
		if (l->ctx == ctx) {
			*out = l->function;
			return cudaSuccess;
		}
	}
	e = load(k->image);
	if (e == cudaSuccess)
		e = CALL(LEGACY, cuCtxPushCurrent, ctx);
	if (e != cudaSuccess)
		return e;
	e = CALL(LEGACY, cuLibraryGetModule, &module, k->image->library);
	if (CALL(LEGACY, cuCtxPopCurrent, &popped) != cudaSuccess && e == cudaSuccess)
		e = cudaErrorUnknown;
	if (e == cudaSuccess)
		e = CALL(LEGACY, cuModuleGetFunction, out, module, k->name);
	if (e == cudaErrorSymbolNotFound)
		e = cudaErrorInvalidDeviceFunction;
	if (e != cudaSuccess)
		return e;
	l = malloc(sizeof(*l));
	if (!l)
		return cudaErrorMemoryAllocation;
	*l = (struct loaded){k->loaded, ctx, *out};
	k->loaded = l;
	return cudaSuccess;
}

/* The function of the current context that a program's function stands for. Enters. */
static cudaError_t function_of(const void *host, CUfunction *out)
{
	CUcontext ctx = NULL;
	struct kernel *k;
	cudaError_t e = enter();

	if (e == cudaSuccess)
		e = CALL(LEGACY, cuCtxGetCurrent, &ctx);
	if (e != cudaSuccess)
		return e;
	pthread_mutex_lock(&lock);
	k = find_kernel(host);
	e = k ? function_in(k, ctx, out) : cudaErrorInvalidDeviceFunction;
	pthread_mutex_unlock(&lock);
	return e;
}

/* ---- launches ------------------------------------------------------------------------------ */

static cudaError_t launch(enum variant v, const void *host, dim3 grid, dim3 block, void **args, size_t shared, cudaStream_t stream)
{
	CUfunction f;
	cudaError_t e = function_of(host, &f);

	if (e == cudaSuccess)
		e = CALL(v, cuLaunchKernel, f, grid.x, grid.y, grid.z, block.x, block.y, block.z, (unsigned int)shared, stream, args, NULL);
	return finish(e);
}

EXPORT cudaError_t cudaLaunchKernel(const void *host, dim3 grid, dim3 block, void **args, size_t shared, cudaStream_t stream)
{
	return launch(LEGACY, host, grid, block, args, shared, stream);
}

EXPORT cudaError_t cudaLaunchKernel_ptsz(const void *host, dim3 grid, dim3 block, void **args, size_t shared, cudaStream_t stream)
{
	return launch(PER_THREAD, host, grid, block, args, shared, stream);
}

EXPORT cudaError_t cudaLaunchCooperativeKernel(const void *host, dim3 grid, dim3 block, void **args, size_t shared, cudaStream_t stream)
{
	CUfunction f;
	cudaError_t e = function_of(host, &f);

	if (e == cudaSuccess)
		e = CALL(LEGACY, cuLaunchCooperativeKernel, f, grid.x, grid.y, grid.z, block.x, block.y, block.z, (unsigned int)shared, stream,
			 args);
	return finish(e);
}

static cudaError_t launch_with(enum variant v, const cudaLaunchConfig_t *config, const void *host, void **args)
{
	CUlaunchConfig c = {0};
	CUfunction f;
	cudaError_t e = config ? function_of(host, &f) : cudaErrorInvalidValue;

	if (e != cudaSuccess)
		return finish(e);
	c.gridDimX = config->gridDim.x;
	c.gridDimY = config->gridDim.y;
	c.gridDimZ = config->gridDim.z;
	c.blockDimX = config->blockDim.x;
	c.blockDimY = config->blockDim.y;
	c.blockDimZ = config->blockDim.z;
	c.sharedMemBytes = (unsigned int)config->dynamicSmemBytes;
	c.hStream = config->stream;
	c.attrs = (void *)config->attrs; /* laid out as the driver's */
	c.numAttrs = config->numAttrs;
	return finish(CALL(v, cuLaunchKernelEx, &c, f, args, NULL));
}

EXPORT cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *config, const void *host, void **args)
{
	return launch_with(LEGACY, config, host, args);
}

EXPORT cudaError_t cudaLaunchKernelExC_ptsz(const cudaLaunchConfig_t *config, const void *host, void **args)
{
	return launch_with(PER_THREAD, config, host, args);
}

#if CUDART_MAJOR >= 13
/* What the compilers of CUDA 13 emit in place of cudaLaunchKernel. */
EXPORT cudaError_t __cudaGetKernel(cudaKernel_t *out, const void *host)
{
	struct kernel *k;
	cudaError_t e = start();

	if (e != cudaSuccess)
		return finish(e);
	pthread_mutex_lock(&lock);
	k = find_kernel(host);
	e = k ? load(k->image) : cudaErrorInvalidDeviceFunction;
	if (e == cudaSuccess && !k->kernel)
		e = CALL(LEGACY, cuLibraryGetKernel, &k->kernel, k->image->library, k->name);
	if (e == cudaSuccess)
		*out = (cudaKernel_t)k->kernel;
	pthread_mutex_unlock(&lock);
	return finish(e);
}

EXPORT cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block, void **args, size_t shared, cudaStream_t stream)
{
	IN_CONTEXT(CALL(LEGACY, cuLaunchKernel, (CUfunction)kernel, grid.x, grid.y, grid.z, block.x, block.y, block.z, (unsigned int)shared,
			stream, args, NULL));
}

EXPORT cudaError_t __cudaLaunchKernel_ptsz(cudaKernel_t kernel, dim3 grid, dim3 block, void **args, size_t shared, cudaStream_t stream)
{
	IN_CONTEXT(CALL(PER_THREAD, cuLaunchKernel, (CUfunction)kernel, grid.x, grid.y, grid.z, block.x, block.y, block.z,
			(unsigned int)shared, stream, args, NULL));
}
#endif

/* ---- attributes ---------------------------------------------------------------------------- */

EXPORT cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *out, const void *host)
{
	int value[16] = {0}, i;
	CUfunction f;
	cudaError_t e = out ? function_of(host, &f) : cudaErrorInvalidValue;

	for (i = 0; e == cudaSuccess && i < 16; i++)
		e = CALL(LEGACY, cuFuncGetAttribute, &value[i], (CUfunction_attribute)i, f);
	if (e != cudaSuccess)
		return finish(e);
	memset(out, 0, sizeof(*out));
	out->maxThreadsPerBlock = value[0];
	out->sharedSizeBytes = (size_t)value[1];
	out->constSizeBytes = (size_t)value[2];
	out->localSizeBytes = (size_t)value[3];
	out->numRegs = value[4];
	out->ptxVersion = value[5];
	out->binaryVersion = value[6];
	out->cacheModeCA = value[7];
	out->maxDynamicSharedSizeBytes = value[8];
	out->preferredShmemCarveout = value[9];
	out->clusterDimMustBeSet = value[10];
	out->requiredClusterWidth = value[11];
	out->requiredClusterHeight = value[12];
	out->requiredClusterDepth = value[13];
	out->nonPortableClusterSizeAllowed = value[14];
	out->clusterSchedulingPolicyPreference = value[15];
	return cudaSuccess;
}

EXPORT cudaError_t cudaFuncSetAttribute(const void *host, enum cudaFuncAttribute attribute, int value)
{
	CUfunction f;
	cudaError_t e = function_of(host, &f);

	return finish(e == cudaSuccess ? CALL(LEGACY, cuFuncSetAttribute, f, (CUfunction_attribute)attribute, value) : e);
}

EXPORT cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *blocks, const void *host, int size, size_t shared,
									  unsigned int flags)
{
	CUfunction f;
	cudaError_t e = function_of(host, &f);

	return finish(e == cudaSuccess ? CALL(LEGACY, cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags, blocks, f, size, shared, flags) : e);
}
