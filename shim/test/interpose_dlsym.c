/* SPDX-License-Identifier: Apache-2.0 */
/* What dlsym and dlvsym answer, with the shim in the program. */
#include "interpose.h"

/* ---- parts ---- */

extern CUresult cuInit(unsigned int) __attribute__((weak));

static void part_no_driver(void)
{
	static const char *const names[] = { "cuInit", "cuMemAlloc_v2", "cuGetProcAddress_v2", "nvmlDeviceGetMemoryInfo" };
	void *program = dlopen(NULL, RTLD_NOW);
	for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) {
		for (int twice = 0; twice < 2; twice++) {
			dlerror();
			CHECK(look(RTLD_DEFAULT, names[i]) == NULL);
			CHECK(dlerror() != NULL);
			CHECK(look(RTLD_NEXT, names[i]) == NULL);
			CHECK(dlerror() != NULL);
			CHECK(look(program, names[i]) == NULL);
			CHECK(dlerror() != NULL);
			CHECK(dlvsym(RTLD_DEFAULT, names[i], "V") == NULL);
			CHECK(dlerror() != NULL);
		}
	}
	CHECK(look(RTLD_DEFAULT, "puts") == look(RTLD_NEXT, "puts"));
	CHECK(look(RTLD_DEFAULT, "puts") != NULL);
	/* What a program that links weakly finds is ours; it must not crash. */
	CHECK(&cuInit != NULL);
	CHECK_INT(cuInit(0), CUDA_ERROR_NOT_SUPPORTED);
}

static void part_handle(void)
{
	static const char *const hooked[] = { "cuInit", "cuMemAlloc", "cuMemAlloc_v2", "cuMemFree_v2", "cuCtxCreate_v4",
					      "cuGetProcAddress", "cuGetProcAddress_v2", "cuDevicePrimaryCtxRetain" };
	static const char *const others[] = { "cuMemsetD8_v2_ptds", "cuGetExportTable", "cuMemsetD8_v2", "cuCtxGetDevice" };
	void *cuda = open_driver(RTLD_LOCAL), *math = dlopen("libm.so.6", RTLD_NOW), *version;
	void *(*address)(const char *) = need(cuda, "fake_address");
	int (*finds_own)(const char *) = need(cuda, "fake_finds_own");
	Dl_info info;
	char text[PATH_MAX + 64];

	for (size_t i = 0; i < sizeof hooked / sizeof hooked[0]; i++) {
		void *found = need(cuda, hooked[i]);
		CHECK(is_hook(found));
		CHECK(look(cuda, hooked[i]) == found);
		CHECK(finds_own(hooked[i]));
	}
	for (size_t i = 0; i < sizeof others / sizeof others[0]; i++)
		CHECK(need(cuda, others[i]) == address(others[i]));

	/* The error state: cleared by success, the loader's own words after a failure. */
	look(cuda, "cuNoSuchFunction");
	CHECK(look(cuda, "cuMemAlloc_v2") != NULL);
	CHECK(dlerror() == NULL);
	CHECK(dladdr(address("cuMemsetD8_v2"), &info) != 0);
	CHECK(look(cuda, "cuMemAlloc_v3") == NULL);
	snprintf(text, sizeof text, "%s: undefined symbol: cuMemAlloc_v3", info.dli_fname);
	const char *error = dlerror();
	CHECK(error != NULL && strcmp(error, text) == 0);
	/* A name of ours, where there is none. */
	CHECK(math != NULL && look(math, "cuMemAlloc_v2") == NULL);
	error = dlerror();
	CHECK(error != NULL && strstr(error, "libm.so.6: undefined symbol: cuMemAlloc_v2") != NULL);
	CHECK(dlerror() == NULL);

	/* By version, as without us: the library has none. */
	CHECK(dlvsym(cuda, "cuMemAlloc_v2", "NO_1") == NULL);
	CHECK(dlerror() != NULL);

	/* Loaded for itself alone, it is in nobody else's sight. */
	CHECK(look(RTLD_DEFAULT, "cuMemAlloc_v2") == NULL);
	version = dlopen(NULL, RTLD_NOW);
	CHECK(look(version, "cuMemAlloc_v2") == NULL);
	/* Loaded for all, it is. */
	open_driver(RTLD_GLOBAL);
	CHECK(is_hook(look(RTLD_DEFAULT, "cuMemAlloc_v2")));
	CHECK(is_hook(look(RTLD_NEXT, "cuMemAlloc_v2")));
	CHECK(is_hook(look(version, "cuMemAlloc_v2")));
	CHECK(dlerror() == NULL);
	CHECK(look(RTLD_DEFAULT, "cuMemAlloc_v3") == NULL);
}

