// SPDX-License-Identifier: Apache-2.0

package ledger

import (
	"encoding/json"
	"fmt"
	"maps"
	"math"
)

// Totals turns the event counters of slots, which come and go with processes, into counters of
// containers that only grow, saturating. It is saved as JSON and restored after a restart: what was
// counted meanwhile is then added, nothing is counted twice. The zero value is ready.
type Totals struct {
	seen   map[slotGPUKey]seenEvents
	totals map[string]map[int]SlotEvents
}

type slotGPUKey struct{ slot, gpu int }

type seenEvents struct {
	Generation uint32     `json:"generation"`
	Events     SlotEvents `json:"events"`
}

// Observe folds a snapshot in; call it for each one, and once more right before a slot is
// reclaimed. container says whose a slot is, "" for nobody's: its events wait until it is known.
// It says whether there was anything new: what is to be shown must be saved before.
func (t *Totals) Observe(s *Snapshot, container func(slot *Slot) string) bool {
	changed := false
	for i := range s.Slots {
		changed = t.fold(&s.Slots[i], container(&s.Slots[i])) || changed
	}
	return t.fold(&s.Overflow, container(&s.Overflow)) || changed
}

func (t *Totals) fold(s *Slot, container string) (changed bool) {
	if container == "" {
		return false
	}
	for gpu := range s.GPU {
		now := s.GPU[gpu].Events
		key := slotGPUKey{s.Index, gpu}
		last, ok := t.seen[key]
		if !ok && now == (SlotEvents{}) {
			continue
		}
		same := !ok || last.Generation == s.Generation
		add := SlotEvents{
			Max:    delta(last.Events.Max, now.Max, same),
			Device: delta(last.Events.Device, now.Device, same),
			High:   delta(last.Events.High, now.High, same),

			ThrottledMS: delta(last.Events.ThrottledMS, now.ThrottledMS, same),
		}
		if t.seen == nil {
			t.seen = map[slotGPUKey]seenEvents{}
			t.totals = map[string]map[int]SlotEvents{}
		}
		if same {
			// Within a generation a counter that fell is a lie; the greatest seen stays.
			now = SlotEvents{
				max(now.Max, last.Events.Max), max(now.Device, last.Events.Device), max(now.High, last.Events.High),
				max(now.ThrottledMS, last.Events.ThrottledMS),
			}
		}
		changed = changed || add != (SlotEvents{})
		t.seen[key] = seenEvents{s.Generation, now}
		if t.totals[container] == nil {
			t.totals[container] = map[int]SlotEvents{}
		}
		sum := t.totals[container][gpu]
		t.totals[container][gpu] = SlotEvents{
			saturate(sum.Max, add.Max), saturate(sum.Device, add.Device), saturate(sum.High, add.High),
			saturate(sum.ThrottledMS, add.ThrottledMS),
		}
	}
	return changed
}

// delta is how far a counter went. Neither reclaim nor a claim resets a slot's events, so they go on
// over generations; one that fell with a new generation began at 0 again.
func delta(last, now uint64, same bool) uint64 {
	if now >= last {
		return now - last
	}
	if same {
		return 0
	}
	return now
}

func saturate(a, b uint64) uint64 {
	if a > math.MaxUint64-b {
		return math.MaxUint64
	}
	return a + b
}

// Of is what a container's processes reported on one GPU of the pod so far.
func (t *Totals) Of(container string, gpu int) SlotEvents { return t.totals[container][gpu] }

// Forget drops a container that has ended.
func (t *Totals) Forget(container string) { delete(t.totals, container) }

type totalsJSON struct {
	Seen   []seenJSON                    `json:"seen,omitempty"`
	Totals map[string]map[int]SlotEvents `json:"totals,omitempty"`
}

type seenJSON struct {
	Slot int `json:"slot"`
	GPU  int `json:"gpu"`
	seenEvents
}

// MarshalJSON makes it part of saved state, also as a plain field.
func (t Totals) MarshalJSON() ([]byte, error) {
	out := totalsJSON{Totals: t.totals}
	for k, v := range t.seen {
		out.Seen = append(out.Seen, seenJSON{k.slot, k.gpu, v})
	}
	return json.Marshal(out)
}

// UnmarshalJSON puts saved state back.
func (t *Totals) UnmarshalJSON(b []byte) error {
	var in totalsJSON
	if err := json.Unmarshal(b, &in); err != nil {
		return fmt.Errorf("read event totals: %w", err)
	}
	*t = Totals{seen: map[slotGPUKey]seenEvents{}, totals: map[string]map[int]SlotEvents{}}
	for _, s := range in.Seen {
		t.seen[slotGPUKey{s.Slot, s.GPU}] = s.seenEvents
	}
	maps.Copy(t.totals, in.Totals)
	return nil
}
