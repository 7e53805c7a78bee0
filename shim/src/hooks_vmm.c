/* SPDX-License-Identifier: Apache-2.0 */
/*
 * hooks_vmm.c: physical memory apart from its addresses (vmm.h). Memory is charged where it is
 * created, to its owner: not again where it is imported, mapped, or bound to a multicast object,
 * which has no memory of its own. What the driver may round, charge.h rounds; addresses are free.
 */
#include "charge.h"
#include "device.h"
#include "real.h"
#include "vmm.h"

CUresult hook_cuMemCreate(CUmemGenericAllocationHandle *handle, size_t bytes, const CUmemAllocationProp *prop,
			  unsigned long long flags)
{
	fn_cuMemCreate *real = REAL(cuMemCreate);
	struct charge c;
	if (real == NULL)
		return CUDA_ERROR_NOT_SUPPORTED;
	if (handle == NULL || prop == NULL)
		return real(handle, bytes, prop, flags);
	int gpu = device_gpu(device_of_location(prop->location));
	enum account_counter counter = prop->type == CU_MEM_ALLOCATION_TYPE_MANAGED ? ACCOUNT_MANAGED : ACCOUNT_DEVICE;
	if (!charge_begin_on(&c, "cuMemCreate", gpu, counter, bytes))
		return CUDA_ERROR_OUT_OF_MEMORY;
	CUresult result = real(handle, bytes, prop, flags);
	if (result != CUDA_SUCCESS)
		return charge_failed(c.gpu, c.counter, c.bytes, result);
	vmm_handle_add(*handle, vmm_new(c.gpu, c.counter, c.bytes));
	account_count_alloc();
	return result;
}
EXPORT(cuMemCreate);

CUresult hook_cuMemRelease(CUmemGenericAllocationHandle handle)
{
	fn_cuMemRelease *real = REAL(cuMemRelease);
	if (real == NULL)
		return CUDA_ERROR_NOT_SUPPORTED;
	vmm_object object = vmm_handle_take(handle);
	CUresult result = real(handle);
	if (result == CUDA_SUCCESS)
		vmm_unpin(object);
	else
		vmm_handle_add(handle, object);
	return result;
}
EXPORT(cuMemRelease);

CUresult hook_cuMemRetainAllocationHandle(CUmemGenericAllocationHandle *handle, void *address)
{
	fn_cuMemRetainAllocationHandle *real = REAL(cuMemRetainAllocationHandle);
	if (real == NULL)
		return CUDA_ERROR_NOT_SUPPORTED;
	vmm_object object = vmm_pin_address((uintptr_t)address);
	CUresult result = real(handle, address);
	if (result == CUDA_SUCCESS && handle != NULL)
		vmm_handle_add(*handle, object);
	else
		vmm_unpin(object);
	return result;
}
EXPORT(cuMemRetainAllocationHandle);

CUresult hook_cuMemImportFromShareableHandle(CUmemGenericAllocationHandle *handle, void *shared, int type)
{
	fn_cuMemImportFromShareableHandle *real = REAL(cuMemImportFromShareableHandle);
	if (real == NULL)
		return CUDA_ERROR_NOT_SUPPORTED;
	CUresult result = real(handle, shared, type);
	if (result == CUDA_SUCCESS && handle != NULL) {
		vmm_handle_import(*handle);
		account_imported();
	}
	return result;
}
EXPORT(cuMemImportFromShareableHandle);

CUresult hook_cuMemMap(CUdeviceptr address, size_t bytes, size_t offset, CUmemGenericAllocationHandle handle,
		       unsigned long long flags)
{
	fn_cuMemMap *real = REAL(cuMemMap);
	if (real == NULL)
		return CUDA_ERROR_NOT_SUPPORTED;
	vmm_object object = vmm_pin_handle(handle);
	CUresult result = real(address, bytes, offset, handle, flags);
	if (result == CUDA_SUCCESS)
		vmm_map_add(address, bytes, object);
	else
		vmm_unpin(object);
	return result;
}
EXPORT(cuMemMap);

CUresult hook_cuMemUnmap(CUdeviceptr address, size_t bytes)
{
	fn_cuMemUnmap *real = REAL(cuMemUnmap);
	if (real == NULL)
		return CUDA_ERROR_NOT_SUPPORTED;
	vmm_list mappings = vmm_map_take(address, bytes);
	CUresult result = real(address, bytes);
	if (result == CUDA_SUCCESS)
		vmm_drop(mappings);
	else
		vmm_map_restore(mappings);
	return result;
}
EXPORT(cuMemUnmap);

/* Before the driver has it: which part of the list it did is not known if it fails. */
static void map_arrays(const CUarrayMapInfo *list, unsigned int count)
{
	for (unsigned int i = 0; list != NULL && i < count; i++)
		if (list[i].memOperationType == CU_MEM_OPERATION_TYPE_MAP && list[i].memHandleType == 0)
			vmm_array_add((uintptr_t)list[i].resource, vmm_pin_handle(list[i].memHandle));
}

