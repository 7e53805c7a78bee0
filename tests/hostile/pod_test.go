// SPDX-License-Identifier: Apache-2.0

package hostile

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	specs "github.com/opencontainers/runtime-spec/specs-go"

	"github.com/gpufence/gpufence/enforcer/api"
	"github.com/gpufence/gpufence/tests/node"
)

// report is what the attacker says.
type report struct {
	Op      string
	Tried   int
	Changed []string
	Written int
	Files   int
	Times   int
	Slots   int
}

// attacker is a real container, started by runc through the wrapper and the hook.
type attacker struct {
	id      string
	cmd     *exec.Cmd
	reports chan report
	done    chan struct{}
	stderr  string
}

// attack starts a container that does one thing for a time, with 1 GiB.
func (b *bench) attack(id, what string, during time.Duration) *attacker {
	b.t.Helper()
	ctx := b.t.Context()
	bundle := b.Path("bundle-" + id)
	b.check(os.MkdirAll(filepath.Join(bundle, "rootfs", "etc"), 0o755))
	out, err := exec.CommandContext(ctx, "cp", b.program, filepath.Join(bundle, "rootfs", "attacker")).CombinedOutput()
	if err != nil {
		b.t.Fatalf("copy attacker: %v: %s", err, out)
	}
	state, err := b.Sim.State(ctx)
	b.check(err)
	caps := []string{"CAP_CHOWN", "CAP_DAC_OVERRIDE", "CAP_FOWNER", "CAP_MKNOD", "CAP_SETGID", "CAP_SETUID", "CAP_KILL"}
	spec := specs.Spec{
		Version: "1.0.2",
		Process: &specs.Process{
			Args: []string{"/attacker", what, during.String()}, Cwd: "/", NoNewPrivileges: true,
			Env:          []string{"NVIDIA_VISIBLE_DEVICES=" + state.GPUs[0].UUID},
			Capabilities: &specs.LinuxCapabilities{Bounding: caps, Effective: caps, Permitted: caps},
		},
		Root:        &specs.Root{Path: "rootfs"},
		Annotations: map[string]string{"gpufence.dev/memory.max": "1Gi"},
		Mounts: []specs.Mount{
			{Destination: "/proc", Type: "proc", Source: "proc"},
			{Destination: "/dev", Type: "tmpfs", Source: "tmpfs", Options: []string{"nosuid", "mode=755", "size=65536k"}},
		},
		Linux: &specs.Linux{
			CgroupsPath: "/" + filepath.Base(b.Dir) + "-" + id,
			Namespaces:  []specs.LinuxNamespace{{Type: specs.PIDNamespace}, {Type: specs.MountNamespace}, {Type: specs.IPCNamespace}, {Type: specs.NetworkNamespace}, {Type: specs.UTSNamespace}},
		},
	}
	text, err := json.Marshal(spec)
	b.check(err)
	b.check(os.WriteFile(filepath.Join(bundle, "config.json"), text, 0o600))

	a := &attacker{id: id, reports: make(chan report, 16), done: make(chan struct{})}
	a.stderr = b.Path("stderr-" + id)
	stderr, err := os.OpenFile(a.stderr, os.O_CREATE|os.O_WRONLY, 0o600)
	b.check(err)
	defer stderr.Close()
	a.cmd = exec.CommandContext(context.WithoutCancel(ctx), b.wrapper, "--root", b.Path("runc"), "run", "--bundle", bundle, id)
	a.cmd.Env = append(os.Environ(), "GPUFENCE_CONFIG="+b.ConfigPath())
	a.cmd.Stderr = stderr
	stdout, err := a.cmd.StdoutPipe()
	b.check(err)
	b.check(a.cmd.Start())
	go func() {
		defer close(a.done)
		read(stdout, a.reports)
		_ = a.cmd.Wait() // how it ended is in ProcessState
	}()
	b.t.Cleanup(func() {
		end := exec.CommandContext(context.Background(), b.wrapper, "--root", b.Path("runc"), "delete", "--force", id)
		end.Env = a.cmd.Env
		if out, err := end.CombinedOutput(); err != nil {
			b.t.Errorf("delete %s: %v: %s", id, err, out)
		}
		<-a.done
	})
	return a
}

func read(from io.Reader, to chan<- report) {
	for lines := bufio.NewScanner(from); lines.Scan(); {
		var r report
		if json.Unmarshal(lines.Bytes(), &r) == nil {
			to <- r
		}
	}
}

// hear waits for a report.
func (b *bench) hear(a *attacker, op string) report {
	b.t.Helper()
	for {
		select {
		case r := <-a.reports:
			if r.Op == op {
				return r
			}
		case <-a.done:
			text, err := os.ReadFile(a.stderr)
			b.t.Fatalf("%s ended with %v before it said %q: %s (%v)", a.id, a.cmd.ProcessState, op, text, err)
		case <-time.After(node.Patience):
			b.t.Fatalf("%s does not say %q", a.id, op)
		}
	}
}

