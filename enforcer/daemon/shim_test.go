// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"encoding/binary"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/gpufence/gpufence/enforcer/api"
	"github.com/gpufence/gpufence/enforcer/config"
	"github.com/gpufence/gpufence/enforcer/ledger"
	"github.com/gpufence/gpufence/enforcer/quota"
)

// fakeShim writes a slot as the shim of a process does; shim/abi.h is the layout.
type fakeShim struct {
	t    *testing.T
	f    *os.File
	slot int64
	gen  uint64
}

const (
	slotBytes  = 0x80 + 64*16
	slotsBegin = 4096
)

// shimOf opens the pod's ledger, locks a slot and claims it for a process.
func shimOf(t *testing.T, resp api.PrepareResponse, slot int, pid int) *fakeShim {
	t.Helper()
	var path string
	for _, f := range resp.Files {
		if filepath.Base(f.Destination) == ledger.LedgerName {
			path = f.Source
		}
	}
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { f.Close() })
	s := &fakeShim{t: t, f: f, slot: slotsBegin + int64(slot)*slotBytes, gen: 1}
	lock := unix.Flock_t{Type: unix.F_WRLCK, Start: s.slot, Len: slotBytes}
	if err := unix.FcntlFlock(f.Fd(), unix.F_OFD_SETLK, &lock); err != nil {
		t.Fatal(err)
	}
	var ns uint64
	link, err := os.Readlink("/proc/self/ns/pid")
	if err != nil {
		t.Fatal(err)
	}
	if _, err := fmt.Sscanf(link, "pid:[%d]", &ns); err != nil {
		t.Fatal(err)
	}
	s.put(8, ns)
	s.put(0, s.gen<<40|1<<32|uint64(pid))
	b := make([]byte, 8)
	binary.LittleEndian.PutUint64(b, uint64(slot+1))
	if _, err := f.WriteAt(b, 0x28); err != nil { // high_slot
		t.Fatal(err)
	}
	return s
}

func (s *fakeShim) put(offset int64, v uint64) {
	s.t.Helper()
	var b [8]byte
	binary.LittleEndian.PutUint64(b[:], v)
	if _, err := s.f.WriteAt(b[:], s.slot+offset); err != nil {
		s.t.Fatal(err)
	}
}

func (s *fakeShim) get(offset int64) uint64 {
	s.t.Helper()
	var b [8]byte
	if _, err := s.f.ReadAt(b[:], s.slot+offset); err != nil {
		s.t.Fatal(err)
	}
	return binary.LittleEndian.Uint64(b[:])
}

// charge sets the device counter of the pod's first GPU; refused its events_max.
func (s *fakeShim) charge(bytes uint64) { s.put(0x80, s.gen<<40|bytes/ledger.UnitBytes) }
func (s *fakeShim) refused(n uint64)    { s.put(0x80+0x28, n) }

// exits drops the lock, as the kernel does with a process.
func (s *fakeShim) exits() { s.f.Close() }

func (b *bench) runShim(id string, annotations ...string) (*process, *fakeShim, api.PrepareResponse) {
	b.t.Helper()
	req := request(id, annotations...)
	resp := b.prepare(req)
	p := b.run(req)
	return p, shimOf(b.t, resp, 0, p.pid), resp
}

func TestShimIsSeenAndAccounted(t *testing.T) {
	b := newBench(t)
	b.start()
	p, shim, _ := b.runShim("a", "memory.max=4Gi")
	shim.charge(2 * gib)
	b.gpu.set(p.pid, gib) // NVML lags behind
	b.eventually("the slot is seen", func() bool { return b.view("a").GPUs[0].Ledger == 2*gib })
	v := b.view("a")
	if g := v.GPUs[0]; g.Current != 2*gib || g.NVML != gib || g.Excess != 0 {
		t.Errorf("GPU: %+v", g)
	}
	if v.Fences[1].State != "seen" || len(v.Processes) != 1 || v.Processes[0].Slot != 0 {
		t.Errorf("fences %+v, processes %+v", v.Fences, v.Processes)
	}
	// What NVML shows beyond the slot is published, so that the shim leaves room for it.
	b.gpu.set(p.pid, 3*gib)
	b.eventually("the excess is published", func() bool { return b.page("a").PodExcessBytes == gib })
	if g := b.view("a").GPUs[0]; g.Current != 3*gib || g.Excess != gib {
		t.Errorf("GPU: %+v", g)
	}
	// A liar gains nothing beyond its own pod: the kill goes by NVML.
	shim.charge(0)
	b.gpu.set(p.pid, 5*gib)
	if sig := p.signalled(); sig != syscall.SIGKILL {
		t.Errorf("ended by %v", sig)
	}
}

