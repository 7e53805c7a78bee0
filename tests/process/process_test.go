// SPDX-License-Identifier: Apache-2.0

package process

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"
)

// helper makes this test binary a program that hangs, or one that has started another.
const helper = "GPUFENCE_PROCESS_TEST"

func TestMain(m *testing.M) {
	switch os.Getenv(helper) {
	case "hang":
		fmt.Println("up")
		time.Sleep(time.Hour)
	case "parent":
		p, err := Start(context.Background(), Options{Log: os.DevNull}, "/bin/sleep", "300")
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		fmt.Println(p.PID())
		time.Sleep(time.Hour)
	}
	os.Exit(m.Run())
}

// started is a script that has said that it is up.
func started(t *testing.T, o Options, script string) *Process {
	t.Helper()
	if o.Log == "" {
		o.Log = filepath.Join(t.TempDir(), "log")
	}
	p, err := Start(t.Context(), o, "/bin/sh", "-c", script)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		// What a test leaves, however it ended.
		if err := p.Kill(); err != nil && !errors.Is(err, os.ErrProcessDone) {
			t.Error(err)
		}
	})
	if err := p.Ready(t.Context(), p.Says("up")); err != nil {
		t.Fatal(err)
	}
	return p
}

// number is what a script says behind "up".
func number(t *testing.T, p *Process) int {
	t.Helper()
	n, err := strconv.Atoi(strings.TrimSpace(strings.TrimPrefix(p.Said(), "up ")))
	if err != nil {
		t.Fatalf("it says %q: %v", p.Said(), err)
	}
	return n
}

func alive(pid int) bool {
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	return err == nil && !strings.Contains(string(text), ") Z ")
}

// gone waits until a process has ended; how long it may take bounds only what hangs.
func gone(t *testing.T, pid int) {
	t.Helper()
	for begun := time.Now(); alive(pid); time.Sleep(5 * time.Millisecond) {
		if time.Since(begun) > 20*time.Second {
			t.Fatalf("process %d lives", pid)
		}
	}
}

func TestStopEndsInOrder(t *testing.T) {
	p := started(t, Options{Env: []string{"WORD=given"}}, `trap 'echo "bye $WORD"; exit 3' TERM; echo up; while :; do sleep 0.02; done`)
	if p.State() != nil || !p.Running() {
		t.Errorf("it is running %v, %v", p.Running(), p.State())
	}
	if err := p.Stop(t.Context()); err != nil {
		t.Fatal(err)
	}
	if p.Running() || p.State().ExitCode() != 3 || p.Said() != "up\nbye given\n" || p.Tail(1) != "bye given" {
		t.Errorf("it is running %v, ended with %v, said %q", p.Running(), p.State(), p.Said())
	}
	if err := errors.Join(p.Stop(t.Context()), p.Await(t.Context()), (*Process)(nil).Stop(t.Context())); err != nil {
		t.Errorf("one that has ended: %v", err)
	}
}

func TestLogKeepsWhatOthersSaid(t *testing.T) {
	log := filepath.Join(t.TempDir(), "log")
	for _, said := range []string{"up first", "up second"} {
		p := started(t, Options{Log: log}, "echo "+said+"; exec sleep 300")
		if err := p.Stop(t.Context()); err != nil {
			t.Fatal(err)
		}
		if p.Said() != said+"\n" {
			t.Errorf("it said %q, want %q", p.Said(), said)
		}
	}
	if got := Tail(log, 5); got != "up first\nup second" {
		t.Errorf("the log is %q", got)
	}
	if got := Tail(log+".gone", 5); !strings.Contains(got, "no such file") {
		t.Errorf("a log that is not there is %q", got)
	}
}

func TestStopKillsWhatDoesNotStop(t *testing.T) {
	for name, give := range map[string]func() (context.Context, time.Duration){
		"its time": func() (context.Context, time.Duration) { return t.Context(), 100 * time.Millisecond },
		"the context": func() (context.Context, time.Duration) {
			ctx, cancel := context.WithCancel(t.Context())
			cancel()
			return ctx, time.Hour
		},
	} {
		t.Run(name, func(t *testing.T) {
			ctx, timeout := give()
			p := started(t, Options{Name: "stubborn", TimeoutStop: timeout}, `trap '' TERM; echo up; while :; do sleep 0.02; done`)
			err := p.Stop(ctx)
			if err == nil || !strings.Contains(err.Error(), "stubborn did not stop and was killed:\nup") {
				t.Errorf("%v", err)
			}
			if p.Running() || alive(p.PID()) {
				t.Error("it lives")
			}
		})
	}
}

