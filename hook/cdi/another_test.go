// SPDX-License-Identifier: Apache-2.0

package cdi

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"tags.cncf.io/container-device-interface/pkg/cdi"
)

// TestFindTakesNoOtherGPU: a device that opens another GPU than the one that was granted is not used.
func TestFindTakesNoOtherGPU(t *testing.T) {
	dir := t.TempDir()
	const text = `{"cdiVersion":"0.6.0","kind":"nvidia.com/gpu","containerEdits":{"deviceNodes":[{"path":"/dev/nvidiactl","type":"c","major":195,"minor":255}]},"devices":[
		{"name":"0","containerEdits":{"deviceNodes":[{"path":"/dev/nvidia0","hostPath":"/drv/dev/nvidia0","type":"c","major":195,"minor":0}]}},
		{"name":"GPU-b","containerEdits":{"deviceNodes":[{"path":"/dev/nvidia0","hostPath":"/drv/dev/nvidia1","type":"c","major":195,"minor":1}]}},
		{"name":"all","containerEdits":{"deviceNodes":[{"path":"/dev/nvidia0","type":"c","major":195,"minor":0},{"path":"/dev/nvidia1","type":"c","major":195,"minor":1}]}}]}`
	if err := os.WriteFile(filepath.Join(dir, "nvidia.json"), []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
	cache, err := cdi.NewCache(cdi.WithSpecDirs(dir), cdi.WithAutoRefresh(false))
	if err != nil {
		t.Fatal(err)
	}
	for _, tt := range []struct {
		gpu  GPU
		name string
	}{
		{GPU{UUID: "GPU-a", Position: "0", Minor: "0"}, "nvidia.com/gpu=0"},
		{GPU{UUID: "GPU-b", Position: "1", Minor: "1"}, "nvidia.com/gpu=GPU-b"},
		{GPU{UUID: "GPU-b", Position: "1"}, "nvidia.com/gpu=GPU-b"},
		{GPU{UUID: "GPU-b", Position: "0", Minor: "2"}, ""}, // numbered anew
		{GPU{UUID: "GPU-c", Position: "0", Minor: "1"}, ""}, // the first has fallen off the bus
		{GPU{UUID: "all", Minor: "0"}, ""},
	} {
		name, why := Find(cache, []string{"nvidia.com/gpu"}, tt.gpu)
		if name != tt.name || name == "" && !strings.Contains(why, "before the GPUs were numbered anew") {
			t.Errorf("%+v: %q, %s", tt.gpu, name, why)
		}
	}
}
