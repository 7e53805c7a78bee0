// SPDX-License-Identifier: Apache-2.0

package gpu

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/gpufence/gpufence/enforcer/monotonic"
)

// Sampler samples one GPU with a deadline. Its method may be called from several goroutines.
type Sampler struct {
	device Device
	mu     sync.Mutex
	busy   bool
	since  time.Duration // when the running sample began
}

// NewSampler makes the sampler of a GPU.
func NewSampler(d Device) *Sampler { return &Sampler{device: d} }

// Device is the GPU that it samples.
func (s *Sampler) Device() Device { return s.device }

// Sample asks for all lists and the memory. It returns when ctx ends at the latest, then with
// Err wrapping [ErrHung]; while a call of an earlier sample has not returned, it refuses at once
// with the same, so there is never more than one goroutine in the driver for a GPU.
func (s *Sampler) Sample(ctx context.Context) Sample {
	began := monotonic.Now()
	uuid := s.device.Info().UUID
	s.mu.Lock()
	if s.busy {
		since := s.since
		s.mu.Unlock()
		return Sample{UUID: uuid, Began: began, Wall: time.Now(), Err: fmt.Errorf("sample %s: %w since %v", uuid, ErrHung, (began - since).Round(time.Millisecond))}
	}
	s.busy, s.since = true, began
	s.mu.Unlock()

	// Room for one, so that a late answer does not keep the goroutine.
	done := make(chan Sample, 1)
	go func() {
		sample := take(s.device)
		s.mu.Lock()
		s.busy = false
		s.mu.Unlock()
		done <- sample
	}()
	select {
	case sample := <-done:
		return sample
	case <-ctx.Done():
	}
	return Sample{UUID: uuid, Began: began, Took: monotonic.Now() - began, Wall: time.Now(), Err: fmt.Errorf("sample %s: %w: %w", uuid, ErrHung, context.Cause(ctx))}
}

// take asks a device for everything. A panic in the binding (an answer longer than its buffer)
// is a failed sample.
func take(d Device) (s Sample) {
	s = Sample{UUID: d.Info().UUID, Began: monotonic.Now(), Wall: time.Now()}
	defer func() {
		s.Took = monotonic.Now() - s.Began
		if r := recover(); r != nil {
			s.Processes, s.MPS, s.Failed = nil, nil, nil
			s.Err = fmt.Errorf("sample %s: NVML's answer cannot be read: %v", s.UUID, r)
		}
	}()
	// The process lists first: a limit is judged by them, and Began is theirs.
	a := askAll(d)
	rows := 0
	for i, list := range Lists {
		if a.Err[i] == nil {
			rows += len(a.Rows[i])
			continue
		}
		if s.Failed == nil {
			s.Failed = map[List]error{}
		}
		s.Failed[list] = a.Err[i]
	}
	s.Processes = make([]Process, 0, rows)
	for i, list := range Lists {
		if a.Err[i] != nil {
			continue
		}
		for _, row := range a.Rows[i] {
			// Another pid namespace's process has none here: its bytes show up as unattributed.
			if row.PID <= 0 {
				continue
			}
			s.Processes = append(s.Processes, row)
			if list == ListMPS {
				s.MPS = append(s.MPS, row.PID)
			}
		}
	}
	slices.Sort(s.MPS)
	s.MPS = slices.Compact(s.MPS)
	s.Memory, s.MemoryErr = a.Memory, a.MemoryErr
	if s.MemoryErr == nil {
		if why := s.Memory.broken(); why != "" {
			s.Memory, s.MemoryErr = Memory{}, fmt.Errorf("%s: %w", why, ErrNotAvailable)
		}
	}
	if err := s.Failed[ListCompute]; err != nil && s.MemoryErr != nil {
		// Nothing that matters was answered: the GPU or the driver is gone.
		s.Err = fmt.Errorf("sample %s: %w", s.UUID, err)
		return s
	}
	capacity := s.Memory.TotalBytes
	if capacity == 0 {
		capacity = d.Info().TotalBytes
	}
	s.Processes = merge(s.Processes)
	for i := range s.Processes {
		if p := &s.Processes[i]; capacity != 0 && p.Bytes > capacity {
			p.Bytes, p.Known = 0, false
		}
	}
	return s
}

// merge keeps one row a pid, in place, by rising pid. A process with a compute and a graphics
// context is in both lists with its whole size, so the greater counts, never the sum; one unknown
// makes it unknown.
func merge(rows []Process) []Process {
	slices.SortFunc(rows, func(a, b Process) int { return cmp.Compare(a.PID, b.PID) })
	out := rows[:0]
	for _, row := range rows {
		if !row.Known {
			row.Bytes = 0
		}
		n := len(out)
		if n == 0 || out[n-1].PID != row.PID {
			out = append(out, row)
			continue
		}
		if old := &out[n-1]; !old.Known || !row.Known {
			*old = Process{PID: row.PID}
		} else {
			old.Bytes = max(old.Bytes, row.Bytes)
		}
	}
	return out
}

// Answer is everything that a sample asks a device for, the lists as [Lists] has them.
type Answer struct {
	Rows      [len(Lists)][]Process
	Err       [len(Lists)]error
	Memory    Memory
	MemoryErr error
}

// failed is an answer in which nothing was answered.
func (a Answer) failed(err error) Answer {
	for i := range a.Err {
		a.Err[i] = err
	}
	a.MemoryErr = err
	return a
}

// answerer is a device that can be asked for everything at once.
type answerer interface {
	// Answer is not ok if it cannot, after all.
	Answer() (a Answer, ok bool)
}

func askAll(d Device) (a Answer) {
	if all, can := d.(answerer); can {
		if a, ok := all.Answer(); ok {
			return a
		}
	}
	for i, list := range Lists {
		a.Rows[i], a.Err[i] = d.Processes(list)
	}
	a.Memory, a.MemoryErr = d.Memory()
	return a
}

// broken says why a device's account cannot be.
func (m Memory) broken() string {
	if m.TotalBytes == 0 || m.TotalBytes == notAvailable {
		return "total is not known"
	}
	for _, v := range []struct {
		name  string
		bytes uint64
	}{{"used", m.UsedBytes}, {"free", m.FreeBytes}, {"reserved", m.ReservedBytes}} {
		if v.bytes > m.TotalBytes {
			return fmt.Sprintf("%s is %d bytes of %d", v.name, v.bytes, m.TotalBytes)
		}
	}
	return ""
}

// notAvailable is NVML_VALUE_NOT_AVAILABLE.
const notAvailable = ^uint64(0)
