// SPDX-License-Identifier: Apache-2.0

package registry

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"sync"

	"github.com/gpufence/gpufence/enforcer/ledger"
	"github.com/gpufence/gpufence/enforcer/quota"
)

// stateFormat is the version of the files; an unknown one is not read.
const stateFormat = 1

// maxStateBytes bounds a state file: far above any pod, far below what hurts.
const maxStateBytes = 64 << 20

// header is the first line of a file. The checksum tells a file that lost a part, or was edited,
// from one that is whole.
type header struct {
	Format int    `json:"format"`
	SHA256 string `json:"sha256"` // of the rest, hex
}

// Store is the folder of state files. Unlike the rest of the package it may be used from several
// goroutines; its lock is held over the writing of one file.
type Store struct {
	dir string

	mu     sync.Mutex
	newest uint64           // number of the newest snapshot
	files  map[string]*file // by pod; a copy of one that was deleted holds on to its own
}

// file is a pod's file. written is the snapshot that it is of, or that it was deleted after.
type file struct{ written uint64 }

// OpenStore uses a folder, which it makes if need be.
func OpenStore(dir string) (*Store, error) {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, fmt.Errorf("make state folder: %w", err)
	}
	return &Store{dir: dir, files: map[string]*file{}}, nil
}

func (s *Store) path(name string) string { return filepath.Join(s.dir, name+".json") }

// Save writes a pod's file: when it returns nil, the file is whole and on disk.
func (s *Store) Save(p *Pod) error {
	write, err := s.Snapshot(p)
	if err != nil {
		return err
	}
	return write()
}

// Snapshot takes a copy of a pod, to be written later or elsewhere. A copy never replaces a newer
// one, nor brings back a file that was deleted.
func (s *Store) Snapshot(p *Pod) (write func() error, err error) {
	text, err := encode(p)
	if err != nil {
		return nil, fmt.Errorf("save pod %s: %w", p.Name, err)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.newest++
	name, number := p.Name, s.newest
	f := s.files[name]
	if f == nil {
		f = &file{}
		s.files[name] = f
	}
	return func() error {
		s.mu.Lock()
		defer s.mu.Unlock()
		if f.written > number {
			return nil
		}
		if err := WriteFile(s.path(name), text, 0o600); err != nil {
			return fmt.Errorf("save pod %s: %w", name, err)
		}
		f.written = number
		return nil
	}, nil
}

// Delete removes a pod's file; a file that is not there is no error.
func (s *Store) Delete(name string) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.newest++
	if f := s.files[name]; f != nil {
		f.written = s.newest
		delete(s.files, name)
	}
	if err := os.Remove(s.path(name)); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("delete pod's state: %w", err)
	}
	return nil
}

// Damaged is a state file that was put aside.
type Damaged struct {
	Path  string // where it was
	Aside string // where it is now; "" if it could not be moved
	Err   error
}

// Load reads every pod into a new registry. Files that cannot be understood are put aside and
// listed; the error is of the folder itself.
func (s *Store) Load() (*Registry, []Damaged, error) {
	entries, err := os.ReadDir(s.dir)
	if err != nil {
		return nil, nil, fmt.Errorf("read state folder: %w", err)
	}
	r := New()
	var damaged []Damaged
	for _, e := range entries {
		path := filepath.Join(s.dir, e.Name())
		if strings.HasPrefix(e.Name(), tempPrefix) {
			// A crash came before its rename; the file that it was to replace is still there.
			if err := os.Remove(path); err != nil {
				damaged = append(damaged, Damaged{Path: path, Err: err})
			}
			continue
		}
		name, ok := strings.CutSuffix(e.Name(), ".json")
		if !ok {
			continue // put aside earlier
		}
		p, err := s.read(path, name)
		if err == nil {
			err = r.adopt(p)
		}
		if err != nil {
			damaged = append(damaged, putAside(path, err))
		}
	}
	return r, damaged, nil
}

func (s *Store) read(path, name string) (*Pod, error) {
	fi, err := os.Lstat(path)
	if err != nil {
		return nil, fmt.Errorf("look at file: %w", err)
	}
	if !fi.Mode().IsRegular() {
		return nil, errors.New("it is not a regular file")
	}
	if fi.Size() > maxStateBytes {
		return nil, fmt.Errorf("it has %d bytes, more than any pod needs", fi.Size())
	}
	text, err := os.ReadFile(path)
	if err != nil {
		return nil, fmt.Errorf("read file: %w", err)
	}
	p, err := decode(text)
	if err != nil {
		return nil, err
	}
	if p.Name != name {
		return nil, fmt.Errorf("it is of pod %.80q", p.Name)
	}
	return p, nil
}

