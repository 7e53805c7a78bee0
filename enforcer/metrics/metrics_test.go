// SPDX-License-Identifier: Apache-2.0

package metrics

import (
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"math"
	"net/http/httptest"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	"sigs.k8s.io/yaml"

	"github.com/gpufence/gpufence/enforcer/api"
	"github.com/gpufence/gpufence/enforcer/quota"
)

var start = time.Date(2026, 11, 30, 12, 0, 0, 0, time.UTC)

func container(ns, pod, name, id string, events api.Events) api.Container {
	return api.Container{
		Key: api.ContainerKey{Engine: "cri", Scope: "k8s.io", ID: id}, Pod: api.PodRef{Namespace: ns, Name: pod}, Name: name, State: "running", PreparedAt: start,
		GPUs: []api.ContainerGPU{{
			UUID: "GPU-1", Current: 3, Peak: 5, Limits: quota.Limits{Max: 8, High: quota.Unlimited, Min: 2}, Events: events, ThrottledNS: 1_500_000_000,
		}},
		Fences: []api.Fence{{Name: "watch", State: "proven"}, {Name: "shim", State: "seen"}},
	}
}

func gpu() api.GPUState {
	return api.GPUState{GPU: quota.GPU{UUID: "GPU-1", TotalBytes: 100, AllocatableBytes: 90}, GuaranteedBytes: 20, UnmanagedBytes: 3, UnattributedBytes: 4, Known: true}
}

// fixed are metrics over a snapshot that the test changes.
func fixed(s *Snapshot) *Metrics {
	return New(func() Snapshot { return *s }, "1.0")
}

func full() *Metrics {
	m := fixed(&Snapshot{Now: start, Containers: []api.Container{container("ns", "pod", "main", "a", api.Events{})}, GPUs: []api.GPUState{gpu()}})
	m.Refused("E1401")
	m.Killed(time.Millisecond)
	m.Denied(Denial{Namespace: "ns", Pod: "pod", Container: "main", Reason: "over-limit", Enforced: true, Bytes: 5})
	return m
}

func TestLint(t *testing.T) {
	problems, err := testutil.GatherAndLint(full().Gatherer())
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range problems {
		t.Errorf("%s: %s", p.Metric, p.Text)
	}
}

// contract are the metrics with their labels as gathered.
func contract(t *testing.T) map[string]string {
	t.Helper()
	families, err := full().Gatherer().Gather()
	if err != nil {
		t.Fatal(err)
	}
	out := map[string]string{}
	for _, f := range families {
		var labels []string
		for _, l := range f.GetMetric()[0].GetLabel() {
			labels = append(labels, l.GetName())
		}
		slices.Sort(labels)
		out[f.GetName()] = strings.ToLower(f.GetType().String()) + " " + strings.Join(labels, ",")
	}
	return out
}

func TestTheContract(t *testing.T) {
	const of = "container,gpu_uuid,namespace,pod"
	want := map[string]string{
		"gpufence_memory_current_bytes":    "gauge " + of,
		"gpufence_memory_peak_bytes":       "gauge " + of,
		"gpufence_memory_max_bytes":        "gauge " + of,
		"gpufence_memory_high_bytes":       "gauge " + of,
		"gpufence_memory_min_bytes":        "gauge " + of,
		"gpufence_memory_events_total":     "counter container,event,gpu_uuid,namespace,pod",
		"gpufence_throttled_seconds_total": "counter " + of,
		"gpufence_fence_state":             "gauge container,fence,gpu_uuid,namespace,pod,state",
		"gpufence_start_refused_total":     "counter code",
		"gpufence_gate_denials_total":      "counter container,enforced,namespace,pod,reason",
		"gpufence_gate_denied_bytes_total": "counter container,enforced,namespace,pod,reason",
		"gpufence_gpu_capacity_bytes":      "gauge gpu_uuid",
		"gpufence_gpu_allocatable_bytes":   "gauge gpu_uuid",
		"gpufence_gpu_reserved_bytes":      "gauge gpu_uuid",
		"gpufence_gpu_unattributed_bytes":  "gauge gpu_uuid",
		"gpufence_gpu_unmanaged_bytes":     "gauge gpu_uuid",
		"gpufence_kill_latency_seconds":    "histogram ",
		"gpufence_nvml_up":                 "gauge gpu_uuid",
		"gpufence_config_drift":            "gauge ",
		"gpufence_build_info":              "gauge pages,version",
	}
	if d := cmp.Diff(want, contract(t)); d != "" {
		t.Errorf("(-want +got)\n%s", d)
	}
	text, err := os.ReadFile("../../docs/metrics.md")
	if err != nil {
		t.Fatal(err)
	}
	documented := map[string]string{}
	for _, m := range regexp.MustCompile("(?m)^\\| `(gpufence_[a-z_]+)` \\| (?:`([^`]*)`)? ?\\| (\\w+) \\|").FindAllStringSubmatch(string(text), -1) {
		labels := strings.FieldsFunc(m[2], func(r rune) bool { return r == ',' || r == ' ' })
		slices.Sort(labels)
		documented[m[1]] = m[3] + " " + strings.Join(labels, ",")
	}
	if d := cmp.Diff(want, documented); d != "" {
		t.Errorf("docs/metrics.md (-want +got)\n%s", d)
	}
}

