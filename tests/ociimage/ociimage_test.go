// SPDX-License-Identifier: Apache-2.0

package ociimage

import (
	"archive/tar"
	"bytes"
	"errors"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-containerregistry/pkg/name"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
)

func small() Image {
	return Image{
		Name: "localhost/small:test", Entrypoint: []string{"/bin/tool"}, Cmd: []string{"-x"}, Env: []string{"A=b"},
		Files: map[string]File{
			"/bin/tool": {Data: "#!/bin/sh\n", Mode: 0o755}, "/usr/bin/other": {Link: "tool"}, "/a/deep/er": {Data: "text"},
		},
	}
}

func TestWriteIsReproducibleAndReadable(t *testing.T) {
	dir := t.TempDir()
	var first []byte
	for range 3 {
		file := filepath.Join(dir, "image.tar")
		if err := Write(file, small()); err != nil {
			t.Fatal(err)
		}
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		if first == nil {
			first = text
		} else if !bytes.Equal(first, text) {
			t.Fatal("the same files gave other bytes")
		}
	}
	tag, err := name.NewTag("localhost/small:test")
	if err != nil {
		t.Fatal(err)
	}
	image, err := tarball.ImageFromPath(filepath.Join(dir, "image.tar"), &tag)
	if err != nil {
		t.Fatalf("read it back: %v", err)
	}
	config, err := image.ConfigFile()
	if err != nil {
		t.Fatal(err)
	}
	if got := config.Config; len(got.Entrypoint) != 1 || got.Entrypoint[0] != "/bin/tool" || len(got.Cmd) != 1 || got.Env[len(got.Env)-1] != "A=b" || config.OS != "linux" {
		t.Errorf("configuration is %+v", got)
	}
	files := map[string]string{}
	reader := mutate.Extract(image)
	defer reader.Close()
	for r := tar.NewReader(reader); ; {
		h, err := r.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		text, err := io.ReadAll(r)
		if err != nil {
			t.Fatal(err)
		}
		files[strings.TrimSuffix(h.Name, "/")] = string(text) + h.Linkname
	}
	for at, want := range map[string]string{"usr/bin/tool": "#!/bin/sh\n", "usr/bin/other": "tool", "a/deep/er": "text", "bin": "usr/bin", "tmp": "", "a/deep": ""} {
		if got, ok := files[at]; !ok || got != want {
			t.Errorf("%s is %q (there: %t), want %q", at, got, ok, want)
		}
	}
}

func TestWriteRefuses(t *testing.T) {
	for what, image := range map[string]Image{
		"a name of a registry": {Name: "small"},
		"a relative path":      {Name: "localhost/a:b", Files: map[string]File{"x": {Data: "y"}}},
		"a path twice":         {Name: "localhost/a:b", Files: map[string]File{"/bin/x": {Data: "y"}, "/usr/bin/x": {Data: "z"}}},
		"a file as a folder":   {Name: "localhost/a:b", Files: map[string]File{"/x": {Data: "y"}, "/x/y": {Data: "z"}}},
		"a missing file":       {Name: "localhost/a:b", Files: map[string]File{"/x": {Host: "/nonexistent/file"}}},
	} {
		dir := t.TempDir()
		if err := Write(filepath.Join(dir, "i.tar"), image); err == nil {
			t.Errorf("%s was taken", what)
		}
		if left, _ := os.ReadDir(dir); len(left) > 0 {
			t.Errorf("%s: %v was left", what, left)
		}
	}
}

// TestProgramBringsItsLibraries: what is added runs without anything else of the machine.
func TestProgramBringsItsLibraries(t *testing.T) {
	var image Image
	if err := image.Program("/probe", "/bin/true"); err != nil {
		t.Fatal(err)
	}
	var names []string
	for at := range image.Files {
		names = append(names, filepath.Base(at))
	}
	if all := strings.Join(names, " "); !strings.Contains(all, "libc.so") || !strings.Contains(all, "ld-") {
		t.Errorf("it brought %s", all)
	}
}
