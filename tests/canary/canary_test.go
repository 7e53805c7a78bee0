// SPDX-License-Identifier: Apache-2.0

// Package canary runs `gpufence canary` on a node with simulated GPUs, real runc and the built
// programs, as it is and with a part taken away.
package canary

import (
	"context"
	"encoding/json"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/gpufence/gpufence/enforcer/kube"
	"github.com/gpufence/gpufence/tests/node"
)

func dist(t *testing.T) string {
	t.Helper()
	dir := os.Getenv("GPUFENCE_DIST")
	if dir == "" {
		dir = "../../dist"
	}
	dir, err := filepath.Abs(dir)
	if err != nil {
		t.Fatal(err)
	}
	return dir
}

func newNode(t *testing.T, options node.Options) *node.Node {
	t.Helper()
	options.Dist = dist(t)
	n, err := node.New(t.Context(), options)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := n.Close(context.WithoutCancel(t.Context())); err != nil {
			t.Error(err)
		}
	})
	if err := os.MkdirAll(n.Path("cdi"), 0o755); err != nil {
		t.Fatal(err)
	}
	out, err := exec.CommandContext(t.Context(), n.Dist("bin/simgpu"), "--dir", n.Path("sim"), "cdi", "--lib-dir", n.Dist("simgpu"), "--out", n.Path("cdi", "simgpu.json")).CombinedOutput()
	if err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	return n
}

// run is one `gpufence canary -o json`.
func run(t *testing.T, n *node.Node, args ...string) kube.Canary {
	t.Helper()
	before := cgroups(t)
	// The wrapper beside the program, under the engine's name, as a package installs them.
	cmd := exec.CommandContext(t.Context(), n.Dist("bin/gpufence"), append([]string{"canary", "-o", "json", "--socket", n.Socket, "--dir", n.Dir}, args...)...)
	cmd.Env = append(os.Environ(), "GPUFENCE_CONFIG="+n.ConfigPath())
	var stderr strings.Builder
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	var exit *exec.ExitError
	if err != nil && !errors.As(err, &exit) {
		t.Fatal(err)
	}
	var got kube.Canary
	if err := json.Unmarshal(out, &got); err != nil {
		t.Fatalf("%v: %s%s", err, out, stderr.String())
	}
	if got.Held != (exit == nil) {
		t.Errorf("held %v with %v", got.Held, exit)
	}
	left, err := filepath.Glob(n.Path("gpufence-canary-*"))
	if err != nil || len(left) > 0 {
		t.Errorf("%v is left, %v", left, err)
	}
	// Others may have canaries of theirs, which go.
	if err := node.Until(t.Context(), "no cgroup is left", func() (bool, error) {
		left = slices.DeleteFunc(cgroups(t), func(dir string) bool { return slices.Contains(before, dir) })
		return len(left) == 0, nil
	}); err != nil {
		t.Errorf("%v: %v", err, left)
	}
	return got
}

// cgroups are those of canaries, at the root of every hierarchy.
func cgroups(t *testing.T) (all []string) {
	t.Helper()
	for _, root := range []string{"/sys/fs/cgroup", "/sys/fs/cgroup/*"} {
		found, err := filepath.Glob(filepath.Join(root, "gpufence-canary*"))
		if err != nil {
			t.Fatal(err)
		}
		all = append(all, found...)
	}
	return all
}

func TestHeld(t *testing.T) {
	n := newNode(t, node.Options{Sim: []string{"--gpus", "2"}})
	for range 2 {
		got := run(t, n)
		if !got.Held || got.Level != "reactive" || len(got.Steps) != 6 || got.Started.IsZero() {
			t.Fatalf("%+v", got)
		}
	}
	events, err := n.Events(t.Context(), "registered", "ended")
	if err != nil || len(events) != 4 {
		t.Fatalf("%d events, %v", len(events), err)
	}
	for _, ev := range events {
		if _, ok := kube.Of(ev); ok {
			t.Errorf("a canary is an Event: %+v", ev)
		}
	}
}

// TestNotHeld takes one part away at a time: the step that needs it must fail.
func TestNotHeld(t *testing.T) {
	broken := filepath.Join(t.TempDir(), "gpufence-hook")
	if err := os.WriteFile(broken, []byte("#!/bin/sh\ncat >/dev/null\n"), 0o755); err != nil {
		t.Fatal(err)
	}
	for name, c := range map[string]struct {
		config []string
		args   []string
		want   string
	}{
		"a hook that does nothing": {config: []string{`# hook`}, want: "gpufenced holds it to its limit: it does not: gpufenced has it as prepared"},
		"runc without us":          {args: []string{"--runtime", "runc"}, want: "a limit without a unit is refused: it does not: it was created"},
		"no wrapper":               {args: []string{"--runtime", "/nonexistent/gpufence-runtime.cri"}, want: "no such file"},
		"nothing is enforced":      {config: []string{`mode = "observe"`}, want: "a limit without a unit is refused: it does not: it was created"},
		"keys are not accepted":    {config: []string{"[accept.cri]", "keys = false"}, want: "E1306"},
	} {
		t.Run(name, func(t *testing.T) {
			n := newNode(t, node.Options{Config: c.config})
			if name == "a hook that does nothing" {
				text, err := os.ReadFile(n.ConfigPath())
				if err != nil {
					t.Fatal(err)
				}
				text = []byte(strings.ReplaceAll(string(text), n.Dist("bin/gpufence-hook"), broken))
				if err := os.WriteFile(n.ConfigPath(), text, 0o600); err != nil {
					t.Fatal(err)
				}
			}
			if got := run(t, n, c.args...); got.Held || got.Undecided || !strings.Contains(got.Why, c.want) {
				t.Errorf("%+v\nwant %s", got, c.want)
			}
		})
	}
}

func TestDaemonAway(t *testing.T) {
	n := newNode(t, node.Options{})
	if err := n.StopDaemon(t.Context()); err != nil {
		t.Fatal(err)
	}
	if got := run(t, n); got.Held || !strings.Contains(got.Why, "gpufenced does not answer") {
		t.Errorf("%+v", got)
	}
}
