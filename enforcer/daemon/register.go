// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/gpufence/gpufence/enforcer/act"
	"github.com/gpufence/gpufence/enforcer/api"
	"github.com/gpufence/gpufence/enforcer/fence"
	"github.com/gpufence/gpufence/enforcer/ledger"
	"github.com/gpufence/gpufence/enforcer/policy"
	"github.com/gpufence/gpufence/enforcer/quota"
	"github.com/gpufence/gpufence/enforcer/registry"
)

// Register implements [server.Service].
func (d *Daemon) Register(ctx context.Context, req api.RegisterRequest) (api.RegisterResponse, error) {
	resp, err := d.register(ctx, req)
	if err != nil {
		var pod api.PodRef
		var name string
		d.mu.Lock()
		if c := d.reg.Lookup(req.Key); c != nil {
			pod, name = c.Pod().Ref, c.Name
		}
		d.mu.Unlock()
		d.refused(req.Key, pod, name, err)
		return api.RegisterResponse{}, err
	}
	return resp, nil
}

func (d *Daemon) register(ctx context.Context, req api.RegisterRequest) (api.RegisterResponse, error) {
	var none api.RegisterResponse
	if err := checkKey(req.Key); err != nil {
		return none, err
	}
	if req.PID <= 1 {
		return none, quota.NewError(quota.CodeBadRequest, "process %d cannot be a container's first", req.PID)
	}
	cgroup, proc, err := d.identify(req.PID)
	if err != nil {
		return none, err
	}

	d.mu.Lock()
	subject, done, err := d.beginRegister(req, cgroup, proc)
	d.mu.Unlock()
	if err != nil || done != nil {
		if done != nil {
			return *done, err
		}
		return none, err
	}

	if err := d.promise(req.Key, subject); err != nil {
		return none, err
	}
	ctx, cancel := context.WithTimeout(ctx, waitForProof)
	defer cancel()
	for {
		// Not under mu: proofs wait for samples.
		var notices []string
		for _, f := range d.fences {
			if _, err := f.Raise(ctx, subject); err != nil {
				// The level says whether the container may start without it.
				notices = append(notices, fmt.Sprintf("fence %s is not up: %v", f.Name(), err))
			}
		}

		d.mu.Lock()
		resp, err := d.finishRegister(req, subject, cgroup, proc, notices)
		d.mu.Unlock()
		var wait passing
		if !errors.As(err, &wait) {
			return resp, err
		}
		if ctx.Err() != nil {
			return none, wait.error
		}
		// What had been proven grew old before it could be used, since others are registered or
		// NVML is slow: there is time for a fresh answer.
	}
}

// identify finds the cgroup of a container's first process, and refuses one that cannot be told
// from others.
func (d *Daemon) identify(pid int) (act.Cgroup, act.Process, error) {
	proc, err := d.host.Process(pid)
	if err == nil && proc.Exiting {
		err = act.ErrGone
	}
	var cgroup act.Cgroup
	if err == nil {
		cgroup, err = d.host.ContainerCgroup(pid, 0)
	}
	if err == nil {
		var again act.Process
		if again, err = d.host.Process(pid); err == nil && again.Start != proc.Start {
			err = act.ErrUnstable
		}
	}
	switch {
	case err == nil:
		return cgroup, proc, nil
	case errors.Is(err, act.ErrGone), errors.Is(err, act.ErrUnstable):
		err = quota.NewError(quota.CodeProcessGone, "the container's first process %d is gone: %w", pid, err).
			WithHint("see why it ended, and start the container again")
	case errors.Is(err, act.ErrCgroupRoot):
		err = quota.NewError(quota.CodeCgroupRoot, "the container's process %d is in the root cgroup, so it cannot be told from the host", pid).
			WithHint("let the engine make a cgroup for it")
	case errors.Is(err, act.ErrCgroupOwn):
		err = quota.NewError(quota.CodeCgroupOwn, "the container's process %d is in the cgroup of gpufence or of the runtime", pid).
			WithHint("let the engine make a cgroup for it (no --cgroups=disabled, no shared cgroup parent as leaf)")
	case errors.Is(err, act.ErrCgroupShared):
		err = quota.NewError(quota.CodeCgroupShared, "the cgroup of the container's process %d holds other processes", pid).
			WithHint("let the engine make a cgroup for it alone")
	default:
		err = quota.NewError(quota.CodeCgroupDisabled, "no cgroup of the container's process %d can be used: %w", pid, err).
			WithHint("let the engine make one (no --cgroups=disabled), and mount /sys/fs/cgroup")
	}
	return act.Cgroup{}, act.Process{}, err
}

