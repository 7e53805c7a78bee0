// SPDX-License-Identifier: Apache-2.0

// Package hostile attacks a running gpufenced: over its socket, and from within a container.
package hostile

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/gpufence/gpufence/enforcer/api"
	"github.com/gpufence/gpufence/tests/node"
	"github.com/gpufence/gpufence/tests/simgpu/simtest"
)

const (
	mib = uint64(1) << 20
	// memoryBound is by how much an attack may make gpufenced grow.
	memoryBound = 96 * mib
	nobody      = 65534
)

// bench is a node whose failures end the test.
type bench struct {
	*node.Node
	t       *testing.T
	program string // the attacker
	wrapper string // gpufence-runtime.docker
}

func newBench(t *testing.T) *bench {
	t.Helper()
	dist := filepath.Dir(filepath.Dir(simtest.Dist(t, "bin/gpufenced")))
	n, err := node.New(t.Context(), node.Options{
		Dist: dist, Config: []string{`context = "64Mi"`},
		Sim: []string{"--model", "t4", "--memory", "16GiB", "--context-bytes", "64MiB"},
	})
	if err != nil {
		t.Fatal(err)
	}
	b := &bench{Node: n, t: t, program: program(t), wrapper: n.Path("gpufence-runtime.docker")}
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("gpufenced said:\n%s", n.DaemonLog())
		}
		if err := n.Close(context.Background()); err != nil {
			t.Errorf("the node is not clean: %v", err)
		}
	})
	b.check(os.Symlink(n.Dist("bin/gpufence-runtime"), b.wrapper))
	b.check(os.MkdirAll(n.Path("cdi"), 0o755))
	out, err := exec.CommandContext(t.Context(), n.Dist("bin/simgpu"), "--dir", n.Path("sim"), "cdi", "--lib-dir", n.Dist("simgpu"), "--out", n.Path("cdi", "simgpu.json")).CombinedOutput()
	if err != nil {
		t.Fatalf("write CDI specification: %v: %s", err, out)
	}
	return b
}

// within is the same node in a part of the test.
func (b *bench) within(t *testing.T) *bench {
	c := *b
	c.t = t
	return &c
}

func (b *bench) check(err error) {
	b.t.Helper()
	if err != nil {
		b.t.Fatal(err)
	}
}

// as connects as another user: the credentials are the connecting thread's.
func as(uid int, socket string) (net.Conn, error) {
	type result struct {
		fd  int
		err error
	}
	done := make(chan result)
	go func() {
		runtime.LockOSThread() // and never unlocked: the thread ends with its goroutine
		fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
		for _, call := range [][2]uintptr{{unix.SYS_SETGROUPS, 0}, {unix.SYS_SETRESGID, uintptr(uid)}, {unix.SYS_SETRESUID, uintptr(uid)}} {
			if err != nil {
				break
			}
			args := [3]uintptr{call[1], call[1], call[1]}
			if call[0] == unix.SYS_SETGROUPS {
				args = [3]uintptr{}
			}
			if _, _, e := unix.RawSyscall(call[0], args[0], args[1], args[2]); e != 0 {
				err = e
			}
		}
		if err == nil {
			err = unix.Connect(fd, &unix.SockaddrUnix{Name: socket})
		}
		done <- result{fd, err}
	}()
	r := <-done
	if r.err != nil {
		if r.fd >= 0 {
			_ = unix.Close(r.fd)
		}
		return nil, r.err
	}
	f := os.NewFile(uintptr(r.fd), "socket")
	defer f.Close()
	return net.FileConn(f)
}

