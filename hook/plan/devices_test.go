// SPDX-License-Identifier: Apache-2.0

package plan

import (
	"errors"
	"slices"
	"testing"

	"github.com/gpufence/gpufence/enforcer/quota"
)

// TestDeviceForms: every form in which somebody hands GPUs to a container, by who does. The
// numbers are of issues of others in which a sharing product met the form.
func TestDeviceForms(t *testing.T) {
	const other = "GPU-bbbbbbbb-0000-0000-0000-000000000002"
	plugin := func(ids ...string) func(*Input) {
		return func(in *Input) {
			for _, id := range ids {
				mounted("/var/run/nvidia-container-devices/"+id, "/dev/null")(in)
			}
		}
	}
	cdi := func(names ...string) func(*Input) { return func(in *Input) { in.CDINames = names } }
	injected := func(names ...string) func(*Input) { return func(in *Input) { in.Injected = names } }
	privileged := func(in *Input) { in.Privileged = true }
	tests := []struct {
		name      string
		in        Input
		action    Action
		selectors []string
		claimed   []string
		present   bool
	}{
		{name: "device plugin, envvar: UUIDs", in: pod(visibleEnv(uuid + "," + other)), action: ActionPrepare, selectors: []string{uuid, other}},
		{name: "device plugin, envvar: a replica of time-slicing", in: pod(visibleEnv(uuid + "::3")), action: ActionPrepare, selectors: []string{uuid}},
		{name: "device plugin, envvar: two replicas of one GPU are one GPU", in: pod(visibleEnv(uuid + "::0," + uuid + "::1")), action: ActionPrepare, selectors: []string{uuid}},
		{name: "device plugin, envvar: a MIG instance", in: pod(visibleEnv(mig)), action: ActionPrepare, selectors: []string{mig}},
		{name: "device plugin, envvar: a replica of a MIG instance", in: pod(visibleEnv(mig + "::1")), action: ActionPrepare, selectors: []string{mig}},
		{name: "device plugin, envvar with indices: the kubelet is asked", in: pod(visibleEnv("0")), action: ActionPrepare, claimed: []string{"0"}},
		{name: "device plugin, envvar with an instance's index", in: pod(visibleEnv("0:1")), action: ActionPrepare, claimed: []string{"0:1"}},
		{name: "device plugin, volume mounts", in: pod(plugin(uuid, other)), action: ActionPrepare, selectors: []string{uuid, other}},
		{name: "device plugin, volume mounts of replicas", in: pod(plugin(uuid+"::0", uuid+"::1")), action: ActionPrepare, selectors: []string{uuid}},
		{name: "device plugin, volume mounts of a MIG instance", in: pod(plugin(mig)), action: ActionPrepare, selectors: []string{mig}},
		{name: "device plugin, CDI annotations", in: pod(cdi("nvidia.com/gpu=" + uuid)), action: ActionPrepare, selectors: []string{"nvidia.com/gpu=" + uuid}},
		{name: "device plugin, CDI annotations of replicas", in: pod(cdi("nvidia.com/gpu="+uuid+"::0", "nvidia.com/gpu="+uuid+"::1")), action: ActionPrepare, selectors: []string{"nvidia.com/gpu=" + uuid}},
		{name: "device plugin, CDI annotations of a MIG instance", in: pod(cdi("nvidia.com/gpu=" + mig)), action: ActionPrepare, selectors: []string{"nvidia.com/gpu=" + mig}},
		{name: "CDI by CRI: devices are there", in: pod(all(devices("/dev/nvidia0", "/dev/nvidiactl"), visibleEnv("void"))), action: ActionPrepare, selectors: []string{"/dev/nvidia0"}, present: true},
		{name: "CDI by CRI: somebody injects for certain", in: pod(injected("nvidia.com/gpu=0")), action: ActionPrepare, selectors: []string{"nvidia.com/gpu=0"}, present: true},
		{name: "DRA by CRI", in: pod(all(devices("/dev/nvidia1"), injected("k8s.gpu.nvidia.com/claim=u-gpu-1"))), action: ActionPrepare, selectors: []string{"/dev/nvidia1"}, present: true},
		{name: "our own generated kind", in: pod(cdi("gpufence.dev/gpu=" + uuid)), action: ActionPrepare, selectors: []string{"gpufence.dev/gpu=" + uuid}},
		{name: "the simulated kind", in: pod(cdi("gpufence.dev/simgpu=0")), action: ActionPrepare, selectors: []string{"gpufence.dev/simgpu=0"}},

		{name: "pitfall 19: every CUDA image says all", in: pod(visibleEnv("all")), action: ActionPrepare, claimed: []string{"all"}},
		{name: "pitfall 19: under CRI-O too", in: pod(all(visibleEnv("all"), func(in *Input) { in.Engine = quota.EngineCRIO })), action: ActionPrepare, claimed: []string{"all"}},
		{name: "pitfall 19: a UUID beside an index is no UUID", in: pod(visibleEnv(uuid + ",0")), action: ActionPrepare, claimed: []string{uuid, "0"}},
		{name: "pitfall 20: void where CDI is used", in: pod(visibleEnv("void")), action: ActionAlone},
		{name: "pitfall 20: a mount outweighs the image's env", in: pod(all(plugin(uuid), visibleEnv("all"))), action: ActionPrepare, selectors: []string{uuid}},
		{name: "pitfall 20: so does an annotation", in: pod(all(cdi("nvidia.com/gpu="+uuid), visibleEnv("all"))), action: ActionPrepare, selectors: []string{"nvidia.com/gpu=" + uuid}},
		{name: "pitfall 21: the image's own env gives nothing by itself", in: pod(visibleEnv("0,1")), action: ActionPrepare, claimed: []string{"0", "1"}},
		{name: "pitfall 22: a privileged container without a request is asked for", in: pod(all(visibleEnv("all"), privileged)), action: ActionPrepare, claimed: []string{"all"}},
		{name: "pitfall 24: KAI names UUIDs by env only", in: pod(all(visibleEnv(uuid), func(in *Input) { in.Env = append(in.Env, "GPU_PORTION=0.5") })), action: ActionPrepare, selectors: []string{uuid}},
		{name: "pitfall 53: capability nodes alone are no GPU", in: pod(devices("/dev/nvidia-caps/nvidia-cap21")), action: ActionAlone},
		{name: "pitfall 54: WSL's node is no GPU that we know", in: pod(devices("/dev/dxg")), action: ActionAlone},

		{name: "no replica: a suffix that is none", in: pod(visibleEnv(uuid + "::x")), action: ActionPrepare, selectors: []string{uuid + "::x"}},
		{name: "no replica: nothing before it", in: docker(visibleEnv("::1")), action: ActionPrepare, selectors: []string{"::1"}},
		{name: "a pause container claims nothing", in: pod(all(visibleEnv("all"), func(in *Input) { in.Sandbox = true })), action: ActionAlone},
		{name: "docker takes indices at their word", in: docker(visibleEnv("0,1")), action: ActionPrepare, selectors: []string{"0", "1"}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			r, err := Ask(tt.in, quota.DefaultPolicy())
			if err != nil {
				t.Fatal(err)
			}
			if r.Action != tt.action || r.Present != tt.present || !slices.Equal(r.Selectors, tt.selectors) || !slices.Equal(r.Claimed, tt.claimed) {
				t.Errorf("got %s selectors %q claimed %q present %t", r.Action, r.Selectors, r.Claimed, r.Present)
			}
		})
	}
}

