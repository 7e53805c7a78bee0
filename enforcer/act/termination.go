// SPDX-License-Identifier: Apache-2.0

package act

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"unicode/utf8"

	"golang.org/x/sys/unix"
)

// maxTermination is what the kubelet reads of a termination log.
const maxTermination = 4096

// What is wrong with a termination log.
var (
	ErrNotRegular = errors.New("termination log is not a regular file of its own")
	ErrSymlink    = errors.New("termination log is behind a symbolic link")
	ErrFull       = errors.New("termination log is full")
)

// TerminationMessage appends a line to a container's termination log on the host: a regular file
// that is there, reached through no symbolic link but root's own, at most 4096 bytes in all; a line that does not
// fit whole is cut. Errors are typed: [ErrNotRegular], [ErrSymlink], [ErrFull], fs.ErrNotExist. It
// may hang with the file system: call it with a bound.
func TerminationMessage(path, line string) (err error) {
	defer func() {
		if err != nil {
			err = fmt.Errorf("write termination message to %s: %w", path, err)
		}
	}()
	// O_PATH opens nothing yet: a FIFO or a device that lies there is not touched.
	fd, err := openBeneathRoot(path)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, unix.Close(fd)) }()
	var s unix.Stat_t
	if err := unix.Fstat(fd, &s); err != nil {
		return err
	}
	switch {
	case s.Mode&unix.S_IFMT == unix.S_IFLNK:
		return ErrSymlink
	case s.Mode&unix.S_IFMT != unix.S_IFREG, s.Nlink > 1:
		return ErrNotRegular
	}
	f, err := os.OpenFile("/proc/self/fd/"+strconv.Itoa(fd), os.O_RDWR|os.O_APPEND, 0)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	text := strings.TrimRight(line, "\n") + "\n"
	if s.Size > 0 {
		last := make([]byte, 1)
		if _, err := f.ReadAt(last, s.Size-1); err != nil {
			return err
		}
		if last[0] != '\n' {
			text = "\n" + text
		}
	}
	room := maxTermination - s.Size
	if room < int64(min(len(text), 64)) {
		return ErrFull // a few letters tell nobody anything
	}
	_, err = f.WriteString(cut(text, int(room)))
	return err
}

// cut shortens a text to n bytes, not within a rune, with its newline kept.
func cut(text string, n int) string {
	if len(text) <= n {
		return text
	}
	n--
	for n > 0 && !utf8.RuneStart(text[n]) {
		n--
	}
	return text[:n] + "\n"
}

// openBeneathRoot opens an absolute path with O_PATH. It follows no symbolic link that anybody but
// root can have put there; one of root's own, such as a kubelet folder that was moved to another
// disk, is the node's owner's way of saying where things are.
func openBeneathRoot(path string) (int, error) {
	if !filepath.IsAbs(path) || filepath.Clean(path) != path {
		return -1, &fs.PathError{Op: "open", Path: path, Err: unix.EINVAL}
	}
	how := unix.OpenHow{
		Flags:   unix.O_PATH | unix.O_NOFOLLOW | unix.O_CLOEXEC,
		Resolve: unix.RESOLVE_NO_SYMLINKS | unix.RESOLVE_NO_MAGICLINKS,
	}
	fd, err := unix.Openat2(unix.AT_FDCWD, path, &how)
	switch {
	case err == nil:
		return fd, nil
	case errors.Is(err, unix.ELOOP), errors.Is(err, unix.ENOSYS), errors.Is(err, unix.EPERM):
		// A link, or before Linux 5.6, or a seccomp filter that does not know the call.
		return openStepwise(path)
	default:
		return -1, &fs.PathError{Op: "open", Path: path, Err: err}
	}
}

// maxLinks bounds how many links are followed, as the kernel does.
const maxLinks = 40

// openStepwise is the same, one component at a time.
func openStepwise(path string) (fd int, err error) {
	root := func() (int, error) {
		fd, err := unix.Open("/", unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
		return fd, wrap("open", "/", err)
	}
	dir, err := root()
	if err != nil {
		return -1, err
	}
	// At the end dir is what was opened, or it is closed.
	defer func() {
		if err != nil && dir >= 0 {
			err = errors.Join(err, wrap("close", path, unix.Close(dir)))
		}
	}()
	left := components(path)
	links, trusted := 0, true
	for len(left) > 0 {
		name := left[0]
		left = left[1:]
		var s unix.Stat_t
		if err := unix.Fstat(dir, &s); err != nil {
			return -1, wrap("stat", path, err)
		}
		if s.Mode&unix.S_IFMT != unix.S_IFDIR {
			return -1, wrap("open", path, unix.ENOTDIR)
		}
		trusted = trusted && s.Uid == 0 && s.Mode&0o022 == 0
		next, err := unix.Openat(dir, name, unix.O_PATH|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
		if err != nil {
			return -1, wrap("open", path, err)
		}
		if err := unix.Fstat(next, &s); err != nil {
			return -1, errors.Join(wrap("stat", path, err), wrap("close", path, unix.Close(next)))
		}
		if s.Mode&unix.S_IFMT != unix.S_IFLNK {
			old := dir
			dir = next
			if err := unix.Close(old); err != nil {
				return -1, wrap("close", path, err)
			}
			continue
		}
		target := make([]byte, unix.PathMax)
		n, err := unix.Readlinkat(next, "", target)
		if err = errors.Join(err, unix.Close(next)); err != nil {
			return -1, wrap("readlink", path, err)
		}
		links++
		// The last component is the container's, whoever owns it.
		if !trusted || s.Uid != 0 || len(left) == 0 || links > maxLinks || n == 0 || n == len(target) {
			return -1, ErrSymlink
		}
		to := string(target[:n])
		left = append(components(to), left...)
		if filepath.IsAbs(to) {
			old := dir
			if dir, err = root(); err != nil {
				return -1, errors.Join(err, wrap("close", path, unix.Close(old)))
			}
			if err := unix.Close(old); err != nil {
				return -1, wrap("close", path, err)
			}
		}
	}
	return dir, nil
}

// components are the names in a path.
func components(path string) []string {
	return strings.FieldsFunc(path, func(r rune) bool { return r == '/' })
}

func wrap(op, path string, err error) error {
	if err == nil {
		return nil
	}
	return &fs.PathError{Op: op, Path: path, Err: err}
}
