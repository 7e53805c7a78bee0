/* SPDX-License-Identifier: Apache-2.0 */
#include "device.h"

#include <stdbool.h>
#include <string.h>

#include "account.h"
#include "context.h"
#include "real.h"

/* A device's number keeps its GPU for the life of the process, and an entry its GPU for the life
 * of the pod, so an answer is kept. An answer of none is not: the pages may come later. */
static struct {
	uint32_t entry; /* 0: unknown, else the entry + 1 */
} devices[DEVICES];

static bool uuid_of(CUdevice device, CUuuid *uuid)
{
	/* The first version names the GPU where the second names the MIG instance. */
	fn_cuDeviceGetUuid_v2 *get = REAL(cuDeviceGetUuid_v2);
	if (get == NULL)
		get = REAL(cuDeviceGetUuid);
	return get != NULL && get(uuid, device) == CUDA_SUCCESS;
}

int device_gpu(CUdevice device)
{
	CUuuid uuid;
	if (device < 0 || device >= DEVICES)
		return -1;
	uint32_t known = __atomic_load_n(&devices[device].entry, __ATOMIC_RELAXED);
	if (__builtin_expect(known != 0, 1))
		return (int)known - 1;
	if (!uuid_of(device, &uuid))
		return -1;
	uint8_t raw[16];
	memcpy(raw, uuid.bytes, sizeof raw);
	int gpu = account_gpu(raw);
	if (gpu >= 0)
		__atomic_store_n(&devices[device].entry, (uint32_t)gpu + 1, __ATOMIC_RELAXED);
	return gpu;
}

CUdevice device_of_location(CUmemLocation location)
{
	if (location.type == CU_MEM_LOCATION_TYPE_DEVICE)
		return location.id;
	return location.type == CU_MEM_LOCATION_TYPE_DEVICE_LOCALITY_DOMAIN ? location.id & 0xff : -1;
}

int device_current(uint64_t *owner)
{
	CUdevice device;
	CUcontext context = NULL;
	fn_cuCtxGetDevice *get_device = REAL(cuCtxGetDevice);
	fn_cuCtxGetCurrent *get_context = REAL(cuCtxGetCurrent);
	*owner = 0;
	/* Without a current context there is no device, and the call that asks will fail. */
	if (get_device == NULL || get_device(&device) != CUDA_SUCCESS)
		return -1;
	int gpu = device_gpu(device);
	if (gpu >= 0 && get_context != NULL && get_context(&context) == CUDA_SUCCESS)
		*owner = context_owner(context);
	return gpu;
}

static int digit(char c)
{
	if (c >= '0' && c <= '9')
		return c - '0';
	if (c >= 'a' && c <= 'f')
		return c - 'a' + 10;
	if (c >= 'A' && c <= 'F')
		return c - 'A' + 10;
	return -1;
}

int device_parse_uuid(const char *text, uint8_t uuid[16])
{
	if (strncmp(text, "GPU-", 4) != 0 && strncmp(text, "MIG-", 4) != 0)
		return -1;
	text += 4;
	for (int i = 0; i < 16; i++) {
		if (i == 4 || i == 6 || i == 8 || i == 10)
			if (*text++ != '-')
				return -1;
		int high = digit(text[0]), low = high < 0 ? -1 : digit(text[1]);
		if (low < 0)
			return -1;
		uuid[i] = (uint8_t)(high << 4 | low);
		text += 2;
	}
	/* Something behind it, as old drivers name MIG instances, is not this GPU. */
	return *text == 0 ? 0 : -1;
}

int device_nvml(nvmlDevice_t device)
{
	char text[NVML_DEVICE_UUID_V2_BUFFER_SIZE] = "";
	uint8_t uuid[16];
	fn_nvmlDeviceGetUUID *get = REAL(nvmlDeviceGetUUID);
	if (get == NULL || get(device, text, sizeof text) != NVML_SUCCESS)
		return -1;
	text[sizeof text - 1] = 0;
	return device_parse_uuid(text, uuid) == 0 ? account_gpu(uuid) : -1;
}
