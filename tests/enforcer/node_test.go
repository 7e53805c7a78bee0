// SPDX-License-Identifier: Apache-2.0

// Package enforcer runs the built gpufenced against a simulated driver, with real processes in
// real cgroups: who dies, who must not, what is written down, and what a crash leaves.
package enforcer

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/gpufence/gpufence/enforcer/api"
	"github.com/gpufence/gpufence/tests/node"
	"github.com/gpufence/gpufence/tests/simgpu/simtest"
)

const (
	mib = uint64(1) << 20
	gib = uint64(1) << 30
)

// lags are those that every case runs with.
var lags = []time.Duration{0, 200 * time.Millisecond}

func forLags(t *testing.T, f func(t *testing.T, lag time.Duration)) {
	for _, lag := range lags {
		t.Run("lag="+lag.String(), func(t *testing.T) {
			t.Parallel()
			f(t, lag)
		})
	}
}

// bench is a node whose failures end the test.
type bench struct {
	*node.Node
	t   *testing.T
	lag time.Duration
}

// newBench starts a node with one GPU of 16 GiB, contexts of 64 MiB, and the lag.
func newBench(t *testing.T, lag time.Duration, edit ...func(*node.Options)) *bench {
	t.Helper()
	opts := node.Options{
		Dist: filepath.Dir(filepath.Dir(simtest.Dist(t, "bin/gpufenced"))),
		Sim:  []string{"--model", "t4", "--memory", "16GiB", "--context-bytes", "64MiB", "--nvml-lag", lag.String()},
		// What a context is charged at until one was seen: as much as it takes here.
		Config: []string{`context = "64Mi"`},
	}
	for _, e := range edit {
		e(&opts)
	}
	n, err := node.New(t.Context(), opts)
	if err != nil {
		t.Fatal(err)
	}
	b := &bench{n, t, lag}
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("gpufenced said:\n%s", n.DaemonLog())
		}
		if err := n.Close(context.Background()); err != nil {
			t.Errorf("the node is not clean: %v", err)
		}
	})
	return b
}

func withConfig(lines ...string) func(*node.Options) {
	return func(o *node.Options) { o.Config = append(o.Config, lines...) }
}

func withSim(flags ...string) func(*node.Options) {
	return func(o *node.Options) { o.Sim = append(o.Sim, flags...) }
}

func (b *bench) check(err error) {
	b.t.Helper()
	if err != nil {
		b.t.Fatal(err)
	}
}

// run starts a container and makes its context.
func (b *bench) run(s node.Spec) *node.Container {
	b.t.Helper()
	c, err := b.Start(b.t.Context(), s)
	b.check(err)
	if len(s.Program) == 0 {
		b.do(c.Main, "context")
	}
	return c
}

func (b *bench) do(p *node.Process, lines ...string) node.Reply {
	b.t.Helper()
	r, err := p.Do(b.t.Context(), lines...)
	b.check(err)
	return r
}

func (b *bench) view(c *node.Container) api.Container {
	b.t.Helper()
	v, err := c.View(b.t.Context())
	b.check(err)
	return v
}

func (b *bench) events(types ...string) []api.Event {
	b.t.Helper()
	evs, err := b.Events(b.t.Context(), types...)
	b.check(err)
	return evs
}

func (b *bench) until(what string, f func() bool) {
	b.t.Helper()
	b.check(node.Until(b.t.Context(), what, func() (bool, error) { return f(), nil }))
}

// knobs changes the simulated GPUs, all of them with -1.
func (b *bench) knobs(gpu int, knobs ...string) {
	b.t.Helper()
	b.check(b.SetSim(b.t.Context(), gpu, knobs...))
}

// shown waits until gpufenced has seen at least so much of a container.
func (b *bench) shown(c *node.Container, atLeast uint64) {
	b.t.Helper()
	b.until(fmt.Sprintf("%d bytes of %s are seen", atLeast, c.Name), func() bool { return b.view(c).GPUs[0].NVML >= atLeast })
}

// later lets so much time pass that a decision would have been made several times over.
func (b *bench) later() { time.Sleep(b.lag + 700*time.Millisecond) }

// killedBy waits for the container's end, which must be gpufenced's doing, and gives the kill's
// entries of the journal.
func (b *bench) killedBy(c *node.Container) (decided, kill api.Event) {
	b.t.Helper()
	b.check(c.Main.Await(b.t.Context()))
	if !c.Main.Killed() {
		b.t.Fatalf("%s ended with %s", c.Name, c.Main.Status())
	}
	b.until("the kill of "+c.Name+" is in the journal", func() bool {
		for _, e := range b.events("kill") {
			if e.Container != nil && e.Container.ID == c.Key.ID {
				kill = e
			}
		}
		return kill.ID != ""
	})
	for _, e := range b.events("kill-decided") {
		if e.ID == kill.ID {
			decided = e
		}
	}
	if decided.ID == "" || decided.Seq >= kill.Seq {
		b.t.Fatalf("the decision is not before the kill: %+v, %+v", decided, kill)
	}
	n := kill.Numbers
	if n["used_bytes"] <= n["threshold_bytes"] || n["threshold_bytes"] != n["max_bytes"]+n["slack_bytes"] || len(decided.Candidates) == 0 ||
		n["second_sample_ns"]-n["first_sample_ns"] < uint64(20*time.Millisecond) {
		b.t.Fatalf("the kill is not explained: %+v", decided)
	}
	return decided, kill
}

// nobodyKilled says that nothing was decided against anybody.
func (b *bench) nobodyKilled(alive ...*node.Container) {
	b.t.Helper()
	if evs := b.events("kill-decided", "kill", "kill-failed"); len(evs) > 0 {
		b.t.Errorf("somebody was killed: %+v", evs)
	}
	for _, c := range alive {
		if !c.Main.Alive() {
			b.t.Errorf("%s ended with %s", c.Name, c.Main.Status())
		}
	}
}

// churner is a well-behaved neighbour that works up to its limit all the time.
func (b *bench) churner(name string) *node.Container {
	b.t.Helper()
	c := b.run(node.Spec{Name: name, Limits: []string{"memory.max=1Gi"}, Shim: true})
	// 14 x 64 MiB and a context: just inside the limit.
	b.check(c.Main.Say("churn 64 14 2"))
	return c
}

// untouched says that a neighbour never failed.
func (b *bench) untouched(c *node.Container) {
	b.t.Helper()
	if !c.Main.Alive() {
		b.t.Fatalf("%s ended with %s", c.Name, c.Main.Status())
	}
	b.check(c.Main.Say("stop"))
	r, err := c.Main.Hear(b.t.Context(), "churn")
	b.check(err)
	if r.Failures != 0 || r.Allocs == 0 {
		b.t.Errorf("the neighbour had %d failures in %d allocations", r.Failures, r.Allocs)
	}
	if e := b.view(c).GPUs[0].Events; e.OOM != 0 || e.OOMKill != 0 || e.Max != 0 {
		b.t.Errorf("the neighbour's events: %+v", e)
	}
}

func readFile(t *testing.T, path string) string {
	t.Helper()
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

func contains(t *testing.T, text string, parts ...string) {
	t.Helper()
	if i := slices.IndexFunc(parts, func(p string) bool { return !strings.Contains(text, p) }); i >= 0 {
		t.Errorf("%q lacks %q", text, parts[i])
	}
}
