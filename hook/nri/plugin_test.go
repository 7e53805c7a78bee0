// SPDX-License-Identifier: Apache-2.0

package nri

import (
	"context"
	"errors"
	"io"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/containerd/nri/pkg/adaptation"
	"github.com/containerd/nri/pkg/api"
	nrilog "github.com/containerd/nri/pkg/log"
	"github.com/containerd/nri/pkg/stub"
	validator "github.com/containerd/nri/plugins/default-validator/builtin"
	"github.com/sirupsen/logrus"

	gpufence "github.com/gpufence/gpufence/enforcer/api"
	"github.com/gpufence/gpufence/enforcer/quota"
)

const gpu0 = "GPU-aaaaaaaa-0000-0000-0000-000000000001"

// daemon is a gpufenced that grants what is asked.
type daemon struct {
	mu       sync.Mutex
	requests []gpufence.PrepareRequest
	running  []gpufence.Container
	audits   []gpufence.AuditRequest
	released []string
	err      error
	delay    time.Duration
	none     bool // no GPU: what a claim that the kubelet does not know gets
}

func (d *daemon) Prepare(ctx context.Context, req gpufence.PrepareRequest) (gpufence.PrepareResponse, error) {
	d.mu.Lock()
	delay, err, none := d.delay, d.err, d.none
	d.requests = append(d.requests, req)
	d.mu.Unlock()
	select {
	case <-time.After(delay):
	case <-ctx.Done():
		return gpufence.PrepareResponse{}, &gpufence.UnreachableError{Socket: "/s", Err: errors.New("no answer in time")}
	}
	if err != nil || none {
		return gpufence.PrepareResponse{}, err
	}
	resp := gpufence.PrepareResponse{
		Grant: quota.Grant{
			GPUs: []quota.GPU{{UUID: gpu0, TotalBytes: 16 << 30}}, Mode: quota.ModeEnforce,
			Pod: map[string]quota.Limits{gpu0: {Max: 4 << 30}}, Container: map[string]quota.Limits{},
		},
		Files: []gpufence.SharedFile{
			{Source: "/run/gpufence/pods/p/limits", Destination: req.ShimDir + "/limits"},
			{Source: "/run/gpufence/pods/p/ledger", Destination: req.ShimDir + "/ledger", Writable: true},
			{Source: "/usr/lib/gpufence/libgpufence.so", Destination: req.ShimDir + "/lib64/libgpufence.so"},
			{Source: "/run/gpufence/preload/p", Destination: "/etc/ld.so.preload"},
		},
	}
	if !req.Devices.Present {
		resp.CDIDevices = []string{"gpufence.dev/simgpu=0"}
	}
	return resp, nil
}

func (d *daemon) Containers(context.Context) ([]gpufence.Container, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.running, d.err
}

func (d *daemon) Audit(_ context.Context, req gpufence.AuditRequest) (gpufence.AuditResponse, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.audits = append(d.audits, req)
	return gpufence.AuditResponse{Unmanaged: "warn"}, nil
}

func (d *daemon) Unregister(_ context.Context, req gpufence.UnregisterRequest) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.released = append(d.released, req.Key.ID)
	return d.err
}

func (d *daemon) set(f func(*daemon)) {
	d.mu.Lock()
	defer d.mu.Unlock()
	f(d)
}

// engine is NRI's own half, as containerd has it, with the containers that it would list.
type engine struct {
	t          *testing.T
	socket     string
	dir        string
	mu         sync.Mutex
	a          *adaptation.Adaptation
	pods       []*api.PodSandbox
	containers []*api.Container
	synced     chan struct{}
	options    []adaptation.Option
	front      net.Listener
	conns      []net.Conn
}

func quiet() logrus.FieldLogger {
	l := logrus.New()
	l.SetOutput(io.Discard)
	return l
}

// quietNRI is once for all: an engine that was stopped may still say something.
var quietNRI = sync.OnceFunc(func() { nrilog.Set(nriLog{quiet()}) })

func newEngine(t *testing.T, options ...adaptation.Option) *engine {
	t.Helper()
	quietNRI()
	dir, err := os.MkdirTemp("", "nri") // a socket's path is short
	if err != nil {
		t.Fatal(err)
	}
	e := &engine{t: t, dir: dir, socket: filepath.Join(dir, "s"), synced: make(chan struct{}, 64), options: options}
	t.Cleanup(func() {
		e.stop()
		os.RemoveAll(dir)
	})
	e.start()
	return e
}

