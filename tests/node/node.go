// SPDX-License-Identifier: Apache-2.0

// Package node is a machine of its own for tests and benchmarks: a simgpud, a gpufenced, and
// containers that are processes in cgroups of their own, registered as a runtime would. Nothing
// outside of its folder and its cgroups is touched, and Close says what was left.
//
// A Node may be used by several goroutines, a [Container] by one at a time.
package node

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/gpufence/gpufence/enforcer/api"
	"github.com/gpufence/gpufence/tests/mounts"
	"github.com/gpufence/gpufence/tests/process"
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
	simgpud *process.Process

	mu         sync.Mutex // of what follows; held over no wait
	gpufenced  *process.Process
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
	n.simgpud, err = n.start(ctx, "simgpud", nil, append([]string{"--dir", n.Path("sim")}, n.opts.Sim...)...)
	if err != nil {
		return err
	}
	return n.simgpud.Ready(ctx, func(ctx context.Context) error { _, err := n.Sim.State(ctx); return err })
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
	d, err := n.start(ctx, "gpufenced", env, append([]string{"--config", n.ConfigPath()}, n.opts.Args...)...)
	if err != nil {
		return err
	}
	n.mu.Lock()
	n.gpufenced = d
	n.mu.Unlock()
	return d.Ready(ctx, process.Answers("unix", n.Socket))
}

// daemon is the newest gpufenced; it may have ended.
func (n *Node) daemon() *process.Process {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.gpufenced
}

func (n *Node) awaitGPUs(ctx context.Context) error {
	return n.daemon().Ready(ctx, func(ctx context.Context) error {
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
func (n *Node) DaemonPID() int { return n.daemon().PID() }

// Crash kills gpufenced at whatever it does, and reaps it.
func (n *Node) Crash() error { return n.daemon().Kill() }

// StopDaemon ends gpufenced in order; it must end well.
func (n *Node) StopDaemon(ctx context.Context) error { return stop(ctx, n.daemon()) }

// DaemonLog is what gpufenced has said, its end.
func (n *Node) DaemonLog() string { return process.Tail(n.Path("gpufenced.log"), 60) }

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
	if d != nil && d.Running() {
		errs = append(errs, n.leaks(ctx), stop(ctx, d))
	}
	if n.simgpud != nil && n.simgpud.Running() {
		errs = append(errs, stop(ctx, n.simgpud))
	}
	mounted, err := mounts.Detach(n.Dir)
	errs = append(errs, err)
	for _, m := range mounted {
		errs = append(errs, fmt.Errorf("%s is still mounted", m))
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

// start starts one of our daemons.
func (n *Node) start(ctx context.Context, name string, env []string, args ...string) (*process.Process, error) {
	return process.Start(ctx, process.Options{
		Log: n.Path(name + ".log"), Env: env, TimeoutStart: Patience, TimeoutStop: Patience, Stacks: true,
	}, n.Dist("bin/"+name), args...)
}

// stop ends a daemon, which must end well.
func stop(ctx context.Context, p *process.Process) error {
	if err := p.Stop(ctx); err != nil {
		return err
	}
	if state := p.State(); !state.Success() {
		return fmt.Errorf("%s ended with %s:\n%s", filepath.Base(p.Args()[0]), state, p.Tail(12))
	}
	return nil
}
