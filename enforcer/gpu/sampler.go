// SPDX-License-Identifier: Apache-2.0

package gpu

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"sync"
	"time"

	"golang.org/x/sys/unix"
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
	began := monotonic()
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
	return Sample{UUID: uuid, Began: began, Took: monotonic() - began, Wall: time.Now(), Err: fmt.Errorf("sample %s: %w: %w", uuid, ErrHung, context.Cause(ctx))}
}

// take asks a device for everything. A panic in the binding (an answer longer than its buffer)
// is a failed sample.
func take(d Device) (s Sample) {
	s = Sample{UUID: d.Info().UUID, Began: monotonic(), Wall: time.Now()}
	defer func() {
		s.Took = monotonic() - s.Began
		if r := recover(); r != nil {
			s.Processes, s.MPS, s.Failed = nil, nil, nil
			s.Err = fmt.Errorf("sample %s: NVML's answer cannot be read: %v", s.UUID, r)
		}
	}()
	// The process lists first: a limit is judged by them, and Began is theirs.
	merged := map[int]Process{}
	clients := map[int]bool{}
	for _, list := range Lists {
		rows, err := d.Processes(list)
		if err != nil {
			if s.Failed == nil {
				s.Failed = map[List]error{}
			}
			s.Failed[list] = err
			continue
		}
		for _, row := range rows {
			merge(merged, row)
			if list == ListMPS && row.PID > 0 {
				clients[row.PID] = true
			}
		}
	}
	s.MPS = slices.Sorted(maps.Keys(clients))
	s.Memory, s.MemoryErr = d.Memory()
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
	for _, pid := range slices.Sorted(maps.Keys(merged)) {
		p := merged[pid]
		if capacity != 0 && p.Bytes > capacity {
			p.Bytes, p.Known = 0, false
		}
		s.Processes = append(s.Processes, p)
	}
	return s
}

// merge keeps one row a pid. A process with a compute and a graphics context is in both lists
// with its whole size, so the greater counts, never the sum; one unknown makes it unknown.
func merge(into map[int]Process, row Process) {
	if row.PID <= 0 {
		// Another pid namespace's process: its bytes show up as unattributed.
		return
	}
	old, ok := into[row.PID]
	switch {
	case !ok:
		if !row.Known {
			row.Bytes = 0
		}
		into[row.PID] = row
	case !old.Known || !row.Known:
		into[row.PID] = Process{PID: row.PID}
	default:
		old.Bytes = max(old.Bytes, row.Bytes)
		into[row.PID] = old
	}
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

func monotonic() time.Duration {
	var t unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_MONOTONIC, &t); err != nil {
		panic(fmt.Sprintf("read CLOCK_MONOTONIC: %v", err)) // cannot fail on Linux
	}
	return time.Duration(t.Nano())
}
