// SPDX-License-Identifier: Apache-2.0

package quota

// Policy is node policy as far as limits depend on it. Its fields are the quota owner's.
type Policy struct{}

// Request is a container's limits as parsed, before it is known which GPUs they are for.
type Request struct{}
