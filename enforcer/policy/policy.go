// SPDX-License-Identifier: Apache-2.0

// Package policy decides, for one GPU, what the samples and grants mean: what each container is
// charged, what its shims cannot see, which slots may be taken back, whom to kill and why, and how
// a limit changes. It is pure: no clock, no I/O, no goroutine; time comes in, decisions come out,
// the same input gives the same output.
//
// What it promises:
//   - Nothing is decided on what is not known: a kill needs two complete answers whose NVML calls
//     began [Config.KillInterval] apart, and counts live processes of known size only.
//   - At most one kill in one step, and its reason says the candidates, numbers and threshold.
//   - Excess never refuses a legal allocation as long as NVML lags at most [Config.Settle].
//   - Whoever gets the pid of an exited process is not blamed for what that one has left.
package policy

import (
	"time"

	"github.com/gpufence/gpufence/enforcer/quota"
)

// Config is node policy as far as decisions need it.
type Config struct {
	Settle         time.Duration // 1 s: longest NVML lag that is tolerated
	StuckAfter     time.Duration // 10 s: dying memory counts again
	ShimGrace      time.Duration // 5 s: a GPU process without a slot is reported after that
	KillInterval   time.Duration // 20 ms: least distance of the two samples
	KillRetry      time.Duration // 2 s: a killed process that still lives may be judged again
	KillSlackBytes uint64        // 64 MiB
	KillSlackShare float64       // 0.02 of the limit; the greater of the two
	// ManagedAttributed: this driver counts managed pages for their process.
	ManagedAttributed bool
	// KillMPS lets clients of an MPS server be killed, which can fault their peers.
	KillMPS bool
	// UnmanagedKill kills GPU processes that did not come through gpufence and are not exempt.
	UnmanagedKill bool
	// ShimKill kills containers with a GPU process that the shim has not seen for ShimGrace.
	ShimKill bool
	// FreezeShare is the greatest part of the time that a container above memory.high whose
	// processes no shim slows is frozen; 0 for never.
	FreezeShare float64
	// Horizon is how far a container's growth is looked ahead (see [ContainerState.Rising]).
	Horizon time.Duration
}

// DefaultConfig are the defaults of node policy.
func DefaultConfig() Config {
	return Config{
		Settle: time.Second, StuckAfter: 10 * time.Second, ShimGrace: 5 * time.Second,
		KillInterval: 20 * time.Millisecond, KillRetry: 2 * time.Second, Horizon: 250 * time.Millisecond,
		KillSlackBytes: 64 << 20, KillSlackShare: 0.02,
	}
}

// Slack is how far above a limit a kill begins.
func (c Config) Slack(limit uint64) uint64 {
	if limit == quota.Unlimited {
		return c.KillSlackBytes
	}
	share := c.KillSlackShare
	if !(share >= 0) { // NaN too
		share = 0
	}
	return max(c.KillSlackBytes, uint64(min(share, 1)*float64(limit)))
}

// ContainerID names a container; opaque here.
type ContainerID string

// PodID names a pod; opaque here.
type PodID string

// ProcState says how far a process is.
type ProcState int

// States of a process.
const (
	Live    ProcState = iota
	Exiting           // PF_EXITING, or killed by us
	Exited            // reaped or zombie: its pidfd is readable, or its pid is gone or reused
	// Unreadable: somebody has the pid, but who could not be read this time. What was known of
	// it stays; nobody new is blamed.
	Unreadable
)

// ProcFact is what is known about a pid: a fact that was stable around reading its cgroup. There
// must be one for each pid that NVML lists and for each owner of a slot, unless it is gone.
type ProcFact struct {
	PID       int
	Start     uint64      // start time as /proc of the host says it
	Container ContainerID // "" for none of ours
	State     ProcState
	Comm      string
	Exempt    bool // none of ours, and the node's policy knows of it
}

// SlotFact is a slot of a pod's ledger that is not free, with its numbers on this GPU.
type SlotFact struct {
	Pod        PodID
	Index      int
	Generation uint32
	Dying      bool // its state in the ledger
	// PID and Start name the owner as found in the pod's cgroups, 0 if nobody was found.
	PID      int
	Start    uint64
	LockFree bool
	// Overflow marks the pod's overflow slot, which has no owner and is never taken back here.
	Overflow bool

	DeviceBytes  uint64
	ManagedBytes uint64
	SwapBytes    uint64
	// Number is what its pod's pages showed as the newest sample when this one's call began; 0
	// for the sample's own number. It may be the same in several samples: a pod's number stands
	// still while one of its GPUs has not answered.
	Number uint64
	// PeakBytes is the greatest device charge by sample number, for the numbers that the slot
	// was touched in (at most the newest of the limits page and the one before, also if that is
	// newer than this sample's).
	PeakBytes map[uint64]uint64
	// Imports: its owner has opened memory of another process.
	Imports bool
	// Gap: the number went on while the call was in progress, so peaks may be missing.
	Gap bool
}

// ContainerFact is a registered container that has this GPU.
type ContainerFact struct {
	ID        ContainerID
	Pod       PodID
	Name      string       // for sentences
	Container quota.Limits // memory.max etc. of the container; Max is Unlimited for none
	PodLimits quota.Limits // of its pod
	OOMGroup  bool
	Mode      quota.Mode
	// ShimAbsent, when not empty, says why its processes cannot load the shim.
	ShimAbsent string
	// ShimUnknown: its slots cannot be read, so that a process without one tells nothing.
	ShimUnknown bool
	// Priority and Started order those that may have to make room: the lower and the younger
	// first.
	Priority int
	Started  time.Duration
}

