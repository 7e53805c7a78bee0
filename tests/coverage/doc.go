// SPDX-License-Identifier: Apache-2.0

// Package coverage takes device memory by every entry point that the shim hooks, in every variant
// and found in every way that programs find it, under a real gpufenced on a simulated GPU, and
// judges by what that GPU says was held.
package coverage
