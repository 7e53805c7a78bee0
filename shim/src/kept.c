/* SPDX-License-Identifier: Apache-2.0 */
#include "kept.h"

#include <stddef.h>

#include "charge.h"
#include "debug.h"
#include "device.h"
#include "high.h"
#include "pages.h"
#include "real.h"

#define POOLS 256u
#define HOLES 32u
#define LOCK_NS UINT64_C(1000000000)
#define PIECE_BYTES UINT64_C(512) /* what sizes of pieces are rounded to */
/* What pools grow by, until they have shown it, and what it lies between. */
#define STEP_BYTES (UINT64_C(32) << 20)
#define STEP_MIN CHARGE_BLOCK_BYTES
#define STEP_MAX (UINT64_C(64) << 20)
/* How long an allocation waits for one that counts on free memory in the same pool: longer than a
 * container that has used up its time on the processors is kept from them. */
#define CLAIM_NS UINT64_C(200000000)
/* How long a refusal waits for other threads' calls, whose growth may be charged in vain. */
#define WAITS 10
#define WAIT_NS UINT64_C(100000)

/* Owner numbers of pieces are none of contexts: [1 | number of the pool:47 | place:16]. */
#define OWNER (UINT64_C(1) << 63)

enum state {
	FREE,
	OPEN,
	CLOSING, /* the driver is about to destroy it: it must not be asked */
	CLOSED,  /* it is gone but for the pieces that live */
};

/*
 * Free memory in a pool of which we know: what is left of a chunk that it took, and pieces that
 * were freed. What fits there needs no growth, which matters near the limit. All of it is forgotten
 * when the pool may have given memory back, since nothing says which.
 */
struct hole {
	uint64_t start, end;
	uintptr_t stream; /* whose work may use it */
};

struct kept {
	uint64_t lock;
	uint64_t pool;    /* handle; 0: memory for graphs, or none. Also read without the lock. */
	uint64_t total;   /* charged, with the growth of calls under way */
	uint64_t step;    /* the largest power of two that all growth seen is a multiple of; 0: none seen */
	uint64_t changes; /* calls that began and ended */
	uint64_t shrunk;
	uint64_t live;    /* pieces */
	uint64_t moves;   /* how often a place was taken, or all were forgotten. Also read without the lock. */
	uint64_t number;
	uint32_t calls;   /* under way */
	uint32_t reusing, leaving; /* of these: see enum kept_use */
	uint64_t claimed; /* bytes of free memory that one of them counts on, and nobody else may get; 0: none */
	uint32_t uses;    /* of the handle, by us */
	CUdevice device;  /* -1: no GPU's memory */
	enum account_counter counter;
	enum state state;
	uint32_t holes;
	struct hole hole[HOLES];
};

static struct memory {
	uint64_t lock; /* adding */
	uint32_t high; /* no pool at or above was ever used */
	uint64_t numbers;
	struct kept pools[POOLS];
	struct kept graphs[DEVICES];
} *memory(void)
{
	static struct pages_wiped wiped;
	return pages_wiped(&wiped, sizeof(struct memory));
}

static bool take(struct kept *k) { return pages_lock(&k->lock, LOCK_NS); }
static void give(struct kept *k) { pages_unlock(&k->lock); }

/* ---- holes; all with the lock ---- */

static void moved(struct kept *k) { word_store(&k->moves, k->moves + 1); }

static void hole_put(struct kept *k, struct hole h)
{
	struct hole *smallest = &k->hole[0];
	if (h.end <= h.start)
		return;
	for (uint32_t i = 0; i < k->holes; i++)
		if (k->hole[i].end - k->hole[i].start < smallest->end - smallest->start)
			smallest = &k->hole[i];
	if (k->holes < HOLES)
		k->hole[k->holes++] = h;
	else if (h.end - h.start > smallest->end - smallest->start)
		*smallest = h;
}

static void hole_remove(struct kept *k, uint64_t start, uint64_t end)
{
	for (uint32_t i = 0; i < k->holes;) {
		struct hole h = k->hole[i];
		if (h.end <= start || h.start >= end) {
			i++;
			continue;
		}
		k->hole[i] = k->hole[--k->holes];
		/* What stays of it lies outside, so that it is not met again. */
		hole_put(k, (struct hole){ h.start, start, h.stream });
		hole_put(k, (struct hole){ end, h.end, h.stream });
	}
}

