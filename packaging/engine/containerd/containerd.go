// SPDX-License-Identifier: Apache-2.0

// Package containerd plans what containerd's configuration needs so that its CRI plugin knows
// gpufence-runtime.
//
// The runtime's entry goes into a file of its own, in exactly the version that the main file
// declares, since every containerd before 2.3 takes the version of the file that it read last for
// all of them. It is named so that it is read last. containerd 1.7 replaces the whole section of a
// plugin by what a later file says, so a file of version 2 repeats the section of the CRI plugin
// unless containerd is known to be 2 or newer, which merges. Of the main file at most `imports`
// changes.
package containerd

import (
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/pelletier/go-toml/v2"

	"github.com/gpufence/gpufence/enforcer/quota"
	"github.com/gpufence/gpufence/packaging/engine"
	"github.com/gpufence/gpufence/packaging/engine/tomltext"
)

// Where things are unless somebody says otherwise.
const (
	DefaultConfig = "/etc/containerd/config.toml"
	dropInFolder  = "conf.d"
	// DropInName sorts behind every name that others use, NVIDIA's 99-nvidia.toml included.
	DropInName = "99-zz-gpufence.toml"
)

// The CRI plugin's section, which holds the runtimes.
const (
	criV2 = "io.containerd.grpc.v1.cri"
	criV3 = "io.containerd.cri.v1.runtime"
)

// newestVersion of the configuration that we know.
const newestVersion = 4

const runcType = "io.containerd.runc.v2"

// state is the configuration as it is.
type state struct {
	main    []byte // nil: no file
	version int    // what containerd takes it for, and what we write
	bare    bool   // the main file says no version
	imports []string
	sources []string       // every file that is read, ours left out
	cri     map[string]any // the CRI plugin's section
	foreign []string       // files of another version than the main one
	after   []string       // files that have runtimes and are read after ours
}

// pluginOf names the section of the CRI plugin.
func pluginOf(version int) string {
	if version >= 3 {
		return criV3
	}
	return criV2
}

// parseFile reads one file's TOML.
func parseFile(path string, text []byte) (map[string]any, error) {
	var tree map[string]any
	if err := toml.Unmarshal(text, &tree); err != nil {
		where := ""
		var derr *toml.DecodeError
		if errors.As(err, &derr) {
			row, column := derr.Position()
			where = fmt.Sprintf(" in line %d, column %d", row, column)
		}
		return nil, quota.NewError(quota.CodeEngineBroken, "%s is not TOML%s: %w", path, where, err).WithHint("mend it; containerd would not start with it either")
	}
	return tree, nil
}

func versionOf(path string, tree map[string]any) (int, error) {
	switch v := tree["version"].(type) {
	case nil:
		return 0, nil
	case int64:
		if v < 0 || v > newestVersion {
			return 0, quota.NewError(quota.CodeEngineForm, "%s is of version %d, and this gpufence knows up to %d", path, v, newestVersion).
				WithHint("take a newer gpufence, or write the runtime by hand as docs/containerd.md says")
		}
		return int(v), nil
	}
	return 0, quota.NewError(quota.CodeEngineBroken, "version in %s is not a number", path).WithHint("write version = 2, or 3 for containerd 2")
}

// resolve lists the files that an import means, as containerd does.
func resolve(files engine.Files, parent, pattern string) ([]string, error) {
	pattern = filepath.Clean(pattern)
	if !filepath.IsAbs(pattern) {
		pattern = filepath.Join(filepath.Dir(parent), pattern)
	}
	if !strings.Contains(pattern, "*") {
		return []string{pattern}, nil
	}
	list, err := files.Glob(pattern)
	if err != nil {
		return nil, quota.NewError(quota.CodeEngineBroken, "the import %q of %s cannot be followed: %w", pattern, parent, err).WithHint("mend it; containerd would not start with it either")
	}
	return list, nil
}