// putAside renames a file under a name that is free and that Load passes over.
func putAside(path string, cause error) Damaged {
	d := Damaged{Path: path, Err: cause}
	for i := range 1000 {
		aside := fmt.Sprintf("%s.damaged.%d", path, i)
		if _, err := os.Lstat(aside); !errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err := os.Rename(path, aside); err != nil {
			d.Err = errors.Join(cause, err)
			return d
		}
		d.Aside = aside
		return d
	}
	return d
}

func encode(p *Pod) ([]byte, error) {
	body, err := json.Marshal(p)
	if err != nil {
		return nil, err
	}
	sum := sha256.Sum256(body)
	head, err := json.Marshal(header{Format: stateFormat, SHA256: hex.EncodeToString(sum[:])})
	if err != nil {
		return nil, err
	}
	return append(append(append(head, '\n'), body...), '\n'), nil
}

func decode(text []byte) (*Pod, error) {
	head, body, ok := bytes.Cut(text, []byte("\n"))
	if !ok {
		return nil, errors.New("it is empty or cut short")
	}
	var h header
	if err := json.Unmarshal(head, &h); err != nil {
		return nil, fmt.Errorf("its first line is not ours: %w", err)
	}
	if h.Format != stateFormat {
		return nil, fmt.Errorf("its format is %d, this version reads %d", h.Format, stateFormat)
	}
	body = bytes.TrimSuffix(body, []byte("\n"))
	if sum := sha256.Sum256(body); hex.EncodeToString(sum[:]) != h.SHA256 {
		return nil, errors.New("its checksum is wrong: it was cut short or changed")
	}
	var p Pod
	if err := json.Unmarshal(body, &p); err != nil {
		return nil, fmt.Errorf("decode it: %w", err)
	}
	return &p, nil
}

// adopt checks a pod as read and puts it in.
func (r *Registry) adopt(p *Pod) error {
	if p.Name == "" || strings.ContainsAny(p.Name, "/\x00") || p.Name != PodName(p.Engine, p.Scope, p.Ref.ID) {
		return errors.New("its name does not fit its pod")
	}
	if len(p.Containers) == 0 {
		return errors.New("it has no container")
	}
	if len(p.GPUs) > ledger.GPUs {
		return fmt.Errorf("it has %d GPUs", len(p.GPUs))
	}
	if p.Totals == nil {
		p.Totals = &ledger.Totals{}
	}
	seen := map[uint32]bool{}
	for _, c := range p.Containers {
		switch {
		case c == nil:
			return errors.New("it has an empty container")
		case c.Key.ID == "":
			return errors.New("it has a container without id")
		case c.State != Prepared && c.State != Running && c.State != Ended:
			return fmt.Errorf("it has a container in state %.40q", c.State)
		case c.State == Running && (c.PID <= 0 || c.Cgroup == nil):
			return errors.New("it has a running container without process or cgroup")
		case seen[c.Index] || c.Index >= p.NextIndex:
			return fmt.Errorf("it has container index %d twice, or out of turn", c.Index)
		case r.keys[c.Key] != nil:
			return fmt.Errorf("container %s is in another pod's state as well", short(c.Key.ID))
		}
		for _, g := range c.Grant.GPUs {
			if p.GPUIndex(g.UUID) < 0 {
				return fmt.Errorf("container %s has GPU %.80q, its pod does not", short(c.Key.ID), g.UUID)
			}
		}
		for uuid, n := range c.Counters {
			if n == nil {
				return fmt.Errorf("container %s has no counters on %.80q", short(c.Key.ID), uuid)
			}
		}
		switch c.Grant.Mode {
		case quota.ModeEnforce, quota.ModeWarn, quota.ModeObserve:
		default:
			return fmt.Errorf("container %s has mode %.40q", short(c.Key.ID), c.Grant.Mode)
		}
		seen[c.Index] = true
	}
	for _, c := range p.Containers {
		c.join(p)
		r.keys[c.Key] = c
	}
	r.pods[p.Name] = p
	r.changed()
	return nil
}

const tempPrefix = ".tmp-"

// WriteFile replaces a file at once: temporary file, fsync, rename, fsync of the folder.
func WriteFile(path string, text []byte, mode os.FileMode) error {
	dir := filepath.Dir(path)
	f, err := os.CreateTemp(dir, tempPrefix)
	if err != nil {
		return fmt.Errorf("make temporary file: %w", err)
	}
	_, err = f.Write(text)
	err = errors.Join(err, f.Chmod(mode), f.Sync(), f.Close())
	if err == nil {
		err = os.Rename(f.Name(), path)
	}
	if err != nil {
		return errors.Join(fmt.Errorf("write %s: %w", path, err), removeTemp(f.Name()))
	}
	d, err := os.Open(dir)
	if err != nil {
		return fmt.Errorf("open folder: %w", err)
	}
	if err := errors.Join(d.Sync(), d.Close()); err != nil {
		return fmt.Errorf("sync folder: %w", err)
	}
	return nil
}

func removeTemp(path string) error {
	if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return nil
}
