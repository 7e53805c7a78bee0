// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"syscall"
	"time"

	"github.com/sirupsen/logrus"
	"github.com/spf13/pflag"

	"github.com/gpufence/gpufence/enforcer/api"
	"github.com/gpufence/gpufence/enforcer/config"
	"github.com/gpufence/gpufence/enforcer/daemon"
	"github.com/gpufence/gpufence/enforcer/gpu"
	"github.com/gpufence/gpufence/enforcer/quota"
)

// flags override the configuration file; empty ones leave it as it is.
type flags struct {
	config, socket, runDir, stateDir, nvml, shim string
	logLevel, logFormat, capabilities            string
}

func (f *flags) add(to *pflag.FlagSet) {
	to.StringVar(&f.config, "config", "", "configuration file (default $GPUFENCE_CONFIG, else "+config.DefaultPath+" if it is there)")
	to.StringVar(&f.socket, "socket", "", "unix socket to serve")
	to.StringVar(&f.runDir, "run-dir", "", "folder for state that ends with the boot")
	to.StringVar(&f.stateDir, "state-dir", "", "folder for the journal and what outlives the boot")
	to.StringVar(&f.nvml, "nvml-library", "", "NVML library instead of libnvidia-ml.so.1")
	to.StringVar(&f.shim, "shim-library", "", "libgpufence.so on the host")
	to.StringVar(&f.capabilities, "mig-capabilities", gpu.CapabilitiesDir, "folder where the driver says which node of /dev/nvidia-caps opens which MIG instance")
	to.StringVar(&f.logLevel, "log-level", "info", "debug, info, warn or error")
	to.StringVar(&f.logFormat, "log-format", "auto", "text, json, journald, or auto: journald where systemd reads what we write, else text")
}

// configPath is the file to read: the flag, the environment, or the default place.
func (f *flags) configPath(getenv func(string) string) string {
	if f.config != "" {
		return f.config
	}
	return getenv("GPUFENCE_CONFIG")
}

func (f *flags) apply(cfg *config.Config) {
	for _, o := range []struct{ from, to *string }{
		{&f.socket, &cfg.Socket}, {&f.runDir, &cfg.RunDir}, {&f.stateDir, &cfg.StateDir}, {&f.nvml, &cfg.NVMLLibrary}, {&f.shim, &cfg.ShimLibrary},
	} {
		if *o.from != "" {
			*o.to = *o.from
		}
	}
}

// load reads the configuration again, as it was read at the start.
func (f *flags) load(getenv func(string) string) func() (config.Loaded, error) {
	return func() (config.Loaded, error) {
		l, err := config.LoadFile(f.configPath(getenv))
		f.apply(&l.Config)
		return l, err
	}
}

// hangups are the SIGHUPs from now on, which end us no more.
func hangups() <-chan os.Signal {
	hup := make(chan os.Signal, 1)
	signal.Notify(hup, syscall.SIGHUP)
	return hup
}

// reloadOn reads the configuration again at each signal; what is wrong with it is in the log and in
// the journal.
func reloadOn(ctx context.Context, hup <-chan os.Signal, d *daemon.Daemon) {
	for {
		select {
		case <-ctx.Done():
			return
		case <-hup:
			_, _ = d.Reload(ctx, api.ReloadRequest{})
		}
	}
}

// tell speaks to systemd, whose absence is no fault of ours.
func tell(log *logrus.Logger, getenv func(string) string, state string) {
	if err := daemon.Notify(getenv, state); err != nil {
		log.WithError(err).Warn("cannot tell systemd how gpufenced is")
	}
}

// newLogger makes the log, and the function that writes what is still on its way.
func newLogger(w io.Writer, getenv func(string) string, level, format string) (log *logrus.Logger, flush func(), err error) {
	l, err := logrus.ParseLevel(level)
	if err != nil {
		return nil, nil, quota.NewError(quota.CodeUsage, "--log-level %.40q is not a level", level).WithHint("write debug, info, warn or error")
	}
	s := newSpool(spoolLines, lostLine(w))
	log = logrus.New()
	log.SetOutput(spooled{s, w})
	log.SetLevel(l)
	if format == "auto" {
		format = "text"
		if toJournal(getenv, w) {
			format = "journald"
		}
	}
	switch format {
	case "journald":
		j, err := newJournald(journaldSocket, w)
		if err != nil {
			return nil, nil, err
		}
		j.put = s.put
		log.SetOutput(io.Discard)
		log.AddHook(j)
	case "text":
		log.SetFormatter(&logrus.TextFormatter{DisableColors: true, FullTimestamp: true, TimestampFormat: time.RFC3339Nano})
	case "json":
		log.SetFormatter(&logrus.JSONFormatter{TimestampFormat: time.RFC3339Nano})
	default:
		return nil, nil, quota.NewError(quota.CodeUsage, "--log-format %.40q is unknown", format).WithHint("write auto, text, json or journald")
	}
	return log, func() { s.flush(flushTime) }, nil
}

// closing closes the daemon, whatever ended it.
func closing(d *daemon.Daemon, err error) error {
	if closeErr := d.Close(); closeErr != nil {
		return errors.Join(err, fmt.Errorf("close: %w", closeErr))
	}
	return err
}
