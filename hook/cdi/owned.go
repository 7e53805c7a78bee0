// SPDX-License-Identifier: Apache-2.0

package cdi

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"tags.cncf.io/container-device-interface/pkg/cdi"
	specs "tags.cncf.io/container-device-interface/specs-go"
)

// The annotations of a specification that is ours, and for what it was generated.
const (
	markBy     = "gpufence.dev/generated-by"
	markDriver = "gpufence.dev/driver"
	markGPUs   = "gpufence.dev/gpus"

	generator = "gpufenced"
)

// FileName is our file in the last of the CDI folders.
const FileName = "gpufence.dev-gpu.json"

// maxSpec bounds what is read to see whether a file is ours.
const maxSpec = 8 << 20

// ErrNotOurs says that a file where ours should be is somebody else's.
var ErrNotOurs = errors.New("it is not a file that gpufenced wrote")

// For is what a specification was generated for.
type For struct {
	Driver string   // version
	GPUs   []string // UUIDs, in NVML's order
}

func (f For) gpus() string { return strings.Join(f.GPUs, ",") }

// Mark says in a specification that it is ours.
func Mark(spec *specs.Spec, f For) {
	if spec.Annotations == nil {
		spec.Annotations = map[string]string{}
	}
	spec.Annotations[markBy], spec.Annotations[markDriver], spec.Annotations[markGPUs] = generator, f.Driver, f.gpus()
}

// Read returns what our file was generated for; fs.ErrNotExist without one, [ErrNotOurs] where
// somebody else's is.
func Read(path string) (For, error) {
	info, err := os.Lstat(path)
	if err != nil {
		return For{}, fmt.Errorf("look at CDI specification: %w", err)
	}
	if !info.Mode().IsRegular() || info.Size() > maxSpec {
		return For{}, fmt.Errorf("look at CDI specification %s: %w", path, ErrNotOurs)
	}
	text, err := os.ReadFile(path)
	if err != nil {
		return For{}, fmt.Errorf("read CDI specification: %w", err)
	}
	var spec specs.Spec
	if json.Unmarshal(text, &spec) != nil || spec.Annotations[markBy] != generator {
		return For{}, fmt.Errorf("read CDI specification %s: %w", path, ErrNotOurs)
	}
	f := For{Driver: spec.Annotations[markDriver]}
	if gpus := spec.Annotations[markGPUs]; gpus != "" {
		f.GPUs = strings.Split(gpus, ",")
	}
	return f, nil
}

// Write puts a marked specification at the path, by a rename, after the CDI library has read it.
// Somebody else's file there stays.
func Write(path string, spec *specs.Spec) (err error) {
	if _, err := Read(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	if spec.Annotations[markBy] != generator {
		return fmt.Errorf("write CDI specification %s: it lacks our mark", path)
	}
	version, err := specs.MinimumRequiredVersion(spec)
	if err != nil {
		return fmt.Errorf("write CDI specification: %w", err)
	}
	spec.Version = version
	text, err := json.MarshalIndent(spec, "", "  ")
	if err != nil {
		return fmt.Errorf("write CDI specification: %w", err)
	}
	if _, err := cdi.ParseSpec(text); err != nil {
		return fmt.Errorf("write CDI specification: the library does not take it: %w", err)
	}
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return fmt.Errorf("write CDI specification: %w", err)
	}
	// Engines watch the folder; what begins with a dot and ends otherwise is nothing to them.
	f, err := os.CreateTemp(filepath.Dir(path), ".gpufence-*.tmp")
	if err != nil {
		return fmt.Errorf("write CDI specification: %w", err)
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, os.Remove(f.Name()))
		}
	}()
	_, writeErr := f.Write(append(text, '\n'))
	if err := errors.Join(writeErr, f.Chmod(0o644), f.Sync(), f.Close()); err != nil {
		return fmt.Errorf("write CDI specification: %w", err)
	}
	if err := os.Rename(f.Name(), path); err != nil {
		return fmt.Errorf("write CDI specification: %w", err)
	}
	return nil
}

// Remove takes our file away. Without one there is nothing to do; somebody else's stays.
func Remove(path string) (removed bool, err error) {
	switch _, err := Read(path); {
	case errors.Is(err, fs.ErrNotExist):
		return false, nil
	case err != nil:
		return false, err
	}
	if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return false, fmt.Errorf("remove CDI specification: %w", err)
	}
	return true, nil
}
