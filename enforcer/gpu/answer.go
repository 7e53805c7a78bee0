// SPDX-License-Identifier: Apache-2.0

package gpu

/*
#cgo linux CFLAGS: -D_GNU_SOURCE
#cgo linux LDFLAGS: -ldl -pthread
#include <dlfcn.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

#define LISTS 3
#define INSUFFICIENT_SIZE 7

// The layouts are NVML's, of versions 2 and 3 of the calls.
struct row { unsigned int pid; unsigned long long used; unsigned int gpu_instance, compute_instance; };
struct memory { unsigned int version; unsigned long long total, reserved, free, used; };

struct calls {
	void *library;
	int (*handle)(const char *, void **);
	int (*list[LISTS])(void *, unsigned int *, struct row *);
	int (*memory)(void *, struct memory *);
};

// What one device says, and the thread that asks it. It is C's memory: a call that hangs goes on to
// own it.
struct answer {
	void *device;
	const struct calls *calls; // of the question that is being asked
	int question;              // an eventfd, written for each
	int told;                  // an eventfd, written when the answer is there
	atomic_int quit;
	int list_ret[LISTS];
	unsigned int count[LISTS], room[LISTS];
	struct row *rows[LISTS];
	int memory_ret;
	struct memory memory;
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
static int ask_list(const struct calls *c, struct answer *a, int i)
{
	unsigned int tries, count;
	int ret = INSUFFICIENT_SIZE;

	for (tries = 0; tries < 8 && ret == INSUFFICIENT_SIZE; tries++) {
		if (a->room[i] == 0 || tries > 0) {
			unsigned int room = a->room[i] ? 2 * a->room[i] : 32;
			struct row *rows;

			if (tries > 0 && a->count[i] > room)
				room = a->count[i] + a->count[i] / 4;
			if (room > 1 << 20)
				break;
			rows = realloc(a->rows[i], room * sizeof(*rows));
			if (!rows)
				break;
			a->rows[i] = rows;
			a->room[i] = room;
		}
		count = a->room[i];
		ret = c->list[i](a->device, &count, a->rows[i]);
		a->count[i] = count;
	}
	return ret;
}

// Asks for the lists that there are, then for the memory.
static void ask(const struct calls *c, struct answer *a)
{
	int i;

	for (i = 0; i < LISTS; i++) {
		a->count[i] = 0;
		a->list_ret[i] = c->list[i] ? ask_list(c, a, i) : 0;
	}
	memset(&a->memory, 0, sizeof(a->memory));
	a->memory.version = sizeof(a->memory) | 2 << 24;
	a->memory_ret = c->memory(a->device, &a->memory);
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
		if (atomic_load(&a->quit))
			break;
		ask(a->calls, a);
		eventfd_write(a->told, 1);
	}
	for (i = 0; i < LISTS; i++)
		free(a->rows[i]);
	close(a->question);
	close(a->told);
	free(a);
	return NULL;
}

// told is the caller's to close if it is NULL.
static struct answer *find_device(const struct calls *c, const char *uuid, int told)
{
	struct answer *a = calloc(1, sizeof(*a));
	sigset_t all, old;
	pthread_attr_t attr;
	pthread_t thread;
	int failed;

	if (!a)
		return NULL;
	if (c->handle(uuid, &a->device) != 0) {
		free(a);
		return NULL;
	}
	a->told = told;
	a->question = eventfd(0, EFD_CLOEXEC);
	if (a->question < 0) {
		free(a);
		return NULL;
	}
	pthread_attr_init(&attr);
	pthread_attr_setdetachstate(&attr, PTHREAD_CREATE_DETACHED);
	sigfillset(&all); // signals are for Go's threads
	pthread_sigmask(SIG_SETMASK, &all, &old);
	failed = pthread_create(&thread, &attr, answer_questions, a);
	pthread_sigmask(SIG_SETMASK, &old, NULL);
	pthread_attr_destroy(&attr);
	if (failed) {
		close(a->question);
		free(a);
		return NULL;
	}
	return a;
}

static void drop_device(struct answer *a)
{
	int question = a->question; // the thread frees a

	atomic_store(&a->quit, 1);
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
	"syscall"
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
	mu sync.RWMutex // held for reading while NVML is asked
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

// drop lets the library go, so that the binding can unload it. It waits for calls that are in
// progress, but not for one that hangs.
func (c *calls) drop(patience time.Duration) error {
	for deadline := monotonic.Now() + patience; !c.mu.TryLock(); time.Sleep(time.Millisecond) {
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

// asked is a device as [calls] know it.
type asked struct {
	calls  *calls
	mu     sync.Mutex // held over a question
	answer *C.struct_answer
	told   *os.File // an eventfd: it can be read when the answer is there
	raw    syscall.RawConn
}

// device finds a GPU or an instance. nil if it cannot be had this way.
func (c *calls) device(uuid string) *asked {
	c.mu.RLock()
	defer c.mu.RUnlock()
	if c.c == nil {
		return nil
	}
	name := C.CString(uuid)
	defer C.free(unsafe.Pointer(name))
	told, err := unix.Eventfd(0, unix.EFD_CLOEXEC|unix.EFD_NONBLOCK)
	if err != nil {
		return nil
	}
	// The thread has one of its own, as it may outlive what Go knows of it.
	theirs, err := unix.FcntlInt(uintptr(told), unix.F_DUPFD_CLOEXEC, 0)
	a := &asked{calls: c, told: os.NewFile(uintptr(told), "NVML's answer")}
	if err == nil {
		if a.answer = C.find_device(c.c, name, C.int(theirs)); a.answer == nil {
			err = unix.Close(theirs)
		}
	}
	if err == nil {
		a.raw, err = a.told.SyscallConn()
	}
	if err != nil || a.answer == nil {
		if a.answer != nil {
			C.drop_device(a.answer)
		}
		_ = a.told.Close() // nobody has it
		return nil
	}
	// Nobody can be inside a call with it once it cannot be reached: a call keeps it alive.
	runtime.AddCleanup(a, func(answer *C.struct_answer) { C.drop_device(answer) }, a.answer)
	return a
}

// Answer implements [answerer].
func (d *device) Answer() (a Answer, ok bool) {
	if d.asked == nil {
		return a, false
	}
	c := d.asked.calls
	c.mu.RLock()
	defer c.mu.RUnlock()
	if c.c == nil {
		return a.failed(fmt.Errorf("ask NVML: %w", fs.ErrClosed)), true
	}
	d.asked.mu.Lock()
	defer d.asked.mu.Unlock()
	if err := d.asked.ask(c.c); err != nil {
		return a.failed(err), true
	}
	d.asked.read(d, &a)
	return a, true
}

// ask puts the question and waits for the answer, which outlives whoever waits for it. Neither call
// of the kernel can block, so Go's scheduler is not told of them: that would wake its monitor, which
// then polls for a millisecond.
func (a *asked) ask(c *C.struct_calls) error {
	a.answer.calls = c
	count, failed := uint64(1), unix.Errno(0)
	if _, _, failed = unix.RawSyscall(unix.SYS_WRITE, uintptr(a.answer.question), uintptr(unsafe.Pointer(&count)), unsafe.Sizeof(count)); failed != 0 {
		return fmt.Errorf("ask NVML: %w", failed)
	}
	err := a.raw.Read(func(fd uintptr) bool {
		_, _, failed = unix.RawSyscall(unix.SYS_READ, fd, uintptr(unsafe.Pointer(&count)), unsafe.Sizeof(count))
		return failed != unix.EAGAIN
	})
	if err == nil && failed != 0 {
		err = failed
	}
	if err != nil {
		return fmt.Errorf("wait for NVML: %w", err)
	}
	return nil
}

// read takes the answer over.
func (a *asked) read(d *device, to *Answer) {
	raw := a.answer
	for i, list := range Lists {
		r := nvml.Return(raw.list_ret[i])
		if listMissing(list, r) {
			continue
		}
		if to.Err[i] = check(listCalls[list], r); to.Err[i] != nil {
			continue
		}
		if raw.count[i] > raw.room[i] {
			to.Err[i] = fmt.Errorf("%s: answered %d rows, there was room for %d", listCalls[list], raw.count[i], raw.room[i])
			continue
		}
		to.Rows[i] = make([]Process, 0, raw.count[i])
		for _, row := range unsafe.Slice(raw.rows[i], raw.count[i]) {
			if p, ours := d.process(uint32(row.pid), uint64(row.used), uint32(row.gpu_instance)); ours {
				to.Rows[i] = append(to.Rows[i], p)
			}
		}
	}
	m := &raw.memory
	switch r := nvml.Return(raw.memory_ret); r {
	case nvml.SUCCESS:
		to.Memory = memoryV2(uint64(m.total), uint64(m.reserved), uint64(m.free), uint64(m.used))
	default:
		to.Memory, to.MemoryErr = d.Memory() // knows what to do where the new call is not supported
	}
	runtime.KeepAlive(a)
}
