// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/gpufence/gpufence/enforcer/api"
	"github.com/gpufence/gpufence/enforcer/policy"
	"github.com/gpufence/gpufence/enforcer/quota"
	"github.com/gpufence/gpufence/enforcer/registry"
)

type resize = policy.Resize

// maxResizeDeadline bounds what a caller may ask for: until then the pages show the new limit.
const maxResizeDeadline = time.Hour

// Set implements [api.Service].
func (d *Daemon) Set(ctx context.Context, id string, req api.SetRequest) (api.SetResponse, error) {
	d.mu.Lock()
	started, notices, err := d.beginSet(id, req)
	d.mu.Unlock()
	if err != nil {
		return api.SetResponse{}, err
	}
	for {
		d.mu.Lock()
		resp := api.SetResponse{Notices: notices}
		pending := false
		for _, s := range started {
			r := d.resizeOf(s.pod, s.uuid, s.level)
			if r == nil || r.Started != s.at {
				r = &s.last // it was replaced, or its container has ended
				if r.State == policy.ResizePending {
					r.State, r.Why = policy.ResizeFailed, "another change took its place, or the container ended"
				}
			}
			pending = pending || r.State == policy.ResizePending
			resp.Resizes = append(resp.Resizes, d.viewResize(s.uuid, *r))
		}
		changed := d.changed
		d.mu.Unlock()
		if !pending || !req.Wait {
			return resp, nil
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return resp, nil // what there is: it goes on without the caller
		}
	}
}

// startedResize is one that Set follows.
type startedResize struct {
	pod   string
	uuid  string
	level policy.Level
	at    time.Duration
	last  resize
}

// change is a new memory.max of one level on one GPU.
type change struct {
	uuid     string
	level    policy.Level
	old, now quota.Limits
}

// beginSet checks everything, then changes everything. The caller holds mu.
func (d *Daemon) beginSet(id string, req api.SetRequest) ([]startedResize, []string, error) {
	if d.closed {
		return nil, nil, quota.NewError(quota.CodeUnreachable, "gpufenced is stopping").WithHint("start it again")
	}
	c, err := d.reg.Find(id)
	if err != nil {
		return nil, nil, err
	}
	if c.State != registry.Running {
		return nil, nil, quota.NewError(quota.CodeNotRunning, "container %s is %s, so its limits cannot change", c.Display(), c.State).
			WithHint("start it, or change its annotation")
	}
	asked, err := quota.ParseSet(req.Values)
	if err != nil {
		return nil, nil, err
	}
	if err := asked.Check(c.Grant.GPUs); err != nil {
		return nil, nil, err
	}
	if req.DeadlineMillis < 0 || req.DeadlineMillis > maxResizeDeadline.Milliseconds() {
		return nil, nil, quota.NewError(quota.CodeBadRequest, "a deadline of %d ms is not between 0 and %s", req.DeadlineMillis, maxResizeDeadline)
	}
	deadline := d.cfg.ResizeDeadline
	if req.DeadlineMillis > 0 {
		deadline = time.Duration(req.DeadlineMillis) * time.Millisecond
	}
	if req.Scope != "" && req.Scope != "pod" && req.Scope != "container" {
		return nil, nil, quota.NewError(quota.CodeBadRequest, "scope %.40q is neither pod nor container", req.Scope)
	}

	changes, notices, err := d.planSet(c, asked, req.Scope)
	if err != nil {
		return nil, nil, err
	}
	started, err := d.applySet(c, changes, deadline, req.Force)
	if err != nil {
		return nil, nil, err
	}
	return started, append(notices, "a container that is started again goes back to its annotation"), nil
}

