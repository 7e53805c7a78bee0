// SPDX-License-Identifier: Apache-2.0

// Package ldd finds what programs of this machine need to run in another root, as ldd lists it, without running them: the
// loader that they name, and the libraries that they and these need.
package ldd

import (
	"debug/elf"
	"fmt"
	"io"
	"path/filepath"
	"slices"
	"strings"
)

// Loader is the dynamic loader that a program names, "" if the program is static; and what it is built for.
func Loader(program string) (loader string, machine elf.Machine, err error) {
	f, err := elf.Open(program)
	if err != nil {
		return "", 0, fmt.Errorf("read program %s: %w", program, err)
	}
	defer closeELF(f)
	for _, p := range f.Progs {
		if p.Type != elf.PT_INTERP {
			continue
		}
		text, err := io.ReadAll(p.Open())
		if err != nil {
			return "", 0, fmt.Errorf("read loader of %s: %w", program, err)
		}
		return strings.TrimRight(string(text), "\x00"), f.Machine, nil
	}
	return "", f.Machine, nil
}

// Libraries are the places of all libraries that programs and libraries need, and those that these need: each once.
// Where a library names the loader as one, as the C library does, that is among them.
func Libraries(machine elf.Machine, files ...string) ([]string, error) {
	var places []string
	found := map[string]bool{}
	for pending := slices.Clone(files); len(pending) > 0; {
		file := pending[0]
		pending = pending[1:]
		needed, err := neededBy(file)
		if err != nil {
			return nil, err
		}
		for _, library := range needed {
			if found[library] {
				continue
			}
			found[library] = true
			place, err := Find(library, machine)
			if err != nil {
				return nil, fmt.Errorf("find what %s needs: %w", file, err)
			}
			places = append(places, place)
			pending = append(pending, place)
		}
	}
	return places, nil
}

// Find is the place of a library where the loader looks by default.
func Find(library string, machine elf.Machine) (string, error) {
	for _, folders := range []string{"/lib/*-linux-gnu", "/usr/lib/*-linux-gnu", "/lib64", "/usr/lib64", "/lib", "/usr/lib"} {
		places, err := filepath.Glob(filepath.Join(folders, library))
		if err != nil {
			return "", fmt.Errorf("look for %s: %w", library, err)
		}
		for _, place := range places {
			f, err := elf.Open(place)
			if err != nil {
				continue // a linker script
			}
			fits := f.Machine == machine
			closeELF(f)
			if fits {
				return place, nil
			}
		}
	}
	return "", fmt.Errorf("no %s for %s in the loader's folders", library, machine)
}

func neededBy(file string) ([]string, error) {
	f, err := elf.Open(file)
	if err != nil {
		return nil, fmt.Errorf("read %s: %w", file, err)
	}
	defer closeELF(f)
	needed, err := f.ImportedLibraries()
	if err != nil {
		return nil, fmt.Errorf("read what %s needs: %w", file, err)
	}
	return needed, nil
}

// closeELF closes what was only read.
func closeELF(f *elf.File) { _ = f.Close() }
