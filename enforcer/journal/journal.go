// SPDX-License-Identifier: Apache-2.0

// Package journal keeps what happened on a node: one JSON line an event, numbered without gaps
// or repeats over restarts, appended by a single write, rotated by size.
//
// It promises: an event that Append returned has a number greater than every earlier one; it is
// in memory for readers even if the disk refused it; a line cut short by a crash or a full disk
// costs that event only. Neither a slow reader nor an fsync holds Append up, nor, for longer than
// [Options.Patience] once, does a disk that hangs: lines are written by a goroutine of their own.
//
// Lock order: mu, which is held over nothing that waits; files, held over a rotation, is taken
// without it.
package journal

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/gpufence/gpufence/enforcer/api"
)

// FileName is the newest file in the folder; older ones have .1, .2, ... behind it.
const FileName = "events.jsonl"

// Options of [Open]; zero values mean the defaults.
type Options struct {
	MaxBytes int64            // a file that would exceed it is rotated; 16 MiB
	Keep     int              // rotated files that stay; 4
	Memory   int              // events kept in memory for readers; 4096
	Now      func() time.Time // time.Now
	// Patience is how long Append waits for the disk; 500 ms. While an earlier event is waited for in
	// vain it does not wait at all.
	Patience time.Duration
}

// Journal is safe for concurrent use.
type Journal struct {
	dir  string
	opts Options

	mu     sync.Mutex
	last   uint64      // number of the newest event
	recent []api.Event // oldest first, at most opts.Memory
	news   chan struct{}
	lines  chan line // in the order of their numbers; nil: closed
	lost   uint64    // events that found no room in lines
	ended  chan struct{}

	behind atomic.Bool // an event was waited for in vain, and lines are not all written since

	files sync.Mutex // a rotation, and opening what it moves
	file  *os.File   // changed by the writer only, under files
	size  int64      // the writer's
	torn  bool       // the writer's: the last write ended within a line
}

// line is an event as it is written, or, without text, only a question whether those before are.
type line struct {
	text []byte
	done chan error // has room
}

// maxLines bounds what waits for the disk.
const maxLines = 1024

// Open continues the journal in the folder, which it makes if need be.
func Open(dir string, opts Options) (*Journal, error) {
	if opts.MaxBytes <= 0 {
		opts.MaxBytes = 16 << 20
	}
	if opts.Keep <= 0 {
		opts.Keep = 4
	}
	if opts.Memory <= 0 {
		opts.Memory = 4096
	}
	if opts.Now == nil {
		opts.Now = time.Now
	}
	if opts.Patience <= 0 {
		opts.Patience = 500 * time.Millisecond
	}
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, fmt.Errorf("make journal folder: %w", err)
	}
	j := &Journal{dir: dir, opts: opts, news: make(chan struct{})}
	// Only as much as stays in memory: a node's history must not make a start longer.
	var newest []api.Event // the newest first
	for i := 0; i <= opts.Keep && len(newest) < opts.Memory; i++ {
		f, err := os.Open(j.path(i))
		if errors.Is(err, os.ErrNotExist) {
			continue
		}
		if err != nil {
			return nil, fmt.Errorf("read journal: %w", err)
		}
		newest, err = tail(f, newest, opts.Memory)
		_ = f.Close() // only read
		if err != nil {
			return nil, fmt.Errorf("read journal %s: %w", f.Name(), err)
		}
	}
	for _, ev := range slices.Backward(newest) {
		if ev.Seq > j.last {
			j.last = ev.Seq
			j.remember(ev)
		}
	}
	if err := j.openFile(); err != nil {
		return nil, err
	}
	j.lines, j.ended = make(chan line, maxLines), make(chan struct{})
	go j.run(j.lines)
	return j, nil
}

func (j *Journal) path(i int) string {
	p := filepath.Join(j.dir, FileName)
	if i > 0 {
		p += "." + strconv.Itoa(i)
	}
	return p
}

// openFile opens the newest file for appending and finds out whether it ends within a line.
func (j *Journal) openFile() error {
	f, err := os.OpenFile(j.path(0), os.O_RDWR|os.O_CREATE|os.O_APPEND, 0o600)
	if err != nil {
		return fmt.Errorf("open journal: %w", err)
	}
	fi, err := f.Stat()
	if err == nil && fi.Size() > 0 {
		var b [1]byte
		_, err = f.ReadAt(b[:], fi.Size()-1)
		j.torn = b[0] != '\n'
	}
	if err != nil {
		_ = f.Close() // the first error is the one to tell
		return fmt.Errorf("look at end of journal: %w", err)
	}
	j.file, j.size = f, fi.Size()
	return nil
}

func (j *Journal) remember(ev api.Event) {
	if len(j.recent) == j.opts.Memory {
		j.recent[0] = api.Event{} // to be freed, though append makes a new array only now and then
		j.recent = j.recent[1:]
	}
	j.recent = append(j.recent, ev)
}

