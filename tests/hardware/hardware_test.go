// SPDX-License-Identifier: Apache-2.0

package hardware

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/gpufence/gpufence/tests/demo"
	"github.com/gpufence/gpufence/tests/simgpu/guesses"
	"github.com/gpufence/gpufence/tests/simgpu/simtest"
)

// dist is what was built.
func dist(t *testing.T) string {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Fatal("cgroups need root")
	}
	return filepath.Dir(filepath.Dir(simtest.Dist(t, "hardware/probe")))
}

// python is the interpreter itself: a wrapper that looks for it may take seconds.
func python(t *testing.T) string {
	t.Helper()
	out, err := exec.CommandContext(t.Context(), "python3", "-c", "import sys; print(sys.executable)").Output()
	if err != nil {
		if os.Getenv("GPUFENCE_MUST") == "1" {
			t.Fatalf("find python3: %v", err)
		}
		t.Skipf("SKIP: no python3: %v", err)
	}
	return strings.TrimSpace(string(out))
}

// shortTemp is a temporary folder of a short path: a socket's has 108 bytes.
func shortTemp(t *testing.T) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "hw-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := os.RemoveAll(dir); err != nil {
			t.Error(err)
		}
	})
	return dir
}

func readReport(t *testing.T, dir string) *Report {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(dir, "gpu-report.json"))
	if err != nil {
		t.Fatal(err)
	}
	var r Report
	if err := json.Unmarshal(text, &r); err != nil {
		t.Fatal(err)
	}
	return &r
}

func fakes(t *testing.T) string {
	t.Helper()
	dir, err := filepath.Abs("testdata/fakes")
	if err != nil {
		t.Fatal(err)
	}
	return dir
}

// TestWholeRunOnTheSimulatedGPU: what make test-gpu runs, out of its folder alone, to its end. Stand-ins play
// PyTorch, CuPy and JAX.
func TestWholeRunOnTheSimulatedGPU(t *testing.T) {
	dist, place, out, tmp := dist(t), shortTemp(t), t.TempDir(), shortTemp(t)
	folder := filepath.Join(place, "test-gpu")
	if said, err := exec.CommandContext(t.Context(), "./bundle", dist, folder).CombinedOutput(); err != nil {
		t.Fatalf("bundle: %v: %s", err, said)
	}
	cmd := exec.CommandContext(t.Context(), filepath.Join(folder, "run"), "--quick", "--simulated", "--out", out, "--python", python(t))
	cmd.Dir = "/"
	cmd.Env = []string{"PATH=" + os.Getenv("PATH"), "HOME=/nonexistent", "TMPDIR=" + tmp, "PYTHONPATH=" + fakes(t), "PYTHONDONTWRITEBYTECODE=1"}
	said, err := cmd.CombinedOutput()
	t.Logf("%s", said)
	if err != nil {
		t.Errorf("run: %v", err)
	}
	if bytes.Count(said, []byte(noGPU)) < 2 {
		t.Errorf("it does not say clearly, at its beginning and at its end, that there was no real GPU")
	}
	r := readReport(t, out)
	if !r.Simulated || r.Seconds <= 0 || len(r.Failed()) != 0 {
		t.Errorf("simulated %v, %.1f s, failed %v", r.Simulated, r.Seconds, r.Failed())
	}
	md, err := os.ReadFile(filepath.Join(out, "gpu-report.md"))
	if err != nil || !strings.Contains(string(md), noGPU) {
		t.Errorf("the report for people: %v", err)
	}
	passed := map[string]int{}
	for _, row := range r.Rows {
		if row.Verdict == Pass {
			passed[row.Suite]++
		}
		if row.Verdict == Fail {
			t.Errorf("%s: %s: %s", row.Suite, row.Name, row.Detail)
		}
	}
	for suite, least := range map[string]int{"guesses": 28, "limits": len(scenes), "coverage": 40, "programs": 5, "demo": 20, "bench": 1} {
		if passed[suite] < least {
			t.Errorf("%s: %d rows passed, want at least %d", suite, passed[suite], least)
		}
	}
	// Every guess has an entry, and what the simulated GPU says of itself is what it is documented to do.
	seen := map[string]Answer{}
	for _, a := range r.Answers {
		seen[a.ID] = a
	}
	all, err := guesses.All()
	if err != nil {
		t.Fatal(err)
	}
	for _, g := range all {
		a, ok := seen[g.ID]
		if !ok || a.Verdict == Pass && len(a.Seen) == 0 || a.Verdict != Pass && a.Why == "" {
			t.Errorf("guess %s: %+v", g.ID, a)
		}
	}
	for id, want := range map[string]map[string]string{
		"context-size":    {"context_bytes": fmt.Sprint(104 * mib), "listed": "1"},
		"rounding":        {"1_bytes": fmt.Sprint(2 * mib), "2MiB+1_bytes": fmt.Sprint(4 * mib), "distance_1": "512"},
		"pool-step":       {"reserved_after_1": fmt.Sprint(32 * mib), "reserved_after_synchronize": "0"},
		"green-size":      {"green_bytes": fmt.Sprint(16 * mib)},
		"small-first-fit": {"first_gap": "1"},
		"free-null":       {"without_context": "CUDA_SUCCESS"},
		"visible-twice":   {"init": "CUDA_ERROR_NO_DEVICE"},
		"proc-addresses":  {"not_exported": "0", "other_exported": "0"},
	} {
		for k, v := range want {
			if got := fmt.Sprintf("%.0f", seen[id].Seen[k]); got != v && fmt.Sprint(seen[id].Seen[k]) != v {
				t.Errorf("%s: %s is %v, want %s", id, k, seen[id].Seen[k], v)
			}
		}
	}
	if left, err := os.ReadDir(tmp); err != nil || len(left) != 0 {
		t.Errorf("left in %s: %v, %v", tmp, left, err)
	}
}

