// SPDX-License-Identifier: Apache-2.0

package policy

import (
	"fmt"
	"reflect"
	"slices"
	"testing"
	"time"

	"pgregory.net/rapid"
)

// node is a small model of a GPU, its containers and their shims, to feed the state machine with
// what a driver with lag would say.
type node struct {
	g       *GPU
	now     time.Duration
	number  uint64
	lag     int // samples that NVML's answers are old
	freeLag int // samples that an exited process stays listed
	conts   []ContainerFact
	procs   []*nodeProc
	nextPID int
	nextIdx int
}

type nodeProc struct {
	pid       int
	start     uint64
	container int
	shim      bool
	index     int // of its slot
	truth     uint64
	charge    uint64
	peaks     map[uint64]uint64
	history   []uint64 // truth at each sample
	exited    int      // samples since
	dead      bool
	marked    bool
	reclaimed bool
}

func (n *node) charged(c int) (sum uint64) {
	for _, p := range n.procs {
		if p.container == c && p.shim && !p.dead && !p.reclaimed {
			sum += p.charge
		}
	}
	return sum
}

// alloc does what a shim does: announce, sum with what is published, call the driver.
func (n *node) alloc(p *nodeProc, bytes, excess uint64) bool {
	if p.shim {
		if n.charged(p.container)+excess+bytes > n.conts[p.container].Container.Max {
			return false
		}
		p.charge += bytes
	}
	p.truth += bytes
	return true
}

func (n *node) free(p *nodeProc, bytes uint64) {
	bytes = min(bytes, p.truth)
	p.truth -= bytes
	if p.shim {
		p.peaks[n.number] = max(p.peaks[n.number], p.charge)
		p.charge -= bytes
	}
}

func (n *node) sample(complete bool) Input {
	n.now += 100 * ms
	n.number++
	in := Input{Now: n.now, Containers: slices.Clone(n.conts), Sample: Sample{
		Number: n.number, Began: n.now - ms, Complete: complete, DeviceKnown: complete, TotalBytes: 64 * gib,
	}}
	for _, p := range n.procs {
		p.history = append(p.history, p.truth)
		if p.dead {
			p.exited++
		}
		shown := uint64(0)
		if i := len(p.history) - 1 - n.lag; i >= 0 {
			shown = p.history[i]
		}
		listed := shown > 0 || p.dead && p.exited <= n.lag+n.freeLag && slices.Max(p.history) > 0
		if p.dead && p.exited <= n.freeLag && shown == 0 && len(p.history) > p.exited {
			shown = p.history[len(p.history)-1-p.exited]
		}
		if listed && complete {
			in.Sample.Processes = append(in.Sample.Processes, ProcessUse{PID: p.pid, Bytes: shown, Known: true})
			in.Sample.UsedBytes += shown
		}
		state := Live
		if p.dead {
			state = Exited
		}
		if !p.reclaimed || listed {
			if !p.dead || p.exited < 3 {
				in.Processes = append(in.Processes, ProcFact{PID: p.pid, Start: p.start, Container: n.conts[p.container].ID, State: state})
			}
		}
		if p.shim && !p.reclaimed {
			f := SlotFact{Pod: n.conts[p.container].Pod, Index: p.index, Generation: 1, PID: p.pid, Start: p.start, Dying: p.marked, LockFree: p.dead, DeviceBytes: p.charge, PeakBytes: map[uint64]uint64{}}
			for _, k := range []uint64{n.number - 1, n.number} {
				if b, ok := p.peaks[k]; ok {
					f.PeakBytes[k] = b
				}
			}
			in.Slots = append(in.Slots, f)
		}
	}
	return in
}