func (e *engine) start() {
	e.t.Helper()
	sync := func(ctx context.Context, cb adaptation.SyncCB) error {
		e.mu.Lock()
		pods, containers := e.pods, e.containers
		e.mu.Unlock()
		_, err := cb(ctx, pods, containers)
		e.synced <- struct{}{}
		return err
	}
	update := func(context.Context, []*adaptation.ContainerUpdate) ([]*adaptation.ContainerUpdate, error) {
		return nil, nil
	}
	a, err := adaptation.New("containerd", "v2.2.7", sync, update, append(e.options,
		adaptation.WithPluginPath(filepath.Join(e.dir, "plugins")), adaptation.WithPluginConfigPath(filepath.Join(e.dir, "conf.d")), adaptation.WithSocketPath(e.socket+"b"))...)
	if err != nil {
		e.t.Fatal(err)
	}
	if err := a.Start(); err != nil {
		e.t.Fatal(err)
	}
	<-e.synced // of the plugins that the engine starts itself, of which there are none
	e.a = a
	// NRI's half lets plugins go only when its process ends. So connections come through here, where
	// they can be cut.
	if e.front, err = net.Listen("unix", e.socket); err != nil {
		e.t.Fatal(err)
	}
	go e.accept(e.front)
}

func (e *engine) accept(front net.Listener) {
	for {
		from, err := front.Accept()
		if err != nil {
			return // closed
		}
		to, err := net.Dial("unix", e.socket+"b")
		if err != nil {
			from.Close()
			continue
		}
		e.mu.Lock()
		e.conns = append(e.conns, from, to)
		e.mu.Unlock()
		for _, pair := range [][2]net.Conn{{from, to}, {to, from}} {
			go func() {
				// Either end's end is the other's.
				_, _ = io.Copy(pair[0], pair[1])
				pair[0].Close()
				pair[1].Close()
			}()
		}
	}
}

func (e *engine) stop() {
	if e.a == nil {
		return
	}
	e.front.Close()
	e.a.Stop()
	e.a = nil
	e.mu.Lock()
	defer e.mu.Unlock()
	for _, c := range e.conns {
		c.Close()
	}
	e.conns = nil
}

func (e *engine) waitSync() {
	e.t.Helper()
	select {
	case <-e.synced:
	case <-time.After(20 * time.Second):
		e.t.Fatal("no plugin was synchronized")
	}
	// The plugin takes part from when the engine has put it in its place, right behind that.
	b := e.a.BlockPluginSync()
	b.Unblock()
}

