/* SPDX-License-Identifier: Apache-2.0 */
#include "report.h"

#include <errno.h>
#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

uint64_t report_now_ns(void)
{
	struct timespec t;

	clock_gettime(CLOCK_MONOTONIC, &t);
	return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

__attribute__((format(printf, 2, 3))) static void add(struct report *r, const char *format, ...)
{
	va_list args;
	int n;

	va_start(args, format);
	n = vsnprintf(r->text + r->used, sizeof(r->text) - r->used, format, args);
	va_end(args);
	/* A line too long is a mistake in this program, not in its input. */
	if (n < 0 || (size_t)n >= sizeof(r->text) - r->used)
		abort();
	r->used += (size_t)n;
}

static void add_quoted(struct report *r, const char *s)
{
	size_t shown = 0;

	add(r, "\"");
	for (; *s && shown < 512; s++, shown++) {
		unsigned char c = (unsigned char)*s;

		if (c == '"' || c == '\\')
			add(r, "\\%c", c);
		else if (c < 0x20 || c >= 0x7f)
			add(r, "\\u%04x", c);
		else
			add(r, "%c", c);
	}
	add(r, "\"");
}

void report_begin(struct report *r, const char *op, bool ok)
{
	r->used = 0;
	add(r, "{\"op\":");
	add_quoted(r, op);
	add(r, ",\"ok\":%s,\"mono_ns\":%" PRIu64, ok ? "true" : "false", report_now_ns());
}

void report_u64(struct report *r, const char *name, uint64_t value)
{
	add(r, ",\"%s\":%" PRIu64, name, value);
}

void report_string(struct report *r, const char *name, const char *value)
{
	add(r, ",\"%s\":", name);
	add_quoted(r, value);
}

void report_end(struct report *r)
{
	size_t sent = 0;

	add(r, "}\n");
	while (sent < r->used) {
		ssize_t n = write(STDOUT_FILENO, r->text + sent, r->used - sent);

		if (n < 0 && errno == EINTR)
			continue;
		/* Nobody listens any more: there is nothing left to work for. */
		if (n <= 0)
			_exit(3);
		sent += (size_t)n;
	}
}
