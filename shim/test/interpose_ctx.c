/* SPDX-License-Identifier: Apache-2.0 */
/* What contexts grow by, share and stand on, and modules, on the recording driver. */
#include "../src/table.h"
#include "interpose.h"

#define ANY_ERROR 717 /* one that only our test driver gives */
#define THREADS ((uint64_t)FAKE_PROCESSORS * FAKE_PROCESSOR_THREADS)

static void *cuda;
static uint64_t (*live)(void);
static void (*fail)(const char *, CUresult);
static unsigned long (*calls)(const char *);
static CUcontext context;

#define CALL(symbol, ...) (FN(cuda, symbol)(__VA_ARGS__))

static void start(void)
{
	cuda = open_driver(RTLD_LOCAL);
	live = need(cuda, "fake_live_bytes");
	fail = need(cuda, "fake_fail");
	calls = need(cuda, "fake_calls");
	CHECK_INT(CALL(cuInit, 0), 0);
}

static void start_in_context(void)
{
	start();
	CHECK_INT(CALL(cuCtxCreate_v2, &context, 0, 0), 0);
}

static void same(void) { CHECK_U64(charged(0) + charged(1), live()); }

static void part_attach(void)
{
	CUcontext again = NULL;
	CUdeviceptr p;
	start();
	CHECK_INT(CALL(cuCtxAttach, &again, 0), 201);
	CHECK_INT(CALL(cuCtxDetach, NULL), 201);
	CHECK_INT(CALL(cuCtxCreate, &context, 0, 0), 0);
	CHECK_INT(CALL(cuCtxAttach, NULL, 0), 1);
	CHECK_INT(CALL(cuCtxAttach, &again, 1), 1);
	CHECK(again == NULL);
	CHECK_INT(CALL(cuCtxAttach, &again, 0), 0);
	CHECK(again == context);
	CHECK_INT(CALL(cuMemAlloc_v2, &p, 64 * MIB), 0);
	fail("cuCtxDetach", ANY_ERROR);
	CHECK_INT(CALL(cuCtxDetach, context), ANY_ERROR);
	CHECK_INT(CALL(cuCtxDetach, context), 0);
	same();
	CHECK_U64(live(), FAKE_CONTEXT_BYTES + 64 * MIB);
	fail("cuCtxDetach", ANY_ERROR);
	CHECK_INT(CALL(cuCtxDetach, context), ANY_ERROR);
	same();
	CHECK_INT(CALL(cuCtxDetach, context), 0);
	CHECK_U64(live(), 0);
	same();
}

/* Contexts by the old graphics interfaces. */
static void part_graphics(void)
{
	start();
	for (int way = 0; way < 4; way++) {
		for (int twice = 0; twice < 2; twice++) {
			CUresult result = way == 0 ? CALL(cuGLCtxCreate, &context, 0, 0) :
					  way == 1 ? CALL(cuGLCtxCreate_v2, &context, 0, 0) :
					  way == 2 ? CALL(cuVDPAUCtxCreate, &context, 0, 0, 5, NULL) :
						     CALL(cuVDPAUCtxCreate_v2, &context, 0, 0, 5, NULL);
			CHECK_INT(result, 0);
			CHECK_U64(live(), FAKE_CONTEXT_BYTES);
			same();
			CHECK_INT(CALL(cuCtxDestroy_v2, context), 0);
			same();
		}
	}
}

