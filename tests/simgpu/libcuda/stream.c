/* SPDX-License-Identifier: Apache-2.0 */
/*
 * stream.c: streams and their capture, events, copies, fills and launches.
 *
 * Kernels do nothing but take time: as long as simgpud says, or as long as their name does
 * (module.c). Copies and fills happen at the call, whatever their
 * stream has to do. A stream is known by when its work ends.
 */
#include "internal.h"

#include <time.h>

struct CUstream_st {
	struct CUstream_st *next;
	CUcontext ctx;
	unsigned int flags;
	int priority;
	unsigned long long id;
	int64_t tail; /* CLOCK_MONOTONIC ns */
	struct capture *capture;
};

struct CUevent_st {
	struct CUevent_st *next;
	CUcontext ctx;
	unsigned int flags;
	bool recorded;
	int64_t at;
	struct capture *capture; /* it was recorded in */
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

CUstream per_thread(CUstream stream)
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

/* ---- capture ------------------------------------------------------------------------ */

/*
 * Calls on a stream that captures become nodes of a graph. A stream that waits for an event
 * of a capture joins it.
 */
struct capture {
	struct capture *next;
	CUgraph graph;
	bool own_graph; /* made for it: handed out at its end */
	CUstream origin;
	CUcontext ctx;
	pthread_t thread;
	unsigned int mode;
	cuuint64_t id;
	bool invalid;
};

static struct capture *captures;
static cuuint64_t last_capture;
static _Thread_local unsigned int thread_mode; /* CU_STREAM_CAPTURE_MODE_GLOBAL */
static _Thread_local struct capture *thread_capture; /* of the thread's own default stream */

static bool capture_is(const struct capture *c)
{
	const struct capture *x;

	for (x = captures; x; x = x->next)
		if (x == c)
			return true;
	return false;
}

/* Where a stream's capture is kept; NULL: the legacy stream cannot. */
static struct capture **capture_slot(CUstream stream)
{
	if (stream == CU_STREAM_PER_THREAD) {
		if (thread_capture && !capture_is(thread_capture))
			thread_capture = NULL; /* its context went */
		return &thread_capture;
	}
	return is_default(stream) ? NULL : &stream->capture;
}

static struct capture *capture_of(CUstream stream)
{
	struct capture **slot = capture_slot(stream);

