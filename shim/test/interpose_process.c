/* SPDX-License-Identifier: Apache-2.0 */
/* Processes: fork, vfork, clone, spawn, exec, signals, and what the shim leaves alone. */
#include <sched.h>
#include <signal.h>
#include <dirent.h>
#include <spawn.h>
#include <sys/prctl.h>
#include <sys/syscall.h>

#include "interpose.h"

extern char **environ;

static void *cuda;
static CUcontext context;

static void start(void)
{
	cuda = open_driver(RTLD_LOCAL);
	CHECK_INT(FN(cuda, cuInit)(0), 0);
	CHECK_INT(FN(cuda, cuCtxCreate_v2)(&context, 0, 0), 0);
}

static void use(void)
{
	CUdeviceptr p;
	uint64_t before = charged(0);
	CHECK_INT(FN(cuda, cuMemAlloc_v2)(&p, 64 * MIB), 0);
	CHECK_U64(charged(0), before + 64 * MIB);
	CHECK_INT(FN(cuda, cuMemFree_v2)(p), 0);
	CHECK_U64(charged(0), before);
}

static void well(pid_t pid)
{
	int status = -1;
	CHECK(pid > 0);
	CHECK(waitpid(pid, &status, __WALL) == pid);
	if (status != 0)
		unit_fail("child ended with status %#x", (unsigned int)status);
}

/* A child's blocks are its own: it neither frees nor is charged for its parent's. */
static void in_child(CUdeviceptr parents)
{
	CUdeviceptr p;
	uint64_t before = charged(0);
	/* The test driver, unlike a real one, goes on in a child. */
	CHECK_INT(FN(cuda, cuMemFree_v2)(parents), 0);
	CHECK_U64(charged(0), before);
	CHECK_INT(FN(cuda, cuMemAlloc_v2)(&p, 32 * MIB), 0);
	CHECK_U64(charged(0), before + 32 * MIB);
	CHECK_INT(FN(cuda, cuMemFree_v2)(p), 0);
	CHECK_U64(charged(0), before);
	_exit(0);
}

static void part_fork(void)
{
	CUdeviceptr p;
	start();
	CHECK_INT(FN(cuda, cuMemAlloc_v2)(&p, 64 * MIB), 0);
	pid_t pid = fork();
	if (pid == 0)
		in_child(p);
	well(pid);
	pid = (pid_t)syscall(SYS_clone, SIGCHLD, NULL, NULL, NULL, NULL);
	if (pid == 0)
		in_child(p);
	well(pid);
	CHECK_U64(charged(0), FAKE_CONTEXT_BYTES + 64 * MIB);
	CHECK_INT(FN(cuda, cuMemFree_v2)(p), 0);
	use();
	CHECK_INT(FN(cuda, cuCtxDestroy_v2)(context), 0);
	CHECK_U64(charged(0), 0);
}

static void part_spawn(void)
{
	static char *const arguments[] = { (char *)(uintptr_t)"/bin/true", NULL };
	pid_t pid;
	start();
	for (int i = 0; i < 3; i++) {
		CHECK(posix_spawn(&pid, "/bin/true", NULL, NULL, arguments, environ) == 0);
		well(pid);
		pid = vfork();
		if (pid == 0) {
			execv("/bin/true", arguments);
			_exit(1);
		}
		well(pid);
		use();
	}
	CHECK_INT(system("/bin/true"), 0);
	CHECK_INT(FN(cuda, cuCtxDestroy_v2)(context), 0);
}

/* What exec leaves behind is not this program's: it starts from nothing. */
static void part_exec_first(void)
{
	char self[PATH_MAX];
	CUdeviceptr p;
	start();
	CHECK_INT(FN(cuda, cuMemAlloc_v2)(&p, GIB), 0);
	ssize_t n = readlink("/proc/self/exe", self, sizeof self - 1);
	CHECK(n > 0);
	self[n] = 0;
	execl(self, self, "--part", "exec_second", (char *)NULL);
	unit_fail("exec: %s", strerror(errno));
}

static void part_exec_second(void)
{
	start();
	use();
	CHECK_INT(FN(cuda, cuCtxDestroy_v2)(context), 0);
}

static unsigned int descriptors(void)
{
	unsigned int n = 0;
	DIR *d = opendir("/proc/self/fd");
	CHECK(d != NULL);
	while (readdir(d) != NULL)
		n++;
	closedir(d);
	return n;
}

