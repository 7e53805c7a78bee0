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

/* What a context is made with, and includes. */
#define STACK_BYTES 1024
#define FIFO_BYTES (1 << 20)
#define HEAP_BYTES (8 << 20)

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
	struct simgpu_req req = {.op = SIMGPU_OP_CTX_CREATE, .arg = {list_wanted(), ctx->green ? SIMGPU_CONTEXT_GREEN : SIMGPU_CONTEXT_WHOLE}};
	struct simgpu_rep rep;
	CUresult ret = call(ctx->dev, &req, &rep);

	if (ret != CUDA_SUCCESS)
		return ret;
	ctx->handle = rep.val[0];
	ctx->flags = flags;
	ctx->api_version = api_version;
	ctx->id = ++last_id;
	ctx->attached = 0;
	ctx->tail[0] = ctx->tail[1] = 0;
	ctx->limits[CU_LIMIT_STACK_SIZE] = STACK_BYTES;
	ctx->limits[CU_LIMIT_PRINTF_FIFO_SIZE] = FIFO_BYTES;
	ctx->limits[CU_LIMIT_MALLOC_HEAP_SIZE] = HEAP_BYTES;
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

	modules_drop(ctx);
	arrays_drop(ctx);
	ranges_forget_context(ctx);
	streams_drop(ctx);
	/* If the driver has gone, so has the context: there is nobody to tell. */
	(void)call(ctx->dev, &req, &rep);
	ctx->handle = 0;
	if (!other_context_on(ctx->dev)) {
		pools_drop(ctx->dev);
		graph_memory_drop(ctx->dev);
	}
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

/* There is no OpenGL and no VDPAU here to share anything with: contexts as others. */
EXPORT CUresult cuGLCtxCreate(CUcontext *ctx, unsigned int flags, CUdevice dev)
{
	return create(ctx, flags, dev, 3010);
}

EXPORT CUresult cuGLCtxCreate_v2(CUcontext *ctx, unsigned int flags, CUdevice dev)
{
	return create(ctx, flags, dev, 3020);
}

EXPORT CUresult cuVDPAUCtxCreate(CUcontext *ctx, unsigned int flags, CUdevice dev, uint32_t vdpau, void *get_proc_address)
{
	(void)vdpau, (void)get_proc_address;
	return create(ctx, flags, dev, 3010);
}

EXPORT CUresult cuVDPAUCtxCreate_v2(CUcontext *ctx, unsigned int flags, CUdevice dev, uint32_t vdpau, void *get_proc_address)
{
	(void)vdpau, (void)get_proc_address;
	return create(ctx, flags, dev, 3020);
}

