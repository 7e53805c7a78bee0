// SPDX-License-Identifier: Apache-2.0

// Package agent stands between gpufenced and the API server on one node: it tells gpufenced about
// annotations of running pods that change, and the API server about what gpufenced saw, as Events,
// conditions and the node's labels. It decides nothing: gpufenced decides about limits, package kube
// about words.
//
// It promises: an entry of the journal gives no second Event, not over restarts of either side (the
// cursor is kept, and an Event's name is made of what it is about); while the API server or gpufenced
// is away it waits with growing pauses and holds nothing that grows; an Event that comes too late to
// be of use is not sent. The label gpufence.dev/ready goes within [Options.Patience] of a loss.
//
// Lock order: mu alone; it is held over no call to anybody.
package agent

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"sync"
	"time"

	"github.com/sirupsen/logrus"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/cache"
	"k8s.io/client-go/util/workqueue"

	"github.com/gpufence/gpufence/enforcer/api"
	"github.com/gpufence/gpufence/enforcer/kube"
)

// Daemon is what the agent asks of gpufenced; *api.Client is one.
type Daemon interface {
	Node(ctx context.Context) (api.Node, error)
	Containers(ctx context.Context) ([]api.Container, error)
	Apply(ctx context.Context, req api.ApplyRequest) (api.ApplyResponse, error)
	Events(ctx context.Context, since uint64, follow bool, emit func(api.Event) error) error
	Metrics(ctx context.Context) ([]byte, error)
}

// Options of [New]; zero values of times mean the defaults.
type Options struct {
	Node    string // the name of the node
	Handler string // of the RuntimeClass
	// CanaryFile is where the canary's result lies, StateDir where the cursor is kept.
	CanaryFile string
	StateDir   string
	// CanaryAge is how old a canary may be.
	CanaryAge time.Duration // 1 h

	Tick     time.Duration // how often the node is looked at; 5 s
	Patience time.Duration // how long gpufenced may be silent until the label goes; 15 s
	Resync   time.Duration // how often annotations are sent again; 5 min
	Audit    time.Duration // how often pods that came past gpufence are looked for; 30 s
	MaxAge   time.Duration // of an entry of the journal that is still worth an Event; 30 min
	Pause    time.Duration // the first pause after a failure; 1 s
	MaxPause time.Duration // the longest; 30 s
	Now      func() time.Time
	Log      *logrus.Logger
}

func (o *Options) defaults() {
	set := func(d *time.Duration, to time.Duration) {
		if *d <= 0 {
			*d = to
		}
	}
	set(&o.CanaryAge, time.Hour)
	set(&o.Tick, 5*time.Second)
	set(&o.Patience, 15*time.Second)
	set(&o.Resync, 5*time.Minute)
	set(&o.Audit, 30*time.Second)
	set(&o.MaxAge, 30*time.Minute)
	set(&o.Pause, time.Second)
	set(&o.MaxPause, 30*time.Second)
	if o.Now == nil {
		o.Now = time.Now
	}
	if o.Log == nil {
		o.Log = logrus.New()
	}
}

// Agent is one; run it once.
type Agent struct {
	opts   Options
	client kubernetes.Interface
	daemon Daemon
	store  cache.Store
	pods   cache.Controller
	queue  workqueue.TypedRateLimitingInterface[string]

	mu      sync.Mutex
	limiter *kube.Limiter
	known   map[string]*podState // by namespace/name
	cursor  cursor
	beat    time.Time // of the node's loop
	dropped uint64    // Events that were not sent
	sent    uint64
	failed  uint64 // attempts to write to the API server that failed
	wake    chan struct{}
}

// New makes an agent. The client needs what the chart's ClusterRole gives.
func New(client kubernetes.Interface, daemon Daemon, opts Options) (*Agent, error) {
	opts.defaults()
	if opts.Node == "" {
		return nil, errors.New("make an agent: the name of the node is not known: set NODE_NAME from spec.nodeName")
	}
	a := &Agent{
		opts: opts, client: client, daemon: daemon, limiter: kube.NewLimiter(), known: map[string]*podState{}, beat: opts.Now(), wake: make(chan struct{}, 1),
		queue: workqueue.NewTypedRateLimitingQueue(workqueue.NewTypedItemExponentialFailureRateLimiter[string](opts.Pause, opts.MaxPause)),
	}
	var err error
	if a.cursor, err = openCursor(opts.StateDir); err != nil {
		return nil, err
	}
	a.watch()
	return a, nil
}

