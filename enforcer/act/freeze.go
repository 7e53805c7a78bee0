// SPDX-License-Identifier: Apache-2.0

package act

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// MaxSlice is the longest that a cgroup is frozen at a time, whoever asks for more.
const MaxSlice = 50 * time.Millisecond

// endTimeout is how long the guard may take to end, which takes it a slice: only a hang is longer.
const endTimeout = 10 * time.Second

// GuardCommand is the argument by which a program runs [GuardMain]; the folder of its records
// follows.
const GuardCommand = "freeze-guard"

var (
	// ErrFrozen says that somebody else has frozen a cgroup: it is left alone.
	ErrFrozen = errors.New("cgroup was frozen by somebody else")
	// ErrNoFreezer says that a cgroup cannot be frozen here.
	ErrNoFreezer = errors.New("cgroup has no freezer")
)

// Guard freezes cgroups for short slices through a process of its own, which freezes, waits and
// thaws by itself: when we die in a slice, it thaws; when it dies, we do; and what both of them
// left is in a record that [ThawLeft] reads at the next start. It is safe for concurrent use.
type Guard struct {
	argv []string
	dir  string

	mu     sync.Mutex
	in     io.WriteCloser
	next   uint64
	wait   map[uint64]chan string
	closed bool
	done   chan struct{} // of the running process
}

// order asks for one slice.
type order struct {
	ID    uint64 `json:"id"`
	Dir   string `json:"dir"`
	Inode uint64 `json:"inode"`
	NS    int64  `json:"ns"`
}

type reply struct {
	ID  uint64 `json:"id"`
	Why string `json:"why,omitempty"`
}

// Words of a reply for which there are sentinels.
const (
	whyFrozen = "frozen"
	whyGone   = "gone"
	whyNone   = "none"
)

// NewGuard makes one; its process is started by the first slice. argv is the program with its
// arguments (see [GuardCommand]), dir the folder of records, which must be there.
func NewGuard(argv []string, dir string) *Guard { return &Guard{argv: argv, dir: dir} }

// FreezeDir is the folder by which a container's cgroup is frozen.
func (h *Host) FreezeDir(c Cgroup) (dir string, inode uint64, err error) {
	if c.Hierarchy != unified && c.Hierarchy != "freezer" {
		return "", 0, fmt.Errorf("freeze cgroup %s: %w", c, ErrNoFreezer)
	}
	if c.Path == "/" {
		return "", 0, fmt.Errorf("freeze cgroup %s: %w", c, ErrCgroupRoot)
	}
	dir, err = h.dir(c.Hierarchy, c.Path)
	if err != nil {
		return "", 0, fmt.Errorf("freeze: %w", err)
	}
	return dir, c.Inode, nil
}

// Slice freezes a container's cgroup for at most [MaxSlice] and returns when it is thawed again.
func (g *Guard) Slice(ctx context.Context, h *Host, c Cgroup, slice time.Duration) error {
	dir, number, err := h.FreezeDir(c)
	if err != nil {
		return err
	}
	answer, done, err := g.send(order{Dir: dir, Inode: number, NS: int64(min(slice, MaxSlice))})
	if err != nil {
		return fmt.Errorf("freeze cgroup %s: %w", c, err)
	}
	var why string
	select {
	case why = <-answer:
	case <-done:
		// It died, perhaps in our slice.
		err := thawDir(dir, number, filepath.Join(g.dir, record(number)))
		return errors.Join(fmt.Errorf("freeze cgroup %s: the guard ended", c), err)
	case <-ctx.Done():
		return fmt.Errorf("freeze cgroup %s: %w", c, ctx.Err()) // the guard thaws it
	}
	switch why {
	case "":
		return nil
	case whyFrozen:
		err = ErrFrozen
	case whyGone:
		err = ErrGone
	case whyNone:
		err = ErrNoFreezer
	default:
		err = errors.New(why)
	}
	return fmt.Errorf("freeze cgroup %s: %w", c, err)
}

