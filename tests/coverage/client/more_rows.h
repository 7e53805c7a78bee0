/* SPDX-License-Identifier: Apache-2.0 */
/*
 * more_rows.h: rows that rows.h has not, since they need a second process, or a state that only one
 * thread at a time can have: shared memory, captured allocations, a context's limits, graphics,
 * memory that something else than a handle keeps, and sizes below a block's.
 *
 * Where something takes no device memory of its own (a registration, memory of the host), the row
 * takes linear memory beside it: all that is held must be that.
 */
#ifndef COVERAGE_MORE_ROWS_H
#define COVERAGE_MORE_ROWS_H

#include "peer.h"

/* ---- IPC: the owner is charged, the importer is not ------------------------------------------- */

typedef CUresult get_handle_function(CUipcMemHandle *, CUdeviceptr);
typedef CUresult open_function(CUdeviceptr *, CUipcMemHandle, unsigned int);
typedef CUresult export_function(void *, CUmemGenericAllocationHandle, CUmemAllocationHandleType, unsigned long long);
typedef CUresult import_function(CUmemGenericAllocationHandle *, void *, CUmemAllocationHandleType);

static CUresult linear(size_t bytes, struct taken *t)
{
	CUdeviceptr p = 0;
	CUresult ret = ASK(cuMemAlloc_v2, (CUdeviceptr *, size_t), &p, bytes);
	t->a = p;
	return ret;
}

/* Ours, opened by the other process. */
static CUresult take_ipc_get(const struct row *r, size_t bytes, struct taken *t)
{
	struct message m = { .op = PEER_OPEN, .kind = PEER_LINEAR };
	CUipcMemHandle handle;
	(void)r;
	CUresult ret = linear(bytes, t);
	if (ret != CUDA_SUCCESS)
		return ret;
	must(FN(get_handle_function *)(&handle, t->a), "a handle of memory");
	memcpy(m.data, &handle, sizeof(handle));
	must(peer_ask(&m, -1, NULL), "open a handle in another process");
	t->b = m.a;
	return ret;
}

static void peer_close(enum peer_kind kind, uint64_t a, uint64_t b)
{
	struct message m = { .op = PEER_CLOSE, .kind = kind, .a = a, .b = b };
	must(peer_ask(&m, -1, NULL), "close in another process");
}

static void give_ipc_get(const struct row *r, struct taken *t)
{
	(void)r;
	peer_close(PEER_LINEAR, t->b, 0);
	CALL(cuMemFree_v2, (CUdeviceptr), t->a);
}

/* It stays until the importer lets go. */
static void give_owner_first(const struct row *r, struct taken *t)
{
	(void)r;
	CALL(cuMemFree_v2, (CUdeviceptr), t->a);
	peer_close(PEER_LINEAR, t->b, 0);
}

static CUresult peer_offer(enum peer_kind kind, size_t bytes, struct message *m, int *fd)
{
	*m = (struct message){ .op = PEER_OFFER, .kind = kind, .bytes = bytes };
	return peer_ask(m, -1, fd);
}

static void peer_drop(enum peer_kind kind, uint64_t a)
{
	struct message m = { .op = PEER_DROP, .kind = kind, .a = a };
	must(peer_ask(&m, -1, NULL), "free in another process");
}

/* The other process's, opened here. */
static CUresult opened(open_function *open_it, size_t bytes, struct taken *t)
{
	CUipcMemHandle handle;
	struct message m;
	CUdeviceptr p = 0;
	CUresult ret = peer_offer(PEER_LINEAR, bytes, &m, NULL);
	if (ret != CUDA_SUCCESS)
		return ret;
	memcpy(&handle, m.data, sizeof(handle));
	must(open_it(&p, handle, 1), "open a handle");
	t->a = p;
	t->b = m.a;
	return ret;
}

static CUresult take_ipc_open(const struct row *r, size_t bytes, struct taken *t)
{
	(void)r;
	return opened(FN(open_function *), bytes, t);
}

static void give_ipc_open(const struct row *r, struct taken *t)
{
	(void)r;
	CALL(cuIpcCloseMemHandle, (CUdeviceptr), t->a);
	peer_drop(PEER_LINEAR, t->b);
}

static CUresult take_ipc_close(const struct row *r, size_t bytes, struct taken *t)
{
	(void)r;
	return opened((open_function *)(uintptr_t)symbol("cuIpcOpenMemHandle_v2"), bytes, t);
}

static void give_ipc_close(const struct row *r, struct taken *t)
{
	(void)r;
	must(FN(CUresult(*)(CUdeviceptr))(t->a), "close a handle");
	peer_drop(PEER_LINEAR, t->b);
}

/* ---- shared physical memory --------------------------------------------------------------------- */

static CUresult exported(export_function *export_it, size_t bytes, struct taken *t)
{
	struct message m = { .op = PEER_OPEN, .kind = PEER_PHYSICAL };
	CUmemGenericAllocationHandle h;
	int fd = -1;
	CUresult ret = create((create_function *)(uintptr_t)symbol("cuMemCreate"), bytes, &h);
	if (ret != CUDA_SUCCESS)
		return ret;
	must(export_it(&fd, h, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0), "export memory");
	must(peer_ask(&m, fd, NULL), "import memory in another process");
	close(fd);
	t->a = h;
	t->b = m.a;
	return ret;
}

static CUresult take_export(const struct row *r, size_t bytes, struct taken *t)
{
	(void)r;
	return exported(FN(export_function *), bytes, t);
}

static void give_export(const struct row *r, struct taken *t)
{
	(void)r;
	peer_close(PEER_PHYSICAL, t->b, 0);
	release(t->a);
}

static void give_export_owner_first(const struct row *r, struct taken *t)
{
	(void)r;
	release(t->a);
	peer_close(PEER_PHYSICAL, t->b, 0);
}

static CUresult take_import(const struct row *r, size_t bytes, struct taken *t)
{
	CUmemGenericAllocationHandle h = 0;
	struct message m;
	int fd = -1;
	(void)r;
	CUresult ret = peer_offer(PEER_PHYSICAL, bytes, &m, &fd);
	if (ret != CUDA_SUCCESS)
		return ret;
	must(FN(import_function *)(&h, (void *)(intptr_t)fd, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR), "import memory");
	close(fd);
	t->a = h;
	t->b = m.a;
	return ret;
}

static void give_import(const struct row *r, struct taken *t)
{
	(void)r;
	release(t->a);
	peer_drop(PEER_PHYSICAL, t->b);
}

typedef CUresult external_function(CUexternalMemory *, const CUDA_EXTERNAL_MEMORY_HANDLE_DESC *);
typedef CUresult buffer_function(CUdeviceptr *, CUexternalMemory, const CUDA_EXTERNAL_MEMORY_BUFFER_DESC *);
typedef CUresult mipmap_function(CUmipmappedArray *, CUexternalMemory, const CUDA_EXTERNAL_MEMORY_MIPMAPPED_ARRAY_DESC *);

