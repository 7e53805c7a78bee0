/* SPDX-License-Identifier: Apache-2.0 */
#include "probe.h"

#include <dlfcn.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

static CUmemAllocationProp shareable(void)
{
	return (CUmemAllocationProp){ .type = CU_MEM_ALLOCATION_TYPE_PINNED,
				      .requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
				      .location = { CU_MEM_LOCATION_TYPE_DEVICE, device } };
}

static CUmemGenericAllocationHandle create(size_t bytes)
{
	CUmemAllocationProp p = shareable();
	CUmemGenericAllocationHandle h = 0;
	CALL(cuMemCreate, (CUmemGenericAllocationHandle *, size_t, const CUmemAllocationProp *, unsigned long long), &h, bytes, &p, 0);
	return h;
}

static int export_handle(CUmemGenericAllocationHandle h)
{
	int fd = -1;
	CALL(cuMemExportToShareableHandle, (void *, CUmemGenericAllocationHandle, CUmemAllocationHandleType, unsigned long long), &fd, h,
	     CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0);
	return fd;
}

static void exported_descriptor(void)
{
	nvml_start();
	cuda_start();
	uint64_t before = used_still();
	CUmemGenericAllocationHandle h = create(256 * MIB);
	int fd = export_handle(h);
	say("exported_bytes", used_still() - before);
	CALL(cuMemRelease, (CUmemGenericAllocationHandle), h);
	uint64_t released = used_still();
	say("after_release_bytes", released > before ? released - before : 0);
	close(fd);
	uint64_t closed = used_still();
	say("after_close_bytes", closed > before ? closed - before : 0);
}

/* ---- who is shown with shared memory ----------------------------------------------------------- */

enum { OP_START, OP_MAKE, OP_OPEN, OP_MAKE_IPC, OP_OPEN_IPC };

