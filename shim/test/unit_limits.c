/* SPDX-License-Identifier: Apache-2.0 */
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <sys/stat.h>

#include "../src/crc32c.h"
#include "../src/limits.h"
#include "../src/pages.h"
#include "pages_builder.h"
#include "unit.h"

static struct builder b;

static const char *limits_path(void)
{
	static char path[320];
	snprintf(path, sizeof path, "%s/limits", b.dir);
	return path;
}

static void crc_known_values(void)
{
	/* RFC 3720 B.4 */
	uint32_t zeros = CRC32C_BEGIN, ones = CRC32C_BEGIN, up = CRC32C_BEGIN;
	for (int i = 0; i < 4; i++) {
		uint64_t w = 0;
		for (int k = 7; k >= 0; k--)
			w = w << 8 | (uint64_t)(i * 8 + k);
		zeros = crc32c_word(zeros, 0);
		ones = crc32c_word(ones, UINT64_MAX);
		up = crc32c_word(up, w);
	}
	CHECK_U64(crc32c_end(zeros), 0x8a9136aa);
	CHECK_U64(crc32c_end(ones), 0x62a8ab43);
	CHECK_U64(crc32c_end(up), 0x46dd794e);
}

static void reads_what_was_published(void)
{
	struct limits l = { 0 };
	struct limits_gpu g;
	uint8_t uuid[16];
	struct gpufence_limits_gpu gpu[3] = { builder_gpu(0), builder_gpu(1), builder_gpu(2) };
	gpu[0].flags = 0; /* another container's */
	gpu[1].max_bytes = 111;
	gpu[2] = (struct gpufence_limits_gpu){ .flags = GPUFENCE_GPU_PRESENT | GPUFENCE_GPU_FENCED, .total_bytes = 1,
					       .context_bytes = 2, .max_bytes = 3, .high_bytes = 4, .pod_max_bytes = 5,
					       .pod_high_bytes = 6, .excess_bytes = 7, .pod_excess_bytes = 8, .module_bytes = 9 };
	builder_uuid(2, gpu[2].uuid);
	builder_init(&b, &(struct builder_options){ .container_index = 7 });
	CHECK_INT(limits_open(&l, limits_path()), 0);
	CHECK_U64(l.container_index, 7);
	builder_uuid(1, uuid);
	CHECK_INT(limits_find(&l, uuid), -1);
	CHECK(!limits_read(&l, 1, &g));
	builder_publish(&b, gpu, 3);
	CHECK_INT(limits_find(&l, uuid), 1);
	builder_uuid(0, uuid);
	CHECK_INT(limits_find(&l, uuid), -1);
	builder_uuid(9, uuid);
	CHECK_INT(limits_find(&l, uuid), -1);
	builder_uuid(2, uuid);
	CHECK_INT(limits_find(&l, uuid), 2);
	CHECK(limits_read(&l, 2, &g));
	CHECK_U64(g.total_bytes, 1);
	CHECK_U64(g.context_bytes, 2);
	CHECK_U64(g.max_bytes, 3);
	CHECK_U64(g.high_bytes, 4);
	CHECK_U64(g.pod_max_bytes, 5);
	CHECK_U64(g.pod_high_bytes, 6);
	CHECK_U64(g.excess_bytes, 7);
	CHECK_U64(g.pod_excess_bytes, 8);
	CHECK_U64(g.module_bytes, 9);
	CHECK(!limits_read(&l, 3, &g));
	CHECK(!limits_read(&l, 4000000, &g));
	builder_limits(&b)->sample = 42;
	CHECK_U64(limits_sample(&l), 42);
	builder_remove(&b);
}

