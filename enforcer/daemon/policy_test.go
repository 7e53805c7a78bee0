// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/gpufence/gpufence/enforcer/api"
	"github.com/gpufence/gpufence/enforcer/config"
	"github.com/gpufence/gpufence/enforcer/fence"
	"github.com/gpufence/gpufence/enforcer/gpu"
	"github.com/gpufence/gpufence/enforcer/policy"
	"github.com/gpufence/gpufence/enforcer/quota"
)

// stranger is a process in no container.
func (b *bench) stranger() *process {
	b.t.Helper()
	p := &process{cmd: exec.CommandContext(context.Background(), "sleep", "1000"), done: make(chan struct{})} // ended by the cleanup below
	if err := p.cmd.Start(); err != nil {
		b.t.Fatal(err)
	}
	p.pid = p.cmd.Process.Pid
	go func() {
		_ = p.cmd.Wait() // how it ended is looked at by those who care
		close(p.done)
	}()
	b.t.Cleanup(func() { b.finish(p) })
	return p
}

// TestMovedIntoAContainer: whoever has an exited process's pid is listed before its runtime has moved it into its
// container, and is the container's from then on.
func TestMovedIntoAContainer(t *testing.T) {
	b := newBench(t)
	b.start()
	c, p := b.run(request("a", "memory.max=4Gi")), b.stranger()
	b.gpu.set(p.pid, gib)
	b.eventually("it is nobody's", func() bool {
		g, err := b.d.GPUs(context.Background())
		return err == nil && g[0].UnmanagedBytes == gib
	})
	for _, dir := range c.dirs {
		if err := os.WriteFile(filepath.Join(dir, "cgroup.procs"), fmt.Appendf(nil, "%d", p.pid), 0); err != nil {
			t.Fatal(err)
		}
	}
	b.gpu.set(p.pid, 2*gib)
	b.eventually("it is the container's", func() bool {
		g, err := b.d.GPUs(context.Background())
		return err == nil && g[0].UnmanagedBytes == 0 && b.view("a").GPUs[0].NVML == 2*gib
	})
	b.gpu.set(p.pid, 9*gib)
	b.eventually("its limit holds", func() bool { return !p.alive() })
	if sig := p.signalled(); sig != syscall.SIGKILL {
		t.Errorf("ended by %v", sig)
	}
}

// gate is a fence that can keep processes from the GPUs.
type gate struct {
	fence.MIG
	mu     sync.Mutex // the daemon tells it again as cgroups come and go
	deny   bool
	exempt []string
}

func (g *gate) DenyUnmanaged(deny bool, exempt []string) error {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.deny, g.exempt = deny, exempt
	return nil
}

func (g *gate) told() (deny bool, exempt []string) {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.deny, g.exempt
}

// Where no fence keeps processes from the GPUs, unmanaged = "deny" says so as long as it lasts; a
// fence that can is told, and told again when the configuration changes.
func TestUnmanagedDenyNeedsAGate(t *testing.T) {
	b := newBench(t, func(c *config.Config) { c.Unmanaged = "deny" })
	b.load = func() (config.Loaded, error) { return config.Loaded{Config: b.cfg}, nil }
	b.start()
	said := func() string {
		n, err := b.d.Node(context.Background())
		if err != nil {
			t.Fatal(err)
		}
		for _, p := range n.Problems {
			if p.About == "unmanaged" {
				return p.Error
			}
		}
		return ""
	}
	reload := func(policy string) {
		t.Helper()
		b.cfg.Unmanaged = policy
		if _, err := b.d.Reload(context.Background(), api.ReloadRequest{}); err != nil {
			t.Fatal(err)
		}
	}
	if text := said(); !strings.Contains(text, "takes the gate") || !strings.Contains(b.log.String(), "takes the gate") {
		t.Errorf("it says %q", text)
	}
	reload("warn")
	if text := said(); text != "" {
		t.Errorf("warn: it says %q", text)
	}
	g := &gate{MIG: fence.MIG{Instances: &b.d.instances}}
	b.d.mu.Lock()
	b.d.fences = append(b.d.fences, g)
	b.d.mu.Unlock()
	reload("deny")
	text := said()
	if deny, exempt := g.told(); text != "" || !deny || len(exempt) == 0 || !strings.Contains(exempt[0], ":/") {
		t.Errorf("with a gate: it says %q, %v, exempt %q", text, deny, exempt)
	}
	reload("kill")
	if deny, _ := g.told(); deny {
		t.Error("it denies although policy does not any more")
	}
}

