// SPDX-License-Identifier: Apache-2.0

package server

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/gpufence/gpufence/enforcer/api"
	"github.com/gpufence/gpufence/enforcer/quota"
)

// attackers is how many connections a test holds at once, of the descriptors that it may have.
func attackers(t *testing.T) int {
	t.Helper()
	var limit syscall.Rlimit
	if err := syscall.Getrlimit(syscall.RLIMIT_NOFILE, &limit); err != nil {
		t.Fatal(err)
	}
	n := 10_000
	// Ours and the server's lie in one process here.
	if most := int(limit.Cur) - 2*maxConns - 256; most < n {
		t.Logf("only %d connections at once: this process may have %d descriptors", most, limit.Cur)
		n = most
	}
	return n
}

// TestTenThousandConnections: whoever connects and does not finish, in whatever way, keeps nobody
// out: not one honest request is lost, and memory stays bounded.
func TestTenThousandConnections(t *testing.T) {
	_, sock := serve(t, &fakeService{}, -1)
	c := api.NewClient(sock, 20*time.Second) // as patient as a container's start
	n := attackers(t)
	partial := []string{
		"",
		"GET /v1/contai",
		"GET /v1/version HTTP/1.1\r\nHost: x\r\n",
		"POST /v1/prepare HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000\r\n\r\n{\"bundle\":\"",
		"POST /v1/prepare HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nffff\r\n{",
	}
	stop := make(chan struct{})
	var held sync.WaitGroup
	var open atomic.Int64
	sem := make(chan struct{}, 64) // how many connect at one time
	for i := range n {
		held.Add(1)
		sem <- struct{}{}
		go func() {
			defer held.Done()
			conn, err := net.Dial("unix", sock)
			for try := 0; errors.Is(err, syscall.EAGAIN) && try < 5000; try++ {
				time.Sleep(time.Millisecond) // the backlog is full
				conn, err = net.Dial("unix", sock)
			}
			<-sem
			if err != nil {
				return // counted below
			}
			open.Add(1)
			_, _ = io.WriteString(conn, partial[i%len(partial)]) // the server may have closed it
			<-stop
			_ = conn.Close()
		}()
	}
	honest := make(chan error, 40)
	for range cap(honest) / 4 {
		go func() {
			for range 4 {
				ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
				_, err := c.Prepare(ctx, api.PrepareRequest{Key: api.ContainerKey{ID: "a"}})
				cancel()
				honest <- err
			}
		}()
	}
	for range cap(honest) {
		if err := <-honest; err != nil {
			t.Errorf("an honest request was lost: %v", err)
		}
	}
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	t.Logf("%d connections were opened, heap %d MiB", open.Load(), m.HeapInuse>>20)
	if open.Load() < int64(n)/2 {
		t.Errorf("only %d of %d connections came about: the test shows nothing", open.Load(), n)
	}
	if m.HeapInuse > 256<<20 {
		t.Errorf("heap %d MiB", m.HeapInuse>>20)
	}
	close(stop)
	held.Wait()
	if _, err := c.Version(context.Background()); err != nil {
		t.Error(err)
	}
}