func (n *node) apply(out Output) {
	find := func(r SlotRef) *nodeProc {
		for _, p := range n.procs {
			if p.shim && p.index == r.Index {
				return p
			}
		}
		return nil
	}
	for _, r := range out.MarkDying {
		find(r).marked = true
	}
	for _, r := range out.Reclaimable {
		find(r).reclaimed = true
	}
	if out.Kill != nil {
		for _, p := range n.procs {
			if slices.Contains(out.Kill.PIDs, p.pid) {
				n.exit(p)
			}
		}
	}
}

func (n *node) exit(p *nodeProc) {
	if !p.dead {
		p.dead, p.truth = true, 0
		p.peaks[n.number] = max(p.peaks[n.number], p.charge)
	}
}

func (n *node) add(c int, shim bool) *nodeProc {
	n.nextPID++
	n.nextIdx++
	p := &nodeProc{pid: n.nextPID, start: uint64(n.nextPID), container: c, shim: shim, index: n.nextIdx, peaks: map[uint64]uint64{}}
	n.procs = append(n.procs, p)
	return p
}

// TestProperties drives random workloads under random lags: well-behaved containers are never
// killed and never refused inside their limit, bypassing ones always die, the reasons are true, and
// every slot comes back.
func TestProperties(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		cfg := DefaultConfig()
		n := &node{g: NewGPU("GPU-1", cfg), now: time.Hour}
		n.lag = rapid.IntRange(0, 9).Draw(t, "lag")
		n.freeLag = rapid.IntRange(0, 20).Draw(t, "free-lag")
		for i := range 3 {
			n.conts = append(n.conts, container(fmt.Sprint("c", i), uint64(i+2)*gib))
		}
		bypass := rapid.Bool().Draw(t, "bypass") // container 2 does without the shim
		excess := map[int]uint64{}
		over := 0
		for range rapid.IntRange(10, 80).Draw(t, "steps") {
			for range rapid.IntRange(0, 6).Draw(t, "ops") {
				c := rapid.IntRange(0, 2).Draw(t, "container")
				var mine []*nodeProc
				for _, p := range n.procs {
					if p.container == c && !p.dead {
						mine = append(mine, p)
					}
				}
				op := rapid.IntRange(0, 9).Draw(t, "op")
				if len(mine) == 0 || op == 0 && len(mine) < 4 {
					n.add(c, c != 2 || !bypass)
					continue
				}
				p := rapid.SampledFrom(mine).Draw(t, "process")
				size := rapid.Uint64Range(1, 700).Draw(t, "MiB") * mib
				switch {
				case op <= 5:
					room := n.conts[c].Container.Max - min(n.conts[c].Container.Max, n.charged(c))
					if !n.alloc(p, size, excess[c]) && p.shim && size <= room {
						t.Fatalf("a legal allocation of %d is refused: charged %d, excess %d, limit %d", size, n.charged(c), excess[c], n.conts[c].Container.Max)
					}
				case op <= 8:
					n.free(p, size)
				default:
					n.exit(p)
				}
			}
			complete := rapid.IntRange(0, 9).Draw(t, "complete") > 0
			in := n.sample(complete)
			out := n.g.Step(in)
			if k := out.Kill; k != nil {
				if !complete {
					t.Fatalf("killed on an incomplete answer: %+v", k)
				}
				if !bypass || k.Container != "c2" {
					t.Fatalf("a well-behaved container is killed: %s", k.Reason)
				}
				if k.UsedBytes <= k.ThresholdBytes || k.ThresholdBytes != k.MaxBytes+k.SlackBytes || k.Second-k.First < cfg.KillInterval || k.Reason == "" {
					t.Fatalf("not explained: %+v", k)
				}
			}
			// A bypass above its limit dies as soon as NVML has shown it in two complete answers.
			shown := uint64(0)
			for _, u := range in.Sample.Processes {
				for _, p := range n.procs {
					if p.pid == u.PID && p.container == 2 && !p.dead {
						shown += u.Bytes
					}
				}
			}
			if complete {
				if shown > n.conts[2].Container.Max+cfg.Slack(n.conts[2].Container.Max) && bypass {
					over++
				} else {
					over = 0
				}
				if over >= 2 && out.Kill == nil {
					t.Fatalf("above for %d answers and not killed", over)
				}
				if out.Kill != nil {
					over = 0
				}
			}
			for i, c := range n.conts {
				s := out.Containers[c.ID]
				excess[i] = s.ExcessBytes
				if i < 2 && s.ExcessBytes != 0 {
					t.Fatalf("container %d has an excess of %d with lag %d", i, s.ExcessBytes, n.lag)
				}
				if s.ChargedBytes > c.Container.Max && (i < 2 || !bypass) {
					t.Fatalf("container %d is charged %d of %d", i, s.ChargedBytes, c.Container.Max)
				}
			}
			n.apply(out)
		}
		// Everybody leaves: all is free in the end.
		for _, p := range n.procs {
			n.exit(p)
		}
		for range n.lag + n.freeLag + 15 {
			out := n.g.Step(n.sample(true))
			if out.Kill != nil {
				t.Fatalf("the dead are killed: %+v", out.Kill)
			}
			n.apply(out)
		}
		for _, p := range n.procs {
			if p.shim && !p.reclaimed {
				t.Fatalf("slot %d of process %d is never reclaimed", p.index, p.pid)
			}
		}
		out := n.g.Step(n.sample(true))
		if out.DyingBytes != 0 || len(n.g.processes) != 0 {
			t.Fatalf("left: dying %d, %d processes", out.DyingBytes, len(n.g.processes))
		}
	})
}

