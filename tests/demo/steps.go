// SPDX-License-Identifier: Apache-2.0

package demo

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"slices"
	"strings"
	"time"

	"github.com/gpufence/gpufence/enforcer/api"
	"github.com/gpufence/gpufence/enforcer/quota"
)

const (
	mib = uint64(1) << 20
	gib = uint64(1) << 30

	stepBytes = 64 * mib  // what polite and bypass allocate at a time
	shortMost = 128 * mib // how far below its limit polite may be refused

	politeMax, politeGrown, politeShrunk = 4 * gib, 6 * gib, 1 * gib
	bypassMax                            = 2 * gib
	neighbourMax                         = 6 * gib

	outOfMemory = "CUDA_ERROR_OUT_OF_MEMORY"
)

func humanBytes(b uint64) string { return quota.HumanBytes(b) }

// numbers are shown in the order of their names.
func numbers(n map[string]uint64) string {
	names := make([]string, 0, len(n))
	for name := range n {
		names = append(names, name)
	}
	slices.Sort(names)
	var out []string
	for _, name := range names {
		switch base, bytes := strings.CutSuffix(name, "_bytes"); {
		case bytes:
			out = append(out, base+" "+humanBytes(n[name]))
		default:
			base, ns := strings.CutSuffix(name, "_ns")
			if ns {
				out = append(out, fmt.Sprintf("%s %s", base, time.Duration(n[name]).Round(100*time.Microsecond)))
				continue
			}
			out = append(out, fmt.Sprintf("%s %d", name, n[name]))
		}
	}
	return strings.Join(out, ", ")
}

// slack is what watch tolerates above a limit before it kills.
func slack(limit uint64) uint64 { return max(64*mib, limit/50) }

// errf is a claim that did not hold.
func errf(format string, args ...any) error { return fmt.Errorf(format, args...) }

func limitKey(b uint64) map[string]string {
	return map[string]string{"gpufence.dev/memory.max": quota.FormatBytes(b)}
}

// play runs the steps in the order of the story. A step that cannot be tried since an earlier
// one failed is one that did not hold.
func (r *runner) play(ctx context.Context) error {
	n := r.node
	if err := n.start(ctx); err != nil {
		return err
	}
	r.tell("gpufence demo on %s", n.describe())
	r.tell("containers run under runc through gpufence-runtime.cri and its hooks, one pod each")
	for _, part := range []func(context.Context){r.startNeighbour, r.playPolite, r.playBypass, r.playResize, r.playCrash, r.playStarts, r.endNeighbour} {
		if err := ctx.Err(); err != nil {
			return err
		}
		part(ctx)
	}
	return ctx.Err()
}

// startPod starts a pod with one container that drives the GPU.
func (r *runner) startPod(ctx context.Context, name string, limit uint64, args ...string) (*container, error) {
	p, err := r.node.newPod(ctx, name, limitKey(limit))
	if err != nil {
		return nil, err
	}
	return r.node.newContainer(ctx, p, workload{name: name, args: args, gpu: r.node.gpuUUID})
}

func need(c *container, name string) error {
	switch {
	case c == nil:
		return errf("%s did not start", name)
	case !c.alive():
		return errf("%s has ended with exit code %d: %s", name, c.exitCode(), c.output())
	}
	return nil
}

// ---- c: the neighbour, from start to end -------------------------------------------------

func (r *runner) startNeighbour(ctx context.Context) {
	r.tell("\nc. neighbour, memory.max=6Gi, allocates and frees all the time")
	r.step("c: neighbour starts", func() (string, map[string]uint64, error) {
		c, err := r.startPod(ctx, "neighbour", neighbourMax, "/client")
		if err != nil {
			return "", nil, err
		}
		if reply, err := c.ask(ctx, "context"); err != nil || !reply.OK {
			return "", nil, errors.Join(err, errf("neighbour has no context: %s %s %s", reply.Call, reply.ResultName, reply.Why))
		}
		if err := c.say("churn 256 20 2"); err != nil {
			return "", nil, err
		}
		r.neighbour = c
		return "blocks of 256 MiB, up to 5 GiB", nil, nil
	})
}

