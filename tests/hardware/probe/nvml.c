/* SPDX-License-Identifier: Apache-2.0 */
#include "probe.h"

#include <errno.h>
#include <fcntl.h>
#include <glob.h>
#include <limits.h>
#include <sched.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <unistd.h>

#define NVML(name, type, ...) (((int(*) type)(uintptr_t)nvml(#name))(__VA_ARGS__))

static void machine(void)
{
	char text[96] = "";
	unsigned int current = 0, pending = 0, count = 0;
	nvml_device migs = NULL;
	int version = 0;
	nvml_start();
	if (NVML(nvmlSystemGetDriverVersion, (char *, unsigned int), text, sizeof(text)) == NVML_OK)
		say_word("driver", text);
	if (NVML(nvmlDeviceGetName, (nvml_device, char *, unsigned int), nvml_gpu, text, sizeof(text)) == NVML_OK)
		say_word("name", text);
	if (NVML(nvmlDeviceGetUUID, (nvml_device, char *, unsigned int), nvml_gpu, text, sizeof(text)) == NVML_OK)
		say_word("uuid", text);
	NVML(nvmlDeviceGetCount_v2, (unsigned int *), &count);
	say("gpus", count);
	say("nvml_total_bytes", nvml_memory_now().total);
	if (nvml_or_null("nvmlDeviceGetMigMode") && NVML(nvmlDeviceGetMigMode, (nvml_device, unsigned int *, unsigned int *), nvml_gpu, &current, &pending) == NVML_OK)
		say("mig", current);
	if (current && NVML(nvmlDeviceGetMigDeviceHandleByIndex, (nvml_device, unsigned int, nvml_device *), nvml_gpu, 0, &migs) == NVML_OK)
		say("mig_instances", 1);
	uint64_t sum = nvml_processes(&count);
	say("processes", count);
	say("processes_bytes", sum);
	CALL(cuDriverGetVersion, (int *), &version);
	say("cuda", (uint64_t)version);
	CUresult r = ASK(cuInit, (unsigned int), 0);
	say_word("init", word_of(r));
	if (r == CUDA_SUCCESS) {
		CALL(cuDeviceGet, (CUdevice *, int), &device, 0);
		size_t total = 0;
		CALL(cuDeviceTotalMem_v2, (size_t *, CUdevice), &total, device);
		say("cuda_total_bytes", total);
		CUuuid u;
		CALL(cuDeviceGetUuid, (CUuuid *, CUdevice), &u, device);
		const unsigned char *b = (const unsigned char *)u.bytes;
		snprintf(text, sizeof(text), "GPU-%02x%02x%02x%02x-%02x%02x-%02x%02x-%02x%02x-%02x%02x%02x%02x%02x%02x", b[0], b[1], b[2], b[3], b[4], b[5], b[6],
			 b[7], b[8], b[9], b[10], b[11], b[12], b[13], b[14], b[15]);
		say_word("cuda_uuid", text);
	}
}

static void reserve(void)
{
	struct nvml_memory v1;
	struct nvml_memory_v2 v2 = { .version = NVML_MEMORY_V2 };
	nvml_start();
	v1 = nvml_memory_now();
	say("v1_total", v1.total);
	say("v1_used", v1.used);
	say("v1_free", v1.free);
	int (*second)(nvml_device, struct nvml_memory_v2 *) =
		(int (*)(nvml_device, struct nvml_memory_v2 *))(uintptr_t)nvml_or_null("nvmlDeviceGetMemoryInfo_v2");
	if (second && second(nvml_gpu, &v2) == NVML_OK) {
		say("v2_total", v2.total);
		say("v2_used", v2.used);
		say("v2_free", v2.free);
		say("v2_reserved", v2.reserved);
	}
	cuda_start();
	say("cuda_total", total_now());
	say("cuda_free", free_now());
	say("nvml_free_with_context", nvml_memory_now().free);
}

/* The sum of the rows against what the device has in use, with one context and 1 GiB of our own. */
static void nvml_sums(void)
{
	unsigned int count;
	uint64_t row = 0, still;
	nvml_start();
	still = used_still();
	say("idle_used", still);
	say("idle_sum", nvml_processes(&count));
	say("idle_processes", count);
	cuda_start();
	alloc(1024 * MIB);
	say("used", used_still());
	say("sum", nvml_processes(&count));
	say("processes", count);
	say("listed", nvml_process(getpid(), &row));
	say("row", row);
}

