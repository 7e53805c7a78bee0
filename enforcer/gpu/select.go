// SPDX-License-Identifier: Apache-2.0

package gpu

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
)

// SelectorError is a selector that names no GPU of this node.
type SelectorError struct {
	Selector string
	Have     []string // what the node has
}

func (e *SelectorError) Error() string {
	if len(e.Have) == 0 {
		return fmt.Sprintf("select GPU %q: this node has none", e.Selector)
	}
	return fmt.Sprintf("select GPU %q: this node has %s", e.Selector, strings.Join(e.Have, ", "))
}

// control are device nodes that belong to no GPU in particular.
var control = []string{"nvidiactl", "nvidia-uvm", "nvidia-uvm-tools", "nvidia-modeset", "nvidia-caps", "nvidia-nvswitchctl", "simgpuctl"}

// Select finds the GPUs that selectors name, in their order, each once: UUIDs, indices ("0:1" of MIG
// instances), "all" (without GPUs in MIG mode, which are there through their instances),
// "/dev/nvidiaN", "/dev/simgpu/gpuN" and "/dev/simgpu/gpuN.migM" (by minor number), CDI names
// ("nvidia.com/gpu=0"). Control
// nodes (/dev/nvidiactl, /dev/nvidia-uvm, ...), "", "none" and "void" name no GPU. Any other is
// a [SelectorError].
func Select(gpus []Info, selectors []string) ([]Info, error) {
	var out []Info
	have := map[string]bool{}
	add := func(i Info) {
		if !have[i.UUID] {
			have[i.UUID] = true
			out = append(out, i)
		}
	}
	for _, s := range selectors {
		found, err := selectOne(gpus, s)
		if err != nil {
			return nil, err
		}
		for _, i := range found {
			add(i)
		}
	}
	return out, nil
}

func selectOne(gpus []Info, selector string) ([]Info, error) {
	name := selector
	byMinor := false
	switch {
	case strings.HasPrefix(name, "/dev/"):
		rest := strings.TrimPrefix(name, "/dev/")
		for _, c := range control {
			if rest == c || strings.HasPrefix(rest, c+"/") {
				return nil, nil
			}
		}
		number, ok := strings.CutPrefix(rest, "nvidia")
		if !ok {
			number, ok = strings.CutPrefix(rest, "simgpu/gpu")
		}
		if !ok {
			return nil, unknown(gpus, selector)
		}
		name, byMinor = number, true
	case strings.Contains(name, "="):
		kind, device, _ := strings.Cut(name, "=")
		if !strings.Contains(kind, "/") || device == "" {
			return nil, unknown(gpus, selector)
		}
		name = device
	}
	switch name {
	case "all":
		if !byMinor {
			return slices.DeleteFunc(slices.Clone(gpus), func(i Info) bool { return i.MIG }), nil
		}
	case "", "none", "void":
		if selector == name {
			return nil, nil
		}
	}
	for _, i := range gpus {
		// Compared as text: "00" and "+1" name nothing.
		node := strconv.Itoa(i.Minor)
		if i.Parent != "" {
			node = fmt.Sprintf("%d.mig%d", i.Minor, i.Instance)
		}
		switch {
		case byMinor && node == name,
			!byMinor && i.Position() == name,
			!byMinor && strings.EqualFold(i.UUID, name):
			return []Info{i}, nil
		}
	}
	return nil, unknown(gpus, selector)
}

func unknown(gpus []Info, selector string) error {
	e := &SelectorError{Selector: selector}
	for _, i := range gpus {
		e.Have = append(e.Have, fmt.Sprintf("%s (%s)", i.Position(), i.UUID))
	}
	return e
}
