// SPDX-License-Identifier: Apache-2.0

package demo

import (
	"bytes"
	"context"
	"crypto/rand"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/gpufence/gpufence/enforcer/api"
	"github.com/gpufence/gpufence/enforcer/quota"
	"github.com/gpufence/gpufence/tests/ldd"
	"github.com/gpufence/gpufence/tests/simgpu/server"
)

// Parts of dist that the demo runs.
var needed = []string{
	"bin/gpufence", "bin/gpufence-runtime", "bin/gpufence-hook", "bin/gpufenced", "bin/simgpud", "bin/simgpu",
	"lib/libgpufence.so", "simgpu/libcuda.so.1", "simgpu/libnvidia-ml.so.1", "simgpu/r615/libnvidia-ml.so.1", "clients/client", "clients/bypass",
}

// Durations of the demo's policy; the defaults would make people wait.
const (
	resizeDeadline = 3 * time.Second
	waitSocket     = time.Second
)

// check says what is missing before anything is made.
func check(opts Options) error {
	if opts.Lag < 0 || opts.Lag > time.Minute {
		return quota.NewError(quota.CodeUsage, "an NVML lag of %s is not between 0 and 1m", opts.Lag).WithHint("write for example 200ms")
	}
	for _, name := range needed {
		if _, err := os.Stat(filepath.Join(opts.Dist, name)); err != nil {
			return quota.NewError(quota.CodeUsage, "cannot find %s in %s", name, opts.Dist).WithHint("run `make build` first, or give --dist")
		}
	}
	if os.Geteuid() != 0 {
		return quota.NewError(quota.CodeRootless, "the demo runs containers").WithHint("run it as root")
	}
	for _, name := range []string{"runc", "busybox"} {
		if _, err := exec.LookPath(name); err != nil {
			return quota.NewError(quota.CodeNoRuntime, "cannot find %s in PATH", name).WithHint("install it (Debian: apt-get install runc busybox-static)")
		}
	}
	return nil
}

// node is a machine of its own inside this one: a folder, a cgroup, daemons, containers.
type node struct {
	opts   Options
	dir    string
	cgroup string // parent of every container, below each hierarchy's root
	pins   string // where the gate stays: the machine's own gpufenced has other pins, and its limits

	gpuUUID, gpuName string
	gpuBytes         uint64
	host             host
	real             *realHost // nil on a simulated GPU

	simgpud, gpufenced *process
	client             *api.Client
	engine             *engine
	socket, config     string

	root       rootfs
	containers []*container // in the order of their creation
}

func newNode(opts Options) (*node, error) {
	dist, err := filepath.Abs(opts.Dist)
	if err != nil {
		return nil, fmt.Errorf("find %s: %w", opts.Dist, err)
	}
	opts.Dist = dist
	dir, err := os.MkdirTemp("", "gpufence-demo-")
	if err != nil {
		return nil, fmt.Errorf("make a private folder: %w", err)
	}
	return &node{opts: opts, dir: dir, cgroup: "/" + filepath.Base(dir), pins: filepath.Join("/sys/fs/bpf", filepath.Base(dir))}, nil
}

func (n *node) path(parts ...string) string {
	return filepath.Join(append([]string{n.dir}, parts...)...)
}
func (n *node) dist(name string) string { return filepath.Join(n.opts.Dist, name) }

// describe is the GPU in words.
func (n *node) describe() string {
	s := fmt.Sprintf("%s %s, %s", n.gpuName, n.gpuUUID, humanBytes(n.gpuBytes))
	if n.real == nil {
		s += fmt.Sprintf(", NVML %s behind", n.opts.Lag)
	}
	return s
}

// start brings the daemons up.
func (n *node) start(ctx context.Context) error {
	if err := becomeReaper(); err != nil {
		return err
	}
	for _, d := range []string{"bundles", "runc", "cdi", "bin"} {
		if err := os.MkdirAll(n.path(d), 0o711); err != nil {
			return fmt.Errorf("make a private folder: %w", err)
		}
	}
	// The engine's name is the suffix of the name that the wrapper is started by.
	wrapper := n.path("bin", "gpufence-runtime.cri")
	if err := os.Symlink(n.dist("bin/gpufence-runtime"), wrapper); err != nil {
		return fmt.Errorf("name the wrapper: %w", err)
	}
	if err := n.startGPU(ctx); err != nil {
		return err
	}
	n.config, n.socket = n.path("config.toml"), n.path("run", "gpufenced.sock")
	if err := os.WriteFile(n.config, []byte(n.configText()), 0o600); err != nil {
		return fmt.Errorf("write config: %w", err)
	}
	n.engine = &engine{runtime: wrapper, root: n.path("runc"), dir: n.path("bundles"), env: []string{"GPUFENCE_CONFIG=" + n.config}}
	n.client = api.NewClient(n.socket, 0)
	if err := n.makeRoots(); err != nil {
		return err
	}
	return n.startDaemon(ctx)
}

