// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"context"
	"errors"
	"fmt"
	"math"
	"os"
	"time"

	"github.com/gpufence/gpufence/enforcer/api"
	"github.com/gpufence/gpufence/enforcer/api/server"
	"github.com/gpufence/gpufence/enforcer/fence"
	"github.com/gpufence/gpufence/enforcer/ledger"
	"github.com/gpufence/gpufence/enforcer/policy"
	"github.com/gpufence/gpufence/enforcer/quota"
	"github.com/gpufence/gpufence/enforcer/registry"
)

// show saves what lags behind, so that nothing is shown that a crash would take back. The caller
// holds mu. If it cannot be saved, the error is in the log, and showing is better than not.
func (d *Daemon) show() {
	_ = d.saveDirty() // said by itself
}

// Containers implements [server.Service].
func (d *Daemon) Containers(context.Context) ([]api.Container, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.show()
	out := []api.Container{}
	for _, c := range d.reg.Containers() {
		out = append(out, d.view(c))
	}
	return out, nil
}

// Container implements [server.Service].
func (d *Daemon) Container(_ context.Context, id string) (api.Container, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.show()
	c, err := d.reg.Find(id)
	if err != nil {
		return api.Container{}, err
	}
	return d.view(c), nil
}

func (d *Daemon) view(c *registry.Container) api.Container {
	p := c.Pod()
	v := api.Container{
		Key: c.Key, Pod: p.Ref, Name: c.Name, State: string(c.State), PID: c.PID,
		Mode: d.modeOf(c), Level: c.Level, Require: c.Grant.Require, OOMGroup: c.Grant.OOMGroup,
		PreparedAt: c.PreparedAt, StartedAt: timeOrNil(c.StartedAt), EndedAt: timeOrNil(c.EndedAt), EndReason: c.EndReason,
		Generation: c.Generation, ChangedBy: c.ChangedBy, ChangedAt: timeOrNil(c.ChangedAt),
		GPUs: []api.ContainerGPU{}, Fences: []api.Fence{},
	}
	if c.Cgroup != nil {
		v.Cgroup = c.Cgroup.Path
	}
	switch c.State {
	case registry.Running:
		v.Fences = fence.Report(d.fences, d.subject(c))
		v.Level = quota.LevelNone // where nothing is enforced, nothing can be relied on
		if d.modeOf(c) == quota.ModeEnforce {
			v.Level = fence.Level(d.fences, d.subject(c))
		}
	case registry.Ended:
		if c.Fences != nil {
			v.Fences = c.Fences
		}
	case registry.Prepared:
		v.Level = quota.LevelNone
	}
	for _, g := range c.Grant.GPUs {
		v.GPUs = append(v.GPUs, d.viewGPU(c, g))
		v.Resize = d.newestResize(v.Resize, c, g.UUID)
		gs := d.gpus[g.UUID]
		if gs == nil || c.State != registry.Running {
			continue
		}
		for _, proc := range gs.out.Processes {
			if proc.Container == c.ID() && proc.State != "gone" {
				v.Processes = append(v.Processes, api.Process{
					PID: proc.PID, GPU: g.UUID, NVML: proc.NVMLBytes, Slot: proc.Slot, State: proc.State, Comm: proc.Comm,
				})
			}
		}
	}
	return v
}

// newestResize prefers a pending change, then the latest.
func (d *Daemon) newestResize(have *api.Resize, c *registry.Container, uuid string) *api.Resize {
	var best *resize
	for _, level := range []policy.Level{{Container: c.ID()}, {Pod: c.Pod().ID()}} {
		r := d.resizeOf(c.Pod().Name, uuid, level)
		if r == nil {
			continue
		}
		if best == nil || (r.State == policy.ResizePending) != (best.State == policy.ResizePending) && r.State == policy.ResizePending ||
			(r.State == policy.ResizePending) == (best.State == policy.ResizePending) && r.Started > best.Started {
			best = r
		}
	}
	if best == nil || have != nil && best.State != policy.ResizePending {
		return have
	}
	v := d.viewResize(uuid, *best)
	return &v
}

func timeOrNil(t time.Time) *time.Time {
	if t.IsZero() {
		return nil
	}
	return &t
}