static void nvml_cost(void)
{
	enum { EACH = 100 };
	struct nvml_memory m;
	unsigned int count;
	uint64_t t;
	nvml_start();
	cuda_start();
	t = report_now_ns();
	for (int i = 0; i < EACH; i++)
		m = nvml_memory_now();
	say("memory_ns", (report_now_ns() - t) / EACH);
	t = report_now_ns();
	for (int i = 0; i < EACH; i++)
		nvml_processes(&count);
	say("lists_ns", (report_now_ns() - t) / EACH);
	t = report_now_ns();
	for (int i = 0; i < EACH; i++)
		free_now();
	say("mem_info_ns", (report_now_ns() - t) / EACH);
	say("processes", count);
	say("total", m.total);
}

/* ---- what needs more than a GPU --------------------------------------------------------------------- */

static void lost(void) { impossible("only a GPU that falls off the bus shows it, and this must not make one"); }
static void graphics_buffers(void) { impossible("this makes no OpenGL context"); }

static nvml_device mig_device(void)
{
	unsigned int current = 0, pending = 0;
	nvml_device mig = NULL;
	nvml_start();
	if (!nvml_or_null("nvmlDeviceGetMigMode") ||
	    NVML(nvmlDeviceGetMigMode, (nvml_device, unsigned int *, unsigned int *), nvml_gpu, &current, &pending) != NVML_OK)
		impossible("this GPU has no MIG");
	if (!current)
		impossible("MIG is off, and this must not switch it on");
	if (NVML(nvmlDeviceGetMigDeviceHandleByIndex, (nvml_device, unsigned int, nvml_device *), nvml_gpu, 0, &mig) != NVML_OK)
		impossible("MIG is on, and the GPU has no instance that this process may see");
	return mig;
}

/* Of the instance that CUDA gives this process, whichever profile it has. */
static void mig_profiles(void)
{
	struct nvml_attributes a = { 0 };
	nvml_device mig = mig_device();
	if (NVML(nvmlDeviceGetAttributes_v2, (nvml_device, struct nvml_attributes *), mig, &a) == NVML_OK) {
		say("multiprocessors", a.multiprocessors);
		say("memory_mb", a.memory_mb);
		say("gpu_slices", a.gpu_slices);
	}
	nvml_gpu = mig;
	uint64_t before = used_still();
	cuda_start();
	say("context_bytes", used_still() - before);
}

static void mig_beside_whole(void)
{
	unsigned int gpus = 0;
	int count = 0;
	mig_device();
	NVML(nvmlDeviceGetCount_v2, (unsigned int *), &gpus);
	if (gpus < 2)
		impossible("there is no second GPU beside the one in MIG mode");
	cuda_init();
	CALL(cuDeviceGetCount, (int *), &count);
	say("gpus", gpus);
	say("cuda_count", (uint64_t)count);
}

static void mig_hidden(void)
{
	mig_device();
	impossible("this does not take capability nodes from a process yet: start it in a container without them");
}

static void mig_minor(void)
{
	nvml_device mig = mig_device();
	unsigned int minor = 0;
	int e = NVML(nvmlDeviceGetMinorNumber, (nvml_device, unsigned int *), mig, &minor);
	say("result", (uint64_t)e);
	say("minor", minor);
}

/* ---- the driver's own limits -------------------------------------------------------------------------- */

/* In a cgroup that is made for this and holds this process alone. */
static void limit_code(void)
{
	int (*set)(nvml_device, struct nvml_set_limits *) =
		(int (*)(nvml_device, struct nvml_set_limits *))(uintptr_t)nvml_or_null("nvmlDeviceSetMemoryLimits_v1");
	int (*get)(nvml_device, struct nvml_get_limits *) =
		(int (*)(nvml_device, struct nvml_get_limits *))(uintptr_t)nvml_or_null("nvmlDeviceGetMemoryLimits_v1");
	static char dir[PATH_MAX], file[PATH_MAX + 32];
	const char *root = "/sys/fs/cgroup";
	if (!set || !get)
		impossible("this driver has no memory limits (before R615)");
	if (access("/sys/fs/cgroup/cgroup.controllers", F_OK) != 0)
		root = "/sys/fs/cgroup/unified";
	snprintf(dir, sizeof(dir), "%s/gpufence-probe-%d", root, (int)getpid());
	if (mkdir(dir, 0755) != 0)
		impossible("make a cgroup: %s", strerror(errno));
	snprintf(file, sizeof(file), "%s/cgroup.procs", dir);
	FILE *f = fopen(file, "w");
	bool moved = f && fprintf(f, "%d", (int)getpid()) > 0;
	if (f && fclose(f) != 0)
		moved = false;
	nvml_start();
	struct nvml_get_limits g = { .name_space = dir };
	say("read_before", (uint64_t)get(nvml_gpu, &g));
	say("set", (uint64_t)set(nvml_gpu, &(struct nvml_set_limits){ .name_space = dir, .hard = 4096 * MIB }));
	cuda_start();
	alloc(1024 * MIB);
	say("below_use", (uint64_t)set(nvml_gpu, &(struct nvml_set_limits){ .name_space = dir, .hard = 512 * MIB }));
	g = (struct nvml_get_limits){ .name_space = dir };
	say("read_after", (uint64_t)get(nvml_gpu, &g));
	say("hard", g.hard);
	say("used", g.used);
	say("moved", moved);
	/* Back, so that the folder can go. */
	snprintf(file, sizeof(file), "%s/cgroup.procs", root);
	if (moved && (f = fopen(file, "w"))) {
		fprintf(f, "%d", (int)getpid());
		if (fclose(f) != 0)
			say("not_moved_back", 1);
	}
	if (rmdir(dir) != 0)
		say_word("left", dir);
}

