// SPDX-License-Identifier: Apache-2.0

package cdi

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
	"tags.cncf.io/container-device-interface/pkg/cdi"
	specs "tags.cncf.io/container-device-interface/specs-go"

	"github.com/gpufence/gpufence/hook/plan"
)

func write(t *testing.T, path, text string) string {
	t.Helper()
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
	return path
}

// TestFindRoot: where the driver is the host's, in the GPU operator's container, Google's.
func TestFindRoot(t *testing.T) {
	multi := map[string]string{"amd64": "x86_64-linux-gnu", "arm64": "aarch64-linux-gnu"}[runtime.GOARCH]
	tests := []struct {
		name        string
		files       []string
		by          string
		driver, dev string
	}{
		{"Debian", []string{"usr/lib/" + multi + "/libnvidia-ml.so.1", "dev/nvidiactl"}, "host", "", ""},
		{"Fedora", []string{"usr/lib64/libnvidia-ml.so.1"}, "host", "", ""},
		{"the operator's, with nodes of its own", []string{"run/nvidia/driver/usr/lib/" + multi + "/libnvidia-ml.so.1", "run/nvidia/driver/dev/nvidiactl"}, "operator", "run/nvidia/driver", "run/nvidia/driver"},
		{"the operator's, with the host's nodes", []string{"run/nvidia/driver/usr/lib64/libnvidia-ml.so.1", "dev/nvidiactl"}, "operator", "run/nvidia/driver", ""},
		{"GKE", []string{"home/kubernetes/bin/nvidia/lib64/libnvidia-ml.so.1", "dev/nvidiactl"}, "gke", "home/kubernetes/bin/nvidia", ""},
		{"the host's before the operator's", []string{"usr/lib64/libnvidia-ml.so.1", "run/nvidia/driver/usr/lib64/libnvidia-ml.so.1"}, "host", "", ""},
	}
	for _, tt := range tests {
		base := t.TempDir()
		for _, f := range tt.files {
			write(t, filepath.Join(base, f), "ELF")
		}
		got, err := FindRoot(base)
		if err != nil {
			t.Errorf("%s: %v", tt.name, err)
			continue
		}
		if got.By != tt.by || got.Driver != filepath.Join(base, tt.driver) || got.Dev != filepath.Join(base, tt.dev) || got.NVML == "" {
			t.Errorf("%s: %+v", tt.name, got)
		}
	}
	if _, err := FindRoot(t.TempDir()); !errors.Is(err, ErrNoDriver) || !strings.Contains(err.Error(), "/run/nvidia/driver") {
		t.Errorf("no driver: %v", err)
	}
}

func device(t *testing.T, edits specs.ContainerEdits) *cdi.Device {
	t.Helper()
	dir := t.TempDir()
	spec := specs.Spec{Version: "0.8.0", Kind: "nvidia.com/gpu", Devices: []specs.Device{{Name: "0", ContainerEdits: edits}}}
	text, err := json.Marshal(spec)
	if err != nil {
		t.Fatal(err)
	}
	write(t, filepath.Join(dir, "x.json"), string(text))
	cache, err := cdi.NewCache(cdi.WithSpecDirs(dir), cdi.WithAutoRefresh(false))
	if err != nil {
		t.Fatal(err)
	}
	d := cache.GetDevice("nvidia.com/gpu=0")
	if d == nil {
		t.Fatalf("the library has no device: %v", cache.GetErrors())
	}
	return d
}

