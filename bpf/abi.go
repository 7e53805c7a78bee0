// SPDX-License-Identifier: Apache-2.0

package bpf

import (
	"strconv"
	"strings"
)

// ABI is what differs between branches of the driver in the requests that the gate reads. What it reads of
// them (class, pointer to the parameters, their flags, attributes and size, the heap call's group) lies at
// the same offsets in all of [OldestBranch] to [NewestBranch].
type ABI struct {
	// ParamsBytes is the size of NV_MEMORY_ALLOCATION_PARAMS, by which the driver's copy is recognised.
	ParamsBytes uint32
	// NVOS21Status and NVOS64Status are where the driver's answer lies.
	NVOS21Status, NVOS64Status uint32
	// NVOS64Bytes is the size of that request.
	NVOS64Bytes uint32
	// ExactSizes: a request whose size is another is refused by the driver itself.
	ExactSizes bool
	// Known: requests of this branch were recorded on a GPU (make test-gpu).
	Known bool
}

// OldestBranch and NewestBranch bound what the table was made from: the driver's published headers.
const (
	OldestBranch = 525
	NewestBranch = 595
)

// branches are those from which something is different; each holds until the next.
var branches = []struct {
	from int
	abi  ABI
}{
	{525, ABI{ParamsBytes: 120, NVOS21Status: 24, NVOS64Status: 36, NVOS64Bytes: 40}},
	{535, ABI{ParamsBytes: 120, NVOS21Status: 28, NVOS64Status: 40, NVOS64Bytes: 48}},
	{545, ABI{ParamsBytes: 128, NVOS21Status: 28, NVOS64Status: 40, NVOS64Bytes: 48}},
	{595, ABI{ParamsBytes: 128, NVOS21Status: 28, NVOS64Status: 40, NVOS64Bytes: 48, ExactSizes: true}},
}

// recorded are the branches that `make test-gpu` has recorded. It is empty until a GPU was at hand: every
// branch is unknown, and the gate only audits there unless the operator says otherwise.
var recorded = map[int]bool{}

// ForDriver is the ABI of a driver by its version ("570.133.20"). ok is false outside the table: then the
// newest one's sizes are assumed and both sizes of parameters are looked at.
func ForDriver(version string) (abi ABI, ok bool) {
	word, _, _ := strings.Cut(version, ".")
	branch, err := strconv.Atoi(word)
	if err != nil || branch < OldestBranch {
		abi = branches[0].abi
		abi.ParamsBytes = 0
		return abi, false
	}
	for _, b := range branches {
		if branch >= b.from {
			abi = b.abi
		}
	}
	abi.Known = recorded[branch]
	if branch > NewestBranch {
		abi.ParamsBytes = 0
		return abi, false
	}
	return abi, true
}
