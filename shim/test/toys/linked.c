/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Code that is linked with the driver: as a program (MAIN) or as somebody's plugin. Returns 0, or
 * the number of the step that went wrong.
 */
#include <dlfcn.h>
#include <stdio.h>

#include "../driver/fake.h"

CUresult cuInit(unsigned int), cuCtxCreate_v2(CUcontext *, unsigned int, CUdevice), cuCtxDestroy_v2(CUcontext);
CUresult cuMemAlloc_v2(CUdeviceptr *, size_t), cuMemFree_v2(CUdeviceptr), cuMemGetInfo_v2(size_t *, size_t *);

int linked_run(uint64_t max_bytes);
void *linked_default(const char *name);
void *linked_next(const char *name);

/* max_bytes: the limit that must be seen, or 0 for none. */
int linked_run(uint64_t max_bytes)
{
	CUcontext context;
	CUdeviceptr p, q;
	size_t free_bytes, total;
	if (cuInit(0) != 0)
		return 1;
	if (cuCtxCreate_v2(&context, 0, 0) != 0)
		return 2;
	if (cuMemAlloc_v2(&p, 64 << 20) != 0)
		return 3;
	if (cuMemGetInfo_v2(&free_bytes, &total) != 0)
		return 4;
	if (max_bytes != 0) {
		if (total != max_bytes || free_bytes != max_bytes - FAKE_CONTEXT_BYTES - (64 << 20))
			return 5;
		if (cuMemAlloc_v2(&q, max_bytes) != CUDA_ERROR_OUT_OF_MEMORY)
			return 6;
	} else if (total != FAKE_TOTAL) {
		return 7;
	}
	if (cuMemFree_v2(p) != 0)
		return 8;
	return cuCtxDestroy_v2(context) != 0 ? 9 : 0;
}

void *linked_default(const char *name)
{
	void *found = dlsym(RTLD_DEFAULT, name);
	__asm__ volatile("" : "+r"(found));
	return found;
}

void *linked_next(const char *name)
{
	void *found = dlsym(RTLD_NEXT, name);
	__asm__ volatile("" : "+r"(found));
	return found;
}

#ifdef MAIN
int main(int argc, char **argv)
{
	unsigned long long max = 0;
	if (argc > 1 && sscanf(argv[1], "%llu", &max) != 1)
		return 99;
	return linked_run(max);
}
#endif
