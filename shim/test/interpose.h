/* SPDX-License-Identifier: Apache-2.0 */
/*
 * interpose.h: a test in a program of its own, that the shim is preloaded into as in a container:
 * from a $LIB folder below the folder of the pages. The program is this one, run again with the
 * name of a part ("--part NAME"), or another one. Where things lie comes from the environment:
 * TEST_SHIM, TEST_DRIVER, TEST_TOYS, and TEST_RUNTIME, a sanitizer's library to be loaded first.
 * TEST_RUNNER, if set, is the emulator that programs of another machine run under.
 */
#ifndef GPUFENCE_INTERPOSE_H
#define GPUFENCE_INTERPOSE_H

#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdbool.h>
#include <sys/stat.h>

#include "driver/fake.h"
#include "pages_builder.h"
#include "unit.h"

#define MIB (UINT64_C(1) << 20)
#define GIB (UINT64_C(1) << 30)
#define LIMIT (4 * GIB)

struct part {
	const char *name;
	void (*run)(void);
};

struct scene {
	const char *part;        /* of this program, or */
	const char *program[4];  /* another one and its arguments */
	const char *before, *after; /* preloaded around the shim: names in TEST_TOYS */
	const char *driver;      /* folder, if not TEST_DRIVER */
	uint64_t max_bytes;      /* of both GPUs; 0: unlimited */
	uint64_t pod_max_bytes;  /* 0: unlimited */
	uint64_t high_bytes;     /* of the first GPU; 0: unlimited */
	uint64_t excess_bytes, module_bytes;
	bool no_shim, no_pages, no_driver;
	bool stub;               /* instead of the shim: the driver's libraries are those of TEST_STUB */
	char stubs[64];          /* the folder that they are in, beside the pages and the real ones */
	char output[4096];       /* what it wrote to either of its outputs */
	uint64_t events_max, events_device, charged; /* afterwards */
	uint64_t events_high, throttled_ms, imports;
};

__attribute__((unused)) static const char *place(const char *variable)
{
	const char *value = getenv(variable);
	if (value == NULL)
		unit_fail("%s is not set: run `make test`", variable);
	return value;
}

__attribute__((unused)) static void scene_pages(struct builder *b, const struct scene *s)
{
	struct builder_options options = { .slots = 16 };
	struct gpufence_limits_gpu gpus[2];
	builder_init(b, &options);
	for (unsigned int i = 0; i < 2; i++) {
		gpus[i] = builder_gpu(i);
		gpus[i].context_bytes = FAKE_CONTEXT_BYTES;
		gpus[i].max_bytes = s->max_bytes != 0 ? s->max_bytes : GPUFENCE_UNLIMITED;
		gpus[i].pod_max_bytes = s->pod_max_bytes != 0 ? s->pod_max_bytes : GPUFENCE_UNLIMITED;
		gpus[i].high_bytes = i == 0 && s->high_bytes != 0 ? s->high_bytes : GPUFENCE_UNLIMITED;
		gpus[i].module_bytes = s->module_bytes;
		gpus[i].excess_bytes = gpus[i].pod_excess_bytes = s->excess_bytes;
	}
	builder_publish(b, gpus, 2);
}

/* Copies a stub to where its folder, as long as the one that it was built for, is another one. */
__attribute__((unused)) static void copy_stub(const char *dir, const char *name)
{
	static const char built[] = "/dev/gpufence";
	char from[PATH_MAX], to[PATH_MAX];
	unsigned int found = 0;
	snprintf(from, sizeof from, "%s/%s", place("TEST_STUB"), name);
	snprintf(to, sizeof to, "%s/stub/%s", dir, name);
	int in = open(from, O_RDONLY), out = open(to, O_RDWR | O_CREAT | O_EXCL, 0755);
	struct stat st;
	CHECK(in >= 0 && out >= 0 && fstat(in, &st) == 0 && ftruncate(out, st.st_size) == 0);
	char *bytes = mmap(NULL, (size_t)st.st_size, PROT_READ | PROT_WRITE, MAP_SHARED, out, 0);
	CHECK(bytes != MAP_FAILED && read(in, bytes, (size_t)st.st_size) == st.st_size);
	CHECK(strlen(dir) == sizeof built - 1);
	for (char *at = bytes; (at = memmem(at, (size_t)(bytes + st.st_size - at), built, sizeof built - 1)) != NULL; found++)
		memcpy(at, dir, sizeof built - 1);
	CHECK(found >= 2); /* what it needs, and where its pages are */
	munmap(bytes, (size_t)st.st_size);
	close(in);
	close(out);
}