// status sends raw bytes and reads the status line of the answer; 0 if there is none.
func status(conn net.Conn, request string) (int, string) {
	_ = conn.SetDeadline(time.Now().Add(node.Patience))
	if _, err := io.WriteString(conn, request); err != nil && !errors.Is(err, syscall.EPIPE) {
		return 0, err.Error()
	}
	resp, err := http.ReadResponse(bufio.NewReader(conn), nil)
	if err != nil {
		return 0, err.Error()
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(io.LimitReader(resp.Body, 1<<20))
	if err != nil {
		return resp.StatusCode, err.Error()
	}
	return resp.StatusCode, string(body)
}

func request(method, path, body string) string {
	return fmt.Sprintf("%s %s HTTP/1.1\r\nHost: gpufenced\r\nConnection: close\r\nContent-Length: %d\r\n\r\n%s", method, path, len(body), body)
}

// TestWrongPeers: another user does not get in, neither by the socket's mode nor, where somebody
// opened it to all, by what the kernel says of the peer.
func TestWrongPeers(t *testing.T) {
	b := newBench(t)
	c, err := b.Start(t.Context(), node.Spec{Name: "c", Limits: []string{"memory.max=1Gi"}, Program: []string{"/bin/sleep", "1000"}})
	b.check(err)
	b.check(os.Chmod(b.Dir, 0o755)) // the way to the socket is open; its own mode is not
	if conn, err := as(nobody, b.Socket); err == nil {
		conn.Close()
		t.Error("nobody may connect")
	} else if !errors.Is(err, unix.EACCES) {
		t.Errorf("connect as nobody: %v", err)
	}
	b.check(os.Chmod(b.Socket, 0o666))
	for _, r := range [][3]string{
		{"GET", "/v1/containers", ""}, {"GET", "/v1/gpus", ""}, {"GET", "/v1/events?since=0", ""}, {"GET", "/v1/version", ""}, {"GET", "/v1/containers/c", ""},
		{"POST", "/v1/prepare", `{"key":{"engine":"cri","scope":"s","id":"x"}}`}, {"POST", "/v1/register", `{}`}, {"POST", "/v1/unregister", `{"key":{"engine":"cri","scope":"k8s.io","id":"c"}}`},
		{"POST", "/v1/containers/c/set", `{"values":{"memory.max":"64Gi"}}`}, {"GET", "/", ""}, {"DELETE", "/v1/containers/c", ""},
	} {
		conn, err := as(nobody, b.Socket)
		b.check(err)
		if code, body := status(conn, request(r[0], r[1], r[2])); code != http.StatusForbidden || strings.Contains(body, "GPU-") {
			t.Errorf("%s %s as nobody: %d %.200s", r[0], r[1], code, body)
		}
		conn.Close()
	}
	if v, err := c.View(t.Context()); err != nil || v.State != "running" || v.GPUs[0].Limits.Max != 1<<30 {
		t.Errorf("after it: %+v, %v", v, err)
	}
}

// served keeps a correct client at work until it is stopped; it gives its answers and the slowest.
// rounds counts them as they come.
func (b *bench) served() (rounds func() int64, stop func() (int, time.Duration)) {
	over := make(chan struct{})
	var count atomic.Int64
	type result struct {
		answers int
		slowest time.Duration
	}
	done := make(chan result)
	go func() {
		var r result
		client := api.NewClient(b.Socket, node.Patience)
		for i := 0; ; i++ {
			began := time.Now()
			key := api.ContainerKey{Engine: "cri", Scope: "k8s.io", ID: fmt.Sprint("served-", i)}
			req := b.Request(node.Spec{Name: key.ID, Limits: []string{"memory.max=1Gi"}})
			_, err := client.Prepare(b.t.Context(), req)
			if err == nil {
				err = client.Unregister(b.t.Context(), api.UnregisterRequest{Key: key})
			}
			if err == nil {
				_, err = client.Containers(b.t.Context())
			}
			if err != nil {
				b.t.Errorf("a correct client is not served: %v", err)
			}
			r.answers++
			count.Add(1)
			r.slowest = max(r.slowest, time.Since(began))
			select {
			case <-over:
				done <- r
				return
			case <-time.After(5 * time.Millisecond):
			}
		}
	}()
	return count.Load, func() (int, time.Duration) {
		close(over)
		r := <-done
		return r.answers, r.slowest
	}
}

// TestGarbage: whatever comes over the socket is refused or cut, in bounded memory, and nothing
// comes of it.
func TestGarbage(t *testing.T) {
	b := newBench(t)
	before := b.memory()
	_, stop := b.served()
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	rng := rand.New(rand.NewPCG(seed, 0))
	noise := make([]byte, 64<<10)
	for i := range noise {
		noise[i] = byte(rng.Uint32())
	}
	big := strings.Repeat("a", 8<<20)
	deep := strings.Repeat(`{"a":`, 200_000)
	cases := map[string]string{
		"noise":               string(noise),
		"no line":             strings.Repeat("x", 1<<20),
		"a long header":       "GET /v1/version HTTP/1.1\r\nHost: x\r\nA: " + big + "\r\n\r\n",
		"many headers":        "GET /v1/version HTTP/1.1\r\n" + strings.Repeat("A: b\r\n", 500_000) + "\r\n",
		"an oversized body":   request("POST", "/v1/prepare", `{"bundle":"`+big+`"}`),
		"a lie about length":  "POST /v1/prepare HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: 99999999999\r\n\r\n{",
		"deep JSON":           request("POST", "/v1/prepare", deep),
		"no JSON":             request("POST", "/v1/prepare", string(noise[:4096])),
		"an array":            request("POST", "/v1/register", "[]"),
		"wrong types":         request("POST", "/v1/prepare", `{"key":7,"pod":[],"annotations":{"a":1}}`),
		"two objects":         request("POST", "/v1/unregister", "{}{}"),
		"a broken chunk":      "POST /v1/prepare HTTP/1.1\r\nHost: x\r\nConnection: close\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n{}\r\n",
		"another path":        request("GET", "/v1/../../etc/passwd", ""),
		"an id with zeros":    request("GET", "/v1/containers/%00%ff", ""),
		"a wrong method":      request("PUT", "/v1/prepare", "{}"),
		"huge since":          request("GET", "/v1/events?since=99999999999999999999999", ""),
		"negative deadline":   request("POST", "/v1/containers/none/set", `{"values":{"memory.max":"1Gi"},"deadline_millis":-5}`),
		"keys without an end": request("POST", "/v1/prepare", `{"key":{"engine":"cri","scope":"s","id":"`+strings.Repeat("k", 2000)+`"},"pod":{"id":"p"},"devices":{"selectors":["0"]}}`),
	}
	var group sync.WaitGroup // at once: one that lies about its length takes as long as a peer may
	for name, text := range cases {
		group.Go(func() {
			for range 2 {
				conn, err := net.Dial("unix", b.Socket)
				if err != nil {
					t.Errorf("%s: %v", name, err)
					return
				}
				// The server may cut the connection while all this is still being sent.
				code, body := status(conn, text)
				if code >= 200 && code < 300 {
					t.Errorf("%s is answered with %d %.200s", name, code, body)
				}
				conn.Close()
			}
		})
	}
	group.Wait()
	answers, slowest := stop()
	after := b.memory()
	t.Logf("a correct client meanwhile: %d rounds, the slowest %v; memory %d MiB before, %d after", answers, slowest.Round(time.Millisecond), before/mib, after/mib)
	if after > before+memoryBound {
		t.Errorf("memory grew from %d to %d MiB", before/mib, after/mib)
	}
	b.nothingCameOfIt()
}

// nothingCameOfIt: there is no container but those of the correct client, which have ended.
func (b *bench) nothingCameOfIt() {
	b.t.Helper()
	list, err := b.Client.Containers(b.t.Context())
	b.check(err)
	for _, c := range list {
		if c.State != "ended" || !strings.HasPrefix(c.Key.ID, "served-") {
			b.t.Errorf("container %+v", c.Key)
		}
	}
	gpus, err := b.Client.GPUs(b.t.Context())
	b.check(err)
	if gpus[0].GuaranteedBytes != 0 {
		b.t.Errorf("%d bytes are promised", gpus[0].GuaranteedBytes)
	}
}

// TestTenThousandConnections: connections that say nothing, half a header, or half a body, all held
// at once, keep no correct client out and cost bounded memory and descriptors.
func TestTenThousandConnections(t *testing.T) {
	const total, atOnce = 10_000, 16
	var files syscall.Rlimit
	if err := syscall.Getrlimit(syscall.RLIMIT_NOFILE, &files); err != nil {
		t.Fatal(err)
	}
	if files.Cur < total+500 {
		t.Fatalf("%d open files are allowed, which is too few for %d connections", files.Cur, total)
	}
	b := newBench(t)
	before := b.memory()
	rounds, stop := b.served()
	parts := []string{
		"", "GET /v1/version HT", "GET /v1/version HTTP/1.1\r\nHost: x\r\nA: b", "POST /v1/prepare HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n{\"key\":",
		"GET /v1/events?since=0&follow=1 HTTP/1.1\r\nHost: x\r\n\r\n",
	}
	conns := make([]net.Conn, total)
	var failed atomic.Int64
	began := time.Now()
	var group sync.WaitGroup
	for first := range atOnce {
		group.Go(func() {
			for i := first; i < total; i += atOnce {
				conn, err := dial(b.Socket)
				if err != nil {
					failed.Add(1)
					continue
				}
				conns[i] = conn
				// It may be cut already.
				_, _ = io.WriteString(conn, parts[i%len(parts)])
			}
		})
	}
	group.Wait()
	opened := time.Since(began)
	peak, descriptors := b.memory(), count(t, b.DaemonPID())
	for range 20 {
		time.Sleep(50 * time.Millisecond)
		peak, descriptors = max(peak, b.memory()), max(descriptors, count(t, b.DaemonPID()))
	}
	// All of them are held until the client has been served some times, on a machine however slow.
	if err := node.Until(t.Context(), "a correct client is served beside them", func() (bool, error) { return rounds() >= 10, nil }); err != nil {
		t.Error(err)
	}
	answers, slowest := stop()
	for _, c := range conns {
		if c != nil {
			c.Close()
		}
	}
	t.Logf("%d connections within %v (%d failed); a correct client meanwhile: %d rounds, the slowest %v; gpufenced: %d MiB before, at most %d, %d descriptors",
		total, opened.Round(time.Millisecond), failed.Load(), answers, slowest.Round(time.Millisecond), before/mib, peak/mib, descriptors)
	if failed.Load() > 0 {
		t.Errorf("%d connections failed: the attack was weaker than it should be", failed.Load())
	}
	if peak > before+memoryBound || descriptors > 2000 {
		t.Errorf("gpufenced grew from %d to %d MiB, with %d descriptors", before/mib, peak/mib, descriptors)
	}
	if err := node.Until(t.Context(), "the connections are gone", func() (bool, error) { return count(t, b.DaemonPID()) < 200, nil }); err != nil {
		t.Error(err)
	}
	b.nothingCameOfIt()
}

// dial waits for room in the socket's backlog.
func dial(socket string) (net.Conn, error) {
	deadline := time.Now().Add(node.Patience)
	for {
		conn, err := net.Dial("unix", socket)
		if !errors.Is(err, syscall.EAGAIN) || time.Now().After(deadline) {
			return conn, err
		}
		time.Sleep(time.Millisecond)
	}
}

func count(t *testing.T, pid int) int {
	t.Helper()
	entries, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", pid))
	if err != nil {
		t.Fatal(err)
	}
	return len(entries)
}

// TestFaultyAnswersAreWhole: what a peer reads before it is cut is one whole answer or none.
func TestFaultyAnswersAreWhole(t *testing.T) {
	b := newBench(t)
	conn, err := net.Dial("unix", b.Socket)
	b.check(err)
	defer conn.Close()
	code, body := status(conn, request("POST", "/v1/prepare", "nonsense"))
	if code != http.StatusBadRequest || !bytes.HasSuffix([]byte(body), []byte("}\n")) || !strings.Contains(body, `"code"`) {
		t.Errorf("%d %q", code, body)
	}
}
