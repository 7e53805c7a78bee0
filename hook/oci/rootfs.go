// SPDX-License-Identifier: Apache-2.0

package oci

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/gpufence/gpufence/enforcer/quota"
	"github.com/gpufence/gpufence/hook/plan"
)

// preloadPath is read by glibc's loader in every process of the container.
const preloadPath = "/etc/ld.so.preload"

// maxPreload bounds the image's own file of that name.
const maxPreload = 64 << 10

// foreignPreload is in the name of the library that HAMi preloads. Two libraries that both
// claim to account for a GPU refuse each other's bytes, so a container has one or the other.
const foreignPreload = "libvgpu.so"

// image is a container's files as they will be: its root file system under its bind mounts.
// Everything below is the container author's: it is opened without leaving the root that it
// lies in, without following magic links, and only if it is a regular file.
type image struct {
	root   string // directory on the host
	mounts []plan.Mount
}

// errUnknownPlace: the file lies on a mount whose content is not there yet (tmpfs, proc).
var errUnknownPlace = errors.New("lies on a mount that cannot be read yet")

// open opens a regular file by its path in the container.
func (im image) open(name string) (*os.File, fs.FileInfo, error) {
	root, rel, err := im.place(name)
	if err != nil {
		return nil, nil, err
	}
	return openIn(root, rel)
}

// place finds the directory (or file) on the host that a path of the container lies in: the
// last mount at or above it, since a later one hides what was there, or the root file system.
func (im image) place(name string) (root, rel string, err error) {
	name = path.Clean("/" + name)
	root, rel = im.root, name
	for _, m := range im.mounts {
		dest := path.Clean("/" + m.Destination)
		if dest == "/" || name != dest && !strings.HasPrefix(name, dest+"/") {
			continue
		}
		root, rel = "", ""
		if isBind(m) && path.IsAbs(m.Source) {
			root, rel = m.Source, strings.TrimPrefix(name, dest)
		}
	}
	if root == "" {
		return "", "", errUnknownPlace
	}
	return root, rel, nil
}

func isBind(m plan.Mount) bool {
	if m.Type == "bind" {
		return true
	}
	for _, o := range m.Options {
		if o == "bind" || o == "rbind" {
			return true
		}
	}
	return false
}

// openIn opens a regular file below a directory of the host as if that were the root; with an
// empty rel, the file itself.
func openIn(root, rel string) (*os.File, fs.FileInfo, error) {
	dir, err := unix.Open(root, unix.O_PATH|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, nil, &fs.PathError{Op: "open", Path: root, Err: err}
	}
	defer func() { _ = unix.Close(dir) }() // O_PATH: nothing to lose
	fd := dir
	if rel != "" {
		how := unix.OpenHow{
			Flags:   unix.O_PATH | unix.O_CLOEXEC,
			Resolve: unix.RESOLVE_IN_ROOT | unix.RESOLVE_NO_MAGICLINKS,
		}
		// EAGAIN: something on the way was renamed while the kernel resolved it.
		for range 16 {
			fd, err = unix.Openat2(dir, strings.TrimPrefix(rel, "/"), &how)
			if !errors.Is(err, unix.EAGAIN) && !errors.Is(err, unix.EINTR) {
				break
			}
		}
		if err != nil {
			return nil, nil, &fs.PathError{Op: "openat2", Path: rel, Err: err}
		}
		defer func() { _ = unix.Close(fd) }() // O_PATH
	}
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return nil, nil, &fs.PathError{Op: "stat", Path: rel, Err: err}
	}
	// Looked at before it is opened: opening a device has effects, opening a FIFO may hang.
	if st.Mode&unix.S_IFMT != unix.S_IFREG {
		return nil, nil, &fs.PathError{Op: "open", Path: rel, Err: errNotRegular}
	}
	f, err := os.OpenFile(fmt.Sprintf("/proc/self/fd/%d", fd), os.O_RDONLY|unix.O_NONBLOCK, 0)
	if err != nil {
		return nil, nil, err
	}
	info, err := f.Stat()
	if err != nil {
		f.Close()
		return nil, nil, err
	}
	return f, info, nil
}

var errNotRegular = errors.New("not a regular file")

// preload reads the image's own /etc/ld.so.preload, or what the user mounts there. runDir
// holds our own files: one of them at that place is ours from an earlier pass.
func (im image) preload(runDir string) (string, error) {
	theirs := im
	theirs.mounts = nil
	for _, m := range im.mounts {
		if !below(m.Source, runDir) {
			theirs.mounts = append(theirs.mounts, m)
		}
	}
	f, info, err := theirs.open(preloadPath)
	switch {
	case errors.Is(err, fs.ErrNotExist), errors.Is(err, unix.ENOTDIR), errors.Is(err, errUnknownPlace):
		return "", nil
	case errors.Is(err, unix.ENOSYS):
		return "", quota.NewError(quota.CodePreloadFile, "the image's %s cannot be read safely: %w", preloadPath, err).
			WithHint("use a kernel with openat2, 5.6 or newer")
	case err != nil:
		return "", quota.NewError(quota.CodePreloadFile, "the image's %s cannot be kept: %w", preloadPath, err).
			WithHint("make it a regular file or remove it")
	}
	defer f.Close()
	if info.Size() > maxPreload {
		return "", quota.NewError(quota.CodePreloadFile, "the image's %s is larger than %d KiB", preloadPath, maxPreload>>10).
			WithHint("remove it")
	}
	text, err := io.ReadAll(io.LimitReader(f, maxPreload+1))
	if err != nil {
		return "", quota.NewError(quota.CodePreloadFile, "the image's %s cannot be read: %w", preloadPath, err)
	}
	if len(text) > maxPreload {
		return "", quota.NewError(quota.CodePreloadFile, "the image's %s is larger than %d KiB", preloadPath, maxPreload>>10).
			WithHint("remove it")
	}
	if strings.Contains(string(text), foreignPreload) {
		return "", errForeign("its " + preloadPath)
	}
	return string(text), nil
}

