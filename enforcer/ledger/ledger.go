// SPDX-License-Identifier: Apache-2.0

package ledger

// Ledger is one pod's ledger, as gpufenced sees it.
type Ledger struct{}

// Snapshot reads and checks it. A broken one is [ErrBroken].
func (l *Ledger) Snapshot() (*Snapshot, error) { panic("soon") }

// LockFree says whether nobody holds a slot's lock: a live slot's owner is gone then (it
// exited, or exec closed its file).
func (l *Ledger) LockFree(slot int) (bool, error) { panic("soon") }

// MarkDying takes a live slot of that generation out of the reserves' sums.
func (l *Ledger) MarkDying(slot int, generation uint32) error { panic("soon") }

// Reclaim frees a slot of that generation. Unless the owner is known to have exited, its lock
// must be free ([ErrBusy]): a child that inherited the file by fork may keep the lock of a
// parent that is gone.
func (l *Ledger) Reclaim(slot int, generation uint32, exited bool) error { panic("soon") }

// ClearOverflow sets the overflow slot to 0 if nobody uses it, and says whether it did.
func (l *Ledger) ClearOverflow() (bool, error) { panic("soon") }

// Totals turns the event counters of slots, which come and go with processes, into counters of
// containers that only grow. It is saved as JSON and restored after a restart.
type Totals struct{}

// Observe folds a snapshot in; call it for each one, and once more right before a slot is
// reclaimed. container says whose a slot is, "" for nobody's.
func (t *Totals) Observe(s *Snapshot, container func(slot *Slot) string) {}

// Of is what a container's processes reported on one GPU of the pod so far.
func (t *Totals) Of(container string, gpu int) SlotEvents { return SlotEvents{} }

// Forget drops a container that has ended.
func (t *Totals) Forget(container string) {}