static void part_limits(void)
{
	start();
	CHECK_INT(CALL(cuCtxSetLimit, CU_LIMIT_STACK_SIZE, 4096), 201);
	CHECK_INT(CALL(cuCtxCreate_v2, &context, 0, 0), 0);
	for (int i = 0; i < 3; i++) {
		CHECK_INT(CALL(cuCtxSetLimit, CU_LIMIT_STACK_SIZE, FAKE_STACK + 1000), 0);
		same();
		CHECK_INT(CALL(cuCtxSetLimit, CU_LIMIT_MALLOC_HEAP_SIZE, 100 * MIB), 0);
		same();
		CHECK_INT(CALL(cuCtxSetLimit, CU_LIMIT_PRINTF_FIFO_SIZE, 3 * MIB), 0);
		same();
		fail("cuCtxSetLimit", ANY_ERROR);
		CHECK_INT(CALL(cuCtxSetLimit, CU_LIMIT_STACK_SIZE, 8192), ANY_ERROR);
		CHECK_INT(CALL(cuCtxSetLimit, 5, 64), 1);
		CHECK_INT(CALL(cuCtxSetLimit, -1, 64), 1);
		same();
		/* Would cross it: not tried, and nothing changes. */
		unsigned long before = calls("cuCtxSetLimit");
		CHECK_INT(CALL(cuCtxSetLimit, CU_LIMIT_STACK_SIZE, LIMIT / THREADS), CUDA_ERROR_OUT_OF_MEMORY);
		CHECK_INT(CALL(cuCtxSetLimit, CU_LIMIT_STACK_SIZE, (size_t)-1), CUDA_ERROR_OUT_OF_MEMORY);
		CHECK_INT(CALL(cuCtxSetLimit, CU_LIMIT_MALLOC_HEAP_SIZE, (size_t)1 << 62), CUDA_ERROR_OUT_OF_MEMORY);
		CHECK_U64(calls("cuCtxSetLimit"), before);
		same();
		/* Lower than it was made with: the context's own price stays. */
		CHECK_INT(CALL(cuCtxSetLimit, CU_LIMIT_STACK_SIZE, 512), 0);
		CHECK_INT(CALL(cuCtxSetLimit, CU_LIMIT_MALLOC_HEAP_SIZE, 0), 0);
		CHECK(charged(0) >= live());
		CHECK_INT(CALL(cuCtxSetLimit, CU_LIMIT_MALLOC_HEAP_SIZE, 8 * MIB), 0);
		CHECK_INT(CALL(cuCtxSetLimit, CU_LIMIT_PRINTF_FIFO_SIZE, MIB), 0);
		CHECK_INT(CALL(cuCtxSetLimit, CU_LIMIT_STACK_SIZE, FAKE_STACK), 0);
		same();
		CHECK_U64(live(), FAKE_CONTEXT_BYTES);
	}
	CHECK_INT(CALL(cuCtxSetLimit, CU_LIMIT_STACK_SIZE, 4 * FAKE_STACK), 0);
	CHECK_INT(CALL(cuCtxDestroy_v2, context), 0);
	CHECK_U64(live(), 0);
	same();
}

