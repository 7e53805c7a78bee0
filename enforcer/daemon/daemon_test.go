// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/gpufence/gpufence/enforcer/act"
	"github.com/gpufence/gpufence/enforcer/api"
	"github.com/gpufence/gpufence/enforcer/config"
	"github.com/gpufence/gpufence/enforcer/fence"
	"github.com/gpufence/gpufence/enforcer/gpu"
	"github.com/gpufence/gpufence/enforcer/ledger"
	"github.com/gpufence/gpufence/enforcer/quota"
	"github.com/gpufence/gpufence/enforcer/registry"
)

func TestPrepareAndRegister(t *testing.T) {
	b := newBench(t)
	b.tmp = true
	b.start()
	req := request("a", "memory.max=4Gi")
	req.ImagePreload = "/usr/lib/libother.so # theirs\n"
	resp := b.prepare(req)
	if got := resp.Grant.Pod[uuid0]; got.Max != 4*gib || got.Min != 4*gib {
		t.Errorf("pod's limits: %+v", got)
	}
	if len(resp.CDIDevices) != 1 || resp.CDIDevices[0] != "gpufence.dev/simgpu=0" {
		t.Errorf("devices: %v", resp.CDIDevices)
	}
	mounts := map[string]api.SharedFile{}
	for _, f := range resp.Files {
		mounts[f.Destination] = f
		if fi, err := os.Stat(f.Source); err != nil || fi.IsDir() != (f.Destination == "/dev/gpufence") {
			t.Errorf("%s: %v", f.Source, err)
		}
		if f.Writable != (f.Destination == "/dev/gpufence/ledger") {
			t.Errorf("%s writable: %v", f.Destination, f.Writable)
		}
	}
	if len(resp.Files) != 4 || resp.Files[0].Destination != "/dev/gpufence" {
		t.Errorf("mounted, the folder not first: %+v", resp.Files)
	}
	for _, want := range []string{"/dev/gpufence/ledger", "/dev/gpufence/lib64/libgpufence.so", "/etc/ld.so.preload"} {
		if mounts[want].Source == "" {
			t.Errorf("nothing is mounted at %s", want)
		}
	}
	folder := mounts["/dev/gpufence"].Source
	for _, want := range []string{
		"limits", "ledger", "memory.max", "memory.current", "memory.peak", "memory.events", "memory.events.local", "memory.high", "memory.min",
		"memory.swap.max", "memory.oom.group", "pod/memory.max", "pod/memory.events", "lib64/libgpufence.so",
	} {
		if fi, err := os.Lstat(filepath.Join(folder, want)); err != nil || !fi.Mode().IsRegular() || fi.Mode().Perm() != 0o444 {
			t.Errorf("the folder's %s: %v, %v", want, fi, err)
		}
	}
	own, _ := libFolders(false)
	for _, of := range own[1:] {
		// What is mounted over that is found by every other spelling of $LIB.
		if to, err := filepath.EvalSymlinks(filepath.Join(folder, of, "libgpufence.so")); err != nil || to != filepath.Join(folder, "lib64/libgpufence.so") {
			t.Errorf("the library in %s is %s, %v", of, to, err)
		}
	}
	for _, name := range []string{"", "lib", "lib64", "pod"} {
		if fi, err := os.Stat(filepath.Join(folder, name)); err != nil || fi.Mode().Perm() != 0o755 {
			t.Errorf("a container's user may not look into %q: %v, %v", name, fi, err)
		}
	}
	text, err := os.ReadFile(mounts["/etc/ld.so.preload"].Source)
	if err != nil || string(text) != "/usr/lib/libother.so\n/dev/gpufence/$LIB/libgpufence.so\n" {
		t.Errorf("preload file: %q, %v", text, err)
	}
	page, err := ledger.ReadLimits(filepath.Join(folder, "limits"))
	if err != nil {
		t.Fatal(err)
	}
	if g := page.GPU[0]; !g.Present || !g.Fenced || g.PodMaxBytes != 4*gib || g.MaxBytes != quota.Unlimited || g.ContextBytes != 256*mib || g.TotalBytes != 16*gib {
		t.Errorf("page: %+v", g)
	}
	if v := b.view("a"); v.State != "prepared" || v.Level != quota.LevelNone {
		t.Errorf("view: %+v", v)
	}

	p := b.container()
	reg, err := b.d.Register(context.Background(), api.RegisterRequest{Key: req.Key, PID: p.pid})
	if err != nil {
		t.Fatal(err)
	}
	if reg.Level != quota.LevelReactive || len(reg.Fences) < 3 || reg.Fences[0].State != "proven" || reg.Fences[1].State != "delivered" {
		t.Errorf("registered: %+v", reg)
	}
	again, err := b.d.Register(context.Background(), api.RegisterRequest{Key: req.Key, PID: p.pid})
	if err != nil || again.Level != reg.Level {
		t.Errorf("a second register: %+v, %v", again, err)
	}
	if once := b.prepare(req); len(once.Files) != len(resp.Files) || once.Files[0] != resp.Files[0] {
		t.Errorf("a second prepare answers otherwise: %+v", once)
	}
	b.gpu.set(p.pid, gib)
	b.eventually("the use is seen", func() bool { return b.view("a").GPUs[0].NVML == gib })
	v := b.view("a")
	if v.State != "running" || v.PID != p.pid || v.GPUs[0].Limits.Max != 4*gib || v.GPUs[0].Peak != gib || len(v.Processes) != 1 || v.Processes[0].Slot != -1 {
		t.Errorf("view: %+v", v)
	}
	if page, err := ledger.ReadLimits(filepath.Join(folder, "limits")); err != nil || page.GPU[0].ExcessBytes != gib || page.Heartbeat == 0 {
		t.Errorf("page: %+v, %v", page.GPU[0], err)
	}
	b.eventually("the files are written", func() bool {
		text, err := os.ReadFile(filepath.Join(folder, "memory.current"))
		return err == nil && strings.TrimSpace(string(text)) == uuid0+" 1073741824"
	})

	// While its process lives, an unregister is not believed.
	if err := b.d.Unregister(context.Background(), api.UnregisterRequest{Key: req.Key}); err != nil {
		t.Fatal(err)
	}
	if v := b.view("a"); v.State != "running" {
		t.Errorf("state %s after an unregister while it lives", v.State)
	}
	b.finish(p)
	if err := b.d.Unregister(context.Background(), api.UnregisterRequest{Key: req.Key}); err != nil {
		t.Fatal(err)
	}
	v = b.view("a")
	if v.State != "ended" || v.EndReason != "exited" || v.GPUs[0].Peak != gib {
		t.Errorf("view: %+v", v)
	}
	if gpus, err := b.d.GPUs(context.Background()); err != nil || gpus[0].GuaranteedBytes != 0 || gpus[0].DyingBytes != gib {
		t.Errorf("gpus: %+v, %v", gpus, err)
	}
	b.gpu.set(p.pid, 0)
	b.eventually("the memory is gone", func() bool {
		gpus, err := b.d.GPUs(context.Background())
		return err == nil && gpus[0].DyingBytes == 0 && gpus[0].UnmanagedBytes == 0
	})
	if entries, err := os.ReadDir(filepath.Join(b.cfg.RunDir, "pods")); err != nil || len(entries) != 0 {
		t.Errorf("pages are left: %v, %v", entries, err)
	}
	if entries, err := os.ReadDir(filepath.Join(b.cfg.RunDir, "preload")); err != nil || len(entries) != 0 {
		t.Errorf("preload files are left: %v, %v", entries, err)
	}
	if err := b.d.Unregister(context.Background(), api.UnregisterRequest{Key: req.Key}); err != nil {
		t.Errorf("a second unregister: %v", err)
	}
}

