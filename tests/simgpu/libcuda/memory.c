/* SPDX-License-Identifier: Apache-2.0 */
/* memory.c: linear device memory, managed memory, host memory, pointers. */
#include "internal.h"

#include <sys/mman.h>

static size_t round_up(size_t n, size_t to)
{
	return (n + to - 1) / to * to;
}

/* ---- device memory ----------------------------------------------------------------- */

static CUresult give_back(struct device *dev, uint64_t handle)
{
	struct simgpu_req req = {.op = SIMGPU_OP_FREE, .arg = {handle}};
	struct simgpu_rep rep;
	CUresult ret = call(dev, &req, &rep);

	if (ret == CUDA_SUCCESS && rep.val[1] != 0)
		drop_small_page(dev, rep.val[1]);
	return ret;
}

/* Address space for what simgpud gave out, and the range that describes it. */
static struct range *place(CUcontext ctx, size_t size, const struct simgpu_rep *rep, bool low)
{
	uintptr_t start;
	struct range *r;
	size_t mapped = rep->val[4];

	if (rep->val[2] != 0) {
		start = (uintptr_t)page_for_small(ctx->dev, ctx, rep->val[2], low);
		if (start == 0 || (low && start + PAGE - 1 > UINT32_MAX))
			return NULL;
		start += rep->val[3];
		mapped = 0;
	} else {
		start = (uintptr_t)map_device(mapped, low);
		if (start == 0)
			return NULL;
	}
	r = range_add(start, size, RANGE_DEVICE);
	if (!r) {
		if (mapped)
			unmap_device(start, mapped);
		return NULL;
	}
	r->mapped = mapped;
	return r;
}

static CUresult allocate(CUdeviceptr *out, size_t size, bool low)
{
	struct simgpu_req req = {.op = SIMGPU_OP_ALLOC};
	struct simgpu_rep rep;
	struct range *r;
	CUcontext ctx;
	CUresult ret = enter_context(&ctx);

	if (ret != CUDA_SUCCESS)
		return ret;
	ctx = keeper(ctx);
	ret = out && size > 0 ? unsafe() : CUDA_ERROR_INVALID_VALUE;
	if (ret == CUDA_SUCCESS) {
		req.arg[0] = ctx->handle;
		req.arg[1] = size;
		req.arg[2] = SIMGPU_KIND_DEVICE;
		ret = call(ctx->dev, &req, &rep);
	}
	if (ret == CUDA_SUCCESS) {
		r = place(ctx, size, &rep, low);
		if (r) {
			r->dev = ctx->dev;
			r->ctx = ctx;
			r->handle = rep.val[0];
			*out = r->start;
		} else {
			(void)give_back(ctx->dev, rep.val[0]); /* we report the lack of addresses */
			ret = CUDA_ERROR_OUT_OF_MEMORY;
		}
	}
	leave();
	return ret;
}

/* For what has no address: arrays, modules. */
CUresult allocate_bytes(CUcontext ctx, size_t size, uint64_t *handle)
{
	struct simgpu_req req = {.op = SIMGPU_OP_ALLOC, .arg = {ctx->handle, size, SIMGPU_KIND_DEVICE}};
	struct simgpu_rep rep;
	CUresult ret = call(ctx->dev, &req, &rep);

	if (ret == CUDA_SUCCESS)
		*handle = rep.val[0];
	return ret;
}

EXPORT CUresult cuMemAlloc_v2(CUdeviceptr *dptr, size_t size)
{
	return allocate(dptr, size, false);
}

EXPORT CUresult cuMemAlloc(CUdeviceptr_v1 *dptr, unsigned int size)
{
	CUdeviceptr wide;
	CUresult ret = allocate(dptr ? &wide : NULL, size, true);

	if (ret == CUDA_SUCCESS)
		*dptr = (CUdeviceptr_v1)wide;
	return ret;
}

