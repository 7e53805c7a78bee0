/* SPDX-License-Identifier: Apache-2.0 */
/*
 * killfuzz: processes that take and give device memory by every function that the shim hooks, in
 * two threads each, and fork, exec, spawn, exit and are interrupted in between. Somebody else
 * kills them.
 *
 *	killfuzz init WORKERS FILE   starts that many, and again whoever ended, until it is killed
 *	killfuzz worker N FILE
 *
 * FILE holds one struct killfuzz_worker for each, which whoever watches reads.
 */
#include "../../../shim/test/timed.h"
#include "rows.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <spawn.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <time.h>

struct killfuzz_worker {
	uint64_t busy_since_ns[2]; /* of each thread; 0: in no call */
	uint64_t takes, refusals, gives, starts;
	uint64_t longest_wall_ns, longest_cpu_ns;
	struct timed reserves; /* in these calls, as the timed build of the shim tells */
};

#define HELD 8
#define THREADS 2

extern char **environ;

static struct killfuzz_worker *me;
static const char *self = "/proc/self/exe", *file;
static int number;
static const struct row *usable[ROWS];
static void *functions[ROWS];
static size_t usable_count;

static uint64_t clock_ns(clockid_t id)
{
	struct timespec t;
	clock_gettime(id, &t);
	return (uint64_t)t.tv_sec * UINT64_C(1000000000) + (uint64_t)t.tv_nsec;
}

static void raise_to(uint64_t *to, uint64_t value)
{
	uint64_t now = __atomic_load_n(to, __ATOMIC_RELAXED);
	while (now < value && !__atomic_compare_exchange_n(to, &now, value, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED))
		;
}

static uint64_t next(uint64_t *state)
{
	*state = *state * UINT64_C(6364136223846793005) + 1442695040888963407;
	return *state >> 24;
}

static void interrupted(int sig) { (void)sig; }

/* What a program may do beside: none of it may hang or take the parent's charge along. */
static void beside(uint64_t *state)
{
	char n[16], *const yes[] = { "true", NULL }, *const again[] = { "killfuzz", "worker", n, (char *)(uintptr_t)file, NULL };
	pid_t pid = -1;
	size_t free_bytes, total_bytes;
	snprintf(n, sizeof(n), "%d", number);
	switch (next(state) % 8) {
	case 0: /* a child that looks at the GPU, and leaves in one of two ways */
		pid = fork();
		if (pid == 0) {
			(void)ASK(cuMemGetInfo_v2, (size_t *, size_t *), &free_bytes, &total_bytes);
			if (next(state) % 2 == 0)
				raise(SIGKILL);
			_exit(0);
		}
		break;
	case 1:
		pid = vfork();
		if (pid == 0) {
			execv("/bin/true", yes);
			_exit(1);
		}
		break;
	case 2:
		if (posix_spawn(&pid, "/bin/true", NULL, NULL, yes, environ) != 0)
			pid = -1;
		break;
	case 3:
		pid = (pid_t)syscall(SYS_clone, (unsigned long)SIGCHLD, NULL, NULL, NULL, NULL);
		if (pid == 0)
			syscall(SYS_exit_group, 0);
		break;
	case 4: /* a child that becomes a worker of its own for a moment */
		pid = fork();
		if (pid == 0) {
			execv(self, again);
			_exit(1);
		}
		if (pid > 0) {
			struct timespec t = { 0, 20000000 };
			nanosleep(&t, NULL);
			kill(pid, SIGKILL);
		}
		break;
	case 5:
		if (next(state) % 4 == 0) {
			/* exec keeps the timer and forgets the handler. */
			signal(SIGALRM, SIG_IGN);
			execv(self, again);
			_exit(1);
		}
		break;
	case 6:
		if (next(state) % 4 == 0)
			_exit(0);
		break;
	default:
		sched_yield();
	}
	while (pid > 0 && waitpid(pid, NULL, 0) < 0 && errno == EINTR)
		;
}

static void *work(void *arg)
{
	unsigned thread = (unsigned)(uintptr_t)arg;
	struct { struct taken t; size_t row; } held[HELD];
	size_t count = 0;
	uint64_t state = (uint64_t)getpid() * UINT64_C(2654435761) + clock_ns(CLOCK_MONOTONIC) + thread;
	(void)ASK(cuCtxSetCurrent, (CUcontext), context);
	for (;;) {
		failure[0] = 0;
		uint64_t wall = clock_ns(CLOCK_MONOTONIC), cpu = clock_ns(CLOCK_THREAD_CPUTIME_ID);
		__atomic_store_n(&me->busy_since_ns[thread], wall, __ATOMIC_RELAXED);
		if (count < HELD && next(&state) % 100 < 55) {
			size_t i = next(&state) % usable_count;
			struct taken t = { .bytes = (1 + next(&state) % 8) * MIB };
			under_test = functions[i];
			if (usable[i]->take(usable[i], t.bytes, &t) == CUDA_SUCCESS) {
				held[count].t = t;
				held[count++].row = i;
				__atomic_fetch_add(&me->takes, 1, __ATOMIC_RELAXED);
			} else {
				__atomic_fetch_add(&me->refusals, 1, __ATOMIC_RELAXED);
			}
			/* Of the call as a whole: more than the reserve in it. */
			raise_to(&me->longest_wall_ns, clock_ns(CLOCK_MONOTONIC) - wall);
			raise_to(&me->longest_cpu_ns, clock_ns(CLOCK_THREAD_CPUTIME_ID) - cpu);
		} else if (count > 0) {
			size_t i = next(&state) % count;
			usable[held[i].row]->give(usable[held[i].row], &held[i].t);
			held[i] = held[--count];
			__atomic_fetch_add(&me->gives, 1, __ATOMIC_RELAXED);
		}
		__atomic_store_n(&me->busy_since_ns[thread], 0, __ATOMIC_RELAXED);
		if (next(&state) % 64 == 0)
			beside(&state);
	}
	return NULL;
}