func TestStopLeavesNoOrphans(t *testing.T) {
	p := started(t, Options{Name: "careless"}, `sleep 300 & echo up $!; wait`)
	orphan := number(t, p)
	err := p.Stop(t.Context())
	if want := fmt.Sprintf("careless left running: [\"%d sleep 300\"]", orphan); err == nil || err.Error() != want {
		t.Errorf("%v, want %s", err, want)
	}
	gone(t, orphan)
}

// TestStopWaitsForFollowers: what ends by itself when its parent has is no orphan.
func TestStopWaitsForFollowers(t *testing.T) {
	p := started(t, Options{}, `sleep 0.2 & echo up $!; wait`)
	if err := p.Stop(t.Context()); err != nil {
		t.Error(err)
	}
}

func TestKillIsACrash(t *testing.T) {
	p := started(t, Options{}, `sleep 300 & echo up $!; wait`)
	child := number(t, p)
	t.Cleanup(func() {
		if err := syscall.Kill(child, syscall.SIGKILL); err != nil {
			t.Errorf("what it had started did not outlive it: %v", err)
		}
	})
	if err := p.Kill(); err != nil {
		t.Fatal(err)
	}
	if s, ok := p.State().Sys().(syscall.WaitStatus); !ok || s.Signal() != syscall.SIGKILL {
		t.Errorf("it ended with %v", p.State())
	}
	if !alive(child) {
		t.Error("what it had started was ended, too")
	}
	if err := p.Kill(); !errors.Is(err, os.ErrProcessDone) {
		t.Errorf("one that has ended was killed: %v", err)
	}
}

