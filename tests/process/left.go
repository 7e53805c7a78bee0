// SPDX-License-Identifier: Apache-2.0

package process

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"
)

// Child is the number of the process that it has started first: what runs where unshare or nsenter lead.
func (p *Process) Child() (int, error) {
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/task/%[1]d/children", p.PID()))
	if err != nil {
		return 0, fmt.Errorf("find the child of %s: %w", p.opts.Name, err)
	}
	var pid int
	if _, err := fmt.Sscan(string(text), &pid); err != nil {
		return 0, fmt.Errorf("find the child of %s: it has none: %w", p.opts.Name, err)
	}
	return pid, nil
}

// Naming are the command lines of the processes but for this one that have a text in theirs, such as a folder of the
// test's.
func Naming(text string) ([]string, error) {
	var lines []string
	err := each(func(pid int) {
		if line := commandLine(pid); pid != os.Getpid() && strings.Contains(line, text) {
			lines = append(lines, line)
		}
	})
	return lines, err
}

// KillNaming kills what [Naming] finds, such as a shim whose engine is gone, and says what that was.
func KillNaming(text string) ([]string, error) {
	var lines []string
	var errs []error
	err := each(func(pid int) {
		line := commandLine(pid)
		if pid == os.Getpid() || !strings.Contains(line, text) {
			return
		}
		lines = append(lines, fmt.Sprintf("%d %s", pid, line))
		if err := syscall.Kill(pid, syscall.SIGKILL); err != nil && !errors.Is(err, syscall.ESRCH) {
			errs = append(errs, fmt.Errorf("kill %d: %w", pid, err))
		}
	})
	return lines, errors.Join(append(errs, err)...)
}

// groupTime is how long what a process has started may take to follow it.
const groupTime = time.Second

// endGroup waits for the other members of its process group, and kills those that stay.
func (p *Process) endGroup() []string {
	for begun := time.Now(); ; time.Sleep(10 * time.Millisecond) {
		left, err := group(p.PID())
		if err != nil {
			return []string{err.Error()}
		}
		if len(left) > 0 && time.Since(begun) < groupTime {
			continue
		}
		if len(left) > 0 {
			if err := syscall.Kill(-p.PID(), syscall.SIGKILL); err != nil {
				left = append(left, err.Error())
			}
		}
		return left
	}
}

// group are the living members of a process group but for its first.
func group(leader int) ([]string, error) {
	var lines []string
	err := each(func(pid int) {
		text, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
		if err != nil || pid == leader {
			return // it has ended meanwhile
		}
		// The name in parentheses may have anything in it.
		fields := strings.Fields(string(text[strings.LastIndexByte(string(text), ')')+1:]))
		const state, pgrp = 0, 2
		if len(fields) > pgrp && fields[pgrp] == strconv.Itoa(leader) && fields[state] != "Z" && fields[state] != "X" {
			lines = append(lines, fmt.Sprintf("%d %s", pid, commandLine(pid)))
		}
	})
	return lines, err
}

// each calls f for every process.
func each(f func(pid int)) error {
	dirs, err := filepath.Glob("/proc/[0-9]*")
	if err == nil && len(dirs) == 0 {
		err = fmt.Errorf("list processes: %w", fs.ErrNotExist)
	}
	for _, dir := range dirs {
		if pid, err := strconv.Atoi(filepath.Base(dir)); err == nil {
			f(pid)
		}
	}
	return err
}

// commandLine is that of a process; nothing of one that has ended.
func commandLine(pid int) string {
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pid))
	if err != nil {
		return ""
	}
	return strings.TrimSpace(strings.ReplaceAll(string(text), "\x00", " "))
}
