// SPDX-License-Identifier: Apache-2.0

// Package ociimage makes small container images out of files of this machine, without a registry and
// without a daemon: one tar that `ctr images import`, `podman load` and `docker load` all take.
//
// The same files give the same bytes, whenever and wherever they are written: names are sorted, times
// are zero, owners are root.
package ociimage

import (
	"archive/tar"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"runtime"
	"slices"
	"strings"

	"github.com/google/go-containerregistry/pkg/name"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/tarball"

	"github.com/gpufence/gpufence/tests/ldd"
)

// File is one file of an image; exactly one of Host, Data and Link says what it is.
type File struct {
	Host string // a file of this machine; what a link points to instead of the link
	Data string // its text
	Link string // a symbolic link to that
	Mode fs.FileMode
}

// Image is one that is to be written.
type Image struct {
	// Name is how engines will call it, with a host and a tag: localhost/busybox:test. A name
	// without them would be completed to one of a registry.
	Name       string
	Files      map[string]File // by their absolute path in the image
	Entrypoint []string
	Cmd        []string
	Env        []string
}

// folders exist in every image; engines make what is missing of them, but not on a read-only root.
var folders = map[string]int64{
	"dev": 0o755, "etc": 0o755, "proc": 0o755, "run": 0o755, "sys": 0o755, "tmp": 0o1777, "usr": 0o755, "usr/bin": 0o755, "usr/lib": 0o755, "usr/lib64": 0o755,
}

// merged are the links of a present-day image.
var merged = map[string]string{"bin": "usr/bin", "lib": "usr/lib", "lib64": "usr/lib64", "sbin": "usr/bin"}

// Write writes the tar of an image, by rename, so that who finds it finds it whole.
func Write(file string, image Image) (err error) {
	tag, err := name.NewTag(image.Name, name.StrictValidation)
	if err != nil {
		return fmt.Errorf("write image %q: %w", image.Name, err)
	}
	built, err := image.build()
	if err != nil {
		return fmt.Errorf("write image %s: %w", image.Name, err)
	}
	out, err := os.CreateTemp(filepath.Dir(file), filepath.Base(file)+".new-")
	if err != nil {
		return fmt.Errorf("write image %s: %w", image.Name, err)
	}
	defer func() {
		if err != nil {
			err = errors.Join(fmt.Errorf("write image %s: %w", image.Name, err), os.Remove(out.Name()))
		}
	}()
	if err := tarball.Write(tag, built, out); err != nil {
		return errors.Join(err, out.Close())
	}
	if err := errors.Join(out.Chmod(0o644), out.Close()); err != nil {
		return err
	}
	return os.Rename(out.Name(), file)
}

func (i Image) build() (v1.Image, error) {
	layer, err := i.layer()
	if err != nil {
		return nil, err
	}
	l, err := tarball.LayerFromOpener(func() (io.ReadCloser, error) { return io.NopCloser(bytes.NewReader(layer)), nil })
	if err != nil {
		return nil, fmt.Errorf("make layer: %w", err)
	}
	image, err := mutate.AppendLayers(empty.Image, l)
	if err != nil {
		return nil, fmt.Errorf("append layer: %w", err)
	}
	file, err := image.ConfigFile()
	if err != nil {
		return nil, fmt.Errorf("read configuration: %w", err)
	}
	file = file.DeepCopy()
	file.OS, file.Architecture = "linux", runtime.GOARCH
	file.Config = v1.Config{Entrypoint: i.Entrypoint, Cmd: i.Cmd, Env: append([]string{"PATH=/usr/sbin:/usr/bin:/sbin:/bin"}, i.Env...)}
	image, err = mutate.ConfigFile(image, file)
	if err != nil {
		return nil, fmt.Errorf("set configuration: %w", err)
	}
	return image, nil
}

// layer is the image's only one, as a tar.
func (i Image) layer() ([]byte, error) {
	dirs, files := map[string]int64{}, map[string]File{}
	for dir, mode := range folders {
		dirs[dir] = mode
	}
	for link, target := range merged {
		files[link] = File{Link: target}
	}
	files["etc/passwd"] = File{Data: "root:x:0:0:root:/root:/bin/sh\nnobody:x:65534:65534:nobody:/:/bin/sh\n"}
	files["etc/group"] = File{Data: "root:x:0:\nnogroup:x:65534:\n"}
	for at, file := range i.Files {
		if !path.IsAbs(at) || path.Clean(at) != at {
			return nil, fmt.Errorf("path %q is not absolute and clean", at)
		}
		at = unmerged(at)
		if _, ok := files[at]; ok && at != "etc/passwd" && at != "etc/group" {
			return nil, fmt.Errorf("path %q occurs twice", "/"+at)
		}
		files[at] = file
		for dir := path.Dir(at); dir != "."; dir = path.Dir(dir) {
			if _, ok := dirs[dir]; !ok {
				dirs[dir] = 0o755
			}
		}
	}
	names := make([]string, 0, len(dirs)+len(files))
	for dir := range dirs {
		names = append(names, dir)
	}
	for file := range files {
		if _, ok := dirs[file]; ok {
			return nil, fmt.Errorf("path %q is a file and a folder", "/"+file)
		}
		names = append(names, file)
	}
	slices.Sort(names) // a folder comes before what is in it
	var out bytes.Buffer
	w := tar.NewWriter(&out)
	for _, at := range names {
		if mode, ok := dirs[at]; ok {
			if err := w.WriteHeader(&tar.Header{Typeflag: tar.TypeDir, Name: at + "/", Mode: mode}); err != nil {
				return nil, fmt.Errorf("write folder /%s: %w", at, err)
			}
			continue
		}
		if err := add(w, at, files[at]); err != nil {
			return nil, fmt.Errorf("add /%s: %w", at, err)
		}
	}
	if err := w.Close(); err != nil {
		return nil, fmt.Errorf("end layer: %w", err)
	}
	return out.Bytes(), nil
}

