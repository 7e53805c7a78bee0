// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/sirupsen/logrus"
)

// stuck is a log that nobody reads, until it is let go.
type stuck struct {
	gate chan struct{}

	mu   sync.Mutex
	text strings.Builder
}

func (s *stuck) Write(b []byte) (int, error) {
	<-s.gate
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.text.Write(b)
}

func (s *stuck) String() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.text.String()
}

// A log that nobody reads holds nobody up, however much is logged; what was dropped is told, and what was
// not comes in its order.
func TestSpool(t *testing.T) {
	w := &stuck{gate: make(chan struct{})}
	log, flush, err := newLogger(w, func(string) string { return "" }, "info", "text")
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan struct{})
	const logged = 2 * spoolLines
	go func() {
		defer close(done)
		for i := range logged {
			log.Infof("entry-%d.", i)
		}
	}()
	select {
	case <-done:
	case <-time.After(20 * time.Second):
		t.Fatal("a log that nobody reads stops who logs")
	}
	began := time.Now()
	flush()
	if took := time.Since(began); took < flushTime/2 || took > 20*time.Second {
		t.Errorf("the end waits %v for a log that nobody reads", took)
	}
	close(w.gate)
	flush()
	text := w.String()
	last := -1
	kept := 0
	for i := range logged {
		at := strings.Index(text, fmt.Sprintf("entry-%d.", i))
		if at < 0 {
			continue
		}
		if at < last {
			t.Fatalf("entry %d is before its predecessor", i)
		}
		last = at
		kept++
	}
	if want := fmt.Sprintf("%d log entries were dropped", logged-kept); kept < spoolLines || kept >= logged || !strings.Contains(text, want) {
		t.Errorf("%d of %d are there; it does not say that %s", kept, logged, want)
	}
	log.Info("after the end") // dropped, no panic
}

func TestSpoolFlushes(t *testing.T) {
	w := &stuck{gate: make(chan struct{})}
	close(w.gate)
	log, flush, err := newLogger(w, func(string) string { return "" }, "debug", "json")
	if err != nil {
		t.Fatal(err)
	}
	log.SetLevel(logrus.DebugLevel)
	for i := range 500 {
		log.Debugf("entry-%d.", i)
	}
	flush()
	if n := strings.Count(w.String(), "entry-"); n != 500 || strings.Contains(w.String(), "dropped") {
		t.Errorf("%d of 500 are written", n)
	}
}
