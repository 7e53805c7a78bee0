// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"unsafe"

	"github.com/cilium/ebpf"
	specs "github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"

	"github.com/gpufence/gpufence/bpf"
	"github.com/gpufence/gpufence/enforcer/api"
	"github.com/gpufence/gpufence/tests/ociimage"
)

// runtimes are the low-level ones that every engine has one of.
var runtimes = []string{"runc", "crun"}

// TestRuntimes starts a container with the real runc and the real crun, through gpufence-runtime and its hook, where
// there is only cgroup v2. Its program passes the shim by: it asks the stand-in itself, on every path, and has made
// itself the node of a GPU that it was not given. The gate refuses what is above the limit, nothing else, and when the
// container has ended nothing of it is left.
func TestRuntimes(t *testing.T) {
	level := levels[1]
	b := newBench(t, 0, level.config...)
	b.gated(nil, level.name)
	b.check(os.MkdirAll(b.Path("cdi"), 0o755))
	b.command("write the simulated GPU's CDI specification", b.Dist("bin/simgpu"), "--dir", b.Path("sim"),
		"cdi", "--nodes", "--lib-dir", b.Dist("simgpu"), "--out", b.Path("cdi", "simgpu.json"))
	gpus, err := b.Client.GPUs(t.Context())
	b.check(err)
	for _, name := range runtimes {
		t.Run(name, func(t *testing.T) {
			program, err := exec.LookPath(name)
			if err != nil {
				t.Fatal(err)
			}
			c := (&bench{b.Node, t}).contained(name, program, gpus[0].UUID)
			c.b.stands(level.name, func(ctx context.Context) ([]api.Fence, error) {
				v, err := c.b.Client.Container(ctx, c.id)
				return v.Fences, err
			})
			id := c.gateID()
			if !c.has("policies", id) {
				t.Error("the kernel has no policy of its cgroup before its program runs")
			}
			c.say("go")
			c.b.until("it has asked for all", func() bool { return len(c.b.told(name)) == len(containedSteps) || !c.runs() })

			const none, out = syscall.Errno(0), syscall.ENOMEM
			for i, want := range []struct {
				errno syscall.Errno
				held  uint64
			}{{none, 300}, {out, 300}, {out, 300}, {out, 300}, {syscall.EPERM, 300}, {syscall.EPERM, 300}, {none, 400}, {syscall.EPERM, 400}, {none, 400}} {
				line := fmt.Sprintf("%s %d 0 %d", containedSteps[i], want.errno, want.held*mib)
				if got := c.b.told(name); len(got) <= i || got[i].line != line {
					t.Fatalf("step %d: want %s, of %+v\n%s", i, line, got, c.said())
				}
			}
			for _, reason := range []string{"over-limit", "heap-call", "32-bit-call", "device-not-granted"} {
				c.b.until("an event tells of "+reason, func() bool {
					return slices.ContainsFunc(c.b.eventsOf(c.id, "gate-refused"), func(e api.Event) bool { return strings.Contains(e.Message, reason) })
				})
			}
			c.say("end")
			c.b.until("it has ended", func() bool { return !c.runs() })
			if status := c.cmd.ProcessState.ExitCode(); status != 0 {
				t.Errorf("it ended with %d: %s", status, c.said())
			}
			if kills := c.b.eventsOf(c.id, "kill", "kill-decided"); len(kills) != 0 {
				t.Errorf("killed: %+v", kills)
			}
			c.nothingLeft(id)
		})
	}
}

// containedSteps are what the container's program does.
var containedSteps = []string{
	fmt.Sprintf("os64:%d:1", 300*mib), fmt.Sprintf("os64:%d:2", 400*mib), fmt.Sprintf("os21:%d:3", 400*mib), fmt.Sprintf("xfer:%d:4", 400*mib),
	fmt.Sprintf("heap2:%d:5", mib), "compat:1:6", fmt.Sprintf("xfer:%d:7", 100*mib), "open:/dev/nvidia1", "open:/dev/nvidia0",
}

// contained is a container that a runtime runs.
type contained struct {
	b     *bench
	id    string
	dir   string // of its cgroup
	stdin io.WriteCloser
	cmd   *exec.Cmd
	ended chan struct{}
}

