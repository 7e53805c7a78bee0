// SPDX-License-Identifier: Apache-2.0

// Package monotonic tells the kernel's CLOCK_MONOTONIC, so that what it says can be compared with
// what the kernel and other processes say of that clock. It promises never to run backwards, and to
// be within a microsecond or so of what the system call says.
package monotonic

import (
	"fmt"
	"time"

	"golang.org/x/sys/unix"
)

// Go reads the same clock without a system call, but counts from where it wants. A system call is
// also what wakes the runtime's monitor, which then polls for a millisecond.
var began, beganAt = pair()

// pair is one moment by both clocks. The least interrupted of some tries is the nearest.
func pair() (at time.Time, clock time.Duration) {
	best := time.Duration(1<<63 - 1)
	for range 16 {
		before := time.Now()
		now, err := asked()
		if err != nil {
			panic(fmt.Sprintf("read CLOCK_MONOTONIC: %v", err)) // cannot fail on Linux
		}
		if took := time.Since(before); took < best {
			best, at, clock = took, before, now-took/2
		}
	}
	return at, clock
}

// Now is CLOCK_MONOTONIC.
func Now() time.Duration { return beganAt + time.Since(began) }

// asked is CLOCK_MONOTONIC by a system call.
func asked() (time.Duration, error) {
	var t unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_MONOTONIC, &t); err != nil {
		return 0, fmt.Errorf("read CLOCK_MONOTONIC: %w", err)
	}
	return time.Duration(t.Nano()), nil
}
