// SPDX-License-Identifier: Apache-2.0

package packages

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/gpufence/gpufence/enforcer/api"
	simnode "github.com/gpufence/gpufence/tests/node"
	"github.com/gpufence/gpufence/tests/ociimage"
	"github.com/gpufence/gpufence/tests/process"
)

// bootWait bounds what is waited for on a booted node; only what hangs takes so long.
const bootWait = 3 * time.Minute

// boot makes namespaces a machine: its own root, processes, network, and a cgroup v2 hierarchy whose top is a cgroup
// of ours. What reaches the kernel that all share is read-only there, as in a container.
const boot = `set -e
r=$1
mount --bind "$r" "$r"
mount -t proc proc "$r/proc"
for at in sys sysrq-trigger irq bus; do
	if [ -e "$r/proc/$at" ]; then mount --bind "$r/proc/$at" "$r/proc/$at"; mount -o remount,bind,ro "$r/proc/$at"; fi
done
mount -t sysfs -o ro sysfs "$r/sys"
mount -t cgroup2 cgroup2 "$r/sys/fs/cgroup"
mount -t tmpfs -o mode=755 tmpfs "$r/run"
mount -t tmpfs -o mode=755 tmpfs "$r/dev"
mkdir "$r/dev/pts" "$r/dev/shm"
mount -t devpts -o newinstance,ptmxmode=0666,mode=620 devpts "$r/dev/pts"
mount -t tmpfs -o mode=1777 tmpfs "$r/dev/shm"
ln -s pts/ptmx "$r/dev/ptmx"
ln -s /proc/self/fd "$r/dev/fd"
mknod -m 666 "$r/dev/null" c 1 3
mknod -m 666 "$r/dev/zero" c 1 5
mknod -m 666 "$r/dev/full" c 1 7
mknod -m 666 "$r/dev/random" c 1 8
mknod -m 666 "$r/dev/urandom" c 1 9
mknod -m 666 "$r/dev/tty" c 5 0
cd "$r"
mkdir .old
pivot_root . .old
umount -l .old
rmdir .old
exec env -i container=test PATH=/usr/sbin:/usr/bin:/sbin:/bin /usr/lib/systemd/systemd --unit=multi-user.target
`

// unified is the folder of this machine's cgroup v2 hierarchy.
func unified(t *testing.T) string {
	t.Helper()
	for _, dir := range []string{"/sys/fs/cgroup", "/sys/fs/cgroup/unified"} {
		if _, err := os.Stat(dir + "/cgroup.procs"); err != nil {
			continue
		}
		if _, err := os.Stat(dir + "/cgroup.controllers"); err == nil {
			return dir
		}
	}
	missing(t, "there is no cgroup v2 hierarchy")
	return ""
}

// bootNode starts a release of Debian with a real systemd as its first process, and with runc and more packages.
func bootNode(t *testing.T, suite string, packages ...string) *node {
	t.Helper()
	need(t, "debootstrap", "unshare", "nsenter", "pivot_root")
	if os.Geteuid() != 0 {
		missing(t, "this is not root")
	}
	base := unified(t)
	out, err := command(t.Context(), "", []string{"SUITE=" + suite}, append([]string{"./root.sh", "runc", "systemd", "systemd-sysv"}, packages...)...)
	if err != nil {
		t.Fatal(err)
	}
	lines := strings.Fields(out)
	tar := lines[len(lines)-1]
	n := &node{t: t, root: filepath.Join(t.TempDir(), "root")}
	if err := os.Mkdir(n.root, 0o755); err != nil {
		t.Fatal(err)
	}
	must(t, "tar", "-C", n.root, "--numeric-owner", "-xf", tar)
	cgroup, err := os.MkdirTemp(base, "gpufence-boot-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { removeCgroup(t, cgroup) })
	dir, err := os.Open(cgroup)
	if err != nil {
		t.Fatal(err)
	}
	defer dir.Close()
	begun := time.Now()
	p, err := process.Start(t.Context(), process.Options{
		Name: "the node", Log: filepath.Join(t.TempDir(), "boot.log"), TimeoutStart: bootWait, TimeoutStop: bootWait,
		Edit: func(cmd *exec.Cmd) error {
			cmd.SysProcAttr.UseCgroupFD, cmd.SysProcAttr.CgroupFD = true, int(dir.Fd())
			return nil
		},
	}, "unshare", "--mount", "--pid", "--uts", "--ipc", "--net", "--cgroup", "--fork", "--kill-child", "sh", "-c", boot, "sh", n.root)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if n.init != 0 {
			_ = syscall.Kill(n.init, syscall.Signal(37)) // SIGRTMIN+3: halt; it may be gone
		}
		// How it ended does not matter: it is killed by the end of its namespace, whose way of saying so differs.
		if err := p.Await(context.Background()); err != nil {
			t.Error(errors.Join(err, p.Kill()))
		}
	})
	if err := p.Ready(t.Context(), func(context.Context) error {
		pid, err := p.Child()
		if err != nil {
			return err
		}
		n.init = pid
		_, err = os.Stat(fmt.Sprintf("/proc/%d/root/run/systemd/private", pid))
		return err
	}); err != nil {
		t.Fatal(err)
	}
	n.root = fmt.Sprintf("/proc/%d/root", n.init)
	n.through = []string{"nsenter", "--target", fmt.Sprint(n.init), "--mount", "--pid", "--uts", "--ipc", "--net", "--cgroup"}
	t.Cleanup(func() {
		if t.Failed() {
			out, err := n.late("journalctl", "--no-pager", "-n", "120")
			t.Logf("the end of the node's journal: %v\n%s", err, out)
		}
	})
	await(t, "the node has started", func() error {
		out, err := n.try("systemctl", "is-system-running")
		if state := strings.TrimSpace(out); state == "running" || strings.HasPrefix(state, "degraded") {
			return nil
		}
		return err
	})
	failed, err := n.try("systemctl", "--failed", "--plain", "--no-legend")
	t.Logf("%s: up after %.1f s; failed: %q %v", strings.SplitN(n.do("systemctl", "--version"), "\n", 2)[0], time.Since(begun).Seconds(), failed, err)
	return n
}

