// SPDX-License-Identifier: Apache-2.0

// Package hardware runs on a machine with a GPU what everywhere else runs on the simulated one: what the
// shim covers, how programs of others keep to a limit, who is killed and how fast, the demo, the
// benchmarks. And it records what the real driver does wherever the simulated one guesses, so that it
// can be corrected.
//
// The driver is the one that the loader finds. Where there is none, [Run] starts a simulated one, uses it
// in exactly the same way, and says so in every place where a reader may look: that proves this package,
// and nothing about a GPU.
//
// It needs root, and nothing but what lies in its folder: no network, no container engine, no compiler.
// What a machine does not have (cgroups, PyTorch, runc, MIG) makes rows that say so.
package hardware
