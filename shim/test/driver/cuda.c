/* SPDX-License-Identifier: Apache-2.0 */
#include "fake.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "driver.h"

#define CUDA_ERROR_NOT_FOUND 500

#define BLOCKS (1u << 21)
#define SMALL (UINT64_C(1) << 20)

/* Where blocks of each kind lie. A block's number is in its address. */
#define LARGE_BASE UINT64_C(0x7f0000000000)
#define SMALL_BASE UINT64_C(0x300000000)
#define OLD_BASE UINT64_C(0x10000000) /* below 4 GiB, for the first ABI */
#define LARGE_SHIFT 21
#define SMALL_SHIFT 9
#define SMALL_IN_BLOCK (1u << (21 - SMALL_SHIFT))

enum kind { LARGE, LITTLE, OLD, KINDS };

struct block {
	uint64_t bytes; /* 0: free */
	struct CUctx_st *context;
	uint32_t next_free;
	uint8_t managed;
};

static struct {
	pthread_mutex_t lock;
	struct block *blocks;
	uint32_t used, first_free;
	uint32_t living[BLOCKS / SMALL_IN_BLOCK]; /* of small ones */
} heaps[KINDS] = { { .lock = PTHREAD_MUTEX_INITIALIZER }, { .lock = PTHREAD_MUTEX_INITIALIZER }, { .lock = PTHREAD_MUTEX_INITIALIZER } };

_Atomic uint64_t live, managed;
static _Atomic uint64_t total = FAKE_TOTAL, pitch_unit = 512;
static _Atomic int initialised, internal, driver_version = 12080;
_Thread_local struct CUctx_st *current;
static struct CUctx_st primaries[DEVICES];
static int references[DEVICES], active[DEVICES];
static pthread_mutex_t primary_lock = PTHREAD_MUTEX_INITIALIZER;

/* ---- recording ---- */

#define NAMES 512
struct record records[NAMES];
static _Atomic int names;
_Thread_local const char *last;
static pthread_mutex_t names_lock = PTHREAD_MUTEX_INITIALIZER;

int number(const char *symbol)
{
	for (int i = 0; i < names; i++)
		if (strcmp(records[i].symbol, symbol) == 0)
			return i;
	pthread_mutex_lock(&names_lock);
	int n = names;
	if (n == NAMES)
		abort();
	records[n].symbol = symbol; /* a literal of ours, or of a test that stays */
	names = n + 1;
	pthread_mutex_unlock(&names_lock);
	return n;
}

API const char *fake_last(void) { return last; }
API unsigned long fake_calls(const char *symbol) { return records[number(symbol)].calls; }
API void fake_fail(const char *symbol, CUresult result) { records[number(symbol)].failure = result; }
API void fake_stop(const char *symbol, enum fake_stop where) { records[number(symbol)].held = (int)where; }
API int fake_stopped(const char *symbol) { return records[number(symbol)].waiting; }
API uint64_t fake_live_bytes(void) { return live; }
API uint64_t fake_managed_bytes(void) { return managed; }
API void fake_set_total(uint64_t bytes) { total = bytes; }
API void fake_set_pitch(uint64_t bytes) { pitch_unit = bytes; }
API void fake_internal_addresses(int on) { internal = on; }
API void fake_set_version(int version) { driver_version = version; }

/* ---- memory ---- */

int take_bytes(uint64_t bytes)
{
	uint64_t before = atomic_fetch_add(&live, bytes);
	if (before + bytes <= total && before + bytes >= before)
		return 1;
	atomic_fetch_sub(&live, bytes);
	return 0;
}

uint64_t whole(uint64_t bytes) { return (bytes + BLOCK - 1) / BLOCK * BLOCK; }