func TestKill(t *testing.T) {
	b := newBench(t)
	b.start()
	req := request("victim", "memory.max=2Gi")
	term := filepath.Join(t.TempDir(), "termination-log")
	if err := os.WriteFile(term, nil, 0o644); err != nil {
		t.Fatal(err)
	}
	req.TerminationLog = term
	victim := b.run(req)
	bystander := b.run(request("bystander", "memory.max=4Gi"))
	b.gpu.set(bystander.pid, 4*gib)
	second := b.also(victim)

	// Up to the limit and the slack nothing happens but counting.
	b.gpu.set(victim.pid, 2*gib+64*mib)
	b.samples(5)
	if !victim.alive() {
		t.Fatal("killed within the slack")
	}
	v := b.view("victim")
	if v.GPUs[0].Events.OverMax == 0 || v.GPUs[0].Events.OOM != 0 {
		t.Errorf("events: %+v", v.GPUs[0].Events)
	}
	b.gpu.set(victim.pid, 3*gib)
	if sig := victim.signalled(); sig != syscall.SIGKILL {
		t.Fatalf("ended by %v", sig)
	}
	if err := second.Wait(); err == nil {
		t.Error("the second process of the group ended by itself")
	}
	b.eventually("the kill is in the journal", func() bool { return len(b.events("kill")) == 1 })
	decided, kill := b.events("kill-decided")[0], b.events("kill")[0]
	if decided.ID == "" || decided.ID != kill.ID || decided.Seq >= kill.Seq || kill.MonotonicNS <= decided.MonotonicNS {
		t.Errorf("decided %+v, kill %+v", decided, kill)
	}
	if len(decided.Candidates) != 1 || decided.Candidates[0].Used != 3*gib || kill.Container.ID != "victim" ||
		kill.Numbers["used_bytes"] != 3*gib || kill.Numbers["max_bytes"] != 2*gib || kill.Numbers["threshold_bytes"] != 2*gib+64*mib {
		t.Errorf("decided %+v, kill %+v", decided, kill)
	}
	text, err := os.ReadFile(term)
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"gpufence: ", "3.0 GiB", "2.0 GiB", uuid0, "gpufence.dev/memory.max"} {
		if !strings.Contains(strings.ReplaceAll(strings.ReplaceAll(string(text), "3 GiB", "3.0 GiB"), "2 GiB", "2.0 GiB"), want) {
			t.Errorf("termination message %q lacks %q", text, want)
		}
	}
	// The process stays listed for a while, as with a lagging NVML: nobody is killed for it.
	b.samples(10)
	v = b.view("victim")
	if v.GPUs[0].Events.OOM != 1 || v.GPUs[0].Events.OOMKill != 2 {
		t.Errorf("events: %+v", v.GPUs[0].Events)
	}
	b.finish(victim)
	if err := b.d.Unregister(context.Background(), api.UnregisterRequest{Key: req.Key}); err != nil {
		t.Fatal(err)
	}
	if v := b.view("victim"); v.State != "ended" || !strings.HasPrefix(v.EndReason, "killed: GPU memory limit exceeded") {
		t.Errorf("ended: %+v", v)
	}
	if len(b.events("kill-confirmed")) != 0 {
		t.Error("confirmed while the memory is listed")
	}
	b.gpu.set(victim.pid, 0)
	b.eventually("the memory's return is in the journal", func() bool { return len(b.events("kill-confirmed")) == 1 })
	if !bystander.alive() || len(b.events("kill-decided")) != 1 {
		t.Error("the bystander was hit")
	}
}

