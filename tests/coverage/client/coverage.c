/* SPDX-License-Identifier: Apache-2.0 */
/*
 * coverage: takes device memory by one entry point of the driver after another, each found as
 * programs find it, until it is refused, and gives it back. Driven line by line, answering in
 * JSON lines:
 *
 *   context                       a context of its own, current
 *   prepare SYMBOL                starts a second process if that row shares memory with one
 *   begin SYMBOL dlsym            finds it by its exact name
 *   begin SYMBOL proc NAME VERSION FLAGS
 *                                 finds it as cuGetProcAddress gives it
 *   fill                          takes until refused, in ever smaller pieces
 *   take N                        takes N pieces, none of which may be refused
 *   give                          gives everything back
 *   drop                          gives the first piece back
 *   prefetch WAY                  asks for the last piece on the GPU: prefetch, prefetch_v2, advise, advise_v2
 *   share MIB                     has memory that the second process has opened, too
 *   hand MIB                      the same, and lets go of its own handle
 *   unshare                       both let go
 *   view                          what the driver says there is
 *   nvml UUID                     what NVML says there is, both versions
 *   end
 *
 * `coverage list` prints the rows' names.
 *
 * The function under test is called through what was found; everything else through dlsym.
 */
#include "../../clients/src/report.h"
#include "more_rows.h"

/* Of the smallest blocks, of 512 bytes, twice what fill_most() leaves: what NVML still shows of an earlier row
   is no room then, and is some when the row takes. */
#define TAKEN_MAX 32768

static const struct row *row;
static struct taken all[TAKEN_MAX];
static struct taken lent;
static size_t count;

static void answer(const char *op, const char *why)
{
	struct report r;
	report_begin(&r, op, !why);
	if (why)
		report_string(&r, "why", why);
	report_end(&r);
}

static const struct row *find_row(const char *name, bool *shared)
{
	*shared = false;
	for (size_t i = 0; i < ROWS; i++)
		if (strcmp(rows[i].symbol, name) == 0)
			return &rows[i];
	for (size_t i = 0; i < sizeof(more_rows) / sizeof(more_rows[0]); i++)
		if (strcmp(more_rows[i].symbol, name) == 0)
			return &more_rows[i];
	for (size_t i = 0; i < sizeof(shared_rows) / sizeof(shared_rows[0]); i++) {
		if (strcmp(shared_rows[i].symbol, name) == 0) {
			*shared = true;
			return &shared_rows[i];
		}
	}
	return NULL;
}

/* The names of all rows, for whoever has not the source. */
static void list_rows(void)
{
	for (size_t i = 0; i < ROWS; i++)
		puts(rows[i].symbol);
	for (size_t i = 0; i < sizeof(more_rows) / sizeof(more_rows[0]); i++)
		puts(more_rows[i].symbol);
	for (size_t i = 0; i < sizeof(shared_rows) / sizeof(shared_rows[0]); i++)
		puts(shared_rows[i].symbol);
}

/* The answer has how many other processes there are. */
static void prepare(const char *name)
{
	struct report r;
	bool shared;
	bool ok = find_row(name, &shared) && (!shared || peer_start() == CUDA_SUCCESS);
	report_begin(&r, "prepare", ok);
	report_u64(&r, "allocs", peer_socket >= 0);
	report_end(&r);
}

/* Memory that two processes have, or only the other. */
static void share(const char *op, const char *mib, bool keep)
{
	failure[0] = 0;
	memset(&lent, 0, sizeof(lent));
	must(peer_start(), "start another process");
	if (!failure[0])
		must(exported((export_function *)(uintptr_t)symbol("cuMemExportToShareableHandle"), (size_t)atoi(mib) * MIB, &lent), "share memory");
	if (!failure[0] && !keep) {
		release(lent.a);
		lent.a = 0;
	}
	answer(op, failure[0] ? failure : NULL);
}

static void unshare(void)
{
	failure[0] = 0;
	if (lent.a)
		release(lent.a);
	peer_close(PEER_PHYSICAL, lent.b, 0);
	answer("unshare", failure[0] ? failure : NULL);
}

static void begin(char *words)
{
	char *name = strtok(words, " "), *via = strtok(NULL, " "), *base = strtok(NULL, " "), *version = strtok(NULL, " "),
	     *flags = strtok(NULL, " ");
	char exact[128];
	failure[0] = 0;
	row = NULL;
	under_test = NULL;
	bool shared;
	row = name ? find_row(name, &shared) : NULL;
	if (!row || !via) {
		answer("begin", "no such row");
		return;
	}
	snprintf(exact, sizeof(exact), "%.*s", (int)strcspn(name, "/"), name);
	if (strcmp(via, "dlsym") == 0) {
		under_test = dlsym(cuda_library, exact);
	} else if (flags) {
		int status = -1;
		if (ASK(cuGetProcAddress_v2, (const char *, void **, int, cuuint64_t, int *), base, &under_test, atoi(version),
			(cuuint64_t)atoi(flags), &status) != CUDA_SUCCESS || status != 0)
			under_test = NULL;
	}
	if (!under_test) {
		answer("begin", "not found");
		return;
	}
	if (row->before)
		row->before();
	struct report r;
	report_begin(&r, "begin", !failure[0]);
	report_u64(&r, "allocs", hooked());
	if (failure[0])
		report_string(&r, "why", failure);
	report_end(&r);
}

