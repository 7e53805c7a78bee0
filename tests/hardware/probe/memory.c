/* SPDX-License-Identifier: Apache-2.0 */
#include "probe.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { VMM_SUPPORTED = 102, POOLS_SUPPORTED = 115, MULTICAST_SUPPORTED = 132, CONCURRENT_MANAGED = 89, MANAGED = 83 };

static uint64_t lost(size_t before, size_t after) { return before > after ? before - after : 0; }

static void rounding(void)
{
	static const struct {
		const char *name;
		size_t bytes;
	} sizes[] = {
		{ "1", 1 },           { "64KiB", 64 * KIB }, { "1MiB", MIB },         { "1MiB+1", MIB + 1 },
		{ "2MiB", 2 * MIB },  { "2MiB+1", 2 * MIB + 1 }, { "3MiB", 3 * MIB }, { "33MiB", 33 * MIB },
	};
	CUdeviceptr small[4];
	char name[48];
	nvml_start();
	cuda_start();
	give(alloc(1)); /* what only the first one takes */
	for (size_t i = 0; i < sizeof(sizes) / sizeof(sizes[0]); i++) {
		uint64_t used = nvml_memory_now().used;
		size_t before = free_now();
		CUdeviceptr p = alloc(sizes[i].bytes);
		size_t with = free_now();
		uint64_t used_with = nvml_memory_now().used;
		give(p);
		snprintf(name, sizeof(name), "%s_bytes", sizes[i].name);
		say(name, lost(before, with));
		snprintf(name, sizeof(name), "%s_nvml_bytes", sizes[i].name);
		say(name, used_with > used ? used_with - used : 0);
		snprintf(name, sizeof(name), "%s_kept_bytes", sizes[i].name);
		say(name, lost(before, free_now()));
	}
	for (size_t i = 0; i < 4; i++)
		small[i] = alloc(i == 2 ? 513 : 1);
	say("distance_1", small[1] - small[0]);
	say("distance_513", small[3] - small[2]);
}

static void small_first_fit(void)
{
	cuda_start();
	CUdeviceptr a = alloc(600 * KIB), b = alloc(300 * KIB);
	give(a);
	CUdeviceptr c = alloc(300 * KIB);
	say("same_page", (a ^ b) < 2 * MIB);
	say("first_gap", c == a);
	say("behind_second", c == b + 300 * KIB);
}

static void pitch(void)
{
	static const size_t widths[] = { 1, 513, 1000, 4096 };
	char name[32];
	cuda_start();
	for (size_t i = 0; i < sizeof(widths) / sizeof(widths[0]); i++) {
		CUdeviceptr p = 0;
		size_t got = 0;
		CALL(cuMemAllocPitch_v2, (CUdeviceptr *, size_t *, size_t, size_t, unsigned int), &p, &got, widths[i], 16, 4);
		snprintf(name, sizeof(name), "pitch_%zu", widths[i]);
		say(name, got);
		give(p);
	}
}

static void vmm_granularity(void)
{
	CUmemAllocationProp p = { .type = CU_MEM_ALLOCATION_TYPE_PINNED, .location = { CU_MEM_LOCATION_TYPE_DEVICE, 0 } };
	CUmemGenericAllocationHandle h = 0;
	CUdeviceptr address = 0;
	size_t least = 0, recommended = 0;
	cuda_start();
	say("supported", (uint64_t)attribute(VMM_SUPPORTED));
	p.location.id = device;
	CALL(cuMemGetAllocationGranularity, (size_t *, const CUmemAllocationProp *, CUmemAllocationGranularity_flags), &least, &p, 0);
	CALL(cuMemGetAllocationGranularity, (size_t *, const CUmemAllocationProp *, CUmemAllocationGranularity_flags), &recommended, &p, 1);
	say("least_bytes", least);
	say("recommended_bytes", recommended);
	size_t before = free_now();
	CALL(cuMemAddressReserve, (CUdeviceptr *, size_t, size_t, CUdeviceptr, unsigned long long), &address, 32 * recommended, 0, 0, 0);
	say("reserved_address_bytes", lost(before, free_now()));
	CALL(cuMemCreate, (CUmemGenericAllocationHandle *, size_t, const CUmemAllocationProp *, unsigned long long), &h, recommended, &p, 0);
	say("created_bytes", lost(before, free_now()));
	CALL(cuMemMap, (CUdeviceptr, size_t, size_t, CUmemGenericAllocationHandle, unsigned long long), address, recommended, 0, h, 0);
	CALL(cuMemRelease, (CUmemGenericAllocationHandle), h);
	say("released_while_mapped_bytes", lost(before, free_now()));
	CALL(cuMemUnmap, (CUdeviceptr, size_t), address, recommended);
	say("unmapped_bytes", lost(before, free_now()));
	say_word("odd_size",
		 word_of(ASK(cuMemCreate, (CUmemGenericAllocationHandle *, size_t, const CUmemAllocationProp *, unsigned long long), &h, least + 1, &p, 0)));
}