func TestKillLargestProcessOnly(t *testing.T) {
	b := newBench(t)
	b.start()
	p := b.run(request("a", "memory.max=2Gi", "memory.oom.group=false"))
	big := b.also(p)
	b.gpu.change(func() { b.gpu.use[p.pid] = gib; b.gpu.use[big.Process.Pid] = 2 * gib })
	if err := big.Wait(); err == nil {
		t.Fatal("the largest ended by itself")
	}
	b.gpu.set(big.Process.Pid, 0)
	b.eventually("the memory's return is in the journal", func() bool { return len(b.events("kill-confirmed")) == 1 })
	b.samples(5)
	if !p.alive() {
		t.Error("the smaller process died, too")
	}
	if v := b.view("a"); v.State != "running" || v.GPUs[0].Events.OOMKill != 1 {
		t.Errorf("view: %+v", v)
	}
	b.finish(p)
	b.eventually("it is collected", func() bool { return b.view("a").State == "ended" })
	if v := b.view("a"); v.EndReason != "exited" {
		t.Errorf("its own end is not the kill's: %q", v.EndReason)
	}
}

func TestModesDoNotKill(t *testing.T) {
	for _, mode := range []quota.Mode{quota.ModeObserve, quota.ModeWarn} {
		t.Run(string(mode), func(t *testing.T) {
			b := newBench(t, func(c *config.Config) { c.Policy.Mode = mode })
			b.start()
			req := request("a", "memory.max=2Gi")
			resp := b.prepare(req)
			if len(resp.Files) != 0 || len(resp.CDIDevices) != 0 || resp.Grant.Mode != mode {
				t.Errorf("something would be mounted: %+v", resp)
			}
			// What enforce refuses is granted, with a notice.
			for _, bad := range []string{"memory.max=99Ti", "memory.max=4096", "memory.mx=4Gi"} {
				resp := b.prepare(request("b-"+bad, bad))
				if len(resp.Notices) == 0 || !strings.Contains(strings.Join(resp.Notices, " "), "would be refused") {
					t.Errorf("%s: %+v", bad, resp)
				}
			}
			p := b.container()
			reg, err := b.d.Register(context.Background(), api.RegisterRequest{Key: req.Key, PID: p.pid})
			if err != nil || reg.Level != quota.LevelNone {
				t.Fatalf("register: %+v, %v", reg, err)
			}
			b.gpu.set(p.pid, 3*gib)
			b.eventually("the would-be kill is reported", func() bool { return len(b.events("would-kill")) == 1 })
			b.samples(10)
			if !p.alive() || len(b.events("would-kill")) != 1 || len(b.events("kill-decided")) != 0 {
				t.Errorf("alive %v, events %+v", p.alive(), b.events("would-kill", "kill-decided"))
			}
			if v := b.view("a"); v.GPUs[0].Events.OverMax == 0 {
				t.Error("nothing is counted")
			}
		})
	}
}