// TestEveryGuessHasARecorder, and nothing is recorded that nobody asked for.
func TestEveryGuessHasARecorder(t *testing.T) {
	out, err := exec.CommandContext(t.Context(), filepath.Join(dist(t), "hardware/probe"), "--list").Output()
	if err != nil {
		t.Fatal(err)
	}
	probes := lines(out)
	all, err := guesses.All()
	if err != nil {
		t.Fatal(err)
	}
	wanted := map[string]bool{"machine": true, "take-ways": true, "pair-cost": true}
	for _, g := range all {
		wanted[g.ID] = true
		if _, ok := recorders[g.ID]; !ok && !slices.Contains(probes, g.ID) {
			t.Errorf("nothing records the guess %s", g.ID)
		}
	}
	for _, a := range also {
		wanted[a.id] = true
		if !slices.Contains(probes, a.id) {
			t.Errorf("no probe %s", a.id)
		}
	}
	for _, p := range probes {
		if !wanted[p] {
			t.Errorf("nobody asks for the probe %s", p)
		}
	}
	for id := range recorders {
		if !wanted[id] {
			t.Errorf("nobody asks for the recorder %s", id)
		}
	}
}

// play runs some suites on a simulated GPU of some kind.
func play(t *testing.T, opts Options) *Report {
	t.Helper()
	if opts.Dir == "" {
		opts.Dir = dist(t)
	}
	opts.Simulated, opts.Quick, opts.Story = true, true, testWriter{t}
	r, err := Run(t.Context(), opts)
	if err != nil {
		t.Fatal(err)
	}
	return r
}

type testWriter struct{ t *testing.T }

func (w testWriter) Write(b []byte) (int, error) {
	w.t.Log(strings.TrimRight(string(b), "\n"))
	return len(b), nil
}

func answerOf(t *testing.T, r *Report, id string) Answer {
	t.Helper()
	for _, a := range r.Answers {
		if a.ID == id {
			return a
		}
	}
	t.Fatalf("no answer %s", id)
	return Answer{}
}

