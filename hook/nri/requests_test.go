// SPDX-License-Identifier: Apache-2.0

package nri

import (
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/containerd/nri/pkg/api"

	gpufence "github.com/gpufence/gpufence/enforcer/api"
)

// TestNothingElseAsks: what asks a runtime underneath for GPUs is taken away, and a node is known by its numbers.
func TestNothingElseAsks(t *testing.T) {
	const request = "/var/run/nvidia-container-devices/all"
	e, d := newEngine(t), &daemon{}
	run(t, e, settings(t, e), d)
	p := pod(map[string]string{"gpufence.dev/memory.max": "4Gi", "cdi.k8s.io/of-the-pod": "nvidia.com/gpu=all"})
	a, err := e.create(p, ctr("r1", func(c *api.Container) {
		c.Annotations = map[string]string{"cdi.k8s.io/x": "nvidia.com/gpu=all"}
		c.Mounts = append(c.Mounts, &api.Mount{Destination: request, Source: "/dev/null", Type: "bind"})
		c.Linux.Devices = append(c.Linux.Devices, &api.LinuxDevice{Path: "/dev/nvidia0", Type: "c", Major: 195, Minor: 1})
		// A wildcard of which only a part is taken back.
		c.Linux.Resources = &api.LinuxResources{Devices: []*api.LinuxDeviceCgroup{{Allow: true, Access: "rwm"}, {Allow: false, Type: "c", Minor: api.Int64(5)}}}
	}))
	if err != nil {
		t.Fatal(err)
	}
	d.set(func(d *daemon) {
		if got := d.requests[len(d.requests)-1].Devices.Selectors; !slices.Equal(got, []string{"/dev/nvidia1"}) {
			t.Errorf("asked for %q", got)
		}
	})
	if !slices.ContainsFunc(a.GetMounts(), func(m *api.Mount) bool { return m.GetDestination() == api.MarkForRemoval(request) }) {
		t.Errorf("mounts %v", a.GetMounts())
	}
	if _, gone := a.GetAnnotations()[api.MarkForRemoval("cdi.k8s.io/x")]; !gone || len(a.GetAnnotations()) != 1 {
		t.Errorf("annotations %v", a.GetAnnotations())
	}

	// Another plugin that renames a GPU is found out by the numbers, too.
	connect(t, e, "renames", "95", func(a *api.ContainerAdjustment, _ *api.Container) {
		a.AddDevice(&api.LinuxDevice{Path: "/dev/harmless", Type: "c", Major: 195, Minor: 2})
	})
	if _, err := e.create(p, ctr("r2", func(c *api.Container) {
		c.Linux.Devices = append(c.Linux.Devices, &api.LinuxDevice{Path: "/dev/nvidia0", Type: "c", Major: 195})
	})); err == nil {
		t.Error("a GPU under another name is not noticed")
	}
}

// TestOurOwnNamespace: the chart's pods have every GPU, too, and are not to be refused by us.
func TestOurOwnNamespace(t *testing.T) {
	text, err := os.ReadFile("../../packaging/kubernetes/namespace.yaml")
	if err != nil {
		t.Fatal(err)
	}
	if !slices.ContainsFunc(ExemptNamespaces, func(name string) bool { return strings.Contains(string(text), "\n  name: "+name+"\n") }) {
		t.Errorf("%q have not the chart's namespace:\n%s", ExemptNamespaces, text)
	}
}

// TestStartOfWhatWasNotSeen: a container that would have been refused, and was created while the plugin was away, does
// not start with its GPU.
func TestStartOfWhatWasNotSeen(t *testing.T) {
	e, d := newEngine(t), &daemon{}
	p := run(t, e, settings(t, e), d)
	gpu := ctr("s1", func(c *api.Container) {
		c.Env = nil
		c.Linux.Devices = []*api.LinuxDevice{{Path: "/dev/nvidia0", Type: "c", Major: 195}}
	})
	if err := p.StartContainer(t.Context(), pod(nil), gpu); err == nil || !strings.Contains(err.Error(), "was not registered before its start") {
		t.Errorf("without a limit: %v", err)
	}
	if err := p.StartContainer(t.Context(), pod(map[string]string{"gpufence.dev/memory.max": "4096"}), ctr("s2", env("PATH=/bin"))); err != nil {
		t.Errorf("without a GPU: %v", err)
	}
	c := readContainer(p.engineNow(), pod(nil), gpu)
	d.set(func(d *daemon) { d.running = []gpufence.Container{{Key: p.key(&c), State: "running"}} })
	if err := p.StartContainer(t.Context(), pod(nil), gpu); err != nil {
		t.Errorf("known to gpufenced: %v", err)
	}
}
