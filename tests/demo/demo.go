// SPDX-License-Identifier: Apache-2.0

package demo

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"text/tabwriter"
	"time"
)

// Options of [Run].
type Options struct {
	Dist      string        // folder with bin/, lib/, simgpu/ and clients/
	Lag       time.Duration // how old the simulated NVML's answers are
	Simulated bool          // use the simulated GPU even if there is a real one
	Delivery  string        // how the shim gets into containers; empty: as by default
	Story     io.Writer     // what happens, while it happens; nil: nothing

	driver string // version of the simulated one; "": as by default
}

// Step is one claim and whether it held.
type Step struct {
	Name    string            `json:"name"`
	Held    bool              `json:"held"`
	Detail  string            `json:"detail"`            // what was seen, or why it did not hold
	Numbers map[string]uint64 `json:"numbers,omitempty"` // units are in the names
}

// Result is a whole run.
type Result struct {
	GPU     string  `json:"gpu"`
	Steps   []Step  `json:"steps"`
	Seconds float64 `json:"seconds"`
}

// Held says whether every step did.
func (r Result) Held() bool { return len(r.Steps) > 0 && r.count() == len(r.Steps) }

func (r Result) count() int {
	n := 0
	for _, s := range r.Steps {
		if s.Held {
			n++
		}
	}
	return n
}

// cleanupTime bounds the clean-up, also after the caller's context has ended.
const cleanupTime = 30 * time.Second

// Run plays the demo. Its error says that it could not be played (not root, something is
// missing, interrupted); a claim that did not hold is in the result. Whatever happens, nothing
// that it made is left.
func Run(ctx context.Context, opts Options) (result Result, err error) {
	if opts.Story == nil {
		opts.Story = io.Discard
	}
	started := time.Now()
	if err := check(opts); err != nil {
		return Result{}, err
	}
	r := &runner{opts: opts}
	if err := r.on(ctx, opts, "", r.play); err != nil {
		return Result{}, err
	}
	gpu := r.node.describe()
	if r.node.real == nil {
		newer := opts
		newer.driver = limitingDriver
		if err := r.on(ctx, newer, "g: ", r.playDriver); err != nil {
			return Result{}, err
		}
	}
	result = Result{GPU: gpu, Steps: r.steps, Seconds: time.Since(started).Seconds()}
	result.print(opts.Story)
	return result, nil
}

// on plays a part on a node of its own, of which nothing is left then.
func (r *runner) on(ctx context.Context, opts Options, part string, play func(context.Context) error) (err error) {
	if r.node, err = newNode(opts); err != nil {
		return err
	}
	before := len(r.steps)
	err = play(ctx)
	interrupted := ctx.Err()
	if interrupted == nil && (err != nil || r.failed(before)) {
		r.explain(ctx)
	}
	cleanup, cancel := context.WithTimeout(context.WithoutCancel(ctx), cleanupTime)
	defer cancel()
	left := r.node.close(cleanup)
	switch {
	case interrupted != nil && left == nil:
		return interrupted
	case interrupted != nil:
		return fmt.Errorf("%w, and not everything could be removed: %w", interrupted, left)
	case err != nil:
		return errors.Join(fmt.Errorf("play the demo: %w", err), left)
	}
	r.step(part+"nothing is left: no process, mount, cgroup or file", func() (string, map[string]uint64, error) {
		return "all removed", nil, left
	})
	return nil
}

// runner plays the steps on a node.
type runner struct {
	opts  Options
	node  *node
	steps []Step

	polite, neighbour, bypass *container
	shrink                    chan shrinking // of `gpufence set` in the background
}

func (r *runner) tell(format string, args ...any) {
	fmt.Fprintf(r.opts.Story, format+"\n", args...)
}

// failed says whether a step from that one on did not hold so far.
func (r *runner) failed(from int) bool {
	return slices.ContainsFunc(r.steps[from:], func(s Step) bool { return !s.Held })
}

// explain tells what gpufenced says happened: the first thing that one asks after a failure.
func (r *runner) explain(ctx context.Context) {
	r.tell("\nNot everything held. The journal:")
	if out, err := r.node.run(ctx, r.node.dist("bin/gpufence"), "--socket", r.node.socket, "events"); err != nil {
		r.tell("   %v", err)
	} else {
		r.tell("%s", out)
	}
	for _, p := range []*process{r.node.simgpud, r.node.gpufenced} {
		if p != nil {
			r.tell("The end of %s's log: %s", p.name, p.tail())
		}
	}
}

// step checks one claim.
func (r *runner) step(name string, check func() (detail string, numbers map[string]uint64, err error)) {
	s := Step{Name: name}
	var err error
	s.Detail, s.Numbers, err = check()
	s.Held = err == nil
	if err != nil {
		s.Detail = strings.Join(strings.Fields(err.Error()), " ")
	}
	r.steps = append(r.steps, s)
	mark := "held"
	if !s.Held {
		mark = "NOT HELD"
	}
	r.tell("   %s: %s (%s)", mark, name, s.Detail)
}

// chapter is the letter before a claim; claims without one come last.
func chapter(s Step) string {
	letter, _, ok := strings.Cut(s.Name, ": ")
	if !ok || len(letter) != 1 {
		return "~"
	}
	return letter
}

func (r Result) print(w io.Writer) {
	fmt.Fprintln(w)
	t := tabwriter.NewWriter(w, 0, 8, 2, ' ', 0)
	fmt.Fprintln(t, "HELD\tCLAIM\tNUMBERS")
	sorted := slices.Clone(r.Steps)
	slices.SortStableFunc(sorted, func(a, b Step) int { return cmp.Compare(chapter(a), chapter(b)) })
	for _, s := range sorted {
		held := "yes"
		if !s.Held {
			held = "NO"
		}
		fmt.Fprintf(t, "%s\t%s\t%s\n", held, s.Name, numbers(s.Numbers))
	}
	_ = t.Flush() // the writer below is a terminal or a buffer; what matters is in the result
	fmt.Fprintf(w, "\ndemo: %d of %d held\n", r.count(), len(r.Steps))
}
