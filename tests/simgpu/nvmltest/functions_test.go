// SPDX-License-Identifier: Apache-2.0

package nvmltest

import (
	"debug/elf"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/gpufence/gpufence/tests/simgpu/simtest"
)

// TestEveryFunctionIsThere: the library exports what NVIDIA's header declares, as the real one does.
func TestEveryFunctionIsThere(t *testing.T) {
	out, err := exec.CommandContext(t.Context(), "go", "list", "-m", "-f", "{{.Dir}}", "github.com/NVIDIA/go-nvml").Output()
	if err != nil {
		t.Fatal(err)
	}
	header, err := os.ReadFile(filepath.Join(strings.TrimSpace(string(out)), "gen", "nvml", "nvml.h"))
	if err != nil {
		t.Fatal(err)
	}
	declared := regexp.MustCompile(`(?m)^\s*nvmlReturn_t\s+DECLDIR\s+(nvml\w+)\s*\(`).FindAllStringSubmatch(string(header), -1)
	if len(declared) < 390 {
		t.Fatalf("read only %d functions", len(declared))
	}
	for _, library := range []string{"simgpu/libnvidia-ml.so.1", "simgpu/r615/libnvidia-ml.so.1"} {
		f, err := elf.Open(simtest.Dist(t, library))
		if err != nil {
			t.Fatal(err)
		}
		symbols, err := f.DynamicSymbols()
		f.Close()
		if err != nil {
			t.Fatal(err)
		}
		var have []string
		for _, s := range symbols {
			if s.Section != elf.SHN_UNDEF {
				have = append(have, s.Name)
			}
		}
		for _, m := range declared {
			older := !strings.Contains(library, "r615") && strings.Contains(m[1], "MemoryLimits")
			if slices.Contains(have, m[1]) == older {
				t.Errorf("%s: %s: exported is %v", library, m[1], !older)
			}
		}
	}
}

// TestWhatAGPUCannotDo: functions that the simulated driver does not act on say so, and not that the driver
// is too old; nor anything but that the library is not ready before it is.
func TestWhatAGPUCannotDo(t *testing.T) {
	lib, _, _ := open(t)
	d := device(t, lib, 0)
	if _, ret := d.GetTotalEccErrors(nvml.MEMORY_ERROR_TYPE_UNCORRECTED, nvml.VOLATILE_ECC); ret != nvml.ERROR_NOT_SUPPORTED {
		t.Errorf("ECC errors: %v", ret)
	}
	if _, ret := d.GetFanSpeed(); ret != nvml.ERROR_NOT_SUPPORTED {
		t.Errorf("fan: %v", ret)
	}
	must(t, "shutdown", lib.Shutdown())
	if _, ret := lib.UnitGetCount(); ret != nvml.ERROR_UNINITIALIZED {
		t.Errorf("without init: %v", ret)
	}
	must(t, "init", lib.Init())
}
