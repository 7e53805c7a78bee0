/* SPDX-License-Identifier: Apache-2.0 */
/*
 * vmm.c: virtual memory management: addresses, physical memory and mappings apart.
 *
 * Physical memory lives until its last handle is released and its last mapping is undone; its
 * contents live as long as the mapping does.
 */
#include "internal.h"

struct physical {
	struct physical *next;
	CUmemGenericAllocationHandle value; /* what the client holds */
	struct device *dev;
	uint64_t handle;                    /* simgpud's */
	size_t size;
	unsigned int refs, maps;
	CUmemAllocationProp prop;
};

struct reservation {
	struct reservation *next;
	uintptr_t start;
	size_t size;
};

#define BUCKETS 1024

static struct physical *handles[BUCKETS];
static CUmemGenericAllocationHandle last_value;
static struct reservation *reservations;

static struct physical **find_handle(CUmemGenericAllocationHandle value)
{
	struct physical **at = &handles[value % BUCKETS];

	while (*at && (*at)->value != value)
		at = &(*at)->next;
	return at;
}

/* Whether [start, start + size) lies in one reservation. */
bool reserved_range(uintptr_t start, size_t size)
{
	struct reservation *r;

	for (r = reservations; r; r = r->next)
		if (start >= r->start && size <= r->size && start - r->start <= r->size - size)
			return true;
	return false;
}

static CUresult check_prop(const CUmemAllocationProp *prop)
{
	if (!prop || prop->type != CU_MEM_ALLOCATION_TYPE_PINNED)
		return CUDA_ERROR_INVALID_VALUE;
	if (prop->location.type != CU_MEM_LOCATION_TYPE_DEVICE)
		return CUDA_ERROR_NOT_SUPPORTED;
	return device_at(prop->location.id) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_DEVICE;
}

EXPORT CUresult cuMemGetAllocationGranularity(size_t *granularity, const CUmemAllocationProp *prop,
					      CUmemAllocationGranularity_flags option)
{
	CUresult ret = enter();

	if (ret != CUDA_SUCCESS)
		return ret;
	ret = granularity && (unsigned int)option <= 1 ? check_prop(prop) : CUDA_ERROR_INVALID_VALUE;
	if (ret == CUDA_SUCCESS)
		*granularity = PAGE;
	leave();
	return ret;
}

EXPORT CUresult cuMemAddressReserve(CUdeviceptr *ptr, size_t size, size_t alignment, CUdeviceptr addr, unsigned long long flags)
{
	struct reservation *r;
	CUresult ret = enter();

	(void)addr; /* a hint that we do not take */
	if (ret != CUDA_SUCCESS)
		return ret;
	if (!ptr || size == 0 || size % PAGE != 0 || (alignment & (alignment - 1)) != 0 || flags != 0) {
		ret = CUDA_ERROR_INVALID_VALUE;
	} else if (alignment > PAGE) {
		ret = CUDA_ERROR_NOT_SUPPORTED;
	} else {
		r = calloc(1, sizeof(*r));
		if (r)
			r->start = (uintptr_t)map_device(size, false);
		if (!r || r->start == 0) {
			free(r);
			ret = CUDA_ERROR_OUT_OF_MEMORY;
		} else {
			r->size = size;
			r->next = reservations;
			reservations = r;
			*ptr = r->start;
		}
	}
	leave();
	return ret;
}

/* Whether anything is mapped in [start, start + size), by looking at every granule. */
static bool mapped_somewhere(uintptr_t start, size_t size)
{
	uintptr_t at;

	for (at = start; at < start + size; at += PAGE)
		if (range_find(at))
			return true;
	return false;
}

EXPORT CUresult cuMemAddressFree(CUdeviceptr ptr, size_t size)
{
	struct reservation **at, *r;
	CUresult ret = enter();

	if (ret != CUDA_SUCCESS)
		return ret;
	for (at = &reservations; (r = *at); at = &r->next)
		if (r->start == (uintptr_t)ptr && r->size == size)
			break;
	if (!r || mapped_somewhere(r->start, r->size)) {
		ret = CUDA_ERROR_INVALID_VALUE;
	} else {
		*at = r->next;
		unmap_device(r->start, r->size);
		free(r);
	}
	leave();
	return ret;
}

EXPORT CUresult cuMemCreate(CUmemGenericAllocationHandle *handle, size_t size, const CUmemAllocationProp *prop,
			    unsigned long long flags)
{
	struct simgpu_req req = {.op = SIMGPU_OP_ALLOC};
	struct simgpu_rep rep;
	struct physical *p;
	CUresult ret = enter();

	if (ret != CUDA_SUCCESS)
		return ret;
	ret = handle && size > 0 && size % PAGE == 0 && flags == 0 ? check_prop(prop) : CUDA_ERROR_INVALID_VALUE;
	p = ret == CUDA_SUCCESS ? calloc(1, sizeof(*p)) : NULL;
	if (ret == CUDA_SUCCESS && !p)
		ret = CUDA_ERROR_OUT_OF_MEMORY;
	if (ret == CUDA_SUCCESS) {
		p->dev = device_at(prop->location.id);
		req.arg[1] = size; /* of no context: it outlives them */
		req.arg[2] = SIMGPU_KIND_PHYSICAL;
		ret = call(p->dev, &req, &rep);
	}
	if (ret == CUDA_SUCCESS) {
		p->handle = rep.val[0];
		p->size = size;
		p->refs = 1;
		p->prop = *prop;
		p->value = ++last_value;
		*find_handle(p->value) = p;
		*handle = p->value;
	} else {
		free(p);
	}
	leave();
	return ret;
}

