// SPDX-License-Identifier: Apache-2.0

package act

import (
	"fmt"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Exits tells which of many processes have exited, for the price of one system call a look.
type Exits struct{ fd int }

// NewExits makes an empty set.
func NewExits() (*Exits, error) {
	fd, err := unix.EpollCreate1(unix.EPOLL_CLOEXEC)
	if err != nil {
		return nil, fmt.Errorf("watch for exits: %w", err)
	}
	return &Exits{fd: fd}, nil
}

// Add puts a process into the set; closing the pidfd takes it out again. It is reported once.
func (e *Exits) Add(p *Pidfd) error {
	ev := unix.EpollEvent{Events: unix.EPOLLIN | unix.EPOLLONESHOT, Fd: int32(p.pid)}
	if err := unix.EpollCtl(e.fd, unix.EPOLL_CTL_ADD, p.fd, &ev); err != nil {
		return fmt.Errorf("watch process %d for its exit: %w", p.pid, err)
	}
	return nil
}

// Look appends the pids of those that have exited since the last look to pids.
func (e *Exits) Look(pids []int) ([]int, error) {
	var events [64]unix.EpollEvent
	for {
		// It does not wait, so Go's scheduler need not know: that would wake its monitor each time.
		n, _, failed := unix.RawSyscall6(unix.SYS_EPOLL_PWAIT, uintptr(e.fd), uintptr(unsafe.Pointer(&events)), uintptr(len(events)), 0, 0, 0) //nolint:gosec // the kernel's array
		if failed == unix.EINTR {
			continue
		}
		if failed != 0 {
			return pids, fmt.Errorf("watch for exits: %w", failed)
		}
		for _, ev := range events[:n] {
			pids = append(pids, int(ev.Fd))
		}
		if int(n) < len(events) {
			return pids, nil
		}
	}
}

// Close lets go.
func (e *Exits) Close() error {
	if e.fd < 0 {
		return nil
	}
	err := unix.Close(e.fd)
	e.fd = -1
	return err
}
