// SPDX-License-Identifier: Apache-2.0

package nri

import (
	"maps"
	"path"
	"slices"
	"strings"

	"github.com/containerd/nri/pkg/api"
	nriplugin "github.com/containerd/nri/pkg/plugin"

	gpufence "github.com/gpufence/gpufence/enforcer/api"
	"github.com/gpufence/gpufence/enforcer/quota"
	"github.com/gpufence/gpufence/hook/plan"
)

// injectKey is what NVIDIA's own NRI plugin reads: it injects the CDI devices that it names, unseen
// by the plugins after it.
const injectKey = "nvidia.cdi.k8s.io"

// Names of the kubelet's and of files, as hook/oci has them.
const (
	terminationPath        = "io.kubernetes.container.terminationMessagePath"
	defaultTerminationPath = "/dev/termination-log"
	cdiPrefix              = "cdi.k8s.io/"
	shimDir                = "/dev/gpufence"
	shimDirHostDev         = "/run/gpufence-shim"
	preloadPath            = "/etc/ld.so.preload"
)

// container is what NRI says about one.
type container struct {
	input          plan.Input
	pod            gpufence.PodRef
	shimDir        string
	terminationLog string
}

// readContainer takes NRI's view of a container apart. Names of pod and container come from the
// engine, so that nobody can forge them.
func readContainer(engine quota.Engine, pod *api.PodSandbox, ctr *api.Container) container {
	annotations := maps.Clone(pod.GetAnnotations())
	if annotations == nil {
		annotations = map[string]string{}
	}
	maps.Copy(annotations, ctr.GetAnnotations())
	c := container{
		pod:     gpufence.PodRef{ID: pod.GetId(), Namespace: pod.GetNamespace(), Name: pod.GetName(), UID: pod.GetUid()},
		shimDir: shimDir,
	}
	c.input = plan.Input{
		Engine: engine, ID: ctr.GetId(), Namespace: pod.GetNamespace(), Pod: pod.GetName(), Container: ctr.GetName(),
		Annotations: annotations, Env: ctr.GetEnv(), ImageLoader: plan.LoaderUnknown,
	}
	if args := ctr.GetArgs(); len(args) > 0 {
		c.input.Args0 = args[0]
	}
	for _, m := range ctr.GetMounts() {
		c.input.Mounts = append(c.input.Mounts, plan.Mount{Destination: m.GetDestination(), Source: m.GetSource(), Type: m.GetType(), Options: m.GetOptions()})
	}
	for _, d := range ctr.GetLinux().GetDevices() {
		c.input.Devices = append(c.input.Devices, nodeOf(d))
	}
	c.input.CDINames = cdiNames(ctr.GetAnnotations())
	c.input.Injected = injected(pod, ctr)
	c.input.Privileged = privileged(ctr)
	c.readPlaces()
	return c
}

func nodeOf(d *api.LinuxDevice) string {
	return plan.NodeOf(d.GetPath(), d.GetType(), d.GetMajor(), d.GetMinor())
}

// cdiNames are the devices that a device plugin asks for by annotations, which a pod cannot set on
// its containers.
func cdiNames(annotations map[string]string) []string {
	var names []string
	for _, k := range slices.Sorted(maps.Keys(annotations)) {
		if !strings.HasPrefix(k, cdiPrefix) {
			continue
		}
		names = appendNames(names, annotations[k])
	}
	return names
}

// injected are devices that somebody else puts in: the engine for the kubelet, NVIDIA's plugin for
// an annotation.
func injected(pod *api.PodSandbox, ctr *api.Container) []string {
	var names []string
	for _, d := range ctr.GetCDIDevices() {
		names = appendNames(names, d.GetName())
	}
	if value, ok := nriplugin.GetEffectiveAnnotation(pod, injectKey, ctr.GetName()); ok {
		names = appendNames(names, value)
	}
	return names
}

func appendNames(names []string, list string) []string {
	for name := range strings.SplitSeq(list, ",") {
		if name = strings.TrimSpace(name); name != "" && !slices.Contains(names, name) {
			names = append(names, name)
		}
	}
	return names
}

// privileged is a guess, since NRI shows no capabilities: a privileged container has the host's
// devices, of which these are given to no other.
func privileged(ctr *api.Container) bool {
	for _, d := range ctr.GetLinux().GetDevices() {
		if slices.Contains([]string{"/dev/mem", "/dev/kmsg", "/dev/loop-control"}, path.Clean(d.GetPath())) {
			return true
		}
	}
	namespaces := ctr.GetLinux().GetNamespaces()
	return len(namespaces) > 0 && !slices.ContainsFunc(namespaces, func(n *api.LinuxNamespace) bool { return n.GetType() == "pid" })
}

// readPlaces finds where the shim may be mounted, and the termination message's file.
func (c *container) readPlaces() {
	message := defaultTerminationPath
	if named := c.input.Annotations[terminationPath]; named != "" {
		message = named
	}
	message = path.Clean("/" + message)
	for _, m := range c.input.Mounts {
		bind := m.Type == "bind" || slices.Contains(m.Options, "bind") || slices.Contains(m.Options, "rbind")
		switch path.Clean("/" + m.Destination) {
		case message:
			c.terminationLog = ""
			if bind && !slices.Contains(m.Options, "ro") && path.IsAbs(m.Source) {
				c.terminationLog = m.Source
			}
		case "/dev":
			c.shimDir = shimDir
			if bind {
				c.shimDir = shimDirHostDev
			}
		}
	}
}