CUresult hook_cuMemMapArrayAsync(CUarrayMapInfo *list, unsigned int count, CUstream stream)
{
	fn_cuMemMapArrayAsync *real = REAL(cuMemMapArrayAsync);
	if (real == NULL)
		return CUDA_ERROR_NOT_SUPPORTED;
	map_arrays(list, count);
	return real(list, count, stream);
}
EXPORT(cuMemMapArrayAsync);

CUresult hook_cuMemMapArrayAsync_ptsz(CUarrayMapInfo *list, unsigned int count, CUstream stream)
{
	fn_cuMemMapArrayAsync_ptsz *real = REAL(cuMemMapArrayAsync_ptsz);
	if (real == NULL)
		return CUDA_ERROR_NOT_SUPPORTED;
	map_arrays(list, count);
	return real(list, count, stream);
}
EXPORT(cuMemMapArrayAsync_ptsz);

/* ---- multicast ---- */

CUresult hook_cuMulticastCreate(CUmemGenericAllocationHandle *handle, const CUmulticastObjectProp *prop)
{
	fn_cuMulticastCreate *real = REAL(cuMulticastCreate);
	if (real == NULL)
		return CUDA_ERROR_NOT_SUPPORTED;
	CUresult result = real(handle, prop);
	if (result == CUDA_SUCCESS && handle != NULL)
		vmm_handle_add(*handle, vmm_new(-1, ACCOUNT_DEVICE, 0));
	return result;
}
EXPORT(cuMulticastCreate);

/* What a call binds: its multicast object and the memory, both pinned. */
struct binding {
	vmm_object multicast, memory;
	int device; /* -1: not known */
	size_t offset, bytes;
};

static CUresult bind_end(const struct binding *b, CUresult result)
{
	if (result == CUDA_SUCCESS && b->multicast != 0)
		vmm_bind_add(b->multicast, b->device, b->offset, b->bytes, b->memory);
	else if (result != CUDA_SUCCESS)
		vmm_unpin(b->memory);
	/* Else it is bound to what we do not know, and stays charged. */
	vmm_unpin(b->multicast);
	return result;
}

static int device_of_memory(CUmemGenericAllocationHandle memory)
{
	CUmemAllocationProp prop;
	fn_cuMemGetAllocationPropertiesFromHandle *get = REAL(cuMemGetAllocationPropertiesFromHandle);
	return get != NULL && get(&prop, memory) == CUDA_SUCCESS ? prop.location.id : -1;
}

static int device_of_address(CUdeviceptr address)
{
	int device;
	fn_cuPointerGetAttribute *get = REAL(cuPointerGetAttribute);
	return get != NULL && get(&device, CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, address) == CUDA_SUCCESS ? device : -1;
}

CUresult hook_cuMulticastBindMem(CUmemGenericAllocationHandle handle, size_t at, CUmemGenericAllocationHandle memory,
				 size_t offset, size_t bytes, unsigned long long flags)
{
	fn_cuMulticastBindMem *real = REAL(cuMulticastBindMem);
	if (real == NULL)
		return CUDA_ERROR_NOT_SUPPORTED;
	struct binding b = { vmm_pin_handle(handle), vmm_pin_handle(memory), device_of_memory(memory), at, bytes };
	return bind_end(&b, real(handle, at, memory, offset, bytes, flags));
}
EXPORT(cuMulticastBindMem);

CUresult hook_cuMulticastBindMem_v2(CUmemGenericAllocationHandle handle, CUdevice device, size_t at,
				    CUmemGenericAllocationHandle memory, size_t offset, size_t bytes, unsigned long long flags)
{
	fn_cuMulticastBindMem_v2 *real = REAL(cuMulticastBindMem_v2);
	if (real == NULL)
		return CUDA_ERROR_NOT_SUPPORTED;
	struct binding b = { vmm_pin_handle(handle), vmm_pin_handle(memory), device, at, bytes };
	return bind_end(&b, real(handle, device, at, memory, offset, bytes, flags));
}
EXPORT(cuMulticastBindMem_v2);

CUresult hook_cuMulticastBindAddr(CUmemGenericAllocationHandle handle, size_t at, CUdeviceptr address, size_t bytes,
				  unsigned long long flags)
{
	fn_cuMulticastBindAddr *real = REAL(cuMulticastBindAddr);
	if (real == NULL)
		return CUDA_ERROR_NOT_SUPPORTED;
	struct binding b = { vmm_pin_handle(handle), vmm_pin_address(address), device_of_address(address), at, bytes };
	return bind_end(&b, real(handle, at, address, bytes, flags));
}
EXPORT(cuMulticastBindAddr);

