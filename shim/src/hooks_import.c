/* SPDX-License-Identifier: Apache-2.0 */
/*
 * hooks_import.c: memory of other processes that this one takes part in. It is its owner's and is not
 * charged; but NVML may show it under both, so the ledger says that there is such memory. How much
 * of it is not followed: a shareable handle does not tell, and gpufenced believes only what NVML
 * itself shows twice (enforcer/policy, shared.go). cuMemImportFromShareableHandle is in hooks_vmm.c.
 */
#include "account.h"
#include "real.h"

static CUresult opened(CUresult result)
{
	if (result == CUDA_SUCCESS)
		account_imported();
	return result;
}

CUresult hook_cuIpcOpenMemHandle(CUdeviceptr *pointer, CUipcMemHandle handle, unsigned int flags)
{
	fn_cuIpcOpenMemHandle *real = REAL(cuIpcOpenMemHandle);
	return real != NULL ? opened(real(pointer, handle, flags)) : CUDA_ERROR_NOT_SUPPORTED;
}
EXPORT(cuIpcOpenMemHandle);

CUresult hook_cuIpcOpenMemHandle_v2(CUdeviceptr *pointer, CUipcMemHandle handle, unsigned int flags)
{
	fn_cuIpcOpenMemHandle_v2 *real = REAL(cuIpcOpenMemHandle_v2);
	return real != NULL ? opened(real(pointer, handle, flags)) : CUDA_ERROR_NOT_SUPPORTED;
}
EXPORT(cuIpcOpenMemHandle_v2);

CUresult hook_cuMemPoolImportPointer(CUdeviceptr *pointer, CUmemoryPool pool, CUmemPoolPtrExportData *data)
{
	fn_cuMemPoolImportPointer *real = REAL(cuMemPoolImportPointer);
	return real != NULL ? opened(real(pointer, pool, data)) : CUDA_ERROR_NOT_SUPPORTED;
}
EXPORT(cuMemPoolImportPointer);

CUresult hook_cuImportExternalMemory(CUexternalMemory *memory, const CUDA_EXTERNAL_MEMORY_HANDLE_DESC *desc)
{
	fn_cuImportExternalMemory *real = REAL(cuImportExternalMemory);
	return real != NULL ? opened(real(memory, desc)) : CUDA_ERROR_NOT_SUPPORTED;
}
EXPORT(cuImportExternalMemory);