static void dmem_regions(void)
{
	static const char *const files[] = { "/sys/fs/cgroup/dmem.capacity", "/sys/fs/cgroup/unified/dmem.capacity" };
	for (size_t i = 0; i < 2; i++) {
		char text[480];
		FILE *f = fopen(files[i], "r");
		if (!f)
			continue;
		size_t n = fread(text, 1, sizeof(text) - 1, f);
		bool ok = !ferror(f);
		fclose(f);
		text[n] = 0;
		if (!ok)
			failed("read %s", files[i]);
		if (!n)
			impossible("%s is empty: no driver has a region", files[i]);
		say_word("capacity", text);
		return;
	}
	impossible("this kernel has no dmem controller, or it is not enabled here");
}

/* ---- NVML without a GPU --------------------------------------------------------------------------------- */

/* A folder of device files as a container has them: the control node, none of a GPU. */
static void hide_nodes(void)
{
	glob_t nodes;
	if (unshare(CLONE_NEWNS) != 0 || mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL) != 0)
		impossible("make a mount namespace: %s", strerror(errno));
	if (glob("/dev/nvidia[0-9]*", 0, NULL, &nodes) != 0)
		impossible("there are no /dev/nvidiaN");
	for (size_t i = 0; i < nodes.gl_pathc; i++)
		if (mount("/dev/null", nodes.gl_pathv[i], NULL, MS_BIND, NULL) != 0)
			impossible("hide %s: %s", nodes.gl_pathv[i], strerror(errno));
	globfree(&nodes);
}

static void nvml_without_gpu(void)
{
	static char dir[] = "/tmp/gpufence-probe-XXXXXX";
	char from[PATH_MAX], to[PATH_MAX];
	const char *sim = getenv("SIMGPU_DIR");
	unsigned int count = 0;
	bool linked = false;
	if (sim) {
		/* The simulated GPU's files are sockets in a folder. */
		if (!mkdtemp(dir))
			failed("make a folder: %s", strerror(errno));
		snprintf(from, sizeof(from), "%s/ctl", sim);
		snprintf(to, sizeof(to), "%s/ctl", dir);
		linked = symlink(from, to) == 0;
		if (!linked || setenv("SIMGPU_DIR", dir, 1) != 0)
			failed("hide the simulated GPU's sockets");
	} else {
		hide_nodes();
	}
	int e = NVML(nvmlInit_v2, (void));
	say("init", (uint64_t)e);
	if (e == NVML_OK) {
		say("count_result", (uint64_t)NVML(nvmlDeviceGetCount_v2, (unsigned int *), &count));
		say("count", count);
	}
	say_word("cuda_init", word_of(ASK(cuInit, (unsigned int), 0)));
	if (linked) {
		unlink(to);
		rmdir(dir);
	}
}

const struct probe nvml_probes[] = {
	{ "machine", machine },
	{ "reserve", reserve },
	{ "nvml-sums", nvml_sums },
	{ "nvml-cost", nvml_cost },
	{ "lost", lost },
	{ "graphics-buffers", graphics_buffers },
	{ "mig-profiles", mig_profiles },
	{ "mig-beside-whole", mig_beside_whole },
	{ "mig-hidden", mig_hidden },
	{ "mig-minor", mig_minor },
	{ "limit-code", limit_code },
	{ "dmem-regions", dmem_regions },
	{ "nvml-without-gpu", nvml_without_gpu },
	{ NULL, NULL },
};
