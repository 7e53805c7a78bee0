// SPDX-License-Identifier: Apache-2.0

// Package api is what gpufenced says and hears on its unix socket: HTTP/1.1 with JSON bodies,
// versioned by path (/v1/...). Requests and answers are the types of this file; unknown fields
// are ignored on both sides, fields are only added, so that the two sides may differ by a
// version. Errors are an [Error] body with a stable code; see docs/errors.md.
//
// Who may call: uid 0 everything, group gpufence reads (peer credentials of the socket).
package api

import (
	"time"

	"github.com/gpufence/gpufence/enforcer/quota"
)

// ContainerKey identifies a container for the life of a node. Scope is the containerd
// namespace or the runtime root: ids are unique only within it.
type ContainerKey struct {
	Engine quota.Engine `json:"engine"`
	Scope  string       `json:"scope"`
	ID     string       `json:"id"`
}

// PodRef is the group that shares a ledger and a pod-level limit: the sandbox under CRI, the
// container itself elsewhere (ID is then the container's).
type PodRef struct {
	ID        string `json:"id"`
	Namespace string `json:"namespace,omitempty"`
	Name      string `json:"name,omitempty"`
	UID       string `json:"uid,omitempty"`
}

// DeviceRequest is how the spec asks for GPUs, as found, in the container's own order.
type DeviceRequest struct {
	// Selectors are UUIDs, indices ("0"), "all", device nodes ("/dev/nvidia0",
	// "/dev/simgpu/gpu0") or CDI names ("nvidia.com/gpu=0").
	Selectors []string `json:"selectors,omitempty"`
	// Present says that the devices are in the spec already (CDI by the engine, a device
	// plugin's nodes): nothing is to be injected.
	Present bool `json:"present,omitempty"`
	// Claimed are what the environment names under Kubernetes without being UUIDs: all, indices.
	// They count only if the kubelet gave the container GPUs, and then these are what it gets.
	Claimed []string `json:"claimed,omitempty"`
}

// PrepareRequest is POST /v1/prepare, idempotent by Key. It carries what the limits are
// computed from, raw, so that gpufenced alone decides; the wrapper has parsed it before only to
// fail early.
type PrepareRequest struct {
	Key           ContainerKey      `json:"key"`
	Pod           PodRef            `json:"pod"`
	ContainerName string            `json:"container_name,omitempty"`
	Bundle        string            `json:"bundle"`
	Annotations   map[string]string `json:"annotations,omitempty"`
	Env           []string          `json:"env,omitempty"` // only variables that we read
	Devices       DeviceRequest     `json:"devices"`
	// ImagePreload is the image's own /etc/ld.so.preload, kept behind our line.
	ImagePreload string `json:"image_preload,omitempty"`
	// ShimDir is where the pages appear in the container (/dev/gpufence, or
	// /run/gpufence-shim where /dev is the host's).
	ShimDir string `json:"shim_dir"`
	// ShimAbsent, when not empty, says why the shim cannot be delivered: "musl", "static", ...
	ShimAbsent string `json:"shim_absent,omitempty"`
	// NarrowLib says that the image keeps a 32-bit C library in /lib, so that this is what $LIB
	// stands for in 32-bit programs. Elsewhere it is that in 64-bit ones, or in none.
	NarrowLib bool `json:"narrow_lib,omitempty"`
	// TerminationLog is the host path of the container's termination message, if any.
	TerminationLog string `json:"termination_log,omitempty"`
	Privileged     bool   `json:"privileged,omitempty"`
}

// PrepareResponse is what the plan is made of.
type PrepareResponse struct {
	Grant quota.Grant `json:"grant"`
	// CDIDevices are the qualified names to inject, empty when Devices.Present.
	CDIDevices []string `json:"cdi_devices,omitempty"`
	// Files are the host's files to bind into the container, destination below ShimDir or
	// /etc/ld.so.preload.
	Files []SharedFile `json:"files,omitempty"`
	// Env are variables, NAME=value, that tell NVIDIA's own hook of the grant where the driver limits
	// memory.
	Env []string `json:"env,omitempty"`
	// Notices are one-line remarks for the engine's log.
	Notices []string `json:"notices,omitempty"`
}

