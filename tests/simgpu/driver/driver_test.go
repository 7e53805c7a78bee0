// SPDX-License-Identifier: Apache-2.0

package driver

import (
	"errors"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/gpufence/gpufence/tests/simgpu/wire"
)

const (
	ms     = int64(time.Millisecond)
	second = int64(time.Second)
)

// bench is a GPU with a clock that the test moves.
type bench struct {
	*testing.T
	*GPU
	now int64
}

func newBench(t *testing.T, change func(*Config, *Knobs)) *bench {
	t.Helper()
	cfg, err := Model("t4")
	if err != nil {
		t.Fatal(err)
	}
	knobs := DefaultKnobs()
	if change != nil {
		change(&cfg, &knobs)
	}
	return &bench{t, New(cfg, knobs, 1000*second), 1000 * second}
}

func (b *bench) wait(d time.Duration) { b.now += int64(d) }

func (b *bench) open(pid int) *Client {
	return b.Open(b.now, Owner{ProcID: ProcID{pid, uint64(pid) * 10}, Cgroup: "/c", Command: "x"})
}

func (b *bench) context(c *Client) uint64 {
	b.Helper()
	h, _, err := c.CreateContext(b.now, wire.ListCompute, wire.ContextWhole)
	if err != nil {
		b.Fatalf("create context: %v", err)
	}
	return h
}

func (b *bench) alloc(c *Client, ctx, n uint64, kind wire.Kind) Alloc {
	b.Helper()
	a, err := c.Allocate(b.now, ctx, n, kind)
	if err != nil {
		b.Fatalf("allocate %d: %v", n, err)
	}
	return a
}

// rows are the compute list in MiB by pid.
func (b *bench) rows() map[uint32]uint64 {
	b.Helper()
	list, err := b.NVMLProcesses(b.now, wire.ListCompute)
	if err != nil {
		b.Fatal(err)
	}
	m := map[uint32]uint64{}
	for _, r := range list {
		m[r.PID] = r.UsedBytes / mib
	}
	return m
}

func (b *bench) wantRows(when string, want map[uint32]uint64) {
	b.Helper()
	if d := cmp.Diff(want, b.rows()); d != "" {
		b.Errorf("%s: processes in MiB (-want +got):\n%s", when, d)
	}
}

func (b *bench) usedMiB() uint64 {
	b.Helper()
	free, total, err := (&Client{gpu: b.GPU}).MemInfo(b.now)
	if err != nil {
		b.Fatal(err)
	}
	return (total - free) / mib
}

func TestRounding(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		bytes uint64
		kind  wire.Kind
		grew  uint64 // MiB
		size  uint64
	}{
		{1, wire.KindDevice, 2, 512},
		{513, wire.KindDevice, 2, 1024},
		{1 << 20, wire.KindDevice, 2, 1 << 20},
		{1<<20 + 1, wire.KindDevice, 2, 2 << 20},
		{2<<20 + 1, wire.KindDevice, 4, 4 << 20},
		{64 << 20, wire.KindDevice, 64, 64 << 20},
		{64 << 20, wire.KindPhysical, 64, 64 << 20},
		{1, wire.KindManaged, 2, 2 << 20},
		{3 << 20, wire.KindManaged, 4, 4 << 20},
	} {
		b := newBench(t, nil)
		c := b.open(1)
		a := b.alloc(c, 0, tt.bytes, tt.kind)
		if a.Grew != tt.grew*mib || a.Bytes != tt.size || b.usedMiB() != tt.grew {
			t.Errorf("%d bytes of kind %d: grew %d, size %d, used %d MiB; want %d MiB, %d", tt.bytes, tt.kind, a.Grew, a.Bytes, b.usedMiB(), tt.grew, tt.size)
		}
		given, _, err := c.Free(b.now, a.Handle)
		if err != nil || given != a.Grew || b.usedMiB() != 0 {
			t.Errorf("free of %d bytes gave %d, %v; used %d MiB", tt.bytes, given, err, b.usedMiB())
		}
	}
}

