/* SPDX-License-Identifier: Apache-2.0 */
/*
 * stream.c: streams, events, copies, fills, modules and launches.
 *
 * Kernels do nothing but take time: as long as simgpud says, or, if the function is called
 * sleep_<n>us or sleep_<n>ms, so long. Copies and fills happen at the call, whatever their
 * stream has to do. A stream is known by when its work ends.
 */
#include "internal.h"

#include <fcntl.h>
#include <time.h>

struct CUstream_st {
	struct CUstream_st *next;
	CUcontext ctx;
	unsigned int flags;
	int priority;
	unsigned long long id;
	int64_t tail; /* CLOCK_MONOTONIC ns */
};

struct CUevent_st {
	struct CUevent_st *next;
	CUcontext ctx;
	unsigned int flags;
	bool recorded;
	int64_t at;
};

static CUstream streams;
static CUevent events;
static unsigned long long last_stream = 2; /* 1 and 2 are the default streams */

static bool is_default(CUstream s)
{
	return !s || s == CU_STREAM_LEGACY || s == CU_STREAM_PER_THREAD;
}

CUresult stream_context(CUstream stream, CUcontext *ctx)
{
	CUstream s;

	*ctx = NULL;
	if (is_default(stream)) {
		*ctx = current_context();
		if (!*ctx)
			return CUDA_ERROR_INVALID_CONTEXT;
	} else {
		for (s = streams; s; s = s->next)
			if (s == stream)
				*ctx = s->ctx;
		if (!*ctx)
			return CUDA_ERROR_INVALID_HANDLE;
	}
	return context_alive(*ctx) ? CUDA_SUCCESS : CUDA_ERROR_CONTEXT_IS_DESTROYED;
}

/* When the work of a stream ends. */
static CUresult tail_of(CUstream stream, CUcontext *ctx, int64_t **tail)
{
	CUresult ret = stream_context(stream, ctx);

	if (ret != CUDA_SUCCESS)
		return ret;
	if (stream == CU_STREAM_PER_THREAD)
		*tail = &(*ctx)->tail[1];
	else if (is_default(stream))
		*tail = &(*ctx)->tail[0];
	else
		*tail = &stream->tail;
	return CUDA_SUCCESS;
}

static CUstream per_thread(CUstream stream)
{
	return stream ? stream : CU_STREAM_PER_THREAD;
}

static void wait_until(int64_t until)
{
	struct timespec ts = {.tv_sec = until / 1000000000, .tv_nsec = until % 1000000000};

	while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &ts, NULL) == EINTR)
		;
}

/* The host has seen the end of the work: pools may give back what they hold. */
static CUresult settle_after(CUcontext ctx, int64_t until)
{
	CUresult ret;

	if (until > now_ns())
		wait_until(until);
	ret = enter();
	if (ret != CUDA_SUCCESS)
		return ret;
	if (context_alive(ctx))
		pools_settle(ctx->dev);
	leave();
	return CUDA_SUCCESS;
}

/* Everything in ctx that is a stream or an event goes with it. */
void streams_drop(CUcontext ctx)
{
	CUstream *at = &streams, s;
	CUevent *event_at = &events, e;

	while ((s = *at)) {
		if (s->ctx == ctx) {
			*at = s->next;
			free(s);
		} else {
			at = &s->next;
		}
	}
	while ((e = *event_at)) {
		if (e->ctx == ctx) {
			*event_at = e->next;
			free(e);
		} else {
			event_at = &e->next;
		}
	}
}

/* ---- streams ----------------------------------------------------------------------- */

