// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"context"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/gpufence/gpufence/enforcer/api"
	"github.com/gpufence/gpufence/enforcer/ledger"
	"github.com/gpufence/gpufence/enforcer/quota"
)

func (b *bench) set(id, value string, edit ...func(*api.SetRequest)) (api.SetResponse, error) {
	req := api.SetRequest{Values: map[string]string{"memory.max": value}}
	for _, e := range edit {
		e(&req)
	}
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	return b.d.Set(ctx, id, req)
}

// page is what the container's shims read of the first GPU.
func (b *bench) page(id string) ledger.LimitsGPU {
	b.t.Helper()
	return b.published(id).GPU[0]
}

// published is the container's whole page.
func (b *bench) published(id string) ledger.LimitsView {
	b.t.Helper()
	b.d.mu.Lock()
	c, err := b.d.reg.Find(id)
	if err != nil {
		b.d.mu.Unlock()
		b.t.Fatal(err)
	}
	path := filepath.Join(b.d.runtime[c.Pod().Name].containers[c.Index].Dir(), ledger.LimitsName)
	b.d.mu.Unlock()
	v, err := ledger.ReadLimits(path)
	if err != nil {
		b.t.Fatal(err)
	}
	return v
}

func TestGrow(t *testing.T) {
	b := newBench(t)
	b.start()
	p := b.run(request("a", "memory.max=4Gi"))
	b.run(request("b", "memory.max=4Gi"))
	resp, err := b.set("a", "6Gi")
	if err != nil || len(resp.Resizes) != 1 || resp.Resizes[0].State != "done" || resp.Resizes[0].Actual != 6*gib || len(resp.Notices) == 0 {
		t.Fatalf("set: %+v, %v", resp, err)
	}
	if g := b.page("a"); g.PodMaxBytes != 6*gib {
		t.Errorf("page: %+v", g)
	}
	if v := b.view("a"); v.GPUs[0].Limits.Max != 6*gib || v.GPUs[0].Pod.Min != 6*gib || v.Resize == nil || v.Resize.State != "done" {
		t.Errorf("view: %+v, %+v", v.GPUs[0], v.Resize)
	}
	b.gpu.set(p.pid, 6*gib)
	b.samples(5)
	if !p.alive() {
		t.Fatal("killed below its new limit")
	}
	// More than the GPU can promise is refused with the numbers, and changes nothing.
	_, err = b.set("a", "13Gi")
	wantCode(t, err, quota.CodeUnavailable)
	if g := b.page("a"); g.PodMaxBytes != 6*gib {
		t.Errorf("page: %+v", g)
	}
	if gpus, err := b.d.GPUs(context.Background()); err != nil || gpus[0].GuaranteedBytes != 10*gib {
		t.Errorf("gpus: %+v, %v", gpus, err)
	}
	b.gpu.set(p.pid, 7*gib)
	if sig := p.signalled(); sig != syscall.SIGKILL {
		t.Errorf("above its new limit: %v", sig)
	}
}

func TestShrinkThatFits(t *testing.T) {
	b := newBench(t)
	b.start()
	p := b.run(request("a", "memory.max=8Gi"))
	b.gpu.set(p.pid, 4*gib)
	b.eventually("the use is seen", func() bool { return b.view("a").GPUs[0].NVML == 4*gib })
	resp, err := b.set("a", "2Gi")
	if err != nil || resp.Resizes[0].State != "pending" || resp.Resizes[0].Deadline == nil || resp.Resizes[0].Actuated != 2*gib {
		t.Fatalf("set: %+v, %v", resp, err)
	}
	// The page shows the new limit at once, the promise is still the old one, and nobody dies.
	if g := b.page("a"); g.PodMaxBytes != 2*gib {
		t.Errorf("page: %+v", g)
	}
	_, err = b.d.Prepare(context.Background(), request("b", "memory.max=10Gi"))
	wantCode(t, err, quota.CodeUnavailable)
	b.samples(10)
	if !p.alive() {
		t.Fatal("killed while it shrinks")
	}
	done := make(chan api.SetResponse, 1)
	go func() {
		resp, err := b.set("a", "2Gi", func(r *api.SetRequest) { r.Wait = true })
		if err != nil {
			t.Error(err)
		}
		done <- resp
	}()
	time.Sleep(50 * time.Millisecond)
	b.gpu.set(p.pid, gib)
	select {
	case resp := <-done:
		if resp.Resizes[0].State != "done" {
			t.Errorf("it ended as %+v", resp.Resizes[0])
		}
	case <-time.After(patience):
		t.Fatal("it waits for ever")
	}
	b.eventually("the grant is the new one", func() bool { return b.view("a").GPUs[0].Pod.Max == 2*gib && b.view("a").GPUs[0].Pod.Min == 2*gib })
	b.prepare(request("b", "memory.max=10Gi"))
}