static void multicast_size(void)
{
	CUmulticastObjectProp p = { .numDevices = 1, .size = 64 * MIB };
	CUmemGenericAllocationHandle h = 0;
	cuda_start();
	if (!attribute(MULTICAST_SUPPORTED))
		impossible("this GPU has no multicast (NVSwitch)");
	size_t granularity = 0;
	CALL(cuMulticastGetGranularity, (size_t *, const CUmulticastObjectProp *, CUmulticastGranularity_flags), &granularity, &p, 1);
	say("granularity_bytes", granularity);
	if (granularity)
		p.size = (p.size + granularity - 1) / granularity * granularity;
	size_t before = free_now();
	CUresult r = ASK(cuMulticastCreate, (CUmemGenericAllocationHandle *, const CUmulticastObjectProp *), &h, &p);
	if (r != CUDA_SUCCESS)
		impossible("cuMulticastCreate with one GPU: %s", word_of(r));
	say("object_bytes", lost(before, free_now()));
}

/* ---- pools --------------------------------------------------------------------------------- */

static CUmemoryPool make_pool(void)
{
	CUmemPoolProps props = { .allocType = CU_MEM_ALLOCATION_TYPE_PINNED, .location = { CU_MEM_LOCATION_TYPE_DEVICE, device } };
	CUmemoryPool pool = NULL;
	if (!attribute(POOLS_SUPPORTED))
		impossible("this GPU has no memory pools");
	CALL(cuMemPoolCreate, (CUmemoryPool *, const CUmemPoolProps *), &pool, &props);
	return pool;
}

static uint64_t pool_value(CUmemoryPool pool, CUmemPool_attribute a)
{
	uint64_t value = 0;
	CALL(cuMemPoolGetAttribute, (CUmemoryPool, CUmemPool_attribute, void *), pool, a, &value);
	return value;
}

static CUresult from_pool(CUmemoryPool pool, size_t bytes, CUdeviceptr *p)
{
	return ASK(cuMemAllocFromPoolAsync, (CUdeviceptr *, size_t, CUmemoryPool, CUstream), p, bytes, pool, NULL);
}

static void give_async(CUdeviceptr p) { CALL(cuMemFreeAsync, (CUdeviceptr, CUstream), p, NULL); }

static void pool_step(void)
{
	static const size_t sizes[] = { 1, 33 * MIB, 65 * MIB };
	CUdeviceptr p[3], q = 0;
	char name[48];
	cuda_start();
	CUmemoryPool pool = make_pool();
	say("threshold_bytes", pool_value(pool, CU_MEMPOOL_ATTR_RELEASE_THRESHOLD));
	size_t before = free_now();
	for (size_t i = 0; i < 3; i++) {
		must(from_pool(pool, sizes[i], &p[i]), "allocate from a pool");
		snprintf(name, sizeof(name), "reserved_after_%zu", sizes[i]);
		say(name, pool_value(pool, CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT));
	}
	say("taken_bytes", lost(before, free_now()));
	for (size_t i = 0; i < 3; i++)
		give_async(p[i]);
	say("reserved_after_free", pool_value(pool, CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT));
	synchronize();
	say("reserved_after_synchronize", pool_value(pool, CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT));
	say("kept_bytes", lost(before, free_now()));

	/* Parts of chunks: what goes back when one of two pieces is freed. */
	must(from_pool(pool, 8 * MIB, &p[0]), "allocate from a pool");
	must(from_pool(pool, 64 * MIB, &p[1]), "allocate from a pool");
	say("reserved_of_two", pool_value(pool, CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT));
	give_async(p[1]);
	synchronize();
	say("reserved_of_first", pool_value(pool, CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT));
	give_async(p[0]);
	synchronize();
	uint64_t keep = ~0ULL;
	CALL(cuMemPoolSetAttribute, (CUmemoryPool, CUmemPool_attribute, void *), pool, CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, &keep);
	must(from_pool(pool, 40 * MIB, &q), "allocate from a pool");
	give_async(q);
	synchronize();
	say("kept_by_threshold", pool_value(pool, CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT));
	CALL(cuMemPoolTrimTo, (CUmemoryPool, size_t), pool, 0);
	say("after_trim", pool_value(pool, CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT));
}

