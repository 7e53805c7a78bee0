// SPDX-License-Identifier: Apache-2.0

package cdi

import (
	"debug/elf"
	"path"
	"path/filepath"
	"runtime"
	"strings"

	specs "tags.cncf.io/container-device-interface/specs-go"
)

// WithoutHooks makes a specification work in which no hook runs, on a host that has no
// nvidia-cdi-hook. What the hook would do in the container is done by mounts: a library is found
// under the name that programs are linked with, in the folders that the loaders of Debian's and Red
// Hat's families look into without being told.
func WithoutHooks(spec *specs.Spec) {
	fix := func(e *specs.ContainerEdits) {
		e.Hooks = nil
		have := map[string]bool{}
		for _, m := range e.Mounts {
			have[m.ContainerPath] = true
		}
		for _, m := range e.Mounts {
			for _, at := range names(m) {
				if !have[at] {
					have[at] = true
					extra := *m
					extra.ContainerPath = at
					e.Mounts = append(e.Mounts, &extra)
				}
			}
		}
	}
	fix(&spec.ContainerEdits)
	for i := range spec.Devices {
		fix(&spec.Devices[i].ContainerEdits)
	}
}

// names are the further places at which a mounted library has to be found.
func names(m *specs.Mount) []string {
	base := path.Base(m.ContainerPath)
	if !strings.Contains(base, ".so.") {
		return nil
	}
	soname := sonameOf(m.HostPath)
	if soname == "" {
		return nil
	}
	multi := map[string]string{"amd64": "x86_64-linux-gnu", "arm64": "aarch64-linux-gnu"}[runtime.GOARCH]
	out := []string{path.Join(path.Dir(m.ContainerPath), soname)}
	for _, dir := range []string{"/usr/lib/" + multi, "/usr/lib64"} {
		out = append(out, path.Join(dir, soname))
	}
	return out
}

// sonameOf is the name that programs are linked with, "" for what is no library of this machine.
func sonameOf(file string) string {
	f, err := elf.Open(file)
	if err != nil {
		return ""
	}
	defer func() { _ = f.Close() }() // nothing is lost: the file is only read
	if f.Class != elf.ELFCLASS64 {
		return ""
	}
	list, err := f.DynString(elf.DT_SONAME)
	if err != nil || len(list) == 0 || list[0] != filepath.Base(list[0]) {
		return ""
	}
	return list[0]
}

// WithoutNumbers leaves the numbers of device nodes to whoever uses the specification. Those of
// nvidia-uvm and of capabilities are given out when a module loads, so that they are others after the
// next boot.
func WithoutNumbers(spec *specs.Spec) {
	fix := func(e *specs.ContainerEdits) {
		for _, n := range e.DeviceNodes {
			n.Type, n.Major, n.Minor = "", 0, 0
		}
	}
	fix(&spec.ContainerEdits)
	for i := range spec.Devices {
		fix(&spec.Devices[i].ContainerEdits)
	}
}
