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

	"github.com/sirupsen/logrus"
	"github.com/spf13/cobra"

	"github.com/gpufence/gpufence/enforcer/act"
	"github.com/gpufence/gpufence/enforcer/api"
	"github.com/gpufence/gpufence/enforcer/config"
	"github.com/gpufence/gpufence/enforcer/daemon"
	"github.com/gpufence/gpufence/enforcer/gpu"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
	context.AfterFunc(ctx, stop) // a second signal ends us at once
	os.Exit(run(ctx, os.Args[1:], os.Getenv, os.Stdout, os.Stderr))
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
	if err := cmd.Execute(); err != nil {
		fmt.Fprintln(stderr, "gpufence:", err)
		return 1
	}
	return 0
}

func serve(ctx context.Context, set flags, getenv func(string) string, stderr io.Writer) (err error) {
	log, err := newLogger(stderr, set.logLevel, set.logFormat)
	if err != nil {
		return err
	}
	cfg, err := config.Load(set.configPath(getenv))
	if err != nil {
		return err
	}
	set.apply(&cfg)
	host, err := act.NewHost("", "")
	if err != nil {
		return fmt.Errorf("look at the host: %w", err)
	}
	listener, err := daemon.SystemdListener(getenv, os.Getpid())
	if err != nil {
		return err
	}
	d, err := daemon.New(daemon.Options{Config: cfg, Library: gpu.Open(cfg.NVMLLibrary), Host: host, Log: log})
	if err != nil {
		return err
	}
	log.Info(d.Describe())
	return closing(d, d.Serve(ctx, listener, func() { tell(log, getenv, "READY=1") }))
}

// tell speaks to systemd, whose absence is no fault of ours.
func tell(log *logrus.Logger, getenv func(string) string, state string) {
	if err := daemon.Notify(getenv, state); err != nil {
		log.WithError(err).Warn("cannot tell systemd that gpufenced is up")
	}
}
