// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"

	"github.com/spf13/cobra"
	"go.yaml.in/yaml/v3"

	"github.com/gpufence/gpufence/enforcer/quota"
)

// fault is one sentence about a line of a manifest.
type fault struct {
	File    string `json:"file"`
	Line    int    `json:"line"`
	Code    string `json:"code,omitempty"`
	Warning bool   `json:"warning,omitempty"`
	Message string `json:"message"`
}

func (a *app) lint(stdin io.Reader) *cobra.Command {
	var output string
	var classes []string
	cmd := &cobra.Command{
		Use:   "lint FILE...",
		Short: "check the gpufence.dev/ annotations of manifests, as a node would",
		Long: "lint reads manifests (YAML or JSON, several in one file, Lists; - is standard input), also the pod\n" +
			"templates of workloads, and says with file and line what a node would refuse. It asks nobody: node\n" +
			"policy and the size of a GPU are not known here. Exit status 1 if something is wrong.",
		Example: "  gpufence lint pod.yaml deployment.yaml\n  helm template . | gpufence lint -",
		Args: func(cmd *cobra.Command, args []string) error {
			if len(args) == 0 {
				return usagef("lint wants manifests: give files, or - for standard input")
			}
			return nil
		},
		RunE: func(_ *cobra.Command, args []string) error {
			faults := []fault{}
			for _, file := range args {
				text, err := readManifest(file, stdin)
				if err != nil {
					return err
				}
				found, err := lintFile(file, text, classes)
				if err != nil {
					return err
				}
				faults = append(faults, found...)
			}
			if output == "json" {
				if err := a.printJSON(faults); err != nil {
					return err
				}
			} else {
				for _, f := range faults {
					kind := "error"
					if f.Warning {
						kind = "warning"
					}
					fmt.Fprintf(a.stdout, "%s:%d: %s: %s\n", printable(f.File), f.Line, kind, printable(f.Message))
				}
			}
			if slices.ContainsFunc(faults, func(f fault) bool { return !f.Warning }) {
				return errSaid
			}
			return nil
		},
	}
	outputFlag(cmd, &output, "table", "json")
	cmd.Flags().StringSliceVar(&classes, "runtime-class", []string{"gpufence", "gpufence-hard"}, "RuntimeClasses whose pods are fenced")
	return cmd
}

func lintFile(file string, text []byte, classes []string) ([]fault, error) {
	var out []fault
	dec := yaml.NewDecoder(bytes.NewReader(text))
	for i := 1; ; i++ {
		var doc yaml.Node
		err := dec.Decode(&doc)
		if errors.Is(err, io.EOF) {
			return out, nil
		}
		if err != nil {
			return nil, badManifest("document %d of %s is not a manifest: %w", i, file, err)
		}
		if len(doc.Content) == 1 {
			for _, f := range lintObject(doc.Content[0], classes, 0) {
				f.File = file
				out = append(out, f)
			}
		}
	}
}

// child is a field of a mapping, or nil.
func child(n *yaml.Node, path ...string) *yaml.Node {
	for _, name := range path {
		if n == nil || n.Kind != yaml.MappingNode {
			return nil
		}
		var next *yaml.Node
		for i := 0; i+1 < len(n.Content); i += 2 {
			if n.Content[i].Value == name {
				next = n.Content[i+1]
			}
		}
		if next != nil && next.Kind == yaml.AliasNode {
			next = next.Alias
		}
		n = next
	}
	return n
}

func scalar(n *yaml.Node) string {
	if n == nil || n.Kind != yaml.ScalarNode {
		return ""
	}
	return n.Value
}

// lintObject looks at an object, the pod template in it, and the items of a List.
func lintObject(n *yaml.Node, classes []string, depth int) []fault {
	var out []fault
	if items := child(n, "items"); items != nil && items.Kind == yaml.SequenceNode && depth < 4 {
		for _, item := range items.Content {
			out = append(out, lintObject(item, classes, depth+1)...)
		}
		return out
	}
	if scalar(child(n, "kind")) == "Pod" {
		return lintPod(n, classes)
	}
	for _, path := range [][]string{{"spec", "template"}, {"spec", "jobTemplate", "spec", "template"}, {"template"}} {
		if template := child(n, path...); child(template, "spec", "containers") != nil {
			return append(misplaced(n), lintPod(template, classes)...)
		}
	}
	return nil
}

