// SPDX-License-Identifier: Apache-2.0

package server

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/gpufence/gpufence/enforcer/api"
	"github.com/gpufence/gpufence/enforcer/quota"
)

// fakeService answers with what it was asked; its errors are set by a test.
type fakeService struct {
	mu     sync.Mutex
	err    error
	panics bool
	ids    []string
	events []api.Event
	block  chan struct{}
	health api.Health
}

func (f *fakeService) fail() error {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.panics {
		panic("a fault on purpose")
	}
	return f.err
}

func (f *fakeService) Prepare(_ context.Context, req api.PrepareRequest) (api.PrepareResponse, error) {
	return api.PrepareResponse{Notices: []string{req.Key.ID, req.ContainerName}}, f.fail()
}

func (f *fakeService) Register(ctx context.Context, req api.RegisterRequest) (api.RegisterResponse, error) {
	if f.block != nil {
		select {
		case <-f.block:
		case <-ctx.Done():
			return api.RegisterResponse{}, ctx.Err()
		}
	}
	return api.RegisterResponse{Level: quota.LevelReactive, Fences: []api.Fence{{Name: "watch", State: "proven"}}}, f.fail()
}
func (f *fakeService) Unregister(context.Context, api.UnregisterRequest) error { return f.fail() }
func (f *fakeService) Containers(context.Context) ([]api.Container, error) {
	return []api.Container{{Name: "main"}}, f.fail()
}
func (f *fakeService) Container(_ context.Context, id string) (api.Container, error) {
	f.mu.Lock()
	f.ids = append(f.ids, id)
	f.mu.Unlock()
	return api.Container{Name: id}, f.fail()
}
func (f *fakeService) Set(_ context.Context, id string, req api.SetRequest) (api.SetResponse, error) {
	return api.SetResponse{Notices: []string{id, req.Values["memory.max"]}}, f.fail()
}
func (f *fakeService) GPUs(context.Context) ([]api.GPUState, error) {
	return []api.GPUState{{Known: true}}, f.fail()
}
func (f *fakeService) Events(ctx context.Context, since uint64, follow bool, emit func(*api.Event) error) error {
	if err := f.fail(); err != nil {
		return err
	}
	for _, ev := range f.events {
		if ev.Seq > since {
			if err := emit(&ev); err != nil {
				return err
			}
		}
	}
	if follow {
		if err := emit(nil); err != nil {
			return err
		}
		<-ctx.Done()
		return ctx.Err()
	}
	return nil
}
func (f *fakeService) Version(context.Context) (api.Version, error) {
	return api.Version{Version: api.BuildVersion, API: api.APIVersion}, f.fail()
}

func (f *fakeService) Node(context.Context) (api.Node, error) {
	return api.Node{Mode: "enforce", LastEvent: 7}, f.fail()
}
func (f *fakeService) Health(context.Context) (api.Health, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.health, f.err
}
func (f *fakeService) Reload(context.Context, api.ReloadRequest) (api.ConfigInfo, error) {
	return api.ConfigInfo{Path: "/etc/x"}, f.fail()
}
func (f *fakeService) Quiesce(_ context.Context, req api.SwitchRequest) (api.Switch, error) {
	return api.Switch{Position: api.SwitchQuiesced, Reason: req.Reason}, f.fail()
}
func (f *fakeService) Resume(context.Context, api.SwitchRequest) (api.Switch, error) {
	return api.Switch{Position: api.SwitchRunning}, f.fail()
}
func (f *fakeService) Disable(_ context.Context, req api.SwitchRequest) (api.Switch, error) {
	return api.Switch{Position: api.SwitchDisabled, Reason: req.Reason}, f.fail()
}

// applying is a service that follows manifests.
type applying struct{ *fakeService }

func (a applying) Apply(_ context.Context, req api.ApplyRequest) (api.ApplyResponse, error) {
	var resp api.ApplyResponse
	for _, p := range req.Pods {
		resp.Pods = append(resp.Pods, api.AppliedPod{Namespace: p.Namespace, Name: p.Name})
	}
	return resp, a.fail()
}

func (a applying) Audit(_ context.Context, req api.AuditRequest) (api.AuditResponse, error) {
	return api.AuditResponse{Unmanaged: req.By}, a.fail()
}

// testReadTimeout is short, since one test waits for it to pass.
const testReadTimeout = 500 * time.Millisecond

