// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"slices"
	"strings"
	"testing"

	specs "github.com/opencontainers/runtime-spec/specs-go"
)

func TestRunSpec(t *testing.T) {
	host := hostView{env: []string{"A=b"}, cwd: "/work", capabilities: 1<<0 | 1<<21 | 1<<39 | 1<<12}
	for _, c := range []struct {
		name, gpu string
		request   runRequest
		env       []string
		visible   bool
	}{
		{"all GPUs without a choice", "all", runRequest{args: []string{"/usr/bin/python3"}, annotations: map[string]string{}}, []string{"A=b"}, false},
		{
			"the variable chooses", "", runRequest{args: []string{"x"}, annotations: map[string]string{}},
			[]string{"A=b", "NVIDIA_VISIBLE_DEVICES=1"}, true,
		},
		{
			"the flag is above the variable", "2", runRequest{args: []string{"x"}, annotations: map[string]string{"gpufence.dev/gpu": "2"}},
			[]string{"A=b", "NVIDIA_VISIBLE_DEVICES=1"}, false,
		},
	} {
		t.Run(c.name, func(t *testing.T) {
			host := host
			host.env = c.env
			s, id, err := runSpec(c.request, host)
			if err != nil {
				t.Fatal(err)
			}
			if got := s.Annotations["gpufence.dev/gpu"]; got != c.gpu {
				t.Errorf("gpu is %q, want %q", got, c.gpu)
			}
			if got := slices.ContainsFunc(s.Process.Env, isVisible); got != c.visible {
				t.Errorf("the variable is passed: %v, want %v", got, c.visible)
			}
			if want := []string{"CAP_CHOWN", "CAP_NET_ADMIN"}; !slices.Equal(s.Process.Capabilities.Effective, want) || !slices.Equal(s.Process.Capabilities.Bounding, want) {
				t.Errorf("it keeps %v, want %v", s.Process.Capabilities, want)
			}
			if s.Linux.CgroupsPath != "/gpufence-run-"+id || s.Process.Cwd != "/work" {
				t.Errorf("cgroup %s, folder %s", s.Linux.CgroupsPath, s.Process.Cwd)
			}
			if _, again, _ := runSpec(c.request, host); again == id {
				t.Errorf("two commands have the id %s", id)
			}
		})
	}
}

func TestRunID(t *testing.T) {
	for name, want := range map[string]string{
		"": "my-tool-", "a b/../c": "a-b-..-c-", "--": "", strings.Repeat("x", 90): strings.Repeat("x", 40) + "-",
	} {
		_, id, err := runSpec(runRequest{args: []string{"/opt/my tool"}, annotations: map[string]string{}, name: name}, hostView{})
		if err != nil || !strings.HasPrefix(id, want) || len(id) != len(want)+8 {
			t.Errorf("%q: %q %v, want %q and 8 digits", name, id, err, want)
		}
	}
}

// TestOnlyOfThisMachine: nothing that CDI would put into an image's file system stays, and a GPU that was not
// granted is denied.
func TestOnlyOfThisMachine(t *testing.T) {
	s := specs.Spec{
		Mounts: []specs.Mount{
			{Destination: "/dev"}, {Destination: "/dev/gpufence"}, {Destination: "/dev/shm"}, {Destination: "/etc/ld.so.preload"},
			{Destination: "/usr/lib/libcuda.so.1", Source: "/usr/lib/libcuda.so.1"}, {Destination: "/usr/bin/nvidia-smi"}, {Destination: "/device"},
		},
		Hooks: &specs.Hooks{
			CreateRuntime:   []specs.Hook{{Path: "/usr/bin/nvidia-cdi-hook"}, {Path: "/usr/bin/gpufence-hook"}},
			CreateContainer: []specs.Hook{{Path: "/usr/bin/nvidia-cdi-hook"}},
			Poststop:        []specs.Hook{{Path: "/usr/bin/gpufence-hook"}},
		},
		Linux: &specs.Linux{Devices: []specs.LinuxDevice{{Path: "/dev/nvidia0", Major: 195, Minor: 0}, {Path: "/dev/nvidiactl", Major: 195, Minor: 255}}},
	}
	onlyOfThisMachine(&s, hostView{gpus: []specs.LinuxDevice{{Major: 195, Minor: 0}, {Major: 195, Minor: 1}, {Major: 195, Minor: 255}, {Major: 235, Minor: 2}}})
	var mounts []string
	for _, m := range s.Mounts {
		mounts = append(mounts, m.Destination)
	}
	if want := []string{"/dev", "/dev/gpufence", "/dev/shm", "/etc/ld.so.preload"}; !slices.Equal(mounts, want) {
		t.Errorf("mounts are %q, want %q", mounts, want)
	}
	if len(s.Hooks.CreateRuntime) != 1 || len(s.Hooks.CreateContainer) != 0 || len(s.Hooks.Poststop) != 1 {
		t.Errorf("hooks are %+v", s.Hooks)
	}
	var denied [][2]int64
	for _, r := range s.Linux.Resources.Devices[1:] {
		if r.Allow || r.Type != "c" || r.Access != "rwm" {
			t.Errorf("a rule is %+v", r)
		}
		denied = append(denied, [2]int64{*r.Major, *r.Minor})
	}
	if want := [][2]int64{{195, 1}, {235, 2}}; !slices.Equal(denied, want) || !s.Linux.Resources.Devices[0].Allow {
		t.Errorf("denied are %v, want %v", denied, want)
	}
}

func TestLookUser(t *testing.T) {
	for text, want := range map[string][2]uint32{"root": {0, 0}, "0:5": {0, 5}, "4711": {4711, 4711}, "4711:0": {4711, 0}} {
		if who, _, err := lookUser(text); err != nil || who.UID != want[0] || who.GID != want[1] {
			t.Errorf("%q is %+v, %v, want %v", text, who, err, want)
		}
	}
	for _, text := range []string{"no-such-user", "root:no-such-group", "-1", ""} {
		if who, _, err := lookUser(text); err == nil {
			t.Errorf("%q is %+v, want an error", text, who)
		}
	}
}
