/* SPDX-License-Identifier: Apache-2.0 */
/*
 * cuda_kept.c: pools, graphs that allocate, and arrays. A pool takes chunks, puts pieces where they
 * fit first, and gives a chunk back when all of it is free and the host synchronises or asks. A
 * device keeps for its graphs what the largest one needed.
 */
#include "driver.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#define PIECES 8192
#define CHUNKS 1024
#define PIECE_BASE UINT64_C(0x500000000000)
#define CHUNK_SHIFT 34 /* addresses of each */
#define NODES 16
#define MANAGED(pool) ((pool)->props.allocType == CU_MEM_ALLOCATION_TYPE_MANAGED)
/* The device of a location; -1: the host, or none. */
#define PLACE(where)                                                                             \
	((where).type == CU_MEM_LOCATION_TYPE_DEVICE                      ? (where).id :         \
	 (where).type == CU_MEM_LOCATION_TYPE_DEVICE_LOCALITY_DOMAIN ? (where).id & 0xff : -1)
#define ON_HOST(pool) (PLACE((pool)->props.location) < 0 && !MANAGED(pool))

struct CUmemPoolHandle_st {
	CUmemPoolProps props;
	uint64_t reserved;
	int gone, imported;
};

static struct chunk {
	CUmemoryPool pool; /* NULL: none */
	uint64_t bytes, used;
	unsigned int first; /* piece, by address */
} chunks[CHUNKS];

static struct piece {
	uint64_t at, bytes; /* 0: none */
	unsigned int chunk, next;
} pieces[PIECES]; /* from 1 on */

static struct CUmemPoolHandle_st defaults[DEVICES];
static CUmemoryPool chosen[DEVICES];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static _Atomic uint64_t step = UINT64_C(32) << 20;
static _Atomic int captures, old;

API void fake_set_pool_step(uint64_t bytes) { step = bytes; }
API void fake_capture(int on) { captures = on; }
API void fake_before_13(int on) { old = on; }

/* ---- pools ---- */

static void drop_chunk(struct chunk *c)
{
	c->pool->reserved -= c->bytes;
	if (MANAGED(c->pool))
		managed -= c->bytes;
	else if (!ON_HOST(c->pool))
		live -= c->bytes;
	c->pool = NULL;
}

static void trim(CUmemoryPool pool, uint64_t keep)
{
	for (unsigned int i = 0; i < CHUNKS; i++)
		if (chunks[i].pool == pool && chunks[i].used == 0 && pool->reserved > keep)
			drop_chunk(&chunks[i]);
}

static int alive(CUmemoryPool pool)
{
	return pool != NULL && !pool->gone;
}

/* The host has seen all work done. */
API void fake_sync(void)
{
	pthread_mutex_lock(&lock);
	for (unsigned int i = 0; i < CHUNKS; i++)
		if (chunks[i].pool != NULL && chunks[i].used == 0)
			drop_chunk(&chunks[i]);
	pthread_mutex_unlock(&lock);
}

/* The device's memory is lost. */
API void fake_reset_device(void)
{
	pthread_mutex_lock(&lock);
	memset(pieces, 0, sizeof pieces);
	for (unsigned int i = 0; i < CHUNKS; i++) {
		if (chunks[i].pool != NULL)
			drop_chunk(&chunks[i]);
		chunks[i].first = 0;
	}
	pthread_mutex_unlock(&lock);
}

static uint64_t start_of(const struct chunk *c) { return PIECE_BASE + ((uint64_t)(c - chunks) << CHUNK_SHIFT); }

