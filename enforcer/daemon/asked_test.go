// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"context"
	"syscall"
	"testing"
	"time"

	"github.com/gpufence/gpufence/enforcer/api"
	"github.com/gpufence/gpufence/enforcer/config"
)

// ask counts up what a refused shim counts.
func (s *fakeShim) ask(n uint64) { s.put(0x30-s.slot, n) }

// served is how often the pod's shims were followed.
func (b *bench) served() uint64 {
	b.d.mu.Lock()
	defer b.d.mu.Unlock()
	var n uint64
	for _, rt := range b.d.runtime {
		n += rt.asked.served
	}
	return n
}

// registered registers a container that was prepared.
func (b *bench) registered(req api.PrepareRequest, p *process) {
	b.t.Helper()
	if _, err := b.d.Register(context.Background(), api.RegisterRequest{Key: req.Key, PID: p.pid}); err != nil {
		b.t.Fatalf("register %s: %v", req.Key.ID, err)
	}
}

// A shim that was refused gets the slot of a dead process back without waiting for the next period:
// the pass that reads its request looks for the owner, and asks NVML again at once.
func TestAskedBack(t *testing.T) {
	b := newBench(t, func(c *config.Config) {
		c.Sample, c.SampleIdle, c.Settle = patience/2, patience/2, 20*time.Millisecond
	})
	b.start()
	req := request("a", "memory.max=4Gi")
	resp := b.prepare(req)
	p := b.container()
	b.registered(req, p)
	dead := b.also(p)
	shim := shimOf(t, resp, 0, dead.Process.Pid)
	b.gpu.set(dead.Process.Pid, 2*gib)
	b.d.poke()
	b.eventually("the slot is known", func() bool { return b.view("a").GPUs[0].NVML == 2*gib })
	if err := dead.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = dead.Wait() // it was killed
	b.gpu.set(dead.Process.Pid, 0)
	shim.f.Close()
	shim = shimOf(t, resp, 1, p.pid) // another process, which is refused
	shim.ask(1)
	n := b.gpu.count()
	b.d.poke()
	b.eventually("a pass reads it", func() bool { return b.gpu.count() > n })
	read := time.Now()
	b.eventually("the next comes", func() bool { return b.gpu.count() > n+1 })
	if waited := time.Since(read); waited > b.cfg.Sample/2 {
		t.Errorf("the next sample came %s after the request was read, as if nobody had asked", waited)
	}
	if b.served() != 1 {
		t.Errorf("followed %d times", b.served())
	}
}

// Asking all the time makes gpufenced no busier than growing fast does.
func TestAskedAllTheTime(t *testing.T) {
	b := newBench(t, func(c *config.Config) { c.Sample, c.SampleIdle = 200*time.Millisecond, 200*time.Millisecond })
	b.start()
	req := request("a", "memory.max=4Gi")
	resp := b.prepare(req)
	p := b.container()
	b.registered(req, p)
	shim := shimOf(t, resp, 0, p.pid)
	n, began := b.gpu.count(), time.Now()
	for i := uint64(1); time.Since(began) < 2*time.Second; i++ {
		shim.ask(i)
		time.Sleep(time.Millisecond)
	}
	samples, most := b.gpu.count()-n, int(time.Since(began)/(50*time.Millisecond))+2
	if samples > most || b.served() == 0 {
		t.Errorf("%d samples, %d followed; at most %d", samples, b.served(), most)
	}
}

// TestSecondSampleIsNotMissed: a kill waits for a second sample just as long as it must, also where
// one that came too early for it was in progress when it was due.
func TestSecondSampleIsNotMissed(t *testing.T) {
	b := newBench(t, func(c *config.Config) {
		// Whoever waits for the period waits longer than this test.
		c.Sample, c.SampleIdle, c.SampleDeadline, c.KillInterval = time.Hour, time.Hour, patience, 300*time.Millisecond
	})
	b.start()
	p := b.run(request("a", "memory.max=1Gi"))
	b.gpu.set(p.pid, 2*gib)
	b.d.poke()
	began := func() (at time.Duration, asked bool) {
		b.d.mu.Lock()
		defer b.d.mu.Unlock()
		g := b.d.gpus[uuid0]
		return g.aboveAt, g.inFlight
	}
	b.eventually("the first sample says so", func() bool { at, _ := began(); return at > 0 })
	b.gpu.change(func() { b.gpu.takes = 500 * time.Millisecond })
	b.d.poke()
	b.eventually("the next one is in progress", func() bool { _, asked := began(); return asked })
	// On a machine so slow that it began late enough, it is the second sample itself.
	time.Sleep(100 * time.Millisecond) // it has looked at what it takes
	b.gpu.change(func() { b.gpu.takes = 0 })
	select {
	case <-p.done:
	case <-time.After(patience):
		t.Fatal("the second sample waits for its period")
	}
	if sig := p.signalled(); sig != syscall.SIGKILL {
		t.Errorf("ended by %v", sig)
	}
}
