// SPDX-License-Identifier: Apache-2.0

package k8s

import (
	"context"
	"crypto/rand"
	"crypto/rsa"
	"crypto/x509"
	"encoding/hex"
	"encoding/json"
	"encoding/pem"
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
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/gpufence/gpufence/enforcer/api"
	"github.com/gpufence/gpufence/enforcer/kube"
	"github.com/gpufence/gpufence/enforcer/kube/cri"
	"github.com/gpufence/gpufence/tests/deviceplugin"
	"github.com/gpufence/gpufence/tests/mounts"
	"github.com/gpufence/gpufence/tests/ociimage"
	"github.com/gpufence/gpufence/tests/process"
)

const (
	nodeName = "gpufence-e2e"
	// The network of services. Its first address is the API server's own, on the loopback, so that pods
	// reach it as everywhere although no kube-proxy runs.
	serviceNet = "10.97.213.0/24"
	serviceIP  = "10.97.213.1"
	podNet     = "10.88.213.0/24"
	bridge     = "gpufence-e2e0"
	replicas   = 4

	pauseImage  = "localhost/gpufence-pause:e2e"
	clientImage = "localhost/gpufence-clients:e2e"
	handler     = "gpufence"
)

// cluster is a node that is a cluster.
type cluster struct {
	dist string
	dir  string // on a disk
	mem  string // short, and in memory: sockets, gpufenced's state
	bins map[string]string

	chart    []document // as it was rendered
	stateDir string
	agent    bool // it runs

	client *api.Client
	gpus   []string
	plugin *deviceplugin.Plugin

	simgpud, gpufenced, containerd                   *process.Process
	etcd, apiserver, scheduler, controllers, kubelet *process.Process
	ports                                            map[string]int
	config                                           []string // lines of gpufenced's configuration
	lock                                             *os.File
	env                                              []string // of what is typed
}

// logf prints beside the steps, also while they run.
func logf(t *testing.T, format string, args ...any) {
	t.Helper()
	t.Logf(format, args...)
}

// newCluster builds, starts and cleans up. What cannot run here is skipped.
func newCluster(ctx context.Context, t *testing.T) *cluster {
	t.Helper()
	dist := os.Getenv("GPUFENCE_DIST")
	if dist == "" {
		dist, _ = filepath.Abs("../../dist")
	}
	for _, name := range []string{"bin/gpufenced", "bin/simgpud", "lib/libgpufence.so", "simgpu/libcuda.so.1", "clients/client"} {
		if _, err := os.Stat(filepath.Join(dist, name)); err != nil {
			skip(t, "%s is not built: run make build", name)
		}
	}
	if os.Geteuid() != 0 {
		skip(t, "a kubelet needs root")
	}
	for _, program := range []string{"runc", "ip", "gcc"} {
		if _, err := exec.LookPath(program); err != nil {
			skip(t, "there is no %s: run make test-k8s, which installs it", program)
		}
	}
	if c, err := new(net.Dialer).DialContext(ctx, "unix", "/var/lib/kubelet/device-plugins/kubelet.sock"); err == nil {
		c.Close()
		skip(t, "a kubelet runs on this machine")
	}
	c := &cluster{dist: dist, bins: map[string]string{}, ports: map[string]int{}, config: []string{"[accept.cri]", "resize-by-annotation = true"}}
	var err error
	c.lock, err = os.OpenFile(filepath.Join(memory(), "gpufence-k8s.lock"), os.O_CREATE|os.O_RDWR|syscall.O_CLOEXEC, 0o600)
	must(t, err)
	if err := unix.Flock(int(c.lock.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		c.lock.Close()
		t.Fatalf("another run of this test holds %s", c.lock.Name())
	}
	t.Cleanup(func() { c.lock.Close() })

	step := time.Now()
	cmd := exec.CommandContext(ctx, "../programs/build", "kubernetes", "containerd", "crictl", "cni", "helm")
	cmd.Stderr = os.Stderr
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("build the programs of the cluster: %v", err)
	}
	for _, dir := range strings.Fields(string(out)) {
		entries, err := os.ReadDir(dir)
		must(t, err)
		for _, e := range entries {
			c.bins[e.Name()] = filepath.Join(dir, e.Name())
		}
	}
	logf(t, "programs: %.1f s", time.Since(step).Seconds())

	c.dir, err = os.MkdirTemp("", "gpufence-k8s-")
	must(t, err)
	c.mem, err = os.MkdirTemp(memory(), "gfk8s-")
	must(t, err)
	t.Cleanup(func() { c.down(t) })
	must(t, c.up(ctx, t))
	return c
}

