// SPDX-License-Identifier: Apache-2.0

package enforcer

import (
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/gpufence/gpufence/enforcer/api"
	"github.com/gpufence/gpufence/tests/node"
	"github.com/gpufence/gpufence/tests/simgpu/driver"
	"github.com/gpufence/gpufence/tests/simgpu/wire"
)

// withDriver is a driver that limits cgroups, and a node whose pods have cgroups.
func withDriver(t *testing.T, backend string) func(*node.Options) {
	dmem := t.TempDir()
	return func(o *node.Options) {
		o.NVML, o.PodCgroups = "simgpu/r615", true
		o.Sim = append(o.Sim, "--driver-version", "615.71.09", "--cuda-version", "13.4", "--memory-limits", backend, "--dmem-dir", dmem)
		o.Config = append(o.Config, fmt.Sprintf("dmem-dir = %q", dmem))
	}
}

func forBackends(t *testing.T, f func(t *testing.T, backend string)) {
	for _, backend := range []string{"misc", "dmem"} {
		t.Run(backend, func(t *testing.T) {
			t.Parallel()
			f(t, backend)
		})
	}
}

func driverFence(v api.Container) api.Fence {
	i := slices.IndexFunc(v.Fences, func(f api.Fence) bool { return f.Name == "driver" })
	if i < 0 {
		return api.Fence{State: "not listed"}
	}
	return v.Fences[i]
}

func (b *bench) driverIs(c *node.Container, state string, say ...string) {
	b.t.Helper()
	var f api.Fence
	if err := node.Until(b.t.Context(), "driver", func() (bool, error) {
		v, err := c.View(b.t.Context())
		f = driverFence(v)
		return err == nil && f.State == state && !slices.ContainsFunc(say, func(s string) bool { return !strings.Contains(f.Why+f.Proof, s) }), nil
	}); err != nil {
		b.t.Fatalf("the driver fence of %s is %+v, want %s with %q (%v)", c.Name, f, state, say, err)
	}
}

// accounts are the driver's, by the folder's name.
func (b *bench) account(suffix string) (driver.AccountState, bool) {
	b.t.Helper()
	st, err := b.Sim.State(b.t.Context())
	b.check(err)
	for _, a := range st.GPUs[0].Accounts {
		if strings.HasSuffix(a.Cgroup, suffix) {
			return a, true
		}
	}
	return driver.AccountState{}, false
}

// leaf is the container's folder in the v2 hierarchy, from its mount point on.
func leaf(c *node.Container) string {
	dir := c.Cgroups()[0]
	return filepath.Join(filepath.Base(filepath.Dir(dir)), filepath.Base(dir))
}

// writeLimit sets a limit as somebody else would.
func (b *bench) writeLimit(dir string, soft, hard uint64) {
	b.t.Helper()
	conn, err := net.DialUnix("unixpacket", nil, &net.UnixAddr{Name: b.Path("sim", wire.Ctl), Net: "unixpacket"})
	b.check(err)
	defer conn.Close()
	f, err := os.Open(dir)
	b.check(err)
	defer f.Close()
	req := wire.Req{Op: wire.OpLimitsSet, Arg: [7]uint64{0, soft, hard}}
	_, _, err = conn.WriteMsgUnix(req.Encode(), unix.UnixRights(int(f.Fd())), nil)
	b.check(err)
	buf := make([]byte, wire.RepBytes)
	n, err := conn.Read(buf)
	b.check(err)
	rep, _, err := wire.DecodeRep(buf[:n])
	b.check(err)
	if rep.Status != wire.OK {
		b.t.Fatalf("limit %s: status %d", dir, rep.Status)
	}
}

