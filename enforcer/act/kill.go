// SPDX-License-Identifier: Apache-2.0

package act

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/gpufence/gpufence/enforcer/monotonic"
)

// Monotonic is CLOCK_MONOTONIC now.
func Monotonic() time.Duration { return monotonic.Now() }

// Pidfd is a process that we hold on to.
type Pidfd struct {
	pid int
	fd  int
}

// Open opens a pidfd and checks that the process is the one that started then (0: whichever).
func (h *Host) Open(pid int, start uint64) (*Pidfd, error) {
	fd, err := unix.PidfdOpen(pid, 0)
	if err != nil {
		return nil, fmt.Errorf("open process %d: %w", pid, gone(err))
	}
	p := &Pidfd{pid: pid, fd: fd}
	if start == 0 {
		return p, nil
	}
	// If it is the right one now, it was when the fd was opened: a pid is not given away while
	// its process can still be read.
	s, err := h.stat(h.path(pid, "stat"))
	if err == nil && s.start != start {
		err = ErrGone
	}
	if err != nil {
		return nil, fmt.Errorf("open process %d: %w", pid, errors.Join(err, p.Close()))
	}
	return p, nil
}

// Exited says whether the whole process has exited (zombies count as exited).
func (p *Pidfd) Exited() (bool, error) { return p.wait(0) }

func (p *Pidfd) wait(timeout time.Duration) (bool, error) {
	fds := []unix.PollFd{{Fd: int32(p.fd), Events: unix.POLLIN}}
	n, err := unix.Poll(fds, int(timeout.Milliseconds()))
	if errors.Is(err, unix.EINTR) {
		return false, nil
	}
	if err != nil {
		return false, fmt.Errorf("poll process %d: %w", p.pid, err)
	}
	return n > 0, nil
}

// Signal sends a signal. A process that is gone is [ErrGone].
func (p *Pidfd) Signal(sig int) error {
	if err := unix.PidfdSendSignal(p.fd, unix.Signal(sig), nil, 0); err != nil {
		return fmt.Errorf("signal process %d: %w", p.pid, gone(err))
	}
	return nil
}

// Fd is for poll; it is readable when the process has exited.
func (p *Pidfd) Fd() int { return p.fd }

// Close lets go.
func (p *Pidfd) Close() error {
	if p.fd < 0 {
		return nil
	}
	err := unix.Close(p.fd)
	p.fd = -1
	return err
}

// Killed is what a kill did.
type Killed struct {
	Signalled int           // SIGKILLs that were sent, 0 if cgroup.kill did it all
	Processes int           // that were in the cgroup before
	SentAt    time.Duration // CLOCK_MONOTONIC right after the first SIGKILL (or cgroup.kill)
	Thawed    bool          // it was frozen
	Empty     bool          // nothing is left but zombies
}

// progress is a Killed that a goroutine fills while its caller may give up waiting.
type progress struct {
	mu   sync.Mutex
	what Killed
}

func (p *progress) set(f func(*Killed)) {
	p.mu.Lock()
	defer p.mu.Unlock()
	f(&p.what)
}

func (p *progress) get() Killed {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.what
}

// within runs f, which may hang in the kernel, and gives up at ctx's end; f goes on by itself.
func (p *progress) within(ctx context.Context, f func(context.Context, *progress) error) (Killed, error) {
	done := make(chan error, 1)
	go func() { done <- f(ctx, p) }()
	select {
	case err := <-done:
		return p.get(), err
	case <-ctx.Done():
		// What is done by now counts, also if both came at once.
		select {
		case err := <-done:
			return p.get(), err
		default:
			return p.get(), fmt.Errorf("kill: %w: %w", ErrTimeout, context.Cause(ctx))
		}
	}
}

// KillCgroup kills every process of a container: cgroup.kill on v2, then and elsewhere SIGKILL through
// pidfds until nothing is left, thawing a v1 freezer. It returns at ctx's end at the latest; the error
// is then [ErrTimeout], with what was done so far. A cgroup that is gone is [ErrGone].
func (h *Host) KillCgroup(ctx context.Context, c Cgroup) (Killed, error) {
	return new(progress).within(ctx, func(ctx context.Context, p *progress) error {
		return h.killCgroup(ctx, c, p)
	})
}

func (h *Host) killCgroup(ctx context.Context, c Cgroup, p *progress) error {
	if c.Path == "/" {
		return fmt.Errorf("kill cgroup %s: %w", c, ErrCgroupRoot)
	}
	// The path may be another container's by now.
	same, err := h.Exists(c)
	if err != nil {
		return fmt.Errorf("kill: %w", err)
	}
	if !same {
		return fmt.Errorf("kill cgroup %s: %w", c, ErrGone)
	}
	// Only to be told: what cannot be listed (a container that made ten thousand cgroups) dies by
	// cgroup.kill all the same.
	if pids, err := h.Procs(c); err == nil {
		p.set(func(k *Killed) { k.Processes = len(pids) })
	} else if c.Hierarchy != unified {
		return fmt.Errorf("kill: %w", err)
	}
	dir, err := h.dir(c.Hierarchy, c.Path)
	if err != nil {
		return fmt.Errorf("kill: %w", err)
	}
	signal := true
	if c.Hierarchy == unified {
		switch err := writeFile(filepath.Join(dir, "cgroup.kill"), "1"); {
		case err == nil:
			signal = false
			p.set(func(k *Killed) { k.SentAt = Monotonic() })
		case errors.Is(err, fs.ErrNotExist), errors.Is(err, unix.EOPNOTSUPP):
			// Before Linux 5.14, or a threaded cgroup: one by one.
		default:
			return fmt.Errorf("kill cgroup %s: %w", c, err)
		}
	}
	for pause := time.Millisecond; ; pause = min(2*pause, 20*time.Millisecond) {
		left, err := h.pass(c, signal, p)
		if err != nil {
			return err
		}
		if left == 0 {
			p.set(func(k *Killed) { k.Empty = true })
			return nil
		}
		// cgroup.kill signals first threads, which does nothing to a process whose first thread has
		// exited while others go on: whoever is left after a while is told as a whole.
		signal = signal || pause >= 8*time.Millisecond
		select {
		case <-ctx.Done():
			return fmt.Errorf("kill cgroup %s: %d processes are left: %w", c, left, ErrTimeout)
		case <-time.After(pause):
		}
	}
}