func settings(t *testing.T, e *engine) Settings {
	t.Helper()
	specs := t.TempDir()
	text := `{"cdiVersion":"0.6.0","kind":"gpufence.dev/simgpu","devices":[{"name":"0","containerEdits":{
		"env":["SIM=1","NVIDIA_VISIBLE_DEVICES=void"],
		"deviceNodes":[{"path":"/dev/nvidia0","hostPath":"/dev/null"}],
		"mounts":[{"hostPath":"/etc/hostname","containerPath":"/usr/lib64/libcuda.so.1","options":["ro","bind"]}],
		"hooks":[{"hookName":"createContainer","path":"/bin/true","args":["true"]}]}}]}`
	if err := os.WriteFile(filepath.Join(specs, "sim.json"), []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
	return Settings{
		Policy: quota.DefaultPolicy(), ConfigPath: "/etc/gpufence/config.toml", Socket: "/run/gpufence/gpufenced.sock", RunDir: "/run/gpufence",
		HookPath: "/opt/bin/gpufence-hook", CDISpecDirs: []string{specs}, NRISocket: e.socket, Index: "90", Exempt: []string{"kube-system"}, Majors: []int64{195, 509},
	}
}

// run starts a plugin and waits until it takes part.
func run(t *testing.T, e *engine, set Settings, d *daemon) *Plugin {
	t.Helper()
	p := New(set, d, quiet())
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- p.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
	e.waitSync()
	return p
}

func pod(annotations map[string]string) *api.PodSandbox {
	return &api.PodSandbox{Id: "sandbox1", Name: "notebook", Uid: "u", Namespace: "team-a", Annotations: annotations}
}

func ctr(id string, change func(*api.Container)) *api.Container {
	c := &api.Container{Id: id, PodSandboxId: "sandbox1", Name: "main", Args: []string{"/app"}, State: api.ContainerState_CONTAINER_RUNNING,
		Env: []string{"PATH=/bin", "NVIDIA_VISIBLE_DEVICES=" + gpu0}, Linux: &api.LinuxContainer{Namespaces: []*api.LinuxNamespace{{Type: "pid"}}},
		Mounts: []*api.Mount{{Destination: "/dev/termination-log", Type: "bind", Source: "/var/lib/kubelet/pods/u/log", Options: []string{"rbind", "rw"}}}}
	if change != nil {
		change(c)
	}
	return c
}

func env(list ...string) func(*api.Container) { return func(c *api.Container) { c.Env = list } }

var limit = map[string]string{"gpufence.dev/memory.max": "4Gi"}

func (e *engine) create(p *api.PodSandbox, c *api.Container) (*api.ContainerAdjustment, error) {
	resp, err := e.a.CreateContainer(context.Background(), &api.CreateContainerRequest{Pod: p, Container: c})
	if err != nil {
		return nil, err
	}
	return resp.GetAdjust(), nil
}

func envOf(a *api.ContainerAdjustment) map[string]string {
	out := map[string]string{}
	for _, e := range a.GetEnv() {
		out[e.GetKey()] = e.GetValue()
	}
	return out
}

func mountsOf(a *api.ContainerAdjustment) map[string]string {
	out := map[string]string{}
	for _, m := range a.GetMounts() {
		out[m.GetDestination()] = m.GetSource()
	}
	return out
}

func TestCreateIsFenced(t *testing.T) {
	e, d := newEngine(t), &daemon{}
	set := settings(t, e)
	run(t, e, set, d)
	a, err := e.create(pod(limit), ctr("c1", func(c *api.Container) {
		c.Env = append(c.Env, "GPUFENCE_MEMORY_MAX=64Gi", "NVIDIA_GPU_MEMORY_LIMIT=65536", "KEEP=1")
	}))
	if err != nil {
		t.Fatal(err)
	}
	req := d.requests[0]
	if req.Key != (gpufence.ContainerKey{Engine: quota.EngineCRI, Scope: "/run/containerd/runc/k8s.io", ID: "c1"}) || req.Pod.ID != "sandbox1" || req.Pod.Namespace != "team-a" ||
		req.ContainerName != "main" || !slices.Equal(req.Devices.Selectors, []string{gpu0}) || req.TerminationLog != "/var/lib/kubelet/pods/u/log" || req.Annotations["gpufence.dev/memory.max"] != "4Gi" {
		t.Errorf("gpufenced was asked %+v", req)
	}
	vars := envOf(a)
	if vars["NVIDIA_VISIBLE_DEVICES"] != "void" || vars["GPUFENCE_MEMORY_MAX"] != "" || vars["NVIDIA_GPU_MEMORY_LIMIT"] != "4096" || vars["SIM"] != "1" {
		t.Errorf("env %q", vars)
	}
	if _, touched := vars["KEEP"]; touched {
		t.Error("somebody else's variable was touched")
	}
	mounts := mountsOf(a)
	for dest, source := range map[string]string{
		"/dev/gpufence/limits": "/run/gpufence/pods/p/limits", "/dev/gpufence/lib64/libgpufence.so": "/usr/lib/gpufence/libgpufence.so",
		"/etc/ld.so.preload": "/run/gpufence/preload/p", "/usr/lib64/libcuda.so.1": "/etc/hostname",
	} {
		if mounts[dest] != source {
			t.Errorf("at %s is %q, want %q", dest, mounts[dest], source)
		}
	}
	for _, m := range a.GetMounts() {
		writable := slices.Contains(m.GetOptions(), "rw")
		if strings.HasPrefix(m.GetDestination(), "/dev/gpufence/") && writable != (m.GetDestination() == "/dev/gpufence/ledger") {
			t.Errorf("%s has the options %q", m.GetDestination(), m.GetOptions())
		}
	}
	if devices := a.GetLinux().GetDevices(); len(devices) != 1 || devices[0].GetPath() != "/dev/nvidia0" || devices[0].GetMajor() != 1 || devices[0].GetMinor() != 3 {
		t.Errorf("devices %v (pitfall 1: they have to be in the spec)", devices)
	}
	create, stop := a.GetHooks().GetCreateRuntime(), a.GetHooks().GetPoststop()
	want := []string{"gpufence-hook", "createRuntime", "--config", set.ConfigPath, "--socket", set.Socket, "--engine", "cri", "--scope", "/run/containerd/runc/k8s.io"}
	if len(create) != 1 || len(stop) != 1 || create[0].GetPath() != set.HookPath || !slices.Equal(create[0].GetArgs(), want) || create[0].GetTimeout().GetValue() != 10 {
		t.Errorf("hooks %v %v", create, stop)
	}
	if len(a.GetHooks().GetCreateContainer()) != 1 {
		t.Error("the hook of the CDI specification is missing")
	}
}

func TestCreateRefuses(t *testing.T) {
	e, d := newEngine(t), &daemon{}
	run(t, e, settings(t, e), d)
	tests := []struct {
		name string
		pod  *api.PodSandbox
		ctr  *api.Container
		set  func(*daemon)
		want string
	}{
		{"no limit", pod(nil), ctr("r1", nil), nil, "gpufence: E1401 container main of pod notebook has a GPU and no memory.max"},
		{"no unit", pod(map[string]string{"gpufence.dev/memory.max": "4096"}), ctr("r2", nil), nil, `gpufence: E1203 memory.max "4096" has no unit: write 4096Mi`},
		{"does not fit", pod(limit), ctr("r3", nil), func(d *daemon) {
			d.err = &gpufence.Error{Code: "E1402", Message: "GPUMemoryUnavailable: 4 GiB are not free"}
		}, "gpufence: E1402 GPUMemoryUnavailable"},
		{"gpufenced is down", pod(limit), ctr("r4", nil), func(d *daemon) {
			d.err = &gpufence.UnreachableError{Socket: "/run/gpufence/gpufenced.sock", Err: errors.New("connection refused")}
		}, "gpufence: E1501"},
		{"pitfall 46: gpufenced is slow: refused in NRI's time, and not dropped", pod(limit), ctr("r5", nil), func(d *daemon) { d.delay = time.Hour }, "gpufence: E1501"},
		{"something is mounted over our files", pod(limit), ctr("r6", func(c *api.Container) {
			c.Mounts = append(c.Mounts, &api.Mount{Destination: "/dev/gpufence/limits", Source: "/tmp/x", Type: "bind"})
		}), nil, "gpufence: E1708 /tmp/x is mounted at /dev/gpufence/limits"},
		{"pitfall 17: somebody's preload", pod(limit), ctr("r7", func(c *api.Container) {
			c.Mounts = append(c.Mounts, &api.Mount{Destination: "/etc/ld.so.preload", Source: "/usr/local/vgpu/ld.so.preload", Type: "bind"})
		}), nil, "gpufence: E1708 /usr/local/vgpu/ld.so.preload is mounted at /etc/ld.so.preload"},
		{"HAMi's library", pod(limit), ctr("r8", func(c *api.Container) {
			c.Mounts = append(c.Mounts, &api.Mount{Destination: "/usr/local/vgpu/libvgpu.so", Source: "/usr/local/vgpu/libvgpu.so", Type: "bind"})
		}), nil, "gpufence: E1702"},
		{"pitfall 22: privileged", pod(limit), ctr("r9", func(c *api.Container) {
			c.Linux.Devices = []*api.LinuxDevice{{Path: "/dev/kmsg"}, {Path: "/dev/nvidia0"}}
		}), nil, "gpufence: E1703"},
		{"the host's pid namespace", pod(limit), ctr("r10", func(c *api.Container) { c.Linux.Namespaces = []*api.LinuxNamespace{{Type: "mount"}} }), nil, "gpufence: E1703"},
		{"a variable twice", pod(limit), ctr("r11", env("NVIDIA_VISIBLE_DEVICES="+gpu0, "NVIDIA_VISIBLE_DEVICES="+gpu0)), nil, "gpufence: E1002"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			d.set(func(d *daemon) { d.err, d.delay = nil, 0 })
			if tt.set != nil {
				d.set(tt.set)
			}
			a, err := e.create(tt.pod, tt.ctr)
			if err == nil || !strings.Contains(err.Error(), tt.want) {
				t.Fatalf("got %v %v\nwant %s", a, err, tt.want)
			}
		})
	}
	d.set(func(d *daemon) { d.err, d.delay = nil, 0 })
	if _, err := e.create(pod(limit), ctr("after", nil)); err != nil {
		t.Errorf("the plugin is not connected any more: %v", err)
	}
}

