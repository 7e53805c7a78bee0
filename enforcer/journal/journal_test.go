// SPDX-License-Identifier: Apache-2.0

package journal

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/gpufence/gpufence/enforcer/api"
)

// patience bounds what is waited for; only a hang takes so long.
const patience = 20 * time.Second

func open(t *testing.T, dir string, opts Options) *Journal {
	t.Helper()
	if opts.Patience == 0 {
		opts.Patience = patience
	}
	j, err := Open(dir, opts)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = j.Close() }) // a test may have closed it
	return j
}

func add(t *testing.T, j *Journal, message string) api.Event {
	t.Helper()
	ev, err := j.Append(api.Event{Type: "test", Message: message})
	if err != nil {
		t.Fatal(err)
	}
	return ev
}

func since(t *testing.T, j *Journal, seq uint64) []api.Event {
	t.Helper()
	var out []api.Event
	if err := j.Since(seq, func(ev api.Event) error { out = append(out, ev); return nil }); err != nil {
		t.Fatal(err)
	}
	return out
}

func TestNumbersGoOn(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "deep", "journal")
	j := open(t, dir, Options{})
	if a, b := add(t, j, "a"), add(t, j, "b"); a.Seq != 1 || b.Seq != 2 || a.Time.IsZero() {
		t.Errorf("got %+v, %+v", a, b)
	}
	if err := j.Sync(); err != nil {
		t.Error(err)
	}
	if err := j.Close(); err != nil {
		t.Fatal(err)
	}
	if err := j.Close(); err != nil {
		t.Errorf("a second close: %v", err)
	}
	if ev, err := j.Append(api.Event{}); err == nil || ev.Seq != 3 {
		t.Errorf("append after close: %+v, %v", ev, err)
	}
	if err := j.Sync(); err == nil {
		t.Error("sync after close")
	}
	k := open(t, dir, Options{})
	if ev := add(t, k, "c"); ev.Seq != 3 {
		t.Errorf("after a restart: %d", ev.Seq)
	}
	if evs := since(t, k, 1); len(evs) != 2 || evs[0].Message != "b" || evs[1].Message != "c" {
		t.Errorf("since 1: %+v", evs)
	}
	if fi, err := os.Stat(filepath.Join(dir, FileName)); err != nil || fi.Mode().Perm() != 0o600 {
		t.Errorf("mode %v, %v", fi.Mode(), err)
	}
}

// A crash or a full disk cuts the last line: it costs that event, not the next one.
func TestTornLine(t *testing.T) {
	dir := t.TempDir()
	j := open(t, dir, Options{})
	add(t, j, "whole")
	add(t, j, "torn")
	if err := j.Close(); err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(dir, FileName)
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	for _, cut := range []int{1, 5, len(text) / 3} {
		if err := os.WriteFile(path, text[:len(text)-cut], 0o600); err != nil {
			t.Fatal(err)
		}
		j, err := Open(dir, Options{})
		if err != nil {
			t.Fatal(err)
		}
		next := add(t, j, "next")
		if err := j.Close(); err != nil {
			t.Fatal(err)
		}
		k, err := Open(dir, Options{})
		if err != nil {
			t.Fatal(err)
		}
		evs := since(t, k, 0)
		if err := k.Close(); err != nil {
			t.Fatal(err)
		}
		if last := evs[len(evs)-1]; last.Message != "next" || last.Seq != next.Seq || evs[0].Message != "whole" {
			t.Errorf("cut by %d: %+v", cut, evs)
		}
	}
}

