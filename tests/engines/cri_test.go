// SPDX-License-Identifier: Apache-2.0

package engines

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"github.com/gpufence/gpufence/enforcer/quota"
	"github.com/gpufence/gpufence/tests/mounts"
	"github.com/gpufence/gpufence/tests/process"
)

// pods are what a CRI is asked for by crictl, one container in each.
type pods struct {
	s        *site
	dir      string // on the disk
	endpoint string
	handler  string               // of the pods that start makes: "" is ours
	ids      map[string][2]string // by name: pod and container
}

func (c *pods) crictl(ctx context.Context, args ...string) (string, error) {
	return c.s.run(ctx, c.s.bins["crictl/crictl"], append([]string{"-r", c.endpoint, "-i", c.endpoint, "--timeout", "60s"}, args...)...)
}

func (c *pods) exec(ctx context.Context, name string, command ...string) (string, error) {
	return c.crictl(ctx, append([]string{"exec", c.ids[name][1]}, command...)...)
}

func (c *pods) remove(ctx context.Context, name string) error {
	if c.ids[name][0] == "" {
		return nil
	}
	_, err := c.crictl(ctx, "rmp", "-f", c.ids[name][0])
	delete(c.ids, name)
	return err
}

// sandbox is what a pod has beside a request.
type sandbox struct {
	handler string // "" is ours
	// gpu is the variable that a device plugin sets: by default the GPU's UUID.
	gpu     string
	cdi     string // device that the kubelet asks the engine for
	without bool   // no variable
}

// start makes a pod with one container by the CRI, as a kubelet does.
func (c *pods) start(ctx context.Context, r request) (begun, error) {
	k, err := c.startPod(ctx, r, sandbox{handler: c.handler})
	if err != nil {
		return nil, err
	}
	return k, nil
}

func (c *pods) startPod(ctx context.Context, r request, s sandbox) (criContainer, error) {
	logs := filepath.Join(c.dir, "logs-"+r.name)
	message := filepath.Join(c.dir, r.name+".termination")
	if err := errors.Join(os.MkdirAll(logs, 0o755), os.WriteFile(message, nil, 0o666)); err != nil {
		return criContainer{}, err
	}
	type object = map[string]any
	linux := object{"security_context": object{"namespace_options": object{"network": 2, "pid": 1}}}
	podSpec := object{
		"metadata": object{"name": r.name, "namespace": "default", "uid": unique(r.name), "attempt": 0}, "log_directory": logs, "linux": linux,
	}
	if r.limit != "" {
		podSpec["annotations"] = object{"gpufence.dev/memory.max": r.limit}
	}
	containerSpec := object{
		"metadata": object{"name": "main"}, "image": object{"image": clientImage}, "command": r.command, "log_path": "main.log", "linux": linux,
		"mounts": []object{{"container_path": "/dev/termination-log", "host_path": message}},
	}
	if !s.without {
		containerSpec["envs"] = []object{{"key": "NVIDIA_VISIBLE_DEVICES", "value": cmp.Or(s.gpu, c.s.uuid)}}
	}
	if s.cdi != "" {
		containerSpec["CDI_devices"] = []object{{"name": s.cdi}}
	}
	pod, container := filepath.Join(c.dir, r.name+"-pod.json"), filepath.Join(c.dir, r.name+".json")
	for file, spec := range map[string]object{pod: podSpec, container: containerSpec} {
		text, err := json.Marshal(spec)
		if err == nil {
			err = os.WriteFile(file, text, 0o600)
		}
		if err != nil {
			return criContainer{}, err
		}
	}
	podID, err := c.crictl(ctx, "runp", "--runtime", cmp.Or(s.handler, handler), pod)
	if err != nil {
		return criContainer{}, err
	}
	podID = strings.TrimSpace(podID)
	c.ids[r.name] = [2]string{podID, ""}
	id, err := c.crictl(ctx, "create", podID, container, pod)
	if err != nil {
		return criContainer{}, err
	}
	id = strings.TrimSpace(id)
	c.ids[r.name] = [2]string{podID, id}
	if _, err := c.crictl(ctx, "start", id); err != nil {
		return criContainer{}, err
	}
	return criContainer{c, id, filepath.Join(logs, "main.log"), message}, nil
}

type criContainer struct {
	c                *pods
	id, log, message string
}

func (k criContainer) output(context.Context) string {
	text, err := os.ReadFile(k.log)
	if err != nil {
		return err.Error()
	}
	return string(text)
}

func (k criContainer) ended(ctx context.Context) (bool, int, error) {
	out, err := k.c.crictl(ctx, "inspect", "-o", "go-template", "--template", "{{.status.state}} {{.status.exitCode}}", k.id)
	if err != nil {
		return false, 0, err
	}
	state, code, _ := strings.Cut(strings.TrimSpace(out), " ")
	n, err := strconv.Atoi(code)
	return state == "CONTAINER_EXITED", n, err
}

// crio is CRI-O, with conmon and runc below it.
type crio struct {
	s      *site
	dir    string
	daemon *process.Process
	pods   pods
}

func (c *crio) is() quota.Engine { return quota.EngineCRIO }

