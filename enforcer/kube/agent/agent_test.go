// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http/httptest"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/sirupsen/logrus"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	kruntime "k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes/fake"
	clienttesting "k8s.io/client-go/testing"

	"github.com/gpufence/gpufence/enforcer/api"
	"github.com/gpufence/gpufence/enforcer/kube"
	"github.com/gpufence/gpufence/enforcer/quota"
)

// fakeDaemon is a gpufenced with a journal.
type fakeDaemon struct {
	mu         sync.Mutex
	away       error
	node       api.Node
	journal    []api.Event
	news       chan struct{}
	containers []api.Container
	applied    []api.ApplyPod
	answer     *api.Error
	began      []uint64 // where each follower began
}

func newDaemon(started time.Time) *fakeDaemon {
	return &fakeDaemon{news: make(chan struct{}), containers: []api.Container{{Pod: api.PodRef{UID: "uid-web"}}, {Pod: api.PodRef{UID: "uid-other"}}}, node: api.Node{
		Version: api.Version{Version: "v1"}, Started: started, Mode: "enforce", Level: "reactive", Ready: true, Fences: []api.Fence{{Name: "watch", State: "proven"}},
	}}
}

func (d *fakeDaemon) set(f func(*fakeDaemon)) {
	d.mu.Lock()
	defer d.mu.Unlock()
	f(d)
	close(d.news)
	d.news = make(chan struct{})
}

func (d *fakeDaemon) say(ev api.Event) {
	d.set(func(d *fakeDaemon) {
		d.node.LastEvent++
		ev.Seq = d.node.LastEvent
		if ev.Time.IsZero() {
			ev.Time = time.Now()
		}
		d.journal = append(d.journal, ev)
	})
}

func (d *fakeDaemon) Node(context.Context) (api.Node, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.node, d.away
}

func (d *fakeDaemon) Containers(context.Context) ([]api.Container, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.containers, d.away
}

func (d *fakeDaemon) Metrics(context.Context) ([]byte, error) {
	return []byte("gpufence_build_info 1\n"), nil
}

func (d *fakeDaemon) Apply(_ context.Context, req api.ApplyRequest) (api.ApplyResponse, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.away != nil {
		return api.ApplyResponse{}, d.away
	}
	var resp api.ApplyResponse
	for _, p := range req.Pods {
		if req.Source != api.SourceSpec {
			return resp, fmt.Errorf("source %q", req.Source)
		}
		d.applied = append(d.applied, p)
		resp.Pods = append(resp.Pods, api.AppliedPod{Namespace: p.Namespace, Name: p.Name, Error: d.answer})
	}
	return resp, nil
}

func (d *fakeDaemon) Events(ctx context.Context, since uint64, _ bool, emit func(api.Event) error) error {
	d.mu.Lock()
	d.began = append(d.began, since)
	d.mu.Unlock()
	for {
		d.mu.Lock()
		var next *api.Event
		for _, ev := range d.journal {
			if ev.Seq > since {
				next = &ev
				break
			}
		}
		news, away := d.news, d.away
		d.mu.Unlock()
		if away != nil {
			return away
		}
		if next != nil {
			if err := emit(*next); err != nil {
				return err
			}
			since = next.Seq
			continue
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-news:
		}
	}
}

func testPod(name string, change func(*corev1.Pod)) *corev1.Pod {
	class := "gpufence"
	p := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: "team-a", Name: name, UID: types.UID("uid-" + name), Annotations: map[string]string{"gpufence.dev/memory.max": "4Gi"}},
		Spec: corev1.PodSpec{NodeName: "node-1", RuntimeClassName: &class, Containers: []corev1.Container{{Name: "main",
			Resources: corev1.ResourceRequirements{Limits: corev1.ResourceList{"nvidia.com/gpu": resource.MustParse("1")}}}}},
		Status: corev1.PodStatus{Phase: corev1.PodRunning},
	}
	if change != nil {
		change(p)
	}
	return p
}

func about(pod, kind, message string) api.Event {
	return api.Event{Type: kind, Message: message, Name: "main", Container: &api.ContainerKey{Engine: quota.EngineCRI, ID: "c"},
		Pod: &api.PodRef{Namespace: "team-a", Name: pod, UID: "uid-" + pod}}
}

type setup struct {
	*testing.T
	client *fake.Clientset
	daemon *fakeDaemon
	dir    string
	opts   Options
}

