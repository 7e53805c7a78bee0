// SPDX-License-Identifier: Apache-2.0

package ledger

import "testing"

// TestObserveSaysWhatIsNew: whoever saves before he shows must learn of every change.
func TestObserveSaysWhatIsNew(t *testing.T) {
	var totals Totals
	s := &Snapshot{Slots: []Slot{{Index: 3}}}
	known := func(*Slot) string { return "c" }
	steps := []struct {
		name      string
		max       uint64
		container func(*Slot) string
		want      bool
	}{
		{"nothing happened", 0, known, false},
		{"an event", 1, known, true},
		{"nothing since", 1, known, false},
		{"a counter that fell", 0, known, false},
		{"of nobody", 5, func(*Slot) string { return "" }, false},
		{"whose it is, is known again", 5, known, true},
	}
	for _, step := range steps {
		s.Slots[0].GPU[1].Events.Max = step.max
		if got := totals.Observe(s, step.container); got != step.want {
			t.Errorf("%s: changed = %v", step.name, got)
		}
	}
	if got := totals.Of("c", 1).Max; got != 5 {
		t.Errorf("max = %d", got)
	}
}
