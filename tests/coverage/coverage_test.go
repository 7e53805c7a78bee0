// SPDX-License-Identifier: Apache-2.0

package coverage

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/gpufence/gpufence/tests/node"
	"github.com/gpufence/gpufence/tests/simgpu/simtest"
)

const (
	mib = uint64(1) << 20

	limit        = 512 * mib
	contextBytes = 64 * mib
	moduleBytes  = 4 * mib
	greenBytes   = contextBytes // what a green one is charged, too
	killSlack    = 64 * mib     // the default at this limit

	// perProcess is how many rows a process of the client goes through.
	perProcess = 12
)

// function is one exported variant of an entry point, as shim/cuda-functions.tsv lists them.
type function struct {
	symbol, base string
	version      int
	perThread    bool
}

// functions are all that CUDA drivers have had, by symbol.
func functions(t *testing.T) map[string]function {
	t.Helper()
	text, err := os.ReadFile("../../shim/cuda-functions.tsv")
	if err != nil {
		t.Fatal(err)
	}
	all := map[string]function{}
	for line := range strings.Lines(string(text)) {
		f := strings.Split(strings.TrimSpace(line), "\t")
		if strings.HasPrefix(line, "#") || len(f) < 4 {
			continue
		}
		version, err := strconv.Atoi(f[2])
		if err != nil {
			t.Fatalf("read %q: %v", line, err)
		}
		all[f[1]] = function{symbol: f[1], base: f[0], version: version, perThread: strings.HasSuffix(f[1], "_ptsz") || strings.HasSuffix(f[1], "_ptds")}
	}
	return all
}

// hooked are the CUDA symbols of the shim's table.
func hooked(t *testing.T) []string {
	t.Helper()
	text, err := os.ReadFile("../../shim/src/table.h")
	if err != nil {
		t.Fatal(err)
	}
	begin, end := strings.Index(string(text), "#define TABLE_HOOKED"), strings.Index(string(text), "#define TABLE_CALLED")
	if begin < 0 || end < begin {
		t.Fatal("find TABLE_HOOKED in table.h")
	}
	var out []string
	for _, m := range regexp.MustCompile(`ROW\(CUDA, (\w+),`).FindAllStringSubmatch(string(text)[begin:end], -1) {
		out = append(out, m[1])
	}
	if len(out) < 20 {
		t.Fatalf("only %d hooks in table.h", len(out))
	}
	return out
}

// Ways to find a function.
const (
	byName = "dlsym"
	byProc = "cuGetProcAddress"
)

var ways = []string{byName, byProc}

// cell is what one function did, found in one way, in one pass. Empty: right.
type cell struct {
	hooked               bool
	limited, freed, view string
	granted, room        uint64 // bytes taken; what was left of the limit then
}

const notRun = "not run"

// granule is the size below which nothing more can be got by a row.
func granule(row string) uint64 {
	switch {
	case strings.Contains(row, "/captured"), strings.Contains(row, "/host"), strings.Contains(row, "/numa"):
		return 2 * mib // a graph's block; what is beside
	case strings.HasPrefix(row, "cuMemFreeAsync"), strings.HasPrefix(row, "cuMemAllocAsync"), strings.HasPrefix(row, "cuMemAllocFromPoolAsync"), strings.HasPrefix(row, "cuMemPool"):
		return 32 * mib // a step of a pool
	case isContext(row):
		return contextBytes // a green one's, too
	case strings.HasPrefix(row, "cuModule"), strings.HasPrefix(row, "cuLibrary"):
		return moduleBytes
	}
	return 2 * mib
}

// isContext says that a row takes contexts.
func isContext(row string) bool {
	for _, name := range []string{"cuCtxCreate", "cuCtxAttach", "cuCtxDestroy", "cuCtxDetach", "cuGLCtxCreate", "cuVDPAUCtxCreate", "cuDevicePrimaryCtx", "cuGreenCtx"} {
		if strings.HasPrefix(row, name) {
			return true
		}
	}
	return false
}

// pass is one run over all rows.
type pass struct {
	name    string
	sim     []string
	context uint64 // what one is charged until one was seen
	moving  uint64 // by so much each living context may be larger or smaller than it was before
}

const (
	lateBytes, transientBytes = 16 * mib, 4 * mib
	guessBytes                = lateBytes + transientBytes // what policy guesses a context to be too large
)

