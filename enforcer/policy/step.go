// SPDX-License-Identifier: Apache-2.0

package policy

import (
	"cmp"
	"fmt"
	"maps"
	"math"
	"slices"
	"time"

	"github.com/gpufence/gpufence/enforcer/quota"
)

// GPU is the state machine of one GPU. It is not safe for concurrent use. After a restart it
// begins anew; what must not be lost is in the ledgers, in [GPU.RestoreResize], and in what the
// caller has saved.
type GPU struct {
	uuid string
	cfg  Config

	stepped bool
	first   time.Duration // Now of the first step

	processes map[procKey]*process
	order     []*process // the same by pid, made once a step
	slots     map[slotID]*slot
	scopes    map[Level]*scope
	resizes   map[Level]*Resize
	shims     map[ContainerID]Shim

	overlap uint64 // of the newest answer that told; see shared.go

	unattributedBefore uint64
	haveUnattributed   bool
	foreign            []foreignUse // of the last settle
	unmanaged          uint64
	unattributed       uint64

	// settled: see [GPU.Settled]; repeats are the steps that were left out since, began when the
	// calls of the newest two of them began, answered that of the newest complete answer before.
	settled  bool
	repeats  int
	began    [2]time.Duration
	answered time.Duration

	members map[ContainerID][]*process // of order, by container
	facts   map[int]ProcFact           // of the step; kept for its room
}

// procKey is a process for as long as the node is up.
type procKey struct {
	pid   int
	start uint64
}

type process struct {
	procKey
	container ContainerID
	comm      string
	state     ProcState
	exempt    bool
	mps       bool          // in the newest complete answer
	answers   int           // complete ones in a row that list it
	firstSeen time.Duration // when the call of the first of them began
	exitedAt  time.Duration // of Exited
	stuck     bool
	gone      bool // exited, and NVML has left it out

	listed     bool // in the newest complete answer
	listedOnce bool
	nvml       uint64
	known      bool

	rawBefore uint64
	haveRaw   bool
	excess    uint64

	slotless    time.Duration // since when a live GPU process has no slot
	isNoSlot    bool
	killed      bool
	killedAt    time.Duration
	kills       int
	killedGroup bool // with its whole container
	slotIndex   int  // -1
	left        bool // a slot of its own has lost its lock
	gap         bool // peaks of its slots may be missing
	device      uint64
	managed     uint64
	swap        uint64
	greatest    uint64 // charge over the last settle
	shared      sharing
}

// quiet says that a process counts for no kill and has no excess: it is on its way out.
// One that was killed and does not go is judged again, at growing distances.
func (p *process) quiet(now, retry time.Duration) bool {
	return p.state != Live || p.killed && now-p.killedAt < retry<<min(max(p.kills, 1)-1, maxBackOff)
}

// maxBackOff bounds how often the distance between two kills of one process doubles.
const maxBackOff = 5

// foreignUse is what unmanaged processes held in a complete answer.
type foreignUse struct {
	began time.Duration
	bytes uint64
}

// dead bytes are what an exited process may still hold.
func (p *process) dyingBytes() uint64 {
	if p.gone {
		return 0
	}
	return add(max(p.nvml, p.device), p.managed)
}

type slotID struct {
	pod   PodID
	index int
}

type slot struct {
	generation uint32
	history    []charge // by rising number
	greatest   uint64   // of them
	freeSince  time.Duration
	freeSteps  int // in a row with its lock free
}

// charge is the greatest charge while one sample was the newest. end is when the next one began.
type charge struct {
	number uint64
	bytes  uint64
	end    time.Duration
}

const open = time.Duration(math.MaxInt64)

// scope is a limit that is watched.
type scope struct {
	peak     uint64
	over     bool // above limit + slack in the newest complete answer
	since    time.Duration
	doubt    time.Duration // within the limit by trust alone, less the time when it was not; see shared.go
	reported bool          // of a would-be or withheld kill, this episode
	charged  uint64
	// The newest complete answers, the older first.
	nvml    [2]uint64
	began   [2]time.Duration
	answers int
	rising  time.Duration // until when it counts as rising
}

