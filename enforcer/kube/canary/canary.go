// SPDX-License-Identifier: Apache-2.0

// Package canary proves that a node fences containers, by starting one: through gpufence-runtime under
// the engine's name, with the annotations and the environment that Kubernetes' containers have, on
// every GPU of the node. It then looks for the limit where it has to be: in gpufenced, in its fences,
// and in the container.
//
// What it does not prove: that the engine calls gpufence-runtime. Package cri asks the engine.
//
// It promises: nothing is left of it, whatever failed; a GPU with no room left is no verdict.
package canary

import (
	"bytes"
	"context"
	"crypto/rand"
	"encoding/hex"
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
	"syscall"
	"time"

	"github.com/opencontainers/runtime-spec/specs-go"

	"github.com/gpufence/gpufence/enforcer/api"
	"github.com/gpufence/gpufence/enforcer/kube"
	"github.com/gpufence/gpufence/enforcer/quota"
)

// InsideCommand is the argument with which the program runs as the canary's only process.
const InsideCommand = "canary-inside"

// program is where it lies in the container.
const program = "/canary"

// mib is what limits are rounded to.
const mib = 1 << 20

// Options of [Run].
type Options struct {
	Client  *api.Client
	Runtime string // gpufence-runtime.cri
	Self    string // a static program that knows InsideCommand
	Dir     string // where its folder is made; a tmpfs
	Env     []string
	Cgroup  string // what its cgroup's name begins with
	Now     func() time.Time
}

// Run starts a canary and says what it found. The error is of what could not be tried at all.
func Run(ctx context.Context, o Options) (kube.Canary, error) {
	result := kube.Canary{Time: o.Now()}
	node, err := o.Client.Node(ctx)
	if err != nil {
		result.Why = "gpufenced does not answer: " + err.Error()
		return result, nil //nolint:nilerr // that is a verdict, not a failure to find one
	}
	result.Version, result.Started = node.Version.Version, node.Started
	gpus, err := o.Client.GPUs(ctx)
	if err != nil {
		return result, fmt.Errorf("list the GPUs: %w", err)
	}
	if len(gpus) == 0 {
		result.Why = "gpufenced knows of no GPU"
		return result, nil
	}
	c, err := newCanary(o, gpus)
	if err != nil {
		return result, err
	}
	err = c.play(ctx)
	if clean := c.remove(); err == nil {
		err = clean
	}
	result.Steps, result.Level = c.steps, c.level
	switch {
	case err == nil:
		result.Held = true
	case errors.Is(err, quota.CodeUnavailable) || strings.Contains(err.Error(), string(quota.CodeUnavailable)+" "):
		result.Undecided, result.Why = true, "there is no room for it: "+err.Error()
	default:
		result.Why = err.Error()
	}
	return result, nil
}

// canary is one.
type canary struct {
	o     Options
	dir   string
	id    string
	pod   string
	gpus  []api.GPUState
	max   uint64
	pid   int
	made  bool // something to remove
	steps []string
	level quota.Level
	stdin *os.File
	out   *os.File
}

func newCanary(o Options, gpus []api.GPUState) (*canary, error) {
	name := make([]byte, 16)
	if _, err := rand.Read(name); err != nil {
		return nil, fmt.Errorf("name the canary: %w", err)
	}
	dir, err := os.MkdirTemp(o.Dir, "gpufence-canary-")
	if err != nil {
		return nil, fmt.Errorf("make the canary's folder: %w", err)
	}
	c := &canary{o: o, dir: dir, id: hex.EncodeToString(name), pod: hex.EncodeToString(name[8:]), gpus: gpus}
	for _, g := range gpus {
		// Two contexts: more than the least that may be asked for.
		c.max = max(c.max, (2*g.ContextBytes+mib-1)/mib*mib, 64*mib)
	}
	return c, nil
}

// play goes through the steps; the first that fails is the verdict.
func (c *canary) play(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	for _, s := range []struct {
		name string
		do   func(context.Context) error
	}{
		{"a limit without a unit is refused", c.refuses},
		{"gpufence-runtime and the hook let it be created", c.create},
		{"gpufenced holds it to its limit", c.registered},
		{"a fence that enforces is proven", c.fenced},
		{"it starts, and finds its limit inside", c.inside},
		{"its end is seen", c.ends},
	} {
		if err := s.do(ctx); err != nil {
			return fmt.Errorf("%s: it does not: %w", s.name, err)
		}
		c.steps = append(c.steps, s.name)
	}
	return nil
}