// churning is how the neighbour does.
func (r *runner) churning(ctx context.Context) (reply, error) {
	if err := need(r.neighbour, "neighbour"); err != nil {
		return reply{}, err
	}
	return r.neighbour.ask(ctx, "status")
}

func (r *runner) endNeighbour(ctx context.Context) {
	r.tell("\nc. neighbour at the end")
	r.step("c: neighbour never failed an allocation", func() (string, map[string]uint64, error) {
		if err := need(r.neighbour, "neighbour"); err != nil {
			return "", nil, err
		}
		if err := r.neighbour.say("stop"); err != nil {
			return "", nil, err
		}
		k, err := r.neighbour.hear(ctx, "churn")
		if err != nil {
			return "", nil, err
		}
		got := map[string]uint64{"allocations": k.Allocs, "frees": k.Frees, "failures": k.Failures}
		if k.Failures != 0 || k.Allocs == 0 {
			return "", got, errf("%d of %d calls failed, the first with %s", k.Failures, k.Allocs+k.Frees, k.ResultName)
		}
		return fmt.Sprintf("0 failures in %d allocations", k.Allocs), got, nil
	})
}

// ---- a: polite -------------------------------------------------------------------------------

func (r *runner) playPolite(ctx context.Context) {
	r.tell("\na. polite, memory.max=4Gi, allocates in 64 MiB steps until it is refused")
	r.step("a: polite is refused at its limit with "+outOfMemory, func() (string, map[string]uint64, error) {
		c, err := r.startPod(ctx, "polite", politeMax, "/client")
		if err != nil {
			return "", nil, err
		}
		context, err := c.ask(ctx, "context")
		if err != nil || !context.OK {
			return "", nil, errors.Join(err, errf("polite has no context: %s %s %s", context.Call, context.ResultName, context.Why))
		}
		r.polite = c
		fill, err := c.ask(ctx, fmt.Sprintf("fill %d", stepBytes/mib))
		if err != nil {
			return "", nil, err
		}
		got := map[string]uint64{"granted_bytes": fill.GrantedBytes}
		if fill.ResultName != outOfMemory {
			return "", got, errf("refused with %s", fill.ResultName)
		}
		return fmt.Sprintf("found through %s; %s granted beside its context", context.Entry, humanBytes(fill.GrantedBytes)), got, nil
	})
	if r.node.real == nil {
		r.step("a: level reactive: watch holds polite, and its shim refuses first", func() (string, map[string]uint64, error) {
			if err := need(r.polite, "polite"); err != nil {
				return "", nil, err
			}
			return r.held(ctx, r.polite.id, quota.LevelReactive, "watch")
		})
	}
	r.step("a: NVML on the host shows polite less than 128 MiB below 4 GiB, and not above", func() (string, map[string]uint64, error) {
		return r.nearLimit(ctx, politeMax)
	})
	r.step("a: inside, cuMemGetInfo and NVML show a total of 4 GiB", func() (string, map[string]uint64, error) {
		return r.insideView(ctx, politeMax)
	})
	r.step("a: after freeing 3 GiB polite can at once allocate 3 GiB again", func() (string, map[string]uint64, error) {
		if err := need(r.polite, "polite"); err != nil {
			return "", nil, err
		}
		free, err := r.polite.ask(ctx, fmt.Sprintf("free %d", 3*gib/mib))
		if err != nil || !free.OK {
			return "", nil, errors.Join(err, errf("free failed: %s %s", free.Call, free.ResultName))
		}
		fill, err := r.polite.ask(ctx, fmt.Sprintf("fill %d %d", stepBytes/mib, (free.HeldBytes+free.FreedBytes)/mib))
		if err != nil {
			return "", nil, err
		}
		got := map[string]uint64{"freed_bytes": free.FreedBytes, "granted_bytes": fill.GrantedBytes}
		if free.FreedBytes != 3*gib || fill.GrantedBytes != 3*gib {
			return "", got, errf("%s freed, %s granted, then %s", humanBytes(free.FreedBytes), humanBytes(fill.GrantedBytes), fill.ResultName)
		}
		return "3 GiB freed, 3 GiB granted", got, nil
	})
}

