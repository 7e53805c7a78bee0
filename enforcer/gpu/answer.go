// SPDX-License-Identifier: Apache-2.0

package gpu

/*
#cgo linux CFLAGS: -D_GNU_SOURCE
#cgo linux LDFLAGS: -ldl -pthread
#include <dlfcn.h>
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <time.h>
#include <unistd.h>

#define LISTS 3
#define NOT_SUPPORTED 3
#define INSUFFICIENT_SIZE 7
#define FUNCTION_NOT_FOUND 13
#define ARGUMENT_VERSION_MISMATCH 25

// The layouts are NVML's, of versions 2 and 3 of the calls.
struct row { unsigned int pid; unsigned long long used; unsigned int gpu_instance, compute_instance; };
struct memory { unsigned int version; unsigned long long total, reserved, free, used; };
struct old_memory { unsigned long long total, free, used; };

struct calls {
	void *library;
	int busy; // questions that are being asked
	int (*handle)(const char *, void **);
	int (*list[LISTS])(void *, unsigned int *, struct row *);
	int (*memory)(void *, struct memory *);
	int (*old_memory)(void *, struct old_memory *); // NULL: the library has none
};

// Is told of answers. Questions that are being asked own it, too.
struct bell {
	int owners;
	int awaited; // questions that are being asked
	int told;    // an eventfd
};

// All that a device says at one time.
struct said {
	int list_ret[LISTS];
	unsigned int count[LISTS], room[LISTS];
	struct row *rows[LISTS];
	int memory_ret, memory_version;
	struct memory memory;
};

enum { IDLE, ASKED, ANSWERED };

// What one device says, and the thread that asks it. It is C's memory: a call that hangs goes on to
// own it.
struct answer {
	char *uuid;
	void *device; // NULL until it was found
	int question; // an eventfd, written for each
	int quit;
	int state; // idle and answered: Go's, else the thread's, with all that follows

	struct calls *calls; // of the question
	struct bell *bell;
	int patient;

	int unable; // the device cannot be found
	int same;   // it says what it said last
	int newest; // of said
	struct said said[2];
	long long began, took; // CLOCK_MONOTONIC, in ns
};

static const char *const list_names[LISTS][2] = {
	{"nvmlDeviceGetComputeRunningProcesses_v3", "nvmlDeviceGetComputeRunningProcesses_v2"},
	{"nvmlDeviceGetGraphicsRunningProcesses_v3", "nvmlDeviceGetGraphicsRunningProcesses_v2"},
	{"nvmlDeviceGetMPSComputeRunningProcesses_v3", "nvmlDeviceGetMPSComputeRunningProcesses_v2"},
};

// Finds the calls of a library that is loaded already, as the binding's are found: in what is loaded
// for all, so that who stands before the library there is asked here, too. NULL: it is not, or lacks one that must be
// there; then the binding's calls are used.
static struct calls *find_calls(const char *path)
{
	struct calls *c = calloc(1, sizeof(*c));
	int i;

	if (!c)
		return NULL;
	c->library = dlopen(path, RTLD_LAZY | RTLD_NOLOAD);
	if (!c->library) {
		free(c);
		return NULL;
	}
	*(void **)&c->handle = dlsym(RTLD_DEFAULT, "nvmlDeviceGetHandleByUUID");
	*(void **)&c->memory = dlsym(RTLD_DEFAULT, "nvmlDeviceGetMemoryInfo_v2");
	*(void **)&c->old_memory = dlsym(RTLD_DEFAULT, "nvmlDeviceGetMemoryInfo");
	for (i = 0; i < LISTS; i++) {
		*(void **)&c->list[i] = dlsym(RTLD_DEFAULT, list_names[i][0]);
		if (!c->list[i])
			*(void **)&c->list[i] = dlsym(RTLD_DEFAULT, list_names[i][1]);
	}
	// An MPS list of the first version only has other rows.
	if (!c->handle || !c->memory || !c->list[0] || !c->list[1] ||
	    (!c->list[2] && dlsym(RTLD_DEFAULT, "nvmlDeviceGetMPSComputeRunningProcesses"))) {
		dlclose(c->library);
		free(c);
		return NULL;
	}
	return c;
}

static int drop_calls(struct calls *c)
{
	int ret = dlclose(c->library);

	free(c);
	return ret;
}

// Asks for one list, with more room for as long as there are more rows than it had. NVML says how
// many there are; a few more may have come until it is asked again.
static int ask_list(const struct calls *c, void *device, struct said *s, int i)
{
	unsigned int tries, count;
	int ret = INSUFFICIENT_SIZE;

	for (tries = 0; tries < 8 && ret == INSUFFICIENT_SIZE; tries++) {
		if (s->room[i] == 0 || tries > 0) {
			unsigned int room = s->room[i] ? 2 * s->room[i] : 32;
			struct row *rows;

			if (tries > 0 && s->count[i] > room)
				room = s->count[i] + s->count[i] / 4;
			if (room > 1 << 20)
				break;
			rows = realloc(s->rows[i], room * sizeof(*rows));
			if (!rows)
				break;
			s->rows[i] = rows;
			s->room[i] = room;
		}
		count = s->room[i];
		ret = c->list[i](device, &count, s->rows[i]);
		s->count[i] = count;
	}
	return ret;
}

// Asks for the lists that there are, then for the memory, by the old call where a driver does not
// have the new one.
static void ask(const struct calls *c, void *device, struct said *s)
{
	struct old_memory old = {0};
	int i;

	for (i = 0; i < LISTS; i++) {
		s->count[i] = 0;
		s->list_ret[i] = c->list[i] ? ask_list(c, device, s, i) : 0;
	}
	memset(&s->memory, 0, sizeof(s->memory));
	s->memory.version = sizeof(s->memory) | 2 << 24;
	s->memory_version = 2;
	s->memory_ret = c->memory(device, &s->memory);
	if (c->old_memory && (s->memory_ret == NOT_SUPPORTED || s->memory_ret == FUNCTION_NOT_FOUND ||
			      s->memory_ret == ARGUMENT_VERSION_MISMATCH)) {
		s->memory_version = 1;
		s->memory_ret = c->old_memory(device, &old);
		s->memory.total = old.total;
		s->memory.free = old.free;
		s->memory.used = old.used;
	}
}

// Only what was answered whole is the same.
static int says_same(const struct said *a, const struct said *b)
{
	unsigned int k;
	int i;

	for (i = 0; i < LISTS; i++) {
		if (a->list_ret[i] != b->list_ret[i])
			return 0;
		if (i > 0 && (a->list_ret[i] == NOT_SUPPORTED || a->list_ret[i] == FUNCTION_NOT_FOUND))
			continue; // there is no such list
		if (a->list_ret[i] != 0 || a->count[i] != b->count[i] || a->count[i] > a->room[i] || b->count[i] > b->room[i])
			return 0;
		for (k = 0; k < a->count[i]; k++) {
			const struct row *x = &a->rows[i][k], *y = &b->rows[i][k];

			if (x->pid != y->pid || x->used != y->used || x->gpu_instance != y->gpu_instance)
				return 0;
		}
	}
	return a->memory_ret == 0 && b->memory_ret == 0 && a->memory_version == b->memory_version &&
	       a->memory.total == b->memory.total && a->memory.reserved == b->memory.reserved &&
	       a->memory.free == b->memory.free && a->memory.used == b->memory.used;
}

static long long monotonic_ns(void)
{
	struct timespec t;

	clock_gettime(CLOCK_MONOTONIC, &t);
	return t.tv_sec * 1000000000LL + t.tv_nsec;
}

static struct bell *make_bell(int told)
{
	struct bell *b = calloc(1, sizeof(*b));

	if (b) {
		b->owners = 1;
		b->told = told;
	}
	return b;
}

static void leave_bell(struct bell *b)
{
	if (__atomic_sub_fetch(&b->owners, 1, __ATOMIC_SEQ_CST) == 0) {
		close(b->told);
		free(b);
	}
}

static void answer_question(struct answer *a)
{
	struct bell *bell = a->bell;
	struct said *s;
	int tell;

	if (a->device || a->calls->handle(a->uuid, &a->device) == 0) {
		a->newest = !a->newest;
		s = &a->said[a->newest];
		a->began = monotonic_ns();
		ask(a->calls, a->device, s);
		a->took = monotonic_ns() - a->began;
		a->same = says_same(s, &a->said[!a->newest]);
	} else {
		a->device = NULL;
		a->unable = 1;
	}
	tell = !a->patient || !a->same || a->unable;
	// The library may be unloaded from here on.
	__atomic_sub_fetch(&a->calls->busy, 1, __ATOMIC_SEQ_CST);
	// And a may be asked again.
	__atomic_store_n(&a->state, ANSWERED, __ATOMIC_SEQ_CST);
	// Whoever is patient is told by the last.
	if (__atomic_sub_fetch(&bell->awaited, 1, __ATOMIC_SEQ_CST) == 0 || tell)
		eventfd_write(bell->told, 1);
	leave_bell(bell);
}

static void *answer_questions(void *arg)
{
	struct answer *a = arg;
	eventfd_t count;
	int i;

	pthread_setname_np(pthread_self(), "nvml");
	for (;;) {
		while (eventfd_read(a->question, &count) != 0)
			;
		if (__atomic_load_n(&a->state, __ATOMIC_SEQ_CST) == ASKED)
			answer_question(a);
		if (__atomic_load_n(&a->quit, __ATOMIC_SEQ_CST))
			break;
	}
	for (i = 0; i < LISTS; i++) {
		free(a->said[0].rows[i]);
		free(a->said[1].rows[i]);
	}
	close(a->question);
	free(a->uuid);
	free(a);
	return NULL;
}

static struct answer *make_answer(const char *uuid)
{
	struct answer *a = calloc(1, sizeof(*a));
	sigset_t all, old;
	pthread_attr_t attr;
	pthread_t thread;
	int failed;

	if (!a)
		return NULL;
	// What was never said is nothing that can be said again.
	a->said[0].memory_ret = a->said[1].memory_ret = -1;
	a->uuid = strdup(uuid);
	a->question = eventfd(0, EFD_CLOEXEC);
	failed = !a->uuid || a->question < 0;
	if (!failed) {
		pthread_attr_init(&attr);
		pthread_attr_setdetachstate(&attr, PTHREAD_CREATE_DETACHED);
		sigfillset(&all); // signals are for Go's threads
		pthread_sigmask(SIG_SETMASK, &all, &old);
		failed = pthread_create(&thread, &attr, answer_questions, a);
		pthread_sigmask(SIG_SETMASK, &old, NULL);
		pthread_attr_destroy(&attr);
	}
	if (failed) {
		if (a->question >= 0)
			close(a->question);
		free(a->uuid);
		free(a);
		return NULL;
	}
	return a;
}

static void drop_answer(struct answer *a)
{
	int question = a->question; // the thread frees a

	__atomic_store_n(&a->quit, 1, __ATOMIC_SEQ_CST);
	eventfd_write(question, 1);
}
*/
import "C"

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"runtime"
	"sync"
	"sync/atomic"
	"time"
	"unsafe"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
	"golang.org/x/sys/unix"

	"github.com/gpufence/gpufence/enforcer/monotonic"
)

