// SPDX-License-Identifier: Apache-2.0

package fence

import (
	"bufio"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/gpufence/gpufence/bpf"
	"github.com/gpufence/gpufence/enforcer/fence/gatecredit"
	"github.com/gpufence/gpufence/enforcer/policy"
	"github.com/gpufence/gpufence/enforcer/quota"
)

// GateKernel is the gate in the kernel. [bpf.Gate] is one.
type GateKernel interface {
	Configure(bpf.Settings) error
	SetDevices([]bpf.Device) error
	SetExempt(cgroups []uint64) error
	SetPolicy(cgroup uint64, p bpf.Policy) error
	DropPolicy(cgroup uint64) error
	Adjust(cgroup uint64, bytes int64, resetPeak bool) (bpf.Usage, error)
	GiveBack(cgroup, bytes, credited uint64) (done bool, err error)
	AttachCopies() (bpf.Copies, error)
	ReleaseCopies() error
	Carrier() bpf.Carrier
	Copies() bpf.Copies
	Release() string
	Misses() (uint64, error)
	Managed() ([]uint64, error)
	Supersede() error
	Events(ctx context.Context, f func(bpf.Event)) error
	Close() error
}

// Words of policy `gate`.
const (
	GateAuto    = "auto"    // enforce where the driver's requests were recorded, else audit
	GateEnforce = "enforce" // wherever the kernel allows
	GateAudit   = "audit"   // count and tell
	GateOff     = "off"
)

// GateOptions are policy and where to look; tests say others.
type GateOptions struct {
	Word       string // of policy `gate`
	Strict     bool   // refuse what cannot be verified, and believe frees only when NVML shows them
	PinDir     string
	CgroupRoot string // of the v2 hierarchy; "": there is none
	Proc, Sys  string // "" for /proc, /sys
	Canary     []string
	Settle     time.Duration
	// Managed refuses managed memory that a container's limits leave no room for; else it is counted and told.
	Managed bool
	Kernel  GateKernel // nil: the one that this machine's kernel carries
}

// Gate weighs in the kernel what a container asks the driver for, before the driver gives it.
//
// A container has one account over all of its GPUs. A request for memory names its GPU by the handle of an object
// that was made before, and that handle lies in the container's memory: between the look at it and the driver's
// reading another thread can put another one there, and of this part of the request there is no kernel copy. So only
// the sum can be held, and with several GPUs each of them is degraded.
type Gate struct {
	opts   GateOptions
	kernel GateKernel

	mu       sync.Mutex
	absent   string
	enforced bool // said of the driver that is loaded, and by policy
	settings bpf.Settings
	devices  []bpf.Device // that are guarded
	deny     bool         // also where the gate is not open yet
	exempt   []string     // items of policy, while deny
	holds    map[policy.ContainerID]*gateHold
}

type gateHold struct {
	cgroup, pod uint64
	dir         string // of the cgroup
	gpus        []string
	limit       uint64 // the lowest above it
	status      Status
	credit      *gatecredit.Credit
	sums        *gatecredit.Sums
	noCredit    bool
	policy      bpf.Policy
	podPolicy   bpf.Policy // of the pod's cgroup, if that is held
	observed    bool
}

// Open opens the gate and has its canary refused; where there is none, the state says why.
func (f *Gate) Open(ctx context.Context) {
	f.mu.Lock()
	opts := f.opts
	f.mu.Unlock()
	kernel, absent := openKernel(ctx, opts) // takes seconds where a canary hangs
	f.mu.Lock()
	defer f.mu.Unlock()
	f.kernel, f.absent = kernel, absent
	if kernel == nil {
		return
	}
	if f.deny {
		// What an earlier gpufenced closed stays closed while this one begins.
		ids, err := f.exempted(f.exempt)
		if err == nil {
			err = kernel.SetExempt(ids)
		}
		f.deny = err == nil // else DenyUnmanaged says why
	}
	if err := f.driver(""); err != nil {
		f.absent = err.Error()
	}
}

