// SPDX-License-Identifier: Apache-2.0

package policy

import (
	"strings"
	"testing"
	"time"

	"github.com/gpufence/gpufence/enforcer/quota"
)

// A process that was killed alone and does not go takes its container with it.
func TestKillEscalates(t *testing.T) {
	c := container("a", gib)
	c.OOMGroup = false
	w := newWorld(t, c)
	w.bare(1, "a", 2*gib)
	w.bare(2, "a", 100*mib)
	var first, second *Kill
	for range 40 {
		if k := w.step().Kill; k != nil {
			first, second = second, k
		}
	}
	if first == nil || first.Group || first.PID != 1 || first.Escalated {
		t.Fatalf("first: %+v", first)
	}
	if !second.Group || !second.Escalated || second.Again || !strings.Contains(second.Reason, "whole container, since") {
		t.Errorf("second: %+v", second)
	}
	// It goes, but its memory does not come back: nobody else dies for that.
	w.procs[1].state = Exited
	w.noKill(200)
	if out := w.last; out.Containers["a"].StuckBytes != 2*gib {
		t.Errorf("%+v", out.Containers["a"])
	}
}

func TestMPSClientsAreSpared(t *testing.T) {
	mps := func(pids ...int) func(*Input) {
		return func(in *Input) {
			for i := range in.Sample.Processes {
				for _, pid := range pids {
					in.Sample.Processes[i].MPS = in.Sample.Processes[i].MPS || in.Sample.Processes[i].PID == pid
				}
			}
		}
	}
	for _, tt := range []struct {
		name   string
		clear  bool // policy kill-mps
		group  bool
		client int
		killed bool
	}{
		{"the process over its limit", false, true, 1, false},
		{"another of its container", false, true, 2, false},
		{"another of its container, which stays", false, false, 2, true},
		{"another container's", false, true, 3, true},
		{"allowed by policy", true, true, 1, true},
	} {
		t.Run(tt.name, func(t *testing.T) {
			a := container("a", gib)
			a.OOMGroup = tt.group
			w := newWorld(t, a, container("b", 4*gib))
			w.g.cfg.KillMPS = tt.clear
			w.bare(1, "a", 2*gib)
			w.bare(2, "a", 10*mib)
			w.bare(3, "b", gib)
			killed, withheld := 0, 0
			for range 10 {
				out := w.step(mps(tt.client))
				if out.Kill != nil {
					killed++
				}
				for _, k := range out.Withheld {
					withheld++
					if !strings.Contains(k.Withheld, "MPS") || k.Container != "a" {
						t.Errorf("%+v", k)
					}
				}
			}
			if (killed == 1) != tt.killed || (withheld == 1) == tt.killed {
				t.Errorf("%d killed, %d withheld", killed, withheld)
			}
		})
	}
}

func TestUnmanaged(t *testing.T) {
	for _, tt := range []struct {
		name   string
		change func(*world, *proc)
		policy bool
		want   bool
	}{
		{"one that lives", func(*world, *proc) {}, true, true},
		{"policy does not kill", func(*world, *proc) {}, false, false},
		{"exiting", func(_ *world, p *proc) { p.state = Exiting }, true, false},
		{"exited, still listed", func(_ *world, p *proc) { p.state = Exited }, true, false},
		{"vanished, still listed", func(_ *world, p *proc) { p.noFact = true }, true, false},
		{"cannot be read", func(_ *world, p *proc) { p.state = Unreadable }, true, false},
		{"of unknown size", func(_ *world, p *proc) { p.unknown = true }, true, false},
		{"of a container", func(_ *world, p *proc) { p.container = "a" }, true, false},
	} {
		t.Run(tt.name, func(t *testing.T) {
			w := newWorld(t, container("a", 8*gib))
			w.g.cfg.UnmanagedKill = tt.policy
			p := w.bare(9, "", 2*gib)
			tt.change(w, p)
			if w.step().Kill != nil {
				t.Fatal("killed after one answer")
			}
			k := w.step().Kill
			if (k != nil) != tt.want {
				t.Fatalf("%+v", k)
			}
			if k != nil && (k.Scope != "unmanaged" || k.PID != 9 || k.Group || k.UsedBytes != 2*gib || !strings.Contains(k.Reason, "did not come through gpufence")) {
				t.Errorf("%+v", k)
			}
			if k != nil {
				if w.noKill(15); len(w.last.Unmanaged) != 1 {
					t.Errorf("%+v", w.last.Unmanaged)
				}
			}
		})
	}
	// Exempt: counted, never killed or listed.
	w := newWorld(t, container("a", 8*gib))
	w.g.cfg.UnmanagedKill = true
	w.bare(9, "", 2*gib)
	w.noKill(5, func(in *Input) { in.Processes[0].Exempt = true })
	if w.last.UnmanagedBytes != 2*gib || len(w.last.Unmanaged) != 0 {
		t.Errorf("%+v", w.last)
	}
	// A container over its limit goes first, and one kill is enough for one pass.
	w = newWorld(t, container("a", gib))
	w.g.cfg.UnmanagedKill = true
	w.bare(1, "a", 2*gib)
	w.bare(9, "", 8*gib)
	w.step()
	if k := w.step().Kill; k == nil || k.Container != "a" {
		t.Errorf("%+v", k)
	}
	if k := w.step().Kill; k == nil || k.Scope != "unmanaged" {
		t.Errorf("%+v", k)
	}
}

