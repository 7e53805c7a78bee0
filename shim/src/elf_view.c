/* SPDX-License-Identifier: Apache-2.0 */
#include "elf_view.h"

#include <elf.h>

#include "text.h"

#define WORD_BITS (8 * sizeof(ElfW(Addr)))

struct tables {
	const ElfW(Sym) *symbols;
	const char *strings;
	const uint32_t *gnu_hash;
	const uint32_t *hash;
};

static const ElfW(Dyn) *entry(const struct elf_view *o, ElfW(Sxword) tag)
{
	for (const ElfW(Dyn) *d = o->dynamic; d != NULL && d->d_tag != DT_NULL; d++)
		if (d->d_tag == tag)
			return d;
	return NULL;
}

/* The loader has added the base to these addresses where it can write to the section. */
static const void *pointer(const struct elf_view *o, ElfW(Sxword) tag)
{
	const ElfW(Dyn) *d = entry(o, tag);
	if (d == NULL || d->d_un.d_ptr == 0)
		return NULL;
	return (const void *)(uintptr_t)(d->d_un.d_ptr < o->base ? d->d_un.d_ptr + o->base : d->d_un.d_ptr);
}

static bool open_tables(const struct elf_view *o, struct tables *t)
{
	t->symbols = pointer(o, DT_SYMTAB);
	t->strings = pointer(o, DT_STRTAB);
	t->gnu_hash = pointer(o, DT_GNU_HASH);
	t->hash = pointer(o, DT_HASH);
	return t->symbols != NULL && t->strings != NULL && (t->gnu_hash != NULL || t->hash != NULL);
}

static uintptr_t value(const struct elf_view *o, const ElfW(Sym) *s)
{
	unsigned char type = s->st_info & 0xf, binding = (unsigned char)(s->st_info >> 4);
	if (s->st_shndx == SHN_UNDEF || (type != STT_FUNC && type != STT_NOTYPE) || binding == STB_LOCAL)
		return 0;
	return o->base + s->st_value;
}

struct gnu {
	uint32_t buckets_count, first, words_count, shift;
	const ElfW(Addr) *words;
	const uint32_t *buckets, *chain;
};

static struct gnu open_gnu(const uint32_t *h)
{
	struct gnu g = { .buckets_count = h[0], .first = h[1], .words_count = h[2], .shift = h[3] };
	g.words = (const void *)(h + 4);
	g.buckets = (const void *)(g.words + g.words_count);
	g.chain = g.buckets + g.buckets_count;
	return g;
}

static uintptr_t find_gnu(const struct elf_view *o, const struct tables *t, const char *name)
{
	struct gnu g = open_gnu(t->gnu_hash);
	uint32_t hash = 5381;
	for (const unsigned char *c = (const unsigned char *)name; *c != 0; c++)
		hash = hash * 33 + *c;
	if (g.buckets_count == 0 || g.words_count == 0)
		return 0;
	ElfW(Addr) word = g.words[(hash / WORD_BITS) & (g.words_count - 1)];
	ElfW(Addr) mask = (ElfW(Addr))1 << (hash % WORD_BITS) | (ElfW(Addr))1 << ((hash >> g.shift) % WORD_BITS);
	if ((word & mask) != mask)
		return 0;
	uint32_t i = g.buckets[hash % g.buckets_count];
	if (i < g.first)
		return 0;
	for (;; i++) {
		uint32_t h = g.chain[i - g.first];
		if ((h | 1) == (hash | 1) && text_equal(t->strings + t->symbols[i].st_name, name)) {
			uintptr_t found = value(o, &t->symbols[i]);
			if (found != 0)
				return found;
		}
		if (h & 1)
			return 0;
	}
}

static uintptr_t find_sysv(const struct elf_view *o, const struct tables *t, const char *name)
{
	uint32_t hash = 0, buckets_count = t->hash[0];
	for (const unsigned char *c = (const unsigned char *)name; *c != 0; c++) {
		hash = (hash << 4) + *c;
		hash ^= (hash >> 24) & 0xf0;
		hash &= 0x0fffffff;
	}
	if (buckets_count == 0)
		return 0;
	const uint32_t *chain = t->hash + 2 + buckets_count;
	for (uint32_t i = t->hash[2 + hash % buckets_count]; i != STN_UNDEF; i = chain[i]) {
		if (!text_equal(t->strings + t->symbols[i].st_name, name))
			continue;
		uintptr_t found = value(o, &t->symbols[i]);
		if (found != 0)
			return found;
	}
	return 0;
}

uintptr_t elf_symbol(const struct elf_view *o, const char *name)
{
	struct tables t;
	if (!open_tables(o, &t))
		return 0;
	return t.gnu_hash != NULL ? find_gnu(o, &t, name) : find_sysv(o, &t, name);
}

static uint32_t symbols_count(const struct tables *t)
{
	if (t->hash != NULL)
		return t->hash[1];
	struct gnu g = open_gnu(t->gnu_hash);
	uint32_t last = 0;
	for (uint32_t b = 0; b < g.buckets_count; b++)
		if (g.buckets[b] > last)
			last = g.buckets[b];
	if (last < g.first)
		return g.first;
	while ((g.chain[last - g.first] & 1) == 0)
		last++;
	return last + 1;
}

bool elf_exports(const struct elf_view *o, uintptr_t address)
{
	struct tables t;
	if (!open_tables(o, &t))
		return false;
	for (uint32_t i = 0, n = symbols_count(&t); i < n; i++)
		if (value(o, &t.symbols[i]) == address)
			return true;
	return false;
}

const char *elf_soname(const struct elf_view *o)
{
	const char *strings = pointer(o, DT_STRTAB);
	const ElfW(Dyn) *d = entry(o, DT_SONAME);
	return strings == NULL || d == NULL ? NULL : strings + d->d_un.d_val;
}

const char *elf_needed(const struct elf_view *o, unsigned int index)
{
	const char *strings = pointer(o, DT_STRTAB);
	if (strings == NULL)
		return NULL;
	for (const ElfW(Dyn) *d = o->dynamic; d != NULL && d->d_tag != DT_NULL; d++)
		if (d->d_tag == DT_NEEDED && index-- == 0)
			return strings + d->d_un.d_val;
	return NULL;
}