// TestDeterministic gives two machines the same inputs.
func TestDeterministic(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		a, b := NewGPU("GPU-1", DefaultConfig()), NewGPU("GPU-1", DefaultConfig())
		now, number := time.Hour, uint64(0)
		for range rapid.IntRange(1, 20).Draw(t, "steps") {
			in := arbitraryInput(t, &now, &number)
			x, y := a.Step(in), b.Step(in)
			if !reflect.DeepEqual(x, y) {
				t.Fatalf("%+v\n%+v", x, y)
			}
		}
	})
}

// arbitraryInput is any input at all: pids listed twice, slots of nobody, sizes beyond the device.
func arbitraryInput(t *rapid.T, now *time.Duration, number *uint64) Input {
	size := rapid.OneOf(rapid.Uint64Range(0, 20*gib), rapid.Uint64())
	pid := rapid.IntRange(-1, 6)
	*now += time.Duration(rapid.IntRange(0, 3000).Draw(t, "ms")) * ms
	*number += rapid.Uint64Range(0, 3).Draw(t, "number")
	in := Input{Now: *now, Sample: Sample{
		Number: *number, Began: *now - time.Duration(rapid.IntRange(0, 50).Draw(t, "took"))*ms,
		Complete: rapid.Bool().Draw(t, "complete"), DeviceKnown: rapid.Bool().Draw(t, "device"),
		TotalBytes: 16 * gib, UsedBytes: size.Draw(t, "used"),
	}}
	for range rapid.IntRange(0, 6).Draw(t, "rows") {
		in.Sample.Processes = append(in.Sample.Processes, ProcessUse{PID: pid.Draw(t, "pid"), Bytes: size.Draw(t, "bytes"), Known: rapid.Bool().Draw(t, "known")})
	}
	ids := rapid.SampledFrom([]ContainerID{"", "a", "b", "gone"})
	for range rapid.IntRange(0, 6).Draw(t, "facts") {
		in.Processes = append(in.Processes, ProcFact{PID: pid.Draw(t, "pid"), Start: rapid.Uint64Range(0, 3).Draw(t, "start"), Container: ids.Draw(t, "container"), State: ProcState(rapid.IntRange(0, 3).Draw(t, "state"))})
	}
	for range rapid.IntRange(0, 5).Draw(t, "slots") {
		in.Slots = append(in.Slots, SlotFact{
			Pod: "p", Index: rapid.IntRange(0, 3).Draw(t, "index"), Generation: rapid.Uint32Range(0, 2).Draw(t, "generation"),
			Dying: rapid.Bool().Draw(t, "dying"), PID: pid.Draw(t, "pid"), Start: rapid.Uint64Range(0, 3).Draw(t, "start"),
			LockFree: rapid.Bool().Draw(t, "free"), Overflow: rapid.IntRange(0, 9).Draw(t, "overflow") == 0,
			DeviceBytes: size.Draw(t, "device"), ManagedBytes: size.Draw(t, "managed"),
			PeakBytes: map[uint64]uint64{*number - 1: size.Draw(t, "peak"), *number + 1: 1},
		})
	}
	for _, id := range []ContainerID{"a", "b"} {
		if rapid.Bool().Draw(t, "there") {
			c := container(string(id), size.Draw(t, "limit"))
			c.Pod, c.PodLimits.Max = "p", size.Draw(t, "pod limit")
			c.OOMGroup = rapid.Bool().Draw(t, "group")
			in.Containers = append(in.Containers, c)
		}
	}
	return in
}

