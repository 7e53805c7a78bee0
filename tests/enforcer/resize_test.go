// SPDX-License-Identifier: Apache-2.0

package enforcer

import (
	"strings"
	"testing"
	"time"

	"github.com/gpufence/gpufence/enforcer/api"
	"github.com/gpufence/gpufence/tests/node"
)

// TestResize: both ways, under a shim that asks for more all the time.
func TestResize(t *testing.T) {
	t.Parallel()
	forLags(t, func(t *testing.T, lag time.Duration) {
		b := newBench(t, lag)
		c := b.run(node.Spec{Name: "c", Limits: []string{"memory.max=1Gi"}, Shim: true})
		r := b.do(c.Main, "fill 16")
		if r.HeldBytes > gib-64*mib || r.HeldBytes < gib-96*mib {
			t.Fatalf("%d bytes are granted of 1 GiB", r.HeldBytes)
		}
		set := func(limit string, req api.SetRequest) api.Resize {
			t.Helper()
			req.Wait = true
			began := time.Now()
			resp, err := c.Set(t.Context(), limit, req)
			b.check(err)
			if len(resp.Resizes) != 1 {
				t.Fatalf("resizes: %+v", resp)
			}
			t.Logf("to %s: %s after %v", limit, resp.Resizes[0].State, time.Since(began).Round(time.Millisecond))
			return resp.Resizes[0]
		}
		fill := func(want uint64) {
			t.Helper()
			r := b.do(c.Main, "fill 16")
			if r.HeldBytes > want-64*mib || r.HeldBytes < want-96*mib {
				t.Errorf("%d bytes are granted of %d", r.HeldBytes, want)
			}
		}

		if r := set("3Gi", api.SetRequest{}); r.State != "done" || r.Actual != 3*gib {
			t.Errorf("grow: %+v", r)
		}
		fill(3 * gib)
		// It holds more and does not give it back: the old limit holds again, and works.
		if r := set("2Gi", api.SetRequest{DeadlineMillis: 1000}); r.State != "ResizeFailed" || r.Actual != 3*gib || !strings.Contains(r.Why, "still uses") {
			t.Errorf("shrink of what is in use: %+v", r)
		}
		b.do(c.Main, "free 512")
		fill(3 * gib)
		// It gives back meanwhile: done, and what is asked for above is refused.
		b.do(c.Main, "free 2048")
		if r := set("2Gi", api.SetRequest{DeadlineMillis: 20000}); r.State != "done" || r.Actual != 2*gib {
			t.Errorf("shrink that fits: %+v", r)
		}
		fill(2 * gib)
		if g := b.view(c).GPUs[0]; g.Limits.Max != 2*gib || g.Limits.Min != 2*gib {
			t.Errorf("limits: %+v", g.Limits)
		}
		contains(t, readFile(t, c.File("memory.max")), "2147483648")
		b.nobodyKilled(c)

		// Not given: more than there is. Nothing changes.
		if _, err := c.Set(t.Context(), "64Gi", api.SetRequest{Wait: true}); err == nil {
			t.Error("64 GiB of 16 were granted")
		}
		if g := b.view(c).GPUs[0]; g.Limits.Max != 2*gib {
			t.Errorf("limits after a refused change: %+v", g.Limits)
		}
		// By force: killed at the deadline, and only then.
		began := time.Now()
		resp, err := c.Set(t.Context(), "1Gi", api.SetRequest{DeadlineMillis: 1000, Force: true})
		b.check(err)
		if resp.Resizes[0].State != "pending" {
			t.Errorf("forced: %+v", resp.Resizes[0])
		}
		b.check(c.Main.Await(t.Context()))
		if took := time.Since(began); !c.Main.Killed() || took < time.Second {
			t.Errorf("forced: %s after %v", c.Main.Status(), took)
		}
		if evs := b.events("kill-decided"); len(evs) != 1 || !strings.Contains(evs[0].Message, "forced") {
			t.Errorf("forced: %+v", evs)
		}
	})
}

// TestResizeOfAPod: the pod's limit is shared, and shrinks with what all of it hold.
func TestResizeOfAPod(t *testing.T) {
	t.Parallel()
	forLags(t, func(t *testing.T, lag time.Duration) {
		b := newBench(t, lag)
		limits := []string{"memory.max=2Gi"}
		a := b.run(node.Spec{Name: "a", Pod: "p", Limits: limits, Shim: true})
		o := b.run(node.Spec{Name: "o", Pod: "p", Limits: limits, Shim: true})
		b.do(a.Main, "alloc 1000")
		r := b.do(o.Main, "fill 16")
		if r.HeldBytes > 2*gib-1128*mib || r.HeldBytes < 2*gib-1160*mib {
			t.Errorf("%d bytes are granted beside 1000 MiB and two contexts of 2 GiB", r.HeldBytes)
		}
		resp, err := a.Set(t.Context(), "1Gi", api.SetRequest{Scope: "pod", Wait: true, DeadlineMillis: 800})
		b.check(err)
		if resp.Resizes[0].State != "ResizeFailed" {
			t.Errorf("shrink of a full pod: %+v", resp.Resizes)
		}
		b.do(a.Main, "free 0")
		b.do(o.Main, "free 0")
		resp, err = o.Set(t.Context(), "1Gi", api.SetRequest{Scope: "pod", Wait: true, DeadlineMillis: 20000})
		b.check(err)
		if resp.Resizes[0].State != "done" {
			t.Errorf("shrink of an empty pod: %+v", resp.Resizes)
		}
		if r := b.do(a.Main, "fill 16"); r.HeldBytes > gib-128*mib || r.HeldBytes < gib-160*mib {
			t.Errorf("%d bytes are granted of 1 GiB", r.HeldBytes)
		}
		b.nobodyKilled(a, o)
	})
}

// TestRestartKeepsResize: a pending change goes on after a crash, with its deadline.
func TestRestartKeepsResize(t *testing.T) {
	t.Parallel()
	forLags(t, func(t *testing.T, lag time.Duration) {
		b := newBench(t, lag)
		c := b.run(node.Spec{Name: "c", Limits: []string{"memory.max=2Gi"}, Shim: true})
		b.do(c.Main, "alloc 1500")
		b.shown(c, 1500*mib)
		resp, err := c.Set(t.Context(), "1Gi", api.SetRequest{DeadlineMillis: 30000})
		b.check(err)
		if resp.Resizes[0].State != "pending" {
			t.Fatalf("shrink: %+v", resp.Resizes)
		}
		b.check(b.Crash())
		if r, err := c.Main.Ask(t.Context(), "alloc 100"); err != nil || r.OK {
			t.Errorf("while gpufenced is away the pending limit does not hold: %+v, %v", r, err)
		}
		b.check(b.StartDaemon(t.Context()))
		if r := b.view(c).Resize; r == nil || r.State != "pending" || r.Desired != gib {
			t.Errorf("after the restart: %+v", r)
		}
		b.do(c.Main, "free 0")
		b.until("it is done", func() bool { return b.view(c).GPUs[0].Limits.Max == gib })
		b.nobodyKilled(c)
	})
}
