// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"

	"github.com/gpufence/gpufence/enforcer/api"
	"github.com/gpufence/gpufence/enforcer/fence"
	"github.com/gpufence/gpufence/enforcer/gpu"
	"github.com/gpufence/gpufence/enforcer/policy"
	"github.com/gpufence/gpufence/enforcer/quota"
	"github.com/gpufence/gpufence/enforcer/registry"
)

// instances is what the mig fence looks at, under its own lock.
type instances struct {
	mu   sync.Mutex
	seen map[string]instance // by UUID
}

type instance struct {
	fence.Instance
	pods map[string]string // who has it, by pod: a container's name
}

// Instance implements [fence.Instances].
func (i *instances) Instance(id policy.ContainerID, uuid string) (fence.Instance, bool) {
	i.mu.Lock()
	defer i.mu.Unlock()
	in, ok := i.seen[uuid]
	out := in.Instance
	own, _, _ := strings.Cut(string(id), "/")
	for _, pod := range slices.Sorted(maps.Keys(in.pods)) {
		if id != "" && pod != own { // without a container, the question is what one could have
			out.Others = append(slices.Clip(out.Others), in.pods[pod])
		}
	}
	return out, ok
}

// lookAtInstances keeps up to date who has which MIG instance. The caller holds mu.
func (d *Daemon) lookAtInstances() {
	if !d.anyInstance {
		return
	}
	seen := map[string]instance{}
	for uuid, g := range d.gpus {
		if g.info.Parent == "" || g.gone {
			continue
		}
		in := instance{Instance: fence.Instance{GPU: g.info.Parent}, pods: map[string]string{}}
		switch {
		case !g.have:
			in.Why = "NVML was not asked yet"
		case g.sample.Err != nil || g.sample.MemoryErr != nil:
			in.Why = g.sample.Why()
		default:
			in.Bytes = g.sample.Memory.TotalBytes - min(g.sample.Memory.TotalBytes, max(g.sample.Memory.ReservedBytes, g.info.ReservedBytes))
		}
		for _, p := range g.out.Unmanaged {
			in.Others = append(in.Others, fmt.Sprintf("process %d (%s), which did not come through gpufence", p.PID, p.Comm))
		}
		for _, p := range d.reg.Pods() {
			for _, c := range p.Containers {
				if (c.State == registry.Running || c.Holds(uuid)) && hasGPU(c, uuid) {
					in.pods[p.Name] = c.Display()
				}
			}
		}
		seen[uuid] = in
	}
	d.instances.mu.Lock()
	d.instances.seen = seen
	d.instances.mu.Unlock()
}

// byCapabilities makes MIG instances of the nodes of /dev/nvidia-caps that open them. The node of
// their GPU is then no selector: without an instance's it opens nothing of a GPU in MIG mode. The
// caller holds mu.
func (d *Daemon) byCapabilities(selectors []string) ([]string, error) {
	isCap := func(s string) bool { _, ok := gpu.CapabilityNode(s); return ok }
	if !slices.ContainsFunc(selectors, isCap) {
		return selectors, nil
	}
	caps, err := gpu.Capabilities(d.capabilities)
	if err != nil {
		return nil, quota.NewError(quota.CodeNoSuchGPU, "which MIG instances the container has cannot be told: %w", err).
			WithHint("name them by UUID, or see %s", d.capabilities)
	}
	var out []string
	parents := map[string]bool{}
	for _, s := range selectors {
		minor, ok := gpu.CapabilityNode(s)
		if !ok {
			out = append(out, s)
			continue
		}
		c, known := caps[minor]
		if !known || c.CI < 0 {
			continue // MIG's monitor or configuration, or the instance around the one that is named, too
		}
		found := false
		for _, i := range d.infos() {
			if i.Parent != "" && i.Minor == c.Minor && i.GI == c.GI && i.CI == c.CI {
				found = true
				out = append(out, i.UUID)
				parents[fmt.Sprintf("/dev/nvidia%d", i.Minor)] = true
			}
		}
		if !found {
			return nil, quota.NewError(quota.CodeGPUUnknown, "%s opens compute instance %d of GPU instance %d on /dev/nvidia%d, which NVML does not list", s, c.CI, c.GI, c.Minor).
				WithHint("try again in some seconds if it was made just now")
		}
	}
	return slices.DeleteFunc(out, func(s string) bool { return parents[s] }), nil
}