// beginRegister checks who wants to register. done is the answer if it is registered already.
func (d *Daemon) beginRegister(req api.RegisterRequest, cgroup act.Cgroup, proc act.Process) (fence.Subject, *api.RegisterResponse, error) {
	c := d.reg.Lookup(req.Key)
	switch {
	case c == nil || c.State == registry.Ended:
		return fence.Subject{}, nil, quota.NewError(quota.CodeNotPrepared, "container %.64q was not prepared, or its preparation ran out", req.Key.ID).
			WithHint("start it through gpufence-runtime")
	case c.State == registry.Running && c.PID == req.PID && c.Start == proc.Start && *c.Cgroup == cgroup:
		resp := d.registered(c, nil)
		return fence.Subject{}, &resp, nil
	case d.mayStart(c.Grant.Mode) != nil:
		return fence.Subject{}, nil, d.mayStart(c.Grant.Mode)
	case c.State == registry.Running:
		return fence.Subject{}, nil, quota.NewError(quota.CodeBadRequest, "container %s is registered with process %d already", c.Display(), c.PID)
	}
	if err := d.cgroupFree(c, cgroup); err != nil {
		return fence.Subject{}, nil, err
	}
	s := d.subject(c)
	d.locate(&s, c, cgroup)
	return s, nil, nil
}

// cgroupFree refuses a cgroup that is, holds, or lies within another container's.
func (d *Daemon) cgroupFree(c *registry.Container, cgroup act.Cgroup) error {
	for _, o := range d.reg.Containers() {
		if o == c || o.State != registry.Running || o.Cgroup.Hierarchy != cgroup.Hierarchy {
			continue
		}
		a, b := o.Cgroup.Path, cgroup.Path
		if a == b && o.Cgroup.Inode != cgroup.Inode {
			continue // an earlier cgroup of that name, whose container housekeeping will end
		}
		if a == b || strings.HasPrefix(a, b+"/") || strings.HasPrefix(b, a+"/") {
			return quota.NewError(quota.CodeCgroupShared, "the container's cgroup %.200s overlaps that of container %s", b, o.Display()).
				WithHint("give each container a cgroup of its own")
		}
	}
	return nil
}

func (d *Daemon) subject(c *registry.Container) fence.Subject {
	grant := c.Grant
	grant.Pod = c.Pod().Limits // what holds now, not what it started with
	s := fence.Subject{ID: c.ID(), Grant: grant, ShimAbsent: c.ShimAbsent, Observed: d.modeOf(c) != quota.ModeEnforce}
	for _, g := range grant.GPUs {
		if gs := d.gpus[g.UUID]; gs != nil && gs.info.Parent != "" {
			if s.Parents == nil {
				s.Parents = map[string]string{}
			}
			s.Parents[g.UUID] = gs.info.Parent
		}
	}
	if c.Cgroup != nil {
		d.locate(&s, c, *c.Cgroup)
	}
	return s
}

