// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"errors"
	"fmt"

	"github.com/gpufence/gpufence/enforcer/api"
	"github.com/gpufence/gpufence/enforcer/fence"
	"github.com/gpufence/gpufence/enforcer/policy"
	"github.com/gpufence/gpufence/enforcer/quota"
)

// unattributedLimit is how much memory that no process explains is worth an event: drivers keep
// some for themselves, and what the lists and the device say is never of one moment.
const unattributedLimit = 256 << 20

// saidForeign reports, once each, processes that did not come through gpufence, and memory that no
// process explains. The caller holds mu.
func (d *Daemon) saidForeign(g *gpuState, out *policy.Output) {
	uuid := g.info.UUID
	seen := map[procID]bool{}
	for _, p := range out.Unmanaged {
		id := procID{p.PID, p.Start}
		seen[id] = true
		if g.foreign[id] || d.cfg.Unmanaged == "allow" {
			continue
		}
		g.foreign[id] = true
		d.event(api.Event{Type: "unmanaged", Code: string(quota.CodeUnmanaged), GPU: uuid,
			Message: fmt.Sprintf("process %d (%s) uses %s of %s and did not come through gpufence; policy unmanaged = %q", p.PID, p.Comm, quota.HumanBytes(p.NVMLBytes), uuid, d.cfg.Unmanaged),
			Numbers: map[string]uint64{"pid": uint64(p.PID), "bytes": p.NVMLBytes}})
	}
	for id := range g.foreign {
		if !seen[id] && out.Known {
			delete(g.foreign, id)
		}
	}
	if out.UnattributedBytes <= unattributedLimit || g.unexplained == 0 {
		g.unexplained = g.outAt
	}
	switch {
	case !out.Known:
	case !g.unattributed && out.UnattributedBytes > unattributedLimit && g.outAt-g.unexplained >= 2*d.cfg.Settle:
		g.unattributed = true
		d.event(api.Event{Type: "unattributed", GPU: uuid, Message: fmt.Sprintf("%s of %s are in use, but by no process that NVML lists: counted in admission, nobody is killed for it",
			quota.HumanBytes(out.UnattributedBytes), uuid), Numbers: map[string]uint64{"bytes": out.UnattributedBytes}})
	case g.unattributed && out.UnattributedBytes <= unattributedLimit/2:
		g.unattributed = false
		d.event(api.Event{Type: "unattributed-gone", GPU: uuid, Message: fmt.Sprintf("what is in use on %s is explained again", uuid)})
	}
}

// denyUnmanaged hands policy unmanaged = "deny" to the fences that can keep a process from the GPUs,
// and says so where none can: what is left of it is that no guarantee is granted beside such use. The
// caller holds mu, or is New.
func (d *Daemon) denyUnmanaged() {
	deny := d.cfg.Unmanaged == "deny" && d.cfg.Policy.Mode == quota.ModeEnforce && !d.disabled()
	var exempt []string
	for _, e := range d.cfg.UnmanagedExempt {
		exempt = append(exempt, e.String())
	}
	var errs []error
	able := false
	for _, f := range d.fences {
		if denier, ok := f.(fence.Denier); ok {
			err := denier.DenyUnmanaged(deny, exempt)
			if errors.Is(err, fence.ErrCannotDeny) {
				continue // another may be able
			}
			able = true
			errs = append(errs, err)
		}
	}
	if deny && !able {
		errs = append(errs, quota.NewError(quota.CodePolicyUnbuilt,
			"unmanaged = \"deny\" grants no guarantee beside a process that did not come through gpufence, but cannot keep it from the GPUs: that takes the gate, which this node does not have").
			WithHint("use kill to end such processes"))
	}
	d.once("unmanaged", errors.Join(errs...))
}

// unmanagedDenied refuses a guarantee on a GPU that a process holds which did not come through
// gpufence, where policy says so: it could not be kept.
func (d *Daemon) unmanagedDenied(g *gpuState, want uint64) error {
	if want == 0 || d.cfg.Unmanaged != "deny" && d.cfg.Unmanaged != "kill" || len(g.out.Unmanaged) == 0 {
		return nil
	}
	p := g.out.Unmanaged[0]
	return quota.NewError(quota.CodeUnmanaged, "process %d (%.40s) uses %s of GPU %s and did not come through gpufence, and policy unmanaged = %q grants no guarantee beside it",
		p.PID, p.Comm, quota.HumanBytes(p.NVMLBytes), g.info.UUID, d.cfg.Unmanaged).
		WithHint("end it, run it through gpufence-runtime, or name it in unmanaged-exempt")
}
