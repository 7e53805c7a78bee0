// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"context"
	"os"
	"path/filepath"
	"slices"
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
	if !strings.Contains(err.Error(), "has no instance") || !strings.Contains(err.Error(), "seen within seconds") {
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

// caps writes the driver's folder of capabilities: of GPU 1, instance 3 with compute instance 0.
func caps(t *testing.T) string {
	t.Helper()
	dir := t.TempDir()
	for path, minor := range map[string]string{
		"mig/config": "1", "gpu1/mig/gi3/access": "12", "gpu1/mig/gi3/ci0/access": "13", "gpu1/mig/gi4/access": "21", "gpu1/mig/gi4/ci0/access": "22",
		"gpu1/mig/gi5/access": "30", "gpu1/mig/gi5/ci0/access": "31",
	} {
		path = filepath.Join(dir, path)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte("DeviceFileMinor: "+minor+"\nDeviceFileMode: 292\n"), 0o444); err != nil {
			t.Fatal(err)
		}
	}
	return dir
}

// splitWithIDs are instances with the ids of NVML.
func splitWithIDs() []*fakeGPU {
	gpus := splitGPU(mig0, mig1)
	gpus[1].info.GI, gpus[2].info.GI = 3, 4
	return gpus
}

// What containerd or CDI has put into the spec, the nodes of the GPU and of the capabilities, names
// the instance.
func TestCapabilitiesNameInstances(t *testing.T) {
	b := newBench(t)
	b.nvml.gpus = append(b.nvml.gpus, splitWithIDs()...)
	b.start()
	b.eventually("NVML has answered", func() bool { gpus, err := b.d.GPUs(context.Background()); return err == nil && len(gpus) == 3 })
	b.d.mu.Lock()
	b.d.capabilities = caps(t)
	b.d.mu.Unlock()
	node := func(n string) string { return "/dev/nvidia-caps/nvidia-cap" + n }
	for _, tt := range []struct {
		selectors []string
		want      []string
		code      quota.Code
	}{
		{[]string{"/dev/nvidia1", node("12"), node("13")}, []string{mig0}, ""},
		{[]string{"/dev/nvidia1", node("21"), node("22"), node("12"), node("13")}, []string{mig1, mig0}, ""},
		{[]string{"/dev/nvidia0", "/dev/nvidia1", node("21"), node("22")}, []string{uuid0, mig1}, ""},
		{[]string{"/dev/nvidia0", node("1")}, []string{uuid0}, ""},         // MIG's configuration is no instance
		{[]string{"/dev/nvidia1", node("12")}, nil, quota.CodeNotEnforced}, // no compute instance
		{[]string{"/dev/nvidia1"}, nil, quota.CodeNotEnforced},             // none at all
		{[]string{"/dev/nvidia1", node("31")}, nil, quota.CodeGPUUnknown},  // made, and not seen by NVML
		{[]string{"/dev/nvidia1", node("99")}, nil, quota.CodeNotEnforced}, // of nobody
	} {
		req := request("x", "memory.max=1Gi")
		req.Devices = api.DeviceRequest{Selectors: tt.selectors, Present: true}
		b.d.mu.Lock()
		grant, _, _, err := b.d.resolve(req, b.d.cfg.Policy.For("default"))
		b.d.mu.Unlock()
		var got []string
		for _, g := range grant.GPUs {
			got = append(got, g.UUID)
		}
		if tt.code != "" {
			wantCode(t, err, tt.code)
		} else if err != nil || !slices.Equal(got, tt.want) {
			t.Errorf("%v: %v, %v", tt.selectors, got, err)
		}
	}
}

// A whole instance is a hard limit, as long as nobody else has it; below its size other fences work.
func TestInstanceIsHard(t *testing.T) {
	b := newBench(t)
	b.nvml.gpus = append(b.nvml.gpus, splitWithIDs()...)
	b.start()
	on := func(id, uuid string, annotations ...string) api.PrepareRequest {
		req := request(id, annotations...)
		req.Devices = api.DeviceRequest{Selectors: []string{uuid}, Present: true}
		return req
	}
	level := func(id string, want quota.Level, state, say string) {
		t.Helper()
		v := b.view(id)
		i := slices.IndexFunc(v.Fences, func(f api.Fence) bool { return f.Name == "mig" })
		if state == "" && i < 0 && v.Level == want {
			return
		}
		if v.Level != want || i < 0 || v.Fences[i].State != state || !strings.Contains(v.Fences[i].Why+v.Fences[i].Proof, say) {
			t.Errorf("%s: level %s, %+v", id, v.Level, v.Fences)
		}
	}
	b.run(on("whole", mig0, "memory.max=16Gi", "memory.min=1Gi"))
	level("whole", quota.LevelHard, "proven", "16Gi")
	b.run(on("part", mig1, "memory.max=4Gi"))
	level("part", quota.LevelReactive, "absent", "below the instance's 16Gi")
	b.run(on("gpu", "0", "memory.max=16Gi"))
	level("gpu", quota.LevelReactive, "", "")
	// A smaller limit is not the hardware's, the whole again is.
	if _, err := b.set("whole", "8Gi", func(r *api.SetRequest) { r.Wait = true }); err != nil {
		t.Fatal(err)
	}
	level("whole", quota.LevelReactive, "absent", "memory.max 8Gi")
	if _, err := b.set("whole", "16Gi", func(r *api.SetRequest) { r.Wait = true }); err != nil {
		t.Fatal(err)
	}
	level("whole", quota.LevelHard, "proven", "16Gi")
	other := b.run(on("other", mig0, "memory.max=1Gi"))
	level("whole", quota.LevelReactive, "degraded", "shared with")
	b.finish(other)
	b.eventually("the other has ended", func() bool { return b.view("other").State == "ended" })
	level("whole", quota.LevelHard, "proven", "16Gi")
}