func (n *node) startGPU(ctx context.Context) error {
	if !n.opts.Simulated {
		uuid, name, total, ok := realGPU(ctx)
		if ok && hasCDISpec() {
			sampler, err := startRealHost(ctx, uuid)
			if err != nil {
				return err
			}
			n.gpuUUID, n.gpuName, n.gpuBytes, n.real, n.host = uuid, name, total, sampler, sampler
			return nil
		}
	}
	sim := n.path("simgpu")
	var err error
	args := []string{"--dir", sim, "--gpus", "1", "--model", "t4", "--memory", "16GiB", "--nvml-lag", n.opts.Lag.String()}
	if n.opts.driver != "" {
		args = append(args, "--driver-version", n.opts.driver, "--cuda-version", "13.4", "--dmem-dir", n.path("dmem"))
	}
	n.simgpud, err = startProcess(ctx, n.dir, "simgpud", nil, n.dist("bin/simgpud"), args...)
	if err != nil {
		return err
	}
	admin := server.NewClient(sim)
	err = n.simgpud.ready(ctx, answerTime, func(ctx context.Context) error {
		state, err := admin.State(ctx)
		if err != nil {
			return err
		}
		if len(state.GPUs) != 1 {
			return fmt.Errorf("there are %d simulated GPUs", len(state.GPUs))
		}
		n.gpuUUID, n.gpuBytes = state.GPUs[0].UUID, state.GPUs[0].TotalBytes
		n.gpuName = state.GPUs[0].Name + ", driver " + state.DriverVersion
		return nil
	})
	if err != nil {
		return err
	}
	n.host = simulatedHost{admin}
	_, err = n.run(ctx, n.dist("bin/simgpu"), "--dir", sim, "cdi", "--lib-dir", n.dist("simgpu"), "--out", n.path("cdi", "simgpu.json"))
	return err
}

// configText is node policy: the defaults but for places and waits.
func (n *node) configText() string {
	quoted := strconv.Quote
	text := "socket = " + quoted(n.socket) + "\n" +
		"run-dir = " + quoted(n.path("run")) + "\n" +
		"state-dir = " + quoted(n.path("state")) + "\n" +
		"gate-pins = " + quoted(n.pins) + "\n" +
		"runtimes = [\"runc\"]\n" +
		"hook-path = " + quoted(n.dist("bin/gpufence-hook")) + "\n" +
		"shim-library = " + quoted(n.dist("lib/libgpufence.so")) + "\n" +
		"resize-deadline = " + quoted(resizeDeadline.String()) + "\n" +
		"wait-socket = " + quoted(waitSocket.String()) + "\n"
	if n.opts.Delivery != "" {
		text += "shim-delivery = " + quoted(n.opts.Delivery) + "\n"
	}
	if n.real != nil {
		return text
	}
	nvml := "simgpu/libnvidia-ml.so.1"
	if n.opts.driver != "" {
		nvml = "simgpu/r615/libnvidia-ml.so.1"
		text += "dmem-dir = " + quoted(n.path("dmem")) + "\n"
	}
	return text +
		"cdi-spec-dirs = [" + quoted(n.path("cdi")) + "]\n" +
		"cdi-kinds = [\"gpufence.dev/simgpu\"]\n" +
		"nvml-library = " + quoted(n.dist(nvml)) + "\n"
}

// makeRoots prepares what containers run in.
func (n *node) makeRoots() error {
	busybox, err := exec.LookPath("busybox")
	if err != nil {
		return fmt.Errorf("find busybox: %w", err)
	}
	extra := []string{n.dist("lib/libgpufence.so")}
	if n.real == nil {
		extra = append(extra, n.dist("simgpu/libcuda.so.1"), n.dist("simgpu/libnvidia-ml.so.1"))
	}
	client := n.dist("clients/client")
	n.root, err = newRootfs(busybox, map[string]string{"/client": client, "/bypass": n.dist("clients/bypass")}, extra...)
	if err != nil || n.real == nil {
		return err
	}
	// NVIDIA's libraries need more of libc than they can be asked for here.
	for _, name := range []string{"libdl.so.2", "libpthread.so.0", "librt.so.1", "libm.so.6"} {
		_, machine, err := ldd.Loader(client)
		if err != nil {
			return err
		}
		if path, err := ldd.Find(name, machine); err == nil {
			n.root[path] = path
		}
	}
	return n.makeNoShimLoader(client)
}