func TestValues(t *testing.T) {
	second := container("ns", "pod", "main", "b", api.Events{})
	second.PreparedAt = start.Add(time.Second)
	second.GPUs[0].Limits.Max = quota.Unlimited
	prepared := container("ns", "later", "main", "c", api.Events{Max: 9})
	prepared.State = "prepared"
	s := Snapshot{Now: start, Containers: []api.Container{container("ns", "pod", "main", "a", api.Events{High: 1, Max: 2, Device: 3, OOM: 4, OOMKill: 5, OverMax: 6}), second, prepared},
		GPUs: []api.GPUState{gpu()}, Drift: 2}
	m := fixed(&s)
	m.Refused("E1401")
	m.Refused("E1401")
	m.Refused("E9999 not ours")
	m.Killed(80 * time.Millisecond)
	m.Killed(-time.Second)
	const of = `{container="main",gpu_uuid="GPU-1",namespace="ns",pod="pod"}`
	err := testutil.GatherAndCompare(m.Gatherer(), strings.NewReader(`
# HELP gpufence_memory_current_bytes GPU memory that counts against memory.max.
# TYPE gpufence_memory_current_bytes gauge
gpufence_memory_current_bytes`+of+` 6
# HELP gpufence_memory_peak_bytes The most GPU memory that has counted so far.
# TYPE gpufence_memory_peak_bytes gauge
gpufence_memory_peak_bytes`+of+` 6
# HELP gpufence_memory_max_bytes memory.max, the lower of the container's and the pod's; +Inf where there is none.
# TYPE gpufence_memory_max_bytes gauge
gpufence_memory_max_bytes`+of+` +Inf
# HELP gpufence_throttled_seconds_total How long processes were slowed above memory.high, added up over them.
# TYPE gpufence_throttled_seconds_total counter
gpufence_throttled_seconds_total`+of+` 3
# HELP gpufence_memory_events_total Events of memory.events: high, max and device as the container's processes report them, oom and oom_kill as observed.
# TYPE gpufence_memory_events_total counter
gpufence_memory_events_total{container="main",event="device",gpu_uuid="GPU-1",namespace="ns",pod="pod"} 3
gpufence_memory_events_total{container="main",event="high",gpu_uuid="GPU-1",namespace="ns",pod="pod"} 1
gpufence_memory_events_total{container="main",event="max",gpu_uuid="GPU-1",namespace="ns",pod="pod"} 2
gpufence_memory_events_total{container="main",event="oom",gpu_uuid="GPU-1",namespace="ns",pod="pod"} 4
gpufence_memory_events_total{container="main",event="oom_kill",gpu_uuid="GPU-1",namespace="ns",pod="pod"} 5
# HELP gpufence_start_refused_total Containers that were refused, by the code of docs/errors.md.
# TYPE gpufence_start_refused_total counter
gpufence_start_refused_total{code="E1099"} 1
gpufence_start_refused_total{code="E1401"} 2
# HELP gpufence_gpu_reserved_bytes Memory of the GPU that is guaranteed to containers, the sum of memory.min.
# TYPE gpufence_gpu_reserved_bytes gauge
gpufence_gpu_reserved_bytes{gpu_uuid="GPU-1"} 20
# HELP gpufence_config_drift How many configurations are not what they should be: those of engines that lost gpufence, and config.toml where it is wrong.
# TYPE gpufence_config_drift gauge
gpufence_config_drift 2
`), "gpufence_memory_current_bytes", "gpufence_memory_peak_bytes", "gpufence_memory_max_bytes", "gpufence_throttled_seconds_total", "gpufence_memory_events_total",
		"gpufence_start_refused_total", "gpufence_gpu_reserved_bytes", "gpufence_config_drift")
	if err != nil {
		t.Error(err)
	}
	if n, err := testutil.GatherAndCount(m.Gatherer(), "gpufence_kill_latency_seconds"); err != nil || n != 1 {
		t.Errorf("histograms: %d, %v", n, err)
	}
}

