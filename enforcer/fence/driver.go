// SPDX-License-Identifier: Apache-2.0

package fence

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/gpufence/gpufence/enforcer/gpu"
	"github.com/gpufence/gpufence/enforcer/policy"
	"github.com/gpufence/gpufence/enforcer/quota"
)

// driverDeadline bounds all calls of one visit to a GPU's driver.
const driverDeadline = 2 * time.Second

// proofAge is how old a visit may be to prove the limits.
const proofAge = 10 * time.Second

// reasserts is how often somebody else's limit is overwritten before the lower of the two is taken.
const reasserts = 2

// Limits is a GPU's driver, which limits cgroups. [gpu.Limiter] is one.
type Limits interface {
	HasLimits() bool
	Set(ctx context.Context, cgroup string, soft, hard uint64) error
	Get(ctx context.Context, cgroup string) (gpu.MemoryLimits, error)
}

// DriverGPU is a GPU as the driver fence needs it.
type DriverGPU struct {
	Limits  Limits
	Version string // of the driver
	PCI     string
	MIG     bool // an instance, or in MIG mode
}

// DriverGPUs is where it finds them.
type DriverGPUs interface {
	DriverGPU(uuid string) (DriverGPU, bool)
}

// Truth is what NVML lists of the live processes of a container, and of its whole pod.
type Truth interface {
	Listed(id policy.ContainerID, gpu string) (container, pod uint64, ok bool)
}

// Backend is how the driver keeps account.
type Backend string

// The backends. What is not known to be the kernel's is taken for the driver's own, which promises
// less.
const (
	Misc Backend = "misc" // the driver's own: flat
	Dmem Backend = "dmem" // the kernel's: every ancestor holds
)

// target is what one cgroup is to be limited to.
type target struct {
	dir        string
	pod        bool // the pod's cgroup
	soft, hard uint64
	keepSoft   bool // whatever it is: what the kernel keeps there is the sum of what is below
}

// DriverHold is what was, or is about to be, promised to a cgroup: what has to be taken back before it
// goes.
type DriverHold struct {
	GPU       string
	Dir       string
	SoftBytes uint64
}

// hold is how the fence stands around a container on one GPU.
type hold struct {
	wanted  []target // by the grant
	targets []target // of these, those that the driver has
	lacks   string   // what of the grant the targets do not carry
	status  Status
	backend Backend
	alone   bool           // the container is its pod
	writes  map[string]int // how often somebody else's limit was overwritten, by folder
	at      time.Time      // of the visit
	behind  int            // visits in a row in which the driver counted less than NVML lists
}

// Driver is the driver's own limit: on NVIDIA R615 and newer an allocation above it is refused by the
// driver, whoever asks and however.
//
// What it promises: proven means that the driver, asked now, said the limit of the grant for every
// cgroup that carries it, and the kernel's file the same where there is one. No call to the driver is
// made under its lock, nor by State or Lower.
type Driver struct {
	gpus  DriverGPUs
	truth Truth
	// root is where the v2 hierarchy is mounted, dmem where the kernel's files of it are: the same but
	// for a simulated GPU.
	root, dmem string
	now        func() time.Time

	mu    sync.Mutex
	holds map[policy.ContainerID]map[string]*hold
	// going are promises to be taken back.
	going []DriverHold
	// worked is the newest proof on each GPU.
	worked map[string]string
	// backends are those that were found out already: a driver that is loaded anew is another.
	backends map[Limits]Backend
}

// NewDriver makes the fence. root is the mount point of the v2 hierarchy, "" where there is none;
// dmem is where the kernel's dmem files are, "" for root.
func NewDriver(gpus DriverGPUs, truth Truth, root, dmem string) *Driver {
	if dmem == "" {
		dmem = root
	}
	return &Driver{gpus: gpus, truth: truth, root: root, dmem: dmem, holds: map[policy.ContainerID]map[string]*hold{}, worked: map[string]string{}, backends: map[Limits]Backend{}, now: time.Now}
}

// Name is driver.
func (*Driver) Name() string { return "driver" }

// Level is hard: the driver refuses.
func (*Driver) Level() quota.Level { return quota.LevelHard }

