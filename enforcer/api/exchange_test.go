// SPDX-License-Identifier: Apache-2.0

package api

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"testing/iotest"
	"time"

	"github.com/gpufence/gpufence/enforcer/quota"
)

func TestReadAnswer(t *testing.T) {
	long := strings.Repeat("x", maxLineBytes)
	for _, tt := range []struct {
		name, text string
		code       int
		body       string
		head, rest string // what the error of the head says, or of the body
	}{
		{name: "length", text: "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}more", code: 200, body: "{}"},
		{name: "length of nothing", text: "HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n", code: 200},
		{name: "until the end", text: "HTTP/1.1 200 OK\r\nServer: x\r\n\r\nall of it", code: 200, body: "all of it"},
		{name: "no words", text: "HTTP/1.1 404\r\ncontent-LENGTH:1\r\n\r\nx", code: 404, body: "x"},
		{name: "chunks", text: "HTTP/1.1 503 Busy\r\nTransfer-Encoding: Chunked\r\n\r\n3\r\nabc\r\n0A ;a=b\r\n0123456789\r\n0\r\nT: x\r\n\r\n", code: 503, body: "abc0123456789"},
		{name: "no chunk", text: "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", code: 200},
		{name: "nothing by its code", text: "HTTP/1.1 204 No Content\r\n\r\nx", code: 204},

		{name: "nothing", text: "", head: "EOF"},
		{name: "half a line", text: "HTTP/1.1 200", head: "unexpected EOF"},
		{name: "half a head", text: "HTTP/1.1 200 OK\r\n", head: "unexpected EOF"},
		{name: "another protocol", text: "SSH-2.0-x\r\n\r\n", head: "is no HTTP"},
		{name: "an older version", text: "HTTP/1.0 200 OK\r\n\r\n", head: "is no HTTP"},
		{name: "another version", text: "HTTP/2 200 OK\r\n\r\n", head: "is no HTTP"},
		{name: "no code", text: "HTTP/1.1 OK\r\n\r\n", head: "is no HTTP"},
		{name: "a signed code", text: "HTTP/1.1 +20 OK\r\n\r\n", head: "is no HTTP"},
		{name: "a long code", text: "HTTP/1.1 0200 OK\r\n\r\n", head: "is no HTTP"},
		{name: "an interim answer", text: "HTTP/1.1 100 Continue\r\n\r\n", head: "is no HTTP"},
		{name: "a code of nobody", text: "HTTP/1.1 600 X\r\n\r\n", head: "is no HTTP"},
		{name: "a line of its own kind", text: "HTTP/1.1 200 OK\n\n", head: "does not end"},
		{name: "a return inside", text: "HTTP/1.1 200 OK\r\nA: b\rc\r\n\r\n", head: "does not end"},
		{name: "no colon", text: "HTTP/1.1 200 OK\r\nx\r\n\r\n", head: "header line"},
		{name: "no name", text: "HTTP/1.1 200 OK\r\n: x\r\n\r\n", head: "header line"},
		{name: "a folded line", text: "HTTP/1.1 200 OK\r\nA: b\r\n c: d\r\n\r\n", head: "header line"},
		{name: "a space before the colon", text: "HTTP/1.1 200 OK\r\nContent-Length : 1\r\n\r\nx", head: "header line"},
		{name: "a length that is none", text: "HTTP/1.1 200 OK\r\nContent-Length: +2\r\n\r\n{}", head: "is no number"},
		{name: "a length beyond numbers", text: "HTTP/1.1 200 OK\r\nContent-Length: 9223372036854775808\r\n\r\n{}", head: "is no number"},
		{name: "the length twice", text: "HTTP/1.1 200 OK\r\nContent-Length: 2\r\nContent-Length: 2\r\n\r\n{}", head: "comes twice"},
		{name: "two kinds of length", text: "HTTP/1.1 200 OK\r\nContent-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n{}", head: "two lengths"},
		{name: "an encoding of its own", text: "HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip\r\n\r\n{}", head: "encoding"},
		{name: "a long line", text: "HTTP/1.1 200 OK\r\nA: " + long + "\r\n\r\n", head: "more than"},
		{name: "many lines", text: "HTTP/1.1 200 OK\r\n" + strings.Repeat("A: "+long[:1000]+"\r\n", 100) + "\r\n", head: "more than"},

		{name: "less than it said", text: "HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\n{}", code: 200, body: "{}", rest: "unexpected EOF"},
		{name: "no length of a chunk", text: "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", code: 200, rest: "unexpected EOF"},
		{name: "a chunk without end", text: "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n", code: 200, body: "abc", rest: "unexpected EOF"},
		{name: "half a chunk", text: "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\na", code: 200, body: "a", rest: "unexpected EOF"},
		{name: "a chunk without a length", text: "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n\r\n", code: 200, rest: "is no number"},
		{name: "a chunk of less than nothing", text: "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n-1\r\n", code: 200, rest: "is no number"},
		{name: "a chunk beyond numbers", text: "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n8000000000000000\r\n", code: 200, rest: "is no number"},
		{name: "a chunk that is longer", text: "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nab\r\n0\r\n\r\n", code: 200, body: "a", rest: "longer than it said"},
		{name: "half a trailer", text: "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n0\r\nT: x", code: 200, rest: "unexpected EOF"},
		{name: "trailers without end", text: "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n" + strings.Repeat("A: "+long[:1000]+"\r\n", 100), code: 200, rest: "more than"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			// A peer may cut its answer anywhere.
			for _, r := range []io.Reader{strings.NewReader(tt.text), iotest.OneByteReader(strings.NewReader(tt.text))} {
				a, err := readAnswer(bufio.NewReaderSize(r, maxLineBytes))
				if tt.head != "" {
					if err == nil || !strings.Contains(err.Error(), tt.head) {
						t.Errorf("the head gives %v, want %q", err, tt.head)
					}
					if errors.Is(err, io.EOF) != (tt.text == "") {
						t.Errorf("%v is io.EOF, which says that nothing came", err)
					}
					continue
				}
				if err != nil {
					t.Fatal(err)
				}
				body, err := io.ReadAll(a.body)
				if a.code != tt.code || string(body) != tt.body {
					t.Errorf("got %d %q, want %d %q", a.code, body, tt.code, tt.body)
				}
				if tt.rest == "" && err != nil || tt.rest != "" && (err == nil || !strings.Contains(err.Error(), tt.rest)) {
					t.Errorf("the body ends with %v, want %q", err, tt.rest)
				}
				if _, again := a.body.Read(make([]byte, 1)); tt.rest != "" && (again == nil || errors.Is(again, io.EOF)) {
					t.Errorf("read again, a broken body ends with %v", again)
				}
			}
		})
	}
}

