// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/gpufence/gpufence/enforcer/api"
	"github.com/gpufence/gpufence/enforcer/fence"
	"github.com/gpufence/gpufence/enforcer/gpu"
	"github.com/gpufence/gpufence/enforcer/ledger"
	"github.com/gpufence/gpufence/enforcer/policy"
	"github.com/gpufence/gpufence/enforcer/quota"
	"github.com/gpufence/gpufence/enforcer/registry"
)

// step takes one sample of a GPU to its consequences.
func (d *Daemon) step(g *gpuState, number uint64, s gpu.Sample) {
	d.mu.LockToLook()
	defer d.mu.Unlock()
	d.asking = slices.DeleteFunc(d.asking, func(o *gpuState) bool { return o == g })
	g.inFlight = false
	if d.closed || g.gone { // then it says what was before
		return
	}
	uuid := g.info.UUID
	before := g.sample.Processes
	g.have = true
	pods := d.reg.PodsOn(uuid)
	pages := g.pages.of(d, pods)
	now := d.mono()
	quiet := d.isQuiet(g, &s, now)
	for i, p := range pods {
		if rt := pages[i]; rt != nil && rt.pages != nil {
			d.lookAtLedger(p, rt, g.lookFor(quiet, rt, number))
		}
	}
	g.still = quiet && d.repeats(g, number, pods, pages)
	if g.still {
		d.repeat(g, number, s, now)
		return
	}
	d.mu.changed()
	g.sample, g.number = s, number
	in := policy.Input{Sample: sampleFact(number, s)}
	info := sampleInfo(number, s)
	if !d.cfg.KillMPS {
		info.Spared = s.MPS
	}
	for i, p := range pods {
		if rt := pages[i]; rt != nil && rt.pages != nil {
			in.Slots = d.slotFacts(in.Slots, p, rt, uuid, number)
		}
	}
	in.Containers = d.containerFacts(g.last.room[:0], g, pods, pages)
	d.facts.look()
	o := d.owners()
	all, changed := d.doubtful(g, &in, before, s.Processes)
	pids := stepPIDs(&in.Sample, in.Slots, g.out.Processes)
	in.Processes = make([]policy.ProcFact, 0, len(pids))
	for _, pid := range pids {
		f, ok, err := d.facts.fact(pid, o, d.mono(), all || changed[pid])
		if err != nil {
			in.Sample.Complete, in.Sample.Why = false, fmt.Sprintf("process %d cannot be read: %v", pid, err)
			info.Complete, info.Why = false, in.Sample.Why
			f, ok = policy.ProcFact{PID: pid, State: policy.Unreadable}, true // without a fact it would count as exited
		}
		if ok {
			in.Processes = append(in.Processes, f)
		}
	}
	in.Now = d.mono()
	out := g.machine.Step(in)
	g.out, g.outAt = out, in.Now
	if out.Known {
		g.lastKnown = in.Now
	}
	d.saidUnknown(g, &out)
	d.seen.set(uuid, info, out.Containers)
	d.limiter.sees.list(uuid, &out)
	d.gateSample(g, &out)

	d.count(g, &out)
	learning := d.learnContexts(g, &out)
	d.followResizes(g)
	for _, r := range out.Resizes {
		d.resizeEnded(g, r.Resize)
	}
	for _, p := range pods {
		d.publish(p)
	}
	d.takeSlotsBack(pods, &out)
	for _, p := range out.Stuck {
		ev := api.Event{Type: "stuck", GPU: uuid, Message: fmt.Sprintf("process %d (%s) exited, but NVML still lists %s of it on %s",
			p.PID, p.Comm, quota.HumanBytes(p.NVMLBytes), uuid), Numbers: map[string]uint64{"pid": uint64(p.PID), "bytes": p.NVMLBytes}}
		if c := d.reg.ByID(p.Container); c != nil {
			ev = about(c, ev)
		}
		d.event(ev)
	}
	for _, k := range out.WouldKill {
		if c := d.reg.ByID(k.Container); c != nil {
			d.event(about(c, api.Event{Type: "would-kill", GPU: uuid, Message: k.Reason, Numbers: killNumbers(&k)}))
		}
	}
	for _, k := range out.Withheld {
		if c := d.reg.ByID(k.Container); c != nil {
			d.event(about(c, api.Event{Type: "kill-withheld", GPU: uuid, Message: k.Reason + "; not done: " + k.Withheld, Numbers: killNumbers(&k)}))
		}
	}
	d.saidForeign(g, &out)
	d.saidShimless(g, &out)
	d.confirmKills(g, &out)
	d.drained(g, &out)
	above := d.isAbove(&out)
	g.rising = false
	for _, st := range out.Containers {
		g.rising = g.rising || st.Rising
	}
	if above && !g.above {
		g.aboveAt = s.Began
	}
	if out.Kill != nil {
		d.startKill(g, out.Kill)
	} else if wait := g.aboveAt + d.cfg.KillInterval; above && s.Began < wait {
		// A kill needs a second sample, whose call begins so much later than the first's: it need not
		// wait for a whole period. One that somebody asked for in between is not it.
		time.AfterFunc(wait-d.mono(), d.poke)
	}
	g.above = above
	d.remember(g, pods, &in, pids, learning)
	d.notify()
}

