/* SPDX-License-Identifier: Apache-2.0 */
/*
 * probe.h: what every probe needs. A probe is one process that does one thing to the driver that the
 * loader finds and writes one JSON line of what it saw. It ends there: a probe that crashes or hangs
 * takes no other with it.
 *
 * Exit 0: seen. 1: the driver did what a probe cannot go on from. 3: not possible on this machine.
 */
#ifndef HARDWARE_PROBE_H
#define HARDWARE_PROBE_H

#include "../../clients/src/report.h"
#include "../../simgpu/libcuda/cuda_abi.h"
#include "../../simgpu/libnvml/nvml_abi.h"

#include <stdbool.h>
#include <stdio.h>
#include <sys/types.h>

#define KIB ((size_t)1 << 10)
#define MIB ((size_t)1 << 20)

/* What this probe says; its fields are added as they are seen. */
extern struct report said;

void say(const char *name, uint64_t value);
void say_word(const char *name, const char *word);
/* "NAME of CODE"; the number where the driver has no name for it. */
const char *word_of(CUresult r);

__attribute__((noreturn)) void done(void);
__attribute__((noreturn, format(printf, 1, 2))) void failed(const char *format, ...);
__attribute__((noreturn, format(printf, 1, 2))) void impossible(const char *format, ...);

/* A function of libcuda.so.1, by its exported name; without it the probe is not possible here. */
void *cuda(const char *name);
/* The same, or NULL. */
void *cuda_or_null(const char *name);
void must(CUresult r, const char *what);
/* Calls by the exported name: what must succeed, and what may fail. */
#define CALL(name, type, ...) must(((CUresult(*) type)(uintptr_t)cuda(#name))(__VA_ARGS__), #name)
#define ASK(name, type, ...) (((CUresult(*) type)(uintptr_t)cuda(#name))(__VA_ARGS__))

extern CUdevice device;
void cuda_init(void);       /* cuInit, and the first device */
CUcontext cuda_start(void); /* the same, and a context of our own, current */
int attribute(CUdevice_attribute a);
size_t free_now(void); /* cuMemGetInfo */
size_t total_now(void);
CUdeviceptr alloc(size_t bytes);
void give(CUdeviceptr p);
void synchronize(void);
/* A kernel that does nothing, launched once. False: the driver takes no text. */
bool launch_empty(void);

/* NVML's view of the same device, found by UUID once CUDA runs, else the first. */
extern nvml_device nvml_gpu;
void *nvml(const char *name);
void *nvml_or_null(const char *name);
void nvml_start(void);
struct nvml_memory nvml_memory_now(void);
/* `used` once it has stood still; "unsteady" is said where it did not. */
uint64_t used_still(void);
/* Of a process by NVML's lists of compute and graphics processes; false: it is in none of them. */
bool nvml_process(pid_t pid, uint64_t *bytes);
/* The sum over all processes, and how many there are. */
uint64_t nvml_processes(unsigned int *count);
/* Whether somebody else uses this GPU, so that nothing of it may be filled. */
bool alone(void);

void pause_ms(long ms);

/* Another process, started before CUDA runs, which does what it is told through a socket that carries
 * descriptors too. */
struct order {
	uint64_t op, a, b;
	char data[128];
};
struct peer {
	pid_t pid;
	int socket;
};
struct peer peer_start(void (*serve)(int socket));
void order_send(int socket, const struct order *o, int fd);
bool order_receive(int socket, struct order *o, int *fd);
/* Sends an order and waits for its answer, whose `op` is a CUresult. */
CUresult peer_ask(struct peer *p, struct order *o, int fd, int *answer_fd);
void peer_end(struct peer *p);

struct probe {
	const char *id;
	void (*run)(void);
};
extern const struct probe context_probes[], memory_probes[], sharing_probes[], nvml_probes[], entry_probes[];

#endif
