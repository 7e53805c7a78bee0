/* SPDX-License-Identifier: Apache-2.0 */
/* What refers to physical memory: handles, mappings, parts, arrays, against a plain model. */
#include <pthread.h>

#include "../src/vmm.h"
#include "pages_builder.h"
#include "unit.h"

#define MIB (UINT64_C(1) << 20)
#define MANY 20000

static struct builder b;

static void begin(void)
{
	builder_init(&b, &(struct builder_options){ 0 });
	struct gpufence_limits_gpu gpu = builder_gpu(0);
	gpu.max_bytes = GPUFENCE_UNLIMITED;
	builder_publish(&b, &gpu, 1);
	account_set_dir(b.dir);
}

static uint64_t charged(void) { return builder_charged(&b, 0); }

static vmm_object make(uint64_t bytes)
{
	CHECK_INT(account_reserve(0, ACCOUNT_DEVICE, bytes), 0);
	return vmm_new(0, ACCOUNT_DEVICE, bytes);
}

static void end(void)
{
	CHECK_U64(charged(), 0);
	builder_remove(&b);
}

static void test_last(void)
{
	begin();
	vmm_object o = make(4 * MIB);
	vmm_handle_add(7, o);
	CHECK_U64(charged(), 4 * MIB);
	/* Mapped twice, retained once, released twice. */
	vmm_map_add(0x10000000, 4 * MIB, vmm_pin_handle(7));
	vmm_map_add(0x20000000, 4 * MIB, vmm_pin_handle(7));
	vmm_object pinned = vmm_pin_address(0x20000000 + 4 * MIB - 1);
	CHECK_U64(pinned, o);
	vmm_handle_add(7, pinned);
	CHECK_U64(vmm_pin_address(0x20000000 + 4 * MIB), 0);
	CHECK_U64(vmm_pin_address(0x10000000 - 1), 0);
	vmm_unpin(vmm_handle_take(7));
	vmm_unpin(vmm_handle_take(7));
	CHECK_U64(vmm_handle_take(7), 0);
	CHECK_U64(vmm_pin_handle(7), 0);
	vmm_drop(vmm_map_take(0x10000000, 4 * MIB));
	CHECK_U64(charged(), 4 * MIB);
	CHECK_U64(vmm_map_take(0x10000000, 4 * MIB), 0);
	/* The driver refused. */
	vmm_map_restore(vmm_map_take(0x20000000, 4 * MIB));
	CHECK_U64(charged(), 4 * MIB);
	vmm_drop(vmm_map_take(0x20000000, 4 * MIB));
	end();
}

static void test_span(void)
{
	begin();
	for (uint64_t i = 0; i < 64; i++) {
		vmm_handle_add(100 + i, make(2 * MIB));
		vmm_map_add(0x40000000 + i * 2 * MIB, 2 * MIB, vmm_pin_handle(100 + i));
		vmm_unpin(vmm_handle_take(100 + i));
	}
	CHECK_U64(charged(), 128 * MIB);
	vmm_drop(vmm_map_take(0x40000000 + 20 * MIB, 100 * MIB));
	CHECK_U64(charged(), 28 * MIB);
	vmm_drop(vmm_map_take(0, UINT64_MAX));
	end();
}

/* A handle and an address that are given out again, on ways that were not seen. */
static void test_stale(void)
{
	begin();
	vmm_object first = make(2 * MIB), second = make(4 * MIB);
	vmm_handle_add(5, first);
	vmm_handle_add(5, second);
	CHECK_U64(charged(), 4 * MIB);
	vmm_map_add(0x1000, 2 * MIB, vmm_pin_handle(5));
	vmm_object third = make(2 * MIB);
	vmm_map_add(0x1000, 2 * MIB, third);
	CHECK_U64(charged(), 6 * MIB);
	vmm_unpin(vmm_handle_take(5));
	CHECK_U64(charged(), 2 * MIB);
	vmm_drop(vmm_map_take(0x1000, 1));
	/* Its own, imported: the same handle, one release more. */
	vmm_handle_add(6, make(2 * MIB));
	vmm_handle_import(6);
	vmm_unpin(vmm_handle_take(6));
	CHECK_U64(charged(), 2 * MIB);
	vmm_unpin(vmm_handle_take(6));
	CHECK_U64(charged(), 0);
	/* A peer's: nothing, however it is mapped. */
	vmm_handle_import(8);
	vmm_map_add(0x1000, 2 * MIB, vmm_pin_handle(8));
	vmm_unpin(vmm_handle_take(8));
	CHECK(vmm_pin_address(0x1000) != 0);
	vmm_unpin(vmm_pin_address(0x1000));
	end();
}

static void test_multicast(void)
{
	begin();
	vmm_object m = vmm_new(-1, ACCOUNT_DEVICE, 0);
	vmm_handle_add(1, m);
	for (uint64_t i = 0; i < 8; i++) {
		vmm_handle_add(10 + i, make(2 * MIB));
		vmm_bind_add(m, (int)(i % 2), i / 2 * 2 * MIB, 2 * MIB, vmm_pin_handle(10 + i));
		vmm_unpin(vmm_handle_take(10 + i));
	}
	CHECK_U64(charged(), 16 * MIB);
	vmm_drop(vmm_bind_take(m, 1, 2 * MIB, 4 * MIB));
	CHECK_U64(charged(), 12 * MIB);
	CHECK_U64(vmm_bind_take(m, 2, 0, 100 * MIB), 0);
	vmm_bind_restore(m, vmm_bind_take(m, 0, 0, 100 * MIB));
	CHECK_U64(charged(), 12 * MIB);
	vmm_drop(vmm_bind_take(m, 0, 0, 2 * MIB));
	CHECK_U64(charged(), 10 * MIB);
	/* The rest with the object, which its mapping keeps. */
	vmm_map_add(0x8000, 8 * MIB, vmm_pin_handle(1));
	vmm_unpin(vmm_handle_take(1));
	CHECK_U64(charged(), 10 * MIB);
	vmm_drop(vmm_map_take(0x8000, 8 * MIB));
	end();
}

