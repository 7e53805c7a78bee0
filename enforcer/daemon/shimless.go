// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"fmt"

	"github.com/gpufence/gpufence/enforcer/api"
	"github.com/gpufence/gpufence/enforcer/policy"
)

// saidShimless reports once when a container turns out to have a GPU process that no shim sees, and
// again if that ends and comes back: from then on only the other fences hold it. The caller holds mu.
func (d *Daemon) saidShimless(g *gpuState, out *policy.Output) {
	for id, st := range out.Containers {
		absent := st.Shim.State == "absent" && len(st.Shim.PIDs) > 0
		if !absent {
			delete(g.shimless, id)
			continue
		}
		c := d.reg.ByID(id)
		if c == nil || g.shimless[id] {
			continue
		}
		if g.shimless == nil {
			g.shimless = map[policy.ContainerID]bool{}
		}
		g.shimless[id] = true
		d.event(about(c, api.Event{Type: "shim-absent", GPU: g.info.UUID, Numbers: map[string]uint64{"pid": uint64(st.Shim.PIDs[0]), "processes": uint64(len(st.Shim.PIDs))},
			Message: fmt.Sprintf("process %d of %s uses %s without the shim (%s): the other fences hold; policy shim-missing = %q",
				st.Shim.PIDs[0], c.Display(), g.info.UUID, st.Shim.Why, d.cfg.ShimMissing)}))
	}
	for id := range g.shimless {
		if _, ok := out.Containers[id]; !ok {
			delete(g.shimless, id)
		}
	}
}
