/* SPDX-License-Identifier: Apache-2.0 */
/*
 * leaderless: preloaded into a program, it runs main() in a second thread and ends the first one, so
 * that /proc shows a zombie that goes on working.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdlib.h>

typedef int main_fn(int, char **, char **);
typedef int start_fn(main_fn *, int, char **, void (*)(void), void (*)(void), void (*)(void), void *);

static main_fn *real_main;
static int arg_count;
static char **arguments, **environment;

static void *rest(void *unused)
{
	(void)unused;
	exit(real_main(arg_count, arguments, environment));
}

static int first(int argc, char **argv, char **envp)
{
	pthread_t thread;

	arg_count = argc;
	arguments = argv;
	environment = envp;
	if (pthread_create(&thread, NULL, rest, NULL))
		return 127;
	pthread_exit(NULL);
}

int __libc_start_main(main_fn *program, int argc, char **argv, void (*init)(void), void (*fini)(void), void (*rtld_fini)(void), void *stack_end);
int __libc_start_main(main_fn *program, int argc, char **argv, void (*init)(void), void (*fini)(void), void (*rtld_fini)(void), void *stack_end)
{
	start_fn *real;

	*(void **)&real = dlsym(RTLD_NEXT, "__libc_start_main");
	real_main = program;
	return real(first, argc, argv, init, fini, rtld_fini, stack_end);
}
