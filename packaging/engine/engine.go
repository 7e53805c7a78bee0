// SPDX-License-Identifier: Apache-2.0

// Package engine says how a container engine's configuration names gpufence-runtime as a runtime.
// Its subpackages know one engine each (containerd, crio, docker, podman), and are pure: from the
// files that are there and a [Request] they compute a [Plan], which is a list of files as they are
// and as they are to be. Package host carries a plan out.
//
// What every engine's package promises: Install over its own result changes nothing, byte for
// byte. Uninstall after Install gives back the bytes that were there. Of a file that is not ours
// only the lines change that have to; comments, order, line ends and unknown keys stay. What is
// not understood is refused with one sentence and a code, and nothing is planned then.
package engine

import (
	"errors"
	"io/fs"
	"path/filepath"
	"regexp"
	"slices"
	"strings"

	"github.com/gpufence/gpufence/enforcer/quota"
)

// Header is the first line of every file that is ours alone.
const Header = "# Written by `gpufence install`. Change it with that command; `gpufence uninstall` removes it.\n"

// DefaultHandler is the name of the runtime where nobody says another.
const DefaultHandler = "gpufence"

// WrapperPrefix is how every name of gpufence-runtime begins.
const WrapperPrefix = "gpufence-runtime"

// Files is where an engine's configuration is read from.
type Files interface {
	// ReadFile fails with fs.ErrNotExist if there is none.
	ReadFile(path string) ([]byte, error)
	// Glob lists the files that match, sorted.
	Glob(pattern string) ([]string, error)
}

// Request is what is to be configured.
type Request struct {
	Config  string // the engine's main file
	DropIn  string // "": where the engine's conventions have it
	Handler string // the runtime's name
	Wrapper string // absolute path of gpufence-runtime with the engine's suffix
	Hook    string // absolute path of gpufence-hook; "": write no hook
	Default bool   // make it the engine's default runtime
	CDI     bool   // switch the engine's own CDI support on
	Wrap    string // an existing runtime that is to go through us; "": none
	Major   int    // the engine's major version; 0: not known
	// Source is the engine's own answer to what its configuration is; nil: its files are read.
	Source map[string]any
}

// Change is one file.
type Change struct {
	Path   string
	Before []byte // nil: it is not there
	After  []byte // nil: it is not to be there
	Ours   bool   // nobody else's lines are in it
}

// Differs says whether there is anything to do.
func (c Change) Differs() bool {
	return (c.Before == nil) != (c.After == nil) || string(c.Before) != string(c.After)
}

// Plan is what is to be written, in this order.
type Plan struct {
	Changes []Change
	// Notes are sentences that a person should read.
	Notes []string
	// Snippet is what a person has to put into a template, where the file is generated.
	Snippet string
	// Sources are the files that the engine reads besides, in its order, the main file first.
	Sources []string
}

// Differs says whether any file changes.
func (p Plan) Differs() bool { return slices.ContainsFunc(p.Changes, Change.Differs) }

// handlerName is what all four engines take as a runtime's name; it becomes part of TOML and JSON.
var handlerName = regexp.MustCompile(`^[a-zA-Z0-9][a-zA-Z0-9_-]{0,62}$`)

// Check refuses a request that no engine could carry out.
func (r Request) Check() error {
	for _, name := range []string{r.Handler, r.Wrap} {
		if name != "" && !handlerName.MatchString(name) {
			return quota.NewError(quota.CodeUsage, "%.80q is no name for a runtime", name).WithHint("take letters, digits, - and _, at most 63")
		}
	}
	if r.Handler == "" {
		return quota.NewError(quota.CodeUsage, "the runtime needs a name").WithHint("give --runtime-name, or leave it out for %s", DefaultHandler)
	}
	if r.Wrap == r.Handler {
		return quota.NewError(quota.CodeUsage, "%s cannot be wrapped by itself", r.Handler).WithHint("name another with --wrap")
	}
	for flag, path := range map[string]string{"--runtime-path": r.Wrapper, "--config": r.Config, "--drop-in-config": r.DropIn} {
		if path != "" && !filepath.IsAbs(path) {
			return quota.NewError(quota.CodeUsage, "%s %.200q is not absolute", flag, path).WithHint("engines run in other folders: write the whole path")
		}
	}
	return nil
}

