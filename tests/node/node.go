// SPDX-License-Identifier: Apache-2.0

// Package node is a machine of its own for tests and benchmarks: a simgpud, a gpufenced, and
// containers that are processes in cgroups of their own, registered as a runtime would. Nothing
// outside of its folder and its cgroups is touched, and Close says what was left.
//
// A Node may be used by several goroutines, a [Container] by one at a time.
package node

import (
	"bufio"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/gpufence/gpufence/enforcer/api"
	"github.com/gpufence/gpufence/tests/simgpu/server"
)

// Patience bounds what is waited for; only what hangs takes so long. GPUFENCE_PATIENCE is another bound, for emulated
// machines.
var Patience = func() time.Duration {
	if d, err := time.ParseDuration(os.Getenv("GPUFENCE_PATIENCE")); err == nil && d > 0 {
		return d
	}
	return 20 * time.Second
}()

// Options are what a node is made of.
type Options struct {
	Dist   string   // what make build made
	Sim    []string // flags of simgpud
	Config []string // lines of gpufenced's configuration, beside the places
	Env    []string // of gpufenced
	Args   []string // more flags of gpufenced
	// Hierarchies in which each container gets a cgroup: unified, freezer. Both by default, as
	// under runc.
	Hierarchies []string
	// PodCgroups puts each container's cgroups into one of its pod's, as under Kubernetes.
	PodCgroups bool
	// NVML is the folder of libnvidia-ml.so.1 in Dist, "simgpu" by default.
	NVML string
	// Found takes the driver that the loader finds, real or not, instead of starting a simulated one:
	// Sim is nil then, and Sim and NVML above mean nothing.
	Found bool
}

// Node is one.
type Node struct {
	Dir    string
	Socket string
	Client *api.Client
	Sim    *server.Client

	opts    Options
	simgpud *daemon

	mu         sync.Mutex // of what follows; held over no wait
	gpufenced  *daemon
	containers []*Container
	count      int
}

// New makes the folder and starts both daemons.
func New(ctx context.Context, opts Options) (n *Node, err error) {
	if os.Geteuid() != 0 {
		return nil, errors.New("make a node: cgroups need root")
	}
	needed := []string{"bin/gpufenced", "lib/libgpufence.so", "clients/client"}
	if !opts.Found {
		needed = append(needed, "bin/simgpud", "simgpu/libcuda.so.1")
	}
	for _, name := range needed {
		if _, err := os.Stat(filepath.Join(opts.Dist, name)); err != nil {
			return nil, fmt.Errorf("find %s in %s: run make build first", name, opts.Dist)
		}
	}
	if len(opts.Hierarchies) == 0 {
		opts.Hierarchies = []string{"unified", "freezer"}
	}
	dir, err := os.MkdirTemp(memory(), "gpufence-node-") // short: a socket's path has 108 bytes
	if err != nil {
		return nil, fmt.Errorf("make a node's folder: %w", err)
	}
	n = &Node{Dir: dir, Socket: filepath.Join(dir, "gpufenced.sock"), opts: opts}
	defer func() {
		if err != nil {
			err = errors.Join(err, n.Close(context.WithoutCancel(ctx)))
			n = nil
		}
	}()
	n.Client = api.NewClient(n.Socket, Patience)
	text := []string{
		"socket = " + strconv.Quote(n.Socket), "run-dir = " + strconv.Quote(n.Path("run")), "state-dir = " + strconv.Quote(n.Path("state")),
		"gate-pins = " + strconv.Quote(n.pins()),
		"shim-library = " + strconv.Quote(filepath.Join(opts.Dist, "lib/libgpufence.so")),
		"cdi-spec-dirs = [" + strconv.Quote(n.Path("cdi")) + "]", `runtimes = ["runc"]`,
		"hook-path = " + strconv.Quote(filepath.Join(opts.Dist, "bin/gpufence-hook")),
	}
	if !opts.Found {
		text = append(text, `cdi-kinds = ["gpufence.dev/simgpu"]`,
			"nvml-library = "+strconv.Quote(filepath.Join(opts.Dist, cmp.Or(opts.NVML, "simgpu"), "libnvidia-ml.so.1")))
		if err := n.startSim(ctx); err != nil {
			return n, err
		}
	}
	if err := os.WriteFile(n.ConfigPath(), []byte(strings.Join(append(text, opts.Config...), "\n")+"\n"), 0o600); err != nil {
		return n, fmt.Errorf("write configuration: %w", err)
	}
	if err := n.StartDaemon(ctx); err != nil {
		return n, err
	}
	return n, n.awaitGPUs(ctx)
}

