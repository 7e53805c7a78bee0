// SPDX-License-Identifier: Apache-2.0

package gpu

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
)

// CapabilitiesDir is where the driver says which node of /dev/nvidia-caps opens what.
const CapabilitiesDir = "/proc/driver/nvidia/capabilities"

// capNode begins the names of these nodes.
const capNode = "/dev/nvidia-caps/nvidia-cap"

// Capability is what a node of /dev/nvidia-caps opens: a GPU instance, or, with a CI that is not -1,
// a compute instance in it, which is what NVML and CUDA call a MIG device.
type Capability struct {
	Minor  int // of /dev/nvidiaN
	GI, CI int
}

// CapabilityNode is the minor number in the name of a capability's node, false for another path.
func CapabilityNode(path string) (minor int, ok bool) {
	return number(path, capNode)
}

// Capabilities reads the driver's folder: the minor number of a node by what it opens. A driver
// without MIG has none.
func Capabilities(dir string) (map[int]Capability, error) {
	out := map[int]Capability{}
	paths, err := filepath.Glob(filepath.Join(dir, "gpu*", "mig", "gi*", "access"))
	if err != nil {
		return nil, fmt.Errorf("list MIG capabilities: %w", err)
	}
	compute, err := filepath.Glob(filepath.Join(dir, "gpu*", "mig", "gi*", "ci*", "access"))
	if err != nil {
		return nil, fmt.Errorf("list MIG capabilities: %w", err)
	}
	for _, p := range append(paths, compute...) {
		rel, err := filepath.Rel(dir, p)
		if err != nil {
			return nil, fmt.Errorf("list MIG capabilities: %w", err)
		}
		parts := strings.Split(rel, string(filepath.Separator)) // gpu0 mig gi1 [ci0] access
		c := Capability{CI: -1}
		var ok bool
		if c.Minor, ok = number(parts[0], "gpu"); !ok {
			continue
		}
		if c.GI, ok = number(parts[2], "gi"); !ok {
			continue
		}
		if len(parts) == 5 {
			if c.CI, ok = number(parts[3], "ci"); !ok {
				continue
			}
		}
		minor, err := deviceFileMinor(p)
		if errors.Is(err, fs.ErrNotExist) {
			continue // destroyed meanwhile
		}
		if err != nil {
			return nil, err
		}
		out[minor] = c
	}
	return out, nil
}

// deviceFileMinor reads the minor number out of an access file.
func deviceFileMinor(path string) (int, error) {
	f, err := os.Open(path)
	if err != nil {
		return 0, fmt.Errorf("read MIG capability: %w", err)
	}
	defer f.Close()
	for sc := bufio.NewScanner(io.LimitReader(f, 4096)); sc.Scan(); {
		name, value, ok := strings.Cut(sc.Text(), ":")
		if !ok || strings.TrimSpace(name) != "DeviceFileMinor" {
			continue
		}
		if n, err := strconv.Atoi(strings.TrimSpace(value)); err == nil && n >= 0 {
			return n, nil
		}
		break
	}
	return 0, fmt.Errorf("read MIG capability: %s has no DeviceFileMinor", path)
}

// number is what follows a prefix, if that is a plain decimal number.
func number(s, prefix string) (int, bool) {
	text, ok := strings.CutPrefix(s, prefix)
	n, err := strconv.Atoi(text)
	return n, ok && err == nil && strconv.Itoa(n) == text && n >= 0
}