// TestOtherMachines: drivers and GPUs that a real machine may have, as far as they can be simulated.
func TestOtherMachines(t *testing.T) {
	for _, tt := range []struct {
		name    string
		opts    Options
		answers map[string]Verdict
		missing string // what rows with containers say
	}{
		{"a driver that limits cgroups", Options{Only: []string{"guesses", "limits"}, SimNVML: "simgpu/r615", Sim: []string{"--driver-version", "615.71.09", "--cuda-version", "13.4", "--memory-limits", "misc"}},
			map[string]Verdict{"limit-code": Pass, "context-size": Pass}, ""},
		{"MIG", Options{Only: []string{"guesses", "limits"}, Sim: []string{"--model", "a100", "--memory", "40GiB", "--mig", "2"}},
			map[string]Verdict{"mig-profiles": Pass, "mig-minor": Pass, "mig-beside-whole": Impossible, "rounding": Pass}, "MIG mode"},
		{"large contexts", Options{Only: []string{"limits", "coverage"}, Sim: []string{"--model", "h100", "--memory", "80GiB"}}, nil, ""},
		{"no sizes of processes", Options{Only: []string{"limits"}, Sim: []string{"--unknown", "process"}}, nil, "does not tell"},
		{"NVML is late", Options{Only: []string{"guesses"}, Sim: []string{"--free-lag", "300ms"}}, map[string]Verdict{"nvml-lag": Pass}, ""},
	} {
		t.Run(tt.name, func(t *testing.T) {
			r := play(t, tt.opts)
			for id, want := range tt.answers {
				if a := answerOf(t, r, id); a.Verdict != want {
					t.Errorf("%s: %s (%s), want %s", id, a.Verdict, a.Why, want)
				}
			}
			for _, row := range r.Rows {
				if row.Verdict == Fail {
					t.Errorf("%s: %s: %s", row.Suite, row.Name, row.Detail)
				}
				if tt.missing != "" && row.Suite == "limits" && row.Verdict == Impossible && !strings.Contains(row.Detail, tt.missing) {
					t.Errorf("%s: %s, want %q", row.Name, row.Detail, tt.missing)
				}
			}
			if tt.missing != "" && r.Count(Impossible) == 0 {
				t.Error("every row was possible")
			}
			// What is recorded is what the driver does, not what was hoped for.
			if slices.Contains(tt.opts.Sim, "--free-lag") {
				if us := number(answerOf(t, r, "nvml-lag").Seen["kill_to_used_back_1_us"]); us < 300_000 {
					t.Errorf("memory that is let go 300 ms after an end was seen to be free after %d us", us)
				}
			}
		})
	}
}