func TestOldestUnfinishedConnectionMakesRoom(t *testing.T) {
	svc := &fakeService{block: make(chan struct{})}
	srv := New(svc, Options{ReadGID: -1, MaxConns: 3, Logf: t.Logf})
	sock := t.TempDir() + "/s"
	l, err := Listen(sock, -1)
	if err != nil {
		t.Fatal(err)
	}
	go srv.Serve(l) // ends with Shutdown
	defer srv.Shutdown(context.Background())
	c := api.NewClient(sock, 0)

	// One request that is being answered, two connections that say nothing: the older one goes.
	answered := make(chan error, 1)
	go func() {
		_, err := c.Register(context.Background(), api.RegisterRequest{})
		answered <- err
	}()
	count := func(busy bool) int {
		srv.conns.mu.Lock()
		defer srv.conns.mu.Unlock()
		n := 0
		for e := srv.conns.order.Front(); e != nil; e = e.Next() {
			if e.Value.(*conn).busy == busy {
				n++
			}
		}
		return n
	}
	wait := func(what string, f func() bool) {
		t.Helper()
		for deadline := time.Now().Add(20 * time.Second); !f(); time.Sleep(time.Millisecond) {
			if time.Now().After(deadline) {
				t.Fatal("it did not happen: " + what)
			}
		}
	}
	wait("a request is answered", func() bool { return count(true) == 1 })
	var idle [2]net.Conn
	for i := range idle {
		if idle[i], err = net.Dial("unix", sock); err != nil {
			t.Fatal(err)
		}
		defer idle[i].Close()
		wait("it is taken in", func() bool { return count(false) == i+1 })
	}
	if _, err := c.Version(context.Background()); err != nil {
		t.Fatal(err)
	}
	if err := idle[0].SetReadDeadline(time.Now().Add(20 * time.Second)); err != nil {
		t.Fatal(err)
	}
	if _, err := idle[0].Read(make([]byte, 1)); !errors.Is(err, io.EOF) {
		t.Errorf("the older one reads %v", err)
	}
	if err := idle[1].SetReadDeadline(time.Now().Add(10 * time.Millisecond)); err != nil {
		t.Fatal(err)
	}
	var timeout net.Error
	if _, err := idle[1].Read(make([]byte, 1)); !errors.As(err, &timeout) || !timeout.Timeout() {
		t.Errorf("the newer one reads %v", err)
	}
	close(svc.block)
	if err := <-answered; err != nil {
		t.Errorf("the request in progress: %v", err)
	}
}