// read reads the main file and what it imports, as containerd does. ours is our file, which is
// put among the sources where it will be read, without its contents.
func read(files engine.Files, r engine.Request, ours string) (state, error) {
	var s state
	var err error
	if s.main, err = engine.ReadOptional(files, r.Config); err != nil {
		return s, err
	}
	tree, err := parseFile(r.Config, s.main)
	if err != nil {
		return s, err
	}
	if s.version, err = versionOf(r.Config, tree); err != nil {
		return s, err
	}
	s.bare = s.version == 0
	s.imports = engine.Strings(tree["imports"])
	if err := checkCRI(r.Config, tree); err != nil {
		return s, err
	}
	if s.version <= 1 {
		if s.version == 1 || tree["plugins"] != nil {
			return s, quota.NewError(quota.CodeEngineForm, "%s is of version 1, which gpufence does not write", r.Config).
				WithHint("bring it up with `containerd config migrate` of containerd 2, or write version = 2 and the plugins' full names")
		}
		// Nothing in it has another meaning in a newer version.
		s.version = 2
		if r.Major >= 2 {
			s.version = 3
		}
	}
	merged := engine.Table(tree, "plugins", pluginOf(s.version))
	if s.main != nil {
		s.sources = append(s.sources, r.Config)
	}
	// Breadth first, each file once.
	type edge struct{ parent, pattern string }
	var pending []edge
	follow := func(parent string, patterns []string) {
		for _, p := range patterns {
			pending = append(pending, edge{parent, p})
		}
	}
	follow(r.Config, s.imports)
	if !imported(r.Config, s.imports, ours) {
		pending = append(pending, edge{r.Config, ours})
	}
	reached := false
	for seen := map[string]bool{r.Config: true}; len(pending) > 0; {
		next := pending[0]
		pending = pending[1:]
		list, err := resolve(files, next.parent, next.pattern)
		if err != nil {
			return s, err
		}
		if imported(next.parent, []string{next.pattern}, ours) {
			list = engine.Union(list, ours)
			slices.Sort(list)
		}
		for _, path := range list {
			if seen[path] {
				continue
			}
			seen[path] = true
			if path == ours {
				s.sources, reached = append(s.sources, ours), true
				continue
			}
			text, err := engine.ReadOptional(files, path)
			if err != nil {
				return s, err
			}
			if text == nil {
				return s, quota.NewError(quota.CodeEngineBroken, "%s imports %s, which is not there", next.parent, path).WithHint("take the import out, or put the file back; containerd would not start")
			}
			sub, err := parseFile(path, text)
			if err != nil {
				return s, err
			}
			version, err := versionOf(path, sub)
			if err != nil {
				return s, err
			}
			if version != s.version && sub["plugins"] != nil {
				s.foreign = append(s.foreign, path)
			}
			if err := checkCRI(path, sub); err != nil {
				return s, err
			}
			s.sources = append(s.sources, path)
			if section := engine.Table(sub, "plugins", pluginOf(s.version)); section != nil {
				if reached {
					s.after = append(s.after, path)
				}
				if copies(s.version, r.Major) {
					merged = section // containerd 1.7 replaces
				} else {
					merged = engine.Merge(merged, section)
				}
			}
			follow(path, engine.Strings(sub["imports"]))
		}
	}
	s.cri = merged
	return s, nil
}

// checkCRI refuses a containerd whose CRI plugin is off.
func checkCRI(path string, tree map[string]any) error {
	for _, off := range engine.Strings(tree["disabled_plugins"]) {
		if off == "cri" || off == criV2 || off == criV3 {
			return quota.NewError(quota.CodeEngineNoCRI, "containerd's CRI plugin is switched off: %s has %q in disabled_plugins", path, off).
				WithHint("take it out for Kubernetes; for Docker, `gpufence install --runtime docker`")
		}
	}
	return nil
}

// copies says whether a file of ours has to repeat the CRI plugin's section.
func copies(version, major int) bool { return version < 3 && major < 2 }

