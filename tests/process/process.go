// SPDX-License-Identifier: Apache-2.0

// Package process runs programs beside a test: daemons, container engines, and command lines that stay with their
// container. What one says goes into a file, whose end is in every error about it. It dies with the test, whatever ends
// that; what [Process.Stop] ends leaves nothing behind, or that is an error.
package process

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// Options say how a program is run.
type Options struct {
	// Name is what errors call it: its file's name by default.
	Name string
	// Log is the file that its output is appended to.
	Log string
	// Env is added to the test's own environment.
	Env []string
	// TimeoutStart bounds [Process.Ready], TimeoutStop [Process.Stop] and [Process.Await]; only what hangs takes so long.
	// 20 seconds by default.
	TimeoutStart, TimeoutStop time.Duration
	// Stacks ends a Go program that is not ready in time by SIGQUIT, so that the error and the log say where it hangs.
	Stacks bool
	// Edit changes the command before it is started: its stdin, its stdout, its cgroup.
	Edit func(*exec.Cmd) error
}

// Process is one that was started.
type Process struct {
	opts     Options
	cmd      *exec.Cmd
	logFrom  int64         // where in the log what it says begins
	stopping atomic.Bool   // it is ended by Stop
	done     chan struct{} // closed when it was reaped, which comes after what follows is written
	left     []string      // command lines that were in its group when it had ended
}

// launcher is one thread that starts every process: a parent's death signal follows the thread that forked, and Go's
// other threads come and go.
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

// Start starts a program in a process group of its own, so that a Ctrl-C on the terminal reaches only the test, which
// ends things in order. Nothing is started once the context has ended, and nothing ends with it.
func Start(ctx context.Context, o Options, program string, args ...string) (*Process, error) {
	const timeout = 20 * time.Second
	if o.Name == "" {
		o.Name = filepath.Base(program)
	}
	if o.TimeoutStart == 0 {
		o.TimeoutStart = timeout
	}
	if o.TimeoutStop == 0 {
		o.TimeoutStop = timeout
	}
	p, err := start(ctx, o, program, args)
	if err != nil {
		return nil, fmt.Errorf("start %s: %w", o.Name, err)
	}
	return p, nil
}

func start(ctx context.Context, o Options, program string, args []string) (*Process, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	log, err := os.OpenFile(o.Log, os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o600)
	if err != nil {
		return nil, err
	}
	defer log.Close()
	info, err := log.Stat()
	if err != nil {
		return nil, err
	}
	cmd := exec.CommandContext(context.WithoutCancel(ctx), program, args...)
	cmd.Env = append(os.Environ(), o.Env...)
	cmd.Stdout, cmd.Stderr = log, log
	cmd.SysProcAttr = &syscall.SysProcAttr{}
	if o.Edit != nil {
		if err := o.Edit(cmd); err != nil {
			return nil, err
		}
	}
	cmd.SysProcAttr.Setpgid, cmd.SysProcAttr.Pdeathsig = true, syscall.SIGKILL
	p := &Process{opts: o, cmd: cmd, logFrom: info.Size(), done: make(chan struct{})}
	result := make(chan error)
	launcher() <- func() { result <- cmd.Start() }
	if err := <-result; err != nil {
		return nil, err
	}
	go p.reap()
	return p, nil
}

// reap waits for the end. Until it is reaped the process keeps its number, so its group cannot be another's.
func (p *Process) reap() {
	for errors.Is(unix.Waitid(unix.P_PID, p.PID(), nil, unix.WEXITED|unix.WNOWAIT, nil), unix.EINTR) {
	}
	if p.stopping.Load() {
		p.left = p.endGroup()
	}
	_ = p.cmd.Wait() // how it ended is in State
	close(p.done)
}

// PID is its number.
func (p *Process) PID() int { return p.cmd.Process.Pid }

// Args are its command line, with the program's place as the first.
func (p *Process) Args() []string { return append([]string{p.cmd.Path}, p.cmd.Args[1:]...) }

// Done is closed when it has ended and was reaped.
func (p *Process) Done() <-chan struct{} { return p.done }

// Running says that it was not reaped yet.
func (p *Process) Running() bool {
	select {
	case <-p.done:
		return false
	default:
		return true
	}
}

// State is how it ended; nil while it runs.
func (p *Process) State() *os.ProcessState {
	if p.Running() {
		return nil
	}
	return p.cmd.ProcessState
}

// Said is what it has said: not what others had said into the same log before.
func (p *Process) Said() string {
	text, err := os.ReadFile(p.opts.Log)
	if err != nil {
		return err.Error()
	}
	return string(text[min(p.logFrom, int64(len(text))):])
}