func newSetup(t *testing.T, objects ...kruntime.Object) *setup {
	dir := t.TempDir()
	started := time.Now().Truncate(time.Second)
	node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "node-1", Labels: map[string]string{"other": "1"}},
		Status: corev1.NodeStatus{RuntimeHandlers: []corev1.NodeRuntimeHandler{{Name: ""}, {Name: "gpufence"}}}}
	s := &setup{T: t, client: fake.NewClientset(append(objects, node)...), daemon: newDaemon(started), dir: dir}
	log := logrus.New()
	log.SetOutput(io.Discard)
	s.opts = Options{
		Node: "node-1", Handler: "gpufence", CanaryFile: filepath.Join(dir, "canary.json"), StateDir: dir, Log: log,
		Tick: 10 * time.Millisecond, Patience: 50 * time.Millisecond, Audit: 20 * time.Millisecond, Pause: 5 * time.Millisecond, MaxPause: 20 * time.Millisecond,
	}
	s.canary(kube.Canary{Held: true, Time: time.Now(), Started: started})
	return s
}

func (s *setup) canary(c kube.Canary) {
	s.Helper()
	text, err := json.Marshal(c)
	if err != nil {
		s.Fatal(err)
	}
	if err := os.WriteFile(s.opts.CanaryFile, text, 0o600); err != nil {
		s.Fatal(err)
	}
}

// start runs an agent; what it returns ends it and waits.
func (s *setup) start() (a *Agent, stop func()) {
	s.Helper()
	a, err := New(s.client, s.daemon, s.opts)
	if err != nil {
		s.Fatal(err)
	}
	ctx, cancel := context.WithCancel(s.Context())
	done := make(chan error, 1)
	go func() { done <- a.Run(ctx) }()
	return a, func() {
		s.Helper()
		cancel()
		select {
		case err := <-done:
			if err != nil {
				s.Error(err)
			}
		case <-time.After(20 * time.Second):
			s.Fatal("the agent does not end")
		}
	}
}

func (s *setup) until(what string, f func() bool) {
	s.Helper()
	for deadline := time.Now().Add(20 * time.Second); !f(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(deadline) {
			s.Fatalf("%s: it did not happen; events %v, labels %v", what, s.events(), s.labels())
		}
	}
}

func (s *setup) events() []corev1.Event {
	list, err := s.client.CoreV1().Events("").List(context.Background(), metav1.ListOptions{})
	if err != nil {
		s.Fatal(err)
	}
	return list.Items
}

func (s *setup) reasons() string {
	var out []string
	for _, ev := range s.events() {
		out = append(out, ev.Reason)
	}
	return strings.Join(out, " ")
}

func (s *setup) labels() map[string]string {
	node, err := s.client.CoreV1().Nodes().Get(context.Background(), "node-1", metav1.GetOptions{})
	if err != nil {
		s.Fatal(err)
	}
	return node.Labels
}

func TestEventsAndCondition(t *testing.T) {
	s := newSetup(t, testPod("web", nil))
	_, stop := s.start()
	s.daemon.say(about("web", "kill", "used 5 GiB > memory.max 4 GiB"))
	s.daemon.say(about("web", "ended", "not for the owner"))
	s.until("the Event of a kill", func() bool { return s.reasons() == kube.ReasonExceeded })
	ev := s.events()[0]
	if ev.InvolvedObject.UID != "uid-web" || ev.InvolvedObject.FieldPath != "spec.containers{main}" || ev.Type != "Warning" || ev.Message != "used 5 GiB > memory.max 4 GiB" {
		t.Errorf("%+v", ev)
	}
	condition := func() string {
		p, err := s.client.CoreV1().Pods("team-a").Get(context.Background(), "web", metav1.GetOptions{})
		if err != nil {
			t.Fatal(err)
		}
		for _, c := range p.Status.Conditions {
			if c.Type == kube.ConditionExceeded {
				return string(c.Status)
			}
		}
		return ""
	}
	if got := condition(); got != "True" {
		t.Fatalf("condition %q", got)
	}
	// It starts again: the condition goes back, annotations are sent once more.
	s.daemon.set(func(d *fakeDaemon) { d.applied = nil })
	s.until("the agent sees the condition", func() bool { return condition() == "True" })
	time.Sleep(50 * time.Millisecond) // the informer's turn
	s.daemon.say(about("web", "registered", "runs with level reactive"))
	s.until("the condition goes back", func() bool { return condition() == "False" })
	s.until("annotations are sent again", func() bool {
		s.daemon.mu.Lock()
		defer s.daemon.mu.Unlock()
		return len(s.daemon.applied) > 0
	})
	stop()
}

