// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"context"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/gpufence/gpufence/enforcer/api"
	"github.com/gpufence/gpufence/enforcer/quota"
	"github.com/gpufence/gpufence/enforcer/registry"
)

// crash drops gpufenced and starts another one on what it left.
func (b *bench) crash() {
	b.t.Helper()
	b.drop()
	b.start()
	b.eventually("NVML is found", func() bool { gpus, err := b.d.GPUs(context.Background()); return err == nil && gpus[0].Known })
}

func TestRecovery(t *testing.T) {
	b := newBench(t)
	b.tmp = true
	b.start()
	req := request("a", "memory.max=4Gi")
	resp := b.prepare(req)
	p := b.container()
	if _, err := b.d.Register(context.Background(), api.RegisterRequest{Key: req.Key, PID: p.pid}); err != nil {
		t.Fatal(err)
	}
	waiting := request("waiting", "memory.max=1Gi")
	b.prepare(waiting)
	gone := b.run(request("gone", "memory.max=1Gi"))
	if _, err := b.set("a", "5Gi"); err != nil {
		t.Fatal(err)
	}
	b.gpu.set(p.pid, 5*gib+32*mib) // within the slack
	b.eventually("it is counted", func() bool { v := b.view("a").GPUs[0]; return v.Peak == 5*gib+32*mib && v.Events.OverMax > 3 })
	// A shrink that is pending, from a use that it must not kill.
	b.gpu.set(p.pid, 5*gib)
	b.eventually("the use is seen", func() bool { return b.view("a").GPUs[0].NVML == 5*gib })
	if _, err := b.set("a", "4Gi", func(r *api.SetRequest) { r.DeadlineMillis = 3_000_000 }); err != nil {
		t.Fatal(err)
	}
	before := b.view("a")
	last := b.events()[len(b.events())-1].Seq
	var inodes []uint64
	for _, f := range resp.Files {
		inodes = append(inodes, inode(t, f.Source))
	}

	b.drop()
	b.finish(gone)
	b.start()
	after := b.view("a")
	if after.PID != before.PID || after.Key != before.Key || after.State != "running" || after.Cgroup != before.Cgroup ||
		after.GPUs[0].Pod != before.GPUs[0].Pod || after.GPUs[0].Limits != before.GPUs[0].Limits || after.PreparedAt != before.PreparedAt {
		t.Errorf("before %+v\nafter %+v", before, after)
	}
	if a, o := after.GPUs[0], before.GPUs[0]; a.Peak < o.Peak || a.Events.OverMax < o.Events.OverMax {
		t.Errorf("counters went back: %+v, %+v", o, a)
	}
	if after.Resize == nil || after.Resize.State != "pending" || after.Resize.Desired != 4*gib {
		t.Errorf("the pending resize is %+v", after.Resize)
	}
	for i, f := range resp.Files {
		if inode(t, f.Source) != inodes[i] {
			t.Errorf("%s was made anew", f.Destination)
		}
	}
	if v := b.view("gone"); v.State != "ended" {
		t.Errorf("what ended meanwhile is %s", v.State)
	}
	if v := b.view("waiting"); v.State != "prepared" {
		t.Errorf("what was prepared is %s", v.State)
	}
	evs := b.events()
	for i := 1; i < len(evs); i++ {
		if evs[i].Seq != evs[i-1].Seq+1 {
			t.Errorf("numbers %d, %d", evs[i-1].Seq, evs[i].Seq)
		}
	}
	if evs[len(evs)-1].Seq <= last {
		t.Error("the journal's numbers began again")
	}
	q := b.container()
	b.eventually("NVML is found", func() bool { gpus, err := b.d.GPUs(context.Background()); return err == nil && gpus[0].Known })
	if _, err := b.d.Register(context.Background(), api.RegisterRequest{Key: waiting.Key, PID: q.pid}); err != nil {
		t.Errorf("register after the restart: %v", err)
	}
	b.samples(10)
	if !p.alive() {
		t.Error("killed by the restart")
	}
	if g := b.page("a"); g.PodMaxBytes != 4*gib {
		t.Errorf("page: %+v", g)
	}
	// And it goes on being held.
	b.gpu.set(p.pid, 6*gib)
	if sig := p.signalled(); sig != syscall.SIGKILL {
		t.Errorf("ended by %v", sig)
	}
}

