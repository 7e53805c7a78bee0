// SPDX-License-Identifier: Apache-2.0

package policy

import (
	"fmt"

	"github.com/gpufence/gpufence/enforcer/quota"
)

// Guarantee is what one pod is promised on a GPU, and what it uses. A pod counts once: the
// greater of its own memory.min and the sum of its containers'.
type Guarantee struct {
	Pod          PodID
	MinBytes     uint64
	ChargedBytes uint64 // by its live processes
	// DyingBytes of its exited processes come back to it: as far as its promise covers them they
	// take nothing from anybody else.
	DyingBytes uint64
}

// unused is what it may still ask for beyond what it holds in any way.
func (o Guarantee) unused() uint64 {
	return o.MinBytes - min(o.MinBytes, add(o.ChargedBytes, o.DyingBytes))
}

// covered is how much of its dying memory its promise covers.
func (o Guarantee) covered() uint64 {
	return min(o.DyingBytes, o.MinBytes-min(o.MinBytes, o.ChargedBytes))
}

// AdmitInput is a GPU before a container starts or grows.
type AdmitInput struct {
	UUID              string
	AllocatableBytes  uint64
	Others            []Guarantee // every pod but the asking one
	UnmanagedBytes    uint64
	UnattributedBytes uint64
	DyingBytes        uint64 // of all exited processes
	// FreeNow (policy admit = "free") asks for the bytes to be free now, too; FreeKnown says
	// that FreeBytes, NVML's, is known.
	FreeNow   bool
	FreeKnown bool
	FreeBytes uint64
	// MinBytes is what the asking pod would be promised in all, ChargedBytes what it uses,
	// OwnDyingBytes what its exited processes still hold.
	MinBytes      uint64
	ChargedBytes  uint64
	OwnDyingBytes uint64
}

// dying is what exited processes hold beyond what their pods are promised.
func (in AdmitInput) dying() uint64 {
	covered := Guarantee{MinBytes: in.MinBytes, ChargedBytes: in.ChargedBytes, DyingBytes: in.OwnDyingBytes}.covered()
	for _, o := range in.Others {
		covered = add(covered, o.covered())
	}
	return in.DyingBytes - min(in.DyingBytes, covered)
}

// Available is what could be promised to the asking pod in all, if it is free now.
func (in AdmitInput) Available() uint64 {
	taken := add(add(in.UnmanagedBytes, in.UnattributedBytes), in.dying())
	for _, o := range in.Others {
		taken = add(taken, o.MinBytes)
	}
	return in.AllocatableBytes - min(in.AllocatableBytes, taken)
}

// AdmitError says what is missing.
type AdmitError struct {
	AdmitInput
	WantBytes       uint64
	AvailableBytes  uint64
	GuaranteedBytes uint64 // to others
	// Transient: without dying memory it would fit, so waiting helps.
	Transient bool
	// ShortBytes is what is missing now of what could be promised; 0 where it cannot.
	ShortBytes uint64
	Sentence   string
}

func (e *AdmitError) Error() string { return e.Sentence }

// Admit says whether the guarantee can be given; the error is an [AdmitError].
//
// What can be promised is allocatable less what others are promised, and less what is in use
// beyond every promise: unmanaged, unattributed and dying memory. With FreeNow, what the pod does
// not use yet must also be free now, beside what the others have not used of theirs.
func Admit(in AdmitInput) error {
	var guaranteed, unused uint64
	for _, o := range in.Others {
		guaranteed = add(guaranteed, o.MinBytes)
		unused = add(unused, o.unused())
	}
	if in.MinBytes == 0 {
		return nil // nothing is promised, nothing can be broken
	}
	lasting := add(add(guaranteed, in.UnmanagedBytes), in.UnattributedBytes)
	available := in.Available()
	if in.MinBytes > available {
		e := &AdmitError{AdmitInput: in, WantBytes: in.MinBytes, AvailableBytes: available, GuaranteedBytes: guaranteed}
		e.Transient = in.MinBytes <= in.AllocatableBytes-min(in.AllocatableBytes, lasting)
		e.Sentence = fmt.Sprintf("memory.min %s does not fit on %s: %s of %s allocatable are left (%s guaranteed to others, %s unmanaged, %s unattributed, %s of exited processes)",
			quota.HumanBytes(in.MinBytes), in.UUID, quota.HumanBytes(available), quota.HumanBytes(in.AllocatableBytes),
			quota.HumanBytes(guaranteed), quota.HumanBytes(in.UnmanagedBytes), quota.HumanBytes(in.UnattributedBytes), quota.HumanBytes(in.dying()))
		return e
	}
	if !in.FreeNow || !in.FreeKnown {
		return nil
	}
	want := in.MinBytes - min(in.MinBytes, in.ChargedBytes)
	free := in.FreeBytes - min(in.FreeBytes, unused)
	if want > free {
		e := &AdmitError{AdmitInput: in, WantBytes: want, AvailableBytes: free, GuaranteedBytes: guaranteed}
		e.ShortBytes = add(want, unused) - in.FreeBytes
		e.Transient = want <= add(free, in.DyingBytes)
		e.Sentence = fmt.Sprintf("memory.min %s is not free now on %s: %s are free, %s of them promised to others and not yet used",
			quota.HumanBytes(in.MinBytes), in.UUID, quota.HumanBytes(in.FreeBytes), quota.HumanBytes(min(unused, in.FreeBytes)))
		return e
	}
	return nil
}
