// SPDX-License-Identifier: Apache-2.0

package quota

import (
	"maps"
	"slices"
	"strings"
)

// NamedContainers are the containers that a pod's annotations have keys for, in the order of their
// names. The error is an [*Error] for annotations that Parse refuses, too.
func NamedContainers(annotations map[string]string) ([]string, error) {
	all, err := parseAnnotations(annotations)
	if err != nil {
		return nil, err
	}
	return slices.DeleteFunc(slices.Sorted(maps.Keys(all)), func(name string) bool { return name == "" }), nil
}

// CheckNames refuses keys for a container that the pod does not have. Nothing on a node can: it
// sees one container at a time.
func CheckNames(annotations map[string]string, containers []string) error {
	named, err := NamedContainers(annotations)
	if err != nil {
		return err
	}
	for _, n := range named {
		if slices.Contains(containers, n) {
			continue
		}
		err := NewError(CodeNoSuchName, "%s%s%s.* names a container that the pod does not have", Domain, containerPrefix, cut(n))
		if near := Nearest(n, containers); near != "" {
			return err.WithHint("write %s", cut(near))
		}
		var have []string
		for _, c := range containers[:min(len(containers), 8)] {
			have = append(have, cut(c))
		}
		return err.WithHint("it has %s", strings.Join(have, ", "))
	}
	return nil
}
