// SPDX-License-Identifier: Apache-2.0

// Package metrics is what Prometheus reads of gpufenced. Names and labels are a contract, listed
// in docs/metrics.md; alert rules and the dashboard in packaging/ use exactly these.
//
// What it promises: the number of series follows what runs. A container's gauges go with it; its
// counters stay for at most [EndedKeep] more, so that the last scrape before its end is not the
// last word about a kill, and they do not go back when it is restarted under the same name.
//
// Nothing here takes a lock of gpufenced; the snapshot that it asks for does.
package metrics

import (
	"cmp"
	"math"
	"net/http"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"

	"github.com/gpufence/gpufence/enforcer/api"
	"github.com/gpufence/gpufence/enforcer/quota"
)

// EndedKeep is how long the counters of an ended container are still shown.
const EndedKeep = 10 * time.Minute

// Bounds of one answer.
const (
	maxInFlight   = 4
	answerTime    = 10 * time.Second
	maxLabelBytes = 253 // the longest name in Kubernetes
)

// Snapshot is what is measured at one time.
type Snapshot struct {
	Now        time.Time
	Containers []api.Container
	GPUs       []api.GPUState
	// Drift is how many configurations are not what they should be.
	Drift int
}

var (
	containerLabels = []string{"namespace", "pod", "container", "gpu_uuid"}
	gpuLabels       = []string{"gpu_uuid"}
	denialLabels    = []string{"namespace", "pod", "container", "reason", "enforced"} // of all of its GPUs: a request names none
)

func with(labels []string, more ...string) []string {
	return append(append([]string{}, labels...), more...)
}

func desc(name, help string, labels ...string) *prometheus.Desc {
	return prometheus.NewDesc("gpufence_"+name, help, labels, nil)
}

// What is computed at each scrape.
var (
	memoryCurrent = desc("memory_current_bytes", "GPU memory that counts against memory.max.", containerLabels...)
	memoryPeak    = desc("memory_peak_bytes", "The most GPU memory that has counted so far.", containerLabels...)
	memoryMax     = desc("memory_max_bytes", "memory.max, the lower of the container's and the pod's; +Inf where there is none.", containerLabels...)
	memoryHigh    = desc("memory_high_bytes", "memory.high, the lower of the container's and the pod's; +Inf where there is none.", containerLabels...)
	memoryMin     = desc("memory_min_bytes", "memory.min, what is guaranteed.", containerLabels...)
	memoryEvents  = desc("memory_events_total", "Events of memory.events: high, max and device as the container's processes report them, oom and oom_kill as observed.", with(containerLabels, "event")...)
	throttled     = desc("throttled_seconds_total", "How long processes were slowed above memory.high, added up over them.", containerLabels...)
	fenceState    = desc("fence_state", "1 for the state that a fence around the container is in.", with(containerLabels, "fence", "state")...)

	gpuCapacity     = desc("gpu_capacity_bytes", "Memory of the GPU as NVML says.", gpuLabels...)
	gpuAllocatable  = desc("gpu_allocatable_bytes", "Memory of the GPU that containers can be guaranteed.", gpuLabels...)
	gpuReserved     = desc("gpu_reserved_bytes", "Memory of the GPU that is guaranteed to containers, the sum of memory.min.", gpuLabels...)
	gpuUnattributed = desc("gpu_unattributed_bytes", "Memory in use that no process explains.", gpuLabels...)
	gpuUnmanaged    = desc("gpu_unmanaged_bytes", "Memory of processes that did not come through gpufence.", gpuLabels...)
	nvmlUp          = desc("nvml_up", "1 if NVML answers for the GPU completely and in time.", gpuLabels...)

	configDrift = desc("config_drift", "How many configurations are not what they should be: those of engines that lost gpufence, and config.toml where it is wrong.")
	buildInfo   = desc("build_info", "1, with the version of gpufenced and of its shared pages.", "version", "pages")
)

var computed = []*prometheus.Desc{
	memoryCurrent, memoryPeak, memoryMax, memoryHigh, memoryMin, memoryEvents, throttled, fenceState,
	gpuCapacity, gpuAllocatable, gpuReserved, gpuUnattributed, gpuUnmanaged, nvmlUp, configDrift, buildInfo,
}

// Metrics are the registry of one gpufenced.
type Metrics struct {
	registry *prometheus.Registry
	snapshot func() Snapshot
	pages    string
	refused  *prometheus.CounterVec
	latency  prometheus.Histogram
	denials  *prometheus.CounterVec
	denied   *prometheus.CounterVec

	mu   sync.Mutex // one scrape at a time, over what follows
	past map[string]*past
	// denialsOf are the containers that the gate's counters are of.
	denialsMu sync.Mutex
	denialsOf map[denied]bool
}

// denied is whom a denial is about.
type denied struct{ namespace, pod, container string }

// past is what the earlier lives of a container's name have counted.
type past struct {
	labels []string
	lives  map[string]counts // by life, those that the last snapshot had
	gone   counts            // of lives that are not listed any more
}

