// SPDX-License-Identifier: Apache-2.0

package plan

import (
	"errors"
	"maps"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"

	"github.com/gpufence/gpufence/enforcer/quota"
)

const (
	uuid = "GPU-aaaaaaaa-0000-0000-0000-000000000001"
	mig  = "MIG-cccccccc-0000-0000-0000-000000000003"
	key  = quota.Domain + quota.KeyMemoryMax
)

func pod(change func(*Input)) Input {
	in := Input{
		Engine: quota.EngineCRI, ID: "c1", Namespace: "ns", Pod: "p", Container: "main",
		Annotations: map[string]string{key: "4Gi"},
		HookPath:    "/opt/bin/gpufence-hook", HookArgs: []string{"--config", "/etc/c"},
	}
	if change != nil {
		change(&in)
	}
	return in
}

func docker(change func(*Input)) Input {
	return pod(func(in *Input) {
		in.Engine, in.Namespace, in.Pod, in.Container = quota.EngineDocker, "", "", ""
		if change != nil {
			change(in)
		}
	})
}

func visibleEnv(v string) func(*Input) {
	return func(in *Input) { in.Env = append(in.Env, "PATH=/bin", "NVIDIA_VISIBLE_DEVICES="+v) }
}

func devices(paths ...string) func(*Input) { return func(in *Input) { in.Devices = paths } }

func mounted(dest, source string) func(*Input) {
	return func(in *Input) { in.Mounts = append(in.Mounts, Mount{Destination: dest, Source: source, Type: "bind"}) }
}

func all(changes ...func(*Input)) func(*Input) {
	return func(in *Input) {
		for _, c := range changes {
			c(in)
		}
	}
}

func noKey(in *Input) { in.Annotations = nil }

func annotate(name, value string) func(*Input) {
	return func(in *Input) {
		in.Annotations = maps.Clone(in.Annotations)
		if in.Annotations == nil {
			in.Annotations = map[string]string{}
		}
		in.Annotations[name] = value
	}
}

