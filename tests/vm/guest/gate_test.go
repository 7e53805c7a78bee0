// SPDX-License-Identifier: Apache-2.0

package guest

import (
	"fmt"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/gpufence/gpufence/bpf"
)

func TestCanaryProvesTheDoors(t *testing.T) {
	g := opened(t)
	if err := g.Canary(t.Context(), "", nil); err != nil {
		t.Fatal(err)
	}
	in, err := bpf.InLSMList()
	carrier, _ := expected()
	if err != nil || in != (carrier == bpf.CarrierLSM) {
		t.Errorf("bpf in the list of security modules: %v, %v; this guest was made for %s", in, err, carrier)
	}
	t.Logf("carrier %s: canary refused through both doors", carrier)
}

// TestStandInPaths: within the limit the stand-in driver gets the request, above it nobody does.
func TestStandInPaths(t *testing.T) {
	g := opened(t)
	pod, podID := cgroup(t, "pod")
	dir, id := cgroup(t, "pod/container")
	cgroup(t, "pod/container/nested")
	nested, _ := cgroup(t, "pod/container/nested/deeper")
	_ = pod
	limit(t, g, podID, gib)
	limit(t, g, id, 100*mib)
	for _, where := range []struct{ name, dir string }{{"direct", dir}, {"nested", nested}} {
		for _, path := range []string{"os64", "os21", "xfer", "heap2", "heap6", "heap14"} {
			t.Run(where.name+"/"+path, func(t *testing.T) {
				got := client(t, where.dir, fmt.Sprintf("%s:%d:1", path, 60*mib), fmt.Sprintf("%s:%d:2", path, 60*mib), fmt.Sprintf("%s:%d:3", path, 40*mib), fmt.Sprintf("%s:%d:4", path, 4096))
				want := []unix.Errno{0, unix.ENOMEM, 0, unix.ENOMEM}
				for i, s := range got {
					if s.errno != want[i] || s.status != 0 {
						t.Errorf("%s: errno %d, want %d", s.line, s.errno, want[i])
					}
				}
				if got[3].held != 100*mib {
					t.Errorf("the stand-in holds %d MiB, want 100", got[3].held>>20)
				}
				if u := usage(t, g, id); u.Used != 0 {
					t.Errorf("%d bytes stay charged after the file was closed", u.Used)
				}
			})
		}
	}
	t.Run("fork", func(t *testing.T) {
		got := client(t, dir, fmt.Sprintf("os64:%d:1", 60*mib), "fork", fmt.Sprintf("os64:%d:2", 60*mib), fmt.Sprintf("os64:%d:3", 40*mib))
		if got[0].errno != 0 || got[2].errno != unix.ENOMEM || got[3].errno != 0 {
			t.Errorf("%+v", got)
		}
	})
	t.Run("fd passing within the container", func(t *testing.T) {
		a := start(t, dir, fmt.Sprintf("os64:%d:1", 60*mib), "send:/tmp/fd1")
		got := client(t, nested, "receive:/tmp/fd1", fmt.Sprintf("os64:%d:2", 60*mib), fmt.Sprintf("os64:%d:3", 40*mib))
		a.wait(t)
		if got[1].errno != unix.ENOMEM || got[2].errno != 0 {
			t.Errorf("%+v", got)
		}
	})
	t.Run("fd passing from outside", func(t *testing.T) {
		a := start(t, "/sys/fs/cgroup", "send:/tmp/fd2")
		got := client(t, dir, "receive:/tmp/fd2", fmt.Sprintf("os64:%d:2", 120*mib), fmt.Sprintf("os64:%d:3", 40*mib))
		a.wait(t)
		if got[1].errno != unix.ENOMEM || got[2].errno != 0 {
			t.Errorf("%+v", got)
		}
	})
	t.Run("fd passing to another container", func(t *testing.T) {
		other, otherID := cgroup(t, "other")
		limit(t, g, otherID, gib)
		a := start(t, dir, fmt.Sprintf("os64:%d:1", 60*mib), "send:/tmp/fd3")
		got := client(t, other, "receive:/tmp/fd3", fmt.Sprintf("os64:%d:2", mib))
		a.wait(t)
		if got[1].errno != unix.EPERM {
			t.Errorf("%+v", got)
		}
	})
	t.Run("compat", func(t *testing.T) {
		for _, s := range client(t, dir, fmt.Sprintf("compat:%d:1", 60*mib), "compat:1:2") {
			if s.errno != unix.EPERM || s.held != 0 {
				t.Errorf("%+v", s)
			}
		}
	})
	t.Run("malformed", func(t *testing.T) {
		got := client(t, dir, "null", "short", fmt.Sprintf("os64:%d:1", uint64(1)<<63), fmt.Sprintf("os64:%d:1", ^uint64(0)), "class:0:1:194", "class:0:1:129")
		for i, want := range []unix.Errno{unix.EFAULT, unix.EINVAL, unix.ENOMEM, unix.ENOMEM, unix.EPERM, unix.EPERM} {
			if got[i].errno != want {
				t.Errorf("%s: want %d", got[i].line, want)
			}
		}
	})
	t.Run("not the device's memory", func(t *testing.T) {
		for _, s := range client(t, dir, fmt.Sprintf("system:%d:1", gib), fmt.Sprintf("virtual:%d:2", gib)) {
			if s.errno != 0 {
				t.Errorf("%+v", s)
			}
		}
		if u := usage(t, g, id); u.Used != 0 || u.Peak > 100*mib {
			t.Errorf("%+v", u)
		}
	})
	t.Run("rounding", func(t *testing.T) {
		c := start(t, dir, "os64:1:1", fmt.Sprintf("os64:%d:2", 2*mib+1), "send:/tmp/fd4")
		got := client(t, dir, "receive:/tmp/fd4")
		u := usage(t, g, id)
		_ = c.wait(t)
		_ = got
		if u.Peak < 4*mib+64<<10 {
			t.Errorf("charged %d", u.Peak)
		}
	})
	t.Run("pod", func(t *testing.T) {
		limit(t, g, podID, 50*mib)
		defer limit(t, g, podID, gib)
		got := client(t, dir, fmt.Sprintf("os64:%d:1", 40*mib), fmt.Sprintf("os64:%d:2", 20*mib), fmt.Sprintf("os64:%d:3", 10*mib))
		if got[0].errno != 0 || got[1].errno != unix.ENOMEM || got[2].errno != 0 {
			t.Errorf("%+v", got)
		}
		if a, b := usage(t, g, podID), usage(t, g, id); a.Used != 0 || b.Used != 0 {
			t.Errorf("left: pod %d, container %d", a.Used, b.Used)
		}
	})
	t.Run("many at once get exactly the limit", func(t *testing.T) {
		got := client(t, dir, fmt.Sprintf("threads:100:%d", mib))
		if n := number(t, got[0].line, "passed"); n > 100 || n < 97 {
			t.Errorf("%d of 800 requests of 1 MiB passed, want 100", n) // two that collide may both be refused
		}
	})
	t.Run("unmanaged", func(t *testing.T) {
		got := client(t, "/sys/fs/cgroup", fmt.Sprintf("os64:%d:1", 60*gib), fmt.Sprintf("compat:%d:2", gib), "class:0:3:194", "open:/dev/nvidia1", "open:/dev/nvidia-uvm-tools")
		for _, s := range got {
			if s.errno != 0 {
				t.Errorf("%+v", s)
			}
		}
	})
	t.Run("audit", func(t *testing.T) {
		policy(t, g, id, bpf.Policy{LimitBytes: mib, GPU: true})
		before := usage(t, g, id).Denied
		got := client(t, dir, fmt.Sprintf("os64:%d:1", 60*mib), "open:/dev/nvidia1")
		if got[0].errno != 0 || got[1].errno != 0 || usage(t, g, id).Denied != before+1 {
			t.Errorf("%+v, %+v", got, usage(t, g, id))
		}
	})
}

