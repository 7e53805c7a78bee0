/* SPDX-License-Identifier: Apache-2.0 */
/*
 * share.c: memory of one process in another: IPC handles, and external memory.
 *
 * simgpud knows shared memory by a token or by a descriptor and counts who holds it. Contents
 * are not shared: every process sees its own.
 */
#include "internal.h"

#include <sys/random.h>

/* ---- tokens and descriptors ---------------------------------------------------------- */

/* fd: a descriptor that stands for the memory too; NULL: only the token. */
CUresult export_memory(struct device *dev, uint64_t handle, uint64_t value, uint64_t *token, int *fd)
{
	struct simgpu_req req = {.op = SIMGPU_OP_EXPORT, .arg = {handle, fd != NULL, value}};
	struct simgpu_rep rep;
	CUresult ret = call_with(dev, &req, &rep, NULL, fd);

	if (ret == CUDA_SUCCESS && fd && *fd < 0)
		ret = CUDA_ERROR_OUT_OF_MEMORY; /* this process has no room for one more */
	if (ret == CUDA_SUCCESS && token)
		*token = rep.val[0];
	return ret;
}

CUresult import_token(struct device *dev, uint64_t token, CUcontext ctx, uint64_t *handle, size_t *size)
{
	struct simgpu_req req = {.op = SIMGPU_OP_IMPORT, .arg = {token, ctx ? ctx->handle : 0}};
	struct simgpu_rep rep;
	CUresult ret = token != 0 ? call(dev, &req, &rep) : CUDA_ERROR_INVALID_VALUE;

	if (ret == CUDA_SUCCESS) {
		*handle = rep.val[0];
		*size = rep.val[1];
	}
	return ret;
}

/* Whatever GPU it is on, of those that this process has. */
CUresult import_descriptor(int fd, struct device **dev, uint64_t *handle, size_t *size, uint64_t *value)
{
	struct simgpu_rep rep;
	CUresult ret = CUDA_ERROR_INVALID_DEVICE;
	int i;

	if (fd < 0)
		return CUDA_ERROR_INVALID_VALUE;
	for (i = 0; i < device_count && ret == CUDA_ERROR_INVALID_DEVICE; i++) {
		struct simgpu_req req = {.op = SIMGPU_OP_IMPORT};

		*dev = &devices[i];
		ret = call_with(*dev, &req, &rep, &fd, NULL);
	}
	if (ret != CUDA_SUCCESS)
		return ret;
	*handle = rep.val[0];
	*size = rep.val[1];
	*value = rep.val[2];
	return CUDA_SUCCESS;
}

/* ---- IPC ----------------------------------------------------------------------------- */

#define IPC_MAGIC UINT64_C(0x31637069754d6953)

/* What the 64 bytes of a handle are here. */
struct ipc {
	uint64_t magic, process, token, offset, size;
	uint8_t uuid[16];
	uint64_t reserved;
};
_Static_assert(sizeof(struct ipc) == sizeof(CUipcMemHandle), "as large as the interface's");

/* Tells this process from others: it must not open its own handles. */
static uint64_t process_number(void)
{
	static uint64_t number;

	/* Short only before the kernel's pool is ready, long before any program. */
	if (number == 0 && getrandom(&number, sizeof(number), 0) != sizeof(number))
		number = (uint64_t)getpid();
	return number;
}

EXPORT CUresult cuIpcGetMemHandle(CUipcMemHandle *handle, CUdeviceptr dptr)
{
	struct ipc ipc = {.magic = IPC_MAGIC};
	struct range *r;
	CUresult ret = enter();

	if (ret != CUDA_SUCCESS)
		return ret;
	r = range_find((uintptr_t)dptr);
	if (!handle || !r || r->kind != RANGE_DEVICE)
		ret = CUDA_ERROR_INVALID_VALUE; /* only what cuMemAlloc and cuMemAllocPitch gave */
	else
		ret = export_memory(r->dev, r->handle, 0, &ipc.token, NULL);
	if (ret == CUDA_SUCCESS) {
		ipc.process = process_number();
		ipc.offset = r->start % PAGE; /* of a part of a shared page */
		ipc.size = r->end - r->start;
		memcpy(ipc.uuid, r->dev->info.uuid, sizeof(ipc.uuid));
		memcpy(handle, &ipc, sizeof(ipc));
	}
	leave();
	return ret;
}