static int allocate(enum kind kind, uint64_t bytes, int is_managed, uint64_t *pointer)
{
	static const uint64_t base[KINDS] = { LARGE_BASE, SMALL_BASE, OLD_BASE };
	if (current == NULL)
		return CUDA_ERROR_INVALID_CONTEXT;
	if (bytes == 0)
		return CUDA_ERROR_INVALID_VALUE;
	if (bytes > total || (kind != LITTLE && !is_managed && bytes > SMALL && !take_bytes(whole(bytes))))
		return CUDA_ERROR_OUT_OF_MEMORY;
	pthread_mutex_lock(&heaps[kind].lock);
	if (heaps[kind].blocks == NULL)
		heaps[kind].blocks = mmap(NULL, BLOCKS * sizeof(struct block), PROT_READ | PROT_WRITE,
					  MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
	uint32_t n = heaps[kind].first_free;
	if (n != 0)
		heaps[kind].first_free = heaps[kind].blocks[n].next_free;
	else
		n = ++heaps[kind].used;
	if (n >= BLOCKS)
		abort();
	int result = CUDA_SUCCESS;
	if (kind != LARGE && bytes <= SMALL && heaps[kind].living[n / SMALL_IN_BLOCK]++ == 0 && !take_bytes(BLOCK)) {
		heaps[kind].living[n / SMALL_IN_BLOCK]--;
		heaps[kind].blocks[n].next_free = heaps[kind].first_free;
		heaps[kind].first_free = n;
		result = CUDA_ERROR_OUT_OF_MEMORY;
	} else {
		heaps[kind].blocks[n] = (struct block){ bytes, keeper(), 0, (uint8_t)is_managed };
		if (is_managed)
			managed += whole(bytes);
		*pointer = base[kind] + ((uint64_t)n << (kind == LARGE ? LARGE_SHIFT : SMALL_SHIFT));
	}
	pthread_mutex_unlock(&heaps[kind].lock);
	return result;
}

static void drop(enum kind kind, uint32_t n)
{
	struct block *b = &heaps[kind].blocks[n];
	if (b->managed)
		managed -= whole(b->bytes);
	else if (b->bytes > SMALL)
		live -= whole(b->bytes);
	else if (--heaps[kind].living[n / SMALL_IN_BLOCK] == 0)
		live -= BLOCK;
	b->bytes = 0;
	b->next_free = heaps[kind].first_free;
	heaps[kind].first_free = n;
}

int release_pointer(uint64_t pointer)
{
	int piece = pointer == 0 ? CUDA_SUCCESS : release_piece(pointer);
	if (piece >= 0)
		return piece;
	enum kind kind = pointer >= LARGE_BASE ? LARGE : pointer >= SMALL_BASE ? LITTLE : OLD;
	uint64_t n = kind == LARGE ? (pointer - LARGE_BASE) >> LARGE_SHIFT :
		     kind == LITTLE ? (pointer - SMALL_BASE) >> SMALL_SHIFT :
				      (pointer - OLD_BASE) >> SMALL_SHIFT;
	int result = CUDA_ERROR_INVALID_VALUE;
	pthread_mutex_lock(&heaps[kind].lock);
	if (n < BLOCKS && heaps[kind].blocks != NULL && heaps[kind].blocks[n].bytes != 0) {
		drop(kind, (uint32_t)n);
		result = CUDA_SUCCESS;
	}
	pthread_mutex_unlock(&heaps[kind].lock);
	return result;
}

void release_context(struct CUctx_st *context)
{
	for (int kind = 0; kind < KINDS; kind++) {
		pthread_mutex_lock(&heaps[kind].lock);
		for (uint32_t n = 1; heaps[kind].blocks != NULL && n <= heaps[kind].used; n++)
			if (heaps[kind].blocks[n].bytes != 0 && heaps[kind].blocks[n].context == context)
				drop((enum kind)kind, n);
		pthread_mutex_unlock(&heaps[kind].lock);
	}
	release_modules(context);
	release_arrays(context);
	live -= FAKE_CONTEXT_BYTES + (uint64_t)context->grown;
	context->grown = 0;
	memset(context->limits, 0, sizeof context->limits);
}

API fn_cuMemAlloc cuMemAlloc;
CUresult cuMemAlloc(CUdeviceptr_v1 *pointer, unsigned int bytes)
{
	uint64_t got;
	ENTER();
	if (pointer == NULL)
		return CUDA_ERROR_INVALID_VALUE;
	int result = allocate(OLD, bytes, 0, &got);
	if (result == CUDA_SUCCESS)
		*pointer = (CUdeviceptr_v1)got;
	return result;
}

API fn_cuMemAlloc_v2 cuMemAlloc_v2;
CUresult cuMemAlloc_v2(CUdeviceptr *pointer, size_t bytes)
{
	uint64_t got;
	ENTER();
	if (pointer == NULL)
		return CUDA_ERROR_INVALID_VALUE;
	int result = allocate(bytes <= SMALL ? LITTLE : LARGE, bytes, 0, &got);
	if (result == CUDA_SUCCESS)
		*pointer = got;
	return result;
}

static uint64_t pitched(uint64_t width) { return (width + pitch_unit - 1) / pitch_unit * pitch_unit; }

API fn_cuMemAllocPitch cuMemAllocPitch;
CUresult cuMemAllocPitch(CUdeviceptr_v1 *pointer, unsigned int *pitch, unsigned int width, unsigned int height,
			 unsigned int element)
{
	uint64_t got;
	ENTER();
	if (pointer == NULL || pitch == NULL || (element != 4 && element != 8 && element != 16))
		return CUDA_ERROR_INVALID_VALUE;
	int result = allocate(OLD, pitched(width) * height, 0, &got);
	if (result == CUDA_SUCCESS) {
		*pointer = (CUdeviceptr_v1)got;
		*pitch = (unsigned int)pitched(width);
	}
	return result;
}

API fn_cuMemAllocPitch_v2 cuMemAllocPitch_v2;
CUresult cuMemAllocPitch_v2(CUdeviceptr *pointer, size_t *pitch, size_t width, size_t height, unsigned int element)
{
	uint64_t got, bytes;
	ENTER();
	if (pointer == NULL || pitch == NULL || (element != 4 && element != 8 && element != 16) ||
	    __builtin_mul_overflow(pitched(width), height, &bytes))
		return CUDA_ERROR_INVALID_VALUE;
	int result = allocate(bytes <= SMALL ? LITTLE : LARGE, bytes, 0, &got);
	if (result == CUDA_SUCCESS) {
		*pointer = got;
		*pitch = pitched(width);
	}
	return result;
}

API fn_cuMemAllocManaged cuMemAllocManaged;
CUresult cuMemAllocManaged(CUdeviceptr *pointer, size_t bytes, unsigned int flags)
{
	uint64_t got;
	ENTER();
	if (pointer == NULL || (flags != 1 && flags != 2))
		return CUDA_ERROR_INVALID_VALUE;
	int result = allocate(LARGE, bytes, 1, &got);
	if (result == CUDA_SUCCESS)
		*pointer = got;
	return result;
}

API fn_cuMemFree cuMemFree;
CUresult cuMemFree(CUdeviceptr_v1 pointer)
{
	ENTER();
	return release_pointer(pointer);
}

API fn_cuMemFree_v2 cuMemFree_v2;
CUresult cuMemFree_v2(CUdeviceptr pointer)
{
	ENTER();
	return release_pointer(pointer);
}

static uint64_t free_bytes(void)
{
	uint64_t used = live;
	return used < total ? total - used : 0;
}

API fn_cuMemGetInfo cuMemGetInfo;
CUresult cuMemGetInfo(unsigned int *free_, unsigned int *total_)
{
	ENTER();
	if (current == NULL)
		return CUDA_ERROR_INVALID_CONTEXT;
	if (free_ != NULL)
		*free_ = free_bytes() > UINT32_MAX ? UINT32_MAX : (unsigned int)free_bytes();
	if (total_ != NULL)
		*total_ = total > UINT32_MAX ? UINT32_MAX : (unsigned int)total;
	return CUDA_SUCCESS;
}

API fn_cuMemGetInfo_v2 cuMemGetInfo_v2;
CUresult cuMemGetInfo_v2(size_t *free_, size_t *total_)
{
	ENTER();
	if (current == NULL)
		return CUDA_ERROR_INVALID_CONTEXT;
	if (free_ != NULL)
		*free_ = free_bytes();
	if (total_ != NULL)
		*total_ = total;
	return CUDA_SUCCESS;
}

/* ---- devices and contexts ---- */

API fn_cuInit cuInit;
CUresult cuInit(unsigned int flags)
{
	ENTER();
	if (flags != 0)
		return CUDA_ERROR_INVALID_VALUE;
	initialised = 1;
	return CUDA_SUCCESS;
}

static int device_error(CUdevice device)
{
	if (!initialised)
		return CUDA_ERROR_NOT_INITIALIZED;
	return device < 0 || device >= DEVICES ? CUDA_ERROR_INVALID_DEVICE : CUDA_SUCCESS;
}

static CUresult uuid(CUuuid *to, CUdevice device)
{
	if (to == NULL)
		return CUDA_ERROR_INVALID_VALUE;
	int error = device_error(device);
	if (error == CUDA_SUCCESS) {
		uint8_t raw[16];
		fake_uuid((unsigned int)device, raw);
		memcpy(to->bytes, raw, sizeof raw);
	}
	return error;
}

API fn_cuDeviceGetUuid cuDeviceGetUuid;
CUresult cuDeviceGetUuid(CUuuid *to, CUdevice device)
{
	ENTER();
	return uuid(to, device);
}

API fn_cuDeviceGetUuid_v2 cuDeviceGetUuid_v2;
CUresult cuDeviceGetUuid_v2(CUuuid *to, CUdevice device)
{
	ENTER();
	return uuid(to, device);
}

API fn_cuDeviceTotalMem cuDeviceTotalMem;
CUresult cuDeviceTotalMem(unsigned int *bytes, CUdevice device)
{
	ENTER();
	int error = bytes == NULL ? CUDA_ERROR_INVALID_VALUE : device_error(device);
	if (error == CUDA_SUCCESS)
		*bytes = total > UINT32_MAX ? UINT32_MAX : (unsigned int)total;
	return error;
}

API fn_cuDeviceTotalMem_v2 cuDeviceTotalMem_v2;
CUresult cuDeviceTotalMem_v2(size_t *bytes, CUdevice device)
{
	ENTER();
	int error = bytes == NULL ? CUDA_ERROR_INVALID_VALUE : device_error(device);
	if (error == CUDA_SUCCESS)
		*bytes = total;
	return error;
}

static CUresult create(CUcontext *context, CUdevice device)
{
	int error = context == NULL ? CUDA_ERROR_INVALID_VALUE : device_error(device);
	if (error != CUDA_SUCCESS)
		return error;
	if (!take_bytes(FAKE_CONTEXT_BYTES))
		return CUDA_ERROR_OUT_OF_MEMORY;
	struct CUctx_st *c = calloc(1, sizeof *c);
	if (c == NULL)
		abort();
	c->device = device;
	*context = current = c;
	return CUDA_SUCCESS;
}

API fn_cuCtxCreate cuCtxCreate;
CUresult cuCtxCreate(CUcontext *context, unsigned int flags, CUdevice device)
{
	ENTER();
	(void)flags;
	return create(context, device);
}

API fn_cuCtxCreate_v2 cuCtxCreate_v2;
CUresult cuCtxCreate_v2(CUcontext *context, unsigned int flags, CUdevice device)
{
	ENTER();
	(void)flags;
	return create(context, device);
}

API fn_cuCtxCreate_v3 cuCtxCreate_v3;
CUresult cuCtxCreate_v3(CUcontext *context, CUexecAffinityParam *params, int count, unsigned int flags, CUdevice device)
{
	ENTER();
	(void)flags;
	if (count < 0 || (count > 0) != (params != NULL))
		return CUDA_ERROR_INVALID_VALUE;
	return create(context, device);
}

API fn_cuCtxCreate_v4 cuCtxCreate_v4;
CUresult cuCtxCreate_v4(CUcontext *context, CUctxCreateParams *params, unsigned int flags, CUdevice device)
{
	ENTER();
	(void)params;
	(void)flags;
	return create(context, device);
}

static CUresult destroy(CUcontext context)
{
	if (context == NULL || (context >= primaries && context < primaries + DEVICES))
		return CUDA_ERROR_INVALID_CONTEXT;
	release_context(context);
	if (current == context)
		current = NULL;
	free(context);
	return CUDA_SUCCESS;
}

API fn_cuCtxDestroy cuCtxDestroy;
CUresult cuCtxDestroy(CUcontext context)
{
	ENTER();
	return destroy(context);
}

API fn_cuCtxDestroy_v2 cuCtxDestroy_v2;
CUresult cuCtxDestroy_v2(CUcontext context)
{
	ENTER();
	return destroy(context);
}

API fn_cuCtxGetCurrent cuCtxGetCurrent;
CUresult cuCtxGetCurrent(CUcontext *context)
{
	ENTER();
	*context = current;
	return CUDA_SUCCESS;
}

API CUresult cuCtxSetCurrent(CUcontext context);
CUresult cuCtxSetCurrent(CUcontext context)
{
	ENTER();
	current = context;
	return CUDA_SUCCESS;
}

API fn_cuCtxGetDevice cuCtxGetDevice;
CUresult cuCtxGetDevice(CUdevice *device)
{
	ENTER();
	if (current == NULL)
		return CUDA_ERROR_INVALID_CONTEXT;
	*device = current->device;
	return CUDA_SUCCESS;
}

API fn_cuDevicePrimaryCtxRetain cuDevicePrimaryCtxRetain;
CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device)
{
	ENTER();
	int error = context == NULL ? CUDA_ERROR_INVALID_VALUE : device_error(device);
	if (error != CUDA_SUCCESS)
		return error;
	pthread_mutex_lock(&primary_lock);
	if (!active[device] && !take_bytes(FAKE_CONTEXT_BYTES)) {
		error = CUDA_ERROR_OUT_OF_MEMORY;
	} else {
		active[device] = 1;
		references[device]++;
		primaries[device].device = device;
		*context = &primaries[device];
	}
	pthread_mutex_unlock(&primary_lock);
	return error;
}

