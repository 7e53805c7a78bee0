// SPDX-License-Identifier: Apache-2.0

package server

import (
	"context"
	"errors"
	"io/fs"
	"log"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/spf13/pflag"

	"github.com/gpufence/gpufence/tests/simgpu/driver"
	"github.com/gpufence/gpufence/tests/simgpu/wire"
)

// patience bounds waiting for what should happen at once; reaching it is a failure.
const patience = 20 * time.Second

// start runs a simgpud with these flags and gives the folder of its sockets.
func start(t *testing.T, args ...string) (string, *Server) {
	t.Helper()
	// Not t.TempDir: a socket's path has 108 bytes, and test names are long.
	dir, err := os.MkdirTemp("", "simgpu-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	var f Flags
	set := pflag.NewFlagSet("simgpud", pflag.ContinueOnError)
	f.Register(set)
	if err := set.Parse(append([]string{"--dir", dir}, args...)); err != nil {
		t.Fatal(err)
	}
	cfg, err := f.Config()
	if err != nil {
		t.Fatal(err)
	}
	cfg.Log = log.New(t.Output(), "simgpud: ", 0)
	s, err := New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	ready, done := make(chan struct{}), make(chan error, 1)
	go func() { done <- s.Run(ctx, func() { close(ready) }) }()
	select {
	case <-ready:
	case err := <-done:
		t.Fatal(err)
	}
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Errorf("stop: %v", err)
		}
		for _, name := range []string{"ctl", "gpu0", "admin"} {
			if _, err := os.Lstat(filepath.Join(dir, name)); !errors.Is(err, fs.ErrNotExist) {
				t.Errorf("%s is left: %v", name, err)
			}
		}
	})
	return dir, s
}

func dial(t *testing.T, dir, name string) *net.UnixConn {
	t.Helper()
	conn, err := net.Dial("unixpacket", filepath.Join(dir, name))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close() })
	return conn.(*net.UnixConn)
}

func ask(t *testing.T, conn *net.UnixConn, op wire.Op, args ...uint64) (wire.Rep, []byte) {
	t.Helper()
	r := wire.Req{Op: op}
	copy(r.Arg[:], args)
	return send(t, conn, r.Encode())
}

func send(t *testing.T, conn *net.UnixConn, packet []byte) (wire.Rep, []byte) {
	t.Helper()
	if err := conn.SetDeadline(time.Now().Add(patience)); err != nil {
		t.Fatal(err)
	}
	if _, err := conn.Write(packet); err != nil {
		t.Fatal(err)
	}
	buf := make([]byte, wire.PacketMax)
	n, err := conn.Read(buf)
	if err != nil {
		t.Fatal(err)
	}
	rep, payload, err := wire.DecodeRep(buf[:n])
	if err != nil {
		t.Fatal(err)
	}
	return rep, payload
}

// until waits for a condition.
func until(t *testing.T, what string, ok func() bool) {
	t.Helper()
	for end := time.Now().Add(patience); !ok(); time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("%s: not within %s", what, patience)
		}
	}
}

