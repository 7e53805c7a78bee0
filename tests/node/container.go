// SPDX-License-Identifier: Apache-2.0

package node

import (
	"bufio"
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
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/gpufence/gpufence/enforcer/api"
	"github.com/gpufence/gpufence/enforcer/quota"
	"github.com/gpufence/gpufence/tests/process"
)

// Spec is a container.
type Spec struct {
	Name      string // of the container; ids and pods are made of it
	Pod       string // the container's own by default
	Namespace string
	Limits    []string // annotations without our domain, as "memory.max=1Gi"
	GPUs      []string // selectors; "0" by default
	Shim      bool     // load it into the first process, as the preload file would
	Program   []string // the test client reading lines by default
	Env       []string
	Hierarchy string // the only one in which it has a cgroup
	// Each hears every reply, in their order, from a goroutine of its own.
	Each func(Reply)
	// Termination makes a file for the termination message.
	Termination bool
}

// Reply is a JSON line of the test client.
type Reply struct {
	Op           string `json:"op"`
	OK           bool   `json:"ok"`
	MonoNS       int64  `json:"mono_ns"`
	Call         string `json:"call"`
	ResultName   string `json:"result_name"`
	Why          string `json:"why"`
	HeldBytes    uint64 `json:"held_bytes"`
	GrantedBytes uint64 `json:"granted_bytes"`
	TotalBytes   uint64 `json:"total_bytes"`
	FreeBytes    uint64 `json:"free_bytes"`
	Failures     uint64 `json:"failures"`
	FirstFailure uint64 `json:"first_failure"`
	Allocs       uint64 `json:"allocs"`
	PeakBytes    uint64 `json:"peak_bytes"`
	Refused      uint64 `json:"refused"`
}

// Container is one that runs, or ran.
type Container struct {
	Spec
	Key                       api.ContainerKey
	Prepared                  api.PrepareResponse
	Registered                api.RegisterResponse
	PrepareTook, RegisterTook time.Duration
	Termination               string // host path of its message
	Main                      *Process

	node    *Node
	dirs    []string // cgroups
	pods    []string // those of its pod
	private string   // folder with the shim and its pages
	more    []*Process
	removed bool
}

// Process is one process of a container.
type Process struct {
	PID     int
	name    string
	stdin   io.WriteCloser
	replies chan Reply
	child   *process.Process
}

// Request is what the wrapper would ask for.
func (n *Node) Request(s Spec) api.PrepareRequest {
	pod := s.Pod
	if pod == "" {
		pod = s.Name
	}
	namespace := s.Namespace
	if namespace == "" {
		namespace = "default"
	}
	gpus := s.GPUs
	if len(gpus) == 0 {
		gpus = []string{"0"}
	}
	req := api.PrepareRequest{
		Key:           api.ContainerKey{Engine: quota.EngineCRI, Scope: "k8s.io", ID: s.Name},
		Pod:           api.PodRef{ID: "pod-" + pod, Namespace: namespace, Name: pod, UID: "uid-" + pod},
		ContainerName: s.Name, Bundle: n.Path("bundle", s.Name), ShimDir: "/dev/gpufence",
		Annotations: map[string]string{}, Devices: api.DeviceRequest{Selectors: gpus, Present: true},
	}
	for _, l := range s.Limits {
		k, v, _ := strings.Cut(l, "=")
		req.Annotations["gpufence.dev/"+k] = v
	}
	return req
}

// Start prepares a container, starts its first process, and registers it before that process runs
// any of its own.
func (n *Node) Start(ctx context.Context, s Spec) (c *Container, err error) {
	req := n.Request(s)
	c = &Container{Spec: s, Key: req.Key, node: n}
	n.mu.Lock()
	n.containers = append(n.containers, c)
	n.mu.Unlock()
	if s.Termination {
		c.Termination = n.Path("termination-" + s.Name)
		if err := os.WriteFile(c.Termination, nil, 0o644); err != nil {
			return c, fmt.Errorf("start %s: %w", s.Name, err)
		}
		req.TerminationLog = c.Termination
	}
	began := time.Now()
	if err := Retry(ctx, func() (err error) { c.Prepared, err = n.Client.Prepare(ctx, req); return err }); err != nil {
		return c, fmt.Errorf("prepare %s: %w", s.Name, err)
	}
	c.PrepareTook = time.Since(began)
	if err := c.makeCgroups(); err != nil {
		return c, err
	}
	if s.Shim {
		if err := c.deliver(); err != nil {
			return c, err
		}
	}
	if c.Main, err = c.spawn(ctx, s.Program, s.Shim); err != nil {
		return c, err
	}
	began = time.Now()
	register := api.RegisterRequest{Key: c.Key, PID: c.Main.PID}
	if err := Retry(ctx, func() (err error) { c.Registered, err = n.Client.Register(ctx, register); return err }); err != nil {
		return c, fmt.Errorf("register %s: %w", s.Name, err)
	}
	c.RegisterTook = time.Since(began)
	return c, c.Main.Say("")
}

