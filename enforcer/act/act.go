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
//   - What we freeze is thawed after [MaxSlice], whichever of us is killed at whatever moment; what
//     somebody else froze is left alone.
//
// /proc and /sys/fs/cgroup are parameters, so that tests bring their own.
package act

import "errors"

var (
	// ErrGone says that the process or cgroup is not there any more.
	ErrGone = errors.New("gone")
	// ErrUnstable says that the process changed while it was read: pid reused.
	ErrUnstable = errors.New("process changed while it was read")
	// ErrCgroupRoot is why a cgroup cannot be a container's.
	ErrCgroupRoot = errors.New("cgroup is the root")
	// ErrCgroupOwn is, too.
	ErrCgroupOwn = errors.New("cgroup is gpufence's own or the runtime's")
	// ErrCgroupShared is, too.
	ErrCgroupShared = errors.New("cgroup holds other processes than the container's first")
	// ErrNoCgroup says that the process is in no cgroup that we can use.
	ErrNoCgroup = errors.New("no usable cgroup")
	// ErrTimeout says that the deadline came first.
	ErrTimeout = errors.New("deadline passed")
)
