/* SPDX-License-Identifier: Apache-2.0 */
/*
 * abi.h: the pages that gpufenced and the shim share.
 *
 * Two files a process of a fenced container can see:
 *
 *   limits   one a container, written by gpufenced only, mounted read-only. It is
 *            the shim's truth: what this container and its pod may hold on each GPU,
 *            what NVML shows that no slot explains (excess), what a context costs.
 *   ledger   one a pod, read-write for every process of the pod, which is the trust
 *            domain. It is advice: it lets well-behaved programs fail early. Whoever
 *            scribbles on it harms only its own pod; enforcement rests on NVML.
 *
 * Rules of both:
 *   - little-endian, natural alignment, fixed-width integers, no pointer, no bit-field,
 *     nothing whose size depends on libc or word size;
 *   - fields are only appended, in space that is zero today: a shim of version N runs
 *     with pages of N-1 and N+1. abi_major changes only when that cannot be kept;
 *   - every field that two processes touch is one aligned u64, accessed atomically;
 *   - the layout is mirrored in enforcer/ledger/layout.go; a test compares every offset.
 *
 * The ledger keeps no sum anywhere: a sum beside its parts leaks when a process is killed
 * between the two writes. A process announces in its own slot, then adds the slots up.
 */
#ifndef GPUFENCE_ABI_H
#define GPUFENCE_ABI_H

#include <stddef.h>
#include <stdint.h>

#define GPUFENCE_ABI_MAJOR 1
#define GPUFENCE_ABI_MINOR 3

#define GPUFENCE_LIMITS_MAGIC UINT64_C(0x314d494c46555047) /* "GPUFLIM1" in memory order */
#define GPUFENCE_LEDGER_MAGIC UINT64_C(0x3147444c46555047) /* "GPUFLDG1" in memory order */

#define GPUFENCE_GPUS 16u        /* GPUs (or MIG instances) that one container may have */
#define GPUFENCE_SLOTS 512u      /* slots of a ledger by default; the header says the true number */
#define GPUFENCE_UNLIMITED UINT64_MAX

/* Sizes are in bytes unless a name says otherwise. Ledger counters count units of 4 KiB. */
#define GPUFENCE_UNIT_BYTES UINT64_C(4096)

/* A heartbeat that does not move for this long (the reader's own CLOCK_MONOTONIC; no time
 * is shared, since time namespaces and clock steps would falsify it) is stale: gpufenced is
 * away. The last limits stay in force. */
#define GPUFENCE_STALE_NS UINT64_C(10000000000)

/* ---- limits page ------------------------------------------------------------------- */

/* gpufence_limits_gpu.flags */
#define GPUFENCE_GPU_PRESENT UINT64_C(1)  /* this container has the GPU */
#define GPUFENCE_GPU_FENCED UINT64_C(2)   /* limits apply; clear in observe mode */

/* What holds for one GPU. The container's own limit and its pod's are kept apart: both
 * must hold. UNLIMITED means that this level sets none. */
struct gpufence_limits_gpu {
	uint8_t uuid[16];          /* 0x00 raw UUID, as cuDeviceGetUuid gives it */
	uint64_t flags;            /* 0x10 GPUFENCE_GPU_* */
	uint64_t total_bytes;      /* 0x18 physical size */
	uint64_t context_bytes;    /* 0x20 charged for a context */
	uint64_t max_bytes;        /* 0x28 memory.max of the container */
	uint64_t high_bytes;       /* 0x30 memory.high of the container */
	uint64_t swap_max_bytes;   /* 0x38 memory.swap.max of the container */
	uint64_t pod_max_bytes;    /* 0x40 memory.max of the pod */
	uint64_t pod_high_bytes;   /* 0x48 memory.high of the pod */
	uint64_t pod_swap_max_bytes; /* 0x50 memory.swap.max of the pod */
	uint64_t excess_bytes;     /* 0x58 seen by NVML for this container, in no slot */
	uint64_t pod_excess_bytes; /* 0x60 the same over the pod, this container included */
	uint64_t module_bytes;     /* 0x68 charged for a loaded module; 0: not charged, excess covers it */
	uint64_t reserved[2];      /* 0x70 zero */
};