func inode(t *testing.T, path string) uint64 {
	t.Helper()
	fi, err := os.Stat(path)
	if err != nil {
		t.Fatal(err)
	}
	return fi.Sys().(*syscall.Stat_t).Ino
}

// A process that got the pid of a container's, or another cgroup of its name, is not the container.
func TestRecoveryOfAnotherCgroup(t *testing.T) {
	b := newBench(t)
	b.start()
	b.run(request("a", "memory.max=4Gi"))
	b.d.mu.Lock()
	c, err := b.d.reg.Find("a")
	if err != nil {
		t.Fatal(err)
	}
	c.Cgroup.Inode++
	if err := b.d.save(c.Pod()); err != nil {
		t.Fatal(err)
	}
	b.d.mu.Unlock()
	b.crash()
	if v := b.view("a"); v.State != "ended" {
		t.Errorf("state %s", v.State)
	}
}

func TestRecoveryOfAnotherBoot(t *testing.T) {
	b := newBench(t)
	b.start()
	b.run(request("a", "memory.max=4Gi"))
	b.prepare(request("b", "memory.max=4Gi"))
	b.d.mu.Lock()
	for _, p := range b.d.reg.Pods() {
		p.BootID = "another"
		if err := b.d.save(p); err != nil {
			t.Fatal(err)
		}
	}
	b.d.mu.Unlock()
	b.crash()
	for _, id := range []string{"a", "b"} {
		if v := b.view(id); v.State != "ended" {
			t.Errorf("%s is %s", id, v.State)
		}
	}
}

// A state file that is damaged costs its own pod, says so, and is kept.
func TestDamagedState(t *testing.T) {
	b := newBench(t)
	b.start()
	p := b.run(request("a", "memory.max=4Gi"))
	q := b.run(request("b", "memory.max=2Gi"))
	b.drop()
	path := filepath.Join(b.cfg.RunDir, "state", registry.PodName(quota.EngineCRI, "k8s.io", "pod-a")+".json")
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	cut := text[:len(text)/2]
	if err := os.WriteFile(path, cut, 0o600); err != nil {
		t.Fatal(err)
	}
	b.start()
	evs := b.events("state-damaged")
	if len(evs) != 1 || evs[0].Code != string(quota.CodeStateDamaged) || !strings.Contains(evs[0].Message, path) {
		t.Fatalf("events: %+v", evs)
	}
	kept, err := os.ReadFile(path + ".damaged.0")
	if err != nil || string(kept) != string(cut) {
		t.Errorf("kept: %v", err)
	}
	if _, err := b.d.Container(context.Background(), "a"); quota.CodeOf(err) != quota.CodeNoSuchContainer {
		t.Errorf("a: %v", err)
	}
	// Its pages stay, since its processes use them.
	if entries, err := os.ReadDir(filepath.Join(b.cfg.RunDir, "pods")); err != nil || len(entries) != 2 {
		t.Errorf("pages: %v, %v", entries, err)
	}
	b.gpu.set(p.pid, 9*gib)
	b.gpu.set(q.pid, 3*gib)
	if sig := q.signalled(); sig != syscall.SIGKILL {
		t.Errorf("b ended by %v", sig)
	}
	b.eventually("a's memory counts as unmanaged", func() bool {
		gpus, err := b.d.GPUs(context.Background())
		return err == nil && gpus[0].UnmanagedBytes == 9*gib
	})
	if !p.alive() {
		t.Error("killed without a grant")
	}
}

