/* SPDX-License-Identifier: Apache-2.0 */
/* What each hook charges, shows and passes on. */
#include <pthread.h>
#include <sched.h>

#include "../src/table.h"
#include "interpose.h"

#define BLOCK (2 * MIB)
#define ANY_ERROR 717 /* one that only our test driver gives */

static void *cuda;
static uint64_t (*live)(void);
static uint64_t (*live_managed)(void);
static void (*fail)(const char *, CUresult);
static unsigned long (*calls)(const char *);
static CUcontext context;

#define CALL(symbol, ...) (FN(cuda, symbol)(__VA_ARGS__))

static void start(void)
{
	cuda = open_driver(RTLD_LOCAL);
	live = need(cuda, "fake_live_bytes");
	live_managed = need(cuda, "fake_managed_bytes");
	fail = need(cuda, "fake_fail");
	calls = need(cuda, "fake_calls");
	CHECK_INT(CALL(cuInit, 0), 0);
}

static void start_in_context(void)
{
	start();
	CHECK_INT(CALL(cuCtxCreate_v2, &context, 0, 0), 0);
	CHECK_U64(charged(0), FAKE_CONTEXT_BYTES);
}

/* What is charged is what the driver's tables say. */
static void same(void) { CHECK_U64(charged(0), live() + live_managed()); }

/* ---- memory ---- */

static void part_alloc(void)
{
	static const uint64_t sizes[] = { 1, 4096, MIB, MIB + 1, 2 * MIB, 2 * MIB + 1, 64 * MIB, 65 * MIB };
	start_in_context();
	for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
		CUdeviceptr p;
		CUdeviceptr_v1 old;
		CHECK_INT(CALL(cuMemAlloc_v2, &p, sizes[i]), 0);
		same();
		CHECK_INT(CALL(cuMemAlloc, &old, (unsigned int)sizes[i]), 0);
		same();
		CHECK_INT(CALL(cuMemFree, old), 0);
		same();
		CHECK_INT(CALL(cuMemFree_v2, p), 0);
		CHECK_U64(charged(0), FAKE_CONTEXT_BYTES);
	}
	CHECK_INT(CALL(cuCtxDestroy_v2, context), 0);
	CHECK_U64(charged(0), 0);
}

static void part_small(void)
{
	enum { MANY = 10000 };
	static CUdeviceptr p[MANY];
	start_in_context();
	for (int i = 0; i < MANY; i++) {
		CHECK_INT(CALL(cuMemAlloc_v2, &p[i], 512), 0);
		if (i % 997 == 0)
			same();
	}
	CHECK_U64(charged(0), FAKE_CONTEXT_BYTES + 3 * BLOCK);
	for (int i = 0; i < MANY; i += 2)
		CHECK_INT(CALL(cuMemFree_v2, p[i]), 0);
	same();
	for (int i = 1; i < MANY; i += 2)
		CHECK_INT(CALL(cuMemFree_v2, p[i]), 0);
	CHECK_U64(charged(0), FAKE_CONTEXT_BYTES);
	CHECK_INT(CALL(cuCtxDestroy_v2, context), 0);
}

static void part_limit(void)
{
	CUdeviceptr p[128], q = 12345;
	size_t free_bytes, total;
	int n = 0;
	start_in_context();
	while (CALL(cuMemAlloc_v2, &p[n], 64 * MIB) == CUDA_SUCCESS)
		n++;
	CHECK_INT(n, (int)((LIMIT - FAKE_CONTEXT_BYTES) / (64 * MIB)));
	unsigned long before = calls("cuMemAlloc_v2");
	CHECK_INT(CALL(cuMemAlloc_v2, &q, 64 * MIB), CUDA_ERROR_OUT_OF_MEMORY);
	CHECK_U64(q, 12345);
	CHECK_U64(calls("cuMemAlloc_v2"), before);
	/* What is left is given, to the last block. */
	CHECK_INT(CALL(cuMemGetInfo_v2, &free_bytes, &total), 0);
	CHECK_INT(CALL(cuMemAlloc_v2, &p[n++], free_bytes / BLOCK * BLOCK), 0);
	same();
	CHECK(live() <= LIMIT && LIMIT - live() < BLOCK);
	CHECK_INT(CALL(cuMemAlloc_v2, &q, BLOCK), CUDA_ERROR_OUT_OF_MEMORY);
	CHECK_INT(CALL(cuMemAlloc_v2, &q, 1), CUDA_ERROR_OUT_OF_MEMORY);
	CHECK_INT(CALL(cuMemAlloc_v2, &q, UINT64_MAX), CUDA_ERROR_OUT_OF_MEMORY);
	while (n > 0)
		CHECK_INT(CALL(cuMemFree_v2, p[--n]), 0);
	CHECK_INT(CALL(cuMemAlloc_v2, &p[0], 3 * GIB), 0);
	/* Left to the context. */
	CHECK_INT(CALL(cuCtxDestroy_v2, context), 0);
	CHECK_U64(charged(0), 0);
	CHECK_U64(live(), 0);
}

static void part_pitch(void)
{
	void (*set_pitch)(uint64_t) = need(cuda = open_driver(RTLD_LOCAL), "fake_set_pitch");
	CUdeviceptr p = 7;
	CUdeviceptr_v1 old = 7;
	size_t pitch = 8;
	unsigned int old_pitch = 8;
	start_in_context();
	CHECK_INT(CALL(cuMemAllocPitch_v2, &p, &pitch, 1000, 4096, 4), 0);
	CHECK_U64(pitch, 1024);
	same();
	CHECK_INT(CALL(cuMemFree_v2, p), 0);
	CHECK_INT(CALL(cuMemAllocPitch, &old, &old_pitch, 1000, 4096, 4), 0);
	CHECK_U64(old_pitch, 1024);
	same();
	CHECK_INT(CALL(cuMemFree, old), 0);
	/* The driver takes more than was guessed: settled. */
	set_pitch(4096);
	CHECK_INT(CALL(cuMemAllocPitch_v2, &p, &pitch, 1000, 4096, 4), 0);
	CHECK_U64(pitch, 4096);
	same();
	CHECK_INT(CALL(cuMemFree_v2, p), 0);
	CHECK_INT(CALL(cuMemAllocPitch, &old, &old_pitch, 1000, 4096, 4), 0);
	same();
	CHECK_INT(CALL(cuMemFree, old), 0);
	/* ... and less: a guess of 2 MiB becomes a small block. */
	set_pitch(4);
	CHECK_INT(CALL(cuMemAllocPitch_v2, &p, &pitch, 4, 4096, 4), 0);
	same();
	CHECK_INT(CALL(cuMemFree_v2, p), 0);
	/* More than is left: the driver's block goes back, the outputs stay. */
	set_pitch(1 << 20);
	p = 7, pitch = 8, old = 7, old_pitch = 8;
	CHECK_INT(CALL(cuMemAllocPitch_v2, &p, &pitch, 1000, 5000, 4), CUDA_ERROR_OUT_OF_MEMORY);
	CHECK(p == 7 && pitch == 8);
	CHECK_INT(CALL(cuMemAllocPitch, &old, &old_pitch, 1000, 4095, 4), CUDA_ERROR_OUT_OF_MEMORY);
	CHECK(old == 7 && old_pitch == 8);
	set_pitch(512);
	CHECK_INT(CALL(cuMemAllocPitch_v2, &p, &pitch, 1000, UINT64_MAX / 4, 4), CUDA_ERROR_INVALID_VALUE);
	CHECK_INT(CALL(cuMemAllocPitch_v2, &p, &pitch, 1000, 1000, 5), CUDA_ERROR_INVALID_VALUE);
	CHECK(p == 7 && pitch == 8);
	CHECK_U64(charged(0), FAKE_CONTEXT_BYTES);
	CHECK_U64(live(), FAKE_CONTEXT_BYTES);
	CHECK_INT(CALL(cuCtxDestroy_v2, context), 0);
}

