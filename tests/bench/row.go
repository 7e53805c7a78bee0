// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"text/tabwriter"
)

// measurement is one line that a benchmark program prints: the same work with the alternative
// (or with nothing of ours) and with gpufence, in one run, interleaved.
type measurement struct {
	Name     string    `json:"name"`
	Unit     string    `json:"unit"`
	Params   string    `json:"params"`
	Baseline []float64 `json:"baseline"`
	With     []float64 `json:"with"`
}

// row is one entry of dist/bench.json. Target is on the column that TargetOn names; a row
// without a target is information.
type row struct {
	Name     string   `json:"name"`
	Unit     string   `json:"unit"`
	Median   float64  `json:"median"`
	Baseline float64  `json:"baseline"`
	Added    float64  `json:"added"`
	Ratio    float64  `json:"ratio"`
	Target   *float64 `json:"target"`
	TargetOn string   `json:"target_on,omitempty"` // added, ratio or with
	Met      *bool    `json:"met"`
}

// target bounds a row from above. The numbers are the design's.
type target struct {
	bound float64
	on    string
}

func (m measurement) key() string {
	if m.Params == "" {
		return m.Name
	}
	return m.Name + " (" + m.Params + ")"
}

// summarize reduces the samples to medians: these machines are shared, and a mean follows the
// one sample that was preempted.
func summarize(m measurement, t *target) (row, error) {
	if len(m.Baseline) == 0 || len(m.With) == 0 {
		return row{}, fmt.Errorf("summarize %s: no samples", m.key())
	}
	r := row{Name: m.key(), Unit: m.Unit, Median: median(m.With), Baseline: median(m.Baseline)}
	r.Added = r.Median - r.Baseline
	if r.Baseline > 0 {
		r.Ratio = r.Median / r.Baseline
	}
	if t != nil {
		measured := r.Added
		switch t.on {
		case "ratio":
			measured = r.Ratio
		case "with":
			measured = r.Median
		}
		met := measured <= t.bound
		r.Target, r.TargetOn, r.Met = &t.bound, t.on, &met
	}
	return r, nil
}

func median(samples []float64) float64 {
	sorted := slices.Sorted(slices.Values(samples))
	middle := len(sorted) / 2
	if len(sorted)%2 == 1 {
		return sorted[middle]
	}
	return (sorted[middle-1] + sorted[middle]) / 2
}

// readMeasurements reads JSON lines as the benchmark programs print them.
func readMeasurements(from io.Reader) ([]measurement, error) {
	var all []measurement
	for dec := json.NewDecoder(from); ; {
		var m measurement
		switch err := dec.Decode(&m); {
		case errors.Is(err, io.EOF):
			return all, nil
		case err != nil:
			return nil, fmt.Errorf("read measurement %d: %w", len(all)+1, err)
		case m.Name == "" || m.Unit == "":
			return nil, fmt.Errorf("read measurement %d: no name or no unit", len(all)+1)
		}
		all = append(all, m)
	}
}

func printTable(to io.Writer, rows []row) error {
	w := tabwriter.NewWriter(to, 0, 8, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintln(w, "what\tunit\twithout\twith\tadded\tratio\ttarget\tmet\t")
	for _, r := range rows {
		bound, met := "-", "-"
		if r.Target != nil {
			bound, met = fmt.Sprintf("%s <= %.4g", r.TargetOn, *r.Target), "no"
			if *r.Met {
				met = "yes"
			}
		}
		fmt.Fprintf(w, "%s\t%s\t%.4g\t%.4g\t%.4g\t%.3g\t%s\t%s\t\n", r.Name, r.Unit, r.Baseline, r.Median, r.Added, r.Ratio, bound, met)
	}
	return w.Flush()
}

func writeJSON(path string, rows []row) error {
	text, err := json.MarshalIndent(rows, "", "  ")
	if err != nil {
		return fmt.Errorf("encode rows: %w", err)
	}
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return fmt.Errorf("create folder of %s: %w", path, err)
	}
	if err := os.WriteFile(path, append(text, '\n'), 0o644); err != nil {
		return fmt.Errorf("write rows: %w", err)
	}
	return nil
}
