// SPDX-License-Identifier: Apache-2.0

package simnode

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/gpufence/gpufence/enforcer/policy"
	"github.com/gpufence/gpufence/enforcer/quota"
)

// Run plays a scenario. The error is the first thing that was wrong, and what came before it.
func Run(s Scenario) (Stats, error) {
	m := newModel(s)
	end := m.now + s.Duration
	m.fill()
	for m.failure == nil && m.now < end {
		m.burst()
		if m.failure == nil {
			m.now += time.Duration(600+m.rng.IntN(2400)) * time.Second
		}
	}
	if m.failure == nil {
		m.leave()
	}
	if m.failure != nil {
		return m.stats, fmt.Errorf("%w\n(lag %v, free-lag %v) before:\n  %s", m.failure, m.lag, m.freeLag, strings.Join(m.trace, "\n  "))
	}
	return m.stats, nil
}

// fill starts what the node is to hold.
func (m *model) fill() {
	m.step(0)
	for range m.Containers {
		m.start()
	}
	for _, c := range m.conts {
		for range m.Processes/2 + m.rng.IntN(m.Processes+1) {
			m.fork(c)
		}
	}
	m.now += 10 * time.Second
}

// burst is a time in which some containers work, until everything has settled again.
func (m *model) burst() {
	m.active = m.active[:0]
	alive := m.alive()
	for len(alive) > 0 && len(m.active) < 2+m.rng.IntN(8) {
		m.active = append(m.active, alive[m.rng.IntN(len(alive))])
	}
	for steps := 20 + m.rng.IntN(50); steps > 0 && m.failure == nil; steps-- {
		m.step(m.rng.IntN(12))
	}
	for began := m.now; m.failure == nil && !m.settled(); {
		if m.now-began > 2*time.Minute {
			dead := 0
			for _, p := range m.procs {
				if p.dead {
					dead++
					m.describe(p.cont)
				}
			}
			for _, c := range m.conts {
				if c.ended || c.overNoted {
					m.say("%s: ended %v, above its limit %v", c.id, c.ended, c.overNoted)
				}
			}
			m.fail("nothing happens any more, and it does not settle: known %v, %d bytes dying, %d changes, %d dead", m.out.Known, m.out.DyingBytes, len(m.core.PendingResizes()), dead)
		}
		m.step(0)
	}
}

func (m *model) alive() []*cont {
	return slices.DeleteFunc(slices.Clone(m.conts), func(c *cont) bool { return c.ended })
}

// settled says that further samples would say what the last ones said.
func (m *model) settled() bool {
	if m.now < m.lost || !m.haveOut || !m.out.Known || m.out.DyingBytes != 0 || len(m.core.PendingResizes()) > 0 || m.out.Kill != nil {
		return false
	}
	newest := time.Duration(0)
	for _, p := range m.procs {
		if _, listed := p.at(m.now - m.lag); p.dead && (listed || p.shim && !p.reclaimed) {
			return false
		}
		if n := len(p.history); n > 0 {
			newest = max(newest, p.history[n-1].at)
		}
	}
	for _, c := range m.conts {
		if c.ended || c.overNoted && c.mode == quota.ModeEnforce {
			return false
		}
	}
	return m.now-newest > m.lag+m.cfg.Settle+300*ms
}

// op lets somebody do something.
func (m *model) op() {
	if m.rng.IntN(6) == 0 || len(m.active) == 0 {
		if len(m.alive()) < m.Containers {
			for range 1 + m.rng.IntN(6) {
				m.start()
			}
			if n := len(m.conts); n > 0 {
				m.active = append(m.active, m.conts[n-1])
			}
		}
		return
	}
	c := m.active[m.rng.IntN(len(m.active))]
	if c.ended {
		return
	}
	var mine []*proc
	for _, p := range m.byCont[c] {
		if !p.dead {
			mine = append(mine, p)
		}
	}
	if len(mine) == 0 {
		for range 1 + m.rng.IntN(2*m.Processes) {
			m.fork(c)
		}
		return
	}
	p := mine[m.rng.IntN(len(mine))]
	size := (1 + m.rng.Uint64N(300)) * 2 * mib
	switch n := m.rng.IntN(40); {
	case n < 16:
		switch c.kind {
		case good:
			m.alloc(p, size)
		case plain:
			// It knows its limits, and does not grow while they change.
			if c.resize == nil && m.live(c)+size <= c.grant.Max && m.podLive(c.pod)+size <= c.pod.limits.Max {
				m.alloc(p, size)
			}
		case rogue:
			if m.rng.IntN(4) == 0 {
				size *= 4
			}
			m.alloc(p, size)
		}
	case n < 30:
		m.free(p, size)
	case n < 33:
		if len(mine) < 1+2*m.Processes {
			m.fork(c)
		}
	case n < 36:
		if m.on(Ends) {
			m.say("process %d of %s ends", p.pid, c.id)
			m.exit(p)
		}
	case n == 36:
		if m.on(Ends) && m.rng.IntN(3) == 0 {
			m.end(c)
		}
	default:
		if m.on(Resizes) && c.mode == quota.ModeEnforce {
			m.set(c)
		}
	}
}