// A burst of unmanaged use is shown, but no reason to refuse a start.
func TestUnmanagedBurst(t *testing.T) {
	w := newWorld(t, container("a", 8*gib))
	p := w.bare(9, "", 100*mib)
	w.steps(12)
	p.nvml = 8 * gib
	out := w.steps(3)
	if out.UnmanagedBytes != 8*gib || out.UnmanagedSteadyBytes != 100*mib {
		t.Errorf("in a burst: %d, steady %d", out.UnmanagedBytes, out.UnmanagedSteadyBytes)
	}
	if out = w.steps(3, incomplete); out.UnmanagedSteadyBytes != 100*mib {
		t.Errorf("unknown: %d", out.UnmanagedSteadyBytes)
	}
	if out = w.steps(10); out.UnmanagedSteadyBytes != 8*gib {
		t.Errorf("lasting: %d", out.UnmanagedSteadyBytes)
	}
	p.nvml = 50 * mib
	if out = w.step(); out.UnmanagedSteadyBytes != 50*mib {
		t.Errorf("less: %d", out.UnmanagedSteadyBytes)
	}
}

func TestRising(t *testing.T) {
	w := newWorld(t, container("a", 4*gib))
	p := w.bare(1, "a", gib)
	w.steps(3)
	rising := func() bool { return w.last.Containers["a"].Rising }
	if rising() {
		t.Error("it stands still")
	}
	p.nvml = gib + 200*mib // 2 GiB/s: 1.2 + 0.5 is below 4
	if w.step(); rising() {
		t.Error("the limit is far away")
	}
	p.nvml = 3 * gib
	if w.step(); !rising() {
		t.Error("it would be over it in 250 ms")
	}
	if w.steps(2); !rising() {
		t.Error("growth comes in steps")
	}
	if w.steps(2); rising() {
		t.Error("it stands still again")
	}
	// The shim holds one that has a slot.
	w = newWorld(t, container("a", 4*gib))
	p = w.shimmed(1, "a", gib)
	w.steps(3)
	p.nvml, p.slot.DeviceBytes = 3*gib, 3*gib
	if w.step(); rising() {
		t.Error("its shim is seen")
	}
}

func TestFreezeShare(t *testing.T) {
	for _, tt := range []struct {
		name             string
		bare, used, high uint64
		most, want       float64
	}{
		{"off by policy", gib, 4 * gib, gib, 0, 0},
		{"no high", gib, 4 * gib, quota.Unlimited, 0.5, 0},
		{"below", gib, gib, gib, 0.5, 0},
		{"all have a slot", 0, 4 * gib, gib, 0.5, 0},
		{"a tenth above", gib, 1100 * mib, 1000 * mib, 0.5, 0.25},
		{"a fifth above", gib, 1200 * mib, 1000 * mib, 0.5, 0.5},
		{"far above", gib, 8 * gib, gib, 0.25, 0.25},
		{"high 0", gib, gib, 0, 0.5, 0.5},
	} {
		if got := freezeShare(tt.bare, tt.used, tt.high, tt.most); got < tt.want-0.001 || got > tt.want+0.001 {
			t.Errorf("%s: %v", tt.name, got)
		}
	}
	c := container("a", 8*gib)
	c.Container.High = gib
	w := newWorld(t, c)
	w.g.cfg.FreezeShare = 0.5
	w.bare(1, "a", 2*gib)
	if w.step(); w.last.Containers["a"].FreezeShare != 0 {
		t.Error("after one answer")
	}
	if w.step(); w.last.Containers["a"].FreezeShare != 0.5 {
		t.Errorf("%+v", w.last.Containers["a"])
	}
	if w.step(incomplete); w.last.Containers["a"].FreezeShare != 0 {
		t.Error("frozen on what is not known")
	}
	w.conts[0].Mode = quota.ModeWarn
	if w.steps(3); w.last.Containers["a"].FreezeShare != 0 {
		t.Error("mode warn slows nobody")
	}
}