EXPORT CUresult cuStreamCreateWithPriority(CUstream *stream, unsigned int flags, int priority)
{
	CUcontext ctx;
	CUstream s;
	CUresult ret = enter_context(&ctx);

	if (ret != CUDA_SUCCESS)
		return ret;
	s = stream && flags <= 1 ? calloc(1, sizeof(*s)) : NULL;
	if (!stream || flags > 1) {
		ret = CUDA_ERROR_INVALID_VALUE;
	} else if (!s) {
		ret = CUDA_ERROR_OUT_OF_MEMORY;
	} else {
		s->ctx = ctx;
		s->flags = flags;
		s->priority = priority > 0 ? 0 : priority < -5 ? -5 : priority;
		s->id = ++last_stream;
		s->next = streams;
		streams = s;
		*stream = s;
	}
	leave();
	return ret;
}

EXPORT CUresult cuStreamCreate(CUstream *stream, unsigned int flags)
{
	return cuStreamCreateWithPriority(stream, flags, 0);
}

EXPORT CUresult cuStreamDestroy_v2(CUstream stream)
{
	CUstream *at;
	CUresult ret = enter();

	if (ret != CUDA_SUCCESS)
		return ret;
	for (at = &streams; *at && *at != stream; at = &(*at)->next)
		;
	if (is_default(stream) || !*at) {
		ret = CUDA_ERROR_INVALID_HANDLE;
	} else {
		*at = stream->next;
		free(stream);
	}
	leave();
	return ret;
}

EXPORT CUresult cuStreamDestroy(CUstream stream)
{
	return cuStreamDestroy_v2(stream);
}

EXPORT CUresult cuStreamSynchronize(CUstream stream)
{
	int64_t *tail, until = 0;
	CUcontext ctx;
	CUresult ret = enter();

	if (ret != CUDA_SUCCESS)
		return ret;
	ret = tail_of(stream, &ctx, &tail);
	if (ret == CUDA_SUCCESS)
		until = *tail;
	leave();
	return ret != CUDA_SUCCESS ? ret : settle_after(ctx, until);
}

EXPORT CUresult cuStreamSynchronize_ptsz(CUstream stream)
{
	return cuStreamSynchronize(per_thread(stream));
}

EXPORT CUresult cuStreamQuery(CUstream stream)
{
	int64_t *tail;
	CUcontext ctx;
	CUresult ret = enter();

	if (ret != CUDA_SUCCESS)
		return ret;
	ret = tail_of(stream, &ctx, &tail);
	if (ret == CUDA_SUCCESS && *tail > now_ns())
		ret = CUDA_ERROR_NOT_READY;
	leave();
	return ret;
}

EXPORT CUresult cuStreamQuery_ptsz(CUstream stream)
{
	return cuStreamQuery(per_thread(stream));
}

EXPORT CUresult cuStreamGetFlags(CUstream stream, unsigned int *flags)
{
	CUcontext ctx;
	CUresult ret = enter();

	if (ret != CUDA_SUCCESS)
		return ret;
	ret = flags ? stream_context(stream, &ctx) : CUDA_ERROR_INVALID_VALUE;
	if (ret == CUDA_SUCCESS)
		*flags = is_default(stream) ? 0 : stream->flags;
	leave();
	return ret;
}

EXPORT CUresult cuStreamGetFlags_ptsz(CUstream stream, unsigned int *flags)
{
	return cuStreamGetFlags(per_thread(stream), flags);
}

EXPORT CUresult cuStreamGetPriority(CUstream stream, int *priority)
{
	CUcontext ctx;
	CUresult ret = enter();

	if (ret != CUDA_SUCCESS)
		return ret;
	ret = priority ? stream_context(stream, &ctx) : CUDA_ERROR_INVALID_VALUE;
	if (ret == CUDA_SUCCESS)
		*priority = is_default(stream) ? 0 : stream->priority;
	leave();
	return ret;
}

EXPORT CUresult cuStreamGetPriority_ptsz(CUstream stream, int *priority)
{
	return cuStreamGetPriority(per_thread(stream), priority);
}

