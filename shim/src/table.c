/* SPDX-License-Identifier: Apache-2.0 */
#include "table.h"
#include "text.h"

#define HOOKED(library, symbol, name, version, stream) \
	{ #symbol, #name, (table_function *)hook_##symbol, version, TABLE_##library, TABLE_##stream },
#define CALLED(library, symbol, name, version, stream) \
	{ #symbol, #name, NULL, version, TABLE_##library, TABLE_##stream },

const struct table_row table[TABLE_SIZE] = { TABLE_HOOKED(HOOKED) TABLE_CALLED(CALLED) };

static int is_upper(char c) { return c >= 'A' && c <= 'Z'; }

/* cublas*, cudnn*, curl_* and nvmlfoo are not ours. */
static int may_be_ours(const char *s)
{
	if (s[0] == 'c')
		return s[1] == 'u' && is_upper(s[2]);
	return s[0] == 'n' && s[1] == 'v' && s[2] == 'm' && s[3] == 'l' && is_upper(s[4]);
}

int table_find(const char *symbol)
{
	if (!may_be_ours(symbol))
		return -1;
	int low = 0, high = TABLE_HOOKS - 1;
	while (low <= high) {
		int middle = (low + high) / 2;
		int order = text_compare(symbol, table[middle].symbol);
		if (order == 0)
			return middle;
		if (order < 0)
			high = middle - 1;
		else
			low = middle + 1;
	}
	return -1;
}

int table_choose(const char *name, int version, cuuint64_t flags)
{
	int chosen = -1, chosen_stream = TABLE_ANY;
	int wanted = (flags & CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM) != 0 ? TABLE_PER_THREAD : TABLE_ANY;
	for (int i = 0; i < TABLE_HOOKS; i++) {
		const struct table_row *row = &table[i];
		if (row->library != TABLE_CUDA || row->version > version || !text_equal(row->name, name))
			continue;
		/* A function without a stream has no per-thread variant and serves both. */
		if (row->stream != TABLE_ANY && row->stream != wanted)
			continue;
		if (chosen < 0 || row->stream > chosen_stream ||
		    (row->stream == chosen_stream && row->version > table[chosen].version)) {
			chosen = i;
			chosen_stream = row->stream;
		}
	}
	return chosen;
}
