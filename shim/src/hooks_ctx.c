/* SPDX-License-Identifier: Apache-2.0 */
/* hooks_ctx.c: initialisation and contexts. A context costs what gpufenced publishes for it. */
#include "account.h"
#include "charge.h"
#include "context.h"
#include "device.h"
#include "hooks_ctx.h"
#include "real.h"

CUresult hook_cuInit(unsigned int flags)
{
	static const uint8_t nothing[16];
	real_refresh(TABLE_CUDA);
	fn_cuInit *real = REAL(cuInit);
	if (real == NULL)
		return CUDA_ERROR_NOT_SUPPORTED;
	CUresult result = real(flags);
	/* Opens the pages, so that gpufenced sees the shim before it sees memory. */
	if (result == CUDA_SUCCESS)
		(void)account_gpu(nothing);
	return result;
}
EXPORT(cuInit);

bool creation_begin(struct creation *c, const char *call, CUdevice device)
{
	struct account_view view;
	c->gpu = device_gpu(device);
	if (!account_view(c->gpu, &view)) {
		c->gpu = -1;
		return true;
	}
	c->bytes = view.context_bytes;
	if (charge_reserve(c->gpu, ACCOUNT_DEVICE, c->bytes) == 0)
		return true;
	charge_refused(c->gpu, call, c->bytes);
	return false;
}

CUresult creation_end(const struct creation *c, CUresult result, const CUcontext *context)
{
	if (c->gpu < 0)
		return result;
	if (result != CUDA_SUCCESS)
		return charge_failed(c->gpu, ACCOUNT_DEVICE, c->bytes, result);
	context_put(*context, c->gpu, c->bytes);
	return result;
}

#define CREATE(symbol, device, ...)                                      \
	do {                                                             \
		fn_##symbol *real = REAL(symbol);                        \
		struct creation c;                                       \
		if (real == NULL)                                        \
			return CUDA_ERROR_NOT_SUPPORTED;                 \
		if (context == NULL)                                     \
			return real(__VA_ARGS__);                        \
		if (!creation_begin(&c, "cuCtxCreate", device))          \
			return CUDA_ERROR_OUT_OF_MEMORY;                 \
		return creation_end(&c, real(__VA_ARGS__), context);     \
	} while (0)

CUresult hook_cuCtxCreate(CUcontext *context, unsigned int flags, CUdevice device)
{
	CREATE(cuCtxCreate, device, context, flags, device);
}
EXPORT(cuCtxCreate);

CUresult hook_cuCtxCreate_v2(CUcontext *context, unsigned int flags, CUdevice device)
{
	CREATE(cuCtxCreate_v2, device, context, flags, device);
}
EXPORT(cuCtxCreate_v2);

CUresult hook_cuCtxCreate_v3(CUcontext *context, CUexecAffinityParam *params, int count, unsigned int flags,
			     CUdevice device)
{
	CREATE(cuCtxCreate_v3, device, context, params, count, flags, device);
}
EXPORT(cuCtxCreate_v3);

CUresult hook_cuCtxCreate_v4(CUcontext *context, CUctxCreateParams *params, unsigned int flags, CUdevice device)
{
	CREATE(cuCtxCreate_v4, device, context, params, flags, device);
}
EXPORT(cuCtxCreate_v4);

CUresult hook_cuGLCtxCreate(CUcontext *context, unsigned int flags, CUdevice device)
{
	CREATE(cuGLCtxCreate, device, context, flags, device);
}
EXPORT(cuGLCtxCreate);

CUresult hook_cuGLCtxCreate_v2(CUcontext *context, unsigned int flags, CUdevice device)
{
	CREATE(cuGLCtxCreate_v2, device, context, flags, device);
}
EXPORT(cuGLCtxCreate_v2);

CUresult hook_cuVDPAUCtxCreate(CUcontext *context, unsigned int flags, CUdevice device, uint32_t vdp_device, void *get_proc_address)
{
	CREATE(cuVDPAUCtxCreate, device, context, flags, device, vdp_device, get_proc_address);
}
EXPORT(cuVDPAUCtxCreate);