static void hole_add(struct kept *k, struct hole h)
{
	if (h.end <= h.start)
		return;
	hole_remove(k, h.start, h.end);
	for (uint32_t i = 0; i < k->holes;) {
		const struct hole *o = &k->hole[i];
		if (o->stream != h.stream || (o->end != h.start && o->start != h.end)) {
			i++;
			continue;
		}
		if (o->end == h.start)
			h.start = o->start;
		else
			h.end = o->end;
		k->hole[i] = k->hole[--k->holes];
		i = 0;
	}
	hole_put(k, h);
}

static void forget_holes(struct kept *k)
{
	k->holes = 0;
	moved(k);
}

static bool hole_has(const struct kept *k, uint64_t pointer, uint64_t bytes)
{
	for (uint32_t i = 0; i < k->holes; i++)
		if (k->hole[i].start <= pointer && k->hole[i].end - pointer >= bytes && k->hole[i].end > pointer)
			return true;
	return false;
}

/* Takes a piece's place out of the smallest hole that has one. */
static bool hole_claim(struct kept *k, uint64_t bytes, struct kept_call *c)
{
	struct hole *best = NULL;
	for (uint32_t i = 0; i < k->holes; i++) {
		struct hole *h = &k->hole[i];
		if ((h->stream == c->stream || h->stream == KEPT_ANY_STREAM) && h->end - h->start >= bytes &&
		    (best == NULL || h->end - h->start < best->end - best->start))
			best = h;
	}
	if (best == NULL)
		return false;
	c->start = best->start;
	c->end = best->start + bytes;
	c->stream = best->stream;
	best->start += bytes;
	if (best->start == best->end)
		*best = k->hole[--k->holes];
	return true;
}

/* ---- which ---- */

static uint64_t owner_of(const struct memory *m, const struct kept *k)
{
	return OWNER | (k->number << 16 & (OWNER - 1)) | (uint64_t)(k - m->pools);
}

static struct kept *by_owner(uint64_t owner)
{
	struct memory *m = memory();
	uint64_t place = owner & 0xffff;
	return m != NULL && (owner & OWNER) != 0 && place < POOLS ? &m->pools[place] : NULL;
}

static struct kept *find(struct memory *m, uint64_t pool)
{
	uint32_t n = __atomic_load_n(&m->high, __ATOMIC_ACQUIRE);
	for (uint32_t i = 0; i < n; i++)
		if (word_load_acquire(&m->pools[i].pool) == pool)
			return &m->pools[i];
	return NULL;
}

static struct kept *add(struct memory *m, uint64_t pool, CUdevice device, enum account_counter counter)
{
	struct kept *k = NULL;
	if (!pages_lock(&m->lock, LOCK_NS))
		return NULL;
	struct kept *known = find(m, pool); /* another thread was faster */
	for (uint32_t i = 0; known == NULL && k == NULL && i < POOLS; i++) {
		struct kept *one = &m->pools[i];
		if (!take(one))
			continue;
		if (one->state == FREE) {
			k = one;
			k->total = k->step = k->shrunk = k->live = k->claimed = 0;
			k->holes = k->calls = k->uses = k->reusing = k->leaving = 0;
			k->number = ++m->numbers;
			k->device = device;
			k->counter = counter;
			k->state = OPEN;
			word_store(&k->pool, pool);
			if (i >= m->high)
				__atomic_store_n(&m->high, i + 1, __ATOMIC_RELEASE);
		}
		give(one);
	}
	pages_unlock(&m->lock);
	return known != NULL ? known : k;
}

/* Where a pool is that we did not see made, and what it has. */
static void identify(CUmemoryPool pool, CUdevice *device, enum account_counter *counter)
{
	fn_cuMemPoolGetAttribute *get = REAL(cuMemPoolGetAttribute);
	fn_cuDeviceGetDefaultMemPool *get_default = REAL(cuDeviceGetDefaultMemPool);
	CUmemLocation where = { 0, 0 };
	int type = 0;
	*counter = ACCOUNT_DEVICE;
	if (get != NULL && get(pool, CU_MEMPOOL_ATTR_ALLOCATION_TYPE, &type) == CUDA_SUCCESS &&
	    get(pool, CU_MEMPOOL_ATTR_LOCATION_TYPE, &where.type) == CUDA_SUCCESS &&
	    get(pool, CU_MEMPOOL_ATTR_LOCATION_ID, &where.id) == CUDA_SUCCESS) {
		kept_place(type, where, device, counter);
		return;
	}
	/* Before CUDA 13 what was not made is a device's default pool. */
	for (CUdevice d = 0; get_default != NULL && d < DEVICES; d++) {
		CUmemoryPool its = NULL;
		if (get_default(&its, d) != CUDA_SUCCESS)
			break;
		if (its == pool) {
			*device = d;
			break;
		}
	}
}

