// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"context"
	"strings"
	"testing"

	"github.com/gpufence/gpufence/enforcer/api"
	"github.com/gpufence/gpufence/enforcer/config"
	"github.com/gpufence/gpufence/enforcer/gpu"
	"github.com/gpufence/gpufence/enforcer/quota"
)

const (
	mig0 = "MIG-22222222-2222-2222-2222-222222222222"
	mig1 = "MIG-33333333-3333-3333-3333-333333333333"
)

// splitGPU is GPU 1 in MIG mode, with instances.
func splitGPU(instances ...string) []*fakeGPU {
	split := newFakeGPU(1, uuid1)
	split.info.MIG = true
	out := []*fakeGPU{split}
	for i, uuid := range instances {
		g := newFakeGPU(1, uuid)
		g.info.Parent, g.info.Instance = uuid1, i
		out = append(out, g)
	}
	return out
}

// An instance is a GPU of its own: by its UUID, by its position, by "any", with limits of its own
// size. The GPU that is split is refused, with their names.
func TestInstances(t *testing.T) {
	b := newBench(t, func(c *config.Config) {
		for e, a := range c.Policy.Accept {
			a.GPU = true
			c.Policy.Accept[e] = a
		}
	})
	b.nvml.gpus = append(b.nvml.gpus, splitGPU(mig0, mig1)...)
	b.start()
	ask := func(id, selector string, annotations ...string) api.PrepareRequest {
		req := request(id, annotations...)
		req.Devices = api.DeviceRequest{Selectors: []string{selector}, Present: true}
		return req
	}
	for selector, want := range map[string]string{mig0: mig0, "1:1": mig1, "nvidia.com/gpu=1:0": mig0, "/dev/simgpu/gpu1.mig1": mig1} {
		resp := b.prepare(ask("of-"+strings.Trim(strings.ReplaceAll(selector, "/", "-"), "-"), selector, "memory.max=25%"))
		if len(resp.Grant.GPUs) != 1 || resp.Grant.GPUs[0].UUID != want {
			t.Fatalf("%s: %+v", selector, resp.Grant)
		}
		if g := resp.Grant.GPUs[0]; resp.Grant.Pod[want].Max > g.AllocatableBytes/4 || resp.Grant.Pod[want].Max == 0 || g.TotalBytes != 16*gib {
			t.Errorf("%s: %+v", selector, resp.Grant)
		}
	}
	for _, selector := range []string{uuid1, "1", "/dev/nvidia1"} {
		_, err := b.d.Prepare(context.Background(), ask("whole", selector, "memory.max=1Gi"))
		wantCode(t, err, quota.CodeNotEnforced)
		if text := err.Error(); !strings.Contains(text, mig0+" (1:0), "+mig1+" (1:1)") || !strings.Contains(text, uuid1) {
			t.Errorf("%s: %v", selector, err)
		}
	}
	if resp := b.prepare(ask("all", "all", "memory.max=1Gi")); len(resp.Grant.GPUs) != 3 {
		t.Errorf("all: %+v", resp.Grant.GPUs)
	}
	chosen := ask("chosen", "", "gpu="+mig1, "memory.max=1Gi")
	chosen.Devices.Selectors = nil
	if resp := b.prepare(chosen); len(resp.Grant.GPUs) != 1 || resp.Grant.GPUs[0].UUID != mig1 {
		t.Errorf("by annotation: %+v", resp.Grant.GPUs)
	}
	placed := ask("placed", "", "gpu=3", "memory.max=1Gi")
	placed.Devices.Selectors = nil
	if resp := b.prepare(placed); len(resp.Grant.GPUs) != 3 {
		t.Errorf("placed: %+v", resp.Grant.GPUs)
	}

	// The limit is the instance's; what the other holds does not matter.
	p := b.run(ask("runs", mig0, "memory.max=1Gi"))
	b.nvml.gpus[3].set(p.pid, 8*gib)
	b.nvml.gpus[2].set(p.pid, gib)
	b.eventually("its use is seen", func() bool { return b.view("runs").GPUs[0].NVML == gib })
	b.samples(3)
	if !p.alive() {
		t.Fatal("it was killed for what is on another instance")
	}
	b.nvml.gpus[2].set(p.pid, 3*gib)
	b.eventually("it is killed", func() bool { return !p.alive() })
	if n := b.nvml.gpus[1].count(); n != 0 {
		t.Errorf("the GPU that is split was sampled %d times", n)
	}
}

func TestNoInstances(t *testing.T) {
	b := newBench(t)
	b.nvml.gpus = append(b.nvml.gpus, splitGPU()...)
	b.start()
	req := request("whole", "memory.max=1Gi")
	req.Devices.Selectors = []string{"1"}
	_, err := b.d.Prepare(context.Background(), req)
	wantCode(t, err, quota.CodeNotEnforced)
	if !strings.Contains(err.Error(), "has no instance") || !strings.Contains(err.Error(), "gpufence resume") {
		t.Error(err)
	}
}

// A node whose only GPU is split into nothing has no GPU yet.
func TestNothingButMIGMode(t *testing.T) {
	lib := &fakeNVML{gpus: splitGPU()}
	d := &Daemon{lib: lib, gpus: map[string]*gpuState{}}
	if err := d.findGPUs(context.Background()); err == nil || !strings.Contains(err.Error(), "MIG mode") || lib.downs != 1 {
		t.Errorf("%v, %d times shut down", err, lib.downs)
	}
	var _ gpu.Library = lib
}
