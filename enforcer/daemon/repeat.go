// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"slices"
	"time"

	"github.com/gpufence/gpufence/enforcer/fence"
	"github.com/gpufence/gpufence/enforcer/gpu"
	"github.com/gpufence/gpufence/enforcer/ledger"
	"github.com/gpufence/gpufence/enforcer/policy"
	"github.com/gpufence/gpufence/enforcer/quota"
	"github.com/gpufence/gpufence/enforcer/registry"
)

const (
	// probeEvery is for how long a process is believed not to have begun to exit, which no pidfd
	// tells, while its memory is what it was and nobody is above a limit (see [Daemon.doubtful]).
	probeEvery = time.Second
	// stepEvery is how often a step is made although nothing has changed. It finds what no answer, no
	// page and no pidfd tells: a process that has begun to exit but holds its memory, a slot that
	// exec has left though the new program does nothing; and it puts pages right.
	stepEvery = 5 * time.Second
)

// lastStep is what the newest full step of a GPU went by.
type lastStep struct {
	count      uint64
	made       bool
	at         time.Duration
	pods       []*registry.Pod
	snapshots  []*ledger.Snapshot // of the pods
	containers []policy.ContainerFact
	pids       []int // that it has asked for
	sample     gpu.Sample
	changes    uint64 // of what the lock guards, when all was found to be as in the step
	version    uint64 // of the set of registered cgroups
	exempt     uint64
	exits      uint64
	waits      bool // something in it waits for a time

	room []policy.ContainerFact // for the facts of the next one
}

// containerFacts are the containers of a GPU.
func (d *Daemon) containerFacts(to []policy.ContainerFact, g *gpuState, pods []*registry.Pod, pages []*podRuntime) []policy.ContainerFact {
	uuid := g.info.UUID
	for i, p := range pods {
		for _, c := range p.Containers {
			if c.State == registry.Running && hasGPU(c, uuid) {
				to = append(to, d.factOf(c, uuid, pages[i]))
			}
		}
	}
	for _, dr := range g.draining {
		to = append(to, dr.fact)
	}
	return to
}

// remember keeps what a full step went by. The caller holds mu.
func (d *Daemon) remember(g *gpuState, pods []*registry.Pod, in *policy.Input, pids []int, learning bool) {
	l := &g.last
	l.made, l.at, l.changes = true, in.Now, 0 // the step itself may have changed what it went by
	l.count++
	l.pods = append(l.pods[:0], pods...)
	l.snapshots = l.snapshots[:0]
	l.waits = learning || len(g.draining) > 0 ||
		g.out.UnattributedBytes > unattributedLimit && !g.unattributed
	for _, p := range pods {
		var s *ledger.Snapshot
		if rt := d.runtime[p.Name]; rt != nil {
			s = rt.snapshot
		}
		if s != nil && overflows(s) {
			l.waits = true
		}
		l.snapshots = append(l.snapshots, s)
	}
	l.room, l.containers = l.containers[:0], in.Containers
	l.pids, l.sample = pids, g.sample
	l.version, l.exempt, l.exits = d.facts.version, d.facts.exempt, d.facts.exits
}

// isQuiet says whether nothing is going on on a GPU, and a sample says what that of the newest full
// step said. The caller holds mu.
func (d *Daemon) isQuiet(g *gpuState, s *gpu.Sample, now time.Duration) bool {
	l := &g.last
	if !l.made || l.waits || g.above || g.rising || len(d.killing) > 0 || !g.machine.Settled() || now-l.at >= stepEvery {
		return false
	}
	return s.Complete() && s.MemoryErr == nil && s.Memory == l.sample.Memory && sameRows(s.Processes, l.sample.Processes) && slices.Equal(s.MPS, l.sample.MPS)
}

// sameRows compares lists of processes, which nobody writes to once they are answered.
func sameRows(a, b []gpu.Process) bool {
	return len(a) == len(b) && (len(a) == 0 || &a[0] == &b[0]) || slices.Equal(a, b)
}

// repeats says whether everything beside the sample is what the newest full step went by, too, so
// that another step would change nothing. The GPU is quiet, and the ledgers were read. The caller
// holds mu.
func (d *Daemon) repeats(g *gpuState, number uint64, pods []*registry.Pod, pages []*podRuntime) bool {
	l := &g.last
	if !d.facts.look() || l.exits != d.facts.exits {
		return false
	}
	if l.changes != d.mu.changes {
		if !d.sameFacts(g, pods, pages) {
			return false
		}
		l.changes = d.mu.changes
	}
	for i := range pods {
		rt := pages[i]
		if rt == nil || rt.snapshot != l.snapshots[i] || rt.number > number { // then peaks may be missing
			return false
		}
	}
	return true
}