// calls are NVML's calls that a sample makes, asked in one go by a thread of each device's own. The
// binding asks for a list of N processes in log2 N calls, as it begins with room for one row each
// time; and a call that blocks inside of Go's scheduler keeps one of its processors until a thread
// that polls for that takes it away. Together that was most of what gpufenced used.
// nil: the binding's calls are used.
type calls struct {
	mu sync.RWMutex
	c  *C.struct_calls
}

// find looks for the calls in the library that the binding has loaded from path.
func (c *calls) find(path string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.c != nil {
		return
	}
	name := C.CString(path)
	defer C.free(unsafe.Pointer(name))
	c.c = C.find_calls(name)
}

// has says whether they were found.
func (c *calls) has() bool {
	if c == nil {
		return false
	}
	c.mu.RLock()
	defer c.mu.RUnlock()
	return c.c != nil
}

// drop lets the library go, so that the binding can unload it. It waits for calls that are in
// progress, but not for one that hangs.
func (c *calls) drop(patience time.Duration) error {
	for deadline := monotonic.Now() + patience; ; time.Sleep(time.Millisecond) {
		if c.mu.TryLock() {
			if c.c == nil || counter(&c.c.busy).Load() == 0 {
				break
			}
			c.mu.Unlock()
		}
		if monotonic.Now() > deadline {
			return errors.New("let NVML go: a call is in progress")
		}
	}
	defer c.mu.Unlock()
	if c.c == nil {
		return nil
	}
	ret := C.drop_calls(c.c)
	c.c = nil
	if ret != 0 {
		return errors.New("let NVML go: dlclose fails")
	}
	return nil
}

