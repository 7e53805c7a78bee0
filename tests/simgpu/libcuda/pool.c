/* SPDX-License-Identifier: Apache-2.0 */
/*
 * pool.c: stream-ordered allocation.
 *
 * A pool takes device memory in chunks of a multiple of a step and hands out pieces of them.
 * What is free beyond the release threshold goes back when the host next synchronises, chunk
 * by chunk, as far as chunks are free as a whole. The kernel driver sees chunks only.
 *
 * A pool that was imported has no chunks: it knows those of the exporter of which it was given
 * pointers. Pools of host memory take nothing of any GPU.
 */
#include "internal.h"

#include <sys/mman.h>
#include <sys/random.h>

struct piece {
	struct piece *next, *prev; /* by offset, over the whole chunk */
	struct chunk *chunk;
	size_t offset, size;
	bool used;
};

struct chunk {
	struct chunk *next;
	CUmemoryPool pool;
	uint64_t handle;
	uintptr_t start;
	size_t size, used;
	struct piece *pieces;
};

struct CUmemPoolHandle_st {
	struct CUmemPoolHandle_st *next;
	struct device *dev;
	struct chunk *chunks;
	cuuint64_t reserved, reserved_high, used, used_high, threshold;
	size_t max_size; /* 0: as large as the device */
	int reuse[3];
	bool destroyed;  /* goes with its last piece */
	bool imported;
	CUmemPoolProps props;
	cuuint64_t number; /* by which exported pointers name it; 0: it was not exported */
	struct foreign *foreign;
};

/* A chunk of another process's pool. */
struct foreign {
	struct foreign *next;
	CUmemoryPool pool;
	uint64_t token, handle;
	uintptr_t start;
	size_t size;
	unsigned int pieces;
};

/* ---- pools ------------------------------------------------------------------------- */

static CUmemoryPool new_pool(struct device *dev, const CUmemPoolProps *props)
{
	CUmemoryPool pool = calloc(1, sizeof(*pool));

	if (!pool)
		return NULL;
	pool->dev = dev;
	pool->props = *props;
	pool->max_size = props->maxSize;
	pool->reuse[0] = pool->reuse[1] = pool->reuse[2] = 1;
	pool->next = dev->pools;
	dev->pools = pool;
	return pool;
}

static CUmemoryPool default_pool(struct device *dev)
{
	CUmemPoolProps props = {.allocType = CU_MEM_ALLOCATION_TYPE_PINNED, .location = {.type = CU_MEM_LOCATION_TYPE_DEVICE}};

	props.location.id = dev->ordinal;
	if (!dev->default_pool)
		dev->default_pool = new_pool(dev, &props);
	return dev->default_pool;
}

static bool pool_is(CUmemoryPool pool)
{
	CUmemoryPool p;
	int i;

	for (i = 0; i < device_count; i++)
		for (p = devices[i].pools; p; p = p->next)
			if (p == pool && !p->destroyed)
				return true;
	return false;
}

static void drop_chunk(struct chunk **at)
{
	struct chunk *c = *at;
	struct piece *p, *next;

	*at = c->next;
	if (c->handle)
		give_memory(c->pool->dev, c->handle);
	unmap_device(c->start, c->size);
	c->pool->reserved -= c->size;
	for (p = c->pieces; p; p = next) {
		next = p->next;
		free(p);
	}
	free(c);
}

/* Gives back chunks that are wholly free while the pool holds more than `keep` bytes. */
static void trim(CUmemoryPool pool, cuuint64_t keep)
{
	struct chunk **at = &pool->chunks;

	while (*at && pool->reserved > keep) {
		if ((*at)->used == 0)
			drop_chunk(at);
		else
			at = &(*at)->next;
	}
}

static void drop_pool(CUmemoryPool pool)
{
	CUmemoryPool *at;

	trim(pool, 0);
	for (at = &pool->dev->pools; *at != pool; at = &(*at)->next)
		;
	*at = pool->next;
	free(pool);
}

void pools_settle(struct device *dev)
{
	CUmemoryPool pool;

	for (pool = dev->pools; pool; pool = pool->next)
		trim(pool, pool->threshold);
}

