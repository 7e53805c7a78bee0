/* SPDX-License-Identifier: Apache-2.0 */
/*
 * array.c: arrays and mipmapped arrays.
 *
 * How large an array is on a real device is not published. Here rows are rounded up to 64
 * bytes, their number to 8, the whole (of a level) to 64 KiB; docs/simulated-gpu.md. A sparse
 * array, and one whose mapping is deferred, has no memory until some is mapped to it.
 */
#include "internal.h"

#define ROW_BYTES 64u
#define ROWS 8u
#define ARRAY_BYTES ((size_t)65536)

/* Physical memory at a part of a sparse array. */
struct tile {
	struct tile *next;
	CUarrayMapInfo at; /* of this only what names the part */
	struct physical *memory;
};

struct CUarray_st {
	struct CUarray_st *next;
	CUDA_ARRAY3D_DESCRIPTOR desc;
	struct device *dev;
	CUcontext ctx;           /* NULL: its memory belongs to somebody else */
	uint64_t handle;         /* 0: no memory of its own */
	size_t size;
	CUmipmappedArray mipmap; /* that it is a level of, or NULL */
	unsigned int level;
	struct tile *tiles;
};

struct CUmipmappedArray_st {
	struct CUmipmappedArray_st *next;
	CUDA_ARRAY3D_DESCRIPTOR desc;
	unsigned int levels;
	struct device *dev;
	CUcontext ctx;
	uint64_t handle;
	size_t size;
	struct tile *tiles;
};

static CUarray arrays;
static CUmipmappedArray mipmaps;

/* ---- sizes ------------------------------------------------------------------------------ */

/* Bytes of 16 elements of a format; 0: one that we do not know. channels: as the caller says. */
static size_t bytes_of_16(unsigned int format, unsigned int channels)
{
	static const unsigned char packed[] = {1, 2, 4, 2, 4, 8, 1, 2, 4, 2, 4, 8}; /* 0xc0 on */

	if (format >= 0xc0 && format < 0xc0 + sizeof(packed))
		return 16u * packed[format - 0xc0];
	if (channels != 1 && channels != 2 && channels != 4 && channels != 3)
		return 0;
	switch (format) {
	case 0x01: case 0x08: /* 8 bits */
		return 16 * (size_t)channels;
	case 0x02: case 0x09: case 0x10:
		return 32 * (size_t)channels;
	case 0x03: case 0x0a: case 0x20:
		return 64 * (size_t)channels;
	case 0x91: case 0x92: case 0x97: case 0x98: /* blocks of 4 by 4 in 8 bytes */
		return 8;
	case 0x93: case 0x94: case 0x95: case 0x96: case 0x99: case 0x9a: case 0x9b: case 0x9c: case 0x9d: case 0x9e:
		return 16;
	case 0xb0: /* NV12 */
		return 24;
	default:
		return 0;
	}
}

static size_t round_to(size_t n, size_t to)
{
	return (n + to - 1) / to * to;
}

/* Bytes of one level; 0: a descriptor that means nothing. */
static size_t level_size(const CUDA_ARRAY3D_DESCRIPTOR *d, unsigned int level)
{
	size_t per_16 = bytes_of_16(d->Format, d->NumChannels);
	size_t w = d->Width >> level, h = d->Height >> level, depth = d->Depth, row;

	if (d->Width == 0 || (d->Height == 0 && d->Depth != 0 && !(d->Flags & CUDA_ARRAY3D_LAYERED)) || d->Width > 1u << 20 ||
	    d->Height > 1u << 20 || d->Depth > 1u << 16 || per_16 == 0 || d->NumChannels == 3)
		return 0;
	if (!(d->Flags & (CUDA_ARRAY3D_LAYERED | CUDA_ARRAY3D_CUBEMAP)))
		depth >>= level;
	row = round_to(((w ? w : 1) * per_16 + 15) / 16, ROW_BYTES);
	h = d->Height == 0 ? 1 : round_to(h ? h : 1, ROWS);
	return round_to(row * h * (depth ? depth : 1), ARRAY_BYTES);
}

