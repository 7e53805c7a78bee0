// SPDX-License-Identifier: Apache-2.0

package hardware

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/gpufence/gpufence/tests/simgpu/server"
)

// driverNodes are there where a real driver is loaded, also one that does not work.
var driverNodes = []string{"/dev/nvidiactl", "/proc/driver/nvidia/version", "/dev/dxg"}

// realDriver says whether this machine has one.
func realDriver(nodes []string) bool {
	for _, path := range nodes {
		if _, err := os.Stat(path); err == nil {
			return true
		}
	}
	return false
}

// findDriver decides on which driver everything runs, and learns what the rest needs of it. A driver
// that is there and does not work is an error: nothing is to look as if it had been tested.
func (s *session) findDriver(ctx context.Context) (stop func(context.Context) error, err error) {
	stop = func(context.Context) error { return nil }
	if s.opts.Simulated || !realDriver(driverNodes) {
		s.report.Simulated = true
		if stop, err = s.startSimulated(ctx); err != nil {
			return nil, err
		}
	}
	var chosen []string
	if s.opts.GPU != "" {
		chosen = []string{"PROBE_GPU=" + s.opts.GPU, "CUDA_VISIBLE_DEVICES=" + s.opts.GPU}
	}
	seen, err := s.probe(ctx, "machine", chosen)
	if err == nil {
		err = s.learn(ctx, seen)
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("use the driver of this machine: %w", err), stop(context.WithoutCancel(ctx)))
	}
	return stop, nil
}

// startSimulated starts a simulated driver and puts it where the loader finds it.
func (s *session) startSimulated(ctx context.Context) (func(context.Context) error, error) {
	dir := filepath.Join(s.tmp, "sim")
	cmd := exec.CommandContext(context.WithoutCancel(ctx), s.path("bin/simgpud"), append([]string{"--dir", dir, "--memory", "16GiB"}, s.opts.Sim...)...)
	var log bytes.Buffer
	cmd.Stdout, cmd.Stderr = &log, &log
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	if err := cmd.Start(); err != nil {
		return nil, fmt.Errorf("start a simulated GPU: %w", err)
	}
	stop := func(context.Context) error {
		if err := cmd.Process.Signal(syscall.SIGTERM); err != nil {
			return fmt.Errorf("end the simulated GPU: %w", err)
		}
		kill := time.AfterFunc(10*time.Second, func() { _ = cmd.Process.Kill() }) // Wait tells
		defer kill.Stop()
		if err := cmd.Wait(); err != nil {
			return fmt.Errorf("end the simulated GPU: %w: %s", err, log.String())
		}
		return nil
	}
	admin := server.NewClient(dir)
	for deadline := time.Now().Add(10 * time.Second); ; time.Sleep(10 * time.Millisecond) {
		_, err := admin.State(ctx)
		if err == nil {
			break
		}
		if time.Now().After(deadline) || ctx.Err() != nil {
			return nil, errors.Join(fmt.Errorf("start a simulated GPU: %w", err), stop(ctx))
		}
	}
	s.env = append(s.env, "SIMGPU_DIR="+dir, "LD_LIBRARY_PATH="+s.path(cmp.Or(s.opts.SimNVML, "simgpu"))+":"+s.path("simgpu"), "PROBE_SIMULATED=1")
	if s.opts.Quick {
		// The simulated one stands still at once.
		s.env = append(s.env, "PROBE_STILL_MS=30")
	}
	return stop, nil
}

// learn reads what the probe `machine` saw, and what the machine itself has.
func (s *session) learn(ctx context.Context, seen map[string]any) error {
	for k, v := range seen {
		s.report.Machine[k] = v
	}
	name, _ := seen["name"].(string)
	if strings.Contains(name, "(simulated)") {
		// Whoever put a simulated driver into the loader's way must read so, too.
		s.report.Simulated = true
	}
	if init, _ := seen["init"].(string); init != "CUDA_SUCCESS" {
		return fmt.Errorf("cuInit: %v", seen["init"])
	}
	if s.opts.GPU == "" {
		s.opts.GPU, _ = seen["uuid"].(string)
	}
	var u unix.Utsname
	if err := unix.Uname(&u); err == nil {
		s.report.Machine["kernel"] = unix.ByteSliceToString(u.Release[:])
	}
	s.report.Machine["cpus"] = runtime.NumCPU()
	if number(seen["mig"]) != 0 {
		// CUDA takes an instance by itself.
		s.driver.missing = "the GPU is in MIG mode, and these suites take a whole one: name another one with --gpu"
	} else {
		// CUDA may count in another order than NVML.
		s.env = append(s.env, "CUDA_VISIBLE_DEVICES="+s.opts.GPU, "CUDA_DEVICE_ORDER=PCI_BUS_ID")
	}
	s.env = append(s.env, "PROBE_GPU="+s.opts.GPU)
	if s.driver.missing == "" {
		s.driver.missing = cmp.Or(cgroups("/sys/fs/cgroup"), mounts(filepath.Join(s.tmp, "mount")))
	}
	if s.driver.missing == "" {
		first, err := s.probe(ctx, "context-size", nil)
		if err != nil {
			return err
		}
		s.driver.context = number(first["context_bytes"])
		if number(first["listed"]) == 0 {
			s.driver.missing = "NVML's process list does not have this process, which has a context: another pid namespace, or a driver that tells none"
		}
	}
	s.report.Machine["containers"] = cmp.Or(s.driver.missing, "can be started")
	return nil
}

