/* SPDX-License-Identifier: Apache-2.0 */
/* What is charged for physical memory, through the hooks, on the recording driver. */
#include "../src/table.h"
#include "interpose.h"

#define BLOCK (2 * MIB)
#define ANY_ERROR 717 /* one that only our test driver gives */

static void *cuda;
static uint64_t (*live)(void);
static void (*fail)(const char *, CUresult);
static unsigned long (*calls)(const char *);

#define CALL(symbol, ...) (FN(cuda, symbol)(__VA_ARGS__))

static void start(void)
{
	cuda = open_driver(RTLD_LOCAL);
	live = need(cuda, "fake_live_bytes");
	fail = need(cuda, "fake_fail");
	calls = need(cuda, "fake_calls");
	CHECK_INT(CALL(cuInit, 0), 0);
}

static void same(void) { CHECK_U64(charged(0) + charged(1), live()); }

static CUmemAllocationProp on(int type, int id)
{
	return (CUmemAllocationProp){ .type = 1, .location = { type, id } };
}

static CUmemGenericAllocationHandle create(int device, size_t bytes)
{
	CUmemGenericAllocationHandle handle;
	CUmemAllocationProp prop = on(CU_MEM_LOCATION_TYPE_DEVICE, device);
	CHECK_INT(CALL(cuMemCreate, &handle, bytes, &prop, 0), 0);
	same();
	return handle;
}

/* Without a context: the device is the call's own. */
static void part_create(void)
{
	CUmemGenericAllocationHandle handle = 99, a, b;
	CUmemAllocationProp first = on(CU_MEM_LOCATION_TYPE_DEVICE, 0), none = on(CU_MEM_LOCATION_TYPE_DEVICE, 7);
	start();
	a = create(0, 2 * GIB);
	CHECK_U64(charged(0), 2 * GIB);
	b = create(1, 3 * GIB);
	CHECK_U64(charged(0), 2 * GIB);
	CHECK_U64(charged(1), 3 * GIB);
	unsigned long before = calls("cuMemCreate");
	CHECK_INT(CALL(cuMemCreate, &handle, 2 * GIB + BLOCK, &first, 0), CUDA_ERROR_OUT_OF_MEMORY);
	CHECK_INT(CALL(cuMemCreate, &handle, (size_t)-1, &first, 0), CUDA_ERROR_OUT_OF_MEMORY);
	CHECK_U64(calls("cuMemCreate"), before);
	/* The driver's own errors. */
	CHECK_INT(CALL(cuMemCreate, &handle, 4096, &first, 0), CUDA_ERROR_INVALID_VALUE);
	CHECK_INT(CALL(cuMemCreate, &handle, BLOCK, &first, 9), CUDA_ERROR_INVALID_VALUE);
	CHECK_INT(CALL(cuMemCreate, &handle, 0, &first, 0), CUDA_ERROR_INVALID_VALUE);
	CHECK_INT(CALL(cuMemCreate, &handle, BLOCK, NULL, 0), CUDA_ERROR_INVALID_VALUE);
	CHECK_INT(CALL(cuMemCreate, NULL, BLOCK, &first, 0), CUDA_ERROR_INVALID_VALUE);
	CHECK_INT(CALL(cuMemCreate, &handle, BLOCK, &none, 0), 101);
	fail("cuMemCreate", ANY_ERROR);
	CHECK_INT(CALL(cuMemCreate, &handle, BLOCK, &first, 0), ANY_ERROR);
	CHECK_U64(handle, 99);
	same();
	/* The host's memory is no GPU's: whichever node of it, and none in particular. */
	for (int type = CU_MEM_LOCATION_TYPE_HOST; type <= CU_MEM_LOCATION_TYPE_HOST_NUMA_CURRENT; type++) {
		CUmemAllocationProp host = on(type, type == CU_MEM_LOCATION_TYPE_HOST_NUMA);
		CHECK_INT(CALL(cuMemCreate, &handle, 64 * GIB, &host, 0), 0);
		same();
		CHECK_INT(CALL(cuMemRelease, handle), 0);
	}
	same();
	CHECK_INT(CALL(cuMemCreate, &handle, 2 * GIB, &first, 0), 0);
	same();
	fail("cuMemRelease", ANY_ERROR);
	CHECK_INT(CALL(cuMemRelease, handle), ANY_ERROR);
	same();
	CHECK_INT(CALL(cuMemRelease, handle), 0);
	CHECK_INT(CALL(cuMemRelease, handle), CUDA_ERROR_INVALID_VALUE);
	CHECK_INT(CALL(cuMemRelease, a), 0);
	CHECK_INT(CALL(cuMemRelease, b), 0);
	same();
	CHECK_U64(live(), 0);
}

