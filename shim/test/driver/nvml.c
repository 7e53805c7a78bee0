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
