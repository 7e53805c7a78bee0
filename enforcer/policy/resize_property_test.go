// SPDX-License-Identifier: Apache-2.0

package policy

import (
	"testing"
	"time"

	"pgregory.net/rapid"
)

// TestResizeProperties resizes a container at random while it allocates and frees, seen by an NVML
// that lags up to the tolerated time, with and without the shim. As long as it never grows above
// what its page shows, it is never killed; every resize ends soon after its deadline; and a
// limit that was lowered holds.
func TestResizeProperties(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		const top = 8 * gib
		cfg := DefaultConfig()
		lag := rapid.IntRange(0, int(cfg.Settle/(100*ms))-1).Draw(t, "lag")
		c := container("a", top)
		n := &node{g: NewGPU("GPU-1", cfg), now: time.Hour, lag: lag, conts: []ContainerFact{c}}
		p := n.add(0, rapid.Bool().Draw(t, "shim"))
		level := Level{Container: c.ID}
		var out Output
		var pending *Resize
		excess := uint64(0)
		for range rapid.IntRange(20, 120).Draw(t, "steps") {
			shown := n.conts[0].Container.Max
			if pending != nil {
				shown = pending.Desired
			}
			for range rapid.IntRange(0, 4).Draw(t, "ops") {
				size := rapid.Uint64Range(1, 1500).Draw(t, "MiB") * mib
				switch {
				case rapid.IntRange(0, 2).Draw(t, "op") == 0:
					n.free(p, size)
				case p.truth+excess+size <= shown:
					p.truth += size
					if p.shim {
						p.charge += size
					}
				}
			}
			if rapid.IntRange(0, 9).Draw(t, "resize") == 0 {
				to := rapid.Uint64Range(1, 8).Draw(t, "GiB") * gib
				r := n.g.StartResize(level, n.conts[0].Container.Max, to, n.now, n.now+time.Duration(rapid.IntRange(1, 40).Draw(t, "deadline"))*100*ms, false)
				pending = nil
				if r.State == ResizePending {
					pending = &r
				} else {
					n.conts[0].Container.Max = to
				}
			}
			complete := rapid.IntRange(0, 9).Draw(t, "complete") > 0
			out = n.g.Step(n.sample(complete))
			n.apply(out)
			excess = out.Containers[c.ID].ExcessBytes
			if out.Kill != nil {
				t.Fatalf("killed: %s (truth %d, shown %d)", out.Kill.Reason, p.truth, shown)
			}
			for _, ended := range out.Resizes {
				r := ended.Resize
				if pending == nil || r.Desired != pending.Desired {
					t.Fatalf("ended, but was not pending: %+v", r)
				}
				if r.State == ResizeDone {
					if p.truth > r.Desired {
						t.Fatalf("done, but %d > %d are in use", p.truth, r.Desired)
					}
					n.conts[0].Container.Max = r.Desired
				}
				pending = nil
			}
			if pending != nil && n.now > max(pending.Deadline, pending.Started+cfg.Settle)+20*100*ms {
				t.Fatalf("pending for %v after its deadline %v", n.now-pending.Started, pending.Deadline-pending.Started)
			}
		}
	})
}
