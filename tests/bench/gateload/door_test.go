// SPDX-License-Identifier: Apache-2.0

package gateload

import (
	"bufio"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"strconv"
	"syscall"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"golang.org/x/sys/unix"
)

// asks is the argument by which the test is started again to ask as it is told to.
const asks = "ask"

const (
	mib      = 1 << 20
	theFile  = uint64(1) // that all requests go through, whatever they go through
	someFlag = uint32(benchPolicyFlagsF_GPU)
)

// ask makes a call for each line, "alloc HANDLE BYTES" or "free HANDLE", or several, with handles that follow one another:
// "alloc HANDLE BYTES COUNT".
func ask(in io.Reader, out io.Writer) error {
	f, err := os.OpenFile("/dev/null", os.O_RDWR, 0)
	if err != nil {
		return err
	}
	defer f.Close()
	page, err := unix.Mmap(-1, 0, 4096, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
	if err != nil {
		return err
	}
	at := reflect.ValueOf(page).Pointer() // mapped memory does not move
	binary.NativeEndian.PutUint32(page[0:], 1)
	binary.NativeEndian.PutUint32(page[12:], 0x40)
	binary.NativeEndian.PutUint64(page[16:], uint64(at)+512)
	for lines := bufio.NewScanner(in); lines.Scan(); {
		var handle uint32
		var bytes uint64
		count := uint32(1)
		cmd := uintptr(3<<30 | 48<<16 | 'F'<<8 | 0x2b)
		if n, err := fmt.Sscanf(lines.Text(), "alloc %d %d %d", &handle, &bytes, &count); n < 2 {
			if _, ferr := fmt.Sscanf(lines.Text(), "free %d", &handle); ferr != nil {
				return errors.Join(err, ferr)
			}
			cmd = 3<<30 | 16<<16 | 'F'<<8 | 0x29
		}
		binary.NativeEndian.PutUint64(page[512+64:], bytes)
		for i := range count {
			binary.NativeEndian.PutUint32(page[8:], handle+i)
			_, _, _ = unix.Syscall(unix.SYS_IOCTL, f.Fd(), cmd, at) // /dev/null takes none
		}
		if _, err := fmt.Fprintln(out, "asked"); err != nil {
			return err
		}
	}
	return nil
}

// door is the gate's code on this kernel's carrier, and a process that asks.
type door struct {
	t    *testing.T
	objs benchObjects
	in   io.Writer
	out  *bufio.Reader
	pid  int
}

// newDoor has a process ask from a cgroup.
func newDoor(t *testing.T, dir string) *door {
	t.Helper()
	d := &door{t: t}
	if err := loadBenchObjects(&d.objs, nil); err != nil {
		if os.Getenv("GPUFENCE_MUST") == "1" {
			t.Fatal(err)
		}
		t.Skipf("SKIPPED: %v: %v", ErrRefused, err)
	}
	t.Cleanup(func() { _ = d.objs.Close() })
	l, err := link.AttachTracing(link.TracingOptions{Program: d.objs.DoorOnEnter})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = l.Close() })
	const null = 1<<20 | 3
	d.check(errors.Join(d.objs.Majors.Put(uint32(null>>20), uint32(1)), d.objs.Devices.Put(uint32(null), uint32(benchKindKIND_CTL)),
		d.objs.Configuration.Put(uint32(0), &benchSettings{CreditFrees: 1})))
	fd, err := os.Open(dir)
	d.check(err)
	defer fd.Close()
	cmd := exec.CommandContext(context.WithoutCancel(t.Context()), "/proc/self/exe", asks) // it ends with its input
	cmd.SysProcAttr = &syscall.SysProcAttr{UseCgroupFD: true, CgroupFD: int(fd.Fd())}
	cmd.Stderr = os.Stderr
	in, err := cmd.StdinPipe()
	d.check(err)
	out, err := cmd.StdoutPipe()
	d.check(err)
	d.check(cmd.Start())
	d.in, d.out, d.pid = in, bufio.NewReader(out), cmd.Process.Pid
	t.Cleanup(func() {
		if err := errors.Join(in.Close(), cmd.Wait()); err != nil {
			t.Error(err)
		}
	})
	return d
}

func (d *door) check(err error) {
	d.t.Helper()
	if err != nil {
		d.t.Fatal(err)
	}
}

func (d *door) ask(format string, args ...any) {
	d.t.Helper()
	_, err := fmt.Fprintf(d.in, format+"\n", args...)
	d.check(err)
	_, err = d.out.ReadString('\n')
	d.check(err)
}

