// SPDX-License-Identifier: Apache-2.0

package policy

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/gpufence/gpufence/enforcer/quota"
)

// maxCandidates is how many a reason names.
const maxCandidates = 10

// usage is what a container's live processes of known size hold, as far as a kill may count it.
type usage struct {
	fact  ContainerFact
	bytes uint64
	trust uint64     // what they would hold more without trust
	procs []*process // largest first
}

// verdict is a limit that has been crossed long enough.
type verdict struct {
	level   Level
	scope   string
	used    uint64
	limit   uint64
	first   time.Duration
	members []*usage
	forced  bool
}

// decide picks at most one victim. It does so on complete answers only; an incomplete one neither
// counts as one of the two samples nor breaks their row.
func (g *GPU) decide(in Input, out *Output, force []*Resize) {
	if !in.Sample.Complete {
		return
	}
	var usages []*usage
	byContainer := map[ContainerID]*usage{}
	byPod := map[PodID][]*usage{}
	podLimits := map[PodID]uint64{}
	for _, c := range in.Containers {
		u := &usage{fact: c}
		usages = append(usages, u)
		byContainer[c.ID] = u
		byPod[c.Pod] = append(byPod[c.Pod], u)
		podLimits[c.Pod] = c.PodLimits.Max
	}
	for _, p := range g.order {
		u := byContainer[p.container]
		if u == nil || !p.listed || !p.known || p.quiet(in.Now, g.cfg.KillRetry) {
			continue
		}
		u.bytes = add(u.bytes, p.counted())
		u.trust = add(u.trust, p.shared.trust)
		u.procs = append(u.procs, p)
	}
	for _, u := range usages {
		slices.SortStableFunc(u.procs, func(a, b *process) int {
			return cmp.Or(cmp.Compare(b.counted(), a.counted()), cmp.Compare(b.nvml, a.nvml))
		})
	}
	slices.SortFunc(usages, func(a, b *usage) int { return cmp.Compare(a.fact.ID, b.fact.ID) })

	var containers, pods []verdict
	for _, u := range usages {
		level := Level{Container: u.fact.ID}
		if v, ok := g.judge(level, "container", u.bytes, u.trust, u.fact.Container.Max, in, []*usage{u}); ok {
			containers = append(containers, v)
		}
		state := out.Containers[u.fact.ID]
		state.OverMax = u.bytes > u.fact.Container.Max
		out.Containers[u.fact.ID] = state
	}
	for _, id := range sortedKeys(byPod) {
		var sum, trust uint64
		for _, u := range byPod[id] {
			sum, trust = add(sum, u.bytes), add(trust, u.trust)
		}
		if v, ok := g.judge(Level{Pod: id}, "pod", sum, trust, podLimits[id], in, byPod[id]); ok {
			pods = append(pods, v)
		}
		state := out.Pods[id]
		state.OverMax = sum > podLimits[id]
		out.Pods[id] = state
	}
	// A container above its own limit comes first, the furthest above it of several.
	furthest := func(a, b verdict) int { return cmp.Compare(b.used-b.limit, a.used-a.limit) }
	slices.SortStableFunc(containers, furthest)
	slices.SortStableFunc(pods, furthest)
	all := append(containers, pods...)
	for _, r := range force {
		v := verdict{level: r.Level, scope: "container", limit: r.Desired, first: in.Sample.Began, forced: true}
		if r.Level.Container != "" {
			if u := byContainer[r.Level.Container]; u != nil {
				v.used, v.members = u.bytes, []*usage{u}
			}
		} else {
			v.scope, v.members = "pod", byPod[r.Level.Pod]
			for _, u := range v.members {
				v.used = add(v.used, u.bytes)
			}
		}
		if v.used > v.limit { // those that are being killed already are left out
			all = append(all, v)
		}
	}
	for _, v := range all {
		kill, ok := g.victim(v, in)
		if !ok {
			continue
		}
		sc := g.scope(v.level)
		switch mode := byContainer[kill.Container].fact.Mode; {
		case mode == quota.ModeObserve || mode == quota.ModeWarn:
			if !sc.reported {
				sc.reported = true
				out.WouldKill = append(out.WouldKill, kill)
			}
		case g.withhold(&kill):
			if !sc.reported {
				sc.reported = true
				out.Withheld = append(out.Withheld, kill)
			}
		case out.Kill == nil:
			out.Kill = &kill
			g.markKilled(kill, in, out)
		}
	}
	if out.Kill == nil && g.cfg.ShimKill {
		g.killShimless(usages, in, out)
	}
	if out.Kill == nil && g.cfg.UnmanagedKill {
		g.killUnmanaged(in, out)
	}
}