func TestSmallAllocationsShareAPage(t *testing.T) {
	t.Parallel()
	b := newBench(t, nil)
	c := b.open(1)
	ctx := b.context(c)
	seen := map[[2]uint64]bool{}
	var all []Alloc
	for range 4096 {
		a := b.alloc(c, ctx, 512, wire.KindDevice)
		if at := [2]uint64{a.Block, a.Offset}; a.Block == 0 || a.Offset%512 != 0 || a.Offset >= wire.PageBytes || seen[at] {
			t.Fatalf("allocation %d lies at %v, seen before: %v", len(all), at, seen[at])
		} else {
			seen[at] = true
		}
		all = append(all, a)
	}
	if used := b.usedMiB(); used != 104+2 {
		t.Errorf("4096 times 512 bytes: %d MiB used, want one page", used)
	}
	more := b.alloc(c, ctx, 512, wire.KindDevice)
	if used := b.usedMiB(); used != 104+4 || more.Grew != wire.PageBytes {
		t.Errorf("one more: %d MiB used, grew %d, want a second page", used, more.Grew)
	}
	for i, a := range all {
		given, page, err := c.Free(b.now, a.Handle)
		if err != nil {
			t.Fatal(err)
		}
		if last := i == len(all)-1; (given != 0) != last || (page == a.Block) != last {
			t.Fatalf("free %d of 4096 gave %d and page %d", i+1, given, page)
		}
	}
}

func TestContextSizes(t *testing.T) {
	t.Parallel()
	b := newBench(t, nil)
	c := b.open(1)
	first := b.context(c)
	b.wantRows("one context", map[uint32]uint64{1: 104})
	second := b.context(c)
	b.wantRows("two contexts", map[uint32]uint64{1: 104 + 94})
	b.alloc(c, second, 10*mib, wire.KindDevice)
	if given, err := c.DestroyContext(b.now, second); err != nil || given != (94+10)*mib {
		t.Errorf("destroying gave %d MiB, %v", given/mib, err)
	}
	if _, err := c.DestroyContext(b.now, second); !errors.Is(err, ErrNotFound) {
		t.Errorf("destroying twice: %v", err)
	}
	if _, err := c.DestroyContext(b.now, first); err != nil {
		t.Error(err)
	}
	b.wantRows("no context", map[uint32]uint64{})
}

func TestExhaustion(t *testing.T) {
	t.Parallel()
	b := newBench(t, func(_ *Config, k *Knobs) { k.OthersBytes = 1 * gib })
	c := b.open(1)
	ctx := b.context(c)
	// 16 GiB - 1 % = 16220 MiB, of which others hold 1024 and the context 104.
	if used := b.usedMiB(); used != 1128 {
		t.Errorf("used %d MiB", used)
	}
	b.alloc(c, ctx, (16220-1128)*mib, wire.KindDevice)
	for name, err := range map[string]error{
		"one byte":  allocErr(c.Allocate(b.now, ctx, 1, wire.KindDevice)),
		"a page":    allocErr(c.Allocate(b.now, ctx, wire.PageBytes, wire.KindPhysical)),
		"2^46":      allocErr(c.Allocate(b.now, ctx, 1<<46+1, wire.KindDevice)),
		"all bits":  allocErr(c.Allocate(b.now, ctx, ^uint64(0), wire.KindDevice)),
		"a context": contextErr(c.CreateContext(b.now, wire.ListCompute, wire.ContextWhole)),
	} {
		if !errors.Is(err, ErrNoMemory) {
			t.Errorf("%s on a full GPU: %v", name, err)
		}
	}
	if used := b.usedMiB(); used != 16220 {
		t.Errorf("used %d MiB after refusals", used)
	}
	if st := b.State(b.now); st.Processes[0].Refused != 5 {
		t.Errorf("refused %d times, want 5", st.Processes[0].Refused)
	}
}

func allocErr(_ Alloc, err error) error       { return err }
func contextErr(_, _ uint64, err error) error { return err }
func freeErr(_, _ uint64, err error) error    { return err }

