/* SPDX-License-Identifier: Apache-2.0 */
/*
 * stub.h: the second delivery. A library by the name of the driver's is mounted over it and exports
 * the hooks; the driver's own is what it needs, by an absolute path, so that names that we do not
 * hook are found behind it in every way that a program can look, and no dlsym of ours is wanted.
 */
#ifndef GPUFENCE_STUB_H
#define GPUFENCE_STUB_H

/* The folder of the shared pages, in its real folder the driver's libraries. NULL: this is no
 * stub, and the pages lie beside this library. */
extern const char *const stub_dir;

#endif
