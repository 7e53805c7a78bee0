// SPDX-License-Identifier: Apache-2.0

package plan

import (
	"github.com/gpufence/gpufence/enforcer/quota"
)

// Input is everything of a container that a plan depends on, read by hook/oci (or hook/nri)
// and given by value: the plan does no I/O and looks at no clock.
type Input struct {
	Engine  quota.Engine
	ID      string
	Sandbox bool // pause container, from what the engine sets
	// Namespace, Pod and Container are the names that the engine sets, where no user can
	// forge them; empty outside Kubernetes.
	Namespace, Pod, Container string
	Annotations               map[string]string
	Env                       []string // process.env, in order
	Args0                     string
	Mounts                    []Mount
	Devices                   []string // paths of linux.devices
	CDINames                  []string // from cdi.k8s.io/* annotations
	Injected                  []string // CDI names that somebody else injects for certain
	Privileged                bool     // CAP_SYS_ADMIN or CAP_BPF in the bounding set, or no pid namespace of its own

	ImageLoader  Loader   // of the entry point, found by reading the root file system
	ImagePreload string   // the image's own /etc/ld.so.preload
	HookPath     string   // absolute, gpufence-hook
	HookArgs     []string // after the stage name: --config ..., --socket ...
}

// Mount is a mount of the spec, as far as a plan cares.
type Mount struct {
	Destination string
	Source      string
	Type        string
	Options     []string
}

// Loader says which dynamic loader the container's entry point uses.
type Loader string

// The loaders.
const (
	LoaderGlibc   Loader = "glibc"
	LoaderMusl    Loader = "musl"
	LoaderStatic  Loader = "static"
	LoaderUnknown Loader = "unknown" // a script without a readable interpreter, a missing file: deliver and see
)

// Action is what becomes of a container.
type Action string

// The actions.
const (
	ActionSkip    Action = "skip"    // nothing of it concerns us: exec the runtime unchanged
	ActionAlone   Action = "alone"   // no GPU: plan without gpufenced (devices denied, env void), start
	ActionPrepare Action = "prepare" // ask gpufenced, then plan
)

// Request is what a spec asks for: the answer of [Ask].
type Request struct {
	Action    Action
	Quota     quota.Request // parsed keys; zero for ActionSkip
	Selectors []string      // GPUs, as found
	Present   bool          // their devices are in the spec already
	// Claimed are what the environment names and what counts only if the kubelet gave the container
	// devices, which gpufenced finds out; NoGPU is what is wrong if it did not.
	Claimed []string
	NoGPU   error
	Notices []string // one line each
	// Mode holds for this container's namespace. Unless it is enforce, gpufenced is told best
	// effort (no waiting, no failing) and the plan edits nothing but hooks, which get
	// [ArgBestEffort].
	Mode quota.Mode
}

// ArgBestEffort is appended to a hook's arguments where a start must neither wait for gpufenced
// nor fail because of it.
const ArgBestEffort = "--best-effort"

// Prepared is gpufenced's part of a plan (api.PrepareResponse without its transport).
type Prepared struct {
	Grant      quota.Grant
	CDIDevices []string
	Files      []File
	Env        []string // NAME=value, for NVIDIA's own hook
}

// File is one bind mount of a shared page, the shim, or the preload file.
type File struct {
	Source, Destination string
	Writable            bool
	// Over is the name of a library without its version (libcuda.so), or empty: Source goes over
	// every mount of a file by that name, and what was there goes to Destination.
	Over string
}

// Edits are what makes a container fenced; hook/oci renders them into config.json. Applying
// them twice changes nothing.
type Edits struct {
	CDIDevices []string // qualified names to inject, before all else
	Mounts     []File
	SetEnv     []string // NAME=value, replacing every earlier one
	UnsetEnv   []string // names, or a prefix ending in *
	// DropMounts (destinations of mounts of /dev/null) and DropAnnotations (names) are requests to a low-level
	// nvidia-container-runtime that go before NVIDIA_VISIBLE_DEVICES there, so that void would not hold.
	DropMounts, DropAnnotations []string
	Hooks                       []Hook
	// DenyDevices: the container must get no NVIDIA device (a GPU-less member of a pod).
	DenyDevices bool
}

// Hook is an OCI hook of ours.
type Hook struct {
	Stage          string // createRuntime, poststop
	Path           string
	Args           []string
	TimeoutSeconds int
}
