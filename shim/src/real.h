/* SPDX-License-Identifier: Apache-2.0 */
/*
 * real.h: the driver's own functions. They are found by reading the loaded library's symbols,
 * so it does not matter how the program got it (linked, dlopen with RTLD_LOCAL, as a plugin's
 * dependency), and a hook can never be sent back to a hook. The library is never loaded from
 * here and never kept.
 */
#ifndef GPUFENCE_REAL_H
#define GPUFENCE_REAL_H

#include <stdbool.h>
#include <stdint.h>

#include "table.h"

/* NULL: the driver is not loaded or does not have it. Once found, one load: launches pay for it. */
extern uintptr_t real_addresses[TABLE_SIZE];
table_function *real_search(enum table_id id);
static inline table_function *real_function(enum table_id id)
{
	uintptr_t address = __atomic_load_n(&real_addresses[id], __ATOMIC_ACQUIRE);
	return __builtin_expect(address != 0, 1) ? (table_function *)address : real_search(id);
}
#define REAL(symbol) ((fn_##symbol *)real_function(ID_##symbol))

/* Says that the loader, or the driver, answered with this address for that row: the library
 * that it lies in is the one to call. False: it lies in none of the driver's libraries. */
bool real_note(enum table_id id, uintptr_t address);

/* Finds the library again if it was unloaded. Called where a program starts to use it. */
void real_refresh(enum table_library library);

/* The row whose function this is, or -1. */
int real_find(uintptr_t address);

/* Says whether the driver exports a function at this address under any name. */
bool real_exports(uintptr_t address);

#endif
