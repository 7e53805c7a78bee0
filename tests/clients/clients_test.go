// SPDX-License-Identifier: Apache-2.0

// Package clients tests the GPU programs of this folder against the simulated GPU: a test
// program that reports wrongly would make every test that is built on it worthless.
package clients

import (
	"bufio"
	"bytes"
	"context"
	"debug/elf"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"
)

const (
	mib     = 1 << 20
	gpuMiB  = 2048
	timeout = 30 * time.Second // against hanging only
)

func dist(t *testing.T, name string) string {
	t.Helper()
	dir := os.Getenv("GPUFENCE_DIST")
	if dir == "" {
		dir = filepath.Join("..", "..", "dist")
	}
	path, err := filepath.Abs(filepath.Join(dir, name))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(path); err != nil {
		t.Fatalf("run make build first: %v", err)
	}
	return path
}

// gpu starts a simulated GPU of 2 GiB and gives the environment in which a client finds it.
func gpu(t *testing.T) []string {
	t.Helper()
	dir, err := os.MkdirTemp("", "clients-") // short: a socket's path has 108 bytes
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	ready := filepath.Join(dir, "pid")
	cmd := exec.CommandContext(context.WithoutCancel(t.Context()), dist(t, "bin/simgpud"), "--dir", dir, "--gpus", "1", "--memory", fmt.Sprintf("%dMiB", gpuMiB), "--context-bytes", "100MiB", "--pid-file", ready)
	var log bytes.Buffer
	cmd.Stderr = &log
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := cmd.Process.Signal(syscall.SIGTERM); err != nil {
			t.Errorf("stop simgpud: %v", err)
		}
		if err := cmd.Wait(); err != nil {
			t.Errorf("simgpud: %v: %s", err, log.String())
		}
	})
	for deadline := time.Now().Add(timeout); ; time.Sleep(10 * time.Millisecond) {
		if _, err := os.Stat(ready); err == nil {
			break
		}
		if time.Now().After(deadline) {
			t.Fatalf("simgpud is not ready: %s", log.String())
		}
	}
	return []string{"SIMGPU_DIR=" + dir, "LD_LIBRARY_PATH=" + filepath.Dir(dist(t, "simgpu/libcuda.so.1")), "PATH=/usr/bin:/bin"}
}

type line map[string]any

// u is a number of a line.
func (l line) u(t *testing.T, name string) uint64 {
	t.Helper()
	f, ok := l[name].(float64)
	if !ok {
		t.Fatalf("%v has no number %q", l, name)
	}
	return uint64(f)
}

// run gives a program its input and returns what it said.
func run(t *testing.T, env []string, input string, program string, args ...string) (lines []line, stderr string, code int) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), timeout)
	defer cancel()
	cmd := exec.CommandContext(ctx, program, args...)
	cmd.Env = env
	cmd.Stdin = strings.NewReader(input)
	var out, errs bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &errs
	if err := cmd.Run(); err != nil && cmd.ProcessState == nil {
		t.Fatal(err)
	}
	if ctx.Err() != nil {
		t.Fatalf("%s %q hangs; it said %s", program, args, out.String())
	}
	for _, text := range strings.Split(strings.TrimSpace(out.String()), "\n") {
		if text == "" {
			continue
		}
		var l line
		if err := json.Unmarshal([]byte(text), &l); err != nil {
			t.Fatalf("%q is not JSON: %v", text, err)
		}
		lines = append(lines, l)
	}
	return lines, errs.String(), cmd.ProcessState.ExitCode()
}

