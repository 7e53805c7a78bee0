// SPDX-License-Identifier: Apache-2.0

package driver

import (
	"errors"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/gpufence/gpufence/tests/simgpu/wire"
)

func (b *bench) export(c *Client, handle uint64) uint64 {
	b.Helper()
	token, err := c.Export(b.now, handle)
	if err != nil {
		b.Fatalf("export: %v", err)
	}
	return token
}

func (b *bench) importing(c *Client, token uint64) uint64 {
	b.Helper()
	h, _, err := c.Import(b.now, token, 0)
	if err != nil {
		b.Fatalf("import: %v", err)
	}
	return h
}

func (b *bench) free(c *Client, handle uint64) {
	b.Helper()
	if _, _, err := c.Free(b.now, handle); err != nil {
		b.Fatalf("free: %v", err)
	}
}

// Shared memory counts once on the device, and under each of its holders; or, by the knob,
// under one.
func TestSharedMemory(t *testing.T) {
	t.Parallel()
	for _, charged := range []bool{true, false} {
		b := newBench(t, func(_ *Config, k *Knobs) { k.ImportsCharged = charged })
		c, d := b.open(1), b.open(2)
		a := b.alloc(c, 0, 64*mib, wire.KindPhysical)
		token := b.export(c, a.Handle)
		if again := b.export(c, a.Handle); again != token {
			t.Errorf("exported twice: %d and %d", token, again)
		}
		h := b.importing(d, token)
		if used := b.usedMiB(); used != 64 {
			t.Errorf("used %d MiB", used)
		}
		want := map[uint32]uint64{1: 64}
		if charged {
			want[2] = 64
		}
		b.wantRows("imported", want)
		if given, _, err := c.Free(b.now, a.Handle); err != nil || given != 0 {
			t.Errorf("free by the exporter gave %d, %v", given, err)
		}
		b.wantRows("the exporter let go", map[uint32]uint64{2: 64}) // somebody pays
		if used := b.usedMiB(); used != 64 {
			t.Errorf("used %d MiB", used)
		}
		if given, _, err := d.Free(b.now, h); err != nil || given != 64*mib {
			t.Errorf("free by the importer gave %d, %v", given, err)
		}
		b.wantRows("both let go", map[uint32]uint64{})
		if _, _, err := d.Import(b.now, token, 0); !errors.Is(err, ErrNotFound) {
			t.Errorf("import of what has gone: %v", err)
		}
	}
}

func TestSharedMemoryOutlivesItsExporter(t *testing.T) {
	t.Parallel()
	b := newBench(t, nil)
	c, d := b.open(1), b.open(2)
	d.proc.group = &group{path: "/other"}
	b.groups["/other"] = d.proc.group
	ctx := b.context(d)
	a := b.alloc(c, 0, 100*mib, wire.KindDevice)
	token := b.export(c, a.Handle)
	if _, _, err := d.Import(b.now, token, ctx); err != nil {
		t.Fatal(err)
	}
	cgroups := func() map[string]uint64 {
		m := map[string]uint64{}
		for _, g := range b.State(b.now).Cgroups {
			m[g.Cgroup] = g.UsedBytes / mib
		}
		return m
	}
	if m := cgroups(); m["/c"] != 100 || m["/other"] != 104 {
		t.Errorf("the exporter's cgroup pays: %v", m)
	}
	c.Close(b.now)
	if m := cgroups(); m["/c"] != 0 || m["/other"] != 204 {
		t.Errorf("then the importer's: %v", m)
	}
	b.wantRows("the exporter died", map[uint32]uint64{2: 204})
	if _, err := d.DestroyContext(b.now, ctx); err != nil { // in which it was opened
		t.Fatal(err)
	}
	if used := b.usedMiB(); used != 0 {
		t.Errorf("used %d MiB", used)
	}
	b.wantRows("context gone", map[uint32]uint64{})
}

func TestDescriptorsKeepMemory(t *testing.T) {
	t.Parallel()
	b := newBench(t, nil)
	c, d := b.open(1), b.open(2)
	a := b.alloc(c, 0, 64*mib, wire.KindPhysical)
	token := b.export(c, a.Handle)
	letGo, err := b.Keep(b.now, token)
	if err != nil {
		t.Fatal(err)
	}
	c.Close(b.now)
	if used := b.usedMiB(); used != 64 {
		t.Errorf("used %d MiB", used)
	}
	b.wantRows("nobody's", map[uint32]uint64{})
	h := b.importing(d, token)
	letGo(b.now)
	b.wantRows("the importer's", map[uint32]uint64{2: 64})
	b.free(d, h)
	if used := b.usedMiB(); used != 0 {
		t.Errorf("used %d MiB", used)
	}
	if _, err := b.Keep(b.now, token); !errors.Is(err, ErrNotFound) {
		t.Errorf("keep what has gone: %v", err)
	}
}