func TestReportedEventsSurvive(t *testing.T) {
	b := newBench(t)
	b.start()
	p, shim, _ := b.runShim("a", "memory.max=4Gi", "memory.oom.group=false")
	other := b.also(p)
	shim.charge(gib)
	b.gpu.set(p.pid, gib)
	shim.refused(5)
	b.eventually("it is counted", func() bool { return b.view("a").GPUs[0].Events.Max == 5 })
	b.crash()
	if n := b.view("a").GPUs[0].Events.Max; n < 5 {
		t.Errorf("%d after a restart", n)
	}
	shim.refused(7)
	b.eventually("it goes on", func() bool { return b.view("a").GPUs[0].Events.Max == 7 })

	// The process exits; NVML lists it for a while: dying. Then the slot is taken back.
	_ = p.cmd.Process.Kill()
	<-p.done
	shim2, err := os.OpenFile(shim.f.Name(), os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer shim2.Close()
	shim.exits()
	shim.f = shim2
	b.eventually("the slot is marked", func() bool { return shim.get(0)>>32&0xff == 2 })
	b.eventually("it is dying", func() bool { g := b.view("a").GPUs[0]; return g.Dying == gib && g.Current == 0 })
	b.gpu.set(p.pid, 0)
	b.eventually("the slot is free", func() bool { return shim.get(0)>>32&0xff == 0 })
	if gen := shim.get(0) >> 40; gen == shim.gen {
		t.Error("the slot's generation is the old one")
	}
	if v := b.view("a"); v.GPUs[0].Events.Max != 7 || v.GPUs[0].Dying != 0 || v.State != "running" {
		t.Errorf("view: %+v", v)
	}
	b.crash()
	b.samples(3)
	if n := b.view("a").GPUs[0].Events.Max; n != 7 {
		t.Errorf("%d after reclaim and restart", n)
	}
	_ = other.Process.Kill()
	_ = other.Wait()
	b.finish(p)
	b.eventually("it is collected", func() bool { return b.view("a").State == "ended" })
	if n := b.view("a").GPUs[0].Events.Max; n != 7 {
		t.Errorf("%d after its end", n)
	}
}

// A pod may destroy its ledger: its own shim accounting suffers, nothing else.
func TestBrokenLedger(t *testing.T) {
	for _, tt := range []struct {
		name   string
		breaks func(*testing.T, *fakeShim)
	}{
		{"cut", func(t *testing.T, s *fakeShim) {
			if err := s.f.Truncate(100); err != nil {
				t.Fatal(err)
			}
		}},
		{"emptied", func(t *testing.T, s *fakeShim) {
			if err := s.f.Truncate(0); err != nil {
				t.Fatal(err)
			}
		}},
		{"scribbled", func(t *testing.T, s *fakeShim) {
			if _, err := s.f.WriteAt([]byte(strings.Repeat("\xff", slotsBegin)), 0); err != nil {
				t.Fatal(err)
			}
		}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			b := newBench(t)
			b.tmp = true
			b.start()
			bad, shim, _ := b.runShim("bad", "memory.max=4Gi")
			good, goodShim, _ := b.runShim("good", "memory.max=4Gi")
			goodShim.charge(gib)
			shim.charge(gib)
			b.eventually("both are seen", func() bool {
				return b.view("bad").GPUs[0].Ledger == gib && b.view("good").GPUs[0].Ledger == gib
			})
			tt.breaks(t, shim)
			b.eventually("it is said", func() bool { return len(b.events("ledger-broken")) == 1 })
			if ev := b.events("ledger-broken")[0]; ev.Container.ID != "bad" {
				t.Errorf("event: %+v", ev)
			}
			b.gpu.set(good.pid, 2*gib)
			b.eventually("the other pod is accounted", func() bool { g := b.view("good").GPUs[0]; return g.NVML == 2*gib && g.Ledger == gib })
			b.samples(3)
			if !bad.alive() || len(b.events("ledger-broken")) != 1 {
				t.Errorf("alive %v, events %+v", bad.alive(), b.events("ledger-broken"))
			}
			b.gpu.set(bad.pid, 5*gib)
			if sig := bad.signalled(); sig != syscall.SIGKILL {
				t.Errorf("its limit does not hold any more: %v", sig)
			}
			if !good.alive() {
				t.Error("the other pod was hit")
			}
		})
	}
}