static void *map(size_t workers)
{
	int fd = open(file, O_RDWR | O_CLOEXEC);
	size_t size = workers * sizeof(struct killfuzz_worker);
	if (fd < 0 || ftruncate(fd, (off_t)(64 * sizeof(struct killfuzz_worker))) != 0)
		exit(3);
	void *m = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	close(fd);
	if (m == MAP_FAILED)
		exit(3);
	return m;
}

static int worker(void)
{
	/* Now and then a call is interrupted. */
	struct sigaction act = { .sa_handler = interrupted, .sa_flags = SA_RESTART };
	struct itimerval every = { { 0, 7000 }, { 0, 7000 } };
	pthread_t second;
	me = (struct killfuzz_worker *)map((size_t)number + 1) + number;
	__atomic_store_n(&me->busy_since_ns[0], 0, __ATOMIC_RELAXED);
	__atomic_store_n(&me->busy_since_ns[1], 0, __ATOMIC_RELAXED);
	__atomic_fetch_add(&me->starts, 1, __ATOMIC_RELAXED);
	sigaction(SIGALRM, &act, NULL);
	struct timed **timed = (struct timed **)dlsym(RTLD_DEFAULT, "gpufence_timed");
	if (timed)
		*timed = &me->reserves;
	cuda_library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
	if (!cuda_library)
		return 4;
	/* Refused: the limit is reached, somebody will make room. */
	while (!context) {
		CALL(cuInit, (unsigned int), 0);
		CALL(cuDeviceGet, (CUdevice *, int), &device, 0);
		if (ASK(cuCtxCreate_v2, (CUcontext *, unsigned int, CUdevice), &context, 0, device) != CUDA_SUCCESS) {
			struct timespec t = { 0, 5000000 };
			context = NULL;
			nanosleep(&t, NULL);
		}
	}
	for (size_t i = 0; i < ROWS; i++) {
		char name[64];
		snprintf(name, sizeof(name), "%.*s", (int)strcspn(rows[i].symbol, "/"), rows[i].symbol);
		under_test = dlsym(cuda_library, name);
		/* There is one primary context; green ones need it; the rest needs a file. */
		if (!hooked() || rows[i].take == take_primary || rows[i].take == take_green || rows[i].before == write_image)
			continue;
		functions[usable_count] = under_test;
		usable[usable_count++] = &rows[i];
	}
	make_pool();
	setitimer(ITIMER_REAL, &every, NULL);
	if (pthread_create(&second, NULL, work, (void *)(uintptr_t)1) != 0)
		return 5;
	work(NULL);
	return 0;
}

static pid_t start(int n)
{
	char text[16];
	snprintf(text, sizeof(text), "%d", n);
	/* The next process gets a number that was used a moment ago. */
	int fd = open("/proc/sys/kernel/ns_last_pid", O_WRONLY | O_CLOEXEC);
	if (fd >= 0) {
		char low[16];
		int k = snprintf(low, sizeof(low), "%d", 10 + rand() % 40);
		if (write(fd, low, (size_t)k) != k)
			errno = 0; /* without it, numbers come back later */
		close(fd);
	}
	pid_t pid = fork();
	if (pid == 0) {
		execl(self, "killfuzz", "worker", text, file, (char *)NULL);
		_exit(6);
	}
	return pid;
}

static int run_init(int workers)
{
	pid_t pids[64];
	for (int i = 0; i < workers; i++)
		pids[i] = start(i);
	for (;;) {
		int status;
		pid_t pid = wait(&status);
		for (int i = 0; i < workers; i++) {
			if (pids[i] != pid)
				continue;
			if (WIFEXITED(status) && WEXITSTATUS(status) != 0) {
				fprintf(stderr, "killfuzz: a worker ended with %d\n", WEXITSTATUS(status));
				return 1;
			}
			if (WIFSIGNALED(status) && WTERMSIG(status) != SIGKILL) {
				fprintf(stderr, "killfuzz: a worker died of signal %d\n", WTERMSIG(status));
				return 1;
			}
			pids[i] = start(i);
		}
	}
}

int main(int argc, char **argv)
{
	int n = argc > 2 ? atoi(argv[2]) : -1;
	if (argc != 4 || n < 0 || n > 64)
		return 2;
	file = argv[3];
	number = n;
	return strcmp(argv[1], "init") == 0 ? run_init(n) : worker();
}