static bool unbacked(const CUDA_ARRAY3D_DESCRIPTOR *d)
{
	return d->Flags & (CUDA_ARRAY3D_SPARSE | CUDA_ARRAY3D_DEFERRED_MAPPING);
}

/* ---- arrays ----------------------------------------------------------------------------- */

static CUarray *find_array(CUarray a)
{
	CUarray *at = &arrays;

	while (*at && *at != a)
		at = &(*at)->next;
	return at;
}

static CUmipmappedArray *find_mipmap(CUmipmappedArray m)
{
	CUmipmappedArray *at = &mipmaps;

	while (*at && *at != m)
		at = &(*at)->next;
	return at;
}

static void drop_tiles(struct tile **at)
{
	struct tile *t;

	while ((t = *at)) {
		*at = t->next;
		t->memory->maps--;
		(void)physical_unused(t->memory); /* always succeeds */
		free(t);
	}
}

static CUresult create(CUarray *out, const CUDA_ARRAY3D_DESCRIPTOR *desc)
{
	CUcontext ctx;
	CUarray a;
	size_t size;
	CUresult ret = enter_context(&ctx);

	if (ret != CUDA_SUCCESS)
		return ret;
	ctx = keeper(ctx);
	size = out && desc ? level_size(desc, 0) : 0;
	ret = size > 0 ? unsafe() : CUDA_ERROR_INVALID_VALUE;
	a = ret == CUDA_SUCCESS ? calloc(1, sizeof(*a)) : NULL;
	if (ret == CUDA_SUCCESS && !a)
		ret = CUDA_ERROR_OUT_OF_MEMORY;
	if (ret == CUDA_SUCCESS && !unbacked(desc))
		ret = allocate_bytes(ctx, size, &a->handle);
	if (ret == CUDA_SUCCESS) {
		a->desc = *desc;
		a->dev = ctx->dev;
		a->ctx = ctx;
		a->size = size;
		a->next = arrays;
		arrays = a;
		*out = a;
	} else {
		free(a);
	}
	leave();
	return ret;
}

EXPORT CUresult cuArray3DCreate_v2(CUarray *array, const CUDA_ARRAY3D_DESCRIPTOR *desc)
{
	return create(array, desc);
}

EXPORT CUresult cuArray3DCreate(CUarray *array, const CUDA_ARRAY3D_DESCRIPTOR_v1 *desc)
{
	CUDA_ARRAY3D_DESCRIPTOR wide = {0};

	if (!desc)
		return CUDA_ERROR_INVALID_VALUE;
	wide.Width = desc->Width;
	wide.Height = desc->Height;
	wide.Depth = desc->Depth;
	wide.Format = desc->Format;
	wide.NumChannels = desc->NumChannels;
	wide.Flags = desc->Flags;
	return create(array, &wide);
}

EXPORT CUresult cuArrayCreate_v2(CUarray *array, const CUDA_ARRAY_DESCRIPTOR *desc)
{
	CUDA_ARRAY3D_DESCRIPTOR wide = {0};

	if (!desc)
		return CUDA_ERROR_INVALID_VALUE;
	wide.Width = desc->Width;
	wide.Height = desc->Height;
	wide.Format = desc->Format;
	wide.NumChannels = desc->NumChannels;
	return create(array, &wide);
}

EXPORT CUresult cuArrayCreate(CUarray *array, const CUDA_ARRAY_DESCRIPTOR_v1 *desc)
{
	CUDA_ARRAY_DESCRIPTOR wide = {0};

	if (!desc)
		return CUDA_ERROR_INVALID_VALUE;
	wide.Width = desc->Width;
	wide.Height = desc->Height;
	wide.Format = desc->Format;
	wide.NumChannels = desc->NumChannels;
	return cuArrayCreate_v2(array, &wide);
}

/* What a level of a mipmapped array measures. */
static CUDA_ARRAY3D_DESCRIPTOR shape(CUarray a)
{
	CUDA_ARRAY3D_DESCRIPTOR d = a->desc;

	if (a->mipmap) {
		d.Width = d.Width >> a->level ? d.Width >> a->level : 1;
		if (d.Height)
			d.Height = d.Height >> a->level ? d.Height >> a->level : 1;
		if (d.Depth && !(d.Flags & (CUDA_ARRAY3D_LAYERED | CUDA_ARRAY3D_CUBEMAP)))
			d.Depth = d.Depth >> a->level ? d.Depth >> a->level : 1;
	}
	return d;
}