func TestGarbageIsPassedOver(t *testing.T) {
	dir := t.TempDir()
	text := "garbage\n{\"seq\":7,\"message\":\"seven\"}\n\x00\xff\n{\"seq\":0}\n{\"seq\":18446744073709551615}\n[]\n" +
		strings.Repeat("x", 3<<20) + "\n{\"seq\":9,\"message\":\"nine\"}\n"
	if err := os.WriteFile(filepath.Join(dir, FileName), []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	j := open(t, dir, Options{})
	if evs := since(t, j, 0); len(evs) != 2 || evs[1].Message != "nine" {
		t.Errorf("got %+v", evs)
	}
	if ev := add(t, j, "ten"); ev.Seq != 10 {
		t.Errorf("next is %d", ev.Seq)
	}
}

func TestRotation(t *testing.T) {
	dir := t.TempDir()
	opts := Options{MaxBytes: 1000, Keep: 3, Memory: 4}
	j := open(t, dir, opts)
	for i := range 100 {
		add(t, j, fmt.Sprint("event ", i+1))
	}
	files, err := os.ReadDir(dir)
	if err != nil || len(files) != 4 {
		t.Fatalf("files: %v, %v", files, err)
	}
	for _, f := range files {
		if fi, err := f.Info(); err != nil || fi.Size() > 1000 {
			t.Errorf("%s has %d bytes, %v", f.Name(), fi.Size(), err)
		}
	}
	check := func(j *Journal) {
		t.Helper()
		evs := since(t, j, 0)
		if len(evs) < 10 || evs[len(evs)-1].Seq != 100 {
			t.Fatalf("%d events, the last is %d", len(evs), evs[len(evs)-1].Seq)
		}
		for i := 1; i < len(evs); i++ {
			if evs[i].Seq != evs[i-1].Seq+1 {
				t.Errorf("%d follows %d", evs[i].Seq, evs[i-1].Seq)
			}
		}
		// Some from a file, some from memory.
		if evs := since(t, j, 93); len(evs) != 7 || evs[0].Seq != 94 {
			t.Errorf("since 93: %+v", evs)
		}
		if evs := since(t, j, 98); len(evs) != 2 || evs[0].Seq != 99 {
			t.Errorf("since 98: %+v", evs)
		}
		if evs := since(t, j, 100); len(evs) != 0 {
			t.Errorf("since 100: %+v", evs)
		}
	}
	check(j)
	if err := j.Close(); err != nil {
		t.Fatal(err)
	}
	check(open(t, dir, opts))
}

// A rotation that cannot be done loses nothing.
func TestRotationFails(t *testing.T) {
	dir := t.TempDir()
	j := open(t, dir, Options{MaxBytes: 300, Keep: 1})
	if err := os.MkdirAll(filepath.Join(dir, FileName+".1", "in the way"), 0o700); err != nil {
		t.Fatal(err)
	}
	var failed bool
	for i := range 10 {
		_, err := j.Append(api.Event{Message: fmt.Sprint(i)})
		failed = failed || err != nil
	}
	if !failed {
		t.Error("nobody heard of it")
	}
	text, err := os.ReadFile(filepath.Join(dir, FileName))
	if err != nil || bytes.Count(text, []byte("\n")) != 10 {
		t.Errorf("%d lines, %v", bytes.Count(text, []byte("\n")), err)
	}
}

// TestRotationThatNeverSucceeds: a full disk, or too many open files, keep a new file from being made, and go on to: what
// there was stays.
func TestRotationThatNeverSucceeds(t *testing.T) {
	dir := t.TempDir()
	j := open(t, dir, Options{MaxBytes: 300, Keep: 2, Memory: 1})
	for i := range 10 {
		add(t, j, fmt.Sprint("before ", i))
	}
	before := len(since(t, j, 0))
	var limit unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &limit); err != nil {
		t.Fatal(err)
	}
	none := limit
	none.Cur = 3
	if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &none); err != nil {
		t.Fatal(err)
	}
	failed := 0
	for i := range 30 {
		if _, err := j.Append(api.Event{Message: fmt.Sprint("meanwhile ", i)}); err != nil {
			failed++
		}
	}
	if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &limit); err != nil {
		t.Fatal(err)
	}
	if failed == 0 {
		t.Error("nobody heard of it")
	}
	if evs := since(t, j, 0); len(evs) < before+30 {
		t.Errorf("%d events are left of the newest %d", len(evs), before+30)
	}
	for i := range 40 {
		add(t, j, fmt.Sprint("after ", i))
	}
	if evs := since(t, j, 0); len(evs) == 0 || evs[len(evs)-1].Message != "after 39" {
		t.Errorf("it does not go on: %+v", evs)
	}
	if _, err := os.Stat(filepath.Join(dir, FileName+newSuffix)); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the new file's first name is left: %v", err)
	}
}

// TestRotationCutShort: a crash between two renames costs nothing, and the next rotation fills the gap.
func TestRotationCutShort(t *testing.T) {
	dir := t.TempDir()
	opts := Options{MaxBytes: 300, Keep: 3}
	j := open(t, dir, opts)
	for i := range 20 {
		add(t, j, fmt.Sprint("event ", i))
	}
	if err := j.Close(); err != nil {
		t.Fatal(err)
	}
	kept := since(t, open(t, dir, opts), 0)
	// As if it had been killed with .2 moved to .3, and .3 gone before.
	if err := os.Rename(j.path(2), j.path(3)); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(j.path(0)+newSuffix, []byte("half"), 0o600); err != nil {
		t.Fatal(err)
	}
	oldest, err := os.ReadFile(j.path(3))
	if err != nil {
		t.Fatal(err)
	}
	k := open(t, dir, opts)
	if evs := since(t, k, 0); len(evs) == 0 || evs[len(evs)-1].Seq != kept[len(kept)-1].Seq {
		t.Errorf("%+v", evs)
	}
	first, err := os.ReadFile(k.path(1))
	if err != nil {
		t.Fatal(err)
	}
	for i := 0; i < 100; i++ {
		add(t, k, fmt.Sprint("later ", i))
		if moved, err := os.ReadFile(k.path(2)); err == nil {
			if !bytes.Equal(moved, first) {
				t.Error("another file fills the gap than the one before it")
			}
			break
		}
	}
	if now, err := os.ReadFile(k.path(3)); err != nil || !bytes.Equal(now, oldest) {
		t.Errorf("the oldest was thrown away although there was room: %v", err)
	}
}