// planSet computes and admits the new limits.
func (d *Daemon) planSet(c *registry.Container, asked quota.Change, scope string) ([]change, []string, error) {
	p := c.Pod()
	pol := d.cfg.Policy.For(p.Ref.Namespace)
	var changes []change
	var notices []string
	for i, g := range c.Grant.GPUs {
		limit, ok, err := asked.Max(g, i, pol)
		if err != nil {
			return nil, nil, err
		}
		if !ok {
			continue
		}
		gs := d.gpus[g.UUID]
		if gs == nil {
			return nil, nil, quota.NewError(quota.CodeGPUUnknown, "GPU %s is not to be seen now", g.UUID).WithHint("try again when NVML answers")
		}
		own, pod := c.ContainerLimits(g.UUID), p.PodLimits(g.UUID)
		ch := change{uuid: g.UUID, level: policy.Level{Container: c.ID()}, old: own}
		other := pod.Max
		if scope == "pod" || scope == "" && own.Max == quota.Unlimited && pod.Max != quota.Unlimited {
			ch.level, ch.old, other = policy.Level{Pod: p.ID()}, pod, own.Max
		}
		above := quota.Unlimited
		if ch.level.Container != "" {
			above = pod.Max
		}
		ch.now = withMax(ch.old, limit, min(above, gs.quota.AllocatableBytes), pol.Overcommit)
		if ch.now.Min > ch.now.Max {
			return nil, nil, quota.NewError(quota.CodeMinAboveMax, "memory.max %s is below memory.min %s of %s",
				quota.FormatBytes(limit), quota.FormatBytes(ch.now.Min), c.Display()).WithHint("set at least that")
		}
		if other < limit {
			notices = append(notices, fmt.Sprintf("the other level's memory.max of %s still holds on %s", quota.FormatBytes(other), g.UUID))
		}
		if limit > ch.old.Max {
			if _, err := d.usable(g.UUID); err != nil {
				return nil, nil, err
			}
			want := p.MinBytes(g.UUID)
			if ch.level.Pod != "" {
				want = max(want, ch.now.Min)
			} else {
				// The container's part of the sum becomes the new one.
				want = max(want, want-min(want, own.Min)+ch.now.Min)
			}
			if _, err := d.admit(g.UUID, p, p.Ref.Namespace, pol, want); err != nil {
				return nil, nil, err
			}
		}
		changes = append(changes, ch)
	}
	return changes, notices, nil
}

// withMax is a level's limits with another memory.max; memory.min follows where it did before, as
// far as the level above and the GPU allow (most), which may have cut it before, too.
func withMax(l quota.Limits, limit, most uint64, overcommit bool) quota.Limits {
	follows := l.Min == min(l.Max, most) || l.Max == quota.Unlimited && l.Min == 0 && !overcommit
	l.Max = limit
	if follows {
		l.Min = min(limit, most)
		if limit == quota.Unlimited {
			l.Min = 0
		}
	}
	return l
}

// applySet starts the changes: what grows is granted, what shrinks is pending.
func (d *Daemon) applySet(c *registry.Container, changes []change, deadline time.Duration, force bool) ([]startedResize, error) {
	p := c.Pod()
	now := d.mono()
	var started []startedResize
	type before struct {
		limits quota.Limits
		resize *resize
	}
	var olds []before
	for _, ch := range changes {
		g := d.gpus[ch.uuid]
		var last *resize
		if r := d.resizeOf(p.Name, ch.uuid, ch.level); r != nil {
			copied := *r
			last = &copied
		}
		olds = append(olds, before{ch.old, last})
		r := g.machine.StartResize(ch.level, ch.old.Max, ch.now.Max, now, now+deadline, force)
		d.keepResize(p, ch.uuid, r)
		if r.State == policy.ResizeDone {
			setLimits(p, c, ch.uuid, ch.level, ch.now)
		}
		started = append(started, startedResize{p.Name, ch.uuid, ch.level, r.Started, r})
	}
	c.Generation++
	if err := d.save(p); err != nil {
		// Nothing was published: back to what the file says.
		for i, ch := range changes {
			g := d.gpus[ch.uuid]
			g.machine.StartResize(ch.level, ch.old.Max, ch.old.Max, now, now, false)
			setLimits(p, c, ch.uuid, ch.level, olds[i].limits)
			d.dropResize(p, ch.uuid, ch.level)
			if r := olds[i].resize; r != nil {
				d.keepResize(p, ch.uuid, *r)
				g.machine.RestoreResize(*r)
			}
		}
		return nil, stateError(err)
	}
	d.publish(p)
	d.writeFiles(p, true)
	for _, s := range started {
		d.resizeEvent(c, s.uuid, s.last)
	}
	d.notify()
	d.poke()
	return started, nil
}

// setLimits changes the grant of a level.
func setLimits(p *registry.Pod, c *registry.Container, uuid string, level policy.Level, l quota.Limits) {
	if level.Pod != "" {
		if p.Limits == nil {
			p.Limits = map[string]quota.Limits{}
		}
		p.Limits[uuid] = l
		return
	}
	if c.Grant.Container == nil {
		c.Grant.Container = map[string]quota.Limits{}
	}
	c.Grant.Container[uuid] = l
}

