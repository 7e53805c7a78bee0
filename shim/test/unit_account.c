/* SPDX-License-Identifier: Apache-2.0 */
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <spawn.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>

#include "../src/account.h"
#include "../src/limits.h"
#include "../src/pages.h"
#include "pages_builder.h"
#include "unit.h"

#define MIB (UINT64_C(1) << 20)
#define NONE GPUFENCE_UNLIMITED

static struct builder b;
static uint8_t uuid[16];

static const char *path_of(const char *name)
{
	static char path[320];
	snprintf(path, sizeof path, "%s/%s", b.dir, name);
	return path;
}

static void start(uint32_t slots, uint64_t max, uint64_t pod_max)
{
	builder_uuid(0, uuid);
	builder_init(&b, &(struct builder_options){ .slots = slots });
	builder_limit(&b, max, pod_max);
	account_set_dir(b.dir);
	CHECK_INT(account_gpu(uuid), 0);
}

static int reserve(uint64_t bytes) { return account_reserve(0, ACCOUNT_DEVICE, bytes); }
static void release(uint64_t bytes) { account_release(0, ACCOUNT_DEVICE, bytes); }

static void minus_one_is_nothing(void)
{
	struct account_view v;
	start(4, 10 * MIB, NONE);
	CHECK_INT(account_reserve(-1, ACCOUNT_DEVICE, UINT64_MAX), 0);
	account_release(-1, ACCOUNT_DEVICE, 1);
	account_event(-1, ACCOUNT_EVENT_MAX);
	CHECK(!account_view(-1, &v));
	CHECK_INT(account_reserve(16, ACCOUNT_DEVICE, 1), 0);
	CHECK(!account_view(16, &v));
	CHECK(!account_view(1, &v));
	CHECK_U64(builder_live(&b), 0);
	builder_remove(&b);
}

static void without_pages_nothing_holds(void)
{
	struct account_view v;
	builder_uuid(0, uuid);
	account_set_dir("/nonexistent");
	CHECK_INT(account_gpu(uuid), -1);
	CHECK_INT(reserve(UINT64_MAX), 0);
	release(1);
	account_count_alloc();
	CHECK(!account_view(0, &v));
	CHECK_INT(account_gpu(uuid), -1);
}

static void foreign_pages_are_none(void)
{
	builder_uuid(0, uuid);
	builder_init(&b, NULL);
	builder_limit(&b, MIB, NONE);
	builder_limits(&b)->abi_major++;
	account_set_dir(b.dir);
	CHECK_INT(account_gpu(uuid), -1);
	CHECK_INT(reserve(2 * MIB), 0);
	builder_remove(&b);
}

static void not_before_the_first_call(void)
{
	builder_uuid(0, uuid);
	builder_init(&b, NULL);
	builder_limit(&b, MIB, NONE);
	account_set_dir(b.dir);
	account_count_alloc();
	account_count_free();
	CHECK_INT(account_gpu(uuid), 0);
	CHECK_U64(builder_live(&b), 0); /* a slot only with the first charge */
	CHECK_INT(reserve(1), 0);
	CHECK_U64(builder_live(&b), 1);
	builder_remove(&b);
}

/* What does not fit beside its own charge is refused at once: no retry can help it. */
static void hopeless_is_refused_at_once(void)
{
	start(4, 10 * MIB, NONE);
	CHECK_INT(reserve(6 * MIB), 0);
	CHECK_INT(pages_file_lock(b.ledger_fd, PAGES_LOCK_EXCLUSIVE, GPUFENCE_LEDGER_LOCK_OFFSET, 1), 0);
	uint64_t begin = pages_now_ns();
	for (int i = 0; i < 100; i++)
		CHECK_INT(reserve(5 * MIB), -ENOMEM);
	/* Not one of them waited for the slow path's lock. */
	CHECK(pages_now_ns() - begin < 100 * UINT64_C(50000000) / 2);
	CHECK_U64(builder_ledger(&b)->reclaim_request, 100);
	builder_remove(&b);
}

static void holds_the_limit(void)
{
	start(4, 10 * MIB, NONE);
	CHECK_INT(reserve(10 * MIB + 1), -ENOMEM);
	CHECK_INT(reserve(10 * MIB), 0);
	CHECK_INT(reserve(1), -ENOMEM);
	CHECK_U64(builder_charged(&b, 0), 10 * MIB);
	CHECK(builder_ledger(&b)->reclaim_request >= 2);
	release(4 * MIB);
	CHECK_U64(builder_charged(&b, 0), 6 * MIB);
	CHECK_INT(reserve(4 * MIB), 0);
	release(10 * MIB);
	CHECK_U64(builder_charged(&b, 0), 0);
	/* Rounded up to 4 KiB both ways. */
	CHECK_INT(reserve(1), 0);
	CHECK_U64(builder_charged(&b, 0), 4096);
	CHECK_INT(reserve(4097), 0);
	CHECK_U64(builder_charged(&b, 0), 3 * 4096);
	release(1);
	release(4097);
	CHECK_U64(builder_charged(&b, 0), 0);
	CHECK_INT(reserve(0), 0);
	CHECK_INT(reserve(UINT64_MAX), -ENOMEM);
	CHECK_INT(reserve(UINT64_C(1) << 52), -ENOMEM);
	CHECK_U64(builder_charged(&b, 0), 0);
	builder_remove(&b);
}

static void a_limit_between_units(void)
{
	start(4, 4096 * 3 + 4095, NONE);
	CHECK_INT(reserve(3 * 4096), 0);
	CHECK_INT(reserve(1), -ENOMEM);
	builder_limit(&b, 0, NONE);
	CHECK_INT(reserve(1), -ENOMEM);
	builder_remove(&b);
}

static void managed_counts_like_device(void)
{
	start(4, 10 * MIB, NONE);
	CHECK_INT(account_reserve(0, ACCOUNT_MANAGED, 6 * MIB), 0);
	CHECK_INT(reserve(5 * MIB), -ENOMEM);
	CHECK_INT(reserve(4 * MIB), 0);
	CHECK_U64(builder_slot(&b, 0)->gpu[0].managed & GPUFENCE_UNITS_MASK, 6 * 256);
	CHECK_U64(builder_slot(&b, 0)->gpu[0].device & GPUFENCE_UNITS_MASK, 4 * 256);
	account_release(0, ACCOUNT_MANAGED, 6 * MIB);
	CHECK_INT(reserve(6 * MIB), 0);
	builder_remove(&b);
}