// NewGPU makes one. uuid is used in sentences.
func NewGPU(uuid string, cfg Config) *GPU {
	return &GPU{
		uuid: uuid, cfg: cfg,
		processes: map[procKey]*process{}, slots: map[slotID]*slot{}, scopes: map[Level]*scope{},
		resizes: map[Level]*Resize{}, shims: map[ContainerID]Shim{},
		members: map[ContainerID][]*process{}, facts: map[int]ProcFact{},
	}
}

// Configure changes node policy from the next step on.
func (g *GPU) Configure(cfg Config) { g.cfg, g.settled = cfg, false }

// Forget drops a container that has ended, and its processes' memory of whose they are.
func (g *GPU) Forget(id ContainerID) {
	g.settled = false
	delete(g.shims, id)
	delete(g.scopes, Level{Container: id})
	delete(g.resizes, Level{Container: id})
	for _, p := range g.processes {
		if p.container == id {
			p.container = ""
		}
	}
}

// ForgetPod drops a pod that has ended.
func (g *GPU) ForgetPod(id PodID) {
	g.settled = false
	delete(g.scopes, Level{Pod: id})
	delete(g.resizes, Level{Pod: id})
	for k := range g.slots {
		if k.pod == id {
			delete(g.slots, k)
		}
	}
}

// Step takes one sample in and says what follows. Samples come in the order of their calls; the
// slots were read after the sample's NVML call, the facts after both.
func (g *GPU) Step(in Input) Output {
	if !g.stepped {
		g.stepped, g.first = true, in.Now
	}
	g.catchUp()
	facts := g.facts
	clear(facts)
	for _, f := range in.Processes {
		facts[f.PID] = f
	}
	g.trackProcesses(in, facts)
	out := Output{
		Containers: make(map[ContainerID]ContainerState, len(in.Containers)), Pods: make(map[PodID]PodState, len(in.Containers)),
		Known: in.Sample.Complete && in.Sample.DeviceKnown, Why: in.Sample.Why,
	}
	g.takeAnswer(in, facts, &out)
	g.order = g.byPID(g.order[:0])
	g.group()
	anybody := g.takeSlots(in)
	g.takeOverlap(in)
	g.settleExits(in, &out)
	g.reclaim(in, &out)
	g.computeExcess(in, anybody)
	g.sum(in, &out)
	g.device(in, &out)
	force := g.stepResizes(in, &out)
	g.decide(in, &out, force)
	g.dropGone(in)
	if in.Sample.Complete {
		g.answered = in.Sample.Began
	}
	g.settled = g.isSettled(in, &out)
	return out
}

// trackProcesses learns who lives. A pid without a fact is gone; one with another start time is
// another process.
func (g *GPU) trackProcesses(in Input, facts map[int]ProcFact) {
	for _, p := range g.processes {
		f, ok := facts[p.pid]
		if ok && f.State == Unreadable {
			continue
		}
		if !ok || f.Start != p.start || f.State == Exited {
			if p.state != Exited {
				p.state, p.exitedAt, p.excess = Exited, in.Now, 0
			}
			continue
		}
		if p.state == Exited {
			p.stuck, p.gone = false, false // it lives: what was said before was wrong
		}
		p.state, p.exempt = f.State, f.Exempt
		if f.Comm != "" {
			p.comm = f.Comm
		}
		// A process is its first container's: moving to another cgroup changes no charge.
		if p.container == "" {
			p.container = f.Container
		}
	}
	for _, f := range facts {
		key := procKey{f.PID, f.Start}
		if g.processes[key] != nil || f.State == Unreadable {
			continue
		}
		p := &process{procKey: key, container: f.Container, comm: f.Comm, state: f.State, exempt: f.Exempt, slotIndex: -1}
		if f.State == Exited {
			p.exitedAt = in.Now
		}
		g.processes[key] = p
	}
}