static CUresult pitch_of(size_t width, size_t height, unsigned int element, size_t *pitch)
{
	if (width == 0 || height == 0 || width > SIZE_MAX / 2 || (element != 4 && element != 8 && element != 16))
		return CUDA_ERROR_INVALID_VALUE;
	*pitch = round_up(width, SIMGPU_ALIGN_BYTES);
	return height > SIZE_MAX / 2 / *pitch ? CUDA_ERROR_OUT_OF_MEMORY : CUDA_SUCCESS;
}

EXPORT CUresult cuMemAllocPitch_v2(CUdeviceptr *dptr, size_t *pitch, size_t width, size_t height, unsigned int element)
{
	size_t p;
	CUresult ret;

	ret = pitch ? pitch_of(width, height, element, &p) : CUDA_ERROR_INVALID_VALUE;
	if (ret == CUDA_SUCCESS)
		ret = allocate(dptr, p * height, false);
	if (ret == CUDA_SUCCESS)
		*pitch = p;
	return ret;
}

EXPORT CUresult cuMemAllocPitch(CUdeviceptr_v1 *dptr, unsigned int *pitch, unsigned int width, unsigned int height,
				unsigned int element)
{
	CUdeviceptr wide;
	size_t p;
	CUresult ret;

	ret = pitch && dptr ? pitch_of(width, height, element, &p) : CUDA_ERROR_INVALID_VALUE;
	if (ret == CUDA_SUCCESS)
		ret = allocate(&wide, p * height, true);
	if (ret == CUDA_SUCCESS) {
		*pitch = (unsigned int)p;
		*dptr = (CUdeviceptr_v1)wide;
	}
	return ret;
}

EXPORT CUresult cuMemAllocManaged(CUdeviceptr *dptr, size_t size, unsigned int flags)
{
	struct simgpu_req req = {.op = SIMGPU_OP_ALLOC};
	struct range *r = NULL;
	struct simgpu_rep rep;
	void *start = NULL;
	CUcontext ctx;
	CUresult ret = enter_context(&ctx);

	if (ret != CUDA_SUCCESS)
		return ret;
	ctx = keeper(ctx);
	ret = dptr && size > 0 && (flags == CU_MEM_ATTACH_GLOBAL || flags == CU_MEM_ATTACH_HOST) ? unsafe() : CUDA_ERROR_INVALID_VALUE;
	if (ret == CUDA_SUCCESS) {
		req.arg[0] = ctx->handle;
		req.arg[1] = size;
		req.arg[2] = SIMGPU_KIND_MANAGED;
		ret = call(ctx->dev, &req, &rep);
	}
	if (ret == CUDA_SUCCESS) {
		start = map_device(rep.val[4], false);
		if (start && mprotect(start, rep.val[4], PROT_READ | PROT_WRITE) == 0)
			r = range_add((uintptr_t)start, size, RANGE_MANAGED);
		if (r) {
			r->mapped = rep.val[4];
			r->dev = ctx->dev;
			r->ctx = ctx;
			r->handle = rep.val[0];
			*dptr = r->start;
		} else {
			if (start)
				unmap_device((uintptr_t)start, rep.val[4]);
			(void)give_back(ctx->dev, rep.val[0]); /* we report the lack of addresses */
			ret = CUDA_ERROR_OUT_OF_MEMORY;
		}
	}
	leave();
	return ret;
}

CUresult free_device(CUdeviceptr dptr)
{
	struct range *r;
	CUcontext ctx;
	CUresult ret;

	if (dptr == 0) { /* a way to ask for nothing but a look at the state */
		ret = enter();
		if (ret == CUDA_SUCCESS)
			leave();
		return ret;
	}
	ret = enter_context(&ctx);
	if (ret != CUDA_SUCCESS)
		return ret;
	r = range_at((uintptr_t)dptr);
	ret = unsafe();
	if (ret != CUDA_SUCCESS) {
		/* nothing may happen now */
	} else if (r && r->release) {
		ret = r->release(r);
	} else if (!r || (r->kind != RANGE_DEVICE && r->kind != RANGE_MANAGED)) {
		ret = CUDA_ERROR_INVALID_VALUE;
	} else {
		ret = give_back(r->dev, r->handle);
		if (ret == CUDA_SUCCESS) {
			range_unmap(r);
			range_remove(r);
		}
	}
	leave();
	return ret;
}

