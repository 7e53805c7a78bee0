// SPDX-License-Identifier: Apache-2.0

// Package ledger owns the pages that gpufenced and the shims share: it lays them out, writes
// the limits pages, reads the ledgers, and takes slots back from owners that are gone.
//
// What it promises:
//   - A container's limits page is never torn: two copies behind a latch, each with a checksum.
//   - Nothing that a container writes can crash, block or mislead the reader beyond its own
//     pod: a ledger is read by pread into private memory, checked, and used only from there; its
//     mapping only tells whether it is still what was read. A page that breaks a rule is
//     [ErrBroken]; a file that was cut while we look at it is an error too, not a SIGBUS.
//   - A slot is given away by one compare-and-swap of its owner word, from the generation that
//     the caller judged to the next one. Whoever still holds the old generation cannot change a
//     number that counts.
//   - Existing files are adopted after a restart, never recreated: containers have them mounted.
//
// Lock order: a slot's lock before nothing else; no lock here is ever waited for. The methods of
// [Pod], [Container] and [Ledger] may be called from several goroutines.
package ledger

import (
	"errors"
	"fmt"
)

var (
	// ErrBroken is what a container did to a shared page: sizes, magic or numbers that cannot
	// be. The pod's shim accounting is quarantined then.
	ErrBroken = errors.New("shared page is broken")
	// ErrBusy says that somebody holds a slot's lock.
	ErrBusy = errors.New("slot is locked")
	// ErrMoved says that a slot is not in the generation and state that the caller judged.
	ErrMoved = errors.New("slot has changed hands")
)

// BrokenError says which rule a shared page breaks. It is [ErrBroken].
type BrokenError struct {
	Path string
	Why  string
}

func (e *BrokenError) Error() string {
	return fmt.Sprintf("read %s: %s: %v", e.Path, e.Why, ErrBroken)
}

// Is makes errors.Is(err, ErrBroken) true.
func (e *BrokenError) Is(target error) bool { return target == ErrBroken }

// LimitsGPU is what holds for one GPU, as the shim reads it. Unlimited: no limit at that level.
// The zero value is an entry of another container of the pod.
type LimitsGPU struct {
	UUID            [16]byte
	Present         bool // this container has the GPU
	Fenced          bool // limits apply; false in observe mode
	TotalBytes      uint64
	ContextBytes    uint64
	MaxBytes        uint64
	HighBytes       uint64
	SwapMaxBytes    uint64
	PodMaxBytes     uint64
	PodHighBytes    uint64
	PodSwapMaxBytes uint64
	ExcessBytes     uint64
	PodExcessBytes  uint64
	ModuleBytes     uint64 // what the shim charges for a loaded module; 0: nothing, excess covers it
}

// Limits is one generation of a container's grant. GPU is indexed by the pod's index.
type Limits struct {
	Generation uint64
	GPU        []LimitsGPU // at most GPUs
}

// LimitsView is a limits page as a reader sees it.
type LimitsView struct {
	Limits
	ContainerIndex uint32
	WriterEpoch    uint64
	Heartbeat      uint64
	Sample         uint64
}

// Snapshot is a ledger at one moment, checked, in private memory.
type Snapshot struct {
	ReclaimRequest uint64
	// Slots are those that are not free, by rising index.
	Slots []Slot
	// Overflow is the slot that processes without one share. Its Index is the slot count.
	Overflow Slot
}

// Slot is one slot. Counters of another generation than the owner's are already 0 here.
type Slot struct {
	Index int
	Owner
	PIDNSInode     uint64
	StartTicks     uint64
	ContainerIndex uint32 // what the owner claims; never believed
	ShimABI        uint32
	Allocs         uint64
	Frees          uint64
	// Imports is how often the owner has opened memory of another process; 0 where its shim does
	// not say.
	Imports uint64
	GPU     [GPUs]SlotGPU
}

// SlotGPU are a slot's numbers on one GPU.
type SlotGPU struct {
	DeviceBytes  uint64
	ManagedBytes uint64
	SwapBytes    uint64
	// Peak holds the greatest DeviceBytes during two samples; an entry counts for the sample
	// whose number it carries (the lowest 24 bits), a sample without an entry had DeviceBytes.
	Peak   [2]Peak
	Events SlotEvents
}

// Peak is the greatest device charge while one NVML sample was the newest.
type Peak struct {
	Sample uint32 // lowest 24 bits of the sample's number
	Bytes  uint64
}

// PeakDuring says the greatest charge that the slot reports for sample number n, ok if it was
// touched then.
func (g *SlotGPU) PeakDuring(n uint64) (bytes uint64, ok bool) {
	p := g.Peak[n&1]
	if uint64(p.Sample) != n&generationMask {
		return 0, false
	}
	return p.Bytes, true
}

// Peaks are both peaks by the number of their sample, where they are of the newest number or the
// one before it; older ones say nothing any more.
func (g *SlotGPU) Peaks(newest uint64) map[uint64]uint64 {
	peaks := make(map[uint64]uint64, 2)
	for _, n := range [...]uint64{newest - 1, newest} {
		if b, ok := g.PeakDuring(n); ok {
			peaks[n] = b
		}
	}
	return peaks
}

// SlotEvents are what a process says happened to it.
type SlotEvents struct {
	Max    uint64 `json:"max"`    // refused: own limit
	Device uint64 `json:"device"` // refused: the GPU is full
	High   uint64 `json:"high"`   // delayed above memory.high

	ThrottledMS uint64 `json:"throttled_ms,omitempty"` // for how long, added up
}
