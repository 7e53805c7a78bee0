/* SPDX-License-Identifier: Apache-2.0 */
/*
 * hooks_graph.c: graphs that allocate. A device keeps memory for its graphs (kept.h); a launch, or
 * an upload, takes there what the graph's nodes need, and leaves it there for the next. What that
 * is is read from the graph when it is instantiated, however its nodes came into it.
 */
#include "charge.h"
#include "device.h"
#include "graph_plan.h"
#include "high.h"
#include "kept.h"
#include "pages.h"
#include "real.h"
#include "stream.h"

#define EXECS 1024u
#define LOCK_NS UINT64_C(1000000000)

/* How often, on each device of a plan, memory was given back, or kept by a graph that leaves some
 * allocated. */
struct mark {
	uint64_t shrunk[PLAN_DEVICES], left[PLAN_DEVICES];
};

/* An instance that allocates. */
struct exec {
	uint64_t handle; /* 0: free. Also read without the lock. */
	bool resident;   /* it has run, and what it needs is there, unless that has changed: */
	struct mark mark;
	struct plan plan;
};

static struct memory {
	uint64_t lock;
	uint64_t high;  /* no place at or above was ever used; with 0 no instance allocates */
	uint64_t left[DEVICES]; /* launches that left memory allocated */
	uint64_t lost;  /* instances for which there was no place */
	struct exec execs[EXECS];
} *memory(void)
{
	static struct pages_wiped wiped;
	return pages_wiped(&wiped, sizeof(struct memory));
}

/* With the lock. */
static struct exec *find(struct memory *m, uint64_t handle)
{
	for (uint64_t i = 0; i < m->high; i++)
		if (m->execs[i].handle == handle)
			return &m->execs[i];
	return NULL;
}

/* With the lock. */
static uint64_t *left_on(struct memory *m, CUdevice device)
{
	static uint64_t nowhere;
	return device >= 0 && device < DEVICES ? &m->left[device] : &nowhere;
}

static bool may_allocate(struct memory *m)
{
	return m != NULL && (word_load_acquire(&m->high) != 0 || word_load_acquire(&m->lost) != 0);
}

/* With the lock. */
static struct mark mark_now(struct memory *m, const struct plan *plan)
{
	struct mark now = { { 0 }, { 0 } };
	for (unsigned i = 0; i < plan->devices; i++) {
		now.shrunk[i] = kept_shrunk(kept_graph(plan->on[i].device));
		now.left[i] = *left_on(m, plan->on[i].device);
	}
	return now;
}

static bool same(const struct mark *a, const struct mark *b)
{
	for (unsigned i = 0; i < PLAN_DEVICES; i++)
		if (a->shrunk[i] != b->shrunk[i] || a->left[i] != b->left[i])
			return false;
	return true;
}

static void forget(CUgraphExec exec)
{
	struct memory *m = memory();
	if (!may_allocate(m) || !pages_lock(&m->lock, LOCK_NS))
		return;
	struct exec *e = find(m, (uint64_t)(uintptr_t)exec);
	if (e != NULL)
		e->handle = 0;
	pages_unlock(&m->lock);
}

/* mark: from before it took its memory; NULL: it has not yet. */
static void remember(CUgraphExec exec, const struct plan *plan, const struct mark *mark)
{
	struct memory *m = memory();
	/* What had this handle before, and went on a way that we did not see, may have allocated. */
	if (plan->devices == 0) {
		forget(exec);
		return;
	}
	if (m == NULL || !pages_lock(&m->lock, LOCK_NS))
		return;
	struct exec *e = find(m, (uint64_t)(uintptr_t)exec);
	for (uint64_t i = 0; e == NULL && i < EXECS; i++)
		if (m->execs[i].handle == 0)
			e = &m->execs[i];
	if (e == NULL) {
		word_store(&m->lost, m->lost + 1);
	} else {
		e->handle = (uint64_t)(uintptr_t)exec;
		e->plan = *plan;
		e->resident = mark != NULL;
		if (mark != NULL)
			e->mark = *mark;
		if ((uint64_t)(e - m->execs) >= m->high)
			word_store(&m->high, (uint64_t)(e - m->execs) + 1);
	}
	pages_unlock(&m->lock);
}

/* What an instance needs; empty if it allocates nothing. resident: nothing more than it has. */
static bool recall(CUgraphExec exec, struct plan *plan, bool *resident, struct mark *mark)
{
	struct memory *m = memory();
	plan->devices = 0;
	if (!may_allocate(m) || !pages_lock(&m->lock, LOCK_NS))
		return false;
	const struct exec *e = exec == NULL ? NULL : find(m, (uint64_t)(uintptr_t)exec);
	if (e != NULL) {
		*plan = e->plan;
		struct mark now = mark_now(m, plan);
		*resident = e->resident && same(&now, &e->mark);
		if (mark != NULL)
			*mark = e->mark;
	}
	pages_unlock(&m->lock);
	return e != NULL;
}

/* ---- a call that takes what a plan needs ---- */