func openKernel(ctx context.Context, opts GateOptions) (GateKernel, string) {
	switch {
	case opts.Kernel != nil:
		return opts.Kernel, ""
	case opts.Word == GateOff:
		if err := bpf.Unpin(opts.PinDir); err != nil {
			return nil, "policy gate = \"off\"; " + err.Error()
		}
		return nil, "policy gate = \"off\""
	case opts.CgroupRoot == "":
		return nil, "no cgroup v2 tree is mounted, so containers cannot be told apart"
	}
	carriers := []bpf.Carrier{bpf.CarrierFmodRet}
	if in, err := bpf.InLSMList(); in && err == nil {
		carriers = []bpf.Carrier{bpf.CarrierLSM, bpf.CarrierFmodRet}
	}
	var errs []string
	for _, carrier := range carriers {
		g, err := bpf.Open(opts.PinDir, carrier)
		if err == nil {
			if err = g.Canary(ctx, opts.CgroupRoot, opts.Canary); err == nil {
				return g, ""
			}
			// Its pins stay: a canary that could not be started proves nothing against what an earlier start
			// has proved, and running containers lie behind it.
			err = errors.Join(err, g.Close())
		}
		errs = append(errs, err.Error())
		var missing *bpf.Error
		if errors.As(err, &missing) && !slices.Contains([]bpf.Reason{bpf.ReasonCanary, bpf.ReasonTooOld}, missing.Reason) {
			break // another carrier would miss the same
		}
	}
	return nil, strings.Join(errs, "; ")
}

// NewGate makes the fence; [Gate.Open] opens it.
func NewGate(opts GateOptions) *Gate {
	opts.Proc, opts.Sys = cmp.Or(opts.Proc, "/proc"), cmp.Or(opts.Sys, "/sys")
	return &Gate{opts: opts, absent: "it is being opened", holds: map[policy.ContainerID]*gateHold{}}
}

// Driver takes over which driver is loaded now: its devices are guarded, its copies watched, its requests known
// or not. "" is none yet: the doors are up, so that it comes up guarded.
func (f *Gate) Driver(version string) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.kernel == nil {
		return nil
	}
	return f.driver(version)
}

// driver is Driver of a gate that is open. The caller holds mu.
func (f *Gate) driver(version string) error {
	if err := f.guard(); err != nil {
		return err
	}
	abi, _ := bpf.ForDriver(version)
	was := f.enforced
	f.enforced = f.opts.Word == GateEnforce || f.opts.Word == GateAuto && abi.Known
	s := bpf.Settings{ParamsBytes: abi.ParamsBytes, CreditFrees: !f.opts.Strict, CloseHeap: f.opts.Strict, CloseDup: f.opts.Strict, CloseUnmanaged: f.deny, EventsPerSecond: 10}
	watched := f.kernel.Copies() != bpf.CopiesNone // adopted
	if version != "" {
		_, err := f.kernel.AttachCopies()
		watched = err == nil // else the level says that they are not
	}
	s.Commits, s.KillRaces = watched, watched
	f.settings = s
	if err := f.kernel.Configure(s); err != nil || was == f.enforced {
		return err
	}
	return f.reinforce()
}

// reinforce tells the kernel of every container that it is to refuse, or only to count, from now on. The caller holds
// mu.
func (f *Gate) reinforce() error {
	var errs []error
	for _, h := range f.holds {
		if h.status.State != Proven {
			continue // the kernel was not told of all of it; set comes again
		}
		h.policy.Enforce = f.enforced && !h.observed
		h.policy.EnforceUVM = f.opts.Managed && h.policy.Enforce
		errs = append(errs, f.kernel.SetPolicy(h.cgroup, h.policy))
		if h.pod != 0 {
			h.podPolicy.Enforce = h.policy.Enforce
			errs = append(errs, f.kernel.SetPolicy(h.pod, h.podPolicy))
		}
	}
	return errors.Join(errs...)
}

// RefreshDevices guards the nodes that have come since: the modules of managed memory and of displays may be loaded
// long after the driver, by the first container that starts.
func (f *Gate) RefreshDevices() error {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.kernel == nil {
		return nil
	}
	return f.guard()
}

// guard tells the kernel which devices there are, where those are others than before. The caller holds mu.
func (f *Gate) guard() error {
	devices, err := GuardedDevices(f.opts.Proc, f.opts.Sys)
	if err != nil {
		return fmt.Errorf("find devices to guard: %w", err)
	}
	if slices.Equal(devices, f.devices) {
		return nil
	}
	if err := f.kernel.SetDevices(devices); err != nil {
		return err
	}
	f.devices = devices
	return nil
}

