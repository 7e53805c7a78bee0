// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"context"
	"errors"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/gpufence/gpufence/enforcer/api"
	"github.com/gpufence/gpufence/enforcer/config"
	"github.com/gpufence/gpufence/enforcer/quota"
)

func ctxb() context.Context { return context.Background() }

func (b *bench) ready() {
	b.t.Helper()
	b.eventually("gpufenced is ready", func() bool {
		h, err := b.d.Health(ctxb())
		return err == nil && h.Live && h.Ready
	})
}

// Quiesce lets NVML go, refuses starts with the reason, kills nobody; resume goes on where it was.
func TestQuiesceAndResume(t *testing.T) {
	b := newBench(t)
	d := b.start()
	p := b.run(request("a", "memory.max=1Gi"))
	b.gpu.set(p.pid, 512*mib)
	b.samples(2)
	b.ready()
	sw, err := d.Quiesce(ctxb(), api.SwitchRequest{Reason: "driver  upgrade\n"})
	if err != nil || sw.Position != api.SwitchQuiesced || sw.Reason != "driver upgrade" || sw.Since == nil {
		t.Fatalf("quiesce: %+v, %v", sw, err)
	}
	b.nvml.mu.Lock()
	inits, downs := b.nvml.inits, b.nvml.downs
	b.nvml.mu.Unlock()
	if downs != 1 {
		t.Errorf("NVML was shut down %d times", downs)
	}
	_, err = d.Prepare(ctxb(), request("b", "memory.max=1Gi"))
	wantCode(t, err, quota.CodeQuiesced)
	if !strings.Contains(err.Error(), "driver upgrade") {
		t.Errorf("the refusal does not say why: %v", err)
	}
	if h, err := d.Health(ctxb()); err != nil || !h.Live || h.Ready || h.Why == "" {
		t.Errorf("probes hear %+v, %v", h, err)
	}
	// Over its limit now, but nothing is known: nobody is asked, nobody is killed.
	b.gpu.set(p.pid, 4*gib)
	b.gpu.mu.Lock()
	before := b.gpu.samples
	b.gpu.mu.Unlock()
	time.Sleep(10 * b.cfg.Sample)
	b.gpu.mu.Lock()
	after := b.gpu.samples
	b.gpu.mu.Unlock()
	if after != before {
		t.Errorf("NVML was asked %d times", after-before)
	}
	if !p.alive() {
		t.Error("killed on unknown data")
	}
	if v := b.view("a"); v.GPUs[0].Known || v.State != "running" {
		t.Errorf("shown as known: %+v", v.GPUs[0])
	}
	// Twice is no error, and keeps the time.
	if again, err := d.Quiesce(ctxb(), api.SwitchRequest{Reason: "still"}); err != nil || !again.Since.Equal(*sw.Since) || again.Reason != "still" {
		t.Errorf("again: %+v, %v", again, err)
	}
	// A restart keeps it.
	b.drop()
	d = b.start()
	_, err = d.Prepare(ctxb(), request("b", "memory.max=1Gi"))
	wantCode(t, err, quota.CodeQuiesced)
	b.gpu.set(p.pid, 512*mib)
	if sw, err := d.Resume(ctxb(), api.SwitchRequest{}); err != nil || sw.Position != api.SwitchRunning || sw.Since != nil {
		t.Errorf("resume: %+v, %v", sw, err)
	}
	b.eventually("NVML is opened again", func() bool {
		b.nvml.mu.Lock()
		defer b.nvml.mu.Unlock()
		return b.nvml.inits > inits
	})
	b.ready()
	b.prepare(request("b", "memory.max=1Gi"))
	b.eventually("it is watched again", func() bool { return b.view("a").Level == quota.LevelReactive })
	// And kills again.
	b.gpu.set(p.pid, 4*gib)
	b.eventually("it is killed", func() bool { return !p.alive() })
	b.gpu.set(p.pid, 0)
	if sw, err := d.Resume(ctxb(), api.SwitchRequest{}); err != nil || sw.Position != api.SwitchRunning {
		t.Errorf("resume of a running one: %+v, %v", sw, err)
	}
}