static void part_untouched(void)
{
	static const char *const names[] = { "PATH", "LD_PRELOAD", "LD_LIBRARY_PATH", "HOME" };
	struct sigaction before[65], after;
	sigset_t mask_before, mask_after;
	const char *values[4];
	char **was = environ;
	umask(0137);
	for (int i = 0; i < 4; i++)
		values[i] = getenv(names[i]);
	for (int i = 1; i <= 64; i++)
		if (sigaction(i, NULL, &before[i]) != 0)
			memset(&before[i], 0, sizeof before[i]);
	CHECK(sigprocmask(SIG_SETMASK, NULL, &mask_before) == 0);
	unsigned int open_before = descriptors();
	start();
	use();
	/* Nothing stays open that the program could close or hand on. */
	CHECK_U64(descriptors(), open_before);
	CHECK_INT(umask(0137), 0137);
	CHECK(environ == was);
	for (int i = 0; i < 4; i++)
		CHECK(getenv(names[i]) == values[i]);
	for (int i = 1; i <= 64; i++)
		if (sigaction(i, NULL, &after) == 0)
			CHECK(after.sa_handler == before[i].sa_handler && after.sa_flags == before[i].sa_flags);
	CHECK(sigprocmask(SIG_SETMASK, NULL, &mask_after) == 0);
	CHECK(memcmp(&mask_before, &mask_after, sizeof mask_before) == 0);
	CUdeviceptr p;
	fn_cuMemAlloc_v2 *alloc = FN(cuda, cuMemAlloc_v2);
	errno = 123;
	CHECK_INT(alloc(&p, 64 * GIB), CUDA_ERROR_OUT_OF_MEMORY);
	CHECK_INT(errno, 123);
	CHECK_INT(FN(cuda, cuCtxDestroy_v2)(context), 0);
}

static volatile sig_atomic_t interrupted;
static void interrupt(int number)
{
	CUdeviceptr p;
	int kept = errno;
	(void)number;
	if (FN(cuda, cuMemAlloc_v2)(&p, 4 * MIB) == 0)
		FN(cuda, cuMemFree_v2)(p);
	interrupted++;
	errno = kept;
}

/* A handler that comes in the middle of a hook and calls one itself. The test driver's lock is no
 * part of this: the signal waits while the driver is in it. */
static void part_signals(void)
{
	start();
	fn_cuMemGetInfo_v2 *info = FN(cuda, cuMemGetInfo_v2);
	struct sigaction action = { .sa_handler = interrupt };
	size_t a, b;
	pid_t parent = getpid(), pid;
	CHECK(sigaction(SIGUSR1, &action, NULL) == 0);
	pid = fork();
	if (pid == 0) {
		prctl(PR_SET_PDEATHSIG, SIGKILL);
		while (kill(parent, SIGUSR1) == 0)
			usleep(20);
		_exit(0);
	}
	while (interrupted < 200)
		CHECK_INT(info(&a, &b), 0);
	kill(pid, SIGKILL);
	CHECK(waitpid(pid, NULL, 0) == pid);
	signal(SIGUSR1, SIG_IGN);
	CHECK_U64(charged(0), FAKE_CONTEXT_BYTES);
	CHECK_INT(FN(cuda, cuCtxDestroy_v2)(context), 0);
}

static void part_killed(void)
{
	CUdeviceptr p;
	start();
	CHECK_INT(FN(cuda, cuMemAlloc_v2)(&p, GIB), 0);
	CHECK_INT(FN(cuda, cuMemAlloc_v2)(&p, 8 * GIB), CUDA_ERROR_OUT_OF_MEMORY);
}

static const struct part parts[] = {
	{ "fork", part_fork },
	{ "spawn", part_spawn },
	{ "exec_first", part_exec_first },
	{ "exec_second", part_exec_second },
	{ "untouched", part_untouched },
	{ "signals", part_signals },
	{ "killed", part_killed },
	{ NULL, NULL },
};

static void test_fork(void)
{
	struct scene s = { .part = "fork", .max_bytes = LIMIT };
	play(&s);
	CHECK_U64(s.charged, 0);
}
static void test_spawn(void) { play_part("spawn"); }
static void test_exec(void)
{
	struct scene s = { .part = "exec_first", .max_bytes = LIMIT };
	play(&s);
	/* What the program before exec held is in a slot that gpufenced will take back. */
	CHECK_U64(s.charged, FAKE_CONTEXT_BYTES + GIB);
}
static void test_untouched(void) { play_part("untouched"); }
static void test_signals(void) { play_part("signals"); }

static void test_debug(void)
{
	setenv("GPUFENCE_DEBUG", "1", 1);
	struct scene s = { .part = "killed", .max_bytes = LIMIT };
	char program[PATH_MAX];
	ssize_t n = readlink("/proc/self/exe", program, sizeof program - 1);
	CHECK(n > 0);
	program[n] = 0;
	s.part = NULL;
	s.program[0] = program;
	s.program[1] = "--part";
	s.program[2] = "killed";
	play(&s);
	if (strcmp(s.output, "gpufence: cuMemAlloc: refused by memory.max: 8589934592 bytes\n") != 0)
		unit_fail("said: %s", s.output);
	CHECK_U64(s.charged, FAKE_CONTEXT_BYTES + GIB);
	unsetenv("GPUFENCE_DEBUG");
	struct scene quiet = { .part = "killed", .max_bytes = LIMIT };
	play(&quiet);
}

int main(int argc, char **argv)
{
	static const struct unit_test tests[] = {
		{ "fork and clone: a child counts for itself", test_fork },
		{ "vfork, posix_spawn, system", test_spawn },
		{ "exec starts from nothing", test_exec },
		{ "umask, signals, environment, descriptors and errno stay", test_untouched },
		{ "signal handlers that call hooks", test_signals },
		{ "GPUFENCE_DEBUG says why, else silence", test_debug },
		{ NULL, NULL },
	};
	return interpose_main(tests, parts, argc, argv);
}