/* A reset ends the context; what was retained is still to be released. */
static CUresult primary_release(CUdevice device, int reset)
{
	int error = device_error(device);
	if (error != CUDA_SUCCESS)
		return error;
	pthread_mutex_lock(&primary_lock);
	if (!reset && references[device] == 0) {
		error = CUDA_ERROR_INVALID_CONTEXT;
	} else {
		references[device] -= !reset;
		if (active[device] && (reset || references[device] == 0)) {
			release_context(&primaries[device]);
			active[device] = 0;
		}
	}
	pthread_mutex_unlock(&primary_lock);
	return error;
}

API fn_cuDevicePrimaryCtxGetState cuDevicePrimaryCtxGetState;
CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned int *flags, int *is_active)
{
	ENTER();
	if (flags == NULL || is_active == NULL)
		return CUDA_ERROR_INVALID_VALUE;
	int error = device_error(device);
	if (error != CUDA_SUCCESS)
		return error;
	pthread_mutex_lock(&primary_lock);
	*flags = 0;
	*is_active = active[device];
	pthread_mutex_unlock(&primary_lock);
	return CUDA_SUCCESS;
}

API fn_cuDevicePrimaryCtxRelease cuDevicePrimaryCtxRelease;
CUresult cuDevicePrimaryCtxRelease(CUdevice device)
{
	ENTER();
	return primary_release(device, 0);
}