void kept_place(int type, CUmemLocation where, CUdevice *device, enum account_counter *counter)
{
	CUdevice its = device_of_location(where);
	*counter = type == CU_MEM_ALLOCATION_TYPE_MANAGED ? ACCOUNT_MANAGED : ACCOUNT_DEVICE;
	if (its >= 0 || *counter == ACCOUNT_DEVICE)
		*device = its; /* -1: the host's */
}

struct kept *kept_pool(CUmemoryPool pool, CUdevice device)
{
	struct memory *m = memory();
	enum account_counter counter;
	if (m == NULL || pool == NULL)
		return NULL;
	struct kept *k = find(m, (uint64_t)(uintptr_t)pool);
	if (k != NULL)
		return k;
	identify(pool, &device, &counter);
	return add(m, (uint64_t)(uintptr_t)pool, device, counter);
}

struct kept *kept_known(CUmemoryPool pool)
{
	struct memory *m = memory();
	return m != NULL && pool != NULL ? find(m, (uint64_t)(uintptr_t)pool) : NULL;
}

void kept_pool_new(CUmemoryPool pool, CUdevice device, enum account_counter counter)
{
	struct memory *m = memory();
	if (m != NULL && add(m, (uint64_t)(uintptr_t)pool, device, counter) == NULL)
		debug_line("pool", "one too many: its pieces are charged one by one", 0);
}

struct kept *kept_graph(CUdevice device)
{
	struct memory *m = memory();
	if (m == NULL || device < 0 || device >= DEVICES)
		return NULL;
	struct kept *k = &m->graphs[device];
	if (!take(k))
		return NULL;
	if (k->state == FREE) {
		k->device = device;
		k->counter = ACCOUNT_DEVICE;
		k->state = OPEN;
	}
	give(k);
	return k;
}

/* ---- calls ---- */

static bool is_pool(const struct kept *k) { return word_load_acquire(&k->pool) != 0; }

/* The driver's figure. The caller has counted a use. */
static bool ask(const struct kept *k, uint64_t *bytes)
{
	cuuint64_t n = 0;
	if (is_pool(k)) {
		fn_cuMemPoolGetAttribute *get = REAL(cuMemPoolGetAttribute);
		if (get == NULL || get((CUmemoryPool)(uintptr_t)word_load_acquire(&k->pool), CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT, &n) != CUDA_SUCCESS)
			return false;
	} else {
		fn_cuDeviceGetGraphMemAttribute *get = REAL(cuDeviceGetGraphMemAttribute);
		if (get == NULL || get(k->device, CU_GRAPH_MEM_ATTR_RESERVED_MEM_CURRENT, &n) != CUDA_SUCCESS)
			return false;
	}
	*bytes = n;
	return true;
}

static uint64_t round_up(uint64_t bytes, uint64_t to)
{
	return bytes > UINT64_MAX - to ? UINT64_MAX : (bytes + to - 1) / to * to;
}

/* What a pool takes for bytes that it has no place for. */
static uint64_t growth_for(const struct kept *k, uint64_t bytes)
{
	uint64_t step = k->step == 0 ? STEP_BYTES : k->step < STEP_MIN ? STEP_MIN : k->step > STEP_MAX ? STEP_MAX : k->step;
	return round_up(bytes, step);
}

static void learn(struct kept *k, uint64_t growth)
{
	uint64_t bits = k->step | growth;
	k->step = bits & -bits;
}

/* With the lock: the call is under way. */
static void enter(struct kept *k, struct kept_call *c)
{
	k->calls++;
	k->total += c->growth;
	c->kept = k;
	c->seen = ++k->changes;
}