// nearLimit compares what the GPU's own side shows for polite now with its limit.
func (r *runner) nearLimit(ctx context.Context, limit uint64) (string, map[string]uint64, error) {
	if err := need(r.polite, "polite"); err != nil {
		return "", nil, err
	}
	used, err := r.node.host.used(ctx, r.polite.pid)
	if err != nil {
		return "", nil, err
	}
	points, err := r.node.host.history(ctx, r.polite.pid)
	if err != nil {
		return "", nil, err
	}
	most := peak(points, 0)
	got := map[string]uint64{"used_bytes": used, "peak_bytes": most}
	if used <= limit {
		got["below_limit_bytes"] = limit - used
	}
	switch {
	case most > limit:
		return "", got, errf("%s were in use, %s above the limit", humanBytes(most), humanBytes(most-limit))
	case limit-used >= shortMost:
		return "", got, errf("only %s are in use, %s below the limit", humanBytes(used), humanBytes(limit-used))
	}
	return fmt.Sprintf("%s below the limit, never above it", humanBytes(limit-used)), got, nil
}

func (r *runner) insideView(ctx context.Context, limit uint64) (string, map[string]uint64, error) {
	if err := need(r.polite, "polite"); err != nil {
		return "", nil, err
	}
	cuda, err := r.polite.ask(ctx, "meminfo")
	if err != nil || !cuda.OK {
		return "", nil, errors.Join(err, errf("cuMemGetInfo failed: %s", cuda.ResultName))
	}
	total, err := r.polite.ask(ctx, "total")
	if err != nil || !total.OK {
		return "", nil, errors.Join(err, errf("cuDeviceTotalMem failed: %s", total.ResultName))
	}
	nvml, err := r.polite.ask(ctx, "nvml")
	if err != nil || !nvml.OK {
		return "", nil, errors.Join(err, errf("NVML failed: %s %s", nvml.Call, nvml.Why))
	}
	got := map[string]uint64{"cuda_total_bytes": cuda.TotalBytes, "cuda_free_bytes": cuda.FreeBytes, "device_total_bytes": total.TotalBytes,
		"nvml_total_bytes": nvml.TotalBytes, "nvml_v2_total_bytes": nvml.V2TotalBytes}
	for name, b := range got {
		if name != "cuda_free_bytes" && b != limit {
			return "", got, errf("%s is %s, want %s", name, humanBytes(b), humanBytes(limit))
		}
	}
	if cuda.FreeBytes >= shortMost {
		return "", got, errf("cuMemGetInfo shows %s free at the limit", humanBytes(cuda.FreeBytes))
	}
	return humanBytes(limit) + " in all of them", got, nil
}

// ---- b: bypass -------------------------------------------------------------------------------

