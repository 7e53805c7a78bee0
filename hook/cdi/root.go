// SPDX-License-Identifier: Apache-2.0

package cdi

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"strings"
)

// Root is where a driver lies on the host.
type Root struct {
	Driver string // the folder that is / to the driver's libraries
	Dev    string // the folder whose dev holds the device nodes
	NVML   string // libnvidia-ml.so.1, absolute
	By     string // whose it is: host, operator, gke
}

// ErrNoDriver says that no driver is installed anywhere that we know.
var ErrNoDriver = errors.New("no NVIDIA driver found")

// roots are the places, in the order in which they count: a driver of the host's distribution, the
// GPU operator's driver container, Google's.
var roots = []struct{ path, by string }{
	{"/", "host"},
	{"/run/nvidia/driver", "operator"},
	{"/home/kubernetes/bin/nvidia", "gke"},
}

// FindRoot looks for the driver below base, which is / but for tests.
func FindRoot(base string) (Root, error) {
	var tried []string
	for _, r := range roots {
		dir := filepath.Join(base, r.path)
		tried = append(tried, r.path)
		lib := findNVML(dir)
		if lib == "" {
			continue
		}
		root := Root{Driver: dir, Dev: dir, NVML: lib, By: r.by}
		// The operator's container has nodes of its own, or none: then the host's are used, as on GKE.
		if !exists(filepath.Join(dir, "dev", "nvidiactl")) {
			root.Dev = filepath.Join(base, "/")
		}
		return root, nil
	}
	return Root{}, fmt.Errorf("look for libnvidia-ml.so.1 below %s: %w", strings.Join(tried, ", "), ErrNoDriver)
}

// libFolders are where drivers put 64-bit libraries.
func libFolders() []string {
	multi := map[string]string{"amd64": "x86_64-linux-gnu", "arm64": "aarch64-linux-gnu"}[runtime.GOARCH]
	return []string{"usr/lib64", "usr/lib/" + multi, "lib64", "lib/" + multi, "usr/lib", "usr/lib/" + multi + "/nvidia/current", "usr/lib64/nvidia"}
}

func findNVML(root string) string {
	for _, folder := range libFolders() {
		if p := filepath.Join(root, folder, "libnvidia-ml.so.1"); exists(p) {
			return p
		}
	}
	return ""
}

func exists(path string) bool {
	_, err := os.Stat(path)
	return err == nil
}

// NVMLBelow is libnvidia-ml.so.1 of the driver that has the folder as its /, "" if there is none.
func NVMLBelow(root string) string { return findNVML(root) }
