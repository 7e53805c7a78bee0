// SPDX-License-Identifier: Apache-2.0

// Simgpu starts, stops, sets and shows the simulated GPU; docs/simulated-gpu.md.
package main

import (
	"context"
	"fmt"
	"io"
	"os"
	"os/signal"
	"syscall"

	"github.com/spf13/cobra"

	"github.com/gpufence/gpufence/tests/simgpu/wire"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
	code := run(ctx, os.Args[1:], os.Stdout, os.Stderr)
	stop()
	os.Exit(code)
}

func run(ctx context.Context, args []string, stdout, stderr io.Writer) int {
	root := &cobra.Command{
		Use: "simgpu", Short: "The simulated GPU", SilenceErrors: true, SilenceUsage: true,
		CompletionOptions: cobra.CompletionOptions{HiddenDefaultCmd: true},
	}
	dir := os.Getenv(wire.DirEnv)
	if dir == "" {
		dir = "/run/simgpu"
	}
	root.PersistentFlags().StringVar(&dir, "dir", dir, "folder of simgpud's sockets, also from $"+wire.DirEnv)
	root.AddCommand(stateCommand(&dir), historyCommand(&dir), setCommand(&dir), knobsCommand(), cdiCommand(&dir), capabilitiesCommand(&dir), upCommand(&dir), downCommand(&dir))
	root.SetArgs(args)
	root.SetOut(stdout)
	root.SetErr(stderr)
	if err := root.ExecuteContext(ctx); err != nil {
		fmt.Fprintf(stderr, "simgpu: %v\n", err)
		return 1
	}
	return 0
}
