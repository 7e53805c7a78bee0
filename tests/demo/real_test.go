// SPDX-License-Identifier: Apache-2.0

package demo

import (
	"bytes"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
)

// What only runs beside a real GPU, as far as it can be tested without one.

// TestNoShimLoaderReadsNoPreloadFile: with the patched loader a program does not see the file
// that the shim comes by; with its own it does.
func TestNoShimLoaderReadsNoPreloadFile(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Fatal("chroot needs root")
	}
	busybox, err := exec.LookPath("busybox")
	if err != nil {
		t.Fatalf("run make deps first: %v", err)
	}
	n := &node{opts: Options{Dist: distDir(t)}, dir: t.TempDir()}
	client := n.dist("clients/client")
	if n.root, err = newRootfs(busybox, map[string]string{"/client": client}); err != nil {
		t.Fatal(err)
	}
	if err := n.makeNoShimLoader(client); err != nil {
		t.Fatal(err)
	}
	root := n.path("root")
	if err := n.root.write(root); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(root, "etc", "ld.so.preload"), []byte("/no/such/library.so\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	for _, tt := range []struct {
		args  []string
		reads bool
	}{
		{[]string{"/client", "status"}, true},
		{[]string{noShimLoader, "/client", "status"}, false},
	} {
		cmd := exec.CommandContext(t.Context(), tt.args[0], tt.args[1:]...)
		cmd.Dir, cmd.SysProcAttr = "/", &syscall.SysProcAttr{Chroot: root}
		var stderr bytes.Buffer
		cmd.Stderr = &stderr
		out, err := cmd.Output()
		if err != nil || !strings.Contains(string(out), `"op":"status","ok":true`) {
			t.Errorf("%v: %v, %s%s", tt.args, err, out, stderr.String())
		}
		if reads := strings.Contains(stderr.String(), "/no/such/library.so"); reads != tt.reads {
			t.Errorf("%v reads the preload file: %v, want %v: %s", tt.args, reads, tt.reads, stderr.String())
		}
	}
}

func TestRealHostReadsWhatNVIDIASMIPrints(t *testing.T) {
	h := &realHost{points: map[int][]point{}}
	for _, line := range []string{"4711, 1024", "4712, [N/A]", "No running processes found", "", "4711, 2048", "x, 1", "4711"} {
		h.add(line)
	}
	points, err := h.history(t.Context(), 4711)
	if err != nil || len(points) != 2 || points[0].bytes != gib || points[1].bytes != 2*gib || points[1].ns < points[0].ns {
		t.Errorf("history of 4711: %v, %v", points, err)
	}
	if points, err := h.history(t.Context(), 4712); err == nil {
		t.Errorf("history of a process of unknown size: %v", points)
	}
	if used, err := h.used(t.Context(), 4711); err != nil || used != 2*gib {
		t.Errorf("used by 4711: %d, %v", used, err)
	}
}

func TestRootfsNamesWhatIsMissing(t *testing.T) {
	text := filepath.Join(t.TempDir(), "text")
	if err := os.WriteFile(text, []byte("#!/bin/sh\n"), 0o755); err != nil {
		t.Fatal(err)
	}
	if _, err := newRootfs("/bin/busybox", map[string]string{"/x": text}); err == nil || !strings.Contains(err.Error(), "read program") {
		t.Errorf("a script: %v", err)
	}
	if err := (rootfs{"/x": filepath.Join(t.TempDir(), "gone")}).write(t.TempDir()); err == nil {
		t.Error("a root with a file that is gone")
	}
}