// TestNoEventTwice: neither after a restart of the agent, nor if its cursor is lost, nor if it died
// between the Event and the cursor.
func TestNoEventTwice(t *testing.T) {
	s := newSetup(t, testPod("web", nil))
	_, stop := s.start()
	s.daemon.say(about("web", "kill", "first"))
	s.until("the first", func() bool { return len(s.events()) == 1 })
	stop()
	s.daemon.say(about("web", "resize", "while it was away"))
	_, stop = s.start()
	s.until("what happened meanwhile", func() bool { return len(s.events()) == 2 })
	stop()
	if got := s.daemon.began; len(got) < 2 || got[len(got)-1] != 1 {
		t.Errorf("it began at %v: the cursor was not kept", got)
	}
	if err := os.Remove(filepath.Join(s.dir, "cursor.json")); err != nil {
		t.Fatal(err)
	}
	_, stop = s.start()
	s.daemon.say(about("web", "shim-absent", "marker"))
	s.until("the marker", func() bool { return strings.Contains(s.reasons(), kube.ReasonShimAbsent) })
	stop()
	if got := s.events(); len(got) != 3 {
		t.Errorf("%d events: %s", len(got), s.reasons())
	}
}

// TestAnotherJournal: the state of gpufenced was lost, and it counts from 1 again.
func TestAnotherJournal(t *testing.T) {
	s := newSetup(t, testPod("web", nil))
	if err := os.WriteFile(filepath.Join(s.dir, "cursor.json"), []byte(`{"seq":1000}`), 0o600); err != nil {
		t.Fatal(err)
	}
	s.daemon.say(about("web", "kill", "new"))
	old := about("web", "kill-failed", "old")
	old.Time = time.Now().Add(-time.Hour)
	s.daemon.say(old)
	_, stop := s.start()
	s.until("its entry", func() bool { return len(s.events()) == 1 })
	stop()
	if got := s.reasons(); got != kube.ReasonExceeded {
		t.Errorf("%s: what is too old was sent", got)
	}
}

// TestServerAway: nothing is lost, nothing is said twice, and no goroutine is left.
func TestServerAway(t *testing.T) {
	s := newSetup(t, testPod("web", nil))
	var mu sync.Mutex
	failures := 0
	s.client.PrependReactor("create", "events", func(clienttesting.Action) (bool, kruntime.Object, error) {
		mu.Lock()
		defer mu.Unlock()
		if failures < 20 {
			failures++
			return true, nil, apierrors.NewServiceUnavailable("away")
		}
		return false, nil, nil
	})
	before := runtime.NumGoroutine()
	a, stop := s.start()
	s.daemon.say(about("web", "kill", "one"))
	s.daemon.say(about("web", "resize", "two"))
	s.until("both Events", func() bool { return len(s.events()) == 2 })
	s.until("gpufenced goes", func() bool {
		s.daemon.set(func(d *fakeDaemon) { d.away = errors.New("connection refused") })
		return true
	})
	s.until("the label goes", func() bool { _, ok := s.labels()[kube.LabelReady]; return !ok })
	s.daemon.set(func(d *fakeDaemon) { d.away = nil })
	s.daemon.say(about("web", "resize-failed", "three"))
	s.until("the third", func() bool { return len(s.events()) == 3 })
	rec := httptest.NewRecorder()
	a.Handler().ServeHTTP(rec, httptest.NewRequest("GET", "/metrics", nil))
	for _, want := range []string{"gpufence_build_info 1\n", "gpufence_agent_gpufenced_up 1\n", `gpufence_agent_events_total{result="sent"} 3`, "gpufence_agent_api_failures_total 20\n"} {
		if !strings.Contains(rec.Body.String(), want) {
			t.Errorf("no %q in\n%s", want, rec.Body.String())
		}
	}
	rec = httptest.NewRecorder()
	a.Handler().ServeHTTP(rec, httptest.NewRequest("GET", "/healthz", nil))
	if rec.Code != 200 {
		t.Errorf("healthz says %d", rec.Code)
	}
	stop()
	s.until("goroutines end", func() bool { return runtime.NumGoroutine() <= before+2 })
}

// TestRefusedForGood: one Event that the API server never takes does not hold up the others.
func TestRefusedForGood(t *testing.T) {
	s := newSetup(t, testPod("web", nil))
	s.client.PrependReactor("create", "events", func(action clienttesting.Action) (bool, kruntime.Object, error) {
		ev := action.(clienttesting.CreateAction).GetObject().(*corev1.Event)
		if ev.Reason == kube.ReasonResized {
			return true, nil, apierrors.NewForbidden(corev1.Resource("events"), ev.Name, errors.New("the namespace ends"))
		}
		return false, nil, nil
	})
	_, stop := s.start()
	s.daemon.say(about("web", "resize", "one"))
	s.daemon.say(about("web", "kill", "two"))
	s.until("the second", func() bool { return s.reasons() == kube.ReasonExceeded })
	stop()
}

