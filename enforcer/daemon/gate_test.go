// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"context"
	"errors"
	"io"
	"maps"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/gpufence/gpufence/bpf"
	"github.com/gpufence/gpufence/enforcer/api"
	"github.com/gpufence/gpufence/enforcer/config"
	"github.com/gpufence/gpufence/enforcer/fence"
	"github.com/gpufence/gpufence/enforcer/ledger"
	"github.com/gpufence/gpufence/enforcer/policy"
)

// gateKernel is a kernel that does as it is told.
type gateKernel struct {
	mu       sync.Mutex
	settings bpf.Settings
	policies map[uint64]bpf.Policy
	usage    map[uint64]*bpf.Usage
	events   chan bpf.Event
	failing  error // of SetPolicy
	// superseded is how often other versions' gates were taken down.
	superseded int
}

func (k *gateKernel) locked(f func()) {
	k.mu.Lock()
	defer k.mu.Unlock()
	f()
}

func (k *gateKernel) Configure(s bpf.Settings) error    { k.locked(func() { k.settings = s }); return nil }
func (k *gateKernel) SetDevices([]bpf.Device) error     { return nil }
func (k *gateKernel) SetExempt([]uint64) error          { return nil }
func (k *gateKernel) AttachCopies() (bpf.Copies, error) { return bpf.CopiesBTF, nil }
func (k *gateKernel) ReleaseCopies() error              { return nil }
func (k *gateKernel) Carrier() bpf.Carrier              { return bpf.CarrierLSM }
func (k *gateKernel) Copies() bpf.Copies                { return bpf.CopiesBTF }
func (k *gateKernel) Release() string                   { return "6.12.0" }
func (k *gateKernel) Misses() (uint64, error)           { return 0, nil }
func (k *gateKernel) Close() error                      { return nil }
func (k *gateKernel) DropPolicy(c uint64) error {
	k.locked(func() { delete(k.policies, c); delete(k.usage, c) })
	return nil
}
func (k *gateKernel) SetPolicy(c uint64, p bpf.Policy) (err error) {
	k.locked(func() {
		if err = k.failing; err != nil {
			return
		}
		k.policies[c] = p
		if k.usage[c] == nil {
			k.usage[c] = &bpf.Usage{}
		}
	})
	return err
}
func (k *gateKernel) Supersede() error { k.locked(func() { k.superseded++ }); return nil }

