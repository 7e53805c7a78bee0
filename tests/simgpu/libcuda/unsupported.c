/* SPDX-License-Identifier: Apache-2.0 */
/*
 * unsupported.c: every entry point that nothing else in this library defines. Programs look up
 * the whole interface, and some give up if a name is missing; called, these say that the
 * driver does not support what they do. They are weak, so that a function with the name of one
 * replaces it. Each has a name of its own to hand on, so that no two are folded into one.
 */
#define NOT_SUPPORTED 801

static _Thread_local const char *last;

static int refuse(const char *name)
{
	last = name;
	return last ? NOT_SUPPORTED : 0;
}

#define ENTRY(name, version, stream, symbol)                                                          \
	__attribute__((weak, visibility("default"))) int unsupported_##symbol(void) __asm__(#symbol); \
	int unsupported_##symbol(void)                                                                \
	{                                                                                             \
		return refuse(#symbol);                                                               \
	}
#include "entry.def"