// holder is the process that a row of NVML's answer is about: a predecessor that exited and was
// not left out yet, before whoever has the pid now. After stuck-after a living successor
// takes the row over, so that a pid cannot hide behind its past for ever.
func (g *GPU) holder(sharing []*process, now time.Duration) *process {
	var alive, dead *process
	for _, p := range sharing {
		switch {
		case p.state != Exited:
			alive = p
		case dead == nil || p.exitedAt > dead.exitedAt || p.exitedAt == dead.exitedAt && p.start > dead.start:
			dead = p
		}
	}
	if dead == nil {
		return alive
	}
	// start 0 is nobody: a pid that was listed when it could not be read. Whoever can be read now
	// is more likely the same process than its successor.
	if alive != nil && (dead.gone || dead.start == 0 || now-dead.exitedAt >= g.cfg.StuckAfter) {
		return alive
	}
	return dead
}

// takeAnswer takes NVML's rows in. An incomplete answer changes nothing: the old numbers stay.
func (g *GPU) takeAnswer(in Input, facts map[int]ProcFact, out *Output) {
	if !in.Sample.Complete {
		return
	}
	rows := make(map[*process]ProcessUse, len(in.Sample.Processes))
	sharing := make(map[int][]*process, len(g.processes)) // a pid
	for k, p := range g.processes {
		sharing[k.pid] = append(sharing[k.pid], p)
	}
	for _, row := range in.Sample.Processes {
		p := g.holder(sharing[row.PID], in.Now)
		if p == nil && facts[row.PID].State == Unreadable {
			out.Known = false
			out.Why = fmt.Sprintf("process %d cannot be read", row.PID)
			continue
		}
		if p == nil {
			// Listed, but nobody is there: it exited before we ever saw it.
			p = &process{procKey: procKey{row.PID, 0}, state: Exited, exitedAt: in.Now, slotIndex: -1}
			g.processes[p.procKey] = p
			sharing[row.PID] = []*process{p}
		}
		rows[p] = row
	}
	for _, p := range g.processes {
		row, ok := rows[p]
		p.listed = ok
		p.nvml, p.known, p.mps = 0, true, false
		if !ok {
			p.answers = 0
		} else {
			p.listedOnce = true
			p.mps = row.MPS
			if p.answers == 0 {
				p.firstSeen = in.Sample.Began
			}
			p.answers++
			p.gone = false
			p.known = row.Known
			if row.Known {
				p.nvml = row.Bytes
			}
		}
	}
}

// takeSlots links slots to processes, and keeps their histories. It returns what each pod's overflow slot can explain,
// and those whose processes were not found yet: every shim counts them already, so excess that counts them once more
// would refuse what fits.
func (g *GPU) takeSlots(in Input) map[PodID]uint64 {
	for _, p := range g.processes {
		p.slotIndex, p.greatest, p.left, p.gap = -1, 0, false, false
		p.shared.imports = false
		if p.state != Exited {
			p.device, p.managed, p.swap = 0, 0, 0
		}
	}
	anybody := map[PodID]uint64{}
	present := map[slotID]bool{}
	linked := map[*process]bool{}
	for i := range in.Slots {
		f := &in.Slots[i]
		id := slotID{f.Pod, f.Index}
		present[id] = true
		s := g.slots[id]
		if s == nil || s.generation != f.Generation {
			s = &slot{generation: f.Generation}
			g.slots[id] = s
		}
		greatest := s.take(f, cmp.Or(f.Number, in.Sample.Number), in.Sample.Began, g.cfg)
		if f.Overflow || f.PID == 0 {
			anybody[f.Pod] = add(anybody[f.Pod], g.clamp(greatest, in))
		}
		if f.Overflow {
			continue
		}
		if f.LockFree {
			if s.freeSteps == 0 {
				s.freeSince = in.Now
			}
			s.freeSteps++
		} else {
			s.freeSteps = 0
		}
		p := g.processes[procKey{f.PID, f.Start}]
		if f.PID == 0 || p == nil {
			continue
		}
		p.gap = p.gap || f.Gap
		if p.state != Exited && f.LockFree {
			// Left by exec. The memory went with the old program; while NVML lags, the old
			// charge still explains it.
			p.left = true
			p.greatest = add(p.greatest, greatest)
			continue
		}
		if !linked[p] {
			linked[p] = true
			p.device, p.managed, p.swap = 0, 0, 0
		}
		p.slotIndex = f.Index
		p.shared.imports = p.shared.imports || f.Imports
		p.device = add(p.device, g.clamp(f.DeviceBytes, in))
		p.managed = add(p.managed, g.clamp(f.ManagedBytes, in))
		p.swap = add(p.swap, f.SwapBytes)
		p.greatest = add(p.greatest, greatest)
	}
	maps.DeleteFunc(g.slots, func(id slotID, _ *slot) bool { return !present[id] })
	for _, p := range g.processes {
		if p.state == Exited && !linked[p] {
			p.device, p.managed, p.swap = 0, 0, 0
		}
	}
	return anybody
}

