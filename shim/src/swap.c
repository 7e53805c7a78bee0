/* SPDX-License-Identifier: Apache-2.0 */
#include "swap.h"

#include "charge.h"
#include "pages.h"
#include "real.h"

#define BLOCKS 4096
#define LOCK_NS UINT64_C(1000000000)

struct block {
	uint64_t start, size; /* size 0: free */
	uint64_t charged;
	int32_t gpu;
	uint32_t on_device; /* charged as managed */
};

struct memory {
	uint64_t lock;
	uint64_t high; /* none at or above was ever used */
	struct block blocks[BLOCKS];
};

/* A fork child has none of its parent's memory. */
static struct pages_wiped wiped;

static struct memory *locked(void)
{
	struct memory *m = pages_wiped(&wiped, sizeof(struct memory));
	return m != NULL && pages_lock(&m->lock, LOCK_NS) ? m : NULL;
}

static CUresult advise_host(CUdeviceptr pointer, size_t bytes)
{
	fn_cuMemAdvise_v2 *v2 = REAL(cuMemAdvise_v2);
	fn_cuMemAdvise *v1 = REAL(cuMemAdvise);
	if (v2 != NULL)
		return v2(pointer, bytes, CU_MEM_ADVISE_SET_PREFERRED_LOCATION, (CUmemLocation){ CU_MEM_LOCATION_TYPE_HOST, 0 });
	return v1 != NULL ? v1(pointer, bytes, CU_MEM_ADVISE_SET_PREFERRED_LOCATION, CU_DEVICE_CPU) : CUDA_ERROR_NOT_SUPPORTED;
}

/* False: there is no place for it. */
static bool put(uint64_t pointer, uint64_t size, int gpu, uint64_t charged)
{
	struct memory *m = locked();
	uint64_t place = BLOCKS;
	if (m == NULL)
		return false;
	for (uint64_t i = 0; i < BLOCKS; i++) {
		const struct block *b = &m->blocks[i];
		/* What began there was freed on a way that we did not see. */
		if (b->size != 0 && b->start == pointer) {
			place = i;
			break;
		}
		if (b->size == 0 && place == BLOCKS)
			place = i;
		if (i >= m->high && place != BLOCKS)
			break;
	}
	if (place != BLOCKS) {
		m->blocks[place] = (struct block){ pointer, size, charged, gpu, 0 };
		if (m->high <= place)
			m->high = place + 1;
	}
	pages_unlock(&m->lock);
	return place != BLOCKS;
}

CUresult swap_take(CUdeviceptr *pointer, size_t bytes, unsigned int flags, int gpu, uint64_t charged)
{
	fn_cuMemAllocManaged *take = REAL(cuMemAllocManaged);
	fn_cuMemFree_v2 *give = REAL(cuMemFree_v2);
	CUdeviceptr got = 0;
	if (take == NULL || give == NULL || take(&got, bytes, flags) != CUDA_SUCCESS)
		return CUDA_ERROR_OUT_OF_MEMORY;
	if (advise_host(got, bytes) != CUDA_SUCCESS || !put(got, bytes, gpu, charged)) {
		give(got);
		return CUDA_ERROR_OUT_OF_MEMORY;
	}
	*pointer = got;
	return CUDA_SUCCESS;
}

bool swap_gone(uint64_t pointer)
{
	struct memory *m = locked();
	bool on_device = false;
	if (m == NULL)
		return true;
	for (uint64_t i = 0; i < m->high; i++) {
		struct block *b = &m->blocks[i];
		if (b->size != 0 && b->start == pointer) {
			on_device = b->on_device != 0;
			b->size = 0;
			break;
		}
	}
	pages_unlock(&m->lock);
	return !on_device;
}

/* The next block of the range that is on the host, from *at on, as it was at this moment. */
static bool next_on_host(struct memory *m, uint64_t *at, uint64_t pointer, uint64_t bytes, struct block *block)
{
	if (!pages_lock(&m->lock, LOCK_NS))
		return false;
	bool found = false;
	for (; *at < m->high && !found; ++*at) {
		const struct block *b = &m->blocks[*at];
		if (b->size == 0 || b->on_device || b->start >= pointer + bytes || pointer >= b->start + b->size)
			continue;
		*block = *b;
		found = true;
	}
	pages_unlock(&m->lock);
	return found;
}

/* Says that a block is on the device; false: it is gone, or another thread was faster. */
static bool moved(struct memory *m, uint64_t i, const struct block *block)
{
	bool mine = false;
	if (!pages_lock(&m->lock, LOCK_NS))
		return false;
	struct block *b = &m->blocks[i];
	if (b->size == block->size && b->start == block->start && !b->on_device) {
		b->on_device = 1;
		mine = true;
	}
	pages_unlock(&m->lock);
	return mine;
}

bool swap_to_device(uint64_t pointer, uint64_t bytes)
{
	/* Most programs have none. */
	if (__atomic_load_n(&wiped.memory, __ATOMIC_ACQUIRE) == NULL)
		return true;
	struct memory *m = pages_wiped(&wiped, sizeof(struct memory));
	struct block b;
	/* No lock is held while charging: that may wait. */
	for (uint64_t at = 0; m != NULL && next_on_host(m, &at, pointer, bytes, &b);) {
		if (charge_reserve(b.gpu, ACCOUNT_MANAGED, b.charged) != 0)
			return false;
		account_release(b.gpu, moved(m, at - 1, &b) ? ACCOUNT_SWAP : ACCOUNT_MANAGED, b.charged);
	}
	return true;
}
