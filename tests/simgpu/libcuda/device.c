/* SPDX-License-Identifier: Apache-2.0 */
/* device.c: what a device says about itself. */
#include "internal.h"

EXPORT CUresult cuDeviceGetCount(int *count)
{
	CUresult ret = enter();

	if (ret != CUDA_SUCCESS)
		return ret;
	if (count)
		*count = device_count;
	leave();
	return count ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

EXPORT CUresult cuDeviceGet(CUdevice *device, int ordinal)
{
	CUresult ret = enter();

	if (ret != CUDA_SUCCESS)
		return ret;
	if (!device)
		ret = CUDA_ERROR_INVALID_VALUE;
	else if (!device_at(ordinal))
		ret = CUDA_ERROR_INVALID_DEVICE;
	else
		*device = ordinal;
	leave();
	return ret;
}

/* Devices do not change after cuInit, so that no lock is needed behind this. */
static CUresult look(CUdevice dev, const void *out, const struct simgpu_device **info)
{
	CUresult ret = enter();
	struct device *d;

	if (ret != CUDA_SUCCESS)
		return ret;
	d = device_at(dev);
	leave();
	if (!out)
		return CUDA_ERROR_INVALID_VALUE;
	if (!d)
		return CUDA_ERROR_INVALID_DEVICE;
	*info = &d->info;
	return CUDA_SUCCESS;
}

EXPORT CUresult cuDeviceGetName(char *name, int len, CUdevice dev)
{
	const struct simgpu_device *info;
	CUresult ret = look(dev, name, &info);

	if (ret != CUDA_SUCCESS)
		return ret;
	if (len <= 0)
		return CUDA_ERROR_INVALID_VALUE;
	snprintf(name, (size_t)len, "%s", info->name);
	return CUDA_SUCCESS;
}

EXPORT CUresult cuDeviceGetUuid_v2(CUuuid *uuid, CUdevice dev)
{
	const struct simgpu_device *info;
	CUresult ret = look(dev, uuid, &info);

	if (ret == CUDA_SUCCESS)
		memcpy(uuid->bytes, info->uuid, sizeof(uuid->bytes));
	return ret;
}

/* The first version names the GPU of a MIG instance. */
EXPORT CUresult cuDeviceGetUuid(CUuuid *uuid, CUdevice dev)
{
	const struct simgpu_device *info;
	CUresult ret = look(dev, uuid, &info);

	if (ret == CUDA_SUCCESS)
		memcpy(uuid->bytes, info->gpu_uuid, sizeof(uuid->bytes));
	return ret;
}

EXPORT CUresult cuDeviceTotalMem_v2(size_t *bytes, CUdevice dev)
{
	const struct simgpu_device *info;
	CUresult ret = look(dev, bytes, &info);

	if (ret == CUDA_SUCCESS)
		*bytes = info->cuda_total_bytes;
	return ret;
}

EXPORT CUresult cuDeviceTotalMem(unsigned int *bytes, CUdevice dev)
{
	const struct simgpu_device *info;
	CUresult ret = look(dev, bytes, &info);

	if (ret == CUDA_SUCCESS)
		*bytes = info->cuda_total_bytes > UINT32_MAX ? UINT32_MAX : (unsigned int)info->cuda_total_bytes;
	return ret;
}

EXPORT CUresult cuDeviceComputeCapability(int *major, int *minor, CUdevice dev)
{
	const struct simgpu_device *info;
	CUresult ret = look(dev, major && minor ? major : NULL, &info);

	if (ret == CUDA_SUCCESS) {
		*major = (int)info->cc_major;
		*minor = (int)info->cc_minor;
	}
	return ret;
}

EXPORT CUresult cuDeviceGetPCIBusId(char *id, int len, CUdevice dev)
{
	const struct simgpu_device *info;
	CUresult ret = look(dev, id, &info);

	if (ret != CUDA_SUCCESS)
		return ret;
	if (len <= 0)
		return CUDA_ERROR_INVALID_VALUE;
	snprintf(id, (size_t)len, "%04X:%02X:%02X.0", info->pci_domain, info->pci_bus, info->pci_device);
	return CUDA_SUCCESS;
}

EXPORT CUresult cuDeviceGetByPCIBusId(CUdevice *dev, const char *id)
{
	unsigned int domain, bus, slot;
	CUresult ret = enter();
	int i;

	if (ret != CUDA_SUCCESS)
		return ret;
	ret = CUDA_ERROR_INVALID_VALUE;
	if (dev && id && sscanf(id, "%x:%x:%x", &domain, &bus, &slot) == 3) {
		ret = CUDA_ERROR_INVALID_DEVICE;
		for (i = 0; i < device_count; i++) {
			const struct simgpu_device *d = &devices[i].info;

			if (d->pci_domain == domain && d->pci_bus == bus && d->pci_device == slot) {
				*dev = i;
				ret = CUDA_SUCCESS;
			}
		}
	}
	leave();
	return ret;
}

EXPORT CUresult cuDeviceCanAccessPeer(int *can, CUdevice dev, CUdevice peer)
{
	const struct simgpu_device *info;
	CUresult ret = look(dev, can, &info);

	if (ret == CUDA_SUCCESS)
		ret = look(peer, can, &info);
	if (ret == CUDA_SUCCESS)
		*can = 0;
	return ret;
}

EXPORT CUresult cuDeviceGetP2PAttribute(int *value, CUdevice_P2PAttribute attribute, CUdevice dev, CUdevice peer)
{
	const struct simgpu_device *info;
	CUresult ret = look(dev, value, &info);

	(void)attribute;
	if (ret == CUDA_SUCCESS)
		ret = look(peer, value, &info);
	if (ret == CUDA_SUCCESS && dev == peer)
		ret = CUDA_ERROR_INVALID_DEVICE;
	if (ret == CUDA_SUCCESS)
		*value = 0;
	return ret;
}

/* Values that programs act on; docs/simulated-gpu.md. What is not here is 0. */
int device_attribute(const struct simgpu_device *d, unsigned int attribute)
{
	bool ampere = d->cc_major >= 8;

	switch (attribute) {
	case 1: /* threads per block */
	case 2: /* block x */
	case 3: /* block y */
		return 1024;
	case 4: /* block z */
		return 64;
	case 5: /* grid x */
		return 2147483647;
	case 6: /* grid y */
	case 7: /* grid z */
		return 65535;
	case 8: /* shared memory per block */
		return 49152;
	case 9: /* constant memory */
		return 65536;
	case 10: /* warp */
		return 32;
	case 11: /* pitch */
		return 2147483647;
	case 12: /* registers per block */
	case 82: /* and per multiprocessor */
		return 65536;
	case 13: /* clock, kHz */
		return 1590000;
	case 14: /* texture alignment */
	case 30: /* surface alignment */
		return 512;
	case 51: /* texture pitch alignment */
		return 32;
	case 16:
		return (int)d->sm_count;
	case 21: case 22: case 23: /* texture 1D, 2D */
	case 55: case 56: case 57: case 77: /* surface 1D, 2D, mipmapped 1D */
		return 131072;
	case 24: case 25: case 26: case 58: case 59: case 60: /* texture, surface 3D */
		return 16384;
	case 27: case 28: case 42: case 45: case 46: case 52: case 53: /* layered, gather, cube */
	case 61: case 63: case 64: case 66: case 67: case 73: case 74:
		return 32768;
	case 29: case 43: case 54: case 62: case 65: case 68: /* layers */
		return 2048;
	case 47: case 48: case 49: /* texture 3D, alternate */
		return 8192;
	case 69: /* linear texture 1D */
		return 268435456;
	case 70: case 71: /* linear texture 2D */
		return 131072;
	case 72: /* and its pitch */
		return 2097120;
	case 15: /* copies beside kernels */
	case 19: /* maps host memory */
	case 31: /* concurrent kernels */
	case 41: /* unified addressing */
	case 44: /* gathers from textures */
	case 78: /* stream priorities */
	case 79: /* L1 for globals */
	case 80: /* and for locals */
	case 83: /* managed memory */
	case 89: /* concurrently with the host */
	case 90: /* compute preemption */
	case 91: /* host pointers of registered memory */
	case 95: /* cooperative launch */
	case 99: /* host register */
	case 102: /* virtual memory management */
	case 103: /* its handles as file descriptors */
	case 115: /* memory pools */
		return 1;
	case 119: /* handle types of pools: file descriptor */
		return 1;
	case 32: /* ECC */
		return 1;
	case 33:
		return (int)d->pci_bus;
	case 34:
		return (int)d->pci_device;
	case 50:
		return (int)d->pci_domain;
	case 36: /* memory clock, kHz */
		return 5001000;
	case 37: /* bus width */
		return 256;
	case 38: /* L2 */
		return 4194304;
	case 39:
		return (int)d->threads_per_sm;
	case 40: /* copy engines */
		return 3;
	case 75:
		return (int)d->cc_major;
	case 76:
		return (int)d->cc_minor;
	case 81: /* shared memory per multiprocessor */
		return ampere ? 102400 : 65536;
	case 97: /* per block, on request */
		return ampere ? 101376 : 65536;
	case 87: /* single to double precision */
		return 32;
	case 106: /* blocks per multiprocessor */
		return 16;
	case 111: /* shared memory that the system keeps of each block */
		return ampere ? 1024 : 0;
	case 139:
		return (int)d->pci_device_id;
	case 140:
		return (int)d->pci_subsystem_id;
	default:
		return 0;
	}
}

EXPORT CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice dev)
{
	const struct simgpu_device *info;
	CUresult ret = look(dev, value, &info);

	if (ret != CUDA_SUCCESS)
		return ret;
	if ((unsigned int)attribute == 0 || (unsigned int)attribute >= SIM_ATTR_MAX)
		return CUDA_ERROR_INVALID_VALUE;
	*value = device_attribute(info, (unsigned int)attribute);
	return CUDA_SUCCESS;
}
