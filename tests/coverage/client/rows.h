/* SPDX-License-Identifier: Apache-2.0 */
/*
 * rows.h: one row for each function that takes device memory: how a program takes by it, and
 * gives back. For the programs that include it, each in one file.
 */
#ifndef COVERAGE_ROWS_H
#define COVERAGE_ROWS_H

#include "../../simgpu/libcuda/cuda_abi.h"

#include <dlfcn.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define MIB ((size_t)1 << 20)
#define FIRST_BYTES (64 * MIB)
#define LAST_BYTES (2 * MIB)

/* What one take holds. */
struct taken {
	size_t bytes; /* asked for */
	uint64_t a, b, c;
};

struct row;
typedef CUresult take_function(const struct row *row, size_t bytes, struct taken *t);
typedef void give_function(const struct row *row, struct taken *t);

struct row {
	const char *symbol;
	take_function *take;
	give_function *give;
	void (*before)(void); /* fill, may be NULL */
	void (*after)(void);  /* everything was given back, may be NULL */
	size_t first, last;   /* sizes to begin and to end with; 0: all the same */
};

static void *cuda_library;
static CUdevice device;
static CUcontext context;
static _Thread_local void *under_test;
static _Thread_local struct taken *newest; /* of the row; NULL: none */
static _Thread_local char failure[160];    /* of a function that must not fail */

/* The function under test, with the type that its name says. */
#define FN(type) ((type)(uintptr_t)under_test)

static void *symbol(const char *name)
{
	void *fn = dlsym(cuda_library, name);
	if (!fn) {
		fprintf(stderr, "coverage: no %s\n", name);
		exit(1);
	}
	return fn;
}

static void must(CUresult r, const char *what)
{
	if (r != CUDA_SUCCESS && !failure[0])
		snprintf(failure, sizeof(failure), "%s: %d", what, (int)r);
}

/* Calls a function by its exported name. It must succeed. */
#define CALL(name, type, ...) must(((CUresult(*) type)(uintptr_t)symbol(#name))(__VA_ARGS__), #name)
/* The same, and it may fail. */
#define ASK(name, type, ...) (((CUresult(*) type)(uintptr_t)symbol(#name))(__VA_ARGS__))

/* ---- linear -------------------------------------------------------------------------------- */

static CUresult take_linear(const struct row *r, size_t bytes, struct taken *t)
{
	CUdeviceptr p = 0;
	(void)r;
	CUresult ret = FN(CUresult(*)(CUdeviceptr *, size_t))(&p, bytes);
	t->a = p;
	return ret;
}

static void give_linear(const struct row *r, struct taken *t)
{
	(void)r;
	CALL(cuMemFree_v2, (CUdeviceptr), t->a);
}

static CUresult take_linear_v1(const struct row *r, size_t bytes, struct taken *t)
{
	CUdeviceptr_v1 p = 0;
	(void)r;
	CUresult ret = FN(CUresult(*)(CUdeviceptr_v1 *, unsigned int))(&p, (unsigned int)bytes);
	t->a = p;
	return ret;
}

static void give_linear_v1(const struct row *r, struct taken *t)
{
	(void)r;
	CALL(cuMemFree, (CUdeviceptr_v1), (CUdeviceptr_v1)t->a);
}

#define PITCHED_WIDTH ((size_t)64 << 10)

static CUresult take_pitch(const struct row *r, size_t bytes, struct taken *t)
{
	CUdeviceptr p = 0;
	size_t pitch;
	(void)r;
	CUresult ret = FN(CUresult(*)(CUdeviceptr *, size_t *, size_t, size_t, unsigned int))(&p, &pitch, PITCHED_WIDTH - 100,
											      bytes / PITCHED_WIDTH, 4);
	t->a = p;
	return ret;
}

static CUresult take_pitch_v1(const struct row *r, size_t bytes, struct taken *t)
{
	CUdeviceptr_v1 p = 0;
	unsigned int pitch;
	(void)r;
	CUresult ret = FN(CUresult(*)(CUdeviceptr_v1 *, unsigned int *, unsigned int, unsigned int, unsigned int))(
		&p, &pitch, (unsigned int)PITCHED_WIDTH - 100, (unsigned int)(bytes / PITCHED_WIDTH), 4);
	t->a = p;
	return ret;
}

