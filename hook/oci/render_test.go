// SPDX-License-Identifier: Apache-2.0

package oci

import (
	"bytes"
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	specs "github.com/opencontainers/runtime-spec/specs-go"
	"tags.cncf.io/container-device-interface/pkg/cdi"

	"github.com/gpufence/gpufence/enforcer/quota"
	"github.com/gpufence/gpufence/hook/plan"
)

// config is what containerd writes, shortened, with fields in every place that nobody knows.
const config = `{
  "ociVersion": "1.3.0",
  "futureTop": {"b": 1.50, "a": [1e3]},
  "process": {
    "futureProcess": 18446744073709551616,
    "user": {"uid": 0, "gid": 0, "futureUser": "x", "additionalGids": [0, 10]},
    "args": ["/app"],
    "env": ["PATH=/bin", "NVIDIA_VISIBLE_DEVICES=all", "A=<&>", "GPUFENCE_MEMORY_MAX=1Gi", "NVIDIA_VISIBLE_DEVICES=0"],
    "cwd": "/",
    "capabilities": {"bounding": ["CAP_CHOWN"]}
  },
  "root": {"path": "rootfs"},
  "mounts": [
    {"destination": "/proc", "type": "proc", "source": "proc", "options": ["nosuid"], "futureMount": {"k": 0.10}},
    {"destination": "/dev", "type": "tmpfs", "source": "tmpfs"},
    {"destination": "/etc/ld.so.preload", "type": "bind", "source": "/home/u/preload", "options": ["bind"]}
  ],
  "hooks": {
    "createRuntime": [{"path": "/other", "futureHook": true}],
    "futureStage": [1]
  },
  "annotations": {"z": "1", "a": "2"},
  "linux": {
    "futureLinux": [0.0],
    "resources": {"devices": [{"allow": false, "access": "rwm", "futureRule": 7}], "memory": {"limit": 1073741824}, "unified": {"x.max": "1"}},
    "namespaces": [{"type": "pid"}],
    "devices": [{"path": "/dev/fuse", "type": "c", "major": 10, "minor": 229, "futureDevice": 1}]
  }
}
`

func testEdits() plan.Edits {
	return plan.Edits{
		SetEnv:   []string{"NVIDIA_VISIBLE_DEVICES=void"},
		UnsetEnv: []string{"GPUFENCE_MEMORY_*"},
		Mounts: []plan.File{
			{Source: "/run/gpufence/pods/p/limits", Destination: "/dev/gpufence/limits"},
			{Source: "/run/gpufence/pods/p/ledger", Destination: "/dev/gpufence/ledger", Writable: true},
			{Source: "/opt/gpufence/lib/libgpufence.so.1", Destination: "/dev/gpufence/lib64/libgpufence.so"},
			{Source: "/run/gpufence/pods/p/preload", Destination: "/etc/ld.so.preload"},
		},
		Hooks: []plan.Hook{
			{Stage: "createRuntime", Path: "/bin/gpufence-hook", Args: []string{"gpufence-hook", "createRuntime"}, TimeoutSeconds: 10},
			{Stage: "poststop", Path: "/bin/gpufence-hook", Args: []string{"gpufence-hook", "poststop"}},
		},
	}
}

var testPlace = place{shimDir: "/dev/gpufence", runDir: "/run/gpufence", majors: []int64{195, 510}}

func mustParse(t *testing.T, text string) *object {
	t.Helper()
	o, err := parseDocument([]byte(text))
	if err != nil {
		t.Fatal(err)
	}
	return o
}

func value(t *testing.T, raw []byte) any {
	t.Helper()
	dec := json.NewDecoder(bytes.NewReader(raw))
	dec.UseNumber()
	var v any
	if err := dec.Decode(&v); err != nil {
		t.Fatalf("%v in %s", err, raw)
	}
	return v
}

