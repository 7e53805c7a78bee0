// SPDX-License-Identifier: Apache-2.0

package guest

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/gpufence/gpufence/bpf"
)

func TestMain(m *testing.M) {
	if len(os.Args) > 2 && os.Args[1] == bpf.CanaryCommand {
		if err := bpf.RunCanary(os.Args[2]); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	if len(os.Args) > 1 && os.Args[1] == "open-and-die" {
		openAndDie()
	}
	if os.Getenv("GPUFENCE_GUEST") == "" {
		fmt.Println("SKIP: these tests run inside the guests of make test-vm")
		os.Exit(0)
	}
	os.Exit(m.Run())
}

// expected is the carrier and the way to watch copies that this guest's kernel must give.
func expected() (bpf.Carrier, bpf.Copies) {
	c, how, _ := strings.Cut(os.Getenv("GPUFENCE_GUEST"), " ")
	return bpf.Carrier(c), bpf.Copies(how)
}

const (
	mib = 1 << 20
	gib = 1 << 30
)

// shared is one gate for all tests: an emulated machine takes seconds to verify programs.
var shared = sync.OnceValues(func() (*bpf.Gate, error) {
	carrier, _ := expected()
	began := time.Now()
	g, err := bpf.Open("", carrier)
	fmt.Printf("opened the gate in %.1f s: %v\n", time.Since(began).Seconds(), err)
	return g, err
})

// opened gives the gate, with the stand-in's devices guarded and nobody managed.
func opened(t *testing.T) *bpf.Gate {
	t.Helper()
	g, err := shared()
	if err != nil {
		t.Fatalf("open the gate: %v", err)
	}
	t.Cleanup(func() {
		ids, err := g.Managed()
		if err != nil {
			t.Error(err)
		}
		for _, id := range ids {
			if err := g.DropPolicy(id); err != nil {
				t.Error(err)
			}
		}
		if err := g.SetExempt(nil); err != nil {
			t.Error(err)
		}
	})
	guard(t, g)
	return g
}

func guard(t *testing.T, g *bpf.Gate) {
	t.Helper()
	if err := g.SetDevices(nodes(t)); err != nil {
		t.Fatal(err)
	}
	if err := g.Configure(settings()); err != nil {
		t.Fatal(err)
	}
}

func settings() bpf.Settings { return bpf.Settings{CreditFrees: true, EventsPerSecond: 20} }

func nodes(t *testing.T) []bpf.Device {
	t.Helper()
	var out []bpf.Device
	for name, kind := range map[string]bpf.Kind{"nvidiactl": bpf.KindCTL, "nvidia0": bpf.KindGPU, "nvidia1": bpf.KindGPU, "nvidia-modeset": bpf.KindClosed,
		"nvidia-uvm": bpf.KindUVM, "nvidia-uvm-tools": bpf.KindClosed} {
		var st unix.Stat_t
		if err := unix.Stat("/dev/"+name, &st); err != nil {
			t.Fatalf("the stand-in driver has no %s: %v", name, err)
		}
		out = append(out, bpf.Device{Major: unix.Major(st.Rdev), Minor: unix.Minor(st.Rdev), Kind: kind})
	}
	return out
}

// cgroup makes one, below another or the root, and takes it away at the end.
func cgroup(t *testing.T, path string) (dir string, id uint64) {
	t.Helper()
	dir = filepath.Join("/sys/fs/cgroup", path)
	if err := os.MkdirAll(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		for range 200 {
			if err := os.Remove(dir); err == nil || errors.Is(err, fs.ErrNotExist) {
				return
			}
			time.Sleep(10 * time.Millisecond)
		}
		t.Errorf("cgroup %s does not go away", dir)
	})
	var st unix.Stat_t
	if err := unix.Stat(dir, &st); err != nil {
		t.Fatal(err)
	}
	return dir, st.Ino
}

func limit(t *testing.T, g *bpf.Gate, id, bytes uint64) {
	t.Helper()
	policy(t, g, id, bpf.Policy{LimitBytes: bytes, UVMBytes: bytes, GPU: true, Minors: []int{0}, Enforce: true})
}

func policy(t *testing.T, g *bpf.Gate, id uint64, p bpf.Policy) {
	t.Helper()
	if err := g.SetPolicy(id, p); err != nil {
		t.Fatal(err)
	}
}

func usage(t *testing.T, g *bpf.Gate, id uint64) bpf.Usage {
	t.Helper()
	u, err := g.Adjust(id, 0, false)
	if err != nil {
		t.Fatal(err)
	}
	return u
}

// started is a client in a cgroup.
type started struct {
	cmd  *exec.Cmd
	out  bytes.Buffer
	errs bytes.Buffer
}

func start(t *testing.T, dir string, steps ...string) *started {
	t.Helper()
	fd, err := os.Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	defer fd.Close()
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Minute)
	t.Cleanup(cancel)
	s := &started{cmd: exec.CommandContext(ctx, "./client", steps...)}
	s.cmd.Stdout, s.cmd.Stderr = &s.out, &s.errs
	s.cmd.SysProcAttr = &syscall.SysProcAttr{UseCgroupFD: true, CgroupFD: int(fd.Fd())}
	if err := s.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	return s
}

// step is what a client said of one.
type step struct {
	errno  syscall.Errno
	status uint32
	held   uint64
	line   string
}

func (s *started) wait(t *testing.T) []step {
	t.Helper()
	if err := s.cmd.Wait(); err != nil {
		t.Fatalf("client %v: %v\n%s%s", s.cmd.Args[1:], err, s.out.String(), s.errs.String())
	}
	return s.steps()
}

func (s *started) steps() []step {
	var steps []step
	for line := range strings.Lines(s.out.String()) {
		f := strings.Fields(line)
		one := step{line: strings.TrimSpace(line)}
		if len(f) == 4 {
			e, _ := strconv.Atoi(f[1])
			st, _ := strconv.ParseUint(f[2], 10, 32)
			one.errno, one.status = syscall.Errno(e), uint32(st)
			one.held, _ = strconv.ParseUint(f[3], 10, 64)
		}
		steps = append(steps, one)
	}
	return steps
}

func client(t *testing.T, dir string, steps ...string) []step {
	t.Helper()
	return start(t, dir, steps...).wait(t)
}

// number finds "word N" in a line.
func number(t *testing.T, line, word string) uint64 {
	t.Helper()
	f := strings.Fields(line)
	for i := range len(f) - 1 {
		if f[i] == word {
			n, err := strconv.ParseUint(f[i+1], 10, 64)
			if err == nil {
				return n
			}
		}
	}
	t.Fatalf("no number %q in %q", word, line)
	return 0
}
