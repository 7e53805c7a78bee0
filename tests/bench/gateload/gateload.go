// SPDX-License-Identifier: Apache-2.0

// Package gateload measures what the gate's door adds to an ioctl, with the gate's own code on a carrier that the
// kernel at hand takes. It guards nothing: whatever it asks for goes to /dev/null.
package gateload

import (
	"cmp"
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
	"slices"
	"strconv"
	"strings"
	"syscall"

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

// Cost is nanoseconds of CPU time an ioctl, each kind in turn with the others. A sample is some hundred calls, and of all
// samples of a kind it has the quietest tenth: who shares a processor's caches and execution units slows any code down, and
// longer code by more. Which these are, other calls say, made between the samples, and nothing that is measured.
type Cost struct {
	None      []float64 // no program
	Empty     []float64 // one that does nothing
	Unmanaged []float64 // of a task in no managed cgroup
	Managed   []float64 // a request that asks for no memory
	Charged   []float64 // an allocation within the limit
	Denied    []float64 // one above it
}

// A sample is so many calls as allocations are held at a time: as many as a large program has. They are freed
// outside of what is measured. Where all of the table of objects were filled, a sample would be of cold memory.
const (
	calls = 12800 // of one kind in a round
	held  = 256
	asked = 64 << 10
)

// ErrRefused says that this kernel takes no such program.
var ErrRefused = errors.New("the kernel takes no program on " + Carrier)

// Measure makes so many rounds.
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
	var none, empty, unmanaged, managedOnes, charged, denied samples
	sample := func(to *samples, dir, what string) error {
		more, err := work(ctx, dir, what, calls)
		*to = append(*to, more...)
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
			sample(&none, other, "control"),
			with(objs.Empty, func() error { return sample(&empty, other, "control") }),
			with(objs.DoorOnEnter, func() error {
				return errors.Join(
					sample(&unmanaged, other, "alloc"),
					sample(&managedOnes, managed, "control"),
					sample(&charged, managed, "alloc"),
					limit(0),
					sample(&denied, managed, "alloc"),
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
	return Cost{None: none.quietest(), Empty: empty.quietest(), Unmanaged: unmanaged.quietest(), Managed: managedOnes.quietest(),
		Charged: charged.quietest(), Denied: denied.quietest()}, nil
}

// sample is what a call took, and what one of the control took right before and after, the longer of both.
type sample struct{ ns, control float64 }

type samples []sample

// quietest are the calls of the tenth of samples around which the control took least.
func (s samples) quietest() []float64 {
	s = slices.Clone(s)
	slices.SortStableFunc(s, func(a, b sample) int { return cmp.Compare(a.control, b.control) })
	var ns []float64
	for _, one := range s[:(len(s)+9)/10] {
		ns = append(ns, one.ns)
	}
	return ns
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
func work(ctx context.Context, dir, what string, n int) (all samples, err error) {
	fd, err := os.Open(dir)
	if err != nil {
		return nil, fmt.Errorf("open cgroup: %w", err)
	}
	defer fd.Close()
	cmd := exec.CommandContext(ctx, "/proc/self/exe", Command, what, strconv.Itoa(n))
	cmd.SysProcAttr = &syscall.SysProcAttr{UseCgroupFD: true, CgroupFD: int(fd.Fd())}
	cmd.Stderr = os.Stderr
	out, err := cmd.Output()
	if err != nil {
		return nil, fmt.Errorf("make calls in %s: %w", dir, err)
	}
	for line := range strings.Lines(string(out)) {
		var one sample
		if _, err := fmt.Sscan(line, &one.ns, &one.control); err != nil {
			return nil, fmt.Errorf("read what calls took: %w", err)
		}
		all = append(all, one)
	}
	return all, nil
}

// Work makes calls and prints what one took, and one of the control, a line a sample: args are what to ask for, and how often.
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
	call := func(cmd uintptr, from, to int) {
		for i := from; i < to; i++ {
			binary.NativeEndian.PutUint32(handle, uint32(i)+1)
			_, _, _ = unix.RawSyscall(unix.SYS_IOCTL, fd, cmd, at) // /dev/null takes none
		}
	}
	took := func(n int, f func()) float64 {
		var before, after unix.Timespec
		_ = unix.ClockGettime(unix.CLOCK_THREAD_CPUTIME_ID, &before) // cannot fail with this clock
		f()
		_ = unix.ClockGettime(unix.CLOCK_THREAD_CPUTIME_ID, &after)
		return float64(after.Nano()-before.Nano()) / float64(n)
	}
	control := func() float64 {
		return took(held, func() {
			for range held {
				_, _, _ = unix.RawSyscall(unix.SYS_GETPPID, 0, 0, 0)
			}
		})
	}
	var out strings.Builder
	for from := 0; from < n; from += held {
		to := min(n, from+held)
		before := control()
		ns := took(to-from, func() { call(cmd, from, to) })
		fmt.Fprintln(&out, ns, max(before, control()))
		call(3<<30|16<<16|'F'<<8|0x29, from, to)
	}
	if _, err := os.Stdout.WriteString(out.String()); err != nil {
		return fmt.Errorf("tell: %w", err)
	}
	return nil
}
