// SPDX-License-Identifier: Apache-2.0

package act

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
)

// Moves is the kernel's lock on moves of processes between cgroups (cgroup_threadgroup_rwsem), one for all hierarchies.
// Whoever takes it after a while in which nobody did waits for a grace period of RCU, some milliseconds in which a
// container's start does nothing else; whoever comes within a grace period after another does not wait. The kernel's mount
// option favordynmods keeps it so for good, at the price of every fork.
//
// It may be used from several goroutines.
type Moves struct {
	host *Host

	mu    sync.Mutex // held over one taking of the lock
	at    []byte     // /proc/self/cgroup when it was looked at
	procs string     // cgroup.procs of the cgroup that this process is in
}

// Moves is of this host.
func (h *Host) Moves() *Moves { return &Moves{host: h} }

// Hasten takes the lock, and returns when it was taken: the moves of the next milliseconds need not wait for that. It moves
// this process to the cgroup that it is in, which changes nothing. Where another call is at it, it returns at once.
func (m *Moves) Hasten() error {
	if !m.mu.TryLock() {
		return nil
	}
	defer m.mu.Unlock()
	at, err := os.ReadFile(m.host.path(m.host.self, "cgroup"))
	if err != nil {
		return fmt.Errorf("read the own cgroup: %w", gone(err))
	}
	if !bytes.Equal(at, m.at) {
		if m.procs, err = m.host.ownProcs(); err != nil {
			return err
		}
		m.at = at
	}
	f, err := os.OpenFile(m.procs, os.O_WRONLY, 0)
	if err != nil {
		return fmt.Errorf("take the lock on moves between cgroups: %w", err)
	}
	_, err = f.WriteString("0") // as the kernel reads it, who writes
	if err = errors.Join(err, f.Close()); err != nil {
		return fmt.Errorf("take the lock on moves between cgroups: %w", err)
	}
	return nil
}

// ownProcs finds the cgroup.procs that lists this process. What /proc says is not enough: in a cgroup namespace it can name
// another one below the host's mount, and whoever wrote there would move.
func (h *Host) ownProcs() (string, error) {
	paths, err := h.paths(h.self)
	if err != nil {
		return "", fmt.Errorf("find the own cgroup: %w", err)
	}
	for _, hierarchy := range preference {
		dir, err := h.dir(hierarchy, paths[hierarchy])
		if err != nil {
			continue
		}
		file := filepath.Join(dir, "cgroup.procs")
		listed, err := os.ReadFile(file)
		if err == nil && slices.Contains(strings.Fields(string(listed)), strconv.Itoa(h.self)) {
			return file, nil
		}
	}
	return "", fmt.Errorf("find the own cgroup: none below %v lists this process: %w", h.mounts, ErrNoCgroup)
}
