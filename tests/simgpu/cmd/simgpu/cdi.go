// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"

	"github.com/spf13/cobra"
	"tags.cncf.io/container-device-interface/pkg/cdi"
	cdispec "tags.cncf.io/container-device-interface/specs-go"

	"github.com/gpufence/gpufence/tests/simgpu/server"
	"github.com/gpufence/gpufence/tests/simgpu/wire"
)

// cdiKind is what the simulated GPUs are called, as in gpufence.dev/simgpu=0.
const cdiKind = "gpufence.dev/simgpu"

// containerLibs are the folders where the dynamic loaders of Debian's and Red Hat's families
// look without being told; the one that an image does not have is made for the mount.
var containerLibs = []string{"/usr/lib/x86_64-linux-gnu", "/usr/lib64"}

func cdiCommand(dir *string) *cobra.Command {
	cmd := &cobra.Command{
		Use: "cdi --lib-dir DIR", Short: "Write a CDI specification for the simulated GPUs", Args: cobra.NoArgs,
		Long: "Write a CDI specification, kind " + cdiKind + ", whose devices are \"0\", \"1\", ..., \"0:0\" for MIG instances, the UUIDs, and \"all\".\n" +
			"A device's edits mount its socket under " + wire.DirDefault + "; every device mounts the control socket\n" +
			"and the two libraries. With --nodes a device has NVIDIA's device nodes, those of /dev/nvidia-caps for a MIG\n" +
			"instance, which open nothing; the sockets are then in " + nodesDir + ", to which the environment points.",
	}
	libs := cmd.Flags().String("lib-dir", "", "folder of the simulated libcuda.so.1 and libnvidia-ml.so.1")
	out := cmd.Flags().String("out", "-", "file to write, such as /etc/cdi/simgpu.json")
	nodes := cmd.Flags().Bool("nodes", false, "with the device nodes that NVIDIA's specifications have")
	cobra.CheckErr(cmd.MarkFlagRequired("lib-dir"))
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		st, err := server.NewClient(*dir).State(cmd.Context())
		if err != nil {
			return err
		}
		spec, err := cdiSpec(st, *dir, *libs, *nodes)
		if err != nil {
			return err
		}
		if *out == "-" {
			return writeJSON(cmd.OutOrStdout(), spec)
		}
		return writeCDI(*out, spec)
	}
	return cmd
}

// writeCDI puts spec at path by renaming, since engines watch the folder.
func writeCDI(path string, spec *cdispec.Spec) (err error) {
	f, err := os.CreateTemp(filepath.Dir(path), ".simgpu-*")
	if err != nil {
		return fmt.Errorf("write CDI specification: %w", err)
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, os.Remove(f.Name()))
		}
	}()
	if err := errors.Join(f.Chmod(0o644), writeJSON(f, spec), f.Close()); err != nil {
		return fmt.Errorf("write CDI specification: %w", err)
	}
	if err := os.Rename(f.Name(), path); err != nil {
		return fmt.Errorf("write CDI specification: %w", err)
	}
	return nil
}

// nodesDir is where containers find the sockets when their GPUs are known by device nodes.
const nodesDir = "/run/simgpu"

func cdiSpec(st server.State, dir, libs string, nodes bool) (*cdispec.Spec, error) {
	inside := wire.DirDefault
	if nodes {
		inside = nodesDir
	}
	dir, errDir := filepath.Abs(dir)
	libs, errLibs := filepath.Abs(libs)
	if err := errors.Join(errDir, errLibs); err != nil {
		return nil, fmt.Errorf("find folders: %w", err)
	}
	bind := func(host, container string, options ...string) *cdispec.Mount {
		return &cdispec.Mount{HostPath: host, ContainerPath: container, Type: "bind", Options: append([]string{"bind", "nosuid", "nodev"}, options...)}
	}
	spec := &cdispec.Spec{Kind: cdiKind}
	spec.ContainerEdits.Mounts = []*cdispec.Mount{bind(filepath.Join(dir, wire.Ctl), inside+"/"+wire.Ctl, "rw")}
	if nodes {
		spec.ContainerEdits.Env = []string{wire.DirEnv + "=" + inside}
	}
	for _, lib := range []string{"libcuda.so.1", "libnvidia-ml.so.1"} {
		from := filepath.Join(libs, lib)
		if newer := filepath.Join(libs, "r615", lib); st.HasLimits() && isFile(newer) {
			from = newer
		}
		if !isFile(from) {
			return nil, fmt.Errorf("find %s: there is none in %s", lib, libs)
		}
		for _, at := range containerLibs {
			spec.ContainerEdits.Mounts = append(spec.ContainerEdits.Mounts, bind(from, at+"/"+lib, "ro"))
		}
	}
	all := cdispec.Device{Name: "all"}
	for _, g := range st.GPUs {
		if g.Instances > 0 {
			continue // only its instances can be used
		}
		mount := bind(filepath.Join(dir, g.Socket), inside+"/"+g.Socket, "rw")
		edits := cdispec.ContainerEdits{Mounts: []*cdispec.Mount{mount}}
		if nodes {
			edits.DeviceNodes = nvidiaNodes(g)
		}
		name := g.MIG
		if name == "" {
			name = strconv.Itoa(g.Minor)
		}
		for _, name := range []string{name, g.UUID} {
			spec.Devices = append(spec.Devices, cdispec.Device{Name: name, ContainerEdits: edits})
		}
		all.ContainerEdits.Mounts = append(all.ContainerEdits.Mounts, mount)
		for _, n := range edits.DeviceNodes {
			if !slices.ContainsFunc(all.ContainerEdits.DeviceNodes, func(o *cdispec.DeviceNode) bool { return o.Path == n.Path }) {
				all.ContainerEdits.DeviceNodes = append(all.ContainerEdits.DeviceNodes, n)
			}
		}
	}
	if len(st.GPUs) == 0 {
		return nil, errors.New("write CDI specification: there is no GPU")
	}
	spec.Devices = append(spec.Devices, all)
	version, err := cdispec.MinimumRequiredVersion(spec)
	if err != nil {
		return nil, fmt.Errorf("write CDI specification: %w", err)
	}
	spec.Version = version
	if err := validate(spec); err != nil {
		return nil, err
	}
	return spec, nil
}

// validate reads spec as an engine would: from a file, with the CDI library.
func validate(spec *cdispec.Spec) (err error) {
	dir, err := os.MkdirTemp("", "simgpu-cdi-")
	if err != nil {
		return fmt.Errorf("check CDI specification: %w", err)
	}
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
	path := filepath.Join(dir, "simgpu.json")
	if err := writeCDI(path, spec); err != nil {
		return err
	}
	if _, err := cdi.ReadSpec(path, 0); err != nil {
		return fmt.Errorf("check CDI specification: %w", err)
	}
	return nil
}