EXPORT CUresult cuStreamGetId(CUstream stream, unsigned long long *id)
{
	CUcontext ctx;
	CUresult ret = enter();

	if (ret != CUDA_SUCCESS)
		return ret;
	ret = id ? stream_context(stream, &ctx) : CUDA_ERROR_INVALID_VALUE;
	if (ret == CUDA_SUCCESS)
		*id = !is_default(stream) ? stream->id : stream == CU_STREAM_PER_THREAD ? 2 : 1;
	leave();
	return ret;
}

EXPORT CUresult cuStreamGetId_ptsz(CUstream stream, unsigned long long *id)
{
	return cuStreamGetId(per_thread(stream), id);
}

EXPORT CUresult cuStreamGetCtx(CUstream stream, CUcontext *out)
{
	CUcontext ctx;
	CUresult ret = enter();

	if (ret != CUDA_SUCCESS)
		return ret;
	ret = out ? stream_context(stream, &ctx) : CUDA_ERROR_INVALID_VALUE;
	if (ret == CUDA_SUCCESS)
		*out = ctx;
	leave();
	return ret;
}

EXPORT CUresult cuStreamGetCtx_ptsz(CUstream stream, CUcontext *out)
{
	return cuStreamGetCtx(per_thread(stream), out);
}

EXPORT CUresult cuCtxSynchronize(void)
{
	int64_t until;
	CUcontext ctx;
	CUstream s;
	CUresult ret = enter_context(&ctx);

	if (ret != CUDA_SUCCESS)
		return ret;
	until = ctx->tail[0] > ctx->tail[1] ? ctx->tail[0] : ctx->tail[1];
	for (s = streams; s; s = s->next)
		if (s->ctx == ctx && s->tail > until)
			until = s->tail;
	leave();
	return settle_after(ctx, until);
}

/* ---- events ------------------------------------------------------------------------ */

static bool event_is(CUevent event)
{
	CUevent e;

	for (e = events; e; e = e->next)
		if (e == event)
			return true;
	return false;
}

static CUresult enter_event(CUevent event)
{
	CUresult ret = enter();

	if (ret == CUDA_SUCCESS && !event_is(event)) {
		ret = CUDA_ERROR_INVALID_HANDLE;
		leave();
	}
	return ret;
}

EXPORT CUresult cuEventCreate(CUevent *event, unsigned int flags)
{
	CUcontext ctx;
	CUevent e;
	CUresult ret = enter_context(&ctx);

	if (ret != CUDA_SUCCESS)
		return ret;
	e = event && flags <= 7 ? calloc(1, sizeof(*e)) : NULL;
	if (!event || flags > 7) {
		ret = CUDA_ERROR_INVALID_VALUE;
	} else if (!e) {
		ret = CUDA_ERROR_OUT_OF_MEMORY;
	} else {
		e->ctx = ctx;
		e->flags = flags;
		e->next = events;
		events = e;
		*event = e;
	}
	leave();
	return ret;
}

EXPORT CUresult cuEventDestroy_v2(CUevent event)
{
	CUevent *at;
	CUresult ret = enter_event(event);

	if (ret != CUDA_SUCCESS)
		return ret;
	for (at = &events; *at != event; at = &(*at)->next)
		;
	*at = event->next;
	free(event);
	leave();
	return CUDA_SUCCESS;
}

EXPORT CUresult cuEventDestroy(CUevent event)
{
	return cuEventDestroy_v2(event);
}

EXPORT CUresult cuEventRecord(CUevent event, CUstream stream)
{
	int64_t *tail, now;
	CUcontext ctx;
	CUresult ret = enter_event(event);

	if (ret != CUDA_SUCCESS)
		return ret;
	ret = tail_of(stream, &ctx, &tail);
	if (ret == CUDA_SUCCESS) {
		now = now_ns();
		event->at = *tail > now ? *tail : now;
		event->recorded = true;
	}
	leave();
	return ret;
}

EXPORT CUresult cuEventRecord_ptsz(CUevent event, CUstream stream)
{
	return cuEventRecord(event, per_thread(stream));
}

