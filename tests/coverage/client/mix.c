/* SPDX-License-Identifier: Apache-2.0 */
/*
 * mix: takes device memory in every way that keeps some for later, in any order and out of several
 * threads, at a limit. Driven line by line, answering in JSON lines:
 *
 *   context                   a context of its own, current in every thread
 *   mix SEED CALLS THREADS    that many calls of each thread, then all is given back
 *
 * "granted_bytes" is what was given in all, "refused" how often nothing was; another result is "why".
 */
#include "../../clients/src/report.h"
#include "rows.h"

#include <pthread.h>

#define STREAMS 3
#define HELD 96
#define GRAPHS 4
#define ARRAYS 8

enum kind { NOTHING, POOLED, LINEAR };

struct mixer {
	pthread_t thread;
	uint64_t random, granted, refused;
	unsigned int calls;
	CUstream streams[STREAMS];
	CUmemoryPool own;
	struct {
		enum kind kind;
		CUdeviceptr at;
	} held[HELD];
	CUarray arrays[ARRAYS];
	struct {
		CUgraph graph;
		CUgraphExec exec;
		CUdeviceptr left; /* allocated by a launch, and not freed by the graph */
		bool live;
	} graphs[GRAPHS];
	char failure[160];
};

static uint64_t below(struct mixer *m, uint64_t n)
{
	m->random = m->random * UINT64_C(6364136223846793005) + 1442695040888963407;
	return (m->random >> 33) % n;
}

static size_t some_bytes(struct mixer *m)
{
	static const size_t most[] = { 64 << 10, 1 << 20, 4 << 20, 24 << 20, 96 << 20 };
	return 1 + below(m, most[below(m, sizeof(most) / sizeof(most[0]))]);
}

/* Whether it was given. Refused is fine, anything else is not. */
static bool given(struct mixer *m, CUresult r, size_t bytes, const char *what)
{
	if (r == CUDA_SUCCESS)
		m->granted += bytes;
	else if (r == CUDA_ERROR_OUT_OF_MEMORY)
		m->refused++;
	else
		must(r, what);
	return r == CUDA_SUCCESS;
}

static CUstream some_stream(struct mixer *m) { return m->streams[below(m, STREAMS)]; }

static void take_block(struct mixer *m, size_t i)
{
	size_t bytes = some_bytes(m);
	CUdeviceptr p = 0;
	CUresult r;
	enum kind kind = POOLED;
	switch (below(m, 5)) {
	case 0:
		r = ASK(cuMemAllocAsync, (CUdeviceptr *, size_t, CUstream), &p, bytes, some_stream(m));
		break;
	case 1:
		r = ASK(cuMemAllocAsync_ptsz, (CUdeviceptr *, size_t, CUstream), &p, bytes, some_stream(m));
		break;
	case 2:
		r = ASK(cuMemAllocFromPoolAsync, (CUdeviceptr *, size_t, CUmemoryPool, CUstream), &p, bytes, m->own, some_stream(m));
		break;
	case 3:
		r = ASK(cuMemAllocFromPoolAsync_ptsz, (CUdeviceptr *, size_t, CUmemoryPool, CUstream), &p, bytes, m->own, some_stream(m));
		break;
	default:
		r = ASK(cuMemAlloc_v2, (CUdeviceptr *, size_t), &p, bytes);
		kind = LINEAR;
	}
	if (given(m, r, bytes, "take"))
		m->held[i].kind = kind, m->held[i].at = p;
}

/* Each kind by each function that frees. */
static void give_block(struct mixer *m, size_t i)
{
	switch (below(m, 3)) {
	case 0:
		CALL(cuMemFree_v2, (CUdeviceptr), m->held[i].at);
		break;
	case 1:
		CALL(cuMemFreeAsync, (CUdeviceptr, CUstream), m->held[i].at, some_stream(m));
		break;
	default:
		CALL(cuMemFreeAsync_ptsz, (CUdeviceptr, CUstream), m->held[i].at, some_stream(m));
	}
	m->held[i].kind = NOTHING;
}

static void new_pool(struct mixer *m)
{
	CUmemPoolProps props = { .allocType = CU_MEM_ALLOCATION_TYPE_PINNED, .location = { CU_MEM_LOCATION_TYPE_DEVICE, device } };
	cuuint64_t keep = below(m, 2) * (below(m, 256) << 20);
	CALL(cuMemPoolCreate, (CUmemoryPool *, const CUmemPoolProps *), &m->own, &props);
	CALL(cuMemPoolSetAttribute, (CUmemoryPool, CUmemPool_attribute, void *), m->own, CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, &keep);
}

