/* SPDX-License-Identifier: Apache-2.0 */
/*
 * endpoint.c: logical endpoints, which memory of the devices of a team, or of one device, is bound
 * to and stays bound to until it is unbound or the endpoint is destroyed. There is no fabric here,
 * so none can be exported or imported.
 */
#include "internal.h"

#define ENDPOINTS 1024 /* the ids that there are */
#define ENDPOINT_MAX (UINT64_C(1) << 40)

enum { UNICAST = 1, MULTICAST = 2 };

static struct endpoint {
	bool reserved;
	bool known; /* cuLogicalEndpointQuery has said that it is complete: nothing may be bound before */
	struct multicast *team; /* NULL: not created */
} endpoints[ENDPOINTS];

static bool complete(const struct endpoint *e)
{
	return e->team && (unsigned int)__builtin_popcount(e->team->devices) == e->team->prop.numDevices;
}

/* The endpoint that was created by this id, or NULL. */
static struct endpoint *created(CUlogicalEndpointId id)
{
	return id < ENDPOINTS && endpoints[id].team ? &endpoints[id] : NULL;
}

static CUresult check_endpoint(const CUlogicalEndpointProp *prop)
{
	if (!prop || prop->flags & ~1u)
		return CUDA_ERROR_INVALID_VALUE;
	if (prop->ipcHandleTypes != 0)
		return CUDA_ERROR_NOT_SUPPORTED;
	if (prop->type == UNICAST)
		return device_at(prop->unicast.device) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_DEVICE;
	if (prop->type != MULTICAST || prop->multicast.numDevices == 0)
		return CUDA_ERROR_INVALID_VALUE;
	return prop->multicast.numDevices <= (unsigned int)device_count ? CUDA_SUCCESS : CUDA_ERROR_NOT_SUPPORTED;
}

EXPORT CUresult cuLogicalEndpointIdReserve(CUlogicalEndpointId *first, uint32_t count)
{
	uint32_t at = 0, n = 0;
	CUresult ret = enter();

	if (ret != CUDA_SUCCESS)
		return ret;
	if (!first || count == 0) {
		ret = CUDA_ERROR_INVALID_VALUE;
	} else {
		for (at = 0; at < ENDPOINTS && n < count; at++)
			n = endpoints[at].reserved ? 0 : n + 1;
		if (n < count)
			ret = CUDA_ERROR_OUT_OF_MEMORY;
	}
	if (ret == CUDA_SUCCESS) {
		for (n = at - count; n < at; n++)
			endpoints[n].reserved = true;
		*first = at - count;
	}
	leave();
	return ret;
}

EXPORT CUresult cuLogicalEndpointIdRelease(CUlogicalEndpointId first, uint32_t count)
{
	uint32_t i;
	CUresult ret = enter();

	if (ret != CUDA_SUCCESS)
		return ret;
	if (count == 0 || first >= ENDPOINTS || count > ENDPOINTS - first)
		ret = CUDA_ERROR_INVALID_VALUE;
	for (i = 0; ret == CUDA_SUCCESS && i < count; i++)
		if (!endpoints[first + i].reserved || endpoints[first + i].team)
			ret = CUDA_ERROR_INVALID_VALUE;
	for (i = 0; ret == CUDA_SUCCESS && i < count; i++)
		endpoints[first + i].reserved = false;
	leave();
	return ret;
}

EXPORT CUresult cuLogicalEndpointGetLimits(uint64_t *alignment, uint64_t *most, const CUlogicalEndpointProp *prop)
{
	CUresult ret = enter();

	if (ret != CUDA_SUCCESS)
		return ret;
	ret = alignment && most ? check_endpoint(prop) : CUDA_ERROR_INVALID_VALUE;
	if (ret == CUDA_SUCCESS) {
		*alignment = PAGE;
		*most = ENDPOINT_MAX;
	}
	leave();
	return ret;
}

