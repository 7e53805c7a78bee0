// SPDX-License-Identifier: Apache-2.0

package foreign

import (
	"debug/dwarf"
	"fmt"
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

// pointers are the pointer types of cudaTypedefs.h: base name, then version.
func pointers(ts *types, flag int) map[string]map[int]dwarf.Type {
	out := map[string]map[int]dwarf.Type{}
	name := regexp.MustCompile(`^PFN_(cu\w+?)_v(\d+)(_ptds|_ptsz)?$`)
	for n, typ := range ts.named {
		m := name.FindStringSubmatch(n)
		if m == nil || (m[3] != "") != (flag == perThread) {
			continue
		}
		v, err := strconv.Atoi(m[2])
		if err != nil {
			continue
		}
		if out[m[1]] == nil {
			out[m[1]] = map[int]dwarf.Type{}
		}
		out[m[1]][v] = typ
	}
	return out
}

const perThread = 2 // the flag of cuGetProcAddress

// staysBehind are names that stand for an older variant in some cuda.h than the newest that its own
// cudaTypedefs.h knows, so that old programs still compile; cuGraphInstantiate for a function of another name.
var staysBehind = map[string]bool{
	"cuCtxCreate": true, "cuGetProcAddress": true, "cuGraphAddNode": true, "cuGraphInstantiate": true, "cuLaunchHostFunc": true,
	"cuMemPrefetchAsync": true, "cuStreamBatchMemOp": true, "cuStreamGetCaptureInfo": true, "cuStreamGetCtx": true,
	"cuStreamUpdateCaptureDependencies": true, "cuStreamWaitValue32": true, "cuStreamWaitValue64": true,
	"cuStreamWriteValue32": true, "cuStreamWriteValue64": true,
}

// answers asks the simulated driver what is behind names: the exported symbol, or "-".
func answers(t *testing.T, driver string, names []string, version, flag int) map[string]string {
	t.Helper()
	dir, _ := simtest.Start(t, "--cuda-version", driver)
	var list strings.Builder
	for _, n := range names {
		fmt.Fprintf(&list, "%s %d %d\n", n, version, flag)
	}
	place := filepath.Join(t.TempDir(), "list")
	if err := os.WriteFile(place, []byte(list.String()), 0o600); err != nil {
		t.Fatal(err)
	}
	cmd := exec.CommandContext(t.Context(), simtest.Dist(t, "simgpu/test/replay"), place)
	cmd.Env = append(os.Environ(), "SIMGPU_DIR="+dir, "LD_LIBRARY_PATH="+simtest.Dist(t, "simgpu"))
	text, err := cmd.Output()
	if err != nil {
		t.Fatalf("replay: %v\n%s", err, text)
	}
	out := map[string]string{}
	for line := range strings.Lines(string(text)) {
		f := strings.Fields(line)
		if len(f) != 7 {
			t.Fatalf("read %q", line)
		}
		out[f[0]] = f[5]
	}
	return out
}

// TestNamesOfTheHeaders: what cuGetProcAddress answers for a version has the arguments of the newest
// pointer type that NVIDIA's header of that version knows, on a driver of that version as on the
// newest one; and what a program gets that is compiled with the header is exported, and the same one
// but for those in staysBehind.
func TestNamesOfTheHeaders(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		header string
		ask    int // 0: the header's own
	}{{"11.8", 11000}, {"11.8", 0}, {"12.0", 0}, {"12.4", 0}, {"12.8", 0}, {"13.0", 0}, {"13.5", 0}} {
		h := cudaHeader(t, c.header)
		ask := c.ask
		if ask == 0 {
			ask = h.version
		}
		macros := h.macros(t)
		for _, flag := range []int{0, perThread} {
			for _, driver := range slices.Compact([]string{c.header, "13.5"}) {
				t.Run(fmt.Sprintf("%d flag %d driver %s", ask, flag, driver), func(t *testing.T) {
					h.names(t, driver, ask, flag, macros)
				})
			}
		}
	}
}

// macros are what names stand for in a program that includes cuda.h.
func (h *header) macros(t *testing.T) map[string]string {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(h.dir, "cuda.h"))
	if err != nil {
		t.Fatal(err)
	}
	out := map[string]string{}
	for _, m := range regexp.MustCompile(`(?m)^\s*#\s*define\s+(cu[A-Z]\w*)\s+(?:__CUDA_API_PT[DS][SZ]\()?(cu\w+)\)?`).FindAllStringSubmatch(string(text), -1) {
		// The first one counts: later ones are those of old programs.
		if _, ok := out[m[1]]; !ok {
			out[m[1]] = m[2]
		}
	}
	return out
}

func (h *header) names(t *testing.T, driver string, ask, flag int, macros map[string]string) {
	t.Helper()
	known := pointers(h.types(t, nil), flag)
	want := map[string]dwarf.Type{}
	var names []string
	for base, versions := range known {
		newest := 0
		for v := range versions {
			if v <= ask {
				newest = max(newest, v)
			}
		}
		if newest != 0 {
			want[base] = versions[newest]
			names = append(names, base)
		}
	}
	slices.Sort(names)
	got := answers(t, driver, names, ask, flag)
	var probe []string
	for _, n := range names {
		if h.symbols[got[n]] {
			probe = append(probe, got[n])
		}
	}
	slices.Sort(probe)
	probe = slices.Compact(probe)
	ts := h.types(t, probe)
	compared, same := 0, 0
	for _, n := range names {
		symbol := got[n]
		if symbol == "-" {
			t.Errorf("%s at %d: not found", n, ask)
			continue
		}
		if !strings.HasPrefix(symbol, n) {
			t.Errorf("%s at %d: answered with %s", n, ask, symbol)
		}
		if flag == perThread != (strings.HasSuffix(symbol, "_ptsz") || strings.HasSuffix(symbol, "_ptds")) {
			t.Errorf("%s at %d, flag %d: answered with %s", n, ask, flag, symbol)
		}
		if f := ts.pointed(symbol); f != nil {
			p, ok := bare(want[n]).(*dwarf.PtrType)
			if !ok {
				t.Errorf("PFN_%s is no pointer", n)
				continue
			}
			pf, ok := bare(p.Type).(*dwarf.FuncType)
			if !ok {
				t.Errorf("PFN_%s is no pointer to a function", n)
				continue
			}
			compared++
			if err := samePrototype(f, pf); err != nil {
				t.Errorf("%s at %d: answered with %s: %v", n, ask, symbol, err)
			}
		}
		target, ok := macros[n]
		if !ok || ask != h.version || flag != 0 {
			continue
		}
		if target != symbol && !staysBehind[n] {
			t.Errorf("%s at %d: answered with %s, cuda.h means %s", n, ask, symbol, target)
		} else if target == symbol {
			same++
		}
	}
	t.Logf("%d names, %d prototypes compared, %d macros", len(names), compared, same)
	least := 280
	if flag == perThread {
		least = 40
	}
	if len(names) < least || compared < least*9/10 {
		t.Errorf("only %d names, %d prototypes compared", len(names), compared)
	}
}