CUresult hook_cuVDPAUCtxCreate_v2(CUcontext *context, unsigned int flags, CUdevice device, uint32_t vdp_device, void *get_proc_address)
{
	CREATE(cuVDPAUCtxCreate_v2, device, context, flags, device, vdp_device, get_proc_address);
}
EXPORT(cuVDPAUCtxCreate_v2);

/* Taken before the driver destroys it: afterwards its handle may already be another's. */
static CUresult destroy(fn_cuCtxDestroy *real, CUcontext handle)
{
	struct context c;
	if (real == NULL)
		return CUDA_ERROR_NOT_SUPPORTED;
	bool known = context_take(handle, &c);
	CUresult result = real(handle);
	if (known && result == CUDA_SUCCESS)
		context_settle(&c);
	else if (known)
		context_restore(&c);
	return result;
}

CUresult hook_cuCtxDestroy(CUcontext context) { return destroy(REAL(cuCtxDestroy), context); }
EXPORT(cuCtxDestroy);

CUresult hook_cuCtxDestroy_v2(CUcontext context) { return destroy(REAL(cuCtxDestroy_v2), context); }
EXPORT(cuCtxDestroy_v2);

CUresult hook_cuCtxAttach(CUcontext *context, unsigned int flags)
{
	fn_cuCtxAttach *real = REAL(cuCtxAttach);
	if (real == NULL)
		return CUDA_ERROR_NOT_SUPPORTED;
	CUresult result = real(context, flags);
	if (result == CUDA_SUCCESS && context != NULL)
		context_attach(*context);
	return result;
}
EXPORT(cuCtxAttach);

CUresult hook_cuCtxDetach(CUcontext context)
{
	fn_cuCtxDetach *real = REAL(cuCtxDetach);
	if (real == NULL)
		return CUDA_ERROR_NOT_SUPPORTED;
	if (!context_detach(context))
		return destroy(real, context);
	CUresult result = real(context);
	if (result != CUDA_SUCCESS)
		context_attach(context);
	return result;
}
EXPORT(cuCtxDetach);

/*
 * Three limits are memory that a context has: a stack for each thread that the GPU can run at once,
 * a heap, and a buffer for printing. A change is charged to the context, as the driver rounds it.
 */
struct growth {
	struct charge charge;
	CUcontext context;
	int64_t unit; /* bytes for each byte of the limit; 0: nothing is charged */
	size_t was;
};

static int64_t limit_unit(int limit, CUdevice device)
{
	int processors = 0, threads = 0;
	fn_cuDeviceGetAttribute *get = REAL(cuDeviceGetAttribute);
	if (limit == CU_LIMIT_PRINTF_FIFO_SIZE || limit == CU_LIMIT_MALLOC_HEAP_SIZE)
		return 1;
	if (limit != CU_LIMIT_STACK_SIZE || get == NULL ||
	    get(&processors, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, device) != CUDA_SUCCESS ||
	    get(&threads, CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR, device) != CUDA_SUCCESS)
		return 0;
	return (int64_t)processors * threads;
}

/* What a context grows by; no GPU has what does not fit. */
static int64_t growth_bytes(const struct growth *g, size_t value)
{
	int64_t bytes;
	if (value > INT64_MAX || __builtin_mul_overflow((int64_t)value - (int64_t)g->was, g->unit, &bytes))
		return INT64_MAX / 2;
	return bytes;
}

/* False: refused by a limit, and counted. */
static bool growth_begin(struct growth *g, int limit, size_t value)
{
	CUdevice device;
	fn_cuCtxGetLimit *get = REAL(cuCtxGetLimit);
	fn_cuCtxGetDevice *get_device = REAL(cuCtxGetDevice);
	fn_cuCtxGetCurrent *get_context = REAL(cuCtxGetCurrent);
	*g = (struct growth){ .charge = { .gpu = -1 } };
	if (limit < CU_LIMIT_STACK_SIZE || limit > CU_LIMIT_MALLOC_HEAP_SIZE || get == NULL || get_device == NULL ||
	    get_context == NULL || get_device(&device) != CUDA_SUCCESS || get_context(&g->context) != CUDA_SUCCESS ||
	    context_owner(g->context) == 0 || get(&g->was, limit) != CUDA_SUCCESS)
		return true;
	g->unit = limit_unit(limit, device);
	int64_t before = context_grow(g->context, 0), after;
	if (__builtin_add_overflow(before, growth_bytes(g, value), &after))
		after = INT64_MAX / 2;
	uint64_t had = context_grown_bytes(before), has = context_grown_bytes(after);
	return charge_begin_on(&g->charge, "cuCtxSetLimit", device_gpu(device), ACCOUNT_DEVICE, has > had ? has - had : 0);
}

