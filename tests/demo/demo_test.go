// SPDX-License-Identifier: Apache-2.0

package demo

import (
	"context"
	"errors"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/gpufence/gpufence/enforcer/api"
	"github.com/gpufence/gpufence/enforcer/config"
	"github.com/gpufence/gpufence/enforcer/quota"
)

// distDir is where the built programs lie.
func distDir(t *testing.T) string {
	t.Helper()
	dir := os.Getenv("GPUFENCE_DIST")
	if dir == "" {
		dir = filepath.Join("..", "..", "dist")
	}
	dir, err := filepath.Abs(dir)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(filepath.Join(dir, "clients", "client")); err != nil {
		t.Fatalf("run make build first: %v", err)
	}
	return dir
}

// plainNode is a node whose engine calls runc itself: bundles, streams, reaping and clean-up
// without anything of gpufence.
func plainNode(t *testing.T) *node {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Fatal("containers need root")
	}
	runc, err := exec.LookPath("runc")
	if err != nil {
		t.Fatalf("run make deps first: %v", err)
	}
	busybox, err := exec.LookPath("busybox")
	if err != nil {
		t.Fatalf("run make deps first: %v", err)
	}
	if err := becomeReaper(); err != nil {
		t.Fatal(err)
	}
	n, err := newNode(Options{Dist: distDir(t), Simulated: true})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), cleanupTime)
		defer cancel()
		if err := n.close(ctx); err != nil {
			t.Errorf("clean up: %v", err)
		}
	})
	for _, d := range []string{"bundles", "runc"} {
		if err := os.Mkdir(n.path(d), 0o711); err != nil {
			t.Fatal(err)
		}
	}
	n.engine = &engine{runtime: runc, root: n.path("runc"), dir: n.path("bundles")}
	if n.root, err = newRootfs(busybox, map[string]string{"/client": n.dist("clients/client")}); err != nil {
		t.Fatal(err)
	}
	return n
}

// TestPinsAreTheNodesOwn: the demo's gate is never where the machine's own gpufenced has its, and nothing of it is left.
func TestPinsAreTheNodesOwn(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Fatal("mounting needs root")
	}
	bpffs := t.TempDir()
	if err := unix.Mount("bpf", bpffs, "bpf", 0, ""); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := unix.Unmount(bpffs, 0); err != nil {
			t.Error(err)
		}
	})
	n, err := newNode(Options{Dist: distDir(t), Simulated: true})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(n.dir) })
	file := n.path("config.toml")
	n.socket = n.path("s")
	if err := os.WriteFile(file, []byte(n.configText()), 0o600); err != nil {
		t.Fatal(err)
	}
	loaded, err := config.Load(file)
	if err != nil {
		t.Fatal(err)
	}
	if loaded.GatePins != n.pins || n.pins == config.Default().GatePins || filepath.Base(n.pins) != filepath.Base(n.dir) {
		t.Errorf("gate-pins is %q", loaded.GatePins)
	}
	n.pins = filepath.Join(bpffs, filepath.Base(n.pins)) // this machine may have no such filesystem mounted
	if err := os.MkdirAll(filepath.Join(n.pins, "v1", "maps"), 0o700); err != nil {
		t.Fatal(err)
	}
	seen := func(errs []error) bool {
		return strings.Contains(errors.Join(errs...).Error(), n.pins+" is still there")
	}
	if !seen(n.leftovers()) {
		t.Error("what is there is not seen")
	}
	if err := n.close(t.Context()); err != nil {
		t.Error(err)
	}
	if _, err := os.Lstat(n.pins); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("left behind: %v", err)
	}
}

func TestBundlesRunUnderRunc(t *testing.T) {
	n := plainNode(t)
	ctx := t.Context()
	p, err := n.newPod(ctx, "plain", map[string]string{"gpufence.dev/memory.max": "1Gi"})
	if err != nil {
		t.Fatal(err)
	}
	c, err := n.newContainer(ctx, p, workload{name: "main", args: []string{"/client"}})
	if err != nil {
		t.Fatal(err)
	}
	status, err := c.ask(ctx, "status")
	if err != nil || !status.OK {
		t.Fatalf("ask status: %+v, %v", status, err)
	}
	if context, err := c.ask(ctx, "context"); err != nil || context.OK || !strings.Contains(context.Why, "libcuda.so.1") {
		t.Errorf("a container without a driver: %+v, %v", context, err)
	}
	if err := c.say("exit 7"); err != nil {
		t.Fatal(err)
	}
	if err := c.awaitExit(ctx); err != nil {
		t.Fatal(err)
	}
	if c.exitCode() != 7 {
		t.Errorf("exit code %d, want 7", c.exitCode())
	}
	if _, err := c.ask(ctx, "status"); err == nil {
		t.Error("an ended container answered")
	}

	// A start that runc refuses is told as an engine tells it, and leaves no container.
	_, err = n.newContainer(ctx, p, workload{name: "missing", args: []string{"/nothing"}})
	var refused *refusedError
	if !errors.As(err, &refused) || !strings.Contains(refused.sentence, "/nothing") {
		t.Errorf("a program that is not there: %v", err)
	}

	// Killed from outside: 137, as engines count.
	c, err = n.newContainer(ctx, p, workload{name: "killed", args: []string{"/client"}})
	if err != nil {
		t.Fatal(err)
	}
	if err := killProcess(c.pid, func(int) bool { return true }); err != nil {
		t.Fatal(err)
	}
	if err := c.awaitExit(ctx); err != nil {
		t.Fatal(err)
	}
	if c.exitCode() != 137 {
		t.Errorf("exit code %d, want 137", c.exitCode())
	}
	if dirs, err := cgroupDirs(n.cgroup); err != nil || len(dirs) == 0 {
		t.Errorf("the private cgroup was not used: %v, %v", dirs, err)
	}
}