static void part_managed(void)
{
	CUdeviceptr p, q;
	start_in_context();
	CHECK_INT(CALL(cuMemAllocManaged, &p, 1000, 1), 0);
	CHECK_U64(charged(0), FAKE_CONTEXT_BYTES + BLOCK);
	same();
	CHECK_INT(CALL(cuMemAllocManaged, &q, 3 * GIB, 1), 0);
	same();
	CHECK_INT(CALL(cuMemAllocManaged, &q, 3 * GIB, 1), CUDA_ERROR_OUT_OF_MEMORY);
	CHECK_INT(CALL(cuMemAllocManaged, &q, 3 * GIB, 9), CUDA_ERROR_OUT_OF_MEMORY);
	CHECK_INT(CALL(cuMemAllocManaged, &q, 1, 9), CUDA_ERROR_INVALID_VALUE);
	CHECK_INT(CALL(cuMemFree_v2, p), 0);
	same();
	CHECK_INT(CALL(cuCtxDestroy_v2, context), 0);
	CHECK_U64(charged(0), 0);
}

/* A driver that fails where it likes: nothing stays charged, nothing is forgotten. */
static void part_failures(void)
{
	CUdeviceptr p = 7, kept;
	CUdeviceptr_v1 old = 7;
	size_t pitch = 8;
	unsigned int old_pitch = 8;
	CUcontext other = NULL;
	start_in_context();
	CHECK_INT(CALL(cuMemAlloc_v2, &kept, 64 * MIB), 0);
	for (int i = 0; i < 2; i++) {
		CUresult error = i == 0 ? ANY_ERROR : CUDA_ERROR_OUT_OF_MEMORY;
#define FAILS(symbol, ...)                                    \
	do {                                                  \
		fail(#symbol, error);                         \
		CHECK_INT(CALL(symbol, __VA_ARGS__), error);  \
		same();                                       \
	} while (0)
		FAILS(cuMemAlloc_v2, &p, 4096);
		FAILS(cuMemAlloc_v2, &p, 64 * MIB);
		FAILS(cuMemAlloc, &old, 64 * MIB);
		FAILS(cuMemAllocManaged, &p, 64 * MIB, 1);
		FAILS(cuMemAllocPitch_v2, &p, &pitch, 1000, 10000, 4);
		FAILS(cuMemAllocPitch, &old, &old_pitch, 1000, 10000, 4);
		FAILS(cuCtxCreate, &other, 0, 0);
		FAILS(cuCtxCreate_v2, &other, 0, 0);
		FAILS(cuCtxCreate_v3, &other, NULL, 0, 0, 0);
		FAILS(cuCtxCreate_v4, &other, NULL, 0, 0);
		FAILS(cuDevicePrimaryCtxRetain, &other, 0);
		CHECK(p == 7 && old == 7 && pitch == 8 && old_pitch == 8 && other == NULL);
		FAILS(cuMemFree_v2, kept);
		FAILS(cuMemFree, 4096);
		FAILS(cuCtxDestroy, context);
		FAILS(cuCtxDestroy_v2, context);
		FAILS(cuDevicePrimaryCtxRelease_v2, 0);
		FAILS(cuDevicePrimaryCtxReset_v2, 0);
	}
	/* Still known after all the failed attempts. */
	CHECK_INT(CALL(cuMemFree_v2, kept), 0);
	CHECK_U64(charged(0), FAKE_CONTEXT_BYTES);
	/* Unknown pointers reach the driver, which knows best. */
	unsigned long before = calls("cuMemFree_v2");
	CHECK_INT(CALL(cuMemFree_v2, 0), 0);
	CHECK_INT(CALL(cuMemFree_v2, 0x1234560000), CUDA_ERROR_INVALID_VALUE);
	CHECK_INT(CALL(cuMemFree_v2, kept), CUDA_ERROR_INVALID_VALUE);
	CHECK_INT(CALL(cuMemFree, 0), 0);
	CHECK_U64(calls("cuMemFree_v2"), before + 3);
	CHECK_INT(CALL(cuCtxDestroy_v2, context), 0);
	CHECK_U64(charged(0), 0);
}

/* Without a current context the driver's own error comes, and nothing is charged. */
static void part_no_context(void)
{
	CUdeviceptr p = 7;
	size_t a = 1, b = 2;
	start();
	CHECK_INT(CALL(cuMemAlloc_v2, &p, 4096), 201);
	CHECK_INT(CALL(cuMemAllocManaged, &p, 4096, 1), 201);
	CHECK_INT(CALL(cuMemAllocPitch_v2, &p, &a, 64, 64, 4), 201);
	CHECK_INT(CALL(cuMemGetInfo_v2, &a, &b), 201);
	CHECK(p == 7 && a == 1 && b == 2);
	CHECK_INT(CALL(cuCtxCreate_v2, &context, 0, 64), 101);
	CHECK_INT(CALL(cuCtxCreate_v2, &context, 0, -1), 101);
	CHECK_INT(CALL(cuCtxCreate_v2, &context, 0, 2), 101);
	CHECK_INT(CALL(cuDevicePrimaryCtxRetain, &context, 2), 101);
	CHECK_INT(CALL(cuDevicePrimaryCtxRetain, &context, 1000), 101);
	CHECK_INT(CALL(cuDevicePrimaryCtxRelease_v2, -5), 101);
	CHECK_INT(CALL(cuDevicePrimaryCtxReset_v2, 1000), 101);
	CHECK_U64(charged(0), 0);
}

/* Blocks that went on a way that nobody saw: their charge goes when the driver gives out the address again. */
static void part_unseen(void)
{
	fn_cuMemFree_v2 *theirs;
	CUdeviceptr p, q;
	start_in_context();
	theirs = (fn_cuMemFree_v2 *)FAKE(cuda, fake_address, void *, const char *)("cuMemFree_v2");
	static const uint64_t sizes[] = { 64 * MIB, 512 };
	for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
		for (int times = 0; times < 3; times++) {
			CHECK_INT(CALL(cuMemAlloc_v2, &p, sizes[i]), 0);
			CHECK_INT(theirs(p), 0);
			CHECK_INT(CALL(cuMemAlloc_v2, &q, sizes[i]), 0);
			CHECK_U64(q, p);
			same();
			CHECK_INT(CALL(cuMemFree_v2, q), 0);
			same();
		}
	}
	CHECK_INT(CALL(cuMemAllocManaged, &p, 64 * MIB, 1), 0);
	CHECK_INT(theirs(p), 0);
	CHECK_INT(CALL(cuMemAlloc_v2, &q, 64 * MIB), 0);
	CHECK_U64(q, p);
	same();
	CHECK_INT(CALL(cuCtxDestroy_v2, context), 0);
	CHECK_U64(charged(0), 0);
}

/* ---- contexts ---- */

