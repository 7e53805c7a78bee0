// SPDX-License-Identifier: Apache-2.0

package gpu_test

import (
	"context"
	"errors"
	"os"
	"os/exec"
	"testing"
	"time"

	"github.com/gpufence/gpufence/enforcer/gpu"
	"github.com/gpufence/gpufence/tests/simgpu/server"
	"github.com/gpufence/gpufence/tests/simgpu/simtest"
)

// limiters are the devices of a simulated driver as limiters.
func limiters(t *testing.T, library string, flags ...string) ([]*gpu.Limiter, *server.Server) {
	t.Helper()
	dir, sim := simtest.Start(t, flags...)
	t.Setenv("SIMGPU_DIR", dir)
	lib := gpu.Open(simtest.Dist(t, library))
	if err := lib.Init(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := lib.Shutdown(); err != nil {
			t.Error(err)
		}
	})
	devices, err := lib.Devices()
	if err != nil {
		t.Fatal(err)
	}
	var out []*gpu.Limiter
	for _, d := range devices {
		out = append(out, gpu.NewLimiter(d))
	}
	return out, sim
}

// unifiedRoot is where the v2 hierarchy is mounted.
func unifiedRoot() string {
	if _, err := os.Stat("/sys/fs/cgroup/unified/cgroup.controllers"); err == nil {
		return "/sys/fs/cgroup/unified"
	}
	return "/sys/fs/cgroup"
}

// TestLimitsOfOlderDrivers: their library lacks the calls, which nobody calls then.
func TestLimitsOfOlderDrivers(t *testing.T) {
	all, _ := limiters(t, "simgpu/libnvidia-ml.so.1")
	if all[0].HasLimits() {
		t.Error("an old driver has limits")
	}
	if err := all[0].Set(t.Context(), "/sys/fs/cgroup", 0, 1<<30); !errors.Is(err, gpu.ErrNoLimits) {
		t.Errorf("set: %v", err)
	}
	if _, err := all[0].Get(t.Context(), "/sys/fs/cgroup"); !errors.Is(err, gpu.ErrNoLimits) {
		t.Errorf("get: %v", err)
	}
}

// TestLimitErrors: each way to fail is told from the others, and a driver that hangs is not waited for.
func TestLimitErrors(t *testing.T) {
	if !alone(t) {
		return
	}
	all, sim := limiters(t, "simgpu/r615/libnvidia-ml.so.1", "--driver-version", "615.71.09", "--memory-limits", "misc", "--mig", "0")
	l := all[0]
	if !l.HasLimits() {
		t.Fatal("the driver has no limits")
	}
	root := unifiedRoot()
	for _, tt := range []struct {
		dir        string
		soft, hard uint64
		want       error
	}{
		{t.TempDir(), 0, 1 << 30, gpu.ErrNoCgroup},
		{"/not/there", 0, 1 << 30, gpu.ErrNoCgroup},
		{root, 0, 1 << 30, gpu.ErrNoLimits},
	} {
		if err := l.Set(t.Context(), tt.dir, tt.soft, tt.hard); !errors.Is(err, tt.want) {
			t.Errorf("set %s: %v, want %v", tt.dir, err, tt.want)
		}
	}
	if err := sim.Set(server.Settings{Knobs: map[string]string{"hang": "nvml"}}); err != nil {
		t.Fatal(err)
	}
	for range 2 { // the second finds the first still in the driver
		ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
		if _, err := l.Get(ctx, root); !errors.Is(err, gpu.ErrHung) {
			t.Errorf("a driver that hangs: %v", err)
		}
		cancel()
	}
	if err := sim.Set(server.Settings{Knobs: map[string]string{"hang": "0"}}); err != nil {
		t.Fatal(err)
	}
	if _, err := l.Get(t.Context(), root); !errors.Is(err, gpu.ErrNoLimits) {
		t.Errorf("afterwards: %v", err)
	}
	if err := sim.Set(server.Settings{Knobs: map[string]string{"lost": "1"}}); err != nil {
		t.Fatal(err)
	}
	if _, err := l.Get(t.Context(), root); !errors.Is(err, gpu.ErrLost) {
		t.Errorf("lost: %v", err)
	}
}

// TestNoLimitsOfInstances: H2, as the driver says it.
func TestNoLimitsOfInstances(t *testing.T) {
	if !alone(t) {
		return
	}
	all, _ := limiters(t, "simgpu/r615/libnvidia-ml.so.1", "--driver-version", "615.71.09", "--mig", "2")
	for _, l := range all {
		if err := l.Set(t.Context(), unifiedRoot(), 0, 1<<30); !errors.Is(err, gpu.ErrNoLimits) {
			t.Errorf("%s: %v", l.Info().UUID, err)
		}
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