/* Create, map and release in a loop does not go round the limit. */
static void part_slip(void)
{
	CUmemGenericAllocationHandle handle;
	CUmemAllocationProp prop = on(CU_MEM_LOCATION_TYPE_DEVICE, 0);
	uint64_t address = 0x10000000000;
	int n = 0;
	start();
	while (CALL(cuMemCreate, &handle, 100 * MIB, &prop, 0) == CUDA_SUCCESS) {
		CHECK_INT(CALL(cuMemMap, address + (uint64_t)n++ * 100 * MIB, 100 * MIB, 0, handle, 0), 0);
		CHECK_INT(CALL(cuMemRelease, handle), 0);
		same();
	}
	CHECK_INT(n, (int)(LIMIT / (100 * MIB)));
	/* All in one, and again to the last byte. */
	fail("cuMemUnmap", ANY_ERROR);
	CHECK_INT(CALL(cuMemUnmap, address, (uint64_t)n * 100 * MIB), ANY_ERROR);
	same();
	CHECK_INT(CALL(cuMemUnmap, address, (uint64_t)n * 100 * MIB), 0);
	CHECK_U64(live(), 0);
	same();
	handle = create(0, LIMIT);
	CHECK_INT(CALL(cuMemRelease, handle), 0);
	same();
}

static void part_retain(void)
{
	CUmemGenericAllocationHandle handle, again = 7;
	uint64_t a = 0x10000000000, b = 0x20000000000;
	start();
	handle = create(0, 64 * MIB);
	CHECK_INT(CALL(cuMemMap, a, 64 * MIB, 0, handle, 0), 0);
	CHECK_INT(CALL(cuMemMap, b, 64 * MIB, 0, handle, 0), 0);
	CHECK_INT(CALL(cuMemRetainAllocationHandle, &again, (void *)(a - 1)), CUDA_ERROR_INVALID_VALUE);
	CHECK_INT(CALL(cuMemRetainAllocationHandle, NULL, (void *)a), CUDA_ERROR_INVALID_VALUE);
	CHECK_U64(again, 7);
	CHECK_INT(CALL(cuMemRetainAllocationHandle, &again, (void *)(b + 64 * MIB - 1)), 0);
	CHECK_U64(again, handle);
	CHECK_INT(CALL(cuMemRelease, handle), 0);
	CHECK_INT(CALL(cuMemUnmap, a, 64 * MIB), 0);
	CHECK_INT(CALL(cuMemUnmap, b, 64 * MIB), 0);
	same();
	CHECK_U64(live(), 64 * MIB);
	/* Mapped by what was retained. */
	CHECK_INT(CALL(cuMemMap, a, 64 * MIB, 0, again, 0), 0);
	CHECK_INT(CALL(cuMemRelease, again), 0);
	CHECK_U64(live(), 64 * MIB);
	same();
	fail("cuMemMap", ANY_ERROR);
	CHECK_INT(CALL(cuMemMap, b, 64 * MIB, 0, again, 0), ANY_ERROR);
	CHECK_INT(CALL(cuMemMap, b, 64 * MIB, 0, 12345, 0), CUDA_ERROR_INVALID_VALUE);
	CHECK_INT(CALL(cuMemUnmap, a, 64 * MIB), 0);
	CHECK_INT(CALL(cuMemUnmap, a, 64 * MIB), CUDA_ERROR_INVALID_VALUE);
	same();
	CHECK_U64(live(), 0);
}

/* A peer's memory is the peer's; one's own stays one's own. */
static void part_import(void)
{
	CUmemGenericAllocationHandle handle, own;
	start();
	CHECK_INT(CALL(cuMemImportFromShareableHandle, NULL, (void *)4, 1), CUDA_ERROR_INVALID_VALUE);
	CHECK_INT(CALL(cuMemImportFromShareableHandle, &handle, (void *)4, 1), 0);
	CHECK_INT(CALL(cuMemMap, 0x10000000000, 8 * GIB, 0, handle, 0), 0);
	CHECK_INT(CALL(cuMemRelease, handle), 0);
	CHECK_U64(charged(0), 0);
	CHECK_INT(CALL(cuMemUnmap, 0x10000000000, 8 * GIB), 0);
	handle = create(0, 64 * MIB);
	CHECK_INT(CALL(cuMemImportFromShareableHandle, &own, (void *)(uintptr_t)handle, 1), 0);
	CHECK_INT(CALL(cuMemRelease, handle), 0);
	same();
	CHECK_U64(live(), 64 * MIB);
	CHECK_INT(CALL(cuMemRelease, own), 0);
	/* What fails is none. */
	CUdeviceptr p;
	CUexternalMemory external;
	CUipcMemHandle ipc = { { 0 } };
	CHECK_INT(CALL(cuIpcOpenMemHandle, &p, ipc, 1), 0);
	CHECK_INT(CALL(cuIpcOpenMemHandle_v2, &p, ipc, 1), 0);
	CHECK_INT(CALL(cuIpcOpenMemHandle_v2, NULL, ipc, 1), CUDA_ERROR_INVALID_VALUE);
	CHECK_INT(CALL(cuMemPoolImportPointer, &p, NULL, NULL), 0);
	CHECK_INT(CALL(cuMemPoolImportPointer, NULL, NULL, NULL), CUDA_ERROR_INVALID_VALUE);
	CHECK_INT(CALL(cuImportExternalMemory, &external, NULL), 0);
	CHECK_INT(CALL(cuImportExternalMemory, NULL, NULL), CUDA_ERROR_INVALID_VALUE);
	same();
	CHECK_U64(live(), 0);
}

