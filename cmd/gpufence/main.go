// SPDX-License-Identifier: Apache-2.0

// Command gpufence shows and changes what gpufenced holds containers to.
package main

import (
	"context"
	"os"
	"os/signal"
	"syscall"

	"github.com/gpufence/gpufence/cmd/gpufence/cli"
)

func main() {
	os.Exit(run())
}

func run() int {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	return cli.Run(ctx, os.Args[1:], os.Getenv, os.Stdout, os.Stderr)
}