// finishRegister decides with the fences up, and makes the container count as running.
func (d *Daemon) finishRegister(req api.RegisterRequest, subject fence.Subject, cgroup act.Cgroup, proc act.Process, notices []string) (api.RegisterResponse, error) {
	var none api.RegisterResponse
	c := d.reg.Lookup(req.Key)
	if c == nil || c.ID() != subject.ID || c.State != registry.Prepared {
		return none, quota.NewError(quota.CodeNotPrepared, "container %.64q changed while it was registered", req.Key.ID).WithHint("start it again")
	}
	if err := d.cgroupFree(c, cgroup); err != nil {
		return none, err
	}
	enforce := d.modeOf(c) == quota.ModeEnforce
	if !c.Held && enforce {
		// Its bytes went back meanwhile: they must still be there.
		c.Held = true
		for _, makeRoom := range d.roomTurns(len(c.Grant.GPUs)) {
			for _, g := range c.Grant.GPUs {
				_, err := d.usable(g.UUID)
				if err == nil {
					p := c.Pod()
					want := p.MinBytes(g.UUID)
					_, err = d.admit(g.UUID, p, p.Ref.Namespace, d.cfg.Policy.For(p.Ref.Namespace), want, makeRoom)
				}
				if err != nil {
					c.Held = false
					return none, err
				}
			}
		}
	}
	level := fence.Level(d.fences, subject)
	if !fence.Reaches(level, c.Grant.Require) {
		err := quota.NewError(quota.CodeLevelNotReached, "the container requires level %s, and this node's fences reach %s for it (%s)",
			c.Grant.Require, level, fence.Missing(d.fences, subject, c.Grant.Require)).WithHint("see `gpufence inspect` and nvidia-smi, or require less")
		switch {
		case enforce && fence.Reaches(d.watch.Level(), c.Grant.Require):
			return none, passing{err} // a newer sample may prove the watch
		case enforce:
			return none, err
		}
		notices = append(notices, "would be refused: "+err.Error())
	}
	if !enforce {
		level = quota.LevelNone // nothing is enforced, so nothing can be relied on
	}
	if now, err := d.host.Process(req.PID); err != nil || now.Start != proc.Start || now.Exiting {
		return none, quota.NewError(quota.CodeProcessGone, "the container's first process %d ended while it was registered", req.PID).
			WithHint("see why it ended, and start the container again")
	}
	before, podCgroup := *c, c.Pod().Cgroup
	if parent := d.podCgroup(c, cgroup); parent != nil {
		c.Pod().Cgroup = parent
	}
	c.State, c.PID, c.Start, c.Cgroup, c.Level = registry.Running, proc.PID, proc.Start, &cgroup, level
	c.StartedAt, c.Priority = d.now(), d.host.Priority(proc.PID)
	if err := d.save(c.Pod()); err != nil {
		pod := c.Pod()
		*c, pod.Cgroup = before, podCgroup
		delete(d.dirty, pod.Name)
		return none, stateError(err)
	}
	d.facts.version++
	d.publish(c.Pod())
	d.writeFiles(c.Pod(), true)
	resp := d.registered(c, notices)
	d.event(about(c, api.Event{Type: "registered", GPU: firstGPU(c), Level: level, Message: fmt.Sprintf("%s runs with level %s: %s", c.Display(), level, describe(c)),
		Numbers: map[string]uint64{"pid": uint64(c.PID)}}))
	d.notify()
	d.poke()
	return resp, nil
}

// podCgroup is the cgroup of a container's pod: the parent of its own, if it is called after the
// pod, nil otherwise. Only Kubernetes has such.
func (d *Daemon) podCgroup(c *registry.Container, own act.Cgroup) *act.Cgroup {
	uid := c.Pod().Ref.UID
	if !c.Key.Engine.Kubernetes() || len(uid) < 8 {
		return nil
	}
	parent, err := d.host.Parent(own)
	if err != nil {
		return nil // the root's child, or gone: then the container's life is the pod's
	}
	name := filepath.Base(parent.Path)
	// systemd writes dashes as underscores.
	if !strings.Contains(name, uid) && !strings.Contains(name, strings.ReplaceAll(uid, "-", "_")) {
		return nil
	}
	return &parent
}

func firstGPU(c *registry.Container) string {
	if len(c.Grant.GPUs) == 0 {
		return ""
	}
	return c.Grant.GPUs[0].UUID
}

func (d *Daemon) registered(c *registry.Container, notices []string) api.RegisterResponse {
	return api.RegisterResponse{Level: c.Level, Fences: fence.Report(d.fences, d.subject(c)), Notices: notices}
}

