// SPDX-License-Identifier: Apache-2.0

package enforcer

import (
	"testing"

	"github.com/gpufence/gpufence/tests/node"
)

// TestInstances: on each MIG instance its own containers are held to their limits, with the shim and
// without, and the neighbour on the other instance notices nothing.
func TestInstances(t *testing.T) {
	t.Parallel()
	b := newBench(t, 0, withSim("--mig", "2"))
	st, err := b.Sim.State(t.Context())
	b.check(err)
	first, second := st.GPUs[1], st.GPUs[2]

	_, err = b.Client.Prepare(t.Context(), b.Request(node.Spec{Name: "whole", Limits: []string{"memory.max=1Gi"}, GPUs: []string{"0"}}))
	if err == nil {
		t.Fatal("a GPU in MIG mode was granted as a whole")
	}
	contains(t, err.Error(), "E1305", "MIG mode", first.UUID+" (0:0)", second.UUID+" (0:1)")

	neighbour := b.run(node.Spec{
		Name: "neighbour", Limits: []string{"memory.max=1Gi"}, Shim: true,
		GPUs: []string{second.UUID}, Env: []string{"CUDA_VISIBLE_DEVICES=" + second.UUID},
	})
	b.check(neighbour.Main.Say("churn 64 14 2"))

	// With the shim: it sees its half of the instance, and is refused what is beyond.
	env := []string{"CUDA_VISIBLE_DEVICES=" + first.UUID}
	held := b.run(node.Spec{Name: "held", Limits: []string{"memory.max=50%"}, Shim: true, GPUs: []string{"0:0"}, Env: env})
	g := b.view(held).GPUs[0]
	if g.UUID != first.UUID || g.Limits.Max < 3*gib || g.Limits.Max > 4*gib {
		t.Errorf("half of an instance of 8 GiB: %+v", g)
	}
	if r := b.do(held.Main, "meminfo"); r.TotalBytes != g.Limits.Max {
		t.Errorf("it sees %d bytes, its limit is %d", r.TotalBytes, g.Limits.Max)
	}
	if r, err := held.Main.Ask(t.Context(), "alloc 4096"); err != nil || r.OK || r.ResultName != "CUDA_ERROR_OUT_OF_MEMORY" {
		t.Errorf("4 GiB were granted: %+v, %v", r, err)
	}
	b.do(held.Main, "alloc 1024")
	b.shown(held, 1024*mib)

	// Without: it is killed.
	victim := b.run(node.Spec{Name: "victim", Limits: []string{"memory.max=1Gi"}, GPUs: []string{first.UUID}, Env: env})
	b.nobodyKilled(neighbour, held, victim)
	b.do(victim.Main, "alloc 2048")
	b.killedBy(victim)
	if !held.Main.Alive() {
		t.Error("the other container on the instance was killed")
	}
	b.untouched(neighbour)
}