func TestOpenFileOfThisProcess(t *testing.T) {
	t.Parallel()
	dir, s := start(t)
	gpu, ctl := dial(t, dir, "gpu0"), dial(t, dir, "ctl")
	ctx, _ := ask(t, gpu, wire.OpCtxCreate)
	a, _ := ask(t, gpu, wire.OpAlloc, ctx.Val[0], 64<<20, uint64(wire.KindDevice))
	if ctx.Status != wire.OK || a.Status != wire.OK || a.Val[1] != 64<<20 || a.Val[4] != 64<<20 {
		t.Fatalf("context %+v, allocation %+v", ctx, a)
	}
	rows, payload := ask(t, ctl, wire.OpNVMLProcs, 0, uint64(wire.ListCompute))
	want := wire.EncodeProcs([]wire.Proc{{PID: uint32(os.Getpid()), UsedBytes: (104 + 64) << 20}})
	if rows.Val[0] != 1 || string(payload) != string(want) {
		t.Errorf("rows %+v, %x, want %x", rows, payload, want)
	}
	p := s.State().GPUs[0].Processes[0]
	if p.PID != os.Getpid() || p.Start == 0 || p.Command == "" || p.Cgroup == "" {
		t.Errorf("owner: %+v", p)
	}
	if info, _ := ask(t, gpu, wire.OpMemInfo); info.Val[1]-info.Val[0] != (104+64)<<20 {
		t.Errorf("cuMemGetInfo's numbers: %+v", info)
	}
	if free, _ := ask(t, gpu, wire.OpFree, a.Val[0]); free.Status != wire.OK || free.Val[0] != 64<<20 {
		t.Errorf("free: %+v", free)
	}
	if err := gpu.Close(); err != nil {
		t.Fatal(err)
	}
	until(t, "the context goes with the file", func() bool { return s.State().GPUs[0].UsedBytes == 0 })
	if h := s.History(os.Getpid()); len(h) != 1 || len(h[0].Points) != 4 || h[0].PeakBytes != (104+64)<<20 {
		t.Errorf("history: %+v", h)
	}
}

func TestMalformedAndUnknownRequests(t *testing.T) {
	t.Parallel()
	dir, _ := start(t)
	gpu, ctl := dial(t, dir, "gpu0"), dial(t, dir, "ctl")
	r := wire.Req{Op: wire.OpMemInfo}
	good := r.Encode()
	for name, packet := range map[string][]byte{
		"one byte": {1}, "short": good[:63], "long": append(good[:64:64], 0), "huge": make([]byte, 60000), "magic": append([]byte{9}, good[1:]...),
	} {
		if rep, _ := send(t, gpu, packet); rep.Status != wire.Invalid {
			t.Errorf("%s: %+v", name, rep)
		}
	}
	for _, tt := range []struct {
		conn *net.UnixConn
		op   wire.Op
		arg  uint64
		want wire.Status
	}{
		{gpu, 0, 0, wire.Invalid}, {gpu, wire.OpNVMLMemory, 0, wire.Invalid}, {gpu, wire.OpFree, 1, wire.NotFound},
		{gpu, wire.OpCtxDestroy, 1, wire.NotFound}, {gpu, wire.OpCtxCreate, 9, wire.Invalid}, {gpu, wire.OpLaunch, 1, wire.NotFound},
		{ctl, wire.OpAlloc, 0, wire.Invalid}, {ctl, wire.OpNVMLMemory, 1, wire.NotFound}, {ctl, wire.OpNVMLMemory, ^uint64(0), wire.NotFound},
		{ctl, wire.OpDevice, 64, wire.NotFound}, {gpu, wire.OpMemInfo, 0, wire.OK}, {ctl, wire.OpNode, 0, wire.OK},
	} {
		if rep, payload := ask(t, tt.conn, tt.op, tt.arg); rep.Status != tt.want || rep.Status != wire.OK && len(payload) > 0 {
			t.Errorf("operation %d of %d: %+v with %d bytes, want status %d", tt.op, tt.arg, rep, len(payload), tt.want)
		}
	}
}

// A forked child that shares the open file keeps the memory alive; the owner stays the parent.
func TestSharedOpenFile(t *testing.T) {
	t.Parallel()
	dir, s := start(t)
	gpu := dial(t, dir, "gpu0")
	ask(t, gpu, wire.OpAlloc, 0, 64<<20)
	file, err := gpu.File()
	if err != nil {
		t.Fatal(err)
	}
	child := exec.CommandContext(t.Context(), "sleep", "1000")
	child.ExtraFiles = []*os.File{file}
	if err := child.Start(); err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(file.Close(), gpu.Close()); err != nil {
		t.Fatal(err)
	}
	time.Sleep(50 * time.Millisecond) // long enough for a wrong release to happen
	st := s.State().GPUs[0]
	if st.UsedBytes != 64<<20 || st.Processes[0].PID != os.Getpid() {
		t.Errorf("while the child has it: %+v", st)
	}
	if err := child.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = child.Wait() // killed
	until(t, "the last copy closes", func() bool { return s.State().GPUs[0].UsedBytes == 0 })
}

