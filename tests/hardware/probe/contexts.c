/* SPDX-License-Identifier: Apache-2.0 */
#include "probe.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { MULTIPROCESSORS = 16, THREADS_EACH = 39, MAJOR = 75, MINOR = 76 };

static CUcontext create(void)
{
	CUcontext c = NULL;
	CALL(cuCtxCreate_v2, (CUcontext *, unsigned int, CUdevice), &c, 0, device);
	return c;
}

static void destroy(CUcontext c) { CALL(cuCtxDestroy_v2, (CUcontext), c); }

static void context_size(void)
{
	uint64_t row;
	nvml_start();
	uint64_t before = used_still();
	cuda_init();
	uint64_t initialised = used_still();
	CUcontext c = create();
	uint64_t with = used_still();
	say("initialised_bytes", initialised - before);
	say("context_bytes", with - before);
	say("listed", nvml_process(getpid(), &row));
	say("row_bytes", row);
	say("multiprocessors", (uint64_t)attribute(MULTIPROCESSORS));
	say("threads_each", (uint64_t)attribute(THREADS_EACH));
	say("capability", (uint64_t)(attribute(MAJOR) * 10 + attribute(MINOR)));
	destroy(c);
	uint64_t after = used_still();
	/* What a process keeps after its last context is not in any model. */
	say("kept_bytes", after > before ? after - before : 0);
	say("still_listed", nvml_process(getpid(), &row));
}

static void further_contexts(void)
{
	char name[32];
	nvml_start();
	cuda_init();
	for (int i = 1; i <= 5; i++) {
		uint64_t before = used_still();
		create();
		snprintf(name, sizeof(name), "context_%d_bytes", i);
		say(name, used_still() - before);
	}
}

static void green_size(void)
{
	CUdevResource all, part;
	CUdevResourceDesc desc = NULL;
	CUgreenCtx green = NULL;
	CUcontext primary = NULL;
	unsigned int groups = 1;
	nvml_start();
	cuda("cuGreenCtxCreate");
	cuda_init();
	CALL(cuDevicePrimaryCtxRetain, (CUcontext *, CUdevice), &primary, device);
	CALL(cuCtxSetCurrent, (CUcontext), primary);
	uint64_t before = used_still();
	memset(&all, 0, sizeof(all));
	memset(&part, 0, sizeof(part));
	CALL(cuDeviceGetDevResource, (CUdevice, CUdevResource *, CUdevResourceType), device, &all, CU_DEV_RESOURCE_TYPE_SM);
	say("multiprocessors", all.sm.smCount);
	CUresult (*split)(CUdevResource *, unsigned int *, const CUdevResource *, CUdevResource *, unsigned int, unsigned int) =
		(CUresult(*)(CUdevResource *, unsigned int *, const CUdevResource *, CUdevResource *, unsigned int, unsigned int))(uintptr_t)cuda_or_null(
			"cuDevSmResourceSplitByCount");
	/* Half of the processors, where they can be split. */
	if (!split || split(&part, &groups, &all, NULL, 0, all.sm.smCount / 2) != CUDA_SUCCESS || groups == 0)
		part = all;
	say("green_multiprocessors", part.sm.smCount);
	CALL(cuDevResourceGenerateDesc, (CUdevResourceDesc *, CUdevResource *, unsigned int), &desc, &part, 1);
	CALL(cuGreenCtxCreate, (CUgreenCtx *, CUdevResourceDesc, CUdevice, unsigned int), &green, desc, device, 1);
	say("green_bytes", used_still() - before);
	CALL(cuGreenCtxDestroy, (CUgreenCtx), green);
	uint64_t after = used_still();
	say("kept_bytes", after > before ? after - before : 0);
}

static void context_limits(void)
{
	static const struct {
		const char *name;
		CUlimit limit;
		size_t to;
	} limits[] = {
		{ "stack", CU_LIMIT_STACK_SIZE, 4 * KIB },
		{ "queue", CU_LIMIT_PRINTF_FIFO_SIZE, 64 * MIB },
		{ "heap", CU_LIMIT_MALLOC_HEAP_SIZE, 128 * MIB },
	};
	char name[48];
	cuda_start();
	for (size_t i = 0; i < sizeof(limits) / sizeof(limits[0]); i++) {
		size_t was = 0;
		CALL(cuCtxGetLimit, (size_t *, CUlimit), &was, limits[i].limit);
		snprintf(name, sizeof(name), "%s_default", limits[i].name);
		say(name, was);
		size_t before = free_now();
		CUresult r = ASK(cuCtxSetLimit, (CUlimit, size_t), limits[i].limit, limits[i].to);
		snprintf(name, sizeof(name), "%s_result", limits[i].name);
		say_word(name, word_of(r));
		size_t set = free_now();
		snprintf(name, sizeof(name), "%s_at_once_bytes", limits[i].name);
		say(name, before > set ? before - set : 0);
		if (!launch_empty()) {
			say_word("launch", "the driver takes no text of PTX");
			continue;
		}
		size_t launched = free_now();
		snprintf(name, sizeof(name), "%s_after_launch_bytes", limits[i].name);
		say(name, before > launched ? before - launched : 0);
	}
}