static CUresult describe(CUarray array, const void *out, CUDA_ARRAY3D_DESCRIPTOR *d)
{
	CUresult ret = enter();

	if (ret != CUDA_SUCCESS)
		return ret;
	if (!out)
		ret = CUDA_ERROR_INVALID_VALUE;
	else if (!*find_array(array))
		ret = CUDA_ERROR_INVALID_HANDLE;
	else
		*d = shape(array);
	leave();
	return ret;
}

EXPORT CUresult cuArray3DGetDescriptor_v2(CUDA_ARRAY3D_DESCRIPTOR *desc, CUarray array)
{
	CUDA_ARRAY3D_DESCRIPTOR d;
	CUresult ret = describe(array, desc, &d);

	if (ret == CUDA_SUCCESS)
		*desc = d;
	return ret;
}

EXPORT CUresult cuArray3DGetDescriptor(CUDA_ARRAY3D_DESCRIPTOR_v1 *desc, CUarray array)
{
	CUDA_ARRAY3D_DESCRIPTOR d;
	CUresult ret = describe(array, desc, &d);

	if (ret == CUDA_SUCCESS) {
		desc->Width = (unsigned int)d.Width;
		desc->Height = (unsigned int)d.Height;
		desc->Depth = (unsigned int)d.Depth;
		desc->Format = d.Format;
		desc->NumChannels = d.NumChannels;
		desc->Flags = d.Flags;
	}
	return ret;
}

EXPORT CUresult cuArrayGetDescriptor_v2(CUDA_ARRAY_DESCRIPTOR *desc, CUarray array)
{
	CUDA_ARRAY3D_DESCRIPTOR d;
	CUresult ret = describe(array, desc, &d);

	if (ret == CUDA_SUCCESS) {
		desc->Width = d.Width;
		desc->Height = d.Height;
		desc->Format = d.Format;
		desc->NumChannels = d.NumChannels;
	}
	return ret;
}

EXPORT CUresult cuArrayGetDescriptor(CUDA_ARRAY_DESCRIPTOR_v1 *desc, CUarray array)
{
	CUDA_ARRAY3D_DESCRIPTOR d;
	CUresult ret = describe(array, desc, &d);

	if (ret == CUDA_SUCCESS) {
		desc->Width = (unsigned int)d.Width;
		desc->Height = (unsigned int)d.Height;
		desc->Format = d.Format;
		desc->NumChannels = d.NumChannels;
	}
	return ret;
}

static void drop_array(CUarray *at)
{
	CUarray a = *at;

	*at = a->next;
	drop_tiles(&a->tiles);
	free(a);
}

EXPORT CUresult cuArrayDestroy(CUarray array)
{
	CUarray *at;
	CUresult ret = enter();

	if (ret != CUDA_SUCCESS)
		return ret;
	at = find_array(array);
	if (!*at || array->mipmap)
		ret = CUDA_ERROR_INVALID_HANDLE;
	else
		ret = unsafe();
	if (ret == CUDA_SUCCESS) {
		if (array->handle)
			give_memory(array->dev, array->handle);
		drop_array(at);
	}
	leave();
	return ret;
}

/* ---- mipmapped arrays ------------------------------------------------------------------- */

static size_t all_levels(const CUDA_ARRAY3D_DESCRIPTOR *desc, unsigned int levels)
{
	size_t size = 0, of_one;
	unsigned int i;

	if (levels == 0 || levels > 32)
		return 0;
	for (i = 0; i < levels; i++) {
		of_one = level_size(desc, i);
		if (of_one == 0)
			return 0;
		size += of_one;
	}
	return size;
}

