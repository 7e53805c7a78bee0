// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"math"

	"github.com/gpufence/gpufence/enforcer/api"
	"github.com/gpufence/gpufence/enforcer/ledger"
	"github.com/gpufence/gpufence/enforcer/policy"
	"github.com/gpufence/gpufence/enforcer/registry"
)

// count keeps what must survive: peaks and the samples above memory.max. An event of a limit is
// local to the level whose limit it is; what happened to a container's processes counts for the
// container and its pod, whichever limit it was. The caller holds mu.
func (d *Daemon) count(g *gpuState, out *policy.Output) {
	uuid := g.info.UUID
	pods := map[*registry.Pod]bool{}
	for id, st := range out.Containers {
		c := d.reg.ByID(id)
		if c == nil {
			continue
		}
		p := c.Pod()
		pods[p] = true
		n := c.CountersOn(uuid)
		if st.PeakBytes > n.PeakBytes {
			n.PeakBytes = st.PeakBytes
			d.dirty[p.Name] = true
		}
		// The limit that holds is the lower of the container's and the pod's.
		podOver := out.Pods[p.ID()].OverMax && st.NVMLBytes > 0
		if st.OverMax || podOver {
			n.OverMax++
			d.dirty[p.Name] = true
		}
		if st.OverMax {
			n.Local.OverMax++
		}
	}
	for p := range pods {
		st := out.Pods[p.ID()]
		n := p.CountersOn(uuid)
		if st.PeakBytes > n.PeakBytes {
			n.PeakBytes = st.PeakBytes
			d.dirty[p.Name] = true
		}
		over := st.OverMax
		for _, c := range p.Containers {
			over = over || out.Containers[c.ID()].OverMax
		}
		if over {
			n.Events.OverMax++ // a sample counts once, however many of its limits it is above
		}
		if st.OverMax {
			n.Local.OverMax++
		}
	}
}

// countKill counts a decision and its victims, before the signal. The caller holds mu.
func (d *Daemon) countKill(c *registry.Container, uuid string, k *policy.Kill, victims uint64) {
	n, p := c.CountersOn(uuid), c.Pod().CountersOn(uuid)
	group := uint64(0)
	if k.Group {
		group = 1
	}
	n.OOM++
	n.OOMKill += victims
	n.OOMGroupKill += group
	// As the kernel does: who is killed is local to the victim's level, the decision to whose
	// limit it was.
	n.Local.OOMKill += victims
	n.Local.OOMGroupKill += group
	p.Events.OOM++
	p.Events.OOMKill += victims
	p.Events.OOMGroupKill += group
	if k.Scope == "pod" {
		p.Local.OOM++
	} else {
		n.Local.OOM++
	}
}

// foldReported adds what a pod's processes have reported since the last time to the counters of
// containers and pod. An event of a limit is taken for one of the lower limit, which is the one that
// is met first. The caller holds mu.
func (d *Daemon) foldReported(p *registry.Pod) {
	for _, c := range p.Containers {
		if c.State != registry.Running {
			continue
		}
		for _, g := range c.Grant.GPUs {
			i := p.GPUIndex(g.UUID)
			if i < 0 {
				continue
			}
			now := p.Totals.Of(c.Folder(), i)
			n := c.CountersOn(g.UUID)
			if now == n.Reported {
				continue
			}
			more := ledger.SlotEvents{
				Max: grown(n.Reported.Max, now.Max), High: grown(n.Reported.High, now.High), Device: grown(n.Reported.Device, now.Device),
			}
			n.Reported = now
			own, pod, sum := c.ContainerLimits(g.UUID), p.PodLimits(g.UUID), p.CountersOn(g.UUID)
			plus(&sum.Events.Max, more.Max)
			plus(&sum.Events.High, more.High)
			plus(&sum.Events.Device, more.Device)
			plus(&n.Local.Device, more.Device) // the GPU was full: no limit of ours
			plus(at(own.Max <= pod.Max, &n.Local, &sum.Local, maxOf), more.Max)
			plus(at(own.High <= pod.High, &n.Local, &sum.Local, highOf), more.High)
			d.dirty[p.Name] = true
		}
	}
}

func at(own bool, container, pod *api.Events, field func(*api.Events) *uint64) *uint64 {
	if own {
		return field(container)
	}
	return field(pod)
}

func maxOf(e *api.Events) *uint64  { return &e.Max }
func highOf(e *api.Events) *uint64 { return &e.High }

func grown(from, to uint64) uint64 { return to - min(from, to) }

// plus is a sum that stays at the greatest number: containers say what they like.
func plus(to *uint64, more uint64) {
	if *to > math.MaxUint64-more {
		*to = math.MaxUint64
		return
	}
	*to += more
}