EXPORT CUresult cuEventQuery(CUevent event)
{
	CUresult ret = enter_event(event);

	if (ret != CUDA_SUCCESS)
		return ret;
	if (event->recorded && event->at > now_ns())
		ret = CUDA_ERROR_NOT_READY;
	leave();
	return ret;
}

EXPORT CUresult cuEventSynchronize(CUevent event)
{
	int64_t until;
	CUcontext ctx;
	CUresult ret = enter_event(event);

	if (ret != CUDA_SUCCESS)
		return ret;
	until = event->recorded ? event->at : 0;
	ctx = event->ctx;
	leave();
	return settle_after(ctx, until);
}

EXPORT CUresult cuEventElapsedTime(float *ms, CUevent from, CUevent to)
{
	int64_t now = now_ns();
	CUresult ret = enter_event(from);

	if (ret != CUDA_SUCCESS)
		return ret;
	if (!ms)
		ret = CUDA_ERROR_INVALID_VALUE;
	else if (!event_is(to) || !from->recorded || !to->recorded || ((from->flags | to->flags) & CU_EVENT_DISABLE_TIMING))
		ret = CUDA_ERROR_INVALID_HANDLE;
	else if (from->at > now || to->at > now)
		ret = CUDA_ERROR_NOT_READY;
	else
		*ms = (float)((double)(to->at - from->at) / 1e6);
	leave();
	return ret;
}

EXPORT CUresult cuEventElapsedTime_v2(float *ms, CUevent from, CUevent to)
{
	return cuEventElapsedTime(ms, from, to);
}

EXPORT CUresult cuStreamWaitEvent(CUstream stream, CUevent event, unsigned int flags)
{
	int64_t *tail;
	CUcontext ctx;
	CUresult ret = enter_event(event);

	if (ret != CUDA_SUCCESS)
		return ret;
	ret = flags <= 1 ? tail_of(stream, &ctx, &tail) : CUDA_ERROR_INVALID_VALUE;
	if (ret == CUDA_SUCCESS && event->recorded && event->at > *tail)
		*tail = event->at;
	leave();
	return ret;
}

EXPORT CUresult cuStreamWaitEvent_ptsz(CUstream stream, CUevent event, unsigned int flags)
{
	return cuStreamWaitEvent(per_thread(stream), event, flags);
}

/* ---- copies and fills --------------------------------------------------------------- */

/* wait: the host goes on when what the default stream had to do has ended. */
static CUresult copy(uintptr_t to, uintptr_t from, size_t n, bool to_device, bool from_device, CUstream stream, bool wait)
{
	int64_t *tail, until = 0;
	CUcontext ctx;
	CUresult ret = enter();

	if (ret != CUDA_SUCCESS)
		return ret;
	ret = tail_of(stream, &ctx, &tail);
	if (ret == CUDA_SUCCESS &&
	    ((to_device && !range_covers(to, n)) || (from_device && !range_covers(from, n)) || (n > 0 && (!to || !from))))
		ret = CUDA_ERROR_INVALID_VALUE;
	if (ret == CUDA_SUCCESS) {
		contents_copy(to, from, n);
		until = *tail;
	}
	leave();
	return ret == CUDA_SUCCESS && wait ? settle_after(ctx, until) : ret;
}

#define HOST(p) ((uintptr_t)(p))
#define DEV(p) ((uintptr_t)(p))