// compose says which cgroups carry a grant on one GPU, which must have no limit of their own, and what
// is left over.
func compose(b Backend, s Subject, uuid string) (targets []target, lacks string) {
	none := quota.Limits{Max: quota.Unlimited}
	own, pod := none, none
	if l, ok := s.Grant.Container[uuid]; ok {
		own = l
	}
	if l, ok := s.Grant.Pod[uuid]; ok {
		pod = l
	}
	hard := min(own.Max, pod.Max)
	if hard == quota.Unlimited {
		return nil, ""
	}
	leaf := target{dir: s.Cgroup, soft: min(own.Min, hard), hard: hard}
	switch {
	case s.Alone: // the container is the pod
		leaf.soft = min(max(own.Min, pod.Min), hard)
		return []target{leaf}, ""
	case pod.Max == quota.Unlimited:
		return []target{leaf}, ""
	case s.PodCgroup == "":
		return []target{leaf}, "the pod's cgroup is not known, so its containers are not held to the pod's limit together"
	case b == Dmem:
		return []target{{dir: s.PodCgroup, pod: true, hard: pod.Max, keepSoft: true}, leaf}, ""
	case own.Max < pod.Max:
		return []target{leaf}, "the driver's own accounts are flat: a container with a limit of its own is not held to its pod's"
	}
	// Without a limit on the leaf, which would hide the pod's.
	targets = []target{{dir: s.Cgroup, hard: gpu.NoLimit}, {dir: s.PodCgroup, pod: true, soft: min(pod.Min, pod.Max), hard: pod.Max}}
	if s.Shadowed[uuid] {
		lacks = "the driver's own accounts are flat: another container of the pod has a limit of its own and does not count for the pod's"
	}
	return targets, lacks
}

// absent is why there is no driver fence around a container on a GPU, "" if there can be.
func (f *Driver) absent(s Subject, uuid string) string {
	g, ok := f.gpus.DriverGPU(uuid)
	switch {
	case !ok || g.Limits == nil:
		return "NVML does not list the GPU now"
	case g.MIG:
		return "the driver does not limit MIG instances"
	case !g.Limits.HasLimits():
		return fmt.Sprintf("driver %s has no memory limits (they need R615)", g.Version)
	case f.root == "":
		return "cgroup v1: the driver's limits need the v2 hierarchy (systemd.unified_cgroup_hierarchy=1)"
	case s.Observed:
		return "policy enforces nothing here"
	case s.ID != "" && s.Cgroup == "":
		return "cgroup v1: the container has no cgroup in the v2 hierarchy, which the driver's limits need"
	}
	return ""
}

// backend finds out how the driver of a GPU keeps account: the kernel lists the regions that it keeps
// account of.
func (f *Driver) backend(g DriverGPU) Backend {
	f.mu.Lock()
	b, known := f.backends[g.Limits]
	f.mu.Unlock()
	if known {
		return b
	}
	b = f.findBackend(g)
	f.mu.Lock()
	defer f.mu.Unlock()
	if len(f.backends) > 1024 {
		clear(f.backends) // drivers that are gone
	}
	f.backends[g.Limits] = b
	return b
}

func (f *Driver) findBackend(g DriverGPU) Backend {
	text, err := os.ReadFile(filepath.Join(f.dmem, "dmem.capacity"))
	if err != nil {
		return Misc // no such controller
	}
	for line := range strings.Lines(string(text)) {
		if region, _, _ := strings.Cut(line, " "); isRegion(region, g.PCI) {
			return Dmem
		}
	}
	return Misc
}

// isRegion says whether a region of the kernel's is a GPU's: its name has the PCI address, whose domain
// is written in four digits or in eight.
func isRegion(region, pci string) bool {
	_, address, ok := strings.Cut(strings.ToLower(pci), ":")
	return ok && strings.Contains(strings.ToLower(region), address)
}

// fileLimit is what the kernel's file says of a cgroup; false where there is none.
func (f *Driver) fileLimit(dir, pci string) (uint64, bool) {
	rel, below := strings.CutPrefix(dir, f.root)
	if !below {
		return 0, false
	}
	text, err := os.ReadFile(filepath.Join(f.dmem, rel, "dmem.max"))
	if err != nil {
		return 0, false
	}
	for line := range strings.Lines(string(text)) {
		fields := strings.Fields(line)
		if len(fields) != 2 || !isRegion(fields[0], pci) {
			continue
		}
		if fields[1] == "max" {
			return gpu.NoLimit, true
		}
		n, err := strconv.ParseUint(fields[1], 10, 64)
		return n, err == nil
	}
	return 0, false
}

