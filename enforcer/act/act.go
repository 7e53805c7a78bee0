// SPDX-License-Identifier: Apache-2.0

// Package act finds processes and cgroups on the host, and kills.
//
// What it promises:
//   - A process is known by pid and start time, and every statement about it (cgroup, namespace
//     pid) was stable: the start time was the same before and after reading.
//   - A signal goes to a pidfd whose start time was checked after it was opened, never to a
//     number that may have been reused.
//   - A kill ends by its deadline, whatever hangs.
//   - A path that a container can influence is never followed through a symbolic link.
//
// /proc and /sys/fs/cgroup are parameters, so that tests bring their own.
package act

import (
	"context"
	"errors"
	"time"
)

var (
	// ErrGone says that the process or cgroup is not there any more.
	ErrGone = errors.New("gone")
	// ErrUnstable says that the process changed while it was read: pid reused.
	ErrUnstable = errors.New("process changed while it was read")
	// ErrCgroupRoot, ErrCgroupOwn and ErrCgroupShared say why a cgroup cannot be a container's.
	ErrCgroupRoot   = errors.New("cgroup is the root")
	ErrCgroupOwn    = errors.New("cgroup is gpufence's own or the runtime's")
	ErrCgroupShared = errors.New("cgroup holds other processes than the container's first")
	// ErrNoCgroup says that the process is in no cgroup that we can use.
	ErrNoCgroup = errors.New("no usable cgroup")
	// ErrTimeout says that the deadline came first.
	ErrTimeout = errors.New("deadline passed")
)

// Host is where to look: /proc and the mounted cgroup hierarchies.
type Host struct{}

// NewHost looks at the hierarchies below cgroupRoot (v1, v2 or both). "" means /proc and
// /sys/fs/cgroup.
func NewHost(procRoot, cgroupRoot string) (*Host, error) { panic("soon") }

// Mode says which cgroup layout the host has: v1, v2 or hybrid.
func (h *Host) Mode() string { panic("soon") }

// Cgroup identifies a cgroup for the life of the boot. It is comparable.
type Cgroup struct {
	Hierarchy string `json:"hierarchy"` // unified, or the v1 controller that it was found by: freezer, pids, ...
	Path      string `json:"path"`      // within the hierarchy, as /proc/<pid>/cgroup says it
	Inode     uint64 `json:"inode"`
	BootID    string `json:"boot_id"`
}

// Process is a process as it was while its start time stood still.
type Process struct {
	PID     int
	Start   uint64 // ticks since boot, as this host's /proc says it
	State   byte   // R S D Z X T t I
	Exiting bool   // PF_EXITING, zombie or dead
	Comm    string
	PPID    int
	NSPID   int    // in its own pid namespace
	PIDNS   uint64 // inode of its pid namespace; 0 when it cannot be read any more (zombie)
}

// Process reads one.
func (h *Host) Process(pid int) (Process, error) { panic("soon") }

// ContainerCgroup finds the leaf cgroup of a container's first process and refuses what cannot be
// one: the root, own (gpufenced's process), the runtime's (runtimePID, 0 for unknown), or one
// that holds any other process.
func (h *Host) ContainerCgroup(pid, runtimePID int) (Cgroup, error) { panic("soon") }

// CgroupOf is the path of a process in the same hierarchy as like.
func (h *Host) CgroupOf(pid int, like Cgroup) (string, error) { panic("soon") }

// Exists says whether a cgroup is still the same one.
func (h *Host) Exists(c Cgroup) (bool, error) { panic("soon") }

// Procs are the processes of a cgroup and of those below it.
func (h *Host) Procs(c Cgroup) ([]int, error) { panic("soon") }

// Owner is the registered cgroup that a process belongs to: the outermost one that holds it.
// ok is false if it is in none. The process's start time was stable around the reading.
func (h *Host) Owner(pid int, registered []Cgroup) (p Process, c Cgroup, ok bool, err error) {
	panic("soon")
}

// Pidfd is a process that we hold on to.
type Pidfd struct{}

// Open opens a pidfd and checks that the process is the one that started then (0: whichever).
func (h *Host) Open(pid int, start uint64) (*Pidfd, error) { panic("soon") }

// Exited says whether the whole process has exited (zombies count as exited).
func (p *Pidfd) Exited() (bool, error) { panic("soon") }

// Signal sends a signal. A process that is gone is [ErrGone].
func (p *Pidfd) Signal(sig int) error { panic("soon") }

// Fd is for poll; it is readable when the process has exited.
func (p *Pidfd) Fd() int { panic("soon") }

// Close lets go.
func (p *Pidfd) Close() error { panic("soon") }

// Killed is what a kill did.
type Killed struct {
	Signalled int           // processes that got SIGKILL, 0 if cgroup.kill did it
	Processes int           // that were in the cgroup before
	SentAt    time.Duration // CLOCK_MONOTONIC of the first SIGKILL (or write to cgroup.kill)
	Thawed    bool          // it was frozen
	Empty     bool          // nothing is left but zombies
}

// KillCgroup kills every process of a container: cgroup.kill on v2, else SIGKILL through pidfds
// until nothing is left, thawing a v1 freezer. It returns at ctx's end at the latest; the error
// is then [ErrTimeout], with what was done so far.
func (h *Host) KillCgroup(ctx context.Context, c Cgroup) (Killed, error) { panic("soon") }

// KillProcess kills one process, if it is the one that started then.
func (h *Host) KillProcess(ctx context.Context, pid int, start uint64) (Killed, error) {
	panic("soon")
}

// TerminationMessage appends a line to a container's termination log on the host: a regular file
// that is there, reached through no symbolic link, at most 4096 bytes in all. Errors are typed:
// [ErrNotRegular], [ErrSymlink], [ErrFull], fs.ErrNotExist.
func TerminationMessage(path, line string) error { panic("soon") }

// What is wrong with a termination log.
var (
	ErrNotRegular = errors.New("termination log is not a regular file")
	ErrSymlink    = errors.New("termination log is behind a symbolic link")
	ErrFull       = errors.New("termination log is full")
)

// Monotonic is CLOCK_MONOTONIC now.
func Monotonic() time.Duration { panic("soon") }