// TestClaims: what becomes of a container that only the kubelet can tell to have a GPU.
func TestClaims(t *testing.T) {
	key := "gpufence.dev/container.main.memory.max"
	tests := []struct {
		name   string
		in     Input
		gpu    quota.Code // in the case that it has one, from Ask
		refuse quota.Code // in the case that it has none, from Plan
	}{
		{name: "pod limit", in: pod(visibleEnv("all"))},
		{name: "no limit: a sidecar of a CUDA image starts", in: pod(all(noKey, visibleEnv("all")))},
		{name: "a container key needs a GPU", in: pod(all(noKey, visibleEnv("all"), annotate(key, "1Gi"))), refuse: quota.CodeContainerKeyNoGPU},
		{name: "wrong in either case", in: pod(all(noKey, visibleEnv("all"), annotate(key, "4096"))), gpu: quota.CodeNoUnit},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			r, err := Ask(tt.in, quota.DefaultPolicy())
			if tt.gpu != "" {
				if !errors.Is(err, tt.gpu) {
					t.Errorf("got %v, want %s", err, tt.gpu)
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			none, err := Plan(tt.in, r, Prepared{})
			switch {
			case tt.refuse != "":
				if !errors.Is(err, tt.refuse) {
					t.Errorf("without a GPU: got %v, want %s", err, tt.refuse)
				}
			case err != nil || !none.DenyDevices || len(none.Hooks) > 0 || len(none.CDIDevices) > 0 || !slices.Contains(none.SetEnv, visibleVoid):
				t.Errorf("without a GPU: %v %+v", err, none)
			}
			given, err := Plan(tt.in, r, prepared(uuid))
			if err != nil || given.DenyDevices || len(given.Hooks) != 2 || len(given.CDIDevices) != 1 {
				t.Errorf("with a GPU: %v %+v", err, given)
			}
		})
	}
	p := quota.DefaultPolicy()
	p.Mode = quota.ModeObserve
	r, err := Ask(pod(visibleEnv("all")), p)
	if err != nil || r.Action != ActionPrepare {
		t.Fatalf("observe: %v %+v", err, r)
	}
	if e, err := Plan(pod(nil), r, Prepared{}); err != nil || e.DenyDevices || len(e.Hooks)+len(e.SetEnv) > 0 {
		t.Errorf("observe, without a GPU: %v %+v", err, e)
	}
	if e, err := Plan(pod(nil), r, prepared(uuid)); err != nil || len(e.Hooks) != 2 {
		t.Errorf("observe, with a GPU: %v %+v", err, e)
	}
}