// What a context costs is learned in a pod, for this pod, and within bounds.
func TestContextIsLearned(t *testing.T) {
	b := newBench(t)
	b.start()
	p, shim, _ := b.runShim("a", "memory.max=4Gi")
	liar, lie, _ := b.runShim("liar", "memory.max=4Gi")
	shim.charge(256 * mib) // one context, at its published size
	b.gpu.set(p.pid, 200*mib)
	lie.charge(256 * mib)
	b.gpu.set(liar.pid, mib)
	b.eventually("it is published", func() bool { return b.page("a").ContextBytes == 200*mib })
	b.samples(20)
	if got := b.page("liar").ContextBytes; got != 256*mib {
		t.Errorf("a context of %d bytes was believed", got)
	}
	// More than the upper bound is no context either.
	b.gpu.set(liar.pid, 300*mib)
	b.samples(20)
	if got := b.page("liar").ContextBytes; got != 256*mib {
		t.Errorf("a context of %d bytes was believed", got)
	}
	// It outlives a restart.
	if v := b.view("a"); v.Level != quota.LevelReactive {
		t.Errorf("level %s", v.Level)
	}
	b.crash()
	b.samples(3)
	if got := b.page("a").ContextBytes; got != 200*mib {
		t.Errorf("after a restart: %d", got)
	}
}

// TestSlowGPUBesideFast has a pod with one GPU whose NVML calls take several periods. What its
// process has freed there while NVML still shows it is explained by the slot's peak, however many
// samples the fast one has seen meanwhile; and the fast one is sampled at its own pace.
func TestSlowGPUBesideFast(t *testing.T) {
	b := newBench(t, func(c *config.Config) { c.Settle = time.Second })
	slow := newFakeGPU(1, uuid1)
	slow.takes = 130 * time.Millisecond // six periods
	b.nvml.gpus = append(b.nvml.gpus, slow)
	b.start()
	req := request("a", "memory.max=4Gi")
	req.Devices.Selectors = []string{"0", "1"}
	resp := b.prepare(req)
	p := b.run(req)
	shim := shimOf(t, resp, 0, p.pid)
	const onSlow = 0x80 + 64
	charge := func(bytes uint64) { shim.put(onSlow, shim.gen<<40|bytes/ledger.UnitBytes) }
	free := func() { // as the shim does: the peak under the newest number, then the counter
		n := b.published("a").Sample
		shim.put(onSlow+0x18+8*int64(n&1), n<<40|3*gib/ledger.UnitBytes)
		charge(0)
	}
	b.samples(60) // the history must be as long as NVML may lag
	before := b.published("a").Sample
	fast := b.gpu.count()
	for range 4 {
		charge(3 * gib)
		time.Sleep(10 * time.Millisecond)
		freed := time.Now()
		free()
		slow.set(p.pid, 3*gib)
		end := freed.Add(450 * time.Millisecond) // so much NVML lags
		for time.Now().Before(end) {
			// Beyond settle, as where this test does not run for so long, it is rightly published.
			if e := b.published("a").GPU[1].ExcessBytes; e != 0 && time.Since(freed) < b.cfg.Settle {
				t.Fatalf("an excess of %d is published", e)
			}
			time.Sleep(5 * time.Millisecond)
		}
		slow.set(p.pid, 0)
		time.Sleep(20 * time.Millisecond)
	}
	if n := b.published("a").Sample; n == before {
		t.Error("the number stands still")
	}
	if n := b.gpu.count() - fast; n < 20 {
		t.Errorf("the fast GPU was sampled %d times in 2 s", n)
	}
	// What no slot explains is found all the same.
	slow.set(p.pid, 2*gib)
	b.eventually("the excess is published", func() bool { return b.published("a").GPU[1].ExcessBytes == 2*gib })
}