func TestQuiesceInOneLife(t *testing.T) {
	b := newBench(t)
	d := b.start()
	b.ready()
	if _, err := d.Quiesce(ctxb(), api.SwitchRequest{}); err != nil {
		t.Fatal(err)
	}
	// Registered between prepare and quiesce: refused as well.
	if _, err := d.Resume(ctxb(), api.SwitchRequest{}); err != nil {
		t.Fatal(err)
	}
	b.ready()
	req := request("a", "memory.max=1Gi")
	b.prepare(req)
	if _, err := d.Quiesce(ctxb(), api.SwitchRequest{}); err != nil {
		t.Fatal(err)
	}
	p := b.container()
	_, err := d.Register(ctxb(), api.RegisterRequest{Key: req.Key, PID: p.pid})
	wantCode(t, err, quota.CodeQuiesced)
	if _, err := d.Resume(ctxb(), api.SwitchRequest{}); err != nil {
		t.Fatal(err)
	}
	b.ready()
	if _, err := d.Register(ctxb(), api.RegisterRequest{Key: req.Key, PID: p.pid}); err != nil {
		t.Errorf("after resume: %v", err)
	}
	_, err = d.Quiesce(ctxb(), api.SwitchRequest{Reason: strings.Repeat("x", 10_000)})
	wantCode(t, err, quota.CodeBadRequest)
}

// A call that hangs inside NVML cannot be let go; that is said, and starts are refused all the same.
func TestQuiesceWhileNVMLHangs(t *testing.T) {
	b := newBench(t)
	d := b.start()
	b.ready()
	hang := make(chan struct{})
	b.gpu.change(func() { b.gpu.hang = hang })
	b.eventually("the sample is given up", func() bool {
		gpus, err := d.GPUs(ctxb())
		return err == nil && !gpus[0].Known
	})
	ctx, cancel := context.WithTimeout(ctxb(), 100*time.Millisecond)
	defer cancel()
	_, err := d.Quiesce(ctx, api.SwitchRequest{})
	wantCode(t, err, quota.CodeGPUUnknown)
	_, err = d.Prepare(ctxb(), request("b", "memory.max=1Gi"))
	wantCode(t, err, quota.CodeQuiesced)
	if b.nvml.downs != 0 {
		t.Error("NVML was shut down under a call")
	}
	b.gpu.change(func() { b.gpu.hang = nil })
	close(hang)
}