func (c *canary) annotations(value string) map[string]string {
	return map[string]string{
		"io.kubernetes.cri.container-type":    "container",
		"io.kubernetes.cri.sandbox-id":        c.pod,
		"io.kubernetes.cri.sandbox-namespace": kube.CanaryNamespace,
		"io.kubernetes.cri.sandbox-name":      "canary-" + c.id[:8],
		"io.kubernetes.cri.sandbox-uid":       c.pod,
		"io.kubernetes.cri.container-name":    "canary",
		quota.Domain + quota.KeyMemoryMax:     value,
	}
}

// cgroup is the parent of its own: of no other canary, so that nobody needs it once this one has gone. It is not called
// after the pod, which would be promised memory until gpufenced has seen it go.
func (c *canary) cgroup() string { return c.o.Cgroup + "-" + c.id[:16] }

// bundle writes what the runtime starts.
func (c *canary) bundle(name, limit string) (string, error) {
	dir := filepath.Join(c.dir, name)
	for _, d := range []string{"rootfs/proc", "rootfs/dev", "rootfs/etc", "rootfs/sys"} {
		if err := os.MkdirAll(filepath.Join(dir, d), 0o755); err != nil {
			return "", fmt.Errorf("make the bundle: %w", err)
		}
	}
	if err := os.WriteFile(filepath.Join(dir, "rootfs", program), nil, 0o755); err != nil {
		return "", fmt.Errorf("make the bundle: %w", err)
	}
	var uuids []string
	for _, g := range c.gpus {
		uuids = append(uuids, g.UUID)
	}
	spec := specs.Spec{
		Version: "1.0.2",
		Process: &specs.Process{
			Args: []string{program, InsideCommand}, Cwd: "/", NoNewPrivileges: true,
			Env:          []string{"PATH=/", "NVIDIA_VISIBLE_DEVICES=" + strings.Join(uuids, ",")},
			Capabilities: &specs.LinuxCapabilities{},
		},
		Root: &specs.Root{Path: "rootfs", Readonly: true}, Hostname: "gpufence-canary", Annotations: c.annotations(limit),
		Mounts: []specs.Mount{
			{Destination: "/proc", Type: "proc", Source: "proc", Options: []string{"nosuid", "noexec", "nodev"}},
			{Destination: "/dev", Type: "tmpfs", Source: "tmpfs", Options: []string{"nosuid", "strictatime", "mode=755", "size=64k"}},
			{Destination: program, Type: "bind", Source: c.o.Self, Options: []string{"bind", "ro", "nosuid", "nodev"}},
		},
		Linux: &specs.Linux{
			CgroupsPath: filepath.Join("/", c.cgroup(), "canary"),
			Resources:   &specs.LinuxResources{Devices: []specs.LinuxDeviceCgroup{{Allow: false, Access: "rwm"}}},
			Namespaces: []specs.LinuxNamespace{
				{Type: specs.PIDNamespace}, {Type: specs.MountNamespace}, {Type: specs.IPCNamespace}, {Type: specs.UTSNamespace}, {Type: specs.NetworkNamespace},
			},
		},
	}
	text, err := json.Marshal(spec)
	if err == nil {
		err = os.WriteFile(filepath.Join(dir, "config.json"), text, 0o600)
	}
	if err != nil {
		return "", fmt.Errorf("make the bundle: %w", err)
	}
	return dir, nil
}

// runtime runs gpufence-runtime; its error is what an engine would show.
func (c *canary) runtime(ctx context.Context, stdin, stdout *os.File, args ...string) error {
	log := filepath.Join(c.dir, "log.json")
	if err := os.WriteFile(log, nil, 0o600); err != nil {
		return fmt.Errorf("make the log: %w", err)
	}
	// A file, not a pipe: the container inherits it, and nobody must wait for its end.
	said, err := os.OpenFile(filepath.Join(c.dir, "said"), os.O_CREATE|os.O_RDWR|os.O_TRUNC, 0o600)
	if err != nil {
		return fmt.Errorf("make the log: %w", err)
	}
	defer said.Close()
	cmd := exec.CommandContext(ctx, c.o.Runtime, append([]string{"--root", filepath.Join(c.dir, "state"), "--log", log, "--log-format", "json"}, args...)...)
	cmd.Env = append(os.Environ(), c.o.Env...)
	cmd.Stdout, cmd.Stderr = said, said
	if stdin != nil {
		cmd.Stdin, cmd.Stdout = stdin, stdout
	}
	err = cmd.Run()
	if err == nil {
		return nil
	}
	if message := lastError(log); message != "" {
		return errors.New(message)
	}
	text, readErr := io.ReadAll(io.NewSectionReader(said, 0, 4096))
	if readErr != nil || len(bytes.TrimSpace(text)) == 0 {
		return fmt.Errorf("%s: %w", filepath.Base(c.o.Runtime), err)
	}
	return errors.New(string(bytes.TrimSpace(text)))
}

