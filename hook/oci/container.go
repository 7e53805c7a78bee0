// SPDX-License-Identifier: Apache-2.0

package oci

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path"
	"path/filepath"
	"slices"
	"sort"
	"strings"

	"github.com/gpufence/gpufence/enforcer/api"
	"github.com/gpufence/gpufence/enforcer/quota"
	"github.com/gpufence/gpufence/hook/plan"
)

// Annotations that engines write after everything a user can, so that no pod can forge them.
// They are read only where the wrapper's own name says that this engine called. CRI-O copies a
// pod's annotations, then writes its own, then the kubelet's labels (io.kubernetes.pod.*): its
// own io.kubernetes.cri-o.Namespace and KubeName are not among them in a container's spec, so
// that there a pod could choose its namespace's policy.
const (
	criType      = "io.kubernetes.cri.container-type"
	criSandbox   = "io.kubernetes.cri.sandbox-id"
	criNamespace = "io.kubernetes.cri.sandbox-namespace"
	criPod       = "io.kubernetes.cri.sandbox-name"
	criUID       = "io.kubernetes.cri.sandbox-uid"
	criName      = "io.kubernetes.cri.container-name"

	crioType    = "io.kubernetes.cri-o.ContainerType"
	crioSandbox = "io.kubernetes.cri-o.SandboxID"

	kubeName      = "io.kubernetes.container.name"
	kubePod       = "io.kubernetes.pod.name"
	kubeNamespace = "io.kubernetes.pod.namespace"
	kubeUID       = "io.kubernetes.pod.uid"

	// The kubelet's, a path in the container.
	terminationPath        = "io.kubernetes.container.terminationMessagePath"
	defaultTerminationPath = "/dev/termination-log"

	cdiPrefix = "cdi.k8s.io/"
)

// Where the shim and its pages appear in a container.
const (
	shimDir = "/dev/gpufence"
	// shimDirHostDev is used where /dev is somebody's directory: a mount point made there
	// would stay.
	shimDirHostDev = "/run/gpufence-shim"
)

// container is what a config.json says about a container, as far as we care.
type container struct {
	input  plan.Input
	pod    api.PodRef
	name   string // in its pod; "" elsewhere
	args   []string
	cwd    string
	rootfs string // absolute

	unhooked       bool // the runtime would run no hook
	shimDir        string
	narrowLib      bool
	terminationLog string // on the host; "" if there is none
}

// specView are the fields that we read. Everything else is the low-level runtime's to judge.
type specView struct {
	Root *struct {
		Path string `json:"path"`
	} `json:"root"`
	Process *struct {
		Args         []string `json:"args"`
		Env          []string `json:"env"`
		Cwd          string   `json:"cwd"`
		Capabilities *struct {
			Bounding []string `json:"bounding"`
		} `json:"capabilities"`
	} `json:"process"`
	Mounts []struct {
		Destination string   `json:"destination"`
		Source      string   `json:"source"`
		Type        string   `json:"type"`
		Options     []string `json:"options"`
	} `json:"mounts"`
	Annotations map[string]string `json:"annotations"`
	Linux       *struct {
		Namespaces []struct {
			Type string `json:"type"`
			Path string `json:"path"`
		} `json:"namespaces"`
		Devices []struct {
			Path  string `json:"path"`
			Type  string `json:"type"`
			Major int64  `json:"major"`
			Minor int64  `json:"minor"`
		} `json:"devices"`
	} `json:"linux"`
}

// readContainer takes a document apart. bundle is the directory that relative paths start at.
func readContainer(d *document, engine quota.Engine, id, bundle string) (container, error) {
	if err := checkNames(d.root); err != nil {
		return container{}, quota.NewError(quota.CodeSpecInvalid, "%s: %w", d.path, err)
	}
	var v specView
	if err := json.Unmarshal(d.root.bytes(), &v); err != nil {
		var kind *json.UnmarshalTypeError
		if errors.As(err, &kind) {
			return container{}, quota.NewError(quota.CodeSpecInvalid, "%s: %s is a %s where a %s belongs", d.path, kind.Field, kind.Value, kind.Type)
		}
		return container{}, quota.NewError(quota.CodeSpecInvalid, "%s: %w", d.path, err)
	}
	c := container{
		input:   plan.Input{Engine: engine, ID: id, Annotations: v.Annotations},
		shimDir: shimDir,
	}
	var capabilities []string
	if p := v.Process; p != nil {
		c.input.Env, c.args, c.cwd = p.Env, p.Args, p.Cwd
		if len(p.Args) > 0 {
			c.input.Args0 = p.Args[0]
		}
		if p.Capabilities != nil {
			capabilities = p.Capabilities.Bounding
		}
	}
	if v.Root != nil && v.Root.Path != "" {
		c.rootfs = v.Root.Path
		if !filepath.IsAbs(c.rootfs) {
			c.rootfs = filepath.Join(bundle, c.rootfs)
		}
	}
	for _, m := range v.Mounts {
		mount := plan.Mount{Destination: m.Destination, Source: m.Source, Type: m.Type, Options: m.Options}
		if isBind(mount) && mount.Source != "" && !filepath.IsAbs(mount.Source) {
			mount.Source = filepath.Join(bundle, mount.Source)
		}
		c.input.Mounts = append(c.input.Mounts, mount)
	}
	hostPID := true
	if v.Linux != nil {
		for _, dev := range v.Linux.Devices {
			c.input.Devices = append(c.input.Devices, plan.NodeOf(dev.Path, dev.Type, dev.Major, dev.Minor))
		}
		for _, ns := range v.Linux.Namespaces {
			if ns.Type == "pid" && !sameNamespace(ns.Path, "/proc/self/ns/pid") {
				hostPID = false
			}
		}
	}
	c.input.Privileged = hostPID || hasCapability(capabilities, "CAP_SYS_ADMIN", "CAP_BPF")
	c.input.CDINames = cdiNames(v.Annotations)
	c.readIdentity(engine, id)
	c.input.Namespace, c.input.Pod, c.input.Container = c.pod.Namespace, c.pod.Name, c.name
	c.readPlaces()
	return c, nil
}

