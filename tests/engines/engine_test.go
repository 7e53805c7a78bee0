// SPDX-License-Identifier: Apache-2.0

package engines

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/gpufence/gpufence/enforcer/quota"
	"github.com/gpufence/gpufence/tests/mounts"
	"github.com/gpufence/gpufence/tests/process"
)

// request is a container that is to be started; limit is the value of memory.max, "" for none.
type request struct {
	name, limit string
	command     []string
}

// begun is one that was asked for.
type begun interface {
	// output is what it has said until now.
	output(ctx context.Context) string
	// ended says whether it is over, and its exit status. What the engine says of a start that
	// failed is an error.
	ended(ctx context.Context) (done bool, status int, err error)
}

// engine is one under test.
type engine interface {
	up(ctx context.Context, t *testing.T, s *site)
	start(ctx context.Context, r request) (begun, error)
	exec(ctx context.Context, name string, command ...string) (string, error)
	remove(ctx context.Context, name string) error
	down(t *testing.T)
	// is how gpufenced knows the engine.
	is() quota.Engine
}

// foreground is a command line that stays with its container.
type foreground struct{ *process.Process }

func (f foreground) output(context.Context) string { return f.Said() }

func (f foreground) ended(context.Context) (bool, int, error) {
	if f.Running() {
		return false, 0, nil
	}
	code := f.State().ExitCode()
	if code != 0 && code != 137 {
		return true, code, errors.New(f.Tail(10))
	}
	return true, code, nil
}

// gpufenceEnv has gpufence-runtime find the test's gpufenced.
func gpufenceEnv(s *site) string { return "GPUFENCE_CONFIG=" + s.ConfigPath() }

func unique(name string) string { return fmt.Sprintf("gpufence-engines-%d-%s", os.Getpid(), name) }

// containerd is one, of either major version, asked by ctr or by crictl.
type containerd struct {
	set string // of tests/programs
	cri bool
	// edit changes the configuration; nil leaves it as an administrator would have it. What it is for is in the folder's name.
	edit func(string) string
	use  string

	s      *site
	dir    string // on the disk
	daemon *process.Process
	pods   pods
}

func (c *containerd) is() quota.Engine {
	if c.cri {
		return quota.EngineCRI
	}
	return quota.EngineOCI
}

func (c *containerd) bin(name string) string { return c.s.bins[c.set+"/"+name] }
func (c *containerd) name() string           { return c.set + c.use }
func (c *containerd) sock() string           { return c.s.Path(c.name() + ".sock") }

// The two generations' files, as an administrator would have them.
var containerdConfig = map[string]string{
	"containerd1": `version = 2
root = "@DIR@/root"
state = "@STATE@"
imports = ["@DIR@/conf.d/*.toml"]
disabled_plugins = ["io.containerd.snapshotter.v1.btrfs", "io.containerd.snapshotter.v1.zfs", "io.containerd.snapshotter.v1.devmapper"]
[grpc]
  address = "@SOCK@"
[ttrpc]
  address = "@SOCK@.ttrpc"
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "@PAUSE@"
  restrict_oom_score_adj = true
  enable_unprivileged_ports = false
  enable_unprivileged_icmp = false
  [plugins."io.containerd.grpc.v1.cri".cni]
    conf_dir = "@DIR@/cni"
  [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
    runtime_type = "io.containerd.runc.v2"
`,
	"containerd": `version = 3
root = "@DIR@/root"
state = "@STATE@"
imports = ["@DIR@/conf.d/*.toml"]
disabled_plugins = ["io.containerd.snapshotter.v1.btrfs", "io.containerd.snapshotter.v1.zfs", "io.containerd.snapshotter.v1.devmapper", "io.containerd.snapshotter.v1.erofs", "io.containerd.nri.v1.nri"]
[grpc]
  address = "@SOCK@"
[ttrpc]
  address = "@SOCK@.ttrpc"
[plugins."io.containerd.cri.v1.images".pinned_images]
  sandbox = "@PAUSE@"
[plugins."io.containerd.cri.v1.runtime"]
  restrict_oom_score_adj = true
  enable_unprivileged_ports = false
  enable_unprivileged_icmp = false
  [plugins."io.containerd.cri.v1.runtime".cni]
    conf_dir = "@DIR@/cni"
  [plugins."io.containerd.cri.v1.runtime".containerd.runtimes.runc]
    runtime_type = "io.containerd.runc.v2"
`,
}

