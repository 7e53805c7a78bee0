// SPDX-License-Identifier: Apache-2.0

package hardware

import (
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"time"

	"github.com/gpufence/gpufence/enforcer/api"
	"github.com/gpufence/gpufence/enforcer/monotonic"
	"github.com/gpufence/gpufence/tests/node"
)

const (
	stepMiB     = 16
	outOfMemory = "CUDA_ERROR_OUT_OF_MEMORY"
	rowTime     = time.Minute
)

// scene is one row of the suite.
type scene struct {
	name string
	play func(*place, context.Context, map[string]any) (string, error)
}

var scenes = []scene{
	{"a program with the shim is refused at its limit, and goes on", (*place).refused},
	{"what it is shown is its limit", (*place).shown},
	{"a raised limit is felt", (*place).raised},
	{"without gpufenced the limit holds, and with the next one", (*place).crashed},
	{"what a killed program held can be had again", (*place).killed},
	{"who passes the shim by is killed, the neighbour does not notice", (*place).watched},
}

// testLimits plays each scene on a node of its own.
func (s *session) testLimits(ctx context.Context) {
	for _, sc := range scenes {
		s.row(ctx, "limits", sc.name, true, 2*rowTime, func(ctx context.Context, numbers map[string]any) (string, error) {
			p, err := s.open(ctx)
			if err != nil {
				return "", err
			}
			detail, err := sc.play(p, ctx, numbers)
			if err != nil {
				if log := p.n.DaemonLog(); log != "" {
					err = fmt.Errorf("%w; gpufenced said: %s", err, tail(log, 600))
				}
			}
			return detail, errors.Join(err, p.close(ctx))
		})
	}
}

// filled is a shimmed client that was refused.
func (p *place) filled(ctx context.Context, name string) (*node.Container, node.Reply, error) {
	c, err := p.container(ctx, node.Spec{Name: name, Shim: true})
	if err != nil {
		return nil, node.Reply{}, err
	}
	if _, err := c.Main.Do(ctx, "context"); err != nil {
		return c, node.Reply{}, err
	}
	r, err := p.fill(ctx, c.Main)
	return c, r, err
}

// fill lets a client take what it gets, which must end with a refusal.
func (p *place) fill(ctx context.Context, client *node.Process) (node.Reply, error) {
	// Four times the limit bounds what a limit that does not hold takes from others.
	r, err := client.Do(ctx, fmt.Sprintf("fill %d %d", stepMiB, 4*p.s.driver.limit/mib))
	if err != nil {
		return r, err
	}
	if r.ResultName != outOfMemory {
		return r, fmt.Errorf("was not refused: %s after %d MiB of a limit of %d", r.ResultName, r.GrantedBytes/mib, p.s.driver.limit/mib)
	}
	return r, nil
}

// within says that a container holds no more than its limit, and all but a step of it.
func (p *place) within(ctx context.Context, c *node.Container, limit uint64, numbers map[string]any) error {
	held, err := p.held(ctx, c, 0)
	if err != nil {
		return err
	}
	numbers["held_bytes"], numbers["limit_bytes"] = held, limit
	if err := p.above(held, limit, numbers); err != nil {
		return err
	}
	if held+stepMiB*mib+p.s.driver.context/4 < limit {
		return fmt.Errorf("was refused with %d bytes left of %d", limit-held, limit)
	}
	return nil
}

func (p *place) refused(ctx context.Context, numbers map[string]any) (string, error) {
	c, first, err := p.filled(ctx, "refused")
	if err != nil {
		return "", err
	}
	if err := p.within(ctx, c, p.s.driver.limit, numbers); err != nil {
		return "", err
	}
	if _, err := c.Main.Do(ctx, "free 0"); err != nil {
		return "", err
	}
	second, err := p.fill(ctx, c.Main)
	if err != nil {
		return "", fmt.Errorf("the second time: %w", err)
	}
	numbers["first_bytes"], numbers["second_bytes"] = first.GrantedBytes, second.GrantedBytes
	if !p.same(first.GrantedBytes, second.GrantedBytes) {
		return "", fmt.Errorf("got %d bytes, after freeing them all %d", first.GrantedBytes, second.GrantedBytes)
	}
	return "refused at the same place twice", nil
}

