// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/sirupsen/logrus"
	"golang.org/x/sys/unix"

	"github.com/gpufence/gpufence/enforcer/act"
	"github.com/gpufence/gpufence/enforcer/api"
	"github.com/gpufence/gpufence/enforcer/config"
	"github.com/gpufence/gpufence/enforcer/fence"
	"github.com/gpufence/gpufence/enforcer/gpu"
	"github.com/gpufence/gpufence/enforcer/ledger"
	"github.com/gpufence/gpufence/enforcer/quota"
)

const (
	mib = uint64(1) << 20
	gib = uint64(1) << 30

	uuid0 = "GPU-00000000-0000-0000-0000-000000000000"
	uuid1 = "GPU-11111111-1111-1111-1111-111111111111"

	// patience bounds what is waited for; only a hang takes so long.
	patience = 20 * time.Second
)

// fakeNVML is a node's NVML whose answers a test sets.
type fakeNVML struct {
	mu      sync.Mutex
	initErr error
	gpus    []*fakeGPU
	inits   int
	downs   int
}

func (f *fakeNVML) Init() error {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.inits++
	return f.initErr
}
func (f *fakeNVML) Shutdown() error {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.downs++
	return nil
}
func (f *fakeNVML) Driver() (string, error) { return "570.00", nil }
func (f *fakeNVML) Devices() ([]gpu.Device, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	var out []gpu.Device
	for _, g := range f.gpus {
		out = append(out, g)
	}
	return out, nil
}

// fakeGPU has 16 GiB.
type fakeGPU struct {
	info gpu.Info

	mu      sync.Mutex
	use     map[int]uint64
	unknown []int // pids listed without a size
	mps     []int // pids in the MPS list, with what they use
	extra   uint64
	listErr map[gpu.List]error
	memErr  error
	hang    chan struct{} // calls wait for it
	takes   time.Duration // a list, after it was looked at
	samples int
}

func newFakeGPU(index int, uuid string) *fakeGPU {
	return &fakeGPU{
		info: gpu.Info{UUID: uuid, Index: index, Minor: index, Name: "Fake", TotalBytes: 16 * gib},
		use:  map[int]uint64{}, listErr: map[gpu.List]error{},
	}
}

func (g *fakeGPU) Info() gpu.Info { return g.info }

func (g *fakeGPU) wait() {
	g.mu.Lock()
	hang := g.hang
	g.mu.Unlock()
	if hang != nil {
		<-hang
	}
}

func (g *fakeGPU) Memory() (gpu.Memory, error) {
	g.wait()
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.memErr != nil {
		return gpu.Memory{}, g.memErr
	}
	used := g.extra
	for _, b := range g.use {
		used += b
	}
	return gpu.Memory{TotalBytes: 16 * gib, UsedBytes: used, FreeBytes: 16*gib - used}, nil
}

func (g *fakeGPU) Processes(l gpu.List) ([]gpu.Process, error) {
	g.wait()
	out, takes, err := g.list(l)
	time.Sleep(takes) // what is answered is of the beginning
	return out, err
}

func (g *fakeGPU) list(l gpu.List) ([]gpu.Process, time.Duration, error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if err := g.listErr[l]; err != nil {
		return nil, 0, err
	}
	var out []gpu.Process
	if l == gpu.ListMPS {
		for _, pid := range g.mps {
			out = append(out, gpu.Process{PID: pid, Bytes: g.use[pid], Known: true})
		}
	}
	if l != gpu.ListCompute {
		return out, 0, nil
	}
	g.samples++
	for pid, b := range g.use {
		out = append(out, gpu.Process{PID: pid, Bytes: b, Known: true})
	}
	for _, pid := range g.unknown {
		out = append(out, gpu.Process{PID: pid})
	}
	return out, g.takes, nil
}

// count is how often it was sampled.
func (g *fakeGPU) count() int {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.samples
}

