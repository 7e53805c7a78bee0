// SPDX-License-Identifier: Apache-2.0

package bpf

import (
	"bytes"
	"cmp"
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// CanaryCommand is the argument by which a program that has called [Canary] is started again to ask for
// memory that it may not have; its main calls [RunCanary] then.
const CanaryCommand = "gate-canary"

const (
	canaryLimit    = 64 << 10
	canaryPatience = 30 * time.Second // it answers within milliseconds, on an emulated processor within seconds
)

// canaryAnswer is what the canary got, as errnos.
type canaryAnswer struct{ Over, Under, Compat int }

// Canary proves that the doors hold: a process in a scratch cgroup below cgroupRoot asks /dev/null for more
// than it may have in the driver's language, through both doors, and for less. argv starts [RunCanary]; nil
// means this program.
func (g *Gate) Canary(ctx context.Context, cgroupRoot string, argv []string) (err error) {
	failed := func(err error, format string, args ...any) error {
		return &Error{Reason: ReasonCanary, What: "canary: " + fmt.Sprintf(format, args...), Err: err}
	}
	var st unix.Statfs_t
	root := cmp.Or(cgroupRoot, "/sys/fs/cgroup")
	if err := unix.Statfs(root, &st); err != nil || st.Type != unix.CGROUP2_SUPER_MAGIC {
		return &Error{Reason: ReasonNoCgroup2, What: "no cgroup v2 tree at " + root, Err: err}
	}
	dir, err := os.MkdirTemp(root, "gpufence-canary-")
	if err != nil {
		return failed(err, "make a cgroup")
	}
	defer func() {
		// Its process is waited for; the cgroup may take a moment longer to be empty.
		var rerr error
		for range 50 {
			if rerr = os.Remove(dir); rerr == nil {
				return
			}
			time.Sleep(10 * time.Millisecond)
		}
		err = errors.Join(err, rerr)
	}()
	var info unix.Stat_t
	if err := unix.Stat(dir, &info); err != nil {
		return failed(err, "look at the cgroup")
	}
	null := Device{Major: 1, Minor: 3, Kind: kindCanary}
	if err := g.guard(null); err != nil {
		return failed(err, "have /dev/null guarded")
	}
	defer func() { err = errors.Join(err, g.maps["devices"].Delete(null.key())) }()
	if err := g.SetPolicy(info.Ino, Policy{LimitBytes: canaryLimit, Enforce: true, GPU: true, canary: true}); err != nil {
		return failed(err, "set its limit")
	}
	defer func() { err = errors.Join(err, g.DropPolicy(info.Ino)) }()
	fd, err := os.Open(dir)
	if err != nil {
		return failed(err, "open the cgroup")
	}
	defer fd.Close()

	if argv == nil {
		argv = []string{"/proc/self/exe", CanaryCommand}
	}
	ask := func(what string) (canaryAnswer, error) {
		return ask(ctx, canaryPatience, append(argv[:len(argv):len(argv)], what), &syscall.SysProcAttr{UseCgroupFD: true, CgroupFD: int(fd.Fd())})
	}
	a, err := ask("64")
	if err != nil {
		return failed(err, "start it in the cgroup")
	}
	if syscall.Errno(a.Over) != unix.ENOMEM {
		return failed(nil, "a request above the limit was answered with %q, not refused", syscall.Errno(a.Over).Error())
	}
	if syscall.Errno(a.Under) != unix.ENOTTY {
		return failed(nil, "a request within the limit was answered with %q, not passed on", syscall.Errno(a.Under).Error())
	}
	if has32 {
		a, err = ask("32")
		var exit *exec.ExitError
		if errors.As(err, &exit) && exit.Sys().(syscall.WaitStatus).Signaled() { //nolint:errcheck,forcetypeassert // Linux has no other
			return nil // a kernel without 32-bit programs has no such door
		}
		if err != nil {
			return failed(err, "ask through the 32-bit door")
		}
		if e := syscall.Errno(a.Compat); e != unix.EPERM && e != unix.ENOSYS {
			return failed(nil, "a 32-bit request was answered with %q, not refused", e.Error())
		}
	}
	return nil
}

// ask starts a canary and reads its answer. One that is silent for the time of patience is an error of its own, not
// a process that was ended by a signal: that has a meaning.
func ask(ctx context.Context, patience time.Duration, argv []string, attr *syscall.SysProcAttr) (canaryAnswer, error) {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	cmd := exec.CommandContext(ctx, argv[0], argv[1:]...)
	cmd.SysProcAttr = attr
	cmd.WaitDelay = time.Second // what it may have started keeps its output open
	var out, errs bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &errs
	var a canaryAnswer
	if err := cmd.Run(); ctx.Err() != nil {
		return a, fmt.Errorf("wait for its answer for %s: %w", patience, ctx.Err())
	} else if err != nil {
		return a, fmt.Errorf("%w: %s", err, bytes.TrimSpace(errs.Bytes()))
	}
	if err := json.Unmarshal(out.Bytes(), &a); err != nil {
		return a, fmt.Errorf("understand its answer: %w", err)
	}
	return a, nil
}

// RunCanary is the canary's side: what is "64" or "32".
func RunCanary(what string) error {
	f, err := os.OpenFile(filepath.Join("/dev", "null"), os.O_RDWR, 0)
	if err != nil {
		return fmt.Errorf("open /dev/null: %w", err)
	}
	defer f.Close()
	// Below 4 GiB, where a 32-bit call can point to.
	const map32 = 0x40
	page, err := unix.Mmap(-1, 0, 4096, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS|map32)
	if err != nil {
		return fmt.Errorf("map a page: %w", err)
	}
	const cmd = 3<<30 | 48<<16 | 'F'<<8 | 0x2b
	at := reflect.ValueOf(page).Pointer() // mapped memory does not move
	request := func(bytes uint64) {
		clear(page)
		binary.NativeEndian.PutUint32(page[0:], 1)               // client
		binary.NativeEndian.PutUint32(page[8:], 0)               // the driver chooses a handle
		binary.NativeEndian.PutUint32(page[12:], 0x40)           // NV01_MEMORY_LOCAL_USER
		binary.NativeEndian.PutUint64(page[16:], uint64(at)+512) // parameters
		binary.NativeEndian.PutUint32(page[32:], 128)
		binary.NativeEndian.PutUint64(page[512+64:], bytes)
	}
	var a canaryAnswer
	switch what {
	case "64":
		request(canaryLimit + 1)
		_, _, e := unix.Syscall(unix.SYS_IOCTL, f.Fd(), cmd, at)
		a.Over = int(e)
		request(1)
		_, _, e = unix.Syscall(unix.SYS_IOCTL, f.Fd(), cmd, at)
		a.Under = int(e)
	case "32":
		request(1)
		a.Compat = int(-call32(54, uint32(f.Fd()), cmd, uint32(at)))
	default:
		return fmt.Errorf("run canary: unknown door %q", what)
	}
	if err := json.NewEncoder(os.Stdout).Encode(a); err != nil {
		return fmt.Errorf("answer: %w", err)
	}
	return nil
}
