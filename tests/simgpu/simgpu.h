/* SPDX-License-Identifier: Apache-2.0 */
/*
 * simgpu.h: what a client and simgpud, the simulated kernel driver, say to each other.
 *
 * simgpud listens on SOCK_SEQPACKET unix sockets in one folder:
 *
 *   gpu0, gpu1, ...  the device files. A connection is an open device file: what was
 *                    allocated through it lives until it is freed or until the last copy of
 *                    the descriptor is closed. Its owner is the process that connected
 *                    (SO_PEERCRED), also after fork. A socket that is not in a client's
 *                    folder is a device node that this client does not have.
 *   gpu0.mig0, ...   the device files of MIG instances, in the place of their GPU's: through
 *                    the file of a GPU that is split nothing is allocated.
 *   ctl              the control device: what NVML asks. Nothing is allocated through it.
 *   admin            for people and tests (HTTP, mode 0600), never given to a container.
 *
 * One request is one packet, a struct simgpu_req, with a descriptor where the operation says
 * so; its answer is one packet, a struct
 * simgpu_rep, followed by the payload that the operation names. A connection carries one
 * request at a time. Everything is little-endian with natural alignment; sizes are in bytes.
 * tests/simgpu/wire mirrors this file in Go; a test compares every offset and number.
 */
#ifndef SIMGPU_H
#define SIMGPU_H

#include <stdint.h>

#define SIMGPU_MAGIC 0x31475253u /* "SRG1" in memory order */

#define SIMGPU_DIR_ENV "SIMGPU_DIR"          /* where a client looks for the sockets... */
#define SIMGPU_DIR_DEFAULT "/dev/simgpu"     /* ...and where without that variable */
#define SIMGPU_CTL "ctl"
#define SIMGPU_ADMIN "admin"
#define SIMGPU_GPU_PREFIX "gpu"              /* followed by the GPU's minor number */
#define SIMGPU_MIG_INFIX ".mig"              /* then by this and the instance's index, from 0 */

#define SIMGPU_PACKET_MAX 65536u             /* no packet is larger */
#define SIMGPU_GPUS_MAX 64u                  /* GPUs and MIG instances together */
#define SIMGPU_MIG_MAX 7u                    /* instances of a GPU, and slices of its processors */
#define SIMGPU_PROCS_MAX 950u                /* as many as the real driver lists */

/* How sizes are rounded; see docs/simulated-gpu.md. */
#define SIMGPU_PAGE_BYTES UINT64_C(2097152)      /* granule of device memory */
#define SIMGPU_SMALL_BYTES UINT64_C(1048576)     /* up to here allocations share pages */
#define SIMGPU_ALIGN_BYTES UINT64_C(512)         /* granule inside a shared page, and of a pitch */

/* simgpu_req.op on a gpuN socket. arg[] and val[] not named are 0. */
enum simgpu_gpu_op {
	/* payload: struct simgpu_device */
	SIMGPU_OP_INFO = 1,
	/* arg[0] enum simgpu_list in which NVML shows the process, arg[1] enum simgpu_context
	 * -> val[0] context handle (never 0), val[1] bytes taken */
	SIMGPU_OP_CTX_CREATE = 2,
	/* arg[0] context: frees what was allocated in it -> val[0] bytes given back */
	SIMGPU_OP_CTX_DESTROY = 3,
	/* arg[0] context or 0 (then it belongs to the open file alone), arg[1] bytes,
	 * arg[2] enum simgpu_kind -> val[0] handle (never 0), val[1] bytes by which the device's
	 * use grew, val[2] handle of the shared page or 0, val[3] offset in the shared page,
	 * val[4] bytes as rounded */
	SIMGPU_OP_ALLOC = 4,
	/* arg[0] handle -> val[0] bytes given back, val[1] handle of the shared page that went
	 * with it, or 0 */
	SIMGPU_OP_FREE = 5,
	/* what holds now, without NVML's lag -> val[0] free, val[1] total (as CUDA counts it) */
	SIMGPU_OP_MEMINFO = 6,
	/* arg[0] context, arg[1] ns of GPU time or SIMGPU_KERNEL_DEFAULT -> val[0] ns from now
	 * until it has run */
	SIMGPU_OP_LAUNCH = 7,
	/* arg[0] handle of managed memory, arg[1] 1: bring it to the device, 0: to the host
	 * -> val[0] bytes of it on the device */
	SIMGPU_OP_MIGRATE = 8,
	/* arg[0] handle of an allocation, or of a shared page, or 0 for none; arg[1] 1: with a
	 * descriptor, arg[2] a number that importers get to see
	 * -> val[0] token by which any process can import the memory (0: there is none). A
	 * descriptor comes with the answer (SCM_RIGHTS); until its last copy is closed it keeps
	 * the memory. */
	SIMGPU_OP_EXPORT = 9,
	/* arg[0] token; or 0, then what the descriptor that comes with the request stands for;
	 * arg[1] context or 0 -> val[0] handle or 0 if there is no memory, val[1] bytes as
	 * rounded, val[2] the number given at the export */
	SIMGPU_OP_IMPORT = 10,
	/* arg[0] context, arg[1] bytes (two's complement) by which it is larger than it was made */
	SIMGPU_OP_CTX_RESIZE = 11,
	/* -> val[0] bytes by which pools grow, val[1] bytes that a module takes which does not
	 * say itself */
	SIMGPU_OP_SETTINGS = 12,
};

