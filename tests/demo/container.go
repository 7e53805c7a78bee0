// SPDX-License-Identifier: Apache-2.0

package demo

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// answerTime bounds every answer that is not waited for on purpose: against hanging only.
const answerTime = 20 * time.Second

// engine runs containers as containerd's shim does: create, start, wait for the init process as
// its reaper, delete.
type engine struct {
	runtime string // gpufence-runtime.cri
	root    string // --root
	dir     string // of the bundles
	env     []string
}

// becomeReaper makes this process the parent of containers whose creator has exited.
func becomeReaper() error {
	if err := unix.Prctl(unix.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0); err != nil {
		return fmt.Errorf("become the reaper of containers: %w", err)
	}
	return nil
}

// refusedError is a start that the wrapper, the hook or runc refused.
type refusedError struct{ sentence string }

func (e *refusedError) Error() string { return e.sentence }

// reply is one JSON line of a test client.
type reply struct {
	Op         string `json:"op"`
	OK         bool   `json:"ok"`
	MonoNS     int64  `json:"mono_ns"`
	Call       string `json:"call"`
	ResultName string `json:"result_name"`
	Why        string `json:"why"`
	UUID       string `json:"uuid"`
	Entry      string `json:"entry"`

	HeldBytes    uint64 `json:"held_bytes"`
	Blocks       uint64 `json:"blocks"`
	GrantedBytes uint64 `json:"granted_bytes"`
	FreedBytes   uint64 `json:"freed_bytes"`
	TotalBytes   uint64 `json:"total_bytes"`
	FreeBytes    uint64 `json:"free_bytes"`
	V2TotalBytes uint64 `json:"v2_total_bytes"`
	Reached      int    `json:"reached"`
	Refused      uint64 `json:"refused"`
	Allocs       uint64 `json:"allocs"`
	Frees        uint64 `json:"frees"`
	Failures     uint64 `json:"failures"`
}

// container is one that runs, or ran.
type container struct {
	engine *engine
	id     string
	name   string
	bundle string
	pid    int

	stdin   *os.File
	replies chan reply
	reads   chan struct{} // closed at the end of its output

	mu     sync.Mutex
	stray  []string // lines that are no replies
	exited chan struct{}
	status unix.WaitStatus // after exited
	ended  time.Time       // after exited
}

// command runs the wrapper once and gives what it said. Once begun it goes to its end, also when
// ctx ends: half a container is harder to remove than a whole one.
func (e *engine) command(ctx context.Context, stdin, stdout *os.File, log string, args ...string) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), answerTime)
	defer cancel()
	base := []string{"--root", e.root}
	if log != "" {
		base = append(base, "--log", log, "--log-format", "json")
	}
	cmd := exec.CommandContext(ctx, e.runtime, append(base, args...)...)
	cmd.Env = append(os.Environ(), e.env...)
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	// Files, not pipes: the container inherits them, and nobody must wait for its end here.
	stderr, err := os.CreateTemp(e.dir, "stderr-")
	if err != nil {
		return fmt.Errorf("run runtime: %w", err)
	}
	defer func() { _ = os.Remove(stderr.Name()) }() // the whole folder goes at the end
	defer stderr.Close()
	cmd.Stdin, cmd.Stdout, cmd.Stderr = nil, stderr, stderr
	if stdin != nil {
		cmd.Stdin = stdin
	}
	if stdout != nil {
		cmd.Stdout = stdout
	}
	err = cmd.Run()
	if err == nil {
		return nil
	}
	if ctxErr := ctx.Err(); ctxErr != nil {
		return ctxErr
	}
	var exit *exec.ExitError
	if !errors.As(err, &exit) {
		return fmt.Errorf("run runtime: %w", err)
	}
	said, readErr := os.ReadFile(stderr.Name())
	if readErr != nil {
		return fmt.Errorf("read what the runtime said: %w", readErr)
	}
	sentence := lastError(log)
	if sentence == "" {
		sentence = strings.TrimSpace(string(said))
	}
	return &refusedError{sentence}
}

// lastError is what an engine shows a user: the last error in the runtime's log.
func lastError(path string) string {
	if path == "" {
		return ""
	}
	text, err := os.ReadFile(path)
	if err != nil {
		return "" // it failed before it had a log
	}
	last := ""
	for _, line := range bytes.Split(text, []byte("\n")) {
		var entry struct{ Level, Msg string }
		if json.Unmarshal(line, &entry) == nil && entry.Level == "error" {
			last = entry.Msg
		}
	}
	return strings.TrimSpace(last)
}

