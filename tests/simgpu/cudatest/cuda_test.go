// SPDX-License-Identifier: Apache-2.0

// Package cudatest runs the C tests of the simulated libcuda against a simulated GPU, and
// replays what NVIDIA's CUDA runtime asks of a driver.
package cudatest

import (
	"bufio"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/gpufence/gpufence/tests/simgpu/simtest"
)

func TestCUDA(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct{ name, step string }{
		{"cuda_test", "33554432"},
		{"cuda_test_asan", "33554432"},
		{"hold_test", "33554432"},
		{"hold_test_asan", "8388608"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			dir, s := simtest.Start(t, "--gpus", "2", "--pool-step", tt.step)
			cmd := exec.CommandContext(t.Context(), simtest.Dist(t, "simgpu/test/"+tt.name))
			cmd.Env = append(os.Environ(), "SIMGPU_DIR="+dir, "TEST_UUID1="+s.State().GPUs[1].UUID, "TEST_POOL_STEP="+tt.step)
			if out, err := cmd.CombinedOutput(); err != nil {
				t.Errorf("%v\n%s", err, out)
			}
			for _, p := range s.State().GPUs[0].Processes {
				if p.PID == cmd.Process.Pid && p.PeakBytes == 0 {
					t.Errorf("the test held nothing: %+v", p)
				}
			}
		})
	}
}

// entry is a line of entry.def.
type entry struct {
	name      string
	version   int
	perThread bool
	symbol    string
}

func readEntries(t *testing.T) []entry {
	t.Helper()
	text, err := os.ReadFile(filepath.Join("..", "libcuda", "entry.def"))
	if err != nil {
		t.Fatal(err)
	}
	var all []entry
	for _, m := range regexp.MustCompile(`(?m)^ENTRY\((\w+), (\d+), (LEGACY|PER_THREAD), (\w+)\)$`).FindAllStringSubmatch(string(text), -1) {
		version, err := strconv.Atoi(m[2])
		if err != nil {
			t.Fatal(err)
		}
		all = append(all, entry{m[1], version, m[3] == "PER_THREAD", m[4]})
	}
	if n := strings.Count(string(text), "\nENTRY("); n != len(all) || n == 0 {
		t.Fatalf("read %d of %d entries", len(all), n)
	}
	return all
}

// expected is the rule written once more: the newest variant that the asked version and the
// driver have; with the flag for per-thread default streams such a one, if there is any.
func expected(all []entry, name string, version, driver int, flags string) (symbol string, status int) {
	symbol, status = "-", 1
	for _, perThread := range []bool{false, true} {
		best := -1
		for _, e := range all {
			if e.name != name || e.version > driver || e.perThread != perThread || perThread && flags != "2" {
				continue
			}
			if status == 1 {
				status = 2
			}
			if e.version <= version && e.version > best {
				best, symbol, status = e.version, e.symbol, 0
			}
		}
	}
	return symbol, status
}

func TestReplayOfTheRuntime(t *testing.T) {
	t.Parallel()
	entries := readEntries(t)
	for _, list := range []string{"runtime-11.8.txt", "runtime-12.4.txt"} {
		for _, driver := range []struct {
			text    string
			version int
		}{{"12.8", 12080}, {"12.2", 12020}, {"11.4", 11040}} {
			t.Run(list+" on "+driver.text, func(t *testing.T) {
				t.Parallel()
				dir, _ := simtest.Start(t, "--cuda-version", driver.text)
				cmd := exec.CommandContext(t.Context(), simtest.Dist(t, "simgpu/test/replay"), filepath.Join("..", "testdata", list))
				cmd.Env = append(os.Environ(), "SIMGPU_DIR="+dir, "LD_LIBRARY_PATH="+simtest.Dist(t, "simgpu"))
				out, err := cmd.Output()
				if err != nil {
					t.Fatalf("%v\n%s", err, out)
				}
				asked, found := 0, 0
				for scan := bufio.NewScanner(strings.NewReader(string(out))); scan.Scan(); {
					var name, flags, symbol string
					var version, result, status int
					if _, err := fmt.Sscan(scan.Text(), &name, &version, &flags, &result, &status, &symbol); err != nil {
						t.Fatalf("read %q: %v", scan.Text(), err)
					}
					wantSymbol, wantStatus := expected(entries, name, version, driver.version, flags)
					wantResult := 0
					if wantStatus != 0 {
						wantResult = 500
					}
					if symbol != wantSymbol || status != wantStatus || result != wantResult {
						t.Errorf("%s: want %d %d %s", scan.Text(), wantResult, wantStatus, wantSymbol)
					}
					asked++
					if result == 0 {
						found++
					}
				}
				if asked < 380 || found < 80 {
					t.Errorf("%d requests, %d answered with a function", asked, found)
				}
			})
		}
	}
}