func TestInvalidRequests(t *testing.T) {
	t.Parallel()
	b := newBench(t, nil)
	c := b.open(1)
	for name, tt := range map[string]struct{ got, want error }{
		"size 0":            {allocErr(c.Allocate(b.now, 0, 0, wire.KindDevice)), ErrInvalid},
		"physical, odd":     {allocErr(c.Allocate(b.now, 0, 1000, wire.KindPhysical)), ErrInvalid},
		"no such kind":      {allocErr(c.Allocate(b.now, 0, 1000, 3)), ErrInvalid},
		"no such context":   {allocErr(c.Allocate(b.now, 77, 1000, wire.KindDevice)), ErrNotFound},
		"no such handle":    {freeErr(c.Free(b.now, 77)), ErrNotFound},
		"no such list":      {contextErr(c.CreateContext(b.now, 3, wire.ContextWhole)), ErrInvalid},
		"launch in nothing": {func() error { _, err := c.Launch(b.now, 77, 0); return err }(), ErrNotFound},
		"migrate nothing":   {func() error { _, err := c.Migrate(b.now, 77, true); return err }(), ErrNotFound},
	} {
		if !errors.Is(tt.got, tt.want) {
			t.Errorf("%s: %v, want %v", name, tt.got, tt.want)
		}
	}
	if b.usedMiB() != 0 {
		t.Errorf("used %d MiB after invalid requests", b.usedMiB())
	}
}

func TestNVMLLag(t *testing.T) {
	t.Parallel()
	b := newBench(t, func(_ *Config, k *Knobs) { k.NVMLLag = 200 * time.Millisecond })
	c := b.open(7)
	b.wait(time.Second)
	ctx := b.context(c)
	a := b.alloc(c, ctx, 1*gib, wire.KindDevice)
	b.wantRows("at once", map[uint32]uint64{})
	b.wait(199 * time.Millisecond)
	b.wantRows("199 ms later", map[uint32]uint64{})
	b.wait(time.Millisecond)
	b.wantRows("200 ms later", map[uint32]uint64{7: 1024 + 104})
	if _, _, err := c.Free(b.now, a.Handle); err != nil {
		t.Fatal(err)
	}
	m, err := b.NVMLMemory(b.now, "")
	if err != nil || m.Used != (1024+104)*mib {
		t.Errorf("device use at the free: %+v, %v", m, err)
	}
	if used := b.usedMiB(); used != 104 {
		t.Errorf("cuMemGetInfo lags: %d MiB", used)
	}
	b.wait(200 * time.Millisecond)
	b.wantRows("200 ms after the free", map[uint32]uint64{7: 104})
	c.Close(b.now)
	b.wait(199 * time.Millisecond)
	b.wantRows("199 ms after the end", map[uint32]uint64{7: 104})
	b.wait(time.Millisecond)
	b.wantRows("200 ms after the end", map[uint32]uint64{})
}

func TestFreeLag(t *testing.T) {
	t.Parallel()
	b := newBench(t, func(_ *Config, k *Knobs) { k.FreeLag = time.Second })
	c := b.open(7)
	b.alloc(c, b.context(c), 1*gib, wire.KindDevice)
	c.Close(b.now)
	b.wait(time.Second - 1)
	b.wantRows("before the lag is over", map[uint32]uint64{7: 1024 + 104})
	if used := b.usedMiB(); used != 1024+104 {
		t.Errorf("occupied %d MiB", used)
	}
	if at, some := b.NextEvent(); !some || at != b.now+1 {
		t.Errorf("next event at %d, %v; now %d", at, some, b.now)
	}
	b.wait(1)
	b.wantRows("after it", map[uint32]uint64{})
	if used := b.usedMiB(); used != 0 {
		t.Errorf("occupied %d MiB afterwards", used)
	}
	st := b.State(b.now).Processes[0]
	if st.EndNS != b.now || st.PeakBytes != (1024+104)*mib || st.UsedBytes != 0 {
		t.Errorf("state of the ended process: %+v", st)
	}
}

