/* SPDX-License-Identifier: Apache-2.0 */
/* cudart.c: finding the driver, devices and their properties, contexts, errors. */
#include "internal.h"

#include <dlfcn.h>
#include <fcntl.h>
#include <stdio.h>
#include <unistd.h>

struct driver drivers[2];
struct gpu gpus[GPUS_MAX];
int gpu_count;
pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static cudaError_t started; /* how that went */
static int driver_version;
static int trace_fd = -1;
static CUresult (*get_proc)(const char *, void **, int, cuuint64_t, CUdriverProcAddressQueryResult *);
static CUresult (*get_proc_v1)(const char *, void **, int, cuuint64_t);

static _Thread_local int thread_device;
static _Thread_local cudaError_t last_error;

void trace(const char *name, enum variant v)
{
	if (trace_fd >= 0 && dprintf(trace_fd, "%s%s\n", name, v == PER_THREAD ? "/2" : "") < 0)
		trace_fd = -1; /* nobody can be told */
}

/* Not being ready is an answer, no error that stays. */
cudaError_t finish(cudaError_t error)
{
	if (error != cudaSuccess && error != cudaErrorNotReady)
		last_error = error;
	return error;
}

/* ---- the driver ---------------------------------------------------------------------- */

static void *resolve(const char *name, int version, cuuint64_t flags)
{
	CUdriverProcAddressQueryResult status;
	void *address = NULL;
	CUresult ret = get_proc ? get_proc(name, &address, version, flags, &status) : get_proc_v1(name, &address, version, flags);

	return ret == CUDA_SUCCESS ? address : NULL;
}

/* dlsym and cuGetProcAddress give functions as data. */
#define SET(pointer, address) memcpy(&(pointer), &(void *){address}, sizeof(pointer))