func TestAwaitGivesUp(t *testing.T) {
	p := started(t, Options{Name: "endless", TimeoutStop: 50 * time.Millisecond}, `echo up; exec sleep 300`)
	if err := p.Await(t.Context()); err == nil || !strings.Contains(err.Error(), "endless: it lives after 50ms") {
		t.Errorf("%v", err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := p.Await(ctx); !errors.Is(err, context.Canceled) {
		t.Errorf("%v", err)
	}
}

func TestReadySaysWhatWentWrong(t *testing.T) {
	never := func(context.Context) error { return errors.New("not yet") }
	log := filepath.Join(t.TempDir(), "log")
	p, err := Start(t.Context(), Options{Name: "short", Log: log}, "/bin/sh", "-c", "echo oh no; exit 7")
	if err != nil {
		t.Fatal(err)
	}
	if err := p.Ready(t.Context(), never); err == nil || err.Error() != "short ended at its start (exit status 7):\noh no" {
		t.Errorf("%v", err)
	}
	p = started(t, Options{Name: "slow"}, `echo up; exec sleep 300`)
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	if err := p.Ready(ctx, never); err == nil || err.Error() != "slow is not ready (not yet):\nup" {
		t.Errorf("%v", err)
	}
	if !p.Running() {
		t.Error("it was ended")
	}
}

// TestReadySaysWhereAProgramHangs: with its goroutines' stacks, for which it is ended.
func TestReadySaysWhereAProgramHangs(t *testing.T) {
	p, err := Start(t.Context(), Options{Name: "hanging", Log: filepath.Join(t.TempDir(), "log"), Env: []string{helper + "=hang"}, Stacks: true}, "/proc/self/exe")
	if err != nil {
		t.Fatal(err)
	}
	if err := p.Ready(t.Context(), p.Says("up")); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	err = p.Ready(ctx, func(context.Context) error { return errors.New("not yet") })
	if err == nil || !strings.Contains(err.Error(), "hanging is not ready (not yet):\nup\nSIGQUIT") || !strings.Contains(err.Error(), "time.Sleep") {
		t.Errorf("%v", err)
	}
	if p.Running() {
		t.Error("it lives")
	}
}

func TestDiesWithTheTest(t *testing.T) {
	parent := exec.CommandContext(t.Context(), "/proc/self/exe")
	parent.Env = append(os.Environ(), helper+"=parent")
	out, err := parent.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := parent.Start(); err != nil {
		t.Fatal(err)
	}
	var pid int
	if _, err := fmt.Fscan(bufio.NewReader(out), &pid); err != nil {
		t.Fatal(err)
	}
	if !alive(pid) {
		t.Error("it has ended before")
	}
	if err := parent.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	gone(t, pid)
	_ = parent.Wait() // killed
}

func TestStartRefuses(t *testing.T) {
	over, cancel := context.WithCancel(t.Context())
	cancel()
	broken := errors.New("broken")
	log := filepath.Join(t.TempDir(), "log")
	for name, tt := range map[string]struct {
		ctx     context.Context
		o       Options
		program string
		want    error
	}{
		"a program that is not there": {t.Context(), Options{Log: log}, "/no/such/program", os.ErrNotExist},
		"a log in no folder":          {t.Context(), Options{Log: "/no/such/folder/log"}, "/bin/true", os.ErrNotExist},
		"no more":                     {over, Options{Log: log}, "/bin/true", context.Canceled},
		"what cannot be made so":      {t.Context(), Options{Log: log, Edit: func(*exec.Cmd) error { return broken }}, "/bin/true", broken},
	} {
		_, err := Start(tt.ctx, tt.o, tt.program)
		if want := "start " + filepath.Base(tt.program) + ": "; !errors.Is(err, tt.want) || !strings.HasPrefix(err.Error(), want) {
			t.Errorf("%s: %v, want %s%v", name, err, want, tt.want)
		}
	}
}

func TestAnswers(t *testing.T) {
	socket := filepath.Join(t.TempDir(), "s")
	if err := Answers("unix", socket)(t.Context()); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("no socket: %v", err)
	}
	l, err := net.Listen("unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	if err := Answers("unix", socket)(t.Context()); err != nil {
		t.Error(err)
	}
}

func TestChild(t *testing.T) {
	p := started(t, Options{}, `sleep 300 & echo up $!; wait`)
	want := number(t, p)
	if got, err := p.Child(); err != nil || got != want {
		t.Errorf("its child is %d, want %d: %v", got, want, err)
	}
	if err := p.Stop(t.Context()); err == nil {
		t.Error("its child was no orphan")
	}
	if got, err := p.Child(); err == nil {
		t.Errorf("one that has ended has the child %d", got)
	}
}

func TestNaming(t *testing.T) {
	mark := t.TempDir() // in no other's command line
	p := started(t, Options{}, `echo up; exec sleep 300`)
	var named *Process
	var err error
	if named, err = Start(t.Context(), Options{Log: filepath.Join(mark, "log")}, "/bin/sh", "-c", `echo up; kill -STOP $$`, mark); err != nil {
		t.Fatal(err)
	}
	if err := named.Ready(t.Context(), named.Says("up")); err != nil {
		t.Fatal(err)
	}
	lines, err := Naming(mark)
	if err != nil || len(lines) != 1 || !strings.HasSuffix(lines[0], mark) {
		t.Errorf("%q name it: %v", lines, err)
	}
	lines, err = KillNaming(mark)
	if err != nil || len(lines) != 1 || !strings.HasPrefix(lines[0], strconv.Itoa(named.PID())+" ") {
		t.Errorf("%q were killed: %v", lines, err)
	}
	if err := named.Await(t.Context()); err != nil || !p.Running() {
		t.Errorf("killed: %v; the other runs: %v", err, p.Running())
	}
	if lines, err := KillNaming(mark); err != nil || len(lines) != 0 {
		t.Errorf("%q were killed again: %v", lines, err)
	}
}

// told is a test that has failed, or not.
type told struct {
	failed bool
	said   []string
}

func (*told) Helper()        {}
func (t *told) Failed() bool { return t.failed }
func (t *told) Logf(format string, args ...any) {
	t.said = append(t.said, fmt.Sprintf(format, args...))
}

func TestLogIfFailed(t *testing.T) {
	p := started(t, Options{Name: "talker"}, `echo up; exec sleep 300`)
	for _, tt := range []struct {
		p      *Process
		failed bool
		want   []string
	}{{p, false, nil}, {p, true, []string{"the end of talker's log:\nup"}}, {nil, true, nil}} {
		got := told{failed: tt.failed}
		if tt.p.LogIfFailed(&got); !slices.Equal(got.said, tt.want) {
			t.Errorf("failed: %v, it says %q, want %q", tt.failed, got.said, tt.want)
		}
	}
}
