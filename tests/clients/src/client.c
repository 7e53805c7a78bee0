/* SPDX-License-Identifier: Apache-2.0 */
/*
 * client: a small GPU program for tests, driven line by line, answering in JSON lines.
 *
 *   client [--resolve=proc|dlsym] [LINE...] [-]
 *
 * Each LINE is a command; "-", or no LINE at all, goes on with lines from stdin until its
 * end. Sizes are in MiB.
 *
 *   context [N]            initialise, make the primary context of GPU N (0) current
 *   release                give the context back (with all that it holds)
 *   alloc M                one allocation of M
 *   managed M              one managed allocation of M
 *   pitch M                one pitched allocation of about M
 *   fill STEP [MAX [MS]]   allocate in steps, MS apart, until refused or until MAX is held
 *   free M                 free the newest blocks until at least M is freed; 0: all
 *   meminfo | total        cuMemGetInfo, cuDeviceTotalMem
 *   nvml                   nvmlDeviceGetMemoryInfo v1 and v2, in the process's own view
 *   grow STEP TARGET [MS]  allocate until TARGET is held, again and again where refused
 *   churn STEP N [MS]      allocate N blocks and free them, all the time
 *   hold                   until SIGTERM
 *   status                 what is held; also while grow and churn run
 *   stop                   ends grow and churn, which then report
 *   exit [CODE]
 *
 * SIGTERM ends whatever runs: its report, then exit 0. Exit 2: wrong use; 3: nobody reads.
 */
#include "driver.h"
#include "report.h"

#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define MIB (UINT64_C(1) << 20)
#define BLOCKS_MAX 65536

struct block {
	cu_deviceptr pointer;
	uint64_t bytes;
};

struct client {
	struct driver driver;
	enum resolve how;
	bool opened;
	bool in_context;
	cu_device device;
	struct cu_uuid uuid;

	struct block *blocks;
	size_t block_count;
	uint64_t held_bytes;

	bool reads_stdin;
	bool stdin_ended;
	char line[1024]; /* what was read of stdin and not used yet */
	size_t line_used;
};

static volatile sig_atomic_t terminated;

static void on_signal(int signal)
{
	(void)signal;
	terminated = 1;
}

static void pause_ms(long ms)
{
	struct timespec t = { .tv_sec = ms / 1000, .tv_nsec = (ms % 1000) * 1000000 };

	/* Interrupted: a signal wants to be seen. */
	(void)nanosleep(&t, NULL);
}

/* ---- lines ------------------------------------------------------------------------ */

/* The next whole line of stdin into out. Waits at most wait_ms (-1: for ever); false when
 * there is none (yet), when stdin has ended or when a signal came. */
static bool next_line(struct client *c, char *out, size_t out_bytes, int wait_ms)
{
	for (;;) {
		char *end = memchr(c->line, '\n', c->line_used);

		if (end) {
			size_t n = (size_t)(end - c->line);

			if (n >= out_bytes)
				n = out_bytes - 1;
			memcpy(out, c->line, n);
			out[n] = '\0';
			c->line_used -= (size_t)(end - c->line) + 1;
			memmove(c->line, end + 1, c->line_used);
			return true;
		}
		if (c->stdin_ended || !c->reads_stdin || terminated)
			return false;
		if (c->line_used == sizeof(c->line)) {
			fprintf(stderr, "client: read stdin: a line is longer than %zu bytes\n",
				sizeof(c->line));
			exit(2);
		}

		struct pollfd p = { .fd = STDIN_FILENO, .events = POLLIN };

		if (poll(&p, 1, wait_ms) <= 0)
			return false;

		ssize_t n = read(STDIN_FILENO, c->line + c->line_used,
				 sizeof(c->line) - c->line_used);

		if (n < 0 && errno == EINTR)
			return false;
		if (n <= 0) {
			c->stdin_ended = true;
			return false;
		}
		c->line_used += (size_t)n;
	}
}

