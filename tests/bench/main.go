// SPDX-License-Identifier: Apache-2.0

// Command bench runs every benchmark, prints a table and writes dist/bench.json. What it compares
// is measured in one run, side by side; medians and ratios are what counts. A target that is
// missed is printed and is no failure: make soak asserts.
package main

import (
	"bytes"
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"slices"
	"syscall"

	"github.com/gpufence/gpufence/tests/bench/gateload"
)

func main() {
	if len(os.Args) > 1 && os.Args[1] == gateload.Command {
		if err := gateload.Work(os.Args[2:]); err != nil {
			fmt.Fprintf(os.Stderr, "bench: %v\n", err)
			os.Exit(1)
		}
		return
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := run(ctx, os.Args[1:], os.Stdout, os.Stderr); err != nil {
		fmt.Fprintf(os.Stderr, "bench: %v\n", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, args []string, stdout, stderr io.Writer) error {
	flags := flag.NewFlagSet("bench", flag.ContinueOnError)
	flags.SetOutput(stderr)
	dist := flags.String("dist", "dist", "folder that make build fills")
	only := flags.String("only", "", "run one program of dist/bench, or \"create\", or \"gate\", or \"enforcer\", or of that one \"watch\", \"cost\" or \"answers\"")
	if err := flags.Parse(args); err != nil {
		return err
	}
	measurements, err := measureAll(ctx, *dist, *only, stderr)
	if err != nil {
		return err
	}
	if len(measurements) == 0 {
		return errors.New("nothing was measured: run make build, and check --only")
	}
	rows := make([]row, 0, len(measurements))
	for _, m := range measurements {
		r, err := summarize(m, targetOf(m))
		if err != nil {
			return err
		}
		rows = append(rows, r)
	}
	if err := printTable(stdout, rows); err != nil {
		return fmt.Errorf("print table: %w", err)
	}
	return writeJSON(filepath.Join(*dist, "bench.json"), rows)
}

// measureAll runs the C programs of dist/bench, the start of containers, then gpufenced.
func measureAll(ctx context.Context, dist, only string, stderr io.Writer) ([]measurement, error) {
	programs, err := filepath.Glob(filepath.Join(dist, "bench", "*"))
	if err != nil {
		return nil, fmt.Errorf("list benchmarks: %w", err)
	}
	slices.Sort(programs)
	var all []measurement
	for _, program := range programs {
		info, err := os.Stat(program)
		if err != nil {
			return nil, fmt.Errorf("look at %s: %w", program, err)
		}
		if info.IsDir() || info.Mode()&0o111 == 0 || filepath.Ext(program) != "" || only != "" && only != filepath.Base(program) {
			continue
		}
		fmt.Fprintf(stderr, "bench: %s\n", filepath.Base(program))
		cmd := exec.CommandContext(ctx, program)
		cmd.Env = append(os.Environ(), "GPUFENCE_DIST="+dist)
		cmd.Stderr = stderr
		out, err := cmd.Output()
		if err != nil {
			return nil, fmt.Errorf("run %s: %w", program, err)
		}
		measured, err := readMeasurements(bytes.NewReader(out))
		if err != nil {
			return nil, fmt.Errorf("run %s: %w", program, err)
		}
		all = append(all, measured...)
	}
	if only == "" || only == "create" {
		fmt.Fprintln(stderr, "bench: create")
		created, err := measureCreate(ctx, dist)
		if err != nil {
			return nil, err
		}
		all = append(all, created...)
	}
	if only == "" || only == "gate" {
		fmt.Fprintln(stderr, "bench: gate")
		measured, err := measureGate(ctx, stderr)
		if err != nil {
			return nil, err
		}
		all = append(all, measured...)
	}
	for _, part := range enforcerParts {
		if only != "" && only != "enforcer" && only != part.name {
			continue
		}
		fmt.Fprintln(stderr, "bench: "+part.name)
		measured, err := measureEnforcer(ctx, dist, part.measure)
		if err != nil {
			return nil, err
		}
		all = append(all, measured...)
	}
	return all, nil
}
