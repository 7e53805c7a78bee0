// SPDX-License-Identifier: Apache-2.0

package policy

import (
	"cmp"
	"slices"
	"time"
)

// NVML may list memory that a process has imported (IPC, shareable handles, pools, external memory)
// under its owner and under each importer, too. Added up, a pod whose processes share memory then
// seems to hold more than it does. So an importer is given credit for what is listed twice: what is
// left is charged to the owner alone.
//
// A credit needs both, evidence and a claim:
//   - NVML itself proves how much is listed twice: what its rows say together beyond what it says the
//     whole device has in use, in the same answer ([Overlap]). All credits together are never more.
//   - The claim says whose it may be ([GPU.claims]): of a process whose shim says that it has imported,
//     no more than NVML shows beyond its own charge, and no more than what the other processes of its pod
//     hold of their own, by their slots and by NVML. So nobody can claim more sharing than its own pod
//     has to share. What is imported from another pod gives no credit: it counts in full.
//
// Claims are a container's words, and greater than what is shared where an importer has other memory
// that its shim does not see, so there may be more of them than is proved. Then whoever had a credit
// keeps it, next come claims that have come up within the last settle, as memory and its proof come in
// one answer, and last those that NVML has not borne out since. Of the latter two, what keeps a pod
// within its limits comes first: those who keep to them need no more than they share, so it is enough
// for all of them. Pods get equal parts of what is there, none more than it claims, and so do processes
// within a pod. So a liar takes nothing from a credit that was given, and nothing of a new one but by a
// false claim that comes in the same second; after a restart, when all claims are new, no more than he
// is above his limit, which is the slack at most.
//
// Rows and the device's use are not of one moment: what a neighbour takes between the two calls hides as
// much of the proof, in any number of answers if he takes and gives back all the time. So what a process
// claims in vain is held against it only when no answer of [trustSettles] has borne it out; until then it
// is trusted ([sharing.trust]). Who lives on trust for most of the time is a liar, though, whose neighbour
// gives back between the calls: each limit keeps how long its scope was within it by trust alone, less how
// long it was not ([scope.doubt]), and from trustSettles on it is judged without.

// trustSettles is for how many settles a claim is trusted that NVML does not bear out. A neighbour who takes
// and gives back all the time hides the proof in an answer of four, and so in all of those at ten a second in
// one of 10^12.
const trustSettles = 2

// Overlap is how much of NVML's rows is listed more than once for certain. What is in use but under no
// process (managed pages, the driver's own) makes it smaller, never greater.
func Overlap(s *Sample) uint64 {
	if !s.Complete || !s.DeviceKnown {
		return 0
	}
	var sum uint64
	for i := range s.Processes {
		if s.Processes[i].Known {
			sum = add(sum, s.Processes[i].Bytes)
		}
	}
	return sum - min(sum, s.UsedBytes)
}

// claim is what a process wants credit for.
type claim struct {
	p     *process
	pod   PodID
	bytes uint64
	held  uint64 // credit of the last answer
	stale uint64 // unproved for a settle
	need  uint64 // for the limits of its container and pod
}

// sharing is a process's part in all that.
type sharing struct {
	imports  bool
	claimed  uint64
	credit   uint64
	before   uint64 // credit of the answer before
	unproved uint64 // claimed, without credit
	trust    uint64 // of it, what an answer of the last trustSettles has borne out, or what is new
	history  []unproved
}

// unproved is what a process claimed without credit in a complete answer.
type unproved struct {
	began time.Duration
	bytes uint64
}

// stale is what a process has claimed in vain in each answer since.
func (s *sharing) stale(since time.Duration) uint64 {
	if len(s.history) == 0 {
		return 0
	}
	least := s.unproved
	for _, u := range s.history {
		if u.began >= since {
			least = min(least, u.bytes)
		}
	}
	return least
}

// note keeps what the last settles have told. Before the first answer nothing was claimed.
func (s *sharing) note(began, settle time.Duration) {
	if len(s.history) == 0 {
		s.history = append(s.history, unproved{began, 0})
	}
	since := began - trustSettles*settle
	s.history = append(slices.DeleteFunc(s.history, func(u unproved) bool { return u.began < since }), unproved{began, s.unproved})
	s.trust = s.unproved - min(s.unproved, s.stale(since))
}

// settled says that another answer like the last one changes nothing.
func (s *sharing) settled() bool {
	for _, u := range s.history {
		if u.bytes != s.unproved {
			return false
		}
	}
	return s.credit == s.before
}

// takeOverlap gives credit. An incomplete answer changes nothing. While the device's use is not known
// the last overlap that was stays, so that calls that fail kill nobody.
func (g *GPU) takeOverlap(in Input) {
	if !in.Sample.Complete {
		return
	}
	if in.Sample.DeviceKnown {
		g.overlap = Overlap(&in.Sample)
	}
	claims := g.claims(in)
	credits := shareOut(g.overlap, claims)
	for _, p := range g.order {
		p.shared.before, p.shared.credit, p.shared.claimed = p.shared.credit, 0, 0
	}
	for i, c := range claims {
		c.p.shared.claimed, c.p.shared.credit = c.bytes, credits[i]
	}
	for _, p := range g.order {
		s := &p.shared
		s.unproved = s.claimed - s.credit
		if s.imports {
			s.note(in.Sample.Began, g.cfg.Settle)
		} else {
			s.history, s.trust = nil, 0
		}
	}
}

