// SPDX-License-Identifier: Apache-2.0

// Command gpufence-nri fences containers as an NRI plugin: what gpufence-runtime does, where the
// engine's configuration is not to be edited. It is a process of its own, and not part of gpufenced,
// so that containers are refused, and not let through, while gpufenced is restarted.
package main

import (
	"context"
	"fmt"
	"io"
	"os"
	"os/signal"
	"syscall"

	"github.com/sirupsen/logrus"
	"github.com/spf13/cobra"

	"github.com/gpufence/gpufence/cmd/internal/man"
	"github.com/gpufence/gpufence/enforcer/api"
	"github.com/gpufence/gpufence/enforcer/config"
	"github.com/gpufence/gpufence/hook/nri"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
	context.AfterFunc(ctx, stop) // a second signal ends us at once
	os.Exit(run(ctx, os.Args[1:], os.Getenv, os.Stdout, os.Stderr))
}

func run(ctx context.Context, args []string, getenv func(string) string, stdout, stderr io.Writer) int {
	log := logrus.New()
	log.SetOutput(stderr)
	log.SetFormatter(&logrus.TextFormatter{DisableColors: true, FullTimestamp: true})
	var set nri.Settings
	cmd := &cobra.Command{
		Use: "gpufence-nri", Short: "Keep containers inside their GPU memory limits, as an NRI plugin", Version: api.BuildVersion,
		Args: cobra.NoArgs, SilenceErrors: true, SilenceUsage: true,
		RunE: func(*cobra.Command, []string) error {
			if err := settle(&set, getenv, log); err != nil {
				return err
			}
			return nri.New(set, api.NewClient(set.Socket, 0), log).Run(ctx)
		},
	}
	f := cmd.Flags()
	f.StringVar(&set.ConfigPath, "config", "", "configuration file (default $GPUFENCE_CONFIG, else "+config.DefaultPath+" if it is there)")
	f.StringVar(&set.Socket, "socket", "", "gpufenced's socket")
	f.StringVar(&set.HookPath, "hook-path", "", "gpufence-hook on the host (default: as configured, else beside this program)")
	f.StringVar(&set.NRISocket, "nri-socket", "/var/run/nri/nri.sock", "the engine's NRI socket")
	f.StringVar(&set.Index, "index", "90", "two digits: NRI asks plugins in their order, and what comes later has the last word")
	f.StringVar(&set.Scope, "scope", "", "the low-level runtime's root with the engine's namespace (default: the engine's usual one)")
	f.StringSliceVar(&set.Exempt, "exempt-namespaces", nri.ExemptNamespaces, "namespaces whose pods are left alone: device plugins and monitors use every GPU")
	cmd.SetArgs(args)
	cmd.SetOut(stdout)
	cmd.SetErr(stderr)
	cmd.CompletionOptions.DisableDefaultCmd = true
	cmd.SetHelpCommand(&cobra.Command{Hidden: true})
	cmd.AddCommand(man.Command(cmd, api.BuildVersion))
	if err := cmd.Execute(); err != nil {
		fmt.Fprintln(stderr, "gpufence:", err)
		return 1
	}
	return 0
}
