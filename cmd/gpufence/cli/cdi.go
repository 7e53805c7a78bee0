// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"context"
	"errors"
	"os"
	"os/exec"
	"path/filepath"

	"github.com/spf13/cobra"

	"github.com/gpufence/gpufence/enforcer/quota"
)

// daemonEnv names gpufenced where it is neither beside us nor in PATH.
const daemonEnv = "GPUFENCE_DAEMON"

// cdiCommand hands its arguments to gpufenced, which alone links what describes GPUs.
func (a *app) cdi() *cobra.Command {
	cmd := &cobra.Command{Use: "cdi", Short: "Describe this node's GPUs to container engines"}
	cmd.AddCommand(&cobra.Command{
		Use: "generate [flags of gpufenced cdi generate]", Short: "Write a CDI specification of this node's GPUs",
		Long: "Write a CDI specification of the GPUs that the driver of this node has, to standard output or --output.\n" +
			"gpufenced does it: `gpufenced cdi generate --help` lists the flags.\n" +
			"It writes one of the kind gpufence.dev/gpu by itself where no other specification has the GPUs.",
		DisableFlagParsing: true,
		RunE: func(cmd *cobra.Command, args []string) error {
			return a.runDaemon(cmd.Context(), append([]string{"cdi", "generate"}, args...))
		},
	})
	return cmd
}

// runDaemon runs gpufenced with our own output; what it says of a failure is all that is said.
func (a *app) runDaemon(ctx context.Context, args []string) error {
	program, err := a.daemon()
	if err != nil {
		return err
	}
	cmd := exec.CommandContext(ctx, program, args...)
	cmd.Stdout, cmd.Stderr = a.stdout, a.stderr
	err = cmd.Run()
	var exit *exec.ExitError
	switch {
	case ctx.Err() != nil:
		return ctx.Err()
	case errors.As(err, &exit):
		return errSaid
	case err != nil:
		return quota.NewError(quota.CodeRuntimeExec, "cannot run %s: %w", program, err)
	}
	return nil
}

// daemon is gpufenced of this installation.
func (a *app) daemon() (string, error) {
	if p := a.getenv(daemonEnv); p != "" {
		return p, nil
	}
	if self, err := os.Executable(); err == nil {
		if p := filepath.Join(filepath.Dir(self), "gpufenced"); isProgram(p) {
			return p, nil
		}
	}
	for _, p := range filepath.SplitList(a.getenv("PATH")) {
		if p = filepath.Join(p, "gpufenced"); filepath.IsAbs(p) && isProgram(p) {
			return p, nil
		}
	}
	return "", quota.NewError(quota.CodeUsage, "gpufenced is neither beside gpufence nor in PATH").
		WithHint("install gpufence completely, or name it in %s", daemonEnv)
}

func isProgram(path string) bool {
	info, err := os.Stat(path)
	return err == nil && info.Mode().IsRegular() && info.Mode().Perm()&0o111 != 0
}
