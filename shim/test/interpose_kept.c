/* SPDX-License-Identifier: Apache-2.0 */
/* What is charged for pools, graphs and arrays, through the hooks, on the recording driver. */
#include <pthread.h>

#include "../src/table.h"
#include "interpose.h"

#define BLOCK (2 * MIB)
#define STEP (32 * MIB)
#define ANY_ERROR 717 /* one that only our test driver gives */

static void *cuda;
static uint64_t (*live)(void), (*live_managed)(void);
static void (*fail)(const char *, CUresult);
static unsigned long (*calls)(const char *);
static const char *(*last)(void);
static void (*sync_host)(void), (*set_step)(uint64_t), (*capture)(int);
static CUgraph (*graph)(void);
static CUdeviceptr (*graph_alloc)(CUgraph, CUdevice, uint64_t);
static void (*graph_free)(CUgraph, CUdeviceptr), (*graph_child)(CUgraph, CUgraph);
static CUcontext context;

#define CALL(symbol, ...) (FN(cuda, symbol)(__VA_ARGS__))

static void start(void)
{
	cuda = open_driver(RTLD_LOCAL);
	live = need(cuda, "fake_live_bytes");
	live_managed = need(cuda, "fake_managed_bytes");
	fail = need(cuda, "fake_fail");
	calls = need(cuda, "fake_calls");
	last = need(cuda, "fake_last");
	sync_host = need(cuda, "fake_sync");
	set_step = need(cuda, "fake_set_pool_step");
	capture = need(cuda, "fake_capture");
	graph = need(cuda, "fake_graph");
	graph_alloc = need(cuda, "fake_graph_alloc");
	graph_free = need(cuda, "fake_graph_free");
	graph_child = need(cuda, "fake_graph_child");
	CHECK_INT(CALL(cuInit, 0), 0);
	CHECK_INT(CALL(cuCtxCreate_v2, &context, 0, 0), 0);
}

/* Above the context. */
static uint64_t taken(void) { return charged(0) - FAKE_CONTEXT_BYTES; }
static void same(void) { CHECK_U64(charged(0) + charged(1), live() + live_managed()); }

static CUmemoryPool new_pool(int type, int where, int id)
{
	CUmemoryPool pool = NULL;
	CUmemPoolProps props = { .allocType = type, .location = { where, id } };
	CHECK_INT(CALL(cuMemPoolCreate, &pool, &props), 0);
	return pool;
}
#define NEW_POOL() new_pool(1, CU_MEM_LOCATION_TYPE_DEVICE, 0)

/* ---- pools ---- */

/* What the pool keeps is charged, until the driver says that it has given it back. */
static void part_pool(void)
{
	CUdeviceptr p[4], q;
	CUmemoryPool pool;
	start();
	CHECK_INT(CALL(cuMemAllocAsync, &p[0], 1000, NULL), 0);
	CHECK_U64(taken(), STEP);
	CHECK_INT(CALL(cuMemAllocAsync_ptsz, &p[1], 1000, NULL), 0);
	CHECK_U64(taken(), STEP);
	CHECK_INT(CALL(cuMemAllocAsync, &p[2], 100 * MIB, NULL), 0);
	CHECK_U64(taken(), STEP + 128 * MIB);
	same();
	/* A freed piece stays with the pool... */
	CHECK_INT(CALL(cuMemFreeAsync, p[2], NULL), 0);
	CHECK_U64(taken(), STEP + 128 * MIB);
	/* ...until the host synchronises, which shows at the next call. */
	sync_host();
	CHECK_INT(CALL(cuMemFree_v2, p[1]), 0);
	CHECK_U64(taken(), STEP);
	CHECK_INT(CALL(cuMemFreeAsync_ptsz, p[0], NULL), 0);
	CHECK_INT(FAKE(cuda, cuDeviceGetDefaultMemPool, CUresult, CUmemoryPool *, CUdevice)(&pool, 0), 0);
	CHECK_INT(CALL(cuMemPoolTrimTo, pool, 0), 0);
	CHECK_U64(taken(), 0);
	/* Memory of one kind, freed as the other. */
	CHECK_INT(CALL(cuMemAlloc_v2, &q, 64 * MIB), 0);
	CHECK_INT(CALL(cuMemFreeAsync, q, NULL), 0);
	CHECK_INT(CALL(cuMemAlloc_v2, &q, 4096), 0);
	CHECK_INT(CALL(cuMemFreeAsync_ptsz, q, NULL), 0);
	same();
	CHECK_U64(taken(), 0);
	CHECK_INT(CALL(cuMemFreeAsync, 0, NULL), CUDA_ERROR_INVALID_VALUE);
	CHECK_INT(CALL(cuMemFreeAsync, 0x5555550000, NULL), CUDA_ERROR_INVALID_VALUE);
	CHECK_INT(CALL(cuCtxDestroy_v2, context), 0);
}