/* A process that owns or imports, as it is told. */
static void share_serve(int socket)
{
	struct order o;
	int fd = -1;
	while (order_receive(socket, &o, &fd)) {
		struct order answer = { .op = CUDA_SUCCESS };
		int out = -1;
		switch (o.op) {
		case OP_START:
			cuda_start();
			break;
		case OP_MAKE:
			out = export_handle(create(o.a));
			break;
		case OP_OPEN: {
			CUmemGenericAllocationHandle h = 0;
			answer.op = (uint64_t)ASK(cuMemImportFromShareableHandle, (CUmemGenericAllocationHandle *, void *, CUmemAllocationHandleType), &h,
						  (void *)(intptr_t)fd, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
			close(fd);
			break;
		}
		case OP_MAKE_IPC: {
			CUipcMemHandle h;
			CUdeviceptr p = alloc(o.a);
			answer.op = (uint64_t)ASK(cuIpcGetMemHandle, (CUipcMemHandle *, CUdeviceptr), &h, p);
			memcpy(answer.data, &h, sizeof(h));
			break;
		}
		case OP_OPEN_IPC: {
			CUipcMemHandle h;
			CUdeviceptr p = 0;
			memcpy(&h, o.data, sizeof(h));
			answer.op = (uint64_t)ASK(cuIpcOpenMemHandle_v2, (CUdeviceptr *, CUipcMemHandle, unsigned int), &p, h, 1);
			break;
		}
		default:
			failed("an order that nobody gives: %d", (int)o.op);
		}
		order_send(socket, &answer, out);
		if (out >= 0)
			close(out);
		fd = -1;
	}
}

static uint64_t row_of(struct peer *p)
{
	uint64_t bytes;
	nvml_process(p->pid, &bytes);
	return bytes;
}

static void say_grown(const char *way, const char *what, uint64_t now, uint64_t before)
{
	char name[64];
	snprintf(name, sizeof(name), "%s_%s_bytes", way, what);
	say(name, now > before ? now - before : 0);
}

/* One owner and two importers; what each row grows by, then who is charged when the owner has ended. */
static void shared_by(const char *way, uint64_t make, uint64_t open)
{
	const size_t bytes = 256 * MIB;
	struct peer owner = peer_start(share_serve), first = peer_start(share_serve), second = peer_start(share_serve);
	struct peer *all[] = { &owner, &first, &second };
	uint64_t before[3];
	char name[64];
	int fd = -1;
	for (int i = 0; i < 3; i++)
		must(peer_ask(all[i], &(struct order){ .op = OP_START }, -1, NULL), "start another process");
	uint64_t used = used_still();
	for (int i = 0; i < 3; i++)
		before[i] = row_of(all[i]);
	struct order o = { .op = make, .a = bytes };
	must(peer_ask(&owner, &o, -1, &fd), "make shared memory");
	struct order in = { .op = open };
	memcpy(in.data, o.data, sizeof(in.data));
	CUresult r = CUDA_SUCCESS;
	for (int i = 1; i < 3 && r == CUDA_SUCCESS; i++) {
		struct order each = in;
		r = peer_ask(all[i], &each, fd, NULL);
	}
	if (fd >= 0)
		close(fd);
	snprintf(name, sizeof(name), "%s_open", way);
	say_word(name, word_of(r));
	say_grown(way, "device", used_still(), used);
	say_grown(way, "owner", row_of(&owner), before[0]);
	say_grown(way, "importer_1", row_of(&first), before[1]);
	say_grown(way, "importer_2", row_of(&second), before[2]);
	uint64_t with_owner = used_still();
	peer_end(&owner);
	uint64_t without = used_still();
	say_grown(way, "owner_ended_device_less", with_owner, without);
	say_grown(way, "owner_ended_importer_1", row_of(&first), before[1]);
	say_grown(way, "owner_ended_importer_2", row_of(&second), before[2]);
	peer_end(&first);
	peer_end(&second);
}

static void nvml_shared(void)
{
	nvml_start();
	shared_by("handle", OP_MAKE, OP_OPEN);
	shared_by("ipc", OP_MAKE_IPC, OP_OPEN_IPC);
}

static void own_ipc_handle(void)
{
	CUipcMemHandle h;
	CUdeviceptr p, q = 0;
	cuda_start();
	p = alloc(4 * MIB);
	CALL(cuIpcGetMemHandle, (CUipcMemHandle *, CUdeviceptr), &h, p);
	say_word("open", word_of(ASK(cuIpcOpenMemHandle_v2, (CUdeviceptr *, CUipcMemHandle, unsigned int), &q, h, 1)));
	say("same_address", q == p);
	say_word("next", word_of(ASK(cuCtxSynchronize, (void))));
}

/* ---- how late NVML is ---------------------------------------------------------------------------- */

enum { LAG_START, LAG_ALLOC, LAG_FREE };

static void lag_serve(int socket)
{
	struct order o;
	CUdeviceptr p = 0;
	while (order_receive(socket, &o, NULL)) {
		struct order answer = { .op = CUDA_SUCCESS };
		if (o.op == LAG_START)
			cuda_start();
		else if (o.op == LAG_ALLOC)
			p = alloc(o.a);
		else
			give(p);
		answer.a = report_now_ns();
		order_send(socket, &answer, -1);
	}
}

#define LAG_MOST_NS (UINT64_C(30) * 1000000000)

/* Until a process's row has left `was`; the time since `from`, or what it was waited for at most. */
static uint64_t until_row(pid_t pid, bool listed, uint64_t was, uint64_t from)
{
	for (;;) {
		uint64_t bytes;
		bool there = nvml_process(pid, &bytes);
		uint64_t now = report_now_ns();
		if (there != listed || bytes != was || now - from > LAG_MOST_NS)
			return now > from ? now - from : 0;
	}
}

static void nvml_lag(void)
{
	const size_t bytes = 2048 * MIB; /* more than what others let go in a moment */
	char name[48];
	nvml_start();
	for (int round = 1; round <= 3; round++) {
		struct peer p = peer_start(lag_serve);
		uint64_t row;
		must(peer_ask(&p, &(struct order){ .op = LAG_START }, -1, NULL), "start another process");
		pause_ms(200);
		if (!nvml_process(p.pid, &row))
			impossible("NVML does not list process %d, which has a context: another pid namespace?", (int)p.pid);
		struct order o = { .op = LAG_ALLOC, .a = bytes };
		must(peer_ask(&p, &o, -1, NULL), "allocate");
		snprintf(name, sizeof(name), "alloc_%d_us", round);
		say(name, until_row(p.pid, true, row, o.a) / 1000);
		nvml_process(p.pid, &row);
		o = (struct order){ .op = LAG_FREE };
		must(peer_ask(&p, &o, -1, NULL), "free");
		snprintf(name, sizeof(name), "free_%d_us", round);
		say(name, until_row(p.pid, true, row, o.a) / 1000);
		o = (struct order){ .op = LAG_ALLOC, .a = bytes };
		must(peer_ask(&p, &o, -1, NULL), "allocate");
		nvml_process(p.pid, &row);
		/* Of now, not of the beginning: what ended before may have been let go since. */
		uint64_t held = used_still(), killed = report_now_ns();
		kill(p.pid, SIGKILL);
		waitpid(p.pid, NULL, 0);
		uint64_t reaped = report_now_ns(), gone = 0, back = 0;
		while ((!gone || !back) && report_now_ns() - killed < LAG_MOST_NS) {
			uint64_t b;
			if (!gone && !nvml_process(p.pid, &b))
				gone = report_now_ns();
			if (!back && nvml_memory_now().used + bytes / 2 < held)
				back = report_now_ns();
		}
		snprintf(name, sizeof(name), "kill_to_reaped_%d_us", round);
		say(name, (reaped - killed) / 1000);
		snprintf(name, sizeof(name), "kill_to_row_gone_%d_us", round);
		say(name, gone ? (gone - killed) / 1000 : LAG_MOST_NS / 1000);
		snprintf(name, sizeof(name), "kill_to_used_back_%d_us", round);
		say(name, back ? (back - killed) / 1000 : LAG_MOST_NS / 1000);
		close(p.socket);
	}
}

/* ---- what takes memory, step by step, for whoever records ioctls ------------------------------------ */

static void step(const char *name)
{
	/* ioctls.c's, where it is loaded. */
	void (*mark)(const char *) = (void (*)(const char *))(uintptr_t)dlsym(RTLD_DEFAULT, "ioctls_step");
	if (mark)
		mark(name);
}

static void take_ways(void)
{
	CUmemAllocationProp prop;
	CUmemGenericAllocationHandle h = 0;
	CUdeviceptr p = 0, managed = 0, pooled = 0;
	CUarray array = NULL;
	CUresult r;
	step("start");
	CALL(cuInit, (unsigned int), 0);
	CALL(cuDeviceGet, (CUdevice *, int), &device, 0);
	step("context");
	CALL(cuCtxCreate_v2, (CUcontext *, unsigned int, CUdevice), &(CUcontext){ NULL }, 0, device);
	step("launch");
	launch_empty();
	/* The first small one brings a page; what the next ones take must be nothing. */
	step("small");
	must(ASK(cuMemAlloc_v2, (CUdeviceptr *, size_t), &p, 4 * KIB), "cuMemAlloc_v2");
	step("small-again");
	must(ASK(cuMemAlloc_v2, (CUdeviceptr *, size_t), &p, 4 * KIB), "cuMemAlloc_v2");
	step("alloc");
	r = ASK(cuMemAlloc_v2, (CUdeviceptr *, size_t), &p, 64 * MIB);
	say_word("alloc", word_of(r));
	/* Once more: with one refused, whether it stays so. */
	step("alloc-again");
	r = ASK(cuMemAlloc_v2, (CUdeviceptr *, size_t), &p, 64 * MIB);
	say_word("alloc_again", word_of(r));
	step("free");
	if (r == CUDA_SUCCESS)
		give(p);
	step("create");
	prop = shareable();
	r = ASK(cuMemCreate, (CUmemGenericAllocationHandle *, size_t, const CUmemAllocationProp *, unsigned long long), &h, 64 * MIB, &prop, 0);
	say_word("create", word_of(r));
	step("pool");
	r = ASK(cuMemAllocAsync, (CUdeviceptr *, size_t, CUstream), &pooled, 64 * MIB, NULL);
	say_word("pool", word_of(r));
	step("array");
	r = ASK(cuArray3DCreate_v2, (CUarray *, const CUDA_ARRAY3D_DESCRIPTOR *), &array, &(CUDA_ARRAY3D_DESCRIPTOR){ 2048, 2048, 0, 0x20, 1, 0 });
	say_word("array", word_of(r));
	step("managed");
	r = ASK(cuMemAllocManaged, (CUdeviceptr *, size_t, unsigned int), &managed, 64 * MIB, CU_MEM_ATTACH_GLOBAL);
	say_word("managed", word_of(r));
	if (r == CUDA_SUCCESS) {
		step("managed-touch");
		r = ASK(cuMemsetD8_v2, (CUdeviceptr, unsigned char, size_t), managed, 0, 64 * MIB);
		say_word("managed_touch", word_of(r));
	}
	step("synchronize");
	say_word("synchronize", word_of(ASK(cuCtxSynchronize, (void))));
	step("end");
}

const struct probe sharing_probes[] = {
	{ "exported-descriptor", exported_descriptor },
	{ "nvml-shared", nvml_shared },
	{ "own-ipc-handle", own_ipc_handle },
	{ "nvml-lag", nvml_lag },
	{ "take-ways", take_ways },
	{ NULL, NULL },
};