func TestShrinkFails(t *testing.T) {
	b := newBench(t)
	b.start()
	p := b.run(request("a", "memory.max=8Gi"))
	b.gpu.set(p.pid, 6*gib)
	b.eventually("the use is seen", func() bool { return b.view("a").GPUs[0].NVML == 6*gib })
	resp, err := b.set("a", "1Gi", func(r *api.SetRequest) { r.Wait = true; r.DeadlineMillis = 200 })
	if err != nil || resp.Resizes[0].State != "ResizeFailed" || resp.Resizes[0].Why == "" {
		t.Fatalf("set: %+v, %v", resp, err)
	}
	if g := b.page("a"); g.PodMaxBytes != 8*gib {
		t.Errorf("page: %+v", g)
	}
	if v := b.view("a"); v.GPUs[0].Limits.Max != 8*gib || v.Resize.State != "ResizeFailed" || v.State != "running" {
		t.Errorf("view: %+v", v)
	}
	evs := b.events("resize-failed")
	if len(evs) != 1 || evs[0].Code != string(quota.CodeResizeFailed) || !strings.Contains(evs[0].Message, "8Gi") {
		t.Errorf("events: %+v", evs)
	}
	b.samples(5)
	if !p.alive() {
		t.Error("a failed shrink killed it")
	}
}

func TestShrinkByForce(t *testing.T) {
	b := newBench(t)
	b.start()
	p := b.run(request("a", "memory.max=8Gi"))
	b.gpu.set(p.pid, 6*gib)
	b.eventually("the use is seen", func() bool { return b.view("a").GPUs[0].NVML == 6*gib })
	if _, err := b.set("a", "1Gi", func(r *api.SetRequest) { r.Force = true; r.DeadlineMillis = 100 }); err != nil {
		t.Fatal(err)
	}
	if sig := p.signalled(); sig != syscall.SIGKILL {
		t.Errorf("ended by %v", sig)
	}
}

func TestSetRefusals(t *testing.T) {
	b := newBench(t)
	b.start()
	b.run(request("a", "memory.max=4Gi"))
	b.run(request("min", "memory.max=4Gi", "memory.min=2Gi"))
	prepared := request("prepared", "memory.max=1Gi")
	b.prepare(prepared)
	for _, tt := range []struct {
		name, id string
		req      api.SetRequest
		code     quota.Code
	}{
		{"nobody", "nobody", api.SetRequest{Values: map[string]string{"memory.max": "1Gi"}}, quota.CodeNoSuchContainer},
		{"no name", "", api.SetRequest{Values: map[string]string{"memory.max": "1Gi"}}, quota.CodeNoSuchContainer},
		{"ambiguous", "main", api.SetRequest{Values: map[string]string{"memory.max": "1Gi"}}, quota.CodeAmbiguousName},
		{"not running", "prepared", api.SetRequest{Values: map[string]string{"memory.max": "1Gi"}}, quota.CodeNotRunning},
		{"nothing", "a", api.SetRequest{}, quota.CodeBadRequest},
		{"unknown key", "a", api.SetRequest{Values: map[string]string{"memory.mx": "1Gi"}}, quota.CodeUnknownKey},
		{"not settable", "a", api.SetRequest{Values: map[string]string{"require": "reactive"}}, quota.CodeNotSettable},
		{"min above max", "a", api.SetRequest{Values: map[string]string{"memory.min": "5Gi"}}, quota.CodeMinAboveMax},
		{"min that the GPU has not", "a", api.SetRequest{Values: map[string]string{"memory.max": "15Gi", "memory.min": "15Gi"}}, quota.CodeUnavailable},
		{"group", "a", api.SetRequest{Values: map[string]string{"memory.oom.group": "yes"}}, quota.CodeBadBool},
		{"no unit", "a", api.SetRequest{Values: map[string]string{"memory.max": "6"}}, quota.CodeNoUnit},
		{"above the GPU", "a", api.SetRequest{Values: map[string]string{"memory.max": "99Ti"}}, quota.CodeAboveGPU},
		{"below a context", "a", api.SetRequest{Values: map[string]string{"memory.max": "1Mi"}}, quota.CodeBelowContext},
		{"below its min", "min", api.SetRequest{Values: map[string]string{"memory.max": "1Gi"}}, quota.CodeMinAboveMax},
		{"scope", "a", api.SetRequest{Values: map[string]string{"memory.max": "1Gi"}, Scope: "node"}, quota.CodeBadRequest},
		{"negative deadline", "a", api.SetRequest{Values: map[string]string{"memory.max": "1Gi"}, DeadlineMillis: -1}, quota.CodeBadRequest},
		{"endless deadline", "a", api.SetRequest{Values: map[string]string{"memory.max": "1Gi"}, DeadlineMillis: 1 << 60}, quota.CodeBadRequest},
	} {
		t.Run(tt.name, func(t *testing.T) {
			_, err := b.d.Set(context.Background(), tt.id, tt.req)
			wantCode(t, err, tt.code)
		})
	}
	if g := b.page("a"); g.PodMaxBytes != 4*gib {
		t.Errorf("a refused change changed the page: %+v", g)
	}
}

