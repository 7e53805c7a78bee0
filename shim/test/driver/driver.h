/* SPDX-License-Identifier: Apache-2.0 */
/* driver.h: what the parts of the recording driver share. */
#ifndef DRIVER_H
#define DRIVER_H

#include <stdatomic.h>
#include <unistd.h>

#include "../../src/table.h"
#include "fake.h"

#define API __attribute__((visibility("default")))
#define CUDA_ERROR_NOT_INITIALIZED 3
#define CUDA_ERROR_INVALID_DEVICE 101
#define CUDA_ERROR_INVALID_CONTEXT 201
#define CUDA_ERROR_INVALID_HANDLE 400

#define DEVICES 2
#define BLOCK (UINT64_C(2) << 20)

/* Whatever the shim hooks is exported. */
#ifndef DRIVER_REST
#define DECLARE_NVML(symbol)
#define DECLARE_CUDA(symbol) API fn_##symbol symbol;
#define DECLARE(library, symbol, name, version, stream) DECLARE_##library(symbol)
TABLE_HOOKED(DECLARE)
#endif

struct CUctx_st {
	CUdevice device;
	int attached;     /* cuCtxAttach, beyond the first */
	int64_t grown;    /* by its limits */
	int64_t limits[3]; /* as they differ from those that it was made with */
	struct CUctx_st *primary; /* of a green one: memory, modules and limits are the primary one's */
};

/* Gives back what the context and its blocks took, not the context itself. */
void release_context(struct CUctx_st *context);
/* What modules took in it. */
void release_modules(const struct CUctx_st *context);

/* What arrays took in it. */
void release_arrays(const struct CUctx_st *context);
/* Frees a piece of a pool; -1: it is none. */
int release_piece(uint64_t pointer);
/* Frees whatever is at an address. */
int release_pointer(uint64_t pointer);

extern _Thread_local struct CUctx_st *current;
static inline struct CUctx_st *keeper(void) { return current != NULL && current->primary != NULL ? current->primary : current; }

/* What is on the GPU. take_bytes: 0: it is full. */
extern _Atomic uint64_t live, managed;
int take_bytes(uint64_t bytes);
uint64_t whole(uint64_t bytes);

struct record {
	const char *symbol;
	_Atomic unsigned long calls;
	_Atomic int failure; /* 0: none */
	_Atomic int held, waiting; /* where calls stop, and how many do */
};
extern struct record records[];
extern _Thread_local const char *last;
int number(const char *symbol);

static inline void stop(struct record *r, enum fake_stop where)
{
	if (atomic_load(&r->held) != (int)where)
		return;
	atomic_fetch_add(&r->waiting, 1);
	while (atomic_load(&r->held) == (int)where)
		usleep(100);
	atomic_fetch_sub(&r->waiting, 1);
}

/* Each function finds its number once. */
#define ENTER()                                                                       \
	do {                                                                          \
		static _Atomic int mine;                                              \
		if (mine == 0)                                                        \
			mine = number(__func__) + 1;                                  \
		last = __func__;                                                      \
		atomic_fetch_add_explicit(&records[mine - 1].calls, 1, memory_order_relaxed); \
		if (atomic_load_explicit(&records[mine - 1].failure, memory_order_relaxed) != 0) { \
			int failure_ = atomic_exchange(&records[mine - 1].failure, 0); \
			if (failure_ != 0)                                            \
				return failure_;                                      \
		}                                                                     \
		stop(&records[mine - 1], FAKE_BEFORE);                                \
	} while (0)

#endif