// withhold says whether a kill is not done: killing a client of an MPS server with work in flight
// can fault every other client of it, which are other containers' processes.
func (g *GPU) withhold(k *Kill) bool {
	if g.cfg.KillMPS {
		return false
	}
	for _, p := range g.order {
		if p.container == k.Container && p.mps && p.state == Live && (k.Group || p.pid == k.PID && p.start == k.Start) {
			k.Withheld = fmt.Sprintf("process %d is a client of an MPS server, and killing it can fault the others there", p.pid)
			return true
		}
	}
	return false
}

// killShimless picks the container whose process without a slot holds the most.
func (g *GPU) killShimless(usages []*usage, in Input, out *Output) {
	var victim *process
	var of *usage
	for _, u := range usages {
		if u.fact.Mode != quota.ModeEnforce || u.fact.ShimUnknown {
			continue
		}
		for _, p := range u.procs {
			if p.slotIndex >= 0 || p.left || !p.isNoSlot || in.Now-p.slotless < g.cfg.ShimGrace || p.answers < 2 || victim != nil && p.nvml <= victim.nvml {
				continue
			}
			victim, of = p, u
		}
	}
	if victim == nil {
		return
	}
	k := Kill{
		Container: of.fact.ID, Pod: of.fact.Pod, Scope: "shim", Group: of.fact.OOMGroup, PID: victim.pid, Start: victim.start,
		PIDs: []int{victim.pid}, UsedBytes: of.bytes, MaxBytes: of.fact.Container.Max, First: victim.firstSeen, Second: in.Sample.Began,
		Escalated: victim.killed && !of.fact.OOMGroup, Again: victim.killed && victim.killedGroup,
		Candidates: []Candidate{{Container: of.fact.ID, Name: of.fact.Name, UsedBytes: of.bytes, MaxBytes: of.fact.Container.Max}},
	}
	k.Group = k.Group || k.Escalated
	why := shimWhy(of.fact)
	k.Reason = fmt.Sprintf("kill container %s: its process %d (%s) uses %s on %s without the shim (%s) since %v (shim-missing = \"kill\")",
		name(of.fact), k.PID, victim.comm, quota.HumanBytes(victim.nvml), g.uuid, why, (in.Now - victim.slotless).Round(time.Millisecond))
	k.Message = fmt.Sprintf("GPU used without gpufence's library (%s) by process %d (%s) on %s; this node's policy forbids that", why, k.PID, victim.comm, g.uuid)
	if !g.withhold(&k) {
		out.Kill = &k
		g.markKilled(k, in, out)
	}
}