/* The last context on the device went: so do the pools' pieces, with whatever is in use. */
void pools_drop(struct device *dev)
{
	CUmemoryPool pool;
	struct piece *p;

	for (pool = dev->pools; pool; pool = pool->next) {
		while (pool->chunks) {
			for (p = pool->chunks->pieces; p; p = p->next)
				if (p->used)
					range_remove(range_at(pool->chunks->start + p->offset));
			drop_chunk(&pool->chunks);
		}
		pool->used = 0; /* what was imported stays: it is somebody else's */
	}
}

/* ---- pieces ------------------------------------------------------------------------ */

static struct piece *best_fit(CUmemoryPool pool, size_t size)
{
	struct piece *p, *best = NULL;
	struct chunk *c;

	for (c = pool->chunks; c; c = c->next)
		for (p = c->pieces; p; p = p->next)
			if (!p->used && p->size >= size && (!best || p->size < best->size))
				best = p;
	return best;
}

static bool host_memory(CUmemoryPool pool)
{
	return pool->props.location.type != CU_MEM_LOCATION_TYPE_DEVICE && pool->props.allocType == CU_MEM_ALLOCATION_TYPE_PINNED;
}

/* Takes `size` bytes for a pool from wherever its memory is. */
static CUresult take_chunk(CUmemoryPool pool, size_t size, uint64_t *handle)
{
	struct simgpu_req req = {.op = SIMGPU_OP_ALLOC, .arg = {0, size, SIMGPU_KIND_PHYSICAL}};
	struct simgpu_req move = {.op = SIMGPU_OP_MIGRATE};
	struct simgpu_rep rep;
	CUresult ret;

	*handle = 0;
	if (host_memory(pool))
		return CUDA_SUCCESS;
	if (pool->props.allocType == CU_MEM_ALLOCATION_TYPE_MANAGED)
		req.arg[2] = SIMGPU_KIND_MANAGED;
	ret = call(pool->dev, &req, &rep);
	if (ret != CUDA_SUCCESS)
		return ret;
	*handle = rep.val[0];
	if (pool->props.allocType == CU_MEM_ALLOCATION_TYPE_MANAGED && pool->props.location.type != CU_MEM_LOCATION_TYPE_DEVICE) {
		move.arg[0] = *handle;
		ret = call(pool->dev, &move, &rep); /* it lives on the host until somebody prefetches it */
	}
	return ret;
}

static CUresult grow(CUmemoryPool pool, size_t size)
{
	struct chunk *c = calloc(1, sizeof(*c));
	struct piece *p = calloc(1, sizeof(*p));
	CUmemoryPool other;
	uint64_t handle = 0;
	size_t step;
	CUresult ret = CUDA_SUCCESS;

	settings(pool->dev, &step, NULL);
	size = (size + step - 1) / step * step;
	if (!c || !p || (pool->max_size && pool->reserved + size > pool->max_size))
		ret = CUDA_ERROR_OUT_OF_MEMORY;
	if (ret == CUDA_SUCCESS)
		ret = take_chunk(pool, size, &handle);
	if (ret == CUDA_ERROR_OUT_OF_MEMORY && c && p) {
		/* What pools keep for later helps now. */
		for (other = pool->dev->pools; other; other = other->next)
			trim(other, 0);
		if (!pool->max_size || pool->reserved + size <= pool->max_size)
			ret = take_chunk(pool, size, &handle);
	}
	if (ret == CUDA_SUCCESS) {
		c->start = (uintptr_t)map_device(size, false);
		if (c->start && (host_memory(pool) || pool->props.allocType == CU_MEM_ALLOCATION_TYPE_MANAGED) &&
		    mprotect((void *)c->start, size, PROT_READ | PROT_WRITE) < 0) {
			unmap_device(c->start, size);
			c->start = 0;
		}
		if (c->start == 0) {
			if (handle)
				give_memory(pool->dev, handle);
			ret = CUDA_ERROR_OUT_OF_MEMORY;
		}
	}
	if (ret != CUDA_SUCCESS) {
		free(c);
		free(p);
		return ret;
	}
	c->handle = handle;
	p->chunk = c;
	p->size = c->size = size;
	c->pieces = p;
	c->pool = pool;
	c->next = pool->chunks;
	pool->chunks = c;
	pool->reserved += size;
	if (pool->reserved > pool->reserved_high)
		pool->reserved_high = pool->reserved;
	return CUDA_SUCCESS;
}

static CUresult pool_free(struct range *r);