// lookFor is how closely a pod's ledger is looked at: not where nothing speaks for a change. Slots wait
// for another look only where no number has begun in the pages since the last.
func (g *gpuState) lookFor(quiet bool, rt *podRuntime, number uint64) func(*ledger.Ledger, int) (*ledger.Snapshot, error) {
	switch {
	case !quiet:
		return (*ledger.Ledger).SnapshotOf
	case g.still && rt.number < number:
		return (*ledger.Ledger).PeekOf
	}
	return (*ledger.Ledger).GlanceOf
}

// isAbove says whether the processes of a container or pod hold more than its limit and the slack.
func (d *Daemon) isAbove(out *policy.Output) bool {
	beyond := func(used, limit uint64) bool {
		return limit != quota.Unlimited && used > limit && used-limit > d.pol.Slack(limit)
	}
	for _, st := range out.Containers {
		if beyond(st.NVMLBytes-st.SharedBytes, st.PublishedMax) {
			return true
		}
	}
	for _, st := range out.Pods {
		if beyond(st.NVMLBytes-st.SharedBytes, st.PublishedMax) {
			return true
		}
	}
	return false
}

func hasGPU(c *registry.Container, uuid string) bool {
	for _, g := range c.Grant.GPUs {
		if g.UUID == uuid {
			return true
		}
	}
	return false
}

func (d *Daemon) containerFact(c *registry.Container, uuid string) policy.ContainerFact {
	return d.factOf(c, uuid, d.runtime[c.Pod().Name])
}

// factOf is containerFact of a container whose pod has these pages, nil if none.
func (d *Daemon) factOf(c *registry.Container, uuid string, rt *podRuntime) policy.ContainerFact {
	f := policy.ContainerFact{
		ID: c.ID(), Pod: c.Pod().ID(), Name: c.Name,
		Container: c.ContainerLimits(uuid), PodLimits: c.Pod().PodLimits(uuid),
		OOMGroup: c.Grant.OOMGroup, Mode: d.modeOf(c), ShimAbsent: c.ShimAbsent,
	}
	if rt != nil && rt.broken != "" {
		f.ShimUnknown = true
		if f.ShimAbsent == "" {
			f.ShimAbsent = "ledger broken"
		}
	}
	f.ShimUnknown = f.ShimUnknown || f.ShimAbsent == pagesLost
	f.Priority, f.Started = c.Priority, time.Duration(c.Start)*clockTick
	return f
}

// clockTick is the unit of a process's start time.
const clockTick = time.Second / 100

func sampleFact(number uint64, s gpu.Sample) policy.Sample {
	out := policy.Sample{
		Number: number, Began: s.Began, Complete: s.Complete(), Why: s.Why(),
		DeviceKnown: s.Err == nil && s.MemoryErr == nil,
		TotalBytes:  s.Memory.TotalBytes, UsedBytes: s.Memory.UsedBytes, ReservedBytes: s.Memory.ReservedBytes,
	}
	for _, p := range s.Processes {
		_, mps := slices.BinarySearch(s.MPS, p.PID)
		out.Processes = append(out.Processes, policy.ProcessUse{PID: p.PID, Bytes: p.Bytes, Known: p.Known, MPS: mps})
	}
	return out
}

func sampleInfo(number uint64, s gpu.Sample) fence.SampleInfo {
	info := fence.SampleInfo{Number: number, Began: s.Began, Complete: s.Complete(), Why: s.Why(), Processes: len(s.Processes)}
	for _, p := range s.Processes {
		if !p.Known {
			info.Unknown = append(info.Unknown, p.PID)
		}
	}
	return info
}

// saidUnknown reports when a GPU becomes unknown, and when it is known again.
func (d *Daemon) saidUnknown(g *gpuState, out *policy.Output) {
	switch {
	case out.Known && g.saidWhy != "":
		g.saidWhy = ""
		d.event(api.Event{Type: "gpu-known", GPU: g.info.UUID, Message: fmt.Sprintf("NVML answers for %s again", g.info.UUID)})
	case !out.Known && g.saidWhy == "":
		g.saidWhy = out.Why
		if g.saidWhy == "" {
			g.saidWhy = "its memory is not known"
		}
		d.event(api.Event{Type: "gpu-unknown", Code: string(quota.CodeGPUUnknown), GPU: g.info.UUID, Message: fmt.Sprintf(
			"nothing trustworthy is known of %s (%.200s): nobody is killed there, and after %s no container starts", g.info.UUID, g.saidWhy, unknownLimit)})
	}
}