// contained starts one, whose program waits for a word before it begins and before it ends.
func (b *bench) contained(name, program, gpu string) *contained {
	b.t.Helper()
	id := filepath.Base(b.Dir) + "-" + name
	c := &contained{b: b, id: id, dir: filepath.Join("/sys/fs/cgroup", id), ended: make(chan struct{})}
	bundle := b.Path("bundle-" + name)
	b.root(filepath.Join(bundle, "rootfs"))
	// It may make nodes, and its device cgroup denies none: the gate alone decides.
	capabilities := []string{"CAP_MKNOD"}
	mode := os.FileMode(0o666)
	spec := specs.Spec{
		Version: "1.0.2",
		Process: &specs.Process{
			Args: append([]string{"/bin/busybox", "sh", "-c", `/bin/busybox mknod /dev/nvidia1 c 195 1 && read -r go && /client "$@" && read -r end`, "sh"}, containedSteps...),
			Cwd:  "/", Env: []string{"PATH=/bin", "NVIDIA_VISIBLE_DEVICES=" + gpu},
			Capabilities: &specs.LinuxCapabilities{Bounding: capabilities, Effective: capabilities, Permitted: capabilities},
		},
		Root:        &specs.Root{Path: "rootfs"},
		Annotations: map[string]string{"gpufence.dev/memory.max": fmt.Sprintf("%dMi", limit)},
		Mounts: []specs.Mount{
			{Destination: "/proc", Type: "proc", Source: "proc", Options: []string{"nosuid", "noexec", "nodev"}},
			{Destination: "/dev", Type: "tmpfs", Source: "tmpfs", Options: []string{"nosuid", "mode=755", "size=64k"}},
		},
		Linux: &specs.Linux{
			CgroupsPath: "/" + id,
			Devices:     []specs.LinuxDevice{{Path: "/dev/nvidiactl", Type: "c", Major: 195, Minor: 255, FileMode: &mode}},
			Resources:   &specs.LinuxResources{Devices: []specs.LinuxDeviceCgroup{{Allow: true, Access: "rwm"}}},
			Namespaces:  []specs.LinuxNamespace{{Type: specs.PIDNamespace}, {Type: specs.MountNamespace}, {Type: specs.IPCNamespace}, {Type: specs.UTSNamespace}},
		},
	}
	text, err := json.Marshal(spec)
	b.check(err)
	b.check(os.WriteFile(filepath.Join(bundle, "config.json"), text, 0o600))

	// The same policy as gpufenced's, with this runtime.
	policy, err := os.ReadFile(b.ConfigPath())
	b.check(err)
	config := b.Path("config-" + name + ".toml")
	b.check(os.WriteFile(config, bytes.Replace(policy, []byte(`runtimes = ["runc"]`), fmt.Appendf(nil, "runtimes = [%q]", program), 1), 0o600))
	runtime := func(args ...string) *exec.Cmd {
		cmd := exec.CommandContext(context.WithoutCancel(b.t.Context()), b.Dist("bin/gpufence-runtime"), append([]string{"--root", b.Path("root-" + name)}, args...)...)
		cmd.Env = append(os.Environ(), "GPUFENCE_CONFIG="+config)
		return cmd
	}
	c.cmd = runtime("run", "--bundle", bundle, id)
	out, err := os.Create(b.out(name))
	b.check(err)
	defer out.Close()
	errs, err := os.Create(b.out(id))
	b.check(err)
	defer errs.Close()
	c.cmd.Stdout, c.cmd.Stderr = out, errs // its processes have them as they are
	c.stdin, err = c.cmd.StdinPipe()
	b.check(err)
	b.check(c.cmd.Start())
	go func() {
		_ = c.cmd.Wait() // how it ended is in ProcessState
		close(c.ended)
	}()
	b.t.Cleanup(func() {
		if !c.runs() {
			return
		}
		if out, err := runtime("delete", "--force", id).CombinedOutput(); err != nil {
			b.t.Errorf("take the container away: %v\n%s", err, out)
		}
		<-c.ended
	})
	b.until("it is registered", func() bool {
		if !c.runs() {
			b.t.Fatalf("it did not start: %s\n%s", c.cmd.ProcessState, c.said())
		}
		return c.state() == "running"
	})
	return c
}

func (c *contained) runs() bool {
	select {
	case <-c.ended:
		return false
	default:
		return true
	}
}

