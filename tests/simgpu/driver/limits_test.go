// SPDX-License-Identifier: Apache-2.0

package driver

import (
	"errors"
	"testing"

	"github.com/gpufence/gpufence/tests/simgpu/wire"
)

const (
	podCgroup  = "/kubepods/pod1"
	leafCgroup = podCgroup + "/c1"
)

// limitedGPU is one whose driver has limits, without context sizes that get in the way of numbers.
func limitedGPU(t *testing.T, b Backend) *GPU {
	t.Helper()
	cfg, err := Model("t4")
	if err != nil {
		t.Fatal(err)
	}
	k := DefaultKnobs()
	k.MemoryLimits = b
	return New(cfg, k, 0)
}

func (g *GPU) inCgroup(pid int, cgroup string) *Client {
	return g.Open(0, Owner{ProcID: ProcID{PID: pid, Start: 1}, Unified: cgroup})
}

func allocate(t *testing.T, c *Client, n uint64, want error) Alloc {
	t.Helper()
	a, err := c.Allocate(0, 0, n, wire.KindDevice)
	if !errors.Is(err, want) {
		t.Fatalf("allocate %d: %v, want %v", n, err, want)
	}
	return a
}

func limit(t *testing.T, g *GPU, cgroup string, soft, hard uint64, want error) {
	t.Helper()
	if err := g.SetLimits(0, cgroup, soft, hard); !errors.Is(err, want) {
		t.Fatalf("set %s to %d, %d: %v, want %v", cgroup, soft, hard, err, want)
	}
}

func reads(t *testing.T, g *GPU, cgroup string, want Limits) {
	t.Helper()
	if got, err := g.GetLimits(0, cgroup); err != nil || got != want {
		t.Fatalf("%s reads %+v, %v, want %+v", cgroup, got, err, want)
	}
}

var both = map[string]Backend{"misc": BackendMisc, "dmem": BackendDmem}

// TestLimitsHold: what every kind of memory but managed takes is held to the limit and given back.
func TestLimitsHold(t *testing.T) {
	for name, b := range both {
		t.Run(name, func(t *testing.T) {
			g := limitedGPU(t, b)
			limit(t, g, leafCgroup, 0, gib, nil)
			c := g.inCgroup(1, leafCgroup)
			ctx, taken, err := c.CreateContext(0, wire.ListCompute, wire.ContextWhole)
			if err != nil {
				t.Fatal(err)
			}
			small, err := c.Allocate(0, ctx, 1000, wire.KindDevice)
			if err != nil {
				t.Fatal(err)
			}
			big := allocate(t, c, 512*mib, nil)
			used := taken + wire.PageBytes + 512*mib
			reads(t, g, leafCgroup, Limits{0, gib, used})
			allocate(t, c, 512*mib, ErrNoMemory)
			allocate(t, c, gib-used, nil)
			reads(t, g, leafCgroup, Limits{0, gib, gib})
			if _, _, err := c.Free(0, small.Handle); err != nil {
				t.Fatal(err)
			}
			reads(t, g, leafCgroup, Limits{0, gib, gib - wire.PageBytes})
			if _, _, err := c.Free(0, big.Handle); err != nil {
				t.Fatal(err)
			}
			if _, err := c.DestroyContext(0, ctx); err != nil {
				t.Fatal(err)
			}
			c.Close(0)
			reads(t, g, leafCgroup, Limits{0, gib, 0})
		})
	}
}

// TestManagedMemoryIsNotCharged is H1.
func TestManagedMemoryIsNotCharged(t *testing.T) {
	for name, b := range both {
		t.Run(name, func(t *testing.T) {
			g := limitedGPU(t, b)
			limit(t, g, leafCgroup, 0, gib, nil)
			c := g.inCgroup(1, leafCgroup)
			if a, err := c.Allocate(0, 0, 4*gib, wire.KindManaged); err != nil || a.Grew != 4*gib {
				t.Fatalf("managed memory: %+v, %v", a, err)
			}
			reads(t, g, leafCgroup, Limits{0, gib, 0})
		})
	}
}

// TestNoLimitsUnderMIG is H2.
func TestNoLimitsUnderMIG(t *testing.T) {
	for name, b := range both {
		t.Run(name, func(t *testing.T) {
			whole := limitedGPU(t, b).cfg
			whole.Instances = 2
			for _, cfg := range append(whole.Split(), whole) {
				k := DefaultKnobs()
				k.MemoryLimits = b
				g := New(cfg, k, 0)
				limit(t, g, leafCgroup, 0, gib, ErrNotSupported)
				if _, err := g.GetLimits(0, leafCgroup); !errors.Is(err, ErrNotSupported) {
					t.Errorf("get: %v", err)
				}
			}
		})
	}
}

