// SPDX-License-Identifier: Apache-2.0

package policy

import (
	"cmp"
	"slices"
)

// Placement is how GPUs are chosen for a container that takes any.
type Placement string

// The placements.
const (
	// PlaceSpread takes the GPUs with the most left to promise.
	PlaceSpread Placement = "spread"
	// PlaceBinpack takes those with the least that still fit, so that whole ones stay free.
	PlaceBinpack Placement = "binpack"
)

// PlaceCandidate is a GPU that could be taken.
type PlaceCandidate struct {
	UUID           string
	AvailableBytes uint64 // to promise
	Fits           bool   // the container would be admitted there
}

// Place chooses n GPUs, those that fit first; ties go by the candidates' order. If too few fit, the
// best of the others are among them, so that the refusal that follows has their numbers. There must
// be n candidates.
func Place(candidates []PlaceCandidate, n int, by Placement) []string {
	all := slices.Clone(candidates)
	slices.SortStableFunc(all, func(a, b PlaceCandidate) int {
		switch {
		case a.Fits != b.Fits:
			if a.Fits {
				return -1
			}
			return 1
		case by == PlaceBinpack && a.Fits:
			return cmp.Compare(a.AvailableBytes, b.AvailableBytes)
		}
		return cmp.Compare(b.AvailableBytes, a.AvailableBytes)
	})
	out := make([]string, 0, n)
	for _, c := range all[:n] {
		out = append(out, c.UUID)
	}
	return out
}