/* One of the two copies behind the latch. */
struct gpufence_limits_copy {
	uint64_t generation;       /* 0x00 of the grant: grows with every resize */
	uint32_t gpu_count;        /* 0x08 */
	uint32_t crc32c;           /* 0x0c Castagnoli, of this copy with the field as 0 */
	/* 0x10. The index is the pod's: a GPU has the same one in every limits page of a pod and
	 * in its ledger, for the pod's life; an entry without PRESENT is another container's. */
	struct gpufence_limits_gpu gpu[GPUFENCE_GPUS];
};

/*
 * Reading: s = latch (acquire); copy = copies[s & 1]; read its fields; acquire fence; if the
 * latch is not s any more, again, at most 8 times, then the last good private copy. Any
 * change of the latch means a torn read: accepting "moved by one" is wrong.
 * Writing (gpufenced only): fill copies[(latch + 1) & 1], release-store latch + 1.
 */
struct gpufence_limits {
	uint64_t magic;            /* 0x00 */
	uint16_t abi_major;        /* 0x08 */
	uint16_t abi_minor;        /* 0x0a */
	uint32_t header_bytes;     /* 0x0c offset of copies */
	uint64_t total_bytes;      /* 0x10 of the file */
	uint32_t container_index;  /* 0x18 what this container writes into its slots */
	uint32_t gpu_bytes;        /* 0x1c sizeof(struct gpufence_limits_gpu) of the writer */
	uint32_t copy_bytes;       /* 0x20 sizeof(struct gpufence_limits_copy) of the writer */
	uint32_t reserved0;        /* 0x24 */
	uint8_t boot_id[16];       /* 0x28 */
	uint64_t reserved1;        /* 0x38 */
	uint64_t latch;            /* 0x40 */
	uint64_t writer_epoch;     /* 0x48 grows when gpufenced restarts */
	uint64_t heartbeat;        /* 0x50 a counter that moves while gpufenced lives */
	uint64_t sample;           /* 0x58 number of the newest NVML sample; bumped before its call,
	                            * or not where nothing has happened since the last one */
	uint64_t reserved2[4];     /* 0x60 */
	struct gpufence_limits_copy copies[2]; /* 0x80 */
};

/* ---- ledger ------------------------------------------------------------------------ */

/*
 * owner:   [generation:24 | state:8 | pid:32], claimed by one CAS, so that a slot is never
 *          claimed by nobody. pid is what getpid() says in the owner's pid namespace.
 * counter: [generation:24 | units:40]. Counts only while its generation is the owner's. Every
 *          change is a CAS that checks the generation, so a process whose slot was taken
 *          away cannot touch its successor's numbers.
 * peak:    [sample:24 | units:40], two of them, indexed by the lowest bit of the sample: the
 *          greatest device charge while that NVML sample was the newest. A slot that was not
 *          touched during a sample holds its present charge for it.
 */
#define GPUFENCE_UNITS_BITS 40
#define GPUFENCE_UNITS_MASK ((UINT64_C(1) << GPUFENCE_UNITS_BITS) - 1)
#define GPUFENCE_GENERATION_MASK UINT64_C(0xffffff)

enum gpufence_slot_state {
	GPUFENCE_SLOT_FREE = 0,
	GPUFENCE_SLOT_LIVE = 1,   /* counted */
	GPUFENCE_SLOT_DYING = 2,  /* owner exited, NVML still lists it: in no reserve's sum */
};

struct gpufence_slot_gpu {
	uint64_t device;           /* 0x00 counter: device memory */
	uint64_t managed;          /* 0x08 counter: managed memory, counted as on the device */
	uint64_t swap;             /* 0x10 counter: spilled to the host */
	uint64_t peak[2];          /* 0x18 of device */
	uint64_t events_max;       /* 0x28 refused: own limit. relaxed, never used for decisions */
	uint64_t events_device;    /* 0x30 refused: the GPU is full */
	uint64_t events_high;      /* 0x38 delayed above memory.high */
};

