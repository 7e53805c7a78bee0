// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"os"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/gpufence/gpufence/tests/node"
)

// TestFreezeSlows a container above its high that no shim can slow: its cgroup is frozen for moments, and it goes on.
func TestFreezeSlows(t *testing.T) {
	b := newBench(t, 0, `throttle = "freeze"`)
	c, err := b.Start(t.Context(), node.Spec{Name: "c", Limits: []string{"memory.high=256Mi", "memory.max=2Gi"}})
	b.check(err)
	_, err = c.Main.Do(t.Context(), "context", "alloc 1024")
	b.check(err)
	frozen := 0
	b.until("it was frozen ten times", func() bool {
		text, err := os.ReadFile(cgroup(c, "cgroup.freeze"))
		b.check(err)
		if strings.TrimSpace(string(text)) == "1" {
			frozen++
			b.until("it is thawed", func() bool {
				text, err := os.ReadFile(cgroup(c, "cgroup.freeze"))
				b.check(err)
				return strings.TrimSpace(string(text)) == "0"
			})
		}
		return frozen >= 10
	})
	if _, err := c.Main.Do(t.Context(), "status"); err != nil || !c.Main.Alive() {
		t.Errorf("it does not answer: %v", err)
	}
	b.check(b.StopDaemon(t.Context()))
	for began := time.Now(); time.Since(began) < 500*time.Millisecond; time.Sleep(time.Millisecond) {
		if text, err := os.ReadFile(cgroup(c, "cgroup.freeze")); err != nil || strings.TrimSpace(string(text)) != "0" {
			t.Fatalf("frozen without gpufenced: %q, %v", text, err)
		}
	}
	t.Log("frozen and thawed " + strconv.Itoa(frozen) + " times")
	b.check(b.StartDaemon(t.Context()))
}
