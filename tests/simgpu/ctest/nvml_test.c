/* SPDX-License-Identifier: Apache-2.0 */
/*
 * nvml_test LIBRARY: the calls of the simulated libnvidia-ml.so.1 that NVIDIA's Go bindings
 * do not make: oldest versions, the detailed list, counts that are too small, bad arguments, forks.
 * Needs a simgpud with one process on GPU 0 that holds 104 + 100 MiB in a compute context.
 */
#define _GNU_SOURCE
#include "../libnvml/nvml_abi.h"

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

static int failures;

#define WANT(expr, want)                                                                                        \
	do {                                                                                                    \
		long long got_ = (long long)(expr), want_ = (long long)(want);                                  \
		if (got_ != want_) {                                                                            \
			fprintf(stderr, "%s:%d: %s is %lld, want %lld\n", __FILE__, __LINE__, #expr, got_, want_); \
			failures++;                                                                             \
		}                                                                                               \
	} while (0)

static void *lib;

static void *sym(const char *name)
{
	void *f = dlsym(lib, name);

	if (!f) {
		fprintf(stderr, "no %s\n", name);
		exit(2);
	}
	return f;
}

/* Rows by mode: of the right version only, all of them or their number, and from Hopper on. */
static void detail_list(nvml_device dev, unsigned long long held)
{
	int (*get)(nvml_device, struct nvml_process_detail_list *) =
		(__typeof__(get))sym("nvmlDeviceGetRunningProcessDetailList");
	int (*capability)(nvml_device, int *, int *) = (__typeof__(capability))sym("nvmlDeviceGetCudaComputeCapability");
	const unsigned int version = NVML_PROCESS_DETAIL_LIST_V1;
	int major = 0, minor = 0;
	unsigned int mode;

	WANT(capability(dev, &major, &minor), NVML_OK);
	for (mode = NVML_PROCESS_MODE_COMPUTE; mode <= NVML_PROCESS_MODE_ALL; mode++) {
		const int there = mode == NVML_PROCESS_MODE_COMPUTE || mode == NVML_PROCESS_MODE_ALL;
		struct nvml_process_detail_list list = {version, mode, 0, NULL};
		struct nvml_process_detail rows[3];

		if (major < 9) {
			WANT(get(dev, &list), NVML_NOT_SUPPORTED);
			WANT(list.count, 0);
			continue;
		}
		WANT(get(dev, &list), there ? NVML_INSUFFICIENT_SIZE : NVML_OK);
		WANT(list.count, there);
		memset(rows, 0xee, sizeof(rows));
		list.rows = rows;
		list.count = 0;
		WANT(get(dev, &list), there ? NVML_INSUFFICIENT_SIZE : NVML_OK);
		WANT(list.count, there);
		WANT((unsigned char)*(char *)rows, 0xee);
		list.count = 3;
		WANT(get(dev, &list), NVML_OK);
		WANT(list.count, there);
		if (there) {
			WANT(rows[0].pid, getppid());
			WANT(rows[0].used_gpu_memory, held);
			WANT(rows[0].gpu_instance_id == UINT32_MAX && rows[0].compute_instance_id == UINT32_MAX, 1);
			WANT(rows[0].used_protected_memory, 0);
		}
		WANT((unsigned char)*(char *)&rows[there], 0xee);
		list.rows = NULL;
		list.count = 3;
		WANT(get(dev, &list), NVML_INVALID_ARGUMENT);
		list.mode = mode + NVML_PROCESS_MODE_ALL + 1;
		WANT(get(dev, &list), NVML_INVALID_ARGUMENT);
		list.mode = mode;
		list.version = 1;
		WANT(get(dev, &list), NVML_VERSION_MISMATCH);
		list.version = (version & 0xffffff) | 2u << 24;
		WANT(get(dev, &list), NVML_VERSION_MISMATCH);
		WANT(get(NULL, &list), NVML_INVALID_ARGUMENT);
	}
	WANT(get(dev, NULL), NVML_INVALID_ARGUMENT);
}

#define FN(name, ...) int (*name)(__VA_ARGS__) = (int (*)(__VA_ARGS__))sym(#name)

int main(int argc, char **argv)
{
	const unsigned long long held = 204ULL << 20;
	const char *lists[] = {"nvmlDeviceGetComputeRunningProcesses", "nvmlDeviceGetGraphicsRunningProcesses",
			       "nvmlDeviceGetMPSComputeRunningProcesses"};
	unsigned int n, i;
	nvml_device dev, same;
	int status;
	pid_t pid;

	lib = argc == 2 ? dlopen(argv[1], RTLD_NOW) : NULL;
	if (!lib) {
		fprintf(stderr, "%s\n", argc == 2 ? dlerror() : "usage: nvml_test LIBRARY");
		return 2;
	}
	FN(nvmlInit, void);
	FN(nvmlInit_v2, void);
	FN(nvmlInitWithFlags, unsigned int);
	FN(nvmlShutdown, void);
	FN(nvmlDeviceGetCount, unsigned int *);
	FN(nvmlDeviceGetHandleByIndex, unsigned int, nvml_device *);
	FN(nvmlDeviceGetHandleByIndex_v2, unsigned int, nvml_device *);
	FN(nvmlDeviceGetHandleByPciBusId, const char *, nvml_device *);
	FN(nvmlDeviceGetUUID, nvml_device, char *, unsigned int);
	FN(nvmlDeviceGetMemoryInfo_v2, nvml_device, struct nvml_memory_v2 *);
	FN(nvmlDeviceGetMemoryInfo, nvml_device, struct nvml_memory *);
	FN(nvmlDeviceGetPciInfo, nvml_device, void *);
	FN(nvmlDeviceGetPciInfo_v2, nvml_device, void *);
	FN(nvmlDeviceGetProcessUtilization, nvml_device, struct nvml_process_utilization *, unsigned int *, unsigned long long);

	WANT(nvmlShutdown(), NVML_UNINITIALIZED);
	WANT(nvmlDeviceGetCount(&n), NVML_UNINITIALIZED);
	WANT(nvmlInit(), NVML_OK);
	WANT(nvmlInit_v2(), NVML_OK);
	WANT(nvmlInitWithFlags(1), NVML_OK);
	WANT(nvmlShutdown(), NVML_OK);
	WANT(nvmlShutdown(), NVML_OK);
	WANT(nvmlDeviceGetCount(&n), NVML_OK); /* counted: one init is left */
	WANT(n, 1);
	WANT(nvmlDeviceGetHandleByIndex(0, &dev), NVML_OK);
	WANT(nvmlDeviceGetHandleByIndex_v2(0, &same), NVML_OK);
	WANT(dev == same, 1);
	WANT(nvmlDeviceGetHandleByIndex(1, &same), NVML_INVALID_ARGUMENT);
	WANT(nvmlDeviceGetHandleByPciBusId("0:1:0", &same), NVML_OK);
	WANT(nvmlDeviceGetHandleByPciBusId("nonsense", &same), NVML_INVALID_ARGUMENT);
	WANT(nvmlDeviceGetHandleByPciBusId("0:9:0", &same), NVML_NOT_FOUND);

	char uuid[80] = "";
	WANT(nvmlDeviceGetUUID(dev, uuid, sizeof(uuid)), NVML_OK);
	WANT(strlen(uuid), 40);
	WANT(nvmlDeviceGetUUID(dev, uuid, 40), NVML_INSUFFICIENT_SIZE);
	WANT(nvmlDeviceGetUUID(NULL, uuid, 80), NVML_INVALID_ARGUMENT);
	WANT(nvmlDeviceGetUUID((nvml_device)uuid, uuid, 80), NVML_INVALID_ARGUMENT);
	WANT(nvmlDeviceGetUUID((nvml_device)((char *)dev + 8), uuid, 80), NVML_INVALID_ARGUMENT);

	struct nvml_memory_v2 m2 = {.version = NVML_MEMORY_V2};
	struct nvml_memory m1;
	WANT(nvmlDeviceGetMemoryInfo_v2(dev, &m2), NVML_OK);
	WANT(m2.used, held);
	WANT(nvmlDeviceGetMemoryInfo(dev, &m1), NVML_OK);
	WANT(m1.used, held + m2.reserved);
	m2.version = 2;
	WANT(nvmlDeviceGetMemoryInfo_v2(dev, &m2), NVML_VERSION_MISMATCH);
	WANT(nvmlDeviceGetMemoryInfo_v2(dev, NULL), NVML_INVALID_ARGUMENT);

	/* Each version writes rows of its own size, and nothing behind them. */
	for (i = 0; i < 3; i++) {
		int version;

		for (version = 1; version <= 3; version++) {
			char name[64], buf[256];
			int (*get)(nvml_device, unsigned int *, void *);
			size_t stride = version == 1 ? sizeof(struct nvml_process_v1) : sizeof(struct nvml_process_v2);
			struct nvml_process_v2 row;

			snprintf(name, sizeof(name), version == 1 ? "%s" : "%s_v%d", lists[i], version);
			get = (__typeof__(get))sym(name);
			n = 0;
			WANT(get(dev, &n, NULL), i == 0 ? NVML_INSUFFICIENT_SIZE : NVML_OK);
			WANT(n, i == 0);
			memset(buf, 0xee, sizeof(buf));
			n = 4;
			WANT(get(dev, &n, buf), NVML_OK);
			WANT(n, i == 0);
			if (n == 1) {
				memset(&row, 0, sizeof(row));
				memcpy(&row, buf, stride);
				WANT(row.pid, getppid());
				WANT(row.used_gpu_memory, held);
				if (version > 1)
					WANT(row.gpu_instance_id == UINT32_MAX && row.compute_instance_id == UINT32_MAX, 1);
			}
			WANT((unsigned char)buf[n * stride], 0xee);
			n = 4;
			WANT(get(dev, &n, NULL), NVML_INVALID_ARGUMENT);
			WANT(get(dev, NULL, buf), NVML_INVALID_ARGUMENT);
		}
	}

	detail_list(dev, held);

	struct nvml_pci_info pci;
	memset(&pci, 0xee, sizeof(pci));
	WANT(nvmlDeviceGetPciInfo(dev, &pci), NVML_OK);
	WANT(pci.subsystem_id, 0xeeeeeeeeu);
	WANT(nvmlDeviceGetPciInfo_v2(dev, &pci), NVML_OK);
	WANT(pci.subsystem_id, 0);
	WANT((unsigned char)pci.bus_id[0], 0xee);
	n = 0;
	WANT(nvmlDeviceGetProcessUtilization(dev, NULL, &n, 0), NVML_NOT_FOUND);

	/* A forked child has its own connections: both get their own answers. */
	pid = fork();
	for (i = 0; i < 200; i++) {
		WANT(nvmlDeviceGetMemoryInfo(dev, &m1), NVML_OK);
		WANT(m1.used, held + m2.reserved);
		n = 0;
		WANT(((int (*)(nvml_device, unsigned int *, void *))sym(lists[0]))(dev, &n, NULL), NVML_INSUFFICIENT_SIZE);
	}
	if (pid == 0)
		_exit(failures != 0);
	WANT(waitpid(pid, &status, 0), pid);
	WANT(status, 0);

	WANT(nvmlShutdown(), NVML_OK);
	WANT(nvmlDeviceGetMemoryInfo(dev, &m1), NVML_UNINITIALIZED);
	return failures != 0;
}