var passes = []pass{
	{name: "lag 0", context: contextBytes, sim: []string{"--nvml-lag", "0s"}},
	{name: "lag 200 ms", context: contextBytes, sim: []string{"--nvml-lag", "200ms"}},
	{name: "late and transient", context: contextBytes + guessBytes, moving: lateBytes + transientBytes, sim: []string{
		"--nvml-lag", "200ms", "--late-bytes", fmt.Sprint(lateBytes), "--late-time", "1s",
		"--transient-bytes", fmt.Sprint(transientBytes), "--transient-time", "300ms",
	}},
}

// run is a pass under way.
type run struct {
	t      *testing.T
	ctx    context.Context
	pass   pass
	node   *node.Node
	c      *node.Container
	uuid   string
	p      *node.Process
	client string // in clients/
	rows   int    // that this process has gone through
	points int    // of its history that were looked at
	others int    // second processes that it has started
	peak   uint64 // of the GPU, up to the last look
}

func (p pass) start(t *testing.T) *run {
	t.Helper()
	return p.startWith(t, node.Spec{
		Name: "coverage", Limits: []string{fmt.Sprintf("memory.max=%dMi", limit/mib)}, Shim: true,
		Program: []string{"/bin/sleep", "600"},
		Env:     []string{"CUDA_MODULE_LOADING=EAGER"},
	})
}

func (p pass) startWith(t *testing.T, s node.Spec) *run {
	t.Helper()
	dist := filepath.Dir(filepath.Dir(simtest.Dist(t, "clients/coverage")))
	opts := node.Options{
		Dist: dist,
		Sim: append([]string{
			"--model", "t4", "--memory", "8GiB", "--context-bytes", "64MiB", "--second-context", "100", "--cuda-version", "13.5",
			"--module-bytes", fmt.Sprint(moduleBytes), "--green-bytes", fmt.Sprint(greenBytes),
		}, p.sim...),
		// An upper bound until a context was seen.
		Config: []string{fmt.Sprintf("context = \"%dMi\"", p.context/mib), fmt.Sprintf("module = \"%dMi\"", moduleBytes/mib)},
	}
	n, err := node.New(t.Context(), opts)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := n.Close(context.WithoutCancel(t.Context())); err != nil {
			t.Error(err)
		}
	})
	r := &run{t: t, ctx: t.Context(), pass: p, node: n, client: "coverage"}
	r.c, err = n.Start(t.Context(), s)
	if err != nil {
		t.Fatal(err)
	}
	state, err := n.Sim.State(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	r.uuid = state.GPUs[0].UUID
	return r
}

// fresh gives the next rows a process of their own, once the last one's memory is forgotten.
func (r *run) fresh() error {
	if r.p != nil {
		if err := errors.Join(r.p.Kill(), r.p.Await(r.ctx)); err != nil {
			return err
		}
	}
	r.p = nil
	err := node.Until(r.ctx, "nothing is charged", func() (bool, error) {
		v, err := r.c.View(r.ctx)
		return err == nil && v.GPUs[0].Current == 0 && v.GPUs[0].Ledger == 0 && v.GPUs[0].Dying == 0, err
	})
	if err != nil {
		return err
	}
	p, err := r.c.Exec(r.ctx, true, r.node.Dist("clients/"+r.client))
	if err != nil {
		return err
	}
	r.p, r.rows, r.points, r.others = p, 0, 0, 0
	// Until gpufenced has seen the last one's end, what it held still counts.
	return node.Until(r.ctx, "a context can be made", func() (bool, error) {
		reply, err := p.Ask(r.ctx, "context")
		return err == nil && reply.OK, err
	})
}

// held is what the simulated GPU has in use, all of it by this container, and the most since the last
// look: of the first process always, of all of them if it was more than ever before.
func (r *run) held() (now, most uint64, err error) {
	all, err := r.node.Sim.History(r.ctx, r.p.PID)
	if err != nil {
		return 0, 0, err
	}
	if len(all) != 1 {
		return 0, 0, fmt.Errorf("the simulated driver knows %d processes %d", len(all), r.p.PID)
	}
	points := all[0].Points
	for _, p := range points[min(r.points, len(points)):] {
		most = max(most, p.UsedBytes+p.ManagedBytes)
	}
	r.points = len(points)
	state, err := r.node.Sim.State(r.ctx)
	if err != nil {
		return 0, 0, err
	}
	g := state.GPUs[0]
	if g.PeakUsedBytes > r.peak {
		r.peak, most = g.PeakUsedBytes, max(most, g.PeakUsedBytes)
	}
	return g.UsedBytes, max(most, g.UsedBytes), nil
}

