// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/gpufence/gpufence/enforcer/act"
	"github.com/gpufence/gpufence/enforcer/api"
	"github.com/gpufence/gpufence/enforcer/fence"
	"github.com/gpufence/gpufence/enforcer/gpu"
	"github.com/gpufence/gpufence/enforcer/policy"
	"github.com/gpufence/gpufence/enforcer/quota"
	"github.com/gpufence/gpufence/enforcer/registry"
)

// driverVisits is how often the driver is asked whether its limits are still ours.
const driverVisits = 2 * time.Second

// limiter is the driver fence with what makes it visit.
type limiter struct {
	fence *fence.Driver
	sees  drivers
	kick  chan struct{}
	visit sync.Mutex // held over a visit
}

// drivers is what the driver fence looks at, under its own lock.
type drivers struct {
	mu     sync.Mutex
	gpus   map[string]fence.DriverGPU
	listed map[string]map[policy.ContainerID]listed // by UUID
}

// listed is what NVML lists of live processes, what is listed twice taken off.
type listed struct{ container, pod uint64 }

// DriverGPU implements [fence.DriverGPUs].
func (d *drivers) DriverGPU(uuid string) (fence.DriverGPU, bool) {
	d.mu.Lock()
	defer d.mu.Unlock()
	g, ok := d.gpus[uuid]
	return g, ok
}

// Listed implements [fence.Truth].
func (d *drivers) Listed(id policy.ContainerID, uuid string) (container, pod uint64, ok bool) {
	d.mu.Lock()
	defer d.mu.Unlock()
	l, ok := d.listed[uuid][id]
	return l.container, l.pod, ok
}

// podOf is the pod of a container.
func podOf(id policy.ContainerID) policy.PodID {
	pod, _, _ := strings.Cut(string(id), "/")
	return policy.PodID(pod)
}

// take makes these the GPUs.
func (d *drivers) take(devices []gpu.Device, version string) {
	all := map[string]fence.DriverGPU{}
	for _, dev := range devices {
		info := dev.Info()
		all[info.UUID] = fence.DriverGPU{Limits: gpu.NewLimiter(dev), Version: version, PCI: info.PCI, MIG: info.MIG || info.Parent != ""}
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	d.gpus = all
}

// list takes over what a sample says.
func (d *drivers) list(uuid string, out *policy.Output) {
	all := map[policy.ContainerID]listed{}
	if out.Known {
		for id, st := range out.Containers {
			l := listed{container: st.NVMLBytes - min(st.NVMLBytes, st.SharedBytes)}
			if p, ok := out.Pods[podOf(id)]; ok {
				l.pod = p.NVMLBytes - min(p.NVMLBytes, p.SharedBytes)
			}
			all[id] = l
		}
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.listed == nil {
		d.listed = map[string]map[policy.ContainerID]listed{}
	}
	d.listed[uuid] = all
}

// locate says where in the v2 hierarchy a container and its pod are. The caller holds mu.
func (d *Daemon) locate(s *fence.Subject, c *registry.Container, own act.Cgroup) {
	s.Cgroup = d.host.UnifiedDir(own)
	parent := c.Pod().Cgroup
	if parent == nil {
		parent = d.podCgroup(c, own)
	}
	if parent != nil {
		s.PodCgroup = d.host.UnifiedDir(*parent)
	}
	s.Alone = !c.Key.Engine.Kubernetes()
	for _, o := range c.Pod().Containers {
		if o == c || !o.Active() {
			continue
		}
		for uuid, l := range o.Grant.Container {
			if l.Max < c.Pod().PodLimits(uuid).Max {
				if s.Shadowed == nil {
					s.Shadowed = map[string]bool{}
				}
				s.Shadowed[uuid] = true
			}
		}
	}
}

// promise saves what is about to be promised to a container's cgroup, so that it can be taken back
// after a crash, too.
func (d *Daemon) promise(key api.ContainerKey, s fence.Subject) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	c := d.reg.Lookup(key)
	if c == nil || c.ID() != s.ID {
		return nil // finishRegister says so
	}
	return d.savePromises(c, s)
}

// savePromises is promise for a container that is found already. The caller holds mu.
func (d *Daemon) savePromises(c *registry.Container, s fence.Subject) error {
	same := true
	for _, h := range d.limiter.fence.Intends(s) {
		p := registry.Promise(h)
		i := slices.IndexFunc(c.Promised, func(o registry.Promise) bool { return o.GPU == p.GPU && o.Dir == p.Dir })
		switch {
		case i < 0:
			c.Promised, same = append(c.Promised, p), false
		case c.Promised[i] != p:
			c.Promised[i], same = p, false
		}
	}
	if same {
		return nil
	}
	if err := d.save(c.Pod()); err != nil {
		return stateError(err)
	}
	return nil
}

// runDriver looks after the driver's limits.
func (d *Daemon) runDriver(ctx context.Context) {
	timer := time.NewTicker(driverVisits)
	defer timer.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-timer.C:
		case <-d.limiter.kick:
		}
		d.visitDriver(ctx)
	}
}