API fn_cuDevicePrimaryCtxRelease_v2 cuDevicePrimaryCtxRelease_v2;
CUresult cuDevicePrimaryCtxRelease_v2(CUdevice device)
{
	ENTER();
	return primary_release(device, 0);
}

API fn_cuDevicePrimaryCtxReset cuDevicePrimaryCtxReset;
CUresult cuDevicePrimaryCtxReset(CUdevice device)
{
	ENTER();
	return primary_release(device, 1);
}

API fn_cuDevicePrimaryCtxReset_v2 cuDevicePrimaryCtxReset_v2;
CUresult cuDevicePrimaryCtxReset_v2(CUdevice device)
{
	ENTER();
	return primary_release(device, 1);
}

/* ---- not hooked ---- */

API CUresult cuMemsetD8_v2(CUdeviceptr pointer, unsigned char value, size_t count);
CUresult cuMemsetD8_v2(CUdeviceptr pointer, unsigned char value, size_t count)
{
	ENTER();
	(void)pointer, (void)value, (void)count;
	return CUDA_SUCCESS;
}

API CUresult cuMemsetD8_v2_ptds(CUdeviceptr pointer, unsigned char value, size_t count);
CUresult cuMemsetD8_v2_ptds(CUdeviceptr pointer, unsigned char value, size_t count)
{
	ENTER();
	(void)pointer, (void)value, (void)count;
	return CUDA_SUCCESS;
}

