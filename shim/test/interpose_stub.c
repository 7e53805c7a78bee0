/* SPDX-License-Identifier: Apache-2.0 */
/* The second delivery: a libcuda.so.1 and a libnvidia-ml.so.1 that stand in for the driver's. */
#include "../src/table.h"
#include "interpose.h"

static void *cuda;
static uint64_t (*live)(void);

#define CALL(symbol, ...) (FN(cuda, symbol)(__VA_ARGS__))

static void hold(void)
{
	CUcontext context;
	CUdeviceptr p[64], q = 7;
	size_t free_bytes, total;
	int n = 0;
	CHECK_INT(CALL(cuInit, 0), 0);
	CHECK_INT(CALL(cuCtxCreate_v2, &context, 0, 0), 0);
	while (n < 64 && CALL(cuMemAlloc_v2, &p[n], 256 * MIB) == 0)
		n++;
	CHECK_INT(n, (int)((LIMIT - FAKE_CONTEXT_BYTES) / (256 * MIB)));
	CHECK_INT(CALL(cuMemAlloc_v2, &q, 256 * MIB), CUDA_ERROR_OUT_OF_MEMORY);
	CHECK_U64(q, 7);
	CHECK_INT(CALL(cuMemGetInfo_v2, &free_bytes, &total), 0);
	CHECK_U64(total, LIMIT);
	CHECK_U64(free_bytes, LIMIT - live());
	CHECK_U64(charged(0), live());
	while (n > 0)
		CHECK_INT(CALL(cuMemFree_v2, p[--n]), 0);
	CHECK_INT(CALL(cuCtxDestroy_v2, context), 0);
	CHECK_U64(charged(0), 0);
	CHECK_U64(live(), 0);
}

static void opened(int flags)
{
	cuda = open_driver(flags);
	/* What we do not hook is found behind us. */
	live = need(cuda, "fake_live_bytes");
	CHECK(look(cuda, "cuNoSuchFunction") == NULL);
	CUresult (*set)(CUdeviceptr, unsigned char, size_t) = need(cuda, "cuMemsetD8_v2");
	CHECK_INT(set(0, 0, 0), 0);
	hold();
}

static void part_local(void) { opened(RTLD_LOCAL); }
static void part_global(void)
{
	opened(RTLD_GLOBAL);
	CHECK(look(RTLD_DEFAULT, "cuMemAlloc_v2") == look(cuda, "cuMemAlloc_v2"));
	CHECK(look(RTLD_DEFAULT, "fake_live_bytes") == (void *)(uintptr_t)live);
}
static void part_deepbind(void)
{
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
	opened(RTLD_LOCAL); /* sanitizers cannot do it */
#else
	opened(RTLD_LOCAL | RTLD_DEEPBIND);
#endif
}

/* Each hook of the table, by every name, and nothing of ours besides. */
static void part_names(void)
{
	static const char *const symbols[] = {
#define NAME(library, symbol, name, version, stream) #symbol,
		TABLE_HOOKED(NAME)
	};
	void *nvml = dlopen("libnvidia-ml.so.1", RTLD_NOW);
	CHECK(nvml != NULL);
	cuda = open_driver(RTLD_LOCAL);
	for (size_t i = 0; i < sizeof symbols / sizeof symbols[0]; i++) {
		Dl_info info;
		void *library = strncmp(symbols[i], "nvml", 4) == 0 ? nvml : cuda;
		CHECK(dladdr(need(library, symbols[i]), &info) != 0);
		if (strstr(info.dli_fname, "/stub/") == NULL)
			unit_fail("%s is %s's", symbols[i], info.dli_fname);
	}
	CHECK(look(cuda, "hook_cuInit") == NULL);
	CHECK(look(cuda, "gpufence_dlsym") == NULL);
	CHECK(look(cuda, "nvmlDeviceGetMemoryInfo") == NULL);
}

static void part_getproc(void)
{
	static const int versions[] = { 2000, 3010, 3020, 11000, 11020, 12000, 12050, 13000, 13050 };
	void (*set_version)(int);
	void *(*address)(const char *);
	cuda = open_driver(RTLD_LOCAL);
	set_version = need(cuda, "fake_set_version");
	address = need(cuda, "fake_address");
	set_version(13050);
	static const struct {
		const char *symbol, *name;
	} rows[] = {
#define ROW_OF(library, symbol, name, version, stream) { #symbol, #name },
		TABLE_HOOKED(ROW_OF)
	};
	fn_cuGetProcAddress_v2 *theirs = (fn_cuGetProcAddress_v2 *)address("cuGetProcAddress_v2");
	for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
		for (size_t v = 0; v < sizeof versions / sizeof versions[0]; v++) {
			for (cuuint64_t flags = 0; flags <= 2; flags++) {
				void *want = NULL, *got = NULL;
				int status;
				CUresult result = theirs(rows[i].name, &want, versions[v], flags, &status);
				CHECK_INT(CALL(cuGetProcAddress_v2, rows[i].name, &got, versions[v], flags, &status), result);
				for (size_t k = 0; result == 0 && k < sizeof rows / sizeof rows[0]; k++)
					if (address(rows[k].symbol) == want && look(cuda, rows[k].symbol) != got)
						unit_fail("%s at %d, flags %d", rows[i].name, versions[v], (int)flags);
			}
		}
	}
}

