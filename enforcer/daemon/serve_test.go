// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"context"
	"errors"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/gpufence/gpufence/enforcer/api"
	"github.com/gpufence/gpufence/enforcer/quota"
)

// startServing runs a daemon behind its socket and returns a client.
func (b *bench) startServing() *api.Client {
	b.t.Helper()
	log := quiet()
	log.SetOutput(b.log)
	d, err := New(Options{Config: b.cfg, Library: b.nvml, Host: b.host, Log: log, PlainPages: true})
	if err != nil {
		b.t.Fatal(err)
	}
	b.d = d
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	ready := make(chan struct{})
	go func() { done <- d.Serve(ctx, nil, func() { close(ready) }) }()
	select {
	case <-ready:
	case err := <-done:
		cancel()
		b.t.Fatal(err)
	}
	b.stop = func() {
		cancel()
		if err := <-done; err != nil {
			b.t.Error(err)
		}
		if err := d.Close(); err != nil {
			b.t.Error(err)
		}
	}
	return api.NewClient(b.cfg.Socket, patience)
}

func TestServe(t *testing.T) {
	b := newBench(t)
	c := b.startServing()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	var mu sync.Mutex
	var kinds []string
	followed := make(chan error, 1)
	go func() {
		followed <- c.Events(ctx, 0, true, func(ev api.Event) error {
			mu.Lock()
			defer mu.Unlock()
			kinds = append(kinds, ev.Type)
			return nil
		})
	}()
	v, err := c.Version(ctx)
	if err != nil || v.PID != os.Getpid() || v.API != "v1" || v.ABIMajor != 1 {
		t.Errorf("version: %+v, %v", v, err)
	}
	req := request("a", "memory.max=4Gi")
	if _, err := c.Prepare(ctx, req); err != nil {
		t.Fatal(err)
	}
	p := b.container()
	reg, err := c.Register(ctx, api.RegisterRequest{Key: req.Key, PID: p.pid})
	if err != nil || reg.Level != quota.LevelReactive {
		t.Fatalf("register: %+v, %v", reg, err)
	}
	if resp, err := c.Set(ctx, "a/main", api.SetRequest{Values: map[string]string{"memory.max": "5Gi"}}); err != nil || resp.Resizes[0].State != "done" {
		t.Errorf("set: %+v, %v", resp, err)
	}
	if list, err := c.Containers(ctx); err != nil || len(list) != 1 || list[0].GPUs[0].Limits.Max != 5*gib {
		t.Errorf("list: %+v, %v", list, err)
	}
	if gpus, err := c.GPUs(ctx); err != nil || len(gpus) != 1 {
		t.Errorf("gpus: %+v, %v", gpus, err)
	}
	_, err = c.Prepare(ctx, request("b", "memory.max=4096"))
	if !errors.Is(err, quota.CodeNoUnit) {
		t.Errorf("a refusal travels as %v", err)
	}
	b.eventually("events are followed", func() bool {
		mu.Lock()
		defer mu.Unlock()
		all := strings.Join(kinds, " ")
		return strings.Contains(all, "prepared registered resize refused")
	})
	b.finish(p)
	if err := c.Unregister(ctx, api.UnregisterRequest{Key: req.Key}); err != nil {
		t.Errorf("unregister: %v", err)
	}
	if got, err := c.Container(ctx, "a"); err != nil || got.State != "ended" {
		t.Errorf("container: %+v, %v", got, err)
	}
	// A stop ends the streams, and says who is not there any more.
	b.drop()
	if err := <-followed; !errors.Is(err, api.ErrUnreachable) && err != nil {
		t.Errorf("the stream ended with %v", err)
	}
	if _, err := api.NewClient(b.cfg.Socket, 0).Version(context.Background()); !errors.Is(err, api.ErrUnreachable) {
		t.Errorf("after the stop: %v", err)
	}
}

func TestServeWithoutPlaceForItsSocket(t *testing.T) {
	b := newBench(t)
	b.cfg.Socket = filepath.Join(t.TempDir(), "none", "s")
	log := quiet()
	d, err := New(Options{Config: b.cfg, Library: b.nvml, Host: b.host, Log: log, PlainPages: true})
	if err != nil {
		t.Fatal(err)
	}
	defer d.Close()
	if err := d.Serve(context.Background(), nil, func() { t.Error("ready without a socket") }); err == nil {
		t.Error("served nowhere")
	}
}

func TestNewErrors(t *testing.T) {
	b := newBench(t)
	file := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	for _, edit := range []func(*Options){
		func(o *Options) { o.Config.RunDir = filepath.Join(file, "run") },
		func(o *Options) { o.Config.StateDir = filepath.Join(file, "lib") },
	} {
		o := Options{Config: b.cfg, Library: b.nvml, Host: b.host, Log: quiet(), PlainPages: true}
		edit(&o)
		if d, err := New(o); err == nil {
			t.Errorf("made %v", d)
		}
	}
	// A failed start leaves no lock behind.
	b.start()
}

