// SPDX-License-Identifier: Apache-2.0

package policy

import (
	"testing"
	"time"
)

// What the simulated node (tests/simnode) has found.

// TestForceKillsForTheLivingOnly: what the dead have left is waited for, not killed for.
func TestForceKillsForTheLivingOnly(t *testing.T) {
	w := newWorld(t, container("c", 4*gib))
	w.shimmed(1, "c", gib)
	w.bare(2, "c", 2*gib)
	w.step()
	level := Level{Container: "c"}
	w.g.StartResize(level, 4*gib, 2*gib, w.now, w.now+2*time.Second, true)
	w.procs[2].noFact = true // it exits, and stays listed
	w.noKill(40)             // past the deadline
	if n := len(w.g.PendingResizes()); n != 1 {
		t.Fatalf("%d changes are pending", n)
	}
	delete(w.procs, 2)
	w.noKill(3)
	if n := len(w.g.PendingResizes()); n != 0 {
		t.Errorf("%d changes are pending although all fits", n)
	}

	// One that never comes back ends it.
	w.bare(3, "c", 2*gib)
	w.step()
	w.g.StartResize(level, 4*gib, 2*gib, w.now, w.now+2*time.Second, true)
	w.procs[3].noFact = true
	var ended []ResizeChange
	for range 150 {
		out := w.step()
		if out.Kill != nil {
			t.Fatalf("killed for the dead: %s", out.Kill.Reason)
		}
		ended = append(ended, out.Resizes...)
	}
	if len(ended) != 1 || ended[0].Resize.State != ResizeFailed {
		t.Errorf("ended: %+v", ended)
	}

	// The living are killed at the deadline.
	w.procs[1].nvml, w.procs[1].slot.DeviceBytes = 3*gib, 3*gib
	delete(w.procs, 3)
	w.steps(20)
	w.g.StartResize(level, 4*gib, 2*gib, w.now, w.now+2*time.Second, true)
	w.noKill(19)
	for range 10 {
		if k := w.step().Kill; k != nil {
			if !k.Forced || k.UsedBytes != 3*gib {
				t.Errorf("%+v", k)
			}
			return
		}
	}
	t.Error("nobody was killed by force")
}

// TestStuckNeedsAnAnswer: while NVML does not answer, nobody knows what an exited process still
// holds, so it neither is called stuck nor counts against its container's shims.
func TestStuckNeedsAnAnswer(t *testing.T) {
	w := newWorld(t, container("c", 4*gib))
	w.shimmed(1, "c", gib)
	w.shimmed(2, "c", gib)
	w.step()
	w.procs[2].noFact = true
	w.step()
	for range 150 {
		if out := w.step(incomplete); len(out.Stuck) > 0 || w.excess("c") != 0 {
			t.Fatalf("stuck: %+v, excess %d", out.Stuck, w.excess("c"))
		}
	}
	if out := w.step(); len(out.Stuck) != 1 {
		t.Errorf("an answer lists it after 15 s: %+v", out.Stuck)
	}
	delete(w.procs, 2)
	if w.step(); w.excess("c") != 0 {
		t.Errorf("excess %d", w.excess("c"))
	}
}
