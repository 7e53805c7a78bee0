// SPDX-License-Identifier: Apache-2.0

package guest

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/gpufence/gpufence/bpf"
)

// holder is a client that has taken memory through a file, and keeps it until it is let go.
func holder(t *testing.T, dir string, g *bpf.Gate, id, bytes uint64) (letGo func()) {
	t.Helper()
	socket := filepath.Join(t.TempDir(), "held")
	before := usage(t, g, id).Used
	s := start(t, dir, fmt.Sprintf("os64:%d:0", bytes), "send:"+socket)
	for began := time.Now(); usage(t, g, id).Used != before+bytes; time.Sleep(10 * time.Millisecond) {
		if time.Since(began) > time.Minute {
			t.Fatalf("%d bytes were not charged", bytes)
		}
	}
	return func() {
		t.Helper()
		client(t, "/sys/fs/cgroup", "receive:"+socket)
		s.wait(t)
	}
}

// TestGivenBackOnce: what gpufenced took off an account, since NVML does not show it any more, goes with its file and
// is not taken off a second time: the account never stands for less than the files that are open hold.
func TestGivenBackOnce(t *testing.T) {
	g := opened(t)
	dir, id := cgroup(t, "container")
	limit(t, g, id, 100*mib)
	adjust := func(bytes int64) {
		t.Helper()
		if _, err := g.Adjust(id, bytes, false); err != nil {
			t.Fatal(err)
		}
	}
	used := func(when string, want uint64) {
		t.Helper()
		if u := usage(t, g, id); u.Used != want {
			t.Errorf("%s: %d KiB charged, want %d", when, int64(u.Used)>>10, want>>10)
		}
	}
	free := holder(t, dir, g, id, 60*mib)
	hold := holder(t, dir, g, id, 30*mib)
	adjust(-60 * mib)
	used("60 of 90 MiB given back", 30*mib)
	free()
	used("the file of what was given back is closed", 30*mib)
	// Then the other may have 70 MiB more, not 130.
	if got := client(t, dir, fmt.Sprintf("os64:%d:0", 80*mib), fmt.Sprintf("os64:%d:0", 60*mib)); got[0].errno != unix.ENOMEM || got[1].errno != 0 {
		t.Errorf("beside it: %+v", got)
	}
	hold()
	used("all files are closed", 0)

	// Whose it was is not known: a file that closes first is taken for it, until gpufenced looks again.
	other, mine := holder(t, dir, g, id, 60*mib), holder(t, dir, g, id, 30*mib)
	adjust(-30 * mib)
	other()
	used("another file is closed", 30*mib)
	adjust(-30 * mib)
	mine()
	used("and what gave back", 0)

	// What was charged back is given back like everything else.
	adjust(20 * mib)
	again := holder(t, dir, g, id, 30*mib)
	again()
	used("charged back, beside a file that is closed", 20*mib)
	adjust(-20 * mib)
	again = holder(t, dir, g, id, 30*mib)
	again()
	used("after that", 0)
}

// TestEveryChargeEnds: whatever became of a request, once it is over gpufenced knows that nothing more comes of it, and
// what was refused is in no account.
func TestEveryChargeEnds(t *testing.T) {
	g := opened(t)
	for _, commits := range []bool{false, true} {
		if commits {
			watched(t, g)
		}
		s := settings()
		s.Commits = commits
		if err := g.Configure(s); err != nil {
			t.Fatal(err)
		}
		dir, id := cgroup(t, fmt.Sprint("container-", commits))
		limit(t, g, id, 100*mib)
		got := client(t, dir, fmt.Sprintf("os64:%d:1", 60*mib), fmt.Sprintf("os64:%d:2", 60*mib), fmt.Sprintf("heap2:%d:3", 20*mib), "free:1",
			fmt.Sprintf("os21:%d:4", 80*mib), fmt.Sprintf("os64:%d:5", 8*mib))
		for i, want := range []unix.Errno{0, unix.ENOMEM, 0, 0, 0, unix.ENOMEM} {
			if got[i].errno != want {
				t.Errorf("%s: want errno %d", got[i].line, want)
			}
		}
		u, err := g.Adjust(id, 0, true)
		if err != nil || u.Used != 0 || u.Ended != u.Charged || u.Charged != 160*mib || u.Peak != 100*mib {
			t.Errorf("copies watched %v: %+v, %v", commits, u, err)
		}
	}
}