/* As many levels as make sense: more are as good as these. */
static unsigned int usable_levels(const CUDA_ARRAY3D_DESCRIPTOR *desc, unsigned int levels)
{
	size_t largest = desc->Width;
	unsigned int most = 1;

	if (desc->Height > largest)
		largest = desc->Height;
	if (desc->Depth > largest && !(desc->Flags & CUDA_ARRAY3D_LAYERED))
		largest = desc->Depth;
	while (largest >>= 1)
		most++;
	return levels < most ? levels : most;
}

/* With the memory of somebody else, if `room` bytes of it are enough. Called with the lock. */
CUresult mipmap_on(CUmipmappedArray *out, const CUDA_ARRAY3D_DESCRIPTOR *desc, unsigned int levels, struct device *dev, size_t room)
{
	size_t size = levels > 0 ? all_levels(desc, usable_levels(desc, levels)) : 0;
	CUmipmappedArray m;

	if (size == 0 || size > room)
		return CUDA_ERROR_INVALID_VALUE;
	m = calloc(1, sizeof(*m));
	if (!m)
		return CUDA_ERROR_OUT_OF_MEMORY;
	m->desc = *desc;
	m->levels = usable_levels(desc, levels);
	m->dev = dev;
	m->size = size;
	m->next = mipmaps;
	mipmaps = m;
	*out = m;
	return CUDA_SUCCESS;
}

EXPORT CUresult cuMipmappedArrayCreate(CUmipmappedArray *mipmap, const CUDA_ARRAY3D_DESCRIPTOR *desc, unsigned int levels)
{
	CUmipmappedArray m = NULL;
	uint64_t handle = 0;
	CUcontext ctx;
	size_t size;
	CUresult ret = enter_context(&ctx);

	if (ret != CUDA_SUCCESS)
		return ret;
	ctx = keeper(ctx);
	size = mipmap && desc && levels > 0 ? all_levels(desc, usable_levels(desc, levels)) : 0;
	ret = size > 0 ? unsafe() : CUDA_ERROR_INVALID_VALUE;
	if (ret == CUDA_SUCCESS && !unbacked(desc))
		ret = allocate_bytes(ctx, size, &handle);
	if (ret == CUDA_SUCCESS) {
		ret = mipmap_on(&m, desc, levels, ctx->dev, size);
		if (ret != CUDA_SUCCESS && handle)
			give_memory(ctx->dev, handle);
	}
	if (ret == CUDA_SUCCESS) {
		m->ctx = ctx;
		m->handle = handle;
		*mipmap = m;
	}
	leave();
	return ret;
}

EXPORT CUresult cuMipmappedArrayGetLevel(CUarray *array, CUmipmappedArray mipmap, unsigned int level)
{
	CUarray a = NULL;
	CUresult ret = enter();

	if (ret != CUDA_SUCCESS)
		return ret;
	if (!*find_mipmap(mipmap)) {
		ret = CUDA_ERROR_INVALID_HANDLE;
	} else if (!array || level >= mipmap->levels) {
		ret = CUDA_ERROR_INVALID_VALUE;
	} else {
		for (a = arrays; a && !(a->mipmap == mipmap && a->level == level); a = a->next)
			;
		if (!a) {
			a = calloc(1, sizeof(*a));
			if (a) {
				a->desc = mipmap->desc;
				a->dev = mipmap->dev;
				a->ctx = mipmap->ctx;
				a->mipmap = mipmap;
				a->level = level;
				a->size = level_size(&mipmap->desc, level);
				a->next = arrays;
				arrays = a;
			} else {
				ret = CUDA_ERROR_OUT_OF_MEMORY;
			}
		}
	}
	if (ret == CUDA_SUCCESS)
		*array = a;
	leave();
	return ret;
}

static void drop_mipmap(CUmipmappedArray *at)
{
	CUmipmappedArray m = *at;
	CUarray *a;

	for (a = &arrays; *a;) {
		if ((*a)->mipmap == m)
			drop_array(a);
		else
			a = &(*a)->next;
	}
	*at = m->next;
	drop_tiles(&m->tiles);
	free(m);
}

void mipmap_drop(CUmipmappedArray mipmap)
{
	CUmipmappedArray *at = find_mipmap(mipmap);

	if (*at)
		drop_mipmap(at);
}

