// SPDX-License-Identifier: Apache-2.0

package demo

import (
	"debug/elf"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
)

// rootfs is what a container's root is made of: the host's files by their paths in the
// container. It is a small image of the host's own libc, so that a dynamic program runs in it
// as it would in any glibc image.
type rootfs map[string]string

// usrMerged are the links of a present-day image.
var usrMerged = map[string]string{"bin": "usr/bin", "lib": "usr/lib", "lib64": "usr/lib64"}

// newRootfs collects the programs, the loader that they name, and all libraries that they and
// the extra files need.
func newRootfs(busybox string, programs map[string]string, extra ...string) (rootfs, error) {
	r := rootfs{"/bin/busybox": busybox}
	var machine elf.Machine
	var pending []string
	for path, host := range programs {
		r[path] = host
		interpreter, m, err := elfOf(host)
		if err != nil {
			return nil, err
		}
		if interpreter != "" {
			r[interpreter] = interpreter
			machine = m
			pending = append(pending, host)
		}
	}
	pending = append(pending, extra...)
	found := map[string]bool{}
	for len(pending) > 0 {
		var file string
		file, pending = pending[0], pending[1:]
		needed, err := neededBy(file)
		if err != nil {
			return nil, err
		}
		for _, name := range needed {
			if found[name] {
				continue
			}
			found[name] = true
			path, err := findLibrary(name, machine)
			if err != nil {
				return nil, fmt.Errorf("find what %s needs: %w", file, err)
			}
			r[path] = path
			pending = append(pending, path)
		}
	}
	return r, nil
}

// elfOf says which loader a program names, "" if it is static.
func elfOf(path string) (interpreter string, machine elf.Machine, err error) {
	f, err := elf.Open(path)
	if err != nil {
		return "", 0, fmt.Errorf("read program: %w", err)
	}
	defer closeELF(f)
	for _, p := range f.Progs {
		if p.Type != elf.PT_INTERP {
			continue
		}
		text, err := io.ReadAll(p.Open())
		if err != nil {
			return "", 0, fmt.Errorf("read interpreter of %s: %w", path, err)
		}
		return strings.TrimRight(string(text), "\x00"), f.Machine, nil
	}
	return "", f.Machine, nil
}

// closeELF closes what was only read.
func closeELF(f *elf.File) { _ = f.Close() }

func neededBy(path string) ([]string, error) {
	f, err := elf.Open(path)
	if err != nil {
		return nil, fmt.Errorf("read library: %w", err)
	}
	defer closeELF(f)
	needed, err := f.ImportedLibraries()
	if err != nil {
		return nil, fmt.Errorf("read what %s needs: %w", path, err)
	}
	return needed, nil
}

// findLibrary looks where the loader looks by default.
func findLibrary(name string, machine elf.Machine) (string, error) {
	for _, pattern := range []string{"/lib/*-linux-gnu", "/usr/lib/*-linux-gnu", "/lib64", "/usr/lib64", "/lib", "/usr/lib"} {
		paths, err := filepath.Glob(filepath.Join(pattern, name))
		if err != nil {
			return "", fmt.Errorf("look for %s: %w", name, err)
		}
		for _, path := range paths {
			f, err := elf.Open(path)
			if err != nil {
				continue // a linker script, or another architecture's
			}
			fits := f.Machine == machine
			closeELF(f)
			if fits {
				return path, nil
			}
		}
	}
	return "", fmt.Errorf("no %s for %s in the loader's folders", name, machine)
}

// write makes the root below dir.
func (r rootfs) write(dir string) error {
	for _, d := range []string{"usr/bin", "usr/lib", "usr/lib64", "etc", "dev", "proc", "sys", "tmp", "run"} {
		if err := os.MkdirAll(filepath.Join(dir, d), 0o755); err != nil {
			return fmt.Errorf("make root: %w", err)
		}
	}
	for link, target := range usrMerged {
		if err := os.Symlink(target, filepath.Join(dir, link)); err != nil {
			return fmt.Errorf("make root: %w", err)
		}
	}
	for path, host := range r {
		if err := copyFile(host, filepath.Join(dir, path)); err != nil {
			return fmt.Errorf("make root: %w", err)
		}
	}
	return nil
}

// copyFile copies a program or a library, what a link points to instead of the link.
func copyFile(from, to string) error {
	target, err := filepath.EvalSymlinks(from)
	if err != nil {
		return err
	}
	if err := os.MkdirAll(filepath.Dir(to), 0o755); err != nil {
		return err
	}
	in, err := os.Open(target)
	if err != nil {
		return err
	}
	defer in.Close()
	out, err := os.OpenFile(to, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o755)
	if errors.Is(err, fs.ErrExist) {
		return nil // /lib and /usr/lib are one folder
	}
	if err != nil {
		return err
	}
	if _, err := io.Copy(out, in); err != nil {
		return errors.Join(err, out.Close())
	}
	return out.Close()
}