/* With what the driver answered last. */
static void say_taken(const char *op, bool ok, uint64_t granted, CUresult ret)
{
	struct report r;
	char text[200];
	report_begin(&r, op, ok && !failure[0]);
	report_u64(&r, "granted_bytes", granted);
	report_u64(&r, "allocs", count);
	snprintf(text, sizeof(text), "%s result %d", failure, (int)ret);
	report_string(&r, "why", text);
	report_end(&r);
}

static CUresult take_one(size_t bytes)
{
	newest = count > 0 ? &all[count - 1] : NULL;
	struct taken *t = &all[count];
	memset(t, 0, sizeof(*t));
	CUresult ret = row->take(row, bytes, t);
	if (ret == CUDA_SUCCESS) {
		t->bytes = bytes;
		count++;
	}
	return ret;
}

static void take(size_t pieces)
{
	CUresult ret = CUDA_SUCCESS;
	uint64_t granted = 0;
	for (size_t i = 0; i < pieces && count < TAKEN_MAX && ret == CUDA_SUCCESS && !failure[0]; i++) {
		ret = take_one(row->first);
		if (ret == CUDA_SUCCESS)
			granted += row->first;
	}
	say_taken("take", ret == CUDA_SUCCESS, granted, ret);
}

static void fill(void)
{
	CUresult ret = CUDA_SUCCESS;
	uint64_t granted = 0;
	size_t bytes = row->first;
	while (count < TAKEN_MAX && !failure[0]) {
		ret = take_one(bytes);
		if (ret == CUDA_SUCCESS) {
			granted += bytes;
		} else if (ret == CUDA_ERROR_OUT_OF_MEMORY && bytes > row->last) {
			bytes /= 2;
		} else {
			break;
		}
	}
	say_taken("fill", ret == CUDA_ERROR_OUT_OF_MEMORY, granted, ret);
}

static void give(void)
{
	while (count > 0)
		row->give(row, &all[--count]);
	if (row->after)
		row->after();
	answer("give", failure[0] ? failure : NULL);
}

/* By one of the functions that say where managed memory is to be, found by its name. */
static void prefetch(const char *way)
{
	struct taken *t = &all[count - 1];
	CUmemLocation there = { CU_MEM_LOCATION_TYPE_DEVICE, device };
	CUdeviceptr pointer = t->a;
	size_t bytes = t->bytes, first = 0;
	CUresult ret = CUDA_ERROR_INVALID_VALUE;
	if (strcmp(way, "prefetch") == 0)
		ret = ASK(cuMemPrefetchAsync, (CUdeviceptr, size_t, CUdevice, CUstream), t->a + t->bytes / 2, 4096, device, NULL);
	else if (strcmp(way, "prefetch_v2") == 0)
		ret = ASK(cuMemPrefetchAsync_v2, (CUdeviceptr, size_t, CUmemLocation, unsigned int, CUstream), t->a, t->bytes, there, 0, NULL);
	else if (strcmp(way, "prefetch_batch") == 0)
		ret = ASK(cuMemPrefetchBatchAsync, (CUdeviceptr *, size_t *, size_t, CUmemLocation *, size_t *, size_t, unsigned long long, CUstream),
			  &pointer, &bytes, 1, &there, &first, 1, 0, NULL);
	else if (strcmp(way, "discard_and_prefetch") == 0)
		ret = ASK(cuMemDiscardAndPrefetchBatchAsync, (CUdeviceptr *, size_t *, size_t, CUmemLocation *, size_t *, size_t, unsigned long long, CUstream),
			  &pointer, &bytes, 1, &there, &first, 1, 0, NULL);
	else if (strcmp(way, "read_mostly") == 0)
		ret = ASK(cuMemAdvise_v2, (CUdeviceptr, size_t, CUmem_advise, CUmemLocation), t->a, t->bytes, CU_MEM_ADVISE_SET_READ_MOSTLY, there);
	else if (strcmp(way, "advise") == 0)
		ret = ASK(cuMemAdvise, (CUdeviceptr, size_t, CUmem_advise, CUdevice), t->a, t->bytes, CU_MEM_ADVISE_SET_PREFERRED_LOCATION, device);
	else if (strcmp(way, "advise_v2") == 0)
		ret = ASK(cuMemAdvise_v2, (CUdeviceptr, size_t, CUmem_advise, CUmemLocation), t->a, t->bytes, CU_MEM_ADVISE_UNSET_PREFERRED_LOCATION, there);
	CALL(cuCtxSynchronize, (void));
	answer("prefetch", ret == CUDA_SUCCESS && !failure[0] ? NULL : "refused");
}