static CUresult growth_end(const struct growth *g, int limit, CUresult result)
{
	size_t is;
	fn_cuCtxGetLimit *get = REAL(cuCtxGetLimit);
	if (result != CUDA_SUCCESS)
		return charge_failed(g->charge.gpu, ACCOUNT_DEVICE, g->charge.bytes, result);
	if (g->unit == 0 || get == NULL || get(&is, limit) != CUDA_SUCCESS)
		return result;
	int gpu = g->charge.gpu;
	if (gpu < 0) {
		uint64_t owner;
		gpu = device_current(&owner);
	}
	int64_t change = growth_bytes(g, is), before = context_grow(g->context, change);
	uint64_t had = context_grown_bytes(before) + g->charge.bytes, has = context_grown_bytes(before + change);
	if (has < had)
		account_release(gpu, ACCOUNT_DEVICE, had - has);
	else if (has > had && account_reserve(gpu, ACCOUNT_DEVICE, has - had) != 0)
		context_grow(g->context, -change); /* another thread's change came between: NVML will see it */
	return result;
}

CUresult hook_cuCtxSetLimit(int limit, size_t value)
{
	fn_cuCtxSetLimit *real = REAL(cuCtxSetLimit);
	struct growth g;
	if (real == NULL)
		return CUDA_ERROR_NOT_SUPPORTED;
	if (!growth_begin(&g, limit, value))
		return CUDA_ERROR_OUT_OF_MEMORY;
	return growth_end(&g, limit, real(limit, value));
}
EXPORT(cuCtxSetLimit);

/*
 * A primary context lives from the first retain to the last release, or to a reset. references
 * counts the retains that the driver granted; whoever takes it from 0 to 1 owes the charge. A reset
 * ends the context and not what was retained: the driver goes on counting where we begin anew. So
 * after a release it is asked whether the context is there, and counting only keeps apart from
 * each other those who retain and release at once.
 */
static struct primary {
	int references;
	uint64_t owner;
} primaries[DEVICES];

static struct primary *primary_of(CUdevice device)
{
	return device >= 0 && device < DEVICES ? &primaries[device] : NULL;
}

static void primary_release(CUdevice device)
{
	fn_cuDevicePrimaryCtxRelease *release = REAL(cuDevicePrimaryCtxRelease_v2);
	if (release == NULL)
		release = REAL(cuDevicePrimaryCtxRelease);
	if (release != NULL)
		release(device);
}

bool primary_begin(struct primary_hold *h, const char *call, CUdevice device)
{
	const struct primary *p = primary_of(device);
	*h = (struct primary_hold){ .call = call, .device = device, .creation = { .gpu = -1 } };
	h->reserved = p != NULL && __atomic_load_n(&p->references, __ATOMIC_ACQUIRE) == 0;
	return !h->reserved || creation_begin(&h->creation, call, device);
}

CUresult primary_failed(const struct primary_hold *h, CUresult result)
{
	return h->reserved ? charge_failed(h->creation.gpu, ACCOUNT_DEVICE, h->creation.bytes, result) : result;
}

void primary_undo(const struct primary_hold *h)
{
	if (h->reserved)
		account_release(h->creation.gpu, ACCOUNT_DEVICE, h->creation.bytes);
}

bool primary_end(struct primary_hold *h, CUcontext context)
{
	struct primary *p = primary_of(h->device);
	if (p == NULL)
		return true;
	if (__atomic_fetch_add(&p->references, 1, __ATOMIC_ACQ_REL) > 0) {
		if (h->reserved)
			account_release(h->creation.gpu, ACCOUNT_DEVICE, h->creation.bytes);
		return true;
	}
	/* Released by another thread after we looked: this is a new context, not yet paid. */
	if (!h->reserved && !creation_begin(&h->creation, h->call, h->device)) {
		__atomic_fetch_sub(&p->references, 1, __ATOMIC_ACQ_REL);
		return false;
	}
	if (h->creation.gpu >= 0) {
		uint64_t owner = context_put(context, h->creation.gpu, h->creation.bytes);
		__atomic_store_n(&p->owner, owner, __ATOMIC_RELEASE);
	}
	return true;
}

