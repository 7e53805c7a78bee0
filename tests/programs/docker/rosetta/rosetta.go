// SPDX-License-Identifier: Apache-2.0

// Package rosetta stands in for the module of that name, which not every module proxy has: Docker's client asks it
// whether the client runs under Apple's translation of amd64, in order to say so in `docker version`. On Linux it never does.
package rosetta

// Enabled says whether this process is translated.
func Enabled() bool { return false }
