// SPDX-License-Identifier: Apache-2.0

package enforcer

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/gpufence/gpufence/enforcer/api"
	"github.com/gpufence/gpufence/tests/node"
)

// preload builds a library of testdata that is preloaded into a program.
func preload(t *testing.T, name string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), name+".so")
	out, err := exec.CommandContext(t.Context(), "cc", "-std=c11", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", "-o", path, "testdata/"+name+".c", "-ldl", "-lpthread").CombinedOutput()
	if err != nil {
		t.Fatalf("build %s: %v: %s", name, err, out)
	}
	return path
}

// TestNeverKillOnUnknown: while an answer lacks something nobody dies, although somebody is far
// above its limit; the next whole answers kill. The other GPU is enforced all the time.
func TestNeverKillOnUnknown(t *testing.T) {
	t.Parallel()
	fault := preload(t, "nvmlfault")
	for _, test := range []struct {
		name         string
		begin, end   string // knob of GPU 0
		list         string // that fails, on every GPU
		otherToo     bool   // the other GPU is blind, too
		memoryStays  bool
		mustBeStated bool // as an event
	}{
		{name: "sizes not available", begin: "unknown=process", end: "unknown=0"},
		{name: "hung call", begin: "hang=nvml", end: "hang=0", mustBeStated: true},
		{name: "lost GPU", begin: "lost=1", end: "lost=0", mustBeStated: true},
		{name: "compute list missing", list: "compute", otherToo: true, mustBeStated: true},
		{name: "graphics list missing", list: "graphics", otherToo: true, mustBeStated: true},
		{name: "MPS list missing", list: "mps", otherToo: true, mustBeStated: true},
	} {
		t.Run(test.name, func(t *testing.T) {
			forLags(t, func(t *testing.T, lag time.Duration) {
				control := filepath.Join(t.TempDir(), "list")
				b := newBench(t, lag, withSim("--gpus", "2"), withConfig(`sample-deadline = "300ms"`), func(o *node.Options) {
					o.Env = []string{"LD_PRELOAD=" + fault, "NVMLFAULT=" + control, "NVMLFAULT_LIBRARY=" + filepath.Join(o.Dist, "simgpu/libnvidia-ml.so.1")}
				})
				blind := b.run(node.Spec{Name: "blind", Limits: []string{"memory.max=1Gi"}, GPUs: []string{"0"}})
				b.shown(blind, 64*mib)
				seen, err := b.Start(t.Context(), node.Spec{Name: "seen", Limits: []string{"memory.max=1Gi"}, GPUs: []string{"1"}})
				b.check(err)
				b.do(seen.Main, "context 1")

				if test.list != "" {
					b.check(os.WriteFile(control, []byte(test.list), 0o600))
				} else {
					b.knobs(0, test.begin)
				}
				b.until("it is known that nothing is known", func() bool { return !b.view(blind).GPUs[0].Known })
				if test.begin == "lost=1" {
					// A lost GPU allocates nothing: somebody is above while NVML says so.
					b.knobs(0, "lost=0")
					b.knobs(0, "unknown=process")
					b.do(blind.Main, "alloc 3000")
					b.knobs(0, "lost=1", "unknown=0")
				} else {
					b.do(blind.Main, "alloc 3000")
				}
				b.do(seen.Main, "alloc 512")
				b.later()
				b.nobodyKilled(blind, seen)
				if test.mustBeStated && len(b.events("gpu-unknown")) == 0 {
					t.Error("no gpu-unknown")
				}
				if !test.otherToo {
					over := b.do(seen.Main, "alloc 2000")
					_, kill := b.killedBy(seen)
					t.Logf("the other GPU's kill took %v", time.Duration(kill.MonotonicNS-over.MonoNS).Round(time.Millisecond))
					if !blind.Main.Alive() {
						t.Fatal("killed on unknown data")
					}
				}
				if test.list != "" {
					b.check(os.Remove(control))
				} else {
					b.knobs(0, test.end)
				}
				b.killedBy(blind)
			})
		})
	}
}

// TestExitedProcessIsNotBlamed: what an exited process has left counts against nobody, neither its
// container nor the same pod's next one, nor after a restart of gpufenced.
func TestExitedProcessIsNotBlamed(t *testing.T) {
	t.Parallel()
	for _, restart := range []bool{false, true} {
		t.Run(fmt.Sprintf("restart=%v", restart), func(t *testing.T) {
			forLags(t, func(t *testing.T, lag time.Duration) {
				b := newBench(t, lag, withSim("--free-lag", "2500ms"))
				c := b.run(node.Spec{Name: "c", Pod: "p", Limits: []string{"memory.max=2Gi", "memory.min=0"}})
				child, err := c.Exec(t.Context(), false)
				b.check(err)
				b.do(child, "context", "alloc 1700")
				b.shown(c, 1800*mib)
				b.check(child.Kill())
				b.check(child.Await(t.Context()))
				if restart {
					b.check(b.Crash())
					b.check(b.StartDaemon(t.Context()))
				}
				// Live 1.6 GiB and dying 1.7: together far above.
				b.do(c.Main, "alloc 1600")
				b.shown(c, 1600*mib)
				b.later()
				b.nobodyKilled(c)
				b.check(c.Remove(t.Context()))
				// Its successor in the same pod, while its memory is still listed.
				next := b.run(node.Spec{Name: "next", Pod: "p", Limits: []string{"memory.max=2Gi", "memory.min=0"}})
				b.do(next.Main, "alloc 1700")
				b.shown(next, 1700*mib)
				b.later()
				b.nobodyKilled(next)
				b.check(next.Main.Say("alloc 500"))
				b.killedBy(next)
			})
		})
	}
}

