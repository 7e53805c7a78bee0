// SPDX-License-Identifier: Apache-2.0

package hardware

import (
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"
)

// Verdict is how a row ended.
type Verdict string

// What there is. Impossible says that this machine lacks something, never that something went wrong.
const (
	Pass       Verdict = "pass"
	Fail       Verdict = "fail"
	Impossible Verdict = "not possible here"
)

// Row is one claim.
type Row struct {
	Suite   string         `json:"suite"`
	Name    string         `json:"name"`
	Must    bool           `json:"must"` // a failure of it fails the run
	Verdict Verdict        `json:"verdict"`
	Detail  string         `json:"detail,omitempty"` // what was seen, or why not
	Numbers map[string]any `json:"numbers,omitempty"`
	Seconds float64        `json:"seconds"`
}

// Answer is what this driver does about a guess of the simulated one, or about something else that is worth
// knowing (then Here is empty).
type Answer struct {
	ID      string         `json:"id"`
	Here    string         `json:"simulated,omitempty"` // what the simulated GPU does
	Check   string         `json:"check"`
	Needs   string         `json:"needs,omitempty"`
	Verdict Verdict        `json:"verdict"` // pass: seen
	Why     string         `json:"why,omitempty"`
	Seen    map[string]any `json:"seen,omitempty"`
}

// Report is a whole run.
type Report struct {
	Version   string         `json:"version"`
	Began     time.Time      `json:"began"`
	Seconds   float64        `json:"seconds"`
	Simulated bool           `json:"simulated"` // no real GPU was there, or was asked for
	Machine   map[string]any `json:"machine"`
	Rows      []Row          `json:"rows"`
	Answers   []Answer       `json:"answers"`
}

// Failed are the rows that fail the run.
func (r *Report) Failed() []Row {
	var out []Row
	for _, row := range r.Rows {
		if row.Must && row.Verdict == Fail {
			out = append(out, row)
		}
	}
	return out
}

// Count is how many rows ended so.
func (r *Report) Count(v Verdict) int {
	n := 0
	for _, row := range r.Rows {
		if row.Verdict == v {
			n++
		}
	}
	return n
}

// noGPU is what a reader must not overlook.
const noGPU = "NO REAL GPU: everything here ran on the simulated GPU and says nothing about a real driver"

// Headline says on what it ran.
func (r *Report) Headline() string {
	if r.Simulated {
		return noGPU
	}
	return fmt.Sprintf("on %v, driver %v", r.Machine["name"], r.Machine["driver"])
}

// Summary is the last line for people.
func (r *Report) Summary() string {
	s := fmt.Sprintf("%d passed, %d failed, %d not possible here", r.Count(Pass), r.Count(Fail), r.Count(Impossible))
	if n := len(r.Failed()); n > 0 {
		s += fmt.Sprintf("; %d of those that must hold did not", n)
	}
	return s
}

// cellText keeps a table's line a line.
func cellText(s string) string {
	return strings.ReplaceAll(strings.Join(strings.Fields(s), " "), "|", "/")
}

func numbersText(numbers map[string]any) string {
	var out []string
	for _, k := range slices.Sorted(maps.Keys(numbers)) {
		text := fmt.Sprint(numbers[k])
		if n, err := strconv.ParseUint(text, 10, 64); err == nil && n >= 1<<20 && n%(1<<20) == 0 && strings.Contains(k, "bytes") {
			text = fmt.Sprintf("%d MiB", n>>20)
		}
		out = append(out, k+" "+text)
	}
	return strings.Join(out, ", ")
}

// Markdown is the report for people.
func (r *Report) Markdown(w io.Writer) error {
	var b strings.Builder
	fmt.Fprintf(&b, "# gpufence on hardware\n\n**%s.**\n\n%s. %s, %.0f s, version %s.\n\n", r.Headline(), r.Summary(), r.Began.UTC().Format(time.RFC3339), r.Seconds, r.Version)
	fmt.Fprintf(&b, "## Machine\n\n| what | value |\n| --- | --- |\n")
	for _, k := range slices.Sorted(maps.Keys(r.Machine)) {
		fmt.Fprintf(&b, "| %s | %s |\n", cellText(k), cellText(fmt.Sprint(r.Machine[k])))
	}
	suites := []string{}
	for _, row := range r.Rows {
		if !slices.Contains(suites, row.Suite) {
			suites = append(suites, row.Suite)
		}
	}
	for _, suite := range suites {
		fmt.Fprintf(&b, "\n## %s\n\n| row | must | verdict | seen, or why not | numbers |\n| --- | --- | --- | --- | --- |\n", suite)
		for _, row := range r.Rows {
			if row.Suite != suite {
				continue
			}
			verdict, must := string(row.Verdict), ""
			if row.Verdict == Fail {
				verdict = "**fail**"
			}
			if row.Must {
				must = "yes"
			}
			fmt.Fprintf(&b, "| %s | %s | %s | %s | %s |\n", cellText(row.Name), must, verdict, cellText(row.Detail), cellText(numbersText(row.Numbers)))
		}
	}
	for _, part := range []struct {
		title, about string
		guess        bool
	}{
		{"What the simulated GPU guesses", "By the ids of docs/simulated-gpu.md.", true},
		{"Also recorded", "Not guessed by the simulated GPU, and worth knowing.", false},
	} {
		fmt.Fprintf(&b, "\n## %s\n\n%s\n\n| id | the simulated GPU | this driver |\n| --- | --- | --- |\n", part.title, part.about)
		for _, a := range r.Answers {
			if part.guess != (a.Here != "") {
				continue
			}
			here := a.Here
			if here == "" {
				here = a.Check
			}
			seen := numbersText(a.Seen)
			if a.Verdict != Pass {
				seen = strings.TrimSuffix(string(a.Verdict)+": "+a.Why+"; "+seen, "; ")
			}
			fmt.Fprintf(&b, "| %s | %s | %s |\n", a.ID, cellText(here), cellText(seen))
		}
	}
	if _, err := io.WriteString(w, b.String()); err != nil {
		return fmt.Errorf("write report: %w", err)
	}
	return nil
}

// Write puts gpu-report.md and gpu-report.json into a folder, and gives the first one's path.
func (r *Report) Write(dir string) (string, error) {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return "", fmt.Errorf("make a folder for the report: %w", err)
	}
	text, err := json.MarshalIndent(r, "", "  ")
	if err != nil {
		return "", fmt.Errorf("encode report: %w", err)
	}
	if err := os.WriteFile(filepath.Join(dir, "gpu-report.json"), append(text, '\n'), 0o644); err != nil {
		return "", fmt.Errorf("write report: %w", err)
	}
	var md strings.Builder
	if err := r.Markdown(&md); err != nil {
		return "", err
	}
	path := filepath.Join(dir, "gpu-report.md")
	if err := os.WriteFile(path, []byte(md.String()), 0o644); err != nil {
		return "", fmt.Errorf("write report: %w", err)
	}
	return path, nil
}
