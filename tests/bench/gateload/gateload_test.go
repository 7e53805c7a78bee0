// SPDX-License-Identifier: Apache-2.0

package gateload

import (
	"errors"
	"fmt"
	"os"
	"slices"
	"testing"
)

func TestMain(m *testing.M) {
	if len(os.Args) > 1 && os.Args[1] == Command {
		if err := Work(os.Args[2:]); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	if len(os.Args) > 1 && os.Args[1] == asks {
		if err := ask(os.Stdin, os.Stdout); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	os.Exit(m.Run())
}

// TestMeasure: every case has its samples, and what was measured was charged and denied; no times are judged.
func TestMeasure(t *testing.T) {
	c, err := Measure(t.Context(), 2)
	if err != nil && (errors.Is(err, ErrRefused) || os.Geteuid() != 0) && os.Getenv("GPUFENCE_MUST") != "1" {
		t.Skipf("SKIPPED: %v", err)
	}
	if err != nil {
		t.Fatal(err)
	}
	for name, samples := range map[string][]float64{"none": c.None, "empty": c.Empty, "unmanaged": c.Unmanaged, "managed": c.Managed, "charged": c.Charged, "denied": c.Denied} {
		if want := (2*calls/held + 9) / 10; len(samples) != want || slices.Min(samples) <= 0 {
			t.Errorf("%s: want %d samples, got %v", name, want, samples)
		}
	}
}

// What is measured has no say in what is taken.
func TestQuietest(t *testing.T) {
	var all samples
	for i := range 20 {
		all = append(all, sample{ns: float64(100 - i), control: float64((i + 7) % 20)})
	}
	if got := all.quietest(); !slices.Equal(got, []float64{87, 86}) {
		t.Errorf("got %v", got)
	}
	if got := all[:1].quietest(); len(got) != 1 {
		t.Errorf("of one sample there are %v", got)
	}
	if got := samples(nil).quietest(); len(got) != 0 {
		t.Errorf("of none there are %v", got)
	}
}

func TestWorkRefusesGarbage(t *testing.T) {
	for _, args := range [][]string{nil, {"alloc"}, {"alloc", "many"}, {"fly", "1"}, {"alloc", "1", "2"}} {
		if err := Work(args); err == nil {
			t.Errorf("%q was accepted", args)
		}
	}
}
