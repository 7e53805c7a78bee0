// SPDX-License-Identifier: Apache-2.0

package host

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"github.com/gpufence/gpufence/enforcer/quota"
	"github.com/gpufence/gpufence/packaging/engine"
)

// programs are what an installation consists of besides its libraries.
var programs = []string{"gpufence", "gpufence-runtime", "gpufence-hook", "gpufenced"}

// Programs is where gpufence's programs are, or are to be.
type Programs struct {
	From    string // the folder of the running gpufence
	Prefix  string // "": they stay in From
	Version string // names the folder of the libraries
	Suffix  string // the engine's: cri, crio, docker, podman
}

func (p Programs) bin() string {
	if p.Prefix == "" {
		return p.From
	}
	return filepath.Join(p.Prefix, "bin")
}

// Wrapper is gpufence-runtime under the name by which it knows its engine.
func (p Programs) Wrapper() string {
	return filepath.Join(p.bin(), engine.WrapperPrefix+"."+p.Suffix)
}

func (p Programs) failed(path string, err error) error {
	e := quota.NewError(quota.CodeEnginePrograms, "%s cannot be put in place: %w", path, err)
	if p.Prefix == "" {
		return e.WithHint("on a node with a read-only /usr, give --install-dir /opt/gpufence")
	}
	return e.WithHint("give --install-dir a writable folder that may hold programs, and run gpufence from a whole installation")
}

// Place puts the programs where they are to be and says what it changed. Libraries lie in a folder
// of their version, since containers that run have those of their own version mapped.
func (p Programs) Place() ([]string, error) {
	var did []string
	if p.Prefix != "" {
		for _, name := range programs {
			to := filepath.Join(p.bin(), name)
			changed, err := p.copy(filepath.Join(p.From, name), to, 0o755)
			if err != nil {
				return did, err
			}
			if changed {
				did = append(did, to)
			}
		}
		libs, err := p.libraries()
		if err != nil {
			return did, err
		}
		did = append(did, libs...)
	}
	if _, err := os.Stat(filepath.Join(p.bin(), engine.WrapperPrefix)); err != nil {
		return did, p.failed(filepath.Join(p.bin(), engine.WrapperPrefix), err)
	}
	changed, err := p.link(engine.WrapperPrefix, p.Wrapper())
	if changed {
		did = append(did, p.Wrapper())
	}
	return did, err
}

// libraries copies what lies beside libgpufence.so into lib/gpufence/VERSION, with links to it.
func (p Programs) libraries() ([]string, error) {
	lib := filepath.Join(filepath.Dir(p.From), "lib")
	from := filepath.Join(lib, "gpufence")
	if _, err := os.Stat(filepath.Join(from, "libgpufence.so")); err != nil {
		from = lib
	}
	var did []string
	to := filepath.Join(p.Prefix, "lib", "gpufence")
	for _, name := range []string{"libgpufence.so", "libgpufence32.so", "gpufence-stub"} {
		source, err := filepath.EvalSymlinks(filepath.Join(from, name))
		if errors.Is(err, fs.ErrNotExist) && name != "libgpufence.so" {
			continue
		}
		if err != nil {
			return did, p.failed(filepath.Join(to, name), err)
		}
		err = filepath.WalkDir(source, func(path string, d fs.DirEntry, err error) error {
			if err != nil || !d.Type().IsRegular() {
				return err
			}
			rel, err := filepath.Rel(source, path)
			if err != nil {
				return err
			}
			target := filepath.Join(to, p.Version, name, rel)
			changed, err := p.copy(path, target, 0o644)
			if changed {
				did = append(did, target)
			}
			return err
		})
		if err != nil {
			if quota.CodeOf(err) == "" {
				err = p.failed(filepath.Join(to, name), err)
			}
			return did, err
		}
		changed, err := p.link(filepath.Join(p.Version, name), filepath.Join(to, name))
		if err != nil {
			return did, err
		}
		if changed {
			did = append(did, filepath.Join(to, name))
		}
	}
	return did, nil
}

// copy replaces a file by rename, so that who runs it goes on with the old one.
func (p Programs) copy(from, to string, mode fs.FileMode) (bool, error) {
	if from == to {
		return false, nil
	}
	text, err := os.ReadFile(from)
	if err != nil {
		return false, p.failed(to, err)
	}
	if old, err := os.ReadFile(to); err == nil && bytes.Equal(old, text) {
		return false, nil
	}
	if err := os.MkdirAll(filepath.Dir(to), 0o755); err != nil {
		return false, p.failed(to, err)
	}
	f, err := os.CreateTemp(filepath.Dir(to), ".gpufence-*")
	if err != nil {
		return false, p.failed(to, err)
	}
	_, err = f.Write(text)
	err = errors.Join(err, f.Chmod(mode), f.Sync(), f.Close())
	if err == nil {
		err = os.Rename(f.Name(), to)
	}
	if err != nil {
		return false, errors.Join(p.failed(to, err), removeIfThere(f.Name()))
	}
	return true, nil
}

// link makes a link; a file that is no link stays, since somebody chose to copy.
func (p Programs) link(target, path string) (bool, error) {
	info, err := os.Lstat(path)
	switch {
	case err == nil && info.Mode()&fs.ModeSymlink == 0 && !info.IsDir():
		return false, nil
	case err == nil && info.IsDir():
		return false, p.failed(path, fmt.Errorf("it is a folder"))
	case err == nil:
		if old, err := os.Readlink(path); err == nil && old == target {
			return false, nil
		}
	}
	fresh := filepath.Join(filepath.Dir(path), fmt.Sprintf(".gpufence-link-%d", os.Getpid()))
	if err := os.Symlink(target, fresh); err != nil {
		return false, p.failed(path, err)
	}
	if err := os.Rename(fresh, path); err != nil {
		return false, errors.Join(p.failed(path, err), removeIfThere(fresh))
	}
	return true, nil
}

// Executable says whether a program can be run.
func Executable(path string) error {
	info, err := os.Stat(path)
	if err == nil && (!info.Mode().IsRegular() || info.Mode().Perm()&0o111 == 0) {
		err = errors.New("not an executable file")
	}
	if err != nil {
		return quota.NewError(quota.CodeEnginePrograms, "the runtime's program %s cannot be used: %w", path, err).WithHint("install gpufence completely, or name another with --runtime-path")
	}
	if !strings.HasPrefix(filepath.Base(path), engine.WrapperPrefix) {
		return quota.NewError(quota.CodeEnginePrograms, "%s is not gpufence-runtime under one of its names", path).WithHint("its name must be gpufence-runtime, with the engine behind it")
	}
	return nil
}
