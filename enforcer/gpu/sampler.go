// SPDX-License-Identifier: Apache-2.0

package gpu

import (
	"cmp"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/gpufence/gpufence/enforcer/monotonic"
)

// Sampler samples one GPU without waiting for it. Its methods may be called from several goroutines.
type Sampler struct {
	device Device
	mu     sync.Mutex
	busy   bool
	since  time.Duration // when the running sample was asked for
	bell   *Bell         // of the running sample
	thread bool          // the device's own thread takes it
	done   *Sample       // nil: it is in progress, or that thread has it
}

// NewSampler makes the sampler of a GPU.
func NewSampler(d Device) *Sampler { return &Sampler{device: d} }

// Device is the GPU that it samples.
func (s *Sampler) Device() Device { return s.device }

// Ask begins a sample of all lists and the memory. The bell rings when it can be taken. Whoever is
// patient may hear of an answer that says what the last one said only with the last of those that the
// bell was given for, so that many GPUs on which nothing happens wake him once.
// While a call of an earlier sample has not returned, that is [ErrHung], so there is never more than one
// thread in the driver for a GPU; what an earlier one has answered that nobody took is dropped.
func (s *Sampler) Ask(bell *Bell, patient bool) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if _, there := s.take(); s.busy && !there {
		return fmt.Errorf("sample %s: %w since %v", s.device.Info().UUID, ErrHung, (monotonic.Now() - s.since).Round(time.Millisecond))
	}
	s.busy, s.since, s.bell, s.thread = true, monotonic.Now(), bell, false
	if d, can := s.device.(asker); can {
		begun, err := d.ask(bell, patient)
		switch {
		case begun:
			s.thread = true
			return nil
		case err != nil:
			failed := s.Without(err, s.since)
			s.done = &failed
			bell.ring()
			return nil
		}
	}
	s.begin()
	return nil
}

// begin lets a goroutine take the sample. The caller holds mu.
func (s *Sampler) begin() {
	bell := s.bell
	go func() {
		sample := take(s.device)
		s.mu.Lock()
		s.done = &sample
		s.mu.Unlock()
		bell.ring()
	}()
}

// Take gives the sample that was asked for, once it is there.
func (s *Sampler) Take() (sample Sample, there bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.take()
}

func (s *Sampler) take() (sample Sample, there bool) {
	if !s.busy {
		return sample, false
	}
	if d, can := s.device.(asker); can && s.thread {
		var able bool
		if sample, there, able = d.answered(); !able {
			s.thread = false
			s.begin()
			return Sample{}, false
		}
	} else if s.done != nil {
		sample, there = *s.done, true
	}
	if there {
		s.busy, s.done, s.bell = false, nil, nil
	}
	return sample, there
}

// Without is the sample of whoever has none and waits no longer for what he has asked for then.
func (s *Sampler) Without(why error, began time.Duration) Sample {
	return Sample{UUID: s.device.Info().UUID, Began: began, Took: monotonic.Now() - began, Wall: wallOf(began), Err: why}
}

// wallOf is what the wall clock said at a time not long ago.
func wallOf(at time.Duration) time.Time { return time.Now().Add(at - monotonic.Now()) }

// asker is a device that has a thread of its own, which asks it.
type asker interface {
	// ask begins a sample; not begun without an error says that it cannot, after all.
	ask(bell *Bell, patient bool) (begun bool, err error)
	// answered gives the sample if it is there; not able says that it cannot be had this way.
	answered() (s Sample, there, able bool)
}

// take asks a device for everything. A panic in the binding (an answer longer than its buffer)
// is a failed sample.
func take(d Device) (s Sample) {
	began := monotonic.Now()
	defer func() {
		if r := recover(); r != nil {
			s = Sample{UUID: d.Info().UUID, Began: began, Took: monotonic.Now() - began, Wall: wallOf(began)}
			s.Err = fmt.Errorf("sample %s: NVML's answer cannot be read: %v", s.UUID, r)
		}
	}()
	var a Answer
	// The process lists first: a limit is judged by them, and Began is theirs.
	for i, list := range Lists {
		a.Rows[i], a.Err[i] = d.Processes(list)
	}
	a.Memory, a.MemoryErr = d.Memory()
	return sampleOf(d.Info(), &a, began, monotonic.Now()-began)
}

// Answer is everything that a sample asks a device for, the lists as [Lists] has them.
type Answer struct {
	Rows      [len(Lists)][]Process
	Err       [len(Lists)]error
	Memory    Memory
	MemoryErr error
}

// sampleOf judges an answer.
func sampleOf(info Info, a *Answer, began, took time.Duration) (s Sample) {
	s = Sample{UUID: info.UUID, Began: began, Took: took, Wall: wallOf(began)}
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
		capacity = info.TotalBytes
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
