// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"
)

// sink is a writer that a test may read while simgpud writes.
type sink struct {
	mu sync.Mutex
	b  strings.Builder
}

func (l *sink) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

func (l *sink) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}

func shortDir(t *testing.T) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "simgpu-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	return dir
}

func TestRunUntilStopped(t *testing.T) {
	t.Parallel()
	dir := shortDir(t)
	pidFile := filepath.Join(dir, "pid")
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	var out sink
	code := make(chan int, 1)
	go func() { code <- run(ctx, []string{"--dir", dir, "--pid-file", pidFile}, &out) }()
	var pid []byte
	for end := time.Now().Add(20 * time.Second); ; time.Sleep(time.Millisecond) {
		var err error
		if pid, err = os.ReadFile(pidFile); err == nil && len(pid) > 0 {
			break
		}
		if time.Now().After(end) {
			t.Fatalf("no pid file: %v\n%s", err, out.String())
		}
	}
	if string(pid) != strconv.Itoa(os.Getpid())+"\n" {
		t.Errorf("pid file holds %q", pid)
	}
	if _, err := os.Stat(filepath.Join(dir, "gpu0")); err != nil {
		t.Error(err)
	}
	cancel()
	if c := <-code; c != 0 || !strings.Contains(out.String(), "ready: 1 GPU(s), driver 570.") {
		t.Errorf("exit code %d, log:\n%s", c, out.String())
	}
	for _, name := range []string{"gpu0", "ctl", "admin", "pid"} {
		if _, err := os.Lstat(filepath.Join(dir, name)); !errors.Is(err, fs.ErrNotExist) {
			t.Errorf("%s is left: %v", name, err)
		}
	}
}

func TestErrors(t *testing.T) {
	t.Parallel()
	dir := shortDir(t)
	for _, tt := range []struct {
		args []string
		code int
		want string
	}{
		{[]string{"--nosuch"}, 2, "unknown flag: --nosuch"},
		{[]string{"--dir", dir, "more"}, 2, `unexpected argument "more"`},
		{[]string{"--dir", dir, "--memory", "much"}, 2, `read size "much"`},
		{[]string{"--dir", dir, "--memory", "1MiB"}, 1, "too small"},
		{[]string{"--dir", "/proc/nosuch"}, 1, "make socket folder"},
		{[]string{"--dir", dir, "--pid-file", "/proc/nosuch/pid"}, 1, "write pid file"},
		{[]string{"--dir", filepath.Join(dir, strings.Repeat("x", 100))}, 1, "listen on"},
		{[]string{"--help"}, 0, "--nvml-lag"},
	} {
		var out sink
		if code := run(t.Context(), tt.args, &out); code != tt.code || !strings.Contains(out.String(), tt.want) {
			t.Errorf("%q: exit code %d, want %d with %q:\n%s", tt.args, code, tt.code, tt.want, out.String())
		}
	}
}