/* Takes what is left of the device, in ever smaller pieces. */
static size_t fill(CUdeviceptr *pieces, size_t room, size_t last)
{
	size_t n = 0;
	for (size_t bytes = 8192 * MIB; bytes >= last && n < room;) {
		CUresult r = ASK(cuMemAlloc_v2, (CUdeviceptr *, size_t), &pieces[n], bytes);
		if (r == CUDA_SUCCESS)
			n++;
		else if (r == CUDA_ERROR_OUT_OF_MEMORY)
			bytes /= 2;
		else
			must(r, "cuMemAlloc_v2");
	}
	return n;
}

static void pool_trim(void)
{
	static CUdeviceptr pieces[4096];
	CUdeviceptr kept = 0, p = 0;
	uint64_t keep = ~0ULL;
	nvml_start();
	cuda_start();
	if (!alone())
		impossible("somebody else uses this GPU, or NVML does not tell: it must not be filled");
	CUmemoryPool pool = make_pool();
	CALL(cuMemPoolSetAttribute, (CUmemoryPool, CUmemPool_attribute, void *), pool, CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, &keep);
	must(from_pool(pool, 256 * MIB, &kept), "allocate from a pool");
	give_async(kept);
	synchronize();
	uint64_t before = pool_value(pool, CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT);
	say("pool_bytes", before);
	/* The filling itself may already take it. */
	size_t n = fill(pieces, 4096, 2 * MIB);
	uint64_t filled = pool_value(pool, CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT);
	say("pool_bytes_when_full", filled);
	say("free_when_full", free_now());
	say("trimmed_by_fill", filled < before);
	say_word("then_128MiB", word_of(ASK(cuMemAlloc_v2, (CUdeviceptr *, size_t), &p, 128 * MIB)));
	say("pool_bytes_then", pool_value(pool, CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT));
	/* The same from a second pool. */
	say_word("second_pool_128MiB", word_of(from_pool(make_pool(), 128 * MIB, &p)));
	say("pool_bytes_at_last", pool_value(pool, CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT));
	say_word("context_when_full", word_of(ASK(cuCtxCreate_v2, (CUcontext *, unsigned int, CUdevice), &(CUcontext){ NULL }, 0, device)));
	say("pieces", n);
}

/* ---- arrays -------------------------------------------------------------------------------- */

static void arrays(void)
{
	static const struct {
		const char *name;
		CUDA_ARRAY3D_DESCRIPTOR d;
	} kinds[] = {
		{ "1x1_u8", { 1, 1, 0, 1, 1, 0 } },
		{ "65x9_u8", { 65, 9, 0, 1, 1, 0 } },
		{ "65x9_f32x4", { 65, 9, 0, 0x20, 4, 0 } },
		{ "1000_f32", { 1000, 0, 0, 0x20, 1, 0 } },
		{ "4096x4096_f32", { 4096, 4096, 0, 0x20, 1, 0 } },
		{ "4096x4097_f32", { 4096, 4097, 0, 0x20, 1, 0 } },
		{ "4096x4096_u8", { 4096, 4096, 0, 1, 1, 0 } },
		{ "100x100x100_f32", { 100, 100, 100, 0x20, 1, 0 } },
		{ "1024x1024x8_layered", { 1024, 1024, 8, 0x20, 1, CUDA_ARRAY3D_LAYERED } },
		{ "4096x4096_sparse", { 4096, 4096, 0, 0x20, 1, CUDA_ARRAY3D_SPARSE } },
		{ "4096x4096_deferred", { 4096, 4096, 0, 0x20, 1, CUDA_ARRAY3D_DEFERRED_MAPPING } },
	};
	char name[64];
	cuda_start();
	for (size_t i = 0; i < sizeof(kinds) / sizeof(kinds[0]); i++) {
		CUarray a = NULL;
		size_t before = free_now();
		CUresult r = ASK(cuArray3DCreate_v2, (CUarray *, const CUDA_ARRAY3D_DESCRIPTOR *), &a, &kinds[i].d);
		if (r != CUDA_SUCCESS) {
			say_word(kinds[i].name, word_of(r));
			continue;
		}
		snprintf(name, sizeof(name), "%s_bytes", kinds[i].name);
		say(name, lost(before, free_now()));
		CALL(cuArrayDestroy, (CUarray), a);
	}
	/* Many small ones tell what one takes of a page that they share. */
	CUarray many[256];
	size_t before = free_now();
	for (size_t i = 0; i < 256; i++)
		CALL(cuArray3DCreate_v2, (CUarray *, const CUDA_ARRAY3D_DESCRIPTOR *), &many[i], &kinds[1].d);
	say("256_of_65x9_u8_bytes", lost(before, free_now()));
	CUDA_ARRAY3D_DESCRIPTOR d = { 1024, 1024, 0, 0x20, 1, 0 };
	CUmipmappedArray mipmap = NULL;
	before = free_now();
	if (ASK(cuMipmappedArrayCreate, (CUmipmappedArray *, const CUDA_ARRAY3D_DESCRIPTOR *, unsigned int), &mipmap, &d, 11) == CUDA_SUCCESS)
		say("mipmap_1024x1024_f32_bytes", lost(before, free_now()));
}

