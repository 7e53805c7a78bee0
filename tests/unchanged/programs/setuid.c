/* SPDX-License-Identifier: Apache-2.0 */
/* setuid.c: says who it runs as, and what its loader let through. */
#define _GNU_SOURCE
#include <stdio.h>
#include <stdlib.h>
#include <sys/auxv.h>
#include <unistd.h>

int main(void)
{
	printf("uid %u, euid %u, secure %lu\n", getuid(), geteuid(), getauxval(AT_SECURE));
	printf("HOME %s\n", secure_getenv("HOME") == NULL ? "hidden" : "seen");
	return 9;
}