/* False: it would get what another call counts on. What it was charged is given back then. */
static bool start(struct kept_call *c, struct kept *k, uint64_t growth)
{
	uint64_t deadline = 0;
	while (take(k)) {
		/* Others' pieces would land in what one counts on. */
		if (growth != 0 && k->claimed != 0) {
			uint64_t now = pages_now_ns(), instead = growth_for(k, k->claimed);
			deadline = deadline == 0 ? now + CLAIM_NS : deadline;
			if (now < deadline) {
				give(k);
				pages_sleep_ns(WAIT_NS / 4);
				continue;
			}
			/* That one will grow instead, which is charged before anything can land there. */
			if (account_reserve(c->gpu, k->counter, instead) != 0) {
				give(k);
				account_release(c->gpu, k->counter, growth);
				return false;
			}
			k->total += instead;
			k->claimed = 0;
		}
		c->growth = growth;
		enter(k, c);
		give(k);
		return true;
	}
	account_release(c->gpu, k->counter, growth);
	return true;
}

static bool is_busy(struct kept *k)
{
	if (!take(k))
		return false;
	bool busy = k->calls != 0;
	give(k);
	return busy;
}

static bool begin(struct kept_call *c, struct kept *k, uint64_t growth)
{
	*c = (struct kept_call){ .gpu = k == NULL ? -1 : device_gpu(k->device) };
	if (c->gpu < 0)
		return true;
	if (growth != 0 && charge_hold(c->gpu, k->counter, growth) != 0)
		return false;
	return start(c, k, growth);
}

bool kept_begin_graph(struct kept_call *c, struct kept *k, uint64_t growth, unsigned use)
{
	if (!begin(c, k, growth))
		return false;
	for (int i = 0; c->kept != NULL && take(k); i++) {
		bool lost = (use & KEPT_REUSES) != 0 && k->leaving != 0;
		if (!lost && ((use & KEPT_LEAVES) == 0 || k->reusing == 0 || i == WAITS)) {
			k->reusing += (use & KEPT_REUSES) != 0;
			k->leaving += (use & KEPT_LEAVES) != 0;
			c->use = use;
			give(k);
			break;
		}
		give(k);
		if (lost) {
			(void)kept_end(c);
			return false;
		}
		pages_sleep_ns(WAIT_NS);
	}
	return true;
}

void kept_begin_trim(struct kept_call *c, struct kept *k)
{
	(void)begin(c, k, 0); /* without growth nothing is refused */
	c->use = KEPT_TRIMS;
}

/*
 * Finds a place of which nothing but the driver's figure must say that it is there, and takes it:
 * while a call is under way nothing is uncharged, so what disappears from now on is paid for.
 */
static bool claim(struct kept *k, uint64_t size, struct kept_call *c)
{
	uint64_t now = 0;
	if (!take(k))
		return false;
	if (k->state != OPEN || k->calls != 0 || !hole_claim(k, size, c)) {
		give(k);
		return false;
	}
	enter(k, c);
	c->use = KEPT_CLAIMS;
	k->claimed = size;
	k->uses++;
	give(k);
	bool known = ask(k, &now);
	if (!take(k))
		return false;
	k->uses--;
	bool sure = known && k->changes == c->seen && k->total == now;
	give(k);
	if (!sure)
		(void)kept_end(c);
	return sure;
}

bool kept_begin_piece(struct kept_call *c, struct kept *k, const char *call, uint64_t bytes, uintptr_t stream)
{
	*c = (struct kept_call){ .gpu = k == NULL ? -1 : device_gpu(k->device) };
	if (c->gpu < 0 || !take(k))
		return true;
	uint64_t size = round_up(bytes, PIECE_BYTES), growth = growth_for(k, size);
	give(k);
	if (account_reserve(c->gpu, k->counter, growth) != 0) {
		for (int i = 0; i < WAITS; i++) {
			struct kept_call claimed = { .gpu = c->gpu, .stream = stream };
			if (claim(k, size, &claimed)) {
				*c = claimed;
				return true;
			}
			if (!is_busy(k))
				break;
			pages_sleep_ns(WAIT_NS);
		}
		if (charge_hold(c->gpu, k->counter, growth) != 0) {
			charge_refused(c->gpu, call, bytes);
			return false;
		}
	}
	if (start(c, k, growth))
		return true;
	charge_refused(c->gpu, call, bytes);
	return false;
}

/* With the lock, which it gives: a pool that is closed goes with its last piece. */
static void leave(struct kept *k, int gpu)
{
	uint64_t total = 0;
	if (k->state == CLOSED && k->live == 0 && k->calls == 0) {
		total = k->total;
		k->state = FREE;
	}
	enum account_counter counter = k->counter;
	give(k);
	account_release(gpu, counter, total);
}