// noShimLoader is a dynamic loader that reads another preload file: any tenant could bring it.
const noShimLoader = "/loader"

func (n *node) makeNoShimLoader(client string) error {
	loader, _, err := ldd.Loader(client)
	if err != nil {
		return err
	}
	text, err := os.ReadFile(loader)
	if err != nil {
		return fmt.Errorf("read loader: %w", err)
	}
	const from, to = "/etc/ld.so.preload", "/etc/ld.so.nothing"
	if !bytes.Contains(text, []byte(from)) {
		return fmt.Errorf("find %s in %s: it reads no preload file", from, loader)
	}
	file := n.path("loader")
	if err := os.WriteFile(file, bytes.ReplaceAll(text, []byte(from), []byte(to)), 0o755); err != nil {
		return fmt.Errorf("write loader: %w", err)
	}
	n.root[noShimLoader] = file
	return nil
}

// startDaemon starts gpufenced and waits until it answers.
func (n *node) startDaemon(ctx context.Context) error {
	if n.gpufenced != nil {
		// A step that failed may not have got as far as killing it.
		if err := n.crash(); err != nil {
			return err
		}
	}
	env := []string{"GPUFENCE_CONFIG=" + n.config}
	if n.real == nil {
		env = append(env, "SIMGPU_DIR="+n.path("simgpu"))
	}
	p, err := startProcess(ctx, n.dir, "gpufenced", env, n.dist("bin/gpufenced"), "--config", n.config)
	if err != nil {
		return err
	}
	n.gpufenced = p
	return p.ready(ctx, answerTime, func(ctx context.Context) error {
		gpus, err := n.client.GPUs(ctx)
		if err != nil {
			return err
		}
		for _, g := range gpus {
			if g.UUID == n.gpuUUID && g.Known {
				return nil
			}
		}
		return fmt.Errorf("gpufenced does not know %s yet", n.gpuUUID)
	})
}

// crash kills gpufenced and reaps it.
func (n *node) crash() error {
	if err := n.gpufenced.cmd.Process.Kill(); err != nil && !errors.Is(err, os.ErrProcessDone) {
		return fmt.Errorf("kill gpufenced: %w", err)
	}
	<-n.gpufenced.done
	return nil
}

// run executes a command of ours and returns what it printed.
func (n *node) run(ctx context.Context, program string, args ...string) ([]byte, error) {
	cmd := exec.CommandContext(ctx, program, args...)
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if ctxErr := ctx.Err(); ctxErr != nil {
		return out, ctxErr
	}
	if err != nil {
		return out, fmt.Errorf("run %s %s: %w: %s", filepath.Base(program), strings.Join(args, " "), err, strings.TrimSpace(stderr.String()))
	}
	return out, nil
}

// gpufence runs the command that a user would and decodes its JSON.
func (n *node) gpufence(ctx context.Context, into any, args ...string) error {
	out, err := n.run(ctx, n.dist("bin/gpufence"), append([]string{"--socket", n.socket}, args...)...)
	if len(bytes.TrimSpace(out)) > 0 {
		if jsonErr := json.Unmarshal(out, into); jsonErr != nil {
			return errors.Join(err, fmt.Errorf("read what gpufence %s printed: %w", strings.Join(args, " "), jsonErr))
		}
	}
	return err
}

func (n *node) inspect(ctx context.Context, name string) (api.Container, error) {
	var c api.Container
	return c, n.gpufence(ctx, &c, "inspect", name, "-o", "json")
}

func newID(bytes int) (string, error) {
	b := make([]byte, bytes)
	if _, err := rand.Read(b); err != nil {
		return "", fmt.Errorf("make an id: %w", err)
	}
	return hex.EncodeToString(b), nil
}

// newPod starts a sandbox.
func (n *node) newPod(ctx context.Context, name string, annotations map[string]string) (*pod, error) {
	id, err := newID(32)
	if err != nil {
		return nil, err
	}
	uid, err := newID(16)
	if err != nil {
		return nil, err
	}
	uid = strings.Join([]string{uid[:8], uid[8:12], uid[12:16], uid[16:20], uid[20:]}, "-")
	p := &pod{name: name, namespace: "demo", uid: uid, sandboxID: id, annotations: annotations, cgroup: filepath.Join(n.cgroup, "pod"+uid)}
	root := rootfs{"/bin/busybox": n.root["/bin/busybox"]}
	if err := writeBundle(n.path("bundles", id), root, sandboxSpec(p)); err != nil {
		return nil, err
	}
	c, err := n.engine.create(ctx, id, name+"'s sandbox")
	if err != nil {
		return nil, fmt.Errorf("start the sandbox of %s: %w", name, err)
	}
	n.containers = append(n.containers, c)
	p.sandboxPID = c.pid
	return p, nil
}

