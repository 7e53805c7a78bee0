// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"io"
	"slices"
	"sync"
	"time"
)

// Bounds of a spool.
const (
	// spoolLines is how many log entries wait for whoever reads the log.
	spoolLines = 4096
	// flushTime is how long we wait for him at our end.
	flushTime = 2 * time.Second
)

// spool writes log entries from a goroutine of its own, in their order. gpufenced logs while it holds the
// lock that every decision needs: a journald that hangs, or a full pipe, must not end enforcement. What
// is too much is dropped and counted; the node's own journal of events has it all the same.
type spool struct {
	work chan func()
	done chan struct{}

	mu      sync.Mutex
	lost    uint64
	closed  bool
	sayLost func(uint64)
}

// newSpool makes one; sayLost hears how many entries were dropped since it was called last.
func newSpool(size int, sayLost func(uint64)) *spool {
	s := &spool{work: make(chan func(), size), done: make(chan struct{}), sayLost: sayLost}
	go func() {
		defer close(s.done)
		for f := range s.work {
			f()
			if n := s.takeLost(); n > 0 {
				s.sayLost(n)
			}
		}
	}()
	return s
}

func (s *spool) takeLost() uint64 {
	s.mu.Lock()
	defer s.mu.Unlock()
	n := s.lost
	s.lost = 0
	return n
}

// put has f done later; it never waits.
func (s *spool) put(f func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		s.lost++
		return
	}
	select {
	case s.work <- f:
	default:
		s.lost++
	}
}

// flush waits until everything is written, for a while, and ends it.
func (s *spool) flush(limit time.Duration) {
	s.mu.Lock()
	if !s.closed {
		s.closed = true
		close(s.work)
	}
	s.mu.Unlock()
	select {
	case <-s.done:
	case <-time.After(limit):
	}
}

// spooled is a writer whose writes are done later.
type spooled struct {
	*spool
	to io.Writer
}

// Write implements [io.Writer].
func (s spooled) Write(b []byte) (int, error) {
	line := slices.Clone(b)
	s.put(func() { _, _ = s.to.Write(line) }) // there is nobody left to tell
	return len(b), nil
}

// lostLine tells on a log of lines that entries were dropped.
func lostLine(w io.Writer) func(uint64) {
	return func(n uint64) {
		_, _ = fmt.Fprintf(w, "gpufenced: %d log entries were dropped, since nobody took them\n", n)
	}
}
