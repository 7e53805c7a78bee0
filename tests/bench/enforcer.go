// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/gpufence/gpufence/enforcer/api"
	"github.com/gpufence/gpufence/tests/node"
)

const (
	mib = uint64(1) << 20

	watchKills  = 30 // a row
	watchLimit  = 256 * mib
	watchSlack  = 64 * mib // the default, the greater of it and 2 %
	loadGPUs    = 8
	loadHolders = 200 // containers
	loadEach    = 5   // processes of each
	loadTime    = 10 * time.Second
	loadChanges = 100 // processes whose use changes in a second, where it does
	psHolders   = 1000
	psRuns      = 20
	resizes     = 20
)

// enforcerParts are the measurements of gpufenced: how fast it kills, what it costs, how long its
// answers take.
var enforcerParts = []struct {
	name    string
	measure func(context.Context, string) ([]measurement, error)
}{{"watch", measureWatch}, {"cost", measureCost}, {"answers", measureAnswers}}

// measureEnforcer runs one of them.
func measureEnforcer(ctx context.Context, dist string, measure func(context.Context, string) ([]measurement, error)) ([]measurement, error) {
	dist, err := filepath.Abs(dist)
	if err != nil {
		return nil, fmt.Errorf("find %s: %w", dist, err)
	}
	rows, err := measure(ctx, dist)
	if err != nil {
		return nil, fmt.Errorf("measure gpufenced: %w", err)
	}
	return rows, nil
}

// withNode runs f on a node of its own.
func withNode(ctx context.Context, opts node.Options, f func(*node.Node) error) error {
	n, err := node.New(ctx, opts)
	if err != nil {
		return err
	}
	err = f(n)
	if err != nil {
		err = fmt.Errorf("%w; gpufenced said: %s", err, n.DaemonLog())
	}
	return errors.Join(err, n.Close(context.WithoutCancel(ctx)))
}

// only is a number that has no alternative to be compared with.
func only(name, params, unit string, with ...float64) measurement {
	return measurement{Name: name, Params: params, Unit: unit, Baseline: []float64{0}, With: with}
}

// percentile is the smallest sample that p percent do not exceed.
func percentile(samples []float64, p float64) float64 {
	sorted := slices.Sorted(slices.Values(samples))
	return sorted[min(len(sorted)-1, max(0, int(math.Ceil(p/100*float64(len(sorted))))-1))]
}

// measureWatch lets programs that no shim can see grow until they are killed, beside a neighbour
// that works at its limit.
func measureWatch(ctx context.Context, dist string) ([]measurement, error) {
	var rows []measurement
	opts := node.Options{Dist: dist, Config: []string{`context = "64Mi"`},
		Sim: []string{"--model", "a100", "--memory", "80GiB", "--context-bytes", "64MiB", "--nvml-lag", "0"}}
	err := withNode(ctx, opts, func(n *node.Node) error {
		neighbour, err := n.Start(ctx, node.Spec{Name: "neighbour", Limits: []string{"memory.max=1Gi"}, Shim: true})
		if err != nil {
			return err
		}
		if _, err := neighbour.Main.Do(ctx, "context"); err != nil {
			return err
		}
		if err := neighbour.Main.Say("churn 64 14 2"); err != nil {
			return err
		}
		for _, busy := range []bool{false, true} {
			machine := "idle"
			stop := func() {}
			if busy {
				machine, stop = "busy", spin(ctx, runtime.NumCPU())
			}
			for _, rate := range []struct {
				name       string
				step, wait string // MiB, ms
			}{{"1 GiB/s", "4", "4"}, {"10 GiB/s", "40", "4"}} {
				var latency, over []float64
				for i := range watchKills {
					l, o, err := watchOnce(ctx, n, fmt.Sprintf("victim-%s-%s-%d", machine, rate.step, i), rate.step, rate.wait)
					if err != nil {
						stop()
						return err
					}
					latency, over = append(latency, l), append(over, o)
				}
				params := rate.name + ", " + machine
				rows = append(rows,
					only("watch.latency", "p50, "+params, "ms", percentile(latency, 50)),
					only("watch.latency", "p99, "+params, "ms", percentile(latency, 99)),
					only("watch.overshoot", "p50, "+params, "MiB", percentile(over, 50)),
					only("watch.overshoot", "greatest, "+params, "MiB", percentile(over, 100)))
			}
			stop()
		}
		if err := neighbour.Main.Say("stop"); err != nil {
			return err
		}
		r, err := neighbour.Main.Hear(ctx, "churn")
		if err != nil {
			return err
		}
		if r.Allocs == 0 {
			return errors.New("the neighbour did nothing")
		}
		rows = append(rows, only("watch.neighbour_failures", fmt.Sprintf("in %d allocations", r.Allocs), "failures", float64(r.Failures)))
		return nil
	})
	return rows, err
}

