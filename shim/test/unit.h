/* SPDX-License-Identifier: Apache-2.0 */
/*
 * unit.h: each test runs in a forked child of its own, so that it finds the process state that
 * a new process has, and so that one that crashes or hangs is one line and not the end. Prints
 * "ok - name" or "not ok - name: why".
 */
#ifndef GPUFENCE_UNIT_H
#define GPUFENCE_UNIT_H

#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

struct unit_test {
	const char *name;
	void (*run)(void);
};

#define UNIT_TIMEOUT_SECONDS 120
#define UNIT_WHY_BYTES 4096

static char *unit_why; /* shared with the test's children */

__attribute__((format(printf, 1, 2), noreturn, unused)) static void unit_fail(const char *format, ...)
{
	va_list args;
	va_start(args, format);
	if (unit_why[0] == '\0')
		vsnprintf(unit_why, UNIT_WHY_BYTES, format, args);
	va_end(args);
	_exit(1);
}

#define CHECK(condition)                                                                  \
	do {                                                                              \
		if (!(condition))                                                         \
			unit_fail("%s:%d: %s", __FILE__, __LINE__, #condition);           \
	} while (0)
#define CHECK_U64(got, want)                                                                                    \
	do {                                                                                                    \
		uint64_t got_ = (uint64_t)(got), want_ = (uint64_t)(want);                                      \
		if (got_ != want_)                                                                              \
			unit_fail("%s:%d: %s is %llu (%#llx), not %llu (%#llx)", __FILE__, __LINE__, #got,      \
				  (unsigned long long)got_, (unsigned long long)got_, (unsigned long long)want_, \
				  (unsigned long long)want_);                                                   \
	} while (0)
#define CHECK_INT(got, want)                                                                                  \
	do {                                                                                                  \
		long long got_ = (got), want_ = (want);                                                       \
		if (got_ != want_)                                                                            \
			unit_fail("%s:%d: %s is %lld, not %lld", __FILE__, __LINE__, #got, got_, want_);      \
	} while (0)

/* Forks a helper process that runs code and exits 0. */
#define CHILD(pid, ...)                          \
	do {                                     \
		fflush(NULL);                    \
		(pid) = fork();                  \
		CHECK((pid) >= 0);               \
		if ((pid) == 0) {                \
			alarm(UNIT_TIMEOUT_SECONDS); \
			{ __VA_ARGS__; }         \
			_exit(0);                \
		}                                \
	} while (0)
__attribute__((unused)) static void unit_reap(pid_t pid, int want_signal)
{
	int status;
	CHECK(waitpid(pid, &status, 0) == pid);
	if (want_signal != 0 ? WIFSIGNALED(status) && WTERMSIG(status) == want_signal :
			       WIFEXITED(status) && WEXITSTATUS(status) == 0)
		return;
	unit_fail("child ended with status %#x", status);
}

/* argv: only the tests whose names contain one of these. */
__attribute__((unused)) static int unit_main(const struct unit_test *tests, int argc, char **argv)
{
	int failed = 0;
	unit_why = mmap(NULL, UNIT_WHY_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	if (unit_why == MAP_FAILED)
		return 2;
	for (const struct unit_test *t = tests; t->name != NULL; t++) {
		int wanted = argc < 2, status = 0;
		for (int i = 1; i < argc; i++)
			wanted |= strstr(t->name, argv[i]) != NULL;
		if (!wanted)
			continue;
		memset(unit_why, 0, UNIT_WHY_BYTES);
		fflush(NULL);
		pid_t pid = fork();
		if (pid == 0) {
			alarm(UNIT_TIMEOUT_SECONDS);
			t->run();
			_exit(0);
		}
		if (pid < 0 || waitpid(pid, &status, 0) != pid)
			return 2;
		if (WIFEXITED(status) && WEXITSTATUS(status) == 0) {
			printf("ok - %s\n", t->name);
			continue;
		}
		failed++;
		if (unit_why[0] != '\0')
			printf("not ok - %s: %s\n", t->name, unit_why);
		else if (WIFSIGNALED(status))
			printf("not ok - %s: killed by signal %d%s\n", t->name, WTERMSIG(status),
			       WTERMSIG(status) == 14 ? ", hung" : "");
		else
			printf("not ok - %s: exit status %d\n", t->name, WEXITSTATUS(status));
	}
	return failed != 0;
}

#endif
