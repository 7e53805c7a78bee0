/* SPDX-License-Identifier: Apache-2.0 */
/*
 * hooks_graph.c: graphs that allocate. A device keeps memory for its graphs (kept.h); a launch, or
 * an upload, takes there what the graph's nodes need, and leaves it there for the next. What that
 * is is read from the graph when it is instantiated, however its nodes came into it.
 */
#include "charge.h"
#include "device.h"
#include "graph_plan.h"
#include "kept.h"
#include "pages.h"
#include "real.h"
#include "stream.h"

#define EXECS 1024u
#define LOCK_NS UINT64_C(1000000000)

/* An instance that allocates. */
struct exec {
	uint64_t handle; /* 0: free. Also read without the lock. */
	bool resident;   /* it has run, and... */
	uint64_t shrunk[PLAN_DEVICES]; /* ...nothing was given back since */
	struct plan plan;
};

static struct memory {
	uint64_t lock;
	uint64_t high;  /* no place at or above was ever used; with 0 no instance allocates */
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

static bool may_allocate(struct memory *m)
{
	return m != NULL && (word_load_acquire(&m->high) != 0 || word_load_acquire(&m->lost) != 0);
}

static void remember(CUgraphExec exec, const struct plan *plan, bool resident)
{
	struct memory *m = memory();
	if (m == NULL || plan->devices == 0 || !pages_lock(&m->lock, LOCK_NS))
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
		e->resident = resident;
		for (unsigned i = 0; i < plan->devices; i++)
			e->shrunk[i] = kept_shrunk(kept_graph(plan->on[i].device));
		if ((uint64_t)(e - m->execs) >= m->high)
			word_store(&m->high, (uint64_t)(e - m->execs) + 1);
	}
	pages_unlock(&m->lock);
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

/* What an instance needs; empty if it allocates nothing. resident: nothing more than it has. */
static bool recall(CUgraphExec exec, struct plan *plan, bool *resident)
{
	struct memory *m = memory();
	plan->devices = 0;
	if (!may_allocate(m) || !pages_lock(&m->lock, LOCK_NS))
		return false;
	const struct exec *e = exec == NULL ? NULL : find(m, (uint64_t)(uintptr_t)exec);
	if (e != NULL) {
		*plan = e->plan;
		*resident = e->resident;
		for (unsigned i = 0; *resident && i < plan->devices; i++)
			*resident = e->shrunk[i] == kept_shrunk(kept_graph(plan->on[i].device));
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

/* False: refused, and counted. */
static bool take(struct taking *t, const char *call, bool resident)
{
	for (unsigned i = 0; i < t->plan.devices; i++) {
		uint64_t bytes = resident ? 0 : t->plan.on[i].bytes;
		if (kept_begin(&t->calls[i], kept_graph(t->plan.on[i].device), bytes))
			continue;
		charge_refused(t->calls[i].gpu, call, bytes);
		taken(t, i);
		return false;
	}
	return true;
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
		if (kept_begin(&c, kept_graph(d), 0))
			(void)kept_end(&c);
}

#define TAKES(symbol, exec, ...)                                             \
	do {                                                                 \
		fn_##symbol *real = REAL(symbol);                            \
		struct taking t;                                             \
		bool resident = false;                                       \
		if (real == NULL)                                            \
			return CUDA_ERROR_NOT_SUPPORTED;                     \
		if (!recall(exec, &t.plan, &resident)) {                     \
			CUresult alone = real(__VA_ARGS__);                  \
			settle_all();                                        \
			return alone;                                        \
		}                                                            \
		if (!take(&t, #symbol, resident))                            \
			return CUDA_ERROR_OUT_OF_MEMORY;                     \
		CUresult result = end(&t, real(__VA_ARGS__));                \
		if (result == CUDA_SUCCESS && !resident)                     \
			remember(exec, &t.plan, true);                       \
		return result;                                               \
	} while (0)

CUresult hook_cuGraphLaunch(CUgraphExec exec, CUstream stream) { TAKES(cuGraphLaunch, exec, exec, stream); }
EXPORT(cuGraphLaunch);

CUresult hook_cuGraphLaunch_ptsz(CUgraphExec exec, CUstream stream) { TAKES(cuGraphLaunch_ptsz, exec, exec, stream); }
EXPORT(cuGraphLaunch_ptsz);

CUresult hook_cuGraphUpload(CUgraphExec exec, CUstream stream) { TAKES(cuGraphUpload, exec, exec, stream); }
EXPORT(cuGraphUpload);

CUresult hook_cuGraphUpload_ptsz(CUgraphExec exec, CUstream stream) { TAKES(cuGraphUpload_ptsz, exec, exec, stream); }
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
				remember(*exec, &t.plan, false);             \
			return result;                                       \
		}                                                            \
		if (!take(&t, #symbol, false))                               \
			return CUDA_ERROR_OUT_OF_MEMORY;                     \
		CUresult result = end(&t, real(__VA_ARGS__));                \
		if (result == CUDA_SUCCESS)                                  \
			remember(*exec, &t.plan, true);                      \
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
	bool resident;
	if (real == NULL)
		return CUDA_ERROR_NOT_SUPPORTED;
	bool known = recall(exec, &plan, &resident);
	if (known)
		forget(exec);
	CUresult result = real(exec);
	if (known && result != CUDA_SUCCESS)
		remember(exec, &plan, resident);
	return result;
}
EXPORT(cuGraphExecDestroy);

CUresult hook_cuDeviceGraphMemTrim(CUdevice device)
{
	fn_cuDeviceGraphMemTrim *real = REAL(cuDeviceGraphMemTrim);
	struct kept_call c;
	if (real == NULL)
		return CUDA_ERROR_NOT_SUPPORTED;
	(void)kept_begin(&c, kept_graph(device), 0); /* without growth nothing is refused */
	CUresult result = real(device);
	(void)kept_end(&c);
	return result;
}
EXPORT(cuDeviceGraphMemTrim);
