// SPDX-License-Identifier: Apache-2.0

package oci

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/gpufence/gpufence/enforcer/quota"
)

func program(t *testing.T, path string) string {
	t.Helper()
	writeFile(t, path, "#!/bin/sh\n")
	if err := os.Chmod(path, 0o755); err != nil {
		t.Fatal(err)
	}
	return path
}

func TestFindRuntime(t *testing.T) {
	dir := t.TempDir()
	a, b, operator := filepath.Join(dir, "a"), filepath.Join(dir, "b"), filepath.Join(dir, "operator")
	runc := program(t, filepath.Join(b, "runc"))
	nvidia := program(t, filepath.Join(operator, "nvidia-container-runtime"))
	plain := writeFile(t, filepath.Join(a, "runc"), "not executable")
	if err := os.MkdirAll(filepath.Join(a, "crun"), 0o755); err != nil {
		t.Fatal(err)
	}
	alternative := filepath.Join(a, "oci-runtime")
	if err := os.Symlink(runc, alternative); err != nil {
		t.Fatal(err)
	}
	tests := []struct {
		name    string
		names   []string
		runcish bool
		want    string
	}{
		{"the operator's folder comes after PATH", []string{"nvidia-container-runtime", "runc"}, false, nvidia},
		{"in a chain only what makes containers", []string{"nvidia-container-runtime", "runc"}, true, runc},
		{"what is no program is passed over", []string{"crun", "runc"}, false, runc},
		{"absolute", []string{plain, runc}, false, runc},
		{"relative names are nobody's", []string{"./runc", "b/runc", "", "runc"}, false, runc},
		{"a link to runc is runc", []string{alternative}, true, alternative},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			got, err := lookup{
				names: test.names, path: a + ":relative:" + b, extra: []string{operator}, onlyRuncish: test.runcish,
			}.find()
			if err != nil || got != test.want {
				t.Errorf("got %q, %v, want %q", got, err, test.want)
			}
		})
	}
}

func TestFindRuntimeNever(t *testing.T) {
	dir := t.TempDir()
	self := program(t, filepath.Join(dir, "self", "gpufence-runtime"))
	info, err := os.Stat(self)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.MkdirAll(filepath.Join(dir, "bin"), 0o755); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"runc", "crun"} {
		if err := os.Symlink(self, filepath.Join(dir, "bin", name)); err != nil {
			t.Fatal(err)
		}
	}
	program(t, filepath.Join(dir, "copy", "gpufence-runtime.cri"))
	l := lookup{names: []string{"runc", "crun", "gpufence-runtime.cri"}, path: filepath.Join(dir, "bin") + ":" + filepath.Join(dir, "copy"), self: info}
	_, err = l.find()
	if !errors.Is(err, quota.CodeRuntimeExec) || !strings.Contains(err.Error(), filepath.Join(dir, "bin", "runc")) {
		t.Errorf("found ourselves: %v", err)
	}

	_, err = lookup{names: []string{"runc", "crun"}, path: filepath.Join(dir, "none"), extra: []string{"/op"}}.find()
	if !errors.Is(err, quota.CodeNoRuntime) || !strings.Contains(err.Error(), "runc, crun") {
		t.Errorf("got %v", err)
	}
	_, err = lookup{path: filepath.Join(dir, "none")}.find()
	if !errors.Is(err, quota.CodeNoRuntime) {
		t.Errorf("got %v", err)
	}
}

func TestLookupWithoutPATH(t *testing.T) {
	if got := (lookup{}).candidates("runc"); len(got) == 0 || got[0] != "/usr/local/sbin/runc" {
		t.Errorf("got %v", got)
	}
}
