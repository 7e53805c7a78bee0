/* SPDX-License-Identifier: Apache-2.0 */
/* Launches above memory.high, through the hooks of every variant, on the recording driver. */
#include <time.h>

#include "../src/table.h"
#include "interpose.h"

#define HIGH GIB
#define ANY_ERROR 717 /* one that only our test driver gives */
#define LAUNCHES 12   /* variants */

static void *cuda;
static unsigned long (*calls)(const char *);
static void (*fail)(const char *, CUresult);
static void (*capture)(int);
static void *(*address)(const char *);
static CUcontext context;
static CUgraphExec graph;

#define CALL(symbol, ...) (FN(cuda, symbol)(__VA_ARGS__))

static void start(void)
{
	CUgraph empty;
	cuda = open_driver(RTLD_LOCAL);
	calls = need(cuda, "fake_calls");
	fail = need(cuda, "fake_fail");
	capture = need(cuda, "fake_capture");
	address = need(cuda, "fake_address");
	CHECK_INT(CALL(cuInit, 0), 0);
	CHECK_INT(CALL(cuCtxCreate_v2, &context, 0, 0), 0);
	empty = FAKE(cuda, fake_graph, CUgraph, void)();
	CHECK_INT(CALL(cuGraphInstantiateWithFlags, &graph, empty, 0), 0);
}

static uint64_t now_ns(void)
{
	struct timespec t;
	clock_gettime(CLOCK_MONOTONIC, &t);
	return (uint64_t)t.tv_sec * UINT64_C(1000000000) + (uint64_t)t.tv_nsec;
}