func TestUnmanagedPolicy(t *testing.T) {
	for _, tt := range []struct {
		name      string
		policy    string
		exempt    []config.Exempt
		mode      quota.Mode
		said      bool
		refused   bool
		killed    bool
		lostState bool
	}{
		{name: "allow", policy: "allow"},
		{name: "warn", policy: "warn", said: true},
		{name: "deny", policy: "deny", said: true, refused: true},
		{name: "kill", policy: "kill", said: true, killed: true},
		{name: "kill, exempt by name", policy: "kill", exempt: []config.Exempt{{Kind: config.ExemptComm, Pattern: "slee*"}}},
		{name: "deny, exempt by program", policy: "deny", exempt: []config.Exempt{{Kind: config.ExemptExe, Pattern: "/*/*/sleep"}, {Kind: config.ExemptExe, Pattern: "/*/sleep"}}},
		{name: "kill, another exempt", policy: "kill", exempt: []config.Exempt{{Kind: config.ExemptComm, Pattern: "Xorg"}}, said: true, killed: true},
		{name: "kill, but the node only warns", policy: "kill", mode: quota.ModeWarn, said: true},
		{name: "kill, but state was lost", policy: "kill", lostState: true, said: true, refused: true},
	} {
		t.Run(tt.name, func(t *testing.T) {
			b := newBench(t, func(c *config.Config) {
				c.Unmanaged, c.UnmanagedExempt = tt.policy, tt.exempt
				if tt.mode != "" {
					c.Policy.Mode = tt.mode
				}
			})
			if tt.lostState {
				if err := os.MkdirAll(filepath.Join(b.cfg.RunDir, "state"), 0o755); err != nil {
					t.Fatal(err)
				}
				if err := os.WriteFile(filepath.Join(b.cfg.RunDir, "state", "pod-x.json"), []byte("{"), 0o600); err != nil {
					t.Fatal(err)
				}
			}
			b.start()
			mine := b.run(request("a", "memory.max=4Gi"))
			b.gpu.set(mine.pid, gib)
			p := b.stranger()
			b.gpu.set(p.pid, 2*gib)
			b.eventually("it is seen", func() bool {
				g, err := b.d.GPUs(context.Background())
				return err == nil && g[0].UnmanagedBytes == 2*gib
			})
			b.samples(10)
			if got := len(b.events("unmanaged")); got != map[bool]int{true: 1}[tt.said] {
				t.Errorf("%d events", got)
			}
			if tt.killed {
				if sig := p.signalled(); sig != syscall.SIGKILL {
					t.Errorf("ended by %v", sig)
				}
				b.eventually("it is in the journal", func() bool { return len(b.events("kill-decided", "kill")) == 2 })
				if ev := b.events("kill-decided")[0]; ev.Code != string(quota.CodeUnmanaged) || ev.Container != nil || ev.Numbers["used_bytes"] != 2*gib {
					t.Errorf("%+v", ev)
				}
				b.gpu.set(p.pid, 0)
			} else if !p.alive() {
				t.Error("it was killed")
			}
			if !mine.alive() {
				t.Error("the container was killed")
			}
			_, err := b.d.Prepare(context.Background(), request("b", "memory.max=2Gi"))
			if tt.refused {
				wantCode(t, err, quota.CodeUnmanaged)
			} else if err != nil {
				t.Errorf("a start beside it: %v", err)
			}
		})
	}
}