func (r *runner) playBypass(ctx context.Context) {
	args := []string{"/bypass", "64", "20"}
	why := "static"
	r.tell("\nb. bypass, memory.max=2Gi, speaks to the device itself: no shim can see it")
	if r.node.real != nil {
		args = []string{noShimLoader, "/client", "context", "fill 64 0 20", "hold"}
		why = ""
	}
	r.step("b: bypass crosses limit and slack and is killed, exit 137", func() (string, map[string]uint64, error) {
		c, err := r.startPod(ctx, "bypass", bypassMax, args...)
		if err != nil {
			return "", nil, err
		}
		r.bypass = c
		if err := c.awaitExit(ctx); err != nil {
			return "", nil, err
		}
		if c.exitCode() != 137 {
			return "", map[string]uint64{"exit_code": uint64(c.exitCode())}, errf("exit code %d: %s", c.exitCode(), c.output())
		}
		return "exit 137", map[string]uint64{"exit_code": 137}, nil
	})
	r.step("b: time from crossing to SIGKILL, and overshoot", func() (string, map[string]uint64, error) { return r.killLatency(ctx) })
	r.step("b: its termination message says used, limit, GPU and how to raise it", func() (string, map[string]uint64, error) {
		if r.bypass == nil {
			return "", nil, errf("bypass did not start")
		}
		text, err := os.ReadFile(r.node.termination(r.bypass.id))
		if err != nil {
			return "", nil, fmt.Errorf("read termination message: %w", err)
		}
		for _, word := range []string{"GPU memory limit exceeded", "used ", "memory.max 2 GiB", r.node.gpuUUID, "raise gpufence.dev/memory.max"} {
			if !strings.Contains(string(text), word) {
				return "", nil, errf("%q does not say %q", text, word)
			}
		}
		return strings.TrimSpace(string(text)), nil, nil
	})
	r.step("b: inspect shows it after its end, and why the shim did not see it", func() (string, map[string]uint64, error) {
		if r.bypass == nil {
			return "", nil, errf("bypass did not start")
		}
		// The engine cleans up, as it would.
		if err := r.bypass.remove(ctx); err != nil {
			return "", nil, err
		}
		r.node.containers = slices.DeleteFunc(r.node.containers, func(c *container) bool { return c == r.bypass })
		c, err := r.node.inspect(ctx, r.bypass.id)
		if err != nil {
			return "", nil, err
		}
		if c.State != "ended" || !strings.HasPrefix(c.EndReason, "killed") {
			return "", nil, errf("state %s, reason %q", c.State, c.EndReason)
		}
		kills := uint64(0)
		for _, g := range c.GPUs {
			kills += g.Events.OOMKill
		}
		got := map[string]uint64{"oom_kill": kills}
		if kills == 0 {
			return "", got, errf("oom_kill is 0")
		}
		for _, f := range c.Fences {
			if f.Name == "shim" && f.State == "absent" && (why == "" || f.Why == why) {
				return fmt.Sprintf("shim: absent(%s); %s", f.Why, c.EndReason), got, nil
			}
		}
		return "", got, errf("its fences are %v", c.Fences)
	})
	r.show(ctx, "ps", "--all")
}

// show puts into the story what a person would see.
func (r *runner) show(ctx context.Context, args ...string) {
	out, err := r.node.run(ctx, r.node.dist("bin/gpufence"), append([]string{"--socket", r.node.socket}, args...)...)
	if err != nil {
		r.tell("   %v", err)
		return
	}
	r.tell("   $ gpufence %s", strings.Join(args, " "))
	for line := range strings.Lines(string(out)) {
		r.tell("   %s", strings.TrimRight(line, "\n"))
	}
}

func (r *runner) killLatency(ctx context.Context) (string, map[string]uint64, error) {
	if r.bypass == nil {
		return "", nil, errf("bypass did not start")
	}
	points, err := r.node.host.history(ctx, r.bypass.pid)
	if err != nil {
		return "", nil, err
	}
	crossedNS, ok := crossing(points, bypassMax+slack(bypassMax))
	if !ok {
		return "", nil, errf("it never crossed: its peak was %s", humanBytes(peak(points, 0)))
	}
	// The journal has it as soon as the kill is known to have worked.
	killed := int64(0)
	follow, cancel := context.WithTimeout(ctx, answerTime)
	defer cancel()
	err = r.node.client.Events(follow, 0, true, func(ev api.Event) error {
		if ev.Type == "kill" && ev.Container != nil && ev.Container.ID == r.bypass.id {
			killed = ev.MonotonicNS
			cancel()
		}
		return nil
	})
	if killed == 0 {
		return "", nil, errf("the journal has no kill of it: %w", err)
	}
	got := map[string]uint64{"peak_bytes": peak(points, 0), "overshoot_bytes": peak(points, 0) - bypassMax}
	if killed <= crossedNS {
		return "", got, errf("killed %s before it crossed", time.Duration(crossedNS-killed))
	}
	got["crossing_to_kill_ns"] = uint64(killed - crossedNS)
	return fmt.Sprintf("SIGKILL %s after crossing 2 GiB and slack, of which NVML's lag is %s; %s above memory.max at the end",
		time.Duration(killed-crossedNS).Round(100*time.Microsecond), r.lag(), humanBytes(peak(points, 0)-bypassMax)), got, nil
}