func TestStale(t *testing.T) {
	var null unix.Stat_t
	if err := unix.Stat("/dev/null", &null); err != nil {
		t.Fatal(err)
	}
	major, minor := int64(unix.Major(null.Rdev)), int64(unix.Minor(null.Rdev))
	lib := write(t, filepath.Join(t.TempDir(), "libcuda.so.550"), "ELF")
	gone := filepath.Join(t.TempDir(), "gone")
	tests := []struct {
		name  string
		edits specs.ContainerEdits
		want  string // "" if it can be used
	}{
		{"nothing to find", specs.ContainerEdits{Env: []string{"A=1"}}, ""},
		{"everything is there", specs.ContainerEdits{
			Mounts:      []*specs.Mount{{HostPath: lib, ContainerPath: "/x"}},
			DeviceNodes: []*specs.DeviceNode{{Path: "/dev/nvidia0", HostPath: "/dev/null"}},
			Hooks:       []*specs.Hook{{HookName: "createContainer", Path: lib}},
		}, ""},
		{"a tmpfs has no source", specs.ContainerEdits{Mounts: []*specs.Mount{{HostPath: "tmpfs", ContainerPath: "/x", Type: "tmpfs"}}}, ""},
		{"pitfall 56: the driver was upgraded", specs.ContainerEdits{Mounts: []*specs.Mount{{HostPath: gone, ContainerPath: "/x"}}},
			"names " + gone + ", which is not there: it was written for another driver"},
		{"pitfall 9: a number that is right", specs.ContainerEdits{DeviceNodes: []*specs.DeviceNode{{Path: "/dev/nvidia-uvm", HostPath: "/dev/null", Type: "c", Major: major, Minor: minor}}}, ""},
		{"pitfall 9: nvidia-uvm has another number since the reboot", specs.ContainerEdits{DeviceNodes: []*specs.DeviceNode{{Path: "/dev/nvidia-uvm", HostPath: "/dev/null", Type: "c", Major: 511, Minor: 0}}},
			fmt.Sprintf("says that /dev/null has the number 511:0, and it has %d:%d", major, minor)},
		{"pitfall 10: nvidia-uvm is not loaded", specs.ContainerEdits{DeviceNodes: []*specs.DeviceNode{{Path: gone}}},
			"names the device node " + gone + ", which is not there: load the module (`nvidia-modprobe -u -c=0`)"},
		{"a hook that was uninstalled", specs.ContainerEdits{Hooks: []*specs.Hook{{HookName: "createContainer", Path: gone}}}, "has a hook " + gone + ", which is not there"},
	}
	for _, tt := range tests {
		err := Stale(device(t, tt.edits))
		switch {
		case tt.want == "" && err != nil:
			t.Errorf("%s: %v", tt.name, err)
		case tt.want != "" && (err == nil || !strings.HasSuffix(err.Error(), tt.want)):
			t.Errorf("%s: got %v, want ... %s", tt.name, err, tt.want)
		}
	}
}

func ours(name string) *specs.Spec {
	s := &specs.Spec{Kind: plan.KindGPU, Devices: []specs.Device{{Name: name, ContainerEdits: specs.ContainerEdits{Env: []string{"A=1"}}}}}
	Mark(s, For{Driver: "550", GPUs: []string{name}})
	return s
}

// TestOwned: nobody else's file is touched.
func TestOwned(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "sub", FileName)
	if removed, err := Remove(path); removed || err != nil {
		t.Errorf("nothing there: %t %v", removed, err)
	}
	if err := Write(path, ours("GPU-a")); err != nil {
		t.Fatal(err)
	}
	f, err := Read(path)
	if err != nil || f.Driver != "550" || !slices.Equal(f.GPUs, []string{"GPU-a"}) {
		t.Errorf("read %+v, %v", f, err)
	}
	if _, err := cdi.ReadSpec(path, 0); err != nil {
		t.Errorf("the library does not take it: %v", err)
	}
	if err := Write(path, ours("GPU-b")); err != nil {
		t.Fatal(err)
	}
	if err := Write(path, &specs.Spec{Kind: plan.KindGPU}); err == nil {
		t.Error("a specification without our mark was written")
	}
	left, err := os.ReadDir(filepath.Dir(path))
	if err != nil || len(left) != 1 {
		t.Errorf("left behind: %v %v", left, err)
	}
	if removed, err := Remove(path); !removed || err != nil {
		t.Errorf("remove: %t %v", removed, err)
	}

	for name, put := range map[string]func(string){
		"of somebody else": func(p string) { write(t, p, `{"cdiVersion":"0.6.0","kind":"nvidia.com/gpu"}`) },
		"no JSON":          func(p string) { write(t, p, "kind: nvidia.com/gpu") },
		"a link to ours": func(p string) {
			target := filepath.Join(dir, "target.json")
			if err := Write(target, ours("GPU-a")); err != nil {
				t.Fatal(err)
			}
			if err := os.Symlink(target, p); err != nil {
				t.Fatal(err)
			}
		},
		"a folder": func(p string) {
			if err := os.Mkdir(p, 0o755); err != nil {
				t.Fatal(err)
			}
		},
	} {
		p := filepath.Join(t.TempDir(), FileName)
		put(p)
		before, err := os.Lstat(p)
		if err != nil {
			t.Fatal(err)
		}
		if err := Write(p, ours("GPU-a")); !errors.Is(err, ErrNotOurs) {
			t.Errorf("%s: write: %v", name, err)
		}
		if removed, err := Remove(p); removed || !errors.Is(err, ErrNotOurs) {
			t.Errorf("%s: remove: %t %v", name, removed, err)
		}
		if after, err := os.Lstat(p); err != nil || !os.SameFile(before, after) || before.ModTime() != after.ModTime() {
			t.Errorf("%s: it was touched: %v", name, err)
		}
	}
}

