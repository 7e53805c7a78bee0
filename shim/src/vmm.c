/* SPDX-License-Identifier: Apache-2.0 */
#include "vmm.h"

#include <stddef.h>

#include "pages.h"

#define FIRST_NODES 64u
#define SEGMENTS 24u
#define LOCK_NS UINT64_C(1000000000)

/*
 * Everything is a node: objects by number, handles and mappings by value, arrays by handle, each
 * kind in a tree of its own (a treap: ordered by key, a heap by weight), the uses of multicast objects
 * and arrays in lists. Nodes lie in segments that never move.
 */
struct node {
	uint64_t key;
	uint64_t bytes;  /* object: charged; use: size */
	uint64_t object; /* handle, use: what it refers to */
	uint64_t count;  /* object: pins; handle: releases owed */
	uint32_t left, right;
	uint32_t weight;
	uint32_t next;   /* in a list; free: the next free one */
	uint32_t uses;   /* object: parts of a multicast object; array: memory */
	int16_t gpu;     /* object */
	int16_t counter; /* object: enum account_counter */
	int32_t device;  /* part of a multicast object */
};

enum tree { OBJECTS, HANDLES, MAPPINGS, ARRAYS, TREES };

struct memory {
	uint64_t lock;
	uint64_t objects; /* numbers given out */
	uint64_t random;
	uint64_t lost; /* a reference could not be written down: nothing is uncharged any more */
	uint32_t roots[TREES];
	uint32_t first; /* free node */
	uint32_t nodes; /* ever used */
	struct node *segments[SEGMENTS]; /* number k has FIRST_NODES << k nodes */
};

static struct pages_wiped wiped;

/* Where the lock is not to be had. Without memory there is nothing that a reference could hold. */
static void forget(void)
{
	struct memory *m = pages_wiped(&wiped, sizeof(struct memory));
	if (m != NULL)
		word_store_relaxed(&m->lost, 1);
}

static struct memory *locked(void)
{
	struct memory *m = pages_wiped(&wiped, sizeof(struct memory));
	return m != NULL && pages_lock(&m->lock, LOCK_NS) ? m : NULL;
}

static void unlock(struct memory *m) { pages_unlock(&m->lock); }

/* Number 0 is no node. */
static struct node *at(const struct memory *m, uint32_t number)
{
	uint32_t n = number - 1;
	unsigned int k = 31 - (unsigned int)__builtin_clz(n / FIRST_NODES + 1);
	return &m->segments[k][n - ((FIRST_NODES << k) - FIRST_NODES)];
}

static uint32_t new_node(struct memory *m, uint64_t key)
{
	uint32_t number = m->first;
	if (number != 0) {
		m->first = at(m, number)->next;
	} else {
		unsigned int k = 31 - (unsigned int)__builtin_clz(m->nodes / FIRST_NODES + 1);
		if (k >= SEGMENTS)
			return 0;
		if (m->segments[k] == NULL)
			m->segments[k] = pages_private((size_t)(FIRST_NODES << k) * sizeof(struct node));
		if (m->segments[k] == NULL)
			return 0;
		number = ++m->nodes;
	}
	/* Any distribution will do that the program's keys have nothing to do with. */
	m->random = m->random * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
	*at(m, number) = (struct node){ .key = key, .weight = (uint32_t)(m->random >> 32) };
	return number;
}

static void free_node(struct memory *m, uint32_t number)
{
	at(m, number)->next = m->first;
	m->first = number;
}

/* ---- trees ---- */

/* Below: keys up to key; above: greater ones. */
static void split(const struct memory *m, uint32_t tree, uint64_t key, uint32_t *below, uint32_t *above)
{
	while (tree != 0) {
		struct node *n = at(m, tree);
		if (n->key <= key) {
			*below = tree;
			below = &n->right;
			tree = n->right;
		} else {
			*above = tree;
			above = &n->left;
			tree = n->left;
		}
	}
	*below = *above = 0;
}

