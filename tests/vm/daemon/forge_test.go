// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// forgeWord makes this test binary a container's first process that forges frees.
const forgeWord = "forge"

// forged are the handles whose frees are forged, from 1 on.
const forged = 60

// forge starts a client and forges frees of all that it gets, on the client's own open file: the gate looks for an object
// there only. It ends with the client.
func forge(ctx context.Context, program []string) error {
	cmd := exec.CommandContext(ctx, program[0], program[1:]...)
	cmd.Stderr = os.Stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if err := cmd.Start(); err != nil {
		return fmt.Errorf("start the client: %w", err)
	}
	ended := make(chan error, 1)
	go func() { ended <- cmd.Wait() }()
	driver := -1
	for {
		select {
		case err := <-ended:
			return err
		case <-time.After(10 * time.Millisecond):
		}
		if driver < 0 {
			var err error
			if driver, err = fileOf(cmd.Process.Pid, "/dev/nvidiactl"); err != nil {
				return err
			}
			continue // it may not have opened it yet
		}
		for handle := uint32(1); handle <= forged; handle++ {
			// Of this parent the stand-in frees nothing.
			request := [4]uint32{0xc1d00001, 0xdeaf, handle, 0}
			const free = 3<<30 | unsafe.Sizeof(request)<<16 | 'F'<<8 | 0x29
			if _, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(driver), free, uintptr(unsafe.Pointer(&request))); errno != 0 {
				return fmt.Errorf("forge a free: %w", errno)
			}
		}
	}
}

// fileOf is a process' open file, shared with it; -1 where it has none of that name.
func fileOf(pid int, name string) (int, error) {
	dir := filepath.Join("/proc", fmt.Sprint(pid), "fd")
	entries, err := os.ReadDir(dir)
	if err != nil {
		return -1, fmt.Errorf("list open files: %w", err)
	}
	for _, e := range entries {
		to, err := os.Readlink(filepath.Join(dir, e.Name()))
		if errors.Is(err, fs.ErrNotExist) {
			continue // it has closed it
		} else if err != nil {
			return -1, fmt.Errorf("look at an open file: %w", err)
		}
		if to != name {
			continue
		}
		var number int
		if _, err := fmt.Sscan(e.Name(), &number); err != nil {
			return -1, fmt.Errorf("read the number of an open file: %w", err)
		}
		process, err := unix.PidfdOpen(pid, 0)
		if err != nil {
			return -1, fmt.Errorf("open process %d: %w", pid, err)
		}
		got, err := unix.PidfdGetfd(process, number, 0)
		return got, errors.Join(err, unix.Close(process))
	}
	return -1, nil
}