static CUresult take_piece(CUmemoryPool pool, size_t asked, CUdeviceptr *out)
{
	size_t size = (asked + SIMGPU_ALIGN_BYTES - 1) / SIMGPU_ALIGN_BYTES * SIMGPU_ALIGN_BYTES;
	struct piece *p, *rest = NULL;
	struct range *r;
	CUresult ret;

	if (asked > SIZE_MAX / 2)
		return CUDA_ERROR_OUT_OF_MEMORY;
	p = best_fit(pool, size);
	if (!p) {
		ret = grow(pool, size);
		if (ret != CUDA_SUCCESS)
			return ret;
		p = best_fit(pool, size);
	}
	if (p->size > size) {
		rest = calloc(1, sizeof(*rest));
		if (!rest)
			return CUDA_ERROR_OUT_OF_MEMORY;
	}
	r = range_add(p->chunk->start + p->offset, asked, RANGE_POOL);
	if (!r) {
		free(rest);
		return CUDA_ERROR_OUT_OF_MEMORY;
	}
	if (rest) {
		rest->chunk = p->chunk;
		rest->offset = p->offset + size;
		rest->size = p->size - size;
		rest->prev = p;
		rest->next = p->next;
		if (p->next)
			p->next->prev = rest;
		p->next = rest;
		p->size = size;
	}
	p->used = true;
	p->chunk->used += size;
	pool->used += size;
	if (pool->used > pool->used_high)
		pool->used_high = pool->used;
	r->dev = pool->dev;
	r->piece = p;
	r->direct = host_memory(pool) || pool->props.allocType == CU_MEM_ALLOCATION_TYPE_MANAGED;
	r->release = pool_free;
	*out = r->start;
	return CUDA_SUCCESS;
}

static void join_next(struct piece *p)
{
	struct piece *n = p->next;

	p->size += n->size;
	p->next = n->next;
	if (n->next)
		n->next->prev = p;
	free(n);
}

static CUresult pool_free(struct range *r)
{
	struct piece *p = r->piece;
	CUmemoryPool pool = p->chunk->pool;

	range_remove(r);
	p->used = false;
	p->chunk->used -= p->size;
	pool->used -= p->size;
	if (p->next && !p->next->used)
		join_next(p);
	if (p->prev && !p->prev->used)
		join_next(p->prev);
	if (pool->destroyed && pool->used == 0)
		drop_pool(pool);
	return CUDA_SUCCESS;
}

static CUresult allocate(CUdeviceptr *dptr, size_t size, CUmemoryPool pool, CUstream stream)
{
	CUcontext ctx;
	CUgraph graph;
	CUresult ret = enter();

	if (ret != CUDA_SUCCESS)
		return ret;
	ret = stream_context(stream, &ctx);
	if (ret == CUDA_SUCCESS && (!dptr || size == 0 || (pool && (!pool_is(pool) || pool->imported))))
		ret = CUDA_ERROR_INVALID_VALUE;
	graph = ret == CUDA_SUCCESS ? capturing(stream) : NULL;
	if (ret == CUDA_SUCCESS && graph) {
		/* A node of the graph: the pool lends its properties only. */
		ret = graph_capture_alloc(graph, pool ? pool->dev : ctx->dev, size, dptr);
	} else if (ret == CUDA_SUCCESS) {
		if (!pool)
			pool = ctx->dev->current_pool ? ctx->dev->current_pool : default_pool(ctx->dev);
		ret = pool ? take_piece(pool, size, dptr) : CUDA_ERROR_OUT_OF_MEMORY;
	}
	leave();
	return ret;
}

EXPORT CUresult cuMemAllocAsync(CUdeviceptr *dptr, size_t size, CUstream stream)
{
	return allocate(dptr, size, NULL, stream);
}

EXPORT CUresult cuMemAllocAsync_ptsz(CUdeviceptr *dptr, size_t size, CUstream stream)
{
	return allocate(dptr, size, NULL, per_thread(stream));
}

EXPORT CUresult cuMemAllocFromPoolAsync(CUdeviceptr *dptr, size_t size, CUmemoryPool pool, CUstream stream)
{
	return pool ? allocate(dptr, size, pool, stream) : CUDA_ERROR_INVALID_VALUE;
}

