/* SPDX-License-Identifier: Apache-2.0 */
/*
 * range.c: what lies at which address, and the contents of device memory.
 */
#include "internal.h"

#include <search.h>
#include <sys/mman.h>

/* ---- ranges ------------------------------------------------------------------------ */

static void *tree;           /* of struct range; no two of them overlap */
static struct range *all;    /* the same, as a list */
static unsigned long long last_id;

/* Ranges that touch the same address are "equal": a lookup is one for a range of one byte. */
static int compare(const void *a, const void *b)
{
	const struct range *x = a, *y = b;

	if (x->end <= y->start)
		return -1;
	return x->start >= y->end;
}

struct range *range_find(uintptr_t at)
{
	struct range key = {.start = at, .end = at + 1};
	struct range **node;

	if (at == UINTPTR_MAX)
		return NULL;
	node = tfind(&key, &tree, compare);
	return node ? *node : NULL;
}

struct range *range_at(uintptr_t start)
{
	struct range *r = range_find(start);

	return r && r->start == start ? r : NULL;
}

/* NULL: no memory for it, or something lies there. */
struct range *range_add(uintptr_t start, size_t size, enum range_kind kind)
{
	struct range *r = calloc(1, sizeof(*r)), **node;

	if (!r)
		return NULL;
	r->start = start;
	r->end = start + size;
	r->kind = kind;
	r->preferred = r->prefetched = SIM_NOWHERE;
	node = r->end > start ? tsearch(r, &tree, compare) : NULL;
	if (!node || *node != r) {
		free(r);
		return NULL;
	}
	r->id = ++last_id;
	r->next = all;
	if (all)
		all->prev = r;
	all = r;
	return r;
}

void range_remove(struct range *r)
{
	tdelete(r, &tree, compare);
	if (r->prev)
		r->prev->next = r->next;
	else
		all = r->next;
	if (r->next)
		r->next->prev = r->prev;
	free(r);
}

static bool direct(const struct range *r)
{
	return r->direct || r->kind == RANGE_MANAGED || r->kind == RANGE_HOST || r->kind == RANGE_REGISTERED;
}

bool range_covers(uintptr_t at, size_t n)
{
	struct range *r;
	size_t part;

	while (n > 0) {
		r = range_find(at);
		if (!r || (r->kind == RANGE_MAPPED && r->access == CU_MEM_ACCESS_FLAGS_PROT_NONE))
			return false;
		part = r->end - at;
		if (part >= n)
			return true;
		at += part;
		n -= part;
	}
	return true;
}

/* ---- address space ----------------------------------------------------------------- */

/* Address space of `size` bytes, a multiple of 2 MiB and aligned to it; low: below 4 GiB. */
void *map_device(size_t size, bool low)
{
	int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
	uintptr_t at, start;
	void *map;

	if (size > SIZE_MAX - PAGE)
		return NULL;
	if (low) {
#ifdef MAP_32BIT
		flags |= MAP_32BIT;
#else
		return NULL; /* nothing to ask the kernel for such addresses with */
#endif
	}
	map = mmap(NULL, size + PAGE, PROT_NONE, flags, -1, 0);
	if (map == MAP_FAILED)
		return NULL;
	at = (uintptr_t)map;
	start = (at + PAGE - 1) & ~(uintptr_t)(PAGE - 1);
	if (start > at)
		munmap(map, start - at);
	munmap((void *)(start + size), at + PAGE - start);
	return (void *)start;
}

void unmap_device(uintptr_t start, size_t size)
{
	contents_drop(start, size);
	munmap((void *)start, size);
}

void range_unmap(struct range *r)
{
	if (r->mapped)
		unmap_device(r->base ? r->base : r->start, r->mapped);
}

struct range *range_by_token(struct device *dev, uint64_t token)
{
	struct range *r;

	for (r = all; r; r = r->next)
		if (r->token == token && r->dev == dev && r->kind == RANGE_SHARED)
			return r;
	return NULL;
}

/* Any range of that kind on dev, or NULL. */
struct range *range_of_kind(struct device *dev, enum range_kind kind)
{
	struct range *r;

	for (r = all; r; r = r->next)
		if (r->kind == kind && r->dev == dev)
			return r;
	return NULL;
}

/* ---- shared pages ------------------------------------------------------------------ */

struct small_page {
	struct small_page *next;
	struct device *dev;
	CUcontext ctx;
	uint64_t handle;
	uintptr_t start;
};

static struct small_page *small_pages;

void *page_for_small(struct device *dev, CUcontext ctx, uint64_t handle, bool low)
{
	struct small_page *p;

	for (p = small_pages; p; p = p->next)
		if (p->dev == dev && p->handle == handle)
			return (void *)p->start;
	p = calloc(1, sizeof(*p));
	if (!p)
		return NULL;
	/* Low if it can be: then the oldest form of cuMemAlloc can share the page. */
	p->start = (uintptr_t)map_device(PAGE, true);
	if (p->start == 0 && !low)
		p->start = (uintptr_t)map_device(PAGE, false);
	if (p->start == 0) {
		free(p);
		return NULL;
	}
	p->dev = dev;
	p->ctx = ctx;
	p->handle = handle;
	p->next = small_pages;
	small_pages = p;
	return (void *)p->start;
}

