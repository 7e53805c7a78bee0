/* SPDX-License-Identifier: Apache-2.0 */
/*
 * graphics.c: memory of OpenGL, VDPAU and EGL in CUDA. There is no such interface here, so every
 * number that is not 0 names a buffer or an image of one. Its memory is that interface's: what
 * CUDA makes of it (a registration, a mapping, an address, an array) takes nothing of the device.
 */
#include "internal.h"

#define BYTES ((size_t)1 << 20) /* of every buffer */
#define SIDE 512                /* of every image */

struct CUgraphicsResource_st {
	struct CUgraphicsResource_st *next;
	struct device *dev;
	unsigned int buffer; /* by the first interface: its number, which is what it is known by */
	bool image, mapped;
	uintptr_t at;
	CUmipmappedArray array;
};

static CUgraphicsResource resources;

CUresult cuMipmappedArrayGetLevel(CUarray *array, CUmipmappedArray mipmap, unsigned int level);

/* Of a handle, or where it would be. */
static CUgraphicsResource *find(CUgraphicsResource r)
{
	CUgraphicsResource *at = &resources;

	while (*at && *at != r)
		at = &(*at)->next;
	return at;
}

static CUgraphicsResource *find_buffer(unsigned int buffer)
{
	CUgraphicsResource *at = &resources;

	while (*at && (buffer == 0 || (*at)->buffer != buffer))
		at = &(*at)->next;
	return at;
}

static void drop(CUgraphicsResource *at)
{
	CUgraphicsResource r = *at;

	*at = r->next;
	if (r->at)
		unmap_device(r->at, BYTES);
	if (r->array)
		mipmap_drop(r->array);
	free(r);
}

static CUresult add(CUgraphicsResource *out, unsigned int name, unsigned int buffer, bool image, unsigned int flags)
{
	CUDA_ARRAY3D_DESCRIPTOR desc = {.Width = SIDE, .Height = SIDE, .Format = 0x20, .NumChannels = 1};
	CUgraphicsResource r = NULL;
	CUcontext ctx;
	CUresult ret = enter_context(&ctx);

	if (ret != CUDA_SUCCESS)
		return ret;
	if (!out || flags > 0xf)
		ret = CUDA_ERROR_INVALID_VALUE;
	else if (name == 0 || *find_buffer(buffer))
		ret = CUDA_ERROR_INVALID_HANDLE;
	else if (!(r = calloc(1, sizeof(*r))))
		ret = CUDA_ERROR_OUT_OF_MEMORY;
	if (ret == CUDA_SUCCESS) {
		r->dev = ctx->dev;
		r->buffer = buffer;
		r->image = image;
		if (image)
			ret = mipmap_on(&r->array, &desc, 1, ctx->dev, SIZE_MAX);
		else if (!(r->at = (uintptr_t)map_device(BYTES, true)) && !(r->at = (uintptr_t)map_device(BYTES, false)))
			ret = CUDA_ERROR_OUT_OF_MEMORY;
	}
	if (ret == CUDA_SUCCESS) {
		r->next = resources;
		resources = r;
		*out = r;
	} else {
		free(r);
	}
	leave();
	return ret;
}

EXPORT CUresult cuGraphicsGLRegisterBuffer(CUgraphicsResource *out, unsigned int buffer, unsigned int flags)
{
	return add(out, buffer, 0, false, flags);
}

EXPORT CUresult cuGraphicsGLRegisterImage(CUgraphicsResource *out, unsigned int image, unsigned int target, unsigned int flags)
{
	(void)target;
	return add(out, image, 0, true, flags);
}

EXPORT CUresult cuGraphicsEGLRegisterImage(CUgraphicsResource *out, void *image, unsigned int flags)
{
	return add(out, image != NULL, 0, true, flags);
}

EXPORT CUresult cuGraphicsVDPAURegisterVideoSurface(CUgraphicsResource *out, uint32_t surface, unsigned int flags)
{
	return add(out, surface, 0, true, flags);
}

EXPORT CUresult cuGraphicsVDPAURegisterOutputSurface(CUgraphicsResource *out, uint32_t surface, unsigned int flags)
{
	return add(out, surface, 0, true, flags);
}

static CUresult unregister(CUgraphicsResource *at)
{
	if (!*at)
		return CUDA_ERROR_INVALID_HANDLE;
	drop(at);
	return CUDA_SUCCESS;
}

EXPORT CUresult cuGraphicsUnregisterResource(CUgraphicsResource r)
{
	CUresult ret = enter();

	if (ret != CUDA_SUCCESS)
		return ret;
	ret = unregister(find(r));
	leave();
	return ret;
}

