/* SPDX-License-Identifier: Apache-2.0 */
/* cuda_vmm.c: physical memory, its handles, mappings and multicast objects. */
#include "driver.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#define OBJECTS 4096
#define HANDLE_BASE UINT64_C(0x1000)

/* A handle's number is the object's: the next object to come gets that of one that is gone. */
static struct object {
	uint64_t bytes; /* on the GPU; 0: imported, on the host, multicast */
	unsigned int handles, uses;
	CUdevice device;
	int multicast;
} objects[OBJECTS];

static struct use {
	uint64_t at, bytes; /* at: an address, or in a multicast object */
	struct object *object, *multicast;
	CUdevice device;
	int used;
} uses[OBJECTS];

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static struct object *find(CUmemGenericAllocationHandle handle)
{
	uint64_t n = handle - HANDLE_BASE;
	return n < OBJECTS && objects[n].handles > 0 ? &objects[n] : NULL;
}

static CUresult make(CUmemGenericAllocationHandle *handle, uint64_t bytes, CUdevice device, int multicast)
{
	for (unsigned int i = 0; i < OBJECTS; i++) {
		if (objects[i].handles != 0 || objects[i].uses != 0)
			continue;
		if (!take_bytes(bytes))
			return CUDA_ERROR_OUT_OF_MEMORY;
		objects[i] = (struct object){ bytes, 1, 0, device, multicast };
		*handle = HANDLE_BASE + i;
		return CUDA_SUCCESS;
	}
	abort();
}

static void unused(struct object *o)
{
	if (o->handles != 0 || o->uses != 0)
		return;
	live -= o->bytes;
	o->bytes = 0;
	for (unsigned int i = 0; o->multicast && i < OBJECTS; i++) {
		if (!uses[i].used || uses[i].multicast != o)
			continue;
		uses[i].used = 0;
		uses[i].object->uses--;
		unused(uses[i].object);
	}
}

static void use(uint64_t at, uint64_t bytes, struct object *o, struct object *multicast, CUdevice device)
{
	for (unsigned int i = 0; i < OBJECTS; i++) {
		if (uses[i].used)
			continue;
		uses[i] = (struct use){ at, bytes, o, multicast, device, 1 };
		o->uses++;
		return;
	}
	abort();
}

static CUresult locked(CUresult result)
{
	pthread_mutex_unlock(&lock);
	return result;
}

CUresult cuMemCreate(CUmemGenericAllocationHandle *handle, size_t bytes, const CUmemAllocationProp *prop, unsigned long long flags)
{
	ENTER();
	if (handle == NULL || prop == NULL || bytes == 0 || bytes % BLOCK != 0 || flags != 0)
		return CUDA_ERROR_INVALID_VALUE;
	if (prop->location.type == CU_MEM_LOCATION_TYPE_DEVICE && (prop->location.id < 0 || prop->location.id >= DEVICES))
		return CUDA_ERROR_INVALID_DEVICE;
	pthread_mutex_lock(&lock);
	return locked(make(handle, prop->location.type == CU_MEM_LOCATION_TYPE_DEVICE ? bytes : 0, prop->location.id, 0));
}

CUresult cuMemImportFromShareableHandle(CUmemGenericAllocationHandle *handle, void *shared, int type)
{
	ENTER();
	(void)type;
	if (handle == NULL || shared == NULL)
		return CUDA_ERROR_INVALID_VALUE;
	pthread_mutex_lock(&lock);
	/* Its own, by the handle; else a peer's. */
	struct object *o = find((uintptr_t)shared);
	if (o == NULL)
		return locked(make(handle, 0, 0, 0));
	o->handles++;
	*handle = (uintptr_t)shared;
	return locked(CUDA_SUCCESS);
}

CUresult cuMemRelease(CUmemGenericAllocationHandle handle)
{
	ENTER();
	pthread_mutex_lock(&lock);
	struct object *o = find(handle);
	if (o == NULL)
		return locked(CUDA_ERROR_INVALID_VALUE);
	o->handles--;
	unused(o);
	return locked(CUDA_SUCCESS);
}

CUresult cuMemRetainAllocationHandle(CUmemGenericAllocationHandle *handle, void *address)
{
	ENTER();
	pthread_mutex_lock(&lock);
	for (unsigned int i = 0; handle != NULL && i < OBJECTS; i++) {
		if (!uses[i].used || uses[i].multicast != NULL || (uintptr_t)address - uses[i].at >= uses[i].bytes)
			continue;
		uses[i].object->handles++;
		*handle = HANDLE_BASE + (uint64_t)(uses[i].object - objects);
		return locked(CUDA_SUCCESS);
	}
	return locked(CUDA_ERROR_INVALID_VALUE);
}

