// SPDX-License-Identifier: Apache-2.0

package policy

// Guarantee is what one pod is promised on a GPU, and what it uses. A pod counts once: the
// greater of its own memory.min and the sum of its containers'.
type Guarantee struct {
	Pod          PodID
	MinBytes     uint64
	ChargedBytes uint64
}

// AdmitInput is a GPU before a container starts or grows.
type AdmitInput struct {
	UUID              string
	AllocatableBytes  uint64
	Others            []Guarantee // every pod but the asking one
	UnmanagedBytes    uint64
	UnattributedBytes uint64
	DyingBytes        uint64
	// FreeKnown and FreeBytes are NVML's, with FreeNow (policy admit = "free").
	FreeNow   bool
	FreeKnown bool
	FreeBytes uint64
	// MinBytes is what the asking pod would be promised in all, ChargedBytes what it uses.
	MinBytes     uint64
	ChargedBytes uint64
}

// AdmitError says what is missing.
type AdmitError struct {
	AdmitInput
	WantBytes       uint64
	AvailableBytes  uint64
	GuaranteedBytes uint64 // to others
	// Transient: dying memory is the reason, so that waiting helps.
	Transient bool
	Sentence  string
}

func (e *AdmitError) Error() string { return e.Sentence }

// Admit says whether the guarantee can be given; the error is an [AdmitError].
func Admit(in AdmitInput) error { panic("soon") }
