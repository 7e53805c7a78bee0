// SPDX-License-Identifier: Apache-2.0

// Package simtest runs a simulated GPU inside a test's own process.
package simtest

import (
	"context"
	"log"
	"os"
	"path/filepath"
	"testing"

	"github.com/spf13/pflag"

	"github.com/gpufence/gpufence/tests/simgpu/server"
)

// Start runs a simgpud with these flags until the test ends, and gives the folder of its
// sockets, for $SIMGPU_DIR of the clients. The folder's path is short, since a socket's has 108 bytes.
func Start(t testing.TB, flags ...string) (string, *server.Server) {
	t.Helper()
	dir, err := os.MkdirTemp("", "simgpu-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := os.RemoveAll(dir); err != nil {
			t.Error(err)
		}
	})
	var f server.Flags
	set := pflag.NewFlagSet("simgpud", pflag.ContinueOnError)
	f.Register(set)
	if err := set.Parse(append([]string{"--dir", dir}, flags...)); err != nil {
		t.Fatal(err)
	}
	cfg, err := f.Config()
	if err != nil {
		t.Fatal(err)
	}
	cfg.Log = log.New(t.Output(), "simgpud: ", 0)
	s, err := server.New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	ready, done := make(chan struct{}), make(chan error, 1)
	go func() { done <- s.Run(ctx, func() { close(ready) }) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Errorf("stop simgpud: %v", err)
		}
	})
	select {
	case <-ready:
	case err := <-done:
		done <- err
		t.FailNow()
	}
	return dir, s
}

// Dist is the folder of what `make build` made: $GPUFENCE_DIST, or dist at the top of the
// repository. The test fails if `name` is not in it.
func Dist(t testing.TB, name string) string {
	t.Helper()
	dist := os.Getenv("GPUFENCE_DIST")
	if dist == "" {
		dir, err := os.Getwd()
		if err != nil {
			t.Fatal(err)
		}
		for !exists(filepath.Join(dir, "go.mod")) {
			if dir == filepath.Dir(dir) {
				t.Fatal("find the top of the repository: no go.mod above the working folder")
			}
			dir = filepath.Dir(dir)
		}
		dist = filepath.Join(dir, "dist")
	}
	path := filepath.Join(dist, name)
	if !exists(path) {
		t.Fatalf("find %s: run make build first", path)
	}
	return path
}

func exists(path string) bool {
	_, err := os.Stat(path)
	return err == nil
}