static void part_contexts(void)
{
	CUcontext c[5];
	CUdeviceptr p;
	CUresult (*set_current)(CUcontext);
	start();
	set_current = need(cuda, "cuCtxSetCurrent");
	CHECK_INT(CALL(cuCtxCreate, &c[0], 0, 0), 0);
	CHECK_INT(CALL(cuCtxCreate_v2, &c[1], 0, 0), 0);
	CHECK_INT(CALL(cuCtxCreate_v3, &c[2], NULL, 0, 0, 0), 0);
	CHECK_INT(CALL(cuCtxCreate_v4, &c[3], NULL, 0, 0), 0);
	CHECK_INT(CALL(cuCtxCreate_v2, &c[4], 0, 1), 0);
	CHECK_U64(charged(0), 4 * FAKE_CONTEXT_BYTES);
	CHECK_U64(charged(1), FAKE_CONTEXT_BYTES);
	/* A block belongs to the context, and to its device, that were current when it was made. */
	CHECK_INT(CALL(cuMemAlloc_v2, &p, 64 * MIB), 0);
	CHECK_U64(charged(1), FAKE_CONTEXT_BYTES + 64 * MIB);
	CHECK_INT(set_current(c[1]), 0);
	CHECK_INT(CALL(cuMemAlloc_v2, &p, 64 * MIB), 0);
	CHECK_INT(CALL(cuMemAlloc_v2, &p, 512), 0);
	CHECK_INT(CALL(cuMemAllocManaged, &p, 64 * MIB, 1), 0);
	CHECK_U64(charged(0), 4 * FAKE_CONTEXT_BYTES + 128 * MIB + BLOCK);
	CHECK_INT(CALL(cuCtxDestroy, c[0]), 0);
	CHECK_U64(charged(0), 3 * FAKE_CONTEXT_BYTES + 128 * MIB + BLOCK);
	CHECK_INT(CALL(cuCtxDestroy_v2, c[1]), 0);
	CHECK_U64(charged(0), 2 * FAKE_CONTEXT_BYTES);
	CHECK_INT(CALL(cuCtxDestroy_v2, c[2]), 0);
	CHECK_INT(CALL(cuCtxDestroy_v2, c[3]), 0);
	CHECK_U64(charged(0), 0);
	CHECK_INT(CALL(cuCtxDestroy_v2, c[4]), 0);
	CHECK_U64(charged(1), 0);
	CHECK_U64(live(), 0);
	/* As many as fit. */
	for (int i = 0; i < 3; i++) {
		static CUcontext many[64];
		int n = 0;
		while (CALL(cuCtxCreate_v2, &many[n], 0, 0) == 0)
			n++;
		CHECK_INT(n, (int)(LIMIT / FAKE_CONTEXT_BYTES));
		CHECK_INT(CALL(cuDevicePrimaryCtxRetain, &c[0], 0), CUDA_ERROR_OUT_OF_MEMORY);
		while (n > 0)
			CHECK_INT(CALL(cuCtxDestroy_v2, many[--n]), 0);
		CHECK_U64(charged(0), 0);
	}
	CHECK_INT(CALL(cuCtxDestroy_v2, NULL), 201);
}

static void part_primary(void)
{
	CUcontext c, again;
	CUdeviceptr p;
	CUresult (*set_current)(CUcontext);
	start();
	set_current = need(cuda, "cuCtxSetCurrent");
	for (int version = 0; version < 2; version++) {
		CUresult (*release)(CUdevice) = need(cuda, version == 0 ? "cuDevicePrimaryCtxRelease" : "cuDevicePrimaryCtxRelease_v2");
		CUresult (*reset)(CUdevice) = need(cuda, version == 0 ? "cuDevicePrimaryCtxReset" : "cuDevicePrimaryCtxReset_v2");
		CHECK_INT(release(0), 201);
		CHECK_INT(CALL(cuDevicePrimaryCtxRetain, &c, 0), 0);
		CHECK_U64(charged(0), FAKE_CONTEXT_BYTES);
		CHECK_INT(CALL(cuDevicePrimaryCtxRetain, &again, 0), 0);
		CHECK(again == c);
		CHECK_U64(charged(0), FAKE_CONTEXT_BYTES);
		CHECK_INT(set_current(c), 0);
		CHECK_INT(CALL(cuMemAlloc_v2, &p, 64 * MIB), 0);
		CHECK_INT(release(0), 0);
		CHECK_U64(charged(0), FAKE_CONTEXT_BYTES + 64 * MIB);
		/* The driver refuses to destroy it like another; its blocks stay known. */
		CHECK_INT(CALL(cuCtxDestroy_v2, c), 201);
		CHECK_U64(charged(0), FAKE_CONTEXT_BYTES + 64 * MIB);
		CHECK_INT(release(0), 0);
		CHECK_U64(charged(0), 0);
		CHECK_INT(release(0), 201);

		CHECK_INT(CALL(cuDevicePrimaryCtxRetain, &c, 0), 0);
		CHECK_INT(CALL(cuDevicePrimaryCtxRetain, &c, 0), 0);
		CHECK_INT(CALL(cuMemAlloc_v2, &p, 64 * MIB), 0);
		CHECK_INT(reset(0), 0);
		CHECK_U64(charged(0), 0);
		CHECK_INT(reset(0), 0);
		CHECK_U64(live(), 0);
		/* The driver goes on counting: what is made now is there until those are released, too. */
		CHECK_INT(CALL(cuDevicePrimaryCtxRetain, &c, 0), 0);
		CHECK_INT(CALL(cuMemAlloc_v2, &p, 64 * MIB), 0);
		for (int i = 0; i < 2; i++) {
			CHECK_INT(release(0), 0);
			CHECK_U64(live(), FAKE_CONTEXT_BYTES + 64 * MIB);
			same();
		}
		CHECK_INT(CALL(cuMemFree_v2, p), 0);
		same();
		CHECK_INT(release(0), 0);
		CHECK_U64(live(), 0);
		CHECK_U64(charged(0), 0);
		CHECK_INT(release(0), 201);
		/* Both devices, each for itself. */
		CHECK_INT(CALL(cuDevicePrimaryCtxRetain, &c, 0), 0);
		CHECK_INT(CALL(cuDevicePrimaryCtxRetain, &again, 1), 0);
		CHECK_U64(charged(0), FAKE_CONTEXT_BYTES);
		CHECK_U64(charged(1), FAKE_CONTEXT_BYTES);
		CHECK_INT(release(1), 0);
		CHECK_U64(charged(0), FAKE_CONTEXT_BYTES);
		CHECK_U64(charged(1), 0);
		CHECK_INT(release(0), 0);
	}
	CHECK_U64(charged(0), 0);
}

/* ---- views ---- */

static void view(uint64_t total, uint64_t free_, uint64_t used, bool limited)
{
	size_t a = 1, b = 2;
	unsigned int old_a, old_b;
	nvmlDevice_t device;
	nvmlMemory_t m1;
	nvmlMemory_v2_t m2;
	void *nvml = dlopen("libnvidia-ml.so.1", RTLD_NOW);
	nvmlReturn_t (*by_index)(unsigned int, nvmlDevice_t *) = need(nvml, "nvmlDeviceGetHandleByIndex_v2");
	CHECK_INT(by_index(0, &device), 0);
	CHECK_INT(CALL(cuMemGetInfo_v2, &a, &b), 0);
	CHECK_U64(a, free_);
	CHECK_U64(b, total);
	a = b = 3;
	CHECK_INT(CALL(cuMemGetInfo_v2, &a, NULL), 0);
	CHECK_U64(a, free_);
	CHECK_INT(CALL(cuMemGetInfo_v2, NULL, &b), 0);
	CHECK_U64(b, total);
	CHECK_INT(CALL(cuMemGetInfo_v2, NULL, NULL), 0);
	CHECK_INT(CALL(cuMemGetInfo, &old_a, &old_b), 0);
	CHECK_U64(old_a, free_ < UINT32_MAX ? free_ : UINT32_MAX);
	CHECK_U64(old_b, total < UINT32_MAX ? total : UINT32_MAX);
	CHECK_INT(CALL(cuMemGetInfo, NULL, &old_b), 0);
	CHECK_INT(CALL(cuMemGetInfo, &old_a, NULL), 0);
	CHECK_INT(CALL(cuDeviceTotalMem_v2, &b, 0), 0);
	CHECK_U64(b, total);
	CHECK_INT(CALL(cuDeviceTotalMem, &old_b, 0), 0);
	CHECK_U64(old_b, total < UINT32_MAX ? total : UINT32_MAX);
	CHECK_INT(FN(nvml, nvmlDeviceGetMemoryInfo)(device, &m1), 0);
	memset(&m2, 0, sizeof m2);
	m2.version = (unsigned int)(sizeof m2 | 2u << 24);
	CHECK_INT(FN(nvml, nvmlDeviceGetMemoryInfo_v2)(device, &m2), 0);
	CHECK_U64(m1.total, total);
	CHECK_U64(m2.total, total);
	CHECK_U64(m2.used, used);
	CHECK_U64(m2.reserved, limited ? 0 : FAKE_RESERVED);
	CHECK_U64(m1.used, limited ? used : used + FAKE_RESERVED);
	if (limited) {
		CHECK_U64(m1.free, free_);
		CHECK_U64(m2.free, free_);
	}
}

