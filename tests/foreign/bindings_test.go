// SPDX-License-Identifier: Apache-2.0

package foreign

import (
	"maps"
	"slices"
	"strconv"
	"strings"
	"testing"
)

// did is what programs/driver.py and its like write.
type did struct {
	Steps map[string]string `json:"steps"`
	Over  map[string]string `json:"over"`
	Views map[string]uint64 `json:"views"`
	// Frontier is what goes through NVIDIA's CUDA runtime, which does not take the simulated driver.
	Frontier map[string]string `json:"frontier"`
}

// driverClients are clients of the driver's interface, with the versions of requirements/.
var driverClients = []struct {
	set, name, cuda, program string
	steps, over              int // at least so many
}{
	{"bindings-12", "cuda-bindings 12.9.4, driver 12.8", "12.8", "driver.py", 110, 8},
	{"bindings-12", "cuda-bindings 12.9.4, driver 13.5", "13.5", "driver.py", 110, 8},
	{"bindings-13", "cuda-bindings 13.5.0, driver 13.0", "13.0", "driver.py", 110, 8},
	{"bindings-13", "cuda-bindings 13.5.0, driver 13.5", "13.5", "driver.py", 110, 8},
	{"bindings-13", "cuda-core 1.2.2, driver 13.5", "13.5", "core.py", 13, 1},
	// It wants the version of a CUDA runtime, which that says of itself without a driver.
	{"numba bindings-13 cuda-13.5", "numba-cuda 0.30.4, driver 13.5", "13.5", "numba_layer.py", 33, 3},
}

// TestClientsOfTheDriver: they take memory in every form. With the shim, by whichever delivery, every call
// answers as without, but for those that ask for more than the limit; what they took is given back.
func TestClientsOfTheDriver(t *testing.T) {
	t.Parallel()
	for _, c := range driverClients {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			p := newPlace(t, c.cuda)
			var without did
			for _, delivery := range deliveries {
				t.Run(delivery, func(t *testing.T) {
					var d did
					defer func() {
						word := verdict(t)
						for _, call := range slices.Sorted(maps.Keys(d.Frontier)) {
							word += "; not " + call + ": it is NVIDIA's CUDA runtime that does it, which does not take this driver"
						}
						note(c.name, delivery, word)
					}()
					// More than the container has, less than the GPU.
					if err := p.python(delivery, c.set, c.program, &d, strconv.FormatUint(2*limit, 10)); err != nil {
						t.Fatal(err)
					}
					t.Logf("%d steps, %d too large; %v", len(d.Steps), len(d.Over), d.Views)
					if delivery == none {
						without = d
						d.succeeded(t)
					}
					for step, word := range without.Steps {
						if d.Steps[step] != word {
							t.Errorf("%s: %s, without the shim %s", step, d.Steps[step], word)
						}
					}
					if len(d.Steps) != len(without.Steps) || len(d.Steps) < c.steps || len(d.Over) < c.over {
						t.Errorf("%d steps, %d without the shim; %d too large", len(d.Steps), len(without.Steps), len(d.Over))
					}
					for call, word := range d.Frontier {
						if !strings.Contains(word, "cudaErrorSymbolNotFound") {
							t.Errorf("%s: %s: the frontier has moved", call, word)
						}
					}
					want := "CUDA_SUCCESS"
					if delivery != none {
						want = "CUDA_ERROR_OUT_OF_MEMORY"
						if d.Views["total"] != limit || d.Views["device total"] != limit {
							t.Errorf("total %d, of the device %d, want %d", d.Views["total"], d.Views["device total"], limit)
						}
					}
					for call, word := range d.Over {
						if word != want {
							t.Errorf("%s of more than the limit: %s, want %s", call, word, want)
						}
					}
				})
			}
		})
	}
}

// succeeded says which steps did not.
func (d did) succeeded(t *testing.T) {
	t.Helper()
	answers := []string{"CUDA_SUCCESS", "right", "CUDA_SUCCESS CUDA_SUCCESS", "0", "1", "5", "7", "(7, 5)"}
	for _, step := range slices.Sorted(maps.Keys(d.Steps)) {
		if !slices.Contains(answers, d.Steps[step]) {
			t.Errorf("%s: %s; free before %d, after %d", step, d.Steps[step], d.Views["free before"], d.Views["free after"])
		}
	}
}