static void excess_takes_room(void)
{
	struct gpufence_limits_gpu g = builder_gpu(0);
	start(4, NONE, NONE);
	g.max_bytes = 10 * MIB;
	g.excess_bytes = 4 * MIB;
	g.pod_max_bytes = 20 * MIB;
	g.pod_excess_bytes = 12 * MIB;
	builder_publish(&b, &g, 1);
	CHECK_INT(reserve(6 * MIB + 1), -ENOMEM);
	CHECK_INT(reserve(6 * MIB), 0);
	g.max_bytes = NONE;
	builder_publish(&b, &g, 1);
	CHECK_INT(reserve(2 * MIB + 1), -ENOMEM);
	CHECK_INT(reserve(2 * MIB), 0);
	g.pod_excess_bytes = UINT64_MAX;
	builder_publish(&b, &g, 1);
	CHECK_INT(reserve(1), -ENOMEM);
	g.pod_max_bytes = NONE;
	builder_publish(&b, &g, 1);
	CHECK_INT(reserve(UINT64_C(1) << 40), 0);
	builder_remove(&b);
}

static void limits_change_while_running(void)
{
	struct account_view v;
	start(4, 4 * MIB, NONE);
	CHECK_INT(reserve(4 * MIB), 0);
	CHECK_INT(reserve(MIB), -ENOMEM);
	builder_limit(&b, 6 * MIB, NONE);
	CHECK_INT(reserve(2 * MIB), 0);
	builder_limit(&b, MIB, NONE);
	CHECK_INT(reserve(1), -ENOMEM);
	CHECK(account_view(0, &v));
	CHECK_U64(v.max_bytes, MIB);
	CHECK_U64(v.charged_bytes, 6 * MIB);
	CHECK_U64(v.headroom_bytes, 0);
	release(6 * MIB);
	CHECK_INT(reserve(MIB), 0);
	builder_remove(&b);
}

static void unfenced_is_charged_only(void)
{
	struct account_view v;
	struct gpufence_limits_gpu g = builder_gpu(0);
	start(4, NONE, NONE);
	g.flags = GPUFENCE_GPU_PRESENT;
	g.max_bytes = 1;
	builder_publish(&b, &g, 1);
	CHECK_INT(account_gpu(uuid), 0);
	CHECK_INT(reserve(5 * MIB), 0);
	CHECK_U64(builder_charged(&b, 0), 5 * MIB);
	CHECK(account_view(0, &v));
	CHECK_U64(v.max_bytes, NONE);
	CHECK_U64(v.headroom_bytes, NONE);
	CHECK_U64(v.charged_bytes, 5 * MIB);
	builder_remove(&b);
}

static void view_shows_the_lower(void)
{
	struct account_view v;
	struct builder other;
	struct gpufence_limits_gpu g = builder_gpu(0);
	pid_t pid;
	int ready[2], go[2];
	char c;
	CHECK(pipe(ready) == 0 && pipe(go) == 0);
	start(4, 10 * MIB, 12 * MIB);
	builder_join(&other, &b, 5);
	builder_limit(&other, NONE, 12 * MIB);
	CHILD(pid, {
		account_set_dir(other.dir);
		CHECK_INT(account_gpu(uuid), 0);
		CHECK_INT(reserve(7 * MIB), 0);
		CHECK(write(ready[1], "x", 1) == 1);
		CHECK(read(go[0], &c, 1) == 1);
	});
	CHECK(read(ready[0], &c, 1) == 1);
	/* Before this process has charged anything itself. */
	CHECK(account_view(0, &v));
	CHECK_U64(v.max_bytes, 10 * MIB);
	CHECK_U64(v.charged_bytes, 0);
	CHECK_U64(v.headroom_bytes, 5 * MIB);
	CHECK_U64(v.context_bytes, 300 * MIB);
	CHECK_U64(builder_live(&b), 1);
	CHECK_INT(reserve(5 * MIB + 1), -ENOMEM); /* the pod's */
	CHECK_INT(reserve(3 * MIB), 0);
	CHECK(account_view(0, &v));
	CHECK_U64(v.charged_bytes, 3 * MIB);
	CHECK_U64(v.headroom_bytes, 2 * MIB);
	g.max_bytes = 10 * MIB;
	g.excess_bytes = MIB / 2;
	builder_publish(&b, &g, 1);
	CHECK(account_view(0, &v));
	CHECK_U64(v.charged_bytes, 3 * MIB + MIB / 2);
	CHECK_U64(v.headroom_bytes, 6 * MIB + MIB / 2);
	CHECK(write(go[1], "x", 1) == 1);
	unit_reap(pid, 0);
	builder_remove(&other);
	builder_remove(&b);
}

static void events_and_statistics(void)
{
	start(4, 10 * MIB, NONE);
	account_event(0, ACCOUNT_EVENT_MAX); /* no slot yet: nowhere to count */
	CHECK_INT(reserve(MIB), 0);
	account_event(0, ACCOUNT_EVENT_MAX);
	account_event(0, ACCOUNT_EVENT_DEVICE);
	account_event(0, ACCOUNT_EVENT_DEVICE);
	account_event(0, ACCOUNT_EVENT_HIGH);
	account_count_alloc();
	account_count_alloc();
	account_count_free();
	struct gpufence_slot *s = builder_slot(&b, 0);
	CHECK_U64(s->gpu[0].events_max, 1);
	CHECK_U64(s->gpu[0].events_device, 2);
	CHECK_U64(s->gpu[0].events_high, 1);
	CHECK_U64(s->allocs, 2);
	CHECK_U64(s->frees, 1);
	CHECK_U64((uint32_t)s->owner, (uint64_t)getpid());
	CHECK_U64(s->pidns_inode, pages_pidns_inode());
	CHECK_U64(s->start_ticks, pages_start_ticks());
	builder_remove(&b);
}

