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

// TestForgedFreesAreKilled: at entry a free is believed at first, so whoever forges frees gets more than its limit, until
// NVML goes on showing what is said to be freed. Once can be an error, for the second time the container is killed.
func TestForgedFreesAreKilled(t *testing.T) {
	level := levels[0]
	own, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	for _, lag := range []time.Duration{0, 200 * time.Millisecond} {
		t.Run(lag.String(), func(t *testing.T) {
			// With the usual slack the watch would be as fast.
			b := newBench(t, lag, append(level.config, `kill-slack = "14Gi"`)...)
			b.gated(nil, level.name)
			var steps []string
			for range 20 {
				for h := range forged {
					steps = append(steps, fmt.Sprintf("os64:%d:%d", 40*mib, h+1), "sleep:20")
				}
				// It gives back what it got, and waits until that counts, so as to be believed again.
				for h := range forged {
					steps = append(steps, fmt.Sprintf("free:%d", h+1))
				}
				steps = append(steps, "sleep:2000")
			}
			c, err := b.Start(t.Context(), node.Spec{Name: "c", Pod: "forging-pod", Limits: limits(),
				Program: append([]string{own, forgeWord}, b.program("c", steps...)...)})
			b.check(err)
			b.gated(c, level.name)
			began := time.Now()
			var most uint64
			b.until("it is killed", func() bool {
				v, err := c.View(t.Context())
				b.check(err)
				most = max(most, v.GPUs[0].NVML)
				return !c.Main.Alive()
			})
			t.Logf("stand-in, entry, forged frees, lag %s: ended after %.1f s and %d steps, NVML %d MiB at most of a limit of %d",
				lag, time.Since(began).Seconds(), len(b.told("c")), most/mib, limit)
			kills := b.events(c, "kill-decided")
			if !c.Main.Killed() || len(kills) != 1 || !strings.Contains(kills[0].Message, "forged-free") {
				t.Errorf("%s, %+v", c.Main.Status(), kills)
			}
		})
	}
}

// TestForgedFreesGiveNothingAtStrict: there a free by itself gives nothing back, so whoever forges them gets not a byte
// above its limit. It is refused until NVML shows what it really gives back, and is accused of nothing.
func TestForgedFreesGiveNothingAtStrict(t *testing.T) {
	level := levels[1]
	own, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	// What it holds and its context are above the limit and its usual slack: the gate lies 16 MiB above the limit.
	b := newBench(t, 200*time.Millisecond, append(level.config, `kill-slack = "14Gi"`)...)
	b.gated(nil, level.name)
	const bytes, fit = 40 * mib, (limit + 16) / 40
	var steps, want []string
	for i := range 30 { // for some settles
		step, got, errno := fmt.Sprintf("os64:%d:%d", bytes, i+1), bytes*uint64(min(i+1, fit)), 0
		if i >= fit {
			errno = int(syscall.ENOMEM)
		}
		steps = append(steps, step, "sleep:150")
		want = append(want, fmt.Sprintf("%s %d 0 %d", step, errno, got), fmt.Sprintf("sleep:150 0 0 %d", got))
	}
	for i := range fit {
		steps = append(steps, fmt.Sprintf("free:%d", i+1))
		want = append(want, fmt.Sprintf("free:%d 0 0 %d", i+1, bytes*uint64(fit-i-1)))
	}
	again := fmt.Sprintf("await:%d:99", 400*mib)
	steps, want = append(steps, again), append(want, fmt.Sprintf("%s 0 0 %d", again, 400*mib))
	c, err := b.Start(t.Context(), node.Spec{Name: "c", Pod: "forging-pod", Limits: limits(),
		Program: append([]string{own, forgeWord}, b.program("c", steps...)...)})
	b.check(err)
	b.gated(c, level.name)
	began := time.Now()
	b.check(c.Main.Await(t.Context()))
	t.Logf("stand-in, strict, forged frees, lag 200ms: %d steps in %.1f s", len(steps), time.Since(began).Seconds())
	b.same("c", want)
	if e := b.events(c, "kill", "kill-decided"); len(e) != 0 || c.Main.Killed() {
		t.Errorf("accused: %+v, %s", e, c.Main.Status())
	}
}

// TestAHeldUpRequestCounts: at strict an account is lowered by what NVML does not show any more. Of a request that its
// process holds up before the driver, NVML shows nothing for as long as that process likes, and it counts all the same.
func TestAHeldUpRequestCounts(t *testing.T) {
	level := levels[1]
	b := newBench(t, 0, level.config...)
	b.gated(nil, level.name)
	const bytes = 300 * mib
	c, err := b.Start(t.Context(), node.Spec{Name: "c", Pod: "holding-pod", Limits: limits(),
		Program: b.program("c", fmt.Sprintf("holdup:%d:1:6000", bytes), "sleep:600000")})
	b.check(err)
	b.gated(c, level.name)
	b.until("its request is held up", func() bool { return len(b.told("c")) > 0 })
	var steps []string
	for i := range 10 {
		steps = append(steps, fmt.Sprintf("os64:%d:%d", bytes, i+1), "sleep:500")
	}
	refused := 0
	for _, s := range b.asks(c, "beside", steps...) {
		if !strings.HasPrefix(s.line, "os64") {
			continue
		}
		if s.errno != int(syscall.ENOMEM) {
			t.Errorf("beside a request that is held up: %s", s.line)
		}
		refused++
	}
	b.until("its request is answered", func() bool { return len(b.told("c")) > 1 })
	b.same("c", []string{"holding", fmt.Sprintf("holdup:%d:1:6000 0 0 %d", bytes, bytes)})
	if refused != 10 {
		t.Errorf("%d requests beside it", refused)
	}
}

// TestChurnIsNotRefused: a container frees and allocates at once, again and again. NVML is 200 ms behind, and that is
// neither refused nor taken for forgery: at entry where there is room for what it holds only, at strict where there is
// for what it has freed within a settle, too.
func TestChurnIsNotRefused(t *testing.T) {
	for i, tt := range []struct {
		times       int
		bytes       uint64
		hold, after string
	}{
		{times: 200, bytes: 300 * mib, hold: "sleep:20"},
		{times: 20, bytes: 40 * mib, hold: "sleep:100", after: "sleep:400"}, // all together more than the limit
	} {
		level := levels[i]
		t.Run(level.name, func(t *testing.T) {
			b := newBench(t, 200*time.Millisecond, level.config...)
			b.gated(nil, level.name)
			var steps, want []string
			step := func(s string, held uint64) {
				if s != "" {
					steps, want = append(steps, s), append(want, fmt.Sprintf("%s 0 0 %d", s, held))
				}
			}
			for n := range tt.times {
				step(fmt.Sprintf("os64:%d:%d", tt.bytes, n+1), tt.bytes)
				if n%2 == 0 { // now and then it keeps it for some time
					step(tt.hold, tt.bytes)
				}
				step(fmt.Sprintf("free:%d", n+1), 0)
				step(tt.after, 0)
			}
			c, err := b.Start(t.Context(), node.Spec{Name: "c", Pod: "churning-pod", Limits: limits(), Program: b.program("c", steps...)})
			b.check(err)
			b.gated(c, level.name)
			began := time.Now()
			b.check(c.Main.Await(t.Context()))
			t.Logf("stand-in, %s, lag 200ms: %d steps in %.1f s", level.name, len(steps), time.Since(began).Seconds())
			b.same("c", want)
			if e := b.events(c, "kill", "kill-decided", "gate-refused"); len(e) != 0 || c.Main.Killed() {
				t.Errorf("accused: %+v, %s", e, c.Main.Status())
			}
		})
	}
}
