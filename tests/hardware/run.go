// SPDX-License-Identifier: Apache-2.0

package hardware

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/gpufence/gpufence/enforcer/api"
)

// Options of [Run].
type Options struct {
	Dir       string        // with bin/, lib/, clients/, bench/, hardware/, simgpu/: dist, or a copy of those
	Simulated bool          // use the simulated GPU even if there is a real one
	GPU       string        // UUID of the one to use; "": NVML's first
	Quick     bool          // some rows of each suite, to see that all of them run
	Only      []string      // these suites; none: all
	Timeout   time.Duration // for everything; rows that it leaves no time for fail
	Python    string        // with PyTorch, CuPy or JAX; "": python3
	Story     io.Writer     // what happens, while it happens
	Sim       []string      // more flags of simgpud, where it is used
	SimNVML   string        // folder of its libnvidia-ml.so.1; "": simgpu
}

const mib = uint64(1) << 20

// session is a run under way.
type session struct {
	opts   Options
	report Report
	before []string // the environment that this was started with
	env    []string // that the driver is found by; in the environment while a run is under way
	tmp    string
	driver machine
}

// machine is what everything here depends on.
type machine struct {
	context uint64 // a context's size
	limit   uint64 // of the containers here
	missing string // why there can be no containers here, or ""
}

// parts are what runs, in order. A part's rows say themselves what is not possible.
var parts = []struct {
	name string
	run  func(*session, context.Context)
}{
	{"guesses", (*session).recordGuesses},
	{"limits", (*session).testLimits},
	{"coverage", (*session).testCoverage},
	{"programs", (*session).testPrograms},
	{"demo", (*session).testDemo},
	{"bench", (*session).testBench},
}

// Suites are the names of all.
func Suites() []string {
	var out []string
	for _, p := range parts {
		out = append(out, p.name)
	}
	return out
}

// errTime is the cause of the end of a run that took too long.
var errTime = errors.New("the time for the whole run is over")

// Run runs everything. Its error says that it could not begin or was interrupted; what failed is in the
// report, which is there in any case.
func Run(ctx context.Context, opts Options) (report *Report, err error) {
	if opts.Story == nil {
		opts.Story = io.Discard
	}
	dir, err := filepath.Abs(opts.Dir)
	if err != nil {
		return nil, fmt.Errorf("find %s: %w", opts.Dir, err)
	}
	opts.Dir, opts.Timeout, opts.Python = dir, cmp.Or(opts.Timeout, 9*time.Minute+30*time.Second), cmp.Or(opts.Python, "python3")
	for _, name := range []string{"bin/gpufenced", "bin/gpufence", "bin/simgpud", "lib/libgpufence.so", "clients/client", "clients/coverage", "hardware/probe", "hardware/libioctls.so"} {
		if _, err := os.Stat(filepath.Join(dir, name)); err != nil {
			return nil, fmt.Errorf("find %s in %s: run make build first", name, dir)
		}
	}
	for _, name := range opts.Only {
		if !slices.Contains(Suites(), name) {
			return nil, fmt.Errorf("choose suite %q: there are %s", name, strings.Join(Suites(), ", "))
		}
	}
	if os.Geteuid() != 0 {
		return nil, errors.New("make cgroups and end processes: this needs root")
	}
	s := &session{opts: opts, before: os.Environ(), report: Report{Version: api.BuildVersion, Began: time.Now(), Machine: map[string]any{}}}
	if s.tmp, err = os.MkdirTemp("", "gpufence-hardware-"); err != nil {
		return nil, fmt.Errorf("make a folder: %w", err)
	}
	defer func() { err = errors.Join(err, os.RemoveAll(s.tmp)) }()
	ctx, cancel := context.WithTimeoutCause(ctx, opts.Timeout, errTime)
	defer cancel()
	stop, err := s.findDriver(ctx)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, stop(context.WithoutCancel(ctx))) }()
	restore, err := setenv(s.env)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, restore()) }()
	fmt.Fprintf(opts.Story, "test-gpu: %s\n", s.report.Headline())
	for _, part := range parts {
		if len(opts.Only) > 0 && !slices.Contains(opts.Only, part.name) {
			continue
		}
		began := time.Now()
		part.run(s, ctx)
		if cause := context.Cause(ctx); cause != nil && !errors.Is(cause, errTime) {
			return &s.report, cause
		}
		fmt.Fprintf(opts.Story, "suite test-gpu %s: %.0f s\n", part.name, time.Since(began).Seconds())
	}
	s.report.Seconds = time.Since(s.report.Began).Seconds()
	return &s.report, nil
}

// path is a file of the folder.
func (s *session) path(name string) string { return filepath.Join(s.opts.Dir, name) }

// environ is this process's environment and what finds the driver.
func (s *session) environ(more ...string) []string {
	return append(append(os.Environ(), s.env...), more...)
}

// add takes a row and says it.
func (s *session) add(row Row) {
	s.report.Rows = append(s.report.Rows, row)
	mark := map[Verdict]string{Pass: "ok", Fail: "not ok", Impossible: "skip"}[row.Verdict]
	// The coverage's are too many to read while they come.
	if row.Suite != "coverage" || row.Verdict == Fail {
		fmt.Fprintf(s.opts.Story, "%s - %s: %s (%s)\n", mark, row.Suite, row.Name, cellText(cmp.Or(row.Detail, numbersText(row.Numbers))))
	}
}

// impossible is what a row's work gives when this machine lacks something.
type impossible string

func (e impossible) Error() string { return string(e) }

// row does the work of one row and judges it by its error. Work gets at most `most`, and what the whole run
// has left.
func (s *session) row(ctx context.Context, suite, name string, must bool, most time.Duration, work func(context.Context, map[string]any) (string, error)) Verdict {
	row := Row{Suite: suite, Name: name, Must: must, Verdict: Pass}
	began := time.Now()
	numbers := map[string]any{}
	err := context.Cause(ctx)
	if err == nil {
		inner, cancel := context.WithTimeout(ctx, most)
		row.Detail, err = work(inner, numbers)
		cancel()
	}
	var missing impossible
	switch {
	case errors.As(err, &missing):
		row.Verdict, row.Detail = Impossible, strings.Join(strings.Fields(err.Error()), " ")
	case err != nil:
		row.Verdict, row.Detail = Fail, strings.Join(strings.Fields(err.Error()), " ")
	}
	row.Numbers, row.Seconds = maps.Clone(numbers), time.Since(began).Seconds()
	s.add(row)
	return row.Verdict
}

// setenv changes this process's environment, which all that it starts inherits, and gives what puts it back.
func setenv(env []string) (restore func() error, err error) {
	var undo []func() error
	for _, kv := range env {
		k, v, _ := strings.Cut(kv, "=")
		was, had := os.LookupEnv(k)
		undo = append(undo, func() error {
			if had {
				return os.Setenv(k, was)
			}
			return os.Unsetenv(k)
		})
		if err := os.Setenv(k, v); err != nil {
			return nil, fmt.Errorf("set %s: %w", k, err)
		}
	}
	return func() error {
		var errs []error
		for _, f := range undo {
			errs = append(errs, f())
		}
		return errors.Join(errs...)
	}, nil
}