void drop_small_page(struct device *dev, uint64_t handle)
{
	struct small_page **at, *p;

	for (at = &small_pages; (p = *at); at = &p->next) {
		if (p->dev == dev && p->handle == handle) {
			*at = p->next;
			unmap_device(p->start, PAGE);
			free(p);
			return;
		}
	}
}

/* simgpud has freed everything in ctx: so do we. */
void ranges_forget_context(CUcontext ctx)
{
	struct small_page **at, *p;
	struct range *r, *next;

	for (r = all; r; r = next) {
		next = r->next;
		if (!r->ctx || r->ctx != ctx || r->kind == RANGE_REGISTERED || r->kind == RANGE_HOST)
			continue;
		range_unmap(r);
		range_remove(r);
	}
	for (at = &small_pages; (p = *at);) {
		if (p->ctx != ctx) {
			at = &p->next;
			continue;
		}
		*at = p->next;
		unmap_device(p->start, PAGE);
		free(p);
	}
}

/* ---- contents ---------------------------------------------------------------------- */

static uintptr_t *backed;    /* pages with memory behind them, sorted */
static size_t backed_count, backed_room;

static size_t backed_index(uintptr_t page)
{
	size_t low = 0, high = backed_count;

	while (low < high) {
		size_t mid = low + (high - low) / 2;

		if (backed[mid] < page)
			low = mid + 1;
		else
			high = mid;
	}
	return low;
}

static bool has_backing(uintptr_t page)
{
	size_t i = backed_index(page);

	return i < backed_count && backed[i] == page;
}

/* Puts memory behind a page; false: the bound is reached, or there is none. */
static bool back(uintptr_t page, size_t bound_mib)
{
	size_t i = backed_index(page), room;
	uintptr_t *bigger;

	if (backed_count >= bound_mib / (PAGE >> 20))
		return false;
	if (backed_count == backed_room) {
		room = backed_room ? 2 * backed_room : 64;
		bigger = realloc(backed, room * sizeof(*backed));
		if (!bigger)
			return false;
		backed = bigger;
		backed_room = room;
	}
	if (mprotect((void *)page, PAGE, PROT_READ | PROT_WRITE) < 0)
		return false;
	memmove(&backed[i + 1], &backed[i], (backed_count - i) * sizeof(*backed));
	backed[i] = page;
	backed_count++;
	return true;
}

void contents_drop(uintptr_t start, size_t size)
{
	size_t from = backed_index(start), to = backed_index(start + size), i;

	if (from == to)
		return;
	for (i = from; i < to; i++) {
		madvise((void *)backed[i], PAGE, MADV_DONTNEED);
		mprotect((void *)backed[i], PAGE, PROT_NONE);
	}
	memmove(&backed[from], &backed[to], (backed_count - to) * sizeof(*backed));
	backed_count -= to - from;
}

/*
 * Where the contents of `at` are, for *n bytes, of which it leaves as many as lie together.
 * NULL: nowhere. Read, these are zeros; written, they are lost.
 */
static char *locate(uintptr_t at, size_t *n, bool write)
{
	struct range *r = range_find(at);
	uintptr_t page = at & ~(uintptr_t)(PAGE - 1);

	if (!r)
		return (char *)at; /* the host's */
	if (*n > r->end - at)
		*n = r->end - at;
	if (direct(r))
		return (char *)at;
	if (*n > page + PAGE - at)
		*n = page + PAGE - at;
	if (has_backing(page) || (write && back(page, r->dev->info.backing_mib)))
		return (char *)at;
	return NULL;
}

void contents_copy(uintptr_t to, uintptr_t from, size_t n)
{
	while (n > 0) {
		size_t part = n;
		const char *source = locate(from, &part, false);
		char *target = locate(to, &part, source != NULL);

		if (target && source)
			memmove(target, source, part);
		else if (target)
			memset(target, 0, part);
		to += part;
		from += part;
		n -= part;
	}
}

/* Writes `count` times the `width` bytes of pattern. Managed memory is filled up to the bound
 * of contents only, so that a test that fills gigabytes does not take the host's memory. */
CUresult contents_fill(uintptr_t to, const void *pattern, size_t width, size_t count)
{
	static const char zeros[8];
	bool zero = memcmp(pattern, zeros, width) == 0;
	size_t n, direct_left = SIZE_MAX;
	struct range *r = range_find(to);

	if (count > SIZE_MAX / width || to % width != 0)
		return CUDA_ERROR_INVALID_VALUE;
	n = count * width;
	if (!range_covers(to, n))
		return CUDA_ERROR_INVALID_VALUE;
	if (r && r->kind == RANGE_MANAGED)
		direct_left = (size_t)r->dev->info.backing_mib << 20;
	while (n > 0) {
		size_t part = n, i;
		char *target = locate(to, &part, !zero);

		if (target && width == 1) {
			memset(target, *(const unsigned char *)pattern, part < direct_left ? part : direct_left);
		} else if (target) {
			for (i = 0; i < part && i < direct_left; i += width)
				memcpy(target + i, pattern, width);
		}
		if (direct_left != SIZE_MAX)
			direct_left -= part < direct_left ? part : direct_left;
		to += part;
		n -= part;
	}
	return CUDA_SUCCESS;
}
