// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"testing"

	specs "github.com/opencontainers/runtime-spec/specs-go"
	"tags.cncf.io/container-device-interface/pkg/cdi"

	"github.com/gpufence/gpufence/tests/node"
)

// TestInstancesByNodes: what an engine has put into the spec from a CDI specification as NVIDIA's are,
// the GPU's node and those of /dev/nvidia-caps, says which MIG instance a container has; it is held to its limit
// there, and another container on the other instance to its own.
func TestInstancesByNodes(t *testing.T) {
	capabilities := t.TempDir()
	p := newPods(t, node.Options{
		Sim:  []string{"--gpus", "2", "--model", "t4", "--memory", "16GiB", "--context-bytes", "16MiB", "--mig", "0,2", "--pid-view", "caller"},
		Args: []string{"--mig-capabilities", capabilities},
	})
	simgpu := func(args ...string) {
		p.command("simgpu", p.Dist("bin/simgpu"), append([]string{"--dir", p.Path("sim")}, args...)...)
	}
	engine := t.TempDir()
	simgpu("capabilities", "--out", capabilities)
	simgpu("cdi", "--nodes", "--lib-dir", p.Dist("simgpu"), "--out", engine+"/simgpu.json")
	cache, err := cdi.NewCache(cdi.WithSpecDirs(engine), cdi.WithAutoRefresh(false))
	if err != nil {
		t.Fatal(err)
	}
	st, err := p.Sim.State(t.Context())
	if err != nil || len(st.GPUs) != 4 {
		t.Fatalf("%+v, %v", st, err)
	}
	for i, name := range []string{"1:0", "1:1", "0"} {
		uuid := map[string]string{"1:0": st.GPUs[2].UUID, "1:1": st.GPUs[3].UUID, "0": st.GPUs[0].UUID}[name]
		limit := uint64(i+1) * 512 * mib
		id := "on-" + uuid[:12]
		in := p.runWith(id, map[uint64]string{512 * mib: "512Mi", 1024 * mib: "1Gi", 1536 * mib: "1536Mi"}[limit], func(spec *specs.Spec) {
			if _, err := cache.InjectDevices(spec, "gpufence.dev/simgpu="+name); err != nil {
				t.Fatal(err)
			}
			caps := 0
			for _, d := range spec.Linux.Devices {
				if d.Major == 237 {
					caps++
				}
			}
			if want := map[bool]int{true: 2, false: 0}[name != "0"]; caps != want || len(spec.Linux.Devices) != want+1 {
				t.Fatalf("the engine gives %+v", spec.Linux.Devices)
			}
		})
		in.ask("context")
		in.ask("alloc 100")
		var last error
		if err := node.Until(t.Context(), "the views agree", func() (bool, error) {
			last = p.compare(id, uuid, limit, 100*mib, in, []*inside{in})
			return last == nil, nil
		}); err != nil {
			t.Errorf("%s: %v: %v", name, err, last)
		}
	}
}
