// SPDX-License-Identifier: Apache-2.0

package monotonic

import (
	"testing"
	"time"
)

// What we say must lie between two answers of the kernel, but for how well the two clocks were laid
// beside each other, which another process's time on our core does not make worse.
func TestNowIsTheKernels(t *testing.T) {
	const apart = 100 * time.Microsecond
	var worst, last time.Duration
	for range 1000 {
		before, err := asked()
		if err != nil {
			t.Fatal(err)
		}
		now := Now()
		after, err := asked()
		if err != nil {
			t.Fatal(err)
		}
		worst = max(worst, before-now, now-after)
		if now < last {
			t.Fatalf("it ran backwards, from %v to %v", last, now)
		}
		last = now
	}
	if worst > apart {
		t.Errorf("it is %v away from the kernel's", worst)
	}
	t.Logf("at most %v outside of two answers of the kernel", worst)
}