/* Pieces of the old one live on. */
static void change_pool(struct mixer *m)
{
	CALL(cuMemPoolDestroy, (CUmemoryPool), m->own);
	new_pool(m);
}

static void trim_pool(struct mixer *m)
{
	CUmemoryPool p = m->own;
	if (below(m, 2) == 0)
		CALL(cuDeviceGetDefaultMemPool, (CUmemoryPool *, CUdevice), &p, device);
	CALL(cuMemPoolTrimTo, (CUmemoryPool, size_t), p, below(m, 64) << 20);
}

static void flip_array(struct mixer *m)
{
	CUarray *a = &m->arrays[below(m, ARRAYS)];
	/* Of more than 1 MiB: how the driver packs smaller ones cannot be seen. */
	CUDA_ARRAY_DESCRIPTOR d = { .Width = 1024 + below(m, 1024), .Height = 512 + below(m, 2048), .Format = 0x20, .NumChannels = 1 };
	if (*a) {
		CALL(cuArrayDestroy, (CUarray), *a);
		*a = NULL;
	} else if (!given(m, ASK(cuArrayCreate_v2, (CUarray *, const CUDA_ARRAY_DESCRIPTOR *), a, &d), d.Width * d.Height * 4, "array")) {
		*a = NULL;
	}
}

static void free_left(struct mixer *m, size_t i)
{
	if (m->graphs[i].live)
		CALL(cuMemFreeAsync, (CUdeviceptr, CUstream), m->graphs[i].left, some_stream(m));
	m->graphs[i].live = false;
}

static void drop_mixed_graph(struct mixer *m, size_t i)
{
	if (m->graphs[i].exec)
		CALL(cuGraphExecDestroy, (CUgraphExec), m->graphs[i].exec);
	if (m->graphs[i].graph)
		CALL(cuGraphDestroy, (CUgraph), m->graphs[i].graph);
	free_left(m, i);
	m->graphs[i].exec = NULL;
	m->graphs[i].graph = NULL;
}

/* Up to 4 allocations, of which it frees some, and leaves one if so wanted. */
static void new_graph(struct mixer *m, size_t i)
{
	CUgraphNode node, last = NULL;
	CUgraph g;
	size_t n = 1 + below(m, 4);
	bool leave = below(m, 3) == 0;
	CALL(cuGraphCreate, (CUgraph *, unsigned int), &g, 0);
	m->graphs[i].graph = g;
	m->graphs[i].left = 0;
	for (size_t k = 0; k < n; k++) {
		CUDA_MEM_ALLOC_NODE_PARAMS p;
		memset(&p, 0, sizeof(p));
		p.poolProps.allocType = CU_MEM_ALLOCATION_TYPE_PINNED;
		p.poolProps.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
		p.poolProps.location.id = device;
		p.bytesize = some_bytes(m);
		CALL(cuGraphAddMemAllocNode, (CUgraphNode *, CUgraph, const CUgraphNode *, size_t, CUDA_MEM_ALLOC_NODE_PARAMS *), &node, g,
		     last ? &last : NULL, last ? 1 : 0, &p);
		last = node;
		if (leave && k == n - 1) {
			m->graphs[i].left = p.dptr;
			break;
		}
		CALL(cuGraphAddMemFreeNode, (CUgraphNode *, CUgraph, const CUgraphNode *, size_t, CUdeviceptr), &node, g, &last, 1, p.dptr);
		last = node;
	}
	CUresult r = ASK(cuGraphInstantiateWithFlags, (CUgraphExec *, CUgraph, unsigned long long), &m->graphs[i].exec, g,
			 below(m, 2) ? CUDA_GRAPH_INSTANTIATE_FLAG_UPLOAD : 0);
	if (!given(m, r, 0, "instantiate")) {
		m->graphs[i].exec = NULL;
		drop_mixed_graph(m, i);
	}
}

static void launch_graph(struct mixer *m, size_t i)
{
	free_left(m, i); /* else it may not be launched again */
	CUresult r = below(m, 2) ? ASK(cuGraphLaunch, (CUgraphExec, CUstream), m->graphs[i].exec, some_stream(m)) :
				   ASK(cuGraphLaunch_ptsz, (CUgraphExec, CUstream), m->graphs[i].exec, some_stream(m));
	m->graphs[i].live = given(m, r, 0, "launch") && m->graphs[i].left != 0;
}