/* Which step of an import through the interface for others' memory is under test. */
static CUresult external(const char *which, size_t bytes, struct taken *t)
{
	CUDA_EXTERNAL_MEMORY_HANDLE_DESC d = { .type = CU_EXTERNAL_MEMORY_HANDLE_TYPE_OPAQUE_FD, .size = bytes };
	CUDA_EXTERNAL_MEMORY_BUFFER_DESC b = { .size = bytes };
	CUDA_EXTERNAL_MEMORY_MIPMAPPED_ARRAY_DESC a = { .arrayDesc = { ARRAY_WIDTH, 256, 0, FORMAT_FLOAT, 1, 0 }, .numLevels = 1 };
	bool here = strncmp(which, "cuImport", 8) == 0, array = strstr(which, "Mipmapped");
	CUexternalMemory e = NULL;
	CUmipmappedArray mipmap = NULL;
	CUdeviceptr p = 0;
	struct message m;
	CUresult ret = peer_offer(PEER_PHYSICAL, bytes, &m, &d.handle.fd);
	if (ret != CUDA_SUCCESS)
		return ret;
	external_function *import_it = here ? FN(external_function *) : (external_function *)(uintptr_t)symbol("cuImportExternalMemory");
	buffer_function *buffer = here || array ? (buffer_function *)(uintptr_t)symbol("cuExternalMemoryGetMappedBuffer") : FN(buffer_function *);
	must(import_it(&e, &d), "import external memory");
	if (array)
		must(FN(mipmap_function *)(&mipmap, e, &a), "an array in external memory");
	else
		must(buffer(&p, e, &b), "a buffer in external memory");
	t->a = (uintptr_t)e;
	t->b = m.a;
	t->c = array ? (uintptr_t)mipmap : p;
	return ret;
}

static CUresult take_other(const struct row *r, size_t bytes, struct taken *t) { return external(r->symbol, bytes, t); }

static void give_other(const struct row *r, struct taken *t)
{
	if (strstr(r->symbol, "Mipmapped"))
		CALL(cuMipmappedArrayDestroy, (CUmipmappedArray), (CUmipmappedArray)(uintptr_t)t->c);
	else
		CALL(cuMemFree_v2, (CUdeviceptr), t->c);
	CALL(cuDestroyExternalMemory, (CUexternalMemory), (CUexternalMemory)(uintptr_t)t->a);
	peer_drop(PEER_PHYSICAL, t->b);
}

/* ---- shared pools ------------------------------------------------------------------------------- */

typedef CUresult export_pool_function(void *, CUmemoryPool, CUmemAllocationHandleType, unsigned long long);
typedef CUresult export_pointer_function(CUmemPoolPtrExportData *, CUdeviceptr);
typedef CUresult import_pool_function(CUmemoryPool *, void *, CUmemAllocationHandleType, unsigned long long);
typedef CUresult import_pointer_function(CUdeviceptr *, CUmemoryPool, CUmemPoolPtrExportData *);

static CUresult take_pool_export(const struct row *r, size_t bytes, struct taken *t)
{
	struct message m = { .op = PEER_OPEN, .kind = PEER_POOLED };
	CUmemPoolPtrExportData data;
	bool pointer = strcmp(r->symbol, "cuMemPoolExportPointer") == 0;
	CUdeviceptr p = 0;
	int fd = -1;
	CUresult ret = ASK(cuMemAllocFromPoolAsync, (CUdeviceptr *, size_t, CUmemoryPool, CUstream), &p, bytes, pool, NULL);
	if (ret != CUDA_SUCCESS)
		return ret;
	export_pool_function *export_it = pointer ? (export_pool_function *)(uintptr_t)symbol("cuMemPoolExportToShareableHandle") : FN(export_pool_function *);
	export_pointer_function *export_pointer = pointer ? FN(export_pointer_function *) : (export_pointer_function *)(uintptr_t)symbol("cuMemPoolExportPointer");
	must(export_it(&fd, pool, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0), "export a pool");
	must(export_pointer(&data, p), "export a piece");
	memcpy(m.data, &data, sizeof(data));
	must(peer_ask(&m, fd, NULL), "import a piece in another process");
	close(fd);
	t->a = p;
	t->b = m.a;
	t->c = m.b;
	return ret;
}

static void give_pool_export(const struct row *r, struct taken *t)
{
	(void)r;
	peer_close(PEER_POOLED, t->b, t->c);
	CALL(cuMemFreeAsync, (CUdeviceptr, CUstream), t->a, NULL);
}

static CUresult take_pool_import(const struct row *r, size_t bytes, struct taken *t)
{
	bool pointer = strcmp(r->symbol, "cuMemPoolImportPointer") == 0;
	CUmemPoolPtrExportData data;
	CUmemoryPool imported = NULL;
	struct message m;
	CUdeviceptr p = 0;
	int fd = -1;
	CUresult ret = peer_offer(PEER_POOLED, bytes, &m, &fd);
	if (ret != CUDA_SUCCESS)
		return ret;
	import_pool_function *import_it =
		pointer ? (import_pool_function *)(uintptr_t)symbol("cuMemPoolImportFromShareableHandle") : FN(import_pool_function *);
	import_pointer_function *import_pointer =
		pointer ? FN(import_pointer_function *) : (import_pointer_function *)(uintptr_t)symbol("cuMemPoolImportPointer");
	must(import_it(&imported, (void *)(intptr_t)fd, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0), "import a pool");
	close(fd);
	memcpy(&data, m.data, sizeof(data));
	must(import_pointer(&p, imported, &data), "import a piece");
	t->a = p;
	t->b = m.a;
	t->c = (uintptr_t)imported;
	return ret;
}

static void give_pool_import(const struct row *r, struct taken *t)
{
	(void)r;
	CALL(cuMemFreeAsync, (CUdeviceptr, CUstream), t->a, NULL);
	CALL(cuCtxSynchronize, (void));
	CALL(cuMemPoolDestroy, (CUmemoryPool), (CUmemoryPool)(uintptr_t)t->c);
	peer_drop(PEER_POOLED, t->b);
}

static void make_shared_pool(void)
{
	CUmemPoolProps props = { .allocType = CU_MEM_ALLOCATION_TYPE_PINNED,
				 .handleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
				 .location = { CU_MEM_LOCATION_TYPE_DEVICE, device } };
	CALL(cuMemPoolCreate, (CUmemoryPool *, const CUmemPoolProps *), &pool, &props);
}

/* ---- stream capture ------------------------------------------------------------------------------ */

