/* SPDX-License-Identifier: Apache-2.0 */
/*
 * probe ID: does what one guess of the simulated GPU (tests/simgpu/guesses) asks of the driver, and
 * says what it saw. `probe --list` has the ids; `probe --serve` answers each line of its stdin with what
 * NVML shows of the GPU and of its processes.
 */
#include "probe.h"

#include <dlfcn.h>
#include <errno.h>
#include <signal.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

struct report said;
CUdevice device;
nvml_device nvml_gpu;
static const char *this_probe;

void say(const char *name, uint64_t value) { report_u64(&said, name, value); }
void say_word(const char *name, const char *word) { report_string(&said, name, word); }

void done(void)
{
	report_end(&said);
	/* No handlers of the driver: what it does at exit is not asked here. */
	_exit(0);
}

static void end(int status, const char *format, va_list args)
{
	char why[512];
	vsnprintf(why, sizeof(why), format, args);
	report_begin(&said, this_probe, false);
	report_string(&said, "why", why);
	report_end(&said);
	_exit(status);
}

void failed(const char *format, ...)
{
	va_list args;
	va_start(args, format);
	end(1, format, args);
	_exit(1);
}

void impossible(const char *format, ...)
{
	va_list args;
	va_start(args, format);
	end(3, format, args);
	_exit(3);
}

/* ---- CUDA ---------------------------------------------------------------------------------- */

void *cuda_or_null(const char *name)
{
	static void *library;
	if (!library)
		library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
	if (!library)
		impossible("open libcuda.so.1: %s", dlerror());
	return dlsym(library, name);
}

void *cuda(const char *name)
{
	void *fn = cuda_or_null(name);
	if (!fn)
		impossible("the driver has no %s", name);
	return fn;
}

const char *word_of(CUresult r)
{
	static char number[32];
	const char *name = NULL;
	CUresult (*ask)(CUresult, const char **) = (CUresult(*)(CUresult, const char **))(uintptr_t)cuda_or_null("cuGetErrorName");
	if (ask && ask(r, &name) == CUDA_SUCCESS && name)
		return name;
	snprintf(number, sizeof(number), "%d", (int)r);
	return number;
}

void must(CUresult r, const char *what)
{
	if (r == CUDA_ERROR_NOT_SUPPORTED)
		impossible("%s: %s", what, word_of(r));
	if (r != CUDA_SUCCESS)
		failed("%s: %s", what, word_of(r));
}

void cuda_init(void)
{
	CALL(cuInit, (unsigned int), 0);
	CALL(cuDeviceGet, (CUdevice *, int), &device, 0);
}

CUcontext cuda_start(void)
{
	CUcontext c = NULL;
	cuda_init();
	CALL(cuCtxCreate_v2, (CUcontext *, unsigned int, CUdevice), &c, 0, device);
	return c;
}

int attribute(CUdevice_attribute a)
{
	int value = 0;
	CALL(cuDeviceGetAttribute, (int *, CUdevice_attribute, CUdevice), &value, a, device);
	return value;
}

size_t free_now(void)
{
	size_t free_bytes = 0, total = 0;
	CALL(cuMemGetInfo_v2, (size_t *, size_t *), &free_bytes, &total);
	return free_bytes;
}

size_t total_now(void)
{
	size_t free_bytes = 0, total = 0;
	CALL(cuMemGetInfo_v2, (size_t *, size_t *), &free_bytes, &total);
	return total;
}

CUdeviceptr alloc(size_t bytes)
{
	CUdeviceptr p = 0;
	CALL(cuMemAlloc_v2, (CUdeviceptr *, size_t), &p, bytes);
	return p;
}

void give(CUdeviceptr p) { CALL(cuMemFree_v2, (CUdeviceptr), p); }
void synchronize(void) { CALL(cuCtxSynchronize, (void)); }

bool launch_empty(void)
{
	static const char text[] = ".version 6.0\n.target sm_50\n.address_size 64\n.visible .entry empty()\n{\n\tret;\n}\n";
	CUmodule module = NULL;
	CUfunction function = NULL;
	if (ASK(cuModuleLoadData, (CUmodule *, const void *), &module, text) != CUDA_SUCCESS)
		return false;
	CALL(cuModuleGetFunction, (CUfunction *, CUmodule, const char *), &function, module, "empty");
	CALL(cuLaunchKernel,
	     (CUfunction, unsigned int, unsigned int, unsigned int, unsigned int, unsigned int, unsigned int, unsigned int, CUstream, void **, void **),
	     function, 1, 1, 1, 1, 1, 1, 0, NULL, NULL, NULL);
	synchronize();
	return true;
}

/* ---- NVML ---------------------------------------------------------------------------------- */