func TestSetScope(t *testing.T) {
	b := newBench(t)
	b.start()
	b.run(request("a", "memory.max=4Gi"))
	// The container has no limit of its own: it gets one below the pod's.
	resp, err := b.set("a", "2Gi", func(r *api.SetRequest) { r.Scope = "container"; r.Wait = true })
	if err != nil || resp.Resizes[0].State != "done" {
		t.Fatalf("set: %+v, %v", resp, err)
	}
	if v := b.view("a"); v.GPUs[0].Container.Max != 2*gib || v.GPUs[0].Pod.Max != 4*gib || v.GPUs[0].Limits.Max != 2*gib {
		t.Errorf("view: %+v", v.GPUs[0])
	}
	if g := b.page("a"); g.MaxBytes != 2*gib || g.PodMaxBytes != 4*gib {
		t.Errorf("page: %+v", g)
	}
	resp, err = b.set("a", "6Gi", func(r *api.SetRequest) { r.Scope = "container" })
	if err != nil || !strings.Contains(strings.Join(resp.Notices, "\n"), "4Gi still holds") {
		t.Errorf("set: %+v, %v", resp, err)
	}
}

// A change that cannot be saved has not happened.
func TestSetThatCannotBeSaved(t *testing.T) {
	b := newBench(t)
	b.start()
	b.run(request("a", "memory.max=4Gi"))
	state := filepath.Join(b.cfg.RunDir, "state")
	if err := os.Rename(state, state+".away"); err != nil {
		t.Fatal(err)
	}
	for _, v := range []string{"6Gi", "2Gi"} {
		_, err := b.set("a", v)
		wantCode(t, err, quota.CodeStateDamaged)
		if g := b.page("a"); g.PodMaxBytes != 4*gib {
			t.Errorf("%s: page: %+v", v, g)
		}
		if c := b.view("a"); c.GPUs[0].Pod.Max != 4*gib || c.Resize != nil {
			t.Errorf("%s: view: %+v %+v", v, c.GPUs[0], c.Resize)
		}
	}
	// Neither has a start.
	_, err := b.d.Prepare(context.Background(), request("b", "memory.max=1Gi"))
	wantCode(t, err, quota.CodeStateDamaged)
	if err := os.Rename(state+".away", state); err != nil {
		t.Fatal(err)
	}
	b.prepare(request("b", "memory.max=1Gi"))
	if _, err := b.set("a", "6Gi"); err != nil {
		t.Errorf("once it can: %v", err)
	}
}

func TestWithMax(t *testing.T) {
	const none = quota.Unlimited
	for _, c := range []struct {
		name        string
		max, min    uint64
		limit, most uint64
		overcommit  bool
		want        uint64 // memory.min
	}{
		{name: "follows", max: 4 * gib, min: 4 * gib, limit: 6 * gib, most: 15 * gib, want: 6 * gib},
		{name: "was cut to what the GPU can promise", max: 16 * gib, min: 15 * gib, limit: 4 * gib, most: 15 * gib, want: 4 * gib},
		{name: "is cut to what the GPU can promise", max: 4 * gib, min: 4 * gib, limit: 16 * gib, most: 15 * gib, want: 15 * gib},
		{name: "does not follow", max: 4 * gib, min: 2 * gib, limit: 6 * gib, most: 15 * gib, want: 2 * gib},
		{name: "from no limit", max: none, limit: 6 * gib, most: 15 * gib, want: 6 * gib},
		{name: "from no limit, overcommit", max: none, limit: 6 * gib, most: 15 * gib, overcommit: true},
		{name: "to no limit", max: 4 * gib, min: 4 * gib, limit: none, most: 15 * gib},
	} {
		got := withMax(quota.Limits{Max: c.max, Min: c.min}, c.limit, c.most, c.overcommit)
		if got.Max != c.limit || got.Min != c.want {
			t.Errorf("%s: %+v", c.name, got)
		}
	}
}
