// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"os"
	"path/filepath"
	"time"

	"github.com/spf13/cobra"

	"github.com/gpufence/gpufence/tests/demo"
)

func (a *app) demo() *cobra.Command {
	var output, dist string
	var lag time.Duration
	cmd := &cobra.Command{
		Use:   "demo",
		Short: "hold three containers to their limits here and now, and check every claim",
		Long: "demo starts a private gpufenced, on a simulated GPU where the machine has no real\n" +
			"one, runs containers under runc through gpufence-runtime, and prints what held. It needs\n" +
			"root, runc and busybox, touches nothing outside a private folder and cgroup, and removes\n" +
			"both at its end. Exit status 1 if anything did not hold.",
		Args:              exactly(0, "no arguments"),
		ValidArgsFunction: cobra.NoFileCompletions,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if dist == "" {
				var err error
				if dist, err = distBeside(); err != nil {
					return err
				}
			}
			opts := demo.Options{Dist: dist, Lag: lag, Story: a.stdout}
			if output == "json" {
				opts.Story = a.stderr
			}
			result, err := demo.Run(cmd.Context(), opts)
			if err != nil {
				return err
			}
			if output == "json" {
				if err := a.printJSON(result); err != nil {
					return err
				}
			}
			if !result.Held() {
				return errSaid // in the table
			}
			return nil
		},
	}
	outputFlag(cmd, &output, "table", "json")
	cmd.Flags().StringVar(&dist, "dist", "", "folder with bin/, lib/, simgpu/ and clients/ (default: where gpufence lies)")
	cmd.Flags().DurationVar(&lag, "nvml-lag", 200*time.Millisecond, "how old the simulated NVML's answers are")
	return cmd
}

// distBeside is the folder whose bin/ holds this program.
func distBeside() (string, error) {
	self, err := os.Executable()
	if err != nil {
		return "", usagef("cannot tell where gpufence lies (%v): give --dist", err)
	}
	return filepath.Dir(filepath.Dir(self)), nil
}
