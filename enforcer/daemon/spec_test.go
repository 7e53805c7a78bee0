// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"context"
	"strings"
	"testing"
	"time"

	"github.com/gpufence/gpufence/enforcer/api"
	"github.com/gpufence/gpufence/enforcer/config"
	"github.com/gpufence/gpufence/enforcer/quota"
)

// acceptSpec lets annotations of running pods change limits.
func acceptSpec(c *config.Config) {
	a := c.Policy.Accept[quota.EngineCRI]
	a.ResizeByAnnotation = true
	c.Policy.Accept[quota.EngineCRI] = a
}

func fromSpec(r *api.ApplyRequest) { r.Source, r.Pods[0].UID, r.Wait = api.SourceSpec, "uid-1", true }

func TestSpec(t *testing.T) {
	b := newBench(t, acceptSpec)
	b.start()
	b.pair()
	// What it started with changes nothing, also when somebody has set another limit since.
	if got := b.apply(pairAnnotations("8Gi", "4Gi", "2Gi"), fromSpec); got.Error != nil || len(got.Resizes) != 0 {
		t.Fatalf("%+v", got)
	}
	if _, err := b.set("main", "5Gi", func(r *api.SetRequest) { r.Scope, r.Wait = "container", true }); err != nil {
		t.Fatal(err)
	}
	if got := b.apply(pairAnnotations("8Gi", "4Gi", "2Gi"), fromSpec); got.Error != nil || b.max() != [3]uint64{8, 5, 2} {
		t.Fatalf("what was followed already undid what was set since: %+v, %v", got, b.max())
	}
	// New annotations are the last word, then.
	next := append(pairAnnotations("9Gi", "3Gi", "2Gi"), "status.level=reactive")
	got := b.apply(next, fromSpec)
	if got.Error != nil || len(got.Resizes) != 2 || b.max() != [3]uint64{9, 3, 2} {
		t.Fatalf("%+v, %v", got, b.max())
	}
	v := b.view("main")
	if v.ChangedBy != api.SourceSpec {
		t.Errorf("changed by %q", v.ChangedBy)
	}
	// Again, and after a restart of gpufenced: nothing.
	for range 2 {
		if got := b.apply(next, fromSpec); got.Error != nil || len(got.Resizes) != 0 || b.view("main").Generation != v.Generation {
			t.Errorf("%+v, generation %d, was %d", got, b.view("main").Generation, v.Generation)
		}
		b.crash()
		b.eventually("NVML has answered", func() bool { return b.view("main").GPUs[0].Known })
	}
}

// A container that is started again comes with the annotations of its sandbox; what the pod says
// now is sent again, and changes it and nobody else.
func TestSpecAfterContainerRestart(t *testing.T) {
	b := newBench(t, acceptSpec)
	b.start()
	main, _ := b.pair()
	next := pairAnnotations("9Gi", "3Gi", "2Gi")
	if got := b.apply(next, fromSpec); got.Error != nil {
		t.Fatalf("%+v", got.Error)
	}
	if _, err := b.set("side", "1Gi", func(r *api.SetRequest) { r.Scope, r.Wait = "container", true }); err != nil {
		t.Fatal(err)
	}
	b.finish(main)
	b.eventually("main has ended", func() bool { return b.view("main").State == "ended" })
	again := request("main2", pairAnnotations("8Gi", "4Gi", "2Gi")...)
	again.Pod = api.PodRef{ID: "sandbox", Namespace: "team", Name: "pair", UID: "uid-1"}
	again.ContainerName = "main"
	b.run(again)
	if v := b.view("main2"); v.GPUs[0].Container.Max != 4*gib || v.GPUs[0].Pod.Max != 9*gib {
		t.Fatalf("%+v", v.GPUs[0])
	}
	got := b.apply(next, fromSpec)
	if v := b.view("main2"); got.Error != nil || len(got.Resizes) != 1 || v.GPUs[0].Container.Max != 3*gib || v.GPUs[0].Pod.Max != 9*gib {
		t.Fatalf("%+v, %+v", got, v.GPUs[0])
	}
	if v := b.view("side"); v.GPUs[0].Container.Max != gib || v.ChangedBy != "set" {
		t.Errorf("%+v", v)
	}
}

