// SPDX-License-Identifier: Apache-2.0

// Package foreign lets others judge the simulated driver and the shim: NVIDIA's headers, and clients
// that we did not write. What it needs is brought by `make test-clients`; none of it is in the repository.
package foreign
