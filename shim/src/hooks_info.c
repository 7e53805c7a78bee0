/* SPDX-License-Identifier: Apache-2.0 */
/*
 * hooks_info.c: what a program sees of the GPU's memory: its grant. The driver answers first and
 * its error stands; then total and free are lowered to what the limits leave.
 */
#include "account.h"
#include "device.h"
#include "real.h"

static uint64_t lower(uint64_t a, uint64_t b) { return a < b ? a : b; }

CUresult hook_cuMemGetInfo(unsigned int *free, unsigned int *total)
{
	fn_cuMemGetInfo *real = REAL(cuMemGetInfo);
	struct account_view view;
	uint64_t owner;
	if (real == NULL)
		return CUDA_ERROR_NOT_SUPPORTED;
	CUresult result = real(free, total);
	if (result != CUDA_SUCCESS || !account_view(device_current(&owner), &view))
		return result;
	if (free != NULL)
		*free = (unsigned int)lower(*free, view.headroom_bytes);
	if (total != NULL)
		*total = (unsigned int)lower(*total, view.max_bytes);
	return result;
}
EXPORT(cuMemGetInfo);

CUresult hook_cuMemGetInfo_v2(size_t *free, size_t *total)
{
	fn_cuMemGetInfo_v2 *real = REAL(cuMemGetInfo_v2);
	struct account_view view;
	uint64_t owner;
	if (real == NULL)
		return CUDA_ERROR_NOT_SUPPORTED;
	CUresult result = real(free, total);
	if (result != CUDA_SUCCESS || !account_view(device_current(&owner), &view))
		return result;
	if (free != NULL)
		*free = lower(*free, view.headroom_bytes);
	if (total != NULL)
		*total = lower(*total, view.max_bytes);
	return result;
}
EXPORT(cuMemGetInfo_v2);

CUresult hook_cuDeviceTotalMem(unsigned int *bytes, CUdevice device)
{
	fn_cuDeviceTotalMem *real = REAL(cuDeviceTotalMem);
	struct account_view view;
	if (real == NULL)
		return CUDA_ERROR_NOT_SUPPORTED;
	CUresult result = real(bytes, device);
	if (result == CUDA_SUCCESS && bytes != NULL && account_view(device_gpu(device), &view))
		*bytes = (unsigned int)lower(*bytes, view.max_bytes);
	return result;
}
EXPORT(cuDeviceTotalMem);

CUresult hook_cuDeviceTotalMem_v2(size_t *bytes, CUdevice device)
{
	fn_cuDeviceTotalMem_v2 *real = REAL(cuDeviceTotalMem_v2);
	struct account_view view;
	if (real == NULL)
		return CUDA_ERROR_NOT_SUPPORTED;
	CUresult result = real(bytes, device);
	if (result == CUDA_SUCCESS && bytes != NULL && account_view(device_gpu(device), &view))
		*bytes = lower(*bytes, view.max_bytes);
	return result;
}
EXPORT(cuDeviceTotalMem_v2);