// counts are the counters of one life, in the order of eventNames, then the seconds.
type counts struct {
	events  [5]float64
	seconds float64
}

var eventNames = [5]string{"high", "max", "device", "oom", "oom_kill"}

func (c *counts) add(o counts) {
	for i := range c.events {
		c.events[i] += o.events[i]
	}
	c.seconds += o.seconds
}

// New makes the metrics of a gpufenced that tells what it sees by snapshot; pages is the version
// of the shared pages.
func New(snapshot func() Snapshot, pages string) *Metrics {
	m := &Metrics{
		registry: prometheus.NewPedanticRegistry(), snapshot: snapshot, pages: pages, past: map[string]*past{}, denialsOf: map[denied]bool{},
		denials: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "gpufence_gate_denials_total", Help: "Requests that the gate has refused and told gpufenced of, or would have refused where it only counts.",
		}, denialLabels),
		denied: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "gpufence_gate_denied_bytes_total", Help: "How much those requests asked for.",
		}, denialLabels),
		refused: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "gpufence_start_refused_total", Help: "Containers that were refused, by the code of docs/errors.md.",
		}, []string{"code"}),
		latency: prometheus.NewHistogram(prometheus.HistogramOpts{
			Name: "gpufence_kill_latency_seconds", Help: "From the first sample above memory.max and the slack to SIGKILL.",
			Buckets: []float64{.005, .01, .025, .05, .075, .1, .15, .25, .5, 1, 2.5, 5},
		}),
	}
	m.registry.MustRegister(m.refused, m.latency, m.denials, m.denied, (*collector)(m))
	return m
}

// Refused counts a refused start.
func (m *Metrics) Refused(code string) {
	for _, c := range quota.Codes() {
		if string(c.Code) == code {
			m.refused.WithLabelValues(code).Inc()
			return
		}
	}
	m.refused.WithLabelValues(string(quota.CodeInternal)).Inc() // only codes of the table are labels
}

// Denial is what the gate refused, or would have. Reason is one of a few words; the names are empty where it was no
// managed container.
type Denial struct {
	Namespace, Pod, Container string
	Reason                    string
	Enforced                  bool
	Bytes                     uint64
}

// Denied counts a denial.
func (m *Metrics) Denied(d Denial) {
	of := denied{label(d.Namespace), label(d.Pod), label(d.Container)}
	labels := []string{of.namespace, of.pod, of.container, label(d.Reason), strconv.FormatBool(d.Enforced)}
	m.denialsMu.Lock()
	defer m.denialsMu.Unlock() // not between a scrape's look for whom to forget and its forgetting
	m.denialsOf[of] = true
	m.denials.WithLabelValues(labels...).Inc()
	m.denied.WithLabelValues(labels...).Add(float64(d.Bytes))
}

// forgetDenials lets go of the counters of containers that have ended.
func (m *Metrics) forgetDenials(s Snapshot) {
	m.denialsMu.Lock()
	defer m.denialsMu.Unlock()
	if len(m.denialsOf) == 0 {
		return
	}
	live := map[denied]bool{{}: true}
	for i := range s.Containers {
		if k := &s.Containers[i]; k.EndedAt == nil || s.Now.Sub(*k.EndedAt) < EndedKeep {
			live[denied{label(k.Pod.Namespace), label(k.Pod.Name), label(cmp.Or(k.Name, k.Key.ID))}] = true
		}
	}
	for of := range m.denialsOf {
		if live[of] {
			continue
		}
		delete(m.denialsOf, of)
		for _, v := range []*prometheus.CounterVec{m.denials, m.denied} {
			v.DeletePartialMatch(prometheus.Labels{"namespace": of.namespace, "pod": of.pod, "container": of.container})
		}
	}
}

// Killed measures a kill.
func (m *Metrics) Killed(latency time.Duration) {
	if latency >= 0 {
		m.latency.Observe(latency.Seconds())
	}
}

// Handler answers scrapes.
func (m *Metrics) Handler() http.Handler {
	return promhttp.HandlerFor(m.registry, promhttp.HandlerOpts{MaxRequestsInFlight: maxInFlight, Timeout: answerTime})
}

// Gatherer is the registry, for tests.
func (m *Metrics) Gatherer() prometheus.Gatherer { return m.registry }

// collector is Metrics as [prometheus.Collector].
type collector Metrics

// Describe implements [prometheus.Collector].
func (c *collector) Describe(ch chan<- *prometheus.Desc) {
	for _, d := range computed {
		ch <- d
	}
}