/* ---- answers ---------------------------------------------------------------------- */

static void add_held(const struct client *c, struct report *r)
{
	report_u64(r, "held_bytes", c->held_bytes);
	report_u64(r, "blocks", c->block_count);
}

static void add_result(const struct client *c, struct report *r, cu_result result)
{
	report_u64(r, "result", (uint64_t)(unsigned int)result);
	report_string(r, "result_name", driver_error(&c->driver, result));
}

static bool answer_failed(const struct client *c, const char *op, const char *call, cu_result result)
{
	struct report r;

	report_begin(&r, op, false);
	report_string(&r, "call", call);
	add_result(c, &r, result);
	add_held(c, &r);
	report_end(&r);
	return false;
}

static bool answer_why(const char *op, const char *why)
{
	struct report r;

	report_begin(&r, op, false);
	report_string(&r, "why", why);
	report_end(&r);
	return false;
}

/* ---- memory ----------------------------------------------------------------------- */

enum kind { KIND_DEVICE, KIND_MANAGED, KIND_PITCH };

static cu_result allocate(struct client *c, enum kind kind, uint64_t bytes)
{
	struct block *b = &c->blocks[c->block_count];
	cu_result r = CU_OUT_OF_MEMORY;
	size_t pitch = 0;

	if (c->block_count == BLOCKS_MAX)
		return CU_OUT_OF_MEMORY;
	b->pointer = 0;
	b->bytes = bytes;
	switch (kind) {
	case KIND_DEVICE:
		r = c->driver.mem_alloc(&b->pointer, bytes);
		break;
	case KIND_MANAGED:
		r = c->driver.mem_alloc_managed(&b->pointer, bytes, 1 /* attach global */);
		break;
	case KIND_PITCH:
		r = c->driver.mem_alloc_pitch(&b->pointer, &pitch, 65536, bytes / 65536, 4);
		if (r == CU_SUCCESS)
			b->bytes = pitch * (bytes / 65536);
		break;
	}
	if (r == CU_SUCCESS) {
		c->block_count++;
		c->held_bytes += b->bytes;
	}
	return r;
}

/* Frees the newest block. */
static cu_result release_newest(struct client *c)
{
	struct block *b = &c->blocks[c->block_count - 1];
	cu_result r = c->driver.mem_free(b->pointer);

	if (r == CU_SUCCESS) {
		c->block_count--;
		c->held_bytes -= b->bytes;
	}
	return r;
}

/* ---- commands --------------------------------------------------------------------- */

/* The arguments of a command, as numbers; missing ones are 0. */
struct args {
	unsigned long long n[3];
	int count;
};