func TestAsk(t *testing.T) {
	notRequest := func(v string) []string {
		return []string{`NVIDIA_VISIBLE_DEVICES="` + v + `" gives no GPU under Kubernetes, where only UUIDs count and what the kubelet lists for the container`}
	}
	unlimited := []string{"the container has no memory.max: its GPU memory is not limited"}
	tests := []struct {
		name      string
		in        Input
		action    Action
		selectors []string
		present   bool
		notices   []string
	}{
		{name: "UUID in env", in: pod(visibleEnv(uuid)), action: ActionPrepare, selectors: []string{uuid}},
		{name: "simulated instance", in: pod(func(in *Input) {
			in.Mounts = []Mount{{Source: "/run/simgpu/gpu0.mig1", Destination: "/dev/simgpu/gpu0.mig1"}}
		}), action: ActionPrepare, selectors: []string{"/dev/simgpu/gpu0.mig1"}, present: true},
		{name: "UUIDs in env", in: pod(visibleEnv(uuid + ", " + mig)), action: ActionPrepare, selectors: []string{uuid, mig}},
		{name: "named twice", in: pod(visibleEnv(uuid + "," + uuid)), action: ActionPrepare, selectors: []string{uuid}},
		{name: "void", in: pod(visibleEnv("void")), action: ActionAlone},
		{name: "none", in: pod(visibleEnv("none")), action: ActionAlone},
		{name: "empty", in: pod(visibleEnv("")), action: ActionAlone},
		{name: "the last one counts", in: pod(all(visibleEnv(uuid), visibleEnv("void"))), action: ActionAlone},
		{name: "no env", in: pod(nil), action: ActionAlone},
		{name: "device node", in: pod(devices("/dev/null", "/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia0")), action: ActionPrepare, selectors: []string{"/dev/nvidia0"}, present: true},
		{name: "device nodes in order", in: pod(devices("/dev/nvidia1", "/dev/nvidia10")), action: ActionPrepare, selectors: []string{"/dev/nvidia1", "/dev/nvidia10"}, present: true},
		{name: "nodes that are no GPU", in: pod(devices("/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia-modeset", "/dev/nvidia-caps/nvidia-cap1", "/dev/nvidia0x")), action: ActionAlone},
		{name: "simulated GPU", in: pod(all(mounted("/dev/simgpu/gpu1", "/run/x/gpu1"), mounted("/dev/simgpu/ctl", "/run/x/ctl"))), action: ActionPrepare, selectors: []string{"/dev/simgpu/gpu1"}, present: true},
		{name: "bind-mounted node", in: pod(mounted("/dev//nvidia0", "/dev/nvidia0")), action: ActionPrepare, selectors: []string{"/dev/nvidia0"}, present: true},
		{name: "the spec wins over env", in: pod(all(devices("/dev/nvidia0"), visibleEnv(uuid))), action: ActionPrepare, selectors: []string{"/dev/nvidia0"}, present: true},
		{name: "CDI", in: pod(func(in *Input) { in.CDINames = []string{"nvidia.com/gpu=0", "nvidia.com/gpu=0", "intel.com/gpu=1"} }), action: ActionPrepare, selectors: []string{"nvidia.com/gpu=0"}},
		{name: "CDI over env", in: pod(all(visibleEnv(uuid), func(in *Input) { in.CDINames = []string{"gpufence.dev/simgpu=0"} })), action: ActionPrepare, selectors: []string{"gpufence.dev/simgpu=0"}},
		{name: "CDI of others", in: pod(func(in *Input) {
			in.CDINames = []string{"intel.com/gpu=0", "nvidia.com/nic=0", "evilnvidia.com/gpu=0", "nvidia.com/gpu", "nvidia.com/gpu="}
		}), action: ActionAlone},
		{name: "CDI of NVIDIA's others", in: pod(func(in *Input) {
			in.CDINames = []string{"k8s.gpu.nvidia.com/claim=u", "runtime.nvidia.com/gpu=all", "nvidia.com/mig-1g.10gb=1"}
		}), action: ActionPrepare, selectors: []string{"k8s.gpu.nvidia.com/claim=u", "runtime.nvidia.com/gpu=all", "nvidia.com/mig-1g.10gb=1"}},
		{name: "volume mounts", in: pod(all(mounted("/var/run/nvidia-container-devices/"+uuid, "/dev/null"), visibleEnv("all"))), action: ActionPrepare, selectors: []string{uuid}},
		{name: "volume mounts of something else", in: pod(all(mounted("/var/run/nvidia-container-devices/"+uuid, "/tmp/x"), mounted("/var/run/nvidia-container-devices/imex/0", "/dev/null"), mounted("/var/run/nvidia-container-devices", "/dev/null"))), action: ActionAlone},
		{name: "volume mount of an instance as drivers before R470 name it", in: pod(mounted("/var/run/nvidia-container-devices/MIG-GPU-x/1/2", "/dev/null")), action: ActionPrepare, selectors: []string{"MIG-GPU-x/1/2"}},

		{name: "docker: all", in: docker(visibleEnv("all")), action: ActionPrepare, selectors: []string{"all"}},
		{name: "docker: indices", in: docker(visibleEnv("1,0")), action: ActionPrepare, selectors: []string{"1", "0"}},
		{name: "docker: no key", in: docker(all(noKey, visibleEnv("all"))), action: ActionPrepare, selectors: []string{"all"}, notices: unlimited},
		{name: "docker: no GPU", in: docker(noKey), action: ActionAlone},
		{name: "docker: gpu key", in: docker(annotate("gpufence.dev/gpu", "any")), action: ActionPrepare, selectors: []string{"any"}},
		{name: "docker: gpu key and env", in: docker(all(annotate("gpufence.dev/gpu", "any"), visibleEnv("0"))), action: ActionPrepare, selectors: []string{"0"}, notices: []string{"the key gpu is ignored, since NVIDIA_VISIBLE_DEVICES chose the container's GPUs"}},
		{name: "docker: limit in env", in: docker(all(noKey, visibleEnv("0"), func(in *Input) { in.Env = append(in.Env, "GPUFENCE_MEMORY_MAX=1Gi") })), action: ActionPrepare, selectors: []string{"0"}},
		{name: "docker: privileged is reported", in: docker(all(visibleEnv("0"), func(in *Input) { in.Privileged = true })), action: ActionPrepare, selectors: []string{"0"}, notices: []string{"the container is privileged and could switch its fences off"}},
		{name: "docker: privileged without a limit", in: docker(all(noKey, visibleEnv("0"), func(in *Input) { in.Privileged = true })), action: ActionPrepare, selectors: []string{"0"}, notices: unlimited},
		{name: "privileged without a GPU", in: pod(func(in *Input) { in.Privileged = true }), action: ActionAlone},

		{name: "sandbox", in: pod(all(noKey, func(in *Input) { in.Sandbox, in.Container = true, "" })), action: ActionSkip},
		{name: "sandbox with void", in: pod(all(visibleEnv("void"), func(in *Input) { in.Sandbox, in.Container = true, "" })), action: ActionAlone},
		{name: "sandbox with NVIDIA's env", in: pod(all(visibleEnv("all"), func(in *Input) { in.Sandbox, in.Container = true, "" })), action: ActionAlone, notices: notRequest("all")},
		{name: "sandbox with a GPU", in: pod(all(devices("/dev/nvidia0"), func(in *Input) { in.Sandbox, in.Container = true, "" })), action: ActionPrepare, selectors: []string{"/dev/nvidia0"}, present: true},
		{name: "sandbox with a control node", in: pod(all(devices("/dev/nvidiactl"), func(in *Input) { in.Sandbox, in.Container = true, "" })), action: ActionAlone},
		{name: "sandbox with a mount", in: pod(all(mounted("/dev/simgpu/ctl", "/x"), func(in *Input) { in.Sandbox, in.Container = true, "" })), action: ActionAlone},
		{name: "not a sandbox by its own word", in: docker(all(visibleEnv("0"), annotate("io.kubernetes.cri.container-type", "sandbox"))), action: ActionPrepare, selectors: []string{"0"}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			r, err := Ask(tt.in, quota.DefaultPolicy())
			if err != nil {
				t.Fatal(err)
			}
			if r.Action != tt.action || r.Present != tt.present || !slices.Equal(r.Selectors, tt.selectors) || r.Mode != quota.ModeEnforce && r.Action != ActionSkip {
				t.Errorf("got %s %q present %t mode %s", r.Action, r.Selectors, r.Present, r.Mode)
			}
			if d := cmp.Diff(tt.notices, r.Notices); d != "" {
				t.Errorf("notices (-want +got)\n%s", d)
			}
		})
	}
}