func TestPrepareRefusals(t *testing.T) {
	b := newBench(t)
	b.start()
	b.run(request("holder", "memory.max=8Gi"))
	edit := func(f func(*api.PrepareRequest)) api.PrepareRequest {
		r := request("bad", "memory.max=1Gi")
		f(&r)
		return r
	}
	long := strings.Repeat("x", 5000)
	for _, tt := range []struct {
		name string
		req  api.PrepareRequest
		code quota.Code
	}{
		{"too much for any GPU", request("bad", "memory.max=99Ti"), quota.CodeAboveGPU},
		{"no unit", request("bad", "memory.max=4096"), quota.CodeNoUnit},
		{"unknown key", request("bad", "memory.mx=4Gi"), quota.CodeUnknownKey},
		{"no limit", request("bad"), quota.CodeNoLimit},
		{"more than is free", request("bad", "memory.max=9Gi"), quota.CodeUnavailable},
		{"no such GPU", edit(func(r *api.PrepareRequest) { r.Devices.Selectors = []string{"7"} }), quota.CodeNoSuchGPU},
		{"privileged", edit(func(r *api.PrepareRequest) { r.Privileged = true }), quota.CodePrivileged},
		{"no id", edit(func(r *api.PrepareRequest) { r.Key.ID = "" }), quota.CodeBadRequest},
		{"long id", edit(func(r *api.PrepareRequest) { r.Key.ID = long }), quota.CodeBadRequest},
		{"no engine", edit(func(r *api.PrepareRequest) { r.Key.Engine = "lxc" }), quota.CodeBadRequest},
		{"no pod", edit(func(r *api.PrepareRequest) { r.Pod.ID = "" }), quota.CodeBadRequest},
		{"long pod", edit(func(r *api.PrepareRequest) { r.Pod.Name = long }), quota.CodeBadRequest},
		{"long bundle", edit(func(r *api.PrepareRequest) { r.Bundle = long }), quota.CodeBadRequest},
		{"relative termination log", edit(func(r *api.PrepareRequest) { r.TerminationLog = "etc/shadow" }), quota.CodeBadRequest},
		{"relative shim dir", edit(func(r *api.PrepareRequest) { r.ShimDir = "dev" }), quota.CodeBadRequest},
		{"shim dir with tricks", edit(func(r *api.PrepareRequest) { r.ShimDir = "/dev/../etc" }), quota.CodeBadRequest},
		{"shim dir with a line", edit(func(r *api.PrepareRequest) { r.ShimDir = "/dev/x\n/evil.so" }), quota.CodeBadRequest},
		{"shim dir with a token", edit(func(r *api.PrepareRequest) { r.ShimDir = "/dev/$ORIGIN" }), quota.CodeBadRequest},
		{"preload too long", edit(func(r *api.PrepareRequest) { r.ImagePreload = strings.Repeat("/a.so\n", 20000) }), quota.CodePreloadFile},
		{"preload with NUL", edit(func(r *api.PrepareRequest) { r.ImagePreload = "/a.so\x00" }), quota.CodePreloadFile},
		{"preload of HAMi", edit(func(r *api.PrepareRequest) { r.ImagePreload = "/usr/local/vgpu/libvgpu.so\n" }), quota.CodeForeignPreload},
		{"too many selectors", edit(func(r *api.PrepareRequest) { r.Devices.Selectors = make([]string, 2000) }), quota.CodeBadRequest},
	} {
		t.Run(tt.name, func(t *testing.T) {
			before := len(b.events("refused"))
			_, err := b.d.Prepare(context.Background(), tt.req)
			wantCode(t, err, tt.code)
			if evs := b.events("refused"); len(evs) != before+1 || evs[before].Code != string(tt.code) {
				t.Errorf("not in the journal: %+v", evs[before:])
			}
			if c, err := b.d.Container(context.Background(), "bad"); err == nil {
				t.Errorf("something is left: %+v", c)
			}
			if entries, err := os.ReadDir(filepath.Join(b.cfg.RunDir, "pods")); err != nil || len(entries) != 1 {
				t.Errorf("pages are left: %v, %v", entries, err)
			}
		})
	}
	// Without a GPU there is nothing to fence and nothing to remember.
	r := request("sidecar", "memory.max=1Gi")
	r.Devices.Selectors = nil
	if resp := b.prepare(r); len(resp.Grant.GPUs) != 0 || len(resp.Files) != 0 {
		t.Errorf("a container without GPU gets %+v", resp)
	}
	if _, err := b.d.Container(context.Background(), "sidecar"); err == nil {
		t.Error("a container without GPU is remembered")
	}
}

func TestBrokenInstallation(t *testing.T) {
	b := newBench(t)
	b.start()
	if err := os.Remove(b.cfg.ShimLibrary); err != nil {
		t.Fatal(err)
	}
	_, err := b.d.Prepare(context.Background(), request("a", "memory.max=1Gi"))
	wantCode(t, err, quota.CodeShimMissing)
	if err := os.Mkdir(b.cfg.ShimLibrary, 0o755); err != nil {
		t.Fatal(err)
	}
	_, err = b.d.Prepare(context.Background(), request("a", "memory.max=1Gi"))
	wantCode(t, err, quota.CodeShimMissing)
	b.d.cfg.CDISpecDirs = []string{t.TempDir()}
	_, err = b.d.Prepare(context.Background(), request("a", "memory.max=1Gi"))
	wantCode(t, err, quota.CodeNoCDIDevice)
	// Devices that are there already need no specification, a policy without shim no library.
	b.d.cfg.ShimDelivery = "off"
	r := request("a", "memory.max=1Gi")
	r.Devices.Present = true
	if resp := b.prepare(r); len(resp.Files) != 0 || len(resp.CDIDevices) != 0 {
		t.Errorf("got %+v", resp)
	}
	p := b.container()
	reg, err := b.d.Register(context.Background(), api.RegisterRequest{Key: r.Key, PID: p.pid})
	if err != nil || reg.Fences[1].State != "absent" || reg.Fences[1].Why != "off by policy" {
		t.Errorf("register: %+v, %v", reg, err)
	}
}

func TestRegisterRefusals(t *testing.T) {
	b := newBench(t)
	b.start()
	ctx := context.Background()
	req := request("a", "memory.max=1Gi")
	p := b.container()

	_, err := b.d.Register(ctx, api.RegisterRequest{Key: req.Key, PID: p.pid})
	wantCode(t, err, quota.CodeNotPrepared)
	b.prepare(req)
	_, err = b.d.Register(ctx, api.RegisterRequest{Key: req.Key, PID: 0})
	wantCode(t, err, quota.CodeBadRequest)
	_, err = b.d.Register(ctx, api.RegisterRequest{PID: p.pid})
	wantCode(t, err, quota.CodeBadRequest)
	_, err = b.d.Register(ctx, api.RegisterRequest{Key: req.Key, PID: 1 << 30})
	wantCode(t, err, quota.CodeProcessGone)
	// Our own process is in no cgroup of its own.
	_, err = b.d.Register(ctx, api.RegisterRequest{Key: req.Key, PID: os.Getpid()})
	if c := quota.CodeOf(err); c != quota.CodeCgroupRoot && c != quota.CodeCgroupOwn && c != quota.CodeCgroupShared {
		t.Errorf("our own process: %v", err)
	}
	// A cgroup with somebody else in it.
	b.also(p)
	_, err = b.d.Register(ctx, api.RegisterRequest{Key: req.Key, PID: p.pid})
	wantCode(t, err, quota.CodeCgroupShared)

	if v := b.view("a"); v.State != "prepared" {
		t.Errorf("state %s", v.State)
	}
	q := b.container()
	if _, err := b.d.Register(ctx, api.RegisterRequest{Key: req.Key, PID: q.pid}); err != nil {
		t.Fatal(err)
	}
	// Registered once, with another process: no.
	r := b.container()
	_, err = b.d.Register(ctx, api.RegisterRequest{Key: req.Key, PID: r.pid})
	wantCode(t, err, quota.CodeBadRequest)
	// Another container with the same cgroup: no.
	other := request("b", "memory.max=1Gi")
	b.prepare(other)
	_, err = b.d.Register(ctx, api.RegisterRequest{Key: other.Key, PID: q.pid})
	wantCode(t, err, quota.CodeCgroupShared)
}