static CUresult take_captured(const struct row *r, size_t bytes, struct taken *t)
{
	CUgraphExec exec = NULL;
	CUstream stream = NULL;
	CUgraph g = NULL;
	CUdeviceptr p = 0;
	CALL(cuStreamCreate, (CUstream *, unsigned int), &stream, 1);
	CALL(cuStreamBeginCapture_v2, (CUstream, CUstreamCaptureMode), stream, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL);
	if (strncmp(r->symbol, "cuMemAllocAsync", 15) == 0)
		must(FN(CUresult(*)(CUdeviceptr *, size_t, CUstream))(&p, bytes, stream), "allocate while capturing");
	else
		must(FN(CUresult(*)(CUdeviceptr *, size_t, CUmemoryPool, CUstream))(&p, bytes, pool, stream), "allocate while capturing");
	CALL(cuStreamEndCapture, (CUstream, CUgraph *), stream, &g);
	CALL(cuStreamDestroy_v2, (CUstream), stream);
	CUresult ret = by_instance(g, &exec);
	if (ret == CUDA_SUCCESS)
		ret = by_launch(exec);
	if (ret == CUDA_SUCCESS)
		CALL(cuStreamSynchronize, (CUstream), NULL);
	else
		drop_graph(g, exec);
	t->a = p;
	t->b = (uintptr_t)g;
	t->c = (uintptr_t)exec;
	return ret;
}

static void end_captures(void)
{
	trim_graphs();
	destroy_pool();
}

/* ---- a context's limits -------------------------------------------------------------------------- */

static CUlimit limit_of(const struct row *r)
{
	return strstr(r->symbol, "/stack") ? CU_LIMIT_STACK_SIZE : strstr(r->symbol, "/printf") ? CU_LIMIT_PRINTF_FIFO_SIZE : CU_LIMIT_MALLOC_HEAP_SIZE;
}

static CUresult take_limit(const struct row *r, size_t bytes, struct taken *t)
{
	int processors = 0, threads = 0;
	size_t was = 0, each = 1;
	CALL(cuCtxGetLimit, (size_t *, CUlimit), &was, limit_of(r));
	if (limit_of(r) == CU_LIMIT_STACK_SIZE) {
		CALL(cuDeviceGetAttribute, (int *, CUdevice_attribute, CUdevice), &processors, 16, device);
		CALL(cuDeviceGetAttribute, (int *, CUdevice_attribute, CUdevice), &threads, 39, device);
		each = (size_t)processors * (size_t)threads;
	}
	t->a = was;
	return FN(CUresult(*)(CUlimit, size_t))(limit_of(r), was + bytes / (each ? each : 1));
}

static void give_limit(const struct row *r, struct taken *t) { CALL(cuCtxSetLimit, (CUlimit, size_t), limit_of(r), t->a); }

/* ---- graphics ------------------------------------------------------------------------------------ */

static CUresult take_context_vdpau(const struct row *r, size_t bytes, struct taken *t)
{
	CUcontext c = NULL;
	(void)r, (void)bytes;
	CUresult ret = FN(CUresult(*)(CUcontext *, unsigned int, CUdevice, uint32_t, void *))(&c, 0, device, 1, NULL);
	return created(ret, c, t);
}

static CUresult take_attached(const struct row *r, size_t bytes, struct taken *t)
{
	CUcontext c = NULL, again = NULL;
	(void)r, (void)bytes;
	CUresult ret = ASK(cuCtxCreate_v2, (CUcontext *, unsigned int, CUdevice), &c, 0, device);
	if (ret == CUDA_SUCCESS)
		must(FN(CUresult(*)(CUcontext *, unsigned int))(&again, 0), "attach");
	return created(ret, c, t);
}

static void give_attached(const struct row *r, struct taken *t)
{
	(void)r;
	/* It must be the current one. */
	CALL(cuCtxSetCurrent, (CUcontext), (CUcontext)(uintptr_t)t->a);
	CALL(cuCtxDetach, (CUcontext), (CUcontext)(uintptr_t)t->a);
	CALL(cuCtxDetach, (CUcontext), (CUcontext)(uintptr_t)t->a);
	CALL(cuCtxSetCurrent, (CUcontext), context);
}

static bool is(const struct row *r, const char *name) { return strcmp(r->symbol, name) == 0; }

/* By the interface that knows resources by handles: registered, mapped, looked at. */
static CUresult take_registered(const struct row *r, size_t bytes, struct taken *t)
{
	static unsigned int names;
	bool picture = is(r, "cuGraphicsSubResourceGetMappedArray") || is(r, "cuGraphicsResourceGetMappedMipmappedArray");
	CUgraphicsResource g = NULL;
	CUresult ret = linear(bytes, t);
	if (ret != CUDA_SUCCESS)
		return ret;
	unsigned int name = ++names;
	if (is(r, "cuGraphicsGLRegisterImage"))
		must(FN(CUresult(*)(CUgraphicsResource *, unsigned int, unsigned int, unsigned int))(&g, name, 0x0DE1, 0), r->symbol);
	else if (is(r, "cuGraphicsEGLRegisterImage"))
		must(FN(CUresult(*)(CUgraphicsResource *, void *, unsigned int))(&g, &names, 0), r->symbol);
	else if (strstr(r->symbol, "Register"))
		must(FN(CUresult(*)(CUgraphicsResource *, unsigned int, unsigned int))(&g, name, 0), r->symbol);
	else if (picture)
		CALL(cuGraphicsGLRegisterImage, (CUgraphicsResource *, unsigned int, unsigned int, unsigned int), &g, name, 0x0DE1, 0);
	else
		CALL(cuGraphicsGLRegisterBuffer, (CUgraphicsResource *, unsigned int, unsigned int), &g, name, 0);
	if (strstr(r->symbol, "MapResources"))
		must(FN(CUresult(*)(unsigned int, CUgraphicsResource *, CUstream))(1, &g, NULL), r->symbol);
	else
		CALL(cuGraphicsMapResources, (unsigned int, CUgraphicsResource *, CUstream), 1, &g, NULL);
	if (is(r, "cuGraphicsResourceGetMappedPointer")) {
		CUdeviceptr_v1 p;
		unsigned int size;
		must(FN(CUresult(*)(CUdeviceptr_v1 *, unsigned int *, CUgraphicsResource))(&p, &size, g), r->symbol);
	} else if (is(r, "cuGraphicsResourceGetMappedPointer_v2")) {
		CUdeviceptr p;
		size_t size;
		must(FN(CUresult(*)(CUdeviceptr *, size_t *, CUgraphicsResource))(&p, &size, g), r->symbol);
	} else if (is(r, "cuGraphicsSubResourceGetMappedArray")) {
		CUarray a;
		must(FN(CUresult(*)(CUarray *, CUgraphicsResource, unsigned int, unsigned int))(&a, g, 0, 0), r->symbol);
	} else if (is(r, "cuGraphicsResourceGetMappedMipmappedArray")) {
		CUmipmappedArray a;
		must(FN(CUresult(*)(CUmipmappedArray *, CUgraphicsResource))(&a, g), r->symbol);
	}
	t->b = (uintptr_t)g;
	return ret;
}