// TestDiskThatHangs: whoever appends does so under locks that everything waits for, so a disk that takes nothing is
// waited for once, and not for long.
func TestDiskThatHangs(t *testing.T) {
	j := open(t, t.TempDir(), Options{Patience: 20 * time.Millisecond, Memory: 3 * maxLines})
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	regular := j.file
	j.file = w // nothing was handed to the writer yet
	t.Cleanup(func() {
		for _, f := range []*os.File{r, regular} {
			if err := f.Close(); err != nil {
				t.Error(err)
			}
		}
	})
	done := make(chan int)
	const many = 2 * maxLines
	go func() {
		failed := 0
		for range many {
			if _, err := j.Append(api.Event{Message: strings.Repeat("x", 1000)}); err != nil {
				failed++
			}
		}
		done <- failed
	}()
	select {
	case failed := <-done:
		if failed == 0 {
			t.Error("nobody heard of it")
		}
	case <-time.After(patience):
		t.Fatal("whoever appends hangs with the disk")
	}
	if evs := since(t, j, 0); len(evs) != many {
		t.Errorf("readers see %d events of %d", len(evs), many)
	}
	if err := j.Sync(); err == nil {
		t.Error("synced a disk that takes nothing")
	}
	// It takes them again: what had room is written late, and events are written at once from then on.
	go func() {
		_, _ = io.Copy(io.Discard, r) // ends with the pipe
	}()
	deadline := time.Now().Add(patience)
	for {
		if _, err := j.Append(api.Event{Message: "again"}); err == nil {
			break
		}
		if time.Now().After(deadline) {
			t.Fatal("it does not recover")
		}
		time.Sleep(time.Millisecond)
	}
	_ = j.Close() // a pipe cannot be synced
}

func TestEmitError(t *testing.T) {
	j := open(t, t.TempDir(), Options{MaxBytes: 200, Memory: 1})
	for range 5 {
		add(t, j, "x")
	}
	stop := errors.New("enough")
	for _, from := range []uint64{0, 4} {
		if err := j.Since(from, func(api.Event) error { return stop }); !errors.Is(err, stop) {
			t.Errorf("since %d: %v", from, err)
		}
	}
}

func TestWait(t *testing.T) {
	j := open(t, t.TempDir(), Options{})
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	if err := j.Wait(ctx, 0); !errors.Is(err, context.Canceled) {
		t.Errorf("without an event: %v", err)
	}
	done := make(chan error, 1)
	go func() { done <- j.Wait(context.Background(), 1) }()
	add(t, j, "not enough")
	add(t, j, "enough")
	select {
	case err := <-done:
		if err != nil {
			t.Error(err)
		}
	case <-time.After(20 * time.Second):
		t.Fatal("it waits for ever")
	}
	if err := j.Wait(ctx, 1); err != nil {
		t.Errorf("what is there needs no waiting: %v", err)
	}
}

func TestConcurrentAppend(t *testing.T) {
	dir := t.TempDir()
	j := open(t, dir, Options{MaxBytes: 4000, Keep: 20})
	var group sync.WaitGroup
	for range 8 {
		group.Go(func() {
			for range 50 {
				if _, err := j.Append(api.Event{Message: "x"}); err != nil {
					t.Error(err)
				}
				if err := j.Since(j.Last()-min(j.Last(), 3), func(api.Event) error { return nil }); err != nil {
					t.Error(err)
				}
			}
		})
	}
	group.Wait()
	if evs := since(t, j, 0); len(evs) != 400 || evs[399].Seq != 400 {
		t.Errorf("%d events", len(evs))
	}
}

func TestOpenErrors(t *testing.T) {
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "file"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := Open(filepath.Join(dir, "file"), Options{}); err == nil {
		t.Error("opened a file as a folder")
	}
	if err := os.Mkdir(filepath.Join(dir, FileName), 0o700); err != nil {
		t.Fatal(err)
	}
	if _, err := Open(dir, Options{}); err == nil {
		t.Error("opened a folder as a file")
	}
}