// FuzzReadAnswer: whatever is answered, reading it ends, and what is taken for whole is what
// net/http reads of it.
func FuzzReadAnswer(f *testing.F) {
	for _, s := range []string{
		"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}",
		"HTTP/1.1 422 Unprocessable Entity\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n2;x\r\n{}\r\n0\r\nA: b\r\n\r\n",
		"HTTP/1.1 200\r\n\r\nuntil the end", "HTTP/1.0 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", "HTTP/1.1 204 \r\n\r\n", "HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n{}", "\r\n",
	} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, text []byte) {
		a, err := readAnswer(bufio.NewReaderSize(bytes.NewReader(text), maxLineBytes))
		if err != nil {
			if strings.ContainsAny(err.Error(), "\r\n") || len(err.Error()) > 400 {
				t.Errorf("not one short line: %q", err)
			}
			return
		}
		body, err := io.ReadAll(a.body)
		if len(body) > len(text) {
			t.Fatalf("%d bytes came of %d", len(body), len(text))
		}
		if err != nil {
			return
		}
		std, stdErr := http.ReadResponse(bufio.NewReader(bytes.NewReader(text)), nil)
		if stdErr != nil {
			return // it minds names and values that mean nothing to us
		}
		defer std.Body.Close()
		stdBody, stdErr := io.ReadAll(std.Body)
		if stdErr == nil && (std.StatusCode != a.code || !bytes.Equal(stdBody, body)) {
			t.Errorf("%d %q, and net/http reads %d %q", a.code, body, std.StatusCode, stdBody)
		}
	})
}

// answering listens and gives each connection to f, which closes it.
func answering(t *testing.T, f func(net.Conn)) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "gpufence-api") // t.TempDir may be too long for a socket's path
	if err != nil {
		t.Fatal(err)
	}
	l, err := net.Listen("unix", filepath.Join(dir, "s"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close(); os.RemoveAll(dir) })
	go func() {
		for {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			go f(conn)
		}
	}()
	return l.Addr().String()
}