// TestLeftAlone: what has no GPU is not changed more than it must be.
func TestLeftAlone(t *testing.T) {
	e, d := newEngine(t), &daemon{none: true}
	run(t, e, settings(t, e), d)
	exempt := pod(nil)
	exempt.Namespace = "kube-system"
	for name, tt := range map[string]struct {
		pod  *api.PodSandbox
		ctr  *api.Container
		vars map[string]string
		deny int
	}{
		"nothing of NVIDIA's":         {pod(nil), ctr("a1", env("PATH=/bin")), map[string]string{}, 0},
		"a sidecar of a CUDA image":   {pod(limit), ctr("a2", env("NVIDIA_VISIBLE_DEVICES=all")), map[string]string{"NVIDIA_VISIBLE_DEVICES": "void"}, 0},
		"a device plugin's namespace": {exempt, ctr("a3", env("NVIDIA_VISIBLE_DEVICES=all")), map[string]string{}, 0},
		"a container that may use anything": {pod(nil), ctr("a4", func(c *api.Container) {
			c.Env = nil
			c.Linux.Resources = &api.LinuxResources{Devices: []*api.LinuxDeviceCgroup{{Allow: true, Access: "rwm"}}}
		}), map[string]string{}, 2},
	} {
		a, err := e.create(tt.pod, tt.ctr)
		if err != nil {
			t.Errorf("%s: %v", name, err)
			continue
		}
		if got := envOf(a); len(got) != len(tt.vars) || got["NVIDIA_VISIBLE_DEVICES"] != tt.vars["NVIDIA_VISIBLE_DEVICES"] {
			t.Errorf("%s: env %q", name, got)
		}
		if len(a.GetMounts()) != 0 || len(a.GetHooks().GetCreateRuntime()) != 0 || len(a.GetLinux().GetDevices()) != 0 || len(a.GetLinux().GetResources().GetDevices()) != tt.deny {
			t.Errorf("%s: %v", name, a)
		}
	}
	d.set(func(d *daemon) { d.err = &gpufence.UnreachableError{Socket: "/s", Err: errors.New("down")} })
	if a, err := e.create(pod(nil), ctr("a5", env("NVIDIA_VISIBLE_DEVICES=all"))); err != nil || envOf(a)["NVIDIA_VISIBLE_DEVICES"] != "void" {
		t.Errorf("a sidecar waits for gpufenced: %v %v", a, err)
	}
}