func (m *model) podLive(p *pod) (sum uint64) {
	for _, c := range p.conts {
		sum += m.live(c)
	}
	return sum
}

// step is one sample, with some operations before it and perhaps while its call is in progress.
func (m *model) step(ops int) {
	last := m.now
	wait := period
	above := m.above()
	if above && !m.wasAbove {
		wait = 20*ms + time.Duration(m.rng.IntN(10))*ms
	}
	m.wasAbove = above
	began := last + wait
	times := make([]time.Duration, ops)
	for i := range times {
		times[i] = last + time.Duration(m.rng.Int64N(int64(wait)))
	}
	slices.Sort(times)
	for _, t := range times {
		m.now = t
		m.op()
	}
	if m.on(Restarts) && m.rng.IntN(150) == 0 && !m.heirs() {
		m.restart()
	}
	if m.on(LostGPU) && ops > 0 && m.rng.IntN(300) == 0 {
		m.lost = began + time.Duration(m.rng.IntN(20000))*ms
		m.say("the GPU does not answer until %v", m.lost)
	}

	m.now = began
	m.number++
	sample := m.sample(began)
	// The slots are read after the call.
	for range m.rng.IntN(3) {
		if ops > 0 {
			m.now += ms
			m.op()
		}
	}
	m.now = max(m.now, began+time.Duration(1+m.rng.IntN(5))*ms)
	in := policy.Input{Now: m.now, Sample: sample}
	m.facts(&in)
	for _, c := range m.conts {
		in.Containers = append(in.Containers, policy.ContainerFact{
			ID: c.id, Pod: c.pod.id, Name: c.name, Container: c.grant, PodLimits: c.pod.limits, OOMGroup: c.group, Mode: c.mode,
		})
	}
	m.stats.Steps++
	m.out, m.outAt, m.haveOut = m.core.Step(in), m.now, true
	m.judge(&in, now{began: began, took: m.now - last})
	m.apply()
	m.stats.PeakContainers = max(m.stats.PeakContainers, len(m.alive()))
	m.stats.PeakProcesses = max(m.stats.PeakProcesses, len(sample.Processes))
}

// now is what a step was made with.
type now struct {
	began, took time.Duration
}

// above says that the core asks for a sample soon, as gpufenced does.
func (m *model) above() bool {
	for _, st := range m.out.Containers {
		if st.PublishedMax != quota.Unlimited && st.NVMLBytes-st.SharedBytes > st.PublishedMax+m.cfg.Slack(st.PublishedMax) {
			return true
		}
	}
	return false
}

// sample is NVML's answer to a call that began then.
func (m *model) sample(began time.Duration) policy.Sample {
	s := policy.Sample{Number: m.number, Began: began, Complete: true, DeviceKnown: true, TotalBytes: totalBytes}
	if began < m.lost || m.on(Faults) && m.rng.IntN(25) == 0 {
		s.Complete, s.Why = false, "not answered"
		s.DeviceKnown = m.rng.IntN(2) == 0
	}
	faulty := m.on(Faults) && m.rng.IntN(20) == 0
	for _, p := range m.procs {
		bytes, listed := p.at(began - m.lag)
		if !listed {
			continue
		}
		use := policy.ProcessUse{PID: p.pid, Bytes: bytes, Known: true}
		if faulty && m.rng.IntN(30) == 0 {
			use.Bytes, use.Known = 0, false
		}
		s.UsedBytes += bytes
		if s.Complete || m.rng.IntN(2) == 0 {
			s.Processes = append(s.Processes, use)
		}
	}
	// A pid that was given away while its first owner is still listed has one row, with both.
	slices.SortStableFunc(s.Processes, func(a, b policy.ProcessUse) int { return a.PID - b.PID })
	merged := s.Processes[:0]
	for _, u := range s.Processes {
		if n := len(merged); n > 0 && merged[n-1].PID == u.PID {
			merged[n-1].Bytes += u.Bytes
			merged[n-1].Known = merged[n-1].Known && u.Known
			continue
		}
		merged = append(merged, u)
	}
	s.Processes = merged
	return s
}

