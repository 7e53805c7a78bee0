// SPDX-License-Identifier: Apache-2.0

package policy

import (
	"errors"
	"fmt"
	"math"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/gpufence/gpufence/enforcer/quota"
)

const (
	gib = uint64(1) << 30
	mib = uint64(1) << 20
	ms  = time.Millisecond
)

// world builds inputs, 100 ms apart, from what a test says is there.
type world struct {
	t      *testing.T
	g      *GPU
	now    time.Duration
	number uint64
	procs  map[int]*proc
	conts  []ContainerFact
	used   uint64 // of the device; 0: what the processes use
	last   Output
}

type proc struct {
	start     uint64
	container ContainerID
	state     ProcState
	noFact    bool
	unlisted  bool
	unknown   bool
	nvml      uint64
	slot      *SlotFact
}

func newWorld(t *testing.T, conts ...ContainerFact) *world {
	w := &world{t: t, g: NewGPU("GPU-1", DefaultConfig()), now: time.Hour, procs: map[int]*proc{}, conts: conts}
	w.g.first, w.g.stepped = 0, true // as if it had run for long
	return w
}

func container(id string, limit uint64) ContainerFact {
	none := quota.Limits{Max: quota.Unlimited, High: quota.Unlimited}
	return ContainerFact{
		ID: ContainerID(id), Pod: PodID("pod-" + id), Name: id, OOMGroup: true, Mode: quota.ModeEnforce,
		Container: quota.Limits{Max: limit, High: quota.Unlimited}, PodLimits: none,
	}
}

// shimmed adds a process with a slot that says what NVML says.
func (w *world) shimmed(pid int, c string, bytes uint64) *proc {
	p := w.bare(pid, c, bytes)
	p.slot = &SlotFact{Pod: PodID("pod-" + c), Index: pid, Generation: 1, PID: pid, Start: p.start, DeviceBytes: bytes, PeakBytes: map[uint64]uint64{}}
	return p
}

// bare adds a process that no shim sees.
func (w *world) bare(pid int, c string, bytes uint64) *proc {
	p := &proc{start: uint64(pid) * 10, container: ContainerID(c), nvml: bytes}
	w.procs[pid] = p
	return p
}

func (w *world) input(change ...func(*Input)) Input {
	w.now += 100 * ms
	w.number++
	in := Input{
		Now:        w.now,
		Sample:     Sample{Number: w.number, Began: w.now - 2*ms, Complete: true, DeviceKnown: true, TotalBytes: 16 * gib, UsedBytes: w.used},
		Containers: slices.Clone(w.conts),
	}
	var pids []int
	for pid := range w.procs {
		pids = append(pids, pid)
	}
	slices.Sort(pids)
	for _, pid := range pids {
		p := w.procs[pid]
		if !p.unlisted {
			in.Sample.Processes = append(in.Sample.Processes, ProcessUse{PID: pid, Bytes: p.nvml, Known: !p.unknown})
			if w.used == 0 {
				in.Sample.UsedBytes += p.nvml
			}
		}
		if !p.noFact {
			in.Processes = append(in.Processes, ProcFact{PID: pid, Start: p.start, Container: p.container, State: p.state, Comm: "app"})
		}
		if p.slot != nil {
			in.Slots = append(in.Slots, *p.slot)
		}
	}
	for _, f := range change {
		f(&in)
	}
	return in
}

func (w *world) step(change ...func(*Input)) Output {
	w.last = w.g.Step(w.input(change...))
	return w.last
}

func (w *world) steps(n int, change ...func(*Input)) Output {
	for range n {
		w.step(change...)
	}
	return w.last
}

func (w *world) noKill(n int, change ...func(*Input)) {
	w.t.Helper()
	for i := range n {
		if out := w.step(change...); out.Kill != nil || len(out.WouldKill) > 0 {
			w.t.Fatalf("step %d kills: %+v %+v", i, out.Kill, out.WouldKill)
		}
	}
}

func (w *world) excess(c string) uint64 { return w.last.Containers[ContainerID(c)].ExcessBytes }

func incomplete(in *Input) { in.Sample.Complete, in.Sample.Why = false, "graphics list: failed" }

func TestCharged(t *testing.T) {
	w := newWorld(t, container("a", 8*gib))
	p := w.shimmed(1, "a", gib)
	p.slot.DeviceBytes, p.slot.ManagedBytes, p.slot.SwapBytes = 2*gib, 3*gib, 7
	w.bare(2, "a", 512*mib)
	out := w.step()
	c := out.Containers["a"]
	if c.ChargedBytes != 2*gib+3*gib+512*mib || c.NVMLBytes != gib+512*mib || c.LedgerBytes != 2*gib || c.ManagedBytes != 3*gib || c.SwapBytes != 7 {
		t.Errorf("%+v", c)
	}
	if !c.Known || c.PeakBytes != c.ChargedBytes || c.PublishedMax != 8*gib || c.OverMax {
		t.Errorf("%+v", c)
	}
	pod := out.Pods["pod-a"]
	if pod.ChargedBytes != c.ChargedBytes || pod.PublishedMax != quota.Unlimited || pod.ExcessBytes != c.ExcessBytes {
		t.Errorf("%+v", pod)
	}
	if len(out.Processes) != 2 || out.Processes[0].Slot != 1 || out.Processes[1].Slot != -1 || out.Processes[0].State != "live" {
		t.Errorf("%+v", out.Processes)
	}
	// A reserve that only announces is not in memory.current.
	p.slot.DeviceBytes = 15 * gib
	if c := w.step().Containers["a"]; c.ChargedBytes != 8*gib || c.PeakBytes != 8*gib {
		t.Errorf("an announcement above the limit: %+v", c)
	}
	// A ledger cannot say more than the GPU has.
	p.slot.DeviceBytes = math.MaxUint64 / 2
	w.conts[0].Mode = quota.ModeObserve
	if c := w.step().Containers["a"]; c.LedgerBytes != 16*gib {
		t.Errorf("a lie: %+v", c)
	}
}