static void part_green(void)
{
	CUresult (*from)(CUcontext *, CUgreenCtx);
	CUresult (*set_current)(CUcontext);
	CUgreenCtx green = (CUgreenCtx)7, second;
	CUcontext primary, its;
	CUdeviceptr p;
	start();
	from = need(cuda, "cuCtxFromGreenCtx");
	set_current = need(cuda, "cuCtxSetCurrent");
	CHECK_INT(CALL(cuGreenCtxCreate, NULL, NULL, 0, 1), 1);
	CHECK_INT(CALL(cuGreenCtxCreate, &green, NULL, 0, 0), 1);
	CHECK_INT(CALL(cuGreenCtxCreate, &green, NULL, 7, 1), 101);
	fail("cuGreenCtxCreate", ANY_ERROR);
	CHECK_INT(CALL(cuGreenCtxCreate, &green, NULL, 0, 1), ANY_ERROR);
	CHECK(green == (CUgreenCtx)7);
	CHECK_INT(CALL(cuGreenCtxDestroy, NULL), 400);
	same();
	/* The first brings the primary context along. */
	CHECK_INT(CALL(cuGreenCtxCreate, &green, NULL, 0, 1), 0);
	CHECK_U64(live(), 2 * FAKE_CONTEXT_BYTES);
	same();
	CHECK_INT(CALL(cuGreenCtxCreate, &second, NULL, 0, 1), 0);
	CHECK_U64(live(), 3 * FAKE_CONTEXT_BYTES);
	same();
	CHECK_INT(CALL(cuDevicePrimaryCtxRetain, &primary, 0), 0);
	same();
	/* What is allocated and set there is the primary context's, and stays. */
	CHECK_INT(from(&its, green), 0);
	CHECK_INT(set_current(its), 0);
	CHECK_INT(CALL(cuMemAlloc_v2, &p, 64 * MIB), 0);
	CHECK_INT(CALL(cuCtxSetLimit, CU_LIMIT_MALLOC_HEAP_SIZE, 64 * MIB), 0);
	same();
	fail("cuGreenCtxDestroy", ANY_ERROR);
	CHECK_INT(CALL(cuGreenCtxDestroy, green), ANY_ERROR);
	same();
	CHECK_INT(CALL(cuGreenCtxDestroy, green), 0);
	CHECK_U64(live(), 2 * FAKE_CONTEXT_BYTES + (64 + 56) * MIB);
	same();
	CHECK_INT(CALL(cuMemFree_v2, p), 0);
	CHECK_U64(live(), 2 * FAKE_CONTEXT_BYTES + 56 * MIB);
	same();
	CHECK_INT(from(&its, second), 0);
	CHECK_INT(set_current(its), 0);
	CHECK_INT(CALL(cuMemAlloc_v2, &p, 512), 0);
	CHECK_INT(CALL(cuDevicePrimaryCtxRelease_v2, 0), 0);
	CHECK_U64(live(), 2 * FAKE_CONTEXT_BYTES + (56 + 2) * MIB);
	same();
	CHECK_INT(CALL(cuGreenCtxDestroy, second), 0);
	CHECK_U64(live(), 0);
	same();
	/* No room for the two of them. */
	CHECK_INT(CALL(cuCtxCreate_v2, &context, 0, 0), 0);
	CHECK_INT(CALL(cuMemAlloc_v2, &p, LIMIT - 3 * FAKE_CONTEXT_BYTES + 2 * MIB), 0);
	unsigned long before = calls("cuGreenCtxCreate");
	CHECK_INT(CALL(cuGreenCtxCreate, &green, NULL, 0, 1), CUDA_ERROR_OUT_OF_MEMORY);
	CHECK_U64(calls("cuGreenCtxCreate"), before);
	same();
	CHECK_INT(CALL(cuDevicePrimaryCtxRetain, &primary, 0), 0);
	CHECK_INT(CALL(cuGreenCtxCreate, &green, NULL, 0, 1), CUDA_ERROR_OUT_OF_MEMORY);
	same();
	CHECK_INT(CALL(cuMemFree_v2, p), 0);
	CHECK_INT(CALL(cuGreenCtxCreate, &green, NULL, 0, 1), 0);
	same();
	CHECK_INT(CALL(cuDevicePrimaryCtxRelease_v2, 0), 0);
	CHECK_INT(CALL(cuGreenCtxDestroy, green), 0);
	CHECK_INT(CALL(cuCtxDestroy_v2, context), 0);
	CHECK_U64(live(), 0);
	same();
}

static CUresult load(int way, void **handle)
{
	switch (way) {
	case 0:
		return CALL(cuModuleLoad, (CUmodule *)handle, "x");
	case 1:
		return CALL(cuModuleLoadData, (CUmodule *)handle, "x");
	case 2:
		return CALL(cuModuleLoadDataEx, (CUmodule *)handle, "x", 0, NULL, NULL);
	case 3:
		return CALL(cuModuleLoadFatBinary, (CUmodule *)handle, "x");
	case 4:
		return CALL(cuLibraryLoadData, (CUlibrary *)handle, "x", NULL, NULL, 1, NULL, NULL, 2);
	default:
		return CALL(cuLibraryLoadFromFile, (CUlibrary *)handle, "x", NULL, NULL, 1, NULL, NULL, 2);
	}
}

static CUresult unload(int way, void *handle)
{
	return way < 4 ? CALL(cuModuleUnload, handle) : CALL(cuLibraryUnload, handle);
}

static const char *const loaders[] = { "cuModuleLoad",		"cuModuleLoadData",  "cuModuleLoadDataEx",
				       "cuModuleLoadFatBinary", "cuLibraryLoadData", "cuLibraryLoadFromFile" };

