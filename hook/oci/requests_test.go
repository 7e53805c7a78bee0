// SPDX-License-Identifier: Apache-2.0

package oci

import (
	"bytes"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/gpufence/gpufence/enforcer/api"
	"github.com/gpufence/gpufence/enforcer/quota"
	"github.com/gpufence/gpufence/hook/plan"
)

const asking = `{
	"process": {"args": ["/app"], "env": ["NVIDIA_VISIBLE_DEVICES=all", "DOCKER_RESOURCE_GPU=all"]},
	"mounts": [
		{"destination": "/var/run/nvidia-container-devices/all", "source": "/dev/null", "type": "bind", "options": ["bind"]},
		{"destination": "/data", "source": "/dev/null", "type": "bind", "options": ["bind"], "future": 1.0}
	],
	"annotations": {"gpufence.dev/memory.max": "4Gi", "cdi.k8s.io/x": "nvidia.com/gpu=all", "CDI.k8s.io/y": "stays"},
	"linux": {"namespaces": [{"type": "pid"}], "devices": [{"path": "/dev/nvidia0", "type": "c", "major": 195, "minor": 1}]}
}`

// TestNothingElseAsks: beside the GPU that is in the spec nothing is left from which a low-level
// nvidia-container-runtime would add one, and the limit is for the GPU that the node opens.
func TestNothingElseAsks(t *testing.T) {
	d := startDaemon(t)
	d.answer = api.PrepareResponse{Grant: quota.Grant{GPUs: []quota.GPU{{UUID: gpuUUID}}, Mode: quota.ModeEnforce}}
	b := newBench(t, "gpufence-runtime.docker", asking, d.socket)
	if !b.create() {
		t.Fatalf("refused: %s", b.stderr.String())
	}
	if len(d.prepared) != 1 || !slices.Equal(d.prepared[0].Devices.Selectors, []string{"/dev/nvidia1"}) || !d.prepared[0].Devices.Present {
		t.Errorf("asked for %+v", d.prepared)
	}
	text, err := os.ReadFile(b.config)
	if err != nil {
		t.Fatal(err)
	}
	for _, gone := range []string{"nvidia-container-devices", "cdi.k8s.io/x", "=all"} {
		if strings.Contains(string(text), gone) {
			t.Errorf("%s is left in %s", gone, text)
		}
	}
	for _, kept := range []string{`{"destination": "/data", "source": "/dev/null", "type": "bind", "options": ["bind"], "future": 1.0}`, "CDI.k8s.io/y", "DOCKER_RESOURCE_GPU=void", "gpufence.dev/memory.max"} {
		if !strings.Contains(string(text), kept) {
			t.Errorf("%s is gone from %s", kept, text)
		}
	}
}

func TestRenderDrops(t *testing.T) {
	root := mustParse(t, asking)
	if err := renderDrops(root, []string{"/data", "/elsewhere"}, []string{"absent"}); err != nil {
		t.Fatal(err)
	}
	if strings.Contains(string(root.bytes()), "/data") || !strings.Contains(string(root.bytes()), "devices/all") {
		t.Errorf("got %s", root.bytes())
	}
	for text, say := range map[string]string{`{"mounts":[7]}`: "mounts[0]", `{"mounts":{}}`: "mounts", `{"annotations":[]}`: "annotations"} {
		if err := renderDrops(mustParse(t, text), []string{"/x"}, []string{"y"}); err == nil || !strings.Contains(err.Error(), say) {
			t.Errorf("%s: %v", text, err)
		}
	}
	// Only a mount of /dev/null is a request.
	root = mustParse(t, `{"mounts":[{"destination":"/x","source":"/srv"}]}`)
	if err := renderDrops(root, []string{"/x"}, nil); err != nil || !strings.Contains(string(root.bytes()), "/srv") {
		t.Errorf("%v %s", err, root.bytes())
	}
}

