/* SPDX-License-Identifier: Apache-2.0 */
/*
 * internal.h: what the parts of the simulated libcuda.so.1 share.
 *
 * One lock, `big`, guards all state of the library and is held over the calls to simgpud, as
 * the real driver's locks are. Nothing sleeps with it but a call to the kernel driver. After
 * fork the child's calls all fail before they reach the lock, so its state there is nobody's
 * concern.
 *
 * Device addresses are real addresses of this process, mapped without access and without
 * memory behind them. What is copied to one gets memory page by page, up to a bound that
 * simgpud names; beyond it contents are dropped, sizes and addresses stay right.
 */
#ifndef SIMGPU_INTERNAL_H
#define SIMGPU_INTERNAL_H

#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif

#include "cuda_abi.h"

#include "../simgpu_client.h"

#include <pthread.h>
#include <stdbool.h>

#define EXPORT __attribute__((visibility("default")))
#define PAGE SIMGPU_PAGE_BYTES

struct CUctx_st {
	struct CUctx_st *next;   /* all contexts ever made: a handle stays tellable */
	struct device *dev;
	uint64_t handle;         /* simgpud's; 0: not active */
	unsigned int flags, api_version, id;
	unsigned int attached;   /* by cuCtxAttach */
	bool primary, green;
	size_t limits[16];
	int64_t tail[2];         /* when the work of the default streams ends: legacy, per thread */
};

struct device {
	int ordinal, fd;
	struct simgpu_device info;
	struct CUctx_st primary;
	unsigned int primary_refs, primary_flags;
	CUmemoryPool default_pool, current_pool, pools;
	struct graph_memory *graph_memory;
};

/* Physical memory, of a device, of the host, or, with `binds`, a multicast object. */
struct physical {
	struct physical *next;
	CUmemGenericAllocationHandle value; /* what the client holds */
	struct device *dev;                 /* NULL: the host's */
	uint64_t handle;                    /* simgpud's */
	size_t size;
	unsigned int refs, maps;
	CUmemAllocationProp prop;
	struct multicast *multicast;
};

/* A multicast object or an endpoint: no memory of its own, it refers to that of each GPU. */
struct multicast {
	CUmulticastObjectProp prop;
	unsigned int devices; /* a bit for each that was added */
	struct bind {
		struct bind *next;
		struct device *dev;
		struct physical *memory;
		size_t at, size;
	} *binds;
};

/* What lies at an address. */
enum range_kind { RANGE_DEVICE, RANGE_MANAGED, RANGE_POOL, RANGE_MAPPED, RANGE_HOST, RANGE_REGISTERED, RANGE_SHARED, RANGE_GRAPH, RANGE_GLOBAL };

struct range {
	uintptr_t start, end;    /* what was asked for */
	size_t mapped;           /* of address space that goes with it; 0: none of its own */
	uintptr_t base;          /* where that begins, if not at `start` */
	bool direct;             /* it is the host's memory as well */
	enum range_kind kind;
	struct device *dev;
	CUcontext ctx;           /* NULL: belongs to no context */
	uint64_t handle;         /* of the allocation at simgpud */
	struct small_page *page; /* the shared page that it is a part of, or NULL */
	unsigned int flags;      /* of host memory */
	unsigned long long id;
	struct physical *phys;   /* RANGE_MAPPED */
	CUmemAccess_flags access;
	struct piece *piece;     /* RANGE_POOL */
	CUresult (*release)(struct range *); /* what cuMemFree does with it; NULL: it may not */
	void *owner;             /* for that: what the range is a part of */
	uint64_t token;          /* RANGE_SHARED by cuIpcOpenMemHandle */
	unsigned int opens;
	int preferred, prefetched; /* managed: device, -1 host, SIM_NOWHERE */
	unsigned int accessed_by;  /* managed: a bit for each device */
	bool read_mostly;
	struct range *next, *prev;
};

#define SIM_NOWHERE (-2)

extern pthread_mutex_t big;
extern struct device *devices;
extern int device_count;

/* init.c */
CUresult enter(void);               /* initialised, this process, takes the lock */
void leave(void);
CUresult call(struct device *dev, struct simgpu_req *req, struct simgpu_rep *rep);
CUresult call_with(struct device *dev, struct simgpu_req *req, struct simgpu_rep *rep, const int *pass, int *got);
void give_memory(struct device *dev, uint64_t handle); /* frees; a driver that has gone took it along */
void settings(struct device *dev, size_t *pool_step, size_t *module_bytes);
CUresult enter_context(CUcontext *ctx); /* enter, and a living current context */
struct device *device_at(CUdevice dev);
int64_t now_ns(void);
int driver_version(void);           /* as in 12080 */

