// SPDX-License-Identifier: Apache-2.0

package k8s

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// patience bounds what is waited for; only what hangs takes so long, also on a machine with other work.
const patience = 120 * time.Second

// process is a program that runs beside the test.
type process struct {
	name string
	cmd  *exec.Cmd
	log  string
	done chan struct{}
}

// launcher is one thread that starts every process: a parent's death signal follows the thread that
// forked, and Go's other threads come and go.
var launcher = sync.OnceValue(func() chan func() {
	work := make(chan func())
	go func() {
		runtime.LockOSThread()
		for f := range work {
			f()
		}
	}()
	return work
})

// start starts a program that dies with the test, whatever ends that. It writes into log.
func start(name, log string, env []string, program string, args ...string) (*process, error) {
	f, err := os.OpenFile(log, os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o600)
	if err != nil {
		return nil, fmt.Errorf("start %s: %w", name, err)
	}
	defer f.Close()
	// Ended by stop, in order, not with a context.
	cmd := exec.CommandContext(context.Background(), program, args...)
	cmd.Env = append(os.Environ(), env...)
	cmd.Stdout, cmd.Stderr = f, f
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
	result := make(chan error)
	launcher() <- func() { result <- cmd.Start() }
	if err := <-result; err != nil {
		return nil, fmt.Errorf("start %s: %w", name, err)
	}
	p := &process{name: name, cmd: cmd, log: log, done: make(chan struct{})}
	go func() {
		_ = cmd.Wait() // how it ended is in ProcessState
		close(p.done)
	}()
	return p, nil
}

// ready waits until probe says so, as long as the process lives.
func (p *process) ready(ctx context.Context, probe func(context.Context) error) error {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	for {
		err := probe(ctx)
		if err == nil {
			return nil
		}
		select {
		case <-p.done:
			return fmt.Errorf("%s ended at its start (%s):\n%s", p.name, p.cmd.ProcessState, tail(p.log, 15))
		case <-ctx.Done():
			return fmt.Errorf("%s is not ready (%w):\n%s", p.name, err, tail(p.log, 15))
		case <-time.After(100 * time.Millisecond):
		}
	}
}

// stop ends it in order, or after a while anyhow.
func (p *process) stop() error {
	if p == nil {
		return nil
	}
	if err := p.cmd.Process.Signal(syscall.SIGTERM); err != nil && !errors.Is(err, os.ErrProcessDone) {
		return fmt.Errorf("stop %s: %w", p.name, err)
	}
	select {
	case <-p.done:
		return nil
	case <-time.After(20 * time.Second):
	}
	err := p.cmd.Process.Kill()
	<-p.done
	return errors.Join(fmt.Errorf("%s did not stop and was killed:\n%s", p.name, tail(p.log, 15)), err)
}

// kill ends it at whatever it does.
func (p *process) kill() error {
	if err := p.cmd.Process.Kill(); err != nil {
		return fmt.Errorf("kill %s: %w", p.name, err)
	}
	<-p.done
	return nil
}

// run runs a command to its end and gives its stdout; what it says on stderr is in the error.
func run(ctx context.Context, stdin, program string, args ...string) (string, error) {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	cmd := exec.CommandContext(ctx, program, args...)
	cmd.WaitDelay = time.Second
	var stdout, stderr bytes.Buffer
	cmd.Stdin, cmd.Stdout, cmd.Stderr = strings.NewReader(stdin), &stdout, &stderr
	if err := cmd.Run(); err != nil {
		return stdout.String(), fmt.Errorf("%s %s: %w: %s", filepath.Base(program), strings.Join(args, " "), err, strings.TrimSpace(stderr.String()))
	}
	return stdout.String(), nil
}

// until waits until f says that it is so; what it says of the state is in the error.
func until(ctx context.Context, what string, f func(context.Context) (bool, string)) error {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	for {
		ok, state := f(ctx)
		if ok {
			return nil
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("never: %s; last: %s (%w)", what, state, ctx.Err())
		case <-time.After(200 * time.Millisecond):
		}
	}
}

func tail(path string, lines int) string {
	text, err := os.ReadFile(path)
	if err != nil {
		return err.Error()
	}
	all := strings.Split(strings.TrimSpace(string(text)), "\n")
	return strings.Join(all[max(0, len(all)-lines):], "\n")
}

// must ends a step at the first thing that went wrong.
func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// skip says why the test cannot run here; where it must, that is a failure.
func skip(t *testing.T, format string, args ...any) {
	t.Helper()
	if os.Getenv("GPUFENCE_MUST") == "1" {
		t.Fatalf("GPUFENCE_MUST=1, but "+format, args...)
	}
	t.Skipf("SKIPPED: "+format, args...)
}

// mountsBelow lists what is mounted at or below a folder, the newest first.
func mountsBelow(dir string) ([]string, error) {
	f, err := os.Open("/proc/self/mountinfo")
	if err != nil {
		return nil, err
	}
	defer f.Close()
	var out []string
	lines := bufio.NewScanner(f)
	for lines.Scan() {
		if fields := strings.Fields(lines.Text()); len(fields) > 4 && (fields[4] == dir || strings.HasPrefix(fields[4], dir+"/")) {
			out = append([]string{fields[4]}, out...)
		}
	}
	return out, lines.Err()
}

// unmountBelow takes off what is mounted at or below a folder, and says what that was.
func unmountBelow(dir string) ([]string, error) {
	mounts, err := mountsBelow(dir)
	if err != nil {
		return nil, fmt.Errorf("list mounts below %s: %w", dir, err)
	}
	var errs []error
	for _, m := range mounts {
		if err := unix.Unmount(m, unix.MNT_DETACH); err != nil && !errors.Is(err, unix.EINVAL) {
			errs = append(errs, fmt.Errorf("unmount %s: %w", m, err))
		}
	}
	return mounts, errors.Join(errs...)
}

// memory is a folder that is no disk, as /run is on a real node.
func memory() string {
	for _, dir := range []string{"/run", "/dev/shm"} {
		var s unix.Statfs_t
		if err := unix.Statfs(dir, &s); err == nil && s.Type == unix.TMPFS_MAGIC && unix.Access(dir, unix.W_OK) == nil {
			return dir
		}
	}
	return os.TempDir()
}
