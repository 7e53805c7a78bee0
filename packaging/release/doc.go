// SPDX-License-Identifier: Apache-2.0

// Package release makes everything that is handed to users out of the source: deb, rpm, tar, the
// chart, the container image, SBOMs, checksums, and one bundle of them all for machines without a
// network.
//
// It promises: the same source, version, time and toolchain give the same bytes, wherever and by
// whomever they are built; nothing is fetched but Go modules that go.sum pins; a dependency whose
// licence is not known here is an error.
package release