/* Defines a copy in its forms: blocking, in a stream, and both for the per-thread stream. */
#define COPY(name, v, params, to, from, to_device, from_device, ...)                                                \
	EXPORT CUresult name##v params                                                                              \
	{                                                                                                           \
		return copy(to, from, n, to_device, from_device, CU_STREAM_LEGACY, true);                           \
	}                                                                                                           \
	EXPORT CUresult name##v##_ptds params                                                                       \
	{                                                                                                           \
		return copy(to, from, n, to_device, from_device, CU_STREAM_PER_THREAD, true);                       \
	}                                                                                                           \
	EXPORT CUresult name##Async##v(__VA_ARGS__, CUstream stream)                                                \
	{                                                                                                           \
		return copy(to, from, n, to_device, from_device, stream, false);                                    \
	}                                                                                                           \
	EXPORT CUresult name##Async##v##_ptsz(__VA_ARGS__, CUstream stream)                                         \
	{                                                                                                           \
		return copy(to, from, n, to_device, from_device, per_thread(stream), false);                        \
	}

COPY(cuMemcpyHtoD, _v2, (CUdeviceptr to, const void *from, size_t n), DEV(to), HOST(from), true, false, CUdeviceptr to,
     const void *from, size_t n)
COPY(cuMemcpyDtoH, _v2, (void *to, CUdeviceptr from, size_t n), HOST(to), DEV(from), false, true, void *to, CUdeviceptr from,
     size_t n)
COPY(cuMemcpyDtoD, _v2, (CUdeviceptr to, CUdeviceptr from, size_t n), DEV(to), DEV(from), true, true, CUdeviceptr to,
     CUdeviceptr from, size_t n)
COPY(cuMemcpy, , (CUdeviceptr to, CUdeviceptr from, size_t n), DEV(to), DEV(from), false, false, CUdeviceptr to,
     CUdeviceptr from, size_t n)

static CUresult fill(CUdeviceptr to, const void *pattern, size_t width, size_t n, CUstream stream)
{
	CUcontext ctx;
	CUresult ret = enter();

	if (ret != CUDA_SUCCESS)
		return ret;
	ret = stream_context(stream, &ctx);
	if (ret == CUDA_SUCCESS)
		ret = contents_fill((uintptr_t)to, pattern, width, n);
	leave();
	return ret;
}

#define FILL(name, type)                                                                           \
	EXPORT CUresult name##_v2(CUdeviceptr to, type value, size_t n)                            \
	{                                                                                          \
		return fill(to, &value, sizeof(value), n, CU_STREAM_LEGACY);                       \
	}                                                                                          \
	EXPORT CUresult name##_v2_ptds(CUdeviceptr to, type value, size_t n)                       \
	{                                                                                          \
		return fill(to, &value, sizeof(value), n, CU_STREAM_PER_THREAD);                   \
	}                                                                                          \
	EXPORT CUresult name##Async(CUdeviceptr to, type value, size_t n, CUstream stream)         \
	{                                                                                          \
		return fill(to, &value, sizeof(value), n, stream);                                 \
	}                                                                                          \
	EXPORT CUresult name##Async_ptsz(CUdeviceptr to, type value, size_t n, CUstream stream)    \
	{                                                                                          \
		return fill(to, &value, sizeof(value), n, per_thread(stream));                     \
	}

FILL(cuMemsetD8, unsigned char)
FILL(cuMemsetD16, unsigned short)
FILL(cuMemsetD32, unsigned int)

/* ---- modules and launches ----------------------------------------------------------- */

struct CUfunc_st {
	struct CUfunc_st *next;
	CUmodule module;
	uint64_t time_ns;
	char name[];
};

struct CUmod_st {
	struct CUmod_st *next;
	CUcontext ctx;
	CUfunction functions;
};

static CUmodule modules;

static CUresult load(CUmodule *module, const void *image)
{
	CUcontext ctx;
	CUmodule m;
	CUresult ret = enter_context(&ctx);

	if (ret != CUDA_SUCCESS)
		return ret;
	m = module && image ? calloc(1, sizeof(*m)) : NULL;
	if (!module || !image) {
		ret = CUDA_ERROR_INVALID_VALUE;
	} else if (!m) {
		ret = CUDA_ERROR_OUT_OF_MEMORY;
	} else {
		m->ctx = ctx;
		m->next = modules;
		modules = m;
		*module = m;
	}
	leave();
	return ret;
}