/* False: there is no room. */
static int place(struct chunk *c, uint64_t bytes, CUdeviceptr *pointer)
{
	static unsigned int hint = 1;
	unsigned int *link = &c->first;
	uint64_t at = start_of(c);
	while (*link != 0 && pieces[*link].at - at < bytes) {
		at = pieces[*link].at + pieces[*link].bytes;
		link = &pieces[*link].next;
	}
	if (*link == 0 && start_of(c) + c->bytes - at < bytes)
		return 0;
	for (unsigned int tries = 0; pieces[hint].bytes != 0; hint = hint % (PIECES - 1) + 1)
		if (++tries == PIECES)
			abort();
	pieces[hint] = (struct piece){ at, bytes, (unsigned int)(c - chunks), *link };
	*link = hint;
	c->used += bytes;
	*pointer = at;
	return 1;
}

static CUmemoryPool default_pool(CUdevice device)
{
	defaults[device].props = (CUmemPoolProps){ .allocType = 1, .location = { CU_MEM_LOCATION_TYPE_DEVICE, device } };
	return &defaults[device];
}

static CUresult allocate(CUdeviceptr *pointer, size_t bytes, CUmemoryPool pool)
{
	uint64_t size = (bytes + 511) / 512 * 512, takes = (size + step - 1) / step * step;
	if (current == NULL)
		return CUDA_ERROR_INVALID_CONTEXT;
	if (pointer == NULL || bytes == 0 || bytes > FAKE_TOTAL)
		return CUDA_ERROR_INVALID_VALUE;
	if (captures) {
		*pointer = 0x123456000; /* what a graph's nodes have */
		return CUDA_SUCCESS;
	}
	if (pool == NULL)
		pool = chosen[current->device] != NULL ? chosen[current->device] : default_pool(current->device);
	if (!alive(pool) || pool->imported)
		return CUDA_ERROR_INVALID_VALUE;
	for (unsigned int i = 0; i < CHUNKS; i++)
		if (chunks[i].pool == pool && place(&chunks[i], size, pointer))
			return CUDA_SUCCESS;
	if (!MANAGED(pool) && !ON_HOST(pool) && !take_bytes(takes))
		return CUDA_ERROR_OUT_OF_MEMORY;
	managed += MANAGED(pool) ? takes : 0;
	for (unsigned int i = 0; i < CHUNKS; i++) {
		if (chunks[i].pool != NULL)
			continue;
		chunks[i] = (struct chunk){ pool, takes, 0, 0 };
		pool->reserved += takes;
		place(&chunks[i], size, pointer);
		return CUDA_SUCCESS;
	}
	abort();
}

static CUresult locked(CUresult result)
{
	pthread_mutex_unlock(&lock);
	return result;
}

#define POOLED(pool)                                                  \
	do {                                                          \
		ENTER();                                              \
		(void)stream;                                         \
		pthread_mutex_lock(&lock);                            \
		return locked(allocate(pointer, bytes, pool));        \
	} while (0)
CUresult cuMemAllocAsync(CUdeviceptr *pointer, size_t bytes, CUstream stream) { POOLED(NULL); }
CUresult cuMemAllocAsync_ptsz(CUdeviceptr *pointer, size_t bytes, CUstream stream) { POOLED(NULL); }
static CUresult from(CUdeviceptr *pointer, size_t bytes, CUmemoryPool pool)
{
	if (pool == NULL)
		return CUDA_ERROR_INVALID_VALUE;
	pthread_mutex_lock(&lock);
	return locked(allocate(pointer, bytes, pool));
}
CUresult cuMemAllocFromPoolAsync(CUdeviceptr *pointer, size_t bytes, CUmemoryPool pool, CUstream stream)
{
	ENTER();
	(void)stream;
	return from(pointer, bytes, pool);
}
CUresult cuMemAllocFromPoolAsync_ptsz(CUdeviceptr *pointer, size_t bytes, CUmemoryPool pool, CUstream stream)
{
	ENTER();
	(void)stream;
	return from(pointer, bytes, pool);
}

