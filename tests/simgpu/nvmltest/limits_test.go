// SPDX-License-Identifier: Apache-2.0

package nvmltest

import (
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/gpufence/gpufence/tests/simgpu/simtest"
	"github.com/gpufence/gpufence/tests/simgpu/wire"
)

// cgroup2 is the mount point of the v2 hierarchy, where cgroups can be made.
func cgroup2(t *testing.T) string {
	t.Helper()
	for _, root := range []string{"/sys/fs/cgroup", "/sys/fs/cgroup/unified"} {
		if _, err := os.Stat(filepath.Join(root, "cgroup.controllers")); err == nil && os.Geteuid() == 0 {
			return root
		}
	}
	if os.Getenv("GPUFENCE_MUST") == "1" {
		t.Fatal("needs root and cgroup v2")
	}
	t.Skip("SKIPPED: needs root and cgroup v2")
	return ""
}

// openR615 is open with the library and driver that have limits.
func openR615(t *testing.T, backend string, flags ...string) (nvml.Interface, string) {
	t.Helper()
	dir, _ := simtest.Start(t, append([]string{"--driver-version", "615.71.09", "--memory-limits", backend}, flags...)...)
	t.Setenv(wire.DirEnv, dir)
	lib := nvml.New(nvml.WithLibraryPath(simtest.Dist(t, "simgpu/r615/libnvidia-ml.so.1")))
	must(t, "init", lib.Init())
	t.Cleanup(func() { must(t, "shutdown", lib.Shutdown()) })
	return lib, dir
}

// TestLimitsAreMissing: the library of older drivers lacks the calls, so that they must be looked for.
func TestLimitsAreMissing(t *testing.T) {
	old, _, _ := open(t)
	for _, name := range []string{"nvmlDeviceSetMemoryLimits_v1", "nvmlDeviceGetMemoryLimits_v1"} {
		if old.Extensions().LookupSymbol(name) == nil {
			t.Errorf("driver 570 has %s", name)
		}
	}
}

