// SPDX-License-Identifier: Apache-2.0

package ldd

import (
	"debug/elf"
	"errors"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// TestProgramsFindAllTheyNeed: a program's libraries are there, for the same machine, and need nothing that is not.
func TestProgramsFindAllTheyNeed(t *testing.T) {
	program, err := exec.LookPath("ls") // needs more than the C library
	if err != nil {
		t.Fatal(err)
	}
	loader, machine, err := Loader(program)
	if err != nil || !filepath.IsAbs(loader) {
		t.Fatalf("loader %q: %v", loader, err)
	}
	places, err := Libraries(machine, program)
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	for _, place := range places {
		names = append(names, filepath.Base(place))
	}
	if !slices.Contains(names, "libc.so.6") {
		t.Errorf("%s needs %q, not the C library", program, names)
	}
	if sorted := slices.Sorted(slices.Values(names)); len(slices.Compact(sorted)) != len(names) {
		t.Errorf("some are there twice: %q", names)
	}
	for _, place := range append(places, program) {
		_, m, err := Loader(place)
		if err != nil || m != machine {
			t.Errorf("%s is for %s, want %s: %v", place, m, machine, err)
		}
		needed, err := neededBy(place)
		if err != nil {
			t.Error(err)
		}
		for _, library := range needed {
			if !slices.Contains(names, library) {
				t.Errorf("%s needs %s, which is not among %q", place, library, names)
			}
		}
	}
}

// TestStaticProgramsNeedNothing: the loader is one.
func TestStaticProgramsNeedNothing(t *testing.T) {
	program, err := exec.LookPath("ls")
	if err != nil {
		t.Fatal(err)
	}
	loader, _, err := Loader(program)
	if err != nil {
		t.Fatal(err)
	}
	none, machine, err := Loader(loader)
	if err != nil || none != "" {
		t.Errorf("the loader names the loader %q: %v", none, err)
	}
	if places, err := Libraries(machine, loader); err != nil || len(places) != 0 {
		t.Errorf("the loader needs %q: %v", places, err)
	}
}

func TestErrorsNameWhatIsMissing(t *testing.T) {
	script := filepath.Join(t.TempDir(), "script")
	if err := os.WriteFile(script, []byte("#!/bin/sh\n"), 0o755); err != nil {
		t.Fatal(err)
	}
	if _, _, err := Loader(script); err == nil || !strings.Contains(err.Error(), "read program "+script) {
		t.Errorf("the loader of a script: %v", err)
	}
	if _, err := Libraries(elf.EM_X86_64, script); err == nil || !strings.Contains(err.Error(), script) {
		t.Errorf("the libraries of a script: %v", err)
	}
	if _, _, err := Loader(script + ".gone"); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("a program that is gone: %v", err)
	}
	if _, err := Find("libnothing.so.9", elf.EM_X86_64); err == nil || !strings.Contains(err.Error(), "libnothing.so.9 for EM_X86_64") {
		t.Errorf("a library that is not there: %v", err)
	}
	if _, err := Find("libc.so.6", elf.EM_NONE); err == nil {
		t.Error("a library was found for no machine")
	}
}
