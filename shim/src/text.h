/* SPDX-License-Identifier: Apache-2.0 */
/*
 * text.h: the string functions of the dlsym path. The C library's own may be another library's
 * by now, and that library may be the one that asks dlsym for the true ones (sanitizers do).
 */
#ifndef GPUFENCE_TEXT_H
#define GPUFENCE_TEXT_H

#include <stdbool.h>
#include <stddef.h>

static inline int text_compare(const char *a, const char *b)
{
	while (*a != 0 && *a == *b)
		a++, b++;
	return (unsigned char)*a - (unsigned char)*b;
}

static inline bool text_equal(const char *a, const char *b) { return text_compare(a, b) == 0; }

/* What follows prefix in s, or NULL. */
static inline const char *text_after(const char *s, const char *prefix)
{
	while (*prefix != 0)
		if (*s++ != *prefix++)
			return NULL;
	return s;
}

/* The last element of a path. */
static inline const char *text_file(const char *path)
{
	const char *file = path;
	for (; *path != 0; path++)
		if (*path == '/')
			file = path + 1;
	return file;
}

#endif