// TestAnyInput never panics, and kills only what the answer itself shows above a limit.
func TestAnyInput(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		g := NewGPU("GPU-1", DefaultConfig())
		now, number := time.Hour, uint64(1)
		for range rapid.IntRange(1, 30).Draw(t, "steps") {
			in := arbitraryInput(t, &now, &number)
			if rapid.IntRange(0, 4).Draw(t, "resize") == 0 {
				g.StartResize(Level{Container: "a"}, rapid.Uint64().Draw(t, "old"), rapid.Uint64().Draw(t, "new"), now, now+time.Second, rapid.Bool().Draw(t, "force"))
			}
			out := g.Step(in)
			if k := out.Kill; k != nil {
				var listed uint64
				for _, r := range in.Sample.Processes {
					if r.Known {
						listed = add(listed, r.Bytes)
					}
				}
				if !in.Sample.Complete || listed < k.UsedBytes || k.UsedBytes <= k.ThresholdBytes || len(k.PIDs) == 0 {
					t.Fatalf("%+v on %+v", k, in.Sample)
				}
			}
			for _, r := range append(out.Reclaimable, out.MarkDying...) {
				if !slices.ContainsFunc(in.Slots, func(f SlotFact) bool { return f.Index == r.Index && f.Generation == r.Generation && !f.Overflow }) {
					t.Fatalf("%+v is not a slot", r)
				}
			}
		}
		for range 2 {
			now += time.Hour // every resize ends
			g.Step(Input{Now: now, Sample: Sample{Number: number, Began: now, Complete: true}})
		}
		for _, r := range g.PendingResizes() {
			if !r.Force {
				t.Fatalf("never ends: %+v", r)
			}
		}
	})
}

// BenchmarkStep is one GPU of a busy node: 25 containers, 125 processes.
func BenchmarkStep(b *testing.B) {
	g := NewGPU("GPU-1", DefaultConfig())
	in := Input{Sample: Sample{Complete: true, DeviceKnown: true, TotalBytes: 80 * gib}}
	for i := range 125 {
		c := fmt.Sprint("c", i%25)
		if i < 25 {
			in.Containers = append(in.Containers, container(c, 4*gib))
		}
		in.Sample.Processes = append(in.Sample.Processes, ProcessUse{PID: i + 1, Bytes: gib / 2, Known: true})
		in.Processes = append(in.Processes, ProcFact{PID: i + 1, Start: 1, Container: ContainerID(c)})
		in.Slots = append(in.Slots, SlotFact{Pod: PodID("pod-" + c), Index: i, Generation: 1, PID: i + 1, Start: 1, DeviceBytes: gib / 2})
	}
	b.ReportAllocs()
	for b.Loop() {
		in.Now += 100 * ms
		in.Sample.Number++
		in.Sample.Began = in.Now - ms
		g.Step(in)
	}
}