// clamp keeps a number that a container wrote below what the GPU can hold.
func (g *GPU) clamp(b uint64, in Input) uint64 {
	if in.Sample.DeviceKnown {
		return min(b, in.Sample.TotalBytes)
	}
	return b
}

// take keeps the greatest charges over the last settle and returns the greatest of all. A peak
// counts for the time in which its sample was the newest; what the slot holds now counts for the
// newest, so a slot that was not touched counts what it holds.
func (s *slot) take(f *SlotFact, number uint64, began time.Duration, cfg Config) uint64 {
	if n := len(s.history); n > 0 && s.history[n-1].number < number && s.history[n-1].end == open {
		s.history[n-1].end = began
	}
	s.note(number, cfg.charge(f, f.DeviceBytes), open)
	for n, b := range f.PeakBytes {
		if n >= number { // later: other GPUs were sampled while this answer was awaited
			s.note(number, cfg.charge(f, b), open)
		} else {
			s.note(n, cfg.charge(f, b), began)
		}
	}
	var greatest uint64
	kept := s.history[:0]
	for _, c := range s.history {
		if c.end != open && began-c.end > cfg.Settle {
			continue
		}
		kept = append(kept, c)
		greatest = max(greatest, c.bytes)
	}
	s.history, s.greatest = kept, greatest
	return greatest
}

// charge is what a slot with so many device bytes explains.
func (c Config) charge(f *SlotFact, device uint64) uint64 {
	if c.ManagedAttributed {
		return add(device, f.ManagedBytes)
	}
	return device
}

func (s *slot) note(number, bytes uint64, end time.Duration) {
	i, found := slices.BinarySearchFunc(s.history, number, func(c charge, n uint64) int { return cmp.Compare(c.number, n) })
	if found {
		s.history[i].bytes = max(s.history[i].bytes, bytes)
		return
	}
	s.history = slices.Insert(s.history, i, charge{number, bytes, end})
}

// settleExits lets exited processes go when an answer that began after their exit leaves them
// out, and finds the stuck ones. One that was never listed may still turn up while NVML lags.
func (g *GPU) settleExits(in Input, out *Output) {
	for _, p := range g.processes {
		if p.state != Exited {
			continue
		}
		if in.Sample.Complete && !p.listed && in.Sample.Began >= p.exitedAt {
			unused := p.device == 0 && p.managed == 0 && p.greatest == 0
			if p.listedOnce || unused || in.Now-p.exitedAt >= g.cfg.Settle {
				p.gone = true
			}
		}
		// Whether it is still listed, only an answer can say.
		stuck := !p.gone && in.Now-p.exitedAt >= g.cfg.StuckAfter && (p.stuck || in.Sample.Complete)
		if stuck && !p.stuck {
			p.stuck = true
			out.Stuck = append(out.Stuck, g.describe(p))
		}
		p.stuck = stuck
	}
	sortStates(out.Stuck)
}

