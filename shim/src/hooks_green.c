/* SPDX-License-Identifier: Apache-2.0 */
/*
 * hooks_green.c: green contexts. One costs what a context costs and keeps its device's primary
 * context besides. Memory is the primary context's, whichever of them is current: the driver treats
 * a green one as the primary context with fewer multiprocessors, and does not free when it is destroyed.
 */
#include "account.h"
#include "charge.h"
#include "context.h"
#include "device.h"
#include "hooks_ctx.h"
#include "real.h"

/* The handle by which it is current. */
static CUcontext context_of(CUgreenCtx green)
{
	CUcontext context = NULL;
	fn_cuCtxFromGreenCtx *get = REAL(cuCtxFromGreenCtx);
	return get != NULL && get(&context, green) == CUDA_SUCCESS ? context : (CUcontext)green;
}

/* The primary context is there, since the green one keeps it. */
static CUcontext primary_context(CUdevice device)
{
	CUcontext context = NULL;
	fn_cuDevicePrimaryCtxRetain *retain = REAL(cuDevicePrimaryCtxRetain);
	fn_cuDevicePrimaryCtxRelease *release = REAL(cuDevicePrimaryCtxRelease_v2);
	if (release == NULL)
		release = REAL(cuDevicePrimaryCtxRelease);
	if (retain != NULL && release != NULL && retain(&context, device) == CUDA_SUCCESS)
		release(device);
	return context;
}

CUresult hook_cuGreenCtxCreate(CUgreenCtx *green, CUdevResourceDesc resources, CUdevice device, unsigned int flags)
{
	static const char call[] = "cuGreenCtxCreate";
	fn_cuGreenCtxCreate *real = REAL(cuGreenCtxCreate);
	fn_cuGreenCtxDestroy *destroy = REAL(cuGreenCtxDestroy);
	struct primary_hold h;
	struct creation c;
	CUgreenCtx got = NULL;
	if (real == NULL || destroy == NULL)
		return CUDA_ERROR_NOT_SUPPORTED;
	if (green == NULL)
		return real(green, resources, device, flags);
	if (!primary_begin(&h, call, device))
		return CUDA_ERROR_OUT_OF_MEMORY;
	if (!creation_begin(&c, call, device)) {
		primary_undo(&h);
		return CUDA_ERROR_OUT_OF_MEMORY;
	}
	CUresult result = real(&got, resources, device, flags);
	if (result != CUDA_SUCCESS) {
		primary_undo(&h);
		return c.gpu < 0 ? result : charge_failed(c.gpu, ACCOUNT_DEVICE, c.bytes, result);
	}
	if (!primary_end(&h, primary_context(device))) {
		destroy(got);
		if (c.gpu >= 0)
			account_release(c.gpu, ACCOUNT_DEVICE, c.bytes);
		return CUDA_ERROR_OUT_OF_MEMORY;
	}
	context_put_green(context_of(got), c.gpu, c.gpu < 0 ? 0 : c.bytes, device, primary_owner(device));
	*green = got;
	return result;
}
EXPORT(cuGreenCtxCreate);

CUresult hook_cuGreenCtxDestroy(CUgreenCtx green)
{
	fn_cuGreenCtxDestroy *real = REAL(cuGreenCtxDestroy);
	struct context c;
	if (real == NULL)
		return CUDA_ERROR_NOT_SUPPORTED;
	bool known = context_take(context_of(green), &c);
	uint64_t owner = known ? primary_owner(c.primary) : 0;
	CUresult result = real(green);
	if (known && result == CUDA_SUCCESS) {
		context_settle(&c);
		primary_released(c.primary, owner);
	} else if (known) {
		context_restore(&c);
	}
	return result;
}
EXPORT(cuGreenCtxDestroy);