// Append numbers and dates the event, writes it, and returns it as written. On an error the
// event is still in memory and reaches readers; only the file lacks it, or has it later.
func (j *Journal) Append(ev api.Event) (api.Event, error) {
	ev, written, err := j.take(ev)
	if err != nil {
		return ev, err
	}
	if j.behind.Load() {
		return ev, errBehind
	}
	patience := time.NewTimer(j.opts.Patience)
	defer patience.Stop()
	select {
	case err := <-written:
		return ev, err
	case <-patience.C:
		j.behind.Store(true)
		return ev, errBehind
	}
}

var errBehind = errors.New("write event: the disk takes no more for the moment")

// take numbers an event and hands it to the writer.
func (j *Journal) take(ev api.Event) (api.Event, <-chan error, error) {
	j.mu.Lock()
	defer j.mu.Unlock()
	j.last++
	ev.Seq = j.last
	if ev.Time.IsZero() {
		ev.Time = j.opts.Now().UTC()
	}
	j.remember(ev)
	close(j.news)
	j.news = make(chan struct{})

	text, err := json.Marshal(ev)
	if err != nil {
		return ev, nil, fmt.Errorf("encode event: %w", err)
	}
	if j.lines == nil {
		return ev, nil, errors.New("write event: journal is closed")
	}
	l := line{append(text, '\n'), make(chan error, 1)}
	select {
	case j.lines <- l:
		return ev, l.done, nil
	default:
		j.lost++
		return ev, nil, fmt.Errorf("write event: the disk takes no more, %d events were lost to it", j.lost)
	}
}

// run writes lines until there come no more.
func (j *Journal) run(lines <-chan line) {
	defer close(j.ended)
	for l := range lines {
		l.done <- j.put(l.text)
		if len(lines) == 0 {
			j.behind.Store(false)
		}
	}
}

func (j *Journal) put(text []byte) error {
	if len(text) == 0 {
		return nil
	}
	if j.size > 0 && j.size+int64(len(text)) > j.opts.MaxBytes {
		if err := j.rotate(); err != nil {
			// A file that grows too long is better than an event that is lost.
			return errors.Join(err, j.write(text))
		}
	}
	return j.write(text)
}

func (j *Journal) write(line []byte) error {
	if j.torn {
		line = append([]byte{'\n'}, line...)
	}
	n, err := j.file.Write(line)
	j.size += int64(n)
	if n > 0 {
		j.torn = n < len(line)
	}
	if err != nil {
		return fmt.Errorf("write event: %w", err)
	}
	return nil
}

// rotate begins a new file. Where that fails, however often, no event is lost: the new file is made
// before anything is moved, and files move up only as far as the first number that is free, so that one
// that failed in its middle is gone on with.
func (j *Journal) rotate() error {
	j.files.Lock()
	defer j.files.Unlock()
	fresh, err := os.OpenFile(j.path(0)+newSuffix, os.O_RDWR|os.O_CREATE|os.O_TRUNC|os.O_APPEND, 0o600)
	if err != nil {
		return fmt.Errorf("rotate journal: %w", err)
	}
	if err := j.moveUp(); err != nil {
		return errors.Join(fmt.Errorf("rotate journal: %w", err), fresh.Close(), os.Remove(fresh.Name()))
	}
	old := j.file
	j.file, j.size, j.torn = fresh, 0, false
	if err := old.Close(); err != nil {
		return fmt.Errorf("close rotated journal: %w", err)
	}
	return nil
}

// newSuffix is of a file that is not the newest yet.
const newSuffix = ".new"

// moveUp gives the files their next numbers, and the new one its name.
func (j *Journal) moveUp() error {
	free := 0
	for ; free <= j.opts.Keep; free++ {
		_, err := os.Lstat(j.path(free))
		if errors.Is(err, os.ErrNotExist) {
			break
		}
		if err != nil {
			return err
		}
	}
	if free > j.opts.Keep {
		free = j.opts.Keep
		if err := os.Remove(j.path(free)); err != nil {
			return err
		}
	}
	for i := free - 1; i >= 0; i-- {
		if err := os.Rename(j.path(i), j.path(i+1)); err != nil {
			return err
		}
	}
	return os.Rename(j.path(0)+newSuffix, j.path(0))
}

// Sync brings what was appended to the disk. It waits for it, however long that takes.
func (j *Journal) Sync() error {
	written, err := j.question()
	if err != nil {
		return fmt.Errorf("sync journal: %w", err)
	}
	if err := <-written; err != nil {
		return fmt.Errorf("sync journal: %w", err)
	}
	j.files.Lock()
	f := j.file
	j.files.Unlock()
	if err := f.Sync(); err != nil && !errors.Is(err, os.ErrClosed) { // rotated meanwhile
		return fmt.Errorf("sync journal: %w", err)
	}
	return nil
}

// question is answered when everything before it is written.
func (j *Journal) question() (<-chan error, error) {
	j.mu.Lock()
	defer j.mu.Unlock()
	if j.lines == nil {
		return nil, errors.New("it is closed")
	}
	q := line{done: make(chan error, 1)}
	select {
	case j.lines <- q:
		return q.done, nil
	default:
		return nil, errBehind
	}
}

// Dir is the folder that it lies in.
func (j *Journal) Dir() string { return j.dir }