static CUresult take_managed(const struct row *r, size_t bytes, struct taken *t)
{
	CUdeviceptr p = 0;
	(void)r;
	CUresult ret = FN(CUresult(*)(CUdeviceptr *, size_t, unsigned int))(&p, bytes, CU_MEM_ATTACH_GLOBAL);
	t->a = p;
	return ret;
}

/* ---- pools --------------------------------------------------------------------------------- */

static CUmemoryPool pool;

static CUresult take_async(const struct row *r, size_t bytes, struct taken *t)
{
	CUdeviceptr p = 0;
	(void)r;
	CUresult ret = FN(CUresult(*)(CUdeviceptr *, size_t, CUstream))(&p, bytes, NULL);
	t->a = p;
	return ret;
}

static CUresult take_pooled(const struct row *r, size_t bytes, struct taken *t)
{
	CUdeviceptr p = 0;
	(void)r;
	CUresult ret = FN(CUresult(*)(CUdeviceptr *, size_t, CUmemoryPool, CUstream))(&p, bytes, pool, NULL);
	t->a = p;
	return ret;
}

static bool per_thread(const char *name)
{
	size_t n = strlen(name);
	return n > 5 && strcmp(name + n - 5, "_ptsz") == 0;
}

static void give_async(const struct row *r, struct taken *t)
{
	if (per_thread(r->symbol))
		CALL(cuMemFreeAsync_ptsz, (CUdeviceptr, CUstream), t->a, NULL);
	else
		CALL(cuMemFreeAsync, (CUdeviceptr, CUstream), t->a, NULL);
}

static void make_pool(void)
{
	CUmemPoolProps props = { .allocType = CU_MEM_ALLOCATION_TYPE_PINNED, .location = { CU_MEM_LOCATION_TYPE_DEVICE, device } };
	CALL(cuMemPoolCreate, (CUmemoryPool *, const CUmemPoolProps *), &pool, &props);
}

static void destroy_pool(void)
{
	CALL(cuCtxSynchronize, (void));
	CALL(cuMemPoolDestroy, (CUmemoryPool), pool);
}

/* The same pool from a second handle. */
static void default_pool(void) { CALL(cuDeviceGetDefaultMemPool, (CUmemoryPool *, CUdevice), &pool, device); }

static void trim_default(void)
{
	CALL(cuCtxSynchronize, (void));
	default_pool();
	CALL(cuMemPoolTrimTo, (CUmemoryPool, size_t), pool, 0);
}

/* ---- virtual memory management --------------------------------------------------------------- */

static const CUmemAllocationProp *vmm_prop(void)
{
	static CUmemAllocationProp p;
	p = (CUmemAllocationProp){ .type = CU_MEM_ALLOCATION_TYPE_PINNED,
				   .requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
				   .location = { CU_MEM_LOCATION_TYPE_DEVICE, device } };
	return &p;
}

typedef CUresult create_function(CUmemGenericAllocationHandle *, size_t, const CUmemAllocationProp *, unsigned long long);

static CUresult create(create_function *f, size_t bytes, CUmemGenericAllocationHandle *h)
{
	*h = 0;
	return f(h, bytes, vmm_prop(), 0);
}

static CUresult take_vmm(const struct row *r, size_t bytes, struct taken *t)
{
	CUmemGenericAllocationHandle h;
	(void)r;
	CUresult ret = create(FN(create_function *), bytes, &h);
	t->a = h;
	return ret;
}

static void release(CUmemGenericAllocationHandle h) { CALL(cuMemRelease, (CUmemGenericAllocationHandle), h); }

static void give_vmm(const struct row *r, struct taken *t)
{
	(void)r;
	release(t->a);
}

typedef CUresult map_function(CUdeviceptr, size_t, size_t, CUmemGenericAllocationHandle, unsigned long long);

/* Created, mapped, released: it lives until the last unmap. */
static CUresult mapped(create_function *make, map_function *map, size_t bytes, struct taken *t)
{
	CUmemGenericAllocationHandle h;
	CUdeviceptr at = 0;
	CUresult ret = create(make, bytes, &h);
	if (ret != CUDA_SUCCESS)
		return ret;
	CALL(cuMemAddressReserve, (CUdeviceptr *, size_t, size_t, CUdeviceptr, unsigned long long), &at, bytes, 0, 0, 0);
	ret = map(at, bytes, 0, h, 0);
	release(h);
	t->a = at;
	return ret;
}