func TestConnsAccounts(t *testing.T) {
	c := newConns(4, 2)
	add := func(uid uint32) *conn {
		a, b := net.Pipe()
		t.Cleanup(func() { a.Close(); b.Close() })
		return connOf(c.context(context.Background(), a, peerResult{peer: peer{UID: uid}}))
	}
	// A user's third connection costs his own oldest, never somebody else's.
	root, first, second := add(0), add(7), add(7)
	third := add(7)
	if root.evicted || !first.evicted || second.evicted || third.evicted {
		t.Errorf("evicted: %v %v %v %v", root.evicted, first.evicted, second.evicted, third.evicted)
	}
	c.state(first.net, http.StateClosed)
	// Those that are answered stay; where only such are, the new one goes.
	for _, o := range []*conn{root, second, third} {
		if !c.begin(o) {
			t.Fatal("gone")
		}
	}
	if o := add(7); !o.evicted || c.begin(o) {
		t.Error("a third one of the user came in")
	} else {
		c.state(o.net, http.StateClosed)
	}
	other := add(8)
	fifth := add(8)
	if !other.evicted || fifth.evicted {
		t.Error("over all limits the oldest without a whole request goes")
	}
	// Bytes: the largest unfinished body goes, then the one that asks for more.
	c.state(other.net, http.StateClosed)
	c.bytesMax = 100
	c.end(second)
	c.state(second.net, http.StateClosed)
	big, small := fifth, add(0)
	if !c.charge(big, 80) || !c.charge(small, 30) {
		t.Error("refused although somebody larger was there")
	}
	if !big.evicted || small.evicted || c.bytes != 30 {
		t.Errorf("big %v small %v bytes %d", big.evicted, small.evicted, c.bytes)
	}
	if c.charge(small, 80) || c.bytes != 0 {
		t.Errorf("over the bound alone: bytes %d", c.bytes)
	}
	c.end(small)
	for _, o := range []*conn{root, second, third, big, small} {
		c.state(o.net, http.StateClosed)
		c.state(o.net, http.StateClosed) // twice does no harm
	}
	if c.order.Len() != 0 || len(c.of) != 0 || len(c.connsOf) != 0 || c.bytes != 0 {
		t.Errorf("left over: %d %d %v %d", c.order.Len(), len(c.of), c.connsOf, c.bytes)
	}
	// Streams.
	var leave []func()
	for range maxStreamsUID {
		f, err := c.stream(7)
		if err != nil {
			t.Fatal(err)
		}
		leave = append(leave, f)
	}
	if _, err := c.stream(7); api.ErrorOf(err).Code != string(quota.CodeBusy) {
		t.Errorf("one more stream: %v", err)
	}
	for range maxStreams - maxStreamsUID {
		if _, err := c.stream(0); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := c.stream(0); api.ErrorOf(err).Code != string(quota.CodeBusy) {
		t.Errorf("one more of root: %v", err)
	}
	for _, f := range leave {
		f()
	}
	if _, err := c.stream(7); err != nil || c.streamsOf[7] != 1 {
		t.Errorf("after some left: %v, %v", err, c.streamsOf)
	}
}

// Many large bodies at one time: those that come whole are served or told to try again.
func TestLargeBodiesAtOnce(t *testing.T) {
	srv := New(&fakeService{}, Options{ReadGID: -1, Logf: t.Logf})
	sock := t.TempDir() + "/s"
	l, err := Listen(sock, -1)
	if err != nil {
		t.Fatal(err)
	}
	go srv.Serve(l) // ends with Shutdown
	defer srv.Shutdown(context.Background())
	body := fmt.Sprintf(`{"bundle":%q}`, strings.Repeat("x", api.MaxRequestBytes-100))
	hc := &http.Client{Transport: &http.Transport{DisableKeepAlives: true,
		DialContext: func(context.Context, string, string) (net.Conn, error) { return net.Dial("unix", sock) }}}
	var served, told, cut atomic.Int64
	var group sync.WaitGroup
	for range 64 {
		group.Go(func() {
			resp, err := hc.Post("http://x/v1/prepare", "application/json", strings.NewReader(body))
			if err != nil {
				cut.Add(1) // closed to make room
				return
			}
			defer resp.Body.Close()
			b, _ := io.ReadAll(resp.Body) // judged by its status
			switch {
			case resp.StatusCode == http.StatusOK:
				served.Add(1)
			case resp.StatusCode == http.StatusServiceUnavailable && bytes.Contains(b, []byte(quota.CodeBusy)):
				told.Add(1)
			default:
				t.Errorf("status %d: %.200s", resp.StatusCode, b)
			}
		})
	}
	group.Wait()
	t.Logf("served %d, told to try again %d, cut %d", served.Load(), told.Load(), cut.Load())
	if served.Load() == 0 {
		t.Error("nobody was served")
	}
	if _, err := api.NewClient(sock, 0).Version(context.Background()); err != nil {
		t.Error(err)
	}
}

func TestProbes(t *testing.T) {
	svc := &fakeService{health: api.Health{Live: true, Why: "NVML is not there"}}
	srv := New(svc, Options{ReadGID: -1, Logf: t.Logf, Metrics: http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		_, _ = io.WriteString(w, "a 1\n") // the test reads it
	})})
	sock := t.TempDir() + "/s"
	l, err := Listen(sock, -1)
	if err != nil {
		t.Fatal(err)
	}
	go srv.Serve(l) // ends with Shutdown
	defer srv.Shutdown(context.Background())
	tcp, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	ctx, stop := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- srv.ServeProbes(ctx, tcp) }()

	unixClient := &http.Client{Transport: &http.Transport{DisableKeepAlives: true,
		DialContext: func(context.Context, string, string) (net.Conn, error) { return net.Dial("unix", sock) }}}
	get := func(hc *http.Client, method, url string) (int, string) {
		t.Helper()
		req, err := http.NewRequest(method, url, nil)
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
		return resp.StatusCode, string(b)
	}
	for _, side := range []struct {
		hc   *http.Client
		base string
	}{{unixClient, "http://x"}, {http.DefaultClient, "http://" + tcp.Addr().String()}} {
		svc.mu.Lock()
		svc.health = api.Health{Live: true, Why: "NVML is not there"}
		svc.mu.Unlock()
		for _, tt := range []struct {
			method, path string
			status       int
			say          string
		}{
			{"GET", "/metrics", 200, "a 1\n"},
			{"HEAD", "/metrics", 200, ""},
			{"GET", "/healthz", 200, `"live":true`},
			{"GET", "/readyz", 503, "NVML is not there"},
			{"POST", "/metrics", 405, "use GET"},
			{"GET", "/nope", 404, "E1507"},
		} {
			if st, body := get(side.hc, tt.method, side.base+tt.path); st != tt.status || !strings.Contains(body, tt.say) {
				t.Errorf("%s %s%s: %d %q", tt.method, side.base, tt.path, st, body)
			}
		}
		svc.mu.Lock()
		svc.health = api.Health{Live: true, Ready: true}
		svc.mu.Unlock()
		if st, _ := get(side.hc, "GET", side.base+"/readyz"); st != 200 {
			t.Errorf("ready: %d", st)
		}
		svc.mu.Lock()
		svc.health = api.Health{}
		svc.mu.Unlock()
		for _, p := range []string{"/healthz", "/readyz"} {
			if st, _ := get(side.hc, "GET", side.base+p); st != 503 {
				t.Errorf("%s of a dead one: %d", p, st)
			}
		}
	}
	// Nothing of the protocol is on TCP.
	if st, body := get(http.DefaultClient, "GET", "http://"+tcp.Addr().String()+"/v1/containers"); st != 404 {
		t.Errorf("containers over TCP: %d %s", st, body)
	}
	stop()
	if err := <-done; err != nil {
		t.Error(err)
	}
	if text, err := api.NewClient(sock, 0).Metrics(context.Background()); err != nil || string(text) != "a 1\n" {
		t.Errorf("metrics: %q, %v", text, err)
	}
	// Without metrics there is no such path.
	_, plain := serve(t, svc, -1)
	if _, err := api.NewClient(plain, 0).Metrics(context.Background()); !errors.Is(err, quota.CodeBadRequest) {
		t.Errorf("without metrics: %v", err)
	}
}