func TestAnnotations(t *testing.T) {
	s := newSetup(t, testPod("web", nil), testPod("other", func(p *corev1.Pod) { p.Annotations = nil }))
	_, stop := s.start()
	defer stop()
	applied := func() []api.ApplyPod {
		s.daemon.mu.Lock()
		defer s.daemon.mu.Unlock()
		return s.daemon.applied
	}
	s.until("what it finds is sent", func() bool { return len(applied()) == 1 })
	if p := applied()[0]; p.UID != "uid-web" || p.Annotations["gpufence.dev/memory.max"] != "4Gi" {
		t.Errorf("%+v", p)
	}
	s.daemon.set(func(d *fakeDaemon) {
		d.answer = &api.Error{Code: "E1306", Message: "this node's policy does not let annotations change limits"}
	})
	change := func(value string) {
		p, err := s.client.CoreV1().Pods("team-a").Get(t.Context(), "web", metav1.GetOptions{})
		if err != nil {
			t.Fatal(err)
		}
		p.Annotations["gpufence.dev/memory.max"] = value
		p.Annotations["unrelated"] = value
		if _, err := s.client.CoreV1().Pods("team-a").Update(t.Context(), p, metav1.UpdateOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	change("6Gi")
	s.until("the change is sent", func() bool {
		return len(applied()) == 2 && applied()[1].Annotations["gpufence.dev/memory.max"] == "6Gi"
	})
	s.until("the refusal is an Event", func() bool { return s.reasons() == kube.ReasonResizeFailed })
	if len(applied()[1].Annotations) != 1 {
		t.Errorf("%v was sent", applied()[1].Annotations)
	}
	// While gpufenced is away the change waits.
	s.daemon.set(func(d *fakeDaemon) { d.away, d.answer = errors.New("refused"), nil })
	change("7Gi")
	time.Sleep(50 * time.Millisecond)
	s.daemon.set(func(d *fakeDaemon) { d.away = nil })
	s.until("it is sent in the end", func() bool {
		return len(applied()) == 3 && applied()[2].Annotations["gpufence.dev/memory.max"] == "7Gi"
	})
}

func TestStrangersAndUnmanaged(t *testing.T) {
	s := newSetup(t,
		testPod("typo", func(p *corev1.Pod) { p.Annotations["gpufence.dev/container.mian.memory.max"] = "1Gi" }),
		testPod("bare", func(p *corev1.Pod) { p.Annotations, p.Spec.RuntimeClassName = nil, nil }),
		testPod("plain", func(p *corev1.Pod) {
			p.Annotations, p.Spec.RuntimeClassName, p.Spec.Containers[0].Resources.Limits = nil, nil, nil
		}),
		testPod("static", func(p *corev1.Pod) { p.Annotations["kubernetes.io/config.mirror"] = "hash" }),
	)
	s.daemon.containers = []api.Container{{Pod: api.PodRef{UID: "uid-typo"}}, {Pod: api.PodRef{UID: "hash"}}}
	_, stop := s.start()
	s.until("both are said", func() bool { return len(s.events()) == 2 })
	time.Sleep(100 * time.Millisecond)
	stop()
	got := map[string]string{}
	for _, ev := range s.events() {
		got[ev.InvolvedObject.Name] = ev.Reason
	}
	if len(got) != 2 || got["typo"] != kube.ReasonUnknownContainer || got["bare"] != kube.ReasonUnmanaged {
		t.Errorf("%v", got)
	}
}

func TestNodeLabels(t *testing.T) {
	s := newSetup(t)
	if err := os.Remove(s.opts.CanaryFile); err != nil {
		t.Fatal(err)
	}
	_, stop := s.start()
	defer stop()
	ready := func() bool { return s.labels()[kube.LabelReady] == "true" }
	s.until("level and fences", func() bool {
		return s.labels()[kube.LabelLevel] == "reactive" && s.labels()[kube.LabelFence+"watch"] == "proven"
	})
	if ready() {
		t.Fatal("ready without a canary")
	}
	started := s.daemon.node.Started
	s.canary(kube.Canary{Held: true, Time: time.Now(), Started: started})
	s.until("ready after the canary", ready)
	if s.labels()["other"] != "1" {
		t.Error("a label of somebody else is gone")
	}
	s.daemon.set(func(d *fakeDaemon) {
		d.node.Ready, d.node.Reasons = false, []string{"the handler is gone from the engine"}
	})
	s.until("lost", func() bool { return !ready() })
	s.daemon.set(func(d *fakeDaemon) { d.node.Ready = true })
	s.until("found again", ready)
	s.daemon.set(func(d *fakeDaemon) { d.node.Started = started.Add(time.Second) })
	s.until("another gpufenced needs another canary", func() bool { return !ready() })
	s.canary(kube.Canary{Held: false, Why: "no", Time: time.Now(), Started: started.Add(time.Second)})
	time.Sleep(50 * time.Millisecond)
	if ready() {
		t.Error("ready though the canary was not held")
	}
}