static void part_views(void)
{
	CUdeviceptr p;
	void (*set_total)(uint64_t);
	start_in_context();
	set_total = need(cuda, "fake_set_total");
	view(LIMIT, LIMIT - FAKE_CONTEXT_BYTES, FAKE_CONTEXT_BYTES, true);
	CHECK_INT(CALL(cuMemAlloc_v2, &p, GIB), 0);
	view(LIMIT, LIMIT - FAKE_CONTEXT_BYTES - GIB, FAKE_CONTEXT_BYTES + GIB, true);
	/* The neighbours have taken the GPU's rest: what is free is what it has. */
	set_total(2 * GIB);
	size_t a, b;
	CHECK_INT(CALL(cuMemGetInfo_v2, &a, &b), 0);
	CHECK_U64(a, GIB - FAKE_CONTEXT_BYTES);
	CHECK_U64(b, 2 * GIB);
	CHECK_INT(CALL(cuDeviceTotalMem_v2, &b, 0), 0);
	CHECK_U64(b, 2 * GIB);
	/* ... and the driver's own refusal, within the limit, is another event. */
	CUdeviceptr q;
	CHECK_INT(CALL(cuMemAlloc_v2, &q, GIB + 512 * MIB), CUDA_ERROR_OUT_OF_MEMORY);
	CHECK_U64(charged(0), FAKE_CONTEXT_BYTES + GIB);
	CHECK_INT(CALL(cuCtxDestroy_v2, context), 0);
}

static void part_views_unlimited(void)
{
	start();
	CHECK_INT(CALL(cuCtxCreate_v2, &context, 0, 0), 0);
	view(FAKE_TOTAL, FAKE_TOTAL - FAKE_CONTEXT_BYTES, 3 * GIB, false);
	CHECK_INT(CALL(cuCtxDestroy_v2, context), 0);
}

static void part_views_pod(void)
{
	start_in_context();
	view(GIB, GIB - FAKE_CONTEXT_BYTES, FAKE_CONTEXT_BYTES, true);
	CHECK_INT(CALL(cuCtxDestroy_v2, context), 0);
}

/* More is used than the limit, after a resize: nothing is negative, nothing is given. */
static void part_views_over(void)
{
	CUcontext c;
	size_t a, b;
	start();
	CHECK_INT(CALL(cuCtxCreate_v2, &c, 0, 0), CUDA_ERROR_OUT_OF_MEMORY);
	CHECK_INT(CALL(cuDeviceTotalMem_v2, &b, 0), 0);
	CHECK_U64(b, LIMIT);
	CHECK_U64(charged(0), 5 * GIB);
	/* A context that is not ours to refuse: the view in it. */
	CUresult (*create)(CUcontext *, unsigned int, CUdevice) = ((void *(*)(const char *))need(cuda, "fake_address"))("cuCtxCreate_v2");
	CHECK_INT(create(&c, 0, 0), 0);
	CHECK_INT(CALL(cuMemGetInfo_v2, &a, &b), 0);
	CHECK_U64(a, 0);
	CHECK_U64(b, LIMIT);
	CHECK_INT(CALL(cuCtxDestroy_v2, c), 0);
}

static void part_nvml_errors(void)
{
	nvmlDevice_t device;
	nvmlMemory_t m1 = { 1, 2, 3 };
	nvmlMemory_v2_t m2 = { 1, 2, 3, 4, 5 };
	void *nvml = dlopen("libnvidia-ml.so.1", RTLD_NOW);
	void (*nvml_fail)(nvmlReturn_t) = need(nvml, "fake_nvml_fail");
	nvmlReturn_t (*by_index)(unsigned int, nvmlDevice_t *) = need(nvml, "nvmlDeviceGetHandleByIndex_v2");
	CHECK_INT(by_index(0, &device), 0);
	CHECK_INT(FN(nvml, nvmlDeviceGetMemoryInfo)(device, NULL), 2);
	CHECK_INT(FN(nvml, nvmlDeviceGetMemoryInfo_v2)(device, NULL), 2);
	CHECK_INT(FN(nvml, nvmlDeviceGetMemoryInfo)(NULL, &m1), 2);
	CHECK_INT(FN(nvml, nvmlDeviceGetMemoryInfo_v2)(NULL, &m2), 2);
	CHECK_INT(FN(nvml, nvmlDeviceGetMemoryInfo_v2)(device, &m2), 25);
	nvml_fail(999);
	CHECK_INT(FN(nvml, nvmlDeviceGetMemoryInfo)(device, &m1), 999);
	CHECK_INT(FN(nvml, nvmlDeviceGetMemoryInfo_v2)(device, &m2), 999);
	CHECK(m1.total == 1 && m1.free == 2 && m1.used == 3);
	CHECK(m2.version == 1 && m2.total == 2 && m2.reserved == 3 && m2.free == 4 && m2.used == 5);
	/* A poller that loads NVML anew each time. */
	nvml_fail(0);
	for (int i = 0; i < 3; i++)
		CHECK_U64(charged(0), 0);
}

