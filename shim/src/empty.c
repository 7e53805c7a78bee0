/* SPDX-License-Identifier: Apache-2.0 */
/*
 * empty.c: all of the library that 32-bit programs get. The preload file names one path for every
 * program, and its loader complains of what it cannot load. No CUDA driver is 32-bit any more.
 */
typedef int gpufence_nothing;
