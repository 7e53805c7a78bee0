/* SPDX-License-Identifier: Apache-2.0 */
#include "debug.h"

#include <errno.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <unistd.h>

static int state; /* 0: not asked yet, 1: off, 2: on */

static int enabled(void)
{
	int s = __atomic_load_n(&state, __ATOMIC_RELAXED);
	if (s == 0) {
		const char *v = secure_getenv("GPUFENCE_DEBUG");
		s = v != NULL && v[0] != 0 && !(v[0] == '0' && v[1] == 0) ? 2 : 1;
		__atomic_store_n(&state, s, __ATOMIC_RELAXED);
	}
	return s == 2;
}

struct line {
	char text[256];
	unsigned int length;
};

static void add(struct line *l, const char *s)
{
	while (*s != 0 && l->length < sizeof l->text - 1)
		l->text[l->length++] = *s++;
}

static void add_number(struct line *l, uint64_t n)
{
	char digits[21];
	unsigned int i = sizeof digits - 1;
	digits[i] = 0;
	do
		digits[--i] = (char)('0' + n % 10);
	while ((n /= 10) != 0);
	add(l, digits + i);
}

void debug_line(const char *what, const char *detail, uint64_t bytes)
{
	if (!enabled())
		return;
	struct line l = { .length = 0 };
	int kept = errno;
	add(&l, "gpufence: ");
	add(&l, what);
	add(&l, ": ");
	add(&l, detail);
	if (bytes != 0) {
		add(&l, ": ");
		add_number(&l, bytes);
		add(&l, " bytes");
	}
	l.text[l.length++] = '\n';
	/* A closed or full standard error is the program's own affair. */
	if (syscall(SYS_write, STDERR_FILENO, l.text, (size_t)l.length) < 0)
		errno = kept;
}
