// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
	"github.com/NVIDIA/nvidia-container-toolkit/pkg/nvcdi"
	"github.com/NVIDIA/nvidia-container-toolkit/pkg/nvcdi/spec"
	"github.com/NVIDIA/nvidia-container-toolkit/pkg/nvcdi/transform"
	"github.com/sirupsen/logrus"
	"github.com/spf13/cobra"
	"sigs.k8s.io/yaml"
	"tags.cncf.io/container-device-interface/pkg/parser"
	specs "tags.cncf.io/container-device-interface/specs-go"

	"github.com/gpufence/gpufence/enforcer/quota"
	"github.com/gpufence/gpufence/hook/cdi"
	"github.com/gpufence/gpufence/hook/plan"
)

// limitsHook is the toolkit's own way to set limits of the driver. They are gpufenced's to set.
const limitsHook = "apply-cuda-memory-limits"

// hookNone as --nvidia-cdi-hook-path makes a specification without hooks.
const hookNone = "none"

// generate is `gpufenced cdi generate`.
type generate struct {
	output, format, kind    string
	driverRoot, devRoot     string
	nvmlLibrary, hook, mode string

	nvml nvml.Interface // instead of the library, in tests
}

// cdiCommand is `gpufenced cdi`: gpufenced alone links what it takes to describe GPUs.
func cdiCommand() *cobra.Command {
	cmd := &cobra.Command{Use: "cdi", Short: "Describe this node's GPUs to container engines", Args: cobra.NoArgs}
	var g generate
	sub := &cobra.Command{
		Use: "generate", Short: "Write a CDI specification of this node's GPUs", Args: cobra.NoArgs,
		Long: "Write a CDI specification of the GPUs that the driver of this node has, their MIG instances included.\n" +
			"Where no other specification has them, gpufenced writes one of the kind " + plan.KindGPU + " by itself.",
		RunE: func(cmd *cobra.Command, _ []string) error { return g.run(cmd.OutOrStdout(), cmd.ErrOrStderr()) },
	}
	f := sub.Flags()
	f.StringVar(&g.output, "output", "", "file to write instead of standard output")
	f.StringVar(&g.format, "format", "", "json or yaml (default by the file's name, else yaml)")
	f.StringVar(&g.kind, "kind", plan.KindGPU, "kind of the devices: vendor/class")
	f.StringVar(&g.driverRoot, "driver-root", "", "folder that is / to the driver (default: found among /, the GPU operator's, Google's)")
	f.StringVar(&g.devRoot, "dev-root", "", "folder whose dev has the device nodes (default: the driver's, else /)")
	f.StringVar(&g.nvmlLibrary, "nvml-library", "", "NVML library instead of the driver's libnvidia-ml.so.1")
	f.StringVar(&g.hook, "nvidia-cdi-hook-path", "", "NVIDIA's nvidia-cdi-hook (default: found; without one, or with none, mounts do its work)")
	f.StringVar(&g.mode, "mode", string(nvcdi.ModeAuto), "auto, nvml or wsl")
	cmd.AddCommand(sub)
	return cmd
}

func (g generate) run(stdout, stderr io.Writer) error {
	if g.format == "" {
		g.format = "yaml"
		if filepath.Ext(g.output) == ".json" {
			g.format = "json"
		}
	}
	vendor, class := parser.ParseQualifier(g.kind)
	switch {
	case g.format != "json" && g.format != "yaml":
		return quota.NewError(quota.CodeUsage, "--format %.40q is unknown", g.format).WithHint("write json or yaml")
	case parser.ValidateVendorName(vendor) != nil || parser.ValidateClassName(class) != nil:
		return quota.NewError(quota.CodeUsage, "--kind %.80q is no kind of CDI devices", g.kind).WithHint("write one such as nvidia.com/gpu")
	case !slices.Contains([]string{"auto", "nvml", "wsl"}, g.mode):
		return quota.NewError(quota.CodeUsage, "--mode %.40q is unknown", g.mode).WithHint("write auto, nvml or wsl")
	}
	made, err := g.spec(stderr)
	if err != nil {
		return err
	}
	text, err := json.MarshalIndent(made, "", "  ")
	if err == nil && g.format == "yaml" {
		text, err = yaml.JSONToYAML(text)
	}
	if err != nil {
		return fmt.Errorf("encode CDI specification: %w", err)
	}
	text = append(bytes.TrimRight(text, "\n"), '\n')
	if g.output == "" {
		_, err := stdout.Write(text)
		return err
	}
	return replaceFile(g.output, text)
}

// replaceFile writes a file by a rename, since engines watch its folder.
func replaceFile(path string, text []byte) (err error) {
	f, err := os.CreateTemp(filepath.Dir(path), ".gpufence-*.tmp")
	if err != nil {
		return fmt.Errorf("write CDI specification: %w", err)
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, os.Remove(f.Name()))
		}
	}()
	_, writeErr := f.Write(text)
	if err := errors.Join(writeErr, f.Chmod(0o644), f.Close()); err != nil {
		return fmt.Errorf("write CDI specification: %w", err)
	}
	if err := os.Rename(f.Name(), path); err != nil {
		return fmt.Errorf("write CDI specification: %w", err)
	}
	return nil
}

