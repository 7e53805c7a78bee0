// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"errors"
	"slices"
	"time"

	"github.com/gpufence/gpufence/enforcer/act"
	"github.com/gpufence/gpufence/enforcer/ledger"
	"github.com/gpufence/gpufence/enforcer/policy"
	"github.com/gpufence/gpufence/enforcer/registry"
)

// facts remembers who a pid is as long as a pidfd shows that it is still the same process, so that
// /proc is read once a process and not once a sample.
type facts struct {
	host  *act.Host
	procs map[int]*procFact
	// version changes with the set of registered cgroups: whoever belonged to nobody is then
	// looked at again.
	version uint64
	owners  ownersAt
	// exempt changes with the policy on exempt processes, which isExempt asks.
	exempt   uint64
	isExempt func(act.Identity, string) bool

	exited *act.Exits // nil: every process is looked at every time
	exits  uint64     // how many were seen to exit
	pids   []int      // room for those
	firsts map[int]*first
}

// first is a container's first process.
type first struct {
	start uint64
	pidfd *act.Pidfd
	ended bool
	used  bool // since the last sweep
}

type procFact struct {
	process   act.Process
	container policy.ContainerID
	pidfd     *act.Pidfd
	watch     *act.Watch    // nil if it could not be had
	version   uint64        // at the newest look for a container's process that is nobody's
	placed    time.Duration // when that was
	exempt    bool
	judged    uint64 // by which policy it is exempt or not
	used      bool   // in this step

	watched bool          // its exit will be told
	ended   bool          // it was
	checked time.Duration // when it was last seen to be alive and not exiting
}

func newFacts(host *act.Host) *facts {
	f := &facts{host: host, procs: map[int]*procFact{}, exempt: 1, firsts: map[int]*first{}}
	if e, err := act.NewExits(); err == nil { // else every process is looked at each time
		f.exited = e
	}
	return f
}

// look learns who has exited. It says whether that could be known.
func (f *facts) look() bool {
	if f.exited == nil {
		return false
	}
	pids, err := f.exited.Look(f.pids[:0])
	f.pids = pids
	for _, pid := range pids {
		f.exits++
		if p := f.procs[pid]; p != nil {
			p.ended = true
		}
		if p := f.firsts[pid]; p != nil {
			p.ended = true
		}
	}
	if err != nil {
		for pid := range f.firsts {
			f.dropFirst(pid)
		}
		for _, p := range f.procs {
			p.watched = false
		}
	}
	return err == nil
}

// lives says that a container's first process had not exited when exits were looked for last, which
// must have been possible. False says only that it must be looked at.
func (f *facts) lives(pid int, start uint64) bool {
	p := f.firsts[pid]
	if p != nil && (p.ended || p.start != start) {
		f.dropFirst(pid)
		p = nil
	}
	if p == nil {
		fd, err := f.host.Open(pid, start)
		if err != nil {
			return false
		}
		p = &first{start: start, pidfd: fd}
		f.firsts[pid] = p
		if err := f.exited.Add(fd); err != nil {
			f.dropFirst(pid)
			return false
		}
		// It may have exited before it was added.
		if exited, err := fd.Exited(); err != nil || exited {
			f.dropFirst(pid)
			return false
		}
	}
	p.used = true
	return true
}

func (f *facts) dropFirst(pid int) {
	if p := f.firsts[pid]; p != nil {
		_ = p.pidfd.Close() // only held to learn of the exit
		delete(f.firsts, pid)
	}
}

// alive says that it is neither exiting nor gone; if it cannot be told, that it is not.
func (p *procFact) alive(now time.Duration) bool {
	if p.watch == nil || p.ended || !p.watch.Alive() {
		return false
	}
	p.checked = now
	return true
}

func (f *facts) drop(pid int) {
	if p := f.procs[pid]; p != nil {
		// Only held to learn of the exit: nothing can be lost by closing.
		_ = p.pidfd.Close()
		if p.watch != nil {
			_ = p.watch.Close() // as above
		}
		delete(f.procs, pid)
	}
}

func (f *facts) close() {
	for pid := range f.procs {
		f.drop(pid)
	}
	for pid := range f.firsts {
		f.dropFirst(pid)
	}
	if f.exited != nil {
		_ = f.exited.Close() // only held to learn of exits
	}
}

// owners are remembered until the set of registered cgroups changes.
type ownersAt struct {
	owners
	version uint64
	made    bool
}

// owners are the registered cgroups and whose they are.
type owners struct {
	cgroups []act.Cgroup
	ids     map[act.Cgroup]policy.ContainerID
}