// series counts what is gathered.
func series(t *testing.T, g prometheus.Gatherer) int {
	t.Helper()
	n, err := testutil.GatherAndCount(g)
	if err != nil {
		t.Fatal(err)
	}
	return n
}

// TestEndedContainersDropOut: whatever came and went, the number of series is that of what runs.
func TestEndedContainersDropOut(t *testing.T) {
	s := Snapshot{Now: start, GPUs: []api.GPUState{gpu()}}
	m := fixed(&s)
	idle := series(t, m.Gatherer())
	for i := range 500 {
		s.Containers = nil
		for j := range 3 {
			s.Containers = append(s.Containers, container("ns", fmt.Sprintf("job-%d-%d", i, j), "main", fmt.Sprint(i, j), api.Events{Max: 1}))
		}
		if got := series(t, m.Gatherer()); got > idle+3*20 {
			t.Fatalf("round %d: %d series", i, got)
		}
		for j := range s.Containers {
			ended := s.Now
			s.Containers[j].State, s.Containers[j].EndedAt = "ended", &ended
		}
		if got := series(t, m.Gatherer()); got != idle+3*6 {
			t.Fatalf("round %d: %d series just after the end, want only the counters", i, got)
		}
		s.Now = s.Now.Add(EndedKeep)
		if got := series(t, m.Gatherer()); got != idle {
			t.Fatalf("round %d: %d series long after the end, want %d", i, got, idle)
		}
	}
	if len(m.past) != 0 {
		t.Errorf("%d names are remembered", len(m.past))
	}
}

// Denials are counted for as long as their container is there, and 10 minutes more; who is in none has one set.
func TestDenials(t *testing.T) {
	s := Snapshot{Now: start}
	m := fixed(&s)
	m.Denied(Denial{Reason: "unmanaged", Enforced: true})
	idle := series(t, m.Gatherer())
	for i := range 200 {
		name := fmt.Sprint("job-", i)
		s.Containers = []api.Container{container("ns", name, "main", "a", api.Events{})}
		s.Containers[0].GPUs = nil // its other series are not counted here
		for range 3 {
			for _, reason := range []string{"over-limit", "heap-call"} {
				m.Denied(Denial{Namespace: "ns", Pod: name, Container: "main", Reason: reason, Enforced: reason == "over-limit", Bytes: 1 << 20})
			}
		}
		if got := series(t, m.Gatherer()); got != idle+4 {
			t.Fatalf("round %d: %d series, want %d", i, got, idle+4)
		}
		want := fmt.Sprintf(`
# HELP gpufence_gate_denied_bytes_total How much those requests asked for.
# TYPE gpufence_gate_denied_bytes_total counter
gpufence_gate_denied_bytes_total{container="",enforced="true",namespace="",pod="",reason="unmanaged"} 0
gpufence_gate_denied_bytes_total{container="main",enforced="false",namespace="ns",pod="%s",reason="heap-call"} 3.145728e+06
gpufence_gate_denied_bytes_total{container="main",enforced="true",namespace="ns",pod="%s",reason="over-limit"} 3.145728e+06
`, name, name)
		if err := testutil.GatherAndCompare(m.Gatherer(), strings.NewReader(want), "gpufence_gate_denied_bytes_total"); err != nil {
			t.Fatal(err)
		}
		ended := s.Now
		s.Containers[0].State, s.Containers[0].EndedAt = "ended", &ended
		if got := series(t, m.Gatherer()); got != idle+4 {
			t.Fatalf("round %d: %d series just after the end", i, got)
		}
		s.Now = s.Now.Add(EndedKeep)
		series(t, m.Gatherer()) // this scrape lets go: what was gathered beside it may still have them
		if got := series(t, m.Gatherer()); got != idle {
			t.Fatalf("round %d: %d series long after the end, want %d", i, got, idle)
		}
	}
	if len(m.denialsOf) != 1 {
		t.Errorf("%d are remembered", len(m.denialsOf))
	}
}

