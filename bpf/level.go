// SPDX-License-Identifier: Apache-2.0

package bpf

// Level is what may be relied on, for what passes through the driver's requests.
type Level string

// ReasonByName is that copies are watched by name only.
const ReasonByName Reason = "by-name"

// Levels.
const (
	LevelStrict Level = "strict" // also against a program that changes a request while it is read
	LevelEntry  Level = "entry"  // such a program has what it took until gpufenced's next look
	LevelAudit  Level = "audit"  // nothing is refused
)

// LevelOf says the level that a gate, whose canary was refused, has, and why it has no better one.
func LevelOf(carrier Carrier, copies Copies, s Settings, enforced bool, misses uint64) (Level, *Error) {
	switch {
	case !enforced:
		return LevelAudit, &Error{Reason: ReasonAudit, What: "node policy, or a driver whose requests nobody has recorded, lets it count only"}
	case carrier != CarrierLSM:
		return LevelEntry, &Error{Reason: ReasonFmodRet, What: "bpf is not among the security modules: add it to lsm= on the kernel command line"}
	case copies == CopiesNone || !s.Commits || !s.KillRaces:
		return LevelEntry, &Error{Reason: ReasonNoCopies, What: "the driver's own copies of requests are not watched"}
	case copies == CopiesProbe:
		// A probe by name is left out while another task's call into BPF is put off on the same CPU, and kernels
		// before 6.7 do not count that.
		return LevelEntry, &Error{Reason: ReasonByName, What: "the driver's module does not describe its types, and the kernel may leave out a look at its copies by name"}
	case !s.CloseHeap:
		return LevelEntry, &Error{Reason: ReasonHeapOpen, What: "the driver's older allocation calls, whose copies cannot be watched, are open"}
	case s.CreditFrees:
		return LevelEntry, &Error{Reason: ReasonNoCopies, What: "frees are believed before the driver confirms them"}
	case misses > 0:
		return LevelEntry, &Error{Reason: ReasonMissed, What: "the kernel left out runs of the programs that watch copies"}
	}
	return LevelStrict, nil
}