// TestDriverRefuses: a program without the shim is refused by the driver at its limit, and lives; the
// limit is read back, and the level is hard. The driver leaves no trace of a refusal, so there is no
// event of one.
func TestDriverRefuses(t *testing.T) {
	t.Parallel()
	forBackends(t, func(t *testing.T, backend string) {
		b := newBench(t, 0, withDriver(t, backend))
		c := b.run(node.Spec{Name: "bypass", Limits: []string{"memory.max=1Gi", "require=hard"}})
		v := b.view(c)
		if f := driverFence(v); v.Level != "hard" || f.State != "proven" || !strings.Contains(f.Proof, "1Gi") || !strings.Contains(f.Proof, "managed: shim only") ||
			!strings.Contains(f.Proof, "("+backend+")") || strings.Contains(f.Proof, "dmem.max") != (backend == "dmem") {
			t.Errorf("level %s, fence %+v", v.Level, f)
		}
		r, err := c.Main.Ask(t.Context(), "fill 64")
		b.check(err)
		if r.ResultName != "CUDA_ERROR_OUT_OF_MEMORY" || r.GrantedBytes != gib-64*mib {
			t.Errorf("%+v", r)
		}
		if r := b.do(c.Main, "meminfo"); r.TotalBytes != gib {
			t.Errorf("it sees %d bytes", r.TotalBytes)
		}
		b.later()
		if !c.Main.Alive() || len(b.events("kill")) > 0 {
			t.Error("it was killed")
		}
		for _, e := range b.events() {
			if strings.Contains(e.Type, "denied") {
				t.Errorf("event %+v", e)
			}
		}
	})
}

// TestDriverComposes: two containers of a pod are held to the pod's limit together, and one of them to
// its own; on the driver's flat accounts that is said not to be.
func TestDriverComposes(t *testing.T) {
	t.Parallel()
	forBackends(t, func(t *testing.T, backend string) {
		b := newBench(t, 0, withDriver(t, backend))
		first := b.run(node.Spec{Name: "first", Pod: "pod-of-two", Limits: []string{"memory.max=1Gi"}})
		b.driverIs(first, "proven")
		second := b.run(node.Spec{Name: "second", Pod: "pod-of-two", Limits: []string{"memory.max=1Gi"}})
		b.do(first.Main, "alloc 512")
		if r, err := second.Main.Ask(t.Context(), "alloc 512"); err != nil || r.ResultName != "CUDA_ERROR_OUT_OF_MEMORY" {
			t.Errorf("the pod has more than its limit: %+v, %v", r, err)
		}
		third, err := b.Start(t.Context(), node.Spec{Name: "third", Pod: "pod-of-two", Limits: []string{"memory.max=1Gi", "container.third.memory.max=256Mi"}})
		b.check(err)
		if backend == "dmem" {
			b.driverIs(third, "proven", "of the pod 1Gi", "of the container 256Mi")
			b.driverIs(first, "proven")
			return
		}
		b.driverIs(third, "degraded", "flat")
		b.driverIs(first, "degraded", "another container of the pod")
		if v := b.view(third); v.Level != "reactive" {
			t.Errorf("level %s", v.Level)
		}
	})
}

// TestDriverResizes: what grows is allowed by the driver before a program is told; what shrinks below
// the use waits, and lowers the driver's limit at its end.
func TestDriverResizes(t *testing.T) {
	t.Parallel()
	forBackends(t, func(t *testing.T, backend string) {
		b := newBench(t, 0, withDriver(t, backend))
		c := b.run(node.Spec{Name: "grows", Limits: []string{"memory.max=1Gi"}})
		_, err := c.Set(t.Context(), "2Gi", api.SetRequest{Wait: true})
		b.check(err)
		b.do(c.Main, "alloc 1536") // at once
		b.driverIs(c, "proven", "2Gi")
		resp, err := c.Set(t.Context(), "1Gi", api.SetRequest{DeadlineMillis: 60_000})
		b.check(err)
		if resp.Resizes[0].State != "pending" {
			t.Fatalf("%+v", resp.Resizes)
		}
		b.driverIs(c, "proven", "2Gi")
		b.do(c.Main, "free 1536")
		b.driverIs(c, "proven", "1Gi")
		if r, err := c.Main.Ask(t.Context(), "alloc 1024"); err != nil || r.ResultName != "CUDA_ERROR_OUT_OF_MEMORY" {
			t.Errorf("%+v, %v", r, err)
		}
	})
}