/* device.c */
int device_attribute(const struct simgpu_device *d, unsigned int attribute);

/* context.c */
bool context_is(CUcontext ctx);     /* a handle that we made */
bool context_alive(CUcontext ctx);
CUcontext current_context(void);
CUresult enter_given(CUcontext *ctx); /* enter, with ctx or the current one, alive */
CUgreenCtx green_of(CUcontext ctx);
/* Whose memory and limits are used while ctx is current: a green context has multiprocessors only. */
static inline CUcontext keeper(CUcontext ctx) { return ctx->green ? &ctx->dev->primary : ctx; }

/* range.c */
void *map_device(size_t size, bool low);
void unmap_device(uintptr_t start, size_t size);
void *page_for_small(struct device *dev, CUcontext ctx, uint64_t handle, bool low);
void drop_small_page(struct device *dev, uint64_t handle);
struct range *range_add(uintptr_t start, size_t size, enum range_kind kind);
struct range *range_find(uintptr_t at);        /* that holds address `at` */
struct range *range_at(uintptr_t start);       /* that begins there */
void range_remove(struct range *r);
void range_unmap(struct range *r);             /* its address space, if it has its own */
struct range *range_of_kind(struct device *dev, enum range_kind kind);
struct range *range_by_token(struct device *dev, uint64_t token);
void ranges_forget_context(CUcontext ctx);
bool range_covers(uintptr_t at, size_t n);     /* something accessible lies at all of it */
CUresult contents_fill(uintptr_t to, const void *pattern, size_t width, size_t count);
void contents_copy(uintptr_t to, uintptr_t from, size_t n); /* unknown addresses are the host's */
void contents_drop(uintptr_t start, size_t size);

/* memory.c */
CUresult free_device(CUdeviceptr dptr);
CUresult allocate_bytes(CUcontext ctx, size_t size, uint64_t *handle); /* without an address */
void touch_managed(uintptr_t at, size_t n); /* the device works on it */

/* pool.c */
void pools_settle(struct device *dev);         /* after a synchronisation */
void pools_drop(struct device *dev);           /* the device was reset */

/* stream.c */
void streams_drop(CUcontext ctx);
CUresult stream_context(CUstream stream, CUcontext *ctx); /* alive, or an error */
CUstream per_thread(CUstream stream);
CUgraph capturing(CUstream stream);            /* the graph that it captures into, or NULL */
CUresult stream_create(CUstream *stream, CUcontext ctx, unsigned int flags, int priority);
CUresult unsafe(void);                         /* refused while this thread's calls are captured */
CUresult capture_fail(CUstream stream);        /* invalidates; the error to give */

/* module.c */
void modules_drop(CUcontext ctx);
CUresult function_resolve(CUfunction handle, CUcontext ctx, CUfunction *out);
uint64_t function_time(CUfunction f);

/* vmm.c */
bool reserved_range(uintptr_t start, size_t size);
struct physical *physical_of(CUmemGenericAllocationHandle value); /* that may be used, or NULL */
struct physical *physical_add(struct device *dev, uint64_t handle, size_t size, const CUmemAllocationProp *prop);
CUresult bind_part(struct multicast *m, struct device *dev, size_t at, struct physical *memory, size_t offset, size_t size);
CUresult unbind_part(struct multicast *m, const struct device *dev, size_t at, size_t size);
void unbind_all(struct multicast *m);
CUresult physical_unused(struct physical *p);  /* frees it if it is */

/* share.c */
CUresult export_memory(struct device *dev, uint64_t handle, uint64_t value, uint64_t *token, int *fd);
CUresult import_token(struct device *dev, uint64_t token, CUcontext ctx, uint64_t *handle, size_t *size);
CUresult import_descriptor(int fd, struct device **dev, uint64_t *handle, size_t *size, uint64_t *value);

/* array.c */
void arrays_drop(CUcontext ctx);
CUresult mipmap_on(CUmipmappedArray *out, const CUDA_ARRAY3D_DESCRIPTOR *desc, unsigned int levels, struct device *dev, size_t room);

void mipmap_drop(CUmipmappedArray mipmap);      /* of such a one; its memory stays */

/* graph.c */
CUresult graph_capture_alloc(CUgraph g, struct device *dev, size_t size, CUdeviceptr *dptr);
CUresult graph_capture_free(CUgraph g, CUdeviceptr dptr);
CUresult graph_capture_other(CUgraph g, CUgraphNodeType type);
CUgraph graph_new(void);
void graph_free(CUgraph g);
bool graph_is(CUgraph g);
void graph_memory_drop(struct device *dev);

#endif /* SIMGPU_INTERNAL_H */