// TestRefresh walks a node through its life.
func TestRefresh(t *testing.T) {
	etc, run := t.TempDir(), filepath.Join(t.TempDir(), "cdi")
	lib := write(t, filepath.Join(t.TempDir(), "libcuda.so.550"), "ELF")
	generated, broken := 0, false
	r := Refresher{Dirs: []string{etc, run}, Kinds: []string{"nvidia.com/gpu", plan.KindGPU, "gpufence.dev/simgpu"}}
	gpus := []GPU{{UUID: "GPU-a", Position: "0"}, {UUID: "GPU-b", Position: "1"}}
	r.Generate = func(context.Context) (*specs.Spec, error) {
		generated++
		if broken {
			return nil, errors.New("nvidia-smi fails as well")
		}
		s := &specs.Spec{Kind: plan.KindGPU}
		for _, g := range gpus {
			s.Devices = append(s.Devices, specs.Device{Name: g.UUID, ContainerEdits: specs.ContainerEdits{Mounts: []*specs.Mount{{HostPath: lib, ContainerPath: "/usr/lib/libcuda.so.1"}}}})
		}
		return s, nil
	}
	facts := Facts{Driver: "550", GPUs: gpus}
	var want string
	step := func(name string, f Facts, did string, more int, there bool) {
		t.Helper()
		before := generated
		got, err := r.Once(t.Context(), f)
		if want != "" {
			if err == nil || !strings.Contains(err.Error(), want) {
				t.Errorf("%s: got %v, want %s", name, err, want)
			}
		} else if err != nil {
			t.Errorf("%s: %v", name, err)
		}
		if !strings.HasPrefix(got, did) || did == "" && got != "" || generated-before != more {
			t.Errorf("%s: did %q, generated %d times", name, got, generated-before)
		}
		if _, err := os.Lstat(r.Path()); (err == nil) != there {
			t.Errorf("%s: our file: %v", name, err)
		}
	}
	step("nothing is known yet", Facts{Driver: "550"}, "", 0, false)
	step("nobody describes the GPUs", facts, "wrote ", 1, true)
	step("nothing changed", facts, "", 0, true)
	step("the driver is another", Facts{Driver: "560", GPUs: gpus}, "wrote ", 1, true)
	step("a GPU is gone", Facts{Driver: "560", GPUs: gpus[:1]}, "wrote ", 1, true)
	step("it is back", Facts{Driver: "560", GPUs: gpus}, "wrote ", 1, true)
	if err := os.Rename(lib, lib+".old"); err != nil {
		t.Fatal(err)
	}
	lib += ".old"
	step("a file that it names is gone", Facts{Driver: "560", GPUs: gpus}, "wrote ", 1, true)
	step("the driver is let go", Facts{Driver: "560", GPUs: gpus, Down: "quiesced"}, "removed ", 0, false)
	step("it stays away", Facts{Driver: "560", GPUs: gpus, Down: "quiesced"}, "", 0, false)
	step("the driver is back", facts, "wrote ", 1, true)
	toolkit := func(names ...string) {
		t.Helper()
		var devices []string
		for _, n := range names {
			devices = append(devices, `{"name":"`+n+`","containerEdits":{"env":["A=1"]}}`)
		}
		write(t, filepath.Join(run, "nvidia.json"), `{"cdiVersion":"0.6.0","kind":"nvidia.com/gpu","devices":[`+strings.Join(devices, ",")+`]}`)
	}
	toolkit("0")
	step("the toolkit describes one of two", facts, "", 0, true)
	toolkit("0", "GPU-b")
	step("the toolkit describes all", facts, "removed ", 0, false)
	write(t, filepath.Join(run, "nvidia.json"), `{"cdiVersion":"0.6.0","kind":"nvidia.com/gpu","devices":[{"name":"0","containerEdits":{"mounts":[{"hostPath":"/nowhere/libcuda.so.535","containerPath":"/x"}]}},{"name":"1","containerEdits":{"env":["A=1"]}}]}`)
	step("the toolkit's is stale", facts, "wrote ", 1, true)
	broken, want = true, "nvidia-smi fails as well"
	step("what is there is wrong, and nothing can be generated", Facts{Driver: "570", GPUs: gpus}, "", 1, false)
	broken, want = false, "not a file that gpufenced wrote"
	write(t, r.Path(), "kind: nvidia.com/gpu")
	step("somebody has a file by our name", facts, "", 0, true)
	want = ""
	step("which stays when the driver goes", Facts{Down: "quiesced"}, "", 0, true)

	r.Kinds = []string{"nvidia.com/gpu"}
	if r.Path() != "" {
		t.Errorf("a node that does not want our kind: %s", r.Path())
	}
	if did, err := r.Once(t.Context(), facts); did != "" || err != nil {
		t.Errorf("got %q %v", did, err)
	}
}