func (c *cluster) path(parts ...string) string {
	return filepath.Join(append([]string{c.dir}, parts...)...)
}

func (c *cluster) memPath(parts ...string) string {
	return filepath.Join(append([]string{c.mem}, parts...)...)
}

// port is a free one of this machine, the same for a name.
func (c *cluster) port(name string) string {
	if c.ports[name] == 0 {
		l, err := new(net.ListenConfig).Listen(context.Background(), "tcp", "127.0.0.1:0")
		if err != nil {
			return "0"
		}
		c.ports[name] = l.Addr().(*net.TCPAddr).Port //nolint:forcetypeassert // of a TCP listener
		l.Close()
	}
	return strconv.Itoa(c.ports[name])
}

// up starts everything, in an order in which each finds what it needs.
func (c *cluster) up(ctx context.Context, t *testing.T) error {
	for _, phase := range []struct {
		name string
		do   func(context.Context) error
	}{
		{"simulated GPUs", c.startGPUs},
		{"gpufence install, containerd, images", c.startContainerd},
		{"gpufenced", c.startGpufenced},
		{"control plane", c.startControlPlane},
		{"kubelet", c.startKubelet},
		{"node ready", c.awaitNode},
		{"device plugin", c.startPlugin},
		{"chart", c.startChart},
	} {
		begun := time.Now()
		if err := phase.do(ctx); err != nil {
			return fmt.Errorf("%s: %w", phase.name, err)
		}
		logf(t, "%s: %.1f s", phase.name, time.Since(begun).Seconds())
	}
	return nil
}

func (c *cluster) startGPUs(ctx context.Context) (err error) {
	c.simgpud, err = start(ctx, "simgpud", c.path("simgpud.log"), nil, filepath.Join(c.dist, "bin/simgpud"), "--dir", c.memPath("sim"), "--gpus", "2", "--nvml-lag", "50ms")
	if err != nil {
		return err
	}
	simgpu := filepath.Join(c.dist, "bin/simgpu")
	var state struct {
		GPUs []struct {
			UUID string `json:"uuid"`
		} `json:"gpus"`
	}
	if err := c.simgpud.Ready(ctx, func(ctx context.Context) error {
		out, err := run(ctx, "", simgpu, "--dir", c.memPath("sim"), "state", "-o", "json")
		if err != nil {
			return err
		}
		return json.Unmarshal([]byte(out), &state)
	}); err != nil {
		return err
	}
	for _, g := range state.GPUs {
		c.gpus = append(c.gpus, g.UUID)
	}
	if len(c.gpus) != 2 {
		return fmt.Errorf("simgpud has GPUs %q, want 2", c.gpus)
	}
	if err := os.MkdirAll(c.memPath("cdi"), 0o755); err != nil {
		return err
	}
	_, err = run(ctx, "", simgpu, "--dir", c.memPath("sim"), "cdi", "--lib-dir", filepath.Join(c.dist, "simgpu"), "--out", c.memPath("cdi/simgpu.json"))
	return err
}

// startGpufenced starts the one that is installed.
func (c *cluster) startGpufenced(ctx context.Context) error {
	if c.client == nil {
		if err := os.MkdirAll(c.memPath("gpufence"), 0o755); err != nil {
			return err
		}
		c.client = api.NewClient(c.memPath("gpufence/gpufenced.sock"), 10*time.Second)
	}
	quote := strconv.Quote
	text := append([]string{
		"socket = " + quote(c.memPath("gpufence/gpufenced.sock")), "run-dir = " + quote(c.memPath("gpufence")), "state-dir = " + quote(c.path("state")),
		"nvml-library = " + quote(filepath.Join(c.dist, "simgpu/libnvidia-ml.so.1")),
		"cdi-spec-dirs = [" + quote(c.memPath("cdi")) + "]", `cdi-kinds = ["gpufence.dev/simgpu"]`, `runtimes = ["runc"]`,
	}, c.config...)
	if err := os.WriteFile(c.path("config.toml"), []byte(strings.Join(text, "\n")+"\n"), 0o600); err != nil {
		return fmt.Errorf("write configuration: %w", err)
	}
	var err error
	c.gpufenced, err = start(ctx, "gpufenced", c.path("gpufenced.log"), []string{"SIMGPU_DIR=" + c.memPath("sim")}, c.installed("bin/gpufenced"), "--config", c.path("config.toml"))
	if err != nil {
		return err
	}
	if err := c.awaitGPUs(ctx); err != nil || !c.agent {
		return err
	}
	return c.canary(ctx)
}