// newContainer starts a container in a pod; its error is a [*refusedError] where the start was
// refused.
func (n *node) newContainer(ctx context.Context, p *pod, w workload) (*container, error) {
	id, err := newID(32)
	if err != nil {
		return nil, err
	}
	if err := n.writeContainer(p, w, id); err != nil {
		return nil, err
	}
	c, err := n.engine.create(ctx, id, w.name)
	if err != nil {
		return nil, err
	}
	n.containers = append(n.containers, c)
	return c, nil
}

// writeContainer makes a container's bundle.
func (n *node) writeContainer(p *pod, w workload, id string) error {
	bundle := n.path("bundles", id)
	if err := os.MkdirAll(bundle, 0o711); err != nil {
		return fmt.Errorf("make bundle: %w", err)
	}
	termination := n.termination(id)
	if err := os.WriteFile(termination, nil, 0o666); err != nil {
		return fmt.Errorf("make termination log: %w", err)
	}
	return writeBundle(bundle, n.root, containerSpec(p, w, id, termination))
}

func (n *node) termination(id string) string { return n.path("bundles", id, "termination-log") }

// close ends and removes everything, then says what is still there.
func (n *node) close(ctx context.Context) error {
	var errs []error
	// Containers before their sandboxes, and before gpufenced, which hears of their end.
	for i := len(n.containers) - 1; i >= 0; i-- {
		if err := n.containers[i].remove(ctx); err != nil {
			errs = append(errs, err)
		}
	}
	for _, p := range []*process{n.gpufenced, n.simgpud} {
		if p == nil {
			continue
		}
		select {
		case <-p.done:
		default:
			if err := p.stop(ctx, unix.SIGTERM); err != nil {
				errs = append(errs, err)
			}
		}
	}
	if n.real != nil {
		n.real.close()
	}
	if err := removeCgroup(ctx, n.cgroup); err != nil {
		errs = append(errs, err)
	}
	points, err := mountsBelow(n.dir)
	if err != nil {
		errs = append(errs, err)
	}
	for _, point := range points {
		// A container's shared pages outlive gpufenced on purpose; the demo's end is their end.
		if err := unix.Unmount(point, unix.MNT_DETACH); err != nil {
			errs = append(errs, fmt.Errorf("unmount %s: %w", point, err))
		}
	}
	if err := os.RemoveAll(n.pins); err != nil { // the gate goes with them
		errs = append(errs, fmt.Errorf("take the gate down: %w", err))
	}
	if err := os.RemoveAll(n.dir); err != nil {
		errs = append(errs, fmt.Errorf("remove private folder: %w", err))
	}
	return errors.Join(append(errs, n.leftovers()...)...)
}

// leftovers looks for what should be gone.
func (n *node) leftovers() []error {
	var errs []error
	for _, dir := range []string{n.dir, n.pins} {
		if _, err := os.Lstat(dir); !errors.Is(err, fs.ErrNotExist) {
			errs = append(errs, fmt.Errorf("%s is still there", dir))
		}
	}
	if points, err := mountsBelow(n.dir); err != nil || len(points) > 0 {
		errs = append(errs, errors.Join(err, fmt.Errorf("still mounted: %v", points)))
	}
	if dirs, err := cgroupDirs(n.cgroup); err != nil || len(dirs) > 0 {
		errs = append(errs, errors.Join(err, fmt.Errorf("cgroups are still there: %v", dirs)))
	}
	processes, err := os.ReadDir("/proc")
	if err != nil {
		return append(errs, fmt.Errorf("list processes: %w", err))
	}
	for _, p := range processes {
		pid, err := strconv.Atoi(p.Name())
		if err != nil || pid == os.Getpid() {
			continue
		}
		line, err := os.ReadFile(filepath.Join("/proc", p.Name(), "cmdline"))
		if err != nil {
			continue // it is gone
		}
		if strings.Contains(string(line), n.dir) || inCgroup(pid, n.cgroup) {
			errs = append(errs, fmt.Errorf("process %d is still there: %s", pid, strings.ReplaceAll(string(line), "\x00", " ")))
		}
	}
	return errs
}
