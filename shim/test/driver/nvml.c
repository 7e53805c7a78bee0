/* SPDX-License-Identifier: Apache-2.0 */
#include "fake.h"

#include <stdio.h>
#include <string.h>

#define API __attribute__((visibility("default")))
#define NVML_ERROR_INVALID_ARGUMENT 2
#define DEVICES 2
#define VERSION_2 ((unsigned int)(sizeof(nvmlMemory_v2_t) | 2u << 24))

struct nvmlDevice_st {
	unsigned int index;
};

static struct nvmlDevice_st devices[DEVICES] = { { 0 }, { 1 } };
static unsigned long long used = UINT64_C(3) << 30;
static int failure;

API void fake_nvml_fail(nvmlReturn_t result);
void fake_nvml_fail(nvmlReturn_t result) { failure = result; }
API void fake_nvml_used(unsigned long long bytes);
void fake_nvml_used(unsigned long long bytes) { used = bytes; }

static int valid(nvmlDevice_t device) { return device >= devices && device < devices + DEVICES; }

API nvmlReturn_t nvmlDeviceGetHandleByIndex_v2(unsigned int index, nvmlDevice_t *device);
nvmlReturn_t nvmlDeviceGetHandleByIndex_v2(unsigned int index, nvmlDevice_t *device)
{
	if (index >= DEVICES || device == NULL)
		return NVML_ERROR_INVALID_ARGUMENT;
	*device = &devices[index];
	return NVML_SUCCESS;
}

API fn_nvmlDeviceGetUUID nvmlDeviceGetUUID;
nvmlReturn_t nvmlDeviceGetUUID(nvmlDevice_t device, char *text, unsigned int length)
{
	uint8_t u[16];
	if (!valid(device) || text == NULL || length < 41)
		return NVML_ERROR_INVALID_ARGUMENT;
	fake_uuid(device->index, u);
	snprintf(text, length, "GPU-%02x%02x%02x%02x-%02x%02x-%02x%02x-%02x%02x-%02x%02x%02x%02x%02x%02x", u[0], u[1],
		 u[2], u[3], u[4], u[5], u[6], u[7], u[8], u[9], u[10], u[11], u[12], u[13], u[14], u[15]);
	return NVML_SUCCESS;
}

API fn_nvmlDeviceGetMemoryInfo nvmlDeviceGetMemoryInfo;
nvmlReturn_t nvmlDeviceGetMemoryInfo(nvmlDevice_t device, nvmlMemory_t *memory)
{
	if (failure != 0)
		return failure;
	if (!valid(device) || memory == NULL)
		return NVML_ERROR_INVALID_ARGUMENT;
	memory->total = FAKE_TOTAL;
	memory->used = used + FAKE_RESERVED;
	memory->free = FAKE_TOTAL - memory->used;
	return NVML_SUCCESS;
}

API fn_nvmlDeviceGetMemoryInfo_v2 nvmlDeviceGetMemoryInfo_v2;
nvmlReturn_t nvmlDeviceGetMemoryInfo_v2(nvmlDevice_t device, nvmlMemory_v2_t *memory)
{
	if (failure != 0)
		return failure;
	if (!valid(device) || memory == NULL)
		return NVML_ERROR_INVALID_ARGUMENT;
	if (memory->version != VERSION_2)
		return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
	memory->total = FAKE_TOTAL;
	memory->reserved = FAKE_RESERVED;
	memory->used = used;
	memory->free = FAKE_TOTAL - used - FAKE_RESERVED;
	return NVML_SUCCESS;
}

/* The first of these is the caller. */
static unsigned int processes[8], process_count;
API void fake_nvml_processes(const unsigned int *pids, unsigned int n);
void fake_nvml_processes(const unsigned int *pids, unsigned int n)
{
	memcpy(processes, pids, n * sizeof pids[0]);
	process_count = n;
}

