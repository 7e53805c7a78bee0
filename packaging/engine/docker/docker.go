// SPDX-License-Identifier: Apache-2.0

// Package docker plans what dockerd's daemon.json needs so that dockerd knows gpufence-runtime.
//
// dockerd reads no second file, so members are set in the text of daemon.json, which otherwise
// stays as it is. What was there before is in the backup that the first installation made: from
// it uninstall takes what a wrapped runtime and the default runtime were.
package docker

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/gpufence/gpufence/enforcer/quota"
	"github.com/gpufence/gpufence/packaging/engine"
	"github.com/gpufence/gpufence/packaging/engine/jsontext"
)

// DefaultConfig is where dockerd looks.
const DefaultConfig = "/etc/docker/daemon.json"

var bom = []byte("\xef\xbb\xbf")

// parse reads daemon.json; an empty one is an empty object, as to dockerd.
func parse(path string, text []byte) ([]byte, map[string]any, error) {
	text = bytes.TrimPrefix(text, bom)
	if len(bytes.TrimSpace(text)) == 0 {
		text = []byte("{}\n")
	}
	var tree map[string]any
	if err := json.Unmarshal(text, &tree); err != nil {
		where := ""
		var syntax *json.SyntaxError
		if errors.As(err, &syntax) {
			where = fmt.Sprintf(" in line %d", 1+bytes.Count(text[:min(int(syntax.Offset), len(text))], []byte("\n")))
		}
		return nil, nil, quota.NewError(quota.CodeEngineBroken, "%s is not a JSON object%s: %w", path, where, err).WithHint("mend it (JSON has no comments); dockerd would not start with it either")
	}
	for _, name := range []string{"runtimes", "features"} {
		if v, ok := tree[name]; ok {
			if _, table := v.(map[string]any); !table {
				return nil, nil, quota.NewError(quota.CodeEngineBroken, "%s in %s is not an object", name, path).WithHint("mend it; dockerd would not start with it either")
			}
		}
	}
	return text, tree, nil
}

func pathOf(runtimes map[string]any, name string) string {
	p, _ := engine.Table(runtimes, name)["path"].(string)
	return p
}

// edit is one member and its value.
type edit struct {
	value any
	path  []string
}

// Install plans that dockerd knows our runtime.
func Install(files engine.Files, r engine.Request) (engine.Plan, error) {
	var plan engine.Plan
	if err := r.Check(); err != nil {
		return plan, err
	}
	before, err := engine.ReadOptional(files, r.Config)
	if err != nil {
		return plan, err
	}
	text, tree, err := parse(r.Config, before)
	if err != nil {
		return plan, err
	}
	runtimes := engine.Table(tree, "runtimes")
	if runtimes[r.Handler] != nil && !engine.IsWrapper(pathOf(runtimes, r.Handler)) {
		return plan, quota.NewError(quota.CodeEngineTaken, "dockerd has a runtime %q already, and it is not gpufence-runtime (%q)", r.Handler, pathOf(runtimes, r.Handler)).
			WithHint("choose another name with --runtime-name, or take that one away")
	}
	edits := []edit{{r.Wrapper, []string{"runtimes", r.Handler, "path"}}}
	if r.Wrap != "" {
		old := pathOf(runtimes, r.Wrap)
		if old == "" {
			return plan, quota.NewError(quota.CodeEngineNoWrap, "dockerd has no runtime %q with a path in %s to wrap", r.Wrap, r.Config).WithHint("install that runtime first, or leave --wrap out")
		}
		if !engine.IsWrapper(old) {
			if note := engine.ChainNote(r.Wrap, old); note != "" {
				plan.Notes = append(plan.Notes, note)
			}
		}
		edits = append(edits, edit{r.Wrapper, []string{"runtimes", r.Wrap, "path"}})
	}
	if r.Default {
		edits = append(edits, edit{r.Handler, []string{"default-runtime"}})
	} else if tree["default-runtime"] == r.Handler {
		// As nvidia-ctk has it: installed without --set-as-default, it is not the default.
		if text, err = withoutDefault(files, r, text); err != nil {
			return plan, err
		}
	}
	if r.CDI {
		edits = append(edits, edit{true, []string{"features", "cdi"}})
	}
	after := text
	for _, e := range edits {
		if after, err = jsontext.Set(after, e.value, e.path...); err != nil {
			return plan, quota.NewError(quota.CodeEngineForm, "%s cannot be edited at %s: %w", r.Config, strings.Join(e.path, "."), err).WithHint("set it to %v by hand", e.value)
		}
	}
	if bytes.HasPrefix(before, bom) {
		after = slices.Concat(bom, after)
	}
	plan.Changes = []engine.Change{{Path: r.Config, Before: before, After: after}}
	plan.Sources = []string{r.Config}
	return plan, nil
}

// backup reads daemon.json as it was before us; nil: there was none, or it is gone.
func backup(files engine.Files, r engine.Request) (raw []byte, tree map[string]any, err error) {
	raw, err = engine.ReadOptional(files, engine.BackupPath(r.Config))
	if err != nil || raw == nil {
		return nil, nil, err
	}
	_, tree, err = parse(engine.BackupPath(r.Config), raw)
	return raw, tree, err
}