// dropIn is where our file is, or goes: as asked, or the last folder that the main file imports, or the
// folder that newer containerds import by themselves. Where others imported a folder since we were installed, ours
// stays in its own.
func dropIn(files engine.Files, r engine.Request, imports []string) (string, error) {
	if r.DropIn != "" {
		return r.DropIn, nil
	}
	var places []string
	for _, pattern := range slices.Backward(imports) {
		if dir, name := filepath.Split(filepath.Clean(pattern)); name == "*.toml" && filepath.IsAbs(dir) && !strings.Contains(dir, "*") {
			places = append(places, filepath.Join(dir, DropInName))
		}
	}
	places = append(places, filepath.Join(filepath.Dir(r.Config), dropInFolder, DropInName))
	for _, path := range places {
		text, err := engine.ReadOptional(files, path)
		if err != nil {
			return "", err
		}
		if strings.HasPrefix(string(text), engine.Header) {
			return path, nil
		}
	}
	return places[0], nil
}

// imported says whether the main file imports the path already.
func imported(main string, imports []string, path string) bool {
	return slices.ContainsFunc(imports, func(pattern string) bool {
		pattern = filepath.Clean(pattern)
		if !filepath.IsAbs(pattern) {
			pattern = filepath.Join(filepath.Dir(main), pattern)
		}
		ok, err := filepath.Match(pattern, path)
		return err == nil && ok
	})
}

// topImports reads only the main file's imports, to find out where ours lies.
func topImports(files engine.Files, config string) ([]string, error) {
	text, err := engine.ReadOptional(files, config)
	if err != nil {
		return nil, err
	}
	tree, err := parseFile(config, text)
	if err != nil {
		return nil, err
	}
	return engine.Strings(tree["imports"]), nil
}

// Install plans that containerd knows our runtime.
func Install(files engine.Files, r engine.Request) (engine.Plan, error) {
	var plan engine.Plan
	if err := r.Check(); err != nil {
		return plan, err
	}
	owner := ownerOf(r.Config)
	imports, err := topImports(files, r.Config)
	if err != nil {
		return plan, err
	}
	path, err := dropIn(files, r, imports)
	if err != nil {
		return plan, err
	}
	s, err := read(files, r, path)
	if err != nil {
		return plan, err
	}
	if len(s.after) > 0 && copies(s.version, r.Major) {
		return plan, quota.NewError(quota.CodeEngineForm, "%s is read after %s and would replace it", s.after[0], path).
			WithHint("name a file with --drop-in-config that is read later, or rename that one")
	}
	if r.Source != nil {
		if section := dumped(r.Source, s.version); section != nil {
			s.cri = section
		}
	}
	generated := owner != nil && !imported(r.Config, s.imports, path)
	if generated && (r.Default || r.CDI || r.Wrap != "") {
		return plan, quota.NewError(quota.CodeEngineGenerated, "%s is written anew by %s at each start, so only the runtime itself can be added to it", r.Config, owner.name).
			WithHint("leave --set-as-default, --cdi.enabled and --wrap out, and change those lines in %s by hand", owner.template(s.version))
	}
	section, notes, err := entries(s, r, !generated && copies(s.version, r.Major))
	if err != nil {
		return plan, err
	}
	plan.Notes = append(plan.Notes, notes...)
	for _, f := range s.foreign {
		plan.Notes = append(plan.Notes, fmt.Sprintf("%s is of another version than %s (%d): containerd before 2.3 loses what one of them says", f, r.Config, s.version))
	}
	if generated {
		body, err := marshal(section, s.version, false)
		if err != nil {
			return plan, err
		}
		plan.Snippet = owner.snippet(files, s.version, body)
		return plan, quota.NewError(quota.CodeEngineGenerated, "%s is written anew by %s at each start", r.Config, owner.name).
			WithHint("put what is printed into %s and restart %s", owner.template(s.version), owner.name)
	}
	before, err := engine.ReadOptional(files, path)
	if err != nil {
		return plan, err
	}
	made := headerOf(before)
	main := engine.Change{Path: r.Config, Before: s.main, After: s.main}
	if s.bare || !imported(r.Config, s.imports, path) {
		text := s.main
		pattern, err := importPattern(files, path)
		if err != nil {
			return plan, err
		}
		if imported(r.Config, s.imports, path) {
			pattern = ""
		}
		after, added, err := addImport(text, pattern, s.version)
		if err != nil {
			return plan, quota.NewError(quota.CodeEngineForm, "imports in %s cannot be edited: %w", r.Config, err).WithHint("add %q to it by hand and run this again", pattern)
		}
		main.After = after
		made = header{config: r.Config, pattern: pattern, added: added, created: text == nil}
	}
	body, err := marshal(section, s.version, true)
	if err != nil {
		return plan, err
	}
	ours, err := engine.OwnedChange(files, path, slices.Concat([]byte(engine.Header+made.String()), body), engine.Header)
	if err != nil {
		return plan, err
	}
	// Ours first: a main file that imports what is not there stops containerd.
	plan.Changes = []engine.Change{ours, main}
	plan.Sources = s.sources
	return plan, nil
}

