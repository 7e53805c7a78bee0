// SPDX-License-Identifier: Apache-2.0

// Command gpufence-runtime stands between a container engine and runc: it fences a container
// that is about to be created, and hands every other command on untouched.
package main

import (
	"context"
	"io"
	"os"
	"path/filepath"
	"syscall"

	"github.com/gpufence/gpufence/enforcer/config"
	"github.com/gpufence/gpufence/hook/oci"
)

func main() { os.Exit(run(context.Background(), os.Args, os.Environ(), os.Stderr)) }

func run(ctx context.Context, args, env []string, stderr io.Writer) int {
	path := os.Getenv("GPUFENCE_CONFIG")
	loaded, err := config.LoadOrLastGood(path, "")
	cfg, notice := loaded.Config, ""
	if err != nil {
		// Containers that run must still be stopped and deleted.
		cfg = config.Default()
	} else if loaded.FileErr != nil {
		notice = loaded.FileErr.Error() + "; what was last in force of it holds"
	}
	if path == "" {
		path = config.DefaultPath
	} else if abs, err := filepath.Abs(path); err == nil {
		path = abs // the hook runs elsewhere; without a working directory nothing is created anyway
	}
	return oci.Wrapper{
		Args:   args,
		Env:    env,
		Stderr: stderr,
		Settings: oci.Settings{
			Policy:      cfg.Policy,
			ConfigPath:  path,
			Socket:      cfg.Socket,
			RunDir:      cfg.RunDir,
			Runtimes:    cfg.Runtimes,
			HookPath:    cfg.HookPath,
			CDISpecDirs: cfg.CDISpecDirs,
			WaitSocket:  cfg.WaitSocket,
			FailOpen:    cfg.FailOpen,
			Notice:      notice,
		},
		SettingsErr: err,
		Exec:        syscall.Exec,
	}.Run(ctx)
}
