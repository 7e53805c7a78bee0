// SPDX-License-Identifier: Apache-2.0

package demo

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// mount is a line of mountinfo, as far as it matters here.
type mount struct{ point, kind string }

// mounts lists what is mounted in our mount namespace.
func mounts() ([]mount, error) {
	f, err := os.Open("/proc/self/mountinfo")
	if err != nil {
		return nil, fmt.Errorf("list mounts: %w", err)
	}
	defer f.Close()
	var out []mount
	lines := bufio.NewScanner(f)
	for lines.Scan() {
		before, after, ok := strings.Cut(lines.Text(), " - ")
		fields := strings.Fields(before)
		if !ok || len(fields) < 5 {
			return nil, fmt.Errorf("list mounts: cannot read %q", lines.Text())
		}
		kind, _, _ := strings.Cut(after, " ")
		point, err := strconv.Unquote(`"` + strings.ReplaceAll(fields[4], `"`, `\"`) + `"`)
		if err != nil {
			return nil, fmt.Errorf("list mounts: cannot read %q: %w", fields[4], err)
		}
		out = append(out, mount{point, kind})
	}
	if err := lines.Err(); err != nil {
		return nil, fmt.Errorf("list mounts: %w", err)
	}
	return out, nil
}

// mountsBelow are the mount points in a folder, the deepest first.
func mountsBelow(dir string) ([]string, error) {
	all, err := mounts()
	if err != nil {
		return nil, err
	}
	var out []string
	for _, m := range all {
		if m.point == dir || strings.HasPrefix(m.point, dir+"/") {
			out = append(out, m.point)
		}
	}
	slices.Reverse(out)
	return out, nil
}

// cgroupDirs are the folders that a cgroup path has in the hierarchies, v1 and v2, those that
// exist.
func cgroupDirs(path string) ([]string, error) {
	all, err := mounts()
	if err != nil {
		return nil, err
	}
	var out []string
	for _, m := range all {
		if m.kind != "cgroup" && m.kind != "cgroup2" {
			continue
		}
		dir := filepath.Join(m.point, path)
		if _, err := os.Stat(dir); err == nil && !slices.Contains(out, dir) {
			out = append(out, dir)
		}
	}
	return out, nil
}

// cgroupProcesses are the processes below cgroup folders.
func cgroupProcesses(dirs []string) ([]int, error) {
	var pids []int
	for _, dir := range dirs {
		err := filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
			if err != nil {
				return err
			}
			if d.IsDir() || d.Name() != "cgroup.procs" {
				return nil
			}
			text, err := os.ReadFile(path)
			if err != nil {
				return err
			}
			for _, word := range strings.Fields(string(text)) {
				pid, err := strconv.Atoi(word)
				if err != nil {
					return fmt.Errorf("read %s: %w", path, err)
				}
				if !slices.Contains(pids, pid) {
					pids = append(pids, pid)
				}
			}
			return nil
		})
		// A cgroup that went away while it was looked at holds nobody.
		if err != nil && !errors.Is(err, fs.ErrNotExist) && !errors.Is(err, unix.ENODEV) {
			return nil, fmt.Errorf("list processes: %w", err)
		}
	}
	return pids, nil
}

// killProcess ends a process that was found in a cgroup of ours, if it is still there.
func killProcess(pid int, still func(pid int) bool) error {
	fd, err := unix.PidfdOpen(pid, 0)
	if errors.Is(err, unix.ESRCH) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("open process %d: %w", pid, err)
	}
	defer func() { _ = unix.Close(fd) }() // nothing is written through it
	// The descriptor is held: whoever has the pid now keeps it until we have looked.
	if !still(pid) {
		return nil
	}
	if err := unix.PidfdSendSignal(fd, unix.SIGKILL, nil, 0); err != nil && !errors.Is(err, unix.ESRCH) {
		return fmt.Errorf("kill process %d: %w", pid, err)
	}
	return nil
}

// inCgroup says whether a process is below a cgroup path in any hierarchy.
func inCgroup(pid int, path string) bool {
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/cgroup", pid))
	if err != nil {
		return false // it is gone
	}
	for _, line := range strings.Split(string(text), "\n") {
		parts := strings.SplitN(line, ":", 3)
		if len(parts) == 3 && (parts[2] == path || strings.HasPrefix(parts[2], path+"/")) {
			return true
		}
	}
	return false
}

// removeCgroup kills what is below a cgroup path and removes it from every hierarchy.
func removeCgroup(ctx context.Context, path string) error {
	for {
		dirs, err := cgroupDirs(path)
		if err != nil {
			return err
		}
		if len(dirs) == 0 {
			return nil
		}
		pids, err := cgroupProcesses(dirs)
		if err != nil {
			return err
		}
		for _, pid := range pids {
			if err := killProcess(pid, func(pid int) bool { return inCgroup(pid, path) }); err != nil {
				return err
			}
		}
		var last error
		for _, dir := range dirs {
			if err := removeTree(dir); err != nil {
				last = err
			}
		}
		if last == nil {
			continue // look once more that there is nothing
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("remove cgroup %s: %w", path, last)
		case <-time.After(20 * time.Millisecond):
		}
	}
}

// removeTree removes cgroup folders, the deepest first; their files go with them.
func removeTree(dir string) error {
	entries, err := os.ReadDir(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("read cgroup: %w", err)
	}
	for _, e := range entries {
		if e.IsDir() {
			if err := removeTree(filepath.Join(dir, e.Name())); err != nil {
				return err
			}
		}
	}
	if err := unix.Rmdir(dir); err != nil && !errors.Is(err, unix.ENOENT) {
		return fmt.Errorf("remove %s: %w", dir, err)
	}
	return nil
}
