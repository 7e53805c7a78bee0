// SPDX-License-Identifier: Apache-2.0

package coverage

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/gpufence/gpufence/tests/node"
)

// pair is a process and the second one that it shares memory with, each with a context.
func pair(t *testing.T, charged bool) *run {
	t.Helper()
	p := passes[0]
	p.sim = append([]string{"--imports-charged=" + fmt.Sprint(charged)}, p.sim...)
	r := p.startWith(t, node.Spec{
		Name: "shared", Limits: []string{fmt.Sprintf("memory.max=%dMi", limit/mib)}, Shim: true, Program: []string{"/bin/sleep", "600"},
	})
	if err := r.fresh(); err != nil {
		t.Fatal(err)
	}
	ready, err := r.p.Do(t.Context(), "prepare cuMemExportToShareableHandle")
	if err != nil {
		t.Fatal(err)
	}
	r.others = int(ready.Allocs)
	return r
}

// settles waits until so much is charged, so much of it is excess, and the program sees the same.
func settles(ctx context.Context, r *run, current, excess uint64) error {
	var seen string
	err := node.Until(ctx, "the account settles", func() (bool, error) {
		v, err := r.c.View(ctx)
		if err != nil {
			return false, err
		}
		shown, differ, err := r.look(0)
		g := v.GPUs[0]
		seen = fmt.Sprintf("current %d MiB, excess %d MiB, the program sees %d MiB %s", g.Current/mib, g.Excess/mib, shown.used/mib, differ)
		return g.Current == current && g.Excess == excess && shown.used == current && differ == "", err
	})
	if err != nil {
		return fmt.Errorf("%w: %s", err, seen)
	}
	return nil
}

// TestHandedOff: a process exports memory and lets go of its own handle, while another keeps it. The
// owner's charge ends with its handle; NVML then shows the memory under whoever keeps it, and that is
// excess, with which the limit holds as before. It ends with the last handle.
func TestHandedOff(t *testing.T) {
	for _, charged := range []bool{false, true} {
		t.Run(fmt.Sprintf("imports charged %v", charged), func(t *testing.T) {
			t.Parallel()
			r := pair(t, charged)
			const handed = 192 * mib
			if _, err := r.p.Do(t.Context(), fmt.Sprintf("hand %d", handed/mib)); err != nil {
				t.Fatal(err)
			}
			if err := settles(t.Context(), r, 2*contextBytes+handed, handed); err != nil {
				t.Fatal(err)
			}
			filled, err := r.fill("cuMemAlloc_v2")
			if err != nil {
				t.Fatal(err)
			}
			now, most, err := r.held()
			if err != nil {
				t.Fatal(err)
			}
			if filled != limit-2*contextBytes-handed || now != limit || most > limit {
				t.Errorf("%d bytes were granted beside, the GPU has %d in use, %d at most", filled, now, most)
			}
			if _, err := r.p.Do(t.Context(), "give", "unshare"); err != nil {
				t.Fatal(err)
			}
			if err := settles(t.Context(), r, 2*contextBytes, 0); err != nil {
				t.Error(err)
			}
			if !r.p.Alive() {
				t.Error("it was killed")
			}
		})
	}
}

// fill takes by a row until it is refused.
func (r *run) fill(row string) (granted uint64, err error) {
	if _, err := r.p.Do(r.ctx, "begin "+row+" dlsym"); err != nil {
		return 0, err
	}
	filled, err := r.p.Ask(r.ctx, "fill")
	if err == nil && !filled.OK {
		err = errors.New(filled.Why)
	}
	return filled.GrantedBytes, err
}

// TestShared: memory that two processes of a container have is charged once, to its owner, also where NVML
// shows it under its importer too: the limit is what it is without sharing, and nobody is killed at it.
func TestShared(t *testing.T) {
	for _, charged := range []bool{false, true} {
		t.Run(fmt.Sprintf("imports charged %v", charged), func(t *testing.T) {
			t.Parallel()
			r := pair(t, charged)
			const shared = 192 * mib // much more than the slack
			if _, err := r.p.Do(t.Context(), fmt.Sprintf("share %d", shared/mib)); err != nil {
				t.Fatal(err)
			}
			time.Sleep(1500 * time.Millisecond) // longer than excess would take to show
			if err := settles(t.Context(), r, 2*contextBytes+shared, 0); err != nil {
				t.Fatal(err)
			}
			filled, err := r.fill("cuMemAlloc_v2")
			if err != nil {
				t.Fatal(err)
			}
			now, most, err := r.held()
			if err != nil {
				t.Fatal(err)
			}
			if filled != limit-2*contextBytes-shared || now != limit || most > limit {
				t.Errorf("%d bytes were granted beside, the GPU has %d in use, %d at most", filled, now, most)
			}
			if _, err := r.p.Do(t.Context(), "give", "unshare"); err != nil {
				t.Fatal(err)
			}
			if err := settles(t.Context(), r, 2*contextBytes, 0); err != nil {
				t.Error(err)
			}
			if !r.p.Alive() {
				t.Error("it was killed")
			}
		})
	}
}
