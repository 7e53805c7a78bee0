// SPDX-License-Identifier: Apache-2.0

package ledger

import "time"

// The Go mirror of shim/abi.h. layout_test.go compiles that header and compares every number
// here with the C compiler's.
const (
	ABIMajor = 1
	ABIMinor = 3

	// LimitsMagic reads "GPUFLIM1" in memory order, LedgerMagic "GPUFLDG1".
	LimitsMagic uint64 = 0x314d494c46555047
	LedgerMagic uint64 = 0x3147444c46555047

	// GPUs is how many GPUs (or MIG instances) the containers of one pod may have together:
	// an index is the pod's.
	GPUs = 16
	// Slots is the number of slots of a ledger by default, without the overflow slot.
	Slots = 512
	// Unlimited is the byte count of no limit at this level.
	Unlimited = ^uint64(0)
	// UnitBytes is what the ledger's counters count in.
	UnitBytes = 4096
	// StaleAfter is how long the heartbeat may stand still before a shim takes gpufenced for
	// away. The last limits stay in force then.
	StaleAfter = 10 * time.Second

	// LimitsName and LedgerName are the files' names on both sides.
	LimitsName = "limits"
	LedgerName = "ledger"
	// ContainerDir is where a container finds them unless its /dev is the host's.
	ContainerDir = "/dev/gpufence"

	gpuPresent uint64 = 1
	gpuFenced  uint64 = 2

	unitsBits             = 40
	unitsMask      uint64 = 1<<unitsBits - 1
	generationMask uint64 = 0xffffff

	// ledgerLockOffset + gpu is the byte that the slow path of a reserve locks.
	ledgerLockOffset  = 0x800
	ledgerHeaderBytes = 4096
)

// Offsets and sizes, in bytes.
const (
	limitsGPUUUID        = 0x00
	limitsGPUFlags       = 0x10
	limitsGPUTotal       = 0x18
	limitsGPUContext     = 0x20
	limitsGPUMax         = 0x28
	limitsGPUHigh        = 0x30
	limitsGPUSwapMax     = 0x38
	limitsGPUPodMax      = 0x40
	limitsGPUPodHigh     = 0x48
	limitsGPUPodSwapMax  = 0x50
	limitsGPUExcess      = 0x58
	limitsGPUPodExcess   = 0x60
	limitsGPUModule      = 0x68
	limitsGPUReserved    = 0x70
	limitsGPUBytes       = 0x80
	limitsCopyGeneration = 0x00
	limitsCopyGPUCount   = 0x08
	limitsCopyCRC        = 0x0c
	limitsCopyGPU        = 0x10
	limitsCopyBytes      = limitsCopyGPU + GPUs*limitsGPUBytes
	limitsMagic          = 0x00
	limitsMajor          = 0x08
	limitsMinor          = 0x0a
	limitsHeaderBytes    = 0x0c
	limitsTotalBytes     = 0x10
	limitsContainerIndex = 0x18
	limitsGPUSize        = 0x1c
	limitsCopySize       = 0x20
	limitsReserved0      = 0x24
	limitsBootID         = 0x28
	limitsReserved1      = 0x38
	limitsLatch          = 0x40
	limitsWriterEpoch    = 0x48
	limitsHeartbeat      = 0x50
	limitsSample         = 0x58
	limitsReserved2      = 0x60
	limitsCopies         = 0x80
	limitsBytes          = limitsCopies + 2*limitsCopyBytes
	slotGPUDevice        = 0x00
	slotGPUManaged       = 0x08
	slotGPUSwap          = 0x10
	slotGPUPeak          = 0x18
	slotGPUEventsMax     = 0x28
	slotGPUEventsDevice  = 0x30
	slotGPUEventsHigh    = 0x38
	slotGPUBytes         = 0x40
	slotOwner            = 0x00
	slotPidnsInode       = 0x08
	slotStartTicks       = 0x10
	slotContainerIndex   = 0x18
	slotShimABI          = 0x1c
	slotFlags            = 0x20
	slotAllocs           = 0x28
	slotFrees            = 0x30
	slotThrottled        = 0x38
	slotImports          = 0x78
	slotGPU              = 0x80
	// importsABI is the first shim_abi whose slots say something in slotImports.
	importsABI           = 1<<16 | 3
	slotBytes            = slotGPU + GPUs*slotGPUBytes
	headerMagic          = 0x00
	headerMajor          = 0x08
	headerMinor          = 0x0a
	headerHeaderBytes    = 0x0c
	headerTotalBytes     = 0x10
	headerSlotCount      = 0x18
	headerSlotBytes      = 0x1c
	headerGPUCountMax    = 0x20
	headerReserved0      = 0x24
	headerHighSlot       = 0x28
	headerReclaimRequest = 0x30
	headerPressed        = 0x38
	headerBytes          = 0x40
)

// SlotState is the middle byte of a slot's owner word.
type SlotState uint8

// States of a slot.
const (
	SlotFree  SlotState = 0
	SlotLive  SlotState = 1 // counted by a reserve
	SlotDying SlotState = 2 // owner exited, NVML still lists it: in no reserve's sum
)

func (s SlotState) String() string {
	switch s {
	case SlotFree:
		return "free"
	case SlotLive:
		return "live"
	case SlotDying:
		return "dying"
	}
	return "unknown"
}

// Owner is a slot's owner word: who has it, and since which generation.
type Owner struct {
	Generation uint32 // 24 bits
	State      SlotState
	PID        uint32 // what getpid() says in the owner's pid namespace
}

func unpackOwner(w uint64) Owner {
	return Owner{Generation: uint32(w >> 40), State: SlotState(w >> 32), PID: uint32(w)}
}

func (o Owner) pack() uint64 {
	return uint64(o.Generation)&generationMask<<40 | uint64(o.State)<<32 | uint64(o.PID)
}

func nextGeneration(g uint32) uint32 { return (g + 1) & uint32(generationMask) }

// ledgerBytes is the size of a ledger with so many slots; the overflow slot is one more.
func ledgerBytes(slots int) int64 {
	return ledgerHeaderBytes + int64(slots+1)*slotBytes
}

func slotOffset(slot int) int64 { return ledgerHeaderBytes + int64(slot)*slotBytes }