static void bind_each(int way, CUmemGenericAllocationHandle multicast, int device, size_t at, CUmemGenericAllocationHandle memory, CUdeviceptr address)
{
	switch (way) {
	case 0:
		CHECK_INT(CALL(cuMulticastBindMem, multicast, at, memory, 0, BLOCK, 0), 0);
		break;
	case 1:
		CHECK_INT(CALL(cuMulticastBindMem_v2, multicast, device, at, memory, 0, BLOCK, 0), 0);
		break;
	case 2:
		CHECK_INT(CALL(cuMulticastBindAddr, multicast, at, address, BLOCK, 0), 0);
		break;
	default:
		CHECK_INT(CALL(cuMulticastBindAddr_v2, multicast, device, at, address, BLOCK, 0), 0);
		break;
	}
	same();
}

static void part_multicast(void)
{
	CUmemGenericAllocationHandle multicast = 5, memory[2];
	CUdeviceptr address[2] = { 0x10000000000, 0x20000000000 };
	const CUmulticastObjectProp *prop = (const void *)"it";
	start();
	CHECK_INT(CALL(cuMulticastCreate, NULL, prop), CUDA_ERROR_INVALID_VALUE);
	CHECK_INT(CALL(cuMulticastCreate, &multicast, NULL), CUDA_ERROR_INVALID_VALUE);
	for (int way = 0; way < 4; way++) {
		CHECK_INT(CALL(cuMulticastCreate, &multicast, prop), 0);
		same();
		for (int i = 0; i < 2; i++) {
			memory[i] = create(i, BLOCK);
			CHECK_INT(CALL(cuMemMap, address[i], BLOCK, 0, memory[i], 0), 0);
			fail(way == 0 ? "cuMulticastBindMem" : way == 1 ? "cuMulticastBindMem_v2" : way == 2 ? "cuMulticastBindAddr" : "cuMulticastBindAddr_v2", ANY_ERROR);
			CHECK_INT(way < 2 ? way == 0 ? CALL(cuMulticastBindMem, multicast, 0, memory[i], 0, BLOCK, 0) : CALL(cuMulticastBindMem_v2, multicast, i, 0, memory[i], 0, BLOCK, 0) :
				  way == 2 ? CALL(cuMulticastBindAddr, multicast, 0, address[i], BLOCK, 0) : CALL(cuMulticastBindAddr_v2, multicast, i, 0, address[i], BLOCK, 0), ANY_ERROR);
			bind_each(way, multicast, i, 0, memory[i], address[i]);
			CHECK_INT(CALL(cuMemUnmap, address[i], BLOCK), 0);
			CHECK_INT(CALL(cuMemRelease, memory[i]), 0);
			same();
		}
		CHECK_U64(live(), 2 * BLOCK);
		fail("cuMulticastUnbind", ANY_ERROR);
		CHECK_INT(CALL(cuMulticastUnbind, multicast, 1, 0, BLOCK), ANY_ERROR);
		same();
		CHECK_INT(CALL(cuMulticastUnbind, multicast, 1, 0, BLOCK), 0);
		CHECK_U64(charged(0), BLOCK);
		CHECK_U64(charged(1), 0);
		CHECK_INT(CALL(cuMulticastUnbind, multicast, 1, 0, BLOCK), CUDA_ERROR_INVALID_VALUE);
		/* The rest goes with the object. */
		CHECK_INT(CALL(cuMemMap, address[0], BLOCK, 0, multicast, 0), 0);
		CHECK_INT(CALL(cuMemRelease, multicast), 0);
		same();
		CHECK_U64(live(), BLOCK);
		CHECK_INT(CALL(cuMemUnmap, address[0], BLOCK), 0);
		same();
		CHECK_U64(live(), 0);
	}
}

