/* SPDX-License-Identifier: Apache-2.0 */
#include "pages.h"

#include <errno.h>
#include <fcntl.h>
#include <link.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "stub.h"

#ifndef MADV_WIPEONFORK
#define MADV_WIPEONFORK 18
#endif
#define MADV_NO_SUCH_ADVICE 0x6e6f6e65
#ifndef F_OFD_SETLK
#define F_OFD_SETLK 37
#endif

bool pages_no_wipe;

/* syscall() reports through errno, which is the program's to keep. */
#define SYS_KEEP(result, ...)                           \
	do {                                            \
		int kept = errno;                       \
		(result) = syscall(__VA_ARGS__);        \
		if ((result) < 0)                       \
			(result) = -errno;              \
		errno = kept;                           \
	} while (0)

uint64_t pages_now_ns(void)
{
	struct timespec t;
	int kept = errno;
	clock_gettime(CLOCK_MONOTONIC, &t);
	errno = kept;
	return (uint64_t)t.tv_sec * UINT64_C(1000000000) + (uint64_t)t.tv_nsec;
}

void pages_sleep_ns(uint64_t ns)
{
	struct timespec t = { (time_t)(ns / UINT64_C(1000000000)), (long)(ns % UINT64_C(1000000000)) };
	long r;
	/* A signal may cut it short: every caller sleeps in a loop with a deadline. */
	SYS_KEEP(r, SYS_nanosleep, &t, NULL);
	(void)r;
}

uint32_t pages_pid(void)
{
	/* Not getpid(): old C libraries remember it over a raw clone. */
	return (uint32_t)syscall(SYS_getpid);
}

bool pages_lock(uint64_t *lock, uint64_t deadline_ns)
{
	uint64_t deadline = 0;
	for (unsigned tries = 0;; tries++) {
		if (pages_try_lock(lock))
			return true;
		if (word_load_relaxed(lock) == pages_thread())
			return false;
		if (tries < 128) {
			cpu_relax();
			continue;
		}
		uint64_t now = pages_now_ns();
		if (deadline == 0)
			deadline = now + deadline_ns;
		else if (now >= deadline)
			return false;
		/* Sleeping, not yielding: the holder may have a lower real-time priority. */
		pages_sleep_ns(tries < 256 ? 1000 : 50000);
	}
}

#define HUGE_BYTES ((size_t)2 << 20)