func (g *GPU) claims(in Input) (all []claim) {
	if !slices.ContainsFunc(g.order, func(p *process) bool { return p.shared.imports }) {
		return nil
	}
	pods := make(map[ContainerID]PodID, len(in.Containers))
	for i := range in.Containers {
		pods[in.Containers[i].ID] = in.Containers[i].Pod
	}
	counts := func(p *process) bool {
		_, ours := pods[p.container]
		return ours && p.listed && p.known && p.slotIndex >= 0 && !p.quiet(in.Now, g.cfg.KillRetry)
	}
	// What a process has of its own: NVML may not show yet that it let go.
	own := func(p *process) uint64 { return min(max(p.device, p.greatest), p.nvml) }
	owned := map[PodID]uint64{}
	for _, p := range g.order {
		if counts(p) {
			owned[pods[p.container]] = add(owned[pods[p.container]], own(p))
		}
	}
	for _, p := range g.order {
		s := &p.shared
		if !s.imports || !counts(p) {
			continue
		}
		explained := p.device
		if g.cfg.ManagedAttributed {
			explained = add(explained, p.managed)
		}
		pod := pods[p.container]
		bytes := min(p.nvml-min(p.nvml, explained), owned[pod]-own(p))
		if bytes > 0 {
			all = append(all, claim{p: p, pod: pod, bytes: bytes, held: s.credit, stale: s.stale(in.Sample.Began - g.cfg.Settle)})
		}
	}
	g.needs(in, all)
	return all
}

// needs finds what of the claims is above the limits of containers and pods.
func (g *GPU) needs(in Input, claims []claim) {
	above := map[Level]uint64{}
	for i := range in.Containers {
		c := &in.Containers[i]
		var used uint64
		for _, p := range g.members[c.ID] {
			if p.listed && !p.quiet(in.Now, g.cfg.KillRetry) {
				used = add(used, p.nvml)
			}
		}
		own, pod := Level{Container: c.ID}, Level{Pod: c.Pod}
		above[own] = used - min(used, c.Container.Max)
		above[pod] = add(above[pod], used)
	}
	limits := map[PodID]uint64{}
	for i := range in.Containers {
		limits[in.Containers[i].Pod] = in.Containers[i].PodLimits.Max
	}
	for id, limit := range limits {
		l := Level{Pod: id}
		above[l] -= min(above[l], limit)
	}
	for i := range claims {
		c := &claims[i]
		own, pod := Level{Container: c.p.container}, Level{Pod: c.pod}
		c.need = min(c.bytes, max(above[own], above[pod]))
		above[own] -= min(above[own], c.need)
		above[pod] -= min(above[pod], c.need)
	}
}

// shareOut gives each claim its part of what is proved. The sum is never more, and none gets more than
// it claims.
func shareOut(proved uint64, claims []claim) []uint64 {
	got := make([]uint64, len(claims))
	fresh := func(i int) uint64 {
		rest := claims[i].bytes - got[i]
		return rest - min(rest, claims[i].stale)
	}
	for _, want := range []func(i int) uint64{
		func(i int) uint64 { return min(claims[i].held, claims[i].bytes) },
		func(i int) uint64 { return min(fresh(i), claims[i].need-min(claims[i].need, got[i])) },
		fresh,
		func(i int) uint64 { return claims[i].need - min(claims[i].need, got[i]) },
		func(i int) uint64 { return claims[i].bytes - got[i] },
	} {
		var pods []PodID
		members := map[PodID][]int{}
		for i, c := range claims {
			if members[c.pod] == nil {
				pods = append(pods, c.pod)
			}
			members[c.pod] = append(members[c.pod], i)
		}
		wants := map[PodID][]uint64{}
		sums := make([]uint64, len(pods))
		for k, pod := range pods {
			for _, i := range members[pod] {
				wants[pod] = append(wants[pod], want(i))
				sums[k] = add(sums[k], want(i))
			}
		}
		for k, part := range equalParts(proved, sums) {
			proved -= part
			for j, bytes := range equalParts(part, wants[pods[k]]) {
				got[members[pods[k]][j]] += bytes
			}
		}
	}
	return got
}

// equalParts divides a total: nobody gets more than he wants, and nobody who gets less than that gets
// less than another.
func equalParts(total uint64, wants []uint64) []uint64 {
	order := make([]int, len(wants))
	for i := range order {
		order[i] = i
	}
	slices.SortStableFunc(order, func(a, b int) int { return cmp.Compare(wants[a], wants[b]) })
	got := make([]uint64, len(wants))
	for n, i := range order {
		got[i] = min(wants[i], total/uint64(len(order)-n))
		total -= got[i]
	}
	return got
}

// counted is what a row of NVML's answer counts.
func (p *process) counted() uint64 { return p.nvml - min(p.nvml, add(p.shared.credit, p.shared.trust)) }
