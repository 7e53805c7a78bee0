// SPDX-License-Identifier: Apache-2.0

package killfuzz

import (
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/gpufence/gpufence/enforcer/ledger"
	"github.com/gpufence/gpufence/tests/simgpu/server"
	"github.com/gpufence/gpufence/tests/simgpu/simtest"
)

const (
	mib = uint64(1) << 20

	namespaces   = 2
	perNamespace = 32
	contextBytes = 16 * mib
	limit        = 3 << 30 // contexts of all, and less than all may want

	// hang is how long a call may be under way.
	hang = 20 * time.Second
	// slow is what a reserve may take, apart from waiting for a core: there are two threads of each of
	// 64 processes, and how long they wait for one says nothing of the shim.
	slow = 100 * time.Millisecond
)

// soaking says whether times are measured, or looked at only for what hangs.
func soaking(n int) bool { return n >= 10000 }

// kills is how many processes are killed: 300, or $GPUFENCE_KILLS in a soak.
func kills(t *testing.T) int {
	t.Helper()
	text := os.Getenv("GPUFENCE_KILLS")
	if text == "" {
		return 300
	}
	n, err := strconv.Atoi(text)
	if err != nil || n < 1 {
		t.Fatalf("read GPUFENCE_KILLS %q: write a number", text)
	}
	return n
}

// fuzz is a pod under fire.
type fuzz struct {
	t         *testing.T
	sim       *server.Server
	pod       *ledger.Pod
	container *ledger.Container
	inits     []*exec.Cmd
	ended     []chan struct{} // closed when they were waited for
	files     []string        // what the workers say, by pid namespace
	free      map[int]uint32
	since     map[int]time.Time
	kills     int
	reclaimed int
}

// start makes the pages as gpufenced does, and two pid namespaces full of workers.
func start(t *testing.T) *fuzz {
	t.Helper()
	simDir, sim := simtest.Start(t, "--model", "t4", "--memory", "16GiB", "--context-bytes", "16MiB", "--second-context", "100", "--module-bytes", "2MiB")
	f := &fuzz{t: t, sim: sim, free: map[int]uint32{}, since: map[int]time.Time{}}
	dir := t.TempDir()
	pod, err := ledger.CreatePod(filepath.Join(dir, "pod"), ledger.Options{Plain: true})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = pod.Close() }) // a test's own folder goes anyway
	c, err := pod.AddContainer("main", 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close() })
	f.pod, f.container = pod, c
	gpu := sim.State().GPUs[0]
	l := ledger.LimitsGPU{Present: true, Fenced: true, TotalBytes: gpu.TotalBytes, ContextBytes: contextBytes, MaxBytes: limit, PodMaxBytes: limit,
		HighBytes: ledger.Unlimited, PodHighBytes: ledger.Unlimited}
	raw, err := hex.DecodeString(strings.ReplaceAll(strings.TrimPrefix(gpu.UUID, "GPU-"), "-", ""))
	if err != nil || copy(l.UUID[:], raw) != len(l.UUID) {
		t.Fatalf("read UUID %q: %v", gpu.UUID, err)
	}
	if err := c.Publish(ledger.Limits{Generation: 1, GPU: []ledger.LimitsGPU{l}}); err != nil {
		t.Fatal(err)
	}
	shim := deliver(t, dir, pod, c)
	for i := range namespaces {
		file := filepath.Join(dir, fmt.Sprintf("workers-%d", i))
		if err := os.WriteFile(file, nil, 0o600); err != nil {
			t.Fatal(err)
		}
		f.files = append(f.files, file)
		cmd := exec.CommandContext(t.Context(), simtest.Dist(t, "clients/killfuzz"), "init", strconv.Itoa(perNamespace), file)
		cmd.Env = append(os.Environ(), "SIMGPU_DIR="+simDir, "LD_LIBRARY_PATH="+filepath.Dir(simtest.Dist(t, "simgpu/libcuda.so.1")), "LD_PRELOAD="+shim, "CUDA_MODULE_LOADING=EAGER")
		cmd.Stderr = os.Stderr
		cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWPID, Setpgid: true}
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		ended := make(chan struct{})
		go func() {
			_ = cmd.Wait() // how is in ProcessState
			close(ended)
		}()
		f.inits, f.ended = append(f.inits, cmd), append(f.ended, ended)
	}
	t.Cleanup(f.stop)
	return f
}

