// SPDX-License-Identifier: Apache-2.0

package mounts

import (
	"os"
	"path/filepath"
	"slices"
	"testing"

	"golang.org/x/sys/unix"
)

func TestDetachTakesOffWhatIsBelow(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Fatal("mounts need root")
	}
	dir := t.TempDir()
	inner, beside := filepath.Join(dir, "a"), dir+"-beside"
	for _, at := range []string{inner, beside} {
		if err := os.Mkdir(at, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	for _, at := range []string{dir, inner, beside} {
		if err := os.MkdirAll(at, 0o755); err != nil { // the first hides what was in it
			t.Fatal(err)
		}
		if err := unix.Mount("none", at, "tmpfs", 0, "size=64k"); err != nil {
			t.Fatal(err)
		}
	}
	t.Cleanup(func() {
		if left, err := Detach(beside); err != nil || !slices.Equal(left, []string{beside}) {
			t.Errorf("beside it %q were mounted, want %q: %v", left, beside, err)
		}
		if err := os.Remove(beside); err != nil {
			t.Error(err)
		}
	})
	want := []string{inner, dir}
	if got, err := Below(dir); err != nil || !slices.Equal(got, want) {
		t.Errorf("%q are mounted, want %q: %v", got, want, err)
	}
	if got, err := Detach(dir); err != nil || !slices.Equal(got, want) {
		t.Errorf("%q were taken off, want %q: %v", got, want, err)
	}
	if got, err := Below(dir); err != nil || len(got) != 0 {
		t.Errorf("%q are left: %v", got, err)
	}
}