static bool do_context(struct client *c, const struct args *a)
{
	struct driver *d = &c->driver;
	char why[512], name[128] = "", uuid[64];
	cu_context context = NULL;
	struct report r;
	size_t total = 0;
	int version = 0, count = 0;
	cu_result e;

	if (c->in_context)
		return answer_why("context", "there is one already");
	if (!c->opened) {
		if (!driver_open(d, c->how, why, sizeof(why)))
			return answer_why("context", why);
		c->opened = true;
	}
	/* The order of the CUDA runtime: the version before cuInit, the devices, then the
	 * primary context. */
	if ((e = d->driver_version(&version)) != CU_SUCCESS)
		return answer_failed(c, "context", "cuDriverGetVersion", e);
	if ((e = d->init(0)) != CU_SUCCESS)
		return answer_failed(c, "context", "cuInit", e);
	if ((e = d->device_count(&count)) != CU_SUCCESS)
		return answer_failed(c, "context", "cuDeviceGetCount", e);
	if ((e = d->device_get(&c->device, (int)a->n[0])) != CU_SUCCESS)
		return answer_failed(c, "context", "cuDeviceGet", e);
	if ((e = d->device_name(name, sizeof(name), c->device)) != CU_SUCCESS)
		return answer_failed(c, "context", "cuDeviceGetName", e);
	if ((e = d->device_total(&total, c->device)) != CU_SUCCESS)
		return answer_failed(c, "context", "cuDeviceTotalMem", e);
	if ((e = d->device_uuid(&c->uuid, c->device)) != CU_SUCCESS)
		return answer_failed(c, "context", "cuDeviceGetUuid", e);
	if ((e = d->primary_retain(&context, c->device)) != CU_SUCCESS)
		return answer_failed(c, "context", "cuDevicePrimaryCtxRetain", e);
	if ((e = d->ctx_set_current(context)) != CU_SUCCESS)
		return answer_failed(c, "context", "cuCtxSetCurrent", e);
	c->in_context = true;

	const unsigned char *b = c->uuid.bytes;

	snprintf(uuid, sizeof(uuid),
		 "GPU-%02x%02x%02x%02x-%02x%02x-%02x%02x-%02x%02x-%02x%02x%02x%02x%02x%02x", b[0],
		 b[1], b[2], b[3], b[4], b[5], b[6], b[7], b[8], b[9], b[10], b[11], b[12], b[13],
		 b[14], b[15]);
	report_begin(&r, "context", true);
	report_string(&r, "entry", d->entry);
	report_u64(&r, "driver_version", (uint64_t)version);
	report_u64(&r, "devices", (uint64_t)count);
	report_string(&r, "name", name);
	report_string(&r, "uuid", uuid);
	report_u64(&r, "total_bytes", total);
	report_u64(&r, "pid", (uint64_t)getpid());
	report_end(&r);
	return true;
}

static bool do_release(struct client *c, const struct args *a)
{
	struct report r;
	cu_result e = c->driver.primary_release(c->device);

	(void)a;
	if (e != CU_SUCCESS)
		return answer_failed(c, "release", "cuDevicePrimaryCtxRelease", e);
	c->in_context = false;
	c->block_count = 0;
	c->held_bytes = 0;
	report_begin(&r, "release", true);
	report_end(&r);
	return true;
}

static bool allocate_one(struct client *c, const char *op, const char *call, enum kind kind,
			 const struct args *a)
{
	struct report r;
	cu_result e = allocate(c, kind, a->n[0] * MIB);

	if (e != CU_SUCCESS)
		return answer_failed(c, op, call, e);
	report_begin(&r, op, true);
	add_held(c, &r);
	report_end(&r);
	return true;
}

static bool do_alloc(struct client *c, const struct args *a)
{
	return allocate_one(c, "alloc", "cuMemAlloc", KIND_DEVICE, a);
}

static bool do_managed(struct client *c, const struct args *a)
{
	return allocate_one(c, "managed", "cuMemAllocManaged", KIND_MANAGED, a);
}

static bool do_pitch(struct client *c, const struct args *a)
{
	return allocate_one(c, "pitch", "cuMemAllocPitch", KIND_PITCH, a);
}

static bool do_fill(struct client *c, const struct args *a)
{
	uint64_t step = a->n[0] * MIB, max = a->n[1] * MIB, before = c->held_bytes;
	cu_result e = CU_SUCCESS;
	struct report r;

	while (!terminated && (!max || c->held_bytes + step <= max)) {
		e = allocate(c, KIND_DEVICE, step);
		if (e != CU_SUCCESS)
			break;
		if (a->n[2])
			pause_ms((long)a->n[2]);
	}
	report_begin(&r, "fill", true);
	report_u64(&r, "granted_bytes", c->held_bytes - before);
	add_result(c, &r, e);
	add_held(c, &r);
	report_end(&r);
	return true;
}

