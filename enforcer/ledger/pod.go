// SPDX-License-Identifier: Apache-2.0

package ledger

// Options say how a pod's folder is made.
type Options struct {
	// Slots of the ledger; 0 means the default, [Slots].
	Slots int
	// Plain makes a plain folder instead of a tmpfs of exact size (tests, and systems where
	// the caller may not mount).
	Plain bool
	// SELinuxContext is the tmpfs's, when not empty.
	SELinuxContext string
}

// Pod is a pod's folder: its ledger, and a folder with the limits page and the cgroup-like
// files of each container.
type Pod struct{}

// CreatePod makes the folder, mounts its tmpfs and creates the ledger. A folder that exists
// and is whole is adopted, so that CreatePod may be repeated.
func CreatePod(dir string, opts Options) (*Pod, error) { panic("soon") }

// OpenPod adopts the folder of a pod after a restart.
func OpenPod(dir string, opts Options) (*Pod, error) { panic("soon") }

// Close lets go of the files; they stay, for containers and for the next gpufenced.
func (p *Pod) Close() error { panic("soon") }

// Remove unmounts and deletes the folder, and closes. What is still mounted in a container
// lives on there.
func (p *Pod) Remove() error { panic("soon") }

// Ledger is the pod's ledger.
func (p *Pod) Ledger() *Ledger { panic("soon") }

// Containers names the containers whose folders exist, sorted.
func (p *Pod) Containers() ([]string, error) { panic("soon") }

// AddContainer creates a container's folder and files, or adopts them if they exist.
// index is what its processes write into their slots. The writer epoch grows by one.
func (p *Pod) AddContainer(name string, index uint32) (*Container, error) { panic("soon") }

// RemoveContainer deletes a container's folder. Unknown names are no error.
func (p *Pod) RemoveContainer(name string) error { panic("soon") }

// Container is a container's page and files. gpufenced alone writes them.
type Container struct{}

// Dir is the folder on the host; the files in it are [LimitsName], memory.max, memory.current,
// memory.peak and memory.events.
func (c *Container) Dir() string { panic("soon") }

// LedgerPath is the pod's ledger on the host.
func (p *Pod) LedgerPath() string { panic("soon") }

// Index is what the container's processes write into their slots.
func (c *Container) Index() uint32 { panic("soon") }

// Publish puts a new generation of limits before the shims. It is cheap when nothing changed.
func (c *Container) Publish(l Limits) error { panic("soon") }

// Published is what the page says now.
func (c *Container) Published() (LimitsView, error) { panic("soon") }

// Beat moves the heartbeat; call it at least every second.
func (c *Container) Beat() error { panic("soon") }

// BeginSample publishes the number of the NVML sample that is about to be taken. It must
// happen before the NVML call, for all limits pages of a pod with the same number, and the
// ledger must be read at least once before the number grows again.
func (c *Container) BeginSample(n uint64) error { panic("soon") }

// WriteFiles writes memory.max, memory.current, memory.peak and memory.events, in place.
func (c *Container) WriteFiles(gpus []FileGPU) error { panic("soon") }

// Close lets go of the page; the files stay.
func (c *Container) Close() error { panic("soon") }

// FileGPU is a container's row for one GPU in the cgroup-like files, one line for each GPU as in
// the kernel's dmem files: "GPU-... 4294967296", "GPU-... max", and for memory.events the
// nested-keyed form "GPU-... high=0 max=3 device=0 oom=0 oom_kill=0".
type FileGPU struct {
	UUID    string
	Max     uint64 // Unlimited is written as max
	Current uint64
	Peak    uint64
	Events  FileEvents
}

// FileEvents are the counters of memory.events.
type FileEvents struct{ High, Max, Device, OOM, OOMKill uint64 }

// ReadLimits reads a limits page as a shim does.
func ReadLimits(path string) (LimitsView, error) { panic("soon") }

// ParseUUID gives the raw 16 bytes of "GPU-8-4-4-4-12" or "MIG-...", as cuDeviceGetUuid does.
func ParseUUID(s string) ([16]byte, error) { panic("soon") }
