// SPDX-License-Identifier: Apache-2.0

package main

import (
	"os"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"
)

func TestSummarize(t *testing.T) {
	m := measurement{Name: "x", Unit: "ns", Params: "1 slot", Baseline: []float64{10, 30, 20}, With: []float64{60, 40, 50, 1000}}
	tests := []struct {
		name   string
		target *target
		met    bool
	}{
		{"added met", &target{35, "added"}, true},
		{"added missed", &target{34, "added"}, false},
		{"ratio met", &target{2.75, "ratio"}, true},
		{"ratio missed", &target{2.7, "ratio"}, false},
		{"with met", &target{55, "with"}, true},
		{"with missed", &target{54, "with"}, false},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			got, err := summarize(m, test.target)
			if err != nil {
				t.Fatal(err)
			}
			if got.Name != "x (1 slot)" || got.Median != 55 || got.Baseline != 20 || got.Added != 35 || got.Ratio != 2.75 {
				t.Errorf("summarize = %+v", got)
			}
			if *got.Met != test.met {
				t.Errorf("met = %v, want %v", *got.Met, test.met)
			}
		})
	}
	if _, err := summarize(measurement{Name: "empty", Unit: "ns"}, nil); err == nil {
		t.Error("no samples: no error")
	}
}

func TestReadMeasurements(t *testing.T) {
	good := `{"name":"a","unit":"ns","baseline":[1],"with":[2]}` + "\n" + `{"name":"b","unit":"ms","params":"p","baseline":[1],"with":[2]}`
	all, err := readMeasurements(strings.NewReader(good))
	if err != nil || len(all) != 2 || all[1].key() != "b (p)" {
		t.Errorf("readMeasurements = %v, %v", all, err)
	}
	for _, bad := range []string{"nonsense", `{"unit":"ns"}`, `{"name":"a"}`, `{"name":`} {
		if _, err := readMeasurements(strings.NewReader(bad)); err == nil {
			t.Errorf("%q: no error", bad)
		}
	}
}

func TestPercentile(t *testing.T) {
	samples := []float64{5, 1, 4, 2, 3}
	for p, want := range map[float64]float64{0: 1, 20: 1, 21: 2, 50: 3, 99: 5, 100: 5} {
		if got := percentile(samples, p); got != want {
			t.Errorf("p%v = %v, want %v", p, got, want)
		}
	}
}

func TestCostOfThisProcess(t *testing.T) {
	u, err := cost(os.Getpid(), 10*time.Millisecond)
	if err != nil || u.cpu < 0 || u.nvml != 0 || u.resident <= 0 {
		t.Errorf("cost = %+v, %v", u, err)
	}
	if _, err := cost(-1, 0); err == nil {
		t.Error("no process: no error")
	}
	var stop atomic.Bool
	var thread sync.WaitGroup
	thread.Go(func() {
		runtime.LockOSThread()
		defer runtime.UnlockOSThread() // under its old name: a thread that ended would take its time with it
		const comm = "/proc/thread-self/comm"
		old, err := os.ReadFile(comm)
		if err == nil {
			err = os.WriteFile(comm, []byte("nvml"), 0)
		}
		if err != nil {
			t.Error(err)
		}
		defer func() {
			if err := os.WriteFile(comm, old, 0); err != nil {
				t.Error(err)
			}
		}()
		for !stop.Load() {
			runtime.Gosched()
		}
	})
	defer thread.Wait()
	defer stop.Store(true)
	for deadline := time.Now().Add(20 * time.Second); ; {
		u, err := cost(os.Getpid(), 10*time.Millisecond)
		if err != nil {
			t.Fatal(err)
		}
		if u.nvml > 0 && u.nvml <= u.cpu {
			break
		}
		if time.Now().After(deadline) {
			t.Fatalf("a thread that spins as NVML's is not seen: %+v", u)
		}
	}
}