static bool do_free(struct client *c, const struct args *a)
{
	uint64_t want = a->n[0] * MIB, before = c->held_bytes;
	struct report r;

	while (c->block_count && (!want || before - c->held_bytes < want)) {
		cu_result e = release_newest(c);

		if (e != CU_SUCCESS)
			return answer_failed(c, "free", "cuMemFree", e);
	}
	report_begin(&r, "free", true);
	report_u64(&r, "freed_bytes", before - c->held_bytes);
	add_held(c, &r);
	report_end(&r);
	return true;
}

static bool do_meminfo(struct client *c, const struct args *a)
{
	size_t free_bytes = 0, total_bytes = 0;
	struct report r;
	cu_result e = c->driver.mem_info(&free_bytes, &total_bytes);

	(void)a;
	if (e != CU_SUCCESS)
		return answer_failed(c, "meminfo", "cuMemGetInfo", e);
	report_begin(&r, "meminfo", true);
	report_u64(&r, "free_bytes", free_bytes);
	report_u64(&r, "total_bytes", total_bytes);
	add_held(c, &r);
	report_end(&r);
	return true;
}

static bool do_total(struct client *c, const struct args *a)
{
	size_t total = 0;
	struct report r;
	cu_result e = c->driver.device_total(&total, c->device);

	(void)a;
	if (e != CU_SUCCESS)
		return answer_failed(c, "total", "cuDeviceTotalMem", e);
	report_begin(&r, "total", true);
	report_u64(&r, "total_bytes", total);
	report_end(&r);
	return true;
}

static bool nvml_failed(const char *call, int result)
{
	struct report r;

	report_begin(&r, "nvml", false);
	report_string(&r, "call", call);
	report_u64(&r, "result", (uint64_t)(unsigned int)result);
	report_end(&r);
	return false;
}

static bool do_nvml(struct client *c, const struct args *a)
{
	struct nvml_memory_v2 v2 = { .version = (unsigned int)sizeof(v2) | 2u << 24 };
	struct nvml_memory v1;
	struct report r;
	struct nvml n;
	char why[512];
	void *device = NULL;
	int e;

	(void)c;
	(void)a;
	if (!nvml_open(&n, why, sizeof(why)))
		return answer_why("nvml", why);
	if ((e = n.init()) != 0)
		return nvml_failed("nvmlInit_v2", e);
	if ((e = n.handle_by_index(0, &device)) != 0)
		return nvml_failed("nvmlDeviceGetHandleByIndex_v2", e);
	if ((e = n.memory(device, &v1)) != 0)
		return nvml_failed("nvmlDeviceGetMemoryInfo", e);
	if ((e = n.memory_v2(device, &v2)) != 0)
		return nvml_failed("nvmlDeviceGetMemoryInfo_v2", e);
	report_begin(&r, "nvml", true);
	report_u64(&r, "total_bytes", v1.total);
	report_u64(&r, "free_bytes", v1.free);
	report_u64(&r, "used_bytes", v1.used);
	report_u64(&r, "v2_total_bytes", v2.total);
	report_u64(&r, "v2_free_bytes", v2.free);
	report_u64(&r, "v2_used_bytes", v2.used);
	report_u64(&r, "v2_reserved_bytes", v2.reserved);
	report_end(&r);
	return true;
}

static bool do_status(struct client *c, const struct args *a)
{
	struct report r;

	(void)a;
	report_begin(&r, "status", true);
	add_held(c, &r);
	report_u64(&r, "pid", (uint64_t)getpid());
	report_end(&r);
	return true;
}

/* What a long-running command looks at between two rounds: true, it goes on. Lines that it
 * does not know while it runs are refused, so that no order is lost silently. */
static bool goes_on(struct client *c, struct report *status, void (*fill)(struct report *, void *),
		    void *state)
{
	char line[1024];

	if (terminated)
		return false;
	while (next_line(c, line, sizeof(line), 0)) {
		if (strcmp(line, "stop") == 0)
			return false;
		if (strcmp(line, "status") != 0) {
			answer_why(line, "something else runs: stop it first");
			continue;
		}
		report_begin(status, "status", true);
		add_held(c, status);
		fill(status, state);
		report_end(status);
	}
	/* Whoever drove us is gone: a test client must not outlive its test. */
	return !(c->reads_stdin && c->stdin_ended);
}

