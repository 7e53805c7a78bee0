// SPDX-License-Identifier: Apache-2.0

package enforcer

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/gpufence/gpufence/enforcer/api"
	"github.com/gpufence/gpufence/enforcer/quota"
	"github.com/gpufence/gpufence/tests/node"
)

// number is an environment variable, or the default.
func number(t *testing.T, name string, otherwise uint64) uint64 {
	t.Helper()
	text := os.Getenv(name)
	if text == "" {
		return otherwise
	}
	n, err := strconv.ParseUint(text, 10, 64)
	if err != nil {
		t.Fatalf("%s=%q is not a number", name, text)
	}
	return n
}

var errNotYet = errors.New("gpufenced has no sample yet")

// crashWorkers is how many containers there are at a time.
const crashWorkers = 20

// storm is a node under load whose gpufenced is killed again and again.
type storm struct {
	b    *bench
	seed uint64
	stop atomic.Bool

	mu      sync.Mutex
	running map[string]*node.Container // registered, well-behaved, and not about to be removed
	seen    map[string]counters        // the greatest that was ever read
	faults  []string

	started, ended, resized, refused, killed atomic.Uint64
}

// counters are what may only grow.
type counters struct {
	events api.Events
	peak   uint64
}

func (s *storm) fault(format string, args ...any) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.faults) < 20 {
		s.faults = append(s.faults, fmt.Sprintf(format, args...))
	}
	s.stop.Store(true)
}

// TestCrash: gpufenced dies at random under load, GPUFENCE_CRASHES times (25). Nothing is lost,
// nobody is killed who kept to his limit, everybody who does not is, no counter goes back, and in
// the end nothing is left. GPUFENCE_SEED repeats a run's decisions, though not its timing.
func TestCrash(t *testing.T) {
	crashes := number(t, "GPUFENCE_CRASHES", 25)
	seed := number(t, "GPUFENCE_SEED", uint64(time.Now().UnixNano()))
	t.Logf("seed %d, %d crashes: repeat with GPUFENCE_SEED=%d", seed, crashes, seed)
	rng := rand.New(rand.NewPCG(seed, 0))
	lag := lags[rng.IntN(len(lags))]
	// Who has ended is looked at until then, and goes: a start reads what is kept, and no node keeps
	// thousands.
	b := newBench(t, lag, func(o *node.Options) { o.Sim[slices.Index(o.Sim, "16GiB")] = "64GiB" }, withConfig(`settle = "500ms"`, `ended-keep = "1m"`))
	s := &storm{b: b, seed: seed, running: map[string]*node.Container{}, seen: map[string]counters{}}

	ctx := t.Context()
	var group sync.WaitGroup
	for i := range crashWorkers {
		group.Go(func() { s.work(ctx, i) })
	}
	b.until("all containers run", func() bool { return s.started.Load() >= crashWorkers || s.stop.Load() })
	var down, longest time.Duration
	n := uint64(0)
	// Also where a crash ends the test: how far it came says how rare a fault is.
	defer func() { t.Logf("seed %d: gpufenced was killed %d times of %d", seed, n, crashes) }()
	for ; n < crashes && !s.stop.Load(); n++ {
		// Now and then while it starts.
		pause := time.Duration(100+rng.IntN(500)) * time.Millisecond
		if rng.IntN(4) == 0 {
			pause = time.Duration(rng.IntN(60)) * time.Millisecond
		}
		time.Sleep(pause)
		b.check(b.Crash())
		began := time.Now()
		time.Sleep(time.Duration(rng.IntN(50)) * time.Millisecond)
		b.check(b.StartDaemon(ctx))
		down, longest = down+time.Since(began), max(longest, time.Since(began))
		s.look(ctx)
	}
	time.Sleep(time.Second)
	s.look(ctx)
	s.stop.Store(true)
	group.Wait()
	s.look(ctx)

	t.Logf("%d containers started, %d ended, %d killed for their limit, %d resizes, %d allocations refused; gpufenced was away for %v on average, %v at the longest",
		s.started.Load(), s.ended.Load(), s.killed.Load(), s.resized.Load(), s.refused.Load(), (down / time.Duration(max(1, n))).Round(time.Millisecond), longest.Round(time.Millisecond))
	for _, f := range s.faults {
		t.Errorf("seed %d: %s", seed, f)
	}
	if s.killed.Load() == 0 || s.resized.Load() == 0 || s.refused.Load() == 0 || s.ended.Load() == 0 {
		t.Error("the load lacks something: it proves nothing")
	}
	s.clean(ctx)
}

