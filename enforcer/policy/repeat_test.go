// SPDX-License-Identifier: Apache-2.0

package policy

import (
	"fmt"
	"maps"
	"reflect"
	"slices"
	"testing"
	"time"

	"pgregory.net/rapid"
)

// lazy leaves out the steps that may be left out.
type lazy struct {
	g       *GPU
	last    Input
	out     Output
	stepped bool
	skipped int
}

func (l *lazy) step(in Input) Output {
	if l.stepped && l.g.Settled() && sameInput(l.last, in) {
		l.g.Repeat(in.Sample.Began)
		l.skipped++
		return l.out
	}
	l.last, l.stepped = in, true
	l.out = l.g.Step(in)
	return l.out
}

// sameInput compares all but times, numbers, and peaks that say what the charges say.
func sameInput(a, b Input) bool {
	timeless := func(in Input) Input {
		in.Now, in.Sample.Began, in.Sample.Number = 0, 0, 0
		in.Slots = slices.Clone(in.Slots)
		for i := range in.Slots {
			f := &in.Slots[i]
			f.Number = 0
			f.PeakBytes = maps.Clone(f.PeakBytes)
			maps.DeleteFunc(f.PeakBytes, func(_, bytes uint64) bool { return bytes == f.DeviceBytes })
			if len(f.PeakBytes) == 0 {
				f.PeakBytes = nil
			}
		}
		return in
	}
	return reflect.DeepEqual(timeless(a), timeless(b))
}

// TestRepeatAfterALook: whoever looks in between, for room, finds the times of the repeated answers, and so does what comes
// after.
func TestRepeatAfterALook(t *testing.T) {
	w := newWorld(t, container("a", 4*gib))
	w.shimmed(1, "a", gib)
	for i := 0; !w.g.Settled(); i++ {
		if i == 100 {
			t.Fatal("it does not settle")
		}
		w.step()
	}
	for range 3 {
		for range 2 {
			w.now += 100 * ms
			w.g.Repeat(w.now - 2*ms)
		}
		w.g.MakeRoom(RoomInput{Now: w.now, ShortBytes: 100 * gib, Containers: w.conts, Newest: w.last})
	}
	began := w.now - 2*ms
	w.step()
	if s := w.g.scopes[Level{Container: "a"}]; s.began[0] != began {
		t.Errorf("the answer before the last was at %v, and counts as of %v", began, s.began[0])
	}
}

