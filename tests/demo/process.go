// SPDX-License-Identifier: Apache-2.0

package demo

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"
)

// stopTime is how long a daemon may take to end.
const stopTime = 10 * time.Second

// process is a daemon of the demo's: simgpud or gpufenced.
type process struct {
	name string
	log  string // what it says
	cmd  *exec.Cmd
	done chan struct{} // closed when it has been waited for
}

// startProcess starts a daemon in a process group of its own, so that Ctrl-C on a terminal
// reaches only us, who stop things in order.
func startProcess(ctx context.Context, dir, name string, env []string, program string, args ...string) (*process, error) {
	p := &process{name: name, log: filepath.Join(dir, name+".log"), done: make(chan struct{})}
	log, err := os.OpenFile(p.log, os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o600)
	if err != nil {
		return nil, fmt.Errorf("start %s: %w", name, err)
	}
	defer log.Close()
	// Not ended with ctx: stop does that, after those who depend on it.
	p.cmd = exec.CommandContext(context.WithoutCancel(ctx), program, args...)
	p.cmd.Env = append(os.Environ(), env...)
	p.cmd.Stdout, p.cmd.Stderr = log, log
	p.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	if err := p.cmd.Start(); err != nil {
		return nil, fmt.Errorf("start %s: %w", name, err)
	}
	go func() {
		_ = p.cmd.Wait() // how it ended is in ProcessState
		close(p.done)
	}()
	return p, nil
}

// ready waits until probe succeeds, the daemon ends, or the time is over.
func (p *process) ready(ctx context.Context, within time.Duration, probe func(context.Context) error) error {
	ctx, cancel := context.WithTimeout(ctx, within)
	defer cancel()
	for {
		err := probe(ctx)
		if err == nil {
			return nil
		}
		select {
		case <-p.done:
			return fmt.Errorf("%s ended at its start (%s): %s", p.name, p.cmd.ProcessState, p.tail())
		case <-ctx.Done():
			return fmt.Errorf("%s is not ready after %s (%w): %s", p.name, within, err, p.tail())
		case <-time.After(20 * time.Millisecond):
		}
	}
}

// stop ends the daemon: politely, then not. One that does not end by itself, or not well, is an
// error.
func (p *process) stop(ctx context.Context, signal os.Signal) error {
	if err := p.cmd.Process.Signal(signal); err != nil && !errors.Is(err, os.ErrProcessDone) {
		return fmt.Errorf("stop %s: %w", p.name, err)
	}
	select {
	case <-p.done:
		if !p.cmd.ProcessState.Success() {
			return fmt.Errorf("%s ended with %s: %s", p.name, p.cmd.ProcessState, p.tail())
		}
		return nil
	case <-ctx.Done():
	case <-time.After(stopTime):
	}
	if err := p.cmd.Process.Kill(); err != nil && !errors.Is(err, os.ErrProcessDone) {
		return fmt.Errorf("kill %s: %w", p.name, err)
	}
	<-p.done
	return fmt.Errorf("%s did not stop within %s and was killed: %s", p.name, stopTime, p.tail())
}

// tail is the end of what the daemon said.
func (p *process) tail() string {
	text, err := os.ReadFile(p.log)
	if err != nil {
		return err.Error()
	}
	lines := strings.Split(strings.TrimSpace(string(text)), "\n")
	if len(lines) > 12 {
		lines = lines[len(lines)-12:]
	}
	return strings.Join(lines, " | ")
}
