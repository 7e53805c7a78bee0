/* SPDX-License-Identifier: Apache-2.0 */
/* The table, the reader of loaded objects, UUIDs as text, and contexts. */
#include <dlfcn.h>
#include <link.h>

#include "../src/context.h"
#include "../src/account.h"
#include "../src/device.h"
#include "../src/elf_view.h"
#include "../src/table.h"
#include "../src/text.h"
#include "../src/track.h"
#include "pages_builder.h"
#include "unit.h"

static void table_is_sorted(void)
{
	for (int i = 0; i < TABLE_HOOKS; i++) {
		CHECK(table[i].hook != NULL);
		CHECK_INT(table_find(table[i].symbol), i);
		/* Where names of the driver change with a version, the symbol begins with the name. */
		CHECK(text_after(table[i].symbol, table[i].name) != NULL);
		CHECK((table[i].library == TABLE_NVML) == (strncmp(table[i].symbol, "nvml", 4) == 0));
		if (i > 0)
			CHECK(strcmp(table[i - 1].symbol, table[i].symbol) < 0);
	}
	for (int i = TABLE_HOOKS; i < TABLE_SIZE; i++) {
		CHECK(table[i].hook == NULL);
		CHECK_INT(table_find(table[i].symbol), -1);
	}
}

static void table_matches_exactly(void)
{
	static const char *const others[] = { "", "c", "cu", "cuI", "cuIni", "cuInit_v2", "cuinit", "cublasCreate_v2", "curl_easy_init",
					      "cudaMalloc", "cuMemAlloc_v3", "nvml", "nvmlI", "nvmlinit", "nvmlInit_v2", "nvmlDeviceGetMemoryInfo_v3",
					      "nv", "n", "dlsym", "malloc", "CuInit", "cuMemAlloc_v2 " };
	for (size_t i = 0; i < sizeof others / sizeof others[0]; i++)
		CHECK_INT(table_find(others[i]), -1);
}

static void one_choice(const char *name, int version, cuuint64_t flags, const char *want)
{
	int row = table_choose(name, version, flags);
	const char *got = row < 0 ? "none" : table[row].symbol;
	if (strcmp(got, want) != 0)
		unit_fail("%s at %d: %s, not %s", name, version, got, want);
}

static void table_chooses_the_abi(void)
{
	for (cuuint64_t flags = 0; flags <= 2; flags++) {
		one_choice("cuMemAlloc", 1999, flags, "none");
		one_choice("cuMemAlloc", 2000, flags, "cuMemAlloc");
		one_choice("cuMemAlloc", 3019, flags, "cuMemAlloc");
		one_choice("cuMemAlloc", 3020, flags, "cuMemAlloc_v2");
		one_choice("cuMemAlloc", 13000, flags, "cuMemAlloc_v2");
		one_choice("cuCtxCreate", 11030, flags, "cuCtxCreate_v2");
		one_choice("cuCtxCreate", 11040, flags, "cuCtxCreate_v3");
		one_choice("cuCtxCreate", 12040, flags, "cuCtxCreate_v3");
		one_choice("cuCtxCreate", 12050, flags, "cuCtxCreate_v4");
		one_choice("cuGetProcAddress", 11030, flags, "cuGetProcAddress");
		one_choice("cuGetProcAddress", 12000, flags, "cuGetProcAddress_v2");
		one_choice("cuMemAlloc_v2", 13000, flags, "none");
		one_choice("cuMemsetD8", 13000, flags, "none");
		one_choice("cuLaunchKernel", 3999, flags, "none");
		one_choice("cuLaunchKernel", 6999, flags, "cuLaunchKernel");
		one_choice("cuLaunchKernel", 13000, flags, flags == 2 ? "cuLaunchKernel_ptsz" : "cuLaunchKernel");
		one_choice("nvmlDeviceGetMemoryInfo", 13000, flags, "none");
	}
}

static void texts(void)
{
	CHECK(text_equal("", "") && text_equal("ab", "ab"));
	CHECK(!text_equal("a", "ab") && !text_equal("ab", "a"));
	CHECK(text_compare("a", "b") < 0 && text_compare("b", "a") > 0 && text_compare("\xff", "a") > 0);
	CHECK(strcmp(text_after("libcuda.so.1", "libcuda.so"), ".1") == 0);
	CHECK(text_after("libcud", "libcuda.so") == NULL && text_after("", "l") == NULL);
	CHECK(strcmp(text_file("/a/b/c"), "c") == 0 && strcmp(text_file("c"), "c") == 0 && strcmp(text_file("/a/"), "") == 0);
}

static void uuids(void)
{
	static const struct {
		const char *text;
		int result;
	} cases[] = {
		{ "GPU-a0a1a2a3-a4a5-a6a7-a8a9-aaabacadaeaf", 0 },
		{ "GPU-A0A1A2A3-A4A5-A6A7-A8A9-AAABACADAEAF", 0 },
		{ "MIG-a0a1a2a3-a4a5-a6a7-a8a9-aaabacadaeaf", 0 },
		{ "MIG-GPU-a0a1a2a3-a4a5-a6a7-a8a9-aaabacadaeaf/1/0", -1 },
		{ "GPU-a0a1a2a3-a4a5-a6a7-a8a9-aaabacadaeaf/1/0", -1 },
		{ "GPU-a0a1a2a3-a4a5-a6a7-a8a9-aaabacadaeaf0", -1 },
		{ "GPU-a0a1a2a3-a4a5-a6a7-a8a9-aaabacadaea", -1 },
		{ "GPU-a0a1a2a3-a4a5-a6a7-a8a9-aaabacadae", -1 },
		{ "GPU-a0a1a2a3a4a5-a6a7-a8a9-aaabacadaeaf", -1 },
		{ "GPU-g0a1a2a3-a4a5-a6a7-a8a9-aaabacadaeaf", -1 },
		{ "GPU-", -1 },
		{ "GPU", -1 },
		{ "", -1 },
		{ "a0a1a2a3-a4a5-a6a7-a8a9-aaabacadaeaf", -1 },
	};
	for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
		/* Of its exact size, so that a sanitizer sees a read behind it. */
		char *text = strdup(cases[i].text);
		uint8_t uuid[16] = { 0 };
		CHECK(text != NULL);
		if (device_parse_uuid(text, uuid) != cases[i].result)
			unit_fail("%s: not %d", text, cases[i].result);
		for (int k = 0; cases[i].result == 0 && k < 16; k++)
			CHECK_INT(uuid[k], 0xa0 + k);
		free(text);
	}
}