/* Only the pod's processes are listed, where the numbers are ours. */
static void part_nvml_processes(void)
{
	start_in_context();
	nvmlDevice_t device;
	void *nvml = dlopen("libnvidia-ml.so.1", RTLD_NOW);
	void (*set)(const unsigned int *, unsigned int) = need(nvml, "fake_nvml_processes");
	nvmlReturn_t (*by_index)(unsigned int, nvmlDevice_t *) = need(nvml, "nvmlDeviceGetHandleByIndex_v2");
	const unsigned int me = (unsigned int)getpid();
	const unsigned int ours[] = { 999999, me, 999998 }, theirs[] = { 999999, 999998 };
	CUdeviceptr p;
	struct stat ns;
	CHECK(stat("/proc/self/ns/pid", &ns) == 0);
	bool host = ns.st_ino == 0xeffffffc;
	CHECK_INT(by_index(0, &device), 0);
	CHECK_INT(CALL(cuMemAlloc_v2, &p, 4096), 0); /* a slot */
	for (int v = 0; v < 9; v++) {
		static const char *const names[] = {
			"nvmlDeviceGetComputeRunningProcesses", "nvmlDeviceGetGraphicsRunningProcesses",
			"nvmlDeviceGetMPSComputeRunningProcesses"
		};
		char name[64], rows[8][24];
		snprintf(name, sizeof name, "%s%s", names[v / 3], v % 3 == 0 ? "" : v % 3 == 1 ? "_v2" : "_v3");
		nvmlReturn_t (*list)(nvmlDevice_t, unsigned int *, void *) = need(nvml, name);
		CHECK(is_hook((void *)(uintptr_t)list));
		unsigned int n = 8, pid;
		unsigned long long bytes;
		set(ours, 3);
		memset(rows, 0x5a, sizeof rows);
		CHECK_INT(list(device, &n, rows), 0);
		CHECK_INT(n, 1);
		memcpy(&pid, rows[0], sizeof pid);
		memcpy(&bytes, rows[0] + 8, sizeof bytes);
		CHECK(pid == me && bytes == 1001);
		/* Too little room: NVML's own count. */
		n = 2;
		CHECK_INT(list(device, &n, rows), 7);
		CHECK_INT(n, 3);
		n = 0;
		CHECK_INT(list(device, &n, NULL), 7);
		CHECK_INT(n, 3);
		/* The host's numbers stay as they are, unless ours are the host's. */
		set(theirs, 2);
		n = 8;
		CHECK_INT(list(device, &n, rows), 0);
		CHECK_INT(n, host ? 0 : 2);
		set(ours, 0);
		n = 8;
		CHECK_INT(list(device, &n, rows), 0);
		CHECK_INT(n, 0);
		CHECK_INT(list(device, NULL, rows), 2);
		CHECK_INT(list(NULL, &n, rows), 2);
	}
	CHECK_INT(CALL(cuMemFree_v2, p), 0);
	CHECK_INT(CALL(cuCtxDestroy_v2, context), 0);
}

/* The lists whose rows are elsewhere than in the first argument: who is asked for, how, and what comes back. */
struct listed {
	nvmlReturn_t result;
	unsigned int count, pids[4];
	unsigned char last_row[32]; /* the third, as it lies in the caller's array */
};

static struct listed listed_detail(void *nvml, nvmlDevice_t device, unsigned int version, unsigned int room)
{
	nvmlProcessDetail_v1_t rows[4];
	nvmlProcessDetailList_t list = { version, 3, room, room > 0 ? rows : NULL };
	struct listed out = { .result = 0 };
	memset(rows, 0x5a, sizeof rows);
	out.result = FN(nvml, nvmlDeviceGetRunningProcessDetailList)(device, &list);
	out.count = list.numProcArrayEntries;
	for (int i = 0; i < 4; i++)
		out.pids[i] = rows[i].pid;
	memcpy(out.last_row, &rows[2], sizeof out.last_row);
	return out;
}

static struct listed listed_info(void *nvml, nvmlDevice_t device, unsigned int version, unsigned int room)
{
	nvmlProcessUtilizationInfo_v1_t rows[4];
	nvmlProcessesUtilizationInfo_t info = { version, room, 7, room > 0 ? rows : NULL };
	struct listed out = { .result = 0 };
	memset(rows, 0x5a, sizeof rows);
	out.result = FN(nvml, nvmlDeviceGetProcessesUtilizationInfo)(device, &info);
	out.count = info.processSamplesCount;
	for (int i = 0; i < 4; i++)
		out.pids[i] = rows[i].pid;
	memcpy(out.last_row, &rows[2], sizeof out.last_row);
	return out;
}

static struct listed listed_samples(void *nvml, nvmlDevice_t device, unsigned int version, unsigned int room)
{
	nvmlProcessUtilizationSample_t rows[4];
	struct listed out = { .count = room };
	(void)version;
	memset(rows, 0x5a, sizeof rows);
	out.result = FN(nvml, nvmlDeviceGetProcessUtilization)(device, room > 0 ? rows : NULL, &out.count, 7);
	for (int i = 0; i < 4; i++)
		out.pids[i] = rows[i].pid;
	if (out.result == 0 && out.count > 0)
		CHECK_INT(rows[0].timeStamp, 8);
	memcpy(out.last_row, &rows[2], sizeof out.last_row);
	return out;
}

/* The detailed list, and who keeps the GPU busy, have no more than the lists of processes. */
static void part_nvml_details(void)
{
	start_in_context();
	static const struct {
		const char *symbol;
		struct listed (*ask)(void *, nvmlDevice_t, unsigned int version, unsigned int room);
		unsigned int version;
		nvmlReturn_t none;
	} lists[] = {
		{ "nvmlDeviceGetRunningProcessDetailList", listed_detail, NVML_PROCESS_DETAIL_LIST_V1, 0 },
		{ "nvmlDeviceGetProcessesUtilizationInfo", listed_info, NVML_PROCESSES_UTILIZATION_V1, 6 },
		{ "nvmlDeviceGetProcessUtilization", listed_samples, 0, 6 },
	};
	nvmlDevice_t device;
	void *nvml = dlopen("libnvidia-ml.so.1", RTLD_NOW);
	void (*set)(const unsigned int *, unsigned int) = need(nvml, "fake_nvml_processes");
	void (*nvml_fail)(nvmlReturn_t) = need(nvml, "fake_nvml_fail");
	nvmlReturn_t (*by_index)(unsigned int, nvmlDevice_t *) = need(nvml, "nvmlDeviceGetHandleByIndex_v2");
	const unsigned int me = (unsigned int)getpid();
	const unsigned int ours[] = { 999999, me, 999998 }, theirs[] = { 999999, 999998 };
	static const unsigned char nothing[32];
	CUdeviceptr p;
	struct stat ns;
	CHECK(stat("/proc/self/ns/pid", &ns) == 0);
	bool host = ns.st_ino == 0xeffffffc;
	CHECK_INT(by_index(0, &device), 0);
	CHECK_INT(CALL(cuMemAlloc_v2, &p, 4096), 0); /* a slot */
	for (size_t i = 0; i < sizeof lists / sizeof lists[0]; i++) {
		const unsigned int version = lists[i].version;
		CHECK(is_hook(need(nvml, lists[i].symbol)));
		set(ours, 3);
		struct listed got = lists[i].ask(nvml, device, version, 4);
		CHECK_INT(got.result, 0);
		CHECK_INT(got.count, 1);
		CHECK_INT(got.pids[0], me);
		/* Nor are the others behind it, where the driver had put them. */
		CHECK(got.pids[1] == 0 && got.pids[2] == 0 && memcmp(got.last_row, nothing, sizeof nothing) == 0);
		CHECK_INT(got.pids[3], 0x5a5a5a5a);
		/* Too little room, or none: NVML's own count. */
		for (unsigned int room = 0; room <= 2; room += 2) {
			got = lists[i].ask(nvml, device, version, room);
			CHECK_INT(got.result, 7);
			CHECK_INT(got.count, 3);
		}
		/* The host's numbers stay as they are, unless ours are the host's. */
		set(theirs, 2);
		got = lists[i].ask(nvml, device, version, 4);
		CHECK_INT(got.result, host ? lists[i].none : 0);
		CHECK_INT(got.count, host ? 0 : 2);
		CHECK_INT(got.pids[0], host ? 0 : 999999);
		set(ours, 0);
		got = lists[i].ask(nvml, device, version, 4);
		CHECK_INT(got.result, 0);
		CHECK_INT(got.count, 0);
		CHECK_INT(lists[i].ask(nvml, NULL, version, 4).result, 2);
		nvml_fail(999);
		CHECK_INT(lists[i].ask(nvml, device, version, 4).result, 999);
		nvml_fail(0);
		if (version == 0)
			continue;
		/* A version that the driver knows and we do not: as of a driver that does not, and nothing is written. */
		set(ours, 3);
		got = lists[i].ask(nvml, device, version + (1u << 24), 4);
		CHECK_INT(got.result, 25);
		CHECK_INT(got.count, 4);
		CHECK_INT(got.pids[0], 0x5a5a5a5a);
		CHECK_INT(lists[i].ask(nvml, NULL, version + (1u << 24), 4).result, 2);
	}
	CHECK_INT(FN(nvml, nvmlDeviceGetRunningProcessDetailList)(device, NULL), 2);
	CHECK_INT(FN(nvml, nvmlDeviceGetProcessesUtilizationInfo)(device, NULL), 2);
	CHECK_INT(FN(nvml, nvmlDeviceGetProcessUtilization)(device, NULL, NULL, 0), 2);
	CHECK_INT(CALL(cuMemFree_v2, p), 0);
	CHECK_INT(CALL(cuCtxDestroy_v2, context), 0);
}