// TestHostilePod: whatever a container does to its files, its neighbours on the same GPU have no
// failure and keep their numbers, gpufenced goes on, and what NVML says still holds the container.
func TestHostilePod(t *testing.T) {
	const during = 1500 * time.Millisecond
	b := newBench(t)
	neighbour, err := b.Start(t.Context(), node.Spec{Name: "neighbour", Limits: []string{"memory.max=1Gi"}, Shim: true})
	b.check(err)
	_, err = neighbour.Main.Do(t.Context(), "context", "alloc 256")
	b.check(err)
	b.check(neighbour.Main.Say("churn 64 9 2"))
	pid, before := b.DaemonPID(), b.memory()

	var slowest time.Duration
	for _, what := range []string{"read-only", "fill", "truncate", "grow", "scribble", "race", "forge", "exhaust"} {
		t.Run(what, func(t *testing.T) {
			b := b.within(t)
			a := b.attack("attacker-"+what, what, during)
			over := make(chan struct{})
			watched := make(chan time.Duration)
			go func() { watched <- b.watch(neighbour, over) }()
			watch := sync.OnceValue(func() time.Duration { close(over); return <-watched })
			defer watch() // also where the test ends early: who watches must not speak after its end
			switch what {
			case "read-only":
				if r := b.hear(a, "read-only"); len(r.Changed) > 0 || r.Tried < 6 {
					t.Errorf("of %d files: %v", r.Tried, r.Changed)
				}
			case "fill":
				// The ledger cannot take more than its own pod's file system has.
				if r := b.hear(a, "fill"); r.Written > 1<<20 || r.Files != 0 {
					t.Errorf("it could write %d bytes and make %d files", r.Written, r.Files)
				}
			}
			b.hear(a, "over")
			s := watch()
			slowest = max(slowest, s)
			t.Logf("gpufenced answered within %v", s.Round(time.Millisecond))
			v, err := b.Client.Container(t.Context(), a.id)
			b.check(err)
			if v.State != "running" || v.GPUs[0].NVML != 0 || v.GPUs[0].Events.OOMKill != 0 {
				t.Errorf("the attacker itself: %+v", v)
			}
		})
	}
	t.Run("exceed", func(t *testing.T) {
		b := b.within(t)
		a := b.attack("attacker-exceed", "exceed", during)
		select {
		case <-a.done:
		case <-time.After(node.Patience):
			t.Fatal("it holds 4 GiB of 1 and lives")
		}
		if code := a.cmd.ProcessState.ExitCode(); code != 137 {
			t.Errorf("it ended with %v", a.cmd.ProcessState)
		}
		events, err := b.Events(t.Context(), "kill")
		b.check(err)
		if len(events) != 1 || events[0].Container.ID != a.id {
			t.Errorf("kills: %+v", events)
		}
	})

	b.check(neighbour.Main.Say("stop"))
	r, err := neighbour.Main.Hear(t.Context(), "churn")
	b.check(err)
	if r.Failures != 0 || r.Allocs == 0 {
		t.Errorf("the neighbour had %d failures in %d allocations", r.Failures, r.Allocs)
	}
	after := b.memory()
	t.Logf("the neighbour: %d allocations, %d failures; gpufenced: slowest answer %v, memory %d MiB before, %d after", r.Allocs, r.Failures, slowest.Round(time.Millisecond), before/mib, after/mib)
	if b.DaemonPID() != pid || after > before+memoryBound {
		t.Errorf("gpufenced was %d with %d MiB and is %d with %d", pid, before/mib, b.DaemonPID(), after/mib)
	}
	for _, kind := range []string{"started"} {
		if events, err := b.Events(t.Context(), kind); err != nil || len(events) != 1 {
			t.Errorf("%s: %d times, %v", kind, len(events), err)
		}
	}
}

// watch asks for the neighbour again and again; it gives the slowest answer.
func (b *bench) watch(neighbour *node.Container, over <-chan struct{}) (slowest time.Duration) {
	for {
		began := time.Now()
		v, err := neighbour.View(b.t.Context())
		slowest = max(slowest, time.Since(began))
		switch {
		case err != nil:
			b.t.Errorf("ask for the neighbour: %v", err)
		case len(v.GPUs) != 1 || v.State != "running":
			b.t.Errorf("the neighbour: %+v", v)
		default:
			g := v.GPUs[0]
			if g.Excess != 0 || g.Events.Max != 0 || g.Events.Device != 0 || g.Events.OOM != 0 || g.Current > 1<<30 || g.Limits.Max != 1<<30 {
				b.t.Errorf("the neighbour's numbers: %+v", g)
			}
			if f := find(v.Fences, "shim"); f.State != "seen" && f.State != "delivered" {
				b.t.Errorf("the neighbour's shim: %+v", f)
			}
		}
		select {
		case <-over:
			return slowest
		case <-time.After(10 * time.Millisecond):
		}
	}
}

func find(fences []api.Fence, name string) api.Fence {
	for _, f := range fences {
		if f.Name == name {
			return f
		}
	}
	return api.Fence{}
}

// program builds the attacker, without anything that a loader would have to find.
func program(t *testing.T) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "attacker")
	cmd := exec.CommandContext(t.Context(), "go", "build", "-o", path, "./attacker")
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("build attacker: %v: %s", err, out)
	}
	return path
}

// memory is gpufenced's resident memory in bytes.
func (b *bench) memory() uint64 {
	b.t.Helper()
	n, err := resident(b.DaemonPID())
	b.check(err)
	return n
}

func resident(pid int) (uint64, error) {
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		return 0, err
	}
	for line := range strings.Lines(string(text)) {
		var kib uint64
		if _, err := fmt.Sscanf(line, "VmRSS: %d kB", &kib); err == nil {
			return kib << 10, nil
		}
	}
	return 0, errors.New("no VmRSS")
}