// TestReusedPID: whoever gets an exited process's pid is not blamed for what NVML still lists of
// it, and is seen for itself afterwards.
func TestReusedPID(t *testing.T) {
	t.Parallel()
	forLags(t, func(t *testing.T, lag time.Duration) {
		b := newBench(t, lag, withSim("--free-lag", "2s"))
		first := b.run(node.Spec{Name: "first", Limits: []string{"memory.max=4Gi"}})
		second := b.run(node.Spec{Name: "second", Limits: []string{"memory.max=1Gi", "memory.min=0"}})
		var heir *node.Process
		for attempt := 1; ; attempt++ {
			p, err := first.Exec(t.Context(), false)
			b.check(err)
			b.do(p, "context", "alloc 3000")
			b.shown(first, 3000*mib)
			b.check(p.Kill())
			b.check(p.Await(t.Context()))
			if heir, err = second.ExecAs(t.Context(), p.PID); err == nil {
				break
			}
			if attempt == 5 {
				t.Fatalf("no process can be had with a certain pid: %v", err)
			}
			t.Logf("attempt %d: %v", attempt, err)
			// Its exit must have been seen, else the next attempt's memory is taken for this one's.
			b.until("its exit is seen", func() bool { return b.view(first).GPUs[0].Dying > 0 })
			b.until("the memory is gone", func() bool { return b.view(first).GPUs[0].Dying == 0 })
		}
		b.later()
		b.nobodyKilled(first, second)
		if !heir.Alive() {
			t.Fatalf("the heir ended with %s", heir.Status())
		}
		b.until("the predecessor's memory is gone", func() bool { return b.view(first).GPUs[0].Dying == 0 })
		if n := b.view(second).GPUs[0].NVML; n > 200*mib {
			t.Errorf("the heir is charged %d", n)
		}
		b.do(heir, "context", "alloc 2000")
		b.killedBy(second)
	})
}

// TestFirstThreadGone: a process whose first thread has ended is a zombie in /proc and no exiting one: it
// is charged and killed like any other, alone or with its container.
func TestFirstThreadGone(t *testing.T) {
	t.Parallel()
	leaderless := preload(t, "leaderless")
	for _, test := range []struct{ group, hierarchy string }{{"true", "unified"}, {"true", "freezer"}, {"false", "freezer"}} {
		t.Run("oom.group="+test.group+" "+test.hierarchy, func(t *testing.T) {
			forLags(t, func(t *testing.T, lag time.Duration) {
				b := newBench(t, lag)
				c := b.run(node.Spec{
					Name: "c", Limits: []string{"memory.max=1Gi", "memory.oom.group=" + test.group}, Hierarchy: test.hierarchy,
					Program: []string{"/usr/bin/env", "LD_PRELOAD=" + leaderless, b.Dist("clients/client")},
				})
				b.do(c.Main, "context", "alloc 512")
				contains(t, readFile(t, fmt.Sprintf("/proc/%d/status", c.Main.PID)), "State:\tZ")
				b.shown(c, 512*mib)
				b.later()
				b.nobodyKilled(c)
				b.do(c.Main, "alloc 1024")
				b.killedBy(c)
			})
		})
	}
}

// TestLagAndTransients: a container that frees before it allocates is never above its limit, and
// what an old answer adds up to does not matter.
func TestLagAndTransients(t *testing.T) {
	t.Parallel()
	forLags(t, func(t *testing.T, lag time.Duration) {
		b := newBench(t, lag)
		c := b.run(node.Spec{Name: "c", Limits: []string{"memory.max=1Gi"}})
		other, err := c.Exec(t.Context(), false)
		b.check(err)
		b.do(other, "context")
		// 890 MiB, by turns in two processes: NVML, which asks one list after the other, may show both.
		for deadline := time.Now().Add(2 * time.Second); time.Now().Before(deadline); {
			b.do(c.Main, "alloc 890", "free 0")
			b.do(other, "alloc 890", "free 0")
		}
		b.later()
		b.nobodyKilled(c)
	})
}

// TestShrinkThatIsNotSeen: while NVML does not answer a resize neither ends well nor kills.
func TestShrinkThatIsNotSeen(t *testing.T) {
	t.Parallel()
	forLags(t, func(t *testing.T, lag time.Duration) {
		b := newBench(t, lag, withConfig(`sample-deadline = "300ms"`))
		c := b.run(node.Spec{Name: "c", Limits: []string{"memory.max=4Gi"}, Shim: true})
		b.do(c.Main, "alloc 2000")
		b.shown(c, 2000*mib)
		b.knobs(0, "unknown=process")
		b.until("nothing is known", func() bool { return !b.view(c).GPUs[0].Known })
		r, err := c.Set(t.Context(), "1Gi", api.SetRequest{Wait: true, DeadlineMillis: 1500})
		b.check(err)
		if len(r.Resizes) != 1 || r.Resizes[0].State != "ResizeFailed" || !strings.Contains(r.Resizes[0].Why, "not known") {
			t.Errorf("resize: %+v", r.Resizes)
		}
		b.nobodyKilled(c)
		b.knobs(0, "unknown=0")
		b.do(c.Main, "alloc 1900")
	})
}
