// SPDX-License-Identifier: Apache-2.0

package guest

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/gpufence/gpufence/bpf"
	"github.com/gpufence/gpufence/enforcer/fence/gatecredit"
)

func strict() bpf.Settings {
	return bpf.Settings{Commits: true, KillRaces: true, CloseHeap: true, CloseDup: true, EventsPerSecond: 20}
}

// watched attaches the programs that look at the stand-in's copies, until the test ends.
func watched(t *testing.T, g *bpf.Gate) bpf.Copies {
	t.Helper()
	how, err := g.AttachCopies()
	if err != nil {
		t.Fatalf("watch copies: %v", err)
	}
	t.Cleanup(func() {
		if err := g.Configure(settings()); err != nil {
			t.Error(err)
		}
		if err := g.ReleaseCopies(); err != nil {
			t.Error(err)
		}
	})
	if _, want := expected(); how != want {
		known, _ := filepath.Glob("/sys/kernel/btf/*")
		console, _ := exec.CommandContext(t.Context(), "dmesg").CombinedOutput()
		t.Logf("%v, %v\n%s", g.Worse(), known, console[max(0, len(console)-1500):])
		t.Errorf("copies are watched by %s, this guest was made for %s", how, want)
	}
	return how
}

// TestLevelIsTrue: what this kernel gives is what is said of it.
func TestLevelIsTrue(t *testing.T) {
	g := opened(t)
	how := watched(t, g)
	misses, err := g.Misses()
	if err != nil {
		t.Fatal(err)
	}
	level, why := bpf.LevelOf(g.Carrier(), how, strict(), true, misses, g.Release())
	want := bpf.LevelStrict
	if g.Carrier() == bpf.CarrierFmodRet || how == bpf.CopiesProbe {
		want = bpf.LevelEntry
	}
	t.Logf("carrier %s, copies by %s, %d runs left out: level %s (%v)", g.Carrier(), how, misses, level, why)
	if level != want {
		t.Errorf("level %s, want %s", level, want)
	}
}

// atStrict gives the gate at its best level, and a container with a limit of 100 MiB; it skips where there is no such level.
func atStrict(t *testing.T) (g *bpf.Gate, dir string, id uint64) {
	t.Helper()
	g = opened(t)
	if g.Carrier() != bpf.CarrierLSM {
		t.Skip("SKIPPED: no strict level here, bpf is not among the security modules")
	}
	watched(t, g)
	if err := g.Configure(strict()); err != nil {
		t.Fatal(err)
	}
	dir, id = cgroup(t, "container")
	limit(t, g, id, 100*mib)
	mark(t, 100*mib)
	return g, dir, id
}

// windowTries is how often the size is changed in the window at strict, each time with success, and counted by the
// driver too, as what it took of a size above the limit.
const windowTries = 10000

// TestStandInWindowAtStrict: the size is changed while the driver's copy waits for a page, so after the door has read
// it and before the driver does. Each try wins, and nobody lives to use what it got.
func TestStandInWindowAtStrict(t *testing.T) {
	if _, how := expected(); how == bpf.CopiesProbe {
		t.Skip("SKIPPED: where copies are watched by name the level is entry: of 3,000 tries the kernel left out the looks at one")
	}
	g, dir, id := atStrict(t)
	began := time.Now()
	line := client(t, dir, "anew", fmt.Sprintf("window:%d:%d:%d:%d", windowTries, 64<<10, 900*mib, 100*mib))[1].line
	t.Logf("stand-in, strict: %s, in %.1f s", line, time.Since(began).Seconds())
	for _, word := range []string{"inside", "taken-above", "killed"} {
		if n := number(t, line, word); n != windowTries {
			t.Errorf("%s: %d of %d", word, n, windowTries)
		}
	}
	if number(t, line, "survived") != 0 || number(t, line, "escaped") != 0 {
		t.Error("somebody lived to use it")
	}
	u := usage(t, g, id)
	if u.Races != windowTries || u.Used != 0 {
		t.Errorf("%d races seen, %d bytes stay charged", u.Races, u.Used)
	}
	if misses, err := g.Misses(); err != nil || misses != 0 {
		t.Errorf("%d runs left out, %v", misses, err)
	}
}