/* Says how it will be mapped: by handle, or by number. */
static CUresult set_flags(CUgraphicsResource r, unsigned int buffer, unsigned int flags)
{
	CUresult ret = enter();

	if (ret != CUDA_SUCCESS)
		return ret;
	r = *(r ? find(r) : find_buffer(buffer));
	if (!r)
		ret = CUDA_ERROR_INVALID_HANDLE;
	else if (flags > 2)
		ret = CUDA_ERROR_INVALID_VALUE;
	else if (r->mapped)
		ret = CUDA_ERROR_ALREADY_MAPPED;
	leave();
	return ret;
}

EXPORT CUresult cuGraphicsResourceSetMapFlags(CUgraphicsResource r, unsigned int flags)
{
	return set_flags(r, 0, flags);
}

EXPORT CUresult cuGraphicsResourceSetMapFlags_v2(CUgraphicsResource r, unsigned int flags)
{
	return set_flags(r, 0, flags);
}

/* All of them, or none. */
static CUresult map_locked(unsigned int count, const CUgraphicsResource *list, CUstream stream, bool mapped)
{
	unsigned int i;
	CUcontext ctx;
	CUresult ret = list && count > 0 ? stream_context(stream, &ctx) : CUDA_ERROR_INVALID_VALUE;

	for (i = 0; ret == CUDA_SUCCESS && i < count; i++) {
		if (!*find(list[i]))
			ret = CUDA_ERROR_INVALID_HANDLE;
		else if (list[i]->mapped == mapped)
			ret = mapped ? CUDA_ERROR_ALREADY_MAPPED : CUDA_ERROR_NOT_MAPPED;
	}
	for (i = 0; ret == CUDA_SUCCESS && i < count; i++)
		list[i]->mapped = mapped;
	return ret;
}

static CUresult map(unsigned int count, const CUgraphicsResource *list, CUstream stream, bool mapped)
{
	CUresult ret = enter();

	if (ret != CUDA_SUCCESS)
		return ret;
	ret = map_locked(count, list, stream, mapped);
	leave();
	return ret;
}

EXPORT CUresult cuGraphicsMapResources(unsigned int count, CUgraphicsResource *list, CUstream stream)
{
	return map(count, list, stream, true);
}

EXPORT CUresult cuGraphicsMapResources_ptsz(unsigned int count, CUgraphicsResource *list, CUstream stream)
{
	return map(count, list, per_thread(stream), true);
}

EXPORT CUresult cuGraphicsUnmapResources(unsigned int count, CUgraphicsResource *list, CUstream stream)
{
	return map(count, list, stream, false);
}

EXPORT CUresult cuGraphicsUnmapResources_ptsz(unsigned int count, CUgraphicsResource *list, CUstream stream)
{
	return map(count, list, per_thread(stream), false);
}

static CUresult mapped_pointer(uintptr_t *at, CUgraphicsResource r)
{
	CUresult ret = enter();

	if (ret != CUDA_SUCCESS)
		return ret;
	if (!*find(r))
		ret = CUDA_ERROR_INVALID_HANDLE;
	else if (r->image)
		ret = CUDA_ERROR_NOT_MAPPED_AS_POINTER;
	else if (!r->mapped)
		ret = CUDA_ERROR_NOT_MAPPED;
	else
		*at = r->at;
	leave();
	return ret;
}

EXPORT CUresult cuGraphicsResourceGetMappedPointer_v2(CUdeviceptr *dptr, size_t *size, CUgraphicsResource r)
{
	uintptr_t at = 0;
	CUresult ret = dptr && size ? mapped_pointer(&at, r) : CUDA_ERROR_INVALID_VALUE;

	if (ret == CUDA_SUCCESS) {
		*dptr = at;
		*size = BYTES;
	}
	return ret;
}

/* The first interface has no addresses above 4 GiB. */
static CUresult low(uintptr_t at, CUdeviceptr_v1 *dptr, unsigned int *size)
{
	if (at > UINT32_MAX - BYTES)
		return CUDA_ERROR_OUT_OF_MEMORY;
	*dptr = (CUdeviceptr_v1)at;
	*size = (unsigned int)BYTES;
	return CUDA_SUCCESS;
}

EXPORT CUresult cuGraphicsResourceGetMappedPointer(CUdeviceptr_v1 *dptr, unsigned int *size, CUgraphicsResource r)
{
	uintptr_t at = 0;
	CUresult ret = dptr && size ? mapped_pointer(&at, r) : CUDA_ERROR_INVALID_VALUE;

	return ret == CUDA_SUCCESS ? low(at, dptr, size) : ret;
}

static CUresult mapped_array(CUmipmappedArray *mipmap, CUgraphicsResource r)
{
	CUresult ret = enter();

	if (ret != CUDA_SUCCESS)
		return ret;
	if (!*find(r))
		ret = CUDA_ERROR_INVALID_HANDLE;
	else if (!r->image)
		ret = CUDA_ERROR_NOT_MAPPED_AS_ARRAY;
	else if (!r->mapped)
		ret = CUDA_ERROR_NOT_MAPPED;
	else
		*mipmap = r->array;
	leave();
	return ret;
}