// reclaim says which slots die and which may be taken back, as far as this GPU is concerned.
func (g *GPU) reclaim(in Input, out *Output) {
	orphans := false
	for _, p := range g.processes {
		orphans = orphans || p.state == Exited && !p.gone && p.start == 0
	}
	for i := range in.Slots {
		f := &in.Slots[i]
		if f.Overflow {
			continue
		}
		s := g.slots[slotID{f.Pod, f.Index}]
		ref := SlotRef{Pod: f.Pod, Index: f.Index, Generation: f.Generation}
		p := g.processes[procKey{f.PID, f.Start}]
		if p == nil && g.facts[f.PID].State == Unreadable {
			continue // nobody can say that it has exited
		}
		switch {
		case f.PID != 0 && (p == nil || p.state == Exited):
			ref.Exited = true
			if !f.Dying {
				out.MarkDying = append(out.MarkDying, ref)
			}
			if p == nil || p.gone {
				out.Reclaimable = append(out.Reclaimable, ref)
			}
		case s.freeSteps >= 2:
			// Its owner is not to be found, or has left it by exec. Twice, since a claim takes
			// the lock and a look at it at almost the same time.
			if !f.Dying {
				out.MarkDying = append(out.MarkDying, ref)
			}
			free := in.Now - s.freeSince
			if free >= g.cfg.Settle && in.Sample.Complete && (f.PID != 0 || !orphans || free >= g.cfg.StuckAfter) {
				out.Reclaimable = append(out.Reclaimable, ref)
			}
		}
	}
}

// computeExcess finds what NVML shows of each process beyond what its slot explains, or one of those that may be
// anybody's in its pod.
func (g *GPU) computeExcess(in Input, anybody map[PodID]uint64) {
	pods := map[ContainerID]PodID{}
	for _, c := range in.Containers {
		pods[c.ID] = c.Pod
	}
	for _, p := range g.order {
		switch {
		case p.state == Exited && p.stuck:
			p.excess = max(p.nvml, p.device)
			continue
		case p.quiet(in.Now, g.cfg.KillRetry):
			p.excess, p.haveRaw = 0, false
			continue
		case !in.Sample.Complete || !p.known:
			continue
		}
		if p.slotIndex < 0 && !p.left {
			credit := min(anybody[pods[p.container]], p.nvml)
			anybody[pods[p.container]] -= credit
			p.excess, p.haveRaw = p.nvml-credit, false
			continue
		}
		raw := p.counted() - min(p.counted(), p.greatest)
		if in.Now-g.first < g.cfg.Settle || p.gap {
			raw = 0 // the history is not yet as long as NVML may lag, or has a gap
		}
		p.excess = 0
		if p.haveRaw {
			p.excess = min(raw, p.rawBefore)
		}
		p.rawBefore, p.haveRaw = raw, true
	}
}