// Intends is what Raise is about to promise to cgroups of their own: to be kept before, so that it is
// taken back also after a crash.
func (f *Driver) Intends(s Subject) []DriverHold {
	var out []DriverHold
	for _, g := range s.Grant.GPUs {
		if f.absent(s, g.UUID) != "" {
			continue
		}
		dg, _ := f.gpus.DriverGPU(g.UUID)
		targets, _ := compose(f.backend(dg), s, g.UUID)
		for _, t := range targets {
			if t.soft > 0 {
				out = append(out, DriverHold{GPU: g.UUID, Dir: t.dir, SoftBytes: t.soft})
			}
		}
	}
	return out
}

// Env are the variables from which NVIDIA's own hook limits a container's cgroup, with what the grant
// says of it: both of them, since with one it does nothing. None where there is no such limit, where
// the GPUs have different ones, of which one variable cannot tell, and where a limit on the container's
// own cgroup would hide its pod's.
func (f *Driver) Env(grant quota.Grant, alone bool) []string {
	var one target
	for i, g := range grant.GPUs {
		s := Subject{Grant: grant, Alone: alone, Cgroup: "leaf", PodCgroup: "pod"}
		if f.absent(s, g.UUID) != "" {
			return nil
		}
		dg, _ := f.gpus.DriverGPU(g.UUID)
		targets, _ := compose(f.backend(dg), s, g.UUID)
		at := slices.IndexFunc(targets, func(t target) bool { return !t.pod && t.hard != gpu.NoLimit })
		if at < 0 || i > 0 && targets[at] != one {
			return nil
		}
		one = targets[at]
	}
	if one.hard == 0 {
		return nil
	}
	return []string{"NVIDIA_GPU_MEMORY_LIMIT=" + strconv.FormatUint(one.hard>>20, 10), "NVIDIA_GPU_MEMORY_REQUEST=" + strconv.FormatUint(one.soft>>20, 10)}
}

// Raise sets the limits and reads them back.
func (f *Driver) Raise(ctx context.Context, s Subject) (map[string]Status, error) {
	f.visit(ctx, s)
	out := map[string]Status{}
	for _, g := range s.Grant.GPUs {
		out[g.UUID] = f.State(s, g.UUID)
	}
	return out, nil
}

// Resize follows a changed grant. The caller keeps the order of a resize: for growth before anybody is
// told of it, for shrinking once the use is below.
func (f *Driver) Resize(ctx context.Context, s Subject) error {
	f.visit(ctx, s)
	return nil
}

// Visit looks after a container's limits: it follows the grant, finds what somebody else has written,
// and compares with NVML. It says whether anything is otherwise than before.
func (f *Driver) Visit(ctx context.Context, s Subject) bool { return f.visit(ctx, s) }

func (f *Driver) visit(ctx context.Context, s Subject) (changed bool) {
	for _, g := range s.Grant.GPUs {
		f.mu.Lock()
		var old hold
		if h := f.holds[s.ID][g.UUID]; h != nil {
			old = *h
		}
		f.mu.Unlock()
		own, cancel := context.WithTimeout(ctx, driverDeadline)
		at := f.now()
		now := f.look(own, s, g.UUID, old)
		cancel()
		now.at = at
		f.mu.Lock()
		if f.holds[s.ID] == nil {
			f.holds[s.ID] = map[string]*hold{}
		}
		f.holds[s.ID][g.UUID] = &now
		if now.status.State == Proven {
			f.worked[g.UUID] = now.status.Proof
		}
		f.mu.Unlock()
		changed = changed || old.status.State != now.status.State || old.status.Why != now.status.Why || !slices.Equal(old.targets, now.targets)
	}
	return changed
}

