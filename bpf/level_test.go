// SPDX-License-Identifier: Apache-2.0

package bpf

import "testing"

func TestLevelOf(t *testing.T) {
	strict := Settings{Commits: true, KillRaces: true, CloseHeap: true}
	change := func(f func(*Settings)) Settings { s := strict; f(&s); return s }
	for _, tt := range []struct {
		name     string
		carrier  Carrier
		copies   Copies
		s        Settings
		enforced bool
		misses   uint64
		want     Level
		why      Reason
	}{
		{"all", CarrierLSM, CopiesBTF, strict, true, 0, LevelStrict, ""},
		{"by name", CarrierLSM, CopiesProbe, strict, true, 0, LevelEntry, ReasonByName},
		{"no lsm", CarrierFmodRet, CopiesBTF, strict, true, 0, LevelEntry, ReasonFmodRet},
		{"no copies", CarrierLSM, CopiesNone, strict, true, 0, LevelEntry, ReasonNoCopies},
		{"no commits", CarrierLSM, CopiesBTF, change(func(s *Settings) { s.Commits = false }), true, 0, LevelEntry, ReasonNoCopies},
		{"heap", CarrierLSM, CopiesBTF, change(func(s *Settings) { s.CloseHeap = false }), true, 0, LevelEntry, ReasonHeapOpen},
		{"frees", CarrierLSM, CopiesBTF, change(func(s *Settings) { s.CreditFrees = true }), true, 0, LevelEntry, ReasonNoCopies},
		{"missed", CarrierLSM, CopiesBTF, strict, true, 1, LevelEntry, ReasonMissed},
		{"audit", CarrierLSM, CopiesBTF, strict, false, 0, LevelAudit, ReasonAudit},
	} {
		got, why := LevelOf(tt.carrier, tt.copies, tt.s, tt.enforced, tt.misses)
		if got != tt.want || (why == nil) != (tt.why == "") || why != nil && why.Reason != tt.why {
			t.Errorf("%s: %s, %v", tt.name, got, why)
		}
	}
}
