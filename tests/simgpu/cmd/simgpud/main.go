// SPDX-License-Identifier: Apache-2.0

// Simgpud plays the NVIDIA kernel driver for machines without a GPU; docs/simulated-gpu.md.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log"
	"os"
	"os/signal"
	"strconv"
	"syscall"

	"github.com/spf13/pflag"

	"github.com/gpufence/gpufence/tests/simgpu/server"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
	code := run(ctx, os.Args[1:], os.Stderr)
	stop()
	os.Exit(code)
}

func run(ctx context.Context, args []string, stderr io.Writer) int {
	logger := log.New(stderr, "simgpud: ", log.LstdFlags|log.Lmicroseconds|log.Lmsgprefix)
	flags := server.Flags{}
	fs := pflag.NewFlagSet("simgpud", pflag.ContinueOnError)
	fs.SetOutput(stderr)
	flags.Register(fs)
	if err := fs.Parse(args); err != nil {
		if errors.Is(err, pflag.ErrHelp) {
			return 0
		}
		logger.Print(err)
		return 2
	}
	if fs.NArg() > 0 {
		logger.Printf("unexpected argument %q", fs.Arg(0))
		return 2
	}
	cfg, err := flags.Config()
	if err != nil {
		logger.Print(err)
		return 2
	}
	cfg.Log = logger
	if err := serve(ctx, cfg, flags.PIDFile); err != nil {
		logger.Print(err)
		return 1
	}
	return 0
}

func serve(ctx context.Context, cfg server.Config, pidFile string) (err error) {
	srv, err := server.New(cfg)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	var pidErr error
	err = srv.Run(ctx, func() {
		cfg.Log.Printf("ready: %d GPU(s), driver %s, in %s", len(cfg.GPUs), cfg.DriverVersion, cfg.Dir)
		if pidFile == "" {
			return
		}
		if pidErr = os.WriteFile(pidFile, []byte(strconv.Itoa(os.Getpid())+"\n"), 0o644); pidErr != nil {
			cancel()
		}
	})
	if pidFile != "" && pidErr == nil && err == nil {
		err = os.Remove(pidFile)
	}
	if pidErr != nil {
		err = errors.Join(fmt.Errorf("write pid file: %w", pidErr), err)
	}
	return err
}
