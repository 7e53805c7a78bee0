// SPDX-License-Identifier: Apache-2.0

// Package e2e runs the built programs as a node would: the demo's steps as tests, Ctrl-C in the
// middle of them, and input that is wrong.
package e2e

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/gpufence/gpufence/tests/demo"
)

// dist is where the build put everything.
func dist(t *testing.T) string {
	t.Helper()
	dir := os.Getenv("GPUFENCE_DIST")
	if dir == "" {
		dir = filepath.Join("..", "..", "dist")
	}
	dir, err := filepath.Abs(dir)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(filepath.Join(dir, "bin", "gpufenced")); err != nil {
		t.Fatalf("run make build first: %v", err)
	}
	if os.Geteuid() != 0 {
		t.Fatal("containers need root")
	}
	return dir
}

// testWriter shows the story beside the test's own lines.
type testWriter struct{ t *testing.T }

func (w testWriter) Write(b []byte) (int, error) {
	w.t.Log(strings.TrimRight(string(b), "\n"))
	return len(b), nil
}

// TestDemo: every step of the demo, with an NVML that answers at once and with one that lags.
func TestDemo(t *testing.T) {
	dist := dist(t)
	for _, lag := range []time.Duration{0, 200 * time.Millisecond} {
		t.Run("lag="+lag.String(), func(t *testing.T) {
			result, err := demo.Run(t.Context(), demo.Options{Dist: dist, Lag: lag, Simulated: true, Story: testWriter{t}})
			if err != nil {
				t.Fatal(err)
			}
			for _, s := range result.Steps {
				t.Run(s.Name, func(t *testing.T) {
					if !s.Held {
						t.Errorf("%s %v", s.Detail, s.Numbers)
					}
				})
			}
			if len(result.Steps) < 20 {
				t.Errorf("only %d steps were played", len(result.Steps))
			}
		})
	}
}

// TestDemoWithStubs: the same where libraries stand in for the driver's, and nothing is preloaded.
func TestDemoWithStubs(t *testing.T) {
	result, err := demo.Run(t.Context(), demo.Options{Dist: dist(t), Simulated: true, Delivery: "stub", Story: testWriter{t}})
	if err != nil {
		t.Fatal(err)
	}
	for _, s := range result.Steps {
		t.Run(s.Name, func(t *testing.T) {
			if !s.Held {
				t.Errorf("%s %v", s.Detail, s.Numbers)
			}
		})
	}
	if len(result.Steps) < 20 {
		t.Errorf("only %d steps were played", len(result.Steps))
	}
}

// TestInterruptedDemoLeavesNothing: Ctrl-C at the start, while a set waits, and while gpufenced
// is dead.
func TestInterruptedDemoLeavesNothing(t *testing.T) {
	for name, at := range map[string]string{
		"at the start":            "containers run under runc",
		"while a set is pending":  "memory.max=1Gi is pending",
		"while gpufenced is dead": "go on while gpufenced is dead",
	} {
		t.Run(name, func(t *testing.T) { interrupt(t, at) })
	}
}