// takeSlotsBack marks the slots of processes that exited, and frees those that nothing speaks for
// any more.
func (d *Daemon) takeSlotsBack(pods []*registry.Pod, out *policy.Output) {
	for _, ref := range out.MarkDying {
		if rt := d.runtime[string(ref.Pod)]; rt != nil && rt.pages != nil {
			if err := rt.pages.Ledger().MarkDying(ref.Index, ref.Generation); err != nil && !errors.Is(err, ledger.ErrMoved) {
				d.once("ledger of "+string(ref.Pod), err)
			}
		}
	}
	for _, p := range pods {
		rt := d.runtime[p.Name]
		if rt == nil || rt.pages == nil || rt.snapshot == nil {
			continue
		}
		var outs []policy.Output
		whole := true
		for _, uuid := range p.GPUs {
			g := d.gpus[uuid]
			if g == nil || !g.have {
				whole = false
				break
			}
			outs = append(outs, g.out)
		}
		if !whole {
			continue
		}
		saved := false
		for _, ref := range policy.Reclaimable(outs) {
			if ref.Pod != p.ID() {
				continue
			}
			if !saved {
				// The slot's counters go with it: what was folded out of them must be on disk before.
				if err := d.save(p); err != nil {
					d.once("state", err)
				}
				saved = true
			}
			err := rt.pages.Ledger().Reclaim(ref.Index, ref.Generation, ref.Exited)
			if err != nil && !errors.Is(err, ledger.ErrMoved) && !errors.Is(err, ledger.ErrBusy) {
				d.once("ledger of "+p.Name, err)
			}
		}
		for i := range rt.snapshot.Overflow.GPU {
			if o := &rt.snapshot.Overflow.GPU[i]; o.DeviceBytes != 0 || o.ManagedBytes != 0 || o.SwapBytes != 0 {
				if _, err := rt.pages.Ledger().ClearOverflow(); err != nil {
					d.once("ledger of "+p.Name, err)
				}
				break
			}
		}
	}
}

// drained ends the following of containers that ended and whose memory is gone.
func (d *Daemon) drained(g *gpuState, out *policy.Output) {
	for id, dr := range g.draining {
		st, ok := out.Containers[id]
		gone := ok && out.Known && st.DyingBytes == 0 && st.StuckBytes == 0 && st.ChargedBytes == 0
		if gone || d.mono()-dr.ended > drainLimit {
			delete(g.draining, id)
			g.machine.Forget(id)
			d.seen.forget(id)
			if !d.draining(id) {
				d.facts.disown(id)
				d.facts.version++
			}
		}
	}
}

// pageError reports a page that cannot be written: its container cut the file, or memory is short.
func (d *Daemon) pageError(rt *podRuntime, index uint32, err error) {
	c := rt.containers[index]
	if c == nil || err == nil && !d.saidAny() {
		return
	}
	d.once("pages in "+c.Dir(), err)
}

// publish brings a pod's limits pages and files up to date.
func (d *Daemon) publish(p *registry.Pod) {
	rt := d.runtime[p.Name]
	if rt == nil {
		return
	}
	for _, c := range p.Containers {
		page := rt.containers[c.Index]
		if page == nil || !c.Active() {
			continue
		}
		d.pageError(rt, c.Index, page.Publish(d.limitsPage(p, c)))
	}
}

// limitsPage is what a container's page should say now.
func (d *Daemon) limitsPage(p *registry.Pod, c *registry.Container) ledger.Limits {
	l := ledger.Limits{Generation: c.Generation, GPU: make([]ledger.LimitsGPU, len(p.GPUs))}
	for i, uuid := range p.GPUs {
		if !hasGPU(c, uuid) {
			continue
		}
		id, err := ledger.ParseUUID(uuid)
		if err != nil {
			continue // prepare has refused such a GPU
		}
		own, pod := c.ContainerLimits(uuid), p.PodLimits(uuid)
		if d.cfg.Throttle == "off" {
			own.High, pod.High = quota.Unlimited, quota.Unlimited
		}
		e := ledger.LimitsGPU{
			UUID: id, Present: true, Fenced: d.modeOf(c) == quota.ModeEnforce,
			ModuleBytes: d.cfg.ModuleBytes,
			MaxBytes:    d.publishedMax(uuid, policy.Level{Container: c.ID()}, own.Max), HighBytes: own.High, SwapMaxBytes: own.SwapMax,
			PodMaxBytes: d.publishedMax(uuid, policy.Level{Pod: p.ID()}, pod.Max), PodHighBytes: pod.High, PodSwapMaxBytes: pod.SwapMax,
		}
		for _, g := range c.Grant.GPUs {
			if g.UUID == uuid {
				e.TotalBytes, e.ContextBytes = g.TotalBytes, g.ContextBytes
			}
		}
		if g := d.gpus[uuid]; g != nil {
			e.TotalBytes, e.ContextBytes = g.info.TotalBytes, d.contextBytes(p, g)
			e.ExcessBytes = g.out.Containers[c.ID()].ExcessBytes
			e.PodExcessBytes = g.out.Pods[p.ID()].ExcessBytes
		}
		l.GPU[i] = e
	}
	return l
}

