// SPDX-License-Identifier: Apache-2.0

// Package gpu asks NVML, and keeps apart what it knows from what it does not.
//
// What it promises:
//   - "Not available" is unknown: neither 0 nor 16 EiB. So is a size above the device's.
//   - A sample says which of the three process lists failed, when its NVML calls began and how
//     long they took; nobody may decide on an incomplete one.
//   - A call that hangs degrades its own GPU only: nobody waits inside of a [Sampler], which refuses
//     until the call is back, so that hung calls do not pile up.
//
// Everything behind [Library] and [Device] may block in the driver for as long as it likes; call
// it through a [Sampler] wherever somebody waits.
package gpu

import (
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/gpufence/gpufence/enforcer/quota"
)

var (
	// ErrHung says that an NVML call did not return in time.
	ErrHung = errors.New("NVML call hangs")
	// ErrLost says that the GPU fell off the bus or vanished from NVML.
	ErrLost = errors.New("GPU is lost")
	// ErrNotAvailable says that NVML does not have the number on this GPU.
	ErrNotAvailable = errors.New("NVML does not say")
	// ErrNoLibrary says that NVML's library cannot be loaded.
	ErrNoLibrary = errors.New("NVML library not found")
)

// CallError is an NVML call that failed.
type CallError struct {
	Call string // nvmlDeviceGetMemoryInfo_v2
	Code int    // nvmlReturn_t
	Text string // nvmlErrorString
	kind error
}

func (e *CallError) Error() string { return fmt.Sprintf("%s: %s (%d)", e.Call, e.Text, e.Code) }

// Unwrap gives the sentinel of the code, if it has one.
func (e *CallError) Unwrap() error { return e.kind }

// Library is NVML.
type Library interface {
	Init() error
	Shutdown() error
	Driver() (string, error)
	// Devices lists the GPUs in NVML's order, behind one in MIG mode its instances. One that cannot be described is left out and is in the
	// error, which may come with devices.
	Devices() ([]Device, error)
}

// Device is one GPU, or one MIG instance, which is a GPU of its own.
type Device interface {
	// Info is what does not change while the GPU is there; it was read when the device was
	// listed.
	Info() Info
	Memory() (Memory, error)
	// Processes answers one list.
	Processes(List) ([]Process, error)
}

// List is one of NVML's process lists.
type List string

// The lists; a sample merges all of them.
const (
	ListCompute  List = "compute"
	ListGraphics List = "graphics"
	ListMPS      List = "mps"
)

// Lists are all of them, in the order in which they are asked.
var Lists = [...]List{ListCompute, ListGraphics, ListMPS}

// Info is a GPU's fixed part. Index, Minor and PCI of a MIG instance are its GPU's.
type Info struct {
	UUID       string
	Index      int // NVML's; for people
	Minor      int // of /dev/nvidiaN
	Name       string
	PCI        string
	TotalBytes uint64
	// ReservedBytes is what the driver keeps for itself.
	ReservedBytes uint64
	// MIG says that the GPU is in MIG mode: it can be used through its instances only. Nothing is
	// known of its memory where NVML does not say.
	MIG bool
	// Parent is the UUID of an instance's GPU, "" for a GPU; Instance the instance's index in it.
	Parent   string
	Instance int
	// GI and CI are NVML's ids of an instance's GPU instance and compute instance, -1 where NVML
	// does not say them.
	GI, CI int
	// Share is the instance's part of the GPU's processors, 0 where NVML does not say.
	Share float64
}

// Position is how people and CDI name it: "0", or "0:1" for the second instance of GPU 0.
func (i Info) Position() string {
	if i.Parent == "" {
		return strconv.Itoa(i.Index)
	}
	return fmt.Sprintf("%d:%d", i.Index, i.Instance)
}

// Memory is the device's own account.
type Memory struct {
	TotalBytes    uint64
	UsedBytes     uint64 // without what the driver reserves, where NVML keeps them apart
	FreeBytes     uint64
	ReservedBytes uint64 // 0 where only the old call answers
}

// Process is a row of a list. Known is false where NVML does not say the size.
type Process struct {
	PID   int
	Bytes uint64
	Known bool
}

// Sample is what one GPU said at one time.
type Sample struct {
	UUID  string
	Began time.Duration // CLOCK_MONOTONIC right before the first NVML call
	Took  time.Duration
	Wall  time.Time // for people

	// Processes are merged over the lists by pid, by rising pid. A pid in several lists, or
	// twice in one, counts with its greatest size.
	Processes []Process
	// MPS are the pids among them that are in the MPS list, by rising pid: clients of an MPS
	// server.
	MPS []int
	// Failed are the lists that were not answered. Empty: Processes is everything.
	Failed map[List]error

	Memory    Memory
	MemoryErr error

	// Err is set when nothing was answered: hung, lost.
	Err error
}

// Complete says whether every process list was answered.
func (s *Sample) Complete() bool { return s.Err == nil && len(s.Failed) == 0 }

// Why says in a few words what is missing, "" when nothing is.
func (s *Sample) Why() string {
	if s.Err != nil {
		return s.Err.Error()
	}
	var why []string
	for _, l := range Lists {
		if err := s.Failed[l]; err != nil {
			why = append(why, fmt.Sprintf("%s list: %v", l, err))
		}
	}
	unknown := 0
	for _, p := range s.Processes {
		if !p.Known {
			unknown++
		}
	}
	if unknown > 0 {
		why = append(why, fmt.Sprintf("%d processes of unknown size", unknown))
	}
	if s.MemoryErr != nil {
		why = append(why, fmt.Sprintf("memory: %v", s.MemoryErr))
	}
	return strings.Join(why, "; ")
}

// Reserve is node policy on what a GPU cannot hand out.
type Reserve struct {
	Bytes uint64  // 256 MiB
	Share float64 // 0.03; the greater of the two counts
}

// DefaultReserve is node policy's default.
var DefaultReserve = Reserve{Bytes: 256 << 20, Share: 0.03}

// Quota describes a GPU as limits are computed against it. contextBytes is policy's override,
// 0 for [ContextBytes] of its model.
func Quota(i Info, r Reserve, contextBytes uint64) quota.GPU {
	share := r.Share
	if !(share >= 0) { // NaN too
		share = 0
	}
	keep := i.ReservedBytes + max(r.Bytes, uint64(min(share, 1)*float64(i.TotalBytes)))
	if contextBytes == 0 {
		contextBytes = instanceContextBytes(ContextBytes(i.Name), i.Share)
	}
	return quota.GPU{
		UUID: i.UUID, Index: i.Index, Name: i.Name,
		TotalBytes: i.TotalBytes, AllocatableBytes: i.TotalBytes - min(keep, i.TotalBytes),
		ContextBytes: contextBytes,
	}
}