// SetSettle is for a changed policy: how long NVML may lag.
func (f *Gate) SetSettle(settle time.Duration) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.opts.Settle = settle
	for _, h := range f.holds {
		h.credit.Settle, h.sums.Settle = settle, settle
	}
}

// Quiesce lets the driver's module go, for an upgrade; the doors stay. [Gate.Driver] comes after it.
func (f *Gate) Quiesce() error {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.kernel == nil {
		return nil
	}
	// First the settings: a request whose copy is not seen any more must not count as not given.
	f.settings.Commits, f.settings.KillRaces = false, false
	return errors.Join(f.kernel.Configure(f.settings), f.kernel.ReleaseCopies())
}

// GuardedDevices are the nodes of NVIDIA's driver: its fixed major number, what /proc/devices says of managed
// memory, and its render nodes.
func GuardedDevices(proc, sys string) ([]bpf.Device, error) {
	const major, modeset, ctl = 195, 254, 255
	devices := []bpf.Device{{Major: major, Minor: ctl, Kind: bpf.KindCTL}, {Major: major, Minor: modeset, Kind: bpf.KindClosed}}
	for minor := range uint32(modeset) {
		devices = append(devices, bpf.Device{Major: major, Minor: minor, Kind: bpf.KindGPU})
	}
	b, err := os.ReadFile(filepath.Join(proc, "devices"))
	if err != nil {
		return nil, fmt.Errorf("read the list of devices: %w", err)
	}
	for line := range strings.Lines(string(b)) {
		var n uint32
		var name string
		if _, err := fmt.Sscan(line, &n, &name); err == nil && name == "nvidia-uvm" {
			devices = append(devices, bpf.Device{Major: n, Minor: 0, Kind: bpf.KindUVM}, bpf.Device{Major: n, Minor: 1, Kind: bpf.KindClosed})
		}
	}
	nodes, err := filepath.Glob(filepath.Join(sys, "class/drm/*"))
	if err != nil {
		return nil, fmt.Errorf("list render nodes: %w", err)
	}
	for _, node := range nodes {
		driver, err := os.Readlink(filepath.Join(node, "device/driver"))
		if err != nil || filepath.Base(driver) != "nvidia" {
			continue // a connector, or another vendor's
		}
		b, err := os.ReadFile(filepath.Join(node, "dev"))
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		var major, minor uint32
		if err == nil {
			_, err = fmt.Sscanf(string(b), "%d:%d", &major, &minor)
		}
		if err != nil {
			return nil, fmt.Errorf("read the number of %s: %w", node, err)
		}
		devices = append(devices, bpf.Device{Major: major, Minor: minor, Kind: bpf.KindClosed})
	}
	return devices, nil
}

// gpuMinor is the number of a GPU's device node, as the driver says it.
func gpuMinor(proc, uuid string) (int, error) {
	files, err := filepath.Glob(filepath.Join(proc, "driver/nvidia/gpus/*/information"))
	if err != nil {
		return 0, fmt.Errorf("list GPUs: %w", err)
	}
	for _, name := range files {
		file, err := os.Open(name)
		if err != nil {
			return 0, fmt.Errorf("read a GPU's number: %w", err)
		}
		is, minor := false, -1
		for in := bufio.NewScanner(file); in.Scan(); {
			key, value, _ := strings.Cut(in.Text(), ":")
			switch value = strings.TrimSpace(value); strings.TrimSpace(key) {
			case "GPU UUID":
				is = value == uuid
			case "Device Minor":
				if n, err := strconv.Atoi(value); err == nil {
					minor = n
				}
			}
		}
		file.Close()
		if is && minor >= 0 {
			return minor, nil
		}
	}
	return 0, fmt.Errorf("the driver does not say which device node %s is", uuid)
}

// Name is gate.
func (*Gate) Name() string { return "gate" }

// level is what the gate is worth now, and what it lacks. The caller holds mu.
func (f *Gate) level() (bpf.Level, string) {
	misses, err := f.kernel.Misses()
	if err != nil {
		return bpf.LevelAudit, err.Error()
	}
	l, why := bpf.LevelOf(f.kernel.Carrier(), f.kernel.Copies(), f.settings, f.enforced, misses, f.kernel.Release())
	if why != nil {
		return l, why.Error()
	}
	return l, ""
}

