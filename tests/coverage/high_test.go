// SPDX-License-Identifier: Apache-2.0

package coverage

import (
	"testing"
	"time"

	"github.com/gpufence/gpufence/tests/node"
)

// TestHigh: above memory.high a container is slowed and counted, and neither refused nor killed; at
// memory.max it is refused.
func TestHigh(t *testing.T) {
	t.Parallel()
	r := passes[0].startWith(t, node.Spec{Name: "slowed", Limits: []string{"memory.max=512Mi", "memory.high=256Mi"}, Shim: true})
	p := r.c.Main
	if _, err := p.Do(t.Context(), "context"); err != nil {
		t.Fatal(err)
	}
	// Up to high, contexts included, at full speed.
	if _, err := p.Do(t.Context(), "alloc 192"); err != nil {
		t.Fatal(err)
	}
	began := time.Now()
	filled, err := p.Do(t.Context(), "alloc 32", "alloc 32", "alloc 32")
	took := time.Since(began)
	if err != nil || !filled.OK {
		t.Fatalf("refused below memory.max: %+v, %v", filled, err)
	}
	// 12.5, 25 and 37.5 % above: 15.6 + 62.5 + 140.6 ms.
	if took < 218*time.Millisecond {
		t.Errorf("three allocations above memory.high took %s", took)
	}
	err = node.Until(t.Context(), "it is counted", func() (bool, error) {
		v, err := r.c.View(t.Context())
		if err != nil {
			return false, err
		}
		g := v.GPUs[0]
		return g.Events.High == 3 && g.ThrottledNS >= uint64(200*time.Millisecond) && g.Events.Max == 0 && g.Events.OOM == 0, nil
	})
	if err != nil {
		t.Error(err)
	}
	if v, err := r.c.View(t.Context()); err != nil || v.GPUs[0].Limits.High != 256*mib {
		t.Errorf("it is shown as %+v, %v", v.GPUs, err)
	}
	refused, err := p.Ask(t.Context(), "alloc 256")
	if err != nil || refused.OK {
		t.Errorf("above memory.max: %+v, %v", refused, err)
	}
	if !p.Alive() {
		t.Error("it was killed")
	}
	// Below it again, at full speed.
	if _, err := p.Do(t.Context(), "free 0", "alloc 64"); err != nil {
		t.Error(err)
	}
	if v, err := r.c.View(t.Context()); err != nil || v.GPUs[0].Events.High != 3 {
		t.Errorf("slowed below memory.high: %+v, %v", v.GPUs, err)
	}
}
