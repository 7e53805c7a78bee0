// SPDX-License-Identifier: Apache-2.0

// Package oci fences a container by its OCI bundle: it is what gpufence-runtime does between
// an engine and runc, and what gpufence-hook does inside runc.
//
// Promises:
//
//   - Commands that create nothing (state, kill, delete, exec, features, ...) go to the
//     low-level runtime untouched: same arguments, environment and file descriptors, by exec,
//     with nothing written anywhere, whether gpufenced is up or not.
//   - config.json keeps every field that this package does not edit, byte for byte. It is
//     replaced by a rename, so whoever reads it sees the old or the new one, and is left alone
//     if anything fails.
//   - Rendering the same edits twice gives the same file as once.
//   - A failure is one sentence with a code, in the runtime's --log and on stderr, and exit
//     status 1; nothing is ever written to stdout. In mode observe a failure is only logged.
//   - What a container's image or user controls (root file system, env, annotations, mounts)
//     is read with bounds and without following a link out of its root.
//
// The package holds no lock and no state between two calls.
package oci
