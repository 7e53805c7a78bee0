// SPDX-License-Identifier: Apache-2.0

package cudatest

import (
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/gpufence/gpufence/tests/simgpu/simtest"
)

// The runtime library over libcuda, and what stands on it: what its calls become, and the errors that they give.
func TestRuntime(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct{ name, cuda string }{
		{"runtime12_test", "12.8"},
		{"runtime12_test_asan", "13.0"},
		{"runtime13_test", "13.0"},
		{"runtime13_test_asan", "13.5"},
		{"blas12_test", "12.8"},
		{"blas12_test_asan", "12.8"},
		{"blas13_test", "13.0"},
		{"blas13_test_asan", "13.0"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			dir, _ := simtest.Start(t, "--cuda-version", tt.cuda)
			cmd := exec.CommandContext(t.Context(), simtest.Dist(t, "simgpu/test/"+tt.name))
			cmd.Env = append(os.Environ(), "SIMGPU_DIR="+dir, "LD_LIBRARY_PATH="+simtest.Dist(t, "simgpu"),
				"SIMGPU_RUNTIME_TRACE="+filepath.Join(t.TempDir(), "trace"))
			if out, err := cmd.CombinedOutput(); err != nil {
				t.Errorf("%v\n%s", err, out)
			}
		})
	}
}

// TestRuntimeWithoutADriver: a runtime that finds no driver, or one of an older major version, says so.
func TestRuntimeWithoutADriver(t *testing.T) {
	t.Parallel()
	for name, tt := range map[string]struct{ cuda, libraries string }{
		"no driver":    {"12.8", t.TempDir()},
		"an older one": {"12.8", simtest.Dist(t, "simgpu")},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			dir, _ := simtest.Start(t, "--cuda-version", tt.cuda)
			for _, program := range []string{"runtime13_test", "runtime13_test_asan"} {
				cmd := exec.CommandContext(t.Context(), simtest.Dist(t, "simgpu/test/"+program))
				cmd.Env = append(os.Environ(), "SIMGPU_DIR="+dir, "LD_LIBRARY_PATH="+tt.libraries, "TEST_CASE=insufficient",
					"SIMGPU_RUNTIME_TRACE="+filepath.Join(t.TempDir(), "trace"))
				if out, err := cmd.CombinedOutput(); err != nil {
					t.Errorf("%s: %v\n%s", program, err, out)
				}
			}
		})
	}
}