int release_piece(uint64_t pointer)
{
	if (pointer < PIECE_BASE || pointer >= PIECE_BASE + ((uint64_t)CHUNKS << CHUNK_SHIFT))
		return -1;
	pthread_mutex_lock(&lock);
	struct chunk *c = &chunks[(pointer - PIECE_BASE) >> CHUNK_SHIFT];
	for (unsigned int *link = &c->first; *link != 0; link = &pieces[*link].next) {
		struct piece *p = &pieces[*link];
		if (p->at != pointer)
			continue;
		*link = p->next;
		c->used -= p->bytes;
		p->bytes = 0;
		if (c->used == 0 && c->pool->gone)
			drop_chunk(c);
		return locked(CUDA_SUCCESS);
	}
	return locked(CUDA_ERROR_INVALID_VALUE);
}

CUresult cuMemFreeAsync(CUdeviceptr pointer, CUstream stream)
{
	ENTER();
	(void)stream;
	CUresult result = pointer == 0 ? CUDA_ERROR_INVALID_VALUE : release_pointer(pointer);
	stop(&records[number(__func__)], FAKE_AFTER);
	return result;
}
CUresult cuMemFreeAsync_ptsz(CUdeviceptr pointer, CUstream stream)
{
	ENTER();
	(void)stream;
	return pointer == 0 ? CUDA_ERROR_INVALID_VALUE : release_pointer(pointer);
}

CUresult cuMemPoolCreate(CUmemoryPool *pool, const CUmemPoolProps *props)
{
	ENTER();
	if (pool == NULL || props == NULL)
		return CUDA_ERROR_INVALID_VALUE;
	*pool = calloc(1, sizeof **pool); /* never freed: a handle stays tellable */
	(*pool)->props = *props;
	return CUDA_SUCCESS;
}

CUresult cuMemPoolDestroy(CUmemoryPool pool)
{
	ENTER();
	pthread_mutex_lock(&lock);
	if (!alive(pool) || (pool >= defaults && pool < defaults + DEVICES))
		return locked(CUDA_ERROR_INVALID_VALUE);
	trim(pool, 0);
	pool->gone = 1;
	return locked(CUDA_SUCCESS);
}

CUresult cuMemPoolTrimTo(CUmemoryPool pool, size_t keep)
{
	ENTER();
	pthread_mutex_lock(&lock);
	if (!alive(pool))
		return locked(CUDA_ERROR_INVALID_VALUE);
	trim(pool, keep);
	return locked(CUDA_SUCCESS);
}

CUresult cuMemPoolImportFromShareableHandle(CUmemoryPool *pool, void *handle, int type, unsigned long long flags)
{
	ENTER();
	(void)handle, (void)type, (void)flags;
	if (pool == NULL)
		return CUDA_ERROR_INVALID_VALUE;
	*pool = calloc(1, sizeof **pool);
	(*pool)->imported = 1;
	(*pool)->reserved = UINT64_C(1) << 30; /* its exporter's */
	return CUDA_SUCCESS;
}

/* ---- what is not hooked ---- */

API fn_cuMemPoolGetAttribute cuMemPoolGetAttribute;
CUresult cuMemPoolGetAttribute(CUmemoryPool pool, int attribute, void *value)
{
	ENTER();
	pthread_mutex_lock(&lock);
	if (!alive(pool))
		abort(); /* the real one may do worse with a handle that is gone */
	if (attribute == CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT)
		*(uint64_t *)value = pool->reserved;
	else if (old)
		return locked(CUDA_ERROR_INVALID_VALUE);
	else if (attribute == CU_MEMPOOL_ATTR_ALLOCATION_TYPE)
		*(int *)value = pool->props.allocType;
	else if (attribute == CU_MEMPOOL_ATTR_LOCATION_TYPE)
		*(int *)value = pool->props.location.type;
	else
		*(int *)value = pool->props.location.id;
	return locked(CUDA_SUCCESS);
}