// facts are who has which pid, and the slots.
func (m *model) facts(in *policy.Input) {
	holders := map[int]*proc{}
	for _, p := range m.procs {
		if !p.dead {
			holders[p.pid] = p
		}
	}
	pids := map[int]bool{}
	for _, u := range in.Sample.Processes {
		pids[u.PID] = true
	}
	for _, p := range m.out.Processes {
		pids[p.PID] = true
	}
	for _, p := range m.procs {
		if !p.shim || p.reclaimed {
			continue
		}
		p.found = p.found || !p.dead
		f := policy.SlotFact{Pod: p.cont.pod.id, Index: p.slot, Generation: 1, Dying: p.marked, LockFree: p.dead, DeviceBytes: p.charge}
		for n, b := range p.peaks {
			if n+1 >= m.number {
				if f.PeakBytes == nil {
					f.PeakBytes = make(map[uint64]uint64, 2)
				}
				f.PeakBytes[n] = b
			}
		}
		if p.found {
			f.PID, f.Start = p.pid, p.start
			pids[p.pid] = true
		}
		in.Slots = append(in.Slots, f)
	}
	for _, pid := range slices.Sorted(maps.Keys(pids)) {
		p := holders[pid]
		if p == nil {
			continue
		}
		in.Processes = append(in.Processes, policy.ProcFact{PID: pid, Start: p.start, Container: p.cont.id, State: policy.Live})
	}
}

// restart makes a new core, as after a crash: what gpufenced saved is put back.
func (m *model) restart() {
	m.say("gpufenced restarts")
	m.stats.Restarts++
	m.restarted = m.now
	pending := m.core.PendingResizes()
	m.core = policy.NewGPU(uuid, m.cfg)
	for _, r := range pending {
		if c := m.find(r.Level.Container); !c.ended { // a change ends with its container
			m.core.RestoreResize(r)
		}
	}
	m.out, m.haveOut = policy.Output{}, false
	for _, p := range m.procs {
		p.found = p.found && !p.dead
	}
	// Ended containers are not followed any more.
	m.conts = slices.DeleteFunc(m.conts, func(c *cont) bool { return c.ended })
}

// apply does what the core says.
func (m *model) apply() {
	out := &m.out
	for _, r := range out.MarkDying {
		m.bySlot(r).marked = true
	}
	for _, r := range policy.Reclaimable([]policy.Output{*out}) {
		m.bySlot(r).reclaimed = true
	}
	for _, c := range m.conts {
		st := out.Containers[c.id]
		c.excess, c.published = st.ExcessBytes, st.PublishedMax
		c.pod.excess, c.pod.published = out.Pods[c.pod.id].ExcessBytes, out.Pods[c.pod.id].PublishedMax
	}
	for _, ch := range out.Resizes {
		m.resized(ch.Resize)
	}
	if k := out.Kill; k != nil {
		m.say("%s", k.Reason)
		m.stats.Kills++
		c := m.find(k.Container)
		if k.Group {
			m.end(c)
		} else {
			for _, p := range m.byCont[c] {
				if p.pid == k.PID && p.start == k.Start {
					m.exit(p)
				}
			}
		}
	}
	// Who ended is followed until his memory is back.
	m.conts = slices.DeleteFunc(m.conts, func(c *cont) bool {
		st, ok := out.Containers[c.id]
		if !c.ended || c.since > m.outAt || !ok || !out.Known || st.DyingBytes+st.StuckBytes+st.ChargedBytes > 0 {
			return false
		}
		m.core.Forget(c.id)
		return true
	})
	// Processes that nobody can speak of any more.
	m.procs = slices.DeleteFunc(m.procs, func(p *proc) bool {
		_, listed := p.at(m.now - m.lag)
		if !p.dead || listed || p.shim && !p.reclaimed || m.now-p.freed < max(m.horizon(), m.cfg.StuckAfter+m.lag+10*period) {
			return false
		}
		m.byPID[p.pid] = slices.DeleteFunc(m.byPID[p.pid], func(o *proc) bool { return o == p })
		if len(m.byPID[p.pid]) == 0 {
			delete(m.byPID, p.pid)
		}
		m.byCont[p.cont] = slices.DeleteFunc(m.byCont[p.cont], func(o *proc) bool { return o == p })
		return true
	})
	m.pods = slices.DeleteFunc(m.pods, func(p *pod) bool {
		p.conts = slices.DeleteFunc(p.conts, func(c *cont) bool { return c.ended && len(m.byCont[c]) == 0 && !slices.Contains(m.conts, c) })
		if len(p.conts) == 0 {
			m.core.ForgetPod(p.id)
		}
		return len(p.conts) == 0
	})
}

