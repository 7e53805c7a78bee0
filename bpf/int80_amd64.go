// SPDX-License-Identifier: Apache-2.0

package bpf

// call32 makes a system call through the 32-bit door.
func call32(number, a, b, c uint32) int32

const has32 = true
