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

	"github.com/spf13/cobra"

	"github.com/gpufence/gpufence/enforcer/act"
	"github.com/gpufence/gpufence/enforcer/api"
	"github.com/gpufence/gpufence/enforcer/config"
	"github.com/gpufence/gpufence/enforcer/daemon"
	"github.com/gpufence/gpufence/enforcer/gpu"
)

func main() {
	if len(os.Args) == 3 && os.Args[1] == act.GuardCommand {
		os.Exit(guard(os.Stdin, os.Stdout, os.Stderr, os.Args[2]))
	}
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
	context.AfterFunc(ctx, stop) // a second signal ends us at once
	os.Exit(run(ctx, os.Args[1:], os.Getenv, os.Stdout, os.Stderr))
}

// guard is the process that freezes for gpufenced; see [act.Guard].
func guard(in io.Reader, out, stderr io.Writer, dir string) int {
	if err := act.GuardMain(in, out, dir); err != nil {
		fmt.Fprintln(stderr, "gpufence:", err)
		return 1
	}
	return 0
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
	hup := hangups()
	log, err := newLogger(stderr, getenv, set.logLevel, set.logFormat)
	if err != nil {
		return err
	}
	loaded, err := config.LoadOrLastGood(set.configPath(getenv), set.stateDir)
	if err != nil {
		return err
	}
	set.apply(&loaded.Config)
	host, err := act.NewHost("", "")
	if err != nil {
		return fmt.Errorf("look at the host: %w", err)
	}
	listener, err := daemon.SystemdListener(getenv, os.Getpid())
	if err != nil {
		return err
	}
	period, err := daemon.WatchdogPeriod(getenv, os.Getpid())
	if err != nil {
		return err
	}
	say := func(state string) { tell(log, getenv, state) }
	d, err := daemon.New(daemon.Options{
		Config: loaded.Config, Library: gpu.Open(loaded.Config.NVMLLibrary), Host: host, Log: log, Loaded: loaded, Load: set.load(getenv), Notify: say,
	})
	if err != nil {
		return err
	}
	log.Info(d.Describe())
	defer context.AfterFunc(ctx, func() { say("STOPPING=1") })()
	go reloadOn(ctx, hup, d)
	return closing(d, d.Serve(ctx, listener, func() {
		say("READY=1")
		if period > 0 {
			go daemon.FeedWatchdog(ctx, period, d.Live, say)
		}
	}))
}
