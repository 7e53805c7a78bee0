// SPDX-License-Identifier: Apache-2.0

// Package vm boots guests under QEMU's emulator with kernels of Debian's archive, cgroup v2 only and every
// capability, and runs tests in them (package guest) that this machine's kernel may not allow. What plays the
// driver there is a stand-in (standin/nvidia.c) that takes real request layouts and counts what it was asked
// for. `make test-vm` runs it; it never uses KVM.
package vm