// TestShimThatDoesNothingFails: the rows that must hold do not, and the run says so.
func TestShimThatDoesNothingFails(t *testing.T) {
	built, dir := dist(t), shortTemp(t)
	for _, name := range []string{"bin", "clients", "hardware", "simgpu", "bench"} {
		if err := os.Symlink(filepath.Join(built, name), filepath.Join(dir, name)); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Mkdir(filepath.Join(dir, "lib"), 0o755); err != nil {
		t.Fatal(err)
	}
	// Any library that hooks nothing.
	text, err := os.ReadFile(filepath.Join(built, "hardware/libioctls.so"))
	if err == nil {
		err = os.WriteFile(filepath.Join(dir, "lib/libgpufence.so"), text, 0o755)
	}
	if err != nil {
		t.Fatal(err)
	}
	r := play(t, Options{Dir: dir, Only: []string{"limits"}})
	for _, row := range r.Rows {
		if strings.Contains(row.Name, "with the shim") && row.Verdict != Fail {
			t.Errorf("%s: %s (%s)", row.Name, row.Verdict, row.Detail)
		}
	}
	if len(r.Failed()) == 0 {
		t.Error("nothing failed")
	}
}

// TestNoPython: rows that need it say so, and fail nothing.
func TestNoPython(t *testing.T) {
	r := play(t, Options{Only: []string{"programs"}, Python: "python-that-is-not-there"})
	if len(r.Failed()) != 0 || r.Count(Impossible) != 5 {
		t.Errorf("failed %v; %d not possible", r.Failed(), r.Count(Impossible))
	}
	for _, row := range r.Rows {
		if !strings.Contains(row.Detail, "python-that-is-not-there") {
			t.Errorf("%s: %s", row.Name, row.Detail)
		}
	}
}

// TestNoTimeFails: what there is no time for is no success. The time is over once the first row has passed, on a
// machine however slow.
func TestNoTimeFails(t *testing.T) {
	ctx, cancel := context.WithCancelCause(t.Context())
	defer cancel(nil)
	story := storyteller(func(line string) {
		if strings.HasPrefix(line, "ok - limits: ") {
			cancel(errTime)
		}
	})
	r, err := Run(ctx, Options{Dir: dist(t), Only: []string{"limits"}, Simulated: true, Quick: true, Story: story})
	if err != nil {
		t.Fatal(err)
	}
	if len(r.Rows) != len(scenes) || r.Rows[0].Verdict != Pass {
		t.Fatalf("rows %+v", r.Rows)
	}
	for _, row := range r.Rows[1:] {
		if row.Verdict != Fail || !strings.Contains(row.Detail, errTime.Error()) {
			t.Errorf("%+v", row)
		}
	}
	// No time at all is no run.
	if r, err := Run(t.Context(), Options{Dir: dist(t), Simulated: true, Timeout: time.Nanosecond}); r != nil || err == nil {
		t.Errorf("%+v, %v", r, err)
	}
}

// storyteller hears the lines of a run while it is under way.
type storyteller func(line string)

func (s storyteller) Write(b []byte) (int, error) {
	s(string(b))
	return len(b), nil
}

// TestInterruptedRunLeavesNothing: no process, no folder, and what was seen is written.
func TestInterruptedRunLeavesNothing(t *testing.T) {
	tmp, out := shortTemp(t), t.TempDir()
	cmd := exec.CommandContext(t.Context(), filepath.Join(dist(t), "bin/test-gpu"), "--simulated", "--only", "guesses,limits", "--out", out)
	cmd.Env = append(os.Environ(), "TMPDIR="+tmp)
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	var said strings.Builder
	for out, sent := bufio.NewScanner(stdout), false; out.Scan(); {
		said.WriteString(out.Text() + "\n")
		if !sent && strings.Contains(out.Text(), "guesses: the list") {
			sent = true
			if err := cmd.Process.Signal(syscall.SIGINT); err != nil {
				t.Error(err)
			}
		}
	}
	err = cmd.Wait()
	var exit *exec.ExitError
	if !errors.As(err, &exit) || exit.ExitCode() != 2 {
		t.Errorf("ended with %v: %s", err, said.String())
	}
	if left, err := os.ReadDir(tmp); err != nil || len(left) != 0 {
		t.Errorf("left in %s: %v, %v", tmp, left, err)
	}
	readReport(t, out)
}

func TestWrongUse(t *testing.T) {
	for name, opts := range map[string]Options{
		"find bin/gpufenced":          {Dir: t.TempDir()},
		`choose suite "paint"`:        {Dir: dist(t), Only: []string{"paint"}},
		"use the driver of this mach": {Dir: dist(t), Simulated: true, GPU: "GPU-that-is-not-there"},
	} {
		if _, err := Run(t.Context(), opts); err == nil || !strings.Contains(err.Error(), name) {
			t.Errorf("%+v: %v, want %q", opts, err, name)
		}
	}
}

func TestRealDriverIsSeenByItsNodes(t *testing.T) {
	there := filepath.Join(t.TempDir(), "nvidiactl")
	if err := os.WriteFile(there, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if realDriver([]string{there + "x"}) || !realDriver([]string{there + "x", there}) {
		t.Error("a driver is told by nothing but its nodes")
	}
}

// TestBrokenDriverIsNoReasonToSimulate: libraries that do not work end the run.
func TestBrokenDriverIsNoReasonToSimulate(t *testing.T) {
	node := filepath.Join(t.TempDir(), "nvidiactl")
	if err := os.WriteFile(node, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	was := driverNodes
	driverNodes = []string{node}
	defer func() { driverNodes = was }()
	if realDriver([]string{"/dev/nvidiactl"}) {
		t.Skip("SKIP: this machine has a real driver")
	}
	r, err := Run(t.Context(), Options{Dir: dist(t), Only: []string{"limits"}})
	if r != nil || err == nil || !strings.Contains(err.Error(), "use the driver of this machine") {
		t.Errorf("%v, %v", r, err)
	}
}

func TestCgroupsSayWhyThereAreNone(t *testing.T) {
	empty, plain := t.TempDir(), t.TempDir()
	if err := os.WriteFile(filepath.Join(plain, "cgroup.procs"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	for dir, want := range map[string]string{empty: "no cgroup hierarchy is mounted", plain: "makes no cgroups", "/sys/fs/cgroup": ""} {
		if got := cgroups(dir); (want == "") != (got == "") || !strings.Contains(got, want) {
			t.Errorf("%s: %q, want %q", dir, got, want)
		}
	}
	if left, err := os.ReadDir(plain); err != nil || len(left) != 1 {
		t.Errorf("left %v, %v", left, err)
	}
	if got := mounts(filepath.Join(empty, "no", "such", "folder")); !strings.Contains(got, "no tmpfs can be mounted") {
		t.Errorf("mounts: %q", got)
	}
	if got := mounts(filepath.Join(empty, "mount")); got != "" {
		t.Errorf("mounts: %q", got)
	}
}

func TestReport(t *testing.T) {
	r := &Report{Machine: map[string]any{"name": "A|B", "driver": "1"}, Rows: []Row{
		{Suite: "s", Name: "held", Must: true, Verdict: Pass, Numbers: map[string]any{"x_bytes": 4 * mib, "y": 3}},
		{Suite: "s", Name: "not held", Must: true, Verdict: Fail, Detail: "why\nnot"},
		{Suite: "s", Name: "of no weight", Verdict: Fail},
		{Suite: "s", Name: "lacking", Must: true, Verdict: Impossible, Detail: "no MIG"},
	}, Answers: []Answer{{ID: "g", Here: "2 MiB", Verdict: Pass, Seen: map[string]any{"a": "b"}}, {ID: "h", Check: "a look", Verdict: Impossible, Why: "cannot"}}}
	if f := r.Failed(); len(f) != 1 || f[0].Name != "not held" {
		t.Errorf("failed: %v", f)
	}
	if want := "1 passed, 2 failed, 1 not possible here; 1 of those that must hold did not"; r.Summary() != want {
		t.Errorf("summary %q, want %q", r.Summary(), want)
	}
	var b strings.Builder
	if err := r.Markdown(&b); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"on A|B, driver 1", "x_bytes 4 MiB, y 3", "**fail** | why not", "| lacking | yes | not possible here | no MIG |", "| g | 2 MiB | a b |", "not possible here: cannot"} {
		if !strings.Contains(b.String(), want) {
			t.Errorf("no %q in %s", want, b.String())
		}
	}
	if strings.Contains(b.String(), noGPU) {
		t.Error("a real run says that it was none")
	}
	r.Simulated = true
	if r.Headline() != noGPU {
		t.Error("a simulated run does not say so")
	}
	file := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := r.Write(filepath.Join(file, "below")); err == nil {
		t.Error("a report was written below a file")
	}
	if err := r.Markdown(brokenWriter{}); err == nil {
		t.Error("a report was written where nothing can be")
	}
}

// TestDemoOnAnotherGPUProvesNothing: of a machine with a real one, that is.
func TestDemoOnAnotherGPUProvesNothing(t *testing.T) {
	steps := []demo.Step{{Name: "a", Held: true, Numbers: map[string]uint64{"bytes": 1}}, {Name: "b"}}
	for _, tt := range []struct {
		gpu       string
		simulated bool
		want      []Verdict
	}{
		{"NVIDIA T4 (simulated)", true, []Verdict{Pass, Fail}},
		{"NVIDIA T4 (simulated)", false, []Verdict{Impossible, Fail}},
		{"NVIDIA H200", false, []Verdict{Pass, Fail}},
	} {
		rows := demoRows(demo.Result{GPU: tt.gpu, Steps: steps}, tt.simulated)
		for i, r := range rows {
			if r.Verdict != tt.want[i] || !r.Must {
				t.Errorf("%s, simulated %v: %+v, want %s", tt.gpu, tt.simulated, r, tt.want[i])
			}
		}
	}
}

type brokenWriter struct{}

func (brokenWriter) Write([]byte) (int, error) { return 0, errors.New("no") }

// TestRecorderOfIoctls: it knows what takes memory on the device, in every form, and refuses only that.
func TestRecorderOfIoctls(t *testing.T) {
	library := filepath.Join(dist(t), "hardware/libioctls.so")
	dir := t.TempDir()
	program, file, out := filepath.Join(dir, "ioctl"), filepath.Join(dir, "nvidia0"), filepath.Join(dir, "out")
	if said, err := exec.CommandContext(t.Context(), "gcc", "-std=c11", "-D_GNU_SOURCE", "-Wall", "-Werror", "-o", program, "testdata/ioctl.c", "-ldl").CombinedOutput(); err != nil {
		t.Fatalf("compile: %v: %s", err, said)
	}
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	notty := int(syscall.ENOTTY)
	for _, tt := range []struct {
		kind, deny, step string
		takes            bool
		result, errno    int
		status           string
	}{
		{"plain", "", "", true, -1, notty, "0"},
		{"plain", "12", "alloc", true, -1, 12, "0"},
		{"plain", "1", "alloc", true, -1, 1, "0"},
		{"plain", "12", "other", true, -1, notty, "0"},
		{"plain", "status", "alloc", true, 0, 0, "0x51"},
		{"short", "status", "alloc", true, 0, 0, "0x51"},
		{"heap", "status", "alloc", true, 0, 0, "0x51"},
		{"carried", "status", "alloc", true, 0, 0, "0x51"},
		{"carried", "12", "alloc", true, -1, 12, "0"},
		{"elsewhere", "12", "alloc", false, -1, notty, "0"},
		{"address", "12", "alloc", false, -1, notty, "0"},
		{"class", "12", "alloc", false, -1, notty, "0"},
	} {
		t.Run(tt.kind+" "+tt.deny+" "+tt.step, func(t *testing.T) {
			cmd := exec.CommandContext(t.Context(), program, file, tt.kind)
			cmd.Env = append(os.Environ(), "LD_PRELOAD="+library, "IOCTLS_PATHS="+file, "IOCTLS_OUT="+out)
			if tt.deny != "" {
				cmd.Env = append(cmd.Env, "IOCTLS_DENY="+tt.deny, "IOCTLS_DENY_STEP="+tt.step)
			}
			said, err := cmd.Output()
			if want := fmt.Sprintf("%d %d %s", tt.result, tt.errno, tt.status); err != nil || strings.TrimSpace(string(said)) != want {
				t.Errorf("%q, %v, want %q", said, err, want)
			}
			all, err := readIoctls(out)
			if err != nil || len(all) != 1 || all[0].step != "alloc" || all[0].count != 1 {
				t.Fatalf("recorded %+v, %v", all, err)
			}
			if takes := all[0].bytes == 64*mib; takes != tt.takes || !takes && all[0].bytes != 0 {
				t.Errorf("takes %d bytes", all[0].bytes)
			}
			_, takes := summarizeIoctls(all)["alloc takes"]
			if takes != tt.takes {
				t.Errorf("summary %v", summarizeIoctls(all))
			}
		})
	}
	for _, text := range []string{"a b c\n", "s p 1 1 x 1\n", "s p 1 1 1 x\n"} {
		if err := os.WriteFile(out, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		if _, err := readIoctls(out); err == nil {
			t.Errorf("%q was read", text)
		}
	}
	if all, err := readIoctls(out + "x"); err != nil || all != nil {
		t.Errorf("no file: %v, %v", all, err)
	}
}

// TestRowSaysHowItsWorkEnded.
func TestRowSaysHowItsWorkEnded(t *testing.T) {
	ended, cancel := context.WithCancelCause(t.Context())
	cancel(errTime)
	for _, tt := range []struct {
		ctx    context.Context
		err    error
		want   Verdict
		detail string
	}{
		{t.Context(), nil, Pass, "fine"},
		{t.Context(), impossible("no\nGPU"), Impossible, "no GPU"},
		{t.Context(), fmt.Errorf("ask: %w", impossible("none")), Impossible, "ask: none"},
		{t.Context(), errors.New("broke"), Fail, "broke"},
		{ended, nil, Fail, errTime.Error()},
	} {
		s := &session{opts: Options{Story: testWriter{t}}}
		got := s.row(tt.ctx, "suite", "row", true, time.Second, func(context.Context, map[string]any) (string, error) { return "fine", tt.err })
		if row := s.report.Rows[0]; got != tt.want || row.Verdict != tt.want || !strings.Contains(row.Detail, strings.Split(tt.detail, "\n")[0]) {
			t.Errorf("%v: %+v", tt.err, row)
		}
	}
}
