/* SPDX-License-Identifier: Apache-2.0 */
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/stat.h>

#include "../src/ledger.h"
#include "../src/pages.h"
#include "pages_builder.h"
#include "unit.h"

static struct builder b;
static struct ledger l;

static const char *ledger_path(void)
{
	static char path[320];
	snprintf(path, sizeof path, "%s/ledger", b.dir);
	return path;
}

static void start(uint32_t slots)
{
	builder_init(&b, &(struct builder_options){ .slots = slots });
	memset(&l, 0, sizeof l);
	CHECK_INT(ledger_open(&l, ledger_path()), 0);
}

static int own_file(void)
{
	int fd = pages_open(ledger_path(), true);
	CHECK(fd >= 0);
	return fd;
}

static uint32_t claim(int fd, uint32_t pid, uint32_t container, uint32_t *generation)
{
	uint32_t slot = 0;
	struct ledger_self self = { pid, container, 77, 88 };
	CHECK_INT(ledger_claim(&l, fd, &self, false, &slot, generation), 0);
	return slot;
}

static void set_owner(uint32_t slot, uint32_t generation, unsigned state, uint32_t pid)
{
	builder_slot(&b, slot)->owner = ledger_owner(generation, state, pid);
	if (builder_ledger(&b)->high_slot <= slot)
		builder_ledger(&b)->high_slot = slot + 1;
}

static uint64_t counter(uint32_t generation, uint64_t units) { return (uint64_t)generation << GPUFENCE_UNITS_BITS | units; }

