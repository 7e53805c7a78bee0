/* SPDX-License-Identifier: Apache-2.0 */
#include "context.h"

#include "../abi.h"
#include "account.h"
#include "charge.h"
#include "kept.h"
#include "track.h"

/* More than a GPU carries. A context for which there is no place stays charged until the process
 * ends. */
#define CONTEXTS 1024
#define BUSY ((uintptr_t)1)

static struct context contexts[CONTEXTS]; /* handle 0: free; BUSY: being changed by one thread */
static unsigned int high;                 /* none at or above was ever used */
static uint64_t owners;

static bool swap(uintptr_t *handle, uintptr_t old, uintptr_t new)
{
	return __atomic_compare_exchange_n(handle, &old, new, false, __ATOMIC_ACQ_REL, __ATOMIC_RELAXED);
}

static uint64_t load_owner(const struct context *c) { return __atomic_load_n(&c->owner, __ATOMIC_RELAXED); }
static uint64_t load_memory(const struct context *c) { return __atomic_load_n(&c->memory, __ATOMIC_RELAXED); }

static struct context *find(uintptr_t handle)
{
	unsigned int n = __atomic_load_n(&high, __ATOMIC_ACQUIRE);
	for (unsigned int i = 0; i < n; i++)
		if (__atomic_load_n(&contexts[i].handle, __ATOMIC_ACQUIRE) == handle)
			return &contexts[i];
	return NULL;
}

static struct context *find_context(CUcontext handle)
{
	return (uintptr_t)handle <= BUSY ? NULL : find((uintptr_t)handle);
}

uint64_t context_owner(CUcontext handle)
{
	const struct context *c = find_context(handle);
	return c == NULL ? 0 : load_memory(c);
}

/* The context that has the memory: of a green one, the primary context. */
static struct context *find_memory(CUcontext handle)
{
	struct context *c = find_context(handle);
	uint64_t memory = c == NULL ? 0 : load_memory(c);
	if (memory == 0 || load_owner(c) == memory)
		return c;
	unsigned int n = __atomic_load_n(&high, __ATOMIC_ACQUIRE);
	for (unsigned int i = 0; i < n; i++)
		if (__atomic_load_n(&contexts[i].handle, __ATOMIC_ACQUIRE) > BUSY && load_owner(&contexts[i]) == memory)
			return &contexts[i];
	return NULL;
}

int64_t context_grow(CUcontext handle, int64_t bytes)
{
	struct context *c = find_memory(handle);
	return c == NULL ? 0 : __atomic_fetch_add(&c->grown, bytes, __ATOMIC_ACQ_REL);
}

/* In whole blocks, as the driver takes memory. Below what the context was made with, nothing is given
 * back: that was never charged apart. */
uint64_t context_grown_bytes(int64_t grown)
{
	return grown <= 0 ? 0 : ((uint64_t)grown + CHARGE_BLOCK_BYTES - 1) / CHARGE_BLOCK_BYTES * CHARGE_BLOCK_BYTES;
}

void context_attach(CUcontext handle)
{
	struct context *c = find_context(handle);
	if (c != NULL)
		__atomic_fetch_add(&c->attached, 1, __ATOMIC_ACQ_REL);
}

bool context_detach(CUcontext handle)
{
	struct context *c = find_context(handle);
	uint32_t n = c == NULL ? 0 : __atomic_load_n(&c->attached, __ATOMIC_ACQUIRE);
	while (n > 0 && !__atomic_compare_exchange_n(&c->attached, &n, n - 1, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE))
		;
	return n > 0;
}

static void raise_high(unsigned int to)
{
	unsigned int n = __atomic_load_n(&high, __ATOMIC_RELAXED);
	while (n < to && !__atomic_compare_exchange_n(&high, &n, to, false, __ATOMIC_RELEASE, __ATOMIC_RELAXED))
		;
}

void context_restore(const struct context *context)
{
	for (unsigned int i = 0; i < CONTEXTS; i++) {
		struct context *c = &contexts[i];
		if (!swap(&c->handle, 0, BUSY))
			continue;
		c->bytes = context->bytes;
		c->gpu = context->gpu;
		c->primary = context->primary;
		__atomic_store_n(&c->grown, context->grown, __ATOMIC_RELAXED);
		__atomic_store_n(&c->attached, context->attached, __ATOMIC_RELAXED);
		__atomic_store_n(&c->owner, context->owner, __ATOMIC_RELAXED);
		__atomic_store_n(&c->memory, context->memory, __ATOMIC_RELAXED);
		__atomic_store_n(&c->handle, context->handle, __ATOMIC_RELEASE);
		raise_high(i + 1);
		return;
	}
}

static uint64_t put(CUcontext handle, int gpu, uint64_t bytes, CUdevice primary, uint64_t memory)
{
	struct context c = { .handle = 0 }, gone;
	while (context_take(handle, &gone))
		context_settle(&gone);
	c.handle = (uintptr_t)handle;
	c.owner = __atomic_add_fetch(&owners, 1, __ATOMIC_RELAXED);
	c.memory = primary < 0 ? c.owner : memory;
	c.bytes = bytes;
	c.gpu = gpu;
	c.primary = primary;
	context_restore(&c);
	return c.owner;
}

uint64_t context_put(CUcontext handle, int gpu, uint64_t bytes) { return put(handle, gpu, bytes, -1, 0); }

void context_put_green(CUcontext handle, int gpu, uint64_t bytes, CUdevice primary, uint64_t memory)
{
	(void)put(handle, gpu, bytes, primary, memory);
}

/* The caller knows what it wants to take; another thread may have been faster. */
static bool take(struct context *c, uintptr_t handle, struct context *context)
{
	if (!swap(&c->handle, handle, BUSY))
		return false;
	context->handle = handle;
	context->owner = load_owner(c);
	context->memory = load_memory(c);
	context->bytes = c->bytes;
	context->gpu = c->gpu;
	context->primary = c->primary;
	context->grown = __atomic_load_n(&c->grown, __ATOMIC_RELAXED);
	context->attached = __atomic_load_n(&c->attached, __ATOMIC_RELAXED);
	__atomic_store_n(&c->handle, 0, __ATOMIC_RELEASE);
	return true;
}

bool context_take(CUcontext handle, struct context *context)
{
	struct context *c = find_context(handle);
	return c != NULL && take(c, (uintptr_t)handle, context);
}

bool context_take_owner(uint64_t owner, struct context *context)
{
	unsigned int n = __atomic_load_n(&high, __ATOMIC_ACQUIRE);
	for (unsigned int i = 0; owner != 0 && i < n; i++) {
		struct context *c = &contexts[i];
		uintptr_t handle = __atomic_load_n(&c->handle, __ATOMIC_ACQUIRE);
		if (handle <= BUSY || load_owner(c) != owner || !take(c, handle, context))
			continue;
		if (context->owner == owner)
			return true;
		/* Its place was given to another context between the two looks. */
		context_restore(context);
	}
	return false;
}

static void uncharge(const struct track_block *block, void *arg)
{
	(void)arg;
	charge_undo(block);
}

void context_settle(const struct context *c)
{
	if (c->memory == c->owner)
		track_take_owner(c->owner, uncharge, NULL);
	account_release(c->gpu, ACCOUNT_DEVICE, c->bytes);
	account_release(c->gpu, ACCOUNT_DEVICE, context_grown_bytes(c->grown));
	kept_context_gone(c->gpu);
}