func (m *model) bySlot(r policy.SlotRef) *proc {
	for _, p := range m.procs {
		if p.shim && p.slot == r.Index {
			return p
		}
	}
	m.fail("slot %d of %s is nobody's", r.Index, r.Pod)
	return &proc{}
}

func (m *model) find(id policy.ContainerID) *cont {
	for _, c := range m.conts {
		if c.id == id {
			return c
		}
	}
	m.fail("there is no container %s", id)
	return &cont{pod: &pod{}}
}

// resized takes over how a change ended.
func (m *model) resized(r policy.Resize) {
	c := m.find(r.Level.Container)
	if c.ended {
		return // and its limits with it
	}
	if r.State == policy.ResizeDone {
		m.stats.ShrinksDone++
		follows := c.grant.Min == c.grant.Max
		if c.grant.Max = r.Desired; follows {
			c.grant.Min = r.Desired
		}
		if held := m.live(c); c.kind != rogue && held > r.Desired {
			m.fail("the change of %s to %d is done, and it holds %d", c.id, r.Desired, held)
		}
	} else {
		m.stats.ShrinksFailed++
		if c.fits >= 0 && m.now-c.fits > m.cfg.Settle+m.lag+5*period {
			m.fail("the change of %s to %d failed (%s), although it fits since %v", c.id, r.Desired, r.Why, m.now-c.fits)
		}
	}
	m.say("%s: %s %s", c.id, r.State, r.Why)
	c.resize, c.fits, c.changed = nil, -1, m.now
	m.crossed(c)
	m.promises()
}

// judge holds what the core said against the truth.
func (m *model) judge(in *policy.Input, n now) {
	out := &m.out
	seen := in.Sample.Complete
	unknown := map[policy.ContainerID]bool{}
	for _, p := range m.procs {
		for _, u := range in.Sample.Processes {
			if !u.Known && u.PID == p.pid {
				unknown[p.cont.id] = true
			}
		}
		if seen {
			break
		}
	}
	if out.Kill != nil {
		m.judgeKill(out.Kill, in)
	} else if len(out.WouldKill) > 0 && !seen {
		m.fail("a would-be kill on an incomplete answer")
	}
	rivals := 0
	for _, c := range m.conts {
		if c.overNoted {
			rivals++
		}
	}
	for _, c := range m.conts {
		st := out.Containers[c.id]
		if c.kind == good && st.ExcessBytes != 0 {
			m.describe(c)
			m.fail("%s, whose processes all load the shim, has an excess of %d", c.id, st.ExcessBytes)
		}
		if c.mode == quota.ModeEnforce && c.kind != rogue && st.ChargedBytes > c.grant.Max {
			m.fail("%s is charged %d of %d", c.id, st.ChargedBytes, c.grant.Max)
		}
		blind := !seen || !st.Known || unknown[c.id] || m.entangled(c)
		if blind {
			m.stats.Blind++
		}
		m.judgeOver(c, blind, n, rivals)
		m.judgeResize(c, blind, n)
	}
}

// describe tells of a container's processes.
func (m *model) describe(c *cont) {
	for _, p := range m.byCont[c] {
		h := p.history[max(0, len(p.history)-6):]
		m.say("process %d of %s: charge %d, peaks %v, dead %v (freed %v), marked %v, held %v", p.pid, c.id, p.charge, p.peaks, p.dead, p.freed, p.marked, h)
	}
	for _, p := range m.out.Processes {
		if p.Container == c.id {
			m.say("the core on process %d: %s, listed %v, %d, ledger %d, excess %d", p.PID, p.State, p.Listed, p.NVMLBytes, p.LedgerBytes, p.ExcessBytes)
		}
	}
}

// judgeOver: who stays above his limit and the slack is killed within a bounded time.
func (m *model) judgeOver(c *cont, blind bool, n now, rivals int) {
	if !c.overNoted || c.ended || c.mode != quota.ModeEnforce {
		return
	}
	if blind {
		c.blind += n.took
	}
	if k := m.out.Kill; k != nil && k.Container == c.id {
		m.stats.Slowest = max(m.stats.Slowest, m.now-c.over-c.blind-m.lag)
		return
	}
	// A sample to see it, a second one, and those in which another one was killed. After a
	// restart, and after the kill of one process of it, the row begins anew.
	bound := m.lag + 3*period + time.Duration(rivals)*period + m.cfg.KillRetry
	if m.now-c.over-c.blind > bound {
		m.fail("%s holds %d of %d since %v and lives (blind for %v, bound %v)", c.id, m.live(c), c.grant.Max, m.now-c.over, c.blind, bound)
	}
}

