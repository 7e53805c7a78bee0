// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/gpufence/gpufence/enforcer/api"
	"github.com/gpufence/gpufence/enforcer/config"
	"github.com/gpufence/gpufence/enforcer/quota"
)

// pair runs a pod of 8 GiB with containers main (4 GiB) and side (2 GiB).
func (b *bench) pair() (main, side *process) {
	b.t.Helper()
	first := request("main", pairAnnotations("8Gi", "4Gi", "2Gi")...)
	first.Pod = api.PodRef{ID: "sandbox", Namespace: "team", Name: "pair", UID: "uid-1"}
	second := first
	second.Key.ID, second.ContainerName = "side", "side"
	return b.run(first), b.run(second)
}

func pairAnnotations(pod, main, side string) []string {
	return []string{"memory.max=" + pod, "container.main.memory.max=" + main, "container.side.memory.max=" + side}
}

func (b *bench) apply(annotations []string, edit ...func(*api.ApplyRequest)) api.AppliedPod {
	b.t.Helper()
	req := api.ApplyRequest{Pods: []api.ApplyPod{{Namespace: "team", Name: "pair", Annotations: map[string]string{}}}}
	for _, a := range annotations {
		k, v, _ := strings.Cut(a, "=")
		req.Pods[0].Annotations["gpufence.dev/"+k] = v
	}
	for _, e := range edit {
		e(&req)
	}
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	resp, err := b.d.Apply(ctx, req)
	if err != nil || len(resp.Pods) != 1 {
		b.t.Fatalf("%+v, %v", resp, err)
	}
	return resp.Pods[0]
}

func waiting(r *api.ApplyRequest) { r.Wait = true }

// max are the limits of pod, main and side in GiB.
func (b *bench) max() [3]uint64 {
	b.t.Helper()
	m, s := b.view("main").GPUs[0], b.view("side").GPUs[0]
	return [3]uint64{m.Pod.Max / gib, m.Container.Max / gib, s.Container.Max / gib}
}

func TestApply(t *testing.T) {
	b := newBench(t)
	b.start()
	b.pair()
	if got := b.apply(pairAnnotations("8Gi", "4Gi", "2Gi"), waiting); got.Error != nil || len(got.Resizes) != 0 {
		t.Errorf("nothing changed: %+v", got)
	}
	generation := b.view("main").Generation
	if v := b.view("main"); v.ChangedBy != "" || v.ChangedAt != nil {
		t.Errorf("%+v", v)
	}
	got := b.apply(pairAnnotations("10Gi", "3Gi", "5Gi"), waiting)
	if got.Error != nil || len(got.Resizes) != 3 || b.max() != [3]uint64{10, 3, 5} {
		t.Fatalf("%+v, %v", got, b.max())
	}
	for _, r := range got.Resizes {
		if r.State != "done" {
			t.Errorf("%+v", r)
		}
	}
	if v := b.view("main"); v.ChangedBy != "apply" || v.ChangedAt == nil || v.Generation <= generation {
		t.Errorf("%+v", v)
	}
	if _, err := b.set("side", "4Gi", func(r *api.SetRequest) { r.Scope, r.Wait = "container", true }); err != nil {
		t.Fatal(err)
	}
	if v := b.view("side"); v.ChangedBy != "set" || b.view("main").ChangedBy != "apply" {
		t.Errorf("%s, %s", v.ChangedBy, b.view("main").ChangedBy)
	}
	// The whole promise is the pod's, and follows it.
	if g, err := b.d.GPUs(context.Background()); err != nil || g[0].GuaranteedBytes != 10*gib {
		t.Errorf("%+v, %v", g, err)
	}
}