static void peaks_follow_the_samples(void)
{
	start(4, NONE, NONE);
	struct gpufence_slot_gpu *g = &builder_slot(&b, 0)->gpu[0];
	builder_limits(&b)->sample = 4;
	CHECK_INT(reserve(8 * MIB), 0);
	release(8 * MIB);
	CHECK_U64(g->peak[0], UINT64_C(4) << 40 | 8 * 256);
	CHECK_INT(reserve(2 * MIB), 0);
	builder_limits(&b)->sample = 5;
	release(MIB);
	CHECK_U64(g->peak[1], UINT64_C(5) << 40 | 2 * 256);
	CHECK_U64(g->peak[0], UINT64_C(4) << 40 | 8 * 256);
	/* A refusal leaves no trace: the driver was never asked. */
	builder_limit(&b, MIB, NONE);
	builder_limits(&b)->sample = 6;
	CHECK_INT(reserve(100 * MIB), -ENOMEM);
	CHECK_U64(g->peak[0], UINT64_C(4) << 40 | 8 * 256);
	builder_remove(&b);
}

/* gpufenced, or a peer, gave the slot away while its owner lives. */
static void slot_loss(void)
{
	start(4, 10 * MIB, NONE);
	CHECK_INT(reserve(4 * MIB), 0);
	CHECK_INT(account_reserve(0, ACCOUNT_MANAGED, MIB), 0);
	CHECK(builder_reclaim(&b, 0, true));
	CHECK_U64(builder_charged(&b, 0), 0);
	CHECK_INT(reserve(6 * MIB), -ENOMEM); /* what it has counts again at once */
	CHECK_U64(builder_charged(&b, 0), 5 * MIB);
	CHECK_INT(reserve(5 * MIB), 0);
	CHECK_U64(builder_live(&b), 1);
	/* A release into a lost slot is not lost with it, and finds a new one for the rest. */
	CHECK(builder_reclaim_pid(&b, (uint32_t)getpid()) == 1);
	release(3 * MIB);
	CHECK_U64(builder_charged(&b, 0), 7 * MIB);
	CHECK_INT(reserve(MIB), 0);
	CHECK_U64(builder_charged(&b, 0), 8 * MIB);
	release(7 * MIB);
	account_release(0, ACCOUNT_MANAGED, MIB);
	CHECK_U64(builder_charged(&b, 0), 0);
	builder_remove(&b);
}

/* What the slot of this process says; UINT64_MAX: it has none. */
static uint64_t imports_said(void)
{
	for (unsigned i = 0; i < 4; i++) {
		uint64_t owner = builder_slot(&b, i)->owner;
		if ((owner >> 32 & 0xff) == GPUFENCE_SLOT_LIVE && (uint32_t)owner == (uint32_t)getpid())
			return builder_slot(&b, i)->imports;
	}
	return UINT64_MAX;
}

/* That there are imports is said in whatever slot is the process's own, also what was before it had one. */
static void imports(void)
{
	start(4, 10 * MIB, NONE);
	account_imported();
	CHECK_U64(builder_slot(&b, 0)->imports, 0);
	builder_slot(&b, 0)->imports = 77; /* a former owner's */
	CHECK_INT(reserve(MIB), 0);
	CHECK_U64(imports_said(), 1);
	account_imported();
	CHECK_U64(imports_said(), 2);
	CHECK(builder_reclaim(&b, 0, true));
	CHECK_U64(imports_said(), UINT64_MAX);
	CHECK_INT(reserve(MIB), 0);
	CHECK_U64(imports_said(), 2);
	account_imported();
	CHECK_U64(imports_said(), 3);
	fflush(NULL);
	pid_t pid = fork();
	CHECK(pid >= 0);
	if (pid == 0) { /* a child has none */
		int r = account_reserve(0, ACCOUNT_DEVICE, MIB);
		_exit(r == 0 && imports_said() == 0 ? 0 : 1);
	}
	int status;
	CHECK(waitpid(pid, &status, 0) == pid);
	CHECK_INT(status, 0);
	builder_remove(&b);
}

static void dying_by_mistake(void)
{
	start(4, 10 * MIB, NONE);
	CHECK_INT(reserve(4 * MIB), 0);
	uint64_t *owner = &builder_slot(&b, 0)->owner;
	*owner = (*owner & ~(UINT64_C(0xff) << 32)) | (uint64_t)GPUFENCE_SLOT_DYING << 32;
	CHECK_INT(reserve(MIB), 0);
	CHECK_U64(builder_charged(&b, 0), 5 * MIB);
	CHECK_U64(builder_slot(&b, 1)->owner >> 32 & 0xff, GPUFENCE_SLOT_LIVE);
	CHECK(builder_lock_free(&b, 0)); /* gpufenced can have it */
	CHECK(!builder_lock_free(&b, 1));
	builder_remove(&b);
}

static void losing_the_slot_forever(void)
{
	/* A process of the pod that scribbles: every owner word is garbage at once again. */
	start(2, 10 * MIB, NONE);
	for (int i = 0; i < 200; i++) {
		for (unsigned s = 0; s <= 2; s++)
			memset(builder_slot(&b, s), 0xff, sizeof(struct gpufence_slot));
		int r = reserve(MIB);
		CHECK(r == 0 || r == -ENOMEM);
		if (r == 0)
			release(MIB);
	}
	builder_remove(&b);
}

static void closed_descriptors(void)
{
	start(4, 10 * MIB, NONE);
	CHECK_INT(reserve(MIB), 0);
	CHECK_INT(reserve(100 * MIB), -ENOMEM);
	int probe = b.ledger_fd;
	/* None stays open in the program. */
	for (int fd = 3; fd < 4096; fd++) {
		struct stat s;
		CHECK(fd == probe || fstat(fd, &s) != 0 || !S_ISREG(s.st_mode) || fd == fileno(stdout) ||
		      s.st_size != (off_t)b.ledger_bytes);
	}
	for (int fd = 3; fd < 4096; fd++)
		if (fd != probe)
			close(fd);
	CHECK(!builder_lock_free(&b, 0));
	CHECK_INT(reserve(MIB), 0);
	CHECK_U64(builder_charged(&b, 0), 2 * MIB);
	builder_remove(&b);
}