/* Every key of below is less than every one of above. */
static uint32_t merge(const struct memory *m, uint32_t below, uint32_t above)
{
	uint32_t tree = 0, *to = &tree;
	while (below != 0 && above != 0) {
		if (at(m, below)->weight > at(m, above)->weight) {
			*to = below;
			to = &at(m, below)->right;
			below = *to;
		} else {
			*to = above;
			to = &at(m, above)->left;
			above = *to;
		}
	}
	*to = below != 0 ? below : above;
	return tree;
}

static void insert(struct memory *m, enum tree which, uint32_t number)
{
	uint32_t below, above;
	struct node *n = at(m, number);
	n->left = n->right = 0;
	split(m, m->roots[which], n->key, &below, &above);
	m->roots[which] = merge(m, merge(m, below, number), above);
}

/* The greatest key up to key. */
static uint32_t find_last(const struct memory *m, enum tree which, uint64_t key)
{
	uint32_t found = 0;
	for (uint32_t tree = m->roots[which]; tree != 0;) {
		const struct node *n = at(m, tree);
		if (n->key <= key)
			found = tree;
		tree = n->key <= key ? n->right : n->left;
	}
	return found;
}

static uint32_t find(const struct memory *m, enum tree which, uint64_t key)
{
	uint32_t number = find_last(m, which, key);
	return number != 0 && at(m, number)->key == key ? number : 0;
}

/* Takes [first, last] out, as a tree of its own. */
static uint32_t take_range(struct memory *m, enum tree which, uint64_t first, uint64_t last)
{
	uint32_t below = 0, middle, above;
	split(m, m->roots[which], last, &middle, &above);
	if (first > 0)
		split(m, middle, first - 1, &below, &middle);
	m->roots[which] = merge(m, below, above);
	return middle;
}

/* ---- objects ---- */

static uint32_t object_of(const struct memory *m, vmm_object object)
{
	return object != 0 ? find(m, OBJECTS, object) : 0;
}

static vmm_object pin(const struct memory *m, uint64_t object)
{
	uint32_t number = object_of(m, object);
	if (number == 0)
		return 0;
	at(m, number)->count++;
	return object;
}

vmm_object vmm_new(int gpu, enum account_counter counter, uint64_t bytes)
{
	struct memory *m = locked();
	vmm_object object = 0;
	if (m == NULL)
		return 0;
	uint32_t number = new_node(m, m->objects + 1);
	if (number != 0) {
		struct node *n = at(m, number);
		object = ++m->objects;
		n->bytes = bytes;
		n->gpu = (int16_t)gpu;
		n->counter = (int16_t)counter;
		n->count = 1;
		insert(m, OBJECTS, number);
	}
	unlock(m);
	return object;
}

vmm_object vmm_pin_handle(uint64_t handle)
{
	struct memory *m = locked();
	if (m == NULL) {
		forget();
		return 0;
	}
	uint32_t number = find(m, HANDLES, handle);
	vmm_object object = number != 0 ? pin(m, at(m, number)->object) : 0;
	unlock(m);
	return object;
}

vmm_object vmm_pin_address(uint64_t address)
{
	struct memory *m = locked();
	if (m == NULL) {
		forget();
		return 0;
	}
	uint32_t number = find_last(m, MAPPINGS, address);
	const struct node *n = number != 0 ? at(m, number) : NULL;
	vmm_object object = n != NULL && address - n->key < n->bytes ? pin(m, n->object) : 0;
	unlock(m);
	return object;
}

/* Drops pins of an object; with the last one it goes, and its own uses are returned. */
static vmm_list unpin(vmm_object object, uint64_t pins)
{
	struct node gone = { .gpu = -1 };
	struct memory *m = object != 0 ? locked() : NULL;
	if (m == NULL)
		return 0;
	uint32_t number = object_of(m, object);
	if (number != 0 && (at(m, number)->count -= pins) == 0) {
		take_range(m, OBJECTS, object, object);
		gone = *at(m, number);
		free_node(m, number);
	}
	unlock(m);
	if (gone.bytes != 0 && word_load_relaxed(&m->lost) == 0) {
		account_release(gone.gpu, (enum account_counter)gone.counter, gone.bytes);
		account_count_free();
	}
	return gone.uses;
}