// Level is hard where it is strict, reactive where a race can win until the next look, nothing in audit.
func (f *Gate) Level() quota.Level {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.kernel == nil {
		return quota.LevelNone
	}
	switch l, _ := f.level(); l {
	case bpf.LevelStrict:
		return quota.LevelHard
	case bpf.LevelEntry:
		return quota.LevelReactive
	}
	return quota.LevelNone
}

// gateLimit is a grant's limit over all GPUs, and by how much the gate lies above it: it fires where the shim was
// passed by.
func gateLimit(gpus []quota.GPU, limits map[string]quota.Limits) uint64 {
	var all uint64
	for _, g := range gpus {
		l, ok := limits[g.UUID]
		if !ok || l.Max == quota.Unlimited || all+l.Max < all {
			return math.MaxUint64
		}
		all += l.Max
	}
	if all == 0 {
		return 0
	}
	return all + gateMargin(all)
}

// gateLimit is the container's: none has more than its pod, whether the pod has a cgroup of its own or not.
func (s Subject) gateLimit() uint64 {
	return min(gateLimit(s.Grant.GPUs, s.Grant.Container), gateLimit(s.Grant.GPUs, s.Grant.Pod))
}

// managedLimit is how long all managed ranges together may be: on the device they count against memory.max, and what
// has no room there may spill as far as memory.swap.max lets it.
func managedLimit(gpus []quota.GPU, limits map[string]quota.Limits) uint64 {
	all := gateLimit(gpus, limits)
	for _, g := range gpus {
		if all+limits[g.UUID].SwapMax < all {
			return math.MaxUint64
		}
		all += limits[g.UUID].SwapMax
	}
	return all
}

func gateMargin(limit uint64) uint64 { return max(16<<20, limit/100) }

func cgroupID(dir string) (uint64, error) {
	var st unix.Stat_t
	if err := unix.Stat(dir, &st); err != nil {
		return 0, fmt.Errorf("look at cgroup %s: %w", dir, err)
	}
	return st.Ino, nil
}

// Raise makes the container's cgroup managed, before its first process runs.
func (f *Gate) Raise(_ context.Context, s Subject) (map[string]Status, error) {
	err := f.set(s)
	out := map[string]Status{}
	for _, g := range s.Grant.GPUs {
		out[g.UUID] = f.State(s, g.UUID)
	}
	return out, err
}

// Resize follows a changed grant.
func (f *Gate) Resize(_ context.Context, s Subject) error { return f.set(s) }

func (f *Gate) set(s Subject) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.kernel == nil || s.Cgroup == "" {
		return nil
	}
	h := f.holds[s.ID]
	if h == nil {
		h = &gateHold{credit: &gatecredit.Credit{Settle: f.opts.Settle, Margin: gateMargin}, sums: &gatecredit.Sums{Settle: f.opts.Settle}}
	}
	h.dir, h.gpus = s.Cgroup, h.gpus[:0]
	for _, g := range s.Grant.GPUs {
		h.gpus = append(h.gpus, g.UUID)
	}
	fail := func(err error) error {
		h.status = Status{State: Degraded, Why: err.Error()}
		f.holds[s.ID] = h
		return fmt.Errorf("raise gate: %w", err)
	}
	// The ids first: what is held already stays known, whatever fails.
	id, err := cgroupID(s.Cgroup)
	if err != nil {
		return fail(err)
	}
	h.cgroup, h.observed = id, s.Observed
	podHeld := s.PodCgroup != "" && !s.Alone
	if podHeld {
		if h.pod, err = cgroupID(s.PodCgroup); err != nil {
			return fail(err)
		}
	}
	if below, err := filepath.Rel(f.opts.CgroupRoot, s.Cgroup); err != nil || strings.Count(below, "/") >= bpf.MaxDepth {
		return fail(fmt.Errorf("the cgroup %s lies deeper than %d levels, where the kernel does not look for it", s.Cgroup, bpf.MaxDepth))
	}
	if err := f.guard(); err != nil {
		return fail(err)
	}
	p := bpf.Policy{LimitBytes: s.gateLimit(), GPU: len(s.Grant.GPUs) > 0, Enforce: f.enforced && !s.Observed, NoCredit: h.noCredit}
	p.UVMBytes = managedLimit(s.Grant.GPUs, s.Grant.Container)
	if s.Alone {
		p.UVMBytes = min(p.UVMBytes, managedLimit(s.Grant.GPUs, s.Grant.Pod))
	}
	p.EnforceUVM = f.opts.Managed && p.Enforce
	for _, g := range s.Grant.GPUs {
		uuid := g.UUID
		if strings.HasPrefix(uuid, "MIG-") {
			// Its node is its GPU's; the capabilities' nodes are the driver's to check.
			if uuid = s.Parents[g.UUID]; uuid == "" {
				return fail(fmt.Errorf("it is not known yet which GPU %s is an instance of", g.UUID))
			}
		}
		minor, err := gpuMinor(f.opts.Proc, uuid)
		if err != nil {
			return fail(err)
		}
		if !slices.Contains(p.Minors, minor) {
			p.Minors = append(p.Minors, minor)
		}
	}
	// The pod first: from the moment that the container is managed, both must be charged.
	if podHeld {
		h.podPolicy = bpf.Policy{LimitBytes: gateLimit(s.Grant.GPUs, s.Grant.Pod), GPU: true, Enforce: p.Enforce, UVMBytes: math.MaxUint64}
		if err := f.kernel.SetPolicy(h.pod, h.podPolicy); err != nil {
			return fail(err)
		}
	}
	if err := f.kernel.SetPolicy(id, p); err != nil {
		return fail(err)
	}
	h.limit, h.policy = p.LimitBytes, p
	u, err := f.kernel.Adjust(id, 0, false)
	if err != nil {
		return fail(err)
	}
	h.status = Status{State: Proven, Proof: fmt.Sprintf("limit %s in the kernel, %s charged", limitWord(p.LimitBytes), quota.FormatBytes(u.Used))}
	f.holds[s.ID] = h
	return nil
}

