// SPDX-License-Identifier: Apache-2.0

package enforcer

import (
	"fmt"
	"testing"
	"time"

	"github.com/gpufence/gpufence/tests/node"
)

// TestSharedMemoryIsNotKilledFor: two processes share 320 MiB below a limit of 512, and NVML lists them
// under both. They hold 448 MiB, and live; so does a neighbour; and what goes beyond the limit is killed
// for as ever.
func TestSharedMemoryIsNotKilledFor(t *testing.T) {
	t.Parallel()
	forLags(t, func(t *testing.T, lag time.Duration) {
		const shared, there, listed = 320 * mib, 448 * mib, 768 * mib
		b := newBench(t, lag, withSim("--imports-charged=1", "--second-context", "100"))
		neighbour := b.churner("neighbour")
		sharer := b.run(node.Spec{Name: "sharer", Limits: []string{"memory.max=512Mi"}, Shim: true, Program: []string{"/bin/sleep", "600"}})
		owner, err := sharer.Exec(t.Context(), true, b.Dist("clients/coverage"))
		b.check(err)
		b.do(owner, "context", fmt.Sprintf("share %d", shared/mib))
		b.shown(sharer, listed)
		b.until("it counts once", func() bool { g := b.view(sharer).GPUs[0]; return g.Current == there && g.Excess == 0 })
		b.later()
		b.nobodyKilled(sharer, neighbour)
		if g := b.view(sharer).GPUs[0]; g.Current != there || g.NVML != listed || g.Shared != shared || g.Excess != 0 || g.Peak > 512*mib || g.Events.OverMax != 0 {
			t.Errorf("%+v", g)
		}
		if !owner.Alive() {
			t.Errorf("the owner ended with %s", owner.Status())
		}

		// gpufenced begins anew, with both there.
		b.check(b.Crash())
		b.check(b.StartDaemon(t.Context()))
		b.shown(sharer, listed)
		b.later()
		b.nobodyKilled(sharer, neighbour)

		// Beside it somebody goes round the shim.
		bypass, err := sharer.Exec(t.Context(), false)
		b.check(err)
		b.do(bypass, "context", "alloc 128")
		_, kill := b.killedBy(sharer)
		// The neighbour's takings between the two calls of an answer hide a part of the proof, and change nothing.
		if used := kill.Numbers["used_bytes"]; used != there+192*mib {
			t.Errorf("killed for %d bytes", used)
		}
		b.untouched(neighbour)
	})
}
