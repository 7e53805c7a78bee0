// SPDX-License-Identifier: Apache-2.0

package bpf

import (
	"bytes"
	"encoding/binary"
)

// ManagedMemory is a managed range that its container's limits leave no room for.
const ManagedMemory = EventKind(gateEventKindEV_UVM)

// Door is where it was refused.
type Door uint32

// DoorMmap is the one that refuses only where a policy enforces managed memory.
const DoorMmap = Door(gateDoorDOOR_MMAP)

// parseEvent reads an event as the programs write it.
func parseEvent(b []byte) (Event, bool) {
	if len(b) < 80 {
		return Event{}, false
	}
	u64 := func(at int) uint64 { return binary.NativeEndian.Uint64(b[at:]) }
	u32 := func(at int) uint32 { return binary.NativeEndian.Uint32(b[at:]) }
	comm, _, _ := bytes.Cut(b[64:80], []byte{0})
	return Event{Cgroup: u64(8), SizeBytes: u64(16), UsedBytes: u64(24), LimitBytes: u64(32), PID: int(u32(40)), TID: int(u32(44)),
		Kind: EventKind(u32(48)), Class: u32(52), Door: Door(u32(56)), Errno: int(u32(60)), Comm: string(comm)}, true
}
