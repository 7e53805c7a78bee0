// SPDX-License-Identifier: Apache-2.0

package guest

import (
	"bytes"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/gpufence/gpufence/bpf"
)

const secondPins = "/sys/fs/bpf/second/" + bpf.PinVersion

// openAndDie is the process that opens a gate for a cgroup and is killed with it open.
func openAndDie() {
	fail := func(err error) {
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
	}
	id, err := strconv.ParseUint(os.Args[2], 10, 64)
	fail(err)
	carrier, _ := expected()
	g, err := bpf.Open(secondPins, carrier)
	fail(err)
	var st unix.Stat_t
	fail(unix.Stat("/dev/nvidiactl", &st))
	fail(g.SetDevices([]bpf.Device{{Major: unix.Major(st.Rdev), Minor: unix.Minor(st.Rdev), Kind: bpf.KindCTL}}))
	fail(g.Configure(settings()))
	fail(g.SetPolicy(id, bpf.Policy{LimitBytes: 100 * mib, GPU: true, Enforce: true}))
	fmt.Println("open")
	fail(unix.Kill(os.Getpid(), unix.SIGKILL))
}

// TestTheGateStaysClosedWithoutItsDaemon: the process that opened it is killed; while nobody is there, while it
// is adopted, and after that, not one request above the limit passes, and what was charged stays charged.
func TestTheGateStaysClosedWithoutItsDaemon(t *testing.T) {
	dir, id := cgroup(t, "container")
	cmd := exec.CommandContext(t.Context(), "/proc/self/exe", "open-and-die", fmt.Sprint(id))
	var out, errs bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &errs
	err := cmd.Run()
	if !strings.Contains(out.String(), "open") || cmd.ProcessState.Sys().(interface{ Signaled() bool }).Signaled() == false {
		t.Fatalf("%v: %s%s", err, out.String(), errs.String())
	}
	t.Cleanup(func() {
		if err := bpf.Unpin(secondPins); err != nil {
			t.Error(err)
		}
	})
	got := client(t, dir, fmt.Sprintf("os64:%d:1", 120*mib), fmt.Sprintf("os64:%d:2", 80*mib), fmt.Sprintf("os64:%d:3", 40*mib))
	if got[0].errno != unix.ENOMEM || got[1].errno != 0 || got[2].errno != unix.ENOMEM {
		t.Fatalf("with its process dead: %+v", got)
	}
	holds := start(t, dir, fmt.Sprintf("os64:%d:1", 60*mib), "send:/tmp/adopt")
	hammer := start(t, dir, "receive:/tmp/adopt", fmt.Sprintf("hammer:%d:%d", 50000, 60*mib))
	time.Sleep(500 * time.Millisecond)
	carrier, _ := expected()
	began := time.Now()
	g, err := bpf.Open(secondPins, carrier)
	if err != nil {
		t.Fatalf("adopt: %v", err)
	}
	took := time.Since(began)
	if !g.Adopted() {
		t.Error("it was not adopted but made anew")
	}
	ids, err := g.Managed()
	if err != nil || len(ids) != 1 || ids[0] != id {
		t.Errorf("managed: %v, %v, want %d", ids, err, id)
	}
	if u := usage(t, g, id); u.Used != 60*mib {
		t.Errorf("charged %d MiB after adoption, want 60", u.Used>>20)
	}
	if err := os.WriteFile("/tmp/stop", nil, 0o600); err != nil {
		t.Fatal(err)
	}
	defer os.Remove("/tmp/stop")
	line := hammer.wait(t)
	holds.wait(t)
	asked, passed := number(t, line[1].line, "asked"), number(t, line[1].line, "passed")
	t.Logf("adopted in %.1f s; %d requests above the limit were made meanwhile, %d passed", took.Seconds(), asked, passed)
	if asked < 1000 || passed != 0 {
		t.Errorf("%s", line[1].line)
	}
	if u := usage(t, g, id); u.Used != 0 {
		t.Errorf("%d bytes stay charged", u.Used)
	}
	// An upgrade's new programs take the place of the old ones: here the same, so the links stay.
	if err := g.Remove(); err != nil {
		t.Error(err)
	}
}

// TestAnotherVersionHoldsUntilItIsSuperseded: what an earlier gpufenced with another layout has pinned refuses until all that
// runs is managed by this one, and nothing after that.
func TestAnotherVersionHoldsUntilItIsSuperseded(t *testing.T) {
	dir, id := cgroup(t, "container")
	carrier, _ := expected()
	opens := func(pins string) *bpf.Gate {
		t.Helper()
		g, err := bpf.Open(pins, carrier)
		if err != nil {
			t.Fatal(err)
		}
		if g.Adopted() {
			t.Errorf("%s was there", pins)
		}
		return g
	}
	t.Cleanup(func() {
		if err := bpf.Unpin(secondPins); err != nil {
			t.Error(err)
		}
	})
	asks := func(when string, bytes uint64, want unix.Errno) {
		t.Helper()
		if got := client(t, dir, fmt.Sprintf("os64:%d:1", bytes)); got[0].errno != want {
			t.Errorf("%s: %s, want errno %d", when, got[0].line, want)
		}
	}
	earlier := opens(filepath.Join(filepath.Dir(secondPins), "v1"))
	guard(t, earlier)
	limit(t, earlier, id, 100*mib)
	if err := earlier.Close(); err != nil {
		t.Fatal(err)
	}
	g := opens(secondPins)
	asks("nobody is managed here yet", 120*mib, unix.ENOMEM)
	guard(t, g)
	limit(t, g, id, 200*mib)
	asks("managed by both", 120*mib, unix.ENOMEM)
	if err := g.Supersede(); err != nil {
		t.Fatal(err)
	}
	// The kernel lets go of what is not pinned any more when it comes to it.
	got := client(t, dir, fmt.Sprintf("os64:%d:1", 120*mib))
	for end := time.Now().Add(time.Minute); got[0].errno != 0 && time.Now().Before(end); {
		time.Sleep(100 * time.Millisecond)
		got = client(t, dir, fmt.Sprintf("os64:%d:1", 120*mib))
	}
	if got[0].errno != 0 {
		t.Errorf("superseded a minute ago: %s", got[0].line)
	}
	asks("above this one's limit", 220*mib, unix.ENOMEM)
	if err := g.Remove(); err != nil {
		t.Error(err)
	}
}