func limitWord(bytes uint64) string {
	if bytes == math.MaxUint64 {
		return "max"
	}
	return quota.FormatBytes(bytes)
}

// Lower makes the cgroup unmanaged, with the pod's if it was the last there.
func (f *Gate) Lower(_ context.Context, s Subject) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	h := f.holds[s.ID]
	if h == nil {
		return nil
	}
	delete(f.holds, s.ID)
	var errs []error
	if h.cgroup != 0 {
		errs = append(errs, f.kernel.DropPolicy(h.cgroup))
	}
	for _, o := range f.holds {
		if o.pod == h.pod {
			return errors.Join(errs...)
		}
	}
	if h.pod != 0 {
		errs = append(errs, f.kernel.DropPolicy(h.pod))
	}
	return errors.Join(errs...)
}

// State is absent with the reason, degraded where it only counts or holds a sum, or proven.
func (f *Gate) State(s Subject, _ string) Status {
	f.mu.Lock()
	defer f.mu.Unlock()
	switch {
	case f.kernel == nil:
		return Status{State: Absent, Why: f.absent}
	case f.absent != "":
		return Status{State: Degraded, Why: f.absent}
	}
	l, lacks := f.level()
	canary := fmt.Sprintf("level %s by %s: a canary was refused through every door", l, f.kernel.Carrier())
	if l == bpf.LevelAudit {
		return Status{State: Degraded, Why: "it counts only: " + lacks}
	}
	if s.ID == "" {
		return Status{State: Proven, Proof: canary, Why: lacks}
	}
	h := f.holds[s.ID]
	switch {
	case h == nil && s.Cgroup == "":
		return Status{State: Absent, Why: "the container has no cgroup in the v2 hierarchy"}
	case h == nil:
		return Status{State: Degraded, Why: "the kernel was not told of the container yet"}
	case h.status.State != Proven:
		return h.status
	case s.Observed:
		return Status{State: Degraded, Why: "policy only looks"}
	case h.policy.LimitBytes != s.gateLimit() || s.PodCgroup != "" && !s.Alone && h.podPolicy.LimitBytes != gateLimit(s.Grant.GPUs, s.Grant.Pod):
		return Status{State: Degraded, Why: "the kernel was not told of the new limit yet"}
	case s.PodCgroup == "" && !s.Alone && gateLimit(s.Grant.GPUs, s.Grant.Pod) != math.MaxUint64:
		return Status{State: Degraded, Why: "the pod's cgroup is not known, so its containers are not held to the pod's limit together"}
	case len(s.Grant.GPUs) > 1:
		return Status{State: Degraded, Why: fmt.Sprintf("one account over %d GPUs holds their sum only, since a request can be changed to be for another GPU", len(s.Grant.GPUs))}
	}
	return Status{State: Proven, Proof: h.status.Proof + "; " + canary, Why: lacks}
}