EXPORT CUresult cuMemFree_v2(CUdeviceptr dptr)
{
	return free_device(dptr);
}

EXPORT CUresult cuMemFree(CUdeviceptr_v1 dptr)
{
	return free_device(dptr);
}

static CUresult info(uint64_t *free_bytes, uint64_t *total)
{
	struct simgpu_req req = {.op = SIMGPU_OP_MEMINFO};
	struct simgpu_rep rep;
	CUcontext ctx;
	CUresult ret = enter_context(&ctx);

	if (ret != CUDA_SUCCESS)
		return ret;
	ret = call(ctx->dev, &req, &rep);
	*free_bytes = rep.val[0];
	*total = rep.val[1];
	leave();
	return ret;
}

EXPORT CUresult cuMemGetInfo_v2(size_t *free_bytes, size_t *total)
{
	uint64_t f, t;
	CUresult ret = info(&f, &t);

	if (ret == CUDA_SUCCESS && free_bytes)
		*free_bytes = f;
	if (ret == CUDA_SUCCESS && total)
		*total = t;
	return ret;
}

EXPORT CUresult cuMemGetInfo(unsigned int *free_bytes, unsigned int *total)
{
	uint64_t f, t;
	CUresult ret = info(&f, &t);

	if (ret == CUDA_SUCCESS && free_bytes)
		*free_bytes = f > UINT32_MAX ? UINT32_MAX : (unsigned int)f;
	if (ret == CUDA_SUCCESS && total)
		*total = t > UINT32_MAX ? UINT32_MAX : (unsigned int)t;
	return ret;
}

EXPORT CUresult cuMemGetAddressRange_v2(CUdeviceptr *base, size_t *size, CUdeviceptr dptr)
{
	struct range *r;
	CUcontext ctx;
	CUresult ret = enter_context(&ctx);

	if (ret != CUDA_SUCCESS)
		return ret;
	r = range_find((uintptr_t)dptr);
	if (!r || r->kind == RANGE_REGISTERED) {
		ret = CUDA_ERROR_NOT_FOUND;
	} else {
		if (base)
			*base = r->start;
		if (size)
			*size = r->end - r->start;
	}
	leave();
	return ret;
}

EXPORT CUresult cuMemGetAddressRange(CUdeviceptr_v1 *base, unsigned int *size, CUdeviceptr_v1 dptr)
{
	CUdeviceptr b;
	size_t s;
	CUresult ret = cuMemGetAddressRange_v2(&b, &s, dptr);

	if (ret == CUDA_SUCCESS && base)
		*base = (CUdeviceptr_v1)b;
	if (ret == CUDA_SUCCESS && size)
		*size = s > UINT32_MAX ? UINT32_MAX : (unsigned int)s;
	return ret;
}

/* ---- host memory ------------------------------------------------------------------- */

