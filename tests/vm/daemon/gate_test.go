// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/gpufence/gpufence/tests/node"
)

// levels are those that this guest's kernel must give.
var levels = []struct {
	name   string
	config []string
}{
	{"entry", []string{`gate = "enforce"`}},
	{"strict", []string{`gate = "enforce"`, "gate-strict = true"}},
}

const limit = 512 // MiB

func limits() []string { return []string{fmt.Sprintf("memory.max=%dMi", limit)} }

// TestDeadDaemonLeavesItClosed: a container asks for more than it may again and again. gpufenced is killed and started
// again meanwhile, and not one request passes; what is within the limit does, with gpufenced dead too.
func TestDeadDaemonLeavesItClosed(t *testing.T) {
	for _, level := range levels {
		t.Run(level.name, func(t *testing.T) {
			b := newBench(t, 0, level.config...)
			b.gated(nil, level.name)
			c, err := b.Start(t.Context(), node.Spec{Name: "c", Pod: "held-pod", Limits: limits(),
				Program: b.program("c", fmt.Sprintf("os64:%d:1", 300*mib), fmt.Sprintf("hammer:%d:%d", 600000, 400*mib))})
			b.check(err)
			b.gated(c, level.name)
			stop := func() { b.check(os.WriteFile("/tmp/stop", nil, 0o600)) }
			t.Cleanup(func() {
				if err := os.Remove("/tmp/stop"); err != nil && !errors.Is(err, fs.ErrNotExist) {
					t.Error(err)
				}
			})
			b.until("it asks", func() bool { return len(b.told("c")) == 1 })
			b.check(b.Crash())
			dead := b.asks(c, "dead", fmt.Sprintf("os64:%d:1", 400*mib), fmt.Sprintf("os64:%d:2", 100*mib), "open:/dev/nvidia1")
			for i, want := range []syscall.Errno{syscall.ENOMEM, 0, syscall.EPERM} {
				if dead[i].errno != int(want) {
					t.Errorf("with gpufenced dead: %s, want errno %d", dead[i].line, want)
				}
			}
			began := time.Now()
			b.check(b.StartDaemon(t.Context()))
			proof := b.gated(c, level.name)
			took := time.Since(began)
			time.Sleep(time.Second)
			stop()
			b.check(c.Main.Await(t.Context()))
			line := b.told("c")[1].line
			t.Logf("stand-in, %s: %s; adopted %.1f s after the start: %s", level.name, line, took.Seconds(), proof)
			if b.number(line, "asked") < 1000 || b.number(line, "passed") != 0 {
				t.Errorf("%s", line)
			}
			if !strings.Contains(proof, "300Mi charged") {
				t.Errorf("what was charged before: %s", proof)
			}
			if e := b.events(c, "kill", "kill-decided"); len(e) != 0 {
				t.Errorf("killed: %+v", e)
			}
		})
	}
}