/* As multicast objects; they are never made by a hooked call. */
static void part_endpoints(void)
{
	CUmemGenericAllocationHandle memory;
	start();
	CHECK_INT(CALL(cuLogicalEndpointUnbind, 1, 0, 0, BLOCK), CUDA_ERROR_INVALID_VALUE);
	for (uint32_t id = 0; id < 3; id++) {
		for (uint64_t i = 0; i < 4; i++) {
			memory = create((int)(i % 2), BLOCK);
			if (i < 2) {
				CHECK_INT(CALL(cuLogicalEndpointBindMem, id, (int)i, 0, memory, 0, BLOCK, 0), 0);
				CHECK_INT(CALL(cuLogicalEndpointBindMem, 9, (int)i, 0, memory, 0, BLOCK, 0), CUDA_ERROR_INVALID_VALUE);
			} else {
				CHECK_INT(CALL(cuMemMap, 0x10000000000, BLOCK, 0, memory, 0), 0);
				CHECK_INT(CALL(cuLogicalEndpointBindAddr, id, (int)(i - 2), BLOCK, (void *)0x10000000000, BLOCK, 0), 0);
				CHECK_INT(CALL(cuMemUnmap, 0x10000000000, BLOCK), 0);
			}
			CHECK_INT(CALL(cuMemRelease, memory), 0);
			same();
		}
		CHECK_U64(live(), 4 * BLOCK);
		fail("cuLogicalEndpointUnbind", ANY_ERROR);
		CHECK_INT(CALL(cuLogicalEndpointUnbind, id, 1, 0, 2 * BLOCK), ANY_ERROR);
		same();
		CHECK_INT(CALL(cuLogicalEndpointUnbind, id, 1, 0, 2 * BLOCK), 0);
		CHECK_U64(charged(1), 0);
		CHECK_U64(charged(0), 2 * BLOCK);
		fail("cuLogicalEndpointDestroy", ANY_ERROR);
		CHECK_INT(CALL(cuLogicalEndpointDestroy, id), ANY_ERROR);
		same();
		CHECK_INT(CALL(cuLogicalEndpointDestroy, id), 0);
		CHECK_U64(live(), 0);
		same();
	}
}

/* A part of a GPU is the GPU's. */
static void part_domain(void)
{
	CUmemGenericAllocationHandle handle;
	CUmemAllocationProp prop = on(CU_MEM_LOCATION_TYPE_DEVICE_LOCALITY_DOMAIN, 3 << 8 | 1);
	start();
	CHECK_INT(CALL(cuMemCreate, &handle, LIMIT + BLOCK, &prop, 0), CUDA_ERROR_OUT_OF_MEMORY);
	CHECK_INT(CALL(cuMemCreate, &handle, GIB, &prop, 0), 0);
	CHECK_U64(charged(1), GIB);
	CHECK_INT(CALL(cuMemRelease, handle), 0);
}

static const struct part parts[] = {
	{ "create", part_create }, { "slip", part_slip },	     { "retain", part_retain },
	{ "import", part_import }, { "multicast", part_multicast },
	{ "endpoints", part_endpoints }, { "domain", part_domain }, { NULL, NULL },
};

static void test_create(void)
{
	struct scene s = { .part = "create", .max_bytes = LIMIT };
	play(&s);
	CHECK_U64(s.charged, 0);
	CHECK_U64(s.events_max, 2);
	CHECK_U64(s.events_device, 0);
}
static void test_slip(void) { play_part("slip"); }
static void test_retain(void) { play_part("retain"); }
static void test_import(void)
{
	struct scene s = { .part = "import", .max_bytes = LIMIT };
	play(&s);
	CHECK_U64(s.charged, 0);
	CHECK_U64(s.imports, 6);
}
static void test_multicast(void) { play_part("multicast"); }
static void test_endpoints(void) { play_part("endpoints"); }
static void test_domain(void) { play_part("domain"); }

static const struct unit_test tests[] = {
	{ "cuMemCreate: the call's own device, refusals, errors", test_create },
	{ "create, map and release in a loop stays below the limit", test_slip },
	{ "retained handles and several mappings", test_retain },
	{ "imported memory is its owner's", test_import },
	{ "multicast objects, four ways to bind", test_multicast },
	{ "logical endpoints hold memory as multicast objects do", test_endpoints },
	{ "memory in a part of a GPU is the GPU's", test_domain },
	{ NULL, NULL },
};

int main(int argc, char **argv) { return interpose_main(tests, parts, argc, argv); }