func TestClientCountsWhatTheDeviceGrants(t *testing.T) {
	env := gpu(t)
	for _, how := range []string{"proc", "dlsym"} {
		t.Run(how, func(t *testing.T) {
			lines, _, code := run(t, env, "context\nfill 64\nmeminfo\nfree 512\nfill 64 600\nfree 0\nnvml\nalloc 99999\nmanaged 8\npitch 8\nrelease\nstatus\n", dist(t, "clients/client"), "--resolve="+how)
			if code != 0 || len(lines) != 12 {
				t.Fatalf("exit %d after %d lines: %v", code, len(lines), lines)
			}
			context, fill, info, free, again, all, nvml, tooMuch, managed, pitch, release, status := lines[0], lines[1], lines[2], lines[3], lines[4], lines[5], lines[6], lines[7], lines[8], lines[9], lines[10], lines[11]
			want := map[string]string{"proc": "cuGetProcAddress_v2", "dlsym": "dlsym"}[how]
			if context["ok"] != true || context["entry"] != want || !strings.HasPrefix(context["uuid"].(string), "GPU-") {
				t.Errorf("context: %v", context)
			}
			total := info.u(t, "total_bytes")
			if held := fill.u(t, "held_bytes"); fill["result_name"] != "CUDA_ERROR_OUT_OF_MEMORY" || held%(64*mib) != 0 || held != fill.u(t, "granted_bytes") ||
				held+100*mib > total || held+100*mib+64*mib <= total {
				t.Errorf("fill of %d: %v", total, fill)
			}
			if got := total - info.u(t, "free_bytes"); got != fill.u(t, "held_bytes")+100*mib {
				t.Errorf("cuMemGetInfo shows %d in use, held are %d and a context", got, fill.u(t, "held_bytes"))
			}
			if free.u(t, "freed_bytes") != 512*mib {
				t.Errorf("free: %v", free)
			}
			if again.u(t, "granted_bytes") != 0 || again["result_name"] != "CUDA_SUCCESS" {
				t.Errorf("a fill up to less than is held: %v", again)
			}
			if all.u(t, "held_bytes") != 0 || all.u(t, "blocks") != 0 {
				t.Errorf("free 0: %v", all)
			}
			if nvml["ok"] != true || nvml.u(t, "total_bytes") != gpuMiB*mib || nvml.u(t, "v2_total_bytes") != gpuMiB*mib {
				t.Errorf("nvml: %v", nvml)
			}
			if tooMuch["ok"] != false || tooMuch["result_name"] != "CUDA_ERROR_OUT_OF_MEMORY" {
				t.Errorf("alloc of more than there is: %v", tooMuch)
			}
			if managed["ok"] != true || pitch["ok"] != true || pitch.u(t, "blocks") != 2 {
				t.Errorf("managed and pitch: %v %v", managed, pitch)
			}
			if release["ok"] != true || status.u(t, "held_bytes") != 0 {
				t.Errorf("release: %v %v", release, status)
			}
		})
	}
}

func TestClientSaysWhatIsWrong(t *testing.T) {
	bare := []string{"PATH=/usr/bin:/bin"}
	for _, tt := range []struct{ in, why string }{
		{"frobnicate", "no such command"},
		{"alloc 64", "no context: say context first"},
		{"alloc", "wrong number of arguments"},
		{"fill 1 2 3 4", "too many arguments"},
		{"alloc -1", "an argument is not a number"},
		{"alloc 1x", "an argument is not a number"},
		{"alloc 18446744073709551616", "an argument is not a number"},
		{"stop", "nothing runs"},
		{"context", "open libcuda.so.1"},
		{"nvml", "open libnvidia-ml.so.1"},
	} {
		lines, _, code := run(t, bare, tt.in+"\n", dist(t, "clients/client"))
		if code != 0 || len(lines) != 1 || lines[0]["ok"] != false || !strings.HasPrefix(fmt.Sprint(lines[0]["why"]), tt.why) {
			t.Errorf("%q: exit %d, %v; want %q", tt.in, code, lines, tt.why)
		}
	}
	if _, stderr, code := run(t, bare, "", dist(t, "clients/client"), "--resolve=magic"); code != 2 || !strings.Contains(stderr, "no such option") {
		t.Errorf("an unknown option: exit %d, %q", code, stderr)
	}
	if _, stderr, code := run(t, bare, strings.Repeat("x", 4096), dist(t, "clients/client")); code != 2 || !strings.Contains(stderr, "longer than") {
		t.Errorf("an endless line: exit %d, %q", code, stderr)
	}
	if lines, _, code := run(t, bare, "", dist(t, "clients/client"), "frobnicate"); code != 1 || len(lines) != 1 {
		t.Errorf("a wrong line among the arguments: exit %d, %v", code, lines)
	}
	if _, _, code := run(t, bare, "exit 7\nstatus\n", dist(t, "clients/client")); code != 7 {
		t.Errorf("exit 7: exit %d", code)
	}
}

// driven is a client with whom one talks.
type driven struct {
	t     *testing.T
	cmd   *exec.Cmd
	in    *os.File
	lines chan line
}

func drive(t *testing.T, env []string, args ...string) *driven {
	t.Helper()
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	d := &driven{t: t, cmd: exec.CommandContext(t.Context(), dist(t, "clients/client"), args...), in: w, lines: make(chan line, 64)}
	d.cmd.Env, d.cmd.Stdin = env, r
	out, err := d.cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := d.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	r.Close()
	go func() {
		defer close(d.lines)
		s := bufio.NewScanner(out)
		for s.Scan() {
			var l line
			if err := json.Unmarshal(s.Bytes(), &l); err != nil {
				t.Errorf("%q is not JSON: %v", s.Text(), err)
			}
			d.lines <- l
		}
	}()
	t.Cleanup(func() { w.Close() })
	return d
}

func (d *driven) say(text string) {
	d.t.Helper()
	if _, err := d.in.WriteString(text + "\n"); err != nil {
		d.t.Fatal(err)
	}
}

func (d *driven) hear(op string) line {
	d.t.Helper()
	deadline := time.After(timeout)
	for {
		select {
		case l, ok := <-d.lines:
			if !ok {
				d.t.Fatalf("it ended, want %q", op)
			}
			if l["op"] == op {
				return l
			}
		case <-deadline:
			d.t.Fatalf("no answer to %q", op)
		}
	}
}