EXPORT CUresult cuMemAllocFromPoolAsync_ptsz(CUdeviceptr *dptr, size_t size, CUmemoryPool pool, CUstream stream)
{
	return cuMemAllocFromPoolAsync(dptr, size, pool, per_thread(stream));
}

/* Frees memory of any kind in stream order, which is at once: no work here uses memory. */
EXPORT CUresult cuMemFreeAsync(CUdeviceptr dptr, CUstream stream)
{
	struct range *r;
	CUcontext ctx;
	CUgraph graph;
	CUresult ret;

	if (dptr == 0)
		return CUDA_ERROR_INVALID_VALUE;
	ret = enter();
	if (ret != CUDA_SUCCESS)
		return ret;
	ret = stream_context(stream, &ctx);
	graph = ret == CUDA_SUCCESS ? capturing(stream) : NULL;
	if (graph) {
		ret = graph_capture_free(graph, dptr);
		leave();
		return ret;
	}
	r = range_at((uintptr_t)dptr);
	if (ret == CUDA_SUCCESS && r && r->release) {
		ret = r->release(r);
		leave();
		return ret;
	}
	leave();
	return ret != CUDA_SUCCESS ? ret : free_device(dptr);
}

EXPORT CUresult cuMemFreeAsync_ptsz(CUdeviceptr dptr, CUstream stream)
{
	return cuMemFreeAsync(dptr, per_thread(stream));
}

/* ---- the pools' own interface ------------------------------------------------------- */

static CUresult check_props(const CUmemPoolProps *props, struct device **dev)
{
	bool managed;

	if (!props || (props->allocType != CU_MEM_ALLOCATION_TYPE_PINNED && props->allocType != CU_MEM_ALLOCATION_TYPE_MANAGED))
		return CUDA_ERROR_INVALID_VALUE;
	managed = props->allocType == CU_MEM_ALLOCATION_TYPE_MANAGED;
	if ((unsigned int)props->handleTypes > 1 || (managed && props->handleTypes != 0))
		return CUDA_ERROR_NOT_SUPPORTED;
	*dev = &devices[0];
	switch (props->location.type) {
	case CU_MEM_LOCATION_TYPE_DEVICE:
		*dev = device_at(props->location.id);
		return *dev ? CUDA_SUCCESS : CUDA_ERROR_INVALID_DEVICE;
	case CU_MEM_LOCATION_TYPE_HOST:
		return props->handleTypes == 0 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
	case CU_MEM_LOCATION_TYPE_HOST_NUMA:
		return CUDA_SUCCESS;
	case CU_MEM_LOCATION_TYPE_HOST_NUMA_CURRENT:
		return CUDA_ERROR_INVALID_VALUE;
	case SIM_LOCATION_INVALID: /* "none": managed memory without a preference */
		return managed ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
	default:
		return CUDA_ERROR_NOT_SUPPORTED;
	}
}

EXPORT CUresult cuMemPoolCreate(CUmemoryPool *pool, const CUmemPoolProps *props)
{
	struct device *dev;
	CUresult ret = enter();

	if (ret != CUDA_SUCCESS)
		return ret;
	ret = pool ? check_props(props, &dev) : CUDA_ERROR_INVALID_VALUE;
	if (ret == CUDA_SUCCESS) {
		*pool = new_pool(dev, props);
		if (!*pool)
			ret = CUDA_ERROR_OUT_OF_MEMORY;
	}
	leave();
	return ret;
}

static CUresult enter_pool(CUmemoryPool pool)
{
	CUresult ret = enter();

	if (ret == CUDA_SUCCESS && !pool_is(pool)) {
		ret = CUDA_ERROR_INVALID_VALUE;
		leave();
	}
	return ret;
}

EXPORT CUresult cuMemPoolTrimTo(CUmemoryPool pool, size_t keep)
{
	CUresult ret = enter_pool(pool);

	if (ret != CUDA_SUCCESS)
		return ret;
	trim(pool, keep);
	leave();
	return CUDA_SUCCESS;
}

