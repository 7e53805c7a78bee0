// SPDX-License-Identifier: Apache-2.0

package release

import (
	"crypto/sha256"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"
)

const mit = "Permission is hereby granted, free of charge, to any person obtaining\n a copy of this software"

func TestIdentify(t *testing.T) {
	for _, c := range []struct{ text, want string }{
		{"Apache License\n   Version 2.0, January 2004", "Apache-2.0"},
		{mit, "MIT"},
		{"Mozilla Public License Version 2.0 ... GNU General Public License version 2.0 as a secondary one", "MPL-2.0"},
		{"Redistribution and use in source and binary\nforms ... may be used to endorse or promote", "BSD-3-Clause"},
		{"Redistribution and use in source and binary forms", "BSD-2-Clause"},
		{"Permission to use, copy, modify, and distribute this software for any purpose", "ISC"},
		{mit + " and also Apache License, Version 2.0", "Apache-2.0 AND MIT"},
		{"GNU GENERAL PUBLIC LICENSE\nVersion 3", ""},
		{"GNU Lesser General Public License version 3", ""},
		{"This file is part of X, under the Business Source License", ""},
		{mit + ", or the GNU General Public License version 2", ""},
		{"", ""},
	} {
		if got := identify(c.text); got != c.want {
			t.Errorf("%q is %q, want %q", c.text, got, c.want)
		}
	}
}

func module(t *testing.T, files map[string]string) *Module {
	t.Helper()
	root := t.TempDir()
	for name, text := range files {
		at := filepath.Join(root, name)
		if err := os.MkdirAll(filepath.Dir(at), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(at, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	return &Module{Path: "example.org/m", Version: "v1.0.0", Root: root, Packages: []string{root, filepath.Join(root, "a/b")}}
}

func TestLicencesOfAModule(t *testing.T) {
	m := module(t, map[string]string{
		"LICENSE": mit, "NOTICE": "made by", "a/LICENSE-2.0.txt": "Apache License, Version 2.0", "a/b/license.go": "package b", "c/LICENSE": "of a package that is not linked", "README": "",
	})
	if err := m.find(); err != nil {
		t.Fatal(err)
	}
	var files []string
	for _, l := range m.Licences {
		files = append(files, l.File)
	}
	if !slices.Equal(files, []string{"LICENSE", "NOTICE", "a/LICENSE-2.0.txt"}) || !slices.Equal(m.ids(), []string{"Apache-2.0", "MIT"}) {
		t.Errorf("%q %q", files, m.ids())
	}
	text, err := Notices([]Module{*m, {Path: "example.org/n", Version: "v2.0.0", Licences: m.Licences[:1]}})
	if err != nil {
		t.Fatal(err)
	}
	if strings.Count(text, "Permission is hereby") != 1 || !strings.Contains(text, "example.org/m v1.0.0 (LICENSE)\nexample.org/n v2.0.0 (LICENSE)\n") || !strings.Contains(text, "made by") {
		t.Errorf("notices:\n%s", text)
	}

	for _, files := range []map[string]string{{"README": mit}, {"NOTICE": "made by"}, {"LICENSE": "do what I say"}, {"a/COPYING": "GNU Affero General Public License"}} {
		files["a/b/b.go"] = "package b"
		if err := module(t, files).find(); err == nil {
			t.Errorf("%q may be passed on", files)
		}
	}
}

func TestSBOMFollowsFromItsContents(t *testing.T) {
	file := filepath.Join(t.TempDir(), "program")
	if err := os.WriteFile(file, []byte("program"), 0o755); err != nil {
		t.Fatal(err)
	}
	shipped := []Shipped{{Name: "/usr/bin/program", File: file, Modules: []Module{{Path: "example.org/m", Version: "v1.0.0", Sum: "h1:AAAA", Licences: []Licence{{ID: "MIT"}, {ID: "ISC"}}}}}}
	write := func() string {
		text, err := SBOM("gpufence", Version{Build: "v1", Semver: "1.0.0"}, "amd64", "go1", shipped, time.Unix(1_700_000_000, 0))
		if err != nil {
			t.Fatal(err)
		}
		return string(text)
	}
	one := write()
	if one != write() {
		t.Error("two SBOMs of the same differ")
	}
	for _, want := range []string{fmt.Sprintf("%x", sha256.Sum256([]byte("program"))), `"pkg:golang/example.org/m@v1.0.0"`, `"ISC AND MIT"`, `"2023-11-14T22:13:20Z"`} {
		if !strings.Contains(one, want) {
			t.Errorf("no %s in\n%s", want, one)
		}
	}
	serial := func(text string) string { return strings.SplitN(strings.SplitN(text, "urn:uuid:", 2)[1], `"`, 2)[0] }
	if err := os.WriteFile(file, []byte("another"), 0o755); err != nil {
		t.Fatal(err)
	}
	if other := write(); serial(other) == serial(one) {
		t.Error("other contents have the same serial number")
	}
}
