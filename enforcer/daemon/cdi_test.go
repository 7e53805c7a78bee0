// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/gpufence/gpufence/enforcer/config"
)

// TestSpecificationOfAnotherGPU: what is granted on one GPU is not put in as another, which nothing would limit.
func TestSpecificationOfAnotherGPU(t *testing.T) {
	b := newBench(t, func(c *config.Config) { c.CDIKinds = []string{"nvidia.com/gpu", "gpufence.dev/simgpu"} })
	text := `{"cdiVersion":"0.6.0","kind":"nvidia.com/gpu","devices":[{"name":"0","containerEdits":{"deviceNodes":[{"path":"/dev/nvidia1","type":"c","major":195,"minor":1}]}}]}`
	if err := os.WriteFile(filepath.Join(b.cfg.CDISpecDirs[0], "nvidia.json"), []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
	b.start()
	if got := b.prepare(request("a", "memory.max=1Gi")).CDIDevices; len(got) != 1 || got[0] != "gpufence.dev/simgpu=0" {
		t.Errorf("got %q", got)
	}
}
