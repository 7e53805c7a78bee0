/* SPDX-License-Identifier: Apache-2.0 */
/*
 * timed.c: makes a build of the shim that times its reserves: the very objects of the release, but
 * that the linker leads each call of account_reserve through here (--wrap).
 */
#include "timed.h"

#include "../src/account.h"
#include "apart.h"

__attribute__((visibility("default"))) struct timed *gpufence_timed;

int __real_account_reserve(int gpu, enum account_counter counter, uint64_t bytes);
int __wrap_account_reserve(int gpu, enum account_counter counter, uint64_t bytes);
int __wrap_account_reserve(int gpu, enum account_counter counter, uint64_t bytes)
{
	struct timed *to = __atomic_load_n(&gpufence_timed, __ATOMIC_RELAXED);
	if (to == NULL)
		return __real_account_reserve(gpu, counter, bytes);
	struct apart_moment begin = apart_now();
	int r = __real_account_reserve(gpu, counter, bytes);
	struct apart took = apart_since(&begin);
	__atomic_fetch_add(&to->reserves, 1, __ATOMIC_RELAXED);
	apart_raise(&to->wall_ns, took.wall_ns);
	apart_raise(&to->apart_ns, took.apart_ns);
	apart_raise(&to->cpu_ns, took.cpu_ns);
	return r;
}
