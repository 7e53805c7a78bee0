/* SPDX-License-Identifier: Apache-2.0 */
/*
 * hooks_array.c: arrays and mipmapped arrays. How the driver lays them out is not published, and
 * it does not say how large one became. They are charged as rows of whole 64 bytes, in groups of 8,
 * in pieces of 64 KiB: the least that its blocks of 64 bytes by 8 rows allow for. Above 1 MiB that
 * is rounded to its blocks of 2 MiB. What it takes beyond that gpufenced finds as unaccounted.
 */
#include "charge.h"
#include "debug.h"
#include "device.h"
#include "real.h"
#include "vmm.h"

#define ROW_BYTES UINT64_C(64)
#define ROWS UINT64_C(8)
#define ARRAY_BYTES UINT64_C(65536)

/* Arrays are tracked beside addresses, and are none. */
#define HANDLE (UINT64_C(1) << 63)

/* Of 16 elements, since those of some formats are less than a byte. */
static uint64_t bytes_of_16(int format, uint64_t channels)
{
	static const uint8_t normalised[] = { 1, 2, 4, 2, 4, 8 };
	switch (format) {
	case 0x01: case 0x08:
		return 16 * channels;
	case 0x02: case 0x09: case 0x10:
		return 32 * channels;
	case 0x03: case 0x0a: case 0x20:
		return 64 * channels;
	case 0x91: case 0x92: case 0x97: case 0x98: /* 8 bytes for 4 by 4 elements */
		return 8;
	case 0x93: case 0x94: case 0x95: case 0x96: case 0x99: case 0x9a: case 0x9b: case 0x9c: case 0x9d: case 0x9e:
		return 16;
	case 0xb0: /* NV12: 3 bytes for 2 elements */
		return 24;
	case 0xc0: case 0xc1: case 0xc2: case 0xc3: case 0xc4: case 0xc5:
		return 16 * (uint64_t)normalised[format - 0xc0];
	case 0xc6: case 0xc7: case 0xc8: case 0xc9: case 0xca: case 0xcb:
		return 16 * (uint64_t)normalised[format - 0xc6];
	default: /* as large as any: other video formats have up to 8 bytes */
		return 128;
	}
}

/* Saturating: what is too large for this is too large for the driver. */
static uint64_t times(uint64_t a, uint64_t b)
{
	uint64_t n;
	return __builtin_mul_overflow(a, b, &n) ? UINT64_MAX : n;
}

static uint64_t round_to(uint64_t n, uint64_t to) { return n > UINT64_MAX - to ? UINT64_MAX : (n + to - 1) / to * to; }

static uint64_t at_least_1(uint64_t n) { return n == 0 ? 1 : n; }

static uint64_t level_bytes(const CUDA_ARRAY3D_DESCRIPTOR *d, unsigned level)
{
	uint64_t depth = d->Flags & (CUDA_ARRAY3D_LAYERED | CUDA_ARRAY3D_CUBEMAP) ? d->Depth : (uint64_t)d->Depth >> level;
	uint64_t row = round_to(round_to(times(at_least_1(d->Width >> level), bytes_of_16(d->Format, at_least_1(d->NumChannels))), 16) / 16,
				ROW_BYTES);
	uint64_t rows = d->Height == 0 ? 1 : round_to(at_least_1(d->Height >> level), ROWS);
	return round_to(times(times(row, rows), at_least_1(depth)), ARRAY_BYTES);
}

static uint64_t all_bytes(const CUDA_ARRAY3D_DESCRIPTOR *d, unsigned levels)
{
	uint64_t largest = d->Width > d->Height ? d->Width : d->Height, bytes = 0;
	if (!(d->Flags & CUDA_ARRAY3D_LAYERED) && d->Depth > largest)
		largest = d->Depth;
	/* More levels than halve the largest side down to 1 are as good as these. */
	for (unsigned i = 0; i < levels && i < 64 && largest >> i != 0; i++)
		if (__builtin_add_overflow(bytes, level_bytes(d, i), &bytes))
			return UINT64_MAX;
	return bytes;
}

struct creation {
	struct charge charge; /* above 1 MiB */
	int gpu;
	uint64_t small, owner;
};

static bool begin(struct creation *c, const char *call, const CUDA_ARRAY3D_DESCRIPTOR *d, unsigned levels)
{
	*c = (struct creation){ .charge = { .gpu = -1 }, .gpu = -1 };
	/* These get memory that is made apart (vmm.h). */
	if (d->Flags & (CUDA_ARRAY3D_SPARSE | CUDA_ARRAY3D_DEFERRED_MAPPING))
		return true;
	uint64_t bytes = all_bytes(d, levels);
	if (bytes == 0)
		return true;
	c->gpu = device_current(&c->owner);
	if (bytes > CHARGE_SMALL_BYTES)
		return charge_begin_on(&c->charge, call, c->gpu, ACCOUNT_DEVICE, bytes);
	c->small = bytes;
	return charge_array_small(c->gpu, call, bytes);
}

