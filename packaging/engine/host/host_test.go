// SPDX-License-Identifier: Apache-2.0

package host

import (
	"bytes"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/gpufence/gpufence/enforcer/quota"
	"github.com/gpufence/gpufence/packaging/engine"
)

func tree(t *testing.T, files map[string]string) string {
	t.Helper()
	root := t.TempDir()
	for name, text := range files {
		path := filepath.Join(root, name)
		if err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o755), os.WriteFile(path, []byte(text), 0o755)); err != nil {
			t.Fatal(err)
		}
	}
	return root
}

func TestUsers(t *testing.T) {
	root := tree(t, map[string]string{
		"task/k8s.io/aaa/runtime":      "/usr/bin/gpufence-runtime.cri",
		"task/k8s.io/bbb/runtime":      "/usr/bin/runc",
		"task/k8s.io/ccc/options.json": `{"binary_name":"/usr/bin/gpufence-runtime.cri","systemd_cgroup":true}`,
		"task/k8s.io/ddd/options.json": `{"binary_name":"/usr/bin/gpufence-runtime.cri.old"}`,
		"proc/12/cmdline":              "/usr/libexec/podman/conmon\x00-c\x00eee\x00-r\x00/usr/bin/gpufence-runtime.cri\x00",
		"proc/13/cmdline":              "/usr/bin/vi\x00/usr/bin/gpufence-runtime.cri\x00",
		"proc/14/cmdline":              "",
		// A state folder of the administrator's: the shim works in one bundle, and serves two.
		"custom/default/fff/runtime": "/usr/bin/gpufence-runtime.cri",
		"custom/default/ggg/runtime": "/usr/bin/gpufence-runtime.cri",
		"custom/default/hhh/runtime": "/usr/bin/runc",
		"custom/other/iii/runtime":   "/usr/bin/gpufence-runtime.cri", // beside an editor, which is no shim
		"proc/15/cmdline":            "/usr/bin/containerd-shim-runc-v2\x00-namespace\x00default\x00-id\x00fff\x00",
		"proc/16/cmdline":            "/usr/bin/containerd-shim-runc-v2\x00-id\x00gone\x00",
		"proc/17/cmdline":            "/usr/bin/vi\x00",
	})
	for pid, dir := range map[string]string{"15": "custom/default/fff", "16": "custom/gone/xxx", "17": "custom/other/iii"} {
		if err := os.Symlink(filepath.Join(root, dir), filepath.Join(root, "proc", pid, "cwd")); err != nil {
			t.Fatal(err)
		}
	}
	got, err := users([]string{"/usr/bin/gpufence-runtime.cri"}, []string{filepath.Join(root, "task/*/*")}, filepath.Join(root, "proc"))
	if err != nil || !slices.Equal(got, []string{"aaa", "ccc", "eee", "fff", "ggg"}) {
		t.Errorf("got %v, %v", got, err)
	}
}

