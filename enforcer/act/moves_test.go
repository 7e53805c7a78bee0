// SPDX-License-Identifier: Apache-2.0

package act

import (
	"errors"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"testing"
	"time"
)

// Nobody moves, and who comes behind does not wait for what was waited for.
func TestHasten(t *testing.T) {
	if os.Geteuid() != 0 {
		cannot(t, "this needs root")
	}
	h, err := NewHost("", "")
	if err != nil {
		t.Fatal(err)
	}
	before, err := os.ReadFile("/proc/self/cgroup")
	if err != nil {
		t.Fatal(err)
	}
	m := h.Moves()
	if err := m.Hasten(); err != nil {
		t.Fatal(err)
	}
	child := exec.CommandContext(t.Context(), "sleep", "60")
	if err := child.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() {
		_ = child.Process.Kill()
		_ = child.Wait()
	}()
	move := func() time.Duration {
		start := time.Now()
		if err := os.WriteFile(m.procs, []byte(strconv.Itoa(child.Process.Pid)), 0); err != nil {
			t.Fatal(err)
		}
		return time.Since(start)
	}
	const rest = 200 * time.Millisecond // more than a grace period
	time.Sleep(rest)
	alone := move()
	time.Sleep(rest)
	if err := m.Hasten(); err != nil {
		t.Fatal(err)
	}
	t.Logf("a move takes %v, and %v right behind another", alone, move())
	after, err := os.ReadFile("/proc/self/cgroup")
	if err != nil {
		t.Fatal(err)
	}
	if string(before) != string(after) {
		t.Errorf("this process was moved: from %q to %q", before, after)
	}
}

func TestHastenWritesOnlyToItsOwnCgroup(t *testing.T) {
	self := strconv.Itoa(os.Getpid())
	setup := func(t *testing.T) (*fake, *Host, string) {
		f := newFake(t)
		f.layout("unified", "freezer")
		h, err := NewHost(f.proc, f.cgroup)
		if err != nil {
			t.Fatal(err)
		}
		f.process(fakeProc{pid: os.Getpid(), cgroups: []string{"0::/", "5:freezer:/own"}})
		// Another cgroup lies at that path: the mount is the host's, /proc speaks of a namespace.
		f.write("cgroup/unified/cgroup.procs", "1\n"+self+"1\n")
		f.write("cgroup/freezer/own/cgroup.procs", "1\n"+self+"\n")
		return f, h, filepath.Join(f.cgroup, "freezer/own/cgroup.procs")
	}
	content := func(t *testing.T, file string) string {
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		return string(text)
	}
	t.Run("another's is left alone", func(t *testing.T) {
		f, h, own := setup(t)
		if err := h.Moves().Hasten(); err != nil {
			t.Fatal(err)
		}
		if got := content(t, filepath.Join(f.cgroup, "unified/cgroup.procs")); got != "1\n"+self+"1\n" {
			t.Errorf("another cgroup was written to: %q", got)
		}
		if got := content(t, own); got[0] != '0' {
			t.Errorf("its own was not written to: %q", got)
		}
	})
	t.Run("moved since", func(t *testing.T) {
		f, h, own := setup(t)
		m := h.Moves()
		if err := m.Hasten(); err != nil {
			t.Fatal(err)
		}
		f.write("cgroup/freezer/own/cgroup.procs", "")
		f.write("cgroup/freezer/new/cgroup.procs", self+"\n")
		f.process(fakeProc{pid: os.Getpid(), cgroups: []string{"0::/", "5:freezer:/new"}})
		if err := m.Hasten(); err != nil {
			t.Fatal(err)
		}
		if got := content(t, own); got != "" {
			t.Errorf("it went back to where it was: %q", got)
		}
	})
	t.Run("none", func(t *testing.T) {
		f, h, _ := setup(t)
		f.write("cgroup/freezer/own/cgroup.procs", "1\n")
		if err := h.Moves().Hasten(); !errors.Is(err, ErrNoCgroup) {
			t.Errorf("want ErrNoCgroup, got %v", err)
		}
	})
	t.Run("gone", func(t *testing.T) {
		_, h, own := setup(t)
		m := h.Moves()
		if err := m.Hasten(); err != nil {
			t.Fatal(err)
		}
		if err := os.Remove(own); err != nil {
			t.Fatal(err)
		}
		if err := m.Hasten(); !errors.Is(err, fs.ErrNotExist) {
			t.Errorf("want that the file is gone, got %v", err)
		}
	})
	t.Run("no proc", func(t *testing.T) {
		f, h, _ := setup(t)
		if err := os.RemoveAll(filepath.Join(f.proc, self)); err != nil {
			t.Fatal(err)
		}
		if err := h.Moves().Hasten(); !errors.Is(err, ErrGone) {
			t.Errorf("want ErrGone, got %v", err)
		}
	})
	t.Run("one at a time", func(t *testing.T) {
		_, h, own := setup(t)
		m := h.Moves()
		m.mu.Lock()
		defer m.mu.Unlock()
		if err := m.Hasten(); err != nil {
			t.Fatal(err)
		}
		if got := content(t, own); got[0] == '0' {
			t.Error("a second one went on at once")
		}
	})
}
