// SPDX-License-Identifier: Apache-2.0

package simnode

import (
	"errors"
	"fmt"
	"os"
	"runtime"
	"runtime/debug"
	"strconv"
	"sync"
	"testing"
	"time"
)

func number(t *testing.T, name string, otherwise int) int {
	t.Helper()
	text := os.Getenv(name)
	if text == "" {
		return otherwise
	}
	n, err := strconv.Atoi(text)
	if err != nil {
		t.Fatalf("%s=%q is not a number", name, text)
	}
	return n
}

// TestNode: GPUFENCE_SIM_SEEDS nodes of GPUFENCE_SIM_GPUS GPUs over GPUFENCE_SIM_MINUTES of virtual
// time each, from GPUFENCE_SIM_SEED on. What fails is shrunk, and printed as it can be repeated.
func TestNode(t *testing.T) {
	defer debug.SetGCPercent(debug.SetGCPercent(400)) // much garbage, little that lives
	seeds, gpus := number(t, "GPUFENCE_SIM_SEEDS", 1), number(t, "GPUFENCE_SIM_GPUS", 2)
	minutes := number(t, "GPUFENCE_SIM_MINUTES", 40)
	first := 1 // a single short run is the same each time
	if seeds > 1 {
		first = int(time.Now().UnixNano() % 1_000_000)
	}
	first = number(t, "GPUFENCE_SIM_SEED", first)
	for i := range seeds {
		seed := first + i
		began := time.Now()
		var stats Stats
		var mu sync.Mutex
		var failed []Scenario
		work := make(chan int)
		var group sync.WaitGroup
		for range runtime.GOMAXPROCS(0) {
			group.Go(func() {
				for gpu := range work {
					s := Full(uint64(seed), gpu, time.Duration(minutes)*time.Minute)
					got, err := Run(s)
					mu.Lock()
					stats.Add(got)
					if err != nil {
						failed = append(failed, s)
					}
					mu.Unlock()
				}
			})
		}
		for gpu := range gpus {
			work <- gpu
		}
		close(work)
		group.Wait()
		t.Logf("seed %d: %d GPUs, %v virtual in %v: %+v", seed, gpus, time.Duration(minutes)*time.Minute, time.Since(began).Round(10*time.Millisecond), stats)
		for _, s := range failed {
			small, err := Shrink(s, 80)
			t.Errorf("%v fails; shrunk to %v: %v", s, small, err)
		}
		if len(failed) > 0 {
			t.Fatalf("repeat with GPUFENCE_SIM_SEED=%d GPUFENCE_SIM_MINUTES=%d", seed, minutes)
		}
		if seeds > 1 && (stats.Kills == 0 || stats.ShrinksDone == 0 || stats.ShrinksFailed == 0 || stats.Restarts == 0 || stats.Blind == 0 || stats.Forced == 0 || stats.NotAdmitted == 0) {
			t.Errorf("seed %d proves too little: %+v", seed, stats)
		}
	}
}

// TestSameRunTwice: a scenario can be repeated.
func TestSameRunTwice(t *testing.T) {
	s := Scenario{Seed: 7, Containers: 8, Processes: 3, Duration: 20 * time.Minute, Features: all}
	a, errA := Run(s)
	b, errB := Run(s)
	if fmt.Sprint(a, errA) != fmt.Sprint(b, errB) {
		t.Errorf("%+v, %v\n%+v, %v", a, errA, b, errB)
	}
	if a.Steps == 0 || a.Allocs == 0 {
		t.Errorf("nothing happened: %+v", a)
	}
}

// TestSmaller: every step of shrinking makes something less, and ends.
func TestSmaller(t *testing.T) {
	s := Full(1, 2, time.Hour)
	for range 200 {
		next := s.smaller()
		if len(next) == 0 || s.Duration < time.Second {
			return
		}
		n := next[len(next)-1]
		if n.Duration > s.Duration || n.Containers > s.Containers || n.Processes > s.Processes || n.Features&^s.Features != 0 {
			t.Fatal(errors.New("not smaller"))
		}
		s = next[0]
	}
	t.Errorf("it does not end: %v", s)
}