const crioConfig = `[crio]
  root = "@DIR@/root"
  runroot = "@MEM@/runroot"
  storage_driver = "overlay"
  log_dir = "@DIR@/logs"
  version_file = "@MEM@/version"
  version_file_persist = ""
  clean_shutdown_file = "@DIR@/clean.shutdown"
[crio.api]
  listen = "@MEM@/crio.sock"
[crio.runtime]
  default_runtime = "runc"
  cgroup_manager = "cgroupfs"
  conmon_cgroup = "pod"
  pinns_path = "@BIN@/pinns"
  namespaces_dir = "@MEM@/ns"
  container_exits_dir = "@MEM@/exits"
  container_attach_socket_dir = "@MEM@/attach"
  hooks_dir = []
  cdi_spec_dirs = ["@CDI@"]
  [crio.runtime.runtimes.runc]
    runtime_path = "@RUNC@"
    runtime_root = "@MEM@/runc"
    monitor_path = "@CONMON@"
    monitor_cgroup = "pod"
    monitor_env = ["PATH=/usr/sbin:/usr/bin:/sbin:/bin", "@ENV@"]
[crio.image]
  pause_image = "@PAUSE@"
  pause_command = "/pause"
  signature_policy = "@DIR@/policy.json"
[crio.network]
  network_dir = "@DIR@/cni"
  plugin_dirs = ["@DIR@/cni-bin"]
[crio.nri]
  enable_nri = false
`

func (c *crio) up(ctx context.Context, t *testing.T, s *site) {
	program := s.crio(ctx, t)
	c.s, c.dir = s, filepath.Join(s.disk, "crio")
	mem := s.Path("crio")
	c.pods = pods{s: s, dir: c.dir, endpoint: "unix://" + mem + "/crio.sock", ids: map[string][2]string{}}
	places := map[string]string{}
	for _, name := range []string{"runc", "conmon"} {
		path, err := exec.LookPath(name)
		if err != nil {
			skip(t, "there is no %s: run make test-engines, which installs it", name)
		}
		places[name] = path
	}
	for _, dir := range []string{"cni", "cni-bin", "crio.conf.d", "logs"} {
		must(t, os.MkdirAll(filepath.Join(c.dir, dir), 0o755))
	}
	must(t, os.MkdirAll(mem, 0o755))
	text := strings.NewReplacer("@DIR@", c.dir, "@MEM@", mem, "@BIN@", filepath.Dir(program), "@CDI@", s.Path("cdi"), "@RUNC@", places["runc"], "@CONMON@", places["conmon"],
		"@ENV@", gpufenceEnv(s), "@PAUSE@", pauseImage).Replace(crioConfig)
	config := filepath.Join(c.dir, "crio.conf")
	must(t, errors.Join(os.WriteFile(config, []byte(text), 0o600), os.WriteFile(filepath.Join(c.dir, "policy.json"), []byte(`{"default":[{"type":"insecureAcceptAnything"}]}`), 0o600)))
	_, err := s.gpufence(ctx, "install", "--runtime", "crio", "--config", config, "--executable-path", program, "--validate", "always")
	must(t, err)
	// CRI-O shares Podman's store of images.
	podmanPath, err := exec.LookPath("podman")
	if err != nil {
		skip(t, "there is no podman to put images into CRI-O's store: run make test-engines, which installs it")
	}
	for _, image := range s.images {
		_, err := s.run(ctx, podmanPath, "--root", filepath.Join(c.dir, "root"), "--runroot", filepath.Join(mem, "runroot"), "--tmpdir", filepath.Join(mem, "podman"), "--storage-driver", "overlay", "load", "-i", image)
		must(t, err)
	}
	c.daemon, err = start(ctx, "crio", filepath.Join(c.dir, "log"), []string{gpufenceEnv(s)}, program, "--config", config, "--config-dir", filepath.Join(c.dir, "crio.conf.d"))
	must(t, err)
	must(t, c.daemon.Ready(ctx, func(ctx context.Context) error { _, err := c.pods.crictl(ctx, "info", "-q"); return err }))
}

func (c *crio) start(ctx context.Context, r request) (begun, error) { return c.pods.start(ctx, r) }
func (c *crio) exec(ctx context.Context, name string, command ...string) (string, error) {
	return c.pods.exec(ctx, name, command...)
}
func (c *crio) remove(ctx context.Context, name string) error { return c.pods.remove(ctx, name) }

func (c *crio) down(t *testing.T) {
	if c.daemon == nil {
		return
	}
	c.daemon.LogIfFailed(t)
	if err := c.daemon.Stop(context.Background()); err != nil {
		t.Error(err)
	}
	killLeft(t, c.s.Path("crio"))
	for _, dir := range []string{c.dir, c.s.Path("crio")} {
		mounted, err := mounts.Detach(dir)
		if err != nil {
			t.Error(err)
		}
		for _, m := range mounted {
			if filepath.Base(m) != "overlay" { // its storage's own
				t.Errorf("left mounted: %s", m)
			}
		}
	}
}

// crio is the program, built once.
func (s *site) crio(ctx context.Context, t *testing.T) string {
	t.Helper()
	// Minutes, where it was not built before.
	cmd := exec.CommandContext(ctx, "./crio/build")
	cmd.Stderr = os.Stderr
	out, err := cmd.Output()
	if err != nil {
		skip(t, "CRI-O cannot be built: %v", err)
	}
	return filepath.Join(strings.TrimSpace(string(out)), "crio")
}