// canary does what the agent's container host does on a node: it starts a canary, asks the engine, and
// hands the result over. That container gets at the node through process 1, which not every machine that a test runs on
// lets it.
func (c *cluster) canary(ctx context.Context) error {
	out, err := run(ctx, "", "env", "GPUFENCE_CONFIG="+c.path("config.toml"), c.installed("bin/gpufence"), "--socket", c.memPath("gpufence/gpufenced.sock"), "canary", "-o", "json")
	if err != nil {
		return fmt.Errorf("%w: %s", err, out)
	}
	var found kube.Canary
	if err := json.Unmarshal([]byte(out), &found); err != nil {
		return fmt.Errorf("read the canary's result: %w", err)
	}
	engine, err := cri.Node{Root: "/", Kind: "containerd", Socket: c.sock()}.Ask(ctx)
	if err == nil {
		err = engine.Through(handler)
	}
	if err != nil {
		found.Engine = err.Error()
	}
	text, err := json.Marshal(found)
	if err != nil {
		return fmt.Errorf("hand the canary's result over: %w", err)
	}
	next := c.memPath("canary.new")
	if err := os.WriteFile(next, text, 0o600); err != nil {
		return fmt.Errorf("hand the canary's result over: %w", err)
	}
	return os.Rename(next, c.memPath("gpufence/canary.json"))
}

func (c *cluster) awaitGPUs(ctx context.Context) error {
	return c.gpufenced.Ready(ctx, func(ctx context.Context) error {
		gpus, err := c.client.GPUs(ctx)
		if err != nil {
			return err
		}
		if len(gpus) != len(c.gpus) || slices.ContainsFunc(gpus, func(g api.GPUState) bool { return g.SampledAt == nil }) {
			return fmt.Errorf("%d GPUs, not all sampled", len(gpus))
		}
		return nil
	})
}

// installed is a file of the installation that the engine and the daemon use.
func (c *cluster) installed(name string) string { return c.path("opt", name) }

// nextVersion is what the programs of [cluster.buildNext] say of themselves.
const nextVersion = "e2e-next"

// buildNext builds the programs of another version, beside the libraries of this one.
func (c *cluster) buildNext(ctx context.Context) error {
	root := c.path("next")
	if err := os.MkdirAll(filepath.Join(root, "bin"), 0o755); err != nil {
		return err
	}
	if err := os.CopyFS(filepath.Join(root, "lib"), os.DirFS(filepath.Join(c.dist, "lib"))); err != nil {
		return fmt.Errorf("copy libraries: %w", err)
	}
	for cgo, programs := range map[string][]string{"0": {"gpufence", "gpufence-runtime", "gpufence-hook"}, "1": {"gpufenced"}} {
		args := []string{"build", "-trimpath", "-ldflags", "-X github.com/gpufence/gpufence/enforcer/api.BuildVersion=" + nextVersion, "-o", filepath.Join(root, "bin") + "/"}
		for _, program := range programs {
			args = append(args, "../../cmd/"+program)
		}
		ctx, cancel := context.WithTimeout(ctx, 5*patience)
		cmd := exec.CommandContext(ctx, "go", args...)
		cmd.Env = append(os.Environ(), "CGO_ENABLED="+cgo)
		out, err := cmd.CombinedOutput()
		cancel()
		if err != nil {
			return fmt.Errorf("build version %s: %w: %s", nextVersion, err, out)
		}
	}
	return nil
}

// installFrom runs `gpufence install` of a build, or `gpufence uninstall`.
func (c *cluster) installFrom(ctx context.Context, root, verb string, more ...string) (string, error) {
	return run(ctx, "", filepath.Join(root, "bin/gpufence"), append([]string{
		verb, "--runtime", "containerd", "--config", c.path("containerd/config.toml"), "--install-dir", c.path("opt"),
		"--executable-path", c.bins["containerd"], "--restart-mode", "none",
	}, more...)...)
}

func (c *cluster) sock() string { return c.memPath("containerd.sock") }