func (g *fakeGPU) set(pid int, bytes uint64) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if bytes == 0 {
		delete(g.use, pid)
		return
	}
	g.use[pid] = bytes
}

func (g *fakeGPU) change(f func()) {
	g.mu.Lock()
	defer g.mu.Unlock()
	f()
}

// bench is one node: folders, NVML, and gpufenced, which may be dropped and made again.
type bench struct {
	t    *testing.T
	cfg  config.Config
	nvml *fakeNVML
	gpu  *fakeGPU
	host *act.Host
	log  *logBuffer
	tmp  bool // real tmpfs for the pages

	load   func() (config.Loaded, error)
	notify func(string)
	gate   fence.GateOptions

	d    *Daemon
	stop func()
}

// TestMain also is the process that freezes.
func TestMain(m *testing.M) {
	if len(os.Args) == 3 && os.Args[1] == act.GuardCommand {
		if err := act.GuardMain(os.Stdin, os.Stdout, os.Args[2]); err != nil {
			os.Exit(1)
		}
		return
	}
	os.Exit(m.Run())
}

type logBuffer struct {
	mu sync.Mutex
	b  strings.Builder
}

func (l *logBuffer) Write(b []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(b)
}

func (l *logBuffer) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}

// must skips what needs root, loudly, unless the environment says that nothing may be skipped.
func mustRoot(t *testing.T) {
	t.Helper()
	if os.Geteuid() == 0 {
		return
	}
	if os.Getenv("GPUFENCE_MUST") == "1" {
		t.Fatal("needs root")
	}
	t.Skip("SKIPPED: needs root for cgroups")
}

func newBench(t *testing.T, edit ...func(*config.Config)) *bench {
	t.Helper()
	mustRoot(t)
	dir := t.TempDir()
	lib := filepath.Join(dir, "libgpufence.so")
	if err := os.WriteFile(lib, []byte("not really"), 0o644); err != nil {
		t.Fatal(err)
	}
	cdiDir := filepath.Join(dir, "cdi")
	if err := os.Mkdir(cdiDir, 0o755); err != nil {
		t.Fatal(err)
	}
	spec := `{"cdiVersion":"0.6.0","kind":"gpufence.dev/simgpu","devices":[
		{"name":"0","containerEdits":{"env":["A=0"]}},{"name":"` + uuid1 + `","containerEdits":{"env":["A=1"]}}]}`
	if err := os.WriteFile(filepath.Join(cdiDir, "simgpu.json"), []byte(spec), 0o644); err != nil {
		t.Fatal(err)
	}
	cfg := config.Default()
	cfg.RunDir, cfg.StateDir = filepath.Join(dir, "run"), filepath.Join(dir, "lib")
	cfg.Socket = filepath.Join(dir, "s")
	cfg.GatePins = filepath.Join(dir, "pins") // in no bpf filesystem: the machine's own gate is nobody's here
	cfg.ShimLibrary = lib
	cfg.CDISpecDirs = []string{cdiDir}
	cfg.Sample, cfg.SampleIdle, cfg.SampleDeadline = 20*time.Millisecond, 40*time.Millisecond, 300*time.Millisecond
	cfg.Settle, cfg.KillInterval = 100*time.Millisecond, 10*time.Millisecond
	cfg.ContextBytes = 256 * mib
	for _, e := range edit {
		e(&cfg)
	}
	host, err := act.NewHost("", "")
	if err != nil {
		t.Fatal(err)
	}
	g := newFakeGPU(0, uuid0)
	b := &bench{t: t, cfg: cfg, nvml: &fakeNVML{gpus: []*fakeGPU{g}}, gpu: g, host: host, log: &logBuffer{}}
	t.Cleanup(func() {
		b.drop()
		b.unmount()
		if t.Failed() {
			t.Log(b.log.String())
		}
	})
	return b
}