func (n *Node) startSim(ctx context.Context) (err error) {
	n.Sim = server.NewClient(n.Path("sim"))
	n.simgpud, err = start(ctx, n.Path("simgpud.log"), nil, n.Dist("bin/simgpud"), append([]string{"--dir", n.Path("sim")}, n.opts.Sim...)...)
	if err != nil {
		return err
	}
	return n.simgpud.ready(ctx, func(ctx context.Context) error { _, err := n.Sim.State(ctx); return err })
}

// memory is a folder that is no disk, as /run is on a real node: what gpufenced saves before it
// kills must not wait for one.
func memory() string {
	for _, dir := range []string{"/run", "/dev/shm"} {
		var s unix.Statfs_t
		if err := unix.Statfs(dir, &s); err == nil && s.Type == unix.TMPFS_MAGIC && unix.Access(dir, unix.W_OK) == nil {
			return dir
		}
	}
	return ""
}

// Path is a place in the node's folder.
func (n *Node) Path(parts ...string) string {
	return filepath.Join(append([]string{n.Dir}, parts...)...)
}

// ConfigPath is gpufenced's configuration.
func (n *Node) ConfigPath() string { return n.Path("config.toml") }

// Dist is a file of the build.
func (n *Node) Dist(name string) string { return filepath.Join(n.opts.Dist, name) }

// SimEnv lets a program outside of containers find the simulated GPU.
func (n *Node) SimEnv() []string {
	if n.opts.Found {
		return nil
	}
	return []string{"SIMGPU_DIR=" + n.Path("sim"), "LD_LIBRARY_PATH=" + n.Dist(cmp.Or(n.opts.NVML, "simgpu")) + ":" + n.Dist("simgpu")}
}

// StartDaemon starts gpufenced and waits until it accepts connections.
func (n *Node) StartDaemon(ctx context.Context) error {
	env := n.opts.Env
	if !n.opts.Found {
		env = append([]string{"SIMGPU_DIR=" + n.Path("sim")}, env...)
	}
	d, err := start(ctx, n.Path("gpufenced.log"), env, n.Dist("bin/gpufenced"), append([]string{"--config", n.ConfigPath()}, n.opts.Args...)...)
	if err != nil {
		return err
	}
	n.mu.Lock()
	n.gpufenced = d
	n.mu.Unlock()
	return d.ready(ctx, func(ctx context.Context) error {
		// A dead one's socket refuses.
		c, err := new(net.Dialer).DialContext(ctx, "unix", n.Socket)
		if err == nil {
			err = c.Close()
		}
		return err
	})
}

// daemon is the newest gpufenced; it may have ended.
func (n *Node) daemon() *daemon {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.gpufenced
}

func (n *Node) awaitGPUs(ctx context.Context) error {
	return n.daemon().ready(ctx, func(ctx context.Context) error {
		gpus, err := n.Client.GPUs(ctx)
		if err != nil {
			return err
		}
		for _, g := range gpus {
			if g.SampledAt == nil {
				return fmt.Errorf("GPU %s was not sampled yet", g.UUID)
			}
		}
		if len(gpus) == 0 {
			return errors.New("gpufenced has no GPUs yet")
		}
		return nil
	})
}

// DaemonPID is gpufenced's.
func (n *Node) DaemonPID() int { return n.daemon().cmd.Process.Pid }

// Crash kills gpufenced at whatever it does, and reaps it.
func (n *Node) Crash() error {
	d := n.daemon()
	if err := d.cmd.Process.Kill(); err != nil {
		return fmt.Errorf("kill gpufenced: %w", err)
	}
	<-d.done
	return nil
}

// StopDaemon ends gpufenced in order; it must end well.
func (n *Node) StopDaemon(ctx context.Context) error { return n.daemon().stop(ctx) }

// DaemonLog is what gpufenced has said, its end.
func (n *Node) DaemonLog() string { return tail(n.Path("gpufenced.log"), 60) }

// SetSim changes knobs of one simulated GPU (-1: of all), as "name=value".
func (n *Node) SetSim(ctx context.Context, gpu int, knobs ...string) error {
	set := server.Settings{Knobs: map[string]string{}}
	if gpu >= 0 {
		set.GPU = &gpu
	}
	for _, k := range knobs {
		name, value, _ := strings.Cut(k, "=")
		set.Knobs[name] = value
	}
	return n.Sim.Set(ctx, set)
}