func (g *Guard) send(o order) (<-chan string, <-chan struct{}, error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.closed {
		return nil, nil, fs.ErrClosed
	}
	if g.in == nil {
		if err := g.start(); err != nil {
			return nil, nil, err
		}
	}
	g.next++
	o.ID = g.next
	line, err := json.Marshal(o)
	if err != nil {
		return nil, nil, err
	}
	answer := make(chan string, 1)
	g.wait[o.ID] = answer
	if _, err := g.in.Write(append(line, '\n')); err != nil {
		delete(g.wait, o.ID)
		return nil, nil, fmt.Errorf("tell the guard: %w", err)
	}
	return answer, g.done, nil
}

// start runs the process. The caller holds mu.
func (g *Guard) start() error {
	cmd := exec.CommandContext(context.Background(), g.argv[0], g.argv[1:]...) // it outlives us by a slice
	// Not in our process group: what ends us from a terminal must not end it first.
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	cmd.Env = []string{}
	in, err := cmd.StdinPipe()
	if err != nil {
		return fmt.Errorf("start the guard: %w", err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		return errors.Join(fmt.Errorf("start the guard: %w", err), in.Close())
	}
	if err := cmd.Start(); err != nil {
		return fmt.Errorf("start the guard: %w", err)
	}
	done := make(chan struct{})
	g.in, g.wait, g.done = in, map[uint64]chan string{}, done
	go func() {
		lines := bufio.NewScanner(out)
		for lines.Scan() {
			var r reply
			if json.Unmarshal(lines.Bytes(), &r) != nil {
				continue // not from our guard; whoever waits for an answer has a deadline
			}
			g.mu.Lock()
			if answer := g.wait[r.ID]; answer != nil && g.done == done {
				answer <- r.Why
				delete(g.wait, r.ID)
			}
			g.mu.Unlock()
		}
		_ = cmd.Wait() // how it ended does not matter, that it did is what done says
		g.mu.Lock()
		if g.done == done {
			g.in = nil
		}
		g.mu.Unlock()
		close(done)
	}()
	return nil
}

// Close lets the process end, and waits until it has thawed what it froze.
func (g *Guard) Close() error {
	g.mu.Lock()
	g.closed = true
	in, done := g.in, g.done
	g.in = nil
	g.mu.Unlock()
	if in == nil {
		return nil
	}
	err := in.Close()
	select {
	case <-done:
	case <-time.After(endTimeout):
		err = errors.Join(err, errors.New("the freeze guard does not end"))
	}
	return err
}

// GuardMain is the guard's process. It ends when in does, after the slices that are in progress.
func GuardMain(in io.Reader, out io.Writer, dir string) error {
	// Whoever ends gpufenced may end us in the same breath: not in a slice.
	signal.Ignore(unix.SIGTERM, unix.SIGINT, unix.SIGHUP, unix.SIGPIPE)
	var mu sync.Mutex
	var group sync.WaitGroup
	defer group.Wait()
	lines := bufio.NewScanner(in)
	lines.Buffer(make([]byte, 0, 8192), 64<<10)
	for lines.Scan() {
		var o order
		if err := json.Unmarshal(lines.Bytes(), &o); err != nil {
			return fmt.Errorf("read order: %w", err)
		}
		group.Go(func() {
			r := reply{ID: o.ID}
			switch err := slice(o, dir); {
			case errors.Is(err, ErrFrozen):
				r.Why = whyFrozen
			case errors.Is(err, ErrNoFreezer):
				r.Why = whyNone
			case errors.Is(err, ErrGone):
				r.Why = whyGone
			case err != nil:
				r.Why = err.Error()
			}
			line, err := json.Marshal(r)
			if err != nil {
				return // a text and a number can be written
			}
			mu.Lock()
			defer mu.Unlock()
			_, _ = out.Write(append(line, '\n')) // gpufenced may be gone
		})
	}
	return lines.Err()
}

// freezer is a cgroup's freezer, by an open folder: one that is removed meanwhile, and made again
// under its name, is not touched.
type freezer struct {
	fd      int
	file    string
	freeze  string
	thaw    string
	isThawn func(text string) bool
}

func openFreezer(dir string, number uint64) (f freezer, err error) {
	fd, err := unix.Open(dir, unix.O_DIRECTORY|unix.O_PATH|unix.O_CLOEXEC|unix.O_NOFOLLOW, 0)
	if err != nil {
		return f, gone(&fs.PathError{Op: "open", Path: dir, Err: err})
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, unix.Close(fd))
		}
	}()
	var s unix.Stat_t
	if err := unix.Fstat(fd, &s); err != nil {
		return f, err
	}
	if s.Ino != number {
		return f, ErrGone
	}
	for _, f := range []freezer{
		{fd, "cgroup.freeze", "1", "0", func(t string) bool { return t == "0" }},
		{fd, "freezer.state", "FROZEN", "THAWED", func(t string) bool { return t == "THAWED" }},
	} {
		if err := unix.Faccessat(fd, f.file, unix.F_OK, 0); err == nil {
			return f, nil
		}
	}
	return f, ErrNoFreezer
}

