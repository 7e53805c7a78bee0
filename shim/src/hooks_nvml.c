/* SPDX-License-Identifier: Apache-2.0 */
/* hooks_nvml.c: the same grant through NVML, and who of the pod holds it. */
#include <stddef.h>
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
 * numbers ourselves; otherwise they are the host's, mean nothing here, and stay as they are. NVML's own
 * count stands where the caller's room is too small: it is never too low.
 */
struct rows {
	char *first;
	size_t bytes, pid_at; /* of one */
};

static char *row_at(const struct rows *rows, unsigned int i) { return rows->first + i * rows->bytes; }

static bool row_is_own(const struct rows *rows, unsigned int i)
{
	uint32_t pid;
	memcpy(&pid, row_at(rows, i) + rows->pid_at, sizeof pid);
	return account_has_process(pid);
}

static bool in_account(nvmlDevice_t device)
{
	struct account_view view;
	return account_view(device_nvml(device), &view);
}

static void keep_own(nvmlDevice_t device, unsigned int *count, struct rows rows)
{
	unsigned int n = *count, kept = 0;
	if (rows.first == NULL || n == 0 || !in_account(device))
		return;
	bool translated = pages_pidns_inode() == HOST_PIDNS_INODE;
	for (unsigned int i = 0; i < n && !translated; i++)
		translated = row_is_own(&rows, i);
	if (!translated)
		return;
	for (unsigned int i = 0; i < n; i++)
		if (row_is_own(&rows, i))
			memmove(row_at(&rows, kept++), row_at(&rows, i), rows.bytes);
	/* Nor are the others to be read behind the count. */
	memset(row_at(&rows, kept), 0, (n - kept) * rows.bytes);
	*count = kept;
}

#define ROWS(array) ((struct rows){ (char *)(array), sizeof *(array), offsetof(__typeof(*(array)), pid) })

#define PROCESSES(symbol, type)                                                                       \
	nvmlReturn_t hook_##symbol(nvmlDevice_t device, unsigned int *count, type *rows)              \
	{                                                                                             \
		real_refresh(TABLE_NVML);                                                             \
		fn_##symbol *real = REAL(symbol);                                                     \
		if (real == NULL)                                                                     \
			return NVML_ERROR_FUNCTION_NOT_FOUND;                                         \
		nvmlReturn_t result = real(device, count, rows);                                      \
		if (result == NVML_SUCCESS && count != NULL)                                          \
			keep_own(device, count, ROWS(rows));                                          \
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

/* Rows of a version that we do not know would pass with everybody's: for us, too, the driver is as old
 * as we are, and a client asks again for what both know. */
nvmlReturn_t hook_nvmlDeviceGetRunningProcessDetailList(nvmlDevice_t device, nvmlProcessDetailList_t *list)
{
	real_refresh(TABLE_NVML);
	fn_nvmlDeviceGetRunningProcessDetailList *real = REAL(nvmlDeviceGetRunningProcessDetailList);
	if (real == NULL)
		return NVML_ERROR_FUNCTION_NOT_FOUND;
	if (list != NULL && list->version != NVML_PROCESS_DETAIL_LIST_V1 && in_account(device))
		return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
	nvmlReturn_t result = real(device, list);
	if (result == NVML_SUCCESS && list != NULL && list->version == NVML_PROCESS_DETAIL_LIST_V1)
		keep_own(device, &list->numProcArrayEntries, ROWS(list->procArray));
	return result;
}
EXPORT(nvmlDeviceGetRunningProcessDetailList);

/* What was busy: without a sample NVML says so, and not that there are none. */
static nvmlReturn_t keep_own_samples(nvmlDevice_t device, unsigned int *count, struct rows rows)
{
	unsigned int n = *count;
	keep_own(device, count, rows);
	return n > 0 && *count == 0 ? NVML_ERROR_NOT_FOUND : NVML_SUCCESS;
}

nvmlReturn_t hook_nvmlDeviceGetProcessUtilization(nvmlDevice_t device, nvmlProcessUtilizationSample_t *samples, unsigned int *count,
						  unsigned long long last_seen)
{
	real_refresh(TABLE_NVML);
	fn_nvmlDeviceGetProcessUtilization *real = REAL(nvmlDeviceGetProcessUtilization);
	if (real == NULL)
		return NVML_ERROR_FUNCTION_NOT_FOUND;
	nvmlReturn_t result = real(device, samples, count, last_seen);
	return result == NVML_SUCCESS && count != NULL ? keep_own_samples(device, count, ROWS(samples)) : result;
}
EXPORT(nvmlDeviceGetProcessUtilization);

nvmlReturn_t hook_nvmlDeviceGetProcessesUtilizationInfo(nvmlDevice_t device, nvmlProcessesUtilizationInfo_t *info)
{
	real_refresh(TABLE_NVML);
	fn_nvmlDeviceGetProcessesUtilizationInfo *real = REAL(nvmlDeviceGetProcessesUtilizationInfo);
	if (real == NULL)
		return NVML_ERROR_FUNCTION_NOT_FOUND;
	if (info != NULL && info->version != NVML_PROCESSES_UTILIZATION_V1 && in_account(device))
		return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
	nvmlReturn_t result = real(device, info);
	if (result == NVML_SUCCESS && info != NULL && info->version == NVML_PROCESSES_UTILIZATION_V1)
		result = keep_own_samples(device, &info->processSamplesCount, ROWS(info->procUtilArray));
	return result;
}
EXPORT(nvmlDeviceGetProcessesUtilizationInfo);
