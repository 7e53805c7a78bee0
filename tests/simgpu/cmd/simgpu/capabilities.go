// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/spf13/cobra"
	cdispec "tags.cncf.io/container-device-interface/specs-go"

	"github.com/gpufence/gpufence/tests/simgpu/driver"
	"github.com/gpufence/gpufence/tests/simgpu/server"
)

// Numbers of the nodes of /dev/nvidia-caps, as the driver counts them: two for MIG itself, then for each
// GPU one of every GPU instance that it could have, each followed by its compute instances.
const (
	capConfig, capMonitor = 1, 2
	capFirst              = 3
	capsOfInstance        = 9
	capsOfGPU             = 15 * capsOfInstance

	gpuMajor  = 195 // of /dev/nvidiaN
	capsMajor = 237 // of /dev/nvidia-caps; the kernel chooses it
)

// instance is a MIG instance by the ids of NVML.
type instance struct{ minor, gi int }

// instanceOf is what NVML calls a simulated instance; false for what is none.
func instanceOf(g driver.State) (instance, bool) {
	_, index, ok := strings.Cut(g.MIG, ":")
	n, err := strconv.Atoi(index)
	return instance{g.Minor, n + 1}, ok && err == nil
}

// access are the numbers of the nodes that open it: the GPU instance's and the compute instance's.
func (i instance) access() (gi, ci int) {
	gi = capFirst + i.minor*capsOfGPU + i.gi*capsOfInstance
	return gi, gi + 1
}

func capabilitiesCommand(dir *string) *cobra.Command {
	cmd := &cobra.Command{
		Use: "capabilities --out DIR", Short: "Write what /proc/driver/nvidia/capabilities says of MIG", Args: cobra.NoArgs,
		Long: "Write a folder as /proc/driver/nvidia/capabilities is, of the simulated MIG instances as they are now:\n" +
			"which node of /dev/nvidia-caps opens which instance. gpufenced reads it with --mig-capabilities,\n" +
			"and `simgpu cdi --nodes` gives containers such nodes.",
	}
	out := cmd.Flags().String("out", "", "folder to write")
	cobra.CheckErr(cmd.MarkFlagRequired("out"))
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		st, err := server.NewClient(*dir).State(cmd.Context())
		if err != nil {
			return err
		}
		return writeCapabilities(st, *out)
	}
	return cmd
}

func writeCapabilities(st server.State, dir string) error {
	files := map[string]int{"mig/config": capConfig, "mig/monitor": capMonitor}
	for _, g := range st.GPUs {
		if i, ok := instanceOf(g); ok {
			gi, ci := i.access()
			at := fmt.Sprintf("gpu%d/mig/gi%d", i.minor, i.gi)
			files[at+"/access"], files[at+"/ci0/access"] = gi, ci
		}
	}
	for name, minor := range files {
		path := filepath.Join(dir, name)
		text := fmt.Sprintf("DeviceFileMinor: %d\nDeviceFileMode: 292\nDeviceFileModify: 1\n", minor)
		if err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o755), os.WriteFile(path, []byte(text), 0o444)); err != nil {
			return fmt.Errorf("write capabilities: %w", err)
		}
	}
	return nil
}

// nvidiaNodes are the nodes by which NVIDIA's CDI specifications give a GPU, or a MIG instance.
func nvidiaNodes(g driver.State) []*cdispec.DeviceNode {
	node := func(path string, major, minor int) *cdispec.DeviceNode {
		return &cdispec.DeviceNode{Path: path, Type: "c", Major: int64(major), Minor: int64(minor), Permissions: "rw"}
	}
	nodes := []*cdispec.DeviceNode{node(fmt.Sprintf("/dev/nvidia%d", g.Minor), gpuMajor, g.Minor)}
	if i, ok := instanceOf(g); ok {
		gi, ci := i.access()
		for _, minor := range []int{gi, ci} {
			nodes = append(nodes, node(fmt.Sprintf("/dev/nvidia-caps/nvidia-cap%d", minor), capsMajor, minor))
		}
	}
	return nodes
}