// killUnmanaged picks the largest process that did not come through gpufence. It was in two
// complete answers as such, like any victim.
func (g *GPU) killUnmanaged(in Input, out *Output) {
	var victim *process
	var others []Candidate
	for _, p := range g.order {
		if _, ours := out.Containers[p.container]; ours || p.exempt || p.start == 0 || !p.listed || !p.known || p.answers < 2 ||
			in.Sample.Began-p.firstSeen < g.cfg.KillInterval || p.quiet(in.Now, g.cfg.KillRetry) || p.mps && !g.cfg.KillMPS {
			continue
		}
		others = append(others, Candidate{Name: fmt.Sprintf("%s (process %d)", p.comm, p.pid), UsedBytes: p.nvml})
		if victim == nil || p.nvml > victim.nvml {
			victim = p
		}
	}
	if victim == nil {
		return
	}
	slices.SortStableFunc(others, func(a, b Candidate) int { return cmp.Compare(b.UsedBytes, a.UsedBytes) })
	k := Kill{
		Scope: "unmanaged", PID: victim.pid, Start: victim.start, PIDs: []int{victim.pid}, UsedBytes: victim.nvml,
		First: victim.firstSeen, Second: in.Sample.Began, Candidates: others[:min(len(others), maxCandidates)], Again: victim.killed,
	}
	k.Reason = fmt.Sprintf("kill process %d (%s): it uses %s (%d bytes) on %s, did not come through gpufence and is not exempt (unmanaged = \"kill\")",
		k.PID, victim.comm, quota.HumanBytes(k.UsedBytes), k.UsedBytes, g.uuid)
	victim.killed, victim.killedAt = true, in.Now
	victim.kills++
	out.Kill = &k
}

// judge keeps the row of samples above a limit and says whether it is long enough. trust is what used would be
// more without trust.
func (g *GPU) judge(level Level, name string, used, trust, limit uint64, in Input, members []*usage) (verdict, bool) {
	if r := g.resizes[level]; r != nil {
		limit = r.watch(g.cfg)
	}
	sc := g.scope(level)
	threshold := add(limit, g.cfg.Slack(limit))
	// One answer is not more than a tenth of a settle: what comes late tells of one moment all the same.
	moment := min(in.Sample.Began-g.answered, g.cfg.Settle/10)
	if used <= threshold && add(used, trust) > threshold {
		if sc.doubt = min(sc.doubt+moment, trustSettles*g.cfg.Settle); sc.doubt == trustSettles*g.cfg.Settle {
			used = add(used, trust)
		}
	} else {
		sc.doubt -= min(sc.doubt, moment)
	}
	if limit == quota.Unlimited || used <= threshold {
		sc.over, sc.reported = false, false
		return verdict{}, false
	}
	if !sc.over {
		sc.over, sc.since = true, in.Sample.Began
	}
	if in.Sample.Began-sc.since < g.cfg.KillInterval || in.Sample.Began == sc.since {
		return verdict{}, false
	}
	return verdict{level: level, scope: name, used: used, limit: limit, first: sc.since, members: members}, true
}

// victim picks who dies for a limit: a container above its own limit before any other, then the
// largest.
func (g *GPU) victim(v verdict, in Input) (Kill, bool) {
	members := slices.DeleteFunc(slices.Clone(v.members), func(u *usage) bool { return u.bytes == 0 })
	if len(members) == 0 {
		return Kill{}, false
	}
	over := func(u *usage) uint64 { return u.bytes - min(u.bytes, u.fact.Container.Max) }
	slices.SortStableFunc(members, func(a, b *usage) int {
		return cmp.Or(cmp.Compare(over(b), over(a)), cmp.Compare(b.bytes, a.bytes), cmp.Compare(a.fact.ID, b.fact.ID))
	})
	u := members[0]
	k := Kill{
		Container: u.fact.ID, Pod: u.fact.Pod, Scope: v.scope, Group: u.fact.OOMGroup,
		PID: u.procs[0].pid, Start: u.procs[0].start,
		UsedBytes: v.used, MaxBytes: v.limit, SlackBytes: g.cfg.Slack(v.limit),
		First: v.first, Second: in.Sample.Began, Forced: v.forced,
	}
	if v.forced {
		k.SlackBytes = 0
	}
	k.ThresholdBytes = add(k.MaxBytes, k.SlackBytes)
	k.Again = true
	for _, p := range u.procs {
		k.PIDs = append(k.PIDs, p.pid)
		// One that was killed and is judged again did not go.
		k.Escalated = k.Escalated || p.killed && !k.Group
		k.Again = k.Again && p.killed && p.killedGroup
	}
	k.Group = k.Group || k.Escalated
	for _, m := range members[:min(len(members), maxCandidates)] {
		k.Candidates = append(k.Candidates, Candidate{
			Container: m.fact.ID, Name: m.fact.Name, UsedBytes: m.bytes, MaxBytes: m.fact.Container.Max, Over: over(m) > 0,
		})
	}
	k.Reason = g.reason(k, u)
	k.Message = fmt.Sprintf("GPU memory limit exceeded: used %s > memory.max %s on %s; raise %s",
		quota.HumanBytes(k.UsedBytes), quota.HumanBytes(k.MaxBytes), g.uuid, annotation(k, u))
	if v.forced {
		k.Message = fmt.Sprintf("GPU memory limit lowered by force: used %s > new memory.max %s on %s",
			quota.HumanBytes(k.UsedBytes), quota.HumanBytes(k.MaxBytes), g.uuid)
	}
	return k, true
}

