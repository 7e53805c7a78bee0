/* SPDX-License-Identifier: Apache-2.0 */
/* entry.c: cuGetProcAddress, from one table of all entry points. */
#include "internal.h"

enum { LEGACY, PER_THREAD };

/* The table needs addresses only; the signatures are where the functions are. */
#define ENTRY(name, version, stream, symbol) extern const char symbol##_entry[] __asm__(#symbol);
#include "entry.def"
#undef ENTRY

static const struct entry {
	const char *name;
	int version, stream;
	const void *address;
} entries[] = {
#define ENTRY(name, version, stream, symbol) {#name, version, stream, symbol##_entry},
#include "entry.def"
#undef ENTRY
};

/* The newest variant of `name` that `version` may have, for that kind of default stream. */
static const void *newest(const char *name, int version, int stream, bool *known)
{
	const void *address = NULL;
	int driver = driver_version(), best = -1;
	size_t i;

	if (version > driver)
		version = driver; /* this driver has no later ones */
	for (i = 0; i < sizeof(entries) / sizeof(entries[0]); i++) {
		const struct entry *e = &entries[i];

		if (strcmp(e->name, name) != 0 || e->version > driver)
			continue;
		*known = true;
		if (e->stream == stream && e->version <= version && e->version > best) {
			best = e->version;
			address = e->address;
		}
	}
	return address;
}

static CUresult find(const char *name, void **address, int version, uint64_t flags, bool per_thread, int *status)
{
	const void *found;
	bool known = false;

	if (!name || !address || flags > SIM_PROC_FLAG_PER_THREAD)
		return CUDA_ERROR_INVALID_VALUE;
	if (flags != 0)
		per_thread = flags == SIM_PROC_FLAG_PER_THREAD;
	found = per_thread ? newest(name, version, PER_THREAD, &known) : NULL;
	if (!found)
		found = newest(name, version, LEGACY, &known);
	*address = (void *)(uintptr_t)found;
	if (*address)
		*status = CU_GET_PROC_ADDRESS_SUCCESS;
	else if (known)
		*status = CU_GET_PROC_ADDRESS_VERSION_NOT_SUFFICIENT;
	else
		*status = CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
	return *address ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}

EXPORT CUresult cuGetProcAddress(const char *name, void **address, int version, cuuint64_t flags)
{
	int status;

	return find(name, address, version, flags, false, &status);
}

EXPORT CUresult cuGetProcAddress_v2(const char *name, void **address, int version, cuuint64_t flags,
				    CUdriverProcAddressQueryResult *symbol_status)
{
	int status;
	CUresult ret = find(name, address, version, flags, false, &status);

	if (symbol_status && ret != CUDA_ERROR_INVALID_VALUE)
		*symbol_status = status;
	return ret;
}

/* What a program compiled for per-thread default streams calls. */
EXPORT CUresult cuGetProcAddress_v2_ptsz(const char *name, void **address, int version, cuuint64_t flags,
					 CUdriverProcAddressQueryResult *symbol_status)
{
	int status;
	CUresult ret = find(name, address, version, flags, true, &status);

	if (symbol_status && ret != CUDA_ERROR_INVALID_VALUE)
		*symbol_status = status;
	return ret;
}

/*
 * The private tables by which NVIDIA's runtime recognises NVIDIA's driver: this is not that
 * driver, and does not say it is.
 */
EXPORT CUresult cuGetExportTable(const void **table, const CUuuid *id)
{
	if (!table || !id)
		return CUDA_ERROR_INVALID_VALUE;
	*table = NULL;
	return CUDA_ERROR_NOT_FOUND;
}