CUresult cuMemMap(CUdeviceptr address, size_t bytes, size_t offset, CUmemGenericAllocationHandle handle, unsigned long long flags)
{
	ENTER();
	pthread_mutex_lock(&lock);
	struct object *o = find(handle);
	if (o == NULL || bytes == 0 || offset != 0 || flags != 0)
		return locked(CUDA_ERROR_INVALID_VALUE);
	use(address, bytes, o, NULL, 0);
	return locked(CUDA_SUCCESS);
}

CUresult cuMemUnmap(CUdeviceptr address, size_t bytes)
{
	unsigned int n = 0;
	ENTER();
	pthread_mutex_lock(&lock);
	for (unsigned int i = 0; i < OBJECTS; i++) {
		if (!uses[i].used || uses[i].multicast != NULL || uses[i].at - address >= bytes)
			continue;
		uses[i].used = 0;
		uses[i].object->uses--;
		unused(uses[i].object);
		n++;
	}
	return locked(n > 0 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE);
}

API CUresult cuMemGetAllocationPropertiesFromHandle(CUmemAllocationProp *prop, CUmemGenericAllocationHandle handle)
{
	ENTER();
	pthread_mutex_lock(&lock);
	struct object *o = find(handle);
	if (o == NULL || prop == NULL)
		return locked(CUDA_ERROR_INVALID_VALUE);
	memset(prop, 0, sizeof *prop);
	prop->location = (CUmemLocation){ CU_MEM_LOCATION_TYPE_DEVICE, o->device };
	return locked(CUDA_SUCCESS);
}