// begin says that policies have changed, and adjust what gpufenced adds to an account.
func (d *door) begin() { d.adjust(benchAdjust{Begin: 1}) }

func (d *door) adjust(a benchAdjust) {
	d.t.Helper()
	_, err := d.objs.AdjustUsage.Run(&ebpf.RunOptions{Context: &a})
	d.check(err)
}

func (d *door) manage(id, limit uint64, flags uint32) {
	d.t.Helper()
	err := d.objs.Usages.Update(id, &benchUsage{}, ebpf.UpdateNoExist)
	if err != nil && !errors.Is(err, ebpf.ErrKeyExist) {
		d.t.Fatal(err)
	}
	d.check(d.objs.Policies.Put(id, &benchPolicy{Limit: limit, Flags: flags}))
	d.begin()
}

func (d *door) used(when string, id, want uint64) {
	d.t.Helper()
	var u benchUsage
	d.check(d.objs.Usages.Lookup(id, &u))
	if u.Used != want {
		d.t.Errorf("%s: %d KiB charged, want %d", when, int64(u.Used)>>10, want>>10)
	}
}

// closed is what the kernel says of the file, with all that was got through it: whatever is opened next may lie where it lay.
func (d *door) closed(id uint64) {
	d.t.Helper()
	var o benchOwner
	d.check(d.objs.Files.Lookup(theFile, &o))
	d.check(d.objs.Files.Delete(theFile))
	d.adjust(benchAdjust{Cgroup: id, Bytes: -int64(o.Shares[0].Bytes)})
}

// inCgroups makes cgroups below one another, and takes them away at the end.
func inCgroups(t *testing.T, names ...string) (dirs []string, ids []uint64) {
	t.Helper()
	root, err := unifiedRoot()
	if err == nil && os.Geteuid() != 0 {
		err = os.ErrPermission
	}
	if err != nil {
		if os.Getenv("GPUFENCE_MUST") == "1" {
			t.Fatal(err)
		}
		t.Skipf("SKIPPED: %v", err)
	}
	for _, name := range names {
		dir, id, err := cgroup(root, t.Name()+name)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			if err := os.Remove(dir); err != nil {
				t.Error(err)
			}
		})
		root = dir
		dirs, ids = append(dirs, dir), append(ids, id)
	}
	return dirs, ids
}

// TestWhatATaskKnowsEnds: a task that has asked before is judged by the policies and from the cgroup of now.
func TestWhatATaskKnowsEnds(t *testing.T) {
	dirs, ids := inCgroups(t, "pod", "container", "nested")
	pod, container := ids[0], ids[1]
	d := newDoor(t, dirs[2])
	handle := 0
	alloc := func(bytes uint64) {
		t.Helper()
		handle++
		d.ask("alloc %d %d", handle, bytes)
	}
	alloc(mib) // nobody is managed
	d.manage(container, 100*mib, someFlag|uint32(benchPolicyFlagsF_ENFORCE))
	d.used("before it was managed", container, 0)
	alloc(60 * mib)
	d.used("managed", container, 60*mib)
	alloc(60 * mib)
	d.used("above the limit", container, 60*mib)
	d.manage(container, 200*mib, someFlag|uint32(benchPolicyFlagsF_ENFORCE))
	alloc(60 * mib)
	d.used("with another limit", container, 120*mib)
	d.manage(container, 100*mib, someFlag)
	alloc(60 * mib)
	d.used("counted only", container, 180*mib)
	d.manage(pod, 100*mib, someFlag)
	alloc(10 * mib)
	d.used("with its pod", container, 190*mib)
	d.used("its pod", pod, 10*mib)

	// From another cgroup, and back.
	move := func(dir string) {
		t.Helper()
		d.check(os.WriteFile(filepath.Join(dir, "cgroup.procs"), []byte(strconv.Itoa(d.pid)), 0o644))
		if err := d.objs.Files.Delete(theFile); err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) { // it has another's now
			t.Fatal(err)
		}
	}
	move(dirs[0])
	alloc(10 * mib)
	d.used("from its pod's cgroup", container, 190*mib)
	d.used("from its pod's cgroup, the pod", pod, 20*mib)
	move(filepath.Dir(dirs[0]))
	alloc(10 * mib)
	d.used("from the root", pod, 20*mib)
	move(dirs[1])
	alloc(10 * mib)
	d.used("from its own", container, 200*mib)
	d.used("from its own, the pod", pod, 30*mib)
	d.check(d.objs.Policies.Delete(container))
	d.begin()
	move(dirs[1])
	alloc(10 * mib)
	d.used("let go", container, 200*mib)
	d.used("its pod is not", pod, 40*mib)

	// Who is held by a request that was changed is not known to tasks for good either.
	d.manage(pod, 100*mib, someFlag|uint32(benchPolicyFlagsF_ENFORCE))
	d.check(d.objs.Tainted.Put(pod, uint64(1)))
	d.begin()
	alloc(10 * mib)
	d.used("tainted", pod, 40*mib)
	d.check(d.objs.Tainted.Put(pod, uint64(0)))
	d.begin()
	alloc(10 * mib)
	d.used("not any more", pod, 50*mib)
}