// The start fails closed where the watch cannot be proven.
func TestLevelNotReached(t *testing.T) {
	for _, tt := range []struct {
		name   string
		breaks func(*fakeGPU)
		say    string
	}{
		{"a list is missing", func(g *fakeGPU) { g.listErr[gpu.ListMPS] = errors.New("no permission") }, "mps"},
		{"a size is unknown", func(g *fakeGPU) { g.unknown = []int{os.Getpid()} }, "does not say the memory"},
		{"hung", func(g *fakeGPU) { g.hang = make(chan struct{}) }, "hang"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			b := newBench(t)
			b.start()
			req := request("a", "memory.max=1Gi")
			b.prepare(req)
			p := b.container()
			b.gpu.change(func() { tt.breaks(b.gpu) })
			b.eventually("the GPU is degraded", func() bool {
				info, ok := (*samples)(b.d).Newest(uuid0)
				return ok && (!info.Complete || len(info.Unknown) > 0)
			})
			ctx, cancel := context.WithTimeout(context.Background(), time.Second)
			defer cancel()
			_, err := b.d.Register(ctx, api.RegisterRequest{Key: req.Key, PID: p.pid})
			wantCode(t, err, quota.CodeLevelNotReached)
			if err == nil || !strings.Contains(err.Error(), tt.say) {
				t.Errorf("%v does not say %q", err, tt.say)
			}
			b.gpu.change(func() {
				clear(b.gpu.listErr)
				b.gpu.unknown = nil
				if b.gpu.hang != nil {
					close(b.gpu.hang)
					b.gpu.hang = nil
				}
			})
			if _, err := b.d.Register(context.Background(), api.RegisterRequest{Key: req.Key, PID: p.pid}); err != nil {
				t.Errorf("once it is mended: %v", err)
			}
		})
	}
	t.Run("hard is not to be had", func(t *testing.T) {
		b := newBench(t)
		b.start()
		req := request("a", "memory.max=1Gi")
		b.prepare(req)
		b.d.mu.Lock()
		b.d.reg.Lookup(req.Key).Grant.Require = quota.LevelHard // no key gives it yet
		b.d.mu.Unlock()
		p := b.container()
		_, err := b.d.Register(context.Background(), api.RegisterRequest{Key: req.Key, PID: p.pid})
		wantCode(t, err, quota.CodeLevelNotReached)
		if v := b.view("a"); v.State != "prepared" {
			t.Errorf("state %s", v.State)
		}
	})
}

// aging is a fence that takes so long to raise that what has proven the watch is old by then.
type aging struct {
	fence.Fence
	raise func(times int)
	times int
}

func (f *aging) Raise(ctx context.Context, s fence.Subject) (map[string]fence.Status, error) {
	f.times++
	f.raise(f.times)
	return f.Fence.Raise(ctx, s)
}

// Where the proof has grown old before it could be used, a start waits for the next sample.
func TestRegisterWaitsForProof(t *testing.T) {
	b := newBench(t)
	b.start()
	req := request("a", "memory.max=1Gi")
	b.prepare(req)
	p := b.container()
	hang := make(chan struct{})
	slow := &aging{Fence: b.d.shim, raise: func(times int) {
		if times > 1 {
			return
		}
		b.gpu.change(func() { b.gpu.hang = hang })
		b.eventually("NVML hangs", func() bool {
			info, ok := (*samples)(b.d).Newest(uuid0)
			return ok && !info.Complete
		})
		b.d.seen.sample(uuid0, fence.SampleInfo{Began: b.d.mono() - fence.ProofAge - time.Second, Complete: true})
		time.AfterFunc(500*time.Millisecond, func() {
			b.gpu.change(func() { b.gpu.hang = nil })
			close(hang)
		})
	}}
	b.d.mu.Lock() // the gate is told of policy meanwhile
	b.d.fences = []fence.Fence{b.d.watch, slow}
	b.d.mu.Unlock()
	resp, err := b.d.Register(context.Background(), api.RegisterRequest{Key: req.Key, PID: p.pid})
	if err != nil || resp.Level != quota.LevelReactive {
		t.Fatalf("level %s, %v", resp.Level, err)
	}
	if slow.times != 2 {
		t.Errorf("raised %d times, want once more", slow.times)
	}
	if ev := b.events("refused"); len(ev) != 0 {
		t.Errorf("in the journal: %+v", ev)
	}
}