func (r *runner) lag() string {
	if r.node.real != nil {
		return "the driver's"
	}
	return r.opts.Lag.String()
}

// ---- d: live resize ------------------------------------------------------------------------

func (r *runner) playResize(ctx context.Context) {
	r.tell("\nd. polite is resized while it runs")
	r.step("d: set polite memory.max=6Gi: the client goes on to 6 GiB without a restart", func() (string, map[string]uint64, error) {
		if err := need(r.polite, "polite"); err != nil {
			return "", nil, err
		}
		// Until now it had 4 GiB; the whole stretch is looked at, not only its end.
		points, err := r.node.host.history(ctx, r.polite.pid)
		if err != nil {
			return "", nil, err
		}
		if most := peak(points, 0); most > politeMax {
			return "", nil, errf("before, %s were in use at 4 GiB", humanBytes(most))
		}
		if err := r.polite.say(fmt.Sprintf("grow %d %d 10", stepBytes/mib, (politeGrown-gib)/mib)); err != nil {
			return "", nil, err
		}
		var set api.SetResponse
		if err := r.node.gpufence(ctx, &set, "set", "polite", "memory.max=6Gi", "-o", "json"); err != nil {
			return "", nil, err
		}
		grow, err := r.polite.hear(ctx, "grow")
		if err != nil {
			return "", nil, err
		}
		if grow.Reached != 1 {
			return "", nil, errf("the client did not grow: %s", grow.ResultName)
		}
		fill, err := r.polite.ask(ctx, fmt.Sprintf("fill %d", stepBytes/mib))
		if err != nil {
			return "", nil, err
		}
		if fill.ResultName != outOfMemory {
			return "", nil, errf("at 6 GiB it was refused with %s", fill.ResultName)
		}
		detail, got, err := r.nearLimit(ctx, politeGrown)
		if err == nil && got != nil {
			got["refused_before"] = grow.Refused
		}
		return detail, got, err
	})
	r.step("d: set polite memory.max=1Gi is pending, and new allocations are refused", func() (string, map[string]uint64, error) { return r.pendingShrink(ctx) })
	r.step("d: it ends as ResizeFailed at its deadline, the old limit is back, polite lives", func() (string, map[string]uint64, error) { return r.failedShrink(ctx) })
}

// shrinking is the outcome of `gpufence set` in the background.
type shrinking struct {
	resp api.SetResponse
	err  error
	took time.Duration
}

func (r *runner) pendingShrink(ctx context.Context) (string, map[string]uint64, error) {
	if err := need(r.polite, "polite"); err != nil {
		return "", nil, err
	}
	r.shrink = make(chan shrinking, 1)
	go func() {
		started := time.Now()
		var s shrinking
		s.err = r.node.gpufence(ctx, &s.resp, "set", "polite", "memory.max=1Gi", "-o", "json")
		s.took = time.Since(started)
		r.shrink <- s
	}()
	deadline := time.Now().Add(answerTime)
	for {
		c, err := r.node.inspect(ctx, "polite")
		if err != nil {
			return "", nil, err
		}
		if c.Resize != nil && c.Resize.State == "pending" && c.Resize.Desired == politeShrunk {
			break
		}
		if time.Now().After(deadline) {
			return "", nil, errf("it is not pending: %+v", c.Resize)
		}
	}
	// Below the old limit, so that it is the new one that refuses.
	free, err := r.polite.ask(ctx, "free 1024")
	if err != nil || !free.OK {
		return "", nil, errors.Join(err, errf("free failed: %s", free.ResultName))
	}
	alloc, err := r.polite.ask(ctx, "alloc 64")
	if err != nil {
		return "", nil, err
	}
	if alloc.OK || alloc.ResultName != outOfMemory {
		return "", nil, errf("an allocation while pending: ok=%v %s", alloc.OK, alloc.ResultName)
	}
	return "pending with " + humanBytes(free.HeldBytes) + " held; an allocation is refused", map[string]uint64{"held_bytes": free.HeldBytes}, nil
}