// IsWrapper says whether a program is gpufence-runtime under any of its names.
func IsWrapper(path string) bool { return strings.HasPrefix(filepath.Base(path), WrapperPrefix) }

// ReadOptional reads a file that need not be there: nil means that it is not.
func ReadOptional(files Files, path string) ([]byte, error) {
	text, err := files.ReadFile(path)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return nil, nil
	case err != nil:
		return nil, quota.NewError(quota.CodeEngineUnread, "the engine's configuration %s cannot be read: %w", path, err).WithHint("run gpufence as root")
	case text == nil:
		return []byte{}, nil
	}
	return text, nil
}

// OwnedChange plans a file that is ours alone; one of somebody else under its name is refused.
func OwnedChange(files Files, path string, after []byte, header string) (Change, error) {
	before, err := ReadOptional(files, path)
	if err != nil {
		return Change{}, err
	}
	if before != nil && !strings.HasPrefix(string(before), header) {
		return Change{}, quota.NewError(quota.CodeEngineTaken, "%s is there and is not gpufence's", path).WithHint("move it away, or choose another file with --drop-in-config")
	}
	return Change{Path: path, Before: before, After: after, Ours: true}, nil
}

// Merge puts from over to, table by table; lists and values are replaced. Neither is changed.
func Merge(to, from map[string]any) map[string]any {
	out := make(map[string]any, len(to)+len(from))
	for k, v := range to {
		out[k] = v
	}
	for k, v := range from {
		table, isTable := v.(map[string]any)
		old, wasTable := out[k].(map[string]any)
		if isTable && wasTable {
			out[k] = Merge(old, table)
		} else {
			out[k] = v
		}
	}
	return out
}

// Table follows a path of tables; nil if there is none.
func Table(tree map[string]any, path ...string) map[string]any {
	for _, key := range path {
		tree, _ = tree[key].(map[string]any)
	}
	return tree
}

// Strings reads a list of strings and leaves out what is none.
func Strings(v any) []string {
	list, _ := v.([]any)
	if typed, ok := v.([]string); ok {
		return slices.Clone(typed)
	}
	var out []string
	for _, e := range list {
		if s, ok := e.(string); ok {
			out = append(out, s)
		}
	}
	return out
}

// Union appends what is missing.
func Union(list []string, more ...string) []string {
	for _, m := range more {
		if !slices.Contains(list, m) {
			list = append(list, m)
		}
	}
	return list
}

// LowLevel picks the runtime whose settings ours takes over: the default one, runc or crun, the
// first that is there and suits. The default one may be NVIDIA's: what it says of the cgroup
// driver is what the node's pods run with.
func LowLevel(runtimes map[string]any, defaultName string, suits func(name string, runtime map[string]any) bool) map[string]any {
	for _, name := range []string{defaultName, "runc", "crun"} {
		if runtime, ok := runtimes[name].(map[string]any); ok && name != "" && suits(name, runtime) {
			return runtime
		}
	}
	return nil
}

// ChainNote says what has to be configured so that a wrapped runtime is still called, or nothing.
func ChainNote(handler, program string) string {
	known := []string{"nvidia-container-runtime", "runc", "crun"}
	dirs := []string{"", "/usr/bin", "/usr/local/bin", "/usr/sbin", "/usr/local/sbin", "/bin", "/sbin", "/usr/local/nvidia/toolkit"}
	if program == "" || slices.Contains(known, filepath.Base(program)) && slices.Contains(dirs, strings.TrimSuffix(filepath.Dir(program), ".")) {
		return ""
	}
	return "the runtime " + handler + " is " + program + ", which gpufence-runtime does not look for: put it first into `runtimes` in /etc/gpufence/config.toml"
}

// BackupPath is where a file that is not ours is kept as it was before our first change.
func BackupPath(path string) string { return path + ".gpufence-backup" }
