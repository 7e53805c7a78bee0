/* SPDX-License-Identifier: Apache-2.0 */
/*
 * hooks_launch.c: launches, which wait above memory.high (high.h). Otherwise a load, a branch, and a
 * jump to the driver's function, with the arguments where they are.
 */
#include "high.h"
#include "real.h"

#define LAUNCHES(symbol, after, ...)                         \
	do {                                                 \
		fn_##symbol *real = REAL(symbol);            \
		if (__builtin_expect(real == NULL, 0))       \
			return CUDA_ERROR_NOT_SUPPORTED;     \
		if (__builtin_expect(account_calm(), 1))     \
			return real(__VA_ARGS__);            \
		CUresult result = real(__VA_ARGS__);         \
		if (result == CUDA_SUCCESS)                  \
			after;                               \
		return result;                               \
	} while (0)

#define KERNEL(symbol, per_thread)                                                                                            \
	CUresult hook_##symbol(CUfunction f, unsigned int gx, unsigned int gy, unsigned int gz, unsigned int bx,              \
			       unsigned int by, unsigned int bz, unsigned int shared, CUstream stream, void **params,         \
			       void **extra)                                                                                  \
	{                                                                                                                     \
		LAUNCHES(symbol, high_launched(stream, per_thread), f, gx, gy, gz, bx, by, bz, shared, stream, params, extra); \
	}                                                                                                                     \
	EXPORT(symbol)

KERNEL(cuLaunchKernel, false);
KERNEL(cuLaunchKernel_ptsz, true);

#define KERNEL_EX(symbol, per_thread)                                                                              \
	CUresult hook_##symbol(const CUlaunchConfig *config, CUfunction f, void **params, void **extra)            \
	{                                                                                                          \
		LAUNCHES(symbol, high_launched(config->hStream, per_thread), config, f, params, extra);            \
	}                                                                                                          \
	EXPORT(symbol)

KERNEL_EX(cuLaunchKernelEx, false);
KERNEL_EX(cuLaunchKernelEx_ptsz, true);

#define COOPERATIVE(symbol, per_thread)                                                                                   \
	CUresult hook_##symbol(CUfunction f, unsigned int gx, unsigned int gy, unsigned int gz, unsigned int bx,          \
			       unsigned int by, unsigned int bz, unsigned int shared, CUstream stream, void **params)     \
	{                                                                                                                 \
		LAUNCHES(symbol, high_launched(stream, per_thread), f, gx, gy, gz, bx, by, bz, shared, stream, params);   \
	}                                                                                                                 \
	EXPORT(symbol)

COOPERATIVE(cuLaunchCooperativeKernel, false);
COOPERATIVE(cuLaunchCooperativeKernel_ptsz, true);

CUresult hook_cuLaunchCooperativeKernelMultiDevice(CUDA_LAUNCH_PARAMS *list, unsigned int count, unsigned int flags)
{
	LAUNCHES(cuLaunchCooperativeKernelMultiDevice, high_launched_list(list, count), list, count, flags);
}
EXPORT(cuLaunchCooperativeKernelMultiDevice);

CUresult hook_cuLaunch(CUfunction f) { LAUNCHES(cuLaunch, high_launched(NULL, false), f); }
EXPORT(cuLaunch);

CUresult hook_cuLaunchGrid(CUfunction f, int width, int height)
{
	LAUNCHES(cuLaunchGrid, high_launched(NULL, false), f, width, height);
}
EXPORT(cuLaunchGrid);

CUresult hook_cuLaunchGridAsync(CUfunction f, int width, int height, CUstream stream)
{
	LAUNCHES(cuLaunchGridAsync, high_launched(stream, false), f, width, height, stream);
}
EXPORT(cuLaunchGridAsync);
