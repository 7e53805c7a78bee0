// SPDX-License-Identifier: Apache-2.0
//
// What a program in a container may ask the driver for, honest and not, with the real request layouts. Each
// argument is a step, "name:number:number"; each prints one line: the step, errno, the driver's status, the
// bytes that the stand-in driver holds for this open file.
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/userfaultfd.h>
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

typedef uint32_t u32;
typedef uint64_t u64;

struct nvos21 { u32 root, parent, handle, class; u64 params; u32 size, status; };
struct nvos64 { u32 root, parent, handle, class; u64 params, rights; u32 size, flags, status, pad; };
struct nvos00 { u32 root, parent, handle, status; };
struct xfer { u32 cmd, size; u64 at; };
struct params { u32 owner, type, flags, w, h, pitch, attr, attr2, format, cc, zc, pad; u64 lo, hi, size, align, offset, limit, address; u32 ctag, va, internal, tag; int numa; u32 end; };
struct counts { u64 file, held, peak, allocations, window; };
_Static_assert(sizeof(struct params) == 128 && __builtin_offsetof(struct params, size) == 64, "");
_Static_assert(sizeof(struct nvos21) == 32 && sizeof(struct nvos64) == 48, "");

#define IOC(nr, size) (3u << 30 | (u32)(size) << 16 | 'F' << 8 | (nr))
#define CLIENT 0xc1d00001u

static int fd = -1;
static u32 status;

static struct counts counts(void)
{
	struct counts c = {0};
	ioctl(fd, IOC(0xf0, sizeof(c)), &c);
	return c;
}

static int os64(u64 bytes, u32 handle, u32 class, u32 attr, u32 flags)
{
	struct params p = {.size = bytes, .attr = attr, .flags = flags};
	struct nvos64 a = {CLIENT, CLIENT, handle, class, (u64)&p, 0, sizeof(p), 0, 0, 0};
	int rc = ioctl(fd, IOC(0x2b, sizeof(a)), &a);
	status = a.status;
	return rc;
}

static int os21(u64 bytes, u32 handle)
{
	struct params p = {.size = bytes};
	struct nvos21 a = {CLIENT, CLIENT, handle, 0x40, (u64)&p, sizeof(p), 0};
	int rc = ioctl(fd, IOC(0x2b, sizeof(a)), &a);
	status = a.status;
	return rc;
}

static int xfer(u64 bytes, u32 handle)
{
	struct params p = {.size = bytes};
	struct nvos64 a = {CLIENT, CLIENT, handle, 0x40, (u64)&p, 0, sizeof(p), 0, 0, 0};
	struct xfer x = {0x2b, sizeof(a), (u64)&a};
	int rc = ioctl(fd, IOC(0xd3, sizeof(x)), &x);
	status = a.status;
	return rc;
}

static int heap(u32 fn, u64 bytes, u32 handle)
{
	unsigned char b[184] = {0};
	*(u32 *)b = CLIENT;
	*(u32 *)(b + 8) = fn;
	*(u32 *)(b + 44) = handle;
	if (fn == 2)
		*(u64 *)(b + 88) = bytes;
	else if (fn == 14)
		*(u64 *)(b + 80) = bytes;
	else if (fn == 6) { // height times pitch
		*(u32 *)(b + 56) = bytes >> 12;
		*(u32 *)(b + 60) = 4096;
	}
	int rc = ioctl(fd, IOC(0x4a, sizeof(b)), b);
	status = *(u32 *)(b + 20);
	return rc;
}

static int drop(u32 handle)
{
	struct nvos00 a = {CLIENT, CLIENT, handle, 0};
	int rc = ioctl(fd, IOC(0x29, sizeof(a)), &a);
	status = a.status;
	return rc;
}

#ifdef __x86_64__
static int compat(u64 bytes, u32 handle)
{
	char *low = mmap(0, 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_32BIT, -1, 0);
	struct params *p = (void *)low;
	struct nvos64 *a = (void *)(low + 512);
	long rc;
	p->size = bytes;
	*a = (struct nvos64){CLIENT, CLIENT, handle, 0x40, (u64)p, 0, sizeof(*p), 0, 0, 0};
	__asm__ volatile("int $0x80" : "=a"(rc) : "a"(54L), "b"((long)fd), "c"((long)IOC(0x2b, sizeof(*a))), "d"((long)(u32)(u64)a) : "memory", "r8", "r9", "r10", "r11");
	status = a->status;
	errno = (int)-rc;
	return (int)rc < 0 ? -1 : 0;
}
#endif

