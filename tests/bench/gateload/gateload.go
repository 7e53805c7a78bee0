// SPDX-License-Identifier: Apache-2.0

// Package gateload measures what the gate's door adds to an ioctl, with the gate's own code on a carrier that the
// kernel at hand takes. It guards nothing: whatever it asks for goes to /dev/null.
package gateload

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"runtime"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"golang.org/x/sys/unix"
)

//go:generate ./generate

// Carrier is what the door's code hangs on.
const Carrier = "tp_btf/sys_enter"

// Command is the argument by which the program that calls [Measure] is started again to make the calls; its main
// calls [Work] then.
const Command = "gate-load"

// Cost is nanoseconds of CPU time an ioctl, a sample a round, each round side by side.
type Cost struct {
	None      []float64 // no program
	Empty     []float64 // one that does nothing
	Unmanaged []float64 // of a task in no managed cgroup
	Managed   []float64 // a request that asks for no memory
	Charged   []float64 // an allocation within the limit
	Denied    []float64 // one above it
}

// A sample is so many calls, and so many allocations are held at a time: as many as a large program has. They are freed
// outside of what is measured. Where all of the table of objects were filled, a sample would be of cold memory.
const (
	calls = 51200
	held  = 256
	asked = 64 << 10
)

// ErrRefused says that this kernel takes no such program.
var ErrRefused = errors.New("the kernel takes no program on " + Carrier)

// Measure does.
func Measure(ctx context.Context, rounds int) (c Cost, err error) {
	root, err := unifiedRoot()
	if err != nil {
		return c, err
	}
	var objs benchObjects
	if err := loadBenchObjects(&objs, nil); err != nil {
		first, _, _ := strings.Cut(err.Error(), "\n")
		return c, fmt.Errorf("%w: %s", ErrRefused, first)
	}
	defer func() { err = errors.Join(err, objs.Close()) }()
	managed, id, err := cgroup(root, "managed")
	if err != nil {
		return c, err
	}
	defer func() { err = errors.Join(err, os.Remove(managed)) }()
	other, _, err := cgroup(root, "other")
	if err != nil {
		return c, err
	}
	defer func() { err = errors.Join(err, os.Remove(other)) }()

	const null, ctl = 1<<20 | 3, 1
	limit := func(bytes uint64) error {
		return objs.Policies.Put(id, &benchPolicy{Limit: bytes, Flags: 1 | 8}) // enforced, with a GPU
	}
	err = errors.Join(objs.Majors.Put(uint32(null>>20), uint32(1)), objs.Devices.Put(uint32(null), uint32(ctl)), objs.Configuration.Put(uint32(0), &benchSettings{CreditFrees: 1, EventsPerSecond: 10}),
		objs.Usages.Put(id, &benchUsage{}), limit(math.MaxUint64))
	if err != nil {
		return c, fmt.Errorf("set the measured gate up: %w", err)
	}
	sample := func(to *[]float64, dir, what string, n int) error {
		ns, err := work(ctx, dir, what, n)
		*to = append(*to, ns)
		return err
	}
	with := func(p *ebpf.Program, f func() error) error {
		l, err := link.AttachTracing(link.TracingOptions{Program: p})
		if err != nil {
			return fmt.Errorf("%w: %w", ErrRefused, err)
		}
		return errors.Join(f(), l.Close())
	}
	for range rounds {
		err := errors.Join(
			sample(&c.None, other, "control", calls),
			with(objs.Empty, func() error { return sample(&c.Empty, other, "control", calls) }),
			with(objs.DoorOnEnter, func() error {
				return errors.Join(
					sample(&c.Unmanaged, other, "alloc", calls),
					sample(&c.Managed, managed, "control", calls),
					sample(&c.Charged, managed, "alloc", calls),
					limit(0),
					sample(&c.Denied, managed, "alloc", calls),
					limit(math.MaxUint64))
			}))
		if err != nil {
			return c, err
		}
	}
	var u benchUsage
	if err := objs.Usages.Lookup(id, &u); err != nil {
		return c, fmt.Errorf("read what was charged: %w", err)
	}
	if want := uint64(rounds * calls); u.Charged != want*asked || u.Denied != want || u.Used != 0 {
		return c, fmt.Errorf("measure the gate: %d of %d bytes were charged, %d stay so, and %d of %d calls were denied: the programs did not see them", u.Charged, want*asked, u.Used, u.Denied, want)
	}
	return c, nil
}

