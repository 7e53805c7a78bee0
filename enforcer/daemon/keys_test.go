// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"context"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/gpufence/gpufence/enforcer/api"
	"github.com/gpufence/gpufence/enforcer/config"
	"github.com/gpufence/gpufence/enforcer/policy"
	"github.com/gpufence/gpufence/enforcer/quota"
)

// setKeys sets several keys at once.
func (b *bench) setKeys(id string, values map[string]string, edit ...func(*api.SetRequest)) (api.SetResponse, error) {
	req := api.SetRequest{Values: values}
	for _, e := range edit {
		e(&req)
	}
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	return b.d.Set(ctx, id, req)
}

// memoryFile is a file under /dev/gpufence of a container.
func (b *bench) memoryFile(id, name string) string {
	b.t.Helper()
	b.d.mu.Lock()
	c, err := b.d.reg.Find(id)
	if err != nil {
		b.d.mu.Unlock()
		b.t.Fatal(err)
	}
	dir := b.d.runtime[c.Pod().Name].containers[c.Index].Dir()
	b.d.mu.Unlock()
	text, err := os.ReadFile(filepath.Join(dir, name))
	if err != nil {
		b.t.Fatal(err)
	}
	return string(text)
}

// Every key of memory.* changes in a container that runs, in its pages, its files, and in what
// decides, and is so after a restart.
func TestSetEveryKey(t *testing.T) {
	b := newBench(t)
	b.start()
	b.run(request("a", "memory.max=8Gi"))
	generation := b.view("a").Generation
	resp, err := b.setKeys("a", map[string]string{"memory.high": "4Gi", "memory.min": "2Gi", "memory.swap.max": "1Gi", "memory.oom.group": "false"})
	if err != nil || len(resp.Resizes) != 4 {
		t.Fatalf("%+v, %v", resp, err)
	}
	want := map[string]uint64{"memory.high": 4 * gib, "memory.min": 2 * gib, "memory.swap.max": gib, "memory.oom.group": 0}
	for _, r := range resp.Resizes {
		if v, ok := want[r.Key]; !ok || r.Desired != v || r.Actual != v || r.State != "done" || (r.GPU == "") != (r.Key == "memory.oom.group") {
			t.Errorf("%+v", r)
		}
	}
	check := func(when string) {
		t.Helper()
		v := b.view("a")
		if l := v.GPUs[0].Pod; l != (quota.Limits{Max: 8 * gib, High: 4 * gib, Min: 2 * gib, SwapMax: gib}) || v.OOMGroup || v.ChangedBy != "set" || v.Generation <= generation {
			t.Errorf("%s: %+v, group %t, by %q, generation %d", when, l, v.OOMGroup, v.ChangedBy, v.Generation)
		}
		if p := b.published("a"); p.GPU[0].PodHighBytes != 4*gib || p.GPU[0].PodSwapMaxBytes != gib || p.Generation != v.Generation {
			t.Errorf("%s: page %+v", when, p)
		}
		if g, err := b.d.GPUs(context.Background()); err != nil || g[0].GuaranteedBytes != 2*gib {
			t.Errorf("%s: %+v, %v", when, g, err)
		}
		for name, text := range map[string]string{"memory.high": "4294967296", "memory.min": "2147483648", "memory.swap.max": "1073741824", "memory.oom.group": "0"} {
			if got := b.memoryFile("a", name); !strings.Contains(got, text) {
				t.Errorf("%s: %s is %q, want %s", when, name, got, text)
			}
		}
	}
	check("set")
	b.crash()
	b.eventually("NVML has answered", func() bool { return b.view("a").GPUs[0].Known })
	check("after a restart")
	// What is free now can be promised to others, and not again.
	b.prepare(request("b", "memory.max=13Gi"))
	_, err = b.setKeys("a", map[string]string{"memory.min": "8Gi"})
	wantCode(t, err, quota.CodeUnavailable)
	if l := b.view("a").GPUs[0].Pod; l.Min != 2*gib {
		t.Errorf("refused, and %+v", l)
	}
}

