// SPDX-License-Identifier: Apache-2.0

package gatecredit

import (
	"slices"
	"time"
)

// Sums bound what several GPUs hold together. They are asked one after another, so what moves from one to another
// between the calls is in both answers or in none, and added up they accuse a legal program or give back what is
// still held. The least and the most of each within a settle do neither: what is there is never less than the sum of
// the one nor more than that of the other.
type Sums struct {
	Settle time.Duration

	gpus map[string][]reading
}

type reading struct {
	at              time.Duration
	bytes, overhead uint64
}

// Take takes what a GPU says.
func (s *Sums) Take(gpu string, at time.Duration, bytes, overhead uint64) {
	if s.gpus == nil {
		s.gpus = map[string][]reading{}
	}
	old := slices.DeleteFunc(s.gpus[gpu], func(r reading) bool { return at-r.at > s.Settle })
	s.gpus[gpu] = append(old, reading{at, bytes, overhead})
}

// Bounds are those of the sum over some GPUs. ok is false while one of them has told for less than most of the last
// settle.
func (s *Sums) Bounds(gpus []string, at time.Duration) (least, most, overhead uint64, ok bool) {
	for _, gpu := range gpus {
		low, high, over, longest := ^uint64(0), uint64(0), uint64(0), time.Duration(0)
		for _, r := range s.gpus[gpu] {
			if at-r.at <= s.Settle {
				low, high, over, longest = min(low, r.bytes), max(high, r.bytes), max(over, r.overhead), max(longest, at-r.at)
			}
		}
		if len(s.gpus[gpu]) == 0 || longest < s.Settle*3/4 || s.gpus[gpu][len(s.gpus[gpu])-1].at < at-s.Settle/2 {
			return 0, 0, 0, false
		}
		least, most, overhead = sum(least, low), sum(most, high), sum(overhead, over)
	}
	return least, most, overhead, len(gpus) > 0
}