// A container that is killed and restarted again and again under one name must show every kill.
func TestCountersGoOnOverRestarts(t *testing.T) {
	s := Snapshot{Now: start}
	m := fixed(&s)
	kills := func() float64 {
		families, err := m.Gatherer().Gather()
		if err != nil {
			t.Fatal(err)
		}
		for _, f := range families {
			for _, x := range f.GetMetric() {
				for _, l := range x.GetLabel() {
					if l.GetValue() == "oom_kill" {
						return x.GetCounter().GetValue()
					}
				}
			}
		}
		return -1
	}
	last := 0.0
	for i := range 50 {
		c := container("ns", "pod", "main", fmt.Sprint("life-", i), api.Events{})
		s.Containers = append(s.Containers, c)
		if got := kills(); got != last {
			t.Fatalf("life %d begins at %v, want %v", i, got, last)
		}
		s.Containers[len(s.Containers)-1].GPUs[0].Events.OOMKill = 1
		last++
		if got := kills(); got != last {
			t.Fatalf("life %d: %v kills, want %v", i, got, last)
		}
		ended := s.Now
		s.Containers[len(s.Containers)-1].State, s.Containers[len(s.Containers)-1].EndedAt = "ended", &ended
		if i%3 == 2 { // the registry forgets
			s.Containers = s.Containers[len(s.Containers)-1:]
		}
		s.Now = s.Now.Add(time.Second)
	}
	if len(m.past) != 1 {
		t.Errorf("%d names", len(m.past))
	}
}

func TestHostileNames(t *testing.T) {
	long := strings.Repeat("ä", 1000)
	a := container("\xff", long, "a\nb\"}", "x", api.Events{})
	b := container("", "", "", "docker-id", api.Events{})
	b.Fences = append(b.Fences, b.Fences...) // twice the same is no fault of a scrape
	b.GPUs[0].Current = math.MaxUint64
	m := fixed(&Snapshot{Now: start, Containers: []api.Container{a, b, b}})
	w := httptest.NewRecorder()
	m.Handler().ServeHTTP(w, httptest.NewRequest("GET", "/metrics", nil))
	body, err := io.ReadAll(w.Result().Body)
	if err != nil || w.Code != 200 {
		t.Fatalf("%d %v %s", w.Code, err, body)
	}
	if !strings.Contains(string(body), `container="docker-id"`) || !strings.Contains(string(body), `namespace="?"`) {
		t.Errorf("names are lost: %s", body)
	}
	for line := range strings.Lines(string(body)) {
		if len(line) > 1200 {
			t.Errorf("a line of %d bytes", len(line))
		}
	}
}

// exprs are the expressions of alert rules and dashboards, by where they stand.
func exprs(t *testing.T) map[string]string {
	t.Helper()
	out := map[string]string{}
	text, err := os.ReadFile("../../packaging/alerts/gpufence.yaml")
	if err != nil {
		t.Fatal(err)
	}
	var rules struct {
		Groups []struct {
			Name  string `json:"name"`
			Rules []struct {
				Alert       string            `json:"alert"`
				Expr        string            `json:"expr"`
				For         string            `json:"for"`
				Labels      map[string]string `json:"labels"`
				Annotations map[string]string `json:"annotations"`
			} `json:"rules"`
		} `json:"groups"`
	}
	if err := yaml.UnmarshalStrict(text, &rules); err != nil {
		t.Fatal(err)
	}
	for _, g := range rules.Groups {
		for _, r := range g.Rules {
			if r.Alert == "" || r.Annotations["summary"] == "" || !slices.Contains([]string{"critical", "warning", "info"}, r.Labels["severity"]) {
				t.Errorf("alert %q has no name, summary or severity", r.Alert)
			}
			if _, err := time.ParseDuration(r.For); r.For != "" && err != nil {
				t.Errorf("alert %s: for %q", r.Alert, r.For)
			}
			if out["alert "+r.Alert] != "" {
				t.Errorf("alert %s is there twice", r.Alert)
			}
			out["alert "+r.Alert] = r.Expr
		}
	}
	if text, err = os.ReadFile("../../packaging/dashboards/gpufence.json"); err != nil {
		t.Fatal(err)
	}
	var board struct {
		Panels []struct {
			Title   string `json:"title"`
			Targets []struct {
				Expr string `json:"expr"`
			} `json:"targets"`
		} `json:"panels"`
		Templating struct {
			List []struct {
				Name  string `json:"name"`
				Type  string `json:"type"`
				Query string `json:"query"`
			} `json:"list"`
		} `json:"templating"`
	}
	if err := json.Unmarshal(text, &board); err != nil {
		t.Fatal(err)
	}
	for _, p := range board.Panels {
		if len(p.Targets) == 0 {
			t.Errorf("panel %q shows nothing", p.Title)
		}
		for i, target := range p.Targets {
			out[fmt.Sprintf("panel %s/%d", p.Title, i)] = target.Expr
		}
	}
	for _, v := range board.Templating.List {
		if v.Type == "query" {
			out["variable "+v.Name] = v.Query
		}
	}
	return out
}