func TestExcess(t *testing.T) {
	w := newWorld(t, container("a", 8*gib), container("b", 8*gib))
	p := w.shimmed(1, "a", gib)
	w.bare(2, "b", 3*gib)
	w.step()
	if w.excess("a") != 0 || w.excess("b") != 3*gib {
		t.Errorf("excess a %d, b %d: a slotless process counts whole at once", w.excess("a"), w.excess("b"))
	}
	// Late bytes: the smaller of two in a row.
	p.nvml = gib + 100*mib
	w.step()
	if w.excess("a") != 0 {
		t.Errorf("after one sample: %d", w.excess("a"))
	}
	p.nvml = gib + 300*mib
	w.step()
	if w.excess("a") != 100*mib {
		t.Errorf("after two: %d", w.excess("a"))
	}
	w.step()
	if w.excess("a") != 300*mib {
		t.Errorf("after three: %d", w.excess("a"))
	}
	// An incomplete sample changes nothing.
	p.nvml = 0
	w.step(incomplete)
	if w.excess("a") != 300*mib || w.last.Known || w.last.Containers["a"].Known {
		t.Errorf("incomplete: %d", w.excess("a"))
	}
	p.nvml = gib + 10*mib
	w.step()
	if w.excess("a") != 10*mib {
		t.Errorf("it falls at once: %d", w.excess("a"))
	}
	p.state = Exiting
	w.step()
	if w.excess("a") != 0 {
		t.Errorf("exiting: %d", w.excess("a"))
	}
}

// TestExcessLag frees and allocates again while NVML lags: the limit must not shrink for it.
func TestExcessLag(t *testing.T) {
	w := newWorld(t, container("a", 8*gib))
	p := w.shimmed(1, "a", 4*gib)
	w.steps(3)
	// Freed right after the sample; NVML shows it for another 900 ms.
	p.slot.DeviceBytes = gib
	p.slot.PeakBytes = map[uint64]uint64{w.number: 4 * gib}
	for i := range 9 {
		w.step()
		p.slot.PeakBytes = map[uint64]uint64{}
		if w.excess("a") != 0 {
			t.Fatalf("excess %d in sample %d after the free", w.excess("a"), i)
		}
	}
	// It goes on for longer than settle: then it counts.
	w.steps(4)
	if w.excess("a") != 3*gib {
		t.Errorf("what NVML shows for longer than settle is %d", w.excess("a"))
	}
}

// TestExcessPeakBetweenSamples: a charge that came and went between two readings of the ledger.
func TestExcessPeakBetweenSamples(t *testing.T) {
	w := newWorld(t, container("a", 8*gib))
	p := w.shimmed(1, "a", gib)
	w.steps(3)
	p.nvml = 5 * gib // NVML caught it, now and in the next answer
	p.slot.PeakBytes = map[uint64]uint64{w.number + 1: 5 * gib}
	w.step()
	p.slot.PeakBytes = map[uint64]uint64{}
	w.step()
	if w.excess("a") != 0 {
		t.Errorf("excess %d", w.excess("a"))
	}
}

// TestExcessWhileAnotherGPUIsSampled: the number has grown while this GPU's answer was awaited.
func TestExcessWhileAnotherGPUIsSampled(t *testing.T) {
	w := newWorld(t, container("a", 8*gib))
	p := w.shimmed(1, "a", 4*gib)
	w.steps(3)
	p.slot.DeviceBytes = gib
	for range 3 {
		p.slot.PeakBytes = map[uint64]uint64{w.number + 2: 4 * gib} // freed during a later number
		w.step()
		w.number++
		if w.excess("a") != 0 {
			t.Fatalf("excess %d", w.excess("a"))
		}
	}
}

func TestExcessOverflow(t *testing.T) {
	w := newWorld(t, container("a", 8*gib))
	w.bare(1, "a", gib)
	w.bare(2, "a", 2*gib)
	over := SlotFact{Pod: "pod-a", Index: 512, Overflow: true, DeviceBytes: 2 * gib}
	w.step(func(in *Input) { in.Slots = append(in.Slots, over) })
	if w.excess("a") != gib {
		t.Errorf("excess %d: the overflow slot explains 2 of 3 GiB", w.excess("a"))
	}
	if len(w.last.Reclaimable)+len(w.last.MarkDying) != 0 {
		t.Errorf("the overflow slot is not taken back: %+v", w.last)
	}
	w.step()
	if w.excess("a") != 3*gib {
		t.Errorf("another pod's: %d", w.excess("a"))
	}
}

// TestExcessOfWhoseSlotIsNobodysYet: a new program's slot is there before its process was found in the cgroup. The shims
// count the slot; counting the process as well would refuse what fits.
func TestExcessOfWhoseSlotIsNobodysYet(t *testing.T) {
	w := newWorld(t, container("a", 8*gib), container("b", 8*gib))
	w.bare(1, "a", gib)
	w.bare(2, "b", gib)
	early := SlotFact{Pod: "pod-a", Index: 3, Generation: 1, DeviceBytes: gib / 4}
	for _, want := range []uint64{3 * gib / 4, 0} {
		w.step(func(in *Input) { in.Slots = append(in.Slots, early) })
		if w.excess("a") != want || w.excess("b") != gib {
			t.Errorf("excess %d, want %d; of another pod %d", w.excess("a"), want, w.excess("b"))
		}
		early.DeviceBytes = gib
	}
	w.step()
	if w.excess("a") != gib {
		t.Errorf("excess %d without the slot", w.excess("a"))
	}
}

func TestExcessAfterRestart(t *testing.T) {
	w := newWorld(t, container("a", 8*gib))
	w.g.stepped = false
	p := w.shimmed(1, "a", 4*gib)
	p.slot.DeviceBytes = gib // freed before we came, NVML lags
	for range 9 {
		w.step()
		if w.excess("a") != 0 {
			t.Fatalf("excess %d within settle of a restart", w.excess("a"))
		}
	}
	w.steps(4)
	if w.excess("a") != 3*gib {
		t.Errorf("excess %d after settle", w.excess("a"))
	}
}

func TestManagedAttributed(t *testing.T) {
	w := newWorld(t, container("a", 8*gib))
	w.g.cfg.ManagedAttributed = true
	p := w.shimmed(1, "a", 3*gib)
	p.slot.DeviceBytes, p.slot.ManagedBytes = gib, 2*gib
	w.steps(3)
	if c := w.last.Containers["a"]; c.ExcessBytes != 0 || c.ChargedBytes != 3*gib {
		t.Errorf("%+v", c)
	}
}