func TestLateBytes(t *testing.T) {
	t.Parallel()
	b := newBench(t, func(_ *Config, k *Knobs) { k.LateBytes, k.LateSteps, k.LateTime = 16*mib, 4, 8*time.Second })
	c := b.open(7)
	ctx := b.context(c)
	for i, want := range []uint64{104, 108, 112, 116, 120, 120} {
		b.wantRows(time.Duration(i*2*int(time.Second)).String(), map[uint32]uint64{7: want})
		b.wait(2 * time.Second)
	}
	if given, err := c.DestroyContext(b.now, ctx); err != nil || given != 120*mib {
		t.Errorf("destroying gave %d, %v", given, err)
	}
	b.context(c)
	c.Close(b.now)
	b.wait(time.Minute)
	if used := b.usedMiB(); used != 0 {
		t.Errorf("a closed context grew to %d MiB", used)
	}
	// The history has each step at its own time, although nobody looked meanwhile.
	h := b.Histories(b.now, 7)
	if len(h) != 1 {
		t.Fatalf("%d histories", len(h))
	}
	var times []int64
	for _, p := range h[0].Points[:5] {
		times = append(times, (p.TimeNS-1000*second)/ms)
	}
	if d := cmp.Diff([]int64{0, 2000, 4000, 6000, 8000}, times); d != "" {
		t.Errorf("times of growth in ms (-want +got):\n%s", d)
	}
}

func TestLateBytesWithoutRoomAreLeftOut(t *testing.T) {
	t.Parallel()
	b := newBench(t, func(_ *Config, k *Knobs) { k.LateBytes, k.LateSteps, k.LateTime = 16*mib, 4, 4*time.Second })
	c := b.open(7)
	ctx := b.context(c)
	b.alloc(c, ctx, (16220-104-6)*mib, wire.KindDevice)
	b.wait(time.Minute)
	if used := b.usedMiB(); used != 16220-6+4 {
		t.Errorf("used %d MiB", used)
	}
	if r := b.State(b.now).Processes[0].Refused; r != 3 {
		t.Errorf("%d steps left out, want 3", r)
	}
}

func TestTransientBytes(t *testing.T) {
	t.Parallel()
	b := newBench(t, func(_ *Config, k *Knobs) { k.TransientBytes, k.TransientTime = 300*mib, 100*time.Millisecond })
	c := b.open(7)
	ctx := b.context(c)
	b.wantRows("young", map[uint32]uint64{7: 404})
	b.wait(100 * time.Millisecond)
	b.wantRows("settled", map[uint32]uint64{7: 104})
	gone := b.context(c)
	if given, err := c.DestroyContext(b.now, gone); err != nil || given != (300+94)*mib {
		t.Errorf("a context destroyed while young gave %d MiB, %v", given/mib, err)
	}
	b.wait(time.Second)
	b.wantRows("no double give-back", map[uint32]uint64{7: 104})
	b.alloc(c, ctx, (16220-104-200)*mib, wire.KindDevice)
	if _, _, err := c.CreateContext(b.now, wire.ListCompute, wire.ContextWhole); !errors.Is(err, ErrNoMemory) {
		t.Errorf("a context whose start does not fit: %v", err)
	}
}

func TestManagedMemory(t *testing.T) {
	t.Parallel()
	b := newBench(t, nil)
	c := b.open(7)
	ctx := b.context(c)
	a := b.alloc(c, ctx, 20*gib, wire.KindManaged)
	// As much as there is room for is on the device, in nobody's row.
	if want := (16220 - 104) * mib; a.Grew != want {
		t.Errorf("%d MiB on the device, want %d", a.Grew/mib, want/mib)
	}
	b.wantRows("managed", map[uint32]uint64{7: 104})
	m, err := b.NVMLMemory(b.now, "")
	if err != nil || m.Free != 0 || m.Used != 16220*mib {
		t.Errorf("device: %+v, %v", m, err)
	}
	// Other memory pushes it out.
	b.alloc(c, ctx, 1*gib, wire.KindDevice)
	if st := b.State(b.now); st.ManagedBytes != (16220-104-1024)*mib || st.UsedBytes != 16220*mib {
		t.Errorf("after an allocation: managed %d, used %d MiB", st.ManagedBytes/mib, st.UsedBytes/mib)
	}
	if n, err := c.Migrate(b.now, a.Handle, false); err != nil || n != 0 || b.usedMiB() != 104+1024 {
		t.Errorf("to the host: %d, %v, used %d MiB", n, err, b.usedMiB())
	}
	if n, err := c.Migrate(b.now, a.Handle, true); err != nil || n != (16220-104-1024)*mib {
		t.Errorf("back to the device: %d MiB, %v", n/mib, err)
	}
	if given, _, err := c.Free(b.now, a.Handle); err != nil || given != (16220-104-1024)*mib || b.usedMiB() != 104+1024 {
		t.Errorf("free gave %d MiB, %v, used %d MiB", given/mib, err, b.usedMiB())
	}
}

