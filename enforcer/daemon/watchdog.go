// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"context"
	"fmt"
	"strconv"
	"time"
)

// WatchdogPeriod is how often systemd wants to hear that we work, half of its limit so that one
// message may be late; 0 if it does not watch us.
func WatchdogPeriod(getenv func(string) string, pid int) (time.Duration, error) {
	limit := getenv("WATCHDOG_USEC")
	if limit == "" {
		return 0, nil
	}
	if p := getenv("WATCHDOG_PID"); p != "" && p != strconv.Itoa(pid) {
		return 0, nil // for somebody else
	}
	usec, err := strconv.ParseInt(limit, 10, 64)
	if err != nil || usec < 2 {
		return 0, fmt.Errorf("read systemd's watchdog: WATCHDOG_USEC is %q", limit)
	}
	return time.Duration(usec) * time.Microsecond / 2, nil
}

// FeedWatchdog says WATCHDOG=1 at each period while the daemon is alive, until the context ends.
func FeedWatchdog(ctx context.Context, period time.Duration, live func() bool, say func(string)) {
	t := time.NewTicker(period)
	defer t.Stop()
	for {
		if live() {
			say("WATCHDOG=1")
		}
		select {
		case <-ctx.Done():
			return
		case <-t.C:
		}
	}
}