// view is everything that says how much memory there is.
type view struct{ free, used uint64 }

// apart says how far two numbers are from each other.
func apart(a, b uint64) uint64 { return max(a, b) - min(a, b) }

// tolerance is by how much what contexts take may have moved between two looks: by what each living
// one grows late or holds for a moment. Without these it is 0.
func (r *run) tolerance(contexts uint64) uint64 {
	return r.pass.moving * (1 + uint64(r.others) + contexts)
}

// look asks all of them, and says where they differ by more than a tolerance.
func (r *run) look(tolerance uint64) (v view, differ string, err error) {
	driver, err := r.p.Do(r.ctx, "view")
	if err != nil {
		return v, "", err
	}
	nvml, err := r.p.Do(r.ctx, "nvml "+r.uuid)
	if err != nil {
		return v, "", err
	}
	v = view{free: driver.FreeBytes, used: nvml.HeldBytes}
	switch {
	case driver.TotalBytes != limit:
		differ = fmt.Sprintf("cuMemGetInfo total %d", driver.TotalBytes)
	case driver.HeldBytes != limit:
		differ = fmt.Sprintf("cuDeviceTotalMem %d", driver.HeldBytes)
	case nvml.TotalBytes != limit:
		differ = fmt.Sprintf("NVML total %d", nvml.TotalBytes)
	case apart(nvml.FreeBytes, driver.FreeBytes) > tolerance:
		differ = fmt.Sprintf("free is %d to CUDA, %d to NVML", driver.FreeBytes, nvml.FreeBytes)
	case nvml.FreeBytes+nvml.HeldBytes != limit && (tolerance == 0 || nvml.FreeBytes != 0):
		differ = fmt.Sprintf("NVML free %d + used %d", nvml.FreeBytes, nvml.HeldBytes)
	case nvml.Refused != 0 && tolerance == 0:
		differ = "NVML v1 and v2 differ"
	}
	return v, differ, nil
}

// agreed waits until gpufenced, and the container's file, say the same as the program sees, to
// within a tolerance.
func (r *run) agreed(used, tolerance uint64) (string, error) {
	var last string
	deadline := time.Now().Add(3 * time.Second)
	for {
		api, err := r.c.View(r.ctx)
		if err != nil {
			return "", err
		}
		text, err := os.ReadFile(r.c.File("memory.current"))
		if err != nil {
			return "", err
		}
		f := strings.Fields(string(text))
		var file uint64
		if len(f) > 0 {
			if file, err = strconv.ParseUint(f[len(f)-1], 10, 64); err != nil {
				return "", fmt.Errorf("read memory.current %q: %w", text, err)
			}
		}
		switch {
		case apart(api.GPUs[0].Current, used) > tolerance:
			last = fmt.Sprintf("inspect says %d, the program sees %d", api.GPUs[0].Current, used)
		case len(f) == 0 || apart(file, used) > tolerance:
			last = fmt.Sprintf("memory.current says %q, the program sees %d", f, used)
		default:
			return "", nil
		}
		if time.Now().After(deadline) {
			return last, nil
		}
		select {
		case <-time.After(10 * time.Millisecond):
		case <-r.ctx.Done():
			return "", r.ctx.Err()
		}
	}
}

// guessed is by how much contexts may be charged too much, as long as their size is a guess.
func (r *run) guessed(contexts uint64) uint64 {
	return (r.pass.context - contextBytes) * (1 + uint64(r.others) + contexts)
}

