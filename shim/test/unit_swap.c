/* SPDX-License-Identifier: Apache-2.0 */
/* unit_swap.c: what stays on the host, within memory.swap.max, and every way in which it could come. */
#include "../src/account.h"
#include "../src/real.h"
#include "pages_builder.h"
#include "unit.h"

#define MIB (UINT64_C(1) << 20)
#define HELD 4096u /* blocks that are remembered */

static struct builder b;
static unsigned int living, advised, prefetched; /* at the driver */
static uint64_t next = UINT64_C(1) << 40;

/* ---- a driver ---- */

static CUresult get_device(CUdevice *device) { return *device = 0, CUDA_SUCCESS; }
static CUresult get_context(CUcontext *to) { return *to = NULL, CUDA_SUCCESS; }

static CUresult get_uuid(CUuuid *to, CUdevice device)
{
	(void)device;
	builder_uuid(0, (uint8_t *)to->bytes);
	return CUDA_SUCCESS;
}

static CUresult take(CUdeviceptr *pointer, size_t bytes)
{
	*pointer = next;
	next += (bytes + 2 * MIB - 1) / (2 * MIB) * (2 * MIB);
	living++;
	return CUDA_SUCCESS;
}

static CUresult take_managed(CUdeviceptr *pointer, size_t bytes, unsigned int flags)
{
	(void)flags;
	return take(pointer, bytes);
}

static CUresult give(CUdeviceptr pointer)
{
	(void)pointer;
	living--;
	return CUDA_SUCCESS;
}

static CUresult advise(CUdeviceptr pointer, size_t bytes, unsigned int advice, CUdevice at)
{
	(void)pointer, (void)bytes, (void)advice, (void)at;
	advised++;
	return CUDA_SUCCESS;
}

static CUresult advise_v2(CUdeviceptr pointer, size_t bytes, unsigned int advice, CUmemLocation at)
{
	return advise(pointer, bytes, advice, at.id);
}

static CUresult prefetch(CUdeviceptr pointer, size_t bytes, CUdevice to, CUstream stream)
{
	(void)pointer, (void)bytes, (void)to, (void)stream;
	prefetched++;
	return CUDA_SUCCESS;
}

static CUresult prefetch_v2(CUdeviceptr pointer, size_t bytes, CUmemLocation to, unsigned int flags, CUstream stream)
{
	(void)flags;
	return prefetch(pointer, bytes, to.id, stream);
}

static CUresult prefetch_batch(CUdeviceptr *pointers, size_t *sizes, size_t count, CUmemLocation *places, size_t *first, size_t places_count,
			       unsigned long long flags, CUstream stream)
{
	(void)pointers, (void)sizes, (void)count, (void)places, (void)first, (void)places_count, (void)flags, (void)stream;
	prefetched++;
	return CUDA_SUCCESS;
}

