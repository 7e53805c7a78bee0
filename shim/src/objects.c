/* SPDX-License-Identifier: Apache-2.0 */
#include "objects.h"

#include "text.h"

static bool named(const char *path, const char *library)
{
	const char *rest = path == NULL ? NULL : text_after(text_file(path), library);
	return rest != NULL && (*rest == 0 || *rest == '.');
}

static int library_of(const char *name, const char *soname)
{
	if (named(name, "libcuda.so") || named(soname, "libcuda.so"))
		return TABLE_CUDA;
	if (named(name, "libnvidia-ml.so") || named(soname, "libnvidia-ml.so"))
		return TABLE_NVML;
	return -1;
}

struct visit {
	bool (*call)(const struct object *, void *);
	void *arg;
};

static int visit_one(struct dl_phdr_info *info, size_t size, void *arg)
{
	const struct visit *v = arg;
	struct object o = { .name = info->dlpi_name == NULL ? "" : info->dlpi_name, .info = info, .library = -1 };
	(void)size;
	o.view.base = info->dlpi_addr;
	for (int i = 0; i < info->dlpi_phnum; i++)
		if (info->dlpi_phdr[i].p_type == PT_DYNAMIC)
			o.view.dynamic = (const void *)(info->dlpi_addr + info->dlpi_phdr[i].p_vaddr);
	if (o.view.dynamic == NULL)
		return 0;
	/* We may stand in for one (stub.h). */
	if (o.view.dynamic != _DYNAMIC)
		o.library = library_of(o.name, elf_soname(&o.view));
	return v->call(&o, v->arg);
}

typedef int fn_dl_iterate_phdr(int (*)(struct dl_phdr_info *, size_t, void *), void *);

/* The C library's own: sanitizers and some programs define one too, and ask dlsym for this. */
static fn_dl_iterate_phdr *iterate(void)
{
	static uintptr_t known;
	uintptr_t address = __atomic_load_n(&known, __ATOMIC_RELAXED);
	for (const struct link_map *m = _r_debug.r_map; address == 0 && m != NULL; m = m->l_next) {
		struct elf_view view = { m->l_addr, m->l_ld };
		const char *soname = elf_soname(&view);
		if (soname == NULL || !text_equal(soname, "libc.so.6"))
			continue;
		address = elf_symbol(&view, "dl_iterate_phdr");
		__atomic_store_n(&known, address, __ATOMIC_RELAXED);
	}
	return address != 0 ? (fn_dl_iterate_phdr *)address : dl_iterate_phdr;
}

bool objects_visit(bool (*call)(const struct object *, void *), void *arg)
{
	struct visit v = { call, arg };
	return iterate()(visit_one, &v) != 0;
}

bool object_holds(const struct object *o, uintptr_t address)
{
	for (int i = 0; i < o->info->dlpi_phnum; i++) {
		const ElfW(Phdr) *h = &o->info->dlpi_phdr[i];
		if (h->p_type == PT_LOAD && address - (o->view.base + h->p_vaddr) < h->p_memsz)
			return true;
	}
	return false;
}

struct at {
	uintptr_t address;
	int library;
};

static bool is_at(const struct object *o, void *arg)
{
	struct at *at = arg;
	if (o->library < 0 || !object_holds(o, at->address))
		return false;
	at->library = o->library;
	return true;
}

int objects_library_at(uintptr_t address)
{
	struct at at = { address, -1 };
	objects_visit(is_at, &at);
	return at.library;
}

struct order {
	uintptr_t caller;
	const char *name;
	bool passed; /* the caller */
	bool before; /* the caller comes before us */
	bool defined;
	int library;
};

static bool follow_order(const struct object *o, void *arg)
{
	struct order *order = arg;
	if (o->view.dynamic == _DYNAMIC) {
		order->before = order->passed;
		return true;
	}
	if (order->passed && order->name != NULL && elf_symbol(&o->view, order->name) != 0)
		order->defined = true;
	if (object_holds(o, order->caller))
		order->passed = true;
	return false;
}

bool objects_before_us(uintptr_t caller)
{
	struct order order = { .caller = caller };
	objects_visit(follow_order, &order);
	return order.before;
}

bool objects_define_between(uintptr_t caller, const char *name)
{
	struct order order = { .caller = caller, .name = name };
	objects_visit(follow_order, &order);
	return order.before && order.defined;
}

static bool follow_next(const struct object *o, void *arg)
{
	struct order *order = arg;
	if (order->passed && o->view.dynamic != _DYNAMIC && elf_symbol(&o->view, order->name) != 0) {
		order->library = o->library;
		return true;
	}
	if (object_holds(o, order->caller))
		order->passed = true;
	return false;
}

int objects_next_library(uintptr_t caller, const char *name)
{
	struct order order = { .caller = caller, .name = name, .library = -1 };
	objects_visit(follow_next, &order);
	return order.library;
}

/* Dependencies as a graph over the loader's list; an object's number is its place in it. */
#define OBJECTS_MAX 1024
#define DEPTH_MAX 32

struct graph {
	uint8_t seen[OBJECTS_MAX / 8];
	int library;
	unsigned int depth;
};

static bool reaches(const struct object *, struct graph *);

struct search {
	struct graph *graph;
	const char *needed;
	unsigned int number;
	bool found;
};

static bool follow(const struct object *o, void *arg)
{
	struct search *s = arg;
	unsigned int number = s->number++;
	const char *soname = elf_soname(&o->view);
	if (number >= OBJECTS_MAX)
		return true;
	if ((soname == NULL || !text_equal(soname, s->needed)) && !text_equal(text_file(o->name), s->needed))
		return false;
	if ((s->graph->seen[number / 8] & (1u << number % 8)) == 0) {
		s->graph->seen[number / 8] |= (uint8_t)(1u << number % 8);
		s->found = reaches(o, s->graph);
	}
	return true;
}

static bool reaches(const struct object *o, struct graph *graph)
{
	const char *needed;
	bool found = o->library == graph->library;
	if (graph->depth == DEPTH_MAX)
		return found;
	graph->depth++;
	for (unsigned int i = 0; !found && (needed = elf_needed(&o->view, i)) != NULL; i++) {
		struct search s = { .graph = graph, .needed = needed };
		objects_visit(follow, &s);
		found = s.found;
	}
	graph->depth--;
	return found;
}

struct start {
	uintptr_t caller;
	struct graph graph;
	bool found;
};

static bool start_at(const struct object *o, void *arg)
{
	struct start *s = arg;
	if (!object_holds(o, s->caller))
		return false;
	s->found = reaches(o, &s->graph);
	return true;
}

bool objects_need(uintptr_t caller, enum table_library library)
{
	struct start s = { .caller = caller, .graph = { .library = (int)library } };
	objects_visit(start_at, &s);
	return s.found;
}

/*
 * The loader's list without its lock: what is looked for was there when the program started,
 * at the head of a list that only grows at its tail.
 */
uintptr_t objects_next(const char *name)
{
	const struct link_map *us = NULL, *m;
	struct elf_view view;
	uintptr_t found;
	for (m = _r_debug.r_map; m != NULL; m = m->l_next) {
		if (m->l_ld == _DYNAMIC) {
			us = m;
			continue;
		}
		view = (struct elf_view){ m->l_addr, m->l_ld };
		if (us != NULL && (found = elf_symbol(&view, name)) != 0)
			return found;
	}
	for (m = _r_debug.r_map; m != NULL && m != us; m = m->l_next) {
		view = (struct elf_view){ m->l_addr, m->l_ld };
		if ((found = elf_symbol(&view, name)) != 0)
			return found;
	}
	return 0;
}