API CUresult cuGetExportTable(const void **table, const CUuuid *id);
CUresult cuGetExportTable(const void **table, const CUuuid *id)
{
	static const int it = 0;
	ENTER();
	if (table == NULL || id == NULL)
		return CUDA_ERROR_INVALID_VALUE;
	*table = &it;
	return CUDA_SUCCESS;
}

/* ---- addresses ---- */

typedef void function(void);

/* A second way into a function, as a driver may have that does not give out what it exports. */
#define INTERNAL(symbol, parameters, arguments) \
	static CUresult internal_##symbol parameters { return symbol arguments; }
INTERNAL(cuMemAlloc, (CUdeviceptr_v1 * p, unsigned int n), (p, n))
INTERNAL(cuMemAlloc_v2, (CUdeviceptr * p, size_t n), (p, n))
INTERNAL(cuMemFree, (CUdeviceptr_v1 p), (p))
INTERNAL(cuMemFree_v2, (CUdeviceptr p), (p))
INTERNAL(cuCtxCreate_v2, (CUcontext * c, unsigned int f, CUdevice d), (c, f, d))
INTERNAL(cuCtxCreate_v4, (CUcontext * c, CUctxCreateParams *p, unsigned int f, CUdevice d), (c, p, f, d))

API fn_cuGetProcAddress cuGetProcAddress;
API fn_cuGetProcAddress_v2 cuGetProcAddress_v2;

