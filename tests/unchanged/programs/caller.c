/* SPDX-License-Identifier: Apache-2.0 */
/* caller.c: calls what wrapper.c wraps. */
#include <stdio.h>
#include <unistd.h>

int main(void)
{
	puts("one");
	puts("two");
	printf("slept %u\n", sleep(0));
	return 0;
}
