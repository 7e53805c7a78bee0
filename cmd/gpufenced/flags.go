// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"fmt"
	"io"
	"time"

	"github.com/sirupsen/logrus"
	"github.com/spf13/pflag"

	"github.com/gpufence/gpufence/enforcer/config"
	"github.com/gpufence/gpufence/enforcer/daemon"
	"github.com/gpufence/gpufence/enforcer/quota"
)

// flags override the configuration file; empty ones leave it as it is.
type flags struct {
	config, socket, runDir, stateDir, nvml, shim string
	logLevel, logFormat                          string
}

func (f *flags) add(to *pflag.FlagSet) {
	to.StringVar(&f.config, "config", "", "configuration file (default $GPUFENCE_CONFIG, else "+config.DefaultPath+" if it is there)")
	to.StringVar(&f.socket, "socket", "", "unix socket to serve")
	to.StringVar(&f.runDir, "run-dir", "", "folder for state that ends with the boot")
	to.StringVar(&f.stateDir, "state-dir", "", "folder for the journal")
	to.StringVar(&f.nvml, "nvml-library", "", "NVML library instead of libnvidia-ml.so.1")
	to.StringVar(&f.shim, "shim-library", "", "libgpufence.so on the host")
	to.StringVar(&f.logLevel, "log-level", "info", "debug, info, warn or error")
	to.StringVar(&f.logFormat, "log-format", "text", "text or json")
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

func newLogger(w io.Writer, level, format string) (*logrus.Logger, error) {
	l, err := logrus.ParseLevel(level)
	if err != nil {
		return nil, quota.NewError(quota.CodeUsage, "--log-level %.40q is not a level", level).WithHint("write debug, info, warn or error")
	}
	log := logrus.New()
	log.SetOutput(w)
	log.SetLevel(l)
	switch format {
	case "text":
		log.SetFormatter(&logrus.TextFormatter{DisableColors: true, FullTimestamp: true, TimestampFormat: time.RFC3339Nano})
	case "json":
		log.SetFormatter(&logrus.JSONFormatter{TimestampFormat: time.RFC3339Nano})
	default:
		return nil, quota.NewError(quota.CodeUsage, "--log-format %.40q is unknown", format).WithHint("write text or json")
	}
	return log, nil
}

// closing closes the daemon, whatever ended it.
func closing(d *daemon.Daemon, err error) error {
	if closeErr := d.Close(); closeErr != nil {
		return errors.Join(err, fmt.Errorf("close: %w", closeErr))
	}
	return err
}