static void fork_child_is_nobody(void)
{
	pid_t pid;
	start(4, 10 * MIB, NONE);
	CHECK_INT(reserve(6 * MIB), 0);
	CHILD(pid, {
		struct account_view v;
		release(6 * MIB); /* not its own */
		CHECK_U64(builder_charged(&b, 0), 6 * MIB);
		CHECK_INT(reserve(5 * MIB), -ENOMEM);
		CHECK_INT(reserve(3 * MIB), 0);
		CHECK_U64(builder_live(&b), 2);
		CHECK_U64((uint32_t)builder_slot(&b, 1)->owner, (uint64_t)getpid());
		CHECK(account_view(0, &v));
		CHECK_U64(v.charged_bytes, 9 * MIB);
		CHECK(!builder_lock_free(&b, 1));
	});
	unit_reap(pid, 0);
	CHECK(!builder_lock_free(&b, 0));
	CHECK(builder_lock_free(&b, 1));
	CHECK_U64(builder_charged(&b, 0), 9 * MIB);
	CHECK(builder_reclaim(&b, 1, true));
	CHECK_INT(reserve(4 * MIB), 0);
	builder_remove(&b);
}

static void fork_child_without_wipe(void)
{
	pages_no_wipe = true;
	fork_child_is_nobody();
}

/* The child of a process that was killed does not keep its lock. */
static void orphan_keeps_no_lock(void)
{
	pid_t parent;
	int ready[2], go[2];
	char c;
	CHECK(pipe(ready) == 0 && pipe(go) == 0);
	start(4, 10 * MIB, NONE);
	CHILD(parent, {
		CHECK_INT(reserve(MIB), 0);
		pid_t child = fork();
		if (child == 0) {
			close(go[1]);
			CHECK(write(ready[1], "x", 1) == 1);
			_exit(read(go[0], &c, 1) == 0 ? 0 : 1);
		}
		pause();
	});
	CHECK(read(ready[0], &c, 1) == 1);
	CHECK(!builder_lock_free(&b, 0));
	CHECK(kill(parent, SIGKILL) == 0);
	unit_reap(parent, SIGKILL);
	CHECK(builder_lock_free(&b, 0));
	CHECK(builder_reclaim(&b, 0, false));
	close(go[1]);
	builder_remove(&b);
}

static void vfork_and_spawn(void)
{
	pid_t pid;
	char name[] = "true", *argv[] = { name, NULL }, *none[] = { NULL };
	start(4, 10 * MIB, NONE);
	CHECK_INT(reserve(MIB), 0);
	for (int i = 0; i < 20; i++) {
		CHECK(posix_spawn(&pid, "/bin/true", NULL, NULL, argv, none) == 0);
		unit_reap(pid, 0);
		pid = vfork();
		if (pid == 0) {
			execl("/bin/true", "true", (char *)NULL);
			_exit(1);
		}
		unit_reap(pid, 0);
		CHECK(!builder_lock_free(&b, 0));
		CHECK_INT(reserve(4096), 0);
	}
	CHECK_U64(builder_live(&b), 1);
	CHECK_U64(builder_charged(&b, 0), MIB + 20 * 4096);
	builder_remove(&b);
}

/* exec keeps the process and loses the memory: the lock is free, gpufenced sees it by that. */
static void exec_frees_the_lock(void)
{
	pid_t pid;
	int ready[2], go[2];
	char c;
	CHECK(pipe2(ready, O_CLOEXEC) == 0 && pipe(go) == 0);
	start(4, 10 * MIB, NONE);
	CHILD(pid, {
		CHECK_INT(reserve(MIB), 0);
		CHECK(write(ready[1], "x", 1) == 1);
		dup2(go[0], 0);
		close(go[1]);
		execl("/bin/sh", "sh", "-c", "read x", (char *)NULL);
	});
	close(ready[1]);
	CHECK(read(ready[0], &c, 1) == 1);
	CHECK(read(ready[0], &c, 1) == 0);
	CHECK(kill(pid, 0) == 0);
	/* The old memory may go a moment after the descriptors. */
	uint64_t deadline = pages_now_ns() + UINT64_C(20000000000);
	while (!builder_lock_free(&b, 0) && pages_now_ns() < deadline)
		pages_sleep_ns(1000000);
	CHECK(builder_reclaim(&b, 0, false));
	CHECK(write(go[1], "\n", 1) == 1);
	unit_reap(pid, 0);
	builder_remove(&b);
}

struct worker {
	pid_t pid;
	int say[2], hear[2];
};

/* A process that does what it is told: '+' reserves a MiB, '-' releases one, '?' only opens the
 * pages, 'q' ends. */
static void worker_start(struct worker *w)
{
	CHECK(pipe(w->say) == 0 && pipe(w->hear) == 0);
	CHILD(w->pid, {
		char c;
		close(w->say[1]);
		close(w->hear[0]);
		while (read(w->say[0], &c, 1) == 1 && c != 'q') {
			char answer = 'y';
			if (c == '+')
				answer = reserve(MIB) == 0 ? 'y' : 'n';
			else if (c == '-')
				release(MIB);
			else
				answer = account_gpu(uuid) == 0 ? 'y' : 'n';
			CHECK(write(w->hear[1], &answer, 1) == 1);
		}
	});
	close(w->say[0]);
	close(w->hear[1]);
}

static char worker_do(struct worker *w, char what)
{
	char answer = '?';
	CHECK(write(w->say[1], &what, 1) == 1);
	if (what != 'q')
		CHECK(read(w->hear[0], &answer, 1) == 1);
	return answer;
}

static void worker_end(struct worker *w, int signal)
{
	if (signal != 0)
		kill(w->pid, signal);
	else
		worker_do(w, 'q');
	unit_reap(w->pid, signal);
	close(w->say[1]);
	close(w->hear[0]);
}