// TestWithoutCgroupNobodyPays is H3.
func TestWithoutCgroupNobodyPays(t *testing.T) {
	for name, b := range both {
		t.Run(name, func(t *testing.T) {
			g := limitedGPU(t, b)
			limit(t, g, leafCgroup, 0, mib, nil)
			allocate(t, g.inCgroup(1, ""), gib, nil)
			limit(t, g, "/", 0, gib, map[Backend]error{BackendMisc: ErrNotSupported, BackendDmem: ErrNotFound}[b])
		})
	}
}

// TestMemoryFromBeforeALimit is H4: misc never sees it, dmem does.
func TestMemoryFromBeforeALimit(t *testing.T) {
	for name, want := range map[string]uint64{"misc": 512 * mib, "dmem": 768 * mib} {
		t.Run(name, func(t *testing.T) {
			g := limitedGPU(t, both[name])
			c := g.inCgroup(1, leafCgroup)
			early := allocate(t, c, 256*mib, nil)
			limit(t, g, leafCgroup, 0, gib, nil)
			allocate(t, c, 512*mib, nil)
			reads(t, g, leafCgroup, Limits{0, gib, want})
			if _, _, err := c.Free(0, early.Handle); err != nil {
				t.Fatal(err)
			}
			reads(t, g, leafCgroup, Limits{0, gib, 512 * mib})
		})
	}
}

// TestLoweringBelowUse is H5: misc refuses it, the kernel's dmem says yes and changes nothing.
func TestLoweringBelowUse(t *testing.T) {
	for name, want := range map[string]error{"misc": ErrInvalid, "dmem": nil} {
		t.Run(name, func(t *testing.T) {
			g := limitedGPU(t, both[name])
			limit(t, g, leafCgroup, 0, gib, nil)
			allocate(t, g.inCgroup(1, leafCgroup), 512*mib, nil)
			limit(t, g, leafCgroup, 0, 256*mib, want)
			reads(t, g, leafCgroup, Limits{0, gib, 512 * mib})
			limit(t, g, leafCgroup, 0, 512*mib, nil)
			limit(t, g, leafCgroup, 0, 2*gib, nil)
			reads(t, g, leafCgroup, Limits{0, 2 * gib, 512 * mib})
		})
	}
}

// TestComposition is H6: on misc a limited child is not held to its parent's limit, on dmem it is.
func TestComposition(t *testing.T) {
	for name, want := range map[string]error{"misc": nil, "dmem": ErrNoMemory} {
		t.Run(name, func(t *testing.T) {
			g := limitedGPU(t, both[name])
			limit(t, g, podCgroup, 0, gib, nil)
			limit(t, g, leafCgroup, 0, 2*gib, nil)
			c := g.inCgroup(1, leafCgroup)
			allocate(t, c, gib+512*mib, want)
			other := g.inCgroup(2, podCgroup+"/c2") // without a limit of its own: the parent's holds
			allocate(t, other, gib+mib*2, ErrNoMemory)
			allocate(t, other, 512*mib, nil)
		})
	}
}

// TestWhatACgroupSees is H7: with dmem a container below a limited pod is told of the whole GPU.
func TestWhatACgroupSees(t *testing.T) {
	for name, podOnly := range map[string]uint64{"misc": gib, "dmem": 0} {
		t.Run(name, func(t *testing.T) {
			g := limitedGPU(t, both[name])
			c := g.inCgroup(1, leafCgroup)
			whole := g.capacity()
			if podOnly == 0 {
				podOnly = whole
			}
			sees := func(want, wantFree uint64) {
				t.Helper()
				free, total, err := c.MemInfo(0)
				if err != nil || total != want || free != wantFree {
					t.Errorf("cuMemGetInfo: %d of %d, %v, want %d of %d", free, total, err, wantFree, want)
				}
				m, err := g.NVMLMemory(0, leafCgroup)
				if err != nil || m.Free != wantFree {
					t.Errorf("NVML: %+v, %v", m, err)
				}
			}
			limit(t, g, podCgroup, 0, gib, nil)
			sees(podOnly, podOnly)
			limit(t, g, leafCgroup, 0, 512*mib, nil)
			sees(512*mib, 512*mib)
			allocate(t, c, 128*mib, nil)
			sees(512*mib, 384*mib)
			if m, err := g.NVMLMemory(0, ""); err != nil || m.Total != g.cfg.TotalBytes || m.Used != 128*mib {
				t.Errorf("to the host: %+v, %v", m, err)
			}
		})
	}
}