static cudaError_t find_driver(void)
{
	void *library = dlopen("libcuda.so.1", RTLD_NOW);

	if (!library)
		return cudaErrorInsufficientDriver;
	SET(get_proc, dlsym(library, "cuGetProcAddress_v2"));
	if (!get_proc)
		SET(get_proc_v1, dlsym(library, "cuGetProcAddress"));
	if (!get_proc && !get_proc_v1)
		return cudaErrorInsufficientDriver;
#define DRIVER(name, version, per_thread, parameters)                        \
	SET(drivers[LEGACY].name, resolve(#name, version, 0));               \
	if (per_thread)                                                      \
		SET(drivers[PER_THREAD].name, resolve(#name, per_thread, 2)); \
	else                                                                 \
		drivers[PER_THREAD].name = drivers[LEGACY].name;
#include "driver.def"
#undef DRIVER
	return CALL(LEGACY, cuDriverGetVersion, &driver_version);
}

static cudaError_t read_gpu(int i)
{
	struct gpu *g = &gpus[i];
	cudaError_t e = CALL(LEGACY, cuDeviceGet, &g->dev, i);
	int a;

	if (e == cudaSuccess)
		e = CALL(LEGACY, cuDeviceGetName, g->name, sizeof(g->name), g->dev);
	if (e == cudaSuccess)
		e = CALL(LEGACY, cuDeviceTotalMem, &g->total, g->dev);
	for (a = 1; e == cudaSuccess && a < ATTRIBUTES; a++)
		if (CALL(LEGACY, cuDeviceGetAttribute, &g->attribute[a], (CUdevice_attribute)a, g->dev) != cudaSuccess)
			g->attribute[a] = 0; /* an older driver does not know it */
	if (e == cudaSuccess)
		e = CALL(LEGACY, cuDeviceGetUuid, &g->uuid, g->dev);
	return e;
}

static void start_once(void)
{
	const char *path = getenv("SIMGPU_RUNTIME_TRACE");
	int i;

	if (path)
		trace_fd = open(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
	started = find_driver();
	if (started == cudaSuccess && driver_version / 1000 < CUDART_MAJOR)
		started = cudaErrorInsufficientDriver;
	if (started == cudaSuccess)
		started = CALL(LEGACY, cuInit, 0);
	if (started == cudaSuccess)
		started = CALL(LEGACY, cuDeviceGetCount, &gpu_count);
	if (started == cudaSuccess && (gpu_count == 0 || gpu_count > GPUS_MAX))
		started = cudaErrorNoDevice;
	for (i = 0; started == cudaSuccess && i < gpu_count; i++)
		started = read_gpu(i);
}

cudaError_t start(void)
{
	static pthread_once_t once = PTHREAD_ONCE_INIT;

	pthread_once(&once, start_once);
	return started;
}

/* ---- contexts -------------------------------------------------------------------------- */

cudaError_t primary_of(int device, CUcontext *ctx)
{
	cudaError_t e = cudaSuccess;

	pthread_mutex_lock(&lock);
	if (!gpus[device].primary)
		e = CALL(LEGACY, cuDevicePrimaryCtxRetain, &gpus[device].primary, gpus[device].dev);
	*ctx = gpus[device].primary;
	pthread_mutex_unlock(&lock);
	return e;
}

static cudaError_t activate(int device)
{
	CUcontext ctx;
	cudaError_t e = primary_of(device, &ctx);

	return e == cudaSuccess ? CALL(LEGACY, cuCtxSetCurrent, ctx) : e;
}

cudaError_t enter(void)
{
	CUcontext ctx = NULL;
	cudaError_t e = start();

	if (e == cudaSuccess)
		e = CALL(LEGACY, cuCtxGetCurrent, &ctx);
	if (e == cudaSuccess && !ctx)
		e = activate(thread_device);
	return e;
}

cudaError_t current_device(int *device)
{
	CUcontext ctx = NULL;
	CUdevice dev;
	cudaError_t e = start();
	int i;

	*device = thread_device;
	if (e == cudaSuccess)
		e = CALL(LEGACY, cuCtxGetCurrent, &ctx);
	if (e != cudaSuccess || !ctx)
		return e;
	e = CALL(LEGACY, cuCtxGetDevice, &dev);
	for (i = 0; e == cudaSuccess && i < gpu_count; i++)
		if (gpus[i].dev == dev)
			*device = i;
	return e;
}

static bool is_device(int device)
{
	return device >= 0 && device < gpu_count;
}

EXPORT cudaError_t cudaSetDevice(int device)
{
	cudaError_t e = start();

	if (e == cudaSuccess && !is_device(device))
		e = cudaErrorInvalidDevice;
	if (e == cudaSuccess) {
		thread_device = device;
		e = activate(device); /* at once, since CUDA 12 */
	}
	return finish(e);
}

EXPORT cudaError_t cudaGetDevice(int *device)
{
	return finish(device ? current_device(device) : cudaErrorInvalidValue);
}

EXPORT cudaError_t cudaSetDeviceFlags(unsigned int flags)
{
	int device;
	cudaError_t e = current_device(&device);

	return finish(e == cudaSuccess ? CALL(LEGACY, cuDevicePrimaryCtxSetFlags, gpus[device].dev, flags) : e);
}

EXPORT cudaError_t cudaDeviceSynchronize(void)
{
	IN_CONTEXT(CALL(LEGACY, cuCtxSynchronize));
}

EXPORT cudaError_t cudaDeviceReset(void)
{
	int device;
	cudaError_t e = current_device(&device);

	if (e == cudaSuccess)
		e = CALL(LEGACY, cuDevicePrimaryCtxReset, gpus[device].dev);
	if (e == cudaSuccess) {
		pthread_mutex_lock(&lock);
		if (gpus[device].primary)
			code_forget(gpus[device].primary);
		gpus[device].primary = NULL;
		pthread_mutex_unlock(&lock);
		e = CALL(LEGACY, cuCtxSetCurrent, NULL); /* the next call takes a new one */
	}
	return finish(e);
}

/* ---- devices --------------------------------------------------------------------------- */

EXPORT cudaError_t cudaGetDeviceCount(int *count)
{
	cudaError_t e = count ? start() : cudaErrorInvalidValue;

	if (count)
		*count = e == cudaSuccess ? gpu_count : 0;
	return finish(e);
}

EXPORT cudaError_t cudaDriverGetVersion(int *version)
{
	cudaError_t e = version ? start() : cudaErrorInvalidValue;

	if (version)
		*version = driver_version; /* 0 without a driver, which is no error here */
	return finish(e == cudaErrorInvalidValue ? e : cudaSuccess);
}

EXPORT cudaError_t cudaRuntimeGetVersion(int *version)
{
	if (!version)
		return finish(cudaErrorInvalidValue);
	*version = CUDART_MAJOR == 12 ? 12080 : 13000;
	return cudaSuccess;
}

EXPORT cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr attribute, int device)
{
	cudaError_t e = start();

	if (e == cudaSuccess && !is_device(device))
		e = cudaErrorInvalidDevice;
	return finish(e == cudaSuccess ? CALL(LEGACY, cuDeviceGetAttribute, value, (CUdevice_attribute)attribute, gpus[device].dev) : e);
}

EXPORT cudaError_t cudaDeviceGetPCIBusId(char *id, int len, int device)
{
	cudaError_t e = start();

	if (e == cudaSuccess && !is_device(device))
		e = cudaErrorInvalidDevice;
	return finish(e == cudaSuccess ? CALL(LEGACY, cuDeviceGetPCIBusId, id, len, gpus[device].dev) : e);
}

EXPORT cudaError_t cudaDeviceGetByPCIBusId(int *device, const char *id)
{
	CUdevice dev;
	cudaError_t e = device ? start() : cudaErrorInvalidValue;
	int i;

	if (e == cudaSuccess)
		e = CALL(LEGACY, cuDeviceGetByPCIBusId, &dev, id);
	for (i = 0; e == cudaSuccess && i < gpu_count; i++)
		if (gpus[i].dev == dev)
			*device = i;
	return finish(e);
}

EXPORT cudaError_t cudaDeviceCanAccessPeer(int *can, int device, int peer)
{
	cudaError_t e = start();

	if (e == cudaSuccess && (!is_device(device) || !is_device(peer)))
		e = cudaErrorInvalidDevice;
	return finish(e == cudaSuccess ? CALL(LEGACY, cuDeviceCanAccessPeer, can, gpus[device].dev, gpus[peer].dev) : e);
}

EXPORT cudaError_t cudaDeviceEnablePeerAccess(int peer, unsigned int flags)
{
	CUcontext ctx = NULL;
	cudaError_t e = enter();

	if (e == cudaSuccess && !is_device(peer))
		e = cudaErrorInvalidDevice;
	if (e == cudaSuccess)
		e = primary_of(peer, &ctx);
	return finish(e == cudaSuccess ? CALL(LEGACY, cuCtxEnablePeerAccess, ctx, flags) : e);
}

/* Members of the properties and the driver's attributes that they are. */
static void fill_properties(struct cudaDeviceProp *p, const struct gpu *g)
{
	const int *a = g->attribute;

	memset(p, 0, sizeof(*p));
	memcpy(p->name, g->name, sizeof(p->name));
	memcpy(&p->uuid, &g->uuid, sizeof(p->uuid));
	p->totalGlobalMem = g->total;
	p->sharedMemPerBlock = (size_t)a[8];
	p->regsPerBlock = a[12];
	p->warpSize = a[10];
	p->memPitch = (size_t)a[11];
	p->maxThreadsPerBlock = a[1];
	memcpy(p->maxThreadsDim, &a[2], sizeof(p->maxThreadsDim));
	memcpy(p->maxGridSize, &a[5], sizeof(p->maxGridSize));
	p->totalConstMem = (size_t)a[9];
	p->major = a[75];
	p->minor = a[76];
	p->textureAlignment = (size_t)a[14];
	p->texturePitchAlignment = (size_t)a[51];
	p->multiProcessorCount = a[16];
	p->integrated = a[18];
	p->canMapHostMemory = a[19];
	p->maxTexture1D = a[21];
	p->maxTexture1DMipmap = a[77];
	memcpy(p->maxTexture2D, &a[22], sizeof(p->maxTexture2D));
	memcpy(p->maxTexture2DMipmap, &a[73], sizeof(p->maxTexture2DMipmap));
	memcpy(p->maxTexture2DLinear, &a[70], sizeof(p->maxTexture2DLinear));
	memcpy(p->maxTexture2DGather, &a[45], sizeof(p->maxTexture2DGather));
	memcpy(p->maxTexture3D, &a[24], sizeof(p->maxTexture3D));
	memcpy(p->maxTexture3DAlt, &a[47], sizeof(p->maxTexture3DAlt));
	p->maxTextureCubemap = a[52];
	memcpy(p->maxTexture1DLayered, &a[42], sizeof(p->maxTexture1DLayered));
	memcpy(p->maxTexture2DLayered, &a[27], sizeof(p->maxTexture2DLayered));
	memcpy(p->maxTextureCubemapLayered, &a[53], sizeof(p->maxTextureCubemapLayered));
	p->maxSurface1D = a[55];
	memcpy(p->maxSurface2D, &a[56], sizeof(p->maxSurface2D));
	memcpy(p->maxSurface3D, &a[58], sizeof(p->maxSurface3D));
	memcpy(p->maxSurface1DLayered, &a[61], sizeof(p->maxSurface1DLayered));
	memcpy(p->maxSurface2DLayered, &a[63], sizeof(p->maxSurface2DLayered));
	p->maxSurfaceCubemap = a[66];
	memcpy(p->maxSurfaceCubemapLayered, &a[67], sizeof(p->maxSurfaceCubemapLayered));
	p->surfaceAlignment = (size_t)a[30];
	p->concurrentKernels = a[31];
	p->ECCEnabled = a[32];
	p->pciBusID = a[33];
	p->pciDeviceID = a[34];
	p->pciDomainID = a[50];
	p->tccDriver = a[35];
	p->asyncEngineCount = a[40];
	p->unifiedAddressing = a[41];
	p->memoryBusWidth = a[37];
	p->l2CacheSize = a[38];
	p->persistingL2CacheMaxSize = a[108];
	p->maxThreadsPerMultiProcessor = a[39];
	p->streamPrioritiesSupported = a[78];
	p->globalL1CacheSupported = a[79];
	p->localL1CacheSupported = a[80];
	p->sharedMemPerMultiprocessor = (size_t)a[81];
	p->regsPerMultiprocessor = a[82];
	p->managedMemory = a[83];
	p->isMultiGpuBoard = a[84];
	p->multiGpuBoardGroupID = a[85];
	p->hostNativeAtomicSupported = a[86];
	p->pageableMemoryAccess = a[88];
	p->concurrentManagedAccess = a[89];
	p->computePreemptionSupported = a[90];
	p->canUseHostPointerForRegisteredMem = a[91];
	p->cooperativeLaunch = a[95];
	p->sharedMemPerBlockOptin = (size_t)a[97];
	p->pageableMemoryAccessUsesHostPageTables = a[100];
	p->directManagedMemAccessFromHost = a[101];
	p->maxBlocksPerMultiProcessor = a[106];
	p->accessPolicyMaxWindowSize = a[109];
	p->reservedSharedMemPerBlock = (size_t)a[111];
	p->sparseCudaArraySupported = a[112];
	p->hostRegisterSupported = a[99];
	p->hostRegisterReadOnlySupported = a[113];
	p->timelineSemaphoreInteropSupported = a[114];
	p->memoryPoolsSupported = a[115];
	p->gpuDirectRDMASupported = a[116];
	p->gpuDirectRDMAFlushWritesOptions = (unsigned int)a[117];
	p->gpuDirectRDMAWritesOrdering = a[118];
	p->memoryPoolSupportedHandleTypes = (unsigned int)a[119];
	p->clusterLaunch = a[120];
	p->deferredMappingCudaArraySupported = a[121];
	p->ipcEventSupported = a[125];
	p->unifiedFunctionPointers = a[129];
#if CUDART_MAJOR < 13
	p->clockRate = a[13];
	p->deviceOverlap = a[15];
	p->kernelExecTimeoutEnabled = a[17];
	p->computeMode = a[20];
	p->maxTexture1DLinear = a[69];
	p->memoryClockRate = a[36];
	p->singleToDoublePrecisionPerfRatio = a[87];
	p->cooperativeMultiDeviceLaunch = a[96];
#endif
}

#if CUDART_MAJOR < 13
#define PROPERTIES cudaGetDeviceProperties_v2
#else
#define PROPERTIES cudaGetDeviceProperties
#endif

/* As they were at the start: no driver call now. */
EXPORT cudaError_t PROPERTIES(struct cudaDeviceProp *properties, int device)
{
	cudaError_t e = start();

	if (e == cudaSuccess && !is_device(device))
		e = cudaErrorInvalidDevice;
	if (e == cudaSuccess && !properties)
		e = cudaErrorInvalidValue;
	if (e == cudaSuccess)
		fill_properties(properties, &gpus[device]);
	return finish(e);
}

/* ---- errors, entry points --------------------------------------------------------------- */

EXPORT cudaError_t cudaGetLastError(void)
{
	cudaError_t e = last_error;

	last_error = cudaSuccess;
	return e;
}

EXPORT cudaError_t cudaPeekAtLastError(void)
{
	return last_error;
}

/* The runtime's own, and those that must have a text where there is no driver. */
static const struct {
	cudaError_t error;
	const char *name, *text;
} texts[] = {
	{cudaSuccess, "cudaSuccess", "no error"},
	{cudaErrorInvalidValue, "cudaErrorInvalidValue", "invalid argument"},
	{cudaErrorMemoryAllocation, "cudaErrorMemoryAllocation", "out of memory"},
	{cudaErrorInitializationError, "cudaErrorInitializationError", "initialization error"},
	{cudaErrorInvalidMemcpyDirection, "cudaErrorInvalidMemcpyDirection", "invalid copy direction for memcpy"},
	{cudaErrorInsufficientDriver, "cudaErrorInsufficientDriver", "CUDA driver version is insufficient for CUDA runtime version"},
	{cudaErrorCallRequiresNewerDriver, "cudaErrorCallRequiresNewerDriver", "API call is not supported in the installed CUDA driver"},
	{cudaErrorMissingConfiguration, "cudaErrorMissingConfiguration", "__global__ function call is not configured"},
	{cudaErrorInvalidDeviceFunction, "cudaErrorInvalidDeviceFunction", "invalid device function"},
	{cudaErrorNoDevice, "cudaErrorNoDevice", "no CUDA-capable device is detected"},
	{cudaErrorInvalidDevice, "cudaErrorInvalidDevice", "invalid device ordinal"},
};

static const char *describe(cudaError_t error, bool name)
{
	const char *text = NULL;
	size_t i;

	for (i = 0; i < sizeof(texts) / sizeof(texts[0]); i++)
		if (texts[i].error == error)
			return name ? texts[i].name : texts[i].text;
	if (start() == cudaSuccess &&
	    (name ? CALL(LEGACY, cuGetErrorName, (CUresult)error, &text) : CALL(LEGACY, cuGetErrorString, (CUresult)error, &text)) == cudaSuccess)
		return text;
	return "unrecognized error code";
}

EXPORT const char *cudaGetErrorString(cudaError_t error)
{
	return describe(error, false);
}

EXPORT const char *cudaGetErrorName(cudaError_t error)
{
	return describe(error, true);
}

EXPORT cudaError_t cudaGetDriverEntryPointByVersion(const char *symbol, void **pointer, unsigned int version, unsigned long long flags,
						    enum cudaDriverEntryPointQueryResult *result)
{
	CUdriverProcAddressQueryResult status = (CUdriverProcAddressQueryResult)0;
	cudaError_t e = symbol && pointer ? start() : cudaErrorInvalidValue;

	if (e == cudaSuccess && !get_proc)
		e = cudaErrorCallRequiresNewerDriver;
	if (e == cudaSuccess)
		e = (cudaError_t)get_proc(symbol, pointer, (int)version, flags, &status);
	if (result)
		*result = (enum cudaDriverEntryPointQueryResult)status;
	return finish(e);
}

#if CUDART_MAJOR < 13
EXPORT cudaError_t cudaGetDriverEntryPoint(const char *symbol, void **pointer, unsigned long long flags,
					   enum cudaDriverEntryPointQueryResult *result)
{
	return cudaGetDriverEntryPointByVersion(symbol, pointer, 12080, flags, result);
}
#endif