/* Aligned, so that the kernel may back it by huge pages: what is this big is looked up at random. */
static void *map_huge(size_t size)
{
	char *m = mmap(NULL, size + HUGE_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	if (m == MAP_FAILED)
		return MAP_FAILED;
	size_t before = -(uintptr_t)m & (HUGE_BYTES - 1);
	if (before > 0)
		munmap(m, before);
	munmap(m + before + size, HUGE_BYTES - before);
	madvise(m + before, size, MADV_HUGEPAGE);
	return m + before;
}

void *pages_private(size_t size)
{
	int kept = errno;
	void *m = size >= HUGE_BYTES && size < SIZE_MAX / 2 && size % HUGE_BYTES == 0 ?
			  map_huge(size) :
			  mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	if (m == MAP_FAILED)
		m = NULL;
	else
		madvise(m, size, MADV_DONTFORK); /* if refused: a copy that the child never looks at */
	errno = kept;
	return m;
}

void pages_unmap(const void *memory, size_t size)
{
	int kept = errno;
	munmap((void *)(uintptr_t)memory, size);
	errno = kept;
}

/* Emulators of another machine accept any advice and follow none: their yes means nothing. */
static bool wipes_on_fork(void *m, size_t size)
{
	return !pages_no_wipe && madvise(m, size, MADV_WIPEONFORK) == 0 && madvise(m, size, MADV_NO_SUCH_ADVICE) != 0;
}

void *pages_wiped_slow(struct pages_wiped *w, size_t size)
{
	uint32_t pid = pages_pid();
	char *old = __atomic_load_n(&w->memory, __ATOMIC_ACQUIRE);
	/* The first word says whose it is, where that matters. */
	if (old != NULL && (half_load_relaxed(&w->by_pid) == 0 || *(uint32_t *)(void *)old == pid))
		return old + PAGES_WIPED_HEADER;

	int kept = errno;
	char *m = mmap(NULL, size + PAGES_WIPED_HEADER, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	if (m == MAP_FAILED) {
		errno = kept;
		return NULL;
	}
	if (!wipes_on_fork(m, size + PAGES_WIPED_HEADER)) {
		*(uint32_t *)(void *)m = pid;
		half_store_relaxed(&w->by_pid, 1);
	}
	errno = kept;
	/* What a parent left is not unmapped: small, and copied on write. */
	void *seen = old;
	if (__atomic_compare_exchange_n(&w->memory, &seen, (void *)m, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE))
		return m + PAGES_WIPED_HEADER;
	pages_unmap(m, size + PAGES_WIPED_HEADER);
	return (char *)seen + PAGES_WIPED_HEADER;
}

int pages_open(const char *path, bool write)
{
	long r;
	/* O_NONBLOCK: whatever lies there, opening it must not wait. */
	SYS_KEEP(r, SYS_openat, AT_FDCWD, path, (write ? O_RDWR : O_RDONLY) | O_CLOEXEC | O_NONBLOCK | O_NOCTTY, 0);
	return (int)r;
}

void pages_close(int fd)
{
	long r;
	SYS_KEEP(r, SYS_close, fd);
	(void)r; /* nothing was written through it */
}

int64_t pages_size(int fd)
{
	struct stat s;
	long r;
	SYS_KEEP(r, SYS_fstat, fd, &s);
	if (r < 0)
		return r;
	return S_ISREG(s.st_mode) ? (int64_t)s.st_size : -ENODEV;
}

int pages_read(int fd, void *to, size_t size)
{
	size_t got = 0;
	while (got < size) {
		long r;
		SYS_KEEP(r, SYS_pread64, fd, (char *)to + got, size - got, (long)got);
		if (r == -EINTR)
			continue;
		if (r < 0)
			return (int)r;
		if (r == 0)
			return -ENODATA;
		got += (size_t)r;
	}
	return 0;
}

void *pages_map(int fd, size_t size, bool write)
{
	int kept = errno;
	void *m = mmap(NULL, size, write ? PROT_READ | PROT_WRITE : PROT_READ, MAP_SHARED, fd, 0);
	if (m == MAP_FAILED)
		m = NULL;
	else
		madvise(m, size, MADV_DONTFORK); /* if refused: a mapping that the child never looks at */
	errno = kept;
	return m;
}

int pages_file_lock(int fd, enum pages_lock_type type, uint64_t offset, uint64_t length)
{
	struct flock f;
	long r;
	memset(&f, 0, sizeof f); /* l_pid must be 0 */
	f.l_type = type == PAGES_LOCK_SHARED ? F_RDLCK : type == PAGES_LOCK_EXCLUSIVE ? F_WRLCK : F_UNLCK;
	f.l_whence = SEEK_SET;
	f.l_start = (off_t)offset;
	f.l_len = (off_t)length;
	SYS_KEEP(r, SYS_fcntl, fd, F_OFD_SETLK, &f);
	return (int)r;
}

#define HOLD_BYTES 4096

void *pages_hold(int fd)
{
	int kept = errno;
	/* Never touched, so it cannot fault. */
	void *m = mmap(NULL, HOLD_BYTES, PROT_NONE, MAP_SHARED, fd, 0);
	if (m == MAP_FAILED) {
		m = NULL;
	} else if (madvise(m, HOLD_BYTES, MADV_DONTFORK) != 0) {
		munmap(m, HOLD_BYTES);
		m = NULL;
	}
	errno = kept;
	return m;
}

void pages_let_go(void *hold) { pages_unmap(hold, HOLD_BYTES); }

uint64_t pages_pidns_inode(void)
{
	struct stat s;
	long r;
	SYS_KEEP(r, SYS_newfstatat, AT_FDCWD, "/proc/self/ns/pid", &s, 0);
	return r < 0 ? 0 : (uint64_t)s.st_ino;
}

uint64_t pages_start_ticks(void)
{
	char text[1024];
	long n;
	int fd = pages_open("/proc/self/stat", false);
	if (fd < 0)
		return 0;
	SYS_KEEP(n, SYS_read, fd, text, sizeof text);
	pages_close(fd);
	if (n <= 0)
		return 0;
	/* Field 2 is the program's name in parentheses and may hold anything, also parentheses. */
	long at = n - 1;
	while (at > 0 && text[at] != ')')
		at--;
	for (int field = 2; field < 22; field++) {
		while (at < n && text[at] != ' ')
			at++;
		while (at < n && text[at] == ' ')
			at++;
	}
	uint64_t ticks = 0;
	for (; at < n && text[at] >= '0' && text[at] <= '9'; at++)
		ticks = ticks * 10 + (uint64_t)(text[at] - '0');
	return ticks;
}

/* The last element of path[0..length), in [*from, length). */
static bool last_element(const char *path, size_t length, size_t *from)
{
	size_t i = length;
	while (i > 0 && path[i - 1] != '/')
		i--;
	*from = i;
	return i > 0 && i < length;
}

static bool element_is(const char *path, size_t from, size_t to, const char *name)
{
	return strlen(name) == to - from && memcmp(path + from, name, to - from) == 0;
}

static size_t without_slashes(const char *path, size_t length)
{
	while (length > 1 && path[length - 1] == '/')
		length--;
	return length;
}

size_t pages_folder(const char *library)
{
	size_t end = strlen(library), from;
	if (library[0] != '/' || !last_element(library, end, &from))
		return 0;
	end = without_slashes(library, from);
	if (!last_element(library, end, &from))
		return 0;
	size_t up = without_slashes(library, from);
	if (element_is(library, from, end, "lib") || element_is(library, from, end, "lib64") ||
	    element_is(library, from, end, "lib32") || element_is(library, from, end, "libx32"))
		return up;
	/* lib/<triplet> */
	end = up;
	if (!last_element(library, end, &from) || !element_is(library, from, end, "lib"))
		return 0;
	return without_slashes(library, from);
}

struct self {
	char *path;
	size_t length;
};

static int find_self(struct dl_phdr_info *info, size_t size, void *arg)
{
	struct self *self = arg;
	uintptr_t here = (uintptr_t)&find_self;
	(void)size;
	for (int i = 0; i < info->dlpi_phnum; i++) {
		const ElfW(Phdr) *h = &info->dlpi_phdr[i];
		uintptr_t start = info->dlpi_addr + h->p_vaddr;
		if (h->p_type != PT_LOAD || here < start || here - start >= h->p_memsz)
			continue;
		size_t n = info->dlpi_name != NULL ? pages_folder(info->dlpi_name) : 0;
		if (n > 0 && n < PAGES_PATH_MAX) {
			memcpy(self->path, info->dlpi_name, n);
			self->length = n;
		}
		return 1;
	}
	return 0;
}

bool pages_path(char path[PAGES_PATH_MAX], const char *dir, const char *name)
{
	struct self self = { path, 0 };
	if (dir == NULL)
		dir = stub_dir;
	if (dir != NULL) {
		self.length = strlen(dir);
		if (self.length == 0 || self.length >= PAGES_PATH_MAX)
			return false;
		memcpy(path, dir, self.length);
	} else {
		/* Not dladdr, whose symbol is too new in a build on a new system. */
		dl_iterate_phdr(find_self, &self);
		if (self.length == 0)
			return false;
	}
	size_t n = strlen(name);
	if (self.length + 1 + n >= PAGES_PATH_MAX)
		return false;
	path[self.length] = '/';
	memcpy(path + self.length + 1, name, n + 1);
	return true;
}
