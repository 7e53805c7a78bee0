/* SPDX-License-Identifier: Apache-2.0 */
#include "limits.h"

#include <errno.h>
#include <string.h>

#include "crc32c.h"
#include "pages.h"

#define TRIES 8
#define COPY_BYTES_MAX (64u * 1024)
#define PAGE_BYTES_MAX (1u << 20)

uint64_t limits_stale_ns = GPUFENCE_STALE_NS;

static const struct gpufence_limits *header(const struct limits *l)
{
	return (const struct gpufence_limits *)(const void *)l->page;
}

static const uint64_t *words(const unsigned char *at) { return (const uint64_t *)(const void *)at; }

/* A writer of a later minor version may have appended: its sizes may be greater than ours. */
static int check(const struct gpufence_limits *h, uint64_t file_bytes)
{
	if (h->magic != GPUFENCE_LIMITS_MAGIC || h->abi_major != GPUFENCE_ABI_MAJOR)
		return -EINVAL;
	if (h->total_bytes > file_bytes || h->total_bytes > PAGE_BYTES_MAX)
		return -EINVAL;
	if (h->header_bytes < offsetof(struct gpufence_limits, copies) || h->header_bytes % 8 != 0)
		return -EINVAL;
	if (h->gpu_bytes < sizeof(struct gpufence_limits_gpu) || h->gpu_bytes % 8 != 0)
		return -EINVAL;
	if (h->copy_bytes < offsetof(struct gpufence_limits_copy, gpu) + h->gpu_bytes || h->copy_bytes % 8 != 0 ||
	    h->copy_bytes > COPY_BYTES_MAX)
		return -EINVAL;
	if ((uint64_t)h->header_bytes + 2 * (uint64_t)h->copy_bytes > h->total_bytes)
		return -EINVAL;
	return 0;
}

int limits_open(struct limits *l, const char *path)
{
	struct gpufence_limits h;
	int fd = pages_open(path, false);
	if (fd < 0)
		return fd;
	int64_t size = pages_size(fd);
	int r = size < 0 ? (int)size : pages_read(fd, &h, offsetof(struct gpufence_limits, copies));
	if (r == 0)
		r = check(&h, (uint64_t)size);
	else if (r == -ENODATA || r == -ENODEV)
		r = -EINVAL;
	if (r == 0) {
		l->size = h.total_bytes;
		l->header_bytes = h.header_bytes;
		l->gpu_bytes = h.gpu_bytes;
		l->copy_bytes = h.copy_bytes;
		l->gpus = (h.copy_bytes - (uint32_t)offsetof(struct gpufence_limits_copy, gpu)) / h.gpu_bytes;
		if (l->gpus > GPUFENCE_GPUS)
			l->gpus = GPUFENCE_GPUS;
		l->container_index = h.container_index;
		l->page = pages_map(fd, l->size, false);
		if (l->page == NULL)
			r = -ENOMEM;
	}
	pages_close(fd);
	if (r == 0) {
		l->beat_since_ns = pages_now_ns();
		l->beat = word_load_relaxed(&header(l)->heartbeat);
	}
	return r;
}

static const unsigned char *copy_of(const struct limits *l, uint64_t latch)
{
	return l->page + l->header_bytes + (latch & 1) * l->copy_bytes;
}

/* Copies a verified copy into the private ones. */
static void save(struct limits *l, const uint64_t *from)
{
	const unsigned head = offsetof(struct gpufence_limits_copy, gpu) / 8;
	const unsigned ours = sizeof(struct gpufence_limits_gpu) / 8;
	uint64_t *to = l->copies[(l->saved + 1) & 1];
	for (unsigned i = 0; i < head; i++)
		word_store(&to[i], word_load_acquire(&from[i]));
	for (unsigned g = 0; g < l->gpus; g++)
		for (unsigned i = 0; i < ours; i++)
			word_store(&to[head + g * ours + i], word_load_acquire(&from[head + g * (l->gpu_bytes / 8) + i]));
}

/* Whether the copy of this latch value may be used. Called once for each value. */
static bool verify(struct limits *l, uint64_t latch)
{
	const uint64_t *from = words(copy_of(l, latch));
	uint32_t crc = CRC32C_BEGIN, want = 0;
	if (word_load_relaxed(&l->broken) == latch + 1)
		return false;
	for (unsigned i = 0; i < l->copy_bytes / 8; i++) {
		uint64_t w = word_load_acquire(&from[i]);
		if (i == offsetof(struct gpufence_limits_copy, gpu_count) / 8) {
			want = (uint32_t)(w >> 32);
			w &= UINT32_MAX;
		}
		crc = crc32c_word(crc, w);
	}
	if (word_load_relaxed(&header(l)->latch) != latch)
		return false; /* torn, or perhaps: the caller looks again */
	if (crc32c_end(crc) != want) {
		word_store_relaxed(&l->broken, latch + 1);
		return false;
	}
	if (pages_try_lock(&l->saving)) {
		save(l, from);
		if (word_load_relaxed(&header(l)->latch) == latch)
			word_store(&l->saved, l->saved + 1);
		pages_unlock(&l->saving);
	}
	word_store(&l->verified, latch + 1);
	return true;
}