static CUresult drop_if_unused(struct physical *p)
{
	struct simgpu_req req = {.op = SIMGPU_OP_FREE};
	struct simgpu_rep rep;

	if (p->refs > 0 || p->maps > 0)
		return CUDA_SUCCESS;
	*find_handle(p->value) = p->next;
	req.arg[0] = p->handle;
	/* What frees does not fail for a lost GPU: there is nothing left to do. */
	(void)call(p->dev, &req, &rep);
	free(p);
	return CUDA_SUCCESS;
}

EXPORT CUresult cuMemRelease(CUmemGenericAllocationHandle handle)
{
	struct physical *p;
	CUresult ret = enter();

	if (ret != CUDA_SUCCESS)
		return ret;
	p = *find_handle(handle);
	if (!p || p->refs == 0) {
		ret = CUDA_ERROR_INVALID_VALUE;
	} else {
		p->refs--;
		ret = drop_if_unused(p);
	}
	leave();
	return ret;
}

EXPORT CUresult cuMemMap(CUdeviceptr ptr, size_t size, size_t offset, CUmemGenericAllocationHandle handle, unsigned long long flags)
{
	struct physical *p;
	struct range *r;
	CUresult ret = enter();

	if (ret != CUDA_SUCCESS)
		return ret;
	p = *find_handle(handle);
	if (!p || p->refs == 0 || flags != 0 || size == 0 || size % PAGE != 0 || ptr % PAGE != 0 || offset != 0 || size > p->size ||
	    !reserved_range((uintptr_t)ptr, size) || mapped_somewhere((uintptr_t)ptr, size)) {
		ret = CUDA_ERROR_INVALID_VALUE;
	} else {
		r = range_add((uintptr_t)ptr, size, RANGE_MAPPED);
		if (r) {
			r->dev = p->dev;
			r->phys = p;
			r->handle = p->handle;
			p->maps++;
		} else {
			ret = CUDA_ERROR_OUT_OF_MEMORY;
		}
	}
	leave();
	return ret;
}

/* Whether [start, start + size) is covered by whole mappings and nothing else. */
static bool whole_mappings(uintptr_t start, size_t size)
{
	uintptr_t at = start;
	struct range *r;

	while (at < start + size) {
		r = range_at(at);
		if (!r || r->kind != RANGE_MAPPED || r->end > start + size)
			return false;
		at = r->end;
	}
	return size > 0;
}

EXPORT CUresult cuMemUnmap(CUdeviceptr ptr, size_t size)
{
	uintptr_t at = (uintptr_t)ptr, end = at + size;
	CUresult ret = enter();

	if (ret != CUDA_SUCCESS)
		return ret;
	if (!whole_mappings(at, size))
		ret = CUDA_ERROR_INVALID_VALUE;
	while (ret == CUDA_SUCCESS && at < end) {
		struct range *r = range_at(at);
		struct physical *p = r->phys;

		at = r->end;
		contents_drop(r->start, r->end - r->start);
		range_remove(r);
		p->maps--;
		ret = drop_if_unused(p);
	}
	leave();
	return ret;
}

EXPORT CUresult cuMemSetAccess(CUdeviceptr ptr, size_t size, const CUmemAccessDesc *desc, size_t count)
{
	uintptr_t at = (uintptr_t)ptr, end = at + size;
	CUresult ret = enter();
	size_t i;

	if (ret != CUDA_SUCCESS)
		return ret;
	if (!desc || count == 0 || !whole_mappings(at, size))
		ret = CUDA_ERROR_INVALID_VALUE;
	for (i = 0; ret == CUDA_SUCCESS && i < count; i++)
		if (desc[i].location.type == CU_MEM_LOCATION_TYPE_DEVICE && !device_at(desc[i].location.id))
			ret = CUDA_ERROR_INVALID_DEVICE;
	while (ret == CUDA_SUCCESS && at < end) {
		struct range *r = range_at(at);

		for (i = 0; i < count; i++)
			if (desc[i].location.type == CU_MEM_LOCATION_TYPE_DEVICE && desc[i].location.id == r->dev->ordinal)
				r->access = desc[i].flags;
		at = r->end;
	}
	leave();
	return ret;
}

EXPORT CUresult cuMemGetAccess(unsigned long long *flags, const CUmemLocation *location, CUdeviceptr ptr)
{
	struct range *r;
	CUresult ret = enter();

	if (ret != CUDA_SUCCESS)
		return ret;
	r = range_find((uintptr_t)ptr);
	if (!flags || !location || !r || r->kind != RANGE_MAPPED)
		ret = CUDA_ERROR_INVALID_VALUE;
	else
		*flags = location->type == CU_MEM_LOCATION_TYPE_DEVICE && location->id == r->dev->ordinal ? (unsigned long long)r->access : 0;
	leave();
	return ret;
}

EXPORT CUresult cuMemRetainAllocationHandle(CUmemGenericAllocationHandle *handle, void *addr)
{
	struct range *r;
	CUresult ret = enter();

	if (ret != CUDA_SUCCESS)
		return ret;
	r = range_find((uintptr_t)addr);
	if (!handle || !r || r->kind != RANGE_MAPPED) {
		ret = CUDA_ERROR_INVALID_VALUE;
	} else {
		r->phys->refs++;
		*handle = r->phys->value;
	}
	leave();
	return ret;
}

EXPORT CUresult cuMemGetAllocationPropertiesFromHandle(CUmemAllocationProp *prop, CUmemGenericAllocationHandle handle)
{
	struct physical *p;
	CUresult ret = enter();

	if (ret != CUDA_SUCCESS)
		return ret;
	p = *find_handle(handle);
	if (!prop || !p || p->refs == 0)
		ret = CUDA_ERROR_INVALID_VALUE;
	else
		*prop = p->prop;
	leave();
	return ret;
}