/* simgpu_req.arg[1] of SIMGPU_OP_CTX_CREATE */
enum simgpu_context {
	SIMGPU_CONTEXT_WHOLE = 0,
	SIMGPU_CONTEXT_GREEN = 1, /* stands on another context of its process */
};

/* simgpu_req.op on the ctl socket. arg[0] is the number of a GPU or an instance where one
 * is meant: a GPU's is its minor, instances are counted after all GPUs. A GPU that is split
 * answers for its instances. */
enum simgpu_ctl_op {
	/* payload: struct simgpu_node */
	SIMGPU_OP_NODE = 64,
	/* arg[0] GPU; payload: struct simgpu_device */
	SIMGPU_OP_DEVICE = 65,
	/* arg[0] GPU, arg[1] version of NVML's call -> val[0] total, val[1] reserved, val[2] used (without reserved), val[3] free */
	SIMGPU_OP_NVML_MEMORY = 66,
	/* arg[0] GPU, arg[1] enum simgpu_list; payload: val[0] times struct simgpu_proc */
	SIMGPU_OP_NVML_PROCS = 67,
	/* arg[0] GPU -> val[0] percent of time, val[1] percent of memory */
	SIMGPU_OP_NVML_UTIL = 68,
	/* arg[0] GPU, arg[1] only samples after this time stamp in us; payload: val[0] times
	 * struct simgpu_proc_util */
	SIMGPU_OP_NVML_PROC_UTIL = 69,
	/* arg[0] GPU, arg[1] soft, arg[2] hard limit in bytes (SIMGPU_NO_LIMIT: none); with a
	 * descriptor of a cgroup's folder. For root. */
	SIMGPU_OP_LIMITS_SET = 70,
	/* arg[0] GPU; with a descriptor as above -> val[0] soft, val[1] hard, val[2] bytes charged */
	SIMGPU_OP_LIMITS_GET = 71,
};

/* simgpu_req.arg[2] of SIMGPU_OP_ALLOC */
enum simgpu_kind {
	SIMGPU_KIND_DEVICE = 0,   /* cuMemAlloc: pages, or a part of a shared page */
	SIMGPU_KIND_PHYSICAL = 1, /* cuMemCreate, a pool's growth: whole pages */
	SIMGPU_KIND_MANAGED = 2,  /* on the device as far as there is room, in no process's list */
};

/* simgpu_req.arg[1] of SIMGPU_OP_NVML_PROCS, arg[0] of SIMGPU_OP_CTX_CREATE */
enum simgpu_list {
	SIMGPU_LIST_COMPUTE = 0,
	SIMGPU_LIST_GRAPHICS = 1,
	SIMGPU_LIST_MPS = 2,
	SIMGPU_LIST_ALL = 3, /* whoever is in any of them, once; for SIMGPU_OP_NVML_PROCS only */
};