static CUresult end(struct creation *c, CUresult result, const void *handle)
{
	uint64_t key = HANDLE | (uint64_t)(uintptr_t)handle;
	if (c->gpu < 0)
		return result;
	if (c->small == 0) {
		c->charge.owner = c->owner;
		return charge_end(&c->charge, result, key);
	}
	if (result != CUDA_SUCCESS) {
		charge_array_small_gone(c->gpu, c->small);
		if (result == CUDA_ERROR_OUT_OF_MEMORY)
			account_event(c->gpu, ACCOUNT_EVENT_DEVICE);
		return result;
	}
	struct track_block b = { .pointer = key, .bytes = c->small, .owner = c->owner, .gpu = (int16_t)c->gpu, .kind = TRACK_ARRAY };
	charge_track(&b, "array");
	account_count_alloc();
	return result;
}

#define CREATE(symbol, wide, levels, out, ...)                                          \
	do {                                                                            \
		fn_##symbol *real = REAL(symbol);                                       \
		struct creation c;                                                      \
		if (real == NULL)                                                       \
			return CUDA_ERROR_NOT_SUPPORTED;                                \
		if ((out) == NULL || d == NULL)                                         \
			return real(out, __VA_ARGS__);                                  \
		if (!begin(&c, #symbol, &(wide), levels))                               \
			return CUDA_ERROR_OUT_OF_MEMORY;                                \
		CUresult result = real(out, __VA_ARGS__);                               \
		return end(&c, result, result == CUDA_SUCCESS ? (void *)*(out) : NULL); \
	} while (0)

#define FLAT(d) ((CUDA_ARRAY3D_DESCRIPTOR){ (d)->Width, (d)->Height, 0, (d)->Format, (d)->NumChannels, 0 })
#define DEEP(d) ((CUDA_ARRAY3D_DESCRIPTOR){ (d)->Width, (d)->Height, (d)->Depth, (d)->Format, (d)->NumChannels, (d)->Flags })

CUresult hook_cuArrayCreate(CUarray *array, const CUDA_ARRAY_DESCRIPTOR_v1 *d) { CREATE(cuArrayCreate, FLAT(d), 1, array, d); }
EXPORT(cuArrayCreate);

CUresult hook_cuArrayCreate_v2(CUarray *array, const CUDA_ARRAY_DESCRIPTOR *d) { CREATE(cuArrayCreate_v2, FLAT(d), 1, array, d); }
EXPORT(cuArrayCreate_v2);

CUresult hook_cuArray3DCreate(CUarray *array, const CUDA_ARRAY3D_DESCRIPTOR_v1 *d) { CREATE(cuArray3DCreate, DEEP(d), 1, array, d); }
EXPORT(cuArray3DCreate);

CUresult hook_cuArray3DCreate_v2(CUarray *array, const CUDA_ARRAY3D_DESCRIPTOR *d)
{
	CREATE(cuArray3DCreate_v2, *d, 1, array, d);
}
EXPORT(cuArray3DCreate_v2);

CUresult hook_cuMipmappedArrayCreate(CUmipmappedArray *array, const CUDA_ARRAY3D_DESCRIPTOR *d, unsigned int levels)
{
	CREATE(cuMipmappedArrayCreate, *d, levels, array, d, levels);
}
EXPORT(cuMipmappedArrayCreate);

/* As memory is freed: it leaves the table first. What is not known, a level or one on imported
 * memory, has no charge. */
static bool leave(const void *handle, struct track_block *b) { return track_take(HANDLE | (uint64_t)(uintptr_t)handle, b); }

static CUresult left(const struct track_block *b, bool known, CUresult result)
{
	if (known && result == CUDA_SUCCESS)
		charge_undo(b);
	else if (known && track_put(b) != 0)
		debug_line("array", "not tracked, out of host memory", b->bytes);
	return result;
}

CUresult hook_cuArrayDestroy(CUarray array)
{
	fn_cuArrayDestroy *real = REAL(cuArrayDestroy);
	struct track_block b;
	if (real == NULL)
		return CUDA_ERROR_NOT_SUPPORTED;
	bool known = leave(array, &b);
	vmm_list tiles = vmm_array_take((uintptr_t)array);
	CUresult result = real(array);
	if (result == CUDA_SUCCESS)
		vmm_drop(tiles);
	else
		vmm_array_restore(tiles);
	return left(&b, known, result);
}
EXPORT(cuArrayDestroy);

CUresult hook_cuMipmappedArrayDestroy(CUmipmappedArray array)
{
	fn_cuMipmappedArrayDestroy *real = REAL(cuMipmappedArrayDestroy);
	struct track_block b;
	if (real == NULL)
		return CUDA_ERROR_NOT_SUPPORTED;
	bool known = leave(array, &b);
	vmm_list tiles = vmm_array_take((uintptr_t)array);
	CUresult result = real(array);
	if (result == CUDA_SUCCESS)
		vmm_drop(tiles);
	else
		vmm_array_restore(tiles);
	return left(&b, known, result);
}
EXPORT(cuMipmappedArrayDestroy);
