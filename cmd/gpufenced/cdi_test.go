// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"context"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
	"github.com/NVIDIA/go-nvml/pkg/nvml/mock/dgxa100"
	"github.com/NVIDIA/go-nvml/pkg/nvml/mock/server"
	"github.com/sirupsen/logrus"
	"golang.org/x/sys/unix"
	"sigs.k8s.io/yaml"
	"tags.cncf.io/container-device-interface/pkg/cdi"
	specs "tags.cncf.io/container-device-interface/specs-go"

	"github.com/gpufence/gpufence/enforcer/api"
	"github.com/gpufence/gpufence/enforcer/config"
	"github.com/gpufence/gpufence/enforcer/gpu"
	"github.com/gpufence/gpufence/enforcer/quota"
	"github.com/gpufence/gpufence/hook/plan"
)

// driverTree is a driver as NVIDIA's mock of NVML has it, below a folder. Its device nodes are
// /dev/null's.
func driverTree(t *testing.T) string {
	t.Helper()
	root := t.TempDir()
	version, _ := dgxa100.New().SystemGetDriverVersion()
	files := []string{"dev/nvidiactl", "dev/nvidia-uvm", "dev/nvidia-uvm-tools", "dev/nvidia-modeset"}
	for _, n := range []string{"0", "1", "2", "3", "4", "5", "6", "7"} {
		files = append(files, "dev/nvidia"+n)
	}
	for _, lib := range []string{"libcuda.so", "libnvidia-ml.so"} {
		files = append(files, "usr/lib/x86_64-linux-gnu/"+lib+"."+version)
	}
	for _, f := range files {
		p := filepath.Join(root, f)
		if err := os.MkdirAll(filepath.Dir(p), 0o755); err != nil {
			t.Fatal(err)
		}
		if strings.HasPrefix(f, "dev/") {
			if err := unix.Mknod(p, unix.S_IFCHR|0o666, int(unix.Mkdev(1, 3))); err != nil {
				if os.Getenv("GPUFENCE_MUST") == "1" {
					t.Fatal(err)
				}
				t.Skipf("SKIPPED: needs to make device nodes: %v", err)
			}
			continue
		}
		if err := os.WriteFile(p, nil, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	for _, lib := range []string{"libcuda.so.1", "libnvidia-ml.so.1"} {
		if err := os.Symlink(strings.TrimSuffix(lib, "1")+version, filepath.Join(root, "usr/lib/x86_64-linux-gnu", lib)); err != nil {
			t.Fatal(err)
		}
	}
	return root
}

// mockNVML is NVIDIA's mock, with what it leaves out and nvcdi asks.
func mockNVML(t *testing.T) nvml.Interface {
	t.Helper()
	s := dgxa100.New()
	for _, d := range s.Devices {
		m, ok := d.(*server.Device)
		if !ok {
			t.Fatalf("the mock's device is a %T", d)
		}
		m.GetMaxMigDeviceCountFunc = func() (int, nvml.Return) { return 0, nvml.SUCCESS }
	}
	return s
}

func TestGenerate(t *testing.T) {
	root := driverTree(t)
	for _, hook := range []string{hookNone, "/usr/bin/nvidia-cdi-hook"} {
		for _, file := range []string{"gpus.json", "gpus.yaml"} {
			out := filepath.Join(t.TempDir(), file)
			g := generate{output: out, kind: plan.KindGPU, driverRoot: root, hook: hook, mode: "nvml", nvml: mockNVML(t)}
			var stderr bytes.Buffer
			if err := g.run(nil, &stderr); err != nil {
				t.Fatalf("%v\n%s", err, stderr.String())
			}
			spec, err := cdi.ReadSpec(out, 0)
			if err != nil {
				t.Fatal(err)
			}
			if spec.GetVendor()+"/"+spec.GetClass() != plan.KindGPU || spec.GetDevice("all") == nil || spec.GetDevice("7") == nil {
				t.Errorf("%s: kind %s/%s, devices %v", file, spec.GetVendor(), spec.GetClass(), names(spec.Spec))
			}
			if uuid, _ := dgxa100.New().Devices[0].GetUUID(); uuid == "" || len(names(spec.Spec)) < 17 {
				t.Errorf("%s: devices %q", file, names(spec.Spec))
			}
			var hooks []string
			for _, h := range spec.ContainerEdits.Hooks {
				hooks = append(hooks, strings.Join(h.Args, " "))
			}
			if slices.ContainsFunc(hooks, func(h string) bool { return strings.Contains(h, limitsHook) }) || (hook == hookNone) != (len(hooks) == 0) {
				t.Errorf("%s: hooks %q", file, hooks)
			}
			for _, d := range spec.Devices {
				if len(d.ContainerEdits.DeviceNodes) == 0 {
					t.Errorf("%s: device %s has no node", file, d.Name)
				}
				for _, n := range d.ContainerEdits.DeviceNodes {
					// Pitfalls 3 and 9: numbers are the host's at the time of use.
					if n.Major != 0 || n.Minor != 0 {
						t.Errorf("%s: %s is written down as %d:%d", file, n.Path, n.Major, n.Minor)
					}
				}
			}
		}
	}
}

func names(s *specs.Spec) []string {
	var out []string
	for _, d := range s.Devices {
		out = append(out, d.Name)
	}
	return out
}

func TestGenerateToStandardOutput(t *testing.T) {
	var stdout, stderr bytes.Buffer
	g := generate{kind: "nvidia.com/gpu", driverRoot: driverTree(t), hook: hookNone, mode: "nvml", nvml: mockNVML(t)}
	if err := g.run(&stdout, &stderr); err != nil {
		t.Fatal(err)
	}
	var s specs.Spec
	if err := yaml.Unmarshal(stdout.Bytes(), &s); err != nil || s.Kind != "nvidia.com/gpu" || len(s.Devices) < 9 {
		t.Errorf("%v %s with %d devices", err, s.Kind, len(s.Devices))
	}
}

func TestGenerateRefuses(t *testing.T) {
	for args, want := range map[string]quota.Code{
		"--format xml":               quota.CodeUsage,
		"--kind gpu":                 quota.CodeUsage,
		"--mode sim":                 quota.CodeUsage,
		"--driver-root /nonexistent": quota.CodeNVMLUnavailable,
		"--nvml-library /nonexistent/libnvidia-ml.so.1 --driver-root /nonexistent --mode nvml": quota.CodeNVMLUnavailable,
	} {
		cmd := cdiCommand()
		cmd.SilenceErrors, cmd.SilenceUsage = true, true
		cmd.SetArgs(append([]string{"generate"}, strings.Fields(args)...))
		var stdout bytes.Buffer
		cmd.SetOut(&stdout)
		cmd.SetErr(&bytes.Buffer{})
		if err := cmd.Execute(); !errors.Is(err, want) {
			t.Errorf("%s: got %v, want %s", args, err, want)
		}
		if stdout.Len() > 0 {
			t.Errorf("%s: wrote %s", args, stdout.String())
		}
	}
}

// TestGenerateApart: what the other process does wrong is an error, never a specification.
func TestGenerateApart(t *testing.T) {
	dir := t.TempDir()
	program := func(name, script string) string {
		p := filepath.Join(dir, name)
		if err := os.WriteFile(p, []byte("#!/bin/sh\n"+script), 0o755); err != nil {
			t.Fatal(err)
		}
		return p
	}
	made, err := generateApart(t.Context(), program("good", `echo '{"kind":"gpufence.dev/gpu","devices":[{"name":"0"}]}'`), "")
	if err != nil || len(made.Devices) != 1 {
		t.Errorf("%v %+v", err, made)
	}
	if _, err := generateApart(t.Context(), program("bad", "echo no driver >&2; exit 1"), ""); err == nil || !strings.Contains(err.Error(), "no driver") {
		t.Errorf("got %v", err)
	}
	if _, err := generateApart(t.Context(), program("noise", "echo hello"), ""); err == nil {
		t.Error("noise is a specification")
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := generateApart(ctx, program("slow", "exec sleep 1000"), ""); !errors.Is(err, context.Canceled) {
		t.Errorf("got %v", err)
	}
}

type view struct {
	node api.Node
	gpus []api.GPUState
	err  error
}

func (v view) Node(context.Context) (api.Node, error)       { return v.node, nil }
func (v view) GPUs(context.Context) ([]api.GPUState, error) { return v.gpus, v.err }

func TestFactsOf(t *testing.T) {
	v := view{gpus: []api.GPUState{{GPU: quota.GPU{UUID: "GPU-a", Index: 3}}, {GPU: quota.GPU{UUID: "MIG-b", Index: 4}}}}
	v.node.Version.Driver = "550"
	f := factsOf(t.Context(), v)
	if f.Driver != "550" || f.Down != "" || len(f.GPUs) != 2 || f.GPUs[0].Position != "3" || f.GPUs[1].Position != "" {
		t.Errorf("%+v", f)
	}
	v.node.Switch.Position = api.SwitchQuiesced
	if f := factsOf(t.Context(), v); f.Down == "" {
		t.Errorf("quiesced: %+v", f)
	}
	v.node.Switch.Position, v.err = "running", errors.New("NVML is not usable")
	if f := factsOf(t.Context(), v); f.Down != "" || len(f.GPUs) != 0 {
		t.Errorf("nothing is known: %+v", f)
	}
}

// TestRefreshStops: a node that does not want our kind has no loop, and one that does ends it.
func TestRefreshStops(t *testing.T) {
	cfg := config.Default()
	cfg.CDISpecDirs, cfg.CDIKinds = []string{t.TempDir()}, []string{"nvidia.com/gpu"}
	refreshCDI(t.Context(), view{}, cfg, logrus.New())
	cfg.CDIKinds = append(cfg.CDIKinds, plan.KindGPU)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	refreshCDI(ctx, view{}, cfg, logrus.New())
}

type fakeLibrary struct {
	gpu.Library
	path string
	err  error
}

func (f fakeLibrary) Init() error             { return f.err }
func (f fakeLibrary) Driver() (string, error) { return f.path, nil }

// TestLibraryFollowsTheDriver: the GPU operator's driver may come after us, and elsewhere.
func TestLibraryFollowsTheDriver(t *testing.T) {
	at, fails := "", errors.New("no such library")
	l := &library{find: func() string { return at }, open: func(path string) gpu.Library { return fakeLibrary{path: path, err: fails} }}
	if err := l.Init(); !errors.Is(err, fails) {
		t.Errorf("got %v", err)
	}
	for _, path := range []string{"/run/nvidia/driver/usr/lib64/libnvidia-ml.so.1", "/other/libnvidia-ml.so.1"} {
		at, fails = path, nil
		if err := l.Init(); err != nil {
			t.Fatal(err)
		}
		at = "/later"
		if got, _ := l.Driver(); got != path {
			t.Errorf("got the library %s, want %s", got, path)
		}
	}
}
