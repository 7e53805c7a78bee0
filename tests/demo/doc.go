// SPDX-License-Identifier: Apache-2.0

// Package demo holds three containers to their GPU memory limits and checks every claim on the
// way: the same steps are `gpufence demo` and the end-to-end tests.
//
// It plays the part of containerd's CRI plugin: it writes bundles as that plugin writes them and
// runs them under the real runc through gpufence-runtime and its hooks, with gpufenced beside
// them, on a simulated GPU where the machine has no real one. What it claims of the GPU it takes
// from the GPU's side (the simulated driver's own history, or NVML on the host), never from
// gpufenced; what it claims of gpufenced's answers it reads through the gpufence command.
//
// On a simulated GPU a second part follows on a driver that limits cgroups itself, where what the first
// part had to kill is refused.
//
// Everything lies in one private folder and one private cgroup: processes, mounts, cgroups and
// files are gone when [Run] returns, also when its context was cancelled. The process that
// calls Run becomes the reaper of the containers it starts (PR_SET_CHILD_SUBREAPER), as
// containerd's shim is.
package demo
