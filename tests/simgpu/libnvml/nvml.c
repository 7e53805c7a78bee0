/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The simulated libnvidia-ml.so.1: NVML's interface over simgpud's control socket.
 *
 * Calls of different threads run side by side, each on a connection of its own, so that one
 * that hangs keeps no other from its answer. Connections that are not in use wait in a pool.
 * A forked child drops the ones it inherited: answers would reach the wrong process.
 *
 * Lock: `lock` guards everything static. It is never held over a call to simgpud but in init.
 */
#define _GNU_SOURCE
#include "nvml_abi.h"

#include "../simgpu_client.h"

#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <strings.h>

#define EXPORT __attribute__((visibility("default")))

#define IDLE_MAX 16

struct sim_nvml_device {
	struct simgpu_device info;
	unsigned int index; /* among those that this process can see; of an instance: in its GPU */
	struct sim_nvml_device *gpu; /* of a MIG instance */
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static atomic_int owner; /* the process whose connections and lock these are */
static unsigned int init_count;
static struct simgpu_node node;
static struct sim_nvml_device devices[SIMGPU_GPUS_MAX]; /* GPUs, then instances */
static unsigned int device_count, instance_count;
static int idle[IDLE_MAX];
static unsigned int idle_count;

/*
 * Takes the lock. A forked child may find it held by a thread that it does not have, and
 * connections on which its parent still talks: it starts over with both.
 */
static void take_lock(void)
{
	int pid = (int)getpid(), was = atomic_load(&owner);

	if (was != pid && atomic_compare_exchange_strong(&owner, &was, pid) && was != 0) {
		pthread_mutex_t fresh = PTHREAD_MUTEX_INITIALIZER;

		lock = fresh;
		while (idle_count > 0)
			close(idle[--idle_count]);
	}
	pthread_mutex_lock(&lock);
}

/* ---- talking to simgpud ------------------------------------------------------------ */

static int take_connection(void)
{
	int fd = -1;

	take_lock();
	if (idle_count > 0)
		fd = idle[--idle_count];
	pthread_mutex_unlock(&lock);
	return fd >= 0 ? fd : simgpu_open(SIMGPU_CTL);
}

static void give_connection(int fd)
{
	take_lock();
	if (init_count > 0 && idle_count < IDLE_MAX) {
		idle[idle_count++] = fd;
		fd = -1;
	}
	pthread_mutex_unlock(&lock);
	if (fd >= 0)
		close(fd);
}

static int from_status(int32_t status)
{
	switch (status) {
	case SIMGPU_OK:
		return NVML_OK;
	case SIMGPU_E_INVALID:
		return NVML_INVALID_ARGUMENT;
	case SIMGPU_E_NOT_FOUND:
		return NVML_NOT_FOUND;
	case SIMGPU_E_LOST:
		return NVML_GPU_IS_LOST;
	case SIMGPU_E_NOT_SUPPORTED:
		return NVML_NOT_SUPPORTED;
	case SIMGPU_E_NOT_PERMITTED:
		return NVML_NO_PERMISSION;
	case SIMGPU_E_NO_CGROUP:
		return NVML_OPERATING_SYSTEM;
	default:
		return NVML_UNKNOWN;
	}
}

/* One request. A connection that broke is not used again; the next call makes a new one. */
static int ask_with(const int *pass, struct simgpu_req *req, struct simgpu_rep *rep, void *payload, size_t *len)
{
	int fd = take_connection();

	if (fd < 0)
		return NVML_UNKNOWN;
	if (simgpu_exchange(fd, req, rep, payload, len, pass, NULL) < 0) {
		close(fd);
		return NVML_UNKNOWN;
	}
	give_connection(fd);
	return from_status(rep->status);
}

static int ask(struct simgpu_req *req, struct simgpu_rep *rep, void *payload, size_t *len)
{
	return ask_with(NULL, req, rep, payload, len);
}

/* ---- start and end ----------------------------------------------------------------- */

static bool has_file(const char *name)
{
	char path[sizeof(((struct sockaddr_un *)0)->sun_path)];

	return simgpu_path(path, sizeof(path), name) == 0 && access(path, F_OK) == 0;
}

/* A GPU or an instance whose device file this process does not have is not there for it; one of
 * an instance shows its GPU, too. */
static bool visible(const struct simgpu_device *info)
{
	char name[32];
	unsigned int i;

	snprintf(name, sizeof(name), SIMGPU_GPU_PREFIX "%u", info->minor);
	if (info->mig_instance == 0 && has_file(name))
		return true;
	for (i = 0; i < SIMGPU_MIG_MAX; i++) {
		snprintf(name, sizeof(name), SIMGPU_GPU_PREFIX "%u" SIMGPU_MIG_INFIX "%u", info->minor, i);
		if (info->mig_instance == 0 ? i < info->mig_instances && has_file(name) : i == info->mig_instance - 1 && has_file(name))
			return true;
	}
	return false;
}

/* Fills node and devices. Called with the lock held, on a connection of its own. */
static int discover(int fd)
{
	struct simgpu_req req = {.op = SIMGPU_OP_NODE};
	struct simgpu_rep rep;
	size_t len = sizeof(node);
	uint32_t number;

	if (simgpu_call(fd, &req, &rep, &node, &len) < 0 || rep.status != SIMGPU_OK || len != sizeof(node))
		return NVML_DRIVER_NOT_LOADED;
	device_count = instance_count = 0;
	for (number = 0; number < node.gpu_count && number < SIMGPU_GPUS_MAX; number++) {
		struct sim_nvml_device *d = &devices[device_count + instance_count];
		unsigned int i;

		memset(&req, 0, sizeof(req));
		req.op = SIMGPU_OP_DEVICE;
		req.arg[0] = number;
		len = sizeof(d->info);
		if (simgpu_call(fd, &req, &rep, &d->info, &len) < 0 || rep.status != SIMGPU_OK || len != sizeof(d->info))
			return NVML_UNKNOWN;
		if (!visible(&d->info))
			continue;
		d->gpu = NULL;
		if (d->info.mig_instance == 0) {
			d->index = device_count++;
			continue;
		}
		/* Its GPU is visible if it is. */
		for (i = 0; i < device_count; i++)
			if (devices[i].info.minor == d->info.minor)
				d->gpu = &devices[i];
		d->index = d->info.mig_instance - 1;
		instance_count++;
	}
	return NVML_OK;
}

EXPORT int nvmlInitWithFlags(unsigned int flags)
{
	int ret = NVML_OK, fd;

	(void)flags; /* they concern failures that cannot happen here */
	take_lock();
	if (init_count == 0) {
		fd = simgpu_open(SIMGPU_CTL);
		ret = fd < 0 ? NVML_DRIVER_NOT_LOADED : discover(fd);
		if (ret == NVML_OK && idle_count < IDLE_MAX)
			idle[idle_count++] = fd;
		else if (fd >= 0)
			close(fd);
	}
	if (ret == NVML_OK)
		init_count++;
	pthread_mutex_unlock(&lock);
	return ret;
}

EXPORT int nvmlInit_v2(void)
{
	return nvmlInitWithFlags(0);
}

EXPORT int nvmlInit(void)
{
	return nvmlInitWithFlags(0);
}

EXPORT int nvmlShutdown(void)
{
	int ret = NVML_OK;

	take_lock();
	if (init_count == 0)
		ret = NVML_UNINITIALIZED;
	else if (--init_count == 0)
		while (idle_count > 0)
			close(idle[--idle_count]);
	pthread_mutex_unlock(&lock);
	return ret;
}

static int ready(void)
{
	int ret;

	take_lock();
	ret = init_count > 0 ? NVML_OK : NVML_UNINITIALIZED;
	pthread_mutex_unlock(&lock);
	return ret;
}

int sim_nvml_refuse(void)
{
	int ret = ready();

	return ret == NVML_OK ? NVML_NOT_SUPPORTED : ret;
}

/* Checks the library's state, the handle, and that `out` is there. */
static int usable(nvml_device d, const void *out)
{
	int ret = ready();
	uintptr_t at = (uintptr_t)d, first = (uintptr_t)devices;

	if (ret != NVML_OK)
		return ret;
	if (at < first || at >= first + (device_count + instance_count) * sizeof(*d) || (at - first) % sizeof(*d) != 0 || !out)
		return NVML_INVALID_ARGUMENT;
	return NVML_OK;
}

static int copy_text(char *to, unsigned int size, const char *text)
{
	size_t n = strlen(text) + 1;

	if (!to)
		return NVML_INVALID_ARGUMENT;
	if (size < n)
		return NVML_INSUFFICIENT_SIZE;
	memcpy(to, text, n);
	return NVML_OK;
}

/* ---- system ------------------------------------------------------------------------ */

EXPORT const char *nvmlErrorString(int result)
{
	switch (result) {
	case NVML_OK:
		return "Success";
	case NVML_UNINITIALIZED:
		return "Uninitialized";
	case NVML_INVALID_ARGUMENT:
		return "Invalid Argument";
	case NVML_NOT_SUPPORTED:
		return "Not Supported";
	case NVML_NO_PERMISSION:
		return "Insufficient Permissions";
	case NVML_NOT_FOUND:
		return "Not Found";
	case NVML_INSUFFICIENT_SIZE:
		return "Insufficient Size";
	case NVML_DRIVER_NOT_LOADED:
		return "Driver Not Loaded";
	case NVML_FUNCTION_NOT_FOUND:
		return "Function Not Found";
	case NVML_GPU_IS_LOST:
		return "GPU is lost";
	case NVML_MEMORY:
		return "Insufficient Memory";
	case NVML_VERSION_MISMATCH:
		return "Argument Version Mismatch";
	default:
		return "Unknown Error";
	}
}

EXPORT int nvmlSystemGetDriverVersion(char *version, unsigned int length)
{
	int ret = ready();

	return ret != NVML_OK ? ret : copy_text(version, length, node.driver_version);
}

EXPORT int nvmlSystemGetNVMLVersion(char *version, unsigned int length)
{
	int ret = ready();

	return ret != NVML_OK ? ret : copy_text(version, length, node.nvml_version);
}

EXPORT int nvmlSystemGetCudaDriverVersion_v2(int *version)
{
	int ret = ready();

	if (ret != NVML_OK)
		return ret;
	if (!version)
		return NVML_INVALID_ARGUMENT;
	*version = (int)node.cuda_version;
	return NVML_OK;
}

EXPORT int nvmlSystemGetCudaDriverVersion(int *version)
{
	return nvmlSystemGetCudaDriverVersion_v2(version);
}

EXPORT int nvmlSystemGetProcessName(unsigned int pid, char *name, unsigned int length)
{
	char path[32], text[PATH_MAX];
	int ret = ready(), fd;
	ssize_t n;

	if (ret != NVML_OK)
		return ret;
	if (!name || length == 0)
		return NVML_INVALID_ARGUMENT;
	snprintf(path, sizeof(path), "/proc/%u/cmdline", pid);
	fd = open(path, O_RDONLY | O_CLOEXEC);
	if (fd < 0)
		return NVML_NOT_FOUND;
	n = read(fd, text, sizeof(text) - 1);
	close(fd);
	if (n < 0)
		return NVML_NOT_FOUND;
	text[n] = 0; /* ends at the first argument: the program */
	snprintf(name, length, "%s", text);
	return NVML_OK;
}

/* ---- which devices ----------------------------------------------------------------- */

EXPORT int nvmlDeviceGetCount_v2(unsigned int *count)
{
	int ret = ready();

	if (ret != NVML_OK)
		return ret;
	if (!count)
		return NVML_INVALID_ARGUMENT;
	*count = device_count;
	return NVML_OK;
}

EXPORT int nvmlDeviceGetCount(unsigned int *count)
{
	return nvmlDeviceGetCount_v2(count);
}

EXPORT int nvmlDeviceGetHandleByIndex_v2(unsigned int index, nvml_device *device)
{
	int ret = ready();

	if (ret != NVML_OK)
		return ret;
	if (!device || index >= device_count)
		return NVML_INVALID_ARGUMENT;
	*device = &devices[index];
	return NVML_OK;
}

EXPORT int nvmlDeviceGetHandleByIndex(unsigned int index, nvml_device *device)
{
	return nvmlDeviceGetHandleByIndex_v2(index, device);
}

EXPORT int nvmlDeviceGetHandleByUUID(const char *uuid, nvml_device *device)
{
	int ret = ready();
	unsigned int i;

	if (ret != NVML_OK)
		return ret;
	if (!uuid || !device)
		return NVML_INVALID_ARGUMENT;
	for (i = 0; i < device_count + instance_count; i++) {
		if (strcasecmp(uuid, devices[i].info.uuid_text) == 0) {
			*device = &devices[i];
			return NVML_OK;
		}
	}
	return NVML_NOT_FOUND;
}

EXPORT int nvmlDeviceGetHandleByPciBusId_v2(const char *bus_id, nvml_device *device)
{
	unsigned int domain, bus, slot, i;
	int ret = ready();

	if (ret != NVML_OK)
		return ret;
	if (!bus_id || !device)
		return NVML_INVALID_ARGUMENT;
	if (sscanf(bus_id, "%x:%x:%x", &domain, &bus, &slot) != 3)
		return NVML_INVALID_ARGUMENT;
	for (i = 0; i < device_count; i++) {
		const struct simgpu_device *d = &devices[i].info;

		if (d->pci_domain == domain && d->pci_bus == bus && d->pci_device == slot) {
			*device = &devices[i];
			return NVML_OK;
		}
	}
	return NVML_NOT_FOUND;
}

EXPORT int nvmlDeviceGetHandleByPciBusId(const char *bus_id, nvml_device *device)
{
	return nvmlDeviceGetHandleByPciBusId_v2(bus_id, device);
}

EXPORT int nvmlDeviceGetName(nvml_device device, char *name, unsigned int length)
{
	int ret = usable(device, name);

	return ret != NVML_OK ? ret : copy_text(name, length, device->info.name);
}

EXPORT int nvmlDeviceGetUUID(nvml_device device, char *uuid, unsigned int length)
{
	int ret = usable(device, uuid);

	return ret != NVML_OK ? ret : copy_text(uuid, length, device->info.uuid_text);
}

EXPORT int nvmlDeviceGetIndex(nvml_device device, unsigned int *index)
{
	int ret = usable(device, index);

	if (ret == NVML_OK)
		*index = device->index;
	return ret;
}

EXPORT int nvmlDeviceGetMinorNumber(nvml_device device, unsigned int *minor)
{
	int ret = usable(device, minor);

	if (ret == NVML_OK && device->gpu)
		ret = NVML_NOT_SUPPORTED;
	if (ret == NVML_OK)
		*minor = device->info.minor;
	return ret;
}

static int pci_info(nvml_device device, struct nvml_pci_info *out, size_t size)
{
	const struct simgpu_device *d;
	struct nvml_pci_info pci;
	int ret = usable(device, out);

	if (ret != NVML_OK)
		return ret;
	d = &device->info;
	memset(&pci, 0, sizeof(pci));
	snprintf(pci.bus_id_legacy, sizeof(pci.bus_id_legacy), "%04X:%02X:%02X.0", d->pci_domain & 0xffff, d->pci_bus & 0xff,
		 d->pci_device & 0xff);
	pci.domain = d->pci_domain;
	pci.bus = d->pci_bus;
	pci.device = d->pci_device;
	pci.device_id = d->pci_device_id;
	pci.subsystem_id = d->pci_subsystem_id;
	memcpy(pci.bus_id, d->pci_bus_id, sizeof(pci.bus_id));
	memcpy(out, &pci, size);
	return NVML_OK;
}

EXPORT int nvmlDeviceGetPciInfo_v3(nvml_device device, struct nvml_pci_info *pci)
{
	return pci_info(device, pci, sizeof(*pci));
}

EXPORT int nvmlDeviceGetPciInfo_v2(nvml_device device, struct nvml_pci_info *pci)
{
	return pci_info(device, pci, offsetof(struct nvml_pci_info, bus_id));
}

EXPORT int nvmlDeviceGetPciInfo(nvml_device device, struct nvml_pci_info *pci)
{
	return pci_info(device, pci, offsetof(struct nvml_pci_info, subsystem_id));
}

EXPORT int nvmlDeviceGetCudaComputeCapability(nvml_device device, int *major, int *minor)
{
	int ret = usable(device, major && minor ? major : NULL);

	if (ret == NVML_OK) {
		*major = (int)device->info.cc_major;
		*minor = (int)device->info.cc_minor;
	}
	return ret;
}

EXPORT int nvmlDeviceGetComputeMode(nvml_device device, unsigned int *mode)
{
	int ret = usable(device, mode);

	if (ret == NVML_OK)
		*mode = 0; /* default: any number of processes */
	return ret;
}

EXPORT int nvmlDeviceGetPersistenceMode(nvml_device device, unsigned int *mode)
{
	int ret = usable(device, mode);

	if (ret == NVML_OK)
		*mode = 1;
	return ret;
}

/* ---- MIG --------------------------------------------------------------------------- */

/* A GPU that is not split answers as one that cannot be. */
EXPORT int nvmlDeviceGetMigMode(nvml_device device, unsigned int *current, unsigned int *pending)
{
	int ret = usable(device, current && pending ? current : NULL);

	if (ret == NVML_OK && device->info.mig_instances == 0)
		ret = NVML_NOT_SUPPORTED;
	if (ret == NVML_OK)
		*current = *pending = 1;
	return ret;
}

EXPORT int nvmlDeviceGetMaxMigDeviceCount(nvml_device device, unsigned int *count)
{
	int ret = usable(device, count);

	if (ret == NVML_OK)
		*count = device->info.mig_instances ? SIMGPU_MIG_MAX : 0;
	return ret;
}

EXPORT int nvmlDeviceIsMigDeviceHandle(nvml_device device, unsigned int *is_mig)
{
	int ret = usable(device, is_mig);

	if (ret == NVML_OK)
		*is_mig = device->gpu != NULL;
	return ret;
}

EXPORT int nvmlDeviceGetMigDeviceHandleByIndex(nvml_device device, unsigned int index, nvml_device *instance)
{
	int ret = usable(device, instance);
	unsigned int i;

	if (ret != NVML_OK)
		return ret;
	if (device->gpu || index >= SIMGPU_MIG_MAX)
		return NVML_INVALID_ARGUMENT;
	if (device->info.mig_instances == 0)
		return NVML_NOT_SUPPORTED;
	for (i = device_count; i < device_count + instance_count; i++) {
		if (devices[i].gpu == device && devices[i].index == index) {
			*instance = &devices[i];
			return NVML_OK;
		}
	}
	return NVML_NOT_FOUND;
}

EXPORT int nvmlDeviceGetDeviceHandleFromMigDeviceHandle(nvml_device instance, nvml_device *device)
{
	int ret = usable(instance, device);

	if (ret == NVML_OK && !instance->gpu)
		ret = NVML_INVALID_ARGUMENT;
	if (ret == NVML_OK)
		*device = instance->gpu;
	return ret;
}

EXPORT int nvmlDeviceGetGpuInstanceId(nvml_device device, unsigned int *id)
{
	int ret = usable(device, id);

	if (ret == NVML_OK && !device->gpu)
		ret = NVML_NOT_SUPPORTED;
	if (ret == NVML_OK)
		*id = device->info.mig_instance;
	return ret;
}

EXPORT int nvmlDeviceGetComputeInstanceId(nvml_device device, unsigned int *id)
{
	int ret = nvmlDeviceGetGpuInstanceId(device, id);

	if (ret == NVML_OK)
		*id = 0; /* each GPU instance has one */
	return ret;
}

EXPORT int nvmlDeviceGetAttributes_v2(nvml_device device, struct nvml_attributes *out)
{
	int ret = usable(device, out);

	if (ret == NVML_OK && !device->gpu)
		ret = NVML_NOT_SUPPORTED;
	if (ret != NVML_OK)
		return ret;
	memset(out, 0, sizeof(*out));
	out->multiprocessors = device->info.sm_count;
	out->copy_engines = 1;
	out->gpu_slices = out->compute_slices = device->info.mig_slices;
	out->memory_mb = device->info.total_bytes >> 20;
	return NVML_OK;
}

EXPORT int nvmlDeviceGetAttributes(nvml_device device, struct nvml_attributes *out)
{
	return nvmlDeviceGetAttributes_v2(device, out);
}

/* ---- memory and processes ---------------------------------------------------------- */

static int memory(nvml_device device, unsigned int version, struct nvml_memory_v2 *out)
{
	struct simgpu_req req = {.op = SIMGPU_OP_NVML_MEMORY, .arg = {device->info.number, version}};
	struct simgpu_rep rep;
	int ret = ask(&req, &rep, NULL, NULL);

	if (ret == NVML_OK) {
		out->total = rep.val[0];
		out->reserved = rep.val[1];
		out->used = rep.val[2];
		out->free = rep.val[3];
	}
	return ret;
}

EXPORT int nvmlDeviceGetMemoryInfo(nvml_device device, struct nvml_memory *out)
{
	struct nvml_memory_v2 m;
	int ret = usable(device, out);

	if (ret == NVML_OK)
		ret = memory(device, 1, &m);
	if (ret == NVML_OK) {
		out->total = m.total;
		out->free = m.free;
		out->used = m.used + m.reserved; /* the first version has no other place for it */
	}
	return ret;
}

EXPORT int nvmlDeviceGetMemoryInfo_v2(nvml_device device, struct nvml_memory_v2 *out)
{
	int ret = usable(device, out);

	if (ret != NVML_OK)
		return ret;
	if (out->version != NVML_MEMORY_V2)
		return NVML_VERSION_MISMATCH;
	return memory(device, 2, out);
}

/*
 * The rows of one list. The caller's array has room for *count rows of `stride` bytes: each
 * version of the call has the first fields of the longest row.
 */
static int processes(nvml_device device, unsigned int list, unsigned int *count, void *out, size_t stride)
{
	struct simgpu_req req = {.op = SIMGPU_OP_NVML_PROCS};
	struct simgpu_proc *rows;
	struct simgpu_rep rep;
	size_t len = SIMGPU_PROCS_MAX * sizeof(*rows);
	unsigned int room, n, i;
	int ret = usable(device, count);

	if (ret != NVML_OK)
		return ret;
	room = *count;
	if (room > 0 && !out)
		return NVML_INVALID_ARGUMENT;
	rows = malloc(len);
	if (!rows)
		return NVML_MEMORY;
	req.arg[0] = device->info.number;
	req.arg[1] = list;
	ret = ask(&req, &rep, rows, &len);
	if (ret == NVML_OK) {
		n = (unsigned int)(len / sizeof(*rows));
		*count = n;
		if (n > room)
			ret = NVML_INSUFFICIENT_SIZE;
	}
	for (i = 0; ret == NVML_OK && i < n; i++) {
		struct nvml_process_detail row;

		memset(&row, 0, sizeof(row)); /* the padding too: callers compare */
		row.pid = rows[i].pid;
		row.used_gpu_memory = rows[i].used_bytes;
		row.gpu_instance_id = rows[i].instance ? rows[i].instance : UINT32_MAX;
		row.compute_instance_id = rows[i].instance ? 0 : UINT32_MAX;
		row.used_protected_memory = rows[i].instance ? SIMGPU_NOT_AVAILABLE : 0; /* not told of instances */
		memcpy((char *)out + i * stride, &row, stride);
	}
	free(rows);
	return ret;
}

#define PROCESS_LIST(name, list)                                                                          \
	EXPORT int name(nvml_device device, unsigned int *count, struct nvml_process_v1 *out)             \
	{                                                                                                 \
		return processes(device, list, count, out, sizeof(struct nvml_process_v1));               \
	}                                                                                                 \
	EXPORT int name##_v2(nvml_device device, unsigned int *count, struct nvml_process_v2 *out)        \
	{                                                                                                 \
		return processes(device, list, count, out, sizeof(struct nvml_process_v2));               \
	}                                                                                                 \
	EXPORT int name##_v3(nvml_device device, unsigned int *count, struct nvml_process_v2 *out)        \
	{                                                                                                 \
		return processes(device, list, count, out, sizeof(struct nvml_process_v2));               \
	}

PROCESS_LIST(nvmlDeviceGetComputeRunningProcesses, SIMGPU_LIST_COMPUTE)
PROCESS_LIST(nvmlDeviceGetGraphicsRunningProcesses, SIMGPU_LIST_GRAPHICS)
PROCESS_LIST(nvmlDeviceGetMPSComputeRunningProcesses, SIMGPU_LIST_MPS)

EXPORT int nvmlDeviceGetRunningProcessDetailList(nvml_device device, struct nvml_process_detail_list *list)
{
	static const unsigned int by_mode[] = {
		[NVML_PROCESS_MODE_COMPUTE] = SIMGPU_LIST_COMPUTE,
		[NVML_PROCESS_MODE_GRAPHICS] = SIMGPU_LIST_GRAPHICS,
		[NVML_PROCESS_MODE_MPS] = SIMGPU_LIST_MPS,
		[NVML_PROCESS_MODE_ALL] = SIMGPU_LIST_ALL,
	};
	int ret = usable(device, list);

	if (ret != NVML_OK)
		return ret;
	if (list->version != NVML_PROCESS_DETAIL_LIST_V1)
		return NVML_VERSION_MISMATCH;
	if (list->mode >= sizeof(by_mode) / sizeof(by_mode[0]))
		return NVML_INVALID_ARGUMENT;
	if (device->info.cc_major < 9)
		return NVML_NOT_SUPPORTED; /* before Hopper */
	return processes(device, by_mode[list->mode], &list->count, list->rows, sizeof(*list->rows));
}

EXPORT int nvmlDeviceGetUtilizationRates(nvml_device device, struct nvml_utilization *out)
{
	struct simgpu_req req = {.op = SIMGPU_OP_NVML_UTIL};
	struct simgpu_rep rep;
	int ret = usable(device, out);

	if (ret == NVML_OK && device->gpu)
		ret = NVML_NOT_SUPPORTED;
	if (ret != NVML_OK)
		return ret;
	req.arg[0] = device->info.number;
	ret = ask(&req, &rep, NULL, NULL);
	if (ret == NVML_OK) {
		out->gpu = (unsigned int)rep.val[0];
		out->memory = (unsigned int)rep.val[1];
	}
	return ret;
}

EXPORT int nvmlDeviceGetProcessUtilization(nvml_device device, struct nvml_process_utilization *out, unsigned int *count,
					   unsigned long long last_seen)
{
	struct simgpu_req req = {.op = SIMGPU_OP_NVML_PROC_UTIL};
	struct simgpu_proc_util *rows;
	struct simgpu_rep rep;
	size_t len = SIMGPU_PROCS_MAX * sizeof(*rows);
	unsigned int n = 0, i;
	int ret = usable(device, count);

	if (ret == NVML_OK && device->gpu)
		ret = NVML_NOT_SUPPORTED;
	if (ret != NVML_OK)
		return ret;
	rows = malloc(len);
	if (!rows)
		return NVML_MEMORY;
	req.arg[0] = device->info.number;
	req.arg[1] = last_seen;
	ret = ask(&req, &rep, rows, &len);
	if (ret == NVML_OK) {
		n = (unsigned int)(len / sizeof(*rows));
		if (!out || *count < n)
			ret = NVML_INSUFFICIENT_SIZE;
		*count = n;
	}
	for (i = 0; ret == NVML_OK && i < n; i++) {
		memset(&out[i], 0, sizeof(out[i]));
		out[i].pid = rows[i].pid;
		out[i].time_stamp = rows[i].time_stamp_us;
		out[i].sm_util = rows[i].sm_percent;
		out[i].mem_util = rows[i].mem_percent;
	}
	free(rows);
	return ret;
}

#ifdef SIMGPU_MEMORY_LIMITS
/* ---- limits of cgroups: in libraries of drivers from R615 on ----------------------- */

static int limits(nvml_device device, const char *folder, struct simgpu_req *req, struct simgpu_rep *rep)
{
	int ret, fd;

	if (!folder)
		return NVML_INVALID_ARGUMENT;
	if (device->gpu)
		return NVML_NOT_SUPPORTED; /* MIG */
	fd = open(folder, O_PATH | O_DIRECTORY | O_CLOEXEC);
	if (fd < 0)
		return NVML_OPERATING_SYSTEM;
	req->arg[0] = device->info.number;
	ret = ask_with(&fd, req, rep, NULL, NULL);
	close(fd);
	return ret;
}

EXPORT int nvmlDeviceSetMemoryLimits_v1(nvml_device device, struct nvml_set_limits *in)
{
	struct simgpu_req req = {.op = SIMGPU_OP_LIMITS_SET};
	struct simgpu_rep rep;
	int ret = usable(device, in);

	if (ret != NVML_OK)
		return ret;
	req.arg[1] = in->soft;
	req.arg[2] = in->hard;
	return limits(device, in->name_space, &req, &rep);
}

EXPORT int nvmlDeviceGetMemoryLimits_v1(nvml_device device, struct nvml_get_limits *out)
{
	struct simgpu_req req = {.op = SIMGPU_OP_LIMITS_GET};
	struct simgpu_rep rep;
	int ret = usable(device, out);

	if (ret == NVML_OK)
		ret = limits(device, out->name_space, &req, &rep);
	if (ret == NVML_OK) {
		out->soft = rep.val[0];
		out->hard = rep.val[1];
		out->used = rep.val[2];
	}
	return ret;
}
#endif
