// SPDX-License-Identifier: Apache-2.0

// Package doctor looks at a node as an administrator would: which engines are there and whether
// they start containers through gpufence, what the kernel and the driver could carry, and who else
// on the node shares GPUs.
//
// What it promises: it only reads; what it cannot read it says; every complaint carries the line
// that mends it.
package doctor

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"

	"github.com/pelletier/go-toml/v2"
)

// maxFileBytes bounds what is read of one file.
const maxFileBytes = 4 << 20

// wrapper is what our runtime is called, before the engine's suffix.
const wrapper = "gpufence-runtime"

// Engine is a container engine of this node.
type Engine struct {
	Name    string `json:"name"` // containerd, k3s, rke2, cri-o, docker, podman
	Present bool   `json:"present"`
	// Config is the file that names our handler, or the one where it should be named.
	Config string `json:"config,omitempty"`
	// Handler is what our runtime is called there, Runtime its path; empty: it is not installed.
	Handler  string    `json:"handler,omitempty"`
	Runtime  string    `json:"runtime,omitempty"`
	Problems []Problem `json:"problems,omitempty"`
}

// Problem is what is wrong, and the line that mends it.
type Problem struct {
	What string `json:"what"`
	Fix  string `json:"fix,omitempty"`
}

func (e *Engine) problem(fix, format string, args ...any) {
	e.Problems = append(e.Problems, Problem{fmt.Sprintf(format, args...), fix})
}

// kind is how one engine is found and read.
type kind struct {
	name    string
	signs   []string // any of these: it is there
	configs []string // globs; later files count more
	suffix  string   // of our runtime's name
	read    func(text []byte) ([]handler, error)
}

// handler is a runtime that an engine's configuration names.
type handler struct {
	name, path  string
	annotations []string // pod_annotations
	needs       bool     // it passes no annotation that it was not told of
}

var kinds = []kind{
	{"containerd", []string{"run/containerd/containerd.sock", "etc/containerd/config.toml", "usr/bin/containerd"},
		[]string{"etc/containerd/config.toml", "etc/containerd/conf.d/*.toml"}, ".cri", readContainerd},
	{"k3s", []string{"run/k3s/containerd/containerd.sock", "var/lib/rancher/k3s/agent/etc/containerd/config.toml"},
		[]string{"var/lib/rancher/k3s/agent/etc/containerd/config.toml", "var/lib/rancher/k3s/agent/etc/containerd/config.toml.d/*.toml", "var/lib/rancher/k3s/agent/etc/containerd/config-v3.toml.d/*.toml"}, ".cri", readContainerd},
	{"rke2", []string{"var/lib/rancher/rke2/agent/etc/containerd/config.toml"},
		[]string{"var/lib/rancher/rke2/agent/etc/containerd/config.toml", "var/lib/rancher/rke2/agent/etc/containerd/config.toml.d/*.toml", "var/lib/rancher/rke2/agent/etc/containerd/config-v3.toml.d/*.toml"}, ".cri", readContainerd},
	{"cri-o", []string{"run/crio/crio.sock", "etc/crio", "usr/bin/crio"},
		[]string{"etc/crio/crio.conf", "etc/crio/crio.conf.d/*.conf"}, ".crio", readCRIO},
	{"docker", []string{"run/docker.sock", "etc/docker/daemon.json", "usr/bin/dockerd"},
		[]string{"etc/docker/daemon.json"}, ".docker", readDocker},
	{"podman", []string{"usr/bin/podman", "usr/local/bin/podman", "etc/containers/containers.conf"},
		[]string{"usr/share/containers/containers.conf", "etc/containers/containers.conf", "etc/containers/containers.conf.d/*.conf"}, ".podman", readPodman},
}

// Engines looks at the engines of the node below root, "/" but in tests.
func Engines(root string) []Engine {
	var out []Engine
	for _, k := range kinds {
		e := Engine{Name: k.name, Config: "/" + k.configs[0]}
		e.Present = slices.ContainsFunc(k.signs, func(s string) bool { return exists(filepath.Join(root, s)) })
		for _, file := range files(root, k.configs) {
			text, err := read(filepath.Join(root, file))
			if err != nil {
				e.problem("", "%s cannot be read: %v", file, err)
				continue
			}
			handlers, err := k.read(text)
			if err != nil {
				e.problem("mend it: the engine will not start with it", "%s cannot be understood: %s", file, oneLine(err))
				continue
			}
			for _, h := range handlers {
				if ours(h.path) {
					e.take(root, file, k, h)
				}
			}
		}
		if e.Present || e.Handler != "" || len(e.Problems) > 0 {
			out = append(out, e)
		}
	}
	return out
}

// take judges a handler of ours.
func (e *Engine) take(root, file string, k kind, h handler) {
	e.Handler, e.Runtime, e.Config = h.name, h.path, file
	base := path.Base(h.path)
	if base != wrapper+k.suffix {
		e.problem("name "+path.Join(path.Dir(h.path), wrapper+k.suffix)+" there", "%s: the handler %s starts %s, which reads another engine's keys", file, h.name, base)
	}
	if path.IsAbs(h.path) {
		info, err := os.Stat(filepath.Join(root, h.path))
		switch {
		case err != nil:
			e.problem("install it there, or name where it is", "%s: the handler %s starts %s, which is not there", file, h.name, h.path)
		case !info.Mode().IsRegular() || info.Mode().Perm()&0o111 == 0:
			e.problem("chmod 755 "+h.path, "%s: the handler %s starts %s, which cannot be executed", file, h.name, h.path)
		}
	}
	if h.needs && !slices.ContainsFunc(h.annotations, func(p string) bool {
		ok, err := path.Match(p, "gpufence.dev/memory.max")
		return ok && err == nil
	}) {
		e.problem(`pod_annotations = ["gpufence.dev/*"]`, "%s: the handler %s passes no gpufence.dev annotations on, so limits get lost", file, h.name)
	}
}

