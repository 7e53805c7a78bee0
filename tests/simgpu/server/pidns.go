// SPDX-License-Identifier: Apache-2.0

package server

import (
	"os"
	"path/filepath"
	"strconv"
	"strings"
)

// asSeenBy puts the pids that process caller sees in place of those that simgpud sees, and
// leaves out processes that are not in caller's pid namespace or one below it. A process that
// has gone has no pid in another namespace any more, so it is left out too.
func asSeenBy[R any](caller int, rows []R, pid func(*R) *uint32) []R {
	mine, err := os.Readlink("/proc/self/ns/pid")
	theirs, err2 := os.Readlink(nsPath(caller))
	if err != nil || err2 != nil || mine == theirs {
		return rows
	}
	depth := len(nsPIDs(caller))
	seen := rows[:0]
	for _, row := range rows {
		at := pid(&row)
		pids := nsPIDs(int(*at))
		if len(pids) < depth || !inNamespace(int(*at), theirs, len(pids)-depth) {
			continue
		}
		*at = pids[depth-1]
		seen = append(seen, row)
	}
	return seen
}

func nsPath(pid int) string { return filepath.Join("/proc", strconv.Itoa(pid), "ns/pid") }

// nsPIDs are the pids of a process in our namespace and in every one below, down to its own.
func nsPIDs(pid int) []uint32 {
	text, err := os.ReadFile(filepath.Join("/proc", strconv.Itoa(pid), "status"))
	if err != nil {
		return nil // gone
	}
	for line := range strings.Lines(string(text)) {
		list, ok := strings.CutPrefix(line, "NSpid:")
		if !ok {
			continue
		}
		var pids []uint32
		for _, word := range strings.Fields(list) {
			n, err := strconv.ParseUint(word, 10, 32)
			if err != nil {
				return nil
			}
			pids = append(pids, uint32(n))
		}
		return pids
	}
	return nil
}
