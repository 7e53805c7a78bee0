// SPDX-License-Identifier: Apache-2.0

package policy

import (
	"slices"
	"testing"
)

func TestPlace(t *testing.T) {
	all := []PlaceCandidate{{"a", 4 * gib, true}, {"b", 10 * gib, true}, {"c", 8 * gib, false}, {"d", 10 * gib, true}, {"e", 12 * gib, false}}
	for _, tt := range []struct {
		n    int
		by   Placement
		want []string
	}{
		{1, PlaceSpread, []string{"b"}},
		{2, PlaceSpread, []string{"b", "d"}},
		{3, PlaceSpread, []string{"b", "d", "a"}},
		{1, PlaceBinpack, []string{"a"}},
		{2, PlaceBinpack, []string{"a", "b"}},
		{4, PlaceBinpack, []string{"a", "b", "d", "e"}},
		{5, PlaceSpread, []string{"b", "d", "a", "e", "c"}},
	} {
		if got := Place(all, tt.n, tt.by); !slices.Equal(got, tt.want) {
			t.Errorf("%d by %s: %v, want %v", tt.n, tt.by, got, tt.want)
		}
	}
	if all[0].UUID != "a" {
		t.Error("the candidates were changed")
	}
}