// pass signals what is in the cgroup now and counts what still lives.
func (h *Host) pass(c Cgroup, signal bool, p *progress) (left int, err error) {
	pids, err := h.Procs(c)
	if err != nil {
		return 0, fmt.Errorf("kill: %w", err)
	}
	var errs []error
	for _, pid := range pids {
		alive, err := h.killMember(pid, c, signal, p)
		if err != nil && !errors.Is(err, ErrGone) {
			errs = append(errs, err)
			continue
		}
		if alive {
			left++
		}
	}
	// One process that cannot be killed keeps nobody else alive; the error comes at the end.
	if left == 0 && len(errs) > 0 {
		return 0, errors.Join(errs...)
	}
	return left, nil
}

func (h *Host) killMember(pid int, c Cgroup, signal bool, p *progress) (alive bool, err error) {
	fd, err := h.Open(pid, 0)
	if err != nil {
		return false, err
	}
	defer func() { err = errors.Join(err, fd.Close()) }()
	exited, err := fd.Exited()
	if err != nil || exited {
		return false, err
	}
	// The pid was in the list before we held it. If it is a member now, it is the right process;
	// if it has been reused, what we hold is dead and gets nothing.
	paths, err := h.paths(pid)
	if err != nil {
		return false, err
	}
	if !c.holds(paths[c.Hierarchy]) || paths[c.Hierarchy] == "" {
		return false, nil
	}
	if signal {
		if err := fd.Signal(int(unix.SIGKILL)); err != nil {
			return false, err
		}
		p.set(func(k *Killed) {
			if k.SentAt == 0 {
				k.SentAt = Monotonic()
			}
			k.Signalled++
		})
	}
	thawed, err := h.thaw(paths["freezer"], c.Path)
	if thawed {
		p.set(func(k *Killed) { k.Thawed = true })
	}
	return true, err
}

// thaw lets a v1 freezer go that keeps a process from dying. On v2 a frozen process dies. Nothing
// above top is touched, which is the container's path, or what the process is in.
func (h *Host) thaw(path, top string) (bool, error) {
	if path == "" || path == "/" {
		return false, nil
	}
	if !within(top, path) {
		top = path
	}
	for {
		dir, err := h.dir("freezer", path)
		if err != nil {
			return false, fmt.Errorf("thaw: %w", err)
		}
		state, err := os.ReadFile(filepath.Join(dir, "freezer.state"))
		if err != nil {
			return false, fmt.Errorf("thaw: %w", gone(err))
		}
		if strings.TrimSpace(string(state)) == "THAWED" {
			return false, nil
		}
		self, err := os.ReadFile(filepath.Join(dir, "freezer.self_freezing"))
		if err != nil {
			return false, fmt.Errorf("thaw: %w", gone(err))
		}
		if strings.TrimSpace(string(self)) == "1" {
			if err := writeFile(filepath.Join(dir, "freezer.state"), "THAWED"); err != nil {
				return false, fmt.Errorf("thaw: %w", gone(err))
			}
			return true, nil
		}
		if path == top {
			return false, nil // an ancestor of the container is frozen: not ours to thaw
		}
		path = filepath.Dir(path)
	}
}

// writeFile writes to a control file that exists.
func writeFile(path, content string) (err error) {
	f, err := os.OpenFile(path, os.O_WRONLY, 0)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	_, err = f.WriteString(content)
	return err
}

// KillProcess kills one process, if it is the one that started then, and waits until it has
// exited or ctx ends.
func (h *Host) KillProcess(ctx context.Context, pid int, start uint64) (Killed, error) {
	return new(progress).within(ctx, func(ctx context.Context, p *progress) error {
		return h.killProcess(ctx, pid, start, p)
	})
}

func (h *Host) killProcess(ctx context.Context, pid int, start uint64, p *progress) (err error) {
	fd, err := h.Open(pid, start)
	if err != nil {
		return fmt.Errorf("kill: %w", err)
	}
	defer func() { err = errors.Join(err, fd.Close()) }()
	p.set(func(k *Killed) { k.Processes = 1 })
	if err := fd.Signal(int(unix.SIGKILL)); err != nil {
		return fmt.Errorf("kill: %w", err)
	}
	p.set(func(k *Killed) { k.Signalled, k.SentAt = 1, Monotonic() })
	for {
		exited, err := fd.wait(20 * time.Millisecond)
		if err != nil {
			return fmt.Errorf("kill: %w", err)
		}
		if exited {
			p.set(func(k *Killed) { k.Empty = true })
			return nil
		}
		if paths, err := h.paths(pid); err == nil {
			thawed, err := h.thaw(paths["freezer"], paths["freezer"])
			if err != nil && !errors.Is(err, ErrGone) {
				return fmt.Errorf("kill process %d: %w", pid, err)
			}
			if thawed {
				p.set(func(k *Killed) { k.Thawed = true })
			}
		}
		if ctx.Err() != nil {
			return fmt.Errorf("kill process %d: it has not exited: %w", pid, ErrTimeout)
		}
	}
}
