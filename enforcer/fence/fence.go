// SPDX-License-Identifier: Apache-2.0

// Package fence holds the mechanisms that keep a container inside its grant behind one
// interface, and what a user may rely on because of them.
//
// What it promises: a fence says what it read back, never what it hopes; a level counts only what
// is proven now. The shim is courtesy: it makes well-behaved programs fail early and cleanly, and
// never satisfies a requirement.
//
// State takes no lock of gpufenced and may be called under any.
package fence

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/gpufence/gpufence/enforcer/api"
	"github.com/gpufence/gpufence/enforcer/policy"
	"github.com/gpufence/gpufence/enforcer/quota"
)

// State is how a fence stands.
type State string

// States of enforcing fences, then those of the shim.
const (
	Proven   State = "proven"
	Degraded State = "degraded"
	Absent   State = "absent"

	Delivered State = "delivered" // the files are in place, nobody was seen to use them
	Seen      State = "seen"      // a process has registered itself
)

// Status is how a fence stands around a container on one GPU.
type Status struct {
	State State
	Why   string // of degraded and absent
	Proof string // what was read back
	PIDs  []int  // processes that it does not see
}

// Subject is a container as a fence sees it.
type Subject struct {
	ID    policy.ContainerID
	Grant quota.Grant
	// ShimAbsent, when not empty, says why the shim is not expected: not delivered, or the
	// entry point cannot load it.
	ShimAbsent string
	// Cgroup is the folder of its cgroup in the v2 hierarchy, "" if it has none there; PodCgroup that
	// of its pod, where that is known.
	Cgroup, PodCgroup string
	// Observed says that nothing is enforced: policy only looks.
	Observed bool
	// Alone says that the container is its pod: no other is held to the pod's limit with it.
	Alone bool
	// Parents are the GPUs of which those are MIG instances that are, by UUID.
	Parents map[string]string
	// Shadowed are GPUs on which another container of the pod has a limit of its own below the pod's.
	Shadowed map[string]bool
}

// Fence is one mechanism.
type Fence interface {
	// Name is one of the design's: watch, shim, ...
	Name() string
	// Level is what a user may rely on where the fence is up.
	Level() quota.Level
	// Raise puts it around a container, whose first process has not run yet, and reads back.
	// The error is that of a mechanism that failed; one that is not there on this node is a
	// state.
	Raise(ctx context.Context, s Subject) (map[string]Status, error)
	// Resize follows a changed grant.
	Resize(ctx context.Context, s Subject) error
	// Lower takes it away from a container that has ended.
	Lower(ctx context.Context, s Subject) error
	// State is how it stands on one of the container's GPUs.
	State(s Subject, gpu string) Status
}

// ErrCannotDeny is what a [Denier] says that is not there on this node.
var ErrCannotDeny = errors.New("there is no gate")

// Denier is a fence that can keep processes that did not come through gpufence away from the GPUs.
type Denier interface {
	// DenyUnmanaged does so from now on, or lets them again. exempt are the items of policy
	// unmanaged-exempt, as they stand in the configuration.
	DenyUnmanaged(deny bool, exempt []string) error
}

// up says whether a status carries the fence's level.
func up(s State) bool { return s == Proven || s == Delivered || s == Seen }

// rank orders levels; the higher is the stronger.
func rank(l quota.Level) int {
	return slices.Index([]quota.Level{quota.LevelNone, quota.LevelAdvisory, quota.LevelReactive, quota.LevelHard}, l)
}

// Reaches says whether a level satisfies a requirement. No requirement ("", none) is always
// satisfied; an unknown one never.
func Reaches(have, want quota.Level) bool {
	if want == "" || want == quota.LevelNone {
		return true
	}
	return rank(want) >= 0 && rank(have) >= rank(want)
}

// Level is what holds a container: the lowest, over its GPUs, of the best fence that is up there.
// A container without a GPU needs none.
func Level(fences []Fence, s Subject) quota.Level {
	lowest := quota.LevelHard
	for _, g := range s.Grant.GPUs {
		best := quota.LevelNone
		for _, f := range fences {
			if up(f.State(s, g.UUID).State) && rank(f.Level()) > rank(best) {
				best = f.Level()
			}
		}
		if rank(best) < rank(lowest) {
			lowest = best
		}
	}
	if len(s.Grant.GPUs) == 0 {
		return quota.LevelNone
	}
	return lowest
}

