// SPDX-License-Identifier: Apache-2.0

package release

import (
	"cmp"
	"errors"
	"fmt"
	"os"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
)

// Module is a module of others that is linked into a program.
type Module struct {
	Path, Version string
	Root          string   // its folder on this machine
	Packages      []string // folders of its packages that are linked
	Sum           string   // of go.sum
	Licences      []Licence
}

// Licence is a file of a module that says under which terms it may be passed on.
type Licence struct {
	File string // relative to the module's root
	ID   string // SPDX; "" of a notice
	Text string
}

var licenceFile = regexp.MustCompile(`(?i)^(licen[cs]e|copying|notice|copyright|patents)([-._].*)?$`)

// find reads the licences of a module: those of its root, and of every folder down to a package that is
// linked, since what was taken over from elsewhere lies with its own.
func (m *Module) find() error {
	folders := map[string]bool{m.Root: true}
	for _, dir := range m.Packages {
		for ; dir != m.Root && strings.HasPrefix(dir, m.Root+"/"); dir = filepath.Dir(dir) {
			folders[dir] = true
		}
	}
	for dir := range folders {
		entries, err := os.ReadDir(dir)
		if err != nil {
			return fmt.Errorf("read licences of %s: %w", m.Path, err)
		}
		for _, e := range entries {
			if !e.Type().IsRegular() || !licenceFile.MatchString(e.Name()) || slices.Contains([]string{".go", ".sh", ".tmpl", ".yaml", ".yml"}, path.Ext(e.Name())) {
				continue
			}
			text, err := os.ReadFile(filepath.Join(dir, e.Name()))
			if err != nil {
				return fmt.Errorf("read licences of %s: %w", m.Path, err)
			}
			rel, err := filepath.Rel(m.Root, filepath.Join(dir, e.Name()))
			if err != nil {
				return fmt.Errorf("read licences of %s: %w", m.Path, err)
			}
			l := Licence{File: rel, Text: string(text)}
			if lower := strings.ToLower(e.Name()); !strings.HasPrefix(lower, "notice") && !strings.HasPrefix(lower, "patents") && !strings.HasPrefix(lower, "copyright") {
				if l.ID = identify(l.Text); l.ID == "" {
					return fmt.Errorf("read licences of %s: %s is none that is known here: look whether we may pass it on, then teach identify() to know it", m.Path, rel)
				}
			}
			m.Licences = append(m.Licences, l)
		}
	}
	slices.SortFunc(m.Licences, func(a, b Licence) int { return cmp.Compare(a.File, b.File) })
	if len(m.ids()) == 0 {
		return fmt.Errorf("read licences of %s: it has none, so we may not pass it on", m.Path)
	}
	return nil
}

// ids are the module's licences, each once.
func (m *Module) ids() []string {
	var out []string
	for _, l := range m.Licences {
		if l.ID != "" && !slices.Contains(out, l.ID) {
			out = append(out, l.ID)
		}
	}
	slices.Sort(out)
	return out
}

// identify knows the licences under which a module may be linked into ours. "" is any other.
func identify(text string) string {
	t := " " + strings.ToLower(strings.Join(strings.Fields(text), " ")) + " "
	has := func(s string) bool { return strings.Contains(t, s) }
	var found []string
	if has("apache license version 2.0") || has("apache license, version 2.0") {
		found = append(found, "Apache-2.0")
	}
	if has("mozilla public license version 2.0") || has("mozilla public license, version 2.0") {
		found = append(found, "MPL-2.0")
	}
	if has("permission is hereby granted, free of charge, to any person obtaining a copy") {
		found = append(found, "MIT")
	}
	if has("permission to use, copy, modify, and distribute this software") || has("permission to use, copy, modify, and/or distribute this software") {
		found = append(found, "ISC")
	}
	if has("redistribution and use in source and binary forms") {
		if has("may be used to endorse or promote") {
			found = append(found, "BSD-3-Clause")
		} else {
			found = append(found, "BSD-2-Clause")
		}
	}
	for _, other := range []string{"gnu general public license version", "gnu lesser general public license version", "gnu affero", "business source license", "server side public license"} {
		// Named by a text that gives a choice, or that is one of these; a person has to look.
		if has(other) && !slices.Contains(found, "MPL-2.0") {
			return ""
		}
	}
	return strings.Join(found, " AND ")
}

// Notices is the text that goes with programs that these modules are linked into.
func Notices(modules []Module) (string, error) {
	if len(modules) == 0 {
		return "", errors.New("write notices: no modules")
	}
	var b strings.Builder
	b.WriteString("gpufence is licensed under the Apache License 2.0. Its programs contain the modules below, each under its own terms.\n\n")
	for _, m := range modules {
		fmt.Fprintf(&b, "%s %s: %s\n", m.Path, m.Version, strings.Join(m.ids(), ", "))
	}
	// Most texts are the same: each once, with those whose it is.
	whose, texts := map[string][]string{}, []string(nil)
	for _, m := range modules {
		for _, l := range m.Licences {
			text := strings.TrimSpace(strings.ReplaceAll(l.Text, "\r\n", "\n"))
			if whose[text] == nil {
				texts = append(texts, text)
			}
			whose[text] = append(whose[text], m.Path+" "+m.Version+" ("+l.File+")")
		}
	}
	for _, text := range texts {
		fmt.Fprintf(&b, "\n%s\n%s\n\n%s\n", strings.Repeat("=", 100), strings.Join(whose[text], "\n"), text)
	}
	return b.String(), nil
}
