/* SPDX-License-Identifier: Apache-2.0 */
/* hooks_ctx.c: initialisation and contexts. A context costs what gpufenced publishes for it. */
#include "account.h"
#include "charge.h"
#include "context.h"
#include "device.h"
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

struct creation {
	int gpu;
	uint64_t bytes;
};

static bool creation_begin(struct creation *c, const char *call, CUdevice device)
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

static CUresult creation_end(const struct creation *c, CUresult result, const CUcontext *context)
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

/*
 * A primary context lives from the first retain to the last release, or to a reset. references
 * counts the retains that the driver granted; whoever takes it from 0 to 1 owes the charge.
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

CUresult hook_cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device)
{
	static const char call[] = "cuDevicePrimaryCtxRetain";
	fn_cuDevicePrimaryCtxRetain *real = REAL(cuDevicePrimaryCtxRetain);
	struct primary *p = primary_of(device);
	struct creation c;
	CUcontext got = NULL;
	if (real == NULL)
		return CUDA_ERROR_NOT_SUPPORTED;
	if (context == NULL || p == NULL)
		return real(context, device);

	bool reserved = __atomic_load_n(&p->references, __ATOMIC_ACQUIRE) == 0;
	if (reserved && !creation_begin(&c, call, device))
		return CUDA_ERROR_OUT_OF_MEMORY;
	CUresult result = real(&got, device);
	if (result != CUDA_SUCCESS)
		return reserved ? charge_failed(c.gpu, ACCOUNT_DEVICE, c.bytes, result) : result;

	if (__atomic_fetch_add(&p->references, 1, __ATOMIC_ACQ_REL) > 0) {
		if (reserved)
			account_release(c.gpu, ACCOUNT_DEVICE, c.bytes);
	} else {
		/* Released by another thread after we looked: this is a new context, not yet paid. */
		if (!reserved && !creation_begin(&c, call, device)) {
			__atomic_fetch_sub(&p->references, 1, __ATOMIC_ACQ_REL);
			primary_release(device);
			return CUDA_ERROR_OUT_OF_MEMORY;
		}
		if (c.gpu >= 0) {
			uint64_t owner = context_put(got, c.gpu, c.bytes);
			__atomic_store_n(&p->owner, owner, __ATOMIC_RELEASE);
		}
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

static CUresult release(fn_cuDevicePrimaryCtxRelease *real, CUdevice device)
{
	struct primary *p = primary_of(device);
	if (real == NULL)
		return CUDA_ERROR_NOT_SUPPORTED;
	/* Read before: afterwards another thread's retain may have made the next one. */
	uint64_t owner = p == NULL ? 0 : __atomic_load_n(&p->owner, __ATOMIC_ACQUIRE);
	CUresult result = real(device);
	if (p == NULL || result != CUDA_SUCCESS)
		return result;
	int n = __atomic_load_n(&p->references, __ATOMIC_ACQUIRE);
	while (n > 0 && !__atomic_compare_exchange_n(&p->references, &n, n - 1, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE))
		;
	if (n == 1)
		primary_gone(owner);
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