// watchOnce is one growth and its end: ms from crossing the limit and the slack to SIGKILL, and by
// how many MiB the limit was exceeded by then.
func watchOnce(ctx context.Context, n *node.Node, name, step, wait string) (latency, over float64, err error) {
	var mu sync.Mutex
	var replies []node.Reply
	c, err := n.Start(ctx, node.Spec{
		Name: name, Limits: []string{"memory.max=256Mi"},
		// Not in step with gpufenced's samples, which registering sets off.
		Program: []string{"/bin/sh", "-c", fmt.Sprintf(`sleep 0.%03d; exec "$@"`, rand.IntN(200)), "sh", n.Dist("clients/bypass"), step, wait, "20000"},
		Each: func(r node.Reply) {
			mu.Lock()
			defer mu.Unlock()
			replies = append(replies, r)
		},
	})
	if err != nil {
		return 0, 0, err
	}
	if err := c.Main.Await(ctx); err != nil {
		return 0, 0, err
	}
	var kill api.Event
	err = node.Until(ctx, "the kill of "+name+" is in the journal", func() (bool, error) {
		events, err := n.Events(ctx, "kill")
		for _, e := range events {
			if e.Container != nil && e.Container.ID == c.Key.ID {
				kill = e
			}
		}
		return kill.ID != "", err
	})
	if err != nil {
		return 0, 0, err
	}
	if err := c.Remove(ctx); err != nil {
		return 0, 0, err
	}
	mu.Lock()
	defer mu.Unlock()
	crossed, held := int64(0), uint64(0)
	for _, r := range replies {
		if crossed == 0 && r.HeldBytes > watchLimit+watchSlack {
			crossed = r.MonoNS
		}
		if r.MonoNS <= kill.MonotonicNS {
			held = max(held, r.HeldBytes)
		}
	}
	if crossed == 0 || held < watchLimit {
		return 0, 0, fmt.Errorf("%s was killed before it told of crossing its limit", name)
	}
	return float64(kill.MonotonicNS-crossed) / 1e6, float64(held-watchLimit) / float64(mib), nil
}

// spin keeps so many CPUs busy.
func spin(ctx context.Context, count int) (stop func()) {
	ctx, cancel := context.WithCancel(ctx)
	var group sync.WaitGroup
	for range count {
		group.Go(func() {
			// A process of its own competes as a tenant's would.
			_ = exec.CommandContext(ctx, "/bin/sh", "-c", "while :; do :; done").Run() // it is killed
		})
	}
	return func() {
		cancel()
		group.Wait()
	}
}

// fullNode runs idle on a node that has nothing to do yet, then f on it when it is full, with the
// processes that fill it.
func fullNode(ctx context.Context, dist string, idle func(*node.Node) error, f func(*node.Node, []*node.Process) error) error {
	opts := node.Options{Dist: dist, Config: []string{`context = "64Mi"`},
		Sim: []string{"--gpus", strconv.Itoa(loadGPUs), "--model", "a100", "--memory", "80GiB", "--context-bytes", "64MiB", "--call-cost", "1ms"}}
	return withNode(ctx, opts, func(n *node.Node) error {
		if err := idle(n); err != nil {
			return err
		}
		held := make([]*node.Process, loadHolders*loadEach)
		err := inTurn(loadHolders, 8, func(i int) error {
			gpu := i % loadGPUs
			c, err := n.Start(ctx, node.Spec{Name: fmt.Sprintf("holder-%d", i), Limits: []string{"memory.max=2Gi"}, GPUs: []string{strconv.Itoa(gpu)}, Shim: true})
			if err != nil {
				return err
			}
			for j := range loadEach {
				p := c.Main
				if j > 0 {
					if p, err = c.Exec(ctx, true); err != nil {
						return err
					}
				}
				if err := hold(ctx, p, gpu); err != nil {
					return err
				}
				held[j*loadHolders+i] = p // neighbours in the list are of different containers
			}
			return nil
		})
		if err != nil {
			return err
		}
		time.Sleep(3 * time.Second) // until contexts are learned
		return f(n, held)
	})
}

