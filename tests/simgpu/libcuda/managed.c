/* SPDX-License-Identifier: Apache-2.0 */
/*
 * managed.c: where managed memory is. An allocation moves as a whole, whatever part of it a call
 * names. What prefers the host leaves the device and does not come back by being worked on.
 */
#include "internal.h"

static CUresult migrate(struct range *r, bool to_device)
{
	struct simgpu_req req = {.op = SIMGPU_OP_MIGRATE, .arg = {r->handle, to_device}};
	struct simgpu_rep rep;

	return call(r->dev, &req, &rep);
}

/* Managed memory that holds all of [at, at + n), or NULL. */
static struct range *managed(CUdeviceptr at, size_t n)
{
	struct range *r = range_find((uintptr_t)at);

	return r && r->kind == RANGE_MANAGED && n > 0 && n <= r->end - (uintptr_t)at ? r : NULL;
}

void touch_managed(uintptr_t at, size_t n)
{
	struct range *r = range_find(at);

	(void)n;
	if (r && r->kind == RANGE_MANAGED && r->preferred != -1)
		(void)migrate(r, true); /* what finds no room stays on the host */
}

/* Which device a location is: -1 for the host, SIM_NOWHERE if it is neither. */
static int place_of(CUmemLocation at)
{
	switch (at.type) {
	case CU_MEM_LOCATION_TYPE_DEVICE:
		return device_at(at.id) ? at.id : SIM_NOWHERE;
	case CU_MEM_LOCATION_TYPE_HOST:
	case CU_MEM_LOCATION_TYPE_HOST_NUMA:
	case CU_MEM_LOCATION_TYPE_HOST_NUMA_CURRENT:
		return -1;
	default:
		return SIM_NOWHERE;
	}
}

static int place_of_device(CUdevice dev)
{
	return dev == -1 || device_at(dev) ? dev : SIM_NOWHERE;
}

/* ---- prefetching ---------------------------------------------------------------------- */

static CUresult prefetch_one(CUdeviceptr dptr, size_t count, int to)
{
	struct range *r = managed(dptr, count);
	CUresult ret;

	if (!r)
		return CUDA_ERROR_INVALID_VALUE;
	if (to == SIM_NOWHERE)
		return CUDA_ERROR_INVALID_DEVICE;
	ret = migrate(r, to == r->dev->ordinal);
	if (ret == CUDA_SUCCESS)
		r->prefetched = to;
	return ret;
}

static CUresult prefetch(CUdeviceptr dptr, size_t count, int to, CUstream stream)
{
	CUcontext ctx;
	CUgraph graph;
	CUresult ret = enter();

	if (ret != CUDA_SUCCESS)
		return ret;
	ret = stream_context(stream, &ctx);
	graph = ret == CUDA_SUCCESS ? capturing(stream) : NULL;
	if (graph)
		ret = capture_fail(stream);
	else if (ret == CUDA_SUCCESS)
		ret = prefetch_one(dptr, count, to);
	leave();
	return ret;
}

EXPORT CUresult cuMemPrefetchAsync(CUdeviceptr dptr, size_t count, CUdevice to, CUstream stream)
{
	return prefetch(dptr, count, place_of_device(to), stream);
}

EXPORT CUresult cuMemPrefetchAsync_ptsz(CUdeviceptr dptr, size_t count, CUdevice to, CUstream stream)
{
	return prefetch(dptr, count, place_of_device(to), per_thread(stream));
}

EXPORT CUresult cuMemPrefetchAsync_v2(CUdeviceptr dptr, size_t count, CUmemLocation to, unsigned int flags, CUstream stream)
{
	return flags != 0 ? CUDA_ERROR_INVALID_VALUE : prefetch(dptr, count, place_of(to), stream);
}

EXPORT CUresult cuMemPrefetchAsync_v2_ptsz(CUdeviceptr dptr, size_t count, CUmemLocation to, unsigned int flags, CUstream stream)
{
	return cuMemPrefetchAsync_v2(dptr, count, to, flags, per_thread(stream));
}

/*
 * Several at once: location j is for the ranges from index[j] on. `discard` throws the contents
 * away first; without locations that is all, and the pages leave the device.
 */