func TestRender(t *testing.T) {
	root := mustParse(t, config)
	if err := render(root, testEdits(), testPlace); err != nil {
		t.Fatal(err)
	}
	want := strings.NewReplacer(
		`"PATH=/bin", "NVIDIA_VISIBLE_DEVICES=all", "A=<&>", "GPUFENCE_MEMORY_MAX=1Gi", "NVIDIA_VISIBLE_DEVICES=0"`,
		`"PATH=/bin", "A=<&>", "NVIDIA_VISIBLE_DEVICES=void"`,
		`{"destination": "/etc/ld.so.preload", "type": "bind", "source": "/home/u/preload", "options": ["bind"]}`,
		`{"destination":"/dev/gpufence/limits","type":"bind","source":"/run/gpufence/pods/p/limits","options":["bind","private","nosuid","nodev","noexec","ro"]},
		 {"destination":"/dev/gpufence/ledger","type":"bind","source":"/run/gpufence/pods/p/ledger","options":["bind","private","nosuid","nodev","noexec","rw"]},
		 {"destination":"/dev/gpufence/lib64/libgpufence.so","type":"bind","source":"/opt/gpufence/lib/libgpufence.so.1","options":["bind","private","nosuid","nodev","ro"]},
		 {"destination":"/etc/ld.so.preload","type":"bind","source":"/run/gpufence/pods/p/preload","options":["bind","private","nosuid","nodev","noexec","ro"]}`,
		`{"path": "/other", "futureHook": true}`,
		`{"path": "/other", "futureHook": true}, {"path":"/bin/gpufence-hook","args":["gpufence-hook","createRuntime"],"timeout":10}`,
		`"futureStage": [1]`,
		`"futureStage": [1], "poststop":[{"path":"/bin/gpufence-hook","args":["gpufence-hook","poststop"]}]`,
	).Replace(config)
	if diff := cmp.Diff(value(t, []byte(want)), value(t, root.bytes())); diff != "" {
		t.Error(diff)
	}
	// Byte for byte, not only in meaning.
	for _, kept := range []string{
		`{"b": 1.50, "a": [1e3]}`, `18446744073709551616`, `[0.0]`, `{"k": 0.10}`, `"A=<&>"`,
		`{"allow": false, "access": "rwm", "futureRule": 7}`,
	} {
		if !strings.Contains(string(root.bytes()), kept) {
			t.Errorf("%s is gone or was written anew", kept)
		}
	}
}

// renderIn renders with the CDI specifications of the place.
func renderIn(root *object, e plan.Edits, p place) error {
	p.injection = func() *injection { return readInjection(root.bytes(), p.specs) }
	return render(root, e, p)
}

func TestRenderTwiceIsOnce(t *testing.T) {
	dir := t.TempDir()
	writeCDI(t, dir)
	deny := plan.Edits{DenyDevices: true, SetEnv: []string{"NVIDIA_VISIBLE_DEVICES=void"}}
	withCDI := testEdits()
	withCDI.CDIDevices = []string{"example.com/gpu=0", "example.com/gpu=1"}
	p := testPlace
	p.specs = []string{dir}
	wild := strings.Replace(config, `{"allow": false, "access": "rwm", "futureRule": 7}`, `{"allow": true, "access": "rwm"}, {"allow": true, "type": "c", "major": 195, "minor": 0, "access": "rw"}`, 1)
	for name, test := range map[string]struct {
		config string
		edits  plan.Edits
	}{
		"fenced": {config, testEdits()}, "cdi": {config, withCDI}, "denied": {config, deny}, "denied, all allowed": {wild, deny},
		"bare": {`{}`, withCDI}, "nothing": {config, plan.Edits{}},
	} {
		t.Run(name, func(t *testing.T) {
			root := mustParse(t, test.config)
			if err := renderIn(root, test.edits, p); err != nil {
				t.Fatal(err)
			}
			once := string(root.bytes())
			again := mustParse(t, once)
			if err := renderIn(again, test.edits, p); err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(value(t, []byte(once)), value(t, again.bytes())); diff != "" {
				t.Errorf("the second pass changed:\n%s", diff)
			}
			if again := string(again.bytes()); again != once {
				t.Errorf("got  %s\nwant %s", again, once)
			}
		})
	}
}