func (p *place) shown(ctx context.Context, numbers map[string]any) (string, error) {
	c, _, err := p.filled(ctx, "shown")
	if err != nil {
		return "", err
	}
	limit := p.s.driver.limit
	for _, ask := range []string{"meminfo", "total", "nvml"} {
		r, err := c.Main.Do(ctx, ask)
		if err != nil {
			return "", err
		}
		numbers[ask+"_bytes"] = r.TotalBytes
		if r.TotalBytes != limit {
			return "", fmt.Errorf("%s shows %d bytes, want the limit of %d", ask, r.TotalBytes, limit)
		}
	}
	held, err := p.held(ctx, c, 0)
	if err != nil {
		return "", err
	}
	var charged uint64
	// gpufenced reads the ledger at its next look.
	ok, err := until(ctx, func() (bool, error) {
		v, err := c.View(ctx)
		if err == nil {
			charged = v.GPUs[0].Current
		}
		return charged >= held, err
	})
	if err != nil {
		return "", err
	}
	numbers["charged_bytes"], numbers["held_bytes"] = charged, held
	if !ok {
		return "", fmt.Errorf("charged %d bytes and holds %d", charged, held)
	}
	return "by cuMemGetInfo, cuDeviceTotalMem and NVML", nil
}

func (p *place) raised(ctx context.Context, numbers map[string]any) (string, error) {
	c, _, err := p.filled(ctx, "raised")
	if err != nil {
		return "", err
	}
	more := p.s.driver.limit + 256*mib
	if _, err := c.Set(ctx, fmt.Sprintf("%dMi", more/mib), api.SetRequest{}); err != nil {
		return "", fmt.Errorf("raise the limit: %w", err)
	}
	var r node.Reply
	// The pages reach the program at its next look.
	ok, err := until(ctx, func() (bool, error) {
		var err error
		r, err = p.fill(ctx, c.Main)
		return r.GrantedBytes > 0, err
	})
	if err != nil {
		return "", err
	}
	if !ok {
		return "", errors.New("nothing more was granted")
	}
	numbers["more_bytes"] = r.GrantedBytes
	return "", p.within(ctx, c, more, numbers)
}

func (p *place) crashed(ctx context.Context, numbers map[string]any) (string, error) {
	c, first, err := p.filled(ctx, "crashed")
	if err != nil {
		return "", err
	}
	if err := p.n.Crash(); err != nil {
		return "", err
	}
	if _, err := c.Main.Do(ctx, "free 0"); err != nil {
		return "", err
	}
	alone, err := p.fill(ctx, c.Main)
	if err != nil {
		return "", fmt.Errorf("without gpufenced: %w", err)
	}
	if err := p.n.StartDaemon(ctx); err != nil {
		return "", err
	}
	again, err := until(ctx, func() (bool, error) {
		v, err := c.View(ctx)
		return err == nil && len(v.GPUs) == 1 && v.GPUs[0].Current >= alone.GrantedBytes, nil
	})
	if err != nil {
		return "", err
	}
	if !again {
		return "", errors.New("the next gpufenced does not know what the container holds")
	}
	numbers["before_bytes"], numbers["without_bytes"] = first.GrantedBytes, alone.GrantedBytes
	if !p.same(first.GrantedBytes, alone.GrantedBytes) {
		return "", fmt.Errorf("got %d bytes with gpufenced, %d without", first.GrantedBytes, alone.GrantedBytes)
	}
	return "", p.within(ctx, c, p.s.driver.limit, numbers)
}

func (p *place) killed(ctx context.Context, numbers map[string]any) (string, error) {
	c, first, err := p.filled(ctx, "killed")
	if err != nil {
		return "", err
	}
	began := time.Now()
	if err := errors.Join(c.Main.Kill(), c.Main.Await(ctx)); err != nil {
		return "", err
	}
	// A program of the same container: it has the room only when NVML has let go of the first one's.
	next, err := c.Exec(ctx, true)
	if err != nil {
		return "", err
	}
	made, err := until(ctx, func() (bool, error) {
		r, err := next.Ask(ctx, "context")
		return r.OK, err
	})
	if err != nil {
		return "", err
	}
	if !made {
		return "", errors.New("no context could be made after the first program was killed")
	}
	var got uint64
	ok, err := until(ctx, func() (bool, error) {
		r, err := p.fill(ctx, next)
		got += r.GrantedBytes
		return got+p.late(p.s.driver.limit) >= first.GrantedBytes, err
	})
	if err != nil {
		return "", err
	}
	numbers["first_bytes"], numbers["next_bytes"], numbers["ms"] = first.GrantedBytes, got, time.Since(began).Milliseconds()
	if !ok {
		return "", fmt.Errorf("the killed program had %d bytes, the next one got %d", first.GrantedBytes, got)
	}
	return "", nil
}