struct growth {
	uint64_t refused;
	uint64_t first_refused_ns;
};

static void add_growth(struct report *r, void *state)
{
	const struct growth *g = state;

	report_u64(r, "refused", g->refused);
}

static bool do_grow(struct client *c, const struct args *a)
{
	uint64_t step = a->n[0] * MIB, target = a->n[1] * MIB, started = c->held_bytes;
	long wait = a->count > 2 ? (long)a->n[2] : 10;
	struct growth g = { 0 };
	cu_result last = CU_SUCCESS;
	struct report r;

	while (c->held_bytes + step <= target && goes_on(c, &r, add_growth, &g)) {
		cu_result e = allocate(c, KIND_DEVICE, step);

		if (e == CU_SUCCESS)
			continue;
		last = e;
		if (e != CU_OUT_OF_MEMORY)
			return answer_failed(c, "grow", "cuMemAlloc", e);
		g.refused++;
		pause_ms(wait);
	}
	report_begin(&r, "grow", true);
	report_u64(&r, "granted_bytes", c->held_bytes - started);
	report_u64(&r, "reached", c->held_bytes + step > target);
	add_growth(&r, &g);
	add_result(c, &r, last);
	add_held(c, &r);
	report_end(&r);
	return true;
}

struct churning {
	uint64_t allocs, frees, failures, first_failure_ns, peak_bytes;
	cu_result first_failure;
};

static void add_churning(struct report *r, void *state)
{
	const struct churning *k = state;

	report_u64(r, "allocs", k->allocs);
	report_u64(r, "frees", k->frees);
	report_u64(r, "failures", k->failures);
	report_u64(r, "first_failure", (uint64_t)(unsigned int)k->first_failure);
	report_u64(r, "first_failure_ns", k->first_failure_ns);
	report_u64(r, "peak_bytes", k->peak_bytes);
}

static void churn_failed(struct churning *k, cu_result e)
{
	if (!k->failures) {
		k->first_failure = e;
		k->first_failure_ns = report_now_ns();
	}
	k->failures++;
}

static bool do_churn(struct client *c, const struct args *a)
{
	uint64_t step = a->n[0] * MIB;
	size_t most = (size_t)a->n[1], base = c->block_count;
	long wait = a->count > 2 ? (long)a->n[2] : 1;
	struct churning k = { 0 };
	struct report r;
	bool up = true;

	while (goes_on(c, &r, add_churning, &k)) {
		cu_result e;

		if (up) {
			e = allocate(c, KIND_DEVICE, step);
			k.allocs++;
			if (c->held_bytes > k.peak_bytes)
				k.peak_bytes = c->held_bytes;
		} else {
			e = release_newest(c);
			k.frees++;
		}
		if (e != CU_SUCCESS)
			churn_failed(&k, e);
		/* Turn round at both ends, and where it went no further. */
		if (up && (e != CU_SUCCESS || c->block_count - base >= most))
			up = false;
		else if (!up && (e != CU_SUCCESS || c->block_count == base))
			up = true;
		if (c->block_count == base && !up)
			up = true;
		pause_ms(wait);
	}
	report_begin(&r, "churn", true);
	add_held(c, &r);
	add_churning(&r, &k);
	report_end(&r);
	return true;
}

static bool do_hold(struct client *c, const struct args *a)
{
	struct report r;

	(void)a;
	report_begin(&r, "hold", true);
	add_held(c, &r);
	report_end(&r);
	while (!terminated)
		pause_ms(1000);
	return true;
}