// TestStandInWindowThroughASharedFile: who changed the request is killed, but another process holds the same open file,
// and with it what was got. Nobody of the container reaches the driver until that is closed.
func TestStandInWindowThroughASharedFile(t *testing.T) {
	g, dir, id := atStrict(t)
	other, otherID := cgroup(t, "other")
	limit(t, g, otherID, 100*mib)
	holder := start(t, dir, fmt.Sprintf("sharedwindow:1:%d:%d:%d", 64<<10, 900*mib, 100*mib), "os64:1:9", "send:/tmp/held")
	got := client(t, dir, "receive:/tmp/held", "os64:1:10", "reopen", "os64:1:11", "host:62", "mmap:4096", "sleep:1")
	beside := client(t, other, fmt.Sprintf("os64:%d:1", mib))
	steps := holder.wait(t)
	t.Logf("stand-in, strict: %s", steps[0].line)
	if number(t, steps[0].line, "killed") != 1 || number(t, steps[0].line, "survived") != 0 {
		t.Error("who changed it was not killed")
	}
	if steps[1].errno != unix.EPERM || got[1].errno != unix.EPERM || got[3].errno != unix.EPERM || got[4].errno != unix.EPERM {
		t.Errorf("while the file is held: %s; %+v", steps[1].line, got)
	}
	if beside[0].errno != 0 {
		t.Errorf("another container: %+v", beside)
	}
	if after := client(t, dir, fmt.Sprintf("os64:%d:1", 60*mib)); after[0].errno != 0 || after[0].held != 60*mib {
		t.Errorf("after the file was closed: %+v", after)
	}
	if u := usage(t, g, id); u.Used != 0 || u.Races != 1 {
		t.Errorf("%+v", u)
	}
}

// TestStandInDuplicates: at strict an object is duplicated within its container only, and of a client that is known.
func TestStandInDuplicates(t *testing.T) {
	g, dir, _ := atStrict(t)
	const source, device, unknown = 0xc1d00001, 0xc1d00010, 0xc1d00011 // clients' names for themselves, as the driver knows them; the first is the one who takes memory
	other, otherID := cgroup(t, "other")
	limit(t, g, otherID, 100*mib)
	folder := t.TempDir()
	at := func(name string) string { return filepath.Join(folder, name) }
	dups := func(clients ...int) (steps []string) {
		for _, c := range clients {
			steps = append(steps, fmt.Sprintf("dup:%d", c))
		}
		return steps
	}
	check := func(who string, got []step, want ...unix.Errno) {
		t.Helper()
		for i, w := range want {
			if s := got[len(got)-len(want)+i]; s.errno != w {
				t.Errorf("%s: %s, want errno %d", who, s.line, w)
			}
		}
	}
	const no = unix.EPERM
	holder := start(t, dir, fmt.Sprintf("os64:%d:1", mib), fmt.Sprintf("device:%d:2", device), "send:"+at("held"))
	reached(t, at("held"))
	check("within the container", client(t, dir, dups(source, device, unknown)...), 0, 0, no)
	check("within a client", client(t, dir, fmt.Sprintf("dup:%d:%d", unknown, unknown)), 0)
	check("across containers", client(t, other, dups(source, device, unknown)...), no, no, no)
	check("of who has made a client and says another's name", client(t, other, fmt.Sprintf("root:%d:%d", unknown, unknown), fmt.Sprintf("dup:%d", unknown)), 0, no)
	// Who changes a request after the door has read it may say that another's client is his. Then it is nobody's, until
	// both files are closed.
	liar := start(t, other, fmt.Sprintf("device:%d:3", device), "send:"+at("claimed"))
	reached(t, at("claimed"))
	check("of who claims another's client", client(t, other, dups(device)...), no)
	check("of whose client another claims", client(t, dir, dups(device, source)...), no, 0)
	client(t, "/sys/fs/cgroup", "receive:"+at("claimed"))
	liar.wait(t)
	liar = start(t, other, fmt.Sprintf("device:%d:3", device), "send:"+at("again"))
	reached(t, at("again"))
	check("of who claims it again", client(t, other, dups(device)...), no)
	client(t, "/sys/fs/cgroup", "receive:"+at("again"))
	liar.wait(t)
	policy(t, g, otherID, bpf.Policy{LimitBytes: 100 * mib, GPU: true, Minors: []int{0}})
	check("audited", client(t, other, dups(source)...), 0)
	client(t, "/sys/fs/cgroup", "receive:"+at("held"))
	holder.wait(t)
	check("when its file is closed", client(t, dir, dups(source, device)...), no, no)
	check("and it is another's", client(t, dir, fmt.Sprintf("device:%d:1", device), fmt.Sprintf("dup:%d", device)), 0, 0)
}