void *nvml_or_null(const char *name)
{
	static void *library;
	if (!library)
		library = dlopen("libnvidia-ml.so.1", RTLD_NOW | RTLD_LOCAL);
	if (!library)
		impossible("open libnvidia-ml.so.1: %s", dlerror());
	return dlsym(library, name);
}

void *nvml(const char *name)
{
	void *fn = nvml_or_null(name);
	if (!fn)
		impossible("NVML has no %s", name);
	return fn;
}

#define NVML(name, type, ...) (((int(*) type)(uintptr_t)nvml(#name))(__VA_ARGS__))

void nvml_start(void)
{
	int e = NVML(nvmlInit_v2, (void));
	if (e != NVML_OK)
		impossible("nvmlInit_v2: %d", e);
	/* By UUID where it is named: CUDA and NVML may count in different orders. */
	const char *uuid = getenv("PROBE_GPU");
	if (uuid && *uuid)
		e = NVML(nvmlDeviceGetHandleByUUID, (const char *, nvml_device *), uuid, &nvml_gpu);
	else
		e = NVML(nvmlDeviceGetHandleByIndex_v2, (unsigned int, nvml_device *), 0, &nvml_gpu);
	if (e != NVML_OK)
		impossible("find the GPU in NVML: %d", e);
}

struct nvml_memory nvml_memory_now(void)
{
	struct nvml_memory m = { 0, 0, 0 };
	int e = NVML(nvmlDeviceGetMemoryInfo, (nvml_device, struct nvml_memory *), nvml_gpu, &m);
	if (e != NVML_OK)
		impossible("nvmlDeviceGetMemoryInfo: %d", e);
	return m;
}

uint64_t used_still(void)
{
	const char *text = getenv("PROBE_STILL_MS");
	long still = text ? atol(text) : 1000, waited = 0, since = 0;
	uint64_t was = nvml_memory_now().used;
	while (since < still && waited < 4 * still) {
		long step = still < 10 ? still : 10;
		pause_ms(step);
		waited += step;
		since += step;
		uint64_t now = nvml_memory_now().used;
		if (now != was) {
			since = 0;
			was = now;
		}
	}
	if (since < still)
		say("unsteady", 1);
	return was;
}

/* One list of processes, in whatever version there is. The count, or -1. */
static int list(const char *base, struct nvml_process_v2 *rows, unsigned int room)
{
	static const char *const versions[] = { "_v3", "_v2" };
	for (size_t i = 0; i < 2; i++) {
		char name[96];
		snprintf(name, sizeof(name), "%s%s", base, versions[i]);
		void *fn = nvml_or_null(name);
		if (!fn)
			continue;
		unsigned int count = room;
		int e = ((int (*)(nvml_device, unsigned int *, struct nvml_process_v2 *))(uintptr_t)fn)(nvml_gpu, &count, rows);
		return e == NVML_OK ? (int)count : -1;
	}
	return -1;
}

#define ROWS_MAX 1024
static struct nvml_process_v2 rows[ROWS_MAX];
static const char *const lists[] = { "nvmlDeviceGetComputeRunningProcesses", "nvmlDeviceGetGraphicsRunningProcesses" };

bool nvml_process(pid_t pid, uint64_t *bytes)
{
	for (size_t l = 0; l < 2; l++) {
		int n = list(lists[l], rows, ROWS_MAX);
		for (int i = 0; i < n; i++) {
			if (rows[i].pid == (unsigned int)pid) {
				*bytes = rows[i].used_gpu_memory == ~0ULL ? 0 : rows[i].used_gpu_memory;
				return true;
			}
		}
	}
	*bytes = 0;
	return false;
}

uint64_t nvml_processes(unsigned int *count)
{
	uint64_t sum = 0;
	*count = 0;
	for (size_t l = 0; l < 2; l++) {
		int n = list(lists[l], rows, ROWS_MAX);
		for (int i = 0; i < n; i++) {
			sum += rows[i].used_gpu_memory == ~0ULL ? 0 : rows[i].used_gpu_memory;
			(*count)++;
		}
	}
	return sum;
}

bool alone(void)
{
	for (size_t l = 0; l < 2; l++) {
		int n = list(lists[l], rows, ROWS_MAX);
		if (n < 0)
			return false; /* not known: nobody's memory is to be put at risk */
		for (int i = 0; i < n; i++)
			if (rows[i].pid != (unsigned int)getpid())
				return false;
	}
	return true;
}

/* ---- time and other processes ---------------------------------------------------------------- */

void pause_ms(long ms)
{
	struct timespec t = { .tv_sec = ms / 1000, .tv_nsec = (ms % 1000) * 1000000 };
	while (nanosleep(&t, &t) != 0 && errno == EINTR) {
	}
}