// addImport adds version and import; an empty pattern adds the version only.
func addImport(text []byte, pattern string, version int) ([]byte, tomltext.Added, error) {
	if pattern == "" {
		out, err := tomltext.AddVersion(text, version)
		return out, tomltext.Added{Version: true}, err
	}
	return tomltext.AddImport(text, pattern, version)
}

// importPattern is what the main file imports: the whole folder as NVIDIA's tools have it, or,
// where that would bring in files that are not read today, ours alone. A glob in both cases: a
// plain path that is not there stops containerd.
func importPattern(files engine.Files, path string) (string, error) {
	dir := filepath.Dir(path)
	folder := filepath.Join(dir, "*.toml")
	list, err := files.Glob(folder)
	if err != nil {
		return "", quota.NewError(quota.CodeEngineUnread, "%s cannot be read: %w", dir, err).WithHint("run gpufence as root")
	}
	if filepath.Ext(path) != ".toml" || slices.ContainsFunc(list, func(f string) bool { return f != path }) {
		ext := filepath.Ext(path)
		return strings.TrimSuffix(path, ext) + "*" + ext, nil
	}
	return folder, nil
}

// dumped is the CRI plugin's section of `containerd config dump`, which says the newest version
// whatever the files have.
func dumped(tree map[string]any, version int) map[string]any {
	plugins := engine.Table(tree, "plugins")
	if section, ok := plugins[pluginOf(version)].(map[string]any); ok {
		return section
	}
	for _, name := range []string{criV3, criV2} {
		if section, ok := plugins[name].(map[string]any); ok {
			// Only the runtimes mean the same in both.
			return map[string]any{"containerd": map[string]any{
				"runtimes": engine.Table(section, "containerd")["runtimes"], "default_runtime_name": engine.Table(section, "containerd")["default_runtime_name"],
			}}
		}
	}
	return nil
}