void vmm_unpin(vmm_object object) { vmm_drop(unpin(object, 1)); }

void vmm_drop(vmm_list list)
{
	while (list != 0) {
		struct memory *m = locked();
		if (m == NULL)
			return;
		vmm_object object = at(m, list)->object;
		vmm_list next = at(m, list)->next;
		free_node(m, list);
		unlock(m);
		/* Memory has no uses of its own: this ends. */
		vmm_list inner = unpin(object, 1);
		if (inner != 0)
			vmm_drop(inner);
		list = next;
	}
}

/* ---- handles ---- */

void vmm_handle_add(uint64_t handle, vmm_object object)
{
	vmm_object stale = 0;
	uint64_t pins = 0;
	struct memory *m = object != 0 ? locked() : NULL;
	if (m == NULL)
		return;
	uint32_t number = find(m, HANDLES, handle);
	if (number != 0 && at(m, number)->object != object) {
		stale = at(m, number)->object;
		pins = at(m, number)->count;
		at(m, number)->object = object;
		at(m, number)->count = 1;
	} else if (number != 0) {
		at(m, number)->count++;
	} else if ((number = new_node(m, handle)) != 0) {
		at(m, number)->object = object;
		at(m, number)->count = 1;
		insert(m, HANDLES, number);
	}
	unlock(m);
	vmm_drop(unpin(stale, pins));
}

void vmm_handle_import(uint64_t handle)
{
	vmm_object known = vmm_pin_handle(handle);
	vmm_handle_add(handle, known != 0 ? known : vmm_new(-1, ACCOUNT_DEVICE, 0));
}

vmm_object vmm_handle_take(uint64_t handle)
{
	struct memory *m = locked();
	vmm_object object = 0;
	if (m == NULL)
		return 0;
	uint32_t number = find(m, HANDLES, handle);
	if (number != 0) {
		object = at(m, number)->object;
		if (--at(m, number)->count == 0) {
			take_range(m, HANDLES, handle, handle);
			free_node(m, number);
		}
	}
	unlock(m);
	return object;
}

/* ---- mappings ---- */

/* In the order of their keys, at the head of list; the tree's depth is that of a random tree. */
static vmm_list flatten(const struct memory *m, uint32_t tree, vmm_list list)
{
	while (tree != 0) {
		struct node *n = at(m, tree);
		list = flatten(m, n->right, list);
		n->next = list;
		list = tree;
		tree = n->left;
	}
	return list;
}

void vmm_map_add(uint64_t start, uint64_t bytes, vmm_object object)
{
	vmm_list stale = 0;
	struct memory *m = bytes != 0 ? locked() : NULL;
	if (m == NULL)
		return;
	uint32_t number = new_node(m, start);
	if (number != 0) {
		/* What begins there was unmapped on a way that we did not see. */
		stale = flatten(m, take_range(m, MAPPINGS, start, start + bytes - 1), 0);
		at(m, number)->bytes = bytes;
		at(m, number)->object = object;
		insert(m, MAPPINGS, number);
	}
	unlock(m);
	vmm_drop(stale);
}

vmm_list vmm_map_take(uint64_t start, uint64_t bytes)
{
	struct memory *m = bytes != 0 && bytes - 1 <= UINT64_MAX - start ? locked() : NULL;
	if (m == NULL)
		return 0;
	vmm_list list = flatten(m, take_range(m, MAPPINGS, start, start + bytes - 1), 0);
	unlock(m);
	return list;
}

void vmm_map_restore(vmm_list list)
{
	struct memory *m = list != 0 ? locked() : NULL;
	while (m != NULL && list != 0) {
		vmm_list next = at(m, list)->next;
		insert(m, MAPPINGS, list);
		list = next;
	}
	if (m != NULL)
		unlock(m);
}

