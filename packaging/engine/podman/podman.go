// SPDX-License-Identifier: Apache-2.0

// Package podman plans the files that tell rootful Podman of gpufence-runtime: a runtime in
// containers.conf.d for `podman run --runtime gpufence`, and, where a request names one, an OCI hook for containers that only
// have the annotation. Both are ours alone. Podman has no daemon: they hold for what starts next.
package podman

import (
	"encoding/json"
	"path/filepath"
	"slices"
	"strings"

	"github.com/pelletier/go-toml/v2"

	"github.com/gpufence/gpufence/enforcer/quota"
	"github.com/gpufence/gpufence/packaging/engine"
)

// Where things are unless somebody says otherwise.
const (
	DefaultConfig = "/etc/containers/containers.conf"
	DropInName    = "99-zz-gpufence.conf"
	// HooksFolder is read by root's Podman and overrides the distribution's.
	HooksFolder = "/etc/containers/oci/hooks.d"
	HookName    = "99-zz-gpufence.json"
)

func dropIn(r engine.Request) string {
	if r.DropIn != "" {
		return r.DropIn
	}
	return filepath.Join(r.Config+".d", DropInName)
}

// hookFile lies beside the configuration: /etc/containers/oci/hooks.d for the usual one.
func hookFile(r engine.Request) string {
	return filepath.Join(filepath.Dir(r.Config), "oci", "hooks.d", HookName)
}

func read(files engine.Files, r engine.Request, skip string) (map[string]any, []string, error) {
	list, err := files.Glob(filepath.Join(r.Config+".d", "*.conf"))
	if err != nil {
		return nil, nil, quota.NewError(quota.CodeEngineUnread, "%s.d cannot be read: %w", r.Config, err).WithHint("run gpufence as root")
	}
	var merged map[string]any
	var sources []string
	for _, path := range slices.Concat([]string{"/usr/share/containers/containers.conf", r.Config}, list) {
		if path == skip {
			continue
		}
		tree, err := engine.ReadTree(files, path, "mend it; Podman would not run with it either")
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

// Install plans that Podman knows our runtime and our hook.
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
	runtimes := engine.Table(tree, "engine", "runtimes")
	if old := engine.Strings(runtimes[r.Handler]); len(old) > 0 && !slices.ContainsFunc(old, engine.IsWrapper) {
		return plan, quota.NewError(quota.CodeEngineTaken, "Podman has a runtime %q already, and it is not gpufence-runtime (%s)", r.Handler, strings.Join(old, ", ")).
			WithHint("choose another name with --runtime-name, or take that one away")
	}
	added := map[string]any{r.Handler: []string{r.Wrapper}}
	if r.Wrap != "" {
		old := engine.Strings(runtimes[r.Wrap])
		if len(old) == 0 {
			return plan, quota.NewError(quota.CodeEngineNoWrap, "Podman has no runtime %q to wrap", r.Wrap).WithHint("install that runtime first, or leave --wrap out")
		}
		if note := engine.ChainNote(r.Wrap, old[0]); note != "" {
			plan.Notes = append(plan.Notes, note)
		}
		added[r.Wrap] = []string{r.Wrapper}
	}
	section := map[string]any{"runtimes": added}
	if r.Default {
		section["runtime"] = r.Handler
	}
	if r.CDI {
		plan.Notes = append(plan.Notes, "Podman has CDI switched on always: --cdi.enabled changes nothing")
	}
	body, err := toml.Marshal(map[string]any{"engine": section})
	if err != nil {
		return plan, quota.NewError(quota.CodeInternal, "write TOML: %w", err)
	}
	ours, err := engine.OwnedChange(files, path, slices.Concat([]byte(engine.Header), body), engine.Header)
	if err != nil {
		return plan, err
	}
	plan.Changes, plan.Sources = []engine.Change{ours}, sources
	if r.Hook == "" {
		return plan, nil
	}
	text, err := hook(r.Hook)
	if err != nil {
		return plan, err
	}
	change, err := hookChange(files, r, text)
	if err != nil {
		return plan, err
	}
	plan.Changes = append(plan.Changes, change)
	return plan, nil
}

// hookMark is what makes a hook's file ours: JSON has no comments.
const hookMark = "gpufence-hook"

// hook is the file that has Podman show our hook the specification before it makes a container.
func hook(program string) ([]byte, error) {
	text, err := json.MarshalIndent(map[string]any{
		"version": "1.0.0",
		"hook":    map[string]any{"path": program, "args": []string{hookMark, "precreate"}, "timeout": 20},
		"when":    map[string]any{"annotations": map[string]string{`^gpufence\.dev/`: ".*"}},
		"stages":  []string{"precreate"},
	}, "", "  ")
	if err != nil {
		return nil, quota.NewError(quota.CodeInternal, "write JSON: %w", err)
	}
	return append(text, '\n'), nil
}

func hookChange(files engine.Files, r engine.Request, after []byte) (engine.Change, error) {
	path := hookFile(r)
	before, err := engine.ReadOptional(files, path)
	if err != nil {
		return engine.Change{}, err
	}
	if before != nil && !strings.Contains(string(before), hookMark) {
		return engine.Change{}, quota.NewError(quota.CodeEngineTaken, "%s is there and is not gpufence's", path).WithHint("move it away")
	}
	return engine.Change{Path: path, Before: before, After: after, Ours: true}, nil
}

// Uninstall plans that Podman forgets our runtime and our hook.
func Uninstall(files engine.Files, r engine.Request) (engine.Plan, error) {
	var plan engine.Plan
	if err := r.Check(); err != nil {
		return plan, err
	}
	change, err := engine.OwnedChange(files, dropIn(r), nil, engine.Header)
	if err != nil {
		return plan, err
	}
	hook, err := hookChange(files, r, nil)
	if err != nil {
		return plan, err
	}
	plan.Changes = []engine.Change{hook, change}
	return plan, nil
}
