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
		got, why := LevelOf(tt.carrier, tt.copies, tt.s, tt.enforced, tt.misses, "6.12.117+deb12-amd64")
		if got != tt.want || (why == nil) != (tt.why == "") || why != nil && why.Reason != tt.why {
			t.Errorf("%s: %s, %v", tt.name, got, why)
		}
	}
}

func TestLevelOfOldKernels(t *testing.T) {
	s := Settings{Commits: true, KillRaces: true, CloseHeap: true}
	for release, want := range map[string]Level{
		"6.2.0-rc1": LevelStrict, "6.10.3-generic": LevelStrict, "7.0": LevelStrict,
		"6.1.0-57-amd64": LevelEntry, "5.14.0-503.el9.x86_64": LevelEntry, "": LevelEntry, "unknown": LevelEntry,
	} {
		level, why := LevelOf(CarrierLSM, CopiesBTF, s, true, 0, release)
		if level != want || (want == LevelEntry) != (why != nil && why.Reason == ReasonTooOld) {
			t.Errorf("%q: %s, %v, want %s", release, level, why, want)
		}
	}
}