// create makes and starts a container from a bundle that has been written.
func (e *engine) create(ctx context.Context, id, name string) (_ *container, err error) {
	c := &container{engine: e, id: id, name: name, bundle: filepath.Join(e.dir, id),
		replies: make(chan reply, 256), reads: make(chan struct{}), exited: make(chan struct{})}
	inRead, inWrite, err := os.Pipe()
	if err != nil {
		return nil, fmt.Errorf("create container: %w", err)
	}
	outRead, outWrite, err := os.Pipe()
	if err != nil {
		return nil, errors.Join(fmt.Errorf("create container: %w", err), inRead.Close(), inWrite.Close())
	}
	pidFile := filepath.Join(c.bundle, "init.pid")
	log := filepath.Join(c.bundle, "log.json")
	err = e.command(ctx, inRead, outWrite, log, "create", "--bundle", c.bundle, "--pid-file", pidFile, id)
	// The container has its own copies now.
	inRead.Close()
	outWrite.Close()
	if err != nil {
		inWrite.Close()
		outRead.Close()
		return nil, err
	}
	c.stdin = inWrite
	go c.read(outRead)
	text, err := os.ReadFile(pidFile)
	if err == nil {
		c.pid, err = strconv.Atoi(strings.TrimSpace(string(text)))
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("read pid file: %w", err), e.command(ctx, nil, nil, "", "delete", "--force", id))
	}
	go c.wait()
	if err := e.command(ctx, nil, nil, log, "start", id); err != nil {
		return nil, errors.Join(err, c.remove(ctx))
	}
	return c, nil
}

// wait reaps the container's first process.
func (c *container) wait() {
	defer close(c.exited)
	for {
		_, err := unix.Wait4(c.pid, &c.status, 0, nil)
		if errors.Is(err, unix.EINTR) {
			continue
		}
		c.ended = time.Now()
		return
	}
}

// read takes the container's output apart.
func (c *container) read(out *os.File) {
	defer close(c.reads)
	defer out.Close()
	lines := bufio.NewScanner(out)
	for lines.Scan() {
		var r reply
		if err := json.Unmarshal(lines.Bytes(), &r); err != nil || r.Op == "" {
			c.mu.Lock()
			c.stray = append(c.stray, lines.Text())
			c.mu.Unlock()
			continue
		}
		select {
		case c.replies <- r:
		default:
			// A client that nobody listens to any more (the bypass): the newest are enough.
			select {
			case <-c.replies:
			default:
			}
			c.replies <- r
		}
	}
}

// output is what the container printed that was no reply.
func (c *container) output() string {
	c.mu.Lock()
	defer c.mu.Unlock()
	return strings.Join(c.stray, "\n")
}

// say gives the client a line, without waiting for what comes of it.
func (c *container) say(line string) error {
	if _, err := io.WriteString(c.stdin, line+"\n"); err != nil {
		return fmt.Errorf("tell %s %q: %w", c.name, line, err)
	}
	return nil
}

// hear waits for the reply to an operation.
func (c *container) hear(ctx context.Context, op string) (reply, error) {
	timer := time.NewTimer(answerTime)
	defer timer.Stop()
	for {
		select {
		case r := <-c.replies:
			if r.Op == op {
				return r, nil
			}
		case <-c.reads:
			select {
			case r := <-c.replies: // what it said before its end
				if r.Op == op {
					return r, nil
				}
				continue
			default:
			}
			return reply{}, fmt.Errorf("ask %s for %q: it has ended: %s", c.name, op, c.output())
		case <-ctx.Done():
			return reply{}, ctx.Err()
		case <-timer.C:
			return reply{}, fmt.Errorf("ask %s for %q: no answer within %s", c.name, op, answerTime)
		}
	}
}

// ask says a line and waits for its reply.
func (c *container) ask(ctx context.Context, line string) (reply, error) {
	if err := c.say(line); err != nil {
		return reply{}, err
	}
	op, _, _ := strings.Cut(line, " ")
	return c.hear(ctx, op)
}

// alive says whether the first process has not been reaped.
func (c *container) alive() bool {
	select {
	case <-c.exited:
		return false
	default:
		return true
	}
}

// exitCode is what an engine would report: 128 + signal for a kill.
func (c *container) exitCode() int {
	if c.status.Signaled() {
		return 128 + int(c.status.Signal())
	}
	return c.status.ExitStatus()
}

// awaitExit waits for the end of the first process.
func (c *container) awaitExit(ctx context.Context) error {
	timer := time.NewTimer(answerTime)
	defer timer.Stop()
	select {
	case <-c.exited:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	case <-timer.C:
		return fmt.Errorf("wait for %s: still running after %s", c.name, answerTime)
	}
}

// remove ends the container and lets the runtime forget it, which runs its poststop hook.
func (c *container) remove(ctx context.Context) error {
	var errs []error
	if c.alive() {
		if err := c.engine.command(ctx, nil, nil, "", "kill", "--all", c.id, "KILL"); err != nil {
			errs = append(errs, fmt.Errorf("kill %s: %w", c.name, err))
		}
		if err := c.awaitExit(ctx); err != nil {
			errs = append(errs, err)
		}
	}
	if err := c.engine.command(ctx, nil, nil, "", "delete", "--force", c.id); err != nil {
		errs = append(errs, fmt.Errorf("delete %s: %w", c.name, err))
	}
	if c.stdin != nil {
		c.stdin.Close()
	}
	return errors.Join(errs...)
}
