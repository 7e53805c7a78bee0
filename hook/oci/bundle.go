// SPDX-License-Identifier: Apache-2.0

package oci

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"syscall"

	"github.com/gpufence/gpufence/enforcer/quota"
)

// MaxConfigBytes bounds config.json. The largest that engines write (every syscall in the
// seccomp profile, hundreds of mounts) are far below 1 MiB.
const MaxConfigBytes = 16 << 20

// document is a config.json: what was read, and the levels that are edited.
type document struct {
	path string // of the file itself, links resolved
	info fs.FileInfo
	text []byte
	root *object
}

// readDocument reads and checks the syntax of a config.json.
func readDocument(path string) (*document, error) {
	target, err := filepath.EvalSymlinks(path)
	if err != nil {
		if errors.Is(err, fs.ErrNotExist) {
			return nil, quota.NewError(quota.CodeNotABundle, "%s does not exist", path).
				WithHint("give a bundle directory with a config.json")
		}
		return nil, quota.NewError(quota.CodeSpecUnreadable, "cannot read %s: %w", path, err)
	}
	// O_NONBLOCK: a FIFO of that name must not hang the start of a container.
	f, err := os.OpenFile(target, os.O_RDONLY|syscall.O_NONBLOCK, 0)
	if err != nil {
		return nil, quota.NewError(quota.CodeSpecUnreadable, "cannot read %s: %w", path, err)
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return nil, quota.NewError(quota.CodeSpecUnreadable, "cannot read %s: %w", path, err)
	}
	if !info.Mode().IsRegular() {
		return nil, quota.NewError(quota.CodeSpecUnreadable, "%s is not a regular file", path)
	}
	text, err := io.ReadAll(io.LimitReader(f, MaxConfigBytes+1))
	if err != nil {
		return nil, quota.NewError(quota.CodeSpecUnreadable, "cannot read %s: %w", path, err)
	}
	if len(text) > MaxConfigBytes {
		return nil, quota.NewError(quota.CodeSpecTooLarge, "%s is larger than %d MiB", path, MaxConfigBytes>>20)
	}
	root, err := parseDocument(text)
	if err != nil {
		return nil, quota.NewError(quota.CodeSpecInvalid, "%s %w", path, err)
	}
	return &document{path: target, info: info, text: text, root: root}, nil
}

// parseDocument checks the syntax of the whole text and reads its first level.
func parseDocument(text []byte) (*object, error) {
	var whole json.RawMessage
	if err := json.Unmarshal(text, &whole); err != nil {
		// encoding/json has no other way to tell it from a wrong last character.
		var syntax *json.SyntaxError
		if errors.As(err, &syntax) && syntax.Error() == "unexpected end of JSON input" {
			return nil, errTruncated
		}
		return nil, fmt.Errorf("is not JSON: %w", err)
	}
	if trimmed := bytes.TrimSpace(whole); len(trimmed) == 0 || trimmed[0] != '{' {
		return nil, errNotObject
	}
	return parseObject(whole)
}

// write replaces the file if the document was changed. Whoever reads it meanwhile, or after a
// kill at any instruction, finds the old text or the new one.
func (d *document) write() error {
	text := d.root.bytes()
	if bytes.Equal(text, bytes.TrimSpace(d.text)) {
		return nil
	}
	if len(text) > MaxConfigBytes {
		return quota.NewError(quota.CodeSpecTooLarge, "%s would grow above %d MiB", d.path, MaxConfigBytes>>20)
	}
	if err := replaceFile(d.path, d.info, append(text, '\n')); err != nil {
		return quota.NewError(quota.CodeSpecUnwritable, "cannot write %s: %w", d.path, err)
	}
	return nil
}

// replaceFile writes a file beside path, with the mode and the owner of the old one, and
// renames it.
func replaceFile(path string, old fs.FileInfo, text []byte) (err error) {
	f, err := os.CreateTemp(filepath.Dir(path), "."+filepath.Base(path)+".gpufence-*")
	if err != nil {
		return err
	}
	defer func() {
		if err != nil {
			f.Close()
			_ = os.Remove(f.Name()) // the error that counts is the first one
		}
	}()
	if _, err := f.Write(text); err != nil {
		return err
	}
	if st, ok := old.Sys().(*syscall.Stat_t); ok {
		if err := f.Chown(int(st.Uid), int(st.Gid)); err != nil {
			return err
		}
	}
	// After chown, which may clear bits.
	if err := f.Chmod(old.Mode().Perm()); err != nil {
		return err
	}
	if err := f.Sync(); err != nil {
		return err
	}
	if err := f.Close(); err != nil {
		return err
	}
	return os.Rename(f.Name(), path)
}