EXPORT CUresult cuMemPoolGetAttribute(CUmemoryPool pool, CUmemPool_attribute attribute, void *value)
{
	CUresult ret = enter_pool(pool);

	if (ret != CUDA_SUCCESS)
		return ret;
	if (!value) {
		leave();
		return CUDA_ERROR_INVALID_VALUE;
	}
	switch ((unsigned int)attribute) {
	case CU_MEMPOOL_ATTR_REUSE_FOLLOW_EVENT_DEPENDENCIES:
	case CU_MEMPOOL_ATTR_REUSE_ALLOW_OPPORTUNISTIC:
	case CU_MEMPOOL_ATTR_REUSE_ALLOW_INTERNAL_DEPENDENCIES:
		*(int *)value = pool->reuse[attribute - 1];
		break;
	case CU_MEMPOOL_ATTR_RELEASE_THRESHOLD:
		*(cuuint64_t *)value = pool->threshold;
		break;
	case CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT:
		*(cuuint64_t *)value = pool->reserved;
		break;
	case CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH:
		*(cuuint64_t *)value = pool->reserved_high;
		break;
	case CU_MEMPOOL_ATTR_USED_MEM_CURRENT:
		*(cuuint64_t *)value = pool->used;
		break;
	case CU_MEMPOOL_ATTR_USED_MEM_HIGH:
		*(cuuint64_t *)value = pool->used_high;
		break;
	case SIM_POOL_ATTR_ALLOCATION_TYPE:
		*(int *)value = (int)pool->props.allocType;
		break;
	case SIM_POOL_ATTR_ALLOCATION_TYPE + 1:
		*(int *)value = (int)pool->props.handleTypes;
		break;
	case SIM_POOL_ATTR_ALLOCATION_TYPE + 2:
		*(int *)value = pool->props.location.id;
		break;
	case SIM_POOL_ATTR_ALLOCATION_TYPE + 3:
		*(int *)value = (int)pool->props.location.type;
		break;
	case SIM_POOL_ATTR_ALLOCATION_TYPE + 4:
		*(cuuint64_t *)value = pool->max_size;
		break;
	default:
		ret = CUDA_ERROR_INVALID_VALUE;
	}
	leave();
	return ret;
}

EXPORT CUresult cuMemPoolSetAttribute(CUmemoryPool pool, CUmemPool_attribute attribute, void *value)
{
	CUresult ret = enter_pool(pool);

	if (ret != CUDA_SUCCESS)
		return ret;
	if (!value) {
		leave();
		return CUDA_ERROR_INVALID_VALUE;
	}
	switch ((unsigned int)attribute) {
	case CU_MEMPOOL_ATTR_REUSE_FOLLOW_EVENT_DEPENDENCIES:
	case CU_MEMPOOL_ATTR_REUSE_ALLOW_OPPORTUNISTIC:
	case CU_MEMPOOL_ATTR_REUSE_ALLOW_INTERNAL_DEPENDENCIES:
		pool->reuse[attribute - 1] = *(int *)value;
		break;
	case CU_MEMPOOL_ATTR_RELEASE_THRESHOLD:
		pool->threshold = *(cuuint64_t *)value;
		break;
	case CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH: /* the high marks can be reset, no more */
	case CU_MEMPOOL_ATTR_USED_MEM_HIGH:
		if (*(cuuint64_t *)value != 0)
			ret = CUDA_ERROR_INVALID_VALUE;
		else if ((unsigned int)attribute == CU_MEMPOOL_ATTR_USED_MEM_HIGH)
			pool->used_high = pool->used;
		else
			pool->reserved_high = pool->reserved;
		break;
	default:
		ret = CUDA_ERROR_INVALID_VALUE;
	}
	leave();
	return ret;
}

EXPORT CUresult cuMemPoolSetAccess(CUmemoryPool pool, const CUmemAccessDesc *map, size_t count)
{
	CUresult ret = enter_pool(pool);
	size_t i;

	if (ret != CUDA_SUCCESS)
		return ret;
	if (!map || count == 0)
		ret = CUDA_ERROR_INVALID_VALUE;
	for (i = 0; ret == CUDA_SUCCESS && i < count; i++)
		if (map[i].location.type != CU_MEM_LOCATION_TYPE_DEVICE || map[i].location.id != pool->dev->ordinal ||
		    map[i].flags != CU_MEM_ACCESS_FLAGS_PROT_READWRITE)
			ret = CUDA_ERROR_INVALID_VALUE; /* no peers here, and the owner cannot be shut out */
	leave();
	return ret;
}