// clean says what is left when everybody is gone.
func (s *storm) clean(ctx context.Context) {
	t := s.b.t
	list, err := s.b.Client.Containers(ctx)
	s.b.check(err)
	for _, c := range list {
		if c.State != "ended" {
			t.Errorf("%s is %s", c.Key.ID, c.State)
		}
	}
	gpus, err := s.b.Client.GPUs(ctx)
	s.b.check(err)
	if gpus[0].GuaranteedBytes != 0 {
		t.Errorf("%d bytes are promised to nobody", gpus[0].GuaranteedBytes)
	}
	for _, e := range s.b.events("pages-lost", "state-damaged", "ledger-broken", "kill-failed", "stuck") {
		t.Errorf("in the journal: %s: %s", e.Type, e.Message)
	}
	frozen, err := filepath.Glob("/sys/fs/cgroup/freezer/" + filepath.Base(s.b.Dir) + "-*/freezer.state")
	s.b.check(err)
	for _, f := range frozen {
		t.Errorf("left: %s (%s)", f, strings.TrimSpace(readFile(t, f)))
	}
	// Pages and mounts are looked for when the node is closed.
}

// look reads everything from outside: who runs must be known, and numbers only grow.
func (s *storm) look(ctx context.Context) {
	s.mu.Lock()
	before := maps.Clone(s.running)
	s.mu.Unlock()
	var list []api.Container
	if err := node.Retry(ctx, func() (err error) { list, err = s.b.Client.Containers(ctx); return err }); err != nil {
		s.fault("list containers: %v", err)
		return
	}
	states := map[string]api.Container{}
	for _, c := range list {
		states[c.Key.ID] = c
		if len(c.GPUs) != 1 {
			s.fault("%s has %d GPUs", c.Key.ID, len(c.GPUs))
			continue
		}
		s.grown(c.Key.ID, counters{c.GPUs[0].Events, c.GPUs[0].Peak})
	}
	s.mu.Lock()
	after := maps.Clone(s.running)
	s.mu.Unlock()
	for id, c := range before {
		if after[id] == nil {
			continue // it was ended meanwhile
		}
		if st := states[id]; st.State != "running" || st.PID != c.Main.PID {
			s.fault("container %s is lost: it runs as %d, and gpufenced says %q, %d", id, c.Main.PID, st.State, st.PID)
		}
		for _, dir := range c.Cgroups() {
			if text, err := os.ReadFile(filepath.Join(dir, "freezer.state")); err == nil && strings.TrimSpace(string(text)) != "THAWED" {
				s.fault("%s is frozen", id)
			}
		}
	}
}

func (s *storm) grown(id string, now counters) {
	s.mu.Lock()
	last := s.seen[id]
	s.seen[id] = now
	s.mu.Unlock()
	a, b := last.events, now.events
	if b.High < a.High || b.Max < a.Max || b.Device < a.Device || b.OverMax < a.OverMax || b.OOM < a.OOM || b.OOMKill < a.OOMKill || now.peak < last.peak {
		s.fault("counters of %s went back: from %+v to %+v", id, last, now)
	}
}

