// SPDX-License-Identifier: Apache-2.0

package oci

import (
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"github.com/gpufence/gpufence/enforcer/quota"
)

// operatorDir is where the GPU operator puts NVIDIA's runtime; no PATH names it.
const operatorDir = "/usr/local/nvidia/toolkit"

// defaultPath is searched if the caller's environment has no PATH (as under some monitors).
const defaultPath = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

// programPrefix is how our own programs begin: a copy of the wrapper has another inode.
const programPrefix = "gpufence-runtime"

// terminal are the runtimes that make the container themselves. Every other one is a wrapper
// like us, which may be configured to call us.
var terminal = map[string]bool{"runc": true, "crun": true, "youki": true}

// lookup says where low-level runtimes are searched.
type lookup struct {
	names       []string // of the configuration, in order of preference
	path        string   // $PATH
	extra       []string // folders after it
	self        fs.FileInfo
	onlyRuncish bool // leave out wrappers: we were called by one that we called
}

// find returns the absolute path of the first low-level runtime that exists and is not we.
func (l lookup) find() (string, error) {
	var loops []string
	for _, name := range l.names {
		for _, candidate := range l.candidates(name) {
			info, err := os.Stat(candidate)
			if err != nil || !info.Mode().IsRegular() || info.Mode().Perm()&0o111 == 0 {
				continue
			}
			if l.self != nil && os.SameFile(info, l.self) || strings.HasPrefix(filepath.Base(candidate), programPrefix) {
				loops = append(loops, candidate)
				continue
			}
			if l.onlyRuncish && !isTerminal(candidate) {
				loops = append(loops, candidate)
				continue
			}
			return candidate, nil
		}
	}
	if len(loops) > 0 {
		return "", quota.NewError(quota.CodeRuntimeExec, "the low-level runtime %s leads back to gpufence-runtime", loops[0]).
			WithHint("name runc or crun under `runtimes` in config.toml")
	}
	return "", quota.NewError(quota.CodeNoRuntime, "none of the low-level runtimes %s exists in PATH or %s",
		strings.Join(l.names, ", "), strings.Join(l.extra, ", ")).
		WithHint("install runc, or name another one under `runtimes` in config.toml")
}

func (l lookup) candidates(name string) []string {
	if filepath.IsAbs(name) {
		return []string{name}
	}
	if name == "" || strings.ContainsRune(name, '/') {
		return nil // relative to which directory? the engine's is nobody's choice
	}
	path := l.path
	if path == "" {
		path = defaultPath
	}
	var found []string
	for _, dir := range append(filepath.SplitList(path), l.extra...) {
		if filepath.IsAbs(dir) {
			found = append(found, filepath.Join(dir, name))
		}
	}
	return found
}

// isTerminal says whether a runtime makes containers itself, by the name of the file that it
// really is (alternatives are links).
func isTerminal(path string) bool {
	if terminal[filepath.Base(path)] {
		return true
	}
	target, err := filepath.EvalSymlinks(path)
	return err == nil && terminal[filepath.Base(target)]
}
