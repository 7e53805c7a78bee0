/* SPDX-License-Identifier: Apache-2.0 */
/*
 * pages.h: what the accounts need of the system, and nothing else does: raw system calls (no
 * cancellation point, no interposed libc function, no errno of the program touched), a clock,
 * memory that a fork child finds zeroed, the folder of the shared pages, and atomic words.
 */
#ifndef GPUFENCE_PAGES_H
#define GPUFENCE_PAGES_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/*
 * Atomic words. load/store of shared state that decides something are sequentially consistent:
 * together with a sequentially consistent compare-and-swap they give the store-load order that
 * announce-then-sum rests on, and cost nothing over plain loads on x86-64.
 */
static inline uint64_t word_load(const uint64_t *p) { return __atomic_load_n(p, __ATOMIC_SEQ_CST); }
static inline uint64_t word_load_acquire(const uint64_t *p) { return __atomic_load_n(p, __ATOMIC_ACQUIRE); }
static inline uint64_t word_load_relaxed(const uint64_t *p) { return __atomic_load_n(p, __ATOMIC_RELAXED); }
static inline uint32_t half_load_relaxed(const uint32_t *p) { return __atomic_load_n(p, __ATOMIC_RELAXED); }
static inline void word_store(uint64_t *p, uint64_t v) { __atomic_store_n(p, v, __ATOMIC_RELEASE); }
static inline void word_store_relaxed(uint64_t *p, uint64_t v) { __atomic_store_n(p, v, __ATOMIC_RELAXED); }
static inline void half_store_relaxed(uint32_t *p, uint32_t v) { __atomic_store_n(p, v, __ATOMIC_RELAXED); }
static inline bool word_swap(uint64_t *p, uint64_t *old, uint64_t v)
{
	return __atomic_compare_exchange_n(p, old, v, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
}
static inline void word_count(uint64_t *p) { __atomic_fetch_add(p, 1, __ATOMIC_RELAXED); }

static inline void cpu_relax(void)
{
#if defined(__x86_64__) || defined(__i386__)
	__builtin_ia32_pause();
#elif defined(__aarch64__)
	__asm__ volatile("yield");
#endif
}

/* A number of this thread that no other living thread of the process has. No system call. */
static inline uint64_t pages_thread(void) { return (uint64_t)(uintptr_t)__builtin_thread_pointer(); }

/*
 * A lock among threads of this process that is taken only if that is soon possible. It is never
 * waited for by its own holder (a signal handler that came in between).
 */
bool pages_lock(uint64_t *lock, uint64_t deadline_ns);
static inline bool pages_try_lock(uint64_t *lock)
{
	uint64_t free = 0;
	return __atomic_compare_exchange_n(lock, &free, pages_thread(), false, __ATOMIC_ACQUIRE, __ATOMIC_RELAXED);
}
static inline void pages_unlock(uint64_t *lock) { __atomic_store_n(lock, 0, __ATOMIC_RELEASE); }

/*
 * Memory that a fork child finds zeroed, however it was forked (MADV_WIPEONFORK). Where the
 * kernel has no such thing, or an emulator only says so, the process id is compared at each use instead.
 * The struct is zero-initialised statically; the memory appears at the first use and never goes.
 */
struct pages_wiped {
	void *memory;
	uint32_t by_pid; /* compare; set before memory appears */
};
#define PAGES_WIPED_HEADER 64
void *pages_wiped_slow(struct pages_wiped *w, size_t size);
static inline void *pages_wiped(struct pages_wiped *w, size_t size)
{
	char *m = __atomic_load_n(&w->memory, __ATOMIC_ACQUIRE);
	if (__builtin_expect(m != NULL && half_load_relaxed(&w->by_pid) == 0, 1))
		return m + PAGES_WIPED_HEADER;
	return pages_wiped_slow(w, size);
}
/* For tests: act as on a kernel without MADV_WIPEONFORK. */
extern bool pages_no_wipe;

/* Memory of this process alone, or NULL; a fork child does not get it. */
void *pages_private(size_t size);
void pages_unmap(const void *memory, size_t size);

uint64_t pages_now_ns(void); /* CLOCK_MONOTONIC */
void pages_sleep_ns(uint64_t ns);
uint32_t pages_pid(void);
uint64_t pages_pidns_inode(void); /* 0: unknown */
uint64_t pages_start_ticks(void); /* 0: unknown */

/* Opens close-on-exec: a descriptor or -errno. */
int pages_open(const char *path, bool write);
void pages_close(int fd);
int64_t pages_size(int fd); /* or -errno; -ENODEV if it is no regular file */
/* Reads the first size bytes: 0 or -errno. */
int pages_read(int fd, void *to, size_t size);
/* Maps the first size bytes shared; a fork child does not get the mapping. NULL: impossible. */
void *pages_map(int fd, size_t size, bool write);

/*
 * OFD record locks. The mapping that pages_hold makes refers to the same open file and thereby
 * holds its locks after the descriptor is closed, so no descriptor stays open in the program:
 * nothing that closes all descriptors can drop a slot's lock, and no fork child inherits it.
 */
enum pages_lock_type { PAGES_LOCK_SHARED, PAGES_LOCK_EXCLUSIVE, PAGES_LOCK_NONE };
int pages_file_lock(int fd, enum pages_lock_type type, uint64_t offset, uint64_t length);
void *pages_hold(int fd);
void pages_let_go(void *hold);

/* The folder of the pages, with name appended. False: this library lies in no $LIB folder, or
 * the path is too long. dir NULL means beside this library. */
#define PAGES_PATH_MAX 4096
bool pages_path(char path[PAGES_PATH_MAX], const char *dir, const char *name);
/* The folder above the $LIB folder of a library's path; its length, 0 if there is none. */
size_t pages_folder(const char *library);

#endif