// other is another plugin: KAI's, NVIDIA's, somebody's.
type other struct {
	adjust func(*api.ContainerAdjustment, *api.Container)
}

func (o other) CreateContainer(_ context.Context, _ *api.PodSandbox, c *api.Container) (*api.ContainerAdjustment, []*api.ContainerUpdate, error) {
	a := &api.ContainerAdjustment{}
	o.adjust(a, c)
	return a, nil, nil
}

func connect(t *testing.T, e *engine, name, index string, adjust func(*api.ContainerAdjustment, *api.Container)) {
	t.Helper()
	s, err := stub.New(other{adjust}, stub.WithPluginName(name), stub.WithPluginIdx(index), stub.WithSocketPath(e.socket), stub.WithOnClose(func() {}), stub.WithLogger(nriLog{quiet()}))
	if err != nil {
		t.Fatal(err)
	}
	if err := s.Start(context.Background()); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(s.Stop)
	e.waitSync()
}

// TestBesideOthers: who comes before us is taken into account, who comes after us may not undo
// anything.
func TestBesideOthers(t *testing.T) {
	visibleTo := func(value string) func(*api.ContainerAdjustment, *api.Container) {
		return func(a *api.ContainerAdjustment, _ *api.Container) {
			a.RemoveEnv("NVIDIA_VISIBLE_DEVICES")
			a.AddEnv("NVIDIA_VISIBLE_DEVICES", value)
		}
	}
	cdiDevice := func(name string) func(*api.ContainerAdjustment, *api.Container) {
		return func(a *api.ContainerAdjustment, _ *api.Container) { a.AddCDIDevice(&api.CDIDevice{Name: name}) }
	}
	annotated := map[string]string{"gpufence.dev/memory.max": "4Gi", "nvidia.cdi.k8s.io/container.main": "nvidia.com/gpu=0"}
	tests := []struct {
		name, index string
		adjust      func(*api.ContainerAdjustment, *api.Container)
		pod         *api.PodSandbox
		env         string
		want        string // of the error
		present     bool
	}{
		{name: "KAI names the GPU before us", index: "10", adjust: func(a *api.ContainerAdjustment, c *api.Container) {
			visibleTo(gpu0)(a, c)
			a.AddEnv("NVIDIA_GPU_MEMORY_LIMIT", "2048")
		}, pod: pod(limit), env: "void"},
		{name: "NVIDIA's injects by annotation, which is read", index: "10", adjust: cdiDevice("nvidia.com/gpu=0"), pod: pod(annotated), env: "void", present: true},
		{name: "a device is added before us", index: "10", adjust: func(a *api.ContainerAdjustment, _ *api.Container) {
			a.AddDevice(&api.LinuxDevice{Path: "/dev/nvidia0", Type: "c", Major: 195})
		}, pod: pod(limit), env: "void", present: true},
		{name: "a GPU by CDI that nobody announced", index: "10", adjust: cdiDevice("nvidia.com/gpu=1"), pod: pod(limit), env: "void", want: "another NRI plugin puts the GPU nvidia.com/gpu=1 into the container"},
		{name: "a device is added behind us", index: "95", adjust: func(a *api.ContainerAdjustment, _ *api.Container) {
			a.AddDevice(&api.LinuxDevice{Path: "/dev/nvidia3", Type: "c", Major: 195, Minor: 3})
		}, pod: pod(limit), env: "void", want: "puts the GPU /dev/nvidia3 into"},
		{name: "somebody sets our variable behind us, by NRI's rules", index: "95", adjust: visibleTo("all"), pod: pod(limit), env: gpu0, want: "another NRI plugin changed the variable NVIDIA_VISIBLE_DEVICES"},
		{name: "somebody mounts over us behind us", index: "95", adjust: func(a *api.ContainerAdjustment, _ *api.Container) {
			a.RemoveMount("/etc/ld.so.preload")
			a.AddMount(&api.Mount{Destination: "/etc/ld.so.preload", Source: "/x", Type: "bind"})
		}, pod: pod(limit), env: gpu0, want: "another NRI plugin changed the mount at /etc/ld.so.preload"},
		{name: "somebody mounts over us before us", index: "10", adjust: func(a *api.ContainerAdjustment, _ *api.Container) {
			a.AddMount(&api.Mount{Destination: "/etc/ld.so.preload", Source: "/x", Type: "bind"})
		}, pod: pod(limit), env: gpu0, want: "E1708 /x is mounted at /etc/ld.so.preload, by the pod or by another NRI plugin"},
		{name: "somebody who does not touch us", index: "95", adjust: func(a *api.ContainerAdjustment, _ *api.Container) { a.AddEnv("OTHER", "1"); a.AddAnnotation("x", "y") }, pod: pod(limit), env: gpu0},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			e, d := newEngine(t), &daemon{}
			run(t, e, settings(t, e), d)
			connect(t, e, "other", tt.index, tt.adjust)
			a, err := e.create(tt.pod, ctr("c", env("NVIDIA_VISIBLE_DEVICES="+tt.env)))
			switch {
			case tt.want != "":
				if err == nil || !strings.Contains(err.Error(), tt.want) || !strings.Contains(err.Error(), "gpufence: E1") {
					t.Errorf("got %v %v", a, err)
				}
			case err != nil:
				t.Error(err)
			case envOf(a)["NVIDIA_VISIBLE_DEVICES"] != "void" || mountsOf(a)["/etc/ld.so.preload"] == "" || len(d.requests) != 1 || d.requests[0].Devices.Present != tt.present:
				t.Errorf("adjusted %v, asked %+v", a, d.requests)
			}
		})
	}
}