/* simgpu_rep.status */
enum simgpu_status {
	SIMGPU_OK = 0,
	SIMGPU_E_NO_MEMORY = 1,
	SIMGPU_E_INVALID = 2,       /* malformed, or an argument out of range */
	SIMGPU_E_NOT_FOUND = 3,     /* no such GPU, handle or sample */
	SIMGPU_E_LOST = 4,          /* the GPU has fallen off the bus */
	SIMGPU_E_NOT_SUPPORTED = 5, /* this GPU does not say */
	SIMGPU_E_BUSY = 6,          /* no more contexts allowed */
	SIMGPU_E_ELSEWHERE = 7,     /* the descriptor stands for memory of another GPU */
	SIMGPU_E_NOT_PERMITTED = 8, /* for root only */
	SIMGPU_E_NO_CGROUP = 9,     /* the descriptor is none of a cgroup's folder */
};

#define SIMGPU_KERNEL_DEFAULT UINT64_MAX
#define SIMGPU_NO_LIMIT UINT64_MAX
#define SIMGPU_NOT_AVAILABLE UINT64_MAX /* simgpu_proc.used_bytes that nobody knows */

struct simgpu_req {
	uint32_t magic;   /* 0x00 SIMGPU_MAGIC */
	uint32_t op;      /* 0x04 */
	uint64_t arg[7];  /* 0x08 */
};

struct simgpu_rep {
	uint32_t magic;   /* 0x00 SIMGPU_MAGIC */
	int32_t status;   /* 0x04 enum simgpu_status; payload only with SIMGPU_OK */
	uint64_t val[7];  /* 0x08 */
};

/* What is the same for the life of simgpud. Strings end with 0. */
struct simgpu_node {
	char driver_version[80]; /* 0x00 "570.133.20" */
	char nvml_version[80];   /* 0x50 "12.570.133.20" */
	uint32_t cuda_version;   /* 0xa0 12080 for 12.8 */
	uint32_t gpu_count;      /* 0xa4 with MIG instances; numbers are 0 .. gpu_count-1 */
};

struct simgpu_device {
	uint8_t uuid[16];            /* 0x00 */
	char uuid_text[48];          /* 0x10 "GPU-01234567-89ab-..." */
	char name[96];               /* 0x40 */
	char pci_bus_id[32];         /* 0xa0 "00000000:01:00.0" */
	uint32_t pci_domain;         /* 0xc0 */
	uint32_t pci_bus;            /* 0xc4 */
	uint32_t pci_device;         /* 0xc8 */
	uint32_t pci_device_id;      /* 0xcc device id << 16 | vendor id */
	uint32_t pci_subsystem_id;   /* 0xd0 */
	uint32_t minor;              /* 0xd4 */
	uint32_t cc_major;           /* 0xd8 compute capability */
	uint32_t cc_minor;           /* 0xdc */
	uint32_t sm_count;           /* 0xe0 */
	uint32_t threads_per_sm;     /* 0xe4 */
	uint64_t total_bytes;        /* 0xe8 as NVML counts it */
	uint64_t reserved_bytes;     /* 0xf0 the driver's own part */
	uint64_t cuda_total_bytes;   /* 0xf8 as CUDA counts it: total - reserved */
	uint32_t cuda_version;       /* 0x100 so that a client needs no ctl socket */
	uint32_t backing_mib;        /* 0x104 host memory that a client may spend on contents */
	uint32_t number;             /* 0x108 in requests to ctl */
	uint32_t mig_instances;      /* 0x10c into which the GPU is split; 0: it is not */
	uint32_t mig_instance;       /* 0x110 id of a GPU instance, its index + 1; 0: a GPU */
	uint32_t mig_slices;         /* 0x114 of the SIMGPU_MIG_MAX that the instance has */
	uint8_t gpu_uuid[16];        /* 0x118 of an instance: its GPU's; else its own */
};

struct simgpu_proc {
	uint32_t pid;         /* 0x00 */
	uint32_t instance;    /* 0x04 id of the GPU instance; 0: none */
	uint64_t used_bytes;  /* 0x08 or SIMGPU_NOT_AVAILABLE */
};

struct simgpu_proc_util {
	uint32_t pid;           /* 0x00 */
	uint32_t sm_percent;    /* 0x04 */
	uint32_t mem_percent;   /* 0x08 */
	uint32_t reserved;      /* 0x0c zero */
	uint64_t time_stamp_us; /* 0x10 CLOCK_REALTIME, end of the sample */
};

#endif /* SIMGPU_H */
