// SPDX-License-Identifier: Apache-2.0

package foreign

import (
	"debug/dwarf"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/gpufence/gpufence/tests/simgpu/simtest"
)

// side is a header of ours.
type side struct {
	name, path string
	values     map[string]string // the interface's name of ours, where it is another one
	types      map[string]string // likewise; "" for what is ours alone
	functions  func(*types) map[string]*dwarf.FuncType
}

// typedefs are the function types of the shim's header, by symbol.
func typedefs(ts *types) map[string]*dwarf.FuncType {
	out := map[string]*dwarf.FuncType{}
	for name, typ := range ts.named {
		if f, ok := bare(typ).(*dwarf.FuncType); ok && strings.HasPrefix(name, "fn_") {
			out[strings.TrimPrefix(name, "fn_")] = f
		}
	}
	return out
}

// exported are the functions that a library of simgpu acts on.
func exported(t *testing.T, libraries ...string) func(*types) map[string]*dwarf.FuncType {
	return func(*types) map[string]*dwarf.FuncType {
		out := map[string]*dwarf.FuncType{}
		for _, l := range libraries {
			for name, f := range readTypes(t, simtest.Dist(t, l), "unsupported.c").functions {
				if strings.HasPrefix(name, "cu") || strings.HasPrefix(name, "nvml") {
					out[name] = f
				}
			}
		}
		return out
	}
}

func TestInterfaceOfCUDA(t *testing.T) {
	t.Parallel()
	for _, version := range cudaVersions {
		t.Run(version, func(t *testing.T) {
			defer noteHeader(t, "cuda.h "+version)
			h := cudaHeader(t, version)
			compare(t, h, side{name: "simgpu", path: "../simgpu/libcuda/cuda_abi.h", functions: exported(t, "simgpu/libcuda.so.1")}, 35, 100, 250)
			compare(t, h, side{name: "shim", path: "../../shim/src/driver_api.h", functions: typedefs}, 20, 30, 100)
		})
	}
}

func TestInterfaceOfNVML(t *testing.T) {
	t.Parallel()
	defer noteHeader(t, "nvml.h of go-nvml")
	h := nvmlHeader(t)
	values := map[string]string{
		"NVML_OK": "NVML_SUCCESS", "NVML_MEMORY_V2": "nvmlMemory_v2", "NVML_VERSION_MISMATCH": "NVML_ERROR_ARGUMENT_VERSION_MISMATCH",
		"NVML_PROCESS_DETAIL_LIST_V1": "nvmlProcessDetailList_v1",
	}
	for _, name := range []string{
		"UNINITIALIZED", "INVALID_ARGUMENT", "NOT_SUPPORTED", "NO_PERMISSION", "NOT_FOUND", "INSUFFICIENT_SIZE", "DRIVER_NOT_LOADED",
		"FUNCTION_NOT_FOUND", "GPU_IS_LOST", "OPERATING_SYSTEM", "MEMORY", "UNKNOWN",
	} {
		values["NVML_"+name] = "NVML_ERROR_" + name
	}
	compare(t, h, side{
		name: "simgpu", path: "../simgpu/libnvml/nvml_abi.h", values: values, types: map[string]string{
			"nvml_memory": "nvmlMemory_t", "nvml_memory_v2": "nvmlMemory_v2_t", "nvml_process_v1": "nvmlProcessInfo_v1_t",
			"nvml_process_v2": "nvmlProcessInfo_v2_t", "nvml_process_detail": "nvmlProcessDetail_v1_t",
			"nvml_process_detail_list": "nvmlProcessDetailList_v1_t", "nvml_process_utilization": "nvmlProcessUtilizationSample_t",
			"nvml_pci_info": "nvmlPciInfo_t", "nvml_attributes": "nvmlDeviceAttributes_t", "nvml_set_limits": "nvmlSetMemoryLimits_v1_t",
			"nvml_get_limits": "nvmlGetMemoryLimits_v1_t", "nvml_utilization": "nvmlUtilization_t",
		}, functions: exported(t, "simgpu/libnvidia-ml.so.1", "simgpu/r615/libnvidia-ml.so.1"),
	}, 12, 19, 46)
	compare(t, h, side{name: "shim", path: "../../shim/src/driver_api.h", values: map[string]string{
		"NVML_PROCESS_DETAIL_LIST_V1": "nvmlProcessDetailList_v1", "NVML_PROCESSES_UTILIZATION_V1": "nvmlProcessesUtilizationInfo_v1",
	}, functions: typedefs}, 12, 7, 15)
}

