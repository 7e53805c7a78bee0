// SPDX-License-Identifier: Apache-2.0

package foreign

import (
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"github.com/gpufence/gpufence/tests/simgpu/simtest"
)

// TestCallsOfTheRuntime: every call of the runtime becomes the same calls of the driver with the shim as without, is
// held to the limit if it takes memory, and the null stream is what it was: one for all, or the thread's.
func TestCallsOfTheRuntime(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct{ major, cuda string }{{"12", "12.8"}, {"13", "13.0"}} {
		t.Run(tt.major, func(t *testing.T) {
			t.Parallel()
			p := newPlace(t, tt.cuda)
			program := simtest.Dist(t, "simgpu/test/runtime"+tt.major+"_test")
			for _, delivery := range deliveries {
				t.Run(delivery, func(t *testing.T) {
					defer func() { note("calls of libcudart.so."+tt.major+" (ours), driver "+tt.cuda, delivery, verdict(t)) }()
					env := []string{"/usr/bin/env", "SIMGPU_RUNTIME_TRACE=" + filepath.Join(t.TempDir(), "trace")}
					if delivery != none {
						env = append(env, "TEST_LIMIT="+strconv.FormatUint(limit, 10))
					}
					if said, err := p.run(delivery, append(env, program)...); err != nil || len(said) > 0 {
						t.Errorf("%v\n%s", err, said)
					}
					p.idle()
				})
			}
		})
	}
}

// TestInterfaceOfTheRuntime: the runtime's sources compile with NVIDIA's headers in place of ours, so every prototype,
// structure and value is theirs.
func TestInterfaceOfTheRuntime(t *testing.T) {
	t.Parallel()
	simgpu, err := filepath.Abs("../simgpu")
	if err != nil {
		t.Fatal(err)
	}
	// What the compiler's own headers define, which the packages do not have.
	const defines = "#define __host__\n#define __device__\n#define __device_builtin__\n#define __cudart_builtin__\n" +
		"#define __device_builtin_texture_type__\n#define __device_builtin_surface_type__\n#define CUDARTAPI\n#define CUDARTAPI_CDECL\n" +
		"#define CUDA_CB\n#define __builtin_align__(n) __attribute__((aligned(n)))\n#define __align__(n) __attribute__((aligned(n)))\n"
	sources, err := filepath.Glob(filepath.Join(simgpu, "libcudart", "*.c"))
	if err != nil || len(sources) < 4 {
		t.Fatalf("find the runtime's sources: %v %v", sources, err)
	}
	sources = append(sources, filepath.Join(simgpu, "libcublas", "cublas.c"))
	stub := t.TempDir()
	if err := os.MkdirAll(filepath.Join(stub, "crt"), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(stub, "crt", "host_defines.h"), []byte(defines), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, version := range []string{"12.0", "12.4", "12.8", "13.0", "13.5"} {
		t.Run(version, func(t *testing.T) {
			t.Parallel()
			h := cudaHeader(t, version)
			major, _, _ := strings.Cut(version, ".")
			flags := []string{"-DSIMGPU_NVIDIA_HEADER", "-DCUDART_MAJOR=" + major, "-I" + h.dir, "-I" + stub}
			for _, source := range sources {
				theirs := &header{name: h.name, flags: flags}
				theirs.compile(t, "#include \""+source+"\"\n", "-c")
			}
			cmd := exec.CommandContext(t.Context(), "gcc", append([]string{"-std=gnu11", "-w", "-fsyntax-only", "-x", "c", "-"}, flags...)...)
			cmd.Stdin = strings.NewReader("#include \"" + sources[0] + "\"\ncudaError_t cudaGetDevice(long *);\n")
			if out, err := cmd.CombinedOutput(); err == nil || !strings.Contains(string(out), "conflicting types") {
				t.Errorf("a wrong prototype: %v\n%s", err, out)
			}
			noteHeader(t, "cuda_runtime_api.h "+version)
		})
	}
}