static void part_modules(void)
{
	void *handle = (void *)7, *more[1000];
	start();
	/* Of no context: a module cannot be, a library takes nothing. */
	CHECK_INT(load(0, &handle), 201);
	CHECK_INT(load(4, &handle), 0);
	CHECK_INT(unload(4, handle), 0);
	same();
	for (int way = 0; way < 6; way++) {
		CHECK_INT(CALL(cuCtxCreate_v2, &context, 0, 0), 0);
		CHECK_INT(load(way, NULL), 1);
		handle = (void *)7;
		fail(loaders[way], ANY_ERROR);
		CHECK_INT(load(way, &handle), ANY_ERROR);
		CHECK(handle == (void *)7);
		same();
		CHECK_INT(load(way, &handle), 0);
		CHECK_U64(live(), FAKE_CONTEXT_BYTES + FAKE_MODULE_BYTES);
		same();
		CHECK_INT(unload(way, NULL), 400);
		fail(way < 4 ? "cuModuleUnload" : "cuLibraryUnload", ANY_ERROR);
		CHECK_INT(unload(way, handle), ANY_ERROR);
		CHECK_INT(unload(way < 4 ? 4 : 0, handle), 400);
		same();
		CHECK_INT(unload(way, handle), 0);
		CHECK_U64(live(), FAKE_CONTEXT_BYTES);
		same();
		int n = 0;
		while (load(way, &more[n]) == 0) {
			same();
			if (++n == 200)
				break;
		}
		CHECK_INT(n, (int)((LIMIT / 8 - FAKE_CONTEXT_BYTES) / FAKE_MODULE_BYTES));
		unsigned long before = calls(loaders[way]);
		CHECK_INT(load(way, &handle), CUDA_ERROR_OUT_OF_MEMORY);
		CHECK_U64(calls(loaders[way]), before);
		while (way >= 4 && n > 0)
			CHECK_INT(unload(way, more[--n]), 0);
		/* Modules go with the context. */
		CHECK_INT(CALL(cuCtxDestroy_v2, context), 0);
		CHECK_U64(live(), 0);
		same();
	}
}

/* As published by default: none is charged. */
static void part_modules_free(void)
{
	void *handle;
	start_in_context();
	for (int way = 0; way < 6; way++) {
		CHECK_INT(load(way, &handle), 0);
		CHECK_U64(charged(0), FAKE_CONTEXT_BYTES);
		CHECK_INT(unload(way, handle), 0);
	}
	CHECK_INT(CALL(cuCtxDestroy_v2, context), 0);
}

static const struct part parts[] = {
	{ "attach", part_attach },   { "graphics", part_graphics },	    { "limits", part_limits },		    { "green", part_green },
	{ "modules", part_modules }, { "modules_free", part_modules_free }, { NULL, NULL },
};

static void test_attach(void) { play_part("attach"); }
static void test_graphics(void) { play_part("graphics"); }
static void test_limits(void)
{
	struct scene s = { .part = "limits", .max_bytes = LIMIT };
	play(&s);
	CHECK_U64(s.charged, 0);
	CHECK_U64(s.events_max, 9);
	CHECK_U64(s.events_device, 0);
}
static void test_green(void) { play_part("green"); }
static void test_modules(void)
{
	struct scene s = { .part = "modules", .max_bytes = LIMIT / 8, .module_bytes = FAKE_MODULE_BYTES };
	play(&s);
	CHECK_U64(s.charged, 0);
	CHECK_U64(s.events_max, 12);
}
static void test_modules_free(void) { play_part("modules_free"); }

static const struct unit_test tests[] = {
	{ "cuCtxAttach and cuCtxDetach: the last one ends it", test_attach },
	{ "contexts by OpenGL and VDPAU", test_graphics },
	{ "cuCtxSetLimit: stacks, heap and printing are charged", test_limits },
	{ "green contexts, and the primary ones below", test_green },
	{ "modules and libraries at the published size, six ways", test_modules },
	{ "modules cost nothing if nothing is published", test_modules_free },
	{ NULL, NULL },
};

int main(int argc, char **argv) { return interpose_main(tests, parts, argc, argv); }