// TestRenderDenyPartly: what takes back a part of a wildcard leaves NVIDIA's devices allowed, unless they are denied.
func TestRenderDenyPartly(t *testing.T) {
	const denied = `{"allow":false,"type":"c","major":195,"access":"rwm"}`
	for rules, want := range map[string]bool{
		`{"allow":false,"access":"rwm"}`:                                                  false,
		`{"allow":true,"access":"rwm"}`:                                                   true,
		`{"allow":true,"access":"rwm"},{"allow":false,"type":"c","minor":5}`:              true,
		`{"allow":true,"access":"rwm"},{"allow":false,"access":"m"}`:                      true,
		`{"allow":true,"access":"rwm"},{"allow":false,"type":"b"}`:                        true,
		`{"allow":true,"access":"rwm"},{"allow":false}`:                                   false,
		`{"allow":true,"access":"rwm"},{"allow":false,"major":-1,"minor":-1,"type":"a"}`:  false,
		`{"allow":false,"access":"rwm"},{"allow":true,"type":"c","minor":0,"access":"r"}`: true,
	} {
		root := mustParse(t, `{"linux":{"resources":{"devices":[`+rules+`]}}}`)
		if err := render(root, plan.Edits{DenyDevices: true}, place{majors: []int64{195}}); err != nil {
			t.Fatal(err)
		}
		if got := strings.Contains(string(root.bytes()), denied); got != want {
			t.Errorf("%s\ngot %s", rules, root.bytes())
		}
	}
}

// TestRestoreWithoutHooks: what would not be registered does not come back with a GPU.
func TestRestoreWithoutHooks(t *testing.T) {
	d := startDaemon(t)
	d.answer = api.PrepareResponse{Grant: quota.Grant{GPUs: []quota.GPU{{UUID: gpuUUID}}, Mode: quota.ModeEnforce}}
	b := newBench(t, "gpufence-runtime.docker", asking, d.socket)
	restore := func() bool {
		return b.run("--log", b.log, "--log-format", "json", "restore", "--bundle", b.bundle, "c1")
	}
	if !restore() {
		t.Errorf("runc runs hooks: %s", b.stderr.String())
	}
	crun := program(t, filepath.Join(b.dir, "bin", "crun"))
	if err := os.Symlink(crun, filepath.Join(b.dir, "bin", "nvidia-container-runtime")); err != nil {
		t.Fatal(err)
	}
	if restore() || !strings.Contains(b.stderr.String(), "gpufence: E1007 the low-level runtime runs no hooks when it restores") {
		t.Errorf("said %s", b.stderr.String())
	}
	if !b.create() {
		t.Errorf("create is another matter: %s", b.stderr.String())
	}
	b = newBench(t, "gpufence-runtime.docker", `{"linux":{"namespaces":[{"type":"pid"}]}}`, d.socket)
	b.w.Settings.Runtimes = []string{program(t, filepath.Join(b.dir, "crun"))}
	if !restore() {
		t.Errorf("without a GPU: %s", b.stderr.String())
	}
}

// TestPrecreateObserves: a mode that refuses nothing also refuses nothing of which it does not know what it is.
func TestPrecreateObserves(t *testing.T) {
	const unknown = `{"process": {"args": ["/app"]}, "annotations": {"gpufence.dev/memory.max": "4Gi"}}`
	for mode, started := range map[quota.Mode]bool{quota.ModeEnforce: false, quota.ModeObserve: true} {
		var out, errOut bytes.Buffer
		p := Precreate{
			Wrapper: Wrapper{Settings: Settings{Policy: quota.DefaultPolicy(), HookPath: program(t, filepath.Join(t.TempDir(), "gpufence-hook"))}},
			Args:    HookArgs{Stage: StagePrecreate, Engine: quota.EnginePodman, Scope: defaultScope},
			Stdin:   strings.NewReader(unknown), Stdout: &out, Stderr: &errOut,
		}
		p.Wrapper.Settings.Policy.Mode = mode
		if exit := p.Run(t.Context()); exit != 0 || (strings.TrimSpace(out.String()) == unknown) != started || !strings.Contains(errOut.String(), "which container of Podman's it is") {
			t.Errorf("%s: exit %d, %s, said %s", mode, exit, out.String(), errOut.String())
		}
	}
}
