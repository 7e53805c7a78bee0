// SPDX-License-Identifier: Apache-2.0

package gpu_test

import (
	"errors"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/gpufence/gpufence/enforcer/gpu"
	"github.com/gpufence/gpufence/tests/simgpu/server"
	"github.com/gpufence/gpufence/tests/simgpu/simtest"
)

// client is a process that a test tells what to do with the simulated GPU.
func client(t *testing.T, do string) io.Writer {
	t.Helper()
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
	if _, err := io.WriteString(in, do); err != nil {
		t.Fatal(err)
	}
	return in
}

// opened is a library that is loaded, and its GPUs.
func opened(t *testing.T, gpus int) (gpu.Library, []gpu.Device) {
	t.Helper()
	lib := gpu.Open(simtest.Dist(t, "simgpu/libnvidia-ml.so.1"))
	if err := lib.Init(); err != nil {
		t.Fatal(err)
	}
	devices, err := lib.Devices()
	if err != nil || len(devices) != gpus {
		t.Fatalf("%v, %v", devices, err)
	}
	t.Cleanup(func() { _ = lib.Shutdown() }) // unless it was: NVML is one for all tests
	return lib, devices
}

// byBinding hides that a device has a thread.
type byBinding struct{ gpu.Device }

// A list is longer than the room that is kept for it; asking for everything at once says what the
// binding's calls say.
func TestAnswer(t *testing.T) {
	const count = 40
	dir, _ := simtest.Start(t, "--gpus", "1", "--memory", "16GiB", "--context-bytes", "64MiB")
	t.Setenv("SIMGPU_DIR", dir)
	lib, devices := opened(t, 1)
	sampler := gpu.NewSampler(devices[0])
	if s := sampler.Sample(t.Context()); !s.Complete() || !sampler.Asked() {
		t.Fatalf("the calls were not found in the library: %+v", s)
	}
	for range count {
		client(t, "context\n")
	}
	var s gpu.Sample
	for deadline := time.Now().Add(60 * time.Second); ; time.Sleep(5 * time.Millisecond) {
		if s = sampler.Sample(t.Context()); len(s.Processes) == count {
			break
		}
		if time.Now().After(deadline) {
			t.Fatalf("%d rows, want %d: %+v", len(s.Processes), count, s)
		}
	}
	// Twice, as the second says what the first says.
	for range 2 {
		s = sampler.Sample(t.Context())
		want := gpu.NewSampler(byBinding{devices[0]}).Sample(t.Context())
		if diff := cmp.Diff(want, s, cmpopts.IgnoreFields(gpu.Sample{}, "Began", "Took", "Wall")); diff != "" || !s.Complete() || s.Memory.UsedBytes == 0 {
			t.Errorf("by the binding, by its thread: %s", diff)
		}
		if s.Began >= want.Began || s.Took <= 0 || want.Wall.Sub(s.Wall).Abs() > time.Hour {
			t.Errorf("began %v, took %v at %v; by the binding later %v, %v, %v", s.Began, s.Took, s.Wall, want.Began, want.Took, want.Wall)
		}
	}
	if err := lib.Shutdown(); err != nil {
		t.Error(err)
	}
	// A sampler that is late must not call into a library that may be gone.
	if s := sampler.Sample(t.Context()); !errors.Is(s.Err, fs.ErrClosed) {
		t.Errorf("after Shutdown: %+v", s)
	}
}

// Whoever is patient is woken once by GPUs that say what they said, with the last of them, and at once
// by one that says something new. None of them waits for one that hangs, once somebody looks.
func TestPatience(t *testing.T) {
	const cost = 10 * time.Millisecond // of a call, of which an answer takes four
	dir, sim := simtest.Start(t, "--gpus", "3", "--memory", "16GiB", "--context-bytes", "64MiB", "--call-cost", cost.String())
	t.Setenv("SIMGPU_DIR", dir)
	lib, devices := opened(t, 3)
	var samplers []*gpu.Sampler
	for _, d := range devices {
		samplers = append(samplers, gpu.NewSampler(d))
	}
	bell := gpu.NewBell()
	defer bell.Close()
	set := func(index int, knob, value string) {
		t.Helper()
		if err := sim.Set(server.Settings{GPU: &index, Knobs: map[string]string{knob: value}}); err != nil {
			t.Fatal(err)
		}
	}
	ask := func() {
		t.Helper()
		select {
		case <-bell.C(): // of before
		default:
		}
		for _, s := range samplers {
			if err := s.Ask(bell, true); err != nil {
				t.Fatal(err)
			}
		}
	}
	rung := func() {
		t.Helper()
		select {
		case <-bell.C():
		case <-time.After(20 * time.Second):
			t.Fatal("the bell does not ring")
		}
	}
	taken := func(want ...int) {
		t.Helper()
		for _, i := range want {
			for deadline := time.Now().Add(20 * time.Second); ; time.Sleep(time.Millisecond) {
				if s, there := samplers[i].Take(); there {
					if !s.Complete() {
						t.Fatalf("%+v (%s)", s, s.Why())
					}
					break
				}
				if time.Now().After(deadline) {
					t.Fatalf("GPU %d does not answer", i)
				}
			}
		}
	}
	ask()
	taken(0, 1, 2) // the first answers are new
	for range 20 {
		began := time.Now()
		ask()
		together := time.Since(began) < 4*cost // else one may have answered before the next was asked
		rung()
		for i, s := range samplers {
			if _, there := s.Take(); !there && together {
				t.Fatalf("the bell rang before GPU %d had answered, though nothing is new", i)
			} else if !there {
				taken(i)
			}
		}
	}
	client(t, "context 1\n")
	for deadline := time.Now().Add(20 * time.Second); ; {
		ask()
		rung()
		s, there := samplers[1].Take()
		taken(0, 2)
		if !there {
			taken(1)
		}
		if there && len(s.Processes) == 1 {
			break
		}
		if time.Now().After(deadline) {
			t.Fatal("what is new is not told")
		}
	}
	set(2, "hang", "nvml")
	ask()
	taken(0, 1)
	if _, there := samplers[2].Take(); there {
		t.Error("a call that hangs was answered")
	}
	if err := samplers[2].Ask(bell, true); !errors.Is(err, gpu.ErrHung) {
		t.Errorf("asked again: %v", err)
	}
	set(2, "hang", "0")
	rung()
	taken(2)
	if err := lib.Shutdown(); err != nil {
		t.Error(err)
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
	lib, devices := opened(t, 3)
	await(0) // who only looks what there is needs none
	for _, d := range devices {
		if s := gpu.NewSampler(d).Sample(t.Context()); !s.Complete() {
			t.Errorf("%+v (%s)", s, s.Why())
		}
	}
	await(3)
	runtime.KeepAlive(devices)
	if err := lib.Shutdown(); err != nil {
		t.Error(err)
	}
	await(0)
}
