/* SPDX-License-Identifier: Apache-2.0 */
/*
 * unsupported.c: every function of NVML that nothing else in this library defines. The real library has
 * them all, and says of a GPU that cannot do what is asked that it cannot: a client takes a missing
 * function for a driver that is too old. They are weak, so that a function with the name of one replaces it.
 */
#include "nvml_abi.h"

#define ENTRY(symbol)                                                                                 \
	__attribute__((weak, visibility("default"))) int unsupported_##symbol(void) __asm__(#symbol); \
	int unsupported_##symbol(void)                                                                \
	{                                                                                             \
		return sim_nvml_refuse();                                                             \
	}
#include "functions.def"