static void give_registered(const struct row *r, struct taken *t)
{
	CUgraphicsResource g = (CUgraphicsResource)(uintptr_t)t->b;
	(void)r;
	CALL(cuGraphicsUnmapResources, (unsigned int, CUgraphicsResource *, CUstream), 1, &g, NULL);
	CALL(cuGraphicsUnregisterResource, (CUgraphicsResource), g);
	CALL(cuMemFree_v2, (CUdeviceptr), t->a);
}

/* By the first interface, which knows buffers by their number. */
static CUresult take_buffer(const struct row *r, size_t bytes, struct taken *t)
{
	static unsigned int names = 1000;
	CUdeviceptr_v1 low;
	CUdeviceptr p;
	unsigned int small;
	size_t size;
	CUresult ret = linear(bytes, t);
	if (ret != CUDA_SUCCESS)
		return ret;
	unsigned int name = ++names;
	if (is(r, "cuGLRegisterBufferObject"))
		must(FN(CUresult(*)(unsigned int))(name), r->symbol);
	else
		CALL(cuGLRegisterBufferObject, (unsigned int), name);
	if (is(r, "cuGLMapBufferObject"))
		must(FN(CUresult(*)(CUdeviceptr_v1 *, unsigned int *, unsigned int))(&low, &small, name), r->symbol);
	else if (is(r, "cuGLMapBufferObjectAsync"))
		must(FN(CUresult(*)(CUdeviceptr_v1 *, unsigned int *, unsigned int, CUstream))(&low, &small, name, NULL), r->symbol);
	else if (strncmp(r->symbol, "cuGLMapBufferObjectAsync", 24) == 0)
		must(FN(CUresult(*)(CUdeviceptr *, size_t *, unsigned int, CUstream))(&p, &size, name, NULL), r->symbol);
	else if (strncmp(r->symbol, "cuGLMapBufferObject", 19) == 0)
		must(FN(CUresult(*)(CUdeviceptr *, size_t *, unsigned int))(&p, &size, name), r->symbol);
	t->b = name;
	return ret;
}

static void give_buffer(const struct row *r, struct taken *t)
{
	(void)r;
	CALL(cuGLUnregisterBufferObject, (unsigned int), (unsigned int)t->b);
	CALL(cuMemFree_v2, (CUdeviceptr), t->a);
}

/* ---- memory of the host --------------------------------------------------------------------------- */

static CUresult take_host_vmm(const struct row *r, size_t bytes, struct taken *t)
{
	CUmemAllocationProp prop = { .type = CU_MEM_ALLOCATION_TYPE_PINNED, .location = { CU_MEM_LOCATION_TYPE_HOST, 0 } };
	CUmemGenericAllocationHandle h = 0;
	if (strstr(r->symbol, "/numa"))
		prop.location.type = CU_MEM_LOCATION_TYPE_HOST_NUMA;
	CUresult ret = linear(bytes, t);
	if (ret == CUDA_SUCCESS)
		must(FN(create_function *)(&h, 16 * FIRST_BYTES, &prop, 0), "memory of the host");
	t->b = h;
	return ret;
}

static void give_host_vmm(const struct row *r, struct taken *t)
{
	(void)r;
	release(t->b);
	CALL(cuMemFree_v2, (CUdeviceptr), t->a);
}

static void host_pool(CUmemLocationType where)
{
	CUmemPoolProps props = { .allocType = CU_MEM_ALLOCATION_TYPE_PINNED, .location = { where, 0 } };
	CALL(cuMemPoolCreate, (CUmemoryPool *, const CUmemPoolProps *), &pool, &props);
}

static void make_host_pool(void) { host_pool(CU_MEM_LOCATION_TYPE_HOST); }
static void make_numa_pool(void) { host_pool(CU_MEM_LOCATION_TYPE_HOST_NUMA); }

/* Wherever managed memory is to be, it counts as if it were on the device. */
static void make_managed_pool(void)
{
	CUmemPoolProps props = { .allocType = CU_MEM_ALLOCATION_TYPE_MANAGED, .location = { CU_MEM_LOCATION_TYPE_DEVICE, device } };
	CALL(cuMemPoolCreate, (CUmemoryPool *, const CUmemPoolProps *), &pool, &props);
}

static CUresult take_host_pooled(const struct row *r, size_t bytes, struct taken *t)
{
	CUdeviceptr p = 0;
	(void)r;
	CUresult ret = linear(bytes, t);
	if (ret == CUDA_SUCCESS)
		must(FN(CUresult(*)(CUdeviceptr *, size_t, CUmemoryPool, CUstream))(&p, bytes, pool, NULL), "a piece of the host's");
	t->b = p;
	return ret;
}

static void give_host_pooled(const struct row *r, struct taken *t)
{
	struct taken piece = { .a = t->b };
	give_async(r, &piece);
	CALL(cuMemFree_v2, (CUdeviceptr), t->a);
}

/* ---- kept by something else than a handle ---------------------------------------------------------- */

/* Bound to a multicast object, and nothing else. */
static CUresult take_bound(const struct row *r, size_t bytes, struct taken *t)
{
	CUmulticastObjectProp prop = { .numDevices = 1, .size = bytes };
	CUmemGenericAllocationHandle h, multicast = 0;
	CUdeviceptr at = 0;
	CUresult ret = create((create_function *)(uintptr_t)symbol("cuMemCreate"), bytes, &h);
	if (ret != CUDA_SUCCESS)
		return ret;
	if (is(r, "cuMulticastCreate"))
		must(FN(CUresult(*)(CUmemGenericAllocationHandle *, const CUmulticastObjectProp *))(&multicast, &prop), r->symbol);
	else
		CALL(cuMulticastCreate, (CUmemGenericAllocationHandle *, const CUmulticastObjectProp *), &multicast, &prop);
	CALL(cuMulticastAddDevice, (CUmemGenericAllocationHandle, CUdevice), multicast, device);
	CALL(cuMemAddressReserve, (CUdeviceptr *, size_t, size_t, CUdeviceptr, unsigned long long), &at, bytes, 0, 0, 0);
	CALL(cuMemMap, (CUdeviceptr, size_t, size_t, CUmemGenericAllocationHandle, unsigned long long), at, bytes, 0, h, 0);
	if (is(r, "cuMulticastBindMem_v2"))
		must(FN(CUresult(*)(CUmemGenericAllocationHandle, CUdevice, size_t, CUmemGenericAllocationHandle, size_t, size_t, unsigned long long))(
			     multicast, device, 0, h, 0, bytes, 0), r->symbol);
	else if (is(r, "cuMulticastBindAddr"))
		must(FN(CUresult(*)(CUmemGenericAllocationHandle, size_t, CUdeviceptr, size_t, unsigned long long))(multicast, 0, at, bytes, 0), r->symbol);
	else if (is(r, "cuMulticastBindAddr_v2"))
		must(FN(CUresult(*)(CUmemGenericAllocationHandle, CUdevice, size_t, CUdeviceptr, size_t, unsigned long long))(multicast, device, 0, at, bytes, 0),
		     r->symbol);
	else if (is(r, "cuMulticastBindMem"))
		must(FN(CUresult(*)(CUmemGenericAllocationHandle, size_t, CUmemGenericAllocationHandle, size_t, size_t, unsigned long long))(
			     multicast, 0, h, 0, bytes, 0), r->symbol);
	else
		CALL(cuMulticastBindMem, (CUmemGenericAllocationHandle, size_t, CUmemGenericAllocationHandle, size_t, size_t, unsigned long long),
		     multicast, 0, h, 0, bytes, 0);
	CALL(cuMemUnmap, (CUdeviceptr, size_t), at, bytes);
	CALL(cuMemAddressFree, (CUdeviceptr, size_t), at, bytes);
	release(h);
	t->a = multicast;
	return ret;
}

