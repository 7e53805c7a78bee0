// SPDX-License-Identifier: Apache-2.0

package act

import (
	"context"
	"encoding/json"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// slicing freezes again and again until it is stopped; the last answer is told then.
func slicing(t *testing.T, g *Guard, h *Host, c Cgroup) (stop func() error) {
	t.Helper()
	quit, done := make(chan struct{}), make(chan error, 1)
	go func() {
		for {
			err := g.Slice(context.Background(), h, c, time.Hour) // cut to MaxSlice
			select {
			case <-quit:
				done <- err
				return
			default:
			}
		}
	}()
	return func() error {
		close(quit)
		select {
		case err := <-done:
			return err
		case <-time.After(patience):
			t.Fatal("it waits for ever")
			return nil
		}
	}
}

// patience bounds what only a hang exceeds.
const patience = 20 * time.Second

func guard(t *testing.T) *Guard {
	t.Helper()
	dir := t.TempDir()
	g := NewGuard([]string{"/proc/self/exe", GuardCommand, dir}, dir)
	t.Cleanup(func() {
		if err := g.Close(); err != nil {
			t.Error(err)
		}
		if left, err := filepath.Glob(filepath.Join(dir, "*")); err != nil || len(left) > 0 {
			t.Errorf("left: %v, %v", left, err)
		}
	})
	return g
}

// hierarchies that can freeze.
func eachFreezer(t *testing.T, f func(t *testing.T, h *Host, c Cgroup, state func() string, set func(string))) {
	for hierarchy, file := range map[string]string{"unified": "cgroup.freeze", "freezer": "freezer.state"} {
		t.Run(hierarchy, func(t *testing.T) {
			h, c := realCgroup(t, hierarchy)
			path := filepath.Join(h.mounts[hierarchy], c.Path, file)
			f(t, h, c, func() string {
				b, err := os.ReadFile(path)
				if err != nil {
					t.Fatal(err)
				}
				return strings.TrimSpace(string(b))
			}, func(s string) {
				if err := writeFile(path, s); err != nil {
					t.Fatal(err)
				}
			})
		})
	}
}

func isThawed(s string) bool { return s == "0" || s == "THAWED" }

func frozenWord(c Cgroup) string {
	if c.Hierarchy == unified {
		return "1"
	}
	return "FROZEN"
}

func thawedWord(c Cgroup) string {
	if c.Hierarchy == unified {
		return "0"
	}
	return "THAWED"
}

func wait(t *testing.T, what string, f func() bool) {
	t.Helper()
	for end := time.Now().Add(patience); !f(); time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("it did not happen: %s", what)
		}
	}
}

func TestSlice(t *testing.T) {
	eachFreezer(t, func(t *testing.T, h *Host, c Cgroup, state func() string, set func(string)) {
		start(t, "sleep", h, &c, "")
		g := guard(t)
		stop := slicing(t, g, h, c)
		wait(t, "it is frozen", func() bool { return !isThawed(state()) })
		if err := stop(); err != nil {
			t.Fatal(err)
		}
		if s := state(); !isThawed(s) {
			t.Errorf("after the slice: %s", s)
		}
		// Somebody else's is left as it is.
		set(frozenWord(c))
		if err := g.Slice(t.Context(), h, c, time.Millisecond); !errors.Is(err, ErrFrozen) {
			t.Errorf("frozen by another: %v", err)
		}
		if isThawed(state()) {
			t.Error("somebody else's was thawed")
		}
		set(thawedWord(c))
		other := c
		other.Inode++
		if err := g.Slice(t.Context(), h, other, time.Millisecond); !errors.Is(err, ErrGone) {
			t.Errorf("another cgroup of that name: %v", err)
		}
		for _, bad := range []struct {
			c    Cgroup
			want error
		}{{Cgroup{Hierarchy: "pids", Path: "/x"}, ErrNoFreezer}, {Cgroup{Hierarchy: c.Hierarchy, Path: "/"}, ErrCgroupRoot}} {
			if err := g.Slice(t.Context(), h, bad.c, time.Millisecond); !errors.Is(err, bad.want) {
				t.Errorf("%v: %v", bad.c, err)
			}
		}
	})
}

// The guard is killed in a slice: we thaw. Then the next slice has a new guard.
func TestGuardIsKilled(t *testing.T) {
	eachFreezer(t, func(t *testing.T, h *Host, c Cgroup, state func() string, set func(string)) {
		g := guard(t)
		for range 3 {
			stop := slicing(t, g, h, c)
			wait(t, "it is frozen", func() bool { return !isThawed(state()) })
			p, err := os.FindProcess(childOf(t, os.Getpid()))
			if err != nil {
				t.Fatal(err)
			}
			if err := p.Kill(); err != nil {
				t.Fatal(err)
			}
			// The slice in progress fails, and perhaps one more that the dead one was asked for.
			if err := stop(); err != nil {
				t.Log(err)
			}
			wait(t, "it is thawed", func() bool { return isThawed(state()) })
			if left, err := filepath.Glob(filepath.Join(g.dir, "*")); err != nil || len(left) > 0 {
				t.Errorf("left: %v, %v", left, err)
			}
		}
	})
}

