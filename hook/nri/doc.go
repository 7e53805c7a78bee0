// SPDX-License-Identifier: Apache-2.0

// Package nri fences containers as an NRI plugin: the same plan as the runtime wrapper's, rendered
// into what NRI can adjust, without an edit of the engine's configuration.
//
// NRI is fail-open: while no plugin is connected, containers start as they are. What this package
// promises within that:
//   - An error of ours fails the container's creation with one sentence. A gpufenced that does not
//     answer is such an error, so that only an absent plugin lets anything through.
//   - Where the engine lets plugins validate, what other plugins made of our adjustment is compared
//     with it, and GPUs that they add are refused: nobody can undo a fence by coming later.
//   - Before a container starts, gpufenced must know it, or it does not start: hooks of ours that
//     somebody took away do not matter.
//   - After every connection the running containers are looked through, and those with a GPU that
//     did not come through gpufence, or lost their limits, are reported to gpufenced, whose policy
//     `unmanaged` says what becomes of them.
//   - It connects again for as long as it runs.
//
// No marker is believed: a container that the wrapper plans again finds the same. What NRI cannot
// see or do is in docs/nri.md.
package nri