EXPORT CUresult cuCtxDestroy_v2(CUcontext ctx)
{
	CUresult ret = enter();

	if (ret != CUDA_SUCCESS)
		return ret;
	if (!ctx)
		ret = CUDA_ERROR_INVALID_VALUE;
	else if (!context_is(ctx) || ctx->primary || ctx->green)
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

/* A count of its own for those who share a context: the last one to detach destroys it. */
EXPORT CUresult cuCtxAttach(CUcontext *out, unsigned int flags)
{
	CUcontext ctx;
	CUresult ret = enter_context(&ctx);

	if (ret != CUDA_SUCCESS)
		return ret;
	if (!out || flags != 0) {
		ret = CUDA_ERROR_INVALID_VALUE;
	} else {
		ctx->attached++;
		*out = ctx;
	}
	leave();
	return ret;
}

EXPORT CUresult cuCtxDetach(CUcontext ctx)
{
	CUresult ret = enter();

	if (ret != CUDA_SUCCESS)
		return ret;
	if (!ctx || ctx != current_context() || !context_alive(ctx)) {
		ret = CUDA_ERROR_INVALID_CONTEXT;
	} else if (ctx->attached > 0) {
		ctx->attached--;
	} else if (ctx->primary || ctx->green) {
		ret = CUDA_ERROR_INVALID_CONTEXT;
	} else {
		deactivate(ctx);
		stack.used--;
	}
	leave();
	return ret;
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

/* Of ctx, or of the current context if that is NULL. */
CUresult enter_given(CUcontext *ctx)
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

EXPORT CUresult cuCtxGetDevice_v2(CUdevice *dev, CUcontext ctx)
{
	CUresult ret = enter_given(&ctx);

	if (ret != CUDA_SUCCESS)
		return ret;
	if (dev)
		*dev = ctx->dev->ordinal;
	leave();
	return dev ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
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

EXPORT CUresult cuCtxSetFlags(unsigned int flags)
{
	CUcontext ctx;
	CUresult ret = enter_context(&ctx);

	if (ret != CUDA_SUCCESS)
		return ret;
	ctx->flags = flags;
	leave();
	return CUDA_SUCCESS;
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
	ctx = keeper(ctx);
	if (!value || (size_t)limit >= sizeof(ctx->limits) / sizeof(ctx->limits[0]))
		ret = CUDA_ERROR_INVALID_VALUE;
	else
		*value = ctx->limits[limit];
	leave();
	return ret;
}

/* Every thread that can run has a stack; the heap and the queue for printing are the context's. */
static CUresult resize(CUcontext ctx)
{
	struct simgpu_req req = {.op = SIMGPU_OP_CTX_RESIZE, .arg = {ctx->handle}};
	uint64_t threads = (uint64_t)ctx->dev->info.sm_count * ctx->dev->info.threads_per_sm;
	struct simgpu_rep rep;
	int64_t stacks;

	if (ctx->limits[CU_LIMIT_STACK_SIZE] > (UINT64_C(1) << 40) / threads)
		return CUDA_ERROR_OUT_OF_MEMORY;
	stacks = ((int64_t)ctx->limits[CU_LIMIT_STACK_SIZE] - STACK_BYTES) * (int64_t)threads;
	req.arg[1] = (uint64_t)(stacks + (int64_t)ctx->limits[CU_LIMIT_PRINTF_FIFO_SIZE] - FIFO_BYTES +
				(int64_t)ctx->limits[CU_LIMIT_MALLOC_HEAP_SIZE] - HEAP_BYTES);
	return call(ctx->dev, &req, &rep);
}

EXPORT CUresult cuCtxSetLimit(CUlimit limit, size_t value)
{
	CUcontext ctx;
	size_t was;
	CUresult ret = enter_context(&ctx);

	if (ret != CUDA_SUCCESS)
		return ret;
	ctx = keeper(ctx);
	if ((size_t)limit >= sizeof(ctx->limits) / sizeof(ctx->limits[0]) || value > SIZE_MAX / 2) {
		ret = CUDA_ERROR_INVALID_VALUE;
	} else {
		was = ctx->limits[limit];
		ctx->limits[limit] = value;
		if (limit == CU_LIMIT_STACK_SIZE || limit == CU_LIMIT_PRINTF_FIFO_SIZE || limit == CU_LIMIT_MALLOC_HEAP_SIZE)
			ret = resize(ctx);
		if (ret != CUDA_SUCCESS)
			ctx->limits[limit] = was;
	}
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
		deactivate(&d->primary); /* and what was retained is still to be released */
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

/* ---- green contexts ----------------------------------------------------------------- */

/* Part of the device's multiprocessors. */
struct CUdevResourceDesc_st {
	struct CUdevResourceDesc_st *next;
	unsigned int sm_count;
};

struct CUgreenCtx_st {
	struct CUgreenCtx_st *next;
	struct CUctx_st *ctx; /* in the list of all contexts */
	unsigned int sm_count;
};

static CUdevResourceDesc descriptions;
static CUgreenCtx greens;

#define SM_GROUP 2u /* multiprocessors are dealt out in twos */

static void describe(CUdevResource *resource, unsigned int sm_count)
{
	memset(resource, 0, sizeof(*resource));
	resource->type = CU_DEV_RESOURCE_TYPE_SM;
	resource->sm.smCount = sm_count;
}

EXPORT CUresult cuDeviceGetDevResource(CUdevice dev, CUdevResource *resource, CUdevResourceType type)
{
	struct device *d;
	CUresult ret = enter_device(dev, &d);

	if (ret != CUDA_SUCCESS)
		return ret;
	if (!resource) {
		ret = CUDA_ERROR_INVALID_VALUE;
	} else if (type != CU_DEV_RESOURCE_TYPE_SM) {
		ret = CUDA_ERROR_INVALID_RESOURCE_TYPE;
	} else {
		describe(resource, d->info.sm_count);
	}
	leave();
	return ret;
}

EXPORT CUresult cuDevSmResourceSplitByCount(CUdevResource *result, unsigned int *groups, const CUdevResource *input, CUdevResource *remainder,
					    unsigned int flags, unsigned int minimum)
{
	unsigned int size, most, n, i;

	(void)flags;
	if (!groups || !input || input->type != CU_DEV_RESOURCE_TYPE_SM)
		return input && groups ? CUDA_ERROR_INVALID_RESOURCE_TYPE : CUDA_ERROR_INVALID_VALUE;
	size = ((minimum ? minimum : 1) + SM_GROUP - 1) / SM_GROUP * SM_GROUP;
	if (size > input->sm.smCount)
		return CUDA_ERROR_INVALID_RESOURCE_CONFIGURATION;
	most = input->sm.smCount / size;
	n = result && *groups < most ? *groups : most;
	for (i = 0; result && i < n; i++) {
		result[i] = *input;
		result[i].sm.smCount = size;
	}
	if (remainder) {
		*remainder = *input;
		remainder->sm.smCount = input->sm.smCount - n * size;
	}
	*groups = n;
	return CUDA_SUCCESS;
}

EXPORT CUresult cuDevResourceGenerateDesc(CUdevResourceDesc *desc, CUdevResource *resources, unsigned int count)
{
	CUdevResourceDesc d;
	unsigned int i;
	CUresult ret = enter();

	if (ret != CUDA_SUCCESS)
		return ret;
	if (!desc || !resources || count == 0)
		ret = CUDA_ERROR_INVALID_VALUE;
	for (i = 0; ret == CUDA_SUCCESS && i < count; i++)
		if (resources[i].type != CU_DEV_RESOURCE_TYPE_SM)
			ret = CUDA_ERROR_INVALID_RESOURCE_TYPE;
	d = ret == CUDA_SUCCESS ? calloc(1, sizeof(*d)) : NULL;
	if (d) {
		for (i = 0; i < count; i++)
			d->sm_count += resources[i].sm.smCount;
		d->next = descriptions; /* there is no call to free one */
		descriptions = d;
		*desc = d;
	} else if (ret == CUDA_SUCCESS) {
		ret = CUDA_ERROR_OUT_OF_MEMORY;
	}
	leave();
	return ret;
}

static bool description_is(CUdevResourceDesc desc)
{
	CUdevResourceDesc d;

	for (d = descriptions; d; d = d->next)
		if (d == desc)
			return true;
	return false;
}

static CUgreenCtx *find_green(CUgreenCtx green)
{
	CUgreenCtx *at = &greens;

	while (*at && *at != green)
		at = &(*at)->next;
	return at;
}

static void release_primary(struct device *d)
{
	if (d->primary_refs > 0 && --d->primary_refs == 0 && d->primary.handle != 0)
		deactivate(&d->primary);
}

/* Stands on the primary context, which it keeps, and whose memory it uses. */
EXPORT CUresult cuGreenCtxCreate(CUgreenCtx *out, CUdevResourceDesc desc, CUdevice dev, unsigned int flags)
{
	CUgreenCtx green = NULL;
	CUcontext ctx = NULL;
	struct device *d;
	CUresult ret = enter_device(dev, &d);

	if (ret != CUDA_SUCCESS)
		return ret;
	if (!out || flags != 1 || !description_is(desc)) {
		ret = CUDA_ERROR_INVALID_VALUE;
	} else {
		green = calloc(1, sizeof(*green));
		ctx = calloc(1, sizeof(*ctx));
		if (!green || !ctx)
			ret = CUDA_ERROR_OUT_OF_MEMORY;
	}
	if (ret == CUDA_SUCCESS && d->primary.handle == 0)
		ret = activate(&d->primary, d->primary_flags, 3020);
	if (ret == CUDA_SUCCESS) {
		d->primary_refs++;
		ctx->dev = d;
		ctx->green = true;
		ret = activate(ctx, 0, 3020);
		if (ret != CUDA_SUCCESS)
			release_primary(d);
	}
	if (ret == CUDA_SUCCESS) {
		ctx->next = made;
		made = ctx;
		green->ctx = ctx;
		green->sm_count = desc->sm_count;
		green->next = greens;
		greens = green;
		*out = green;
	} else {
		free(green);
		free(ctx);
	}
	leave();
	return ret;
}

EXPORT CUresult cuGreenCtxDestroy(CUgreenCtx green)
{
	CUgreenCtx *at;
	CUresult ret = enter();

	if (ret != CUDA_SUCCESS)
		return ret;
	at = find_green(green);
	if (!*at) {
		ret = CUDA_ERROR_INVALID_HANDLE;
	} else {
		struct device *d = green->ctx->dev;

		*at = green->next;
		if (green->ctx->handle != 0)
			deactivate(green->ctx);
		free(green);
		release_primary(d);
	}
	leave();
	return ret;
}

EXPORT CUresult cuCtxFromGreenCtx(CUcontext *ctx, CUgreenCtx green)
{
	CUresult ret = enter();

	if (ret != CUDA_SUCCESS)
		return ret;
	if (!ctx || !*find_green(green))
		ret = ctx ? CUDA_ERROR_INVALID_HANDLE : CUDA_ERROR_INVALID_VALUE;
	else
		*ctx = green->ctx;
	leave();
	return ret;
}

EXPORT CUresult cuGreenCtxGetDevResource(CUgreenCtx green, CUdevResource *resource, CUdevResourceType type)
{
	CUresult ret = enter();

	if (ret != CUDA_SUCCESS)
		return ret;
	if (!*find_green(green))
		ret = CUDA_ERROR_INVALID_HANDLE;
	else if (!resource)
		ret = CUDA_ERROR_INVALID_VALUE;
	else if (type != CU_DEV_RESOURCE_TYPE_SM)
		ret = CUDA_ERROR_INVALID_RESOURCE_TYPE;
	else
		describe(resource, green->sm_count);
	leave();
	return ret;
}

EXPORT CUresult cuCtxGetDevResource(CUcontext ctx, CUdevResource *resource, CUdevResourceType type)
{
	unsigned int sm_count;
	CUgreenCtx g;
	CUresult ret = enter_given(&ctx);

	if (ret != CUDA_SUCCESS)
		return ret;
	sm_count = ctx->dev->info.sm_count;
	for (g = greens; g; g = g->next)
		if (g->ctx == ctx)
			sm_count = g->sm_count;
	if (!resource)
		ret = CUDA_ERROR_INVALID_VALUE;
	else if (type != CU_DEV_RESOURCE_TYPE_SM)
		ret = CUDA_ERROR_INVALID_RESOURCE_TYPE;
	else
		describe(resource, sm_count);
	leave();
	return ret;
}

EXPORT CUresult cuGreenCtxStreamCreate(CUstream *stream, CUgreenCtx green, unsigned int flags, int priority)
{
	CUcontext ctx = NULL;
	CUresult ret = enter();

	if (ret != CUDA_SUCCESS)
		return ret;
	if (*find_green(green))
		ctx = green->ctx;
	leave();
	if (!ctx)
		return CUDA_ERROR_INVALID_HANDLE;
	return stream_create(stream, ctx, flags, priority);
}

/* The green context that a context is the other name of, or NULL. */
CUgreenCtx green_of(CUcontext ctx)
{
	CUgreenCtx g;

	for (g = greens; g && g->ctx != ctx; g = g->next)
		;
	return g;
}
