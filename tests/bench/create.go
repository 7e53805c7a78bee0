// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"
	"time"

	"github.com/gpufence/gpufence/tests/demo"
)

// createPairs is how often a container is created each way.
const createPairs = 30

// measureCreate is the start of a container with and without us.
func measureCreate(ctx context.Context, dist string) (measurement, error) {
	times, err := demo.MeasureCreate(ctx, demo.Options{Dist: dist, Simulated: true}, createPairs)
	if err != nil {
		return measurement{}, fmt.Errorf("measure create: %w", err)
	}
	return measurement{Name: "runtime.create", Unit: "ms", Baseline: milliseconds(times.Without), With: milliseconds(times.With)}, nil
}

func milliseconds(durations []time.Duration) []float64 {
	out := make([]float64, 0, len(durations))
	for _, d := range durations {
		out = append(out, float64(d)/float64(time.Millisecond))
	}
	return out
}
