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

	"github.com/gpufence/gpufence/tests/ldd"
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
	var dynamic []string
	for path, host := range programs {
		r[path] = host
		loader, m, err := ldd.Loader(host)
		if err != nil {
			return nil, err
		}
		if loader != "" {
			r[loader] = loader
			machine = m
			dynamic = append(dynamic, host)
		}
	}
	libraries, err := ldd.Libraries(machine, append(dynamic, extra...)...)
	if err != nil {
		return nil, err
	}
	for _, library := range libraries {
		r[library] = library
	}
	return r, nil
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
