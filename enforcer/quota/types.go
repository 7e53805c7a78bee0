// SPDX-License-Identifier: Apache-2.0

// Package quota holds what a user may write and what it means: keys, quantities, aliases, node
// policy, grants, and the codes of every error. It is pure and imports nothing of ours.
package quota

import "math"

// Unlimited is the byte count of `max`: no limit at this level.
const Unlimited uint64 = math.MaxUint64

// Engine names the container engine that started the wrapper. It decides which keys, aliases
// and environment variables are read; it comes from the wrapper's own name, never from
// something that a user can write.
type Engine string

// The engines.
const (
	EngineCRI    Engine = "cri" // containerd's CRI plugin
	EngineCRIO   Engine = "crio"
	EngineDocker Engine = "docker"
	EnginePodman Engine = "podman"
	EngineOCI    Engine = "oci" // anything else: single containers
)

// Mode says what gpufence does with what it finds.
type Mode string

// The modes.
const (
	ModeEnforce Mode = "enforce"
	ModeWarn    Mode = "warn"    // observe, and say what would have happened
	ModeObserve Mode = "observe" // compute and report; mount, refuse, slow and kill nothing
)

// Level is what a user may rely on (design: fences and levels).
type Level string

// The levels, from the lowest.
const (
	LevelNone     Level = "none"
	LevelAdvisory Level = "advisory"
	LevelReactive Level = "reactive"
	LevelHard     Level = "hard"
)

// AtLeast says whether l gives what o promises.
func (l Level) AtLeast(o Level) bool { return l.rank() >= o.rank() }

func (l Level) rank() int {
	switch l {
	case LevelAdvisory:
		return 1
	case LevelReactive:
		return 2
	case LevelHard:
		return 3
	default:
		return 0
	}
}

// GPU is what limits are computed against. A MIG instance is a GPU of its own.
type GPU struct {
	UUID             string `json:"uuid"`  // GPU-... or MIG-...
	Index            int    `json:"index"` // NVML's; for people, never a key
	Name             string `json:"name"`
	TotalBytes       uint64 `json:"total_bytes"`
	AllocatableBytes uint64 `json:"allocatable_bytes"` // total - driver's reserve - policy reserve
	ContextBytes     uint64 `json:"context_bytes"`     // published size of one context, an upper bound
}

// Limits are the cgroup-like limits of one level (pod or container) on one GPU, in bytes.
type Limits struct {
	Max     uint64 `json:"max"`      // memory.max; Unlimited for none
	High    uint64 `json:"high"`     // memory.high; Unlimited for none
	Min     uint64 `json:"min"`      // memory.min; 0 for none
	SwapMax uint64 `json:"swap_max"` // memory.swap.max; 0 by default
}

// Grant is what one container may have, after parsing, defaults and ceilings. Both levels hold
// at once; a GPU that is missing in a map has no limit at that level.
type Grant struct {
	GPUs      []GPU             `json:"gpus"`      // in the container's own order
	Pod       map[string]Limits `json:"pod"`       // by GPU UUID
	Container map[string]Limits `json:"container"` // by GPU UUID
	OOMGroup  bool              `json:"oom_group"`
	Require   Level             `json:"require"`
	Mode      Mode              `json:"mode"`
}