static void give_bound(const struct row *r, struct taken *t)
{
	(void)r;
	CALL(cuMulticastUnbind, (CUmemGenericAllocationHandle, CUdevice, size_t, size_t), t->a, device, 0, t->bytes);
	release(t->a);
}

/* Bound to a logical endpoint of this device, and nothing else. */
static CUresult take_endpoint(const struct row *r, size_t bytes, struct taken *t)
{
	CUlogicalEndpointProp prop = { .type = 1, .unicast.device = device, .size = bytes };
	CUmemGenericAllocationHandle h;
	CUlogicalEndpointId id = 0;
	CUdeviceptr at = 0;
	int complete = 0;
	CUresult ret = create((create_function *)(uintptr_t)symbol("cuMemCreate"), bytes, &h);
	if (ret != CUDA_SUCCESS)
		return ret;
	CALL(cuLogicalEndpointIdReserve, (CUlogicalEndpointId *, uint32_t), &id, 1);
	CALL(cuLogicalEndpointCreate, (CUlogicalEndpointId, const CUlogicalEndpointProp *), id, &prop);
	CALL(cuLogicalEndpointQuery, (CUlogicalEndpointId, uint32_t, int *), id, 1, &complete);
	CALL(cuMemAddressReserve, (CUdeviceptr *, size_t, size_t, CUdeviceptr, unsigned long long), &at, bytes, 0, 0, 0);
	CALL(cuMemMap, (CUdeviceptr, size_t, size_t, CUmemGenericAllocationHandle, unsigned long long), at, bytes, 0, h, 0);
	if (is(r, "cuLogicalEndpointBindMem"))
		must(FN(CUresult(*)(CUlogicalEndpointId, CUdevice, uint64_t, CUmemGenericAllocationHandle, uint64_t, uint64_t, unsigned long long))(
			     id, device, 0, h, 0, bytes, 0), r->symbol);
	else if (is(r, "cuLogicalEndpointBindAddr"))
		must(FN(CUresult(*)(CUlogicalEndpointId, CUdevice, uint64_t, void *, uint64_t, unsigned long long))(
			     id, device, 0, (void *)(uintptr_t)at, bytes, 0), r->symbol);
	else
		CALL(cuLogicalEndpointBindMem,
		     (CUlogicalEndpointId, CUdevice, uint64_t, CUmemGenericAllocationHandle, uint64_t, uint64_t, unsigned long long),
		     id, device, 0, h, 0, bytes, 0);
	CALL(cuMemUnmap, (CUdeviceptr, size_t), at, bytes);
	CALL(cuMemAddressFree, (CUdeviceptr, size_t), at, bytes);
	release(h);
	t->a = id;
	return ret;
}

static void give_endpoint(const struct row *r, struct taken *t)
{
	CUlogicalEndpointId id = (CUlogicalEndpointId)t->a;
	if (is(r, "cuLogicalEndpointUnbind"))
		must(FN(CUresult(*)(CUlogicalEndpointId, CUdevice, uint64_t, uint64_t))(id, device, 0, t->bytes), r->symbol);
	if (is(r, "cuLogicalEndpointDestroy"))
		must(FN(CUresult(*)(CUlogicalEndpointId))(id), r->symbol);
	else
		CALL(cuLogicalEndpointDestroy, (CUlogicalEndpointId), id);
	CALL(cuLogicalEndpointIdRelease, (CUlogicalEndpointId, uint32_t), id, 1);
}

/* Mapped to a part of a sparse array, and nothing else. */
static CUresult take_tile(const struct row *r, size_t bytes, struct taken *t)
{
	CUDA_ARRAY3D_DESCRIPTOR d = { .Width = 2048, .Height = 2048, .Format = FORMAT_FLOAT, .NumChannels = 1, .Flags = CUDA_ARRAY3D_SPARSE };
	CUarrayMapInfo map = { .resourceType = CU_RESOURCE_TYPE_ARRAY, .memOperationType = CU_MEM_OPERATION_TYPE_MAP, .deviceBitMask = 1 };
	CUmemGenericAllocationHandle h;
	CUarray a = NULL;
	(void)r;
	CUresult ret = create((create_function *)(uintptr_t)symbol("cuMemCreate"), bytes, &h);
	if (ret != CUDA_SUCCESS)
		return ret;
	CALL(cuArray3DCreate_v2, (CUarray *, const CUDA_ARRAY3D_DESCRIPTOR *), &a, &d);
	map.resource.array = a;
	map.memHandle.memHandle = h;
	map.subresource.sparseLevel.extentWidth = 64;
	must(FN(CUresult(*)(CUarrayMapInfo *, unsigned int, CUstream))(&map, 1, NULL), "map to an array");
	release(h);
	t->a = (uintptr_t)a;
	return ret;
}

/* ---- below a block --------------------------------------------------------------------------------- */

static CUdeviceptr filler[256];
static size_t fillers;

/* Leaves a few MiB, so that the smallest can fill them. In large pieces first, at most 4 GiB of them: a program
 * that nothing holds must not take the device. */
static void fill_most(void)
{
	size_t bytes = 64 * MIB;
	fillers = 0;
	while (fillers < 64 && bytes >= 4 * MIB) {
		if (ASK(cuMemAlloc_v2, (CUdeviceptr *, size_t), &filler[fillers], bytes) == CUDA_SUCCESS)
			fillers++;
		else
			bytes /= 4;
	}
	/* The last piece, which goes back, is a small one. */
	if (fillers > 0)
		CALL(cuMemFree_v2, (CUdeviceptr), filler[--fillers]);
	while (fillers < sizeof(filler) / sizeof(filler[0]) && ASK(cuMemAlloc_v2, (CUdeviceptr *, size_t), &filler[fillers], 4 * MIB) == CUDA_SUCCESS)
		fillers++;
	if (fillers > 0)
		CALL(cuMemFree_v2, (CUdeviceptr), filler[--fillers]);
}