func (g *GPU) sum(in Input, out *Output) {
	known := in.Sample.Complete
	for _, c := range in.Containers {
		state := ContainerState{Known: known, PublishedMax: c.Container.Max}
		if r := g.resizes[Level{Container: c.ID}]; r != nil {
			state.PublishedMax = r.Actuated
		}
		out.Containers[c.ID] = state
	}
	out.Processes = slices.Grow(out.Processes, len(g.order))
	for _, p := range g.order {
		out.Processes = append(out.Processes, g.describe(p))
		c, ok := out.Containers[p.container]
		if !ok {
			continue
		}
		managed := p.managed
		if g.cfg.ManagedAttributed {
			managed = 0
		}
		bytes := add(max(p.counted(), p.device), managed)
		switch {
		case p.state == Exited && p.stuck:
			c.StuckBytes = add(c.StuckBytes, p.dyingBytes())
			c.ChargedBytes = add(c.ChargedBytes, p.dyingBytes())
			c.ExcessBytes = add(c.ExcessBytes, p.excess)
		case p.state == Exited:
			c.DyingBytes = add(c.DyingBytes, p.dyingBytes())
		case p.state == Exiting:
			c.DyingBytes = add(c.DyingBytes, bytes)
		default:
			c.ChargedBytes = add(c.ChargedBytes, bytes)
			c.NVMLBytes = add(c.NVMLBytes, p.nvml)
			c.SharedBytes = add(c.SharedBytes, p.nvml-p.counted())
			c.TrustedBytes = add(c.TrustedBytes, p.shared.trust)
			c.LedgerBytes = add(c.LedgerBytes, p.device)
			c.ManagedBytes = add(c.ManagedBytes, p.managed)
			c.SwapBytes = add(c.SwapBytes, p.swap)
			c.ExcessBytes = add(c.ExcessBytes, p.excess)
			if p.listed && !p.known {
				c.Known = false
			}
		}
		out.Containers[p.container] = c
	}
	for _, c := range in.Containers {
		s := out.Containers[c.ID]
		if c.Mode == quota.ModeEnforce {
			limit := min(c.Container.Max, c.PodLimits.Max)
			s.ChargedBytes = max(min(s.ChargedBytes, limit), add(s.NVMLBytes-s.SharedBytes, s.StuckBytes))
		}
		sc := g.scope(Level{Container: c.ID})
		sc.charged = add(s.ChargedBytes, s.DyingBytes)
		sc.peak = max(sc.peak, s.ChargedBytes)
		s.PeakBytes = sc.peak
		bare := g.bareBytes(c.ID, in)
		if known {
			sc.answer(in.Sample.Began, s.NVMLBytes-s.SharedBytes)
		}
		s.SteadyBytes = sc.steady()
		s.Rising = sc.isRising(bare > 0, min(s.PublishedMax, c.Container.Max, c.PodLimits.Max), in, g.cfg.Horizon)
		if c.Mode == quota.ModeEnforce && s.Known {
			s.FreezeShare = freezeShare(bare, s.SteadyBytes, min(c.Container.High, c.PodLimits.High), g.cfg.FreezeShare)
		}
		s.Shim = g.shim(in, c)
		out.Containers[c.ID] = s

		pod, ok := out.Pods[c.Pod]
		if !ok {
			pod = PodState{Known: known, PublishedMax: c.PodLimits.Max}
			if r := g.resizes[Level{Pod: c.Pod}]; r != nil {
				pod.PublishedMax = r.Actuated
			}
		}
		pod.ChargedBytes = add(pod.ChargedBytes, s.ChargedBytes)
		pod.NVMLBytes = add(pod.NVMLBytes, s.NVMLBytes)
		pod.SharedBytes = add(pod.SharedBytes, s.SharedBytes)
		pod.ExcessBytes = add(pod.ExcessBytes, s.ExcessBytes)
		pod.DyingBytes = add(pod.DyingBytes, s.DyingBytes)
		pod.Known = pod.Known && s.Known
		out.Pods[c.Pod] = pod
	}
	for id, pod := range out.Pods {
		sc := g.scope(Level{Pod: id})
		sc.charged = add(pod.ChargedBytes, pod.DyingBytes)
		sc.peak = max(sc.peak, pod.ChargedBytes)
		pod.PeakBytes = sc.peak
		out.Pods[id] = pod
	}
}