struct peer peer_start(void (*serve)(int socket))
{
	int pair[2];
	if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair) != 0)
		failed("make a socket: %s", strerror(errno));
	struct peer p = { .pid = fork(), .socket = pair[0] };
	if (p.pid < 0)
		failed("start another process: %s", strerror(errno));
	if (p.pid == 0) {
		prctl(PR_SET_PDEATHSIG, SIGKILL);
		close(pair[0]);
		serve(pair[1]);
		_exit(0);
	}
	close(pair[1]);
	return p;
}

void order_send(int to, const struct order *o, int fd)
{
	struct iovec v = { .iov_base = (void *)(uintptr_t)o, .iov_len = sizeof(*o) };
	char room[CMSG_SPACE(sizeof(int))];
	struct msghdr m = { .msg_iov = &v, .msg_iovlen = 1 };
	if (fd >= 0) {
		m.msg_control = room;
		m.msg_controllen = sizeof(room);
		struct cmsghdr *c = CMSG_FIRSTHDR(&m);
		*c = (struct cmsghdr){ .cmsg_level = SOL_SOCKET, .cmsg_type = SCM_RIGHTS, .cmsg_len = CMSG_LEN(sizeof(int)) };
		memcpy(CMSG_DATA(c), &fd, sizeof(fd));
	}
	if (sendmsg(to, &m, MSG_NOSIGNAL) != sizeof(*o))
		failed("tell another process: %s", strerror(errno));
}

bool order_receive(int from, struct order *o, int *fd)
{
	struct iovec v = { .iov_base = o, .iov_len = sizeof(*o) };
	char room[CMSG_SPACE(sizeof(int))];
	struct msghdr m = { .msg_iov = &v, .msg_iovlen = 1, .msg_control = room, .msg_controllen = sizeof(room) };
	if (recvmsg(from, &m, MSG_CMSG_CLOEXEC) != sizeof(*o))
		return false;
	struct cmsghdr *c = CMSG_FIRSTHDR(&m);
	int got = -1;
	if (c && c->cmsg_type == SCM_RIGHTS)
		memcpy(&got, CMSG_DATA(c), sizeof(got));
	if (fd)
		*fd = got;
	else if (got >= 0)
		close(got);
	return true;
}

CUresult peer_ask(struct peer *p, struct order *o, int fd, int *answer_fd)
{
	order_send(p->socket, o, fd);
	if (!order_receive(p->socket, o, answer_fd))
		failed("another process ended when it was asked");
	return (CUresult)o->op;
}

void peer_end(struct peer *p)
{
	kill(p->pid, SIGKILL);
	waitpid(p->pid, NULL, 0);
	close(p->socket);
}

/* ---- what others hold, for as long as lines come --------------------------------------------------- */

static void serve(void)
{
	char line[64];
	nvml_start();
	setvbuf(stdout, NULL, _IOLBF, 0);
	while (fgets(line, sizeof(line), stdin)) {
		struct nvml_memory m = nvml_memory_now();
		printf("{\"total\":%llu,\"used\":%llu,\"rows\":[", m.total, m.used);
		bool first = true;
		for (size_t l = 0; l < 2; l++) {
			int n = list(lists[l], rows, ROWS_MAX);
			for (int i = 0; i < n; i++) {
				bool known = rows[i].used_gpu_memory != ~0ULL;
				printf("%s{\"pid\":%u,\"known\":%s,\"bytes\":%llu}", first ? "" : ",", rows[i].pid, known ? "true" : "false",
				       known ? rows[i].used_gpu_memory : 0);
				first = false;
			}
		}
		printf("]}\n");
	}
}

/* ---- main ------------------------------------------------------------------------------------ */

static const struct probe *const all[] = { context_probes, memory_probes, sharing_probes, nvml_probes, entry_probes };

int main(int argc, char **argv)
{
	for (size_t i = 0; i < sizeof(all) / sizeof(all[0]); i++) {
		for (const struct probe *p = all[i]; p->id; p++) {
			if (argc == 2 && strcmp(argv[1], "--list") == 0) {
				puts(p->id);
			} else if (argc == 2 && strcmp(argv[1], p->id) == 0) {
				this_probe = p->id;
				report_begin(&said, p->id, true);
				p->run();
				done();
			}
		}
	}
	if (argc == 2 && strcmp(argv[1], "--list") == 0)
		return 0;
	if (argc == 2 && strcmp(argv[1], "--serve") == 0) {
		this_probe = "serve";
		serve();
		return 0;
	}
	fprintf(stderr, "usage: probe --list | --serve | ID\n");
	return 2;
}