// judgeResize: a change ends by its deadline, one way or the other.
func (m *model) judgeResize(c *cont, blind bool, n now) {
	r := c.resize
	if r == nil || c.ended {
		return
	}
	if m.listedAt(c, n.began-m.lag) <= r.Desired && max(m.charged(c), m.live(c)) <= r.Desired && !blind {
		if c.fits < 0 {
			c.fits = m.now
		}
	} else {
		c.fits = -1
	}
	if n.began >= r.Deadline && !blind && n.began >= r.Started+m.cfg.Settle {
		c.overdue += n.took
	}
	bound := 10*period + m.cfg.KillRetry
	if r.Force {
		// Killing helps against the living only, so what the dead hold is waited for.
		bound += m.cfg.StuckAfter
	}
	if c.overdue > bound && slices.ContainsFunc(m.core.PendingResizes(), func(p policy.Resize) bool { return p.Level == r.Level }) {
		m.fail("the change of %s to %d goes on %v after its deadline (force %v, holds %d)", c.id, r.Desired, c.overdue, r.Force, m.live(c))
	}
}

// judgeKill: above its limit and the slack by the truth of both samples, and explained.
func (m *model) judgeKill(k *policy.Kill, in *policy.Input) {
	c := m.find(k.Container)
	if m.failure != nil {
		return
	}
	members := []*cont{c}
	if k.Scope == "pod" {
		members = c.pod.conts
	}
	truth := func(t time.Duration) (sum uint64) {
		for _, o := range members {
			sum += m.liveAt(o, t)
		}
		return sum
	}
	first, second := truth(k.First), truth(k.Second)
	switch {
	case !in.Sample.Complete:
		m.fail("killed on an incomplete answer: %s", k.Reason)
	case c.ended || c.mode != quota.ModeEnforce:
		m.fail("killed although it ended or is only observed: %s", k.Reason)
	case k.Reason == "" || k.Message == "" || len(k.Candidates) == 0 || k.ThresholdBytes != k.MaxBytes+k.SlackBytes || k.UsedBytes <= k.ThresholdBytes:
		m.fail("a kill that is not explained: %+v", k)
	case k.UsedBytes > second:
		m.fail("killed for %d bytes, and its living processes held %d: %s", k.UsedBytes, second, k.Reason)
	case k.Forced:
		m.stats.Forced++
		if c.resize == nil || !c.resize.Force || m.now < c.resize.Deadline {
			m.fail("killed by force that nobody asked for: %s", k.Reason)
		}
	case k.Second-k.First < m.cfg.KillInterval:
		m.fail("two samples %v apart: %s", k.Second-k.First, k.Reason)
	case k.Scope == "container" && c.kind != rogue:
		m.fail("a container that keeps to its limit is killed (kind %d): %s", c.kind, k.Reason)
	case k.Scope == "pod" && c.pod.keeps():
		m.fail("a pod that keeps to its limit is hit: %s", k.Reason)
	case k.Scope == "container" && c.resize == nil && k.MaxBytes != c.grant.Max:
		m.fail("killed for a limit of %d, which is %d: %s", k.MaxBytes, c.grant.Max, k.Reason)
	case c.resize == nil && first <= k.ThresholdBytes && c.changed < k.First: // else it was judged by another limit then
		m.fail("in the first of the two samples it held %d: %s", first, k.Reason)
	}
}

// leave ends everybody: nothing may be left.
func (m *model) leave() {
	for _, c := range m.alive() {
		m.end(c)
	}
	m.Features &^= Restarts | LostGPU | Faults
	for range int((m.freeLag+m.lag+15*time.Second)/period) + 1 {
		if m.failure == nil {
			m.step(0)
		}
	}
	for _, p := range m.procs {
		if p.shim && !p.reclaimed {
			m.fail("the slot of process %d of %s is never taken back", p.pid, p.cont.id)
		}
	}
	if m.out.DyingBytes != 0 || m.out.UnmanagedBytes != 0 || m.out.UnattributedBytes != 0 {
		m.fail("all are gone, and there are %d bytes dying, %d unmanaged, %d unattributed", m.out.DyingBytes, m.out.UnmanagedBytes, m.out.UnattributedBytes)
	}
}