// Who imports a small allocation gets its whole page, which stays when it is empty.
func TestSharedPage(t *testing.T) {
	t.Parallel()
	b := newBench(t, nil)
	c, d := b.open(1), b.open(2)
	ctx := b.context(c)
	one, two := b.alloc(c, ctx, 1000, wire.KindDevice), b.alloc(c, ctx, 1000, wire.KindDevice)
	token := b.export(c, one.Handle)
	if other := b.export(c, two.Handle); other != token {
		t.Error("two parts of a page are shared apart")
	}
	if page := b.export(c, one.Block); page != token {
		t.Error("the page is not its parts")
	}
	h := b.importing(d, token)
	b.free(c, one.Handle)
	if given, page, err := c.Free(b.now, two.Handle); err != nil || given != 0 || page != one.Block {
		t.Errorf("the last part: gave %d, page %d, %v", given, page, err)
	}
	if used := b.usedMiB(); used != 104+2 {
		t.Errorf("used %d MiB", used)
	}
	b.wantRows("empty, but imported", map[uint32]uint64{1: 104, 2: 2})
	b.free(d, h)
	if used := b.usedMiB(); used != 104 {
		t.Errorf("used %d MiB", used)
	}
}

func TestInvalidSharing(t *testing.T) {
	t.Parallel()
	b := newBench(t, nil)
	c := b.open(1)
	m := b.alloc(c, 0, mib, wire.KindManaged)
	if _, err := c.Export(b.now, m.Handle); !errors.Is(err, ErrInvalid) {
		t.Errorf("managed memory: %v", err)
	}
	if _, err := c.Export(b.now, 999); !errors.Is(err, ErrNotFound) {
		t.Errorf("no such handle: %v", err)
	}
	a := b.alloc(c, 0, 4*mib, wire.KindPhysical)
	token := b.export(c, a.Handle)
	if _, _, err := c.Import(b.now, token, 77); !errors.Is(err, ErrNotFound) {
		t.Errorf("no such context: %v", err)
	}
	h := b.importing(c, token) // its own: charged once
	b.wantRows("own import", map[uint32]uint64{1: 4})
	b.free(c, h)
	k := b.Knobs()
	k.Lost = true
	b.SetKnobs(b.now, k)
	if _, err := c.Export(b.now, a.Handle); !errors.Is(err, ErrLost) {
		t.Errorf("export from a lost GPU: %v", err)
	}
	if _, _, err := c.Import(b.now, token, 0); !errors.Is(err, ErrLost) {
		t.Errorf("import from a lost GPU: %v", err)
	}
	if err := c.ResizeContext(b.now, 1, 0); !errors.Is(err, ErrLost) {
		t.Errorf("resize on a lost GPU: %v", err)
	}
}

// Whatever processes do to one another's memory, the device's use is that of what anybody
// refers to, and each row that of what its process refers to.
func TestSharingAgreesWithAList(t *testing.T) {
	t.Parallel()
	for seed := range uint64(20) {
		rng := rand.New(rand.NewPCG(seed, 2))
		b := newBench(t, nil)
		type ref struct {
			c      *Client
			handle uint64
			token  uint64
		}
		var clients []*Client
		var refs []ref
		size := map[uint64]uint64{} // in MiB by token
		letGo := map[uint64]func(int64){}
		for range 1500 {
			b.wait(time.Millisecond)
			if len(clients) == 0 || rng.IntN(30) == 0 {
				clients = append(clients, b.open(1+rng.IntN(5)))
			}
			i := rng.IntN(len(clients))
			c := clients[i]
			switch op := rng.IntN(8); {
			case op < 2:
				n := uint64(1+rng.IntN(8)) * 2
				a := b.alloc(c, 0, n*mib, wire.KindPhysical)
				token := b.export(c, a.Handle)
				size[token] = n
				refs = append(refs, ref{c, a.Handle, token})
			case op < 4 && len(refs) > 0:
				token := refs[rng.IntN(len(refs))].token
				refs = append(refs, ref{c, b.importing(c, token), token})
			case op < 6 && len(refs) > 0:
				j := rng.IntN(len(refs))
				b.free(refs[j].c, refs[j].handle)
				refs = append(refs[:j], refs[j+1:]...)
			case op == 6 && len(refs) > 0:
				token := refs[rng.IntN(len(refs))].token
				if f := letGo[token]; f != nil {
					f(b.now)
					delete(letGo, token)
				} else if f, err := b.Keep(b.now, token); err != nil {
					t.Fatal(err)
				} else {
					letGo[token] = f
				}
			case op == 7 && rng.IntN(8) == 0:
				c.Close(b.now)
				clients = append(clients[:i], clients[i+1:]...)
				var left []ref
				for _, r := range refs {
					if r.c != c {
						left = append(left, r)
					}
				}
				refs = left
			}
			alive, rows := map[uint64]bool{}, map[uint32]uint64{}
			seen := map[[2]uint64]bool{}
			for _, r := range refs {
				alive[r.token] = true
				pid := uint64(r.c.proc.owner.PID)
				if !seen[[2]uint64{pid, r.token}] {
					seen[[2]uint64{pid, r.token}] = true
					rows[uint32(pid)] += size[r.token]
				}
			}
			for token := range letGo {
				alive[token] = true
			}
			var want uint64
			for token := range alive {
				want += size[token]
			}
			if used := b.usedMiB(); used != want {
				t.Fatalf("seed %d: used %d MiB, want %d", seed, used, want)
			}
			b.wantRows("random", rows)
		}
		for _, c := range clients {
			c.Close(b.now)
		}
		for _, f := range letGo {
			f(b.now)
		}
		if used := b.usedMiB(); used != 0 {
			t.Errorf("seed %d: %d MiB left", seed, used)
		}
	}
}