func (r *runner) failedShrink(ctx context.Context) (string, map[string]uint64, error) {
	if r.shrink == nil {
		return "", nil, errf("the shrink was not tried")
	}
	var s shrinking
	select {
	case s = <-r.shrink:
	case <-ctx.Done():
		return "", nil, ctx.Err()
	case <-time.After(resizeDeadline + answerTime):
		return "", nil, errf("set did not end")
	}
	var exit *exec.ExitError
	if !errors.As(s.err, &exit) || exit.ExitCode() != 1 {
		return "", nil, errf("set ended with %v, want exit status 1", s.err)
	}
	if len(s.resp.Resizes) != 1 || s.resp.Resizes[0].State != "ResizeFailed" {
		return "", nil, errf("set answered %+v", s.resp.Resizes)
	}
	got := map[string]uint64{"set_ns": uint64(s.took)}
	c, err := r.node.inspect(ctx, "polite")
	if err != nil {
		return "", got, err
	}
	if len(c.GPUs) != 1 || c.GPUs[0].Limits.Max != politeGrown || c.PID != r.polite.pid {
		return "", got, errf("afterwards inspect shows %+v, pid %d", c.GPUs, c.PID)
	}
	if err := need(r.polite, "polite"); err != nil {
		return "", got, err
	}
	fill, err := r.polite.ask(ctx, fmt.Sprintf("fill %d", stepBytes/mib))
	if err != nil {
		return "", got, err
	}
	if fill.GrantedBytes != gib {
		return "", got, errf("afterwards it could allocate %s, want the 1 GiB that it had freed", humanBytes(fill.GrantedBytes))
	}
	return fmt.Sprintf("after %s; limit 6 GiB, 1 GiB allocated again", s.took.Round(100*time.Millisecond)), got, nil
}

// ---- e: gpufenced is killed ------------------------------------------------------------------

func (r *runner) playCrash(ctx context.Context) {
	r.tell("\ne. gpufenced is killed with SIGKILL and started again")
	var before []api.Container
	var churn reply
	r.step("e: polite and neighbour go on while gpufenced is dead", func() (string, map[string]uint64, error) {
		var err error
		if before, err = r.node.client.Containers(ctx); err != nil {
			return "", nil, err
		}
		if churn, err = r.churning(ctx); err != nil {
			return "", nil, err
		}
		if err := r.node.crash(); err != nil {
			return "", nil, err
		}
		if err := need(r.polite, "polite"); err != nil {
			return "", nil, err
		}
		free, err := r.polite.ask(ctx, "free 512")
		if err != nil || !free.OK {
			return "", nil, errors.Join(err, errf("free failed: %s", free.ResultName))
		}
		fill, err := r.polite.ask(ctx, fmt.Sprintf("fill %d", stepBytes/mib))
		if err != nil {
			return "", nil, err
		}
		if fill.GrantedBytes != 512*mib || fill.ResultName != outOfMemory {
			return "", nil, errf("polite freed 512 MiB and got %s, then %s", humanBytes(fill.GrantedBytes), fill.ResultName)
		}
		return "polite is still refused at 6 GiB", nil, nil
	})
	r.playStartsWhileDown(ctx)
	r.step("e: after its restart: the same containers, pids and limits, no counter smaller", func() (string, map[string]uint64, error) {
		if err := r.node.startDaemon(ctx); err != nil {
			return "", nil, err
		}
		after, err := r.node.client.Containers(ctx)
		if err != nil {
			return "", nil, err
		}
		if len(before) == 0 {
			return "", nil, errf("there was nothing to compare with")
		}
		if err := compare(before, after); err != nil {
			return "", nil, err
		}
		return fmt.Sprintf("%d containers, the ended ones included", len(after)), map[string]uint64{"containers": uint64(len(after))}, nil
	})
	r.step("e: nobody was killed, neighbour had 0 failures", func() (string, map[string]uint64, error) {
		if err := need(r.polite, "polite"); err != nil {
			return "", nil, err
		}
		now, err := r.churning(ctx)
		if err != nil {
			return "", nil, err
		}
		got := map[string]uint64{"allocations": now.Allocs - churn.Allocs, "failures": now.Failures}
		if now.Failures != 0 || now.Allocs <= churn.Allocs {
			return "", got, errf("neighbour: %d failures, %d allocations meanwhile", now.Failures, now.Allocs-churn.Allocs)
		}
		return fmt.Sprintf("%d allocations meanwhile", now.Allocs-churn.Allocs), got, nil
	})
}

