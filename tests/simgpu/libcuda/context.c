/* SPDX-License-Identifier: Apache-2.0 */
/*
 * context.c: contexts, and every thread's stack of them.
 *
 * A context that was destroyed stays in the list of all contexts, so that a handle to it that
 * lies on another thread's stack is recognised and refused instead of read after free.
 */
#include "internal.h"

static CUcontext made;         /* by cuCtxCreate; the primary ones are in their devices */
static unsigned int last_id;

/* ---- a thread's stack -------------------------------------------------------------- */

#define STACK_ROOM 256 /* far more than any program nests */

static _Thread_local struct {
	size_t used;
	CUcontext ctx[STACK_ROOM];
} stack;

static CUresult push(CUcontext ctx)
{
	if (stack.used == STACK_ROOM)
		return CUDA_ERROR_OUT_OF_MEMORY;
	stack.ctx[stack.used++] = ctx;
	return CUDA_SUCCESS;
}

CUcontext current_context(void)
{
	return stack.used > 0 ? stack.ctx[stack.used - 1] : NULL;
}

/* ---- handles ----------------------------------------------------------------------- */

bool context_is(CUcontext ctx)
{
	CUcontext c;
	int i;

	for (i = 0; i < device_count; i++)
		if (ctx == &devices[i].primary)
			return true;
	for (c = made; c; c = c->next)
		if (c == ctx)
			return true;
	return false;
}

bool context_alive(CUcontext ctx)
{
	return context_is(ctx) && ctx->handle != 0;
}

/* ---- birth and death --------------------------------------------------------------- */

/* In which of NVML's lists this process appears: for tests of what reads them. */
static uint64_t list_wanted(void)
{
	const char *list = secure_getenv("SIMGPU_LIST");

	if (list && strcmp(list, "graphics") == 0)
		return SIMGPU_LIST_GRAPHICS;
	if (list && strcmp(list, "mps") == 0)
		return SIMGPU_LIST_MPS;
	return SIMGPU_LIST_COMPUTE;
}

static CUresult activate(CUcontext ctx, unsigned int flags, unsigned int api_version)
{
	struct simgpu_req req = {.op = SIMGPU_OP_CTX_CREATE, .arg = {list_wanted()}};
	struct simgpu_rep rep;
	CUresult ret = call(ctx->dev, &req, &rep);

	if (ret != CUDA_SUCCESS)
		return ret;
	ctx->handle = rep.val[0];
	ctx->flags = flags;
	ctx->api_version = api_version;
	ctx->id = ++last_id;
	ctx->tail[0] = ctx->tail[1] = 0;
	ctx->limits[CU_LIMIT_STACK_SIZE] = 1024;
	ctx->limits[CU_LIMIT_PRINTF_FIFO_SIZE] = 1 << 20;
	ctx->limits[CU_LIMIT_MALLOC_HEAP_SIZE] = 8 << 20;
	ctx->limits[CU_LIMIT_MAX_L2_FETCH_GRANULARITY] = 64;
	return CUDA_SUCCESS;
}

static bool other_context_on(const struct device *dev)
{
	CUcontext c;

	for (c = made; c; c = c->next)
		if (c->dev == dev && c->handle != 0)
			return true;
	return dev->primary.handle != 0;
}

static void deactivate(CUcontext ctx)
{
	struct simgpu_req req = {.op = SIMGPU_OP_CTX_DESTROY, .arg = {ctx->handle}};
	struct simgpu_rep rep;

	ranges_forget_context(ctx);
	streams_drop(ctx);
	/* If the driver has gone, so has the context: there is nobody to tell. */
	(void)call(ctx->dev, &req, &rep);
	ctx->handle = 0;
	if (!other_context_on(ctx->dev))
		pools_drop(ctx->dev);
}

static CUresult create(CUcontext *out, unsigned int flags, CUdevice dev, unsigned int api_version)
{
	CUresult ret = enter();
	struct device *d;
	CUcontext ctx;

	if (ret != CUDA_SUCCESS)
		return ret;
	d = device_at(dev);
	ctx = d && out ? calloc(1, sizeof(*ctx)) : NULL;
	if (!out)
		ret = CUDA_ERROR_INVALID_VALUE;
	else if (!d)
		ret = CUDA_ERROR_INVALID_DEVICE;
	else if (!ctx)
		ret = CUDA_ERROR_OUT_OF_MEMORY;
	if (ret == CUDA_SUCCESS) {
		ctx->dev = d;
		ret = activate(ctx, flags, api_version);
	}
	if (ret == CUDA_SUCCESS) {
		ret = push(ctx);
		if (ret != CUDA_SUCCESS)
			deactivate(ctx);
	}
	if (ret == CUDA_SUCCESS) {
		ctx->next = made;
		made = ctx;
		*out = ctx;
	} else {
		free(ctx);
	}
	leave();
	return ret;
}

EXPORT CUresult cuCtxCreate(CUcontext *ctx, unsigned int flags, CUdevice dev)
{
	return create(ctx, flags, dev, 3010);
}