// look makes and proves a container's limits on one GPU.
func (f *Driver) look(ctx context.Context, s Subject, uuid string, old hold) hold {
	g, _ := f.gpus.DriverGPU(uuid)
	if why := f.absent(s, uuid); why != "" {
		return f.let(ctx, g, s, uuid, old, why)
	}
	now := hold{backend: f.backend(g), alone: s.Alone, writes: old.writes, behind: old.behind}
	now.targets, now.lacks = compose(now.backend, s, uuid)
	now.wanted = now.targets
	if len(now.targets) == 0 {
		return f.let(ctx, g, s, uuid, old, noLimit)
	}
	if now.writes == nil || !slices.Equal(old.wanted, now.wanted) {
		now.writes = map[string]int{}
	}
	over := slices.DeleteFunc(slices.Clone(old.targets), func(t target) bool {
		return slices.ContainsFunc(now.targets, func(n target) bool { return n.dir == t.dir })
	})
	left, err := f.clear(ctx, g, s, uuid, over)
	if err != nil {
		now.status, now.targets = Status{State: Degraded, Why: err.Error()}, left
		return now
	}
	var proofs, notes []string
	var used uint64 // of the last, which is the innermost that is counted
	for i, t := range now.targets {
		set := slices.Contains(old.targets, t)
		proof, note, counted, err := f.hold(ctx, g, &now, t, set)
		used = counted
		switch {
		case errors.Is(err, gpu.ErrNoLimits):
			now.status = Status{State: Absent, Why: fmt.Sprintf("driver %s does not limit this GPU: %v", g.Version, err)}
			now.targets = slices.Clone(now.targets[:i])
			return now
		case err != nil:
			now.status = Status{State: Degraded, Why: err.Error()}
			// What is not set is not held: it is tried again.
			now.targets = slices.Clone(now.targets[:i])
			return now
		}
		if proof != "" {
			proofs = append(proofs, proof)
		}
		if note != "" {
			notes = append(notes, note)
		}
	}
	now.status = Status{State: Proven, Proof: fmt.Sprintf("driver %s (%s): %s; managed: shim only", g.Version, now.backend, strings.Join(proofs, "; ")), Why: strings.Join(notes, "; ")}
	if now.lacks != "" {
		now.status.State, now.status.Why = Degraded, now.lacks
	}
	if why := f.uncounted(&now, s, uuid, used); why != "" {
		now.status.State, now.status.Why = Degraded, why
	}
	return now
}

// noLimit is why there is no driver fence around a container that nothing bounds.
const noLimit = "the container has no limit"

// let takes limits away that are no longer to hold.
func (f *Driver) let(ctx context.Context, g DriverGPU, s Subject, uuid string, old hold, why string) hold {
	now := hold{status: Status{State: Absent, Why: why}}
	if g.Limits == nil || !g.Limits.HasLimits() {
		return now // they went with the GPU or its driver
	}
	left, err := f.clear(ctx, g, s, uuid, old.targets)
	if err != nil {
		now.status.Why = fmt.Sprintf("%s, and %v", why, err)
		now.targets = left // tried again
	}
	return now
}

// clear takes limits away, and gives those that are left. That of the pod stays while others of the pod
// may be held by it.
func (f *Driver) clear(ctx context.Context, g DriverGPU, s Subject, uuid string, targets []target) (left []target, err error) {
	pod, limited := s.Grant.Pod[uuid]
	for _, t := range targets {
		if t.hard == gpu.NoLimit || t.pod && limited && pod.Max != quota.Unlimited && !s.Observed {
			continue
		}
		none := t
		none.soft, none.hard = 0, gpu.NoLimit
		if e := f.write(ctx, g, none); e != nil && exists(t.dir) {
			err = fmt.Errorf("the limit of %s cannot be cleared: %w", t.dir, e)
			left = append(left, t)
		}
	}
	return left, err
}

// hold sets one limit if it is not known to be set, reads it back, and deals with others who write it.
// used is what the driver counts.
func (f *Driver) hold(ctx context.Context, g DriverGPU, h *hold, t target, set bool) (proof, note string, used uint64, err error) {
	if t.hard == gpu.NoLimit && set {
		return "", "", 0, nil // cleared when it began; the driver says the ancestor's here
	}
	if !set {
		if err := f.write(ctx, g, t); err != nil {
			return "", "", 0, err
		}
		if t.hard == gpu.NoLimit {
			return "", "", 0, nil
		}
	}
	got, used, err := f.read(ctx, g, t)
	if err != nil {
		return "", "", 0, err
	}
	if !set && got != t.hard {
		return "", "", 0, fmt.Errorf("the driver took a limit of %s for %s and says %s: it may have more in use", quota.FormatBytes(t.hard), t.dir, quota.FormatBytes(got))
	}
	for ; got != t.hard && h.writes[t.dir] < reasserts; h.writes[t.dir]++ {
		if err := f.write(ctx, g, t); err != nil {
			return "", "", 0, err
		}
		if got, used, err = f.read(ctx, g, t); err != nil {
			return "", "", 0, err
		}
		if got == t.hard {
			h.writes[t.dir]++
			break
		}
	}
	switch {
	case got < t.hard:
		note = fmt.Sprintf("contested: somebody else keeps it at %s", quota.FormatBytes(got))
	case got > t.hard:
		// The lower of the two is ours, and it is set each time; in between the other one holds.
		other := got
		if err := f.write(ctx, g, t); err != nil {
			return "", "", 0, err
		}
		return "", "", 0, fmt.Errorf("contested: somebody else keeps %s at %s", t.dir, quota.FormatBytes(other))
	case h.writes[t.dir] > 0:
		note = fmt.Sprintf("contested: somebody else wrote it, %d times until now", h.writes[t.dir])
	}
	what := "container"
	if t.pod {
		what = "pod"
	}
	proof = fmt.Sprintf("hard limit of the %s %s", what, quota.FormatBytes(got))
	if n, ok := f.fileLimit(t.dir, g.PCI); ok {
		if n != got {
			return "", "", 0, fmt.Errorf("the driver says %s for %s, dmem.max %s", quota.FormatBytes(got), t.dir, quota.FormatBytes(n))
		}
		proof += ", in dmem.max too"
	}
	return proof, note, used, nil
}