static void drop_most(void)
{
	while (fillers > 0)
		CALL(cuMemFree_v2, (CUdeviceptr), filler[--fillers]);
}

/* ---- giving back, in every variant ----------------------------------------------------------------- */

/* How the memory is made that a function gives back. */
static const struct {
	const char *gives, *made_by;
} makers[] = {
	{ "cuMemFree", "cuMemAlloc" },
	{ "cuMemFree_v2", "cuMemAlloc_v2" },
	{ "cuMemFreeAsync", "cuMemAllocAsync" },
	{ "cuMemFreeAsync_ptsz", "cuMemAllocAsync_ptsz" },
	{ "cuMemRelease", "cuMemCreate" },
	{ "cuMemUnmap", "cuMemMap" },
	{ "cuArrayDestroy", "cuArrayCreate_v2" },
	{ "cuMipmappedArrayDestroy", "cuMipmappedArrayCreate" },
	{ "cuCtxDestroy", "cuCtxCreate" },
	{ "cuCtxDestroy_v2", "cuCtxCreate_v2" },
	{ "cuCtxDetach", "cuCtxCreate_v2" },
	{ "cuDevicePrimaryCtxRelease", "cuDevicePrimaryCtxRetain" },
	{ "cuDevicePrimaryCtxRelease_v2", "cuDevicePrimaryCtxRetain" },
	{ "cuDevicePrimaryCtxReset", "cuDevicePrimaryCtxRetain" },
	{ "cuDevicePrimaryCtxReset_v2", "cuDevicePrimaryCtxRetain" },
	{ "cuGreenCtxDestroy", "cuGreenCtxCreate" },
	{ "cuModuleUnload", "cuModuleLoadData" },
	{ "cuLibraryUnload", "cuLibraryLoadData" },
};

static const struct row *maker(const struct row *r)
{
	for (size_t i = 0; i < sizeof(makers) / sizeof(makers[0]); i++) {
		if (strcmp(makers[i].gives, r->symbol) != 0)
			continue;
		for (size_t k = 0; k < ROWS; k++)
			if (strcmp(rows[k].symbol, makers[i].made_by) == 0)
				return &rows[k];
	}
	return NULL;
}

/* By the function that makes, in the place of the one under test. */
static CUresult take_made(const struct row *r, size_t bytes, struct taken *t)
{
	static const struct row bound = { "cuMulticastBindMem", take_bound, NULL, NULL, NULL, 0, 0 };
	const struct row *by = is(r, "cuMulticastUnbind") ? &bound : maker(r);
	void *gives = under_test;
	CUresult ret = CUDA_ERROR_NOT_FOUND;
	if (by) {
		under_test = symbol(by->symbol);
		ret = by->take(by, bytes, t);
		under_test = gives;
	}
	return ret;
}

static void give_made(const struct row *r, struct taken *t)
{
	CUresult ret;
	if (is(r, "cuMemFree"))
		ret = FN(CUresult(*)(CUdeviceptr_v1))((CUdeviceptr_v1)t->a);
	else if (strncmp(r->symbol, "cuMemFreeAsync", 14) == 0)
		ret = FN(CUresult(*)(CUdeviceptr, CUstream))(t->a, NULL);
	else if (is(r, "cuMemUnmap"))
		ret = FN(CUresult(*)(CUdeviceptr, size_t))(t->a, t->bytes);
	else if (is(r, "cuMulticastUnbind"))
		ret = FN(CUresult(*)(CUmemGenericAllocationHandle, CUdevice, size_t, size_t))(t->a, device, 0, t->bytes);
	else if (strncmp(r->symbol, "cuDevicePrimaryCtx", 18) == 0)
		ret = t->b ? FN(CUresult(*)(CUdevice))(device) : ASK(cuCtxDestroy_v2, (CUcontext), (CUcontext)(uintptr_t)t->a);
	else
		ret = FN(CUresult(*)(uint64_t))(t->a); /* a handle */
	must(ret, r->symbol);
	if (is(r, "cuMemUnmap"))
		CALL(cuMemAddressFree, (CUdeviceptr, size_t), t->a, t->bytes);
	if (is(r, "cuMulticastUnbind"))
		release(t->a);
	/* A reset does not release what was retained. */
	if (strncmp(r->symbol, "cuDevicePrimaryCtxReset", 23) == 0 && t->b)
		CALL(cuDevicePrimaryCtxRelease_v2, (CUdevice), device);
}

/* It must be the current one. */
static void give_detached(const struct row *r, struct taken *t)
{
	CALL(cuCtxSetCurrent, (CUcontext), (CUcontext)(uintptr_t)t->a);
	give_made(r, t);
	CALL(cuCtxSetCurrent, (CUcontext), context);
}

/* Other than give_async, by what keeps memory behind pieces. */
static CUresult take_kept(const struct row *r, size_t bytes, struct taken *t)
{
	CUdeviceptr p = 0;
	(void)r;
	CUresult ret = ASK(cuMemAllocFromPoolAsync, (CUdeviceptr *, size_t, CUmemoryPool, CUstream), &p, bytes, pool, NULL);
	t->a = p;
	return ret;
}

static void give_kept(const struct row *r, struct taken *t)
{
	(void)r;
	CALL(cuMemFreeAsync, (CUdeviceptr, CUstream), t->a, NULL);
}

/* A pool that keeps what is freed, until it is asked to give it back. */
static void make_keeping_pool(void)
{
	cuuint64_t all = UINT64_MAX;
	make_pool();
	CALL(cuMemPoolSetAttribute, (CUmemoryPool, CUmemPool_attribute, void *), pool, CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, &all);
}

static void destroy_by(void)
{
	must(FN(CUresult(*)(CUmemoryPool))(pool), "cuMemPoolDestroy");
}

static void trim_by(void)
{
	CALL(cuCtxSynchronize, (void));
	must(FN(CUresult(*)(CUmemoryPool, size_t))(pool, 0), "cuMemPoolTrimTo");
	size_t reserved = 1;
	CALL(cuMemPoolGetAttribute, (CUmemoryPool, CUmemPool_attribute, void *), pool, CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT, &reserved);
	if (reserved != 0)
		must(CUDA_ERROR_UNKNOWN, "trim a pool");
	destroy_pool();
}

/* A graph, by launches; what gives is under test. */
static CUresult take_launched(const struct row *r, size_t bytes, struct taken *t)
{
	void *gives = under_test;
	(void)r;
	under_test = symbol("cuGraphLaunch");
	CUresult ret = graph(LAUNCH, bytes, t);
	under_test = gives;
	return ret;
}

static void give_exec(const struct row *r, struct taken *t)
{
	(void)r;
	CALL(cuMemFree_v2, (CUdeviceptr), t->a);
	must(FN(CUresult(*)(CUgraphExec))((CUgraphExec)(uintptr_t)t->c), "cuGraphExecDestroy");
	drop_graph((CUgraph)(uintptr_t)t->b, NULL);
}

