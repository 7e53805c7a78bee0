/* SPDX-License-Identifier: Apache-2.0 */
/* check.h: what the tests of the simulated libcuda count failures with. */
#ifndef SIMGPU_CHECK_H
#define SIMGPU_CHECK_H

#include <stdio.h>

#define MIB ((size_t)1 << 20)
#define GIB ((size_t)1 << 30)
#define CONTEXT (104 * MIB)
#define CAPACITY ((16384 - 164) * MIB)

static int failures;

#define WANT(expr, want)                                                                                        \
	do {                                                                                                    \
		long long got_ = (long long)(expr), want_ = (long long)(want);                                  \
		if (got_ != want_) {                                                                            \
			fprintf(stderr, "%s:%d: %s is %lld, want %lld\n", __FILE__, __LINE__, #expr, got_, want_); \
			failures++;                                                                             \
		}                                                                                               \
	} while (0)
#define OK(expr) WANT(expr, CUDA_SUCCESS)

#endif /* SIMGPU_CHECK_H */