static CUresult device_pool(CUmemoryPool *pool, CUdevice device, int choice)
{
	if (device < 0 || device >= DEVICES)
		return CUDA_ERROR_INVALID_DEVICE;
	pthread_mutex_lock(&lock);
	*pool = choice && chosen[device] != NULL ? chosen[device] : default_pool(device);
	return locked(CUDA_SUCCESS);
}
API fn_cuDeviceGetMemPool cuDeviceGetMemPool;
CUresult cuDeviceGetMemPool(CUmemoryPool *pool, CUdevice device) { return device_pool(pool, device, 1); }
API fn_cuDeviceGetDefaultMemPool cuDeviceGetDefaultMemPool;
CUresult cuDeviceGetDefaultMemPool(CUmemoryPool *pool, CUdevice device) { return device_pool(pool, device, 0); }
API CUresult cuDeviceSetMemPool(CUdevice device, CUmemoryPool pool);
CUresult cuDeviceSetMemPool(CUdevice device, CUmemoryPool pool)
{
	chosen[device] = pool;
	return CUDA_SUCCESS;
}

API fn_cuStreamIsCapturing cuStreamIsCapturing;
CUresult cuStreamIsCapturing(CUstream stream, int *status)
{
	ENTER();
	(void)stream;
	*status = captures;
	return CUDA_SUCCESS;
}
API fn_cuStreamIsCapturing_ptsz cuStreamIsCapturing_ptsz;
CUresult cuStreamIsCapturing_ptsz(CUstream stream, int *status)
{
	ENTER();
	(void)stream;
	*status = captures;
	return CUDA_SUCCESS;
}

/* A stream here is its context. */
API fn_cuStreamGetCtx cuStreamGetCtx;
CUresult cuStreamGetCtx(CUstream stream, CUcontext *context)
{
	*context = (CUcontext)(void *)stream;
	return CUDA_SUCCESS;
}
static _Thread_local CUcontext pushed;
API fn_cuCtxPushCurrent_v2 cuCtxPushCurrent_v2;
CUresult cuCtxPushCurrent_v2(CUcontext context)
{
	pushed = current;
	current = context;
	return CUDA_SUCCESS;
}
API fn_cuCtxPopCurrent_v2 cuCtxPopCurrent_v2;
CUresult cuCtxPopCurrent_v2(CUcontext *context)
{
	*context = current;
	current = pushed;
	return CUDA_SUCCESS;
}

/* ---- graphs ---- */

struct CUgraphNode_st {
	int type;
	CUDA_MEM_ALLOC_NODE_PARAMS alloc;
	CUdeviceptr freed;
	CUgraph child;
};
struct CUgraph_st {
	struct CUgraphNode_st nodes[NODES];
	size_t count;
};
struct CUgraphExec_st {
	uint64_t needs[DEVICES];
};

static _Atomic uint64_t kept_for_graphs[DEVICES];
static CUdeviceptr next_pointer = 0x600000000000;

static struct CUgraphNode_st *node_of(CUgraph graph, int type, CUgraphNode *out)
{
	if (graph->count == NODES)
		abort();
	*out = &graph->nodes[graph->count++];
	(*out)->type = type;
	return *out;
}

API CUgraph fake_graph(void) { return calloc(1, sizeof(struct CUgraph_st)); }
API CUdeviceptr fake_graph_alloc_at(CUgraph graph, int type, int id, uint64_t bytes)
{
	CUgraphNode node;
	CUDA_MEM_ALLOC_NODE_PARAMS *p = &node_of(graph, CU_GRAPH_NODE_TYPE_MEM_ALLOC, &node)->alloc;
	p->poolProps = (CUmemPoolProps){ .allocType = 1, .location = { type, id } };
	p->bytesize = bytes;
	return p->dptr = next_pointer += UINT64_C(1) << 32;
}
API CUdeviceptr fake_graph_alloc(CUgraph graph, CUdevice device, uint64_t bytes)
{
	return fake_graph_alloc_at(graph, CU_MEM_LOCATION_TYPE_DEVICE, device, bytes);
}
API void fake_graph_free(CUgraph graph, CUdeviceptr pointer)
{
	CUgraphNode node;
	node_of(graph, CU_GRAPH_NODE_TYPE_MEM_FREE, &node)->freed = pointer;
}
API void fake_graph_child(CUgraph graph, CUgraph child)
{
	CUgraphNode node;
	node_of(graph, CU_GRAPH_NODE_TYPE_GRAPH, &node)->child = child;
}

