// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"context"
	"errors"
	"fmt"
	"maps"
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

// Set implements [server.Service].
func (d *Daemon) Set(ctx context.Context, id string, req api.SetRequest) (api.SetResponse, error) {
	var started []startedResize
	var notices []string
	err := d.patiently(ctx, func() (err error) {
		started, notices, err = d.beginSet(id, req)
		return err
	})
	if err != nil {
		return api.SetResponse{}, err
	}
	resp := api.SetResponse{Notices: notices}
	for _, r := range d.follow(ctx, started, req.Wait) {
		resp.Resizes = append(resp.Resizes, r.view)
	}
	return resp, nil
}

// passing is a refusal whose reason may pass by itself: NVML's first answer is on its way, or memory
// of processes that exited is.
type passing struct{ error }

func (e passing) Unwrap() error { return e.error }

// patiently tries, under mu, until it is done, refused for good, or has waited as long as a start
// does.
func (d *Daemon) patiently(ctx context.Context, try func() error) error {
	deadline := time.Now().Add(waitForGPU)
	for {
		d.mu.Lock()
		err := try()
		changed := d.changed
		d.mu.Unlock()
		var wait passing
		if !errors.As(err, &wait) {
			return err
		}
		if !time.Now().Before(deadline) {
			return wait.error
		}
		d.poke()
		timer := time.NewTimer(time.Until(deadline))
		select {
		case <-changed:
		case <-timer.C:
		case <-ctx.Done():
		}
		timer.Stop()
		if ctx.Err() != nil {
			return wait.error // the reason is worth more than that time is up
		}
	}
}

