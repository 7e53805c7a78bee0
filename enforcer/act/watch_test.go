// SPDX-License-Identifier: Apache-2.0

package act

import (
	"context"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
)

func TestWatch(t *testing.T) {
	h, err := NewHost("", "")
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.CommandContext(context.Background(), "sleep", "1000") // ended below
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	pid := cmd.Process.Pid
	p, err := h.Process(pid)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := h.Watch(pid, p.Start+1); !errors.Is(err, ErrGone) {
		t.Errorf("another one: %v", err)
	}
	w, err := h.Watch(pid, p.Start)
	if err != nil {
		t.Fatal(err)
	}
	if !w.Alive() {
		t.Error("it sleeps, and is not alive")
	}
	if err := cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	fd, err := h.Open(pid, p.Start)
	if err != nil {
		t.Fatal(err)
	}
	for exited := false; !exited; {
		if exited, err = fd.wait(1e9); err != nil {
			t.Fatal(err)
		}
	}
	if w.Alive() {
		t.Error("a zombie is alive")
	}
	_ = cmd.Wait() // killed
	if w.Alive() {
		t.Error("it is gone, and alive")
	}
	if err := errors.Join(fd.Close(), w.Close(), w.Close()); err != nil {
		t.Error(err)
	}
	if _, err := h.Watch(pid, p.Start); !errors.Is(err, ErrGone) {
		t.Errorf("a process that is gone: %v", err)
	}
}

func TestWatchReadsStat(t *testing.T) {
	for name, test := range map[string]struct {
		text  string
		alive bool
	}{
		"running":            {"7 (a) S 1 7 7 0 -1 4194560 1 0 0 0 0 0 0 0 20 0 1 0 99 0 0", true},
		"a name like a stat": {"7 (a) Z 1 2 3 4 5 4) R 1 7 7 0 -1 4194560 1 0 0 0 0 0 0 0 20 0 1 0 99 0 0", true},
		"exiting":            {"7 (a) R 1 7 7 0 -1 4194308 1 0 0 0 0 0 0 0 20 0 1 0 99 0 0", false},
		"zombie":             {"7 (a) Z 1 7 7 0 -1 4194560 1 0 0 0 0 0 0 0 20 0 1 0 99 0 0", false},
		"cut":                {"7 (a) S 1 7", false},
		"no name":            {"7", false},
		"nothing":            {"", false},
		"no number":          {"7 (a) S 1 7 7 0 -1 x 1", false},
	} {
		t.Run(name, func(t *testing.T) {
			path := filepath.Join(t.TempDir(), "stat")
			if err := os.WriteFile(path, []byte(test.text), 0o600); err != nil {
				t.Fatal(err)
			}
			f, err := os.Open(path)
			if err != nil {
				t.Fatal(err)
			}
			defer f.Close()
			w := &Watch{pid: 7, fd: int(f.Fd())}
			if got := w.Alive(); got != test.alive {
				t.Errorf("alive = %v", got)
			}
		})
	}
}

// BenchmarkAlive is what a sample pays for each process of a container.
func BenchmarkAlive(b *testing.B) {
	h, err := NewHost("", "")
	if err != nil {
		b.Fatal(err)
	}
	p, err := h.Process(os.Getpid())
	if err != nil {
		b.Fatal(err)
	}
	w, err := h.Watch(p.PID, p.Start)
	if err != nil {
		b.Fatal(err)
	}
	b.Run("watch", func(b *testing.B) {
		for b.Loop() {
			w.Alive()
		}
	})
	b.Run("read", func(b *testing.B) {
		for b.Loop() {
			if _, err := h.Process(p.PID); err != nil {
				b.Fatal(err)
			}
		}
	})
	if err := w.Close(); err != nil {
		b.Fatal(err)
	}
}