/* A static CUDA runtime's way: its own handle, closed and opened again. */
static void part_again(void)
{
	for (int i = 0; i < 3; i++) {
		opened(RTLD_LOCAL);
		CHECK_INT(dlclose(cuda), 0);
	}
}

static void part_plugin(void)
{
	void *plugin = dlopen("liblinked.so", RTLD_NOW | RTLD_LOCAL);
	if (plugin == NULL)
		unit_fail("%s", dlerror());
	int (*run)(uint64_t) = need(plugin, "linked_run");
	CHECK_INT(run(LIMIT), 0);
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
	plugin = dlopen("liblinked.so", RTLD_NOW | RTLD_LOCAL | RTLD_DEEPBIND);
	CHECK(plugin != NULL);
	run = need(plugin, "linked_run");
	CHECK_INT(run(LIMIT), 0);
#endif
}

/* The child counts for itself. */
static void part_fork(void)
{
	pid_t pid;
	CUcontext context;
	CUdeviceptr p;
	cuda = open_driver(RTLD_LOCAL);
	live = need(cuda, "fake_live_bytes");
	CHECK_INT(CALL(cuInit, 0), 0);
	CHECK_INT(CALL(cuCtxCreate_v2, &context, 0, 0), 0);
	CHECK_INT(CALL(cuMemAlloc_v2, &p, GIB), 0);
	CHILD(pid, {
		CUcontext mine;
		CHECK_INT(CALL(cuCtxCreate_v2, &mine, 0, 0), 0);
		CHECK_U64(charged(0), GIB + 2 * FAKE_CONTEXT_BYTES);
		CHECK_INT(CALL(cuCtxDestroy_v2, mine), 0);
	});
	unit_reap(pid, 0);
	CHECK_U64(charged(0), GIB + FAKE_CONTEXT_BYTES);
	CHECK_INT(CALL(cuCtxDestroy_v2, context), 0);
}

static const struct part parts[] = {
	{ "local", part_local },     { "global", part_global }, { "deepbind", part_deepbind }, { "names", part_names },
	{ "getproc", part_getproc }, { "again", part_again },   { "plugin", part_plugin },     { "fork", part_fork },
	{ NULL, NULL },
};

static void play_stub(const char *part)
{
	struct scene s = { .part = part, .max_bytes = LIMIT, .stub = true };
	play(&s);
	CHECK_U64(s.charged, 0);
}
static void test_local(void) { play_stub("local"); }
static void test_global(void) { play_stub("global"); }
static void test_deepbind(void) { play_stub("deepbind"); }
static void test_names(void) { play_stub("names"); }
static void test_getproc(void) { play_stub("getproc"); }
static void test_again(void) { play_stub("again"); }
static void test_plugin(void) { play_stub("plugin"); }
static void test_fork(void) { play_stub("fork"); }
static void test_linked(void)
{
	char program[PATH_MAX], max[32];
	snprintf(program, sizeof program, "%s/linked", place("TEST_TOYS"));
	snprintf(max, sizeof max, "%llu", (unsigned long long)LIMIT);
	struct scene s = { .program = { program, max }, .max_bytes = LIMIT, .stub = true };
	play(&s);
	CHECK_U64(s.events_max, 1);
	CHECK_U64(s.charged, 0);
	if (s.output[0] != 0)
		unit_fail("said: %.500s", s.output);
}

static const struct unit_test tests[] = {
	{ "stub: limited, freed, view right, other names found behind", test_local },
	{ "stub: RTLD_GLOBAL", test_global },
	{ "stub: RTLD_DEEPBIND goes through us", test_deepbind },
	{ "stub: every name of the table, no other", test_names },
	{ "stub: cuGetProcAddress", test_getproc },
	{ "stub: closed and opened again", test_again },
	{ "stub: a plugin that is linked with the driver", test_plugin },
	{ "stub: a program that is linked with the driver", test_linked },
	{ "stub: fork", test_fork },
	{ NULL, NULL },
};

int main(int argc, char **argv) { return interpose_main(tests, parts, argc, argv); }