CUresult hook_cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device)
{
	fn_cuDevicePrimaryCtxRetain *real = REAL(cuDevicePrimaryCtxRetain);
	struct primary_hold h;
	CUcontext got = NULL;
	if (real == NULL)
		return CUDA_ERROR_NOT_SUPPORTED;
	if (context == NULL || primary_of(device) == NULL)
		return real(context, device);
	if (!primary_begin(&h, "cuDevicePrimaryCtxRetain", device))
		return CUDA_ERROR_OUT_OF_MEMORY;
	CUresult result = real(&got, device);
	if (result != CUDA_SUCCESS)
		return primary_failed(&h, result);
	if (!primary_end(&h, got)) {
		primary_release(device);
		return CUDA_ERROR_OUT_OF_MEMORY;
	}
	*context = got;
	return result;
}
EXPORT(cuDevicePrimaryCtxRetain);

static void primary_gone(uint64_t owner)
{
	struct context c;
	if (context_take_owner(owner, &c))
		context_settle(&c);
}

uint64_t primary_owner(CUdevice device)
{
	const struct primary *p = primary_of(device);
	return p == NULL ? 0 : __atomic_load_n(&p->owner, __ATOMIC_ACQUIRE);
}

/* Where the driver does not say it, the count does. */
static bool primary_is_there(CUdevice device, int references)
{
	unsigned int flags;
	int active;
	fn_cuDevicePrimaryCtxGetState *get = REAL(cuDevicePrimaryCtxGetState);
	return get != NULL && get(device, &flags, &active) == CUDA_SUCCESS ? active != 0 : references > 1;
}

void primary_released(CUdevice device, uint64_t owner)
{
	struct primary *p = primary_of(device);
	int n = p == NULL ? 0 : __atomic_load_n(&p->references, __ATOMIC_ACQUIRE), left;
	/* Another thread's retain or release between the question and this: asked again. */
	do {
		if (n == 0)
			return;
		left = !primary_is_there(device, n) ? 0 : n > 1 ? n - 1 : 1;
	} while (!__atomic_compare_exchange_n(&p->references, &n, left, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE));
	if (left == 0)
		primary_gone(owner);
}

static CUresult release(fn_cuDevicePrimaryCtxRelease *real, CUdevice device)
{
	if (real == NULL)
		return CUDA_ERROR_NOT_SUPPORTED;
	/* Read before: afterwards another thread's retain may have made the next one. */
	uint64_t owner = primary_owner(device);
	CUresult result = real(device);
	if (result == CUDA_SUCCESS)
		primary_released(device, owner);
	return result;
}

CUresult hook_cuDevicePrimaryCtxRelease(CUdevice device) { return release(REAL(cuDevicePrimaryCtxRelease), device); }
EXPORT(cuDevicePrimaryCtxRelease);

CUresult hook_cuDevicePrimaryCtxRelease_v2(CUdevice device)
{
	return release(REAL(cuDevicePrimaryCtxRelease_v2), device);
}
EXPORT(cuDevicePrimaryCtxRelease_v2);

static CUresult reset(fn_cuDevicePrimaryCtxReset *real, CUdevice device)
{
	struct primary *p = primary_of(device);
	if (real == NULL)
		return CUDA_ERROR_NOT_SUPPORTED;
	uint64_t owner = p == NULL ? 0 : __atomic_load_n(&p->owner, __ATOMIC_ACQUIRE);
	CUresult result = real(device);
	if (p == NULL || result != CUDA_SUCCESS)
		return result;
	__atomic_store_n(&p->references, 0, __ATOMIC_RELEASE);
	primary_gone(owner);
	return result;
}

CUresult hook_cuDevicePrimaryCtxReset(CUdevice device) { return reset(REAL(cuDevicePrimaryCtxReset), device); }
EXPORT(cuDevicePrimaryCtxReset);

CUresult hook_cuDevicePrimaryCtxReset_v2(CUdevice device) { return reset(REAL(cuDevicePrimaryCtxReset_v2), device); }
EXPORT(cuDevicePrimaryCtxReset_v2);
