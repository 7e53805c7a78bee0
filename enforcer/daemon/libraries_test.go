// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"testing"
)

func TestLibrariesByFolder(t *testing.T) {
	if runtime.GOARCH != "amd64" {
		t.Skipf("SKIP: the folders of %s are others", runtime.GOARCH)
	}
	own, narrow := "/l/libgpufence.so", "/l/libgpufence32.so"
	for _, test := range []struct {
		name   string
		lib32  string
		narrow bool
		want   []library
	}{
		{"usual", narrow, false, []library{{own, "lib64"}, {own, "lib/x86_64-linux-gnu"}, {own, "lib"}, {narrow, "lib32"}, {narrow, "lib/i386-linux-gnu"}}},
		{"32-bit /lib", narrow, true, []library{{own, "lib64"}, {own, "lib/x86_64-linux-gnu"}, {narrow, "lib32"}, {narrow, "lib/i386-linux-gnu"}, {narrow, "lib"}}},
		{"no companion", "", false, []library{{own, "lib64"}, {own, "lib/x86_64-linux-gnu"}, {own, "lib"}}},
		{"no companion, 32-bit /lib", "", true, []library{{own, "lib64"}, {own, "lib/x86_64-linux-gnu"}}},
	} {
		if got := libraries(own, test.lib32, test.narrow); !slices.Equal(got, test.want) {
			t.Errorf("%s: %v, want %v", test.name, got, test.want)
		}
	}
}

func TestCompanionIsFound(t *testing.T) {
	dir := t.TempDir()
	lib, beside, other := filepath.Join(dir, "libgpufence.so"), filepath.Join(dir, "libgpufence32.so"), filepath.Join(dir, "other.so")
	if got, err := resolveCompanion("", lib); got != "" || err != nil {
		t.Errorf("no companion: %q, %v", got, err)
	}
	if got, err := resolveCompanion(other, lib); err == nil {
		t.Errorf("a configured one that is missing: %q", got)
	}
	for _, path := range []string{beside, other} {
		if err := os.WriteFile(path, []byte("x"), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	if got, err := resolveCompanion("", lib); got != beside || err != nil {
		t.Errorf("beside: %q, %v", got, err)
	}
	if got, err := resolveCompanion(other, lib); got != other || err != nil {
		t.Errorf("configured: %q, %v", got, err)
	}
	if err := os.Remove(beside); err != nil {
		t.Fatal(err)
	}
	if err := os.Mkdir(beside, 0o755); err != nil {
		t.Fatal(err)
	}
	if got, err := resolveCompanion("", lib); err == nil {
		t.Errorf("a folder in its place: %q", got)
	}
}
