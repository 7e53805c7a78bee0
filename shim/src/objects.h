/* SPDX-License-Identifier: Apache-2.0 */
/*
 * objects.h: the objects of this process in the loader's order, and which of them are the
 * driver's libraries. A library is known by its file's name or its soname, so that versioned
 * files, compatibility folders and renamed copies count.
 */
#ifndef GPUFENCE_OBJECTS_H
#define GPUFENCE_OBJECTS_H

#include <stdbool.h>
#include <stdint.h>

#include "elf_view.h"
#include "table.h"

struct object {
	struct elf_view view;
	const char *name; /* the loader's; "" for the program */
	const struct dl_phdr_info *info;
	int library;      /* enum table_library, or -1 */
};

/* Calls visit for each object, under the loader's lock, until it returns true. Nothing of an
 * object may be kept: another thread may unload it. */
bool objects_visit(bool (*visit)(const struct object *, void *), void *arg);

bool object_holds(const struct object *, uintptr_t address);

/* The library that an address of the driver's lies in, or -1. */
int objects_library_at(uintptr_t address);

/* Says where the object at caller stands to this one: before it, or not. */
bool objects_before_us(uintptr_t caller);

/* Says whether an object after caller's and before this one defines name. */
bool objects_define_between(uintptr_t caller, const char *name);

/* The library of the first object after caller's, this one left out, that defines name; -1: it is
 * none of the driver's, or there is none. */
int objects_next_library(uintptr_t caller, const char *name);

/* Says whether the object at caller needs the driver's library, directly or through others. */
bool objects_need(uintptr_t caller, enum table_library library);

/* The next definition after this object in the loader's order (for an object that was loaded
 * late: the first at all), found without asking the loader. 0: none. */
uintptr_t objects_next(const char *name);

#endif