func TestMPSClients(t *testing.T) {
	for _, allowed := range []bool{false, true} {
		t.Run(fmt.Sprint("kill-mps ", allowed), func(t *testing.T) {
			b := newBench(t, func(c *config.Config) { c.KillMPS = allowed })
			b.start()
			p := b.run(request("a", "memory.max=2Gi"))
			b.gpu.change(func() { b.gpu.mps = []int{p.pid} })
			b.gpu.set(p.pid, 3*gib)
			if allowed {
				if sig := p.signalled(); sig != syscall.SIGKILL {
					t.Errorf("ended by %v", sig)
				}
				return
			}
			b.eventually("it is said", func() bool { return len(b.events("kill-withheld")) == 1 })
			b.samples(10)
			if !p.alive() || len(b.events("kill-withheld")) != 1 {
				t.Errorf("alive %v, %d events", p.alive(), len(b.events("kill-withheld")))
			}
			if v := b.view("a"); v.Fences[0].State != "degraded" || !strings.Contains(v.Fences[0].Why, "MPS") || v.Level != quota.LevelAdvisory {
				t.Errorf("%s, %+v", v.Level, v.Fences)
			}
			// What requires the watch does not start there.
			req := request("b", "memory.max=2Gi")
			b.prepare(req)
			_, err := b.d.Register(context.Background(), api.RegisterRequest{Key: req.Key, PID: b.container().pid})
			wantCode(t, err, quota.CodeLevelNotReached)
		})
	}
}