func (d *Daemon) dropResize(p *registry.Pod, uuid string, level policy.Level) {
	p.Resizes[uuid] = slices.DeleteFunc(p.Resizes[uuid], func(r resize) bool { return r.Level == level })
}

// keepResize remembers the newest change of a level, also after it has ended.
func (d *Daemon) keepResize(p *registry.Pod, uuid string, r resize) {
	if p.Resizes == nil {
		p.Resizes = map[string][]resize{}
	}
	d.dropResize(p, uuid, r.Level)
	p.Resizes[uuid] = append(p.Resizes[uuid], r)
}

// resizeOf is the newest change of a level, pending or not; nil if there was none.
func (d *Daemon) resizeOf(pod, uuid string, level policy.Level) *resize {
	p := d.reg.Pod(pod)
	if p == nil {
		return nil
	}
	for i := range p.Resizes[uuid] {
		if r := &p.Resizes[uuid][i]; r.Level == level {
			return r
		}
	}
	return nil
}

// pendingResize is a level's change that has not ended, nil if there is none.
func (d *Daemon) pendingResize(uuid string, level policy.Level) *resize {
	p := d.podOfLevel(level)
	if p == nil {
		return nil
	}
	if r := d.resizeOf(p.Name, uuid, level); r != nil && r.State == policy.ResizePending {
		return r
	}
	return nil
}

func (d *Daemon) podOfLevel(level policy.Level) *registry.Pod {
	if level.Pod != "" {
		return d.reg.Pod(string(level.Pod))
	}
	if c := d.reg.ByID(level.Container); c != nil {
		return c.Pod()
	}
	return nil
}

// followResizes takes over how far pending changes are.
func (d *Daemon) followResizes(g *gpuState) {
	for _, r := range g.machine.PendingResizes() {
		if p := d.podOfLevel(r.Level); p != nil {
			d.keepResize(p, g.info.UUID, r)
		}
	}
}

// resizeEnded makes the grant what a pending change has led to.
func (d *Daemon) resizeEnded(g *gpuState, r resize) {
	p := d.podOfLevel(r.Level)
	if p == nil {
		return
	}
	uuid := g.info.UUID
	d.keepResize(p, uuid, r)
	c := d.reg.ByID(r.Level.Container)
	if c == nil {
		// The pod's: the event is about one of those that it bounds.
		for _, o := range p.Containers {
			if o.Active() && hasGPU(o, uuid) {
				c = o
			}
		}
	}
	for _, o := range p.Containers {
		o.Generation++
	}
	if r.State == policy.ResizeDone && (c != nil || r.Level.Pod != "") {
		old, most := p.PodLimits(uuid), g.quota.AllocatableBytes
		if r.Level.Container != "" {
			old, most = c.ContainerLimits(uuid), min(most, old.Max)
		}
		setLimits(p, c, uuid, r.Level, withMax(old, r.Desired, most, d.cfg.Policy.For(p.Ref.Namespace).Overcommit))
	}
	if err := d.save(p); err != nil {
		d.once("state", err)
	}
	if c != nil {
		d.resizeEvent(c, uuid, r)
	}
}

func (d *Daemon) resizeEvent(c *registry.Container, uuid string, r resize) {
	whose := c.Display()
	if r.Level.Pod != "" {
		whose = "the pod of " + whose
	}
	ev := api.Event{Type: "resize", GPU: uuid, Numbers: map[string]uint64{"old_bytes": r.Old, "desired_bytes": r.Desired}}
	step := fmt.Sprintf("memory.max of %s on %s from %s to %s", whose, uuid, quota.FormatBytes(r.Old), quota.FormatBytes(r.Desired))
	switch r.State {
	case policy.ResizeDone:
		ev.Message = step + ": done"
	case policy.ResizePending:
		ev.Message = step + ": pending, " + r.Why
	default:
		ev.Type, ev.Code = "resize-failed", string(quota.CodeResizeFailed)
		ev.Message = fmt.Sprintf("%s: ResizeFailed, %s; %s holds again", step, r.Why, quota.FormatBytes(r.Old))
	}
	d.event(about(c, ev))
}

func (d *Daemon) viewResize(uuid string, r resize) api.Resize {
	out := api.Resize{GPU: uuid, Desired: r.Desired, Allocated: r.Allocated, Actuated: r.Actuated, Actual: r.Actual, State: r.State, Why: r.Why}
	if r.State == policy.ResizePending {
		t := d.now().Add(r.Deadline - d.mono())
		out.Deadline = &t
	}
	return out
}
