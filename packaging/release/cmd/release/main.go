// SPDX-License-Identifier: Apache-2.0

// Command release makes packages, chart, image and bundle of this work tree; `make package` runs it.
package main

import (
	"context"
	"flag"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/gpufence/gpufence/packaging/release"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := run(ctx, os.Args[1:], os.Stdout, os.Stderr); err != nil {
		fmt.Fprintf(os.Stderr, "release: %v\n", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, args []string, stdout, stderr io.Writer) error {
	o := release.Options{Log: stderr}
	var arches, formats, epoch string
	f := flag.NewFlagSet("release", flag.ContinueOnError)
	f.SetOutput(stderr)
	f.StringVar(&o.Source, "source", ".", "the work tree")
	f.StringVar(&o.Out, "out", "dist/packages", "folder of what is made; it is replaced")
	f.StringVar(&o.Work, "work", "dist/obj/package", "folder of what is made on the way")
	f.StringVar(&o.Version, "version", "", "as git describe says it")
	f.StringVar(&epoch, "epoch", os.Getenv("SOURCE_DATE_EPOCH"), "seconds of 1970: the time of everything (default: SOURCE_DATE_EPOCH, else that of the commit)")
	f.StringVar(&o.NFPM, "nfpm", "nfpm", "the program nfpm")
	f.StringVar(&arches, "arch", "amd64,arm64", "architectures")
	f.StringVar(&formats, "format", strings.Join(release.Formats, ","), "what to make")
	if err := f.Parse(args); err != nil {
		return err
	}
	for _, p := range []*string{&o.Source, &o.Out, &o.Work} {
		var err error
		if *p, err = filepath.Abs(*p); err != nil {
			return err
		}
	}
	o.Arches, o.Formats = strings.Split(arches, ","), strings.Split(formats, ",")
	if epoch == "" {
		cmd := exec.CommandContext(ctx, "git", "log", "-1", "--format=%ct")
		cmd.Dir = o.Source
		out, err := cmd.Output()
		if err != nil {
			return fmt.Errorf("ask git for the commit's time: %w (set SOURCE_DATE_EPOCH)", err)
		}
		epoch = strings.TrimSpace(string(out))
	}
	seconds, err := strconv.ParseInt(epoch, 10, 64)
	if err != nil {
		return fmt.Errorf("read time: %w", err)
	}
	o.Time = time.Unix(seconds, 0).UTC()
	if err := release.Build(ctx, o); err != nil {
		return err
	}
	sums, err := os.ReadFile(filepath.Join(o.Out, "SHA256SUMS"))
	if err != nil {
		return err
	}
	fmt.Fprintf(stdout, "%s", sums)
	return nil
}
