// SPDX-License-Identifier: Apache-2.0

package gpu_test

import (
	"bufio"
	"context"
	"errors"
	"io"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/gpufence/gpufence/enforcer/gpu"
	"github.com/gpufence/gpufence/tests/simgpu/server"
	"github.com/gpufence/gpufence/tests/simgpu/simtest"
)

// TestSimulatedDriver goes the whole way: go-nvml, the library with the real ABI, the simulated
// driver, and a process that holds memory.
func TestSimulatedDriver(t *testing.T) {
	dir, sim := simtest.Start(t, "--gpus", "2", "--model", "t4", "--memory", "16GiB")
	t.Setenv("SIMGPU_DIR", dir)
	set := func(index int, knob, value string) {
		t.Helper()
		if err := sim.Set(server.Settings{GPU: &index, Knobs: map[string]string{knob: value}}); err != nil {
			t.Fatal(err)
		}
	}
	lib := gpu.Open(simtest.Dist(t, "simgpu/libnvidia-ml.so.1"))
	if err := lib.Init(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := lib.Shutdown(); err != nil {
			t.Error(err)
		}
	})
	if v, err := lib.Driver(); err != nil || v == "" {
		t.Errorf("driver %q, %v", v, err)
	}
	devices, err := lib.Devices()
	if err != nil || len(devices) != 2 {
		t.Fatalf("%v, %v", devices, err)
	}
	info := devices[0].Info()
	if info.TotalBytes != 16<<30 || !strings.HasPrefix(info.UUID, "GPU-") || info.UUID == devices[1].Info().UUID || info.Minor != 0 || gpu.ContextBytes(info.Name) != 124<<20 {
		t.Errorf("%+v", info)
	}

	// A context of 104 MiB and two steps: a third would be above 256 MiB.
	const held = (104 + 2*64) << 20
	cmd := exec.CommandContext(t.Context(), simtest.Dist(t, "clients/bypass"), "64", "1", "256")
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	read := make(chan struct{})
	go func() {
		defer close(read)
		for s := bufio.NewScanner(out); s.Scan(); {
			t.Log(s.Text())
		}
	}()
	t.Cleanup(func() {
		// It is killed; that error is expected.
		_ = cmd.Process.Kill()
		<-read
		_ = cmd.Wait()
	})

	samplers := []*gpu.Sampler{gpu.NewSampler(devices[0]), gpu.NewSampler(devices[1])}
	sample := func(i int) gpu.Sample {
		ctx, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
		defer cancel()
		return samplers[i].Sample(ctx)
	}
	until := func(what string, ok func(gpu.Sample) bool) gpu.Sample {
		t.Helper()
		deadline := time.Now().Add(20 * time.Second)
		for {
			s := sample(0)
			if ok(s) {
				return s
			}
			if time.Now().After(deadline) {
				t.Fatalf("no sample with %s: %+v (%s)", what, s, s.Why())
			}
			time.Sleep(5 * time.Millisecond)
		}
	}
	s := until("what it holds in the end", func(s gpu.Sample) bool { return len(s.Processes) == 1 && s.Processes[0].Bytes >= held })
	if !s.Complete() || s.Processes[0].PID != cmd.Process.Pid || !s.Processes[0].Known || s.MemoryErr != nil || s.Memory.UsedBytes < held || s.Memory.TotalBytes != 16<<30 {
		t.Errorf("%+v", s)
	}
	if used := s.Memory.UsedBytes; used != s.Processes[0].Bytes {
		t.Errorf("used %d, processes %d: the reserve must be apart", used, s.Processes[0].Bytes)
	}
	if s := sample(1); !s.Complete() || len(s.Processes) != 0 {
		t.Errorf("the other GPU: %+v", s)
	}

	set(0, "unknown", "process")
	s = until("an unknown size", func(s gpu.Sample) bool { return len(s.Processes) == 1 && !s.Processes[0].Known })
	if s.Processes[0].Bytes != 0 {
		t.Errorf("%+v", s)
	}
	set(0, "unknown", "0")

	set(0, "hang", "nvml")
	s = until("a hung call", func(s gpu.Sample) bool { return errors.Is(s.Err, gpu.ErrHung) })
	if s.Complete() {
		t.Errorf("%+v", s)
	}
	if s := sample(1); !s.Complete() {
		t.Errorf("the other GPU while one hangs: %+v (%s)", s, s.Why())
	}
	set(0, "hang", "0")
	until("the call back", func(s gpu.Sample) bool { return s.Complete() && len(s.Processes) == 1 })

	set(0, "lost", "1")
	until("a lost GPU", func(s gpu.Sample) bool { return !s.Complete() && errors.Is(s.Failed[gpu.ListCompute], gpu.ErrLost) })
	set(0, "lost", "0")
}

// Each instance of a GPU in MIG mode is sampled by itself.
func TestSimulatedInstances(t *testing.T) {
	dir, sim := simtest.Start(t, "--gpus", "2", "--memory", "16GiB", "--mig", "2,0")
	t.Setenv("SIMGPU_DIR", dir)
	lib := gpu.Open(simtest.Dist(t, "simgpu/libnvidia-ml.so.1"))
	if err := lib.Init(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := lib.Shutdown(); err != nil {
			t.Error(err)
		}
	})
	devices, err := lib.Devices()
	if err != nil || len(devices) != 4 {
		t.Fatalf("%v, %v", devices, err)
	}
	split, first, second, whole := devices[0].Info(), devices[1].Info(), devices[2].Info(), devices[3].Info()
	states := sim.State().GPUs
	if !split.MIG || first.Parent != split.UUID || second.Parent != split.UUID || whole.Parent != "" || whole.MIG ||
		first.UUID != states[2].UUID || second.UUID != states[3].UUID || second.Position() != "0:1" || whole.Position() != "1" || first.TotalBytes != 8<<30 {
		t.Errorf("%+v", devices)
	}
	q := gpu.Quota(second, gpu.DefaultReserve, 0)
	if q.ContextBytes < states[3].ContextBytes || q.ContextBytes >= gpu.ContextBytes(split.Name) || q.AllocatableBytes >= 8<<30 {
		t.Errorf("%+v; a context has %d", q, states[3].ContextBytes)
	}
	cmd := exec.CommandContext(t.Context(), simtest.Dist(t, "clients/client"))
	cmd.Env = append(cmd.Environ(), "LD_LIBRARY_PATH="+filepath.Dir(simtest.Dist(t, "simgpu/libcuda.so.1")), "CUDA_VISIBLE_DEVICES="+second.UUID)
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
	if _, err := io.WriteString(in, "context\nalloc 64\n"); err != nil {
		t.Fatal(err)
	}
	held := states[3].ContextBytes + 64<<20
	samplers := []*gpu.Sampler{gpu.NewSampler(devices[1]), gpu.NewSampler(devices[2]), gpu.NewSampler(devices[3])}
	deadline := time.Now().Add(20 * time.Second)
	for {
		s := samplers[1].Sample(t.Context())
		if s.Complete() && len(s.Processes) == 1 && s.Processes[0].Bytes == held && s.Processes[0].PID == cmd.Process.Pid && s.Memory.UsedBytes == held {
			break
		}
		if time.Now().After(deadline) {
			t.Fatalf("%+v (%s), want %d", s, s.Why(), held)
		}
		time.Sleep(5 * time.Millisecond)
	}
	for _, i := range []int{0, 2} {
		if s := samplers[i].Sample(t.Context()); !s.Complete() || len(s.Processes) != 0 || s.Memory.UsedBytes != 0 {
			t.Errorf("another: %+v (%s)", s, s.Why())
		}
	}
}
