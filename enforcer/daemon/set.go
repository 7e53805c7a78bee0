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
	resp := api.SetResponse{Notices: notices}
	for _, r := range d.follow(ctx, started, req.Wait) {
		resp.Resizes = append(resp.Resizes, r.view)
	}
	return resp, nil
}

// follow says what became of changes; with wait it does so when all of them have ended.
func (d *Daemon) follow(ctx context.Context, started []startedResize, wait bool) []followed {
	for {
		d.mu.Lock()
		var out []followed
		pending := false
		for _, s := range started {
			r := d.resizeOf(s.pod, s.uuid, s.level)
			switch {
			case r != nil && r.Started >= s.since && r.Desired == s.desired:
			case d.isPlanned(s):
				r = &resize{
					Level: s.level, Old: s.old, Desired: s.desired, Allocated: s.old, Actuated: s.old, Actual: s.old, State: policy.ResizePending,
					Why: "waits until the pod's other changes have ended", Deadline: d.mono() + d.cfg.ResizeDeadline,
				}
			default:
				r = &resize{
					Level: s.level, Old: s.old, Desired: s.desired, Allocated: s.old, Actuated: s.old, Actual: s.old, State: policy.ResizeFailed,
					Why: "another change took its place, or the container ended",
				}
			}
			pending = pending || r.State == policy.ResizePending
			f := followed{level: s.level, view: d.viewResize(s.uuid, *r)}
			if c := d.reg.ByID(s.level.Container); c != nil {
				f.name = c.Name
			}
			out = append(out, f)
		}
		changed := d.changed
		d.mu.Unlock()
		if !pending || !wait {
			return out
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return out // what there is: it goes on without the caller
		}
	}
}

// startedResize is a change that is followed.
type startedResize struct {
	pod          string
	uuid         string
	level        policy.Level
	old, desired uint64
	since        time.Duration
}

type followed struct {
	level policy.Level
	name  string // of the container; "" for the pod
	view  api.Resize
}

// change is new limits of one level on one GPU, of which memory.max is different.
type change struct {
	uuid     string
	level    policy.Level
	old, now quota.Limits
}

// order is how changes are to be made.
type order struct {
	source   string // set, apply, spec
	deadline time.Duration
	force    bool
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
	deadline, err := d.resizeDeadline(req.DeadlineMillis)
	if err != nil {
		return nil, nil, err
	}
	if req.Scope != "" && req.Scope != "pod" && req.Scope != "container" {
		return nil, nil, quota.NewError(quota.CodeBadRequest, "scope %.40q is neither pod nor container", req.Scope)
	}

	changes, notices, err := d.planSet(c, asked, req.Scope)
	if err != nil {
		return nil, nil, err
	}
	started, err := d.begin(c.Pod(), changes, order{"set", deadline, req.Force})
	if err != nil {
		return nil, nil, err
	}
	return started, append(notices, "a container that is started again goes back to its annotation"), nil
}

func (d *Daemon) resizeDeadline(millis int64) (time.Duration, error) {
	if millis < 0 || millis > maxResizeDeadline.Milliseconds() {
		return 0, quota.NewError(quota.CodeBadRequest, "a deadline of %d ms is not between 0 and %s", millis, maxResizeDeadline)
	}
	if millis > 0 {
		return time.Duration(millis) * time.Millisecond, nil
	}
	return d.cfg.ResizeDeadline, nil
}