// What grows waits for what shrinks, also over a restart, and is given up with it.
func TestApplyOrder(t *testing.T) {
	for _, tt := range []struct {
		name    string
		frees   bool
		restart bool
		want    [3]uint64
	}{
		{"frees", true, false, [3]uint64{6, 2, 4}},
		{"frees after a restart", true, true, [3]uint64{6, 2, 4}},
		{"does not free", false, false, [3]uint64{8, 4, 2}},
		{"does not free, restart", false, true, [3]uint64{8, 4, 2}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			b := newBench(t, func(c *config.Config) {
				c.ResizeDeadline = 3 * time.Second
				if tt.frees {
					c.ResizeDeadline = time.Minute // a restart on a busy machine takes its time
				}
			})
			b.start()
			main, side := b.pair()
			b.gpu.set(main.pid, 7*gib/2)
			b.eventually("the use is seen", func() bool { return b.view("main").GPUs[0].NVML == 7*gib/2 })
			got := b.apply(pairAnnotations("6Gi", "2Gi", "4Gi"))
			if got.Error != nil || len(got.Resizes) != 3 {
				t.Fatalf("%+v", got)
			}
			for _, r := range got.Resizes {
				if r.State != "pending" {
					t.Errorf("%+v", r)
				}
			}
			b.samples(5)
			if b.max() != [3]uint64{8, 4, 2} {
				t.Errorf("while main is too big: %v", b.max())
			}
			if g := b.page("side"); g.MaxBytes != 2*gib || g.PodMaxBytes != 8*gib {
				t.Errorf("%+v", g)
			}
			if g := b.page("main"); g.MaxBytes != 2*gib {
				t.Errorf("%+v", g)
			}
			if tt.restart {
				b.crash()
			}
			if tt.frees {
				b.gpu.set(main.pid, gib)
			}
			b.eventually("it ends", func() bool {
				b.d.mu.Lock()
				defer b.d.mu.Unlock()
				for _, p := range b.d.reg.Pods() {
					if len(p.Planned) > 0 {
						return false
					}
					for _, r := range p.Resizes[uuid0] {
						if r.State == "pending" {
							return false
						}
					}
				}
				return true
			})
			if b.max() != tt.want {
				t.Errorf("%v", b.max())
			}
			if failed := len(b.events("resize-failed")); (failed == 3) == tt.frees || !main.alive() || !side.alive() {
				t.Errorf("%d failed, alive %v %v: %+v", failed, main.alive(), side.alive(), b.events("resize-failed"))
			}
			if g := b.page("main"); g.MaxBytes != tt.want[1]*gib || g.PodMaxBytes != tt.want[0]*gib {
				t.Errorf("%+v", g)
			}
		})
	}
}

func TestApplyWaitsForTheWhole(t *testing.T) {
	b := newBench(t, func(c *config.Config) { c.ResizeDeadline = 300 * time.Millisecond })
	b.start()
	main, _ := b.pair()
	b.gpu.set(main.pid, 7*gib/2)
	b.eventually("the use is seen", func() bool { return b.view("main").GPUs[0].NVML == 7*gib/2 })
	got := b.apply(pairAnnotations("6Gi", "2Gi", "4Gi"), waiting)
	for _, r := range got.Resizes {
		if r.State != "ResizeFailed" || r.Why == "" {
			t.Errorf("%+v", r)
		}
	}
	if b.max() != [3]uint64{8, 4, 2} {
		t.Errorf("%v", b.max())
	}
}