func (f freezer) read(name string) (string, error) {
	fd, err := unix.Openat(f.fd, name, unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return "", gone(&fs.PathError{Op: "open", Path: name, Err: err})
	}
	b := make([]byte, 256)
	n, err := unix.Read(fd, b)
	return strings.TrimSpace(string(b[:max(n, 0)])), errors.Join(err, unix.Close(fd))
}

func (f freezer) write(text string) error {
	fd, err := unix.Openat(f.fd, f.file, unix.O_WRONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return gone(&fs.PathError{Op: "open", Path: f.file, Err: err})
	}
	_, err = unix.Write(fd, []byte(text))
	return gone(errors.Join(err, unix.Close(fd)))
}

func (f freezer) close() error { return unix.Close(f.fd) }

// record is the name of the file that says what is frozen.
func record(inode uint64) string { return "frozen-" + strconv.FormatUint(inode, 10) }

// slice freezes, waits and thaws.
func slice(o order, dir string) (err error) {
	f, err := openFreezer(o.Dir, o.Inode)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, f.close()) }()
	state, err := f.read(f.file)
	if err != nil {
		return err
	}
	if !f.isThawn(state) {
		return ErrFrozen
	}
	note := filepath.Join(dir, record(o.Inode))
	if err := os.WriteFile(note, []byte(o.Dir), 0o600); err != nil {
		return fmt.Errorf("note what is frozen: %w", err)
	}
	// From here on it is thawed whatever happens.
	err = f.write(f.freeze)
	if err == nil {
		time.Sleep(min(time.Duration(o.NS), MaxSlice))
	}
	if e := f.write(f.thaw); e != nil && !errors.Is(e, ErrGone) {
		return errors.Join(err, fmt.Errorf("thaw %s: %w", o.Dir, e)) // the note stays
	}
	return errors.Join(err, os.Remove(note))
}

// thawDir thaws what a note says that we froze. Without the note nothing of ours is frozen there.
func thawDir(dir string, number uint64, note string) (err error) {
	if _, err := os.Stat(note); errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	f, err := openFreezer(dir, number)
	switch {
	case errors.Is(err, ErrGone):
		return os.Remove(note)
	case err != nil:
		return fmt.Errorf("thaw %s: %w", dir, err)
	}
	defer func() { err = errors.Join(err, f.close()) }()
	if err := f.write(f.thaw); err != nil && !errors.Is(err, ErrGone) {
		return fmt.Errorf("thaw %s: %w", dir, err)
	}
	return os.Remove(note)
}

// ThawLeft thaws what an earlier guard and gpufenced, ended at once, have left frozen. It says how
// many there were.
func ThawLeft(dir string) (int, error) {
	notes, err := filepath.Glob(filepath.Join(dir, record(0)[:len("frozen-")]+"*"))
	if err != nil {
		return 0, fmt.Errorf("look for what is frozen: %w", err)
	}
	var errs []error
	n := 0
	for _, note := range notes {
		number, err := strconv.ParseUint(strings.TrimPrefix(filepath.Base(note), "frozen-"), 10, 64)
		if err != nil {
			continue // not ours
		}
		path, err := os.ReadFile(note)
		if err != nil {
			errs = append(errs, fmt.Errorf("read what is frozen: %w", err))
			continue
		}
		if !filepath.IsAbs(string(path)) {
			// Cut short by a crash: nothing was frozen before it was whole.
			errs = append(errs, os.Remove(note))
			continue
		}
		if err := thawDir(string(path), number, note); err != nil {
			errs = append(errs, err)
			continue
		}
		n++
	}
	return n, errors.Join(errs...)
}