// one runs a row and judges it.
func (r *run) one(row string, f function, way string) (c cell) {
	c = cell{limited: notRun, freed: notRun, view: notRun}
	broken := func(err error) cell {
		for _, s := range []*string{&c.limited, &c.freed, &c.view} {
			if *s == notRun {
				*s = err.Error()
			}
		}
		r.rows = perProcess // a new process for the next
		return c
	}
	if r.p == nil || r.rows >= perProcess {
		if err := r.fresh(); err != nil {
			return broken(err)
		}
	}
	r.rows++
	ready, err := r.p.Do(r.ctx, "prepare "+row)
	if err != nil {
		return broken(err)
	}
	r.others = int(ready.Allocs)
	base, _, err := r.held()
	if err != nil {
		return broken(err)
	}
	ask := "begin " + row + " dlsym"
	if way == byProc {
		flags := 0
		if f.perThread {
			flags = 2
		}
		ask = fmt.Sprintf("begin %s proc %s %d %d", row, f.base, f.version, flags)
	}
	before, differ, err := r.look(r.tolerance(0))
	if err != nil {
		return broken(err)
	}
	begun, err := r.p.Ask(r.ctx, ask)
	if err == nil && !begun.OK {
		err = errors.New(begun.Why)
	}
	if err != nil {
		return broken(err)
	}
	c.hooked = begun.Allocs == 1
	filled, err := r.p.Ask(r.ctx, "fill")
	if err != nil {
		return broken(err)
	}
	now, most, err := r.held()
	if err != nil {
		return broken(err)
	}
	c.granted = filled.GrantedBytes
	var contexts uint64
	if isContext(row) {
		contexts = filled.Allocs + 1 // a green one's primary
	}
	tolerance := r.tolerance(contexts)
	bound := limit
	if r.pass.moving != 0 {
		bound += killSlack
	}
	if now < limit {
		c.room = limit - now
	}
	switch {
	case most > bound:
		c.limited = fmt.Sprintf("%d bytes above the limit were held", most-limit)
	case !filled.OK:
		c.limited = "ended otherwise: " + filled.Why
	case c.room > max(granule(row), (limit-base)/1000)+tolerance+r.guessed(contexts):
		c.limited = fmt.Sprintf("refused with %d bytes left", c.room)
	default:
		c.limited = ""
	}
	full, fullDiffer, err := r.look(tolerance)
	if err != nil {
		return broken(err)
	}
	notAgreed, err := r.agreed(full.used, tolerance)
	if err != nil {
		return broken(err)
	}
	c.view = first(differ, fullDiffer, notAgreed)
	if c.view == "" && (full.used+tolerance < now || full.used > now+granule(row)+tolerance+r.guessed(contexts)) {
		c.view = fmt.Sprintf("%d are shown as used, %d are", full.used, now)
	}
	gave, err := r.p.Ask(r.ctx, "give")
	if err == nil && !gave.OK {
		err = errors.New(gave.Why)
	}
	if err != nil {
		return broken(err)
	}
	after, _, err := r.held()
	if err != nil {
		return broken(err)
	}
	again, _, err := r.look(r.tolerance(0))
	for until := time.Now().Add(3 * time.Second); err == nil && r.others > 0 && again != before && time.Now().Before(until); {
		// What an importer kept for longer than its owner counts as excess for a sample or two.
		time.Sleep(10 * time.Millisecond)
		again, _, err = r.look(r.tolerance(0))
	}
	if err != nil {
		return broken(err)
	}
	switch left := r.tolerance(0); {
	case apart(after, base) > left:
		c.freed = fmt.Sprintf("%d bytes are held, %d before", after, base)
	case apart(again.used, before.used) > left || apart(again.free, before.free) > left:
		c.freed = fmt.Sprintf("%d bytes are charged, %d before", again.used, before.used)
	default:
		c.freed = ""
	}
	if c.freed != "" {
		r.rows = perProcess
	}
	if !r.p.Alive() {
		return broken(errors.New("it was killed"))
	}
	return c
}

func first(all ...string) string {
	for _, s := range all {
		if s != "" {
			return s
		}
	}
	return ""
}

// rows are the client's, read from its source.
func rows(t *testing.T) []string {
	t.Helper()
	var out []string
	for _, file := range []string{"client/rows.h", "client/more_rows.h"} {
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		n := len(out)
		for _, m := range regexp.MustCompile(`(?m)^\t\{ "(\w[\w/]*)", take_`).FindAllStringSubmatch(string(text), -1) {
			out = append(out, m[1])
		}
		all := len(regexp.MustCompile(`(?m)^\t\{ "[^"]*", [a-z]`).FindAllString(string(text), -1))
		if len(out)-n < 20 || len(out)-n != all {
			t.Fatalf("read %d rows of %d in %s", len(out)-n, all, file)
		}
	}
	return out
}

