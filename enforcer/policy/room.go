// SPDX-License-Identifier: Apache-2.0

package policy

import (
	"cmp"
	"fmt"
	"slices"
	"time"

	"github.com/gpufence/gpufence/enforcer/quota"
)

// RoomInput asks for memory that a guarantee needs now and that others hold above theirs (policy
// admit = "kill-over-min").
type RoomInput struct {
	Now        time.Duration
	ShortBytes uint64 // what is missing beside all that is free
	For        PodID  // who wants it, and gives up nothing; "" for a pod that is not there yet
	Containers []ContainerFact
	// Guarantees are what each pod is promised.
	Guarantees map[PodID]uint64
	Newest     Output // of this GPU
}

// MakeRoom picks who has to go, furthest above its guarantee first, then the lowest priority, then
// the youngest. wait says that memory is on its way back already, so that nobody else has to.
// Neither: nobody can make the room, and so nobody is killed for it.
func (g *GPU) MakeRoom(in RoomInput) (kill *Kill, wait bool) {
	if !in.Newest.Known {
		return nil, false
	}
	g.catchUp()
	for _, p := range g.processes {
		if p.killed && !p.gone && in.Now-p.killedAt < g.cfg.StuckAfter {
			return nil, true
		}
	}
	type candidate struct {
		fact  ContainerFact
		used  uint64
		over  uint64
		procs []*process
	}
	podUse, podNewest := map[PodID]uint64{}, map[PodID]uint64{}
	for _, c := range in.Containers {
		podUse[c.Pod] = add(podUse[c.Pod], in.Newest.Containers[c.ID].SteadyBytes)
		newest := in.Newest.Containers[c.ID]
		podNewest[c.Pod] = add(podNewest[c.Pod], newest.NVMLBytes-newest.SharedBytes)
	}
	var all []candidate
	var gain, newest uint64 // with what is steady, and with the newest answer alone
	podGain := map[PodID]uint64{}
	for _, c := range in.Containers {
		s := in.Newest.Containers[c.ID]
		if c.Pod == in.For || c.Mode != quota.ModeEnforce || !s.Known {
			continue
		}
		now := s.NVMLBytes - s.SharedBytes
		newest = add(newest, min(now-min(now, c.Container.Min), podNewest[c.Pod]-min(podNewest[c.Pod], in.Guarantees[c.Pod])))
		// What comes back is what neither its own promise nor its pod's covers.
		own := s.SteadyBytes - min(s.SteadyBytes, c.Container.Min)
		pod := podUse[c.Pod] - min(podUse[c.Pod], in.Guarantees[c.Pod])
		x := candidate{fact: c, used: s.SteadyBytes, over: min(own, pod)}
		for _, p := range g.order {
			if p.container == c.ID && p.listed && p.known && !p.quiet(in.Now, g.cfg.KillRetry) {
				x.procs = append(x.procs, p)
			}
		}
		k := Kill{Container: c.ID, Group: true}
		if x.over == 0 || len(x.procs) == 0 || g.withhold(&k) {
			continue
		}
		slices.SortStableFunc(x.procs, func(a, b *process) int { return cmp.Compare(b.nvml, a.nvml) })
		all = append(all, x)
		more := min(x.over, pod-min(pod, podGain[c.Pod]))
		podGain[c.Pod] = add(podGain[c.Pod], more)
		gain = add(gain, more)
	}
	if gain < in.ShortBytes || len(all) == 0 {
		// If it is so in the next answer, too, there will be somebody.
		return nil, newest >= in.ShortBytes && newest > gain
	}
	slices.SortStableFunc(all, func(a, b candidate) int {
		return cmp.Or(cmp.Compare(b.over, a.over), cmp.Compare(a.fact.Priority, b.fact.Priority),
			cmp.Compare(b.fact.Started, a.fact.Started), cmp.Compare(a.fact.ID, b.fact.ID))
	})
	v := all[0]
	k := Kill{
		Container: v.fact.ID, Pod: v.fact.Pod, Scope: "room", Group: true,
		PID: v.procs[0].pid, Start: v.procs[0].start,
		UsedBytes: v.used, MaxBytes: v.used - v.over, ThresholdBytes: v.used - v.over,
	}
	sc := g.scope(Level{Container: v.fact.ID})
	k.First, k.Second = sc.began[0], sc.began[1]
	for _, p := range v.procs {
		k.PIDs = append(k.PIDs, p.pid)
	}
	for _, c := range all[:min(len(all), maxCandidates)] {
		k.Candidates = append(k.Candidates, Candidate{Container: c.fact.ID, Name: c.fact.Name, UsedBytes: c.used, MaxBytes: c.used - c.over, Over: true})
	}
	k.Reason = fmt.Sprintf("kill container %s: %s more are needed on %s for a guarantee, and it uses %s (%d bytes), %s above what it is promised (admit = \"kill-over-min\"); candidates: ",
		name(v.fact), quota.HumanBytes(in.ShortBytes), g.uuid, quota.HumanBytes(k.UsedBytes), k.UsedBytes, quota.HumanBytes(v.over))
	for i, c := range k.Candidates {
		if i > 0 {
			k.Reason += ", "
		}
		k.Reason += fmt.Sprintf("%s %s (promised %s)", cmp.Or(c.Name, string(c.Container)), quota.HumanBytes(c.UsedBytes), quota.HumanBytes(c.MaxBytes))
	}
	k.Message = fmt.Sprintf("GPU memory needed for another's guarantee: used %s > memory.min %s on %s; raise gpufence.dev/memory.min",
		quota.HumanBytes(k.UsedBytes), quota.HumanBytes(k.MaxBytes), g.uuid)
	for _, p := range v.procs {
		p.killed, p.killedAt, p.killedGroup = true, in.Now, true
		p.kills++
	}
	g.settled = false
	return &k, false
}