API fn_cuGraphGetNodes cuGraphGetNodes;
CUresult cuGraphGetNodes(CUgraph graph, CUgraphNode *nodes, size_t *count)
{
	ENTER();
	for (size_t i = 0; nodes != NULL && i < *count; i++)
		nodes[i] = i < graph->count ? &graph->nodes[i] : NULL;
	*count = graph->count;
	return CUDA_SUCCESS;
}
API fn_cuGraphNodeGetType cuGraphNodeGetType;
CUresult cuGraphNodeGetType(CUgraphNode node, int *type)
{
	*type = node->type;
	return CUDA_SUCCESS;
}
API fn_cuGraphMemAllocNodeGetParams cuGraphMemAllocNodeGetParams;
CUresult cuGraphMemAllocNodeGetParams(CUgraphNode node, CUDA_MEM_ALLOC_NODE_PARAMS *params)
{
	*params = node->alloc;
	return CUDA_SUCCESS;
}
API fn_cuGraphMemFreeNodeGetParams cuGraphMemFreeNodeGetParams;
CUresult cuGraphMemFreeNodeGetParams(CUgraphNode node, CUdeviceptr *pointer)
{
	*pointer = node->freed;
	return CUDA_SUCCESS;
}
API fn_cuGraphChildGraphNodeGetGraph cuGraphChildGraphNodeGetGraph;
CUresult cuGraphChildGraphNodeGetGraph(CUgraphNode node, CUgraph *graph)
{
	*graph = node->child;
	return CUDA_SUCCESS;
}

/* At most at once: allocations are freed, if at all, in whole. */
static void needs(CUgraph graph, int64_t now[DEVICES], uint64_t most[DEVICES])
{
	for (size_t i = 0; i < graph->count; i++) {
		const struct CUgraphNode_st *n = &graph->nodes[i];
		if (n->child != NULL)
			needs(n->child, now, most);
		for (size_t k = 0; n->freed != 0 && k < i; k++)
			if (graph->nodes[k].alloc.dptr == n->freed && PLACE(graph->nodes[k].alloc.poolProps.location) >= 0)
				now[PLACE(graph->nodes[k].alloc.poolProps.location)] -= (int64_t)whole(graph->nodes[k].alloc.bytesize);
		CUdevice d = PLACE(n->alloc.poolProps.location);
		if (n->alloc.bytesize != 0 && d >= 0) {
			now[d] += (int64_t)whole(n->alloc.bytesize);
			if ((uint64_t)now[d] > most[d])
				most[d] = (uint64_t)now[d];
		}
	}
}

static CUresult keep_for(CUgraphExec exec)
{
	for (CUdevice d = 0; d < DEVICES; d++) {
		if (exec->needs[d] <= kept_for_graphs[d])
			continue;
		if (!take_bytes(exec->needs[d] - kept_for_graphs[d]))
			return CUDA_ERROR_OUT_OF_MEMORY;
		kept_for_graphs[d] = exec->needs[d];
	}
	return CUDA_SUCCESS;
}

/* The handle that is given out next. */
static _Atomic(CUgraphExec) spare;