// Overcommitted containers use what is promised to one that starts.
func TestRoomForAGuarantee(t *testing.T) {
	for _, admit := range []string{"free", "kill-over-min"} {
		t.Run(admit, func(t *testing.T) {
			b := newBench(t, func(c *config.Config) { c.Admit = admit })
			b.start()
			greedy := b.run(request("greedy", "memory.max=14Gi", "memory.min=2Gi"))
			modest := b.run(request("modest", "memory.max=4Gi", "memory.min=2Gi"))
			b.gpu.set(greedy.pid, 10*gib)
			b.gpu.set(modest.pid, 3*gib)
			b.eventually("the use is seen", func() bool { return b.view("greedy").GPUs[0].NVML == 10*gib && b.view("modest").GPUs[0].NVML == 3*gib })
			go func() {
				if greedy.done != nil {
					<-greedy.done
					b.gpu.set(greedy.pid, 0)
				}
			}()
			_, err := b.d.Prepare(context.Background(), request("new", "memory.max=4Gi"))
			if admit == "free" {
				wantCode(t, err, quota.CodeUnavailable)
				if err != nil && !strings.Contains(err.Error(), "free now") {
					t.Error(err)
				}
				if !greedy.alive() || !modest.alive() {
					t.Error("somebody was killed")
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			if sig := greedy.signalled(); sig != syscall.SIGKILL {
				t.Errorf("ended by %v", sig)
			}
			if !modest.alive() {
				t.Error("one was enough")
			}
			if ev := b.events("kill-decided"); len(ev) != 1 || ev[0].Container.ID != "greedy" || !strings.Contains(ev[0].Message, "kill-over-min") {
				t.Errorf("%+v", ev)
			}
			if n := b.view("greedy").GPUs[0].Events; n.OOM != 1 || n.OOMKill == 0 || n.OOMGroupKill != 1 {
				t.Errorf("%+v", n)
			}
		})
	}
}

// Nobody has to go on one GPU for a container that another one refuses all the same.
func TestNoRoomForWhatIsRefusedElsewhere(t *testing.T) {
	b := newBench(t, func(c *config.Config) { c.Admit = "kill-over-min" })
	b.nvml.gpus = append(b.nvml.gpus, newFakeGPU(1, uuid1))
	b.start()
	on := func(req api.PrepareRequest, selectors ...string) api.PrepareRequest {
		req.Devices.Selectors = selectors
		return req
	}
	greedy := b.run(request("greedy", "memory.max=14Gi", "memory.min=2Gi"))
	b.run(on(request("full", "memory.max=15Gi"), "1"))
	b.gpu.set(greedy.pid, 13*gib)
	b.eventually("the use is seen", func() bool { return b.view("greedy").GPUs[0].NVML == 13*gib })
	b.samples(3)
	_, err := b.d.Prepare(context.Background(), on(request("new", "memory.max=4Gi"), "0", "1"))
	wantCode(t, err, quota.CodeUnavailable)
	if !greedy.alive() || len(b.events("kill-decided")) != 0 {
		t.Errorf("somebody was killed for it: %+v", b.events("kill-decided"))
	}
	// Where that is all that is missing, it is made.
	go func() {
		<-greedy.done
		b.gpu.set(greedy.pid, 0)
	}()
	if _, err := b.d.Prepare(context.Background(), on(request("small", "memory.max=4Gi", "memory.min=4Gi"), "0")); err != nil {
		t.Fatal(err)
	}
	if greedy.alive() {
		t.Error("nobody made room")
	}
}

func TestPlacement(t *testing.T) {
	for placement, want := range map[string][]string{"spread": {uuid1, uuid0, uuid1, uuid0}, "binpack": {uuid0, uuid0, uuid1, uuid1}} {
		t.Run(placement, func(t *testing.T) {
			b := newBench(t, func(c *config.Config) {
				c.Placement = placement
				for e, a := range c.Policy.Accept {
					a.GPU = true
					c.Policy.Accept[e] = a
				}
			})
			b.nvml.gpus = append(b.nvml.gpus, newFakeGPU(1, uuid1))
			b.start()
			first := request("first", "memory.max=2Gi")
			b.prepare(first) // on GPU 0
			for i, uuid := range want {
				req := request(fmt.Sprint("c", i), "memory.max=6Gi", "gpu=any")
				req.Devices.Selectors = nil
				resp := b.prepare(req)
				if len(resp.Grant.GPUs) != 1 || resp.Grant.GPUs[0].UUID != uuid {
					t.Fatalf("container %d is on %+v, want %s", i, resp.Grant.GPUs, uuid)
				}
				// The same request stays where it is.
				if again := b.prepare(req); again.Grant.GPUs[0].UUID != uuid {
					t.Errorf("container %d moved to %+v", i, again.Grant.GPUs)
				}
			}
			req := request("none", "memory.max=6Gi", "gpu=any")
			req.Devices.Selectors = nil
			_, err := b.d.Prepare(context.Background(), req)
			wantCode(t, err, quota.CodeUnavailable)
			// Two GPUs, or more than there are.
			req = request("two", "memory.max=1Gi", "gpu=2")
			req.Devices.Selectors = nil
			if resp := b.prepare(req); len(resp.Grant.GPUs) != 2 {
				t.Errorf("%+v", resp.Grant.GPUs)
			}
			req = request("three", "memory.max=1Gi", "gpu=3")
			req.Devices.Selectors = nil
			_, err = b.d.Prepare(context.Background(), req)
			wantCode(t, err, quota.CodeNoSuchGPU)
		})
	}
}

// Between two lives of a pod's containers its guarantee is held, until the pod's cgroup goes.
func TestPodGuaranteeOutlivesContainers(t *testing.T) {
	b := newBench(t, func(c *config.Config) { c.EndedKeep = 0 })
	b.start()
	const uid = "12345678-1234-1234-1234-123456789abc"
	cgroupCount++
	parent := fmt.Sprintf("gpufence-test-%d-%d-pod%s.slice", os.Getpid(), cgroupCount, strings.ReplaceAll(uid, "-", "_"))
	var parents []string
	for _, root := range []string{"/sys/fs/cgroup/freezer", "/sys/fs/cgroup/unified", "/sys/fs/cgroup/pids", "/sys/fs/cgroup"} {
		if _, err := os.Stat(filepath.Join(root, "cgroup.procs")); err == nil {
			parents = append(parents, filepath.Join(root, parent))
			if err := os.Mkdir(filepath.Join(root, parent), 0o755); err != nil {
				t.Fatal(err)
			}
		}
	}
	removed := false
	remove := func() {
		for _, dir := range parents {
			if err := os.Remove(dir); err != nil && !removed {
				t.Error(err)
			}
		}
		removed = true
	}
	defer remove()
	req := request("a", "memory.max=10Gi")
	req.Pod.UID = uid
	b.prepare(req)
	p := b.containerIn(parent + "/main")
	if _, err := b.d.Register(context.Background(), api.RegisterRequest{Key: req.Key, PID: p.pid}); err != nil {
		t.Fatal(err)
	}
	held := func() uint64 {
		g, err := b.d.GPUs(context.Background())
		if err != nil {
			t.Fatal(err)
		}
		return g[0].GuaranteedBytes
	}
	if held() != 10*gib {
		t.Fatalf("%d is held", held())
	}
	b.finish(p)
	b.eventually("it has ended", func() bool { return b.view("a").State == "ended" })
	if held() != 10*gib {
		t.Errorf("%d is held between its lives", held())
	}
	_, err := b.d.Prepare(context.Background(), request("b", "memory.max=10Gi"))
	wantCode(t, err, quota.CodeUnavailable)
	b.crash()
	b.samples(2)
	if held() != 10*gib {
		t.Errorf("%d is held after a restart", held())
	}
	// The pod's next container has it; nothing is counted twice.
	again := req
	again.Key.ID = "a2"
	b.prepare(again)
	if held() != 10*gib {
		t.Errorf("%d is held in the second life", held())
	}
	if err := b.d.Unregister(context.Background(), api.UnregisterRequest{Key: again.Key}); err != nil {
		t.Fatal(err)
	}
	// Whoever replaces it is not refused for the second that housekeeping needs to see that.
	remove()
	b.prepare(request("b", "memory.max=10Gi"))
	b.eventually("it is free", func() bool { return held() == 10*gib })
}

// A pod limit is met by two containers: whose events are whose, and what the files say.
func TestCountersOfBothLevels(t *testing.T) {
	b := newBench(t)
	b.start()
	req := request("a", "memory.max=4Gi", "container.main.memory.max=3Gi", "container.main.memory.oom.group=false")
	resp := b.prepare(req)
	p := b.run(req)
	other := request("side", "memory.max=4Gi", "container.main.memory.max=3Gi", "container.main.memory.oom.group=false")
	other.Pod, other.ContainerName = req.Pod, "side"
	side := b.run(other)
	shim := shimOf(t, resp, 0, p.pid)
	shim.charge(gib)
	shim.refused(2)
	shim.put(0x80+0x30, 1) // the GPU was full
	b.gpu.set(p.pid, gib)
	b.gpu.set(side.pid, 5*gib/2)
	b.eventually("it is counted", func() bool { return b.view("a").GPUs[0].PodEvents.Device == 1 })
	v := b.view("a").GPUs[0]
	if v.Events.Max != 2 || v.EventsLocal.Max != 2 || v.PodEvents.Max != 2 || v.PodEventsLocal.Max != 0 || v.EventsLocal.Device != 1 {
		t.Errorf("%+v", v)
	}
	b.eventually("the pod's use is seen", func() bool { g := b.view("side").GPUs[0]; return g.PodCurrent == 7*gib/2 && g.PodPeak == 7*gib/2 })
	if g := b.view("side").GPUs[0]; g.Current != 5*gib/2 || g.Events.Max != 0 || g.PodEvents.Max != 2 {
		t.Errorf("%+v", g)
	}
	// Above the pod's limit, each below its own: the larger goes, for the pod's limit.
	b.gpu.set(p.pid, 2*gib)
	if sig := side.signalled(); sig != syscall.SIGKILL {
		t.Errorf("ended by %v", sig)
	}
	b.gpu.set(side.pid, 0)
	v = b.view("side").GPUs[0]
	if v.Events.OOM != 1 || v.Events.OOMKill != 1 || v.Events.OOMGroupKill != 1 && v.Events.OOMGroupKill != 0 || v.EventsLocal.OOM != 0 || v.EventsLocal.OOMKill != 1 ||
		v.PodEvents.OOM != 1 || v.PodEvents.OOMKill != 1 || v.PodEventsLocal.OOM != 1 || v.PodEventsLocal.OOMKill != 0 {
		t.Errorf("%+v", v)
	}
	if v.PodEvents.OverMax == 0 || v.PodEventsLocal.OverMax == 0 || v.EventsLocal.OverMax != 0 || b.view("a").GPUs[0].EventsLocal.OverMax != 0 {
		t.Errorf("%+v", v)
	}
	read := func(name string) string {
		for _, f := range resp.Files {
			if f.Destination == "/dev/gpufence" {
				text, err := os.ReadFile(filepath.Join(f.Source, name))
				if err != nil {
					t.Fatal(err)
				}
				return strings.TrimSpace(string(text))
			}
		}
		t.Fatalf("%s is not mounted", name)
		return ""
	}
	b.eventually("the files say it", func() bool { return strings.Contains(read("pod/memory.events"), "oom=1 oom_kill=1") })
	for name, want := range map[string]string{
		"memory.max": "3221225472", "pod/memory.max": "4294967296", "memory.min": "4294967296", "memory.high": "max", "memory.swap.max": "0",
		"pod/memory.events.local": "high=0 max=0 device=0 oom=1 oom_kill=0 oom_group_kill=0",
		"memory.events.local":     "high=0 max=2 device=1 oom=0 oom_kill=0 oom_group_kill=0",
	} {
		if got := read(name); got != uuid0+" "+want {
			t.Errorf("%s: %q, want %q", name, got, want)
		}
	}
	if got := read("memory.oom.group"); got != "0" {
		t.Errorf("memory.oom.group: %q", got)
	}
	// Nothing of it goes back.
	before := b.view("side").GPUs[0]
	b.crash()
	b.samples(3)
	after := b.view("side").GPUs[0]
	if after.PodPeak < before.PodPeak || after.PodEvents.Max < before.PodEvents.Max || after.PodEvents.OverMax < before.PodEvents.OverMax || after.EventsLocal != before.EventsLocal || after.PodEvents.OOMKill != 1 {
		t.Errorf("before %+v, after %+v", before, after)
	}
}

// high sets a container's memory.high as if it had been granted.
func (b *bench) high(id string, bytes uint64) {
	b.t.Helper()
	b.d.mu.Lock()
	defer b.d.mu.Unlock()
	c, err := b.d.reg.Find(id)
	if err != nil {
		b.t.Fatal(err)
	}
	l := c.ContainerLimits(uuid0)
	l.High = bytes
	b.d.setLimits(c.Pod(), uuid0, policy.Level{Container: c.ID()}, l)
}

func TestFreezeAboveHigh(t *testing.T) {
	b := newBench(t, func(c *config.Config) { c.Throttle, c.FreezeSlice, c.FreezeShare = "freeze", 20*time.Millisecond, 0.5 })
	b.start()
	p := b.run(request("a", "memory.max=8Gi"))
	calm := b.run(request("calm", "memory.max=4Gi"))
	b.high("a", gib)
	b.high("calm", 2*gib)
	b.gpu.set(p.pid, 4*gib)
	b.gpu.set(calm.pid, gib)
	b.eventually("it is frozen for a while", func() bool { return b.view("a").GPUs[0].ThrottledNS > uint64(100*time.Millisecond) })
	if n := b.view("calm").GPUs[0].ThrottledNS; n != 0 || len(b.events("throttled")) != 1 {
		t.Errorf("the calm one: %d ns, events %+v", n, b.events("throttled"))
	}
	// Below again: it stops.
	b.gpu.set(p.pid, gib/2)
	b.eventually("it stops", func() bool {
		n := b.view("a").GPUs[0].ThrottledNS
		time.Sleep(150 * time.Millisecond)
		return b.view("a").GPUs[0].ThrottledNS == n
	})
	frozenNow := func() bool {
		for _, dir := range p.dirs {
			for name, thawed := range map[string]string{"cgroup.freeze": "0", "freezer.state": "THAWED"} {
				if text, err := os.ReadFile(filepath.Join(dir, name)); err == nil && strings.TrimSpace(string(text)) != thawed {
					return true
				}
			}
		}
		return false
	}
	if frozenNow() {
		t.Error("left frozen")
	}
	// gpufenced goes while it freezes: nothing is left frozen.
	b.gpu.set(p.pid, 4*gib)
	b.eventually("it is frozen", frozenNow)
	b.drop()
	if frozenNow() {
		t.Error("left frozen by the end of gpufenced")
	}
	b.start()
	// Over its limit it dies, also in a slice.
	b.gpu.set(p.pid, 9*gib)
	if sig := p.signalled(); sig != syscall.SIGKILL {
		t.Errorf("ended by %v", sig)
	}
	if !calm.alive() {
		t.Error("the calm one was killed")
	}
}

// Both gpufenced and its guard were killed in a slice.
func TestThawedAtStart(t *testing.T) {
	b := newBench(t)
	p := b.container()
	var dir, file, thawed string
	for _, d := range p.dirs {
		for name, words := range map[string][2]string{"cgroup.freeze": {"1", "0"}, "freezer.state": {"FROZEN", "THAWED"}} {
			if _, err := os.Stat(filepath.Join(d, name)); err == nil {
				dir, file, thawed = d, name, words[1]
				if err := os.WriteFile(filepath.Join(d, name), []byte(words[0]), 0); err != nil {
					t.Fatal(err)
				}
			}
		}
		if dir != "" {
			break
		}
	}
	fi, err := os.Stat(dir)
	if err != nil {
		t.Fatal(err)
	}
	frozen := filepath.Join(b.cfg.RunDir, "frozen")
	if err := os.MkdirAll(frozen, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(frozen, fmt.Sprint("frozen-", fi.Sys().(*syscall.Stat_t).Ino)), []byte(dir), 0o600); err != nil {
		t.Fatal(err)
	}
	b.start()
	text, err := os.ReadFile(filepath.Join(dir, file))
	if err != nil || strings.TrimSpace(string(text)) != thawed {
		t.Errorf("%q, %v", text, err)
	}
	if len(b.events("thawed")) != 1 {
		t.Error("it is not said")
	}
}

// A GPU is lost and comes back under a new handle; the other one is never disturbed.
func TestLostGPUComesBack(t *testing.T) {
	b := newBench(t)
	second := newFakeGPU(1, uuid1)
	b.nvml.gpus = append(b.nvml.gpus, second)
	b.start()
	p := b.run(request("a", "memory.max=4Gi"))
	b.gpu.set(p.pid, gib)
	b.eventually("the use is seen", func() bool { return b.view("a").GPUs[0].NVML == gib })
	back := newFakeGPU(0, uuid0)
	b.nvml.mu.Lock()
	b.nvml.gpus[0] = back
	inits := b.nvml.inits
	b.nvml.mu.Unlock()
	b.gpu.change(func() {
		for _, l := range gpu.Lists {
			b.gpu.listErr[l] = fmt.Errorf("gone: %w", gpu.ErrLost)
		}
		b.gpu.memErr = fmt.Errorf("gone: %w", gpu.ErrLost)
	})
	b.eventually("it is said", func() bool { return len(b.events("gpu-unknown")) == 1 })
	back.set(p.pid, 2*gib)
	b.eventually("it is back", func() bool { v := b.view("a").GPUs[0]; return v.Known && v.NVML == 2*gib })
	if !p.alive() || len(b.events("gpu-known")) != 1 {
		t.Errorf("alive %v, %+v", p.alive(), b.events())
	}
	b.nvml.mu.Lock()
	if b.nvml.inits != inits {
		t.Error("NVML was initialised again under the other GPU")
	}
	b.nvml.mu.Unlock()
	back.set(p.pid, 5*gib)
	if sig := p.signalled(); sig != syscall.SIGKILL {
		t.Errorf("ended by %v", sig)
	}
}

func TestPeriod(t *testing.T) {
	d := &Daemon{cfg: config.Default()}
	for _, tt := range []struct {
		rising       bool
		sample, took time.Duration
		want         time.Duration
	}{
		{false, 100 * time.Millisecond, time.Millisecond, 100 * time.Millisecond},
		{true, 100 * time.Millisecond, time.Millisecond, 25 * time.Millisecond},
		{true, 100 * time.Millisecond, 10 * time.Millisecond, 40 * time.Millisecond},
		{true, 100 * time.Millisecond, time.Second, 100 * time.Millisecond},
		{true, 40 * time.Millisecond, time.Millisecond, 20 * time.Millisecond},
		{true, 10 * time.Millisecond, time.Millisecond, 10 * time.Millisecond},
	} {
		d.cfg.Sample = tt.sample
		if got := d.period(&gpuState{rising: tt.rising, sample: gpu.Sample{Took: tt.took}}); got != tt.want {
			t.Errorf("%+v: %v", tt, got)
		}
	}
}

// What a kill freed does not come back: it is said once, and nobody else dies.
func TestKillUnconfirmed(t *testing.T) {
	b := newBench(t, func(c *config.Config) { c.StuckAfter = 300 * time.Millisecond })
	b.start()
	p := b.run(request("a", "memory.max=2Gi"))
	other := b.run(request("b", "memory.max=2Gi"))
	b.gpu.set(p.pid, 3*gib) // and it stays listed
	b.gpu.set(other.pid, gib)
	if sig := p.signalled(); sig != syscall.SIGKILL {
		t.Fatalf("ended by %v", sig)
	}
	b.eventually("it is said", func() bool { return len(b.events("kill-unconfirmed")) == 1 })
	b.samples(20)
	if len(b.events("kill-unconfirmed")) != 1 || len(b.events("kill-decided")) != 1 || !other.alive() {
		t.Errorf("%+v", b.events())
	}
	b.gpu.set(p.pid, 0)
	b.eventually("it came back after all", func() bool { return len(b.events("kill-confirmed")) == 1 })
}
