// SPDX-License-Identifier: Apache-2.0

package oci

import (
	"bytes"
	"context"
	"errors"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/gpufence/gpufence/enforcer/api"
	"github.com/gpufence/gpufence/enforcer/quota"
)

func TestParseHookArgs(t *testing.T) {
	got, err := ParseHookArgs([]string{"createRuntime", "--config", "/c", "--socket=/s", "--engine", "cri", "--scope", "/r", "--best-effort"})
	want := HookArgs{Stage: "createRuntime", ConfigPath: "/c", Socket: "/s", Engine: quota.EngineCRI, Scope: "/r", BestEffort: true}
	if err != nil || got != want {
		t.Errorf("got %+v, %v", got, err)
	}
	for _, args := range []string{
		"", "createContainer --engine oci --scope /r", "--engine oci --scope /r", "poststop", "poststop --engine oci", "poststop --scope /r",
		"poststop --engine lxc --scope /r", "poststop --engine oci --scope", "poststop --engine oci --scope /r extra", "poststop --engine oci --scope /r --new x",
		"poststop --engine oci --scope=",
	} {
		if _, err := ParseHookArgs(strings.Fields(args)); !errors.Is(err, quota.CodeUsage) {
			t.Errorf("%q: %v", args, err)
		}
	}
}