static CUresult take_mapped(const struct row *r, size_t bytes, struct taken *t)
{
	(void)r;
	return mapped((create_function *)(uintptr_t)symbol("cuMemCreate"), FN(map_function *), bytes, t);
}

static void give_mapped(const struct row *r, struct taken *t)
{
	(void)r;
	CALL(cuMemUnmap, (CUdeviceptr, size_t), t->a, t->bytes);
	CALL(cuMemAddressFree, (CUdeviceptr, size_t), t->a, t->bytes);
}

/* A handle taken from the mapping keeps it over the unmap. */
static CUresult take_retained(const struct row *r, size_t bytes, struct taken *t)
{
	CUmemGenericAllocationHandle h = 0;
	(void)r;
	CUresult ret = mapped((create_function *)(uintptr_t)symbol("cuMemCreate"), (map_function *)(uintptr_t)symbol("cuMemMap"), bytes, t);
	if (ret != CUDA_SUCCESS)
		return ret;
	ret = FN(CUresult(*)(CUmemGenericAllocationHandle *, void *))(&h, (void *)(uintptr_t)t->a);
	t->bytes = bytes;
	give_mapped(r, t);
	t->a = h;
	return ret;
}

/* A second handle of the same memory, through a descriptor. */
static CUresult take_imported(const struct row *r, size_t bytes, struct taken *t)
{
	CUmemGenericAllocationHandle h, again = 0;
	int fd = -1;
	(void)r;
	CUresult ret = create((create_function *)(uintptr_t)symbol("cuMemCreate"), bytes, &h);
	if (ret != CUDA_SUCCESS)
		return ret;
	CALL(cuMemExportToShareableHandle, (void *, CUmemGenericAllocationHandle, CUmemAllocationHandleType, unsigned long long), &fd, h,
	     CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0);
	ret = FN(CUresult(*)(CUmemGenericAllocationHandle *, void *, CUmemAllocationHandleType))(
		&again, (void *)(intptr_t)fd, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
	close(fd);
	if (ret != CUDA_SUCCESS)
		release(h);
	t->a = again;
	t->b = h;
	return ret;
}

static void give_imported(const struct row *r, struct taken *t)
{
	(void)r;
	release(t->a);
	release(t->b);
}

/* The same, through the interface for other APIs' memory. */
static CUresult take_external(const struct row *r, size_t bytes, struct taken *t)
{
	CUmemGenericAllocationHandle h;
	CUexternalMemory e = NULL;
	CUdeviceptr p = 0;
	int fd = -1;
	(void)r;
	CUresult ret = create((create_function *)(uintptr_t)symbol("cuMemCreate"), bytes, &h);
	if (ret != CUDA_SUCCESS)
		return ret;
	CALL(cuMemExportToShareableHandle, (void *, CUmemGenericAllocationHandle, CUmemAllocationHandleType, unsigned long long), &fd, h,
	     CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0);
	CUDA_EXTERNAL_MEMORY_HANDLE_DESC d = { .type = CU_EXTERNAL_MEMORY_HANDLE_TYPE_OPAQUE_FD, .handle.fd = fd, .size = bytes };
	ret = FN(CUresult(*)(CUexternalMemory *, const CUDA_EXTERNAL_MEMORY_HANDLE_DESC *))(&e, &d);
	if (ret != CUDA_SUCCESS) {
		release(h);
		return ret;
	}
	CUDA_EXTERNAL_MEMORY_BUFFER_DESC b = { .size = bytes };
	CALL(cuExternalMemoryGetMappedBuffer, (CUdeviceptr *, CUexternalMemory, const CUDA_EXTERNAL_MEMORY_BUFFER_DESC *), &p, e, &b);
	t->a = (uintptr_t)e;
	t->b = p;
	t->c = h;
	return ret;
}

static void give_external(const struct row *r, struct taken *t)
{
	(void)r;
	CALL(cuMemFree_v2, (CUdeviceptr), t->b);
	CALL(cuDestroyExternalMemory, (CUexternalMemory), (CUexternalMemory)(uintptr_t)t->a);
	release(t->c);
}

/* ---- arrays -------------------------------------------------------------------------------- */

#define FORMAT_FLOAT 0x20u
#define ARRAY_WIDTH 1024u

static CUresult take_array(const struct row *r, size_t bytes, struct taken *t)
{
	CUDA_ARRAY_DESCRIPTOR d = { ARRAY_WIDTH, bytes / ARRAY_WIDTH / 4, FORMAT_FLOAT, 1 };
	CUarray a = NULL;
	(void)r;
	CUresult ret = FN(CUresult(*)(CUarray *, const CUDA_ARRAY_DESCRIPTOR *))(&a, &d);
	t->a = (uintptr_t)a;
	return ret;
}

static CUresult take_array_v1(const struct row *r, size_t bytes, struct taken *t)
{
	CUDA_ARRAY_DESCRIPTOR_v1 d = { ARRAY_WIDTH, (unsigned int)(bytes / ARRAY_WIDTH / 4), FORMAT_FLOAT, 1 };
	CUarray a = NULL;
	(void)r;
	CUresult ret = FN(CUresult(*)(CUarray *, const CUDA_ARRAY_DESCRIPTOR_v1 *))(&a, &d);
	t->a = (uintptr_t)a;
	return ret;
}

static CUresult take_array3(const struct row *r, size_t bytes, struct taken *t)
{
	CUDA_ARRAY3D_DESCRIPTOR d = { 256, 256, bytes / 256 / 256 / 4, FORMAT_FLOAT, 1, 0 };
	CUarray a = NULL;
	(void)r;
	CUresult ret = FN(CUresult(*)(CUarray *, const CUDA_ARRAY3D_DESCRIPTOR *))(&a, &d);
	t->a = (uintptr_t)a;
	return ret;
}

static CUresult take_array3_v1(const struct row *r, size_t bytes, struct taken *t)
{
	CUDA_ARRAY3D_DESCRIPTOR_v1 d = { 256, 256, (unsigned int)(bytes / 256 / 256 / 4), FORMAT_FLOAT, 1, 0 };
	CUarray a = NULL;
	(void)r;
	CUresult ret = FN(CUresult(*)(CUarray *, const CUDA_ARRAY3D_DESCRIPTOR_v1 *))(&a, &d);
	t->a = (uintptr_t)a;
	return ret;
}

static void give_array(const struct row *r, struct taken *t)
{
	(void)r;
	CALL(cuArrayDestroy, (CUarray), (CUarray)(uintptr_t)t->a);
}

static CUresult take_mipmap(const struct row *r, size_t bytes, struct taken *t)
{
	CUDA_ARRAY3D_DESCRIPTOR d = { ARRAY_WIDTH, bytes / ARRAY_WIDTH / 4, 0, FORMAT_FLOAT, 1, 0 };
	CUmipmappedArray a = NULL;
	(void)r;
	CUresult ret = FN(CUresult(*)(CUmipmappedArray *, const CUDA_ARRAY3D_DESCRIPTOR *, unsigned int))(&a, &d, 4);
	t->a = (uintptr_t)a;
	return ret;
}

static void give_mipmap(const struct row *r, struct taken *t)
{
	(void)r;
	CALL(cuMipmappedArrayDestroy, (CUmipmappedArray), (CUmipmappedArray)(uintptr_t)t->a);
}

/* ---- graphs -------------------------------------------------------------------------------- */

typedef CUresult instantiate_function(CUgraphExec *, CUgraph, unsigned long long);
typedef CUresult launch_function(CUgraphExec, CUstream);
typedef CUresult node_function(CUgraphNode *, CUgraph, const CUgraphNode *, size_t, CUDA_MEM_ALLOC_NODE_PARAMS *);

static CUDA_MEM_ALLOC_NODE_PARAMS node_params(size_t bytes)
{
	return (CUDA_MEM_ALLOC_NODE_PARAMS){ .poolProps = { .allocType = CU_MEM_ALLOCATION_TYPE_PINNED,
							    .location = { CU_MEM_LOCATION_TYPE_DEVICE, device } },
					     .bytesize = bytes };
}

static CUresult by_node(CUgraph g, size_t bytes, CUdeviceptr *p)
{
	CUDA_MEM_ALLOC_NODE_PARAMS params = node_params(bytes);
	CUgraphNode node;
	CUresult ret = ((node_function *)(uintptr_t)symbol("cuGraphAddMemAllocNode"))(&node, g, NULL, 0, &params);
	*p = params.dptr;
	return ret;
}

static CUresult by_instance(CUgraph g, CUgraphExec *exec)
{
	return ((instantiate_function *)(uintptr_t)symbol("cuGraphInstantiateWithFlags"))(exec, g, 0);
}

static CUresult by_launch(CUgraphExec exec) { return ((launch_function *)(uintptr_t)symbol("cuGraphLaunch"))(exec, NULL); }

static void drop_graph(CUgraph g, CUgraphExec exec)
{
	if (exec)
		CALL(cuGraphExecDestroy, (CUgraphExec), exec);
	CALL(cuGraphDestroy, (CUgraph), g);
}

/* Which of a graph's steps is under test. */
enum graph_step { ADD_MEM_ALLOC, ADD_NODE, ADD_NODE_V2, INSTANTIATE, INSTANTIATE_FLAGS, INSTANTIATE_PARAMS, LAUNCH, UPLOAD };

static CUresult graph(enum graph_step step, size_t bytes, struct taken *t)
{
	CUgraph g = NULL;
	CUgraphExec exec = NULL;
	CUdeviceptr p = 0;
	CUgraphNode node;
	CUresult ret;
	CALL(cuGraphCreate, (CUgraph *, unsigned int), &g, 0);
	if (step == ADD_MEM_ALLOC) {
		CUDA_MEM_ALLOC_NODE_PARAMS params = node_params(bytes);
		ret = FN(node_function *)(&node, g, NULL, 0, &params);
		p = params.dptr;
	} else if (step == ADD_NODE || step == ADD_NODE_V2) {
		CUgraphNodeParams params;
		memset(&params, 0, sizeof(params));
		params.type = CU_GRAPH_NODE_TYPE_MEM_ALLOC;
		params.alloc = node_params(bytes);
		ret = step == ADD_NODE ? FN(CUresult(*)(CUgraphNode *, CUgraph, const CUgraphNode *, size_t, CUgraphNodeParams *))(&node, g, NULL, 0, &params) :
					 FN(CUresult(*)(CUgraphNode *, CUgraph, const CUgraphNode *, const CUgraphEdgeData *, size_t, CUgraphNodeParams *))(
						 &node, g, NULL, NULL, 0, &params);
		p = params.alloc.dptr;
	} else {
		ret = by_node(g, bytes, &p);
	}
	if (ret == CUDA_SUCCESS) {
		CUDA_GRAPH_INSTANTIATE_PARAMS params = { 0 };
		switch (step) {
		case INSTANTIATE:
			ret = FN(CUresult(*)(CUgraphExec *, CUgraph, CUgraphNode *, char *, size_t))(&exec, g, NULL, NULL, 0);
			break;
		case INSTANTIATE_FLAGS:
			ret = FN(instantiate_function *)(&exec, g, 0);
			break;
		case INSTANTIATE_PARAMS:
			ret = FN(CUresult(*)(CUgraphExec *, CUgraph, CUDA_GRAPH_INSTANTIATE_PARAMS *))(&exec, g, &params);
			break;
		case ADD_MEM_ALLOC:
		case ADD_NODE:
		case ADD_NODE_V2:
		case LAUNCH:
		case UPLOAD:
			ret = by_instance(g, &exec);
			break;
		}
	}
	if (ret == CUDA_SUCCESS && step == UPLOAD)
		ret = FN(launch_function *)(exec, NULL);
	if (ret == CUDA_SUCCESS)
		ret = step == LAUNCH ? FN(launch_function *)(exec, NULL) : by_launch(exec);
	if (ret == CUDA_SUCCESS)
		CALL(cuStreamSynchronize, (CUstream), NULL);
	else
		drop_graph(g, exec);
	t->a = p;
	t->b = (uintptr_t)g;
	t->c = (uintptr_t)exec;
	return ret;
}

#define GRAPH(name, step)                                                                    \
	static CUresult name(const struct row *r, size_t bytes, struct taken *t)             \
	{                                                                                    \
		(void)r;                                                                     \
		return graph(step, bytes, t);                                                \
	}
GRAPH(take_alloc_node, ADD_MEM_ALLOC)
GRAPH(take_node, ADD_NODE)
GRAPH(take_node_v2, ADD_NODE_V2)
GRAPH(take_instantiate, INSTANTIATE)
GRAPH(take_instantiate_flags, INSTANTIATE_FLAGS)
GRAPH(take_instantiate_params, INSTANTIATE_PARAMS)
GRAPH(take_launch, LAUNCH)
GRAPH(take_upload, UPLOAD)

/* What a graph allocated and did not free lives on, until this. */
static void give_graph(const struct row *r, struct taken *t)
{
	(void)r;
	CALL(cuMemFree_v2, (CUdeviceptr), t->a);
	drop_graph((CUgraph)(uintptr_t)t->b, (CUgraphExec)(uintptr_t)t->c);
}

static void trim_graphs(void)
{
	CALL(cuCtxSynchronize, (void));
	CALL(cuDeviceGraphMemTrim, (CUdevice), device);
}

/* ---- contexts ------------------------------------------------------------------------------ */

static CUresult created(CUresult ret, CUcontext c, struct taken *t)
{
	t->a = (uintptr_t)c;
	if (ret == CUDA_SUCCESS)
		CALL(cuCtxSetCurrent, (CUcontext), context);
	return ret;
}

static CUresult take_context(const struct row *r, size_t bytes, struct taken *t)
{
	CUcontext c = NULL;
	(void)r, (void)bytes;
	CUresult ret = FN(CUresult(*)(CUcontext *, unsigned int, CUdevice))(&c, 0, device);
	return created(ret, c, t);
}

static CUresult take_context_v3(const struct row *r, size_t bytes, struct taken *t)
{
	CUcontext c = NULL;
	(void)r, (void)bytes;
	CUresult ret = FN(CUresult(*)(CUcontext *, CUexecAffinityParam *, int, unsigned int, CUdevice))(&c, NULL, 0, 0, device);
	return created(ret, c, t);
}

static CUresult take_context_v4(const struct row *r, size_t bytes, struct taken *t)
{
	CUcontext c = NULL;
	(void)r, (void)bytes;
	CUresult ret = FN(CUresult(*)(CUcontext *, CUctxCreateParams *, unsigned int, CUdevice))(&c, NULL, 0, device);
	return created(ret, c, t);
}

static void give_context(const struct row *r, struct taken *t)
{
	(void)r;
	CALL(cuCtxDestroy_v2, (CUcontext), (CUcontext)(uintptr_t)t->a);
}

/* There is one primary context, so it is what is taken last: contexts before it until one more is
 * refused, then one of them makes room for it, and it must not fit before. */
static CUresult take_primary(const struct row *r, size_t bytes, struct taken *t)
{
	typedef CUresult retain_function(CUcontext *, CUdevice);
	CUcontext c = NULL;
	(void)r, (void)bytes;
	CUresult ret = ASK(cuCtxCreate_v2, (CUcontext *, unsigned int, CUdevice), &c, 0, device);
	created(ret, c, t);
	if (ret != CUDA_ERROR_OUT_OF_MEMORY || !newest || newest->b != 0)
		return ret;
	if ((ret = FN(retain_function *)(&c, device)) != CUDA_ERROR_OUT_OF_MEMORY) {
		must(CUDA_ERROR_INVALID_VALUE, "a primary context beyond the limit");
		return ret;
	}
	give_context(r, newest);
	newest->b = 1; /* the primary one */
	must(FN(retain_function *)(&c, device), "a primary context within the limit");
	return ret;
}

static void give_primary(const struct row *r, struct taken *t)
{
	if (t->b == 0)
		give_context(r, t);
	else
		CALL(cuDevicePrimaryCtxRelease_v2, (CUdevice), device);
}

static CUresult take_green(const struct row *r, size_t bytes, struct taken *t)
{
	CUdevResource sm;
	CUdevResourceDesc desc;
	CUgreenCtx green = NULL;
	(void)r, (void)bytes;
	CALL(cuDeviceGetDevResource, (CUdevice, CUdevResource *, CUdevResourceType), device, &sm, CU_DEV_RESOURCE_TYPE_SM);
	CALL(cuDevResourceGenerateDesc, (CUdevResourceDesc *, CUdevResource *, unsigned int), &desc, &sm, 1);
	CUresult ret = FN(CUresult(*)(CUgreenCtx *, CUdevResourceDesc, CUdevice, unsigned int))(&green, desc, device, 1);
	t->a = (uintptr_t)green;
	return ret;
}

static void give_green(const struct row *r, struct taken *t)
{
	(void)r;
	CALL(cuGreenCtxDestroy, (CUgreenCtx), (CUgreenCtx)(uintptr_t)t->a);
}

static void retain_primary(void)
{
	CUcontext c;
	CALL(cuDevicePrimaryCtxRetain, (CUcontext *, CUdevice), &c, device);
}

static void release_primary(void) { CALL(cuDevicePrimaryCtxRelease_v2, (CUdevice), device); }

/* ---- modules ------------------------------------------------------------------------------- */

static const char image[] = ".version 8.0\n";
static char image_path[] = "/tmp/coverage-image-XXXXXX";

static void write_image(void)
{
	strcpy(image_path + strlen(image_path) - 6, "XXXXXX");
	int fd = mkstemp(image_path);
	if (fd < 0 || write(fd, image, sizeof(image)) != (ssize_t)sizeof(image))
		must(CUDA_ERROR_UNKNOWN, "write an image");
	close(fd);
}

static void remove_image(void) { unlink(image_path); }

static CUresult take_module(const struct row *r, size_t bytes, struct taken *t)
{
	CUmodule m = NULL;
	(void)bytes;
	CUresult ret = FN(CUresult(*)(CUmodule *, const void *))(&m, strcmp(r->symbol, "cuModuleLoad") == 0 ? image_path : image);
	t->a = (uintptr_t)m;
	return ret;
}

static CUresult take_module_ex(const struct row *r, size_t bytes, struct taken *t)
{
	CUmodule m = NULL;
	(void)r, (void)bytes;
	CUresult ret = FN(CUresult(*)(CUmodule *, const void *, unsigned int, CUjit_option *, void **))(&m, image, 0, NULL, NULL);
	t->a = (uintptr_t)m;
	return ret;
}

static void give_module(const struct row *r, struct taken *t)
{
	(void)r;
	CALL(cuModuleUnload, (CUmodule), (CUmodule)(uintptr_t)t->a);
}

static CUresult take_library(const struct row *r, size_t bytes, struct taken *t)
{
	CUlibrary l = NULL;
	(void)bytes;
	CUresult ret = FN(CUresult(*)(CUlibrary *, const void *, CUjit_option *, void **, unsigned int, CUlibraryOption *, void **, unsigned int))(
		&l, strcmp(r->symbol, "cuLibraryLoadFromFile") == 0 ? (const void *)image_path : image, NULL, NULL, 0, NULL, NULL, 0);
	t->a = (uintptr_t)l;
	return ret;
}

static void give_library(const struct row *r, struct taken *t)
{
	(void)r;
	CALL(cuLibraryUnload, (CUlibrary), (CUlibrary)(uintptr_t)t->a);
}

/* ---- rows ---------------------------------------------------------------------------------- */

static const struct row rows[] = {
	{ "cuMemAlloc", take_linear_v1, give_linear_v1, NULL, NULL, FIRST_BYTES, LAST_BYTES },
	{ "cuMemAlloc_v2", take_linear, give_linear, NULL, NULL, FIRST_BYTES, LAST_BYTES },
	{ "cuMemAlloc_v2/small", take_linear, give_linear, NULL, NULL, MIB / 2, MIB / 16 },
	{ "cuMemAllocPitch", take_pitch_v1, give_linear_v1, NULL, NULL, FIRST_BYTES, LAST_BYTES },
	{ "cuMemAllocPitch_v2", take_pitch, give_linear, NULL, NULL, FIRST_BYTES, LAST_BYTES },
	{ "cuMemAllocManaged", take_managed, give_linear, NULL, NULL, FIRST_BYTES, LAST_BYTES },
	{ "cuMemAllocAsync", take_async, give_async, NULL, trim_default, FIRST_BYTES, LAST_BYTES },
	{ "cuMemAllocAsync_ptsz", take_async, give_async, NULL, trim_default, FIRST_BYTES, LAST_BYTES },
	{ "cuMemAllocFromPoolAsync", take_pooled, give_async, make_pool, destroy_pool, FIRST_BYTES, LAST_BYTES },
	{ "cuMemAllocFromPoolAsync_ptsz", take_pooled, give_async, make_pool, destroy_pool, FIRST_BYTES, LAST_BYTES },
	{ "cuMemAllocFromPoolAsync/default", take_pooled, give_async, default_pool, trim_default, FIRST_BYTES, LAST_BYTES },
	{ "cuMemCreate", take_vmm, give_vmm, NULL, NULL, FIRST_BYTES, LAST_BYTES },
	{ "cuMemMap", take_mapped, give_mapped, NULL, NULL, FIRST_BYTES, LAST_BYTES },
	{ "cuMemRetainAllocationHandle", take_retained, give_vmm, NULL, NULL, FIRST_BYTES, LAST_BYTES },
	{ "cuMemImportFromShareableHandle", take_imported, give_imported, NULL, NULL, FIRST_BYTES, LAST_BYTES },
	{ "cuImportExternalMemory", take_external, give_external, NULL, NULL, FIRST_BYTES, LAST_BYTES },
	{ "cuArrayCreate", take_array_v1, give_array, NULL, NULL, FIRST_BYTES, LAST_BYTES },
	{ "cuArrayCreate_v2", take_array, give_array, NULL, NULL, FIRST_BYTES, LAST_BYTES },
	{ "cuArray3DCreate", take_array3_v1, give_array, NULL, NULL, FIRST_BYTES, LAST_BYTES },
	{ "cuArray3DCreate_v2", take_array3, give_array, NULL, NULL, FIRST_BYTES, LAST_BYTES },
	{ "cuMipmappedArrayCreate", take_mipmap, give_mipmap, NULL, NULL, FIRST_BYTES, LAST_BYTES },
	{ "cuGraphAddMemAllocNode", take_alloc_node, give_graph, NULL, trim_graphs, FIRST_BYTES, LAST_BYTES },
	{ "cuGraphAddNode", take_node, give_graph, NULL, trim_graphs, FIRST_BYTES, LAST_BYTES },
	{ "cuGraphAddNode_v2", take_node_v2, give_graph, NULL, trim_graphs, FIRST_BYTES, LAST_BYTES },
	{ "cuGraphAddNode_v3", take_node_v2, give_graph, NULL, trim_graphs, FIRST_BYTES, LAST_BYTES },
	{ "cuGraphInstantiate", take_instantiate, give_graph, NULL, trim_graphs, FIRST_BYTES, LAST_BYTES },
	{ "cuGraphInstantiate_v2", take_instantiate, give_graph, NULL, trim_graphs, FIRST_BYTES, LAST_BYTES },
	{ "cuGraphInstantiateWithFlags", take_instantiate_flags, give_graph, NULL, trim_graphs, FIRST_BYTES, LAST_BYTES },
	{ "cuGraphInstantiateWithParams", take_instantiate_params, give_graph, NULL, trim_graphs, FIRST_BYTES, LAST_BYTES },
	{ "cuGraphInstantiateWithParams_ptsz", take_instantiate_params, give_graph, NULL, trim_graphs, FIRST_BYTES, LAST_BYTES },
	{ "cuGraphLaunch", take_launch, give_graph, NULL, trim_graphs, FIRST_BYTES, LAST_BYTES },
	{ "cuGraphLaunch_ptsz", take_launch, give_graph, NULL, trim_graphs, FIRST_BYTES, LAST_BYTES },
	{ "cuGraphUpload", take_upload, give_graph, NULL, trim_graphs, FIRST_BYTES, LAST_BYTES },
	{ "cuGraphUpload_ptsz", take_upload, give_graph, NULL, trim_graphs, FIRST_BYTES, LAST_BYTES },
	{ "cuCtxCreate", take_context, give_context, NULL, NULL, 0, 0 },
	{ "cuCtxCreate_v2", take_context, give_context, NULL, NULL, 0, 0 },
	{ "cuCtxCreate_v3", take_context_v3, give_context, NULL, NULL, 0, 0 },
	{ "cuCtxCreate_v4", take_context_v4, give_context, NULL, NULL, 0, 0 },
	{ "cuDevicePrimaryCtxRetain", take_primary, give_primary, NULL, NULL, 0, 0 },
	{ "cuGreenCtxCreate", take_green, give_green, retain_primary, release_primary, 0, 0 },
	{ "cuModuleLoad", take_module, give_module, write_image, remove_image, 0, 0 },
	{ "cuModuleLoadData", take_module, give_module, NULL, NULL, 0, 0 },
	{ "cuModuleLoadDataEx", take_module_ex, give_module, NULL, NULL, 0, 0 },
	{ "cuModuleLoadFatBinary", take_module, give_module, NULL, NULL, 0, 0 },
	{ "cuLibraryLoadData", take_library, give_library, NULL, NULL, 0, 0 },
	{ "cuLibraryLoadFromFile", take_library, give_library, write_image, remove_image, 0, 0 },
};

#define ROWS (sizeof(rows) / sizeof(rows[0]))

/* Whether the function under test lies in the shim. */
__attribute__((unused)) static bool hooked(void)
{
	Dl_info i;
	return dladdr(under_test, &i) && i.dli_fname && strstr(i.dli_fname, "libgpufence");
}

#endif