func TestContextsGrowAndShrink(t *testing.T) {
	t.Parallel()
	b := newBench(t, nil)
	c := b.open(1)
	ctx := b.context(c)
	for _, tt := range []struct {
		extra int64
		want  uint64
	}{{1, 106}, {100 << 20, 204}, {3 << 20, 108}, {0, 104}, {-40 << 20, 64}, {-1, 104}, {-1 << 40, 0}, {0, 104}} {
		if err := c.ResizeContext(b.now, ctx, tt.extra); err != nil {
			t.Fatal(err)
		}
		if used := b.usedMiB(); used != tt.want {
			t.Errorf("by %d: %d MiB, want %d", tt.extra, used, tt.want)
		}
	}
	for _, extra := range []int64{20 << 30, 1 << 50, -1 << 50} {
		if err := c.ResizeContext(b.now, ctx, extra); !errors.Is(err, ErrNoMemory) {
			t.Errorf("by %d: %v", extra, err)
		}
	}
	if err := c.ResizeContext(b.now, 99, 0); !errors.Is(err, ErrNotFound) {
		t.Errorf("no such context: %v", err)
	}
	if err := c.ResizeContext(b.now, ctx, 10<<20); err != nil {
		t.Fatal(err)
	}
	if given, err := c.DestroyContext(b.now, ctx); err != nil || given != 114*mib {
		t.Errorf("destroyed: %d MiB, %v", given/mib, err)
	}
}

func TestGreenContexts(t *testing.T) {
	t.Parallel()
	b := newBench(t, func(_ *Config, k *Knobs) { k.GreenBytes = 5 * mib })
	c := b.open(1)
	if _, _, err := c.CreateContext(b.now, wire.ListCompute, wire.ContextGreen); !errors.Is(err, ErrInvalid) {
		t.Errorf("on nothing: %v", err)
	}
	b.context(c)
	h, taken, err := c.CreateContext(b.now, wire.ListCompute, wire.ContextGreen)
	if err != nil || taken != 6*mib {
		t.Fatalf("%d bytes, %v", taken, err)
	}
	b.alloc(c, h, 10*mib, wire.KindDevice)
	b.wantRows("on a whole one", map[uint32]uint64{1: 104 + 6 + 10})
	if given, err := c.DestroyContext(b.now, h); err != nil || given != 16*mib {
		t.Errorf("gave %d, %v", given, err)
	}
	k := b.Knobs()
	k.GreenBytes = 20 * gib
	b.SetKnobs(b.now, k)
	if _, _, err := c.CreateContext(b.now, wire.ListCompute, wire.ContextGreen); !errors.Is(err, ErrNoMemory) {
		t.Errorf("too large: %v", err)
	}
}

func TestManagedMemoryThatWaitsForTheFirstTouch(t *testing.T) {
	t.Parallel()
	b := newBench(t, func(_ *Config, k *Knobs) { k.ManagedTouch = true })
	c := b.open(1)
	a := b.alloc(c, 0, 8*mib, wire.KindManaged)
	if used := b.usedMiB(); used != 0 || a.Grew != 0 {
		t.Errorf("untouched: %d MiB, grew %d", used, a.Grew)
	}
	if n, err := c.Migrate(b.now, a.Handle, true); err != nil || n != 8*mib || b.usedMiB() != 8 {
		t.Errorf("touched: %d, %v", n, err)
	}
}

func TestSettings(t *testing.T) {
	t.Parallel()
	b := newBench(t, func(_ *Config, k *Knobs) { k.PoolStepBytes, k.ModuleBytes = 3*mib, 7 })
	if step, module := b.Settings(); step != 4*mib || module != 7 {
		t.Errorf("step %d, module %d", step, module)
	}
	b = newBench(t, func(_ *Config, k *Knobs) { k.PoolStepBytes = 0 })
	if step, _ := b.Settings(); step != wire.PageBytes {
		t.Errorf("no step at all: %d", step)
	}
}