// Retry does something again that a crash of gpufenced cut: a refusal is an answer, everything else
// is worth another attempt.
func Retry(ctx context.Context, f func() error) error {
	deadline := time.Now().Add(Patience)
	for {
		err := f()
		var refused *api.Error
		if err == nil || errors.As(err, &refused) && !errors.Is(err, api.ErrUnreachable) || ctx.Err() != nil || time.Now().After(deadline) {
			return err
		}
		time.Sleep(5 * time.Millisecond)
	}
}

func hierarchyRoot(name string) string { return filepath.Join("/sys/fs/cgroup", name) }

// makeCgroups gives the container a cgroup in each hierarchy that it is to have one in.
func (c *Container) makeCgroups() error {
	n := c.node
	n.mu.Lock()
	n.count++
	number := n.count
	n.mu.Unlock()
	hierarchies := n.opts.Hierarchies
	if c.Hierarchy != "" {
		hierarchies = []string{c.Hierarchy}
	}
	for _, h := range hierarchies {
		root := hierarchyRoot(h)
		if _, err := os.Stat(filepath.Join(root, "cgroup.procs")); errors.Is(err, fs.ErrNotExist) {
			// A host with v2 only has one hierarchy.
			if root = "/sys/fs/cgroup"; h != "unified" {
				continue
			}
		}
		dir := filepath.Join(root, filepath.Base(n.Dir)+"-"+strconv.Itoa(number))
		if n.opts.PodCgroups {
			pod := filepath.Join(root, filepath.Base(n.Dir)+"-"+n.Request(c.Spec).Pod.UID)
			if err := os.MkdirAll(pod, 0o755); err != nil {
				return fmt.Errorf("make cgroup of the pod of %s: %w", c.Name, err)
			}
			c.pods = append(c.pods, pod)
			dir = filepath.Join(pod, strconv.Itoa(number))
		}
		if err := os.Mkdir(dir, 0o755); err != nil {
			return fmt.Errorf("make cgroup of %s: %w", c.Name, err)
		}
		c.dirs = append(c.dirs, dir)
	}
	if len(c.dirs) == 0 {
		return fmt.Errorf("make cgroup of %s: none of %v is mounted", c.Name, hierarchies)
	}
	return nil
}

// Cgroups are the folders of the container's cgroups.
func (c *Container) Cgroups() []string { return c.dirs }

// deliver puts the shim and its pages where the shim looks: beside itself. Links stand in for the
// bind mounts.
func (c *Container) deliver() error {
	c.private = c.node.Path("private-" + c.Name)
	for _, f := range c.Prepared.Files {
		var err error
		if f.Destination == containerDir {
			err = linkFolder(f.Source, c.private)
		} else if rest, ok := strings.CutPrefix(f.Destination, containerDir+"/"); ok {
			place := filepath.Join(c.private, rest)
			// A mount covers what is there in the container's folder.
			err = errors.Join(os.Remove(place), os.Symlink(f.Source, place))
		}
		if err != nil {
			return fmt.Errorf("deliver shim to %s: %w", c.Name, err)
		}
	}
	return nil
}

// containerDir is where a container has its pages.
const containerDir = "/dev/gpufence"

// linkFolder makes a folder with links to the files of another one, and the links that it has.
func linkFolder(from, to string) error {
	return filepath.WalkDir(from, func(path string, e fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		place := filepath.Join(to, strings.TrimPrefix(path, from))
		switch {
		case e.IsDir():
			return os.MkdirAll(place, 0o755)
		case e.Type() == fs.ModeSymlink:
			if path, err = os.Readlink(path); err != nil {
				return err
			}
		}
		return os.Symlink(path, place)
	})
}

// File is a shared file of the container on the host: limits, ledger, memory.current, ...
func (c *Container) File(name string) string {
	folder := ""
	for _, f := range c.Prepared.Files {
		switch f.Destination {
		case containerDir + "/" + name:
			return f.Source
		case containerDir:
			folder = f.Source
		}
	}
	if folder == "" {
		return ""
	}
	return filepath.Join(folder, name)
}

// Exec adds a process to the container; the test client if no program is named.
func (c *Container) Exec(ctx context.Context, shim bool, program ...string) (*Process, error) {
	p, err := c.spawn(ctx, program, shim)
	if err != nil {
		return nil, err
	}
	c.more = append(c.more, p)
	return p, p.Say("")
}