EXPORT CUresult cuModuleLoadData(CUmodule *module, const void *image)
{
	return load(module, image);
}

EXPORT CUresult cuModuleLoadDataEx(CUmodule *module, const void *image, unsigned int count, CUjit_option *options, void **values)
{
	if (count > 0 && (!options || !values))
		return CUDA_ERROR_INVALID_VALUE;
	return load(module, image);
}

EXPORT CUresult cuModuleLoadFatBinary(CUmodule *module, const void *image)
{
	return load(module, image);
}

EXPORT CUresult cuModuleLoad(CUmodule *module, const char *path)
{
	int fd;

	if (!path)
		return CUDA_ERROR_INVALID_VALUE;
	fd = open(path, O_RDONLY | O_CLOEXEC);
	if (fd < 0)
		return CUDA_ERROR_FILE_NOT_FOUND;
	close(fd);
	return load(module, path);
}

static CUmodule *find_module(CUmodule module)
{
	CUmodule *at = &modules;

	while (*at && *at != module)
		at = &(*at)->next;
	return at;
}

EXPORT CUresult cuModuleUnload(CUmodule module)
{
	CUfunction f, next;
	CUmodule *at;
	CUresult ret = enter();

	if (ret != CUDA_SUCCESS)
		return ret;
	at = find_module(module);
	if (!*at) {
		ret = CUDA_ERROR_INVALID_HANDLE;
	} else {
		*at = module->next;
		for (f = module->functions; f; f = next) {
			next = f->next;
			free(f);
		}
		free(module);
	}
	leave();
	return ret;
}

static uint64_t time_in(const char *name)
{
	unsigned long n;
	char unit[3] = "";

	if (sscanf(name, "sleep_%lu%2s", &n, unit) != 2 || n > 3600000000)
		return SIMGPU_KERNEL_DEFAULT;
	if (strcmp(unit, "us") == 0)
		return n * 1000;
	if (strcmp(unit, "ms") == 0)
		return n * 1000000;
	return SIMGPU_KERNEL_DEFAULT;
}

/* Every name is there: the images are not looked at. */
EXPORT CUresult cuModuleGetFunction(CUfunction *function, CUmodule module, const char *name)
{
	CUfunction f;
	CUresult ret = enter();

	if (ret != CUDA_SUCCESS)
		return ret;
	if (!function || !name)
		ret = CUDA_ERROR_INVALID_VALUE;
	else if (!*find_module(module))
		ret = CUDA_ERROR_INVALID_HANDLE;
	if (ret == CUDA_SUCCESS) {
		for (f = module->functions; f && strcmp(f->name, name) != 0; f = f->next)
			;
		if (!f) {
			f = calloc(1, sizeof(*f) + strlen(name) + 1);
			if (f) {
				strcpy(f->name, name);
				f->module = module;
				f->time_ns = time_in(name);
				f->next = module->functions;
				module->functions = f;
			} else {
				ret = CUDA_ERROR_OUT_OF_MEMORY;
			}
		}
		if (f)
			*function = f;
	}
	leave();
	return ret;
}

EXPORT CUresult cuModuleGetLoadingMode(CUmoduleLoadingMode *mode)
{
	if (!mode)
		return CUDA_ERROR_INVALID_VALUE;
	*mode = CU_MODULE_LAZY_LOADING;
	return CUDA_SUCCESS;
}

static bool function_is(CUfunction function)
{
	CUfunction f;
	CUmodule m;

	for (m = modules; m; m = m->next)
		for (f = m->functions; f; f = f->next)
			if (f == function)
				return true;
	return false;
}

EXPORT CUresult cuFuncGetAttribute(int *value, CUfunction_attribute attribute, CUfunction function)
{
	CUresult ret = enter();

	if (ret != CUDA_SUCCESS)
		return ret;
	if (!value)
		ret = CUDA_ERROR_INVALID_VALUE;
	else if (!function_is(function))
		ret = CUDA_ERROR_INVALID_HANDLE;
	else
		*value = (unsigned int)attribute == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024 : 0;
	leave();
	return ret;
}