func (c *containerd) up(ctx context.Context, t *testing.T, s *site) {
	c.configure(t, s)
	c.install(ctx, t)
	must(t, c.run(ctx))
	must(t, c.load(ctx))
}

func (c *containerd) configure(t *testing.T, s *site) {
	t.Helper()
	c.s, c.dir = s, filepath.Join(s.disk, c.name())
	c.pods = pods{s: s, dir: c.dir, endpoint: "unix://" + c.sock(), ids: map[string][2]string{}}
	must(t, errors.Join(os.MkdirAll(filepath.Join(c.dir, "conf.d"), 0o755), os.MkdirAll(filepath.Join(c.dir, "cni"), 0o755)))
	text := strings.NewReplacer("@DIR@", c.dir, "@STATE@", s.Path(c.name()), "@SOCK@", c.sock(), "@PAUSE@", pauseImage).Replace(containerdConfig[c.set])
	if c.edit != nil {
		text = c.edit(text)
	}
	must(t, os.WriteFile(c.config(), []byte(text), 0o600))
}

func (c *containerd) config() string { return filepath.Join(c.dir, "config.toml") }

func (c *containerd) install(ctx context.Context, t *testing.T) {
	t.Helper()
	_, err := c.s.gpufence(ctx, "install", "--runtime", "containerd", "--config", c.config(), "--executable-path", c.bin("containerd"), "--validate", "always")
	must(t, err)
}

// run starts it with the configuration as it is.
func (c *containerd) run(ctx context.Context) (err error) {
	c.daemon, err = start(ctx, c.set, filepath.Join(c.dir, "log"), []string{gpufenceEnv(c.s), "PATH=" + filepath.Dir(c.bin("containerd")) + ":" + os.Getenv("PATH")},
		c.bin("containerd"), "-c", c.config())
	if err != nil {
		return err
	}
	return c.daemon.Ready(ctx, func(ctx context.Context) error { _, err := c.pods.crictl(ctx, "info", "-q"); return err })
}

// load gives it the images.
func (c *containerd) load(ctx context.Context) error {
	for _, ns := range []string{"k8s.io", "default"} {
		for _, image := range c.s.images {
			if _, err := c.s.run(ctx, c.bin("ctr"), "-a", c.sock(), "-n", ns, "images", "import", image); err != nil {
				return err
			}
		}
	}
	return nil
}

func (c *containerd) ctr(ctx context.Context, args ...string) (string, error) {
	return c.s.run(ctx, c.bin("ctr"), append([]string{"-a", c.sock()}, args...)...)
}

func (c *containerd) start(ctx context.Context, r request) (begun, error) {
	if c.cri {
		return c.pods.start(ctx, r)
	}
	args := []string{"-a", c.sock(), "run", "--rm", "--runtime", "io.containerd.runc.v2", "--runc-binary", filepath.Join(c.s.dist, "bin/gpufence-runtime"), "--env", "NVIDIA_VISIBLE_DEVICES=0"}
	if r.limit != "" {
		args = append(args, "--annotation", "gpufence.dev/memory.max="+r.limit)
	}
	args = append(append(args, clientImage, unique(r.name)), r.command...)
	p, err := start(ctx, "ctr", filepath.Join(c.dir, r.name+".log"), nil, c.bin("ctr"), args...)
	return foreground{p}, err
}

func (c *containerd) exec(ctx context.Context, name string, command ...string) (string, error) {
	if c.cri {
		return c.pods.exec(ctx, name, command...)
	}
	return c.ctr(ctx, append([]string{"task", "exec", "--exec-id", unique("exec"), unique(name)}, command...)...)
}

func (c *containerd) remove(ctx context.Context, name string) error {
	if c.cri {
		return c.pods.remove(ctx, name)
	}
	_, err := c.ctr(ctx, "task", "kill", "-s", "SIGKILL", unique(name))
	if err != nil && !strings.Contains(err.Error(), "not found") && !strings.Contains(err.Error(), "process already finished") {
		return err
	}
	return until(ctx, name+" is gone", func() (bool, error) {
		out, err := c.ctr(ctx, "containers", "list", "-q")
		return !strings.Contains(out, unique(name)), err
	})
}