// entries computes the CRI plugin's section of our file; whole says that it has to repeat what is
// there.
func entries(s state, r engine.Request, whole bool) (map[string]any, []string, error) {
	runtimes := engine.Table(s.cri, "containerd", "runtimes")
	defaultName, _ := engine.Table(s.cri, "containerd")["default_runtime_name"].(string)
	if old, ok := runtimes[r.Handler].(map[string]any); ok {
		if name := binaryName(old); name != "" && !engine.IsWrapper(name) || name == "" && old["runtime_type"] != nil && old["runtime_type"] != runcType {
			return nil, nil, quota.NewError(quota.CodeEngineTaken, "containerd has a runtime %q already, and it is not gpufence-runtime (BinaryName %q)", r.Handler, name).
				WithHint("choose another name with --runtime-name, or take that one away")
		}
	}
	base := engine.LowLevel(runtimes, defaultName, func(name string, runtime map[string]any) bool {
		kind, _ := runtime["runtime_type"].(string)
		return name != r.Handler && !engine.IsWrapper(binaryName(runtime)) && (kind == "" || strings.HasPrefix(kind, "io.containerd.runc."))
	})
	added := map[string]any{r.Handler: fenced(base, r.Wrapper)}
	var notes []string
	if r.Wrap != "" {
		old, ok := runtimes[r.Wrap].(map[string]any)
		if !ok {
			return nil, nil, noWrap(r.Wrap, runtimes)
		}
		if kind, _ := old["runtime_type"].(string); kind != "" && !strings.HasPrefix(kind, "io.containerd.runc.") {
			return nil, nil, quota.NewError(quota.CodeEngineNoWrap, "the runtime %s is of type %s, which runs no program that could be wrapped", r.Wrap, kind).WithHint("wrap one of type %s", runcType)
		}
		if note := engine.ChainNote(r.Wrap, binaryName(old)); note != "" {
			notes = append(notes, note)
		}
		added[r.Wrap] = fenced(old, r.Wrapper)
	}
	if defaultName != "" && defaultName != "runc" && !strings.Contains(defaultName, "$") && runtimes[defaultName] == nil {
		notes = append(notes, fmt.Sprintf("default_runtime_name is %q, and no such runtime is configured", defaultName))
	}
	own := map[string]any{"runtimes": added}
	if r.Default {
		own["default_runtime_name"] = r.Handler
	}
	section := map[string]any{"containerd": own}
	if r.CDI {
		section["enable_cdi"] = true
	}
	if whole {
		if runtimes["runc"] == nil && !r.Default {
			// containerd's own default, which a table of runtimes replaces.
			if defaultName == "" || defaultName == "runc" {
				added["runc"] = map[string]any{"runtime_type": runcType}
			}
		}
		section = engine.Merge(s.cri, section)
	}
	return section, notes, nil
}

func noWrap(name string, runtimes map[string]any) error {
	var have []string
	for n := range runtimes {
		have = append(have, n)
	}
	slices.Sort(have)
	hint := "install that runtime first, or leave --wrap out"
	if len(have) > 0 {
		hint = "name one that it has: " + strings.Join(have, ", ")
	}
	return quota.NewError(quota.CodeEngineNoWrap, "containerd has no runtime %q to wrap", name).WithHint("%s", hint)
}

func binaryName(runtime map[string]any) string {
	name, _ := engine.Table(runtime, "options")["BinaryName"].(string)
	return name
}

// fenced is a runtime's entry with our program in it; everything else stays as it was.
func fenced(base map[string]any, wrapper string) map[string]any {
	out := engine.Merge(map[string]any{"runtime_type": runcType}, base)
	for _, legacy := range []string{"runtime_engine", "runtime_root"} {
		if out[legacy] == "" {
			delete(out, legacy) // containerd 2 knows neither
		}
	}
	if out["runtime_type"] == "" {
		out["runtime_type"] = runcType
	}
	out["pod_annotations"] = engine.Union(engine.Strings(out["pod_annotations"]), quota.AnnotationPatterns()...)
	// The kubelet names there where a termination message goes, and device plugins their devices.
	out["container_annotations"] = engine.Union(engine.Strings(out["container_annotations"]), "cdi.k8s.io/*", quota.Domain+"*", "io.kubernetes.container.*")
	out["options"] = engine.Merge(engine.Table(out, "options"), map[string]any{"BinaryName": wrapper})
	return out
}