static void test_arrays(void)
{
	begin();
	vmm_handle_add(1, make(2 * MIB));
	vmm_handle_add(2, make(2 * MIB));
	for (int i = 0; i < 100; i++) {
		vmm_array_add(0xa0, vmm_pin_handle(1));
		vmm_array_add(0xa0, vmm_pin_handle(2));
		vmm_array_add(0xb0, vmm_pin_handle(2));
	}
	vmm_unpin(vmm_handle_take(1));
	vmm_unpin(vmm_handle_take(2));
	CHECK_U64(charged(), 4 * MIB);
	vmm_array_restore(vmm_array_take(0xa0));
	CHECK_U64(charged(), 4 * MIB);
	vmm_drop(vmm_array_take(0xa0));
	CHECK_U64(charged(), 2 * MIB);
	CHECK_U64(vmm_array_take(0xa0), 0);
	vmm_drop(vmm_array_take(0xb0));
	end();
}

static uint64_t seed = 1;
static uint32_t next_random(void) { return (uint32_t)((seed = seed * UINT64_C(6364136223846793005) + 1) >> 33); }

/* Many at once, in any order, against counts. */
static void test_model(void)
{
	enum { THINGS = 3000 };
	static struct {
		unsigned int handles, mappings;
	} model[THINGS];
	uint64_t living = 0;
	begin();
	for (int step = 0; step < 400000; step++) {
		uint32_t i = next_random() % THINGS;
		uint64_t handle = 1000 + i, address = (uint64_t)(i + 1) << 32;
		bool was = model[i].handles + model[i].mappings > 0;
		switch (next_random() % 5) {
		case 0:
			if (!was) {
				vmm_handle_add(handle, make(2 * MIB));
				model[i].handles = 1;
			}
			break;
		case 1:
			if (model[i].handles > 0) {
				vmm_map_add(address + (uint64_t)model[i].mappings++ * 2 * MIB, 2 * MIB, vmm_pin_handle(handle));
			}
			break;
		case 2:
			if (model[i].mappings > 0) {
				vmm_handle_add(handle, vmm_pin_address(address + 12345));
				model[i].handles++;
			}
			break;
		case 3:
			if (model[i].handles > 0) {
				vmm_unpin(vmm_handle_take(handle));
				model[i].handles--;
			}
			break;
		default:
			if (model[i].mappings > 0) {
				vmm_drop(vmm_map_take(address, (uint64_t)model[i].mappings * 2 * MIB));
				model[i].mappings = 0;
			}
			break;
		}
		living += (model[i].handles + model[i].mappings > 0) - was;
		if (step % 997 == 0)
			CHECK_U64(charged(), living * 2 * MIB);
	}
	for (uint32_t i = 0; i < THINGS; i++) {
		while (model[i].handles-- > 0)
			vmm_unpin(vmm_handle_take(1000 + i));
	}
	vmm_drop(vmm_map_take(0, UINT64_MAX));
	end();
}

static void test_fork(void)
{
	pid_t pid;
	begin();
	vmm_handle_add(3, make(2 * MIB));
	vmm_map_add(0x1000, 2 * MIB, vmm_pin_handle(3));
	CHILD(pid, {
		CHECK_U64(vmm_pin_handle(3), 0);
		CHECK_U64(vmm_map_take(0, UINT64_MAX), 0);
		vmm_handle_add(3, vmm_new(0, ACCOUNT_DEVICE, 2 * MIB));
		vmm_unpin(vmm_handle_take(3));
	});
	unit_reap(pid, 0);
	CHECK_U64(charged(), 2 * MIB);
	vmm_unpin(vmm_handle_take(3));
	vmm_drop(vmm_map_take(0x1000, 1));
	end();
}

static void *churn(void *arg)
{
	uint64_t base = (uintptr_t)arg << 40;
	for (uint64_t i = 0; i < MANY; i++) {
		uint64_t handle = base + i % 50;
		CHECK_INT(account_reserve(0, ACCOUNT_DEVICE, 2 * MIB), 0);
		vmm_handle_add(handle, vmm_new(0, ACCOUNT_DEVICE, 2 * MIB));
		vmm_map_add(base + i % 50 * 4 * MIB, 2 * MIB, vmm_pin_handle(handle));
		vmm_unpin(vmm_handle_take(handle));
		if (i % 50 == 49)
			vmm_drop(vmm_map_take(base, 200 * MIB));
	}
	return NULL;
}

static void test_threads(void)
{
	pthread_t threads[8];
	begin();
	for (uintptr_t i = 0; i < 8; i++)
		CHECK(pthread_create(&threads[i], NULL, churn, (void *)(i + 1)) == 0);
	for (int i = 0; i < 8; i++)
		CHECK(pthread_join(threads[i], NULL) == 0);
	end();
}

static const struct unit_test tests[] = {
	{ "vmm: until the last release and the last unmap", test_last },
	{ "vmm: one unmap of many mappings", test_span },
	{ "vmm: handles and addresses given out again, imports", test_stale },
	{ "vmm: multicast objects hold memory until unbound or gone", test_multicast },
	{ "vmm: sparse arrays hold memory until they are gone", test_arrays },
	{ "vmm: 400,000 steps against a model", test_model },
	{ "vmm: a fork child starts empty", test_fork },
	{ "vmm: eight threads", test_threads },
	{ NULL, NULL },
};

int main(int argc, char **argv) { return unit_main(tests, argc, argv); }