// Unknown data never kills, on any of its kinds.
func TestUnknownDataDoesNotKill(t *testing.T) {
	for _, tt := range []struct {
		name   string
		breaks func(*fakeGPU)
	}{
		{"a list is missing", func(g *fakeGPU) { g.listErr[gpu.ListGraphics] = errors.New("driver says no") }},
		{"hung", func(g *fakeGPU) { g.hang = make(chan struct{}) }},
		{"lost", func(g *fakeGPU) {
			for _, l := range gpu.Lists {
				g.listErr[l] = gpu.ErrLost
			}
			g.memErr = gpu.ErrLost
		}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			b := newBench(t)
			b.nvml.gpus = append(b.nvml.gpus, newFakeGPU(1, uuid1))
			b.start()
			p := b.run(request("a", "memory.max=1Gi"))
			req := request("other", "memory.max=1Gi")
			req.Devices.Selectors = []string{"1"}
			other := b.run(req)
			b.gpu.change(func() { tt.breaks(b.gpu); b.gpu.use[p.pid] = 4 * gib })
			b.eventually("it is said", func() bool { return len(b.events("gpu-unknown")) == 1 })
			// The other GPU goes on being enforced.
			b.nvml.gpus[1].set(other.pid, 4*gib)
			if sig := other.signalled(); sig != syscall.SIGKILL {
				t.Errorf("on the other GPU: %v", sig)
			}
			if !p.alive() {
				t.Error("killed on unknown data")
			}
			if v := b.view("a"); v.GPUs[0].Known {
				t.Error("shown as known")
			}
			b.gpu.change(func() {
				clear(b.gpu.listErr)
				b.gpu.memErr = nil
				if b.gpu.hang != nil {
					close(b.gpu.hang)
					b.gpu.hang = nil
				}
			})
			if sig := p.signalled(); sig != syscall.SIGKILL {
				t.Errorf("once it is known: %v", sig)
			}
			b.eventually("it is said", func() bool { return len(b.events("gpu-known")) == 1 })
		})
	}
}

func TestUnknownTooLong(t *testing.T) {
	b := newBench(t)
	b.start()
	b.prepare(request("a", "memory.max=1Gi"))
	b.gpu.change(func() { b.gpu.listErr[gpu.ListCompute] = errors.New("no") })
	b.eventually("it is unknown", func() bool { return len(b.events("gpu-unknown")) == 1 })
	b.d.mu.Lock()
	b.d.gpus[uuid0].lastKnown -= unknownLimit
	b.d.mu.Unlock()
	_, err := b.d.Prepare(context.Background(), request("b", "memory.max=1Gi"))
	wantCode(t, err, quota.CodeGPUUnknown)
}

func TestWithoutNVML(t *testing.T) {
	b := newBench(t)
	b.nvml.initErr = gpu.ErrNoLibrary
	b.start()
	b.eventually("it was asked", func() bool { _, err := b.d.GPUs(context.Background()); return !errors.Is(err, errNotAsked) })
	_, err := b.d.Prepare(context.Background(), request("a", "memory.max=1Gi"))
	wantCode(t, err, quota.CodeNVMLUnavailable)
	_, err = b.d.GPUs(context.Background())
	wantCode(t, err, quota.CodeNVMLUnavailable)
	if list, err := b.d.Containers(context.Background()); err != nil || len(list) != 0 {
		t.Errorf("list: %v, %v", list, err)
	}
	// It comes without a restart.
	b.nvml.mu.Lock()
	b.nvml.initErr = nil
	b.nvml.mu.Unlock()
	b.eventually("NVML is found", func() bool { gpus, err := b.d.GPUs(context.Background()); return err == nil && gpus[0].Known })
	b.prepare(request("a", "memory.max=1Gi"))
}

func TestHolds(t *testing.T) {
	b := newBench(t, func(c *config.Config) { c.PrepareHold, c.PagesHold = 50*time.Millisecond, time.Hour })
	b.start()
	req := request("a", "memory.max=10Gi")
	b.prepare(req)
	_, err := b.d.Prepare(context.Background(), request("b", "memory.max=10Gi"))
	wantCode(t, err, quota.CodeUnavailable)
	b.eventually("its bytes are free again", func() bool { return len(b.events("hold-expired")) == 1 })
	if v := b.view("a"); v.State != "prepared" {
		t.Errorf("state %s", v.State)
	}
	// Somebody else takes them: a late register is refused, by the numbers.
	second := b.run(request("b", "memory.max=10Gi"))
	p := b.container()
	_, err = b.d.Register(context.Background(), api.RegisterRequest{Key: req.Key, PID: p.pid})
	wantCode(t, err, quota.CodeUnavailable)
	// And when they are free, it may still come.
	b.finish(second)
	if err := b.d.Unregister(context.Background(), api.UnregisterRequest{Key: api.ContainerKey{Engine: quota.EngineCRI, Scope: "k8s.io", ID: "b"}}); err != nil {
		t.Fatal(err)
	}
	if _, err := b.d.Register(context.Background(), api.RegisterRequest{Key: req.Key, PID: p.pid}); err != nil {
		t.Errorf("a late register: %v", err)
	}
	never := request("never", "memory.max=1Gi")
	b.prepare(never)
	b.d.mu.Lock()
	b.d.cfg.PagesHold = time.Second
	b.d.mu.Unlock()
	b.eventually("its pages are given up", func() bool { return b.view("never").State == "ended" })
	if v := b.view("never"); v.EndReason != "never started" {
		t.Errorf("ended: %q", v.EndReason)
	}
	_, err = b.d.Register(context.Background(), api.RegisterRequest{Key: never.Key, PID: b.container().pid})
	wantCode(t, err, quota.CodeNotPrepared)
}