EXPORT CUresult cuCtxCreate_v2(CUcontext *ctx, unsigned int flags, CUdevice dev)
{
	return create(ctx, flags, dev, 3020);
}

EXPORT CUresult cuCtxCreate_v3(CUcontext *ctx, CUexecAffinityParam *params, int count, unsigned int flags, CUdevice dev)
{
	if (count < 0 || (count > 0 && !params))
		return CUDA_ERROR_INVALID_VALUE;
	return create(ctx, flags, dev, 3020);
}

EXPORT CUresult cuCtxCreate_v4(CUcontext *ctx, CUctxCreateParams *params, unsigned int flags, CUdevice dev)
{
	if (params && params->cigParams)
		return CUDA_ERROR_NOT_SUPPORTED;
	return create(ctx, flags, dev, 3020);
}

EXPORT CUresult cuCtxDestroy_v2(CUcontext ctx)
{
	CUresult ret = enter();

	if (ret != CUDA_SUCCESS)
		return ret;
	if (!ctx)
		ret = CUDA_ERROR_INVALID_VALUE;
	else if (!context_is(ctx) || ctx->primary)
		ret = CUDA_ERROR_INVALID_CONTEXT;
	else if (ctx->handle == 0)
		ret = CUDA_ERROR_CONTEXT_IS_DESTROYED;
	if (ret == CUDA_SUCCESS) {
		deactivate(ctx);
		if (current_context() == ctx)
			stack.used--;
	}
	leave();
	return ret;
}

EXPORT CUresult cuCtxDestroy(CUcontext ctx)
{
	return cuCtxDestroy_v2(ctx);
}

/* ---- the stack, from outside ------------------------------------------------------- */

EXPORT CUresult cuCtxPushCurrent_v2(CUcontext ctx)
{
	CUresult ret = enter();

	if (ret != CUDA_SUCCESS)
		return ret;
	ret = context_is(ctx) ? push(ctx) : CUDA_ERROR_INVALID_CONTEXT;
	leave();
	return ret;
}

EXPORT CUresult cuCtxPushCurrent(CUcontext ctx)
{
	return cuCtxPushCurrent_v2(ctx);
}

EXPORT CUresult cuCtxPopCurrent_v2(CUcontext *ctx)
{
	CUresult ret = enter();

	if (ret != CUDA_SUCCESS)
		return ret;
	if (!current_context())
		ret = CUDA_ERROR_INVALID_CONTEXT;
	else if (ctx)
		*ctx = stack.ctx[--stack.used];
	else
		stack.used--;
	leave();
	return ret;
}

EXPORT CUresult cuCtxPopCurrent(CUcontext *ctx)
{
	return cuCtxPopCurrent_v2(ctx);
}

/* Replaces the top of the stack; NULL pops. A primary context need not be active for it. */
EXPORT CUresult cuCtxSetCurrent(CUcontext ctx)
{
	CUresult ret = enter();

	if (ret != CUDA_SUCCESS)
		return ret;
	if (ctx && !context_is(ctx))
		ret = CUDA_ERROR_INVALID_CONTEXT;
	else if (ctx && current_context())
		stack.ctx[stack.used - 1] = ctx;
	else if (ctx)
		ret = push(ctx);
	else if (current_context())
		stack.used--;
	leave();
	return ret;
}

