/* SPDX-License-Identifier: Apache-2.0 */
/*
 * getproc.c: cuGetProcAddress. The driver answers, with the caller's own version and flags; its
 * result and status stand. Only then its function is replaced, by the hook of exactly the ABI
 * that it chose: a hook of another one would read the wrong arguments.
 */
#include "debug.h"
#include "real.h"

/*
 * The row of the driver's answer. Its address says which ABI it is, if the driver exports it. If it
 * exports it under a name that is not in the table, it is an ABI that we do not know. An address
 * that it does not export is known by the question, as far as the table was compared.
 */
static int row_of(const char *name, uintptr_t answer, int version, cuuint64_t flags)
{
	int row = real_find(answer);
	if (row >= 0)
		return row;
	if (version > TABLE_CUDA_VERSION || (row = table_choose(name, version, flags)) < 0)
		return -1;
	return real_exports(answer) ? -1 : row;
}

static void hook_answer(const char *name, void **function, int version, cuuint64_t flags)
{
	uintptr_t answer = (uintptr_t)*function;
	int row = row_of(name, answer, version, flags);
	if (row < 0 || !real_note((enum table_id)row, answer))
		return;
	*function = (void *)(uintptr_t)table[row].hook;
}

CUresult hook_cuGetProcAddress(const char *name, void **function, int version, cuuint64_t flags)
{
	fn_cuGetProcAddress *real = REAL(cuGetProcAddress);
	if (real == NULL)
		return CUDA_ERROR_NOT_SUPPORTED;
	CUresult result = real(name, function, version, flags);
	if (result == CUDA_SUCCESS && name != NULL && function != NULL && *function != NULL)
		hook_answer(name, function, version, flags);
	return result;
}
EXPORT(cuGetProcAddress);

CUresult hook_cuGetProcAddress_v2(const char *name, void **function, int version, cuuint64_t flags, int *status)
{
	fn_cuGetProcAddress_v2 *real = REAL(cuGetProcAddress_v2);
	if (real == NULL)
		return CUDA_ERROR_NOT_SUPPORTED;
	CUresult result = real(name, function, version, flags, status);
	if (result == CUDA_SUCCESS && name != NULL && function != NULL && *function != NULL)
		hook_answer(name, function, version, flags);
	return result;
}
EXPORT(cuGetProcAddress_v2);

/* For programs with a default stream for each thread, which is what they mean by no flag. */
static cuuint64_t per_thread(cuuint64_t flags)
{
	const cuuint64_t streams = CU_GET_PROC_ADDRESS_LEGACY_STREAM | CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM;
	return (flags & streams) != 0 ? flags : flags | CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM;
}

CUresult hook_cuGetProcAddress_ptsz(const char *name, void **function, int version, cuuint64_t flags)
{
	fn_cuGetProcAddress_ptsz *real = REAL(cuGetProcAddress_ptsz);
	if (real == NULL)
		return CUDA_ERROR_NOT_SUPPORTED;
	CUresult result = real(name, function, version, flags);
	if (result == CUDA_SUCCESS && name != NULL && function != NULL && *function != NULL)
		hook_answer(name, function, version, per_thread(flags));
	return result;
}
EXPORT(cuGetProcAddress_ptsz);

CUresult hook_cuGetProcAddress_v2_ptsz(const char *name, void **function, int version, cuuint64_t flags, int *status)
{
	fn_cuGetProcAddress_v2_ptsz *real = REAL(cuGetProcAddress_v2_ptsz);
	if (real == NULL)
		return CUDA_ERROR_NOT_SUPPORTED;
	CUresult result = real(name, function, version, flags, status);
	if (result == CUDA_SUCCESS && name != NULL && function != NULL && *function != NULL)
		hook_answer(name, function, version, per_thread(flags));
	return result;
}
EXPORT(cuGetProcAddress_v2_ptsz);