func TestAskRefuses(t *testing.T) {
	tests := []struct {
		in   Input
		want string
	}{
		{pod(all(noKey, visibleEnv(uuid))), `E1401 container main of pod p has a GPU and no memory.max, which this node's policy denies: add the pod annotation gpufence.dev/memory.max: 4Gi, and see that the engine passes gpufence.dev/* annotations on`},
		{pod(annotate(key, "4096")), `E1203 memory.max "4096" has no unit: write 4096Mi`},
		{pod(annotate("gpufence.dev/container.main.memory.max", "4Gi")), `E1307 container.main.memory.max is set, but container main of pod p has no GPU: request a GPU for it (such as nvidia.com/gpu: 1), or remove the key`},
		{pod(annotate("gpufence.dev/gpu", "any")), `E1306 gpu is not accepted from cri by this node's policy: let the device plugin choose, or set gpu = true in [accept.cri]`},
		{docker(nil), `E1308 memory.max is set, but the container has no GPU: choose one (annotation gpufence.dev/gpu=any, NVIDIA_VISIBLE_DEVICES or --device), or remove the key`},
		{pod(all(visibleEnv(uuid), func(in *Input) { in.Privileged = true })), `E1703 container main is privileged (CAP_SYS_ADMIN, CAP_BPF or the host's pid namespace) and could switch its fences off: drop these, or set cri = "report" in [privileged] of this node's policy`},
	}
	for _, tt := range tests {
		r, err := Ask(tt.in, quota.DefaultPolicy())
		if err == nil || err.Error() != tt.want {
			t.Errorf("got %v\nwant %s", err, tt.want)
		}
		if r.Action != "" {
			t.Errorf("%v: an action %s beside the error", err, r.Action)
		}
		// In the other modes the same is said, and the container starts.
		for _, mode := range []quota.Mode{quota.ModeObserve, quota.ModeWarn} {
			p := quota.DefaultPolicy()
			p.Mode = mode
			r, err := Ask(tt.in, p)
			if err != nil {
				t.Errorf("%s: %v", mode, err)
			}
			if !slices.Contains(r.Notices, tt.want+" (only said, since the mode is "+string(mode)+")") {
				t.Errorf("%s: notices %q", mode, r.Notices)
			}
		}
	}
}

func TestAskByNamespace(t *testing.T) {
	p := quota.DefaultPolicy()
	p.Namespaces = []quota.NamespaceRule{{Pattern: "ns", Mode: quota.ModeObserve}}
	r, err := Ask(pod(all(noKey, visibleEnv(uuid))), p)
	if err != nil || r.Action != ActionPrepare || r.Mode != quota.ModeObserve || !slices.Equal(r.Selectors, []string{uuid}) {
		t.Errorf("%v %+v", err, r)
	}
	if r, err = Ask(pod(nil), p); err != nil || r.Action != ActionSkip {
		t.Errorf("nothing to observe: %v %+v", err, r)
	}
	if _, err := Ask(pod(all(noKey, visibleEnv(uuid), func(in *Input) { in.Namespace = "other" })), p); !errors.Is(err, quota.CodeNoLimit) {
		t.Errorf("got %v", err)
	}
}