// TestDriverContested: H14.
func TestDriverContested(t *testing.T) {
	t.Parallel()
	forBackends(t, func(t *testing.T, backend string) {
		b := newBench(t, 0, withDriver(t, backend))
		c := b.run(node.Spec{Name: "fought-over", Limits: []string{"memory.max=1Gi"}})
		b.driverIs(c, "proven")
		dir := c.Cgroups()[0]
		if backend == "misc" {
			dir = filepath.Dir(dir) // the pod's
		}
		for i := 1; i <= 2; i++ {
			b.writeLimit(dir, 0, 512*mib)
			b.driverIs(c, "proven", "contested: somebody else wrote it, "+strconv.Itoa(i)+" times")
		}
		b.writeLimit(dir, 0, 512*mib)
		b.driverIs(c, "proven", "contested: somebody else keeps it at 512Mi")
		if r, err := c.Main.Ask(t.Context(), "alloc 768"); err != nil || r.ResultName != "CUDA_ERROR_OUT_OF_MEMORY" {
			t.Errorf("the lower limit does not hold: %+v, %v", r, err)
		}
		b.until("it is in the journal", func() bool {
			return slices.ContainsFunc(b.events("degraded"), func(e api.Event) bool { return strings.Contains(e.Message, "contested") })
		})
	})
}

// TestDriverSeesWhatItDoesNotCount: H4. What was allocated before the driver's flat account had a limit
// is found by comparing with NVML.
func TestDriverSeesWhatItDoesNotCount(t *testing.T) {
	t.Parallel()
	b := newBench(t, 0, withDriver(t, "misc"))
	c := b.run(node.Spec{Name: "early", Limits: []string{"memory.max=1Gi"}})
	// The driver forgets its limits, as after its last client has gone without persistence mode.
	b.knobs(-1, "memory-limits=dmem")
	b.knobs(-1, "memory-limits=misc")
	b.do(c.Main, "alloc 512")
	b.driverIs(c, "degraded", "the rest came before the limit")
	if v := b.view(c); v.Level != "reactive" {
		t.Errorf("level %s", v.Level)
	}
}

// TestSoftLimitsAreTakenBack: H8. What a container was promised is no longer promised to its ancestors
// once it has gone, also where gpufenced was dead meanwhile.
func TestSoftLimitsAreTakenBack(t *testing.T) {
	t.Parallel()
	for _, crash := range []bool{false, true} {
		t.Run(fmt.Sprintf("crash=%t", crash), func(t *testing.T) {
			t.Parallel()
			b := newBench(t, 0, withDriver(t, "dmem"))
			stays := b.run(node.Spec{Name: "stays", Pod: "pod-of-two", Limits: []string{"memory.max=4Gi", "container.stays.memory.max=1Gi", "container.stays.memory.min=1Gi"}})
			goes, err := b.Start(t.Context(), node.Spec{Name: "goes", Pod: "pod-of-two", Limits: []string{"memory.max=4Gi", "container.goes.memory.max=1Gi", "container.goes.memory.min=512Mi"}})
			b.check(err)
			pod := filepath.Base(filepath.Dir(goes.Cgroups()[0]))
			b.until("both are promised", func() bool { a, ok := b.account("/" + pod); return ok && a.SoftBytes == gib+512*mib })
			if crash {
				b.check(b.Crash())
			}
			b.check(goes.Stop(t.Context()))
			if a, _ := b.account("/" + pod); crash && a.SoftBytes != gib+512*mib {
				t.Errorf("the driver took it back by itself: %+v", a)
			}
			if crash {
				b.check(b.StartDaemon(t.Context()))
			}
			b.until("one is promised", func() bool { a, ok := b.account("/" + pod); return ok && a.SoftBytes == gib })
			b.driverIs(stays, "proven")
			b.later()
			if a, ok := b.account(leaf(stays)); !ok || a.SoftBytes != gib || a.HardBytes != gib {
				t.Errorf("who stays has %+v", a)
			}
		})
	}
}