// TestCloseFindsWhatIsLeft: the check at the end is not one that cannot fail.
func TestCloseFindsWhatIsLeft(t *testing.T) {
	n := plainNode(t)
	cmd := exec.CommandContext(t.Context(), "busybox", "sh", "-c", "read x", n.dir)
	stdin, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	found := errors.Join(n.leftovers()...)
	if found == nil || !strings.Contains(found.Error(), n.dir+" is still there") || !strings.Contains(found.Error(), "process ") {
		t.Errorf("leftovers: %v", found)
	}
	stdin.Close()
	if err := cmd.Wait(); err == nil {
		t.Error("read succeeded at the end of its input")
	}
}

func TestRunRefusesWhatIsMissing(t *testing.T) {
	for _, tt := range []struct {
		name string
		opts Options
		code quota.Code
		word string
	}{
		{"no dist", Options{Dist: t.TempDir()}, quota.CodeUsage, "make build"},
		{"negative lag", Options{Dist: t.TempDir(), Lag: -1}, quota.CodeUsage, "200ms"},
		{"endless lag", Options{Dist: t.TempDir(), Lag: time.Hour}, quota.CodeUsage, "200ms"},
	} {
		_, err := Run(t.Context(), tt.opts)
		if !errors.Is(err, tt.code) || !strings.Contains(err.Error(), tt.word) {
			t.Errorf("%s: %v, want %s and %q", tt.name, err, tt.code, tt.word)
		}
	}
}

func TestPeakAndCrossing(t *testing.T) {
	points := []point{{10, 1}, {20, 5}, {30, 9}, {40, 2}}
	for _, tt := range []struct {
		until int64
		want  uint64
	}{{0, 9}, {9, 0}, {10, 1}, {29, 5}, {30, 9}} {
		if got := peak(points, tt.until); got != tt.want {
			t.Errorf("peak until %d = %d, want %d", tt.until, got, tt.want)
		}
	}
	if ns, ok := crossing(points, 4); !ok || ns != 20 {
		t.Errorf("crossing of 4 = %d, %v", ns, ok)
	}
	if _, ok := crossing(points, 9); ok {
		t.Error("9 is crossed by 9")
	}
}

func TestCompareSeesEveryLoss(t *testing.T) {
	c := api.Container{Key: api.ContainerKey{ID: "a"}, PID: 7, State: "running", Cgroup: "/x",
		GPUs: []api.ContainerGPU{{UUID: "GPU-1", Limits: quota.Limits{Max: 4}, Peak: 3, Events: api.Events{Max: 2}}}}
	change := func(f func(*api.Container)) []api.Container {
		d := c
		d.GPUs = append([]api.ContainerGPU(nil), c.GPUs...)
		f(&d)
		return []api.Container{d}
	}
	for name, after := range map[string][]api.Container{
		"gone":            {},
		"other id":        change(func(d *api.Container) { d.Key.ID = "b" }),
		"other pid":       change(func(d *api.Container) { d.PID = 8 }),
		"ended":           change(func(d *api.Container) { d.State = "ended" }),
		"other cgroup":    change(func(d *api.Container) { d.Cgroup = "/y" }),
		"other limit":     change(func(d *api.Container) { d.GPUs[0].Limits.Max = 5 }),
		"smaller peak":    change(func(d *api.Container) { d.GPUs[0].Peak = 2 }),
		"smaller counter": change(func(d *api.Container) { d.GPUs[0].Events.Max = 1 }),
		"no GPU":          change(func(d *api.Container) { d.GPUs = nil }),
	} {
		if compare([]api.Container{c}, after) == nil {
			t.Errorf("%s: not seen", name)
		}
	}
	same := change(func(d *api.Container) { d.GPUs[0].Peak, d.GPUs[0].Events.OOM = 4, 1 })
	if err := compare([]api.Container{c}, same); err != nil {
		t.Errorf("counters that grew: %v", err)
	}
}

func TestNumbersHaveTheirUnits(t *testing.T) {
	got := numbers(map[string]uint64{"peak_bytes": 3 << 30, "crossing_to_kill_ns": 321_000_000, "failures": 0})
	if want := "crossing_to_kill 321ms, failures 0, peak 3 GiB"; got != want {
		t.Errorf("numbers = %q, want %q", got, want)
	}
}

func TestResultHoldsOnlyIfAllStepsDo(t *testing.T) {
	if (Result{}).Held() {
		t.Error("nothing was checked, and it held")
	}
	r := Result{Steps: []Step{{Name: "a", Held: true}, {Name: "b"}}}
	if r.Held() {
		t.Error("a step did not hold, and the result did")
	}
	var out strings.Builder
	r.print(&out)
	if !strings.HasSuffix(out.String(), "\ndemo: 1 of 2 held\n") || !strings.Contains(out.String(), "NO    b") {
		t.Errorf("printed %q", out.String())
	}
}