/* Whatever the shim hooks. */
#define FLAG_ANY 0
#define FLAG_PER_THREAD CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM
#define FLAG_BY_SYMBOL 4 /* which nobody may ask for */
#define ROW_NVML(name, symbol, version, stream)
#define ROW_CUDA(name, symbol, version, stream) ADDRESS(name, symbol, version, FLAG_##stream),
#define HOOKED_ROW(library, symbol, name, version, stream) ROW_##library(name, symbol, version, stream)

#define ADDRESS(name, symbol, version, flags) { #name, #symbol, (function *)symbol, NULL, version, flags }
#define TWO_WAYS(name, symbol, version) { #name, #symbol, (function *)symbol, (function *)internal_##symbol, version, 0 }
static const struct address {
	const char *name, *symbol;
	function *exported, *hidden;
	int version;
	unsigned int flags;
} list[] = {
	TWO_WAYS(cuMemAlloc, cuMemAlloc, 2000),
	TWO_WAYS(cuMemAlloc, cuMemAlloc_v2, 3020),
	ADDRESS(cuMemAllocPitch, cuMemAllocPitch, 2000, 0),
	ADDRESS(cuMemAllocPitch, cuMemAllocPitch_v2, 3020, 0),
	ADDRESS(cuMemAllocManaged, cuMemAllocManaged, 6000, 0),
	TWO_WAYS(cuMemFree, cuMemFree, 2000),
	TWO_WAYS(cuMemFree, cuMemFree_v2, 3020),
	ADDRESS(cuMemGetInfo, cuMemGetInfo, 2000, 0),
	ADDRESS(cuMemGetInfo, cuMemGetInfo_v2, 3020, 0),
	ADDRESS(cuInit, cuInit, 2000, 0),
	ADDRESS(cuDeviceGetUuid, cuDeviceGetUuid, 9020, 0),
	ADDRESS(cuDeviceGetUuid, cuDeviceGetUuid_v2, 11040, 0),
	ADDRESS(cuDeviceTotalMem, cuDeviceTotalMem, 2000, 0),
	ADDRESS(cuDeviceTotalMem, cuDeviceTotalMem_v2, 3020, 0),
	ADDRESS(cuCtxCreate, cuCtxCreate, 2000, 0),
	TWO_WAYS(cuCtxCreate, cuCtxCreate_v2, 3020),
	ADDRESS(cuCtxCreate, cuCtxCreate_v3, 11040, 0),
	TWO_WAYS(cuCtxCreate, cuCtxCreate_v4, 12050),
	ADDRESS(cuCtxDestroy, cuCtxDestroy, 2000, 0),
	ADDRESS(cuCtxDestroy, cuCtxDestroy_v2, 4000, 0),
	ADDRESS(cuCtxGetCurrent, cuCtxGetCurrent, 4000, 0),
	ADDRESS(cuCtxSetCurrent, cuCtxSetCurrent, 4000, 0),
	ADDRESS(cuCtxGetDevice, cuCtxGetDevice, 2000, 0),
	ADDRESS(cuDevicePrimaryCtxRetain, cuDevicePrimaryCtxRetain, 7000, 0),
	ADDRESS(cuDevicePrimaryCtxRelease, cuDevicePrimaryCtxRelease, 7000, 0),
	ADDRESS(cuDevicePrimaryCtxRelease, cuDevicePrimaryCtxRelease_v2, 11000, 0),
	ADDRESS(cuDevicePrimaryCtxReset, cuDevicePrimaryCtxReset, 7000, 0),
	ADDRESS(cuDevicePrimaryCtxReset, cuDevicePrimaryCtxReset_v2, 11000, 0),
	ADDRESS(cuMemsetD8, cuMemsetD8_v2, 3020, 0),
	ADDRESS(cuMemsetD8, cuMemsetD8_v2_ptds, 7000, CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM),
	ADDRESS(cuGetExportTable, cuGetExportTable, 3000, 0),
	ADDRESS(cuGetProcAddress, cuGetProcAddress, 11030, 0),
	ADDRESS(cuGetProcAddress, cuGetProcAddress_v2, 12000, 0),
	TABLE_HOOKED(HOOKED_ROW)
};
#define LIST (sizeof list / sizeof list[0])

