// SPDX-License-Identifier: Apache-2.0

// Command gpufence-hook is the OCI hook that gpufence-runtime writes into config.json: it
// registers a container's first process with gpufenced before the image's program starts, and
// says when the container is gone.
package main

import (
	"context"
	"fmt"
	"io"
	"os"

	"github.com/gpufence/gpufence/enforcer/config"
	"github.com/gpufence/gpufence/hook/oci"
)

func main() { os.Exit(run(context.Background(), os.Args[1:], os.Stdin, os.Stderr)) }

func run(ctx context.Context, args []string, stdin io.Reader, stderr io.Writer) int {
	parsed, err := oci.ParseHookArgs(args)
	if err != nil {
		fmt.Fprintln(stderr, oci.Sentence(err))
		return 1
	}
	path := parsed.ConfigPath
	if path == config.DefaultPath {
		path = "" // may be missing
	}
	loaded, err := config.LoadOrLastGood(path, "")
	cfg := loaded.Config
	if err != nil {
		// The wrapper read it a moment ago, or the container is long running: its arguments
		// say which socket, and the defaults say how long to wait.
		cfg = config.Default()
	}
	return oci.Hook{
		Args:     parsed,
		Settings: oci.Settings{Socket: cfg.Socket, WaitSocket: cfg.WaitSocket, FailOpen: cfg.FailOpen},
		Stdin:    stdin,
		Stderr:   stderr,
	}.Run(ctx)
}
