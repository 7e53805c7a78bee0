// SPDX-License-Identifier: Apache-2.0

// Command gpufence-runtime stands between a container engine and runc: it fences a container
// that is about to be created, and hands every other command on untouched.
package main

import (
	"context"
	"io"
	"os"
	"syscall"

	"github.com/gpufence/gpufence/cmd/internal/runtimesettings"
	"github.com/gpufence/gpufence/hook/oci"
)

func main() { os.Exit(run(context.Background(), os.Args, os.Environ(), os.Stderr)) }

func run(ctx context.Context, args, env []string, stderr io.Writer) int {
	settings, err := runtimesettings.Load(os.Getenv("GPUFENCE_CONFIG"))
	return oci.Wrapper{Args: args, Env: env, Stderr: stderr, Settings: settings, SettingsErr: err, Exec: syscall.Exec}.Run(ctx)
}