EXPORT CUresult cuGraphicsResourceGetMappedMipmappedArray(CUmipmappedArray *mipmap, CUgraphicsResource r)
{
	return mipmap ? mapped_array(mipmap, r) : CUDA_ERROR_INVALID_VALUE;
}

EXPORT CUresult cuGraphicsSubResourceGetMappedArray(CUarray *array, CUgraphicsResource r, unsigned int index, unsigned int level)
{
	CUmipmappedArray mipmap = NULL;
	CUresult ret = array && index == 0 ? mapped_array(&mipmap, r) : CUDA_ERROR_INVALID_VALUE;

	return ret == CUDA_SUCCESS ? cuMipmappedArrayGetLevel(array, mipmap, level) : ret;
}

/* ---- the first interface: buffers by their number ------------------------------------------------ */

EXPORT CUresult cuGLInit(void)
{
	CUcontext ctx;
	CUresult ret = enter_context(&ctx);

	if (ret == CUDA_SUCCESS)
		leave();
	return ret;
}

EXPORT CUresult cuGLRegisterBufferObject(unsigned int buffer)
{
	CUgraphicsResource r;

	return add(&r, buffer, buffer, false, 0);
}

EXPORT CUresult cuGLUnregisterBufferObject(unsigned int buffer)
{
	CUresult ret = enter();

	if (ret != CUDA_SUCCESS)
		return ret;
	ret = unregister(find_buffer(buffer));
	leave();
	return ret;
}

EXPORT CUresult cuGLSetBufferObjectMapFlags(unsigned int buffer, unsigned int flags)
{
	return set_flags(NULL, buffer, flags);
}

static CUresult map_buffer(unsigned int buffer, CUstream stream, bool mapped, uintptr_t *at)
{
	CUgraphicsResource r;
	CUresult ret = enter();

	if (ret != CUDA_SUCCESS)
		return ret;
	r = *find_buffer(buffer);
	ret = r ? map_locked(1, &r, stream, mapped) : CUDA_ERROR_INVALID_HANDLE;
	if (ret == CUDA_SUCCESS)
		*at = r->at;
	leave();
	return ret;
}

static CUresult map_far(CUdeviceptr *dptr, size_t *size, unsigned int buffer, CUstream stream)
{
	uintptr_t at = 0;
	CUresult ret = dptr && size ? map_buffer(buffer, stream, true, &at) : CUDA_ERROR_INVALID_VALUE;

	if (ret == CUDA_SUCCESS) {
		*dptr = at;
		*size = BYTES;
	}
	return ret;
}

static CUresult map_low(CUdeviceptr_v1 *dptr, unsigned int *size, unsigned int buffer, CUstream stream)
{
	uintptr_t at = 0;
	CUresult ret = dptr && size ? map_buffer(buffer, stream, true, &at) : CUDA_ERROR_INVALID_VALUE;

	return ret == CUDA_SUCCESS ? low(at, dptr, size) : ret;
}

EXPORT CUresult cuGLMapBufferObject(CUdeviceptr_v1 *dptr, unsigned int *size, unsigned int buffer)
{
	return map_low(dptr, size, buffer, NULL);
}

EXPORT CUresult cuGLMapBufferObject_v2(CUdeviceptr *dptr, size_t *size, unsigned int buffer)
{
	return map_far(dptr, size, buffer, NULL);
}

EXPORT CUresult cuGLMapBufferObject_v2_ptds(CUdeviceptr *dptr, size_t *size, unsigned int buffer)
{
	return map_far(dptr, size, buffer, per_thread(NULL));
}

EXPORT CUresult cuGLMapBufferObjectAsync(CUdeviceptr_v1 *dptr, unsigned int *size, unsigned int buffer, CUstream stream)
{
	return map_low(dptr, size, buffer, stream);
}

EXPORT CUresult cuGLMapBufferObjectAsync_v2(CUdeviceptr *dptr, size_t *size, unsigned int buffer, CUstream stream)
{
	return map_far(dptr, size, buffer, stream);
}

EXPORT CUresult cuGLMapBufferObjectAsync_v2_ptsz(CUdeviceptr *dptr, size_t *size, unsigned int buffer, CUstream stream)
{
	return map_far(dptr, size, buffer, per_thread(stream));
}

EXPORT CUresult cuGLUnmapBufferObject(unsigned int buffer)
{
	uintptr_t at;

	return map_buffer(buffer, NULL, false, &at);
}

EXPORT CUresult cuGLUnmapBufferObjectAsync(unsigned int buffer, CUstream stream)
{
	uintptr_t at;

	return map_buffer(buffer, stream, false, &at);
}
