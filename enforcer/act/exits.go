// SPDX-License-Identifier: Apache-2.0

package act

import (
	"errors"
	"fmt"

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
		n, err := unix.EpollWait(e.fd, events[:], 0)
		if errors.Is(err, unix.EINTR) {
			continue
		}
		if err != nil {
			return pids, fmt.Errorf("watch for exits: %w", err)
		}
		for _, ev := range events[:n] {
			pids = append(pids, int(ev.Fd))
		}
		if n < len(events) {
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
