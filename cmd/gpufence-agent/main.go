// SPDX-License-Identifier: Apache-2.0

// Command gpufence-agent is gpufence on a node of Kubernetes: `run` stands between gpufenced and the
// API server, `host` puts gpufence on the node and starts canaries. The chart runs both, in two
// containers, so that what has a token is no root of the node, and what is root has no token.
package main

import (
	"context"
	"fmt"
	"os"
	"os/signal"
	"syscall"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
	context.AfterFunc(ctx, stop) // a second signal ends us at once
	if err := root(os.Getenv).ExecuteContext(ctx); err != nil {
		fmt.Fprintln(os.Stderr, "gpufence:", err)
		os.Exit(1)
	}
}
