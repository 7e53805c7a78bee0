// SPDX-License-Identifier: Apache-2.0

// Command gpufenced keeps the containers of a node inside their GPU memory limits.
package main

import (
	"context"
	"fmt"
	"io"
	"os"
	"os/signal"
	"syscall"

	"github.com/spf13/cobra"

	"github.com/gpufence/gpufence/bpf"
	"github.com/gpufence/gpufence/cmd/internal/man"
	"github.com/gpufence/gpufence/enforcer/act"
	"github.com/gpufence/gpufence/enforcer/api"
)

func main() {
	if len(os.Args) == 3 && os.Args[1] == act.GuardCommand {
		os.Exit(guard(os.Stdin, os.Stdout, os.Stderr, os.Args[2]))
	}
	if len(os.Args) == 3 && os.Args[1] == bpf.CanaryCommand {
		if err := bpf.RunCanary(os.Args[2]); err != nil {
			fmt.Fprintln(os.Stderr, "gpufence:", err)
			os.Exit(1)
		}
		return
	}
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
	context.AfterFunc(ctx, stop) // a second signal ends us at once
	os.Exit(run(ctx, os.Args[1:], os.Getenv, os.Stdout, os.Stderr))
}

// guard is the process that freezes for gpufenced; see [act.Guard].
func guard(in io.Reader, out, stderr io.Writer, dir string) int {
	if err := act.GuardMain(in, out, dir); err != nil {
		fmt.Fprintln(stderr, "gpufence:", err)
		return 1
	}
	return 0
}

func run(ctx context.Context, args []string, getenv func(string) string, stdout, stderr io.Writer) int {
	var set flags
	cmd := &cobra.Command{
		Use: "gpufenced", Short: "Keep containers inside their GPU memory limits", Version: api.BuildVersion,
		Args: cobra.NoArgs, SilenceErrors: true, SilenceUsage: true,
		RunE: func(*cobra.Command, []string) error { return serve(ctx, set, getenv, stderr) },
	}
	set.add(cmd.Flags())
	cmd.SetArgs(args)
	cmd.SetOut(stdout)
	cmd.SetErr(stderr)
	cmd.CompletionOptions.DisableDefaultCmd = true
	cmd.SetHelpCommand(&cobra.Command{Hidden: true})
	cmd.AddCommand(cdiCommand(), man.Command(cmd, api.BuildVersion))
	if err := cmd.Execute(); err != nil {
		fmt.Fprintln(stderr, "gpufence:", err)
		return 1
	}
	return 0
}