// Run works until the context ends, and leaves no goroutine behind.
func (a *Agent) Run(ctx context.Context) error {
	var all sync.WaitGroup
	all.Go(func() { a.pods.RunWithContext(ctx) })
	if !cache.WaitForCacheSync(ctx.Done(), a.pods.HasSynced) {
		a.queue.ShutDown()
		all.Wait()
		return ctx.Err()
	}
	all.Go(func() { a.work(ctx) })
	all.Go(func() { a.follow(ctx) })
	all.Go(func() { a.keepNode(ctx) })
	all.Go(func() { a.audit(ctx) })
	<-ctx.Done()
	a.queue.ShutDown()
	all.Wait()
	if err := a.saveCursor(); err != nil {
		return err
	}
	return nil
}

// Handler serves /metrics, gpufenced's and our own, and /healthz.
func (a *Agent) Handler() http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /healthz", func(w http.ResponseWriter, _ *http.Request) {
		a.mu.Lock()
		late := a.opts.Now().Sub(a.beat)
		a.mu.Unlock()
		if late > 2*time.Minute {
			http.Error(w, fmt.Sprintf("the node was looked at %s ago", late.Round(time.Second)), http.StatusServiceUnavailable)
			return
		}
		fmt.Fprintln(w, "ok")
	})
	mux.HandleFunc("GET /metrics", func(w http.ResponseWriter, req *http.Request) {
		ctx, cancel := context.WithTimeout(req.Context(), 5*time.Second)
		defer cancel()
		text, err := a.daemon.Metrics(ctx)
		up := 1
		if err != nil {
			up = 0 // said by the number; absent(gpufence_build_info) is the alert
			text = nil
		}
		w.Header().Set("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
		fmt.Fprintf(w, "%s", text)
		a.mu.Lock()
		defer a.mu.Unlock()
		fmt.Fprintf(w, "# HELP gpufence_agent_gpufenced_up Whether gpufenced answered this scrape.\n# TYPE gpufence_agent_gpufenced_up gauge\ngpufence_agent_gpufenced_up %d\n", up)
		fmt.Fprintf(w, "# HELP gpufence_agent_events_total Events of pods, by what became of them.\n# TYPE gpufence_agent_events_total counter\n"+
			"gpufence_agent_events_total{result=\"sent\"} %d\ngpufence_agent_events_total{result=\"dropped\"} %d\n", a.sent, a.dropped)
		fmt.Fprintf(w, "# HELP gpufence_agent_api_failures_total Writes to the API server that failed.\n# TYPE gpufence_agent_api_failures_total counter\n"+
			"gpufence_agent_api_failures_total %d\n", a.failed)
	})
	return mux
}

// Serve answers on the address until the context ends.
func (a *Agent) Serve(ctx context.Context, address string) error {
	l, err := new(net.ListenConfig).Listen(ctx, "tcp", address)
	if err != nil {
		return fmt.Errorf("listen for scrapes: %w", err)
	}
	server := &http.Server{Handler: a.Handler(), ReadHeaderTimeout: 5 * time.Second, WriteTimeout: 30 * time.Second, IdleTimeout: time.Minute, MaxHeaderBytes: 16 << 10}
	stop := context.AfterFunc(ctx, func() { _ = server.Close() }) // nobody waits for a scrape at the end
	defer stop()
	if err := server.Serve(l); !errors.Is(err, http.ErrServerClosed) {
		return fmt.Errorf("serve scrapes: %w", err)
	}
	return nil
}

// pause waits, or says that the context ended.
func pause(ctx context.Context, d time.Duration) bool {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-ctx.Done():
		return false
	case <-t.C:
		return true
	}
}