func (c *cluster) startContainerd(ctx context.Context) error {
	for _, dir := range []string{"containerd/conf.d", "cni"} {
		if err := os.MkdirAll(c.path(dir), 0o755); err != nil {
			return err
		}
	}
	text := strings.NewReplacer("@DIR@", c.dir, "@MEM@", c.mem, "@CNI@", filepath.Dir(c.bins["bridge"]), "@PAUSE@", pauseImage, "@STATE@", c.state()).Replace(`version = 3
root = "@DIR@/containerd/root"
state = "@STATE@"
imports = ["@DIR@/containerd/conf.d/*.toml"]
disabled_plugins = ["io.containerd.snapshotter.v1.btrfs", "io.containerd.snapshotter.v1.zfs", "io.containerd.snapshotter.v1.devmapper", "io.containerd.snapshotter.v1.erofs", "io.containerd.nri.v1.nri"]
[grpc]
  address = "@MEM@/containerd.sock"
[ttrpc]
  address = "@MEM@/containerd.sock.ttrpc"
[plugins."io.containerd.cri.v1.images"]
  snapshotter = "overlayfs"
  [plugins."io.containerd.cri.v1.images".pinned_images]
    sandbox = "@PAUSE@"
[plugins."io.containerd.cri.v1.runtime"]
  # Without CAP_SYS_RESOURCE no score can be lowered.
  restrict_oom_score_adj = true
  enable_unprivileged_ports = false
  enable_unprivileged_icmp = false
  cdi_spec_dirs = ["@MEM@/cdi"]
  [plugins."io.containerd.cri.v1.runtime".cni]
    bin_dirs = ["@CNI@"]
    conf_dir = "@DIR@/cni"
  [plugins."io.containerd.cri.v1.runtime".containerd]
    default_runtime_name = "runc"
    [plugins."io.containerd.cri.v1.runtime".containerd.runtimes.runc]
      runtime_type = "io.containerd.runc.v2"
      [plugins."io.containerd.cri.v1.runtime".containerd.runtimes.runc.options]
        SystemdCgroup = false
`)
	if err := os.WriteFile(c.path("containerd/config.toml"), []byte(text), 0o600); err != nil {
		return fmt.Errorf("write containerd's configuration: %w", err)
	}
	network := fmt.Sprintf(`{"cniVersion":"1.0.0","name":"gpufence-e2e","plugins":[{"type":"bridge","bridge":%q,"isGateway":true,"ipMasq":false,
"ipam":{"type":"host-local","dataDir":%q,"ranges":[[{"subnet":%q}]],"routes":[{"dst":"0.0.0.0/0"}]}}]}`, bridge, c.path("ipam"), podNet)
	if err := os.WriteFile(c.path("cni/10-e2e.conflist"), []byte(network), 0o600); err != nil {
		return fmt.Errorf("write the network's configuration: %w", err)
	}
	if _, err := c.installFrom(ctx, c.dist, "install", "--validate", "always"); err != nil {
		return err
	}
	if _, err := os.Stat(c.dropIn()); err != nil {
		return fmt.Errorf("gpufence install wrote no drop-in: %w", err)
	}
	if err := c.runContainerd(ctx); err != nil {
		return err
	}
	pause, err := ociimage.Pause(ctx, pauseImage, c.dir)
	if err != nil {
		return err
	}
	clients, err := ociimage.Clients(ctx, clientImage, c.dist)
	if err != nil {
		return err
	}
	return c.load(ctx, pause, clients)
}

// load gives the engine images.
func (c *cluster) load(ctx context.Context, images ...ociimage.Image) error {
	for _, image := range images {
		tar := c.path("image.tar")
		if err := ociimage.Write(tar, image); err != nil {
			return err
		}
		if _, err := run(ctx, "", c.bins["ctr"], "-a", c.sock(), "-n", "k8s.io", "images", "import", tar); err != nil {
			return err
		}
	}
	return nil
}

// state is containerd's folder for what runs: the usual one, in which gpufence looks for who uses its
// runtime, unless another containerd has it.
func (c *cluster) state() string {
	if c.stateDir == "" {
		c.stateDir = c.memPath("containerd")
		if left, err := filepath.Glob("/run/containerd/io.containerd.*"); err == nil && len(left) == 0 {
			c.stateDir = "/run/containerd"
		}
	}
	return c.stateDir
}

