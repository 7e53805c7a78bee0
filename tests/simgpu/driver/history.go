// SPDX-License-Identifier: Apache-2.0

package driver

import "sort"

// Point is what was held from TimeNS on, until the next point.
type Point struct {
	TimeNS       int64  `json:"t_ns"` // CLOCK_MONOTONIC
	UsedBytes    uint64 `json:"used_bytes"`
	ManagedBytes uint64 `json:"managed_bytes"`
	listed       bool
}

// historyPoints is how many changes a history keeps: a few seconds of the fastest client,
// far more than the longest lag of a usual one.
const historyPoints = 1 << 17

// history is what was held over time, oldest first. Its times never go back.
type history struct {
	points []Point
	limit  int
}

func (h *history) add(p Point) {
	if h.limit == 0 {
		h.limit = historyPoints
	}
	n := len(h.points)
	if n > 0 && h.points[n-1].TimeNS >= p.TimeNS {
		p.TimeNS = h.points[n-1].TimeNS
		h.points[n-1] = p // one moment, one value: the last
		return
	}
	if n >= h.limit {
		h.points = append(h.points[:0], h.points[n/2:]...)
	}
	h.points = append(h.points, p)
}

// at is what was held at t; before the first point that is nothing.
func (h *history) at(t int64) Point {
	i := sort.Search(len(h.points), func(i int) bool { return h.points[i].TimeNS > t })
	if i == 0 {
		return Point{}
	}
	return h.points[i-1]
}

// shrink lets go of all but the newest n points.
func (h *history) shrink(n int) {
	h.points = append([]Point(nil), h.points[max(0, len(h.points)-n):]...)
}

func (h *history) copy() []Point { return append([]Point(nil), h.points...) }
