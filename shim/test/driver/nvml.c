/* SPDX-License-Identifier: Apache-2.0 */
#include "fake.h"

#include <stdio.h>
#include <string.h>

#define API __attribute__((visibility("default")))
#define NVML_ERROR_INVALID_ARGUMENT 2
#define NVML_ERROR_ARGUMENT_VERSION_MISMATCH 25
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