// TestAHandleAgain: a program frees a device with all below it, which the gate does not see, and gpufenced gives that back.
// Then it takes the same handle for less. The free of that gives back that, not what had the handle before.
func TestAHandleAgain(t *testing.T) {
	dirs, ids := inCgroups(t, "container")
	d := newDoor(t, dirs[0])
	id := ids[0]
	d.manage(id, 100*mib, someFlag|uint32(benchPolicyFlagsF_ENFORCE))
	d.ask("alloc 1 %d", 30*mib)
	d.ask("alloc 2 %d", 60*mib)
	d.adjust(benchAdjust{Cgroup: id, Bytes: -60 * mib})
	d.used("60 of 90 MiB given back", id, 30*mib)
	d.ask("alloc 2 %d", 4*mib)
	d.used("and 4 taken", id, 34*mib)
	d.ask("free 2")
	d.used("and freed", id, 30*mib)
	d.ask("alloc 2 %d", 60*mib)
	d.ask("free 2")
	d.used("taken and freed once more", id, 30*mib)
	d.ask("free 2")
	d.used("freed twice", id, 30*mib)
	d.ask("free 1")
	d.used("all of it", id, 0)
}

// TestAFileAgain: a file is closed with all that was got through it, and the next one lies where it lay. The same handle of
// that one is another object, whose free gives nothing of the first one's back.
func TestAFileAgain(t *testing.T) {
	dirs, ids := inCgroups(t, "container")
	d := newDoor(t, dirs[0])
	id := ids[0]
	d.manage(id, 100*mib, someFlag|uint32(benchPolicyFlagsF_ENFORCE))
	d.ask("alloc 1 %d", 60*mib)
	d.closed(id)
	d.used("closed", id, 0)
	d.ask("alloc 2 %d", 4*mib)
	d.ask("free 1") // a channel, say
	d.used("another's free", id, 4*mib)
	d.ask("free 2")
	d.used("its own", id, 0)
}

// TestWhatIsClosedMakesRoom: programs end without freeing what they have. What frees of others give back is known all the same.
func TestWhatIsClosedMakesRoom(t *testing.T) {
	dirs, ids := inCgroups(t, "container")
	d := newDoor(t, dirs[0])
	id := ids[0]
	d.manage(id, 1<<50, someFlag|uint32(benchPolicyFlagsF_ENFORCE))
	for range 10 {
		d.ask("alloc 1 %d 8192", mib)
		d.used("held", id, 8192*mib)
		d.closed(id)
	}
	for handle := range 256 {
		d.ask("alloc %d %d", handle+1, mib)
		d.ask("free %d", handle+1)
	}
	d.used("freed", id, 0)
}

// TestStrangersAreKnown: a cgroup that is in no managed one is known to be until policies change, and no other is.
func TestStrangersAreKnown(t *testing.T) {
	dirs, ids := inCgroups(t, "pod", "container")
	d := newDoor(t, dirs[1])
	word := func() (w uint64) {
		t.Helper()
		d.check(d.objs.Strangers.Lookup(uint32(ids[1]%uint64(d.objs.Strangers.MaxEntries())), &w))
		return w
	}
	begun := uint64(0)
	begin := func() { begun++; d.begin() }
	known := func(when string, want bool) {
		t.Helper()
		const golden = 0x9e3779b97f4a7c15
		d.ask("alloc 1 %d", mib)
		if w := word(); (w == ids[1]+begun*golden) != want {
			t.Errorf("%s: the word is %#x in generation %d", when, w, begun)
		}
	}
	known("nobody is managed", true)
	begin()
	known("in the next generation", true)
	begun++
	d.manage(ids[0], 100*mib, someFlag|uint32(benchPolicyFlagsF_ENFORCE))
	known("its pod is managed", false)
	d.used("its pod is managed", ids[0], mib)
	d.check(d.objs.Policies.Delete(ids[0]))
	begin()
	known("its pod is let go", true)
	d.used("its pod is let go", ids[0], mib)
}
