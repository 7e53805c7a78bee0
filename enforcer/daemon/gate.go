// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/gpufence/gpufence/bpf"
	"github.com/gpufence/gpufence/enforcer/api"
	"github.com/gpufence/gpufence/enforcer/fence"
	"github.com/gpufence/gpufence/enforcer/metrics"
	"github.com/gpufence/gpufence/enforcer/policy"
	"github.com/gpufence/gpufence/enforcer/quota"
	"github.com/gpufence/gpufence/enforcer/registry"
)

// runGate opens the gate, which takes a moment, puts it around who runs already, and tells of refusals.
func (d *Daemon) runGate(ctx context.Context) {
	d.gate.Open(ctx)
	d.mu.Lock()
	d.gateDriver()
	// Under mu: who registers meanwhile is raised by itself, and nobody is forgotten between the two.
	err := errors.Join(d.gateHolds(ctx), d.gate.Adopt())
	if err == nil {
		err = d.gate.Supersede()
	}
	d.denyUnmanaged()
	d.mu.Unlock()
	d.once("gate", err)
	d.group.Go(func() { d.runExempt(ctx) })
	told := gateTold{perSecond: gateEventsPerSecond, of: map[gateWhom]*gateBudget{}}
	err = d.gate.Events(ctx, func(e fence.Denial) {
		d.gateDenied(e, told.take(gateWhom{e.Container, e.Kind == bpf.Changed}, d.mono()))
	})
	if err != nil && ctx.Err() == nil {
		d.once("gate's events", err)
	}
	<-ctx.Done() // it stays closed without us
	d.once("gate", d.gate.Close())
}

// gateHolds puts the gate around all that run. The caller holds mu.
func (d *Daemon) gateHolds(ctx context.Context) error { return d.gateAround(ctx, d.reg.Containers()) }

// gateFollows tells the gate of changed limits of a pod. The caller holds mu.
func (d *Daemon) gateFollows(p *registry.Pod) {
	d.once("gate of pod "+p.Name, d.gateAround(context.Background(), p.Containers))
}

func (d *Daemon) gateAround(ctx context.Context, containers []*registry.Container) error {
	var errs []error
	for _, c := range containers {
		if c.State == registry.Running && c.Cgroup != nil {
			errs = append(errs, d.gate.Resize(ctx, d.subject(c)))
		}
	}
	return errors.Join(errs...)
}

// runExempt keeps the kernel's lists of exempt cgroups and of guarded devices those of what there is.
func (d *Daemon) runExempt(ctx context.Context) {
	t := time.NewTicker(time.Second)
	defer t.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-t.C:
			d.once("unmanaged-exempt", d.gate.RefreshExempt())
			d.once("gate's devices", d.gate.RefreshDevices())
		}
	}
}

// gateDriver tells the gate which driver is loaded. The caller holds mu.
func (d *Daemon) gateDriver() {
	if d.driver != "" && !d.node.letGo {
		d.once("gate's driver", d.gate.Driver(d.driver))
	}
}

// gateEventsPerSecond is how many denials of a container, and of all that is in none, are told. The kernel has the
// same bound for managed cgroups; who is in none has no account there.
const gateEventsPerSecond = 10

// gateTold is who was told of already. It is used by one goroutine.
type gateTold struct {
	perSecond int
	of        map[gateWhom]*gateBudget
}

// gateWhom has a bound of its own: nobody hides a changed request behind others.
type gateWhom struct {
	id   policy.ContainerID
	race bool
}

type gateBudget struct {
	second time.Duration
	told   int
	untold uint64
}

// gateShare is what of a denial is told: itself or not, and how many before it were not.
type gateShare struct {
	tell   bool
	untold uint64
}

func (t *gateTold) take(id gateWhom, now time.Duration) gateShare {
	second := now.Truncate(time.Second)
	b := t.of[id]
	if b == nil {
		for other, o := range t.of { // those that have come to rest, or ended
			if second-o.second >= time.Minute {
				delete(t.of, other)
			}
		}
		b = &gateBudget{second: second}
		t.of[id] = b
	}
	if b.second != second {
		b.second, b.told = second, 0
	}
	if b.told >= t.perSecond {
		b.untold++
		return gateShare{}
	}
	b.told++
	s := gateShare{tell: true, untold: b.untold}
	b.untold = 0
	return s
}

// gateDenied counts a denial in the kernel, and tells of it where there have not been too many.
func (d *Daemon) gateDenied(e fence.Denial, share gateShare) {
	reason := e.Kind.String()
	if strings.HasPrefix(reason, "kind-") {
		reason = "other" // of programs that are newer than we are: labels stay few
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	c := d.reg.ByID(e.Container)
	denial := metrics.Denial{Reason: reason, Enforced: e.Enforced, Bytes: e.SizeBytes}
	if c != nil {
		denial.Namespace, denial.Pod, denial.Container = c.Pod().Ref.Namespace, c.Pod().Ref.Name, cmp.Or(c.Name, c.Key.ID)
	}
	d.node.metrics.Denied(denial)
	if !share.tell {
		return
	}
	ev := gateEvent(e, reason)
	if share.untold > 0 {
		ev.Numbers["untold"] = share.untold
		ev.Message += fmt.Sprintf("; %d more were not told", share.untold)
	}
	if c != nil {
		ev = about(c, ev)
		ev.GPU = firstGPU(c)
	}
	d.event(ev)
}

// gateEvent says it in a sentence.
func gateEvent(e fence.Denial, reason string) api.Event {
	ev := api.Event{Type: "gate-refused", Numbers: map[string]uint64{
		"pid": uint64(max(0, e.PID)), "bytes": e.SizeBytes, "charged_bytes": e.UsedBytes, "limit_bytes": e.LimitBytes,
	}}
	who := fmt.Sprintf("process %d (%.16s)", e.PID, e.Comm)
	what := reason
	if e.SizeBytes > 0 {
		what += ", " + quota.HumanBytes(e.SizeBytes) + " with " + quota.HumanBytes(e.UsedBytes) + " charged"
	}
	switch {
	case e.Kind == bpf.Changed && e.Enforced:
		ev.Type, ev.Message = "gate-race", who+" changed a request after the gate had read it, and was killed"
	case e.Kind == bpf.Changed:
		ev.Type, ev.Message = "gate-race", who+" changed a request after the gate had read it; the gate only counts here"
	case e.Enforced:
		ev.Message = "the gate refused " + who + ": " + what
	default:
		ev.Type, ev.Message = "gate-would-refuse", "the gate, which only counts here, would have refused "+who+": "+what
	}
	return ev
}

// gateSample compares what NVML says with what the gate has charged. It comes with every answer, also with those
// that say what the last one said. The caller holds mu.
func (d *Daemon) gateSample(g *gpuState, out *policy.Output) {
	if !out.Known || !d.gate.Up() {
		return
	}
	// What nobody asks for is the contexts of those that NVML lists. How many slots a container has, and what it says in
	// them of managed memory, is its own word, and would hide what it has forged.
	contexts := map[policy.ContainerID]uint64{}
	for _, p := range out.Processes {
		if p.Listed && p.State == "live" {
			contexts[p.Container]++
		}
	}
	for id, st := range out.Containers {
		c := d.reg.ByID(id)
		if c == nil || c.State != registry.Running || !st.Known {
			continue
		}
		// What ends is listed until NVML lets it go, and the gate has given it back.
		kill, why, err := d.gate.Sample(id, g.info.UUID, g.outAt, g.outAt-g.sample.Began, st.NVMLBytes-min(st.NVMLBytes, st.SharedBytes), contexts[id]*g.quota.ContextBytes)
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