func add(w *tar.Writer, at string, f File) error {
	if f.Link != "" {
		return w.WriteHeader(&tar.Header{Typeflag: tar.TypeSymlink, Name: at, Linkname: f.Link, Mode: 0o777})
	}
	data, mode := []byte(f.Data), f.Mode
	if f.Host != "" {
		var err error
		if data, err = os.ReadFile(f.Host); err != nil {
			return err
		}
	}
	if mode == 0 {
		mode = 0o644
		if f.Host != "" {
			mode = 0o755
		}
	}
	if err := w.WriteHeader(&tar.Header{Typeflag: tar.TypeReg, Name: at, Size: int64(len(data)), Mode: int64(mode.Perm())}); err != nil {
		return err
	}
	_, err := w.Write(data)
	return err
}

// unmerged is where a path leads that goes through one of the links of [merged], without its slash.
func unmerged(at string) string {
	at = strings.TrimPrefix(at, "/")
	first, rest, ok := strings.Cut(at, "/")
	if target, linked := merged[first]; ok && linked {
		return target + "/" + rest
	}
	return at
}

// Program adds a program of this machine, with its loader and the libraries that it and the extra
// files need.
func (i *Image) Program(at, host string, extra ...string) error {
	if i.Files == nil {
		i.Files = map[string]File{}
	}
	loader, machine, err := ldd.Loader(host)
	if err != nil {
		return fmt.Errorf("add program: %w", err)
	}
	i.Files[at] = File{Host: host}
	if loader == "" {
		return nil
	}
	i.Files["/"+unmerged(loader)] = File{Host: loader}
	libraries, err := ldd.Libraries(machine, append([]string{host}, extra...)...)
	if err != nil {
		return fmt.Errorf("add program: %w", err)
	}
	for _, library := range libraries {
		if _, ok := i.Files["/"+unmerged(library)]; !ok && path.Base(library) != path.Base(loader) {
			i.Files["/"+unmerged(library)] = File{Host: library}
		}
	}
	return nil
}

// Busybox is an image with a static busybox under all its names, and the dynamic loader and C library
// of this machine, so that dynamic programs run in it, too: add them with [Image.Program].
func Busybox(ctx context.Context, ref string) (Image, error) {
	for _, host := range []string{"/bin/busybox", "/usr/bin/busybox"} {
		loader, _, err := ldd.Loader(host)
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return Image{}, fmt.Errorf("make busybox image: %w", err)
		}
		if loader != "" {
			return Image{}, fmt.Errorf("make busybox image: %s is not static: install busybox-static", host)
		}
		list, err := exec.CommandContext(ctx, host, "--list").Output()
		if err != nil {
			return Image{}, fmt.Errorf("make busybox image: list what %s can do: %w", host, err)
		}
		image := Image{Name: ref, Cmd: []string{"/bin/sh"}, Files: map[string]File{"/usr/bin/busybox": {Host: host}}}
		for applet := range strings.FieldsSeq(string(list)) {
			if applet != "busybox" {
				image.Files["/usr/bin/"+applet] = File{Link: "busybox"}
			}
		}
		return image, nil
	}
	return Image{}, errors.New("make busybox image: no busybox here: install busybox-static")
}

// Clients is [Busybox] with the GPU programs of the tests of a build in /clients: client, which the
// shim reaches, and bypass, which only gpufenced can hold. The simulated driver's libraries and its
// sockets are not in it: they come with the simulated GPU, as a driver's do.
func Clients(ctx context.Context, ref, dist string) (Image, error) {
	image, err := Busybox(ctx, ref)
	if err != nil {
		return Image{}, err
	}
	for _, program := range []string{"client", "bypass"} {
		extra := []string{filepath.Join(dist, "simgpu/libcuda.so.1"), filepath.Join(dist, "simgpu/libnvidia-ml.so.1"), filepath.Join(dist, "lib/libgpufence.so")}
		if err := image.Program("/clients/"+program, filepath.Join(dist, "clients", program), extra...); err != nil {
			return Image{}, fmt.Errorf("make clients' image: %w", err)
		}
	}
	return image, nil
}

// pauseSource holds a pod's namespaces, reaps what is left to it, and ends when it is told to.
const pauseSource = `
#define _GNU_SOURCE
#include <errno.h>
#include <signal.h>
#include <sys/wait.h>

int main(void)
{
	sigset_t set;
	int signal;

	sigemptyset(&set);
	sigaddset(&set, SIGTERM);
	sigaddset(&set, SIGINT);
	sigaddset(&set, SIGCHLD);
	if (sigprocmask(SIG_BLOCK, &set, 0))
		return 1;
	for (;;) {
		if (sigwait(&set, &signal))
			return 1;
		if (signal != SIGCHLD)
			return 0;
		while (waitpid(-1, 0, WNOHANG) > 0)
			;
	}
}
`

// Pause is the image of a pod's first container; its program is compiled into dir.
func Pause(ctx context.Context, ref, dir string) (Image, error) {
	program := filepath.Join(dir, "pause")
	cc := exec.CommandContext(ctx, "gcc", "-Os", "-static", "-s", "-Wl,--build-id=none", "-x", "c", "-o", program, "-")
	cc.Stdin = strings.NewReader(pauseSource)
	if out, err := cc.CombinedOutput(); err != nil {
		return Image{}, fmt.Errorf("make pause image: compile: %w: %s", err, bytes.TrimSpace(out))
	}
	return Image{Name: ref, Entrypoint: []string{"/pause"}, Files: map[string]File{"/pause": {Host: program}}}, nil
}