// SharedFile is one bind mount.
type SharedFile struct {
	Source      string `json:"source"`
	Destination string `json:"destination"`
	Writable    bool   `json:"writable,omitempty"`
	// Over, when not empty, is the name of a library without its version: Source goes over every
	// mount of a file by that name, and what was there goes to Destination.
	Over string `json:"over,omitempty"`
}

// RegisterRequest is POST /v1/register, from the createRuntime hook. PID is the container's
// init in the host's pid namespace; gpufenced finds the cgroup itself.
type RegisterRequest struct {
	Key    ContainerKey `json:"key"`
	PID    int          `json:"pid"`
	Bundle string       `json:"bundle,omitempty"`
}

// RegisterResponse says what holds the container from now on.
type RegisterResponse struct {
	Level   quota.Level `json:"level"`
	Fences  []Fence     `json:"fences"`
	Notices []string    `json:"notices,omitempty"`
}

// UnregisterRequest is POST /v1/unregister, from the poststop hook; unknown keys are no error.
type UnregisterRequest struct {
	Key ContainerKey `json:"key"`
}

// Fence is one mechanism and what it read back. State is proven, degraded or absent; the
// shim's is delivered, seen or absent.
type Fence struct {
	Name  string `json:"name"` // watch, shim, ...
	State string `json:"state"`
	Why   string `json:"why,omitempty"`   // of degraded and absent: "static", "musl", "no slot"
	Proof string `json:"proof,omitempty"` // what was read back
	PIDs  []int  `json:"pids,omitempty"`  // processes that it does not see
}

// Container is GET /v1/containers/{id} and an element of GET /v1/containers. Ended containers
// are kept for 10 minutes (policy ended-keep). {id} is an unambiguous prefix of the id, the
// container name, the pod name, or pod/container.
type Container struct {
	Key        ContainerKey   `json:"key"`
	Pod        PodRef         `json:"pod"`
	Name       string         `json:"name,omitempty"`
	State      string         `json:"state"` // prepared, running, ended
	PID        int            `json:"pid,omitempty"`
	Cgroup     string         `json:"cgroup,omitempty"`
	Mode       quota.Mode     `json:"mode"`
	Level      quota.Level    `json:"level"`
	Require    quota.Level    `json:"require"`
	OOMGroup   bool           `json:"oom_group"`
	PreparedAt time.Time      `json:"prepared_at"`
	StartedAt  *time.Time     `json:"started_at,omitempty"`
	EndedAt    *time.Time     `json:"ended_at,omitempty"`
	EndReason  string         `json:"end_reason,omitempty"` // exited, killed: <sentence>
	GPUs       []ContainerGPU `json:"gpus"`
	Fences     []Fence        `json:"fences"`
	Resize     *Resize        `json:"resize,omitempty"`
	// Generation grows with every change of a limit, ChangedBy is what made the last one: set,
	// apply, spec; empty for the limits that it started with.
	Generation uint64     `json:"generation"`
	ChangedBy  string     `json:"changed_by,omitempty"`
	ChangedAt  *time.Time `json:"changed_at,omitempty"`
	Processes  []Process  `json:"processes,omitempty"`
}