func TestCollect(t *testing.T) {
	b := newBench(t, func(c *config.Config) { c.EndedKeep = time.Second })
	b.start()
	p := b.run(request("a", "memory.max=10Gi"))
	b.finish(p) // no poststop
	b.eventually("it is collected", func() bool { return len(b.events("ended")) == 1 })
	// Its promise is free, and in the end nothing of it is left.
	b.prepare(request("b", "memory.max=10Gi"))
	b.eventually("it is forgotten", func() bool {
		_, err := b.d.Container(context.Background(), "a")
		return quota.CodeOf(err) == quota.CodeNoSuchContainer
	})
	b.d.mu.Lock()
	defer b.d.mu.Unlock()
	if n := len(b.d.reg.Pods()); n != 1 {
		t.Errorf("%d pods are left", n)
	}
	if entries, err := os.ReadDir(filepath.Join(b.cfg.RunDir, "state")); err != nil || len(entries) != 1 {
		t.Errorf("state files are left: %v, %v", entries, err)
	}
}

// A start waits for memory that is on its way back.
func TestPrepareWaitsForDyingMemory(t *testing.T) {
	b := newBench(t)
	b.start()
	req := request("a", "memory.max=10Gi")
	p := b.run(req)
	b.gpu.set(p.pid, 9*gib)
	b.eventually("the use is seen", func() bool { return b.view("a").GPUs[0].NVML == 9*gib })
	b.finish(p)
	if err := b.d.Unregister(context.Background(), api.UnregisterRequest{Key: req.Key}); err != nil {
		t.Fatal(err)
	}
	began := time.Now()
	time.AfterFunc(200*time.Millisecond, func() { b.gpu.set(p.pid, 0) })
	b.prepare(request("b", "memory.max=10Gi"))
	if took := time.Since(began); took < 150*time.Millisecond {
		t.Errorf("it did not wait: %s", took)
	}
}

// An engine may create a container again under the id of one that ended.
func TestSameIDAgain(t *testing.T) {
	b := newBench(t)
	b.start()
	req := request("a", "memory.max=4Gi")
	first := b.run(req)
	b.finish(first)
	if err := b.d.Unregister(context.Background(), api.UnregisterRequest{Key: req.Key}); err != nil {
		t.Fatal(err)
	}
	second := b.run(req)
	if v := b.view("a"); v.State != "running" || v.PID != second.pid {
		t.Errorf("view: %+v", v)
	}
	// And without a poststop of the first.
	b.finish(second)
	third := b.run(req)
	if v := b.view("a"); v.State != "running" || v.PID != third.pid {
		t.Errorf("view: %+v", v)
	}
	if list, err := b.d.Containers(context.Background()); err != nil || len(list) != 1 {
		t.Errorf("list: %+v, %v", list, err)
	}
}

// A container that is started again while NVML still lists what its life before held is charged only its own, in its pod,
// too.
func TestSameIDBesideWhatItLeft(t *testing.T) {
	b := newBench(t)
	b.start()
	req := request("a", "memory.max=4Gi")
	first := b.run(req)
	b.gpu.set(first.pid, 2*gib)
	b.eventually("the use is seen", func() bool { return b.view("a").GPUs[0].NVML == 2*gib })
	before := b.d.reg.Lookup(req.Key).ID()
	b.finish(first) // NVML goes on listing it
	if err := b.d.Unregister(context.Background(), api.UnregisterRequest{Key: req.Key}); err != nil {
		t.Fatal(err)
	}
	second := b.run(req)
	b.gpu.set(second.pid, gib)
	b.eventually("the second's use is seen", func() bool { return b.view("a").GPUs[0].NVML == gib })
	if g := b.view("a").GPUs[0]; g.Current != gib || g.PodCurrent != gib || g.Dying != 0 || g.PodPeak > 2*gib {
		t.Errorf("%+v", g)
	}
	b.d.mu.Lock()
	defer b.d.mu.Unlock()
	if now := b.d.reg.Lookup(req.Key).ID(); now == before {
		t.Errorf("both lives are called %s", now)
	}
	if n := len(b.d.gpus[uuid0].draining); n != 1 {
		t.Errorf("%d lives before are followed", n)
	}
}

// A start that failed after its fences were up leaves none of them behind when another takes its place.
func TestPreparedAnewIsLowered(t *testing.T) {
	b := newBench(t)
	d := b.start()
	req := request("a", "memory.max=4Gi")
	b.prepare(req)
	lowered := &countingFence{}
	d.mu.Lock()
	d.fences = append(d.fences, lowered)
	d.mu.Unlock()
	b.prepare(request("a", "memory.max=5Gi"))
	if lowered.lowered != 1 {
		t.Errorf("lowered %d times", lowered.lowered)
	}
}

// countingFence is nowhere up.
type countingFence struct {
	fence.MIG
	lowered int
}

func (*countingFence) State(fence.Subject, string) fence.Status {
	return fence.Status{State: fence.Absent}
}
func (f *countingFence) Lower(context.Context, fence.Subject) error {
	f.lowered++
	return nil
}