func TestManagedMemoryStaysWithoutEviction(t *testing.T) {
	t.Parallel()
	b := newBench(t, func(_ *Config, k *Knobs) { k.ManagedEvict = false })
	c := b.open(7)
	ctx := b.context(c)
	b.alloc(c, ctx, 20*gib, wire.KindManaged)
	if _, err := c.Allocate(b.now, ctx, 4*mib, wire.KindDevice); !errors.Is(err, ErrNoMemory) {
		t.Errorf("allocation beside resident managed memory: %v", err)
	}
}

func TestMigrationEvictsTheLongestUntouched(t *testing.T) {
	t.Parallel()
	b := newBench(t, nil)
	c := b.open(7)
	old := b.alloc(c, 0, 8*gib, wire.KindManaged)
	young := b.alloc(c, 0, 16*gib, wire.KindManaged)
	if n, err := c.Migrate(b.now, old.Handle, true); err != nil || n != 8*gib {
		t.Fatalf("%d, %v", n, err)
	}
	if n, err := c.Migrate(b.now, young.Handle, true); err != nil || n != 16220*mib {
		t.Errorf("%d MiB of the second, %v", n/mib, err)
	}
	if st := b.State(b.now); st.ManagedBytes != 16220*mib {
		t.Errorf("managed %d MiB", st.ManagedBytes/mib)
	}
}

func TestOneProcessWithSeveralFiles(t *testing.T) {
	t.Parallel()
	b := newBench(t, nil)
	one, two := b.open(7), b.open(7)
	b.alloc(one, b.context(one), 10*mib, wire.KindDevice)
	b.alloc(two, 0, 20*mib, wire.KindDevice)
	b.wantRows("both", map[uint32]uint64{7: 134})
	if _, err := one.Allocate(b.now, b.context(two), 1, wire.KindDevice); !errors.Is(err, ErrNotFound) {
		t.Errorf("a context of another file: %v", err)
	}
	one.Close(b.now)
	b.wantRows("one closed", map[uint32]uint64{7: 20 + 94})
	two.Close(b.now)
	two.Close(b.now)
	b.wantRows("both closed", map[uint32]uint64{})
}

func TestReusedPID(t *testing.T) {
	t.Parallel()
	b := newBench(t, nil)
	first := b.Open(b.now, Owner{ProcID: ProcID{7, 1}, Cgroup: "/a"})
	b.alloc(first, 0, 10*mib, wire.KindDevice)
	first.Close(b.now)
	b.wait(time.Second)
	next := b.Open(b.now, Owner{ProcID: ProcID{7, 2}, Cgroup: "/b"})
	b.alloc(next, 0, 30*mib, wire.KindDevice)
	if h := b.Histories(b.now, 7); len(h) != 2 || h[0].PeakBytes != 10*mib || h[1].PeakBytes != 30*mib {
		t.Errorf("histories: %+v", h)
	}
	want := []CgroupState{{"/a", 0, 10 * mib}, {"/b", 30 * mib, 30 * mib}}
	if d := cmp.Diff(want, b.State(b.now).Cgroups); d != "" {
		t.Errorf("cgroups (-want +got):\n%s", d)
	}
}