/*
 * for (reader_begin(&r, l); reader_next(&r);) { read; if (reader_whole(&r)) return; }
 */
struct reader {
	struct limits *l;
	const unsigned char *copy;
	uint32_t gpu_bytes;
	uint64_t latch;
	unsigned tries;
	bool saved;
};

static void reader_begin(struct reader *r, struct limits *l)
{
	r->l = l;
	r->tries = 0;
	r->saved = false;
}

static bool reader_next(struct reader *r)
{
	struct limits *l = r->l;
	while (r->tries++ < TRIES) {
		r->latch = word_load_acquire(&header(l)->latch);
		if (word_load_relaxed(&l->verified) != r->latch + 1 && !verify(l, r->latch))
			continue;
		r->copy = copy_of(l, r->latch);
		r->gpu_bytes = l->gpu_bytes;
		return true;
	}
	/* Each further turn means that another thread saved a newer copy. */
	r->saved = true;
	r->latch = word_load_acquire(&l->saved);
	r->copy = (const unsigned char *)l->copies[r->latch & 1];
	r->gpu_bytes = sizeof(struct gpufence_limits_gpu);
	return r->latch != 0;
}

/* What was read by acquire loads since reader_next is of one copy. */
static bool reader_whole(const struct reader *r)
{
	return word_load_relaxed(r->saved ? &r->l->saved : &header(r->l)->latch) == r->latch;
}

static unsigned reader_gpus(const struct reader *r)
{
	uint64_t w = word_load_acquire(words(r->copy) + offsetof(struct gpufence_limits_copy, gpu_count) / 8);
	uint32_t n = (uint32_t)w;
	return n < r->l->gpus ? n : r->l->gpus;
}

static const uint64_t *reader_gpu(const struct reader *r, unsigned gpu)
{
	return words(r->copy + offsetof(struct gpufence_limits_copy, gpu) + (size_t)gpu * r->gpu_bytes);
}

#define FIELD(g, name) word_load_acquire((g) + offsetof(struct gpufence_limits_gpu, name) / 8)

bool limits_read(struct limits *l, unsigned gpu, struct limits_gpu *to)
{
	struct reader r;
	for (reader_begin(&r, l); reader_next(&r);) {
		bool there = gpu < reader_gpus(&r);
		if (there) {
			const uint64_t *g = reader_gpu(&r, gpu);
			to->flags = FIELD(g, flags);
			to->total_bytes = FIELD(g, total_bytes);
			to->context_bytes = FIELD(g, context_bytes);
			to->max_bytes = FIELD(g, max_bytes);
			to->high_bytes = FIELD(g, high_bytes);
			to->swap_max_bytes = FIELD(g, swap_max_bytes);
			to->pod_max_bytes = FIELD(g, pod_max_bytes);
			to->pod_high_bytes = FIELD(g, pod_high_bytes);
			to->pod_swap_max_bytes = FIELD(g, pod_swap_max_bytes);
			to->excess_bytes = FIELD(g, excess_bytes);
			to->pod_excess_bytes = FIELD(g, pod_excess_bytes);
			to->module_bytes = FIELD(g, module_bytes);
		}
		if (reader_whole(&r))
			return there;
	}
	return false;
}

int limits_find(struct limits *l, const uint8_t uuid[16])
{
	uint64_t want[2];
	struct reader r;
	memcpy(want, uuid, sizeof want);
	for (reader_begin(&r, l); reader_next(&r);) {
		int found = -1;
		unsigned n = reader_gpus(&r);
		for (unsigned i = 0; i < n; i++) {
			const uint64_t *g = reader_gpu(&r, i);
			if ((FIELD(g, flags) & GPUFENCE_GPU_PRESENT) && word_load_acquire(g) == want[0] &&
			    word_load_acquire(g + 1) == want[1]) {
				found = (int)i;
				break;
			}
		}
		if (reader_whole(&r))
			return found;
	}
	return -1;
}

const uint64_t *limits_latch(const struct limits *l) { return &header(l)->latch; }

uint64_t limits_sample(const struct limits *l) { return word_load_acquire(&header(l)->sample); }

bool limits_stale(struct limits *l)
{
	uint64_t beat = word_load_relaxed(&header(l)->heartbeat);
	uint64_t now = pages_now_ns();
	if (beat != word_load_relaxed(&l->beat)) {
		/* Time first: a thread between the two stores sees the old beat with a time that is
		 * too young, never a new beat with an old time. */
		word_store(&l->beat_since_ns, now);
		word_store(&l->beat, beat);
		return false;
	}
	uint64_t since = word_load_acquire(&l->beat_since_ns);
	return now > since && now - since >= limits_stale_ns;
}