func serve(t *testing.T, svc Service, gid int) (*api.Client, string) {
	t.Helper()
	dir, err := os.MkdirTemp("", "gpufence-api") // t.TempDir is too long for a socket's path
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	if err := os.Chmod(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	sock := filepath.Join(dir, "s")
	l, err := Listen(sock, gid)
	if err != nil {
		t.Fatal(err)
	}
	srv := New(svc, Options{ReadGID: gid, ReadTimeout: testReadTimeout, Logf: t.Logf})
	done := make(chan error, 1)
	go func() { done <- srv.Serve(l) }()
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), 100*time.Millisecond)
		defer cancel()
		_ = srv.Shutdown(ctx) // a test may leave a stream open
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
	return api.NewClient(sock, 0), sock
}

// raw speaks to the socket without our client.
func raw(t *testing.T, sock, method, path, body string) (int, api.Error, string) {
	t.Helper()
	hc := &http.Client{Transport: &http.Transport{DisableKeepAlives: true,
		DialContext: func(context.Context, string, string) (net.Conn, error) { return net.Dial("unix", sock) }}}
	req, err := http.NewRequest(method, "http://x"+path, strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	resp, err := hc.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	var e api.Error
	if resp.StatusCode/100 != 2 {
		if err := json.Unmarshal(b, &e); err != nil {
			t.Fatalf("%s %s: %d with a body that is no Error: %q", method, path, resp.StatusCode, b)
		}
	}
	return resp.StatusCode, e, string(b)
}

func TestRoundTrip(t *testing.T) {
	svc := &fakeService{events: []api.Event{{Seq: 1, Type: "a"}, {Seq: 2, Type: "b"}, {Seq: 3, Type: "c"}}}
	c, _ := serve(t, svc, -1)
	ctx := context.Background()

	prep, err := c.Prepare(ctx, api.PrepareRequest{Key: api.ContainerKey{ID: "abc"}, ContainerName: "main"})
	if err != nil || len(prep.Notices) != 2 || prep.Notices[0] != "abc" {
		t.Errorf("prepare: %+v, %v", prep, err)
	}
	reg, err := c.Register(ctx, api.RegisterRequest{PID: 1})
	if err != nil || reg.Level != quota.LevelReactive {
		t.Errorf("register: %+v, %v", reg, err)
	}
	if err := c.Unregister(ctx, api.UnregisterRequest{}); err != nil {
		t.Errorf("unregister: %v", err)
	}
	if list, err := c.Containers(ctx); err != nil || len(list) != 1 {
		t.Errorf("containers: %+v, %v", list, err)
	}
	for _, id := range []string{"abc", "pod/main", "a b%2Fc?d", "{id}", "..", "ü"} {
		got, err := c.Container(ctx, id)
		if err != nil || got.Name != id {
			t.Errorf("container %q: %q, %v", id, got.Name, err)
		}
		set, err := c.Set(ctx, id, api.SetRequest{Values: map[string]string{"memory.max": "6Gi"}})
		if err != nil || set.Notices[0] != id || set.Notices[1] != "6Gi" {
			t.Errorf("set %q: %+v, %v", id, set, err)
		}
	}
	if gpus, err := c.GPUs(ctx); err != nil || len(gpus) != 1 || !gpus[0].Known {
		t.Errorf("gpus: %+v, %v", gpus, err)
	}
	if v, err := c.Version(ctx); err != nil || v.Version != api.BuildVersion {
		t.Errorf("version: %+v, %v", v, err)
	}
	var seqs []uint64
	err = c.Events(ctx, 1, false, func(ev api.Event) error { seqs = append(seqs, ev.Seq); return nil })
	if err != nil || !cmp.Equal(seqs, []uint64{2, 3}) {
		t.Errorf("events: %v, %v", seqs, err)
	}
}

func TestEventsFollow(t *testing.T) {
	svc := &fakeService{events: []api.Event{{Seq: 1}}}
	c, _ := serve(t, svc, -1)
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	// Events must arrive while the stream is open, and the end of the context end it.
	n := 0
	err := c.Events(ctx, 0, true, func(api.Event) error { n++; cancel(); return nil })
	if n != 1 || !errors.Is(err, context.Canceled) {
		t.Errorf("followed %d events, %v", n, err)
	}
	// An error of the reader comes back as it is.
	stop := errors.New("enough")
	if err := c.Events(context.Background(), 0, true, func(api.Event) error { return stop }); !errors.Is(err, stop) {
		t.Errorf("got %v", err)
	}
}

func TestErrorsTravel(t *testing.T) {
	svc := &fakeService{}
	c, sock := serve(t, svc, -1)
	for _, tt := range []struct {
		err    error
		code   quota.Code
		status int
		say    string
	}{
		{quota.NewError(quota.CodeNoUnit, `memory.max "4096" has no unit`).WithHint("write 4096Mi"), quota.CodeNoUnit, 422, `memory.max "4096" has no unit: write 4096Mi`},
		{fmt.Errorf("outer: %w", api.Errorf(quota.CodeUnavailable, "too much")), quota.CodeUnavailable, 422, "too much"},
		{api.Errorf(quota.CodeNoSuchContainer, "none"), quota.CodeNoSuchContainer, 404, "none"},
		{api.Errorf(quota.CodeAmbiguousName, "two"), quota.CodeAmbiguousName, 409, "two"},
		{errors.New("disk on fire"), quota.CodeInternal, 500, "disk on fire"},
	} {
		svc.mu.Lock()
		svc.err = tt.err
		svc.mu.Unlock()
		_, err := c.Containers(context.Background())
		var e *api.Error
		if !errors.As(err, &e) || !errors.Is(err, tt.code) || !strings.Contains(e.Message, tt.say) {
			t.Errorf("%v: got %v", tt.err, err)
		}
		if quota.CodeOf(err) != tt.code {
			t.Errorf("%v: quota sees code %q", tt.err, quota.CodeOf(err))
		}
		if strings.Contains(e.Message, string(tt.code)) {
			t.Errorf("the message repeats the code: %q", e.Message)
		}
		if st, _, _ := raw(t, sock, "GET", "/v1/gpus", ""); st != tt.status {
			t.Errorf("%v: status %d, want %d", tt.err, st, tt.status)
		}
		// Before its first line a stream can still tell its error.
		if err := c.Events(context.Background(), 0, true, func(api.Event) error { return nil }); !errors.Is(err, tt.code) {
			t.Errorf("%v: events say %v", tt.err, err)
		}
	}
	svc.mu.Lock()
	svc.panics = true
	svc.mu.Unlock()
	if _, err := c.Version(context.Background()); !errors.Is(err, quota.CodeInternal) {
		t.Errorf("a panic gives %v", err)
	}
}

func TestBadRequests(t *testing.T) {
	_, sock := serve(t, &fakeService{}, -1)
	for _, tt := range []struct {
		name, method, path, body string
		status                   int
		say                      string
	}{
		{"empty", "POST", "/v1/prepare", "", 400, "it is empty"},
		{"spaces", "POST", "/v1/prepare", " \n", 400, "it is empty"},
		{"not JSON", "POST", "/v1/prepare", "{nope", 400, "at byte 2"},
		{"cut short", "POST", "/v1/prepare", `{"bundle":"/x`, 400, "ends in the middle"},
		{"array", "POST", "/v1/prepare", "[]", 400, "not a JSON object"},
		{"null", "POST", "/v1/prepare", "null", 400, "not a JSON object"},
		{"two objects", "POST", "/v1/prepare", "{} {}", 400, "something follows"},
		{"wrong type", "POST", "/v1/prepare", `{"key":{"id":7}}`, 400, `"key.id" takes no number`},
		{"wrong type deep", "POST", "/v1/register", `{"pid":"1"}`, 400, `"pid" takes no string`},
		{"number too large", "POST", "/v1/register", `{"pid":99999999999999999999}`, 400, "pid"},
		{"bad UTF-8", "POST", "/v1/prepare", "{\"bundle\":\"\xff\"}", 400, "not UTF-8"},
		{"too deep", "POST", "/v1/prepare", `{"annotations":` + strings.Repeat(`{"a":`, 20000) + "1", 400, "not a request"},
		{"too large", "POST", "/v1/prepare", `{"bundle":"` + strings.Repeat("x", api.MaxRequestBytes) + `"}`, 413, "exceeds 1048576 bytes"},
		{"unknown fields are for later versions", "POST", "/v1/register", `{"pid":1,"later":{"x":1}}`, 200, ""},
		{"no such path", "GET", "/v1/nope", "", 404, "no path"},
		{"no version", "GET", "/containers", "", 404, "no path"},
		{"other version", "GET", "/v2/containers", "", 404, "another version"},
		{"root", "GET", "/", "", 404, "no path"},
		{"too many segments", "GET", "/v1/containers/a/b", "", 404, "no path"},
		{"empty id", "GET", "/v1/containers/", "", 404, "no path"},
		{"id that is no text", "GET", "/v1/containers/%ff", "", 400, "not valid text"},
		{"method", "DELETE", "/v1/containers/a", "", 405, "use GET"},
		{"method of prepare", "GET", "/v1/prepare", "", 405, "use POST"},
		{"since", "GET", "/v1/events?since=-1", "", 400, "since="},
		{"since text", "GET", "/v1/events?since=x", "", 400, "since="},
		{"follow", "GET", "/v1/events?follow=maybe", "", 400, "follow="},
	} {
		t.Run(tt.name, func(t *testing.T) {
			st, e, _ := raw(t, sock, tt.method, tt.path, tt.body)
			if st != tt.status {
				t.Fatalf("status %d (%v), want %d", st, e.Message, tt.status)
			}
			if st != 200 && (!strings.Contains(e.Message, strings.TrimPrefix(tt.say, "another ")) || e.Code == "") {
				t.Errorf("code %q, message %q; want %q", e.Code, e.Message, tt.say)
			}
			if strings.Contains(e.Message, "\n") || len(e.Message) > 500 {
				t.Errorf("not one sentence: %q", e.Message)
			}
		})
	}
}

// A peer that sends half a request must not keep others out.
func TestHalfRequest(t *testing.T) {
	c, sock := serve(t, &fakeService{}, -1)
	for range 50 {
		conn, err := net.Dial("unix", sock)
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		if _, err := io.WriteString(conn, "POST /v1/prepare HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{"); err != nil {
			t.Fatal(err)
		}
	}
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	if _, err := c.Version(ctx); err != nil {
		t.Fatal(err)
	}
	// A garbage line gets an answer from net/http itself, and the server lives.
	conn, err := net.Dial("unix", sock)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	if _, err := io.WriteString(conn, "\x00\x01\x02\r\n\r\n"); err != nil {
		t.Fatal(err)
	}
	line, err := bufio.NewReader(conn).ReadString('\n')
	if err != nil || !strings.Contains(line, "400") {
		t.Errorf("garbage gets %q, %v", line, err)
	}
	if _, err := c.Version(ctx); err != nil {
		t.Fatal(err)
	}
}

// The request's context must live as long as the caller waits, longer than any read deadline.
func TestLongRequestIsNotCancelled(t *testing.T) {
	svc := &fakeService{block: make(chan struct{})}
	c, _ := serve(t, svc, -1)
	done := make(chan error, 1)
	go func() {
		_, err := c.Register(context.Background(), api.RegisterRequest{})
		done <- err
	}()
	select {
	case err := <-done:
		t.Fatalf("ended early: %v", err)
	case <-time.After(2 * testReadTimeout):
	}
	close(svc.block)
	if err := <-done; err != nil {
		t.Fatal(err)
	}
}

// TestPeerChild is the other side of TestPeers, under another uid.
func TestPeerChild(t *testing.T) {
	sock := os.Getenv("GPUFENCE_TEST_SOCKET")
	if sock == "" {
		t.Skip("runs only as a child of TestPeers")
	}
	c := api.NewClient(sock, 0)
	_, readErr := c.Containers(context.Background())
	_, changeErr := c.Prepare(context.Background(), api.PrepareRequest{})
	say := func(err error) string {
		switch {
		case err == nil:
			return "yes"
		case errors.Is(err, quota.CodeForbidden):
			return "forbidden"
		}
		return err.Error()
	}
	fmt.Printf("read=%s change=%s\n", say(readErr), say(changeErr))
}

func TestPeers(t *testing.T) {
	if os.Geteuid() != 0 {
		if os.Getenv("GPUFENCE_MUST") == "1" {
			t.Fatal("needs root")
		}
		t.Skip("SKIPPED: needs root to become another user")
	}
	const gid = 54321
	_, sock := serve(t, &fakeService{}, gid)
	// What is tested is our check, not the socket's mode.
	if err := os.Chmod(sock, 0o666); err != nil {
		t.Fatal(err)
	}
	exe := filepath.Join(filepath.Dir(sock), "test")
	self, err := os.ReadFile("/proc/self/exe")
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(exe, self, 0o755); err != nil {
		t.Fatal(err)
	}
	for _, tt := range []struct {
		name string
		cred syscall.Credential
		want string
	}{
		{"root", syscall.Credential{}, "read=yes change=yes"},
		{"stranger", syscall.Credential{Uid: 65534, Gid: 65534}, "read=forbidden change=forbidden"},
		{"primary group", syscall.Credential{Uid: 65534, Gid: gid}, "read=yes change=forbidden"},
		{"supplementary group", syscall.Credential{Uid: 65534, Gid: 65534, Groups: []uint32{7, gid}}, "read=yes change=forbidden"},
		{"group root", syscall.Credential{Uid: 65534, Gid: 0}, "read=forbidden change=forbidden"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			cmd := exec.CommandContext(t.Context(), exe, "-test.run=^TestPeerChild$", "-test.v")
			cmd.Env = append(os.Environ(), "GPUFENCE_TEST_SOCKET="+sock)
			cmd.Dir = "/"
			cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &tt.cred}
			out, err := cmd.CombinedOutput()
			if err != nil || !strings.Contains(string(out), tt.want+"\n") {
				t.Errorf("%v: %s; want %s", err, out, tt.want)
			}
		})
	}
}