func TestDyingAndReclaim(t *testing.T) {
	w := newWorld(t, container("a", 8*gib))
	p := w.shimmed(1, "a", 4*gib)
	w.step()
	p.state = Exited
	out := w.step()
	c := out.Containers["a"]
	if c.DyingBytes != 4*gib || c.ChargedBytes != 0 || c.NVMLBytes != 0 || out.DyingBytes != 4*gib || c.ExcessBytes != 0 {
		t.Errorf("dying: %+v", c)
	}
	want := SlotRef{Pod: "pod-a", Index: 1, Generation: 1, Exited: true}
	if !slices.Equal(out.MarkDying, []SlotRef{want}) || len(out.Reclaimable) != 0 {
		t.Errorf("marks %+v, reclaims %+v", out.MarkDying, out.Reclaimable)
	}
	p.slot.Dying = true
	p.noFact = true // the pid is gone for good
	if out = w.step(incomplete); len(out.Reclaimable) != 0 {
		t.Error("reclaimed on an incomplete answer")
	}
	if out = w.step(); len(out.MarkDying)+len(out.Reclaimable) != 0 {
		t.Errorf("still listed: %+v", out)
	}
	p.unlisted = true
	out = w.step()
	if !slices.Equal(out.Reclaimable, []SlotRef{want}) || out.Containers["a"].DyingBytes != 0 {
		t.Errorf("not listed any more: %+v", out.Reclaimable)
	}
	delete(w.procs, 1)
	w.steps(12)
	if len(w.last.Processes) != 0 || len(w.g.slots) != 0 {
		t.Errorf("remembered: %+v", w.last.Processes)
	}
}

// TestExitWhileNVMLLags: it exited before NVML ever listed it, but will list it.
func TestExitWhileNVMLLags(t *testing.T) {
	w := newWorld(t, container("a", 8*gib))
	p := w.shimmed(1, "a", gib)
	p.unlisted = true
	w.step()
	p.state = Exited
	if out := w.steps(2); len(out.Reclaimable) != 0 || out.Containers["a"].DyingBytes != gib {
		t.Errorf("reclaimed before NVML can have shown it: %+v", out)
	}
	p.unlisted = false
	w.steps(3)
	p.unlisted = true
	if out := w.step(); len(out.Reclaimable) != 1 {
		t.Errorf("not reclaimed after NVML forgot it: %+v", out)
	}
	// A last row that comes even later is the dead process's, not a stranger's.
	p.unlisted, p.slot, p.noFact = false, nil, true
	if out := w.step(); out.Containers["a"].DyingBytes != gib || out.UnmanagedBytes != 0 {
		t.Errorf("a late row: %+v", out)
	}
}

func TestNeverUsedGPUDoesNotHoldASlot(t *testing.T) {
	w := newWorld(t, container("a", 8*gib))
	p := w.shimmed(1, "a", 0)
	p.unlisted = true
	w.step()
	p.state = Exited
	w.step()
	if out := w.step(); len(out.Reclaimable) != 1 {
		t.Errorf("%+v", out)
	}
}

func TestStuck(t *testing.T) {
	w := newWorld(t, container("a", 8*gib))
	p := w.shimmed(1, "a", 4*gib)
	w.step()
	p.state = Exited
	stuck := 0
	for range 150 {
		stuck += len(w.step().Stuck)
	}
	c := w.last.Containers["a"]
	if stuck != 1 || c.StuckBytes != 4*gib || c.ChargedBytes != 4*gib || c.DyingBytes != 0 || c.ExcessBytes != 4*gib || c.NVMLBytes != 0 {
		t.Errorf("stuck %d times: %+v", stuck, c)
	}
	if w.last.Processes[0].State != "stuck" {
		t.Errorf("%+v", w.last.Processes[0])
	}
	// Also the smallest limit kills nobody for it.
	w.conts[0].Container.Max = gib
	w.bare(2, "a", 512*mib)
	w.noKill(30)
}

func TestPIDReuse(t *testing.T) {
	w := newWorld(t, container("a", 8*gib), container("b", gib))
	w.shimmed(1, "a", 4*gib)
	w.step()
	old := w.procs[1].slot
	next := w.bare(1, "b", 4*gib)
	next.start = 99
	withOld := func(in *Input) { in.Slots = append(in.Slots, *old) }
	w.noKill(50, withOld)
	if a, b := w.last.Containers["a"], w.last.Containers["b"]; a.DyingBytes != 4*gib || b.NVMLBytes != 0 || b.ChargedBytes != 0 {
		t.Errorf("a %+v, b %+v", a, b)
	}
	// NVML leaves the old one out; whoever has the pid uses the GPU himself later.
	next.unlisted = true
	if out := w.step(withOld); len(out.Reclaimable) != 1 {
		t.Errorf("%+v", out)
	}
	next.unlisted, next.nvml = false, 512*mib
	if b := w.step().Containers["b"]; b.NVMLBytes != 512*mib {
		t.Errorf("the new owner: %+v", b)
	}
}

func TestPIDCannotHideBehindItsPast(t *testing.T) {
	w := newWorld(t, container("a", 8*gib), container("b", gib))
	w.shimmed(1, "a", 4*gib)
	w.step()
	next := w.bare(1, "b", 4*gib)
	next.start = 99
	for range 110 {
		if out := w.step(); out.Kill != nil {
			if out.Kill.Container != "b" {
				t.Fatalf("%+v", out.Kill)
			}
			return
		}
	}
	t.Error("never judged")
}

func TestExecLeavesSlot(t *testing.T) {
	w := newWorld(t, container("a", 8*gib))
	p := w.shimmed(1, "a", 4*gib)
	w.step()
	p.slot.LockFree = true
	out := w.step()
	if len(out.MarkDying) != 0 || w.excess("a") != 0 {
		t.Errorf("after one look: %+v", out)
	}
	out = w.step()
	if len(out.MarkDying) != 1 || out.MarkDying[0].Exited || w.excess("a") != 0 {
		t.Errorf("after two: %+v", out)
	}
	p.slot.Dying = true
	p.nvml, p.unlisted = 0, true
	for i := range 20 {
		if out = w.step(); len(out.Reclaimable) == 1 {
			if i < 7 {
				t.Errorf("reclaimed after %d steps, before settle", i)
			}
			if out.Reclaimable[0].Exited {
				t.Error("its owner lives")
			}
			return
		}
	}
	t.Error("never reclaimed")
}

func TestSlotWithoutOwner(t *testing.T) {
	w := newWorld(t, container("a", 8*gib))
	slot := SlotFact{Pod: "pod-a", Index: 3, Generation: 2, DeviceBytes: gib}
	with := func(in *Input) { in.Slots = append(in.Slots, slot) }
	// Its lock is held: somebody is about to claim it, or it is forged. Nothing to do.
	if out := w.steps(30, with); len(out.MarkDying)+len(out.Reclaimable) != 0 {
		t.Errorf("%+v", out)
	}
	// The predecessor's memory at restart: the owner died while we were away, NVML lists it.
	slot.LockFree = true
	ghost := w.bare(7, "", gib)
	ghost.noFact = true
	out := w.steps(50, with)
	if len(out.MarkDying) != 1 || len(out.Reclaimable) != 0 || out.DyingBytes != gib || out.UnmanagedBytes != 0 {
		t.Errorf("%+v", out)
	}
	delete(w.procs, 7)
	if out = w.step(with); len(out.Reclaimable) != 1 {
		t.Errorf("not reclaimed when NVML forgot its pid: %+v", out)
	}
	w.g.ForgetPod("pod-a")
	w.g.Forget("a")
	if len(w.g.slots) != 0 || len(w.g.shims) != 0 {
		t.Error("a forgotten pod is remembered")
	}
}