func annotation(k Kill, u *usage) string {
	if k.Scope == "pod" || u.fact.Name == "" {
		return "gpufence.dev/memory.max"
	}
	return "gpufence.dev/container." + u.fact.Name + ".memory.max"
}

func (g *GPU) reason(k Kill, u *usage) string {
	what := fmt.Sprintf("process %d of container %s", k.PID, name(u.fact))
	if k.Group {
		what = fmt.Sprintf("container %s", name(u.fact))
	}
	var b strings.Builder
	fmt.Fprintf(&b, "kill %s: %s uses %s (%d bytes) on %s", what, k.Scope, quota.HumanBytes(k.UsedBytes), k.UsedBytes, g.uuid)
	if k.Forced {
		fmt.Fprintf(&b, ", more than the new memory.max %s (%d) at the deadline of a forced resize", quota.HumanBytes(k.MaxBytes), k.MaxBytes)
	} else {
		fmt.Fprintf(&b, ", more than memory.max %s (%d) plus slack %s (%d), in 2 samples %v apart",
			quota.HumanBytes(k.MaxBytes), k.MaxBytes, quota.HumanBytes(k.SlackBytes), k.SlackBytes, (k.Second - k.First).Round(time.Millisecond))
	}
	switch {
	case k.Again:
		b.WriteString("; it was killed before and is not gone")
	case k.Escalated:
		b.WriteString("; the whole container, since a process of it was killed before and is not gone")
	}
	b.WriteString("; candidates: ")
	for i, c := range k.Candidates {
		if i > 0 {
			b.WriteString(", ")
		}
		fmt.Fprintf(&b, "%s %s", cmp.Or(c.Name, string(c.Container)), quota.HumanBytes(c.UsedBytes))
		if c.Over {
			fmt.Fprintf(&b, " (above its own %s)", quota.HumanBytes(c.MaxBytes))
		}
	}
	return b.String()
}

func name(c ContainerFact) string { return cmp.Or(c.Name, string(c.ID)) }

// markKilled makes the victim's processes count for nothing until they have had time to go, and
// says at once what is known about their shim: they may not live to be reported late.
func (g *GPU) markKilled(k Kill, in Input, out *Output) {
	g.scope(Level{Container: k.Container}).over = false
	if k.Scope == "pod" {
		g.scope(Level{Pod: k.Pod}).over = false
	}
	var without []int
	for _, p := range g.order {
		if p.container != k.Container || p.state == Exited {
			continue
		}
		if !k.Group && (p.pid != k.PID || p.start != k.Start) {
			continue
		}
		if p.listed && p.slotIndex < 0 {
			without = append(without, p.pid)
		}
		p.killed, p.killedAt, p.killedGroup = true, in.Now, k.Group
		p.kills++
	}
	if len(without) == 0 {
		return
	}
	for _, c := range in.Containers {
		if c.ID == k.Container {
			g.shims[c.ID] = Shim{State: "absent", Why: shimWhy(c), PIDs: without}
			state := out.Containers[c.ID]
			state.Shim = g.shims[c.ID]
			out.Containers[c.ID] = state
		}
	}
}

func sortedKeys[K cmp.Ordered, V any](m map[K]V) []K {
	keys := make([]K, 0, len(m))
	for k := range m {
		keys = append(keys, k)
	}
	slices.Sort(keys)
	return keys
}
