// SPDX-License-Identifier: Apache-2.0

package policy

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/gpufence/gpufence/enforcer/quota"
)

// Level is which limit: the pod's, if Container is empty, or the container's.
type Level struct {
	Pod       PodID       `json:"pod,omitempty"`
	Container ContainerID `json:"container,omitempty"`
}

// Resize is a change of memory.max at one level on one GPU. It is plain data, so that it can be
// saved and put back with [GPU.RestoreResize] after a restart.
//
// desired is what was asked; allocated what admission has given; actuated what the limits page
// shows; actual the limit that every fence holds by now: while it is pending, the watch's.
type Resize struct {
	Level     Level         `json:"level"`
	Old       uint64        `json:"old"`
	Desired   uint64        `json:"desired"`
	Allocated uint64        `json:"allocated"`
	Actuated  uint64        `json:"actuated"`
	Actual    uint64        `json:"actual"`
	State     string        `json:"state"` // pending, done, ResizeFailed
	Why       string        `json:"why,omitempty"`
	Started   time.Duration `json:"started"`  // monotonic, of this boot
	Deadline  time.Duration `json:"deadline"` // monotonic, of this boot
	Force     bool          `json:"force,omitempty"`
	LeastUse  uint64        `json:"least_use"` // since it began; Unlimited before the first answer
	// Fits counts the complete answers in a row that fit into Desired.
	Fits int `json:"fits,omitempty"`
}

// States of a resize.
const (
	ResizePending = "pending"
	ResizeDone    = "done"
	ResizeFailed  = "ResizeFailed"
)

// resizeFits is how many answers in a row must fit, from settle after the beginning on: the first
// one may be of a moment between two allocations.
const resizeFits = 2

// Stage is when a change of one level has its turn among several of a pod: the pod grows first, then
// containers shrink, then the pod, then containers grow. So no container ever has more than its pod,
// and nobody is squeezed on the way.
func Stage(level Level, old, desired uint64) int {
	switch pod, grows := level.Pod != "", desired >= old; {
	case pod && grows:
		return 0
	case !pod && !grows:
		return 1
	case pod:
		return 2
	}
	return 3
}

// ResizeChange is a resize that ended. When it is done, the grant becomes Desired; when it
// failed, the grant is Old, as it was all the time.
type ResizeChange struct{ Resize Resize }

// StartResize begins a change from old (the grant) to desired. Growing is done at once: admit it
// before. Shrinking is pending until the charge fits: the limits page shows the new limit from
// now on (see PublishedMax; publish it before the next sample), the watch follows what is used
// down, the grant stays old. At the deadline it fails, or kills with force. A resize of the same
// level that is still pending is replaced; its Old stays.
func (g *GPU) StartResize(level Level, old, desired uint64, now, deadline time.Duration, force bool) Resize {
	g.settled = false
	if pending := g.resizes[level]; pending != nil {
		old = pending.Old
		delete(g.resizes, level)
	}
	r := Resize{
		Level: level, Old: old, Desired: desired, Allocated: max(old, desired), Actuated: desired, Actual: desired,
		State: ResizeDone, Started: now, Deadline: deadline, Force: force, LeastUse: quota.Unlimited,
	}
	if desired >= old {
		return r
	}
	r.State, r.Actual = ResizePending, old
	r.Why = "waits until the memory in use fits"
	g.resizes[level] = &r
	return r
}

// RestoreResize puts a pending one back after a restart.
func (g *GPU) RestoreResize(r Resize) {
	if r.State == ResizePending {
		g.settled = false
		r.Fits = 0
		g.resizes[r.Level] = &r
	}
}

// PendingResizes are those that have not ended, to be saved and shown, in a fixed order.
func (g *GPU) PendingResizes() []Resize {
	var out []Resize
	for _, l := range g.levels() {
		out = append(out, *g.resizes[l])
	}
	return out
}

func (g *GPU) levels() []Level {
	return slices.SortedFunc(maps.Keys(g.resizes), func(a, b Level) int {
		return cmp.Or(cmp.Compare(a.Pod, b.Pod), cmp.Compare(a.Container, b.Container))
	})
}

// watch is the limit that a kill is judged by: while a limit shrinks, what is in use falling, plus
// the slack, so that nobody grows meanwhile and nobody dies for not being small yet.
func (r *Resize) watch(cfg Config) uint64 {
	floor := max(r.Desired, r.LeastUse)
	return min(r.Old, add(floor, cfg.Slack(r.Desired)))
}

// stepResizes lets pending ones go on. It returns those that must be forced now.
func (g *GPU) stepResizes(in Input, out *Output) []*Resize {
	var force []*Resize
	for _, l := range g.levels() {
		r := g.resizes[l]
		charged, live, known := uint64(0), uint64(0), false
		if l.Container != "" {
			if c, ok := out.Containers[l.Container]; ok {
				charged, live, known = add(c.ChargedBytes, c.DyingBytes), c.NVMLBytes-c.SharedBytes, c.Known
			}
		} else if p, ok := out.Pods[l.Pod]; ok {
			charged, live, known = add(p.ChargedBytes, p.DyingBytes), p.NVMLBytes-p.SharedBytes, p.Known
		}
		// What was seen before it began does not bind: the container could still grow then. An
		// answer may be as old as NVML may lag, and a process without a slot is known from there
		// only, so until then nothing that was seen is believed to be small.
		settled := in.Sample.Began >= r.Started+g.cfg.Settle
		if known && settled {
			r.LeastUse = min(r.LeastUse, charged)
			if charged <= r.Desired {
				r.Fits++
			} else {
				r.Fits = 0
			}
		}
		r.Actual = r.watch(g.cfg)
		switch {
		case r.Fits >= resizeFits:
			r.State, r.Why = ResizeDone, ""
			r.Allocated, r.Actuated, r.Actual = r.Desired, r.Desired, r.Desired
			out.Resizes = append(out.Resizes, ResizeChange{*r})
			delete(g.resizes, l)
		case in.Now < r.Deadline, !settled, known && r.Fits > 0:
			// Not before it can be known, however soon the deadline is.
		case r.Force && known && live > r.Desired:
			force = append(force, r)
		case r.Force && in.Now < r.Deadline+g.cfg.StuckAfter:
			// Killing helps against the living only: what the dead hold, or what a ledger says
			// before NVML does, comes back or shows by itself, and what is not known becomes so.
		default:
			r.State = ResizeFailed
			r.Why = fmt.Sprintf("still uses %s > %s at the deadline", quota.HumanBytes(charged), quota.HumanBytes(r.Desired))
			if !known {
				r.Why = "how much it uses is not known at the deadline"
			}
			r.Allocated, r.Actuated, r.Actual = r.Old, r.Old, r.Old
			out.Resizes = append(out.Resizes, ResizeChange{*r})
			delete(g.resizes, l)
			g.publish(l, r.Old, out)
		}
	}
	return force
}

// publish puts a limit that has just changed back into the output.
func (g *GPU) publish(l Level, limit uint64, out *Output) {
	if l.Container != "" {
		if c, ok := out.Containers[l.Container]; ok {
			c.PublishedMax = limit
			out.Containers[l.Container] = c
		}
		return
	}
	if p, ok := out.Pods[l.Pod]; ok {
		p.PublishedMax = limit
		out.Pods[l.Pod] = p
	}
}
