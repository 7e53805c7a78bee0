// SPDX-License-Identifier: Apache-2.0

// Package config reads node policy, /etc/gpufence/config.toml: what quota and plan decide by,
// and where things lie. A missing file means every default; a wrong one is an error that names
// the line, and never replaces a good one that is in force.
package config

import (
	"time"

	"github.com/gpufence/gpufence/enforcer/quota"
)

// DefaultPath is where the wrapper, the hook and gpufenced look; GPUFENCE_CONFIG in the
// environment of these host programs overrides it (never a container's environment).
const DefaultPath = "/etc/gpufence/config.toml"

// Config is the whole file, defaults filled in.
type Config struct {
	Policy quota.Policy // mode, require, default, ceiling, namespaces, accept, overcommit, ...

	Socket   string // /run/gpufence/gpufenced.sock
	RunDir   string // /run/gpufence: state that ends with the boot
	StateDir string // /var/lib/gpufence: journal, policy's last good copy

	Runtimes []string // low-level runtimes, in order of preference; names or absolute paths
	HookPath string   // gpufence-hook; "" means beside the wrapper

	ShimDelivery string // preload, stub, off
	ShimLibrary  string // libgpufence.so on the host; "" means ../lib/gpufence/libgpufence.so of the program
	// ShimLibrary32 is the empty library that 32-bit programs get under the shim's name; "" means
	// libgpufence32.so beside ShimLibrary, if there is one.
	ShimLibrary32 string

	CDISpecDirs []string // /etc/cdi, /var/run/cdi
	CDIKinds    []string // nvidia.com/gpu, gpufence.dev/gpu (generated), gpufence.dev/simgpu: tried in order

	NVMLLibrary string // "" means the loader's libnvidia-ml.so.1
	// DmemDir is where the files of the kernel's dmem controller are, for a simulated GPU; "" means in
	// the cgroups' own folders.
	DmemDir string

	Sample         time.Duration // 100 ms: period on a GPU with a granted container
	SampleIdle     time.Duration // 1 s: elsewhere
	SampleDeadline time.Duration // 2 s: after that an NVML call counts as hung
	Settle         time.Duration // 1 s: longest NVML lag that is tolerated
	StuckAfter     time.Duration // 10 s: dying memory counts again
	KillSlackBytes uint64        // 64 MiB
	KillSlackShare float64       // 0.02 of memory.max; the greater of the two
	KillInterval   time.Duration // 20 ms: least distance of the two samples
	ReserveBytes   uint64        // 256 MiB
	ReserveShare   float64       // 0.03; the greater of the two
	ContextBytes   uint64        // 0: by model; published until a context was seen
	ModuleBytes    uint64        // 2 MiB: what a loaded module or library is charged; 0: excess covers it
	PrepareHold    time.Duration // 60 s: a prepared grant that is not registered gives its bytes back
	PagesHold      time.Duration // 1 h: and its pages
	ResizeDeadline time.Duration // 30 s
	EndedKeep      time.Duration // 10 min
	WaitSocket     time.Duration // 5 s: how long wrapper and hook wait for gpufenced

	Unmanaged       string   // allow, warn, deny, kill: GPU use that did not come through gpufence
	UnmanagedExempt []Exempt // and whose is nobody's business
	ShimMissing     string   // report, kill: a GPU process that the shim does not see

	FailOpen  bool   // a start goes on, unfenced, where gpufenced does not answer
	Admit     string // free: min < max also needs the bytes free now; kill-over-min: room is made
	Placement string // spread, binpack: which GPUs `gpu = any` gets
	// Gate is auto, enforce, audit or off: what the kernel weighs before the driver gives it. GateStrict also
	// refuses what cannot be verified there, and believes frees only when NVML shows them.
	Gate       string
	GateStrict bool
	GatePins   string // /sys/fs/bpf/gpufence: where the gate stays while gpufenced is away
	// GateManaged is audit or enforce: whether managed memory is refused that memory.max and memory.swap.max
	// leave no room for.
	GateManaged string

	KillMPS bool // clients of an MPS server may be killed, though that can fault their peers

	Throttle    string        // above memory.high: shim, freeze (also freezes processes without it), off
	FreezeSlice time.Duration // 50 ms: the longest that a container is frozen at a time
	FreezeShare float64       // 0.5: the greatest part of the time

	MetricsAddress string // TCP address of /metrics; "": only on the socket
}