EXPORT CUresult cuLogicalEndpointCreate(CUlogicalEndpointId id, const CUlogicalEndpointProp *prop)
{
	struct multicast *m;
	CUresult ret = enter();

	if (ret != CUDA_SUCCESS)
		return ret;
	ret = check_endpoint(prop);
	if (ret == CUDA_SUCCESS && (id >= ENDPOINTS || !endpoints[id].reserved || endpoints[id].team || prop->size == 0 ||
				    prop->size % PAGE != 0 || prop->size > ENDPOINT_MAX))
		ret = CUDA_ERROR_INVALID_VALUE;
	if (ret == CUDA_SUCCESS) {
		m = calloc(1, sizeof(*m));
		if (m) {
			m->prop.size = prop->size;
			m->prop.numDevices = prop->type == UNICAST ? 1 : prop->multicast.numDevices;
			m->devices = prop->type == UNICAST ? 1u << prop->unicast.device : 0;
			endpoints[id].team = m;
			endpoints[id].known = false;
		} else {
			ret = CUDA_ERROR_OUT_OF_MEMORY;
		}
	}
	leave();
	return ret;
}

EXPORT CUresult cuLogicalEndpointAddDevice(CUlogicalEndpointId id, CUdevice dev)
{
	struct endpoint *e;
	CUresult ret = enter();

	if (ret != CUDA_SUCCESS)
		return ret;
	e = created(id);
	if (!e || !device_at(dev) || complete(e) || (e->team->devices & 1u << dev))
		ret = CUDA_ERROR_INVALID_VALUE;
	else
		e->team->devices |= 1u << dev;
	leave();
	return ret;
}

EXPORT CUresult cuLogicalEndpointQuery(CUlogicalEndpointId first, uint32_t count, int *status)
{
	int all = 1;
	uint32_t i;
	CUresult ret = enter();

	if (ret != CUDA_SUCCESS)
		return ret;
	if (!status || count == 0 || first >= ENDPOINTS || count > ENDPOINTS - first)
		ret = CUDA_ERROR_INVALID_VALUE;
	for (i = 0; ret == CUDA_SUCCESS && i < count; i++) {
		endpoints[first + i].known = complete(&endpoints[first + i]);
		all &= endpoints[first + i].known;
	}
	if (ret == CUDA_SUCCESS)
		*status = all;
	leave();
	return ret;
}

EXPORT CUresult cuLogicalEndpointDestroy(CUlogicalEndpointId id)
{
	struct endpoint *e;
	CUresult ret = enter();

	if (ret != CUDA_SUCCESS)
		return ret;
	e = created(id);
	if (e) {
		unbind_all(e->team);
		free(e->team);
		e->team = NULL;
	} else {
		ret = CUDA_ERROR_INVALID_VALUE;
	}
	leave();
	return ret;
}

/* The endpoint's side of both ways to bind. */
static CUresult bind_to(CUlogicalEndpointId id, CUdevice dev, uint64_t at, struct physical *memory, uint64_t offset, uint64_t size,
			unsigned long long flags)
{
	struct endpoint *e = created(id);

	if (!e || !e->known || !device_at(dev) || flags != 0)
		return CUDA_ERROR_INVALID_VALUE;
	return bind_part(e->team, device_at(dev), at, memory, offset, size);
}

EXPORT CUresult cuLogicalEndpointBindMem(CUlogicalEndpointId id, CUdevice dev, uint64_t at, CUmemGenericAllocationHandle memory,
					 uint64_t offset, uint64_t size, unsigned long long flags)
{
	CUresult ret = enter();

	if (ret != CUDA_SUCCESS)
		return ret;
	ret = bind_to(id, dev, at, physical_of(memory), offset, size, flags);
	leave();
	return ret;
}

EXPORT CUresult cuLogicalEndpointBindAddr(CUlogicalEndpointId id, CUdevice dev, uint64_t at, void *address, uint64_t size,
					  unsigned long long flags)
{
	struct range *r;
	CUresult ret = enter();

	if (ret != CUDA_SUCCESS)
		return ret;
	r = range_find((uintptr_t)address);
	if (r && r->kind == RANGE_MAPPED)
		ret = bind_to(id, dev, at, r->phys, (uintptr_t)address - r->start, size, flags);
	else
		ret = CUDA_ERROR_INVALID_VALUE;
	leave();
	return ret;
}

EXPORT CUresult cuLogicalEndpointUnbind(CUlogicalEndpointId id, CUdevice dev, uint64_t at, uint64_t size)
{
	struct endpoint *e;
	CUresult ret = enter();

	if (ret != CUDA_SUCCESS)
		return ret;
	e = created(id);
	ret = e && device_at(dev) ? unbind_part(e->team, device_at(dev), at, size) : CUDA_ERROR_INVALID_VALUE;
	leave();
	return ret;
}