func TestProcessThatCannotBeRead(t *testing.T) {
	w := newWorld(t, container("a", gib))
	p := w.bare(1, "a", 4*gib)
	p.state = Unreadable
	out := w.step()
	if out.Known || out.Why == "" || out.DyingBytes != 0 || out.UnmanagedBytes != 0 {
		t.Errorf("%+v", out)
	}
	w.noKill(20)
	p.state = Live
	w.noKill(1)
	p.state = Unreadable // once in the middle changes nothing
	w.step()
	if w.last.Kill == nil {
		t.Error("an unreadable moment saved it")
	}
	// One that was taken for gone and is there again goes on as it was.
	w = newWorld(t, container("a", gib))
	p = w.bare(1, "a", 4*gib)
	w.step()
	p.noFact = true
	w.noKill(1)
	p.noFact = false
	w.step()
	if w.step(); w.last.Kill == nil || len(w.last.Processes) != 1 || w.last.Processes[0].State != "live" {
		t.Errorf("%+v", w.last)
	}
	// And one that is seen for the first time only when it can be read is not dead for 10 s.
	w = newWorld(t, container("a", gib))
	p = w.bare(1, "a", 4*gib)
	p.noFact = true
	w.step()
	p.noFact = false
	if w.steps(2); w.last.Kill == nil {
		t.Errorf("%+v", w.last)
	}
}

// TestSlotOfAProcessThatCannotBeRead: its slot stays its own, also when nothing is known of it yet.
func TestSlotOfAProcessThatCannotBeRead(t *testing.T) {
	for _, known := range []bool{true, false} {
		w := newWorld(t, container("a", 8*gib))
		p := w.shimmed(1, "a", gib)
		if known {
			w.steps(3)
		}
		p.state = Unreadable
		for _, change := range []func(*Input){incomplete, func(*Input) {}} {
			if out := w.step(change); len(out.MarkDying)+len(out.Reclaimable) > 0 {
				t.Errorf("known %v: marks %+v, reclaims %+v", known, out.MarkDying, out.Reclaimable)
			}
		}
		p.state = Live
		if w.step(); w.last.Containers["a"].ChargedBytes != gib || w.last.Containers["a"].DyingBytes != 0 {
			t.Errorf("known %v: %+v", known, w.last.Containers["a"])
		}
	}
}

// TestForgottenContainer: what is left of it is nobody's, also if one comes under its name.
func TestForgottenContainer(t *testing.T) {
	w := newWorld(t, container("a", 8*gib))
	w.bare(1, "a", 2*gib).state = Exited
	escaped := w.bare(2, "a", gib)
	w.steps(3)
	w.g.Forget("a")
	escaped.container = ""
	w.conts = nil
	if out := w.step(); out.DyingBytes != 2*gib || out.UnmanagedBytes != gib {
		t.Errorf("%+v", out)
	}
	w.conts = []ContainerFact{container("a", 8*gib)}
	w.now += time.Minute
	if c := w.step().Containers["a"]; c.ChargedBytes+c.DyingBytes+c.StuckBytes+c.NVMLBytes != 0 {
		t.Errorf("it has what its namesake left: %+v", c)
	}
}

func TestKill(t *testing.T) {
	w := newWorld(t, container("a", 2*gib), container("b", 6*gib))
	w.bare(1, "a", 2*gib+50*mib)
	w.bare(2, "b", 6*gib)
	w.noKill(10) // above max, within the slack
	if !w.last.Containers["a"].OverMax || w.last.Containers["b"].OverMax {
		t.Errorf("OverMax: %+v", w.last.Containers)
	}
	w.procs[1].nvml = 2*gib + 90*mib
	w.bare(3, "a", 10*mib)
	w.noKill(1)
	out := w.step()
	k := out.Kill
	if k == nil {
		t.Fatal("no kill after two samples")
	}
	if k.Container != "a" || k.Pod != "pod-a" || k.Scope != "container" || !k.Group || k.PID != 1 || k.Start != 10 || !slices.Equal(k.PIDs, []int{1, 3}) {
		t.Errorf("%+v", k)
	}
	if k.UsedBytes != 2*gib+100*mib || k.MaxBytes != 2*gib || k.SlackBytes != 64*mib || k.ThresholdBytes != 2*gib+64*mib || k.Second-k.First != 100*ms {
		t.Errorf("%+v", k)
	}
	if want := "GPU memory limit exceeded: used 2.1 GiB > memory.max 2 GiB on GPU-1; raise gpufence.dev/container.a.memory.max"; k.Message != want {
		t.Errorf("message %q", k.Message)
	}
	for _, part := range []string{"container a", "2252341248", "memory.max 2 GiB", "slack 64 MiB", "2 samples 100ms apart", "candidates: a 2.1 GiB (above its own 2 GiB)", "GPU-1"} {
		if !strings.Contains(k.Reason, part) {
			t.Errorf("reason %q lacks %q", k.Reason, part)
		}
	}
	// They die: nothing more happens, also while NVML still lists them.
	w.procs[1].state, w.procs[3].state = Exiting, Exiting
	w.noKill(5)
	w.procs[1].state, w.procs[3].state = Exited, Exited
	w.noKill(200)
}

func TestKillOnlyOncePerRetry(t *testing.T) {
	w := newWorld(t, container("a", gib))
	w.bare(1, "a", 2*gib)
	var kills []Kill
	for range 160 { // 16 s: it does not die
		if k := w.step().Kill; k != nil {
			kills = append(kills, *k)
		}
	}
	if len(kills) != 4 { // at 0, 2, 6 and 14 s
		t.Fatalf("%d kills in 16 s", len(kills))
	}
	for i, k := range kills {
		if k.Again != (i > 0) || k.Escalated || strings.Contains(k.Reason, "killed before") != (i > 0) {
			t.Errorf("kill %d: %+v", i, k)
		}
	}
}

func TestKillNeedsTwoSamplesApart(t *testing.T) {
	w := newWorld(t, container("a", gib))
	w.bare(1, "a", 2*gib)
	var at time.Duration
	near := func(d time.Duration) func(*Input) { return func(in *Input) { in.Sample.Began = at + d } }
	in := w.input()
	at = in.Sample.Began
	w.g.Step(in)
	for _, d := range []time.Duration{0, 10 * ms, 19 * ms} {
		w.noKill(1, near(d))
	}
	if out := w.step(near(20 * ms)); out.Kill == nil {
		t.Error("no kill 20 ms later")
	}
	// Below in between: from the start.
	w = newWorld(t, container("a", gib))
	p := w.bare(1, "a", 2*gib)
	w.noKill(1)
	p.nvml = gib
	w.noKill(1)
	p.nvml = 2 * gib
	w.noKill(1)
	if w.step().Kill == nil {
		t.Error("no kill after two more")
	}
}

