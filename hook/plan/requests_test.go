// SPDX-License-Identifier: Apache-2.0

package plan

import (
	"errors"
	"path"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/gpufence/gpufence/enforcer/quota"
)

// TestMountRequests: a mount of /dev/null asks for what NVIDIA's runtime takes it for.
func TestMountRequests(t *testing.T) {
	tests := []struct {
		ids  []string
		want []string
	}{
		{[]string{"/" + uuid, "/all"}, []string{uuid, "all"}},
		{[]string{"/cdi/nvidia.com/gpu/0"}, []string{"nvidia.com/gpu=0"}},
		{[]string{"/cdi/nvidia.com/gpu=all"}, []string{"nvidia.com/gpu=all"}},
		{[]string{"/cdi/nvidia.com/gpu/" + uuid + "::2"}, []string{"nvidia.com/gpu=" + uuid}},
		{[]string{"/cdi/intel.com/gpu/0", "/cdi/x"}, nil},
		{[]string{"/imex/0"}, nil},
		{[]string{"/" + uuid, "/void"}, nil},
		{[]string{"/MIG-GPU-x/1/2"}, []string{"MIG-GPU-x/1/2"}},
		{[]string{"", "/"}, nil},
		{[]string{uuid}, []string{uuid}}, // no slash: it takes that, too
	}
	for _, tt := range tests {
		var mounts []Mount
		for _, id := range tt.ids {
			mounts = append(mounts, Mount{Destination: "/var/run/nvidia-container-devices" + id, Source: "/dev/null"})
		}
		if got := volumeMounts(mounts); !slices.Equal(got, tt.want) {
			t.Errorf("%q: got %q, want %q", tt.ids, got, tt.want)
		}
	}
}

// TestNothingElseAsks: void alone does not keep a low-level nvidia-container-runtime from adding GPUs.
func TestNothingElseAsks(t *testing.T) {
	more := all(
		annotate("cdi.k8s.io/x", "nvidia.com/gpu=all"), annotate("cdi.k8s.io/other", "vendor.example/gpu=0"),
		mounted("/var/run/nvidia-container-devices/all", "/dev/null"), mounted("/var/run/nvidia-container-devices/imex/0", "/dev/null"),
		mounted("/var/run/nvidia-container-devices/file", "/srv/file"), mounted("/var/run/nvidia-container-devices", "/srv"),
		func(in *Input) {
			in.Env = append(in.Env, "DOCKER_RESOURCE_GPU=all", "DOCKER_RESOURCE_NVIDIA-GPU="+uuid, "DOCKER_RESOURCE_SSD=2")
		},
	)
	env := []string{"NVIDIA_VISIBLE_DEVICES=void", "DOCKER_RESOURCE_GPU=void", "DOCKER_RESOURCE_NVIDIA-GPU=void"}
	check := func(name string, in Input, prep Prepared) {
		t.Helper()
		r, err := Ask(in, quota.DefaultPolicy())
		if err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		e, err := Plan(in, r, prep)
		if err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		if e.DropMounts[0] != "/var/run/nvidia-container-devices/all" || slices.ContainsFunc(e.DropMounts[1:], func(d string) bool { return path.Base(d) != "void" }) {
			t.Errorf("%s: mounts %q", name, e.DropMounts)
		}
		if d := cmp.Diff([]string{"cdi.k8s.io/other", "cdi.k8s.io/x"}, e.DropAnnotations); d != "" {
			t.Errorf("%s: annotations\n%s", name, d)
		}
		if d := cmp.Diff(env, e.SetEnv); d != "" {
			t.Errorf("%s: env\n%s", name, d)
		}
	}
	// The GPU that is in the spec is granted; those that others name beside it must not come.
	check("one is there", pod(all(devices("/dev/nvidia0"), more)), prepared(uuid))
	check("asked for", docker(all(visibleEnv("0"), more)), prepared(uuid))
	check("no GPU", pod(all(func(in *Input) { in.Sandbox = true }, more, mounted("/var/run/nvidia-container-devices/void", "/dev/null"))), Prepared{})

	unknown := pod(all(noKey, annotate("cdi.k8s.io/other", "vendor.example/gpu=0"), func(in *Input) { in.CDINames = []string{"vendor.example/gpu=0"} }))
	for _, sandbox := range []bool{false, true} {
		unknown.Sandbox = sandbox
		r, err := Ask(unknown, quota.DefaultPolicy())
		if err != nil || r.Action != ActionAlone {
			t.Fatalf("sandbox %t: %v %s", sandbox, err, r.Action)
		}
		e, err := Plan(unknown, r, Prepared{})
		if err != nil || !e.DenyDevices || !slices.Equal(e.DropAnnotations, []string{"cdi.k8s.io/other"}) {
			t.Errorf("sandbox %t: %v %+v", sandbox, err, e)
		}
	}

	p := quota.DefaultPolicy()
	p.Mode = quota.ModeObserve
	in := pod(all(devices("/dev/nvidia0"), more))
	r, err := Ask(in, p)
	if err != nil {
		t.Fatal(err)
	}
	if e, err := Plan(in, r, prepared(uuid)); err != nil || len(e.DropMounts)+len(e.DropAnnotations)+len(e.SetEnv) > 0 {
		t.Errorf("observe edits: %v %+v", err, e)
	}
}

// TestPrivilegedWithoutLimit: what every privileged container of the system meets where gpufence is the default
// runtime, and what a rule for its namespace does.
func TestPrivilegedWithoutLimit(t *testing.T) {
	in := pod(all(noKey, devices("/dev/nvidia0", "/dev/kmsg"), func(in *Input) { in.Privileged = true }))
	p := quota.DefaultPolicy()
	if _, err := Ask(in, p); !errors.Is(err, quota.CodeNoLimit) {
		t.Errorf("got %v", err)
	}
	p.Namespaces = []quota.NamespaceRule{{Pattern: "ns", Mode: quota.ModeObserve}}
	r, err := Ask(in, p)
	if err != nil {
		t.Fatal(err)
	}
	if e, err := Plan(in, r, Prepared{}); err != nil || len(e.SetEnv)+len(e.UnsetEnv)+len(e.Mounts) > 0 || e.DenyDevices || len(e.Hooks) != 2 {
		t.Errorf("observed: %v %+v", err, e)
	}
}

func TestNodeOf(t *testing.T) {
	tests := []struct {
		path, kind   string
		major, minor int64
		want         string
	}{
		{"/dev/nvidia0", "c", 195, 0, "/dev/nvidia0"},
		{"/dev/nvidia0", "c", 195, 1, "/dev/nvidia1"}, // docker run --device /dev/nvidia1:/dev/nvidia0
		{"/dev/x", "u", 195, 3, "/dev/nvidia3"},
		{"/dev/nvidiactl", "c", 195, 255, "/dev/nvidiactl"},
		{"/dev/nvidia-modeset", "c", 195, 254, "/dev/nvidia-modeset"},
		{"/dev/nvidia0", "c", 0, 0, "/dev/nvidia0"}, // the runtime looks the numbers up
		{"/dev/sda", "b", 195, 1, "/dev/sda"},
		{"/dev/nvidia-uvm", "c", 510, 0, "/dev/nvidia-uvm"},
	}
	for _, tt := range tests {
		if got := NodeOf(tt.path, tt.kind, tt.major, tt.minor); got != tt.want {
			t.Errorf("%+v: got %s", tt, got)
		}
	}
}
