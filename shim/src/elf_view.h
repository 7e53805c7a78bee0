/* SPDX-License-Identifier: Apache-2.0 */
/*
 * elf_view.h: reads the dynamic symbols of loaded objects, without asking the loader: no lock, no
 * allocation, no error state, and so no way back into dlsym.
 */
#ifndef GPUFENCE_ELF_VIEW_H
#define GPUFENCE_ELF_VIEW_H

#include <link.h>
#include <stdbool.h>
#include <stdint.h>

struct elf_view {
	uintptr_t base;
	const ElfW(Dyn) *dynamic;
};

/* The address of a defined function of that name, whatever its version, or 0. */
uintptr_t elf_symbol(const struct elf_view *object, const char *name);

/* DT_SONAME, or NULL. */
const char *elf_soname(const struct elf_view *object);

/* The index-th DT_NEEDED, or NULL. */
const char *elf_needed(const struct elf_view *object, unsigned int index);

/* Says whether a dynamic symbol lies at that address. */
bool elf_exports(const struct elf_view *object, uintptr_t address);

#endif
