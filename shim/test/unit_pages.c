/* SPDX-License-Identifier: Apache-2.0 */
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <sys/stat.h>
#include <sys/syscall.h>

#include "../src/pages.h"
#include "unit.h"

static void folder_above_lib(void)
{
	static const struct {
		const char *library, *want;
	} cases[] = {
		{ "/dev/gpufence/lib64/libgpufence.so", "/dev/gpufence" },
		{ "/dev/gpufence/lib/libgpufence.so", "/dev/gpufence" },
		{ "/dev/gpufence/lib/x86_64-linux-gnu/libgpufence.so", "/dev/gpufence" },
		{ "/dev/gpufence/lib/aarch64-linux-gnu/libgpufence.so", "/dev/gpufence" },
		{ "/dev/gpufence/lib32/libgpufence.so", "/dev/gpufence" },
		{ "/run/gpufence-shim//lib64//libgpufence.so", "/run/gpufence-shim" },
		{ "/a/lib/lib64/x.so", "/a/lib" },
		{ "/dev/gpufence/libgpufence.so", NULL },
		{ "/dev/gpufence/lib/a/b/libgpufence.so", NULL },
		{ "/usr/mylib/libgpufence.so", NULL },
		{ "lib64/libgpufence.so", NULL },
		{ "./lib64/libgpufence.so", NULL },
		{ "libgpufence.so", NULL },
		{ "/libgpufence.so", NULL },
		{ "/", NULL },
		{ "", NULL },
	};
	for (unsigned i = 0; i < sizeof cases / sizeof cases[0]; i++) {
		size_t n = pages_folder(cases[i].library), want = cases[i].want != NULL ? strlen(cases[i].want) : 0;
		if (n != want || (want > 0 && memcmp(cases[i].library, cases[i].want, n) != 0))
			unit_fail("%s gives %.*s", cases[i].library, (int)n, cases[i].library);
	}
}

static void path_has_bounds(void)
{
	char path[PAGES_PATH_MAX], dir[PAGES_PATH_MAX + 10];
	CHECK(pages_path(path, "/x", "limits"));
	CHECK(strcmp(path, "/x/limits") == 0);
	CHECK(!pages_path(path, "", "limits"));
	memset(dir, 'a', sizeof dir);
	dir[sizeof dir - 1] = '\0';
	CHECK(!pages_path(path, dir, "limits"));
	dir[PAGES_PATH_MAX - 1] = '\0';
	CHECK(!pages_path(path, dir, "limits"));
	dir[PAGES_PATH_MAX - 8] = '\0';
	CHECK(pages_path(path, dir, "limits"));
	CHECK_U64(strlen(path), PAGES_PATH_MAX - 1);
	/* This program lies in no lib folder. */
	CHECK(!pages_path(path, NULL, "limits"));
}

static void wiped_in_every_child(void)
{
	static struct pages_wiped w;
	pid_t pid;
	uint64_t *m = pages_wiped(&w, 100);
	CHECK(m != NULL);
	CHECK_U64(*m, 0);
	*m = 1;
	CHECK(pages_wiped(&w, 100) == m);
	CHILD(pid, uint64_t *c = pages_wiped(&w, 100); CHECK_U64(*c, 0); *c = 2; CHECK(pages_wiped(&w, 100) == c));
	unit_reap(pid, 0);
	pid = (pid_t)syscall(SYS_clone, SIGCHLD, 0, 0, 0, 0);
	if (pid == 0) {
		uint64_t *c = pages_wiped(&w, 100);
		_exit(*c == 0 ? 0 : 1);
	}
	unit_reap(pid, 0);
	CHECK_U64(*m, 1);
}

static void wiped_without_the_kernel(void)
{
	pages_no_wipe = true;
	wiped_in_every_child();
}

static void *first_use(void *arg) { return pages_wiped(arg, 1000); }

