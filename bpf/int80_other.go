// SPDX-License-Identifier: Apache-2.0

//go:build !amd64

package bpf

func call32(_, _, _, _ uint32) int32 { return 0 }

const has32 = false