// counter is a number of C's that threads change.
func counter(n *C.int) *atomic.Int32 {
	return (*atomic.Int32)(unsafe.Pointer(n))
}

// Bell is told of answers: a device's thread writes into an eventfd, everybody else calls ring.
type Bell struct {
	rung chan struct{}
	mu   sync.Mutex
	raw  *C.struct_bell // nil: closed, or there could be none, and no thread can be asked
	told *os.File
}

// NewBell makes one.
func NewBell() *Bell {
	b := &Bell{rung: make(chan struct{}, 1)}
	told, err := unix.Eventfd(0, unix.EFD_CLOEXEC|unix.EFD_NONBLOCK)
	if err != nil {
		return b
	}
	// Threads have one of their own, as they may outlive what Go knows of it.
	theirs, err := unix.FcntlInt(uintptr(told), unix.F_DUPFD_CLOEXEC, 0)
	b.told = os.NewFile(uintptr(told), "NVML's answers")
	raw, connErr := b.told.SyscallConn()
	if err != nil || connErr != nil {
		return b
	}
	if b.raw = C.make_bell(C.int(theirs)); b.raw == nil {
		_ = unix.Close(theirs) // nobody has it
		return b
	}
	go b.listen(raw.Read)
	return b
}

// listen rings for threads until the bell is closed. Reading cannot block the thread, so Go's scheduler
// is not told of it: that would wake its monitor, which then polls for a millisecond.
func (b *Bell) listen(read func(func(uintptr) bool) error) {
	for {
		var count uint64
		var failed unix.Errno
		err := read(func(fd uintptr) bool {
			_, _, failed = unix.RawSyscall(unix.SYS_READ, fd, uintptr(unsafe.Pointer(&count)), unsafe.Sizeof(count))
			return failed != unix.EAGAIN
		})
		if err != nil || failed != 0 && failed != unix.EINTR {
			return // closed
		}
		b.ring()
	}
}