// TestRenderStandsIn: a library of ours goes over each mount of the driver's, and the driver's behind
// it, once, whatever pass it is and whichever version of ours was there.
func TestRenderStandsIn(t *testing.T) {
	mounts := func(root *object) map[string]string {
		list, err := root.list("mounts")
		if err != nil {
			t.Fatal(err)
		}
		out := map[string]string{}
		for _, raw := range list {
			m, err := parseMount(raw)
			if err != nil {
				t.Fatal(err)
			}
			if _, twice := out[m.Destination]; twice {
				t.Errorf("%s is mounted twice", m.Destination)
			}
			out[m.Destination] = m.Source
		}
		return out
	}
	const with = `{"mounts":[
		{"destination":"/usr/lib64/libcuda.so.570.133.20","type":"bind","source":"/drv/libcuda.so.570.133.20","options":["ro","bind"]},
		{"destination":"/usr/lib/x/libcuda.so.1","source":"/drv/libcuda.so.570.133.20","options":["rbind"]},
		{"destination":"/usr/lib64/libcudadebugger.so.1","type":"bind","source":"/drv/libcudadebugger.so.1","options":["bind"]},
		{"destination":"/tmp/libcuda.so","type":"tmpfs","source":"tmpfs"},
		{"destination":"/usr/lib64/libnvidia-ml.so.1","type":"bind","source":"/drv/libnvidia-ml.so.570","options":["bind"]}]}`
	stand := func(version string) plan.Edits {
		return plan.Edits{Mounts: []plan.File{
			{Source: "/opt/" + version + "/gpufence-stub/dev/libcuda.so.1", Destination: "/dev/gpufence/real/libcuda.so.1", Over: "libcuda.so"},
			{Source: "/opt/" + version + "/gpufence-stub/dev/libnvidia-ml.so.1", Destination: "/dev/gpufence/real/libnvidia-ml.so.1", Over: "libnvidia-ml.so"},
			{Source: "/run/gpufence/pods/p/limits", Destination: "/dev/gpufence/limits"},
		}}
	}
	want := func(version string) map[string]string {
		return map[string]string{
			"/usr/lib64/libcuda.so.570.133.20":     "/opt/" + version + "/gpufence-stub/dev/libcuda.so.1",
			"/usr/lib/x/libcuda.so.1":              "/opt/" + version + "/gpufence-stub/dev/libcuda.so.1",
			"/dev/gpufence/real/libcuda.so.1":      "/drv/libcuda.so.570.133.20",
			"/usr/lib64/libcudadebugger.so.1":      "/drv/libcudadebugger.so.1",
			"/tmp/libcuda.so":                      "tmpfs",
			"/usr/lib64/libnvidia-ml.so.1":         "/opt/" + version + "/gpufence-stub/dev/libnvidia-ml.so.1",
			"/dev/gpufence/real/libnvidia-ml.so.1": "/drv/libnvidia-ml.so.570",
			"/dev/gpufence/limits":                 "/run/gpufence/pods/p/limits",
		}
	}
	root := mustParse(t, with)
	for _, version := range []string{"1", "1", "2"} {
		if err := render(root, stand(version), testPlace); err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(want(version), mounts(root)); diff != "" {
			t.Errorf("version %s:\n%s", version, diff)
		}
	}
	t.Run("nothing to stand in for", func(t *testing.T) {
		root := mustParse(t, `{"mounts":[]}`)
		if err := render(root, stand("1"), testPlace); err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(map[string]string{"/dev/gpufence/limits": "/run/gpufence/pods/p/limits"}, mounts(root)); diff != "" {
			t.Error(diff)
		}
	})
	t.Run("somebody else's behind us", func(t *testing.T) {
		root := mustParse(t, `{"mounts":[{"destination":"/dev/gpufence/real/libcuda.so.1","type":"bind","source":"/theirs","options":["bind"]}]}`)
		var e *quota.Error
		if err := render(root, stand("1"), testPlace); !errors.As(err, &e) || e.Code != quota.CodeMountConflict {
			t.Errorf("got %v", err)
		}
	})
}

func TestRenderAfterAnUpgrade(t *testing.T) {
	root := mustParse(t, config)
	if err := render(root, testEdits(), testPlace); err != nil {
		t.Fatal(err)
	}
	next := testEdits()
	next.Mounts[2].Source = "/opt/gpufence-2/lib/libgpufence.so.1"
	next.Hooks[0].Path = "/opt/gpufence-2/gpufence-hook"
	if err := render(root, next, testPlace); err != nil {
		t.Fatal(err)
	}
	fresh := mustParse(t, config)
	if err := render(fresh, next, testPlace); err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(value(t, fresh.bytes()), value(t, root.bytes())); diff != "" {
		t.Error(diff)
	}
}