/* One thread asks, another changes what is asked for. */
static volatile int racing;
static volatile u64 *flipped;
static u64 flip_a, flip_b;
static int stay_a = 20;
static void *flipper(void *x)
{
	(void)x;
	while (racing) {
		*flipped = flip_a;
		for (volatile int i = 0; i < stay_a; i++)
			;
		*flipped = flip_b;
		for (volatile int i = 0; i < 20; i++)
			;
	}
	return 0;
}

struct shared { u64 tries, passed, refused, escaped, most; };

/* Asks until it is killed or has asked n times. What it finds itself to hold after a request that should not
   have been let through is an escape: the process lived to use it. */
static void race(struct shared *s, u64 n, u64 small, u64 big, u64 limit)
{
	struct params p = {.size = small};
	pthread_t t;
	flipped = &p.size;
	flip_a = small;
	flip_b = big;
	stay_a = 40; // mostly what the door lets through, so that many tries reach the driver before one wins
	racing = 1;
	pthread_create(&t, 0, flipper, 0);
	for (u64 i = 0; i < n; i++) {
		struct nvos64 a = {CLIENT, CLIENT, 0x100, 0x40, (u64)&p, 0, sizeof(p), 0, 0, 0};
		__sync_fetch_and_add(&s->tries, 1);
		int rc = ioctl(fd, IOC(0x2b, sizeof(a)), &a);
		if (rc) {
			__sync_fetch_and_add(&s->refused, 1);
			continue;
		}
		__sync_fetch_and_add(&s->passed, 1);
		u64 have = counts().file;
		if (have > s->most)
			s->most = have;
		if (have > limit)
			__sync_fetch_and_add(&s->escaped, 1);
		drop(0x100);
	}
	racing = 0;
	pthread_join(t, 0);
}

/* The race without luck. The request lies across two pages, the second of which is not there: the door reads
   what is on the first only, the driver's copy waits for the second, and whoever brings it changes the size
   first. So the change comes after the door has read and before the driver does, in every try. The one who asks
   is a process of its own in the same memory, so that what kills it leaves the one who changes. */
struct window { struct params p; struct nvos64 *a; u64 limit; u64 tries, inside, killed, survived, escaped; int share; };
static struct window w;
#define PAIRS 4 /* of one who asks and one who changes */

static int ask(void *x)
{
	(void)x;
	int mine = w.share ? fd : open("/dev/nvidiactl", O_RDWR | O_CLOEXEC);
	struct counts c = {0};
	if (mine < 0 || ioctl(mine, IOC(0x2b, sizeof(*w.a)), w.a))
		_exit(1); // refused: it got nothing
	w.survived++;
	if (!ioctl(mine, IOC(0xf0, sizeof(c)), &c) && c.file > w.limit)
		w.escaped++;
	_exit(0);
}

/* What tells of the first touch of a page, which waits until the page is brought. */
static int missing(char *page)
{
	int u = syscall(SYS_userfaultfd, O_CLOEXEC | O_NONBLOCK);
	struct uffdio_api api = {.api = UFFD_API};
	struct uffdio_register reg = {.range = {(u64)page, 4096}, .mode = UFFDIO_REGISTER_MODE_MISSING};
	if (u < 0 || ioctl(u, UFFDIO_API, &api) || ioctl(u, UFFDIO_REGISTER, &reg)) {
		perror("client: userfaultfd");
		return -1;
	}
	return u;
}

static int window(u64 n, u64 small, u64 big, u64 limit, int share)
{
	char *page = mmap(0, 8192, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0), *stack = malloc(65536);
	int u = missing(page + 4096);
	if (u < 0)
		return -1;
	w = (struct window){.a = (void *)(page + 4096 - __builtin_offsetof(struct nvos64, rights)), .limit = limit, .share = share};
	// Who is refused at the door, as while another's file is not closed yet, was not in the window.
	for (; w.inside < n && w.tries < 50 * n; w.tries++) {
		// What is on the second page is brought as zeros: the driver takes 128 bytes of parameters then.
		struct { u32 root, parent, handle, class; u64 params; } first = {CLIENT, CLIENT, 0x100, 0x40, (u64)&w.p};
		madvise(page + 4096, 4096, MADV_DONTNEED);
		w.p = (struct params){.size = small};
		memcpy(w.a, &first, sizeof(first));
		pid_t child = clone(ask, stack + 65536, CLONE_VM | SIGCHLD, 0);
		struct pollfd f = {.fd = u, .events = POLLIN};
		struct uffd_msg m;
		int status;
		if (child < 0)
			return -1;
		while (poll(&f, 1, 2) == 0)
			if (waitpid(child, &status, WNOHANG) == child) // refused at the door
				goto ended;
		if (read(u, &m, sizeof(m)) == sizeof(m) && m.event == UFFD_EVENT_PAGEFAULT) {
			*(volatile u64 *)&w.p.size = big;
			struct uffdio_zeropage z = {.range = {(u64)page + 4096, 4096}};
			if (ioctl(u, UFFDIO_ZEROPAGE, &z))
				return -1;
			w.inside++;
		}
		waitpid(child, &status, 0);
	ended:
		if (WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL)
			w.killed++;
	}
	close(u);
	return 0;
}