// runContainerd starts it with the configuration as it is.
func (c *cluster) runContainerd(ctx context.Context) (err error) {
	c.containerd, err = start(ctx, "containerd", c.path("containerd.log"), []string{
		"PATH=" + filepath.Dir(c.bins["containerd"]) + ":" + os.Getenv("PATH"), "GPUFENCE_CONFIG=" + c.path("config.toml"),
	}, c.bins["containerd"], "-c", c.path("containerd/config.toml"))
	if err != nil {
		return err
	}
	return c.containerd.Ready(ctx, func(ctx context.Context) error {
		_, err := c.crictl(ctx, "info", "-q")
		return err
	})
}

func (c *cluster) crictl(ctx context.Context, args ...string) (string, error) {
	endpoint := "unix://" + c.sock()
	return run(ctx, "", c.bins["crictl"], append([]string{"-r", endpoint, "-i", endpoint, "--timeout", "60s"}, args...)...)
}

// dropIn is the file of the engine's configuration that is gpufence's.
func (c *cluster) dropIn() string { return c.path("containerd/conf.d/99-zz-gpufence.toml") }

// writeKeys makes the key of service accounts' tokens, and the tokens of the others.
func (c *cluster) writeKeys() error {
	if err := os.MkdirAll(c.path("pki"), 0o700); err != nil {
		return err
	}
	key, err := rsa.GenerateKey(rand.Reader, 2048)
	if err != nil {
		return fmt.Errorf("make key: %w", err)
	}
	private := pem.EncodeToMemory(&pem.Block{Type: "RSA PRIVATE KEY", Bytes: x509.MarshalPKCS1PrivateKey(key)})
	public, err := x509.MarshalPKIXPublicKey(&key.PublicKey)
	if err != nil {
		return fmt.Errorf("encode key: %w", err)
	}
	var tokens strings.Builder
	for _, user := range []struct{ file, name, groups string }{
		{"admin", "admin", "system:masters"},
		{"scheduler", "system:kube-scheduler", ""},
		{"kubelet", "system:node:" + nodeName, "system:nodes"},
	} {
		secret := make([]byte, 16)
		if _, err := rand.Read(secret); err != nil {
			return fmt.Errorf("make token: %w", err)
		}
		token := hex.EncodeToString(secret)
		fmt.Fprintf(&tokens, "%s,%s,%s,%s\n", token, user.name, user.name, user.groups)
		text := fmt.Sprintf(`apiVersion: v1
kind: Config
clusters: [{name: c, cluster: {server: "https://%s", insecure-skip-tls-verify: true}}]
users: [{name: u, user: {token: %q}}]
contexts: [{name: x, context: {cluster: c, user: u}}]
current-context: x
`, serviceIP, token)
		if err := os.WriteFile(c.path(user.file+".kubeconfig"), []byte(text), 0o600); err != nil {
			return fmt.Errorf("write kubeconfig: %w", err)
		}
	}
	for name, text := range map[string][]byte{
		"sa.key": private, "sa.pub": pem.EncodeToMemory(&pem.Block{Type: "PUBLIC KEY", Bytes: public}), "tokens.csv": []byte(tokens.String()),
	} {
		if err := os.WriteFile(c.path("pki", name), text, 0o600); err != nil {
			return fmt.Errorf("write keys: %w", err)
		}
	}
	return nil
}