// TestLimitsOfACgroup: NVIDIA's binding sets and reads limits of real cgroups, and a real process in one
// of them is held; what it is told goes by it.
func TestLimitsOfACgroup(t *testing.T) {
	root := cgroup2(t)
	if !alone(t) {
		return
	}
	for _, backend := range []string{"misc", "dmem"} {
		t.Run(backend, func(t *testing.T) {
			dmem := t.TempDir()
			lib, dir := openR615(t, backend, "--context-bytes", "64MiB", "--dmem-dir", dmem)
			if err := lib.Extensions().LookupSymbol("nvmlDeviceSetMemoryLimits_v1"); err != nil {
				t.Fatal(err)
			}
			d := device(t, lib, 0)
			name := "gpufence-nvmltest-" + strconv.Itoa(os.Getpid())
			group := filepath.Join(root, name)
			if err := os.Mkdir(group, 0o755); err != nil {
				t.Fatal(err)
			}
			removed := false
			t.Cleanup(func() {
				if err := os.Remove(group); err != nil && !removed {
					t.Error(err)
				}
			})
			for _, tt := range []struct {
				dir        string
				soft, hard uint64
				want       nvml.Return
			}{
				{group, 128 * mib, 512 * mib, nvml.SUCCESS},
				{group, 512 * mib, 128 * mib, nvml.ERROR_INVALID_ARGUMENT},
				{group, 0, 1 << 50, nvml.ERROR_INVALID_ARGUMENT},
				{group + "-not", 0, mib, nvml.ERROR_OPERATING_SYSTEM},
				{t.TempDir(), 0, mib, nvml.ERROR_OPERATING_SYSTEM},
			} {
				if r := d.SetMemoryLimits_v1(tt.dir, tt.soft, tt.hard); r != tt.want {
					t.Errorf("set %s to %d, %d: %v, want %v", tt.dir, tt.soft, tt.hard, r, tt.want)
				}
			}
			got, r := d.GetMemoryLimits_v1(group)
			must(t, "get", r)
			if got.SoftLimit != 128*mib || got.HardLimit != 512*mib || got.CurrentUsed != 0 {
				t.Errorf("%+v", got)
			}

			cmd := exec.CommandContext(t.Context(), "/bin/sh", "-c", `read -r gate; exec "$@"`, "sh", simtest.Dist(t, "clients/bypass"), "64", "0")
			cmd.Env = append(os.Environ(), wire.DirEnv+"="+dir)
			cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
			stdin, err := cmd.StdinPipe()
			if err != nil {
				t.Fatal(err)
			}
			stdout, err := cmd.StdoutPipe()
			if err != nil {
				t.Fatal(err)
			}
			if err := cmd.Start(); err != nil {
				t.Fatal(err)
			}
			ended := false
			end := func() {
				if !ended {
					ended = true
					_ = cmd.Process.Kill() // it holds for ever; its end is no error
					_ = cmd.Wait()
				}
			}
			t.Cleanup(end)
			if err := os.WriteFile(filepath.Join(group, "cgroup.procs"), []byte(strconv.Itoa(cmd.Process.Pid)), 0); err != nil {
				t.Fatal(err)
			}
			if _, err := stdin.Write([]byte("go\n")); err != nil {
				t.Fatal(err)
			}
			var said strings.Builder
			buf := make([]byte, 4096)
			for !strings.Contains(said.String(), `"hold"`) {
				n, err := stdout.Read(buf)
				if err != nil {
					t.Fatalf("%v: %s", err, said.String())
				}
				said.Write(buf[:n])
			}
			if !strings.Contains(said.String(), `"full"`) || !strings.Contains(said.String(), strconv.Itoa(512*mib)) {
				t.Errorf("it said %s", said.String())
			}
			got, r = d.GetMemoryLimits_v1(group)
			must(t, "get", r)
			if got.CurrentUsed != 512*mib {
				t.Errorf("%+v", got)
			}
			if m, r := d.GetMemoryInfo_v2(); r != nvml.SUCCESS || m.Total <= 512*mib || m.Used != 512*mib {
				t.Errorf("the host is told %+v, %v", m, r)
			}
			if backend == "dmem" {
				for file, want := range map[string]string{"dmem.max": "536870912", "dmem.min": "134217728", "dmem.current": "536870912"} {
					text, err := os.ReadFile(filepath.Join(dmem, name, file))
					if err != nil || !strings.HasSuffix(strings.TrimSpace(string(text)), " "+want) {
						t.Errorf("%s: %q, %v", file, text, err)
					}
				}
			}
			lower := d.SetMemoryLimits_v1(group, 0, 256*mib)
			if want := map[string]nvml.Return{"misc": nvml.ERROR_INVALID_ARGUMENT, "dmem": nvml.SUCCESS}[backend]; lower != want {
				t.Errorf("below the use: %v, want %v", lower, want)
			}
			if got, r := d.GetMemoryLimits_v1(group); r != nvml.SUCCESS || got.HardLimit != 512*mib {
				t.Errorf("afterwards: %+v, %v", got, r)
			}
			end()
			if err := os.Remove(group); err != nil {
				t.Fatal(err)
			}
			removed = true
			if _, r := d.GetMemoryLimits_v1(group); r != nvml.ERROR_OPERATING_SYSTEM {
				t.Errorf("of a cgroup that is gone: %v", r)
			}
		})
	}
}

// alone runs a test in a process of its own, and says that this is not it. NVIDIA's binding keeps the
// calls of the first library that a process has loaded.
func alone(t *testing.T) bool {
	t.Helper()
	const name = "GPUFENCE_TEST_ALONE"
	if os.Getenv(name) == t.Name() {
		return true
	}
	cmd := exec.CommandContext(t.Context(), "/proc/self/exe", "-test.run=^"+t.Name()+"$", "-test.v")
	cmd.Env = append(os.Environ(), name+"="+t.Name())
	out, err := cmd.CombinedOutput()
	t.Logf("%s", out)
	if err != nil {
		t.Error(err)
	}
	return false
}