// TestNoKillOnUnknown is the list of what is not known.
func TestNoKillOnUnknown(t *testing.T) {
	for name, f := range map[string]func(w *world, p *proc, in *Input){
		"size not available": func(_ *world, p *proc, in *Input) { in.Sample.Processes[0].Known = false },
		"one list missing":   func(_ *world, _ *proc, in *Input) { incomplete(in) },
		"hung": func(_ *world, _ *proc, in *Input) {
			incomplete(in)
			in.Sample.Processes = nil
		},
		"vanished pid":   func(_ *world, _ *proc, in *Input) { in.Processes = nil },
		"unreadable pid": func(_ *world, _ *proc, in *Input) { in.Processes[0].State = Unreadable },
		"another's pid":  func(_ *world, _ *proc, in *Input) { in.Processes[0].Container = "" },
		"exiting":        func(_ *world, _ *proc, in *Input) { in.Processes[0].State = Exiting },
		"exited":         func(_ *world, _ *proc, in *Input) { in.Processes[0].State = Exited },
		"no limit":       func(_ *world, _ *proc, in *Input) { in.Containers[0].Container.Max = quota.Unlimited },
		"not registered": func(_ *world, _ *proc, in *Input) { in.Containers = nil },
		"only the ledger": func(_ *world, _ *proc, in *Input) {
			in.Sample.Processes[0].Bytes = mib
			in.Slots = []SlotFact{{Pod: "pod-a", Index: 1, Generation: 1, PID: 1, Start: 10, DeviceBytes: 8 * gib}}
		},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t, container("a", gib))
			p := w.bare(1, "a", 4*gib)
			w.noKill(60, func(in *Input) { f(w, p, in) })
		})
	}
	// The same without the unknown: it is the unknown that saves it.
	w := newWorld(t, container("a", gib))
	w.bare(1, "a", 4*gib)
	w.steps(2)
	if w.last.Kill == nil {
		t.Error("the control is not killed")
	}
	// An unknown process beside a known one that is above by itself saves nobody.
	w = newWorld(t, container("a", gib))
	w.bare(1, "a", 4*gib)
	w.bare(2, "a", 0).unknown = true
	w.steps(2)
	if w.last.Kill == nil || !slices.Equal(w.last.Kill.PIDs, []int{1}) {
		t.Errorf("%+v", w.last.Kill)
	}
	// An incomplete answer neither counts nor breaks the row.
	w = newWorld(t, container("a", gib))
	w.bare(1, "a", 4*gib)
	w.noKill(1)
	w.noKill(5, incomplete)
	if w.step().Kill == nil {
		t.Error("two complete answers around a gap are two")
	}
}

func TestKillOnePerPass(t *testing.T) {
	w := newWorld(t, container("a", gib), container("b", gib), container("c", gib))
	w.bare(1, "a", 3*gib)
	w.bare(2, "b", 4*gib)
	w.bare(3, "c", gib)
	var order []ContainerID
	for range 10 {
		if k := w.step().Kill; k != nil {
			order = append(order, k.Container)
			w.procs[k.PID].state = Exited
		}
	}
	if !slices.Equal(order, []ContainerID{"b", "a"}) {
		t.Errorf("order %v, want the furthest above first", order)
	}
}

func TestKillForPodLimit(t *testing.T) {
	pod := func(c ContainerFact, limit uint64) ContainerFact {
		c.Pod, c.PodLimits.Max = "p", limit
		return c
	}
	for name, c := range map[string]struct {
		own    [3]uint64 // container limits
		use    [3]uint64
		victim ContainerID
		scope  string
	}{
		"the largest":                     {[3]uint64{quota.Unlimited, quota.Unlimited, quota.Unlimited}, [3]uint64{gib, 3 * gib, 2 * gib}, "b", "pod"},
		"above its own before the larger": {[3]uint64{gib, quota.Unlimited, quota.Unlimited}, [3]uint64{gib + 50*mib, 3 * gib, 2 * gib}, "a", "pod"},
		"above its own and slack":         {[3]uint64{512 * mib, quota.Unlimited, quota.Unlimited}, [3]uint64{gib, 3 * gib, 2 * gib}, "a", "container"},
		"nobody":                          {[3]uint64{quota.Unlimited, quota.Unlimited, quota.Unlimited}, [3]uint64{gib, gib, 2 * gib}, "", ""},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t)
			for i, id := range []string{"a", "b", "c"} {
				w.conts = append(w.conts, pod(container(id, c.own[i]), 5*gib))
				w.bare(i+1, id, c.use[i])
			}
			w.steps(2)
			k := w.last.Kill
			if c.victim == "" {
				if k != nil {
					t.Fatalf("%+v", k)
				}
				return
			}
			if k == nil || k.Container != c.victim || k.Scope != c.scope {
				t.Fatalf("%+v", k)
			}
			if c.scope == "pod" {
				if len(k.Candidates) != 3 || k.Candidates[0].Container != c.victim || !strings.HasSuffix(k.Message, "raise gpufence.dev/memory.max") {
					t.Errorf("%+v", k)
				}
				if !w.last.Pods["p"].OverMax {
					t.Error("pod is not OverMax")
				}
			}
		})
	}
}

func TestKillLargestProcess(t *testing.T) {
	w := newWorld(t, container("a", gib))
	w.conts[0].OOMGroup = false
	w.bare(1, "a", 512*mib)
	w.bare(2, "a", 2*gib)
	w.steps(2)
	k := w.last.Kill
	if k == nil || k.Group || k.PID != 2 || !strings.Contains(k.Reason, "process 2 of container a") {
		t.Fatalf("%+v", k)
	}
	w.procs[2].state = Exited
	w.noKill(30)
	if w.last.Containers["a"].NVMLBytes != 512*mib {
		t.Errorf("%+v", w.last.Containers["a"])
	}
}