struct taking {
	struct plan plan;
	struct kept_call calls[PLAN_DEVICES];
};

static void taken(struct taking *t, unsigned n)
{
	/* What went over the limit cannot be taken back: the graph runs. It is charged. */
	for (unsigned i = 0; i < n; i++)
		(void)kept_end(&t->calls[i]);
}

static bool leaves(const struct plan *plan)
{
	for (unsigned i = 0; i < plan->devices; i++)
		if (plan->on[i].leaves)
			return true;
	return false;
}

/* False: what is needed is not there any more; or, if it is not reused, refused and counted. */
static bool take(struct taking *t, const char *call, bool launch, bool reuse)
{
	for (unsigned i = 0; i < t->plan.devices; i++) {
		uint64_t bytes = reuse ? 0 : t->plan.on[i].bytes;
		unsigned use = (launch && t->plan.on[i].leaves ? KEPT_LEAVES : 0) | (reuse ? KEPT_REUSES : 0);
		if (kept_begin_graph(&t->calls[i], kept_graph(t->plan.on[i].device), bytes, use))
			continue;
		if (!reuse)
			charge_refused(t->calls[i].gpu, call, bytes);
		taken(t, i);
		return false;
	}
	return true;
}

/* The same for what may have run before. What it needs may go until the call is under way. */
static bool take_again(struct taking *t, const char *call, CUgraphExec exec, bool launch, bool *resident)
{
	struct plan plan;
	if (*resident && take(t, call, launch, true)) {
		if (recall(exec, &plan, resident, NULL) && *resident)
			return true;
		taken(t, t->plan.devices);
	}
	*resident = false;
	return take(t, call, launch, false);
}

/* The call begins. A launch may keep what others count on. */
static struct mark begun(const struct taking *t, bool launch)
{
	struct memory *m = memory();
	struct mark now = { { 0 }, { 0 } };
	if (m == NULL || !pages_lock(&m->lock, LOCK_NS))
		return now;
	for (unsigned i = 0; launch && i < t->plan.devices; i++)
		if (t->plan.on[i].leaves)
			++*left_on(m, t->plan.on[i].device);
	now = mark_now(m, &t->plan);
	pages_unlock(&m->lock);
	return now;
}

static CUresult end(struct taking *t, CUresult result)
{
	taken(t, t->plan.devices);
	if (result == CUDA_ERROR_OUT_OF_MEMORY && t->plan.devices > 0)
		account_event(t->calls[0].gpu, ACCOUNT_EVENT_DEVICE);
	return result;
}

/* An instance of which we know nothing, but that there are such. */
static void settle_all(void)
{
	struct memory *m = memory();
	struct kept_call c;
	if (m == NULL || word_load_acquire(&m->lost) == 0)
		return;
	for (CUdevice d = 0; d < DEVICES && device_gpu(d) >= 0; d++)
		if (kept_begin_graph(&c, kept_graph(d), 0, 0))
			(void)kept_end(&c);
}

