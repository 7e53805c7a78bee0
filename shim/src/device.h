/* SPDX-License-Identifier: Apache-2.0 */
/*
 * device.h: from what a driver call names to the GPU's entry in the limits page. GPUs are known by
 * UUID; the driver's own numbering depends on the program's environment.
 */
#ifndef GPUFENCE_DEVICE_H
#define GPUFENCE_DEVICE_H

#include <stdint.h>

#include "driver_api.h"

#define DEVICES 64

/* The entry of a CUDA device, or -1. */
int device_gpu(CUdevice device);

/* The device that memory lies on by a call's own word, or -1: on the host, or nowhere in particular. */
CUdevice device_of_location(CUmemLocation location);

/* The entry of the calling thread's current device, or -1; *owner: what its context's blocks
 * are tracked under. */
int device_current(uint64_t *owner);

/* The entry of an NVML device or MIG instance, or -1. */
int device_nvml(nvmlDevice_t device);

/* Reads "GPU-..." and "MIG-..." with a UUID behind; 0, or -1. */
int device_parse_uuid(const char *text, uint8_t uuid[16]);

#endif