// DenyUnmanaged implements [Denier]. Items of the exempt list that name a cgroup are told to the kernel; what is in
// none of a container's, the host's own services among it, is exempt by the slices that hold it.
func (f *Gate) DenyUnmanaged(deny bool, exempt []string) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.kernel == nil {
		f.deny, f.exempt = deny, slices.Clone(exempt)
		if deny {
			return fmt.Errorf("%w: %s", ErrCannotDeny, f.absent)
		}
		return nil
	}
	var ids []uint64
	if deny {
		var err error
		if ids, err = f.exempted(exempt); err != nil {
			return err
		}
	}
	if err := f.kernel.SetExempt(ids); err != nil {
		return err
	}
	settings := f.settings
	settings.CloseUnmanaged = deny
	if err := f.kernel.Configure(settings); err != nil {
		return err
	}
	f.settings, f.deny, f.exempt = settings, deny, slices.Clone(exempt)
	return nil
}

// RefreshExempt tells the kernel of exempt cgroups that have come or gone since.
func (f *Gate) RefreshExempt() error {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.kernel == nil || !f.deny {
		return nil
	}
	ids, err := f.exempted(f.exempt)
	if err != nil {
		return err
	}
	return f.kernel.SetExempt(ids)
}

// exempted are the cgroups of the host's own services, and those that items of the exempt list name.
func (f *Gate) exempted(items []string) (ids []uint64, err error) {
	if own, err := os.ReadFile(filepath.Join(f.opts.Proc, "self/cgroup")); err != nil {
		return nil, fmt.Errorf("unmanaged = \"deny\": find gpufenced's own cgroup: %w", err)
	} else if strings.Contains(string(own), "0::/\n") {
		// Then so is the rest of the host, and nothing can be told apart.
		return nil, errors.New("unmanaged = \"deny\": gpufenced runs in the root cgroup, where the host cannot be told from containers without one: start it as a service")
	}
	for _, item := range append([]string{"system.slice", "user.slice", "init.scope"}, items...) {
		path, ok := strings.CutPrefix(item, "cgroup:")
		if !ok && strings.Contains(item, ":") {
			// A program's path or name is a container's to choose, so the kernel does not look at it: such
			// programs of the host itself are in its slices, in containers they are exempt by cgroup only.
			continue
		}
		found, err := filepath.Glob(filepath.Join(f.opts.CgroupRoot, filepath.Clean("/"+path)))
		if err != nil {
			return nil, fmt.Errorf("find exempt cgroup %q: %w", item, err)
		}
		for _, dir := range found {
			id, err := cgroupID(dir)
			if errors.Is(err, fs.ErrNotExist) {
				continue // it has just gone
			}
			if err != nil {
				return nil, err
			}
			ids = append(ids, id)
		}
	}
	return ids, nil
}

// Up says whether there is a gate.
func (f *Gate) Up() bool { return f.opened() != nil }

// Sample compares what NVML says of a container on a GPU, and on its other ones within the last settle, with what it
// was charged, and acts on the charge. took is how long before that NVML was asked. It comes with every answer, also
// with one that says nothing new: a free that did not happen shows by what NVML goes on saying. kill says that frees
// were forged for the second time.
func (f *Gate) Sample(id policy.ContainerID, gpu string, at, took time.Duration, nvml, overhead uint64) (kill bool, why string, err error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	h := f.holds[id]
	if f.kernel == nil || h == nil || h.status.State != Proven {
		return false, "", nil
	}
	truth := gatecredit.Truth{At: at, Took: took, NVMLBytes: nvml, OverheadBytes: overhead, LimitBytes: h.limit}
	if len(h.gpus) > 1 {
		h.sums.Take(gpu, at, nvml, overhead)
		var ok bool
		if truth.NVMLBytes, truth.MostBytes, truth.OverheadBytes, ok = h.sums.Bounds(h.gpus, at); !ok {
			return false, "", nil
		}
	}
	u, err := f.kernel.Adjust(h.cgroup, 0, true)
	if err != nil {
		return false, "", err
	}
	v := h.credit.Step(gatecredit.Account{UsedBytes: u.Used, ChargedBytes: u.Charged, EndedBytes: u.Ended, CreditedBytes: u.Credited, PeakBytes: u.Peak},
		truth)
	change := v.AdjustBytes > 0
	if change {
		_, err = f.kernel.Adjust(h.cgroup, v.AdjustBytes, false)
	} else if v.AdjustBytes < 0 { // where it is not done, the next sample says anew
		change, err = f.kernel.GiveBack(h.cgroup, uint64(-v.AdjustBytes), u.Credited)
	}
	if change && err == nil && h.pod != 0 {
		_, err = f.kernel.Adjust(h.pod, v.AdjustBytes, false)
	}
	if err != nil {
		return false, "", err
	}
	if v.NoCredit != h.noCredit {
		h.noCredit, h.policy.NoCredit = v.NoCredit, v.NoCredit
		if err := f.kernel.SetPolicy(h.cgroup, h.policy); err != nil {
			return false, "", err
		}
	}
	return v.Kill && h.policy.Enforce, v.Why, nil
}