// Right says whether the engine starts containers through gpufence, if asked to.
func (e *Engine) Right() bool { return e.Handler != "" && len(e.Problems) == 0 }

// Drift compares engines with those that were right before, by name with their handlers. It
// returns what is wrong now, and what is to be remembered.
func Drift(before map[string]string, now []Engine) (drift []string, remember map[string]string) {
	remember = map[string]string{}
	for i := range now {
		e := &now[i]
		was, had := before[e.Name]
		switch {
		case e.Right():
			remember[e.Name] = e.Handler
			continue
		case e.Handler == "" && had:
			drift = append(drift, fmt.Sprintf("%s: the handler %s is gone from %s", e.Name, was, e.Config))
		}
		if had {
			remember[e.Name] = was
		}
		if e.Handler != "" || had {
			for _, p := range e.Problems {
				drift = append(drift, e.Name+": "+p.What)
			}
		}
	}
	// An engine that was removed with everything takes its handler along.
	return drift, remember
}

func ours(p string) bool {
	base := path.Base(p)
	return base == wrapper || strings.HasPrefix(base, wrapper+".")
}

// files are those that exist of the globs, as paths on the node.
func files(root string, globs []string) []string {
	var out []string
	for _, g := range globs {
		found, err := filepath.Glob(filepath.Join(root, g))
		if err != nil {
			continue // the patterns are ours, and right
		}
		for _, f := range found {
			rel, err := filepath.Rel(root, f)
			if err == nil {
				out = append(out, "/"+rel)
			}
		}
	}
	return out
}

func exists(p string) bool {
	_, err := os.Lstat(p)
	return err == nil
}

func read(p string) ([]byte, error) {
	f, err := os.Open(p)
	if err != nil {
		return nil, err
	}
	defer f.Close() // only read
	info, err := f.Stat()
	if err != nil {
		return nil, err
	}
	if !info.Mode().IsRegular() {
		return nil, fmt.Errorf("%w: not a regular file", fs.ErrInvalid)
	}
	text, err := io.ReadAll(io.LimitReader(f, maxFileBytes+1))
	if err == nil && len(text) > maxFileBytes {
		err = errors.New("it is too large")
	}
	return text, err
}

func oneLine(err error) string { return strings.Join(strings.Fields(err.Error()), " ") }

// readContainerd knows versions 1 to 3 of the file.
func readContainerd(text []byte) ([]handler, error) {
	type runtimes map[string]struct {
		Annotations []string `toml:"pod_annotations"`
		Options     struct {
			BinaryName string
		} `toml:"options"`
	}
	type plugin struct {
		Containerd struct {
			Runtimes runtimes `toml:"runtimes"`
		} `toml:"containerd"`
	}
	var file struct {
		Plugins map[string]any `toml:"plugins"`
	}
	if err := toml.Unmarshal(text, &file); err != nil {
		return nil, err
	}
	var out []handler
	for _, name := range []string{"cri", "io.containerd.grpc.v1.cri", "io.containerd.cri.v1.runtime"} {
		tree, ok := file.Plugins[name]
		if !ok {
			continue
		}
		// Only this plugin's part is read into a form; what other plugins have there is theirs.
		part, err := toml.Marshal(tree)
		if err != nil {
			return nil, err
		}
		var p plugin
		if err := toml.Unmarshal(part, &p); err != nil {
			return nil, err
		}
		for name, r := range p.Containerd.Runtimes {
			out = append(out, handler{name: name, path: r.Options.BinaryName, annotations: r.Annotations, needs: true})
		}
	}
	return sorted(out), nil
}

func readCRIO(text []byte) ([]handler, error) {
	var file struct {
		Crio struct {
			Runtime struct {
				Runtimes map[string]struct {
					Path string `toml:"runtime_path"`
				} `toml:"runtimes"`
			} `toml:"runtime"`
		} `toml:"crio"`
	}
	if err := toml.Unmarshal(text, &file); err != nil {
		return nil, err
	}
	var out []handler
	for name, r := range file.Crio.Runtime.Runtimes {
		out = append(out, handler{name: name, path: r.Path})
	}
	return sorted(out), nil
}

func readDocker(text []byte) ([]handler, error) {
	var file struct {
		Runtimes map[string]struct {
			Path string `json:"path"`
		} `json:"runtimes"`
	}
	if len(strings.TrimSpace(string(text))) == 0 {
		return nil, nil
	}
	if err := json.Unmarshal(text, &file); err != nil {
		return nil, err
	}
	var out []handler
	for name, r := range file.Runtimes {
		out = append(out, handler{name: name, path: r.Path})
	}
	return sorted(out), nil
}

func readPodman(text []byte) ([]handler, error) {
	var file struct {
		Engine struct {
			Runtimes map[string][]string `toml:"runtimes"`
		} `toml:"engine"`
	}
	if err := toml.Unmarshal(text, &file); err != nil {
		return nil, err
	}
	var out []handler
	for name, paths := range file.Engine.Runtimes {
		for _, p := range paths {
			out = append(out, handler{name: name, path: p})
		}
	}
	return sorted(out), nil
}

func sorted(h []handler) []handler {
	slices.SortFunc(h, func(a, b handler) int { return strings.Compare(a.name+"\x00"+a.path, b.name+"\x00"+b.path) })
	return h
}
