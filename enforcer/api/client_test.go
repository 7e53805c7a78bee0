// SPDX-License-Identifier: Apache-2.0

package api

import (
	"context"
	"errors"
	"io"
	"net"
	"path/filepath"
	"strings"
	"testing"

	"github.com/gpufence/gpufence/enforcer/quota"
)

func TestUnreachable(t *testing.T) {
	dir := t.TempDir()
	sock := filepath.Join(dir, "none")
	c := NewClient(sock, 0)
	_, err := c.Version(context.Background())
	if !errors.Is(err, ErrUnreachable) || !errors.Is(err, quota.CodeUnreachable) || quota.CodeOf(err) != quota.CodeUnreachable {
		t.Fatalf("got %v", err)
	}
	for _, want := range []string{sock, "systemctl start gpufenced", "no such file"} {
		if !strings.Contains(err.Error(), want) {
			t.Errorf("%q does not say %q", err, want)
		}
	}
	// Somebody who listens but is not us.
	l, err := net.Listen("unix", sock)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	answers := make(chan string, 1)
	go func() {
		for a := range answers {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			_, _ = conn.Read(make([]byte, 4096)) // whatever it is
			_, _ = io.WriteString(conn, a)       // the client judges what arrived
			_ = conn.Close()
		}
	}()
	defer close(answers)
	for _, tt := range []struct {
		answer string
		code   quota.Code
	}{
		{"", quota.CodeUnreachable},
		{"garbage\r\n\r\n", quota.CodeUnreachable},
		{"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nnope", quota.CodeBadAnswer},
		{"HTTP/1.1 200 OK\r\nContent-Length: 400\r\n\r\nnope", quota.CodeUnreachable},
		{"HTTP/1.1 500 Oh\r\nContent-Length: 4\r\n\r\nnope", quota.CodeBadAnswer},
		{"HTTP/1.1 500 Oh\r\nContent-Length: 2\r\n\r\n{}", quota.CodeBadAnswer},
	} {
		answers <- tt.answer
		if _, err := c.Version(context.Background()); !errors.Is(err, tt.code) {
			t.Errorf("%q gives %v", tt.answer, err)
		}
	}
	answers <- "HTTP/1.1 200 OK\r\n\r\nnot an event\n"
	if err := c.Events(context.Background(), 0, false, func(Event) error { return nil }); !errors.Is(err, quota.CodeBadAnswer) {
		t.Errorf("a bad event gives %v", err)
	}
}

func FuzzReadError(f *testing.F) {
	f.Add([]byte(`{"code":"E1203","message":"x"}`))
	f.Add([]byte(`{`))
	f.Fuzz(func(t *testing.T, b []byte) {
		err := readError(&answer{status: "500 x", body: strings.NewReader(string(b))})
		var e *Error
		if !errors.As(err, &e) || e.Code == "" || e.Message == "" {
			t.Errorf("no code or no message: %v", err)
		}
	})
}
