// SPDX-License-Identifier: Apache-2.0

package kube

import (
	"strings"
	"testing"
	"time"

	"github.com/gpufence/gpufence/enforcer/api"
	"github.com/gpufence/gpufence/enforcer/quota"
)

func TestOf(t *testing.T) {
	pod := &api.PodRef{ID: "sandbox", Namespace: "team-a", Name: "web", UID: "u1"}
	cri := &api.ContainerKey{Engine: quota.EngineCRI, ID: "c1"}
	for _, c := range []struct {
		name      string
		ev        api.Event
		reason    string // "": no Event
		kind      string
		condition string // "True", "False" or ""
		message   string
	}{
		{"start", api.Event{Type: "registered", Message: "web/main runs with level reactive"}, ReasonFenced, Normal, "False", "web/main runs with level reactive"},
		{"no room", api.Event{Type: "refused", Code: "E1402", Message: "memory.min 4Gi does not fit"}, ReasonUnavailable, Warning, "", "E1402 memory.min 4Gi does not fit"},
		{"namespace's total", api.Event{Type: "refused", Code: "E1411", Message: "m"}, ReasonUnavailable, Warning, "", "E1411 m"},
		{"wrong value", api.Event{Type: "refused", Code: "E1203", Message: `memory.max "4096" has no unit`}, ReasonRefused, Warning, "", `E1203 memory.max "4096" has no unit`},
		{"kill", api.Event{Type: "kill", Message: "used 4.3 GiB > memory.max 4 GiB"}, ReasonExceeded, Warning, "True", "used 4.3 GiB > memory.max 4 GiB"},
		{"kill of the unmanaged", api.Event{Type: "kill", Code: "E1412", Message: "m"}, ReasonUnmanaged, Warning, "", "E1412 m"},
		{"would kill", api.Event{Type: "would-kill", Message: "m"}, ReasonWould, Warning, "", "would kill: m"},
		{"kill failed", api.Event{Type: "kill-failed", Message: "m"}, ReasonNotEnded, Warning, "", "m"},
		{"resize", api.Event{Type: "resize", Message: "m"}, ReasonResized, Normal, "", "m"},
		{"resize failed", api.Event{Type: "resize-failed", Code: "E1407", Message: "m"}, ReasonResizeFailed, Warning, "", "E1407 m"},
		{"no shim", api.Event{Type: "shim-absent", Message: "m"}, ReasonShimAbsent, Normal, "", "m"},
		{"unfenced", api.Event{Type: "start-unfenced", Code: "E1402", Message: "m"}, ReasonUnfenced, Warning, "", "E1402 m"},
		{"before a kill", api.Event{Type: "kill-decided", Message: "m"}, "", "", "", ""},
		{"end", api.Event{Type: "ended", Message: "m"}, "", "", "", ""},
		{"of a later version", api.Event{Type: "something-new", Message: "m"}, "", "", "", ""},
		{"lines", api.Event{Type: "kill", Message: "a\nb\x1b[2J  c"}, ReasonExceeded, Warning, "True", "a b\x1b[2J c"},
	} {
		t.Run(c.name, func(t *testing.T) {
			c.ev.Pod, c.ev.Container, c.ev.Name = pod, cri, "main"
			r, ok := Of(c.ev)
			if ok != (c.reason != "") {
				t.Fatalf("%+v, %v", r, ok)
			}
			if !ok {
				return
			}
			condition := ""
			if r.Condition != nil {
				condition = map[bool]string{true: "True", false: "False"}[r.Condition.True]
			}
			if r.Reason != c.reason || r.Type != c.kind || condition != c.condition || r.Message != c.message || r.Pod != *pod || r.Container != "main" {
				t.Errorf("%+v, condition %q", r, condition)
			}
		})
	}
	for name, ev := range map[string]api.Event{
		"docker":       {Type: "kill", Pod: &api.PodRef{ID: "x"}, Container: &api.ContainerKey{Engine: quota.EngineDocker}},
		"forged":       {Type: "kill", Pod: pod, Container: &api.ContainerKey{Engine: quota.EngineOCI}},
		"of no pod":    {Type: "kill", Container: cri},
		"no container": {Type: "kill", Pod: pod},
	} {
		if r, ok := Of(ev); ok {
			t.Errorf("%s: %+v", name, r)
		}
	}
	r, _ := Of(api.Event{Type: "kill", Pod: pod, Container: cri, Message: strings.Repeat("é", 2000)})
	if len(r.Message) > maxMessage || !strings.HasSuffix(r.Message, "é…") {
		t.Errorf("a message of %d bytes ends in %q", len(r.Message), r.Message[len(r.Message)-8:])
	}
}