/* The variant that was called is called. */
static void part_variants(void)
{
	CUdeviceptr p;
	CUmemoryPool pool;
	start();
	pool = NEW_POOL();
#define REACHES(symbol, ...)                        \
	do {                                        \
		unsigned long n = calls(#symbol);   \
		CHECK_INT(CALL(symbol, __VA_ARGS__), 0); \
		CHECK_U64(calls(#symbol), n + 1);   \
	} while (0)
	REACHES(cuMemAllocAsync, &p, MIB, NULL);
	REACHES(cuMemFreeAsync_ptsz, p, NULL);
	REACHES(cuMemAllocAsync_ptsz, &p, MIB, NULL);
	REACHES(cuMemFreeAsync, p, NULL);
	REACHES(cuMemAllocFromPoolAsync, &p, MIB, pool, NULL);
	REACHES(cuMemFreeAsync, p, NULL);
	REACHES(cuMemAllocFromPoolAsync_ptsz, &p, MIB, pool, NULL);
	REACHES(cuMemFreeAsync, p, NULL);
	CUgraph g = graph();
	CUgraphExec e;
	CUDA_GRAPH_INSTANTIATE_PARAMS params = { .flags = CUDA_GRAPH_INSTANTIATE_FLAG_UPLOAD };
	graph_alloc(g, 0, MIB);
	REACHES(cuGraphInstantiate, &e, g, NULL, NULL, 0);
	REACHES(cuGraphLaunch, e, NULL);
	REACHES(cuGraphLaunch_ptsz, e, NULL);
	REACHES(cuGraphUpload, e, NULL);
	REACHES(cuGraphUpload_ptsz, e, NULL);
	REACHES(cuGraphExecDestroy, e);
	REACHES(cuGraphInstantiate_v2, &e, g, NULL, NULL, 0);
	REACHES(cuGraphInstantiateWithFlags, &e, g, CUDA_GRAPH_INSTANTIATE_FLAG_UPLOAD);
	REACHES(cuGraphInstantiateWithParams, &e, g, &params);
	REACHES(cuGraphInstantiateWithParams_ptsz, &e, g, &params);
	same();
	CHECK_INT(CALL(cuGraphInstantiateWithParams, &e, g, NULL), CUDA_ERROR_INVALID_VALUE);
	CHECK_INT(CALL(cuGraphInstantiate_v2, NULL, g, NULL, NULL, 0), CUDA_ERROR_INVALID_VALUE);
	CHECK_INT(CALL(cuGraphInstantiate_v2, &e, NULL, NULL, NULL, 0), CUDA_ERROR_INVALID_VALUE);
	CHECK_INT(CALL(cuDeviceGraphMemTrim, 0), 0);
	CHECK_INT(CALL(cuDeviceGraphMemTrim, 99), 101);
	CHECK_INT(CALL(cuMemPoolDestroy, pool), 0);
	same();
}

/* Up to the last piece; what is free in the pool's chunks is found again. */
static void part_pool_limit(void)
{
	static CUdeviceptr p[4096];
	CUdeviceptr q = 77;
	CUmemoryPool pool;
	int n = 0;
	start();
	pool = NEW_POOL();
	while (CALL(cuMemAllocFromPoolAsync, &p[n], MIB, pool, NULL) == CUDA_SUCCESS)
		n++;
	same();
	CHECK_INT(n, (int)((LIMIT - FAKE_CONTEXT_BYTES) / STEP * (STEP / MIB)));
	unsigned long before = calls("cuMemAllocFromPoolAsync");
	CHECK_INT(CALL(cuMemAllocFromPoolAsync, &q, MIB, pool, NULL), CUDA_ERROR_OUT_OF_MEMORY);
	CHECK_INT(CALL(cuMemAllocFromPoolAsync_ptsz, &q, MIB, pool, NULL), CUDA_ERROR_OUT_OF_MEMORY);
	CHECK_INT(CALL(cuMemAllocAsync, &q, 1, NULL), CUDA_ERROR_OUT_OF_MEMORY);
	CHECK_INT(CALL(cuMemAllocAsync, &q, UINT64_MAX, NULL), CUDA_ERROR_OUT_OF_MEMORY);
	CHECK_U64(q, 77);
	CHECK_U64(calls("cuMemAllocFromPoolAsync"), before);
	/* Before anything is refused, the pool gives back what nobody uses. */
	for (int i = n - 32; i < n; i++)
		CHECK_INT(CALL(cuMemFreeAsync, p[i], NULL), 0);
	uint64_t kept = taken();
	CHECK_INT(CALL(cuMemAlloc_v2, &q, 32 * MIB), 0);
	CHECK(taken() <= kept);
	same();
	CHECK_INT(CALL(cuMemFree_v2, q), 0);
	/* Also to a context, and to managed memory. */
	CHECK_INT(CALL(cuMemAllocFromPoolAsync, &q, 24 * MIB, pool, NULL), 0);
	CHECK_INT(CALL(cuMemFreeAsync, q, NULL), 0);
	CHECK_INT(CALL(cuMemAllocManaged, &q, 32 * MIB, 1), 0);
	same();
	CHECK_INT(CALL(cuMemFree_v2, q), 0);
	for (int i = 0; i < n - 32; i++)
		CHECK_INT(CALL(cuMemFreeAsync, p[i], NULL), 0);
	CHECK_INT(CALL(cuMemPoolDestroy, pool), 0);
	CHECK_U64(taken(), 0);
	CHECK_INT(CALL(cuCtxDestroy_v2, context), 0);
}

/* A pool that takes more than it did so far, at the limit: undone. */
static void part_grows_more(void)
{
	CUdeviceptr p, q = 77, r;
	CUmemoryPool pool;
	start();
	pool = NEW_POOL();
	CHECK_INT(CALL(cuMemAllocFromPoolAsync, &p, MIB, pool, NULL), 0);
	CHECK_INT(CALL(cuMemAlloc_v2, &r, LIMIT - FAKE_CONTEXT_BYTES - STEP - 48 * MIB), 0);
	set_step(64 * MIB);
	CHECK_INT(CALL(cuMemAllocFromPoolAsync, &q, 40 * MIB, pool, NULL), CUDA_ERROR_OUT_OF_MEMORY);
	CHECK_U64(q, 77);
	same();
	CHECK_U64(taken(), LIMIT - FAKE_CONTEXT_BYTES - 48 * MIB);
	/* With room it may. */
	CHECK_INT(CALL(cuMemFree_v2, r), 0);
	CHECK_INT(CALL(cuMemAllocFromPoolAsync, &q, 40 * MIB, pool, NULL), 0);
	CHECK_U64(taken(), STEP + 64 * MIB);
	same();
	/* One with smaller steps is believed, too. */
	set_step(2 * MIB);
	CHECK_INT(CALL(cuMemAllocFromPoolAsync, &p, 100 * MIB, pool, NULL), 0);
	CHECK_INT(CALL(cuMemAllocFromPoolAsync, &p, 90 * MIB, pool, NULL), 0);
	same();
	CHECK_INT(CALL(cuMemAlloc_v2, &r, LIMIT - charged(0) - 34 * MIB), 0);
	CHECK_INT(CALL(cuMemAllocFromPoolAsync, &p, 34 * MIB, pool, NULL), 0);
	CHECK_U64(charged(0), LIMIT);
	same();
}

/* Which pool, which GPU. */
static void part_pool_where(void)
{
	CUdeviceptr p, q;
	CUmemoryPool managed, host, other, imported = NULL;
	CUcontext second;
	start();
	managed = new_pool(CU_MEM_ALLOCATION_TYPE_MANAGED, 0, 0);
	CHECK_INT(CALL(cuMemAllocFromPoolAsync, &p, MIB, managed, NULL), 0);
	CHECK_U64(live_managed(), STEP);
	same();
	CHECK_INT(CALL(cuMemFreeAsync, p, NULL), 0);
	CHECK_INT(CALL(cuMemPoolTrimTo, managed, 0), 0);
	CHECK_U64(taken(), 0);
	for (int type = CU_MEM_LOCATION_TYPE_HOST; type <= CU_MEM_LOCATION_TYPE_HOST_NUMA_CURRENT; type++) {
		host = new_pool(1, type, 1);
		CHECK_INT(CALL(cuMemAllocFromPoolAsync, &p, 2 * LIMIT, host, NULL), 0);
		CHECK_U64(taken(), 0);
		CHECK_U64(charged(1), 0);
		CHECK_INT(CALL(cuMemFreeAsync, p, NULL), 0);
		/* Managed, and to be there: it may come. */
		managed = new_pool(CU_MEM_ALLOCATION_TYPE_MANAGED, type, 1);
		CHECK_INT(CALL(cuMemAllocFromPoolAsync, &p, MIB, managed, NULL), 0);
		CHECK_U64(taken(), STEP);
		CHECK_U64(charged(1), 0);
		CHECK_INT(CALL(cuMemFreeAsync, p, NULL), 0);
		CHECK_INT(CALL(cuMemPoolTrimTo, managed, 0), 0);
		CHECK_U64(taken(), 0);
	}
	/* A part of a GPU is the GPU's. */
	other = new_pool(1, CU_MEM_LOCATION_TYPE_DEVICE_LOCALITY_DOMAIN, 3 << 8 | 1);
	CHECK_INT(CALL(cuMemAllocFromPoolAsync, &p, MIB, other, NULL), 0);
	CHECK_U64(charged(1), STEP);
	CHECK_INT(CALL(cuMemFreeAsync, p, NULL), 0);
	CHECK_INT(CALL(cuMemPoolDestroy, other), 0);
	CHECK_U64(charged(1), 0);
	/* Another process's: charged there. */
	CHECK_INT(CALL(cuMemPoolImportFromShareableHandle, &imported, &p, 1, 0), 0);
	CHECK_INT(CALL(cuMemAllocFromPoolAsync, &p, MIB, imported, NULL), CUDA_ERROR_INVALID_VALUE);
	CHECK_INT(CALL(cuMemPoolTrimTo, imported, 0), 0);
	CHECK_U64(taken(), 0);
	CHECK_INT(CALL(cuMemPoolDestroy, imported), 0);
	/* The pool's GPU counts, not the current one; the stream's, not the current one. */
	other = new_pool(1, CU_MEM_LOCATION_TYPE_DEVICE, 1);
	CHECK_INT(CALL(cuMemAllocFromPoolAsync, &p, MIB, other, NULL), 0);
	CHECK_U64(taken(), 0);
	CHECK_U64(charged(1), STEP);
	CHECK_INT(CALL(cuMemFreeAsync, p, NULL), 0);
	CHECK_INT(CALL(cuMemPoolDestroy, other), 0);
	CHECK_U64(charged(1), 0);
	CHECK_INT(CALL(cuCtxCreate_v2, &second, 0, 1), 0);
	CHECK_INT(CALL(cuMemAllocAsync, &p, MIB, (CUstream)(void *)second), 0);
	CHECK_U64(charged(1), FAKE_CONTEXT_BYTES + STEP);
	CHECK_INT(CALL(cuMemFreeAsync, p, NULL), 0);
	CHECK_INT(FAKE(cuda, cuDeviceGetDefaultMemPool, CUresult, CUmemoryPool *, CUdevice)(&other, 1), 0);
	CHECK_INT(CALL(cuMemPoolTrimTo, other, 0), 0);
	CHECK_U64(charged(1), FAKE_CONTEXT_BYTES);
	/* The device's pool of the program's choice. */
	other = new_pool(1, CU_MEM_LOCATION_TYPE_DEVICE, 1);
	CHECK_INT(FAKE(cuda, cuDeviceSetMemPool, CUresult, CUdevice, CUmemoryPool)(1, other), 0);
	CHECK_INT(CALL(cuMemAllocAsync, &p, 100 * MIB, NULL), 0);
	same();
	CHECK_INT(CALL(cuMemFreeAsync, p, NULL), 0);
	CHECK_INT(CALL(cuMemPoolTrimTo, other, 0), 0);
	same();
	/* A default pool that was not seen: named by attributes, or before CUDA 13 by comparison. */
	FAKE(cuda, fake_before_13, void, int)(1);
	CHECK_INT(FAKE(cuda, cuDeviceGetDefaultMemPool, CUresult, CUmemoryPool *, CUdevice)(&other, 0), 0);
	CHECK_INT(CALL(cuMemAllocFromPoolAsync, &q, MIB, other, NULL), 0);
	CHECK_U64(taken(), STEP);
	same();
	CHECK_INT(CALL(cuMemFreeAsync, q, NULL), 0);
	CHECK_INT(CALL(cuMemPoolTrimTo, other, 0), 0);
	CHECK_INT(CALL(cuCtxDestroy_v2, second), 0);
	CHECK_INT(CALL(cuCtxDestroy_v2, context), 0);
}

/* A pool that is destroyed keeps its charge as long as a piece lives, and is not asked: the
 * driver here ends the program that does. */
static void part_destroyed(void)
{
	CUdeviceptr p, q;
	CUmemoryPool pool;
	start();
	pool = NEW_POOL();
	CHECK_INT(CALL(cuMemAllocFromPoolAsync, &p, MIB, pool, NULL), 0);
	CHECK_INT(CALL(cuMemAllocFromPoolAsync, &q, 100 * MIB, pool, NULL), 0);
	fail("cuMemPoolDestroy", ANY_ERROR);
	CHECK_INT(CALL(cuMemPoolDestroy, pool), ANY_ERROR);
	same();
	CHECK_INT(CALL(cuMemPoolDestroy, pool), 0);
	CHECK_INT(CALL(cuMemFreeAsync, q, NULL), 0);
	CHECK_U64(taken(), STEP + 128 * MIB); /* more than is there by now, not less */
	/* A refusal asks and trims all pools but this one. */
	CHECK_INT(CALL(cuMemAlloc_v2, &q, LIMIT), CUDA_ERROR_OUT_OF_MEMORY);
	CHECK_INT(CALL(cuMemFree_v2, p), 0);
	CHECK_U64(taken(), 0);
	same();
	CHECK_INT(CALL(cuMemPoolDestroy, NULL), CUDA_ERROR_INVALID_VALUE);
	/* More pools than there is place for. */
	static CUmemoryPool many[300];
	for (int i = 0; i < 300; i++) {
		many[i] = NEW_POOL();
		if (i < 250)
			continue;
		CHECK_INT(CALL(cuMemAllocFromPoolAsync, &p, MIB, many[i], NULL), 0);
		CHECK(taken() >= BLOCK && taken() <= STEP);
		CHECK_INT(CALL(cuMemFreeAsync, p, NULL), 0);
		CHECK_INT(CALL(cuMemPoolTrimTo, many[i], 0), 0);
		CHECK_U64(taken(), 0);
	}
	for (int i = 0; i < 300; i++)
		CHECK_INT(CALL(cuMemPoolDestroy, many[i]), 0);
	/* The places are used again. */
	pool = NEW_POOL();
	CHECK_INT(CALL(cuMemAllocFromPoolAsync, &p, MIB, pool, NULL), 0);
	CHECK_U64(taken(), STEP);
	CHECK_INT(CALL(cuMemFreeAsync, p, NULL), 0);
	CHECK_INT(CALL(cuMemPoolDestroy, pool), 0);
	CHECK_INT(CALL(cuCtxDestroy_v2, context), 0);
}

/* The last context goes, and with it what pools had. */
static void part_pool_reset(void)
{
	CUdeviceptr p;
	start();
	CHECK_INT(CALL(cuMemAllocAsync, &p, 100 * MIB, NULL), 0);
	FAKE(cuda, fake_reset_device, void)();
	CHECK_INT(CALL(cuCtxDestroy_v2, context), 0);
	CHECK_U64(charged(0), 0);
	CHECK_INT(CALL(cuCtxCreate_v2, &context, 0, 0), 0);
	CHECK_INT(CALL(cuMemFreeAsync, p, NULL), CUDA_ERROR_INVALID_VALUE);
	CHECK_INT(CALL(cuMemAllocAsync, &p, 100 * MIB, NULL), 0);
	same();
	CHECK_INT(CALL(cuMemFreeAsync, p, NULL), 0);
	CHECK_U64(taken(), 128 * MIB);
	FAKE(cuda, fake_reset_device, void)();
	CHECK_INT(CALL(cuCtxDestroy_v2, context), 0);
}

static void part_capture(void)
{
	CUdeviceptr p = 0;
	start();
	capture(1);
	CHECK_INT(CALL(cuMemAllocAsync, &p, 3 * GIB, NULL), 0);
	CHECK_INT(CALL(cuMemAllocAsync_ptsz, &p, 30 * GIB / 2, NULL), 0);
	CHECK_U64(taken(), 0);
	capture(0);
	same();
	CHECK_INT(CALL(cuCtxDestroy_v2, context), 0);
}

static void part_pool_failures(void)
{
	CUdeviceptr p = 7, kept;
	CUmemoryPool pool, no_pool = NULL;
	CUmemPoolProps props = { .allocType = 1, .location = { CU_MEM_LOCATION_TYPE_DEVICE, 0 } };
	start();
	pool = NEW_POOL();
	CHECK_INT(CALL(cuMemAllocAsync, &kept, MIB, NULL), 0);
	for (int i = 0; i < 2; i++) {
		CUresult error = i == 0 ? ANY_ERROR : CUDA_ERROR_OUT_OF_MEMORY;
#define FAILS(symbol, ...)                                   \
	do {                                                 \
		fail(#symbol, error);                        \
		CHECK_INT(CALL(symbol, __VA_ARGS__), error); \
		same();                                      \
	} while (0)
		FAILS(cuMemAllocAsync, &p, 64 * MIB, NULL);
		FAILS(cuMemAllocAsync_ptsz, &p, 64 * MIB, NULL);
		FAILS(cuMemAllocFromPoolAsync, &p, 64 * MIB, pool, NULL);
		FAILS(cuMemAllocFromPoolAsync_ptsz, &p, 64 * MIB, pool, NULL);
		FAILS(cuMemPoolCreate, &no_pool, &props);
		FAILS(cuMemPoolImportFromShareableHandle, &no_pool, NULL, 1, 0);
		FAILS(cuMemFreeAsync, kept, NULL);
		FAILS(cuMemFreeAsync_ptsz, kept, NULL);
		FAILS(cuMemFree_v2, kept);
		FAILS(cuMemPoolTrimTo, pool, 0);
		CHECK(p == 7 && no_pool == NULL);
		/* The driver does not say what it keeps: what was charged stays. */
		uint64_t before = taken();
		fail("cuMemPoolGetAttribute", error);
		CHECK_INT(CALL(cuMemAllocAsync, &p, 1, NULL), 0);
		CHECK(taken() >= before);
		CHECK_INT(CALL(cuMemFreeAsync, p, NULL), 0);
		same();
		p = 7;
	}
	CHECK_INT(CALL(cuMemAllocAsync, NULL, MIB, NULL), CUDA_ERROR_INVALID_VALUE);
	CHECK_INT(CALL(cuMemAllocAsync, &p, 0, NULL), CUDA_ERROR_INVALID_VALUE);
	CHECK_INT(CALL(cuMemAllocFromPoolAsync, &p, MIB, NULL, NULL), CUDA_ERROR_INVALID_VALUE);
	CHECK_INT(CALL(cuMemAllocFromPoolAsync, NULL, MIB, pool, NULL), CUDA_ERROR_INVALID_VALUE);
	CHECK_INT(CALL(cuMemPoolCreate, NULL, &props), CUDA_ERROR_INVALID_VALUE);
	CHECK_INT(CALL(cuMemPoolCreate, &pool, NULL), CUDA_ERROR_INVALID_VALUE);
	CHECK_INT(CALL(cuMemPoolTrimTo, NULL, 0), CUDA_ERROR_INVALID_VALUE);
	CHECK_INT(CALL(cuMemPoolImportFromShareableHandle, NULL, NULL, 1, 0), CUDA_ERROR_INVALID_VALUE);
	/* Still known after all the failed attempts. */
	CHECK_INT(CALL(cuMemFreeAsync, kept, NULL), 0);
	CHECK_INT(CALL(cuCtxDestroy_v2, context), 0);
}

#define RACERS 4
static CUmemoryPool shared_pool;

static void *race_pool(void *arg)
{
	uint64_t seed = (uint64_t)(uintptr_t)arg;
	CUdeviceptr held[16] = { 0 };
	CUresult (*set_current)(CUcontext) = need(cuda, "cuCtxSetCurrent");
	CHECK_INT(set_current(context), 0);
	for (int i = 0; i < 3000; i++) {
		seed = seed * UINT64_C(6364136223846793005) + 1;
		unsigned int k = (unsigned int)(seed >> 40) % 16;
		CUmemoryPool own;
		if (held[k] != 0) {
			CHECK_INT(i % 2 ? CALL(cuMemFreeAsync, held[k], NULL) : CALL(cuMemFree_v2, held[k]), 0);
			held[k] = 0;
		} else {
			CUresult r = i % 3 ? CALL(cuMemAllocFromPoolAsync, &held[k], (seed >> 33) % (200 * MIB) + 1, shared_pool, NULL) :
					     CALL(cuMemAllocAsync, &held[k], (seed >> 33) % (8 * MIB) + 1, NULL);
			CHECK(r == CUDA_SUCCESS || r == CUDA_ERROR_OUT_OF_MEMORY);
			if (r != CUDA_SUCCESS)
				held[k] = 0;
		}
		if (i % 64 == 0)
			sync_host();
		if (i % 128 == 0) {
			own = NEW_POOL();
			CUdeviceptr p = 0;
			CUresult r = CALL(cuMemAllocFromPoolAsync, &p, MIB, own, NULL);
			bool before = r == CUDA_SUCCESS && i % 256 == 0;
			if (before)
				CHECK_INT(CALL(cuMemFreeAsync, p, NULL), 0);
			CHECK_INT(CALL(cuMemPoolDestroy, own), 0);
			if (r == CUDA_SUCCESS && !before)
				CHECK_INT(CALL(cuMemFreeAsync, p, NULL), 0);
		}
		/* Never more than is charged, so never more than the limit. */
		CHECK(live() <= LIMIT / 2);
	}
	for (int k = 0; k < 16; k++)
		if (held[k] != 0)
			CHECK_INT(CALL(cuMemFreeAsync, held[k], NULL), 0);
	return NULL;
}

static void part_pool_race(void)
{
	pthread_t threads[RACERS];
	CUmemoryPool pool;
	start();
	shared_pool = NEW_POOL();
	for (uintptr_t i = 0; i < RACERS; i++)
		CHECK(pthread_create(&threads[i], NULL, race_pool, (void *)(i + 1)) == 0);
	for (int i = 0; i < RACERS; i++)
		pthread_join(threads[i], NULL);
	CHECK_INT(CALL(cuMemPoolDestroy, shared_pool), 0);
	CHECK_INT(FAKE(cuda, cuDeviceGetDefaultMemPool, CUresult, CUmemoryPool *, CUdevice)(&pool, 0), 0);
	CHECK_INT(CALL(cuMemPoolTrimTo, pool, 0), 0);
	same();
	CHECK_INT(CALL(cuCtxDestroy_v2, context), 0);
}

static void (*stop_at)(const char *, enum fake_stop);
static int (*stopped)(const char *);

/* Starts a call in a thread of its own, up to where the driver stops it. */
static void start_call(pthread_t *thread, void *(*call)(void *), void *arg, const char *symbol, enum fake_stop where)
{
	stop_at = need(cuda, "fake_stop");
	stopped = need(cuda, "fake_stopped");
	stop_at(symbol, where);
	CHECK(pthread_create(thread, NULL, call, arg) == 0);
	while (stopped(symbol) == 0)
		usleep(1000);
}

static void end_call(pthread_t thread, const char *symbol)
{
	stop_at(symbol, FAKE_NOWHERE);
	CHECK(pthread_join(thread, NULL) == 0);
}

static void *allocate_late(void *arg)
{
	CUresult (*set_current)(CUcontext) = need(cuda, "cuCtxSetCurrent");
	CHECK_INT(set_current(context), 0);
	CHECK_INT(CALL(cuMemAllocAsync, arg, 256 * MIB, NULL), 0);
	return NULL;
}

static void *free_late(void *arg)
{
	CHECK_INT(CALL(cuMemFreeAsync, *(CUdeviceptr *)arg, NULL), 0);
	return NULL;
}

/* A piece of 256 MiB, and room for 64 MiB beside it and what can be freed. */
static CUmemoryPool nearly_full(CUdeviceptr *piece, CUdeviceptr *can_be_freed)
{
	CUmemoryPool pool;
	CUdeviceptr rest;
	start();
	CHECK_INT(FAKE(cuda, cuDeviceGetDefaultMemPool, CUresult, CUmemoryPool *, CUdevice)(&pool, 0), 0);
	CHECK_INT(CALL(cuMemAllocAsync, piece, 256 * MIB, NULL), 0);
	CHECK_INT(CALL(cuMemAlloc_v2, can_be_freed, 512 * MIB), 0);
	CHECK_INT(CALL(cuMemAlloc_v2, &rest, LIMIT - charged(0) - 64 * MIB), 0);
	return pool;
}

/* A call that counts on free memory of its pool is not back for long: whoever else would get some of
 * that is refused, or charged what the other then takes. */
static void part_claim(void)
{
	CUdeviceptr piece, other, p;
	pthread_t thread;
	CUmemoryPool pool = nearly_full(&piece, &other);
	CHECK_INT(CALL(cuMemFreeAsync, piece, NULL), 0);
	start_call(&thread, allocate_late, &piece, "cuMemAllocAsync", FAKE_BEFORE);
	unsigned long before = calls("cuMemAllocFromPoolAsync");
	CHECK_INT(CALL(cuMemAllocFromPoolAsync, &p, MIB, pool, NULL), CUDA_ERROR_OUT_OF_MEMORY);
	CHECK_U64(calls("cuMemAllocFromPoolAsync"), before);
	CHECK_U64(charged(0), LIMIT - 64 * MIB);
	/* There is room for both. */
	CHECK_INT(CALL(cuMemFree_v2, other), 0);
	CHECK_INT(CALL(cuMemAllocFromPoolAsync, &p, MIB, pool, NULL), 0);
	CHECK(charged(0) >= LIMIT - 64 * MIB - 512 * MIB + 256 * MIB);
	end_call(thread, "cuMemAllocAsync");
	CHECK_U64(charged(0), LIMIT - 64 * MIB - 512 * MIB + 256 * MIB);
	same();
	CHECK_INT(CALL(cuMemFreeAsync, piece, NULL), 0);
	CHECK_INT(CALL(cuMemFreeAsync, p, NULL), 0);
	CHECK_INT(CALL(cuMemPoolTrimTo, pool, 0), 0);
	CHECK_INT(CALL(cuCtxDestroy_v2, context), 0);
}

/* The driver has freed a piece and its place is gone, before we know that it is free: nobody may count on it. */
static void part_late_free(void)
{
	CUdeviceptr piece, other, p, q = 77;
	pthread_t thread;
	CUmemoryPool pool = nearly_full(&piece, &other);
	for (int way = 0; way < 2; way++) {
		start_call(&thread, free_late, &piece, "cuMemFreeAsync", FAKE_AFTER);
		if (way == 0) { /* to another piece */
			CHECK_INT(CALL(cuMemAllocFromPoolAsync, &p, MIB, pool, NULL), 0);
			CHECK_U64(p, piece);
		} else { /* back to the device, which has given it out again */
			CHECK_INT(CALL(cuMemPoolTrimTo, pool, 0), 0);
			CHECK_INT(CALL(cuMemAlloc_v2, &p, LIMIT - charged(0)), 0);
		}
		end_call(thread, "cuMemFreeAsync");
		same();
		unsigned long before = calls("cuMemAllocFromPoolAsync");
		CHECK_INT(CALL(cuMemAllocFromPoolAsync, &q, 256 * MIB, pool, NULL), CUDA_ERROR_OUT_OF_MEMORY);
		CHECK_U64(calls("cuMemAllocFromPoolAsync"), before);
		CHECK_U64(q, 77);
		same();
		CHECK_INT(CALL(cuMemFree_v2, p), 0);
		if (way == 0) {
			CHECK_INT(CALL(cuMemAllocAsync, &piece, 256 * MIB, NULL), 0);
			CHECK_U64(charged(0), LIMIT - 64 * MIB);
		}
	}
	CHECK_INT(CALL(cuCtxDestroy_v2, context), 0);
}

/* ---- graphs ---- */

static CUgraphExec instance(CUgraph g)
{
	CUgraphExec e = NULL;
	CHECK_INT(CALL(cuGraphInstantiateWithFlags, &e, g, 0), 0);
	return e;
}

static void part_graph(void)
{
	CUgraph g, inner, both;
	CUgraphExec e, other;
	start();
	/* What one node frees the next has. */
	g = graph();
	CUdeviceptr p = graph_alloc(g, 0, GIB);
	graph_alloc(g, 0, 100);
	graph_free(g, p);
	p = graph_alloc(g, 0, GIB - MIB);
	graph_free(g, p);
	e = instance(g);
	CHECK_U64(taken(), 0);
	CHECK_INT(CALL(cuGraphLaunch, e, NULL), 0);
	CHECK_U64(taken(), GIB + BLOCK);
	same();
	/* It stays, for the next launch. */
	CHECK_INT(CALL(cuGraphLaunch_ptsz, e, NULL), 0);
	CHECK_U64(taken(), GIB + BLOCK);
	CHECK_INT(CALL(cuGraphExecDestroy, e), 0);
	CHECK_U64(taken(), GIB + BLOCK);
	CHECK_INT(CALL(cuDeviceGraphMemTrim, 0), 0);
	CHECK_U64(taken(), 0);
	/* Nested ones, and another device's. */
	inner = graph();
	graph_alloc(inner, 1, 3 * MIB);
	both = graph();
	graph_child(both, inner);
	graph_alloc(both, 0, 5 * MIB);
	other = instance(both);
	CHECK_INT(CALL(cuGraphUpload, other, NULL), 0);
	CHECK_U64(taken(), 6 * MIB);
	CHECK_U64(charged(1), 4 * MIB);
	same();
	CHECK_INT(CALL(cuDeviceGraphMemTrim, 0), 0);
	CHECK_INT(CALL(cuDeviceGraphMemTrim, 1), 0);
	same();
	/* The host's memory is no GPU's; a part of a GPU is the GPU's. */
	g = graph();
	for (int type = CU_MEM_LOCATION_TYPE_HOST; type <= CU_MEM_LOCATION_TYPE_HOST_NUMA_CURRENT; type++)
		FAKE(cuda, fake_graph_alloc_at, CUdeviceptr, CUgraph, int, int, uint64_t)(g, type, 1, 2 * LIMIT);
	FAKE(cuda, fake_graph_alloc_at, CUdeviceptr, CUgraph, int, int, uint64_t)(g, CU_MEM_LOCATION_TYPE_DEVICE_LOCALITY_DOMAIN, 3 << 8 | 1, 3 * MIB);
	CHECK_INT(CALL(cuGraphLaunch, instance(g), NULL), 0);
	CHECK_U64(taken(), 0);
	CHECK_U64(charged(1), 4 * MIB);
	same();
	CHECK_INT(CALL(cuDeviceGraphMemTrim, 1), 0);
	CHECK_U64(charged(1), 0);
	g = graph();
	graph_alloc(g, 0, GIB);
	/* One that allocates nothing is left alone. */
	other = instance(graph());
	unsigned long asked = calls("cuDeviceGetGraphMemAttribute");
	CHECK_INT(CALL(cuGraphLaunch, other, NULL), 0);
	CHECK_U64(calls("cuDeviceGetGraphMemAttribute"), asked);
	CHECK_INT(CALL(cuGraphLaunch, e = instance(g), NULL), 0);
	CHECK_INT(CALL(cuDeviceGraphMemTrim, 0), 0);
	CHECK_INT(CALL(cuCtxDestroy_v2, context), 0);
}

static void part_graph_limit(void)
{
	CUgraph large, small;
	CUgraphExec e, f, none = NULL;
	CUdeviceptr p;
	CUDA_GRAPH_INSTANTIATE_PARAMS params = { .flags = CUDA_GRAPH_INSTANTIATE_FLAG_UPLOAD };
	start();
	large = graph();
	graph_alloc(large, 0, 3 * GIB);
	small = graph();
	graph_alloc(small, 0, GIB);
	e = instance(large);
	f = instance(small);
	CHECK_INT(CALL(cuGraphLaunch, e, NULL), 0);
	CHECK_INT(CALL(cuMemAlloc_v2, &p, LIMIT - charged(0)), 0);
	/* What ran before runs at the limit, too. */
	CHECK_INT(CALL(cuGraphLaunch, e, NULL), 0);
	same();
	/* What did not is charged first; before it is refused, the device gives back. */
	CHECK_INT(CALL(cuGraphLaunch, f, NULL), 0);
	same();
	CHECK_INT(CALL(cuMemFree_v2, p), 0);
	CHECK_INT(CALL(cuMemAlloc_v2, &p, 3 * GIB), 0);
	unsigned long n = calls("cuGraphLaunch");
	CHECK_INT(CALL(cuGraphLaunch, e, NULL), CUDA_ERROR_OUT_OF_MEMORY);
	CHECK_INT(CALL(cuGraphLaunch_ptsz, e, NULL), CUDA_ERROR_OUT_OF_MEMORY);
	CHECK_INT(CALL(cuGraphUpload, e, NULL), CUDA_ERROR_OUT_OF_MEMORY);
	CHECK_INT(CALL(cuGraphUpload_ptsz, e, NULL), CUDA_ERROR_OUT_OF_MEMORY);
	CHECK_INT(CALL(cuGraphInstantiateWithFlags, &none, large, CUDA_GRAPH_INSTANTIATE_FLAG_UPLOAD), CUDA_ERROR_OUT_OF_MEMORY);
	CHECK_INT(CALL(cuGraphInstantiateWithParams, &none, large, &params), CUDA_ERROR_OUT_OF_MEMORY);
	CHECK_INT(CALL(cuGraphInstantiateWithParams_ptsz, &none, large, &params), CUDA_ERROR_OUT_OF_MEMORY);
	CHECK(none == NULL);
	CHECK_U64(calls("cuGraphLaunch"), n);
	same();
	/* The driver's own errors. */
	CHECK_INT(CALL(cuMemFree_v2, p), 0);
	CUresult error = ANY_ERROR;
	FAILS(cuGraphLaunch, e, NULL);
	FAILS(cuGraphLaunch_ptsz, e, NULL);
	FAILS(cuGraphUpload, e, NULL);
	FAILS(cuGraphUpload_ptsz, e, NULL);
	FAILS(cuGraphInstantiate, &none, large, NULL, NULL, 0);
	FAILS(cuGraphInstantiate_v2, &none, large, NULL, NULL, 0);
	FAILS(cuGraphInstantiateWithFlags, &none, large, CUDA_GRAPH_INSTANTIATE_FLAG_UPLOAD);
	FAILS(cuGraphInstantiateWithParams, &none, large, &params);
	FAILS(cuGraphExecDestroy, e);
	FAILS(cuDeviceGraphMemTrim, 0);
	CHECK(none == NULL);
	/* Still known. */
	CHECK_INT(CALL(cuGraphLaunch, e, NULL), 0);
	CHECK_U64(taken(), 3 * GIB);
	CHECK_INT(CALL(cuDeviceGraphMemTrim, 0), 0);
	/* One goes on a way that nobody saw, and its handle to another that allocates nothing. */
	CHECK_INT(((fn_cuGraphExecDestroy *)FAKE(cuda, fake_address, void *, const char *)("cuGraphExecDestroy"))(e), 0);
	none = instance(graph());
	CHECK(none == e);
	CHECK_INT(CALL(cuMemAlloc_v2, &p, LIMIT - charged(0)), 0);
	CHECK_INT(CALL(cuGraphLaunch, none, NULL), 0);
	CHECK_INT(CALL(cuMemFree_v2, p), 0);
	same();
	/* More instances than there is place for: their memory is charged afterwards. */
	for (int i = 0; i < 1030; i++)
		f = instance(small);
	CHECK_INT(CALL(cuGraphLaunch, f, NULL), 0);
	CHECK_U64(taken(), GIB);
	CHECK_INT(CALL(cuDeviceGraphMemTrim, 0), 0);
	CHECK_INT(CALL(cuCtxDestroy_v2, context), 0);
}

/* ---- arrays ---- */

static void part_arrays(void)
{
	CUDA_ARRAY_DESCRIPTOR_v1 flat_v1 = { 1000, 3000, 0x20, 2 };
	CUDA_ARRAY_DESCRIPTOR flat = { 1000, 3000, 0x20, 2 };
	CUDA_ARRAY3D_DESCRIPTOR_v1 deep_v1 = { 100, 200, 300, 0x20, 4, 0 };
	CUDA_ARRAY3D_DESCRIPTOR deep = { 100, 200, 300, 0x20, 4, 0 }, sparse = { 8192, 8192, 0, 0x20, 4, CUDA_ARRAY3D_SPARSE },
				later = { 8192, 8192, 0, 0x20, 4, CUDA_ARRAY3D_DEFERRED_MAPPING }, square = { 4096, 4096, 0, 0x20, 1, 0 },
				line = { 100, 0, 0, 0x20, 1, 0 };
	CUarray a[5];
	CUmipmappedArray m;
	start();
	CHECK_INT(CALL(cuArrayCreate, &a[0], &flat_v1), 0);
	same();
	CHECK_INT(CALL(cuArrayCreate_v2, &a[1], &flat), 0);
	same();
	CHECK_INT(CALL(cuArray3DCreate, &a[2], &deep_v1), 0);
	same();
	CHECK_INT(CALL(cuArray3DCreate_v2, &a[3], &deep), 0);
	same();
	CHECK_INT(CALL(cuMipmappedArrayCreate, &m, &square, 100), 0);
	same();
	CHECK(taken() > 200 * MIB);
	for (int i = 0; i < 4; i++)
		CHECK_INT(CALL(cuArrayDestroy, a[i]), 0);
	CHECK_INT(CALL(cuArrayDestroy, a[0]), 400);
	CHECK_INT(CALL(cuMipmappedArrayDestroy, m), 0);
	CHECK_INT(CALL(cuMipmappedArrayDestroy, m), 400);
	CHECK_INT(CALL(cuArrayDestroy, NULL), 400);
	CHECK_U64(taken(), 0);
	/* Memory is mapped to these. */
	CHECK_INT(CALL(cuArray3DCreate_v2, &a[0], &sparse), 0);
	CHECK_INT(CALL(cuArray3DCreate_v2, &a[1], &later), 0);
	CHECK_INT(CALL(cuMipmappedArrayCreate, &m, &sparse, 3), 0);
	CHECK_U64(taken(), 0);
	/* Small ones share blocks. */
	static CUarray many[100];
	for (int i = 0; i < 100; i++) {
		CHECK_INT(CALL(cuArray3DCreate_v2, &many[i], &line), 0);
		same();
	}
	CHECK_U64(taken(), 100 * 65536 / BLOCK * BLOCK + BLOCK);
	for (int i = 0; i < 50; i++)
		CHECK_INT(CALL(cuArrayDestroy, many[i]), 0);
	same();
	/* Left to the context, as the large ones. */
	CHECK_INT(CALL(cuArrayCreate_v2, &a[2], &flat), 0);
	CHECK_INT(CALL(cuCtxDestroy_v2, context), 0);
	CHECK_U64(charged(0), 0);
	CHECK_U64(live(), 0);
}

static void part_array_limit(void)
{
	CUDA_ARRAY3D_DESCRIPTOR line = { 100, 0, 0, 0x20, 1, 0 }, layers = { 8192, 8192, 16, 0x20, 4, CUDA_ARRAY3D_LAYERED },
				huge = { (size_t)1 << 40, (size_t)1 << 40, 1, 0x20, 4, 0 }, square = { 2048, 2048, 0, 0x20, 1, 0 };
	CUDA_ARRAY_DESCRIPTOR flat = { 8192, 8192, 0x20, 4 };
	CUDA_ARRAY_DESCRIPTOR_v1 flat_v1 = { 8192, 8192, 0x20, 4 };
	CUarray a = (CUarray)(uintptr_t)7, got;
	CUmipmappedArray m = (CUmipmappedArray)(uintptr_t)7;
	CUdeviceptr p;
	int n = 0;
	start();
	CHECK_INT(CALL(cuMemAlloc_v2, &p, LIMIT - FAKE_CONTEXT_BYTES - 4 * MIB), 0);
	CHECK_INT(CALL(cuArrayCreate, &a, &flat_v1), CUDA_ERROR_OUT_OF_MEMORY);
	CHECK_INT(CALL(cuArrayCreate_v2, &a, &flat), CUDA_ERROR_OUT_OF_MEMORY);
	CHECK_INT(CALL(cuArray3DCreate_v2, &a, &layers), CUDA_ERROR_OUT_OF_MEMORY);
	CHECK_INT(CALL(cuArray3DCreate_v2, &a, &huge), CUDA_ERROR_OUT_OF_MEMORY);
	CHECK_INT(CALL(cuMipmappedArrayCreate, &m, &square, 12), CUDA_ERROR_OUT_OF_MEMORY);
	while (CALL(cuArray3DCreate_v2, &got, &line) == CUDA_SUCCESS)
		n++;
	CHECK_INT(n, 64);
	CHECK_INT(CALL(cuArray3DCreate_v2, &a, &line), CUDA_ERROR_OUT_OF_MEMORY);
	same();
	CHECK(a == (CUarray)(uintptr_t)7 && m == (CUmipmappedArray)(uintptr_t)7);
	CHECK_INT(CALL(cuArrayDestroy, got), 0);
	CHECK_INT(CALL(cuArray3DCreate_v2, &got, &line), 0);
	CHECK_INT(CALL(cuMemFree_v2, p), 0);
	CUresult error = ANY_ERROR;
	FAILS(cuArrayCreate, &a, &flat_v1);
	FAILS(cuArrayCreate_v2, &a, &flat);
	FAILS(cuArray3DCreate_v2, &a, &line);
	FAILS(cuMipmappedArrayCreate, &m, &square, 12);
	FAILS(cuArrayDestroy, got);
	error = CUDA_ERROR_OUT_OF_MEMORY;
	FAILS(cuArray3DCreate_v2, &a, &line);
	CHECK_INT(CALL(cuArrayCreate_v2, NULL, &flat), CUDA_ERROR_INVALID_VALUE);
	CHECK_INT(CALL(cuArrayCreate_v2, &a, NULL), CUDA_ERROR_INVALID_VALUE);
	CHECK_INT(CALL(cuArray3DCreate, &a, NULL), CUDA_ERROR_INVALID_VALUE);
	CHECK_INT(CALL(cuMipmappedArrayCreate, &m, NULL, 1), CUDA_ERROR_INVALID_VALUE);
	CHECK(a == (CUarray)(uintptr_t)7 && m == (CUmipmappedArray)(uintptr_t)7);
	same();
	CHECK_INT(CALL(cuArrayDestroy, got), 0);
	CHECK_INT(CALL(cuCtxDestroy_v2, context), 0);
	CHECK_U64(charged(0), 0);
}

/* ---- the scenes ---- */

/* What pools keep at the end goes with the process. */
static void keeps(const char *part)
{
	struct scene s = { .part = part, .max_bytes = LIMIT };
	play(&s);
}

static const struct part parts[] = {
	{ "pool", part_pool },
	{ "variants", part_variants },
	{ "pool limit", part_pool_limit },
	{ "grows more", part_grows_more },
	{ "pool where", part_pool_where },
	{ "destroyed", part_destroyed },
	{ "pool reset", part_pool_reset },
	{ "capture", part_capture },
	{ "pool failures", part_pool_failures },
	{ "pool race", part_pool_race },
	{ "claim", part_claim },
	{ "late free", part_late_free },
	{ "graph", part_graph },
	{ "graph limit", part_graph_limit },
	{ "arrays", part_arrays },
	{ "array limit", part_array_limit },
	{ NULL, NULL },
};

static void test_pool(void) { play_part("pool"); }
static void test_variants(void) { keeps("variants"); }
static void test_pool_limit(void) { play_part("pool limit"); }
static void test_grows_more(void) { keeps("grows more"); }
static void test_pool_where(void) { play_part("pool where"); }
static void test_destroyed(void) { play_part("destroyed"); }
static void test_pool_reset(void) { play_part("pool reset"); }
static void test_capture(void) { play_part("capture"); }
static void test_pool_failures(void) { keeps("pool failures"); }
/* A limit that half of what they ask for would reach. */
static void test_pool_race(void)
{
	struct scene s = { .part = "pool race", .max_bytes = LIMIT / 2 };
	play(&s);
	CHECK_U64(s.charged, 0);
}
static void test_claim(void)
{
	struct scene s = { .part = "claim", .max_bytes = LIMIT };
	play(&s);
	CHECK_U64(s.charged, 0);
	CHECK_U64(s.events_max, 1);
}
static void test_late_free(void) { play_part("late free"); }
static void test_graph(void) { play_part("graph"); }
static void test_arrays(void) { play_part("arrays"); }
static void test_array_limit(void) { play_part("array limit"); }

static void test_graph_limit(void)
{
	struct scene s = { .part = "graph limit", .max_bytes = LIMIT };
	play(&s);
	CHECK_U64(s.charged, 0);
	CHECK_U64(s.events_max, 7);
}

/* A full GPU is another thing than a limit. */
static void test_device_full(void)
{
	struct scene s = { .part = "pool failures", .max_bytes = LIMIT };
	play(&s);
	CHECK_U64(s.events_max, 0);
	CHECK_U64(s.events_device, 4);
}

static const struct unit_test tests[] = {
	{ "kept: pools by what they keep", test_pool },
	{ "kept: each variant calls itself", test_variants },
	{ "kept: a pool up to the limit, trimmed before a refusal", test_pool_limit },
	{ "kept: a pool that grows by other steps", test_grows_more },
	{ "kept: which pool, which GPU", test_pool_where },
	{ "kept: destroyed pools, many pools", test_destroyed },
	{ "kept: a reset device", test_pool_reset },
	{ "kept: a capture takes nothing", test_capture },
	{ "kept: a failing driver changes nothing", test_pool_failures },
	{ "kept: events of a full GPU", test_device_full },
	{ "kept: threads at the limit", test_pool_race },
	{ "kept: what one counts on nobody else gets", test_claim },
	{ "kept: a place that is free and gone at once", test_late_free },
	{ "kept: graphs by what they need", test_graph },
	{ "kept: graphs at the limit", test_graph_limit },
	{ "kept: arrays", test_arrays },
	{ "kept: arrays at the limit", test_array_limit },
	{ NULL, NULL },
};

int main(int argc, char **argv) { return interpose_main(tests, parts, argc, argv); }
