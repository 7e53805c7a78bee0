// SPDX-License-Identifier: Apache-2.0

package image

import (
	"archive/tar"
	"bytes"
	"errors"
	"io"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/google/go-containerregistry/pkg/v1/layout"
	"github.com/google/go-containerregistry/pkg/v1/validate"

	"github.com/gpufence/gpufence/packaging/archive"
)

func sample() Image {
	files := func(arch string) archive.Tree {
		return archive.Tree{"usr/bin/agent": {Data: []byte(arch), Exec: true}, "opt/lib/link": {Link: "v1/lib"}}
	}
	return Image{
		Name: "registry.example/team/agent:1.2.3", Architectures: []string{"amd64", "arm64"}, Entrypoint: []string{"/usr/bin/agent"},
		Files: map[string]archive.Tree{"amd64": files("amd64"), "arm64": files("arm64")}, Time: time.Unix(1_700_000_000, 0),
	}
}

func unpack(t *testing.T, file string) string {
	t.Helper()
	dir := t.TempDir()
	f, err := os.Open(file)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	for r := tar.NewReader(f); ; {
		h, err := r.Next()
		if errors.Is(err, io.EOF) {
			return dir
		}
		if err != nil {
			t.Fatal(err)
		}
		at := filepath.Join(dir, h.Name)
		if h.Typeflag == tar.TypeDir {
			err = os.MkdirAll(at, 0o755)
		} else {
			var data []byte
			if data, err = io.ReadAll(r); err == nil {
				err = os.WriteFile(at, data, 0o644)
			}
		}
		if err != nil {
			t.Fatal(err)
		}
	}
}

func TestWrite(t *testing.T) {
	one, two := filepath.Join(t.TempDir(), "one.tar"), filepath.Join(t.TempDir(), "two.tar")
	for _, file := range []string{one, two} {
		if err := sample().Write(file); err != nil {
			t.Fatal(err)
		}
	}
	a, err := os.ReadFile(one)
	if err != nil {
		t.Fatal(err)
	}
	b, err := os.ReadFile(two)
	if err != nil || !bytes.Equal(a, b) {
		t.Errorf("two images of the same files differ (%v)", err)
	}
	index, err := layout.ImageIndexFromPath(unpack(t, one))
	if err != nil {
		t.Fatal(err)
	}
	if err := validate.Index(index); err != nil {
		t.Error(err)
	}
	top, err := index.IndexManifest()
	if err != nil {
		t.Fatal(err)
	}
	if len(top.Manifests) != 1 || top.Manifests[0].Annotations["io.containerd.image.name"] != "registry.example/team/agent:1.2.3" {
		t.Fatalf("the layout names %+v", top.Manifests)
	}
	inner, err := index.ImageIndex(top.Manifests[0].Digest)
	if err != nil {
		t.Fatal(err)
	}
	list, err := inner.IndexManifest()
	if err != nil {
		t.Fatal(err)
	}
	var arches []string
	for _, m := range list.Manifests {
		image, err := inner.Image(m.Digest)
		if err != nil {
			t.Fatal(err)
		}
		config, err := image.ConfigFile()
		if err != nil {
			t.Fatal(err)
		}
		if config.Architecture != m.Platform.Architecture || !slices.Equal(config.Config.Entrypoint, []string{"/usr/bin/agent"}) {
			t.Errorf("%s: configuration %+v", m.Platform.Architecture, config)
		}
		arches = append(arches, config.Architecture)
	}
	if !slices.Equal(arches, []string{"amd64", "arm64"}) {
		t.Errorf("architectures %q", arches)
	}
}

func TestWriteRefusesAName(t *testing.T) {
	i := sample()
	i.Name = "agent"
	if err := i.Write(filepath.Join(t.TempDir(), "x.tar")); err == nil {
		t.Error("a name without a tag was taken")
	}
}