// What the table must say for names whose wrong variant would corrupt arguments silently.
func TestVariantsThatMatter(t *testing.T) {
	t.Parallel()
	entries := readEntries(t)
	for _, tt := range []struct {
		name    string
		version int
		flags   string
		symbol  string
	}{
		{"cuGetProcAddress", 11030, "0", "cuGetProcAddress"},
		{"cuGetProcAddress", 12000, "0", "cuGetProcAddress_v2"},
		{"cuMemAlloc", 3010, "0", "cuMemAlloc"},
		{"cuMemAlloc", 3020, "0", "cuMemAlloc_v2"},
		{"cuMemGetInfo", 3020, "0", "cuMemGetInfo_v2"},
		{"cuDeviceTotalMem", 3020, "0", "cuDeviceTotalMem_v2"},
		{"cuDevicePrimaryCtxRelease", 7000, "0", "cuDevicePrimaryCtxRelease"},
		{"cuDevicePrimaryCtxRelease", 11000, "0", "cuDevicePrimaryCtxRelease_v2"},
		{"cuCtxCreate", 11040, "0", "cuCtxCreate_v3"},
		{"cuCtxCreate", 12050, "0", "cuCtxCreate_v4"},
		{"cuMemPrefetchAsync", 8000, "0", "cuMemPrefetchAsync"},
		{"cuMemPrefetchAsync", 12020, "2", "cuMemPrefetchAsync_v2_ptsz"},
		{"cuMemcpyHtoD", 7000, "2", "cuMemcpyHtoD_v2_ptds"},
		{"cuMemcpyHtoD", 3020, "2", "cuMemcpyHtoD_v2"},
		{"cuMemAllocAsync", 11020, "2", "cuMemAllocAsync_ptsz"},
		{"cuLaunchKernel", 4000, "0", "cuLaunchKernel"},
		{"cuLaunchKernel", 7000, "2", "cuLaunchKernel_ptsz"},
		{"cuEventElapsedTime", 12080, "0", "cuEventElapsedTime_v2"},
	} {
		if symbol, status := expected(entries, tt.name, tt.version, 12080, tt.flags); symbol != tt.symbol || status != 0 {
			t.Errorf("%s@%d flags %s: %s, want %s", tt.name, tt.version, tt.flags, symbol, tt.symbol)
		}
	}
}

// The table is what the checked-in list of all functions says.
func TestEntriesAreTheList(t *testing.T) {
	t.Parallel()
	text, err := os.ReadFile(filepath.Join("..", "..", "..", "shim", "cuda-functions.tsv"))
	if err != nil {
		t.Fatal(err)
	}
	var want []entry
	for line := range strings.Lines(string(text)) {
		if strings.HasPrefix(line, "#") {
			continue
		}
		f := strings.Split(strings.TrimSuffix(line, "\n"), "\t")
		if len(f) != 4 {
			t.Fatalf("read %q: %d fields", line, len(f))
		}
		version, err := strconv.Atoi(f[2])
		if err != nil {
			t.Fatal(err)
		}
		want = append(want, entry{f[0], version, f[3] != "-", f[1]})
	}
	if d := cmp.Diff(want, readEntries(t), cmp.AllowUnexported(entry{})); d != "" {
		t.Errorf("run headers/functions.py --entries (-list +table):\n%s", d)
	}
}

// The library exports its entry points, and nothing else.
func TestExports(t *testing.T) {
	t.Parallel()
	out, err := exec.CommandContext(t.Context(), "nm", "-D", "--defined-only", "--format=posix", simtest.Dist(t, "simgpu/libcuda.so.1")).Output()
	if err != nil {
		t.Fatal(err)
	}
	want := map[string]bool{}
	for _, e := range readEntries(t) {
		want[e.symbol] = true
	}
	for line := range strings.Lines(string(out)) {
		name, _, _ := strings.Cut(line, " ")
		if !want[name] {
			t.Errorf("%s is exported and in no table", name)
		}
		delete(want, name)
	}
	for name := range want {
		t.Errorf("%s is in the table and not exported", name)
	}
}

// A process has one MIG instance: the first that is visible to it. The GPU that is split is none.
func TestInstances(t *testing.T) {
	t.Parallel()
	dir, s := simtest.Start(t, "--gpus", "2", "--mig", "3,0")
	gpus := s.State().GPUs
	bare := func(i int) string { return gpus[i].UUID[len("GPU-"):] }
	only := t.TempDir()
	for _, name := range []string{"ctl", "gpu0", "gpu0.mig1"} {
		if err := os.Symlink(filepath.Join(dir, name), filepath.Join(only, name)); err != nil {
			t.Fatal(err)
		}
	}
	for name, tt := range map[string]struct {
		dir, visible, want string
	}{
		"the first by default": {dir, "unset", "TEST_MIG0"},
		"the only one":         {only, "unset", "TEST_MIG1"},
		"by UUID":              {dir, gpus[3].UUID, "TEST_MIG1"},
		"by index":             {dir, "1", "TEST_MIG1"},
		"of two":               {dir, gpus[3].UUID + "," + gpus[2].UUID, "TEST_MIG1"},
		"a whole one":          {dir, gpus[1].UUID, "whole"},
		"one that is split":    {dir, gpus[0].UUID, "none"},
		"one without a file":   {only, gpus[2].UUID, "none"},
	} {
		for _, program := range []string{"mig_test", "mig_test_asan"} {
			cmd := exec.CommandContext(t.Context(), simtest.Dist(t, "simgpu/test/"+program))
			cmd.Env = append(os.Environ(), "SIMGPU_DIR="+tt.dir, "TEST_CASE="+tt.want, "TEST_GPU="+bare(0), "TEST_MIG0="+bare(2), "TEST_MIG1="+bare(3))
			if tt.visible != "unset" {
				cmd.Env = append(cmd.Env, "CUDA_VISIBLE_DEVICES="+tt.visible)
			}
			if out, err := cmd.CombinedOutput(); err != nil {
				t.Errorf("%s, %s: %v\n%s", name, program, err, out)
			}
		}
	}
}