// compare checks that a restart lost nothing.
func compare(before, after []api.Container) error {
	if len(before) != len(after) {
		return errf("%d containers before, %d after", len(before), len(after))
	}
	for _, b := range before {
		i := slices.IndexFunc(after, func(c api.Container) bool { return c.Key == b.Key })
		if i < 0 {
			return errf("%s is not known any more", b.Key.ID)
		}
		a := after[i]
		if a.PID != b.PID || a.State != b.State || a.Cgroup != b.Cgroup || len(a.GPUs) != len(b.GPUs) {
			return errf("%s was pid %d, %s, %s; it is pid %d, %s, %s", b.Name, b.PID, b.State, b.Cgroup, a.PID, a.State, a.Cgroup)
		}
		for j := range b.GPUs {
			x, y := b.GPUs[j], a.GPUs[j]
			if x.UUID != y.UUID || x.Limits != y.Limits || x.Container != y.Container || x.Pod != y.Pod {
				return errf("%s had limits %+v, has %+v", b.Name, x.Limits, y.Limits)
			}
			if y.Peak < x.Peak || smaller(y.Events, x.Events) {
				return errf("%s had counted %+v and a peak of %d, has %+v and %d", b.Name, x.Events, x.Peak, y.Events, y.Peak)
			}
		}
	}
	return nil
}

func smaller(a, b api.Events) bool {
	return a.High < b.High || a.Max < b.Max || a.Device < b.Device || a.OverMax < b.OverMax || a.OOM < b.OOM || a.OOMKill < b.OOMKill
}

// ---- f: starts ---------------------------------------------------------------------------------

// sidecar is a container without a GPU in a pod with a limit.
var sidecar = workload{name: "sidecar", args: []string{"/bin/busybox", "sh", "-c", `echo "visible=$NVIDIA_VISIBLE_DEVICES"; ls /dev/simgpu /dev/nvidia0 2>/dev/null; exit 0`}}

func (r *runner) startSidecar(ctx context.Context) (string, map[string]uint64, error) {
	started := time.Now()
	p, err := r.node.newPod(ctx, "sidecar", limitKey(politeMax))
	if err != nil {
		return "", nil, err
	}
	c, err := r.node.newContainer(ctx, p, sidecar)
	if err != nil {
		return "", nil, err
	}
	took := time.Since(started)
	if err := c.awaitExit(ctx); err != nil {
		return "", nil, err
	}
	<-c.reads
	if c.exitCode() != 0 {
		return "", nil, errf("exit code %d: %s", c.exitCode(), c.output())
	}
	if c.output() != "visible=void" {
		return "", nil, errf("it sees %q, want visible=void and no device", c.output())
	}
	return "started in " + took.Round(time.Millisecond).String() + " with its sandbox; it sees no GPU", map[string]uint64{"start_ns": uint64(took)}, nil
}

