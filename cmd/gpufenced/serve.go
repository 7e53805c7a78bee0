// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"
	"io"
	"os"

	"github.com/gpufence/gpufence/enforcer/act"
	"github.com/gpufence/gpufence/enforcer/config"
	"github.com/gpufence/gpufence/enforcer/daemon"
	"github.com/gpufence/gpufence/enforcer/kubelet"
)

// serve runs gpufenced until the context ends.
func serve(ctx context.Context, set flags, getenv func(string) string, stderr io.Writer) (err error) {
	hup := hangups()
	log, flush, err := newLogger(stderr, getenv, set.logLevel, set.logFormat)
	if err != nil {
		return err
	}
	defer flush()
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
		Config: loaded.Config, Library: openLibrary(loaded.Config.NVMLLibrary), Host: host, Log: log, Loaded: loaded, Load: set.load(getenv), Notify: say, Root: "/", Kubelet: kubelet.Devices,
		Capabilities: set.capabilities,
	})
	if err != nil {
		return err
	}
	log.Info(d.Describe())
	defer context.AfterFunc(ctx, func() { say("STOPPING=1") })()
	go reloadOn(ctx, hup, d)
	go refreshCDI(ctx, d, loaded.Config, log)
	return closing(d, d.Serve(ctx, listener, func() {
		say("READY=1")
		if period > 0 {
			go daemon.FeedWatchdog(ctx, period, d.Live, say)
		}
	}))
}