static const struct command {
	const char *name;
	bool (*run)(struct client *c, const struct args *a);
	int least, most;    /* arguments */
	bool needs_context;
} commands[] = {
	{ "context", do_context, 0, 1, false },
	{ "release", do_release, 0, 0, true },
	{ "alloc", do_alloc, 1, 1, true },
	{ "managed", do_managed, 1, 1, true },
	{ "pitch", do_pitch, 1, 1, true },
	{ "fill", do_fill, 1, 3, true },
	{ "free", do_free, 1, 1, true },
	{ "meminfo", do_meminfo, 0, 0, true },
	{ "total", do_total, 0, 0, true },
	{ "nvml", do_nvml, 0, 0, false },
	{ "grow", do_grow, 2, 3, true },
	{ "churn", do_churn, 2, 3, true },
	{ "hold", do_hold, 0, 0, false },
	{ "status", do_status, 0, 0, false },
};

/* Parses and runs one line. False: it failed, which has been said. */
static bool run_line(struct client *c, const char *line)
{
	char copy[1024], *save = NULL, *word, *end;
	struct args a = { .count = 0 };

	snprintf(copy, sizeof(copy), "%s", line);
	word = strtok_r(copy, " \t", &save);
	if (!word)
		return true;

	const char *name = word;

	while ((word = strtok_r(NULL, " \t", &save)) != NULL) {
		if (a.count == 3)
			return answer_why(name, "too many arguments");
		errno = 0;
		a.n[a.count] = strtoull(word, &end, 10);
		if (errno || *end || *word == '-' || a.n[a.count] >= UINT64_C(1) << 40)
			return answer_why(name, "an argument is not a number");
		a.count++;
	}
	if (strcmp(name, "exit") == 0)
		exit((int)a.n[0]);
	if (strcmp(name, "stop") == 0)
		return answer_why(name, "nothing runs");
	for (size_t i = 0; i < sizeof(commands) / sizeof(commands[0]); i++) {
		const struct command *k = &commands[i];

		if (strcmp(k->name, name) != 0)
			continue;
		if (a.count < k->least || a.count > k->most)
			return answer_why(name, "wrong number of arguments");
		if (k->needs_context && !c->in_context)
			return answer_why(name, "no context: say context first");
		return k->run(c, &a);
	}
	return answer_why(name, "no such command");
}

int main(int argc, char **argv)
{
	struct sigaction action = { .sa_handler = on_signal };
	struct client c = { .how = RESOLVE_PROC };
	char line[1024];
	bool ok = true;
	int i = 1;

	sigaction(SIGTERM, &action, NULL);
	sigaction(SIGINT, &action, NULL);
	action.sa_handler = SIG_IGN;
	sigaction(SIGPIPE, &action, NULL);

	for (; i < argc && strncmp(argv[i], "--", 2) == 0; i++) {
		if (strcmp(argv[i], "--resolve=proc") == 0) {
			c.how = RESOLVE_PROC;
		} else if (strcmp(argv[i], "--resolve=dlsym") == 0) {
			c.how = RESOLVE_DLSYM;
		} else {
			fprintf(stderr, "client: no such option: %s\n", argv[i]);
			return 2;
		}
	}
	c.blocks = calloc(BLOCKS_MAX + 1, sizeof(*c.blocks));
	if (!c.blocks) {
		fprintf(stderr, "client: no memory\n");
		return 1;
	}
	c.reads_stdin = i == argc;
	for (; i < argc && !terminated; i++) {
		if (strcmp(argv[i], "-") == 0)
			c.reads_stdin = true;
		else
			ok = run_line(&c, argv[i]) && ok;
	}
	while (c.reads_stdin && !terminated) {
		if (next_line(&c, line, sizeof(line), -1))
			ok = run_line(&c, line) && ok;
		else if (c.stdin_ended)
			break;
	}
	free(c.blocks);
	/* Lines of stdin answer for themselves; lines of argv have nobody else to tell. */
	return ok || c.reads_stdin ? 0 : 1;
}
