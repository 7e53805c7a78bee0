// SPDX-License-Identifier: Apache-2.0

package hardware

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/gpufence/gpufence/tests/simgpu/guesses"
)

// also is what is recorded beside the guesses.
var also = []struct{ id, check string }{
	{"module-growth", "what the first launch of a kernel takes"},
	{"vmm-granularity", "granularity of cuMemCreate; what addresses cost; memory that was released while it is mapped"},
	{"nvml-sums", "the device's use against the sum of its processes"},
	{"nvml-cost", "time of NVML's memory call and of its process lists, and of cuMemGetInfo"},
	{"out-of-memory", "the codes of a request for more than there is, and of the calls after it"},
	{"export-table", "cuGetExportTable for a table that nobody has"},
}

// probes by another way than running the probe of that name.
var recorders = map[string]func(*session, context.Context) (map[string]any, error){
	"ioctls":       (*session).recordIoctls,
	"denied-ioctl": (*session).recordDenied,
}

// recordGuesses fills one entry for each guess of the simulated GPU, and for what else is recorded.
func (s *session) recordGuesses(ctx context.Context) {
	all, err := guesses.All()
	s.row(ctx, "guesses", "the list of guesses", true, probeTime, func(context.Context, map[string]any) (string, error) {
		return fmt.Sprintf("%d guesses", len(all)), err
	})
	var answers []Answer
	for _, g := range all {
		answers = append(answers, Answer{ID: g.ID, Here: g.Here, Check: g.Check, Needs: g.Needs})
	}
	for _, a := range also {
		answers = append(answers, Answer{ID: a.id, Check: a.check})
	}
	for i := range answers {
		a := &answers[i]
		record, ok := recorders[a.ID]
		if !ok {
			record = func(s *session, ctx context.Context) (map[string]any, error) { return s.probe(ctx, a.ID, nil) }
		}
		// What others do on the GPU can spoil a probe, and what a driver does is no failure of ours.
		v := s.row(ctx, "guesses", a.ID, false, 2*probeTime, func(ctx context.Context, numbers map[string]any) (string, error) {
			seen, err := record(s, ctx)
			maps.Copy(numbers, seen)
			return "", err
		})
		row := &s.report.Rows[len(s.report.Rows)-1]
		a.Verdict, a.Seen, a.Why = v, row.Numbers, row.Detail
		row.Numbers = nil // they stand with the answer
	}
	s.report.Answers = answers
}

// made is a line of libioctls.so.
type made struct {
	step, path, number, class string
	count, bytes              uint64
}

func readIoctls(path string) ([]made, error) {
	f, err := os.Open(path)
	if errors.Is(err, os.ErrNotExist) {
		return nil, nil // it made none
	}
	if err != nil {
		return nil, fmt.Errorf("read ioctls: %w", err)
	}
	defer f.Close()
	var out []made
	lines := bufio.NewScanner(f)
	for lines.Scan() {
		w := strings.Fields(lines.Text())
		if len(w) != 6 {
			return nil, fmt.Errorf("read ioctls: %q has %d words, want 6", lines.Text(), len(w))
		}
		m := made{step: w[0], path: w[1], number: w[2], class: w[3]}
		var bad error
		if m.count, err = strconv.ParseUint(w[4], 10, 64); err != nil {
			bad = err
		}
		if m.bytes, err = strconv.ParseUint(w[5], 10, 64); err != nil {
			bad = err
		}
		if bad != nil {
			return nil, fmt.Errorf("read ioctls: %q: %w", lines.Text(), bad)
		}
		out = append(out, m)
	}
	return out, lines.Err()
}

// takeWays runs the probe of that name under libioctls.so.
func (s *session) takeWays(ctx context.Context, env ...string) ([]made, map[string]any, error) {
	out := filepath.Join(s.tmp, "ioctls")
	if err := os.Remove(out); err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, nil, fmt.Errorf("record ioctls: %w", err)
	}
	seen, err := s.probe(ctx, "take-ways", append([]string{"LD_PRELOAD=" + s.path("hardware/libioctls.so"), "IOCTLS_OUT=" + out}, env...))
	all, bad := readIoctls(out)
	return all, seen, errors.Join(err, bad)
}

const noIoctls = impossible("no ioctl of a device file of NVIDIA went through the C library: a simulated driver has none, and another may make them itself")

func (s *session) recordIoctls(ctx context.Context) (map[string]any, error) {
	all, seen, err := s.takeWays(ctx)
	if err == nil && len(all) == 0 {
		err = noIoctls
	}
	if err != nil {
		return seen, err
	}
	return summarizeIoctls(all), nil
}

// summarizeIoctls has what takes memory, by step, and how many others there were.
func summarizeIoctls(all []made) map[string]any {
	out := map[string]any{}
	for _, m := range all {
		if m.step == "before" {
			continue
		}
		if m.bytes > 0 {
			key := m.step + " takes"
			text := fmt.Sprintf("%s %s class %s x%d %d bytes", filepath.Base(m.path), m.number, m.class, m.count, m.bytes)
			if was, ok := out[key].(string); ok {
				text = was + "; " + text
			}
			out[key] = text
			continue
		}
		key := m.step + " others"
		text := fmt.Sprintf("%s %s/%s x%d", filepath.Base(m.path), m.number, m.class, m.count)
		if was, ok := out[key].(string); ok {
			text = was + "; " + text
		}
		out[key] = text
	}
	return out
}

// refusals are the ways in which a fence in the kernel could say no.
var refusals = []struct{ name, deny string }{{"ENOMEM", "12"}, {"EPERM", "1"}, {"status", "status"}}

func (s *session) recordDenied(ctx context.Context) (map[string]any, error) {
	all, seen, err := s.takeWays(ctx)
	if err != nil {
		return seen, err
	}
	if !slices.ContainsFunc(all, func(m made) bool { return m.step == "alloc" && m.bytes > 0 }) {
		return nil, impossible("no ioctl was seen that takes what cuMemAlloc takes, so none can be refused")
	}
	out := map[string]any{}
	for _, r := range refusals {
		_, seen, err := s.takeWays(ctx, "IOCTLS_DENY="+r.deny, "IOCTLS_DENY_STEP=alloc")
		if err != nil {
			// Also an answer: a refusal that ends the program.
			out[r.name] = err.Error()
			continue
		}
		for _, k := range []string{"alloc", "alloc_again", "create", "synchronize"} {
			out[r.name+" "+k] = seen[k]
		}
	}
	return out, nil
}
