/* SPDX-License-Identifier: Apache-2.0 */
/* say.c: what a musl image runs here: says something, waits for a line, ends with 7. */
#include <stdio.h>
#include <unistd.h>

int main(void)
{
	char line[64];
	printf("hello\n");
	fflush(stdout);
	return read(0, line, sizeof line) > 0 ? 7 : 1;
}