func (c *cluster) startControlPlane(ctx context.Context) (err error) {
	if err := c.writeKeys(); err != nil {
		return err
	}
	if _, err := run(ctx, "", "ip", "address", "replace", serviceIP+"/32", "dev", "lo"); err != nil {
		return err
	}
	etcd := "http://127.0.0.1:" + c.port("etcd")
	peers := "http://127.0.0.1:" + c.port("etcd peers")
	c.etcd, err = start(ctx, "etcd", c.path("etcd.log"), nil, c.bins["etcd"], "--name", "e", "--data-dir", c.path("etcd"), "--unsafe-no-fsync", "--listen-client-urls", etcd,
		"--advertise-client-urls", etcd, "--listen-peer-urls", peers, "--initial-advertise-peer-urls", peers, "--initial-cluster", "e="+peers)
	if err != nil {
		return err
	}
	c.apiserver, err = start(ctx, "kube-apiserver", c.path("apiserver.log"), nil, c.bins["kube-apiserver"], "--etcd-servers="+etcd, "--secure-port=443", "--bind-address="+serviceIP,
		"--advertise-address="+serviceIP, "--cert-dir="+c.path("pki/api"), "--token-auth-file="+c.path("pki/tokens.csv"), "--authorization-mode=Node,RBAC",
		"--service-cluster-ip-range="+serviceNet, "--service-account-issuer=https://kubernetes.default.svc", "--service-account-key-file="+c.path("pki/sa.pub"),
		"--service-account-signing-key-file="+c.path("pki/sa.key"), "--enable-admission-plugins=NodeRestriction", "--allow-privileged=true", "--kubelet-preferred-address-types=InternalIP", "--v=1")
	if err != nil {
		return err
	}
	if err := c.apiserver.Ready(ctx, func(ctx context.Context) error {
		_, err := c.kubectl(ctx, "", "get", "--raw", "/readyz")
		return err
	}); err != nil {
		return err
	}
	config := c.path("scheduler.kubeconfig")
	c.scheduler, err = start(ctx, "kube-scheduler", c.path("scheduler.log"), nil, c.bins["kube-scheduler"], "--kubeconfig="+config, "--authentication-kubeconfig="+config,
		"--authorization-kubeconfig="+config, "--leader-elect=false", "--secure-port="+c.port("scheduler"), "--bind-address=127.0.0.1", "--cert-dir="+c.path("pki/scheduler"))
	if err != nil {
		return err
	}
	c.controllers, err = start(ctx, "kube-controller-manager", c.path("controllers.log"), nil, c.bins["kube-controller-manager"], "--kubeconfig="+c.path("admin.kubeconfig"), "--leader-elect=false",
		"--secure-port="+c.port("controllers"), "--bind-address=127.0.0.1", "--cert-dir="+c.path("pki/controllers"), "--service-account-private-key-file="+c.path("pki/sa.key"),
		"--root-ca-file="+c.path("pki/api/apiserver.crt"), "--use-service-account-credentials=true")
	if err != nil {
		return err
	}
	return until(ctx, "the default service account is there", func(ctx context.Context) (bool, string) {
		_, err := c.kubectl(ctx, "", "get", "serviceaccount", "default")
		return err == nil, fmt.Sprint(err)
	})
}

func (c *cluster) startKubelet(ctx context.Context) error {
	before, err := kubepods()
	if err != nil {
		return err
	}
	if len(before) > 0 && c.kubelet == nil {
		return fmt.Errorf("cgroups of a kubelet are here already: %q", before)
	}
	text := strings.NewReplacer("@DIR@", c.dir, "@SOCK@", c.sock(), "@PORT@", c.port("kubelet"), "@HEALTH@", c.port("kubelet health")).Replace(`apiVersion: kubelet.config.k8s.io/v1beta1
kind: KubeletConfiguration
address: 0.0.0.0
port: @PORT@
healthzPort: @HEALTH@
readOnlyPort: 0
authentication: {anonymous: {enabled: true}, webhook: {enabled: false}}
authorization: {mode: AlwaysAllow}
containerRuntimeEndpoint: unix://@SOCK@
imageServiceEndpoint: unix://@SOCK@
staticPodPath: @DIR@/manifests
podLogsDir: @DIR@/pod-logs
failCgroupV1: false
cgroupDriver: cgroupfs
cgroupsPerQOS: true
enforceNodeAllocatable: [pods]
failSwapOn: false
localStorageCapacityIsolation: false
makeIPTablesUtilChains: false
oomScoreAdj: 0
evictionHard: {nodefs.available: "1Mi", imagefs.available: "1Mi", memory.available: "10Mi"}
imageGCHighThresholdPercent: 100
imageGCLowThresholdPercent: 99
syncFrequency: 2s
nodeStatusUpdateFrequency: 2s
fileCheckFrequency: 2s
clusterDNS: []
resolvConf: ""
registerNode: true
crashLoopBackOff: {maxContainerRestartPeriod: 2s}
`)
	if err := os.MkdirAll(c.path("manifests"), 0o755); err != nil {
		return err
	}
	if err := os.WriteFile(c.path("kubelet.yaml"), []byte(text), 0o600); err != nil {
		return fmt.Errorf("write kubelet's configuration: %w", err)
	}
	c.kubelet, err = start(ctx, "kubelet", c.path("kubelet.log"), []string{"PATH=" + filepath.Dir(c.bins["containerd"]) + ":" + os.Getenv("PATH")}, c.bins["kubelet"],
		"--config="+c.path("kubelet.yaml"), "--kubeconfig="+c.path("kubelet.kubeconfig"), "--root-dir="+c.path("kubelet"), "--hostname-override="+nodeName,
		"--cert-dir="+c.path("pki/kubelet"), "--v=2")
	if err != nil {
		return err
	}
	return c.kubelet.Ready(ctx, process.Answers("tcp", "127.0.0.1:"+c.port("kubelet")))
}