// Collect implements [prometheus.Collector].
func (c *collector) Collect(ch chan<- prometheus.Metric) {
	c.mu.Lock()
	defer c.mu.Unlock()
	s := c.snapshot()
	(*Metrics)(c).forgetDenials(s)
	gauge := func(d *prometheus.Desc, v float64, labels ...string) {
		ch <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, v, labels...)
	}
	for _, r := range rows(s.Containers) {
		gauge(memoryCurrent, float64(r.current), r.labels...)
		gauge(memoryPeak, float64(r.peak), r.labels...)
		gauge(memoryMax, limit(r.limits.Max), r.labels...)
		gauge(memoryHigh, limit(r.limits.High), r.labels...)
		gauge(memoryMin, limit(r.limits.Min), r.labels...)
		seen := map[string]bool{}
		for _, f := range r.fences {
			if !seen[f.Name] {
				seen[f.Name] = true
				gauge(fenceState, 1, with(r.labels, label(f.Name), label(f.State))...)
			}
		}
	}
	c.count(s)
	for _, p := range c.past {
		sum := p.gone
		for _, l := range p.lives {
			sum.add(l)
		}
		for i, name := range eventNames {
			ch <- prometheus.MustNewConstMetric(memoryEvents, prometheus.CounterValue, sum.events[i], with(p.labels, name)...)
		}
		ch <- prometheus.MustNewConstMetric(throttled, prometheus.CounterValue, sum.seconds, p.labels...)
	}
	for _, g := range s.GPUs {
		uuid := label(g.UUID)
		gauge(gpuCapacity, float64(g.TotalBytes), uuid)
		gauge(gpuAllocatable, float64(g.AllocatableBytes), uuid)
		gauge(gpuReserved, float64(g.GuaranteedBytes), uuid)
		gauge(gpuUnattributed, float64(g.UnattributedBytes), uuid)
		gauge(gpuUnmanaged, float64(g.UnmanagedBytes), uuid)
		gauge(nvmlUp, truth(g.Known), uuid)
	}
	gauge(configDrift, float64(s.Drift))
	gauge(buildInfo, 1, label(api.BuildVersion), label(c.pages))
}

// count takes the counters of a snapshot over. A name whose containers have all ended is kept for
// EndedKeep, then it goes; if it comes back, it begins at 0, as after a restart of gpufenced.
func (c *collector) count(s Snapshot) {
	now := map[string]map[string]counts{}
	for i := range s.Containers {
		k := &s.Containers[i]
		if k.State == "prepared" || k.EndedAt != nil && s.Now.Sub(*k.EndedAt) >= EndedKeep {
			continue
		}
		for j := range k.GPUs {
			g := &k.GPUs[j]
			labels := labelsOf(k, g)
			name := strings.Join(labels, "\x00")
			p := c.past[name]
			if p == nil {
				p = &past{labels: labels}
				c.past[name] = p
			}
			if now[name] == nil {
				now[name] = map[string]counts{}
			}
			e := g.Events
			now[name][k.Key.Scope+"\x00"+k.Key.ID+"\x00"+k.PreparedAt.String()] = counts{
				events:  [5]float64{float64(e.High), float64(e.Max), float64(e.Device), float64(e.OOM), float64(e.OOMKill)},
				seconds: float64(g.ThrottledNS) / 1e9,
			}
		}
	}
	for name, p := range c.past {
		lives := now[name]
		if lives == nil {
			delete(c.past, name)
			continue
		}
		for life, n := range p.lives {
			if _, still := lives[life]; !still {
				p.gone.add(n)
			}
		}
		p.lives = lives
	}
}

// row is one container's name on one GPU.
type row struct {
	labels        []string
	current, peak uint64
	limits        quota.Limits
	fences        []api.Fence
	prepared      time.Time
}

// rows are the running containers. Of several with one name (two engines, a pod that comes while
// its predecessor goes) use adds up, and limits are those of the newest.
func rows(containers []api.Container) map[string]*row {
	out := map[string]*row{}
	for i := range containers {
		c := &containers[i]
		if c.State != "running" {
			continue
		}
		for j := range c.GPUs {
			g := &c.GPUs[j]
			labels := labelsOf(c, g)
			name := strings.Join(labels, "\x00")
			r := out[name]
			if r == nil {
				r = &row{labels: labels}
				out[name] = r
			}
			r.current += min(g.Current, math.MaxUint64-r.current)
			r.peak = max(r.peak, g.Peak, r.current)
			if r.fences == nil || c.PreparedAt.After(r.prepared) {
				r.limits, r.fences, r.prepared = g.Limits, c.Fences, c.PreparedAt
			}
		}
	}
	return out
}

func labelsOf(c *api.Container, g *api.ContainerGPU) []string {
	name := cmp.Or(c.Name, c.Key.ID)
	return []string{label(c.Pod.Namespace), label(c.Pod.Name), label(name), label(g.UUID)}
}

// label is a value that Prometheus takes, whatever a container was called.
func label(s string) string {
	s = strings.ToValidUTF8(s, "?")
	if len(s) > maxLabelBytes {
		s = strings.ToValidUTF8(s[:maxLabelBytes], "")
	}
	return s
}

func limit(b uint64) float64 {
	if b == quota.Unlimited {
		return math.Inf(1)
	}
	return float64(b)
}

func truth(b bool) float64 {
	if b {
		return 1
	}
	return 0
}