EXPORT CUresult cuMipmappedArrayDestroy(CUmipmappedArray mipmap)
{
	CUmipmappedArray *at;
	CUresult ret = enter();

	if (ret != CUDA_SUCCESS)
		return ret;
	at = find_mipmap(mipmap);
	ret = *at ? unsafe() : CUDA_ERROR_INVALID_HANDLE;
	if (ret == CUDA_SUCCESS) {
		if (mipmap->handle)
			give_memory(mipmap->dev, mipmap->handle);
		drop_mipmap(at);
	}
	leave();
	return ret;
}

/* simgpud has freed everything in ctx: so do we. */
void arrays_drop(CUcontext ctx)
{
	CUmipmappedArray *m;
	CUarray *a;

	for (m = &mipmaps; *m;) {
		if ((*m)->ctx == ctx)
			drop_mipmap(m);
		else
			m = &(*m)->next;
	}
	for (a = &arrays; *a;) {
		if ((*a)->ctx == ctx)
			drop_array(a);
		else
			a = &(*a)->next;
	}
}

/* ---- memory that is mapped to them ------------------------------------------------------ */

static CUresult requirements(CUDA_ARRAY_MEMORY_REQUIREMENTS *out, bool known, const CUDA_ARRAY3D_DESCRIPTOR *desc, size_t size, CUdevice dev)
{
	if (!known)
		return CUDA_ERROR_INVALID_HANDLE;
	if (!device_at(dev))
		return CUDA_ERROR_INVALID_DEVICE;
	if (!out || !(desc->Flags & CUDA_ARRAY3D_DEFERRED_MAPPING))
		return CUDA_ERROR_INVALID_VALUE;
	memset(out, 0, sizeof(*out));
	out->size = round_to(size, PAGE);
	out->alignment = PAGE;
	return CUDA_SUCCESS;
}

EXPORT CUresult cuArrayGetMemoryRequirements(CUDA_ARRAY_MEMORY_REQUIREMENTS *out, CUarray array, CUdevice dev)
{
	bool known;
	CUresult ret = enter();

	if (ret != CUDA_SUCCESS)
		return ret;
	known = *find_array(array) != NULL;
	ret = requirements(out, known, known ? &array->desc : NULL, known ? array->size : 0, dev);
	leave();
	return ret;
}

EXPORT CUresult cuMipmappedArrayGetMemoryRequirements(CUDA_ARRAY_MEMORY_REQUIREMENTS *out, CUmipmappedArray mipmap, CUdevice dev)
{
	bool known;
	CUresult ret = enter();

	if (ret != CUDA_SUCCESS)
		return ret;
	known = *find_mipmap(mipmap) != NULL;
	ret = requirements(out, known, known ? &mipmap->desc : NULL, known ? mipmap->size : 0, dev);
	leave();
	return ret;
}

/* Tiles of 64 KiB, and no level so small that it shares one. */
static CUresult sparse_properties(CUDA_ARRAY_SPARSE_PROPERTIES *out, bool known, const CUDA_ARRAY3D_DESCRIPTOR *desc, unsigned int levels)
{
	size_t bytes;

	if (!known)
		return CUDA_ERROR_INVALID_HANDLE;
	if (!out || !(desc->Flags & CUDA_ARRAY3D_SPARSE))
		return CUDA_ERROR_INVALID_VALUE;
	bytes = bytes_of_16(desc->Format, desc->NumChannels) / 16;
	memset(out, 0, sizeof(*out));
	out->tileExtent.width = bytes ? (unsigned int)(256 / bytes) : 256;
	out->tileExtent.height = 256;
	out->tileExtent.depth = 1;
	out->miptailFirstLevel = levels;
	return CUDA_SUCCESS;
}

EXPORT CUresult cuArrayGetSparseProperties(CUDA_ARRAY_SPARSE_PROPERTIES *out, CUarray array)
{
	bool known;
	CUresult ret = enter();

	if (ret != CUDA_SUCCESS)
		return ret;
	known = *find_array(array) != NULL;
	ret = sparse_properties(out, known, known ? &array->desc : NULL, 1);
	leave();
	return ret;
}

