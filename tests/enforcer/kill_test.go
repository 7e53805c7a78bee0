// SPDX-License-Identifier: Apache-2.0

package enforcer

import (
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/gpufence/gpufence/enforcer/api"
	"github.com/gpufence/gpufence/tests/node"
)

// killBound is 20 times what a kill may take without lag.
const killBound = 20 * 150 * time.Millisecond

// TestVictimDiesBystanderLives: a process without the shim that grows beyond its limit is killed,
// by each hierarchy, and its neighbour at the edge of its own limit notices nothing.
func TestVictimDiesBystanderLives(t *testing.T) {
	t.Parallel()
	for _, hierarchy := range []string{"unified", "freezer", ""} {
		name := hierarchy
		if name == "" {
			name = "both"
		}
		t.Run(name, func(t *testing.T) {
			forLags(t, func(t *testing.T, lag time.Duration) {
				b := newBench(t, lag)
				neighbour := b.churner("neighbour")
				victim := b.run(node.Spec{Name: "victim", Limits: []string{"memory.max=2Gi"}, Hierarchy: hierarchy, Termination: true})
				second, err := victim.Exec(t.Context(), false)
				b.check(err)
				b.do(second, "context", "alloc 256")

				// Above the limit, within the slack: counted, not killed.
				b.do(victim.Main, "alloc 1696") // 64 + 1696 + 64 + 256 = 2048 + 32
				b.shown(victim, 2*gib+1)
				b.later()
				b.nobodyKilled(victim, neighbour)
				if e := b.view(victim).GPUs[0].Events; e.OverMax == 0 || e.OOM != 0 {
					t.Errorf("events between limit and slack: %+v", e)
				}

				crossed := b.do(victim.Main, "alloc 256")
				decided, kill := b.killedBy(victim)
				latency := time.Duration(kill.MonotonicNS - crossed.MonoNS)
				t.Logf("SIGKILL %v after the limit and the slack were crossed (NVML lag %v)", latency.Round(time.Millisecond), lag)
				if latency > killBound+lag {
					t.Errorf("it took %v", latency)
				}
				b.check(second.Await(t.Context()))
				if !second.Killed() {
					t.Errorf("the second process ended with %s", second.Status())
				}
				if len(decided.Candidates) != 1 || kill.Numbers["max_bytes"] != 2*gib || kill.Numbers["slack_bytes"] != 64*mib {
					t.Errorf("decided: %+v", decided)
				}
				contains(t, readFile(t, victim.Termination), "gpufence: GPU memory limit exceeded: used ", "memory.max 2", "GPU-", "gpufence.dev/")
				b.until("the return of the memory is confirmed", func() bool {
					for _, e := range b.events("kill-confirmed") {
						if e.ID == kill.ID {
							return true
						}
					}
					return false
				})
				if e := b.view(victim).GPUs[0].Events; e.OOM != 1 || e.OOMKill != 2 {
					t.Errorf("events after the kill: %+v", e)
				}
				b.check(victim.Remove(t.Context()))
				if v := b.view(victim); v.State != "ended" || v.EndReason == "exited" {
					t.Errorf("it ended as %s, %q", v.State, v.EndReason)
				}
				if n := len(b.events("kill-decided")); n != 1 {
					t.Errorf("%d decisions", n)
				}
				b.untouched(neighbour)
			})
		})
	}
}

// TestOOMGroup: the whole container, or its largest process alone.
func TestOOMGroup(t *testing.T) {
	t.Parallel()
	for _, group := range []bool{true, false} {
		t.Run(map[bool]string{true: "group", false: "largest"}[group], func(t *testing.T) {
			forLags(t, func(t *testing.T, lag time.Duration) {
				b := newBench(t, lag)
				limits := []string{"memory.max=2Gi"}
				if !group {
					limits = append(limits, "memory.oom.group=false")
				}
				c := b.run(node.Spec{Name: "c", Limits: limits})
				b.do(c.Main, "alloc 512")
				largest, err := c.Exec(t.Context(), false)
				b.check(err)
				b.do(largest, "context", "alloc 1920")
				b.check(largest.Await(t.Context()))
				if !largest.Killed() {
					t.Fatalf("the largest ended with %s", largest.Status())
				}
				if group {
					b.check(c.Main.Await(t.Context()))
				}
				b.until("its memory is gone", func() bool { g := b.view(c).GPUs[0]; return g.Dying == 0 && g.NVML <= 576*mib })
				b.later()
				if c.Main.Alive() == group {
					t.Errorf("the first process: alive %v", c.Main.Alive())
				}
				want := map[bool]uint64{true: 2, false: 1}[group]
				if e := b.view(c).GPUs[0].Events; e.OOM != 1 || e.OOMKill != want {
					t.Errorf("events: %+v, want %d killed", e, want)
				}
			})
		})
	}
}

// TestPodLimit: the container above its own limit dies first, else the largest; the others of
// the pod go on.
func TestPodLimit(t *testing.T) {
	t.Parallel()
	for _, test := range []struct {
		name           string
		small, large   string // MiB, beside a context of 64
		smallsOwnLimit string
		victim         string
	}{
		// 64+992 = 1056 is above 1 GiB and within its slack; the pod holds 1056 + 3264.
		{"above its own limit first", "992", "3200", "1Gi", "small"},
		{"else the largest", "960", "3264", "1100Mi", "large"},
	} {
		t.Run(test.name, func(t *testing.T) {
			forLags(t, func(t *testing.T, lag time.Duration) {
				b := newBench(t, lag)
				limits := []string{"memory.max=4Gi", "container.small.memory.max=" + test.smallsOwnLimit}
				small := b.run(node.Spec{Name: "small", Pod: "p", Limits: limits, Shim: false})
				large := b.run(node.Spec{Name: "large", Pod: "p", Limits: limits, Shim: false})
				b.do(small.Main, "alloc "+test.small)
				b.shown(small, 1000*mib)
				b.do(large.Main, "alloc "+test.large)
				victim, other := small, large
				if test.victim == "large" {
					victim, other = large, small
				}
				decided, kill := b.killedBy(victim)
				if len(decided.Candidates) != 2 || decided.Candidates[0].Name != test.victim || kill.Numbers["max_bytes"] != 4*gib {
					t.Errorf("decided: %+v", decided)
				}
				b.later()
				if !other.Main.Alive() || len(b.events("kill-decided")) != 1 {
					t.Errorf("the other one was hit: %+v", b.events("kill-decided"))
				}
			})
		})
	}
}