// TestManagedMemoryBesideDeviceMemory: a managed range and device memory have one room.
func TestManagedMemoryBesideDeviceMemory(t *testing.T) {
	g := opened(t)
	dir, id := cgroup(t, "container")
	p := bpf.Policy{LimitBytes: 100 * mib, UVMBytes: 100 * mib, GPU: true, Minors: []int{0}, Enforce: true, EnforceUVM: true}
	steps := []string{fmt.Sprintf("os64:%d:1", 60*mib), fmt.Sprintf("mmap:%d", 48*mib), fmt.Sprintf("mmap:%d", 32*mib),
		fmt.Sprintf("os64:%d:2", 16*mib), "free:1", fmt.Sprintf("os64:%d:3", 60*mib), fmt.Sprintf("os64:%d:4", 64*mib)}
	for _, tt := range []struct {
		name   string
		edit   func(*bpf.Policy)
		want   []unix.Errno
		denied uint64
	}{
		{"enforced", func(*bpf.Policy) {}, []unix.Errno{0, unix.ENOMEM, 0, unix.ENOMEM, 0, 0, unix.ENOMEM}, 2},
		{"counted", func(p *bpf.Policy) { p.EnforceUVM = false }, []unix.Errno{0, 0, 0, 0, 0, 0, unix.ENOMEM}, 3},
		{"with room", func(p *bpf.Policy) { p.UVMBytes = ^uint64(0) }, []unix.Errno{0, 0, 0, 0, 0, 0, unix.ENOMEM}, 1},
	} {
		t.Run(tt.name, func(t *testing.T) {
			with := p
			tt.edit(&with)
			policy(t, g, id, with)
			before := usage(t, g, id).Denied
			for i, s := range client(t, dir, steps...) {
				if s.errno != tt.want[i] {
					t.Errorf("%s: errno %d, want %d", s.line, s.errno, tt.want[i])
				}
			}
			u := usage(t, g, id)
			if u.Used != 0 || u.UVM != 0 || u.Denied-before != tt.denied {
				t.Errorf("%d and %d bytes stay, %d denied, want %d", u.Used, u.UVM, u.Denied-before, tt.denied)
			}
		})
	}
}

// reached waits until a client that sends its file has come so far.
func reached(t *testing.T, socket string) {
	t.Helper()
	for began := time.Now(); ; time.Sleep(10 * time.Millisecond) {
		if _, err := os.Stat(socket); err == nil {
			return
		}
		if time.Since(began) > 2*time.Minute {
			t.Fatalf("nobody is at %s", socket)
		}
	}
}

