/* SPDX-License-Identifier: Apache-2.0 */
/* undefined.c: what UBSan reports, a data race for TSan, and an overflow for ASan, by argument. */
#include <limits.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int shared;
static void *race(void *arg)
{
	for (int i = 0; i < 1000; i++)
		shared += arg == NULL;
	return NULL;
}

int main(int argc, char **argv)
{
	volatile int big = INT_MAX;
	if (argc < 2) {
		printf("clean\n");
	} else if (strcmp(argv[1], "overflow") == 0) {
		big += argc;
		printf("%d\n", big);
	} else if (strcmp(argv[1], "race") == 0) {
		pthread_t a, b;
		pthread_create(&a, NULL, race, NULL);
		pthread_create(&b, NULL, race, NULL);
		pthread_join(a, NULL);
		pthread_join(b, NULL);
		printf("raced\n");
	} else {
		char *p = malloc((size_t)argc);
		memset(p, 'x', (size_t)argc);
		printf("%c\n", p[big - INT_MAX + argc]);
		free(p);
	}
	return 0;
}
