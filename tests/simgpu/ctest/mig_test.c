/* SPDX-License-Identifier: Apache-2.0 */
/*
 * mig_test: what a client of CUDA sees of MIG instances. Needs a simgpud with a T4 of 16 GiB in
 * three instances and a whole one, in $SIMGPU_DIR; $TEST_GPU, $TEST_MIG0 and $TEST_MIG1 are UUIDs
 * without what is before the first dash, and $CUDA_VISIBLE_DEVICES is what $TEST_CASE says.
 */
#define _GNU_SOURCE
#include "../libcuda/cuda_abi.h"
#include "../simgpu.h"
#include "check.h"

#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

CUresult cuInit(unsigned int);
CUresult cuDeviceGetCount(int *);
CUresult cuDeviceGetName(char *, int, CUdevice);
CUresult cuDeviceGetUuid(CUuuid *, CUdevice);
CUresult cuDeviceGetUuid_v2(CUuuid *, CUdevice);
CUresult cuDeviceTotalMem_v2(size_t *, CUdevice);
CUresult cuDevicePrimaryCtxRetain(CUcontext *, CUdevice);
CUresult cuCtxSetCurrent(CUcontext);
CUresult cuMemGetInfo_v2(size_t *, size_t *);
CUresult cuMemAlloc_v2(CUdeviceptr *, size_t);

#define INSTANCE (5460 * MIB)
#define INSTANCE_CAPACITY (INSTANCE - 56 * MIB) /* without one per cent, in whole pages */
#define INSTANCE_CONTEXT (30 * MIB)             /* two of seven slices of 104 MiB */

static bool is(const CUuuid *uuid, const char *variable)
{
	const char *want = getenv(variable);
	char text[40] = "";
	size_t n = 0;

	for (int i = 0; i < 16; i++) {
		if (i == 4 || i == 6 || i == 8 || i == 10)
			text[n++] = '-';
		n += (size_t)snprintf(text + n, sizeof(text) - n, "%02x", (unsigned char)uuid->bytes[i]);
	}
	return want && strcmp(text, want) == 0;
}

static void instance(const char *variable)
{
	CUuuid uuid;
	CUcontext ctx;
	CUdeviceptr p;
	size_t total, all;
	char name[96];
	int count;

	OK(cuDeviceGetCount(&count));
	WANT(count, 1); /* however many are visible */
	OK(cuDeviceGetUuid_v2(&uuid, 0));
	WANT(is(&uuid, variable), true);
	OK(cuDeviceGetUuid(&uuid, 0));
	WANT(is(&uuid, "TEST_GPU"), true);
	OK(cuDeviceGetName(name, sizeof(name), 0));
	WANT(strstr(name, " MIG 2g.5gb") != NULL, true);
	OK(cuDeviceTotalMem_v2(&total, 0));
	WANT(total, INSTANCE_CAPACITY);
	OK(cuDevicePrimaryCtxRetain(&ctx, 0));
	OK(cuCtxSetCurrent(ctx));
	OK(cuMemGetInfo_v2(&total, &all));
	WANT(all, INSTANCE_CAPACITY);
	WANT(total, INSTANCE_CAPACITY - INSTANCE_CONTEXT);
	WANT(cuMemAlloc_v2(&p, INSTANCE), CUDA_ERROR_OUT_OF_MEMORY);
	OK(cuMemAlloc_v2(&p, 5 * GIB));
	OK(cuMemGetInfo_v2(&total, &all));
	WANT(total, INSTANCE_CAPACITY - INSTANCE_CONTEXT - 5 * GIB);
}

int main(void)
{
	const char *test = getenv("TEST_CASE");
	size_t total;
	int count;

	if (test && strcmp(test, "none") == 0) {
		WANT(cuInit(0), CUDA_ERROR_NO_DEVICE);
		return failures != 0;
	}
	OK(cuInit(0));
	if (test && strcmp(test, "whole") == 0) {
		OK(cuDeviceGetCount(&count));
		WANT(count, 1);
		OK(cuDeviceTotalMem_v2(&total, 0));
		WANT(total, CAPACITY);
	} else {
		instance(test ? test : "");
	}
	if (failures > 0)
		fprintf(stderr, "%d failed\n", failures);
	return failures != 0;
}
