// SPDX-License-Identifier: Apache-2.0

// Package daemon holds the built gpufenced to what it promises where there is only cgroup v2. It runs in the guest of
// tests/vm that has this machine's files as its root.
package daemon