func TestLook(t *testing.T) {
	p := Pod{Namespace: "a", Name: "b", UID: "u", Containers: []string{"main", "init"}, Annotations: map[string]string{quota.Domain + "container.init.memory.max": "1Gi"}}
	if r := Look(p); r != nil {
		t.Errorf("%+v", r)
	}
	p.Annotations[quota.Domain+"container.mian.memory.max"] = "1Gi"
	if r := Look(p); len(r) != 1 || r[0].Reason != ReasonUnknownContainer || !strings.Contains(r[0].Message, "it has main, init") {
		t.Errorf("%+v", r)
	}
	p.Annotations = map[string]string{quota.Domain + "memory.max": "4096"}
	if r := Look(p); len(r) != 1 || r[0].Reason != ReasonBadAnnotation || !strings.HasPrefix(r[0].Message, "E1203 ") {
		t.Errorf("%+v", r)
	}
}

func TestUnmanaged(t *testing.T) {
	gpu := Pod{Namespace: "a", Name: "b", UID: "u", RunUID: "u", WantsGPU: true, Running: true}
	none := func(string) bool { return false }
	for name, c := range map[string]struct {
		change func(*Pod)
		known  func(string) bool
		want   string
	}{
		"no class":            {func(*Pod) {}, none, "no runtimeClassName"},
		"another class":       {func(p *Pod) { p.Class = "nvidia" }, none, `runtimeClassName is "nvidia"`},
		"annotated in vain":   {func(p *Pod) { p.Annotations = map[string]string{"gpufence.dev/memory.max": "1Gi"} }, none, "hold nothing"},
		"known all the same":  {func(p *Pod) { p.Class = "nvidia" }, func(uid string) bool { return uid == "u" }, ""},
		"without a GPU":       {func(p *Pod) { p.WantsGPU = false }, none, ""},
		"not running":         {func(p *Pod) { p.Running = false }, none, ""},
		"ending":              {func(p *Pod) { p.Ending = true }, none, ""},
		"a static pod is not": {func(p *Pod) { p.RunUID = "hash" }, func(uid string) bool { return uid == "hash" }, ""},
	} {
		p := gpu
		c.change(&p)
		r, ok := Unmanaged(p, c.known)
		if ok != (c.want != "") || ok && (!strings.Contains(r.Message, c.want) || r.Reason != ReasonUnmanaged) {
			t.Errorf("%s: %+v, %v", name, r, ok)
		}
	}
}

func TestFollowed(t *testing.T) {
	for _, c := range []struct {
		code    string
		changed bool
		said    bool
	}{
		{"", true, false}, {"E1408", true, false}, {"E1312", true, false}, {"E1306", false, false}, {"E1306", true, true}, {"E1311", false, true}, {"E1402", true, true},
	} {
		var answer api.AppliedPod
		if c.code != "" {
			answer.Error = &api.Error{Code: c.code, Message: "m"}
		}
		if r, ok := Followed(Pod{}, answer, c.changed); ok != c.said || ok && (r.Reason != ReasonResizeFailed || r.Message != c.code+" m") {
			t.Errorf("%+v: %+v, %v", c, r, ok)
		}
	}
}

