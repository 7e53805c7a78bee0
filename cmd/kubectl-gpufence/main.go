// SPDX-License-Identifier: Apache-2.0

// Command kubectl-gpufence is what `kubectl gpufence` runs: it asks gpufence on the node of a pod. It
// reaches the cluster only by running kubectl, with whatever rights and configuration that has.
package main

import (
	"context"
	"os"
	"os/signal"
	"syscall"

	"github.com/gpufence/gpufence/cmd/kubectl-gpufence/plugin"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	os.Exit(plugin.Run(ctx, os.Args[1:], os.Getenv, os.Stdin, os.Stdout, os.Stderr))
}
