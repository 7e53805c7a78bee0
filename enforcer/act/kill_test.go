// SPDX-License-Identifier: Apache-2.0

package act

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// TestMain also is the program that the tests start in cgroups.
func TestMain(m *testing.M) {
	if len(os.Args) == 3 && os.Args[1] == GuardCommand {
		if err := GuardMain(os.Stdin, os.Stdout, os.Args[2]); err != nil {
			os.Exit(1)
		}
		return
	}
	switch os.Getenv("ACT_TEST_CHILD") {
	case "sleep":
		fmt.Println("ready")
		time.Sleep(time.Hour)
	case "fork": // forks for ever, so that one look at the list is never enough
		fmt.Println("ready")
		for {
			c := exec.CommandContext(context.Background(), "/proc/self/exe")
			c.Env = append(os.Environ(), "ACT_TEST_CHILD=sleep")
			if err := c.Start(); err != nil {
				time.Sleep(time.Millisecond)
			}
		}
	case "leader": // the first thread exits, another goes on
		fmt.Println("ready")
		leaderExits()
	default:
		os.Exit(m.Run())
	}
}

// leaderExits ends the process's first thread only; init runs there.
func leaderExits() {
	for {
		go func() {
			if syscall.Gettid() == os.Getpid() {
				// exit(2), not exit_group(2).
				syscall.RawSyscall(syscall.SYS_EXIT, 0, 0, 0)
			}
		}()
		time.Sleep(time.Millisecond)
	}
}

func cannot(t *testing.T, why string) {
	t.Helper()
	if os.Getenv("GPUFENCE_MUST") == "1" {
		t.Fatalf("GPUFENCE_MUST=1, but %s", why)
	}
	t.Skipf("NOT TESTED: %s", why)
}