func TestLabels(t *testing.T) {
	now := time.Date(2026, 12, 1, 12, 0, 0, 0, time.UTC)
	started := now.Add(-time.Hour)
	good := func() Node {
		return Node{
			State: &api.Node{Version: api.Version{Version: "v1.2.3+dirty"}, Started: started, Mode: "enforce", Level: "reactive", Ready: true,
				Fences: []api.Fence{{Name: "watch", State: "proven"}, {Name: "shim", State: "delivered"}}},
			Canary:   &Canary{Held: true, Time: now.Add(-time.Minute), Started: started},
			Handlers: []string{"", "runc", "gpufence"}, Handler: "gpufence", Now: now, CanaryAge: time.Hour,
		}
	}
	for name, c := range map[string]struct {
		change func(*Node)
		why    string // "": ready
	}{
		"all is well":                       {func(*Node) {}, ""},
		"an older kubelet":                  {func(n *Node) { n.Handlers = nil }, ""},
		"gpufenced is away":                 {func(n *Node) { n.State, n.Why = nil, "refused" }, "gpufenced does not answer: refused"},
		"gpufenced is not ready":            {func(n *Node) { n.State.Ready, n.State.Reasons = false, []string{"quiesced"} }, "quiesced"},
		"not ready without reason":          {func(n *Node) { n.State.Ready = false }, "gpufenced is not ready"},
		"nothing is enforced":               {func(n *Node) { n.State.Mode = "warn" }, "the node's policy has mode warn, which enforces nothing"},
		"the handler is gone":               {func(n *Node) { n.Handlers = []string{"runc"} }, "the engine has no handler gpufence"},
		"the engine has not read its files": {func(n *Node) { n.Handlers, n.Canary.Engine = nil, "containerd has not loaded the handler gpufence" }, "containerd has not loaded the handler gpufence"},
		"no canary":                         {func(n *Node) { n.Canary = nil }, "no canary has run yet"},
		"canary not held":                   {func(n *Node) { n.Canary.Held, n.Canary.Why = false, "no limit inside" }, "the canary was not held: no limit inside"},
		"canary of another":                 {func(n *Node) { n.State.Started = now }, "gpufenced was started after the last canary"},
		"old canary":                        {func(n *Node) { n.Canary.Time = now.Add(-2 * time.Hour) }, "the last canary is 2h0m0s old"},
	} {
		t.Run(name, func(t *testing.T) {
			n := good()
			c.change(&n)
			labels, reasons := Labels(n)
			if got := strings.Join(reasons, "; "); got != c.why {
				t.Errorf("reasons %q, want %q", got, c.why)
			}
			if ready := labels[LabelReady] != nil; ready != (c.why == "") {
				t.Errorf("ready %v", ready)
			}
			if n.State == nil {
				if labels[LabelLevel] != nil {
					t.Errorf("a level of nobody: %q", *labels[LabelLevel])
				}
				return
			}
			if got := *labels[LabelVersion]; got != "v1.2.3_dirty" {
				t.Errorf("version %q", got)
			}
			if got := *labels[LabelFence+"watch"]; got != "proven" {
				t.Errorf("watch %q", got)
			}
		})
	}
}

func TestChanges(t *testing.T) {
	yes := "true"
	has := map[string]string{"other": "1", LabelReady: "false", LabelFence + "gate": "proven", LabelDomain + "x-team": "a"}
	got := Changes(has, map[string]*string{LabelReady: &yes, LabelLevel: nil})
	if len(got) != 2 || *got[LabelReady] != "true" || got[LabelFence+"gate"] != nil {
		t.Errorf("%v", got)
	}
	if _, ok := got[LabelFence+"gate"]; !ok {
		t.Error("the label of a fence that is gone stays")
	}
	if got := Changes(map[string]string{LabelReady: "true"}, map[string]*string{LabelReady: &yes}); len(got) != 0 {
		t.Errorf("%v", got)
	}
}

func TestLimiter(t *testing.T) {
	l := NewLimiter()
	now := time.Unix(1e9, 0)
	r := Report{Pod: api.PodRef{UID: "u"}, Container: "c", Reason: ReasonRefused}
	if v := l.Admit(r, "first", now); v.Name != "first" || v.Count != 1 {
		t.Fatalf("%+v", v)
	}
	if v := l.Admit(r, "second", now.Add(time.Second)); v.Name != "first" || v.Count != 2 || !v.First.Equal(now) {
		t.Errorf("the same again is not folded: %+v", v)
	}
	if v := l.Admit(r, "third", now.Add(11*time.Minute)); v.Name != "third" || v.Count != 1 {
		t.Errorf("after the window: %+v", v)
	}
	// A loud pod: no more than its bucket, and what is held back shows in the next count.
	at, passed, last := now.Add(time.Hour), 0, Verdict{}
	for i := range 1000 {
		if v := l.Admit(r, "loud", at.Add(time.Duration(i)*time.Millisecond)); v.Name != "" {
			passed++
			last = v
		}
	}
	if passed != 25 || last.Count != 25 {
		t.Errorf("%d passed, the last with count %d", passed, last.Count)
	}
	if v := l.Admit(r, "loud", at.Add(2*time.Minute)); v.Count != 1001 {
		t.Errorf("what was held back is not counted: %+v", v)
	}
	kill := r
	kill.Reason = ReasonExceeded
	for range 100 {
		l.Admit(r, "loud", at.Add(2*time.Minute))
	}
	if v := l.Admit(kill, "kill", at.Add(2*time.Minute)); v.Name != "kill" {
		t.Errorf("the first kill of a loud pod is dropped: %+v", v)
	}
	for i := range 3 * l.MaxKeys {
		l.Admit(Report{Pod: api.PodRef{UID: string(rune(i))}, Reason: ReasonFenced}, "n", at.Add(time.Hour))
	}
	if len(l.said) > l.MaxKeys || len(l.buckets) > l.MaxKeys {
		t.Errorf("%d and %d entries are kept", len(l.said), len(l.buckets))
	}
}