static CUresult batch(CUdeviceptr *dptrs, size_t *sizes, size_t count, CUmemLocation *to, size_t *index, size_t places, bool discard,
		      unsigned long long flags, CUstream stream)
{
	CUcontext ctx;
	size_t i, j;
	CUresult ret = enter();

	if (ret != CUDA_SUCCESS)
		return ret;
	ret = stream_context(stream, &ctx);
	if (ret == CUDA_SUCCESS && (count == 0 || !dptrs || !sizes || flags != 0 || places > count || (!discard && places == 0) ||
				    (places > 0 && (!to || !index || index[0] != 0))))
		ret = CUDA_ERROR_INVALID_VALUE;
	if (ret == CUDA_SUCCESS && capturing(stream))
		ret = capture_fail(stream);
	for (i = 0; ret == CUDA_SUCCESS && i < count; i++)
		if (!managed(dptrs[i], sizes[i]))
			ret = CUDA_ERROR_INVALID_VALUE;
	for (i = j = 0; ret == CUDA_SUCCESS && i < count; i++) {
		while (j + 1 < places && index[j + 1] <= i)
			j++;
		ret = places > 0 ? prefetch_one(dptrs[i], sizes[i], place_of(to[j])) : migrate(managed(dptrs[i], sizes[i]), false);
	}
	leave();
	return ret;
}

EXPORT CUresult cuMemPrefetchBatchAsync(CUdeviceptr *dptrs, size_t *sizes, size_t count, CUmemLocation *to, size_t *index, size_t places,
					unsigned long long flags, CUstream stream)
{
	return batch(dptrs, sizes, count, to, index, places, false, flags, stream);
}

EXPORT CUresult cuMemPrefetchBatchAsync_ptsz(CUdeviceptr *dptrs, size_t *sizes, size_t count, CUmemLocation *to, size_t *index,
					     size_t places, unsigned long long flags, CUstream stream)
{
	return batch(dptrs, sizes, count, to, index, places, false, flags, per_thread(stream));
}

EXPORT CUresult cuMemDiscardBatchAsync(CUdeviceptr *dptrs, size_t *sizes, size_t count, unsigned long long flags, CUstream stream)
{
	return batch(dptrs, sizes, count, NULL, NULL, 0, true, flags, stream);
}

EXPORT CUresult cuMemDiscardBatchAsync_ptsz(CUdeviceptr *dptrs, size_t *sizes, size_t count, unsigned long long flags, CUstream stream)
{
	return batch(dptrs, sizes, count, NULL, NULL, 0, true, flags, per_thread(stream));
}

EXPORT CUresult cuMemDiscardAndPrefetchBatchAsync(CUdeviceptr *dptrs, size_t *sizes, size_t count, CUmemLocation *to, size_t *index,
						  size_t places, unsigned long long flags, CUstream stream)
{
	return places > 0 ? batch(dptrs, sizes, count, to, index, places, true, flags, stream) : CUDA_ERROR_INVALID_VALUE;
}

EXPORT CUresult cuMemDiscardAndPrefetchBatchAsync_ptsz(CUdeviceptr *dptrs, size_t *sizes, size_t count, CUmemLocation *to, size_t *index,
						       size_t places, unsigned long long flags, CUstream stream)
{
	return cuMemDiscardAndPrefetchBatchAsync(dptrs, sizes, count, to, index, places, flags, per_thread(stream));
}

/* ---- advice --------------------------------------------------------------------------- */

static CUresult advise(CUdeviceptr dptr, size_t count, CUmem_advise advice, int place)
{
	struct range *r;
	CUresult ret = enter();

	if (ret != CUDA_SUCCESS)
		return ret;
	r = managed(dptr, count);
	if (!r) {
		leave();
		return CUDA_ERROR_INVALID_VALUE;
	}
	switch ((unsigned int)advice) {
	case CU_MEM_ADVISE_SET_READ_MOSTLY:
	case CU_MEM_ADVISE_UNSET_READ_MOSTLY:
		r->read_mostly = advice == CU_MEM_ADVISE_SET_READ_MOSTLY;
		break;
	case CU_MEM_ADVISE_SET_PREFERRED_LOCATION:
		if (place == SIM_NOWHERE)
			ret = CUDA_ERROR_INVALID_DEVICE;
		else if (place == -1)
			ret = migrate(r, false); /* here pages are on the device before they are touched */
		if (ret == CUDA_SUCCESS)
			r->preferred = place;
		break;
	case CU_MEM_ADVISE_UNSET_PREFERRED_LOCATION:
		r->preferred = SIM_NOWHERE;
		break;
	case CU_MEM_ADVISE_SET_ACCESSED_BY:
	case CU_MEM_ADVISE_UNSET_ACCESSED_BY:
		if (place == SIM_NOWHERE)
			ret = CUDA_ERROR_INVALID_DEVICE;
		else if (place >= 0 && advice == CU_MEM_ADVISE_SET_ACCESSED_BY)
			r->accessed_by |= 1u << place;
		else if (place >= 0)
			r->accessed_by &= ~(1u << place);
		break;
	default:
		ret = CUDA_ERROR_INVALID_VALUE;
	}
	leave();
	return ret;
}