EXPORT CUresult cuMipmappedArrayGetSparseProperties(CUDA_ARRAY_SPARSE_PROPERTIES *out, CUmipmappedArray mipmap)
{
	bool known;
	CUresult ret = enter();

	if (ret != CUDA_SUCCESS)
		return ret;
	known = *find_mipmap(mipmap) != NULL;
	ret = sparse_properties(out, known, known ? &mipmap->desc : NULL, known ? mipmap->levels : 0);
	leave();
	return ret;
}

/* Where the tiles of what `info` names are; NULL: of nothing that may have any. */
static struct tile **tiles_of(const CUarrayMapInfo *info, struct device **dev)
{
	if (info->resourceType == CU_RESOURCE_TYPE_ARRAY && *find_array(info->resource.array) && unbacked(&info->resource.array->desc)) {
		*dev = info->resource.array->dev;
		return &info->resource.array->tiles;
	}
	if (info->resourceType == CU_RESOURCE_TYPE_MIPMAPPED_ARRAY && *find_mipmap(info->resource.mipmap) &&
	    unbacked(&info->resource.mipmap->desc)) {
		*dev = info->resource.mipmap->dev;
		return &info->resource.mipmap->tiles;
	}
	return NULL;
}

static bool same_part(const CUarrayMapInfo *a, const CUarrayMapInfo *b)
{
	if (a->subresourceType != b->subresourceType)
		return false;
	if (a->subresourceType == 0)
		return memcmp(&a->subresource.sparseLevel, &b->subresource.sparseLevel, sizeof(a->subresource.sparseLevel)) == 0;
	return a->subresource.miptail.layer == b->subresource.miptail.layer && a->subresource.miptail.offset == b->subresource.miptail.offset;
}

static CUresult map_tile(const CUarrayMapInfo *info)
{
	struct device *dev = NULL;
	struct tile **at = tiles_of(info, &dev), *t;
	struct physical *memory;

	if (!at || info->flags != 0)
		return CUDA_ERROR_INVALID_VALUE;
	while (*at && !same_part(&(*at)->at, info))
		at = &(*at)->next;
	if (info->memOperationType == CU_MEM_OPERATION_TYPE_UNMAP) {
		t = *at;
		if (t) {
			*at = t->next;
			t->memory->maps--;
			(void)physical_unused(t->memory); /* always succeeds */
			free(t);
		}
		return t ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
	}
	memory = physical_of(info->memHandle.memHandle);
	if (info->memOperationType != CU_MEM_OPERATION_TYPE_MAP || !memory || memory->multicast || memory->dev != dev ||
	    info->offset >= memory->size)
		return CUDA_ERROR_INVALID_VALUE;
	if (*at) { /* something else was there */
		(*at)->memory->maps--;
		memory->maps++;
		(void)physical_unused((*at)->memory); /* always succeeds */
		(*at)->memory = memory;
		return CUDA_SUCCESS;
	}
	t = calloc(1, sizeof(*t));
	if (!t)
		return CUDA_ERROR_OUT_OF_MEMORY;
	t->at = *info;
	t->memory = memory;
	memory->maps++;
	*at = t;
	return CUDA_SUCCESS;
}

EXPORT CUresult cuMemMapArrayAsync(CUarrayMapInfo *list, unsigned int count, CUstream stream)
{
	unsigned int i;
	CUcontext ctx;
	CUresult ret = enter();

	if (ret != CUDA_SUCCESS)
		return ret;
	ret = list && count > 0 ? stream_context(stream, &ctx) : CUDA_ERROR_INVALID_VALUE;
	if (ret == CUDA_SUCCESS && capturing(stream))
		ret = capture_fail(stream);
	for (i = 0; ret == CUDA_SUCCESS && i < count; i++)
		ret = map_tile(&list[i]);
	leave();
	return ret;
}

EXPORT CUresult cuMemMapArrayAsync_ptsz(CUarrayMapInfo *list, unsigned int count, CUstream stream)
{
	return cuMemMapArrayAsync(list, count, per_thread(stream));
}
