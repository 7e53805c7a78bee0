// SPDX-License-Identifier: Apache-2.0

package policy

import "time"

// Most answers of most nodes say what the last one said. Once the state machine has settled, the
// same input can change nothing in it but times, and the caller may tell it so with [GPU.Repeat]
// instead of going through [GPU.Step]. Whatever waits for a time (a settle window, a grace, a
// deadline, a second sample) keeps it from settling, so that nothing is late.

// Settled says that steps with the input of the last one, at whatever later time, would give the
// output of the last one. The numbers of samples are no part of the input here, nor are peaks that
// say what the charges say.
func (g *GPU) Settled() bool { return g.settled }

// Repeat takes an answer in that is the same as the last one, and so are facts, slots and
// containers, none of them having changed in between. It is for a machine that is [GPU.Settled].
func (g *GPU) Repeat(began time.Duration) {
	g.repeats++
	g.began = [2]time.Duration{g.began[1], began}
}

// catchUp does what the repeated steps would have done to what later ones look at.
func (g *GPU) catchUp() {
	if g.repeats == 0 {
		return
	}
	for l, s := range g.scopes {
		if l.Container == "" || s.answers == 0 || s.began[1] != g.answered {
			continue // the last answer was not about it
		}
		s.answers += g.repeats
		s.began[0] = s.began[1]
		if g.repeats > 1 {
			s.began[0] = g.began[0]
		}
		s.began[1] = g.began[1]
	}
	for _, p := range g.processes {
		if p.listed {
			p.answers += g.repeats
		}
		if p.shared.imports {
			p.shared.note(g.began[1], g.cfg.Settle)
		}
	}
	g.foreign = append(g.foreign, foreignUse{g.began[1], g.unmanaged})
	g.answered, g.repeats = g.began[1], 0
}

// isSettled judges the state after a step.
func (g *GPU) isSettled(in Input, out *Output) bool {
	if !out.Known || !in.Sample.Complete || !in.Sample.DeviceKnown || in.Now-g.first < g.cfg.Settle || len(g.resizes) > 0 {
		return false
	}
	if out.Kill != nil || len(out.WouldKill)+len(out.Withheld)+len(out.Stuck)+len(out.Resizes)+len(out.MarkDying)+len(out.Reclaimable) > 0 {
		return false
	}
	if !g.haveUnattributed || g.unattributed != g.unattributedBefore || g.cfg.UnmanagedKill && len(out.Unmanaged) > 0 {
		return false
	}
	for _, f := range g.foreign {
		if f.bytes != g.unmanaged {
			return false
		}
	}
	if len(out.Processes) != len(g.processes) {
		return false // one is shown for the last time
	}
	for i := range in.Processes {
		if in.Processes[i].State != Live {
			return false
		}
	}
	for _, s := range g.scopes {
		if s.doubt > 0 {
			return false
		}
	}
	for _, p := range g.processes {
		if p.state != Live || p.killed || p.gap || p.left || p.listed && (!p.known || p.answers < 2) {
			return false
		}
		if p.slotIndex >= 0 && (!p.haveRaw || p.excess != p.rawBefore) {
			return false
		}
		if !p.shared.settled() {
			return false
		}
		if _, ours := out.Containers[p.container]; ours && p.listed && p.slotIndex < 0 &&
			(g.cfg.ShimKill || !p.isNoSlot || in.Now-p.slotless < g.cfg.ShimGrace) {
			return false
		}
	}
	for i := range in.Slots {
		f := &in.Slots[i]
		s := g.slots[slotID{f.Pod, f.Index}]
		if s == nil || s.generation != f.Generation || f.Dying || s.greatest != g.cfg.charge(f, f.DeviceBytes) {
			return false
		}
		if !f.Overflow && (f.LockFree || f.PID == 0) {
			return false
		}
	}
	for id, c := range out.Containers {
		s := g.scopes[Level{Container: id}]
		if s == nil || !c.Known || c.OverMax || c.Rising || s.over || s.answers < 2 || s.nvml[0] != s.nvml[1] {
			return false
		}
	}
	for id, p := range out.Pods {
		if s := g.scopes[Level{Pod: id}]; s == nil || p.OverMax || s.over {
			return false
		}
	}
	return true
}