/* The call is over; size is not 0 if it gave a piece. gone: what cannot be asked is not there. */
static bool finish(struct kept_call *c, uint64_t pointer, uint64_t size, bool gone)
{
	struct kept *k = c->kept;
	uint64_t now = 0;
	/* What cannot be corrected stays charged. */
	if (k == NULL || !take(k))
		return true;
	if ((c->use & KEPT_CLAIMS) != 0 && k->claimed != 0) {
		k->claimed = 0;
		hole_add(k, (struct hole){ c->start, c->end, c->stream });
	}
	k->reusing -= (c->use & KEPT_REUSES) != 0;
	k->leaving -= (c->use & KEPT_LEAVES) != 0;
	bool known_place = size != 0 && hole_has(k, pointer, size);
	if (size != 0) {
		hole_remove(k, pointer, pointer + size);
		k->live++;
		moved(k);
	}
	uint64_t changes = ++k->changes;
	bool trims = (c->use & KEPT_TRIMS) != 0;
	k->shrunk += trims && k->calls > 1; /* it may have; the figure will not show it */
	if (k->calls > 1 || k->state != OPEN) {
		/* The last one asks. */
		k->calls--;
		leave(k, c->gpu);
		return true;
	}
	k->uses++;
	give(k);
	bool known = ask(k, &now) || gone;
	if (!take(k))
		return true;
	k->uses--;
	k->calls--;
	if (!known || k->changes != changes || k->state != OPEN) {
		k->shrunk += trims;
		forget_holes(k); /* who asks next cannot tell whether anything went */
		leave(k, c->gpu);
		return true;
	}
	uint64_t before = k->total - c->growth, charged = k->total;
	uint64_t growth = now > before ? now - before : 0;
	bool alone = c->seen + 1 == changes;
	/* Unless all is as it must be if nothing went, something may have gone, and other things come. */
	if (!alone || now < before || (size == 0 && growth != 0) ||
	    (size != 0 && growth != (known_place ? 0 : growth_for(k, size))) || (size != 0 && growth == 0 && !known_place))
		forget_holes(k);
	k->shrunk += now < before || (trims && !alone);
	if (alone && growth != 0) {
		learn(k, growth);
		if (size != 0)
			hole_add(k, (struct hole){ pointer + size, pointer + growth, KEPT_ANY_STREAM });
	}
	k->total = now;
	give(k);
	bool within = true;
	if (now <= charged) {
		account_release(c->gpu, k->counter, charged - now);
	} else if (charge_hold(c->gpu, k->counter, now - charged) != 0) {
		account_charge(c->gpu, k->counter, now - charged);
		within = false;
	}
	/* What was charged before the call was a guess: who really took more waits now. */
	if (growth != 0 && within)
		high_after_charge(c->gpu);
	return within;
}

bool kept_end(struct kept_call *c) { return finish(c, 0, 0, false); }

bool kept_end_piece(struct kept_call *c, uint64_t pointer, uint64_t bytes)
{
	struct memory *m = memory();
	struct kept *k = c->kept;
	if (k == NULL || m == NULL)
		return true;
	struct track_block b = {
		.pointer = pointer,
		.bytes = round_up(bytes, PIECE_BYTES),
		.owner = owner_of(m, k),
		.gpu = (int16_t)c->gpu,
		.kind = TRACK_PIECE,
	};
	/* Not tracked, a pool that is destroyed keeps its charge. */
	charge_track(&b, "piece");
	account_count_alloc();
	return finish(c, pointer, b.bytes, false);
}

uint64_t kept_moves(const struct track_block *b)
{
	const struct kept *k = by_owner(b->owner);
	return k == NULL ? 0 : word_load_acquire(&k->moves);
}

void kept_freed(const struct track_block *b, uint64_t moves, uintptr_t stream)
{
	struct kept_call c = { .gpu = b->gpu };
	struct kept *k = by_owner(b->owner);
	if (k == NULL || !take(k))
		return;
	if (owner_of(memory(), k) != b->owner || k->state == FREE) {
		give(k);
		return;
	}
	if (k->live > 0)
		k->live--;
	/* A call that is under way, and may have got this place, takes it out when it ends. */
	if (k->state == OPEN && k->moves == moves)
		hole_add(k, (struct hole){ b->pointer, b->pointer + b->bytes, stream });
	enter(k, &c);
	give(k);
	(void)finish(&c, 0, 0, false);
}

/* ---- destruction ---- */

