// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"time"

	"github.com/gpufence/gpufence/tests/demo"
)

// createPairs is how often a container is created each way.
const createPairs = 30

// measureCreate is the start of a container with and without us, and what each part of us adds.
func measureCreate(ctx context.Context, dist string) ([]measurement, error) {
	times, err := demo.MeasureCreate(ctx, demo.Options{Dist: dist, Simulated: true}, createPairs)
	if err != nil {
		return nil, err
	}
	row := func(name, params string, without, with []time.Duration) measurement {
		return measurement{Name: name, Params: params, Unit: "ms", Baseline: milliseconds(without), With: milliseconds(with)}
	}
	return []measurement{
		row("runtime.create", "", times.Without, times.With),
		row("create.wrapper", "of that, gpufence-runtime and prepare", times.Parts.Nothing, times.Parts.Wrapper),
		row("create.gpu", "of that, what CDI mounts for the GPU", times.Without, times.Parts.GPU),
		row("create.mounts", "of that, what gpufence mounts", times.Parts.GPU, times.Parts.Mounts),
		row("create.anyhook", "of that, any hook at all", times.Parts.Mounts, times.Parts.AnyHook),
		row("create.hook", "of that, gpufence-hook and register", times.Parts.AnyHook, times.Parts.Hook),
	}, nil
}

func milliseconds(durations []time.Duration) []float64 {
	out := make([]float64, 0, len(durations))
	for _, d := range durations {
		out = append(out, float64(d)/float64(time.Millisecond))
	}
	return out
}