// TestDriverAfterACrash: the limit holds while gpufenced is dead, and is ours after.
func TestDriverAfterACrash(t *testing.T) {
	t.Parallel()
	forBackends(t, func(t *testing.T, backend string) {
		b := newBench(t, 0, withDriver(t, backend))
		c := b.run(node.Spec{Name: "goes-on", Limits: []string{"memory.max=1Gi"}})
		b.check(b.Crash())
		if r, err := c.Main.Ask(t.Context(), "alloc 1024"); err != nil || r.ResultName != "CUDA_ERROR_OUT_OF_MEMORY" {
			t.Errorf("%+v, %v", r, err)
		}
		b.check(b.StartDaemon(t.Context()))
		b.driverIs(c, "proven", "1Gi")
	})
}

// TestManagedMemoryIsHeldByOthers: H1. The driver does not count managed memory; with the shim it is
// refused.
func TestManagedMemoryIsHeldByOthers(t *testing.T) {
	t.Parallel()
	forBackends(t, func(t *testing.T, backend string) {
		b := newBench(t, 0, withDriver(t, backend))
		free := b.run(node.Spec{Name: "without", Limits: []string{"memory.max=1Gi"}})
		b.do(free.Main, "managed 2048")
		b.driverIs(free, "proven", "managed: shim only")
		held := b.run(node.Spec{Name: "with", Limits: []string{"memory.max=1Gi"}, Shim: true})
		if r, err := held.Main.Ask(t.Context(), "managed 2048"); err != nil || r.OK {
			t.Errorf("with the shim: %+v, %v", r, err)
		}
	})
}

// TestWithoutDriverLimits: a node where only watch is possible refuses what requires more, with what is
// missing, and one whose driver has the call switched off, too.
func TestWithoutDriverLimits(t *testing.T) {
	t.Parallel()
	for name, tt := range map[string]struct {
		edit func(*node.Options)
		say  string
	}{
		"old driver": {withSim(), "driver: driver 570.133.20 has no memory limits (they need R615)"},
		"off": {func(o *node.Options) {
			o.NVML, o.Sim = "simgpu/r615", append(o.Sim, "--driver-version", "615.71.09", "--memory-limits", "off")
		}, "driver 615.71.09 does not limit this GPU"},
		"v1 only": {func(o *node.Options) {
			withDriver(t, "misc")(o)
			o.Hierarchies = []string{"freezer"}
		}, "driver: cgroup v1"},
	} {
		for _, byNode := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s, by node %t", name, byNode), func(t *testing.T) {
				t.Parallel()
				limits, edits := []string{"memory.max=1Gi"}, []func(*node.Options){tt.edit}
				if byNode {
					edits = append(edits, withConfig(`require = "hard"`))
				} else {
					limits = append(limits, "require=hard")
				}
				b := newBench(t, 0, edits...)
				c, err := b.Start(t.Context(), node.Spec{Name: "wants-hard", Limits: limits})
				var refused *api.Error
				if !errors.As(err, &refused) || !strings.Contains(err.Error(), "E1406") || !strings.Contains(err.Error(), "requires level hard") || !strings.Contains(err.Error(), tt.say) {
					t.Errorf("%v", err)
				}
				if c != nil && c.Main != nil && c.Main.Alive() {
					b.check(c.Main.Kill())
				}
			})
		}
	}
}

// TestNVIDIAsHookIsTold: H11. What NVIDIA's own hook would set from the environment is what was granted.
func TestNVIDIAsHookIsTold(t *testing.T) {
	t.Parallel()
	forBackends(t, func(t *testing.T, backend string) {
		b := newBench(t, 0, withDriver(t, backend))
		c := b.run(node.Spec{Name: "own", Limits: []string{"container.own.memory.max=1Gi", "container.own.memory.min=512Mi"}})
		if got := strings.Join(c.Prepared.Env, " "); got != "NVIDIA_GPU_MEMORY_LIMIT=1024 NVIDIA_GPU_MEMORY_REQUEST=512" {
			t.Errorf("own: %s", got)
		}
		c = b.run(node.Spec{Name: "pods", Limits: []string{"memory.max=1Gi"}})
		if got := strings.Join(c.Prepared.Env, " "); (got == "NVIDIA_GPU_MEMORY_LIMIT=1024 NVIDIA_GPU_MEMORY_REQUEST=0") != (backend == "dmem") || backend == "misc" && got != "" {
			t.Errorf("pod's: %s", got)
		}
	})
}