func (k *gateKernel) Managed() (ids []uint64, err error) {
	k.locked(func() { ids = slices.Collect(maps.Keys(k.policies)) })
	return ids, nil
}
func (k *gateKernel) GiveBack(c, n, _ uint64) (bool, error) {
	_, err := k.Adjust(c, -int64(n), false)
	return true, err
}
func (k *gateKernel) Adjust(c uint64, n int64, reset bool) (out bpf.Usage, err error) {
	k.locked(func() {
		u := k.usage[c]
		if u == nil {
			err = bpf.ErrUnmanaged
			return
		}
		u.Used = uint64(int64(u.Used) + n)
		u.Peak = max(u.Peak, u.Used)
		out = *u
		if reset {
			u.Peak = u.Used
		}
	})
	return out, err
}
func (k *gateKernel) Events(ctx context.Context, tell func(bpf.Event)) error {
	for {
		select {
		case e := <-k.events:
			tell(e)
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// gateBench is a node whose kernel takes the gate.
func gateBench(t *testing.T, edit ...func(*config.Config)) (*bench, *gateKernel) {
	t.Helper()
	k := &gateKernel{policies: map[uint64]bpf.Policy{}, usage: map[uint64]*bpf.Usage{}, events: make(chan bpf.Event)}
	b := newBench(t, append([]func(*config.Config){func(c *config.Config) { c.Gate = "enforce" }}, edit...)...)
	proc := t.TempDir()
	for name, text := range map[string]string{
		"devices": "195 nvidia\n511 nvidia-uvm\n", "driver/nvidia/gpus/0/information": "GPU UUID: " + uuid0 + "\nDevice Minor: 0\n",
		"self/cgroup": "0::/system.slice/x\n",
	} {
		path := filepath.Join(proc, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	b.gate = fence.GateOptions{Kernel: k, Proc: proc, Sys: proc}
	if b.host.Unified() == "" {
		if os.Getenv("GPUFENCE_MUST") == "1" {
			t.Fatal("needs a cgroup v2 tree")
		}
		t.Skip("SKIPPED: needs a cgroup v2 tree")
	}
	return b, k
}

// account is the only one that there is.
func (k *gateKernel) account(t *testing.T) (cgroup uint64) {
	t.Helper()
	k.locked(func() {
		if len(k.usage) != 1 {
			t.Fatalf("%d accounts", len(k.usage))
		}
		for cgroup = range k.usage {
		}
	})
	return cgroup
}

func (k *gateKernel) change(cgroup uint64, f func(*bpf.Usage)) {
	k.locked(func() { f(k.usage[cgroup]) })
}

// TestForgedFreeOfAQuietContainer: the gate was made to see a free that the driver did not do, and nothing else
// happens: every answer of NVML is as the last. It is found and charged back.
func TestForgedFreeOfAQuietContainer(t *testing.T) {
	b, k := gateBench(t, func(c *config.Config) { c.ContextBytes = 16 * mib })
	b.start()
	c := b.run(request("liar", "memory.max=4Gi"))
	own := k.account(t)
	k.change(own, func(u *bpf.Usage) {
		u.Used, u.Charged, u.Ended, u.Peak = gib, gib, gib, gib
		b.gpu.set(c.pid, gib)
	})
	settled := func() {
		t.Helper()
		b.eventually("nothing changes any more", func() bool {
			b.d.mu.Lock()
			defer b.d.mu.Unlock()
			g := b.d.gpus[uuid0]
			return g.machine.Settled() && g.outAt-g.last.at > 200*time.Millisecond
		})
	}
	forge := func() {
		k.change(own, func(u *bpf.Usage) { u.Used, u.Credited = 0, u.Credited+u.Used })
	}
	settled()
	forge()
	b.eventually("it is charged back", func() bool {
		u, err := k.Adjust(own, 0, false)
		return err == nil && u.Used >= gib-64*mib // less what may be the driver's own
	})
	if !c.alive() {
		t.Fatal("killed for the first time")
	}

	// It gives back what it is charged too much for, so it is believed again, and does the same once more.
	b.gpu.set(c.pid, gib-128*mib)
	k.change(own, func(u *bpf.Usage) { u.Used = gib })
	b.eventually("its frees are believed again", func() bool {
		k.mu.Lock()
		defer k.mu.Unlock()
		return !k.policies[own].NoCredit
	})
	settled()
	forge()
	b.eventually("it is killed", func() bool { return !c.alive() })
	b.eventually("the kill is in the journal", func() bool { return len(b.events("kill")) == 1 })
	decided := b.events("kill-decided")
	if len(decided) != 1 || decided[0].Container == nil || decided[0].Container.ID != "liar" || !strings.HasPrefix(decided[0].Message, "forged-free: ") || decided[0].GPU != uuid0 {
		t.Errorf("%+v", decided)
	}
}

// TestForgedFreeBehindForgedSlots: what a container writes into its slots, and how many it has, hides nothing.
func TestForgedFreeBehindForgedSlots(t *testing.T) {
	b, k := gateBench(t, func(c *config.Config) { c.ContextBytes = 512 * mib })
	b.start()
	req := request("liar", "memory.max=8Gi")
	resp := b.prepare(req)
	c := b.run(req)
	own := k.account(t)
	for i := range 8 { // of processes that have no context
		shimOf(t, resp, i, b.also(c).Process.Pid)
	}
	shim := shimOf(t, resp, 8, c.pid)
	shim.charge(4 * gib)
	shim.put(0x80+8, shim.gen<<40|8*gib/ledger.UnitBytes) // managed
	k.change(own, func(u *bpf.Usage) {
		u.Used, u.Charged, u.Ended, u.Peak = 4*gib, 4*gib, 4*gib, 4*gib
		b.gpu.set(c.pid, 4*gib)
	})
	b.eventually("its lie is seen", func() bool { g := b.view("liar").GPUs[0]; return g.Managed == 8*gib && g.NVML == 4*gib })
	b.samples(60)
	k.change(own, func(u *bpf.Usage) { u.Used, u.Credited = 0, u.Credited+u.Used })
	b.eventually("it is charged back", func() bool {
		u, err := k.Adjust(own, 0, false)
		return err == nil && u.Used >= 3*gib // less what may be one context, and the driver's own
	})
}

// TestGateOfAnInstance: the gate learns which GPU a MIG instance is of as soon as NVML says so, and after a restart, too.
func TestGateOfAnInstance(t *testing.T) {
	b, k := gateBench(t)
	proc := filepath.Join(b.gate.Proc, "driver/nvidia/gpus/1/information")
	if err := os.MkdirAll(filepath.Dir(proc), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(proc, []byte("GPU UUID: "+uuid1+"\nDevice Minor: 7\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	b.nvml.gpus = append(b.nvml.gpus, splitGPU(mig0)...)
	b.start()
	req := request("a", "memory.max=4Gi")
	req.Devices.Selectors, req.Devices.Present = []string{mig0}, true
	c := b.run(req)
	own := k.account(t)
	granted := func() (minors []int) {
		k.locked(func() { minors = k.policies[own].Minors })
		return minors
	}
	if !slices.Equal(granted(), []int{7}) {
		t.Errorf("nodes %v, want that of its GPU", granted())
	}
	b.drop()
	k.locked(func() { k.policies[own] = bpf.Policy{} })
	b.start()
	b.eventually("it is raised again when NVML has said it", func() bool { return slices.Equal(granted(), []int{7}) })
	if !c.alive() {
		t.Error("it was killed")
	}
}

// TestGateFollowsLimits: the kernel's limit is that of the grant, however that changes while the container runs, and a
// gate that is to refuse nothing lets everything pass.
func TestGateFollowsLimits(t *testing.T) {
	b, k := gateBench(t, func(c *config.Config) { c.Unmanaged = "deny" })
	b.start()
	c := b.run(request("a", "memory.max=4Gi"))
	own := k.account(t)
	holds := func(want uint64, enforce bool) (ok bool) {
		k.locked(func() {
			p := k.policies[own]
			ok = p.LimitBytes == want+max(16*mib, want/100) && p.Enforce == enforce && k.settings.CloseUnmanaged == enforce
		})
		return ok
	}
	set := func(value string) {
		t.Helper()
		resp, err := b.d.Set(context.Background(), "a", api.SetRequest{Values: map[string]string{"memory.max": value}, Wait: true})
		if err != nil {
			t.Fatal(err)
		}
		for _, r := range resp.Resizes {
			if r.State != policy.ResizeDone {
				t.Fatalf("%+v", r)
			}
		}
	}
	b.eventually("the gate is up", func() bool { return holds(4*gib, true) })
	set("6Gi")
	if !holds(6*gib, true) {
		t.Error("the limit has grown, and the kernel was not told")
	}
	set("2Gi")
	if !holds(2*gib, true) {
		t.Error("the limit has shrunk, and the kernel was not told")
	}
	if _, err := b.d.Disable(context.Background(), api.SwitchRequest{Reason: "test"}); err != nil {
		t.Fatal(err)
	}
	if !holds(2*gib, false) {
		t.Error("gpufence is disabled, and the kernel refuses")
	}
	if _, err := b.d.Resume(context.Background(), api.SwitchRequest{}); err != nil {
		t.Fatal(err)
	}
	if !holds(2*gib, true) {
		t.Error("gpufence is resumed, and the kernel lets pass")
	}
	if !c.alive() {
		t.Error("it was killed")
	}
}

// TestGateDenials: a denial is in the journal with process, size and reason, of its container, and in the metrics;
// not more than ten a second are told, and all are counted.
func TestGateDenials(t *testing.T) {
	b, k := gateBench(t)
	b.start()
	c := b.run(request("main", "memory.max=4Gi"))
	own := k.account(t)
	over := bpf.Event{Cgroup: own, SizeBytes: 2 * gib, UsedBytes: 3 * gib, LimitBytes: 4 * gib, PID: c.pid, Kind: 1, Errno: 12, Comm: "app\x1b[2J"}
	const many = 500
	for range many {
		k.events <- over
	}
	k.events <- bpf.Event{Cgroup: own, PID: c.pid, Kind: bpf.ManagedMemory, SizeBytes: gib, Comm: "app"}
	k.events <- bpf.Event{Cgroup: own, PID: c.pid, Kind: bpf.Changed, Comm: "app"}
	k.events <- bpf.Event{Cgroup: 1 << 40, PID: 7, Kind: 4711, Comm: "x"}
	scrape := func() string {
		w := httptest.NewRecorder()
		b.d.node.metrics.Handler().ServeHTTP(w, httptest.NewRequest("GET", "/metrics", nil))
		body, err := io.ReadAll(w.Result().Body)
		if err != nil {
			t.Fatal(err)
		}
		return string(body)
	}
	b.eventually("all are counted", func() bool { return strings.Contains(scrape(), `reason="other"`) })
	text := scrape()
	for _, want := range []string{
		`gpufence_gate_denials_total{container="main",enforced="true",namespace="default",pod="main",reason="over-limit"} 500`,
		`gpufence_gate_denied_bytes_total{container="main",enforced="true",namespace="default",pod="main",reason="over-limit"} 1.073741824e+12`,
		`gpufence_gate_denials_total{container="main",enforced="false",namespace="default",pod="main",reason="managed-memory"} 1`,
		`gpufence_gate_denials_total{container="main",enforced="true",namespace="default",pod="main",reason="changed-request"} 1`,
		`gpufence_gate_denials_total{container="",enforced="false",namespace="",pod="",reason="other"} 1`,
	} {
		if !strings.Contains(text, want+"\n") {
			var have []string
			for line := range strings.Lines(text) {
				if strings.HasPrefix(line, "gpufence_gate_") {
					have = append(have, line)
				}
			}
			t.Errorf("no %s in\n%s", want, strings.Join(have, ""))
		}
	}
	b.eventually("the changed request is told of, whatever else there was", func() bool { return len(b.events("gate-race")) == 1 })
	told := b.events("gate-refused")
	if len(told) == 0 || len(told) > many/5 {
		t.Fatalf("%d of %d are told", len(told), many)
	}
	e := told[0]
	if e.Container == nil || e.Container.ID != "main" || e.GPU != uuid0 || e.Numbers["pid"] != uint64(c.pid) || e.Numbers["bytes"] != 2*gib ||
		e.Numbers["charged_bytes"] != 3*gib || e.Numbers["limit_bytes"] != 4*gib || !strings.Contains(e.Message, "over-limit") {
		t.Errorf("%+v", e)
	}
}

func TestGateEvents(t *testing.T) {
	for _, tt := range []struct {
		denial fence.Denial
		kind   string
		text   string
	}{
		{fence.Denial{Event: bpf.Event{PID: 7, Comm: "app", Kind: 1, SizeBytes: gib, UsedBytes: gib}, Enforced: true}, "gate-refused", "the gate refused process 7 (app): over-limit, 1 GiB with 1 GiB charged"},
		{fence.Denial{Event: bpf.Event{PID: 7, Comm: "app", Kind: 4}, Enforced: true}, "gate-refused", "the gate refused process 7 (app): device-not-granted"},
		{fence.Denial{Event: bpf.Event{PID: 7, Comm: "app", Kind: 4}}, "gate-would-refuse", "the gate, which only counts here, would have refused process 7 (app): device-not-granted"},
		{fence.Denial{Event: bpf.Event{PID: 7, Comm: "app", Kind: bpf.Changed}, Enforced: true}, "gate-race", "process 7 (app) changed a request after the gate had read it, and was killed"},
		{fence.Denial{Event: bpf.Event{PID: -1, Comm: "app", Kind: bpf.Changed}}, "gate-race", "process -1 (app) changed a request after the gate had read it; the gate only counts here"},
	} {
		if ev := gateEvent(tt.denial, tt.denial.Kind.String()); ev.Type != tt.kind || ev.Message != tt.text {
			t.Errorf("%s: %s\nwant %s: %s", ev.Type, ev.Message, tt.kind, tt.text)
		}
	}
}

// TestGateTold: ten a second of each, then the next one says how many were left out; who rests is forgotten.
func TestGateTold(t *testing.T) {
	told := gateTold{perSecond: 10, of: map[gateWhom]*gateBudget{}}
	count := func(id policy.ContainerID, n int, at time.Duration) (tells int, untold uint64) {
		for range n {
			if s := told.take(gateWhom{id, false}, at); s.tell {
				tells, untold = tells+1, untold+s.untold
			}
		}
		return tells, untold
	}
	for _, tt := range []struct {
		id     policy.ContainerID
		n      int
		at     time.Duration
		tells  int
		untold uint64
	}{
		{"a", 100, time.Second, 10, 0},
		{"b", 3, time.Second, 3, 0},
		{"", 1000, time.Second, 10, 0},
		{"a", 5, 1999 * time.Millisecond, 0, 0},
		{"a", 5, 2 * time.Second, 5, 95},
		{"a", 5, 3 * time.Second, 5, 0},
		{"c", 1, 100 * time.Second, 1, 0},
	} {
		if tells, untold := count(tt.id, tt.n, tt.at); tells != tt.tells || untold != tt.untold {
			t.Errorf("%d of %q at %v: %d told, %d said not to be", tt.n, tt.id, tt.at, tells, untold)
		}
	}
	if s := told.take(gateWhom{"c", true}, 100*time.Second); !s.tell {
		t.Error("a changed request was not told of")
	}
	if len(told.of) != 2 {
		t.Errorf("%d are remembered", len(told.of))
	}
}

// What another version of the gate refuses stays refused until every container that runs is managed by this one.
func TestAnotherVersionStaysWhereSomebodyIsNotRaised(t *testing.T) {
	b, k := gateBench(t)
	b.start()
	b.run(request("a", "memory.max=4Gi"))
	taken := func() (n int) { k.locked(func() { n = k.superseded }); return n }
	b.eventually("the gate is up, and alone", func() bool { return taken() == 1 })
	k.locked(func() { k.failing = errors.New("no room") })
	b.crash()
	b.eventually("it says why", func() bool { return strings.Contains(b.log.String(), "no room") })
	if n := taken(); n != 1 {
		t.Errorf("another version was taken down %d times, though a container is not managed", n)
	}
	k.locked(func() { k.failing = nil })
	b.crash()
	b.eventually("it is up again, and alone", func() bool { return taken() == 2 })
}