/* ---- graphs -------------------------------------------------------------------------------- */

static CUgraphNode alloc_node(CUgraph g, CUgraphNode after, size_t bytes, CUdeviceptr *p)
{
	CUDA_MEM_ALLOC_NODE_PARAMS params = {
		.poolProps = { .allocType = CU_MEM_ALLOCATION_TYPE_PINNED, .location = { CU_MEM_LOCATION_TYPE_DEVICE, device } },
		.bytesize = bytes,
	};
	CUgraphNode node = NULL;
	CALL(cuGraphAddMemAllocNode, (CUgraphNode *, CUgraph, const CUgraphNode *, size_t, CUDA_MEM_ALLOC_NODE_PARAMS *), &node, g,
	     after ? &after : NULL, after ? 1 : 0, &params);
	*p = params.dptr;
	return node;
}

static CUgraphNode free_node(CUgraph g, CUgraphNode after, CUdeviceptr p)
{
	CUgraphNode node = NULL;
	CALL(cuGraphAddMemFreeNode, (CUgraphNode *, CUgraph, const CUgraphNode *, size_t, CUdeviceptr), &node, g, &after, 1, p);
	return node;
}

static uint64_t graph_value(CUgraphMem_attribute a)
{
	uint64_t value = 0;
	CALL(cuDeviceGetGraphMemAttribute, (CUdevice, CUgraphMem_attribute, void *), device, a, &value);
	return value;
}

static CUgraphExec instance(CUgraph g)
{
	CUgraphExec exec = NULL;
	CALL(cuGraphInstantiateWithFlags, (CUgraphExec *, CUgraph, unsigned long long), &exec, g, 0);
	return exec;
}

static CUresult launch(CUgraphExec exec)
{
	CUresult r = ASK(cuGraphLaunch, (CUgraphExec, CUstream), exec, NULL);
	if (r == CUDA_SUCCESS)
		synchronize();
	return r;
}

static void graph_fit(void)
{
	CUdeviceptr four = 0, eight = 0, five = 0;
	CUgraph g = NULL;
	cuda_start();
	CALL(cuGraphCreate, (CUgraph *, unsigned int), &g, 0);
	CUgraphNode n = alloc_node(g, NULL, 4 * MIB, &four);
	n = alloc_node(g, n, 8 * MIB, &eight);
	n = free_node(g, n, four);
	n = free_node(g, n, eight);
	n = alloc_node(g, n, 5 * MIB, &five);
	free_node(g, n, five);
	say("of_first", five == four);
	say("of_second", five == eight);
	CUgraphExec exec = instance(g);
	say("reserved_before_launch", graph_value(CU_GRAPH_MEM_ATTR_RESERVED_MEM_CURRENT));
	say_word("launch", word_of(launch(exec)));
	say("reserved_after_launch", graph_value(CU_GRAPH_MEM_ATTR_RESERVED_MEM_CURRENT));
	CALL(cuDeviceGraphMemTrim, (CUdevice), device);
	say("reserved_after_trim", graph_value(CU_GRAPH_MEM_ATTR_RESERVED_MEM_CURRENT));
	CALL(cuGraphExecDestroy, (CUgraphExec), exec);
	CALL(cuGraphDestroy, (CUgraph), g);
	CALL(cuDeviceGraphMemTrim, (CUdevice), device);
	say("reserved_after_destroy", graph_value(CU_GRAPH_MEM_ATTR_RESERVED_MEM_CURRENT));
}