// TestDevices: what was not granted cannot be opened, whatever capabilities a process has (here: all).
func TestDevicesThatWereNotGranted(t *testing.T) {
	g := opened(t)
	dir, id := cgroup(t, "container")
	none, noneID := cgroup(t, "no-gpu")
	limit(t, g, id, gib)
	policy(t, g, noneID, bpf.Policy{Enforce: true})
	for _, tt := range []struct {
		dir, node string
		want      unix.Errno
	}{
		{dir, "nvidia0", 0}, {dir, "nvidiactl", 0}, {dir, "nvidia-uvm", 0}, {dir, "nvidia1", unix.EPERM}, {dir, "nvidia-modeset", unix.EPERM}, {dir, "nvidia-uvm-tools", unix.EPERM},
		{dir, "null", 0}, {none, "nvidia0", unix.EPERM}, {none, "nvidiactl", unix.EPERM}, {none, "nvidia-uvm", unix.EPERM}, {none, "null", 0},
	} {
		if got := client(t, tt.dir, "open:/dev/"+tt.node); got[0].errno != tt.want {
			t.Errorf("%s in %s: errno %d, want %d", tt.node, tt.dir, got[0].errno, tt.want)
		}
	}
	// A node of its own making is the same device.
	mine := filepath.Join(t.TempDir(), "mine")
	if err := unix.Mknod(mine, unix.S_IFCHR|0o666, int(unix.Mkdev(195, 1))); err != nil {
		t.Fatal(err)
	}
	if got := client(t, dir, "open:"+mine); got[0].errno != unix.EPERM && got[0].errno != unix.EACCES {
		t.Errorf("own node: %+v", got)
	}
}