static void part_versioned_driver(void)
{
	void *cuda = open_driver(RTLD_LOCAL);
	CHECK(is_hook(need(cuda, "cuMemAlloc_v2")));
	void *by_version = dlvsym(cuda, "cuMemAlloc_v2", "libcuda.so.1");
	CHECK(is_hook(by_version));
	CHECK(dlvsym(cuda, "cuMemAlloc_v2", "libcuda.so.2") == NULL);
	CHECK(!is_hook(dlvsym(cuda, "cuMemsetD8_v2", "libcuda.so.1")));
	CHECK_INT(FN(cuda, cuInit)(0), 0);
}

static void part_versioned_callers(void)
{
	static const char *const files[] = { "libversioned_old.so", "libversioned_new.so" };
	void *cuda = open_driver(RTLD_LOCAL);
	for (size_t i = 0; i < sizeof files / sizeof files[0]; i++) {
		void *library = dlopen(files[i], RTLD_NOW);
		if (library == NULL)
			unit_fail("%s", dlerror());
		void *(*theirs)(void *, const char *) = need(library, "look");
		CHECK(theirs(RTLD_DEFAULT, "puts") != NULL);
		CHECK(is_hook(theirs(cuda, "cuMemAlloc_v2")));
		CHECK(theirs(cuda, "cuMemsetD8_v2") == look(cuda, "cuMemsetD8_v2"));
	}
}

static void part_early(void)
{
	const int *found = look(RTLD_DEFAULT, "early_found");
	CHECK(found != NULL);
	CHECK_INT(*found, 1);
}

static void part_other(void)
{
	void *cuda = open_driver(RTLD_LOCAL);
	const int *calls = need(RTLD_DEFAULT, "other_calls");
	int before = *calls;
	CHECK(is_hook(look(cuda, "cuMemAlloc_v2")));
	CHECK(look(RTLD_DEFAULT, "puts") != NULL);
	CHECK(look(RTLD_NEXT, "puts") != NULL);
	CHECK(*calls >= before + 2);
}

/* A tool's wrapper of a driver function: called once, and what it calls is counted once. */
static void tool(int expected_calls)
{
	void *cuda = open_driver(RTLD_GLOBAL);
	const int *calls = need(RTLD_DEFAULT, "tool_calls");
	fn_cuMemAlloc_v2 *alloc = FN(RTLD_DEFAULT, cuMemAlloc_v2);
	CUcontext context;
	CUdeviceptr p;
	CHECK_INT(FN(cuda, cuInit)(0), 0);
	CHECK_INT(FN(cuda, cuCtxCreate_v2)(&context, 0, 0), 0);
	CHECK_INT(alloc(&p, 64 * MIB), 0);
	CHECK_INT(*calls, expected_calls);
	CHECK_U64(charged(0), FAKE_CONTEXT_BYTES + 64 * MIB);
	CHECK_INT(FN(cuda, cuMemFree_v2)(p), 0);
	CHECK_INT(FN(cuda, cuCtxDestroy_v2)(context), 0);
}
static void part_tool_before(void) { tool(1); }
static void part_tool_after(void) { tool(1); }