// TestClientsOfAFile: the first of a file are known, and no more of them than there is room for.
func TestClientsOfAFile(t *testing.T) {
	_, dir, _ := atStrict(t)
	var steps []string
	const most = 8
	for i := range most + 1 {
		steps = append(steps, fmt.Sprintf("device:%d:1", 100+i))
	}
	for i := range most + 1 {
		steps = append(steps, fmt.Sprintf("dup:%d", 100+i))
	}
	got := client(t, dir, steps...)[most+1:]
	for i, s := range got {
		if want := map[bool]unix.Errno{true: unix.EPERM}[i == most]; s.errno != want {
			t.Errorf("client %d: %s, want errno %d", i, s.line, want)
		}
	}
}

// TestStandInWindowsOnMemory: request 0x27 gives administrators windows on the device's memory, and everybody host memory.
func TestStandInWindowsOnMemory(t *testing.T) {
	g := opened(t)
	dir, id := cgroup(t, "container")
	limit(t, g, id, 100*mib)
	classes := []string{"host:64", "host:194", "host:129", "host:130", "host:131", "host:62", "host:113"}
	check := func(who string, got []step, want ...unix.Errno) {
		t.Helper()
		for i := range want {
			if s := got[len(got)-len(want)+i]; s.errno != want[i] {
				t.Errorf("%s: %s, want errno %d", who, s.line, want[i])
			}
		}
	}
	const no = unix.EPERM
	check("an administrator", client(t, dir, classes...), no, no, no, no, no, 0, 0)
	check("a user", client(t, dir, append([]string{"asuser:1000"}, classes...)...), 0, 0, 0, 0, 0, 0, 0)
	check("unmanaged", client(t, "/sys/fs/cgroup", classes...), 0, 0, 0, 0, 0, 0, 0)
	// At strict another thread's change of the class must not matter.
	if err := g.Configure(bpf.Settings{CloseHeap: true, EventsPerSecond: 20}); err != nil {
		t.Fatal(err)
	}
	check("an administrator at strict", client(t, dir, classes...), no, no, no, no, no, no, no)
	check("a user at strict", client(t, dir, append([]string{"asuser:1000"}, classes...)...), 0, 0, 0, 0, 0, 0, 0)
}

// raceTries is how many tries must pass the door where the change comes by chance.
const raceTries = 2000

// TestStandInRaceAtStrict: a thread changes the size again and again, when it likes.
func TestStandInRaceAtStrict(t *testing.T) {
	g, dir, id := atStrict(t)
	began := time.Now()
	got := client(t, dir, "anew", fmt.Sprintf("race:%d:%d:%d:%d", raceTries, 64<<10, 900*mib, 100*mib))
	line := got[1].line
	t.Logf("stand-in, strict: %s, in %.1f s", line, time.Since(began).Seconds())
	if n := number(t, line, "passed"); n+number(t, line, "killed") < raceTries {
		t.Errorf("%d tries passed the door", n)
	}
	if n := number(t, line, "escaped"); n != 0 {
		t.Errorf("%d escaped", n)
	}
	u := usage(t, g, id)
	if u.Races < number(t, line, "taken-above") {
		t.Errorf("%d of %d races seen", u.Races, number(t, line, "taken-above"))
	}
	if u.Used != 0 {
		t.Errorf("%d bytes stay charged", u.Used)
	}
}

// TestStandInStrictPaths: at strict, what the driver did not give is given back at once, older calls are closed,
// and a request of another class that turns out to be device memory is found.
func TestStandInStrictPaths(t *testing.T) {
	g := opened(t)
	watched(t, g)
	if err := g.Configure(strict()); err != nil {
		t.Fatal(err)
	}
	dir, id := cgroup(t, "container")
	limit(t, g, id, 100*mib)
	got := client(t, dir, fmt.Sprintf("os64:%d:1", 60*mib), fmt.Sprintf("os21:%d:2", 60*mib), fmt.Sprintf("xfer:%d:3", 40*mib), fmt.Sprintf("heap2:%d:4", mib), "os64:1:5")
	for i, want := range []unix.Errno{0, unix.ENOMEM, 0, unix.EPERM, unix.ENOMEM} {
		if got[i].errno != want {
			t.Errorf("%s, want %d", got[i].line, want)
		}
	}
	stats, err := g.Stats()
	if err != nil || stats["commits"] < 2 {
		t.Errorf("%v, %v", stats, err)
	}
	if u := usage(t, g, id); u.Races != 0 || u.Used != 0 {
		t.Errorf("an honest program: %+v", u)
	}
}

// mark sets from what size on the stand-in counts a request as one that should not have reached it.
func mark(t *testing.T, bytes uint64) {
	t.Helper()
	if err := os.WriteFile("/sys/module/nvidia/parameters/over", fmt.Append(nil, bytes), 0o600); err != nil {
		t.Fatal(err)
	}
}

// driver is the stand-in's own word, as NVML's would be.
type driver struct{ f *os.File }