static void wiped_appears_once(void)
{
	for (int round = 0; round < 50; round++) {
		struct pages_wiped w = { 0 };
		pthread_t t[4];
		void *got[4];
		pages_no_wipe = round % 2 == 1;
		for (int i = 0; i < 4; i++)
			CHECK(pthread_create(&t[i], NULL, first_use, &w) == 0);
		for (int i = 0; i < 4; i++)
			CHECK(pthread_join(t[i], &got[i]) == 0);
		for (int i = 1; i < 4; i++)
			CHECK(got[i] == got[0]);
	}
}

static void lock_has_a_deadline(void)
{
	uint64_t lock = 0, begin = pages_now_ns();
	CHECK(pages_lock(&lock, 1000));
	/* Its own holder does not wait. */
	CHECK(!pages_lock(&lock, UINT64_C(100000000000)));
	CHECK(pages_now_ns() - begin < UINT64_C(50000000000));
	pages_unlock(&lock);
	lock = 1; /* some other thread */
	begin = pages_now_ns();
	CHECK(!pages_lock(&lock, UINT64_C(20000000)));
	CHECK(pages_now_ns() - begin >= UINT64_C(20000000));
}

static uint64_t shared_lock, guarded;

static void *take_turns(void *arg)
{
	(void)arg;
	for (int i = 0; i < 20000; i++) {
		CHECK(pages_lock(&shared_lock, UINT64_C(60000000000)));
		guarded++;
		pages_unlock(&shared_lock);
	}
	return NULL;
}

static void lock_excludes(void)
{
	pthread_t t[4];
	for (int i = 0; i < 4; i++)
		CHECK(pthread_create(&t[i], NULL, take_turns, NULL) == 0);
	for (int i = 0; i < 4; i++)
		CHECK(pthread_join(t[i], NULL) == 0);
	CHECK_U64(guarded, 80000);
}

static void knows_itself(void)
{
	struct stat s;
	CHECK_U64(pages_pid(), (uint64_t)getpid());
	CHECK(stat("/proc/self/ns/pid", &s) == 0);
	CHECK_U64(pages_pidns_inode(), s.st_ino);
	/* Against an independent reading. The name of this program has no parenthesis. */
	FILE *f = fopen("/proc/self/stat", "r");
	unsigned long long ticks = 0;
	CHECK(f != NULL);
	CHECK(fscanf(f, "%*d (%*[^)]) %*c %*d %*d %*d %*d %*d %*u %*u %*u %*u %*u %*u %*u %*d %*d %*d %*d %*d %*d %llu", &ticks) == 1);
	fclose(f);
	CHECK(ticks > 0);
	CHECK_U64(pages_start_ticks(), ticks);
}

static void odd_program_name(void)
{
	uint64_t want = pages_start_ticks();
	int fd = open("/proc/self/comm", O_WRONLY);
	CHECK(fd >= 0);
	CHECK(write(fd, ") 1 2 (3) 4)", 12) == 12);
	close(fd);
	CHECK_U64(pages_start_ticks(), want);
}

static void errno_is_kept(void)
{
	struct pages_wiped w = { 0 };
	errno = EDOM;
	CHECK(pages_open("/nonexistent", false) == -ENOENT);
	CHECK_INT(errno, EDOM);
	CHECK(pages_size(-1) == -EBADF);
	CHECK(pages_read(-1, &w, sizeof w) == -EBADF);
	CHECK(pages_map(-1, 4096, false) == NULL);
	CHECK(pages_hold(-1) == NULL);
	CHECK(pages_file_lock(-1, PAGES_LOCK_EXCLUSIVE, 0, 1) == -EBADF);
	pages_close(-1);
	CHECK(pages_private(SIZE_MAX / 2) == NULL);
	CHECK(pages_wiped(&w, SIZE_MAX / 2) == NULL);
	CHECK_INT(errno, EDOM);
}

static int new_file(void)
{
	char path[] = "/tmp/gpufence-test-XXXXXX";
	int fd = mkstemp(path);
	CHECK(fd >= 0);
	CHECK(unlink(path) == 0);
	CHECK(ftruncate(fd, 8192) == 0);
	return fd;
}