// Missing is why a container does not reach a level: what each fence that would give it says, on the
// first GPU where none of them is up.
func Missing(fences []Fence, s Subject, want quota.Level) string {
	for _, g := range s.Grant.GPUs {
		var why []string
		held := false
		for _, f := range fences {
			if !Reaches(f.Level(), want) {
				continue
			}
			st := f.State(s, g.UUID)
			held = held || up(st.State)
			why = append(why, fmt.Sprintf("%s: %s", f.Name(), st.Why))
		}
		switch {
		case held:
		case len(why) == 0:
			return fmt.Sprintf("no fence of that level is on this node for %s", g.UUID)
		case len(s.Grant.GPUs) > 1:
			return fmt.Sprintf("on %s %s", g.UUID, strings.Join(why, "; "))
		default:
			return strings.Join(why, "; ")
		}
	}
	return "the container has no GPU"
}

// Report is how every fence stands, one entry each, for people: over several GPUs the worst
// counts, with its GPU named.
func Report(fences []Fence, s Subject) []api.Fence {
	out := make([]api.Fence, 0, len(fences))
	for _, f := range fences {
		var worst Status
		var where string
		pids := map[int]bool{}
		for i, g := range s.Grant.GPUs {
			st := f.State(s, g.UUID)
			for _, p := range st.PIDs {
				pids[p] = true
			}
			if i == 0 || badness(st.State) > badness(worst.State) {
				worst, where = st, g.UUID
			}
		}
		if len(s.Grant.GPUs) == 0 {
			worst = Status{State: Absent, Why: "no GPU"}
		}
		if worst.Why == notInstance && !slices.ContainsFunc(s.Grant.GPUs, func(g quota.GPU) bool { return f.State(s, g.UUID).Why != notInstance }) {
			continue
		}
		entry := api.Fence{Name: f.Name(), State: string(worst.State), Why: worst.Why, Proof: worst.Proof}
		if len(s.Grant.GPUs) > 1 && entry.Why != "" {
			entry.Why += " on " + where
		}
		for p := range pids {
			entry.PIDs = append(entry.PIDs, p)
		}
		slices.Sort(entry.PIDs)
		out = append(out, entry)
	}
	return out
}

// badness orders states; a shim seen on one of several GPUs counts as seen.
func badness(s State) int {
	switch s {
	case Absent:
		return 4
	case Degraded:
		return 3
	case Seen:
		return 2
	case Delivered:
		return 1
	}
	return 0
}

// ProofAge is how old a sample may be to prove the watch.
const ProofAge = 2 * time.Second

// SampleInfo is what a proof of the watch needs of a GPU's newest sample.
type SampleInfo struct {
	Number    uint64
	Began     time.Duration // monotonic
	Complete  bool          // every process list was answered
	Why       string        // what was missing
	Processes int
	Unknown   []int // pids without a size
	Spared    []int // pids that policy does not let us kill: clients of an MPS server
}

// Samples is where the watch looks.
type Samples interface {
	// Newest is a GPU's newest sample; false if there was none yet.
	Newest(gpu string) (SampleInfo, bool)
	// Refresh asks for a sample that begins after now and returns when it is there, or when
	// the context ends.
	Refresh(ctx context.Context, gpu string) error
	// Now is the monotonic clock of SampleInfo.Began.
	Now() time.Duration
}

// Watch compares NVML's truth with the grant; gpufenced slows and kills by it.
type Watch struct{ Samples Samples }

// Name is watch.
func (Watch) Name() string { return "watch" }

// Level is reactive.
func (Watch) Level() quota.Level { return quota.LevelReactive }