EXPORT CUresult cuMemPoolGetAccess(CUmemAccess_flags *flags, CUmemoryPool pool, CUmemLocation *location)
{
	CUresult ret = enter_pool(pool);

	if (ret != CUDA_SUCCESS)
		return ret;
	if (!flags || !location)
		ret = CUDA_ERROR_INVALID_VALUE;
	else if (location->type == CU_MEM_LOCATION_TYPE_DEVICE && location->id == pool->dev->ordinal)
		*flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
	else
		*flags = CU_MEM_ACCESS_FLAGS_PROT_NONE;
	leave();
	return ret;
}

static CUresult device_pool(CUmemoryPool *pool, CUdevice dev, bool current)
{
	struct device *d;
	CUresult ret = enter();

	if (ret != CUDA_SUCCESS)
		return ret;
	d = device_at(dev);
	if (!pool) {
		ret = CUDA_ERROR_INVALID_VALUE;
	} else if (!d) {
		ret = CUDA_ERROR_INVALID_DEVICE;
	} else {
		*pool = current && d->current_pool ? d->current_pool : default_pool(d);
		if (!*pool)
			ret = CUDA_ERROR_OUT_OF_MEMORY;
	}
	leave();
	return ret;
}

EXPORT CUresult cuDeviceGetDefaultMemPool(CUmemoryPool *pool, CUdevice dev)
{
	return device_pool(pool, dev, false);
}

EXPORT CUresult cuDeviceGetMemPool(CUmemoryPool *pool, CUdevice dev)
{
	return device_pool(pool, dev, true);
}

EXPORT CUresult cuDeviceSetMemPool(CUdevice dev, CUmemoryPool pool)
{
	CUresult ret = enter_pool(pool);

	if (ret != CUDA_SUCCESS)
		return ret;
	if (!device_at(dev))
		ret = CUDA_ERROR_INVALID_DEVICE;
	else if (pool->dev->ordinal != dev || pool->imported || host_memory(pool) ||
		 pool->props.allocType != CU_MEM_ALLOCATION_TYPE_PINNED)
		ret = CUDA_ERROR_INVALID_VALUE;
	else
		pool->dev->current_pool = pool;
	leave();
	return ret;
}

/* ---- by location (CUDA 13) ------------------------------------------------------------ */

#define LOCATIONS (SIMGPU_GPUS_MAX + 1) /* the GPUs, and the host */

/* Those of pinned device memory are the devices' own. */
static CUmemoryPool default_at[2][LOCATIONS], current_at[2][LOCATIONS];

static CUresult slot(const CUmemLocation *location, CUmemAllocationType type, size_t *i, struct device **dev)
{
	CUmemPoolProps props = {.allocType = type};
	CUresult ret;

	if (!location)
		return CUDA_ERROR_INVALID_VALUE;
	props.location = *location;
	ret = check_props(&props, dev);
	if (ret == CUDA_SUCCESS)
		*i = location->type == CU_MEM_LOCATION_TYPE_DEVICE ? (size_t)location->id : LOCATIONS - 1;
	return ret;
}

static CUresult pool_at(CUmemoryPool *pool, const CUmemLocation *location, CUmemAllocationType type, bool current)
{
	bool managed = type == CU_MEM_ALLOCATION_TYPE_MANAGED;
	CUmemPoolProps props = {.allocType = type};
	struct device *dev;
	size_t i;
	CUresult ret = enter();

	if (ret != CUDA_SUCCESS)
		return ret;
	ret = pool ? slot(location, type, &i, &dev) : CUDA_ERROR_INVALID_VALUE;
	if (ret == CUDA_SUCCESS && !managed && i < LOCATIONS - 1) {
		*pool = current && dev->current_pool ? dev->current_pool : default_pool(dev);
	} else if (ret == CUDA_SUCCESS) {
		props.location = *location;
		if (!default_at[managed][i])
			default_at[managed][i] = new_pool(dev, &props);
		*pool = current && current_at[managed][i] ? current_at[managed][i] : default_at[managed][i];
	}
	if (ret == CUDA_SUCCESS && !*pool)
		ret = CUDA_ERROR_OUT_OF_MEMORY;
	leave();
	return ret;
}

EXPORT CUresult cuMemGetDefaultMemPool(CUmemoryPool *pool, CUmemLocation *location, CUmemAllocationType type)
{
	return pool_at(pool, location, type, false);
}

EXPORT CUresult cuMemGetMemPool(CUmemoryPool *pool, CUmemLocation *location, CUmemAllocationType type)
{
	return pool_at(pool, location, type, true);
}

