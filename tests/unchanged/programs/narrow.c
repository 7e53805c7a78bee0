/* SPDX-License-Identifier: Apache-2.0 */
/* narrow.c: a 32-bit program that needs no 32-bit headers to be built. */
int puts(const char *s);
void exit(int status) __attribute__((noreturn));
void _start(void) __attribute__((noreturn, force_align_arg_pointer));

void _start(void)
{
	puts(sizeof(void *) == 4 ? "32 bits" : "not 32 bits");
	exit(5);
}
