// SPDX-License-Identifier: Apache-2.0

// Package daemon holds the built gpufenced to what it promises where there is only cgroup v2 and where the kernel takes
// the gate. It runs in the guest of tests/vm that has this machine's files as its root. The stand-in driver takes the
// requests, and a client makes the simulated GPU, which gpufenced looks at, hold what the stand-in holds.
package daemon