func TestRenderRefusesMountsOverOurs(t *testing.T) {
	for _, dest := range []string{"/dev/gpufence", "/dev/gpufence/", "/dev/gpufence/limits", "/dev//gpufence/lib64/x.so", "/dev/x/../gpufence/limits"} {
		root := mustParse(t, `{"mounts":[{"destination":"`+dest+`","type":"bind","source":"/home/u/x","options":["bind"]}]}`)
		err := render(root, testEdits(), testPlace)
		if !errors.Is(err, quota.CodeMountConflict) || !strings.Contains(err.Error(), "/home/u/x") {
			t.Errorf("%s: %v", dest, err)
		}
	}
	root := mustParse(t, `{"mounts":[{"destination":"/dev/gpufence-other","source":"/x"}]}`)
	if err := render(root, testEdits(), testPlace); err != nil {
		t.Error(err)
	}
}

func TestRenderDeny(t *testing.T) {
	tests := []struct{ name, rules, want string }{
		{"nothing is allowed", `[{"allow":false,"access":"rwm"}]`, `[{"allow":false,"access":"rwm"}]`},
		{"others are allowed", `[{"allow":false},{"allow":true,"type":"c","major":1,"minor":3}]`, `[{"allow":false},{"allow":true,"type":"c","major":1,"minor":3}]`},
		{"named", `[{"allow":false},{"allow":true,"type":"c","major":195,"minor":0},{"allow":true,"type":"c","major":510},{"allow":true,"type":"b","major":195}]`,
			`[{"allow":false},{"allow":true,"type":"b","major":195}]`},
		{"everything", `[{"allow":true,"access":"rwm"}]`,
			`[{"allow":true,"access":"rwm"},{"allow":false,"type":"c","major":195,"access":"rwm"},{"allow":false,"type":"c","major":510,"access":"rwm"}]`},
		{"every character device", `[{"allow":false},{"allow":true,"type":"c","major":-1,"minor":-1}]`,
			`[{"allow":false},{"allow":true,"type":"c","major":-1,"minor":-1},{"allow":false,"type":"c","major":195,"access":"rwm"},{"allow":false,"type":"c","major":510,"access":"rwm"}]`},
		{"everything, then nothing", `[{"allow":true},{"allow":false}]`, `[{"allow":true},{"allow":false}]`},
		{"every block device", `[{"allow":true,"type":"b"}]`, `[{"allow":true,"type":"b"}]`},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			root := mustParse(t, `{"linux":{"resources":{"devices":`+test.rules+`}}}`)
			if err := render(root, plan.Edits{DenyDevices: true}, testPlace); err != nil {
				t.Fatal(err)
			}
			if got, want := string(root.bytes()), `{"linux":{"resources":{"devices":`+test.want+`}}}`; got != want {
				t.Errorf("got  %s\nwant %s", got, want)
			}
		})
	}
	root := mustParse(t, `{"ociVersion":"1.0"}`)
	if err := render(root, plan.Edits{DenyDevices: true}, testPlace); err != nil || string(root.bytes()) != `{"ociVersion":"1.0"}` {
		t.Errorf("%s %v", root.bytes(), err)
	}
}

func TestRenderWrongTypes(t *testing.T) {
	e := testEdits()
	e.DenyDevices = true
	for _, text := range []string{
		`{"process":[]}`, `{"process":{"env":{}}}`, `{"process":{"env":[1]}}`, `{"mounts":{}}`, `{"mounts":["x"]}`, `{"mounts":[{"destination":1}]}`,
		`{"hooks":[]}`, `{"hooks":{"createRuntime":{}}}`, `{"hooks":{"poststop":[7]}}`, `{"linux":7}`, `{"linux":{"resources":[]}}`,
		`{"linux":{"resources":{"devices":{}}}}`, `{"linux":{"resources":{"devices":[{"allow":"yes"}]}}}`,
	} {
		err := render(mustParse(t, text), e, testPlace)
		if !errors.Is(err, quota.CodeSpecInvalid) {
			t.Errorf("%s: %v", text, err)
		}
	}
}

func TestNVIDIAMajors(t *testing.T) {
	const text = `Character devices:
  1 mem
195 nvidia
195 nvidiactl
234 nvidia-caps
509 nvidia-uvm
510 nvidia-nvswitch

Block devices:
  7 loop
 99 nvidia-disk
`
	want := []int64{195, 234, 509, 510}
	if diff := cmp.Diff(want, nvidiaMajors(strings.NewReader(text))); diff != "" {
		t.Error(diff)
	}
	if diff := cmp.Diff([]int64{195}, nvidiaMajors(strings.NewReader("garbage\n\n x y\n"))); diff != "" {
		t.Error(diff)
	}
}

