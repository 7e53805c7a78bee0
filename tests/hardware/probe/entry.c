/* SPDX-License-Identifier: Apache-2.0 */
#include "probe.h"

#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>

typedef CUresult get_proc(const char *, void **, int, cuuint64_t, CUdriverProcAddressQueryResult *);

/* A list for people, as long as there is room for it. */
struct names {
	char text[500];
	size_t used;
	uint64_t count;
};

static void add_name(struct names *n, const char *name)
{
	size_t length = strlen(name);
	n->count++;
	if (n->used + length + 2 >= sizeof(n->text))
		return;
	if (n->used)
		n->text[n->used++] = ' ';
	memcpy(n->text + n->used, name, length + 1);
	n->used += length;
}

/* A table's line in $PROBE_FUNCTIONS: base, symbol, version, ... */
static FILE *functions(void)
{
	const char *path = getenv("PROBE_FUNCTIONS");
	FILE *f = path ? fopen(path, "r") : NULL;
	if (!f)
		failed("open the list of functions that PROBE_FUNCTIONS names");
	return f;
}

static bool ends(const char *s, const char *with)
{
	size_t n = strlen(s), m = strlen(with);
	return n >= m && strcmp(s + n - m, with) == 0;
}

/* Every function at the version that brought it: is the answer what the library exports under that name? */
static void proc_addresses(void)
{
	struct names other = { .used = 0 }, hidden = { .used = 0 }, refused = { .used = 0 }, absent = { .used = 0 };
	uint64_t asked = 0, exported = 0;
	char line[512], label[160];
	int version = 0;
	FILE *f = functions();
	cuda_init();
	CALL(cuDriverGetVersion, (int *), &version);
	get_proc *ask = (get_proc *)(uintptr_t)cuda("cuGetProcAddress_v2");
	while (fgets(line, sizeof(line), f)) {
		char *save = NULL, *base = strtok_r(line, "\t\n", &save), *name = strtok_r(NULL, "\t\n", &save), *since = strtok_r(NULL, "\t\n", &save);
		if (!base || *base == '#' || !name || !since || atoi(since) > version)
			continue;
		bool per_thread = ends(name, "_ptsz") || ends(name, "_ptds");
		CUdriverProcAddressQueryResult status = 0;
		void *fn = NULL, *want = cuda_or_null(name);
		asked++;
		CUresult r = ask(base, &fn, atoi(since), per_thread ? 2 : 0, &status);
		if (!want)
			add_name(&absent, name);
		if (r != CUDA_SUCCESS || !fn) {
			if (want)
				add_name(&refused, name);
			continue;
		}
		if (fn == want) {
			exported++;
			continue;
		}
		Dl_info info;
		if (dladdr(fn, &info) && info.dli_sname && info.dli_saddr == fn) {
			snprintf(label, sizeof(label), "%s=%s", name, info.dli_sname);
			add_name(&other, label);
		} else {
			add_name(&hidden, name);
		}
	}
	fclose(f);
	say("asked", asked);
	say("exported", exported);
	say("other_exported", other.count);
	say_word("other_exported_names", other.text);
	say("not_exported", hidden.count);
	say_word("not_exported_names", hidden.text);
	say("refused", refused.count);
	say_word("refused_names", refused.text);
	say("not_in_library", absent.count);
	say_word("not_in_library_names", absent.text);
}

/* Names whose variants redirect each other in cuda.h, at the versions where they might change. */
static void proc_variants(void)
{
	static const struct {
		const char *name;
		int version;
	} asks[] = {
		{ "cuGraphInstantiate", 11000 }, { "cuGraphInstantiate", 11040 }, { "cuGraphInstantiate", 12000 }, { "cuGraphExecUpdate", 11000 },
		{ "cuGraphExecUpdate", 12000 },  { "cuCtxCreate", 11000 },        { "cuCtxCreate", 11040 },        { "cuCtxCreate", 12050 },
		{ "cuCtxCreate", 13000 },        { "cuMemPrefetchAsync", 12020 }, { "cuMemPrefetchAsync", 13000 }, { "cuMemAdvise", 12020 },
		{ "cuMemAdvise", 13000 },        { "cuStreamGetCaptureInfo", 12000 }, { "cuStreamGetCaptureInfo", 12030 }, { "cuStreamGetCaptureInfo", 13000 },
		{ "cuGetProcAddress", 11030 },   { "cuGetProcAddress", 12000 },   { "cuEventElapsedTime", 12080 }, { "cuDeviceGetUuid", 11040 },
		{ "cuGraphAddNode", 12020 },     { "cuGraphAddNode", 12030 },     { "cuMemAlloc", 2000 },          { "cuMemAlloc", 3020 },
	};
	int version = 0;
	char name[64];
	cuda_init();
	CALL(cuDriverGetVersion, (int *), &version);
	get_proc *ask = (get_proc *)(uintptr_t)cuda("cuGetProcAddress_v2");
	for (size_t i = 0; i < sizeof(asks) / sizeof(asks[0]); i++) {
		CUdriverProcAddressQueryResult status = 0;
		char word[160];
		void *fn = NULL;
		Dl_info info;
		CUresult r = ask(asks[i].name, &fn, asks[i].version, 0, &status);
		snprintf(name, sizeof(name), "%s@%d", asks[i].name, asks[i].version);
		if (r != CUDA_SUCCESS || !fn)
			snprintf(word, sizeof(word), "%s, status %u", word_of(r), status);
		else if (dladdr(fn, &info) && info.dli_sname && info.dli_saddr == fn)
			snprintf(word, sizeof(word), "%s", info.dli_sname);
		else
			snprintf(word, sizeof(word), "an address that is not exported");
		say_word(name, word);
	}
	void *fn = NULL;
	CUdriverProcAddressQueryResult status = 9;
	say_word("unknown", word_of(ask("cuNoSuchFunction", &fn, version, 0, &status)));
	say("unknown_status", status);
	status = 9;
	say_word("too_early", word_of(ask("cuMemAllocAsync", &fn, 10000, 0, &status)));
	say("too_early_status", status);
}

static void nvml_functions(void)
{
	struct names absent = { .used = 0 };
	uint64_t all = 0;
	char line[256];
	const char *path = getenv("PROBE_NVML_FUNCTIONS");
	FILE *f = path ? fopen(path, "r") : NULL;
	if (!f)
		failed("open the list of functions that PROBE_NVML_FUNCTIONS names");
	while (fgets(line, sizeof(line), f)) {
		if (strncmp(line, "ENTRY(", 6) != 0)
			continue;
		line[6 + strcspn(line + 6, ")")] = 0;
		all++;
		if (!nvml_or_null(line + 6))
			add_name(&absent, line + 6);
	}
	fclose(f);
	say("functions", all);
	say("absent", absent.count);
	say_word("absent_names", absent.text);
}

static void export_table(void)
{
	/* Any UUID but one of the driver's: the function alone is asked for. */
	static const CUuuid none = { { 0 } };
	const void *table = NULL;
	cuda_init();
	say_word("unknown_table", word_of(ASK(cuGetExportTable, (const void **, const CUuuid *), &table, &none)));
}

const struct probe entry_probes[] = {
	{ "proc-addresses", proc_addresses },
	{ "proc-variants", proc_variants },
	{ "nvml-functions", nvml_functions },
	{ "export-table", export_table },
	{ NULL, NULL },
};