// symbolOf is the row's function: behind a slash stands how it is used.
func symbolOf(row string) string {
	name, _, _ := strings.Cut(row, "/")
	return name
}

type key struct{ row, way, pass string }

// TestCoverage runs every row in every way and every pass, prints and writes the table, and fails
// where a cell is not right.
func TestCoverage(t *testing.T) {
	all := functions(t)
	names := rows(t)
	cells := map[key]cell{}
	var mu sync.Mutex
	t.Run("passes", func(t *testing.T) {
		for _, p := range passes {
			t.Run(p.name, func(t *testing.T) {
				t.Parallel()
				r := p.start(t)
				for _, row := range names {
					symbol := symbolOf(row)
					f, known := all[symbol]
					if !known {
						t.Errorf("%s is no function of the driver", symbol)
						continue
					}
					for _, way := range ways {
						c := r.one(row, f, way)
						mu.Lock()
						cells[key{row, way, p.name}] = c
						mu.Unlock()
						for what, wrong := range map[string]string{"limited": c.limited, "freed": c.freed, "view": c.view} {
							if wrong != "" {
								t.Errorf("%s by %s: %s: %s", row, way, what, wrong)
							}
						}
					}
				}
				if t.Failed() {
					t.Log(r.node.DaemonLog())
				}
			})
		}
	})
	for _, row := range names {
		for _, way := range ways {
			for _, p := range passes {
				c, ok := cells[key{row, way, p.name}]
				if !ok || c.limited == notRun || c.freed == notRun || c.view == notRun {
					t.Errorf("%s by %s, %s: a cell is empty", row, way, p.name)
				}
			}
		}
	}
	table := report(names, cells)
	t.Log("\n" + table)
	out := filepath.Join(filepath.Dir(filepath.Dir(simtest.Dist(t, "clients/coverage"))), "shim-coverage.md")
	if err := os.WriteFile(out, []byte(table), 0o644); err != nil {
		t.Error(err)
	}
}

// report is the table in Markdown.
func report(names []string, cells map[key]cell) string {
	var b strings.Builder
	word := func(wrong string) string {
		if wrong == "" {
			return "ok"
		}
		return "**" + strings.ReplaceAll(wrong, "|", "/") + "**"
	}
	fmt.Fprintf(&b, "# What the shim covers\n\nEvery entry point that takes device memory, under a limit of %d MiB on the simulated GPU. Written by tests/coverage.\n\n", limit/mib)
	fmt.Fprintf(&b, "- behind a slash: how it is used. Where a function takes nothing itself (graphics, memory of the host), memory of cuMemAlloc is taken beside it; where memory is shared, a second process is the owner or the importer\n")
	fmt.Fprintf(&b, "- hooked: by the shim; or it takes nothing itself, and what takes is hooked: a launch for a graph's node, the creation for an import\n")
	fmt.Fprintf(&b, "- limited: refused at the limit, never above it, with less than 0.1 %% or one granule left\n- freed: back at exactly what it was before, on the GPU and in the account\n- view right: cuMemGetInfo, cuDeviceTotalMem, NVML 1 and 2, memory.current and gpufence inspect agree, and are within one granule of what the GPU has in use\n")
	fmt.Fprintf(&b, "- late and transient: each context grows by %d MiB in its first second and holds %d MiB more for 300 ms, and until one was seen is charged %d MiB too much. So nothing is held above limit + %d MiB (kill-slack) and nobody is killed; freed and view may be off by %d MiB for each context that lives (what it may have moved between two looks), limited by the guess besides\n\n",
		lateBytes/mib, transientBytes/mib, guessBytes/mib, killSlack/mib, (lateBytes+transientBytes)/mib)
	fmt.Fprintf(&b, "| function | hooked | found by | pass | taken MiB | left MiB | limited | freed | view right |\n| --- | --- | --- | --- | ---: | ---: | --- | --- | --- |\n")
	for _, row := range names {
		for _, way := range ways {
			for _, p := range passes {
				c, ok := cells[key{row, way, p.name}]
				if !ok {
					c = cell{limited: notRun, freed: notRun, view: notRun}
				}
				fmt.Fprintf(&b, "| %s | %s | %s | %s | %.1f | %.1f | %s | %s | %s |\n", row, map[bool]string{true: "yes", false: "what it leads to"}[c.hooked], way, p.name,
					float64(c.granted)/float64(mib), float64(c.room)/float64(mib), word(c.limited), word(c.freed), word(c.view))
			}
		}
	}
	return b.String()
}