func TestModes(t *testing.T) {
	for _, mode := range []quota.Mode{quota.ModeObserve, quota.ModeWarn} {
		w := newWorld(t, container("a", gib), container("b", gib))
		w.conts[0].Mode = mode
		p := w.bare(1, "a", 3*gib)
		would := 0
		for range 20 {
			out := w.step()
			would += len(out.WouldKill)
			if out.Kill != nil {
				t.Fatalf("%s kills: %+v", mode, out.Kill)
			}
		}
		if would != 1 {
			t.Errorf("%s: said %d times", mode, would)
		}
		// It keeps nobody from enforcing on another.
		w.bare(2, "b", 2*gib)
		w.steps(2)
		if w.last.Kill == nil || w.last.Kill.Container != "b" {
			t.Errorf("%s: %+v", mode, w.last.Kill)
		}
		w.procs[2].state = Exited
		// Another episode is said again.
		p.nvml = 0
		w.step()
		p.nvml = 3 * gib
		would = 0
		for range 5 {
			would += len(w.step().WouldKill)
		}
		if would != 1 {
			t.Errorf("%s: another episode said %d times", mode, would)
		}
	}
}

func TestShim(t *testing.T) {
	w := newWorld(t, container("a", 8*gib))
	state := func() string {
		s := w.last.Containers["a"].Shim
		return fmt.Sprintf("%s(%s) %v", s.State, s.Why, s.PIDs)
	}
	check := func(want string) {
		t.Helper()
		if got := state(); got != want {
			t.Errorf("shim is %q, want %q", got, want)
		}
	}
	w.step()
	check("delivered() []")
	p := w.shimmed(1, "a", gib)
	p.unlisted = true
	w.step()
	check("seen() []")
	p.unlisted = false
	w.bare(2, "a", gib)
	w.step()
	check("seen() [2]") // within one sample
	w.steps(49)
	check("seen() [2]")
	w.steps(2)
	check("absent(no slot) [2]") // after 5 s, whatever others show
	delete(w.procs, 2)
	w.step()
	check("seen() []")
	delete(w.procs, 1)
	w.step()
	check("seen() []")

	w = newWorld(t, container("a", 8*gib))
	w.conts[0].ShimAbsent = "musl"
	w.step()
	check("absent(musl) []")
	w.bare(2, "a", gib)
	w.steps(60)
	check("absent(musl) [2]")
	delete(w.procs, 2)
	w.shimmed(1, "a", gib)
	w.step()
	check("seen() []") // it was wrong

	// A bypass that is killed before the 5 s.
	w = newWorld(t, container("a", gib))
	w.conts[0].ShimAbsent = ""
	w.bare(2, "a", 4*gib)
	w.steps(2)
	if w.last.Kill == nil {
		t.Fatal("no kill")
	}
	check("absent(no slot) [2]")
	w.procs[2].state = Exited
	w.steps(3)
	check("absent(no slot) []")
}

func TestDevice(t *testing.T) {
	w := newWorld(t, container("a", 8*gib))
	p := w.shimmed(1, "a", gib)
	p.slot.ManagedBytes = gib
	w.bare(2, "", 2*gib) // an unmanaged process
	w.bare(3, "other", gib)
	w.used = 7 * gib
	w.step()
	if w.last.UnattributedBytes != 0 {
		t.Errorf("one sample: %d", w.last.UnattributedBytes)
	}
	w.step()
	if w.last.UnattributedBytes != 2*gib || w.last.UnmanagedBytes != 3*gib {
		t.Errorf("unattributed %d, unmanaged %d", w.last.UnattributedBytes, w.last.UnmanagedBytes)
	}
	// A burst in one answer only.
	w.used = 12 * gib
	w.step()
	if w.last.UnattributedBytes != 2*gib {
		t.Errorf("burst: %d", w.last.UnattributedBytes)
	}
	w.used = 7 * gib
	w.step()
	// Not known: the old numbers.
	for _, f := range []func(*Input){incomplete, func(in *Input) { in.Sample.DeviceKnown = false }, func(in *Input) { in.Sample.Processes[0].Known = false }} {
		w.step(f)
		if w.last.UnattributedBytes != 2*gib {
			t.Errorf("unknown: %d", w.last.UnattributedBytes)
		}
	}
	// Processes may sum to more than the device: shared buffers.
	w.used = gib
	w.steps(2)
	if w.last.UnattributedBytes != 0 {
		t.Errorf("below 0: %d", w.last.UnattributedBytes)
	}
}

func TestStage(t *testing.T) {
	pod, own := Level{Pod: "p"}, Level{Container: "c"}
	for _, c := range []struct {
		level        Level
		old, desired uint64
		want         int
	}{
		{pod, 4, 8, 0}, {pod, 4, 4, 0}, {pod, 4, quota.Unlimited, 0}, {own, 8, 4, 1}, {own, quota.Unlimited, 4, 1},
		{pod, 8, 4, 2}, {own, 4, 8, 3}, {own, 4, 4, 3},
	} {
		if got := Stage(c.level, c.old, c.desired); got != c.want {
			t.Errorf("%+v: %d", c, got)
		}
	}
}

func TestResizeGrow(t *testing.T) {
	w := newWorld(t, container("a", 4*gib))
	w.bare(1, "a", 4*gib)
	w.step()
	level := Level{Container: "a"}
	r := w.g.StartResize(level, 4*gib, 6*gib, w.now, w.now+30*time.Second, false)
	if r.State != ResizeDone || r.Desired != 6*gib || r.Allocated != 6*gib || r.Actuated != 6*gib || r.Actual != 6*gib || len(w.g.PendingResizes()) != 0 {
		t.Errorf("%+v", r)
	}
}

func TestResizeShrink(t *testing.T) {
	level := Level{Container: "a"}
	w := newWorld(t, container("a", 6*gib))
	p := w.shimmed(1, "a", 5*gib)
	w.step()
	r := w.g.StartResize(level, 6*gib, 2*gib, w.now, w.now+3*time.Second, false)
	if r.State != ResizePending || r.Actuated != 2*gib || r.Allocated != 6*gib {
		t.Errorf("%+v", r)
	}
	out := w.step()
	if out.Containers["a"].PublishedMax != 2*gib || len(out.Resizes) != 0 {
		t.Errorf("%+v", out)
	}
	// Watch follows it down: min(old, falling use + slack).
	p.nvml, p.slot.DeviceBytes = 3*gib, 3*gib
	w.steps(9)
	if got := w.g.PendingResizes()[0].Actual; got != 6*gib {
		t.Errorf("watch is at %d before an answer must show what was so at the beginning", got)
	}
	w.steps(2)
	if got := w.g.PendingResizes()[0].Actual; got != 3*gib+64*mib {
		t.Errorf("watch is at %d", got)
	}
	// Saved and restored, as after a restart.
	saved := w.g.PendingResizes()
	w.g = NewGPU("GPU-1", DefaultConfig())
	for _, r := range saved {
		w.g.RestoreResize(r)
	}
	w.noKill(3)
	p.nvml, p.slot.DeviceBytes = 2*gib, 2*gib
	if out = w.step(); len(out.Resizes) != 0 {
		t.Error("done after one answer, which may have begun before the shims could read it")
	}
	out = w.step()
	if len(out.Resizes) != 1 || out.Resizes[0].Resize.State != ResizeDone || out.Resizes[0].Resize.Actual != 2*gib || len(w.g.PendingResizes()) != 0 {
		t.Errorf("%+v", out.Resizes)
	}
}