func TestPlace(t *testing.T) {
	root := tree(t, map[string]string{
		"usr/bin/gpufence": "1", "usr/bin/gpufence-runtime": "2", "usr/bin/gpufence-hook": "3", "usr/bin/gpufenced": "4",
		"usr/lib/gpufence/libgpufence.so": "so", "usr/lib/gpufence/gpufence-stub/dev/libcuda.so.1": "stub",
	})
	p := Programs{From: filepath.Join(root, "usr/bin"), Prefix: filepath.Join(root, "opt/gpufence"), Version: "v1", Suffix: "cri"}
	did, err := p.Place()
	if err != nil || len(did) != 9 {
		t.Fatalf("did %v, %v", did, err)
	}
	for name, want := range map[string]string{
		"bin/gpufence-runtime.cri": "2", "bin/gpufenced": "4", "lib/gpufence/libgpufence.so": "so", "lib/gpufence/v1/libgpufence.so": "so",
		"lib/gpufence/gpufence-stub/dev/libcuda.so.1": "stub",
	} {
		if text, err := os.ReadFile(filepath.Join(p.Prefix, name)); err != nil || string(text) != want {
			t.Errorf("%s is %q, %v", name, text, err)
		}
	}
	if did, err = p.Place(); err != nil || len(did) != 0 {
		t.Errorf("a second time: %v, %v", did, err)
	}
	// A newer version: the old library stays, who runs a program keeps it.
	old, err := os.Open(filepath.Join(p.Prefix, "bin/gpufenced"))
	if err != nil {
		t.Fatal(err)
	}
	defer old.Close()
	if err := errors.Join(os.WriteFile(filepath.Join(p.From, "gpufenced"), []byte("5"), 0o755), os.WriteFile(filepath.Join(root, "usr/lib/gpufence/libgpufence.so"), []byte("so2"), 0o644)); err != nil {
		t.Fatal(err)
	}
	p.Version = "v2"
	if _, err := p.Place(); err != nil {
		t.Fatal(err)
	}
	buf := make([]byte, 1)
	if _, err := old.Read(buf); err != nil || buf[0] != '4' {
		t.Errorf("the open program is %q, %v", buf, err)
	}
	for name, want := range map[string]string{"bin/gpufenced": "5", "lib/gpufence/libgpufence.so": "so2", "lib/gpufence/v1/libgpufence.so": "so"} {
		if text, err := os.ReadFile(filepath.Join(p.Prefix, name)); err != nil || string(text) != want {
			t.Errorf("%s is %q, %v", name, text, err)
		}
	}
	// Without a prefix only the name by which the wrapper knows its engine is made.
	p.Prefix = ""
	if did, err := p.Place(); err != nil || !slices.Equal(did, []string{filepath.Join(p.From, "gpufence-runtime.cri")}) {
		t.Errorf("did %v, %v", did, err)
	}
	if err := os.Remove(filepath.Join(p.From, "gpufence-runtime")); err != nil {
		t.Fatal(err)
	}
	if _, err := p.Place(); !errors.Is(err, quota.CodeEnginePrograms) {
		t.Errorf("without a wrapper: %v", err)
	}
}

// A step that fails takes back those before it, with mode and link as they were.
func TestApplyTakesBack(t *testing.T) {
	root := tree(t, map[string]string{"real": "old\n", "folder/x": ""})
	link := filepath.Join(root, "link")
	if err := errors.Join(os.Symlink("real", link), os.Chmod(filepath.Join(root, "real"), 0o600)); err != nil {
		t.Fatal(err)
	}
	_, err := Apply(engine.Plan{Changes: []engine.Change{
		{Path: filepath.Join(root, "new/ours"), After: []byte("x"), Ours: true},
		{Path: link, Before: []byte("old\n"), After: []byte("new\n")},
		{Path: filepath.Join(root, "folder"), After: []byte("a folder is there"), Ours: true},
	}})
	if err == nil {
		t.Fatal("a folder was replaced")
	}
	text, readErr := os.ReadFile(filepath.Join(root, "real"))
	info, statErr := os.Stat(filepath.Join(root, "real"))
	if readErr != nil || statErr != nil || string(text) != "old\n" || info.Mode().Perm() != 0o600 {
		t.Errorf("%q, %v, %v, %v", text, info, readErr, statErr)
	}
	if target, err := os.Readlink(link); err != nil || target != "real" {
		t.Errorf("the link is %q, %v", target, err)
	}
	if _, err := os.Stat(filepath.Join(root, "new/ours")); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("ours is there: %v", err)
	}
	// What somebody else changed between reading and writing is not written over.
	_, err = Apply(engine.Plan{Changes: []engine.Change{{Path: link, Before: []byte("older\n"), After: []byte("new\n")}}})
	if !errors.Is(err, quota.CodeEngineUnwritable) {
		t.Errorf("changed meanwhile: %v", err)
	}
}

func TestDiffIsAPatch(t *testing.T) {
	for _, tt := range []struct{ before, after, want string }{
		{"a\nb\n", "a\nc\n", "--- /f\n+++ /f\n@@ -1,2 +1,2 @@\n a\n-b\n+c\n"},
		{"", "a", "--- /f\n+++ /f\n@@ -0,0 +1,1 @@\n+a\n\\ No newline at end of file\n"},
	} {
		var out bytes.Buffer
		Diff(&out, engine.Change{Path: "/f", Before: []byte(tt.before), After: []byte(tt.after)})
		if out.String() != tt.want {
			t.Errorf("got %q, want %q", out.String(), tt.want)
		}
	}
}

func TestMajorOf(t *testing.T) {
	for text, want := range map[string]int{
		"containerd github.com/containerd/containerd v1.7.35 9f2": 1, "containerd github.com/containerd/containerd/v2 2.4.2+unknown ": 2, "1.7": 1, "new": 0, "": 0,
	} {
		if got := MajorOf(text); got != want {
			t.Errorf("%q is %d", text, got)
		}
	}
}