struct kept *kept_closing(CUmemoryPool pool)
{
	struct kept *k = kept_known(pool);
	if (k == NULL || !take(k))
		return NULL;
	k->state = CLOSING;
	/* What we ask of the handle ends before it does. */
	for (uint64_t deadline = pages_now_ns() + LOCK_NS; k->uses != 0 && pages_now_ns() < deadline;) {
		give(k);
		pages_sleep_ns(WAIT_NS / 10);
		if (!take(k))
			return NULL;
	}
	give(k);
	return k;
}

void kept_closed(struct kept *k, CUresult result)
{
	/* Asked before the lock is held: it may be the driver that answers. */
	int gpu = k == NULL ? -1 : device_gpu(k->device);
	if (k == NULL || !take(k))
		return;
	if (result != CUDA_SUCCESS) {
		k->state = OPEN;
		give(k);
		return;
	}
	k->state = CLOSED;
	k->holes = 0;
	word_store(&k->pool, 0);
	leave(k, gpu);
}

uint64_t kept_shrunk(struct kept *k)
{
	if (k == NULL || !take(k))
		return 0;
	uint64_t n = k->shrunk;
	give(k);
	return n;
}

/* ---- all of a GPU ---- */

static bool each(int gpu, bool (*fn)(struct kept *, int gpu))
{
	struct memory *m = memory();
	bool any = false;
	if (m == NULL || gpu < 0)
		return false;
	uint32_t n = __atomic_load_n(&m->high, __ATOMIC_ACQUIRE);
	for (uint32_t i = 0; i < n + DEVICES; i++) {
		struct kept *k = i < n ? &m->pools[i] : &m->graphs[i - n];
		if (!take(k))
			continue;
		bool has = k->state == OPEN && k->total != 0;
		CUdevice device = k->device;
		give(k);
		if (has && device_gpu(device) == gpu)
			any |= fn(k, gpu);
	}
	return any;
}

/* Asks again, when no other call is under way: whether it was charged more. */
static bool settle(struct kept *k, int gpu, bool gone)
{
	struct kept_call c = { .gpu = gpu };
	uint64_t before, after;
	for (int i = 0;; i++) {
		if (!take(k))
			return false;
		if (k->state != OPEN) {
			give(k);
			return false;
		}
		if (k->calls == 0 || i == WAITS)
			break;
		give(k);
		pages_sleep_ns(WAIT_NS);
	}
	before = k->total;
	enter(k, &c);
	give(k);
	(void)finish(&c, 0, 0, gone);
	if (!take(k))
		return false;
	after = k->total;
	give(k);
	return after < before;
}

static bool give_back(struct kept *k, int gpu)
{
	struct kept_call c = { .gpu = gpu, .use = KEPT_TRIMS };
	uint64_t before, after;
	if (!take(k))
		return false;
	before = k->total;
	if (k->state != OPEN) {
		give(k);
		return false;
	}
	k->uses++;
	enter(k, &c);
	give(k);
	/* It keeps what is in use; whether it gave anything shows afterwards. */
	if (is_pool(k)) {
		fn_cuMemPoolTrimTo *trim = REAL(cuMemPoolTrimTo);
		if (trim != NULL)
			(void)trim((CUmemoryPool)(uintptr_t)word_load_acquire(&k->pool), 0);
	} else {
		fn_cuDeviceGraphMemTrim *trim = REAL(cuDeviceGraphMemTrim);
		if (trim != NULL)
			(void)trim(k->device);
	}
	if (!take(k))
		return false;
	k->uses--;
	give(k);
	(void)finish(&c, 0, 0, false);
	if (is_busy(k))
		(void)settle(k, gpu, false);
	if (!take(k))
		return false;
	after = k->total;
	give(k);
	return after < before;
}

bool kept_give_back(int gpu) { return each(gpu, give_back); }

static void forget(const struct track_block *block, void *arg)
{
	(void)block, (void)arg;
}

static bool context_gone(struct kept *k, int gpu)
{
	struct memory *m = memory();
	bool fell = settle(k, gpu, true);
	if (m == NULL || !fell || !take(k))
		return fell;
	uint64_t owner = owner_of(m, k);
	bool empty = k->total == 0 && is_pool(k);
	if (empty)
		k->live = 0;
	give(k);
	/* Its pieces went with the device's memory. */
	if (empty)
		track_take_owner(owner, forget, NULL);
	return fell;
}

void kept_context_gone(int gpu) { (void)each(gpu, context_gone); }