// sameFacts says whether pods, containers, their limits and what is to become of them are what the newest
// full step went by. The caller holds mu.
func (d *Daemon) sameFacts(g *gpuState, pods []*registry.Pod, pages []*podRuntime) bool {
	l := &g.last
	if l.version != d.facts.version || l.exempt != d.facts.exempt || !slices.Equal(pods, l.pods) {
		return false
	}
	for _, p := range pods {
		for _, c := range p.Containers {
			if c.Kill != nil && !c.Kill.Confirmed {
				return false
			}
		}
		for _, r := range p.Resizes[g.info.UUID] {
			if r.State == policy.ResizePending {
				return false
			}
		}
	}
	l.room = d.containerFacts(l.room[:0], g, pods, pages)
	return slices.Equal(l.room, l.containers)
}

// repeat takes a sample in that says what the last one said. The caller holds mu.
func (d *Daemon) repeat(g *gpuState, number uint64, s gpu.Sample, now time.Duration) {
	g.machine.Repeat(s.Began)
	g.sample, g.number, g.outAt, g.lastKnown = s, number, now, now
	if g.out.UnattributedBytes <= unattributedLimit {
		g.unexplained = now
	}
	info := fence.SampleInfo{Number: number, Began: s.Began, Complete: true, Processes: len(s.Processes)}
	if !d.cfg.KillMPS {
		info.Spared = s.MPS
	}
	d.seen.sample(g.info.UUID, info)
	d.gateSample(g, &g.out)
	d.notify()
}

func overflows(s *ledger.Snapshot) bool {
	for i := range s.Overflow.GPU {
		if o := &s.Overflow.GPU[i]; o.DeviceBytes != 0 || o.ManagedBytes != 0 || o.SwapBytes != 0 {
			return true
		}
	}
	return false
}

// doubtful says which processes must be looked at in this step, whatever was known a moment ago,
// since somebody may be judged by whether they are exiting: all where a limit is crossed or policy
// judges by other things than limits, and otherwise those whose memory is not what it was.
func (d *Daemon) doubtful(g *gpuState, in *policy.Input, before []gpu.Process, now []gpu.Process) (all bool, changed map[int]bool) {
	if d.pol.ShimKill || d.cfg.Admit == "kill-over-min" || !in.Sample.Complete || len(g.machine.PendingResizes()) > 0 {
		return true, nil
	}
	inContainer, inPod := map[policy.ContainerID]uint64{}, map[policy.PodID]uint64{}
	for i, j := 0, 0; i < len(now); i++ {
		row := &now[i]
		p := d.facts.procs[row.PID]
		if p == nil {
			return true, nil // whose it is will be known in this step only
		}
		inContainer[p.container] += min(row.Bytes, quota.Unlimited-inContainer[p.container])
		for j < len(before) && before[j].PID < row.PID {
			j++
		}
		if j == len(before) || before[j] != *row {
			if changed == nil {
				changed = map[int]bool{}
			}
			changed[row.PID] = true
		}
	}
	for i := range in.Containers {
		c := &in.Containers[i]
		used := inContainer[c.ID]
		inPod[c.Pod] += min(used, quota.Unlimited-inPod[c.Pod])
		if used > c.Container.Max || inPod[c.Pod] > c.PodLimits.Max {
			return true, nil
		}
	}
	return false, changed
}

// sample keeps what is known of the newest sample where nothing else has changed.
func (s *seen) sample(uuid string, info fence.SampleInfo) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.samples[uuid] = info
}

// saidAny says whether any error stands that [Daemon.once] has logged. It is asked for every page at
// every tick.
func (d *Daemon) saidAny() bool {
	d.seen.mu.Lock()
	defer d.seen.mu.Unlock()
	return len(d.saidErr) > 0
}

// pagesOf are pods with their open pages, nil where they have none. They are asked for with every
// sample, and are the same for as long as neither the pods nor who has pages changes.
type pagesOf struct {
	pods     []*registry.Pod
	runtimes uint64
	pages    []*podRuntime
}

// of is in the order of the pods, a slice of the registry's.
func (l *pagesOf) of(d *Daemon, pods []*registry.Pod) []*podRuntime {
	same := len(pods) == len(l.pods) && (len(pods) == 0 || &pods[0] == &l.pods[0])
	if !same || l.runtimes != d.runtimes {
		l.pods, l.runtimes, l.pages = pods, d.runtimes, l.pages[:0]
		for _, p := range pods {
			l.pages = append(l.pages, d.runtime[p.Name])
		}
	}
	return l.pages
}

// stepsOf counts the steps of a pod's GPUs. What its files show changes in steps only, or with what
// makes one.
func (d *Daemon) stepsOf(p *registry.Pod) (sum uint64) {
	for _, uuid := range p.GPUs {
		if g := d.gpus[uuid]; g != nil {
			sum += g.last.count
		}
	}
	return sum
}