// checkNames refuses names that occur twice in what we read or edit.
func checkNames(root *object) error {
	if _, err := parseMap(root.get("annotations")); err != nil {
		return fmt.Errorf("annotations %w", err)
	}
	process, err := root.child("process")
	if err != nil {
		return err
	}
	linux, err := root.child("linux")
	if err != nil {
		return err
	}
	for _, level := range []struct {
		of   *object
		name string
	}{
		{root, "root"}, {root, "hooks"}, {process, "user"}, {process, "capabilities"}, {linux, "resources"},
	} {
		if _, err := level.of.child(level.name); err != nil {
			return err
		}
	}
	for _, list := range []struct {
		of   *object
		name string
	}{
		{root, "mounts"}, {linux, "devices"}, {linux, "namespaces"},
	} {
		elems, err := list.of.list(list.name)
		if err != nil {
			return err
		}
		for i, e := range elems {
			if _, err := parseObject(e); err != nil {
				return fmt.Errorf("%s[%d] %w", list.name, i, err)
			}
		}
	}
	return nil
}

// readIdentity finds the pod and the container's name in what the engine wrote. Outside
// Kubernetes a container is a pod of its own.
func (c *container) readIdentity(engine quota.Engine, id string) {
	a := c.input.Annotations
	switch engine {
	case quota.EngineCRI:
		c.input.Sandbox = a[criType] == "sandbox"
		c.pod = api.PodRef{ID: a[criSandbox], Namespace: a[criNamespace], Name: a[criPod], UID: a[criUID]}
		c.name = a[criName]
	case quota.EngineCRIO:
		c.input.Sandbox = a[crioType] == "sandbox"
		c.pod = api.PodRef{ID: a[crioSandbox], Namespace: a[kubeNamespace], Name: a[kubePod], UID: a[kubeUID]}
		c.name = a[kubeName]
	default:
		c.pod = api.PodRef{ID: id}
	}
	c.input.Namespace, c.input.Pod, c.input.Container = c.pod.Namespace, c.pod.Name, c.name
}

// readPlaces finds where the shim may be mounted, and the termination message's file.
func (c *container) readPlaces() {
	message := defaultTerminationPath
	if c.input.Engine.Kubernetes() {
		if named := c.input.Annotations[terminationPath]; named != "" {
			message = named
		}
	}
	message = path.Clean("/" + message)
	for _, m := range c.input.Mounts {
		switch path.Clean("/" + m.Destination) {
		case message:
			// A file that the container may not write is not written on its behalf either.
			c.terminationLog = ""
			if isBind(m) && !slices.Contains(m.Options, "ro") {
				c.terminationLog = m.Source
			}
		case "/dev":
			c.shimDir = shimDir
			if isBind(m) {
				c.shimDir = shimDirHostDev
			}
		}
	}
}

// cdiNames lists the devices that annotations ask for, in the order of their names.
func cdiNames(annotations map[string]string) []string {
	var keys []string
	for k := range annotations {
		if strings.HasPrefix(k, cdiPrefix) {
			keys = append(keys, k)
		}
	}
	sort.Strings(keys)
	var names []string
	for _, k := range keys {
		for name := range strings.SplitSeq(annotations[k], ",") {
			if name = strings.TrimSpace(name); name != "" && !slices.Contains(names, name) {
				names = append(names, name)
			}
		}
	}
	return names
}

func hasCapability(list []string, wanted ...string) bool {
	for _, c := range list {
		if slices.Contains(wanted, strings.ToUpper(c)) {
			return true
		}
	}
	return false
}

// sameNamespace says whether a namespace's file is the one that we are in; an empty path asks
// for a new one.
func sameNamespace(file, own string) bool {
	if file == "" {
		return false
	}
	a, err := os.Stat(file)
	if err != nil {
		return false // the runtime will say so
	}
	b, err := os.Stat(own)
	return err == nil && os.SameFile(a, b)
}
