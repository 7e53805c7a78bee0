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