func TestApplyRefuses(t *testing.T) {
	for _, tt := range []struct {
		name        string
		annotations []string
		edit        func(*api.ApplyRequest)
		code        quota.Code
	}{
		{"another pod", pairAnnotations("9Gi", "4Gi", "2Gi"), func(r *api.ApplyRequest) { r.Pods[0].Name = "other" }, quota.CodeNoSuchContainer},
		{"another namespace", pairAnnotations("9Gi", "4Gi", "2Gi"), func(r *api.ApplyRequest) { r.Pods[0].Namespace = "other" }, quota.CodeNoSuchContainer},
		{"another of that name", pairAnnotations("9Gi", "4Gi", "2Gi"), func(r *api.ApplyRequest) { r.Pods[0].UID = "uid-2" }, quota.CodeNoSuchContainer},
		{"no limit at all", nil, nil, quota.CodeNoLimit},
		{"more than the GPU has", pairAnnotations("99Gi", "4Gi", "2Gi"), nil, quota.CodeAboveGPU},
		{"more than is free", pairAnnotations("13Gi", "4Gi", "2Gi"), nil, quota.CodeUnavailable},
		{"memory.min above memory.max", append(pairAnnotations("8Gi", "4Gi", "2Gi"), "memory.min=9Gi"), nil, quota.CodeMinAboveMax},
		{"a typo", []string{"memory.mx=4Gi"}, nil, quota.CodeUnknownKey},
	} {
		t.Run(tt.name, func(t *testing.T) {
			b := newBench(t)
			b.start()
			b.pair()
			b.run(request("x", "memory.max=4Gi"))
			edit := tt.edit
			if edit == nil {
				edit = func(*api.ApplyRequest) {}
			}
			got := b.apply(tt.annotations, edit)
			if got.Error == nil || got.Error.Code != string(tt.code) || len(got.Resizes) != 0 {
				t.Errorf("%+v, %v", got, got.Error)
			}
			if b.max() != [3]uint64{8, 4, 2} {
				t.Errorf("%v", b.max())
			}
		})
	}
	b := newBench(t)
	b.start()
	if _, err := b.d.Apply(context.Background(), api.ApplyRequest{DeadlineMillis: -1}); quota.CodeOf(err) != quota.CodeBadRequest {
		t.Errorf("%v", err)
	}
	if _, err := b.d.Apply(context.Background(), api.ApplyRequest{Pods: make([]api.ApplyPod, maxApplyPods+1)}); quota.CodeOf(err) != quota.CodeBadRequest {
		t.Errorf("%v", err)
	}
}

// What grows after others have shrunk waits, as a start does, for memory that somebody has left
// behind, until the change's deadline.
func TestGrowthWaitsForDyingMemory(t *testing.T) {
	for _, comesBack := range []bool{true, false} {
		t.Run(fmt.Sprintf("it comes back=%v", comesBack), func(t *testing.T) {
			b := newBench(t, func(c *config.Config) {
				c.ResizeDeadline, c.StuckAfter = 4*time.Second, time.Minute
			})
			b.start()
			first := request("main", "container.main.memory.max=4Gi", "container.side.memory.max=2Gi")
			first.Pod = api.PodRef{ID: "sandbox", Namespace: "team", Name: "pair", UID: "uid-1"}
			second := first
			second.Key.ID, second.ContainerName = "side", "side"
			main := b.run(first)
			b.run(second)
			other := b.run(request("other", "memory.max=12Gi", "memory.min=1Gi"))
			use := func(p *process, id string, bytes uint64) {
				t.Helper()
				b.gpu.set(p.pid, bytes)
				b.eventually("the use is seen", func() bool { return b.view(id).GPUs[0].NVML == bytes })
			}
			use(main, "main", 3*gib)
			got := b.apply([]string{"container.main.memory.max=1Gi", "container.side.memory.max=9Gi"})
			if got.Error != nil || len(got.Resizes) != 2 {
				t.Fatalf("%+v", got)
			}
			use(other, "other", 8*gib)
			b.finish(other) // NVML goes on to list what it held
			b.eventually("the other has ended", func() bool { return b.view("other").State == "ended" })
			use(main, "main", gib/2)
			b.eventually("main has shrunk", func() bool { return b.view("main").GPUs[0].Container.Max == gib })
			b.samples(5)
			if v := b.view("side").GPUs[0].Container.Max; v != 2*gib || len(b.events("resize-failed")) != 0 {
				t.Fatalf("side has %d, %+v", v, b.events("resize-failed"))
			}
			if comesBack {
				b.gpu.set(other.pid, 0)
				b.eventually("side has grown", func() bool { return b.view("side").GPUs[0].Container.Max == 9*gib })
			} else {
				b.eventually("it is given up", func() bool { return len(b.events("resize-failed")) == 1 })
			}
			if ev := b.events("resize-failed"); comesBack && len(ev) != 0 || !comesBack && !strings.Contains(ev[0].Message, "exited processes") {
				t.Errorf("%+v", ev)
			}
		})
	}
}