func TestUnknownPeerIsRefused(t *testing.T) {
	srv := New(&fakeService{}, Options{ReadGID: -1, Logf: t.Logf})
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	go srv.Serve(l) // ends with the listener
	defer l.Close()
	resp, err := http.Get("http://" + l.Addr().String() + "/v1/version")
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusForbidden {
		t.Errorf("status %d", resp.StatusCode)
	}
}

func TestClientWaitsForSocket(t *testing.T) {
	dir := t.TempDir()
	sock := filepath.Join(dir, "s")
	go func() {
		time.Sleep(100 * time.Millisecond)
		l, err := Listen(sock, -1)
		if err != nil {
			t.Error(err)
			return
		}
		srv := New(&fakeService{}, Options{ReadGID: -1})
		go srv.Serve(l) // ends with the test's process
	}()
	if _, err := api.NewClient(sock, 20*time.Second).Version(context.Background()); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(context.Background(), 50*time.Millisecond)
	defer cancel()
	if _, err := api.NewClient(filepath.Join(dir, "none"), time.Hour).Version(ctx); !errors.Is(err, api.ErrUnreachable) {
		t.Errorf("got %v", err)
	}
}

func TestListen(t *testing.T) {
	dir := t.TempDir()
	sock := filepath.Join(dir, "s")
	if err := os.WriteFile(sock, []byte("precious"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := Listen(sock, -1); err == nil || !strings.Contains(err.Error(), "something else") {
		t.Errorf("over a file: %v", err)
	}
	if err := os.Remove(sock); err != nil {
		t.Fatal(err)
	}
	l, err := Listen(sock, -1)
	if err != nil {
		t.Fatal(err)
	}
	fi, err := os.Stat(sock)
	if err != nil || fi.Mode().Perm() != 0o600 {
		t.Errorf("mode %v, %v", fi.Mode(), err)
	}
	// As after a SIGKILL: the socket file is there, nobody listens.
	l.(*net.UnixListener).SetUnlinkOnClose(false)
	l.Close()
	l, err = Listen(sock, -1)
	if err != nil {
		t.Fatal(err)
	}
	l.Close()
	if _, err := Listen(filepath.Join(dir, "no", "s"), -1); err == nil {
		t.Error("listened in a folder that does not exist")
	}
}

func FuzzDecodeRequest(f *testing.F) {
	for _, s := range []string{"", "{}", `{"key":{"engine":"cri","id":"x"},"devices":{"selectors":["0"]}}`, `{"pid":1}`, `[]`, `{"a":`, "{}{}", `{"values":{"memory.max":"6Gi"},"wait":true}`, "\xff"} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		for _, out := range []any{&api.PrepareRequest{}, &api.RegisterRequest{}, &api.UnregisterRequest{}, &api.SetRequest{}} {
			err := DecodeRequest(b, out)
			if err != nil {
				if strings.Contains(err.Error(), "\n") || len(err.Error()) > 600 {
					t.Errorf("not one sentence: %q", err)
				}
				continue
			}
			// What was taken must survive being written and read again.
			again, err := json.Marshal(out)
			if err != nil {
				t.Fatalf("encode: %v", err)
			}
			if err := DecodeRequest(again, out); err != nil {
				t.Errorf("read again: %v", err)
			}
		}
	})
}

func FuzzMatch(f *testing.F) {
	for _, s := range []string{"/v1/containers/a/set", "/v1/", "//", "/v1/containers//set", "/v1/%2e%2e/x"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, path string) {
		rt, id, ok := match(path)
		if ok != (rt.serve != nil) {
			t.Errorf("%q: found %v without a handler", path, ok)
		}
		if strings.Contains(id, "/") {
			t.Errorf("%q: id %q spans segments", path, id)
		}
	})
}
