/* SPDX-License-Identifier: Apache-2.0 */
/*
 * vmm.c: virtual memory management: addresses, physical memory and mappings apart.
 *
 * Physical memory lives until its last handle is released and its last mapping is undone; its
 * contents live as long as the mapping does.
 */
#include "internal.h"

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

struct physical *physical_of(CUmemGenericAllocationHandle value)
{
	struct physical *p = *find_handle(value);

	return p && p->refs > 0 ? p : NULL;
}

/* With one handle to it. NULL: no room for it; simgpud's handle is the caller's still. */
struct physical *physical_add(struct device *dev, uint64_t handle, size_t size, const CUmemAllocationProp *prop)
{
	struct physical *p = calloc(1, sizeof(*p));

	if (!p)
		return NULL;
	p->dev = dev;
	p->handle = handle;
	p->size = size;
	p->refs = 1;
	p->prop = *prop;
	p->value = ++last_value;
	*find_handle(p->value) = p;
	return p;
}

static CUresult check_prop(const CUmemAllocationProp *prop)
{
	if (!prop || prop->type != CU_MEM_ALLOCATION_TYPE_PINNED)
		return CUDA_ERROR_INVALID_VALUE;
	if ((unsigned int)prop->requestedHandleTypes & ~(unsigned int)CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR)
		return CUDA_ERROR_NOT_SUPPORTED;
	switch (prop->location.type) {
	case CU_MEM_LOCATION_TYPE_DEVICE:
		return device_at(prop->location.id) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_DEVICE;
	case CU_MEM_LOCATION_TYPE_HOST:
		return prop->requestedHandleTypes == 0 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
	case CU_MEM_LOCATION_TYPE_HOST_NUMA:
		return CUDA_SUCCESS; /* takes nothing of any GPU */
	case CU_MEM_LOCATION_TYPE_HOST_NUMA_CURRENT:
		return CUDA_ERROR_INVALID_VALUE;
	default:
		return CUDA_ERROR_NOT_SUPPORTED;
	}
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
	struct device *dev = NULL;
	struct simgpu_rep rep;
	struct physical *p;
	CUresult ret = enter();

	if (ret != CUDA_SUCCESS)
		return ret;
	ret = handle && size > 0 && size % PAGE == 0 && flags == 0 ? check_prop(prop) : CUDA_ERROR_INVALID_VALUE;
	if (ret == CUDA_SUCCESS) {
		if (prop->location.type == CU_MEM_LOCATION_TYPE_DEVICE)
			dev = device_at(prop->location.id);
		req.arg[1] = size; /* of no context: it outlives them */
		req.arg[2] = SIMGPU_KIND_PHYSICAL;
		rep.val[0] = 0;
		if (dev)
			ret = call(dev, &req, &rep);
	}
	if (ret == CUDA_SUCCESS) {
		p = physical_add(dev, rep.val[0], size, prop);
		if (p) {
			*handle = p->value;
		} else {
			if (dev)
				give_memory(dev, rep.val[0]);
			ret = CUDA_ERROR_OUT_OF_MEMORY;
		}
	}
	leave();
	return ret;
}

static void unbind(struct bind **at)
{
	struct bind *b = *at;

	*at = b->next;
	b->memory->maps--;
	(void)physical_unused(b->memory); /* always succeeds */
	free(b);
}

void unbind_all(struct multicast *m)
{
	while (m->binds)
		unbind(&m->binds);
}