// follow says what became of changes; with wait it does so when all of them have ended.
func (d *Daemon) follow(ctx context.Context, started []startedResize, wait bool) []followed {
	d.visitDriver(ctx) // what has grown is shown to programs once the driver allows it
	for {
		d.mu.Lock()
		var out []followed
		pending := false
		for _, s := range started {
			r := d.stateOf(s)
			pending = pending || r.State == policy.ResizePending
			name := ""
			if c := d.reg.ByID(s.level.Container); c != nil {
				name = c.Name
			}
			if s.max {
				out = append(out, followed{level: s.level, name: name, view: d.viewResize(s.uuid, r)})
			}
			for _, k := range s.also {
				v := api.Resize{Key: k.key, GPU: s.uuid, Desired: k.now, Allocated: k.now, Actuated: k.now, Actual: k.now, State: r.State, Why: r.Why}
				if r.State == policy.ResizeFailed {
					v.Allocated, v.Actuated, v.Actual = k.old, k.old, k.old
				}
				out = append(out, followed{level: s.level, name: name, view: v})
			}
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

// stateOf is how far a change is: that of memory.max, and the others of its level go with it. Those
// of a level whose memory.max stays are made at once.
func (d *Daemon) stateOf(s startedResize) resize {
	if !s.max {
		return resize{Level: s.level, State: policy.ResizeDone}
	}
	r := d.resizeOf(s.pod, s.uuid, s.level)
	switch {
	case r != nil && r.Started >= s.since && r.Desired == s.desired:
		return *r
	case d.isPlanned(s):
		return resize{
			Level: s.level, Old: s.old, Desired: s.desired, Allocated: s.old, Actuated: s.old, Actual: s.old, State: policy.ResizePending,
			Why: "waits until the pod's other changes have ended", Deadline: d.mono() + d.cfg.ResizeDeadline,
		}
	}
	return resize{
		Level: s.level, Old: s.old, Desired: s.desired, Allocated: s.old, Actuated: s.old, Actual: s.old, State: policy.ResizeFailed,
		Why: "another change took its place, or the container ended",
	}
}

// startedResize is a change that is followed.
type startedResize struct {
	pod          string
	uuid         string
	level        policy.Level
	old, desired uint64
	since        time.Duration
	max          bool        // memory.max is part of it
	also         []keyChange // the others
}

type followed struct {
	level policy.Level
	name  string // of the container; "" for the pod
	view  api.Resize
}

// keyChange is another value of one key.
type keyChange struct {
	key      string
	old, now uint64
}

// change is new limits of one level on one GPU. max says that memory.max is part of it, which may
// have to wait; the others then go with it, and old is what holds now. Without it, old is what holds
// once all is done that is pending.
type change struct {
	uuid     string
	level    policy.Level
	old, now quota.Limits
	max      bool
}

// also are the keys beside memory.max that a change gives another value.
func (ch change) also() []keyChange {
	var out []keyChange
	for _, k := range []keyChange{
		{quota.KeyMemoryHigh, ch.old.High, ch.now.High},
		{quota.KeyMemoryMin, ch.old.Min, ch.now.Min},
		{quota.KeyMemorySwapMax, ch.old.SwapMax, ch.now.SwapMax},
	} {
		if k.old != k.now {
			out = append(out, k)
		}
	}
	return out
}

// groupChange is another memory.oom.group of a container.
type groupChange struct {
	c     *registry.Container
	group bool
}

// order is how changes are to be made.
type order struct {
	source   string // set, apply, spec
	deadline time.Duration
	force    bool
	groups   []groupChange
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

	changes, shown, notices, err := d.planSet(c, asked, req.Scope)
	if err != nil {
		return nil, nil, err
	}
	ord := order{source: "set", deadline: deadline, force: req.Force}
	if group, ok := asked.OOMGroup(); ok {
		for _, o := range c.Pod().Containers {
			if o == c || req.Scope == "pod" && o.State == registry.Running {
				ord.groups = append(ord.groups, groupChange{o, group})
			}
		}
	}
	started, err := d.begin(c.Pod(), changes, ord)
	if err != nil {
		return nil, nil, err
	}
	for i := range started {
		started[i].also = shown[i] // those that were asked for, also where they are as before
	}
	for _, g := range ord.groups {
		started = append(started, groupStarted(g))
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

// groupStarted shows a memory.oom.group as a change that is done.
func groupStarted(g groupChange) startedResize {
	v := uint64(0)
	if g.group {
		v = 1
	}
	return startedResize{pod: g.c.Pod().Name, level: policy.Level{Container: g.c.ID()}, also: []keyChange{{quota.KeyOOMGroup, v, v}}}
}

// levelFor is whose limit a key without a scope means: the level that has one, and else that of
// memory.max.
func (d *Daemon) levelFor(c *registry.Container, uuid, key, scope string) policy.Level {
	own, pod := policy.Level{Container: c.ID()}, policy.Level{Pod: c.Pod().ID()}
	switch scope {
	case "pod":
		return pod
	case "container":
		return own
	}
	o, p := d.target(c.Pod(), uuid, own), d.target(c.Pod(), uuid, pod)
	switch {
	case key == quota.KeyMemoryHigh && o.High != quota.Unlimited:
		return own
	case key == quota.KeyMemoryHigh && p.High != quota.Unlimited:
		return pod
	case o.Max == quota.Unlimited && p.Max != quota.Unlimited:
		return pod
	}
	return own
}

// planSet computes the new limits, and for each change the keys beside memory.max that were asked
// for.
func (d *Daemon) planSet(c *registry.Container, asked quota.Change, scope string) ([]change, [][]keyChange, []string, error) {
	p := c.Pod()
	pol := d.cfg.Policy.For(p.Ref.Namespace)
	var changes []change
	var shown [][]keyChange
	var notices []string
	for i, g := range c.Grant.GPUs {
		first := len(changes)
		// of is the change of the level that a key is of.
		of := func(key string) int {
			level := d.levelFor(c, g.UUID, key, scope)
			for j := first; j < len(changes); j++ {
				if changes[j].level == level {
					return j
				}
			}
			l := d.target(p, g.UUID, level)
			changes, shown = append(changes, change{uuid: g.UUID, level: level, old: d.limitsOf(p, g.UUID, level), now: l}), append(shown, nil)
			return len(changes) - 1
		}
		otherHolds := func(key string, level policy.Level, limit uint64, get func(quota.Limits) uint64) {
			other := policy.Level{Pod: p.ID()}
			if level.Pod != "" {
				other = policy.Level{Container: c.ID()}
			}
			if v := get(d.target(p, g.UUID, other)); v < limit {
				notices = append(notices, fmt.Sprintf("the other level's %s of %s still holds on %s", key, quota.FormatBytes(v), g.UUID))
			}
		}
		limit, ok, err := asked.Max(g, i, pol)
		if err != nil {
			return nil, nil, nil, err
		}
		if ok {
			gs := d.gpus[g.UUID]
			if gs == nil {
				return nil, nil, nil, d.unseen(g.UUID)
			}
			j := of(quota.KeyMemoryMax)
			ch := &changes[j]
			most := gs.quota.AllocatableBytes
			if ch.level.Container != "" {
				most = min(most, d.target(p, g.UUID, policy.Level{Pod: p.ID()}).Max)
			}
			ch.now, ch.max = withMax(ch.now, limit, most, pol.Overcommit), true
			otherHolds(quota.KeyMemoryMax, ch.level, limit, func(l quota.Limits) uint64 { return l.Max })
		}
		high, ok, err := asked.High(g, i)
		if err != nil {
			return nil, nil, nil, err
		}
		if ok {
			j := of(quota.KeyMemoryHigh)
			shown[j] = append(shown[j], keyChange{quota.KeyMemoryHigh, changes[j].now.High, high})
			changes[j].now.High = high
			otherHolds(quota.KeyMemoryHigh, changes[j].level, high, func(l quota.Limits) uint64 { return l.High })
		}
		swap, ok, err := asked.SwapMax(g, i)
		if err != nil {
			return nil, nil, nil, err
		}
		if ok {
			j := of(quota.KeyMemorySwapMax)
			shown[j] = append(shown[j], keyChange{quota.KeyMemorySwapMax, changes[j].now.SwapMax, swap})
			changes[j].now.SwapMax = swap
			otherHolds(quota.KeyMemorySwapMax, changes[j].level, swap, func(l quota.Limits) uint64 { return l.SwapMax })
		}
		j := of(quota.KeyMemoryMin)
		above := changes[j].now.Max
		if changes[j].level.Container != "" {
			above = min(above, d.target(p, g.UUID, policy.Level{Pod: p.ID()}).Max)
		}
		least, ok, err := asked.Min(g, i, above)
		if err != nil {
			return nil, nil, nil, err
		}
		if ok {
			shown[j] = append(shown[j], keyChange{quota.KeyMemoryMin, changes[j].now.Min, least})
			changes[j].now.Min = least
		}
		for k := first; k < len(changes); k++ {
			if l := changes[k].now; l.Min > l.Max {
				return nil, nil, nil, quota.NewError(quota.CodeMinAboveMax, "memory.max %s is below memory.min %s of %s",
					quota.FormatBytes(l.Max), quota.FormatBytes(l.Min), c.Display()).WithHint("set at least that")
			}
		}
		// What nothing was asked of is no change.
		for k := len(changes) - 1; k >= first; k-- {
			if !changes[k].max {
				changes[k].old = d.target(p, g.UUID, changes[k].level)
			}
			if !changes[k].max && len(shown[k]) == 0 {
				changes, shown = slices.Delete(changes, k, k+1), slices.Delete(shown, k, k+1)
			}
		}
	}
	return changes, shown, notices, nil
}

// unseen refuses what concerns a GPU that NVML does not show: not yet, or not any more.
func (d *Daemon) unseen(uuid string) error {
	err := error(quota.NewError(quota.CodeGPUUnknown, "GPU %s is not to be seen now", uuid).WithHint("try again when NVML answers"))
	if errors.Is(d.nvmlErr, errNotAsked) {
		return passing{err}
	}
	return err
}

// limitsOf are a level's limits as they hold now.
func (d *Daemon) limitsOf(p *registry.Pod, uuid string, level policy.Level) quota.Limits {
	if level.Pod != "" {
		return p.PodLimits(uuid)
	}
	if c := d.reg.ByID(level.Container); c != nil {
		return c.ContainerLimits(uuid)
	}
	return quota.Limits{Max: quota.Unlimited, High: quota.Unlimited, SwapMax: quota.Unlimited}
}

// target are a level's limits as they will be once everything that is pending or planned is done.
func (d *Daemon) target(p *registry.Pod, uuid string, level policy.Level) quota.Limits {
	for _, pl := range p.Planned {
		if pl.GPU == uuid && pl.Level == level {
			return pl.Limits
		}
	}
	l := d.limitsOf(p, uuid, level)
	if goal := p.GoalOf(uuid, level); goal != nil {
		return goal.After
	}
	if r := d.pendingResize(uuid, level); r != nil {
		l.Max = r.Desired // of a state file without goals
	}
	return l
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
	for _, makeRoom := range d.roomTurns(len(p.GPUs)) {
		if err := d.admitOnEach(p, changes, makeRoom); err != nil {
			return err
		}
	}
	return nil
}

// admitOnEach is one turn of that; see [Daemon.admit].
func (d *Daemon) admitOnEach(p *registry.Pod, changes []change, makeRoom bool) error {
	pol := d.cfg.Policy.For(p.Ref.Namespace)
	for _, uuid := range p.GPUs {
		if !slices.ContainsFunc(changes, func(ch change) bool { return ch.uuid == uuid }) {
			continue
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
		grows := slices.ContainsFunc(changes, func(ch change) bool { return ch.uuid == uuid && ch.now.Max > ch.old.Max })
		if want <= p.MinBytes(uuid) && !grows {
			continue
		}
		if d.gpus[uuid] == nil {
			return d.unseen(uuid)
		}
		if wait, err := d.usable(uuid); err != nil {
			if wait {
				return passing{err}
			}
			return err
		}
		if want <= p.MinBytes(uuid) {
			continue
		}
		if transient, err := d.admit(uuid, p, p.Ref.Namespace, pol, want, makeRoom); err != nil {
			if transient {
				return passing{err}
			}
			return err
		}
	}
	return nil
}

// begin admits changes of a pod and makes them. What leaves memory.max as it is holds at once. The
// others start in the order of [policy.Stage]: a stage begins when the one before has ended, and none
// after one that failed. What waits is saved with the pod, so that it goes on after a restart. The
// caller holds mu.
func (d *Daemon) begin(p *registry.Pod, changes []change, req order) ([]startedResize, error) {
	if err := d.admitChanges(p, changes); err != nil {
		return nil, err
	}
	now := d.mono()
	restore := d.snapshot(p)
	var started []startedResize
	var planned []registry.Planned
	for _, ch := range changes {
		also := ch.also()
		if ch.max { // its memory.min goes with it
			also = slices.DeleteFunc(also, func(k keyChange) bool { return k.key == quota.KeyMemoryMin })
		}
		started = append(started, startedResize{
			pod: p.Name, uuid: ch.uuid, level: ch.level, old: ch.old.Max, desired: ch.now.Max, since: now, max: ch.max, also: also,
		})
		if ch.max {
			planned = append(planned, registry.Planned{
				Stage: policy.Stage(ch.level, ch.old.Max, ch.now.Max), GPU: ch.uuid, Level: ch.level, Limits: ch.now,
				Deadline: req.deadline, Force: req.force, Source: req.source,
			})
		}
	}
	quick := slices.DeleteFunc(slices.Clone(changes), func(ch change) bool { return ch.max })
	d.setQuick(p, quick, req)
	if len(planned) > 0 {
		p.Planned = planned // what waited is replaced
		if err := d.advance(p, false); err != nil {
			restore()
			return nil, err
		}
	} else {
		if err := d.save(p); err != nil {
			restore()
			return nil, stateError(err)
		}
		d.gateFollows(p)
		d.publish(p)
		d.writeFiles(p, true)
		d.notify()
		d.poke()
	}
	for _, ch := range quick {
		d.keyEvents(p, ch)
	}
	for _, g := range req.groups {
		d.event(about(g.c, api.Event{Type: "resize", GPU: firstGPU(g.c), Message: fmt.Sprintf("memory.oom.group of %s is %t: done", g.c.Display(), g.group)}))
	}
	return started, nil
}

// setQuick changes what need not wait, also in what is pending or planned: whatever becomes of that,
// these stay. The caller holds mu, and saves.
func (d *Daemon) setQuick(p *registry.Pod, changes []change, req order) {
	touched := map[*registry.Container]bool{}
	for _, ch := range changes {
		apply := func(l *quota.Limits) {
			for _, k := range ch.also() { // nothing else: it may be on its way to another value
				switch k.key {
				case quota.KeyMemoryHigh:
					l.High = k.now
				case quota.KeyMemorySwapMax:
					l.SwapMax = k.now
				case quota.KeyMemoryMin:
					l.Min = min(k.now, l.Max)
				}
			}
		}
		l := d.limitsOf(p, ch.uuid, ch.level)
		apply(&l)
		d.setLimits(p, ch.uuid, ch.level, l)
		if goal := p.GoalOf(ch.uuid, ch.level); goal != nil {
			apply(&goal.Before)
			apply(&goal.After)
		}
		for i := range p.Planned {
			if pl := &p.Planned[i]; pl.GPU == ch.uuid && pl.Level == ch.level {
				apply(&pl.Limits)
			}
		}
		for _, c := range p.Containers {
			if ch.level.Pod != "" || ch.level.Container == c.ID() {
				touched[c] = true
			}
		}
	}
	for _, g := range req.groups {
		g.c.Grant.OOMGroup = g.group
		touched[g.c] = true
	}
	for c := range touched {
		c.Generation, c.ChangedBy, c.ChangedAt = c.Generation+1, req.source, d.now()
	}
}

// snapshot remembers what a pod's file says of limits; the function puts it back.
func (d *Daemon) snapshot(p *registry.Pod) (restore func()) {
	before := *p
	before.Limits, before.Planned = maps.Clone(p.Limits), slices.Clone(p.Planned)
	before.Resizes, before.Goals = map[string][]resize{}, map[string][]registry.Goal{}
	for uuid, l := range p.Resizes {
		before.Resizes[uuid] = slices.Clone(l)
	}
	for uuid, l := range p.Goals {
		before.Goals[uuid] = slices.Clone(l)
	}
	type saved struct {
		limits     map[string]quota.Limits
		group      bool
		generation uint64
		by         string
		at         time.Time
	}
	containers := map[*registry.Container]saved{}
	for _, c := range p.Containers {
		containers[c] = saved{maps.Clone(c.Grant.Container), c.Grant.OOMGroup, c.Generation, c.ChangedBy, c.ChangedAt}
	}
	return func() {
		p.Limits, p.Planned, p.Resizes, p.Goals = before.Limits, before.Planned, before.Resizes, before.Goals
		for c, s := range containers {
			c.Grant.Container, c.Grant.OOMGroup, c.Generation, c.ChangedBy, c.ChangedAt = s.limits, s.group, s.generation, s.by, s.at
		}
	}
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
			ch := change{uuid: pl.GPU, level: pl.Level, old: p.PodLimits(pl.GPU), now: pl.Limits, max: true}
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
			// Somebody else may have been promised the room since, or has left memory behind that is
			// not back yet.
			err := d.admitChanges(p, changes)
			var wait passing
			if errors.As(err, &wait) && d.mayWait(p, group[0].Deadline) {
				return nil // housekeeping tries again
			}
			d.runtimeOf(p).stageWaits = 0
			if err != nil {
				d.giveUp(p, err.Error())
				return nil
			}
		}
		before := p.Planned
		p.Planned = rest
		if err := d.start(p, changes, order{source: group[0].Source, deadline: group[0].Deadline, force: group[0].Force}); err != nil {
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

// mayWait says whether a pod's next stage may go on waiting for what passes by itself: not longer than
// a change may take. The caller holds mu.
func (d *Daemon) mayWait(p *registry.Pod, deadline time.Duration) bool {
	rt, now := d.runtimeOf(p), d.mono()
	if rt.stageWaits == 0 {
		rt.stageWaits = now
	}
	return now-rt.stageWaits < deadline
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

// start makes changes: what grows is granted, what shrinks is pending. Meanwhile a level has the
// memory.high and memory.swap.max that it will have, which help it to shrink, and the greater of the
// two guarantees.
func (d *Daemon) start(p *registry.Pod, changes []change, req order) error {
	now := d.mono()
	for _, ch := range changes {
		if d.gpus[ch.uuid] == nil {
			return d.unseen(ch.uuid)
		}
	}
	restore := d.snapshot(p)
	touched := map[*registry.Container]bool{}
	var begun []resize
	for _, ch := range changes {
		before := ch.old
		if goal := p.GoalOf(ch.uuid, ch.level); goal != nil {
			before = goal.Before // one that is replaced leads back to where it began
		}
		r := d.gpus[ch.uuid].machine.StartResize(ch.level, ch.old.Max, ch.now.Max, now, now+req.deadline, req.force)
		d.keepResize(p, ch.uuid, r)
		p.DropGoal(ch.uuid, ch.level)
		if r.State == policy.ResizeDone {
			d.setLimits(p, ch.uuid, ch.level, ch.now)
		} else {
			p.AddGoal(ch.uuid, registry.Goal{Level: ch.level, Before: before, After: ch.now})
			meanwhile := ch.now
			meanwhile.Max, meanwhile.Min = before.Max, max(before.Min, ch.now.Min)
			d.setLimits(p, ch.uuid, ch.level, meanwhile)
		}
		begun = append(begun, r)
		for _, c := range p.Containers {
			if !touched[c] && (ch.level.Pod != "" || ch.level.Container == c.ID()) {
				touched[c] = true
				c.Generation, c.ChangedBy, c.ChangedAt = c.Generation+1, req.source, d.now()
			}
		}
	}
	if err := d.save(p); err != nil {
		// Nothing was published: back to what the file says.
		restore()
		for _, ch := range changes {
			machine := d.gpus[ch.uuid].machine
			machine.StartResize(ch.level, ch.old.Max, ch.old.Max, now, now, false)
			if r := d.resizeOf(p.Name, ch.uuid, ch.level); r != nil {
				machine.RestoreResize(*r)
			}
		}
		return stateError(err)
	}
	d.gateFollows(p) // what grows must be let through before programs hear of it
	d.publish(p)
	d.writeFiles(p, true)
	for i, ch := range changes {
		if c := d.standsFor(p, ch.uuid, ch.level); c != nil {
			d.resizeEvent(c, ch.uuid, begun[i])
		}
		d.keyEvents(p, ch)
	}
	d.notify()
	d.poke()
	return nil
}

// standsFor is whom an event about a level is about: its container, or one of its pod's.
func (d *Daemon) standsFor(p *registry.Pod, uuid string, level policy.Level) *registry.Container {
	if c := d.reg.ByID(level.Container); c != nil {
		return c
	}
	return d.onePod(p, uuid)
}

// keyEvents say what changed beside memory.max.
func (d *Daemon) keyEvents(p *registry.Pod, ch change) {
	c := d.standsFor(p, ch.uuid, ch.level)
	if c == nil {
		return
	}
	for _, k := range ch.also() {
		if ch.max && k.key == quota.KeyMemoryMin {
			continue // it goes with memory.max, which has its own event
		}
		d.event(about(c, api.Event{Type: "resize", GPU: ch.uuid, Numbers: map[string]uint64{"old_bytes": k.old, "desired_bytes": k.now},
			Message: fmt.Sprintf("%s of %s on %s from %s to %s: done", k.key, whose(c, ch.level), ch.uuid, quota.FormatBytes(k.old), quota.FormatBytes(k.now))}))
	}
}

// whose names a level in sentences.
func whose(c *registry.Container, level policy.Level) string {
	if level.Pod != "" {
		return "the pod of " + c.Display()
	}
	return c.Display()
}

// isPlanned says whether a change waits for others of its pod.
func (d *Daemon) isPlanned(s startedResize) bool {
	p := d.reg.Pod(s.pod)
	return p != nil && s.max && slices.ContainsFunc(p.Planned, func(pl registry.Planned) bool {
		return pl.GPU == s.uuid && pl.Level == s.level && pl.Limits.Max == s.desired
	})
}

// setLimits changes the grant of a level.
func (d *Daemon) setLimits(p *registry.Pod, uuid string, level policy.Level, l quota.Limits) {
	d.tellDriver()
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
		if c := d.reg.ByID(r.Level.Container); r.Level.Container != "" && (c == nil || c.State != registry.Running) {
			continue
		}
		if p := d.podOfLevel(r.Level); p != nil {
			d.keepResize(p, g.info.UUID, r)
		}
	}
}

// endResizes forgets the changes of a container that ends, also those that only policy knows of: one
// that comes to its end later would put back what is gone. The caller holds mu.
func (d *Daemon) endResizes(c *registry.Container) {
	p, level := c.Pod(), policy.Level{Container: c.ID()}
	for uuid, list := range p.Resizes {
		p.Resizes[uuid] = slices.DeleteFunc(list, func(r resize) bool { return r.Level == level })
	}
	for _, g := range d.gpus {
		p.DropGoal(g.info.UUID, level)
		// A change to no limit is done at once, and takes the place of one that is pending.
		g.machine.StartResize(level, 0, quota.Unlimited, d.mono(), 0, false)
	}
	for uuid := range p.Goals {
		p.DropGoal(uuid, level)
	}
	p.Planned = slices.DeleteFunc(p.Planned, func(pl registry.Planned) bool { return pl.Level == level })
}

// resizeEnded makes the grant what a pending change has led to.
func (d *Daemon) resizeEnded(g *gpuState, r resize) {
	p := d.podOfLevel(r.Level)
	c := d.reg.ByID(r.Level.Container)
	if p == nil || r.Level.Container != "" && (c == nil || c.State != registry.Running) {
		return // what it was about has ended
	}
	uuid := g.info.UUID
	d.keepResize(p, uuid, r)
	if c == nil {
		c = d.onePod(p, uuid) // the pod's: the event is about one of those that it bounds
	}
	for _, o := range p.Containers {
		if r.Level.Pod != "" || r.Level.Container == o.ID() {
			o.Generation++
		}
	}
	switch goal := p.GoalOf(uuid, r.Level); {
	case goal != nil && r.State == policy.ResizeDone:
		d.setLimits(p, uuid, r.Level, goal.After)
	case goal != nil:
		d.setLimits(p, uuid, r.Level, goal.Before)
	case r.State == policy.ResizeDone: // begun by a gpufenced that kept no goals
		old, most := p.PodLimits(uuid), g.quota.AllocatableBytes
		if r.Level.Container != "" {
			old, most = c.ContainerLimits(uuid), min(most, old.Max)
		}
		d.setLimits(p, uuid, r.Level, withMax(old, r.Desired, most, d.cfg.Policy.For(p.Ref.Namespace).Overcommit))
	}
	p.DropGoal(uuid, r.Level)
	if err := d.save(p); err != nil {
		d.once("state", err)
	}
	d.gateFollows(p)
	if c != nil {
		d.resizeEvent(c, uuid, r)
	}
	if err := d.advance(p, r.State == policy.ResizeFailed); err != nil {
		d.once("state", err)
	}
}

func (d *Daemon) resizeEvent(c *registry.Container, uuid string, r resize) {
	ev := api.Event{Type: "resize", GPU: uuid, Numbers: map[string]uint64{"old_bytes": r.Old, "desired_bytes": r.Desired}}
	step := fmt.Sprintf("memory.max of %s on %s from %s to %s", whose(c, r.Level), uuid, quota.FormatBytes(r.Old), quota.FormatBytes(r.Desired))
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
	out := api.Resize{Key: quota.KeyMemoryMax, GPU: uuid, Desired: r.Desired, Allocated: r.Allocated, Actuated: r.Actuated, Actual: r.Actual, State: r.State, Why: r.Why}
	if r.State == policy.ResizePending {
		t := d.now().Add(r.Deadline - d.mono())
		out.Deadline = &t
	}
	return out
}
