// SPDX-License-Identifier: Apache-2.0

// Package archive writes archives whose bytes depend only on what is in them: the same entries and the
// same time give the same archive on every machine, in every folder and for every user.
//
// It promises: entries are sorted by name with a folder before what is in it, every parent folder is
// there, everything belongs to root, and no mode is another than 0755, 0644 or a link's 0777.
package archive

import (
	"archive/tar"
	"compress/gzip"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"time"
)

// Entry is one file; exactly one of Host, Data and Link says what it is, and none of them an empty file.
type Entry struct {
	Host string // a file of this machine
	Data []byte
	Link string // a symbolic link to that
	Exec bool   // may be executed
}

// Tree is files by their relative, clean path. Folders follow from them.
type Tree map[string]Entry

// Add puts a file at a path and refuses to do so twice.
func (t Tree) Add(at string, e Entry) error {
	if at == "" || at == "." || path.IsAbs(at) || path.Clean(at) != at || strings.HasPrefix(at, "../") || at == ".." {
		return fmt.Errorf("add to archive: path %q is not relative and clean", at)
	}
	if _, there := t[at]; there {
		return fmt.Errorf("add to archive: path %q occurs twice", at)
	}
	t[at] = e
	return nil
}

// AddFolder adds the regular files and the links below a folder of this machine. Who may execute a file
// there may do so in the archive.
func (t Tree) AddFolder(at, host string) error {
	return filepath.WalkDir(host, func(file string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		rel, err := filepath.Rel(host, file)
		if err != nil {
			return err
		}
		to := path.Join(at, filepath.ToSlash(rel))
		switch {
		case d.Type()&fs.ModeSymlink != 0:
			target, err := os.Readlink(file)
			if err != nil {
				return err
			}
			return t.Add(to, Entry{Link: target})
		case d.Type().IsRegular():
			info, err := d.Info()
			if err != nil {
				return err
			}
			return t.Add(to, Entry{Host: file, Exec: info.Mode()&0o100 != 0})
		}
		return fmt.Errorf("add to archive: %s is neither a file nor a link", file)
	})
}

// Under is the same tree below a folder.
func (t Tree) Under(folder string) Tree {
	out := make(Tree, len(t))
	for at, e := range t {
		out[path.Join(folder, at)] = e
	}
	return out
}

// folders are all that the tree's files lie in.
func (t Tree) folders() (map[string]bool, error) {
	out := map[string]bool{}
	for at := range t {
		for dir := path.Dir(at); dir != "."; dir = path.Dir(dir) {
			if _, file := t[dir]; file {
				return nil, fmt.Errorf("write archive: %q is a file and a folder", dir)
			}
			out[dir] = true
		}
	}
	return out, nil
}

// Tar writes the tree with one time for everything.
func (t Tree) Tar(w io.Writer, at time.Time) error {
	dirs, err := t.folders()
	if err != nil {
		return err
	}
	// By parts, not by bytes: "a" and what is in it come before "a.b".
	names := slices.SortedFunc(maps.Keys(t), byParts)
	for dir := range dirs {
		names = append(names, dir)
	}
	slices.SortFunc(names, byParts)
	out := tar.NewWriter(w)
	for _, name := range names {
		if err := t.put(out, name, dirs[name], at); err != nil {
			return fmt.Errorf("write %s to archive: %w", name, err)
		}
	}
	if err := out.Close(); err != nil {
		return fmt.Errorf("end archive: %w", err)
	}
	return nil
}

func byParts(a, b string) int { return slices.Compare(strings.Split(a, "/"), strings.Split(b, "/")) }

func (t Tree) put(out *tar.Writer, name string, folder bool, at time.Time) error {
	h := &tar.Header{Name: name, ModTime: at, Uname: "root", Gname: "root", Mode: 0o644}
	e := t[name]
	switch {
	case folder:
		h.Typeflag, h.Name, h.Mode = tar.TypeDir, name+"/", 0o755
		return out.WriteHeader(h)
	case e.Link != "":
		h.Typeflag, h.Linkname, h.Mode = tar.TypeSymlink, e.Link, 0o777
		return out.WriteHeader(h)
	}
	h.Typeflag = tar.TypeReg
	if e.Exec {
		h.Mode = 0o755
	}
	if e.Host == "" {
		h.Size = int64(len(e.Data))
		if err := out.WriteHeader(h); err != nil {
			return err
		}
		_, err := out.Write(e.Data)
		return err
	}
	f, err := os.Open(e.Host)
	if err != nil {
		return err
	}
	info, err := f.Stat()
	if err == nil {
		h.Size = info.Size()
		err = out.WriteHeader(h)
	}
	if err == nil {
		_, err = io.Copy(out, f)
	}
	return errors.Join(err, f.Close())
}

// TarGz writes the tree as a compressed archive to a file, by rename.
func (t Tree) TarGz(file string, at time.Time) error {
	return write(file, func(w io.Writer) error {
		z := gzip.NewWriter(w)
		return errors.Join(t.Tar(z, at), z.Close())
	})
}

// TarFile writes the tree as an archive to a file, by rename.
func (t Tree) TarFile(file string, at time.Time) error {
	return write(file, func(w io.Writer) error { return t.Tar(w, at) })
}

func write(file string, fill func(io.Writer) error) error {
	f, err := os.CreateTemp(filepath.Dir(file), ".new-")
	if err != nil {
		return fmt.Errorf("write %s: %w", file, err)
	}
	err = errors.Join(fill(f), f.Chmod(0o644), f.Close())
	if err == nil {
		err = os.Rename(f.Name(), file)
	}
	if err != nil {
		return fmt.Errorf("write %s: %w", file, errors.Join(err, os.Remove(f.Name())))
	}
	return nil
}

// Folder writes the tree below a new folder, with one time for everything: for programs that make
// archives of folders.
func (t Tree) Folder(root string, at time.Time) error {
	dirs, err := t.folders()
	if err != nil {
		return err
	}
	all := slices.SortedFunc(maps.Keys(dirs), byParts)
	for _, dir := range all {
		if err := mkdir(filepath.Join(root, dir)); err != nil {
			return fmt.Errorf("write folder %s: %w", dir, err)
		}
	}
	for name, e := range t {
		if err := e.write(filepath.Join(root, name), at); err != nil {
			return fmt.Errorf("write %s: %w", name, err)
		}
	}
	slices.Reverse(all) // a folder's time is set after what is in it was written
	for _, dir := range all {
		if err := os.Chtimes(filepath.Join(root, dir), at, at); err != nil {
			return fmt.Errorf("write folder %s: %w", dir, err)
		}
	}
	return nil
}

// mkdir makes a folder whose mode is not the umask's.
func mkdir(dir string) error {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	return os.Chmod(dir, 0o755)
}

func (e Entry) write(file string, at time.Time) error {
	if e.Link != "" {
		return os.Symlink(e.Link, file)
	}
	data := e.Data
	if e.Host != "" {
		var err error
		if data, err = os.ReadFile(e.Host); err != nil {
			return err
		}
	}
	mode := fs.FileMode(0o644)
	if e.Exec {
		mode = 0o755
	}
	if err := os.WriteFile(file, data, mode); err != nil {
		return err
	}
	return errors.Join(os.Chmod(file, mode), os.Chtimes(file, at, at))
}
