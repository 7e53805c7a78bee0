/* SPDX-License-Identifier: Apache-2.0 */
/* hooks_nvml.c: the same grant through NVML. */
#include "account.h"
#include "device.h"
#include "real.h"

static unsigned long long lower(unsigned long long a, uint64_t b) { return a < b ? a : b; }

/* Only where a limit holds: what an unlimited container sees is the GPU, others' use included. */
static bool view_of(nvmlDevice_t device, struct account_view *view)
{
	return account_view(device_nvml(device), view) && view->max_bytes != UINT64_MAX;
}

/* NVML is unloaded and loaded again by those who poll, and its calls are slow anyway. */
nvmlReturn_t hook_nvmlDeviceGetMemoryInfo(nvmlDevice_t device, nvmlMemory_t *memory)
{
	struct account_view view;
	real_refresh(TABLE_NVML);
	fn_nvmlDeviceGetMemoryInfo *real = REAL(nvmlDeviceGetMemoryInfo);
	if (real == NULL)
		return NVML_ERROR_FUNCTION_NOT_FOUND;
	nvmlReturn_t result = real(device, memory);
	if (result != NVML_SUCCESS || memory == NULL || !view_of(device, &view))
		return result;
	memory->total = lower(memory->total, view.max_bytes);
	memory->free = lower(memory->free, view.headroom_bytes);
	memory->used = view.charged_bytes;
	return result;
}
EXPORT(nvmlDeviceGetMemoryInfo);

nvmlReturn_t hook_nvmlDeviceGetMemoryInfo_v2(nvmlDevice_t device, nvmlMemory_v2_t *memory)
{
	struct account_view view;
	real_refresh(TABLE_NVML);
	fn_nvmlDeviceGetMemoryInfo_v2 *real = REAL(nvmlDeviceGetMemoryInfo_v2);
	if (real == NULL)
		return NVML_ERROR_FUNCTION_NOT_FOUND;
	nvmlReturn_t result = real(device, memory);
	if (result != NVML_SUCCESS || memory == NULL || !view_of(device, &view))
		return result;
	memory->total = lower(memory->total, view.max_bytes);
	memory->free = lower(memory->free, view.headroom_bytes);
	memory->used = view.charged_bytes;
	/* The driver's reserve is no part of a grant; with it, the parts would exceed the total. */
	memory->reserved = 0;
	return result;
}
EXPORT(nvmlDeviceGetMemoryInfo_v2);