func TestUnmanagedAreKeptOut(t *testing.T) {
	g := opened(t)
	dir, _ := cgroup(t, "stranger")
	exempt, exemptID := cgroup(t, "exporter")
	s := settings()
	s.CloseUnmanaged = true
	if err := g.Configure(s); err != nil {
		t.Fatal(err)
	}
	if err := g.SetExempt([]uint64{exemptID}); err != nil {
		t.Fatal(err)
	}
	if got := client(t, dir, "open:/dev/nvidia0"); got[0].errno != unix.EPERM {
		t.Errorf("stranger: %+v", got)
	}
	if got := client(t, exempt, "open:/dev/nvidia0"); got[0].errno != 0 {
		t.Errorf("exempt: %+v", got)
	}
}

func TestManagedMemory(t *testing.T) {
	g := opened(t)
	dir, id := cgroup(t, "container")
	p := bpf.Policy{LimitBytes: gib, UVMBytes: 16 * mib, GPU: true, Enforce: true}
	policy(t, g, id, p)
	if got := client(t, dir, fmt.Sprintf("mmap:%d", 32*mib)); got[0].errno != 0 {
		t.Errorf("audited: %+v", got)
	}
	p.EnforceUVM = true
	policy(t, g, id, p)
	got := client(t, dir, fmt.Sprintf("mmap:%d", 12*mib), fmt.Sprintf("mmap:%d", 8*mib), fmt.Sprintf("mmap:%d", 4*mib))
	if got[0].errno != 0 || got[1].errno != unix.ENOMEM || got[2].errno != 0 {
		t.Errorf("enforced: %+v", got)
	}
	// The 32-bit call has its length elsewhere, so it is refused whatever that is.
	if got := client(t, dir, "mmap32:4096"); got[0].errno != unix.EPERM {
		t.Errorf("by the 32-bit call: %+v", got)
	}
	if u := usage(t, g, id); u.UVM != 0 {
		t.Errorf("%d bytes stay", u.UVM)
	}
	p.EnforceUVM = false
	policy(t, g, id, p)
	if got := client(t, dir, "mmap32:4096"); got[0].errno != 0 {
		t.Errorf("by the 32-bit call, audited: %+v", got)
	}
	if got := client(t, "/sys/fs/cgroup", fmt.Sprintf("mmap:%d", 64*mib)); got[0].errno != 0 {
		t.Errorf("unmanaged: %+v", got)
	}
}

func TestChurnWithinTheLimitIsNeverRefused(t *testing.T) {
	g := opened(t)
	dir, id := cgroup(t, "container")
	limit(t, g, id, 100*mib)
	got := client(t, dir, fmt.Sprintf("churn:2000:%d", 60*mib))
	if n := number(t, got[0].line, "refused"); n != 0 {
		t.Errorf("%d of 2000 refused", n)
	}
	t.Log(got[0].line)
}