// writeCDI writes two devices with an edit of every kind.
func writeCDI(t *testing.T, dir string) {
	t.Helper()
	writeFile(t, filepath.Join(dir, "gpu.yaml"), `
cdiVersion: "1.1.0"
kind: example.com/gpu
devices:
- name: "0"
  containerEdits:
    deviceNodes: [{path: /dev/nvidia0, hostPath: /dev/null, type: c, major: 195, minor: 0}]
    env: [GPU=zero]
- name: "1"
  containerEdits:
    deviceNodes: [{path: /dev/nvidia1, hostPath: /dev/zero, type: c, major: 195, minor: 1, permissions: rw}]
    netDevices: [{hostInterfaceName: eth7, name: gpu7}]
containerEdits:
  env: [NVIDIA_VISIBLE_DEVICES=void, LIB=/usr/lib/gpu]
  mounts:
  - {hostPath: /usr/lib/libcuda.so.1, containerPath: /usr/lib/libcuda.so.1, options: [ro, bind]}
  - {hostPath: /lib, containerPath: /proc, options: [ro]}
  hooks:
  - {hookName: createContainer, path: /bin/cdi-hook, args: [cdi-hook, ldcache], env: []}
  - {hookName: createRuntime, path: /bin/cdi-hook, args: [cdi-hook, limits]}
  intelRdt: {closID: gpu}
  additionalGids: [44, 10]
`)
}

func injectCDI(root *object, names, specDirs []string) error {
	return readInjection(root.bytes(), specDirs).inject(root, names, specDirs)
}

func TestInjectCDI(t *testing.T) {
	dir := t.TempDir()
	writeCDI(t, dir)
	root := mustParse(t, config)
	if err := injectCDI(root, []string{"example.com/gpu=1", "example.com/gpu=0"}, []string{dir}); err != nil {
		t.Fatal(err)
	}
	want := strings.NewReplacer(
		`"additionalGids": [0, 10]`, `"additionalGids": [0, 10, 44]`,
		`"GPUFENCE_MEMORY_MAX=1Gi", "NVIDIA_VISIBLE_DEVICES=0"`, `"GPUFENCE_MEMORY_MAX=1Gi", "NVIDIA_VISIBLE_DEVICES=void", "LIB=/usr/lib/gpu", "GPU=zero"`,
		// CDI orders mounts by depth.
		`{"destination": "/proc", "type": "proc", "source": "proc", "options": ["nosuid"], "futureMount": {"k": 0.10}},
    {"destination": "/dev", "type": "tmpfs", "source": "tmpfs"},
    {"destination": "/etc/ld.so.preload", "type": "bind", "source": "/home/u/preload", "options": ["bind"]}`,
		`{"destination": "/dev", "type": "tmpfs", "source": "tmpfs"},
    {"destination": "/proc", "source": "/lib", "options": ["ro"]},
    {"destination": "/etc/ld.so.preload", "type": "bind", "source": "/home/u/preload", "options": ["bind"]},
    {"destination": "/usr/lib/libcuda.so.1", "source": "/usr/lib/libcuda.so.1", "options": ["ro", "bind"]}`,
		`{"path": "/other", "futureHook": true}]`, `{"path": "/other", "futureHook": true}, {"path": "/bin/cdi-hook", "args": ["cdi-hook", "limits"]}]`,
		`"futureStage": [1]`, `"futureStage": [1], "createContainer": [{"path": "/bin/cdi-hook", "args": ["cdi-hook", "ldcache"]}]`,
		`"futureRule": 7}`, `"futureRule": 7}, {"allow": true, "type": "c", "major": 195, "minor": 1, "access": "rw"}, {"allow": true, "type": "c", "major": 195, "minor": 0, "access": "rwm"}`,
		`"futureDevice": 1}`, `"futureDevice": 1}, {"path": "/dev/nvidia1", "type": "c", "major": 195, "minor": 1, "fileMode": 438}, {"path": "/dev/nvidia0", "type": "c", "major": 195, "minor": 0, "fileMode": 438}`,
		`"futureLinux": [0.0],`, `"futureLinux": [0.0], "intelRdt": {"closID": "gpu"}, "netDevices": {"eth7": {"name": "gpu7"}},`,
	).Replace(config)
	if diff := cmp.Diff(value(t, []byte(want)), value(t, root.bytes())); diff != "" {
		t.Error(diff)
	}
}