func TestParseState(t *testing.T) {
	got, err := ParseState([]byte(`{"ociVersion":"1.2.0","id":"c1","status":"creating","pid":42,"bundle":"/b","annotations":{"a":"b"},"root":"/crun"}`), true)
	if err != nil || got != (State{ID: "c1", Status: "creating", PID: 42, Bundle: "/b"}) {
		t.Errorf("got %+v, %v", got, err)
	}
	if _, err := ParseState([]byte(`{"id":"c1","status":"stopped"}`), false); err != nil {
		t.Error(err)
	}
	for name, text := range map[string]string{
		"empty": "", "space": " \n", "garbage": "\x00", "truncated": `{"id":"c1"`, "array": "[]", "number": "1", "two": `{"id":"c1","pid":1}{}`,
		"no id": `{"pid":1}`, "empty id": `{"id":"","pid":1}`, "id with a slash": `{"id":"../x","pid":1}`, "id with a newline": `{"id":"a\nb","pid":1}`,
		"long id": `{"id":"` + strings.Repeat("x", 2000) + `","pid":1}`, "id is a number": `{"id":7,"pid":1}`,
		"no pid": `{"id":"c1"}`, "pid 0": `{"id":"c1","pid":0}`, "pid -1": `{"id":"c1","pid":-1}`, "pid is text": `{"id":"c1","pid":"1"}`,
		"pid too large": `{"id":"c1","pid":99999999999999999999}`, "fraction": `{"id":"c1","pid":1.5}`,
		"relative bundle": `{"id":"c1","pid":1,"bundle":"b"}`, "huge": `{"id":"c1","pid":1,"x":"` + strings.Repeat("x", maxStateBytes) + `"}`,
	} {
		_, err := ParseState([]byte(text), true)
		if !errors.Is(err, quota.CodeHookState) || strings.ContainsRune(err.Error(), '\n') {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func FuzzParseState(f *testing.F) {
	f.Add([]byte(`{"ociVersion":"1.2.0","id":"c1","status":"creating","pid":42,"bundle":"/b"}`), true)
	f.Add([]byte(`{"id":"c1"}`), false)
	f.Add([]byte(`{"ID":"c1","Id":"/"}`), false)
	f.Fuzz(func(t *testing.T, text []byte, needPID bool) {
		s, err := ParseState(text, needPID)
		if err != nil {
			if !errors.Is(err, quota.CodeHookState) {
				t.Fatalf("error without its code: %v", err)
			}
			return
		}
		if s.ID == "" || strings.ContainsAny(s.ID, "/\n ") || needPID && s.PID <= 0 || s.Bundle != "" && !filepath.IsAbs(s.Bundle) {
			t.Fatalf("accepted %+v", s)
		}
	})
}

func TestHook(t *testing.T) {
	const state = `{"ociVersion":"1.2.0","id":"c1","status":"creating","pid":42,"bundle":"/b"}`
	refusal := quota.NewError(quota.CodeCgroupShared, "the cgroup of container c1 holds other processes")
	down := "gpufenced does not answer on "
	tests := []struct {
		name   string
		stage  string
		best   bool
		open   bool // fail-open
		stdin  string
		refuse error
		hang   time.Duration
		down   bool
		exit   int
		stderr string // contained; "" means nothing is written
	}{
		{name: "registers", stage: "createRuntime", stdin: state},
		{name: "older runtimes", stage: "prestart", stdin: state},
		{name: "refused", stage: "createRuntime", stdin: state, refuse: refusal, exit: 1, stderr: "gpufence: E1602 the cgroup of container c1"},
		{name: "down", stage: "createRuntime", stdin: state, down: true, exit: 1, stderr: down},
		{name: "fail open, down", stage: "createRuntime", open: true, stdin: state, down: true, stderr: down},
		{name: "fail open, refused", stage: "createRuntime", open: true, stdin: state, refuse: refusal, exit: 1, stderr: "E1602"},
		{name: "fail open, garbage", stage: "createRuntime", open: true, stdin: "garbage", exit: 1, stderr: "E1009"},
		{name: "garbage", stage: "createRuntime", stdin: "garbage", exit: 1, stderr: "gpufence: E1009 "},
		{name: "pid 0", stage: "createRuntime", stdin: `{"id":"c1","pid":0}`, exit: 1, stderr: "gpufence: E1009 "},
		{name: "best effort, refused", stage: "createRuntime", best: true, stdin: state, refuse: refusal, stderr: "E1602"},
		{name: "best effort, down", stage: "createRuntime", best: true, stdin: state, down: true, stderr: down},
		{name: "best effort, garbage", stage: "createRuntime", best: true, stdin: "", stderr: "E1009"},
		{name: "poststop", stage: "poststop", stdin: `{"id":"c1","status":"stopped","bundle":"/b"}`},
		{name: "poststop, down", stage: "poststop", stdin: state, down: true, stderr: down},
		{name: "poststop, refused", stage: "poststop", stdin: state, refuse: refusal, stderr: "E1602"},
		{name: "poststop, garbage", stage: "poststop", stdin: "{", stderr: "E1009"},
		{name: "poststop, hung", stage: "poststop", stdin: state, hang: time.Minute, stderr: down},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			d := startDaemon(t)
			d.refuse, d.hang = test.refuse, test.hang
			args := HookArgs{Stage: test.stage, Engine: quota.EngineCRI, Scope: "/r", BestEffort: test.best, Socket: d.socket}
			if test.down {
				args.Socket = filepath.Join(t.TempDir(), "none")
			}
			var stderr bytes.Buffer
			exit := Hook{
				Args: args, Settings: func() Settings { return Settings{WaitSocket: 30 * time.Millisecond, FailOpen: test.open} }, Stdin: strings.NewReader(test.stdin), Stderr: &stderr,
			}.Run(t.Context())
			if exit != test.exit {
				t.Errorf("exit %d", exit)
			}
			if got := stderr.String(); test.stderr == "" && got != "" || !strings.Contains(got, test.stderr) || strings.Count(got, "\n") > 1 {
				t.Errorf("stderr %q", got)
			}
			key := api.ContainerKey{Engine: quota.EngineCRI, Scope: "/r", ID: "c1"}
			var registered []api.RegisterRequest
			var unregistered []api.UnregisterRequest
			if heard := !test.down && strings.Contains(test.stdin, `"ociVersion"`) || test.name == "poststop"; heard {
				if test.stage == "poststop" {
					unregistered = []api.UnregisterRequest{{Key: key}}
				} else {
					registered = []api.RegisterRequest{{Key: key, PID: 42, Bundle: "/b"}}
				}
			}
			d.mu.Lock()
			defer d.mu.Unlock()
			if diff := cmp.Diff(registered, d.registered) + cmp.Diff(unregistered, d.unregistered); diff != "" {
				t.Error(diff)
			}
		})
	}
}

func TestHookTakesTheSocketOfTheConfiguration(t *testing.T) {
	d := startDaemon(t)
	var stderr bytes.Buffer
	exit := Hook{
		Args: HookArgs{Stage: "poststop", Engine: quota.EngineOCI, Scope: "default"}, Settings: func() Settings { return Settings{Socket: d.socket} },
		Stdin: strings.NewReader(`{"id":"c1"}`), Stderr: &stderr,
	}.Run(t.Context())
	if exit != 0 || stderr.Len() != 0 || len(d.unregistered) != 1 {
		t.Errorf("exit %d, %q, %v", exit, stderr.String(), d.unregistered)
	}
}

// TestHookReadsNoSettings: where gpufenced answers, the hook need not know what holds otherwise.
func TestHookReadsNoSettings(t *testing.T) {
	d := startDaemon(t)
	for _, stage := range []string{"createRuntime", "poststop"} {
		var stderr bytes.Buffer
		exit := Hook{
			Args: HookArgs{Stage: stage, Engine: quota.EngineOCI, Scope: "default", Socket: d.socket}, Settings: func() Settings {
				t.Errorf("%s read the settings", stage)
				return Settings{}
			},
			Stdin: strings.NewReader(`{"id":"c1","pid":42}`), Stderr: &stderr,
		}.Run(t.Context())
		if exit != 0 || stderr.Len() != 0 {
			t.Errorf("%s: exit %d, %q", stage, exit, stderr.String())
		}
	}
}

// TestHookWaits: gpufenced is restarted while a container starts.
func TestHookWaits(t *testing.T) {
	d := startDaemon(t)
	away := filepath.Join(t.TempDir(), "s")
	var stderr bytes.Buffer
	exit := Hook{
		Args: HookArgs{Stage: "createRuntime", Engine: quota.EngineOCI, Scope: "default", Socket: away}, Settings: func() Settings {
			// It was looked for in vain by now.
			if err := os.Symlink(d.socket, away); err != nil {
				t.Error(err)
			}
			return Settings{WaitSocket: 20 * time.Second}
		},
		Stdin: strings.NewReader(`{"id":"c1","pid":42}`), Stderr: &stderr,
	}.Run(t.Context())
	if exit != 0 || stderr.Len() != 0 || len(d.registered) != 1 {
		t.Errorf("exit %d, %q, %v", exit, stderr.String(), d.registered)
	}
}

func TestReadAllDoesNotHang(t *testing.T) {
	r, w := io.Pipe()
	defer w.Close()
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Millisecond)
	defer cancel()
	if _, err := readAll(ctx, r, maxStateBytes); err == nil {
		t.Error("read a stdin that nobody closes")
	}
}