func (c *containerd) down(t *testing.T) {
	if c.daemon == nil {
		return
	}
	c.daemon.LogIfFailed(t)
	if err := c.daemon.Stop(context.Background()); err != nil {
		t.Error(err)
	}
	killLeft(t, c.sock())
	for _, dir := range []string{c.dir, c.s.Path(c.name())} {
		if left, err := mounts.Detach(dir); len(left) > 0 || err != nil {
			t.Errorf("left mounted: %q %v", left, err)
		}
	}
}

// podman is Debian's: with the runtime of `gpufence install`, or with its own runc and the hook.
type podman struct {
	hook bool

	s    *site
	dir  string
	path string
}

func (p *podman) is() quota.Engine { return quota.EnginePodman }

func (p *podman) up(ctx context.Context, t *testing.T, s *site) {
	p.s, p.dir = s, filepath.Join(s.disk, "podman")
	if p.hook {
		p.dir += "-hook"
	}
	var err error
	if p.path, err = exec.LookPath("podman"); err != nil {
		skip(t, "there is no podman: run make test-engines, which installs it")
	}
	must(t, os.MkdirAll(p.dir, 0o755))
	// conmon gives the runtime no environment, so that the test's configuration needs a program around it.
	wrapper := filepath.Join(p.dir, "gpufence-runtime.podman")
	text := fmt.Sprintf("#!/bin/sh\n%s exec %s/bin/gpufence-runtime.podman \"$@\"\n", gpufenceEnv(s), s.dist)
	must(t, os.WriteFile(wrapper, []byte(text), 0o755)) //nolint:gosec // a program
	must(t, os.Symlink(filepath.Join(s.dist, "bin/gpufence-hook"), filepath.Join(p.dir, "gpufence-hook")))
	args := []string{"install", "--runtime", "podman", "--config", filepath.Join(p.dir, "containers.conf"), "--runtime-path", wrapper}
	if p.hook {
		args = append(args, "--hooks")
	}
	_, err = s.gpufence(ctx, args...)
	must(t, err)
	if p.hook {
		must(t, p.tellHook())
	}
	_, err = p.podman(ctx, "load", "-i", s.images[0])
	must(t, err)
	_, err = p.podman(ctx, "load", "-i", s.images[1])
	must(t, err)
}

// tellHook has the hook find the test's gpufenced: Podman gives hooks no environment but what their file says.
func (p *podman) tellHook() error {
	file := filepath.Join(p.dir, "oci/hooks.d/99-zz-gpufence.json")
	text, err := os.ReadFile(file)
	if err != nil {
		return err
	}
	changed := strings.Replace(string(text), `"path":`, `"env": [`+strconv.Quote(gpufenceEnv(p.s))+`], "path":`, 1)
	if changed == string(text) {
		return fmt.Errorf("the hook's file is %s", text)
	}
	return os.WriteFile(file, []byte(changed), 0o600)
}

func (p *podman) global() []string {
	args := []string{
		"--root", filepath.Join(p.dir, "root"), "--runroot", p.s.Path(filepath.Base(p.dir)), "--tmpdir", p.s.Path(filepath.Base(p.dir) + "-tmp"), "--storage-driver", "overlay",
		"--cgroup-manager", "cgroupfs", "--events-backend", "none",
	}
	if p.hook {
		return append(args, "--hooks-dir", filepath.Join(p.dir, "oci/hooks.d"), "--runtime", "runc")
	}
	return append(args, "--runtime", handler)
}

func (p *podman) env() []string {
	return []string{"CONTAINERS_CONF=" + filepath.Join(p.dir, "containers.conf.d/99-zz-gpufence.conf"), gpufenceEnv(p.s)}
}

func (p *podman) podman(ctx context.Context, args ...string) (string, error) {
	return runEnv(ctx, p.env(), p.path, append(p.global(), args...)...)
}

func (p *podman) start(ctx context.Context, r request) (begun, error) {
	// Without CAP_SYS_RESOURCE Podman's own limits cannot be set.
	args := append(p.global(), "run", "--rm", "--network", "none", "--ulimit", "nofile=1024:1024", "--ulimit", "nproc=1024:1024", "--name", unique(r.name), "--env", "NVIDIA_VISIBLE_DEVICES=0")
	if r.limit != "" {
		args = append(args, "--annotation", "gpufence.dev/memory.max="+r.limit)
	}
	args = append(append(args, clientImage), r.command...)
	proc, err := start(ctx, "podman", filepath.Join(p.dir, r.name+".log"), p.env(), p.path, args...)
	return foreground{proc}, err
}

