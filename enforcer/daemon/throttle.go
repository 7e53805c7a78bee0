// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"time"

	"github.com/gpufence/gpufence/enforcer/act"
	"github.com/gpufence/gpufence/enforcer/api"
	"github.com/gpufence/gpufence/enforcer/policy"
	"github.com/gpufence/gpufence/enforcer/registry"
)

// freezeAge is how old an answer may be that somebody is still frozen for.
const freezeAge = time.Second

// frozen is a container that is slowed by freezing.
type frozen struct {
	busy bool // a slice is in progress
	said bool // this episode was reported
}

func (d *Daemon) frozenDir() string { return filepath.Join(d.cfg.RunDir, "frozen") }

// thawLeft thaws what an earlier gpufenced and its guard left frozen, both killed at once.
func (d *Daemon) thawLeft() {
	n, err := act.ThawLeft(d.frozenDir())
	if n > 0 {
		d.event(api.Event{Type: "thawed", Message: fmt.Sprintf("%d cgroups that an earlier gpufenced had frozen were thawed", n)})
	}
	if err != nil {
		// Whoever is left frozen must not stay so silently, but the others have to be fenced.
		d.once("thaw", err)
	}
}

// runFreezer slows containers above memory.high whose processes no shim slows.
func (d *Daemon) runFreezer(ctx context.Context) {
	for {
		d.mu.LockToLook()
		slice, share := d.cfg.FreezeSlice, d.cfg.FreezeShare
		period := freezePeriod(slice, share)
		if d.pol.FreezeShare <= 0 && len(d.freezing) == 0 {
			period = max(period, housekeeping) // nobody is slowed so; a new configuration may say so
		}
		d.mu.Unlock()
		select {
		case <-ctx.Done():
			return
		case <-time.After(period):
		}
		d.freezeRound(ctx, period)
	}
}

// freezePeriod is so long that the longest slice is the greatest share of it.
func freezePeriod(slice time.Duration, share float64) time.Duration {
	slice = min(max(slice, time.Millisecond), act.MaxSlice)
	return time.Duration(float64(slice) / min(max(share, 0.01), 0.5))
}

// freezeRound begins a slice for every container that is to be slowed.
func (d *Daemon) freezeRound(ctx context.Context, period time.Duration) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.closed || d.pol.FreezeShare <= 0 && len(d.freezing) == 0 {
		return
	}
	now := d.mono()
	for _, c := range d.reg.Containers() {
		if c.State != registry.Running {
			continue
		}
		share, uuid := d.freezeShare(c, now)
		f := d.freezing[c.ID()]
		if share <= 0 {
			if f != nil && !f.busy {
				delete(d.freezing, c.ID())
			}
			continue
		}
		if f == nil {
			f = &frozen{}
			d.freezing[c.ID()] = f
		}
		if f.busy {
			continue
		}
		if !f.said {
			f.said = true
			d.event(about(c, api.Event{Type: "throttled", GPU: uuid, Message: fmt.Sprintf(
				"%s is above memory.high on %s and its processes do not load the shim: it is frozen for %.0f %% of the time", c.Display(), uuid, share*100)}))
		}
		f.busy = true
		id, cgroup := c.ID(), *c.Cgroup
		slice := time.Duration(share * float64(period))
		d.group.Go(func() { d.freeze(ctx, id, uuid, cgroup, slice) })
	}
	for id := range d.freezing {
		if d.reg.ByID(id) == nil {
			delete(d.freezing, id)
		}
	}
}

// freezeShare is the greatest share over a container's GPUs, by answers that are new. One that is
// being killed is left to die.
func (d *Daemon) freezeShare(c *registry.Container, now time.Duration) (share float64, uuid string) {
	if c.Kill != nil && !c.Kill.Confirmed {
		return 0, ""
	}
	for _, gq := range c.Grant.GPUs {
		g := d.gpus[gq.UUID]
		if g == nil || !g.have || now-g.outAt > freezeAge {
			continue
		}
		if s := g.out.Containers[c.ID()].FreezeShare; s > share {
			share, uuid = s, gq.UUID
		}
	}
	return min(share, d.pol.FreezeShare), uuid
}

// freeze does one slice and counts it.
func (d *Daemon) freeze(ctx context.Context, id policy.ContainerID, uuid string, cgroup act.Cgroup, slice time.Duration) {
	ctx, cancel := context.WithTimeout(ctx, 20*act.MaxSlice)
	defer cancel()
	began := d.mono()
	err := d.guard.Slice(ctx, d.host, cgroup, slice)
	took := d.mono() - began
	d.mu.Lock()
	defer d.mu.Unlock()
	if f := d.freezing[id]; f != nil {
		f.busy = false
	}
	switch {
	case err == nil:
		if c := d.reg.ByID(id); c != nil && !d.closed {
			c.CountersOn(uuid).FrozenNS += uint64(min(took, act.MaxSlice))
			d.dirty[c.Pod().Name] = true
		}
		d.once("freeze "+string(id), nil)
	case errors.Is(err, act.ErrFrozen), errors.Is(err, act.ErrGone), ctx.Err() != nil:
		// Paused by its engine, or ended, or we are.
	default:
		d.once("freeze "+string(id), err)
	}
}