// A kill that was recorded, and perhaps not sent, is sent; it is not counted twice.
func TestKillIsNotLostNorCountedTwice(t *testing.T) {
	b := newBench(t)
	b.start()
	p := b.run(request("a", "memory.max=4Gi"))
	b.d.mu.Lock()
	c, err := b.d.reg.Find("a")
	if err != nil {
		t.Fatal(err)
	}
	c.Kill = &registry.Kill{ID: "1", GPU: uuid0, Reason: "GPU memory limit exceeded", Group: true, PID: p.pid}
	c.CountersOn(uuid0).OOM, c.CountersOn(uuid0).OOMKill = 1, 1
	if err := b.d.save(c.Pod()); err != nil {
		t.Fatal(err)
	}
	b.d.mu.Unlock()
	// The one that died decided; only its successor sees the memory again.
	b.drop()
	b.gpu.set(p.pid, 6*gib)
	b.start()
	if sig := p.signalled(); sig != syscall.SIGKILL {
		t.Fatalf("ended by %v", sig)
	}
	b.samples(10)
	if v := b.view("a"); v.GPUs[0].Events.OOM != 1 || v.GPUs[0].Events.OOMKill != 1 {
		t.Errorf("events: %+v", v.GPUs[0].Events)
	}
	b.eventually("it is in the journal", func() bool { return len(b.events("kill")) == 1 })
	// A second restart finds that it was sent.
	b.crash()
	b.samples(5)
	if n := len(b.events("kill")); n != 1 {
		t.Errorf("%d kills in the journal", n)
	}
}

func TestStraysAreRemoved(t *testing.T) {
	b := newBench(t)
	b.tmp = true
	b.start()
	p := b.run(request("a", "memory.max=4Gi"))
	b.prepare(request("b", "memory.max=1Gi"))
	// As after a crash between making pages and saving the state.
	b.drop()
	if err := os.Remove(filepath.Join(b.cfg.RunDir, "state", registry.PodName(quota.EngineCRI, "k8s.io", "pod-b")+".json")); err != nil {
		t.Fatal(err)
	}
	// And as after one between removing a pod's pages and what is left of it.
	left := filepath.Join(b.cfg.RunDir, "preload", "podc-gone")
	if err := os.Mkdir(left, 0o755); err != nil {
		t.Fatal(err)
	}
	b.start()
	for _, dir := range []string{"pods", "preload"} {
		if entries, err := os.ReadDir(filepath.Join(b.cfg.RunDir, dir)); err != nil || len(entries) != 1 {
			t.Errorf("%s: %v, %v", dir, entries, err)
		}
	}
	if v := b.view("a"); v.PID != p.pid || v.State != "running" {
		t.Errorf("a: %+v", v)
	}
}

func TestPagesLost(t *testing.T) {
	b := newBench(t)
	b.start()
	p := b.run(request("a", "memory.max=4Gi"))
	b.drop()
	if err := os.RemoveAll(filepath.Join(b.cfg.RunDir, "pods")); err != nil {
		t.Fatal(err)
	}
	b.crash()
	if evs := b.events("pages-lost"); len(evs) != 1 {
		t.Errorf("events: %+v", evs)
	}
	v := b.view("a")
	if v.State != "running" || v.Fences[1].State != "absent" || v.Fences[1].Why != "pages lost" || v.Level != quota.LevelReactive {
		t.Errorf("view: %+v", v)
	}
	b.gpu.set(p.pid, 6*gib)
	if sig := p.signalled(); sig != syscall.SIGKILL {
		t.Errorf("ended by %v", sig)
	}
}

func TestTwoDaemons(t *testing.T) {
	b := newBench(t)
	b.start()
	_, err := New(Options{Config: b.cfg, Library: b.nvml, Host: b.host, Log: quiet(), PlainPages: true})
	wantCode(t, err, quota.CodeAlreadyRunning)
	b.drop()
	b.start()
}
