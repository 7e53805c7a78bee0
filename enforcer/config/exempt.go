// SPDX-License-Identifier: Apache-2.0

package config

import (
	"path"
	"strings"
)

// ExemptKind is by what an [Exempt] knows a process.
type ExemptKind string

// The kinds of exemptions.
const (
	// ExemptExe is the program's path, which counts only for a process in the host's mount
	// namespace: inside a container anything can be mounted anywhere.
	ExemptExe ExemptKind = "exe"
	// ExemptCgroup is the process's cgroup or one above it.
	ExemptCgroup ExemptKind = "cgroup"
	// ExemptComm is the process's name, which it chooses itself.
	ExemptComm ExemptKind = "comm"
)

// commBytes is how much of a name the kernel keeps.
const commBytes = 15

// Exempt is an item of unmanaged-exempt: GPU use that the node's owner knows of.
type Exempt struct {
	Kind    ExemptKind
	Pattern string // as of path.Match
}

// Identity is a process as far as exemptions look at it. Exe is empty where it is not known, or the
// process is not in the host's mount namespace.
type Identity struct {
	Exe, Cgroup, Comm string
}

// String is the exemption as it stands in the file.
func (e Exempt) String() string { return string(e.Kind) + ":" + e.Pattern }

// Matches says whether the process is exempt.
func (e Exempt) Matches(p Identity) bool {
	switch e.Kind {
	case ExemptExe:
		return p.Exe != "" && matches(e.Pattern, p.Exe)
	case ExemptComm:
		pattern := e.Pattern
		if len(pattern) > commBytes && !strings.ContainsAny(pattern, `*?[\`) {
			pattern = pattern[:commBytes]
		}
		return p.Comm != "" && matches(pattern, p.Comm)
	case ExemptCgroup:
		for at := path.Clean(p.Cgroup); strings.HasPrefix(at, "/") && at != "/"; at = path.Dir(at) {
			if matches(e.Pattern, at) {
				return true
			}
		}
	}
	return false
}

func matches(pattern, s string) bool {
	ok, err := path.Match(pattern, s)
	return ok && err == nil // a pattern that is wrong was refused when it was read
}

// Exempted says whether any exemption matches the process.
func (c *Config) Exempted(p Identity) bool {
	for _, e := range c.UnmanagedExempt {
		if e.Matches(p) {
			return true
		}
	}
	return false
}

// parseExempt reads an item; why is empty if it can be used.
func parseExempt(s string) (e Exempt, why string) {
	kind, pattern, ok := strings.Cut(s, ":")
	e = Exempt{ExemptKind(kind), pattern}
	_, err := path.Match(pattern, "x")
	switch {
	case !ok || pattern == "" || e.Kind != ExemptExe && e.Kind != ExemptCgroup && e.Kind != ExemptComm:
		return e, "is neither exe:/path, cgroup:/path nor comm:name"
	case err != nil:
		return e, "is no pattern"
	case e.Kind != ExemptComm && (!strings.HasPrefix(pattern, "/") || path.Clean(pattern) != pattern):
		return e, "has no plain absolute path"
	case e.Kind == ExemptCgroup && pattern == "/", e.Kind == ExemptCgroup && pattern == "/*":
		return e, "exempts everything: write unmanaged = \"allow\" for that"
	}
	return e, ""
}
