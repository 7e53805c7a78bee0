// SPDX-License-Identifier: Apache-2.0

package canary

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"syscall"
	"testing"
)

// TestRemoveCgroups: of every hierarchy the empty ones of the name, and nothing else; what is not empty is told.
func TestRemoveCgroups(t *testing.T) {
	root := t.TempDir()
	for _, dir := range []string{"c", "c-2", "freezer/c", "pids/c-2", "unified/other"} {
		if err := os.MkdirAll(filepath.Join(root, dir), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	for range 2 { // the second time nothing is there
		if err := removeCgroups(t.Context(), root, "c"); err != nil {
			t.Fatal(err)
		}
	}
	for dir, want := range map[string]error{"c": fs.ErrNotExist, "freezer/c": fs.ErrNotExist, "c-2": nil, "pids/c-2": nil, "unified/other": nil} {
		if _, err := os.Stat(filepath.Join(root, dir)); !errors.Is(err, want) {
			t.Errorf("%s: %v, want %v", dir, err, want)
		}
	}
	if err := os.Mkdir(filepath.Join(root, "c-2", "somebody's"), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := removeCgroups(t.Context(), root, "c-2"); !errors.Is(err, syscall.ENOTEMPTY) {
		t.Errorf("one that is in use: %v", err)
	}
}
