// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/gpufence/gpufence/enforcer/api"
	"github.com/gpufence/gpufence/enforcer/config"
	"github.com/gpufence/gpufence/enforcer/quota"
)

// TestKubeletGivesGPUs: what the environment names under Kubernetes without being UUIDs counts as far
// as the kubelet gave it (pitfalls 19 and 21: every CUDA image says all), and the instances behind a
// device node that all of them share are known (pitfall 53).
func TestKubeletGivesGPUs(t *testing.T) {
	b := newBench(t)
	b.nvml.gpus = append(b.nvml.gpus, splitGPU(mig0, mig1)...)
	b.start()
	var asked int
	given := map[string][]string{"index": {uuid0}, "instance": {mig1}, "mixed": {mig0}}
	fails := map[string]bool{"silent": true}
	b.d.kubelet = func(_ context.Context, namespace, pod, container string) ([]string, error) {
		asked++
		if namespace != "default" || container != "main" {
			t.Errorf("asked for %s/%s/%s", namespace, pod, container)
		}
		if fails[pod] {
			return nil, errors.New("it is starting")
		}
		return given[pod], nil
	}
	tests := []struct {
		id      string
		devices api.DeviceRequest
		engine  quota.Engine
		want    string // a GPU, "" for none
		notice  string
		asked   int
	}{
		{id: "index", devices: api.DeviceRequest{Claimed: []string{"0"}}, want: uuid0, asked: 1},
		{id: "image", devices: api.DeviceRequest{Claimed: []string{"all"}}, asked: 1},
		{id: "silent", devices: api.DeviceRequest{Claimed: []string{"all"}}, notice: "the kubelet does not say", asked: 1},
		{id: "instance", devices: api.DeviceRequest{Selectors: []string{"/dev/nvidia1"}, Present: true}, want: mig1, asked: 1},
		{id: "uuid", devices: api.DeviceRequest{Selectors: []string{uuid0}, Present: true}, want: uuid0},
		{id: "node", devices: api.DeviceRequest{Selectors: []string{"/dev/nvidia0"}, Present: true}, want: uuid0},
	}
	for _, tt := range tests {
		asked = 0
		req := request(tt.id, "memory.max=1Gi")
		req.Devices = tt.devices
		resp := b.prepare(req)
		got := ""
		if len(resp.Grant.GPUs) == 1 {
			got = resp.Grant.GPUs[0].UUID
		}
		if got != tt.want || asked != tt.asked || !strings.Contains(strings.Join(resp.Notices, " "), tt.notice) {
			t.Errorf("%s: GPU %q, notices %q, asked %d times", tt.id, got, resp.Notices, asked)
		}
		again := b.prepare(req)
		if len(again.Grant.GPUs) != len(resp.Grant.GPUs) {
			t.Errorf("%s: asked again it is another answer: %+v", tt.id, again.Grant)
		}
	}
	// An instance that the kubelet does not name stays refused.
	req := request("whole", "memory.max=1Gi")
	req.Devices = api.DeviceRequest{Selectors: []string{"/dev/nvidia1"}, Present: true}
	if _, err := b.d.Prepare(t.Context(), req); !errors.Is(err, quota.CodeNotEnforced) && api.ErrorOf(err).Code != string(quota.CodeNotEnforced) {
		t.Errorf("an unknown instance: %v", err)
	}
	// Nobody but the kubelet's engine may claim.
	req = request("docker", "memory.max=1Gi")
	req.Key.Engine, req.Pod.Namespace = quota.EngineDocker, ""
	req.Devices = api.DeviceRequest{Claimed: []string{"all"}}
	asked = 0
	if _, err := b.d.Prepare(t.Context(), req); asked != 0 {
		t.Errorf("the kubelet was asked for a container of docker: %v", err)
	}
}

// TestStaleSpecification: a CDI specification that was written for another driver is not used
// (pitfalls 9 and 56); one that can be used is taken from the next kind.
func TestStaleSpecification(t *testing.T) {
	b := newBench(t, func(c *config.Config) {
		c.CDIKinds = []string{"nvidia.com/gpu", "gpufence.dev/simgpu"}
	})
	gone := filepath.Join(t.TempDir(), "libcuda.so.535.1")
	write := func(kind, name string) {
		text := `{"cdiVersion":"0.6.0","kind":"` + kind + `","devices":[{"name":"0","containerEdits":{"mounts":[{"hostPath":"` + gone + `","containerPath":"/usr/lib/libcuda.so.1"}]}}]}`
		if err := os.WriteFile(filepath.Join(b.cfg.CDISpecDirs[0], name), []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	write("nvidia.com/gpu", "nvidia.json")
	b.start()
	if got := b.prepare(request("a", "memory.max=1Gi")).CDIDevices; len(got) != 1 || got[0] != "gpufence.dev/simgpu=0" {
		t.Errorf("got %q", got)
	}
	if err := os.Remove(filepath.Join(b.cfg.CDISpecDirs[0], "simgpu.json")); err != nil {
		t.Fatal(err)
	}
	_, err := b.d.Prepare(t.Context(), request("b", "memory.max=1Gi"))
	if api.ErrorOf(err).Code != string(quota.CodeNoCDIDevice) || !strings.Contains(err.Error(), gone+", which is not there: it was written for another driver") {
		t.Errorf("got %v", err)
	}
}
