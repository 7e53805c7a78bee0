// SPDX-License-Identifier: Apache-2.0

package server

import (
	"errors"
	"fmt"
	"math"
	"strconv"
	"strings"

	"github.com/spf13/pflag"

	"github.com/gpufence/gpufence/tests/simgpu/driver"
)

// Flags are simgpud's, before they are understood.
type Flags struct {
	Dir, PIDFile  string
	gpus          int
	model         []string
	memory        []string
	name          []string
	uuid          []string
	reserved      string
	seed          string
	driverVersion string
	cudaVersion   string
	backing       uint32
	mig           []int
	dmemDir       string
	knobs         map[string]*string
	flags         *pflag.FlagSet
}

// Register adds simgpud's flags to fs.
func (f *Flags) Register(fs *pflag.FlagSet) {
	f.flags = fs
	fs.StringVar(&f.Dir, "dir", "/run/simgpu", "folder of the sockets")
	fs.StringVar(&f.PIDFile, "pid-file", "", "write the process id here once the sockets are there")
	fs.IntVar(&f.gpus, "gpus", 1, "number of GPUs")
	fs.StringSliceVar(&f.model, "model", []string{"t4"}, "GPU models, one a GPU; the last one goes on: t4, v100, a10, a100, l4, l40s, h100, h200, b200")
	fs.StringSliceVar(&f.memory, "memory", nil, "memory of each GPU, such as 16GiB; the last one goes on (default: the model's)")
	fs.StringSliceVar(&f.name, "name", nil, "name of each GPU; the last one goes on (default: the model's)")
	fs.StringSliceVar(&f.uuid, "uuid", nil, "UUIDs of the first GPUs (default: from --seed)")
	fs.StringVar(&f.reserved, "reserved", "0", "memory that the driver keeps (0: 1 % of the total)")
	fs.StringVar(&f.seed, "seed", "simgpu", "UUIDs are made from it: the same ones everywhere")
	fs.StringVar(&f.driverVersion, "driver-version", "570.133.20", "version of the driver")
	fs.StringVar(&f.cudaVersion, "cuda-version", "12.8", "CUDA version of the driver")
	fs.Uint32Var(&f.backing, "backing-mib", 256, "host memory that a client may spend to keep what is copied to the GPU, in MiB; beyond it contents are lost")
	fs.IntSliceVar(&f.mig, "mig", nil, "split each GPU into so many MIG instances, 1 to 7 (0: whole); the last one goes on")
	fs.StringVar(&f.dmemDir, "dmem-dir", "", "show the files of the kernel's dmem controller in this folder, for memory-limits=dmem")
	f.knobs = map[string]*string{}
	defaults := driver.DefaultKnobs()
	for _, k := range driver.AllKnobs() {
		f.knobs[k.Name] = fs.String(k.Name, k.Get(&defaults), k.Help+"; may be set later with `simgpu set`")
	}
}

// pick is element i of a list whose last element goes on, or other if the list is empty.
func pick(list []string, i int, other string) string {
	if len(list) == 0 {
		return other
	}
	return list[min(i, len(list)-1)]
}

// Config is what the flags mean.
func (f *Flags) Config() (Config, error) {
	cfg := Config{Dir: f.Dir, DriverVersion: f.driverVersion, Knobs: driver.DefaultKnobs()}
	for _, k := range driver.AllKnobs() {
		if err := k.Set(&cfg.Knobs, *f.knobs[k.Name]); err != nil {
			return cfg, err
		}
	}
	cfg.DmemDir = f.dmemDir
	if f.flags != nil && !f.flags.Changed("memory-limits") && hasLimits(f.driverVersion) {
		cfg.Knobs.MemoryLimits = driver.BackendDmem
	}
	if cfg.Knobs.MemoryLimits != driver.BackendOff && !hasLimits(f.driverVersion) {
		return cfg, fmt.Errorf("driver %s has no memory limits: --driver-version 615 or newer", f.driverVersion)
	}
	major, minor, ok := strings.Cut(f.cudaVersion, ".")
	a, errA := strconv.ParseUint(major, 10, 16)
	b, errB := strconv.ParseUint(minor, 10, 16)
	if !ok || errors.Join(errA, errB) != nil || b > 99 {
		return cfg, fmt.Errorf("read --cuda-version %q: write it as 12.8", f.cudaVersion)
	}
	cfg.CUDAVersion = uint32(a*1000 + b*10)
	reserved, err := driver.ParseSize(f.reserved)
	if err != nil {
		return cfg, err
	}
	if f.gpus < 0 || len(f.uuid) > f.gpus {
		return cfg, fmt.Errorf("%d GPUs with %d UUIDs: there must be a GPU for each", f.gpus, len(f.uuid))
	}
	for i := range f.gpus {
		g, err := driver.Model(pick(f.model, i, "t4"))
		if err != nil {
			return cfg, err
		}
		if g.TotalBytes, err = driver.ParseSize(pick(f.memory, i, strconv.FormatUint(g.TotalBytes, 10))); err != nil {
			return cfg, err
		}
		g.Name = pick(f.name, i, g.Name)
		g.UUID = driver.SeededUUID(f.seed, i)
		if i < len(f.uuid) {
			if g.UUID, err = driver.ParseUUID(f.uuid[i]); err != nil {
				return cfg, err
			}
		}
		g.ReservedBytes = reserved
		g.BackingMiB = min(f.backing, math.MaxInt32)
		if len(f.mig) > 0 {
			g.Instances = f.mig[min(i, len(f.mig)-1)]
		}
		cfg.GPUs = append(cfg.GPUs, g)
	}
	return cfg, nil
}

// hasLimits says whether a driver limits cgroups.
func hasLimits(version string) bool {
	branch, _, _ := strings.Cut(version, ".")
	n, err := strconv.Atoi(branch)
	return err == nil && n >= 615
}