// work runs one container after the other.
func (s *storm) work(ctx context.Context, worker int) {
	rng := rand.New(rand.NewPCG(s.seed, uint64(worker)+1))
	for n := 0; !s.stop.Load(); n++ {
		name := fmt.Sprintf("w%d-%d", worker, n)
		bad := n > 0 && rng.IntN(4) == 0
		spec := node.Spec{Name: name, Limits: []string{"memory.max=1Gi"}, Shim: !bad}
		if rng.IntN(3) == 0 {
			spec.Hierarchy = "freezer"
		}
		c, err := s.b.Start(ctx, spec)
		if err != nil {
			s.fault("start %s: %v", name, err)
			return
		}
		s.started.Add(1)
		if bad {
			s.exceed(ctx, c)
		} else {
			s.behave(ctx, c, rng)
		}
		if err := c.Remove(ctx); err != nil {
			s.fault("remove %s: %v", name, err)
			return
		}
		s.ended.Add(1)
	}
}

// exceed goes above the limit behind the shim, and must die for it, once.
func (s *storm) exceed(ctx context.Context, c *node.Container) {
	if _, err := c.Main.Do(ctx, "context", "alloc 1500"); err != nil && c.Main.Alive() {
		s.fault("%s: %v", c.Name, err)
		return
	}
	if err := c.Main.Await(ctx); err != nil || !c.Main.Killed() {
		s.fault("%s exceeds its limit and ended with %s (%v)", c.Name, c.Main.Status(), err)
		return
	}
	var v api.Container
	if err := node.Retry(ctx, func() (err error) { v, err = c.View(ctx); return err }); err != nil {
		s.fault("view %s: %v", c.Name, err)
		return
	}
	if e := v.GPUs[0].Events; e.OOM != 1 || e.OOMKill != 1 {
		s.fault("%s was killed once, and counts %+v", c.Name, e)
	}
	s.killed.Add(1)
}

// behave allocates and frees within the limit, is refused above it, and is resized.
func (s *storm) behave(ctx context.Context, c *node.Container, rng *rand.Rand) {
	if _, err := c.Main.Do(ctx, "context"); err != nil {
		s.fault("%s: %v", c.Name, err)
		return
	}
	s.mu.Lock()
	s.running[c.Key.ID] = c
	s.mu.Unlock()
	defer func() {
		s.mu.Lock()
		delete(s.running, c.Key.ID)
		s.mu.Unlock()
	}()
	var held int
	for range 20 + rng.IntN(60) {
		if s.stop.Load() {
			return
		}
		var line string
		refused := false
		switch n := rng.IntN(10); {
		case n == 0:
			line, refused = "alloc 1100", true // above every limit that it ever has
		case n == 1:
			limit := 600 + 100*rng.IntN(4)
			var resp api.SetResponse
			err := node.Retry(ctx, func() (err error) {
				resp, err = c.Set(ctx, fmt.Sprintf("%dMi", limit), api.SetRequest{DeadlineMillis: 20000})
				var e *api.Error
				if errors.As(err, &e) && e.Code == string(quota.CodeGPUUnknown) {
					return errNotYet // NVML was not asked since the restart
				}
				return err
			})
			if err != nil || len(resp.Resizes) != 1 || resp.Resizes[0].State == "ResizeFailed" {
				s.fault("resize %s: %+v, %v", c.Name, resp, err)
				return
			}
			s.resized.Add(1)
			continue
		case held > 0 && n < 5:
			line, held = "free 0", 0
		default:
			// With its context it stays below 600 MiB, which every limit allows.
			size := 50 + rng.IntN(100)
			if held+size > 500 {
				continue
			}
			line = fmt.Sprintf("alloc %d", size)
			held += size
		}
		r, err := c.Main.Ask(ctx, line)
		switch {
		case err != nil:
			s.fault("%s kept to its limit and ended with %s: %v", c.Name, c.Main.Status(), err)
			return
		case r.OK == refused:
			s.fault("%s: %q with %d MiB held: %+v", c.Name, line, held, r)
			return
		case refused:
			s.refused.Add(1)
		}
		time.Sleep(time.Duration(5+rng.IntN(30)) * time.Millisecond)
	}
}
