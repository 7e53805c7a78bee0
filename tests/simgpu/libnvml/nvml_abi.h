/* SPDX-License-Identifier: Apache-2.0 */
/*
 * nvml_abi.h: the part of NVML's binary interface that the simulated libnvidia-ml.so.1 has.
 * Numbers, layouts and signatures are the interface of the real library; a test compares the
 * layouts with NVIDIA's published header where that is at hand.
 */
#ifndef SIMGPU_NVML_ABI_H
#define SIMGPU_NVML_ABI_H

#include <stdint.h>

enum sim_nvml_return {
	NVML_OK = 0,
	NVML_UNINITIALIZED = 1,
	NVML_INVALID_ARGUMENT = 2,
	NVML_NOT_SUPPORTED = 3,
	NVML_NO_PERMISSION = 4,
	NVML_NOT_FOUND = 6,
	NVML_INSUFFICIENT_SIZE = 7,
	NVML_DRIVER_NOT_LOADED = 9,
	NVML_FUNCTION_NOT_FOUND = 13,
	NVML_GPU_IS_LOST = 15,
	NVML_OPERATING_SYSTEM = 17,
	NVML_MEMORY = 20,
	NVML_VERSION_MISMATCH = 25,
	NVML_UNKNOWN = 999,
};

typedef struct sim_nvml_device *nvml_device;

struct nvml_memory {
	unsigned long long total, free, used;
};

struct nvml_memory_v2 {
	unsigned int version;
	unsigned long long total, reserved, free, used;
};
#define NVML_MEMORY_V2 ((unsigned int)sizeof(struct nvml_memory_v2) | 2u << 24)

struct nvml_process_v1 {
	unsigned int pid;
	unsigned long long used_gpu_memory;
};

struct nvml_process_v2 { /* also what v3 answers with */
	unsigned int pid;
	unsigned long long used_gpu_memory;
	unsigned int gpu_instance_id, compute_instance_id;
};

/* By mode, from Hopper on. */
struct nvml_process_detail {
	unsigned int pid;
	unsigned long long used_gpu_memory;
	unsigned int gpu_instance_id, compute_instance_id;
	unsigned long long used_protected_memory;
};

enum sim_nvml_process_mode {
	NVML_PROCESS_MODE_COMPUTE = 0,
	NVML_PROCESS_MODE_GRAPHICS = 1,
	NVML_PROCESS_MODE_MPS = 2,
	NVML_PROCESS_MODE_ALL = 3,
};

struct nvml_process_detail_list {
	unsigned int version, mode, count;
	struct nvml_process_detail *rows;
};
#define NVML_PROCESS_DETAIL_LIST_V1 ((unsigned int)sizeof(struct nvml_process_detail_list) | 1u << 24)

struct nvml_process_utilization {
	unsigned int pid;
	unsigned long long time_stamp;
	unsigned int sm_util, mem_util, enc_util, dec_util;
};

/* The oldest nvmlDeviceGetPciInfo fills up to device_id, _v2 up to subsystem_id, _v3 all. */
struct nvml_pci_info {
	char bus_id_legacy[16];
	unsigned int domain, bus, device, device_id, subsystem_id;
	char bus_id[32];
};

/* What a MIG instance has. */
struct nvml_attributes {
	unsigned int multiprocessors, copy_engines, decoders, encoders, jpeg, ofa, gpu_slices, compute_slices;
	unsigned long long memory_mb;
};

/* Limits of a cgroup, of drivers from R615 on. */
struct nvml_set_limits {
	const char *name_space; /* full path of the cgroup's folder */
	unsigned long long soft, hard;
};

struct nvml_get_limits {
	const char *name_space;
	unsigned long long soft, hard, used;
};

struct nvml_utilization {
	unsigned int gpu, memory;
};

/* What the library answers where it does not act: NVML_NOT_SUPPORTED, once it is initialised. */
int sim_nvml_refuse(void);

#endif /* SIMGPU_NVML_ABI_H */
