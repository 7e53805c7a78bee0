// SPDX-License-Identifier: Apache-2.0

package bpf

import (
	"fmt"

	"golang.org/x/sys/unix"
)

// Level is what may be relied on, for what passes through the driver's requests.
type Level string

// Levels.
const (
	LevelStrict Level = "strict" // also against a program that changes a request while it is read
	LevelEntry  Level = "entry"  // such a program has what it took until gpufenced's next look
	LevelAudit  Level = "audit"  // nothing is refused
)

// LevelOf says the level that a gate, whose canary was refused, has on a kernel of some release ("6.12.9-amd64"),
// and why it has no better one.
func LevelOf(carrier Carrier, copies Copies, s Settings, enforced bool, misses uint64, release string) (Level, *Error) {
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
	case leavesOutLooks(release):
		return LevelEntry, &Error{Reason: ReasonTooOld, What: "kernels before 6.2 may leave out a look at the driver's copies and not count it (this is " + release + ")"}
	case !s.CloseHeap:
		return LevelEntry, &Error{Reason: ReasonHeapOpen, What: "the driver's older allocation calls, whose copies cannot be watched, are open"}
	case s.CreditFrees:
		return LevelEntry, &Error{Reason: ReasonNoCopies, What: "frees are believed before the driver confirms them"}
	case misses > 0:
		return LevelEntry, &Error{Reason: ReasonMissed, What: "the kernel left out runs of the programs that watch copies"}
	}
	return LevelStrict, nil
}

// leavesOutLooks says whether a task's storage may be withheld from a look since another task, put off on the same CPU,
// is in the middle of its own: bpf_task_storage_get then gives nothing before Linux 6.2, where its form that
// cannot be disturbed came. A release that cannot be read is taken for such a kernel.
func leavesOutLooks(release string) bool {
	var major, minor int
	if _, err := fmt.Sscanf(release, "%d.%d", &major, &minor); err != nil {
		return true
	}
	return major < 6 || major == 6 && minor < 2
}

// Release is the release of the kernel that the gate is in, as uname(2) gives it; empty where it gives none.
func (*Gate) Release() string {
	var u unix.Utsname
	if err := unix.Uname(&u); err != nil {
		return ""
	}
	return unix.ByteSliceToString(u.Release[:])
}