// ContainerGPU is one row: a container on a GPU. Sizes in bytes; Unlimited is 2^64-1.
type ContainerGPU struct {
	UUID      string       `json:"uuid"`
	Index     int          `json:"index"`
	Limits    quota.Limits `json:"limits"`    // effective: the lower of container and pod
	Container quota.Limits `json:"container"` // as granted at this level
	Pod       quota.Limits `json:"pod"`
	Current   uint64       `json:"current"` // charged: max(ledger device, NVML) summed + managed
	Peak      uint64       `json:"peak"`
	NVML      uint64       `json:"nvml"` // live processes
	// Shared is what of NVML the driver lists under its owner, too; it is charged there.
	Shared  uint64 `json:"shared,omitempty"`
	Ledger  uint64 `json:"ledger"` // device counters of live slots
	Managed uint64 `json:"managed"`
	Swap    uint64 `json:"swap"`
	Excess  uint64 `json:"excess"` // published to the shim
	Dying   uint64 `json:"dying"`  // exited, still listed
	// ThrottledNS is how long its processes were slowed above memory.high, added up over them.
	ThrottledNS uint64 `json:"throttled_ns"`
	Known       bool   `json:"known"` // false: NVML did not answer; numbers are old
	Events      Events `json:"events"`
	// EventsLocal are those of this container's own limits; Events also has what its processes met
	// at the pod's.
	EventsLocal Events `json:"events_local"`
	// What the pod holds together with its other containers, also those that ended.
	PodCurrent     uint64 `json:"pod_current"`
	PodPeak        uint64 `json:"pod_peak"`
	PodEvents      Events `json:"pod_events"`
	PodEventsLocal Events `json:"pod_events_local"` // of the pod's own limits
}

// Events are monotonic counters over the container's life and over gpufenced's restarts.
// Reported ones come from the container's own processes through the ledger; observed ones were
// seen by gpufenced or NVML.
type Events struct {
	High    uint64 `json:"high"`     // reported: delayed above memory.high
	Max     uint64 `json:"max"`      // reported: refused at its own limit
	Device  uint64 `json:"device"`   // reported: refused since the GPU was full
	OverMax uint64 `json:"over_max"` // observed: samples above memory.max
	OOM     uint64 `json:"oom"`      // observed: decisions to kill
	OOMKill uint64 `json:"oom_kill"` // observed: processes killed
	// OOMGroupKill counts kills of a whole container (observed).
	OOMGroupKill uint64 `json:"oom_group_kill"`
}

// Resize follows KEP-1287: four states of a limit on one GPU.
type Resize struct {
	// Key is which limit. Those beside memory.max change at once, or with the memory.max of
	// their level. Of memory.oom.group, 1 is true, and there is no GPU.
	Key       string     `json:"key,omitempty"`
	GPU       string     `json:"gpu"`
	Desired   uint64     `json:"desired"`
	Allocated uint64     `json:"allocated"`
	Actuated  uint64     `json:"actuated"`
	Actual    uint64     `json:"actual"`
	State     string     `json:"state"` // pending, done, ResizeFailed
	Why       string     `json:"why,omitempty"`
	Deadline  *time.Time `json:"deadline,omitempty"`
}

// Process is one GPU process of a container.
type Process struct {
	PID   int    `json:"pid"`
	GPU   string `json:"gpu"`
	NVML  uint64 `json:"nvml"`
	Slot  int    `json:"slot"`  // -1: none, the shim does not see it
	State string `json:"state"` // live, dying, stuck
	Comm  string `json:"comm,omitempty"`
}

// SetRequest is POST /v1/containers/{id}/set.
type SetRequest struct {
	// Values are keys as a user writes them: "memory.max": "6Gi". Scope "pod" changes the
	// pod's limit, "container" the container's; empty: the level that has one.
	Values map[string]string `json:"values"`
	Scope  string            `json:"scope,omitempty"`
	Force  bool              `json:"force,omitempty"`
	// Wait asks for the answer only when the resize is done or has failed.
	Wait bool `json:"wait,omitempty"`
	// DeadlineMillis overrides the policy's resize-deadline (30 s); 0: the policy's.
	DeadlineMillis int64 `json:"deadline_millis,omitempty"`
}

// SetResponse is what became of it.
type SetResponse struct {
	Resizes []Resize `json:"resizes"`
	Notices []string `json:"notices,omitempty"`
}