// What CDI writes depends on parts of the configuration that it does not edit.
func TestInjectCDILooksAtUserAndNamespaces(t *testing.T) {
	dir := t.TempDir()
	writeFile(t, filepath.Join(dir, "gpu.yaml"), `
cdiVersion: "1.1.0"
kind: example.com/gpu
devices:
- name: "0"
  containerEdits:
    deviceNodes: [{path: /dev/nvidia0, type: c, major: 195, minor: 0}]
    mounts: [{hostPath: /lib, containerPath: /lib/gpu, type: bind, options: [bind]}]
`)
	root := mustParse(t, `{"process":{"user":{"uid":1000,"gid":100}},"linux":{"namespaces":[{"type":"user"}],
	"uidMappings":[{"containerID":0,"hostID":100000,"size":65536}],"gidMappings":[{"containerID":0,"hostID":100000,"size":65536}]}}`)
	if err := injectCDI(root, []string{"example.com/gpu=0"}, []string{dir}); err != nil {
		t.Fatal(err)
	}
	type mount struct{ Options []string }
	var got struct {
		Linux  struct{ Devices []struct{ UID, GID uint32 } }
		Mounts []mount
	}
	if err := json.Unmarshal(root.bytes(), &got); err != nil {
		t.Fatal(err)
	}
	if d := got.Linux.Devices; len(d) != 1 || d[0].UID != 1000 || d[0].GID != 100 {
		t.Errorf("devices %+v", d)
	}
	if !slices.ContainsFunc(got.Mounts, func(m mount) bool { return slices.Contains(m.Options, "idmap") }) {
		t.Errorf("mounts %+v", got.Mounts)
	}
}

// What is not decoded must be nothing to the CDI library, of whatever version it is.
func TestDecodesWhatCDIEdits(t *testing.T) {
	dir := t.TempDir()
	writeCDI(t, dir)
	cache, err := cdi.NewCache(cdi.WithSpecDirs(dir), cdi.WithAutoRefresh(false))
	if err != nil {
		t.Fatal(err)
	}
	const mapped = `{"process":{"user":{"uid":1000,"gid":100}},"linux":{"namespaces":[{"type":"user"}],
	"uidMappings":[{"containerID":0,"hostID":100000,"size":65536}],"gidMappings":[{"containerID":0,"hostID":100000,"size":65536}],
	"intelRdt":{"closID":"other"},"netDevices":{"eth0":{"name":"x"}},"resources":{"devices":[{"allow":false,"access":"rwm"}]}}}`
	for _, text := range []string{config, mapped, `{}`, `{"process":{},"linux":{}}`, `{"linux":{"resources":{}},"hooks":{}}`, `{"process":null,"linux":null,"mounts":null}`} {
		edited := func(s *specs.Spec) string {
			root := mustParse(t, text)
			before, err := decodeEdited([]byte(text))
			if err != nil {
				t.Fatal(err)
			}
			if _, err := cache.InjectDevices(s, "example.com/gpu=1", "example.com/gpu=0"); err != nil {
				t.Fatal(err)
			}
			if err := carryOver(root, &before, s); err != nil {
				t.Fatal(err)
			}
			return string(root.bytes())
		}
		var whole specs.Spec
		if err := json.Unmarshal([]byte(text), &whole); err != nil {
			t.Fatal(err)
		}
		part, err := decodeEdited([]byte(text))
		if err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(edited(&whole), edited(&part)); diff != "" {
			t.Errorf("%.80s: -of the whole +of what is decoded\n%s", text, diff)
		}
	}
}

func TestInjectCDIAllowsAgainAfterADenial(t *testing.T) {
	dir := t.TempDir()
	writeCDI(t, dir)
	root := mustParse(t, `{"linux":{"resources":{"devices":[{"allow":true,"type":"c","major":195,"minor":0,"access":"rwm"},{"allow":false,"access":"rwm"}]}}}`)
	for range 2 {
		if err := injectCDI(root, []string{"example.com/gpu=0"}, []string{dir}); err != nil {
			t.Fatal(err)
		}
	}
	var got struct {
		Linux struct {
			Resources struct{ Devices []struct{ Allow bool } }
		}
	}
	if err := json.Unmarshal(root.bytes(), &got); err != nil {
		t.Fatal(err)
	}
	if d := got.Linux.Resources.Devices; len(d) != 3 || !d[2].Allow {
		t.Errorf("rules %+v", d)
	}
}