func (b *Bell) ring() {
	select {
	case b.rung <- struct{}{}:
	default: // it has, and nobody has looked yet
	}
}

// C can be received from when there is something to take.
func (b *Bell) C() <-chan struct{} { return b.rung }

// Close lets go. Samples that were asked for with it may be in progress still.
func (b *Bell) Close() error {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.raw != nil {
		C.leave_bell(b.raw)
		b.raw = nil
	}
	if b.told == nil {
		return nil
	}
	err := b.told.Close()
	b.told = nil
	return err
}

// join is for a question that begins: it is one more that owns the bell and is awaited.
func (b *Bell) join() *C.struct_bell {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.raw != nil {
		counter(&b.raw.owners).Add(1)
		counter(&b.raw.awaited).Add(1)
	}
	return b.raw
}

// asked is a device as its thread asks it.
type asked struct {
	answer *C.struct_answer
	last   Sample // what the newest answer that was taken says
}

func newAsked(uuid string) *asked {
	name := C.CString(uuid)
	defer C.free(unsafe.Pointer(name))
	a := &asked{answer: C.make_answer(name)}
	if a.answer == nil {
		return nil
	}
	// Nobody can be inside a call with it once it cannot be reached: a call keeps it alive.
	runtime.AddCleanup(a, func(answer *C.struct_answer) { C.drop_answer(answer) }, a.answer)
	return a
}