// deliver puts the shim, in the build that times its reserves, beside its pages; links stand in for the bind mounts.
func deliver(t *testing.T, dir string, pod *ledger.Pod, c *ledger.Container) string {
	t.Helper()
	lib := filepath.Join(dir, "fence", "lib64")
	if err := os.MkdirAll(lib, 0o755); err != nil {
		t.Fatal(err)
	}
	for from, to := range map[string]string{
		filepath.Join(c.Dir(), ledger.LimitsName): filepath.Join(dir, "fence", ledger.LimitsName),
		pod.LedgerPath(): filepath.Join(dir, "fence", ledger.LedgerName),
		simtest.Dist(t, "obj/shim/timed/libgpufence.so"): filepath.Join(lib, "libgpufence.so"),
	} {
		if err := os.Symlink(from, to); err != nil {
			t.Fatal(err)
		}
	}
	return filepath.Join(lib, "libgpufence.so")
}

// stop ends both namespaces, with everything in them.
func (f *fuzz) stop() {
	for i, cmd := range f.inits {
		_ = cmd.Process.Kill() // it may have ended by itself, which total tells
		<-f.ended[i]
	}
}

// victims are the processes of the namespaces, but for their first ones.
func (f *fuzz) victims() []int {
	var out []int
	queue := []int{}
	for _, cmd := range f.inits {
		queue = append(queue, cmd.Process.Pid)
	}
	for len(queue) > 0 {
		pid := queue[0]
		queue = queue[1:]
		text, err := os.ReadFile(fmt.Sprintf("/proc/%d/task/%d/children", pid, pid))
		if err != nil {
			continue // it has ended
		}
		for _, word := range strings.Fields(string(text)) {
			child, err := strconv.Atoi(word)
			if err != nil {
				f.t.Fatal(err)
			}
			out = append(out, child)
			queue = append(queue, child)
		}
	}
	return out
}

// shoot kills one of them. Another process cannot have got its number meanwhile: its parent is in
// the same namespace and reaps through us no sooner than it is dead.
func (f *fuzz) shoot() {
	all := f.victims()
	if len(all) == 0 {
		return
	}
	err := syscall.Kill(all[rand.IntN(len(all))], syscall.SIGKILL)
	switch {
	case err == nil:
		f.kills++
	case !errors.Is(err, syscall.ESRCH):
		f.t.Fatal(err)
	}
}

// reclaim does what gpufenced does for owners that are gone: a slot whose lock is free for longer
// than a moment has lost its owner.
func (f *fuzz) reclaim(settle time.Duration) {
	f.t.Helper()
	l := f.pod.Ledger()
	s, err := l.Snapshot()
	if err != nil {
		f.t.Fatal(err)
	}
	for i := range s.Slots {
		slot := &s.Slots[i]
		free, err := l.LockFree(slot.Index)
		if err != nil {
			f.t.Fatal(err)
		}
		if !free {
			delete(f.since, slot.Index)
			continue
		}
		if at, ok := f.since[slot.Index]; !ok || f.free[slot.Index] != slot.Generation {
			f.since[slot.Index], f.free[slot.Index] = time.Now(), slot.Generation
			if settle > 0 {
				continue
			}
		} else if time.Since(at) < settle {
			continue
		}
		err = l.Reclaim(slot.Index, slot.Generation, false)
		if err != nil && !errors.Is(err, ledger.ErrBusy) && !errors.Is(err, ledger.ErrMoved) {
			f.t.Fatal(err)
		}
		if err == nil {
			f.reclaimed++
		}
		delete(f.since, slot.Index)
	}
	if _, err := l.ClearOverflow(); err != nil {
		f.t.Fatal(err)
	}
}

// total adds the workers' numbers up, and ends the test on a call that does not come back.
type total struct {
	takes, refusals, gives, starts uint64
	wall, cpu                      time.Duration // the longest call
	reserves                       uint64
	reserve                        struct{ wall, apart, cpu time.Duration } // the longest
}

func (f *fuzz) total() total {
	f.t.Helper()
	for i, cmd := range f.inits {
		select {
		case <-f.ended[i]:
			f.t.Fatalf("the first process of a namespace has ended: %s", cmd.ProcessState)
		default:
		}
	}
	var t total
	var now unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_MONOTONIC, &now); err != nil {
		f.t.Fatal(err)
	}
	for _, file := range f.files {
		b, err := os.ReadFile(file)
		if err != nil {
			f.t.Fatal(err)
		}
		const size = 12 * 8 // struct killfuzz_worker
		for ; len(b) >= size; b = b[size:] {
			word := func(i int) uint64 { return binary.LittleEndian.Uint64(b[8*i:]) }
			for thread := range 2 {
				if since := int64(word(thread)); since != 0 && now.Nano()-since > int64(hang) {
					f.t.Fatalf("a call is under way for %s", time.Duration(now.Nano()-since))
				}
			}
			t.takes += word(2)
			t.refusals += word(3)
			t.gives += word(4)
			t.starts += word(5)
			t.wall = max(t.wall, time.Duration(word(6)))
			t.cpu = max(t.cpu, time.Duration(word(7)))
			t.reserves += word(8)
			t.reserve.wall = max(t.reserve.wall, time.Duration(word(9)))
			t.reserve.apart = max(t.reserve.apart, time.Duration(word(10)))
			t.reserve.cpu = max(t.reserve.cpu, time.Duration(word(11)))
		}
	}
	return t
}