// noteHeader puts a header into the table: it judges the simulated driver and both deliveries, which have the
// same types.
func noteHeader(t *testing.T, name string) {
	for _, delivery := range deliveries {
		note(name, delivery, verdict(t))
	}
}

// compare holds a header of ours against one of NVIDIA's: every structure, every value, every function
// that both have; fewer than the given numbers were not compared at all.
func compare(t *testing.T, h *header, s side, structs, values, functions int) {
	t.Helper()
	ourPath, err := filepath.Abs(s.path)
	if err != nil {
		t.Fatal(err)
	}
	own := &header{name: s.name, includes: "#include \"" + ourPath + "\"\n"}
	ours := own.types(t, nil)
	protos := s.functions(ours)
	var probe []string
	for name := range protos {
		if h.symbols[name] {
			probe = append(probe, name)
		}
	}
	slices.Sort(probe)
	theirs := h.types(t, probe)

	n := 0
	for name, typ := range ours.named {
		st, ok := bare(typ).(*dwarf.StructType)
		if !ok || st.Incomplete {
			continue
		}
		if other, ok := s.types[name]; ok {
			name = other
		}
		other, ok := theirs.named[name]
		if !ok {
			continue // not in this version
		}
		n++
		if err := sameLayout(typ, other); err != nil {
			t.Errorf("%s, %s: structure %s: %v", s.name, h.name, name, err)
		}
	}
	enough(t, s.name, h.name, "structures", n, structs)

	n = 0
	mine := constants(t, own, ours, ourPath)
	given := constantsNamed(t, h, theirs, slices.Collect(maps.Keys(mine)), s.values)
	for name, value := range mine {
		if other, ok := given[name]; ok {
			n++
			if value != other {
				t.Errorf("%s, %s: %s is %d, theirs %d", s.name, h.name, name, value, other)
			}
		}
	}
	enough(t, s.name, h.name, "values", n, values)

	for _, name := range probe {
		f := theirs.pointed(name)
		if f == nil {
			t.Errorf("%s: %s is no function", h.name, name)
			continue
		}
		if err := samePrototype(protos[name], f); err != nil {
			t.Errorf("%s, %s: %s: %v", s.name, h.name, name, err)
		}
	}
	enough(t, s.name, h.name, "functions", len(probe), functions)
}

func enough(t *testing.T, ours, theirs, what string, n, least int) {
	t.Helper()
	t.Logf("%s, %s: %d %s compared", ours, theirs, n, what)
	if n < least {
		t.Errorf("%s, %s: only %d %s compared, want %d", ours, theirs, n, what, least)
	}
}

// constants are the enumerators and the macros of a header of ours that bear names of the interface.
func constants(t *testing.T, h *header, ts *types, path string) map[string]int64 {
	t.Helper()
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	for _, m := range regexp.MustCompile(`(?m)^#define ((?:CU|NVML)\w*) \S`).FindAllStringSubmatch(string(text), -1) {
		names = append(names, m[1])
	}
	out := constantsNamed(t, h, ts, names, nil)
	for name, v := range ts.values {
		if strings.HasPrefix(name, "CU") || strings.HasPrefix(name, "NVML") {
			out[name] = v
		}
	}
	return out
}

// constantsNamed are those of the names that a header has, under another name where `other` says so.
func constantsNamed(t *testing.T, h *header, ts *types, names []string, other map[string]string) map[string]int64 {
	t.Helper()
	out := map[string]int64{}
	program := h.includes + "#include <stdio.h>\nint main(void)\n{\n"
	for _, name := range names {
		theirs := name
		if o, ok := other[name]; ok {
			theirs = o
		}
		if v, ok := ts.values[theirs]; ok {
			out[name] = v
			continue
		}
		program += fmt.Sprintf("#ifdef %s\nprintf(\"%s %%lld\\n\", (long long)(%s));\n#endif\n", theirs, name, theirs)
	}
	binary := filepath.Join(t.TempDir(), "constants")
	if err := os.WriteFile(binary, h.compile(t, program+"return 0;\n}\n"), 0o700); err != nil { //nolint:gosec // it is run
		t.Fatal(err)
	}
	text, err := exec.CommandContext(t.Context(), binary).Output()
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(text)) {
		name, value, _ := strings.Cut(strings.TrimSpace(line), " ")
		v, err := strconv.ParseInt(value, 10, 64)
		if err != nil {
			t.Fatal(err)
		}
		out[name] = v
	}
	return out
}