// Raise waits for a sample that proves it, until the context ends; then the state says what is
// missing.
func (w Watch) Raise(ctx context.Context, s Subject) (map[string]Status, error) {
	out := map[string]Status{}
	for _, g := range s.Grant.GPUs {
		st := w.State(s, g.UUID)
		for st.State != Proven {
			if err := w.Samples.Refresh(ctx, g.UUID); err != nil {
				break // time is up: the state tells why it is not proven
			}
			st = w.State(s, g.UUID)
		}
		out[g.UUID] = st
	}
	return out, nil
}

// Resize has nothing to do: the watch looks at the grant itself.
func (Watch) Resize(context.Context, Subject) error { return nil }

// Lower has nothing to do: the watch forgets a container with its registration.
func (Watch) Lower(context.Context, Subject) error { return nil }

// State judges the newest sample.
func (w Watch) State(_ Subject, gpu string) Status {
	in, ok := w.Samples.Newest(gpu)
	if !ok {
		return Status{State: Absent, Why: "NVML was not asked yet"}
	}
	age := w.Samples.Now() - in.Began
	switch {
	case !in.Complete:
		return Status{State: Degraded, Why: cut(in.Why)}
	case len(in.Unknown) > 0:
		return Status{State: Degraded, Why: fmt.Sprintf("NVML does not say the memory of process %s", pidList(in.Unknown)), PIDs: in.Unknown}
	case len(in.Spared) > 0:
		return Status{State: Degraded, Why: fmt.Sprintf("process %s uses an MPS server, and killing a client can fault the others (policy kill-mps)", pidList(in.Spared)), PIDs: in.Spared}
	case age > ProofAge:
		return Status{State: Degraded, Why: fmt.Sprintf("NVML's newest answer is %s old", age.Round(100*time.Millisecond))}
	}
	return Status{State: Proven, Proof: fmt.Sprintf("sample %d, %s old: every process list answered, %d processes, every size known",
		in.Number, age.Round(time.Millisecond), in.Processes)}
}

func pidList(pids []int) string {
	var b strings.Builder
	for i, p := range pids {
		if i == 5 {
			b.WriteString(", ...")
			break
		}
		if i > 0 {
			b.WriteString(", ")
		}
		fmt.Fprint(&b, p)
	}
	return b.String()
}

func cut(s string) string {
	if s == "" {
		return "NVML did not answer"
	}
	return s
}

// Shims is where the shim's sightings are.
type Shims interface {
	// Shim is what the newest sample of a GPU says of a container's shim; false if nothing.
	Shim(id policy.ContainerID, gpu string) (policy.Shim, bool)
}

// Shim is libgpufence.so in the container's processes.
type Shim struct {
	Shims Shims
	// Check looks whether a container's files are in place.
	Check func(Subject) error
}

// Name is shim.
func (Shim) Name() string { return "shim" }

// Level is advisory: a process may run without it.
func (Shim) Level() quota.Level { return quota.LevelAdvisory }

// Raise checks that what gets mounted into the container is there.
func (f Shim) Raise(_ context.Context, s Subject) (map[string]Status, error) {
	if s.ShimAbsent == "" {
		if err := f.Check(s); err != nil {
			return nil, fmt.Errorf("raise shim: %w", err)
		}
	}
	out := map[string]Status{}
	for _, g := range s.Grant.GPUs {
		out[g.UUID] = f.State(s, g.UUID)
	}
	return out, nil
}

// Resize has nothing to do: the limits page is published with the grant.
func (Shim) Resize(context.Context, Subject) error { return nil }

// Lower has nothing to do: the pages go with the container.
func (Shim) Lower(context.Context, Subject) error { return nil }

// State is absent with the reason, delivered, or seen.
func (f Shim) State(s Subject, gpu string) Status {
	seen, ok := f.Shims.Shim(s.ID, gpu)
	switch {
	case ok && seen.State == string(Seen):
		// Also where the entry point cannot load it: what it starts may.
		return Status{State: Seen, PIDs: seen.PIDs}
	case s.ShimAbsent != "":
		return Status{State: Absent, Why: s.ShimAbsent, PIDs: seen.PIDs}
	case !ok:
		return Status{State: Delivered}
	case seen.State == string(Absent):
		return Status{State: Absent, Why: seen.Why, PIDs: seen.PIDs}
	}
	return Status{State: Delivered, PIDs: seen.PIDs}
}
