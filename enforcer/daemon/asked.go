// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"time"

	"github.com/gpufence/gpufence/enforcer/ledger"
)

// asked is how often a pod's shims have asked for slots of dead processes back.
type asked struct {
	known  bool
	count  uint64
	hurry  time.Duration // when it was last followed
	served uint64        // how often, for tests
}

// asksBack follows a pod's shims that were refused and ask for the slots of dead processes back: owners
// are looked for in this pass, however long ago the last look was, and the next sample comes at once,
// since a slot goes back on NVML's word, or on a second look. Whoever asks all the time gets what a
// container that grows fast gets, no more. The caller holds mu.
func (d *Daemon) asksBack(rt *podRuntime, s *ledger.Snapshot) {
	a := &rt.asked
	news := a.known && s.ReclaimRequest != a.count
	a.known, a.count = true, s.ReclaimRequest
	now := d.mono()
	if !news || a.hurry != 0 && now-a.hurry < max(d.cfg.Sample/4, d.cfg.KillInterval) {
		return
	}
	a.hurry = now
	a.served++
	rt.nextScan = 0
	time.AfterFunc(d.cfg.KillInterval, d.poke)
}
