// SPDX-License-Identifier: Apache-2.0

// Command test-gpu runs the suites on the GPU of this machine, records what its driver does, and writes
// gpu-report.md and gpu-report.json. Exit status 1: something that must hold did not; 2: it could not run.
package main

import (
	"context"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/gpufence/gpufence/tests/hardware"
)

func main() { os.Exit(run(os.Args[1:])) }

func run(args []string) int {
	flags := flag.NewFlagSet("test-gpu", flag.ContinueOnError)
	opts := hardware.Options{Story: os.Stdout}
	var out string
	flags.StringVar(&opts.Dir, "dir", beside(), "folder with what was built")
	flags.StringVar(&out, "out", "", "folder of the report (default: where what was built lies)")
	flags.BoolVar(&opts.Simulated, "simulated", false, "use the simulated GPU even if there is a real one")
	flags.BoolVar(&opts.Quick, "quick", false, "some rows of each suite only")
	flags.StringVar(&opts.GPU, "gpu", "", "UUID of the GPU to use (default: NVML's first)")
	flags.StringVar(&opts.Python, "python", os.Getenv("PYTHON"), "the Python that has PyTorch, CuPy or JAX (default: python3)")
	flags.Func("only", "run these suites, by comma: "+strings.Join(hardware.Suites(), ","), func(v string) error {
		opts.Only = append(opts.Only, strings.Split(v, ",")...)
		return nil
	})
	flags.DurationVar(&opts.Timeout, "timeout", 9*time.Minute+30*time.Second, "for everything; what does not fit fails")
	if err := flags.Parse(args); err != nil || flags.NArg() > 0 {
		fmt.Fprintln(os.Stderr, "test-gpu: want flags only")
		return 2
	}
	if out == "" {
		out = opts.Dir
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	report, err := hardware.Run(ctx, opts)
	if report == nil {
		fmt.Fprintf(os.Stderr, "test-gpu: %v\n", err)
		return 2
	}
	path, bad := report.Write(out)
	for _, e := range []error{err, bad} {
		if e != nil {
			fmt.Fprintf(os.Stderr, "test-gpu: %v\n", e)
		}
	}
	fmt.Printf("\ntest-gpu: %s\n", report.Summary())
	for _, row := range report.Failed() {
		fmt.Printf("test-gpu: failed: %s: %s: %s\n", row.Suite, row.Name, row.Detail)
	}
	fmt.Printf("test-gpu: %s\ntest-gpu: the report is %s\n", report.Headline(), path)
	switch {
	case err != nil || bad != nil:
		return 2
	case len(report.Failed()) > 0:
		return 1
	}
	return 0
}

// beside is the folder whose bin/ holds this program.
func beside() string {
	self, err := os.Executable()
	if err != nil {
		return "dist"
	}
	return filepath.Dir(filepath.Dir(self))
}
