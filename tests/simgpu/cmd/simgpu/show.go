// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/json"
	"fmt"
	"io"
	"strconv"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"

	"github.com/gpufence/gpufence/tests/simgpu/driver"
	"github.com/gpufence/gpufence/tests/simgpu/server"
)

const mib = 1 << 20

// outputFlag adds -o and tells later whether json was asked for.
func outputFlag(cmd *cobra.Command) func() (bool, error) {
	output := cmd.Flags().StringP("output", "o", "table", "table or json")
	return func() (bool, error) {
		switch *output {
		case "json":
			return true, nil
		case "table":
			return false, nil
		}
		return false, fmt.Errorf("no output %q: write table or json", *output)
	}
}

func writeJSON(w io.Writer, v any) error {
	enc := json.NewEncoder(w)
	enc.SetIndent("", "  ")
	if err := enc.Encode(v); err != nil {
		return fmt.Errorf("write JSON: %w", err)
	}
	return nil
}

func stateCommand(dir *string) *cobra.Command {
	cmd := &cobra.Command{Use: "state", Short: "Show GPUs, who holds what, and peaks", Args: cobra.NoArgs}
	asJSON := outputFlag(cmd)
	ended := cmd.Flags().Bool("all", false, "also processes that have ended (in JSON they always are)")
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		j, err := asJSON()
		if err != nil {
			return err
		}
		st, err := server.NewClient(*dir).State(cmd.Context())
		if err != nil {
			return err
		}
		if j {
			return writeJSON(cmd.OutOrStdout(), st)
		}
		return writeState(cmd.OutOrStdout(), st, *ended)
	}
	return cmd
}

func writeState(out io.Writer, st server.State, ended bool) error {
	w := tabwriter.NewWriter(out, 0, 8, 2, ' ', 0)
	defaults := driver.DefaultKnobs()
	for _, g := range st.GPUs {
		var set []string
		for _, k := range driver.AllKnobs() {
			if v := g.Knobs[k.Name]; v != k.Get(&defaults) {
				set = append(set, k.Name+"="+v)
			}
		}
		name := "GPU " + strconv.Itoa(g.Number)
		if g.MIG != "" {
			name += " (" + g.MIG + ")"
		}
		fmt.Fprintf(w, "%s\t%s\t%s\t%d of %d MiB used, peak %d\t%s\n", name, g.UUID, g.Name,
			g.UsedBytes/mib, g.CUDATotalBytes/mib, g.PeakUsedBytes/mib, strings.Join(set, " "))
		if err := w.Flush(); err != nil {
			return fmt.Errorf("write table: %w", err)
		}
		fmt.Fprintln(w, "  PID\tCOMMAND\tCONTEXTS\tUSED MiB\tMANAGED MiB\tPEAK MiB\tREFUSED\tCGROUP")
		for _, p := range g.Processes {
			if p.EndNS == 0 || ended {
				fmt.Fprintf(w, "  %d\t%s\t%d\t%d\t%d\t%d\t%d\t%s\n", p.PID, p.Command, p.Contexts,
					p.UsedBytes/mib, p.ManagedBytes/mib, p.PeakBytes/mib, p.Refused, p.Cgroup)
			}
		}
		if err := w.Flush(); err != nil {
			return fmt.Errorf("write table: %w", err)
		}
	}
	return nil
}

func historyCommand(dir *string) *cobra.Command {
	cmd := &cobra.Command{Use: "history --pid N", Short: "Show what a process held over time", Args: cobra.NoArgs}
	asJSON := outputFlag(cmd)
	pid := cmd.Flags().Int("pid", 0, "host process id")
	cobra.CheckErr(cmd.MarkFlagRequired("pid"))
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		j, err := asJSON()
		if err != nil {
			return err
		}
		all, err := server.NewClient(*dir).History(cmd.Context(), *pid)
		if err != nil {
			return err
		}
		if j {
			return writeJSON(cmd.OutOrStdout(), all)
		}
		w := tabwriter.NewWriter(cmd.OutOrStdout(), 0, 8, 2, ' ', 0)
		fmt.Fprintln(w, "GPU\tAFTER OPEN\tUSED MiB\tMANAGED MiB")
		for _, h := range all {
			for _, p := range h.Points {
				fmt.Fprintf(w, "%d\t%s\t%d\t%d\n", h.Number, time.Duration(p.TimeNS-h.StartNS), p.UsedBytes/mib, p.ManagedBytes/mib)
			}
		}
		if err := w.Flush(); err != nil {
			return fmt.Errorf("write table: %w", err)
		}
		return nil
	}
	return cmd
}

func setCommand(dir *string) *cobra.Command {
	cmd := &cobra.Command{Use: "set KNOB=VALUE...", Short: "Change how the GPUs behave (simgpu knobs lists how)", Args: cobra.MinimumNArgs(1)}
	gpu := cmd.Flags().Int("gpu", -1, "only this GPU")
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		set := server.Settings{Knobs: map[string]string{}}
		if cmd.Flags().Changed("gpu") {
			set.GPU = gpu
		}
		for _, arg := range args {
			name, value, ok := strings.Cut(arg, "=")
			if !ok {
				return fmt.Errorf("read %q: write knob=value, such as nvml-lag=200ms", arg)
			}
			set.Knobs[name] = value
		}
		return server.NewClient(*dir).Set(cmd.Context(), set)
	}
	return cmd
}

func knobsCommand() *cobra.Command {
	return &cobra.Command{
		Use: "knobs", Short: "List the knobs that set changes, with their defaults", Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			w := tabwriter.NewWriter(cmd.OutOrStdout(), 0, 8, 2, ' ', 0)
			defaults := driver.DefaultKnobs()
			for _, k := range driver.AllKnobs() {
				fmt.Fprintf(w, "%s\t%s\t%s\n", k.Name, k.Get(&defaults), k.Help)
			}
			if err := w.Flush(); err != nil {
				return fmt.Errorf("write table: %w", err)
			}
			return nil
		},
	}
}
