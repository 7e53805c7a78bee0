/* SPDX-License-Identifier: Apache-2.0 */
#include "real.h"

#include "objects.h"

uintptr_t real_addresses[TABLE_SIZE];
static uintptr_t bases[TABLE_LIBRARIES]; /* of the library that addresses come from; 0: none yet */

static uintptr_t load(const uintptr_t *p) { return __atomic_load_n(p, __ATOMIC_ACQUIRE); }
static void store(uintptr_t *p, uintptr_t v) { __atomic_store_n(p, v, __ATOMIC_RELEASE); }

/* Two threads that do this at once store the same. */
static void fill(const struct object *o)
{
	for (int id = 0; id < TABLE_SIZE; id++)
		if (table[id].library == o->library)
			store(&real_addresses[id], elf_symbol(&o->view, table[id].symbol));
	store(&bases[o->library], o->view.base);
}

struct wanted {
	int library;
	uintptr_t base;
};

static bool fill_first(const struct object *o, void *arg)
{
	const struct wanted *w = arg;
	if (o->library != w->library)
		return false;
	fill(o);
	return true;
}

static bool is_known(const struct object *o, void *arg)
{
	const struct wanted *w = arg;
	return o->library == w->library && o->view.base == w->base;
}

table_function *real_search(enum table_id id)
{
	struct wanted w = { .library = table[id].library };
	/* A driver that does not have it is not searched again. */
	if (load(&bases[w.library]) == 0)
		objects_visit(fill_first, &w);
	return (table_function *)load(&real_addresses[id]);
}

void real_refresh(enum table_library library)
{
	struct wanted w = { (int)library, load(&bases[library]) };
	if (w.base == 0 || !objects_visit(is_known, &w))
		objects_visit(fill_first, &w);
}

struct note {
	enum table_id id;
	uintptr_t address;
};

static bool note_one(const struct object *o, void *arg)
{
	const struct note *n = arg;
	if (o->library < 0 || !object_holds(o, n->address))
		return false;
	if (o->library == table[n->id].library) {
		if (load(&bases[o->library]) != o->view.base)
			fill(o);
		/* Some ABIs are reachable only through cuGetProcAddress. */
		if (load(&real_addresses[n->id]) == 0)
			store(&real_addresses[n->id], n->address);
	}
	return true;
}

bool real_note(enum table_id id, uintptr_t address)
{
	struct note n = { id, address };
	return objects_visit(note_one, &n);
}

int real_find(uintptr_t address)
{
	for (int id = 0; id < TABLE_HOOKS; id++)
		if (address != 0 && load(&real_addresses[id]) == address)
			return id;
	return -1;
}

static bool exports_it(const struct object *o, void *arg)
{
	const uintptr_t *address = arg;
	return o->library >= 0 && object_holds(o, *address) && elf_exports(&o->view, *address);
}

bool real_exports(uintptr_t address) { return objects_visit(exports_it, &address); }