static CUresult instantiate(CUgraphExec *exec, CUgraph graph, uint64_t flags)
{
	int64_t now[DEVICES] = { 0 };
	if (exec == NULL || graph == NULL)
		return CUDA_ERROR_INVALID_VALUE;
	CUgraphExec e = atomic_exchange(&spare, NULL);
	if (e == NULL)
		e = calloc(1, sizeof *e);
	memset(e, 0, sizeof *e);
	needs(graph, now, e->needs);
	CUresult result = flags & CUDA_GRAPH_INSTANTIATE_FLAG_UPLOAD ? keep_for(e) : CUDA_SUCCESS;
	if (result == CUDA_SUCCESS)
		*exec = e;
	return result;
}
CUresult cuGraphInstantiate(CUgraphExec *exec, CUgraph graph, CUgraphNode *error, char *log, size_t size)
{
	ENTER();
	(void)error, (void)log, (void)size;
	return instantiate(exec, graph, 0);
}
CUresult cuGraphInstantiate_v2(CUgraphExec *exec, CUgraph graph, CUgraphNode *error, char *log, size_t size)
{
	ENTER();
	(void)error, (void)log, (void)size;
	return instantiate(exec, graph, 0);
}
CUresult cuGraphInstantiateWithFlags(CUgraphExec *exec, CUgraph graph, unsigned long long flags)
{
	ENTER();
	return instantiate(exec, graph, flags);
}
CUresult cuGraphInstantiateWithParams(CUgraphExec *exec, CUgraph graph, CUDA_GRAPH_INSTANTIATE_PARAMS *params)
{
	ENTER();
	return params == NULL ? CUDA_ERROR_INVALID_VALUE : instantiate(exec, graph, params->flags);
}
CUresult cuGraphInstantiateWithParams_ptsz(CUgraphExec *exec, CUgraph graph, CUDA_GRAPH_INSTANTIATE_PARAMS *params)
{
	ENTER();
	return params == NULL ? CUDA_ERROR_INVALID_VALUE : instantiate(exec, graph, params->flags);
}
#define RUNS(symbol)                                     \
	CUresult symbol(CUgraphExec exec, CUstream stream) \
	{                                                \
		ENTER();                                 \
		(void)stream;                            \
		return keep_for(exec);                   \
	}
RUNS(cuGraphLaunch)
RUNS(cuGraphLaunch_ptsz)
RUNS(cuGraphUpload)
RUNS(cuGraphUpload_ptsz)
CUresult cuGraphExecDestroy(CUgraphExec exec)
{
	ENTER();
	free(atomic_exchange(&spare, exec));
	return CUDA_SUCCESS;
}
API fn_cuDeviceGetGraphMemAttribute cuDeviceGetGraphMemAttribute;
CUresult cuDeviceGetGraphMemAttribute(CUdevice device, int attribute, void *value)
{
	ENTER();
	if (attribute != CU_GRAPH_MEM_ATTR_RESERVED_MEM_CURRENT)
		abort();
	*(uint64_t *)value = kept_for_graphs[device];
	return CUDA_SUCCESS;
}
CUresult cuDeviceGraphMemTrim(CUdevice device)
{
	ENTER();
	if (device < 0 || device >= DEVICES)
		return CUDA_ERROR_INVALID_DEVICE;
	live -= kept_for_graphs[device];
	kept_for_graphs[device] = 0;
	return CUDA_SUCCESS;
}

/* ---- arrays ---- */

#define ARRAYS 4096
#define BARE UINT64_MAX
struct CUarray_st {
	uint64_t bytes;
	int bare; /* its memory is mapped to it */
	struct CUctx_st *context;
};
static struct CUarray_st arrays[ARRAYS];
static uint64_t small_bytes;

static void array_gone(struct CUarray_st *a)
{
	if (a->bare) {
		a->bare = 0;
	} else if (a->bytes > BLOCK / 2) {
		live -= whole(a->bytes);
	} else {
		live -= whole(small_bytes) - whole(small_bytes - a->bytes);
		small_bytes -= a->bytes;
	}
	a->bytes = 0;
}

