// SPDX-License-Identifier: Apache-2.0

package gpu_test

import (
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/gpufence/gpufence/enforcer/gpu"
	"github.com/gpufence/gpufence/tests/simgpu/simtest"
)

// A list is longer than the room that is kept for it; asking for everything at once says what the
// binding's calls say.
func TestAnswer(t *testing.T) {
	const count = 40
	dir, _ := simtest.Start(t, "--gpus", "1", "--memory", "16GiB", "--context-bytes", "64MiB")
	t.Setenv("SIMGPU_DIR", dir)
	lib := gpu.Open(simtest.Dist(t, "simgpu/libnvidia-ml.so.1"))
	if err := lib.Init(); err != nil {
		t.Fatal(err)
	}
	devices, err := lib.Devices()
	if err != nil || len(devices) != 1 {
		t.Fatalf("%v, %v", devices, err)
	}
	d, ok := devices[0].(interface{ Answer() (gpu.Answer, bool) })
	if !ok {
		t.Fatalf("%T cannot be asked for everything at once", devices[0])
	}
	if _, ok := d.Answer(); !ok {
		t.Fatal("the calls were not found in the library")
	}
	for range count {
		cmd := exec.CommandContext(t.Context(), simtest.Dist(t, "clients/client"))
		cmd.Env = append(cmd.Environ(), "LD_LIBRARY_PATH="+filepath.Dir(simtest.Dist(t, "simgpu/libcuda.so.1")))
		in, err := cmd.StdinPipe()
		if err != nil {
			t.Fatal(err)
		}
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			// It is killed; that error is expected.
			_ = cmd.Process.Kill()
			_ = cmd.Wait()
		})
		if _, err := io.WriteString(in, "context\n"); err != nil {
			t.Fatal(err)
		}
	}
	var a gpu.Answer
	for deadline := time.Now().Add(60 * time.Second); ; time.Sleep(5 * time.Millisecond) {
		if a, _ = d.Answer(); len(a.Rows[0]) == count {
			break
		}
		if time.Now().After(deadline) {
			t.Fatalf("%d rows, want %d: %+v", len(a.Rows[0]), count, a)
		}
	}
	for i, list := range gpu.Lists {
		rows, err := devices[0].Processes(list)
		if err != nil || a.Err[i] != nil || len(rows) != len(a.Rows[i]) || len(rows) > 0 && cmp.Diff(rows, a.Rows[i]) != "" {
			t.Errorf("%s: %v (%v), by the binding %v (%v)", list, a.Rows[i], a.Err[i], rows, err)
		}
	}
	if m, err := devices[0].Memory(); err != nil || a.MemoryErr != nil || m != a.Memory || m.UsedBytes == 0 {
		t.Errorf("%+v (%v), by the binding %+v (%v)", a.Memory, a.MemoryErr, m, err)
	}
	if err := lib.Shutdown(); err != nil {
		t.Error(err)
	}
	// A sampler that is late must not call into a library that may be gone.
	if a, ok := d.Answer(); !ok || a.MemoryErr == nil || a.Err[0] == nil {
		t.Errorf("after Shutdown: %+v", a)
	}
}

// The thread that asks a device ends with what is known of it: GPUs are found again after each reset.
func TestThreadsEnd(t *testing.T) {
	dir, _ := simtest.Start(t, "--gpus", "3", "--memory", "16GiB")
	t.Setenv("SIMGPU_DIR", dir)
	threads := func() (count int) {
		names, err := filepath.Glob("/proc/self/task/*/comm")
		if err != nil || len(names) == 0 {
			t.Fatalf("no threads: %v", err)
		}
		for _, n := range names {
			if text, err := os.ReadFile(n); err == nil && string(text) == "nvml\n" { // else it has ended
				count++
			}
		}
		return count
	}
	await := func(want int) {
		t.Helper()
		for deadline := time.Now().Add(20 * time.Second); threads() != want; time.Sleep(time.Millisecond) {
			if time.Now().After(deadline) {
				t.Fatalf("%d threads ask NVML, want %d", threads(), want)
			}
			runtime.GC()
		}
	}
	await(0) // of other tests
	lib := gpu.Open(simtest.Dist(t, "simgpu/libnvidia-ml.so.1"))
	if err := lib.Init(); err != nil {
		t.Fatal(err)
	}
	devices, err := lib.Devices()
	if err != nil || len(devices) != 3 {
		t.Fatalf("%v, %v", devices, err)
	}
	await(3)
	for _, d := range devices {
		if s := gpu.NewSampler(d).Sample(t.Context()); !s.Complete() {
			t.Errorf("%+v (%s)", s, s.Why())
		}
	}
	runtime.KeepAlive(devices)
	if err := lib.Shutdown(); err != nil {
		t.Error(err)
	}
	await(0)
}