func errForeign(where string) error {
	return quota.NewError(quota.CodeForeignPreload, "%s preloads HAMi's %s, and two libraries cannot both account for a GPU", where, foreignPreload).
		WithHint("run this container under one of the two")
}

// checkForeign refuses a container that HAMi has already wrapped.
func checkForeign(env []string, mounts []plan.Mount) error {
	for _, m := range mounts {
		if strings.HasPrefix(path.Base(path.Clean("/"+m.Destination)), foreignPreload) {
			return errForeign("the mount at " + m.Destination)
		}
	}
	for _, e := range env {
		if v, ok := strings.CutPrefix(e, "LD_PRELOAD="); ok && strings.Contains(v, foreignPreload) {
			return errForeign("LD_PRELOAD")
		}
	}
	return nil
}

// below says whether a host path lies in a directory.
func below(name, dir string) bool {
	if dir == "" || !path.IsAbs(name) {
		return false
	}
	name, dir = path.Clean(name), path.Clean(dir)
	return name == dir || strings.HasPrefix(name, strings.TrimSuffix(dir, "/")+"/")
}

// loader finds which dynamic loader the entry point uses, the way the runtime will look for
// it. It never fails: what cannot be found out is unknown.
func (im image) loader(args, env []string, cwd string) plan.Loader {
	args = skipInit(args)
	if len(args) == 0 {
		return plan.LoaderUnknown
	}
	for _, candidate := range entryPoints(args[0], env, cwd) {
		f, info, err := im.open(candidate)
		if err != nil || info.Mode().Perm()&0o111 == 0 {
			if f != nil {
				f.Close()
			}
			if errors.Is(err, errUnknownPlace) {
				return plan.LoaderUnknown // it may be there, and then it is the one
			}
			continue
		}
		loader := im.loaderOfFile(f, true)
		f.Close()
		return loader
	}
	return plan.LoaderUnknown
}

// narrowLib says whether the image keeps a 32-bit C library in /lib, as Fedora does. Only then do
// 32-bit programs take $LIB for that; in Arch and Nix it is the 64-bit ones that do.
func (im image) narrowLib() bool {
	f, _, err := im.open("/lib/libc.so.6")
	if err != nil {
		return false
	}
	defer f.Close()
	var ident [5]byte
	_, err = f.ReadAt(ident[:], 0)
	return err == nil && string(ident[:]) == "\x7fELF\x01"
}

func (im image) loaderOfFile(f *os.File, script bool) plan.Loader {
	interpreter, err := elfInterpreter(f)
	if err == nil {
		return loaderOf(interpreter)
	}
	if !script {
		return plan.LoaderUnknown // the kernel goes further, but no image does
	}
	head := make([]byte, maxShebang)
	n, err := f.ReadAt(head, 0)
	if err != nil && !errors.Is(err, io.EOF) {
		return plan.LoaderUnknown
	}
	name, ok := shebang(head[:n])
	if !ok {
		return plan.LoaderUnknown
	}
	in, _, err := im.open(name)
	if err != nil {
		return plan.LoaderUnknown
	}
	defer in.Close()
	return im.loaderOfFile(in, false)
}

// entryPoints lists where the runtime looks for a command, in order.
func entryPoints(command string, env []string, cwd string) []string {
	if command == "" {
		return nil
	}
	if cwd == "" {
		cwd = "/"
	}
	if strings.ContainsRune(command, '/') {
		if path.IsAbs(command) {
			return []string{command}
		}
		return []string{path.Join(cwd, command)}
	}
	search := defaultPath
	for _, e := range env {
		if v, ok := strings.CutPrefix(e, "PATH="); ok {
			search = v // the last one wins, as in setenv
		}
	}
	var list []string
	for dir := range strings.SplitSeq(search, ":") {
		if !path.IsAbs(dir) {
			dir = path.Join(cwd, dir)
		}
		list = append(list, path.Join(dir, command))
	}
	return list
}

// inits are static programs that engines and images put before the real command.
var inits = map[string]bool{
	"docker-init": true, "podman-init": true, "catatonit": true, "tini": true, "tini-static": true, "dumb-init": true,
}

// skipInit drops an init wrapper and its options from the command: what matters is what it
// starts.
func skipInit(args []string) []string {
	if len(args) < 2 || !inits[path.Base(args[0])] {
		return args
	}
	for i, a := range args[1:] {
		if a == "--" {
			if rest := args[1+i+1:]; len(rest) > 0 {
				return rest
			}
			return args
		}
		if !strings.HasPrefix(a, "-") {
			return args[1+i:]
		}
	}
	return args
}
