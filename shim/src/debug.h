/* SPDX-License-Identifier: Apache-2.0 */
/*
 * debug.h: with GPUFENCE_DEBUG in the environment (not of a set-user-id program) one line on
 * standard error for each refusal and each driver function that is missing; else nothing, ever.
 * Called by hooks only, never from dlsym.
 */
#ifndef GPUFENCE_DEBUG_H
#define GPUFENCE_DEBUG_H

#include <stdint.h>

void debug_line(const char *what, const char *detail, uint64_t bytes);

#endif