// GPUState is an element of GET /v1/gpus.
type GPUState struct {
	quota.GPU
	UsedBytes         uint64     `json:"used_bytes"`
	GuaranteedBytes   uint64     `json:"guaranteed_bytes"`   // sum of memory.min
	UnmanagedBytes    uint64     `json:"unmanaged_bytes"`    // processes that did not come through gpufence
	UnattributedBytes uint64     `json:"unattributed_bytes"` // used, but by no process
	DyingBytes        uint64     `json:"dying_bytes"`
	Known             bool       `json:"known"`
	Why               string     `json:"why,omitempty"`
	SampledAt         *time.Time `json:"sampled_at,omitempty"`
}

// Event is an entry of the journal and of GET /v1/events?since=<seq>&follow=1 (JSON lines).
type Event struct {
	Seq       uint64        `json:"seq"`
	Time      time.Time     `json:"time"`
	Type      string        `json:"type"` // registered, ended, kill, refused, resize, shim-absent, gpu-unknown, ...
	Code      string        `json:"code,omitempty"`
	Container *ContainerKey `json:"container,omitempty"`
	Pod       *PodRef       `json:"pod,omitempty"`
	Name      string        `json:"name,omitempty"` // container name
	GPU       string        `json:"gpu,omitempty"`
	Message   string        `json:"message"` // one sentence with the numbers
	// Level is what a container may rely on from its start on (of registered).
	Level   quota.Level       `json:"level,omitempty"`
	Numbers map[string]uint64 `json:"numbers,omitempty"`
	// MonotonicNS is CLOCK_MONOTONIC of the act (of SIGKILL for a kill), for latency.
	MonotonicNS int64 `json:"monotonic_ns,omitempty"`
	// ID ties the entries of one kill together: kill-decided (before), kill (SIGKILL was sent)
	// or kill-failed, kill-confirmed (the memory came back).
	ID string `json:"id,omitempty"`
	// Candidates are whom a decision to kill considered, the chosen one first.
	Candidates []Candidate `json:"candidates,omitempty"`
}

// Candidate is a container that was considered for a kill.
type Candidate struct {
	Name string `json:"name"`
	Used uint64 `json:"used"`
	Max  uint64 `json:"max"`
}

// Version is GET /v1/version.
type Version struct {
	Version  string `json:"version"`
	API      string `json:"api"` // "v1"
	ABIMajor int    `json:"abi_major"`
	ABIMinor int    `json:"abi_minor"`
	Driver   string `json:"driver,omitempty"`
	PID      int    `json:"pid"`
}

// Error is the body of every answer that is not 2xx.
type Error struct {
	Code    string `json:"code"`    // E1203
	Message string `json:"message"` // the sentence, without prefix and code
}

// ApplyRequest is POST /v1/apply: the annotations of pods as their manifests are now, for the
// containers of these pods that run. What the annotations say of memory.max becomes the limit; a
// key that cannot change while a container runs is an error of that pod.
type ApplyRequest struct {
	Pods []ApplyPod `json:"pods"`
	// Source is who asks: apply (or empty) for an administrator, whose word always holds; spec for
	// a program that follows the annotations of running pods in the API server. Of the latter each
	// pod needs its UID, policy must say resize-by-annotation, and annotations that a container
	// has followed already change nothing in it, so that what somebody has set since stays.
	Source string `json:"source,omitempty"`
	Force  bool   `json:"force,omitempty"`
	// Wait asks for the answer only when every resize is done or has failed.
	Wait           bool  `json:"wait,omitempty"`
	DeadlineMillis int64 `json:"deadline_millis,omitempty"` // as in [SetRequest]
}

// ApplyPod names a pod and carries its annotations, all or only those that we read. An empty UID
// means whichever pod of that name runs.
type ApplyPod struct {
	Namespace   string            `json:"namespace"`
	Name        string            `json:"name"`
	UID         string            `json:"uid,omitempty"`
	Annotations map[string]string `json:"annotations,omitempty"`
}

// The sources of an [ApplyRequest].
const (
	SourceApply = "apply"
	SourceSpec  = "spec"
)