func TestClientChurnsAndGrowsUntilTold(t *testing.T) {
	env := gpu(t)
	c := drive(t, env)
	c.say("context")
	c.hear("context")
	c.say("churn 16 8 1")
	for first := uint64(0); ; {
		c.say("status")
		s := c.hear("status")
		if s.u(t, "failures") != 0 {
			t.Fatalf("churn within the device failed: %v", s)
		}
		if n := s.u(t, "frees"); n > first+20 {
			break
		}
	}
	c.say("alloc 1")
	if l := c.hear("alloc 1"); l["ok"] != false {
		t.Errorf("an order while something runs: %v", l)
	}
	c.say("stop")
	k := c.hear("churn")
	if k.u(t, "failures") != 0 || k.u(t, "peak_bytes") != 128*mib || k.u(t, "allocs")-k.u(t, "frees") != k.u(t, "blocks") {
		t.Errorf("churn: %v", k)
	}

	// A neighbour that fills the device makes churn count failures, and grow wait.
	other := drive(t, env)
	other.say("context")
	other.hear("context")
	other.say("fill 16")
	other.hear("fill")
	c.say("free 0")
	c.hear("free")
	other.say("fill 16")
	other.hear("fill")
	c.say("churn 64 4 1")
	for {
		c.say("status")
		if c.hear("status").u(t, "failures") > 0 {
			break
		}
	}
	c.say("stop")
	if k := c.hear("churn"); k.u(t, "first_failure") != 2 || k.u(t, "first_failure_ns") == 0 {
		t.Errorf("churn beside a full device: %v", k)
	}
	c.say("grow 64 256 1")
	for {
		c.say("status")
		if c.hear("status").u(t, "refused") > 0 {
			break
		}
	}
	other.say("free 0")
	if g := c.hear("grow"); g.u(t, "reached") != 1 || g.u(t, "held_bytes") != 256*mib || g.u(t, "refused") == 0 {
		t.Errorf("grow: %v", g)
	}

	// Whoever drove it is gone.
	c.say("churn 16 2 1")
	c.in.Close()
	c.hear("churn")
	if err := c.cmd.Wait(); err != nil {
		t.Errorf("after the end of its input: %v", err)
	}
	// SIGTERM ends what runs, with its report.
	other.say("churn 16 2 1")
	other.say("status")
	other.hear("status")
	if err := other.cmd.Process.Signal(syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	other.hear("churn")
	if err := other.cmd.Wait(); err != nil {
		t.Errorf("after SIGTERM: %v", err)
	}
}

func TestClientHoldsUntilSIGTERM(t *testing.T) {
	c := drive(t, gpu(t), "context", "alloc 64", "hold")
	if h := c.hear("hold"); h.u(t, "held_bytes") != 64*mib {
		t.Errorf("hold: %v", h)
	}
	if err := c.cmd.Process.Signal(syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	if err := c.cmd.Wait(); err != nil {
		t.Errorf("after SIGTERM: %v", err)
	}
}

func TestBypassIsStaticAndFillsTheDevice(t *testing.T) {
	f, err := elf.Open(dist(t, "clients/bypass"))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	for _, p := range f.Progs {
		if p.Type == elf.PT_INTERP || p.Type == elf.PT_DYNAMIC {
			t.Fatalf("bypass has a %v: a library could be loaded into it", p.Type)
		}
	}
	env := gpu(t)
	cmd := exec.CommandContext(t.Context(), dist(t, "clients/bypass"), "64", "1")
	cmd.Env = env
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	var last, before line
	for s := bufio.NewScanner(out); s.Scan(); {
		var l line
		if err := json.Unmarshal(s.Bytes(), &l); err != nil {
			t.Fatal(err)
		}
		if l["op"] == "hold" {
			last = l
			break
		}
		before = l
	}
	if last == nil || before["op"] != "full" || last.u(t, "held_bytes") != 100*mib+64*mib*last.u(t, "blocks") || last.u(t, "blocks") < 20 {
		t.Errorf("bypass: %v, %v", before, last)
	}
	if err := cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	if err := cmd.Wait(); err == nil {
		t.Error("it was not killed")
	}
	for _, args := range [][]string{{}, {"64"}, {"0", "1"}, {"x", "1"}, {"64", "-1"}, {"64", "1", "2", "3"}} {
		if _, stderr, code := run(t, env, "", dist(t, "clients/bypass"), args...); code != 2 || !strings.Contains(stderr, "usage") {
			t.Errorf("bypass %q: exit %d, %q", args, code, stderr)
		}
	}
	if lines, _, code := run(t, []string{"SIMGPU_DIR=/nonexistent"}, "", dist(t, "clients/bypass"), "64", "1"); code != 1 || len(lines) != 1 || lines[0]["op"] != "open" {
		t.Errorf("without a device: exit %d, %v", code, lines)
	}
}
