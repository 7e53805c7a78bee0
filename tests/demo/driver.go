// SPDX-License-Identifier: Apache-2.0

package demo

import (
	"context"
	"fmt"
	"slices"
	"strings"

	"github.com/gpufence/gpufence/enforcer/api"
	"github.com/gpufence/gpufence/enforcer/quota"
)

// limitingDriver is the version of the simulated driver of the second part, which has memory limits of
// its own.
const limitingDriver = "615.71.09"

// fenceTable says how each fence stands around a container, as `gpufence inspect` does.
func fenceTable(c api.Container) string {
	var out []string
	for _, f := range c.Fences {
		s := f.Name + ": " + f.State
		if f.Why != "" {
			s += " (" + f.Why + ")"
		}
		out = append(out, s)
	}
	return fmt.Sprintf("level %s; %s", c.Level, strings.Join(out, "; "))
}

// held tells which fences hold a container.
func (r *runner) held(ctx context.Context, name string, want quota.Level, proven string) (string, map[string]uint64, error) {
	c, err := r.node.inspect(ctx, name)
	if err != nil {
		return "", nil, err
	}
	if c.Level != want || !slices.ContainsFunc(c.Fences, func(f api.Fence) bool { return f.Name == proven && f.State == "proven" }) {
		return "", nil, errf("want level %s by fence %s: %s", want, proven, fenceTable(c))
	}
	return fenceTable(c), nil, nil
}

// playDriver is the second part: the same bypass where the driver can refuse it.
func (r *runner) playDriver(ctx context.Context) error {
	if err := r.node.start(ctx); err != nil {
		return err
	}
	r.tell("\ng. the same on %s, which limits cgroups itself", r.node.describe())
	r.step("g: bypass, require: hard, starts: the driver has read its limit back", func() (string, map[string]uint64, error) {
		annotations := limitKey(bypassMax)
		annotations["gpufence.dev/require"] = "hard"
		p, err := r.node.newPod(ctx, "bypass", annotations)
		if err != nil {
			return "", nil, err
		}
		c, err := r.node.newContainer(ctx, p, workload{name: "bypass", args: []string{"/bypass", "64", "20"}, gpu: r.node.gpuUUID})
		if err != nil {
			return "", nil, err
		}
		r.bypass = c
		return r.held(ctx, c.id, quota.LevelHard, "driver")
	})
	r.step("g: bypass is refused by the driver at its limit, and lives", func() (string, map[string]uint64, error) {
		if err := need(r.bypass, "bypass"); err != nil {
			return "", nil, err
		}
		full, err := r.bypass.hear(ctx, "full")
		if err != nil {
			return "", nil, err
		}
		points, err := r.node.host.history(ctx, r.bypass.pid)
		if err != nil {
			return "", nil, err
		}
		most := peak(points, 0)
		got := map[string]uint64{"held_bytes": full.HeldBytes, "peak_bytes": most}
		switch {
		case most > bypassMax || full.HeldBytes > bypassMax:
			return "", got, errf("it got %s", humanBytes(most))
		case bypassMax-full.HeldBytes >= shortMost:
			return "", got, errf("it got only %s", humanBytes(full.HeldBytes))
		}
		if err := need(r.bypass, "bypass"); err != nil {
			return "", got, err
		}
		return fmt.Sprintf("%s below the limit, never above it", humanBytes(bypassMax-full.HeldBytes)), got, nil
	})
	r.step("g: inspect shows the limit as the driver says it, and nobody was killed", func() (string, map[string]uint64, error) {
		if err := need(r.bypass, "bypass"); err != nil {
			return "", nil, err
		}
		c, err := r.node.inspect(ctx, r.bypass.id)
		if err != nil {
			return "", nil, err
		}
		i := slices.IndexFunc(c.Fences, func(f api.Fence) bool { return f.Name == "driver" })
		if i < 0 || !strings.Contains(c.Fences[i].Proof, quota.FormatBytes(bypassMax)) || !strings.Contains(c.Fences[i].Proof, "managed: shim only") {
			return "", nil, errf("its fences are %+v", c.Fences)
		}
		for _, g := range c.GPUs {
			if g.Events.OOMKill != 0 {
				return "", nil, errf("%d were killed", g.Events.OOMKill)
			}
		}
		return c.Fences[i].Proof, nil, nil
	})
	return ctx.Err()
}