// Tail is the end of what it has said.
func (p *Process) Tail(lines int) string { return end(p.Said(), lines) }

// Tail is the end of a log that several have written to, one after the other or at once.
func Tail(log string, lines int) string {
	text, err := os.ReadFile(log)
	if err != nil {
		return err.Error()
	}
	return end(string(text), lines)
}

func end(text string, lines int) string {
	all := strings.Split(strings.TrimSpace(text), "\n")
	return strings.Join(all[max(0, len(all)-lines):], "\n")
}

// tailLines are as many as an error has.
const tailLines = 15

// LogIfFailed shows the end of what it has said where the test has failed; nothing of what was never started.
func (p *Process) LogIfFailed(t interface {
	Helper()
	Failed() bool
	Logf(format string, args ...any)
}) {
	t.Helper()
	if p != nil && t.Failed() {
		t.Logf("the end of %s's log:\n%s", p.opts.Name, p.Tail(tailLines))
	}
}

// Ready waits until a probe succeeds, as long as the process lives.
func (p *Process) Ready(ctx context.Context, probe func(context.Context) error) error {
	ctx, cancel := context.WithTimeout(ctx, p.opts.TimeoutStart)
	defer cancel()
	for begun := time.Now(); ; {
		err := probe(ctx)
		if err == nil {
			return nil
		}
		// The longer it takes the less often it is asked: a probe may be a program itself.
		pause := min(max(time.Since(begun)/8, 5*time.Millisecond), 100*time.Millisecond)
		select {
		case <-p.done:
			return fmt.Errorf("%s ended at its start (%s):\n%s", p.opts.Name, p.State(), p.Tail(tailLines))
		case <-ctx.Done():
			said := p.Tail(tailLines)
			if p.opts.Stacks {
				said += "\n" + p.stacks()
			}
			return fmt.Errorf("%s is not ready (%w):\n%s", p.opts.Name, err, said)
		case <-time.After(pause):
		}
	}
}

// stacks ends a Go program with where all of its goroutines stand. The log keeps them; here is a beginning of it, which
// goes into a test's output.
func (p *Process) stacks() string {
	before := len(p.Said())
	if err := p.Signal(syscall.SIGQUIT); err != nil {
		return fmt.Sprintf("its goroutines cannot be had: %v", err)
	}
	select {
	case <-p.done:
	case <-time.After(p.opts.TimeoutStop):
		return "it does not end by SIGQUIT either: it does not run at all"
	}
	text := p.Said()
	text = text[min(before, len(text)):]
	return text[:min(len(text), 64<<10)]
}

// Await waits for its end.
func (p *Process) Await(ctx context.Context) error {
	select {
	case <-p.done:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	case <-time.After(p.opts.TimeoutStop):
		return fmt.Errorf("wait for the end of %s: it lives after %s", p.opts.Name, p.opts.TimeoutStop)
	}
}

// Signal sends it a signal; [os.ErrProcessDone] where it has ended.
func (p *Process) Signal(s os.Signal) error { return p.cmd.Process.Signal(s) }

// Stop ends it in order, by SIGTERM; by SIGKILL what has not ended within its time or when the context ends, which is an
// error. So is what it leaves in its process group, which is killed. One that was never started, or has ended before, is
// no error: [Process.State] says how.
func (p *Process) Stop(ctx context.Context) error {
	if p == nil {
		return nil
	}
	p.stopping.Store(true)
	if err := p.Signal(syscall.SIGTERM); err != nil && !errors.Is(err, os.ErrProcessDone) {
		return fmt.Errorf("stop %s: %w", p.opts.Name, err)
	}
	var errs []error
	select {
	case <-p.done:
	case <-time.After(p.opts.TimeoutStop):
		errs = append(errs, p.escalate())
	case <-ctx.Done():
		errs = append(errs, p.escalate())
	}
	if !p.Running() && len(p.left) > 0 {
		errs = append(errs, fmt.Errorf("%s left running: %q", p.opts.Name, p.left))
	}
	return errors.Join(errs...)
}

// escalate ends what did not stop.
func (p *Process) escalate() error {
	if err := p.Signal(syscall.SIGKILL); err != nil && !errors.Is(err, os.ErrProcessDone) {
		return fmt.Errorf("kill %s: %w", p.opts.Name, err)
	}
	<-p.done
	return fmt.Errorf("%s did not stop and was killed:\n%s", p.opts.Name, p.Tail(tailLines))
}

// Kill ends it at whatever it does, as a crash would: what it has started is left alone.
func (p *Process) Kill() error {
	if err := p.Signal(syscall.SIGKILL); err != nil {
		return fmt.Errorf("kill %s: %w", p.opts.Name, err)
	}
	<-p.done
	return nil
}