static void part_plugin(void)
{
	/* A plugin that is linked with the driver, in a program that is not. */
	void *plugin = dlopen("liblinked.so", RTLD_NOW | RTLD_LOCAL);
	if (plugin == NULL)
		unit_fail("%s", dlerror());
	int (*run)(uint64_t) = need(plugin, "linked_run");
	CHECK_INT(run(LIMIT), 0);
	void *(*theirs)(const char *) = need(plugin, "linked_default");
	dlerror();
	CHECK(is_hook(theirs("cuMemAlloc_v2")));
	CHECK(dlerror() == NULL);
	CHECK(theirs("cuMemAlloc_v3") == NULL);
	CHECK(theirs("nvmlDeviceGetMemoryInfo") == NULL);
	/* Not in the program's sight. */
	CHECK(look(RTLD_DEFAULT, "cuMemAlloc_v2") == NULL);
}

static void part_deepbind(void)
{
	/* A library that prefers what it is linked with is not ours to hold: the node enforcer does. */
	void *plugin = dlopen("liblinked.so", RTLD_NOW | RTLD_LOCAL | RTLD_DEEPBIND);
	if (plugin == NULL)
		unit_fail("%s", dlerror());
	int (*run)(uint64_t) = need(plugin, "linked_run");
	CHECK_INT(run(0), 0);
}

static void part_reload(void)
{
	CUcontext context;
	CUdeviceptr p;
	void *first = open_driver(RTLD_LOCAL), *filler;
	void *(*address)(const char *) = need(first, "fake_address");
	void *was = address("cuInit");
	fn_cuInit *init = FN(first, cuInit);
	CHECK_INT(init(0), 0);
	CHECK_INT(FN(first, cuCtxCreate_v2)(&context, 0, 0), 0);
	CHECK_INT(FN(first, cuCtxDestroy_v2)(context), 0);
	CHECK_INT(dlclose(first), 0);
	/* Something else takes its place in memory. */
	filler = mmap((void *)((uintptr_t)was & ~(uintptr_t)0xfff), 4096, PROT_NONE,
		      MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE, -1, 0);
	CHECK(filler != MAP_FAILED);
	void *second = open_driver(RTLD_LOCAL);
	address = need(second, "fake_address");
	CHECK(address("cuInit") != was);
	CHECK_INT(FN(second, cuInit)(0), 0);
	CHECK_INT(FN(second, cuCtxCreate_v2)(&context, 0, 0), 0);
	CHECK_INT(FN(second, cuMemAlloc_v2)(&p, 64 * MIB), 0);
	CHECK_U64(charged(0), FAKE_CONTEXT_BYTES + 64 * MIB);
	CHECK_INT(FN(second, cuCtxDestroy_v2)(context), 0);
}

static const struct part parts[] = {
	{ "no_driver", part_no_driver },
	{ "handle", part_handle },
	{ "versioned_driver", part_versioned_driver },
	{ "versioned_callers", part_versioned_callers },
	{ "early", part_early },
	{ "other", part_other },
	{ "tool_before", part_tool_before },
	{ "tool_after", part_tool_after },
	{ "plugin", part_plugin },
	{ "deepbind", part_deepbind },
	{ "reload", part_reload },
	{ NULL, NULL },
};

/* ---- tests ---- */

static void test_quiet(void)
{
	struct scene s = { .program = { "/bin/true" }, .no_driver = true };
	play(&s);
	CHECK(s.output[0] == 0);
	struct scene shell = { .program = { "/bin/sh", "-c", "/bin/true && echo hello; umask" }, .no_driver = true, .no_pages = true };
	umask(027);
	play(&shell);
	CHECK(strcmp(shell.output, "hello\n0027\n") == 0);
}

static void test_no_driver(void)
{
	struct scene s = { .part = "no_driver", .no_driver = true };
	play(&s);
}

static void toy(const char *name)
{
	char program[PATH_MAX];
	snprintf(program, sizeof program, "%s/%s", place("TEST_TOYS"), name);
	struct scene without = { .program = { program }, .no_shim = true };
	play(&without);
	CHECK(strcmp(without.output, "42 42 43 43\n") == 0);
	struct scene with = { .program = { program } };
	play(&with);
	if (strcmp(with.output, "42 42 43 43\n") != 0)
		unit_fail("with the shim: %s", with.output);
}
static void test_next_unoptimised(void) { toy("next_O0"); }
static void test_next_optimised(void) { toy("next_O2"); }

