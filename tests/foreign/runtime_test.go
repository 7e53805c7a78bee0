// SPDX-License-Identifier: Apache-2.0

package foreign

import (
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/gpufence/gpufence/tests/simgpu/simtest"
)

// answer is what a driver says to one request of a CUDA runtime.
type answer struct {
	request        string // name, version, flags
	result, status int
	symbol         string // exported, or "-"
	library        string // that the symbol is in
}

// replay asks as a CUDA runtime did.
func (p *place) replay(t *testing.T, delivery, list, way string) []answer {
	t.Helper()
	command := []string{simtest.Dist(t, "simgpu/test/replay"), list}
	if way != "" {
		command = append(command, way)
	}
	text, err := p.run(delivery, command...)
	if err != nil {
		t.Fatal(err)
	}
	var all []answer
	for line := range strings.Lines(string(text)) {
		var a answer
		var name string
		var version, flags int
		if _, err := fmt.Sscan(line, &name, &version, &flags, &a.result, &a.status, &a.symbol, &a.library); err != nil {
			t.Fatalf("read %q: %v", line, err)
		}
		a.request = fmt.Sprintf("%s %d %d", name, version, flags)
		all = append(all, a)
	}
	return all
}

// hooked are the symbols that the shim has hooks for.
func hooked(t *testing.T) map[string]bool {
	t.Helper()
	text, err := os.ReadFile("../../shim/src/table.h")
	if err != nil {
		t.Fatal(err)
	}
	_, rows, ok := strings.Cut(string(text), "#define TABLE_HOOKED(ROW)")
	if !ok {
		t.Fatal("table.h has no TABLE_HOOKED")
	}
	rows, _, _ = strings.Cut(rows, "#define TABLE_CALLED(ROW)")
	out := map[string]bool{}
	for _, m := range regexp.MustCompile(`ROW\(CUDA, (\w+), `).FindAllStringSubmatch(rows, -1) {
		out[m[1]] = true
	}
	if len(out) < 90 {
		t.Fatalf("only %d hooks in table.h", len(out))
	}
	return out
}

// ways are those in which the function that answers is found: by dlsym; by its own answer to the question for
// itself; and the first variant, which old programs have.
var ways = map[string]string{"dlsym": "", "asked of itself": "asked", "first variant": "first"}

// TestRequestsOfTheRuntime: NVIDIA's CUDA runtime takes the whole driver by cuGetProcAddress, each name at a
// version and for one kind of default stream, before it calls anything. With the shim every request gets the
// result, the status and the variant that it gets without; what is answered is the shim's function where it
// has a hook for that variant, else the driver's own.
func TestRequestsOfTheRuntime(t *testing.T) {
	t.Parallel()
	hooks := hooked(t)
	for _, driver := range []string{"11.8", "12.4", "13.5"} {
		p := newPlace(t, driver)
		for _, runtime := range []string{"11.8", "12.4"} {
			name := fmt.Sprintf("requests of the CUDA runtime %s, driver %s", runtime, driver)
			for way, argument := range ways {
				list, err := filepath.Abs("../simgpu/testdata/runtime-" + runtime + ".txt")
				if err != nil {
					t.Fatal(err)
				}
				if driver == "11.8" && argument == "asked" {
					continue // such a driver has no second variant to answer with
				}
				var without []answer
				for _, delivery := range deliveries {
					t.Run(fmt.Sprintf("%s, %s, %s", name, way, delivery), func(t *testing.T) {
						defer func() { note(name, delivery, verdict(t)) }()
						got := p.replay(t, delivery, list, argument)
						if delivery == none {
							without = got
						}
						if len(got) != len(without) || len(got) < 380 {
							t.Fatalf("%d requests answered, %d without the shim", len(got), len(without))
						}
						found, ours := 0, 0
						driversOwn := filepath.Dir(simtest.Dist(t, "simgpu/libcuda.so.1"))
						for i, a := range got {
							w := without[i]
							if a.request != w.request || a.result != w.result || a.status != w.status || a.symbol != w.symbol {
								t.Errorf("%+v, without the shim %+v", a, w)
							}
							if a.result != 0 {
								continue
							}
							found++
							// Where the stub is, the driver's library lies behind it.
							dir := filepath.Dir(a.library)
							hook := dir != driversOwn && filepath.Base(dir) != "real"
							if hook {
								ours++
							}
							if want := delivery != none && hooks[a.symbol]; hook != want {
								t.Errorf("%s: answered %s in %s, want the shim's own: %v", a.request, a.symbol, a.library, want)
							}
						}
						t.Logf("%d requests, %d functions, %d of the shim", len(got), found, ours)
						if found < 370 || delivery != none && ours < 50 {
							t.Errorf("only %d functions, %d of the shim", found, ours)
						}
					})
				}
			}
		}
	}
}