// TestRequestIsHTTP: a server that is not ours reads the same request.
func TestRequestIsHTTP(t *testing.T) {
	for _, body := range [][]byte{nil, []byte(`{"a":1}`), {}} {
		method := methodPost
		if body == nil {
			method = methodGet
		}
		req, err := http.ReadRequest(bufio.NewReader(bytes.NewReader(request(method, "/v1/containers/a%2Fb", body))))
		if err != nil {
			t.Fatal(err)
		}
		got, err := io.ReadAll(req.Body)
		if err != nil || !bytes.Equal(got, body) || req.Method != method || req.URL.EscapedPath() != "/v1/containers/a%2Fb" ||
			!req.Close || req.Host != "gpufenced" || req.ContentLength != int64(len(body)) {
			t.Errorf("%q is read as %+v with %q, %v", body, req, got, err)
		}
	}
}

// TestAnswerBeforeTheRequestIsRead: the refusal counts, not that the rest could not be sent.
func TestAnswerBeforeTheRequestIsRead(t *testing.T) {
	sock := answering(t, func(c net.Conn) {
		_, _ = c.Read(make([]byte, 100))
		_, _ = io.WriteString(c, "HTTP/1.1 413 Too Large\r\nContent-Length: 38\r\n\r\n"+`{"code":"E1001","message":"too large"}`)
		_ = c.Close()
	})
	err := NewClient(sock, 0).Unregister(context.Background(), UnregisterRequest{Key: ContainerKey{ID: strings.Repeat("x", 4<<20)}})
	var e *Error
	if !errors.As(err, &e) || e.Code != "E1001" {
		t.Errorf("got %v", err)
	}
}

// TestClosedBeforeTheAnswer: the request is made again as long as the client waits, and not after.
func TestClosedBeforeTheAnswer(t *testing.T) {
	var calls atomic.Int32
	sock := answering(t, func(c net.Conn) {
		_, _ = c.Read(make([]byte, 4096))
		if calls.Add(1) == 3 {
			_, _ = io.WriteString(c, "HTTP/1.1 200 OK\r\n\r\n{}")
		}
		_ = c.Close()
	})
	if _, err := NewClient(sock, 0).Version(context.Background()); !errors.Is(err, ErrUnreachable) {
		t.Errorf("without waiting: %v", err)
	}
	if _, err := NewClient(sock, 20*time.Second).Version(context.Background()); err != nil || calls.Load() != 3 {
		t.Errorf("with waiting: %v after %d calls", err, calls.Load())
	}
}

// TestSilentPeer: whoever accepts and says nothing, or half, holds nobody longer than asked for.
func TestSilentPeer(t *testing.T) {
	for _, said := range []string{"", "HTTP/1.1 200", "HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n{"} {
		sock := answering(t, func(c net.Conn) {
			_, _ = io.WriteString(c, said)
			_, _ = io.Copy(io.Discard, c) // until the client is gone
			_ = c.Close()
		})
		started := time.Now()
		ctx, cancel := context.WithTimeout(context.Background(), 50*time.Millisecond)
		_, err := NewClient(sock, 0).Version(ctx)
		cancel()
		if !errors.Is(err, ErrUnreachable) {
			t.Errorf("after %q: %v", said, err)
		}
		ctx, cancel = context.WithCancel(context.Background())
		time.AfterFunc(50*time.Millisecond, cancel)
		err = NewClient(sock, 0).Events(ctx, 0, true, func(Event) error { return nil })
		if !errors.Is(err, context.Canceled) {
			t.Errorf("events given up after %q: %v", said, err)
		}
		took := time.Since(started)
		t.Logf("after %q: gave up twice within %v", said, took)
		if took > 20*100*time.Millisecond {
			t.Errorf("it hung for %v", took)
		}
	}
}

// TestHugeAnswer: no more of it is kept than the protocol allows.
func TestHugeAnswer(t *testing.T) {
	piece := bytes.Repeat([]byte(" "), 1<<20)
	sock := answering(t, func(c net.Conn) {
		defer c.Close()
		_, _ = c.Read(make([]byte, 4096))
		if _, err := io.WriteString(c, "HTTP/1.1 200 OK\r\n\r\n"); err != nil {
			return
		}
		for range MaxResponseBytes>>20 + 2 {
			if _, err := c.Write(piece); err != nil {
				return
			}
		}
	})
	if _, err := NewClient(sock, 0).Version(context.Background()); !errors.Is(err, quota.CodeBadAnswer) {
		t.Errorf("got %v", err)
	}
}