// viewGPU is a container's row for a GPU.
func (d *Daemon) viewGPU(c *registry.Container, g quota.GPU) api.ContainerGPU {
	p := c.Pod()
	own, pod := c.ContainerLimits(g.UUID), p.PodLimits(g.UUID)
	v := api.ContainerGPU{
		UUID: g.UUID, Index: g.Index, Container: own, Pod: pod,
		Limits: quota.Limits{
			Max:     min(d.publishedMax(g.UUID, policy.Level{Container: c.ID()}, own.Max), d.publishedMax(g.UUID, policy.Level{Pod: p.ID()}, pod.Max)),
			High:    min(own.High, pod.High),
			Min:     max(own.Min, pod.Min),
			SwapMax: min(own.SwapMax, pod.SwapMax),
		},
	}
	if n := c.Counters[g.UUID]; n != nil {
		v.Peak = n.PeakBytes
		v.Events = api.Events{OverMax: n.OverMax, OOM: n.OOM, OOMKill: n.OOMKill, OOMGroupKill: n.OOMGroupKill}
		v.EventsLocal, v.ThrottledNS = n.Local, n.FrozenNS
	}
	if n := p.Counters[g.UUID]; n != nil {
		v.PodPeak, v.PodEvents, v.PodEventsLocal = n.PeakBytes, n.Events, n.Local
	}
	reported, ended := c.Reported[g.UUID]
	if i := p.GPUIndex(g.UUID); !ended && i >= 0 {
		reported = p.Totals.Of(c.Folder(), i)
	}
	v.Events.High, v.Events.Max, v.Events.Device = reported.High, reported.Max, reported.Device
	plus(&v.ThrottledNS, min(reported.ThrottledMS, math.MaxUint64/1_000_000)*1_000_000)
	gs := d.gpus[g.UUID]
	if gs == nil {
		return v
	}
	v.PodCurrent = gs.out.Pods[p.ID()].ChargedBytes
	st, ok := gs.out.Containers[c.ID()]
	if !ok {
		v.Known = c.State == registry.Ended && gs.out.Known
		return v
	}
	v.Current, v.NVML, v.Ledger, v.Managed, v.Swap = st.ChargedBytes, st.NVMLBytes, st.LedgerBytes, st.ManagedBytes, st.SwapBytes
	v.Shared = st.SharedBytes
	v.Excess, v.Dying, v.Known = st.ExcessBytes, st.DyingBytes+st.StuckBytes, st.Known
	return v
}

// GPUs implements [server.Service].
func (d *Daemon) GPUs(context.Context) ([]api.GPUState, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	out := d.viewGPUs()
	if len(out) == 0 {
		if err := d.noGPUs(); err != nil {
			return nil, err
		}
	}
	return out, nil
}

// viewGPUs are the GPUs in NVML's order. The caller holds mu.
func (d *Daemon) viewGPUs() []api.GPUState {
	out := []api.GPUState{}
	for _, uuid := range d.order {
		g := d.gpus[uuid]
		v := api.GPUState{
			GPU: g.quota, UsedBytes: g.sample.Memory.UsedBytes,
			UnmanagedBytes: g.out.UnmanagedBytes, UnattributedBytes: g.out.UnattributedBytes, DyingBytes: g.dyingBytes(),
			Known: g.have && g.out.Known, Why: g.out.Why,
		}
		for _, p := range d.reg.Pods() {
			v.GuaranteedBytes += min(p.MinBytes(uuid), quota.Unlimited-v.GuaranteedBytes)
		}
		if g.have {
			t := g.sample.Wall
			v.SampledAt = &t
		} else {
			v.Why = "NVML was not asked yet"
		}
		out = append(out, v)
	}
	return out
}

// Version implements [server.Service].
func (d *Daemon) Version(context.Context) (api.Version, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	return api.Version{
		Version: api.BuildVersion, API: api.APIVersion, ABIMajor: ledger.ABIMajor, ABIMinor: ledger.ABIMinor, Driver: d.driver, PID: os.Getpid(),
	}, nil
}

// Events implements [server.Service]. The journal has its own lock.
func (d *Daemon) Events(ctx context.Context, from uint64, follow bool, emit func(*api.Event) error) error {
	send := func(ev api.Event) error {
		if err := emit(&ev); err != nil {
			return err
		}
		from = ev.Seq
		return nil
	}
	if err := d.journal.Since(from, send); err != nil {
		return fmt.Errorf("read journal: %w", err)
	}
	for follow {
		// Once also without an event: the reader learns that the stream stands.
		if err := emit(nil); err != nil {
			return err
		}
		wait, cancel := context.WithTimeout(ctx, server.KeepAlive())
		err := d.journal.Wait(wait, from)
		cancel()
		switch {
		case ctx.Err() != nil:
			return ctx.Err()
		case errors.Is(err, context.DeadlineExceeded):
			continue
		case err != nil:
			return err
		}
		if err := d.journal.Since(from, send); err != nil {
			return fmt.Errorf("read journal: %w", err)
		}
	}
	return nil
}
