// SPDX-License-Identifier: Apache-2.0

package doctor

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// tree makes a node of files; those that end in ! may be executed.
func tree(t *testing.T, files map[string]string) string {
	t.Helper()
	root := t.TempDir()
	for name, text := range files {
		mode := os.FileMode(0o644)
		if n, ok := strings.CutSuffix(name, "!"); ok {
			name, mode = n, 0o755
		}
		p := filepath.Join(root, name)
		if err := os.MkdirAll(filepath.Dir(p), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(p, []byte(text), mode); err != nil {
			t.Fatal(err)
		}
	}
	return root
}

func engine(t *testing.T, root, name string) Engine {
	t.Helper()
	for _, e := range Engines(root) {
		if e.Name == name {
			return e
		}
	}
	t.Fatalf("no engine %s in %+v", name, Engines(root))
	return Engine{}
}

func TestEngines(t *testing.T) {
	const v2 = `version = 2
[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.%s]
runtime_type = "io.containerd.runc.v2"
pod_annotations = [%s]
[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.%s.options]
BinaryName = "%s"
`
	containerd := func(annotations, binary string) string {
		return strings.NewReplacer("%s]\nruntime", "gpufence]\nruntime", "[%s]", "["+annotations+"]", "runtimes.%s.options", "runtimes.gpufence.options", `"%s"`, `"`+binary+`"`).Replace(v2)
	}
	for _, tt := range []struct {
		name    string
		files   map[string]string
		engine  string
		handler string
		config  string
		want    []string // parts of the problems, in order
	}{
		{"containerd 1", map[string]string{"etc/containerd/config.toml": containerd(`"gpufence.dev/*"`, "/usr/bin/gpufence-runtime.cri"), "usr/bin/gpufence-runtime.cri!": ""},
			"containerd", "gpufence", "/etc/containerd/config.toml", nil},
		{"all annotations", map[string]string{"etc/containerd/config.toml": containerd(`"*/*"`, "gpufence-runtime.cri")}, "containerd", "gpufence", "/etc/containerd/config.toml", nil},
		{"annotations lost", map[string]string{"etc/containerd/config.toml": containerd(`"nvidia.com/*"`, "gpufence-runtime.cri")},
			"containerd", "gpufence", "/etc/containerd/config.toml", []string{"passes no gpufence.dev annotations on"}},
		{"a drop-in counts", map[string]string{"etc/containerd/config.toml": "version = 2\n", "etc/containerd/conf.d/99-gpufence.toml": containerd(`"gpufence.dev/*"`, "gpufence-runtime.cri")},
			"containerd", "gpufence", "/etc/containerd/conf.d/99-gpufence.toml", nil},
		{"binary gone", map[string]string{"etc/containerd/config.toml": containerd(`"gpufence.dev/*"`, "/opt/gpufence-runtime.cri")},
			"containerd", "gpufence", "/etc/containerd/config.toml", []string{"which is not there"}},
		{"binary no program", map[string]string{"etc/containerd/config.toml": containerd(`"gpufence.dev/*"`, "/opt/gpufence-runtime.cri"), "opt/gpufence-runtime.cri": ""},
			"containerd", "gpufence", "/etc/containerd/config.toml", []string{"cannot be executed"}},
		{"wrong suffix", map[string]string{"etc/containerd/config.toml": containerd(`"gpufence.dev/*"`, "gpufence-runtime.docker")},
			"containerd", "gpufence", "/etc/containerd/config.toml", []string{"reads another engine's keys"}},
		{"no suffix", map[string]string{"etc/docker/daemon.json": `{"runtimes":{"x":{"path":"gpufence-runtime"}}}`},
			"docker", "x", "/etc/docker/daemon.json", []string{"reads another engine's keys"}},
		{"broken", map[string]string{"etc/containerd/config.toml": "version = "}, "containerd", "", "/etc/containerd/config.toml", []string{"cannot be understood"}},
		{"another form", map[string]string{"etc/containerd/config.toml": "[plugins]\ncri = 3\n"}, "containerd", "", "/etc/containerd/config.toml", []string{"cannot be understood"}},
		{"version 3 under k3s", map[string]string{"var/lib/rancher/k3s/agent/etc/containerd/config.toml": `version = 3
[plugins."io.containerd.cri.v1.runtime".containerd.runtimes.gpufence]
pod_annotations = ["gpufence.dev/*"]
options = { BinaryName = "gpufence-runtime.cri", SystemdCgroup = true }
[plugins."io.containerd.other"]
anything = [1, 2]
`}, "k3s", "gpufence", "/var/lib/rancher/k3s/agent/etc/containerd/config.toml", nil},
		{"cri-o", map[string]string{"etc/crio/crio.conf": "", "etc/crio/crio.conf.d/99.conf": "[crio.runtime.runtimes.gpufence]\nruntime_path = \"gpufence-runtime.crio\"\n"},
			"cri-o", "gpufence", "/etc/crio/crio.conf.d/99.conf", nil},
		{"docker", map[string]string{"etc/docker/daemon.json": `{"runtimes":{"gpufence":{"path":"gpufence-runtime.docker"},"nvidia":{"path":"nvidia-container-runtime"}}}`},
			"docker", "gpufence", "/etc/docker/daemon.json", nil},
		{"docker empty", map[string]string{"etc/docker/daemon.json": "\n"}, "docker", "", "/etc/docker/daemon.json", nil},
		{"docker broken", map[string]string{"etc/docker/daemon.json": "{"}, "docker", "", "/etc/docker/daemon.json", []string{"cannot be understood"}},
		{"podman", map[string]string{"etc/containers/containers.conf": "[engine.runtimes]\ngpufence = [\"/opt/none\", \"gpufence-runtime.podman\"]\n"},
			"podman", "gpufence", "/etc/containers/containers.conf", nil},
	} {
		t.Run(tt.name, func(t *testing.T) {
			e := engine(t, tree(t, tt.files), tt.engine)
			if e.Handler != tt.handler || e.Config != tt.config || !e.Present && tt.engine != "docker" {
				t.Errorf("got %+v", e)
			}
			if len(e.Problems) != len(tt.want) {
				t.Fatalf("problems %+v, want %q", e.Problems, tt.want)
			}
			for i, p := range e.Problems {
				if !strings.Contains(p.What, tt.want[i]) || p.Fix == "" || strings.Contains(p.What, "\n") {
					t.Errorf("%+v, want %q and a line that mends it", p, tt.want[i])
				}
			}
			if e.Right() != (tt.handler != "" && tt.want == nil) {
				t.Errorf("right: %v", e.Right())
			}
		})
	}
	if got := Engines(t.TempDir()); len(got) != 0 {
		t.Errorf("engines on an empty node: %+v", got)
	}
}

func TestDrift(t *testing.T) {
	right := Engine{Name: "docker", Handler: "gpufence", Config: "/c"}
	bare := Engine{Name: "docker", Config: "/c"}
	broken := Engine{Name: "docker", Handler: "gpufence", Config: "/c", Problems: []Problem{{"lost something", "put it back"}}}
	for _, tt := range []struct {
		name     string
		before   map[string]string
		now      []Engine
		drift    []string
		remember map[string]string
	}{
		{"never was", nil, []Engine{bare}, nil, map[string]string{}},
		{"is right", nil, []Engine{right}, nil, map[string]string{"docker": "gpufence"}},
		{"handler gone", map[string]string{"docker": "gpufence"}, []Engine{bare}, []string{"docker: the handler gpufence is gone from /c"}, map[string]string{"docker": "gpufence"}},
		{"something is wrong", map[string]string{"docker": "gpufence"}, []Engine{broken}, []string{"docker: lost something"}, map[string]string{"docker": "gpufence"}},
		{"wrong from the start", nil, []Engine{broken}, []string{"docker: lost something"}, map[string]string{}},
		{"engine removed", map[string]string{"docker": "gpufence"}, nil, nil, map[string]string{}},
	} {
		drift, remember := Drift(tt.before, tt.now)
		if !slices.Equal(drift, tt.drift) || !cmp.Equal(remember, tt.remember) {
			t.Errorf("%s: drift %q, remember %v", tt.name, drift, remember)
		}
	}
}

func finding(t *testing.T, root, area, name string) Finding {
	t.Helper()
	for _, f := range Node(root) {
		if f.Area == area && f.Name == name {
			return f
		}
	}
	t.Fatalf("nothing about %s %s", area, name)
	return Finding{}
}

func TestNode(t *testing.T) {
	const r615 = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  615.20.01  Sun Mar 23 2026\nGCC version: x\n"
	for _, tt := range []struct {
		name       string
		files      map[string]string
		area, what string
		state      State
		say, fix   string
	}{
		{"no driver", nil, "fence", "driver", Info, "no NVIDIA driver", "modprobe"},
		{"open driver", map[string]string{"proc/driver/nvidia/version": "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build\n"}, "fence", "driver", Info, "driver 580.65 has no limits", "R615"},
		{"new driver on v1", map[string]string{"proc/driver/nvidia/version": r615}, "fence", "driver", Info, "need cgroup v2", "unified_cgroup_hierarchy"},
		{"new driver on v2", map[string]string{"proc/driver/nvidia/version": r615, "sys/fs/cgroup/cgroup.controllers": ""}, "fence", "driver", OK, "by accounts of its own", "6.14"},
		{"new driver with dmem", map[string]string{"proc/driver/nvidia/version": r615, "sys/fs/cgroup/cgroup.controllers": "", "sys/fs/cgroup/dmem.capacity": "nvidia/0000:01:00.0 17179869184\n"}, "fence", "driver", OK, "dmem controller", ""},
		{"limits switched off", map[string]string{"proc/driver/nvidia/version": r615, "sys/fs/cgroup/cgroup.controllers": "", "proc/driver/nvidia/params": "OpenRmEnableUnsupportedGpus: 1\nRegistryDwords: \"RMa=1;RmMemacctMode=0\"\n"}, "fence", "driver", Info, "switched off", "RmMemacctMode"},
		{"hard on a new driver", map[string]string{"proc/driver/nvidia/version": r615, "sys/fs/cgroup/cgroup.controllers": ""}, "fence", "hard", OK, "the driver holds them", ""},
		{"hard on a new driver and v1", map[string]string{"proc/driver/nvidia/version": r615}, "fence", "hard", Info, "only watch", "systemd.unified_cgroup_hierarchy=1 on the kernel's command line"},
		{"hard on an old driver", map[string]string{"proc/driver/nvidia/version": "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue\n", "sys/kernel/security/lsm": "lockdown,yama"}, "fence", "hard", Info, "only watch", "driver R615 or newer, with cgroup v2; or give each container a MIG instance; or, for the gate, lsm=lockdown,yama,bpf on the kernel's command line"},
		{"hard by MIG", map[string]string{"proc/driver/nvidia/capabilities/gpu0/mig/gi1/access": ""}, "fence", "hard", Info, "whole MIG instance", "modprobe"},
		{"a version that is none", map[string]string{"proc/driver/nvidia/version": "NVRM version: x\n"}, "fence", "driver", Info, "no NVIDIA driver", ""},
		{"gate", map[string]string{"sys/kernel/btf/vmlinux": "", "sys/kernel/security/lsm": "lockdown,bpf"}, "fence", "gate", Info, "could carry it", ""},
		{"no gate", map[string]string{"sys/kernel/security/lsm": "lockdown"}, "fence", "gate", Info, "lacks BTF (CONFIG_DEBUG_INFO_BTF=y) and the BPF LSM", "lsm=lockdown,bpf"},
		{"no securityfs", nil, "fence", "gate", Info, "lacks", "add bpf to the list"},
		{"mig", map[string]string{"proc/driver/nvidia/capabilities/gpu0/mig/gi1/access": ""}, "fence", "mig", OK, "1 MIG instances", ""},
		{"v1", nil, "kernel", "cgroups", Warn, "v1 only", "unified_cgroup_hierarchy"},
		{"v2", map[string]string{"sys/fs/cgroup/cgroup.controllers": ""}, "kernel", "cgroups", OK, "v2", ""},
		{"hami", map[string]string{"usr/local/vgpu/libvgpu.so": ""}, "neighbour", "hami", Warn, "HAMi", "one of the two"},
		{"host preload", map[string]string{"etc/ld.so.preload": "/usr/local/vgpu/libvgpu.so\n"}, "neighbour", "ld.so.preload", Warn, "every program of the host", "remove"},
		{"mps", map[string]string{"proc/12/comm": "nvidia-cuda-mps-control\n", "proc/13/comm": "bash\n"}, "neighbour", "mps", Warn, "nvidia-cuda-mps-control", "kill-mps"},
		{"nvidia runtime", map[string]string{"usr/bin/nvidia-container-runtime!": ""}, "neighbour", "nvidia-container-runtime", Info, "starts it", ""},
		{"cdi", map[string]string{"run/cdi/x.json": "{}"}, "neighbour", "cdi", OK, "1 CDI", ""},
		{"no cdi", nil, "neighbour", "cdi", Warn, "no CDI", "nvidia-ctk cdi generate"},
		{"docker without us", map[string]string{"usr/bin/dockerd!": ""}, "engine", "docker", Warn, "not fenced", "gpufence-runtime.docker"},
		{"podman without us", map[string]string{"usr/bin/podman!": ""}, "engine", "podman", Warn, "not fenced", "gpufence-runtime.podman"},
		{"cri-o without us", map[string]string{"usr/bin/crio!": ""}, "engine", "cri-o", Warn, "not fenced", "gpufence-runtime.crio"},
		{"containerd without us", map[string]string{"usr/bin/containerd!": ""}, "engine", "containerd", Warn, "not fenced", "pod_annotations"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			f := finding(t, tree(t, tt.files), tt.area, tt.what)
			if f.State != tt.state || !strings.Contains(f.What, tt.say) || !strings.Contains(f.Fix, tt.fix) {
				t.Errorf("got %+v", f)
			}
		})
	}
}

func TestWorst(t *testing.T) {
	if Worst(nil) != OK || Worst([]Finding{{State: Warn}, {State: Info}}) != Warn || Worst([]Finding{{State: Fail}, {State: OK}}) != Fail {
		t.Error("the worst is not the worst")
	}
}

func FuzzEngineConfigs(f *testing.F) {
	f.Add("version = 2\n[plugins.cri.containerd.runtimes.x.options]\nBinaryName = \"gpufence-runtime.cri\"\n")
	f.Add(`{"runtimes":{"x":{"path":"gpufence-runtime.docker"}}}`)
	f.Add("[crio.runtime.runtimes.x]\nruntime_path=\"a\"\n[engine.runtimes]\nx=[\"a\"]")
	f.Fuzz(func(t *testing.T, text string) {
		for _, k := range kinds {
			handlers, err := k.read([]byte(text))
			if err != nil && handlers != nil {
				t.Errorf("%s: both %v and %v", k.name, handlers, err)
			}
		}
	})
}