#define IS(symbol, function)                                  \
	do {                                                  \
		fn_##symbol *it = function;                   \
		real_addresses[ID_##symbol] = (uintptr_t)it;  \
	} while (0)

static void begin(uint64_t max_bytes, uint64_t swap_max_bytes)
{
	struct gpufence_limits_gpu g = builder_gpu(0);
	IS(cuCtxGetDevice, get_device);
	IS(cuCtxGetCurrent, get_context);
	IS(cuDeviceGetUuid_v2, get_uuid);
	IS(cuMemAlloc_v2, take);
	IS(cuMemAllocManaged, take_managed);
	IS(cuMemFree_v2, give);
	IS(cuMemAdvise, advise);
	IS(cuMemAdvise_v2, advise_v2);
	IS(cuMemPrefetchAsync, prefetch);
	IS(cuMemPrefetchAsync_ptsz, prefetch);
	IS(cuMemPrefetchAsync_v2, prefetch_v2);
	IS(cuMemPrefetchAsync_v2_ptsz, prefetch_v2);
	IS(cuMemPrefetchBatchAsync, prefetch_batch);
	IS(cuMemPrefetchBatchAsync_ptsz, prefetch_batch);
	IS(cuMemDiscardAndPrefetchBatchAsync, prefetch_batch);
	IS(cuMemDiscardAndPrefetchBatchAsync_ptsz, prefetch_batch);
	builder_init(&b, NULL);
	g.max_bytes = max_bytes;
	g.swap_max_bytes = swap_max_bytes;
	g.pod_swap_max_bytes = GPUFENCE_UNLIMITED;
	builder_publish(&b, &g, 1);
	account_set_dir(b.dir);
}

static void counted(uint64_t device, uint64_t managed, uint64_t swap)
{
	const struct gpufence_slot_gpu *g = &builder_slot(&b, 0)->gpu[0];
	CHECK_U64((g->device & GPUFENCE_UNITS_MASK) * GPUFENCE_UNIT_BYTES, device);
	CHECK_U64((g->managed & GPUFENCE_UNITS_MASK) * GPUFENCE_UNIT_BYTES, managed);
	CHECK_U64((g->swap & GPUFENCE_UNITS_MASK) * GPUFENCE_UNIT_BYTES, swap);
}

/* ---- */

static void spills(void)
{
	CUdeviceptr p, q;
	begin(8 * MIB, 6 * MIB);
	CHECK_INT(hook_cuMemAlloc_v2(&p, 8 * MIB), 0);
	CHECK_U64(advised, 0);
	CHECK_INT(hook_cuMemAlloc_v2(&q, 4 * MIB), 0);
	CHECK_U64(advised, 1); /* to stay on the host */
	counted(8 * MIB, 0, 4 * MIB);
	CHECK_INT(hook_cuMemAllocManaged(&q, 4 * MIB, 1), CUDA_ERROR_OUT_OF_MEMORY);
	CHECK_INT(hook_cuMemFree_v2(q), 0); /* a refusal touches no output */
	CHECK_INT(hook_cuMemFree_v2(p), 0);
	counted(0, 0, 0);
	CHECK_U64(living, 0);
	builder_remove(&b);
}

/* Every call that could bring it to the GPU, first where it does not fit, then where it does. */
static const CUmemLocation here = { CU_MEM_LOCATION_TYPE_DEVICE, 0 };
static const CUmemLocation part = { CU_MEM_LOCATION_TYPE_DEVICE_LOCALITY_DOMAIN, 1 << 8 };
static const CUmemLocation host = { CU_MEM_LOCATION_TYPE_HOST, 0 };

static CUresult bring(int way, CUdeviceptr p)
{
	/* A batch of which the second range, and it alone, is to be on a GPU. */
	CUdeviceptr pointers[2] = { 4096, p + MIB };
	size_t sizes[2] = { 4096, 4096 }, first[2] = { 0, 1 };
	CUmemLocation places[2] = { host, here };
	switch (way) {
	case 0: return hook_cuMemPrefetchAsync(p, 4096, 0, NULL);
	case 1: return hook_cuMemPrefetchAsync_ptsz(p + MIB, 1, 0, NULL);
	case 2: return hook_cuMemPrefetchAsync_v2(p, 4 * MIB, here, 0, NULL);
	case 3: return hook_cuMemPrefetchAsync_v2_ptsz(p, 4 * MIB, part, 0, NULL);
	case 4: return hook_cuMemAdvise(p, 4 * MIB, CU_MEM_ADVISE_SET_PREFERRED_LOCATION, 0);
	case 5: return hook_cuMemAdvise_v2(p, 4 * MIB, CU_MEM_ADVISE_UNSET_PREFERRED_LOCATION, host);
	case 6: return hook_cuMemAdvise(p, 4 * MIB, CU_MEM_ADVISE_SET_READ_MOSTLY, CU_DEVICE_CPU);
	case 7: return hook_cuMemAdvise_v2(p, 4 * MIB, CU_MEM_ADVISE_SET_READ_MOSTLY, host);
	case 8: return hook_cuMemPrefetchBatchAsync(pointers, sizes, 2, places, first, 2, 0, NULL);
	case 9: return hook_cuMemPrefetchBatchAsync_ptsz(pointers, sizes, 2, places, first, 2, 0, NULL);
	case 10: return hook_cuMemDiscardAndPrefetchBatchAsync(pointers, sizes, 2, places, first, 2, 0, NULL);
	case 11: return hook_cuMemDiscardAndPrefetchBatchAsync_ptsz(pointers, sizes, 2, places, first, 2, 0, NULL);
	default: return -1;
	}
}

static void comes_as_far_as_it_fits(void)
{
	CUdeviceptr p, q;
	begin(8 * MIB, 8 * MIB);
	for (int way = 0; way < 12; way++) {
		CHECK_INT(hook_cuMemAlloc_v2(&p, 8 * MIB), 0);
		CHECK_INT(hook_cuMemAllocManaged(&q, 4 * MIB, 1), 0);
		counted(8 * MIB, 0, 4 * MIB);
		unsigned int reached = advised + prefetched;
		CHECK_INT(bring(way, q), 0);
		if (advised + prefetched != reached)
			unit_fail("way %d reached the driver where there is no room", way);
		counted(8 * MIB, 0, 4 * MIB);
		CHECK_INT(hook_cuMemFree_v2(p), 0);
		CHECK_INT(bring(way, q), 0);
		if (advised + prefetched != reached + 1)
			unit_fail("way %d did not reach the driver", way);
		counted(0, 4 * MIB, 0);
		CHECK_INT(hook_cuMemFree_v2(q), 0);
		counted(0, 0, 0);
	}
	builder_remove(&b);
}

/* What lets nothing come goes to the driver as it is. */
static void others_pass(void)
{
	CUdeviceptr p, q, pointers[1];
	size_t sizes[1] = { 4096 }, first[1] = { 0 };
	CUmemLocation places[1] = { host };
	begin(8 * MIB, 8 * MIB);
	CHECK_INT(hook_cuMemAlloc_v2(&p, 8 * MIB), 0);
	CHECK_INT(hook_cuMemAlloc_v2(&q, 4 * MIB), 0);
	pointers[0] = q;
	advised = 0;
	CHECK_INT(hook_cuMemAdvise(q, MIB, CU_MEM_ADVISE_SET_PREFERRED_LOCATION, CU_DEVICE_CPU), 0);
	CHECK_INT(hook_cuMemAdvise_v2(q, MIB, CU_MEM_ADVISE_SET_PREFERRED_LOCATION, host), 0);
	CHECK_INT(hook_cuMemAdvise_v2(q, MIB, 2, here), 0);
	CHECK_INT(hook_cuMemAdvise_v2(q, MIB, 5, here), 0);
	CHECK_U64(advised, 4);
	CHECK_INT(hook_cuMemPrefetchAsync(q, MIB, CU_DEVICE_CPU, NULL), 0);
	CHECK_INT(hook_cuMemPrefetchAsync_v2(q, MIB, host, 0, NULL), 0);
	CHECK_INT(hook_cuMemPrefetchBatchAsync(pointers, sizes, 1, places, first, 1, 0, NULL), 0);
	CHECK_INT(hook_cuMemPrefetchBatchAsync(NULL, sizes, 1, places, first, 1, 0, NULL), 0);
	CHECK_INT(hook_cuMemPrefetchBatchAsync(pointers, NULL, 1, places, first, 1, 0, NULL), 0);
	CHECK_INT(hook_cuMemPrefetchBatchAsync(pointers, sizes, 1, NULL, first, 1, 0, NULL), 0);
	CHECK_INT(hook_cuMemPrefetchBatchAsync(pointers, sizes, 1, places, NULL, 1, 0, NULL), 0);
	places[0] = here;
	CHECK_INT(hook_cuMemPrefetchBatchAsync(pointers, sizes, 1, places, first, 0, 0, NULL), 0);
	CHECK_INT(hook_cuMemPrefetchBatchAsync(pointers, sizes, 0, places, first, 1, 0, NULL), 0);
	CHECK_U64(prefetched, 9);
	counted(8 * MIB, 0, 4 * MIB);
	builder_remove(&b);
}

/* What could not be remembered could come unseen, so it is refused, and given back. */
static void only_what_is_remembered(void)
{
	static CUdeviceptr p[HELD + 1];
	CUdeviceptr full, q = 7;
	begin(2 * MIB, GPUFENCE_UNLIMITED);
	CHECK_INT(hook_cuMemAlloc_v2(&full, 2 * MIB), 0);
	for (unsigned int i = 0; i < HELD; i++)
		CHECK_INT(hook_cuMemAlloc_v2(&p[i], 2 * MIB), 0);
	counted(2 * MIB, 0, HELD * 2 * MIB);
	CHECK_INT(hook_cuMemAlloc_v2(&q, 2 * MIB), CUDA_ERROR_OUT_OF_MEMORY);
	CHECK_U64(q, 7);
	CHECK_U64(living, HELD + 1);
	counted(2 * MIB, 0, HELD * 2 * MIB);
	/* A place that is free again is taken again. */
	CHECK_INT(hook_cuMemFree_v2(p[77]), 0);
	CHECK_INT(hook_cuMemAlloc_v2(&p[77], 2 * MIB), 0);
	CHECK_INT(hook_cuMemAlloc_v2(&q, 2 * MIB), CUDA_ERROR_OUT_OF_MEMORY);
	unsigned int reached = prefetched;
	CHECK_INT(hook_cuMemPrefetchAsync(p[77], 2 * MIB, 0, NULL), 0);
	CHECK_INT(hook_cuMemPrefetchAsync(p[HELD - 1], 2 * MIB, 0, NULL), 0);
	CHECK_U64(prefetched, reached);
	for (unsigned int i = 0; i < HELD; i++)
		CHECK_INT(hook_cuMemFree_v2(p[i]), 0);
	CHECK_INT(hook_cuMemFree_v2(full), 0);
	counted(0, 0, 0);
	CHECK_U64(living, 0);
	builder_remove(&b);
}

int main(int argc, char **argv)
{
	static const struct unit_test tests[] = {
		{ "swap: what does not fit stays on the host", spills },
		{ "swap: twelve ways to the GPU, as far as it fits", comes_as_far_as_it_fits },
		{ "swap: advice and prefetches to the host pass", others_pass },
		{ "swap: nothing spills that is not remembered", only_what_is_remembered },
		{ NULL, NULL },
	};
	return unit_main(tests, argc, argv);
}
