/* SPDX-License-Identifier: Apache-2.0 */
/*
 * internal.h: what the parts of the runtime library for the simulated GPU share.
 *
 * A thin libcudart.so over the driver's public interface, for programs that link the runtime dynamically. It finds
 * the driver as NVIDIA's does: libcuda.so.1 by its plain name, then every function from cuGetProcAddress at the
 * version that was recorded. What NVIDIA's keeps behind private tables of its driver it asks in public: which
 * context is current, and the primary context, which it retains before it makes it current.
 *
 * With SIMGPU_RUNTIME_TRACE=FILE every call of the driver is written there, a name a line, "/2" behind it if it is
 * the variant for per-thread default streams.
 */
#ifndef SIMGPU_CUDART_INTERNAL_H
#define SIMGPU_CUDART_INTERNAL_H

#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif

#include "cudart_abi.h"

#include <pthread.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#define EXPORT __attribute__((visibility("default")))
#define GPUS_MAX 64
#define ATTRIBUTES 160 /* more than properties are made of */

/* What a null stream means. */
enum variant { LEGACY, PER_THREAD };

struct driver {
#define DRIVER(name, version, per_thread, parameters) CUresult(*name) parameters;
#include "driver.def"
#undef DRIVER
};

struct gpu {
	CUdevice dev;
	CUcontext primary; /* NULL: not retained */
	char name[256];
	size_t total;
	CUuuid uuid;
	int attribute[ATTRIBUTES];
};

extern struct driver drivers[2];
extern struct gpu gpus[GPUS_MAX];
extern int gpu_count;
extern pthread_mutex_t lock; /* of contexts and code; not held over what may call back */

/* cudart.c */
cudaError_t start(void);               /* the driver is there, and its devices are known */
cudaError_t enter(void);               /* and a context is current in this thread */
cudaError_t finish(cudaError_t error); /* notes the thread's last error */
cudaError_t current_device(int *device); /* an index of gpus */
cudaError_t primary_of(int device, CUcontext *ctx);
void trace(const char *name, enum variant v);

/* launch.c */
void code_forget(CUcontext ctx); /* what was loaded into it has gone */

/* Calls the driver. A function that it lacks is one of a newer driver. */
#define CALL(v, name, ...) \
	(drivers[v].name ? (trace(#name, v), (cudaError_t)drivers[v].name(__VA_ARGS__)) : cudaErrorCallRequiresNewerDriver)

/* The body of a function that needs a context. */
#define IN_CONTEXT(call)                \
	do {                            \
		cudaError_t e = enter(); \
		return finish(e == cudaSuccess ? (call) : e); \
	} while (0)

#endif /* SIMGPU_CUDART_INTERNAL_H */