// Where nothing happens, no number begins and heartbeats are rarer, but go on. What comes and goes while a
// number stands still explains what NVML shows of it later, like any other peak; then numbers go on.
func TestNumberStandsStill(t *testing.T) {
	b := newBench(t, func(c *config.Config) { c.Settle = time.Second })
	b.start()
	p, shim, _ := b.runShim("a", "memory.max=4Gi")
	shim.charge(gib)
	b.gpu.set(p.pid, gib)
	stands := func() (at uint64) {
		t.Helper()
		b.eventually("the number stands still", func() bool {
			at = b.published("a").Sample
			b.samples(5)
			return b.published("a").Sample == at
		})
		return at
	}
	at := stands()
	before := b.published("a").Heartbeat
	b.eventually("the heart goes on beating", func() bool { return b.published("a").Heartbeat > before })

	// As the shim does: the charge, the peak, and the free, all of them between two looks, or not.
	for range 3 {
		at = stands()
		shim.charge(3 * gib)
		shim.put(0x80+0x18+8*int64(at&1), at<<40|3*gib/ledger.UnitBytes)
		shim.charge(gib)
		b.gpu.set(p.pid, 3*gib)
		for end := time.Now().Add(400 * time.Millisecond); time.Now().Before(end); time.Sleep(5 * time.Millisecond) { // so much NVML lags
			if e := b.published("a").GPU[0].ExcessBytes; e != 0 {
				t.Fatalf("an excess of %d is published", e)
			}
		}
		b.gpu.set(p.pid, gib)
		b.eventually("a number begins", func() bool { return b.published("a").Sample > at })
	}

	// What only the ledger tells is found, too: NVML goes on to say what it said.
	stands()
	shim.charge(2 * gib)
	b.eventually("the charge is seen", func() bool { return b.view("a").GPUs[0].Ledger == 2*gib })
	// And what no slot explains.
	stands()
	b.gpu.set(p.pid, 3*gib)
	b.eventually("the excess is published", func() bool { return b.published("a").GPU[0].ExcessBytes == gib })
}

// Whatever may have been changed under the lock makes the next sample be compared with everything.
func TestChangesAreSeen(t *testing.T) {
	var l lock
	l.Lock()
	l.Unlock() //nolint:staticcheck // it is the count that matters
	l.LockToLook()
	if l.changes != 1 {
		t.Errorf("%d changes were counted", l.changes)
	}
	l.Unlock()

	b := newBench(t)
	b.start()
	p := b.run(request("a", "memory.max=4Gi"))
	b.gpu.set(p.pid, gib)
	b.eventually("a sample says nothing new", func() bool {
		b.d.mu.LockToLook()
		defer b.d.mu.Unlock()
		g, pods := b.d.gpus[uuid0], b.d.reg.PodsOn(uuid0)
		repeats := func() bool { return b.d.repeats(g, b.d.sample+1, pods, g.pages.of(b.d, pods)) }
		if !g.still || !repeats() {
			return false
		}
		c, err := b.d.reg.Find("a")
		if err != nil {
			t.Fatal(err)
		}
		c.Priority++
		b.d.mu.changed() // as whoever locks to change
		if repeats() {
			t.Error("a change is left out")
		}
		return true
	})
}