static CUresult launch(CUfunction f, uint64_t blocks, uint64_t threads, CUstream stream)
{
	struct simgpu_req req = {.op = SIMGPU_OP_LAUNCH};
	struct simgpu_rep rep;
	int64_t *tail, end;
	CUcontext ctx;
	CUresult ret = enter();

	if (ret != CUDA_SUCCESS)
		return ret;
	ret = tail_of(stream, &ctx, &tail);
	if (ret == CUDA_SUCCESS && !function_is(f))
		ret = CUDA_ERROR_INVALID_HANDLE;
	if (ret == CUDA_SUCCESS && (blocks == 0 || threads == 0 || threads > 1024))
		ret = CUDA_ERROR_INVALID_VALUE;
	if (ret == CUDA_SUCCESS) {
		req.arg[0] = ctx->handle;
		req.arg[1] = f->time_ns;
		ret = call(ctx->dev, &req, &rep);
	}
	if (ret == CUDA_SUCCESS) {
		end = now_ns() + (int64_t)rep.val[0];
		if (end > *tail)
			*tail = end;
	}
	leave();
	return ret;
}

EXPORT CUresult cuLaunchKernel(CUfunction f, unsigned int gx, unsigned int gy, unsigned int gz, unsigned int bx, unsigned int by,
			       unsigned int bz, unsigned int shared, CUstream stream, void **params, void **extra)
{
	(void)shared;
	(void)params;
	(void)extra;
	return launch(f, (uint64_t)gx * gy * gz, (uint64_t)bx * by * bz, stream);
}

EXPORT CUresult cuLaunchKernel_ptsz(CUfunction f, unsigned int gx, unsigned int gy, unsigned int gz, unsigned int bx,
				    unsigned int by, unsigned int bz, unsigned int shared, CUstream stream, void **params,
				    void **extra)
{
	return cuLaunchKernel(f, gx, gy, gz, bx, by, bz, shared, per_thread(stream), params, extra);
}

EXPORT CUresult cuLaunchCooperativeKernel(CUfunction f, unsigned int gx, unsigned int gy, unsigned int gz, unsigned int bx,
					  unsigned int by, unsigned int bz, unsigned int shared, CUstream stream, void **params)
{
	return cuLaunchKernel(f, gx, gy, gz, bx, by, bz, shared, stream, params, NULL);
}

EXPORT CUresult cuLaunchCooperativeKernel_ptsz(CUfunction f, unsigned int gx, unsigned int gy, unsigned int gz, unsigned int bx,
					       unsigned int by, unsigned int bz, unsigned int shared, CUstream stream,
					       void **params)
{
	return cuLaunchKernel(f, gx, gy, gz, bx, by, bz, shared, per_thread(stream), params, NULL);
}

EXPORT CUresult cuLaunchKernelEx(const CUlaunchConfig *c, CUfunction f, void **params, void **extra)
{
	if (!c)
		return CUDA_ERROR_INVALID_VALUE;
	return cuLaunchKernel(f, c->gridDimX, c->gridDimY, c->gridDimZ, c->blockDimX, c->blockDimY, c->blockDimZ,
			      c->sharedMemBytes, c->hStream, params, extra);
}

EXPORT CUresult cuLaunchKernelEx_ptsz(const CUlaunchConfig *c, CUfunction f, void **params, void **extra)
{
	if (!c)
		return CUDA_ERROR_INVALID_VALUE;
	return cuLaunchKernel(f, c->gridDimX, c->gridDimY, c->gridDimZ, c->blockDimX, c->blockDimY, c->blockDimZ,
			      c->sharedMemBytes, per_thread(c->hStream), params, extra);
}
