/* SPDX-License-Identifier: Apache-2.0 */
/*
 * pool.c: stream-ordered allocation.
 *
 * A pool takes device memory in chunks of a multiple of 32 MiB and hands out pieces of them.
 * What is free beyond the release threshold goes back when the host next synchronises, chunk
 * by chunk, as far as chunks are free as a whole. The kernel driver sees chunks only.
 */
#include "internal.h"

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
};

/* ---- pools ------------------------------------------------------------------------- */

static CUmemoryPool new_pool(struct device *dev)
{
	CUmemoryPool pool = calloc(1, sizeof(*pool));

	if (!pool)
		return NULL;
	pool->dev = dev;
	pool->reuse[0] = pool->reuse[1] = pool->reuse[2] = 1;
	pool->next = dev->pools;
	dev->pools = pool;
	return pool;
}

static CUmemoryPool default_pool(struct device *dev)
{
	if (!dev->default_pool)
		dev->default_pool = new_pool(dev);
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
	struct simgpu_req req = {.op = SIMGPU_OP_FREE, .arg = {c->handle}};
	struct simgpu_rep rep;
	struct piece *p, *next;

	*at = c->next;
	/* Nothing to be done about a driver that has gone: its memory went with it. */
	(void)call(c->pool->dev, &req, &rep);
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
		pool->used = 0;
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

static CUresult grow(CUmemoryPool pool, size_t size)
{
	struct simgpu_req req = {.op = SIMGPU_OP_ALLOC};
	struct simgpu_rep rep;
	struct chunk *c = calloc(1, sizeof(*c));
	struct piece *p = calloc(1, sizeof(*p));
	CUmemoryPool other;
	CUresult ret = CUDA_SUCCESS;

	size = (size + SIMGPU_POOL_STEP_BYTES - 1) / SIMGPU_POOL_STEP_BYTES * SIMGPU_POOL_STEP_BYTES;
	if (!c || !p || (pool->max_size && pool->reserved + size > pool->max_size))
		ret = CUDA_ERROR_OUT_OF_MEMORY;
	req.arg[1] = size;
	req.arg[2] = SIMGPU_KIND_PHYSICAL;
	if (ret == CUDA_SUCCESS)
		ret = call(pool->dev, &req, &rep);
	if (ret == CUDA_ERROR_OUT_OF_MEMORY && c && p) {
		/* What pools keep for later helps now. */
		for (other = pool->dev->pools; other; other = other->next)
			trim(other, 0);
		if (!pool->max_size || pool->reserved + size <= pool->max_size)
			ret = call(pool->dev, &req, &rep);
	}
	if (ret == CUDA_SUCCESS) {
		c->start = (uintptr_t)map_device(size, false);
		c->handle = rep.val[0];
		if (c->start == 0) {
			req.op = SIMGPU_OP_FREE;
			req.arg[0] = c->handle;
			(void)call(pool->dev, &req, &rep); /* we report the lack of addresses */
			ret = CUDA_ERROR_OUT_OF_MEMORY;
		}
	}
	if (ret != CUDA_SUCCESS) {
		free(c);
		free(p);
		return ret;
	}
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

CUresult pool_free(struct range *r)
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
	CUresult ret = enter();

	if (ret != CUDA_SUCCESS)
		return ret;
	ret = stream_context(stream, &ctx);
	if (ret == CUDA_SUCCESS && (!dptr || size == 0 || (pool && !pool_is(pool))))
		ret = CUDA_ERROR_INVALID_VALUE;
	if (ret == CUDA_SUCCESS && !pool)
		pool = ctx->dev->current_pool ? ctx->dev->current_pool : default_pool(ctx->dev);
	if (ret == CUDA_SUCCESS)
		ret = pool ? take_piece(pool, size, dptr) : CUDA_ERROR_OUT_OF_MEMORY;
	leave();
	return ret;
}

EXPORT CUresult cuMemAllocAsync(CUdeviceptr *dptr, size_t size, CUstream stream)
{
	return allocate(dptr, size, NULL, stream);
}

EXPORT CUresult cuMemAllocAsync_ptsz(CUdeviceptr *dptr, size_t size, CUstream stream)
{
	return allocate(dptr, size, NULL, stream);
}

EXPORT CUresult cuMemAllocFromPoolAsync(CUdeviceptr *dptr, size_t size, CUmemoryPool pool, CUstream stream)
{
	return pool ? allocate(dptr, size, pool, stream) : CUDA_ERROR_INVALID_VALUE;
}

EXPORT CUresult cuMemAllocFromPoolAsync_ptsz(CUdeviceptr *dptr, size_t size, CUmemoryPool pool, CUstream stream)
{
	return cuMemAllocFromPoolAsync(dptr, size, pool, stream);
}

/* Frees memory of any kind in stream order, which is at once: no work here uses memory. */
EXPORT CUresult cuMemFreeAsync(CUdeviceptr dptr, CUstream stream)
{
	struct range *r;
	CUcontext ctx;
	CUresult ret;

	if (dptr == 0)
		return CUDA_ERROR_INVALID_VALUE;
	ret = enter();
	if (ret != CUDA_SUCCESS)
		return ret;
	ret = stream_context(stream, &ctx);
	r = range_at((uintptr_t)dptr);
	if (ret == CUDA_SUCCESS && r && r->kind == RANGE_POOL) {
		ret = pool_free(r);
		leave();
		return ret;
	}
	leave();
	return ret != CUDA_SUCCESS ? ret : free_device(dptr);
}

EXPORT CUresult cuMemFreeAsync_ptsz(CUdeviceptr dptr, CUstream stream)
{
	return cuMemFreeAsync(dptr, stream);
}

/* ---- the pools' own interface ------------------------------------------------------- */

EXPORT CUresult cuMemPoolCreate(CUmemoryPool *pool, const CUmemPoolProps *props)
{
	CUresult ret = enter();

	if (ret != CUDA_SUCCESS)
		return ret;
	if (!pool || !props || props->allocType != CU_MEM_ALLOCATION_TYPE_PINNED)
		ret = CUDA_ERROR_INVALID_VALUE;
	else if (props->location.type != CU_MEM_LOCATION_TYPE_DEVICE || (unsigned int)props->handleTypes > 1)
		ret = CUDA_ERROR_NOT_SUPPORTED;
	else if (!device_at(props->location.id))
		ret = CUDA_ERROR_INVALID_DEVICE;
	if (ret == CUDA_SUCCESS) {
		*pool = new_pool(device_at(props->location.id));
		if (*pool)
			(*pool)->max_size = props->maxSize;
		else
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

EXPORT CUresult cuMemPoolDestroy(CUmemoryPool pool)
{
	CUresult ret = enter_pool(pool);

	if (ret != CUDA_SUCCESS)
		return ret;
	if (pool == pool->dev->default_pool) {
		ret = CUDA_ERROR_INVALID_VALUE;
	} else {
		if (pool->dev->current_pool == pool)
			pool->dev->current_pool = NULL;
		pool->destroyed = true;
		if (pool->used == 0)
			drop_pool(pool);
	}
	leave();
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
	else if (pool->dev->ordinal != dev)
		ret = CUDA_ERROR_INVALID_VALUE;
	else
		pool->dev->current_pool = pool;
	leave();
	return ret;
}
