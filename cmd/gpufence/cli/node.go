// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"context"
	"fmt"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/gpufence/gpufence/enforcer/api"
)

// switched is a command that moves the node's switch.
func (a *app) switched(use, short, long string, needsReason bool, move func(context.Context, *api.Client, string) (api.Switch, error)) *cobra.Command {
	var output, reason string
	cmd := &cobra.Command{
		Use: use, Short: short, Long: long,
		Args:              exactly(0, "no arguments"),
		ValidArgsFunction: cobra.NoFileCompletions,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if needsReason && strings.TrimSpace(reason) == "" {
				return usagef("%s wants to be told why: give --reason, which everybody will see who asks", use)
			}
			sw, err := move(cmd.Context(), a.client(), reason)
			if err != nil {
				return err
			}
			if output == "json" {
				return a.printJSON(sw)
			}
			_, err = fmt.Fprintln(a.stdout, switchSentence(sw))
			return err
		},
	}
	outputFlag(cmd, &output, "table", "json")
	if use != "resume" {
		cmd.Flags().StringVar(&reason, "reason", "", "why, in a few words; shown to everybody whom it stops")
	}
	return cmd
}

func (a *app) quiesce() *cobra.Command {
	return a.switched("quiesce", "let NVML go and start no container with a GPU, for a driver upgrade",
		"quiesce lets NVML go, so that the driver can be unloaded or a GPU partitioned. Containers with a\n"+
			"GPU do not start meanwhile, and are told the reason. What runs keeps its limits in the shim; what\n"+
			"does not load the shim is not watched. It ends with resume, or with the next boot.", false,
		func(ctx context.Context, c *api.Client, reason string) (api.Switch, error) {
			return c.Quiesce(ctx, reason)
		})
}

func (a *app) resume() *cobra.Command {
	return a.switched("resume", "end quiesce or disable", "resume opens NVML again, and every limit is enforced, also those of containers that started meanwhile.", false,
		func(ctx context.Context, c *api.Client, _ string) (api.Switch, error) { return c.Resume(ctx) })
}

func (a *app) disable() *cobra.Command {
	return a.switched("disable", "break the glass: enforce nothing on this node until resume",
		"disable is for an incident in which gpufence itself is in the way. Nothing is refused, slowed or\n"+
			"killed; what would be refused starts without a limit, what would not keeps its limit for later.\n"+
			"Every start and every would-be kill is in the journal, `gpufence doctor` and the metrics say it, and\n"+
			"it outlives a boot. It ends with resume.", true,
		func(ctx context.Context, c *api.Client, reason string) (api.Switch, error) {
			return c.Disable(ctx, reason)
		})
}

func switchSentence(sw api.Switch) string {
	s := sw.Position
	if sw.Since != nil {
		s += " since " + sw.Since.Local().Format(time.DateTime)
	}
	if sw.Reason != "" {
		s += ": " + sw.Reason
	}
	return printable(s)
}

func (a *app) reload() *cobra.Command {
	var output string
	cmd := &cobra.Command{
		Use:   "reload",
		Short: "make gpufenced read its configuration again",
		Long: "reload makes gpufenced read config.toml again, as SIGHUP does, and says what came of it. A wrong\n" +
			"file is refused with its line; what was in force goes on.",
		Args:              exactly(0, "no arguments"),
		ValidArgsFunction: cobra.NoFileCompletions,
		RunE: func(cmd *cobra.Command, _ []string) error {
			info, err := a.client().Reload(cmd.Context())
			if err != nil {
				return err
			}
			if output == "json" {
				return a.printJSON(info)
			}
			fmt.Fprintf(a.stdout, "%s is in force\n", printable(info.Path))
			if len(info.NeedRestart) > 0 {
				fmt.Fprintf(a.stderr, "gpufence: note: until `systemctl restart gpufenced` the old values stay of %s\n", printable(strings.Join(info.NeedRestart, ", ")))
			}
			return nil
		},
	}
	outputFlag(cmd, &output, "table", "json")
	return cmd
}