__attribute__((unused)) static void scene_stub(struct scene *s, const char *pages)
{
	static const char *const libraries[] = { "libcuda.so.1", "libnvidia-ml.so.1" };
	char dir[16] = "/tmp/gfXXXXXX", from[PATH_MAX], to[PATH_MAX];
	CHECK(mkdtemp(dir) != NULL);
	for (int i = 0; i < 2; i++) {
		snprintf(to, sizeof to, "%s/%s", dir, i == 0 ? "real" : "stub");
		CHECK(mkdir(to, 0755) == 0);
		snprintf(from, sizeof from, "%s/%s", pages, i == 0 ? GPUFENCE_LIMITS_NAME : GPUFENCE_LEDGER_NAME);
		snprintf(to, sizeof to, "%s/%s", dir, i == 0 ? GPUFENCE_LIMITS_NAME : GPUFENCE_LEDGER_NAME);
		CHECK(symlink(from, to) == 0);
	}
	for (int i = 0; i < 2; i++) {
		snprintf(from, sizeof from, "%s/%s", place("TEST_DRIVER"), libraries[i]);
		snprintf(to, sizeof to, "%s/real/%s", dir, libraries[i]);
		CHECK(symlink(from, to) == 0);
		copy_stub(dir, libraries[i]);
	}
	snprintf(s->stubs, sizeof s->stubs, "%s/stub", dir);
	s->driver = s->stubs;
	s->no_shim = true;
}

__attribute__((unused)) static void remove_stub(const struct scene *s)
{
	static const char *const files[] = { "real/libcuda.so.1", "real/libnvidia-ml.so.1", "stub/libcuda.so.1",
					     "stub/libnvidia-ml.so.1", GPUFENCE_LIMITS_NAME, GPUFENCE_LEDGER_NAME };
	char path[PATH_MAX];
	for (size_t i = 0; i < sizeof files / sizeof files[0]; i++) {
		snprintf(path, sizeof path, "%.13s/%s", s->stubs, files[i]);
		unlink(path);
	}
	snprintf(path, sizeof path, "%.13s/real", s->stubs);
	rmdir(path);
	snprintf(path, sizeof path, "%.13s", s->stubs);
	rmdir(s->stubs);
	rmdir(path);
}

/* Executes a program with up to three arguments. */
__attribute__((unused, noreturn)) static void scene_start(const char *const *argv)
{
	const char *run[6] = { getenv("TEST_RUNNER") };
	size_t n = run[0] != NULL && run[0][0] != 0 ? 1 : 0;
	for (size_t i = 0; argv[i] != NULL; i++) {
		CHECK(n < sizeof run / sizeof run[0] - 1);
		run[n++] = argv[i];
	}
	run[n] = NULL;
	execv(run[0], (char *const *)(uintptr_t)run);
	unit_fail("exec %s: %s", run[0], strerror(errno));
}

__attribute__((unused)) static void scene_exec(const struct scene *s, const char *shim)
{
	char preload[4 * PATH_MAX] = "", library_path[2 * PATH_MAX] = "", self[PATH_MAX];
	const char *runtime = getenv("TEST_RUNTIME");
	size_t n = 0;
	ssize_t length;
	if (runtime != NULL && runtime[0] != 0)
		n += (size_t)snprintf(preload + n, sizeof preload - n, "%s:", runtime);
	if (s->before != NULL)
		n += (size_t)snprintf(preload + n, sizeof preload - n, "%s/%s:", place("TEST_TOYS"), s->before);
	if (!s->no_shim)
		n += (size_t)snprintf(preload + n, sizeof preload - n, "%s:", shim);
	if (s->after != NULL)
		snprintf(preload + n, sizeof preload - n, "%s/%s:", place("TEST_TOYS"), s->after);
	setenv("LD_PRELOAD", preload, 1);
	snprintf(library_path, sizeof library_path, "%s:%s", place("TEST_TOYS"),
		 s->no_driver ? "/nonexistent" : s->driver != NULL ? s->driver : place("TEST_DRIVER"));
	setenv("LD_LIBRARY_PATH", library_path, 1);
	if (s->part == NULL) {
		scene_start(s->program);
	} else {
		length = readlink("/proc/self/exe", self, sizeof self - 1);
		CHECK(length > 0);
		self[length] = 0;
		scene_start((const char *const[]){ self, "--part", s->part, NULL });
	}
}

