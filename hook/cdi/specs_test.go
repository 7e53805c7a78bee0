// SPDX-License-Identifier: Apache-2.0

package cdi

import (
	"os"
	"path/filepath"
	"testing"
	"time"
)

func TestSpecsAreReadWhenTheyChange(t *testing.T) {
	dir := t.TempDir()
	dirs := []string{filepath.Join(dir, "none"), dir}
	file := filepath.Join(dir, "gpu.yaml")
	spec := func(name string) string {
		return "{cdiVersion: 1.0.0, kind: example.com/gpu, devices: [{name: \"" + name + "\", containerEdits: {env: [A=b]}}]}"
	}
	s := Specs{now: func() time.Time { return time.Now().Add(time.Hour) }}
	read := func(want string) {
		t.Helper()
		cache, err := s.Read(dirs)
		if err != nil {
			t.Fatal(err)
		}
		var got string
		for _, name := range cache.ListDevices() {
			got += name + " "
		}
		if got != want {
			t.Errorf("devices %q, want %q", got, want)
		}
	}
	read("")
	write(t, file, spec("0"))
	read("example.com/gpu=0 ")
	first := s.cache
	read("example.com/gpu=0 ")
	if first == nil || s.cache != first {
		t.Error("read again, though nothing changed")
	}
	write(t, file, spec("longer")) // in place
	read("example.com/gpu=longer ")
	write(t, file, spec("1"))
	read("example.com/gpu=1 ")
	replacement := write(t, filepath.Join(dir, "new"), spec("2"))
	if err := os.Rename(replacement, file); err != nil {
		t.Fatal(err)
	}
	read("example.com/gpu=2 ")
	if err := os.Remove(file); err != nil {
		t.Fatal(err)
	}
	read("")
}

// TestSpecsOfThisMoment: two changes in a moment look like one.
func TestSpecsOfThisMoment(t *testing.T) {
	dir := t.TempDir()
	write(t, filepath.Join(dir, "gpu.yaml"), "{cdiVersion: 1.0.0, kind: example.com/gpu, devices: [{name: a, containerEdits: {env: [A=b]}}]}")
	s := Specs{now: func() time.Time { return time.Now().Add(-time.Hour) }} // however slow this is
	if cache, err := s.Read([]string{dir}); err != nil || len(cache.ListDevices()) != 1 {
		t.Fatal(err)
	}
	if s.cache != nil {
		t.Error("kept")
	}
}

// TestSpecsThatCannotBeRead: nothing says when what failed would not fail any more.
func TestSpecsThatCannotBeRead(t *testing.T) {
	dir := t.TempDir()
	write(t, filepath.Join(dir, "gpu.yaml"), "kind: [")
	s := Specs{now: func() time.Time { return time.Now().Add(time.Hour) }}
	for range 2 {
		cache, err := s.Read([]string{dir})
		if err != nil || len(cache.GetErrors()) == 0 {
			t.Errorf("%v, %v", err, cache)
		}
		if s.cache != nil {
			t.Error("kept")
		}
	}
}

func TestStateSeesThroughLinks(t *testing.T) {
	dir, elsewhere := t.TempDir(), t.TempDir()
	target := write(t, filepath.Join(elsewhere, "gpu.yaml"), "a")
	if err := os.Symlink(target, filepath.Join(dir, "gpu.yaml")); err != nil {
		t.Fatal(err)
	}
	before := State([]string{dir})
	write(t, target, "other")
	if State([]string{dir}) == before {
		t.Error("a change behind a link is not seen")
	}
	if err := os.Remove(target); err != nil {
		t.Fatal(err)
	}
	if gone := State([]string{dir}); gone == before {
		t.Errorf("nothing is behind the link any more: %s", gone)
	}
}