/* ---- parts of multicast objects ---- */

void vmm_bind_add(vmm_object multicast, int device, uint64_t offset, uint64_t bytes, vmm_object memory)
{
	struct memory *m = memory != 0 ? locked() : NULL;
	if (m == NULL)
		return;
	uint32_t owner = object_of(m, multicast), number = owner != 0 ? new_node(m, offset) : 0;
	if (number != 0) {
		struct node *n = at(m, number);
		n->bytes = bytes;
		n->object = memory;
		n->device = device;
		n->next = at(m, owner)->uses;
		at(m, owner)->uses = number;
	}
	unlock(m);
}

vmm_list vmm_bind_take(vmm_object multicast, int device, uint64_t offset, uint64_t bytes)
{
	vmm_list list = 0;
	struct memory *m = locked();
	uint32_t owner = m != NULL ? object_of(m, multicast) : 0;
	if (owner != 0) {
		uint32_t *link = &at(m, owner)->uses;
		while (*link != 0) {
			uint32_t number = *link;
			struct node *n = at(m, number);
			if ((n->device == device || n->device < 0) && n->key >= offset && n->key - offset <= bytes &&
			    n->bytes <= bytes - (n->key - offset)) {
				*link = n->next;
				n->next = list;
				list = number;
			} else {
				link = &n->next;
			}
		}
	}
	if (m != NULL)
		unlock(m);
	return list;
}

/* Puts a list at the head of another. */
static void join(const struct memory *m, uint32_t *head, vmm_list list)
{
	vmm_list last = list;
	while (at(m, last)->next != 0)
		last = at(m, last)->next;
	at(m, last)->next = *head;
	*head = list;
}

void vmm_bind_restore(vmm_object multicast, vmm_list list)
{
	struct memory *m = list != 0 ? locked() : NULL;
	uint32_t owner = m != NULL ? object_of(m, multicast) : 0;
	if (owner != 0)
		join(m, &at(m, owner)->uses, list);
	if (m != NULL)
		unlock(m);
}

/* ---- sparse arrays ---- */

/* The node of an array with uses; a new one if there is none. 0: no memory. */
static uint32_t array_node(struct memory *m, uint64_t array)
{
	uint32_t number = find(m, ARRAYS, array);
	if (number == 0 && (number = new_node(m, array)) != 0)
		insert(m, ARRAYS, number);
	return number;
}

void vmm_array_add(uint64_t array, vmm_object memory)
{
	bool again = false;
	struct memory *m = memory != 0 ? locked() : NULL;
	uint32_t owner = m != NULL ? array_node(m, array) : 0;
	if (owner != 0) {
		for (uint32_t use = at(m, owner)->uses; use != 0; use = at(m, use)->next)
			again = again || at(m, use)->object == memory;
		uint32_t number = again ? 0 : new_node(m, array);
		if (number != 0) {
			at(m, number)->object = memory;
			at(m, number)->next = at(m, owner)->uses;
			at(m, owner)->uses = number;
		}
	}
	if (m != NULL)
		unlock(m);
	if (again)
		vmm_unpin(memory);
}

vmm_list vmm_array_take(uint64_t array)
{
	vmm_list list = 0;
	struct memory *m = locked();
	uint32_t owner = m != NULL ? take_range(m, ARRAYS, array, array) : 0;
	if (owner != 0) {
		list = at(m, owner)->uses;
		free_node(m, owner);
	}
	if (m != NULL)
		unlock(m);
	return list;
}

void vmm_array_restore(vmm_list list)
{
	struct memory *m = list != 0 ? locked() : NULL;
	uint32_t owner = m != NULL ? array_node(m, at(m, list)->key) : 0;
	if (owner != 0)
		join(m, &at(m, owner)->uses, list);
	if (m != NULL)
		unlock(m);
}