// spec asks the driver and nvcdi.
func (g generate) spec(stderr io.Writer) (*specs.Spec, error) {
	root, err := g.root()
	if err != nil {
		return nil, err
	}
	log := logrus.New()
	log.SetOutput(stderr)
	log.SetLevel(logrus.WarnLevel)
	lib := g.nvml
	if lib == nil {
		lib = nvml.New(nvml.WithLibraryPath(root.NVML))
	}
	vendor, class := parser.ParseQualifier(g.kind)
	var namers []nvcdi.DeviceNamer
	for _, strategy := range []string{nvcdi.DeviceNameStrategyIndex, nvcdi.DeviceNameStrategyUUID} {
		namer, err := nvcdi.NewDeviceNamer(strategy)
		if err != nil {
			return nil, fmt.Errorf("name CDI devices: %w", err)
		}
		namers = append(namers, namer)
	}
	hook := findHook(g.hook, root.Driver)
	disabled := []string{limitsHook}
	if hook == "" {
		disabled = []string{string(nvcdi.AllHooks)}
	}
	options := []nvcdi.Option{
		nvcdi.WithLogger(log), nvcdi.WithNvmlLib(lib), nvcdi.WithMode(g.mode), nvcdi.WithDeviceNamers(namers...),
		nvcdi.WithDriverRoot(root.Driver), nvcdi.WithDevRoot(root.Dev), nvcdi.WithVendor(vendor), nvcdi.WithClass(class),
		nvcdi.WithDisabledHooks(disabled...),
		nvcdi.WithMergedDeviceOptions(transform.WithName("all"), transform.WithSkipIfExists(true)),
		nvcdi.WithFeatureFlags(nvcdi.FeatureDisableNvsandboxUtils),
	}
	if hook != "" {
		options = append(options, nvcdi.WithNVIDIACDIHookPath(hook))
	}
	made, err := describe(options)
	if err != nil {
		return nil, quota.NewError(quota.CodeNVMLUnavailable, "the GPUs below %s cannot be described: %w", root.Driver, err).
			WithHint("see that nvidia-smi works, or name the driver's folder with --driver-root")
	}
	out := made.Raw()
	if hook == "" {
		cdi.WithoutHooks(out)
	}
	cdi.WithoutNumbers(out)
	if out.Version, err = specs.MinimumRequiredVersion(out); err != nil {
		return nil, fmt.Errorf("generate CDI specification: %w", err)
	}
	if len(out.Devices) == 0 {
		return nil, quota.NewError(quota.CodeNVMLUnavailable, "the driver below %s lists no GPU", root.Driver).WithHint("see what nvidia-smi -L says")
	}
	return out, nil
}

func describe(options []nvcdi.Option) (spec.Interface, error) {
	lib, err := nvcdi.New(options...)
	if err != nil {
		return nil, err
	}
	return lib.GetSpec("all")
}

// root is the driver's place: as asked, or found.
func (g generate) root() (cdi.Root, error) {
	root := cdi.Root{Driver: g.driverRoot, Dev: g.devRoot, NVML: g.nvmlLibrary}
	if root.Driver == "" {
		found, err := cdi.FindRoot("/")
		switch {
		case err == nil:
			root.Driver = found.Driver
			if root.Dev == "" {
				root.Dev = found.Dev
			}
			if root.NVML == "" {
				root.NVML = found.NVML
			}
		case root.NVML != "":
			root.Driver = "/"
		default:
			return root, quota.NewError(quota.CodeNVMLUnavailable, "there is no driver to describe: %w", err).
				WithHint("install the NVIDIA driver, or name its folder with --driver-root")
		}
	} else if root.NVML == "" {
		if root.NVML = cdi.NVMLBelow(root.Driver); root.NVML == "" {
			return root, quota.NewError(quota.CodeNVMLUnavailable, "there is no libnvidia-ml.so.1 below %s", root.Driver).
				WithHint("name the folder that is / to the driver with --driver-root, or the library with --nvml-library")
		}
	}
	if root.Dev == "" {
		root.Dev = root.Driver
	}
	return root, nil
}

// findHook is NVIDIA's program for what CDI cannot say itself, "" if there is none.
func findHook(asked, driverRoot string) string {
	if asked == hookNone {
		return ""
	}
	if asked != "" {
		return asked
	}
	const name = "nvidia-cdi-hook"
	if p, err := exec.LookPath(name); err == nil && filepath.IsAbs(p) {
		return p
	}
	for _, p := range []string{"/usr/bin/" + name, "/usr/local/nvidia/toolkit/" + name, filepath.Join(driverRoot, "toolkit", name)} {
		if info, err := os.Stat(p); err == nil && info.Mode().IsRegular() && info.Mode().Perm()&0o111 != 0 {
			return p
		}
	}
	return ""
}

// generateApart runs `gpufenced cdi generate` in a process of its own, so that nothing of a driver
// that hangs, or crashes, is inside this one.
func generateApart(ctx context.Context, program, nvmlLibrary string) (*specs.Spec, error) {
	args := []string{"cdi", "generate", "--format", "json"}
	if nvmlLibrary != "" {
		args = append(args, "--nvml-library", nvmlLibrary)
	}
	cmd := exec.CommandContext(ctx, program, args...)
	var out, errs bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &errs
	if err := cmd.Run(); err != nil {
		if ctx.Err() != nil {
			return nil, fmt.Errorf("the driver gave no answer in time: %w", ctx.Err())
		}
		text := strings.Join(strings.Fields(errs.String()), " ")
		return nil, fmt.Errorf("%w: %s", err, text[:min(len(text), 500)])
	}
	var made specs.Spec
	if err := json.Unmarshal(out.Bytes(), &made); err != nil {
		return nil, fmt.Errorf("read the answer: %w", err)
	}
	return &made, nil
}