// Events are the journal's entries of these types, oldest first; all without a type.
func (n *Node) Events(ctx context.Context, types ...string) ([]api.Event, error) {
	var out []api.Event
	err := n.Client.Events(ctx, 0, false, func(ev api.Event) error {
		for _, t := range types {
			if ev.Type == t {
				out = append(out, ev)
			}
		}
		if len(types) == 0 {
			out = append(out, ev)
		}
		return nil
	})
	return out, err
}

// Until waits for something that must come.
func Until(ctx context.Context, what string, f func() (bool, error)) error {
	deadline := time.Now().Add(Patience)
	for {
		ok, err := f()
		if err != nil {
			return fmt.Errorf("wait until %s: %w", what, err)
		}
		if ok {
			return nil
		}
		if time.Now().After(deadline) {
			return fmt.Errorf("wait until %s: it did not happen within %s", what, Patience)
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("wait until %s: %w", what, ctx.Err())
		case <-time.After(5 * time.Millisecond):
		}
	}
}

// Close ends everything and removes it. What gpufenced left behind is an error: once every
// container is gone there must be no page, no mount, no grant.
func (n *Node) Close(ctx context.Context) error {
	var errs []error
	n.mu.Lock()
	left, d := slices.Clone(n.containers), n.gpufenced
	n.mu.Unlock()
	for _, c := range left {
		errs = append(errs, c.Remove(ctx))
	}
	if d != nil && d.running() {
		errs = append(errs, n.leaks(ctx), d.stop(ctx))
	}
	if n.simgpud != nil && n.simgpud.running() {
		errs = append(errs, n.simgpud.stop(ctx))
	}
	for _, m := range mountsBelow(n.Dir) {
		errs = append(errs, fmt.Errorf("%s is still mounted", m), unix.Unmount(m, unix.MNT_DETACH))
	}
	if err := os.RemoveAll(n.pins()); err != nil { // the gate goes with them
		errs = append(errs, fmt.Errorf("take the gate down: %w", err))
	}
	if err := os.RemoveAll(n.Dir); err != nil {
		errs = append(errs, fmt.Errorf("remove the node's folder: %w", err))
	}
	return errors.Join(errs...)
}

// pins are where the gate stays: those of the machine's own gpufenced are others, and so are its limits.
func (n *Node) pins() string { return filepath.Join("/sys/fs/bpf", filepath.Base(n.Dir)) }

// leaks are what gpufenced still has when no container is left.
func (n *Node) leaks(ctx context.Context) error {
	var errs []error
	list, err := n.Client.Containers(ctx)
	errs = append(errs, err)
	for _, c := range list {
		if c.State == "running" {
			errs = append(errs, fmt.Errorf("container %s still counts as %s", c.Key.ID, c.State))
		}
	}
	var gpus []api.GPUState
	guaranteed := func(g api.GPUState) bool { return g.GuaranteedBytes != 0 }
	err = Until(ctx, "nothing is promised", func() (bool, error) {
		// What a pod was promised lasts until gpufenced has seen that its cgroup is gone.
		gpus, err = n.Client.GPUs(ctx)
		return !n.opts.PodCgroups || !slices.ContainsFunc(gpus, guaranteed), err
	})
	errs = append(errs, err)
	prepared := false
	for _, c := range list {
		prepared = prepared || c.State == "prepared"
	}
	if prepared {
		return errors.Join(errs...) // the test left a preparation, whose promise and pages stay a while
	}
	for _, g := range gpus {
		if g.GuaranteedBytes != 0 {
			errs = append(errs, fmt.Errorf("%d bytes of %s are still promised", g.GuaranteedBytes, g.UUID))
		}
	}
	for _, dir := range []string{"pods", "preload"} {
		left, err := os.ReadDir(n.Path("run", dir))
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			errs = append(errs, err)
		}
		for _, e := range left {
			errs = append(errs, fmt.Errorf("%s is still in %s", e.Name(), n.Path("run", dir)))
		}
	}
	return errors.Join(errs...)
}