static struct device *device_with(const uint8_t *uuid)
{
	int i;

	for (i = 0; i < device_count; i++)
		if (memcmp(devices[i].info.uuid, uuid, sizeof(devices[i].info.uuid)) == 0)
			return &devices[i];
	return NULL;
}

/* One more address for memory that simgpud has let this process have. */
static struct range *map_shared(struct device *dev, uint64_t handle, size_t whole, size_t offset, size_t size)
{
	struct range *r = NULL;
	uintptr_t base;

	if (size == 0 || offset > whole || size > whole - offset)
		return NULL;
	base = (uintptr_t)map_device(whole, false);
	if (base)
		r = range_add(base + offset, size, RANGE_SHARED);
	if (!r) {
		if (base)
			unmap_device(base, whole);
		return NULL;
	}
	r->base = base;
	r->mapped = whole;
	r->dev = dev;
	r->handle = handle;
	return r;
}

static CUresult open_handle(CUdeviceptr *dptr, const CUipcMemHandle *handle, unsigned int flags)
{
	struct device *dev;
	struct range *r;
	struct ipc ipc;
	uint64_t given;
	CUcontext ctx;
	size_t size;
	CUresult ret = enter_context(&ctx);

	if (ret != CUDA_SUCCESS)
		return ret;
	memcpy(&ipc, handle, sizeof(ipc));
	dev = device_with(ipc.uuid);
	if (!dptr || flags > 1 || ipc.magic != IPC_MAGIC)
		ret = CUDA_ERROR_INVALID_VALUE;
	else if (ipc.process == process_number())
		ret = CUDA_ERROR_INVALID_CONTEXT;
	else if (!dev || dev != ctx->dev)
		ret = CUDA_ERROR_INVALID_DEVICE; /* there is no peer access here */
	r = ret == CUDA_SUCCESS ? range_by_token(dev, ipc.token) : NULL;
	if (r && r->start % PAGE == ipc.offset) {
		r->opens++;
		*dptr = r->start;
	} else if (ret == CUDA_SUCCESS) {
		ret = import_token(dev, ipc.token, ctx, &given, &size);
		if (ret == CUDA_SUCCESS) {
			r = map_shared(dev, given, size, ipc.offset, ipc.size);
			if (r) {
				r->ctx = ctx;
				r->token = ipc.token;
				r->opens = 1;
				*dptr = r->start;
			} else {
				give_memory(dev, given);
				ret = CUDA_ERROR_OUT_OF_MEMORY;
			}
		}
	}
	leave();
	return ret;
}

EXPORT CUresult cuIpcOpenMemHandle_v2(CUdeviceptr *dptr, CUipcMemHandle handle, unsigned int flags)
{
	return open_handle(dptr, &handle, flags);
}

EXPORT CUresult cuIpcOpenMemHandle(CUdeviceptr *dptr, CUipcMemHandle handle, unsigned int flags)
{
	return open_handle(dptr, &handle, flags);
}

EXPORT CUresult cuIpcCloseMemHandle(CUdeviceptr dptr)
{
	struct range *r;
	CUresult ret = enter();

	if (ret != CUDA_SUCCESS)
		return ret;
	r = range_at((uintptr_t)dptr);
	if (!r || r->kind != RANGE_SHARED || r->token == 0) {
		ret = CUDA_ERROR_INVALID_VALUE;
	} else if (--r->opens == 0) {
		give_memory(r->dev, r->handle);
		range_unmap(r);
		range_remove(r);
	}
	leave();
	return ret;
}

/* ---- external memory ----------------------------------------------------------------- */

struct CUextMemory_st {
	struct CUextMemory_st *next;
	struct device *dev;
	uint64_t handle;
	size_t size;
	unsigned int mapped; /* buffers that are not freed yet */
	bool destroyed;
};

static CUexternalMemory externals;

static CUexternalMemory *find_external(CUexternalMemory ext)
{
	CUexternalMemory *at = &externals;

	while (*at && (*at != ext || (*at)->destroyed))
		at = &(*at)->next;
	return at;
}