/* Each variant once: it reaches its own function, with its result. at_least: what it must take. */
static void all(CUstream stream, CUresult want, uint64_t at_least)
{
	CUlaunchConfig config = { .gridDim = { 1, 1, 1 }, .blockDim = { 1, 1, 1 }, .hStream = stream };
	CUDA_LAUNCH_PARAMS list[2] = { { .hStream = stream }, { .hStream = stream } };
	unsigned int launches = 0;
#define LAUNCH(symbol, ...)                                                                         \
	do {                                                                                        \
		unsigned long n = calls(#symbol);                                                   \
		if (want != 0)                                                                      \
			fail(#symbol, want);                                                        \
		uint64_t begin = now_ns();                                                          \
		CHECK(need(cuda, #symbol) != address(#symbol)); /* the hook */                      \
		CHECK_INT(CALL(symbol, __VA_ARGS__), want);                                         \
		if (now_ns() - begin < at_least)                                                    \
			unit_fail("%s took %d us", #symbol, (int)((now_ns() - begin) / 1000));      \
		CHECK_U64(calls(#symbol), n + 1);                                                   \
		launches++;                                                                         \
	} while (0)
	LAUNCH(cuLaunch, NULL);
	LAUNCH(cuLaunchCooperativeKernel, NULL, 1, 1, 1, 1, 1, 1, 0, stream, NULL);
	LAUNCH(cuLaunchCooperativeKernelMultiDevice, list, 2, 0);
	LAUNCH(cuLaunchCooperativeKernel_ptsz, NULL, 1, 1, 1, 1, 1, 1, 0, stream, NULL);
	LAUNCH(cuLaunchGrid, NULL, 1, 1);
	LAUNCH(cuLaunchGridAsync, NULL, 1, 1, stream);
	LAUNCH(cuLaunchKernel, NULL, 1, 1, 1, 1, 1, 1, 0, stream, NULL, NULL);
	LAUNCH(cuLaunchKernelEx, &config, NULL, NULL, NULL);
	LAUNCH(cuLaunchKernelEx_ptsz, &config, NULL, NULL, NULL);
	LAUNCH(cuLaunchKernel_ptsz, NULL, 1, 1, 1, 1, 1, 1, 0, stream, NULL, NULL);
	LAUNCH(cuGraphLaunch, graph, stream);
	LAUNCH(cuGraphLaunch_ptsz, graph, stream);
	CHECK_U64(launches, LAUNCHES);
}

/* 10 % above: as if 10 ms, so as long as launches ever wait. */
static void go_above(void)
{
	CUdeviceptr p;
	CHECK_INT(CALL(cuMemAlloc_v2, &p, HIGH + HIGH / 10 - FAKE_CONTEXT_BYTES), 0);
}

static void leave(void) { CHECK_INT(CALL(cuCtxDestroy_v2, context), 0); }

static void part_below(void)
{
	start();
	all(NULL, 0, 0);
	/* Arguments that the driver refuses, and NULL where it looks. */
	CHECK_INT(CALL(cuLaunchKernel, NULL, 0, 1, 1, 1, 1, 1, 0, NULL, NULL, NULL), CUDA_ERROR_INVALID_VALUE);
	CHECK_INT(CALL(cuLaunchKernelEx, NULL, NULL, NULL, NULL), CUDA_ERROR_INVALID_VALUE);
	leave();
}

static void part_above(void)
{
	start();
	go_above();
	all(NULL, 0, 1000000);
	leave();
}

/* What the driver refuses is not slowed, whatever was passed. */
static void part_failing(void)
{
	start();
	go_above();
	all(NULL, ANY_ERROR, 0);
	CHECK_INT(CALL(cuLaunchKernel, NULL, 0, 1, 1, 1, 1, 1, 0, NULL, NULL, NULL), CUDA_ERROR_INVALID_VALUE);
	CHECK_INT(CALL(cuLaunchKernelEx, NULL, NULL, NULL, NULL), CUDA_ERROR_INVALID_VALUE);
	CHECK_INT(CALL(cuLaunchKernelEx_ptsz, NULL, NULL, NULL, NULL), CUDA_ERROR_INVALID_VALUE);
	CHECK_INT(CALL(cuLaunchCooperativeKernelMultiDevice, NULL, 3, 0), CUDA_ERROR_INVALID_VALUE);
	leave();
}

/* Nothing runs while it captures. */
static void part_capturing(void)
{
	start();
	go_above();
	capture(1);
	all(NULL, 0, 0);
	capture(0);
	leave();
}

/* The first GPU is above; this stream is on the second. */
static void part_elsewhere(void)
{
	CUcontext other;
	start();
	go_above();
	CHECK_INT(CALL(cuCtxCreate_v2, &other, 0, 1), 0);
	all(NULL, 0, 0);
	/* And this one, whose context is not the current one, on the first. */
	CHECK_INT(CALL(cuLaunchKernel, NULL, 1, 1, 1, 1, 1, 1, 0, (CUstream)(void *)context, NULL, NULL), 0);
	CHECK_INT(CALL(cuCtxDestroy_v2, other), 0);
	leave();
}

/* It does not allocate, but somebody else of its container has. */
static void part_neighbour(void)
{
	int go[2], ready[2], status;
	char c = 0;
	CHECK(pipe(go) == 0 && pipe(ready) == 0);
	pid_t pid = fork();
	CHECK(pid >= 0);
	if (pid == 0) {
		CHECK(read(go[0], &c, 1) == 1);
		start();
		go_above();
		CHECK(write(ready[1], &c, 1) == 1 && read(go[0], &c, 1) == 1);
		leave();
		CHECK(write(ready[1], &c, 1) == 1);
		_exit(0);
	}
	start();
	all(NULL, 0, 0);
	CHECK(write(go[1], &c, 1) == 1 && read(ready[0], &c, 1) == 1);
	all(NULL, 0, 1000000);
	CHECK(write(go[1], &c, 1) == 1 && read(ready[0], &c, 1) == 1);
	all(NULL, 0, 0);
	CHECK(waitpid(pid, &status, 0) == pid && status == 0);
	leave();
}

/* As a runtime finds them. */
static void part_by_address(void)
{
	fn_cuLaunchKernel *launch;
	int status;
	start();
	go_above();
	CHECK_INT(CALL(cuGetProcAddress_v2, "cuLaunchKernel", (void **)&launch, 12000, 0, &status), 0);
	CHECK((void *)(uintptr_t)launch == look(cuda, "cuLaunchKernel"));
	CHECK_INT(launch(NULL, 1, 1, 1, 1, 1, 1, 0, NULL, NULL, NULL), 0);
	CHECK_INT(CALL(cuGetProcAddress_v2, "cuLaunchKernel", (void **)&launch, 12000, 2, &status), 0);
	CHECK((void *)(uintptr_t)launch == look(cuda, "cuLaunchKernel_ptsz"));
	CHECK_INT(launch(NULL, 1, 1, 1, 1, 1, 1, 0, NULL, NULL, NULL), 0);
	leave();
}

/* Short waits are put together: 1 % above is 100 us a launch, 0.1 % 1 us. */
static void part_little(void)
{
	CUdeviceptr p;
	start();
	CHECK_INT(CALL(cuMemAlloc_v2, &p, HIGH - FAKE_CONTEXT_BYTES + 4 * MIB), 0);
	for (int i = 0; i < 1000; i++) /* 15 us each */
		CHECK_INT(CALL(cuLaunchKernel, NULL, 1, 1, 1, 1, 1, 1, 0, NULL, NULL, NULL), 0);
	leave();
}

/* With the allocation that went above, one event more. */
static void scene(const char *part, bool stub, uint64_t high, uint64_t least, uint64_t most)
{
	struct scene s = { .part = part, .max_bytes = LIMIT, .high_bytes = high, .stub = stub };
	play(&s);
	CHECK_U64(s.charged, 0);
	CHECK_U64(s.events_max, 0);
	if (s.events_high < least || s.events_high > most)
		unit_fail("%s: %d times slowed", part, (int)s.events_high);
	if (s.throttled_ms < s.events_high * 9 / 10 && most != 1000)
		unit_fail("%s: slowed for %d ms", part, (int)s.throttled_ms);
}

static void test_below(void)
{
	scene("below", false, HIGH, 0, 0);
	scene("below", false, 0, 0, 0);
}
static void test_above(void) { scene("above", false, HIGH, 1 + LAUNCHES, 1 + LAUNCHES); }
static void test_stub(void) { scene("above", true, HIGH, 1 + LAUNCHES, 1 + LAUNCHES); }
static void test_failing(void) { scene("failing", false, HIGH, 1, 1); }
static void test_capturing(void) { scene("capturing", false, HIGH, 1, 1); }
static void test_elsewhere(void) { scene("elsewhere", false, HIGH, 2, 2); }
static void test_neighbour(void) { scene("neighbour", false, HIGH, 1 + LAUNCHES, 1 + LAUNCHES); }
static void test_by_address(void) { scene("by address", false, HIGH, 3, 3); }
static void test_little(void) { scene("little", false, HIGH, 100, 1000); }

int main(int argc, char **argv)
{
	static const struct unit_test tests[] = {
		{ "launch: below memory.high, or without", test_below },
		{ "launch: above it each variant waits", test_above },
		{ "launch: above it, through the stub", test_stub },
		{ "launch: a failing one does not wait", test_failing },
		{ "launch: one that is captured does not wait", test_capturing },
		{ "launch: on another GPU", test_elsewhere },
		{ "launch: a neighbour is above", test_neighbour },
		{ "launch: found by cuGetProcAddress", test_by_address },
		{ "launch: short waits add up", test_little },
		{ NULL, NULL },
	};
	static const struct part parts[] = {
		{ "below", part_below },
		{ "above", part_above },
		{ "failing", part_failing },
		{ "capturing", part_capturing },
		{ "elsewhere", part_elsewhere },
		{ "neighbour", part_neighbour },
		{ "by address", part_by_address },
		{ "little", part_little },
		{ NULL, NULL },
	};
	return interpose_main(tests, parts, argc, argv);
}
