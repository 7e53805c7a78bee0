// SPDX-License-Identifier: Apache-2.0

package coverage

import (
	"fmt"
	"testing"
	"time"

	"github.com/gpufence/gpufence/tests/node"
	"github.com/gpufence/gpufence/tests/simgpu/simtest"
)

// Launches take nothing. They are hooked because they wait above memory.high.
func init() {
	for _, name := range []string{
		"cuLaunch", "cuLaunchCooperativeKernel", "cuLaunchCooperativeKernel_ptsz", "cuLaunchCooperativeKernelMultiDevice",
		"cuLaunchGrid", "cuLaunchGridAsync", "cuLaunchKernel", "cuLaunchKernel_ptsz", "cuLaunchKernelEx", "cuLaunchKernelEx_ptsz",
	} {
		others[name] = "waits above memory.high; tested by TestLaunchesAboveHigh"
	}
}

// TestLaunchesAboveHigh: above memory.high launches wait, also those of a process of the container that
// does not allocate; each is counted, none is refused, and below it nobody waits.
func TestLaunchesAboveHigh(t *testing.T) {
	t.Parallel()
	const launches = 20
	variants := []string{
		"cuLaunchKernel", "cuLaunchKernel_ptsz", "cuLaunchKernelEx", "cuLaunchKernelEx_ptsz",
		"cuLaunchCooperativeKernel", "cuLaunchCooperativeKernel_ptsz", "cuGraphLaunch", "cuGraphLaunch_ptsz",
	}
	program := simtest.Dist(t, "clients/views")
	r := passes[0].startWith(t, node.Spec{Name: "launches", Limits: []string{"memory.max=1Gi", "memory.high=512Mi"}, Shim: true, Program: []string{program}})
	taker := r.c.Main
	other, err := r.c.Exec(t.Context(), true, program)
	if err != nil {
		t.Fatal(err)
	}
	all := func(least time.Duration) {
		t.Helper()
		for _, v := range variants {
			began := time.Now()
			if reply, err := other.Ask(t.Context(), fmt.Sprintf("launch %s %d", v, launches)); err != nil || !reply.OK {
				t.Fatalf("%s: %+v, %v", v, reply, err)
			}
			if took := time.Since(began); took < least {
				t.Errorf("%d of %s took %s", launches, v, took)
			}
		}
	}
	slowed := func() (events, throttled uint64) {
		t.Helper()
		v, err := r.c.View(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		g := v.GPUs[0]
		if g.Events.Max != 0 || g.Events.OOM != 0 || g.Events.OOMKill != 0 {
			t.Errorf("launches were refused: %+v", g.Events)
		}
		return g.Events.High, g.ThrottledNS
	}
	if _, err := taker.Do(t.Context(), "context"); err != nil {
		t.Fatal(err)
	}
	if _, err := other.Do(t.Context(), "context"); err != nil {
		t.Fatal(err)
	}
	all(0)
	if events, throttled := slowed(); events != 0 || throttled != 0 {
		t.Errorf("slowed below memory.high: %d times, %d ns", events, throttled)
	}
	// More than 10 % above, whatever the contexts take.
	if _, err := taker.Do(t.Context(), "alloc 600"); err != nil {
		t.Fatal(err)
	}
	all(launches * time.Millisecond)
	want := uint64(1 + launches*len(variants))
	err = node.Until(t.Context(), "they are counted", func() (bool, error) {
		events, throttled := slowed()
		return events == want && throttled >= (want-1)*uint64(time.Millisecond)*9/10, nil
	})
	if events, throttled := slowed(); err != nil {
		t.Errorf("slowed %d times, %d ns; want %d times: %v", events, throttled, want, err)
	}
	if _, err := taker.Do(t.Context(), "free"); err != nil {
		t.Fatal(err)
	}
	all(0)
	if events, _ := slowed(); events != want {
		t.Errorf("slowed below memory.high again: %d times, want %d", events, want)
	}
}