// refusal is a start that must not happen.
type refusal struct {
	name        string
	annotations map[string]string
	code        quota.Code
	words       []string
}

func (r *runner) refused(ctx context.Context, f refusal) {
	r.step("f: refused: "+f.name, func() (string, map[string]uint64, error) {
		p, err := r.node.newPod(ctx, "refused", f.annotations)
		if err != nil {
			return "", nil, err
		}
		_, err = r.node.newContainer(ctx, p, workload{name: "main", args: []string{"/client", "hold"}, gpu: r.node.gpuUUID})
		var refused *refusedError
		if !errors.As(err, &refused) {
			return "", nil, errf("it was not refused: %v", err)
		}
		for _, word := range append([]string{"gpufence: " + string(f.code) + " "}, f.words...) {
			if !strings.Contains(refused.sentence, word) {
				return "", nil, errf("%q does not say %q", refused.sentence, word)
			}
		}
		return refused.sentence, nil, nil
	})
}

func (r *runner) playStartsWhileDown(ctx context.Context) {
	r.tell("\nf. starts while gpufenced is dead")
	r.step("f: a sidecar without a GPU under a pod key starts with gpufenced down", func() (string, map[string]uint64, error) { return r.startSidecar(ctx) })
	r.refused(ctx, refusal{"gpufenced is not running", limitKey(gib), quota.CodeUnreachable, []string{r.node.socket}})
}

func (r *runner) playStarts(ctx context.Context) {
	r.tell("\nf. starts")
	tooMuch := quota.FormatBytes(r.node.gpuBytes/gib*gib - 8*gib) // with polite's and neighbour's 12 GiB more than there is
	var before []api.Container
	r.step("f: a sidecar without a GPU under a pod key starts", func() (string, map[string]uint64, error) {
		var err error
		if before, err = r.node.client.Containers(ctx); err != nil {
			return "", nil, err
		}
		return r.startSidecar(ctx)
	})
	for _, f := range []refusal{
		{"memory.max: 99Ti", map[string]string{"gpufence.dev/memory.max": "99Ti"}, quota.CodeAboveGPU, []string{"memory.max", "99Ti"}},
		{"memory.max: 4096", map[string]string{"gpufence.dev/memory.max": "4096"}, quota.CodeNoUnit, []string{"memory.max", "4096Mi"}},
		{"memory.mx: 4Gi", map[string]string{"gpufence.dev/memory.mx": "4Gi"}, quota.CodeUnknownKey, []string{"memory.mx", "memory.max"}},
		{"a GPU without a limit", nil, quota.CodeNoLimit, []string{"memory.max"}},
		{"more memory.min than is free", map[string]string{"gpufence.dev/memory.max": tooMuch, "gpufence.dev/memory.min": tooMuch}, quota.CodeUnavailable, []string{"memory.min"}},
	} {
		r.refused(ctx, f)
	}
	if r.node.real == nil { // this driver has no limits of its own
		r.refused(ctx, refusal{"require: hard where only watch is possible", map[string]string{"gpufence.dev/memory.max": "1Gi", "gpufence.dev/require": "hard"},
			quota.CodeLevelNotReached, []string{"requires level hard", "has no memory limits (they need R615)"}})
	}
	r.step("f: nothing of a refused start is left at gpufenced", func() (string, map[string]uint64, error) {
		after, err := r.node.client.Containers(ctx)
		if err != nil {
			return "", nil, err
		}
		live := func(cs []api.Container) (n int) {
			for _, c := range cs {
				if c.State != "ended" {
					n++
				}
			}
			return n
		}
		if len(before) == 0 || live(after) != live(before) {
			return "", nil, errf("%d containers before, %d after", live(before), live(after))
		}
		return fmt.Sprintf("%d containers as before", live(after)), nil, nil
	})
}