struct gpufence_slot {
	uint64_t owner;            /* 0x00 */
	uint64_t pidns_inode;      /* 0x08 of the owner; gpufenced derives its own and compares */
	uint64_t start_ticks;      /* 0x10 informational: /proc/self/stat field 22 as the owner sees it */
	uint32_t container_index;  /* 0x18 from the owner's limits page; in a reserve's sum only */
	uint32_t shim_abi;         /* 0x1c major << 16 | minor */
	uint64_t flags;            /* 0x20 zero today */
	uint64_t allocs;           /* 0x28 statistics, relaxed */
	uint64_t frees;            /* 0x30 */
	uint32_t throttled_ms[GPUFENCE_GPUS]; /* 0x38 slowed above memory.high, by GPU; stops at its greatest number */
	/* 0x78 how often this process has opened memory of another one (IPC, imports), relaxed. Since 1.3:
	 * a shim before it neither sets nor clears it, so it says something with that shim_abi only. */
	uint64_t imports;
	struct gpufence_slot_gpu gpu[GPUFENCE_GPUS]; /* 0x80, indexed as in the limits page */
};

/*
 * File: header, slots[slot_count], then one more slot, the overflow slot: processes that
 * find no free slot charge there together.
 *
 * Locks are OFD record locks (fcntl F_OFD_SETLK) on this file, each process with an open
 * file of its own (close-on-exec, reopened after fork); the kernel drops them with it:
 *   - a slot's bytes, exclusive: held by its owner for as long as it lives. Taken before the
 *     owner word is written. A LIVE slot whose lock is free has lost its owner;
 *   - the overflow slot's bytes, shared: held by each of its users; whoever gets it
 *     exclusively may set it to 0;
 *   - byte GPUFENCE_LEDGER_LOCK_OFFSET + gpu, exclusive: the slow path of a reserve near the
 *     limit, with a deadline, never waited for without one.
 * Lock order: a slot's lock before the slow path's; no lock is held over a driver call.
 */
#define GPUFENCE_LEDGER_LOCK_OFFSET 0x800

struct gpufence_ledger {
	uint64_t magic;            /* 0x00 */
	uint16_t abi_major;        /* 0x08 */
	uint16_t abi_minor;        /* 0x0a */
	uint32_t header_bytes;     /* 0x0c offset of slots: 4096 */
	uint64_t total_bytes;      /* 0x10 of the file */
	uint32_t slot_count;       /* 0x18 without the overflow slot */
	uint32_t slot_bytes;       /* 0x1c */
	uint32_t gpu_count_max;    /* 0x20 entries in a slot */
	uint32_t reserved0;        /* 0x24 */
	uint64_t high_slot;        /* 0x28 hint: no slot at or above it was ever claimed; clamp it */
	uint64_t reclaim_request;  /* 0x30 hint to gpufenced: bumped by whoever was refused */
	uint64_t pressed;          /* 0x38 bumped by whoever charged above memory.high: launches look again */
};

#define GPUFENCE_LEDGER_HEADER_BYTES 4096u

_Static_assert(sizeof(struct gpufence_limits_gpu) == 0x80, "limits_gpu");
_Static_assert(sizeof(struct gpufence_limits_copy) == 0x10 + 0x80 * 16, "limits_copy");
_Static_assert(offsetof(struct gpufence_limits, latch) == 0x40, "latch");
_Static_assert(offsetof(struct gpufence_limits, copies) == 0x80, "copies");
_Static_assert(sizeof(struct gpufence_limits) == 0x80 + 2 * (0x10 + 0x80 * 16), "limits");
_Static_assert(sizeof(struct gpufence_slot_gpu) == 64, "slot_gpu");
_Static_assert(offsetof(struct gpufence_slot, throttled_ms) == 0x38, "slot.throttled_ms");
_Static_assert(offsetof(struct gpufence_slot, imports) == 0x78, "slot.imports");
_Static_assert(offsetof(struct gpufence_slot, gpu) == 0x80, "slot.gpu");
_Static_assert(sizeof(struct gpufence_slot) == 0x80 + 64 * 16, "slot");
_Static_assert(sizeof(struct gpufence_ledger) == 0x40, "ledger header");

/* Where a container finds them. The shim looks beside itself: the folder above the $LIB
 * folder that it was loaded from (/dev/gpufence/lib64/libgpufence.so -> /dev/gpufence), so
 * no environment variable can point it elsewhere. */
#define GPUFENCE_DIR "/dev/gpufence"
#define GPUFENCE_LIMITS_NAME "limits"
#define GPUFENCE_LEDGER_NAME "ledger"

#endif