// watched lets programs grow that no shim holds, beside one that works within its limit.
func (p *place) watched(ctx context.Context, numbers map[string]any) (string, error) {
	neighbour, err := p.container(ctx, node.Spec{Name: "neighbour", Shim: true})
	if err != nil {
		return "", err
	}
	if _, err := neighbour.Main.Do(ctx, "context"); err != nil {
		return "", err
	}
	if _, err := p.held(ctx, neighbour, 0); err != nil {
		return "", err // without sizes of processes nobody can be killed for them
	}
	if err := neighbour.Main.Say("churn 16 8 2"); err != nil {
		return "", err
	}
	kills := 10
	if p.s.opts.Quick {
		kills = 2
	}
	var late, over []float64
	refused := 0
	for i := range kills {
		l, o, err := p.watchOnce(ctx, fmt.Sprintf("grows-%d", i))
		switch {
		case errors.Is(err, errRefused):
			refused++
		case err != nil:
			return "", err
		default:
			late, over = append(late, l), append(over, o)
		}
	}
	if err := neighbour.Main.Say("stop"); err != nil {
		return "", err
	}
	r, err := neighbour.Main.Hear(ctx, "churn")
	if err != nil {
		return "", err
	}
	numbers["kills"], numbers["refused_by_the_driver"] = len(late), refused
	if n := len(late); n > 0 {
		slices.Sort(late)
		slices.Sort(over)
		round := func(f float64) float64 { return math.Round(f*10) / 10 }
		numbers["latency_ms_median"], numbers["latency_ms_worst"] = round(late[n/2]), round(late[n-1])
		numbers["overshoot_MiB_median"], numbers["overshoot_MiB_worst"] = round(over[n/2]), round(over[n-1])
	}
	numbers["neighbour_allocs"], numbers["neighbour_failures"] = r.Allocs, r.Failures
	if r.Allocs == 0 || r.Failures > 0 {
		return "", fmt.Errorf("the neighbour had %d failures in %d allocations", r.Failures, r.Allocs)
	}
	detail := "16 MiB every 16 ms, from crossing limit and slack to SIGKILL"
	if refused > 0 {
		detail = "the driver refuses what is above a container's limit by itself; " + detail
	}
	return detail + ": " + numbersText(numbers), nil
}

// errRefused: the driver has limits of its own (R615) and said no at ours.
var errRefused = errors.New("refused by the driver")

// watchOnce gives ms from crossing the limit and its slack to SIGKILL, and by how many MiB it was exceeded.
func (p *place) watchOnce(ctx context.Context, name string) (late, over float64, err error) {
	c, err := p.container(ctx, node.Spec{Name: name})
	if err != nil {
		return 0, 0, err
	}
	if _, err := c.Main.Do(ctx, "context"); err != nil {
		return 0, 0, err
	}
	limit := p.s.driver.limit
	line := limit + max(64*mib, limit/50) // the default slack
	var crossed int64
	held := p.s.driver.context
	for c.Main.Alive() && held < 4*limit {
		asked := monotonic.Now()
		r, err := c.Main.Ask(ctx, fmt.Sprintf("alloc %d", stepMiB))
		if err != nil {
			// It was killed; on a busy machine maybe for what it had just got and not yet told.
			if crossed == 0 && held+stepMiB*mib > line {
				held, crossed = held+stepMiB*mib, int64(asked)
			}
			break
		}
		if !r.OK && r.ResultName == outOfMemory && held <= line && held+stepMiB*mib+p.s.driver.context/4 >= limit {
			return 0, 0, errors.Join(errRefused, c.Remove(ctx))
		}
		if !r.OK {
			return 0, 0, fmt.Errorf("%s was refused with %s at %d MiB, and its limit is %d", name, r.ResultName, held/mib, limit/mib)
		}
		held = p.s.driver.context + r.HeldBytes
		if crossed == 0 && held > line {
			crossed = r.MonoNS
		}
		time.Sleep(stepMiB * time.Millisecond)
	}
	if err := c.Main.Await(ctx); err != nil {
		return 0, 0, fmt.Errorf("%s holds %d MiB with a limit of %d and lives: %w", name, held/mib, limit/mib, err)
	}
	var kill api.Event
	err = node.Until(ctx, "the kill of "+name+" is in the journal", func() (bool, error) {
		events, err := p.n.Events(ctx, "kill")
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
	if crossed == 0 {
		return 0, 0, fmt.Errorf("%s was killed at %d MiB, below its limit of %d and the slack", name, held/mib, limit/mib)
	}
	return float64(kill.MonotonicNS-crossed) / 1e6, float64(held-min(held, limit)) / float64(mib), c.Remove(ctx)
}
