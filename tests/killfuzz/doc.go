// SPDX-License-Identifier: Apache-2.0

// Package killfuzz kills processes that take device memory by every function that the shim hooks,
// wherever they are, and looks at what stays charged: nothing.
package killfuzz