// misplaced are annotations of a workload, which do not reach its pods.
func misplaced(workload *yaml.Node) []fault {
	var out []fault
	for _, p := range pairs(child(workload, "metadata", "annotations")) {
		if strings.HasPrefix(p.key, quota.Domain) {
			out = append(out, fault{Line: p.line, Warning: true, Message: p.key + " is on the workload, where it bounds nothing: put it under spec.template.metadata.annotations"})
		}
	}
	return out
}

type pair struct {
	key, value string
	line       int
}

func pairs(n *yaml.Node) []pair {
	if n == nil || n.Kind != yaml.MappingNode {
		return nil
	}
	var out []pair
	for i := 0; i+1 < len(n.Content); i += 2 {
		out = append(out, pair{n.Content[i].Value, n.Content[i+1].Value, n.Content[i].Line})
	}
	return out
}

// lintPod checks a pod or a template: each annotation by itself, so that all faults show, then all
// of them together as the node would for each container.
func lintPod(pod *yaml.Node, classes []string) []fault {
	var out []fault
	all, lines := map[string]string{}, map[string]int{}
	first := 0
	var names, withGPU []string
	for _, list := range []string{"initContainers", "containers", "ephemeralContainers"} {
		items := child(pod, "spec", list)
		if items == nil {
			continue
		}
		for _, c := range items.Content {
			name := scalar(child(c, "name"))
			names = append(names, name)
			for _, l := range pairs(child(c, "resources", "limits")) {
				if strings.HasPrefix(l.key, "nvidia.com/") && l.value != "0" {
					withGPU = append(withGPU, name)
				}
			}
		}
	}
	policy := quota.DefaultPolicy()
	accept := policy.Accept[quota.EngineCRI]
	accept.GPU = true // the node's policy decides
	policy.Accept[quota.EngineCRI] = accept
	policy.Default[quota.EngineCRI] = quota.Default{Kind: quota.DefaultUnlimited}
	check := func(annotations map[string]string, container string) error {
		if err := quota.CheckNames(annotations, names); err != nil {
			return err
		}
		_, _, err := quota.Parse(quota.Subject{Engine: quota.EngineCRI, Container: container, Annotations: annotations, HasGPU: true}, policy)
		return err
	}
	for _, p := range pairs(child(pod, "metadata", "annotations")) {
		if !quota.Ours(p.key) {
			continue
		}
		if first == 0 {
			first = p.line
		}
		all[p.key], lines[p.key] = p.value, p.line
		container := ""
		if rest, ok := strings.CutPrefix(p.key, quota.Domain+"container."); ok {
			container, _, _ = strings.Cut(rest, ".")
		}
		if err := check(map[string]string{p.key: p.value}, container); err != nil {
			out = append(out, fault{Line: p.line, Code: string(quota.CodeOf(err)), Message: err.Error()})
		}
	}
	if len(all) == 0 {
		if len(withGPU) > 0 && slices.Contains(classes, scalar(child(pod, "spec", "runtimeClassName"))) {
			out = append(out, fault{Line: pod.Line, Warning: true, Message: fmt.Sprintf("container %s has a GPU and no memory.max, which nodes deny by default: add the annotation %s%s: 4Gi", withGPU[0], quota.Domain, quota.KeyMemoryMax)})
		}
		return out
	}
	if len(out) == 0 {
		for _, name := range names {
			if err := check(all, name); err != nil {
				out = append(out, fault{Line: first, Code: string(quota.CodeOf(err)), Message: err.Error()})
				break
			}
		}
	}
	if class := scalar(child(pod, "spec", "runtimeClassName")); !slices.Contains(classes, class) {
		out = append(out, fault{Line: first, Warning: true, Message: fmt.Sprintf("the annotations hold nothing under runtimeClassName %q, unless the node's default runtime is fenced: set runtimeClassName: %s", class, classes[0])})
	}
	return out
}
