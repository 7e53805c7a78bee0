// SPDX-License-Identifier: Apache-2.0

package ledger

import (
	"fmt"
	"os"
	"path/filepath"
	"testing"
)

// TestContainersKeepNoDescriptors: a thousand containers must fit into what a process may have open.
func TestContainersKeepNoDescriptors(t *testing.T) {
	pod, err := CreatePod(filepath.Join(t.TempDir(), "pod"), Options{Plain: true})
	if err != nil {
		t.Fatal(err)
	}
	count := func() int {
		entries, err := os.ReadDir("/proc/self/fd")
		if err != nil {
			t.Fatal(err)
		}
		return len(entries)
	}
	before := count()
	for i := range 50 {
		c, err := pod.AddContainer(fmt.Sprint(i), uint32(i))
		if err != nil {
			t.Fatal(err)
		}
		if err := c.WriteFiles(true, []FileGPU{{UUID: "GPU-1"}}); err != nil {
			t.Fatal(err)
		}
		if text, err := os.ReadFile(filepath.Join(c.Dir(), OOMGroupName)); err != nil || string(text) != "1\n" {
			t.Fatalf("%q, %v", text, err)
		}
		defer c.Close()
	}
	if now := count(); now > before {
		t.Errorf("50 containers keep %d descriptors", now-before)
	}
	if err := pod.Remove(); err != nil {
		t.Error(err)
	}
}