func (d *Daemon) owners() owners {
	if d.facts.owners.made && d.facts.owners.version == d.facts.version {
		return d.facts.owners.owners
	}
	o := owners{ids: map[act.Cgroup]policy.ContainerID{}}
	for _, c := range d.reg.Containers() {
		if c.State == registry.Running {
			o.cgroups = append(o.cgroups, *c.Cgroup)
			o.ids[*c.Cgroup] = c.ID()
		}
	}
	d.facts.owners = ownersAt{o, d.facts.version, true}
	return o
}

// fact says who has a pid now; ok is false if nobody has. An error says that it cannot be told
// now: a process without a fact would count as exited, so nothing may be decided then. One that was
// looked at a moment ago and has not exited since is not looked at again, unless it is doubtful.
func (f *facts) fact(pid int, o owners, now time.Duration, doubtful bool) (fact policy.ProcFact, ok bool, err error) {
	for range 3 {
		fact, ok, err = f.read(pid, o, now, doubtful)
		if !errors.Is(err, act.ErrUnstable) {
			break // else its pid went to another process just now
		}
	}
	return fact, ok, err
}

func (f *facts) read(pid int, o owners, now time.Duration, doubtful bool) (policy.ProcFact, bool, error) {
	p := f.procs[pid]
	if p != nil && p.container != "" && (!doubtful && p.watched && !p.ended && !p.process.Exiting && now-p.checked < probeEvery || p.alive(now)) {
		// Nearly always: the same process, and no sign of its end.
		p.used, p.process.Exiting = true, false
		return policy.ProcFact{PID: pid, Start: p.process.Start, Container: p.container, Comm: p.process.Comm}, true, nil
	}
	if p != nil {
		exited, err := p.pidfd.Exited()
		if err != nil {
			return policy.ProcFact{}, false, err
		}
		if exited {
			f.drop(pid)
			p = nil
		} else {
			p.ended = false // that was an earlier holder of the pid
		}
	}
	if p != nil && p.container == "" && (doubtful || p.version != f.version || now-p.placed >= probeEvery) {
		// It may be of a container that has registered since, or have been moved into one: whoever gets an exited
		// process's pid is listed, and so looked at, before its runtime has moved it. If that cannot be told now, it is
		// still the process that it was.
		if proc, cg, ours, err := f.host.Owner(pid, o.cgroups); err == nil && proc.Start == p.process.Start {
			p.version, p.placed = f.version, now
			if ours {
				p.container = o.ids[cg]
			}
		}
	}
	if p == nil {
		proc, cg, ours, err := f.host.Owner(pid, o.cgroups)
		if errors.Is(err, act.ErrGone) {
			return policy.ProcFact{}, false, nil
		}
		if err != nil {
			return policy.ProcFact{}, false, err
		}
		container := policy.ContainerID("")
		if ours {
			container = o.ids[cg]
		}
		exitedFact := policy.ProcFact{PID: pid, Start: proc.Start, Container: container, State: policy.Exited, Comm: proc.Comm}
		fd, err := f.host.Open(pid, proc.Start)
		if errors.Is(err, act.ErrGone) {
			return exitedFact, true, nil
		}
		if err != nil {
			return policy.ProcFact{}, false, err
		}
		p = &procFact{process: proc, container: container, pidfd: fd, version: f.version, placed: now}
		f.procs[pid] = p
		if watch, err := f.host.Watch(pid, proc.Start); err == nil {
			p.watch = watch
		}
		// Before it is looked at: an exit in between is told or seen.
		p.watched = f.exited != nil && f.exited.Add(fd) == nil
		exited, err := fd.Exited()
		if err != nil {
			return policy.ProcFact{}, false, err
		}
		if exited {
			f.drop(pid)
			return exitedFact, true, nil
		}
	} else if p.container != "" {
		// An exiting process gives its memory back soon and must not be judged; that shows in
		// /proc only, and matters for ours only.
		if fresh, err := f.host.Process(pid); err == nil && fresh.Start == p.process.Start {
			p.process = fresh
		}
	}
	p.used = true
	if p.container == "" && p.judged != f.exempt && f.isExempt != nil {
		// If it cannot be told it is asked again: until then it is nobody's victim.
		if id, err := f.host.Identify(pid, p.process.Start); err == nil {
			p.exempt, p.judged = f.isExempt(id, p.process.Comm), f.exempt
		} else {
			p.exempt = true
		}
	}
	out := policy.ProcFact{PID: pid, Start: p.process.Start, Container: p.container, Comm: p.process.Comm, Exempt: p.container == "" && p.exempt}
	if p.process.Exiting {
		out.State = policy.Exiting
	}
	return out, true, nil
}