static void test_handle(void) { play_part("handle"); }

static void versioned_driver(const char *name)
{
	char folder[PATH_MAX];
	snprintf(folder, sizeof folder, "%s/%s", place("TEST_DRIVER"), name);
	struct scene s = { .part = "versioned_driver", .driver = folder };
	play(&s);
}
static void test_versioned_driver(void) { versioned_driver("versioned"); }
static void test_versioned_callers(void) { play_part("versioned_callers"); }

static void early(const char *before, const char *after)
{
	struct scene s = { .part = "early", .before = before, .after = after, .no_driver = true };
	play(&s);
}
static void test_early_before(void) { early("libearly.so", NULL); }
static void test_early_after(void) { early(NULL, "libearly.so"); }

static void test_other_before(void)
{
	struct scene s = { .part = "other", .before = "libother.so" };
	play(&s);
}
static void test_other_after(void)
{
	struct scene s = { .part = "other", .after = "libother.so" };
	play(&s);
}
static void test_tool_before(void)
{
	struct scene s = { .part = "tool_before", .before = "libtool.so", .max_bytes = LIMIT };
	play(&s);
	CHECK_U64(s.charged, 0);
}
static void test_tool_after(void)
{
	struct scene s = { .part = "tool_after", .after = "libtool.so", .max_bytes = LIMIT };
	play(&s);
	CHECK_U64(s.charged, 0);
}

static void test_direct(void)
{
	char program[PATH_MAX], max[32];
	snprintf(program, sizeof program, "%s/linked", place("TEST_TOYS"));
	snprintf(max, sizeof max, "%llu", (unsigned long long)LIMIT);
	struct scene s = { .program = { program, max }, .max_bytes = LIMIT };
	play(&s);
	CHECK_U64(s.charged, 0);
	CHECK_U64(s.events_max, 1);
	CHECK(s.output[0] == 0);
}

static void test_plugin(void) { play_part("plugin"); }
static void test_deepbind(void) { play_part("deepbind"); }
static void test_reload(void) { play_part("reload"); }

int main(int argc, char **argv)
{
	static struct unit_test tests[] = {
		{ "programs without CUDA run and print as without us", test_quiet },
		{ "no driver: no symbol, whatever the handle", test_no_driver },
		{ "RTLD_NEXT finds the caller's next, unoptimised caller", test_next_unoptimised },
		{ "RTLD_NEXT finds the caller's next, optimised caller", test_next_optimised },
		{ "a handle's hooks, others, errors, the driver's own look-ups", test_handle },
		{ "a driver with versioned symbols and the old hash table", test_versioned_driver },
		{ "callers of dlsym@old and dlsym@new", test_versioned_callers },
		{ "a constructor that looks up, loaded before us", test_early_before },
		{ "a constructor that looks up, loaded after us", test_early_after },
		{ "another dlsym wrapper before us", test_other_before },
		{ "another dlsym wrapper after us", test_other_after },
		{ "another wrapper of a driver function before us", test_tool_before },
		{ "another wrapper of a driver function after us", test_tool_after },
		{ "a program that is linked with the driver", test_direct },
		{ "a plugin that is linked with the driver, RTLD_LOCAL", test_plugin },
		{ "the driver is unloaded and loaded elsewhere", test_reload },
		{ "RTLD_DEEPBIND goes round us, unharmed", test_deepbind },
		{ NULL, NULL },
	};
	/* Sanitizers refuse such a dlopen altogether. */
	const char *runtime = getenv("TEST_RUNTIME");
	if (runtime != NULL && runtime[0] != 0)
		memset(&tests[sizeof tests / sizeof tests[0] - 2], 0, sizeof tests[0]);
	return interpose_main(tests, parts, argc, argv);
}
