// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"io"

	"github.com/gpufence/gpufence/tests/bench/gateload"
)

// gateRounds is how often each is measured, side by side.
const gateRounds = 150

// measureGate is what the gate adds to an ioctl, on the carrier that this kernel takes; nothing where it takes none.
func measureGate(ctx context.Context, stderr io.Writer) ([]measurement, error) {
	c, err := gateload.Measure(ctx, gateRounds)
	if errors.Is(err, gateload.ErrRefused) {
		fmt.Fprintf(stderr, "bench: gate: NOT MEASURED: %v\n", err)
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("measure the gate: %w", err)
	}
	row := func(what string, baseline, with []float64) measurement {
		return measurement{Name: "gate.ioctl", Params: what + ", " + gateload.Carrier, Unit: "ns", Baseline: baseline, With: with}
	}
	return []measurement{
		row("empty program over none", c.None, c.Empty),
		row("unmanaged over empty program", c.Empty, c.Unmanaged),
		row("managed over empty program", c.Empty, c.Managed),
		row("charged over empty program", c.Empty, c.Charged),
		row("denied over empty program", c.Empty, c.Denied),
	}, nil
}