EXPORT CUresult cuCtxGetCurrent(CUcontext *ctx)
{
	CUresult ret = enter();

	if (ret != CUDA_SUCCESS)
		return ret;
	if (ctx)
		*ctx = current_context();
	leave();
	return ctx ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

EXPORT CUresult cuCtxGetDevice(CUdevice *dev)
{
	CUresult ret = enter();
	CUcontext ctx;

	if (ret != CUDA_SUCCESS)
		return ret;
	ctx = current_context();
	if (!ctx)
		ret = CUDA_ERROR_INVALID_CONTEXT;
	else if (!dev)
		ret = CUDA_ERROR_INVALID_VALUE;
	else
		*dev = ctx->dev->ordinal;
	leave();
	return ret;
}

EXPORT CUresult cuCtxGetFlags(unsigned int *flags)
{
	CUcontext ctx;
	CUresult ret = enter_context(&ctx);

	if (ret != CUDA_SUCCESS)
		return ret;
	if (flags)
		*flags = ctx->flags;
	leave();
	return flags ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

/* Of ctx, or of the current context if that is NULL. */
static CUresult enter_given(CUcontext *ctx)
{
	CUresult ret;

	if (!*ctx)
		return enter_context(ctx);
	ret = enter();
	if (ret == CUDA_SUCCESS && !context_alive(*ctx)) {
		ret = context_is(*ctx) ? CUDA_ERROR_CONTEXT_IS_DESTROYED : CUDA_ERROR_INVALID_CONTEXT;
		leave();
	}
	return ret;
}

EXPORT CUresult cuCtxGetApiVersion(CUcontext ctx, unsigned int *version)
{
	CUresult ret = enter_given(&ctx);

	if (ret != CUDA_SUCCESS)
		return ret;
	if (version)
		*version = ctx->api_version;
	leave();
	return version ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

EXPORT CUresult cuCtxGetId(CUcontext ctx, unsigned long long *id)
{
	CUresult ret = enter_given(&ctx);

	if (ret != CUDA_SUCCESS)
		return ret;
	if (id)
		*id = ctx->id;
	leave();
	return id ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

EXPORT CUresult cuCtxGetLimit(size_t *value, CUlimit limit)
{
	CUcontext ctx;
	CUresult ret = enter_context(&ctx);

	if (ret != CUDA_SUCCESS)
		return ret;
	if (!value || (size_t)limit >= sizeof(ctx->limits) / sizeof(ctx->limits[0]))
		ret = CUDA_ERROR_INVALID_VALUE;
	else
		*value = ctx->limits[limit];
	leave();
	return ret;
}

EXPORT CUresult cuCtxSetLimit(CUlimit limit, size_t value)
{
	CUcontext ctx;
	CUresult ret = enter_context(&ctx);

	if (ret != CUDA_SUCCESS)
		return ret;
	if ((size_t)limit >= sizeof(ctx->limits) / sizeof(ctx->limits[0]))
		ret = CUDA_ERROR_INVALID_VALUE;
	else
		ctx->limits[limit] = value;
	leave();
	return ret;
}

EXPORT CUresult cuCtxGetStreamPriorityRange(int *least, int *greatest)
{
	CUcontext ctx;
	CUresult ret = enter_context(&ctx);

	if (ret != CUDA_SUCCESS)
		return ret;
	if (least)
		*least = 0;
	if (greatest)
		*greatest = -5;
	leave();
	return CUDA_SUCCESS;
}

/* ---- primary contexts -------------------------------------------------------------- */

static CUresult enter_device(CUdevice dev, struct device **d)
{
	CUresult ret = enter();

	if (ret != CUDA_SUCCESS)
		return ret;
	*d = device_at(dev);
	if (!*d) {
		leave();
		return CUDA_ERROR_INVALID_DEVICE;
	}
	return CUDA_SUCCESS;
}

EXPORT CUresult cuDevicePrimaryCtxRetain(CUcontext *ctx, CUdevice dev)
{
	struct device *d;
	CUresult ret = enter_device(dev, &d);

	if (ret != CUDA_SUCCESS)
		return ret;
	if (!ctx)
		ret = CUDA_ERROR_INVALID_VALUE;
	else if (d->primary.handle == 0)
		ret = activate(&d->primary, d->primary_flags, 3020);
	if (ret == CUDA_SUCCESS) {
		d->primary_refs++;
		*ctx = &d->primary;
	}
	leave();
	return ret;
}

EXPORT CUresult cuDevicePrimaryCtxRelease_v2(CUdevice dev)
{
	struct device *d;
	CUresult ret = enter_device(dev, &d);

	if (ret != CUDA_SUCCESS)
		return ret;
	if (d->primary_refs == 0)
		ret = CUDA_ERROR_INVALID_CONTEXT;
	else if (--d->primary_refs == 0 && d->primary.handle != 0)
		deactivate(&d->primary);
	leave();
	return ret;
}

EXPORT CUresult cuDevicePrimaryCtxRelease(CUdevice dev)
{
	return cuDevicePrimaryCtxRelease_v2(dev);
}

EXPORT CUresult cuDevicePrimaryCtxReset_v2(CUdevice dev)
{
	struct device *d;
	CUresult ret = enter_device(dev, &d);

	if (ret != CUDA_SUCCESS)
		return ret;
	if (d->primary.handle != 0)
		deactivate(&d->primary);
	d->primary_refs = 0;
	leave();
	return CUDA_SUCCESS;
}

EXPORT CUresult cuDevicePrimaryCtxReset(CUdevice dev)
{
	return cuDevicePrimaryCtxReset_v2(dev);
}

EXPORT CUresult cuDevicePrimaryCtxGetState(CUdevice dev, unsigned int *flags, int *active)
{
	struct device *d;
	CUresult ret = enter_device(dev, &d);

	if (ret != CUDA_SUCCESS)
		return ret;
	if (flags)
		*flags = d->primary_flags;
	if (active)
		*active = d->primary.handle != 0;
	leave();
	return flags && active ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

static CUresult set_primary_flags(CUdevice dev, unsigned int flags, bool also_active)
{
	struct device *d;
	CUresult ret = enter_device(dev, &d);

	if (ret != CUDA_SUCCESS)
		return ret;
	if (d->primary.handle != 0 && !also_active)
		ret = CUDA_ERROR_PRIMARY_CONTEXT_ACTIVE;
	else
		d->primary.flags = d->primary_flags = flags;
	leave();
	return ret;
}

/* Since 11.0 the flags of an active context change too. */
EXPORT CUresult cuDevicePrimaryCtxSetFlags_v2(CUdevice dev, unsigned int flags)
{
	return set_primary_flags(dev, flags, true);
}

EXPORT CUresult cuDevicePrimaryCtxSetFlags(CUdevice dev, unsigned int flags)
{
	return set_primary_flags(dev, flags, false);
}
