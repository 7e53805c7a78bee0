// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io/fs"
	"strings"
	"time"

	"github.com/gpufence/gpufence/enforcer/act"
	"github.com/gpufence/gpufence/enforcer/api"
	"github.com/gpufence/gpufence/enforcer/policy"
	"github.com/gpufence/gpufence/enforcer/quota"
	"github.com/gpufence/gpufence/enforcer/registry"
)

// startKill does what must be in this step, counter and record, and hands the rest to a goroutine
// of its own: a kill waits for nobody's lock. The caller holds mu.
func (d *Daemon) startKill(g *gpuState, k *policy.Kill) {
	d.mu.changed()
	if k.Container == "" {
		d.killForeign(g, k)
		return
	}
	c := d.reg.ByID(k.Container)
	if c == nil || c.State != registry.Running {
		return // it ended between the sample and now
	}
	if now, ok := d.killing[c.ID()]; ok && (now.Group || !k.Group && now.PID == k.PID && now.Start == k.Start) {
		return // it has been decided, counted, and is under way
	}
	victims := uint64(1)
	if k.Group {
		victims = uint64(max(1, len(k.PIDs)))
		if pids, err := d.host.Procs(*c.Cgroup); err == nil { // if not: at least those that NVML lists
			victims = max(victims, uint64(len(pids)))
		}
	}
	if !k.Again { // else it was counted when it was killed first
		d.countKill(c, g.info.UUID, k, victims)
	}
	c.Kill = &registry.Kill{
		ID: newID(), GPU: g.info.UUID, Time: d.now(), Reason: k.Message,
		Group: k.Group, PID: k.PID, Start: k.Start,
	}
	record, pod := *c.Kill, c.Pod()
	// Counters first: whoever sees the exit must find them, and whoever reads them never finds less.
	if err := d.save(pod); err != nil {
		d.once("state", err)
	}
	d.writeFiles(pod, true)
	decided := about(c, api.Event{
		ID: record.ID, Type: "kill-decided", GPU: g.info.UUID, Message: k.Reason, Numbers: killNumbers(k), MonotonicNS: int64(d.mono()),
	})
	for _, cand := range k.Candidates {
		decided.Candidates = append(decided.Candidates, api.Candidate{Name: cand.Name, Used: cand.UsedBytes, Max: cand.MaxBytes})
	}
	t := killTask{
		id: c.ID(), record: record, cgroup: *c.Cgroup, uuid: g.info.UUID, decided: decided, log: c.TerminationLog,
		message: "gpufence: " + strings.TrimPrefix(k.Message, "gpufence: "), numbers: killNumbers(k), reason: k.Reason,
	}
	d.launch(t)
}

// launch runs a kill of a container beside everything else. The caller holds mu.
func (d *Daemon) launch(t killTask) {
	if d.killing == nil {
		d.killing = map[policy.ContainerID]registry.Kill{}
	}
	d.killing[t.id] = t.record
	d.group.Go(func() { d.kill(t) })
}

// killForeign kills a process that is in none of our containers. The caller holds mu.
func (d *Daemon) killForeign(g *gpuState, k *policy.Kill) {
	id := newID()
	d.group.Go(func() {
		d.kill(killTask{
			record: registry.Kill{ID: id, GPU: g.info.UUID, PID: k.PID, Start: k.Start}, uuid: g.info.UUID,
			decided: api.Event{
				ID: id, Type: "kill-decided", Code: string(quota.CodeUnmanaged), GPU: g.info.UUID, Message: k.Reason, Numbers: killNumbers(k), MonotonicNS: int64(d.mono()),
			},
			numbers: killNumbers(k), reason: k.Reason,
		})
	})
}

// killTask is everything that a kill needs, by value.
type killTask struct {
	id      policy.ContainerID
	record  registry.Kill
	cgroup  act.Cgroup
	uuid    string
	decided api.Event // zero for one that is done again after a restart
	log     string    // termination message file
	message string
	reason  string
	numbers map[string]uint64
}