static CUresult map_array(const CUarrayMapInfo *list, unsigned int count)
{
	return list != NULL && count > 0 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuMemMapArrayAsync(CUarrayMapInfo *list, unsigned int count, CUstream stream)
{
	ENTER();
	(void)stream;
	return map_array(list, count);
}

CUresult cuMemMapArrayAsync_ptsz(CUarrayMapInfo *list, unsigned int count, CUstream stream)
{
	ENTER();
	(void)stream;
	return map_array(list, count);
}

/* ---- multicast ---- */

CUresult cuMulticastCreate(CUmemGenericAllocationHandle *handle, const CUmulticastObjectProp *prop)
{
	ENTER();
	if (handle == NULL || prop == NULL)
		return CUDA_ERROR_INVALID_VALUE;
	pthread_mutex_lock(&lock);
	return locked(make(handle, 0, 0, 1));
}

static CUresult bind(CUmemGenericAllocationHandle handle, CUdevice device, size_t at, struct object *o, size_t bytes)
{
	struct object *multicast = find(handle);
	if (multicast == NULL || !multicast->multicast || o == NULL || o->multicast || bytes == 0)
		return CUDA_ERROR_INVALID_VALUE;
	use(at, bytes, o, multicast, device < 0 ? o->device : device);
	return CUDA_SUCCESS;
}

static struct object *at_address(CUdeviceptr address)
{
	for (unsigned int i = 0; i < OBJECTS; i++)
		if (uses[i].used && uses[i].multicast == NULL && address - uses[i].at < uses[i].bytes)
			return uses[i].object;
	return NULL;
}

API CUresult cuPointerGetAttribute(void *value, int attribute, CUdeviceptr address)
{
	ENTER();
	pthread_mutex_lock(&lock);
	struct object *o = at_address(address);
	if (o == NULL || attribute != CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL)
		return locked(CUDA_ERROR_INVALID_VALUE);
	*(int *)value = o->device;
	return locked(CUDA_SUCCESS);
}

CUresult cuMulticastBindMem(CUmemGenericAllocationHandle handle, size_t at, CUmemGenericAllocationHandle memory, size_t offset,
			    size_t bytes, unsigned long long flags)
{
	ENTER();
	(void)offset, (void)flags;
	pthread_mutex_lock(&lock);
	return locked(bind(handle, -1, at, find(memory), bytes));
}

CUresult cuMulticastBindMem_v2(CUmemGenericAllocationHandle handle, CUdevice device, size_t at, CUmemGenericAllocationHandle memory,
			       size_t offset, size_t bytes, unsigned long long flags)
{
	ENTER();
	(void)offset, (void)flags;
	pthread_mutex_lock(&lock);
	return locked(bind(handle, device, at, find(memory), bytes));
}

CUresult cuMulticastBindAddr(CUmemGenericAllocationHandle handle, size_t at, CUdeviceptr address, size_t bytes, unsigned long long flags)
{
	ENTER();
	(void)flags;
	pthread_mutex_lock(&lock);
	return locked(bind(handle, -1, at, at_address(address), bytes));
}

CUresult cuMulticastBindAddr_v2(CUmemGenericAllocationHandle handle, CUdevice device, size_t at, CUdeviceptr address, size_t bytes,
				unsigned long long flags)
{
	ENTER();
	(void)flags;
	pthread_mutex_lock(&lock);
	return locked(bind(handle, device, at, at_address(address), bytes));
}

CUresult cuMulticastUnbind(CUmemGenericAllocationHandle handle, CUdevice device, size_t at, size_t bytes)
{
	unsigned int n = 0;
	ENTER();
	pthread_mutex_lock(&lock);
	struct object *multicast = find(handle);
	for (unsigned int i = 0; multicast != NULL && i < OBJECTS; i++) {
		if (!uses[i].used || uses[i].multicast != multicast || uses[i].device != device || uses[i].at < at ||
		    uses[i].at + uses[i].bytes > at + bytes)
			continue;
		uses[i].used = 0;
		uses[i].object->uses--;
		unused(uses[i].object);
		n++;
	}
	return locked(n > 0 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE);
}

/* ---- logical endpoints: any number is one ---- */

static struct object endpoints[4] = { { 0, 1, 0, 0, 1 }, { 0, 1, 0, 0, 1 }, { 0, 1, 0, 0, 1 }, { 0, 1, 0, 0, 1 } };

static CUresult bind_endpoint(CUlogicalEndpointId id, CUdevice device, uint64_t at, struct object *o, uint64_t bytes)
{
	if (id >= 4 || o == NULL || bytes == 0)
		return CUDA_ERROR_INVALID_VALUE;
	use(at, bytes, o, &endpoints[id], device);
	return CUDA_SUCCESS;
}

CUresult cuLogicalEndpointBindMem(CUlogicalEndpointId id, CUdevice device, uint64_t at, CUmemGenericAllocationHandle memory,
				  uint64_t offset, uint64_t bytes, unsigned long long flags)
{
	ENTER();
	(void)offset, (void)flags;
	pthread_mutex_lock(&lock);
	return locked(bind_endpoint(id, device, at, find(memory), bytes));
}

CUresult cuLogicalEndpointBindAddr(CUlogicalEndpointId id, CUdevice device, uint64_t at, void *address, uint64_t bytes,
				   unsigned long long flags)
{
	ENTER();
	(void)flags;
	pthread_mutex_lock(&lock);
	return locked(bind_endpoint(id, device, at, at_address((uintptr_t)address), bytes));
}

static CUresult unbind_endpoint(CUlogicalEndpointId id, CUdevice device, uint64_t at, uint64_t bytes)
{
	unsigned int n = 0;
	pthread_mutex_lock(&lock);
	for (unsigned int i = 0; id < 4 && i < OBJECTS; i++) {
		if (!uses[i].used || uses[i].multicast != &endpoints[id] || (device >= 0 && uses[i].device != device) ||
		    uses[i].at < at || uses[i].at + uses[i].bytes > at + bytes)
			continue;
		uses[i].used = 0;
		uses[i].object->uses--;
		unused(uses[i].object);
		n++;
	}
	return locked(n > 0 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE);
}

CUresult cuLogicalEndpointUnbind(CUlogicalEndpointId id, CUdevice device, uint64_t at, uint64_t bytes)
{
	ENTER();
	return unbind_endpoint(id, device, at, bytes);
}

CUresult cuLogicalEndpointDestroy(CUlogicalEndpointId id)
{
	ENTER();
	(void)unbind_endpoint(id, -1, 0, UINT64_MAX / 2);
	return id < 4 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

/* ---- other ways to a peer's memory ---- */

static CUresult of_a_peer(void *to) { return to != NULL ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE; }

CUresult cuIpcOpenMemHandle(CUdeviceptr *pointer, CUipcMemHandle handle, unsigned int flags)
{
	ENTER();
	(void)handle, (void)flags;
	return of_a_peer(pointer);
}

CUresult cuIpcOpenMemHandle_v2(CUdeviceptr *pointer, CUipcMemHandle handle, unsigned int flags)
{
	ENTER();
	(void)handle, (void)flags;
	return of_a_peer(pointer);
}

CUresult cuMemPoolImportPointer(CUdeviceptr *pointer, CUmemoryPool pool, CUmemPoolPtrExportData *data)
{
	ENTER();
	(void)pool, (void)data;
	return of_a_peer(pointer);
}

CUresult cuImportExternalMemory(CUexternalMemory *memory, const CUDA_EXTERNAL_MEMORY_HANDLE_DESC *desc)
{
	ENTER();
	(void)desc;
	return of_a_peer(memory);
}
