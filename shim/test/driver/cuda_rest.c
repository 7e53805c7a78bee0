/* SPDX-License-Identifier: Apache-2.0 */
/* cuda_rest.c: every hooked function that no other part of the driver has: recorded, and refused. */
#define DRIVER_REST
#include "driver.h"

#define REST_NVML(symbol)
#define REST_CUDA(symbol)                                   \
	API __attribute__((weak)) CUresult symbol(void);    \
	CUresult symbol(void)                               \
	{                                                   \
		ENTER();                                    \
		return CUDA_ERROR_NOT_SUPPORTED;            \
	}
#define REST(library, symbol, name, version, stream) REST_##library(symbol)
TABLE_HOOKED(REST)