static void refuses_garbage(void)
{
	CHECK_INT(ledger_open(&l, "/nonexistent/ledger"), -ENOENT);
	CHECK_INT(ledger_open(&l, "/dev/null"), -EINVAL);
	CHECK_INT(ledger_open(&l, "/proc"), -EISDIR);
	builder_init(&b, &(struct builder_options){ .slots = 4 });
	struct gpufence_ledger *h = builder_ledger(&b), good = *h;
#define BAD(field, value)                                            \
	do {                                                         \
		h->field = (value);                                  \
		if (ledger_open(&l, ledger_path()) != -EINVAL)       \
			unit_fail("%s = %s was taken", #field, #value); \
		h->field = good.field;                               \
	} while (0)
	BAD(magic, 0);
	BAD(magic, GPUFENCE_LIMITS_MAGIC);
	BAD(abi_major, 0);
	BAD(abi_major, 2);
	BAD(header_bytes, 0);
	BAD(header_bytes, 4032);
	BAD(header_bytes, 4100);
	BAD(header_bytes, UINT32_MAX);
	BAD(header_bytes, UINT32_MAX - 63);
	BAD(total_bytes, 0);
	BAD(total_bytes, good.total_bytes - 1);
	BAD(total_bytes, good.total_bytes + 1);
	BAD(total_bytes, UINT64_MAX);
	BAD(slot_count, 0);
	BAD(slot_count, 5);
	BAD(slot_count, 65535);
	BAD(slot_count, UINT32_MAX);
	BAD(slot_bytes, 0);
	BAD(slot_bytes, 0x80);
	BAD(slot_bytes, good.slot_bytes - 64);
	BAD(slot_bytes, good.slot_bytes + 8);
	BAD(slot_bytes, UINT32_MAX);
	BAD(gpu_count_max, 0);
	BAD(gpu_count_max, 15);
	BAD(gpu_count_max, 17);
	BAD(gpu_count_max, UINT32_MAX);
	memset(h, 0xff, 4096);
	CHECK_INT(ledger_open(&l, ledger_path()), -EINVAL);
	*h = good;
	CHECK_INT(ledger_open(&l, ledger_path()), 0);
	CHECK(truncate(ledger_path(), (off_t)b.ledger_bytes - 1) == 0);
	CHECK_INT(ledger_open(&l, ledger_path()), -EINVAL);
	CHECK(truncate(ledger_path(), 10) == 0);
	CHECK_INT(ledger_open(&l, ledger_path()), -EINVAL);
	builder_remove(&b);
}

static void claims_the_lowest_free(void)
{
	uint32_t generation;
	start(4);
	int first = own_file(), second = own_file(), third = own_file();
	set_owner(1, 9, GPUFENCE_SLOT_DYING, 5);
	builder_slot(&b, 0)->owner = ledger_owner(4, GPUFENCE_SLOT_FREE, 0);
	builder_slot(&b, 0)->gpu[3].device = counter(4, 1234);
	builder_slot(&b, 0)->gpu[3].peak[1] = counter(4, 1234);
	builder_slot(&b, 0)->gpu[3].events_max = 6;
	builder_slot(&b, 0)->allocs = 6;
	CHECK_U64(claim(first, 100, 3, &generation), 0);
	CHECK_U64(generation, 5);
	struct gpufence_slot *s = builder_slot(&b, 0);
	CHECK_U64(s->owner, ledger_owner(5, GPUFENCE_SLOT_LIVE, 100));
	CHECK_U64(s->container_index, 3);
	CHECK_U64(s->pidns_inode, 77);
	CHECK_U64(s->start_ticks, 88);
	CHECK_U64(s->shim_abi, (uint32_t)GPUFENCE_ABI_MAJOR << 16 | GPUFENCE_ABI_MINOR);
	CHECK_U64(s->allocs, 0);
	for (unsigned g = 0; g < GPUFENCE_GPUS; g++) {
		CHECK_U64(s->gpu[g].device, counter(5, 0));
		CHECK_U64(s->gpu[g].managed, counter(5, 0));
		CHECK_U64(s->gpu[g].swap, counter(5, 0));
		CHECK_U64(s->gpu[g].peak[1], 0);
	}
	CHECK_U64(s->gpu[3].events_max, 6);
	CHECK(!builder_lock_free(&b, 0));
	CHECK_U64(claim(second, 101, 3, &generation), 2);
	CHECK_U64(builder_ledger(&b)->high_slot, 3);
	CHECK_U64(claim(third, 102, 3, &generation), 3);
	CHECK_U64(builder_ledger(&b)->high_slot, 4);
	uint32_t slot = 99;
	struct ledger_self self = { 103, 0, 0, 0 };
	int fourth = own_file();
	CHECK_INT(ledger_claim(&l, fourth, &self, false, &slot, &generation), -EAGAIN);
	/* Free by its word, but somebody has the lock: a child of a former owner. */
	s->owner = ledger_owner(6, GPUFENCE_SLOT_FREE, 0);
	CHECK_INT(ledger_claim(&l, fourth, &self, false, &slot, &generation), -EAGAIN);
	pages_close(first);
	CHECK_INT(ledger_claim(&l, fourth, &self, false, &slot, &generation), 0);
	CHECK_U64(slot, 0);
	CHECK_U64(generation, 7);
	builder_remove(&b);
}

static void generation_wraps(void)
{
	uint32_t generation;
	start(1);
	int fd = own_file();
	builder_slot(&b, 0)->owner = ledger_owner(GPUFENCE_GENERATION_MASK, GPUFENCE_SLOT_FREE, 0);
	claim(fd, 1, 0, &generation);
	CHECK_U64(generation, 0);
	CHECK_INT(ledger_add(&l, 0, 0, 0, LEDGER_DEVICE, 5), 0);
	CHECK_INT(ledger_add(&l, 0, (uint32_t)GPUFENCE_GENERATION_MASK, 0, LEDGER_DEVICE, 5), -ESTALE);
	builder_remove(&b);
}

static void takes_over_only_the_dead(void)
{
	uint32_t slot, generation;
	struct ledger_self self = { 200, 1, 0, 0 };
	start(2);
	int living = own_file(), mine = own_file();
	CHECK_U64(claim(living, 100, 0, &generation), 0);
	set_owner(1, 41, GPUFENCE_SLOT_LIVE, 101); /* nobody has its lock */
	builder_slot(&b, 1)->gpu[0].device = counter(41, 7);
	builder_slot(&b, 1)->gpu[0].events_max = 3;
	CHECK_INT(ledger_claim(&l, mine, &self, false, &slot, &generation), -EAGAIN);
	CHECK_INT(ledger_claim(&l, mine, &self, true, &slot, &generation), 0);
	CHECK_U64(slot, 1);
	CHECK_U64(generation, 42);
	CHECK_U64(builder_slot(&b, 1)->gpu[0].device, counter(42, 0));
	CHECK_U64(builder_slot(&b, 1)->gpu[0].events_max, 3);
	CHECK(!builder_lock_free(&b, 1));
	/* The former owner, should it come back, changes nothing. */
	CHECK_INT(ledger_add(&l, 1, 41, 0, LEDGER_DEVICE, 1), -ESTALE);
	CHECK_INT(ledger_sub(&l, 1, 41, 0, LEDGER_DEVICE, 1, NULL), -ESTALE);
	CHECK(!ledger_owned(&l, 1, 41));
	CHECK(ledger_owned(&l, 1, 42));
	int other = own_file();
	CHECK_INT(ledger_claim(&l, other, &self, true, &slot, &generation), -EAGAIN);
	builder_remove(&b);
}

static void counters_keep_their_bounds(void)
{
	uint32_t generation;
	start(2);
	int fd = own_file();
	uint32_t slot = claim(fd, 1, 0, &generation);
	CHECK_INT(ledger_add(&l, slot, generation, 15, LEDGER_SWAP, 3), 0);
	CHECK_U64(builder_slot(&b, slot)->gpu[15].swap, counter(generation, 3));
	CHECK_INT(ledger_add(&l, slot, generation, 0, LEDGER_DEVICE, GPUFENCE_UNITS_MASK - 1), 0);
	CHECK_INT(ledger_add(&l, slot, generation, 0, LEDGER_DEVICE, 2), -EOVERFLOW);
	CHECK_INT(ledger_add(&l, slot, generation, 0, LEDGER_DEVICE, GPUFENCE_UNITS_MASK), -EOVERFLOW);
	CHECK_INT(ledger_add(&l, slot, generation, 0, LEDGER_DEVICE, 1), 0);
	CHECK_U64(builder_slot(&b, slot)->gpu[0].device, counter(generation, GPUFENCE_UNITS_MASK));
	CHECK_INT(ledger_sub(&l, slot, generation, 0, LEDGER_DEVICE, GPUFENCE_UNITS_MASK - 5, NULL), 0);
	CHECK_INT(ledger_sub(&l, slot, generation, 0, LEDGER_DEVICE, 6, NULL), 0);
	CHECK_U64(builder_slot(&b, slot)->gpu[0].device, counter(generation, 0));
	CHECK_INT(ledger_sub(&l, slot, generation, 0, LEDGER_DEVICE, 1, NULL), 0);
	CHECK_U64(builder_slot(&b, slot)->gpu[0].device, counter(generation, 0));
	CHECK_U64(builder_slot(&b, slot)->gpu[0].managed, counter(generation, 0));
	builder_remove(&b);
}

static void peaks_belong_to_samples(void)
{
	uint32_t generation;
	uint64_t sample = 6;
	start(2);
	int fd = own_file();
	uint32_t slot = claim(fd, 1, 0, &generation);
	struct gpufence_slot_gpu *g = &builder_slot(&b, slot)->gpu[0];
	ledger_add(&l, slot, generation, 0, LEDGER_DEVICE, 10);
	ledger_peak(&l, slot, generation, 0, sample);
	CHECK_U64(g->peak[0], counter(6, 10));
	ledger_sub(&l, slot, generation, 0, LEDGER_DEVICE, 4, &sample);
	ledger_add(&l, slot, generation, 0, LEDGER_DEVICE, 1);
	ledger_peak(&l, slot, generation, 0, sample);
	CHECK_U64(g->peak[0], counter(6, 10));
	/* The first touch in a new sample, a free, keeps what was held before it. */
	sample = 7;
	ledger_sub(&l, slot, generation, 0, LEDGER_DEVICE, 7, &sample);
	CHECK_U64(g->peak[1], counter(7, 7));
	CHECK_U64(g->peak[0], counter(6, 10));
	sample = 8;
	ledger_add(&l, slot, generation, 0, LEDGER_DEVICE, 2);
	ledger_peak(&l, slot, generation, 0, sample);
	CHECK_U64(g->peak[0], counter(8, 2));
	/* Managed memory is not what NVML shows, a stale owner keeps no peak, numbers wrap. */
	sample = 9;
	ledger_add(&l, slot, generation, 0, LEDGER_MANAGED, 50);
	ledger_sub(&l, slot, generation, 0, LEDGER_MANAGED, 50, &sample);
	ledger_peak(&l, slot, generation + 1, 0, sample);
	CHECK_U64(g->peak[1], counter(7, 7));
	ledger_peak(&l, slot, generation, 0, (UINT64_C(1) << 24) + 11);
	CHECK_U64(g->peak[1], counter(11, 2));
	builder_remove(&b);
}

static void sums_what_counts(void)
{
	start(8);
	for (uint32_t i = 0; i < 6; i++) {
		set_owner(i, 10 + i, GPUFENCE_SLOT_LIVE, 100 + i);
		builder_slot(&b, i)->container_index = i % 2;
		builder_slot(&b, i)->gpu[1].device = counter(10 + i, UINT64_C(1) << (2 * i));
		builder_slot(&b, i)->gpu[1].managed = counter(10 + i, UINT64_C(2) << (2 * i));
		builder_slot(&b, i)->gpu[1].swap = counter(10 + i, 1000000);
		builder_slot(&b, i)->gpu[0].device = counter(10 + i, 1000000);
	}
	struct ledger_sum sum = ledger_sum(&l, 1, 0);
	CHECK_U64(sum.pod_units, 0xfff);
	CHECK_U64(sum.container_units, 0x333);
	CHECK_U64(ledger_sum(&l, 1, 1).container_units, 0xccc);
	CHECK_U64(ledger_sum(&l, 1, 5).container_units, 0);
	set_owner(5, 15, GPUFENCE_SLOT_DYING, 105);
	CHECK_U64(ledger_sum(&l, 1, 1).pod_units, 0x3ff);
	set_owner(4, 14, GPUFENCE_SLOT_FREE, 0);
	CHECK_U64(ledger_sum(&l, 1, 1).pod_units, 0xff);
	set_owner(3, 14, GPUFENCE_SLOT_LIVE, 103); /* another generation than its counters */
	CHECK_U64(ledger_sum(&l, 1, 1).pod_units, 0x3f);
	set_owner(0, 10, 0x77, 100); /* no state that we know */
	CHECK_U64(ledger_sum(&l, 1, 1).pod_units, 0x3c);
	/* The overflow slot counts for all, whatever its owner word says. */
	builder_slot(&b, 8)->gpu[1].device = counter(0, 0x1000);
	CHECK_U64(ledger_sum(&l, 1, 1).pod_units, 0x103c);
	CHECK_U64(ledger_sum(&l, 1, 9).container_units, 0x1000);
	/* The hint is only a hint. */
	builder_ledger(&b)->high_slot = UINT64_MAX;
	CHECK_U64(ledger_sum(&l, 1, 1).pod_units, 0x103c);
	builder_remove(&b);
}

static void garbage_does_not_crash(void)
{
	uint32_t slot, generation;
	start(8);
	memset(b.ledger_page + GPUFENCE_LEDGER_HEADER_BYTES, 0xff, b.ledger_bytes - GPUFENCE_LEDGER_HEADER_BYTES);
	builder_ledger(&b)->high_slot = UINT64_MAX;
	ledger_sum(&l, 0, 0);
	int fd = own_file();
	struct ledger_self self = { 1, 0, 0, 0 };
	CHECK_INT(ledger_claim(&l, fd, &self, false, &slot, &generation), -EAGAIN);
	CHECK_INT(ledger_free_lost(&l, fd, 0), 0);
	CHECK_INT(ledger_claim_overflow(&l, fd, &slot, &generation), 0);
	CHECK_U64(ledger_sum(&l, 0, 0).pod_units, 0);
	for (uint32_t i = 0; i < 8; i++)
		set_owner(i, (uint32_t)GPUFENCE_GENERATION_MASK, GPUFENCE_SLOT_LIVE, UINT32_MAX);
	CHECK_U64(ledger_sum(&l, 0, UINT32_MAX).container_units, 16 * GPUFENCE_UNITS_MASK);
	builder_remove(&b);
}

static void overflow_is_shared(void)
{
	uint32_t slot, generation;
	start(1);
	builder_slot(&b, 1)->gpu[2].managed = counter(0, 55); /* left by the killed */
	builder_slot(&b, 1)->gpu[2].events_high = 5;
	int first = own_file(), second = own_file(), third = own_file();
	CHECK_INT(ledger_claim_overflow(&l, first, &slot, &generation), 0);
	CHECK_U64(slot, 1);
	CHECK_U64(generation, 0);
	CHECK_U64(builder_slot(&b, 1)->gpu[2].managed, 0);
	CHECK_U64(builder_slot(&b, 1)->gpu[2].events_high, 5);
	CHECK_INT(ledger_add(&l, slot, generation, 2, LEDGER_DEVICE, 9), 0);
	CHECK_INT(ledger_claim_overflow(&l, second, &slot, &generation), 0);
	CHECK_U64(builder_slot(&b, 1)->gpu[2].device, 9);
	CHECK(!builder_clear_overflow(&b));
	pages_close(first);
	CHECK(!builder_clear_overflow(&b));
	CHECK_INT(ledger_claim_overflow(&l, third, &slot, &generation), 0);
	CHECK_U64(builder_slot(&b, 1)->gpu[2].device, 9);
	pages_close(second);
	pages_close(third);
	CHECK(builder_clear_overflow(&b));
	CHECK_U64(builder_slot(&b, 1)->gpu[2].device, 0);
	/* Somebody is clearing it. */
	CHECK_INT(pages_file_lock(b.ledger_fd, PAGES_LOCK_EXCLUSIVE, 4096 + sizeof(struct gpufence_slot), 1), 0);
	int fourth = own_file();
	CHECK_INT(ledger_claim_overflow(&l, fourth, &slot, &generation), -EAGAIN);
	builder_remove(&b);
}

static void frees_only_the_lost(void)
{
	uint32_t generation;
	start(4);
	int living = own_file(), mine = own_file();
	CHECK_U64(claim(living, 100, 0, &generation), 0);
	ledger_add(&l, 0, generation, 0, LEDGER_DEVICE, 5);
	for (uint32_t i = 1; i < 4; i++) {
		set_owner(i, 20, i == 3 ? GPUFENCE_SLOT_DYING : GPUFENCE_SLOT_LIVE, 100 + i);
		builder_slot(&b, i)->gpu[i == 2 ? 1 : 0].device = counter(20, 5);
	}
	CHECK_U64(ledger_free_lost(&l, mine, 0), 1);
	CHECK_U64(builder_slot(&b, 1)->owner, ledger_owner(21, GPUFENCE_SLOT_FREE, 0));
	CHECK_U64(builder_slot(&b, 2)->owner, ledger_owner(20, GPUFENCE_SLOT_LIVE, 102));
	CHECK_U64(builder_slot(&b, 3)->owner, ledger_owner(20, GPUFENCE_SLOT_DYING, 103));
	CHECK(ledger_owned(&l, 0, generation));
	CHECK(builder_lock_free(&b, 1));
	builder_remove(&b);
}

static void newer_minor_strides(void)
{
	uint32_t generation;
	builder_init(&b, &(struct builder_options){ .slots = 3, .more_header = 4096, .more_slot = 128 });
	builder_ledger(&b)->abi_minor = GPUFENCE_ABI_MINOR + 1;
	builder_ledger(&b)->gpu_count_max = 18;
	CHECK_INT(ledger_open(&l, ledger_path()), 0);
	int first = own_file(), second = own_file();
	CHECK_U64(claim(first, 1, 0, &generation), 0);
	CHECK_U64(claim(second, 2, 0, &generation), 1);
	ledger_add(&l, 1, generation, 15, LEDGER_DEVICE, 77);
	CHECK_U64(builder_slot(&b, 1)->gpu[15].device, counter(generation, 77));
	CHECK_U64(builder_charged(&b, 15), 77 * 4096);
	CHECK(!builder_lock_free(&b, 1));
	CHECK(builder_lock_free(&b, 2));
	builder_remove(&b);
}

int main(int argc, char **argv)
{
	static const struct unit_test tests[] = {
		{ "ledger: refuses garbage", refuses_garbage },
		{ "ledger: claims the lowest free slot", claims_the_lowest_free },
		{ "ledger: the generation wraps", generation_wraps },
		{ "ledger: takes over only the dead", takes_over_only_the_dead },
		{ "ledger: counters keep their bounds", counters_keep_their_bounds },
		{ "ledger: peaks belong to samples", peaks_belong_to_samples },
		{ "ledger: sums what counts", sums_what_counts },
		{ "ledger: garbage does not crash", garbage_does_not_crash },
		{ "ledger: the overflow slot is shared", overflow_is_shared },
		{ "ledger: frees only the lost", frees_only_the_lost },
		{ "ledger: a newer minor version's strides", newer_minor_strides },
		{ NULL, NULL },
	};
	return unit_main(tests, argc, argv);
}