// marshal writes the CRI plugin's section; whole says that it is a file of its own.
func marshal(section map[string]any, version int, whole bool) ([]byte, error) {
	text, err := toml.Marshal(map[string]any{"plugins": map[string]any{pluginOf(version): section}})
	if err != nil {
		return nil, quota.NewError(quota.CodeInternal, "write TOML: %w", err)
	}
	// The empty parents that the encoder writes say nothing.
	lines := strings.Split(strings.TrimSpace(string(text)), "\n")
	var out []string
	for i, line := range lines {
		if strings.HasPrefix(line, "[") && i+1 < len(lines) && strings.HasPrefix(lines[i+1], strings.TrimSuffix(line, "]")+".") {
			continue
		}
		if strings.HasPrefix(line, "[") && len(out) > 0 {
			out = append(out, "")
		}
		if line != "" {
			out = append(out, line)
		}
	}
	body := strings.Join(out, "\n") + "\n"
	if whole {
		body = "version = " + strconv.Itoa(version) + "\n\n" + body
	}
	return []byte(body), nil
}

// Uninstall plans that containerd forgets our runtime.
func Uninstall(files engine.Files, r engine.Request) (engine.Plan, error) {
	var plan engine.Plan
	if err := r.Check(); err != nil {
		return plan, err
	}
	imports, err := topImports(files, r.Config)
	if err != nil {
		return plan, err
	}
	path, err := dropIn(files, r, imports)
	if err != nil {
		return plan, err
	}
	before, err := engine.ReadOptional(files, path)
	if err != nil {
		return plan, err
	}
	if before == nil {
		if owner := ownerOf(r.Config); owner != nil {
			plan.Notes = append(plan.Notes, "what was put into "+owner.template(3)+" by hand has to be taken out by hand")
		}
		return plan, nil
	}
	ours, err := engine.OwnedChange(files, path, nil, engine.Header)
	if err != nil {
		return plan, err
	}
	made := headerOf(before)
	plan.Changes = []engine.Change{ours}
	if made.config != "" {
		text, err := engine.ReadOptional(files, made.config)
		if err != nil {
			return plan, err
		}
		main := engine.Change{Path: made.config, Before: text, After: text}
		if text != nil {
			if main.After, err = tomltext.RemoveImport(text, made.pattern, made.added); err != nil {
				return plan, quota.NewError(quota.CodeEngineForm, "imports in %s cannot be edited: %w", made.config, err).WithHint("take %q out by hand and run this again", made.pattern)
			}
			if len(main.After) == 0 {
				main.After = []byte{}
			}
			if made.created && len(strings.TrimSpace(string(main.After))) == 0 {
				main.After = nil
			}
		}
		// The import first: a main file that imports what is not there stops containerd.
		plan.Changes = []engine.Change{main, ours}
	}
	if plan.Sources, err = remaining(files, r, path); err != nil {
		return plan, err
	}
	return plan, nil
}

// remaining are the files that containerd reads when ours is gone.
func remaining(files engine.Files, r engine.Request, path string) ([]string, error) {
	s, err := read(files, r, path)
	if err != nil && !errors.Is(err, quota.CodeEngineNoCRI) && !errors.Is(err, quota.CodeEngineForm) {
		return nil, err
	}
	return slices.DeleteFunc(s.sources, func(f string) bool { return f == path }), nil
}

// Standalone is the main file's text as containerd's loader can check it before anything is
// changed: with the files that it imports named one by one, ours under another name.
func Standalone(main []byte, imports []string) ([]byte, error) {
	return tomltext.SetImports(main, 2, imports)
}

// Found looks into what the loader printed for a runtime and says which program it runs.
func Found(dump []byte, handler string) (string, error) {
	var tree map[string]any
	if err := toml.Unmarshal(dump, &tree); err != nil {
		return "", fmt.Errorf("parse the loader's answer: %w", err)
	}
	for _, plugin := range []string{criV3, criV2} {
		if runtime := engine.Table(tree, "plugins", plugin, "containerd", "runtimes", handler); runtime != nil {
			return binaryName(runtime), nil
		}
	}
	return "", nil
}