// TestFrozenVictimDies: a container that somebody froze holds its memory above the limit; the kill
// thaws it, and leaves a neighbour frozen that is none of our business.
func TestFrozenVictimDies(t *testing.T) {
	t.Parallel()
	if _, err := os.Stat("/sys/fs/cgroup/freezer/cgroup.procs"); err != nil {
		if os.Getenv("GPUFENCE_MUST") == "1" {
			t.Fatal("no v1 freezer")
		}
		t.Skip("SKIPPED: this host has no v1 freezer")
	}
	forLags(t, func(t *testing.T, lag time.Duration) {
		b := newBench(t, lag, withSim("--late-bytes", "512MiB", "--late-time", "600ms", "--late-steps", "2"))
		victim := b.run(node.Spec{Name: "victim", Limits: []string{"memory.max=1Gi"}})
		neighbour := b.run(node.Spec{Name: "neighbour", Limits: []string{"memory.max=2Gi"}})
		b.do(victim.Main, "alloc 900")
		var states []string
		for _, c := range []*node.Container{victim, neighbour} {
			for _, dir := range c.Cgroups() {
				if file := filepath.Join(dir, "freezer.state"); filepath.Dir(dir) == "/sys/fs/cgroup/freezer" {
					b.check(os.WriteFile(file, []byte("FROZEN"), 0))
					states = append(states, file)
				}
			}
		}
		// Its context grows by itself, while it is frozen.
		b.killedBy(victim)
		b.until("the neighbour is frozen", func() bool { return readFile(t, states[1]) == "FROZEN\n" })
		b.later()
		if s := readFile(t, states[1]); s != "FROZEN\n" || !neighbour.Main.Alive() {
			t.Errorf("the neighbour is %s", s)
		}
		b.check(os.WriteFile(states[1], []byte("THAWED"), 0))
		b.do(neighbour.Main, "status")
	})
}

// TestModes: observe and warn kill and refuse nothing, and say what would have been.
func TestModes(t *testing.T) {
	t.Parallel()
	forLags(t, func(t *testing.T, lag time.Duration) {
		b := newBench(t, lag, withConfig(`[namespace."watched"]`, `mode = "observe"`, `[namespace."warned"]`, `mode = "warn"`))
		var all []*node.Container
		for _, namespace := range []string{"watched", "warned"} {
			c := b.run(node.Spec{Name: namespace, Namespace: namespace, Limits: []string{"memory.max=1Gi"}})
			if len(c.Prepared.Files) != 0 {
				t.Errorf("%s: files are mounted: %v", namespace, c.Prepared.Files)
			}
			b.do(c.Main, "alloc 3000")
			b.shown(c, 3*gib-80*mib)
			all = append(all, c)
		}
		b.until("both would be killed", func() bool { return len(b.events("would-kill")) >= 2 })
		b.later()
		b.nobodyKilled(all...)
		if n := len(b.events("would-kill")); n != 2 {
			t.Errorf("%d would-be kills are told, want one each", n)
		}
		for _, c := range all {
			if e := b.view(c).GPUs[0].Events; e.OverMax == 0 || e.OOMKill != 0 {
				t.Errorf("%s: %+v", c.Name, e)
			}
		}
		// A namespace that is enforced on the same node.
		victim := b.run(node.Spec{Name: "victim", Limits: []string{"memory.max=1Gi"}})
		b.do(victim.Main, "alloc 3000")
		b.killedBy(victim)
	})
}

// TestJournalSurvives: what was told before a restart is told after it, with rising numbers.
func TestJournalSurvives(t *testing.T) {
	t.Parallel()
	b := newBench(t, 0)
	victim := b.run(node.Spec{Name: "victim", Limits: []string{"memory.max=1Gi"}})
	b.do(victim.Main, "alloc 2000")
	_, kill := b.killedBy(victim)
	before := b.view(victim).GPUs[0].Events
	events := b.events()
	b.check(b.Crash())
	b.check(b.StartDaemon(t.Context()))
	after := b.events()
	if len(after) < len(events) {
		t.Fatalf("%d entries, %d before", len(after), len(events))
	}
	last := uint64(0)
	var again api.Event
	for i, e := range after {
		if e.Seq <= last {
			t.Fatalf("entry %d has number %d after %d", i, e.Seq, last)
		}
		last = e.Seq
		if i < len(events) && (e.Seq != events[i].Seq || e.Message != events[i].Message) {
			t.Fatalf("entry %d was %+v and is %+v", i, events[i], e)
		}
		if e.ID == kill.ID && e.Type == "kill" {
			again = e
		}
	}
	if again.Message != kill.Message {
		t.Errorf("the kill is %+v", again)
	}
	b.until("it is known again", func() bool { _, err := victim.View(t.Context()); return err == nil })
	if now := b.view(victim).GPUs[0].Events; now.OOM != before.OOM || now.OOMKill != before.OOMKill || now.OverMax < before.OverMax {
		t.Errorf("counters were %+v and are %+v", before, now)
	}
}