// A shrink that fails takes everything of the same request back, and nothing of another one.
func TestSetKeysWithShrink(t *testing.T) {
	for _, frees := range []bool{true, false} {
		b := newBench(t, func(c *config.Config) { c.ResizeDeadline = 2 * time.Second })
		b.start()
		p := b.run(request("a", "memory.max=8Gi"))
		b.gpu.set(p.pid, 6*gib)
		b.eventually("the use is seen", func() bool { return b.view("a").GPUs[0].NVML == 6*gib })
		resp, err := b.setKeys("a", map[string]string{"memory.max": "4Gi", "memory.high": "3Gi"}, func(r *api.SetRequest) {
			if frees {
				r.DeadlineMillis = 60_000
			}
		})
		if err != nil || len(resp.Resizes) != 2 || resp.Resizes[0].State != "pending" || resp.Resizes[1].State != "pending" {
			t.Fatalf("%+v, %v", resp, err)
		}
		// What slows it helps it to shrink; the promise is the old one.
		if g := b.page("a"); g.PodMaxBytes != 4*gib || g.PodHighBytes != 3*gib {
			t.Errorf("pending: %+v", g)
		}
		if g, err := b.d.GPUs(context.Background()); err != nil || g[0].GuaranteedBytes != 8*gib {
			t.Errorf("pending: %+v, %v", g, err)
		}
		// Another request meanwhile, which does not disturb the first.
		if resp, err := b.setKeys("a", map[string]string{"memory.swap.max": "2Gi"}); err != nil || len(resp.Resizes) != 1 || resp.Resizes[0].State != "done" {
			t.Fatalf("%+v, %v", resp, err)
		}
		if v := b.view("a"); v.Resize == nil || v.Resize.State != "pending" {
			t.Errorf("it is gone: %+v", v.Resize)
		}
		want, state := quota.Limits{Max: 8 * gib, High: quota.Unlimited, Min: 8 * gib, SwapMax: 2 * gib}, "ResizeFailed"
		if frees {
			want, state = quota.Limits{Max: 4 * gib, High: 3 * gib, Min: 4 * gib, SwapMax: 2 * gib}, "done"
			b.gpu.set(p.pid, 2*gib)
		}
		b.eventually("it ends", func() bool { return b.view("a").Resize.State == state })
		if v := b.view("a"); v.GPUs[0].Pod != want {
			t.Errorf("%s: %+v", state, v.GPUs[0].Pod)
		}
		if g := b.page("a"); g.PodMaxBytes != want.Max || g.PodHighBytes != want.High || g.PodSwapMaxBytes != 2*gib {
			t.Errorf("%s: %+v", state, g)
		}
	}
}

func TestSetKeysScope(t *testing.T) {
	b := newBench(t)
	b.start()
	b.pair()
	// The level that has a memory.high is meant; without one, that of memory.max.
	if _, err := b.setKeys("main", map[string]string{"memory.high": "6Gi"}, func(r *api.SetRequest) { r.Scope = "pod" }); err != nil {
		t.Fatal(err)
	}
	resp, err := b.setKeys("main", map[string]string{"memory.high": "5Gi"})
	if v := b.view("main").GPUs[0]; err != nil || v.Pod.High != 5*gib || v.Container.High != quota.Unlimited {
		t.Errorf("%+v, %v, %+v", resp, err, v)
	}
	resp, err = b.setKeys("side", map[string]string{"memory.swap.max": "1Gi"})
	if v := b.view("side").GPUs[0]; err != nil || v.Container.SwapMax != gib || len(resp.Notices) != 2 || !strings.Contains(resp.Notices[0], "memory.swap.max of 0") {
		t.Errorf("%+v, %v, %+v", resp, err, v)
	}
	if _, err := b.setKeys("side", map[string]string{"memory.oom.group": "false"}, func(r *api.SetRequest) { r.Scope = "pod" }); err != nil || b.view("main").OOMGroup || b.view("side").OOMGroup {
		t.Errorf("%v", err)
	}
	if _, err := b.setKeys("side", map[string]string{"memory.oom.group": "true"}); err != nil || b.view("main").OOMGroup || !b.view("side").OOMGroup {
		t.Errorf("%v", err)
	}
}

func TestApplyEveryKey(t *testing.T) {
	b := newBench(t)
	b.start()
	b.pair()
	got := b.apply(append(pairAnnotations("8Gi", "4Gi", "2Gi"), "memory.high=6Gi", "memory.oom.group=false", "container.main.memory.min=1Gi", "container.main.memory.swap.max=1Gi"), waiting)
	main, side := b.view("main"), b.view("side")
	if got.Error != nil || main.GPUs[0].Pod.High != 6*gib || main.OOMGroup || side.OOMGroup || main.GPUs[0].Container.Min != gib || main.GPUs[0].Container.SwapMax != gib {
		t.Fatalf("%+v, %v, %+v, %+v", got, got.Error, main.GPUs[0], side.GPUs[0])
	}
	for _, r := range got.Resizes {
		if r.State != "done" || r.Key == "memory.max" {
			t.Errorf("%+v", r)
		}
	}
	// And back.
	if got := b.apply(pairAnnotations("8Gi", "4Gi", "2Gi"), waiting); got.Error != nil {
		t.Fatal(got.Error)
	}
	if main := b.view("main"); main.GPUs[0].Pod.High != quota.Unlimited || !main.OOMGroup || main.GPUs[0].Container.Min != 4*gib || main.GPUs[0].Container.SwapMax != 0 {
		t.Errorf("%+v", main)
	}
	if got := b.apply(pairAnnotations("8Gi", "4Gi", "2Gi"), waiting); got.Error != nil || len(got.Resizes) != 0 {
		t.Errorf("nothing changed: %+v", got)
	}
}