// TestSoftLimitsOfTheGone is H8: on dmem what a cgroup was promised stays with its ancestors.
func TestSoftLimitsOfTheGone(t *testing.T) {
	g := limitedGPU(t, BackendDmem)
	limit(t, g, leafCgroup, 256*mib, gib, nil)
	reads(t, g, podCgroup, Limits{256 * mib, NoLimit, 0})
	reads(t, g, "/kubepods", Limits{256 * mib, NoLimit, 0})
	g.RemoveCgroup(0, leafCgroup)
	reads(t, g, podCgroup, Limits{256 * mib, NoLimit, 0})
	limit(t, g, podCgroup, 0, NoLimit, nil) // mended at the nearest that is left
	reads(t, g, "/kubepods", Limits{0, NoLimit, 0})

	limit(t, g, leafCgroup, 256*mib, gib, nil)
	limit(t, g, leafCgroup, 0, NoLimit, nil) // first zeroed, then removed
	g.RemoveCgroup(0, leafCgroup)
	reads(t, g, "/kubepods", Limits{0, NoLimit, 0})

	m := limitedGPU(t, BackendMisc)
	limit(t, m, leafCgroup, 256*mib, gib, nil)
	m.RemoveCgroup(0, leafCgroup)
	if _, err := m.GetLimits(0, podCgroup); !errors.Is(err, ErrNotSupported) {
		t.Errorf("misc: the parent reads %v", err)
	}
}

// TestWhoPays is H9: an importer does not, and after a move misc goes by where the device was opened,
// dmem by where the task is.
func TestWhoPays(t *testing.T) {
	for name, moved := range map[string]string{"misc": leafCgroup, "dmem": "/other"} {
		t.Run(name, func(t *testing.T) {
			g := limitedGPU(t, both[name])
			limit(t, g, leafCgroup, 0, gib, nil)
			limit(t, g, "/other", 0, gib, nil)
			owner, importer := g.inCgroup(1, leafCgroup), g.inCgroup(2, "/other")
			a := allocate(t, owner, 256*mib, nil)
			token, err := owner.Export(0, a.Handle)
			if err != nil {
				t.Fatal(err)
			}
			if _, _, err := importer.Import(0, token, 0); err != nil {
				t.Fatal(err)
			}
			reads(t, g, "/other", Limits{0, gib, 0})
			owner.Close(0) // the importer keeps the memory, its maker's cgroup goes on paying
			reads(t, g, leafCgroup, Limits{0, gib, 256 * mib})
			importer.Close(0)
			reads(t, g, leafCgroup, Limits{0, gib, 0})

			c := g.inCgroup(3, leafCgroup)
			c.SetCgroup("/other")
			allocate(t, c, 128*mib, nil)
			reads(t, g, moved, Limits{0, gib, 128 * mib})
		})
	}
}

// TestRefusalsLeaveNoTrace is H10: neither the limits nor the driver's lists say that something was
// refused.
func TestRefusalsLeaveNoTrace(t *testing.T) {
	for name, b := range both {
		t.Run(name, func(t *testing.T) {
			g := limitedGPU(t, b)
			limit(t, g, leafCgroup, 0, gib, nil)
			c := g.inCgroup(1, leafCgroup)
			allocate(t, c, 512*mib, nil)
			before, rows := g.accountStates(), len(g.procs)
			allocate(t, c, gib, ErrNoMemory)
			after := g.accountStates()
			if len(after) != len(before) || len(g.procs) != rows {
				t.Fatalf("accounts were %+v, are %+v", before, after)
			}
			for i := range after {
				if after[i] != before[i] {
					t.Errorf("account was %+v, is %+v", before[i], after[i])
				}
			}
		})
	}
}

// TestVirginCgroups: what a cgroup reads that no limit concerns.
func TestVirginCgroups(t *testing.T) {
	m := limitedGPU(t, BackendMisc)
	if _, err := m.GetLimits(0, leafCgroup); !errors.Is(err, ErrNotSupported) {
		t.Errorf("misc: %v", err)
	}
	limit(t, m, podCgroup, 0, gib, nil)
	reads(t, m, leafCgroup, Limits{0, gib, 0}) // the ancestor's
	limit(t, m, podCgroup, 0, NoLimit, nil)
	if _, err := m.GetLimits(0, leafCgroup); !errors.Is(err, ErrNotSupported) {
		t.Errorf("misc, cleared: %v", err)
	}
	reads(t, limitedGPU(t, BackendDmem), leafCgroup, Limits{0, NoLimit, 0})
	off := limitedGPU(t, BackendOff)
	limit(t, off, leafCgroup, 0, gib, ErrNotSupported)
	for _, b := range both {
		g := limitedGPU(t, b)
		limit(t, g, leafCgroup, 2*gib, gib, ErrInvalid)
		limit(t, g, leafCgroup, 0, 64*gib, ErrInvalid)
	}
}