// others are the hooked functions that are no row, each with the reason.
var others = map[string]string{
	"cuMemAdvise":                            "says where managed memory is to be; tested by TestSwap",
	"cuMemAdvise_v2":                         "says where managed memory is to be; tested by TestSwap",
	"cuMemPrefetchAsync":                     "says where managed memory is to be; tested by TestSwap",
	"cuMemPrefetchAsync_ptsz":                "says where managed memory is to be; tested by TestSwap",
	"cuMemPrefetchAsync_v2":                  "says where managed memory is to be; tested by TestSwap",
	"cuMemPrefetchAsync_v2_ptsz":             "says where managed memory is to be; tested by TestSwap",
	"cuMemPrefetchBatchAsync":                "says where managed memory is to be; tested by TestSwap",
	"cuMemPrefetchBatchAsync_ptsz":           "says where managed memory is to be; tested by TestSwap",
	"cuMemDiscardAndPrefetchBatchAsync":      "says where managed memory is to be; tested by TestSwap",
	"cuMemDiscardAndPrefetchBatchAsync_ptsz": "says where managed memory is to be; tested by TestSwap",
	"cuDeviceTotalMem":                       "shows",
	"cuDeviceTotalMem_v2":                    "shows",
	"cuGetProcAddress":                       "finds",
	"cuGetProcAddress_ptsz":                  "finds",
	"cuGetProcAddress_v2":                    "finds",
	"cuGetProcAddress_v2_ptsz":               "finds",
	"cuInit":                                 "takes nothing",
	"cuMemGetInfo":                           "shows",
	"cuMemGetInfo_v2":                        "shows",
	"cuMemPoolCreate":                        "takes nothing until something is allocated from it",
}

// takesNothing is what the name of a function says that needs no row: it gives back, shows, finds, or
// says where something is to be. Whatever else the shim hooks takes memory, or keeps it.
var takesNothing = regexp.MustCompile(`Free|Destroy|Release|Unload|Unbind|Unmap|Trim|Detach|Reset|GetInfo|TotalMem|GetProcAddress|Init$|Advise|Prefetch|PoolCreate$|^cuLaunch`)

// TestEveryHookHasARow: whoever hooks another function says here what it does to memory, and one that
// takes or keeps some has a row.
func TestEveryHookHasARow(t *testing.T) {
	has := map[string]bool{}
	for _, row := range rows(t) {
		has[symbolOf(row)] = true
	}
	is := map[string]bool{}
	for _, h := range hooked(t) {
		is[h] = true
		if reason, ok := others[h]; ok == has[h] {
			t.Errorf("%s: in the table %v, in others %q: exactly one of them it must be in", h, has[h], reason)
		}
		if !has[h] && !takesNothing.MatchString(h) {
			t.Errorf("%s takes memory, by its name, and has no row", h)
		}
	}
	for o := range others {
		if !is[o] {
			t.Errorf("%s is not hooked", o)
		}
	}
	all := functions(t)
	for row := range has {
		if _, ok := all[row]; !ok {
			t.Errorf("%s is no function of the driver", row)
		}
	}
	// What is not hooked because it only leads to memory has rows too, in every variant.
	for symbol := range all {
		if leadsToMemory.MatchString(symbol) && !has[symbol] && !noRow[symbol] {
			t.Errorf("%s shares, maps or registers memory and has no row", symbol)
		}
	}
}

// leadsToMemory are the families that the shim leaves to the driver, since what they show was charged
// when it was made.
var leadsToMemory = regexp.MustCompile(`^cu(Ipc(Get|Open|Close)MemHandle|Mem(Export|Import)\w*Handle|MemPool(Export|Import)|ImportExternalMemory|ExternalMemoryGet|Graphics\w*(Register|GetMapped|MapResources)|GL(Register|Map)Buffer|GraphAdd(MemAlloc)?Node)`)

// noRow are those that the simulated driver has not, or that let go.
var noRow = map[string]bool{"cuGraphicsResourceGetMappedEglFrame": true, "cuGraphicsUnmapResources": true, "cuGraphicsUnmapResources_ptsz": true, "cuGraphicsUnregisterResource": true}