/* A request that is held up between the door and the driver for so many ms: its second page is brought then. */
static struct { struct nvos64 *a; int rc, error; } held;
static void *hold(void *x)
{
	(void)x;
	held.rc = ioctl(fd, IOC(0x2b, sizeof(*held.a)), held.a);
	held.error = errno;
	return 0;
}

static int holdup(u64 bytes, u32 handle, u64 ms)
{
	struct params p = {.size = bytes};
	char *page = mmap(0, 8192, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	int u = missing(page + 4096);
	// What is on the second page is brought as zeros: the driver takes 128 bytes of parameters then.
	struct { u32 root, parent, handle, class; u64 params; } first = {CLIENT, CLIENT, handle, 0x40, (u64)&p};
	held.a = (void *)(page + 4096 - __builtin_offsetof(struct nvos64, rights));
	memcpy(held.a, &first, sizeof(first));
	struct pollfd f = {.fd = u, .events = POLLIN};
	struct uffdio_zeropage z = {.range = {(u64)page + 4096, 4096}};
	pthread_t t;
	if (u < 0 || pthread_create(&t, 0, hold, 0) || poll(&f, 1, 60000) != 1) {
		errno = ETIMEDOUT; // as where the door has refused it
		return -1;
	}
	puts("holding");
	usleep(ms * 1000);
	if (ioctl(u, UFFDIO_ZEROPAGE, &z))
		return -1;
	pthread_join(t, 0);
	close(u);
	status = held.a->status;
	errno = held.error;
	return held.rc;
}

/* Frees that the door sees and the driver does not do. */
static void forge(u64 n, u64 bytes)
{
	u32 handle = 0x5000;
	int refused = 0;
	for (u64 i = 0; i < n; i++) {
		usleep(20000);
		if (os64(bytes, ++handle, 0x40, 0, 0) || status) {
			if (++refused > 20) { // give back what was got, so as to be believed again
				for (u32 h = 0x5000; h < handle; h++)
					drop(h);
				refused = 0;
			}
			continue;
		}
		refused = 0;
		struct nvos00 a = {CLIENT, 0xdeaf, handle, 0};
		ioctl(fd, IOC(0x29, sizeof(a)), &a);
	}
}

#ifdef FOLLOW
/* The simulated GPU, which gpufenced looks at, is made to hold what the stand-in driver holds for this file. */
#include <dlfcn.h>
static int (*cu_alloc)(u64 *, size_t), (*cu_free)(u64);
static struct { u64 at, bytes; } have[65536];
static u64 follows, n_have;
static void begin(void)
{
	int (*init)(unsigned), (*create)(void **, unsigned, int);
	void *l = dlopen("libcuda.so.1", RTLD_NOW), *context;
	if (l && (init = dlsym(l, "cuInit")) && (create = dlsym(l, "cuCtxCreate_v2")) && (cu_alloc = dlsym(l, "cuMemAlloc_v2")) && (cu_free = dlsym(l, "cuMemFree_v2")) &&
	    !init(0) && !create(&context, 0, 0))
		return;
	fprintf(stderr, "client: no simulated GPU: %s\n", dlerror());
	_exit(3);
}
static void follow(void)
{
	u64 want = counts().file;
	while (follows > want) {
		follows -= have[--n_have].bytes;
		cu_free(have[n_have].at);
	}
	if (want > follows && n_have < 65536 && !cu_alloc(&have[n_have].at, want - follows)) {
		have[n_have++].bytes = want - follows;
		follows = want;
	}
}
#else
static void begin(void) { }
static void follow(void) { }
#endif

static int unix_socket(const char *path, int serve)
{
	struct sockaddr_un a = {.sun_family = AF_UNIX};
	int s = socket(AF_UNIX, SOCK_STREAM, 0);
	strncpy(a.sun_path, path, sizeof(a.sun_path) - 1);
	if (!serve) {
		for (int i = 0; i < 1000 && connect(s, (void *)&a, sizeof(a)); i++)
			usleep(10000);
		return s;
	}
	bind(s, (void *)&a, sizeof(a));
	listen(s, 1);
	return accept(s, 0, 0);
}

static void pass(int s, int *what, int send)
{
	char byte = 0, control[CMSG_SPACE(sizeof(int))] = {0};
	struct iovec io = {&byte, 1};
	struct msghdr m = {.msg_iov = &io, .msg_iovlen = 1, .msg_control = control, .msg_controllen = sizeof(control)};
	struct cmsghdr *c = CMSG_FIRSTHDR(&m);
	if (send) {
		c->cmsg_level = SOL_SOCKET;
		c->cmsg_type = SCM_RIGHTS;
		c->cmsg_len = CMSG_LEN(sizeof(int));
		memcpy(CMSG_DATA(c), what, sizeof(int));
		sendmsg(s, &m, 0);
		recv(s, &byte, 1, 0); // until the other has ended
	} else if (recvmsg(s, &m, 0) > 0 && (c = CMSG_FIRSTHDR(&m)))
		memcpy(what, CMSG_DATA(c), sizeof(int));
}

int main(int argc, char **argv)
{
	setlinebuf(stdout);
	begin();
	fd = open("/dev/nvidiactl", O_RDWR | O_CLOEXEC);
	for (int i = 1; i < argc; i++) {
		char name[32] = {0}, path[128] = {0};
		u64 v[4] = {0};
		sscanf(argv[i], "%31[a-z0-9]:%llu:%llu:%llu:%llu", name, (unsigned long long *)v, (unsigned long long *)(v + 1), (unsigned long long *)(v + 2), (unsigned long long *)(v + 3));
		sscanf(argv[i], "%31[a-z0-9]:%127s", name, path);
		int rc = 0;
		errno = 0;
		status = 0;
#define IS(s) !strcmp(name, s)
		if (IS("os64")) rc = os64(v[0], v[1], 0x40, 0, 0);
		else if (IS("os21")) rc = os21(v[0], v[1]);
		else if (IS("xfer")) rc = xfer(v[0], v[1]);
		else if (IS("heap2")) rc = heap(2, v[0], v[1]);
		else if (IS("heap6")) rc = heap(6, v[0], v[1]);
		else if (IS("heap14")) rc = heap(14, v[0], v[1]);
		else if (IS("system")) rc = os64(v[0], v[1], 0x3e, 1u << 25, 0);
		else if (IS("virtual")) rc = os64(v[0], v[1], 0x50a0, 0, 0x80000);
		else if (IS("class")) rc = os64(v[0], v[1], v[2], 0, 0);
		else if (IS("free")) rc = drop(v[0]);
		else if (IS("await")) { // asks again and again, until it is given or a minute is over
			for (int k = 0; (rc = os64(v[0], v[1], 0x40, 0, 0)) && errno == ENOMEM && k < 1200; k++) usleep(50000);
		} else if (IS("holdup")) rc = holdup(v[0], v[1], v[2]);
#ifdef __x86_64__
		else if (IS("compat")) rc = compat(v[0], v[1]);
#endif
		else if (IS("null")) { struct nvos64 a = {CLIENT, CLIENT, 1, 0x40, 0, 0, 128, 0, 0, 0}; rc = ioctl(fd, IOC(0x2b, sizeof(a)), &a); }
		else if (IS("short")) { char a[36] = {0}; rc = ioctl(fd, IOC(0x2b, sizeof(a)), a); }
		else if (IS("dup")) { u32 me = v[1] ? v[1] : CLIENT + 1, a[7] = {me, me, 1, v[0], 1, 0, 0}; rc = ioctl(fd, IOC(0x34, sizeof(a)), a); } // of one client's object, for another
		else if (IS("device") || IS("root")) { // an object with parameters that are not those of memory, by a client; a client
			char params[56] = {0};
			struct nvos64 a = {v[0], v[0], v[1], IS("root") ? 0x41 : 0x80, (u64)params, 0, sizeof(params), 0, 0, 0};
			rc = ioctl(fd, IOC(0x2b, sizeof(a)), &a);
			status = a.status;
		} else if (IS("files")) { // opens so many, each asks for so many bytes; how many asked with success, and the first error
			u64 asked = 0;
			int e = 0;
			struct rlimit many = {65536, 65536};
			setrlimit(RLIMIT_NOFILE, &many);
			for (u64 k = 0; k < v[0]; k++) {
				if (k) fd = open("/dev/nvidiactl", O_RDWR | O_CLOEXEC);
				if (!os64(v[1], 1, 0x40, 0, 0)) asked++;
				else if (!e) e = errno;
			}
			printf("files asked %llu error %d\n", (unsigned long long)asked, e);
			continue;
		}
		else if (IS("host")) { u32 a[14] = {CLIENT, CLIENT, 1, v[0]}; rc = ioctl(fd, IOC(0x27, sizeof(a)), a); } // NV_ESC_RM_ALLOC_MEMORY of a class
#ifdef __x86_64__
		else if (IS("mmap32")) { // old_mmap: the 32-bit call, whose length is where the 64-bit one has none
			u32 *a = mmap(0, 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_32BIT, -1, 0);
			int u = open("/dev/nvidia-uvm", O_RDWR);
			long r;
			a[1] = v[0]; a[2] = PROT_READ | PROT_WRITE; a[3] = MAP_SHARED; a[4] = u;
			__asm__ volatile("int $0x80" : "=a"(r) : "a"(90L), "b"((long)(u32)(u64)a) : "memory", "r8", "r9", "r10", "r11");
			rc = u < 0 || ((int)r < 0 && (int)r > -4096) ? -1 : 0;
			errno = rc && u >= 0 ? -(int)r : errno;
		}
#endif
		else if (IS("asuser")) rc = setuid(v[0]);
		else if (IS("mmap")) { int u = open("/dev/nvidia-uvm", O_RDWR); rc = u < 0 || mmap(0, v[0], PROT_READ | PROT_WRITE, MAP_SHARED, u, 0) == MAP_FAILED ? -1 : 0; }
		else if (IS("open")) { rc = open(path, O_RDWR); if (rc >= 0) { close(rc); rc = 0; } }
		else if (IS("sleep")) usleep(v[0] * 1000);
		else if (IS("reopen")) { close(fd); fd = open("/dev/nvidiactl", O_RDWR | O_CLOEXEC); rc = fd < 0 ? -1 : 0; }
		else if (IS("fork")) { fflush(stdout); pid_t p = fork(); if (p) { int w; waitpid(p, &w, 0); return WIFEXITED(w) ? WEXITSTATUS(w) : 1; } }
		else if (IS("send")) pass(unix_socket(path, 1), &fd, 1);
		else if (IS("receive")) { int got = -1; pass(unix_socket(path, 0), &got, 0); if (fd >= 0) close(fd); fd = got; rc = fd < 0 ? -1 : 0; }
		else if (IS("churn")) { // n times: allocate, free, at once
			u64 refused = 0;
			for (u64 k = 0; k < v[0]; k++) {
				if (os64(v[1], 0x200 + k, 0x40, 0, 0) || status) refused++;
				else drop(0x200 + k);
				if (v[2]) usleep(v[2] * 1000);
			}
			printf("%s refused %llu\n", argv[i], (unsigned long long)refused);
			continue;
		} else if (IS("threads")) { // 8 at once, each v[0] times v[1] bytes
			u64 *passed = mmap(0, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
			for (int t = 0; t < 8; t++)
				if (!fork()) { for (u64 k = 0; k < v[0]; k++) if (!os64(v[1], 0x10000 * (t + 1) + k, 0x40, 0, 0) && !status) __sync_fetch_and_add(passed, 1); _exit(0); }
			while (wait(0) > 0) ;
			printf("%s passed %llu\n", argv[i], (unsigned long long)*passed);
			continue;
		} else if (IS("forge")) { forge(v[0], v[1]); continue; }
		else if (IS("grab")) { // as race, but it keeps what it got
			struct params p = {.size = v[0]};
			pthread_t t;
			flipped = &p.size;
			flip_a = v[0];
			flip_b = v[1];
			stay_a = 20;
			racing = 1;
			pthread_create(&t, 0, flipper, 0);
			u64 asked = 0;
			while (counts().file <= v[2] && asked < 5000000) {
				struct nvos64 a = {CLIENT, CLIENT, (u32)(0x100 + asked), 0x40, (u64)&p, 0, sizeof(p), 0, 0, 0};
				if (!ioctl(fd, IOC(0x2b, sizeof(a)), &a) && counts().file <= v[2]) drop((u32)(0x100 + asked));
				asked++;
			}
			struct timespec now;
			clock_gettime(CLOCK_MONOTONIC, &now);
					printf("grabbed %llu at %llu asked %llu\n", (unsigned long long)counts().file, (unsigned long long)(now.tv_sec * 1000000000ull + now.tv_nsec), (unsigned long long)asked);
			sleep(30);
			continue;
		} else if (IS("hammer")) { // for so many ms: requests of so many bytes; how many passed
			struct timespec a, b;
			u64 asked = 0, passed = 0;
			clock_gettime(CLOCK_MONOTONIC, &a);
			do {
				if (++asked % 64 == 0 && !access("/tmp/stop", F_OK))
					break;
				if (!os64(v[1], 0x9000 + asked, 0x40, 0, 0)) passed++;
				clock_gettime(CLOCK_MONOTONIC, &b);
			} while ((u64)((b.tv_sec - a.tv_sec) * 1000 + (b.tv_nsec - a.tv_nsec) / 1000000) < v[0]);
			printf("hammer asked %llu passed %llu\n", (unsigned long long)asked, (unsigned long long)passed);
			continue;
		} else if (IS("race")) { // tries in all, small, big, limit; a process that was killed is replaced
			struct shared *s = mmap(0, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
			u64 killed = 0;
			while (s->passed + killed < v[0]) {
				pid_t p = fork();
				if (!p) {
					close(fd);
					fd = open("/dev/nvidiactl", O_RDWR | O_CLOEXEC);
					race(s, v[0], v[1], v[2], v[3]);
					_exit(0);
				}
				int w;
				waitpid(p, &w, 0);
				if (WIFSIGNALED(w)) killed++;
			}
			struct counts c = counts();
			printf("race tries %llu passed %llu killed %llu refused %llu escaped %llu most %llu taken-above %llu\n", (unsigned long long)s->tries,
			       (unsigned long long)s->passed, (unsigned long long)killed, (unsigned long long)s->refused, (unsigned long long)s->escaped, (unsigned long long)s->most, (unsigned long long)c.window);
			continue;
		} else if (IS("window") || IS("sharedwindow")) { // tries in the window, small, big, limit
			struct window *sum = mmap(0, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
			int pairs = v[0] >= PAIRS ? PAIRS : 1, failed = 0;
			fflush(stdout);
			for (int k = 0; k < pairs; k++) {
				if (fork())
					continue;
				u64 n = v[0] / pairs + ((u64)k < v[0] % pairs);
				// A pair stays on a processor: else each change of its page table waits for another's.
				cpu_set_t one;
				CPU_ZERO(&one);
				CPU_SET(k % sysconf(_SC_NPROCESSORS_ONLN), &one);
				sched_setaffinity(0, sizeof(one), &one);
				if (window(n, v[1], v[2], v[3], IS("sharedwindow")))
					_exit(1);
				u64 *to[] = {&sum->tries, &sum->inside, &sum->killed, &sum->survived, &sum->escaped}, from[] = {w.tries, w.inside, w.killed, w.survived, w.escaped};
				for (int j = 0; j < 5; j++)
					__sync_fetch_and_add(to[j], from[j]);
				_exit(0);
			}
			for (int w; wait(&w) > 0;)
				failed |= w;
			if (failed)
				return 1;
			w = *sum;
			struct counts c = counts();
			printf("%s tries %llu inside %llu taken-above %llu killed %llu survived %llu escaped %llu\n", name, (unsigned long long)w.tries, (unsigned long long)w.inside,
			       (unsigned long long)c.window, (unsigned long long)w.killed, (unsigned long long)w.survived, (unsigned long long)w.escaped);
			continue;
		} else if (IS("counts")) {
			struct counts c = counts();
			printf("counts held %llu peak %llu allocations %llu window %llu\n", (unsigned long long)c.held, (unsigned long long)c.peak, (unsigned long long)c.allocations, (unsigned long long)c.window);
			continue;
		} else if (IS("anew")) { struct counts c; rc = ioctl(fd, IOC(0xf1, 0), &c); }
		else { fprintf(stderr, "client: unknown step %s\n", argv[i]); return 2; }
		int e = rc < 0 ? errno : 0;
		follow();
		u32 st = status;
		printf("%s %d %u %llu\n", argv[i], e, st, fd < 0 ? 0ull : (unsigned long long)counts().file);
	}
	return 0;
}