static void module_growth(void)
{
	uint64_t row = 0, later = 0;
	nvml_start();
	cuda_start();
	uint64_t before = used_still();
	if (!launch_empty())
		impossible("the driver takes no text of PTX");
	uint64_t with = used_still();
	say("first_launch_bytes", with > before ? with - before : 0);
	nvml_process(getpid(), &row);
	launch_empty();
	nvml_process(getpid(), &later);
	say("second_module_bytes", later > row ? later - row : 0);
}

static void primary_reset(void)
{
	CUcontext c = NULL;
	unsigned int flags = 0;
	int active = -1;
	cuda_init();
	CALL(cuDevicePrimaryCtxRetain, (CUcontext *, CUdevice), &c, device);
	CALL(cuDevicePrimaryCtxRetain, (CUcontext *, CUdevice), &c, device);
	say_word("reset", word_of(ASK(cuDevicePrimaryCtxReset_v2, (CUdevice), device)));
	CALL(cuDevicePrimaryCtxGetState, (CUdevice, unsigned int *, int *), device, &flags, &active);
	say("active_after_reset", (uint64_t)active);
	say_word("first_release", word_of(ASK(cuDevicePrimaryCtxRelease_v2, (CUdevice), device)));
	say_word("second_release", word_of(ASK(cuDevicePrimaryCtxRelease_v2, (CUdevice), device)));
	say_word("third_release", word_of(ASK(cuDevicePrimaryCtxRelease_v2, (CUdevice), device)));
}

static void free_null(void)
{
	cuda_init();
	say_word("without_context", word_of(ASK(cuMemFree_v2, (CUdeviceptr), 0)));
	create();
	say_word("with_context", word_of(ASK(cuMemFree_v2, (CUdeviceptr), 0)));
}

static void old_variants(void)
{
	unsigned int free_bytes = 0, total = 0, device_bytes = 0;
	cuda_start();
	/* cuda.h of before 3.2: 32-bit sizes. */
	CUresult (*info)(unsigned int *, unsigned int *) = (CUresult(*)(unsigned int *, unsigned int *))(uintptr_t)cuda_or_null("cuMemGetInfo");
	CUresult (*whole)(unsigned int *, CUdevice) = (CUresult(*)(unsigned int *, CUdevice))(uintptr_t)cuda_or_null("cuDeviceTotalMem");
	say("has_info", info != NULL);
	say("has_total", whole != NULL);
	if (info) {
		say_word("info", word_of(info(&free_bytes, &total)));
		say("free_bytes", free_bytes);
		say("total_bytes", total);
	}
	if (whole) {
		say_word("device_total", word_of(whole(&device_bytes, device)));
		say("device_total_bytes", device_bytes);
	}
}

static void visible_twice(void)
{
	int count = -1;
	if (setenv("CUDA_VISIBLE_DEVICES", "0,0", 1) != 0)
		failed("set CUDA_VISIBLE_DEVICES");
	CUresult r = ASK(cuInit, (unsigned int), 0);
	say_word("init", word_of(r));
	if (r == CUDA_SUCCESS) {
		CALL(cuDeviceGetCount, (int *), &count);
		say("count", (uint64_t)count);
	}
}

static void out_of_memory(void)
{
	CUdeviceptr p = 0;
	cuda_start();
	size_t total = total_now();
	/* More than there is: nobody's memory is at risk. */
	say_word("too_large", word_of(ASK(cuMemAlloc_v2, (CUdeviceptr *, size_t), &p, 2 * total)));
	say("pointer_touched", p != 0);
	say_word("next", word_of(ASK(cuMemAlloc_v2, (CUdeviceptr *, size_t), &p, 2 * MIB)));
	say_word("synchronize", word_of(ASK(cuCtxSynchronize, (void))));
	say_word("nothing", word_of(ASK(cuMemAlloc_v2, (CUdeviceptr *, size_t), &p, 0)));
}

const struct probe context_probes[] = {
	{ "context-size", context_size }, { "further-contexts", further_contexts },
	{ "green-size", green_size },     { "context-limits", context_limits },
	{ "module-growth", module_growth }, { "primary-reset", primary_reset },
	{ "free-null", free_null },       { "old-variants", old_variants },
	{ "visible-twice", visible_twice }, { "out-of-memory", out_of_memory },
	{ NULL, NULL },
};