// late runs a command when the test is over, and its context with it.
func (n *node) late(argv ...string) (string, error) {
	return command(context.WithoutCancel(n.t.Context()), "", nil, n.enter(argv...)...)
}

// removeCgroup removes one with all below it; that of a namespace that has ended is empty.
func removeCgroup(t *testing.T, top string) {
	t.Helper()
	var all []string
	err := filepath.WalkDir(top, func(path string, d fs.DirEntry, err error) error {
		if err == nil && d.IsDir() {
			all = append(all, path)
		}
		return err
	})
	for _, dir := range slices.Backward(all) {
		err = errors.Join(err, os.Remove(dir))
	}
	if err != nil {
		t.Errorf("remove the node's cgroups: %v", err)
	}
}

func await(t *testing.T, what string, f func() error) {
	t.Helper()
	deadline := time.Now().Add(bootWait)
	for {
		err := f()
		if err == nil {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("never: %s: %v", what, err)
		}
		time.Sleep(100 * time.Millisecond)
	}
}

// show is a property of a unit.
func (n *node) show(unit, property string) string {
	n.t.Helper()
	return strings.TrimSpace(n.do("systemctl", "show", "--value", "-p", property, unit))
}

// put copies programs and libraries of this machine to the node.
func (n *node) put(files map[string]string) {
	n.t.Helper()
	for to, from := range files {
		if err := os.MkdirAll(filepath.Dir(n.root+to), 0o755); err != nil {
			n.t.Fatal(err)
		}
		if err := copyFile(from, n.root+to, 0o755); err != nil {
			n.t.Fatal(err)
		}
	}
}

// simulate gives the node a simulated GPU, which gpufenced finds as a driver is found, but for the place, and the tar of
// an image with programs that use it.
func (n *node) simulate() {
	n.t.Helper()
	dist := os.Getenv("GPUFENCE_DIST")
	if dist == "" {
		dist = filepath.Join(repository, "dist")
	}
	if _, err := os.Stat(filepath.Join(dist, "clients/client")); err != nil {
		missing(n.t, "%s is not built: run make build", dist)
	}
	n.put(map[string]string{
		"/usr/local/bin/simgpud": dist + "/bin/simgpud", "/usr/local/bin/simgpu": dist + "/bin/simgpu",
		"/usr/local/lib/simgpu/libcuda.so.1": dist + "/simgpu/libcuda.so.1", "/usr/local/lib/simgpu/libnvidia-ml.so.1": dist + "/simgpu/libnvidia-ml.so.1",
	})
	n.write("/etc/systemd/system/simgpud.service", "[Service]\nExecStart=/usr/local/bin/simgpud --dir /run/simgpu --gpus 1\n[Install]\nWantedBy=multi-user.target\n")
	n.write("/etc/systemd/system/gpufenced.service.d/simgpu.conf", "[Service]\nEnvironment=SIMGPU_DIR=/run/simgpu\n")
	n.do("systemctl", "daemon-reload")
	n.do("systemctl", "enable", "--now", "simgpud.service")
	n.do("mkdir", "-p", "/etc/cdi")
	await(n.t, "the simulated GPU is there", func() error {
		_, err := n.try("simgpu", "--dir", "/run/simgpu", "cdi", "--lib-dir", "/usr/local/lib/simgpu", "--out", "/etc/cdi/simgpu.json")
		return err
	})
	image, err := ociimage.Clients(n.t.Context(), clients, dist)
	if err != nil {
		n.t.Fatal(err)
	}
	if err := ociimage.Write(n.root+"/root/clients.tar", image); err != nil {
		n.t.Fatal(err)
	}
}