func TestCgroupPeakIsOfTheSum(t *testing.T) {
	t.Parallel()
	b := newBench(t, nil)
	one, two := b.open(1), b.open(2)
	x := b.alloc(one, 0, 100*mib, wire.KindDevice)
	b.alloc(two, 0, 50*mib, wire.KindDevice)
	if _, _, err := one.Free(b.now, x.Handle); err != nil {
		t.Fatal(err)
	}
	b.alloc(two, 0, 60*mib, wire.KindDevice)
	if d := cmp.Diff([]CgroupState{{"/c", 110 * mib, 150 * mib}}, b.State(b.now).Cgroups); d != "" {
		t.Errorf("cgroups (-want +got):\n%s", d)
	}
}

func TestListsAndUnknownSizes(t *testing.T) {
	t.Parallel()
	b := newBench(t, nil)
	c := b.open(7)
	for _, list := range []wire.List{wire.ListGraphics, wire.ListMPS} {
		if _, _, err := c.CreateContext(b.now, list, wire.ContextWhole); err != nil {
			t.Fatal(err)
		}
	}
	for list, want := range map[wire.List]int{wire.ListCompute: 0, wire.ListGraphics: 1, wire.ListMPS: 1, wire.ListAll: 1} {
		if rows, err := b.NVMLProcesses(b.now, list); err != nil || len(rows) != want {
			t.Errorf("list %d: %v, %v", list, rows, err)
		}
	}
	if _, err := b.NVMLProcesses(b.now, wire.ListAll+1); !errors.Is(err, ErrInvalid) {
		t.Errorf("a list that is none: %v", err)
	}
	if err := contextErr(c.CreateContext(b.now, wire.ListAll, wire.ContextWhole)); !errors.Is(err, ErrInvalid) {
		t.Errorf("a context for all lists: %v", err)
	}
	k := b.Knobs()
	k.Unknown = UnknownAll
	b.SetKnobs(b.now, k)
	if rows, err := b.NVMLProcesses(b.now, wire.ListMPS); err != nil || rows[0].UsedBytes != wire.NotAvailable {
		t.Errorf("size that nobody knows: %v, %v", rows, err)
	}
	if _, err := b.NVMLMemory(b.now, ""); !errors.Is(err, ErrNotSupported) {
		t.Errorf("device that does not say: %v", err)
	}
}

func TestLostGPU(t *testing.T) {
	t.Parallel()
	b := newBench(t, nil)
	c := b.open(7)
	a := b.alloc(c, b.context(c), 10*mib, wire.KindDevice)
	k := b.Knobs()
	k.Lost = true
	b.SetKnobs(b.now, k)
	_, memErr := b.NVMLMemory(b.now, "")
	_, procErr := b.NVMLProcesses(b.now, wire.ListCompute)
	_, utilErr := b.NVMLUtilization(b.now)
	for name, err := range map[string]error{
		"memory": memErr, "processes": procErr, "utilization": utilErr,
		"allocate": allocErr(c.Allocate(b.now, 0, 1, wire.KindDevice)), "free": freeErr(c.Free(b.now, a.Handle)),
		"context": contextErr(c.CreateContext(b.now, wire.ListCompute, wire.ContextWhole)),
	} {
		if !errors.Is(err, ErrLost) {
			t.Errorf("%s on a lost GPU: %v", name, err)
		}
	}
	c.Close(b.now)
	k.Lost = false
	b.SetKnobs(b.now, k)
	b.wantRows("found again", map[uint32]uint64{})
}

func TestMaxContexts(t *testing.T) {
	t.Parallel()
	b := newBench(t, func(_ *Config, k *Knobs) { k.MaxContexts = 1 })
	c := b.open(7)
	ctx := b.context(c)
	if err := contextErr(c.CreateContext(b.now, wire.ListCompute, wire.ContextWhole)); !errors.Is(err, ErrBusy) {
		t.Errorf("a second context: %v", err)
	}
	if _, err := c.DestroyContext(b.now, ctx); err != nil {
		t.Fatal(err)
	}
	b.context(c)
}

