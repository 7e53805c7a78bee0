// SPDX-License-Identifier: Apache-2.0

package act

import (
	"bytes"
	"errors"
	"fmt"
	"strconv"

	"golang.org/x/sys/unix"
)

// Watch looks at one process again and again, for the price of one system call a look. It is
// bound to the process and not to its pid: whoever gets the pid later is not seen through it.
type Watch struct {
	pid int
	fd  int
}

// Watch starts watching a process. If the start time of the process that is found is not this one,
// it is [ErrGone].
func (h *Host) Watch(pid int, start uint64) (*Watch, error) {
	fd, err := unix.Open(h.path(pid, "stat"), unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("watch process %d: %w", pid, gone(err))
	}
	w := &Watch{pid: pid, fd: fd}
	var buffer [statBytes]byte
	b, err := w.read(&buffer)
	if err == nil {
		var s stat
		if s, err = parseStat(b); err == nil && s.start != start {
			err = ErrGone
		}
	}
	if err != nil {
		return nil, fmt.Errorf("watch process %d: %w", pid, errors.Join(err, w.Close()))
	}
	return w, nil
}

// statBytes is more than a line of stat can have: 52 numbers and a name.
const statBytes = 2048

func (w *Watch) read(buffer *[statBytes]byte) ([]byte, error) {
	for {
		n, err := unix.Pread(w.fd, buffer[:], 0)
		if errors.Is(err, unix.EINTR) {
			continue
		}
		if err != nil {
			return nil, gone(err)
		}
		return buffer[:n], nil
	}
}

// Alive says that no sign of its end is to be seen: neither exiting, nor a zombie, nor gone. False
// says only that it is worth a closer look, since a first thread may end before the others.
func (w *Watch) Alive() bool {
	var buffer [statBytes]byte
	b, err := w.read(&buffer)
	if err != nil {
		return false
	}
	// Behind the name, which may hold anything: state ppid pgrp session tty_nr tpgid flags.
	end := bytes.LastIndexByte(b, ')')
	if end < 0 || len(b) < end+3 {
		return false
	}
	rest := b[end+2:]
	state := rest[0]
	for range 6 {
		next := bytes.IndexByte(rest, ' ')
		if next < 0 {
			return false
		}
		rest = rest[next+1:]
	}
	if next := bytes.IndexByte(rest, ' '); next >= 0 {
		rest = rest[:next]
	}
	flags, err := strconv.ParseUint(string(rest), 10, 64)
	return err == nil && flags&pfExiting == 0 && state != 'Z' && state != 'X'
}

// Close lets go.
func (w *Watch) Close() error {
	if w.fd < 0 {
		return nil
	}
	err := unix.Close(w.fd)
	w.fd = -1
	return err
}
