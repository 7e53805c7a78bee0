// SPDX-License-Identifier: Apache-2.0

package oci

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/gpufence/gpufence/enforcer/quota"
)

func writeFile(t *testing.T, path, text string) string {
	t.Helper()
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
	return path
}

func readFile(t *testing.T, path string) string {
	t.Helper()
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

func TestReadDocumentRefuses(t *testing.T) {
	dir := t.TempDir()
	fifo := filepath.Join(dir, "fifo")
	if err := syscall.Mkfifo(fifo, 0o600); err != nil {
		t.Fatal(err)
	}
	loop := filepath.Join(dir, "loop")
	if err := os.Symlink(loop, loop); err != nil {
		t.Fatal(err)
	}
	tests := []struct {
		name, path string
		code       quota.Code
		says       string
	}{
		{"missing", filepath.Join(dir, "none"), quota.CodeNotABundle, "does not exist"},
		{"directory", dir, quota.CodeSpecUnreadable, "not a regular file"},
		{"fifo", fifo, quota.CodeSpecUnreadable, "not a regular file"},
		{"loop", loop, quota.CodeSpecUnreadable, "cannot read"},
		{"truncated", writeFile(t, filepath.Join(dir, "t"), `{"process":{"env":["A=`), quota.CodeSpecInvalid, "ends in the middle"},
		{"empty", writeFile(t, filepath.Join(dir, "e"), ``), quota.CodeSpecInvalid, "ends in the middle"},
		{"garbage", writeFile(t, filepath.Join(dir, "g"), "\x7fELF\x02"), quota.CodeSpecInvalid, "is not JSON"},
		{"not an object", writeFile(t, filepath.Join(dir, "a"), `["process"]`), quota.CodeSpecInvalid, "is not a JSON object"},
		{"huge", writeFile(t, filepath.Join(dir, "h"), `{"a":"`+strings.Repeat("x", MaxConfigBytes)+`"}`), quota.CodeSpecTooLarge, "larger than 16 MiB"},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			_, err := readDocument(test.path)
			if !errors.Is(err, test.code) || !strings.Contains(err.Error(), test.says) {
				t.Errorf("got %v, want %s: %s", err, test.code, test.says)
			}
			if err != nil && strings.ContainsRune(err.Error(), '\n') {
				t.Errorf("more than one line: %q", err)
			}
		})
	}
}

func TestWriteKeepsModeOwnerAndLeavesNothing(t *testing.T) {
	dir := t.TempDir()
	target := writeFile(t, filepath.Join(dir, "real", "config.json"), `{"a": 1.50}`)
	if err := os.Chmod(target, 0o640); err != nil {
		t.Fatal(err)
	}
	root := os.Geteuid() == 0
	if root {
		if err := os.Chown(target, 12, 34); err != nil {
			t.Fatal(err)
		}
	}
	link := filepath.Join(dir, "config.json")
	if err := os.Symlink(target, link); err != nil {
		t.Fatal(err)
	}
	d, err := readDocument(link)
	if err != nil {
		t.Fatal(err)
	}
	d.root.set("b", quote("c"))
	if err := d.write(); err != nil {
		t.Fatal(err)
	}
	if got := readFile(t, target); got != `{"a":1.50,"b":"c"}`+"\n" {
		t.Errorf("got %q", got)
	}
	info, err := os.Lstat(target)
	if err != nil {
		t.Fatal(err)
	}
	if info.Mode() != 0o640 {
		t.Errorf("mode %v", info.Mode())
	}
	if st := info.Sys().(*syscall.Stat_t); root && (st.Uid != 12 || st.Gid != 34) {
		t.Errorf("owner %d:%d", st.Uid, st.Gid)
	}
	if info, err := os.Lstat(link); err != nil || info.Mode()&os.ModeSymlink == 0 {
		t.Errorf("the link was replaced: %v %v", info, err)
	}
	if entries, err := os.ReadDir(filepath.Dir(target)); err != nil || len(entries) != 1 {
		t.Errorf("left behind: %v %v", entries, err)
	}
}

func TestWriteLeavesAnUnchangedFile(t *testing.T) {
	path := writeFile(t, filepath.Join(t.TempDir(), "config.json"), `{"a":1}`+"\n")
	before, err := os.Stat(path)
	if err != nil {
		t.Fatal(err)
	}
	d, err := readDocument(path)
	if err != nil {
		t.Fatal(err)
	}
	if err := d.write(); err != nil {
		t.Fatal(err)
	}
	after, err := os.Stat(path)
	if err != nil {
		t.Fatal(err)
	}
	if !os.SameFile(before, after) {
		t.Error("rewritten without a change")
	}
}

func TestWriteFailureLeavesTheOldFile(t *testing.T) {
	dir := t.TempDir()
	path := writeFile(t, filepath.Join(dir, "b", "config.json"), `{"a":1}`)
	d, err := readDocument(path)
	if err != nil {
		t.Fatal(err)
	}
	d.root.set("b", quote("c"))
	// The directory is gone: no temporary file can be made there.
	if err := os.Rename(filepath.Join(dir, "b"), filepath.Join(dir, "moved")); err != nil {
		t.Fatal(err)
	}
	if err := d.write(); !errors.Is(err, quota.CodeSpecUnwritable) {
		t.Errorf("got %v", err)
	}
	if got := readFile(t, filepath.Join(dir, "moved", "config.json")); got != `{"a":1}` {
		t.Errorf("got %q", got)
	}

	// The place is taken by a directory: the rename fails, the temporary file goes.
	path = writeFile(t, filepath.Join(dir, "c", "config.json"), `{"a":1}`)
	if d, err = readDocument(path); err != nil {
		t.Fatal(err)
	}
	d.root.set("b", quote("c"))
	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
	if err := os.MkdirAll(filepath.Join(path, "x"), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := d.write(); !errors.Is(err, quota.CodeSpecUnwritable) {
		t.Errorf("got %v", err)
	}
	if entries, err := os.ReadDir(filepath.Dir(path)); err != nil || len(entries) != 1 {
		t.Errorf("left behind: %v %v", entries, err)
	}

	d.root.set("b", quote(strings.Repeat("x", MaxConfigBytes)))
	if err := d.write(); !errors.Is(err, quota.CodeSpecTooLarge) {
		t.Errorf("got %v", err)
	}
}