// end kills everybody and looks at what is left.
func (f *fuzz) end() {
	f.t.Helper()
	t := f.total()
	f.stop()
	f.reclaim(0)
	f.reclaim(0)
	s, err := f.pod.Ledger().Snapshot()
	if err != nil {
		f.t.Fatal(err)
	}
	for i := range s.Slots {
		f.t.Errorf("slot %d is still %s, of process %d", s.Slots[i].Index, s.Slots[i].State, s.Slots[i].PID)
	}
	if o := &s.Overflow.GPU[0]; o.DeviceBytes != 0 || o.ManagedBytes != 0 {
		f.t.Errorf("the overflow slot still holds %d and %d bytes", o.DeviceBytes, o.ManagedBytes)
	}
	deadline := time.Now().Add(hang)
	for f.sim.State().GPUs[0].UsedBytes != 0 && time.Now().Before(deadline) {
		time.Sleep(10 * time.Millisecond)
	}
	// The peak is shown only: a killed process's memory may outlive its lock, by a child that has
	// its descriptors.
	gpu := f.sim.State().GPUs[0]
	if gpu.UsedBytes != 0 {
		f.t.Errorf("%d bytes are still held on the GPU", gpu.UsedBytes)
	}
	fmt.Printf("# %s: %d kills, %d starts, %d takes, %d refused, %d gives, %d slots reclaimed; at most %d MiB of %d held\n",
		f.t.Name(), f.kills, t.starts, t.takes, t.refusals, t.gives, f.reclaimed, gpu.PeakUsedBytes/mib, limit/mib)
	fmt.Printf("# %s: %d reserves, the longest %s apart from waiting for a core (%s with it, %s running); the longest call %s, %s of it running\n",
		f.t.Name(), t.reserves, t.reserve.apart, t.reserve.wall, t.reserve.cpu, t.wall, t.cpu)
	if t.takes == 0 || t.gives == 0 || t.refusals == 0 || t.reserves == 0 {
		f.t.Error("not everything happened")
	}
	bound := slow
	if !soaking(kills(f.t)) {
		bound = 20 * slow
	}
	if t.reserve.apart > bound {
		f.t.Errorf("a reserve took %s, apart from waiting for a core", t.reserve.apart)
	}
}

// TestKilledUnderGpufenced: gpufenced beats, samples and reclaims.
func TestKilledUnderGpufenced(t *testing.T) {
	t.Parallel()
	n := kills(t)
	f := start(t)
	sample := uint64(0)
	for f.kills < n {
		sample++
		if err := errors.Join(f.container.Beat(), f.container.BeginSample(sample)); err != nil {
			t.Fatal(err)
		}
		for range 2 {
			f.shoot()
		}
		f.reclaim(60 * time.Millisecond)
		f.total()
		time.Sleep(time.Duration(20+rand.IntN(30)) * time.Millisecond)
	}
	f.end()
}

// TestKilledWithoutGpufenced: nobody reclaims but the peers themselves, once they have seen for ten
// seconds that nobody beats.
func TestKilledWithoutGpufenced(t *testing.T) {
	t.Parallel()
	n := kills(t)
	f := start(t)
	var longest time.Duration
	rounds := max(1, n/1000)
	for round := 1; round <= rounds; round++ {
		for f.kills < n*round/rounds {
			f.shoot()
			f.total()
			time.Sleep(time.Duration(10+rand.IntN(20)) * time.Millisecond)
		}
		// What the dead have left must come back to the living: those leave a full ledger to whoever has
		// lived for ten seconds, again and again. While they are shot nobody lives for so long.
		calm, takes := time.Now(), f.total().takes
		for since, got := calm, false; !got || time.Since(calm) < ledger.StaleAfter+3*time.Second; time.Sleep(100 * time.Millisecond) {
			if now := f.total().takes; now != takes {
				takes, since, got = now, time.Now(), true
			}
			longest = max(longest, time.Since(since))
			if longest > ledger.StaleAfter+hang {
				t.Fatalf("round %d: nobody got anything for %s", round, longest)
			}
		}
	}
	fmt.Printf("# %s: nobody got anything for at most %s\n", t.Name(), longest.Round(100*time.Millisecond))
	f.end()
}