// write sets one limit.
func (f *Driver) write(ctx context.Context, g DriverGPU, t target) error {
	soft := t.soft
	if t.keepSoft {
		m, err := g.Limits.Get(ctx, t.dir)
		if err != nil {
			return fmt.Errorf("read limits of %s: %w", t.dir, err)
		}
		soft = min(m.SoftBytes, t.hard)
	}
	if err := g.Limits.Set(ctx, t.dir, soft, t.hard); err != nil {
		return fmt.Errorf("limit %s to %s: %w", t.dir, quota.FormatBytes(t.hard), err)
	}
	return nil
}

// read is the hard limit that holds now, and what counts against it.
func (f *Driver) read(ctx context.Context, g DriverGPU, t target) (hard, used uint64, err error) {
	m, err := g.Limits.Get(ctx, t.dir)
	if errors.Is(err, gpu.ErrNoLimits) {
		return gpu.NoLimit, 0, nil // it took one before, so somebody has cleared it
	}
	if err != nil {
		return 0, 0, fmt.Errorf("read back the limit of %s: %w", t.dir, err)
	}
	return m.HardBytes, m.UsedBytes, nil
}

// uncounted says whether the driver counts less for a container than NVML lists: what it allocated
// before the limit, or through somebody else's open device. One visit may be late.
func (f *Driver) uncounted(h *hold, s Subject, uuid string, used uint64) string {
	last := h.targets[len(h.targets)-1]
	container, pod, ok := f.truth.Listed(s.ID, uuid)
	if !ok {
		h.behind = 0
		return ""
	}
	listed := container
	if last.pod {
		listed = pod
	}
	if listed <= used+max(64<<20, listed/50) {
		h.behind = 0
		return ""
	}
	if h.behind++; h.behind < 2 {
		return ""
	}
	return fmt.Sprintf("the driver counts %s of the %s that NVML lists: the rest came before the limit, or through another's device", quota.HumanBytes(used), quota.HumanBytes(listed))
}

// Bound is the most that a container's level may be told of a limit that grows: what the driver is known
// to allow by now.
// pod asks for the pod's limit instead of the container's.
func (f *Driver) Bound(id policy.ContainerID, uuid string, limit uint64, pod bool) uint64 {
	f.mu.Lock()
	defer f.mu.Unlock()
	h := f.holds[id][uuid]
	if h == nil || limit == quota.Unlimited {
		return limit
	}
	for _, t := range h.targets {
		if t.pod == pod || h.alone {
			limit = min(limit, t.hard)
		}
	}
	return limit
}

// Lower lets a container go. What its cgroup was promised is taken back by the next Flush.
func (f *Driver) Lower(_ context.Context, s Subject) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	for uuid, h := range f.holds[s.ID] {
		for _, t := range h.targets {
			if !t.pod && t.soft > 0 {
				f.going = append(f.going, DriverHold{GPU: uuid, Dir: t.dir, SoftBytes: t.soft})
			}
		}
	}
	delete(f.holds, s.ID)
	return nil
}

// TakeBack is for promises of a container that ended while nobody watched.
func (f *Driver) TakeBack(holds []DriverHold) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, h := range holds {
		// What Lower knows is newer.
		if !slices.ContainsFunc(f.going, func(o DriverHold) bool { return o.GPU == h.GPU && o.Dir == h.Dir }) {
			f.going = append(f.going, h)
		}
	}
}