// TestRepeat runs two machines through the same history, one of which leaves out the steps that it
// may: nobody can tell them apart.
func TestRepeat(t *testing.T) {
	skipped := 0
	rapid.Check(t, func(t *rapid.T) {
		cfg := DefaultConfig()
		cfg.ManagedAttributed = rapid.Bool().Draw(t, "managed-attributed")
		cfg.UnmanagedKill = rapid.IntRange(0, 3).Draw(t, "unmanaged-kill") == 0
		cfg.ShimKill = rapid.IntRange(0, 3).Draw(t, "shim-kill") == 0
		cfg.FreezeShare = rapid.SampledFrom([]float64{0, 0.5}).Draw(t, "freeze")
		full, part := NewGPU("GPU-1", cfg), &lazy{g: NewGPU("GPU-1", cfg)}
		n := &node{g: full, now: time.Hour}
		n.lag = rapid.IntRange(0, 9).Draw(t, "lag")
		n.freeLag = rapid.IntRange(0, 20).Draw(t, "free-lag")
		for i := range 3 {
			c := container(fmt.Sprint("c", i), uint64(i+2)*gib)
			if i == 1 {
				c.Container.High = gib
			}
			n.conts = append(n.conts, c)
		}
		both := func(in Input) Output {
			a := full.Step(in)
			b := part.step(in)
			if !reflect.DeepEqual(a, b) {
				t.Fatalf("at %v, settled %v:\n%+v\n%+v", in.Now, part.g.Settled(), a, b)
			}
			return a
		}
		for range rapid.IntRange(1, 12).Draw(t, "turns") {
			for range rapid.IntRange(0, 4).Draw(t, "ops") {
				c := rapid.IntRange(0, 2).Draw(t, "container")
				var mine []*nodeProc
				for _, p := range n.procs {
					if p.container == c && !p.dead {
						mine = append(mine, p)
					}
				}
				op := rapid.IntRange(0, 13).Draw(t, "op")
				if len(mine) == 0 || op == 0 {
					n.add(c, rapid.IntRange(0, 3).Draw(t, "shim") > 0)
					continue
				}
				p := rapid.SampledFrom(mine).Draw(t, "process")
				size := rapid.Uint64Range(1, 1500).Draw(t, "MiB") * mib
				switch {
				case op <= 6:
					n.alloc(p, size, 0)
				case op <= 8:
					n.free(p, size)
				case op == 9:
					n.exit(p)
				case op >= 12:
					p.truth += size // behind the shim, if it has one
				case op == 10:
					level, old := Level{Container: n.conts[c].ID}, n.conts[c].Container.Max
					to := rapid.Uint64Range(1, 6).Draw(t, "GiB") * gib
					force := rapid.Bool().Draw(t, "force")
					for _, g := range []*GPU{full, part.g} {
						if r := g.StartResize(level, old, to, n.now, n.now+3*time.Second, force); r.State == ResizeDone {
							n.conts[c].Container.Max = to
						}
					}
				default:
					room := RoomInput{Now: n.now, ShortBytes: size, Containers: n.conts, Newest: part.out}
					k, wait := full.MakeRoom(room)
					k2, wait2 := part.g.MakeRoom(room)
					if wait != wait2 || !reflect.DeepEqual(k, k2) {
						t.Fatalf("room: %+v (%v), %+v (%v)", k, wait, k2, wait2)
					}
				}
			}
			// A process that came in by no container, and memory that nobody explains.
			stranger, hidden := rapid.Uint64Range(0, 2).Draw(t, "stranger")*gib, rapid.Uint64Range(0, 1).Draw(t, "hidden")*gib
			for range rapid.IntRange(1, 80).Draw(t, "steps") {
				in := n.sample(rapid.IntRange(0, 40).Draw(t, "complete") > 0)
				if stranger > 0 && in.Sample.Complete {
					in.Sample.Processes = append(in.Sample.Processes, ProcessUse{PID: 9999, Bytes: stranger, Known: true})
					in.Processes = append(in.Processes, ProcFact{PID: 9999, Start: 1})
				}
				in.Sample.UsedBytes += stranger + hidden
				out := both(in)
				if rapid.Bool().Draw(t, "survives") {
					out.Kill = nil // a driver may keep a process for long
				}
				n.apply(out)
				for _, r := range out.Resizes {
					for i := range n.conts {
						if n.conts[i].ID == r.Resize.Level.Container && r.Resize.State == ResizeDone {
							n.conts[i].Container.Max = r.Resize.Desired
						}
					}
				}
			}
		}
		skipped += part.skipped
	})
	if skipped < 1000 {
		t.Errorf("%d steps were left out: the test shows nothing", skipped)
	}
}

// TestRepeatAnyInput is the same with any input at all, each for a while.
func TestRepeatAnyInput(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		full, part := NewGPU("GPU-1", DefaultConfig()), &lazy{g: NewGPU("GPU-1", DefaultConfig())}
		now, number := time.Hour, uint64(1)
		for range rapid.IntRange(1, 10).Draw(t, "turns") {
			in := arbitraryInput(t, &now, &number)
			if rapid.Bool().Draw(t, "plain") {
				// What settles is rare among any inputs at all.
				in.Sample.Complete, in.Sample.DeviceKnown = true, true
				for i := range in.Sample.Processes {
					in.Sample.Processes[i].Known = true
				}
				for i := range in.Processes {
					in.Processes[i].State = Live
				}
				for i := range in.Slots {
					in.Slots[i].Dying, in.Slots[i].LockFree = false, false
				}
			}
			for range rapid.IntRange(1, 10).Draw(t, "times") {
				a, b := full.Step(in), part.step(in)
				if !reflect.DeepEqual(a, b) {
					t.Fatalf("settled %v:\n%+v\n%+v", part.g.Settled(), a, b)
				}
				took := time.Duration(rapid.IntRange(1, 3000).Draw(t, "later")) * ms
				now += took
				number++
				in.Now, in.Sample.Began, in.Sample.Number = now, in.Sample.Began+took, number
				in.Slots = slices.Clone(in.Slots)
				for i := range in.Slots {
					f := &in.Slots[i]
					f.PeakBytes = maps.Clone(f.PeakBytes)
					maps.DeleteFunc(f.PeakBytes, func(n, _ uint64) bool { return n+1 < number }) // nothing touched it since
				}
			}
		}
	})
}