// The break-glass: nothing is killed, everything starts, everybody is told; resume enforces again.
func TestDisable(t *testing.T) {
	b := newBench(t)
	d := b.start()
	req := request("a", "memory.max=1Gi")
	p := b.run(req)
	b.samples(2)
	_, err := d.Disable(ctxb(), api.SwitchRequest{Reason: " "})
	wantCode(t, err, quota.CodeBadRequest)
	sw, err := d.Disable(ctxb(), api.SwitchRequest{Reason: "kills the wrong ones"})
	if err != nil || sw.Position != api.SwitchDisabled {
		t.Fatalf("disable: %+v, %v", sw, err)
	}
	b.gpu.set(p.pid, 4*gib)
	b.eventually("it would be killed", func() bool { return len(b.events("would-kill")) > 0 })
	if !p.alive() {
		t.Fatal("killed while disabled")
	}
	if v := b.view("a"); v.Level != quota.LevelNone || v.Mode != quota.ModeObserve {
		t.Errorf("shown with level %s, mode %s", v.Level, v.Mode)
	}
	// What would be refused starts: no limit at all, and a limit that is wrong.
	for id, annotation := range map[string]string{"none": "x-other=1", "wrong": "memory.max=4096", "large": "memory.max=99Ti"} {
		resp, err := d.Prepare(ctxb(), request(id, annotation))
		if err != nil {
			t.Errorf("%s: %v", id, err)
			continue
		}
		if len(resp.CDIDevices) != 1 || len(resp.Notices) == 0 || !strings.Contains(resp.Notices[len(resp.Notices)-1], "gpufence is disabled") {
			t.Errorf("%s: %+v", id, resp)
		}
		q := b.container()
		if _, err := d.Register(ctxb(), api.RegisterRequest{Key: request(id).Key, PID: q.pid}); err != nil {
			t.Errorf("register %s: %v", id, err)
		}
	}
	if evs := b.events("start-unfenced"); len(evs) != 3 || !strings.Contains(evs[0].Message, "kills the wrong ones") {
		t.Errorf("%d starts were said: %v", len(evs), evs)
	}
	// What would not be refused keeps its limit for later.
	b.gpu.set(p.pid, 512*mib)
	b.run(request("fine", "memory.max=2Gi"))
	if v := b.view("fine"); v.GPUs[0].Limits.Max != 2*gib {
		t.Errorf("limit %d", v.GPUs[0].Limits.Max)
	}
	// It outlives the boot: its file is in the state folder.
	b.drop()
	if err := os.RemoveAll(filepath.Join(b.cfg.RunDir, "switch.json")); err != nil {
		t.Fatal(err)
	}
	d = b.start()
	n, err := d.Node(ctxb())
	if err != nil || n.Switch.Position != api.SwitchDisabled || n.Switch.Reason != "kills the wrong ones" || n.Level != string(quota.LevelNone) {
		t.Errorf("after a restart: %+v, %v", n, err)
	}
	if _, err := d.Resume(ctxb(), api.SwitchRequest{}); err != nil {
		t.Fatal(err)
	}
	b.gpu.set(p.pid, 4*gib)
	b.eventually("it is killed", func() bool { return !p.alive() })
	b.gpu.set(p.pid, 0)
	_, err = d.Prepare(ctxb(), request("later", "memory.max=4096"))
	wantCode(t, err, quota.CodeNoUnit)
}

// Without NVML the glass breaks, too.
func TestDisableWithoutNVML(t *testing.T) {
	b := newBench(t)
	b.nvml.initErr = errors.New("no driver")
	d := b.start()
	b.eventually("NVML was asked", func() bool { _, err := d.GPUs(ctxb()); return quota.CodeOf(err) == quota.CodeNVMLUnavailable })
	if h, err := d.Health(ctxb()); err != nil || !h.Live || h.Ready {
		t.Errorf("health %+v, %v", h, err)
	}
	if _, err := d.Disable(ctxb(), api.SwitchRequest{Reason: "incident"}); err != nil {
		t.Fatal(err)
	}
	resp, err := d.Prepare(ctxb(), request("a", "memory.max=1Gi"))
	if err != nil || len(resp.Grant.GPUs) != 0 || resp.Grant.Mode != quota.ModeObserve || len(resp.Notices) == 0 {
		t.Errorf("prepare: %+v, %v", resp, err)
	}
}

func TestDamagedSwitch(t *testing.T) {
	for _, tt := range []struct {
		dir  func(config.Config) string
		want string
	}{
		{func(c config.Config) string { return c.RunDir }, api.SwitchQuiesced},
		{func(c config.Config) string { return c.StateDir }, api.SwitchDisabled},
	} {
		b := newBench(t)
		dir := tt.dir(b.cfg)
		if err := os.MkdirAll(dir, 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(dir, switchFile), []byte(`{"position":"runn`), 0o600); err != nil {
			t.Fatal(err)
		}
		d := b.start()
		if n, err := d.Node(ctxb()); err != nil || n.Switch.Position != tt.want || n.Switch.Since == nil {
			t.Errorf("%s: %+v, %v", tt.want, n.Switch, err)
		}
		b.drop()
	}
}