func prepared(gpus ...string) Prepared {
	g := quota.Grant{Pod: map[string]quota.Limits{}, Container: map[string]quota.Limits{}, Mode: quota.ModeEnforce}
	for i, u := range gpus {
		g.GPUs = append(g.GPUs, quota.GPU{UUID: u, Index: i, TotalBytes: 16 << 30, AllocatableBytes: 15 << 30, ContextBytes: 300 << 20})
	}
	return Prepared{
		Grant:      g,
		CDIDevices: []string{"nvidia.com/gpu=0"},
		Files: []File{
			{Source: "/run/gpufence/pods/p/c1/limits", Destination: "/dev/gpufence/limits"},
			{Source: "/run/gpufence/pods/p/ledger", Destination: "/dev/gpufence/ledger", Writable: true},
			{Source: "/run/gpufence/pods/p/c1/ld.so.preload", Destination: "/etc/ld.so.preload"},
		},
	}
}

func TestPlan(t *testing.T) {
	hooks := func(more ...string) []Hook {
		var out []Hook
		for _, stage := range []string{"createRuntime", "poststop"} {
			out = append(out, Hook{
				Stage: stage, Path: "/opt/bin/gpufence-hook", TimeoutSeconds: 10,
				Args: append([]string{"gpufence-hook", stage, "--config", "/etc/c"}, more...),
			})
		}
		return out
	}
	ask := func(in Input, mode quota.Mode) Request {
		p := quota.DefaultPolicy()
		p.Mode = mode
		r, err := Ask(in, p)
		if err != nil {
			t.Fatal(err)
		}
		return r
	}
	prep := prepared(uuid)
	inject, present, alone := pod(visibleEnv(uuid)), pod(devices("/dev/nvidia0")), pod(nil)
	env := docker(all(noKey, visibleEnv("0"), func(in *Input) { in.Env = append(in.Env, "NVIDIA_GPU_MEMORY_LIMIT=2048") }))
	envPrep := prepared(uuid)
	envPrep.Grant.Container[uuid] = quota.Limits{Max: 2 << 30, High: quota.Unlimited, Min: 2 << 30}
	told := envPrep
	told.Env = []string{"NVIDIA_GPU_MEMORY_LIMIT=2048", "NVIDIA_GPU_MEMORY_REQUEST=2048"}
	tests := []struct {
		name string
		in   Input
		mode quota.Mode
		prep Prepared
		want Edits
	}{
		{name: "inject", in: inject, prep: prep, want: Edits{CDIDevices: prep.CDIDevices, Mounts: prep.Files, SetEnv: []string{"NVIDIA_VISIBLE_DEVICES=void"}, UnsetEnv: quota.EnvNames(), Hooks: hooks()}},
		{name: "present", in: present, prep: prep, want: Edits{Mounts: prep.Files, SetEnv: []string{"NVIDIA_VISIBLE_DEVICES=void"}, UnsetEnv: quota.EnvNames(), Hooks: hooks()}},
		{name: "env is kept in our words", in: env, prep: envPrep, want: Edits{CDIDevices: prep.CDIDevices, Mounts: prep.Files, SetEnv: []string{"NVIDIA_VISIBLE_DEVICES=void", "GPUFENCE_MEMORY_MAX=2Gi"}, UnsetEnv: quota.EnvNames(), Hooks: hooks()}},
		{name: "NVIDIA's hook is told what was granted", in: env, prep: told, want: Edits{CDIDevices: prep.CDIDevices, Mounts: prep.Files, SetEnv: []string{"NVIDIA_VISIBLE_DEVICES=void", "GPUFENCE_MEMORY_MAX=2Gi", "NVIDIA_GPU_MEMORY_LIMIT=2048", "NVIDIA_GPU_MEMORY_REQUEST=2048"}, UnsetEnv: quota.EnvNames(), Hooks: hooks()}},
		{name: "alone", in: alone, want: Edits{SetEnv: []string{"NVIDIA_VISIBLE_DEVICES=void"}, UnsetEnv: quota.EnvNames(), DenyDevices: true}},
		{name: "sandbox", in: pod(func(in *Input) { in.Sandbox = true })},
		{name: "observe mounts nothing", in: inject, mode: quota.ModeObserve, prep: prep, want: Edits{Hooks: hooks("--best-effort")}},
		{name: "warn neither", in: inject, mode: quota.ModeWarn, want: Edits{Hooks: hooks("--best-effort")}},
		{name: "observe leaves a container without a GPU alone", in: alone, mode: quota.ModeObserve},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			if tt.mode == "" {
				tt.mode = quota.ModeEnforce
			}
			got, err := Plan(tt.in, ask(tt.in, tt.mode), tt.prep)
			if err != nil {
				t.Fatal(err)
			}
			if d := cmp.Diff(tt.want, got); d != "" {
				t.Errorf("(-want +got)\n%s", d)
			}
		})
	}

	if _, err := Plan(inject, ask(inject, quota.ModeEnforce), Prepared{}); err == nil || err.Error() !=
		`E1701 container main asks for the GPUs "`+uuid+`", which nothing on this node can put into it: write a CDI specification (gpufence cdi generate --output=/etc/cdi/gpufence.yaml)` {
		t.Errorf("got %v", err)
	}
	if _, err := Plan(inject, Request{}, prep); !errors.Is(err, quota.CodeInternal) {
		t.Errorf("got %v", err)
	}
}