static void trim_graphs_by(void)
{
	CALL(cuCtxSynchronize, (void));
	must(FN(CUresult(*)(CUdevice))(device), "cuDeviceGraphMemTrim");
}

/* ---- rows ------------------------------------------------------------------------------------------ */

static const struct row more_rows[] = {
	{ "cuMemAllocAsync/captured", take_captured, give_graph, make_pool, end_captures, FIRST_BYTES, LAST_BYTES },
	{ "cuMemAllocAsync_ptsz/captured", take_captured, give_graph, make_pool, end_captures, FIRST_BYTES, LAST_BYTES },
	{ "cuMemAllocFromPoolAsync/captured", take_captured, give_graph, make_pool, end_captures, FIRST_BYTES, LAST_BYTES },
	{ "cuMemAllocFromPoolAsync_ptsz/captured", take_captured, give_graph, make_pool, end_captures, FIRST_BYTES, LAST_BYTES },
	{ "cuCtxSetLimit/stack", take_limit, give_limit, NULL, NULL, FIRST_BYTES, LAST_BYTES },
	{ "cuCtxSetLimit/printf", take_limit, give_limit, NULL, NULL, FIRST_BYTES, LAST_BYTES },
	{ "cuCtxSetLimit/heap", take_limit, give_limit, NULL, NULL, FIRST_BYTES, LAST_BYTES },
	{ "cuCtxAttach", take_attached, give_attached, NULL, NULL, 0, 0 },
	{ "cuGLCtxCreate", take_context, give_context, NULL, NULL, 0, 0 },
	{ "cuGLCtxCreate_v2", take_context, give_context, NULL, NULL, 0, 0 },
	{ "cuVDPAUCtxCreate", take_context_vdpau, give_context, NULL, NULL, 0, 0 },
	{ "cuVDPAUCtxCreate_v2", take_context_vdpau, give_context, NULL, NULL, 0, 0 },
	{ "cuGraphicsGLRegisterBuffer", take_registered, give_registered, NULL, NULL, FIRST_BYTES, LAST_BYTES },
	{ "cuGraphicsGLRegisterImage", take_registered, give_registered, NULL, NULL, FIRST_BYTES, LAST_BYTES },
	{ "cuGraphicsEGLRegisterImage", take_registered, give_registered, NULL, NULL, FIRST_BYTES, LAST_BYTES },
	{ "cuGraphicsVDPAURegisterVideoSurface", take_registered, give_registered, NULL, NULL, FIRST_BYTES, LAST_BYTES },
	{ "cuGraphicsVDPAURegisterOutputSurface", take_registered, give_registered, NULL, NULL, FIRST_BYTES, LAST_BYTES },
	{ "cuGraphicsMapResources", take_registered, give_registered, NULL, NULL, FIRST_BYTES, LAST_BYTES },
	{ "cuGraphicsMapResources_ptsz", take_registered, give_registered, NULL, NULL, FIRST_BYTES, LAST_BYTES },
	{ "cuGraphicsResourceGetMappedPointer", take_registered, give_registered, NULL, NULL, FIRST_BYTES, LAST_BYTES },
	{ "cuGraphicsResourceGetMappedPointer_v2", take_registered, give_registered, NULL, NULL, FIRST_BYTES, LAST_BYTES },
	{ "cuGraphicsSubResourceGetMappedArray", take_registered, give_registered, NULL, NULL, FIRST_BYTES, LAST_BYTES },
	{ "cuGraphicsResourceGetMappedMipmappedArray", take_registered, give_registered, NULL, NULL, FIRST_BYTES, LAST_BYTES },
	{ "cuGLRegisterBufferObject", take_buffer, give_buffer, NULL, NULL, FIRST_BYTES, LAST_BYTES },
	{ "cuGLMapBufferObject", take_buffer, give_buffer, NULL, NULL, FIRST_BYTES, LAST_BYTES },
	{ "cuGLMapBufferObject_v2", take_buffer, give_buffer, NULL, NULL, FIRST_BYTES, LAST_BYTES },
	{ "cuGLMapBufferObject_v2_ptds", take_buffer, give_buffer, NULL, NULL, FIRST_BYTES, LAST_BYTES },
	{ "cuGLMapBufferObjectAsync", take_buffer, give_buffer, NULL, NULL, FIRST_BYTES, LAST_BYTES },
	{ "cuGLMapBufferObjectAsync_v2", take_buffer, give_buffer, NULL, NULL, FIRST_BYTES, LAST_BYTES },
	{ "cuGLMapBufferObjectAsync_v2_ptsz", take_buffer, give_buffer, NULL, NULL, FIRST_BYTES, LAST_BYTES },
	{ "cuMemCreate/host", take_host_vmm, give_host_vmm, NULL, NULL, FIRST_BYTES, LAST_BYTES },
	{ "cuMemCreate/numa", take_host_vmm, give_host_vmm, NULL, NULL, FIRST_BYTES, LAST_BYTES },
	{ "cuMemAllocFromPoolAsync/host", take_host_pooled, give_host_pooled, make_host_pool, destroy_pool, FIRST_BYTES, LAST_BYTES },
	{ "cuMemAllocFromPoolAsync_ptsz/host", take_host_pooled, give_host_pooled, make_host_pool, destroy_pool, FIRST_BYTES, LAST_BYTES },
	{ "cuMemAllocFromPoolAsync/numa", take_host_pooled, give_host_pooled, make_numa_pool, destroy_pool, FIRST_BYTES, LAST_BYTES },
	{ "cuMemAllocFromPoolAsync/managed", take_pooled, give_async, make_managed_pool, destroy_pool, FIRST_BYTES, LAST_BYTES },
	{ "cuMemAllocFromPoolAsync_ptsz/managed", take_pooled, give_async, make_managed_pool, destroy_pool, FIRST_BYTES, LAST_BYTES },
	{ "cuArrayCreate_v2/small", take_array, give_array, NULL, NULL, 65536, 65536 },
	{ "cuMulticastCreate", take_bound, give_bound, NULL, NULL, FIRST_BYTES, LAST_BYTES },
	{ "cuMulticastBindMem", take_bound, give_bound, NULL, NULL, FIRST_BYTES, LAST_BYTES },
	{ "cuMulticastBindMem_v2", take_bound, give_bound, NULL, NULL, FIRST_BYTES, LAST_BYTES },
	{ "cuMulticastBindAddr", take_bound, give_bound, NULL, NULL, FIRST_BYTES, LAST_BYTES },
	{ "cuMulticastBindAddr_v2", take_bound, give_bound, NULL, NULL, FIRST_BYTES, LAST_BYTES },
	{ "cuLogicalEndpointBindMem", take_endpoint, give_endpoint, NULL, NULL, FIRST_BYTES, LAST_BYTES },
	{ "cuLogicalEndpointBindAddr", take_endpoint, give_endpoint, NULL, NULL, FIRST_BYTES, LAST_BYTES },
	{ "cuLogicalEndpointUnbind", take_endpoint, give_endpoint, NULL, NULL, FIRST_BYTES, LAST_BYTES },
	{ "cuLogicalEndpointDestroy", take_endpoint, give_endpoint, NULL, NULL, FIRST_BYTES, LAST_BYTES },
	{ "cuMemMapArrayAsync", take_tile, give_array, NULL, NULL, FIRST_BYTES, LAST_BYTES },
	{ "cuMemMapArrayAsync_ptsz", take_tile, give_array, NULL, NULL, FIRST_BYTES, LAST_BYTES },
	{ "cuMemAlloc/byte", take_linear_v1, give_linear_v1, fill_most, drop_most, 1, 1 },
	{ "cuMemAlloc_v2/byte", take_linear, give_linear, fill_most, drop_most, 1, 1 },
	{ "cuMemAlloc_v2/4KiB", take_linear, give_linear, fill_most, drop_most, 4096, 4096 },
	{ "cuMemAlloc_v2/64KiB", take_linear, give_linear, NULL, NULL, 65536, 65536 },
	{ "cuMemAlloc_v2/1MiB", take_linear, give_linear, NULL, NULL, MIB, MIB },
	{ "cuMemAlloc_v2/1MiB_and_1", take_linear, give_linear, NULL, NULL, MIB + 1, MIB + 1 },
	{ "cuMemFree", take_made, give_made, NULL, NULL, FIRST_BYTES, LAST_BYTES },
	{ "cuMemFree_v2", take_made, give_made, NULL, NULL, FIRST_BYTES, LAST_BYTES },
	{ "cuMemRelease", take_made, give_made, NULL, NULL, FIRST_BYTES, LAST_BYTES },
	{ "cuMemUnmap", take_made, give_made, NULL, NULL, FIRST_BYTES, LAST_BYTES },
	{ "cuArrayDestroy", take_made, give_made, NULL, NULL, FIRST_BYTES, LAST_BYTES },
	{ "cuMipmappedArrayDestroy", take_made, give_made, NULL, NULL, FIRST_BYTES, LAST_BYTES },
	{ "cuMulticastUnbind", take_made, give_made, NULL, NULL, FIRST_BYTES, LAST_BYTES },
	{ "cuMemFreeAsync", take_made, give_made, NULL, trim_default, FIRST_BYTES, LAST_BYTES },
	{ "cuMemFreeAsync_ptsz", take_made, give_made, NULL, trim_default, FIRST_BYTES, LAST_BYTES },
	{ "cuCtxDestroy", take_made, give_made, NULL, NULL, 0, 0 },
	{ "cuCtxDestroy_v2", take_made, give_made, NULL, NULL, 0, 0 },
	{ "cuDevicePrimaryCtxRelease", take_made, give_made, NULL, NULL, 0, 0 },
	{ "cuDevicePrimaryCtxRelease_v2", take_made, give_made, NULL, NULL, 0, 0 },
	{ "cuDevicePrimaryCtxReset", take_made, give_made, NULL, NULL, 0, 0 },
	{ "cuDevicePrimaryCtxReset_v2", take_made, give_made, NULL, NULL, 0, 0 },
	{ "cuModuleUnload", take_made, give_made, NULL, NULL, 0, 0 },
	{ "cuLibraryUnload", take_made, give_made, NULL, NULL, 0, 0 },
	{ "cuGreenCtxDestroy", take_made, give_made, retain_primary, release_primary, 0, 0 },
	{ "cuCtxDetach", take_made, give_detached, NULL, NULL, 0, 0 },
	{ "cuMemPoolDestroy", take_kept, give_kept, make_keeping_pool, destroy_by, FIRST_BYTES, LAST_BYTES },
	{ "cuMemPoolTrimTo", take_kept, give_kept, make_keeping_pool, trim_by, FIRST_BYTES, LAST_BYTES },
	{ "cuGraphExecDestroy", take_launched, give_exec, NULL, trim_graphs, FIRST_BYTES, LAST_BYTES },
	{ "cuDeviceGraphMemTrim", take_launched, give_graph, NULL, trim_graphs_by, FIRST_BYTES, LAST_BYTES },
	{ "cuMemAllocManaged/byte", take_managed, give_linear, NULL, NULL, 1, 1 },
};