// TestSimulatedIsEnough: simulated GPUs have a kind of their own, and nothing is generated.
func TestSimulatedIsEnough(t *testing.T) {
	dir := t.TempDir()
	write(t, filepath.Join(dir, "simgpu.json"), `{"cdiVersion":"0.6.0","kind":"gpufence.dev/simgpu","devices":[{"name":"GPU-a","containerEdits":{"env":["A=1"]}}]}`)
	r := Refresher{Dirs: []string{dir}, Kinds: []string{"nvidia.com/gpu", plan.KindGPU, "gpufence.dev/simgpu"}, Generate: func(context.Context) (*specs.Spec, error) {
		t.Error("it was generated")
		return nil, errors.New("no")
	}}
	if did, err := r.Once(t.Context(), Facts{Driver: "550", GPUs: []GPU{{UUID: "GPU-a", Position: "0"}}}); did != "" || err != nil {
		t.Errorf("got %q %v", did, err)
	}
}

// TestWithoutHooks: a library is found by the name that programs are linked with.
func TestWithoutHooks(t *testing.T) {
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	libc := ""
	for _, p := range []string{"/lib/x86_64-linux-gnu/libc.so.6", "/lib64/libc.so.6", "/lib/aarch64-linux-gnu/libc.so.6"} {
		if exists(p) {
			libc = p
		}
	}
	if libc == "" {
		if os.Getenv("GPUFENCE_MUST") == "1" {
			t.Fatal("this machine has no glibc to take for a library")
		}
		t.Skip("SKIPPED: this machine has no glibc to take for a library")
	}
	s := &specs.Spec{ContainerEdits: specs.ContainerEdits{
		Hooks: []*specs.Hook{{HookName: "createContainer", Path: "/usr/bin/nvidia-cdi-hook"}},
		Mounts: []*specs.Mount{
			{HostPath: libc, ContainerPath: "/usr/lib/nvidia/libcuda.so.550.1", Options: []string{"ro"}},
			{HostPath: exe, ContainerPath: "/usr/bin/nvidia-smi"},
			{HostPath: exe, ContainerPath: "/usr/lib/libx.so.1"},
		},
	}}
	WithoutHooks(s)
	var at []string
	for _, m := range s.ContainerEdits.Mounts {
		at = append(at, m.ContainerPath)
	}
	for _, want := range []string{"/usr/lib/nvidia/libcuda.so.550.1", "/usr/lib/nvidia/libc.so.6", "/usr/lib64/libc.so.6", "/usr/bin/nvidia-smi"} {
		if !slices.Contains(at, want) {
			t.Errorf("no mount at %s: %q", want, at)
		}
	}
	if len(at) != 6 || len(s.ContainerEdits.Hooks) != 0 {
		t.Errorf("%d mounts at %q, %d hooks", len(at), at, len(s.ContainerEdits.Hooks))
	}
}