func TestResizeGrowsMeanwhileIsKilled(t *testing.T) {
	w := newWorld(t, container("a", 6*gib))
	p := w.bare(1, "a", 4*gib)
	w.step()
	w.g.StartResize(Level{Container: "a"}, 6*gib, 2*gib, w.now, w.now+time.Minute, false)
	w.noKill(12)
	p.nvml = 4*gib + 200*mib
	w.steps(2)
	if w.last.Kill == nil || w.last.Kill.MaxBytes != 4*gib+64*mib {
		t.Errorf("%+v", w.last.Kill)
	}
}

func TestResizeFails(t *testing.T) {
	level := Level{Pod: "pod-a"}
	w := newWorld(t, container("a", quota.Unlimited))
	w.conts[0].PodLimits.Max = 6 * gib
	w.shimmed(1, "a", 6*gib)
	w.step()
	w.g.StartResize(level, 6*gib, gib, w.now, w.now+time.Second, false)
	if w.step(); w.last.Pods["pod-a"].PublishedMax != gib {
		t.Errorf("%+v", w.last.Pods)
	}
	var ended []ResizeChange
	for range 12 {
		out := w.step()
		if out.Kill != nil {
			t.Fatalf("%+v", out.Kill)
		}
		ended = append(ended, out.Resizes...)
		if len(ended) > 0 && out.Pods["pod-a"].PublishedMax != 6*gib {
			t.Errorf("published %d after the failure", out.Pods["pod-a"].PublishedMax)
		}
	}
	if len(ended) != 1 || ended[0].Resize.State != ResizeFailed || ended[0].Resize.Actual != 6*gib || !strings.Contains(ended[0].Resize.Why, "6 GiB > 1 GiB") {
		t.Errorf("%+v", ended)
	}
	// Unknown at the deadline.
	w.g.StartResize(level, 6*gib, gib, w.now, w.now, false)
	w.steps(10, incomplete)
	if out := w.step(incomplete); len(out.Resizes) != 1 || !strings.Contains(out.Resizes[0].Resize.Why, "not known") {
		t.Errorf("%+v", out.Resizes)
	}
}

// TestResizeLag shrinks a container whose process no shim sees while NVML is 200 ms behind: what it
// allocated legally just before must neither look as if it fitted nor kill it when it turns up.
func TestResizeLag(t *testing.T) {
	for _, c := range []struct {
		name         string
		shown, truth uint64 // NVML says shown for two samples, then truth
		frees        bool   // it gives enough back after a while
		force        bool
		state        string
		killed       bool
		actual       uint64
	}{
		{name: "not listed yet, stays", shown: 0, truth: 5 * gib, state: ResizeFailed, actual: 6 * gib},
		{name: "listed too small, stays", shown: 512 * mib, truth: 5 * gib, state: ResizeFailed, actual: 6 * gib},
		{name: "listed too small, frees", shown: 512 * mib, truth: 5 * gib, frees: true, state: ResizeDone, actual: 1 * gib},
		{name: "not listed yet, forced", shown: 0, truth: 5 * gib, force: true, state: ResizeDone, killed: true, actual: 1 * gib},
		{name: "listed too big, forced, fits", shown: 5 * gib, truth: 512 * mib, force: true, state: ResizeDone, actual: 1 * gib},
	} {
		t.Run(c.name, func(t *testing.T) {
			level := Level{Container: "a"}
			w := newWorld(t, container("a", 6*gib))
			p := w.bare(1, "a", c.shown)
			p.unlisted = c.shown == 0
			w.step()
			deadline := 3 * time.Second
			if c.force {
				deadline = 100 * ms
			}
			w.g.StartResize(level, 6*gib, gib, w.now, w.now+deadline, c.force)
			killed := false
			for i := range 60 {
				if i == 2 {
					p.nvml, p.unlisted = c.truth, false
				}
				if i == 20 && c.frees {
					p.nvml = gib
				}
				out := w.step()
				if out.Kill != nil {
					killed = true
					p.state, p.unlisted = Exited, true
				}
				if len(out.Resizes) == 0 {
					continue
				}
				if r := out.Resizes[0].Resize; r.State != c.state || r.Actual != c.actual || killed != c.killed {
					t.Errorf("killed %v, %+v", killed, r)
				}
				return
			}
			t.Error("it never ends")
		})
	}
}

func TestResizeReplaced(t *testing.T) {
	level := Level{Container: "a"}
	w := newWorld(t, container("a", 6*gib))
	w.shimmed(1, "a", 5*gib)
	w.step()
	w.g.StartResize(level, 6*gib, gib, w.now, w.now+time.Minute, false)
	if r := w.g.StartResize(level, gib, 4*gib, w.now, w.now+time.Minute, false); r.Old != 6*gib || r.State != ResizePending {
		t.Errorf("%+v", r)
	}
	if r := w.g.StartResize(level, 4*gib, 6*gib, w.now, w.now+time.Minute, false); r.State != ResizeDone || len(w.g.PendingResizes()) != 0 {
		t.Errorf("back to the old one: %+v", r)
	}
	if w.step(); w.last.Containers["a"].PublishedMax != 6*gib {
		t.Errorf("%+v", w.last.Containers["a"])
	}
	w.g.RestoreResize(Resize{Level: level, State: ResizeFailed})
	if len(w.g.PendingResizes()) != 0 {
		t.Error("an ended one was restored")
	}
}

func TestResizeForced(t *testing.T) {
	for _, level := range []Level{{Container: "a"}, {Pod: "pod-a"}} {
		w := newWorld(t, container("a", 6*gib))
		w.conts[0].PodLimits.Max = 6 * gib
		w.shimmed(1, "a", 5*gib)
		w.step()
		w.g.StartResize(level, 6*gib, gib, w.now, w.now+time.Second, true)
		var kill *Kill
		for range 15 {
			out := w.step()
			if out.Kill != nil {
				kill = out.Kill
				w.procs[1].state = Exited
				w.procs[1].unlisted = true
			}
			if len(out.Resizes) == 1 {
				if kill == nil || out.Resizes[0].Resize.State != ResizeDone {
					t.Errorf("%+v", out.Resizes)
				}
				break
			}
		}
		if kill == nil || !kill.Forced || !strings.Contains(kill.Message, "lowered by force") || !strings.Contains(kill.Reason, "forced resize") {
			t.Errorf("%+v: %+v", level, kill)
		}
	}
}

