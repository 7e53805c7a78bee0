// SPDX-License-Identifier: Apache-2.0

package cdi

import (
	"cmp"
	"fmt"
	"os"
	"path"
	"strings"

	"golang.org/x/sys/unix"
	"tags.cncf.io/container-device-interface/pkg/cdi"
	specs "tags.cncf.io/container-device-interface/specs-go"

	"github.com/gpufence/gpufence/hook/plan"
)

// Stale says what a device's specification names that is not so on this host, nil if nothing. What
// only a hook needs counts too: it would fail the container's start in its own words.
func Stale(device *cdi.Device) error {
	for _, edits := range []*specs.ContainerEdits{&device.GetSpec().ContainerEdits, &device.ContainerEdits} {
		if err := staleEdits(edits); err != nil {
			return fmt.Errorf("%s %w", device.GetSpec().GetPath(), err)
		}
	}
	return nil
}

func staleEdits(edits *specs.ContainerEdits) error {
	for _, m := range edits.Mounts {
		// Everything but a bind mount is made, not found.
		if m.Type != "" && m.Type != "bind" {
			continue
		}
		if _, err := os.Stat(m.HostPath); err != nil {
			return fmt.Errorf("names %s, which is not there: it was written for another driver", m.HostPath)
		}
	}
	for _, n := range edits.DeviceNodes {
		if err := staleNode(n); err != nil {
			return err
		}
	}
	for _, h := range edits.Hooks {
		if info, err := os.Stat(h.Path); err != nil || !info.Mode().IsRegular() {
			return fmt.Errorf("has a hook %s, which is not there", h.Path)
		}
	}
	return nil
}

// anotherGPU says which GPU a device of a specification gives that is not the one that it is called by, nil if none. A
// specification outlives the numbers of GPUs: one that was added, or has fallen off the bus, moves the others, and
// what was granted on one would be used on another.
func anotherGPU(device *cdi.Device, g GPU) error {
	if g.Minor == "" {
		return nil
	}
	for _, edits := range []*specs.ContainerEdits{&device.GetSpec().ContainerEdits, &device.ContainerEdits} {
		for _, n := range edits.DeviceNodes {
			host := plan.NodeOf(cmp.Or(n.HostPath, n.Path), n.Type, n.Major, n.Minor)
			number, ok := strings.CutPrefix(path.Base(host), "nvidia")
			if ok && number != "" && strings.Trim(number, "0123456789") == "" && number != g.Minor {
				return fmt.Errorf("%s gives %s as %s, which is /dev/nvidia%s: it was written before the GPUs were numbered anew", device.GetSpec().GetPath(), host, device.GetQualifiedName(), g.Minor)
			}
		}
	}
	return nil
}

// staleNode compares a device node with the host's. Numbers of nvidia-uvm and of capabilities are
// given out when a module loads, so that one written down may be another device's now.
func staleNode(n *specs.DeviceNode) error {
	file := cmp.Or(n.HostPath, n.Path)
	var st unix.Stat_t
	if err := unix.Stat(file, &st); err != nil {
		if n.Type != "" && n.Major > 0 {
			return nil // complete without the host's
		}
		return fmt.Errorf("names the device node %s, which is not there: load the module (`nvidia-modprobe -u -c=0`)", file)
	}
	if mode := st.Mode & unix.S_IFMT; mode != unix.S_IFCHR && mode != unix.S_IFBLK {
		return nil // the CDI library says what it thinks of it
	}
	return compareNumbers(n, file, st.Rdev)
}

func compareNumbers(n *specs.DeviceNode, file string, rdev uint64) error {
	if n.Major == 0 && n.Minor == 0 {
		return nil // taken from the host
	}
	if major, minor := int64(unix.Major(rdev)), int64(unix.Minor(rdev)); major != n.Major || minor != n.Minor {
		return fmt.Errorf("says that %s has the number %d:%d, and it has %d:%d", file, n.Major, n.Minor, major, minor)
	}
	return nil
}