/* Plays a scene. It must exit with 0, and say nothing if it is a part. */
__attribute__((unused)) static void play(struct scene *s)
{
	struct builder b;
	char shim[PATH_MAX], number[16];
	int out[2], status, why;
	size_t got = 0;
	ssize_t n;
	pid_t pid;

	scene_pages(&b, s);
	snprintf(shim, sizeof shim, "%s/lib64", b.dir);
	CHECK(mkdir(shim, 0755) == 0);
	snprintf(shim, sizeof shim, "%s/lib64/libgpufence.so", b.dir);
	CHECK(symlink(place("TEST_SHIM"), shim) == 0);
	if (s->stub)
		scene_stub(s, b.dir);
	CHECK(pipe(out) == 0);
	/* The reason of a failure, across exec. */
	why = memfd_create("why", 0);
	CHECK(why >= 0 && ftruncate(why, UNIT_WHY_BYTES) == 0);
	snprintf(number, sizeof number, "%d", why);
	char *reason = mmap(NULL, UNIT_WHY_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED, why, 0);
	CHECK(reason != MAP_FAILED);
	fflush(NULL);
	pid = fork();
	CHECK(pid >= 0);
	if (pid == 0) {
		alarm(UNIT_TIMEOUT_SECONDS); /* exec keeps it */
		dup2(out[1], 1);
		dup2(out[1], 2);
		close(out[0]);
		close(out[1]);
		setenv("TEST_WHY", number, 1);
		if (s->no_pages) {
			setenv("TEST_SHIM_PATH", place("TEST_SHIM"), 1);
			scene_exec(s, place("TEST_SHIM"));
		}
		setenv("TEST_SHIM_PATH", shim, 1);
		scene_exec(s, shim);
	}
	close(out[1]);
	while (got < sizeof s->output - 1 && (n = read(out[0], s->output + got, sizeof s->output - 1 - got)) > 0)
		got += (size_t)n;
	s->output[got] = 0;
	close(out[0]);
	CHECK(waitpid(pid, &status, 0) == pid);
	for (uint32_t i = 0; i < b.options.slots; i++) {
		for (unsigned int g = 0; g < 2; g++) {
			s->events_max += builder_slot(&b, i)->gpu[g].events_max;
			s->events_device += builder_slot(&b, i)->gpu[g].events_device;
			s->events_high += builder_slot(&b, i)->gpu[g].events_high;
			s->throttled_ms += builder_slot(&b, i)->throttled_ms[g];
		}
	}
	for (uint32_t i = 0; i < b.options.slots; i++)
		s->imports += builder_slot(&b, i)->imports;
	s->charged = builder_charged(&b, 0) + builder_charged(&b, 1);
	if (s->stub)
		remove_stub(s);
	unlink(shim);
	*strrchr(shim, '/') = 0;
	rmdir(shim);
	builder_remove(&b);
	if (reason[0] != 0)
		unit_fail("%s", reason);
	if (!WIFEXITED(status) || WEXITSTATUS(status) != 0)
		unit_fail("ended with status %#x and said: %.3800s", (unsigned int)status, s->output);
	munmap(reason, UNIT_WHY_BYTES);
	close(why);
	if (s->part != NULL && s->output[0] != 0)
		unit_fail("said: %.3800s", s->output);
}

/* The usual scene: LIMIT, nothing charged afterwards. */
__attribute__((unused)) static void play_part(const char *part)
{
	struct scene s = { .part = part, .max_bytes = LIMIT };
	play(&s);
	CHECK_U64(s.charged, 0);
}

__attribute__((unused)) static int interpose_main(const struct unit_test *tests, const struct part *parts, int argc, char **argv)
{
	if (argc != 3 || strcmp(argv[1], "--part") != 0)
		return unit_main(tests, argc, argv);
	unit_why = mmap(NULL, UNIT_WHY_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED, atoi(place("TEST_WHY")), 0);
	if (unit_why == MAP_FAILED)
		return 2;
	for (const struct part *p = parts; p->name != NULL; p++) {
		if (strcmp(p->name, argv[2]) == 0) {
			p->run();
			return 0;
		}
	}
	unit_fail("no part %s", argv[2]);
}

/* ---- in a part ---- */

/* Not a tail call, and not folded: the caller is this program. */
__attribute__((unused, noinline)) static void *look(void *handle, const char *name)
{
	void *found = dlsym(handle, name);
	__asm__ volatile("" : "+r"(found));
	return found;
}

__attribute__((unused)) static void *need(void *handle, const char *name)
{
	void *found = look(handle, name);
	if (found == NULL)
		unit_fail("%s is missing: %s", name, dlerror());
	return found;
}

__attribute__((unused)) static void *open_driver(int flags)
{
	void *handle = dlopen("libcuda.so.1", RTLD_NOW | flags);
	if (handle == NULL)
		unit_fail("%s", dlerror());
	return handle;
}

__attribute__((unused)) static bool is_hook(void *address)
{
	Dl_info info;
	return address != NULL && dladdr(address, &info) != 0 && strstr(info.dli_fname, "libgpufence") != NULL;
}

#define FN(handle, symbol) ((fn_##symbol *)need(handle, #symbol))
#define FAKE(handle, symbol, result, ...) ((result(*)(__VA_ARGS__))need(handle, #symbol))

/* What NVML says is used: what is charged. */
__attribute__((unused)) static uint64_t charged(unsigned int index)
{
	nvmlDevice_t device;
	nvmlMemory_t memory;
	void *nvml = dlopen("libnvidia-ml.so.1", RTLD_NOW);
	CHECK(nvml != NULL);
	nvmlReturn_t (*by_index)(unsigned int, nvmlDevice_t *) = need(nvml, "nvmlDeviceGetHandleByIndex_v2");
	CHECK_INT(by_index(index, &device), 0);
	CHECK_INT(FN(nvml, nvmlDeviceGetMemoryInfo)(device, &memory), 0);
	dlclose(nvml);
	return memory.used;
}

#endif