static void more_processes_than_slots(void)
{
	struct worker w[10];
	start(3, 10 * MIB, NONE);
	for (int i = 0; i < 10; i++) {
		worker_start(&w[i]);
		CHECK_INT(worker_do(&w[i], '+'), 'y');
		CHECK_U64(builder_charged(&b, 0), (unsigned)(i + 1) * MIB);
	}
	CHECK_U64(builder_live(&b), 3);
	CHECK_U64(builder_slot(&b, 3)->gpu[0].device & GPUFENCE_UNITS_MASK, 7 * 256);
	for (int i = 0; i < 10; i++)
		CHECK_INT(worker_do(&w[i], '+'), 'n');
	CHECK(!builder_clear_overflow(&b));
	worker_do(&w[9], '-');
	CHECK_U64(builder_charged(&b, 0), 9 * MIB);
	CHECK_INT(worker_do(&w[0], '+'), 'y');
	/* A killed user's charge stays until nobody uses the slot. */
	worker_end(&w[8], SIGKILL);
	CHECK_U64(builder_charged(&b, 0), 10 * MIB);
	for (int i = 3; i < 8; i++)
		worker_end(&w[i], i % 2 == 0 ? SIGKILL : 0);
	CHECK(!builder_clear_overflow(&b));
	worker_end(&w[9], 0);
	CHECK(builder_clear_overflow(&b));
	CHECK_U64(builder_charged(&b, 0), 4 * MIB);
	for (int i = 0; i < 3; i++) {
		uint32_t pid = (uint32_t)w[i].pid;
		worker_end(&w[i], SIGKILL);
		CHECK_U64(builder_reclaim_pid(&b, pid), 1);
	}
	CHECK_U64(builder_charged(&b, 0), 0);
	builder_remove(&b);
}

/* The next to need the overflow slot zeroes it if it is alone. */
static void overflow_forgets_the_killed(void)
{
	struct worker holder, killed, fresh;
	start(1, 10 * MIB, NONE);
	worker_start(&holder);
	worker_start(&killed);
	worker_start(&fresh);
	CHECK_INT(worker_do(&holder, '+'), 'y');
	for (int i = 0; i < 9; i++)
		CHECK_INT(worker_do(&killed, '+'), 'y');
	worker_end(&killed, SIGKILL);
	CHECK_U64(builder_charged(&b, 0), 10 * MIB);
	CHECK_INT(worker_do(&fresh, '+'), 'y');
	CHECK_U64(builder_charged(&b, 0), 2 * MIB);
	worker_end(&holder, 0);
	worker_end(&fresh, 0);
	builder_remove(&b);
}

/* Who was turned away to the overflow slot moves to a free one when it needs room. */
static void overflow_users_move_out(void)
{
	struct worker holder, a, z;
	start(1, 4 * MIB, NONE);
	worker_start(&holder);
	worker_start(&a);
	worker_start(&z);
	CHECK_INT(worker_do(&holder, '+'), 'y');
	CHECK_INT(worker_do(&a, '+'), 'y');
	CHECK_INT(worker_do(&z, '+'), 'y');
	CHECK_INT(worker_do(&z, '+'), 'y');
	worker_end(&z, SIGKILL); /* leaves 2 MiB in the overflow slot, where a still is */
	uint32_t pid = (uint32_t)holder.pid;
	worker_end(&holder, SIGKILL);
	CHECK_U64(builder_reclaim_pid(&b, pid), 1);
	CHECK_U64(builder_charged(&b, 0), 3 * MIB);
	CHECK_INT(worker_do(&a, '+'), 'y');
	CHECK_INT(worker_do(&a, '+'), 'y'); /* needs the room of the dead */
	CHECK_INT(worker_do(&a, '+'), 'y');
	CHECK_INT(worker_do(&a, '+'), 'n');
	CHECK_U64(builder_live(&b), 1);
	CHECK_U64(builder_charged(&b, 0), 4 * MIB);
	for (int i = 0; i < 4; i++)
		worker_do(&a, '-');
	CHECK_U64(builder_charged(&b, 0), 0);
	worker_end(&a, 0);
	builder_remove(&b);
}

static void no_ledger_is_not_unlimited(void)
{
	struct account_view v;
	builder_uuid(0, uuid);
	builder_init(&b, NULL);
	builder_limit(&b, 10 * MIB, 8 * MIB);
	char away[330];
	snprintf(away, sizeof away, "%s/away", b.dir);
	CHECK(rename(path_of("ledger"), away) == 0);
	account_set_dir(b.dir);
	CHECK_INT(account_gpu(uuid), 0);
	CHECK(account_view(0, &v));
	CHECK_U64(v.headroom_bytes, 8 * MIB);
	CHECK_INT(reserve(8 * MIB + 1), -ENOMEM);
	CHECK_INT(reserve(5 * MIB), 0);
	CHECK_INT(account_reserve(0, ACCOUNT_MANAGED, 4 * MIB), -ENOMEM);
	CHECK_INT(account_reserve(0, ACCOUNT_MANAGED, 2 * MIB), 0);
	release(MIB);
	CHECK(account_view(0, &v));
	CHECK_U64(v.charged_bytes, 6 * MIB);
	CHECK_U64(v.headroom_bytes, 2 * MIB);
	account_event(0, ACCOUNT_EVENT_MAX);
	account_count_alloc();
	/* There again: what was charged meanwhile moves in. */
	CHECK(rename(away, path_of("ledger")) == 0);
	uint64_t deadline = pages_now_ns() + UINT64_C(20000000000);
	while (builder_live(&b) == 0 && pages_now_ns() < deadline) {
		pages_sleep_ns(20000000);
		CHECK_INT(reserve(4096), 0);
		release(4096);
	}
	CHECK_U64(builder_charged(&b, 0), 6 * MIB);
	CHECK_INT(reserve(2 * MIB), 0);
	CHECK_INT(reserve(1), -ENOMEM);
	builder_remove(&b);
}

static void a_broken_ledger_is_not_unlimited(void)
{
	builder_uuid(0, uuid);
	builder_init(&b, NULL);
	builder_limit(&b, 10 * MIB, NONE);
	memset(b.ledger_page, 0xff, b.ledger_bytes);
	account_set_dir(b.dir);
	CHECK_INT(account_gpu(uuid), 0);
	CHECK_INT(reserve(11 * MIB), -ENOMEM);
	CHECK_INT(reserve(10 * MIB), 0);
	CHECK_INT(reserve(1), -ENOMEM);
	release(10 * MIB);
	CHECK_INT(reserve(10 * MIB), 0);
	builder_remove(&b);
}