func TestNotify(t *testing.T) {
	sock := filepath.Join(t.TempDir(), "n")
	l, err := net.ListenUnixgram("unixgram", &net.UnixAddr{Name: sock, Net: "unixgram"})
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	env := func(v string) func(string) string {
		return func(name string) string {
			if name == "NOTIFY_SOCKET" {
				return v
			}
			return ""
		}
	}
	if err := Notify(env(sock), "READY=1"); err != nil {
		t.Fatal(err)
	}
	if err := l.SetReadDeadline(time.Now().Add(patience)); err != nil {
		t.Fatal(err)
	}
	b := make([]byte, 100)
	n, err := l.Read(b)
	if err != nil || string(b[:n]) != "READY=1" {
		t.Errorf("got %q, %v", b[:n], err)
	}
	if err := Notify(env(""), "READY=1"); err != nil {
		t.Errorf("without systemd: %v", err)
	}
	if err := Notify(env(sock+".none"), "READY=1"); err == nil {
		t.Error("told nobody")
	}
	// One that hangs, its queue full: it is told nothing, and holds nobody up.
	began := time.Now()
	for {
		if err = Notify(env(sock), "WATCHDOG=1"); err != nil || time.Since(began) > patience {
			break
		}
	}
	if !errors.Is(err, os.ErrDeadlineExceeded) || time.Since(began) > patience {
		t.Errorf("to one that hangs: %v after %v", err, time.Since(began))
	}
}

// TestSystemdChild is the child of TestSystemdListener, with a socket as its descriptor 3.
func TestSystemdChild(t *testing.T) {
	fds := os.Getenv("GPUFENCE_TEST_FDS")
	if fds == "" {
		t.Skip("runs only as a child of TestSystemdListener")
	}
	l, err := SystemdListener(func(name string) string {
		return map[string]string{"LISTEN_PID": strconv.Itoa(os.Getpid()), "LISTEN_FDS": fds}[name]
	}, os.Getpid())
	if err != nil {
		t.Fatalf("error: %v", err)
	}
	conn, err := l.Accept()
	if err != nil {
		t.Fatal(err)
	}
	if _, err := conn.Write([]byte("hello")); err != nil {
		t.Fatal(err)
	}
}

func TestSystemdListener(t *testing.T) {
	none := func(string) string { return "" }
	if l, err := SystemdListener(none, 1); l != nil || err != nil {
		t.Errorf("without systemd: %v, %v", l, err)
	}
	other := func(name string) string {
		return map[string]string{"LISTEN_PID": "99999999", "LISTEN_FDS": "1"}[name]
	}
	if l, err := SystemdListener(other, 1); l != nil || err != nil {
		t.Errorf("for somebody else: %v, %v", l, err)
	}
	dir := t.TempDir()
	child := func(fds string, f *os.File) (*exec.Cmd, *strings.Builder) {
		cmd := exec.CommandContext(t.Context(), os.Args[0], "-test.run=^TestSystemdChild$", "-test.v")
		cmd.Env = append(os.Environ(), "GPUFENCE_TEST_FDS="+fds)
		cmd.ExtraFiles = []*os.File{f}
		var out strings.Builder
		cmd.Stdout, cmd.Stderr = &out, &out
		return cmd, &out
	}
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: filepath.Join(dir, "s"), Net: "unix"})
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	f, err := l.File()
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	cmd, out := child("1", f)
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	conn, err := net.Dial("unix", filepath.Join(dir, "s"))
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	buf := make([]byte, 5)
	if n, err := conn.Read(buf); err != nil || string(buf[:n]) != "hello" {
		t.Errorf("got %q, %v", buf[:n], err)
	}
	if err := cmd.Wait(); err != nil {
		t.Errorf("%v: %s", err, out)
	}
	if _, err := os.Stat(filepath.Join(dir, "s")); err != nil {
		t.Error("systemd's socket was removed")
	}
	plain, err := os.Create(filepath.Join(dir, "file"))
	if err != nil {
		t.Fatal(err)
	}
	defer plain.Close()
	for _, tt := range []struct {
		fds string
		f   *os.File
		say string
	}{{"2", f, "it passes 2"}, {"x", f, `LISTEN_FDS is "x"`}, {"1", plain, "take systemd's socket"}} {
		cmd, out := child(tt.fds, tt.f)
		if err := cmd.Run(); err == nil || !strings.Contains(out.String(), tt.say) {
			t.Errorf("%s: %v: %s", tt.fds, err, out)
		}
	}
}