static CUresult allocate_host(void **out, size_t size, unsigned int flags)
{
	struct range *r = NULL;
	CUcontext ctx;
	void *p;
	CUresult ret = enter_context(&ctx);

	if (ret != CUDA_SUCCESS)
		return ret;
	if (!out || size == 0 || size > SIZE_MAX / 2) {
		leave();
		return CUDA_ERROR_INVALID_VALUE;
	}
	p = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
	if (p != MAP_FAILED) {
		r = range_add((uintptr_t)p, size, RANGE_HOST);
		if (!r)
			munmap(p, size);
	}
	if (r) {
		r->mapped = size;
		r->dev = ctx->dev;
		r->ctx = ctx;
		r->flags = flags;
		*out = p;
	}
	leave();
	return r ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

EXPORT CUresult cuMemHostAlloc(void **pp, size_t size, unsigned int flags)
{
	return flags > 7 ? CUDA_ERROR_INVALID_VALUE : allocate_host(pp, size, flags);
}

EXPORT CUresult cuMemAllocHost_v2(void **pp, size_t size)
{
	return allocate_host(pp, size, 0);
}

EXPORT CUresult cuMemAllocHost(void **pp, unsigned int size)
{
	return allocate_host(pp, size, 0);
}

EXPORT CUresult cuMemFreeHost(void *p)
{
	struct range *r;
	CUresult ret = enter();

	if (ret != CUDA_SUCCESS)
		return ret;
	r = range_at((uintptr_t)p);
	if (!r || r->kind != RANGE_HOST) {
		ret = CUDA_ERROR_INVALID_VALUE;
	} else {
		munmap(p, r->mapped);
		range_remove(r);
	}
	leave();
	return ret;
}

EXPORT CUresult cuMemHostRegister_v2(void *p, size_t size, unsigned int flags)
{
	struct range *r;
	CUcontext ctx;
	CUresult ret = enter_context(&ctx);

	if (ret != CUDA_SUCCESS)
		return ret;
	if (!p || size == 0 || size > UINTPTR_MAX - (uintptr_t)p) {
		ret = CUDA_ERROR_INVALID_VALUE;
	} else {
		r = range_add((uintptr_t)p, size, RANGE_REGISTERED);
		if (r) {
			r->dev = ctx->dev;
			r->ctx = ctx;
			r->flags = flags;
		} else {
			ret = CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED;
		}
	}
	leave();
	return ret;
}

EXPORT CUresult cuMemHostRegister(void *p, size_t size, unsigned int flags)
{
	return cuMemHostRegister_v2(p, size, flags);
}

EXPORT CUresult cuMemHostUnregister(void *p)
{
	struct range *r;
	CUresult ret = enter();

	if (ret != CUDA_SUCCESS)
		return ret;
	r = range_at((uintptr_t)p);
	if (!r || r->kind != RANGE_REGISTERED)
		ret = CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED;
	else
		range_remove(r);
	leave();
	return ret;
}

EXPORT CUresult cuMemHostGetDevicePointer_v2(CUdeviceptr *dptr, void *p, unsigned int flags)
{
	struct range *r;
	CUresult ret = enter();

	if (ret != CUDA_SUCCESS)
		return ret;
	r = range_find((uintptr_t)p);
	if (!dptr || flags != 0 || !r || (r->kind != RANGE_HOST && r->kind != RANGE_REGISTERED))
		ret = CUDA_ERROR_INVALID_VALUE;
	else
		*dptr = (CUdeviceptr)(uintptr_t)p; /* one address space */
	leave();
	return ret;
}

EXPORT CUresult cuMemHostGetDevicePointer(CUdeviceptr_v1 *dptr, void *p, unsigned int flags)
{
	CUdeviceptr wide;
	CUresult ret;

	if (!dptr)
		return CUDA_ERROR_INVALID_VALUE;
	ret = cuMemHostGetDevicePointer_v2(&wide, p, flags);
	if (ret == CUDA_SUCCESS && wide > UINT32_MAX)
		ret = CUDA_ERROR_INVALID_VALUE;
	if (ret == CUDA_SUCCESS)
		*dptr = (CUdeviceptr_v1)wide;
	return ret;
}

EXPORT CUresult cuMemHostGetFlags(unsigned int *flags, void *p)
{
	struct range *r;
	CUresult ret = enter();

	if (ret != CUDA_SUCCESS)
		return ret;
	r = range_find((uintptr_t)p);
	if (!flags || !r || r->kind != RANGE_HOST)
		ret = CUDA_ERROR_INVALID_VALUE;
	else
		*flags = r->flags;
	leave();
	return ret;
}

/* ---- what a pointer is ------------------------------------------------------------- */

static CUresult pointer_attribute(void *data, unsigned int attribute, struct range *r, uintptr_t at)
{
	bool host = r->kind == RANGE_HOST || r->kind == RANGE_REGISTERED;

	switch (attribute) {
	case CU_POINTER_ATTRIBUTE_CONTEXT:
		*(CUcontext *)data = r->ctx;
		return CUDA_SUCCESS;
	case CU_POINTER_ATTRIBUTE_MEMORY_TYPE:
		*(unsigned int *)data = host ? CU_MEMORYTYPE_HOST : CU_MEMORYTYPE_DEVICE;
		return CUDA_SUCCESS;
	case CU_POINTER_ATTRIBUTE_DEVICE_POINTER:
		*(CUdeviceptr *)data = at;
		return CUDA_SUCCESS;
	case CU_POINTER_ATTRIBUTE_HOST_POINTER:
		if (!host && r->kind != RANGE_MANAGED) {
			*(void **)data = NULL;
			return CUDA_ERROR_INVALID_VALUE;
		}
		*(void **)data = (void *)at;
		return CUDA_SUCCESS;
	case CU_POINTER_ATTRIBUTE_BUFFER_ID:
		*(unsigned long long *)data = r->id;
		return CUDA_SUCCESS;
	case CU_POINTER_ATTRIBUTE_IS_MANAGED:
		*(unsigned int *)data = r->kind == RANGE_MANAGED;
		return CUDA_SUCCESS;
	case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL:
		*(int *)data = r->dev->ordinal;
		return CUDA_SUCCESS;
	case CU_POINTER_ATTRIBUTE_RANGE_START_ADDR:
		*(void **)data = (void *)r->start;
		return CUDA_SUCCESS;
	case CU_POINTER_ATTRIBUTE_RANGE_SIZE:
		*(size_t *)data = r->end - r->start;
		return CUDA_SUCCESS;
	case CU_POINTER_ATTRIBUTE_MAPPED:
		*(unsigned int *)data = 1;
		return CUDA_SUCCESS;
	default:
		return CUDA_ERROR_NOT_SUPPORTED;
	}
}

EXPORT CUresult cuPointerGetAttribute(void *data, CUpointer_attribute attribute, CUdeviceptr ptr)
{
	struct range *r;
	CUresult ret = enter();

	if (ret != CUDA_SUCCESS)
		return ret;
	r = range_find((uintptr_t)ptr);
	if (!data || !r)
		ret = CUDA_ERROR_INVALID_VALUE;
	else
		ret = pointer_attribute(data, attribute, r, (uintptr_t)ptr);
	leave();
	return ret;
}

static size_t attribute_size(unsigned int attribute)
{
	switch (attribute) {
	case CU_POINTER_ATTRIBUTE_MEMORY_TYPE:
	case CU_POINTER_ATTRIBUTE_IS_MANAGED:
	case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL:
	case CU_POINTER_ATTRIBUTE_MAPPED:
		return sizeof(int);
	default:
		return sizeof(void *);
	}
}

/* Answers for any pointer: what does not apply to it is 0. */
EXPORT CUresult cuPointerGetAttributes(unsigned int count, CUpointer_attribute *attributes, void **data, CUdeviceptr ptr)
{
	struct range *r;
	unsigned int i;
	CUresult ret = enter();

	if (ret != CUDA_SUCCESS)
		return ret;
	if (count == 0 || !attributes || !data)
		ret = CUDA_ERROR_INVALID_VALUE;
	r = range_find((uintptr_t)ptr);
	for (i = 0; ret == CUDA_SUCCESS && i < count; i++) {
		if (!data[i])
			ret = CUDA_ERROR_INVALID_VALUE;
		else if (!r || pointer_attribute(data[i], attributes[i], r, (uintptr_t)ptr) != CUDA_SUCCESS)
			memset(data[i], 0, attribute_size(attributes[i]));
	}
	leave();
	return ret;
}