// TestRequiredPlugins: the engine's default validator refuses what starts while we are away
// (pitfall 47), and one that rejects hooks refuses ours.
func TestRequiredPlugins(t *testing.T) {
	e := newEngine(t, adaptation.WithDefaultValidator(&validator.DefaultValidatorConfig{Enable: true, RequiredPlugins: []string{"gpufence"}}))
	if _, err := e.create(pod(limit), ctr("away", nil)); err == nil || !strings.Contains(err.Error(), "gpufence") {
		t.Errorf("without the plugin: %v", err)
	}
	run(t, e, settings(t, e), &daemon{})
	if _, err := e.create(pod(limit), ctr("there", nil)); err != nil {
		t.Errorf("with the plugin: %v", err)
	}
	e = newEngine(t, adaptation.WithDefaultValidator(&validator.DefaultValidatorConfig{Enable: true, RejectOCIHookAdjustment: true}))
	run(t, e, settings(t, e), &daemon{})
	if _, err := e.create(pod(limit), ctr("hooks", nil)); err == nil || !strings.Contains(err.Error(), "hook") {
		t.Errorf("hooks are rejected: %v", err)
	}
}

// TestReconnects: the engine restarts (pitfall 48), and what started meanwhile is found.
func TestReconnects(t *testing.T) {
	e, d := newEngine(t), &daemon{}
	run(t, e, settings(t, e), d)
	for range 2 {
		e.stop()
		if _, err := net.Dial("unix", e.socket); err == nil {
			t.Fatal("the engine still listens")
		}
		e.mu.Lock()
		e.pods, e.containers = []*api.PodSandbox{pod(limit)}, []*api.Container{ctr("meanwhile", nil)}
		e.mu.Unlock()
		e.start()
		e.waitSync()
		if _, err := e.create(pod(limit), ctr("c", nil)); err != nil {
			t.Fatal(err)
		}
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if len(d.audits) != 2 || len(d.audits[1].Containers) != 1 || d.audits[1].Containers[0].Key.ID != "meanwhile" || d.requests[len(d.requests)-1].Key.ID != "c" {
		t.Errorf("audits %+v", d.audits)
	}
}

func TestAudit(t *testing.T) {
	e := &engine{socket: "/nowhere"}
	p := New(settings(t, e), &daemon{}, quiet())
	key := func(id string) gpufence.ContainerKey {
		return gpufence.ContainerKey{Engine: quota.EngineCRI, Scope: "/run/containerd/runc/k8s.io", ID: id}
	}
	running := func(id string, limit uint64) gpufence.Container {
		return gpufence.Container{Key: key(id), State: "running", GPUs: []gpufence.ContainerGPU{{UUID: gpu0, Limits: quota.Limits{Max: limit}}}}
	}
	exempt := &api.PodSandbox{Id: "system", Namespace: "kube-system"}
	unlimited := &api.PodSandbox{Id: "plain", Namespace: "team-a", Name: "plain"}
	of := func(pod, id string, change func(*api.Container)) *api.Container {
		c := ctr(id, change)
		c.PodSandboxId = pod
		return c
	}
	containers := []*api.Container{
		ctr("fenced", nil), ctr("missed", nil), ctr("lost", nil),
		ctr("sidecar", env("PATH=/bin")), ctr("claims", env("NVIDIA_VISIBLE_DEVICES=all")),
		ctr("created", func(c *api.Container) { c.State = api.ContainerState_CONTAINER_CREATED }),
		ctr("ended", func(c *api.Container) { c.State = api.ContainerState_CONTAINER_STOPPED }),
		of("system", "plugin", nil), of("plain", "denied", nil), of("gone", "orphan", nil),
	}
	found := p.audit([]*api.PodSandbox{pod(limit), exempt, unlimited}, containers,
		[]gpufence.Container{running("fenced", 4<<30), running("lost", quota.Unlimited), {Key: key("missed"), State: "ended"}})
	got := map[string]string{}
	for _, f := range found {
		got[f.Key.ID] = f.Why
	}
	for id, want := range map[string]string{
		"missed": "did not come through gpufence", "lost": "its annotations were lost on the way", "denied": "it would not have been started: E1401",
	} {
		if !strings.Contains(got[id], want) {
			t.Errorf("%s: %q, want %q", id, got[id], want)
		}
		delete(got, id)
	}
	if len(got) > 0 {
		t.Errorf("found as well: %q", got)
	}
}

// TestStart: what gpufenced does not know does not start.
func TestStart(t *testing.T) {
	e, d := newEngine(t), &daemon{}
	run(t, e, settings(t, e), d)
	start := func(c *api.Container) error {
		return e.a.StartContainer(context.Background(), &api.StartContainerRequest{Pod: pod(limit), Container: c})
	}
	if err := start(ctr("c1", nil)); err == nil || !strings.Contains(err.Error(), "gpufence: E1508") {
		t.Errorf("not registered: %v", err)
	}
	d.set(func(d *daemon) {
		d.running = []gpufence.Container{{Key: gpufence.ContainerKey{Engine: quota.EngineCRI, Scope: "/run/containerd/runc/k8s.io", ID: "c1"}, State: "running"}}
	})
	if err := start(ctr("c1", nil)); err != nil {
		t.Errorf("registered: %v", err)
	}
	if err := start(ctr("c2", env("PATH=/bin"))); err != nil {
		t.Errorf("no GPU: %v", err)
	}
	d.set(func(d *daemon) { d.err = &gpufence.UnreachableError{Socket: "/s", Err: errors.New("down")} })
	if err := start(ctr("c1", nil)); err == nil || !strings.Contains(err.Error(), "gpufence: E1501") {
		t.Errorf("gpufenced is down: %v", err)
	}
}

// TestTwiceIsOnce: a container that was adjusted by another delivery, or before, gets nothing twice.
// TestEventsThatTheEngineKnows: an engine refuses a plugin that asks for more, and containers then start unfenced.
func TestEventsThatTheEngineKnows(t *testing.T) {
	for _, tt := range []struct {
		runtime, version string
		engine           quota.Engine
		validates        bool
	}{
		{"containerd", "v1.7.35", quota.EngineCRI, false},
		{"containerd", "1.7.24~ds1", quota.EngineCRI, false},
		{"containerd", "v2.0.0", quota.EngineCRI, false},
		{"containerd", "v2.1.5+unknown", quota.EngineCRI, false},
		{"containerd", "v2.2.0", quota.EngineCRI, true},
		{"containerd", "v2.10.0-rc.1", quota.EngineCRI, true},
		{"containerd", "v10.0.0", quota.EngineCRI, true},
		{"containerd", "unknown", quota.EngineCRI, true},
		{"cri-o", "1.34.3", quota.EngineCRIO, false},
		{"cri-o", "1.36.3", quota.EngineCRIO, true},
		{"CRI-O", "1.36.0-dev", quota.EngineCRIO, true},
	} {
		p := New(Settings{}, &daemon{}, quiet())
		events, err := p.Configure(t.Context(), "", tt.runtime, tt.version)
		// 0 are all that are handled.
		if err != nil || (events == 0) != tt.validates || p.engineNow() != tt.engine {
			t.Errorf("%s %s: events %s of %s, %v", tt.runtime, tt.version, events.PrettyString(), p.engineNow(), err)
		}
		if events != 0 && (events.IsSet(api.Event_VALIDATE_CONTAINER_ADJUSTMENT) || !events.IsSet(api.Event_CREATE_CONTAINER) || !events.IsSet(api.Event_START_CONTAINER) || !events.IsSet(api.Event_REMOVE_CONTAINER)) {
			t.Errorf("%s %s: events %s", tt.runtime, tt.version, events.PrettyString())
		}
	}
}

// TestRemoved: what is removed gives back what it was promised, also where it never started, and nobody waits for that.
func TestRemoved(t *testing.T) {
	e := newEngine(t)
	d := &daemon{}
	run(t, e, settings(t, e), d)
	system := pod(limit)
	system.Namespace = "kube-system"
	for _, tt := range []struct {
		name string
		pod  *api.PodSandbox
		ctr  *api.Container
		err  error
		want bool
	}{
		{"never started", pod(limit), ctr("refused", env("NVIDIA_VISIBLE_DEVICES="+gpu0)), nil, true},
		{"gpufenced is away", pod(limit), ctr("away", env("NVIDIA_VISIBLE_DEVICES="+gpu0)), &gpufence.UnreachableError{Socket: "/s", Err: errors.New("down")}, true},
		{"without a GPU", pod(nil), ctr("plain", env("PATH=/bin")), nil, false},
		{"wrong, so never prepared", pod(map[string]string{"gpufence.dev/memory.max": "4"}), ctr("wrong", env("NVIDIA_VISIBLE_DEVICES="+gpu0)), nil, false},
		{"left alone", system, ctr("system", env("NVIDIA_VISIBLE_DEVICES="+gpu0)), nil, false},
	} {
		d.set(func(d *daemon) { d.err, d.released = tt.err, nil })
		if err := e.a.RemoveContainer(t.Context(), &api.RemoveContainerRequest{Pod: tt.pod, Container: tt.ctr}); err != nil {
			t.Errorf("%s: %v", tt.name, err)
		}
		var got []string
		d.set(func(d *daemon) { got = d.released })
		if (len(got) == 1 && got[0] == tt.ctr.GetId()) != tt.want || !tt.want && len(got) > 0 {
			t.Errorf("%s: given back %q, want %v", tt.name, got, tt.want)
		}
	}
}

func TestTwiceIsOnce(t *testing.T) {
	e, d := newEngine(t), &daemon{}
	run(t, e, settings(t, e), d)
	first, err := e.create(pod(limit), ctr("c", nil))
	if err != nil {
		t.Fatal(err)
	}
	again := ctr("c", func(c *api.Container) {
		c.Env = []string{"PATH=/bin", "NVIDIA_VISIBLE_DEVICES=void", "SIM=1"}
		c.Linux.Devices = first.GetLinux().GetDevices()
		c.Mounts = append(c.Mounts, first.GetMounts()...)
		c.Hooks = first.GetHooks()
	})
	second, err := e.create(pod(limit), again)
	if err != nil {
		t.Fatal(err)
	}
	if len(second.GetLinux().GetDevices()) != 0 || len(second.GetHooks().GetCreateRuntime()) != 0 || len(second.GetHooks().GetPoststop()) != 0 {
		t.Errorf("added again: %v", second)
	}
	for dest, source := range mountsOf(second) {
		if mountsOf(first)[dest] != source {
			t.Errorf("at %s is now %s", dest, source)
		}
	}
}

func TestMajors(t *testing.T) {
	got := Majors("Character devices:\n  1 mem\n195 nvidia\n195 nvidiactl\n509 nvidia-uvm\n\nBlock devices:\n  8 nvidia-no\n")
	if !slices.Equal(got, []int64{195, 509}) {
		t.Errorf("got %v", got)
	}
}
