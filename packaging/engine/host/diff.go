// SPDX-License-Identifier: Apache-2.0

package host

import (
	"fmt"
	"io"
	"strings"

	"github.com/gpufence/gpufence/packaging/engine"
)

// around is how many equal lines are shown around a change.
const around = 3

// Diff prints what a change does as a patch that patch(1) takes.
func Diff(w io.Writer, c engine.Change) {
	if !c.Differs() {
		return
	}
	from, to := c.Path, c.Path
	if c.Before == nil {
		from = "/dev/null"
	}
	if c.After == nil {
		to = "/dev/null"
	}
	a, b := lines(c.Before), lines(c.After)
	head := 0
	for head < len(a) && head < len(b) && a[head] == b[head] {
		head++
	}
	tail := 0
	for tail < len(a)-head && tail < len(b)-head && a[len(a)-1-tail] == b[len(b)-1-tail] {
		tail++
	}
	start, rest := max(0, head-around), min(tail, around)
	endA, endB := len(a)-tail, len(b)-tail
	fmt.Fprintf(w, "--- %s\n+++ %s\n", from, to)
	if len(a) == 0 && len(b) == 0 {
		return
	}
	fmt.Fprintf(w, "@@ -%s +%s @@\n", hunk(start, endA+rest-start), hunk(start, endB+rest-start))
	show := func(mark string, list []string) {
		for _, line := range list {
			fmt.Fprint(w, mark, line)
			if !strings.HasSuffix(line, "\n") {
				fmt.Fprint(w, "\n\\ No newline at end of file\n")
			}
		}
	}
	show(" ", a[start:head])
	show("-", a[head:endA])
	show("+", b[head:endB])
	show(" ", a[endA:endA+rest])
}

func hunk(start, n int) string {
	if n == 0 {
		return fmt.Sprintf("%d,0", start)
	}
	return fmt.Sprintf("%d,%d", start+1, n)
}

// lines splits a text behind its line ends.
func lines(text []byte) []string {
	if len(text) == 0 {
		return nil
	}
	list := strings.SplitAfter(string(text), "\n")
	if list[len(list)-1] == "" {
		list = list[:len(list)-1]
	}
	return list
}
