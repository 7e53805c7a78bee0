// SPDX-License-Identifier: Apache-2.0

package gpu

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"math"
	"sync"
	"time"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/gpufence/gpufence/enforcer/monotonic"
)

// NoLimit is what the driver says, and is told, where a cgroup has no hard limit.
const NoLimit uint64 = math.MaxUint64

var (
	// ErrNoLimits says that this driver, or this GPU, has no memory limits of its own; also what the
	// driver's flat account says of a cgroup that no limit concerns.
	ErrNoLimits = errors.New("no memory limits")
	// ErrLimitRefused says that a limit cannot be: above the GPU's memory, or on the flat account
	// below what is in use.
	ErrLimitRefused = errors.New("limit refused")
	// ErrNoCgroup says that the driver cannot open the cgroup's folder.
	ErrNoCgroup = errors.New("the driver cannot open the cgroup")
)

// MemoryLimits are those of a cgroup on a GPU as the driver says them, with what it counts.
type MemoryLimits struct{ SoftBytes, HardBytes, UsedBytes uint64 }

// Limited is a device whose driver can limit cgroups, which it is told by their folders.
type Limited interface {
	HasLimits() bool
	SetLimits(cgroup string, soft, hard uint64) error
	Limits(cgroup string) (MemoryLimits, error)
}

// checkLimits is check for the two calls, whose codes mean something else than elsewhere.
func checkLimits(call string, r nvml.Return) error {
	if r == nvml.SUCCESS {
		return nil
	}
	e := &CallError{Call: call, Code: int(r), Text: r.Error()}
	switch r {
	case nvml.ERROR_NOT_SUPPORTED, nvml.ERROR_FUNCTION_NOT_FOUND, nvml.ERROR_NOT_FOUND:
		e.kind = ErrNoLimits
	case nvml.ERROR_INVALID_ARGUMENT:
		e.kind = ErrLimitRefused
	case nvml.ERROR_OPERATING_SYSTEM:
		e.kind = ErrNoCgroup
	case nvml.ERROR_GPU_IS_LOST:
		e.kind = ErrLost
	}
	return e
}

// guarded calls NVML while it is kept from being unloaded.
func (d *device) guarded(call func() error) error {
	if !d.hasLimits {
		return fmt.Errorf("libnvidia-ml has no nvmlDeviceSetMemoryLimits_v1: %w", ErrNoLimits)
	}
	if d.calls != nil {
		d.calls.mu.RLock()
		defer d.calls.mu.RUnlock()
		if d.calls.c == nil {
			return fmt.Errorf("ask NVML: %w", fs.ErrClosed)
		}
	}
	return call()
}

// HasLimits implements [Limited].
func (d *device) HasLimits() bool { return d.hasLimits }

// SetLimits implements [Limited].
func (d *device) SetLimits(cgroup string, soft, hard uint64) error {
	return d.guarded(func() error {
		return checkLimits("nvmlDeviceSetMemoryLimits_v1", d.nvml.SetMemoryLimits_v1(cgroup, soft, hard))
	})
}

// Limits implements [Limited].
func (d *device) Limits(cgroup string) (MemoryLimits, error) {
	var l nvml.MemoryLimits_v1
	err := d.guarded(func() error {
		var r nvml.Return
		l, r = d.nvml.GetMemoryLimits_v1(cgroup)
		return checkLimits("nvmlDeviceGetMemoryLimits_v1", r)
	})
	return MemoryLimits{SoftBytes: l.SoftLimit, HardBytes: l.HardLimit, UsedBytes: l.CurrentUsed}, err
}

// Limiter sets and reads a GPU's limits of cgroups with a deadline. Its methods may be called from
// several goroutines; as with a [Sampler], never more than one is in the driver for it.
type Limiter struct {
	device Device
	turn   chan struct{} // holds one while nobody is in the driver
	mu     sync.Mutex
	busy   bool
	since  time.Duration // when the call that is in the driver began
}

// hungAfter is how long a call may be in the driver before others do not wait for it.
const hungAfter = 2 * time.Second

// NewLimiter makes the limiter of a GPU.
func NewLimiter(d Device) *Limiter {
	l := &Limiter{device: d, turn: make(chan struct{}, 1)}
	l.turn <- struct{}{}
	return l
}

// Info is the GPU's.
func (l *Limiter) Info() Info { return l.device.Info() }

// HasLimits says whether the driver's library can limit cgroups at all.
func (l *Limiter) HasLimits() bool {
	d, can := l.device.(Limited)
	return can && d.HasLimits()
}

// do runs a call to the end, but waits for it no longer than ctx lasts.
func (l *Limiter) do(ctx context.Context, call func(Limited) error) error {
	uuid := l.device.Info().UUID
	l.mu.Lock()
	hung := l.busy && monotonic.Now()-l.since > hungAfter
	l.mu.Unlock()
	if hung {
		// As many as wait for it would wait for nothing, one after the other.
		return fmt.Errorf("limit cgroups on %s: %w", uuid, ErrHung)
	}
	d, can := l.device.(Limited)
	if !can {
		return ErrNoLimits
	}
	select {
	case <-l.turn:
	case <-ctx.Done():
		l.mu.Lock()
		defer l.mu.Unlock()
		return fmt.Errorf("limit cgroups on %s: %w since %v", uuid, ErrHung, (monotonic.Now() - l.since).Round(time.Millisecond))
	}
	l.mu.Lock()
	l.since, l.busy = monotonic.Now(), true
	l.mu.Unlock()
	done := make(chan error, 1) // a late answer does not keep the goroutine
	go func() {
		err := call(d)
		l.mu.Lock()
		l.busy = false
		l.mu.Unlock()
		l.turn <- struct{}{}
		done <- err
	}()
	select {
	case err := <-done:
		return err
	case <-ctx.Done():
		return fmt.Errorf("limit cgroups on %s: %w: %w", uuid, ErrHung, context.Cause(ctx))
	}
}

// Set gives the cgroup of a folder its limits. [NoLimit] and 0 clear them.
func (l *Limiter) Set(ctx context.Context, cgroup string, soft, hard uint64) error {
	return l.do(ctx, func(d Limited) error { return d.SetLimits(cgroup, soft, hard) })
}

// Get reads them.
func (l *Limiter) Get(ctx context.Context, cgroup string) (MemoryLimits, error) {
	answer := make(chan MemoryLimits, 1)
	err := l.do(ctx, func(d Limited) error {
		m, err := d.Limits(cgroup)
		answer <- m
		return err
	})
	if err != nil {
		return MemoryLimits{}, err
	}
	return <-answer, nil
}