// Outside starts a process that is in no container; the test client if no program is named. Whoever
// starts it ends it.
func (n *Node) Outside(ctx context.Context, name string, program ...string) (*Process, error) {
	c := &Container{Spec: Spec{Name: name}, node: n}
	p, err := c.spawn(ctx, program, false)
	if err != nil {
		return nil, err
	}
	return p, p.Say("")
}

// Said is what the containers wrote for people, its end.
func (n *Node) Said() string { return process.Tail(n.Path("containers.log"), 20) }

// spawn starts a program that waits for a line before it is executed, in the container's cgroups.
func (c *Container) spawn(ctx context.Context, program []string, shim bool) (*Process, error) {
	if len(program) == 0 {
		program = []string{c.node.Dist("clients/client")}
	}
	env := c.node.SimEnv()
	script := `read -r gate; exec "$@"`
	if shim {
		// Not before exec: the shell is no part of the container.
		script = `read -r gate; export LD_PRELOAD="$SHIM"; exec "$@"`
		env = append(env, "SHIM="+filepath.Join(c.private, "lib64", "libgpufence.so"))
	}
	p := &Process{name: c.Name, replies: make(chan Reply, 64)}
	outRead, outWrite, err := os.Pipe()
	if err != nil {
		return nil, fmt.Errorf("start %s: %w", c.Name, err)
	}
	p.child, err = process.Start(ctx, process.Options{
		Name: c.Name, Log: c.node.Path("containers.log"), Env: append(env, c.Env...), TimeoutStop: Patience,
		Edit: func(cmd *exec.Cmd) (err error) {
			cmd.Stdout = outWrite
			p.stdin, err = cmd.StdinPipe()
			return err
		},
	}, "/bin/sh", append([]string{"-c", script, "sh"}, program...)...)
	outWrite.Close()
	if err != nil {
		outRead.Close()
		return nil, err
	}
	p.PID = p.child.PID()
	go p.read(outRead, c.Each)
	for _, dir := range c.dirs {
		if err := os.WriteFile(filepath.Join(dir, "cgroup.procs"), []byte(strconv.Itoa(p.PID)), 0); err != nil {
			return p, errors.Join(fmt.Errorf("move %s to its cgroup: %w", c.Name, err), p.Kill())
		}
	}
	return p, nil
}

// read takes the client's output; of what nobody asks for the newest is kept.
func (p *Process) read(out *os.File, each func(Reply)) {
	defer close(p.replies)
	defer out.Close()
	for lines := bufio.NewScanner(out); lines.Scan(); {
		var r Reply
		if err := json.Unmarshal(lines.Bytes(), &r); err != nil || r.Op == "" {
			continue
		}
		if each != nil {
			each(r)
		}
		select {
		case p.replies <- r:
		default:
			select {
			case <-p.replies:
			default:
			}
			p.replies <- r
		}
	}
}

// Say gives the client a line.
func (p *Process) Say(line string) error {
	if _, err := io.WriteString(p.stdin, line+"\n"); err != nil {
		return fmt.Errorf("tell %s %q: %w", p.name, line, err)
	}
	return nil
}

// Hear waits for the reply to an operation.
func (p *Process) Hear(ctx context.Context, op string) (Reply, error) {
	timer := time.NewTimer(Patience)
	defer timer.Stop()
	for {
		select {
		case r, ok := <-p.replies:
			if !ok {
				return r, fmt.Errorf("ask %s for %q: it has ended (%s)", p.name, op, p.Status())
			}
			if r.Op == op {
				return r, nil
			}
		case <-ctx.Done():
			return Reply{}, ctx.Err()
		case <-timer.C:
			return Reply{}, fmt.Errorf("ask %s for %q: no answer within %s", p.name, op, Patience)
		}
	}
}

// Ask says a line and waits for its reply.
func (p *Process) Ask(ctx context.Context, line string) (Reply, error) {
	if err := p.Say(line); err != nil {
		return Reply{}, err
	}
	op, _, _ := strings.Cut(line, " ")
	return p.Hear(ctx, op)
}

// Do asks for several things, all of which must succeed; it gives the last reply.
func (p *Process) Do(ctx context.Context, lines ...string) (Reply, error) {
	var r Reply
	for _, l := range lines {
		var err error
		if r, err = p.Ask(ctx, l); err != nil {
			return r, err
		}
		if !r.OK {
			return r, fmt.Errorf("%s: %q failed: %s %s %s", p.name, l, r.Call, r.ResultName, r.Why)
		}
	}
	return r, nil
}

// Alive says that it was not reaped yet.
func (p *Process) Alive() bool { return p.child.Running() }

// Exited is closed when the process was reaped.
func (p *Process) Exited() <-chan struct{} { return p.child.Done() }

// Await waits for its end.
func (p *Process) Await(ctx context.Context) error { return p.child.Await(ctx) }

