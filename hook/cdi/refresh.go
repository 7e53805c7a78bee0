// SPDX-License-Identifier: Apache-2.0

package cdi

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"strings"

	"tags.cncf.io/container-device-interface/pkg/cdi"
	"tags.cncf.io/container-device-interface/pkg/parser"
	specs "tags.cncf.io/container-device-interface/specs-go"

	"github.com/gpufence/gpufence/hook/plan"
)

// GPU is what a specification may call a device by.
type GPU struct {
	UUID     string
	Position string // "0", or "0:1" for an instance; "" where it is not known
	Minor    string // N of /dev/nvidiaN, of an instance's GPU; "" where it is not known
}

// Facts are what is known of the node at one time.
type Facts struct {
	// Down is why the driver is not to be looked at: it is not loaded, or is being replaced. Then
	// a specification of ours would name files that go.
	Down   string
	Driver string // version
	GPUs   []GPU
}

func (f Facts) of() For {
	out := For{Driver: f.Driver}
	for _, g := range f.GPUs {
		out.GPUs = append(out.GPUs, g.UUID)
	}
	return out
}

// Refresher keeps our specification as it should be.
type Refresher struct {
	Dirs  []string // where specifications lie; ours in the last
	Kinds []string // that are GPUs, in order; without [plan.KindGPU] nothing is generated
	// Generate makes the specification of all GPUs of the kind.
	Generate func(ctx context.Context) (*specs.Spec, error)
}

// Path is our file's, "" where nothing is generated.
func (r Refresher) Path() string {
	if len(r.Dirs) == 0 || !slices.Contains(r.Kinds, plan.KindGPU) {
		return ""
	}
	return filepath.Join(r.Dirs[len(r.Dirs)-1], FileName)
}

// Once brings our file to where it should be, and says what it did in a few words, "" for nothing.
func (r Refresher) Once(ctx context.Context, f Facts) (did string, err error) {
	path := r.Path()
	switch {
	case path == "":
		return "", nil
	case f.Down != "":
		return r.remove(path, f.Down)
	case len(f.GPUs) == 0:
		return "", nil // not known yet
	}
	missing, err := r.missing(f.GPUs)
	if err != nil {
		return "", err
	}
	if len(missing) == 0 {
		return r.remove(path, "other specifications have every GPU")
	}
	have, err := Read(path)
	switch {
	case err == nil && have.Driver == f.Driver && have.gpus() == f.of().gpus() && r.intact(f.GPUs):
		return "", nil
	case errors.Is(err, ErrNotOurs):
		return "", err
	}
	spec, err := r.Generate(ctx)
	if err != nil {
		// What is there is for another driver, or was damaged.
		_, removeErr := Remove(path)
		return "", errors.Join(fmt.Errorf("generate CDI specification: %w", err), removeErr)
	}
	Mark(spec, f.of())
	if err := Write(path, spec); err != nil {
		return "", err
	}
	return fmt.Sprintf("wrote %s for driver %s, since no other specification has %s", path, f.Driver, strings.Join(missing, ", ")), nil
}

func (r Refresher) remove(path, why string) (string, error) {
	removed, err := Remove(path)
	if errors.Is(err, ErrNotOurs) {
		return "", nil
	}
	if !removed {
		return "", err
	}
	return "removed " + path + ": " + why, err
}

// missing are the GPUs that no specification but ours has.
func (r Refresher) missing(gpus []GPU) ([]string, error) {
	cache, err := cdi.NewCache(cdi.WithSpecDirs(r.Dirs...), cdi.WithAutoRefresh(false))
	if err != nil {
		return nil, fmt.Errorf("read CDI specifications: %w", err)
	}
	others := slices.DeleteFunc(slices.Clone(r.Kinds), func(k string) bool { return k == plan.KindGPU })
	var out []string
	for _, g := range gpus {
		if name, _ := Find(cache, others, g); name == "" {
			out = append(out, g.UUID)
		}
	}
	return out, nil
}

// intact says whether our file has every GPU, and what it names is there.
func (r Refresher) intact(gpus []GPU) bool {
	cache, err := cdi.NewCache(cdi.WithSpecDirs(r.Dirs...), cdi.WithAutoRefresh(false))
	if err != nil {
		return false
	}
	return !slices.ContainsFunc(gpus, func(g GPU) bool {
		name, _ := Find(cache, []string{plan.KindGPU}, g)
		return name == ""
	})
}

// Find is the qualified name of a GPU in the first kind that has it in a specification that can be
// used; why says what was wrong with one that could have been, "" if there was none.
func Find(cache *cdi.Cache, kinds []string, g GPU) (name, why string) {
	for _, kind := range kinds {
		vendor, class := parser.ParseQualifier(kind)
		for _, device := range []string{g.UUID, g.Position} {
			if device == "" {
				continue
			}
			q := parser.QualifiedName(vendor, class, device)
			found := cache.GetDevice(q)
			if found == nil {
				continue
			}
			err := Stale(found)
			if err == nil {
				err = anotherGPU(found, g)
			}
			if err == nil {
				return q, ""
			}
			if why == "" {
				why = err.Error()
			}
		}
	}
	return "", why
}
