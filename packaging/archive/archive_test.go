// SPDX-License-Identifier: Apache-2.0

package archive

import (
	"archive/tar"
	"bytes"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"
)

var at = time.Unix(1_700_000_000, 0)

func sample(t *testing.T, dir string, mode fs.FileMode) Tree {
	t.Helper()
	host := filepath.Join(dir, "program")
	if err := os.WriteFile(host, []byte("program"), mode); err != nil {
		t.Fatal(err)
	}
	tree := Tree{}
	for name, e := range map[string]Entry{"b/program": {Host: host, Exec: true}, "b.txt": {Data: []byte("text")}, "a/c/link": {Link: "../d"}, "b/empty": {}} {
		if err := tree.Add(name, e); err != nil {
			t.Fatal(err)
		}
	}
	return tree
}

func TestTarIsTheSameForTheSame(t *testing.T) {
	var one, two bytes.Buffer
	if err := sample(t, t.TempDir(), 0o700).Tar(&one, at); err != nil {
		t.Fatal(err)
	}
	if err := sample(t, t.TempDir(), 0o666).Tar(&two, at); err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(one.Bytes(), two.Bytes()) {
		t.Error("two archives of the same tree differ")
	}
	var got []string
	for r := tar.NewReader(&one); ; {
		h, err := r.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		if h.Uid != 0 || h.Gid != 0 || !h.ModTime.Equal(at) {
			t.Errorf("%s is of %d:%d at %v", h.Name, h.Uid, h.Gid, h.ModTime)
		}
		got = append(got, fmt.Sprintf("%o %s", h.Mode, h.Name))
	}
	want := []string{"755 a/", "755 a/c/", "777 a/c/link", "755 b/", "644 b/empty", "755 b/program", "644 b.txt"}
	if !slices.Equal(got, want) {
		t.Errorf("the archive holds %q, want %q", got, want)
	}
}

func TestFolder(t *testing.T) {
	root := filepath.Join(t.TempDir(), "root")
	if err := sample(t, t.TempDir(), 0o700).Folder(root, at); err != nil {
		t.Fatal(err)
	}
	for name, mode := range map[string]fs.FileMode{"a": fs.ModeDir | 0o755, "b": fs.ModeDir | 0o755, "b/program": 0o755, "b.txt": 0o644} {
		info, err := os.Stat(filepath.Join(root, name))
		if err != nil {
			t.Fatal(err)
		}
		if info.Mode() != mode || !info.ModTime().Equal(at) {
			t.Errorf("%s: mode %v, time %v", name, info.Mode(), info.ModTime())
		}
	}
	back := Tree{}
	if err := back.AddFolder("", root); err != nil {
		t.Fatal(err)
	}
	if len(back) != 4 || !back["b/program"].Exec || back["a/c/link"].Link != "../d" {
		t.Errorf("read back: %v", back)
	}
}

func TestAddRefuses(t *testing.T) {
	tree := Tree{"there": {}}
	for _, name := range []string{"", ".", "..", "../x", "/abs", "a//b", "a/", "there"} {
		if err := tree.Add(name, Entry{}); err == nil {
			t.Errorf("%q was added", name)
		}
	}
	if err := (Tree{"a": {}, "a/b": {}}).Tar(io.Discard, at); err == nil {
		t.Error("a file that is a folder, too, was written")
	}
}