CUresult physical_unused(struct physical *p)
{
	if (p->refs > 0 || p->maps > 0)
		return CUDA_SUCCESS;
	*find_handle(p->value) = p->next;
	if (p->multicast) {
		unbind_all(p->multicast);
		free(p->multicast);
	} else if (p->dev) {
		give_memory(p->dev, p->handle);
	}
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
		ret = physical_unused(p);
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
	if (!p || p->refs == 0 || flags != 0 || size == 0 || size % PAGE != 0 || ptr % PAGE != 0 || (offset != 0 && !p->multicast) ||
	    offset > p->size || size > p->size - offset ||
	    !reserved_range((uintptr_t)ptr, size) || mapped_somewhere((uintptr_t)ptr, size)) {
		ret = CUDA_ERROR_INVALID_VALUE;
	} else {
		r = range_add((uintptr_t)ptr, size, RANGE_MAPPED);
		if (r) {
			r->dev = p->dev ? p->dev : &devices[0];
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
		ret = physical_unused(p);
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

/* ---- in other processes --------------------------------------------------------------- */

EXPORT CUresult cuMemExportToShareableHandle(void *out, CUmemGenericAllocationHandle handle, CUmemAllocationHandleType type,
					     unsigned long long flags)
{
	struct physical *p;
	CUresult ret = enter();
	int fd;

	if (ret != CUDA_SUCCESS)
		return ret;
	p = physical_of(handle);
	if (!out || !p || flags != 0 || !((unsigned int)p->prop.requestedHandleTypes & (unsigned int)type))
		ret = CUDA_ERROR_INVALID_VALUE;
	else if (type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR || !p->dev || p->multicast)
		ret = CUDA_ERROR_NOT_SUPPORTED;
	else
		ret = export_memory(p->dev, p->handle, 0, NULL, &fd);
	if (ret == CUDA_SUCCESS)
		*(int *)out = fd;
	leave();
	return ret;
}

EXPORT CUresult cuMemImportFromShareableHandle(CUmemGenericAllocationHandle *handle, void *os_handle, CUmemAllocationHandleType type)
{
	CUmemAllocationProp prop = {.type = CU_MEM_ALLOCATION_TYPE_PINNED, .requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR};
	struct physical *p = NULL;
	struct device *dev;
	uint64_t given, value;
	size_t size;
	CUresult ret = enter();

	if (ret != CUDA_SUCCESS)
		return ret;
	if (type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR)
		ret = CUDA_ERROR_NOT_SUPPORTED;
	else
		ret = handle ? import_descriptor((int)(intptr_t)os_handle, &dev, &given, &size, &value) : CUDA_ERROR_INVALID_VALUE;
	if (ret == CUDA_SUCCESS && given == 0)
		ret = CUDA_ERROR_INVALID_VALUE; /* it stands for a pool */
	if (ret == CUDA_SUCCESS) {
		prop.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
		prop.location.id = dev->ordinal;
		p = physical_add(dev, given, size, &prop);
		if (p) {
			*handle = p->value;
		} else {
			give_memory(dev, given);
			ret = CUDA_ERROR_OUT_OF_MEMORY;
		}
	}
	leave();
	return ret;
}

/* ---- multicast ------------------------------------------------------------------------ */

static CUresult check_multicast(const CUmulticastObjectProp *prop)
{
	if (!prop || prop->flags != 0 || prop->numDevices == 0 || prop->size == 0)
		return CUDA_ERROR_INVALID_VALUE;
	return prop->numDevices <= (unsigned int)device_count && prop->handleTypes <= 1 ? CUDA_SUCCESS : CUDA_ERROR_NOT_SUPPORTED;
}

EXPORT CUresult cuMulticastGetGranularity(size_t *granularity, const CUmulticastObjectProp *prop, CUmulticastGranularity_flags option)
{
	CUresult ret = enter();

	if (ret != CUDA_SUCCESS)
		return ret;
	ret = granularity && (unsigned int)option <= 1 ? check_multicast(prop) : CUDA_ERROR_INVALID_VALUE;
	if (ret == CUDA_SUCCESS)
		*granularity = PAGE;
	leave();
	return ret;
}

EXPORT CUresult cuMulticastCreate(CUmemGenericAllocationHandle *handle, const CUmulticastObjectProp *prop)
{
	CUmemAllocationProp none = {.type = CU_MEM_ALLOCATION_TYPE_PINNED};
	struct multicast *m = NULL;
	struct physical *p = NULL;
	CUresult ret = enter();

	if (ret != CUDA_SUCCESS)
		return ret;
	ret = handle ? check_multicast(prop) : CUDA_ERROR_INVALID_VALUE;
	if (ret == CUDA_SUCCESS && prop->size % PAGE != 0)
		ret = CUDA_ERROR_INVALID_VALUE;
	if (ret == CUDA_SUCCESS) {
		m = calloc(1, sizeof(*m));
		p = m ? physical_add(NULL, 0, prop->size, &none) : NULL;
		if (p) {
			m->prop = *prop;
			p->multicast = m;
			*handle = p->value;
		} else {
			free(m);
			ret = CUDA_ERROR_OUT_OF_MEMORY;
		}
	}
	leave();
	return ret;
}

static struct multicast *multicast_of(CUmemGenericAllocationHandle value)
{
	struct physical *p = physical_of(value);

	return p ? p->multicast : NULL;
}

EXPORT CUresult cuMulticastAddDevice(CUmemGenericAllocationHandle handle, CUdevice dev)
{
	struct multicast *m;
	CUresult ret = enter();

	if (ret != CUDA_SUCCESS)
		return ret;
	m = multicast_of(handle);
	if (!device_at(dev))
		ret = CUDA_ERROR_INVALID_DEVICE;
	else if (!m || (unsigned int)__builtin_popcount(m->devices) == m->prop.numDevices || (m->devices & 1u << dev))
		ret = CUDA_ERROR_INVALID_VALUE;
	else
		m->devices |= 1u << dev;
	leave();
	return ret;
}

/* Binds [offset, offset + size) of the memory at `at`; it stays until it is unbound. */
CUresult bind_part(struct multicast *m, struct device *dev, size_t at, struct physical *memory, size_t offset, size_t size)
{
	struct bind *b;

	if (!m || !memory || memory->multicast || !memory->dev || (dev && dev != memory->dev))
		return CUDA_ERROR_INVALID_VALUE;
	dev = memory->dev;
	if (size == 0 || at % PAGE != 0 || size % PAGE != 0 || offset % PAGE != 0 || at > m->prop.size || size > m->prop.size - at ||
	    offset > memory->size || size > memory->size - offset || !(m->devices & 1u << dev->ordinal))
		return CUDA_ERROR_INVALID_VALUE;
	if ((unsigned int)__builtin_popcount(m->devices) != m->prop.numDevices)
		return CUDA_ERROR_ILLEGAL_STATE;
	for (b = m->binds; b; b = b->next)
		if (b->dev == dev && at < b->at + b->size && b->at < at + size)
			return CUDA_ERROR_ALREADY_MAPPED;
	b = calloc(1, sizeof(*b));
	if (!b)
		return CUDA_ERROR_OUT_OF_MEMORY;
	b->dev = dev;
	b->memory = memory;
	b->at = at;
	b->size = size;
	b->next = m->binds;
	m->binds = b;
	memory->maps++;
	return CUDA_SUCCESS;
}

static CUresult bind_memory(CUmemGenericAllocationHandle handle, int dev, size_t at, CUmemGenericAllocationHandle memory, size_t offset,
			    size_t size, unsigned long long flags)
{
	CUresult ret = enter();

	if (ret != CUDA_SUCCESS)
		return ret;
	if (flags != 0)
		ret = CUDA_ERROR_INVALID_VALUE;
	else if (dev >= 0 && !device_at(dev))
		ret = CUDA_ERROR_INVALID_DEVICE;
	else
		ret = bind_part(multicast_of(handle), device_at(dev), at, physical_of(memory), offset, size);
	leave();
	return ret;
}

EXPORT CUresult cuMulticastBindMem(CUmemGenericAllocationHandle handle, size_t at, CUmemGenericAllocationHandle memory, size_t offset,
				   size_t size, unsigned long long flags)
{
	return bind_memory(handle, -1, at, memory, offset, size, flags);
}

EXPORT CUresult cuMulticastBindMem_v2(CUmemGenericAllocationHandle handle, CUdevice dev, size_t at, CUmemGenericAllocationHandle memory,
				      size_t offset, size_t size, unsigned long long flags)
{
	return dev < 0 ? CUDA_ERROR_INVALID_DEVICE : bind_memory(handle, dev, at, memory, offset, size, flags);
}

static CUresult bind_address(CUmemGenericAllocationHandle handle, int dev, size_t at, CUdeviceptr ptr, size_t size, unsigned long long flags)
{
	struct range *r;
	CUresult ret = enter();

	if (ret != CUDA_SUCCESS)
		return ret;
	r = range_find((uintptr_t)ptr);
	if (flags != 0 || !r || r->kind != RANGE_MAPPED)
		ret = CUDA_ERROR_INVALID_VALUE;
	else if (dev >= 0 && !device_at(dev))
		ret = CUDA_ERROR_INVALID_DEVICE;
	else
		ret = bind_part(multicast_of(handle), device_at(dev), at, r->phys, (uintptr_t)ptr - r->start, size);
	leave();
	return ret;
}

EXPORT CUresult cuMulticastBindAddr(CUmemGenericAllocationHandle handle, size_t at, CUdeviceptr ptr, size_t size, unsigned long long flags)
{
	return bind_address(handle, -1, at, ptr, size, flags);
}

EXPORT CUresult cuMulticastBindAddr_v2(CUmemGenericAllocationHandle handle, CUdevice dev, size_t at, CUdeviceptr ptr, size_t size,
				       unsigned long long flags)
{
	return dev < 0 ? CUDA_ERROR_INVALID_DEVICE : bind_address(handle, dev, at, ptr, size, flags);
}

/* Undoes what was bound within [at, at + size); there must be something. */
CUresult unbind_part(struct multicast *m, const struct device *dev, size_t at, size_t size)
{
	CUresult ret = CUDA_ERROR_INVALID_VALUE;
	struct bind **b;

	for (b = m ? &m->binds : NULL; b && *b;) {
		if ((*b)->dev == dev && (*b)->at >= at && (*b)->at + (*b)->size <= at + size) {
			unbind(b);
			ret = CUDA_SUCCESS;
		} else {
			b = &(*b)->next;
		}
	}
	return ret;
}

EXPORT CUresult cuMulticastUnbind(CUmemGenericAllocationHandle handle, CUdevice dev, size_t at, size_t size)
{
	CUresult ret = enter();

	if (ret != CUDA_SUCCESS)
		return ret;
	ret = unbind_part(multicast_of(handle), device_at(dev), at, size);
	leave();
	return ret;
}
