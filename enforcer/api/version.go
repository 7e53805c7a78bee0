// SPDX-License-Identifier: Apache-2.0

package api

// BuildVersion is what every program of gpufence reports; the build sets it by -ldflags -X.
var BuildVersion = "dev"

// APIVersion is the path prefix of this protocol, without slashes.
const APIVersion = "v1"

// PathMetrics is beside the versioned paths, named as everybody names it.
const PathMetrics = "/metrics"

// MaxRequestBytes bounds the body of a request, MaxResponseBytes what the client reads of an
// answer (a node with thousands of containers), MaxEventBytes one line of /v1/events.
const (
	MaxRequestBytes  = 1 << 20
	MaxResponseBytes = 64 << 20
	MaxEventBytes    = 1 << 20
)