static void graph_twice(void)
{
	CUdeviceptr p = 0;
	CUgraph g = NULL;
	cuda_start();
	CALL(cuGraphCreate, (CUgraph *, unsigned int), &g, 0);
	alloc_node(g, NULL, 4 * MIB, &p);
	CUgraphExec exec = instance(g);
	say_word("first", word_of(launch(exec)));
	say_word("second", word_of(launch(exec)));
	say_word("free", word_of(ASK(cuMemFree_v2, (CUdeviceptr), p)));
	say_word("third", word_of(launch(exec)));
}

/* ---- managed memory -------------------------------------------------------------------------- */

static void managed_first_touch(void)
{
	const size_t bytes = 64 * MIB;
	CUdeviceptr p = 0;
	uint64_t row = 0, with = 0;
	nvml_start();
	cuda_start();
	if (!attribute(MANAGED))
		impossible("this GPU has no managed memory");
	say("concurrent", (uint64_t)attribute(CONCURRENT_MANAGED));
	nvml_process(getpid(), &row);
	uint64_t used = nvml_memory_now().used;
	size_t before = free_now();
	CALL(cuMemAllocManaged, (CUdeviceptr *, size_t, unsigned int), &p, bytes, CU_MEM_ATTACH_GLOBAL);
	say("allocated_bytes", lost(before, free_now()));
	/* Elsewhere the host may not touch it while the device could. */
	if (attribute(CONCURRENT_MANAGED)) {
		/* The simulated driver's managed memory has no pages of the host's. */
		if (getenv("PROBE_SIMULATED")) {
			say_word("host_touch", "not by the simulated GPU");
		} else {
			memset((void *)(uintptr_t)p, 1, bytes);
			say("host_touch_bytes", lost(before, free_now()));
		}
	}
	CALL(cuMemsetD8_v2, (CUdeviceptr, unsigned char, size_t), p, 2, bytes);
	synchronize();
	say("device_touch_bytes", lost(before, free_now()));
	uint64_t used_with = nvml_memory_now().used;
	say("nvml_used_bytes", used_with > used ? used_with - used : 0);
	nvml_process(getpid(), &with);
	say("nvml_row_bytes", with > row ? with - row : 0);
	give(p);
	say("kept_bytes", lost(before, free_now()));
}

/* ---- costs ----------------------------------------------------------------------------------- */

static int by_value(const void *a, const void *b)
{
	uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;
	return x < y ? -1 : x > y;
}

/* Medians of batches, for a comparison with and without the shim. */
static void pair_cost(void)
{
	enum { BATCHES = 21, EACH = 50 };
	uint64_t pairs[BATCHES], infos[BATCHES];
	cuda_start();
	give(alloc(2 * MIB));
	for (int b = 0; b < BATCHES; b++) {
		uint64_t t = report_now_ns();
		for (int i = 0; i < EACH; i++)
			give(alloc(2 * MIB));
		pairs[b] = (report_now_ns() - t) / EACH;
		t = report_now_ns();
		for (int i = 0; i < EACH; i++)
			free_now();
		infos[b] = (report_now_ns() - t) / EACH;
	}
	qsort(pairs, BATCHES, sizeof(pairs[0]), by_value);
	qsort(infos, BATCHES, sizeof(infos[0]), by_value);
	say("pair_ns", pairs[BATCHES / 2]);
	say("info_ns", infos[BATCHES / 2]);
	/* Of the shim, where it is loaded: what it lets this process see. */
	say("total_bytes", total_now());
}

const struct probe memory_probes[] = {
	{ "rounding", rounding },   { "small-first-fit", small_first_fit },
	{ "pitch", pitch },         { "vmm-granularity", vmm_granularity },
	{ "multicast-size", multicast_size }, { "pool-step", pool_step },
	{ "pool-trim", pool_trim }, { "arrays", arrays },
	{ "graph-fit", graph_fit }, { "graph-twice", graph_twice },
	{ "managed-first-touch", managed_first_touch }, { "pair-cost", pair_cost },
	{ NULL, NULL },
};