// kill goes through the order of steps; only the last one may not fail.
func (d *Daemon) kill(t killTask) {
	var decided <-chan struct{}
	if t.decided.Type != "" {
		decided = within(func() { d.event(t.decided) })
		within(func() {
			if err := d.journal.Sync(); err != nil {
				d.once("journal-sync", err)
			}
		})
		if t.log != "" {
			within(func() {
				// A container may have removed or filled its file: it then explains itself by the
				// journal only.
				if err := act.TerminationMessage(t.log, t.message); err != nil && !errors.Is(err, fs.ErrNotExist) {
					d.log.WithField("file", t.log).WithError(err).Warn("cannot write the termination message, killing anyway")
				}
			})
		}
	}
	ctx, cancel := context.WithTimeout(context.Background(), killTimeout)
	defer cancel()
	var did act.Killed
	var err error
	if t.record.Group {
		did, err = d.host.KillCgroup(ctx, t.cgroup)
	} else {
		did, err = d.host.KillProcess(ctx, t.record.PID, t.record.Start)
	}
	if decided != nil {
		// The signal did not wait for it; what is told of the signal does, so that the journal has them in order.
		select {
		case <-decided:
		case <-ctx.Done():
		}
	}

	d.mu.Lock()
	defer d.mu.Unlock()
	if d.killing[t.id].ID == t.record.ID {
		delete(d.killing, t.id)
	}
	if d.closed {
		return
	}
	ev := api.Event{ID: t.record.ID, Type: "kill", GPU: t.uuid, Message: t.reason, Numbers: t.numbers, MonotonicNS: int64(did.SentAt)}
	c := d.reg.ByID(t.id)
	if c != nil {
		ev = about(c, ev)
		sent := did.SentAt
		if sent == 0 && (err == nil || errors.Is(err, act.ErrGone)) {
			sent = d.mono() // it ended before: that its memory comes back is followed all the same
		}
		if c.Kill != nil && c.Kill.ID == t.record.ID && sent != 0 {
			c.Kill.SentNS = int64(sent)
			if err := d.save(c.Pod()); err != nil {
				d.once("state", err)
			}
		}
	}
	if err != nil && !errors.Is(err, act.ErrGone) {
		ev.Type = "kill-failed"
		ev.Message = fmt.Sprintf("%s; SIGKILL did not end it within %s: %v", t.reason, killTimeout, err)
	}
	d.event(ev)
	d.poke()
}

// confirmKills reports when the memory of a killed container or process came back. The caller
// holds mu.
func (d *Daemon) confirmKills(g *gpuState, out *policy.Output) {
	if !out.Known {
		return
	}
	for _, c := range d.reg.Containers() {
		k := c.Kill
		if k == nil || k.Confirmed || k.SentNS == 0 || k.GPU != g.info.UUID || int64(g.sample.Began) < k.SentNS || c.Pod().BootID != d.bootID {
			continue
		}
		st, followed := out.Containers[c.ID()]
		left := st.DyingBytes + st.StuckBytes
		if k.Group {
			left += st.NVMLBytes
		} else {
			for _, p := range out.Processes {
				if p.PID == k.PID && p.Start == k.Start && p.State != "gone" {
					left += p.NVMLBytes + 1
				}
			}
		}
		if followed && left > 0 {
			if after := time.Duration(int64(g.sample.Began) - k.SentNS); !k.Unconfirmed && after > d.cfg.StuckAfter {
				k.Unconfirmed = true
				d.dirty[c.Pod().Name] = true
				d.event(about(c, api.Event{
					ID: k.ID, Type: "kill-unconfirmed", GPU: g.info.UUID,
					Message: fmt.Sprintf("%s after SIGKILL %s of %s are still in use on %s: the driver has not let them go, they count in admission, and nobody else is killed for them",
						after.Round(time.Second), quota.HumanBytes(left), c.Display(), g.info.UUID),
					Numbers: map[string]uint64{"bytes": left},
				}))
			}
			continue
		}
		k.Confirmed = true
		d.dirty[c.Pod().Name] = true
		took := int64(g.sample.Began) - k.SentNS
		d.event(about(c, api.Event{
			ID: k.ID, Type: "kill-confirmed", GPU: g.info.UUID, MonotonicNS: int64(g.sample.Began),
			Message: fmt.Sprintf("the memory of %s came back %s after SIGKILL", c.Display(), time.Duration(took).Round(time.Millisecond)),
			Numbers: map[string]uint64{"took_ns": uint64(took)},
		}))
	}
}

// redo is the task of a kill that was recorded before gpufenced died: the signal may never have
// been sent, and to a process that is dying already it does nothing. Nothing is counted again.
func redo(c *registry.Container) killTask {
	return killTask{
		id: c.ID(), record: *c.Kill, cgroup: *c.Cgroup, uuid: c.Kill.GPU,
		reason: c.Kill.Reason + " (signalled again after a restart of gpufenced)",
	}
}

// within runs a step before a kill, for as long as it may take; a step that hangs is left behind, and closes
// what is given when it is done.
func within(f func()) <-chan struct{} {
	done := make(chan struct{})
	go func() {
		defer close(done)
		f()
	}()
	select {
	case <-done:
	case <-time.After(stepBefore):
	}
	return done
}

func newID() string {
	var b [16]byte
	_, _ = rand.Read(b[:]) // never fails: it ends the program instead
	b[6], b[8] = b[6]&0x0f|0x40, b[8]&0x3f|0x80
	return fmt.Sprintf("%x-%x-%x-%x-%x", b[0:4], b[4:6], b[6:8], b[8:10], b[10:])
}

// endReason is why a container ended, as far as we know.
func endReason(c *registry.Container) string {
	if k := c.Kill; k != nil && (k.Group || k.PID == c.PID) {
		return "killed: " + k.Reason
	}
	return "exited"
}