// ApplyResponse has one entry for each pod of the request, in its order.
type ApplyResponse struct {
	Pods []AppliedPod `json:"pods"`
}

// AppliedPod is what became of one pod: what changed (nothing, if it was so already), or why not.
type AppliedPod struct {
	Namespace string          `json:"namespace"`
	Name      string          `json:"name"`
	Resizes   []AppliedResize `json:"resizes,omitempty"`
	Notices   []string        `json:"notices,omitempty"`
	Error     *Error          `json:"error,omitempty"`
}

// AppliedResize is a resize of the pod, or of one of its containers.
type AppliedResize struct {
	Container string `json:"container,omitempty"` // empty: the pod's limit
	Resize
}

// Node is GET /v1/node: what gpufenced says of itself.
type Node struct {
	Version Version   `json:"version"`
	Started time.Time `json:"started"`
	// Switch is what an administrator has set: running, quiesced or disabled.
	Switch Switch `json:"switch"`
	Mode   string `json:"mode"` // of the node's policy: enforce, warn, observe
	// Level is the strongest that a container may rely on here now; Fences say why.
	Level  string     `json:"level"`
	Fences []Fence    `json:"fences"`
	Health Health     `json:"health"`
	Config ConfigInfo `json:"config"`
	// Cgroups is how the node mounts them: v1, v2 or hybrid.
	Cgroups string `json:"cgroups"`
	RunDir  string `json:"run_dir"`
	// Problems are what gpufenced could not do and has not done since.
	Problems   []Problem `json:"problems,omitempty"`
	Containers int       `json:"containers"` // that run
	GPUs       int       `json:"gpus"`
	LastEvent  uint64    `json:"last_event"` // number of the journal's newest
	// Drift are configurations of engines that were right and are not any more.
	Drift []string `json:"drift,omitempty"`
	// Ready says whether the scheduler should send pods with a GPU here, for the node's label;
	// Reasons are one sentence each why not. Health is about any GPU at all, this about all of them.
	Ready   bool     `json:"ready"`
	Reasons []string `json:"reasons,omitempty"`
}

// Problem is something that does not work, since when.
type Problem struct {
	About string    `json:"about"`
	Error string    `json:"error"`
	Since time.Time `json:"since"`
}

// Switch is the position of the node's switch, who put it there and why.
type Switch struct {
	// Position is running; quiesced: NVML is let go and starts are refused; disabled: nothing is
	// enforced, starts pass without a limit.
	Position string     `json:"position"`
	Reason   string     `json:"reason,omitempty"`
	Since    *time.Time `json:"since,omitempty"`
}

// The positions of a [Switch].
const (
	SwitchRunning  = "running"
	SwitchQuiesced = "quiesced"
	SwitchDisabled = "disabled"
)

// SwitchRequest is POST /v1/quiesce, /v1/resume and /v1/disable; each answers with the [Switch].
type SwitchRequest struct {
	Reason string `json:"reason,omitempty"` // disable needs one
}

// ConfigInfo is which node policy is in force.
type ConfigInfo struct {
	Path   string    `json:"path"`
	Loaded time.Time `json:"loaded"`
	// LastGood is where the copy of what is in force lies.
	LastGood string `json:"last_good,omitempty"`
	// FromLastGood: the file was wrong when gpufenced started, so the copy is in force.
	FromLastGood bool `json:"from_last_good,omitempty"`
	// Error is why the file as it is now is not in force.
	Error *Error `json:"error,omitempty"`
	// NeedRestart are keys whose new value waits for a restart of gpufenced.
	NeedRestart []string `json:"need_restart,omitempty"`
}

// ReloadRequest is POST /v1/reload. It has nothing to say yet.
type ReloadRequest struct{}

// Health is GET /healthz and GET /readyz, of which the status is 503 if not OK.
type Health struct {
	// Live: the sampling goes on. Ready: containers with a GPU can start.
	Live  bool   `json:"live"`
	Ready bool   `json:"ready"`
	Why   string `json:"why,omitempty"`
}