// mountsBelow are mount points under a folder, the innermost first.
func mountsBelow(dir string) []string {
	f, err := os.Open("/proc/self/mountinfo")
	if err != nil {
		return nil // without /proc nothing of this runs
	}
	defer f.Close()
	var out []string
	for lines := bufio.NewScanner(f); lines.Scan(); {
		if fields := strings.Fields(lines.Text()); len(fields) > 4 && strings.HasPrefix(fields[4], dir+"/") {
			out = append([]string{fields[4]}, out...)
		}
	}
	return out
}

// daemon is a program of ours that runs beside the test.
type daemon struct {
	cmd  *exec.Cmd
	name string
	log  string
	done chan struct{}
}

func start(ctx context.Context, log string, env []string, program string, args ...string) (*daemon, error) {
	f, err := os.OpenFile(log, os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o600)
	if err != nil {
		return nil, fmt.Errorf("start %s: %w", program, err)
	}
	defer f.Close()
	// Not ended with ctx: Close does that, in order.
	cmd := exec.CommandContext(context.WithoutCancel(ctx), program, args...)
	cmd.Env = append(os.Environ(), env...)
	cmd.Stdout, cmd.Stderr = f, f
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
	d := &daemon{cmd: cmd, name: filepath.Base(program), log: log, done: make(chan struct{})}
	if err := startLocked(cmd, func() {
		_ = cmd.Wait() // how it ended is in ProcessState
		close(d.done)
	}); err != nil {
		return nil, fmt.Errorf("start %s: %w", d.name, err)
	}
	return d, nil
}

// launcher is one thread that starts every child: a parent's death signal follows the thread
// that forked, and Go's other threads come and go.
var launcher = sync.OnceValue(func() chan func() {
	work := make(chan func())
	go func() {
		lockThread()
		for f := range work {
			f()
		}
	}()
	return work
})

func startLocked(cmd *exec.Cmd, wait func()) error {
	result := make(chan error)
	launcher() <- func() { result <- cmd.Start() }
	if err := <-result; err != nil {
		return err
	}
	go wait()
	return nil
}

func (d *daemon) running() bool {
	select {
	case <-d.done:
		return false
	default:
		return true
	}
}

func (d *daemon) ready(ctx context.Context, probe func(context.Context) error) error {
	ctx, cancel := context.WithTimeout(ctx, Patience)
	defer cancel()
	for {
		err := probe(ctx)
		if err == nil {
			return nil
		}
		select {
		case <-d.done:
			return fmt.Errorf("%s ended at its start (%s): %s", d.name, d.cmd.ProcessState, tail(d.log, 12))
		case <-ctx.Done():
			said := tail(d.log, 12)
			return fmt.Errorf("%s is not ready (%w): %s\n%s", d.name, err, said, d.stacks())
		case <-time.After(5 * time.Millisecond):
		}
	}
}

// stacks ends a program that hangs with where all of its goroutines stand. The log keeps them; the
// answer has a beginning of it, which goes into a test's output.
func (d *daemon) stacks() string {
	before, _ := os.Stat(d.log)
	if err := d.cmd.Process.Signal(syscall.SIGQUIT); err != nil {
		return fmt.Sprintf("its goroutines cannot be had: %v", err)
	}
	select {
	case <-d.done:
	case <-time.After(Patience):
		return "it does not end by SIGQUIT either: it does not run at all"
	}
	text, err := os.ReadFile(d.log)
	if err != nil {
		return err.Error()
	}
	if before != nil && before.Size() <= int64(len(text)) {
		text = text[before.Size():]
	}
	return string(text[:min(len(text), 64<<10)])
}

func (d *daemon) stop(ctx context.Context) error {
	if err := d.cmd.Process.Signal(syscall.SIGTERM); err != nil && !errors.Is(err, os.ErrProcessDone) {
		return fmt.Errorf("stop %s: %w", d.name, err)
	}
	select {
	case <-d.done:
		if !d.cmd.ProcessState.Success() {
			return fmt.Errorf("%s ended with %s: %s", d.name, d.cmd.ProcessState, tail(d.log, 12))
		}
		return nil
	case <-time.After(Patience):
	case <-ctx.Done():
	}
	err := d.cmd.Process.Kill()
	<-d.done
	return errors.Join(fmt.Errorf("%s did not stop and was killed: %s", d.name, tail(d.log, 12)), err)
}

func tail(path string, lines int) string {
	text, err := os.ReadFile(path)
	if err != nil {
		return err.Error()
	}
	all := strings.Split(strings.TrimSpace(string(text)), "\n")
	return strings.Join(all[max(0, len(all)-lines):], "\n")
}