// disown forgets which processes were a container's that is forgotten: who lives is looked at again.
func (f *facts) disown(id policy.ContainerID) {
	for _, p := range f.procs {
		if p.container == id {
			p.container, p.version = "", 0
		}
	}
}

// use keeps what a step has asked for that still holds.
func (f *facts) use(pids []int) {
	for _, pid := range pids {
		if p := f.procs[pid]; p != nil {
			p.used = true
		}
	}
}

// sweep drops what no step of any GPU has asked for since the last sweep.
func (f *facts) sweep() {
	for pid, p := range f.firsts {
		if !p.used {
			f.dropFirst(pid)
			continue
		}
		p.used = false
	}
	for pid, p := range f.procs {
		if !p.used {
			f.drop(pid)
			continue
		}
		p.used = false
	}
}

// slotOwner is the process that claimed a slot.
type slotOwner struct {
	pid       int
	start     uint64
	container *registry.Container
}

// findOwners gives every slot of a pod its process, as far as it can be found: in the cgroups of
// the pod's containers, with the pid namespace and the pid in it that the slot says. The slot's
// word is only where to look; a lie finds nobody, or somebody of the same pod.
func (d *Daemon) findOwners(p *registry.Pod, rt *podRuntime) {
	open := map[slotKey]*ledger.Slot{}
	present := map[slotKey]bool{}
	for i := range rt.snapshot.Slots {
		s := &rt.snapshot.Slots[i]
		k := slotKey{s.Index, s.Generation}
		present[k] = true
		if rt.owners[k] == nil && s.PID != 0 {
			open[k] = s
		}
	}
	for k := range rt.owners {
		if !present[k] {
			delete(rt.owners, k)
		}
	}
	now := d.mono()
	if len(open) == 0 || now < rt.nextScan {
		return
	}
	type nsPID struct {
		ns  uint64
		pid int
	}
	wanted := map[nsPID][]slotKey{}
	for k, s := range open {
		id := nsPID{s.PIDNSInode, int(s.PID)}
		wanted[id] = append(wanted[id], k)
	}
	for _, c := range p.Containers {
		if c.State != registry.Running {
			continue
		}
		pids, err := d.host.Procs(*c.Cgroup)
		if err != nil {
			continue // the cgroup goes; housekeeping ends the container
		}
		for _, pid := range pids {
			proc, err := d.host.Process(pid)
			if err != nil {
				continue // it exited meanwhile
			}
			for _, k := range wanted[nsPID{proc.PIDNS, proc.NSPID}] {
				rt.owners[k] = &slotOwner{pid: proc.PID, start: proc.Start, container: c}
			}
		}
	}
	// A pod that forges slots, or has very many processes, costs at most a twentieth of our time.
	rt.nextScan = now + 20*(d.mono()-now)
}

// slotContainer names whose a slot is, for the totals of its events.
func (rt *podRuntime) slotContainer(s *ledger.Slot) string {
	if o := rt.owners[slotKey{s.Index, s.Generation}]; o != nil {
		return o.container.Folder()
	}
	return ""
}

// slotFacts appends a pod's slots on one GPU.
func (d *Daemon) slotFacts(out []policy.SlotFact, p *registry.Pod, rt *podRuntime, uuid string, tick uint64) []policy.SlotFact {
	gpuIndex := p.GPUIndex(uuid)
	if gpuIndex < 0 || rt.snapshot == nil {
		return out
	}
	add := func(s *ledger.Slot, overflow bool) {
		g := &s.GPU[gpuIndex]
		f := policy.SlotFact{
			Pod: p.ID(), Index: s.Index, Generation: s.Generation, Overflow: overflow,
			Dying:       s.State == ledger.SlotDying,
			DeviceBytes: g.DeviceBytes, ManagedBytes: g.ManagedBytes, SwapBytes: g.SwapBytes, Imports: s.Imports > 0 && !overflow,
			Number: min(rt.number, tick), PeakBytes: g.Peaks(rt.number), Gap: rt.number > tick,
		}
		if !overflow {
			if o := rt.owners[slotKey{s.Index, s.Generation}]; o != nil {
				f.PID, f.Start = o.pid, o.start
			}
			free, err := rt.pages.Ledger().LockFree(s.Index)
			f.LockFree = err == nil && free // not known: as if it were held
		}
		out = append(out, f)
	}
	for i := range rt.snapshot.Slots {
		add(&rt.snapshot.Slots[i], false)
	}
	add(&rt.snapshot.Overflow, true)
	return out
}