func (b *bench) unmount() {
	text, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		b.t.Error(err)
		return
	}
	for line := range strings.Lines(string(text)) {
		if f := strings.Fields(line); len(f) > 4 && strings.HasPrefix(f[4], b.cfg.RunDir+"/") {
			if err := unix.Unmount(f[4], unix.MNT_DETACH); err != nil {
				b.t.Error(err)
			}
		}
	}
}

// start makes a gpufenced and runs it.
func (b *bench) start() *Daemon {
	b.t.Helper()
	log := logrus.New()
	log.SetOutput(b.log)
	d, err := New(Options{Config: b.cfg, Library: b.nvml, Host: b.host, Log: log, PlainPages: !b.tmp, Load: b.load, Notify: b.notify, Gate: b.gate})
	if err != nil {
		b.t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- d.Run(ctx) }()
	b.d = d
	b.stop = func() {
		cancel()
		if err := <-done; err != nil {
			b.t.Error(err)
		}
		if err := d.Close(); err != nil {
			b.t.Error(err)
		}
	}
	return d
}

// drop ends gpufenced as a SIGKILL would, as far as one process can: from this moment nothing is
// written any more.
func (b *bench) drop() {
	if b.stop == nil {
		return
	}
	b.d.mu.Lock()
	clear(b.d.dirty)
	b.d.mu.Unlock()
	b.stop()
	b.stop = nil
}

// process is a container's first process, in cgroups of its own.
type process struct {
	cmd  *exec.Cmd
	dirs []string
	pid  int
	done chan struct{}
}

var cgroupCount int

// container starts a process in cgroups that this test makes, as a runtime would.
func (b *bench) container() *process {
	b.t.Helper()
	cgroupCount++
	return b.containerIn(fmt.Sprintf("gpufence-test-%d-%d", os.Getpid(), cgroupCount))
}

// containerIn starts a process in cgroups of that name.
func (b *bench) containerIn(name string) *process {
	b.t.Helper()
	p := &process{done: make(chan struct{})}
	for _, root := range []string{"/sys/fs/cgroup/freezer", "/sys/fs/cgroup/unified", "/sys/fs/cgroup/pids", "/sys/fs/cgroup"} {
		if _, err := os.Stat(filepath.Join(root, "cgroup.procs")); err != nil {
			continue
		}
		dir := filepath.Join(root, name)
		if err := os.Mkdir(dir, 0o755); err != nil {
			b.t.Fatal(err)
		}
		p.dirs = append(p.dirs, dir)
	}
	if len(p.dirs) == 0 {
		b.t.Fatal("no cgroup hierarchy can be used here")
	}
	p.cmd = exec.CommandContext(context.Background(), "sleep", "1000") // ended by the cleanup below
	if err := p.cmd.Start(); err != nil {
		b.t.Fatal(err)
	}
	p.pid = p.cmd.Process.Pid
	go func() {
		_ = p.cmd.Wait() // how it ended is looked at by those who care
		close(p.done)
	}()
	for _, dir := range p.dirs {
		if err := os.WriteFile(filepath.Join(dir, "cgroup.procs"), fmt.Appendf(nil, "%d", p.pid), 0); err != nil {
			b.t.Fatal(err)
		}
	}
	b.t.Cleanup(func() { b.finish(p) })
	return p
}

// also puts one more process into a container's cgroups.
func (b *bench) also(p *process) *exec.Cmd {
	b.t.Helper()
	cmd := exec.CommandContext(context.Background(), "sleep", "1000") // ended by the cleanup below
	if err := cmd.Start(); err != nil {
		b.t.Fatal(err)
	}
	b.t.Cleanup(func() {
		_ = cmd.Process.Kill() // it may be dead
		_ = cmd.Wait()
	})
	for _, dir := range p.dirs {
		if err := os.WriteFile(filepath.Join(dir, "cgroup.procs"), fmt.Appendf(nil, "%d", cmd.Process.Pid), 0); err != nil {
			b.t.Fatal(err)
		}
	}
	return cmd
}

