// SPDX-License-Identifier: Apache-2.0

package guest

import (
	"fmt"
	"os"
	"path/filepath"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/gpufence/gpufence/bpf"
)

// TestPoliciesReachWhoHasAskedBefore: a process asks again and again through one file, and each time what holds is the
// policy of then.
func TestPoliciesReachWhoHasAskedBefore(t *testing.T) {
	g := opened(t)
	_, id := cgroup(t, "container")
	nested, _ := cgroup(t, "container/nested")
	p := bpf.Policy{LimitBytes: 100 * mib, UVMBytes: gib, GPU: true, Minors: []int{0}, Enforce: true}
	counted, other := p, p
	counted.Enforce = false
	other.LimitBytes = 200 * mib
	var steps []string
	var want []unix.Errno
	var sockets []string
	for i, part := range []struct {
		bytes uint64
		errno unix.Errno
	}{{200 * mib, 0}, {120 * mib, unix.ENOMEM}, {90 * mib, 0}, {20 * mib, unix.ENOMEM}, {20 * mib, 0}, {200 * mib, 0}, {gib, 0}} {
		socket := filepath.Join(t.TempDir(), "next")
		sockets = append(sockets, socket)
		steps = append(steps, fmt.Sprintf("os64:%d:%d", part.bytes, i+1), "send:"+socket)
		want = append(want, part.errno, 0)
	}
	s := start(t, nested, steps...)
	for i, change := range []func(){
		func() { policy(t, g, id, p) },
		func() {},
		func() {},
		func() { policy(t, g, id, other) },
		func() { policy(t, g, id, counted) },
		func() {
			if err := g.DropPolicy(id); err != nil {
				t.Fatal(err)
			}
		},
		func() {},
	} {
		for began := time.Now(); ; time.Sleep(10 * time.Millisecond) {
			if _, err := os.Stat(sockets[i]); err == nil {
				break // it has asked, and waits
			}
			if time.Since(began) > time.Minute {
				t.Fatalf("it did not ask for the %d. time", i+1)
			}
		}
		change()
		client(t, "/sys/fs/cgroup", "receive:"+sockets[i])
	}
	for i, got := range s.wait(t) {
		if got.errno != want[i] {
			t.Errorf("%s: want errno %d", got.line, want[i])
		}
	}
}
