/* SPDX-License-Identifier: Apache-2.0 */
/* cuda_launch.c: launches, of kernels that do nothing. */
#include "driver.h"

#define KERNEL(symbol)                                                                                                       \
	CUresult symbol(CUfunction f, unsigned int gx, unsigned int gy, unsigned int gz, unsigned int bx, unsigned int by,   \
			unsigned int bz, unsigned int shared, CUstream stream, void **params, void **extra)                  \
	{                                                                                                                    \
		ENTER();                                                                                                     \
		(void)f, (void)stream, (void)shared, (void)params, (void)extra;                                              \
		return gx * gy * gz == 0 || bx * by * bz == 0 ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;                     \
	}
KERNEL(cuLaunchKernel)
KERNEL(cuLaunchKernel_ptsz)

#define COOPERATIVE(symbol)                                                                                                  \
	CUresult symbol(CUfunction f, unsigned int gx, unsigned int gy, unsigned int gz, unsigned int bx, unsigned int by,   \
			unsigned int bz, unsigned int shared, CUstream stream, void **params)                                \
	{                                                                                                                    \
		ENTER();                                                                                                     \
		(void)f, (void)stream, (void)shared, (void)params;                                                           \
		return gx * gy * gz == 0 || bx * by * bz == 0 ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;                     \
	}
COOPERATIVE(cuLaunchCooperativeKernel)
COOPERATIVE(cuLaunchCooperativeKernel_ptsz)

#define KERNEL_EX(symbol)                                                                        \
	CUresult symbol(const CUlaunchConfig *config, CUfunction f, void **params, void **extra) \
	{                                                                                        \
		ENTER();                                                                         \
		(void)f, (void)params, (void)extra;                                              \
		return config == NULL ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;                 \
	}
KERNEL_EX(cuLaunchKernelEx)
KERNEL_EX(cuLaunchKernelEx_ptsz)

CUresult cuLaunchCooperativeKernelMultiDevice(CUDA_LAUNCH_PARAMS *list, unsigned int count, unsigned int flags)
{
	ENTER();
	(void)flags;
	return list == NULL || count == 0 ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

CUresult cuLaunch(CUfunction f)
{
	ENTER();
	(void)f;
	return CUDA_SUCCESS;
}

CUresult cuLaunchGrid(CUfunction f, int width, int height)
{
	ENTER();
	(void)f;
	return width <= 0 || height <= 0 ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

CUresult cuLaunchGridAsync(CUfunction f, int width, int height, CUstream stream)
{
	ENTER();
	(void)f, (void)stream;
	return width <= 0 || height <= 0 ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}
