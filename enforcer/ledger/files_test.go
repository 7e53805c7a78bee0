// SPDX-License-Identifier: Apache-2.0

package ledger

import (
	"errors"
	"os"
	"path/filepath"
	"testing"
)

// TestFileThatWasMadeLonger: who may remount a container's files can make one as long as it likes. It is written over all
// the same, and not read into memory.
func TestFileThatWasMadeLonger(t *testing.T) {
	p, err := CreatePod(filepath.Join(t.TempDir(), "pod"), Options{Plain: true})
	if err != nil {
		t.Fatal(err)
	}
	c, err := p.AddContainer("0", 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := errors.Join(c.Close(), p.Close()); err != nil {
			t.Error(err)
		}
	})
	path := filepath.Join(c.Dir(), MaxName)
	if err := errors.Join(os.Chmod(path, 0o600), os.Truncate(path, 1<<43)); err != nil {
		t.Fatal(err)
	}
	if err := c.WriteFiles(false, []FileGPU{{UUID: "GPU-x", FileLevel: FileLevel{Max: 5}}}); err != nil {
		t.Fatal(err)
	}
	info, err := os.Stat(path)
	if err != nil {
		t.Fatal(err)
	}
	if info.Size() > 100 {
		t.Fatalf("it has %d bytes", info.Size())
	}
	if text, err := os.ReadFile(path); err != nil || string(text) != "GPU-x 5\n" {
		t.Errorf("%q, %v", text, err)
	}
}