// device finds what no container explains.
func (g *GPU) device(in Input, out *Output) {
	managed, listed, unmanaged, dying := uint64(0), uint64(0), uint64(0), uint64(0)
	known := in.Sample.Complete && in.Sample.DeviceKnown
	for _, p := range g.processes {
		_, ours := out.Containers[p.container]
		bytes := p.nvml
		listed = add(listed, p.nvml)
		if p.listed && !p.known {
			known = false
		}
		if !g.cfg.ManagedAttributed {
			managed = add(managed, p.managed)
		}
		switch {
		case p.state == Exited:
			dying = add(dying, p.dyingBytes())
		case ours && p.state == Exiting:
			dying = add(dying, add(max(p.nvml, p.device), p.managed))
		case !ours:
			unmanaged = add(unmanaged, bytes)
		}
	}
	out.DyingBytes = dying
	if in.Sample.Complete {
		g.unmanaged = unmanaged
		g.foreign = append(slices.DeleteFunc(g.foreign, func(f foreignUse) bool { return in.Sample.Began-f.began > g.cfg.Settle }),
			foreignUse{in.Sample.Began, unmanaged})
	}
	out.UnmanagedSteadyBytes = g.unmanaged
	for _, f := range g.foreign {
		out.UnmanagedSteadyBytes = min(out.UnmanagedSteadyBytes, f.bytes)
	}
	for _, p := range g.order {
		if _, ours := out.Containers[p.container]; !ours && !p.exempt && p.state == Live && p.listed && p.answers >= 2 {
			out.Unmanaged = append(out.Unmanaged, g.describe(p))
		}
	}
	if known {
		explained := add(listed, managed)
		raw := in.Sample.UsedBytes - min(in.Sample.UsedBytes, explained)
		// The device's number and the lists are not of one moment, so what is in one answer
		// only is not counted.
		g.unattributed = 0
		if g.haveUnattributed {
			g.unattributed = min(raw, g.unattributedBefore)
		}
		g.unattributedBefore, g.haveUnattributed = raw, true
	}
	out.UnmanagedBytes, out.UnattributedBytes = g.unmanaged, g.unattributed
}

// bareBytes are what a container's live processes without a slot hold.
func (g *GPU) bareBytes(id ContainerID, in Input) (sum uint64) {
	for _, p := range g.members[id] {
		if p.listed && p.slotIndex < 0 && !p.quiet(in.Now, g.cfg.KillRetry) {
			sum = add(sum, p.nvml)
		}
	}
	return sum
}

// answer takes what a complete answer says of the scope.
func (s *scope) answer(began time.Duration, bytes uint64) {
	s.nvml, s.began = [2]uint64{s.nvml[1], bytes}, [2]time.Duration{s.began[1], began}
	s.answers++
}

func (s *scope) steady() uint64 {
	if s.answers < 2 {
		return 0
	}
	return min(s.nvml[0], s.nvml[1])
}

// isRising says whether growth as between the newest two answers would cross the limit within the
// horizon. It stays so for one horizon, as growth comes in steps.
func (s *scope) isRising(bare bool, limit uint64, in Input, horizon time.Duration) bool {
	if !bare || limit == quota.Unlimited {
		s.rising = 0
		return false
	}
	if grown, took := s.nvml[1]-min(s.nvml[1], s.nvml[0]), s.began[1]-s.began[0]; s.answers >= 2 && grown > 0 && took > 0 {
		ahead := float64(s.nvml[1]) + float64(grown)*float64(horizon)/float64(took)
		if ahead > float64(limit) {
			s.rising = in.Now + horizon
		}
	}
	return in.Now < s.rising
}

// freezeShare is the part of the time for which a container above memory.high is frozen: a tenth
// of high above it is half of the most, a fifth is all of it. Processes with a slot are slowed by
// their shim, so without others there is none.
func freezeShare(bare, used, high uint64, most float64) float64 {
	if most <= 0 || bare == 0 || high == quota.Unlimited || used <= high {
		return 0
	}
	if high == 0 {
		return most
	}
	return most * min(1, float64(used-high)/float64(high)*5)
}

// shim says what is seen of a container's shim. Without GPU processes the last word stays.
func (g *GPU) shim(in Input, c ContainerFact) Shim {
	state := g.shims[c.ID]
	if state.State == "" {
		state.State = "delivered"
		if c.ShimAbsent != "" {
			state = Shim{State: "absent", Why: c.ShimAbsent}
		}
	}
	var without []int
	late, with := false, false
	for _, p := range g.members[c.ID] {
		if p.quiet(in.Now, g.cfg.KillRetry) || !p.listed || p.slotIndex >= 0 {
			p.isNoSlot = false
			with = with || p.slotIndex >= 0 && p.state == Live
			continue
		}
		if !p.isNoSlot {
			p.isNoSlot, p.slotless = true, in.Now
		}
		without = append(without, p.pid)
		late = late || in.Now-p.slotless >= g.cfg.ShimGrace
	}
	switch {
	case late:
		state = Shim{State: "absent", Why: shimWhy(c)}
	case with && len(without) == 0:
		state = Shim{State: "seen"}
	case with && state.State == "delivered":
		state = Shim{State: "seen"}
	}
	state.PIDs = without
	g.shims[c.ID] = state
	return state
}

