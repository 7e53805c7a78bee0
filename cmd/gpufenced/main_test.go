// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"os"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/rogpeppe/go-internal/testscript"

	"github.com/gpufence/gpufence/enforcer/api"
)

func TestMain(m *testing.M) {
	testscript.Main(m, map[string]func(){
		"gpufenced": func() {
			ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
			context.AfterFunc(ctx, stop)
			os.Exit(run(ctx, os.Args[1:], os.Getenv, os.Stdout, os.Stderr))
		},
	})
}

// Each script is one node: its own folders, no NVML.
func TestScripts(t *testing.T) {
	if os.Geteuid() != 0 {
		if os.Getenv("GPUFENCE_MUST") == "1" {
			t.Fatal("needs root")
		}
		t.Skip("SKIPPED: needs root")
	}
	testscript.Run(t, testscript.Params{
		Dir: "testdata/script",
		Setup: func(e *testscript.Env) error {
			dir, err := os.MkdirTemp("", "gpufenced") // a socket's path is short
			if err != nil {
				return err
			}
			e.Defer(func() { os.RemoveAll(dir) })
			e.Setenv("D", dir)
			e.Setenv("GPUFENCE_CONFIG", filepath.Join(e.WorkDir, "config.toml"))
			return nil
		},
		Cmds: map[string]func(*testscript.TestScript, bool, []string){
			"ask":    ask,
			"hangup": hangup,
			"event":  event,
		},
	})
}

// signal NAME: sends SIGHUP to the background gpufenced that answers on the socket.
func hangup(ts *testscript.TestScript, neg bool, args []string) {
	if neg || len(args) != 1 {
		ts.Fatalf("usage: hangup socket")
	}
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	v, err := api.NewClient(args[0], 20*time.Second).Version(ctx)
	ts.Check(err)
	p, err := os.FindProcess(v.PID)
	ts.Check(err)
	ts.Check(p.Signal(syscall.SIGHUP))
}

// event SOCKET TYPE TEXT: waits for an event of the type whose message has the text.
func event(ts *testscript.TestScript, neg bool, args []string) {
	if neg || len(args) != 3 {
		ts.Fatalf("usage: event socket type text")
	}
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	found := errors.New("found")
	err := api.NewClient(args[0], 20*time.Second).Events(ctx, 0, true, func(ev api.Event) error {
		if ev.Type == args[1] && strings.Contains(ev.Message, args[2]) {
			return found
		}
		return nil
	})
	if !errors.Is(err, found) {
		ts.Fatalf("no event %s with %q: %v", args[1], args[2], err)
	}
}

// ask [!] ask SOCKET WHAT [CODE]: asks gpufenced for its version, or to prepare a container with a
// GPU; with a code, the answer must be that refusal.
func ask(ts *testscript.TestScript, neg bool, args []string) {
	if len(args) < 2 {
		ts.Fatalf("usage: ask socket version|prepare [code]")
	}
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	wait := 20 * time.Second
	if neg {
		wait = 0
	}
	c := api.NewClient(args[0], wait)
	var err error
	switch args[1] {
	case "version":
		_, err = c.Version(ctx)
	case "prepare":
		_, err = c.Prepare(ctx, api.PrepareRequest{
			Key: api.ContainerKey{Engine: "cri", Scope: "s", ID: "a"}, Pod: api.PodRef{ID: "p", Name: "p"}, ContainerName: "main",
			Annotations: map[string]string{"gpufence.dev/memory.max": "1Gi"}, Devices: api.DeviceRequest{Selectors: []string{"0"}},
		})
	case "reload":
		_, err = c.Reload(ctx)
	case "quiesce":
		_, err = c.Quiesce(ctx, "test")
	case "disable":
		_, err = c.Disable(ctx, "test")
	case "resume":
		_, err = c.Resume(ctx)
	case "running", "quiesced", "disabled", "last-good", "file":
		var n api.Node
		if n, err = c.Node(ctx); err == nil && n.Switch.Position != args[1] && (args[1] != "last-good" || !n.Config.FromLastGood) && (args[1] != "file" || n.Config.FromLastGood || n.Config.Error != nil) {
			ts.Fatalf("the node is %+v with %+v", n.Switch, n.Config)
		}
	case "metrics":
		_, err = c.Metrics(ctx)
	default:
		ts.Fatalf("ask %s: unknown", args[1])
	}
	if len(args) > 2 {
		var e *api.Error
		if !errors.As(err, &e) || e.Code != args[2] {
			ts.Fatalf("got %v, want %s", err, args[2])
		}
		ts.Logf("%v", err)
		return
	}
	if (err != nil) != neg {
		ts.Fatalf("got %v", err)
	}
}