/* Only memory that came out of this driver: nothing else here can make any. */
EXPORT CUresult cuImportExternalMemory(CUexternalMemory *out, const CUDA_EXTERNAL_MEMORY_HANDLE_DESC *desc)
{
	CUexternalMemory ext;
	uint64_t value;
	CUcontext ctx;
	CUresult ret = enter_context(&ctx);

	if (ret != CUDA_SUCCESS)
		return ret;
	ext = out && desc ? calloc(1, sizeof(*ext)) : NULL;
	if (!out || !desc)
		ret = CUDA_ERROR_INVALID_VALUE;
	else if (desc->type != CU_EXTERNAL_MEMORY_HANDLE_TYPE_OPAQUE_FD)
		ret = CUDA_ERROR_NOT_SUPPORTED;
	else if (!ext)
		ret = CUDA_ERROR_OUT_OF_MEMORY;
	if (ret == CUDA_SUCCESS)
		ret = import_descriptor(desc->handle.fd, &ext->dev, &ext->handle, &ext->size, &value);
	if (ret == CUDA_SUCCESS && (ext->handle == 0 || desc->size == 0 || desc->size > ext->size)) {
		if (ext->handle != 0)
			give_memory(ext->dev, ext->handle);
		ret = CUDA_ERROR_INVALID_VALUE;
	}
	if (ret == CUDA_SUCCESS) {
		close(desc->handle.fd); /* it is the driver's now */
		ext->next = externals;
		externals = ext;
		*out = ext;
	} else {
		free(ext);
	}
	leave();
	return ret;
}

static void external_unused(CUexternalMemory ext)
{
	CUexternalMemory *at = &externals;

	if (!ext->destroyed || ext->mapped > 0)
		return;
	while (*at != ext)
		at = &(*at)->next;
	*at = ext->next;
	give_memory(ext->dev, ext->handle);
	free(ext);
}

static CUresult release_buffer(struct range *r)
{
	CUexternalMemory ext = r->owner;

	range_unmap(r);
	range_remove(r);
	ext->mapped--;
	external_unused(ext);
	return CUDA_SUCCESS;
}

EXPORT CUresult cuExternalMemoryGetMappedBuffer(CUdeviceptr *dptr, CUexternalMemory ext, const CUDA_EXTERNAL_MEMORY_BUFFER_DESC *desc)
{
	struct range *r;
	CUcontext ctx;
	CUresult ret = enter_context(&ctx);

	if (ret != CUDA_SUCCESS)
		return ret;
	if (!*find_external(ext)) {
		ret = CUDA_ERROR_INVALID_HANDLE;
	} else if (!dptr || !desc || desc->flags != 0) {
		ret = CUDA_ERROR_INVALID_VALUE;
	} else {
		r = map_shared(ext->dev, ext->handle, ext->size, desc->offset, desc->size);
		if (r) {
			r->release = release_buffer;
			r->owner = ext;
			ext->mapped++;
			*dptr = r->start;
		} else {
			ret = CUDA_ERROR_INVALID_VALUE;
		}
	}
	leave();
	return ret;
}

EXPORT CUresult cuExternalMemoryGetMappedMipmappedArray(CUmipmappedArray *mipmap, CUexternalMemory ext,
							const CUDA_EXTERNAL_MEMORY_MIPMAPPED_ARRAY_DESC *desc)
{
	CUcontext ctx;
	CUresult ret = enter_context(&ctx);

	if (ret != CUDA_SUCCESS)
		return ret;
	if (!*find_external(ext))
		ret = CUDA_ERROR_INVALID_HANDLE;
	else if (!mipmap || !desc || desc->offset > ext->size)
		ret = CUDA_ERROR_INVALID_VALUE;
	else
		ret = mipmap_on(mipmap, &desc->arrayDesc, desc->numLevels, ext->dev, ext->size - desc->offset);
	leave();
	return ret;
}

EXPORT CUresult cuDestroyExternalMemory(CUexternalMemory ext)
{
	CUresult ret = enter();

	if (ret != CUDA_SUCCESS)
		return ret;
	if (!*find_external(ext)) {
		ret = CUDA_ERROR_INVALID_HANDLE;
	} else {
		ext->destroyed = true;
		external_unused(ext);
	}
	leave();
	return ret;
}