static void some_graph(struct mixer *m)
{
	size_t i = below(m, GRAPHS);
	if (!m->graphs[i].graph)
		new_graph(m, i);
	else if (below(m, 4) == 0)
		drop_mixed_graph(m, i);
	else
		launch_graph(m, i);
}

static void one_call(struct mixer *m)
{
	size_t i = below(m, HELD);
	switch (below(m, 16)) {
	case 0:
		CALL(cuStreamSynchronize, (CUstream), some_stream(m));
		break;
	case 1:
		trim_pool(m);
		break;
	case 2:
		if (below(m, 8) == 0)
			change_pool(m);
		break;
	case 3:
		flip_array(m);
		break;
	case 4:
	case 5:
		some_graph(m);
		break;
	case 6:
		if (below(m, 4) == 0)
			CALL(cuDeviceGraphMemTrim, (CUdevice), device);
		break;
	default:
		if (m->held[i].kind == NOTHING)
			take_block(m, i);
		else
			give_block(m, i);
	}
}

static void *mix_thread(void *arg)
{
	struct mixer *m = arg;
	failure[0] = 0;
	CALL(cuCtxSetCurrent, (CUcontext), context);
	for (size_t i = 1; i < STREAMS; i++)
		CALL(cuStreamCreate, (CUstream *, unsigned int), &m->streams[i], 1);
	new_pool(m);
	for (unsigned int i = 0; i < m->calls && !failure[0]; i++)
		one_call(m);
	for (size_t i = 0; i < HELD; i++)
		if (m->held[i].kind != NOTHING)
			give_block(m, i);
	for (size_t i = 0; i < GRAPHS; i++)
		drop_mixed_graph(m, i);
	for (size_t i = 0; i < ARRAYS; i++)
		if (m->arrays[i])
			CALL(cuArrayDestroy, (CUarray), m->arrays[i]);
	CALL(cuCtxSynchronize, (void));
	CALL(cuMemPoolDestroy, (CUmemoryPool), m->own);
	for (size_t i = 1; i < STREAMS; i++)
		CALL(cuStreamDestroy_v2, (CUstream), m->streams[i]);
	memcpy(m->failure, failure, sizeof(failure));
	return NULL;
}

static void mix(uint64_t seed, unsigned int calls, unsigned int threads)
{
	struct mixer *all = calloc(threads, sizeof(*all));
	uint64_t granted = 0, refused = 0;
	if (!all)
		exit(1);
	for (unsigned int i = 0; i < threads; i++) {
		all[i].random = seed * 1000 + i;
		all[i].calls = calls;
		if (pthread_create(&all[i].thread, NULL, mix_thread, &all[i]) != 0)
			exit(1);
	}
	failure[0] = 0;
	for (unsigned int i = 0; i < threads; i++) {
		pthread_join(all[i].thread, NULL);
		granted += all[i].granted;
		refused += all[i].refused;
		if (!failure[0])
			memcpy(failure, all[i].failure, sizeof(failure));
	}
	free(all);
	/* What is still kept goes back. */
	trim_default();
	CALL(cuDeviceGraphMemTrim, (CUdevice), device);
	struct report r;
	report_begin(&r, "mix", !failure[0]);
	report_u64(&r, "granted_bytes", granted);
	report_u64(&r, "refused", refused);
	if (failure[0])
		report_string(&r, "why", failure);
	report_end(&r);
}

int main(void)
{
	char line[128];
	cuda_library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
	if (!cuda_library) {
		fprintf(stderr, "mix: %s\n", dlerror());
		return 1;
	}
	while (fgets(line, sizeof(line), stdin)) {
		struct report r;
		unsigned long long seed;
		unsigned int calls, threads;
		line[strcspn(line, "\n")] = 0;
		failure[0] = 0;
		if (strcmp(line, "context") == 0) {
			CALL(cuInit, (unsigned int), 0);
			CALL(cuDeviceGet, (CUdevice *, int), &device, 0);
			CALL(cuCtxCreate_v2, (CUcontext *, unsigned int, CUdevice), &context, 0, device);
			report_begin(&r, "context", !failure[0]);
			report_end(&r);
		} else if (sscanf(line, "mix %llu %u %u", &seed, &calls, &threads) == 3) {
			mix(seed, calls, threads);
		} else {
			report_begin(&r, line, false);
			report_string(&r, "why", "no such command");
			report_end(&r);
		}
	}
	return 0;
}