func (c *cluster) awaitNode(ctx context.Context) error {
	return c.kubelet.Ready(ctx, func(ctx context.Context) error {
		out, err := c.kubectl(ctx, "", "get", "node", nodeName, "-o", `jsonpath={.status.conditions[?(@.type=="Ready")].status} {.spec.taints}`)
		if err == nil && strings.TrimSpace(out) != "True" {
			err = fmt.Errorf("node is %s", out)
		}
		return err
	})
}

func (c *cluster) startPlugin(ctx context.Context) (err error) {
	c.plugin, err = deviceplugin.Start(deviceplugin.Options{GPUs: c.gpus, Replicas: replicas, Form: deviceplugin.ByEnv, CDIKind: "gpufence.dev/simgpu"})
	if err != nil {
		return err
	}
	return c.awaitPlugin(ctx)
}

// awaitPlugin waits until the node has all replicas to give.
func (c *cluster) awaitPlugin(ctx context.Context) error {
	want := strconv.Itoa(replicas * len(c.gpus))
	return until(ctx, "the node has "+want+" "+deviceplugin.Resource, func(ctx context.Context) (bool, string) {
		out, err := c.kubectl(ctx, "", "get", "node", nodeName, "-o", `jsonpath={.status.allocatable.nvidia\.com/gpu}`)
		_, registered := c.plugin.Registered()
		return err == nil && out == want, fmt.Sprintf("%q, %v, %v", out, err, registered)
	})
}

// kubectl is what a user types.
func (c *cluster) kubectl(ctx context.Context, stdin string, args ...string) (string, error) {
	return run(ctx, stdin, c.bins["kubectl"], append([]string{"--kubeconfig", c.path("admin.kubeconfig")}, args...)...)
}

// gpufence is what an administrator of the node types.
func (c *cluster) gpufence(ctx context.Context, args ...string) (string, error) {
	return run(ctx, "", c.installed("bin/gpufence"), append([]string{"--socket", c.memPath("gpufence/gpufenced.sock")}, args...)...)
}

// kubepods are the cgroups that a kubelet makes for pods.
func kubepods() ([]string, error) {
	var out []string
	for _, pattern := range []string{"/sys/fs/cgroup/kubepods", "/sys/fs/cgroup/*/kubepods"} {
		found, err := filepath.Glob(pattern)
		if err != nil {
			return nil, err
		}
		for _, dir := range found {
			if resolved, err := filepath.EvalSymlinks(dir); err == nil && !slices.Contains(out, resolved) {
				out = append(out, resolved)
			}
		}
	}
	return out, nil
}