static struct elf_view view_of(const char *file)
{
	struct link_map *map = NULL;
	void *handle = dlopen(file, RTLD_NOW | RTLD_NOLOAD);
	CHECK(handle != NULL && dlinfo(handle, RTLD_DI_LINKMAP, &map) == 0);
	return (struct elf_view){ map->l_addr, map->l_ld };
}

static void reads_objects(void)
{
	static const char *const names[] = { "malloc", "free", "printf", "getenv", "environ_is_none", "" };
	struct elf_view libc = view_of("libc.so.6");
	void *handle = dlopen("libc.so.6", RTLD_NOW | RTLD_NOLOAD);
	for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) {
		uintptr_t want = (uintptr_t)dlsym(handle, names[i]);
		CHECK_U64(elf_symbol(&libc, names[i]), want);
		CHECK(want == 0 || elf_exports(&libc, want));
	}
	CHECK(!elf_exports(&libc, elf_symbol(&libc, "malloc") + 1));
	/* A variable is no function. */
	CHECK_U64(elf_symbol(&libc, "stdout"), 0);
	CHECK(text_equal(elf_soname(&libc), "libc.so.6"));
	CHECK(elf_needed(&libc, 0) != NULL && text_after(elf_needed(&libc, 0), "ld-linux") != NULL);
	CHECK(elf_needed(&libc, 100) == NULL);
	struct elf_view nothing = { 0, NULL };
	CHECK_U64(elf_symbol(&nothing, "malloc"), 0);
	CHECK(elf_soname(&nothing) == NULL && elf_needed(&nothing, 0) == NULL && !elf_exports(&nothing, 1));
}

#define MIB (UINT64_C(1) << 20)

static uint64_t charged(void)
{
	struct account_view view;
	CHECK(account_view(0, &view));
	return view.charged_bytes;
}

static void contexts(void)
{
	enum { MANY = 1024 };
	struct builder b;
	struct context c;
	uint8_t uuid[16];
	uint64_t owners[MANY + 1];
	builder_init(&b, NULL);
	builder_limit(&b, UINT64_C(1) << 50, UINT64_C(1) << 50);
	account_set_dir(b.dir);
	builder_uuid(0, uuid);
	CHECK_INT(account_gpu(uuid), 0);
	CHECK_U64(context_owner(NULL), 0);
	CHECK(!context_take(NULL, &c) && !context_take_owner(0, &c) && !context_take((CUcontext)(uintptr_t)64, &c));
	for (uintptr_t i = 0; i <= MANY; i++) {
		CHECK_INT(account_reserve(0, ACCOUNT_DEVICE, MIB), 0);
		owners[i] = context_put((CUcontext)((i + 1) * 64), 0, MIB);
	}
	for (uintptr_t i = 0; i < MANY; i++)
		CHECK_U64(context_owner((CUcontext)((i + 1) * 64)), owners[i]);
	/* There was no place for the last: it stays charged. */
	CHECK_U64(context_owner((CUcontext)(uintptr_t)((MANY + 1) * 64)), 0);
	for (uintptr_t i = 0; i < MANY; i += 2) {
		CHECK(context_take((CUcontext)((i + 1) * 64), &c));
		CHECK_U64(c.owner, owners[i]);
		context_settle(&c);
		CHECK(context_take_owner(owners[i + 1], &c));
		CHECK_U64(c.handle, (i + 2) * 64);
		context_restore(&c);
		CHECK_U64(context_owner((CUcontext)((i + 2) * 64)), owners[i + 1]);
		CHECK(!context_take_owner(owners[i], &c));
	}
	CHECK_U64(charged(), (MANY / 2 + 1) * MIB);
	/* The driver gives a handle out again: what was there is gone, with its blocks. */
	struct track_block block = { .pointer = 4096, .bytes = MIB, .owner = owners[1], .gpu = 0, .kind = TRACK_DEVICE };
	CHECK_INT(account_reserve(0, ACCOUNT_DEVICE, 2 * MIB), 0);
	CHECK_INT(track_put(&block), 0);
	CHECK(context_put((CUcontext)(uintptr_t)128, 0, MIB) != owners[1]);
	CHECK(!track_take(4096, &block));
	CHECK_U64(charged(), (MANY / 2 + 1) * MIB);
	builder_remove(&b);
}

int main(int argc, char **argv)
{
	static const struct unit_test tests[] = {
		{ "the table is sorted and finds each of its symbols", table_is_sorted },
		{ "no name that merely looks like one is found", table_matches_exactly },
		{ "the ABI of a name, a version and flags", table_chooses_the_abi },
		{ "strings without the C library", texts },
		{ "UUIDs as NVML writes them", uuids },
		{ "symbols of loaded objects as the loader finds them", reads_objects },
		{ "contexts: taken, put back, settled, given out again", contexts },
		{ NULL, NULL },
	};
	return unit_main(tests, argc, argv);
}