static void a_read_only_ledger_is_not_unlimited(void)
{
	builder_uuid(0, uuid);
	builder_init(&b, NULL);
	builder_limit(&b, 10 * MIB, NONE);
	CHECK(chmod(path_of("ledger"), 0444) == 0);
	pid_t pid;
	CHILD(pid, {
		CHECK(geteuid() != 0 || (setgid(65534) == 0 && setuid(65534) == 0));
		account_set_dir(b.dir);
		CHECK_INT(account_gpu(uuid), 0);
		CHECK_INT(reserve(11 * MIB), -ENOMEM);
		CHECK_INT(reserve(10 * MIB), 0);
		CHECK_U64(builder_live(&b), 0);
	});
	unit_reap(pid, 0);
	builder_remove(&b);
}

/* Cut after it was mapped, seen when the process registers. (Cut under a process that already
 * charges there it is that process's end, by SIGBUS: it was its own pod that did it.) */
static void a_cut_ledger_is_left(void)
{
	struct account_view v;
	start(100, 10 * MIB, NONE);
	CHECK(account_view(0, &v));
	CHECK(truncate(path_of("ledger"), 0) == 0);
	CHECK_INT(reserve(11 * MIB), -ENOMEM);
	CHECK_INT(reserve(10 * MIB), 0);
	CHECK(account_view(0, &v));
	CHECK_U64(v.charged_bytes, 10 * MIB);
	CHECK_INT(reserve(1), -ENOMEM);
	release(10 * MIB);
	CHECK_INT(reserve(10 * MIB), 0);
	builder_remove(&b);
}

static void no_descriptor_left(void)
{
	struct rlimit few = { 3, 0 }, before;
	builder_uuid(0, uuid);
	builder_init(&b, NULL);
	builder_limit(&b, 10 * MIB, NONE);
	account_set_dir(b.dir);
	CHECK(getrlimit(RLIMIT_NOFILE, &before) == 0);
	few.rlim_max = before.rlim_max;
	CHECK(setrlimit(RLIMIT_NOFILE, &few) == 0);
	CHECK_INT(account_gpu(uuid), -1);
	/* It passes, and must not have left the process without limits. */
	CHECK(setrlimit(RLIMIT_NOFILE, &before) == 0);
	CHECK_INT(account_gpu(uuid), 0);
	CHECK(setrlimit(RLIMIT_NOFILE, &few) == 0);
	CHECK_INT(reserve(11 * MIB), -ENOMEM);
	CHECK_INT(reserve(5 * MIB), 0);
	CHECK(setrlimit(RLIMIT_NOFILE, &before) == 0);
	pages_sleep_ns(UINT64_C(150000000));
	CHECK_INT(reserve(MIB), 0);
	CHECK_U64(builder_charged(&b, 0), 6 * MIB);
	builder_remove(&b);
}

static void takes_over_only_when_stale(void)
{
	struct worker dead;
	limits_stale_ns = UINT64_C(300000000);
	start(4, 10 * MIB, NONE);
	worker_start(&dead);
	for (int i = 0; i < 8; i++)
		CHECK_INT(worker_do(&dead, '+'), 'y');
	worker_end(&dead, SIGKILL);
	CHECK_INT(reserve(MIB), 0);
	bool held = true;
	for (int i = 0; held && i < 10; i++) {
		__atomic_fetch_add(&builder_limits(&b)->heartbeat, 1, __ATOMIC_SEQ_CST);
		uint64_t beaten = pages_now_ns();
		held = reserve(8 * MIB) == -ENOMEM;
		/* Unless this machine stood still for so long. */
		CHECK(held || pages_now_ns() - beaten >= limits_stale_ns);
		pages_sleep_ns(UINT64_C(50000000));
	}
	if (held)
		CHECK_U64(builder_live(&b), 2);
	else
		release(8 * MIB);
	pages_sleep_ns(UINT64_C(310000000));
	CHECK_INT(reserve(8 * MIB), 0);
	CHECK_U64(builder_charged(&b, 0), 9 * MIB);
	CHECK_INT(reserve(2 * MIB), -ENOMEM); /* the limits stay */
	builder_remove(&b);
}

/* The same when no slot is free: not from its dead owner while gpufenced lives. */
static void claims_from_the_dead_only_when_stale(void)
{
	struct worker dead, early, late;
	uint64_t *beat = NULL;
	start(1, 10 * MIB, NONE);
	beat = &builder_limits(&b)->heartbeat;
	worker_start(&dead);
	CHECK_INT(worker_do(&dead, '+'), 'y');
	uint32_t pid = (uint32_t)dead.pid;
	worker_end(&dead, SIGKILL);
	__atomic_fetch_add(beat, 1, __ATOMIC_SEQ_CST);
	worker_start(&early);
	CHECK_INT(worker_do(&early, '+'), 'y');
	CHECK_U64((uint32_t)builder_slot(&b, 0)->owner, pid);
	CHECK_U64(builder_charged(&b, 0), 2 * MIB);
	/* Long after it has opened the pages. */
	limits_stale_ns = UINT64_C(200000000);
	worker_start(&late);
	CHECK_INT(worker_do(&late, '?'), 'y');
	pages_sleep_ns(UINT64_C(250000000));
	CHECK_INT(worker_do(&late, '+'), 'y');
	CHECK_U64((uint32_t)builder_slot(&b, 0)->owner, (uint64_t)late.pid);
	CHECK_U64(builder_charged(&b, 0), 2 * MIB);
	worker_end(&early, 0);
	worker_end(&late, 0);
	builder_remove(&b);
}