// Last is the number of the newest event.
func (j *Journal) Last() uint64 {
	j.mu.Lock()
	defer j.mu.Unlock()
	return j.last
}

// Since calls emit for each event newer than seq, oldest first, as far as it is kept.
func (j *Journal) Since(seq uint64, emit func(api.Event) error) error {
	j.mu.Lock()
	recent := append([]api.Event(nil), j.recent...)
	last := j.last
	j.mu.Unlock()
	var old []*os.File
	defer func() {
		for _, f := range old {
			_ = f.Close() // only read
		}
	}()
	first := last + 1
	if len(recent) > 0 {
		first = recent[0].Seq
	}
	if first > seq+1 && first > 1 {
		j.files.Lock()
		for i := j.opts.Keep; i >= 0; i-- {
			f, err := os.Open(j.path(i))
			if errors.Is(err, os.ErrNotExist) {
				continue
			}
			if err != nil {
				j.files.Unlock()
				return fmt.Errorf("read journal: %w", err)
			}
			old = append(old, f)
		}
		j.files.Unlock()
	}

	for _, f := range old {
		var emitErr error
		err := scan(f, func(ev api.Event) bool {
			if ev.Seq <= seq {
				return true
			}
			if ev.Seq >= first {
				return false
			}
			seq = ev.Seq
			emitErr = emit(ev)
			return emitErr == nil
		})
		if err := errors.Join(emitErr, err); err != nil {
			return err
		}
	}
	for _, ev := range recent {
		if ev.Seq <= seq {
			continue
		}
		if err := emit(ev); err != nil {
			return err
		}
	}
	return nil
}

// Wait returns when an event newer than seq exists, or the context has ended.
func (j *Journal) Wait(ctx context.Context, seq uint64) error {
	for {
		j.mu.Lock()
		last, news := j.last, j.news
		j.mu.Unlock()
		if last > seq {
			return nil
		}
		select {
		case <-news:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// Close ends writing; reading goes on. A disk that hangs is not waited for.
func (j *Journal) Close() error {
	j.mu.Lock()
	lines := j.lines
	j.lines = nil
	j.mu.Unlock()
	if lines == nil {
		return nil
	}
	close(lines)
	done := make(chan error, 1)
	go func() {
		<-j.ended
		done <- errors.Join(j.file.Sync(), j.file.Close())
	}()
	select {
	case err := <-done:
		if err != nil {
			return fmt.Errorf("close journal: %w", err)
		}
		return nil
	case <-time.After(closeTime):
		return fmt.Errorf("close journal: %w", errBehind)
	}
}

// closeTime is how long the end waits for the disk.
const closeTime = 5 * time.Second

// scan calls f for each line that is an event until f returns false. Other lines (cut short by
// a crash, written by a later version in another form) are passed over: the journal is for
// people and must open whatever happened to it.
func scan(r io.Reader, f func(api.Event) bool) error {
	br := bufio.NewReaderSize(r, 64<<10)
	for {
		line, err := readLine(br)
		if ev, ok := parseLine(line); ok && !f(ev) {
			return nil
		}
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
	}
}

// tailBlock is how much of a file is read at a time from its end.
const tailBlock = 64 << 10

// tail appends the events of a file from its end on, the newest first, until there are so many in all. It
// passes over other lines as scan does.
func tail(f *os.File, to []api.Event, limit int) ([]api.Event, error) {
	fi, err := f.Stat()
	if err != nil {
		return to, err
	}
	take := func(line []byte) {
		if ev, ok := parseLine(line); ok && len(line) <= api.MaxEventBytes && len(to) < limit {
			to = append(to, ev)
		}
	}
	block := make([]byte, tailBlock)
	var line []byte // the end of one whose beginning comes with the next block
	long := false   // it is longer than any event
	for at := fi.Size(); at > 0 && len(to) < limit; {
		n := min(at, tailBlock)
		at -= n
		got, err := f.ReadAt(block[:n], at)
		if err != nil && !errors.Is(err, io.EOF) {
			return to, err
		}
		text := block[:got]
		for {
			i := bytes.LastIndexByte(text, '\n')
			if !long {
				line = append(bytes.Clone(text[i+1:]), line...)
			}
			if long = long || len(line) > api.MaxEventBytes; long {
				line = nil
			}
			if i < 0 {
				break
			}
			if !long {
				take(line)
			}
			line, long, text = nil, false, text[:i]
		}
	}
	if !long {
		take(line)
	}
	return to, nil
}

// readLine reads up to a newline; of a line longer than any event only the end is dropped.
func readLine(br *bufio.Reader) ([]byte, error) {
	var line []byte
	for {
		part, err := br.ReadSlice('\n')
		if len(line) <= api.MaxEventBytes {
			line = append(line, part...)
		}
		if !errors.Is(err, bufio.ErrBufferFull) {
			return line, err
		}
	}
}

func parseLine(line []byte) (api.Event, bool) {
	line = bytes.TrimSpace(line)
	var ev api.Event
	if len(line) == 0 || json.Unmarshal(line, &ev) != nil || ev.Seq == 0 || ev.Seq > 1<<62 {
		return api.Event{}, false
	}
	return ev, true
}