// Status is how it ended.
func (p *Process) Status() string {
	select {
	case <-p.Exited():
		return p.child.State().String()
	case <-time.After(time.Second):
		return "still running"
	}
}

// Killed says that it was ended by SIGKILL.
func (p *Process) Killed() bool {
	if p.Alive() {
		return false
	}
	s, ok := p.child.State().Sys().(syscall.WaitStatus)
	return ok && s.Signaled() && s.Signal() == syscall.SIGKILL
}

// Kill ends it, as anybody but gpufenced would.
func (p *Process) Kill() error {
	if err := p.child.Signal(syscall.SIGKILL); err != nil && !errors.Is(err, os.ErrProcessDone) {
		return fmt.Errorf("kill %s: %w", p.name, err)
	}
	return nil
}

// View is what gpufenced says of the container.
func (c *Container) View(ctx context.Context) (api.Container, error) {
	return c.node.Client.Container(ctx, c.Key.ID)
}

// Set changes memory.max and waits for how it ends.
func (c *Container) Set(ctx context.Context, limit string, req api.SetRequest) (api.SetResponse, error) {
	req.Values = map[string]string{"memory.max": limit}
	return c.node.Client.Set(ctx, c.Key.ID, req)
}

// Remove ends the container as a runtime would: kill, reap, remove the cgroups, poststop. It may be
// called again.
func (c *Container) Remove(ctx context.Context) error {
	if c.removed {
		return nil
	}
	c.removed = true
	errs := []error{c.Stop(ctx)}
	if c.node.daemon().Running() {
		errs = append(errs, Retry(ctx, func() error { return c.node.Client.Unregister(ctx, api.UnregisterRequest{Key: c.Key}) }))
	}
	if c.private != "" {
		errs = append(errs, os.RemoveAll(c.private))
	}
	c.node.mu.Lock()
	defer c.node.mu.Unlock()
	c.node.containers = slices.DeleteFunc(slices.Clone(c.node.containers), func(o *Container) bool { return o == c })
	return errors.Join(errs...)
}

// Stop ends the processes and removes the cgroups, and tells nobody.
func (c *Container) Stop(ctx context.Context) error {
	var errs []error
	all := slices.Clone(c.more)
	if c.Main != nil {
		all = append(all, c.Main)
	}
	for _, dir := range c.dirs {
		// Whoever froze it: the dead must be able to go.
		if f := filepath.Join(dir, "freezer.state"); exists(f) {
			errs = append(errs, os.WriteFile(f, []byte("THAWED"), 0))
		}
	}
	for _, p := range all {
		if p.Alive() {
			errs = append(errs, p.Kill())
		}
		errs = append(errs, p.Await(ctx))
		p.stdin.Close()
	}
	for _, dir := range c.dirs {
		errs = append(errs, Until(ctx, "cgroup "+dir+" can be removed", func() (bool, error) {
			err := os.Remove(dir)
			if errors.Is(err, syscall.EBUSY) {
				return false, nil
			}
			if errors.Is(err, fs.ErrNotExist) {
				err = nil
			}
			return true, err
		}))
	}
	for _, dir := range c.pods {
		// The last of the pod's containers removes it.
		if err := os.Remove(dir); err != nil && !errors.Is(err, syscall.EBUSY) && !errors.Is(err, syscall.ENOTEMPTY) && !errors.Is(err, fs.ErrNotExist) {
			errs = append(errs, err)
		}
	}
	c.dirs, c.pods = nil, nil
	return errors.Join(errs...)
}

func exists(path string) bool {
	_, err := os.Stat(path)
	return err == nil
}

// Together runs f for each of n at once and joins their errors.
func Together(n int, f func(i int) error) error {
	errs := make([]error, n)
	var wg sync.WaitGroup
	for i := range n {
		wg.Go(func() { errs[i] = f(i) })
	}
	wg.Wait()
	return errors.Join(errs...)
}

// ExecAs adds the test client with a certain pid, which nobody may have now. Others may take it
// first: that is an error, and worth another attempt.
func (c *Container) ExecAs(ctx context.Context, pid int) (*Process, error) {
	if err := os.WriteFile("/proc/sys/kernel/ns_last_pid", []byte(strconv.Itoa(pid-1)), 0); err != nil {
		return nil, fmt.Errorf("ask for process %d: %w", pid, err)
	}
	p, err := c.spawn(ctx, nil, false)
	if err != nil {
		return nil, err
	}
	if p.PID != pid {
		return nil, errors.Join(fmt.Errorf("ask for process %d: it became %d", pid, p.PID), p.Kill(), p.Await(ctx), p.stdin.Close())
	}
	c.more = append(c.more, p)
	return p, p.Say("")
}