var (
	nameOf  = regexp.MustCompile(`\b(gpufence_[a-z0-9_]+)(\{[^}]*\})?`)
	labelIn = regexp.MustCompile(`([a-z_]+)\s*(?:=~|!~|!=|=)\s*"[^"]*"`)
	byList  = regexp.MustCompile(`\b(?:by|without|on|ignoring)\s*\(([^)]*)\)`)
)

// TestAlertsAndDashboardUseTheContract: every name that they use exists, with the labels that they
// use; and every metric is used somewhere.
func TestAlertsAndDashboardUseTheContract(t *testing.T) {
	have := contract(t)
	labels := map[string]map[string]bool{}
	all := map[string]bool{"instance": true, "job": true, "le": true}
	for name, d := range have {
		kind, list, _ := strings.Cut(d, " ")
		set := map[string]bool{"instance": true, "job": true}
		for _, l := range strings.FieldsFunc(list, func(r rune) bool { return r == ',' }) {
			set[l], all[l] = true, true
		}
		labels[name] = set
		if kind == "histogram" {
			for _, suffix := range []string{"_bucket", "_sum", "_count"} {
				labels[name+suffix] = set
			}
		}
	}
	used := map[string]bool{}
	all2 := exprs(t)
	if len(all2) < 20 {
		t.Errorf("only %d expressions were found", len(all2))
	}
	for _, where := range slices.Sorted(maps.Keys(all2)) {
		expr := all2[where]
		found := nameOf.FindAllStringSubmatch(expr, -1)
		if len(found) == 0 {
			t.Errorf("%s uses none of our metrics: %s", where, expr)
		}
		for _, m := range found {
			set := labels[m[1]]
			if set == nil {
				t.Errorf("%s: there is no %s", where, m[1])
				continue
			}
			for suffix := range map[string]bool{"_bucket": true, "_sum": true, "_count": true, "": true} {
				used[strings.TrimSuffix(m[1], suffix)] = true
			}
			for _, l := range labelIn.FindAllStringSubmatch(m[2], -1) {
				if !set[l[1]] {
					t.Errorf("%s: %s has no label %s", where, m[1], l[1])
				}
			}
		}
		for _, m := range byList.FindAllStringSubmatch(expr, -1) {
			for _, l := range strings.FieldsFunc(m[1], func(r rune) bool { return r == ',' || r == ' ' }) {
				if !all[l] {
					t.Errorf("%s: nothing has a label %s", where, l)
				}
			}
		}
		balanced(t, where, expr)
	}
	for name := range have {
		if !used[name] {
			t.Errorf("neither an alert nor the dashboard uses %s", name)
		}
	}
}

func balanced(t *testing.T, where, expr string) {
	t.Helper()
	var open []rune
	quoted := false
	for _, r := range expr {
		switch {
		case r == '"':
			quoted = !quoted
		case quoted:
		case strings.ContainsRune("([{", r):
			open = append(open, r)
		case strings.ContainsRune(")]}", r):
			if len(open) == 0 || strings.IndexRune("([{", open[len(open)-1]) != strings.IndexRune(")]}", r) {
				t.Errorf("%s: brackets do not match: %s", where, expr)
				return
			}
			open = open[:len(open)-1]
		}
	}
	if len(open) > 0 || quoted {
		t.Errorf("%s: something is not closed: %s", where, expr)
	}
}