EXPORT CUresult cuMemSetMemPool(CUmemLocation *location, CUmemAllocationType type, CUmemoryPool pool)
{
	bool managed = type == CU_MEM_ALLOCATION_TYPE_MANAGED;
	struct device *dev;
	size_t i;
	CUresult ret = enter_pool(pool);

	if (ret != CUDA_SUCCESS)
		return ret;
	ret = slot(location, type, &i, &dev);
	if (ret == CUDA_SUCCESS && (pool->imported || pool->props.allocType != type || pool->props.location.type != location->type ||
				    pool->dev != dev))
		ret = CUDA_ERROR_INVALID_VALUE;
	if (ret == CUDA_SUCCESS && !managed && i < LOCATIONS - 1)
		dev->current_pool = pool;
	else if (ret == CUDA_SUCCESS)
		current_at[managed][i] = pool;
	leave();
	return ret;
}

static bool is_default_pool(CUmemoryPool pool)
{
	size_t i;

	for (i = 0; i < LOCATIONS; i++)
		if (pool == default_at[0][i] || pool == default_at[1][i])
			return true;
	return pool == pool->dev->default_pool;
}

static void forget_current(CUmemoryPool pool)
{
	size_t i;

	if (pool->dev->current_pool == pool)
		pool->dev->current_pool = NULL;
	for (i = 0; i < LOCATIONS; i++) {
		if (current_at[0][i] == pool)
			current_at[0][i] = NULL;
		if (current_at[1][i] == pool)
			current_at[1][i] = NULL;
	}
}

EXPORT CUresult cuMemPoolDestroy(CUmemoryPool pool)
{
	CUresult ret = enter_pool(pool);

	if (ret != CUDA_SUCCESS)
		return ret;
	if (is_default_pool(pool)) {
		ret = CUDA_ERROR_INVALID_VALUE;
	} else {
		forget_current(pool);
		pool->destroyed = true;
		if (pool->used == 0 && !pool->foreign)
			drop_pool(pool);
	}
	leave();
	return ret;
}

/* ---- in other processes --------------------------------------------------------------- */

#define POINTER_MAGIC UINT64_C(0x31727470706d6953)

/* What the 64 bytes of an exported pointer are here. */
struct pointer {
	uint64_t magic, pool, token, offset, size, reserved[3];
};
_Static_assert(sizeof(struct pointer) == sizeof(CUmemPoolPtrExportData), "as large as the interface's");

EXPORT CUresult cuMemPoolExportToShareableHandle(void *out, CUmemoryPool pool, CUmemAllocationHandleType type, unsigned long long flags)
{
	cuuint64_t number = 0;
	CUresult ret = enter_pool(pool);
	int fd;

	if (ret != CUDA_SUCCESS)
		return ret;
	if (!out || flags != 0 || pool->imported || type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR ||
	    pool->props.handleTypes != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR)
		ret = CUDA_ERROR_INVALID_VALUE;
	while (ret == CUDA_SUCCESS && pool->number == 0 && number == 0) {
		/* Short only before the kernel's pool is ready, long before any program. */
		if (getrandom(&number, sizeof(number), 0) != sizeof(number))
			number = (cuuint64_t)now_ns();
		pool->number = number;
	}
	if (ret == CUDA_SUCCESS)
		ret = export_memory(pool->dev, 0, pool->number, NULL, &fd);
	if (ret == CUDA_SUCCESS)
		*(int *)out = fd;
	leave();
	return ret;
}

EXPORT CUresult cuMemPoolImportFromShareableHandle(CUmemoryPool *pool, void *handle, CUmemAllocationHandleType type, unsigned long long flags)
{
	CUmemPoolProps props = {.allocType = CU_MEM_ALLOCATION_TYPE_PINNED, .handleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR};
	uint64_t given = 0, number = 0;
	struct device *dev;
	size_t size;
	CUresult ret = enter();

	if (ret != CUDA_SUCCESS)
		return ret;
	if (!pool || flags != 0 || type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR)
		ret = CUDA_ERROR_INVALID_VALUE;
	else
		ret = import_descriptor((int)(intptr_t)handle, &dev, &given, &size, &number);
	if (ret == CUDA_SUCCESS && (given != 0 || number == 0)) {
		if (given != 0)
			give_memory(dev, given); /* it stands for memory, not for a pool */
		ret = CUDA_ERROR_INVALID_VALUE;
	}
	if (ret == CUDA_SUCCESS) {
		props.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
		props.location.id = dev->ordinal;
		*pool = new_pool(dev, &props);
		if (*pool) {
			(*pool)->imported = true;
			(*pool)->number = number;
		} else {
			ret = CUDA_ERROR_OUT_OF_MEMORY;
		}
	}
	leave();
	return ret;
}