/* Without pages nothing is known of a pod: the driver's own answer, of any version. */
static void part_nvml_details_unfenced(void)
{
	nvmlDevice_t device;
	void *nvml = dlopen("libnvidia-ml.so.1", RTLD_NOW);
	void (*set)(const unsigned int *, unsigned int) = need(nvml, "fake_nvml_processes");
	nvmlReturn_t (*by_index)(unsigned int, nvmlDevice_t *) = need(nvml, "nvmlDeviceGetHandleByIndex_v2");
	const unsigned int all[] = { 999999, (unsigned int)getpid(), 999998 };
	CHECK_INT(by_index(0, &device), 0);
	set(all, 3);
	for (unsigned int v = 0; v < 2; v++) {
		struct listed detail = listed_detail(nvml, device, NVML_PROCESS_DETAIL_LIST_V1 + (v << 24), 4);
		struct listed info = listed_info(nvml, device, NVML_PROCESSES_UTILIZATION_V1 + (v << 24), 4);
		struct listed samples = listed_samples(nvml, device, 0, 4);
		CHECK(detail.result == 0 && detail.count == 3 && detail.pids[2] == 999998);
		CHECK(info.result == 0 && info.count == 3 && info.pids[2] == 999998);
		CHECK(samples.result == 0 && samples.count == 3 && samples.pids[2] == 999998);
	}
}

/* The same where the numbers are certainly not the host's. */
static void apart(void (*part)(void))
{
	int status;
	CHECK(unshare(CLONE_NEWPID) == 0 || unshare(CLONE_NEWUSER | CLONE_NEWPID) == 0);
	pid_t pid = fork();
	CHECK(pid >= 0);
	if (pid == 0) {
		part();
		_exit(0);
	}
	CHECK(waitpid(pid, &status, 0) == pid);
	CHECK_INT(status, 0);
}

static void part_nvml_processes_apart(void) { apart(part_nvml_processes); }
static void part_nvml_details_apart(void) { apart(part_nvml_details); }

/* NULL where a pointer belongs: the driver's own answer, from every hook, in and out of a context. */
static void part_null(void)
{
	start();
	for (int i = 0; i < 2; i++) {
		CUdeviceptr p;
		CUdeviceptr_v1 old;
		size_t pitch;
		unsigned int old_pitch;
		void *function;
		int status = 77;
		CHECK_INT(CALL(cuMemAlloc_v2, NULL, 4096), 1);
		CHECK_INT(CALL(cuMemAlloc, NULL, 4096), 1);
		CHECK_INT(CALL(cuMemAllocManaged, NULL, 4096, 1), 1);
		CHECK_INT(CALL(cuMemAllocPitch_v2, NULL, &pitch, 64, 64, 4), 1);
		CHECK_INT(CALL(cuMemAllocPitch_v2, &p, NULL, 64, 64, 4), 1);
		CHECK_INT(CALL(cuMemAllocPitch, NULL, &old_pitch, 64, 64, 4), 1);
		CHECK_INT(CALL(cuMemAllocPitch, &old, NULL, 64, 64, 4), 1);
		CHECK_INT(CALL(cuDeviceTotalMem_v2, NULL, 0), 1);
		CHECK_INT(CALL(cuDeviceTotalMem, NULL, 0), 1);
		CHECK_INT(CALL(cuCtxCreate, NULL, 0, 0), 1);
		CHECK_INT(CALL(cuCtxCreate_v2, NULL, 0, 0), 1);
		CHECK_INT(CALL(cuCtxCreate_v3, NULL, NULL, 0, 0, 0), 1);
		CHECK_INT(CALL(cuCtxCreate_v4, NULL, NULL, 0, 0), 1);
		CHECK_INT(CALL(cuCtxDestroy, NULL), 201);
		CHECK_INT(CALL(cuCtxDestroy_v2, NULL), 201);
		CHECK_INT(CALL(cuDevicePrimaryCtxRetain, NULL, 0), 1);
		CHECK_INT(CALL(cuMemFree_v2, 0), 0);
		CHECK_INT(CALL(cuMemFree, 0), 0);
		CHECK_INT(CALL(cuGetProcAddress, NULL, &function, 12000, 0), 1);
		CHECK_INT(CALL(cuGetProcAddress, "cuInit", NULL, 12000, 0), 1);
		CHECK_INT(CALL(cuGetProcAddress_v2, NULL, &function, 12000, 0, &status), 1);
		CHECK_INT(CALL(cuGetProcAddress_v2, "cuInit", NULL, 12000, 0, NULL), 1);
		CHECK_INT(CALL(cuGetProcAddress_v2, "cuInit", &function, 12000, 3, &status), 1);
		CHECK_INT(status, 77);
		CHECK_INT(CALL(cuInit, 5), 1);
		CHECK_INT(CALL(cuMemAlloc_v2, &p, 0), i == 0 ? 201 : 1);
		if (i == 0)
			CHECK_INT(CALL(cuCtxCreate_v2, &context, 0, 0), 0);
	}
	CHECK_U64(charged(0), FAKE_CONTEXT_BYTES);
	CHECK_INT(CALL(cuCtxDestroy_v2, context), 0);
}

/* ---- cuGetProcAddress ---- */

/* A hook answers with the table's pointer; which one, dlsym says. */
static void one_answer(const char *name, int version, cuuint64_t flags, bool internal)
{
	void *(*address)(const char *) = need(cuda, "fake_address");
	fn_cuGetProcAddress_v2 *theirs2 = (fn_cuGetProcAddress_v2 *)address("cuGetProcAddress_v2");
	fn_cuGetProcAddress *theirs1 = (fn_cuGetProcAddress *)address("cuGetProcAddress");
	for (int abi = 1; abi <= 2; abi++) {
		void *want = (void *)1, *got = (void *)1;
		int want_status = 55, got_status = 55;
		CUresult want_result = abi == 1 ? theirs1(name, &want, version, flags) : theirs2(name, &want, version, flags, &want_status);
		CUresult got_result = abi == 1 ? CALL(cuGetProcAddress, name, &got, version, flags) :
						 CALL(cuGetProcAddress_v2, name, &got, version, flags, &got_status);
		CHECK_INT(got_result, want_result);
		CHECK_INT(got_status, want_status);
		if (abi == 2) {
			void *third = (void *)1;
			CHECK_INT(CALL(cuGetProcAddress_v2, name, &third, version, flags, NULL), want_result);
			CHECK(third == got);
		}
		if (want_result != CUDA_SUCCESS || want == NULL || want == (void *)1) {
			CHECK(got == want);
			continue;
		}
		/* The variant that the driver chose. */
		const char *chosen = NULL;
		static const char *const symbols[] = {
#define NAME(library, symbol, name_, version_, stream) #symbol,
			TABLE_HOOKED(NAME)
		};
		/* Asked for once: under a sanitizer each of the driver's searches takes long. */
		static void *exported[sizeof symbols / sizeof symbols[0]];
		for (size_t i = 0; i < sizeof symbols / sizeof symbols[0]; i++) {
			if (exported[i] == NULL)
				exported[i] = address(symbols[i]);
			if (exported[i] == want)
				chosen = symbols[i];
		}
		if (chosen != NULL) {
			if (got != look(cuda, chosen))
				unit_fail("%s at %d, flags %d: not the hook of %s", name, version, (int)flags, chosen);
		} else if (internal && is_hook(got)) {
			continue; /* checked by calling it */
		} else if (got != want) {
			unit_fail("%s at %d, flags %d: a hook for a function that is none of ours", name, version, (int)flags);
		}
	}
}