// equip puts a simulated GPU and a containerd with folders of its own on the node, as units and files that are not ours
// to install.
func (n *node) equip() {
	n.t.Helper()
	n.simulate()
	programs := strings.TrimSpace(must(n.t, filepath.Join(repository, "tests/programs/build"), "containerd"))
	n.put(map[string]string{
		"/usr/local/bin/containerd": programs + "/containerd", "/usr/local/bin/ctr": programs + "/ctr", "/usr/local/bin/containerd-shim-runc-v2": programs + "/containerd-shim-runc-v2",
	})
	n.write("/etc/systemd/system/containerd.service", "[Unit]\nAfter=network.target\n[Service]\nType=notify\nExecStart=/usr/local/bin/containerd\nDelegate=yes\nKillMode=process\nRestart=always\n"+
		"[Install]\nWantedBy=multi-user.target\n")
	n.write("/etc/containerd/config.toml", "version = 3\nroot = \"/srv/containerd\"\nstate = \"/run/elsewhere\"\n"+
		"disabled_plugins = [\"io.containerd.snapshotter.v1.btrfs\", \"io.containerd.snapshotter.v1.zfs\", \"io.containerd.snapshotter.v1.devmapper\", \"io.containerd.snapshotter.v1.erofs\"]\n")
	n.do("systemctl", "daemon-reload")
	n.do("systemctl", "enable", "--now", "containerd.service")
	n.do("ctr", "images", "import", "/root/clients.tar")
}

const (
	clients = "localhost/gpufence-clients:boot"
	// nodeConfig is what an administrator writes for the simulated GPU.
	nodeConfig = "nvml-library = \"/usr/local/lib/simgpu/libnvidia-ml.so.1\"\ncdi-kinds = [\"gpufence.dev/simgpu\"]\n"
)

// ctr starts the client in a container and waits until it has filled its limit. Without CPU shares: on a machine with
// cgroup v1, too, the node's hierarchy has no controllers.
func (n *node) ctr(name, runtime, limit string) {
	n.t.Helper()
	n.do("ctr", "run", "-d", "--log-uri", "file:///root/"+name+".log", "--runtime", "io.containerd.runc.v2", "--runc-binary", runtime, "--cpu-shares", "0", "--env", "NVIDIA_VISIBLE_DEVICES=0",
		"--annotation", "gpufence.dev/memory.max="+limit, clients, name, "/clients/client", "context", "fill 64", "hold")
	await(n.t, name+" fills its limit", func() error {
		text, err := os.ReadFile(n.root + "/root/" + name + ".log")
		if err == nil && !strings.Contains(string(text), `"op":"fill"`) {
			err = fmt.Errorf("it says %s", text)
		}
		return err
	})
}

// containers are those that gpufenced says run, without the canaries that the agent starts every now and then.
func (n *node) containers(gpufence string) []api.Container {
	n.t.Helper()
	var all []api.Container
	if out := n.do(gpufence, "ps", "-o", "json"); json.Unmarshal([]byte(out), &all) != nil {
		n.t.Fatalf("gpufence ps: %s", out)
	}
	return slices.DeleteFunc(all, func(c api.Container) bool { return c.State != "running" || strings.HasPrefix(c.Pod.Name, "canary-") })
}

// held looks whether a container is where it was: the same process, the same limit, and nothing above it.
func (n *node) held(gpufence, when string, was api.Container) api.Container {
	n.t.Helper()
	all := n.containers(gpufence)
	if len(all) != 1 {
		n.t.Fatalf("%s: gpufenced has %d containers, want 1: %+v", when, len(all), all)
	}
	c := all[0]
	if was.PID != 0 && (c.PID != was.PID || c.Key != was.Key || c.GPUs[0].Limits != was.GPUs[0].Limits || c.GPUs[0].Events.Max < was.GPUs[0].Events.Max) {
		n.t.Errorf("%s: gpufenced has %+v, and had %+v", when, c, was)
	}
	// It ends with an error, since it is refused.
	out, err := n.try("ctr", "task", "exec", "--exec-id", "more", c.Key.ID, "/clients/client", "context", "fill 64")
	for line := range strings.Lines(out) {
		var r simnode.Reply
		if json.Unmarshal([]byte(line), &r) == nil && r.GrantedBytes > 0 {
			n.t.Errorf("%s: what was exec'd got %d bytes beside a full limit", when, r.GrantedBytes)
		}
	}
	if !strings.Contains(out, "CUDA_ERROR_OUT_OF_MEMORY") {
		n.t.Errorf("%s: what was exec'd was not refused: %s %v", when, out, err)
	}
	return c
}
