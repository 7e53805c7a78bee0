/* SPDX-License-Identifier: Apache-2.0 */
/* hooks_nvml.c: the same grant through NVML, and who of the pod holds it. */
#include <string.h>

#include "account.h"
#include "device.h"
#include "pages.h"
#include "real.h"

/* Of the host's pid namespace; the kernel has it as a constant. */
#define HOST_PIDNS_INODE UINT64_C(0xeffffffc)

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

/*
 * The process lists. Where the driver translates process numbers to the caller's, of these only the
 * pod's stay: nobody needs to know of the others on a GPU that is shared. It does so if it shows
 * one that is in the pod's ledger, and there is nothing to translate where we have the host's
 * numbers ourselves; otherwise they are the host's, mean nothing here, and stay as they are. NVML's own count stands where the caller's room is too small: it is never too low.
 */
static void keep_own(unsigned int *count, char *rows, size_t row_bytes)
{
	unsigned int n = *count, kept = 0;
	bool translated = pages_pidns_inode() == HOST_PIDNS_INODE;
	for (unsigned int i = 0; i < n && !translated; i++)
		translated = account_has_process(*(const unsigned int *)(const void *)(rows + i * row_bytes));
	for (unsigned int i = 0; translated && i < n; i++) {
		const char *row = rows + i * row_bytes;
		if (account_has_process(*(const unsigned int *)(const void *)row))
			memmove(rows + kept++ * row_bytes, row, row_bytes);
	}
	if (translated)
		*count = kept;
}

#define PROCESSES(symbol, type)                                                                       \
	nvmlReturn_t hook_##symbol(nvmlDevice_t device, unsigned int *count, type *rows)              \
	{                                                                                             \
		struct account_view view;                                                             \
		real_refresh(TABLE_NVML);                                                             \
		fn_##symbol *real = REAL(symbol);                                                     \
		if (real == NULL)                                                                     \
			return NVML_ERROR_FUNCTION_NOT_FOUND;                                         \
		nvmlReturn_t result = real(device, count, rows);                                      \
		if (result == NVML_SUCCESS && count != NULL && rows != NULL && *count > 0 &&          \
		    account_view(device_nvml(device), &view))                                         \
			keep_own(count, (char *)rows, sizeof *rows);                                  \
		return result;                                                                        \
	}                                                                                             \
	EXPORT(symbol)

PROCESSES(nvmlDeviceGetComputeRunningProcesses, nvmlProcessInfo_v1_t);
PROCESSES(nvmlDeviceGetComputeRunningProcesses_v2, nvmlProcessInfo_t);
PROCESSES(nvmlDeviceGetComputeRunningProcesses_v3, nvmlProcessInfo_t);
PROCESSES(nvmlDeviceGetGraphicsRunningProcesses, nvmlProcessInfo_v1_t);
PROCESSES(nvmlDeviceGetGraphicsRunningProcesses_v2, nvmlProcessInfo_t);
PROCESSES(nvmlDeviceGetGraphicsRunningProcesses_v3, nvmlProcessInfo_t);
PROCESSES(nvmlDeviceGetMPSComputeRunningProcesses, nvmlProcessInfo_v1_t);
PROCESSES(nvmlDeviceGetMPSComputeRunningProcesses_v2, nvmlProcessInfo_t);
PROCESSES(nvmlDeviceGetMPSComputeRunningProcesses_v3, nvmlProcessInfo_t);