// Sample is what NVML said.
type Sample struct {
	Number    uint64        // published in the limits pages before the call
	Began     time.Duration // monotonic
	Complete  bool          // every process list was answered
	Why       string        // what is missing
	Processes []ProcessUse

	DeviceKnown   bool // of the three below
	TotalBytes    uint64
	UsedBytes     uint64 // without what the driver reserves
	ReservedBytes uint64
}

// ProcessUse is a row of NVML's answer.
type ProcessUse struct {
	PID   int
	Bytes uint64
	Known bool
	MPS   bool // a client of an MPS server
}

// Input is one step.
type Input struct {
	Now        time.Duration // monotonic
	Sample     Sample
	Processes  []ProcFact
	Slots      []SlotFact
	Containers []ContainerFact
}

// Output is what a step says. All that is to be acted on is here; nothing is kept by
// reference.
type Output struct {
	Containers map[ContainerID]ContainerState
	Pods       map[PodID]PodState
	Processes  []ProcessState // by rising pid

	UnmanagedBytes uint64 // processes that did not come through gpufence
	// UnmanagedSteadyBytes is the least of them in the last settle: a burst is no reason to
	// refuse a start.
	UnmanagedSteadyBytes uint64
	Unmanaged            []ProcessState // those that live and are not exempt, in two answers
	UnattributedBytes    uint64         // used, but by no process
	DyingBytes           uint64         // all of them, stuck ones too
	Known                bool           // the sample was complete and the device's numbers known
	Why                  string

	// MarkDying are slots whose owner exited.
	MarkDying []SlotRef
	// Reclaimable are slots that this GPU has no objection against; see [Reclaimable].
	Reclaimable []SlotRef

	Kill      *Kill  // to be done now; at most one
	WouldKill []Kill // in mode observe or warn, once an episode
	Withheld  []Kill // whose Withheld says why nobody is killed, once an episode

	Stuck   []ProcessState // became stuck in this step
	Resizes []ResizeChange // that ended in this step
}

// SlotRef names a slot in a generation. Exited says that its owner is gone for certain, so that
// a lock which a child has inherited does not matter.
type SlotRef struct {
	Pod        PodID
	Index      int
	Generation uint32
	Exited     bool
}

// ContainerState is a container on this GPU.
type ContainerState struct {
	// ChargedBytes, over live and stuck processes: max(ledger device, NVML - shared), + managed. What
	// only the ledger says is not above the limit: a reserve announces before it asks.
	ChargedBytes uint64
	NVMLBytes    uint64 // live processes, known sizes
	SharedBytes  uint64 // of NVMLBytes, what NVML lists under its owner, too; it is charged there
	TrustedBytes uint64 // of SharedBytes, what this answer does not bear out
	LedgerBytes  uint64 // device counters of live slots
	ManagedBytes uint64
	SwapBytes    uint64
	ExcessBytes  uint64 // to publish
	DyingBytes   uint64 // exited, still listed, not yet stuck
	StuckBytes   uint64
	SteadyBytes  uint64 // the smaller NVMLBytes - SharedBytes of the last two complete answers
	PeakBytes    uint64 // greatest ChargedBytes since this GPU's state was made
	Known        bool   // NVML answered and every process's size is known
	OverMax      bool   // this sample counts for over_max
	// Rising: processes without a slot grow so fast that the limit may be crossed within the
	// horizon, so the next sample should not wait for a whole period.
	Rising bool
	// FreezeShare is the part of the time for which the container is to be frozen.
	FreezeShare float64
	Shim        Shim
	// PublishedMax is what the limits page shows: the grant, or a pending resize's target.
	PublishedMax uint64
}

// PodState is a pod on this GPU: the sums over its containers.
type PodState struct {
	ChargedBytes uint64
	NVMLBytes    uint64
	SharedBytes  uint64
	ExcessBytes  uint64
	DyingBytes   uint64
	PeakBytes    uint64
	Known        bool
	OverMax      bool
	PublishedMax uint64
}

// Shim says what is seen of a container's shim on this GPU.
type Shim struct {
	State string // delivered, seen, absent
	Why   string // of absent
	PIDs  []int  // GPU processes without a slot
}

// ProcessState is a process on this GPU.
type ProcessState struct {
	PID         int
	Start       uint64
	Container   ContainerID
	Comm        string
	State       string // live, exiting, dying, stuck
	NVMLBytes   uint64
	Known       bool
	Listed      bool
	Slot        int // -1: none
	LedgerBytes uint64
	ExcessBytes uint64
	SharedBytes uint64
	Since       time.Duration // when it began to die
}

// Kill is a decision.
type Kill struct {
	Container ContainerID // "" for an unmanaged process
	Pod       PodID
	// Scope is whose limit was crossed: container or pod; room for one that has to go for a
	// guarantee, shim for one whose process no shim sees, unmanaged for a process that did not
	// come through gpufence.
	Scope string
	Group bool // the whole container; else PID only
	PID   int  // largest GPU process of the container
	Start uint64
	PIDs  []int // its live GPU processes, largest first

	UsedBytes      uint64 // of the scope
	MaxBytes       uint64
	SlackBytes     uint64
	ThresholdBytes uint64
	First, Second  time.Duration // when the two samples' calls began
	Candidates     []Candidate   // considered, best first
	Forced         bool          // by a resize with force
	// Escalated: the whole container, since a process of it that was killed did not go. Again:
	// all of it was killed before and is not gone, so it is not counted again.
	Escalated bool
	Again     bool
	Withheld  string // why it is not done

	Reason  string // one sentence with the numbers, for the journal
	Message string // one sentence for the termination message
}

// Candidate is a container that was considered.
type Candidate struct {
	Container ContainerID
	Name      string
	UsedBytes uint64
	MaxBytes  uint64
	Over      bool // above its own limit
}