// apply is a small model of what hook/oci does with edits, with CDI that adds a device node.
func apply(in Input, e Edits) Input {
	out := in
	out.Devices, out.Mounts, out.Env = slices.Clone(in.Devices), nil, nil
	for range e.CDIDevices {
		if !slices.Contains(out.Devices, "/dev/nvidia0") {
			out.Devices = append(out.Devices, "/dev/nvidia0")
		}
	}
	unset := func(name string) bool {
		return slices.ContainsFunc(e.SetEnv, func(s string) bool { return strings.HasPrefix(s, name+"=") }) ||
			slices.ContainsFunc(e.UnsetEnv, func(p string) bool {
				prefix, star := strings.CutSuffix(p, "*")
				return p == name || star && strings.HasPrefix(name, prefix)
			})
	}
	for _, v := range in.Env {
		if name, _, _ := strings.Cut(v, "="); !unset(name) {
			out.Env = append(out.Env, v)
		}
	}
	out.Env = append(out.Env, e.SetEnv...)
	out.Annotations = maps.Clone(in.Annotations)
	for _, a := range e.DropAnnotations {
		delete(out.Annotations, a)
		out.CDINames = nil
	}
	for _, m := range in.Mounts {
		if !slices.ContainsFunc(e.Mounts, func(f File) bool { return f.Destination == m.Destination }) && !slices.Contains(e.DropMounts, m.Destination) {
			out.Mounts = append(out.Mounts, m)
		}
	}
	for _, f := range e.Mounts {
		out.Mounts = append(out.Mounts, Mount{Destination: f.Destination, Source: f.Source, Type: "bind"})
	}
	return out
}