/* status: 0 found, 1 no such name, 2 version too low. */
static CUresult find(const char *name, void **pointer, int version, cuuint64_t flags, int *status)
{
	const struct address *best = NULL;
	int known = 0;
	if (name == NULL || pointer == NULL || flags > 2)
		return CUDA_ERROR_INVALID_VALUE;
	for (size_t i = 0; i < LIST; i++) {
		const struct address *a = &list[i];
		if (strcmp(a->name, name) != 0)
			continue;
		known = 1;
		if (a->version > version || a->version > driver_version || (a->flags & ~(unsigned int)flags) != 0)
			continue;
		if (best == NULL || a->flags > best->flags || (a->flags == best->flags && a->version > best->version))
			best = a;
	}
	*status = best != NULL ? 0 : known ? 2 : 1;
	*pointer = best == NULL ? NULL :
		   (void *)(uintptr_t)(internal && best->hidden != NULL ? best->hidden : best->exported);
	return best != NULL ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}

CUresult cuGetProcAddress(const char *name, void **pointer, int version, cuuint64_t flags)
{
	int status;
	ENTER();
	return find(name, pointer, version, flags, &status);
}

CUresult cuGetProcAddress_v2(const char *name, void **pointer, int version, cuuint64_t flags, int *status)
{
	int found;
	ENTER();
	CUresult result = find(name, pointer, version, flags, &found);
	if (status != NULL && (result == CUDA_SUCCESS || result == CUDA_ERROR_NOT_FOUND))
		*status = found;
	return result;
}

static cuuint64_t per_thread(cuuint64_t flags) { return flags == 0 ? CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM : flags; }

CUresult cuGetProcAddress_ptsz(const char *name, void **pointer, int version, cuuint64_t flags)
{
	int status;
	ENTER();
	return find(name, pointer, version, per_thread(flags), &status);
}

CUresult cuGetProcAddress_v2_ptsz(const char *name, void **pointer, int version, cuuint64_t flags, int *status)
{
	int found;
	ENTER();
	CUresult result = find(name, pointer, version, per_thread(flags), &found);
	if (status != NULL && (result == CUDA_SUCCESS || result == CUDA_ERROR_NOT_FOUND))
		*status = found;
	return result;
}

API void *fake_address(const char *symbol)
{
	for (size_t i = 0; i < LIST; i++)
		if (strcmp(list[i].symbol, symbol) == 0)
			return (void *)(uintptr_t)list[i].exported;
	return NULL;
}

API int fake_finds_own(const char *symbol)
{
	Dl_info us;
	void *handle = NULL;
	if (dladdr((void *)(uintptr_t)&fake_finds_own, &us) != 0)
		handle = dlopen(us.dli_fname, RTLD_NOLOAD | RTLD_NOW);
	void *found = handle == NULL ? NULL : dlsym(handle, symbol);
	if (handle != NULL)
		dlclose(handle);
	return found != NULL && found == fake_address(symbol);
}