// mounts says why gpufenced cannot mount the pages of containers, or nothing.
func mounts(dir string) string {
	err := os.Mkdir(dir, 0o700)
	if err == nil {
		if err = unix.Mount("tmpfs", dir, "tmpfs", 0, "size=64k"); err == nil {
			err = unix.Unmount(dir, 0)
		}
		err = errors.Join(err, os.Remove(dir))
	}
	if err != nil {
		return fmt.Sprintf("no tmpfs can be mounted: %v", err)
	}
	return ""
}

// cgroups says why containers cannot have cgroups on this machine, or nothing.
func cgroups(root string) string {
	for _, dir := range []string{root, filepath.Join(root, "unified"), filepath.Join(root, "freezer")} {
		if _, err := os.Stat(filepath.Join(dir, "cgroup.procs")); err != nil {
			continue
		}
		probe := filepath.Join(dir, "gpufence-hardware-"+strconv.Itoa(os.Getpid()))
		if err := os.Mkdir(probe, 0o755); err != nil {
			return fmt.Sprintf("no cgroup can be made in %s: %v", dir, errors.Unwrap(err))
		}
		// The kernel fills it; what is no cgroup file system does not.
		_, err := os.Stat(filepath.Join(probe, "cgroup.procs"))
		if err := errors.Join(err, os.Remove(probe)); err != nil {
			return fmt.Sprintf("%s makes no cgroups: %v", dir, err)
		}
		return ""
	}
	return "no cgroup hierarchy is mounted in " + root
}

// number is a JSON number as it was read.
func number(v any) uint64 {
	switch n := v.(type) {
	case json.Number:
		u, err := strconv.ParseUint(n.String(), 10, 64)
		if err != nil {
			return 0
		}
		return u
	case uint64:
		return n
	}
	return 0
}

// probeTime bounds one probe: longer only hangs.
const probeTime = 90 * time.Second

// probe runs one and gives what it saw. Its error is [impossible] where the probe says so.
func (s *session) probe(ctx context.Context, id string, env []string) (map[string]any, error) {
	ctx, cancel := context.WithTimeout(ctx, probeTime)
	defer cancel()
	cmd := exec.CommandContext(ctx, s.path("hardware/probe"), id)
	cmd.Env = s.environ(append([]string{
		"PROBE_FUNCTIONS=" + s.path("hardware/cuda-functions.tsv"), "PROBE_NVML_FUNCTIONS=" + s.path("hardware/nvml-functions.def"),
	}, env...)...)
	cmd.Dir = s.tmp
	var stdout, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	// A process in the driver may not end at once, not even by SIGKILL.
	cmd.WaitDelay = 5 * time.Second
	err := cmd.Run()
	if ctx.Err() != nil {
		return nil, fmt.Errorf("%s: did not end within %s", id, probeTime)
	}
	seen := map[string]any{}
	line, _, _ := bytes.Cut(stdout.Bytes(), []byte("\n"))
	d := json.NewDecoder(bytes.NewReader(line))
	d.UseNumber()
	if bad := d.Decode(&seen); bad != nil {
		return nil, fmt.Errorf("%s: said nothing (%w): %s", id, errors.Join(err, bad), tail(stderr.String(), 300))
	}
	why, _ := seen["why"].(string)
	for _, k := range []string{"op", "ok", "mono_ns", "why"} {
		delete(seen, k)
	}
	var exit *exec.ExitError
	switch {
	case err == nil:
		return seen, nil
	case errors.As(err, &exit) && exit.ExitCode() == 3:
		return seen, impossible(why)
	}
	return seen, fmt.Errorf("%s: %s (%w)", id, why, err)
}

// tail is the end of a text.
func tail(s string, most int) string {
	s = strings.TrimSpace(s)
	if len(s) > most {
		s = "... " + s[len(s)-most:]
	}
	return s
}