func (p *podman) exec(ctx context.Context, name string, command ...string) (string, error) {
	return p.podman(ctx, append([]string{"exec", unique(name)}, command...)...)
}

func (p *podman) remove(ctx context.Context, name string) error {
	_, err := p.podman(ctx, "rm", "-f", "-i", "-t", "0", unique(name))
	return err
}

func (p *podman) down(t *testing.T) {
	if p.s == nil {
		return
	}
	// conmon calls Podman once more after a container's end, which mounts the storage again.
	deadline := time.Now().Add(20 * time.Second)
	left, err := process.Naming(p.dir)
	for ; err == nil && len(left) > 0 && time.Now().Before(deadline); left, err = process.Naming(p.dir) {
		time.Sleep(50 * time.Millisecond)
	}
	if err != nil || len(left) > 0 {
		t.Errorf("left running: %q %v", left, err)
	}
	for _, dir := range []string{p.dir, p.s.Path(filepath.Base(p.dir))} {
		mounted, err := mounts.Detach(dir)
		if err != nil {
			t.Error(err)
		}
		for _, m := range mounted {
			// Podman keeps the mount of its storage for the next call.
			if filepath.Base(m) != "overlay" && !strings.HasSuffix(m, "/netns") {
				t.Errorf("left mounted: %s", m)
			}
		}
	}
}

// docker is Debian's 20.10, which has no --annotation: the limit comes by a variable.
type docker struct {
	s      *site
	dir    string
	client string
	daemon *process.Process
	key    bool // there was one
}

// dockerKey is made by Docker up to 22, wherever its other files are.
const dockerKey = "/etc/docker/key.json"

func (d *docker) is() quota.Engine { return quota.EngineDocker }

func (d *docker) up(ctx context.Context, t *testing.T, s *site) {
	d.s, d.dir = s, filepath.Join(s.disk, "docker")
	daemon, err := exec.LookPath("dockerd")
	if err != nil {
		skip(t, "there is no dockerd: run make test-engines, which installs it")
	}
	// Debian's client: one of another origin may be before it in PATH.
	d.client = "/usr/bin/docker"
	if _, err := os.Stat(d.client); err != nil {
		skip(t, "there is no %s: run make test-engines, which installs it", d.client)
	}
	_, err = os.Stat(dockerKey)
	d.key = err == nil
	must(t, os.MkdirAll(d.dir, 0o755))
	config := filepath.Join(d.dir, "daemon.json")
	must(t, os.WriteFile(config, []byte("{\n  \"debug\": false\n}\n"), 0o600))
	_, err = s.gpufence(ctx, "install", "--runtime", "docker", "--config", config, "--executable-path", daemon)
	must(t, err)
	d.daemon, err = start(ctx, "dockerd", filepath.Join(d.dir, "log"), []string{gpufenceEnv(s)}, daemon, "--config-file", config, "--data-root", d.data(),
		"--exec-root", s.Path("docker"), "--pidfile", filepath.Join(d.dir, "pid"), "-H", d.sock(), "--iptables=false", "--ip6tables=false", "--bridge=none", "--storage-driver", "overlay2")
	must(t, err)
	must(t, d.daemon.Ready(ctx, func(ctx context.Context) error { _, err := d.docker(ctx, "info"); return err }))
	_, err = d.docker(ctx, "load", "-i", s.images[0])
	must(t, err)
	_, err = d.docker(ctx, "load", "-i", s.images[1])
	must(t, err)
}

func (d *docker) data() string { return filepath.Join(d.dir, "data") }

func (d *docker) sock() string { return "unix://" + d.s.Path("docker.sock") }

func (d *docker) docker(ctx context.Context, args ...string) (string, error) {
	return d.s.run(ctx, d.client, append([]string{"-H", d.sock()}, args...)...)
}