// rescan reads the set of GPUs again, which changes while NVML stays up: MIG mode is switched, and
// instances are made and destroyed. What is not listed any more is unknown from now on. It holds
// the lock that keeps NVML open.
func (d *Daemon) rescan(ctx context.Context) error {
	d.node.nvml.Lock()
	defer d.node.nvml.Unlock()
	d.mu.Lock()
	open := d.nvmlErr == nil && !d.node.letGo && !d.node.closed && len(d.gpus) > 0
	d.mu.Unlock()
	if !open {
		return nil
	}
	devices, err := d.lib.Devices()
	if err != nil {
		return err // a list that is not whole is no proof that anything is gone
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.closed || d.node.letGo {
		return nil
	}
	var split []gpu.Info
	listed := map[string]bool{}
	var fresh []gpu.Device
	for _, dev := range devices {
		switch info := dev.Info(); {
		case info.MIG:
			split = append(split, info)
		default:
			listed[info.UUID] = true
			fresh = append(fresh, dev)
		}
	}
	same := len(listed) == len(d.order) && len(split) == len(d.split)
	for _, uuid := range d.order {
		same = same && listed[uuid]
	}
	for i, s := range split {
		same = same && d.split[i].UUID == s.UUID
	}
	if same {
		return nil
	}
	d.takeDevices(ctx, fresh, split)
	d.event(api.Event{Type: "gpus-found", Message: fmt.Sprintf("the node's GPUs have changed: there are %d, MIG instances among them, and %d in MIG mode", len(fresh), len(split))})
	d.poke()
	d.notify()
	return nil
}

// takeDevices makes these the node's GPUs. One that is known keeps its state; of one that is not
// among them nothing is known from now on, and what was granted on it is degraded. The caller holds
// mu.
func (d *Daemon) takeDevices(ctx context.Context, devices []gpu.Device, split []gpu.Info) {
	d.order, d.split = nil, split
	d.limiter.sees.take(devices, d.driver)
	d.gateDriver()
	d.anyInstance = false
	for _, dev := range devices {
		info := dev.Info()
		d.order = append(d.order, info.UUID)
		d.anyInstance = d.anyInstance || info.Parent != ""
		g := d.gpus[info.UUID]
		if g == nil {
			g = &gpuState{
				machine: policy.NewGPU(info.UUID, d.pol), lastKnown: d.mono(),
				context: map[int]contextSeen{}, draining: map[policy.ContainerID]drain{}, foreign: map[procID]bool{},
			}
			d.gpus[info.UUID] = g
			d.restoreResizes(info.UUID, g)
		}
		g.info, g.gone = info, false
		g.quota = gpu.Quota(info, gpu.Reserve{Bytes: d.cfg.ReserveBytes, Share: d.cfg.ReserveShare}, d.cfg.ContextBytes)
		g.sampler = gpu.NewSampler(dev)
	}
	// Whose instances those are that run, and which devices there are, is known now.
	d.once("gate", d.gateHolds(ctx))
	defer d.dropGone()
	for uuid, g := range d.gpus {
		if g.gone || slices.Contains(d.order, uuid) {
			continue
		}
		g.gone, g.have, g.last.made, g.still = true, false, false, false
		why := fmt.Sprintf("GPU %s is not on this node any more", uuid)
		if slices.ContainsFunc(split, func(i gpu.Info) bool { return i.UUID == uuid }) {
			why = fmt.Sprintf("GPU %s is in MIG mode now", uuid)
		}
		g.goneWhy = why
		g.out.Known, g.out.Why = false, why
		for id, st := range g.out.Containers {
			st.Known = false
			g.out.Containers[id] = st
		}
		d.seen.set(uuid, fence.SampleInfo{Complete: false, Why: why}, nil)
		d.event(api.Event{Type: "gpu-gone", Code: string(quota.CodeNoSuchGPU), GPU: uuid, Message: why + ": no container starts there"})
		for _, c := range d.reg.Containers() {
			if c.State == registry.Running && hasGPU(c, uuid) {
				d.event(about(c, api.Event{Type: "degraded", Code: string(quota.CodeNoSuchGPU), GPU: uuid,
					Message: fmt.Sprintf("nothing holds the limits of %s there: %s", c.Display(), why)}))
			}
		}
	}
}

// dropGone forgets GPUs that are gone and that nobody has any more. The caller holds mu.
func (d *Daemon) dropGone() {
	for uuid, g := range d.gpus {
		if !g.gone || g.inFlight || len(g.draining) > 0 && !d.drainedAway(g) {
			continue
		}
		used := slices.ContainsFunc(d.reg.Containers(), func(c *registry.Container) bool { return c.Active() && hasGPU(c, uuid) })
		if !used {
			delete(d.gpus, uuid)
		}
	}
}

// drainedAway says whether nothing is to be learnt any more of the containers that ended on a GPU
// that is gone: nobody answers for it.
func (d *Daemon) drainedAway(g *gpuState) bool {
	for id, dr := range g.draining {
		if d.mono()-dr.ended > drainLimit {
			delete(g.draining, id)
		}
	}
	return len(g.draining) == 0
}