// lastError is the last error in the runtime's log.
func lastError(path string) string {
	text, err := os.ReadFile(path)
	if err != nil {
		return "" // it failed before it had one
	}
	last := ""
	for line := range bytes.Lines(text) {
		var entry struct{ Level, Msg string }
		if json.Unmarshal(line, &entry) == nil && entry.Level == "error" {
			last = strings.TrimSpace(entry.Msg)
		}
	}
	return last
}

func (c *canary) refuses(ctx context.Context) error {
	dir, err := c.bundle("wrong", "4096")
	if err != nil {
		return err
	}
	id := c.id + "-wrong"
	err = c.runtime(ctx, nil, nil, "create", "--bundle", dir, "--pid-file", filepath.Join(dir, "pid"), id)
	if err == nil {
		return errors.Join(errors.New("it was created"), c.runtime(context.WithoutCancel(ctx), nil, nil, "delete", "--force", id))
	}
	if !strings.Contains(err.Error(), string(quota.CodeNoUnit)) {
		return err
	}
	return nil
}

func (c *canary) create(ctx context.Context) error {
	dir, err := c.bundle("canary", quota.FormatBytes(c.max))
	if err != nil {
		return err
	}
	inRead, inWrite, err := os.Pipe()
	if err != nil {
		return fmt.Errorf("make pipes: %w", err)
	}
	c.stdin = inWrite
	defer inRead.Close()
	outRead, outWrite, err := os.Pipe()
	if err != nil {
		return fmt.Errorf("make pipes: %w", err)
	}
	c.out = outRead
	defer outWrite.Close()
	c.made = true
	file := filepath.Join(dir, "pid")
	if err := c.runtime(ctx, inRead, outWrite, "create", "--bundle", dir, "--pid-file", file, c.id); err != nil {
		return err
	}
	text, err := os.ReadFile(file)
	if err == nil {
		c.pid, err = strconv.Atoi(strings.TrimSpace(string(text)))
	}
	if err != nil {
		return fmt.Errorf("read the pid file: %w", err)
	}
	return nil
}

func (c *canary) registered(ctx context.Context) error {
	got, err := c.o.Client.Container(ctx, c.id)
	if err != nil {
		return err
	}
	switch {
	case got.State != "running" || got.PID != c.pid:
		return fmt.Errorf("gpufenced has it as %s with process %d, and its process is %d", got.State, got.PID, c.pid)
	case got.Mode != quota.ModeEnforce:
		return fmt.Errorf("the mode is %s, which enforces nothing", got.Mode)
	case len(got.GPUs) != len(c.gpus):
		return fmt.Errorf("gpufenced has it on %d of %d GPUs", len(got.GPUs), len(c.gpus))
	}
	for _, g := range got.GPUs {
		if g.Limits.Max != c.max {
			return fmt.Errorf("memory.max on %s is %s, and %s was asked for", g.UUID, quota.FormatBytes(g.Limits.Max), quota.FormatBytes(c.max))
		}
	}
	c.level = got.Level
	if !got.Level.AtLeast(got.Require) {
		return fmt.Errorf("its level is %s, and %s is required", got.Level, got.Require)
	}
	return nil
}

func (c *canary) fenced(ctx context.Context) error {
	got, err := c.o.Client.Container(ctx, c.id)
	if err != nil {
		return err
	}
	var states []string
	for _, f := range got.Fences {
		if f.Name != "shim" && f.State == "proven" { // the shim is courtesy
			return nil
		}
		states = append(states, f.Name+" is "+strings.TrimSpace(f.State+" "+f.Why))
	}
	return errors.New(strings.Join(states, ", "))
}

// Found is what the process inside reports.
type Found struct {
	Max   map[string]uint64 `json:"max"` // by GPU
	Error string            `json:"error,omitempty"`
}

