// SPDX-License-Identifier: Apache-2.0

package fence

import (
	"context"
	"fmt"

	"github.com/gpufence/gpufence/enforcer/policy"
	"github.com/gpufence/gpufence/enforcer/quota"
)

// Instance is what a proof of the mig fence needs of a MIG instance.
type Instance struct {
	GPU string // that it is a part of
	// Bytes is its size as NVML says it now, without what the driver keeps; 0 if it does not answer.
	Bytes uint64
	Why   string // it does not answer
	// Others are who else has it: other pods' containers, processes that did not come through
	// gpufence.
	Others []string
}

// Instances is where the mig fence looks.
type Instances interface {
	// Instance is a MIG instance as one of a container; false for what is none.
	Instance(id policy.ContainerID, uuid string) (Instance, bool)
}

// MIG is the hardware's own partition: who has a whole instance cannot get more than its size. A
// limit below that is the other fences' business, inside the instance.
type MIG struct{ Instances Instances }

// Name is mig.
func (MIG) Name() string { return "mig" }

// Level is hard: the hardware refuses.
func (MIG) Level() quota.Level { return quota.LevelHard }

// Raise has nothing to do: whoever made the instance has raised it.
func (f MIG) Raise(_ context.Context, s Subject) (map[string]Status, error) {
	out := map[string]Status{}
	for _, g := range s.Grant.GPUs {
		out[g.UUID] = f.State(s, g.UUID)
	}
	return out, nil
}

// Resize has nothing to do: an instance's size does not change, and what it carries is looked at
// each time.
func (MIG) Resize(context.Context, Subject) error { return nil }

// Lower has nothing to do, as Raise.
func (MIG) Lower(context.Context, Subject) error { return nil }

// notInstance is why there is no mig fence on a GPU that is none. It is not reported: it would be a
// line of every container on nodes that have no MIG.
const notInstance = "not a MIG instance"

// State is proven where the container has the whole of an instance for itself.
func (f MIG) State(s Subject, gpu string) Status {
	i, ok := f.Instances.Instance(s.ID, gpu)
	if !ok {
		return Status{State: Absent, Why: notInstance}
	}
	limit := quota.Unlimited
	for _, level := range []map[string]quota.Limits{s.Grant.Pod, s.Grant.Container} {
		if l, ok := level[gpu]; ok {
			limit = min(limit, l.Max)
		}
	}
	switch {
	case i.Bytes == 0:
		return Status{State: Degraded, Why: cut(i.Why)}
	case limit < i.Bytes:
		return Status{State: Absent, Why: fmt.Sprintf("memory.max %s is below the instance's %s", quota.FormatBytes(limit), quota.FormatBytes(i.Bytes))}
	case len(i.Others) > 0:
		return Status{State: Degraded, Why: "the instance is shared with " + i.Others[0]}
	}
	return Status{State: Proven, Proof: fmt.Sprintf("NVML: a MIG instance of %s with %s, and nobody else has it", i.GPU, quota.FormatBytes(i.Bytes))}
}
