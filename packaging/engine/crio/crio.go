// SPDX-License-Identifier: Apache-2.0

// Package crio plans the file that tells CRI-O of gpufence-runtime. CRI-O reads a folder of files
// after its main one, in the order of their names, and a later one adds runtimes. It hands every
// annotation of a pod to the runtime; allowed_annotations are only for CRI-O's own ones, refuses
// others there, and is taken over from the runtime that ours is modelled on.
package crio

import (
	"fmt"
	"path/filepath"
	"slices"
	"strings"

	"github.com/pelletier/go-toml/v2"

	"github.com/gpufence/gpufence/enforcer/quota"
	"github.com/gpufence/gpufence/packaging/engine"
)

// Where things are unless somebody says otherwise.
const (
	DefaultConfig = "/etc/crio/crio.conf"
	// DropInName sorts behind NVIDIA's 99-nvidia.conf.
	DropInName = "99-zz-gpufence.conf"
)

func dropIn(r engine.Request) string {
	if r.DropIn != "" {
		return r.DropIn
	}
	return filepath.Join(r.Config+".d", DropInName)
}

// read merges what CRI-O reads; skip is ours.
func read(files engine.Files, r engine.Request, skip string) (map[string]any, []string, error) {
	list, err := files.Glob(filepath.Join(r.Config+".d", "*"))
	if err != nil {
		return nil, nil, quota.NewError(quota.CodeEngineUnread, "%s.d cannot be read: %w", r.Config, err).WithHint("run gpufence as root")
	}
	var merged map[string]any
	var sources []string
	for _, path := range slices.Concat([]string{r.Config}, list) {
		if path == skip || strings.HasPrefix(filepath.Base(path), ".") || strings.HasSuffix(path, ".gpufence-backup") {
			continue
		}
		tree, err := engine.ReadTree(files, path, "mend it; CRI-O would not start with it either")
		if err != nil {
			return nil, nil, err
		}
		if tree == nil {
			continue
		}
		sources = append(sources, path)
		merged = engine.Merge(merged, tree)
	}
	return merged, sources, nil
}

func program(runtime map[string]any) string {
	p, _ := runtime["runtime_path"].(string)
	return p
}

func oci(runtime map[string]any) bool {
	kind, _ := runtime["runtime_type"].(string)
	return kind == "" || kind == "oci"
}

// Install plans that CRI-O knows our runtime.
func Install(files engine.Files, r engine.Request) (engine.Plan, error) {
	var plan engine.Plan
	if err := r.Check(); err != nil {
		return plan, err
	}
	path := dropIn(r)
	tree, sources, err := read(files, r, path)
	if err != nil {
		return plan, err
	}
	if r.Source != nil {
		tree = r.Source
	}
	runtimes := engine.Table(tree, "crio", "runtime", "runtimes")
	defaultName, _ := engine.Table(tree, "crio", "runtime")["default_runtime"].(string)
	if old := engine.Table(runtimes, r.Handler); old != nil && !engine.IsWrapper(program(old)) {
		return plan, quota.NewError(quota.CodeEngineTaken, "CRI-O has a runtime %q already, and it is not gpufence-runtime (%q)", r.Handler, program(old)).
			WithHint("choose another name with --runtime-name, or take that one away")
	}
	base := engine.LowLevel(runtimes, defaultName, func(name string, runtime map[string]any) bool {
		return name != r.Handler && oci(runtime) && !engine.IsWrapper(program(runtime))
	})
	added := map[string]any{r.Handler: fenced(base, r.Wrapper)}
	if r.Wrap != "" {
		old := engine.Table(runtimes, r.Wrap)
		if old == nil || !oci(old) {
			return plan, quota.NewError(quota.CodeEngineNoWrap, "CRI-O has no runtime %q of type oci to wrap", r.Wrap).WithHint("install that runtime first, or leave --wrap out")
		}
		if note := engine.ChainNote(r.Wrap, program(old)); note != "" {
			plan.Notes = append(plan.Notes, note)
		}
		added[r.Wrap] = fenced(old, r.Wrapper)
	}
	runtime := map[string]any{"runtimes": added}
	if r.Default {
		runtime["default_runtime"] = r.Handler
	}
	if r.CDI {
		plan.Notes = append(plan.Notes, "CRI-O has CDI switched on always: --cdi.enabled changes nothing")
	}
	body, err := marshal(runtime)
	if err != nil {
		return plan, err
	}
	ours, err := engine.OwnedChange(files, path, slices.Concat([]byte(engine.Header), body), engine.Header)
	if err != nil {
		return plan, err
	}
	plan.Changes, plan.Sources = []engine.Change{ours}, sources
	return plan, nil
}

// fenced is a runtime's entry with our program in it.
func fenced(base map[string]any, wrapper string) map[string]any {
	return engine.Merge(base, map[string]any{"runtime_path": wrapper, "runtime_type": "oci"})
}

func marshal(runtime map[string]any) ([]byte, error) {
	text, err := toml.Marshal(map[string]any{"crio": map[string]any{"runtime": runtime}})
	if err != nil {
		return nil, quota.NewError(quota.CodeInternal, "write TOML: %w", err)
	}
	return text, nil
}

// Uninstall plans that CRI-O forgets our runtime.
func Uninstall(files engine.Files, r engine.Request) (engine.Plan, error) {
	var plan engine.Plan
	if err := r.Check(); err != nil {
		return plan, err
	}
	change, err := engine.OwnedChange(files, dropIn(r), nil, engine.Header)
	if err != nil {
		return plan, err
	}
	plan.Changes = []engine.Change{change}
	return plan, nil
}

// Found looks into what CRI-O printed for the program of a runtime.
func Found(dump []byte, handler string) (string, error) {
	var tree map[string]any
	if err := toml.Unmarshal(dump, &tree); err != nil {
		return "", fmt.Errorf("parse the loader's answer: %w", err)
	}
	return program(engine.Table(tree, "crio", "runtime", "runtimes", handler)), nil
}
