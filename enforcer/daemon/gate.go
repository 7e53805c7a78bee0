// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"context"
	"errors"
	"fmt"

	"github.com/gpufence/gpufence/bpf"
	"github.com/gpufence/gpufence/enforcer/api"
	"github.com/gpufence/gpufence/enforcer/fence"
	"github.com/gpufence/gpufence/enforcer/policy"
	"github.com/gpufence/gpufence/enforcer/quota"
	"github.com/gpufence/gpufence/enforcer/registry"
)

// runGate opens the gate, which takes a moment, puts it around who runs already, and tells of refusals.
func (d *Daemon) runGate(ctx context.Context) {
	d.gate.Open(ctx)
	d.mu.Lock()
	var subjects []fence.Subject
	for _, c := range d.reg.Containers() {
		if c.State == registry.Running && c.Cgroup != nil {
			subjects = append(subjects, d.subject(c))
		}
	}
	d.gateDriver()
	// Under mu: who registers meanwhile is raised by itself, and nobody is forgotten between the two.
	var errs []error
	for _, s := range subjects {
		errs = append(errs, d.gate.Resize(ctx, s))
	}
	errs = append(errs, d.gate.Adopt())
	d.denyUnmanaged()
	d.mu.Unlock()
	d.once("gate", errors.Join(errs...))
	if err := d.gate.Events(ctx, d.gateRefused); err != nil && ctx.Err() == nil {
		d.once("gate's events", err)
	}
	<-ctx.Done() // it stays closed without us
	d.once("gate", d.gate.Close())
}

// gateDriver tells the gate which driver is loaded. The caller holds mu.
func (d *Daemon) gateDriver() {
	if d.driver != "" && !d.node.letGo {
		d.once("gate's driver", d.gate.Driver(d.driver))
	}
}

// gateRefused is the event of a refusal in the kernel. They come rate-limited.
func (d *Daemon) gateRefused(id policy.ContainerID, e bpf.Event) {
	d.mu.Lock()
	defer d.mu.Unlock()
	ev := api.Event{Type: "gate-refused", Message: fmt.Sprintf("the gate refused process %d (%.16s): %s", e.PID, e.Comm, e.Kind),
		Numbers: map[string]uint64{"pid": uint64(max(0, e.PID)), "bytes": e.SizeBytes, "charged_bytes": e.UsedBytes, "limit_bytes": e.LimitBytes}}
	if e.SizeBytes > 0 {
		ev.Message += ", " + quota.HumanBytes(e.SizeBytes) + " with " + quota.HumanBytes(e.UsedBytes) + " charged"
	}
	if e.Kind == bpf.Changed {
		ev.Type = "gate-race"
		ev.Message = fmt.Sprintf("process %d (%.16s) changed a request after the gate had read it, and was killed", e.PID, e.Comm)
	}
	if c := d.reg.ByID(id); c != nil {
		ev = about(c, ev)
		ev.GPU = firstGPU(c)
	}
	d.event(ev)
}

// gateSample compares what NVML says with what the gate has charged. The caller holds mu.
func (d *Daemon) gateSample(g *gpuState, out *policy.Output) {
	if !out.Known {
		return
	}
	processes := map[policy.ContainerID]uint64{}
	for _, p := range out.Processes {
		processes[p.Container]++
	}
	for id, st := range out.Containers {
		c := d.reg.ByID(id)
		if c == nil || c.State != registry.Running || len(c.Grant.GPUs) != 1 || !st.Known {
			continue // one account over several GPUs cannot be compared with one of them
		}
		// What ends is listed until NVML lets it go, and the gate has given it back.
		kill, why, err := d.gate.Sample(id, g.outAt, st.NVMLBytes-min(st.NVMLBytes, st.SharedBytes), processes[id]*g.quota.ContextBytes+st.ManagedBytes)
		d.once("gate of "+string(id), err)
		if !kill || d.modeOf(c) != quota.ModeEnforce {
			continue
		}
		k := &policy.Kill{Container: id, Pod: podOf(id), Scope: "forged-free", Group: true, UsedBytes: st.NVMLBytes,
			Reason: "forged-free: " + why, Message: "GPU memory limit evaded: " + why}
		for _, p := range out.Processes {
			if p.Container == id && p.State == "live" {
				k.PIDs = append(k.PIDs, p.PID)
				if k.PID == 0 {
					k.PID, k.Start = p.PID, p.Start
				}
			}
		}
		d.startKill(g, k)
	}
}