// Asked again about a spec that it has edited, the plan changes nothing and grants the same:
// no marker tells it, and a container cannot pretend to have been planned.
func TestPlanTwiceIsPlanOnce(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		in := Input{
			Engine: rapid.SampledFrom(quota.Engines()).Draw(t, "engine"), ID: "c1", Annotations: map[string]string{},
			HookPath: "/opt/bin/gpufence-hook", HookArgs: []string{"--config", "/etc/c"},
		}
		if in.Engine.Kubernetes() {
			in.Namespace, in.Pod, in.Container = "ns", "p", "main"
			in.Sandbox = rapid.Bool().Draw(t, "sandbox")
		}
		if v := rapid.SampledFrom([]string{"", "4Gi", "max", "25%", "1500k"}).Draw(t, "max"); v != "" {
			in.Annotations[key] = v
		}
		for _, e := range []string{
			"PATH=/bin", "LD_PRELOAD=/lib/x.so", "NVIDIA_VISIBLE_DEVICES=" + uuid, "NVIDIA_VISIBLE_DEVICES=all", "NVIDIA_DRIVER_CAPABILITIES=compute",
			"GPUFENCE_MEMORY_MAX=1Gi", "GPUFENCE_MEMORY_MAX=1073741.825k", "GPUFENCE_MEMORY_MIN=500Mi", "GPUFENCE_MEMORY_OOM_GROUP=false",
			"NVIDIA_GPU_MEMORY_LIMIT=2048", "CUDA_DEVICE_MEMORY_LIMIT_0=3g", "CUDA_DEVICE_MEMORY_LIMIT=2g", "GPUFENCE_DEBUG=1",
		} {
			if rapid.Bool().Draw(t, e) {
				in.Env = append(in.Env, e)
			}
		}
		if rapid.Bool().Draw(t, "node") {
			in.Devices = []string{"/dev/null", "/dev/nvidia0"}
		}
		if rapid.Bool().Draw(t, "mount") {
			in.Mounts = append(in.Mounts, Mount{Destination: "/data", Source: "/srv"})
		}
		if rapid.Bool().Draw(t, "mount request") {
			in.Mounts = append(in.Mounts, Mount{Destination: "/var/run/nvidia-container-devices/" + uuid, Source: "/dev/null"})
		}
		if rapid.Bool().Draw(t, "annotation request") {
			in.Annotations["cdi.k8s.io/x"], in.CDINames = "nvidia.com/gpu=0", []string{"nvidia.com/gpu=0"}
		}
		if rapid.Bool().Draw(t, "stale") { // of an earlier run of the same bundle
			in.Mounts = append(in.Mounts, Mount{Destination: "/dev/gpufence/limits", Source: "/run/gpufence/pods/old/limits"})
		}
		p := quota.DefaultPolicy()
		p.Mode = rapid.SampledFrom([]quota.Mode{quota.ModeEnforce, quota.ModeEnforce, quota.ModeObserve}).Draw(t, "mode")
		if rapid.Bool().Draw(t, "accept env") {
			a := p.Accept[in.Engine]
			a.Env, a.EnvMayRaise = true, rapid.Bool().Draw(t, "may raise")
			p.Accept[in.Engine] = a
		}

		pass := func(in Input) (Input, Request, quota.Grant, bool) {
			r, err := Ask(in, p)
			if err != nil {
				return in, r, quota.Grant{}, false
			}
			prep := prepared(uuid)
			if r.Action == ActionPrepare {
				g, _, err := r.Quota.Resolve(prep.Grant.GPUs, p)
				if err != nil {
					return in, r, g, false
				}
				prep.Grant = g
			}
			e, err := Plan(in, r, prep)
			if err != nil {
				t.Fatal(err)
			}
			return apply(in, e), r, prep.Grant, true
		}
		once, r1, g1, ok := pass(in)
		if !ok {
			return
		}
		twice, r2, g2, ok := pass(once)
		if !ok {
			t.Fatalf("%+v\nis refused after it was edited to\n%+v", in, once)
		}
		if d := cmp.Diff(once, twice); d != "" {
			t.Fatalf("the second pass changed something\n%s", d)
		}
		if r1.Action != r2.Action {
			t.Fatalf("%s became %s", r1.Action, r2.Action)
		}
		if d := cmp.Diff(g1, g2); d != "" {
			t.Fatalf("the second pass grants something else\n%s", d)
		}
		// Foreign variables stay, enforcement's do not reach the container as they came.
		if p.Mode == quota.ModeEnforce && r1.Action != ActionSkip {
			for _, e := range in.Env {
				name, _, _ := strings.Cut(e, "=")
				ours := quota.MatchEnv(name) || name == "NVIDIA_VISIBLE_DEVICES"
				if !ours && !slices.Contains(once.Env, e) {
					t.Fatalf("%s was lost", e)
				}
			}
			if v := lastEnv(once.Env, "NVIDIA_VISIBLE_DEVICES"); v != "void" {
				t.Fatalf("NVIDIA_VISIBLE_DEVICES=%s", v)
			}
			for _, e := range once.Env {
				if strings.HasPrefix(e, "NVIDIA_GPU_MEMORY_") || strings.HasPrefix(e, "CUDA_DEVICE_MEMORY_") {
					t.Fatalf("%s is left", e)
				}
			}
		}
	})
}

// Asking does not change what it was asked about.
func TestAskIsPure(t *testing.T) {
	in := docker(all(visibleEnv("1,0"), annotate("gpufence.dev/gpu", "any"), mounted("/dev/nvidia-x", "/x")))
	before := cmp.Diff(Input{}, in)
	first, err := Ask(in, quota.DefaultPolicy())
	if err != nil {
		t.Fatal(err)
	}
	second, err := Ask(in, quota.DefaultPolicy())
	if err != nil {
		t.Fatal(err)
	}
	if !slices.Equal(first.Selectors, second.Selectors) || before != cmp.Diff(Input{}, in) {
		t.Error("asking changed something")
	}
}
