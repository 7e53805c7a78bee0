/* SPDX-License-Identifier: Apache-2.0 */
/* report.h: JSON lines on stdout. A line is begun, given fields, ended; it leaves in one
 * write, so that a reader never sees half of one and a kill loses whole lines only. */
#ifndef CLIENTS_REPORT_H
#define CLIENTS_REPORT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct report {
	char text[4096];
	size_t used;
};

void report_begin(struct report *r, const char *op, bool ok);
void report_u64(struct report *r, const char *name, uint64_t value);
void report_string(struct report *r, const char *name, const char *value);
void report_end(struct report *r);

/* CLOCK_MONOTONIC: the host's clock, also in a container without a time namespace. */
uint64_t report_now_ns(void);

#endif