EXPORT CUresult cuMemAdvise(CUdeviceptr dptr, size_t count, CUmem_advise advice, CUdevice dev)
{
	return advise(dptr, count, advice, place_of_device(dev));
}

EXPORT CUresult cuMemAdvise_v2(CUdeviceptr dptr, size_t count, CUmem_advise advice, CUmemLocation at)
{
	return advise(dptr, count, advice, place_of(at));
}

/* ---- what was said -------------------------------------------------------------------- */

static int location_type(int place)
{
	return place == SIM_NOWHERE ? SIM_LOCATION_INVALID : place < 0 ? CU_MEM_LOCATION_TYPE_HOST : CU_MEM_LOCATION_TYPE_DEVICE;
}

static CUresult range_attribute(void *data, size_t size, unsigned int attribute, const struct range *r)
{
	size_t i, n = 0;
	int value, dev;

	if (attribute == CU_MEM_RANGE_ATTRIBUTE_ACCESSED_BY) {
		if (size == 0 || size % sizeof(int) != 0)
			return CUDA_ERROR_INVALID_VALUE;
		for (dev = 0; dev < device_count; dev++)
			if ((r->accessed_by & 1u << dev) && n < size / sizeof(int))
				((int *)data)[n++] = dev;
		for (i = n; i < size / sizeof(int); i++)
			((int *)data)[i] = SIM_NOWHERE;
		return CUDA_SUCCESS;
	}
	if (size != sizeof(int))
		return CUDA_ERROR_INVALID_VALUE;
	switch (attribute) {
	case CU_MEM_RANGE_ATTRIBUTE_READ_MOSTLY:
		value = r->read_mostly;
		break;
	case CU_MEM_RANGE_ATTRIBUTE_PREFERRED_LOCATION:
		value = r->preferred;
		break;
	case CU_MEM_RANGE_ATTRIBUTE_LAST_PREFETCH_LOCATION:
		value = r->prefetched;
		break;
	case SIM_RANGE_ATTR_PREFERRED_TYPE:
		value = location_type(r->preferred);
		break;
	case SIM_RANGE_ATTR_PREFERRED_TYPE + 1:
		value = r->preferred < 0 ? 0 : r->preferred;
		break;
	case SIM_RANGE_ATTR_PREFERRED_TYPE + 2:
		value = location_type(r->prefetched);
		break;
	case SIM_RANGE_ATTR_PREFERRED_TYPE + 3:
		value = r->prefetched < 0 ? 0 : r->prefetched;
		break;
	default:
		return CUDA_ERROR_INVALID_VALUE;
	}
	*(int *)data = value;
	return CUDA_SUCCESS;
}

EXPORT CUresult cuMemRangeGetAttribute(void *data, size_t size, CUmem_range_attribute attribute, CUdeviceptr dptr, size_t count)
{
	struct range *r;
	CUresult ret = enter();

	if (ret != CUDA_SUCCESS)
		return ret;
	r = managed(dptr, count);
	ret = data && r ? range_attribute(data, size, attribute, r) : CUDA_ERROR_INVALID_VALUE;
	leave();
	return ret;
}

EXPORT CUresult cuMemRangeGetAttributes(void **data, size_t *sizes, CUmem_range_attribute *attributes, size_t n, CUdeviceptr dptr,
					size_t count)
{
	CUresult ret = data && sizes && attributes && n > 0 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
	size_t i;

	for (i = 0; ret == CUDA_SUCCESS && i < n; i++)
		ret = cuMemRangeGetAttribute(data[i], sizes[i], attributes[i], dptr, count);
	return ret;
}