static void view(void)
{
	size_t free_bytes = 0, total_bytes = 0, device_bytes = 0;
	failure[0] = 0;
	CALL(cuMemGetInfo_v2, (size_t *, size_t *), &free_bytes, &total_bytes);
	CALL(cuDeviceTotalMem_v2, (size_t *, CUdevice), &device_bytes, device);
	struct report r;
	report_begin(&r, "view", !failure[0]);
	report_u64(&r, "free_bytes", free_bytes);
	report_u64(&r, "total_bytes", total_bytes);
	report_u64(&r, "held_bytes", device_bytes);
	report_end(&r);
}

static void nvml(const char *uuid)
{
	static void *library;
	struct { unsigned long long total, free, used; } v1;
	struct { unsigned int version; unsigned long long total, reserved, free, used; } v2 = { .version = sizeof(v2) | 2 << 24 };
	void *handle = NULL;
	if (!library) {
		library = dlopen("libnvidia-ml.so.1", RTLD_NOW | RTLD_LOCAL);
		if (!library || ((int (*)(void))(uintptr_t)dlsym(library, "nvmlInit_v2"))() != 0) {
			answer("nvml", "cannot start NVML");
			return;
		}
	}
	bool ok = ((int (*)(const char *, void **))(uintptr_t)dlsym(library, "nvmlDeviceGetHandleByUUID"))(uuid, &handle) == 0 &&
		  ((int (*)(void *, void *))(uintptr_t)dlsym(library, "nvmlDeviceGetMemoryInfo"))(handle, &v1) == 0 &&
		  ((int (*)(void *, void *))(uintptr_t)dlsym(library, "nvmlDeviceGetMemoryInfo_v2"))(handle, &v2) == 0;
	struct report r;
	report_begin(&r, "nvml", ok);
	if (ok) {
		report_u64(&r, "total_bytes", v1.total);
		report_u64(&r, "free_bytes", v1.free);
		report_u64(&r, "held_bytes", v1.used);
		/* Of version 2 what differs from version 1, so that 0 says that it does not. */
		report_u64(&r, "refused", (v1.total ^ v2.total) | (v1.free ^ v2.free) | (v1.used ^ v2.used));
	}
	report_end(&r);
}

int main(int argc, char **argv)
{
	char line[512];
	if (argc == 2 && strcmp(argv[1], "list") == 0) {
		list_rows();
		return 0;
	}
	cuda_library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
	if (!cuda_library) {
		fprintf(stderr, "coverage: %s\n", dlerror());
		return 1;
	}
	if (argc == 2 && strcmp(argv[1], "peer") == 0)
		return peer_serve();
	while (fgets(line, sizeof(line), stdin)) {
		line[strcspn(line, "\n")] = 0;
		if (strcmp(line, "context") == 0) {
			failure[0] = 0;
			CALL(cuInit, (unsigned int), 0);
			CALL(cuDeviceGet, (CUdevice *, int), &device, 0);
			CALL(cuCtxCreate_v2, (CUcontext *, unsigned int, CUdevice), &context, 0, device);
			answer("context", failure[0] ? failure : NULL);
		} else if (strncmp(line, "prepare ", 8) == 0) {
			prepare(line + 8);
		} else if (strncmp(line, "share ", 6) == 0) {
			share("share", line + 6, true);
		} else if (strncmp(line, "hand ", 5) == 0) {
			share("hand", line + 5, false);
		} else if (strcmp(line, "unshare") == 0) {
			unshare();
		} else if (strncmp(line, "begin ", 6) == 0) {
			begin(line + 6);
		} else if (strcmp(line, "fill") == 0 && row) {
			fill();
		} else if (strncmp(line, "take ", 5) == 0 && row) {
			take((size_t)atoi(line + 5));
		} else if (strcmp(line, "give") == 0 && row) {
			give();
		} else if (strncmp(line, "prefetch ", 9) == 0 && count > 0) {
			prefetch(line + 9);
		} else if (strcmp(line, "drop") == 0 && count > 0) {
			row->give(row, &all[0]);
			all[0] = all[--count];
			answer("drop", failure[0] ? failure : NULL);
		} else if (strcmp(line, "view") == 0) {
			view();
		} else if (strncmp(line, "nvml ", 5) == 0) {
			nvml(line + 5);
		} else if (line[0]) {
			answer(line, "no such command");
		}
	}
	return 0;
}