// A change that comes before NVML's first answer after a restart waits for it, as a start does.
func TestSetWaitsForTheFirstSample(t *testing.T) {
	b := newBench(t)
	b.start()
	b.run(request("a", "memory.max=4Gi"))
	b.drop()
	b.unmount()
	hang := make(chan struct{})
	b.gpu.change(func() { b.gpu.hang = hang })
	b.start()
	time.AfterFunc(200*time.Millisecond, func() {
		b.gpu.change(func() { b.gpu.hang = nil })
		close(hang)
	})
	if resp, err := b.set("a", "6Gi"); err != nil || resp.Resizes[0].State != "done" {
		t.Fatalf("%+v, %v", resp, err)
	}
}

// What grows waits for memory of processes that exited.
func TestSetWaitsForDying(t *testing.T) {
	b := newBench(t)
	b.start()
	b.run(request("a", "memory.max=4Gi"))
	other := b.run(request("b", "memory.max=8Gi"))
	b.gpu.set(other.pid, 8*gib)
	b.eventually("the use is seen", func() bool { return b.view("b").GPUs[0].NVML == 8*gib })
	b.finish(other) // NVML lists it on
	b.eventually("it has ended", func() bool { return b.view("b").State == "ended" })
	started := time.Now()
	time.AfterFunc(400*time.Millisecond, func() { b.gpu.set(other.pid, 0) })
	if resp, err := b.set("a", "12Gi"); err != nil || resp.Resizes[0].State != "done" {
		t.Fatalf("%+v, %v", resp, err)
	}
	if waited := time.Since(started); waited < 300*time.Millisecond {
		t.Errorf("it waited %s only: the memory was not back", waited)
	}
}

// A pending change of a container that has ended does not come back, whatever the sampler still
// follows of it.
func TestResizeOfAnEndedContainer(t *testing.T) {
	b := newBench(t)
	b.start()
	main, _ := b.pair()
	b.gpu.set(main.pid, 3*gib)
	b.eventually("the use is seen", func() bool { return b.view("main").GPUs[0].NVML == 3*gib })
	if got := b.apply(pairAnnotations("8Gi", "1Gi", "6Gi")); got.Error != nil || len(got.Resizes) != 2 {
		t.Fatalf("%+v", got)
	}
	b.finish(main) // its memory stays listed: it is followed on
	b.eventually("it has ended", func() bool { return b.view("main").State == "ended" })
	b.samples(5)
	b.gpu.set(main.pid, 0)
	b.samples(5)
	// What waited for it goes on.
	b.eventually("side grows", func() bool { return b.view("side").GPUs[0].Container.Max == 6*gib })
	b.d.mu.Lock()
	defer b.d.mu.Unlock()
	for _, p := range b.d.reg.Pods() {
		for uuid, list := range p.Resizes {
			for _, r := range list {
				if c := b.d.reg.ByID(r.Level.Container); r.Level.Container != "" && (c == nil || !c.Active()) {
					t.Errorf("a change of an ended container on %s: %+v", uuid, r)
				}
			}
		}
		if len(p.Planned)+len(p.Goals) > 0 {
			t.Errorf("left: %+v %+v", p.Planned, p.Goals)
		}
	}
	for _, g := range b.d.gpus {
		if left := g.machine.PendingResizes(); len(left) > 0 {
			t.Errorf("policy goes on with %+v", left)
		}
	}
	// One that ends by itself in the moment of the container's end changes nothing either.
	var g *gpuState
	for _, g = range b.d.gpus {
	}
	c, err := b.d.reg.Find("main")
	if err != nil {
		t.Fatal(err)
	}
	before := c.ContainerLimits(uuid0)
	b.d.resizeEnded(g, resize{Level: policy.Level{Container: c.ID()}, Old: 4 * gib, Desired: gib, State: policy.ResizeDone})
	if c.ContainerLimits(uuid0) != before || b.d.resizeOf(c.Pod().Name, uuid0, policy.Level{Container: c.ID()}) != nil {
		t.Error("it was put back")
	}
}
