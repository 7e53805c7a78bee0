// SPDX-License-Identifier: Apache-2.0

// Package mounts finds and takes off what a test, or an engine that it ran, has left mounted.
package mounts

import (
	"bufio"
	"errors"
	"fmt"
	"os"
	"strings"

	"golang.org/x/sys/unix"
)

// Below lists what is mounted at or below a folder, the newest first.
func Below(dir string) ([]string, error) {
	f, err := os.Open("/proc/self/mountinfo")
	if err != nil {
		return nil, fmt.Errorf("list mounts below %s: %w", dir, err)
	}
	defer f.Close()
	var out []string
	lines := bufio.NewScanner(f)
	for lines.Scan() {
		if fields := strings.Fields(lines.Text()); len(fields) > 4 && (fields[4] == dir || strings.HasPrefix(fields[4], dir+"/")) {
			out = append([]string{fields[4]}, out...)
		}
	}
	if err := lines.Err(); err != nil {
		return nil, fmt.Errorf("list mounts below %s: %w", dir, err)
	}
	return out, nil
}

// Detach takes off what [Below] lists, and says what that was.
func Detach(dir string) ([]string, error) {
	left, err := Below(dir)
	if err != nil {
		return nil, err
	}
	var errs []error
	for _, m := range left {
		// EINVAL: it went with another one.
		if err := unix.Unmount(m, unix.MNT_DETACH); err != nil && !errors.Is(err, unix.EINVAL) {
			errs = append(errs, fmt.Errorf("unmount %s: %w", m, err))
		}
	}
	return left, errors.Join(errs...)
}