static CUresult array(CUarray *out, uint64_t bytes)
{
	CUresult result = CUDA_SUCCESS;
	int bare = bytes == BARE;
	if (current == NULL)
		return CUDA_ERROR_INVALID_CONTEXT;
	if (out == NULL || bytes == 0)
		return CUDA_ERROR_INVALID_VALUE;
	pthread_mutex_lock(&lock);
	struct CUarray_st *a = arrays;
	while (a->bytes != 0)
		if (++a == arrays + ARRAYS)
			abort();
	if (bare) {
		*a = (struct CUarray_st){ 1, 1, keeper() };
		*out = a;
	} else if (!take_bytes(bytes > BLOCK / 2 ? whole(bytes) : whole(small_bytes + bytes) - whole(small_bytes))) {
		result = CUDA_ERROR_OUT_OF_MEMORY;
	} else {
		small_bytes += bytes > BLOCK / 2 ? 0 : bytes;
		*a = (struct CUarray_st){ bytes, 0, keeper() };
		*out = a;
	}
	return locked(result);
}

void release_arrays(const struct CUctx_st *context)
{
	pthread_mutex_lock(&lock);
	for (unsigned int i = 0; i < ARRAYS; i++)
		if (arrays[i].bytes != 0 && arrays[i].context == context)
			array_gone(&arrays[i]);
	pthread_mutex_unlock(&lock);
}

static uint64_t up(uint64_t n, uint64_t to) { return (n + to - 1) / to * to; }

/* Of floats. */
static uint64_t floats(uint64_t w, uint64_t h, uint64_t d, uint64_t channels, unsigned int flags)
{
	if (flags & (CUDA_ARRAY3D_SPARSE | CUDA_ARRAY3D_DEFERRED_MAPPING))
		return BARE;
	return up(up(w * 4 * channels, 64) * (h == 0 ? 1 : up(h, 8)) * (d == 0 ? 1 : d), 65536);
}
CUresult cuArrayCreate(CUarray *out, const CUDA_ARRAY_DESCRIPTOR_v1 *d)
{
	ENTER();
	return d == NULL ? CUDA_ERROR_INVALID_VALUE : array(out, floats(d->Width, d->Height, 0, d->NumChannels, 0));
}
CUresult cuArrayCreate_v2(CUarray *out, const CUDA_ARRAY_DESCRIPTOR *d)
{
	ENTER();
	return d == NULL ? CUDA_ERROR_INVALID_VALUE : array(out, floats(d->Width, d->Height, 0, d->NumChannels, 0));
}
CUresult cuArray3DCreate(CUarray *out, const CUDA_ARRAY3D_DESCRIPTOR_v1 *d)
{
	ENTER();
	return d == NULL ? CUDA_ERROR_INVALID_VALUE : array(out, floats(d->Width, d->Height, d->Depth, d->NumChannels, d->Flags));
}
CUresult cuArray3DCreate_v2(CUarray *out, const CUDA_ARRAY3D_DESCRIPTOR *d)
{
	ENTER();
	return d == NULL ? CUDA_ERROR_INVALID_VALUE : array(out, floats(d->Width, d->Height, d->Depth, d->NumChannels, d->Flags));
}
CUresult cuMipmappedArrayCreate(CUmipmappedArray *out, const CUDA_ARRAY3D_DESCRIPTOR *d, unsigned int levels)
{
	uint64_t bytes = 0;
	ENTER();
	for (unsigned int i = 0; d != NULL && bytes != BARE && i < levels && d->Width >> i != 0; i++)
		bytes = d->Flags & CUDA_ARRAY3D_SPARSE ? BARE : bytes + floats(d->Width >> i, d->Height >> i, 0, d->NumChannels, d->Flags);
	return array((CUarray *)(void *)out, bytes);
}
CUresult cuArrayDestroy(CUarray a)
{
	ENTER();
	if (a == NULL || a->bytes == 0)
		return CUDA_ERROR_INVALID_HANDLE;
	pthread_mutex_lock(&lock);
	array_gone(a);
	return locked(CUDA_SUCCESS);
}
CUresult cuMipmappedArrayDestroy(CUmipmappedArray a)
{
	CUarray same = (CUarray)(void *)a;
	ENTER();
	if (same == NULL || same->bytes == 0)
		return CUDA_ERROR_INVALID_HANDLE;
	pthread_mutex_lock(&lock);
	array_gone(same);
	return locked(CUDA_SUCCESS);
}
