// SPDX-License-Identifier: Apache-2.0

package bpf

// `make bpf` brings the compiler and runs this. What it writes is committed, so that building gpufence
// needs none.
//go:generate ./generate