static void matrix(bool internal)
{
	static const char *const names[] = {
#define NAME_OF(library, symbol, name, version, stream) #name,
		TABLE_HOOKED(NAME_OF) "cuMemsetD8", "cuGetExportTable", "cuDeviceGetUuid",
		"cuCtxGetCurrent", "cuNoSuchFunction", "", "cuMemAlloc_v2"
	};
	static const int versions[] = { 0, 1000, 2000, 3010, 3020, 4000, 6000, 7000, 9020, 10000, 11000, 11010, 11030, 11040,
					11080, 12000, 12020, 12040, 12050, 12080, 13000, 13010, 14000, INT_MAX, -1 };
	for (size_t n = 0; n < sizeof names / sizeof names[0]; n++)
		for (size_t v = 0; v < sizeof versions / sizeof versions[0]; v++)
			for (cuuint64_t flags = 0; flags <= 3; flags++)
				one_answer(names[n], versions[v], flags, internal);
}

static void part_getproc(void)
{
	void *function;
	void (*set_version)(int);
	int status;
	start();
	set_version = need(cuda, "fake_set_version");
	static const int drivers[] = { 11040, 12000, 12080, 13000 };
	for (size_t i = 0; i < sizeof drivers / sizeof drivers[0]; i++) {
		set_version(drivers[i]);
		matrix(false);
	}
	/* Itself, with the number of arguments that the driver means. */
	CHECK_INT(CALL(cuGetProcAddress_v2, "cuGetProcAddress", &function, 11030, 0, &status), 0);
	CHECK(function == look(cuda, "cuGetProcAddress"));
	CHECK_INT(CALL(cuGetProcAddress, "cuGetProcAddress", &function, 12000, 0), 0);
	CHECK(function == look(cuda, "cuGetProcAddress_v2"));
	fn_cuGetProcAddress_v2 *again = (fn_cuGetProcAddress_v2 *)function;
	CHECK_INT(again("cuMemAlloc", &function, 12000, 0, &status), 0);
	CHECK(function == look(cuda, "cuMemAlloc_v2"));
	/* By symbol, for default streams of each thread. */
	CHECK_INT(CALL(cuGetProcAddress_v2_ptsz, "cuMemMapArrayAsync", &function, 12000, 0, &status), 0);
	CHECK(function == look(cuda, "cuMemMapArrayAsync_ptsz"));
	CHECK_INT(CALL(cuGetProcAddress_ptsz, "cuMemMapArrayAsync", &function, 12000, 0), 0);
	CHECK(function == look(cuda, "cuMemMapArrayAsync_ptsz"));
	CHECK_INT(CALL(cuGetProcAddress_ptsz, "cuMemMapArrayAsync", &function, 12000, CU_GET_PROC_ADDRESS_LEGACY_STREAM), 0);
	CHECK(function == look(cuda, "cuMemMapArrayAsync"));
}

/* A driver whose answers dlsym does not know: known by what was asked. */
static void part_getproc_internal(void)
{
	void (*internal)(int);
	const char *(*last)(void);
	void *function;
	CUdeviceptr p;
	CUdeviceptr_v1 old;
	int status;
	start_in_context();
	internal = need(cuda, "fake_internal_addresses");
	last = need(cuda, "fake_last");
	internal(1);
	matrix(true);
	CHECK_INT(CALL(cuGetProcAddress_v2, "cuMemAlloc", &function, 12000, 0, &status), 0);
	CHECK(is_hook(function));
	CHECK_INT(((fn_cuMemAlloc_v2 *)function)(&p, 64 * MIB), 0);
	CHECK(strcmp(last(), "cuMemAlloc_v2") == 0);
	same();
	CHECK_INT(CALL(cuGetProcAddress, "cuMemAlloc", &function, 3010, 0), 0);
	CHECK_INT(((fn_cuMemAlloc *)function)(&old, 64 * MIB), 0);
	CHECK(strcmp(last(), "cuMemAlloc") == 0);
	same();
	CHECK_INT(CALL(cuMemFree, old), 0);
	CHECK_INT(CALL(cuMemFree_v2, p), 0);
	/* Of a later CUDA than the table knows, what the driver does not export stays the driver's. */
	CHECK_INT(CALL(cuGetProcAddress_v2, "cuMemAlloc", &function, 99000, 0, &status), 0);
	CHECK(!is_hook(function));
	internal(0);
	CHECK_INT(CALL(cuGetProcAddress_v2, "cuMemAlloc", &function, 99000, 0, &status), 0);
	CHECK(is_hook(function));
	CHECK_INT(CALL(cuCtxDestroy_v2, context), 0);
}

/* Every hook reaches the driver's function of its own name, and returns its answer. */
static void part_reaches(void)
{
	start();
	unsigned char junk[64] = { 0 };
	for (int id = 0; id < TABLE_HOOKS; id++) {
		static const char *const symbols[] = { TABLE_HOOKED(NAME) };
		if (strncmp(symbols[id], "nvml", 4) == 0)
			continue;
		unsigned long before = calls(symbols[id]);
		fail(symbols[id], ANY_ERROR);
		/* The driver returns before it looks at any argument, and with size 0 or no output
		 * nothing is charged. */
		CUresult (*hook)(void *, void *, uintptr_t, uintptr_t, uintptr_t) = need(cuda, symbols[id]);
		CHECK(is_hook((void *)(uintptr_t)hook));
		CUresult result = strncmp(symbols[id], "cuInit", 6) == 0 || strstr(symbols[id], "Release") != NULL ||
						  strstr(symbols[id], "Reset") != NULL || strstr(symbols[id], "Free") != NULL ?
					  hook(NULL, NULL, 0, 0, 0) :
					  hook(strstr(symbols[id], "ProcAddress") != NULL ? (void *)"x" : NULL, junk, 0, 0, 0);
		if (result != ANY_ERROR || calls(symbols[id]) != before + 1)
			unit_fail("%s gave %d after %lu calls", symbols[id], result, calls(symbols[id]) - before);
	}
	CHECK_U64(charged(0), 0);
}

/* ---- threads ---- */

static void *churn(void *arg)
{
	unsigned int seed = (unsigned int)(uintptr_t)arg;
	CUdeviceptr p[32] = { 0 };
	CUresult (*set_current)(CUcontext) = need(cuda, "cuCtxSetCurrent");
	fn_cuMemAlloc_v2 *alloc = FN(cuda, cuMemAlloc_v2);
	fn_cuMemFree_v2 *free_it = FN(cuda, cuMemFree_v2);
	fn_cuDevicePrimaryCtxRetain *retain = FN(cuda, cuDevicePrimaryCtxRetain);
	fn_cuDevicePrimaryCtxRelease_v2 *release = FN(cuda, cuDevicePrimaryCtxRelease_v2);
	CUcontext c;
	set_current(context);
	for (int i = 0; i < 3000; i++) {
		seed = seed * 1103515245 + 12345;
		unsigned int k = seed >> 16 & 31;
		if (p[k] != 0) {
			CHECK_INT(free_it(p[k]), 0);
			p[k] = 0;
		} else if (alloc(&p[k], (seed >> 21 & 1) ? 512 : 3 * MIB) != 0) {
			p[k] = 0;
		}
		if ((seed >> 24 & 15) == 0 && retain(&c, 1) == 0)
			CHECK_INT(release(1), 0);
	}
	for (int k = 0; k < 32; k++)
		CHECK_INT(free_it(p[k]), 0);
	return NULL;
}