// realCgroup makes a cgroup of our own in a mounted hierarchy, and takes it away at the end.
func realCgroup(t *testing.T, hierarchy string) (*Host, Cgroup) {
	t.Helper()
	if os.Geteuid() != 0 {
		cannot(t, "making cgroups needs root")
	}
	h, err := NewHost("", "")
	if err != nil {
		t.Fatal(err)
	}
	if _, ok := h.mounts[hierarchy]; !ok {
		cannot(t, "hierarchy "+hierarchy+" is not mounted here")
	}
	path := fmt.Sprintf("/gpufence-act-test-%d-%d", os.Getpid(), time.Now().UnixNano())
	dir := filepath.Join(h.mounts[hierarchy], path)
	for _, d := range []string{dir, filepath.Join(dir, "below")} {
		if err := os.Mkdir(d, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	t.Cleanup(func() {
		for _, d := range []string{filepath.Join(dir, "below"), dir} {
			var err error
			for range 200 { // until the zombies are reaped
				if err = os.Remove(d); err == nil || errors.Is(err, os.ErrNotExist) {
					err = nil
					break
				}
				time.Sleep(10 * time.Millisecond)
			}
			if err != nil {
				t.Error(err)
			}
		}
	})
	n, err := inode(dir)
	if err != nil {
		t.Fatal(err)
	}
	return h, Cgroup{hierarchy, path, n, h.BootID()}
}

// start runs a child, in a cgroup if one is given.
func start(t *testing.T, what string, h *Host, c *Cgroup, below string) *exec.Cmd {
	t.Helper()
	cmd := exec.CommandContext(context.Background(), "/proc/self/exe")
	cmd.Env = append(os.Environ(), "ACT_TEST_CHILD="+what)
	if c != nil {
		procs := filepath.Join(h.mounts[c.Hierarchy], c.Path, below, "cgroup.procs")
		// A shell that joins first: every fork of the child is a member then.
		cmd = exec.CommandContext(context.Background(), "/bin/sh", "-c", `echo $$ > "$0"; exec "$1"`, procs, self(t))
		cmd.Env = append(os.Environ(), "ACT_TEST_CHILD="+what)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		// Errors say that it is gone already, which is what is wanted.
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
	})
	if line, err := bufio.NewReader(out).ReadString('\n'); line != "ready\n" {
		t.Fatalf("child said %q, %v", line, err)
	}
	return cmd
}

func self(t *testing.T) string {
	t.Helper()
	path, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	return path
}

func signalOf(cmd *exec.Cmd) syscall.Signal {
	// The error is the signal that is asked for.
	_ = cmd.Wait()
	if cmd.ProcessState == nil {
		return 0
	}
	return cmd.ProcessState.Sys().(syscall.WaitStatus).Signal()
}

func bounded(t *testing.T) context.Context {
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	t.Cleanup(cancel)
	return ctx
}

func TestKillCgroup(t *testing.T) {
	for _, hierarchy := range []string{"unified", "freezer", "pids"} {
		t.Run(hierarchy, func(t *testing.T) {
			h, c := realCgroup(t, hierarchy)
			victim := start(t, "sleep", h, &c, "")
			nested := start(t, "sleep", h, &c, "below")
			bystander := start(t, "sleep", h, nil, "")
			// Identity and membership on the real thing.
			if got, err := h.ContainerCgroup(nested.Process.Pid, 0); err != nil || got.Hierarchy != hierarchy || got.Path != c.Path+"/below" {
				t.Errorf("ContainerCgroup = %+v, %v", got, err)
			}
			if _, got, ok, err := h.Owner(nested.Process.Pid, []Cgroup{c}); !ok || got != c || err != nil {
				t.Errorf("Owner = %+v, %v, %v", got, ok, err)
			}
			if _, err := h.ContainerCgroup(victim.Process.Pid, 0); !errors.Is(err, ErrCgroupShared) {
				t.Errorf("a cgroup with another process below: %v", err)
			}
			pids := []int{victim.Process.Pid, nested.Process.Pid}
			slices.Sort(pids)
			if got, err := h.Procs(c); err != nil || !slices.Equal(got, pids) {
				t.Errorf("Procs = %v, %v; want %v", got, err, pids)
			}
			before := Monotonic()
			k, err := h.KillCgroup(bounded(t), c)
			if err != nil || !k.Empty || k.Processes != 2 || k.Thawed || k.SentAt < before || k.SentAt > Monotonic() {
				t.Errorf("%+v, %v", k, err)
			}
			// By cgroup.kill nobody is signalled, unless dying takes a while.
			if hierarchy != "unified" && k.Signalled < 2 {
				t.Errorf("signalled %d", k.Signalled)
			}
			if s := signalOf(victim); s != syscall.SIGKILL {
				t.Errorf("victim died of %v", s)
			}
			if s := signalOf(nested); s != syscall.SIGKILL {
				t.Errorf("nested died of %v", s)
			}
			if err := bystander.Process.Signal(syscall.Signal(0)); err != nil {
				t.Errorf("bystander: %v", err)
			}
			// Empty is no error; gone is.
			if k, err := h.KillCgroup(bounded(t), c); err != nil || k.Processes != 0 || !k.Empty {
				t.Errorf("empty: %+v, %v", k, err)
			}
			other := c
			other.Inode++
			if _, err := h.KillCgroup(bounded(t), other); !errors.Is(err, ErrGone) {
				t.Errorf("another cgroup at the same path: %v", err)
			}
		})
	}
}

func TestKillForkBomb(t *testing.T) {
	for _, hierarchy := range []string{"unified", "freezer"} {
		t.Run(hierarchy, func(t *testing.T) {
			h, c := realCgroup(t, hierarchy)
			bomb := start(t, "fork", h, &c, "")
			for deadline := time.Now().Add(10 * time.Second); ; { // until there are some
				if pids, err := h.Procs(c); err == nil && len(pids) > 5 || time.Now().After(deadline) {
					break
				}
				time.Sleep(time.Millisecond)
			}
			k, err := h.KillCgroup(bounded(t), c)
			if err != nil || !k.Empty {
				t.Fatalf("%+v, %v", k, err)
			}
			if s := signalOf(bomb); s != syscall.SIGKILL {
				t.Errorf("died of %v", s)
			}
		})
	}
}

func TestKillFrozen(t *testing.T) {
	// On v1 who is frozen takes no signal before it is thawed, on v2 it dies frozen.
	for _, tt := range []struct {
		hierarchy, file, frozen, thawed string
		thaws                           bool
	}{{"freezer", "freezer.state", "FROZEN", "THAWED", true}, {"unified", "cgroup.freeze", "1", "0", false}} {
		t.Run(tt.hierarchy, func(t *testing.T) {
			h, c := realCgroup(t, tt.hierarchy)
			dir, err := h.dir(tt.hierarchy, c.Path)
			if err != nil {
				t.Fatal(err)
			}
			set := func(state string) {
				t.Helper()
				if err := writeFile(filepath.Join(dir, tt.file), state); err != nil {
					t.Fatal(err)
				}
			}
			for _, below := range []string{"", "below"} { // frozen by itself, and by its container
				victim := start(t, "sleep", h, &c, below)
				set(tt.frozen)
				k, err := h.KillCgroup(bounded(t), c)
				if err != nil || !k.Empty || k.Thawed != tt.thaws {
					t.Errorf("%+v, %v", k, err)
				}
				if s := signalOf(victim); s != syscall.SIGKILL {
					t.Errorf("died of %v", s)
				}
				set(tt.thawed) // for the next one
			}
			// One process alone, frozen.
			victim := start(t, "sleep", h, &c, "")
			set(tt.frozen)
			p, err := h.Process(victim.Process.Pid)
			if err != nil {
				t.Fatal(err)
			}
			k, err := h.KillProcess(bounded(t), p.PID, p.Start)
			if err != nil || !k.Empty || k.Thawed != tt.thaws {
				t.Errorf("%+v, %v", k, err)
			}
		})
	}
}

// TestKillFrozenAbove: what froze it is not the container's: it is left, and the kill ends in time.
func TestKillFrozenAbove(t *testing.T) {
	h, c := realCgroup(t, "freezer")
	victim := start(t, "sleep", h, &c, "below")
	dir, err := h.dir("freezer", c.Path)
	if err != nil {
		t.Fatal(err)
	}
	state := filepath.Join(dir, "freezer.state")
	if err := writeFile(state, "FROZEN"); err != nil {
		t.Fatal(err)
	}
	inner := Cgroup{Hierarchy: "freezer", Path: c.Path + "/below", BootID: c.BootID}
	if inner.Inode, err = inode(filepath.Join(dir, "below")); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
	defer cancel()
	began := time.Now()
	k, err := h.KillCgroup(ctx, inner)
	if !errors.Is(err, ErrTimeout) || k.Empty || k.Thawed || k.Signalled == 0 || k.SentAt == 0 {
		t.Errorf("%+v, %v", k, err)
	}
	if took := time.Since(began); took > 4*time.Second {
		t.Errorf("took %v", took)
	}
	p, err := h.Process(victim.Process.Pid)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel = context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel()
	if k, err := h.KillProcess(ctx, p.PID, p.Start); !errors.Is(err, ErrTimeout) || k.Signalled != 1 {
		t.Errorf("%+v, %v", k, err)
	}
	if b, err := os.ReadFile(state); err != nil || strings.TrimSpace(string(b)) == "THAWED" {
		t.Errorf("somebody else's freezer is %q, %v", b, err)
	}
	if err := writeFile(state, "THAWED"); err != nil {
		t.Fatal(err)
	}
	if s := signalOf(victim); s != syscall.SIGKILL {
		t.Errorf("died of %v", s)
	}
}

func TestKillProcess(t *testing.T) {
	h, err := NewHost("", "")
	if err != nil {
		t.Fatal(err)
	}
	victim := start(t, "sleep", h, nil, "")
	p, err := h.Process(victim.Process.Pid)
	if err != nil {
		t.Fatal(err)
	}
	if p.NSPID == 0 || p.PIDNS == 0 || p.Start == 0 || p.Exiting {
		t.Errorf("%+v", p)
	}
	if _, err := h.KillProcess(bounded(t), p.PID, p.Start+1); !errors.Is(err, ErrGone) {
		t.Errorf("another start time: %v", err)
	}
	fd, err := h.Open(p.PID, p.Start)
	if err != nil {
		t.Fatal(err)
	}
	if exited, err := fd.Exited(); exited || err != nil {
		t.Errorf("alive: %v, %v", exited, err)
	}
	k, err := h.KillProcess(bounded(t), p.PID, p.Start)
	if err != nil || !k.Empty || k.Signalled != 1 {
		t.Errorf("%+v, %v", k, err)
	}
	// A zombie has exited, and is so in /proc too.
	if exited, err := fd.Exited(); !exited || err != nil {
		t.Errorf("zombie: %v, %v", exited, err)
	}
	if z, err := h.Process(p.PID); err != nil || !z.Exiting || z.Start != p.Start {
		t.Errorf("zombie: %+v, %v", z, err)
	}
	if s := signalOf(victim); s != syscall.SIGKILL {
		t.Errorf("died of %v", s)
	}
	if err := fd.Signal(int(unix.SIGKILL)); !errors.Is(err, ErrGone) {
		t.Errorf("signal to a reaped process: %v", err)
	}
	if fd.Fd() < 0 {
		t.Error("no fd")
	}
	if err := errors.Join(fd.Close(), fd.Close()); err != nil {
		t.Error(err)
	}
	if _, err := h.KillProcess(bounded(t), p.PID, p.Start); !errors.Is(err, ErrGone) {
		t.Errorf("a process that is gone: %v", err)
	}
	if _, err := h.Open(p.PID, 0); !errors.Is(err, ErrGone) {
		t.Errorf("open a process that is gone: %v", err)
	}
}

// leaderless waits until the first thread of a child has exited.
func leaderless(t *testing.T, h *Host, child *exec.Cmd) {
	t.Helper()
	deadline := time.Now().Add(20 * time.Second)
	for {
		p, err := h.Process(child.Process.Pid)
		if err != nil {
			t.Fatal(err)
		}
		if p.State == 'Z' {
			if p.Exiting {
				t.Errorf("%+v: taken for exiting, its other threads live", p)
			}
			return
		}
		if time.Now().After(deadline) {
			t.Fatal("the first thread did not exit")
		}
		time.Sleep(time.Millisecond)
	}
}

// TestKillLeaderless: a process whose first thread has exited dies with its container, too, although
// cgroup.kill passes it over.
func TestKillLeaderless(t *testing.T) {
	for _, hierarchy := range []string{"unified", "freezer"} {
		t.Run(hierarchy, func(t *testing.T) {
			h, c := realCgroup(t, hierarchy)
			child := start(t, "leader", h, &c, "")
			leaderless(t, h, child)
			if _, got, ok, err := h.Owner(child.Process.Pid, []Cgroup{c}); !ok || got != c || err != nil {
				t.Errorf("Owner = %+v, %v, %v", got, ok, err)
			}
			k, err := h.KillCgroup(bounded(t), c)
			if err != nil || !k.Empty || k.Processes != 1 || k.SentAt == 0 {
				t.Errorf("%+v, %v", k, err)
			}
			if k.Empty && err == nil { // else waiting for it is no use
				if s := signalOf(child); s != syscall.SIGKILL {
					t.Errorf("it died of %v", s)
				}
			}
		})
	}
}

// TestLeaderThreadExits: a first thread that is a zombie does not make a process exit.
func TestLeaderThreadExits(t *testing.T) {
	h, err := NewHost("", "")
	if err != nil {
		t.Fatal(err)
	}
	child := start(t, "leader", h, nil, "")
	leaderless(t, h, child)
	fd, err := h.Open(child.Process.Pid, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer fd.Close()
	if exited, err := fd.Exited(); exited || err != nil {
		t.Errorf("pidfd: %v, %v", exited, err)
	}
}

func TestKillRefusesTheRoot(t *testing.T) {
	f := newFake(t)
	f.layout()
	if _, err := f.host().KillCgroup(bounded(t), Cgroup{Hierarchy: unified, Path: "/", BootID: fakeBoot}); !errors.Is(err, ErrCgroupRoot) {
		t.Errorf("%v", err)
	}
}

// TestKillDoesNotHang: a hierarchy whose files block (here a FIFO that nobody reads).
func TestKillDoesNotHang(t *testing.T) {
	f := newFake(t)
	f.layout()
	f.write("cgroup/x/cgroup.procs", "")
	fifo := filepath.Join(f.cgroup, "x", "cgroup.kill")
	if err := unix.Mkfifo(fifo, 0o600); err != nil {
		t.Fatal(err)
	}
	h := f.host()
	n, err := inode(filepath.Join(f.cgroup, "x"))
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	began := time.Now()
	if _, err := h.KillCgroup(ctx, Cgroup{unified, "/x", n, fakeBoot}); !errors.Is(err, ErrTimeout) {
		t.Errorf("%v", err)
	}
	if took := time.Since(began); took > time.Second {
		t.Errorf("took %v", took)
	}
	// Let the goroutine go.
	r, err := os.OpenFile(fifo, os.O_RDONLY|unix.O_NONBLOCK, 0)
	if err != nil {
		t.Fatal(err)
	}
	if err := r.Close(); err != nil {
		t.Fatal(err)
	}
}
