// SPDX-License-Identifier: Apache-2.0

package containerd

import (
	"path/filepath"
	"strings"

	"github.com/gpufence/gpufence/packaging/engine"
)

// owner is somebody who writes containerd's main file anew at each start.
type owner struct {
	name   string
	folder string // of the main file and its templates
	suffix string // of the main file's path
	// goTemplate: the template is Go's, and has the generated file as "base".
	goTemplate bool
}

var owners = []owner{
	{name: "k3s", suffix: "/rancher/k3s/agent/etc/containerd/config.toml", goTemplate: true},
	{name: "rke2", suffix: "/rancher/rke2/agent/etc/containerd/config.toml", goTemplate: true},
	{name: "microk8s", suffix: "/microk8s/current/args/containerd.toml"},
	{name: "microk8s", suffix: "/microk8s/current/args/containerd-template.toml"},
}

// Generated are the main files of distributions that write them themselves, most specific first,
// for finding out which containerd a node has.
func Generated() []string {
	return []string{
		"/var/lib/rancher/k3s/agent/etc/containerd/config.toml",
		"/var/lib/rancher/rke2/agent/etc/containerd/config.toml",
		"/var/snap/microk8s/current/args/containerd-template.toml",
	}
}

// ownerOf says whose the main file is; nil: the admin's.
func ownerOf(config string) *owner {
	for _, o := range owners {
		if strings.HasSuffix(config, o.suffix) {
			o.folder = filepath.Dir(config)
			return &o
		}
	}
	return nil
}

// template is where a person puts what has to be in the main file.
func (o owner) template(version int) string {
	switch {
	case !o.goTemplate:
		return filepath.Join(o.folder, "containerd-template.toml")
	case version >= 3:
		return filepath.Join(o.folder, "config-v3.toml.tmpl")
	}
	return filepath.Join(o.folder, "config.toml.tmpl")
}

// snippet is what to put there: a whole template where there is none, else the section.
func (o owner) snippet(files engine.Files, version int, body []byte) string {
	if !o.goTemplate {
		return string(body)
	}
	if text, err := engine.ReadOptional(files, o.template(version)); err == nil && text != nil {
		return string(body)
	}
	return "{{ template \"base\" . }}\n\n" + string(body)
}