func TestKnobsAtRunTime(t *testing.T) {
	t.Parallel()
	dir, _ := start(t, "--gpus", "2")
	c := NewClient(dir)
	one := 1
	if err := c.Set(t.Context(), Settings{GPU: &one, Knobs: map[string]string{"used-by-others": "1Gi", "lost": "1"}}); err != nil {
		t.Fatal(err)
	}
	if err := c.Set(t.Context(), Settings{Knobs: map[string]string{"nvml-lag": "10ms"}}); err != nil {
		t.Fatal(err)
	}
	st, err := c.State(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if st.GPUs[0].UsedBytes != 0 || st.GPUs[1].UsedBytes != 1<<30 || st.GPUs[0].Knobs["nvml-lag"] != "10ms" || st.GPUs[1].Knobs["lost"] != "1" {
		t.Errorf("state: %+v", st)
	}
	two := 2
	for name, set := range map[string]Settings{
		"unknown knob": {Knobs: map[string]string{"used-by-others": "5Gi", "nosuch": "1"}},
		"bad value":    {Knobs: map[string]string{"nvml-lag": "never", "used-by-others": "5Gi"}},
		"no such GPU":  {GPU: &two, Knobs: map[string]string{"used-by-others": "5Gi"}},
	} {
		if err := c.Set(t.Context(), set); err == nil {
			t.Errorf("%s: was set", name)
		}
	}
	if st, err = c.State(t.Context()); err != nil || st.GPUs[0].UsedBytes != 0 {
		t.Errorf("a refused set changed something: %+v, %v", st, err)
	}
	if rep, _ := ask(t, dial(t, dir, "ctl"), wire.OpNVMLMemory, 1); rep.Status != wire.Lost {
		t.Errorf("lost GPU: %+v", rep)
	}
}

func TestHungCallKeepsTheOtherGPUFree(t *testing.T) {
	t.Parallel()
	dir, s := start(t, "--gpus", "2")
	zero := 0
	if err := s.Set(Settings{GPU: &zero, Knobs: map[string]string{"hang": "nvml"}}); err != nil {
		t.Fatal(err)
	}
	answered := make(chan wire.Status, 1)
	hung, fine := dial(t, dir, "ctl"), dial(t, dir, "ctl")
	go func() {
		r := wire.Req{Op: wire.OpNVMLMemory}
		buf := make([]byte, wire.PacketMax)
		if _, err := hung.Write(r.Encode()); err != nil {
			answered <- -1
			return
		}
		n, err := hung.Read(buf)
		rep, _, decodeErr := wire.DecodeRep(buf[:max(n, 0)])
		if errors.Join(err, decodeErr) != nil {
			answered <- -2
			return
		}
		answered <- rep.Status
	}()
	if rep, _ := ask(t, fine, wire.OpNVMLMemory, 1); rep.Status != wire.OK {
		t.Errorf("the other GPU: %+v", rep)
	}
	if rep, _ := ask(t, dial(t, dir, "gpu0"), wire.OpMemInfo); rep.Status != wire.OK {
		t.Errorf("CUDA on the GPU whose NVML hangs: %+v", rep)
	}
	select {
	case st := <-answered:
		t.Fatalf("the hung call was answered: %d", st)
	case <-time.After(50 * time.Millisecond):
	}
	if err := s.Set(Settings{GPU: &zero, Knobs: map[string]string{"hang": "0"}}); err != nil {
		t.Fatal(err)
	}
	if st := <-answered; st != wire.OK {
		t.Errorf("after the hang: %d", st)
	}
}

func TestCallCost(t *testing.T) {
	t.Parallel()
	dir, _ := start(t, "--call-cost", "30ms")
	ctl, gpu := dial(t, dir, "ctl"), dial(t, dir, "gpu0")
	begin := time.Now()
	ask(t, ctl, wire.OpNVMLProcs, 0, 0)
	if d := time.Since(begin); d < 30*time.Millisecond {
		t.Errorf("a query that costs 30 ms took %s", d)
	}
	begin = time.Now()
	ask(t, gpu, wire.OpInfo) // not what NVML asks
	ask(t, ctl, wire.OpNode)
	if d := time.Since(begin); d > patience {
		t.Errorf("other calls took %s", d)
	}
}

func TestFreeLagEndsByItself(t *testing.T) {
	t.Parallel()
	dir, s := start(t, "--free-lag", "50ms")
	gpu := dial(t, dir, "gpu0")
	ask(t, gpu, wire.OpAlloc, 0, 64<<20)
	begin := Now()
	if err := gpu.Close(); err != nil {
		t.Fatal(err)
	}
	until(t, "memory is freed", func() bool { return s.gpus[0].usedNow() == 0 })
	if d := time.Duration(Now() - begin); d < 50*time.Millisecond {
		t.Errorf("freed after %s", d)
	}
}

// usedNow looks without letting time pass in the model: that is tick's work.
func (g *gpu) usedNow() uint64 {
	g.mu.Lock()
	defer g.mu.Unlock()
	free, total, err := g.model.Open(0, driver.Owner{}).MemInfo(0)
	if err != nil {
		return 1
	}
	return total - free
}

func TestTwoServersInOneFolder(t *testing.T) {
	t.Parallel()
	dir, _ := start(t)
	s, err := New(Config{Dir: dir})
	if err != nil {
		t.Fatal(err)
	}
	if err := s.Run(t.Context(), func() { t.Error("the second one serves") }); err == nil || !strings.Contains(err.Error(), "another simgpud") {
		t.Errorf("the second one: %v", err)
	}
	if rep, _ := ask(t, dial(t, dir, "ctl"), wire.OpNode); rep.Status != wire.OK {
		t.Errorf("the first one afterwards: %+v", rep)
	}
}

func TestStaleSocketsAreReplaced(t *testing.T) {
	t.Parallel()
	dir, err := os.MkdirTemp("", "simgpu-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	l, err := net.ListenUnix("unixpacket", &net.UnixAddr{Name: filepath.Join(dir, "ctl"), Net: "unixpacket"})
	if err != nil {
		t.Fatal(err)
	}
	l.SetUnlinkOnClose(false)
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
	s, err := New(Config{Dir: dir})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	served := false
	if err := s.Run(ctx, func() { served = true; cancel() }); err != nil || !served {
		t.Errorf("over a stale socket: %v, served: %v", err, served)
	}
}

func TestModes(t *testing.T) {
	t.Parallel()
	dir, _ := start(t)
	for name, want := range map[string]fs.FileMode{"ctl": 0o666, "gpu0": 0o666, "admin": 0o600} {
		st, err := os.Stat(filepath.Join(dir, name))
		if err != nil || st.Mode().Perm() != want {
			t.Errorf("%s: %v, %v, want %v", name, st, err, want)
		}
	}
}

func TestBadFlags(t *testing.T) {
	t.Parallel()
	for _, args := range [][]string{
		{"--cuda-version", "12"}, {"--cuda-version", "a.b"}, {"--memory", "lots"}, {"--model", "t5"}, {"--uuid", "GPU-1"},
		{"--gpus", "-1"}, {"--uuid", driver.UUIDText([16]byte{1}) + "," + driver.UUIDText([16]byte{2})}, {"--reserved", "x"}, {"--nvml-lag", "x"}, {"--hang", "x"},
	} {
		var f Flags
		set := pflag.NewFlagSet("simgpud", pflag.ContinueOnError)
		f.Register(set)
		if err := set.Parse(args); err != nil {
			t.Fatal(err)
		}
		if _, err := f.Config(); err == nil {
			t.Errorf("%q was taken", args)
		}
	}
	for _, cfg := range []Config{
		{GPUs: make([]driver.Config, 65)},
		{GPUs: []driver.Config{{TotalBytes: 1 << 30, Instances: 8}}},
		{GPUs: []driver.Config{{TotalBytes: 1 << 30, Instances: -1}}},
		{GPUs: []driver.Config{{TotalBytes: 256 << 20, Instances: 7}}},
		{GPUs: []driver.Config{{TotalBytes: 1}}},
		{GPUs: []driver.Config{{TotalBytes: 1 << 30, ReservedBytes: 1 << 30}}},
		{Knobs: driver.Knobs{NVMLLag: time.Hour}},
	} {
		if _, err := New(cfg); err == nil {
			t.Errorf("%+v was taken", cfg)
		}
	}
}

func TestFlagsPerGPU(t *testing.T) {
	t.Parallel()
	u := driver.UUIDText([16]byte{0xaa})
	_, s := start(t, "--gpus", "3", "--model", "t4,a100", "--memory", "8GiB,40GiB", "--name", "one,two", "--uuid", u)
	gpus := s.State().GPUs
	if gpus[0].UUID != u || gpus[1].UUID == gpus[2].UUID || gpus[0].TotalBytes != 8<<30 || gpus[2].TotalBytes != 40<<30 ||
		gpus[2].Name != "two" || gpus[0].ContextBytes != 104<<20 || gpus[2].ContextBytes != 420<<20 {
		t.Errorf("GPUs: %+v", gpus)
	}
}

func TestParseStat(t *testing.T) {
	t.Parallel()
	const rest = " S 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 4711 20 21"
	for text, want := range map[string]string{"1 (a) b)" + rest: "a) b", "1 ()" + rest: "", "1 (x\ny)" + rest: "x\ny"} {
		if at, name, err := parseStat([]byte(text)); err != nil || at != 4711 || name != want {
			t.Errorf("%q: %d, %q, %v", text, at, name, err)
		}
	}
	for _, text := range []string{"", "1", "1 (a", "1 )a(" + rest, "1 (a) S 1", strings.Replace("1 (a)"+rest, "4711", "x", 1)} {
		if _, _, err := parseStat([]byte(text)); err == nil {
			t.Errorf("%q was read", text)
		}
	}
}

func FuzzParseStat(f *testing.F) {
	f.Add([]byte("1 (a) S 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 4711"))
	f.Fuzz(func(_ *testing.T, b []byte) { _, _, _ = parseStat(b) })
}

func TestParseCgroup(t *testing.T) {
	t.Parallel()
	for text, want := range map[string]string{
		"0::/a/b\n":                                  "/a/b",
		"3:memory:/m\n2:cpu,cpuacct:/c\n0::/\n":      "/m",
		"3:memory:/\n2:pids:/p\n0::/\n":              "/p",
		"3:devices:/d\n1:name=systemd:/long\n0::/\n": "/long",
		"0::/\n":               "/",
		"0::/a:b\n":            "/a:b",
		"":                     "",
		"nonsense\n0::/x (y)":  "/x (y)",
		"3:memory:/m\n0::/u\n": "/u",
	} {
		if got := parseCgroup([]byte(text)); got != want {
			t.Errorf("%q: %q, want %q", text, got, want)
		}
	}
}

// In its own pid namespace a caller sees its own pids, and only its own processes.
func TestPIDView(t *testing.T) {
	t.Parallel()
	child := exec.CommandContext(t.Context(), "sleep", "1000")
	child.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWPID}
	if err := child.Start(); err != nil {
		if os.Getenv("GPUFENCE_MUST") == "1" {
			t.Fatalf("start in a pid namespace: %v", err)
		}
		t.Skipf("SKIPPED: no pid namespaces for this user: %v", err)
	}
	defer func() { _ = child.Process.Kill(); _ = child.Wait() }()
	rows := func() []wire.Proc {
		return []wire.Proc{{PID: uint32(os.Getpid()), UsedBytes: 1}, {PID: uint32(child.Process.Pid), UsedBytes: 2}, {PID: 1 << 30, UsedBytes: 3}}
	}
	pid := func(r *wire.Proc) *uint32 { return &r.PID }
	if got := asSeenBy(child.Process.Pid, rows(), pid); len(got) != 1 || got[0] != (wire.Proc{PID: 1, UsedBytes: 2}) {
		t.Errorf("seen from inside: %+v", got)
	}
	if got := asSeenBy(os.Getpid(), rows(), pid); len(got) != 3 || got[0].PID != uint32(os.Getpid()) {
		t.Errorf("seen from the same namespace: %+v", got)
	}
}

// A GPU in MIG mode takes no memory itself, answers for its instances, and shares its knobs with them.
func TestSplit(t *testing.T) {
	t.Parallel()
	dir, s := start(t, "--gpus", "2", "--mig", "0,2")
	whole, first, second := dial(t, dir, "gpu1"), dial(t, dir, "gpu1.mig0"), dial(t, dir, "gpu1.mig1")
	if rep, _ := ask(t, whole, wire.OpAlloc, 0, 4<<20); rep.Status != wire.NotSupported {
		t.Errorf("memory of a GPU that is split: %+v", rep)
	}
	for i, conn := range []*net.UnixConn{first, second} {
		if rep, _ := ask(t, conn, wire.OpAlloc, 0, uint64(i+1)*(4<<20)); rep.Status != wire.OK {
			t.Errorf("memory of instance %d: %+v", i, rep)
		}
	}
	// One cannot have what is the other's.
	if rep, _ := ask(t, first, wire.OpAlloc, 0, 9<<30); rep.Status != wire.NoMemory {
		t.Errorf("more than the instance has: %+v", rep)
	}
	ctl := dial(t, dir, "ctl")
	for number, want := range map[uint64]uint64{0: 0, 1: 12 << 20, 2: 4 << 20, 3: 8 << 20} {
		if rep, _ := ask(t, ctl, wire.OpNVMLMemory, number); rep.Status != wire.OK || rep.Val[2] != want || rep.Val[0] != rep.Val[1]+rep.Val[2]+rep.Val[3] {
			t.Errorf("memory of %d: %+v, want %d used", number, rep, want)
		}
	}
	rep, rows := ask(t, ctl, wire.OpNVMLProcs, 1, uint64(wire.ListCompute))
	if rep.Val[0] != 2 || len(rows) != 2*wire.ProcBytes || rows[4] != 1 || rows[wire.ProcBytes+4] != 2 {
		t.Errorf("processes of both: %+v, %x", rep, rows)
	}
	if rep, _ := ask(t, ctl, wire.OpNVMLUtil, 1); rep.Status != wire.NotSupported {
		t.Errorf("how busy it is: %+v", rep)
	}
	if g := s.State().GPUs[3]; g.MIG != "1:1" || g.Socket != "gpu1.mig1" || g.Number != 3 || !strings.HasPrefix(g.UUID, "MIG-") || g.UUID == s.State().GPUs[2].UUID {
		t.Errorf("state of an instance: %+v", g)
	}
	lost := func(gpu int, value string, want ...wire.Status) {
		t.Helper()
		if err := s.Set(Settings{GPU: &gpu, Knobs: map[string]string{"lost": value}}); err != nil {
			t.Fatal(err)
		}
		for number, status := range want {
			if rep, _ := ask(t, ctl, wire.OpNVMLMemory, uint64(number)); rep.Status != status {
				t.Errorf("%d while lost=%s on %d: %+v", number, value, gpu, rep)
			}
		}
	}
	lost(1, "1", wire.OK, wire.Lost, wire.Lost, wire.Lost)
	lost(1, "0", wire.OK, wire.OK, wire.OK, wire.OK)
	lost(3, "1", wire.OK, wire.Lost, wire.OK, wire.Lost)
}
