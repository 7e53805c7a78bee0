/* SPDX-License-Identifier: Apache-2.0 */
#include "stream.h"

#include "pages.h"
#include "real.h"

static bool is_default(CUstream stream) { return stream == NULL || stream == CU_STREAM_LEGACY || stream == CU_STREAM_PER_THREAD; }

bool stream_captures(CUstream stream, bool per_thread)
{
	fn_cuStreamIsCapturing *ask = per_thread ? REAL(cuStreamIsCapturing_ptsz) : REAL(cuStreamIsCapturing);
	int status = CU_STREAM_CAPTURE_STATUS_NONE;
	return ask != NULL && ask(stream, &status) == CUDA_SUCCESS && status != CU_STREAM_CAPTURE_STATUS_NONE;
}

static CUdevice current_device(void)
{
	fn_cuCtxGetDevice *get = REAL(cuCtxGetDevice);
	CUdevice device;
	return get != NULL && get(&device) == CUDA_SUCCESS ? device : -1;
}

CUdevice stream_device(CUstream stream)
{
	fn_cuStreamGetDevice *get_device = REAL(cuStreamGetDevice);
	fn_cuStreamGetCtx *get_context = REAL(cuStreamGetCtx);
	fn_cuCtxGetCurrent *get_current = REAL(cuCtxGetCurrent);
	fn_cuCtxPushCurrent_v2 *push = REAL(cuCtxPushCurrent_v2);
	fn_cuCtxPopCurrent_v2 *pop = REAL(cuCtxPopCurrent_v2);
	CUcontext context = NULL, current = NULL;
	CUdevice device;
	if (is_default(stream))
		return current_device();
	if (get_device != NULL && get_device(stream, &device) == CUDA_SUCCESS)
		return device;
	/* Drivers before CUDA 12.8 know only a stream's context, and only the current one's device. */
	if (get_context == NULL || get_context(stream, &context) != CUDA_SUCCESS)
		return -1;
	if (get_current != NULL && get_current(&current) == CUDA_SUCCESS && current == context)
		return current_device();
	if (push == NULL || pop == NULL || push(context) != CUDA_SUCCESS)
		return -1;
	device = current_device();
	(void)pop(&context); /* what was pushed */
	return device;
}

uintptr_t stream_id(CUstream stream, bool per_thread)
{
	/* Odd, as no handle is. */
	if (stream == CU_STREAM_PER_THREAD || (stream == NULL && per_thread))
		return (uintptr_t)pages_thread() | 1;
	return stream == CU_STREAM_LEGACY ? 0 : (uintptr_t)stream;
}
