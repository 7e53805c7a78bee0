// SPDX-License-Identifier: Apache-2.0

// Package simnode runs the pure core, enforcer/policy and enforcer/quota, on a simulated node with
// virtual time: GPUs full of containers whose processes allocate, free, fork, crash, exceed their
// limits and are resized, while NVML lags, forgets, does not answer, and gpufenced restarts. The
// model knows the truth, so every decision is held against it and not only against what the core
// was shown.
//
// The GPUs of a node are independent of each other, and each is one [Scenario]. While nothing
// moves, neither in the model nor in the core, time is skipped: every sample would say the same.
package simnode

import (
	"fmt"
	"strings"
	"time"
)

// Feature is something that a scenario may do without, so that a failure can be shrunk.
type Feature uint

// Features.
const (
	Restarts  Feature = 1 << iota // of gpufenced
	Faults                        // sizes that are not available, answers that lack a list
	LostGPU                       // no answer for a while
	Resizes                       //
	Rogues                        // containers without the shim that exceed their limit
	ReusedPID                     //
	FreeLag                       // what a process leaves stays listed
	Lag                           // of NVML
	BigPods                       // of several containers
	Ends                          // of containers, and of processes
	all       = Ends<<1 - 1
)

var featureNames = []string{"restarts", "faults", "lost GPU", "resizes", "rogues", "reused pids", "free-lag", "lag", "big pods", "ends"}

func (f Feature) String() string {
	var on []string
	for i, name := range featureNames {
		if f&(1<<i) != 0 {
			on = append(on, name)
		}
	}
	return strings.Join(on, ", ")
}

// Scenario is one GPU's run; the same one runs the same way.
type Scenario struct {
	Seed       uint64
	GPU        int
	Containers int
	Processes  int // of each container, on average
	Duration   time.Duration
	Features   Feature
}

// Full is a GPU of the node that make sim runs: 16 GPUs, 1,000 containers, 10,000 processes.
func Full(seed uint64, gpu int, duration time.Duration) Scenario {
	return Scenario{Seed: seed, GPU: gpu, Containers: 63, Processes: 10, Duration: duration, Features: all}
}

func (s Scenario) String() string {
	return fmt.Sprintf("seed %d, GPU %d, %d containers of %d processes, %v, with %v", s.Seed, s.GPU, s.Containers, s.Processes, s.Duration, s.Features)
}

// Stats say that a run was worth something.
type Stats struct {
	Steps, Allocs, Frees, Started, Processes, Refused, Admitted, NotAdmitted, Kills, Restarts, Blind, Grows, Shrinks, ShrinksDone, ShrinksFailed, Forced int
	PeakContainers, PeakProcesses                                                                                                                        int
	Slowest                                                                                                                                              time.Duration // kill, after the limit and its slack were crossed
}

// Add sums two up.
func (s *Stats) Add(o Stats) {
	for _, p := range []struct{ to, from *int }{
		{&s.Steps, &o.Steps}, {&s.Allocs, &o.Allocs}, {&s.Frees, &o.Frees}, {&s.Started, &o.Started}, {&s.Processes, &o.Processes},
		{&s.Refused, &o.Refused}, {&s.Admitted, &o.Admitted}, {&s.NotAdmitted, &o.NotAdmitted}, {&s.Kills, &o.Kills}, {&s.Restarts, &o.Restarts},
		{&s.Blind, &o.Blind}, {&s.Grows, &o.Grows}, {&s.Shrinks, &o.Shrinks}, {&s.ShrinksDone, &o.ShrinksDone}, {&s.ShrinksFailed, &o.ShrinksFailed},
		{&s.Forced, &o.Forced}, {&s.PeakContainers, &o.PeakContainers}, {&s.PeakProcesses, &o.PeakProcesses},
	} {
		*p.to += *p.from
	}
	s.Slowest = max(s.Slowest, o.Slowest)
}

// Shrink looks for a smaller scenario that fails, too. Each attempt runs whole.
func Shrink(s Scenario, attempts int) (Scenario, error) {
	_, err := Run(s)
	for tried := 0; err != nil && tried < attempts; {
		smaller := false
		for _, next := range s.smaller() {
			if tried++; tried > attempts {
				break
			}
			if _, e := Run(next); e != nil {
				s, err, smaller = next, e, true
				break
			}
		}
		if !smaller {
			break
		}
	}
	return s, err
}

// smaller are the scenarios one step below s, the boldest first.
func (s Scenario) smaller() []Scenario {
	var out []Scenario
	with := func(edit func(*Scenario)) {
		n := s
		edit(&n)
		if n != s {
			out = append(out, n)
		}
	}
	with(func(n *Scenario) { n.Duration /= 2 })
	with(func(n *Scenario) { n.Containers = max(1, n.Containers/2) })
	with(func(n *Scenario) { n.Processes = max(1, n.Processes/2) })
	for i := range featureNames {
		with(func(n *Scenario) { n.Features &^= 1 << i })
	}
	with(func(n *Scenario) { n.Duration = n.Duration * 3 / 4 })
	with(func(n *Scenario) { n.Containers = max(1, n.Containers-1) })
	return out
}