// down ends everything, and says what was left that should not have been. It goes on after the test's
// own context has ended.
func (c *cluster) down(t *testing.T) {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	begun := time.Now()
	if t.Failed() {
		c.explain(ctx, t)
	}
	check := func(err error) {
		if err != nil {
			t.Errorf("clean up: %v", err)
		}
	}
	// Each has its own time, whatever the others took.
	stop := func(p *process.Process) { check(p.Stop(context.WithoutCancel(ctx))) }
	if c.plugin != nil {
		c.plugin.Close()
	}
	// The controllers first: they would make pods of daemon sets again.
	stop(c.controllers)
	if c.kubelet != nil {
		if _, err := c.kubectl(ctx, "", "delete", "pods", "--all", "--all-namespaces", "--force", "--grace-period=0", "--wait=false"); err != nil {
			t.Logf("clean up: %v", err)
		}
	}
	stop(c.kubelet)
	if c.containerd != nil {
		gone := 0
		check(until(ctx, "all sandboxes are gone", func(ctx context.Context) (bool, string) {
			_, err := c.crictl(ctx, "rmp", "-f", "-a")
			out, err2 := c.crictl(ctx, "pods", "-q")
			// One that the kubelet had just asked for appears late.
			if err != nil || err2 != nil || strings.TrimSpace(out) != "" {
				gone = 0
			}
			gone++
			return gone > 5, fmt.Sprintf("%s %v %v", out, err, err2)
		}))
	}
	stop(c.containerd)
	stop(c.scheduler)
	stop(c.apiserver)
	stop(c.etcd)
	stop(c.gpufenced)
	stop(c.simgpud)
	if c.etcd != nil {
		if _, err := run(ctx, "", "ip", "address", "delete", serviceIP+"/32", "dev", "lo"); err != nil {
			t.Errorf("clean up: %v", err)
		}
	}
	if _, err := net.InterfaceByName(bridge); err == nil {
		_, err := run(ctx, "", "ip", "link", "delete", bridge)
		check(err)
	}
	if c.stateDir == "/run/containerd" {
		left, err := filepath.Glob("/run/containerd/io.containerd.*")
		check(err)
		for _, dir := range left {
			mounted, err := mounts.Detach(dir)
			check(err)
			if len(mounted) > 0 {
				t.Errorf("left mounted: %q", mounted)
			}
			check(os.RemoveAll(dir))
		}
	}
	// Only what is empty: shims of other engines have their files here, too.
	for _, dir := range []string{"runc/k8s.io", "runc", "s", "fifo", "."} {
		_ = os.Remove(filepath.Join("/run/containerd", dir))
	}
	for _, dir := range []string{c.dir, c.mem} {
		// The kubelet leaves a mount of its folder over itself, and volumes of pods that it was stopped over.
		mounted, err := mounts.Detach(dir)
		check(err)
		for _, m := range mounted {
			if m != c.path("kubelet") && !strings.HasPrefix(m, c.path("kubelet/pods")+"/") {
				t.Errorf("left mounted: %s", m)
			}
		}
		// Such as a shim whose containerd is gone.
		left, err := process.KillNaming(dir + "/")
		check(err)
		if len(left) > 0 {
			t.Errorf("left running: %q", left)
		}
		if os.Getenv("GPUFENCE_KEEP") == "" {
			check(os.RemoveAll(dir))
		} else {
			t.Logf("kept: %s", dir)
		}
	}
	cgroups, err := kubepods()
	check(err)
	for _, dir := range cgroups {
		check(removeCgroup(dir))
	}
	// Only if it is empty: a kubelet that was here before has files in it.
	_ = os.Remove("/var/lib/kubelet/device-plugins/gpufence-test.sock")
	_ = os.Remove("/var/lib/kubelet/device-plugins/kubelet_internal_checkpoint")
	_ = os.Remove("/var/lib/kubelet/device-plugins/kubelet.sock")
	_ = os.Remove("/var/lib/kubelet/device-plugins")
	_ = os.Remove("/var/lib/kubelet")
	logf(t, "everything stopped: %.1f s", time.Since(begun).Seconds())
}

// removeCgroup removes a cgroup with all below it.
func removeCgroup(dir string) error {
	var dirs []string
	if err := filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err == nil && d.IsDir() {
			dirs = append(dirs, path)
		}
		return nil
	}); err != nil {
		return err
	}
	slices.Reverse(dirs)
	for _, d := range dirs {
		if err := unix.Rmdir(d); err != nil && !errors.Is(err, unix.ENOENT) {
			return fmt.Errorf("remove cgroup %s: %w", d, err)
		}
	}
	return nil
}

// explain tells what one asks first after a failure.
func (c *cluster) explain(ctx context.Context, t *testing.T) {
	for _, args := range [][]string{{"get", "pods", "--all-namespaces", "-o", "wide"}, {"get", "events", "--all-namespaces", "--sort-by=.lastTimestamp"}} {
		if out, err := c.kubectl(ctx, "", args...); err == nil {
			lines := strings.Split(out, "\n")
			t.Logf("kubectl %s:\n%s", strings.Join(args, " "), strings.Join(lines[max(0, len(lines)-40):], "\n"))
		}
	}
	if c.client != nil {
		if out, err := c.gpufence(ctx, "events"); err == nil {
			lines := strings.Split(out, "\n")
			t.Logf("gpufence events:\n%s", strings.Join(lines[max(0, len(lines)-40):], "\n"))
		}
	}
	for _, p := range []*process.Process{c.gpufenced, c.containerd, c.kubelet, c.apiserver} {
		p.LogIfFailed(t)
	}
}