#define TAKES(symbol, launch, exec, ...)                                     \
	do {                                                                 \
		fn_##symbol *real = REAL(symbol);                            \
		struct taking t;                                             \
		bool resident = false;                                       \
		if (real == NULL)                                            \
			return CUDA_ERROR_NOT_SUPPORTED;                     \
		if (!recall(exec, &t.plan, &resident, NULL)) {                     \
			CUresult alone = real(__VA_ARGS__);                  \
			settle_all();                                        \
			return alone;                                        \
		}                                                            \
		if (!take_again(&t, #symbol, exec, launch, &resident))       \
			return CUDA_ERROR_OUT_OF_MEMORY;                     \
		struct mark mark = begun(&t, launch);                        \
		CUresult result = end(&t, real(__VA_ARGS__));                \
		if (result == CUDA_SUCCESS && (!resident || (launch && leaves(&t.plan)))) \
			remember(exec, &t.plan, &mark);                      \
		return result;                                               \
	} while (0)

/* As every launch, it waits above memory.high. Where no graph allocates either, straight through. */
#define GRAPH_LAUNCH(symbol, per_thread)                                                                           \
	__attribute__((noinline)) static CUresult launch_##symbol(CUgraphExec exec, CUstream stream)               \
	{                                                                                                          \
		TAKES(symbol, true, exec, exec, stream);                                                           \
	}                                                                                                          \
	__attribute__((noinline)) static CUresult slow_##symbol(CUgraphExec exec, CUstream stream)                 \
	{                                                                                                          \
		bool calm = account_calm();                                                                        \
		CUresult result = launch_##symbol(exec, stream);                                                   \
		if (!calm && result == CUDA_SUCCESS)                                                               \
			high_launched(stream, per_thread);                                                         \
		return result;                                                                                     \
	}                                                                                                          \
	CUresult hook_##symbol(CUgraphExec exec, CUstream stream)                                                  \
	{                                                                                                          \
		fn_##symbol *real = REAL(symbol);                                                                  \
		return real != NULL && account_calm() && !may_allocate(memory()) ? real(exec, stream) :            \
										   slow_##symbol(exec, stream);    \
	}                                                                                                          \
	EXPORT(symbol)

GRAPH_LAUNCH(cuGraphLaunch, false);
GRAPH_LAUNCH(cuGraphLaunch_ptsz, true);

CUresult hook_cuGraphUpload(CUgraphExec exec, CUstream stream) { TAKES(cuGraphUpload, false, exec, exec, stream); }
EXPORT(cuGraphUpload);

CUresult hook_cuGraphUpload_ptsz(CUgraphExec exec, CUstream stream) { TAKES(cuGraphUpload_ptsz, false, exec, exec, stream); }
EXPORT(cuGraphUpload_ptsz);

/* ---- instances ---- */

/* upload: it takes its memory at once. */
#define INSTANTIATES(symbol, upload, ...)                                    \
	do {                                                                 \
		fn_##symbol *real = REAL(symbol);                            \
		struct taking t;                                             \
		bool at_once = upload;                                       \
		if (real == NULL)                                            \
			return CUDA_ERROR_NOT_SUPPORTED;                     \
		if (exec == NULL)                                            \
			return real(__VA_ARGS__);                            \
		plan_read(graph, &t.plan);                                   \
		if (!at_once || t.plan.devices == 0) {                       \
			CUresult result = real(__VA_ARGS__);                 \
			if (result == CUDA_SUCCESS)                          \
				remember(*exec, &t.plan, NULL);              \
			return result;                                       \
		}                                                            \
		if (!take(&t, #symbol, false, false))                        \
			return CUDA_ERROR_OUT_OF_MEMORY;                     \
		struct mark mark = begun(&t, false);                         \
		CUresult result = end(&t, real(__VA_ARGS__));                \
		if (result == CUDA_SUCCESS)                                  \
			remember(*exec, &t.plan, &mark);                     \
		return result;                                               \
	} while (0)

CUresult hook_cuGraphInstantiate(CUgraphExec *exec, CUgraph graph, CUgraphNode *error, char *log, size_t size)
{
	INSTANTIATES(cuGraphInstantiate, false, exec, graph, error, log, size);
}
EXPORT(cuGraphInstantiate);

CUresult hook_cuGraphInstantiate_v2(CUgraphExec *exec, CUgraph graph, CUgraphNode *error, char *log, size_t size)
{
	INSTANTIATES(cuGraphInstantiate_v2, false, exec, graph, error, log, size);
}
EXPORT(cuGraphInstantiate_v2);

CUresult hook_cuGraphInstantiateWithFlags(CUgraphExec *exec, CUgraph graph, unsigned long long flags)
{
	INSTANTIATES(cuGraphInstantiateWithFlags, (flags & CUDA_GRAPH_INSTANTIATE_FLAG_UPLOAD) != 0, exec, graph, flags);
}
EXPORT(cuGraphInstantiateWithFlags);

static bool uploads(const CUDA_GRAPH_INSTANTIATE_PARAMS *params)
{
	return params != NULL && (params->flags & CUDA_GRAPH_INSTANTIATE_FLAG_UPLOAD) != 0;
}

CUresult hook_cuGraphInstantiateWithParams(CUgraphExec *exec, CUgraph graph, CUDA_GRAPH_INSTANTIATE_PARAMS *params)
{
	INSTANTIATES(cuGraphInstantiateWithParams, uploads(params), exec, graph, params);
}
EXPORT(cuGraphInstantiateWithParams);

CUresult hook_cuGraphInstantiateWithParams_ptsz(CUgraphExec *exec, CUgraph graph, CUDA_GRAPH_INSTANTIATE_PARAMS *params)
{
	INSTANTIATES(cuGraphInstantiateWithParams_ptsz, uploads(params), exec, graph, params);
}
EXPORT(cuGraphInstantiateWithParams_ptsz);

/* Before the driver destroys it: afterwards its handle may be another's. */
CUresult hook_cuGraphExecDestroy(CUgraphExec exec)
{
	fn_cuGraphExecDestroy *real = REAL(cuGraphExecDestroy);
	struct plan plan;
	struct mark mark;
	bool resident;
	if (real == NULL)
		return CUDA_ERROR_NOT_SUPPORTED;
	bool known = recall(exec, &plan, &resident, &mark);
	if (known)
		forget(exec);
	CUresult result = real(exec);
	if (known && result != CUDA_SUCCESS)
		remember(exec, &plan, resident ? &mark : NULL);
	return result;
}
EXPORT(cuGraphExecDestroy);

CUresult hook_cuDeviceGraphMemTrim(CUdevice device)
{
	fn_cuDeviceGraphMemTrim *real = REAL(cuDeviceGraphMemTrim);
	struct kept_call c;
	if (real == NULL)
		return CUDA_ERROR_NOT_SUPPORTED;
	kept_begin_trim(&c, kept_graph(device));
	CUresult result = real(device);
	(void)kept_end(&c);
	return result;
}
EXPORT(cuDeviceGraphMemTrim);
