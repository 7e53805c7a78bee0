// SPDX-License-Identifier: Apache-2.0

package coverage

import (
	"fmt"
	"testing"

	"github.com/gpufence/gpufence/enforcer/api"
	"github.com/gpufence/gpufence/tests/node"
)

// TestSwap: above memory.max, memory.swap.max lets so much more stay on the host, and no more; it
// comes to the GPU only as far as the limit allows.
func TestSwap(t *testing.T) {
	for _, row := range []string{"cuMemAllocManaged", "cuMemAlloc_v2"} {
		for _, way := range []string{"prefetch", "prefetch_v2", "prefetch_batch", "discard_and_prefetch", "advise", "advise_v2", "read_mostly"} {
			t.Run(row+"/"+way, func(t *testing.T) {
				t.Parallel()
				swap(t, row, way)
			})
		}
	}
}

func swap(t *testing.T, row, way string) {
	const swapMax = 192 * mib
	p := passes[0]
	p.sim = append([]string{"--managed-touch=1"}, p.sim...)
	r := p.startWith(t, node.Spec{
		Name: "spilling", Shim: true, Program: []string{"/bin/sleep", "600"},
		Limits: []string{fmt.Sprintf("memory.max=%dMi", limit/mib), fmt.Sprintf("memory.swap.max=%dMi", swapMax/mib)},
	})
	if err := r.fresh(); err != nil {
		t.Fatal(err)
	}
	sees := func(what string, charged, swapped, events uint64) {
		t.Helper()
		var g api.ContainerGPU
		err := node.Until(t.Context(), what, func() (bool, error) {
			v, err := r.c.View(t.Context())
			if err != nil {
				return false, err
			}
			g = v.GPUs[0]
			return g.Ledger+g.Managed == charged && g.Swap == swapped && g.Events.Max == events, nil
		})
		if err != nil {
			t.Fatalf("%v: %d + %d charged, %d spilled, %d refused", err, g.Ledger, g.Managed, g.Swap, g.Events.Max)
		}
		if _, most, err := r.held(); err != nil || most > limit {
			t.Fatalf("%s: %d bytes were on the GPU, %v", what, most, err)
		}
	}
	if _, err := r.p.Do(t.Context(), "begin "+row+" dlsym"); err != nil {
		t.Fatal(err)
	}
	filled, err := r.p.Do(t.Context(), "fill")
	if err != nil || filled.GrantedBytes != limit-contextBytes+swapMax {
		t.Fatalf("it got %d MiB, %v", filled.GrantedBytes/mib, err)
	}
	refusals := uint64(6) // one for each size that did not fit
	sees("both are full", limit, swapMax, refusals)
	v, differ, err := r.look(0)
	if err != nil || differ != "" || v.free != 0 {
		t.Errorf("it sees %+v, %s, %v", v, differ, err)
	}
	// There is no room: the wish is granted, and nothing moves.
	if _, err := r.p.Do(t.Context(), "prefetch "+way); err != nil {
		t.Fatal(err)
	}
	sees("nothing has moved", limit, swapMax, refusals)
	// There is: what comes is charged, and may then be drawn in.
	if _, err := r.p.Do(t.Context(), "drop", "prefetch "+way); err != nil {
		t.Fatal(err)
	}
	last := 64 * mib // the last piece's size, and the first one's
	sees("the last piece has come", limit-64*mib+last, swapMax-last, refusals)
	if _, err := r.p.Do(t.Context(), "give"); err != nil {
		t.Fatal(err)
	}
	sees("everything is gone", contextBytes, 0, refusals)
	if now, _, err := r.held(); err != nil || now != contextBytes {
		t.Errorf("%d bytes are still on the GPU, %v", now, err)
	}
	if !r.p.Alive() {
		t.Error("it was killed")
	}
}