// What did not work about a pod is no problem of the node any more when the pod is forgotten.
func TestProblemsGoWithTheirPod(t *testing.T) {
	b := newBench(t)
	d := b.start()
	req := request("a", "memory.max=4Gi")
	b.prepare(req)
	d.mu.Lock()
	c := d.reg.Lookup(req.Key)
	d.once("ledger of "+c.Pod().Name, errors.New("broken"))
	d.once("cgroup of "+string(c.ID()), errors.New("cannot be read"))
	d.once("something else", errors.New("broken"))
	d.remove(c)
	d.mu.Unlock()
	for _, p := range d.problems() {
		if strings.Contains(p.About, " of ") {
			t.Errorf("%+v", p)
		}
	}
	if len(d.problems()) == 0 {
		t.Error("all was forgotten")
	}
}

// A process that cannot be read for a moment has not exited: its slot is not taken from it.
func TestSlotOfAProcessThatCannotBeRead(t *testing.T) {
	b := newBench(t)
	proc := t.TempDir()
	link := func(name string, to ...string) {
		t.Helper()
		if err := os.Symlink(filepath.Join("/proc", name), filepath.Join(append([]string{proc, name}, to...)...)); err != nil {
			t.Fatal(err)
		}
	}
	for _, name := range []string{"sys", "self", strconv.Itoa(os.Getpid())} {
		link(name)
	}
	host, err := act.NewHost(proc, "")
	if err != nil {
		t.Fatal(err)
	}
	b.host = host
	b.start()
	req := request("a", "memory.max=4Gi")
	resp := b.prepare(req)
	p := b.container()
	link(strconv.Itoa(p.pid))
	if _, err := b.d.Register(context.Background(), api.RegisterRequest{Key: req.Key, PID: p.pid}); err != nil {
		t.Fatal(err)
	}
	other := b.also(p).Process.Pid
	dir := strconv.Itoa(other)
	if err := os.MkdirAll(filepath.Join(proc, dir, "cgroup"), 0o755); err != nil { // no file: it cannot be read
		t.Fatal(err)
	}
	for _, name := range []string{"stat", "status", "ns", "task"} {
		link(filepath.Join(dir, name))
	}
	shim := shimOf(t, resp, 0, other)
	shim.charge(gib)
	claimed := shim.get(0)
	b.gpu.set(other, gib)
	b.eventually("it is found that it cannot be read", func() bool { return len(b.events("gpu-unknown")) > 0 })
	b.samples(10)
	if now := shim.get(0); now != claimed {
		t.Errorf("its slot's owner is %#x, was %#x", now, claimed)
	}
	if err := os.Remove(filepath.Join(proc, dir, "cgroup")); err != nil {
		t.Fatal(err)
	}
	link(filepath.Join(dir, "cgroup"))
	b.eventually("it is charged", func() bool { g := b.view("a").GPUs[0]; return g.Known && g.Current == gib && g.Ledger == gib })
}

// What was to be killed may have ended by itself: what becomes of its memory is followed all the same, and nothing is
// signalled after a restart.
func TestKillOfWhatIsGone(t *testing.T) {
	b := newBench(t)
	d := b.start()
	req := request("a", "memory.max=4Gi")
	p := b.run(req)
	other := b.also(p)
	if err := other.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = other.Wait() // killed
	d.mu.Lock()
	c := d.reg.Lookup(req.Key)
	c.Kill = &registry.Kill{ID: "1", GPU: uuid0, Reason: "test", PID: other.Process.Pid, Start: 1}
	task := killTask{id: c.ID(), record: *c.Kill, cgroup: *c.Cgroup, uuid: uuid0, reason: "test"}
	d.mu.Unlock()
	d.kill(task)
	b.eventually("its memory is found to be free", func() bool {
		d.mu.Lock()
		defer d.mu.Unlock()
		return c.Kill.Confirmed
	})
	if !p.alive() {
		t.Error("somebody else was killed")
	}
}

// Two containers of a pod share its limit, its ledger and a GPU's index.
func TestPodOfTwo(t *testing.T) {
	b := newBench(t)
	b.start()
	one := request("one", "memory.max=4Gi", "container.side.memory.max=1Gi")
	two := one
	two.Key.ID, two.ContainerName = "two", "side"
	p := b.run(one)
	q := b.run(two)
	gpus, err := b.d.GPUs(context.Background())
	if err != nil || gpus[0].GuaranteedBytes != 4*gib {
		t.Errorf("the pod's promise counts once: %+v, %v", gpus, err)
	}
	if v := b.view("two"); v.GPUs[0].Container.Max != gib || v.GPUs[0].Pod.Max != 4*gib || v.GPUs[0].Limits.Max != gib {
		t.Errorf("view: %+v", v.GPUs[0])
	}
	_, err = b.d.Container(context.Background(), "pod-one")
	wantCode(t, err, quota.CodeNoSuchContainer)
	_, err = b.d.Container(context.Background(), "one/nope")
	wantCode(t, err, quota.CodeNoSuchContainer)
	if v := b.view("one/side"); v.Key.ID != "two" {
		t.Errorf("one/side is %s", v.Key.ID)
	}
	// Each within its own, together above the pod's: the larger one dies.
	b.gpu.set(q.pid, gib)
	b.gpu.set(p.pid, 3*gib+512*mib)
	if sig := p.signalled(); sig != syscall.SIGKILL {
		t.Errorf("ended by %v", sig)
	}
	b.samples(5)
	if !q.alive() {
		t.Error("the smaller one died, too")
	}
}