func TestAdmit(t *testing.T) {
	base := AdmitInput{UUID: "GPU-1", AllocatableBytes: 15 * gib, MinBytes: 4 * gib, FreeNow: true, FreeKnown: true, FreeBytes: 15 * gib}
	for name, c := range map[string]struct {
		change    func(*AdmitInput)
		ok        bool
		available uint64
		transient bool
	}{
		"empty":          {func(*AdmitInput) {}, true, 0, false},
		"nothing wanted": {func(in *AdmitInput) { in.MinBytes, in.AllocatableBytes = 0, 0 }, true, 0, false},
		"just fits": {func(in *AdmitInput) {
			in.Others = []Guarantee{{"b", 5 * gib, 5 * gib, 0}, {"c", 6 * gib, 0, 0}}
			in.FreeBytes = 10 * gib
		}, true, 0, false},
		"others":                     {func(in *AdmitInput) { in.Others = []Guarantee{{"b", 5 * gib, 0, 0}, {"c", 7 * gib, 0, 0}} }, false, 3 * gib, false},
		"unmanaged and unattributed": {func(in *AdmitInput) { in.UnmanagedBytes, in.UnattributedBytes = 6*gib, 6*gib }, false, 3 * gib, false},
		"dying":                      {func(in *AdmitInput) { in.DyingBytes = 12 * gib }, false, 3 * gib, true},
		"more than there is":         {func(in *AdmitInput) { in.MinBytes = 99 << 40 }, false, 15 * gib, false},
		"everything overflows":       {func(in *AdmitInput) { in.UnmanagedBytes, in.DyingBytes = math.MaxUint64, math.MaxUint64 }, false, 0, false},
		"not free now":               {func(in *AdmitInput) { in.FreeBytes = 2 * gib }, false, 2 * gib, false},
		"not free now, dying":        {func(in *AdmitInput) { in.FreeBytes, in.DyingBytes = 2*gib, 3*gib }, false, 2 * gib, true},
		"free, but promised": {func(in *AdmitInput) {
			in.Others = []Guarantee{{"b", 5 * gib, 3 * gib, 0}}
			in.FreeBytes = 5 * gib
		}, false, 3 * gib, false},
		"has it already":    {func(in *AdmitInput) { in.ChargedBytes, in.FreeBytes = 4*gib, 0 }, true, 0, false},
		"free is not asked": {func(in *AdmitInput) { in.FreeNow, in.FreeBytes = false, 0 }, true, 0, false},
		"free is not known": {func(in *AdmitInput) { in.FreeKnown, in.FreeBytes = false, 0 }, true, 0, false},
		"what dies is covered by its pod's promise": {func(in *AdmitInput) {
			in.Others = []Guarantee{{"b", 5 * gib, 1 * gib, 4 * gib}, {"c", 6 * gib, 0, 3 * gib}}
			in.DyingBytes, in.FreeBytes = 7*gib, 7*gib // 16 - 1 - 4 - 3, less 1 that the driver keeps
		}, true, 0, false},
		"what dies is more than its pod's promise": {func(in *AdmitInput) {
			in.Others = []Guarantee{{"b", 5 * gib, 4 * gib, 4 * gib}, {"c", 6 * gib, 0, 0}}
			in.DyingBytes = 4 * gib
		}, false, 1 * gib, true},
		"its own dies": {func(in *AdmitInput) {
			in.Others = []Guarantee{{"b", 11 * gib, 11 * gib, 0}}
			in.DyingBytes, in.OwnDyingBytes, in.FreeBytes = 4*gib, 4*gib, 0
		}, false, 0, true},
		"its own has gone": {func(in *AdmitInput) {
			in.Others = []Guarantee{{"b", 11 * gib, 11 * gib, 0}}
			in.FreeBytes = 4 * gib
		}, true, 0, false},
		"uses more than its own": {func(in *AdmitInput) {
			in.Others = []Guarantee{{"b", 5 * gib, 9 * gib, 0}}
			in.FreeBytes = 4 * gib
		}, true, 0, false},
	} {
		in := base
		c.change(&in)
		err := Admit(in)
		if (err == nil) != c.ok {
			t.Errorf("%s: %v", name, err)
			continue
		}
		var e *AdmitError
		if err != nil && (!errors.As(err, &e) || e.AvailableBytes != c.available || e.Transient != c.transient || strings.Contains(e.Error(), "\n") || !strings.Contains(e.Error(), "GPU-1")) {
			t.Errorf("%s: %+v", name, err)
		}
	}
}

func TestSlack(t *testing.T) {
	c := DefaultConfig()
	for limit, want := range map[uint64]uint64{gib: 64 * mib, 10 * gib: 10 * gib / 50, quota.Unlimited: 64 * mib} {
		if got := c.Slack(limit); got != want {
			t.Errorf("Slack(%d) = %d, want %d", limit, got, want)
		}
	}
	c.KillSlackShare = math.NaN()
	if got := c.Slack(100 * gib); got != 64*mib {
		t.Errorf("NaN: %d", got)
	}
}

func TestReclaimableNeedsEveryGPU(t *testing.T) {
	a := SlotRef{Pod: "p", Index: 1, Generation: 2}
	b := SlotRef{Pod: "p", Index: 2, Generation: 2}
	dead := a
	dead.Exited = true
	got := Reclaimable([]Output{{Reclaimable: []SlotRef{a, b}}, {Reclaimable: []SlotRef{dead}}})
	if !slices.Equal(got, []SlotRef{dead}) {
		t.Errorf("%+v", got)
	}
	if got := Reclaimable(nil); got != nil {
		t.Errorf("%+v", got)
	}
}

func TestExcessOfAKilledProcess(t *testing.T) {
	w := newWorld(t, container("a", gib))
	w.bare(1, "a", 4*gib)
	w.steps(2)
	if w.last.Kill == nil {
		t.Fatal("no kill")
	}
	if w.step(); w.excess("a") != 0 || w.last.Processes[0].ExcessBytes != 0 {
		t.Errorf("%+v", w.last.Processes)
	}
}

// TestAnswerFromBeforeTheExit: the NVML call began before the process was seen to exit.
func TestAnswerFromBeforeTheExit(t *testing.T) {
	w := newWorld(t, container("a", 8*gib))
	p := w.shimmed(1, "a", gib)
	w.step()
	p.state = Exited
	p.unlisted = true
	if out := w.step(); len(out.Reclaimable) != 0 {
		t.Errorf("%+v", out.Reclaimable)
	}
	if out := w.step(); len(out.Reclaimable) != 1 {
		t.Errorf("%+v", out.Reclaimable)
	}
}
