// SPDX-License-Identifier: Apache-2.0

// Package host carries out what package engine plans: it reads and writes files, asks the engine's
// own loader, restarts the engine, and finds out who uses a runtime.
//
// What it promises: a file is replaced as a whole or not at all, keeps its mode, its owner and its
// security label, and a link to a file stays a link. A file that is not ours is kept beside it
// once, as it was before the first change. If a step fails, what was written is taken back.
package host

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/gpufence/gpufence/enforcer/quota"
	"github.com/gpufence/gpufence/packaging/engine"
)

// maxFileBytes bounds what is read of a configuration.
const maxFileBytes = 4 << 20

// Disk reads this machine's files.
type Disk struct{}

// ReadFile reads a regular file.
func (Disk) ReadFile(path string) ([]byte, error) {
	f, err := os.OpenFile(path, os.O_RDONLY|syscall.O_NONBLOCK, 0)
	if err != nil {
		return nil, err
	}
	defer f.Close() // only read
	info, err := f.Stat()
	if err != nil {
		return nil, err
	}
	if !info.Mode().IsRegular() {
		return nil, fmt.Errorf("read %s: not a regular file", path)
	}
	text, err := io.ReadAll(io.LimitReader(f, maxFileBytes+1))
	if err == nil && len(text) > maxFileBytes {
		err = fmt.Errorf("read %s: larger than %d MiB", path, maxFileBytes>>20)
	}
	return text, err
}

// Glob lists the files that match.
func (Disk) Glob(pattern string) ([]string, error) { return filepath.Glob(pattern) }

func unwritable(path string, err error) error {
	hint := "look at its file system and mode"
	if errors.Is(err, syscall.EROFS) {
		hint = "the file system is read-only: name a file on a writable one with --config or --drop-in-config"
	} else if errors.Is(err, fs.ErrPermission) {
		hint = "run gpufence as root; `lsattr` shows whether the file is immutable"
	}
	return quota.NewError(quota.CodeEngineUnwritable, "%s cannot be written: %w", path, err).WithHint("%s", hint)
}

// Apply writes what a plan changes. The returned function takes it back.
func Apply(plan engine.Plan) (undo func() error, err error) {
	var done []engine.Change
	var kept []string // backups that were made for this
	undo = func() error {
		var errs []error
		for _, c := range slices.Backward(done) {
			if err := put(c.Path, c.Before); err != nil {
				errs = append(errs, err)
			}
		}
		for _, path := range kept {
			errs = append(errs, removeIfThere(path))
		}
		return errors.Join(errs...)
	}
	for _, c := range plan.Changes {
		if !c.Differs() {
			continue
		}
		now, err := engine.ReadOptional(Disk{}, c.Path)
		if err == nil && ((now == nil) != (c.Before == nil) || !bytes.Equal(now, c.Before)) {
			err = quota.NewError(quota.CodeEngineUnwritable, "%s was changed by somebody else meanwhile", c.Path).WithHint("run this again")
		}
		if err == nil && !c.Ours && c.Before != nil && c.After != nil {
			var made bool
			if made, err = keep(c); made {
				kept = append(kept, engine.BackupPath(c.Path))
			}
		}
		if err == nil {
			err = put(c.Path, c.After)
		}
		if err != nil {
			return undo, errors.Join(err, undo())
		}
		done = append(done, c)
	}
	return undo, nil
}

// keep makes the backup, unless there is one, and says whether it did. One that an earlier installation left, since
// others had changed the file before its end, is of a state that is gone: it gives way when our runtime comes in anew.
func keep(c engine.Change) (bool, error) {
	path, ours := engine.BackupPath(c.Path), []byte(engine.WrapperPrefix)
	if _, err := os.Lstat(path); err == nil && (bytes.Contains(c.Before, ours) || !bytes.Contains(c.After, ours)) {
		return false, nil
	}
	err := write(path, c.Path, c.Before)
	return err == nil, err
}

// DropBackups removes the backups of files that are again what they were.
func DropBackups(plan engine.Plan) error {
	for _, c := range plan.Changes {
		if c.Ours {
			continue
		}
		path := engine.BackupPath(c.Path)
		kept, err := engine.ReadOptional(Disk{}, path)
		if err != nil {
			return err
		}
		if kept != nil && c.After != nil && bytes.Equal(kept, c.After) {
			if err := os.Remove(path); err != nil {
				return unwritable(path, err)
			}
		}
	}
	return nil
}

// put writes or removes a file. A link is followed: what it names is replaced.
func put(path string, text []byte) error {
	target := path
	if info, err := os.Lstat(path); err == nil && info.Mode()&fs.ModeSymlink != 0 {
		if target, err = filepath.EvalSymlinks(path); err != nil {
			return unwritable(path, fmt.Errorf("follow link: %w", err))
		}
	}
	if text == nil {
		if err := os.Remove(target); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return unwritable(target, err)
		}
		return syncFolder(filepath.Dir(target))
	}
	return write(target, target, text)
}

// write replaces a file by a new one with the mode, the owner and the label of like.
func write(path, like string, text []byte) (err error) {
	folder := filepath.Dir(path)
	if err := os.MkdirAll(folder, 0o755); err != nil {
		return unwritable(path, err)
	}
	f, err := os.CreateTemp(folder, ".gpufence-*")
	if err != nil {
		return unwritable(path, err)
	}
	defer func() {
		f.Close() // closed already where it matters
		if err != nil {
			err = errors.Join(unwritable(path, err), removeIfThere(f.Name()))
		}
	}()
	mode := fs.FileMode(0o644)
	if info, statErr := os.Stat(like); statErr == nil {
		mode = info.Mode().Perm()
		if st, ok := info.Sys().(*syscall.Stat_t); ok {
			if err := f.Chown(int(st.Uid), int(st.Gid)); err != nil {
				return err
			}
		}
		label := make([]byte, 4096)
		if n, err := unix.Getxattr(like, "security.selinux", label); err == nil && n > 0 {
			if err := unix.Fsetxattr(int(f.Fd()), "security.selinux", label[:n], 0); err != nil {
				return fmt.Errorf("label: %w", err)
			}
		}
	}
	if err := f.Chmod(mode); err != nil {
		return err
	}
	if _, err := f.Write(text); err != nil {
		return err
	}
	if err := f.Sync(); err != nil {
		return err
	}
	if err := f.Close(); err != nil {
		return err
	}
	if err := os.Rename(f.Name(), path); err != nil {
		return err
	}
	return syncFolder(folder)
}

func removeIfThere(path string) error {
	if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return nil
}

func syncFolder(path string) error {
	d, err := os.Open(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return unwritable(path, err)
	}
	defer d.Close() // only synced
	if err := d.Sync(); err != nil && !errors.Is(err, syscall.EINVAL) {
		return unwritable(path, err)
	}
	return nil
}