// ask implements [asker].
func (d *device) ask(bell *Bell, patient bool) (begun bool, err error) {
	if d.calls == nil {
		return false, nil
	}
	d.calls.mu.RLock()
	defer d.calls.mu.RUnlock()
	if d.calls.c == nil {
		return false, fmt.Errorf("ask NVML: %w", fs.ErrClosed)
	}
	d.thread.Lock()
	defer d.thread.Unlock()
	if d.unable {
		return false, nil
	}
	if d.asked == nil {
		if d.asked = newAsked(d.info.UUID); d.asked == nil {
			d.unable = true
			return false, nil
		}
	}
	a := d.asked.answer
	state := counter(&a.state)
	if state.Load() != C.IDLE {
		return false, nil // by another sampler
	}
	raw := bell.join()
	if raw == nil {
		return false, nil
	}
	counter(&d.calls.c.busy).Add(1)
	a.calls, a.bell, a.patient = d.calls.c, raw, 0
	if patient {
		a.patient = 1
	}
	state.Store(C.ASKED)
	// It cannot block, so Go's scheduler is not told of it, see listen. Nor can it fail: nobody else
	// writes, and the descriptor is ours.
	one := uint64(1)
	_, _, _ = unix.RawSyscall(unix.SYS_WRITE, uintptr(a.question), uintptr(unsafe.Pointer(&one)), unsafe.Sizeof(one))
	return true, nil
}

// answered implements [asker].
func (d *device) answered() (s Sample, there, able bool) {
	d.thread.Lock()
	defer d.thread.Unlock()
	a := d.asked.answer
	if counter(&a.state).Load() != C.ANSWERED {
		return s, false, true
	}
	if a.unable != 0 {
		d.unable = true
	} else {
		d.asked.take(d, &s)
	}
	counter(&a.state).Store(C.IDLE)
	return s, true, !d.unable
}

// take takes the answer over.
func (a *asked) take(d *device, s *Sample) {
	raw := a.answer
	began, took := time.Duration(raw.began), time.Duration(raw.took)
	if raw.same != 0 {
		*s = a.last
		s.Began, s.Took, s.Wall = began, took, wallOf(began)
		a.last = *s
		return
	}
	said := &raw.said[raw.newest]
	var to Answer
	for i, list := range Lists {
		r := nvml.Return(said.list_ret[i])
		if listMissing(list, r) {
			continue
		}
		if to.Err[i] = check(listCalls[list], r); to.Err[i] != nil {
			continue
		}
		if said.count[i] > said.room[i] {
			to.Err[i] = fmt.Errorf("%s: answered %d rows, there was room for %d", listCalls[list], said.count[i], said.room[i])
			continue
		}
		to.Rows[i] = make([]Process, 0, said.count[i])
		for _, row := range unsafe.Slice(said.rows[i], said.count[i]) {
			if p, ours := d.process(uint32(row.pid), uint64(row.used), uint32(row.gpu_instance)); ours {
				to.Rows[i] = append(to.Rows[i], p)
			}
		}
	}
	m, call := &said.memory, "nvmlDeviceGetMemoryInfo_v2"
	if said.memory_version == 1 {
		call = "nvmlDeviceGetMemoryInfo"
	}
	to.MemoryErr = check(call, nvml.Return(said.memory_ret))
	switch {
	case to.MemoryErr != nil:
	case said.memory_version == 1:
		to.Memory = Memory{TotalBytes: uint64(m.total), UsedBytes: uint64(m.used), FreeBytes: uint64(m.free)}
	default:
		to.Memory = memoryV2(uint64(m.total), uint64(m.reserved), uint64(m.free), uint64(m.used))
	}
	*s = sampleOf(d.info, &to, began, took)
	a.last = *s
}
