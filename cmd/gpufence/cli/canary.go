// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/gpufence/gpufence/enforcer/kube/canary"
	"github.com/gpufence/gpufence/enforcer/quota"
)

func (a *app) canary() *cobra.Command {
	var output, runtime, dir string
	cmd := &cobra.Command{
		Use:   "canary",
		Short: "start a container of our own, and see that it is held",
		Long: "canary starts a container through gpufence-runtime as Kubernetes' engine would, with a small limit on\n" +
			"every GPU, looks for the limit in gpufenced, in the fences and in the container, and removes it. It takes\n" +
			"no GPU memory. Exit status 1 if it was not held, or if no GPU has room for it, which is no verdict.",
		Args:              exactly(0, "no arguments"),
		ValidArgsFunction: cobra.NoFileCompletions,
		RunE: func(cmd *cobra.Command, _ []string) error {
			self, err := os.Executable()
			if err != nil {
				return fmt.Errorf("find this program: %w", err)
			}
			if self, err = filepath.EvalSymlinks(self); err != nil {
				return fmt.Errorf("find this program: %w", err)
			}
			if runtime == "" {
				runtime = filepath.Join(filepath.Dir(self), "gpufence-runtime.cri")
			}
			result, err := canary.Run(cmd.Context(), canary.Options{Client: a.client(), Runtime: runtime, Self: self, Dir: dir, Cgroup: "gpufence-canary", Now: time.Now})
			if err != nil {
				return err
			}
			if output == "json" {
				if err := a.printJSON(result); err != nil {
					return err
				}
			} else {
				for _, s := range result.Steps {
					fmt.Fprintln(a.stdout, "ok:", s)
				}
			}
			switch {
			case result.Held:
				if output != "json" {
					fmt.Fprintf(a.stdout, "held at level %s\n", result.Level)
				}
				return nil
			case output == "json":
				return errSaid // in the answer
			}
			return quota.NewError(quota.CodeCanary, "a canary container was not held: %s", strings.TrimPrefix(result.Why, "gpufence: "))
		},
	}
	outputFlag(cmd, &output, "table", "json")
	f := cmd.Flags()
	f.StringVar(&runtime, "runtime", "", "gpufence-runtime under the engine's name (default: gpufence-runtime.cri beside this program)")
	f.StringVar(&dir, "dir", "/run", "where its folder is made for the time")
	return cmd
}

// canaryInside is the canary's only process.
func (a *app) canaryInside() *cobra.Command {
	return &cobra.Command{
		Use: canary.InsideCommand, Hidden: true, Args: cobra.NoArgs,
		RunE: func(*cobra.Command, []string) error { return canary.Inside(os.Stdin, a.stdout) },
	}
}