	return slot ? *slot : NULL;
}

CUgraph capturing(CUstream stream)
{
	struct capture *c = capture_of(stream);

	return c ? c->graph : NULL;
}

CUresult capture_fail(CUstream stream)
{
	struct capture *c = capture_of(stream);

	if (c)
		c->invalid = true;
	return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
}

/* What cannot be captured and would not be seen: refused in the modes that say so. */
CUresult unsafe(void)
{
	CUresult ret = CUDA_SUCCESS;
	struct capture *c;

	if (thread_mode == CU_STREAM_CAPTURE_MODE_RELAXED)
		return CUDA_SUCCESS;
	for (c = captures; c; c = c->next) {
		bool mine = pthread_equal(c->thread, pthread_self());

		if (mine ? c->mode != CU_STREAM_CAPTURE_MODE_RELAXED
			 : c->mode == CU_STREAM_CAPTURE_MODE_GLOBAL && thread_mode == CU_STREAM_CAPTURE_MODE_GLOBAL) {
			c->invalid = true;
			ret = CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
		}
	}
	return ret;
}

/* Takes the capture off all streams, and forgets it. */
static void capture_end(struct capture *c)
{
	struct capture **at;
	CUstream s;
	CUevent e;

	for (s = streams; s; s = s->next)
		if (s->capture == c)
			s->capture = NULL;
	for (e = events; e; e = e->next)
		if (e->capture == c)
			e->capture = NULL;
	for (at = &captures; *at != c; at = &(*at)->next)
		;
	*at = c->next;
	free(c);
}

static void captures_drop(CUcontext ctx)
{
	struct capture *c, *next;

	for (c = captures; c; c = next) {
		next = c->next;
		if (c->ctx != ctx)
			continue;
		if (c->own_graph)
			graph_free(c->graph);
		capture_end(c);
	}
}

static CUresult capture_begin(CUstream stream, CUgraph graph, unsigned int mode)
{
	struct capture **slot, *c;
	CUcontext ctx;
	CUresult ret = enter();

	if (ret != CUDA_SUCCESS)
		return ret;
	ret = mode <= CU_STREAM_CAPTURE_MODE_RELAXED ? stream_context(stream, &ctx) : CUDA_ERROR_INVALID_VALUE;
	slot = ret == CUDA_SUCCESS ? capture_slot(stream) : NULL;
	if (ret == CUDA_SUCCESS && !slot)
		ret = CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
	if (ret == CUDA_SUCCESS && (*slot || (graph && !graph_is(graph))))
		ret = *slot ? CUDA_ERROR_ILLEGAL_STATE : CUDA_ERROR_INVALID_VALUE;
	if (ret == CUDA_SUCCESS) {
		c = calloc(1, sizeof(*c));
		if (c) {
			c->graph = graph ? graph : graph_new();
			c->own_graph = !graph;
		}
		if (!c || !c->graph) {
			free(c);
			ret = CUDA_ERROR_OUT_OF_MEMORY;
		} else {
			c->origin = stream;
			c->ctx = ctx;
			c->thread = pthread_self();
			c->mode = mode;
			c->id = ++last_capture;
			c->next = captures;
			captures = c;
			*slot = c;
		}
	}
	leave();
	return ret;
}

EXPORT CUresult cuStreamBeginCapture(CUstream stream)
{
	return capture_begin(stream, NULL, CU_STREAM_CAPTURE_MODE_GLOBAL);
}

EXPORT CUresult cuStreamBeginCapture_ptsz(CUstream stream)
{
	return capture_begin(per_thread(stream), NULL, CU_STREAM_CAPTURE_MODE_GLOBAL);
}

EXPORT CUresult cuStreamBeginCapture_v2(CUstream stream, CUstreamCaptureMode mode)
{
	return capture_begin(stream, NULL, mode);
}

EXPORT CUresult cuStreamBeginCapture_v2_ptsz(CUstream stream, CUstreamCaptureMode mode)
{
	return capture_begin(per_thread(stream), NULL, mode);
}

EXPORT CUresult cuStreamBeginCaptureToGraph(CUstream stream, CUgraph graph, const CUgraphNode *dependencies, const CUgraphEdgeData *edges,
					    size_t count, CUstreamCaptureMode mode)
{
	(void)edges; /* how nodes wait for one another does not matter here */
	if (!graph || (count > 0 && !dependencies))
		return CUDA_ERROR_INVALID_VALUE;
	return capture_begin(stream, graph, mode);
}

EXPORT CUresult cuStreamBeginCaptureToGraph_ptsz(CUstream stream, CUgraph graph, const CUgraphNode *dependencies,
						 const CUgraphEdgeData *edges, size_t count, CUstreamCaptureMode mode)
{
	return cuStreamBeginCaptureToGraph(per_thread(stream), graph, dependencies, edges, count, mode);
}

EXPORT CUresult cuStreamEndCapture(CUstream stream, CUgraph *graph)
{
	struct capture *c;
	CUcontext ctx;
	CUresult ret = enter();

	if (ret != CUDA_SUCCESS)
		return ret;
	ret = stream_context(stream, &ctx);
	c = ret == CUDA_SUCCESS ? capture_of(stream) : NULL;
	if (ret == CUDA_SUCCESS && (!c || !graph))
		ret = graph ? CUDA_ERROR_ILLEGAL_STATE : CUDA_ERROR_INVALID_VALUE;
	else if (c && c->origin != stream)
		ret = CUDA_ERROR_STREAM_CAPTURE_UNMATCHED;
	else if (c && c->mode != CU_STREAM_CAPTURE_MODE_RELAXED && !pthread_equal(c->thread, pthread_self()))
		ret = CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD;
	if (ret == CUDA_SUCCESS) {
		*graph = c->graph;
		if (c->invalid) {
			ret = CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
			if (c->own_graph)
				graph_free(c->graph);
			*graph = NULL;
		}
		if (stream == CU_STREAM_PER_THREAD)
			thread_capture = NULL;
		capture_end(c);
	}
	leave();
	return ret;
}

EXPORT CUresult cuStreamEndCapture_ptsz(CUstream stream, CUgraph *graph)
{
	return cuStreamEndCapture(per_thread(stream), graph);
}

/* What there is to know of a stream's capture. */
static CUresult capture_info(CUstream stream, CUstreamCaptureStatus *status, cuuint64_t *id, CUgraph *graph)
{
	struct capture *c;
	CUcontext ctx;
	CUresult ret = enter();

	if (ret != CUDA_SUCCESS)
		return ret;
	ret = status ? stream_context(stream, &ctx) : CUDA_ERROR_INVALID_VALUE;
	c = ret == CUDA_SUCCESS ? capture_of(stream) : NULL;
	if (ret == CUDA_SUCCESS)
		*status = !c ? CU_STREAM_CAPTURE_STATUS_NONE
			: c->invalid ? CU_STREAM_CAPTURE_STATUS_INVALIDATED
				     : CU_STREAM_CAPTURE_STATUS_ACTIVE;
	if (c && id)
		*id = c->id;
	if (c && graph)
		*graph = c->graph;
	leave();
	return ret;
}

EXPORT CUresult cuStreamIsCapturing(CUstream stream, CUstreamCaptureStatus *status)
{
	return capture_info(stream, status, NULL, NULL);
}

EXPORT CUresult cuStreamIsCapturing_ptsz(CUstream stream, CUstreamCaptureStatus *status)
{
	return capture_info(per_thread(stream), status, NULL, NULL);
}

EXPORT CUresult cuStreamGetCaptureInfo(CUstream stream, CUstreamCaptureStatus *status, cuuint64_t *id)
{
	return capture_info(stream, status, id, NULL);
}

EXPORT CUresult cuStreamGetCaptureInfo_ptsz(CUstream stream, CUstreamCaptureStatus *status, cuuint64_t *id)
{
	return capture_info(per_thread(stream), status, id, NULL);
}

/* The dependencies of the next node are not kept: none are named. */
EXPORT CUresult cuStreamGetCaptureInfo_v2(CUstream stream, CUstreamCaptureStatus *status, cuuint64_t *id, CUgraph *graph,
					  const CUgraphNode **dependencies, size_t *count)
{
	if (dependencies)
		*dependencies = NULL;
	if (count)
		*count = 0;
	return capture_info(stream, status, id, graph);
}

EXPORT CUresult cuStreamGetCaptureInfo_v2_ptsz(CUstream stream, CUstreamCaptureStatus *status, cuuint64_t *id, CUgraph *graph,
					       const CUgraphNode **dependencies, size_t *count)
{
	return cuStreamGetCaptureInfo_v2(per_thread(stream), status, id, graph, dependencies, count);
}

EXPORT CUresult cuStreamGetCaptureInfo_v3(CUstream stream, CUstreamCaptureStatus *status, cuuint64_t *id, CUgraph *graph,
					  const CUgraphNode **dependencies, const CUgraphEdgeData **edges, size_t *count)
{
	if (edges)
		*edges = NULL;
	return cuStreamGetCaptureInfo_v2(stream, status, id, graph, dependencies, count);
}

EXPORT CUresult cuStreamGetCaptureInfo_v3_ptsz(CUstream stream, CUstreamCaptureStatus *status, cuuint64_t *id, CUgraph *graph,
					       const CUgraphNode **dependencies, const CUgraphEdgeData **edges, size_t *count)
{
	return cuStreamGetCaptureInfo_v3(per_thread(stream), status, id, graph, dependencies, edges, count);
}

static CUresult update_dependencies(CUstream stream)
{
	CUstreamCaptureStatus status;
	CUresult ret = capture_info(stream, &status, NULL, NULL);

	if (ret == CUDA_SUCCESS && status != CU_STREAM_CAPTURE_STATUS_ACTIVE)
		ret = CUDA_ERROR_ILLEGAL_STATE;
	return ret;
}

EXPORT CUresult cuStreamUpdateCaptureDependencies(CUstream stream, CUgraphNode *dependencies, size_t count, unsigned int flags)
{
	(void)dependencies;
	(void)count;
	return flags <= 1 ? update_dependencies(stream) : CUDA_ERROR_INVALID_VALUE;
}

EXPORT CUresult cuStreamUpdateCaptureDependencies_ptsz(CUstream stream, CUgraphNode *dependencies, size_t count, unsigned int flags)
{
	return cuStreamUpdateCaptureDependencies(per_thread(stream), dependencies, count, flags);
}

EXPORT CUresult cuStreamUpdateCaptureDependencies_v2(CUstream stream, CUgraphNode *dependencies, const CUgraphEdgeData *edges, size_t count,
						     unsigned int flags)
{
	(void)edges;
	return cuStreamUpdateCaptureDependencies(stream, dependencies, count, flags);
}

EXPORT CUresult cuStreamUpdateCaptureDependencies_v2_ptsz(CUstream stream, CUgraphNode *dependencies, const CUgraphEdgeData *edges,
							  size_t count, unsigned int flags)
{
	return cuStreamUpdateCaptureDependencies_v2(per_thread(stream), dependencies, edges, count, flags);
}

EXPORT CUresult cuThreadExchangeStreamCaptureMode(CUstreamCaptureMode *mode)
{
	unsigned int was = thread_mode;

	if (!mode || (unsigned int)*mode > CU_STREAM_CAPTURE_MODE_RELAXED)
		return CUDA_ERROR_INVALID_VALUE;
	thread_mode = (unsigned int)*mode;
	*mode = was;
	return CUDA_SUCCESS;
}

/* Everything in ctx that is a stream or an event goes with it. */
void streams_drop(CUcontext ctx)
{
	CUstream *at = &streams, s;
	CUevent *event_at = &events, e;

	captures_drop(ctx);
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

/* In ctx, or in the current context if that is NULL. */
CUresult stream_create(CUstream *stream, CUcontext ctx, unsigned int flags, int priority)
{
	CUstream s;
	CUresult ret = ctx ? enter() : enter_context(&ctx);

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

EXPORT CUresult cuStreamCreateWithPriority(CUstream *stream, unsigned int flags, int priority)
{
	return stream_create(stream, NULL, flags, priority);
}

EXPORT CUresult cuStreamCreate(CUstream *stream, unsigned int flags)
{
	return stream_create(stream, NULL, flags, 0);
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
		if (stream->capture && stream->capture->origin == stream) {
			if (stream->capture->own_graph)
				graph_free(stream->capture->graph);
			capture_end(stream->capture);
		}
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
	if (ret == CUDA_SUCCESS && capture_of(stream))
		ret = capture_fail(stream);
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
	if (ret == CUDA_SUCCESS && capture_of(stream))
		ret = capture_fail(stream);
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

/* Either the context or the green one: which it is. */
EXPORT CUresult cuStreamGetCtx_v2(CUstream stream, CUcontext *out, CUgreenCtx *green)
{
	CUcontext ctx;
	CUresult ret = enter();

	if (ret != CUDA_SUCCESS)
		return ret;
	ret = out && green ? stream_context(stream, &ctx) : CUDA_ERROR_INVALID_VALUE;
	if (ret == CUDA_SUCCESS) {
		*green = green_of(ctx);
		*out = *green ? NULL : ctx;
	}
	leave();
	return ret;
}

EXPORT CUresult cuStreamGetCtx_v2_ptsz(CUstream stream, CUcontext *out, CUgreenCtx *green)
{
	return cuStreamGetCtx_v2(per_thread(stream), out, green);
}

EXPORT CUresult cuStreamGetGreenCtx(CUstream stream, CUgreenCtx *green)
{
	CUcontext ctx;

	return green ? cuStreamGetCtx_v2(stream, &ctx, green) : CUDA_ERROR_INVALID_VALUE;
}

static CUresult synchronize(CUcontext ctx)
{
	int64_t until;
	CUstream s;
	CUresult ret = enter_given(&ctx);

	if (ret != CUDA_SUCCESS)
		return ret;
	until = ctx->tail[0] > ctx->tail[1] ? ctx->tail[0] : ctx->tail[1];
	for (s = streams; s; s = s->next) {
		if (s->ctx == ctx && s->tail > until)
			until = s->tail;
		if (s->ctx == ctx && s->capture)
			ret = capture_fail(s);
	}
	leave();
	return ret != CUDA_SUCCESS ? ret : settle_after(ctx, until);
}

EXPORT CUresult cuCtxSynchronize(void)
{
	return synchronize(NULL);
}

EXPORT CUresult cuCtxSynchronize_v2(CUcontext ctx)
{
	return synchronize(ctx);
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
		event->capture = capture_of(stream);
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
	if (event->capture) {
		event->capture->invalid = true;
		ret = CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
	} else if (event->recorded && event->at > now_ns()) {
		ret = CUDA_ERROR_NOT_READY;
	}
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
	if (event->capture) {
		event->capture->invalid = true;
		ret = CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
	}
	leave();
	return ret != CUDA_SUCCESS ? ret : settle_after(ctx, until);
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
	if (ret == CUDA_SUCCESS && event->capture && capture_slot(stream))
		*capture_slot(stream) = event->capture; /* joins */
	else if (ret == CUDA_SUCCESS && event->capture)
		ret = CUDA_ERROR_STREAM_CAPTURE_IMPLICIT;
	else if (ret == CUDA_SUCCESS && event->recorded && event->at > *tail)
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
	if (ret == CUDA_SUCCESS && capture_of(stream)) {
		ret = wait ? capture_fail(stream) : graph_capture_other(capturing(stream), CU_GRAPH_NODE_TYPE_MEMCPY);
	} else if (ret == CUDA_SUCCESS) {
		touch_managed(to, n);
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

/* Copies of rows, between host and device only: an array has no contents here. */
static CUresult copy_rows(const CUDA_MEMCPY2D *c, CUstream stream, bool wait)
{
	bool from_host, to_host;
	uintptr_t from, to;
	CUresult ret = CUDA_SUCCESS;
	size_t row;

	if (!c)
		return CUDA_ERROR_INVALID_VALUE;
	from_host = c->srcMemoryType == CU_MEMORYTYPE_HOST;
	to_host = c->dstMemoryType == CU_MEMORYTYPE_HOST;
	if (c->srcMemoryType == CU_MEMORYTYPE_ARRAY || c->dstMemoryType == CU_MEMORYTYPE_ARRAY)
		return CUDA_ERROR_NOT_SUPPORTED;
	if ((!from_host && c->srcMemoryType != CU_MEMORYTYPE_DEVICE && c->srcMemoryType != CU_MEMORYTYPE_UNIFIED) ||
	    (!to_host && c->dstMemoryType != CU_MEMORYTYPE_DEVICE && c->dstMemoryType != CU_MEMORYTYPE_UNIFIED))
		return CUDA_ERROR_INVALID_VALUE;
	/* A pitch of 0 is the width's. */
	if ((c->srcPitch && c->srcPitch < c->WidthInBytes + c->srcXInBytes) || (c->dstPitch && c->dstPitch < c->WidthInBytes + c->dstXInBytes))
		return CUDA_ERROR_INVALID_VALUE;
	from = from_host ? HOST(c->srcHost) : DEV(c->srcDevice);
	to = to_host ? HOST(c->dstHost) : DEV(c->dstDevice);
	from += c->srcXInBytes + c->srcY * (c->srcPitch ? c->srcPitch : c->WidthInBytes);
	to += c->dstXInBytes + c->dstY * (c->dstPitch ? c->dstPitch : c->WidthInBytes);
	if (capturing(stream)) /* one node, whatever it copies */
		return copy(to, from, 0, false, false, stream, wait);
	for (row = 0; row < c->Height && ret == CUDA_SUCCESS; row++) {
		ret = copy(to, from, c->WidthInBytes, c->dstMemoryType == CU_MEMORYTYPE_DEVICE, c->srcMemoryType == CU_MEMORYTYPE_DEVICE, stream,
			   wait && row + 1 == c->Height);
		from += c->srcPitch ? c->srcPitch : c->WidthInBytes;
		to += c->dstPitch ? c->dstPitch : c->WidthInBytes;
	}
	return ret;
}

EXPORT CUresult cuMemcpy2D_v2(const CUDA_MEMCPY2D *c)
{
	return copy_rows(c, CU_STREAM_LEGACY, true);
}

EXPORT CUresult cuMemcpy2D_v2_ptds(const CUDA_MEMCPY2D *c)
{
	return copy_rows(c, CU_STREAM_PER_THREAD, true);
}

EXPORT CUresult cuMemcpy2DUnaligned_v2(const CUDA_MEMCPY2D *c)
{
	return copy_rows(c, CU_STREAM_LEGACY, true);
}

EXPORT CUresult cuMemcpy2DUnaligned_v2_ptds(const CUDA_MEMCPY2D *c)
{
	return copy_rows(c, CU_STREAM_PER_THREAD, true);
}

EXPORT CUresult cuMemcpy2DAsync_v2(const CUDA_MEMCPY2D *c, CUstream stream)
{
	return copy_rows(c, stream, false);
}

EXPORT CUresult cuMemcpy2DAsync_v2_ptsz(const CUDA_MEMCPY2D *c, CUstream stream)
{
	return copy_rows(c, per_thread(stream), false);
}

/* Addresses are the process's, so a copy between devices is one as any. */
static CUresult copy_between(CUdeviceptr to, CUcontext to_ctx, CUdeviceptr from, CUcontext from_ctx, size_t n, CUstream stream, bool wait)
{
	CUresult ret = enter();

	if (ret != CUDA_SUCCESS)
		return ret;
	if (!context_is(to_ctx) || !context_is(from_ctx))
		ret = CUDA_ERROR_INVALID_CONTEXT;
	else if (!context_alive(to_ctx) || !context_alive(from_ctx))
		ret = CUDA_ERROR_CONTEXT_IS_DESTROYED;
	leave();
	return ret == CUDA_SUCCESS ? copy(to, from, n, true, true, stream, wait) : ret;
}

EXPORT CUresult cuMemcpyPeer(CUdeviceptr to, CUcontext to_ctx, CUdeviceptr from, CUcontext from_ctx, size_t n)
{
	return copy_between(to, to_ctx, from, from_ctx, n, CU_STREAM_LEGACY, true);
}

EXPORT CUresult cuMemcpyPeer_ptds(CUdeviceptr to, CUcontext to_ctx, CUdeviceptr from, CUcontext from_ctx, size_t n)
{
	return copy_between(to, to_ctx, from, from_ctx, n, CU_STREAM_PER_THREAD, true);
}

EXPORT CUresult cuMemcpyPeerAsync(CUdeviceptr to, CUcontext to_ctx, CUdeviceptr from, CUcontext from_ctx, size_t n, CUstream stream)
{
	return copy_between(to, to_ctx, from, from_ctx, n, stream, false);
}

EXPORT CUresult cuMemcpyPeerAsync_ptsz(CUdeviceptr to, CUcontext to_ctx, CUdeviceptr from, CUcontext from_ctx, size_t n, CUstream stream)
{
	return copy_between(to, to_ctx, from, from_ctx, n, per_thread(stream), false);
}

static CUresult fill(CUdeviceptr to, const void *pattern, size_t width, size_t n, CUstream stream)
{
	CUcontext ctx;
	CUresult ret = enter();

	if (ret != CUDA_SUCCESS)
		return ret;
	ret = stream_context(stream, &ctx);
	if (ret == CUDA_SUCCESS && capture_of(stream)) {
		ret = graph_capture_other(capturing(stream), CU_GRAPH_NODE_TYPE_MEMSET);
	} else if (ret == CUDA_SUCCESS) {
		touch_managed((uintptr_t)to, n);
		ret = contents_fill((uintptr_t)to, pattern, width, n);
	}
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

/* ---- launches ------------------------------------------------------------------------ */

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
	if (ret == CUDA_SUCCESS)
		ret = function_resolve(f, ctx, &f);
	if (ret == CUDA_SUCCESS && (blocks == 0 || threads == 0 || threads > 1024))
		ret = CUDA_ERROR_INVALID_VALUE;
	if (ret == CUDA_SUCCESS && capture_of(stream)) {
		ret = graph_capture_other(capturing(stream), CU_GRAPH_NODE_TYPE_KERNEL);
		leave();
		return ret;
	}
	if (ret == CUDA_SUCCESS) {
		req.arg[0] = ctx->handle;
		req.arg[1] = function_time(f);
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
