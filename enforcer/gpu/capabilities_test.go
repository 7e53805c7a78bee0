// SPDX-License-Identifier: Apache-2.0

package gpu

import (
	"maps"
	"os"
	"path/filepath"
	"testing"
)

func TestCapabilities(t *testing.T) {
	dir := t.TempDir()
	put := func(path, text string) {
		t.Helper()
		path = filepath.Join(dir, path)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(text), 0o444); err != nil {
			t.Fatal(err)
		}
	}
	access := func(minor string) string {
		return "DeviceFileMinor: " + minor + "\nDeviceFileMode: 292\nDeviceFileModify: 1\n"
	}
	if got, err := Capabilities(dir); err != nil || len(got) != 0 {
		t.Errorf("without MIG: %v, %v", got, err)
	}
	put("mig/config", access("1"))
	put("mig/monitor", access("2"))
	put("fabric-imex-mgmt", access("2333"))
	put("gpu0/mig/gi1/access", access("12"))
	put("gpu0/mig/gi1/ci0/access", access("13"))
	put("gpu0/mig/gi13/ci2/access", access("122"))
	put("gpu7/mig/gi0/ci0/access", access("948"))
	put("gpu0/mig/gi01/access", access("77")) // not how the driver writes
	want := map[int]Capability{12: {0, 1, -1}, 13: {0, 1, 0}, 122: {0, 13, 2}, 948: {7, 0, 0}}
	got, err := Capabilities(dir)
	if err != nil || !maps.Equal(got, want) {
		t.Errorf("%v, %v", got, err)
	}
	put("gpu0/mig/gi2/access", "garbage\n")
	if got, err := Capabilities(dir); err == nil {
		t.Errorf("garbage: %v", got)
	}
}

func TestCapabilityNode(t *testing.T) {
	for path, want := range map[string]int{
		"/dev/nvidia-caps/nvidia-cap0": 0, "/dev/nvidia-caps/nvidia-cap13": 13, "/dev/nvidia-caps/nvidia-cap": -1, "/dev/nvidia-caps/nvidia-cap01": -1,
		"/dev/nvidia-caps/nvidia-cap-1": -1, "/dev/nvidia-caps/nvidia-cap+1": -1, "/dev/nvidia0": -1, "/dev/nvidia-caps": -1,
	} {
		if n, ok := CapabilityNode(path); ok != (want >= 0) || ok && n != want {
			t.Errorf("%s: %d %t", path, n, ok)
		}
	}
}