#define PROCESSES(symbol)                                                                                   \
	API fn_##symbol symbol;                                                                             \
	nvmlReturn_t symbol(nvmlDevice_t device, unsigned int *count, PROCESS_ROW *rows)                    \
	{                                                                                                   \
		if (failure != 0)                                                                           \
			return failure;                                                                     \
		if (!valid(device) || count == NULL || (*count > 0 && rows == NULL))                        \
			return NVML_ERROR_INVALID_ARGUMENT;                                                 \
		unsigned int room = *count;                                                                 \
		*count = process_count;                                                                     \
		if (room < process_count)                                                                   \
			return NVML_ERROR_INSUFFICIENT_SIZE;                                                \
		for (unsigned int i = 0; i < process_count; i++) {                                          \
			memset(&rows[i], 0, sizeof rows[i]);                                                \
			rows[i].pid = processes[i];                                                         \
			rows[i].usedGpuMemory = 1000 + i;                                                   \
		}                                                                                           \
		return NVML_SUCCESS;                                                                        \
	}

#define NVML_ERROR_INSUFFICIENT_SIZE 7
#define PROCESS_ROW nvmlProcessInfo_v1_t
PROCESSES(nvmlDeviceGetComputeRunningProcesses)
PROCESSES(nvmlDeviceGetGraphicsRunningProcesses)
PROCESSES(nvmlDeviceGetMPSComputeRunningProcesses)
#undef PROCESS_ROW
#define PROCESS_ROW nvmlProcessInfo_t
PROCESSES(nvmlDeviceGetComputeRunningProcesses_v2)
PROCESSES(nvmlDeviceGetComputeRunningProcesses_v3)
PROCESSES(nvmlDeviceGetGraphicsRunningProcesses_v2)
PROCESSES(nvmlDeviceGetGraphicsRunningProcesses_v3)
PROCESSES(nvmlDeviceGetMPSComputeRunningProcesses_v2)
PROCESSES(nvmlDeviceGetMPSComputeRunningProcesses_v3)

/* Rows in an array of the argument's. Of version 2, that nobody knows yet, everybody's, too. */
#define IN_ARRAY(symbol, type, count, array, version_1)                                                     \
	API fn_##symbol symbol;                                                                             \
	nvmlReturn_t symbol(nvmlDevice_t device, type *out)                                                 \
	{                                                                                                   \
		if (failure != 0)                                                                           \
			return failure;                                                                     \
		if (!valid(device) || out == NULL)                                                          \
			return NVML_ERROR_INVALID_ARGUMENT;                                                 \
		if (out->version != (version_1) && out->version != (version_1) + (1u << 24))                \
			return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;                                        \
		unsigned int room = out->array != NULL ? out->count : 0;                                    \
		out->count = process_count;                                                                 \
		if (room < process_count)                                                                   \
			return NVML_ERROR_INSUFFICIENT_SIZE;                                                \
		for (unsigned int i = 0; i < process_count; i++) {                                          \
			memset(&out->array[i], 0x77, sizeof out->array[i]);                                 \
			out->array[i].pid = processes[i];                                                   \
		}                                                                                           \
		return NVML_SUCCESS;                                                                        \
	}
IN_ARRAY(nvmlDeviceGetRunningProcessDetailList, nvmlProcessDetailList_t, numProcArrayEntries, procArray, NVML_PROCESS_DETAIL_LIST_V1)
IN_ARRAY(nvmlDeviceGetProcessesUtilizationInfo, nvmlProcessesUtilizationInfo_t, processSamplesCount, procUtilArray, NVML_PROCESSES_UTILIZATION_V1)

API fn_nvmlDeviceGetProcessUtilization nvmlDeviceGetProcessUtilization;
nvmlReturn_t nvmlDeviceGetProcessUtilization(nvmlDevice_t device, nvmlProcessUtilizationSample_t *samples, unsigned int *count,
					     unsigned long long last_seen)
{
	if (failure != 0)
		return failure;
	if (!valid(device) || count == NULL)
		return NVML_ERROR_INVALID_ARGUMENT;
	unsigned int room = samples != NULL ? *count : 0;
	*count = process_count;
	if (room < process_count)
		return NVML_ERROR_INSUFFICIENT_SIZE;
	for (unsigned int i = 0; i < process_count; i++)
		samples[i] = (nvmlProcessUtilizationSample_t){ .pid = processes[i], .timeStamp = last_seen + 1, .smUtil = 10 + i };
	return NVML_SUCCESS;
}