// said is what it and its runtime said for people.
func (c *contained) said() string {
	text, err := os.ReadFile(c.b.out(c.id))
	if err != nil {
		return err.Error()
	}
	return string(text)
}

func (c *contained) say(word string) {
	c.b.t.Helper()
	_, err := io.WriteString(c.stdin, word+"\n")
	c.b.check(err)
}

// state is gpufenced's word for it.
func (c *contained) state() string {
	c.b.t.Helper()
	all, err := c.b.Client.Containers(c.b.t.Context())
	c.b.check(err)
	for _, v := range all {
		if v.Key.ID == c.id {
			return v.State
		}
	}
	return ""
}

// gateID is how the gate knows its cgroup.
func (c *contained) gateID() uint64 {
	c.b.t.Helper()
	var st unix.Stat_t
	c.b.check(unix.Stat(c.dir, &st))
	return st.Ino
}

// has says whether a map of the gate has something under a key.
func (c *contained) has(name string, key uint64) bool {
	c.b.t.Helper()
	m, err := ebpf.LoadPinnedMap(filepath.Join("/sys/fs/bpf", filepath.Base(c.b.Dir), bpf.PinVersion, "maps", name), nil)
	c.b.check(err)
	defer m.Close()
	value, err := m.LookupBytes(key)
	c.b.check(err)
	return value != nil
}

// nothingLeft: no cgroup, no account in the kernel, no memory of the driver's, no container of gpufenced's.
func (c *contained) nothingLeft(id uint64) {
	c.b.t.Helper()
	if _, err := os.Stat(c.dir); !errors.Is(err, fs.ErrNotExist) {
		c.b.t.Errorf("its cgroup is still there: %v", err)
	}
	for _, name := range []string{"policies", "usages", "adjusted", "tainted"} {
		c.b.until("nothing is left in "+name, func() bool { return !c.has(name, id) })
	}
	if s := c.state(); s != "" && s != "ended" {
		c.b.t.Errorf("gpufenced says that it is %s", s)
	}
	if held := c.b.held(); held != 0 {
		c.b.t.Errorf("the stand-in holds %d bytes", held)
	}
}

// held is what the stand-in holds of everybody.
func (b *bench) held() uint64 {
	b.t.Helper()
	f, err := os.OpenFile("/dev/nvidiactl", os.O_RDWR, 0)
	b.check(err)
	defer f.Close()
	var counts [5]uint64
	const ask = 3<<30 | unsafe.Sizeof(counts)<<16 | 'F'<<8 | 0xf0
	if _, _, errno := unix.Syscall(unix.SYS_IOCTL, f.Fd(), ask, uintptr(unsafe.Pointer(&counts))); errno != 0 {
		b.t.Fatal(errno)
	}
	return counts[1]
}

// command runs a program of ours to its end.
func (b *bench) command(what, program string, args ...string) {
	b.t.Helper()
	if out, err := exec.CommandContext(b.t.Context(), program, args...).CombinedOutput(); err != nil {
		b.t.Fatalf("%s: %v\n%s", what, err, out)
	}
}

// root makes a container's: a shell, the client, and what its libraries need of this machine's.
func (b *bench) root(dir string) {
	b.t.Helper()
	image := ociimage.Image{}
	b.check(image.Program("/client", client, b.Dist("simgpu/libcuda.so.1"), b.Dist("simgpu/libnvidia-ml.so.1"), b.Dist("lib/libgpufence.so")))
	busybox, err := exec.LookPath("busybox")
	b.check(err)
	b.check(image.Program("/usr/bin/busybox", busybox))
	for _, d := range []string{"usr/bin", "usr/lib", "usr/lib64", "etc", "dev", "proc", "run"} {
		b.check(os.MkdirAll(filepath.Join(dir, d), 0o755))
	}
	for _, link := range []string{"bin", "lib", "lib64"} {
		b.check(os.Symlink("usr/"+link, filepath.Join(dir, link)))
	}
	for path, file := range image.Files {
		text, err := os.ReadFile(file.Host)
		b.check(err)
		to := filepath.Join(dir, path)
		b.check(os.MkdirAll(filepath.Dir(to), 0o755))
		b.check(os.WriteFile(to, text, 0o755))
	}
}