func (d *docker) start(ctx context.Context, r request) (begun, error) {
	args := []string{"-H", d.sock(), "run", "--rm", "--network", "none", "--runtime", handler, "--name", unique(r.name), "--env", "NVIDIA_VISIBLE_DEVICES=0"}
	if r.limit != "" {
		args = append(args, "--env", "GPUFENCE_MEMORY_MAX="+r.limit)
	}
	p, err := start(ctx, "docker", filepath.Join(d.dir, r.name+".log"), nil, d.client, append(append(args, clientImage), r.command...)...)
	return foreground{p}, err
}

func (d *docker) exec(ctx context.Context, name string, command ...string) (string, error) {
	return d.docker(ctx, append([]string{"exec", unique(name)}, command...)...)
}

func (d *docker) remove(ctx context.Context, name string) error {
	_, err := d.docker(ctx, "rm", "-f", unique(name))
	if err != nil && (strings.Contains(err.Error(), "No such container") || strings.Contains(err.Error(), "is already in progress")) {
		err = nil
	}
	return err
}

func (d *docker) down(t *testing.T) {
	if d.daemon == nil {
		return
	}
	d.daemon.LogIfFailed(t)
	if err := d.daemon.Stop(context.Background()); err != nil {
		t.Error(err)
	}
	if !d.key {
		if err := os.Remove(dockerKey); err != nil && !errors.Is(err, os.ErrNotExist) {
			t.Error(err)
		}
	}
	time.Sleep(100 * time.Millisecond) // its containerd follows
	killLeft(t, d.s.Path("docker"))
	for _, dir := range []string{d.dir, d.s.Path("docker")} {
		mounted, err := mounts.Detach(dir)
		if err != nil {
			t.Error(err)
		}
		for _, m := range mounted {
			// dockerd keeps the network namespace of --network none, and makes its data root a mount of
			// its own where that does not lie on a shared one.
			if filepath.Base(m) != "default" && m != d.data() {
				t.Errorf("left mounted: %s", m)
			}
		}
	}
}

// bare is no engine at all: gpufence run.
type bare struct {
	s       *site
	dir     string
	run     map[string]foreground
	preload bool // the machine had an /etc/ld.so.preload
}

func (b *bare) is() quota.Engine { return quota.EngineOCI }

func (b *bare) up(_ context.Context, t *testing.T, s *site) {
	b.s, b.dir, b.run = s, filepath.Join(s.disk, "run"), map[string]foreground{}
	must(t, os.MkdirAll(b.dir, 0o755))
	_, err := os.Lstat(preloadFile)
	b.preload = err == nil
}

const preloadFile = "/etc/ld.so.preload"

// command is one of the test clients as it is on this machine, with the simulated driver.
func (b *bare) command(words []string) []string {
	return append([]string{filepath.Join(b.s.dist, "clients", filepath.Base(words[0]))}, words[1:]...)
}

func (b *bare) start(ctx context.Context, r request) (begun, error) {
	args := []string{"run", "--name", unique(r.name), "--config", b.s.ConfigPath()}
	if r.limit != "" {
		args = append(args, "--memory.max", r.limit)
	}
	args = append(append(args, "--"), b.command(r.command)...)
	p, err := start(ctx, "gpufence run", filepath.Join(b.dir, r.name+".log"), b.s.SimEnv(), filepath.Join(b.s.dist, "bin/gpufence"), args...)
	b.run[r.name] = foreground{p}
	return foreground{p}, err
}

// exec: what runs beside the command there is its own children.
func (b *bare) exec(context.Context, string, ...string) (string, error) { return "", errNoExec }

var errNoExec = errors.New("gpufence run has no exec")

func (b *bare) remove(ctx context.Context, name string) error {
	f, ok := b.run[name]
	if !ok {
		return nil
	}
	delete(b.run, name)
	// It passes the signal on.
	return f.Stop(ctx)
}

func (b *bare) down(t *testing.T) {
	if !b.preload && b.s != nil {
		removePreload(t)
	}
}

// removePreload removes the file that `gpufence run` makes where there is none, if it is still empty.
func removePreload(t *testing.T) {
	t.Helper()
	info, err := os.Lstat(preloadFile)
	if errors.Is(err, os.ErrNotExist) {
		return
	}
	if err != nil || info.Size() != 0 {
		t.Errorf("%s: %v, want an empty file", preloadFile, err)
		return
	}
	must(t, os.Remove(preloadFile))
}