// TestAnAccountIsMadeAnew: a container and its pod are let go while files are open, and managed again. What the files held
// before is none of the new accounts', whether they are closed, freed through or asked through again.
func TestAnAccountIsMadeAnew(t *testing.T) {
	g := opened(t)
	_, podID := cgroup(t, "pod")
	dir, id := cgroup(t, "pod/container")
	manage := func() {
		t.Helper()
		limit(t, g, podID, gib)
		limit(t, g, id, 500*mib)
	}
	used := func(when string, bytes, ranges uint64) {
		t.Helper()
		pod, container := usage(t, g, podID), usage(t, g, id)
		if pod.Used != bytes || container.Used != bytes || container.UVM != ranges || container.Ended > container.Charged {
			t.Errorf("%s: pod %d KiB, container %d KiB and ranges of %d, want %d and %d", when, int64(pod.Used)>>10, int64(container.Used)>>10, int64(container.UVM)>>10, bytes>>10, ranges>>10)
		}
	}
	manage()
	folder := t.TempDir()
	at := func(i int) string { return filepath.Join(folder, fmt.Sprint(i)) }
	s := start(t, dir, fmt.Sprintf("os64:%d:1", 60*mib), fmt.Sprintf("mmap:%d", 32*mib), "send:"+at(1), fmt.Sprintf("os64:%d:2", 20*mib), "send:"+at(2), "free:1", "send:"+at(3), "free:2", "send:"+at(4),
		fmt.Sprintf("os64:%d:3", 8*mib), "send:"+at(5))
	closes := start(t, dir, fmt.Sprintf("os64:%d:1", 40*mib), fmt.Sprintf("mmap:%d", 16*mib), "send:"+at(6))
	next := func(i int) {
		t.Helper()
		client(t, "/sys/fs/cgroup", "receive:"+at(i))
		reached(t, at(i+1))
	}
	reached(t, at(1))
	reached(t, at(6))
	used("before", 100*mib, 48*mib)
	for _, cgroup := range []uint64{id, podID} {
		if err := g.DropPolicy(cgroup); err != nil {
			t.Fatal(err)
		}
	}
	manage()
	used("made anew", 0, 0)
	client(t, "/sys/fs/cgroup", "receive:"+at(6))
	closes.wait(t)
	used("a file of before is closed", 0, 0)
	next(1)
	used("asked through a file of before", 20*mib, 0)
	next(2)
	used("what was got before is freed", 20*mib, 0)
	next(3)
	used("what was got since is freed", 0, 0)
	next(4)
	used("asked once more", 8*mib, 0)
	client(t, "/sys/fs/cgroup", "receive:"+at(5))
	s.wait(t)
	used("the file is closed", 0, 0)
	if got := client(t, dir, fmt.Sprintf("os64:%d:1", 400*mib)); got[0].errno != 0 {
		t.Errorf("after that: %+v", got)
	}
}

// TestFilesOfOneContainer: a container can open so many files that it has no room for one more, and no other is refused for
// that; and what is refused takes no room.
func TestFilesOfOneContainer(t *testing.T) {
	g := opened(t)
	const most = 4096
	dir, id := cgroup(t, "container")
	limit(t, g, id, gib)
	other, otherID := cgroup(t, "other")
	limit(t, g, otherID, 100*mib)
	ctx, cancel := context.WithCancel(t.Context())
	var full atomic.Int64
	ended := make(chan error, 1)
	go func() {
		ended <- g.Events(ctx, func(e bpf.Event) {
			if e.Cgroup == id && e.Kind.String() == "too-many-files" && e.Errno == int(unix.ENOMEM) {
				full.Add(1)
			}
		})
	}()
	socket := filepath.Join(t.TempDir(), "full")
	// Only the first refusals of a second are told of: so those of the limit are in another one.
	s := start(t, dir, fmt.Sprintf("files:%d:%d", most+8, 2*gib), "sleep:1100", fmt.Sprintf("files:%d:1", most+8), "mmap:4096", "send:"+socket)
	reached(t, socket)
	if got := client(t, other, fmt.Sprintf("os64:%d:1", mib)); got[0].errno != 0 {
		t.Errorf("another container: %+v", got)
	}
	if got := client(t, dir, "os64:1:1"); got[0].errno != unix.ENOMEM {
		t.Errorf("one more file: %+v", got)
	}
	if u := usage(t, g, id); u.Used != most*64<<10 || u.Ended != u.Charged {
		t.Errorf("%+v", u)
	}
	client(t, "/sys/fs/cgroup", "receive:"+socket)
	got := s.wait(t)
	for i, want := range map[int]uint64{0: 0, 2: most} {
		if n := number(t, got[i].line, "asked"); n != want || number(t, got[i].line, "error") != uint64(unix.ENOMEM) {
			t.Errorf("%s, want %d", got[i].line, want)
		}
	}
	if u := usage(t, g, id); u.Used != 0 || u.UVM != 0 {
		t.Errorf("all are closed: %+v", u)
	}
	if got := client(t, dir, "os64:1:1"); got[0].errno != 0 {
		t.Errorf("when they are closed: %+v", got)
	}
	time.Sleep(400 * time.Millisecond) // not every event wakes the reader
	cancel()
	if err := <-ended; !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
	if full.Load() == 0 {
		t.Error("nobody was told of it")
	}
}