// measureCost is gpufenced's CPU time and memory, on an idle node and on a full one: while nobody's
// use changes, and while many processes' does. What its threads use that ask NVML is in it, and is
// shown by itself, too: the simulated library talks to another process, where a driver's goes into
// the kernel.
func measureCost(ctx context.Context, dist string) ([]measurement, error) {
	var idle, full, busy usage
	err := fullNode(ctx, dist, func(n *node.Node) (err error) {
		idle, err = cost(n.DaemonPID(), loadTime/2)
		return err
	}, func(n *node.Node, held []*node.Process) (err error) {
		if full, err = cost(n.DaemonPID(), loadTime); err != nil {
			return err
		}
		if full.nvml == 0 {
			return errors.New("gpufenced has no thread that asks NVML")
		}
		stop := change(ctx, held)
		busy, err = cost(n.DaemonPID(), loadTime)
		changed, stopErr := stop()
		if err == nil && stopErr == nil && changed < loadChanges {
			err = fmt.Errorf("the use of processes changed %d times only", changed)
		}
		return errors.Join(err, stopErr)
	})
	params := fmt.Sprintf("%d GPUs, %d containers, %d processes, 10 Hz", loadGPUs, loadHolders, loadHolders*loadEach)
	return []measurement{
		{Name: "gpufenced.cpu", Params: params, Unit: "% of a core", Baseline: []float64{idle.cpu}, With: []float64{full.cpu}},
		{Name: "gpufenced.nvml_cpu", Params: "of that, in the simulated NVML", Unit: "% of a core", Baseline: []float64{idle.nvml}, With: []float64{full.nvml}},
		{Name: "gpufenced.busy_cpu", Params: fmt.Sprintf("the same, %d processes change a second", loadChanges), Unit: "% of a core", Baseline: []float64{full.cpu}, With: []float64{busy.cpu}},
		{Name: "gpufenced.memory", Params: params, Unit: "MiB", Baseline: []float64{idle.resident}, With: []float64{full.resident}},
	}, err
}

// change lets loadChanges processes a second hold more than before, or less again, one after the
// other; stop says how many did.
func change(ctx context.Context, held []*node.Process) (stop func() (int, error)) {
	ctx, cancel := context.WithCancel(ctx)
	done := make(chan error, 1)
	changed := 0
	go func() {
		tick := time.NewTicker(time.Second / loadChanges)
		defer tick.Stop()
		for ; ; changed++ {
			select {
			case <-ctx.Done():
				done <- nil
				return
			case <-tick.C:
			}
			what := "alloc 2"
			if changed/len(held)%2 == 1 {
				what = "free 2"
			}
			// To its end even if we are stopped: the answer would be taken for the next one's.
			if _, err := held[changed%len(held)].Do(context.WithoutCancel(ctx), what); err != nil {
				done <- fmt.Errorf("change what a process holds: %w", err)
				return
			}
		}
	}()
	return func() (int, error) {
		cancel()
		err := <-done
		return changed, err
	}
}

// measureAnswers is what gpufenced's answers take on a full node, and with many more containers.
func measureAnswers(ctx context.Context, dist string) ([]measurement, error) {
	var rows []measurement
	var psIdle []float64
	err := fullNode(ctx, dist, func(n *node.Node) (err error) {
		psIdle, err = timePS(ctx, n)
		return err
	}, func(n *node.Node, _ []*node.Process) error {
		var prepare, register, grow, shrink []float64
		for i := range resizes {
			c, err := n.Start(ctx, node.Spec{Name: fmt.Sprintf("one-%d", i), Limits: []string{"memory.max=1Gi"}, Program: []string{"/bin/sleep", "1000"}})
			if err != nil {
				return err
			}
			prepare, register = append(prepare, milli(c.PrepareTook)), append(register, milli(c.RegisterTook))
			for _, to := range []struct {
				limit string
				took  *[]float64
			}{{"2Gi", &grow}, {"1Gi", &shrink}} {
				if to.limit == "1Gi" && i >= resizes/4 {
					continue // each waits for two samples after settle
				}
				began := time.Now()
				resp, err := c.Set(ctx, to.limit, api.SetRequest{Wait: true})
				if err != nil {
					return err
				}
				if len(resp.Resizes) != 1 || resp.Resizes[0].State != "done" {
					return fmt.Errorf("resize: %+v", resp)
				}
				*to.took = append(*to.took, milli(time.Since(began)))
			}
			if err := c.Remove(ctx); err != nil {
				return err
			}
		}
		at := fmt.Sprintf("beside %d containers", loadHolders)
		rows = append(rows, only("gpufenced.prepare", at, "ms", prepare...), only("gpufenced.register", at, "ms", register...),
			only("gpufenced.resize", "grow, "+at, "ms", grow...), only("gpufenced.resize", "shrink that fits, "+at, "ms", shrink...))

		err := inTurn(psHolders-loadHolders, 8, func(i int) error {
			_, err := n.Start(ctx, node.Spec{Name: fmt.Sprintf("sleeper-%d", i), Limits: []string{"memory.max=128Mi"}, GPUs: []string{strconv.Itoa(i % loadGPUs)}, Program: []string{"/bin/sleep", "1000"}})
			return err
		})
		if err != nil {
			return err
		}
		list, err := n.Client.Containers(ctx)
		if err != nil {
			return err
		}
		running := 0
		for _, c := range list {
			if c.State == "running" {
				running++
			}
		}
		if running != psHolders {
			return fmt.Errorf("%d containers run, %d were started", running, psHolders)
		}
		psFull, err := timePS(ctx, n)
		if err != nil {
			return err
		}
		rows = append(rows, measurement{Name: "gpufence.ps", Params: fmt.Sprintf("%d containers", psHolders), Unit: "ms", Baseline: psIdle, With: psFull})
		return nil
	})
	return rows, err
}