func TestKernelsAndUtilization(t *testing.T) {
	t.Parallel()
	b := newBench(t, func(_ *Config, k *Knobs) { k.KernelTime = 100 * time.Millisecond })
	one, two := b.open(1), b.open(2)
	c1, c2 := b.context(one), b.context(two)
	if _, err := b.NVMLProcessUtilization(b.now, time.Second); !errors.Is(err, ErrNotFound) {
		t.Errorf("idle: %v", err)
	}
	if d, err := one.Launch(b.now, c1, -1); err != nil || d != 100*time.Millisecond {
		t.Errorf("launch: %v, %v", d, err)
	}
	if d, err := two.Launch(b.now, c2, 300*time.Millisecond); err != nil || d != 400*time.Millisecond {
		t.Errorf("launch behind another: %v, %v", d, err)
	}
	b.wait(time.Second)
	if busy, err := b.NVMLUtilization(b.now); err != nil || busy != 40 {
		t.Errorf("busy %d %%, %v", busy, err)
	}
	rows, err := b.NVMLProcessUtilization(b.now, time.Second)
	if d := cmp.Diff([]wire.ProcUtil{{PID: 1, SMPercent: 10}, {PID: 2, SMPercent: 30}}, rows); d != "" || err != nil {
		t.Errorf("by process (-want +got), %v:\n%s", err, d)
	}
	b.wait(time.Minute)
	if _, err := b.NVMLProcessUtilization(b.now, time.Second); !errors.Is(err, ErrNotFound) {
		t.Errorf("idle again: %v", err)
	}
}

// Whatever clients do, the sums agree with the parts, and nothing is left when all are gone.
func TestSumsAgreeWithTheirParts(t *testing.T) {
	t.Parallel()
	for seed := range uint64(20) {
		rng := rand.New(rand.NewPCG(seed, 1))
		b := newBench(t, func(_ *Config, k *Knobs) {
			k.NVMLLag, k.FreeLag = time.Duration(rng.IntN(2))*100*time.Millisecond, time.Duration(rng.IntN(2))*50*time.Millisecond
			k.LateBytes, k.LateTime, k.TransientBytes = 8*mib, 100*time.Millisecond, 20*mib
		})
		type open struct {
			*Client
			ctx     []uint64
			handles []uint64
		}
		var clients []*open
		for range 2000 {
			b.wait(time.Duration(rng.IntN(3)) * time.Millisecond)
			if len(clients) == 0 || rng.IntN(40) == 0 {
				clients = append(clients, &open{Client: b.open(1 + rng.IntN(8))})
			}
			i := rng.IntN(len(clients))
			c := clients[i]
			switch rng.IntN(10) {
			case 0:
				if h, _, err := c.CreateContext(b.now, wire.ListCompute, wire.ContextWhole); err == nil {
					c.ctx = append(c.ctx, h)
				}
			case 1:
				if len(c.ctx) > 0 {
					if _, err := c.DestroyContext(b.now, c.ctx[0]); err != nil {
						t.Fatal(err)
					}
					c.ctx = c.ctx[1:]
				}
			case 2:
				if rng.IntN(4) == 0 {
					c.Close(b.now)
					clients = append(clients[:i], clients[i+1:]...)
				}
			case 3, 4, 5:
				if len(c.handles) > 0 {
					j := rng.IntN(len(c.handles))
					if _, _, err := c.Free(b.now, c.handles[j]); err != nil && !errors.Is(err, ErrNotFound) {
						t.Fatal(err) // not found: went with its context
					}
					c.handles = append(c.handles[:j], c.handles[j+1:]...)
				}
			default:
				ctx := uint64(0)
				if len(c.ctx) > 0 {
					ctx = c.ctx[rng.IntN(len(c.ctx))]
				}
				n := uint64(1) << rng.IntN(31)
				a, err := c.Allocate(b.now, ctx, n, wire.Kind([]int{0, 0, 2}[rng.IntN(3)]))
				if err == nil {
					c.handles = append(c.handles, a.Handle)
				} else if !errors.Is(err, ErrNoMemory) {
					t.Fatal(err)
				}
			}
			st := b.State(b.now)
			var held, managed, groups uint64
			for _, p := range st.Processes {
				held += p.UsedBytes
				managed += p.ManagedBytes
			}
			for _, g := range st.Cgroups {
				groups += g.UsedBytes
			}
			if held+managed != st.UsedBytes || managed != st.ManagedBytes || groups != held || st.UsedBytes > st.CUDATotalBytes {
				t.Fatalf("seed %d: held %d + managed %d, used %d, groups %d of %d", seed, held, managed, st.UsedBytes, groups, st.CUDATotalBytes)
			}
		}
		for _, c := range clients {
			c.Close(b.now)
		}
		b.wait(time.Minute)
		if used := b.usedMiB(); used != 0 {
			t.Errorf("seed %d: %d MiB left", seed, used)
		}
		b.wantRows("all gone", map[uint32]uint64{})
	}
}