// readLedger takes a new snapshot of a pod. A broken ledger is said once, and not believed until
// it is whole again.
func (d *Daemon) readLedger(p *registry.Pod, rt *podRuntime) {
	d.lookAtLedger(p, rt, (*ledger.Ledger).SnapshotOf)
}

// lookAtLedger is that, by a look that may find some of it only a little later.
func (d *Daemon) lookAtLedger(p *registry.Pod, rt *podRuntime, look func(*ledger.Ledger, int) (*ledger.Snapshot, error)) {
	s, err := look(rt.pages.Ledger(), len(p.GPUs))
	if err != nil {
		rt.snapshot = nil
		if rt.broken == "" {
			rt.broken = err.Error()
			d.podEvent(p, "ledger-broken", "the pod's ledger is not believed any more, its limits hold by what NVML says: "+err.Error())
		}
		return
	}
	if rt.broken != "" {
		rt.broken = ""
		d.podEvent(p, "ledger-whole", "the pod's ledger is whole again")
	}
	if s == rt.snapshot && len(rt.owners) == len(s.Slots) {
		return // nothing has happened, and everybody is known
	}
	rt.snapshot = s
	d.asksBack(rt, s)
	d.findOwners(p, rt)
	if p.Totals.Observe(s, rt.slotContainer) {
		d.dirty[p.Name] = true
		d.foldReported(p)
	}
}

// contextSeen is a process that charged one context and nothing else.
type contextSeen struct {
	start uint64
	bytes uint64
	since time.Duration
}

// learnContexts raises or lowers what a context costs in a pod to the largest that was seen
// there. It is kept a pod for itself, since who writes the slots could lower another's; and never
// above the upper bound, since who allocates behind the shim could raise it.
// It says whether it will know more by and by.
func (d *Daemon) learnContexts(g *gpuState, out *policy.Output) (learning bool) {
	present := map[int]bool{}
	for _, p := range out.Processes {
		c := d.reg.ByID(p.Container)
		if c == nil || p.State != "live" || !p.Listed || !p.Known || p.Slot < 0 {
			continue
		}
		charged := d.contextBytes(c.Pod(), g)
		// The ledger counts whole units, so a context's charge is rounded up.
		if p.LedgerBytes != units(charged) && p.LedgerBytes != units(g.quota.ContextBytes) {
			continue
		}
		if p.NVMLBytes > g.quota.ContextBytes || p.NVMLBytes < g.quota.ContextBytes/8 {
			continue
		}
		present[p.PID] = true
		last, ok := g.context[p.PID]
		if !ok || last.start != p.Start || last.bytes != p.NVMLBytes {
			g.context[p.PID] = contextSeen{p.Start, p.NVMLBytes, d.mono()}
			learning = true
			continue
		}
		// NVML may lag, and a context grows for a while after its creation.
		if d.mono()-last.since < 2*d.cfg.Settle {
			learning = true
			continue
		}
		pod := c.Pod()
		if p.NVMLBytes > pod.ContextBytes[g.info.UUID] {
			if pod.ContextBytes == nil {
				pod.ContextBytes = map[string]uint64{}
			}
			pod.ContextBytes[g.info.UUID] = p.NVMLBytes
			d.dirty[pod.Name] = true
			learning = true
		}
	}
	for pid := range g.context {
		if !present[pid] {
			delete(g.context, pid)
		}
	}
	return learning
}

func units(b uint64) uint64 {
	return (b + ledger.UnitBytes - 1) / ledger.UnitBytes * ledger.UnitBytes
}

// contextBytes is what the pod's shims charge for a context on a GPU.
func (d *Daemon) contextBytes(p *registry.Pod, g *gpuState) uint64 {
	if b := p.ContextBytes[g.info.UUID]; b != 0 {
		return b
	}
	return g.quota.ContextBytes
}

// stepPIDs are the pids that a step needs facts of.
func stepPIDs(s *policy.Sample, slots []policy.SlotFact, last []policy.ProcessState) []int {
	var pids []int
	for _, p := range s.Processes {
		pids = append(pids, p.PID)
	}
	for _, f := range slots {
		if f.PID != 0 {
			pids = append(pids, f.PID)
		}
	}
	for _, p := range last {
		pids = append(pids, p.PID)
	}
	slices.Sort(pids)
	return slices.Compact(pids)
}
