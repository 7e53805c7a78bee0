// SPDX-License-Identifier: Apache-2.0

package oci

import (
	"errors"
	"os"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/gpufence/gpufence/enforcer/api"
	"github.com/gpufence/gpufence/enforcer/quota"
	"github.com/gpufence/gpufence/hook/plan"
)

func docOf(t *testing.T, text string) *document {
	t.Helper()
	return &document{path: "/b/config.json", text: []byte(text), root: mustParse(t, text)}
}

const criConfig = `{
  "process": {"args": ["/app", "x"], "env": ["A=1", "B=2"], "cwd": "/w", "capabilities": {"bounding": ["CAP_CHOWN"]}},
  "root": {"path": "rootfs"},
  "mounts": [
    {"destination": "/dev", "type": "tmpfs", "source": "tmpfs"},
    {"destination": "/dev/termination-log", "type": "bind", "source": "/var/lib/kubelet/t", "options": ["rbind", "rw"]},
    {"destination": "/data", "type": "bind", "source": "data", "options": ["bind"]}
  ],
  "linux": {"namespaces": [{"type": "pid"}, {"type": "mount"}], "devices": [{"path": "/dev/nvidia0"}]},
  "annotations": {
    "gpufence.dev/memory.max": "4Gi",
    "cdi.k8s.io/b": "nvidia.com/gpu=1, nvidia.com/gpu=0",
    "cdi.k8s.io/a": "nvidia.com/gpu=0,",
    "io.kubernetes.cri.container-type": "container",
    "io.kubernetes.cri.sandbox-id": "sandbox1",
    "io.kubernetes.cri.sandbox-namespace": "team-a",
    "io.kubernetes.cri.sandbox-name": "notebook",
    "io.kubernetes.cri.sandbox-uid": "uid1",
    "io.kubernetes.cri.container-name": "main"
  }
}`

func TestReadContainer(t *testing.T) {
	d := docOf(t, criConfig)
	c, err := readContainer(d, quota.EngineCRI, "c1", "/bundle")
	if err != nil {
		t.Fatal(err)
	}
	in := plan.Input{
		Engine: quota.EngineCRI, ID: "c1", Namespace: "team-a", Pod: "notebook", Container: "main",
		Annotations: c.input.Annotations,
		Env:         []string{"A=1", "B=2"}, Args0: "/app",
		Mounts: []plan.Mount{
			{Destination: "/dev", Type: "tmpfs", Source: "tmpfs"},
			{Destination: "/dev/termination-log", Type: "bind", Source: "/var/lib/kubelet/t", Options: []string{"rbind", "rw"}},
			{Destination: "/data", Type: "bind", Source: "/bundle/data", Options: []string{"bind"}},
		},
		Devices:  []string{"/dev/nvidia0"},
		CDINames: []string{"nvidia.com/gpu=0", "nvidia.com/gpu=1"},
	}
	if diff := cmp.Diff(in, c.input); diff != "" {
		t.Error(diff)
	}
	if c.input.Annotations["gpufence.dev/memory.max"] != "4Gi" {
		t.Error("annotations are lost")
	}
	pod := api.PodRef{ID: "sandbox1", Namespace: "team-a", Name: "notebook", UID: "uid1"}
	if c.pod != pod || c.name != "main" || c.rootfs != "/bundle/rootfs" || c.shimDir != "/dev/gpufence" ||
		c.terminationLog != "/var/lib/kubelet/t" || c.cwd != "/w" || len(c.args) != 2 {
		t.Errorf("got %+v", c)
	}
}

func TestReadIdentityByEngine(t *testing.T) {
	const all = `{"annotations":{
		"io.kubernetes.cri.container-type":"sandbox", "io.kubernetes.cri.sandbox-id":"s", "io.kubernetes.cri.sandbox-namespace":"ns",
		"io.kubernetes.cri-o.ContainerType":"container", "io.kubernetes.cri-o.SandboxID":"o", "io.kubernetes.cri-o.Namespace":"ons",
		"io.kubernetes.cri-o.KubeName":"kube", "io.kubernetes.container.name":"k", "io.kubernetes.pod.name":"p",
		"io.kubernetes.pod.namespace":"kns", "io.kubernetes.pod.uid":"u"}}`
	tests := []struct {
		engine  quota.Engine
		pod     api.PodRef
		name    string
		sandbox bool
	}{
		{quota.EngineCRI, api.PodRef{ID: "s", Namespace: "ns"}, "", true},
		{quota.EngineCRIO, api.PodRef{ID: "o", Namespace: "kns", Name: "p", UID: "u"}, "k", false},
		// Whoever may set annotations there forges nothing.
		{quota.EngineDocker, api.PodRef{ID: "c1"}, "", false},
		{quota.EnginePodman, api.PodRef{ID: "c1"}, "", false},
		{quota.EngineOCI, api.PodRef{ID: "c1"}, "", false},
	}
	for _, test := range tests {
		c, err := readContainer(docOf(t, all), test.engine, "c1", "/b")
		if err != nil {
			t.Fatal(err)
		}
		if c.pod != test.pod || c.name != test.name || c.input.Sandbox != test.sandbox || c.input.Namespace != test.pod.Namespace {
			t.Errorf("%s: %+v", test.engine, c)
		}
	}
	c, err := readContainer(docOf(t, `{"annotations":{"io.kubernetes.cri-o.ContainerType":"sandbox","io.kubernetes.pod.namespace":"kns","io.kubernetes.pod.name":"p"}}`), quota.EngineCRIO, "c1", "/b")
	if err != nil || !c.input.Sandbox || c.pod.Namespace != "kns" || c.pod.Name != "p" {
		t.Errorf("%+v %v", c, err)
	}
}

