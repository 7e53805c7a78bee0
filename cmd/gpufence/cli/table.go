// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"fmt"
	"io"
	"strconv"
	"strings"
	"text/tabwriter"

	"github.com/gpufence/gpufence/enforcer/api"
	"github.com/gpufence/gpufence/enforcer/quota"
)

// table prints rows in columns. A cell never breaks the row: what comes from containers (names,
// reasons) is made printable first.
type table struct{ w *tabwriter.Writer }

func newTable(w io.Writer, header ...string) *table {
	t := &table{tabwriter.NewWriter(w, 0, 8, 2, ' ', 0)}
	if len(header) > 0 {
		t.row(header...)
	}
	return t
}

func (t *table) row(cells ...string) {
	for i, c := range cells {
		if c = printable(c); c == "" {
			c = "-"
		}
		cells[i] = c
	}
	fmt.Fprintln(t.w, strings.Join(cells, "\t"))
}

func (t *table) flush() error {
	if err := t.w.Flush(); err != nil {
		return fmt.Errorf("print table: %w", err)
	}
	return nil
}

// printable keeps a terminal safe from what a tenant chose.
func printable(s string) string {
	return strings.Map(func(r rune) rune {
		if !strconv.IsPrint(r) {
			return '?'
		}
		return r
	}, s)
}

// limit is a byte limit as people read it.
func limit(b uint64) string {
	if b == quota.Unlimited {
		return "max"
	}
	return quota.HumanBytes(b)
}

// cgroupLimit is a byte limit as a cgroup file has it.
func cgroupLimit(b uint64) string {
	if b == quota.Unlimited {
		return "max"
	}
	return strconv.FormatUint(b, 10)
}

// containerName is the shortest name that a person knows a container by and that other commands
// take.
func containerName(c api.Container) string {
	switch {
	case c.Name != "" && c.Pod.Name != "":
		return c.Pod.Name + "/" + c.Name
	case c.Name != "":
		return c.Name
	default:
		return shortID(c.Key.ID)
	}
}

func shortID(id string) string {
	if len(id) > 12 {
		return id[:12]
	}
	return id
}

// fenceState is a fence in a few letters: watch, shim:seen, shim:absent(static).
func fenceState(f api.Fence) string {
	s := f.State
	if f.Why != "" {
		s += "(" + f.Why + ")"
	}
	return s
}

func fences(fs []api.Fence) string {
	var out []string
	for _, f := range fs {
		out = append(out, f.Name+":"+fenceState(f))
	}
	return strings.Join(out, " ")
}

// eventCounts are the counters of memory.events in their order, those that are not 0.
func eventCounts(e api.Events, all bool) []string {
	var out []string
	for _, c := range []struct {
		name  string
		count uint64
	}{{"high", e.High}, {"max", e.Max}, {"device", e.Device}, {"over_max", e.OverMax}, {"oom", e.OOM}, {"oom_kill", e.OOMKill}, {"oom_group_kill", e.OOMGroupKill}} {
		if c.count > 0 || all {
			out = append(out, fmt.Sprintf("%s=%d", c.name, c.count))
		}
	}
	return out
}

// size is a number of bytes that may be old.
func size(b uint64, known bool) string {
	if !known {
		return quota.HumanBytes(b) + "?"
	}
	return quota.HumanBytes(b)
}