func TestSwitchThatCannotBeKept(t *testing.T) {
	b := newBench(t)
	d := b.start()
	b.ready()
	// A folder where the file should go.
	for _, dir := range []string{b.cfg.RunDir, b.cfg.StateDir} {
		if err := os.MkdirAll(filepath.Join(dir, switchFile, "x"), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	_, err := d.Quiesce(ctxb(), api.SwitchRequest{})
	wantCode(t, err, quota.CodeStateDamaged)
	_, err = d.Disable(ctxb(), api.SwitchRequest{Reason: "x"})
	wantCode(t, err, quota.CodeStateDamaged)
	if n, err := d.Node(ctxb()); err != nil || n.Switch.Position != api.SwitchRunning {
		t.Errorf("thrown without being kept: %+v, %v", n.Switch, err)
	}
	left, err := filepath.Glob(filepath.Join(b.cfg.RunDir, ".tmp-*"))
	if err != nil || len(left) > 0 {
		t.Errorf("left behind: %v", left)
	}
}

// loader is a configuration file that a test writes.
type loader struct {
	mu   sync.Mutex
	cfg  config.Config
	err  error
	said []string
}

func (l *loader) load() (config.Loaded, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return config.Loaded{Config: l.cfg, Path: "/etc/x.toml", Text: []byte("# text\n")}, l.err
}

func TestReload(t *testing.T) {
	b := newBench(t)
	l := &loader{cfg: b.cfg}
	b.load, b.notify = l.load, func(s string) {
		l.mu.Lock()
		defer l.mu.Unlock()
		l.said = append(l.said, s)
	}
	d := b.start()
	p := b.run(request("a", "memory.max=1Gi"))
	b.gpu.set(p.pid, gib+32*mib) // within the slack of 64 MiB
	b.samples(4)
	if !p.alive() {
		t.Fatal("killed within its slack")
	}
	set := func(f func(*config.Config), err error) {
		l.mu.Lock()
		defer l.mu.Unlock()
		f(&l.cfg)
		l.err = err
	}
	// Wrong: nothing changes, and it is said.
	set(func(c *config.Config) { c.KillSlackBytes = 1 }, quota.NewError(quota.CodeBadPolicy, "x.toml line 3: nonsense"))
	_, err := d.Reload(ctxb(), api.ReloadRequest{})
	wantCode(t, err, quota.CodeBadPolicy)
	b.samples(4)
	if !p.alive() {
		t.Fatal("a wrong file is in force")
	}
	n, err := d.Node(ctxb())
	if err != nil || n.Config.Error == nil || n.Config.Error.Code != string(quota.CodeBadPolicy) {
		t.Errorf("the node does not say so: %+v, %v", n.Config, err)
	}
	if evs := b.events("config-wrong"); len(evs) != 1 || !strings.Contains(evs[0].Message, "nonsense") {
		t.Errorf("events: %+v", evs)
	}
	// Right: what can change does, what cannot is named.
	set(func(c *config.Config) {
		c.KillSlackBytes, c.KillSlackShare, c.ReserveBytes = mib, 0, 2*gib
		c.Socket = "/elsewhere"
		c.Policy.Ceiling = quota.Bytes(2 * gib)
	}, nil)
	info, err := d.Reload(ctxb(), api.ReloadRequest{})
	if err != nil || !slices.Equal(info.NeedRestart, []string{"socket"}) || info.Error != nil {
		t.Errorf("reload: %+v, %v", info, err)
	}
	b.eventually("the new slack holds", func() bool { return !p.alive() })
	b.gpu.set(p.pid, 0)
	_, err = d.Prepare(ctxb(), request("b", "memory.max=3Gi"))
	wantCode(t, err, quota.CodeAboveCeiling)
	gpus, err := d.GPUs(ctxb())
	if err != nil || gpus[0].AllocatableBytes != 14*gib {
		t.Errorf("allocatable %d, %v", gpus[0].AllocatableBytes, err)
	}
	text, err := os.ReadFile(filepath.Join(b.cfg.StateDir, config.LastGoodName))
	if err != nil || !strings.HasSuffix(string(text), "# text\n") {
		t.Errorf("the copy: %q, %v", text, err)
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	all := strings.Join(l.said, "|")
	if !strings.Contains(all, "RELOADING=1\nMONOTONIC_USEC=") || !strings.HasSuffix(all, "READY=1\nSTATUS=running") || !strings.Contains(all, "config.toml is wrong") {
		t.Errorf("the service manager heard %q", all)
	}
	// One that was started without a file says so.
	b.load = nil
	b.drop()
	d = b.start()
	_, err = d.Reload(ctxb(), api.ReloadRequest{})
	wantCode(t, err, quota.CodePolicyUnread)
}

// Reloads, samples, starts and probes at one time, for the race detector.
func TestReloadUnderLoad(t *testing.T) {
	b := newBench(t)
	l := &loader{cfg: b.cfg}
	b.load = l.load
	d := b.start()
	p := b.run(request("a", "memory.max=1Gi"))
	b.gpu.set(p.pid, 100*mib)
	var group sync.WaitGroup
	for i := range 4 {
		group.Go(func() {
			for range 20 {
				switch i {
				case 0:
					if _, err := d.Reload(ctxb(), api.ReloadRequest{}); err != nil {
						t.Error(err)
					}
				case 1:
					if _, err := d.Prepare(ctxb(), request("b", "memory.max=1Gi")); err != nil {
						t.Error(err)
					}
				case 2:
					if _, err := d.node.metrics.Gatherer().Gather(); err != nil {
						t.Error(err)
					}
				case 3:
					if _, err := d.Node(ctxb()); err != nil {
						t.Error(err)
					}
				}
			}
		})
	}
	group.Wait()
}

func TestNodeSaysWhatDoesNotWork(t *testing.T) {
	b := newBench(t)
	d := b.start()
	b.run(request("a", "memory.max=1Gi"))
	b.ready()
	d.once("second", errors.New("two"))
	d.once("first", errors.New("one"))
	d.once("gone", errors.New("three"))
	d.once("gone", nil)
	b.eventually("the level is reached", func() bool {
		n, err := d.Node(ctxb())
		return err == nil && n.Level == string(quota.LevelReactive)
	})
	n, err := d.Node(ctxb())
	if err != nil {
		t.Fatal(err)
	}
	if len(n.Problems) != 2 || n.Problems[0].About != "second" || n.Problems[1].Error != "one" || n.Problems[0].Since.IsZero() {
		t.Errorf("problems %+v", n.Problems)
	}
	if n.Containers != 1 || n.GPUs != 1 || n.Mode != "enforce" || n.LastEvent == 0 || len(n.Fences) < 3 || n.Version.PID != os.Getpid() {
		t.Errorf("node %+v", n)
	}
}

func TestLiveness(t *testing.T) {
	b := newBench(t)
	d := b.start()
	b.ready()
	if !d.Live() {
		t.Error("a working one is not live")
	}
	// A hung GPU is given up by its deadline: the others are served, so the node lives.
	hang := make(chan struct{})
	b.gpu.change(func() { b.gpu.hang = hang })
	time.Sleep(2 * b.cfg.SampleDeadline)
	if !d.Live() {
		t.Error("a GPU that hangs took the node's life")
	}
	b.gpu.change(func() { b.gpu.hang = nil })
	close(hang)
	// Ticks that stand still do; for that the clock's mark is put back.
	b.drop()
	d.node.tickBy.Store(int64(d.mono() - 2*liveLimit))
	h, err := d.Health(ctxb())
	if err != nil || h.Live || h.Ready || !strings.Contains(h.Why, "late") {
		t.Errorf("health %+v, %v", h, err)
	}
	if d.Live() {
		t.Error("live without ticks")
	}
}

func TestWatchdog(t *testing.T) {
	env := func(m map[string]string) func(string) string { return func(k string) string { return m[k] } }
	for _, tt := range []struct {
		env  map[string]string
		want time.Duration
		ok   bool
	}{
		{nil, 0, true},
		{map[string]string{"WATCHDOG_USEC": "30000000"}, 15 * time.Second, true},
		{map[string]string{"WATCHDOG_USEC": "30000000", "WATCHDOG_PID": "42"}, 15 * time.Second, true},
		{map[string]string{"WATCHDOG_USEC": "30000000", "WATCHDOG_PID": "43"}, 0, true},
		{map[string]string{"WATCHDOG_USEC": "soon"}, 0, false},
		{map[string]string{"WATCHDOG_USEC": "0"}, 0, false},
	} {
		got, err := WatchdogPeriod(env(tt.env), 42)
		if got != tt.want || (err == nil) != tt.ok {
			t.Errorf("%v: %v, %v", tt.env, got, err)
		}
	}
	var mu sync.Mutex
	live, fed := true, 0
	ctx, cancel := context.WithCancel(ctxb())
	done := make(chan struct{})
	go func() {
		defer close(done)
		FeedWatchdog(ctx, time.Millisecond, func() bool { mu.Lock(); defer mu.Unlock(); return live }, func(s string) {
			mu.Lock()
			defer mu.Unlock()
			if s == "WATCHDOG=1" {
				fed++
			}
		})
	}()
	count := func() int { mu.Lock(); defer mu.Unlock(); return fed }
	for deadline := time.Now().Add(patience); count() < 3; time.Sleep(time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatal("not fed")
		}
	}
	mu.Lock()
	live = false
	starved := fed
	mu.Unlock()
	time.Sleep(20 * time.Millisecond)
	if count() != starved {
		t.Error("fed although it does not work")
	}
	cancel()
	<-done
}

// What /metrics says is what happened.
func TestMetricsTellWhatHappened(t *testing.T) {
	taken, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer taken.Close()
	// An address that cannot be had is said, and no more.
	b := newBench(t, func(c *config.Config) { c.MetricsAddress = taken.Addr().String() })
	c := b.startServing()
	p := b.run(request("a", "memory.max=1Gi"))
	_, err = b.d.Prepare(ctxb(), request("b", "memory.max=4096"))
	wantCode(t, err, quota.CodeNoUnit)
	b.gpu.set(p.pid, 3*gib)
	b.eventually("it is killed", func() bool { return len(b.events("kill")) == 1 })
	text, err := c.Metrics(ctxb())
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{
		`gpufence_memory_events_total{container="main",event="oom",gpu_uuid="` + uuid0 + `",namespace="default",pod="a"} 1`,
		`gpufence_memory_events_total{container="main",event="oom_kill",gpu_uuid="` + uuid0 + `",namespace="default",pod="a"} 1`,
		`gpufence_start_refused_total{code="E1203"} 1`,
		`gpufence_kill_latency_seconds_count 1`,
		`gpufence_nvml_up{gpu_uuid="` + uuid0 + `"} 1`,
		`gpufence_config_drift 0`,
	} {
		if !strings.Contains(string(text), want+"\n") {
			t.Errorf("lacks %s in\n%s", want, text)
		}
	}
	n, err := c.Node(ctxb())
	if err != nil || !slices.ContainsFunc(n.Problems, func(p api.Problem) bool { return p.About == "metrics-address" }) {
		t.Errorf("problems: %+v, %v", n.Problems, err)
	}
	b.gpu.set(p.pid, 0)
}

// Where it can be had, probes and scrapes are answered there, until the end.
func TestMetricsOverTCP(t *testing.T) {
	free, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	addr := free.Addr().String()
	free.Close()
	b := newBench(t, func(c *config.Config) { c.MetricsAddress = addr })
	b.startServing()
	b.ready()
	for _, path := range []string{"/metrics", "/healthz", "/readyz"} {
		resp, err := http.Get("http://" + addr + path)
		if err != nil {
			t.Fatal(err)
		}
		resp.Body.Close()
		if resp.StatusCode != http.StatusOK {
			t.Errorf("%s: %d", path, resp.StatusCode)
		}
	}
	b.drop()
	if resp, err := http.Get("http://" + addr + "/metrics"); err == nil {
		resp.Body.Close()
		t.Error("it is answered after the end")
	}
}