// childOf finds the guard, our only child that was told to be one.
func childOf(t *testing.T, parent int) int {
	t.Helper()
	h, err := NewHost("", "")
	if err != nil {
		t.Fatal(err)
	}
	entries, err := filepath.Glob("/proc/[0-9]*/cmdline")
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		b, err := os.ReadFile(e)
		if err != nil || !strings.Contains(string(b), GuardCommand) {
			continue
		}
		var pid int
		for _, r := range filepath.Base(filepath.Dir(e)) {
			pid = 10*pid + int(r-'0')
		}
		if p, err := h.Process(pid); err == nil && p.PPID == parent && p.State != 'Z' {
			return pid
		}
	}
	t.Fatal("no guard runs")
	return 0
}

// gpufenced is killed in a slice: its end of the pipe closes, and the guard thaws and ends.
func TestGuardOutlivesUs(t *testing.T) {
	eachFreezer(t, func(t *testing.T, h *Host, c Cgroup, state func() string, _ func(string)) {
		dir := t.TempDir()
		cmd := exec.CommandContext(context.Background(), "/proc/self/exe", GuardCommand, dir)
		in, err := cmd.StdinPipe()
		if err != nil {
			t.Fatal(err)
		}
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		path, number, err := h.FreezeDir(c)
		if err != nil {
			t.Fatal(err)
		}
		line, err := json.Marshal(order{ID: 1, Dir: path, Inode: number, NS: int64(MaxSlice)})
		if err != nil {
			t.Fatal(err)
		}
		next := time.Now()
		wait(t, "it is frozen", func() bool {
			if time.Now().After(next) {
				if _, err := in.Write(append(line, '\n')); err != nil {
					t.Fatal(err)
				}
				next = time.Now().Add(2 * MaxSlice)
			}
			return !isThawed(state())
		})
		if err := cmd.Process.Signal(os.Interrupt); err != nil { // as from a terminal
			t.Fatal(err)
		}
		if err := in.Close(); err != nil {
			t.Fatal(err)
		}
		if err := cmd.Wait(); err != nil {
			t.Errorf("the guard: %v", err)
		}
		if s := state(); !isThawed(s) {
			t.Errorf("left %s", s)
		}
	})
}

// Both are killed in a slice: the next start thaws.
func TestThawLeft(t *testing.T) {
	eachFreezer(t, func(t *testing.T, h *Host, c Cgroup, state func() string, set func(string)) {
		dir := t.TempDir()
		path, number, err := h.FreezeDir(c)
		if err != nil {
			t.Fatal(err)
		}
		note := func(inode uint64, text string) {
			if err := os.WriteFile(filepath.Join(dir, record(inode)), []byte(text), 0o600); err != nil {
				t.Fatal(err)
			}
		}
		set(frozenWord(c))
		note(number, path)
		note(1, path)              // another cgroup had that name: this one is not ours
		note(2, "")                // cut short
		note(3, "/does/not/exist") // gone
		n, err := ThawLeft(dir)
		if err != nil || n != 3 {
			t.Errorf("%d, %v", n, err)
		}
		if s := state(); !isThawed(s) {
			t.Errorf("left %s", s)
		}
		if left, err := os.ReadDir(dir); err != nil || len(left) != 0 {
			t.Errorf("%v, %v", left, err)
		}
		// Without a note it is somebody else's.
		set(frozenWord(c))
		if n, err := ThawLeft(dir); n != 0 || err != nil || isThawed(state()) {
			t.Errorf("%d, %v, %s", n, err, state())
		}
		set(thawedWord(c))
	})
}

func TestGuardCannotStart(t *testing.T) {
	h, c := realCgroup(t, "freezer")
	g := NewGuard([]string{"/does/not/exist"}, t.TempDir())
	if err := g.Slice(t.Context(), h, c, time.Millisecond); err == nil || !strings.Contains(err.Error(), "start the guard") {
		t.Errorf("%v", err)
	}
	if err := g.Close(); err != nil {
		t.Error(err)
	}
	if err := g.Slice(t.Context(), h, c, time.Millisecond); !errors.Is(err, os.ErrClosed) {
		t.Errorf("closed: %v", err)
	}
}

func TestGuardMainRefusesGarbage(t *testing.T) {
	var out strings.Builder
	if err := GuardMain(strings.NewReader("{\"id\":1,\"dir\":\"/does/not/exist\"}\n{"), &out, t.TempDir()); err == nil {
		t.Error("garbage was taken")
	}
	if out.String() != "{\"id\":1,\"why\":\"gone\"}\n" {
		t.Errorf("%q", out.String())
	}
}