static void many_first_calls(void)
{
	struct worker w[40];
	start(64, 1000 * MIB, NONE);
	for (int i = 0; i < 40; i++)
		worker_start(&w[i]);
	for (int i = 0; i < 40; i++) {
		char c = '+';
		CHECK(write(w[i].say[1], &c, 1) == 1);
	}
	for (int i = 0; i < 40; i++) {
		char answer;
		CHECK(read(w[i].hear[0], &answer, 1) == 1);
		CHECK_INT(answer, 'y');
	}
	CHECK_U64(builder_live(&b), 40);
	CHECK_U64(builder_charged(&b, 0), 40 * MIB);
	for (int i = 0; i < 40; i++)
		worker_end(&w[i], 0);
	builder_remove(&b);
}

static uint64_t lost_slots;
static int stop;
static bool may_be_refused;

static void *reserve_and_release(void *arg)
{
	(void)arg;
	for (int i = 0; !__atomic_load_n(&stop, __ATOMIC_RELAXED); i++) {
		enum account_counter c = i % 3 == 0 ? ACCOUNT_MANAGED : ACCOUNT_DEVICE;
		int r = account_reserve(0, c, 4096 * (uint64_t)(i % 7 + 1));
		CHECK(r == 0 || (may_be_refused && r == -ENOMEM));
		if (r != 0)
			continue;
		account_count_alloc();
		account_release(0, c, 4096 * (uint64_t)(i % 7 + 1));
		account_count_free();
		if (i % 16 == 0)
			sched_yield();
	}
	return NULL;
}

static void run_threads(pthread_t *t, int n)
{
	for (int i = 0; i < n; i++)
		CHECK(pthread_create(&t[i], NULL, reserve_and_release, NULL) == 0);
}

static void stop_threads(pthread_t *t, int n)
{
	__atomic_store_n(&stop, 1, __ATOMIC_RELAXED);
	for (int i = 0; i < n; i++)
		CHECK(pthread_join(t[i], NULL) == 0);
}

/* Whatever happens to the slot, what 8 threads charged comes back to exactly 0. */
static void threads_share_a_slot(void)
{
	pthread_t t[8];
	start(64, NONE, NONE);
	CHECK_INT(reserve(5 * MIB), 0);
	may_be_refused = true; /* who loses its slot all the time gives up at some time */
	run_threads(t, 8);
	/* So often that every step of a reserve and of a release has been the one in between. */
	for (uint64_t begin = pages_now_ns(); pages_now_ns() - begin < UINT64_C(1500000000) || lost_slots < 1000;)
		lost_slots += builder_reclaim_pid(&b, (uint32_t)getpid());
	stop_threads(t, 8);
	CHECK_INT(reserve(4096), 0); /* into a slot again, should it have been lost last */
	CHECK_U64(builder_charged(&b, 0), 5 * MIB + 4096);
	release(5 * MIB + 4096);
	CHECK_U64(builder_charged(&b, 0), 0);
	builder_remove(&b);
}

/* The same through the overflow slot: the only real slot is lost and found again. */
static void threads_move_in_and_out(void)
{
	pthread_t t[4];
	start(1, UINT64_C(1) << 40, NONE);
	CHECK_INT(reserve(5 * MIB), 0);
	may_be_refused = true;
	run_threads(t, 4);
	for (int i = 0; i < 200; i++) {
		/* Its own lock on the lost slot is in the way of the new registration ... */
		CHECK(builder_reclaim(&b, 0, true));
		CHECK_INT(reserve(4096), 0);
		release(4096);
		CHECK_U64(builder_live(&b), 0);
		/* ... until it needs the room of the dead there, and looks again. */
		__atomic_fetch_add(&builder_slot(&b, 1)->gpu[0].managed, UINT64_C(1) << 28, __ATOMIC_SEQ_CST);
		for (int tries = 0; tries < 1000 && reserve(4096) != 0; tries++)
			CHECK(tries < 999);
		release(4096);
		CHECK_U64(builder_live(&b), 1);
	}
	stop_threads(t, 4);
	CHECK_U64(builder_charged(&b, 0), 5 * MIB);
	CHECK(builder_clear_overflow(&b)); /* not a user of it any more */
	builder_remove(&b);
}

static void fork_in_the_middle(void)
{
	pthread_t t[4];
	start(64, NONE, NONE);
	run_threads(t, 4);
	for (int i = 0; i < 100; i++) {
		pid_t pid;
		/* Whatever the other threads were in the middle of. */
		CHILD(pid, CHECK_INT(reserve(4096), 0));
		unit_reap(pid, 0);
		CHECK_U64(builder_reclaim_pid(&b, (uint32_t)pid), 1);
	}
	stop_threads(t, 4);
	CHECK_U64(builder_charged(&b, 0), 0);
	builder_remove(&b);
}

static void refuses_in_time(void)
{
	struct worker other;
	start(4, 10 * MIB, NONE);
	worker_start(&other);
	for (int i = 0; i < 10; i++)
		CHECK_INT(worker_do(&other, '+'), 'y');
	/* Somebody sits on the slow path's lock. */
	CHECK_INT(pages_file_lock(b.ledger_fd, PAGES_LOCK_EXCLUSIVE, GPUFENCE_LEDGER_LOCK_OFFSET, 1), 0);
	uint64_t begin = pages_now_ns();
	CHECK_INT(reserve(1), -ENOMEM);
	/* 50 ms of trying, and 20 times the bound before it counts as hanging. */
	CHECK(pages_now_ns() - begin < UINT64_C(1000000000));
	CHECK(pages_now_ns() - begin >= UINT64_C(50000000));
	CHECK_INT(pages_file_lock(b.ledger_fd, PAGES_LOCK_NONE, GPUFENCE_LEDGER_LOCK_OFFSET, 1), 0);
	worker_do(&other, '-');
	CHECK_INT(reserve(MIB), 0);
	CHECK_INT(reserve(1), -ENOMEM);
	worker_end(&other, 0);
	builder_remove(&b);
}

static void errno_is_kept(void)
{
	struct account_view v;
	start(4, 10 * MIB, NONE);
	errno = EDOM;
	CHECK_INT(reserve(MIB), 0);
	CHECK_INT(reserve(100 * MIB), -ENOMEM);
	CHECK(account_view(0, &v));
	release(MIB);
	CHECK_INT(errno, EDOM);
	builder_remove(&b);
}

