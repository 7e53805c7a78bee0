// SPDX-License-Identifier: Apache-2.0

package server

import (
	"bytes"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/gpufence/gpufence/tests/simgpu/driver"
)

// owner tells who is at the other end of a device file: the process that connected, by the
// kernel's word, and what /proc says of it now. A process that has gone already is known by
// its pid alone.
func owner(conn *net.UnixConn) (driver.Owner, error) {
	raw, err := conn.SyscallConn()
	if err != nil {
		return driver.Owner{}, fmt.Errorf("read peer: %w", err)
	}
	var cred *unix.Ucred
	var credErr error
	if err := raw.Control(func(fd uintptr) {
		cred, credErr = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED)
	}); err != nil {
		return driver.Owner{}, fmt.Errorf("read peer: %w", err)
	}
	if credErr != nil {
		return driver.Owner{}, fmt.Errorf("read peer: %w", credErr)
	}
	proc := filepath.Join("/proc", strconv.Itoa(int(cred.Pid)))
	o := driver.Owner{ProcID: driver.ProcID{PID: int(cred.Pid)}, UID: int(cred.Uid)}
	if stat, err := os.ReadFile(filepath.Join(proc, "stat")); err == nil {
		o.Start, o.Command, err = parseStat(stat)
		if err != nil {
			return driver.Owner{}, fmt.Errorf("read %s/stat: %w", proc, err)
		}
	}
	if cgroup, err := os.ReadFile(filepath.Join(proc, "cgroup")); err == nil {
		o.Cgroup, o.Unified = parseCgroup(cgroup), parseUnified(cgroup)
	}
	return o, nil
}

var errStat = errors.New("not in the form of proc(5)")

// parseStat takes start time (field 22) and name (field 2, which may hold anything) from a
// process's stat file.
func parseStat(stat []byte) (start uint64, name string, err error) {
	open, end := bytes.IndexByte(stat, '('), bytes.LastIndexByte(stat, ')')
	if open < 0 || end < open {
		return 0, "", errStat
	}
	fields := bytes.Fields(stat[end+1:])
	if len(fields) < 20 {
		return 0, "", errStat
	}
	start, err = strconv.ParseUint(string(fields[19]), 10, 64)
	if err != nil {
		return 0, "", errStat
	}
	return start, string(stat[open+1 : end]), nil
}

// parseCgroup picks the path that tells most: that of the unified hierarchy, or, where that
// is the root because a hybrid system uses it for nothing, of the memory or pids controller,
// or any that is not the root.
func parseCgroup(text []byte) string {
	paths := map[string]string{}
	other := ""
	for line := range strings.Lines(string(text)) {
		part := strings.SplitN(strings.TrimSuffix(line, "\n"), ":", 3)
		if len(part) != 3 {
			continue
		}
		for controller := range strings.SplitSeq(part[1], ",") {
			paths[controller] = part[2]
		}
		if len(part[2]) > len(other) {
			other = part[2]
		}
	}
	for _, controller := range []string{"", "memory", "pids"} {
		if p := paths[controller]; p != "" && p != "/" {
			return p
		}
	}
	return other
}