func TestInjectCDIRefuses(t *testing.T) {
	dir := t.TempDir()
	writeCDI(t, dir)
	broken := t.TempDir()
	writeFile(t, filepath.Join(broken, "broken.yaml"), "kind: [")
	tests := []struct {
		name, config, device, dir string
		code                      quota.Code
		says                      string
	}{
		{"unknown device", config, "example.com/gpu=7", dir, quota.CodeNoCDIDevice, "example.com/gpu=7"},
		{"not a name", config, "gpu", dir, quota.CodeNoCDIDevice, "gpu"},
		{"broken specification", config, "example.com/gpu=0", broken, quota.CodeNoCDIDevice, "broken.yaml"},
		{"no folder", config, "example.com/gpu=0", filepath.Join(dir, "none"), quota.CodeNoCDIDevice, "example.com/gpu=0"},
		{"section of another type", `{"linux":{"intelRdt":7}}`, "example.com/gpu=0", dir, quota.CodeSpecInvalid, "intelRdt"},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			root := mustParse(t, test.config)
			before := string(root.bytes())
			err := injectCDI(root, []string{test.device}, []string{test.dir})
			if !errors.Is(err, test.code) || !strings.Contains(err.Error(), test.says) || strings.ContainsRune(err.Error(), '\n') {
				t.Errorf("got %v", err)
			}
			if string(root.bytes()) != before {
				t.Error("the document was changed")
			}
		})
	}
}

// Rendering never loses a member that it does not edit, and twice is once.
func FuzzRender(f *testing.F) {
	f.Add([]byte(config))
	f.Add([]byte(`{"mounts":null,"process":null,"hooks":null,"linux":null}`))
	f.Add([]byte(`{"process":{"env":["A","=","A=b"]},"Mounts":[{"Destination":"/dev"}]}`))
	f.Add([]byte(`{"linux":{"resources":{"devices":[{"allow":true},{"allow":true,"type":"a","major":195}]}}}`))
	dir := f.TempDir()
	text := `{"cdiVersion":"0.6.0","kind":"example.com/gpu","devices":[{"name":"0","containerEdits":{"env":["G=1"],"hooks":[{"hookName":"poststop","path":"/h"}],"mounts":[{"hostPath":"/a","containerPath":"/b"}]}}]}`
	if err := os.WriteFile(filepath.Join(dir, "gpu.json"), []byte(text), 0o644); err != nil {
		f.Fatal(err)
	}
	f.Fuzz(func(t *testing.T, text []byte) {
		root, err := parseDocument(text)
		if err != nil {
			return
		}
		if err := checkNames(root); err != nil {
			return
		}
		names := map[string]string{}
		for _, m := range root.members {
			names[m.name] = string(m.value)
		}
		e := testEdits()
		e.CDIDevices, e.DenyDevices = []string{"example.com/gpu=0"}, true
		p := testPlace
		p.specs = []string{dir}
		if err := renderIn(root, e, p); err != nil {
			if quota.CodeOf(err) == "" {
				t.Fatalf("error without a code: %v", err)
			}
			return
		}
		once := root.bytes()
		if !json.Valid(once) {
			t.Fatalf("not JSON: %s", once)
		}
		for name, v := range names {
			switch fold(name) {
			case fold("process"), fold("mounts"), fold("hooks"), fold("linux"):
			default:
				if got := string(root.get(name)); got != v {
					t.Fatalf("%q was %s and is %s", name, v, got)
				}
			}
		}
		again, err := parseDocument(once)
		if err != nil {
			t.Fatal(err)
		}
		if err := renderIn(again, e, p); err != nil {
			t.Fatalf("refuses its own work: %v\n%s", err, once)
		}
		if !bytes.Equal(again.bytes(), once) {
			t.Fatalf("twice is not once:\n%s\n%s", once, again.bytes())
		}
	})
}

func TestIsLibrary(t *testing.T) {
	for name, want := range map[string]bool{
		"/dev/gpufence/lib64/libgpufence.so": true, "/usr/lib/libcuda.so.1": true, "/dev/gpufence/limits": false,
		"/dev/gpufence/memory.max": false, "/etc/ld.so.preload": false, "/lib.so/ledger": false,
	} {
		if got := isLibrary(name); got != want {
			t.Errorf("%s: %v", name, got)
		}
	}
}
