// SPDX-License-Identifier: Apache-2.0

// Command gpufence-hook is the OCI hook that gpufence-runtime writes into config.json: it
// registers a container's first process with gpufenced before the image's program starts, and
// says when the container is gone. As `gpufence-hook precreate` it is a hook of Podman's instead,
// which does gpufence-runtime's work for containers that are started with another runtime.
package main

import (
	"context"
	"fmt"
	"io"
	"os"
	"sync"

	"github.com/gpufence/gpufence/cmd/internal/runtimesettings"
	"github.com/gpufence/gpufence/enforcer/config"
	"github.com/gpufence/gpufence/hook/oci"
)

func main() { os.Exit(run(context.Background(), os.Args[1:], os.Stdin, os.Stdout, os.Stderr)) }

func run(ctx context.Context, args []string, stdin io.Reader, stdout, stderr io.Writer) int {
	if len(args) == 2 && args[0] == oci.StageRefuse {
		fmt.Fprintln(stderr, args[1])
		return 1
	}
	parsed, err := oci.ParseHookArgs(args)
	if err != nil {
		fmt.Fprintln(stderr, oci.Sentence(err))
		return 1
	}
	if parsed.Stage == oci.StagePrecreate {
		path := parsed.ConfigPath
		if path == "" {
			path = os.Getenv("GPUFENCE_CONFIG")
		}
		settings, err := runtimesettings.Load(path)
		return oci.Precreate{
			Wrapper: oci.Wrapper{Env: os.Environ(), Stderr: stderr, Settings: settings, SettingsErr: err},
			Args:    parsed, Stdin: stdin, Stdout: stdout, Stderr: stderr,
		}.Run(ctx)
	}
	return oci.Hook{
		Args:     parsed,
		Settings: sync.OnceValue(func() oci.Settings { return settings(parsed.ConfigPath) }),
		Stdin:    stdin,
		Stderr:   stderr,
	}.Run(ctx)
}

// settings are what the hook goes by.
func settings(path string) oci.Settings {
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
	return oci.Settings{Socket: cfg.Socket, WaitSocket: cfg.WaitSocket, FailOpen: cfg.FailOpen}
}