func TestReadPlaces(t *testing.T) {
	tests := []struct{ name, config, shimDir, log string }{
		{"nothing", `{}`, "/dev/gpufence", ""},
		{"the host's /dev", `{"mounts":[{"destination":"/dev","type":"bind","source":"/dev","options":["rbind"]}]}`, "/run/gpufence-shim", ""},
		{"the host's /dev under a tmpfs", `{"mounts":[{"destination":"/dev/","options":["rbind"],"source":"/dev"},{"destination":"/dev","type":"tmpfs"}]}`, "/dev/gpufence", ""},
		{"named by the kubelet", `{"annotations":{"io.kubernetes.container.terminationMessagePath":"/tmp/x/../why"},"mounts":[
			{"destination":"/tmp/why","type":"bind","source":"/host/why"},{"destination":"/dev/termination-log","type":"bind","source":"/host/other"}]}`, "/dev/gpufence", "/host/why"},
		{"named, and no mount", `{"annotations":{"io.kubernetes.container.terminationMessagePath":"/tmp/why"},"mounts":[
			{"destination":"/dev/termination-log","type":"bind","source":"/host/other"}]}`, "/dev/gpufence", ""},
		{"read-only", `{"mounts":[{"destination":"/dev/termination-log","type":"bind","source":"/host/secret","options":["rbind","ro"]}]}`, "/dev/gpufence", ""},
		{"not a bind mount", `{"mounts":[{"destination":"/dev/termination-log","type":"tmpfs","source":"tmpfs"}]}`, "/dev/gpufence", ""},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			c, err := readContainer(docOf(t, test.config), quota.EngineCRI, "c1", "/b")
			if err != nil || c.shimDir != test.shimDir || c.terminationLog != test.log {
				t.Errorf("%q %q %v", c.shimDir, c.terminationLog, err)
			}
		})
	}
}

func TestPrivileged(t *testing.T) {
	self, err := os.Readlink("/proc/self/ns/pid")
	if err != nil || self == "" {
		t.Fatal(err)
	}
	tests := []struct {
		name, config string
		want         bool
	}{
		{"own pid namespace", `{"linux":{"namespaces":[{"type":"pid"}]}}`, false},
		{"the pod's pid namespace", `{"linux":{"namespaces":[{"type":"pid","path":"/proc/self/ns/mnt"}]}}`, false},
		{"the host's, by path", `{"linux":{"namespaces":[{"type":"pid","path":"/proc/self/ns/pid"}]}}`, true},
		{"the host's", `{"linux":{"namespaces":[{"type":"mount"}]}}`, true},
		{"no linux", `{}`, true},
		{"CAP_SYS_ADMIN", `{"linux":{"namespaces":[{"type":"pid"}]},"process":{"capabilities":{"bounding":["CAP_CHOWN","CAP_SYS_ADMIN"]}}}`, true},
		{"cap_bpf", `{"linux":{"namespaces":[{"type":"pid"}]},"process":{"capabilities":{"bounding":["cap_bpf"]}}}`, true},
		{"only ambient", `{"linux":{"namespaces":[{"type":"pid"}]},"process":{"capabilities":{"ambient":["CAP_SYS_ADMIN"]}}}`, false},
	}
	for _, test := range tests {
		c, err := readContainer(docOf(t, test.config), quota.EngineOCI, "c1", "/b")
		if err != nil || c.input.Privileged != test.want {
			t.Errorf("%s: %v %v", test.name, c.input.Privileged, err)
		}
	}
}

func TestReadContainerRefuses(t *testing.T) {
	tests := []struct{ text, says string }{
		{`{"annotations":{"a":1}}`, "annotations"},
		{`{"annotations":[]}`, "annotations"},
		{`{"annotations":{"gpufence.dev/memory.max":"1Gi","gpufence.dev/memory.max":"9Gi"}}`, "twice"},
		{`{"process":"x"}`, "process"},
		{`{"process":{"args":"x"}}`, "process.args"},
		{`{"process":{"env":[7]}}`, "process.env"},
		{`{"process":{"env":["A"],"Env":["B"]}}`, "twice"},
		{`{"process":{"capabilities":[]}}`, "capabilities"},
		{`{"mounts":[7]}`, "mounts[0]"},
		{`{"mounts":[{"destination":7}]}`, "mounts"},
		{`{"mounts":[{"source":"/a","source":"/b"}]}`, "twice"},
		{`{"linux":{"devices":[{"path":"/dev/a","Path":"/dev/nvidia0"}]}}`, "twice"},
		{`{"linux":{"namespaces":{}}}`, "namespaces"},
		{`{"linux":{"resources":[]}}`, "resources"},
		{`{"root":[]}`, "root"},
		{`{"root":{"path":7}}`, "root.path"},
		{`{"hooks":7}`, "hooks"},
	}
	for _, test := range tests {
		_, err := readContainer(docOf(t, test.text), quota.EngineOCI, "c1", "/b")
		if !errors.Is(err, quota.CodeSpecInvalid) || !strings.Contains(err.Error(), test.says) || !strings.Contains(err.Error(), "/b/config.json") {
			t.Errorf("%s: %v", test.text, err)
		}
	}
}