static void part_threads(void)
{
	pthread_t threads[8];
	start_in_context();
	for (uintptr_t i = 0; i < 8; i++)
		CHECK(pthread_create(&threads[i], NULL, churn, (void *)(i + 1)) == 0);
	for (int i = 0; i < 8; i++)
		CHECK(pthread_join(threads[i], NULL) == 0);
	CHECK_U64(live(), FAKE_CONTEXT_BYTES);
	CHECK_U64(charged(0), FAKE_CONTEXT_BYTES);
	CHECK_U64(charged(1), 0);
	CHECK_INT(CALL(cuCtxDestroy_v2, context), 0);
}

/* A neighbour's GPU, none of this container's: nothing is charged, nothing hidden. */
static void part_no_pages(void)
{
	size_t a, b;
	CUdeviceptr p;
	start();
	CHECK_INT(CALL(cuCtxCreate_v2, &context, 0, 0), 0);
	CHECK_INT(CALL(cuMemAlloc_v2, &p, 8 * GIB), 0);
	CHECK_INT(CALL(cuMemGetInfo_v2, &a, &b), 0);
	CHECK_U64(b, FAKE_TOTAL);
	CHECK_INT(CALL(cuMemFree_v2, p), 0);
	CHECK_INT(CALL(cuCtxDestroy_v2, context), 0);
}

static const struct part parts[] = {
	{ "alloc", part_alloc },
	{ "small", part_small },
	{ "limit", part_limit },
	{ "pitch", part_pitch },
	{ "managed", part_managed },
	{ "failures", part_failures },
	{ "no_context", part_no_context },
	{ "unseen", part_unseen },
	{ "contexts", part_contexts },
	{ "primary", part_primary },
	{ "views", part_views },
	{ "views_unlimited", part_views_unlimited },
	{ "views_pod", part_views_pod },
	{ "views_over", part_views_over },
	{ "nvml_errors", part_nvml_errors },
	{ "nvml_processes", part_nvml_processes },
	{ "nvml_processes_apart", part_nvml_processes_apart },
	{ "nvml_details", part_nvml_details },
	{ "nvml_details_apart", part_nvml_details_apart },
	{ "nvml_details_unfenced", part_nvml_details_unfenced },
	{ "null", part_null },
	{ "getproc", part_getproc },
	{ "getproc_internal", part_getproc_internal },
	{ "reaches", part_reaches },
	{ "threads", part_threads },
	{ "no_pages", part_no_pages },
	{ NULL, NULL },
};

static void test_alloc(void) { play_part("alloc"); }
static void test_small(void) { play_part("small"); }
static void test_pitch(void) { play_part("pitch"); }
static void test_managed(void) { play_part("managed"); }
static void test_no_context(void) { play_part("no_context"); }
static void test_unseen(void) { play_part("unseen"); }
static void test_contexts(void) { play_part("contexts"); }
static void test_primary(void) { play_part("primary"); }
static void test_nvml_errors(void) { play_part("nvml_errors"); }
static void test_nvml_processes(void) { play_part("nvml_processes"); }
static void test_nvml_processes_apart(void) { play_part("nvml_processes_apart"); }
static void test_nvml_details(void) { play_part("nvml_details"); }
static void test_nvml_details_apart(void) { play_part("nvml_details_apart"); }
static void test_null(void) { play_part("null"); }
static void test_getproc(void) { play_part("getproc"); }
static void test_getproc_internal(void) { play_part("getproc_internal"); }
static void test_reaches(void) { play_part("reaches"); }
static void test_threads(void) { play_part("threads"); }

static void test_limit(void)
{
	struct scene s = { .part = "limit", .max_bytes = LIMIT };
	play(&s);
	CHECK_U64(s.charged, 0);
	CHECK_U64(s.events_max, 5);
	CHECK_U64(s.events_device, 0);
}

static void test_failures(void)
{
	struct scene s = { .part = "failures", .max_bytes = LIMIT };
	play(&s);
	CHECK_U64(s.charged, 0);
	CHECK_U64(s.events_max, 0);
	CHECK_U64(s.events_device, 11);
}

static void test_views(void)
{
	struct scene s = { .part = "views", .max_bytes = LIMIT };
	play(&s);
	CHECK_U64(s.charged, 0);
	CHECK_U64(s.events_max, 0);
	CHECK_U64(s.events_device, 1);
}

static void test_views_unlimited(void)
{
	struct scene s = { .part = "views_unlimited" };
	play(&s);
	CHECK_U64(s.charged, 0);
}

static void test_views_pod(void)
{
	struct scene s = { .part = "views_pod", .max_bytes = LIMIT, .pod_max_bytes = GIB };
	play(&s);
}

static void test_views_over(void)
{
	struct scene s = { .part = "views_over", .max_bytes = LIMIT, .excess_bytes = 5 * GIB };
	play(&s);
	CHECK_U64(s.events_max, 1);
}

static void test_nvml_details_unfenced(void)
{
	struct scene s = { .part = "nvml_details_unfenced", .no_pages = true };
	play(&s);
}

static void test_no_pages(void)
{
	struct scene s = { .part = "no_pages", .no_pages = true };
	play(&s);
}

int main(int argc, char **argv)
{
	static const struct unit_test tests[] = {
		{ "cuMemAlloc and cuMemFree, both ABIs, every rounding", test_alloc },
		{ "small allocations share blocks", test_small },
		{ "memory.max: to the last block, never above, outputs untouched", test_limit },
		{ "cuMemAllocPitch settles to the driver's pitch", test_pitch },
		{ "cuMemAllocManaged", test_managed },
		{ "a driver that fails everywhere", test_failures },
		{ "no context, no such device", test_no_context },
		{ "an address that is given out again without a free", test_unseen },
		{ "cuCtxCreate v1 to v4, cuCtxDestroy v1 and v2", test_contexts },
		{ "primary contexts: retain, release, reset", test_primary },
		{ "cuMemGetInfo, cuDeviceTotalMem, NVML show the grant", test_views },
		{ "an unlimited container sees the GPU", test_views_unlimited },
		{ "the pod's lower limit is seen", test_views_pod },
		{ "above the limit nothing is negative", test_views_over },
		{ "NVML's own errors, NVML loaded again and again", test_nvml_errors },
		{ "NVML lists the pod's processes, three versions of three lists", test_nvml_processes },
		{ "NVML lists the pod's processes, in a pid namespace", test_nvml_processes_apart },
		{ "NVML's detailed list and utilisation have the pod's processes", test_nvml_details },
		{ "NVML's detailed list and utilisation, in a pid namespace", test_nvml_details_apart },
		{ "NVML's detailed list and utilisation without pages", test_nvml_details_unfenced },
		{ "NULL arguments of every hook", test_null },
		{ "cuGetProcAddress v1 and v2, flags, versions, four drivers", test_getproc },
		{ "cuGetProcAddress with addresses that dlsym does not know", test_getproc_internal },
		{ "every hook reaches the driver's function of its name", test_reaches },
		{ "eight threads: the sum returns to 0", test_threads },
		{ "without pages everything passes", test_no_pages },
		{ NULL, NULL },
	};
	return interpose_main(tests, parts, argc, argv);
}