static void refuses_garbage(void)
{
	struct limits l = { 0 };
	CHECK_INT(limits_open(&l, "/nonexistent/limits"), -ENOENT);
	CHECK_INT(limits_open(&l, "/dev/null/limits"), -ENOTDIR);
	CHECK_INT(limits_open(&l, "/dev/null"), -EINVAL);
	CHECK_INT(limits_open(&l, "/proc"), -EINVAL);
	builder_init(&b, NULL);
	struct gpufence_limits *h = builder_limits(&b), good = *h;
#define BAD(field, value)                                            \
	do {                                                         \
		h->field = (value);                                  \
		if (limits_open(&l, limits_path()) != -EINVAL)       \
			unit_fail("%s = %s was taken", #field, #value); \
		h->field = good.field;                               \
	} while (0)
	BAD(magic, 0);
	BAD(magic, GPUFENCE_LEDGER_MAGIC);
	BAD(abi_major, 0);
	BAD(abi_major, 2);
	BAD(header_bytes, 0);
	BAD(header_bytes, 0x78);
	BAD(header_bytes, 0x84);
	BAD(header_bytes, UINT32_MAX);
	BAD(header_bytes, UINT32_MAX - 7);
	BAD(total_bytes, 0);
	BAD(total_bytes, b.limits_bytes - 1);
	BAD(total_bytes, b.limits_bytes + 1);
	BAD(total_bytes, UINT64_MAX);
	BAD(gpu_bytes, 0);
	BAD(gpu_bytes, 0x78);
	BAD(gpu_bytes, 0x81);
	BAD(gpu_bytes, UINT32_MAX - 7);
	BAD(copy_bytes, 0);
	BAD(copy_bytes, 0x88);
	BAD(copy_bytes, good.copy_bytes + 8);
	BAD(copy_bytes, good.copy_bytes - 1);
	BAD(copy_bytes, UINT32_MAX - 7);
	CHECK_INT(limits_open(&l, limits_path()), 0);
	CHECK(truncate(limits_path(), (off_t)b.limits_bytes - 8) == 0);
	CHECK_INT(limits_open(&l, limits_path()), -EINVAL);
	CHECK(truncate(limits_path(), 16) == 0);
	CHECK_INT(limits_open(&l, limits_path()), -EINVAL);
	CHECK(truncate(limits_path(), 0) == 0);
	CHECK_INT(limits_open(&l, limits_path()), -EINVAL);
	builder_remove(&b);
}

/* A writer of the next minor version has appended everywhere. */
static void reads_a_newer_minor(void)
{
	struct limits l = { 0 };
	struct limits_gpu g;
	struct gpufence_limits_gpu gpu[2] = { builder_gpu(0), builder_gpu(1) };
	builder_init(&b, &(struct builder_options){ .more_header = 64, .more_gpu = 24, .more_copy = 40 });
	builder_limits(&b)->abi_minor = GPUFENCE_ABI_MINOR + 1;
	CHECK_INT(limits_open(&l, limits_path()), 0);
	for (unsigned i = 0; i < 3; i++) {
		gpu[1].max_bytes = 1000 + i;
		builder_publish(&b, gpu, 2);
		CHECK(limits_read(&l, 1, &g));
		CHECK_U64(g.max_bytes, 1000 + i);
	}
	builder_copy(&b, 0)->crc32c ^= 1;
	builder_copy(&b, 1)->crc32c ^= 1;
	/* From the private copy, which has our own layout. */
	builder_limits(&b)->latch += 1;
	CHECK(limits_read(&l, 1, &g));
	CHECK_U64(g.max_bytes, 1002);
	builder_remove(&b);
}

static void keeps_the_last_good_copy(void)
{
	struct limits l = { 0 };
	struct limits_gpu g;
	uint8_t uuid[16];
	builder_uuid(0, uuid);
	builder_init(&b, NULL);
	CHECK_INT(limits_open(&l, limits_path()), 0);
	builder_limit(&b, 100, 200);
	CHECK(limits_read(&l, 0, &g));
	/* A copy that is wrong although the latch stands still. */
	struct gpufence_limits *h = builder_limits(&b);
	struct gpufence_limits_copy *next = builder_copy(&b, (unsigned)(h->latch + 1) & 1);
	memset(next, 0xff, sizeof *next);
	__atomic_store_n(&h->latch, h->latch + 1, __ATOMIC_SEQ_CST);
	for (int i = 0; i < 3; i++) {
		CHECK(limits_read(&l, 0, &g));
		CHECK_U64(g.max_bytes, 100);
		CHECK_U64(g.pod_max_bytes, 200);
		CHECK_INT(limits_find(&l, uuid), 0);
	}
	/* And right again. */
	builder_limit(&b, 101, 201);
	CHECK(limits_read(&l, 0, &g));
	CHECK_U64(g.max_bytes, 101);
	builder_remove(&b);
}

static void never_good_is_nothing(void)
{
	struct limits l = { 0 };
	struct limits_gpu g;
	uint8_t uuid[16];
	builder_uuid(0, uuid);
	builder_init(&b, NULL);
	builder_limit(&b, 100, 200);
	builder_copy(&b, 0)->generation ^= 1;
	builder_copy(&b, 1)->generation ^= 1;
	CHECK_INT(limits_open(&l, limits_path()), 0);
	CHECK_INT(limits_find(&l, uuid), -1);
	CHECK(!limits_read(&l, 0, &g));
	builder_remove(&b);
}

/* gpufenced died in the middle of an update. */
static void half_an_update_is_not_seen(void)
{
	struct limits l = { 0 };
	struct limits_gpu g;
	builder_init(&b, NULL);
	builder_limit(&b, 100, 200);
	CHECK_INT(limits_open(&l, limits_path()), 0);
	CHECK(limits_read(&l, 0, &g));
	struct gpufence_limits_copy *next = builder_copy(&b, (unsigned)(builder_limits(&b)->latch + 1) & 1);
	memset((char *)next + 100, 0xee, 500);
	CHECK(limits_read(&l, 0, &g));
	CHECK_U64(g.max_bytes, 100);
	builder_remove(&b);
}

static int stop_writing;

static void *write_limits(void *arg)
{
	(void)arg;
	for (uint64_t i = 1; !__atomic_load_n(&stop_writing, __ATOMIC_RELAXED); i++) {
		struct gpufence_limits_gpu g = builder_gpu(0);
		g.total_bytes = i;
		g.context_bytes = 3 * i;
		g.max_bytes = 5 * i;
		g.excess_bytes = 7 * i;
		g.pod_excess_bytes = 11 * i;
		builder_publish(&b, &g, 1);
	}
	return NULL;
}

static void *read_limits(void *arg)
{
	struct limits *l = arg;
	uint64_t last = 0, end = pages_now_ns() + UINT64_C(1000000000);
	/* A writer that gets no core has written nothing yet. */
	while (pages_now_ns() < end || last < 2) {
		for (int i = 0; i < 100; i++) {
			struct limits_gpu g;
			CHECK(limits_read(l, 0, &g));
			uint64_t n = g.total_bytes;
			if (g.context_bytes != 3 * n || g.max_bytes != 5 * n || g.excess_bytes != 7 * n ||
			    g.pod_excess_bytes != 11 * n)
				unit_fail("torn: %llu %llu %llu", (unsigned long long)n, (unsigned long long)g.max_bytes,
					  (unsigned long long)g.pod_excess_bytes);
			last = n > last ? n : last;
		}
	}
	return NULL;
}

static void never_torn_under_a_writer(void)
{
	struct limits l = { 0 };
	pthread_t writer, reader[3];
	struct gpufence_limits_gpu g = builder_gpu(0);
	g.total_bytes = g.context_bytes = g.max_bytes = g.excess_bytes = g.pod_excess_bytes = 0;
	builder_init(&b, NULL);
	builder_publish(&b, &g, 1);
	CHECK_INT(limits_open(&l, limits_path()), 0);
	CHECK(pthread_create(&writer, NULL, write_limits, NULL) == 0);
	for (int i = 0; i < 3; i++)
		CHECK(pthread_create(&reader[i], NULL, read_limits, &l) == 0);
	for (int i = 0; i < 3; i++)
		CHECK(pthread_join(reader[i], NULL) == 0);
	__atomic_store_n(&stop_writing, 1, __ATOMIC_RELAXED);
	CHECK(pthread_join(writer, NULL) == 0);
	builder_remove(&b);
}

/* Not stale, unless this machine stood still for so long since a beat was seen. */
static void fresh(struct limits *l, uint64_t seen)
{
	bool stale = limits_stale(l);
	CHECK(!stale || pages_now_ns() - seen >= limits_stale_ns);
}

static void stale_only_after_its_time(void)
{
	struct limits l = { 0 };
	limits_stale_ns = UINT64_C(50000000);
	builder_init(&b, NULL);
	uint64_t seen = pages_now_ns();
	CHECK_INT(limits_open(&l, limits_path()), 0);
	uint64_t *beat = &builder_limits(&b)->heartbeat;
	fresh(&l, seen);
	pages_sleep_ns(UINT64_C(60000000));
	CHECK(limits_stale(&l));
	/* A beat that is seen only now proves nothing about the time before. */
	__atomic_fetch_add(beat, 1, __ATOMIC_SEQ_CST);
	seen = pages_now_ns();
	CHECK(!limits_stale(&l));
	fresh(&l, seen);
	pages_sleep_ns(UINT64_C(60000000));
	CHECK(limits_stale(&l));
	/* Back to an old number, as after a restart, is a beat too. */
	__atomic_store_n(beat, 0, __ATOMIC_SEQ_CST);
	CHECK(!limits_stale(&l));
	builder_remove(&b);
}

int main(int argc, char **argv)
{
	static const struct unit_test tests[] = {
		{ "crc32c: known values", crc_known_values },
		{ "limits: reads what was published", reads_what_was_published },
		{ "limits: refuses garbage", refuses_garbage },
		{ "limits: reads a newer minor version", reads_a_newer_minor },
		{ "limits: keeps the last good copy", keeps_the_last_good_copy },
		{ "limits: never good is nothing", never_good_is_nothing },
		{ "limits: half an update is not seen", half_an_update_is_not_seen },
		{ "limits: never torn under a writer", never_torn_under_a_writer },
		{ "limits: stale only after its time", stale_only_after_its_time },
		{ NULL, NULL },
	};
	return unit_main(tests, argc, argv);
}
