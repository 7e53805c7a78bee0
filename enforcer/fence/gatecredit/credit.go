// SPDX-License-Identifier: Apache-2.0

// Package gatecredit judges, from what the gate has charged and what the driver says, whether a container's
// frees happened. No I/O, no clock.
package gatecredit

import (
	"fmt"
	"time"

	"github.com/gpufence/gpufence/enforcer/quota"
)

// Account is what the gate has charged a container, as it was read right after a sample.
type Account struct {
	UsedBytes     uint64 // now
	ChargedBytes  uint64 // all that was ever charged; read after UsedBytes
	EndedBytes    uint64 // of it, that of which nothing more comes: the driver has answered
	CreditedBytes uint64 // all that frees took off
	PeakBytes     uint64 // the greatest charge since the account was last read
}

// Truth is what the driver says of the same container.
type Truth struct {
	At            time.Duration // monotonic, when the account was read
	Took          time.Duration // how long before that it was asked: an answer may be as old
	NVMLBytes     uint64        // of its processes
	MostBytes     uint64        // what they may be more, where GPUs were asked one after another; see [Sums]
	OverheadBytes uint64        // an upper bound of what it counts and no request asks for: contexts, page tables
	LimitBytes    uint64
}

// Verdict is what follows.
type Verdict struct {
	AdjustBytes int64 // to be added to the charge
	NoCredit    bool  // its frees are not believed now
	Kill        bool  // it has forged frees for the second time
	Why         string
}

// Credit judges whether what frees took off a container's charge has really been given back. It is pure:
// the same samples give the same verdicts.
//
// A free lowers the charge at once, because a program that frees and allocates within its limit must not be
// refused. Whoever makes the gate see a free that the driver does not do has more than it is charged, and that
// is what NVML shows: more, in two samples in a row, than the greatest charge of the last settle and what the
// driver keeps for itself. NVML may lag up to settle behind when it is asked, so a legal program is never found so,
// however slow NVML is. Only
// credit can be forged: what is there beyond all credit of the last settle is the driver's own, and remembered
// as such.
type Credit struct {
	Settle time.Duration
	Margin func(limit uint64) uint64

	points   []point
	strikes  int // samples in a row that show more than the charge
	forged   int
	noCredit bool
	settled  uint64 // credit that was judged
	baseline uint64 // the driver's own, beyond what was said to bound it
}

// creditHorizon is for how many settles credit can turn out to be forged, and for no fewer samples than
// creditSamples: those of a node that is short of time are far apart.
const (
	creditHorizon = 3
	creditSamples = 8
)

type point struct {
	at                                time.Duration
	peak, ended, credited, nvml, used uint64
}

// Step takes one sample.
func (c *Credit) Step(a Account, tr Truth) Verdict {
	most := max(tr.NVMLBytes, tr.MostBytes)
	c.points = append(c.points, point{at: tr.At, peak: max(a.PeakBytes, a.UsedBytes), ended: a.EndedBytes, credited: a.CreditedBytes, nvml: most, used: a.UsedBytes})
	// One point that is older than that stays: it tells what the sums were then. A forged free shows when the
	// charge from before it is a settle old, and then it must still be known.
	lag := c.Settle + tr.Took
	for len(c.points) > creditSamples && c.points[1].at <= tr.At-creditHorizon*lag {
		c.points = c.points[1:]
	}
	first := c.points[0] // the newest that this answer cannot be from before
	for _, p := range c.points {
		if p.at <= tr.At-lag {
			first = p
		}
	}
	margin := c.Margin(tr.LimitBytes)
	var greatest, nvml uint64
	for _, p := range c.points {
		if p.at > tr.At-lag {
			greatest = max(greatest, p.peak)
		}
		if p.at >= first.at {
			nvml = max(nvml, p.nvml)
		}
	}
	outstanding := a.CreditedBytes - min(a.CreditedBytes, max(c.points[0].credited, c.settled))
	own := tr.OverheadBytes + c.baseline + margin

	v := Verdict{NoCredit: c.noCredit}
	if excess := tr.NVMLBytes - min(tr.NVMLBytes, greatest+own); excess > 0 {
		c.strikes++
		if c.strikes < 2 {
			return v
		}
		back := min(excess+margin, outstanding)
		if beyond := excess - min(excess, back); beyond > 0 {
			c.baseline += beyond
		}
		if back == 0 || c.noCredit {
			return v
		}
		c.forged++
		c.noCredit = true
		c.strikes = 0
		c.settled = a.CreditedBytes
		v.AdjustBytes, v.NoCredit = int64(back), true
		v.Kill = c.forged > 1
		v.Why = fmt.Sprintf("NVML says %s, and within %s the gate charged %s at most: frees of %s did not happen",
			quota.FormatBytes(tr.NVMLBytes), c.Settle, quota.FormatBytes(greatest), quota.FormatBytes(back))
		return v
	}
	c.strikes = 0
	if c.noCredit && most <= a.UsedBytes+own {
		c.noCredit, v.NoCredit = false, false
	}
	// What ended in ways that the gate does not see (the driver's own choice of handles, a device freed with all
	// below it) is given back when NVML has not shown it for a settle, less what has come since. A request that the
	// driver had not answered then can come at any time: whoever asks can hold it up.
	if tr.At-first.at >= lag {
		target := nvml + a.ChargedBytes - first.ended
		if a.UsedBytes > target {
			v.AdjustBytes = -int64(a.UsedBytes - target)
		}
	}
	return v
}

// sum saturates: a limit may be the greatest number there is.
func sum(a, b uint64) uint64 {
	if a+b < a {
		return ^uint64(0)
	}
	return a + b
}