// Adopt forgets what the kernel manages and nobody registered has: containers that ended while nobody watched. It
// comes after every registered container was raised again.
func (f *Gate) Adopt() error {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.kernel == nil {
		return nil
	}
	ids, err := f.kernel.Managed()
	if err != nil {
		return err
	}
	known := map[uint64]bool{}
	for _, h := range f.holds {
		known[h.cgroup], known[h.pod] = true, true
	}
	var errs []error
	for _, id := range ids {
		if !known[id] {
			errs = append(errs, f.kernel.DropPolicy(id))
		}
	}
	return errors.Join(errs...)
}

// Supersede takes down the gates of gpufences with another layout of maps. It comes after [Gate.Adopt], and only where every
// registered container was raised: one that was not is held by nothing else.
func (f *Gate) Supersede() error {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.kernel == nil {
		return nil
	}
	return f.kernel.Supersede()
}

// Denial is what a request was refused for, or would have been.
type Denial struct {
	bpf.Event
	Container policy.ContainerID // "": no managed one
	Enforced  bool               // else it was let through, and is told only
}

// Events tells of denials until the context ends.
func (f *Gate) Events(ctx context.Context, tell func(Denial)) error {
	kernel := f.opened()
	if kernel == nil {
		return nil
	}
	return kernel.Events(ctx, func(e bpf.Event) { tell(f.denial(e)) })
}

func (f *Gate) denial(e bpf.Event) Denial {
	f.mu.Lock()
	defer f.mu.Unlock()
	d := Denial{Event: e}
	var in string
	for id, h := range f.holds {
		switch {
		case h.cgroup == e.Cgroup:
		case h.pod != e.Cgroup || h.pod == 0:
			continue
		default: // the pod's limit: whose process it was is known as long as it lives
			if in == "" {
				in = f.cgroupOf(e.PID)
			}
			if !within(in, h.dir) {
				continue
			}
		}
		d.Container = id
		// The door of managed memory refuses, whatever it is for, where managed memory is refused.
		managed := e.Kind == bpf.ManagedMemory || e.Door == bpf.DoorMmap
		d.Enforced = h.policy.Enforce && (!managed || h.policy.EnforceUVM)
		return d
	}
	for _, h := range f.holds {
		if h.pod == e.Cgroup && h.pod != 0 {
			d.Enforced = h.policy.Enforce
			return d
		}
	}
	d.Enforced = f.deny // of a process that no container of ours has
	return d
}

// cgroupOf is the folder of a process's cgroup in the v2 tree, "" when it is gone.
func (f *Gate) cgroupOf(pid int) string {
	b, err := os.ReadFile(filepath.Join(f.opts.Proc, strconv.Itoa(pid), "cgroup"))
	if err != nil {
		return ""
	}
	for line := range strings.Lines(string(b)) {
		if path, ok := strings.CutPrefix(strings.TrimSuffix(line, "\n"), "0::/"); ok {
			return filepath.Join(f.opts.CgroupRoot, path)
		}
	}
	return ""
}

func within(dir, parent string) bool {
	return dir != "" && (dir == parent || strings.HasPrefix(dir, parent+"/"))
}

// Close forgets the gate, which stays closed.
func (f *Gate) Close() error {
	kernel := f.opened()
	if kernel == nil {
		return nil
	}
	return kernel.Close()
}

func (f *Gate) opened() GateKernel {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.kernel
}