// Flush takes back what was promised to cgroups that go or are gone. What cannot be is tried again at
// the next call, and is in the error. done are those that are settled.
func (f *Driver) Flush(ctx context.Context) (done []DriverHold, err error) {
	f.mu.Lock()
	going := f.going
	f.going = nil
	f.mu.Unlock()
	var errs []error
	for _, h := range going {
		own, cancel := context.WithTimeout(ctx, driverDeadline)
		e := f.takeBack(own, h)
		cancel()
		if e == nil {
			done = append(done, h)
			continue
		}
		errs = append(errs, e)
		f.mu.Lock()
		f.going = append(f.going, h)
		f.mu.Unlock()
	}
	return done, errors.Join(errs...)
}

// takeBack sets a soft limit to 0 while the cgroup is there. Where it is gone, the kernel's account of
// its ancestors still has what it was promised: it is taken off the nearest that is left, which hands
// it on to its own.
func (f *Driver) takeBack(ctx context.Context, h DriverHold) error {
	g, ok := f.gpus.DriverGPU(h.GPU)
	if !ok || g.Limits == nil || !g.Limits.HasLimits() {
		return nil // the account went with the GPU or the driver
	}
	dir := h.Dir
	if exists(dir) {
		err := g.Limits.Set(ctx, dir, 0, gpu.NoLimit)
		if err == nil || exists(dir) {
			if errors.Is(err, gpu.ErrNoLimits) {
				err = nil
			}
			return err
		}
	}
	if f.backend(g) != Dmem {
		return nil
	}
	for dir = filepath.Dir(dir); dir != f.root && !exists(dir); dir = filepath.Dir(dir) {
		if len(dir) <= len(f.root) {
			return nil
		}
	}
	if dir == f.root {
		return nil // the root promises nothing
	}
	m, err := g.Limits.Get(ctx, dir)
	if err != nil {
		return fmt.Errorf("read what is left of a promise in %s: %w", dir, err)
	}
	if known := f.promised(dir, h.GPU); m.SoftBytes < h.SoftBytes || m.SoftBytes-h.SoftBytes < known {
		return nil // it went with the cgroup
	}
	if err := g.Limits.Set(ctx, dir, m.SoftBytes-h.SoftBytes, m.HardBytes); err != nil {
		return fmt.Errorf("take back a promise of %s in %s: %w", quota.FormatBytes(h.SoftBytes), dir, err)
	}
	return nil
}

// promised is what cgroups below a folder that live were promised by us.
func (f *Driver) promised(dir, uuid string) (sum uint64) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, gpus := range f.holds {
		if h := gpus[uuid]; h != nil {
			for _, t := range h.targets {
				if !t.keepSoft && strings.HasPrefix(t.dir, dir+"/") {
					sum += t.soft
				}
			}
		}
	}
	return sum
}

func exists(dir string) bool {
	_, err := os.Stat(dir)
	return err == nil
}

// Reported is what the last visit found, by GPU; empty before the first.
func (f *Driver) Reported(s Subject) map[string]Status {
	f.mu.Lock()
	defer f.mu.Unlock()
	out := map[string]Status{}
	for uuid, h := range f.holds[s.ID] {
		out[uuid] = h.status
	}
	return out
}

// State is what the last visit found, if that was of the grant as it is now.
func (f *Driver) State(s Subject, uuid string) Status {
	f.mu.Lock()
	h, worked := f.holds[s.ID][uuid], f.worked[uuid]
	f.mu.Unlock()
	why := f.absent(s, uuid)
	switch {
	case why != "":
		return Status{State: Absent, Why: why}
	case h != nil:
		now, _ := compose(h.backend, s, uuid)
		if h.status.State == Proven && !slices.EqualFunc(now, h.targets, func(a, b target) bool { return a.dir == b.dir && a.hard == b.hard }) {
			return Status{State: Degraded, Why: "the driver has not been told of the new limit yet"}
		}
		if age := f.now().Sub(h.at); h.status.State == Proven && age > proofAge {
			return Status{State: Degraded, Why: fmt.Sprintf("the driver was asked %s ago", age.Round(time.Second))}
		}
		return h.status
	case s.ID == "" && worked != "":
		return Status{State: Proven, Proof: "it has held a container here: " + worked}
	case s.ID == "":
		return Status{State: Degraded, Why: "the driver has the call, and has held no container here yet"}
	}
	return Status{State: Degraded, Why: "the driver was not asked yet"}
}