// Unregister implements [server.Service]. A container whose processes still live stays: whoever
// says it is gone is wrong, and its memory must stay accounted.
func (d *Daemon) Unregister(_ context.Context, req api.UnregisterRequest) error {
	if err := checkKey(req.Key); err != nil {
		return err
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	c := d.reg.Lookup(req.Key)
	if c == nil || c.State == registry.Ended {
		return nil
	}
	if c.State == registry.Running {
		if pids, err := d.living(c); err == nil && len(pids) > 0 {
			d.log.WithField("container", c.Key.ID).WithField("pids", pids).Warn("unregister came while processes live: the container stays until they are gone")
			return nil
		}
	}
	d.end(c)
	return nil
}

// living are the processes in a container's cgroup that have not exited.
func (d *Daemon) living(c *registry.Container) ([]int, error) {
	if ok, err := d.host.Exists(*c.Cgroup); err != nil || !ok {
		return nil, err
	}
	pids, err := d.host.Procs(*c.Cgroup)
	if err != nil {
		if errors.Is(err, act.ErrGone) {
			return nil, nil
		}
		return nil, err
	}
	return slices.DeleteFunc(pids, func(pid int) bool {
		p, err := d.host.Process(pid)
		return errors.Is(err, act.ErrGone) || err == nil && p.Exiting
	}), nil
}

// aliveInit says whether a running container's first process is still the same one.
func (d *Daemon) aliveInit(c *registry.Container) bool {
	p, err := d.host.Process(c.PID)
	return err == nil && p.Start == c.Start && !p.Exiting
}

// end makes a container count as ended: its promise is free at once, its memory is followed until
// NVML has let it go. The caller holds mu.
func (d *Daemon) end(c *registry.Container) {
	p := c.Pod()
	if c.State == registry.Running {
		c.Fences = fence.Report(d.fences, d.subject(c))
		c.EndReason = endReason(c)
		for _, g := range c.Grant.GPUs {
			if gs := d.gpus[g.UUID]; gs != nil {
				gs.draining[c.ID()] = drain{d.containerFact(c, g.UUID), d.mono()}
			}
		}
	} else {
		c.EndReason = "never started"
	}
	if rt := d.runtime[p.Name]; rt != nil && rt.pages != nil {
		d.readLedger(p, rt) // the last that its processes reported
	}
	c.Reported = map[string]ledger.SlotEvents{}
	for _, g := range c.Grant.GPUs {
		if i := p.GPUIndex(g.UUID); i >= 0 {
			c.Reported[g.UUID] = p.Totals.Of(c.Folder(), i)
		}
	}
	p.Totals.Forget(c.Folder())
	d.endResizes(c)
	d.lower(c)
	delete(d.empty, c.ID())
	c.State, c.Held, c.EndedAt = registry.Ended, false, d.now()
	d.facts.version++
	d.dropPages(c)
	if err := d.save(p); err != nil {
		d.once("state", err)
	}
	d.event(about(c, api.Event{Type: "ended", GPU: firstGPU(c), Message: fmt.Sprintf("%s ended: %s", c.Display(), c.EndReason)}))
	d.notify()
}

// lower takes the fences away from a container. The caller holds mu.
func (d *Daemon) lower(c *registry.Container) {
	for _, f := range d.fences {
		if err := f.Lower(context.Background(), d.subject(c)); err != nil {
			d.once("fence "+f.Name(), err)
		}
	}
	d.takePromisesBack(c)
}

// dropPages removes a container's shared pages, and the pod's with the last one.
func (d *Daemon) dropPages(c *registry.Container) {
	if !c.Pages {
		return
	}
	p := c.Pod()
	rt := d.runtimeOf(p)
	var errs []error
	if page := rt.containers[c.Index]; page != nil {
		errs = append(errs, page.Close())
		delete(rt.containers, c.Index)
	}
	if rt.pages != nil {
		errs = append(errs, rt.pages.RemoveContainer(c.Folder()))
	}
	if err := os.Remove(d.preloadPath(c)); err != nil && !errors.Is(err, fs.ErrNotExist) {
		errs = append(errs, err)
	}
	c.Pages = false
	if !p.HasPages() {
		if rt.pages != nil {
			errs = append(errs, rt.pages.Remove())
			rt.pages, rt.snapshot = nil, nil
			clear(rt.owners)
			// The next ledger of the pod begins with empty slots.
			p.Totals = &ledger.Totals{}
		}
		// Also where a crash has taken the pages before: who comes after finds no pages to remove.
		if err := os.Remove(filepath.Dir(d.preloadPath(c))); err != nil && !errors.Is(err, fs.ErrNotExist) {
			errs = append(errs, err)
		}
	}
	d.once("pages of pod "+p.Name, errors.Join(errs...))
}

// remove forgets a container and everything of it. The caller holds mu.
func (d *Daemon) remove(c *registry.Container) {
	p := c.Pod()
	if c.Active() {
		d.lower(c) // a start may have failed after they were raised
	}
	d.dropPages(c)
	if !d.draining(c.ID()) {
		d.facts.disown(c.ID())
	}
	for _, g := range d.gpus {
		if _, draining := g.draining[c.ID()]; !draining {
			g.machine.Forget(c.ID())
		}
	}
	d.seen.forget(c.ID())
	d.facts.version++
	if d.reg.Remove(c) {
		for _, g := range d.gpus {
			g.machine.ForgetPod(p.ID())
		}
		delete(d.runtime, p.Name)
		d.runtimes++
		delete(d.dirty, p.Name)
		d.unsay(p.Name)
		if err := d.store.Delete(p.Name); err != nil {
			d.once("state", err)
		}
		return
	}
	d.dirty[p.Name] = true
}

// collect ends what is gone without a word, gives back holds that ran out, and forgets what ended
// long ago.
func (d *Daemon) collect() {
	d.dropGone()
	now, told := d.now(), d.facts.look()
	d.collected++
	for _, c := range d.reg.Containers() {
		switch c.State {
		case registry.Running:
			if d.isGone(c, told) {
				d.end(c)
			}
		case registry.Prepared:
			age := since(now, c.PreparedAt)
			if c.Held && age >= d.cfg.PrepareHold {
				c.Held = false
				d.dirty[c.Pod().Name] = true
				d.event(about(c, api.Event{Type: "hold-expired", GPU: firstGPU(c), Message: fmt.Sprintf(
					"%s was prepared and not started within %s: its memory.min is free again", c.Display(), d.cfg.PrepareHold)}))
				d.notify()
			}
			if age >= d.cfg.PagesHold {
				d.end(c)
			}
		case registry.Ended:
			last := c.Pod().Cgroup != nil && len(c.Pod().Containers) == 1
			if since(now, c.EndedAt) >= d.cfg.EndedKeep && !d.draining(c.ID()) && !last {
				d.remove(c)
			}
		}
	}
	d.releasePods()
}

// releasePods takes back what pods are promised whose cgroups are gone. The caller holds mu.
func (d *Daemon) releasePods() {
	for _, p := range d.reg.Pods() {
		// Where a container runs, the cgroup that it is in stays.
		if p.Cgroup == nil || slices.ContainsFunc(p.Containers, func(c *registry.Container) bool { return c.State == registry.Running }) {
			continue
		}
		if exists, err := d.host.Exists(*p.Cgroup); err == nil && !exists {
			p.Cgroup = nil
			d.dirty[p.Name] = true
			d.notify() // its memory.min is free
		}
	}
}

// draining says whether a container's memory is still followed.
func (d *Daemon) draining(id policy.ContainerID) bool {
	return slices.ContainsFunc(slices.Collect(maps.Values(d.gpus)), func(g *gpuState) bool { _, ok := g.draining[id]; return ok })
}

// isGone says whether a running container has ended without an unregister: its cgroup is gone, or
// nothing has lived in it for a while (an engine may keep the cgroup of a container whose processes
// have exited). told: exits were told until now.
func (d *Daemon) isGone(c *registry.Container, told bool) bool {
	lives := told && d.facts.lives(c.PID, c.Start)
	// The cgroup that a living process is in stays. Not all have to be looked at for a process that
	// was moved to another.
	if lives && (d.collected+c.Start)%cgroupEvery != 0 {
		delete(d.empty, c.ID())
		return false
	}
	exists, err := d.host.Exists(*c.Cgroup)
	if err != nil {
		d.once("cgroup of "+string(c.ID()), err)
		return false
	}
	if !exists {
		return true
	}
	if lives || d.aliveInit(c) {
		delete(d.empty, c.ID())
		return false
	}
	pids, err := d.living(c)
	if err != nil || len(pids) > 0 {
		delete(d.empty, c.ID())
		return false
	}
	first, ok := d.empty[c.ID()]
	if !ok {
		d.empty[c.ID()] = d.mono()
		return false
	}
	if d.mono()-first < emptyLimit {
		return false
	}
	delete(d.empty, c.ID())
	return true
}

func (d *Daemon) runHousekeeping(ctx context.Context) {
	t := time.NewTicker(housekeeping)
	defer t.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-t.C:
			d.housekeep()
		}
	}
}