// What failed is told to whoever sends the same annotations again, and is not begun again until they
// say something else.
func TestSpecFailureIsRemembered(t *testing.T) {
	b := newBench(t, acceptSpec, func(c *config.Config) { c.ResizeDeadline = 300 * time.Millisecond })
	b.start()
	main, _ := b.pair()
	b.gpu.set(main.pid, 3*gib)
	b.eventually("the use is seen", func() bool { return b.view("main").GPUs[0].NVML == 3*gib })
	next := pairAnnotations("8Gi", "1Gi", "2Gi")
	failed := func(when string) {
		t.Helper()
		if got := b.apply(next, fromSpec); got.Error != nil || len(got.Resizes) != 1 || got.Resizes[0].State != "ResizeFailed" || got.Resizes[0].Desired != gib {
			t.Fatalf("%s: %+v", when, got)
		}
		if n := len(b.events("resize-failed")); n != 1 || b.max() != [3]uint64{8, 4, 2} {
			t.Fatalf("%s: it failed %d times, %v", when, n, b.max())
		}
	}
	failed("first")
	generation := b.view("main").Generation
	failed("again")
	b.gpu.set(main.pid, gib/2)
	b.eventually("the use is seen", func() bool { return b.view("main").GPUs[0].NVML == gib/2 })
	failed("although it would fit now")
	b.crash()
	b.eventually("NVML has answered", func() bool { return b.view("main").GPUs[0].Known })
	failed("after a restart")
	if v := b.view("main"); v.Generation != generation {
		t.Errorf("generation %d, was %d", v.Generation, generation)
	}
	// Other annotations are another wish, and so are the same ones after them.
	if got := b.apply(pairAnnotations("8Gi", "3Gi", "2Gi"), fromSpec); got.Error != nil || len(got.Resizes) != 1 || b.max() != [3]uint64{8, 3, 2} {
		t.Fatalf("%+v, %v", got, b.max())
	}
	if got := b.apply(next, fromSpec); got.Error != nil || len(got.Resizes) != 1 || got.Resizes[0].State != "done" || b.max() != [3]uint64{8, 1, 2} {
		t.Fatalf("%+v, %v", got, b.max())
	}
	if got := b.apply(next, fromSpec); got.Error != nil || len(got.Resizes) != 0 {
		t.Errorf("%+v", got)
	}
}

func TestSpecRefuses(t *testing.T) {
	b := newBench(t)
	b.start()
	b.pair()
	next := pairAnnotations("9Gi", "3Gi", "2Gi")
	got := b.apply(next, fromSpec)
	if got.Error == nil || got.Error.Code != string(quota.CodeNotAccepted) || !strings.Contains(got.Error.Message, "[accept.cri]") {
		t.Errorf("by default: %+v", got.Error)
	}
	b.d.mu.Lock()
	acceptSpec(&b.d.cfg)
	b.d.mu.Unlock()
	for _, tt := range []struct {
		name string
		edit func(*api.ApplyRequest)
		code quota.Code
	}{
		{"no uid", func(r *api.ApplyRequest) { fromSpec(r); r.Pods[0].UID = "" }, quota.CodeBadRequest},
		{"another pod of that name", func(r *api.ApplyRequest) { fromSpec(r); r.Pods[0].UID = "uid-2" }, quota.CodeNoSuchContainer},
	} {
		if got := b.apply(next, tt.edit); got.Error == nil || got.Error.Code != string(tt.code) {
			t.Errorf("%s: %+v", tt.name, got.Error)
		}
	}
	for _, req := range []api.ApplyRequest{{Source: "set"}, {Source: api.SourceSpec, Force: true}} {
		if _, err := b.d.Apply(context.Background(), req); quota.CodeOf(err) != quota.CodeBadRequest {
			t.Errorf("%+v: %v", req, err)
		}
	}
	if b.max() != [3]uint64{8, 4, 2} {
		t.Errorf("%v", b.max())
	}
}

// The node's label: ready only while every GPU takes containers and gpufence enforces.
func TestReady(t *testing.T) {
	b := newBench(t)
	b.start()
	node := func() api.Node {
		t.Helper()
		n, err := b.d.Node(context.Background())
		if err != nil {
			t.Fatal(err)
		}
		return n
	}
	b.eventually("it is ready", func() bool { n := node(); return n.Ready && len(n.Reasons) == 0 })
	if _, err := b.d.Quiesce(context.Background(), api.SwitchRequest{Reason: "new driver"}); err != nil {
		t.Fatal(err)
	}
	if n := node(); n.Ready || len(n.Reasons) == 0 || !strings.Contains(n.Reasons[0], "quiesced") || !strings.Contains(n.Reasons[0], "new driver") {
		t.Errorf("%v %q", n.Ready, n.Reasons)
	}
	if _, err := b.d.Resume(context.Background(), api.SwitchRequest{}); err != nil {
		t.Fatal(err)
	}
	b.eventually("it is ready again", func() bool { return node().Ready })
	b.d.mu.Lock()
	b.d.node.drift = []string{"containerd: the handler is gone"}
	b.d.mu.Unlock()
	if n := node(); n.Ready || len(n.Reasons) != 1 || !strings.Contains(n.Reasons[0], "handler") {
		t.Errorf("%v %q", n.Ready, n.Reasons)
	}
}
