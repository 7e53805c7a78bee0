// SPDX-License-Identifier: Apache-2.0

// Package image makes the container image of the chart's DaemonSet, for several architectures, as one
// OCI layout in a tar, without a daemon and without a registry.
//
// It promises: the image holds nothing but what it is given, in one layer; the same files and time give
// the same bytes.
package image

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"time"

	"github.com/google/go-containerregistry/pkg/name"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/layout"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
	"github.com/google/go-containerregistry/pkg/v1/types"

	"github.com/gpufence/gpufence/packaging/archive"
)

// Image is one that is to be written.
type Image struct {
	Name          string                  // with host and tag, as engines will call it: ghcr.io/gpufence/gpufence:0.3.0
	Architectures []string                // in the order of the index
	Files         map[string]archive.Tree // of each architecture
	Entrypoint    []string
	Env           []string
	Labels        map[string]string
	Time          time.Time
}

// Write writes the layout's tar to a file.
func (i Image) Write(file string) (err error) {
	tag, err := name.NewTag(i.Name, name.StrictValidation)
	if err != nil {
		return fmt.Errorf("write image %q: %w", i.Name, err)
	}
	var index v1.ImageIndex = empty.Index
	for _, arch := range i.Architectures {
		one, err := i.build(arch)
		if err != nil {
			return fmt.Errorf("write image %s for %s: %w", i.Name, arch, err)
		}
		index = mutate.AppendManifests(index, mutate.IndexAddendum{Add: one, Descriptor: v1.Descriptor{Platform: &v1.Platform{OS: "linux", Architecture: arch}}})
	}
	dir, err := os.MkdirTemp(filepath.Dir(file), ".image-")
	if err != nil {
		return fmt.Errorf("write image: %w", err)
	}
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
	// The layout's own index names what is in it, as engines look for it when they import.
	at, err := layout.Write(dir, empty.Index)
	if err == nil {
		err = at.AppendIndex(index, layout.WithAnnotations(map[string]string{
			"io.containerd.image.name": tag.Name(), "org.opencontainers.image.ref.name": tag.TagStr(),
		}))
	}
	tree := archive.Tree{}
	if err == nil {
		err = tree.AddFolder("", dir)
	}
	if err == nil {
		err = tree.TarFile(file, i.Time)
	}
	if err != nil {
		return fmt.Errorf("write image %s: %w", i.Name, err)
	}
	return nil
}

func (i Image) build(arch string) (v1.Image, error) {
	var tar bytes.Buffer
	if err := i.Files[arch].Tar(&tar, i.Time); err != nil {
		return nil, err
	}
	open := func() (io.ReadCloser, error) { return io.NopCloser(bytes.NewReader(tar.Bytes())), nil }
	layer, err := tarball.LayerFromOpener(open, tarball.WithMediaType(types.OCILayer), tarball.WithCompressedCaching)
	if err != nil {
		return nil, fmt.Errorf("make layer: %w", err)
	}
	base := mutate.ConfigMediaType(mutate.MediaType(empty.Image, types.OCIManifestSchema1), types.OCIConfigJSON)
	built, err := mutate.Append(base, mutate.Addendum{Layer: layer, MediaType: types.OCILayer, History: v1.History{Created: v1.Time{Time: i.Time.UTC()}, CreatedBy: "make package"}})
	if err != nil {
		return nil, fmt.Errorf("append layer: %w", err)
	}
	file, err := built.ConfigFile()
	if err != nil {
		return nil, fmt.Errorf("read configuration: %w", err)
	}
	file = file.DeepCopy()
	file.OS, file.Architecture, file.Created = "linux", arch, v1.Time{Time: i.Time.UTC()}
	file.Config = v1.Config{Entrypoint: i.Entrypoint, Env: i.Env, Labels: i.Labels, User: "0:0", WorkingDir: "/"}
	if built, err = mutate.ConfigFile(built, file); err != nil {
		return nil, fmt.Errorf("set configuration: %w", err)
	}
	return built, nil
}
