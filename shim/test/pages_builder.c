/* SPDX-License-Identifier: Apache-2.0 */
#include "pages_builder.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#define MUST(x)                                                                         \
	do {                                                                            \
		if (!(x)) {                                                             \
			fprintf(stderr, "%s:%d: %s: %s\n", __FILE__, __LINE__, #x, strerror(errno)); \
			abort();                                                        \
		}                                                                       \
	} while (0)

static uint64_t get(const uint64_t *p) { return __atomic_load_n(p, __ATOMIC_SEQ_CST); }
static void set(uint64_t *p, uint64_t v) { __atomic_store_n(p, v, __ATOMIC_SEQ_CST); }

static uint32_t gpu_bytes(const struct builder *b) { return sizeof(struct gpufence_limits_gpu) + b->options.more_gpu; }
static uint32_t copy_bytes(const struct builder *b)
{
	return offsetof(struct gpufence_limits_copy, gpu) + GPUFENCE_GPUS * gpu_bytes(b) + b->options.more_copy;
}
static uint32_t limits_header(const struct builder *b)
{
	return offsetof(struct gpufence_limits, copies) + b->options.more_header;
}
static uint32_t slot_bytes(const struct builder *b) { return sizeof(struct gpufence_slot) + b->options.more_slot; }
static uint32_t ledger_header(const struct builder *b) { return GPUFENCE_LEDGER_HEADER_BYTES + b->options.more_header; }

static void path_of(const struct builder *b, const char *name, char path[320])
{
	MUST(snprintf(path, 320, "%s/%s", b->dir, name) < 320);
}

static unsigned char *create(const char *path, uint64_t bytes, mode_t mode)
{
	int fd = open(path, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
	MUST(fd >= 0);
	MUST(fchmod(fd, mode) == 0);
	MUST(ftruncate(fd, (off_t)bytes) == 0);
	void *m = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	MUST(m != MAP_FAILED);
	MUST(close(fd) == 0);
	return m;
}

static void make_dir(struct builder *b)
{
	const char *tmp = getenv("TMPDIR");
	MUST(snprintf(b->dir, sizeof b->dir, "%s/gpufence-test-XXXXXX", tmp != NULL && tmp[0] == '/' ? tmp : "/tmp") <
	     (int)sizeof b->dir);
	MUST(mkdtemp(b->dir) != NULL);
	MUST(chmod(b->dir, 0755) == 0);
}

static void make_limits(struct builder *b)
{
	char path[320];
	b->limits_bytes = limits_header(b) + 2 * (uint64_t)copy_bytes(b);
	path_of(b, GPUFENCE_LIMITS_NAME, path);
	b->limits_page = create(path, b->limits_bytes, 0444);
	struct gpufence_limits *l = builder_limits(b);
	l->magic = GPUFENCE_LIMITS_MAGIC;
	l->abi_major = GPUFENCE_ABI_MAJOR;
	l->abi_minor = GPUFENCE_ABI_MINOR;
	l->header_bytes = limits_header(b);
	l->total_bytes = b->limits_bytes;
	l->container_index = b->options.container_index;
	l->gpu_bytes = gpu_bytes(b);
	l->copy_bytes = copy_bytes(b);
	for (unsigned i = 0; i < 2; i++) {
		struct gpufence_limits_copy *c = builder_copy(b, i);
		c->crc32c = builder_crc(c, copy_bytes(b));
	}
}

void builder_init(struct builder *b, const struct builder_options *options)
{
	char path[320];
	memset(b, 0, sizeof *b);
	if (options != NULL)
		b->options = *options;
	if (b->options.slots == 0)
		b->options.slots = GPUFENCE_SLOTS;
	make_dir(b);
	make_limits(b);
	b->ledger_bytes = ledger_header(b) + (uint64_t)(b->options.slots + 1) * slot_bytes(b);
	path_of(b, GPUFENCE_LEDGER_NAME, path);
	b->ledger_page = create(path, b->ledger_bytes, 0666);
	struct gpufence_ledger *h = builder_ledger(b);
	h->magic = GPUFENCE_LEDGER_MAGIC;
	h->abi_major = GPUFENCE_ABI_MAJOR;
	h->abi_minor = GPUFENCE_ABI_MINOR;
	h->header_bytes = ledger_header(b);
	h->total_bytes = b->ledger_bytes;
	h->slot_count = b->options.slots;
	h->slot_bytes = slot_bytes(b);
	h->gpu_count_max = GPUFENCE_GPUS;
	b->ledger_fd = open(path, O_RDWR | O_CLOEXEC);
	MUST(b->ledger_fd >= 0);
}

void builder_join(struct builder *b, const struct builder *pod, uint32_t container_index)
{
	char from[320], to[320];
	memset(b, 0, sizeof *b);
	b->options = pod->options;
	b->options.container_index = container_index;
	make_dir(b);
	make_limits(b);
	path_of(pod, GPUFENCE_LEDGER_NAME, from);
	path_of(b, GPUFENCE_LEDGER_NAME, to);
	MUST(link(from, to) == 0);
	b->ledger_bytes = pod->ledger_bytes;
	b->ledger_fd = open(to, O_RDWR | O_CLOEXEC);
	MUST(b->ledger_fd >= 0);
	b->ledger_page = mmap(NULL, b->ledger_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, b->ledger_fd, 0);
	MUST(b->ledger_page != MAP_FAILED);
}

void builder_remove(struct builder *b)
{
	char path[320];
	MUST(munmap(b->limits_page, b->limits_bytes) == 0);
	MUST(munmap(b->ledger_page, b->ledger_bytes) == 0);
	MUST(close(b->ledger_fd) == 0);
	path_of(b, GPUFENCE_LIMITS_NAME, path);
	MUST(unlink(path) == 0 || errno == ENOENT);
	path_of(b, GPUFENCE_LEDGER_NAME, path);
	MUST(unlink(path) == 0 || errno == ENOENT);
	MUST(rmdir(b->dir) == 0);
}

void builder_uuid(unsigned n, uint8_t uuid[16])
{
	for (unsigned i = 0; i < 16; i++)
		uuid[i] = (uint8_t)(0xa0 + i);
	uuid[15] = (uint8_t)n;
}

struct gpufence_limits_gpu builder_gpu(unsigned n)
{
	struct gpufence_limits_gpu g;
	memset(&g, 0, sizeof g);
	builder_uuid(n, g.uuid);
	g.flags = GPUFENCE_GPU_PRESENT | GPUFENCE_GPU_FENCED;
	g.total_bytes = UINT64_C(16) << 30;
	g.context_bytes = UINT64_C(300) << 20;
	g.max_bytes = g.high_bytes = g.pod_max_bytes = g.pod_high_bytes = GPUFENCE_UNLIMITED;
	return g;
}

void builder_publish(struct builder *b, const struct gpufence_limits_gpu *gpu, unsigned count)
{
	struct gpufence_limits *l = builder_limits(b);
	uint64_t latch = get(&l->latch);
	uint64_t *to = (uint64_t *)(void *)builder_copy(b, (unsigned)(latch + 1) & 1);
	uint32_t bytes = copy_bytes(b);
	unsigned char *fresh = calloc(1, bytes);
	struct gpufence_limits_copy *c = (struct gpufence_limits_copy *)(void *)fresh;
	MUST(fresh != NULL);
	c->generation = latch + 1;
	c->gpu_count = count;
	for (unsigned i = 0; i < count; i++)
		memcpy(fresh + offsetof(struct gpufence_limits_copy, gpu) + (size_t)i * gpu_bytes(b), &gpu[i], sizeof gpu[i]);
	c->crc32c = builder_crc(c, bytes);
	/* Word by word: readers of the copy before last may still be at it. */
	for (uint32_t i = 0; i < bytes / 8; i++)
		set(&to[i], ((uint64_t *)(void *)fresh)[i]);
	free(fresh);
	set(&l->latch, latch + 1);
}

void builder_limit(struct builder *b, uint64_t max_bytes, uint64_t pod_max_bytes)
{
	struct gpufence_limits_gpu g = builder_gpu(0);
	g.max_bytes = max_bytes;
	g.pod_max_bytes = pod_max_bytes;
	builder_publish(b, &g, 1);
}

struct gpufence_limits *builder_limits(const struct builder *b) { return (void *)b->limits_page; }
struct gpufence_limits_copy *builder_copy(const struct builder *b, unsigned which)
{
	return (void *)(b->limits_page + limits_header(b) + (size_t)which * copy_bytes(b));
}
struct gpufence_ledger *builder_ledger(const struct builder *b) { return (void *)b->ledger_page; }
static uint64_t slot_at(const struct builder *b, uint32_t slot) { return ledger_header(b) + (uint64_t)slot * slot_bytes(b); }
struct gpufence_slot *builder_slot(const struct builder *b, uint32_t slot)
{
	return (void *)(b->ledger_page + slot_at(b, slot));
}

static bool lock(const struct builder *b, uint32_t slot, short type)
{
	struct flock f;
	memset(&f, 0, sizeof f);
	f.l_type = type;
	f.l_whence = SEEK_SET;
	f.l_start = (off_t)slot_at(b, slot);
	f.l_len = slot_bytes(b);
	if (fcntl(b->ledger_fd, F_OFD_SETLK, &f) == 0)
		return true;
	MUST(errno == EAGAIN || errno == EACCES);
	return false;
}

bool builder_lock_free(const struct builder *b, uint32_t slot)
{
	if (!lock(b, slot, F_WRLCK))
		return false;
	lock(b, slot, F_UNLCK);
	return true;
}

static uint32_t generation_of(uint64_t word) { return (uint32_t)(word >> GPUFENCE_UNITS_BITS); }
static unsigned state_of(uint64_t owner) { return (unsigned)(owner >> 32) & 0xff; }

bool builder_reclaim(struct builder *b, uint32_t slot, bool exited)
{
	struct gpufence_slot *s = builder_slot(b, slot);
	uint64_t owner = get(&s->owner);
	bool locked = lock(b, slot, F_WRLCK);
	if (!locked && !exited)
		return false;
	uint64_t next = ((uint64_t)generation_of(owner) + 1) & GPUFENCE_GENERATION_MASK;
	bool done = false;
	if (state_of(owner) != GPUFENCE_SLOT_FREE && get(&s->owner) == owner) {
		for (uint32_t i = 1; locked && i < slot_bytes(b) / 8; i++)
			set((uint64_t *)(void *)s + i, 0);
		done = __atomic_compare_exchange_n(&s->owner, &owner, next << GPUFENCE_UNITS_BITS, false, __ATOMIC_SEQ_CST,
						   __ATOMIC_SEQ_CST);
	}
	if (locked)
		lock(b, slot, F_UNLCK);
	return done;
}

unsigned builder_reclaim_pid(struct builder *b, uint32_t pid)
{
	unsigned n = 0;
	for (uint32_t i = 0; i < b->options.slots; i++) {
		uint64_t owner = get(&builder_slot(b, i)->owner);
		if (state_of(owner) != GPUFENCE_SLOT_FREE && (uint32_t)owner == pid && builder_reclaim(b, i, true))
			n++;
	}
	return n;
}

bool builder_clear_overflow(struct builder *b)
{
	struct gpufence_slot *s = builder_slot(b, b->options.slots);
	if (!lock(b, b->options.slots, F_WRLCK))
		return false;
	for (uint32_t i = 0; i < slot_bytes(b) / 8; i++)
		set((uint64_t *)(void *)s + i, 0);
	lock(b, b->options.slots, F_UNLCK);
	return true;
}

static uint64_t units_of(const struct gpufence_slot *s, unsigned gpu, uint32_t generation)
{
	uint64_t device = get(&s->gpu[gpu].device), managed = get(&s->gpu[gpu].managed), sum = 0;
	if (generation_of(device) == generation)
		sum += device & GPUFENCE_UNITS_MASK;
	if (generation_of(managed) == generation)
		sum += managed & GPUFENCE_UNITS_MASK;
	return sum;
}

uint64_t builder_charged(const struct builder *b, unsigned gpu)
{
	uint64_t units = units_of(builder_slot(b, b->options.slots), gpu, generation_of(get(&builder_slot(b, b->options.slots)->owner)));
	for (uint32_t i = 0; i < b->options.slots; i++) {
		const struct gpufence_slot *s = builder_slot(b, i);
		uint64_t owner = get(&s->owner);
		if (state_of(owner) == GPUFENCE_SLOT_LIVE)
			units += units_of(s, gpu, generation_of(owner));
	}
	return units * GPUFENCE_UNIT_BYTES;
}

unsigned builder_live(const struct builder *b)
{
	unsigned n = 0;
	for (uint32_t i = 0; i < b->options.slots; i++)
		n += state_of(get(&builder_slot(b, i)->owner)) == GPUFENCE_SLOT_LIVE;
	return n;
}

/* Bit by bit, so that it shares nothing with the implementation under test. */
uint32_t builder_crc(const struct gpufence_limits_copy *copy, uint32_t bytes)
{
	const unsigned char *p = (const unsigned char *)copy;
	uint32_t crc = UINT32_MAX;
	for (uint32_t i = 0; i < bytes; i++) {
		size_t field = offsetof(struct gpufence_limits_copy, crc32c);
		crc ^= i >= field && i < field + 4 ? 0 : p[i];
		for (int k = 0; k < 8; k++)
			crc = crc >> 1 ^ (crc & 1 ? UINT32_C(0x82f63b78) : 0);
	}
	return ~crc;
}