// What requires hard starts where a hard fence carries its whole limit, and elsewhere is refused with
// what is missing; require in the configuration is as good as in the pod.
func TestRequireHard(t *testing.T) {
	for _, byNode := range []bool{false, true} {
		b := newBench(t, func(c *config.Config) {
			if byNode {
				c.Policy.Require = quota.LevelHard
			}
		})
		b.nvml.gpus = append(b.nvml.gpus, splitWithIDs()...)
		b.start()
		start := func(id, uuid string, annotations ...string) error {
			req := request(id, annotations...)
			if !byNode {
				req.Annotations["gpufence.dev/require"] = "hard"
			}
			req.Devices = api.DeviceRequest{Selectors: strings.Split(uuid, " "), Present: true}
			b.prepare(req)
			_, err := b.d.Register(context.Background(), api.RegisterRequest{Key: req.Key, PID: b.container().pid})
			return err
		}
		for _, tt := range []struct{ id, gpu, max, say string }{
			{"gpu", "0", "16Gi", "fences reach reactive for it (driver: driver 570.00 has no memory limits (they need R615); mig: not a MIG instance"},
			{"part", mig1, "4Gi", "; mig: memory.max 4Gi is below the instance's 16Gi)"},
			{"both", mig0 + " 0", "16Gi", "; mig: not a MIG instance"},
		} {
			err := start(tt.id, tt.gpu, "memory.max="+tt.max, "memory.min=1Gi")
			wantCode(t, err, quota.CodeLevelNotReached)
			if err == nil || !strings.Contains(err.Error(), tt.say) || !strings.Contains(err.Error(), "requires level hard") {
				t.Errorf("%s: %v", tt.id, err)
			}
		}
		// The ones that were refused are prepared and hold nothing of an instance for long.
		b.d.mu.Lock()
		for _, c := range b.d.reg.Containers() {
			b.d.end(c)
		}
		b.d.mu.Unlock()
		if err := start("whole", mig0, "memory.max=16Gi", "memory.min=1Gi"); err != nil {
			t.Fatal(err)
		}
		if v := b.view("whole"); v.Level != quota.LevelHard || v.Require != quota.LevelHard {
			t.Errorf("level %s, required %s", v.Level, v.Require)
		}
		err := start("second", mig0, "memory.max=16Gi", "memory.min=1Gi")
		wantCode(t, err, quota.CodeLevelNotReached)
		if err == nil || !strings.Contains(err.Error(), "the instance is shared with ") {
			t.Error(err)
		}
	}
}

// MIG mode switched at run time: what was granted on the GPU is degraded and said, nothing starts
// there, its instances are found; and back.
func TestMIGSwitchedAtRunTime(t *testing.T) {
	b := newBench(t)
	second := newFakeGPU(1, uuid1)
	whole := append(slices.Clone(b.nvml.gpus), second)
	b.nvml.gpus = whole
	b.start()
	req := request("a", "memory.max=4Gi")
	req.Devices = api.DeviceRequest{Selectors: []string{uuid1}, Present: true}
	p := b.run(req)
	change := func(gpus []*fakeGPU) {
		b.nvml.mu.Lock()
		defer b.nvml.mu.Unlock()
		b.nvml.gpus = gpus
	}
	change(append(slices.Clone(whole[:1]), splitWithIDs()...))
	b.eventually("it is said", func() bool { return len(b.events("gpu-gone")) == 1 && len(b.events("degraded")) == 1 })
	v := b.view("a")
	i := slices.IndexFunc(v.Fences, func(f api.Fence) bool { return f.Name == "watch" })
	if v.Level == quota.LevelReactive || v.Fences[i].State != "degraded" || !strings.Contains(v.Fences[i].Why, "MIG mode") || v.GPUs[0].Known {
		t.Errorf("%s %+v %+v", v.Level, v.Fences, v.GPUs[0])
	}
	again := request("b", "memory.max=1Gi")
	again.Devices = api.DeviceRequest{Selectors: []string{uuid1}, Present: true}
	_, err := b.d.Prepare(context.Background(), again)
	wantCode(t, err, quota.CodeNotEnforced)
	on := request("c", "memory.max=1Gi")
	on.Devices = api.DeviceRequest{Selectors: []string{mig1}, Present: true}
	b.run(on)
	if !p.alive() {
		t.Error("somebody was killed for that")
	}
	change(whole)
	b.eventually("it is back", func() bool { v := b.view("a"); return v.GPUs[0].Known && v.Level == quota.LevelReactive })
	b.run(again)
	// The instances are gone, and forgotten once nobody has them.
	if _, err := b.d.Prepare(context.Background(), func() api.PrepareRequest { r := on; r.Key.ID = "d"; return r }()); quota.CodeOf(err) != quota.CodeNoSuchGPU {
		t.Errorf("on an instance that is gone: %v", err)
	}
	b.d.mu.Lock()
	_, kept := b.d.gpus[mig1]
	_, dropped := b.d.gpus[mig0]
	b.d.mu.Unlock()
	if !kept || dropped {
		t.Errorf("the used one is kept: %t, the other too: %t", kept, dropped)
	}
}