/* These need the other process. */
static const struct row shared_rows[] = {
	{ "cuIpcGetMemHandle", take_ipc_get, give_ipc_get, NULL, NULL, FIRST_BYTES, LAST_BYTES },
	{ "cuIpcGetMemHandle/owner_first", take_ipc_get, give_owner_first, NULL, NULL, FIRST_BYTES, LAST_BYTES },
	{ "cuIpcOpenMemHandle", take_ipc_open, give_ipc_open, NULL, NULL, FIRST_BYTES, LAST_BYTES },
	{ "cuIpcOpenMemHandle_v2", take_ipc_open, give_ipc_open, NULL, NULL, FIRST_BYTES, LAST_BYTES },
	{ "cuIpcCloseMemHandle", take_ipc_close, give_ipc_close, NULL, NULL, FIRST_BYTES, LAST_BYTES },
	{ "cuMemExportToShareableHandle", take_export, give_export, NULL, NULL, FIRST_BYTES, LAST_BYTES },
	{ "cuMemExportToShareableHandle/owner_first", take_export, give_export_owner_first, NULL, NULL, FIRST_BYTES, LAST_BYTES },
	{ "cuMemImportFromShareableHandle/other", take_import, give_import, NULL, NULL, FIRST_BYTES, LAST_BYTES },
	{ "cuImportExternalMemory/other", take_other, give_other, NULL, NULL, FIRST_BYTES, LAST_BYTES },
	{ "cuExternalMemoryGetMappedBuffer", take_other, give_other, NULL, NULL, FIRST_BYTES, LAST_BYTES },
	{ "cuExternalMemoryGetMappedMipmappedArray", take_other, give_other, NULL, NULL, FIRST_BYTES, LAST_BYTES },
	{ "cuMemPoolExportToShareableHandle", take_pool_export, give_pool_export, make_shared_pool, destroy_pool, FIRST_BYTES, LAST_BYTES },
	{ "cuMemPoolExportPointer", take_pool_export, give_pool_export, make_shared_pool, destroy_pool, FIRST_BYTES, LAST_BYTES },
	{ "cuMemPoolImportFromShareableHandle", take_pool_import, give_pool_import, NULL, NULL, FIRST_BYTES, LAST_BYTES },
	{ "cuMemPoolImportPointer", take_pool_import, give_pool_import, NULL, NULL, FIRST_BYTES, LAST_BYTES },
};

#endif