func unifiedRoot() (string, error) {
	for _, dir := range []string{"/sys/fs/cgroup", "/sys/fs/cgroup/unified"} {
		var s unix.Statfs_t
		if err := unix.Statfs(dir, &s); err == nil && s.Type == unix.CGROUP2_SUPER_MAGIC {
			return dir, nil
		}
	}
	return "", errors.New("find the cgroup v2 tree: it is mounted at neither /sys/fs/cgroup nor /sys/fs/cgroup/unified")
}

func cgroup(root, name string) (dir string, id uint64, err error) {
	dir = filepath.Join(root, "gpufence-bench-"+strconv.Itoa(os.Getpid())+"-"+name)
	if err := os.Mkdir(dir, 0o755); err != nil {
		return "", 0, fmt.Errorf("make a cgroup: %w", err)
	}
	var s unix.Stat_t
	if err := unix.Stat(dir, &s); err != nil {
		return "", 0, errors.Join(fmt.Errorf("look at cgroup %s: %w", dir, err), os.Remove(dir))
	}
	return dir, s.Ino, nil
}

// work starts the program again, in a cgroup.
func work(ctx context.Context, dir, what string, n int) (ns float64, err error) {
	fd, err := os.Open(dir)
	if err != nil {
		return 0, fmt.Errorf("open cgroup: %w", err)
	}
	defer fd.Close()
	cmd := exec.CommandContext(ctx, "/proc/self/exe", Command, what, strconv.Itoa(n))
	cmd.SysProcAttr = &syscall.SysProcAttr{UseCgroupFD: true, CgroupFD: int(fd.Fd())}
	cmd.Stderr = os.Stderr
	out, err := cmd.Output()
	if err != nil {
		return 0, fmt.Errorf("make calls in %s: %w", dir, err)
	}
	if ns, err = strconv.ParseFloat(strings.TrimSpace(string(out)), 64); err != nil {
		return 0, fmt.Errorf("read what calls took: %w", err)
	}
	return ns, nil
}

// Work makes calls and prints what one took: args are what to ask for, and how often.
func Work(args []string) error {
	if len(args) != 2 {
		return fmt.Errorf("make calls: want a kind and a number, got %q", args)
	}
	n, err := strconv.Atoi(args[1])
	if err != nil {
		return fmt.Errorf("make calls: %w", err)
	}
	f, err := os.OpenFile("/dev/null", os.O_RDWR, 0)
	if err != nil {
		return fmt.Errorf("open /dev/null: %w", err)
	}
	defer f.Close()
	page, err := unix.Mmap(-1, 0, 4096, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
	if err != nil {
		return fmt.Errorf("map a page: %w", err)
	}
	at := reflect.ValueOf(page).Pointer() // mapped memory does not move
	binary.NativeEndian.PutUint32(page[0:], 1)
	binary.NativeEndian.PutUint32(page[12:], 0x40)
	binary.NativeEndian.PutUint64(page[16:], uint64(at)+512)
	binary.NativeEndian.PutUint32(page[32:], 128)
	binary.NativeEndian.PutUint64(page[512+64:], asked)
	handle := page[8:12]
	cmd := uintptr(3<<30 | 48<<16 | 'F'<<8 | 0x2b)
	switch args[0] {
	case "alloc":
	case "control":
		cmd = 3<<30 | 32<<16 | 'F'<<8 | 0x2a
	default:
		return fmt.Errorf("make calls: unknown kind %q", args[0])
	}
	fd := f.Fd()
	runtime.LockOSThread()
	var took time.Duration
	call := func(cmd uintptr, from, to int) {
		for i := from; i < to; i++ {
			binary.NativeEndian.PutUint32(handle, uint32(i)+1)
			_, _, _ = unix.RawSyscall(unix.SYS_IOCTL, fd, cmd, at) // /dev/null takes none
		}
	}
	for from := 0; from < n; from += held {
		to := min(n, from+held)
		var before, after unix.Timespec
		_ = unix.ClockGettime(unix.CLOCK_THREAD_CPUTIME_ID, &before) // cannot fail with this clock
		call(cmd, from, to)
		_ = unix.ClockGettime(unix.CLOCK_THREAD_CPUTIME_ID, &after)
		took += time.Duration(after.Nano() - before.Nano())
		call(3<<30|16<<16|'F'<<8|0x29, from, to)
	}
	if _, err := fmt.Println(float64(took.Nanoseconds()) / float64(n)); err != nil {
		return fmt.Errorf("tell: %w", err)
	}
	return nil
}
