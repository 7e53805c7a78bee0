// SPDX-License-Identifier: Apache-2.0

package act

import (
	"os/exec"
	"slices"
	"testing"
	"time"
)

func TestExits(t *testing.T) {
	h, err := NewHost("/proc", "/sys/fs/cgroup")
	if err != nil {
		t.Fatal(err)
	}
	e, err := NewExits()
	if err != nil {
		t.Fatal(err)
	}
	defer e.Close()
	var pids []int
	stop := map[int]func(){}
	for range 100 { // more than fit into one look
		cmd := exec.CommandContext(t.Context(), "sleep", "1000")
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		pid := cmd.Process.Pid
		stop[pid] = func() {
			_ = cmd.Process.Kill()
			_ = cmd.Wait() // it was killed
		}
		t.Cleanup(stop[pid])
		p, err := h.Open(pid, 0)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { p.Close() })
		if err := e.Add(p); err != nil {
			t.Fatal(err)
		}
		pids = append(pids, pid)
	}
	if got, err := e.Look(nil); err != nil || len(got) != 0 {
		t.Fatalf("all live, but %v, %v", got, err)
	}
	ended := pids[:70]
	for _, pid := range ended {
		stop[pid]()
	}
	got, err := e.Look(nil)
	for deadline := time.Now().Add(20 * time.Second); err == nil && len(got) < len(ended) && time.Now().Before(deadline); {
		got, err = e.Look(got)
	}
	slices.Sort(got)
	if want := slices.Sorted(slices.Values(ended)); err != nil || !slices.Equal(got, want) {
		t.Fatalf("%v, %v, want %v", got, err, want)
	}
	if got, err := e.Look(nil); err != nil || len(got) != 0 {
		t.Errorf("reported twice: %v, %v", got, err)
	}
}