// hold makes a process a tenant: a context and some memory.
func hold(ctx context.Context, p *node.Process, gpu int) error {
	_, err := p.Do(ctx, fmt.Sprintf("context %d", gpu), "alloc 64")
	return err
}

// inTurn runs f for each of n, some at once.
func inTurn(n, atOnce int, f func(i int) error) error {
	return node.Together(atOnce, func(first int) error {
		for i := first; i < n; i += atOnce {
			if err := f(i); err != nil {
				return err
			}
		}
		return nil
	})
}

func milli(d time.Duration) float64 { return float64(d) / float64(time.Millisecond) }

// timePS is how long `gpufence ps` takes.
func timePS(ctx context.Context, n *node.Node) ([]float64, error) {
	var out []float64
	for range psRuns {
		var stderr bytes.Buffer
		cmd := exec.CommandContext(ctx, n.Dist("bin/gpufence"), "--socket", n.Socket, "ps")
		cmd.Stderr = &stderr
		began := time.Now()
		if _, err := cmd.Output(); err != nil {
			return nil, fmt.Errorf("run gpufence ps: %w: %s", err, stderr.String())
		}
		out = append(out, milli(time.Since(began)))
	}
	return out, nil
}

// usage is a process's share of a core over a time, in percent, that of its threads inside NVML, and
// its resident memory in MiB.
type usage struct{ cpu, nvml, resident float64 }

func cost(pid int, over time.Duration) (u usage, err error) {
	before, beforeNVML, err := cpuTime(pid)
	if err != nil {
		return u, err
	}
	began := time.Now()
	time.Sleep(over)
	after, afterNVML, err := cpuTime(pid)
	if err != nil {
		return u, err
	}
	share := func(d time.Duration) float64 { return 100 * float64(d) / float64(time.Since(began)) }
	u.cpu, u.nvml = share(after-before), share(afterNVML-beforeNVML)
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		return u, fmt.Errorf("read memory of gpufenced: %w", err)
	}
	for line := range strings.Lines(string(text)) {
		if rest, ok := strings.CutPrefix(line, "VmRSS:"); ok {
			kib, err := strconv.ParseFloat(strings.Fields(rest)[0], 64)
			if err != nil {
				return u, fmt.Errorf("read memory of gpufenced: %w", err)
			}
			u.resident = kib / 1024
		}
	}
	return u, nil
}

// cpuTime is what a process's threads have run, by the scheduler's clock, and those of them that
// gpufenced calls nvml.
func cpuTime(pid int) (sum, nvml time.Duration, err error) {
	tasks, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/schedstat", pid))
	if err != nil || len(tasks) == 0 {
		return 0, 0, errors.Join(fmt.Errorf("find the threads of process %d", pid), err)
	}
	for _, t := range tasks {
		text, err := os.ReadFile(t)
		if err != nil {
			continue // a thread that has ended; Go's do not
		}
		ns, err := strconv.ParseInt(strings.Fields(string(text))[0], 10, 64)
		if err != nil {
			return 0, 0, fmt.Errorf("read %s: %w", t, err)
		}
		sum += time.Duration(ns)
		if name, err := os.ReadFile(filepath.Join(filepath.Dir(t), "comm")); err == nil && string(name) == "nvml\n" {
			nvml += time.Duration(ns)
		}
	}
	return sum, nvml, nil
}