func TestMakeRoom(t *testing.T) {
	setup := func() (*world, RoomInput) {
		a, b, c := container("a", quota.Unlimited), container("b", quota.Unlimited), container("c", 4*gib)
		a.Container.Min, b.Container.Min, c.Container.Min = 2*gib, gib, 4*gib
		w := newWorld(t, a, b, c)
		w.bare(1, "a", 6*gib)
		w.bare(2, "b", 4*gib)
		w.bare(3, "c", 4*gib)
		w.steps(2)
		return w, RoomInput{
			Now: w.now, ShortBytes: gib, Containers: w.conts, Newest: w.last,
			Guarantees: map[PodID]uint64{"pod-a": 2 * gib, "pod-b": gib, "pod-c": 4 * gib},
		}
	}
	for _, tt := range []struct {
		name   string
		change func(*world, *RoomInput)
		want   ContainerID // "" for nobody
	}{
		{"the furthest above", func(*world, *RoomInput) {}, "a"},
		{"together just enough", func(_ *world, in *RoomInput) { in.ShortBytes = 7 * gib }, "a"},
		{"together not enough", func(_ *world, in *RoomInput) { in.ShortBytes = 7*gib + 1 }, ""},
		{"not whoever asks", func(_ *world, in *RoomInput) { in.For = "pod-a" }, "b"},
		{"not in mode warn", func(_ *world, in *RoomInput) { in.Containers[0].Mode = quota.ModeWarn }, "b"},
		{"its pod is promised it", func(_ *world, in *RoomInput) { in.Guarantees["pod-a"] = 6 * gib }, "b"},
		{"lower priority of equals", func(w *world, in *RoomInput) {
			in.Containers[0].Container.Min, in.Guarantees["pod-a"] = 3*gib, 3*gib
			in.Containers[1].Priority = -1
		}, "b"},
		{"younger of equals", func(w *world, in *RoomInput) {
			in.Containers[0].Container.Min, in.Guarantees["pod-a"] = 3*gib, 3*gib
			in.Containers[1].Started = 1
		}, "b"},
		{"nothing is known", func(_ *world, in *RoomInput) { in.Newest.Known = false }, ""},
		{"not one of unknown size", func(w *world, in *RoomInput) {
			w.procs[1].unknown = true
			in.Newest = w.step()
		}, "b"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			w, in := setup()
			tt.change(w, &in)
			in.Now = w.now
			k, wait := w.g.MakeRoom(in)
			if wait || (k == nil) != (tt.want == "") || k != nil && k.Container != tt.want {
				t.Fatalf("%+v, wait %v", k, wait)
			}
			if k == nil {
				return
			}
			if k.Scope != "room" || !k.Group || len(k.PIDs) != 1 || !strings.Contains(k.Reason, "kill-over-min") || !strings.Contains(k.Message, "memory.min") {
				t.Errorf("%+v", k)
			}
			// One at a time: until its memory is back, the next waits.
			if k, wait := w.g.MakeRoom(in); k != nil || !wait {
				t.Errorf("%+v, wait %v", k, wait)
			}
			p := w.procs[k.PID]
			p.state, p.unlisted = Exited, true
			in.Newest, in.Now = w.steps(2), w.now
			if _, wait := w.g.MakeRoom(in); wait {
				t.Error("its memory is back")
			}
		})
	}
}

// Growth that one answer only shows kills nobody yet, but is worth waiting for the next.
func TestMakeRoomAfterTwoAnswers(t *testing.T) {
	a := container("a", quota.Unlimited)
	w := newWorld(t, a)
	p := w.bare(1, "a", 0)
	w.step()
	p.nvml = 6 * gib
	in := RoomInput{ShortBytes: gib, Containers: w.conts, Newest: w.step(), Now: w.now}
	if k, wait := w.g.MakeRoom(in); k != nil || !wait {
		t.Errorf("%+v, wait %v", k, wait)
	}
	in.Newest, in.Now = w.step(), w.now
	if k, wait := w.g.MakeRoom(in); k == nil || wait {
		t.Errorf("%+v, wait %v", k, wait)
	}
}

func TestNoKillBeforeKillInterval(t *testing.T) {
	w := newWorld(t, container("a", 8*gib))
	w.g.cfg.UnmanagedKill = true
	w.bare(9, "", 2*gib)
	in := w.input()
	at := in.Sample.Began
	w.g.Step(in)
	for _, d := range []time.Duration{10 * ms, 19 * ms} {
		in := w.input(func(in *Input) { in.Sample.Began = at + d })
		if out := w.g.Step(in); out.Kill != nil {
			t.Errorf("after %v: %+v", d, out.Kill)
		}
	}
}
