// SPDX-License-Identifier: Apache-2.0

package coverage

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"testing"

	"github.com/gpufence/gpufence/tests/node"
	"github.com/gpufence/gpufence/tests/simgpu/simtest"
)

// TestMix takes memory in every way that keeps some for later (pools, graphs) and in others, in
// random order, out of one thread and of several, at a limit that refuses a good part: the simulated
// GPU must never have seen more than the limit, and what is given back must be given back in the
// account too. GPUFENCE_MIX_SEED runs one seed.
func TestMix(t *testing.T) {
	t.Parallel()
	dist := filepath.Dir(filepath.Dir(simtest.Dist(t, "clients/mix")))
	n, err := node.New(t.Context(), node.Options{
		Dist:   dist,
		Sim:    []string{"--model", "t4", "--memory", "8GiB", "--context-bytes", "64MiB", "--nvml-lag", "0s"},
		Config: []string{fmt.Sprintf("context = \"%dMi\"", contextBytes/mib)},
	})
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := n.Close(t.Context()); err != nil {
			t.Error(err)
		}
	}()
	c, err := n.Start(t.Context(), node.Spec{
		Name: "mix", Limits: []string{fmt.Sprintf("memory.max=%dMi", limit/mib)}, Shim: true,
		Program: []string{"/bin/sleep", "600"},
	})
	if err != nil {
		t.Fatal(err)
	}
	state, err := n.Sim.State(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	seeds := []uint64{1, 2, 3, 4}
	if only := os.Getenv("GPUFENCE_MIX_SEED"); only != "" {
		seed, err := strconv.ParseUint(only, 10, 64)
		if err != nil {
			t.Fatal(err)
		}
		seeds = []uint64{seed}
	}
	for _, threads := range []int{1, 4} {
		for _, seed := range seeds {
			t.Run(fmt.Sprintf("%d threads, seed %d", threads, seed), func(t *testing.T) {
				r := &run{t: t, ctx: t.Context(), pass: passes[0], node: n, c: c, uuid: state.GPUs[0].UUID, client: "mix"}
				err := errors.Join(r.fresh(), mixed(r, seed, threads))
				if r.p != nil {
					err = errors.Join(err, r.p.Kill(), r.p.Await(t.Context()))
				}
				if err != nil {
					t.Error(err)
				}
			})
		}
	}
}

func mixed(r *run, seed uint64, threads int) error {
	base, _, err := r.held()
	if err != nil {
		return err
	}
	reply, err := r.p.Do(r.ctx, fmt.Sprintf("mix %d %d %d", seed, 4000/threads, threads))
	if err != nil {
		return err
	}
	after, most, err := r.held()
	if err != nil {
		return err
	}
	r.t.Logf("%d MiB granted, %d refused, %d MiB at most", reply.GrantedBytes/mib, reply.Refused, most/mib)
	if most > limit {
		err = errors.Join(err, fmt.Errorf("%d bytes above the limit were held", most-limit))
	}
	if reply.Refused == 0 || most < limit*3/4 {
		err = errors.Join(err, fmt.Errorf("nothing came near the limit: %d refused, %d MiB at most", reply.Refused, most/mib))
	}
	if after != base {
		err = errors.Join(err, fmt.Errorf("%d bytes are held in the end, %d before", after, base))
	}
	// gpufenced reads the account with its next sample.
	var charged uint64
	return errors.Join(err, node.Until(r.ctx, "only a context is charged", func() (bool, error) {
		v, err := r.c.View(r.ctx)
		if err != nil {
			return false, err
		}
		if v.GPUs[0].Ledger != charged {
			charged = v.GPUs[0].Ledger
			r.t.Logf("%d bytes are charged", charged)
		}
		return charged == contextBytes, nil
	}))
}