func theDriver(t *testing.T) driver {
	t.Helper()
	f, err := os.OpenFile("/dev/nvidiactl", os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = f.Close() })
	return driver{f}
}

func (d driver) held() uint64 {
	var c [5]uint64
	_, _, _ = unix.Syscall(unix.SYS_IOCTL, d.f.Fd(), 3<<30|40<<16|'F'<<8|0xf0, uintptr(unsafe.Pointer(&c))) // the test compares what it says
	return c[1]
}

func monotonic() time.Duration {
	var ts unix.Timespec
	_ = unix.ClockGettime(unix.CLOCK_MONOTONIC, &ts) // cannot fail with this clock
	return time.Duration(ts.Nano())
}

// watching is gpufenced's loop over one container: samples of what the driver says, lag old, every period.
type watching struct {
	mu         sync.Mutex
	most       uint64
	killedAt   time.Duration
	refuted    int
	above      int
	killedFor  string
	samples    int
	lastReason string
}

const period = 100 * time.Millisecond

func watch(t *testing.T, g *bpf.Gate, id, limitBytes uint64, lag time.Duration, killAbove bool, victim *started) (stop func() *watching) {
	t.Helper()
	d := theDriver(t)
	const margin = 8 * mib
	credit := &gatecredit.Credit{Settle: time.Second, Margin: func(uint64) uint64 { return margin }}
	w := &watching{}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan struct{})
	type reading struct {
		at    time.Duration
		bytes uint64
	}
	var past []reading
	over := 0 // looks in a row that show more than the limit, as the fence watch counts them
	go func() {
		defer close(done)
		for next := time.Now(); ctx.Err() == nil; {
			now := monotonic()
			held := d.held()
			past = append(past, reading{now, held})
			u, err := g.Adjust(id, 0, true)
			if err != nil {
				if !errors.Is(err, bpf.ErrUnmanaged) {
					t.Error(err)
				}
				return
			}
			said := uint64(0)
			for _, p := range past {
				if p.at <= now-lag {
					said = p.bytes
				}
			}
			v := credit.Step(gatecredit.Account{UsedBytes: u.Used, ChargedBytes: u.Charged, EndedBytes: u.Ended, CreditedBytes: u.Credited, PeakBytes: u.Peak},
				gatecredit.Truth{At: now, NVMLBytes: said, LimitBytes: limitBytes})
			if v.AdjustBytes > 0 {
				_, err = g.Adjust(id, v.AdjustBytes, false)
			} else if v.AdjustBytes < 0 {
				_, err = g.GiveBack(id, uint64(-v.AdjustBytes), u.Credited)
			}
			if err != nil {
				t.Error(err)
			}
			if err := g.SetPolicy(id, bpf.Policy{LimitBytes: limitBytes, GPU: true, Minors: []int{0}, Enforce: true, NoCredit: v.NoCredit}); err != nil {
				t.Error(err)
			}
			w.mu.Lock()
			w.samples++
			w.most = max(w.most, held)
			if v.AdjustBytes > 0 {
				w.refuted++
				w.lastReason = v.Why
			}
			if over++; said <= limitBytes+margin {
				over = 0
			}
			above := over >= 2
			if above {
				w.above++
			}
			if (v.Kill || killAbove && above) && w.killedAt == 0 {
				w.killedAt = monotonic()
				w.killedFor = "forged-free"
				if !v.Kill {
					w.killedFor = "above-limit"
				}
				if err := victim.cmd.Process.Kill(); err != nil {
					t.Error(err)
				}
			}
			w.mu.Unlock()
			next = next.Add(period)
			time.Sleep(time.Until(next))
		}
	}()
	return func() *watching { cancel(); <-done; return w }
}

// TestStandInRaceAtEntry: without the look at copies, what a race got is found by gpufenced's next two looks.
func TestStandInRaceAtEntry(t *testing.T) {
	g := opened(t)
	dir, id := cgroup(t, "container")
	limit(t, g, id, 100*mib)
	s := start(t, dir, fmt.Sprintf("grab:%d:%d:%d", mib, 900*mib, 400*mib))
	stop := watch(t, g, id, 100*mib, 0, true, s)
	err := s.cmd.Wait()
	w := stop()
	if err == nil || w.killedAt == 0 {
		t.Fatalf("it was not killed: %v, %d samples, most %d MiB\n%s", err, w.samples, w.most>>20, s.out.String())
	}
	steps := s.steps()
	if len(steps) == 0 && w.most > 400*mib {
		t.Logf("stand-in, entry: killed for %s before it could say what it got; %d MiB at most", w.killedFor, w.most>>20)
		return
	}
	if len(steps) == 0 {
		t.Fatalf("killed for %s before it had anything: most %d MiB", w.killedFor, w.most>>20)
	}
	took := w.killedAt - time.Duration(number(t, steps[0].line, "at"))
	t.Logf("stand-in, entry: %s; killed for %s %s after it (period %s, two looks)", steps[0].line, w.killedFor, took.Round(time.Millisecond), period)
	if took > 50*period {
		t.Errorf("caught after %s", took)
	}
}

