// SPDX-License-Identifier: Apache-2.0

package demo

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"

	specs "github.com/opencontainers/runtime-spec/specs-go"
)

// What containerd's CRI plugin and the kubelet write into a container's specification.
const (
	annotationType       = "io.kubernetes.cri.container-type"
	annotationSandboxID  = "io.kubernetes.cri.sandbox-id"
	annotationSandboxNS  = "io.kubernetes.cri.sandbox-namespace"
	annotationSandbox    = "io.kubernetes.cri.sandbox-name"
	annotationSandboxUID = "io.kubernetes.cri.sandbox-uid"
	annotationName       = "io.kubernetes.cri.container-name"
	annotationImage      = "io.kubernetes.cri.image-name"
	annotationTermPath   = "io.kubernetes.container.terminationMessagePath"
	annotationTermPolicy = "io.kubernetes.container.terminationMessagePolicy"
	terminationLog       = "/dev/termination-log"
)

// pod is what a sandbox stands for.
type pod struct {
	name, namespace, uid string
	sandboxID            string
	sandboxPID           int               // whose namespaces the containers share
	annotations          map[string]string // gpufence.dev/..., as the engine passes them on
	cgroup               string            // of the pod, below the hierarchy's root
}

// workload is one container of a pod.
type workload struct {
	name string
	args []string
	gpu  string // UUID that a device plugin chose; "" for a container without a GPU
}

var defaultCapabilities = []string{
	"CAP_CHOWN", "CAP_DAC_OVERRIDE", "CAP_FSETID", "CAP_FOWNER", "CAP_MKNOD", "CAP_NET_RAW", "CAP_SETGID", "CAP_SETUID",
	"CAP_SETFCAP", "CAP_SETPCAP", "CAP_NET_BIND_SERVICE", "CAP_SYS_CHROOT", "CAP_KILL", "CAP_AUDIT_WRITE",
}

// baseSpec is what is the same for a sandbox and its containers.
func baseSpec(args []string, cgroup string) specs.Spec {
	return specs.Spec{
		Version: "1.0.2",
		Process: &specs.Process{
			Args:            args,
			Cwd:             "/",
			Env:             []string{"PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"},
			NoNewPrivileges: true,
			Capabilities: &specs.LinuxCapabilities{
				Bounding: defaultCapabilities, Effective: defaultCapabilities, Permitted: defaultCapabilities,
			},
		},
		Root: &specs.Root{Path: "rootfs"},
		Mounts: []specs.Mount{
			{Destination: "/proc", Type: "proc", Source: "proc", Options: []string{"nosuid", "noexec", "nodev"}},
			{Destination: "/dev", Type: "tmpfs", Source: "tmpfs", Options: []string{"nosuid", "strictatime", "mode=755", "size=65536k"}},
			{Destination: "/dev/pts", Type: "devpts", Source: "devpts", Options: []string{"nosuid", "noexec", "newinstance", "ptmxmode=0666", "mode=0620", "gid=5"}},
			{Destination: "/dev/mqueue", Type: "mqueue", Source: "mqueue", Options: []string{"nosuid", "noexec", "nodev"}},
			{Destination: "/sys", Type: "sysfs", Source: "sysfs", Options: []string{"nosuid", "noexec", "nodev", "ro"}},
			{Destination: "/dev/shm", Type: "tmpfs", Source: "shm", Options: []string{"nosuid", "noexec", "nodev", "mode=1777", "size=65536k"}},
		},
		Linux: &specs.Linux{
			CgroupsPath: cgroup,
			Resources:   &specs.LinuxResources{Devices: []specs.LinuxDeviceCgroup{{Allow: false, Access: "rwm"}}},
			MaskedPaths: []string{"/proc/acpi", "/proc/kcore", "/proc/keys", "/proc/timer_list", "/sys/firmware"},
			ReadonlyPaths: []string{
				"/proc/bus", "/proc/fs", "/proc/irq", "/proc/sys", "/proc/sysrq-trigger",
			},
		},
	}
}

// sandboxSpec is the pause container.
func sandboxSpec(p *pod) specs.Spec {
	s := baseSpec([]string{"/bin/busybox", "sleep", "86400"}, filepath.Join(p.cgroup, p.sandboxID))
	s.Root.Readonly = true
	s.Hostname = p.name
	s.Annotations = map[string]string{
		annotationType:       "sandbox",
		annotationSandboxID:  p.sandboxID,
		annotationSandboxNS:  p.namespace,
		annotationSandbox:    p.name,
		annotationSandboxUID: p.uid,
	}
	for k, v := range p.annotations {
		s.Annotations[k] = v
	}
	s.Linux.Namespaces = []specs.LinuxNamespace{
		{Type: specs.PIDNamespace}, {Type: specs.IPCNamespace}, {Type: specs.UTSNamespace}, {Type: specs.MountNamespace}, {Type: specs.NetworkNamespace},
	}
	return s
}

// containerSpec is a container of the pod.
func containerSpec(p *pod, w workload, id, termination string) specs.Spec {
	s := baseSpec(w.args, filepath.Join(p.cgroup, id))
	s.Annotations = map[string]string{
		annotationType:       "container",
		annotationSandboxID:  p.sandboxID,
		annotationSandboxNS:  p.namespace,
		annotationSandbox:    p.name,
		annotationSandboxUID: p.uid,
		annotationName:       w.name,
		annotationImage:      "localhost/" + w.name + ":demo",
		annotationTermPath:   terminationLog,
		annotationTermPolicy: "File",
	}
	for k, v := range p.annotations {
		s.Annotations[k] = v
	}
	if w.gpu != "" {
		// What the device plugin of time-slicing sets.
		s.Process.Env = append(s.Process.Env, "NVIDIA_VISIBLE_DEVICES="+w.gpu)
	}
	s.Mounts = append(s.Mounts, specs.Mount{Destination: terminationLog, Type: "bind", Source: termination, Options: []string{"rbind", "rprivate", "rw"}})
	shared := func(t specs.LinuxNamespaceType, file string) specs.LinuxNamespace {
		return specs.LinuxNamespace{Type: t, Path: fmt.Sprintf("/proc/%d/ns/%s", p.sandboxPID, file)}
	}
	s.Linux.Namespaces = []specs.LinuxNamespace{
		{Type: specs.PIDNamespace}, {Type: specs.MountNamespace},
		shared(specs.IPCNamespace, "ipc"), shared(specs.UTSNamespace, "uts"), shared(specs.NetworkNamespace, "net"),
	}
	return s
}

// writeBundle makes a bundle folder.
func writeBundle(dir string, root rootfs, spec specs.Spec) error {
	if err := root.write(filepath.Join(dir, "rootfs")); err != nil {
		return err
	}
	text, err := json.MarshalIndent(spec, "", " ")
	if err != nil {
		return fmt.Errorf("write bundle: %w", err)
	}
	if err := os.WriteFile(filepath.Join(dir, "config.json"), text, 0o600); err != nil {
		return fmt.Errorf("write bundle: %w", err)
	}
	return nil
}
