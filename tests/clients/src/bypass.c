/* SPDX-License-Identifier: Apache-2.0 */
/*
 * bypass: a static program that speaks to the simulated device itself. No library of ours
 * can be loaded into it and it calls no driver API, so only what watches the device from
 * outside can hold it. It allocates until it is killed.
 *
 *   bypass STEP_MIB PAUSE_MS [MAX_MIB]
 *
 * One JSON line for each step. At MAX_MIB, or where the device is full, it holds what it has.
 */
#include "../../simgpu/simgpu_client.h"

#include "report.h"

#include <signal.h>
#include <time.h>

#define MIB (UINT64_C(1) << 20)

static int number(const char *text, uint64_t *out)
{
	char *end;

	errno = 0;
	*out = strtoull(text, &end, 10);
	return errno || end == text || *end || *text == '-' || *out >= UINT64_C(1) << 40 ? -1 : 0;
}

static int failed(const char *op, const char *why)
{
	struct report r;

	report_begin(&r, op, false);
	report_string(&r, "why", why);
	report_end(&r);
	return 1;
}

static void report_step(const char *op, uint64_t held, uint64_t steps)
{
	struct report r;

	report_begin(&r, op, true);
	report_u64(&r, "held_bytes", held);
	report_u64(&r, "blocks", steps);
	report_end(&r);
}

int main(int argc, char **argv)
{
	uint64_t step = 0, pause_ms = 0, max = 0, held = 0, steps = 0;
	struct simgpu_req req = { .op = SIMGPU_OP_CTX_CREATE };
	struct simgpu_rep rep;
	struct timespec pause;
	uint64_t context;
	int fd;

	if (argc < 3 || argc > 4 || number(argv[1], &step) || number(argv[2], &pause_ms) ||
	    (argc == 4 && number(argv[3], &max)) || !step) {
		fprintf(stderr, "usage: bypass STEP_MIB PAUSE_MS [MAX_MIB]\n");
		return 2;
	}
	signal(SIGPIPE, SIG_IGN);
	step *= MIB;
	max *= MIB;
	pause.tv_sec = (time_t)(pause_ms / 1000);
	pause.tv_nsec = (long)(pause_ms % 1000) * 1000000;

	fd = simgpu_open(SIMGPU_GPU_PREFIX "0");
	if (fd < 0)
		return failed("open", strerror(errno));
	if (simgpu_call(fd, &req, &rep, NULL, NULL) < 0)
		return failed("context", strerror(errno));
	if (rep.status != SIMGPU_OK)
		return failed("context", "refused by the device");
	context = rep.val[0];
	held = rep.val[1];
	report_step("context", held, 0);

	while (!max || held + step <= max) {
		memset(&req, 0, sizeof(req));
		req.op = SIMGPU_OP_ALLOC;
		req.arg[0] = context;
		req.arg[1] = step;
		req.arg[2] = SIMGPU_KIND_DEVICE;
		if (simgpu_call(fd, &req, &rep, NULL, NULL) < 0)
			return failed("alloc", strerror(errno));
		if (rep.status == SIMGPU_E_NO_MEMORY) {
			report_step("full", held, steps);
			break;
		}
		if (rep.status != SIMGPU_OK)
			return failed("alloc", "refused by the device");
		held += rep.val[1];
		report_step("alloc", held, ++steps);
		(void)nanosleep(&pause, NULL);
	}
	report_step("hold", held, steps);
	for (;;) {
		pause.tv_sec = 3600;
		(void)nanosleep(&pause, NULL);
	}
}