func shimWhy(c ContainerFact) string {
	if c.ShimAbsent != "" {
		return c.ShimAbsent
	}
	return "no slot"
}

func (g *GPU) scope(l Level) *scope {
	s := g.scopes[l]
	if s == nil {
		s = &scope{}
		g.scopes[l] = s
	}
	return s
}

// dropGone forgets exited processes that nothing can speak of any more: NVML has left them out
// for longer than it may lag, and no slot names them.
func (g *GPU) dropGone(in Input) {
	named := map[procKey]bool{}
	for i := range in.Slots {
		named[procKey{in.Slots[i].PID, in.Slots[i].Start}] = true
	}
	maps.DeleteFunc(g.processes, func(k procKey, p *process) bool {
		return p.state == Exited && p.gone && !named[k] && in.Now-p.exitedAt >= g.cfg.Settle
	})
}

func (g *GPU) describe(p *process) ProcessState {
	s := ProcessState{
		PID: p.pid, Start: p.start, Container: p.container, Comm: p.comm,
		NVMLBytes: p.nvml, Known: p.known, Listed: p.listed, Slot: p.slotIndex,
		LedgerBytes: p.device, ExcessBytes: p.excess, SharedBytes: p.nvml - p.counted(), State: "live",
	}
	switch {
	case p.state == Exited && p.stuck:
		s.State, s.Since = "stuck", p.exitedAt
	case p.state == Exited:
		s.State, s.Since = "dying", p.exitedAt
		if p.gone {
			s.State = "gone"
		}
	case p.state == Exiting:
		s.State = "exiting"
	}
	return s
}

// byPID appends the processes in a fixed order, so that the same input gives the same output.
func (g *GPU) byPID(to []*process) []*process {
	for _, p := range g.processes {
		to = append(to, p)
	}
	slices.SortFunc(to, func(a, b *process) int {
		return cmp.Or(cmp.Compare(a.pid, b.pid), cmp.Compare(a.start, b.start))
	})
	return to
}

// group finds each container's processes in the order of all.
func (g *GPU) group() {
	for id, m := range g.members {
		if len(m) == 0 {
			delete(g.members, id) // it had none in the last step either
			continue
		}
		clear(m)
		g.members[id] = m[:0]
	}
	for _, p := range g.order {
		g.members[p.container] = append(g.members[p.container], p)
	}
}

func sortStates(s []ProcessState) {
	slices.SortFunc(s, func(a, b ProcessState) int {
		return cmp.Or(cmp.Compare(a.PID, b.PID), cmp.Compare(a.Start, b.Start))
	})
}

func add(a, b uint64) uint64 {
	if a > quota.Unlimited-b {
		return quota.Unlimited
	}
	return a + b
}

// Reclaimable are the slots that no GPU objects against. outputs are the newest ones of each GPU
// that the slots' pods have; a slot must be in all of them.
func Reclaimable(outputs []Output) []SlotRef {
	votes := map[SlotRef]int{}
	exited := map[SlotRef]bool{}
	var order []SlotRef
	for _, o := range outputs {
		for _, r := range o.Reclaimable {
			key := r
			key.Exited = false
			if votes[key] == 0 {
				order = append(order, key)
			}
			votes[key]++
			exited[key] = exited[key] || r.Exited
		}
	}
	var all []SlotRef
	for _, key := range order {
		if votes[key] == len(outputs) {
			ref := key
			ref.Exited = exited[key]
			all = append(all, ref)
		}
	}
	return all
}