func TestSwitchAndApplyTravel(t *testing.T) {
	c, _ := serve(t, applying{&fakeService{}}, -1)
	ctx := context.Background()
	if sw, err := c.Quiesce(ctx, "driver"); err != nil || sw.Position != api.SwitchQuiesced || sw.Reason != "driver" {
		t.Errorf("quiesce: %+v, %v", sw, err)
	}
	if sw, err := c.Disable(ctx, "incident"); err != nil || sw.Position != api.SwitchDisabled || sw.Reason != "incident" {
		t.Errorf("disable: %+v, %v", sw, err)
	}
	if sw, err := c.Resume(ctx); err != nil || sw.Position != api.SwitchRunning {
		t.Errorf("resume: %+v, %v", sw, err)
	}
	if info, err := c.Reload(ctx); err != nil || info.Path != "/etc/x" {
		t.Errorf("reload: %+v, %v", info, err)
	}
	if n, err := c.Node(ctx); err != nil || n.LastEvent != 7 {
		t.Errorf("node: %+v, %v", n, err)
	}
	resp, err := c.Apply(ctx, api.ApplyRequest{Pods: []api.ApplyPod{{Namespace: "a", Name: "b"}}})
	if err != nil || len(resp.Pods) != 1 || resp.Pods[0].Name != "b" {
		t.Errorf("apply: %+v, %v", resp, err)
	}
	plain, _ := serve(t, &fakeService{}, -1)
	if _, err := plain.Apply(ctx, api.ApplyRequest{}); !errors.Is(err, quota.CodeNotEnforced) {
		t.Errorf("apply where it is not built: %v", err)
	}
}