// tellDriver asks for a visit now.
func (d *Daemon) tellDriver() {
	select {
	case d.limiter.kick <- struct{}{}:
	default: // one is asked for already
	}
}

// visitDriver brings the driver's limits up to date with the grants, and says what is otherwise than
// before. It calls the driver, so nobody may hold mu. One at a time.
func (d *Daemon) visitDriver(ctx context.Context) {
	d.limiter.visit.Lock()
	defer d.limiter.visit.Unlock()
	d.mu.Lock()
	ready := !d.closed && !d.node.letGo && d.nvmlErr == nil
	var subjects []fence.Subject
	for _, c := range d.reg.Containers() {
		if c.State == registry.Running && c.Cgroup != nil {
			s := d.subject(c)
			if err := d.savePromises(c, s); err != nil {
				continue // said by save; what is not on disk is not promised
			}
			subjects = append(subjects, s)
		}
	}
	d.mu.Unlock()
	if !ready {
		return
	}
	for _, s := range subjects {
		before := d.limiter.fence.Reported(s)
		if d.limiter.fence.Visit(ctx, s) && ctx.Err() == nil {
			d.driverChanged(s, before)
		}
	}
	done, err := d.limiter.fence.Flush(ctx)
	d.once("driver's soft limits", err)
	if len(done) > 0 {
		d.settlePromises(done)
	}
}

// driverChanged publishes what the driver allows now, and says how its limits stand.
func (d *Daemon) driverChanged(s fence.Subject, before map[string]fence.Status) {
	d.mu.Lock()
	defer d.mu.Unlock()
	c := d.reg.ByID(s.ID)
	if d.closed || c == nil {
		return
	}
	d.show()
	d.publish(c.Pod())
	d.writeFiles(c.Pod(), true)
	for uuid, now := range d.limiter.fence.Reported(s) {
		old, had := before[uuid]
		switch {
		case !had || old.State == now.State && old.Why == now.Why:
		case now.State != fence.Proven && old.State == fence.Proven, now.Why != "" && now.State == fence.Proven:
			d.event(about(c, api.Event{Type: "degraded", GPU: uuid, Message: fmt.Sprintf("fence driver of %s is %s on %s: %s", c.Display(), now.State, uuid, now.Why)}))
		case now.State == fence.Proven:
			d.event(about(c, api.Event{Type: "restored", GPU: uuid, Message: fmt.Sprintf("fence driver of %s is proven on %s: %s", c.Display(), uuid, now.Proof)}))
		}
	}
	d.notify()
}

// settlePromises forgets what was taken back.
func (d *Daemon) settlePromises(done []fence.DriverHold) {
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, c := range d.reg.Containers() {
		if c.State == registry.Running || len(c.Promised) == 0 {
			continue
		}
		left := slices.DeleteFunc(slices.Clone(c.Promised), func(p registry.Promise) bool {
			return slices.ContainsFunc(done, func(h fence.DriverHold) bool { return h.GPU == p.GPU && h.Dir == p.Dir })
		})
		if len(left) != len(c.Promised) {
			c.Promised = left
			d.dirty[c.Pod().Name] = true
		}
	}
}

// takePromisesBack is for a container that ends: the driver is told by the next visit. The caller holds
// mu.
func (d *Daemon) takePromisesBack(c *registry.Container) {
	var holds []fence.DriverHold
	for _, p := range c.Promised {
		holds = append(holds, fence.DriverHold(p))
	}
	d.limiter.fence.TakeBack(holds)
	d.tellDriver()
}

// boundByDriver is the most that a page may show of a level's memory.max: a limit that grows is shown
// once the driver allows it. The caller holds mu.
func (d *Daemon) boundByDriver(uuid string, level policy.Level, granted uint64) uint64 {
	if granted == quota.Unlimited {
		return granted
	}
	if level.Container != "" {
		return d.limiter.fence.Bound(level.Container, uuid, granted, false)
	}
	if p := d.podOfLevel(level); p != nil {
		for _, c := range p.Containers {
			granted = min(granted, d.limiter.fence.Bound(c.ID(), uuid, granted, true))
		}
	}
	return granted
}