// withoutDefault gives back the default runtime that was before us.
func withoutDefault(files engine.Files, r engine.Request, text []byte) ([]byte, error) {
	_, old, err := backup(files, r)
	if err != nil {
		return nil, err
	}
	was, _ := old["default-runtime"].(string)
	if was == "" || was == r.Handler {
		text, err = jsontext.Delete(text, "default-runtime")
	} else {
		text, err = jsontext.Set(text, was, "default-runtime")
	}
	if err != nil {
		return nil, quota.NewError(quota.CodeEngineForm, "%s cannot be edited: %w", r.Config, err).WithHint("take default-runtime out by hand")
	}
	return text, nil
}

// Uninstall plans that dockerd forgets our runtime.
func Uninstall(files engine.Files, r engine.Request) (engine.Plan, error) {
	var plan engine.Plan
	if err := r.Check(); err != nil {
		return plan, err
	}
	before, err := engine.ReadOptional(files, r.Config)
	if err != nil || before == nil {
		return plan, err
	}
	text, tree, err := parse(r.Config, before)
	if err != nil {
		return plan, err
	}
	raw, old, err := backup(files, r)
	if err != nil {
		return plan, err
	}
	plan.Sources = []string{r.Config}
	runtimes, was := engine.Table(tree, "runtimes"), engine.Table(old, "runtimes")
	after, ours := text, false
	var names []string
	for name := range runtimes {
		names = append(names, name)
	}
	slices.Sort(names)
	for _, name := range names {
		if !engine.IsWrapper(pathOf(runtimes, name)) {
			continue
		}
		ours = true
		switch {
		case was[name] != nil && !engine.IsWrapper(pathOf(was, name)):
			after, err = jsontext.Set(after, pathOf(was, name), "runtimes", name, "path")
		case len(engine.Table(runtimes, name)) == 1 || name == r.Handler:
			after, err = jsontext.Delete(after, "runtimes", name)
		default:
			return plan, quota.NewError(quota.CodeEngineForm, "nothing says what the wrapped runtime %q was: %s is gone", name, engine.BackupPath(r.Config)).
				WithHint("write its path into %s by hand and run this again", r.Config)
		}
		if err != nil {
			return plan, quota.NewError(quota.CodeEngineForm, "%s cannot be edited at runtimes.%s: %w", r.Config, name, err).WithHint("take it out by hand")
		}
	}
	if !ours {
		return plan, nil
	}
	if name, _ := tree["default-runtime"].(string); engine.IsWrapper(pathOf(runtimes, name)) && was[name] == nil {
		if after, err = withoutDefault(files, r, after); err != nil {
			return plan, err
		}
	}
	if old["runtimes"] == nil && string(bytes.Join(bytes.Fields(jsontext.Get(after, "runtimes")), nil)) == "{}" {
		if after, err = jsontext.Delete(after, "runtimes"); err != nil {
			return plan, quota.NewError(quota.CodeEngineForm, "%s cannot be edited: %w", r.Config, err).WithHint("take runtimes out by hand")
		}
	}
	// As it was, byte for byte, if nobody else changed it meanwhile; our CDI switch counts as ours then.
	noCDI, err := jsontext.Delete(after, "features", "cdi")
	if err == nil && old["features"] == nil && string(bytes.Join(bytes.Fields(jsontext.Get(noCDI, "features")), nil)) == "{}" {
		noCDI, err = jsontext.Delete(noCDI, "features")
	}
	if err != nil {
		noCDI = after
	}
	if bytes.HasPrefix(before, bom) {
		after = slices.Concat(bom, after)
	}
	change := engine.Change{Path: r.Config, Before: before, After: after}
	for _, candidate := range [][]byte{after, noCDI} {
		switch {
		case raw != nil && same(candidate, raw):
			change.After = raw
		case raw == nil && same(candidate, []byte("{}")):
			change.After = nil // there was none
		default:
			continue
		}
		break
	}
	plan.Changes = []engine.Change{change}
	return plan, nil
}

// same says whether two texts mean the same.
func same(a, b []byte) bool {
	var x, y map[string]any
	if len(bytes.TrimSpace(b)) == 0 {
		b = []byte("{}")
	}
	if json.Unmarshal(bytes.TrimPrefix(a, bom), &x) != nil || json.Unmarshal(bytes.TrimPrefix(b, bom), &y) != nil {
		return false
	}
	p, errA := json.Marshal(x)
	q, errB := json.Marshal(y)
	return errA == nil && errB == nil && bytes.Equal(p, q)
}

// Found looks into daemon.json for the program of a runtime.
func Found(text []byte, handler string) string {
	var path string
	if raw := jsontext.Get(bytes.TrimPrefix(text, bom), "runtimes", handler, "path"); raw == nil || json.Unmarshal(raw, &path) != nil {
		return ""
	}
	return path
}