CUresult hook_cuMulticastBindAddr_v2(CUmemGenericAllocationHandle handle, CUdevice device, size_t at, CUdeviceptr address,
				     size_t bytes, unsigned long long flags)
{
	fn_cuMulticastBindAddr_v2 *real = REAL(cuMulticastBindAddr_v2);
	if (real == NULL)
		return CUDA_ERROR_NOT_SUPPORTED;
	struct binding b = { vmm_pin_handle(handle), vmm_pin_address(address), device, at, bytes };
	return bind_end(&b, real(handle, device, at, address, bytes, flags));
}
EXPORT(cuMulticastBindAddr_v2);

CUresult hook_cuMulticastUnbind(CUmemGenericAllocationHandle handle, CUdevice device, size_t at, size_t bytes)
{
	fn_cuMulticastUnbind *real = REAL(cuMulticastUnbind);
	if (real == NULL)
		return CUDA_ERROR_NOT_SUPPORTED;
	vmm_object multicast = vmm_pin_handle(handle);
	vmm_list parts = vmm_bind_take(multicast, device, at, bytes);
	CUresult result = real(handle, device, at, bytes);
	if (result == CUDA_SUCCESS)
		vmm_drop(parts);
	else
		vmm_bind_restore(multicast, parts);
	vmm_unpin(multicast);
	return result;
}
EXPORT(cuMulticastUnbind);

/* ---- logical endpoints: multicast objects by another name, that are there until destroyed ---- */

/* As a handle of the driver's is none. */
static uint64_t endpoint_key(CUlogicalEndpointId id) { return UINT64_C(1) << 63 | id; }

/* The object of an endpoint, pinned; it is made when something is bound first. */
static vmm_object pin_endpoint(CUlogicalEndpointId id)
{
	vmm_object object = vmm_pin_handle(endpoint_key(id));
	if (object == 0) {
		vmm_handle_add(endpoint_key(id), vmm_new(-1, ACCOUNT_DEVICE, 0));
		object = vmm_pin_handle(endpoint_key(id));
	}
	return object;
}

CUresult hook_cuLogicalEndpointBindMem(CUlogicalEndpointId id, CUdevice device, uint64_t at, CUmemGenericAllocationHandle memory,
				       uint64_t offset, uint64_t bytes, unsigned long long flags)
{
	fn_cuLogicalEndpointBindMem *real = REAL(cuLogicalEndpointBindMem);
	if (real == NULL)
		return CUDA_ERROR_NOT_SUPPORTED;
	struct binding b = { pin_endpoint(id), vmm_pin_handle(memory), device, at, bytes };
	return bind_end(&b, real(id, device, at, memory, offset, bytes, flags));
}
EXPORT(cuLogicalEndpointBindMem);

CUresult hook_cuLogicalEndpointBindAddr(CUlogicalEndpointId id, CUdevice device, uint64_t at, void *address, uint64_t bytes,
					unsigned long long flags)
{
	fn_cuLogicalEndpointBindAddr *real = REAL(cuLogicalEndpointBindAddr);
	if (real == NULL)
		return CUDA_ERROR_NOT_SUPPORTED;
	struct binding b = { pin_endpoint(id), vmm_pin_address((uintptr_t)address), device, at, bytes };
	return bind_end(&b, real(id, device, at, address, bytes, flags));
}
EXPORT(cuLogicalEndpointBindAddr);

CUresult hook_cuLogicalEndpointUnbind(CUlogicalEndpointId id, CUdevice device, uint64_t at, uint64_t bytes)
{
	fn_cuLogicalEndpointUnbind *real = REAL(cuLogicalEndpointUnbind);
	if (real == NULL)
		return CUDA_ERROR_NOT_SUPPORTED;
	vmm_object endpoint = vmm_pin_handle(endpoint_key(id));
	vmm_list parts = vmm_bind_take(endpoint, device, at, bytes);
	CUresult result = real(id, device, at, bytes);
	if (result == CUDA_SUCCESS)
		vmm_drop(parts);
	else
		vmm_bind_restore(endpoint, parts);
	vmm_unpin(endpoint);
	return result;
}
EXPORT(cuLogicalEndpointUnbind);

CUresult hook_cuLogicalEndpointDestroy(CUlogicalEndpointId id)
{
	fn_cuLogicalEndpointDestroy *real = REAL(cuLogicalEndpointDestroy);
	if (real == NULL)
		return CUDA_ERROR_NOT_SUPPORTED;
	vmm_object endpoint = vmm_handle_take(endpoint_key(id));
	CUresult result = real(id);
	if (result == CUDA_SUCCESS)
		vmm_unpin(endpoint);
	else
		vmm_handle_add(endpoint_key(id), endpoint);
	return result;
}
EXPORT(cuLogicalEndpointDestroy);