// planSet computes the new limits.
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
		other, above := pod.Max, pod.Max
		if scope == "pod" || scope == "" && own.Max == quota.Unlimited && pod.Max != quota.Unlimited {
			ch.level, ch.old, other, above = policy.Level{Pod: p.ID()}, pod, own.Max, quota.Unlimited
		}
		ch.now = withMax(ch.old, limit, min(above, gs.quota.AllocatableBytes), pol.Overcommit)
		if ch.now.Min > ch.now.Max {
			return nil, nil, quota.NewError(quota.CodeMinAboveMax, "memory.max %s is below memory.min %s of %s",
				quota.FormatBytes(limit), quota.FormatBytes(ch.now.Min), c.Display()).WithHint("set at least that")
		}
		if other < limit {
			notices = append(notices, fmt.Sprintf("the other level's memory.max of %s still holds on %s", quota.FormatBytes(other), g.UUID))
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

// admitChanges asks whether what a pod would be promised with changes can be promised, where that is
// more than now.
func (d *Daemon) admitChanges(p *registry.Pod, changes []change) error {
	pol := d.cfg.Policy.For(p.Ref.Namespace)
	for _, uuid := range p.GPUs {
		grows := slices.ContainsFunc(changes, func(ch change) bool { return ch.uuid == uuid && ch.now.Max > ch.old.Max })
		if !grows {
			continue
		}
		if d.gpus[uuid] == nil {
			return quota.NewError(quota.CodeGPUUnknown, "GPU %s is not to be seen now", uuid).WithHint("try again when NVML answers")
		}
		if _, err := d.usable(uuid); err != nil {
			return err
		}
		now := func(level policy.Level, l quota.Limits) quota.Limits {
			for _, ch := range changes {
				if ch.uuid == uuid && ch.level == level {
					return ch.now
				}
			}
			return l
		}
		pod := now(policy.Level{Pod: p.ID()}, p.PodLimits(uuid))
		var sum uint64
		for _, c := range p.Containers {
			if c.Holds(uuid) {
				sum += min(now(policy.Level{Container: c.ID()}, c.ContainerLimits(uuid)).Min, quota.Unlimited-sum)
			}
		}
		want := max(pod.Min, min(sum, pod.Max))
		if want <= p.MinBytes(uuid) {
			continue
		}
		if _, err := d.admit(uuid, p, p.Ref.Namespace, pol, want); err != nil {
			return err
		}
	}
	return nil
}

// begin admits changes of a pod and starts them in the order of [policy.Stage]: a stage begins when
// the one before has ended, and none after one that failed. What waits is saved with the pod, so
// that it goes on after a restart. The caller holds mu.
func (d *Daemon) begin(p *registry.Pod, changes []change, req order) ([]startedResize, error) {
	if err := d.admitChanges(p, changes); err != nil {
		return nil, err
	}
	now := d.mono()
	var started []startedResize
	planned := p.Planned
	p.Planned = nil // what waited is replaced
	for _, ch := range changes {
		started = append(started, startedResize{p.Name, ch.uuid, ch.level, ch.old.Max, ch.now.Max, now})
		p.Planned = append(p.Planned, registry.Planned{
			Stage: policy.Stage(ch.level, ch.old.Max, ch.now.Max), GPU: ch.uuid, Level: ch.level, Limits: ch.now,
			Deadline: req.deadline, Force: req.force, Source: req.source,
		})
	}
	if err := d.advance(p, false); err != nil {
		p.Planned = planned
		return nil, err
	}
	return started, nil
}

// advance starts the next stages of a pod's changes, as far as they need not wait. failed says that
// one of the stage before has failed, so that the others are given up. The error is that nothing of
// the first stage could be started, and nothing has changed then. The caller holds mu.
func (d *Daemon) advance(p *registry.Pod, failed bool) error {
	for first := true; len(p.Planned) > 0; first = false {
		for uuid, list := range p.Resizes {
			waits := slices.ContainsFunc(list, func(r resize) bool {
				// One that is replaced now is not waited for.
				return r.State == policy.ResizePending && !slices.ContainsFunc(p.Planned, func(pl registry.Planned) bool { return pl.GPU == uuid && pl.Level == r.Level })
			})
			if waits && !first || waits && !failed && p.Planned[0].Begun {
				return nil
			}
		}
		if failed {
			d.giveUp(p, "a change that had to come before it has failed")
			return nil
		}
		stage := slices.MinFunc(p.Planned, func(a, b registry.Planned) int { return a.Stage - b.Stage }).Stage
		var group, rest []registry.Planned
		for _, pl := range p.Planned {
			if pl.Stage == stage {
				group = append(group, pl)
			} else {
				pl.Begun = true
				rest = append(rest, pl)
			}
		}
		later := group[0].Begun
		var changes []change
		for _, pl := range group {
			ch := change{uuid: pl.GPU, level: pl.Level, old: p.PodLimits(pl.GPU), now: pl.Limits}
			if pl.Level.Container != "" {
				c := d.reg.ByID(pl.Level.Container)
				if c == nil || c.State != registry.Running {
					continue // it has ended meanwhile
				}
				ch.old = c.ContainerLimits(pl.GPU)
			}
			changes = append(changes, ch)
		}
		if later {
			// Somebody else may have been promised the room since.
			if err := d.admitChanges(p, changes); err != nil {
				d.giveUp(p, err.Error())
				return nil
			}
		}
		before := p.Planned
		p.Planned = rest
		if err := d.start(p, changes, order{group[0].Source, group[0].Deadline, group[0].Force}); err != nil {
			p.Planned = before
			if later {
				d.giveUp(p, err.Error())
				return nil
			}
			return err
		}
	}
	return nil
}

// goOn starts what waits for changes that have ended unseen: with their container, or before a
// restart.
func (d *Daemon) goOn() {
	for _, p := range d.reg.Pods() {
		ready := len(p.Planned) > 0 && d.nvmlErr == nil
		for _, uuid := range p.GPUs {
			ready = ready && d.gpus[uuid] != nil && d.gpus[uuid].have
		}
		if !ready {
			continue
		}
		if err := d.advance(p, false); err != nil {
			d.once("state", err)
		}
	}
}

// giveUp ends what waits: it has failed, with the reason.
func (d *Daemon) giveUp(p *registry.Pod, why string) {
	now := d.mono()
	for _, pl := range p.Planned {
		old := p.PodLimits(pl.GPU).Max
		c := d.reg.ByID(pl.Level.Container)
		if c != nil {
			old = c.ContainerLimits(pl.GPU).Max
		}
		r := resize{
			Level: pl.Level, Old: old, Desired: pl.Limits.Max, Allocated: old, Actuated: old, Actual: old,
			State: policy.ResizeFailed, Why: why, Started: now,
		}
		d.keepResize(p, pl.GPU, r)
		notFollowed(p, pl.Level)
		if c == nil {
			c = d.onePod(p, pl.GPU)
		}
		if c != nil {
			d.resizeEvent(c, pl.GPU, r)
		}
	}
	p.Planned = nil
	d.dirty[p.Name] = true
	d.notify()
}

// onePod is one of the containers that a pod's limit bounds on a GPU, to stand for the pod in an
// event.
func (d *Daemon) onePod(p *registry.Pod, uuid string) *registry.Container {
	for _, o := range p.Containers {
		if o.Active() && hasGPU(o, uuid) {
			return o
		}
	}
	return nil
}

// start makes changes: what grows is granted, what shrinks is pending.
func (d *Daemon) start(p *registry.Pod, changes []change, req order) error {
	now := d.mono()
	type before struct {
		limits quota.Limits
		resize *resize
	}
	var olds []before
	type writer struct {
		generation uint64
		source     string
		at         time.Time
	}
	writers := map[*registry.Container]writer{}
	var begun []resize
	for _, ch := range changes {
		g := d.gpus[ch.uuid]
		if g == nil {
			return quota.NewError(quota.CodeGPUUnknown, "GPU %s is not to be seen now", ch.uuid).WithHint("try again when NVML answers")
		}
		var last *resize
		if r := d.resizeOf(p.Name, ch.uuid, ch.level); r != nil {
			copied := *r
			last = &copied
		}
		olds = append(olds, before{ch.old, last})
		r := g.machine.StartResize(ch.level, ch.old.Max, ch.now.Max, now, now+req.deadline, req.force)
		d.keepResize(p, ch.uuid, r)
		if r.State == policy.ResizeDone {
			d.setLimits(p, ch.uuid, ch.level, ch.now)
		}
		begun = append(begun, r)
		for _, c := range p.Containers {
			if _, seen := writers[c]; !seen && (ch.level.Pod != "" || ch.level.Container == c.ID()) {
				writers[c] = writer{c.Generation, c.ChangedBy, c.ChangedAt}
				c.Generation, c.ChangedBy, c.ChangedAt = c.Generation+1, req.source, d.now()
			}
		}
	}
	if err := d.save(p); err != nil {
		// Nothing was published: back to what the file says.
		for i, ch := range changes {
			g := d.gpus[ch.uuid]
			g.machine.StartResize(ch.level, ch.old.Max, ch.old.Max, now, now, false)
			d.setLimits(p, ch.uuid, ch.level, olds[i].limits)
			d.dropResize(p, ch.uuid, ch.level)
			if r := olds[i].resize; r != nil {
				d.keepResize(p, ch.uuid, *r)
				g.machine.RestoreResize(*r)
			}
		}
		for c, w := range writers {
			c.Generation, c.ChangedBy, c.ChangedAt = w.generation, w.source, w.at
		}
		return stateError(err)
	}
	d.publish(p)
	d.writeFiles(p, true)
	for i, ch := range changes {
		c := d.reg.ByID(ch.level.Container)
		if c == nil {
			c = d.onePod(p, ch.uuid)
		}
		if c != nil {
			d.resizeEvent(c, ch.uuid, begun[i])
		}
	}
	d.notify()
	d.poke()
	return nil
}

// isPlanned says whether a change waits for others of its pod.
func (d *Daemon) isPlanned(s startedResize) bool {
	p := d.reg.Pod(s.pod)
	return p != nil && slices.ContainsFunc(p.Planned, func(pl registry.Planned) bool {
		return pl.GPU == s.uuid && pl.Level == s.level && pl.Limits.Max == s.desired
	})
}

// setLimits changes the grant of a level.
func (d *Daemon) setLimits(p *registry.Pod, uuid string, level policy.Level, l quota.Limits) {
	if level.Pod != "" {
		if p.Limits == nil {
			p.Limits = map[string]quota.Limits{}
		}
		p.Limits[uuid] = l
		return
	}
	c := d.reg.ByID(level.Container)
	if c == nil {
		return // it has ended
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
		c = d.onePod(p, uuid) // the pod's: the event is about one of those that it bounds
	}
	for _, o := range p.Containers {
		if r.Level.Pod != "" || r.Level.Container == o.ID() {
			o.Generation++
		}
	}
	if r.State == policy.ResizeDone && (c != nil || r.Level.Pod != "") {
		old, most := p.PodLimits(uuid), g.quota.AllocatableBytes
		if r.Level.Container != "" {
			old, most = c.ContainerLimits(uuid), min(most, old.Max)
		}
		d.setLimits(p, uuid, r.Level, withMax(old, r.Desired, most, d.cfg.Policy.For(p.Ref.Namespace).Overcommit))
	}
	if r.State == policy.ResizeFailed {
		notFollowed(p, r.Level)
	}
	if err := d.save(p); err != nil {
		d.once("state", err)
	}
	if c != nil {
		d.resizeEvent(c, uuid, r)
	}
	if err := d.advance(p, r.State == policy.ResizeFailed); err != nil {
		d.once("state", err)
	}
}

// notFollowed forgets that a level follows annotations whose change has failed, so that they may be
// sent again. What somebody else has set does not count as failed by them.
func notFollowed(p *registry.Pod, level policy.Level) {
	for _, c := range p.Containers {
		if c.ChangedBy != api.SourceSpec {
			continue
		}
		if level.Pod != "" {
			p.Spec = ""
		} else if level.Container == c.ID() {
			c.Spec = ""
		}
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
