// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/gpufence/gpufence/enforcer/api"
	"github.com/gpufence/gpufence/enforcer/quota"
)

func (a *app) inspect() *cobra.Command {
	var output string
	cmd := &cobra.Command{
		Use:   "inspect CONTAINER",
		Short: "show one container: limits, use, fences and what they read back, processes",
		Long: "inspect shows what holds a container, also for 10 minutes after its end.\n\n" +
			"-o cgroup prints lines of the form `FILE GPU VALUE` with the files and the numbers of\n" +
			"cgroup v2, in bytes.",
		Args:              exactly(1, "one container"),
		ValidArgsFunction: a.completeContainer,
		RunE: func(cmd *cobra.Command, args []string) error {
			c, err := a.client().Container(cmd.Context(), args[0])
			if err != nil {
				return err
			}
			switch output {
			case "json":
				return a.printJSON(c)
			case "cgroup":
				return a.inspectCgroup(c)
			default:
				return a.inspectTable(c)
			}
		},
	}
	outputFlag(cmd, &output, "table", "json", "cgroup")
	return cmd
}

func (a *app) inspectCgroup(c api.Container) error {
	group := "0"
	if c.OOMGroup {
		group = "1"
	}
	for _, g := range c.GPUs {
		for _, line := range [][2]string{
			{"memory.current", strconv.FormatUint(g.Current, 10)},
			{"memory.peak", strconv.FormatUint(g.Peak, 10)},
			{"memory.min", cgroupLimit(g.Limits.Min)},
			{"memory.high", cgroupLimit(g.Limits.High)},
			{"memory.max", cgroupLimit(g.Limits.Max)},
			{"memory.swap.max", cgroupLimit(g.Limits.SwapMax)},
			{"memory.swap.current", strconv.FormatUint(g.Swap, 10)},
			{"memory.oom.group", group},
			{"memory.events", strings.Join(eventCounts(g.Events, true), " ")},
			{"memory.events.local", strings.Join(eventCounts(g.EventsLocal, true), " ")},
			{"pod/memory.current", strconv.FormatUint(g.PodCurrent, 10)},
			{"pod/memory.peak", strconv.FormatUint(g.PodPeak, 10)},
			{"pod/memory.min", cgroupLimit(g.Pod.Min)},
			{"pod/memory.high", cgroupLimit(g.Pod.High)},
			{"pod/memory.max", cgroupLimit(g.Pod.Max)},
			{"pod/memory.swap.max", cgroupLimit(g.Pod.SwapMax)},
			{"pod/memory.events", strings.Join(eventCounts(g.PodEvents, true), " ")},
			{"pod/memory.events.local", strings.Join(eventCounts(g.PodEventsLocal, true), " ")},
		} {
			if _, err := fmt.Fprintf(a.stdout, "%s %s %s\n", line[0], g.UUID, line[1]); err != nil {
				return fmt.Errorf("print answer: %w", err)
			}
		}
	}
	return nil
}

func (a *app) inspectTable(c api.Container) error {
	t := newTable(a.stdout)
	t.row("container", containerName(c))
	t.row("id", c.Key.ID)
	t.row("engine", string(c.Key.Engine)+" "+c.Key.Scope)
	if c.Pod.ID != "" {
		t.row("pod", strings.TrimPrefix(c.Pod.Namespace+"/"+c.Pod.Name, "/")+" "+c.Pod.ID)
	}
	t.row("state", stateSentence(c))
	t.row("level", fmt.Sprintf("%s, required %s, mode %s", c.Level, c.Require, c.Mode))
	t.row("cgroup", c.Cgroup)
	for _, f := range c.Fences {
		line := fenceState(f)
		if f.Proof != "" {
			line += ": " + f.Proof
		}
		if len(f.PIDs) > 0 {
			line += fmt.Sprintf(" pids %v", f.PIDs)
		}
		t.row("fence "+f.Name, line)
	}
	if r := c.Resize; r != nil {
		t.row("resize", resizeSentence(*r))
	}
	if err := t.flush(); err != nil {
		return err
	}

	fmt.Fprintln(a.stdout)
	anyShared := slices.ContainsFunc(c.GPUs, func(g api.ContainerGPU) bool { return g.Shared != 0 })
	header := []string{"GPU", "CURRENT", "PEAK", "MIN", "HIGH", "MAX", "MAX(POD)", "NVML", "LEDGER", "MANAGED", "SWAP", "EXCESS", "DYING"}
	if anyShared {
		header = append(header, "SHARED") // what of NVML's counts at its owner
	}
	t = newTable(a.stdout, append(header, "EVENTS")...)
	for _, g := range c.GPUs {
		cells := []string{
			gpuName(g), size(g.Current, g.Known), size(g.Peak, true), limit(g.Limits.Min), limit(g.Limits.High), limit(g.Container.Max), limit(g.Pod.Max),
			size(g.NVML, g.Known), size(g.Ledger, true), size(g.Managed, true), size(g.Swap, true), size(g.Excess, g.Known), size(g.Dying, g.Known),
		}
		if anyShared {
			cells = append(cells, size(g.Shared, g.Known))
		}
		t.row(append(cells, strings.Join(eventCounts(g.Events, false), " "))...)
	}
	if err := t.flush(); err != nil {
		return err
	}
	if len(c.Processes) == 0 {
		return nil
	}

	fmt.Fprintln(a.stdout)
	t = newTable(a.stdout, "PID", "COMMAND", "GPU", "NVML", "SLOT", "STATE")
	for _, p := range c.Processes {
		slot := "none"
		if p.Slot >= 0 {
			slot = strconv.Itoa(p.Slot)
		}
		t.row(strconv.Itoa(p.PID), p.Comm, p.GPU, quota.HumanBytes(p.NVML), slot, p.State)
	}
	return t.flush()
}

func gpuName(g api.ContainerGPU) string { return fmt.Sprintf("%d:%s", g.Index, g.UUID) }

func stateSentence(c api.Container) string {
	s := c.State
	switch {
	case c.EndedAt != nil:
		s += " " + c.EndedAt.Format(time.DateTime)
		if c.EndReason != "" {
			s += ", " + c.EndReason
		}
	case c.StartedAt != nil:
		s += fmt.Sprintf(" since %s, pid %d", c.StartedAt.Format(time.DateTime), c.PID)
	}
	return s
}

func resizeSentence(r api.Resize) string {
	s := fmt.Sprintf("%s on %s: desired %s, allocated %s, actuated %s, actual %s",
		r.State, r.GPU, limit(r.Desired), limit(r.Allocated), limit(r.Actuated), limit(r.Actual))
	if r.Deadline != nil && r.State == statePending {
		s += ", until " + r.Deadline.Format(time.TimeOnly)
	}
	if r.Why != "" {
		s += ": " + r.Why
	}
	return s
}