static void several_gpus(void)
{
	struct gpufence_limits_gpu gpu[16];
	start(4, MIB, NONE);
	for (unsigned i = 0; i < 16; i++) {
		gpu[i] = builder_gpu(i);
		gpu[i].max_bytes = (i + 1) * MIB;
	}
	builder_publish(&b, gpu, 16);
	for (unsigned i = 0; i < 16; i++) {
		builder_uuid(i, uuid);
		CHECK_INT(account_gpu(uuid), (int)i);
		CHECK_INT(account_reserve((int)i, ACCOUNT_DEVICE, (i + 1) * MIB + 1), -ENOMEM);
		CHECK_INT(account_reserve((int)i, ACCOUNT_DEVICE, (i + 1) * MIB), 0);
	}
	for (unsigned i = 0; i < 16; i++)
		CHECK_U64(builder_charged(&b, i), (i + 1) * MIB);
	builder_remove(&b);
}

static void swap_has_its_own_limit(void)
{
	struct gpufence_limits_gpu g = builder_gpu(0);
	uint8_t uuid[16];
	struct account_view view;
	struct builder b;
	builder_init(&b, NULL);
	g.max_bytes = 64 * MIB;
	g.swap_max_bytes = 32 * MIB;
	g.pod_swap_max_bytes = 24 * MIB;
	builder_publish(&b, &g, 1);
	builder_uuid(0, uuid);
	account_set_dir(b.dir);
	CHECK_INT(account_gpu(uuid), 0);
	CHECK_INT(account_reserve(0, ACCOUNT_DEVICE, 64 * MIB), 0);
	CHECK_INT(account_reserve(0, ACCOUNT_SWAP, 24 * MIB), 0);
	CHECK_INT(account_reserve(0, ACCOUNT_SWAP, 4096), -ENOMEM); /* the pod's */
	CHECK_INT(account_reserve(0, ACCOUNT_DEVICE, 4096), -ENOMEM);
	CHECK_U64(builder_slot(&b, 0)->gpu[0].swap & GPUFENCE_UNITS_MASK, 24 * MIB / 4096);
	CHECK(account_view(0, &view));
	CHECK_U64(view.charged_bytes, 64 * MIB);
	account_release(0, ACCOUNT_SWAP, 8 * MIB);
	g.pod_swap_max_bytes = GPUFENCE_UNLIMITED;
	builder_publish(&b, &g, 1);
	CHECK_INT(account_reserve(0, ACCOUNT_SWAP, 17 * MIB), -ENOMEM); /* its own */
	CHECK_INT(account_reserve(0, ACCOUNT_SWAP, 16 * MIB), 0);
	account_release(0, ACCOUNT_SWAP, 32 * MIB);
	account_release(0, ACCOUNT_DEVICE, 64 * MIB);
	CHECK_U64(builder_charged(&b, 0), 0);
	CHECK_U64(builder_slot(&b, 0)->gpu[0].swap & GPUFENCE_UNITS_MASK, 0);
	/* The default lets nothing spill. */
	g.swap_max_bytes = g.pod_swap_max_bytes = 0;
	builder_publish(&b, &g, 1);
	CHECK_INT(account_reserve(0, ACCOUNT_SWAP, 4096), -ENOMEM);
	builder_remove(&b);
}

int main(int argc, char **argv)
{
	static const struct unit_test tests[] = {
		{ "account: -1 is nothing", minus_one_is_nothing },
		{ "account: without pages nothing holds", without_pages_nothing_holds },
		{ "account: foreign pages are none", foreign_pages_are_none },
		{ "account: a slot only with the first charge", not_before_the_first_call },
		{ "account: holds the limit", holds_the_limit },
		{ "account: hopeless is refused at once", hopeless_is_refused_at_once },
		{ "account: a limit between units", a_limit_between_units },
		{ "account: swap has its own limit", swap_has_its_own_limit },
		{ "account: managed counts like device", managed_counts_like_device },
		{ "account: excess takes room", excess_takes_room },
		{ "account: limits change while running", limits_change_while_running },
		{ "account: an unfenced GPU is charged only", unfenced_is_charged_only },
		{ "account: the view shows the lower limit", view_shows_the_lower },
		{ "account: several GPUs", several_gpus },
		{ "account: events and statistics", events_and_statistics },
		{ "account: peaks follow the samples", peaks_follow_the_samples },
		{ "account: slot loss", slot_loss },
		{ "account: imports are said", imports },
		{ "account: dying by mistake", dying_by_mistake },
		{ "account: losing the slot forever", losing_the_slot_forever },
		{ "account: no descriptor stays open", closed_descriptors },
		{ "account: a fork child is nobody", fork_child_is_nobody },
		{ "account: a fork child without MADV_WIPEONFORK", fork_child_without_wipe },
		{ "account: an orphan keeps no lock", orphan_keeps_no_lock },
		{ "account: vfork and posix_spawn", vfork_and_spawn },
		{ "account: exec frees the lock", exec_frees_the_lock },
		{ "account: more processes than slots", more_processes_than_slots },
		{ "account: overflow forgets the killed", overflow_forgets_the_killed },
		{ "account: overflow users move out", overflow_users_move_out },
		{ "account: no ledger is not unlimited", no_ledger_is_not_unlimited },
		{ "account: a broken ledger is not unlimited", a_broken_ledger_is_not_unlimited },
		{ "account: a read-only ledger is not unlimited", a_read_only_ledger_is_not_unlimited },
		{ "account: a cut ledger is left", a_cut_ledger_is_left },
		{ "account: no descriptor left", no_descriptor_left },
		{ "account: takes over only when stale", takes_over_only_when_stale },
		{ "account: claims from the dead only when stale", claims_from_the_dead_only_when_stale },
		{ "account: many first calls", many_first_calls },
		{ "account: threads share a slot", threads_share_a_slot },
		{ "account: threads move in and out of overflow", threads_move_in_and_out },
		{ "account: fork in the middle", fork_in_the_middle },
		{ "account: refuses in time", refuses_in_time },
		{ "account: errno is kept", errno_is_kept },
		{ NULL, NULL },
	};
	return unit_main(tests, argc, argv);
}
