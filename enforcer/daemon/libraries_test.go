// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"

	"github.com/gpufence/gpufence/enforcer/api"
	"github.com/gpufence/gpufence/enforcer/fence"
	"github.com/gpufence/gpufence/enforcer/ledger"
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

// TestLibrariesAreMountedOnce: other spellings of $LIB lead to what is mounted.
func TestLibrariesAreMountedOnce(t *testing.T) {
	files, points := deliver("/dev/gpufence", []library{{"/l/64", "lib64"}, {"/l/64", "lib/x86_64-linux-gnu"}, {"/l/32", "lib32"}, {"/l/32", "lib"}})
	if want := []api.SharedFile{{Source: "/l/64", Destination: "/dev/gpufence/lib64/libgpufence.so"}, {Source: "/l/32", Destination: "/dev/gpufence/lib32/libgpufence.so"}}; !slices.Equal(files, want) {
		t.Errorf("mounted: %+v", files)
	}
	if want := []ledger.Point{
		{Name: "lib64/libgpufence.so"}, {Name: "lib/x86_64-linux-gnu/libgpufence.so", Link: "../../lib64/libgpufence.so"},
		{Name: "lib32/libgpufence.so"}, {Name: "lib/libgpufence.so", Link: "../lib32/libgpufence.so"},
	}; !slices.Equal(points, want) {
		t.Errorf("in the folder: %+v", points)
	}
}

// TestDeliveryIsChecked: with the folder, and with the mounts that there were before it.
func TestDeliveryIsChecked(t *testing.T) {
	b := newBench(t)
	b.start()
	resp := b.prepare(request("a", "memory.max=4Gi"))
	b.d.mu.Lock()
	c := b.d.reg.Lookup(request("a").Key)
	b.d.mu.Unlock()
	check := func() error { return b.d.checkPages(fence.Subject{ID: c.ID()}) }
	if err := check(); err != nil {
		t.Error(err)
	}
	folder := resp.Files[0].Source
	former := []api.SharedFile{
		{Source: filepath.Join(folder, "limits"), Destination: "/dev/gpufence/limits"},
		{Source: filepath.Join(folder, "memory.max"), Destination: "/dev/gpufence/memory.max"},
		{Source: filepath.Join(folder, "pod"), Destination: "/dev/gpufence/pod"},
	}
	former = append(former, resp.Files[1:]...)
	b.d.mu.Lock()
	now := c.Answer.Files
	c.Answer.Files = former
	b.d.mu.Unlock()
	if err := check(); err != nil {
		t.Errorf("as it was mounted before: %v", err)
	}
	b.d.mu.Lock()
	c.Answer.Files = now
	b.d.mu.Unlock()
	if err := os.Remove(filepath.Join(folder, "lib64/libgpufence.so")); err != nil {
		t.Fatal(err)
	}
	if err := check(); err == nil || !strings.Contains(err.Error(), "lacks lib64/libgpufence.so") {
		t.Errorf("without what the library is mounted over: %v", err)
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