func (c *canary) inside(ctx context.Context) error {
	if err := c.runtime(ctx, nil, nil, "start", c.id); err != nil {
		return err
	}
	deadline, _ := ctx.Deadline()
	if err := c.out.SetReadDeadline(deadline); err != nil {
		return fmt.Errorf("wait for it: %w", err)
	}
	var found Found
	if err := json.NewDecoder(io.LimitReader(c.out, 64<<10)).Decode(&found); err != nil {
		return fmt.Errorf("it says nothing: %w", err)
	}
	if found.Error != "" {
		return errors.New(found.Error)
	}
	for _, g := range c.gpus {
		if found.Max[g.UUID] != c.max {
			return fmt.Errorf("inside, memory.max on %s is %s, and %s was asked for", g.UUID, quota.FormatBytes(found.Max[g.UUID]), quota.FormatBytes(c.max))
		}
	}
	return nil
}

func (c *canary) ends(ctx context.Context) error {
	if err := c.remove(); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	for {
		got, err := c.o.Client.Container(ctx, c.id)
		if errors.Is(err, quota.CodeNoSuchContainer) || err == nil && got.State == "ended" {
			return nil
		}
		if err == nil {
			err = fmt.Errorf("gpufenced still has it as %s", got.State)
		}
		select {
		case <-ctx.Done():
			return err
		case <-time.After(20 * time.Millisecond):
		}
	}
}

// remove takes away whatever there is; it may be called again.
func (c *canary) remove() error {
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	var errs []error
	for _, f := range []*os.File{c.stdin, c.out} {
		if f != nil {
			f.Close()
		}
	}
	c.stdin, c.out = nil, nil
	if c.made {
		if err := c.runtime(ctx, nil, nil, "delete", "--force", c.id); err != nil && !strings.Contains(err.Error(), "does not exist") {
			errs = append(errs, fmt.Errorf("delete the canary: %w", err))
		}
		// Its end unregisters it, but for one that was never registered: its pages would stay a while.
		if got, err := c.o.Client.Container(ctx, c.id); err == nil && got.State == "prepared" {
			errs = append(errs, c.o.Client.Unregister(ctx, api.UnregisterRequest{Key: got.Key}))
		}
		c.made = false
	}
	// The runtime removes the container's, and leaves its parent.
	if err := removeCgroups(ctx, cgroupRoot, c.cgroup()); err != nil {
		errs = append(errs, fmt.Errorf("remove the canary's cgroup: %w", err))
	}
	if err := os.RemoveAll(c.dir); err != nil {
		errs = append(errs, fmt.Errorf("remove the canary's folder: %w", err))
	}
	return errors.Join(errs...)
}

const cgroupRoot = "/sys/fs/cgroup"

// removeCgroups removes the empty cgroups of a name at the root of every hierarchy; of v1 there are several.
func removeCgroups(ctx context.Context, root, name string) error {
	hierarchies, err := filepath.Glob(filepath.Join(root, "*", name))
	if err != nil {
		return fmt.Errorf("list hierarchies: %w", err)
	}
	var errs []error
	for _, dir := range append(hierarchies, filepath.Join(root, name)) {
		err := os.Remove(dir)
		// Whoever has just ended may still be leaving.
		for errors.Is(err, syscall.EBUSY) && ctx.Err() == nil {
			time.Sleep(10 * time.Millisecond)
			err = os.Remove(dir)
		}
		// A hierarchy may have two names, and one of v2 is its own root.
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}

// Inside is the canary's process: it reports what it finds, and ends when nobody listens any more.
func Inside(in io.Reader, out io.Writer) error {
	found := Found{Max: map[string]uint64{}}
	var tried []string
	for _, dir := range []string{"/dev/gpufence", "/run/gpufence-shim"} {
		text, err := os.ReadFile(filepath.Join(dir, quota.KeyMemoryMax))
		if err != nil {
			tried = append(tried, err.Error())
			continue
		}
		tried = nil
		for line := range strings.Lines(string(text)) {
			fields := strings.Fields(line)
			if len(fields) < 2 {
				continue
			}
			i := slices.IndexFunc(fields, func(f string) bool { return strings.HasPrefix(f, "GPU-") || strings.HasPrefix(f, "MIG-") })
			n, err := strconv.ParseUint(fields[len(fields)-1], 10, 64)
			if i >= 0 && err == nil {
				found.Max[fields[i]] = n
			}
		}
		break
	}
	if tried != nil {
		found.Error = "the limit is not in the container: " + strings.Join(tried, "; ")
	}
	if err := json.NewEncoder(out).Encode(found); err != nil {
		return fmt.Errorf("report: %w", err)
	}
	if _, err := io.Copy(io.Discard, in); err != nil {
		return fmt.Errorf("wait for the end: %w", err)
	}
	return nil
}
