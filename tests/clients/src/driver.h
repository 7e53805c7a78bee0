/* SPDX-License-Identifier: Apache-2.0 */
/*
 * driver.h: the part of the CUDA driver API and of NVML that the test clients call,
 * declared here and resolved at run time, as programs in the field do. No vendor header is
 * needed to build, and none of the libraries to link.
 */
#ifndef CLIENTS_DRIVER_H
#define CLIENTS_DRIVER_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef int cu_result;
typedef int cu_device;
typedef void *cu_context;
typedef unsigned long long cu_deviceptr; /* CUdeviceptr of the _v2 ABI */

enum {
	CU_SUCCESS = 0,
	CU_OUT_OF_MEMORY = 2,
	CU_NOT_FOUND = 500,
};

struct cu_uuid {
	unsigned char bytes[16];
};

/* How the functions are found. */
enum resolve {
	RESOLVE_PROC,  /* as the CUDA 12.4 runtime: dlsym of cuGetProcAddress[_v2], then only that */
	RESOLVE_DLSYM, /* as older libraries: dlsym of every versioned name */
};

struct driver {
	cu_result (*init)(unsigned int flags);
	cu_result (*driver_version)(int *version);
	cu_result (*device_get)(cu_device *device, int ordinal);
	cu_result (*device_count)(int *count);
	cu_result (*device_name)(char *name, int len, cu_device device);
	cu_result (*device_uuid)(struct cu_uuid *uuid, cu_device device);
	cu_result (*device_total)(size_t *bytes, cu_device device);
	cu_result (*primary_retain)(cu_context *context, cu_device device);
	cu_result (*primary_release)(cu_device device);
	cu_result (*ctx_set_current)(cu_context context);
	cu_result (*ctx_get_current)(cu_context *context);
	cu_result (*mem_info)(size_t *free_bytes, size_t *total_bytes);
	cu_result (*mem_alloc)(cu_deviceptr *pointer, size_t bytes);
	cu_result (*mem_alloc_pitch)(cu_deviceptr *pointer, size_t *pitch, size_t width,
				     size_t height, unsigned int element_bytes);
	cu_result (*mem_alloc_managed)(cu_deviceptr *pointer, size_t bytes, unsigned int flags);
	cu_result (*mem_free)(cu_deviceptr pointer);
	cu_result (*error_name)(cu_result error, const char **name);

	const char *entry; /* the look-up function that was used */
};

/* Opens libcuda.so.1 and fills d. False with a sentence in why. */
bool driver_open(struct driver *d, enum resolve how, char *why, size_t why_bytes);

/* The name of a result, from the driver where it knows it. */
const char *driver_error(const struct driver *d, cu_result result);

/* NVML, as far as a container looks at its own memory. */
struct nvml_memory {
	unsigned long long total, free, used;
};

struct nvml_memory_v2 {
	unsigned int version; /* sizeof | 2 << 24 */
	unsigned long long total, reserved, free, used;
};

struct nvml {
	int (*init)(void);
	int (*handle_by_uuid)(const char *uuid, void **device);
	int (*handle_by_index)(unsigned int index, void **device);
	int (*memory)(void *device, struct nvml_memory *memory);
	int (*memory_v2)(void *device, struct nvml_memory_v2 *memory);
};

bool nvml_open(struct nvml *n, char *why, size_t why_bytes);

#endif
