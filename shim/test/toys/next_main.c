/* SPDX-License-Identifier: Apache-2.0 */
/* Two look-ups each: the second must not differ from the first. */
#include <stdio.h>

int toy(void);
int toy_by_version(void);

int main(void)
{
	printf("%d %d %d %d\n", toy(), toy(), toy_by_version(), toy_by_version());
	return 0;
}
