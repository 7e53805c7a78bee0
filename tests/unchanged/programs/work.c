/* SPDX-License-Identifier: Apache-2.0 */
/* work.c: a program that does a little of everything, and prints what came of it. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

extern char **environ;

static long sums[8];

static void *add(void *arg)
{
	long *sum = arg;
	for (int i = 1; i <= 20000; i++) {
		char *p = malloc((size_t)(i % 3000) + 1);
		p[0] = (char)i;
		*sum += p[0] != (char)(i + 1);
		free(p);
	}
	return NULL;
}

static int by_number(const void *a, const void *b)
{
	const int *x = a, *y = b;
	return (*x > *y) - (*x < *y);
}

static volatile sig_atomic_t caught;
static void on_signal(int s) { caught = s; }

static void child(const char *how, pid_t pid)
{
	int status = -1;
	if (pid < 0 || waitpid(pid, &status, 0) != pid)
		printf("%s: failed: %s\n", how, strerror(errno));
	else
		printf("%s: %#x\n", how, (unsigned int)status);
	fflush(stdout);
}

int main(int argc, char **argv)
{
	pthread_t threads[8];
	int numbers[500];
	pid_t pid;
	char *spawn[] = { argv[0], "leaf", NULL };

	if (argc > 1 && strcmp(argv[1], "leaf") == 0)
		return 3;
	for (size_t i = 0; i < 8; i++)
		if (pthread_create(&threads[i], NULL, add, &sums[i]) != 0)
			return 1;
	for (size_t i = 0; i < 8; i++) {
		pthread_join(threads[i], NULL);
		printf("thread %zu: %ld\n", i, sums[i]);
	}
	for (int i = 0; i < 500; i++)
		numbers[i] = (i * 7919) % 1000;
	qsort(numbers, 500, sizeof numbers[0], by_number);
	printf("sorted: %d %d %d\n", numbers[0], numbers[250], numbers[499]);
	fflush(stdout);

	if ((pid = fork()) == 0)
		_exit(printf("in the child\n") > 0 && fflush(stdout) == 0 ? 4 : 5);
	child("fork", pid);
	if ((pid = vfork()) == 0)
		_exit(6);
	child("vfork", pid);
	if ((pid = vfork()) == 0) {
		execv(argv[0], spawn);
		_exit(7);
	}
	child("vfork and exec", pid);
	if (posix_spawn(&pid, argv[0], NULL, NULL, spawn, environ) != 0)
		pid = -1;
	child("spawn", pid);

	signal(SIGUSR1, on_signal);
	raise(SIGUSR1);
	printf("signal: %d\n", (int)caught == SIGUSR1);
#ifndef NO_DL
	printf("found: %d\n", dlsym(RTLD_DEFAULT, "qsort") != NULL);
	printf("found: %d\n", dlsym(RTLD_NEXT, "no_such_name") != NULL);
	const char *said = dlerror();
	printf("error: %s\n", said != NULL ? said : "none");
	printf("cuda: %d %d\n", dlsym(RTLD_DEFAULT, "cuInit") != NULL, dlsym(RTLD_DEFAULT, "cuMemAlloc_v2") != NULL);
	printf("library: %d\n", dlopen("/no/such/library.so", RTLD_NOW) != NULL);
	printf("error: %s\n", dlerror());
#endif
	errno = 0;
	printf("errno: %d\n", errno);
	fprintf(stderr, "%d argument(s)\n", argc - 1);
	return argc > 1 ? atoi(argv[1]) : 0;
}