// A file read from its end has what it has when it is read from its beginning, wherever blocks and lines
// are cut.
func TestTail(t *testing.T) {
	rng := rand.New(rand.NewPCG(7, 0))
	for round := range 60 {
		var text []byte
		for seq := uint64(1); len(text) < 300_000; seq++ {
			switch rng.IntN(12) {
			case 0:
				text = append(text, "garbage\n"...)
			case 1:
				text = append(text, '\n')
			case 2:
				text = append(append(text, bytes.Repeat([]byte{'x'}, rng.IntN(3*tailBlock))...), '\n')
			default:
				text = fmt.Appendf(text, `{"seq":%d,"type":"test","message":%q}`+"\n", seq, strings.Repeat("m", rng.IntN(2000)))
			}
		}
		if round == 0 { // longer than any event, in the middle
			text = fmt.Appendf(text, "{%s}\n{\"seq\":1000000,\"type\":\"test\"}\n", strings.Repeat(" ", api.MaxEventBytes+tailBlock))
		}
		tailIsScan(t, text[:len(text)-rng.IntN(3)], 1+rng.IntN(400))
	}
}

// tailIsScan compares the two ways to read a file.
func tailIsScan(t *testing.T, text []byte, limit int) {
	t.Helper()
	path := filepath.Join(t.TempDir(), "f")
	if err := os.WriteFile(path, text, 0o600); err != nil {
		t.Fatal(err)
	}
	f, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	got, err := tail(f, nil, limit)
	if err != nil {
		t.Fatal(err)
	}
	var want []api.Event
	if err := scan(bytes.NewReader(text), func(ev api.Event) bool { want = append(want, ev); return true }); err != nil {
		t.Fatal(err)
	}
	slices.Reverse(got)
	want = want[max(0, len(want)-limit):]
	if len(got) != len(want) {
		t.Fatalf("%d events, want %d of %d bytes", len(got), len(want), len(text))
	}
	for i := range got {
		if got[i].Seq != want[i].Seq || got[i].Message != want[i].Message {
			t.Fatalf("event %d is %d, want %d", i, got[i].Seq, want[i].Seq)
		}
	}
}

// What a start reads does not grow with the history: only what stays in memory is decoded.
func TestOpenReadsTheEnd(t *testing.T) {
	dir := t.TempDir()
	j := open(t, dir, Options{MaxBytes: 20_000, Keep: 3, Memory: 50})
	for i := range 400 {
		add(t, j, fmt.Sprintf("%d %s", i, strings.Repeat("m", 100)))
	}
	if err := j.Close(); err != nil {
		t.Fatal(err)
	}
	// If it were read, this would be an error.
	if err := os.Remove(filepath.Join(dir, FileName+".2")); err != nil {
		t.Fatal(err)
	}
	if err := os.Mkdir(filepath.Join(dir, FileName+".2"), 0o700); err != nil {
		t.Fatal(err)
	}
	j = open(t, dir, Options{MaxBytes: 20_000, Keep: 3, Memory: 50})
	if j.Last() != 400 || len(j.recent) != 50 || j.recent[0].Seq != 351 {
		t.Errorf("last %d, %d in memory from %d on", j.Last(), len(j.recent), j.recent[0].Seq)
	}
	if ev := add(t, j, "next"); ev.Seq != 401 {
		t.Errorf("the next is %d", ev.Seq)
	}
}

func FuzzScan(f *testing.F) {
	f.Add([]byte("{\"seq\":1}\n"))
	f.Add([]byte("{\"seq\":1}\n{\"seq\":"))
	f.Add([]byte("\n\n\x00"))
	f.Fuzz(func(t *testing.T, b []byte) {
		tailIsScan(t, b, 1+len(b)%5)
		dir := t.TempDir()
		if err := os.WriteFile(filepath.Join(dir, FileName), b, 0o600); err != nil {
			t.Fatal(err)
		}
		j, err := Open(dir, Options{Now: func() time.Time { return time.Unix(1, 0) }})
		if err != nil {
			t.Fatal(err)
		}
		defer j.Close()
		before := j.Last()
		ev, err := j.Append(api.Event{Message: "mine"})
		if err != nil || ev.Seq != before+1 {
			t.Fatalf("append: %+v, %v", ev, err)
		}
		k, err := Open(dir, Options{})
		if err != nil {
			t.Fatal(err)
		}
		defer k.Close()
		if k.Last() != ev.Seq {
			t.Errorf("last is %d, not %d", k.Last(), ev.Seq)
		}
	})
}