EXPORT CUresult cuMemPoolExportPointer(CUmemPoolPtrExportData *out, CUdeviceptr ptr)
{
	struct pointer data = {.magic = POINTER_MAGIC};
	struct range *r;
	CUresult ret = enter();

	if (ret != CUDA_SUCCESS)
		return ret;
	r = range_at((uintptr_t)ptr);
	if (!out || !r || r->kind != RANGE_POOL || r->piece->chunk->pool->number == 0)
		ret = CUDA_ERROR_INVALID_VALUE;
	else
		ret = export_memory(r->dev, r->piece->chunk->handle, 0, &data.token, NULL);
	if (ret == CUDA_SUCCESS) {
		data.pool = r->piece->chunk->pool->number;
		data.offset = r->piece->offset;
		data.size = r->end - r->start;
		memcpy(out, &data, sizeof(data));
	}
	leave();
	return ret;
}

static void foreign_drop(struct foreign *f)
{
	struct foreign **at;

	for (at = &f->pool->foreign; *at != f; at = &(*at)->next)
		;
	*at = f->next;
	give_memory(f->pool->dev, f->handle);
	unmap_device(f->start, f->size);
	free(f);
}

static CUresult foreign_free(struct range *r)
{
	struct foreign *f = r->owner;
	CUmemoryPool pool = f->pool;

	range_remove(r);
	if (--f->pieces > 0)
		return CUDA_SUCCESS;
	foreign_drop(f);
	if (pool->destroyed && !pool->foreign)
		drop_pool(pool);
	return CUDA_SUCCESS;
}

static CUresult foreign_chunk(CUmemoryPool pool, uint64_t token, struct foreign **out)
{
	struct foreign *f;
	CUresult ret;

	for (f = pool->foreign; f; f = f->next) {
		if (f->token == token) {
			*out = f;
			return CUDA_SUCCESS;
		}
	}
	f = calloc(1, sizeof(*f));
	if (!f)
		return CUDA_ERROR_OUT_OF_MEMORY;
	ret = import_token(pool->dev, token, NULL, &f->handle, &f->size);
	if (ret == CUDA_SUCCESS) {
		f->start = (uintptr_t)map_device(f->size, false);
		if (f->start == 0) {
			give_memory(pool->dev, f->handle);
			ret = CUDA_ERROR_OUT_OF_MEMORY;
		}
	}
	if (ret != CUDA_SUCCESS) {
		free(f);
		return ret;
	}
	f->pool = pool;
	f->token = token;
	f->next = pool->foreign;
	pool->foreign = f;
	*out = f;
	return CUDA_SUCCESS;
}

EXPORT CUresult cuMemPoolImportPointer(CUdeviceptr *out, CUmemoryPool pool, CUmemPoolPtrExportData *shared)
{
	struct foreign *f = NULL;
	struct range *r = NULL;
	struct pointer data;
	CUresult ret = enter_pool(pool);

	if (ret != CUDA_SUCCESS)
		return ret;
	if (shared)
		memcpy(&data, shared, sizeof(data));
	if (!out || !shared || !pool->imported || data.magic != POINTER_MAGIC || data.pool != pool->number)
		ret = CUDA_ERROR_INVALID_VALUE;
	else
		ret = foreign_chunk(pool, data.token, &f);
	if (ret == CUDA_SUCCESS) {
		if (data.offset <= f->size && data.size <= f->size - data.offset)
			r = range_add(f->start + data.offset, data.size, RANGE_SHARED);
		if (r) {
			r->dev = pool->dev;
			r->release = foreign_free;
			r->owner = f;
			f->pieces++;
			*out = r->start;
		} else {
			ret = CUDA_ERROR_INVALID_VALUE; /* imported already, or it never was a piece */
		}
	}
	if (f && f->pieces == 0)
		foreign_drop(f);
	leave();
	return ret;
}