// finish ends the process and removes its cgroups.
func (b *bench) finish(p *process) {
	_ = p.cmd.Process.Kill() // it may be dead
	<-p.done
	for _, dir := range p.dirs {
		deadline := time.Now().Add(patience)
		for {
			err := os.Remove(dir)
			if err == nil || errors.Is(err, os.ErrNotExist) {
				break
			}
			if time.Now().After(deadline) {
				b.t.Errorf("remove cgroup: %v", err)
				break
			}
			time.Sleep(5 * time.Millisecond)
		}
	}
	p.dirs = nil
}

func (p *process) alive() bool {
	select {
	case <-p.done:
		return false
	default:
		return true
	}
}

// signalled tells by which signal a process ended.
func (p *process) signalled() syscall.Signal {
	<-p.done
	return p.cmd.ProcessState.Sys().(syscall.WaitStatus).Signal()
}

func request(id string, annotations ...string) api.PrepareRequest {
	req := api.PrepareRequest{
		Key:           api.ContainerKey{Engine: quota.EngineCRI, Scope: "k8s.io", ID: id},
		Pod:           api.PodRef{ID: "pod-" + id, Namespace: "default", Name: id},
		ContainerName: "main", Bundle: "/bundle", ShimDir: ledger.ContainerDir,
		Annotations: map[string]string{}, Devices: api.DeviceRequest{Selectors: []string{"0"}},
	}
	for _, a := range annotations {
		k, v, _ := strings.Cut(a, "=")
		req.Annotations["gpufence.dev/"+k] = v
	}
	return req
}

func (b *bench) prepare(req api.PrepareRequest) api.PrepareResponse {
	b.t.Helper()
	resp, err := b.d.Prepare(context.Background(), req)
	if err != nil {
		b.t.Fatalf("prepare %s: %v", req.Key.ID, err)
	}
	return resp
}

// run prepares and registers a container with a process.
func (b *bench) run(req api.PrepareRequest) *process {
	b.t.Helper()
	b.prepare(req)
	p := b.container()
	if _, err := b.d.Register(context.Background(), api.RegisterRequest{Key: req.Key, PID: p.pid}); err != nil {
		b.t.Fatalf("register %s: %v", req.Key.ID, err)
	}
	return p
}

func (b *bench) view(id string) api.Container {
	b.t.Helper()
	c, err := b.d.Container(context.Background(), id)
	if err != nil {
		b.t.Fatal(err)
	}
	return c
}

func (b *bench) events(kinds ...string) []api.Event {
	b.t.Helper()
	var out []api.Event
	err := b.d.Events(context.Background(), 0, false, func(ev *api.Event) error {
		if ev != nil && (len(kinds) == 0 || slices.Contains(kinds, ev.Type)) {
			out = append(out, *ev)
		}
		return nil
	})
	if err != nil {
		b.t.Fatal(err)
	}
	return out
}

// eventually waits for something that must come.
func (b *bench) eventually(what string, f func() bool) {
	b.t.Helper()
	deadline := time.Now().Add(patience)
	for !f() {
		if time.Now().After(deadline) {
			b.t.Fatalf("it did not happen: %s", what)
		}
		time.Sleep(2 * time.Millisecond)
	}
}

// samples waits until n more samples were processed.
func (b *bench) samples(n uint64) {
	b.t.Helper()
	get := func() uint64 {
		b.d.mu.Lock()
		defer b.d.mu.Unlock()
		if g := b.d.gpus[b.gpu.info.UUID]; g != nil {
			return g.number
		}
		return 0
	}
	from := get()
	b.eventually("samples go on", func() bool { return get() >= from+n })
}

func wantCode(t *testing.T, err error, code quota.Code) {
	t.Helper()
	if quota.CodeOf(err) != code {
		t.Errorf("got %v, want %s", err, code)
	}
	if err != nil && strings.Contains(err.Error(), "\n") {
		t.Errorf("not one sentence: %q", err)
	}
}

func quiet() *logrus.Logger {
	l := logrus.New()
	l.SetOutput(io.Discard)
	return l
}
