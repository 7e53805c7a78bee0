// SPDX-License-Identifier: Apache-2.0

package oci

import (
	"context"
	"errors"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"github.com/gpufence/gpufence/enforcer/api"
	"github.com/gpufence/gpufence/enforcer/api/server"
)

// daemon stands in for gpufenced behind the real server of its protocol: it records what it
// hears and says what the test wants.
type daemon struct {
	server.Service // the rest is not called
	socket         string

	mu           sync.Mutex
	prepared     []api.PrepareRequest
	registered   []api.RegisterRequest
	unregistered []api.UnregisterRequest

	preparing func() // what happens before it answers
	answer    api.PrepareResponse
	refuse    error
	hang      time.Duration
}

func startDaemon(t *testing.T) *daemon {
	t.Helper()
	d := &daemon{socket: filepath.Join(t.TempDir(), "s")}
	l, err := server.Listen(d.socket, -1)
	if err != nil {
		t.Fatal(err)
	}
	s := server.New(d, server.Options{Logf: t.Logf})
	done := make(chan error, 1)
	go func() { done <- s.Serve(l) }()
	t.Cleanup(func() {
		if err := s.Shutdown(context.Background()); err != nil {
			t.Error(err)
		}
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
	return d
}

func (d *daemon) wait(ctx context.Context) error {
	select {
	case <-time.After(d.hang):
		return d.refuse
	case <-ctx.Done():
		return errors.New("the caller went away")
	}
}

func (d *daemon) Prepare(ctx context.Context, r api.PrepareRequest) (api.PrepareResponse, error) {
	d.mu.Lock()
	d.prepared = append(d.prepared, r)
	d.mu.Unlock()
	if d.preparing != nil {
		d.preparing()
	}
	return d.answer, d.wait(ctx)
}

func (d *daemon) Register(ctx context.Context, r api.RegisterRequest) (api.RegisterResponse, error) {
	d.mu.Lock()
	d.registered = append(d.registered, r)
	d.mu.Unlock()
	return api.RegisterResponse{Level: "reactive", Notices: []string{"nobody should see this"}}, d.wait(ctx)
}

func (d *daemon) Unregister(ctx context.Context, r api.UnregisterRequest) error {
	d.mu.Lock()
	d.unregistered = append(d.unregistered, r)
	d.mu.Unlock()
	return d.wait(ctx)
}
