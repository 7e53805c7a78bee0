/* SPDX-License-Identifier: Apache-2.0 */
/*
 * fake.h: a driver for tests and measurements: it does nothing, records which of its functions
 * were reached, counts what would be on the GPU, and fails on demand. Two libraries with the
 * driver's sonames; the functions below are exported by libcuda.so.1 beside its own.
 *
 * Two GPUs of FAKE_TOTAL bytes (memory is counted as of one). It rounds as the real one: more than 1 MiB to blocks of 2 MiB of its
 * own, the rest shares such blocks.
 */
#ifndef FAKE_H
#define FAKE_H

#include <stdint.h>

#include "../../src/driver_api.h"

#define FAKE_TOTAL (UINT64_C(16) << 30)
#define FAKE_CONTEXT_BYTES (UINT64_C(300) << 20)
#define FAKE_RESERVED (UINT64_C(500) << 20)
#define FAKE_MODULE_BYTES (UINT64_C(6) << 20) /* of a module, or a library's in the current context */
#define FAKE_PROCESSORS 100
#define FAKE_PROCESSOR_THREADS 2048
#define FAKE_STACK 1024

/* As builder_uuid of the page builder. */
static inline void fake_uuid(unsigned int n, uint8_t uuid[16])
{
	for (unsigned int i = 0; i < 16; i++)
		uuid[i] = (uint8_t)(0xa0 + i);
	uuid[15] = (uint8_t)n;
}

/* The exported symbol that was called last, and how often that one was called in all. */
const char *fake_last(void);
unsigned long fake_calls(const char *symbol);

/* The next call of that symbol does nothing and returns result. */
void fake_fail(const char *symbol, CUresult result);
/* Calls of that symbol stop before they do anything, or (cuMemFreeAsync) after it, until told to go on.
 * How many have. */
enum fake_stop { FAKE_NOWHERE, FAKE_BEFORE, FAKE_AFTER };
void fake_stop(const char *symbol, enum fake_stop where);
int fake_stopped(const char *symbol);

/* What NVML would show for this process: blocks and contexts; managed pages apart. */
uint64_t fake_live_bytes(void);
uint64_t fake_managed_bytes(void);

/* What the GPU has; less makes it full. */
void fake_set_total(uint64_t bytes);
/* What the pitch is a multiple of: 512. */
void fake_set_pitch(uint64_t bytes);
/* What pools grow by: 32 MiB. */
void fake_set_pool_step(uint64_t bytes);
/* The host has seen all work done: pools give back whole chunks. Or the device is reset: all. */
void fake_sync(void);
void fake_reset_device(void);
/* Every stream captures. */
void fake_capture(int on);
/* Pools do not say where they are. */
void fake_before_13(int on);
/* A graph, and nodes in it. */
CUgraph fake_graph(void);
CUdeviceptr fake_graph_alloc(CUgraph graph, CUdevice device, uint64_t bytes);
CUdeviceptr fake_graph_alloc_at(CUgraph graph, int type, int id, uint64_t bytes); /* a location */
void fake_graph_free(CUgraph graph, CUdeviceptr pointer);
void fake_graph_child(CUgraph graph, CUgraph child);
/* cuGetProcAddress answers with addresses that dlsym does not know. */
void fake_internal_addresses(int on);
void fake_set_version(int version);
/* Looks a symbol up as the driver does, in itself: 1 if that gave its own, not a hook. */
int fake_finds_own(const char *symbol);
/* The driver's own function. */
void *fake_address(const char *symbol);

#endif