func TestHistoryKeepsTheNewestPoints(t *testing.T) {
	t.Parallel()
	h := history{limit: 8}
	for i := range int64(100) {
		h.add(Point{TimeNS: i, UsedBytes: uint64(i)})
		if got := h.at(i); got.UsedBytes != uint64(i) {
			t.Fatalf("at %d: %+v", i, got)
		}
	}
	if len(h.points) > 8 || h.at(98).UsedBytes != 98 || h.at(0) != (Point{}) {
		t.Errorf("%d points, at 98 %+v, at 0 %+v", len(h.points), h.at(98), h.at(0))
	}
}

func TestHistoryOfAnEndedProcessIsBounded(t *testing.T) {
	t.Parallel()
	b := newBench(t, nil)
	c := b.open(7)
	for range endedPoints {
		b.wait(time.Millisecond)
		a := b.alloc(c, 0, 2*mib, wire.KindDevice)
		b.wait(time.Millisecond)
		if _, _, err := c.Free(b.now, a.Handle); err != nil {
			t.Fatal(err)
		}
	}
	if n := len(b.Histories(b.now, 7)[0].Points); n < 2*endedPoints {
		t.Errorf("%d points while it lives", n)
	}
	c.Close(b.now)
	points := b.Histories(b.now, 7)[0].Points
	if len(points) != endedPoints || points[len(points)-1].TimeNS != b.now {
		t.Errorf("%d points after its end, the last at %d, now %d", len(points), points[len(points)-1].TimeNS, b.now)
	}
}

func TestEndedProcessesAreBounded(t *testing.T) {
	t.Parallel()
	b := newBench(t, nil)
	for pid := range endedProcesses + 10 {
		b.open(pid + 1).Close(b.now)
	}
	if n := len(b.State(b.now).Processes); n != endedProcesses {
		t.Errorf("%d processes kept, want %d", n, endedProcesses)
	}
}

func TestSplit(t *testing.T) {
	t.Parallel()
	for name := range models {
		whole, err := Model(name)
		if err != nil {
			t.Fatal(err)
		}
		whole.UUID = SeededUUID("x", 3)
		for n := 1; n <= wire.MIGMax; n++ {
			whole.Instances = n
			parts := whole.Split()
			seen := map[string]bool{whole.UUIDText(): true}
			var total, contexts uint64
			for i, p := range parts {
				if p.Instance != i+1 || p.Instances != 0 || p.GPUUUID != whole.UUID || seen[p.UUIDText()] || p.TotalBytes%wire.PageBytes != 0 {
					t.Errorf("%s in %d, instance %d: %+v", name, n, i, p)
				}
				seen[p.UUIDText()] = true
				total += p.TotalBytes
				contexts += p.ContextBytes
			}
			if len(parts) != n || total > whole.TotalBytes || total+uint64(n)*wire.PageBytes < whole.TotalBytes || contexts > whole.ContextBytes+uint64(n)*wire.PageBytes {
				t.Errorf("%s in %d: %d instances, %d bytes, contexts %d", name, n, len(parts), total, contexts)
			}
		}
	}
}