// publishedMax is what a page shows of a level's memory.max: the grant, or what a pending resize
// holds.
func (d *Daemon) publishedMax(uuid string, level policy.Level, granted uint64) uint64 {
	if r := d.pendingResize(uuid, level); r != nil {
		return r.Actuated
	}
	return d.boundByDriver(uuid, level, granted)
}

// writeFiles brings memory.* of a pod's containers up to date. What they show is saved before, so
// that nobody reads a counter that a crash would take back.
func (d *Daemon) writeFiles(p *registry.Pod, force bool) {
	rt := d.runtime[p.Name]
	if rt == nil {
		return
	}
	steps := d.stepsOf(p)
	if !force && steps == rt.shown {
		return
	}
	now, late := d.mono(), false
	for _, c := range p.Containers {
		page := rt.containers[c.Index]
		if page == nil || c.State != registry.Running {
			continue
		}
		if !force && now-rt.published[c.Index] < filesInterval {
			late = true
			continue
		}
		rt.published[c.Index] = now
		var rows []ledger.FileGPU
		for _, g := range c.Grant.GPUs {
			v := d.viewGPU(c, g)
			pod := v.Pod
			pod.Max = d.publishedMax(g.UUID, policy.Level{Pod: p.ID()}, pod.Max)
			rows = append(rows, ledger.FileGPU{
				UUID:      g.UUID,
				FileLevel: fileLevel(v.Limits, v.Current, v.Peak, v.Events, v.EventsLocal),
				Pod:       fileLevel(pod, v.PodCurrent, v.PodPeak, v.PodEvents, v.PodEventsLocal),
			})
		}
		err := page.WriteFiles(c.Grant.OOMGroup, rows)
		late = late || err != nil
		d.once("memory files in "+page.Dir(), err)
	}
	if !late {
		rt.shown = steps
	}
}

func fileLevel(l quota.Limits, current, peak uint64, events, local api.Events) ledger.FileLevel {
	return ledger.FileLevel{
		Max: l.Max, High: l.High, Min: l.Min, SwapMax: l.SwapMax, Current: current, Peak: peak, Events: fileEvents(events), Local: fileEvents(local),
	}
}

func fileEvents(e api.Events) ledger.FileEvents {
	return ledger.FileEvents{High: e.High, Max: e.Max, Device: e.Device, OOM: e.OOM, OOMKill: e.OOMKill, OOMGroupKill: e.OOMGroupKill}
}

// runHousekeeping collects what ended, holds that ran out, and saves counters.
func (d *Daemon) housekeep() {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.closed {
		return
	}
	d.collect()
	d.goOn()
	if err := d.saveDirty(); err == nil {
		for _, p := range d.reg.Pods() {
			d.writeFiles(p, false)
		}
	}
	for _, g := range d.gpus {
		d.facts.use(g.last.pids)
	}
	d.facts.sweep()
}

func killNumbers(k *policy.Kill) map[string]uint64 {
	return map[string]uint64{
		"used_bytes": k.UsedBytes, "max_bytes": k.MaxBytes, "slack_bytes": k.SlackBytes, "threshold_bytes": k.ThresholdBytes,
		"first_sample_ns": uint64(k.First), "second_sample_ns": uint64(k.Second),
	}
}

// since is a duration of the wall clock that never runs backwards.
func since(now, then time.Time) time.Duration { return max(0, now.Sub(then)) }

// podEvent is an event about a whole pod; one of its containers stands for it.
func (d *Daemon) podEvent(p *registry.Pod, kind, message string) {
	for _, c := range p.Containers {
		if c.Active() {
			d.event(about(c, api.Event{Type: kind, GPU: firstGPU(c), Message: message}))
			return
		}
	}
	ref := p.Ref
	d.event(api.Event{Type: kind, Pod: &ref, Message: message})
}