// interrupt sends SIGINT to a demo once its story has a line with those words.
func interrupt(t *testing.T, at string) {
	dist := dist(t)
	tmp, err := os.MkdirTemp("", "e2e-") // short: a socket's path has 108 bytes
	if err != nil {
		t.Fatal(err)
	}
	defer os.RemoveAll(tmp)
	cmd := exec.CommandContext(t.Context(), filepath.Join(dist, "bin", "gpufence"), "demo")
	cmd.Env = append(os.Environ(), "TMPDIR="+tmp)
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	var story strings.Builder
	var private string
	for lines := bufio.NewScanner(io.TeeReader(out, &story)); lines.Scan(); {
		if private != "" || !strings.Contains(lines.Text(), at) {
			continue
		}
		found, err := filepath.Glob(filepath.Join(tmp, "gpufence-demo-*"))
		if err != nil || len(found) != 1 {
			t.Errorf("private folder: %v, %v", found, err)
		} else {
			private = found[0]
		}
		if err := cmd.Process.Signal(syscall.SIGINT); err != nil {
			t.Error(err)
		}
	}
	err = cmd.Wait()
	var exit *exec.ExitError
	if !errors.As(err, &exit) || exit.ExitCode() != 1 || strings.TrimSpace(stderr.String()) != "gpufence: interrupted" {
		t.Errorf("ended with %v, %q; it said %s", err, stderr.String(), story.String())
	}
	if strings.Contains(story.String(), "\ndemo: ") {
		t.Errorf("an interrupted demo counts what held: %s", story.String())
	}
	if private == "" {
		t.Fatalf("the demo did not get far enough: %s", story.String())
	}
	if _, err := os.Lstat(private); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("%s is still there: %v", private, err)
	}
	name := filepath.Base(private)
	for _, pattern := range []string{"/sys/fs/cgroup/" + name, "/sys/fs/cgroup/*/" + name} {
		if found, err := filepath.Glob(pattern); err != nil || len(found) > 0 {
			t.Errorf("cgroups are still there: %v, %v", found, err)
		}
	}
	if text, err := os.ReadFile("/proc/self/mountinfo"); err != nil || strings.Contains(string(text), name) {
		t.Errorf("something is still mounted in %s: %v", name, err)
	}
	processes, err := filepath.Glob("/proc/[0-9]*/cmdline")
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range processes {
		// A process that has gone meanwhile has nothing to say.
		if text, err := os.ReadFile(p); err == nil && strings.Contains(string(text), name) {
			t.Errorf("%s is still there: %s", p, text)
		}
	}
}

// wrapper runs gpufence-runtime on a bundle and gives what an engine would see.
func wrapper(t *testing.T, dir string, args ...string) (log, stdout, stderr string, code int) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	link := filepath.Join(dir, "gpufence-runtime.cri")
	if err := os.Symlink(filepath.Join(dist(t), "bin", "gpufence-runtime"), link); err != nil && !errors.Is(err, os.ErrExist) {
		t.Fatal(err)
	}
	config := filepath.Join(dir, "config.toml")
	if _, err := os.Stat(config); errors.Is(err, os.ErrNotExist) {
		text := fmt.Sprintf("socket = %q\nrun-dir = %q\nstate-dir = %q\nruntimes = [\"runc\"]\nwait-socket = \"100ms\"\n", filepath.Join(dir, "s"), filepath.Join(dir, "run"), filepath.Join(dir, "state"))
		if err := os.WriteFile(config, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	logFile := filepath.Join(dir, "log.json")
	cmd := exec.CommandContext(ctx, link, append([]string{"--root", filepath.Join(dir, "runc"), "--log", logFile, "--log-format", "json"}, args...)...)
	cmd.Env = append(os.Environ(), "GPUFENCE_CONFIG="+config)
	var out, errs bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &errs
	if err := cmd.Run(); err != nil && cmd.ProcessState == nil {
		t.Fatal(err)
	}
	text, err := os.ReadFile(logFile)
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		t.Fatal(err)
	}
	return string(text), out.String(), errs.String(), cmd.ProcessState.ExitCode()
}

// TestBrokenBundlesAreRefused: a config.json that is not one gives a coded sentence in the
// engine's log, and stays as it was.
func TestBrokenBundlesAreRefused(t *testing.T) {
	for _, tt := range []struct {
		name, text, code string
	}{
		{"truncated", `{"ociVersion":"1.0.2","process":{"args":["/x"`, "E1002"},
		{"empty", ``, "E1002"},
		{"a list", `[1,2]`, "E1002"},
		{"not JSON", "\x00\x01\xff", "E1002"},
		{"huge", `{"ociVersion":"1.0.2","x":"` + strings.Repeat("y", 17<<20) + `"}`, "E1003"},
		{"annotations that are numbers", `{"ociVersion":"1.0.2","annotations":{"io.kubernetes.cri.container-type":7},"process":{"args":["/x"]},"root":{"path":"rootfs"}}`, "E1002"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			dir := t.TempDir()
			config := filepath.Join(dir, "config.json")
			if err := os.WriteFile(config, []byte(tt.text), 0o600); err != nil {
				t.Fatal(err)
			}
			log, stdout, stderr, code := wrapper(t, dir, "create", "--bundle", dir, "broken")
			if code != 1 || stdout != "" || !strings.Contains(log, "gpufence: "+tt.code+" ") || !strings.Contains(log, `"level":"error"`) {
				t.Errorf("exit %d, stdout %q, stderr %q, log %.400q; want %s", code, stdout, stderr, log, tt.code)
			}
			if text, err := os.ReadFile(config); err != nil || string(text) != tt.text {
				t.Errorf("config.json was changed: %v", err)
			}
		})
	}
	t.Run("no config.json", func(t *testing.T) {
		dir := t.TempDir()
		log, _, _, code := wrapper(t, dir, "create", "--bundle", dir, "broken")
		if code != 1 || !strings.Contains(log, "gpufence: E1004 ") {
			t.Errorf("exit %d, log %q", code, log)
		}
	})
}