// TestStandInForgedFrees: frees that the door sees and the driver does not.
func TestStandInForgedFrees(t *testing.T) {
	g := opened(t)
	dir, id := cgroup(t, "container")
	limit(t, g, id, 100*mib)
	for _, lag := range []time.Duration{0, 200 * time.Millisecond} {
		t.Run(lag.String(), func(t *testing.T) {
			limit(t, g, id, 100*mib)
			s := start(t, dir, fmt.Sprintf("forge:100000:%d", 40*mib))
			stop := watch(t, g, id, 100*mib, lag, false, s)
			began := monotonic()
			err := s.cmd.Wait()
			w := stop()
			t.Logf("stand-in, forged frees, lag %s: killed for %s after %s, charged back %d times, held at most %d MiB of a limit of 100 (%s)",
				lag, w.killedFor, (w.killedAt - began).Round(time.Millisecond), w.refuted, w.most>>20, w.lastReason)
			if err == nil || w.killedFor != "forged-free" || w.refuted != 2 {
				t.Errorf("it was not killed for its second forgery: %v", err)
			}
		})
	}
}

// TestStandInLegalChurnUnderLag: allocating and freeing at once, with NVML 200 ms behind, for some seconds: never
// refused, never accused.
func TestStandInLegalChurnUnderLag(t *testing.T) {
	g := opened(t)
	dir, id := cgroup(t, "container")
	limit(t, g, id, 100*mib)
	s := start(t, dir, fmt.Sprintf("churn:1000:%d:3", 60*mib), fmt.Sprintf("churn:3000:%d:0", 90*mib))
	stop := watch(t, g, id, 100*mib, 200*time.Millisecond, true, s)
	got := s.wait(t)
	w := stop()
	t.Logf("stand-in: %s, %s, %d samples", got[0].line, got[1].line, w.samples)
	if number(t, got[0].line, "refused") != 0 || number(t, got[1].line, "refused") != 0 || w.refuted != 0 || w.above != 0 {
		t.Errorf("accused %d times, above %d times (%s)", w.refuted, w.above, w.lastReason)
	}
}

// TestEventsTellOfRefusals, with the process and the size, and not more than so many a second.
func TestEventsTellOfRefusals(t *testing.T) {
	g := opened(t)
	dir, id := cgroup(t, "container")
	limit(t, g, id, 100*mib)
	ctx, cancel := context.WithCancel(t.Context())
	var mu sync.Mutex
	var events []bpf.Event
	ended := make(chan error, 1)
	go func() {
		ended <- g.Events(ctx, func(e bpf.Event) {
			if e.Cgroup == id {
				mu.Lock()
				events = append(events, e)
				mu.Unlock()
			}
		})
	}()
	s := start(t, dir, fmt.Sprintf("os64:%d:1", 120*mib), "compat:1:2", "class:0:3:194", "open:/dev/nvidia1", fmt.Sprintf("hammer:300:%d", 120*mib))
	got := s.wait(t)
	time.Sleep(400 * time.Millisecond)
	cancel()
	if err := <-ended; !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
	mu.Lock()
	defer mu.Unlock()
	kinds := map[string]int{}
	for _, e := range events {
		kinds[e.Kind.String()]++
		if e.PID != s.cmd.Process.Pid || e.Comm != "client" {
			t.Errorf("%+v", e)
		}
	}
	if len(events) == 0 || events[0].Kind.String() != "over-limit" || events[0].SizeBytes != 120*mib || events[0].LimitBytes != 100*mib || events[0].Errno != int(unix.ENOMEM) {
		t.Fatalf("%+v", events)
	}
	for _, k := range []string{"over-limit", "32-bit-call", "forbidden-class", "device-not-granted"} {
		if kinds[k] == 0 {
			t.Errorf("no event of kind %s: %v", k, kinds)
		}
	}
	asked := number(t, got[4].line, "asked")
	u := usage(t, g, id)
	if u.Denied < asked || len(events) > 45 {
		t.Errorf("%d requests, %d counted, %d events", asked, u.Denied, len(events))
	}
	t.Logf("%d refusals, %d events: %v", u.Denied, len(events), kinds)
}