static int reopened(int fd)
{
	char path[64];
	snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
	int other = pages_open(path, true);
	CHECK(other >= 0);
	return other;
}

/* What account.c rests on: a mapping keeps an open file's lock after its descriptor is closed,
 * a fork child does not get it, and exec and exit drop it. */
static void hold_keeps_the_lock(void)
{
	int probe = new_file(), fd = reopened(probe);
	pid_t child;
	int go[2];
	CHECK(pipe(go) == 0);
	void *hold = pages_hold(fd);
	CHECK(hold != NULL);
	CHECK_INT(pages_file_lock(fd, PAGES_LOCK_EXCLUSIVE, 100, 50), 0);
	pages_close(fd);
	CHECK_INT(pages_file_lock(probe, PAGES_LOCK_EXCLUSIVE, 149, 1), -EAGAIN);
	CHECK_INT(pages_file_lock(probe, PAGES_LOCK_SHARED, 100, 1), -EAGAIN);
	CHECK_INT(pages_file_lock(probe, PAGES_LOCK_EXCLUSIVE, 150, 1), 0);
	/* A child that lives on has no part in it. */
	CHILD(child, close(go[1]); char c; CHECK(read(go[0], &c, 1) == 0));
	pages_let_go(hold);
	CHECK_INT(pages_file_lock(probe, PAGES_LOCK_EXCLUSIVE, 100, 50), 0);
	close(go[1]);
	unit_reap(child, 0);
}

static void exec_drops_the_lock(void)
{
	int probe = new_file(), go[2], ready[2];
	pid_t child;
	char c;
	CHECK(pipe(go) == 0 && pipe2(ready, O_CLOEXEC) == 0);
	CHILD(child, {
		int fd = reopened(probe);
		CHECK(pages_hold(fd) != NULL);
		CHECK_INT(pages_file_lock(fd, PAGES_LOCK_EXCLUSIVE, 0, 1), 0);
		pages_close(fd);
		CHECK(write(ready[1], "x", 1) == 1);
		dup2(go[0], 0);
		close(go[1]);
		execl("/bin/sh", "sh", "-c", "read x", (char *)NULL);
		unit_fail("cannot exec sh");
	});
	close(ready[1]);
	CHECK(read(ready[0], &c, 1) == 1);
	CHECK(read(ready[0], &c, 1) == 0); /* exec closed it */
	CHECK(kill(child, 0) == 0);
	/* The old memory may go a moment after the descriptors. */
	uint64_t deadline = pages_now_ns() + UINT64_C(20000000000);
	while (pages_file_lock(probe, PAGES_LOCK_EXCLUSIVE, 0, 1) != 0 && pages_now_ns() < deadline)
		pages_sleep_ns(1000000);
	CHECK_INT(pages_file_lock(probe, PAGES_LOCK_EXCLUSIVE, 0, 1), 0);
	CHECK(write(go[1], "\n", 1) == 1);
	unit_reap(child, 0);
}

int main(int argc, char **argv)
{
	static const struct unit_test tests[] = {
		{ "pages: folder above $LIB", folder_above_lib },
		{ "pages: paths have bounds", path_has_bounds },
		{ "pages: wiped in every child", wiped_in_every_child },
		{ "pages: wiped where the kernel cannot", wiped_without_the_kernel },
		{ "pages: wiped memory appears once", wiped_appears_once },
		{ "pages: a lock has a deadline", lock_has_a_deadline },
		{ "pages: a lock excludes", lock_excludes },
		{ "pages: a process knows itself", knows_itself },
		{ "pages: odd program names", odd_program_name },
		{ "pages: errno is kept", errno_is_kept },
		{ "pages: a mapping holds a lock", hold_keeps_the_lock },
		{ "pages: exec drops the lock", exec_drops_the_lock },
		{ NULL, NULL },
	};
	return unit_main(tests, argc, argv);
}