// TestBrokenPolicy: gpufenced does not start with it, the wrapper refuses to create, and what
// runs can still be stopped.
func TestBrokenPolicy(t *testing.T) {
	dir := t.TempDir()
	config := filepath.Join(dir, "config.toml")
	if err := os.WriteFile(config, []byte("socket = 7\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	cmd := exec.CommandContext(t.Context(), filepath.Join(dist(t), "bin", "gpufenced"), "--config", config)
	out, err := cmd.CombinedOutput()
	var exit *exec.ExitError
	if !errors.As(err, &exit) || !strings.Contains(string(out), "E1503") || !strings.Contains(string(out), config) {
		t.Errorf("gpufenced: %v, %s", err, out)
	}
	spec := `{"ociVersion":"1.0.2","annotations":{"io.kubernetes.cri.container-type":"container","gpufence.dev/memory.max":"1Gi"},"process":{"args":["/x"],"cwd":"/"},"root":{"path":"rootfs"},"linux":{}}`
	if err := os.WriteFile(filepath.Join(dir, "config.json"), []byte(spec), 0o600); err != nil {
		t.Fatal(err)
	}
	log, _, stderr, code := wrapper(t, dir, "create", "--bundle", dir, "broken")
	if code != 1 || !strings.Contains(log, "E1503") {
		t.Errorf("create: exit %d, log %q, stderr %q", code, log, stderr)
	}
	if _, _, stderr, code := wrapper(t, dir, "delete", "--force", "nothing"); code != 0 {
		t.Errorf("delete --force: exit %d, %s", code, stderr)
	}
}

// TestFailingDemoLeavesNothing: a runtime that starts nothing makes every claim fail, and still
// everything that was started is stopped.
func TestFailingDemoLeavesNothing(t *testing.T) {
	tmp, err := os.MkdirTemp("", "e2e-") // short: a socket's path has 108 bytes
	if err != nil {
		t.Fatal(err)
	}
	defer os.RemoveAll(tmp)
	if err := os.WriteFile(filepath.Join(tmp, "runc"), []byte("#!/bin/sh\necho nothing starts here >&2\nexit 1\n"), 0o755); err != nil {
		t.Fatal(err)
	}
	cmd := exec.CommandContext(t.Context(), filepath.Join(dist(t), "bin", "gpufence"), "demo")
	cmd.Env = append(os.Environ(), "TMPDIR="+tmp, "PATH="+tmp+":"+os.Getenv("PATH"))
	out, err := cmd.CombinedOutput()
	var exit *exec.ExitError
	if !errors.As(err, &exit) || exit.ExitCode() != 1 || !strings.Contains(string(out), "NOT HELD") {
		t.Errorf("ended with %v: %s", err, out)
	}
	processes, err := filepath.Glob("/proc/[0-9]*/cmdline")
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range processes {
		// A process that has gone meanwhile has nothing to say.
		if text, err := os.ReadFile(p); err == nil && strings.Contains(string(text), tmp) {
			t.Errorf("%s is still there: %s", p, text)
		}
	}
	if left, err := filepath.Glob(filepath.Join(tmp, "gpufence-demo-*")); err != nil || len(left) > 0 {
		t.Errorf("folders are still there: %v, %v", left, err)
	}
}
