// SPDX-License-Identifier: Apache-2.0

package quota

import (
	"errors"
	"slices"
	"strings"
	"testing"
)

func TestCheckNames(t *testing.T) {
	a := map[string]string{
		Domain + "memory.max":                "4Gi",
		Domain + "container.main.memory.max": "3Gi",
		Domain + "config":                    "containers: {side-car: {memory.max: 1Gi}}",
		"other.dev/container.x.y":            "z",
	}
	names, err := NamedContainers(a)
	if want := []string{"main", "side-car"}; err != nil || !slices.Equal(names, want) {
		t.Fatalf("%v, %v, want %v", names, err, want)
	}
	if err := CheckNames(a, []string{"main", "side-car", "other"}); err != nil {
		t.Error(err)
	}
	err = CheckNames(a, []string{"main", "sidecar"})
	if !errors.Is(err, CodeNoSuchName) || !strings.Contains(err.Error(), "side-car") || !strings.HasSuffix(err.Error(), "write sidecar") {
		t.Error(err)
	}
	if err := CheckNames(map[string]string{Domain + "nonsense": "1"}, nil); !errors.Is(err, CodeUnknownKey) {
		t.Error(err)
	}
}

// TestMisspeltDomain: what is written beside our domain limits nothing, and does not pass for a foreign annotation.
func TestMisspeltDomain(t *testing.T) {
	for name, want := range map[string]string{
		"GPUfence.dev/memory.max":      Domain + "memory.max",
		" gpufence.dev/config":         Domain + "config",
		"gpufence.io/memory.max":       Domain + "memory.max",
		"gpufence/memory.high":         Domain + "memory.high",
		"gpufence.dev.memory.swap.max": Domain + "memory.swap.max",
		"gpufence.memory.oom.group":    Domain + "memory.oom.group",
	} {
		_, _, err := Parse(Subject{Engine: EngineDocker, HasGPU: true, Annotations: map[string]string{name: "4Gi"}}, DefaultPolicy())
		if !errors.Is(err, CodeUnknownKey) || !strings.HasSuffix(err.Error(), "write "+want) {
			t.Errorf("%q: %v", name, err)
		}
	}
	for _, name := range []string{"other.dev/memory.max", "x-gpufence.dev/memory.max", "gpufence.example/owner", "gpufence", "gpufenced"} {
		if _, _, err := Parse(Subject{Engine: EngineDocker, HasGPU: true, Annotations: map[string]string{name: "4Gi"}}, DefaultPolicy()); err != nil {
			t.Errorf("%q: %v", name, err)
		}
	}
}

func TestMisspeltVariable(t *testing.T) {
	for name, want := range map[string]string{
		"gpufence_memory_max": "write GPUFENCE_MEMORY_MAX", "GPUFENCE_MEM_MAX": "write GPUFENCE_MEMORY_MAX", "GPUFENCE_MEMORY.MAX": "write GPUFENCE_MEMORY_MAX",
		"GPUFENCE_MEMORYHIGH": "write GPUFENCE_MEMORY_HIGH", "GPUFENCE_MEMENTO_OF_YOU": "they are GPUFENCE_MEMORY_HIGH",
	} {
		s := Subject{Engine: EngineDocker, HasGPU: true, Env: []string{"PATH=/bin", name + "=4Gi"}}
		if _, _, err := Parse(s, DefaultPolicy()); !errors.Is(err, CodeUnknownKey) || !strings.Contains(err.Error(), want) {
			t.Errorf("%q: %v", name, err)
		}
		s.Engine = EngineCRI // where the environment is not read
		if _, _, err := Parse(s, DefaultPolicy()); errors.Is(err, CodeUnknownKey) {
			t.Errorf("%q: %v", name, err)
		}
	}
	for _, name := range []string{"GPUFENCE_DEBUG", "GPUFENCE_CONFIG", "MY_GPUFENCE_MEM"} {
		if _, _, err := Parse(Subject{Engine: EngineDocker, HasGPU: true, Env: []string{name + "=4Gi"}}, DefaultPolicy()); err != nil {
			t.Errorf("%q: %v", name, err)
		}
	}
}
